"""How evenly ranks share work: against calculations by hand, and a second count over every step of every rank."""

from __future__ import annotations

import random
from dataclasses import replace
from fractions import Fraction
from statistics import median
from typing import Any

import pytest
from build.examples import examples
from build.hand_made import label, op, row, run_of
from build.hand_made_ranks import NOWHERE, PATHS, everybody, lockstep, run_of_ranks
from build.jobs import FOUR, MS, PAIR, even, experts, fed_slowly, planted, rank
from hypothesis import assume, given
from hypothesis import strategies as st

from torchprof.ranks import Balance, balance_of
from torchprof.ranks.compared import IN_NO_OP, OneLayer, OverRanks, Times
from torchprof.ranks.slow import PARTS, Difference, Late, Slow
from torchprof.run.lockstep import EXCHANGES, GroupOfRanks, LockstepKey
from torchprof.run.merge import merge
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run
from torchprof.run.sentences import RANKS_CHOSEN
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, PHASES


def layer(balance: Balance, path: str, phase: str = FORWARD) -> OneLayer:
    index = OUTSIDE if path == NOWHERE else PATHS.index(path)
    (found,) = [one for one in balance.layers if (one.layer, one.phase) == (index, phase)]
    return found


def slow(run: Run) -> Slow:
    found = balance_of(run).slow
    assert found is not None
    return found


# The planted slow rank


def test_a_slow_rank_is_found_with_the_layer_in_which_it_is_slow() -> None:
    """In its median step rank 2 takes 10 + 2 + 13 = 25 ms, and the others take 16; rank 0 is slow only in two steps.
    The others wait for it for 9 ms a step, as long as it takes longer."""
    found = slow(planted())
    assert (found.ranks, found.work_ns, found.others_ns) == ((2,), (25_000_000,), 16_000_000)
    assert (found.slowest_in, found.last_in) == ((18, 20), (18, 20))
    assert found.difference == Difference("cpu", PATHS.index("Net.b.0"), BACKWARD, 9_000_000)
    # 18 steps of 9 ms and two of 26, for 20 steps; rank 0 waits in the 18 alone.
    assert found.others_waiting_ns == (18 * 9_000_000 + 2 * 26_000_000) / 20
    assert not found.may_be_chance
    assert balance_of(planted()).late is None  # that is said already


def test_waiting_is_the_time_of_a_collective_beyond_that_of_the_last_rank() -> None:
    balance = balance_of(planted())
    waits = [rank(balance, number).waiting_ns for number in FOUR]
    assert waits == [18 * 9_000_000 // 20, 10_700_000, 2 * 26_000_000 // 20, 10_700_000]
    assert [rank(balance, number).last_in for number in FOUR] == [(2, 20), (0, 20), (18, 20), (0, 20)]
    assert not any(one.waiting_is_lower_bound for one in balance.ranks)
    (one,) = balance.collectives
    assert one.calls == 80
    assert one.waiting is not None
    assert one.waiting.values == tuple(waits)
    assert one.came_last is not None
    assert (one.came_last.highest, one.came_last.max, one.came_last.sum) == (2, 18, 20)


def test_how_often_a_rank_was_the_slowest() -> None:
    balance = balance_of(planted())
    assert [one.slowest_in for one in balance.ranks] == [(2, 20), (0, 20), (18, 20), (0, 20)]
    assert layer(balance, "Net.b", BACKWARD).slowest_in == (18, 20)


def test_one_slow_step_does_not_make_a_rank_slow() -> None:
    """Rank 1 takes 90 ms once, so its mean is 14 ms and that of the others 10; but it is slowest in only one of 20
    steps."""
    times = {number: [10_000_000 + number] * 20 for number in FOUR}
    times[1][7] = 90_000_000
    assert balance_of(run_of_ranks({("Net.a", FORWARD): times})).slow is None


@pytest.mark.parametrize(
    ("steps", "ns", "is_slow"),
    [(1, 1_099_999, False), (1, 1_100_000, True), (5, 1_019_999, False), (5, 1_020_000, True)],
)
def test_a_slow_rank_takes_two_percent_longer_and_a_tenth_in_a_single_step(steps: int, ns: int, is_slow: bool) -> None:
    times = {**even(1_000_000, range(3), steps), 3: [ns] * steps}
    found = balance_of(run_of_ranks({("Net.a", FORWARD): times})).slow
    assert (found is not None) == is_slow
    assert found is None or found.may_be_chance == (steps == 1)


def test_two_percent_are_of_a_step_not_of_the_own_work() -> None:
    """A step takes 5 ms, and 1 ms of it is own work: 2 % of a step is a tenth of that."""
    steps = {"step_ns": even(5_000_000, steps=5)}

    def balance(ns: int) -> Balance:
        times = {**even(1_000_000, range(3)), 3: [ns] * 5}
        return balance_of(run_of_ranks({("Net.a", FORWARD): times}, parts=steps))

    assert balance(1_099_999).slow is None and balance(1_099_999).detectable == pytest.approx(0.1)
    assert slow(run_of_ranks({("Net.a", FORWARD): {**even(1_000_000, range(3)), 3: [1_100_000] * 5}}, parts=steps))


def test_what_a_slow_rank_costs_is_what_it_takes_longer_than_the_next_slowest() -> None:
    """Of steps of 100 ns: rank 3 takes 30, 30, 30, 30 and 80, the slowest of the others 20, 20, 25, 30 and 20. So steps
    would be 10, 10, 5, 0 and 60 ns shorter: the median is a tenth of a step."""
    times = {0: [18, 20, 20, 20, 18], 1: [20, 18, 20, 30, 20], 2: [20, 20, 25, 20, 20], 3: [30, 30, 30, 30, 80]}
    run = run_of_ranks({("Net.a", FORWARD): times}, parts={"step_ns": even(100, steps=5)})
    assert (slow(run).ranks, slow(run).costs) == ((3,), 0.1)


def test_without_anyone_waiting_the_cost_is_a_share_of_the_step_of_the_slow_rank() -> None:
    """Three ranks take 10 ns a step and one 30: without collectives only its own step is longer, by two thirds."""
    times = {**even(10, range(3)), 3: [30] * 5}
    run = run_of_ranks({("Net.a", FORWARD): times}, parts={"step_ns": times})
    assert slow(run).costs == 20 / 30


@pytest.mark.parametrize(("steps", "may_be_chance"), [(2, True), (3, False)])
def test_of_two_ranks_one_can_be_slow(steps: int, may_be_chance: bool) -> None:
    found = slow(run_of_ranks({("Net.a", FORWARD): {0: [300] * steps, 1: [200] * steps}}))
    assert (found.ranks, found.work_ns, found.others_ns) == ((0,), (300,), 200)
    assert found.may_be_chance == may_be_chance


def test_without_a_rank_that_is_not_slow_there_is_no_comparison() -> None:
    """All ranks of a run are slow: they were chosen from those of a larger job."""
    run = run_of_ranks({("Net.a", FORWARD): {0: [300] * 5, 1: [310] * 5}}, world_size=9)
    facts = {"verdict": "", "missing": (), "late": (), "may_be_chance": False}
    chosen = RunWarning.of(RANKS_CHOSEN, count=9, ranks=(0, 1), slow=(0, 1), **facts)
    metas = tuple(replace(meta, warnings=(chosen,)) for meta in run.metas)
    assert balance_of(replace(run, metas=metas)).slow is None


def test_no_more_than_half_of_the_ranks_are_slow() -> None:
    times = {number: [100 if number < 3 else 200] * 10 for number in range(6)}
    assert slow(run_of_ranks({("Net.a", FORWARD): times})).ranks == (3, 4, 5)
    times[2] = [200] * 10
    assert balance_of(run_of_ranks({("Net.a", FORWARD): times})).slow is None


def test_steps_that_cannot_be_paired_may_be_chance() -> None:
    """Rank 1 took one step less: its steps cannot be paired, but the time of a step is known."""
    run = run_of_ranks({("Net.a", FORWARD): {0: [10, 10, 10], 1: [30, 32]}})
    found = slow(run)
    assert (found.ranks, found.work_ns, found.others_ns, found.slowest_in) == ((1,), (30,), 10, None)
    assert found.may_be_chance
    balance = balance_of(run)
    assert [one.slowest_in for one in balance.ranks] == [None, None]
    assert layer(balance, "Net.a").slowest_in is None
    assert [one.steps for one in balance.ranks] == [3, 2]


def test_where_the_difference_is() -> None:
    """It is in the innermost layer with half of it, and in one phase if that has half of it."""
    both = {
        ("Net.a", FORWARD): even(100),
        ("Net.b.0", FORWARD): {**even(10), 3: [50] * 5},
        ("Net.b.0", BACKWARD): {**even(20), 3: [59] * 5},
        ("Net.b.1", FORWARD): {**even(10), 3: [12] * 5},
    }
    found = slow(run_of_ranks(both))
    assert found.difference == Difference("cpu", PATHS.index("Net.b.0"), None, 40 + 39)
    spread = {("Net.b.0", FORWARD): {**even(10), 3: [50] * 5}, ("Net.b.1", FORWARD): {**even(10), 3: [60] * 5}}
    found = slow(run_of_ranks(spread))
    assert found.difference == Difference("cpu", PATHS.index("Net.b.1"), FORWARD, 50)
    run = run_of_ranks(spread)
    selected = tuple(run.layers[PATHS.index(path)].path for path in ("Net.b.0", "Net.b.1"))
    found = slow(replace(run, metas=tuple(replace(meta, paths=selected) for meta in run.metas)))
    assert found.difference == Difference("cpu", PATHS.index("Net.b.1"), FORWARD, 50)
    outside = {("Net.a", FORWARD): even(100), (NOWHERE, FORWARD): {**even(10), 0: [90] * 5}}
    found = slow(run_of_ranks(outside))
    assert found.difference == Difference("cpu", OUTSIDE, FORWARD, 80)
    of_it = {"step_data_ns": even(5), "step_optimizer_ns": {**even(3), 0: [77] * 5}}
    found = slow(run_of_ranks(outside, parts=of_it))
    assert found.difference == Difference("cpu", OUTSIDE, None, 74, "step_optimizer_ns")


def test_without_steps_the_part_of_the_difference_is_that_of_rows() -> None:
    """Rank 0 loads data for 74 ns longer: 60 in the loader's range and 20 in an operator there, instead of 4 and 2."""
    outside = {("Net.a", FORWARD): even(100, steps=1), (NOWHERE, FORWARD): {**even(10, steps=1), 0: [90]}}
    run = run_of_ranks(outside, steps=0)
    loader, optimizer = label("enumerate(DataLoader)#_SingleProcessDataLoaderIter"), label("Optimizer.step#SGD.step")
    rows = [row(OUTSIDE, optimizer, rank=number, cpu_ns=4) for number in FOUR]
    rows += [row(OUTSIDE, op("aten::add"), rank=0, cpu_ns=6), row(0, loader, rank=0, cpu_ns=1_000)]
    for number in FOUR:
        loading, stacking = (60, 20) if number == 0 else (4, 2)
        rows.append(row(OUTSIDE, loader, rank=number, cpu_ns=loading))
        rows.append(row(OUTSIDE, loader, op("aten::stack"), rank=number, cpu_ns=stacking))
    found = slow(replace(run, rows=run_of(rows, layers=run.layers).rows))
    assert found.difference == Difference("cpu", OUTSIDE, None, 74, "step_data_ns")


def test_more_work_and_slower_work_are_distinguished_by_flops() -> None:
    own = {("Net.a", FORWARD): {**even(100), 2: [200] * 5}}
    as_many = {("Net.a", FORWARD, number): 1_000 for number in FOUR}
    assert slow(run_of_ranks(own, flops=as_many)).times_flops == 1
    assert slow(run_of_ranks(own, flops={**as_many, ("Net.a", FORWARD, 2): 1_500})).times_flops == 1.5
    uncounted = {("Net.a", FORWARD, 1): 1}
    assert slow(run_of_ranks(own, flops=as_many, uncounted=uncounted)).times_flops is None
    assert slow(run_of_ranks(own)).times_flops is None


# Who is late


def test_a_rank_that_others_wait_for_is_late_even_if_its_kernels_are_as_fast() -> None:
    balance = balance_of(fed_slowly())
    assert balance.slow is None
    assert balance.late == Late((2,), (60 * MS,), 0.8, False, Difference("cpu", IN_NO_OP, FORWARD, 60 * MS))
    assert [one.last_in for one in balance.ranks] == [(0, 8), (0, 8), (8, 8), (0, 8)]
    assert [one.slowest_in for one in balance.ranks] == [(0, 8)] * 4  # of equal ones none


@pytest.mark.parametrize("part", PARTS)
def test_which_part_of_the_step_a_rank_is_late_for(part: str) -> None:
    took = {**even(3 * MS, steps=8), 2: [63 * MS] * 8}
    late = balance_of(fed_slowly(**{part: took})).late
    assert late is not None
    assert late.difference == Difference("cpu", OUTSIDE, None, 60 * MS, part)


def test_a_rank_is_late_by_two_percent_of_a_step() -> None:
    """The step takes 75 ms, so the limit is 1.5 ms, whatever share of the collective that is."""
    assert balance_of(fed_slowly(more=1)).late is None
    found = balance_of(fed_slowly(more=2)).late
    assert found is not None
    assert (found.ranks, found.late_ns) == ((2,), (2 * MS,))


def test_in_few_steps_a_late_rank_may_be_chance() -> None:
    found = balance_of(fed_slowly(steps=1)).late
    assert found is not None
    assert (found.ranks, found.may_be_chance) == ((2,), True)


def test_without_waiting_per_step_the_rank_that_comes_last_most_often_is_late() -> None:
    """Files of torchprof 2.6 have no waiting per step."""
    run = fed_slowly()
    calls_alone = {
        key: replace(one, values=(), medians=()) for key, one in run.lockstep.items() if key.what != EXCHANGES
    }
    found = balance_of(replace(run, lockstep=calls_alone)).late
    assert found is not None
    assert (found.ranks, found.late_ns, found.may_be_chance) == ((2,), (60 * MS,), True)
    even_ones = {key: one for key, one in fed_slowly(more=7).lockstep.items() if key.what != EXCHANGES}
    assert balance_of(replace(run, lockstep=even_ones)).late is None


def test_in_two_dimensional_groups_a_rank_that_waits_for_another_is_not_late() -> None:
    """Ranks 0 to 3 and 4 to 7 share tensors, 0 and 4, 1 and 5 … data. Rank 5 is 50 ms late: those of its first group
    wait for it there, and are late themselves in their other groups, where 0, 1, 2 and 3 wait."""
    steps = 10
    run = run_of_ranks({("Net.a", FORWARD): even(10 * MS, range(8), steps)}, parts={"step_ns": even(90 * MS, range(8))})
    found = dict(run.lockstep)
    for first in (0, 4):
        group = GroupOfRanks(f"tp{first}", "mesh_tp", 4)
        key = LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group)
        waits = {number: [MS + 50 * MS * (first == 4 and number != 5)] * steps for number in range(first, first + 4)}
        found[key] = lockstep(waits, key)
    for first in range(4):
        group = GroupOfRanks(f"dp{first}", "mesh_dp", 2)
        key = LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group)
        found[key] = lockstep({first: [52 * MS] * steps, first + 4: [2 * MS] * steps}, key)
    late = balance_of(replace(run, lockstep=found)).late
    assert late is not None
    assert (late.ranks, late.late_ns) == ((5,), (50 * MS,))


def test_if_ranks_are_missing_no_rank_is_late() -> None:
    """A missing rank may have come even later."""
    run = fed_slowly()
    kept = [run.of_rank(number) for number in range(3)]
    assert balance_of(merge(replace(one, metas=(replace(one.meta, world_size=4),)) for one in kept)).late is None


# Layers


def test_an_unbalanced_expert_shows_in_the_layer_above() -> None:
    balance = balance_of(experts())
    above = layer(balance, "Net.b")
    assert above.work is not None
    assert above.flops is not None
    assert above.peak is not None
    assert (above.work.values, above.work.imbalance) == ((100, 300), 1.5)
    assert above.flops.imbalance == 1.5
    assert above.peak.imbalance == 1.5
    for path, number, ns in (("Net.b.0", 0, 100), ("Net.b.1", 1, 300)):
        alone = layer(balance, path)
        assert alone.work is not None
        assert (alone.work.ranks, alone.work.values, alone.work.imbalance) == ((number,), (ns,), None)
        assert (alone.slowest_in, alone.work.above_mean) == (None, 0)
    expert = layer(balance, "Net.b.0")
    assert expert.peak == OverRanks((0,), (4096,))
    assert expert.flops == OverRanks((0,), (200,))  # 1,000 in five steps
    assert balance.slow is not None
    assert balance.slow.ranks == (1,)
    assert balance.slow.difference == Difference("cpu", PATHS.index("Net.b.1"), FORWARD, 300)


def test_a_layer_that_a_rank_never_calls_takes_0_there() -> None:
    run = run_of_ranks({("Net.a", FORWARD): even(50, range(3)), ("Net.b.0", FORWARD): {0: [90] * 5, 2: [30] * 5}})
    one = layer(balance_of(run), "Net.b.0")
    assert one.work is not None
    assert (one.work.ranks, one.work.values) == ((0, 1, 2), (90, 0, 30))
    assert one.work.imbalance == 90 / 40
    assert (one.work.min, one.work.median, one.work.max) == (0, 30, 90)


def test_layers_that_were_not_selected_are_left_out() -> None:
    run = run_of_ranks({("Net.a", FORWARD): even(50)}, paths=PATHS)
    run = replace(run, metas=tuple(replace(meta, paths=(("Net", "a"),)) for meta in run.metas))
    assert {one.layer for one in balance_of(run).layers} == {PATHS.index("Net.a")}


def test_the_waiting_of_a_layer_includes_the_layers_below() -> None:
    """5 steps: rank 0 waits 20 in the first call of each, rank 1 waits 8 in the other layer."""
    collectives = {
        ("Net.b.0", FORWARD, "all_gather", PAIR): {0: [30] * 5, 1: [10] * 5},
        ("Net.b", FORWARD, "all_reduce", PAIR): {0: [4] * 5, 1: [12] * 5},
        ("Net.a", BACKWARD, "all_reduce", PAIR): {0: [4] * 5, 1: [4] * 5},
    }
    balance = balance_of(run_of_ranks({("Net.a", FORWARD): even(50, range(2))}, collectives))
    below, above, root = (layer(balance, path).waiting for path in ("Net.b.0", "Net.b", "Net"))
    assert below == OverRanks((0, 1), (20, 0))
    assert above == root == OverRanks((0, 1), (20, 8))
    assert layer(balance, "Net", BACKWARD).waiting == OverRanks((0, 1), (0, 0))
    assert not layer(balance, "Net.a").has_collectives
    assert [one.waiting_ns for one in balance.ranks] == [20, 8]


def test_waiting_in_two_overlapping_collectives_counts_once() -> None:
    """5 steps: rank 0 waits 49 in one and 48 in the other, and 47 of these overlap with the first. Rank 1 waits in
    neither, and that is exact. Each collective by itself has all of its waiting."""
    collectives = {
        ("Net.a", BACKWARD, "all_reduce", PAIR): {0: [50] * 5, 1: [1] * 5},
        ("Net.b", BACKWARD, "all_reduce", PAIR): {0: [49] * 5, 1: [1] * 5},
    }
    run = run_of_ranks({("Net.a", FORWARD): even(50, range(2))}, collectives)
    beside = {
        key: replace(one, beside_ns=(5 * 47, 0)) if key.is_collective and key.layer == PATHS.index("Net.b") else one
        for key, one in run.lockstep.items()
    }
    balance = balance_of(replace(run, lockstep=beside))
    assert [(one.waiting_ns, one.waiting_is_lower_bound) for one in balance.ranks] == [(49 + 1, True), (0, False)]
    assert layer(balance, "Net", BACKWARD).waiting == OverRanks((0, 1), (50, 0))
    assert layer(balance, "Net.b", BACKWARD).waiting == OverRanks((0, 1), (48, 0))
    assert sorted(one.waiting.max for one in balance.collectives if one.waiting is not None) == [48, 49]
    all_of_it = {key: replace(one, beside_ns=one.ns) if key.is_collective else one for key, one in beside.items()}
    assert balance_of(replace(run, lockstep=all_of_it)).ranks[0].waiting_ns == 49  # the longest of them


def test_of_two_overlapping_buckets_only_the_rest_is_certain_waiting() -> None:
    """Twice in each of 5 steps rank 0 takes 50 and rank 1 takes 1; 47 per step of rank 0 overlap with another bucket.
    The rank that always comes last does not wait, and that is exact."""
    collectives = {("Net.a", BACKWARD, "all_reduce", PAIR): {0: [50] * 10, 1: [1] * 10}}
    run = run_of_ranks({("Net.a", FORWARD): even(50, range(2))}, collectives)
    lockstep = {
        key: replace(one, beside_ns=(5 * 47, 5)) if key.is_collective else one for key, one in run.lockstep.items()
    }
    balance = balance_of(replace(run, lockstep=lockstep))
    (one,) = balance.collectives
    assert (one.waiting, one.lower_bound_on, one.calls) == (OverRanks((0, 1), (100 - 2 - 47, 0)), (0,), 20)
    assert [(rank.waiting_ns, rank.waiting_is_lower_bound) for rank in balance.ranks] == [(51, True), (0, False)]


def test_waiting_may_be_unknown_or_a_lower_bound() -> None:
    """The all-reduce has two of its four ranks; the broadcast has one rank; the calls of the gather are not paired."""
    collectives: dict[Any, Any] = {
        ("Net.a", FORWARD, "all_reduce", everybody(4)): {0: [30] * 5, 1: [10] * 5},
        ("Net.b.0", FORWARD, "broadcast", everybody(4)): {0: [30] * 5},
        ("Net.b.1", FORWARD, "all_gather", PAIR): {0: [30] * 5, 1: [10] * 4},
    }
    own = {("Net.a", FORWARD): even(50, range(2))}
    balance = balance_of(run_of_ranks(own, collectives, world_size=4))
    by_name = {one.name: one for one in balance.collectives}
    reduce, broadcast, gather = (by_name[name] for name in ("all_reduce", "broadcast", "all_gather"))
    assert reduce.waiting == OverRanks((0, 1), (20, 0))
    assert (reduce.waiting_is_lower_bound, broadcast.waiting, broadcast.waiting_is_lower_bound) == (True, None, False)
    assert (gather.waiting, gather.came_last, gather.calls) == (None, None, 9)
    assert layer(balance, "Net.a").waiting_is_lower_bound
    assert layer(balance, "Net.b").has_collectives
    assert layer(balance, "Net.b").waiting is None
    assert layer(balance, "Net").waiting == OverRanks((0, 1), (20, 0))
    assert layer(balance, "Net").waiting_is_lower_bound
    assert [(one.waiting_ns, one.waiting_is_lower_bound) for one in balance.ranks] == [(20, True), (0, True)]
    nothing = balance_of(run_of_ranks(own, {("Net.a", FORWARD, "all_reduce", None): {0: [30] * 5, 1: [10] * 5}}))
    assert [(one.waiting_ns, one.last_in) for one in nothing.ranks] == [(None, None)] * 2


# Whose time, which memory


def test_device_time_is_compared_if_every_rank_measured_it() -> None:
    device = run_of_ranks({("Net.a", FORWARD): even(70)}, device="device")
    on_cpu = run_of_ranks({("Net.a", FORWARD): even(500)})
    both = replace(device, lockstep={**on_cpu.lockstep, **device.lockstep})
    assert balance_of(both).measured_on == "device"
    assert rank(balance_of(both), 0).work_ns == 70
    metas = [replace(meta, measured=("cpu_ns",)) if meta.rank == 2 else meta for meta in both.metas]
    assert balance_of(replace(both, metas=tuple(metas))).measured_on == "cpu"
    assert rank(balance_of(replace(both, metas=tuple(metas))), 0).work_ns == 500
    assert balance_of(replace(both, lockstep={})).measured_on is None
    assert balance_of(replace(both, lockstep={})).slow is None


def test_peaks_of_ranks_by_kind_of_device() -> None:
    memory = {(0, "cpu"): 10, (0, "cuda:0"): 700, (0, "cuda:1"): 900, (1, "cpu"): 20}
    balance = balance_of(run_of_ranks({("Net.a", FORWARD): even(1, range(2))}, memory=memory))
    assert [one.peaks for one in balance.ranks] == [(("cpu", 10), ("cuda", 900)), (("cpu", 20),)]


def test_flops_of_ranks_and_of_all_together() -> None:
    flops = {("Net.a", FORWARD, 0): 5, ("Net.b.0", BACKWARD, 0): 7, (NOWHERE, FORWARD, 1): 100}
    own = {("Net.a", FORWARD): even(1, range(2))}
    balance = balance_of(run_of_ranks(own, flops=flops, uncounted={("Net.b", FORWARD, 1): 3}))
    assert [(one.flops, one.flops_is_lower_bound) for one in balance.ranks] == [(12, False), (100, True)]
    assert balance.flops == 112
    assert layer(balance, "Net.b").flops_is_lower_bound
    run = run_of_ranks(own, flops=flops, metas={1: {"measured": ("cpu_ns",)}})
    assert (rank(balance_of(run), 1).flops, balance_of(run).flops) == (None, None)


# A second count


@st.composite
def jobs(draw: st.DrawFn) -> dict[tuple[str, str], dict[int, list[int]]]:
    ranks = draw(st.integers(2, 5))
    steps = draw(st.integers(1, 4))
    times = st.lists(st.integers(0, 10**6), min_size=steps, max_size=steps)
    places = draw(st.lists(st.sampled_from([*PATHS, NOWHERE]), min_size=1, max_size=4, unique=True))
    return {(path, draw(st.sampled_from(PHASES))): {number: draw(times) for number in range(ranks)} for path in places}


@examples(60)
@given(jobs())
def test_figures_of_layers_equal_a_count_over_all_steps(own: dict[tuple[str, str], dict[int, list[int]]]) -> None:
    assume(any(any(times) for steps in own.values() for times in steps.values()))
    balance = balance_of(run_of_ranks(own))
    numbers = sorted({number for steps in own.values() for number in steps})
    count = len(next(iter(own.values()))[0])
    expected: dict[tuple[str, str], list[list[int]]] = {}
    for (path, phase), steps in own.items():
        way = path.split(".")
        for end in range(1, len(way) + 1):
            sums = expected.setdefault((".".join(way[:end]), phase), [[0] * count for _ in numbers])
            for number in numbers:
                sums[number] = [a + b for a, b in zip(sums[number], steps[number])]
    found = {(NOWHERE if one.layer < 0 else PATHS[one.layer], one.phase): one for one in balance.layers}
    assert set(found) == set(expected)
    for key, steps_of in expected.items():
        means = [round(Fraction(sum(steps), count)) for steps in steps_of]
        one = found[key]
        assert one.work is not None
        assert one.work.values == tuple(means)
        assert (one.work.min, one.work.median, one.work.max) == (min(means), median(means), max(means))
        if sum(means):
            assert one.work.imbalance == pytest.approx(float(Fraction(max(means) * len(means), sum(means))))
        else:
            assert one.work.imbalance is None
        together = list(zip(*steps_of))
        last = [at.index(max(at)) if at.count(max(at)) == 1 else None for at in together]
        assert one.slowest_in == (last.count(means.index(max(means))), count)
    whole = [[sum(steps[number][at] for steps in own.values()) for at in range(count)] for number in numbers]
    assert [one.work_ns for one in balance.ranks] == [round(Fraction(sum(steps), count)) for steps in whole]
    last = [at.index(max(at)) if at.count(max(at)) == 1 else None for at in zip(*whole)]
    assert [one.slowest_in for one in balance.ranks] == [(last.count(number), count) for number in numbers]
    assert sum(one.slowest_in.times for one in balance.ranks if one.slowest_in) == count - last.count(None)


def test_the_waiting_of_ranks_is_the_sum_over_collectives() -> None:
    """The last rank of each call does not wait: the smallest waiting of a call is 0."""
    rng = random.Random(3)
    collectives = {
        (path, phase, "all_reduce", everybody(4)): {
            number: [rng.randrange(1, 90) * 60 + number for _ in range(5)] for number in FOUR
        }
        for path in PATHS
        for phase in PHASES
    }
    balance = balance_of(run_of_ranks({("Net.a", FORWARD): even(1)}, collectives))
    by_hand = {
        number: sum(
            (steps[number][at] - min(steps[other][at] for other in FOUR))
            for steps in collectives.values()
            for at in range(5)
        )
        for number in FOUR
    }
    assert {one.rank: one.waiting_ns for one in balance.ranks} == {
        number: pytest.approx(ns / 5, abs=len(collectives)) for number, ns in by_hand.items()
    }
    assert sum(one.waiting.sum for one in balance.collectives if one.waiting) == sum(
        one.waiting_ns or 0 for one in balance.ranks
    )
    assert sum(one.last_in.times for one in balance.ranks if one.last_in) == 5 * len(collectives)
    assert all(one.last_in == Times(one.last_in.times, 5 * len(collectives)) for one in balance.ranks if one.last_in)
