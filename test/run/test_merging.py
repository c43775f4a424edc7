"""Merging runs of several ranks, and taking them apart again, against results calculated by hand."""

from __future__ import annotations

import re
import tempfile
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import astuple, replace
from functools import reduce
from itertools import accumulate
from operator import add
from pathlib import Path
from typing import Any

import pytest
from build.examples import examples
from build.places import ROOT
from build.warnings import caveats, sentences
from hypothesis import given
from hypothesis import strategies as st

import torchprof
from torchprof import TorchprofError
from torchprof.run.cost import Cost
from torchprof.run.layers import Layer
from torchprof.run.lockstep import (
    EXCHANGES,
    GAP,
    NO_LAST_RANK,
    NOT_RECORDED,
    STEP,
    WORK,
    GroupOfRanks,
    Lockstep,
    LockstepKey,
)
from torchprof.run.memory import Held, Memory
from torchprof.run.meta import Meta
from torchprof.run.rows import Around, Row, Rows
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, Lane, Spans, StreamTime, Timeline
from torchprof.run.unfinished import Entered, Unfinished
from torchprof.run.warnings import Caveat
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Frame

Key = LockstepKey
MUL, ADD, MINE = Frame("op", "mul"), Frame("op", "add"), Frame("label", "mine")
NET = ("Net", "Net.a", "Net.b")
OF_TWO = GroupOfRanks("0", "default_pg", 2)
ALL_REDUCE = Key(0, FORWARD, "cpu", "all_reduce", OF_TWO)
MS = 1_000_000


def layer(name: str, **fields: Any) -> Layer:
    return Layer(tuple(name.split(".")), "Module", **fields)


def line(
    where: int,
    *frames: Frame,
    rank: int = 0,
    phase: str = FORWARD,
    within: tuple[Around, ...] = (),
    shared: tuple[int, ...] = (),
    device: str = "cpu",
    calls: int = 1,
    **cost: int,
) -> tuple[Any, ...]:
    return where, PHASES.index(phase), shared, within, frames, device, rank, calls, *astuple(Cost(**cost))


def rows_of(layers: Sequence[Layer], lines: Sequence[tuple[Any, ...]]) -> Rows:
    """Rows of these lines. Each table has entries in the order of first use, and one that no row refers to."""
    tables: dict[int, list[Any]] = {2: [(), (0,)], 3: [(), (Around(-1, FORWARD, ()),)], 4: [(), (ADD, ADD)], 5: []}
    columns = [array("q") for _ in Rows.COLUMNS]
    for one in lines:
        for at, (column, value) in enumerate(zip(columns, one)):
            table = tables.get(at)
            if table is not None:
                if value not in table:
                    table.append(value)
                value = table.index(value)
            column.append(value)
    shared, within, frames, devices = (tuple(table) for table in tables.values())
    return Rows(tuple(layers), frames, devices, dict(zip(Rows.COLUMNS, columns)), within, shared)


def run_of(
    rank: int, *lines: tuple[Any, ...], layers: Sequence[Layer | str] = NET, world: int = 1, **parts: Any
) -> Run:
    made = tuple(layer(one) if isinstance(one, str) else one for one in layers)
    metas = (Meta(("Net",), rank, world),)
    here = [(*one[:6], rank, *one[7:]) for one in lines]
    return Run(metas, made, rows_of(made, here), **{"samples": {}, **parts})


def calls(*values: int) -> Spread:
    return Spread.of([*enumerate(values)])


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
            (one.rank, one.device): (
                replace(one, held=()),
                Counter((path(held.layer), *held[1:]) for held in one.held),
            )
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
        Row(None, True, FORWARD, (), (ADD,), "cpu", 0, 1, Cost(cpu_ns=3)),
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


def test_samples_keep_their_rank_and_layer() -> None:
    samples = [{SampleKey(1, FORWARD, rank, "cpu", "cpu_ns"): calls(5 + rank)} for rank in range(2)]
    zero = run_of(0, layers=["Net", "Net.b"], samples=samples[0])
    one = run_of(1, samples=samples[1])
    merged = torchprof.merge([one, zero])
    assert {(merged.layers[key.layer].name, key.rank): spread.sum for key, spread in merged.samples.items()} == {
        ("Net.b", 0): 5,
        ("Net.a", 1): 6,
    }


def timeline(rank: int, where: int) -> Timeline:
    columns = {name: array("q", [where if name == "layer" else 0]) for name in Timeline.COLUMNS}
    spans = Spans(
        (Lane("cpu", 1),), ("some",), {name: array("q", [where if name == "layer" else 0]) for name in Spans.COLUMNS}
    )
    return Timeline(("cpu",), columns, 0, spans, rank)


def test_the_timeline_is_that_of_the_lowest_rank_that_has_one() -> None:
    runs = [
        run_of(0),
        run_of(1, layers=["Net", "Net.b"], timeline=timeline(1, 1)),
        run_of(2, timeline=timeline(2, 1)),
    ]
    for order in ([0, 1, 2], [2, 1, 0], [1, 0, 2]):
        merged = torchprof.merge([runs[at] for at in order])
        assert merged.timeline is not None and merged.timeline.spans is not None
        assert merged.timeline.rank == 1
        assert merged.layers[merged.timeline.columns["layer"][0]].name == "Net.b"
        assert merged.layers[merged.timeline.spans.columns["layer"][0]].name == "Net.b"


# Lockstep


def in_lockstep(what: str, *times: Sequence[int], layer: int = 0) -> Lockstep:
    key = Key(layer, FORWARD, "cpu", what, None if what in (WORK, STEP) else OF_TWO)
    runs = [run_of(rank, lockstep={key: Lockstep.of(rank, its)}) for rank, its in enumerate(times)]
    merged = torchprof.merge([runs[at] for at in (2, 0, 1)][: len(runs)] if len(runs) == 3 else runs)
    assert [*merged.lockstep] == [key]
    return merged.lockstep[key]


def test_the_last_rank_has_the_longest_work() -> None:
    """Rank 1 is the slowest in the first step; ranks 0 and 2 take equally long in the second, so neither is named."""
    times = [3, 9, 5], [7, 1, 5], [4, 9, 6]
    assert in_lockstep(WORK, *times) == Lockstep(
        (0, 1, 2), (3, 3, 3), (17, 13, 19), (0, 0, 0), (7, 9, 6), (1, NO_LAST_RANK, 2), medians=(5, 5, 6)
    )
    assert in_lockstep(STEP, *times).values == ((3, 9, 5), (7, 1, 5), (4, 9, 6))
    assert in_lockstep(STEP, [3], [2]).last_rank == (0,)


@pytest.mark.parametrize("what", [WORK, STEP, "all_reduce"])
def test_the_same_times_are_kept_on_every_rank(what: str) -> None:
    """Of 1,000 times, in one cycle or several, the choice depends on neither the times nor the order of the runs. Sums
    are those of all times."""
    key = Key(0, FORWARD, "cpu", what, None if what in (WORK, STEP) else OF_TWO)
    times = [[rank * 10_000 + at for at in range(1000)] for rank in range(2)]
    runs = [run_of(rank, lockstep={key: Lockstep.of(rank, its)}) for rank, its in enumerate(times)]
    merged = torchprof.merge(runs).lockstep[key]
    in_cycles = [
        torchprof.merge(
            [run_of(rank, lockstep={key: Lockstep.of(rank, its[at : at + 50])}) for at in range(0, 1000, 50)],
            add_cycles=True,
        )
        for rank, its in enumerate(times)
    ]
    again = torchprof.merge(in_cycles).lockstep[key]
    assert torchprof.merge(reversed(in_cycles)).lockstep[key] == again
    for found in (merged, again):
        kept = found.times
        assert len(kept) == Lockstep.SIZE
        assert 450 < sum(kept) / len(kept) < 550  # from everywhere, not only the first ones
        assert found.counts == (1000, 1000)
        assert found.ns == tuple(map(sum, times))
        assert found.last_ns == tuple(times[1 if what in (WORK, STEP) else 0][at] for at in kept)
        assert found.values == (tuple(tuple(its[at] for at in kept) for its in times) if what == STEP else ())
        if what == "all_reduce":
            assert found.waiting_ns(1) == 1000 * 10_000
            assert found.waiting_ns(0) == 0
    halves = [torchprof.merge([run]) for run in in_cycles]
    third = torchprof.merge(
        [run_of(2, lockstep={key: Lockstep.of(2, times[0][at : at + 50])}) for at in range(0, 1000, 50)],
        add_cycles=True,
    )
    assert (
        torchprof.merge([torchprof.merge(halves), third]).lockstep[key]
        == torchprof.merge([third, *reversed(in_cycles)]).lockstep[key]
    )


@pytest.mark.parametrize(
    "counts", [(1000, 1000), (1000, 3000), (100, 400, 1500), (300,) * 20, (1,) * 1000, (1000,) + (1,) * 500]
)
def test_each_cycle_keeps_a_proportional_share_of_the_times(counts: Sequence[int]) -> None:
    """The share of the first half of the cycles, and of the first half of each cycle, is within four standard
    deviations of a draw among all times (hypergeometric), in whatever order cycles are added."""
    ends = [*accumulate(counts)]
    cycles = [Lockstep.of(0, range(end - count, end)) for count, end in zip(counts, ends)]
    whole = sum(counts)
    half = len(cycles) // 2
    from_both_sides = sum_of(cycles[:half]) + sum_of(cycles[half:])
    early = set(range(ends[half - 1]))
    first_parts = {at for count, end in zip(counts, ends) for at in range(end - count, end - count // 2)}
    for added in (sum_of(cycles), from_both_sides):
        assert added.last_ns == added.times  # here each time equals its number
        assert (added.counts, len(added.times)) == ((whole,), Lockstep.SIZE)
        for part in (early, first_parts):
            share = len(part) / whole
            deviation = (Lockstep.SIZE * share * (1 - share)) ** 0.5
            assert abs(len(part.intersection(added.times)) - Lockstep.SIZE * share) <= 4 * deviation


def sum_of(cycles: Sequence[Lockstep]) -> Lockstep:
    return reduce(add, cycles)


def test_waiting_is_summed_over_cycles() -> None:
    """Rank 0 does not wait in 1,000 calls of the first cycle, and waits 1 ms in each of 1,000 calls of the second."""
    waits = [(0, MS), (0, 0)]
    runs = [
        torchprof.merge(
            [run_of(rank, lockstep={ALL_REDUCE: Lockstep.of(rank, [1000 + ns] * 1000)}) for ns in its], add_cycles=True
        )
        for rank, its in enumerate(waits)
    ]
    together = torchprof.merge(runs).lockstep[ALL_REDUCE]
    assert together.waiting_ns(0) == 1000 * MS
    assert together.waiting_ns(1) == 0


STEPS = Key(OUTSIDE, FORWARD, "cpu", STEP)


def in_two_cycles(first: dict[Key, Sequence[int]], second: dict[Key, Sequence[int]], rank: int = 0) -> Run:
    return torchprof.merge(
        [
            run_of(rank, lockstep={key: Lockstep.of(rank, times) for key, times in cycle.items()})
            for cycle in (first, second)
        ],
        add_cycles=True,
    )


@pytest.mark.parametrize("steps", [6, 600])
def test_a_layer_that_did_not_run_in_a_cycle_took_0_in_its_steps(steps: int) -> None:
    """Net.b runs in the first cycle on rank 0 and in the second on rank 1, 8 ms in each step."""
    work = Key(2, FORWARD, "cpu", WORK)
    ran, did_not = {STEPS: [10 * MS] * steps, work: [8 * MS] * steps}, {STEPS: [2 * MS] * steps}
    found = torchprof.merge([in_two_cycles(ran, did_not), in_two_cycles(did_not, ran, rank=1)]).lockstep
    assert (found[work].counts, found[work].ns) == ((2 * steps,) * 2, (8 * MS * steps,) * 2)
    assert found[work].times == found[STEPS].times
    assert found[work].is_paired
    half = len(found[work].last_ns) // 2
    assert found[work].last_ns == (8 * MS,) * (2 * half)
    assert found[work].last_rank == (0,) * half + (1,) * half


@pytest.mark.parametrize(
    "key",
    [
        Key(OUTSIDE, FORWARD, "cpu", GAP),
        Key(OUTSIDE, FORWARD, "cpu", EXCHANGES, OF_TWO),
        Key(OUTSIDE, FORWARD, "device", STEP),
        Key(1, BACKWARD, "device", WORK),
    ],
)
def test_times_per_step_have_one_value_for_each_step_of_all_cycles(key: Key) -> None:
    with_it, without = {STEPS: [9, 9, 9], key: [1, 2, 3]}, {STEPS: [9, 9]}
    assert in_two_cycles(with_it, without).lockstep[key] == Lockstep.of(0, [1, 2, 3, 0, 0])
    assert in_two_cycles(without, with_it).lockstep[key] == Lockstep.of(0, [0, 0, 1, 2, 3])


@pytest.mark.parametrize("key", [ALL_REDUCE, Key(OUTSIDE, FORWARD, "cpu", EXCHANGES, NOT_RECORDED)])
def test_collectives_have_no_zeros_for_cycles_without_calls(key: Key) -> None:
    """Collectives are counted by calls. If no groups were recorded, a cycle without calls may only lack the record."""
    with_it, without = {STEPS: [9, 9, 9], key: [1, 2, 3]}, {STEPS: [9, 9]}
    assert in_two_cycles(with_it, without).lockstep[key] == Lockstep.of(0, [1, 2, 3])
    assert in_two_cycles(without, with_it).lockstep[key] == Lockstep.of(0, [1, 2, 3])


def test_adding_cycles_drops_medians_without_times() -> None:
    """A run of ``of_rank`` has the median of each layer, but not the times."""
    key = Key(0, FORWARD, "cpu", WORK)
    cycles = [
        torchprof.merge(run_of(rank, lockstep={key: Lockstep.of(rank, [ns] * 3)}) for rank in range(2)).of_rank(0)
        for ns in (10, 30)
    ]
    assert [cycle.lockstep[key].medians for cycle in cycles] == [(10,), (30,)]
    assert torchprof.merge(cycles, add_cycles=True).lockstep[key] == Lockstep((0,), (6,), (120,), (0,), (), ())


def test_the_last_rank_in_a_collective_has_the_shortest_time() -> None:
    together = in_lockstep("all_reduce", [30, 9], [5, 9], [20, 12])
    assert together == Lockstep((0, 1, 2), (2, 2, 2), (39, 14, 32), (0, 0, 0), (5, 9), (1, NO_LAST_RANK))
    assert [together.waiting_ns(rank) for rank in range(3)] == [39 - 14, 0, 32 - 14]


def test_times_are_not_matched_if_counts_differ() -> None:
    for times in ([[1], [2, 3], [4]], [[1], [4], [2, 3]], [[2, 3], [1], [4]]):
        together = in_lockstep("all_reduce", *times)
        assert (together.last_ns, together.last_rank, together.is_paired) == ((), (), False)
        assert together.counts == tuple(map(len, times))
        assert together.ns == tuple(map(sum, times))


def test_of_rank_keeps_the_times_of_whole_steps() -> None:
    key = Key(-1, FORWARD, "cpu", STEP)
    runs = [run_of(rank, lockstep={key: Lockstep.of(rank, [rank, 5, 6])}) for rank in range(3)]
    merged = torchprof.merge(runs)
    parts = [merged.of_rank(rank) for rank in range(3)]
    assert [part.lockstep for part in parts] == [run.lockstep for run in runs]
    assert torchprof.merge(parts).lockstep == merged.lockstep


def test_of_rank_keeps_sums_and_drops_the_times_of_work() -> None:
    """Merging these parts again cannot match the times of different ranks."""
    key = Key(0, FORWARD, "cpu", WORK)
    alone = Key(0, BACKWARD, "cpu", WORK)
    zero = run_of(0, lockstep={key: Lockstep.of(0, [1, 2]), alone: Lockstep.of(0, [8, 9])})
    merged = torchprof.merge([zero, run_of(1, lockstep={key: Lockstep.of(1, [4, 1])})])
    part = merged.of_rank(0)
    assert part.lockstep == {key: Lockstep((0,), (2,), (3,), (0,), (), (), medians=(1,)), alone: Lockstep.of(0, [8, 9])}
    again = torchprof.merge([part, merged.of_rank(1)])
    assert again.lockstep[key] == Lockstep((0, 1), (2, 2), (3, 5), (0, 0), (), (), medians=(1, 1))
    assert again.lockstep[key].waiting_ns(0) is None


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


def test_merging_no_runs_is_refused() -> None:
    with pytest.raises(TorchprofError, match="there is none"):
        torchprof.merge([])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        (["rank0.json"], r"map\(torchprof.load, paths\)"),
        ([Path("rank0.json")], r"map\(torchprof.load, paths\)"),
        ("rank0.json", "several runs"),
        (run_of(0), "several runs"),
        (None, "several runs"),
        ([run_of(0), None], "None is none"),
    ],
)
def test_merging_something_else_than_runs_is_refused(what: Any, says: str) -> None:
    with pytest.raises(TorchprofError, match=says):
        torchprof.merge(what)


def test_merging_a_profile_is_refused() -> None:
    import torch

    with torchprof.Profile(torch.nn.Linear(2, 2)) as prof:
        pass
    with pytest.raises(TorchprofError, match=r"give prof\.run"):
        torchprof.merge([prof])


def test_two_runs_of_one_rank_are_refused() -> None:
    both = torchprof.merge([run_of(0), run_of(1)])
    for runs in ([run_of(1), run_of(0), run_of(1)], [both, run_of(1)], [both, both]):
        with pytest.raises(TorchprofError, match=r"of rank [01]\..*add_cycles=True"):
            torchprof.merge(runs)


def test_runs_of_different_jobs_are_refused() -> None:
    with pytest.raises(TorchprofError, match=r"of 2 ranks \(rank 0\) and of 4 ranks \(rank 1\)"):
        torchprof.merge([run_of(0, world=2), run_of(1, world=4)])
    assert torchprof.merge([run_of(0, world=2), run_of(1)]).missing_ranks == ()  # a world size of 1 means unknown


# Cycles


def test_runs_of_one_rank_are_added_up_with_add_cycles() -> None:
    """Of a model that had no ``b`` at first."""
    early = run_of(0, line(1, MUL, cpu_ns=3), line(0, cpu_ns=1), layers=["Net", "Net.a"])
    late = run_of(0, line(2, MUL, cpu_ns=10), line(1, MUL, cpu_ns=4), layers=["Net", "Net.b", "Net.a"])
    early = replace(early, metas=(replace(early.meta, wall_ns=5, warnings=caveats("Early.")),))
    late = replace(late, metas=(replace(late.meta, wall_ns=6, warnings=caveats("Late.")),))
    other = run_of(1, line(1, MUL, cpu_ns=100))
    merged = torchprof.merge([early, other, late], add_cycles=True)
    assert (merged.meta.cycles, merged.meta.wall_ns) == (2, 11)
    assert sentences(merged) == ("Run 1 of the 2 added: Early.", "Run 2 of the 2 added: Late.")
    found = {(row.layer.name, row.rank): (row.calls, row.cost.cpu_ns) for row in merged.rows if row.layer}
    assert found == {("Net", 0): (1, 1), ("Net.a", 0): (2, 13), ("Net.b", 0): (1, 4), ("Net.a", 1): (1, 100)}
    both = torchprof.merge([run_of(2), run_of(3)])
    with pytest.raises(TorchprofError, match="add the cycles of each rank"):
        torchprof.merge([both, other, both], add_cycles=True)


def test_warnings_are_computed_from_the_sum_of_cycles() -> None:
    """Warnings that follow from the run are of the whole sum. A stored one has the numbers of its runs."""

    def recorded(wall_ns: int, *others: str) -> Run:
        run = run_of(0, line(1, MUL, calls=2, uncounted=2), layers=["Net", "Net.a"])
        meta = replace(run.meta, wall_ns=wall_ns, run_delay_ns=wall_ns // 2, measured=("flops",))
        run = replace(run, metas=(replace(meta, warnings=caveats(*others)),))
        assert sum("(2 calls, in Net.a)" in text or "The machine was busy" in text for text in sentences(run)) == 2
        return run

    cycles = [recorded(340_000_000, "Never called: x."), recorded(348_000_000), recorded(312_000_000)]
    total = torchprof.merge(cycles, add_cycles=True)
    said = sentences(total)
    assert said[0] == "Run 1 of the 3 added: Never called: x."
    assert said[1] == "Not counted: mul (6 calls, in Net.a)."
    assert said[2].startswith("The machine was busy: for 500.000ms of 1.000s (50%)")
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


def test_the_examples_of_the_docs_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every block of docs/merging.md, and the error that the page shows."""
    page = (ROOT / "docs" / "merging.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "merging.md", "exec"), space)
    assert "Two of the runs are of rank 0" in capsys.readouterr().out


# The laws, with random runs

SMALL = st.integers(0, 3)
FRAMES = st.lists(st.sampled_from([MUL, ADD, MINE]), max_size=2).map(tuple)
PATHS = ("Net.a", "Net.0", "Net.1", "Net.a.x", "Net.1.y", "Net.b", "Other", "Other.7", "Other.3")


@st.composite
def jobs(draw: st.DrawFn, ranks: int = 4) -> list[Run]:
    """Runs of some ranks. Each has some of the layers, in its own order."""
    numbers = draw(st.lists(st.integers(0, 9), min_size=2, max_size=ranks, unique=True))
    return [draw(runs_of(rank)) for rank in numbers]


@st.composite
def runs_of(draw: st.DrawFn, rank: int) -> Run:
    names = ["Net"]
    for name in draw(st.permutations(PATHS)):
        above = name.rpartition(".")[0]
        if (not above or above in names) and draw(st.booleans()):
            names.append(name)
    counts = st.sampled_from([1, 2, None])
    flags = st.booleans()
    layers = [
        layer(
            name,
            params=draw(counts),
            param_bytes=draw(counts),
            dtype_bytes=draw(st.sampled_from([(), (("float32", 4),)])),
            tied=draw(flags),
            settings=f"of rank {rank}",
        )
        for name in names
    ]
    where = st.integers(NOT_SELECTED, len(layers) - 1)
    around = st.tuples(st.builds(Around, where, st.sampled_from(PHASES), FRAMES))
    one = st.builds(
        lambda where, frames, **options: line(where, *frames, **options),
        where,
        FRAMES,
        phase=st.sampled_from(PHASES),
        within=st.just(()) | around,
        shared=st.just(()) | st.tuples(st.integers(0, len(layers) - 1), st.integers(0, len(layers) - 1)),
        device=st.sampled_from(["cpu", "cuda:0"]),
        calls=SMALL,
        cpu_ns=SMALL,
        cpu_freed=SMALL,
        flops=SMALL,
    )
    keys = st.builds(
        Key,
        where,
        st.sampled_from([FORWARD, BACKWARD]),
        st.just("cpu"),
        st.sampled_from([WORK, STEP, "all_reduce"]),
        st.just(OF_TWO),
    )
    times = st.lists(SMALL, min_size=1, max_size=2)
    samples = st.dictionaries(
        st.builds(SampleKey, where, st.just(FORWARD), st.just(rank), st.just("cpu"), st.just("cpu_ns")),
        st.lists(SMALL, min_size=1, max_size=3).map(lambda values: calls(*values)),
        max_size=3,
    )
    held = st.lists(st.builds(Held, where, st.just(FORWARD), st.just("inputs"), SMALL, SMALL), max_size=2).map(tuple)
    devices = st.lists(st.sampled_from(["cpu", "cuda:0"]), unique=True)
    warnings = st.lists(st.sampled_from([*caveats("One."), Caveat("x", ("Net",)), Caveat("x", facts={"n": (1,)})]))
    run = run_of(
        rank,
        *draw(st.lists(one, max_size=8)),
        layers=layers,
        world=10,
        samples=draw(samples),
        memory=tuple(Memory(device, rank, draw(SMALL), held=draw(held)) for device in draw(devices)),
        timeline=timeline(rank, draw(where)) if draw(flags) else None,
        device_times=tuple(DeviceTime(device, rank, 9, 8, 7, 0, 1, 0, ()) for device in draw(devices)),
        lockstep={key: Lockstep.of(rank, draw(times)) for key in draw(st.lists(keys, max_size=3, unique=True))},
        unfinished=tuple(
            Unfinished(rank, 9, draw(SMALL), draw(where), FORWARD, "", False, (Entered(draw(where), FORWARD, "x", 2),))
            for _ in range(draw(st.integers(0, 1)))
        ),
    )
    return replace(run, metas=(replace(run.meta, warnings=tuple(draw(warnings))),))


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
    for path in {layer.path for run in runs for layer in run.layers}:
        have = sorted(run.meta.rank for run in runs if path in {layer.path for layer in run.layers})
        assert (ranks[path] or everyone) == tuple(have)

    def plain(rows: Counter[Any]) -> Counter[Any]:
        return Counter(
            row._replace(layer=row.layer and row.layer.path, shared_by=tuple(one.path for one in row.shared_by))
            for row in rows.elements()
        )

    whole = contents_of(merged)
    assert plain(whole[2]) == sum((plain(one[2]) for one in each), Counter())
    for part in (3, 4, 6, 7):
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


def test_runs_of_two_named_jobs_are_refused() -> None:
    """torchrun and Slurm name jobs. A run without a job name can be merged with any."""
    runs = [run_of(rank, world=3) for rank in range(3)]
    named = [replace(run, metas=(replace(run.meta, job=job),)) for run, job in zip(runs, ("a", "", "b"))]
    assert len(torchprof.merge(named[:2]).metas) == 2
    with pytest.raises(TorchprofError, match=r"of different jobs, a \(rank 0\) and b \(rank 2\)"):
        torchprof.merge(named)
