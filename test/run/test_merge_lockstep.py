"""Lockstep of merged ranks and added cycles, against times calculated by hand."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from itertools import accumulate
from operator import add

import pytest
from build.merging import ALL_REDUCE, OF_TWO, run_of

import torchprof
from torchprof.run.lockstep import EXCHANGES, GAP, NO_LAST_RANK, NOT_RECORDED, STEP, WORK, Lockstep, LockstepKey
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

MS = 1_000_000


def in_lockstep(what: str, *times: Sequence[int], layer: int = 0) -> Lockstep:
    key = LockstepKey(layer, FORWARD, "cpu", what, None if what in (WORK, STEP) else OF_TWO)
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
    key = LockstepKey(0, FORWARD, "cpu", what, None if what in (WORK, STEP) else OF_TWO)
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


STEPS = LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)


def in_two_cycles(
    first: dict[LockstepKey, Sequence[int]], second: dict[LockstepKey, Sequence[int]], rank: int = 0
) -> Run:
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
    work = LockstepKey(2, FORWARD, "cpu", WORK)
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
        LockstepKey(OUTSIDE, FORWARD, "cpu", GAP),
        LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, OF_TWO),
        LockstepKey(OUTSIDE, FORWARD, "device", STEP),
        LockstepKey(1, BACKWARD, "device", WORK),
    ],
)
def test_times_per_step_have_one_value_for_each_step_of_all_cycles(key: LockstepKey) -> None:
    with_it, without = {STEPS: [9, 9, 9], key: [1, 2, 3]}, {STEPS: [9, 9]}
    assert in_two_cycles(with_it, without).lockstep[key] == Lockstep.of(0, [1, 2, 3, 0, 0])
    assert in_two_cycles(without, with_it).lockstep[key] == Lockstep.of(0, [0, 0, 1, 2, 3])


@pytest.mark.parametrize("key", [ALL_REDUCE, LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, NOT_RECORDED)])
def test_collectives_have_no_zeros_for_cycles_without_calls(key: LockstepKey) -> None:
    """Collectives are counted by calls. If no groups were recorded, a cycle without calls may only lack the record."""
    with_it, without = {STEPS: [9, 9, 9], key: [1, 2, 3]}, {STEPS: [9, 9]}
    assert in_two_cycles(with_it, without).lockstep[key] == Lockstep.of(0, [1, 2, 3])
    assert in_two_cycles(without, with_it).lockstep[key] == Lockstep.of(0, [1, 2, 3])


def test_adding_cycles_drops_medians_without_times() -> None:
    """A run of ``of_rank`` has the median of each layer, but not the times."""
    key = LockstepKey(0, FORWARD, "cpu", WORK)
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
    key = LockstepKey(-1, FORWARD, "cpu", STEP)
    runs = [run_of(rank, lockstep={key: Lockstep.of(rank, [rank, 5, 6])}) for rank in range(3)]
    merged = torchprof.merge(runs)
    parts = [merged.of_rank(rank) for rank in range(3)]
    assert [part.lockstep for part in parts] == [run.lockstep for run in runs]
    assert torchprof.merge(parts).lockstep == merged.lockstep


def test_of_rank_keeps_sums_and_drops_the_times_of_work() -> None:
    """Merging these parts again cannot match the times of different ranks."""
    key = LockstepKey(0, FORWARD, "cpu", WORK)
    alone = LockstepKey(0, BACKWARD, "cpu", WORK)
    zero = run_of(0, lockstep={key: Lockstep.of(0, [1, 2]), alone: Lockstep.of(0, [8, 9])})
    merged = torchprof.merge([zero, run_of(1, lockstep={key: Lockstep.of(1, [4, 1])})])
    part = merged.of_rank(0)
    assert part.lockstep == {key: Lockstep((0,), (2,), (3,), (0,), (), (), medians=(1,)), alone: Lockstep.of(0, [8, 9])}
    again = torchprof.merge([part, merged.of_rank(1)])
    assert again.lockstep[key] == Lockstep((0, 1), (2, 2), (3, 5), (0, 0), (), (), medians=(1, 1))
    assert again.lockstep[key].waiting_ns(0) is None
