"""The events of a trace as columns of integers, read in the order of time. Knows no torch."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

RUNTIME_CALLS, MEMORY_EVENTS, DEVICE_WORK = "runtime", "memory", "device"
"""Groups of events that are sorted in different ways: calls of a device's runtime, memory events, and device work."""
OVERHEAD_EVENTS = "overhead"
"""The group of what the profiler records as overhead. It has no thread in the file."""
BEYOND = 1 << 62
"""No valid number of an event is larger."""

_ROUNDED = 1000  # ns: in traces of whole microseconds, rounding can make a shorter event this long
_WINDOW = 1024  # events of each stretch that are sorted at a time
_MANY_STRETCHES = 2000  # from here on, sorting everything at once is faster


class Columns:
    """Events in the order of the file, one column for each field.

    ``names``: group and name of an event by the number of its name. ``stretches``: the first event of each stretch in
    which no event starts before the previous one.
    """

    def __init__(self, names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self.start = array("q")
        self.ns = array("q")  # the duration; of a memory event, the bytes
        self.name = array("i")
        self.lane = array("i")
        self.sequence = array("q")  # the sequence number; of device work, the number of the operator that launched it
        # The number of an operator ("External id"); of a runtime call and of device work, the correlation ID; of a
        # memory event, the address.
        self.number = array("q")
        self.signature = array("i")
        self.stretches = [0]

    @property
    def last(self) -> int:
        """The start of the last event."""
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

    def _columns(self) -> tuple[array[int], ...]:
        return self.start, self.ns, self.name, self.lane, self.sequence, self.number, self.signature

    def in_order(self) -> Iterator[tuple[int, int, int, int, int, int, int]]:
        """The events in the order of their start: start, ns, name, lane, sequence, number, signature.

        A trace consists of sorted stretches, of one thread or one kind of event. They are merged a window at a time,
        which takes little memory; a sorted list of all events would take as much as the columns.
        """
        for window in self.windows():
            yield from zip(*(map(column.__getitem__, window) for column in self._columns()))

    def drop_doubles(self) -> int:
        """Drop events that repeat an earlier one, and return how many were dropped. All fields of a double are equal.

        In traces of whole microseconds, different short events can have equal fields. There, events of the CPU are
        doubles only if they have a number. Device work is a double only if it took longer than rounding can explain: a
        stream runs one thing at a time. An allocation, or a deallocation, is a double if it directly follows an equal
        one at the same address.
        """
        doubles: set[int] = set()
        for window in self.windows():
            for start, alike in groupby(window, self.start.__getitem__):
                several = list(alike)
                if len(several) > 1:
                    doubles.update(self._doubles(start, several))
        if doubles:
            kept = [index for index in range(len(self.start)) if index not in doubles]
            for column in self._columns():
                column[:] = array(column.typecode, map(column.__getitem__, kept))
            self.stretches = [0, *(index for index in range(1, len(kept)) if self.start[index] < self.start[index - 1])]
        return len(doubles)

    def separate(self, threads: Sequence[int], is_left_out: Sequence[bool]) -> None:
        """Let a range that ends shortly after the start of the next one on its thread end there: times are rounded.

        Otherwise the next one would be inside it. That is so if both last longer without the time that they share, and
        if that is below 1 us. ``threads``: by lane. ``is_left_out``: by name, whether an event is not a range of its
        thread.
        """
        starts, lengths, lanes, names = self.start, self.ns, self.lane, self.name
        open_ranges: dict[int, list[int]] = {thread: [] for thread in threads}  # outer to inner
        for window in self.windows():
            for index in window:
                if is_left_out[names[index]]:
                    continue
                start, end = starts[index], starts[index] + lengths[index]
                stack = open_ranges[threads[lanes[index]]]
                while stack:
                    last = stack[-1]
                    shared = starts[last] + lengths[last] - start
                    if shared > 0:
                        is_rounded = shared < _ROUNDED and 2 * shared < min(lengths[last], lengths[index])
                        if not is_rounded or start + shared >= end:
                            break
                        lengths[last] -= shared
                    stack.pop()
                stack.append(index)

    def _doubles(self, start: int, several: Sequence[int]) -> Iterator[int]:
        """The doubles among events that start at the same time, given in their order."""
        seen: set[tuple[int, ...]] = set()
        last_at: dict[tuple[int, int, int], int] = {}  # by thread, device and address: bytes allocated or freed
        for index in several:
            ns, name, lane, number = self.ns[index], self.name[index], self.lane[index], self.number[index]
            group = self._names[name][0]
            if group is MEMORY_EVENTS:
                if number and last_at.get((lane, name, number)) == ns:
                    yield index
                last_at[lane, name, number] = ns
                continue
            event = ns, name, lane, number, self.sequence[index], self.signature[index]
            is_exact = start % 1000 or ns % 1000
            if event in seen and (is_exact or (ns > _ROUNDED if group is DEVICE_WORK else number)):
                yield index
            seen.add(event)

    def windows(self) -> Iterator[Sequence[int]]:
        """The numbers of the events in the order of their start, in lists."""
        start, ns, number = self.start, self.ns, self.number

        def outer_first(index: int) -> tuple[int, int, bool, int]:
            group = self._names[self.name[index]][0]
            if group is MEMORY_EVENTS:  # inside the innermost operator that starts then; in the order of the file
                return start[index], 1, False, 0
            return start[index], -ns[index], group is RUNTIME_CALLS, number[index]

        # In whole microseconds, as torch wrote them before 2.3, many events start at the same time.
        key: Callable[[int], Any] = start.__getitem__ if any(time % 1000 for time in start) else outer_first
        heads, ends = list(self.stretches), [*self.stretches[1:], len(start)]
        if len(heads) > _MANY_STRETCHES:
            yield sorted(range(len(start)), key=key)
            return
        waiting = [which for which, head in enumerate(heads) if head < ends[which]]
        while waiting:
            # No event of a later window starts before this time, or at it.
            limit = min(start[min(heads[which] + _WINDOW, ends[which]) - 1] for which in waiting)
            window: list[int] = []
            for which in waiting:
                after = bisect_right(start, limit, heads[which], ends[which])
                window.extend(range(heads[which], after))
                heads[which] = after
            window.sort(key=key)
            yield window
            waiting = [which for which in waiting if heads[which] < ends[which]]
