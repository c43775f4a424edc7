"""Merging runs of several ranks, and taking them apart again, against results calculated by hand."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from build.examples import examples
from build.golden import message
from build.merging import ADD, MINE, MUL, NET, calls, jobs, layer, line, run_of, timeline
from build.models import Mlp
from build.warnings import run_warnings, sentences
from hypothesis import given
from hypothesis import strategies as st

import torchprof
from torchprof import TorchprofError
from torchprof.run import processes
from torchprof.run.file import comparison_of, json_of_run
from torchprof.run.lockstep import NO_LAST_RANK, STEP, WORK
from torchprof.run.measures import Cost, SampleKey
from torchprof.run.processes import in_processes
from torchprof.run.rows import Around, Row
from torchprof.run.run import Run
from torchprof.run.saved import load_to_compare
from torchprof.run.timeline import DeviceTime, Held, Memory, StreamTime
from torchprof.run.words import BACKWARD, FORWARD, OTHER


def contents_of(run: Run) -> tuple[Any, ...]:
    """Everything in a run, comparable: without the order of tables and entries that no row refers to."""
    name = {index: layer.path for index, layer in enumerate(run.layers)}

    def path(index: int) -> Any:
        return name.get(index, index)

    def by_path(columns: Any) -> list[Any]:
        return [[*map(path, column)] if title == "layer" else column.tolist() for title, column in columns.items()]

    rows = Counter(
        row._replace(within=tuple((path(around.layer), *around[1:]) for around in row.within)) for row in run.rows
    )
    timeline = run.timeline
    return (
        sorted(run.metas, key=lambda meta: meta.rank),
        {layer.path: layer for layer in run.layers},
        rows,
        {(path(key.layer), *key[1:]): spread for key, spread in run.samples.items()},
        {
            (one.rank, one.device): (replace(one, held=()), Counter((path(held.layer), *held[1:]) for held in one.held))
            for one in run.memory
        },
        timeline
        and (
            timeline.rank,
            by_path(timeline.columns),
            timeline.spans and (by_path(timeline.spans.columns), timeline.spans.lanes),
        ),
        {(one.rank, one.device): one for one in run.device_times},
        {
            one.rank: (path(one.layer), [path(each.layer) for each in one.entered], astuple(one)[1:3])
            for one in run.unfinished
        },
        {
            (one.rank, one.device): (replace(one, roots=()), [(stage, path(layer)) for stage, layer in one.roots])
            for one in run.pipelines
        },
        {(path(key.layer), *key[1:]): lockstep for key, lockstep in run.lockstep.items()},
    )


# Layers


def test_layers_are_matched_by_path_and_have_their_ranks() -> None:
    """A pipeline: each rank has some of the numbered layers. Layers of the first rank come before those of the last."""
    first = run_of(0, layers=["Net", "Net.embed", "Net.layers", "Net.layers.0", "Net.layers.2"])
    second = run_of(1, layers=["Net", "Net.norm", "Net.layers", "Net.layers.10", "Net.layers.1", "Net.head"])
    merged = torchprof.merge([first, second])
    assert [(one.name, one.ranks) for one in merged.layers] == [
        ("Net", ()),
        ("Net.embed", (0,)),
        ("Net.layers", ()),
        ("Net.layers.0", (0,)),
        ("Net.layers.1", (1,)),
        ("Net.layers.2", (0,)),
        ("Net.layers.10", (1,)),
        ("Net.norm", (1,)),
        ("Net.head", (1,)),
    ]
    assert torchprof.merge([second, first]) == merged


def test_a_merged_layer_is_that_of_the_lowest_rank() -> None:
    """But its parameters are None if they differ between ranks."""
    zero = layer(
        "Net", params=4, trainable_params=4, param_bytes=16, dtype_bytes=(("float32", 16),), input_shapes=((1,),)
    )
    one = layer(
        "Net", params=6, trainable_params=4, param_bytes=24, dtype_bytes=(("float32", 24),), input_shapes=((2,),)
    )
    one = replace(one, recursive=True, training=False, settings="other")
    two = replace(zero, tied=True, compiled=True)
    runs = [run_of(rank, layers=[it]) for rank, it in enumerate((zero, one, two))]
    expected = replace(zero, params=None, param_bytes=None, dtype_bytes=(), recursive=True, tied=True, compiled=True)
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        assert torchprof.merge([runs[at] for at in order]).layers == (expected,)
    assert torchprof.merge([torchprof.merge(runs[:2]), runs[2]]).layers == (expected,)


def test_a_layer_of_all_ranks_so_far_is_not_given_to_later_ranks() -> None:
    """``ranks`` is () if all ranks have the layer; that may change when another rank is added."""
    both = torchprof.merge([run_of(0), run_of(1)])
    assert {one.ranks for one in both.layers} == {()}
    merged = torchprof.merge([both, run_of(2, layers=["Net", "Net.b"])])
    assert {one.name: one.ranks for one in merged.layers} == {"Net": (), "Net.a": (0, 1), "Net.b": ()}


# Rows


def test_merged_rows_are_those_of_each_rank_in_order() -> None:
    """Ranks may number layers and frames differently; the merged rows refer to the same ones."""
    zero = run_of(0, line(0, cpu_ns=1), line(1, MUL, cpu_ns=2), line(-1, ADD, cpu_ns=3))
    one = run_of(
        1,
        line(1, ADD, cpu_ns=10),
        line(2, MUL, device="cuda:0", device_ns=20),
        line(0, MUL, within=(Around(1, FORWARD, (MINE,)),), cpu_ns=30),
        line(0, phase=BACKWARD, shared=(1, 2), cpu_ns=40),
        layers=["Net", "Net.b", "Net.c"],
    )
    merged = torchprof.merge([one, zero])
    net, a, b, c = (layer(name) for name in ("Net", "Net.a", "Net.b", "Net.c"))
    a, c = replace(a, ranks=(0,)), replace(c, ranks=(1,))
    assert merged.layers == (net, a, b, c)
    assert [*merged.rows] == [
        Row(net, True, FORWARD, (), (), "cpu", 0, 1, Cost(cpu_ns=1)),
        Row(a, True, FORWARD, (), (MUL,), "cpu", 0, 1, Cost(cpu_ns=2)),
        Row(None, True, OTHER, (), (ADD,), "cpu", 0, 1, Cost(cpu_ns=3)),
        Row(b, True, FORWARD, (), (ADD,), "cpu", 1, 1, Cost(cpu_ns=10)),
        Row(c, True, FORWARD, (), (MUL,), "cuda:0", 1, 1, Cost(device_ns=20)),
        Row(net, True, FORWARD, (Around(2, FORWARD, (MINE,)),), (MUL,), "cpu", 1, 1, Cost(cpu_ns=30)),
        Row(net, True, BACKWARD, (), (), "cpu", 1, 1, Cost(cpu_ns=40), (b, c)),
    ]
    assert (merged.rows.frames, merged.rows.devices) == (((), (MUL,), (ADD,)), ("cpu", "cuda:0"))
    assert {node.layer.name: node.total.cpu_ns for node in merged.tree(FORWARD).walk()} == {
        "Net": 43,
        "Net.a": 2,
        "Net.b": 10,
        "Net.c": 0,
    }


def test_metas_memory_and_device_times_are_sorted_by_rank() -> None:
    memory = [Memory("cpu", rank, 100 + rank, held=(Held(1, FORWARD, "inputs", 7, 1),)) for rank in range(2)]
    times = [DeviceTime("cuda:0", rank, 9, 8, 7, 0, 1, 0, (StreamTime(7, 1, 8, 7, 0, 1),)) for rank in range(2)]
    runs = [
        run_of(rank, layers=NET if rank else ("Net", "Net.b"), memory=(memory[rank],), device_times=(times[rank],))
        for rank in range(2)
    ]
    merged = torchprof.merge(reversed(runs))
    assert [meta.rank for meta in merged.metas] == [0, 1]
    assert [one.peak_bytes for one in merged.memory] == [100, 101]
    assert [merged.layers[held.layer].name for one in merged.memory for held in one.held] == ["Net.b", "Net.a"]
    assert merged.device_times == tuple(times)


def test_the_timeline_is_that_of_the_lowest_rank_that_has_one() -> None:
    runs = [run_of(0), run_of(1, layers=["Net", "Net.b"], timeline=timeline(1, 1)), run_of(2, timeline=timeline(2, 1))]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        merged = torchprof.merge([runs[at] for at in order])
        assert merged.timeline is not None and merged.timeline.spans is not None
        assert merged.timeline.rank == 1
        assert merged.layers[merged.timeline.columns["layer"][0]].name == "Net.b"
        assert merged.layers[merged.timeline.spans.columns["layer"][0]].name == "Net.b"


# One rank of several


def test_of_rank_has_only_the_layers_and_figures_of_that_rank() -> None:
    zero = run_of(0, line(1, MUL, cpu_ns=3), timeline=timeline(0, 1))
    one = run_of(1, line(2, ADD, cpu_ns=5), line(-2, cpu_ns=7), layers=["Net", "Net.b", "Net.b.0"])
    merged = torchprof.merge([zero, one])
    for run in (zero, one):
        part = merged.of_rank(run.meta.rank)
        assert contents_of(part) == contents_of(run)
        assert part.rows.frames == ((), run.rows[0].frames)
    assert merged.of_rank(1).no_layer(FORWARD, selected=False).cpu_ns == 7
    assert zero.of_rank(0) == zero


def test_of_rank_refuses_an_unknown_rank() -> None:
    merged = torchprof.merge([run_of(0, world=6), run_of(1, world=6), run_of(2, world=6), run_of(5, world=6)])
    with pytest.raises(TorchprofError, match=r"no rank 4.*has ranks 0 to 2 and 5\."):
        merged.of_rank(4)
    assert merged.missing_ranks == (3, 4)
    assert run_of(3).missing_ranks == ()


# Invalid arguments


def test_what_cannot_be_merged(golden: Callable[..., None]) -> None:
    """What is no run; two runs of one rank; runs of different jobs. A run without a job name can be merged with any,
    and a world size of 1 means unknown."""
    with torchprof.Profile(torch.nn.Linear(2, 2)) as prof:
        pass
    both, one = torchprof.merge([run_of(0), run_of(1)]), run_of(1)
    sizes = [run_of(0, world=2), run_of(1, world=4)]
    named = [
        replace(run, metas=(replace(run.meta, job=job),))
        for run, job in zip([run_of(rank, world=3) for rank in range(3)], ("a", "", "b"))
    ]
    no_runs: list[Any] = ["rank0.json", ["rank0.json"], None, []]
    several = {"a run": run_of(0), "a run and None": [run_of(0), None]}
    ranks = {"twice rank 1": [one, run_of(0), one], "rank 1 again": [both, one], "both again": [both, both]}
    jobs = {"jobs of two sizes": sizes, "jobs of two names": named}
    cases = {**{repr(each): each for each in no_runs}, **several, **ranks, **jobs}
    golden(
        {title: message(torchprof.merge, runs) for title, runs in cases.items()},
        {"add_cycles, of several ranks": message(torchprof.merge, [both, one, both], add_cycles=True)},
    )
    assert "Give prof.run" in message(torchprof.merge, [prof])
    assert "map(torchprof.load, paths)" in message(torchprof.merge, [Path("rank0.json")])
    assert len(torchprof.merge(named[:2]).metas) == 2
    assert torchprof.merge([run_of(0, world=2), one]).missing_ranks == ()


# Cycles


def test_runs_of_one_rank_are_added_up_with_add_cycles() -> None:
    """Of a model that had no ``b`` at first."""
    early = run_of(0, line(1, MUL, cpu_ns=3), line(0, cpu_ns=1), layers=["Net", "Net.a"])
    late = run_of(0, line(2, MUL, cpu_ns=10), line(1, MUL, cpu_ns=4), layers=["Net", "Net.b", "Net.a"])
    early = replace(early, metas=(replace(early.meta, wall_ns=5, warnings=run_warnings("Early.")),))
    late = replace(late, metas=(replace(late.meta, wall_ns=6, warnings=run_warnings("Late.")),))
    other = run_of(1, line(1, MUL, cpu_ns=100))
    merged = torchprof.merge([early, other, late], add_cycles=True)
    assert (merged.meta.cycles, merged.meta.wall_ns) == (2, 11)
    assert sentences(merged) == ("Run 1 of the 2 added: Early.", "Run 2 of the 2 added: Late.")
    found = {(row.layer.name, row.rank): (row.calls, row.cost.cpu_ns) for row in merged.rows if row.layer}
    assert found == {("Net", 0): (1, 1), ("Net.a", 0): (2, 13), ("Net.b", 0): (1, 4), ("Net.a", 1): (1, 100)}
    both = torchprof.merge([run_of(2), run_of(3)])
    with pytest.raises(TorchprofError, match="add up the cycles of each rank"):
        torchprof.merge([both, other, both], add_cycles=True)


def test_warnings_are_computed_from_the_sum_of_cycles() -> None:
    """Warnings that follow from the run are of the whole sum. A stored one has the numbers of its runs."""

    def recorded(wall_ns: int, *others: str) -> Run:
        run = run_of(0, line(1, MUL, calls=2, uncounted=2), layers=["Net", "Net.a"])
        meta = replace(run.meta, wall_ns=wall_ns, run_delay_ns=wall_ns // 2, measured=("cpu_ns", "flops"))
        run = replace(run, metas=(replace(meta, warnings=run_warnings(*others)),))
        assert sum("(2 calls, in Net.a)" in text or "The machine was busy" in text for text in sentences(run)) == 2
        return run

    cycles = [recorded(340_000_000, "Never called: x."), recorded(348_000_000), recorded(312_000_000)]
    total = torchprof.merge(cycles, add_cycles=True)
    said = sentences(total)
    assert said[0] == "Run 1 of the 3 added: Never called: x."
    assert said[1] == "Not counted: mul (6 calls, in Net.a)."
    assert said[2].startswith(
        "The machine was busy: the main thread waited for a processor for 500.000ms of 1.000s (50%)"
    )
    assert len(said) == 3
    assert torchprof.merge([total]) == total
    alike = [recorded(1000, "Once."), recorded(1000, "Once.")]
    assert sentences(torchprof.merge(alike, add_cycles=True))[0] == "Each of the 2 runs added: Once."
    # A sum is added to others as a run is.
    again = sentences(torchprof.merge([total, recorded(1000)], add_cycles=True))
    assert again[:2] == (
        "Run 1 of the 2 added: Run 1 of the 3 added: Never called: x.",
        "Not counted: mul (8 calls, in Net.a).",
    )


# The laws, with random runs


@examples(50)
@given(jobs(), st.data())
def test_merging_is_independent_of_order_and_grouping(runs: list[Run], data: st.DataObject) -> None:
    """``merge`` is associative and commutative: the results are equal, down to each number."""
    merged = torchprof.merge(runs)
    shuffled = data.draw(st.permutations(runs))
    cut = data.draw(st.integers(1, len(runs) - 1))
    assert torchprof.merge(iter(shuffled)) == merged
    halves = [torchprof.merge(shuffled[:cut]), torchprof.merge(shuffled[cut:])]
    assert torchprof.merge(halves) == torchprof.merge(reversed(halves)) == merged
    one_by_one = shuffled[0]
    for run in shuffled[1:]:
        one_by_one = torchprof.merge([one_by_one, run])
    assert one_by_one == merged
    assert torchprof.merge([merged]) == merged


@examples(50)
@given(jobs())
def test_merging_loses_and_adds_nothing(runs: list[Run]) -> None:
    """Every row, sample, peak and time is at the layer with its path, and at no other."""
    merged = torchprof.merge(runs)
    each = [contents_of(run) for run in runs]
    ranks = {one.path: one.ranks for one in merged.layers}
    everyone = tuple(sorted(run.meta.rank for run in runs))
    for path in {one.path for run in runs for one in run.layers}:
        have = sorted(run.meta.rank for run in runs if path in {one.path for one in run.layers})
        assert (ranks[path] or everyone) == tuple(have)

    def plain(rows: Counter[Any]) -> Counter[Any]:
        return Counter(
            row._replace(layer=row.layer and row.layer.path, shared_by=tuple(one.path for one in row.shared_by))
            for row in rows.elements()
        )

    whole = contents_of(merged)
    assert plain(whole[2]) == sum((plain(one[2]) for one in each), Counter())
    for part in (3, 4, 6, 7, 8):
        assert whole[part] == {key: value for one in each for key, value in one[part].items()}
    seen = {}
    for run in each:
        for key, lockstep in run[-1].items():
            seen.setdefault(key, []).append(lockstep)
    assert set(seen) == set(whole[-1])
    for key, parts in seen.items():
        joined = whole[-1][key]
        parts = sorted(parts, key=lambda part: part.ranks)
        assert joined.ranks == tuple(part.ranks[0] for part in parts)
        assert joined.counts == tuple(part.counts[0] for part in parts)
        assert joined.ns == tuple(part.ns[0] for part in parts)
        if len({part.counts for part in parts}) > 1:
            assert joined.last_ns == joined.last_rank == ()
            continue
        choose = max if key[3] in (WORK, STEP) else min
        for at, (ns, rank) in enumerate(zip(joined.last_ns, joined.last_rank, strict=True)):
            assert ns == choose(part.last_ns[at] for part in parts)
            last = [part.ranks[0] for part in parts if part.last_ns[at] == ns]
            assert rank == (last[0] if len(last) == 1 else NO_LAST_RANK)


@examples(30)
@given(jobs())
def test_of_rank_of_a_merged_run_is_the_run_of_the_rank(runs: list[Run]) -> None:
    """Except the description of layers, which is from the lowest rank, and times matched between ranks."""
    merged = torchprof.merge(runs)
    for run in runs:
        part = merged.of_rank(run.meta.rank)
        known = {layer.path: layer for layer in part.layers}
        assert set(known) == {layer.path for layer in run.layers}
        here = replace(run, layers=tuple(known[layer.path] for layer in run.layers))
        here = replace(here, rows=replace(here.rows, layers=here.layers))
        if merged.timeline is None or merged.timeline.rank != run.meta.rank:
            here = replace(here, timeline=None)
        *expected, lockstep = contents_of(here)
        *found, of_part = contents_of(part)
        assert found == expected
        assert {key: (one.ranks, one.counts, one.ns) for key, one in of_part.items()} == {
            key: (one.ranks, one.counts, one.ns) for key, one in lockstep.items()
        }


@examples(20)
@given(jobs(), st.sampled_from(["run.json", "run.json.gz"]))
def test_load_after_save_gives_the_merged_run(runs: list[Run], name: str) -> None:
    merged = torchprof.merge(runs)
    with tempfile.TemporaryDirectory() as folder:
        merged.save(Path(folder) / name)
        assert torchprof.load(Path(folder) / name) == merged


@examples(20)
@given(jobs())
def test_what_is_compared_of_ranks_is_merged_as_it_is_compared_of_the_merged_run(runs: list[Run]) -> None:
    merged = torchprof.merge(runs)
    compared = merged.to_compare(layers=True)
    assert torchprof.merge(run.to_compare(layers=True) for run in runs) == compared
    assert comparison_of(json_of_run(merged).encode(), "run.json") == compared


# Saved runs


def test_several_files_make_one_run_in_one_process_or_several(tmp_path: Path) -> None:
    files = [tmp_path / f"rank{rank}.json" for rank in range(4)]
    for rank, file in enumerate(files):
        run_of(
            rank, layers=["Net", f"Net.{rank}"], samples={SampleKey(1, FORWARD, rank, "cpu", "cpu_ns"): calls(rank)}
        ).save(file)
    merged = torchprof.merge(map(torchprof.load, files))
    assert torchprof.load(files) == torchprof.load(map(str, files), processes=2) == merged
    with pytest.raises(TorchprofError, match="Two of the runs are of rank 1"):
        torchprof.load([files[1], files[1]])
    with pytest.raises(TorchprofError, match="processes= must be a number of processes, 1 or more, not 0"):
        torchprof.load(files, processes=0)
    files[2].write_text("{}")
    with pytest.raises(TorchprofError, match=r"rank2\.json is JSON, but not a saved run"):
        torchprof.load(files, processes=2)


def test_there_are_no_more_processes_than_items_and_than_windows_can_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    monkeypatch.setattr("torchprof.run.processes._results", lambda call, items, count: counts.append(count))
    for wanted, items, most in ((2, 3, 60), (8, 2, 60), (100, 80, 60)):
        monkeypatch.setattr("torchprof.run.processes._MOST_PROCESSES", most)
        in_processes(abs, range(items), wanted)
    assert counts == [2, 2, 60]
    assert [*in_processes(abs, [-1], 8)] == [1] and [*in_processes(abs, [], 8)] == []
    assert counts == [2, 2, 60]
    for wrong in (0, -1, 1.5):
        with pytest.raises(TorchprofError, match="processes= must be a number of processes, 1 or more, not"):
            in_processes(abs, [-1], wrong)  # type: ignore[arg-type]


def test_a_process_that_ends_is_an_error() -> None:
    with pytest.raises(TorchprofError, match="One of the 2 processes that read files was killed, perhaps because mem"):
        list(in_processes(os._exit, [1, 2, 3], 2))


class _Unsent(Exception):
    """An error that can be pickled, but not read again."""

    def __init__(self, file: str, line: int) -> None:
        super().__init__(f"{file}:{line}")


def _fails(number: int) -> None:
    raise _Unsent("rank2.json", number)


def test_what_cannot_be_sent_from_a_process_is_an_error_that_says_so() -> None:
    with pytest.raises(
        TorchprofError, match=r"One of the processes that read files failed: _Unsent\('rank2.json:7'\)\."
    ):
        list(in_processes(_fails, [7, 7], 2))
    result, error = pickle.loads(processes._outcome(lambda item: lambda: item, 1))
    assert result is None and isinstance(error, TorchprofError)
    assert "files failed: its result cannot be sent to another: " in str(error) and "lambda" in str(error)
    assert pickle.loads(processes._outcome(abs, -1)) == (1, None)


def test_one_process_reads_if_others_cannot_import_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the script came from stdin: other processes could not start, nor know what this one has changed."""
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "<stdin>", raising=False)
    monkeypatch.setattr("torchprof.run.saved.run_of", lambda data, path: run_of(int(data)))
    for rank in range(2):
        (tmp_path / str(rank)).write_text(str(rank))
    assert [meta.rank for meta in torchprof.load([tmp_path / "0", tmp_path / "1"], processes=2).metas] == [0, 1]


@pytest.mark.parametrize("name", ["run.json", "run.json.gz", "run.parquet"])
def test_what_is_compared_is_read_alone(name: str, tmp_path: Path) -> None:
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    model = Mlp()
    with torchprof.Profile(model, profile_memory=True, with_timeline=True) as prof:
        for _ in range(3):
            model(torch.rand(2, 4)).sum().backward()
            prof.step()
    prof.run.save(tmp_path / name)
    compared = load_to_compare(tmp_path / name)
    assert compared == prof.run.to_compare(layers=True)
    assert not compared.rows and compared.layers == prof.run.layers
    for key, lockstep in compared.lockstep.items():
        whole = prof.run.lockstep[key]
        assert (lockstep.ns, lockstep.counts) == (whole.ns, whole.counts)
        assert lockstep.last_ns == whole.last_ns if key.what == STEP else lockstep.medians == (median(whole.last_ns),)
