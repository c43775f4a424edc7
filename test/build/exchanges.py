"""Events of a step and of collectives on a CPU, made by hand."""

from __future__ import annotations

from build.events import MAIN
from torchprof.attribute.events import Event, Kind
from torchprof.run.lockstep import GroupOfRanks

GROUP = GroupOfRanks("0", "default_pg", 2)


def step(at: int) -> Event:
    return Event(Kind.STEP, "torchprof:!step", at, at, MAIN)


def exchange(name: str, start: int, end: int, thread: int = 9) -> Event:
    return Event(Kind.COLLECTIVE, name, start, end, thread)
