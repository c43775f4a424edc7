"""Hand-made events of collectives on a CPU."""

from __future__ import annotations

from torchprof.attribute.events import Event, Kind
from torchprof.run.lockstep import GroupOfRanks

GROUP = GroupOfRanks("0", "default_pg", 2)


def exchange(name: str, start: int, end: int | None = None, thread: int = 9, signature: int = 0) -> Event:
    """A collective on a thread of the backend, by default for 100 ns."""
    return Event(Kind.COLLECTIVE, name, start, start + 100 if end is None else end, thread, signature=signature)
