"""Pipelines of hand-made runs: the bubble and its parts, and slow stages."""

from __future__ import annotations

import gc
from dataclasses import replace
from random import Random
from weakref import ref

import pytest
from build.hand_made import cells
from build.pipelines import (
    MS,
    Orders,
    Takes,
    equal,
    gpipe,
    one_f_one_b,
    pipelines_of,
    run_of_pipelines,
    starts_of,
    unequal,
)
from pytest import approx

from torchprof.ranks import balance_of
from torchprof.ranks.pipeline_bubble import Bubble, Judged, judged_pipelines
from torchprof.run.run import Run


def judged(run: Run) -> Judged:
    [only] = judged_pipelines(run)
    return only


def bubble(run: Run) -> Bubble:
    found = judged(run).bubble
    assert found is not None
    return found


def why_unknown(run: Run) -> str:
    [found] = judged(run).bubbles
    assert isinstance(found, str)
    return found


def length(orders: Orders, takes: Takes, stages: int, link_ns: int = 0) -> int:
    starts = starts_of(orders, takes, stages, link_ns)
    return max(start + takes(*action) for action, start in starts.items())


# The bubble


def test_the_parts_of_a_bubble() -> None:
    """Each part is the difference of two idle shares, of steps that brute force gives. Stage 2 takes half as long
    again; the backward of microbatch 5 in stage 0 four times as long; what is sent travels for 100 us."""
    orders = one_f_one_b(4, 8)

    def own(stage: int, what: str, number: int) -> int:
        ns = unequal({2: 1.5})(stage, what, number)
        return 4 * ns if (stage, what, number) == (0, "B", 5) else ns

    work = sum(own(*action) for order in orders for action in order)
    stage_0 = equal(MS, 2 * MS * 11 // 8)  # the mean of its microbatches

    def of_stages(stage: int, what: str, number: int) -> int:
        return stage_0(stage, what, number) if stage == 0 else unequal({2: 1.5})(stage, what, number)

    means = {what: sum(own(s, what, m) for s in range(4) for m in range(8)) // 32 for what in "FB"}
    lengths = [
        length(orders, equal(means["F"], means["B"]), 4),
        length(orders, of_stages, 4),
        length(orders, own, 4),
        length(orders, own, 4, 100_000),
    ]
    idle = [1 - work / (4 * ns) for ns in lengths]
    found = bubble(run_of_pipelines(pipelines_of(orders, [own] * 3, link_ns=100_000)))
    assert found.schedule == approx(idle[0]) == approx(3 / 11)
    assert found.stages == approx(idle[1] - idle[0])
    assert found.microbatches == approx(idle[2] - idle[1])
    assert found.rest == approx(idle[3] - idle[2])
    assert found.measured == approx(idle[3])
    assert min(found.stages, found.microbatches, found.rest) > 0.005


def test_a_bubble_is_of_steps_of_usual_length() -> None:
    """The first step has start-up work, and one has a hiccup in a stage."""
    steps = [equal(30 * MS, 30 * MS), *[equal()] * 5, unequal({1: 20})]
    found = bubble(run_of_pipelines(pipelines_of(one_f_one_b(2, 6), steps)))
    assert found.measured == approx(1 / 7)
    assert found.stages == approx(0)


def test_the_first_rank_says_how_long_a_step_is() -> None:
    """Rank 1 has begun its step 50 ms before rank 0, which loads data. That is no waiting in a step."""
    first, second = pipelines_of(one_f_one_b(2, 6), [equal()] * 3)
    early = second.actions[0]._replace(waited_ns=tuple(ns + 50 * MS for ns in second.actions[0].waited_ns))
    second = replace(second, step_ns=tuple(ns + 50 * MS for ns in second.step_ns), actions=(early, *second.actions[1:]))
    assert bubble(run_of_pipelines([first, second])).measured == approx(1 / 7)


def test_a_step_ends_with_the_last_rank() -> None:
    """As in zero-bubble schedules, where rank 1 ends last, and begins with waiting. The weights take longer there. A
    step of 130 units, of two ranks, that are at work for 60 and 120."""
    orders: Orders = [
        [(0, what, number) for what in "FIW" for number in (0, 1)],
        [(1, what, number) for what, number in (("F", 0), ("I", 0), ("F", 1), ("I", 1), ("W", 0), ("W", 1))],
    ]

    def takes(stage: int, what: str, number: int) -> int:
        return 4 * MS if (stage, what) == (1, "W") else MS

    first, second = pipelines_of(orders, [takes] * 3)
    first = replace(first, step_ns=(8 * MS,) * 3)  # its own actions end earlier
    found = bubble(run_of_pipelines([first, second]))
    assert found.measured == approx(1 - 18 / (2 * 13)) and found.rest == approx(0)
    early = second.actions[0]._replace(waited_ns=tuple(ns + 50 * MS for ns in second.actions[0].waited_ns))
    second = replace(second, step_ns=tuple(ns + 50 * MS for ns in second.step_ns), actions=(early, *second.actions[1:]))
    assert bubble(run_of_pipelines([first, second])).measured == approx(1 - 18 / (2 * 13))


def test_work_after_the_actions_is_a_part_of_the_rest() -> None:
    found = bubble(run_of_pipelines(pipelines_of(gpipe(2, 2), [equal()] * 3, host_ns=3 * MS)))
    assert (found.measured, found.schedule) == (approx(1 - 6 / 12), approx(1 / 3))
    assert found.rest == approx(found.measured - found.schedule)


# What is unknown


def test_forwards_alone_have_no_bubble() -> None:
    """Nothing holds the first rank back: with five steps one after the other, each rank is at work all the time, and
    its step is as long as its actions."""
    orders = [[action for action in order if action[1] == "F"] for order in gpipe(4, 8)]
    steps = [replace(pipeline, step_ns=(8 * MS,) * 5) for pipeline in pipelines_of(orders, [equal()] * 5)]
    assert why_unknown(run_of_pipelines(steps)).startswith("without backward, steps overlap")
    alone = pipelines_of([[(0, "F", number) for number in range(4)]], [equal()] * 3, host_ns=MS)
    assert bubble(run_of_pipelines(alone)).measured == approx(1 / 5)


def test_the_bubble_is_unknown_if_ranks_are_missing() -> None:
    both = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    run = run_of_pipelines(both[1:])
    assert why_unknown(run) == "ranks of it are not in this run"
    assert judged(run).slow is None
    assert "Rank 0 is not in this run." in run.report("pipeline")


def test_ranks_without_a_group_are_a_pipeline_if_each_stage_is_there_once() -> None:
    both = [replace(pipeline, group=()) for pipeline in pipelines_of(one_f_one_b(2, 4), [equal()] * 3)]
    assert bubble(run_of_pipelines(both)).measured == approx(1 / 5)
    one_is_missing = run_of_pipelines(both, world_size=3)
    assert judged(one_is_missing).bubbles == ("its ranks are unknown",)
    twice = [*both, *(replace(pipeline, rank=pipeline.rank + 2) for pipeline in both)]
    assert judged(run_of_pipelines(twice)).bubble is None
    assert judged(run_of_pipelines(twice)).replicas.times[1].ranks == (1, 3)
    known = pipelines_of(one_f_one_b(2, 4), [equal()] * 3, ranks=[4, 5])
    assert [of.replicas.first.ranks for of in judged_pipelines(run_of_pipelines(twice, known))] == [(), (4, 5)]


def test_steps_that_cannot_be_paired_have_no_bubble() -> None:
    first, _ = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    _, second = pipelines_of(one_f_one_b(2, 4), [equal()] * 4)
    run = run_of_pipelines([first, second])
    assert why_unknown(run) == "its ranks recorded different numbers of steps"
    assert judged(run).replicas.times[1].microbatch_ns == 3 * MS  # of a stage alone


def test_actions_at_the_same_time_have_no_bubble() -> None:
    """As on a device with several streams: the step is shorter than the actions in their order."""
    pipelines = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    shorter = [replace(pipeline, step_ns=tuple(ns * 9 // 10 for ns in pipeline.step_ns)) for pipeline in pipelines]
    assert why_unknown(run_of_pipelines(shorter)).startswith("a step is shorter than its actions one after the other")
    rounded = [replace(pipeline, step_ns=tuple(ns * 99 // 100 for ns in pipeline.step_ns)) for pipeline in pipelines]
    found = bubble(run_of_pipelines(rounded))
    assert found.rest == approx(found.measured - found.schedule) and found.rest < -0.005
    assert found.schedule + found.stages + found.microbatches + found.rest == approx(found.measured)
    assert "the rest takes away 1%: steps were shorter" in run_of_pipelines(rounded).report("pipeline")


def test_orders_that_cannot_run_have_no_bubble() -> None:
    first, second = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    first = replace(first, actions=first.actions[::-1])
    assert why_unknown(run_of_pipelines([first, second])) == "its actions do not fit together in the recorded order"


def test_a_pipeline_of_unknown_size() -> None:
    both = [replace(pipeline, stages=0, schedule="", group=()) for pipeline in pipelines_of(gpipe(2, 2), [equal()])]
    run = run_of_pipelines(both, blocks=[2, 2])
    assert judged(run).bubble is None
    text = run.report("pipeline")
    assert text.startswith(
        "Ranks 0 and 1 have stages of pipelines whose ranks are unknown, of an unknown number of stages (2 "
        "microbatches)."
    )
    assert [row[-3:] for row in cells(text.split("\n\n")[1])[:2]] == [["0.000us", "–", "–"], ["1.000ms", "–", "–"]]


# Stages


def test_the_times_of_a_stage() -> None:
    """Medians over microbatches, steps and replicas; waiting by what follows it."""
    fast = pipelines_of(one_f_one_b(2, 3), [equal(), equal(), equal(90 * MS)])
    slow = pipelines_of(one_f_one_b(2, 3), [unequal({1: 2})] * 3, ranks=[2, 3])
    times = judged(run_of_pipelines(fast, slow)).replicas.times
    assert (times[0].ranks, times[1].ranks) == ((0, 2), (1, 3))
    assert (times[0].by_what, times[0].microbatch_ns, times[0].backward_ns) == ({"F": MS, "B": 2 * MS}, 3 * MS, 2 * MS)
    assert (times[1].of_rank, times[1].slowest_rank) == ({1: 3 * MS, 3: 6 * MS}, 3)
    assert times[1].step_ns == 18 * MS  # of 9, 9, 276, 18, 18 and 18 ms

    alone = judged(run_of_pipelines(fast[:2])).replicas.times
    assert (alone[0].inputs_ns, alone[0].gradients_ns, alone[0].other_ns) == (0, 3 * MS, 0)
    assert (alone[1].inputs_ns, alone[1].gradients_ns, alone[1].other_ns) == (MS, 0, 0)


def test_backwards_in_one_part_and_in_two_are_one_backward() -> None:
    orders: Orders = [[(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "I", 1), (0, "W", 1)]]
    [stage] = judged(run_of_pipelines(pipelines_of(orders, [equal(MS, 2 * MS)]))).replicas.times.values()
    assert stage.by_what == {"F": MS, "B": 2 * MS, "I": 2 * MS, "W": 2 * MS}
    assert stage.of_microbatch == {0: 3 * MS, 1: 5 * MS}
    assert (stage.microbatch_ns, stage.backward_ns) == (4 * MS, 3 * MS)


def test_a_stage_next_to_its_neighbor_on_the_same_rank_does_not_wait_for_it() -> None:
    """As in schedules in the form of a V: rank 1 has stages 1 and 2."""
    orders: Orders = [
        [(0, "F", 0), (3, "F", 0), (3, "B", 0), (0, "B", 0)],
        [(1, "F", 0), (2, "F", 0), (2, "B", 0), (1, "B", 0)],
    ]
    times = judged(run_of_pipelines(pipelines_of(orders, [equal()]))).replicas.times
    assert {stage: (of.inputs_ns, of.gradients_ns, of.other_ns) for stage, of in times.items()} == {
        0: (0, 4 * MS, 0),
        1: (MS, 0, 0),
        2: (0, 3 * MS, 0),
        3: (2 * MS, 0, 0),
    }


def test_two_different_pipelines_are_judged_alone() -> None:
    small = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    large = pipelines_of(one_f_one_b(2, 8), [equal()] * 3, ranks=[2, 3])
    assert [of.replicas.first.ranks for of in judged_pipelines(run_of_pipelines(small, large))] == [(0, 1), (2, 3)]


def test_pipelines_and_ranks_are_judged_once_for_each_run() -> None:
    run = run_of_pipelines(pipelines_of(one_f_one_b(2, 4), [equal()] * 3))
    [known], balance = judged_pipelines(run), balance_of(run)
    assert judged_pipelines(run)[0] is known and balance_of(run) is balance
    without = replace(run, pipelines=())
    assert judged_pipelines(without) == [] and balance_of(without) is not balance
    kept = [ref(known), ref(balance)]
    del run, known, balance
    gc.collect()
    assert [of() for of in kept] == [None, None]


def test_device_times_count_if_all_ranks_have_them() -> None:
    cpu = pipelines_of(one_f_one_b(2, 4), [equal()] * 3)
    device = pipelines_of(one_f_one_b(2, 4), [equal(3 * MS)] * 3, device="cuda:0")
    assert judged(run_of_pipelines(cpu, device)).replicas.times[0].by_what["F"] == 3 * MS
    assert judged(run_of_pipelines(cpu, device[:1])).replicas.times[0].by_what["F"] == MS


def test_launches_are_no_bubble_if_one_rank_lacks_device_times() -> None:
    """The actions of rank 1 are CUDA graphs, for example. Both ranks have measured the device."""
    cpu = pipelines_of(one_f_one_b(2, 4), [unequal({1: 2})] * 3)
    device = pipelines_of(one_f_one_b(2, 4), [equal(3 * MS)] * 3, device="cuda:0")
    run = run_of_pipelines(cpu, device[:1])
    assert judged(run).slow is not None  # nothing says yet that the device was used
    metas = tuple(
        replace(meta, device="cuda", measured=("cpu_ns", "device_ns"), busy_ns=(("cpu", MS), ("cuda:0", 9 * MS)))
        for meta in run.metas
    )
    launched = replace(run, metas=metas)
    assert why_unknown(launched).startswith("times are of the CPU")
    assert judged(launched).slow is None


# Slow stages


def test_a_slow_replica_is_no_slow_stage() -> None:
    orders = one_f_one_b(2, 8)
    replicas = [
        pipelines_of(orders, [takes] * 3, ranks=ranks)
        for takes, ranks in ((equal(), [0, 1]), (unequal({1: 2}), [2, 3]), (equal(), [4, 5]))
    ]
    assert judged(run_of_pipelines(*replicas)).slow is None


def test_steps_are_counted_once_however_many_pipelines_do_the_same() -> None:
    """In four steps, stage 1 is slower in all three replicas; in a fifth one in one of them."""
    orders, slow = one_f_one_b(2, 4), unequal({1: 1.5})
    replicas = [
        pipelines_of(orders, steps, ranks=ranks)
        for steps, ranks in (([slow] * 5, [0, 1]), ([*[slow] * 4, equal()], [2, 3]), ([*[slow] * 4, equal()], [4, 5]))
    ]
    slow_stages = judged(run_of_pipelines(*replicas)).slow
    assert slow_stages is not None
    assert (slow_stages.times, slow_stages.steps, slow_stages.may_be_chance) == (4, 5, False)
    one_step = [pipelines_of(orders, [slow], ranks=[first, first + 1]) for first in (0, 2, 4, 6)]
    slow_stages = judged(run_of_pipelines(*one_step)).slow
    assert slow_stages is not None
    assert (slow_stages.times, slow_stages.steps, slow_stages.may_be_chance) == (1, 1, True)


def noisy(seed: int, factor: float) -> Run:
    """Four stages, of which one takes so many times as long, in eight steps. Actions vary by 3 %, and 2 % of them take
    three times as long."""
    chance = Random(seed)

    def step() -> Takes:
        takes = unequal({seed % 4: factor})
        noise = {
            action: chance.gauss(1, 0.03) * (3 if chance.random() < 0.02 else 1)
            for order in one_f_one_b(4, 8)
            for action in order
        }
        return lambda *action: round(takes(*action) * noise[action])

    return run_of_pipelines(pipelines_of(one_f_one_b(4, 8), [step() for _ in range(8)]), with_rows=False)


@pytest.mark.parametrize("factor", [1, 1.1])
def test_a_stage_that_is_a_tenth_slower_is_named_and_of_equal_ones_none(factor: float) -> None:
    stages = [slow.stages if (slow := judged(noisy(seed, factor)).slow) else None for seed in range(12)]
    assert stages == [None if factor == 1 else (seed % 4,) for seed in range(12)]
