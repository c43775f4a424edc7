"""The bubble of a pipeline, the share of time in which its ranks are idle, and why: by simulation of a step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from torchprof.analyze.pipeline.values import Action, OnePipeline, Order

OVERLAP = 0.02
"""A step that is shorter by more than this share than its actions allow, one after the other, has some at once."""


class Bubble(NamedTuple):
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
        simulations = [
            simulated(pipeline.orders, durations, pipeline.stages)
            for durations in (
                _means(took, lambda action: action.what),
                _means(took, lambda action: (action.stage, action.what)),
                took,
            )
        ]
        if None in simulations:
            return UnknownBubble("its actions do not fit together in the recorded order")
        measured = 1 - sum(took.values()) / (len(pipeline.members) * max(pipeline.step_ns[step], 1))
        bubbles.append((*(of_step.bubble for of_step in simulations if of_step is not None), measured))
    equal, own, varying, measured = map(fmean, zip(*bubbles))
    if measured < 1 - (1 - varying) / (1 - OVERLAP):
        return UnknownBubble("a step is shorter than its actions one after the other: some run at the same time")
    return Bubble(measured, equal, own - equal, varying - own, measured - varying)


def _means(took: Mapping[Action, float], key: Callable[[Action], Hashable]) -> dict[Action, float]:
    """The same actions, each with the mean duration of those with the same key."""
    times: defaultdict[Hashable, list[float]] = defaultdict(list)
    for action, ns in took.items():
        times[key(action)].append(ns)
    means = {name: fmean(ns) for name, ns in times.items()}
    return {action: means[key(action)] for action in took}


# The simulation


@dataclass(frozen=True)
class Simulated:
    """When each action starts and ends, in ns after the start of the step. ``ns``: the length of the step. ``idle_ns``:
    for each rank the time in which it runs no action."""

    starts: Mapping[Action, float]
    ends: Mapping[Action, float]
    ns: float
    idle_ns: tuple[float, ...]

    @property
    def bubble(self) -> float:
        """The share of the time of all ranks in which they are idle; 0 for a step of no length."""
        return sum(self.idle_ns) / (self.ns * len(self.idle_ns)) if self.ns else 0.0


def simulated(orders: Sequence[Order], took: Mapping[Action, float], stages: int) -> Simulated | None:
    """Simulate a step of a pipeline with so many ``stages``. ``orders``: the actions of each rank, different ones on
    each. ``took``: the duration of each action in ns.

    All ranks start together. An action starts when the one before it on its rank has ended, and what it needs is there:
    F of a stage the F of the stage before; B and I the F of their stage and the B or I of the stage after; W the I of
    its stage; all of the same microbatch. What is sent arrives at once.

    None if an action needs one that no rank has, or one that would run only after it.
    """
    needs = _needs(orders, stages)
    if needs is None:
        return None
    starts: dict[Action, float] = {}
    ends: dict[Action, float] = {}
    now = [0.0] * len(orders)
    done = [0] * len(orders)
    blocked: defaultdict[Action, list[int]] = defaultdict(list)  # the ranks that wait for an action
    ready = [*range(len(orders))]
    while ready:
        rank = ready.pop()
        while done[rank] < len(orders[rank]):
            action = orders[rank][done[rank]]
            missing = next((need for need in needs[action] if need not in ends), None)
            if missing is not None:
                blocked[missing].append(rank)
                break
            starts[action] = max([now[rank], *(ends[need] for need in needs[action])])
            ends[action] = now[rank] = starts[action] + took[action]
            done[rank] += 1
            ready += blocked.pop(action, ())
    if len(ends) < len(needs):
        return None
    ns = max(now, default=0.0)
    return Simulated(starts, ends, ns, tuple(ns - sum(took[action] for action in order) for order in orders))


def _needs(orders: Sequence[Order], stages: int) -> dict[Action, list[Action]] | None:
    """The actions that each action needs; None if no rank has one of them, or if an action is there twice."""
    actions = [action for order in orders for action in order]
    known = set(actions)
    if len(known) < len(actions):
        return None
    needs: dict[Action, list[Action]] = {}
    for action in actions:
        stage, what, microbatch = action
        wanted: list[tuple[Action, ...]] = []  # of each one of several
        if what == "W":
            wanted.append((Action(stage, "I", microbatch),))
        elif what != "F":
            wanted.append((Action(stage, "F", microbatch),))
            if stage < stages - 1:
                wanted.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
        elif stage > 0:
            wanted.append((Action(stage - 1, "F", microbatch),))
        needs[action] = [choice for choices in wanted for choice in choices if choice in known]
        if len(needs[action]) < len(wanted):
            return None
    return needs
