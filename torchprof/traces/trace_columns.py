"""The events of a trace as columns, as ``record.session_columns`` makes them of a live session; and before its layers
are known, how its modules and ranges are nested."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import compress, repeat
from operator import add
from typing import NamedTuple

from torchprof.attribute.event_columns import BEYOND, EventColumns, EventKind, Numbers, by_thread
from torchprof.attribute.event_names import MEMORY
from torchprof.attribute.events import ACCUMULATES, Event, Kind, OpenRanges
from torchprof.attribute.launches import first_correlation_id, launches_of, numbers_of_devices
from torchprof.run.torch_names import LAUNCHING
from torchprof.run.words import BEFORE
from torchprof.traces.columns import RUNTIME_CALLS, TraceRow
from torchprof.traces.event_table import EventTable
from torchprof.traces.layers import RangeCall


class TraceColumns:
    """Makes the columns of one trace. By the number of a name, ``kinds``: the kind of event, None for events that are
    left out; ``are_nodes``: whether it is that of an autograd node. ``base_ns``: see ``TraceEvents``."""

    def __init__(
        self, table: EventTable, kinds: Sequence[Kind | None], are_nodes: Sequence[bool], base_ns: int
    ) -> None:
        self._table = table
        self._base_ns = base_ns
        self._is_call = [group == RUNTIME_CALLS for group, _ in table.names]
        self._are_nodes = are_nodes
        self._kinds = [EventKind(kind or Kind.OP, name) for kind, (_, name) in zip(kinds, table.names)]
        for number, (kind, name, _) in enumerate(self._kinds):
            if kind is Kind.MEMORY:  # its name is that of the device
                self._kinds[number] = EventKind(Kind.MEMORY, MEMORY, name)
        is_kept = [kind is not None for kind in kinds]
        cpu, thread_of = table.cpu, [thread for thread, _ in table.lanes]
        kept = (index for window in cpu.windows() for index in window if is_kept[cpu.name[index]])
        self._threads, self._order = by_thread(kept, [*map(thread_of.__getitem__, cpu.lane)])
        self._names = self._ordered(cpu.name)
        self._memory = [*self._indices(kind.kind is Kind.MEMORY for kind in self._kinds)]
        self._ops, self._calls = self._launchers()

    def columns(self, in_backward: Set[tuple[int, int, int]]) -> EventColumns:
        """``in_backward``: start, thread and number of the name of each labeled range that is not a layer."""
        cpu, base_ns = self._table.cpu, self._base_ns
        sequence, signature = self._ordered(cpu.sequence), self._ordered(cpu.signature)
        numbers: Numbers[EventKind] = Numbers()
        number = array("i", map([numbers[kind] for kind in self._kinds].__getitem__, self._names))
        for index in self._functions(sequence):
            kind = self._kinds[self._names[index]]
            number[index] = numbers[kind._replace(kind=Kind.BACKWARD_FUNCTION)]
            if not kind.name.endswith(ACCUMULATES):
                signature[index] = 0
        start = self._ordered(cpu.start)
        if in_backward:
            thread_of = [thread for thread, first, after in self._threads for _ in range(first, after)]
            for index in self._indices(kind.kind is Kind.LABEL for kind in self._kinds):
                if (start[index], thread_of[index], self._names[index]) in in_backward:
                    number[index] = numbers[self._kinds[self._names[index]]._replace(kind=Kind.USER_LABEL)]
        if base_ns:
            start = array("q", map(base_ns.__add__, start))
        end = array("q", map(add, start, map(cpu.ns.__getitem__, self._order)))
        for index in self._memory:
            end[index] = start[index]
        launches = self._launches()
        return EventColumns(
            [*numbers],
            self._threads,
            number,
            start,
            end,
            sequence=sequence,
            forward_thread=self._forward_threads(),
            correlation=self._correlations(),
            signature=signature if any(signature) else None,
            nbytes=self._of_memory(cpu.ns),
            address=self._of_memory(cpu.number),
            kernels=self._device_work(),
            first_work_ns=min(self._table.work.start, default=-base_ns) + base_ns,
            launched=len(launches),
            lost=len(launches.difference(self._table.work.number)),
        )

    def _ordered(self, column: array[int]) -> array[int]:
        return array(column.typecode, map(column.__getitem__, self._order))

    def _indices(self, are_wanted: Iterable[bool]) -> Iterator[int]:
        """The indices of the events whose names are wanted. ``are_wanted``: by number of the name."""
        is_wanted = [*are_wanted]
        if not any(is_wanted):
            return iter(())
        return compress(range(len(self._names)), map(is_wanted.__getitem__, self._names))

    def _of_memory(self, column: array[int]) -> array[int] | None:
        """The values of memory events, 0 for other events; None if there are none."""
        if not self._memory:
            return None
        values = array("q", bytes(8 * len(self._order)))
        for index in self._memory:
            values[index] = column[self._order[index]]
        return values

    def _functions(self, sequence: Sequence[int]) -> Iterator[int]:
        """The indices of the functions of autograd nodes: operators with the number of a forward thread."""
        forward_of = [forward for _, forward in self._table.lanes]
        lanes = self._table.cpu.lane
        are_ops = (kind.kind is Kind.OP and not is_call for kind, is_call in zip(self._kinds, self._is_call))
        for index in self._indices(are_ops):
            if forward_of[lanes[self._order[index]]] if sequence[index] >= 0 else self._are_nodes[self._names[index]]:
                yield index

    def _forward_threads(self) -> array[int] | None:
        """The thread of the forward of each autograd node, 0 for other events; None if the trace has no such number."""
        table = self._table
        if not any(forward for _, forward in table.lanes):
            return None
        thread_of = table.arrows.forward_threads(table.lanes, table.cpu)
        of_lane = [thread_of.get(forward, 0) for _, forward in table.lanes]
        return array("q", map(of_lane.__getitem__, map(table.cpu.lane.__getitem__, self._order)))

    # Device work

    def _launchers(self) -> tuple[dict[int, int], dict[int, int]]:
        """What launched device work: operators by "External id", and runtime calls by correlation ID. The values are
        the correlation numbers of these launchers in ``Event``: positive for operators, negative for runtime calls. The
        work names its operator in recent traces, and in very old ones. In traces of 2022 and 2023, its "External id"
        repeats the correlation ID of the runtime call: the operator with this number, if there is one, is unrelated.
        Runtime calls are only in the result if their work names no operator."""
        work, cpu = self._table.work, self._table.cpu

        def recorded(wanted: Set[int], are_calls: bool) -> Iterator[int]:
            lines = zip(cpu.number, cpu.name) if wanted else ()
            return (number for number, name in lines if number in wanted and self._is_call[name] is are_calls)

        named = {op for op, launch in zip(work.sequence, work.number) if op > 0 and op != launch}
        ops = {op: op for op in recorded(named, False)}  # key and value are one object, to save memory
        linked = zip(work.sequence, work.number)
        others = {launch for op, launch in linked if launch > 0 and (op == launch or op not in ops)}
        return ops, {call: -call for call in recorded(others, True)}

    def _launches(self) -> set[int]:
        """The correlation IDs of calls that launch kernels; empty if the trace has none, as in old versions."""
        cpu, names = self._table.cpu, self._table.names
        is_wanted = [is_call and bool(LAUNCHING.fullmatch(name)) for is_call, (_, name) in zip(self._is_call, names)]
        lines = zip(cpu.start, cpu.lane, cpu.name, cpu.number)
        calls = ((start, lane, names[name][1], number) for start, lane, name, number in lines if is_wanted[name])
        return launches_of(calls) - {0}

    def _launcher(self, op: int, launch: int) -> int:
        """The correlation number of what launched some work; 0 if it is not in the trace."""
        return self._ops[op] if op != launch and op in self._ops else self._calls.get(launch, 0)

    def _correlations(self) -> array[int] | None:
        """The correlation numbers of launchers, 0 for other events; None if there are none."""
        if not self._ops and not self._calls:
            return None
        number, order = self._table.cpu.number, self._order
        correlations = array("q", map(self._ops.get, map(number.__getitem__, order), repeat(0)))
        for index in self._indices(self._is_call):
            correlations[index] = self._calls.get(number[order[index]], 0)
        for index in self._memory:  # this number is the address
            correlations[index] = 0
        return correlations

    def _device_work(self) -> Iterator[Event]:
        table, base = self._table, self._base_ns
        device_kind = table.device or "cuda"
        counted = numbers_of_devices((index for index, _ in table.streams), table.hip_devices)
        calls = (number for number, name in zip(table.cpu.number, table.cpu.name) if self._is_call[name])
        launched = (launch for op, launch in zip(table.work.sequence, table.work.number) if self._launcher(op, launch))
        first = first_correlation_id(calls, launched)
        for start, ns, name, lane, op, launch, signature in table.work.in_order():
            index, stream = table.streams[lane]
            launcher = self._launcher(op, launch)
            yield Event(
                Kind.KERNEL,
                table.names[name][1],
                start + base,
                start + base + ns,
                stream,
                correlation=BEFORE if not launcher and 0 < launch < first else launcher,
                device=f"{device_kind}:{counted.get(index, index)}",
                signature=signature,
            )


# How modules and ranges are nested, before the layers are known


class _OpenRange(NamedTuple):
    """An open range or node. ``end_ns``: that of the one around it at the latest, as in the attribution. ``name``: that
    of the innermost forward range that it is or is inside, "" for none. ``is_node``: whether it is a node, or inside
    one; ``in_node``: the innermost range in that node, None for none."""

    end_ns: int
    name: str
    is_node: bool = False
    in_node: _RangeInNode | None = None


_NOTHING = _OpenRange(BEYOND, "")


@dataclass(slots=True, eq=False)
class _RangeInNode:
    """A range inside an autograd node. ``number``: that of its name. ``outer``: the range around it in the node.
    ``records``: whether an operator inside it records an autograd graph."""

    start: int
    thread: int
    number: int
    outer: _RangeInNode | None
    records: bool = False


def nested(
    events: Iterable[TraceRow], lanes: Sequence[tuple[int, int]], names: Sequence[str], wanted: Sequence[bool]
) -> Iterator[tuple[int, str]]:
    """The events of ``wanted`` names and the events inside them, in the order of their start, each as (number of its
    name, name of the innermost wanted event around it or ""). ``events``: without memory events, which have no
    duration. ``lanes``: (thread, forward thread or 0) by lane."""
    open_ranges: OpenRanges[_OpenRange] = OpenRanges()
    by_thread = open_ranges.by_thread
    for start, ns, number, lane, *_ in events:
        thread = lanes[lane][0]
        stack = by_thread.get(thread)
        if stack is None or (stack and stack[-1].end_ns <= start):  # a call for each event would double the time
            stack = open_ranges.at(thread, start)
        around = stack[-1] if stack else _NOTHING
        if wanted[number]:
            yield number, around.name
            stack.append(_OpenRange(min(start + ns, around.end_ns), names[number]))
        elif stack:
            yield number, around.name


def ranges_in(
    events: Iterable[TraceRow],
    lanes: Sequence[tuple[int, int]],
    *,
    names: Sequence[str],
    kinds: Sequence[Kind | None],
    wanted: Sequence[bool],
    are_nodes: Sequence[bool],
) -> tuple[list[RangeCall], set[tuple[int, int, int]]]:
    """The ranges of ``wanted`` names that may be layers; and those of backward as (start, thread, number of the name).

    A range that opens inside an autograd node belongs to backward, even if a forward range has the same name. The
    exception is a recomputed forward, as under activation checkpointing: a range of that name ran in forward, and
    operators inside this one record an autograd graph, which nothing else in backward does::

        |range "block"|                                             a layer
        |node      |range "block": ops that record a graph|   |     the same layer, recomputed
        |node      |range "block": other ops|   |                   a range of backward
    """
    with_work: set[str] = set()
    parents: dict[str, dict[str, None]] = {}
    in_nodes: list[_RangeInNode] = []
    open_ranges: OpenRanges[_OpenRange] = OpenRanges()
    by_thread = open_ranges.by_thread
    op, node, function, collective = Kind.OP, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.COLLECTIVE
    for start, ns, number, lane, sequence, _, _ in events:
        thread, forward = lanes[lane]
        stack = by_thread.get(thread)
        if stack is None or (stack and stack[-1].end_ns <= start):
            stack = open_ranges.at(thread, start)
        around = stack[-1] if stack else _NOTHING
        if wanted[number]:
            name, in_node = names[number], None
            if around.is_node:
                in_node = _RangeInNode(start, thread, number, around.in_node)
                in_nodes.append(in_node)
            else:
                parents.setdefault(name, {})[around.name] = None
            stack.append(_OpenRange(min(start + ns, around.end_ns), name, around.is_node, in_node))
            continue
        kind = kinds[number]
        if kind is not None and kind is not collective:
            with_work.add(around.name)
        is_op_of_node = kind is op and (forward if sequence >= 0 else are_nodes[number])
        if is_op_of_node or kind is node or kind is function:
            stack.append(_OpenRange(min(start + ns, around.end_ns), around.name, True))
        elif sequence >= 0 and around.in_node is not None:
            around.in_node.records = True
    waiting = [*with_work]
    while waiting:  # work inside a range is also inside the ranges around it
        outer = {*parents.get(waiting.pop(), ())} - with_work
        with_work |= outer
        waiting += outer
    for inner in reversed(in_nodes):  # inner ones come after those around them
        if inner.records and inner.outer is not None:
            inner.outer.records = True
    of_backward = (inner for inner in in_nodes if not inner.records or names[inner.number] not in parents)
    calls = [RangeCall(name, tuple(above), name in with_work) for name, above in parents.items()]
    return calls, {(inner.start, inner.thread, inner.number) for inner in of_backward}
