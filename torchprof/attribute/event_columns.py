"""The CPU's events of one recording as columns: by thread, and in the order of start, outer ones before inner ones."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from heapq import merge
from itertools import compress, groupby, islice, repeat
from operator import and_, gt, le
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

from torchprof.attribute.events import Event, Kind
from torchprof.run.collectives import C10D_OPS, RECORDS_COLLECTIVE
from torchprof.run.words import REPLAYS, is_runtime_call

IN_NODE = 2  # see ``EventColumns.groupable``
IntColumn: TypeAlias = "array[int]"
BEYOND = 1 << 62  # no time, no index and no other number of an event is larger
_OF_COMPILED_CODE = frozenset({Kind.GUARDS, Kind.REGION, Kind.GRAPH, Kind.COMPILING, Kind.COMPILED_INPUTS})
_LONG_CALL_NS = 10_000_000  # of a device's runtime; most take some microseconds
_MAY_WORK = re.compile(r"Alloc|Host|Launch|Mem(cpy|set)|Sync|Wait|Record|Query|Graph|Enqueue")
"""In the names of a runtime's calls that take long for other reasons than the start of a device."""
_COLUMNS = {
    "number": ("i", 0),
    "start": ("q", 0),
    "end": ("q", 0),
    "sequence": ("q", -1),
    "forward_thread": ("q", 0),
    "correlation": ("q", 0),
    "signature": ("i", 0),
    "nbytes": ("q", 0),
    "address": ("q", 0),
}
"""The columns: their type codes, and what stands for a value that was not recorded."""


class ThreadEvents(NamedTuple):
    """The events of one thread: those from ``first`` up to ``after``."""

    thread: int
    first: int
    after: int


class EventKind(NamedTuple):
    """What events with one number have in common. ``device``: where memory is; "cpu" for all others."""

    kind: Kind
    name: str
    device: str = "cpu"


_Key = TypeVar("_Key")


class Numbers(dict[_Key, int]):
    """Numbers for keys, in the order of first use."""

    def __missing__(self, key: _Key) -> int:
        number = self[key] = len(self)
        return number


@dataclass(slots=True, eq=False, repr=False)
class EventColumns:
    """One value for each event in each column. A column whose values were not recorded is None.

    - ``number``: an index in ``kinds``.
    - ``start``, ``end``: in ns. A memory event ends where it starts.
    - ``sequence``: the autograd sequence number (-1: none). ``forward_thread``: the thread that it was counted on.
    - ``correlation``: see ``Event``; 0 for memory events, which have an ``address``.
    - ``signature``: the number of the op's recorded inputs (0: none).
    - ``nbytes``, ``address``: of memory events.
    - ``size``: how many events begin on the thread before this one ends, itself included: 3 for an op with two inside.

    ``threads``: the events of each. ``kernels``: the work of devices, in the order of start; of a trace, read once.
    ``first_work_ns``: when the first of it began. ``launched``: the number of calls that launch a kernel; ``lost``: of
    those whose kernel was not recorded.
    """

    kinds: list[EventKind]
    threads: list[ThreadEvents]
    number: IntColumn
    start: IntColumn
    end: IntColumn
    sequence: IntColumn | None = None
    forward_thread: IntColumn | None = None
    correlation: IntColumn | None = None
    signature: IntColumn | None = None
    nbytes: IntColumn | None = None
    address: IntColumn | None = None
    kernels: Iterable[Event] = ()
    first_work_ns: int = 0
    launched: int = 0
    lost: int = 0
    _size: IntColumn | None = field(default=None, init=False)

    @property
    def size(self) -> IntColumn:
        if self._size is None:
            start, end = self.start, self.end
            sizes = self._size = array("i", [1]) * len(start)
            contains = bytes(map(gt, end, islice(start, 1, None)))  # most events contain no other
            for _, first, after in self.threads:
                index = contains.find(1, first, after)
                while index >= 0:
                    sizes[index] = bisect_left(start, end[index], index + 1, after) - index
                    index = contains.find(1, index + 1, after)
        return self._size

    def __len__(self) -> int:
        return len(self.number)

    @staticmethod
    def of(events: Iterable[Event]) -> EventColumns:
        """The columns of these events. They must be in the order of start, and kernels must come last."""
        numbers: Numbers[EventKind] = Numbers()
        rows: list[tuple[int, ...]] = []
        threads: list[int] = []
        kernels: list[Event] = []
        for event in events:
            if event.kind is Kind.KERNEL:
                kernels.append(event)
                continue
            kind, name, start, end, thread, sequence, forward, correlation, device, nbytes, signature = event
            number = numbers[EventKind(kind, name, device)]
            correlation, address = (0, correlation) if kind is Kind.MEMORY else (correlation, 0)
            rows.append((number, start, end, sequence, forward, correlation, signature, nbytes, address))
            threads.append(thread)
        of_threads, order = by_thread(range(len(rows)), threads)
        columns: dict[str, Any] = {}
        for (name, (code, absent)), values in zip(_COLUMNS.items(), zip(*map(rows.__getitem__, order))):
            if name in ("number", "start", "end") or any(value != absent for value in values):
                columns[name] = array(code, values)
        number_of, starts, ends = (columns.pop(name, array(_COLUMNS[name][0])) for name in ("number", "start", "end"))
        return EventColumns([*numbers], of_threads, number_of, starts, ends, **columns, kernels=kernels)

    def event(self, index: int, thread: int) -> Event:
        kind, name, device = self.kinds[self.number[index]]
        start, end = self.start[index], self.end[index]
        if kind is Kind.MEMORY:
            address = self.address[index] if self.address else 0
            nbytes = self.nbytes[index] if self.nbytes else 0
            values: tuple[Any, ...] = (kind, name, start, end, thread, -1, 0, address, device, nbytes, 0)
        else:
            maker = self.sequence[index] if self.sequence else -1
            of_thread = self.forward_thread[index] if self.forward_thread else 0
            launch = self.correlation[index] if self.correlation else 0
            inputs = self.signature[index] if self.signature else 0
            values = (kind, name, start, end, thread, maker, of_thread, launch, device, 0, inputs)
        return tuple.__new__(Event, values)  # takes a third of the time of Event(...)

    def events(self) -> Iterator[Event]:
        """All events in the order of start, those of the CPU first."""
        yield from (self.event(index, thread) for index, thread in self.in_time_order())
        yield from self.kernels

    def in_time_order(self) -> Iterator[tuple[int, int]]:
        """The indices of all events and their threads, in the order of start."""
        of_threads = (
            zip(self.start[first:after], range(first, after), repeat(thread)) for thread, first, after in self.threads
        )
        return ((index, thread) for _, index, thread in merge(*of_threads))

    def of_kinds(self, *kinds: Kind) -> list[tuple[int, int]]:
        """The indices of the events of these kinds and their threads, in the order of start."""
        wanted = bytes(kind.kind in kinds for kind in self.kinds)
        is_wanted = bytes(map(wanted.__getitem__, self.number)) if any(wanted) else b""
        places = []
        for thread, first, after in self.threads:
            index = is_wanted.find(1, first, after)
            while index >= 0:
                places.append((index, thread))
                index = is_wanted.find(1, index + 1, after)
        if len(self.threads) > 1:
            places.sort(key=lambda line: self.start[line[0]])
        return places

    def events_of(self, kind: Kind) -> Iterator[Event]:
        return (self.event(index, thread) for index, thread in self.of_kinds(kind))

    def add(
        self,
        before: Iterable[Event] = (),
        after: Iterable[Event] = (),
        without: Set[int] = frozenset(),
        places: Mapping[tuple[int, int], int] = MappingProxyType({}),
    ) -> None:
        """Add events, and drop those with the indices ``without``. Of events of a thread that start at the same time,
        those of ``before`` come first, and those of ``after`` last. ``places``: by thread and start, the index that an
        event of ``before`` comes before, if others that start at the same time stay before it."""
        first, last = EventColumns.of(before), EventColumns.of(after)
        if not (len(first) or len(last) or without):
            return
        own = len(first)  # an index among all: those of ``first`` begin at 0, the own ones here, those of ``last`` then
        spans = {thread: (begin, until) for thread, begin, until in self.threads}
        changes: dict[int, list[tuple[int, int, int]]] = {thread: [] for thread in spans}
        for part, shift, find in ((first, 0, bisect_left), (last, own + len(self), bisect_right)):
            for thread, begin, until in part.threads:
                for index in range(begin, until):
                    start = part.start[index]
                    place = places.get((thread, start)) if part is first else None
                    if place is None:
                        place = find(self.start, start, *spans.get(thread, (0, 0)))
                    changes.setdefault(thread, []).append((place + own, start, index + shift))
        dropped = sorted(without)
        for thread, begin, until in self.threads:
            here = slice(bisect_left(dropped, begin), bisect_left(dropped, until))
            changes[thread] += [(index + own, BEYOND, -1) for index in dropped[here]]
        slices: list[slice] = []
        threads: list[ThreadEvents] = []
        count = 0
        for thread, of_thread in changes.items():
            begin, until = spans.get(thread, (0, 0))
            added = [*_slices(begin + own, until + own, sorted(of_thread))]
            length = sum(piece.stop - piece.start for piece in added)
            threads.append(ThreadEvents(thread, count, count + length))
            slices += added
            count += length
        self._replace(slices, first, last)
        self.threads = [thread_events for thread_events in threads if thread_events.first < thread_events.after]
        self.threads.sort(key=lambda thread_events: self.start[thread_events.first])

    def _replace(self, slices: Sequence[slice], first: EventColumns, last: EventColumns) -> None:
        """Replace the columns by slices of those of ``first``, of itself and of ``last``, one after the other."""
        for part in (first, last):
            part.number = array("i", map(len(self.kinds).__add__, part.number))
            self.kinds = [*self.kinds, *part.kinds]
        lengths = [(part, len(part)) for part in (first, self, last)]  # before the column that ``len`` reads changes
        # Column by column: a second copy of all of them would take too much memory.
        for name, (code, absent) in _COLUMNS.items():
            if any(getattr(part, name) is not None for part, _ in lengths):
                values = array(code)
                for part, length in lengths:
                    column = getattr(part, name)
                    values.extend(array(code, [absent]) * length if column is None else column)
                ordered = array(code)
                for chosen in slices:
                    ordered.extend(values[chosen])
                setattr(self, name, ordered)
        self._size = None

    def keep_between(self, begin: int | None, end: int | None) -> None:
        """Keep the events from one index on, and before another one: on other threads, those that start meanwhile."""
        threads = []
        for thread, first, after in self.threads:
            if begin is not None:
                is_here = first <= begin < after
                first = begin if is_here else bisect_left(self.start, self.start[begin], first, after)
            if end is not None:
                after = end if first <= end < after else bisect_left(self.start, self.start[end], first, after)
            if first < after:
                threads.append(ThreadEvents(thread, first, after))
        self.threads = threads

    def change(self, events: Iterable[int], **values: Any) -> None:
        """Change the kind or the name of events, given by their indices."""
        self.kinds = [*self.kinds]
        numbers: dict[int, int] = {}
        for index in events:
            before = self.number[index]
            if before not in numbers:
                numbers[before] = len(self.kinds)
                self.kinds.append(self.kinds[before]._replace(**values))
            self.number[index] = numbers[before]

    def mark_start_up(self) -> None:
        """Make long calls of a device's runtime start-up if they begin before any work of a device, for example
        ``cudaFree``, in which the context is made. Calls that may allocate, copy, launch or wait for work stay. If
        kernels were lost, it is unknown when the device began to work."""
        is_call = [
            kind is Kind.OP and is_runtime_call(name) and not _MAY_WORK.search(name) for kind, name, _ in self.kinds
        ]
        start_up = [
            index
            for _, first, after in (self.threads if any(is_call) and not self.lost else ())
            for index in range(first, bisect_left(self.start, self.first_work_ns, first, after))
            if is_call[self.number[index]] and self.end[index] - self.start[index] >= _LONG_CALL_NS
        ]
        self.change(start_up, kind=Kind.INTERRUPTION)

    def groupable(self) -> bytes:
        """By index of an event: 1 if nothing is to be known of it but its place and its values, else 0. IN_NODE if that
        is so inside an autograd node. These are memory events; operators that request no collective and replay no
        graph; and functions of autograd right at the beginning of their node, but for those that the user wrote in
        Python. If torch.compile made any event, each operator may be a kernel of a graph. In a job, functions tell when
        gradients are ready."""
        kinds = {kind.kind for kind in self.kinds}
        groups = {Kind.MEMORY} | ({Kind.OP} if _OF_COMPILED_CODE.isdisjoint(kinds) else set())
        is_groupable = bytes(
            kind in groups and name != RECORDS_COLLECTIVE and name not in REPLAYS and not name.startswith(C10D_OPS)
            for kind, name, _ in self.kinds
        )
        groupable = bytearray(map(is_groupable.__getitem__, self.number))
        if Kind.COLLECTIVE in kinds or any(kind.name.startswith(C10D_OPS) for kind in self.kinds):
            return bytes(groupable)
        is_node = [kind is Kind.NODE for kind, _, _ in self.kinds]
        is_function = [kind is Kind.BACKWARD_FUNCTION and not name.endswith("Backward") for kind, name, _ in self.kinds]
        for index in compress(range(len(self)), map(is_function.__getitem__, self.number)):
            if index and is_node[self.number[index - 1]] and self.size[index - 1] > 1:
                groupable[index] = IN_NODE
        return bytes(groupable)

    def makes_nodes(self) -> bytes:
        """By index of an event: 1 if it is an operator that creates an autograd node, else 0. The node has its sequence
        number. Empty if no node was recorded: nothing refers to these numbers."""
        kinds = {kind.kind for kind in self.kinds}
        if self.sequence is None or kinds.isdisjoint((Kind.NODE, Kind.BACKWARD_FUNCTION)):
            return b""
        is_op = [kind.kind is Kind.OP for kind in self.kinds]
        has_number = map(le, repeat(0), self.sequence)
        return bytes(map(and_, has_number, map(is_op.__getitem__, self.number)))

    def pattern(self, first: int, after: int) -> tuple[bytes, ...]:
        """What makes events alike: their kinds, how they are nested, and their signatures."""
        columns = (self.number, self.size, self.signature)
        return tuple(column[first:after].tobytes() for column in columns if column is not None)


class Intervals:
    """A union of intervals that keeps its pieces. The intervals must be added in the order of their start."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")

    def add(self, start: int, end: int) -> None:
        if self._ends and start <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], end)
        else:
            self._starts.append(start)
            self._ends.append(end)

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The pieces of the union inside an interval, in reverse order."""
        index = bisect_right(self._starts, end) - 1
        while index >= 0 and self._ends[index] > start:
            yield max(start, self._starts[index]), min(end, self._ends[index])
            index -= 1


def by_thread(events: Iterable[int], threads: Sequence[int]) -> tuple[list[ThreadEvents], IntColumn]:
    """The threads of some events, and the indices of these events: thread by thread, the first one to begin first, and
    in each the order of ``events``. ``threads``: by index of an event."""
    order = array("i")
    of_threads: defaultdict[int, array[int]] = defaultdict(lambda: array("i"))
    for thread, of_thread in groupby(events, threads.__getitem__):
        of_threads[thread].extend(of_thread)
    threads_of_events: list[ThreadEvents] = []
    for thread, indices in of_threads.items():
        threads_of_events.append(ThreadEvents(thread, len(order), len(order) + len(indices)))
        order.extend(indices)
    return threads_of_events, order


def _slices(begin: int, until: int, changes: Iterable[tuple[int, int, int]]) -> Iterator[slice]:
    """The events from ``begin`` up to ``until``, with ``changes``, each as (index that a new event comes before, its
    start, its own index). An own index of -1 means that the event at the first index is dropped. For example, of the
    events 0 to 4, with event 7 added before 2, and 3 dropped: 0 to 1, 7, 2, 4."""
    for place, _, added in changes:
        if begin < place:
            yield slice(begin, place)
        begin = place
        if added < 0:
            begin += 1
        else:
            yield slice(added, added + 1)
    if begin < until:
        yield slice(begin, until)
