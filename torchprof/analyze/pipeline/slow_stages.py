"""Which stages of a pipeline are slow: those that take longer than the others by more than chance explains."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from torchprof.analyze.pipeline.values import AlikePipelines, OnePipeline, stages_of
from torchprof.analyze.ranks.significance import stragglers

_FEW_STEPS = 3
_SLOWER = 0.05  # than the other ranks: less is the usual difference between equal layers

_Place = tuple[int, ...]  # the stages of a rank


@dataclass(frozen=True)
class SlowStages:
    """The ``stages`` of the ranks of a pipeline that take longest, of several if they take equally long; and all
    ``ranks`` that have them, of ``places`` in each pipeline.

    ``own_ns``: a microbatch in the stages of such a rank, of the slowest one, forward and backward. ``others_ns``: the
    median of the other ranks. In ``times`` of the ``steps``, all other ranks took less, in the median replica.
    ``may_be_chance``: there are too few steps to exclude chance.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    places: int
    own_ns: float
    others_ns: float
    times: int
    steps: int
    may_be_chance: bool


def slow_stages(replicas: AlikePipelines, pipeline: OnePipeline) -> SlowStages | None:
    """The slow stages, if they are on at most half of the ranks. ``pipeline``: a complete one of the replicas.

    They take longer than the median of the other ranks by at least ``_SLOWER``, in the median microbatch (of replicas
    in the median one, of two in the faster one) and by the test of ``stragglers`` over the microbatches of all steps.
    """
    busy = {
        place: sum(median_low(replicas.times[stage].of_rank.values()) for stage in place)
        for place in map(stages_of, pipeline.members)
    }
    longest = max(busy.values())
    slow = {place for place, ns in busy.items() if (1 + _SLOWER) * ns >= longest}
    others_ns = _of_others(slow, busy)
    if others_ns is None or min(busy[place] for place in slow) < (1 + _SLOWER) * others_ns:
        return None
    complete = (pipeline for pipeline in replicas.judged if pipeline.is_complete and pipeline.step_ns)
    in_replicas = [[*_busy_by_microbatch(pipeline)] for pipeline in complete]
    times = [microbatch for of_replica in in_replicas for microbatch in of_replica]
    own = [min(ns[place] for place in slow) for ns in times]
    others = [round(_of_others(slow, ns) or 0) for ns in times]
    tested = stragglers([own, others], least=_SLOWER, of=len(busy))
    if tested is not None and tested.slow != (0,):
        return None
    are_slowest = (_are_slowest(slow, of_replica, pipeline.microbatches) for of_replica in in_replicas)
    slowest_in = [median_low(of_step) for of_step in zip(*are_slowest)]
    return SlowStages(
        tuple(sorted(stage for place in slow for stage in place)),
        tuple(sorted(member.rank for member in replicas.members if stages_of(member) in slow)),
        len(slow),
        longest,
        others_ns,
        sum(slowest_in),
        len(slowest_in),
        tested is None or tested.may_be_chance or len(slowest_in) < _FEW_STEPS,
    )


def _of_others(slow: Collection[_Place], busy: Mapping[_Place, float]) -> float | None:
    """The median of the other ranks; None if these are fewer than half of all."""
    others = [ns for place, ns in busy.items() if place not in slow]
    return median(others) if 2 * len(others) >= len(busy) else None


def _are_slowest(slow: Collection[_Place], busy: Sequence[Mapping[_Place, int]], microbatches: int) -> list[bool]:
    """Whether all other ranks took less, in each step. ``busy``: by microbatch, one step after the other."""
    steps = [busy[first : first + microbatches] for first in range(0, len(busy), microbatches)]
    sums = ({place: sum(microbatch[place] for microbatch in step) for place in step[0]} for step in steps)
    return [
        min(step[place] for place in slow) > max(ns for place, ns in step.items() if place not in slow) for step in sums
    ]


def _busy_by_microbatch(pipeline: OnePipeline) -> Iterator[dict[_Place, int]]:
    """The time of each rank of a complete pipeline in each microbatch, by its stages, one step after the other."""
    numbers = sorted({action.microbatch for action in pipeline.members[0].actions})
    of_ranks = {}  # by the stages of the rank, in the order of steps and microbatches
    for member in pipeline.members:
        sums = [
            map(sum, zip(*(action.took_ns for action in member.actions if action.microbatch == number)))
            for number in numbers
        ]
        of_ranks[stages_of(member)] = [ns for step in zip(*sums) for ns in step]
    yield from (dict(zip(of_ranks, times)) for times in zip(*of_ranks.values()))
