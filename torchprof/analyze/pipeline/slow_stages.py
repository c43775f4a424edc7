"""Which stages of a pipeline are slow: those that take clearly longer than the others, and do so in most steps."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from statistics import median

from torchprof.analyze.pipeline.values import AlikePipelines, OnePipeline, stages_of

_SLOWER = 0.05  # than the other ranks: less is the usual difference between equal layers
_MOST_STEPS = 0.75  # in which they are slower

_Place = tuple[int, ...]  # the stages of a rank


@dataclass(frozen=True)
class SlowStages:
    """The ``stages`` of the ranks of a pipeline that take longest, of several if they take equally long; and all
    ``ranks`` that have them, of ``places`` in each pipeline.

    ``own_ns``: a microbatch in the stages of such a rank, of the slowest one, forward and backward. ``others_ns``: the
    median of the other ranks. In ``times`` of the ``steps`` of all replicas they took clearly longer than these.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    places: int
    own_ns: float
    others_ns: float
    times: int
    steps: int


def slow_stages(replicas: AlikePipelines, busy: Mapping[_Place, float]) -> SlowStages | None:
    """The slow stages, if they are on at most half of the ranks. ``busy``: the time of each rank of a pipeline in a
    step, by its stages, in the mean."""
    longest = max(busy.values())
    slow = {place for place, ns in busy.items() if (1 + _SLOWER) * ns >= longest}
    if 2 * len(slow) > len(busy):
        return None
    in_steps = [_are_slow(slow, step) for pipeline in replicas.judged for step in _busy_in_steps(pipeline)]
    if not _are_slow(slow, busy) or sum(in_steps) < _MOST_STEPS * len(in_steps):
        return None
    stages = sorted(stage for place in slow for stage in place)
    ranks = sorted(member.rank for member in replicas.members if stages_of(member) in slow)
    microbatches = replicas.first.microbatches
    own_ns, others_ns = longest / microbatches, _of_others(slow, busy) / microbatches
    return SlowStages(tuple(stages), tuple(ranks), len(slow), own_ns, others_ns, sum(in_steps), len(in_steps))


def _are_slow(slow: Collection[_Place], busy: Mapping[_Place, float]) -> bool:
    return min(busy[place] for place in slow) >= (1 + _SLOWER) * _of_others(slow, busy)


def _of_others(slow: Collection[_Place], busy: Mapping[_Place, float]) -> float:
    return median(ns for place, ns in busy.items() if place not in slow)


def _busy_in_steps(pipeline: OnePipeline) -> Iterator[dict[_Place, float]]:
    """The same as ``busy``, of each step of a complete pipeline."""
    if pipeline.is_complete and pipeline.step_ns:
        places = [*map(stages_of, pipeline.members)]
        sums = [[*map(sum, zip(*(action.took_ns for action in member.actions)))] for member in pipeline.members]
        yield from (dict(zip(places, step)) for step in zip(*sums))
