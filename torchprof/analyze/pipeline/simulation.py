"""Simulates a step of a pipeline: when each action starts, if ranks wait for nothing but each other."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Action(NamedTuple):
    """A microbatch in a stage; ``what`` is as in ``StageAction``: "F", "B", "I" or "W"."""

    stage: int
    what: str
    microbatch: int


Order = Sequence[Action]
"""The actions of a rank in the order in which it runs them."""


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
