"""The events of a trace as columns of integers, handed out in the order of time. Knows no torch."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

RUNTIME_CALLS, MEMORY_EVENTS, DEVICE_WORK = "runtime", "memory", "device"
"""Groups of events that are put in order each in a way of its own: calls of a device's runtime, memory, and what ran on
a device."""
BEYOND = 1 << 62

_ROUNDED = 1000  # ns: so long may be what took no time, in traces of whole microseconds
_WINDOW = 1024  # so many events of each stretch are put in order at a time
_MANY_STRETCHES = 2000


class Columns:
    """Events in the order of the file, a column a field. ``stretches``: where in it time goes back, and the first."""

    __slots__ = ("lane", "name", "ns", "number", "sequence", "signature", "start", "stretches")

    def __init__(self) -> None:
        self.start = array("q")
        self.ns = array("q")  # how long it took; of memory, how many bytes
        self.name = array("i")
        self.lane = array("i")
        self.sequence = array("q")  # of a device's work, the number of the op around its launch
        self.number = array(
            "q"
        )  # of an op; of a launch, and what it launched, that of the launch; of memory, its address
        self.signature = array("i")
        self.stretches = [0]

    @property
    def last(self) -> int:
        """When the last one began."""
        return self.start[-1] if self.start else -BEYOND

    def add(self, start: int, ns: int, name: int, lane: int, sequence: int, number: int, signature: int) -> None:
        if start < self.last:
            self.stretches.append(len(self.start))
        self.start.append(start)
        self.ns.append(ns)
        self.name.append(name)
        self.lane.append(lane)
        self.sequence.append(sequence)
        self.number.append(number)
        self.signature.append(signature)

    def in_order(self, groups: Sequence[str]) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """The events in the order of their start: start, ns, name, lane, sequence, number, signature.

        ``groups``: what the names are of, by their numbers.

        Traces are in order in stretches, of one thread or one kind. To merge those, a window at a time, takes hardly
        any memory; a list of all numbers would take as much as the columns.
        """
        columns = (self.start, self.ns, self.name, self.lane, self.sequence, self.number, self.signature)
        for window in self._windows(groups):
            yield from zip(*(map(column.__getitem__, window) for column in columns))

    def drop_doubles(self, groups: Sequence[str]) -> int:
        """Leave out every event that stands there once more, all its fields being equal, and return how many these are.

        In whole microseconds, small events may well be alike: there they are doubles where they have a number, and work
        of a stream, which runs one thing after the other, where it took longer than rounding makes of none. Memory is
        allocated, or freed, twice in a row at one address only in a double.
        """
        doubles: set[int] = set()
        for window in self._windows(groups):
            for start, alike in groupby(window, self.start.__getitem__):
                several = list(alike)
                if len(several) > 1:
                    doubles.update(self._doubles(start, several, groups))
        if doubles:
            kept = [at for at in range(len(self.start)) if at not in doubles]
            columns = {name: getattr(self, name) for name in self.__slots__ if name != "stretches"}
            for name, column in columns.items():
                setattr(self, name, array(column.typecode, map(column.__getitem__, kept)))
            self.stretches = [0, *(at for at in range(1, len(kept)) if self.start[at] < self.start[at - 1])]
        return len(doubles)

    def _doubles(self, start: int, several: Sequence[int], groups: Sequence[str]) -> Iterator[int]:
        """Of events that start at one time, in their order, those that are there already."""
        seen: set[tuple[int, ...]] = set()
        last_at: dict[tuple[int, int, int], int] = {}  # by thread, device and address: what was allocated or freed
        for at in several:
            ns, name, lane, number = self.ns[at], self.name[at], self.lane[at], self.number[at]
            group = groups[name]
            if group is MEMORY_EVENTS:
                if number and last_at.get((lane, name, number)) == ns:
                    yield at
                last_at[lane, name, number] = ns
                continue
            event = ns, name, lane, number, self.sequence[at], self.signature[at]
            is_exact = start % 1000 or ns % 1000
            if event in seen and (is_exact or (ns > _ROUNDED if group is DEVICE_WORK else number)):
                yield at
            seen.add(event)

    def _windows(self, groups: Sequence[str]) -> Iterator[Sequence[int]]:
        """The numbers of the events, in the order of their start."""
        start, ns, number = self.start, self.ns, self.number

        def outer_first(at: int) -> tuple[int, int, bool, int]:
            group = groups[self.name[at]]
            if group is MEMORY_EVENTS:  # by the innermost op that begins then; and as the file has it
                return start[at], 1, False, 0
            return start[at], -ns[at], group is RUNTIME_CALLS, number[at]

        # In whole microseconds, as torch wrote them before 2.3, one event after the other begins at the same time.
        key: Callable[[int], Any] = start.__getitem__ if any(time % 1000 for time in start) else outer_first
        heads, ends = list(self.stretches), [*self.stretches[1:], len(start)]
        if len(heads) > _MANY_STRETCHES:
            yield sorted(range(len(start)), key=key)
            return
        waiting = [which for which, head in enumerate(heads) if head < ends[which]]
        while waiting:
            # Nothing that is left for a later window begins before this time, or at it.
            limit = min(start[min(heads[which] + _WINDOW, ends[which]) - 1] for which in waiting)
            window: list[int] = []
            for which in waiting:
                after = bisect_right(start, limit, heads[which], ends[which])
                window.extend(range(heads[which], after))
                heads[which] = after
            window.sort(key=key)
            yield window
            waiting = [which for which in waiting if heads[which] < ends[which]]
