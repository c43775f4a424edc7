"""The bubble of a pipeline: the share of time in which its ranks are idle, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from torchprof.analyze.pipeline.simulation import Action, simulated
from torchprof.analyze.pipeline.values import OnePipeline

OVERLAP = 0.02
"""A step that is shorter by more than this share than its actions allow, one after the other, has some at once."""


@dataclass(frozen=True)
class Bubble:
    """The shares of the time of all ranks in which they are idle, in a step. The last four add up to ``measured``.

    - ``measured``: 1 - the time of all actions / (ranks x the length of the step).
    - ``schedule``: the idle share of this schedule with equal stages, whose actions take as long as the mean of all.
    - ``stages``: what is added if each stage takes its own time, the mean over its microbatches.
    - ``microbatches``: what is added if each action takes its own time.
    - ``rest``: communication, the loss, the host, and all other reasons. Negative in a step that was shorter than the
      simulated one.
    """

    measured: float
    schedule: float
    stages: float
    microbatches: float
    rest: float


@dataclass(frozen=True)
class UnknownBubble:
    """Why the bubble of a pipeline is unknown, as the end of a sentence."""

    why: str


def bubble_of(pipeline: OnePipeline) -> Bubble | UnknownBubble:
    """The bubble of a pipeline in steps of usual length: the mean over them."""
    if not pipeline.is_complete:
        return UnknownBubble("ranks of it are not in this run" if pipeline.ranks else "its ranks are unknown")
    trains = any(action.what != "F" for member in pipeline.members for action in member.actions)
    if not trains and len(pipeline.members) > 1:
        return UnknownBubble("without backward, steps overlap: a rank begins the next one while others do this one")
    if not pipeline.typical_steps:
        return UnknownBubble("its ranks recorded different numbers of steps")
    bubbles = []
    for step in pipeline.typical_steps:
        took = pipeline.took(step)
        levels = [
            _simulated_bubble(pipeline, durations)
            for durations in (
                _means(took, lambda action: action.what),
                _means(took, lambda action: (action.stage, action.what)),
                took,
            )
        ]
        if None in levels:
            return UnknownBubble("its actions do not fit together in the recorded order")
        measured = 1 - sum(took.values()) / (len(pipeline.members) * max(pipeline.step_ns[step], 1))
        bubbles.append((*(level for level in levels if level is not None), measured))
    equal, own, varying, measured = map(fmean, zip(*bubbles))
    if measured < 1 - (1 - varying) / (1 - OVERLAP):
        return UnknownBubble("a step is shorter than its actions one after the other: some run at the same time")
    return Bubble(measured, equal, own - equal, varying - own, measured - varying)


def _simulated_bubble(pipeline: OnePipeline, took: Mapping[Action, float]) -> float | None:
    step = simulated(pipeline.orders, took, pipeline.stages)
    return None if step is None else step.bubble


def _means(took: Mapping[Action, float], key: Callable[[Action], Hashable]) -> dict[Action, float]:
    """The same actions, each with the mean duration of those with the same key."""
    times: defaultdict[Hashable, list[float]] = defaultdict(list)
    for action, ns in took.items():
        times[key(action)].append(ns)
    means = {name: fmean(ns) for name, ns in times.items()}
    return {action: means[key(action)] for action in took}


def mean_bubble(bubbles: Iterable[Bubble]) -> Bubble | None:
    """The mean of each figure; None without any."""
    figures = [(of.measured, of.schedule, of.stages, of.microbatches, of.rest) for of in bubbles]
    return Bubble(*map(fmean, zip(*figures))) if figures else None
