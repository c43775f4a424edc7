"""``from_trace`` of several files: cycles, ranks, progress, processes."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Layers, Mlp
from build.processes import run_fresh
from build.trace_files import exact_ns, session, trace_event, write
from build.traced_runs import (
    X,
    annotated,
    assert_same,
    events_in,
    layers_of,
    memory_of,
    of_two_ranks,
    rows_of,
    samples_of,
    trace_in,
    training,
    with_ranges,
)
from build.warnings import sentences
from torch import Tensor, nn

import torchprof
from torchprof.run.merge import add_cycle
from torchprof.run.run import Run


def cycles_of(model: nn.Module, folder: Path, schedule: Any, passes: int) -> tuple[list[Run], list[Path]]:
    runs: list[Run] = []
    files: list[Path] = []

    def ready(theirs: Any) -> None:
        runs.append(torchprof.from_profiler(theirs, model))
        files.append(folder / f"cycle{len(files)}.pt.trace.json")
        theirs.export_chrome_trace(str(files[-1]))

    options = {"record_shapes": True, "profile_memory": True, "schedule": schedule, "on_trace_ready": ready}
    with torchprof.annotate(model), torch.profiler.profile(**options) as theirs:
        for _ in range(passes):
            training(model, X)()
            theirs.step()
    return runs, files


# Steps and cycles


def test_steps_of_torchs_profiler_are_steps(tmp_path: Path) -> None:
    model = Mlp()
    runs, files = cycles_of(model, tmp_path, torch.profiler.schedule(wait=1, warmup=1, active=3), 5)
    (live,), (file,) = runs, files
    read = torchprof.from_trace(file, model)
    assert_same(live, read)
    ranges = [
        event for event in events_in(file) if event["name"].startswith("ProfilerStep#") and event["cat"] != "Trace"
    ]
    assert read.meta.steps == len(ranges) == 3
    ranges.sort(key=lambda event: event["ts"])
    ends = [exact_ns(event["ts"]) for event in ranges[1:]] + [exact_ns(ranges[-1]["ts"]) + exact_ns(ranges[-1]["dur"])]
    lasted = [end - exact_ns(event["ts"]) for event, end in zip(ranges, ends)]
    (steps,) = [spread for key, spread in read.samples.items() if key.measure == "step_ns"]
    assert sorted(lasted) == list(steps.sample)


def test_the_files_of_several_cycles_add_up(tmp_path: Path) -> None:
    model = Mlp()
    runs, files = cycles_of(model, tmp_path, torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=3), 12)
    assert len(files) == 3
    both = add_cycle(add_cycle(runs[0], runs[1]), runs[2])
    for order in (files, files[::-1]):
        read = torchprof.from_trace(order, model)
        assert (read.meta.cycles, read.meta.steps) == (3, 6)
        assert rows_of(read) == rows_of(both)
        assert samples_of(read) == samples_of(both)
        assert memory_of(read) == memory_of(both)
        assert layers_of(read) == layers_of(both)
        assert read.meta.busy_ns == both.meta.busy_ns
    singles = [torchprof.from_trace(file, model) for file in files]
    assert read.meta.wall_ns == sum(run.meta.wall_ns for run in singles)


class Chooses(Layers):
    """Calls one of two submodules."""

    def __init__(self) -> None:
        super().__init__(a=nn.Linear(4, 4), b=nn.Linear(4, 4), last=nn.Linear(4, 4))

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.last(self.a(x) if which == "a" else self.b(x))


def test_cycles_with_different_layers_add_up(tmp_path: Path) -> None:
    """Each cycle calls a layer that the other does not: no warning says "Never called", and layers keep their order."""
    model = Chooses()
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for which, file in zip("ab", files):
        annotated(model, lambda which=which: model(X, which), file)  # type: ignore[misc]
    read = torchprof.from_trace(files, model)
    assert not [warning for warning in sentences(read) if "Never called" in warning]
    assert "Never called: Chooses.b" in sentences(torchprof.from_trace(files[0], model))[0]
    for run in (read, torchprof.from_trace(files)):
        calls = {node.layer.name: node.calls for node in run.tree("forward").walk() if node.layer}
        assert calls == {"Chooses": 2, "Chooses.a": 1, "Chooses.b": 1, "Chooses.last": 2}


def test_a_warning_of_several_cycles_is_shown_once(tmp_path: Path) -> None:
    model, files = Mlp(), [tmp_path / "1.json", tmp_path / "2.json"]
    for file in files:
        annotated(model, lambda: [training(model, X)() for _ in range(3)], file)
        write(file, {**trace_in(file), "traceEvents": [*events_in(file), {"ph": "X", "cat": "cpu_op", "name": "?"}]})
    warnings = sentences(torchprof.from_trace(files, model))
    assert len({warning.partition(" took ")[0] for warning in warnings}) == len(warnings)
    assert sum("missing" in warning for warning in warnings) == 2  # each names its file


def test_a_trace_with_every_event_twice_gives_the_same_run_and_a_warning(trace: Path, tmp_path: Path) -> None:
    """All values are equal, including steps."""
    model = Mlp()
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as theirs, torchprof.annotate(model):
        for _ in range(2):
            model(X).sum().backward()
            theirs.step()
    theirs.export_chrome_trace(str(trace))
    doubled = trace_in(trace)
    doubled["traceEvents"] *= 2
    run, twice = torchprof.from_trace(trace), torchprof.from_trace(write(tmp_path / "twice.json", doubled))
    assert_same(run, twice, with_model=False)
    assert memory_of(twice) == memory_of(run)
    (warning,) = [warning for warning in sentences(twice) if warning.startswith("Twice in")]
    events = trace_in(trace)["traceEvents"]
    read = sum(one["name"] == "[memory]" or (one["ph"] == "X" and one["cat"] != "Trace") for one in events)
    assert warning.startswith("Twice in twice.json, ") and f"number: {read:,} events. " in warning


def test_one_recording_twice_is_refused(trace: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json.gz"
    copy.write_bytes(gzip.compress(with_ranges(trace).read_bytes()))
    for files in ([trace, trace], [trace, copy]):
        with pytest.raises(torchprof.TorchprofError, match="of the same time: one recording twice"):
            torchprof.from_trace(files)


def test_one_cut_off_recording_twice_is_refused(trace: Path, tmp_path: Path) -> None:
    """A file that was cut off lacks the event with the duration of the session."""
    copy, text = tmp_path / "copy.json", with_ranges(trace).read_text()
    for file in (trace, copy):
        file.write_text(text[: len(text) // 2])
    assert "PyTorch Profiler (0)" not in trace.read_text()
    with pytest.raises(torchprof.TorchprofError, match="of the same time: one recording twice"):
        torchprof.from_trace([trace, copy])


@pytest.mark.parametrize(("second", "process"), [(100.5, 1), (150, 2)], ids=["one process", "two without a rank"])
def test_sessions_at_the_same_time_are_refused(second: float, process: int, tmp_path: Path) -> None:
    """The first lasts from 100 to 200 us."""
    files = []
    for at, (start, pid) in enumerate([(100, 1), (second, process)]):
        events = [session(start, 100), {**trace_event("cpu_op", "aten::mm", start + 1, 5), "pid": pid}]
        files.append(write(tmp_path / f"{at}.json", {"traceEvents": events}))
    for order in (files, files[::-1]):
        with pytest.raises(torchprof.TorchprofError, match="two processes without a rank"):
            torchprof.from_trace(order)


@pytest.mark.parametrize("lasted", [100, None], ids=["whole", "without their ends"])
def test_a_session_may_begin_when_the_previous_one_ends(lasted: float | None, tmp_path: Path) -> None:
    files = []
    for start in (100, 200, 300):
        events = [
            trace_event("cpu_op", "aten::mm", start + 1, 5),
            *([] if lasted is None else [session(start, lasted)]),
        ]
        files.append(write(tmp_path / f"{start}.json", {"traceEvents": events}))
    run = torchprof.from_trace(files)
    assert (run.meta.cycles, run.meta.wall_ns, sum(row.cost.cpu_ns for row in run.rows)) == (3, 15_000, 15_000)


def test_the_warnings_of_several_cycles_use_their_sums(tmp_path: Path) -> None:
    """Calls of 50, 10 and 10 us, then of 30, 10 and 10 us. In each file alone, the first call is slow. Of all six,
    only the first is slow: the others took 14 us on average. An operator without a formula is called 2 and 3 times."""
    files = []
    for at, lasted in enumerate([(50, 10, 10), (30, 10, 10)]):
        calls = [
            trace_event("cpu_op", "torchprof:Net", 1000 * at + 100 * call, ns) for call, ns in enumerate(lasted, 1)
        ]
        ops = [
            trace_event(
                "cpu_op", "aten::special_bessel_j0", 1000 * at + 500 + call, 0.5, Input_Dims=[[8]], Input_type=["float"]
            )
            for call in range(2 + at)
        ]
        marks = session(1000 * at + 1, 900)
        files.append(write(tmp_path / f"{at}.json", {"traceEvents": [marks, *calls, *ops]}))
    singles = [sentences(torchprof.from_trace(file)) for file in files]
    assert [[" ".join(warning.split()[:3]) for warning in warnings] for warnings in singles] == [
        ["The first recorded", "Not counted: aten::special_bessel_j0"],
        ["The first recorded", "Not counted: aten::special_bessel_j0"],
    ]
    start, uncounted = sentences(torchprof.from_trace(files))
    assert start.startswith("The first recorded call of Net took 50.000us, later calls 14.000us on average")
    assert uncounted.startswith("Not counted: aten::special_bessel_j0 (5 calls")


def of_rank(path: Path, rank: int, folder: Path, *, ranks: int = 2, process: int | None = None) -> Path:
    """The trace as another rank would have written it."""
    whole = trace_in(path)
    whole["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": ranks}
    if process is not None:
        for event in whole["traceEvents"]:
            if isinstance(event.get("pid"), int):
                event["pid"] = process
    return write(folder / f"rank{rank}-{process}.json", whole)


# Several ranks


def test_ranks_are_kept_side_by_side(trace: Path, tmp_path: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    files = [of_rank(trace, rank, tmp_path, process=100 + rank) for rank in (1, 0)]
    for given in (model, None):
        run = torchprof.from_trace(files, given)
        assert [meta.rank for meta in run.metas] == [0, 1]
        singles = [torchprof.from_trace(file, given) for file in files]
        assert rows_of(run) == {**rows_of(singles[0]), **rows_of(singles[1])}
        assert samples_of(run) == {**samples_of(singles[0]), **samples_of(singles[1])}
        assert {key[-1] for key in rows_of(run)} == {0, 1}


def test_ranks_may_have_different_layers(tmp_path: Path) -> None:
    model = Chooses()
    files = []
    for rank, which in enumerate("ba"):
        annotated(model, lambda which=which: model(X, which), tmp_path / "one.json")  # type: ignore[misc]
        files.append(of_rank(tmp_path / "one.json", rank, tmp_path))
    run = torchprof.from_trace(files)
    rows = {(row.layer.name, row.rank): row.calls for row in run.rows if row.layer and not row.frames}
    assert rows == {
        ("Chooses", 0): 1,
        ("Chooses.b", 0): 1,
        ("Chooses.last", 0): 1,
        ("Chooses", 1): 1,
        ("Chooses.a", 1): 1,
        ("Chooses.last", 1): 1,
    }


def test_two_processes_of_one_rank_are_refused(trace: Path, tmp_path: Path) -> None:
    files = [of_rank(with_ranges(trace), 0, tmp_path, process=process) for process in (100, 200)]
    with pytest.raises(torchprof.TorchprofError, match="both of rank 0, and of different processes"):
        torchprof.from_trace(files)


def test_reports_describe_the_device_of_each_rank(tmp_path: Path) -> None:
    run = torchprof.from_trace(of_two_ranks(tmp_path))
    assert [line for line in run.report("top").splitlines() if "idle" in line] == [
        f"cuda:0 of rank {rank} was idle for 0.000us (0.0%) of {span} from its first to its last work, of {wall} "
        "recorded."
        for rank, span, wall in ((0, "40.000us", "100.000us"), (1, "120.000us", "300.000us"))
    ]
    text = run.report("kernels")
    assert "cuda:0 of rank 0 was busy for 40.000us (100.0%) of 40.000us from its first to its last work, of " in text
    assert "cuda:0 of rank 1 was busy for 120.000us (100.0%) of 120.000us from its first to its last work, of " in text


# Progress, and what is imported


def test_progress_rises_to_one(trace: Path, tmp_path: Path) -> None:
    model, files = nn.Linear(4, 4), [trace, tmp_path / "2.json"]
    for file in files:
        annotated(model, lambda: [model(X) for _ in range(100)], file)
    shares: list[float] = []
    torchprof.from_trace(files, progress=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 4
    assert 0 < shares[0] < 0.5 and shares[-1] == 1


def test_several_processes_read_what_one_reads(trace: Path, tmp_path: Path) -> None:
    """With the model, which is not sent to the processes, and without; progress is called after each file."""
    model, files = Mlp(), [trace, tmp_path / "later.json"]
    for file in files:
        annotated(model, training(model, X), file)
    for given in (None, model):
        shares: list[float] = []
        read = torchprof.from_trace(files, given, with_timeline=True, progress=shares.append, processes=2)
        assert read == torchprof.from_trace(files, given, with_timeline=True)
        assert len(shares) == 2 and shares == sorted(shares) and shares[-1] == 1
        assert read.meta.cycles == 2
    (ranks := tmp_path / "ranks").mkdir()
    files = of_two_ranks(ranks)
    assert torchprof.from_trace(files, processes=3) == torchprof.from_trace(files)


def test_an_error_in_one_of_several_processes_names_the_file(trace: Path, tmp_path: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    wrong = write(tmp_path / "wrong.json", {"no": "trace"})
    with pytest.raises(torchprof.TorchprofError, match=r"wrong\.json"):
        torchprof.from_trace([trace, wrong], processes=2)
    for processes in (0, "two"):
        with pytest.raises(torchprof.TorchprofError, match="1 or more"):
            torchprof.from_trace([trace], processes=processes)


def test_torch_is_not_imported_for_a_trace_without_shapes(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    model = Mlp()
    annotated(model, training(model, X), trace, record_shapes=False)
    code = (
        f"import sys, torchprof; run = torchprof.from_trace({str(trace)!r}); run.report('tree'); "
        "print([layer.name for layer in run.layers], 'torch' in sys.modules)"
    )
    assert run_fresh(code) == "['Mlp', 'Mlp.fc1', 'Mlp.act', 'Mlp.fc2'] False"
