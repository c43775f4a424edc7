"""The simulation of a step of a pipeline, against closed forms and a second implementation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
from build.pipelines import Key, Orders, gpipe, interleaved, needed_by, of_torch, one_f_one_b, starts_of
from hypothesis import given
from hypothesis import strategies as st

from torchprof.ranks.pipeline import Action
from torchprof.ranks.pipeline_bubble import simulated


def simulate(orders: Sequence[Sequence[Key]], took: Mapping[Key, float], stages: int) -> dict[Key, float] | None:
    """When each action starts."""
    named = {Action(*action): ns for action, ns in took.items()}
    ends = simulated([[Action(*action) for action in order] for order in orders], named, stages)
    return None if ends is None else {tuple(action): end - took[action] for action, end in ends.items()}


def durations(orders: Orders, **ns: float) -> dict[Key, float]:
    """So long for each action, by what it is."""
    return {action: ns[action[1]] for order in orders for action in order}


def length(orders: Orders, took: Mapping[Key, float], stages: int) -> float:
    starts = simulate(orders, took, stages)
    assert starts is not None
    return max(start + took[action] for action, start in starts.items())


@pytest.mark.parametrize("forward, backward", [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("ranks, microbatches", [(1, 1), (2, 1), (2, 8), (4, 2), (4, 8), (8, 32)])
def test_the_bubble_of_equal_stages(ranks: int, microbatches: int, forward: int, backward: int) -> None:
    """(P - 1) / (M + P - 1): Huang et al., *GPipe*, NeurIPS 2019; Narayanan et al., *PipeDream-2BW*, ICML 2021."""
    for orders in (gpipe(ranks, microbatches), one_f_one_b(ranks, microbatches)):
        ns = length(orders, durations(orders, F=forward, B=backward), ranks)
        assert ns == (microbatches + ranks - 1) * (forward + backward)


@pytest.mark.parametrize("forward, backward", [(1, 1), (1, 2), (3, 1)])
@pytest.mark.parametrize("ranks, chunks, microbatches", [(2, 2, 4), (4, 2, 8), (4, 3, 4), (3, 2, 9)])
def test_the_bubble_of_interleaved_stages(
    ranks: int, chunks: int, microbatches: int, forward: int, backward: int
) -> None:
    """(P - 1) / (v M + P - 1): Narayanan et al., SC 2021, section 2.2."""
    orders = interleaved(ranks, chunks, microbatches)
    ns = length(orders, durations(orders, F=forward, B=backward), ranks * chunks)
    assert ns == (chunks * microbatches + ranks - 1) * (forward + backward)


def test_forwards_of_unequal_stages_are_a_flow_shop() -> None:
    """Johnson, 1954: equal jobs take the time of one in all stages, and of all others in the slowest stage."""
    takes = [2, 7, 1, 4]
    orders = [[(rank, "F", number) for number in range(5)] for rank in range(4)]
    took = {action: takes[action[0]] for order in orders for action in order}
    assert length(orders, took, 4) == sum(takes) + 4 * max(takes)


def test_a_step_by_hand() -> None:
    """Two stages, two microbatches, 1F1B, each backward in two parts on the second stage."""
    first = [(0, "F", 0), (0, "F", 1), (0, "B", 0), (0, "B", 1)]
    second = [(1, "F", 0), (1, "I", 0), (1, "F", 1), (1, "I", 1), (1, "W", 0), (1, "W", 1)]
    starts = simulate([first, second], durations([first, second], F=2, B=5, I=3, W=1), 2)
    assert starts is not None
    assert [starts[action] for action in first] == [0, 2, 7, 12]
    assert [starts[action] for action in second] == [2, 4, 7, 9, 12, 13]


SCHEDULES = ["Interleaved1F1B", "InterleavedZeroBubble", "LoopedBFS", "ZBVZeroBubble", "DualPipeV"]


@pytest.mark.parametrize("how", SCHEDULES)
@pytest.mark.parametrize("ranks, microbatches", [(2, 4), (3, 6), (4, 8)])
def test_torchs_schedules_against_brute_force(how: str, ranks: int, microbatches: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, f"Schedule{how}"):
        pytest.skip("this torch does not have it")
    orders = of_torch(how, ranks, 2, microbatches)
    took = {
        action: 1 + (7 * action[0] + 5 * action[2] + 3 * ord(action[1])) % 11 for order in orders for action in order
    }
    assert simulate(orders, took, 2 * ranks) == starts_of(orders, lambda *action: took[action], 2 * ranks)


@st.composite
def any_pipeline(draw: st.DrawFn) -> tuple[Orders, dict[Key, int], int]:
    """Any order in which actions can run, with any durations. Stages may be on any rank, backwards in one part or
    two."""
    stages, ranks, microbatches = (draw(st.integers(1, most)) for most in (5, 3, 4))
    rank_of = [draw(st.integers(0, ranks - 1)) for _ in range(stages)]
    backwards = ["B", "IW"] if draw(st.booleans()) else [""]
    kinds = {(s, m): draw(st.sampled_from(backwards)) for s in range(stages) for m in range(microbatches)}
    waiting = [(s, what, m) for s in range(stages) for m in range(microbatches) for what in "F" + kinds[s, m]]
    orders: Orders = [[] for _ in range(ranks)]
    done: set[Key] = set()
    took = {}
    while waiting:
        ready = [
            action
            for action in waiting
            if all(any(need in done for need in needs) for needs in needed_by(action, stages))
        ]
        action = draw(st.sampled_from(ready))
        waiting.remove(action)
        done.add(action)
        orders[rank_of[action[0]]].append(action)
        took[action] = draw(st.integers(0, 9))
    return orders, took, stages


@given(any_pipeline())
def test_any_pipeline_against_brute_force(pipeline: tuple[Orders, dict[Key, int], int]) -> None:
    orders, took, stages = pipeline
    assert simulate(orders, took, stages) == starts_of(orders, lambda *action: took[action], stages)


@given(any_pipeline(), st.data())
def test_without_an_action_that_others_need_nothing_is_known(
    pipeline: tuple[Orders, dict[Key, int], int], data: st.DataObject
) -> None:
    orders, took, stages = pipeline
    missing = data.draw(st.sampled_from(sorted(took)))
    needed = any(missing in needs for action in took for needs in needed_by(action, stages))
    starts = simulate([[action for action in order if action != missing] for order in orders], took, stages)
    assert (starts is None) == needed


def test_orders_that_cannot_be_are_unknown() -> None:
    orders = one_f_one_b(2, 2)
    took = durations(orders, F=1, B=2)
    assert simulate(orders, took, 2) is not None
    deadlock = [orders[0], [*orders[1][2:], *orders[1][:2]]]
    assert simulate(deadlock, took, 2) is not None  # another order of microbatches, which works
    backward_first = [[*orders[0][2:], *orders[0][:2]], orders[1]]
    assert simulate(backward_first, took, 2) is None
    assert simulate(orders[:1], took, 2) is None
    assert simulate([*orders, orders[1]], took, 2) is None  # an action is there twice
    assert simulate([], {}, 0) == {}
