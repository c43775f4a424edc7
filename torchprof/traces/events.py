"""What is in a trace that torch's profiler wrote: marks, steps, modules, ranges, and all events, as in a live session.
What differs between versions of torch and between devices is handled here, and in ``event_table``, ``columns`` and
``trace_columns``."""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence, Set
from functools import cached_property
from operator import add

from torchprof.attribute.event_columns import BEYOND, EventColumns
from torchprof.attribute.event_names import (
    ENDED,
    STARTED,
    STEP_MARK,
    event_kind,
    is_a_common_name,
    is_module_label,
    is_node_range,
    is_torchs_step,
)
from torchprof.attribute.events import HOOKS, PREFIX, Kind
from torchprof.attribute.loop import Loop, NamedRange, keep_recorded, loop_of
from torchprof.attribute.pipeline_ranges import folded_names
from torchprof.run.words import NODE_PREFIX, is_collective
from torchprof.traces.columns import DEVICE_WORK, MEMORY_EVENTS, MODULE, OP, OP_OR_RANGE, RANGE, RUNTIME_CALLS, TraceRow
from torchprof.traces.event_table import EventTable
from torchprof.traces.layers import ModuleCall, RangeCall, traced_class_name
from torchprof.traces.trace_columns import TraceColumns, nested, ranges_in

_RANGES = (RANGE, OP_OR_RANGE)
_OF_CPU = (OP, RANGE, OP_OR_RANGE, MODULE)
_AUTOGRAD_PREFIX = "torch::autograd::"
_NODE_NAME = re.compile(r"\w+Backward\d*")


class TraceEvents:
    """The events of one trace, with the interface of a recording. ``base_ns``: the time that the times in the file are
    relative to, in ns since the epoch. ``cpu_time``: a trace does not have the CPU time of the process."""

    cpu_time: None = None

    def __init__(self, table: EventTable, base_ns: int = 0) -> None:
        self.table = table
        self.base_ns = base_ns
        self.device = table.device
        self.signatures = table.signatures.all
        self._names = table.names  # group and name
        self._texts = [name for _, name in table.names]
        self._cpu, self._work = table.cpu, table.work
        self._in_backward: set[tuple[int, int, int]] = set()  # ranges: start, thread, number of the name

    @property
    def start_ns(self) -> int | None:
        """When the session began, on the clock of the events; None if the trace does not have it."""
        return None if self.table.session is None else self.base_ns + self.table.session[0]

    @property
    def ended_ns(self) -> int | None:
        """When a recording of torchprof ended; None in a trace of others: with its last event."""
        known = self._recorded is not None and self.start_ns is not None
        return (self.start_ns or 0) + self.wall_ns if known else None

    @property
    def session(self) -> tuple[int, int]:
        """The start and the end of the session; of the recording, if the trace does not have it."""
        start, end = self.table.session or self._recorded or self._extent
        return self.base_ns + start, self.base_ns + end

    @property
    def wall_ns(self) -> int:
        """The duration of the recording in a trace of torchprof; else from the first event to the end of the last: what
        the program did in the session before and after them is unknown."""
        began, ended = self._recorded or self._extent
        return max(ended - began, 0)

    @property
    def outside_ns(self) -> tuple[int, int]:
        """The time of the session before the first event, and after the last."""
        if self._recorded is not None or self.table.session is None:
            return 0, 0
        (first, last), (began, ended) = self._extent, self.table.session
        return max(first - began, 0), max(ended - last, 0)

    @cached_property
    def _recorded(self) -> tuple[int, int] | None:
        """From when to when torchprof recorded; None in a trace of others."""
        began, ended = self._marks_of(STARTED, STEP_MARK), self._marks_of(ENDED)
        return (began[0][1], ended[0][0]) if began and ended else None

    @cached_property
    def _extent(self) -> tuple[int, int]:
        """The start of the first event, and the end of the last."""
        of_memory = {number for number, (group, _) in enumerate(self._names) if group is MEMORY_EVENTS}
        first, last = BEYOND, 0
        for columns in (self._cpu, self._work):
            ns = columns.ns
            if of_memory:
                ns = array("q", (0 if name in of_memory else each for name, each in zip(columns.name, ns)))
            first = min(first, min(columns.start, default=BEYOND))
            last = max(last, max(map(add, columns.start, ns), default=0))
        return min(first, last), last

    @property
    def torchs_steps(self) -> int:
        is_step = [group in _RANGES and is_torchs_step(name) for group, name in self._names]
        return sum(map(is_step.__getitem__, self._cpu.name)) if any(is_step) else 0

    @cached_property
    def loop(self) -> Loop:
        """The passes of a loop without marks, and the calls without gradients."""
        names = (name for group, name in self._names if group not in (MEMORY_EVENTS, MODULE, RUNTIME_CALLS))
        loop = loop_of(names, self._ranges_of, self._has_gradients)
        lanes = self.table.lanes
        return loop._replace(thread=lanes[loop.thread][0] if loop.ends else 0)

    def _ranges_of(self, wanted: Set[str]) -> Iterator[NamedRange]:
        """The CPU's ranges with some of these names, in the order of start."""
        names = {number: name for number, name in enumerate(self._texts) if name in wanted}
        columns = zip(self._cpu.start, self._cpu.ns, self._cpu.name, self._cpu.lane)
        for start, ns, number, lane in sorted(line for line in columns if line[2] in names):
            yield NamedRange(names[number], start + self.base_ns, start + ns + self.base_ns, lane)

    def _has_gradients(self, call: NamedRange) -> bool:
        """Whether an event in a call has a sequence number."""
        starts = self._sequenced[call.thread]
        first = bisect_left(starts, call.start_ns - self.base_ns)
        return first < len(starts) and starts[first] < call.end_ns - self.base_ns

    @cached_property
    def _sequenced(self) -> defaultdict[int, list[int]]:
        """By lane, when the events with a sequence number began, in order."""
        starts: defaultdict[int, list[int]] = defaultdict(list)
        for start, lane, number in zip(self._cpu.start, self._cpu.lane, self._cpu.sequence):
            if number >= 0:
                starts[lane].append(start)
        for of_lane in starts.values():
            of_lane.sort()
        return starts

    @property
    def marks(self) -> int:
        """The number of torchprof's marks: one at the start of its session, and one at the end of each step."""
        return len(self._marks_of(STARTED, STEP_MARK))

    def _marks_of(self, *names: str) -> list[tuple[int, int]]:
        """Start and end of the marks with these names, in order."""
        marks = {number for number, name in enumerate(self._texts) if name in names}
        if not marks:
            return []
        lines = zip(self._cpu.start, self._cpu.ns, self._cpu.name)
        return sorted((start, start + ns) for start, ns, name in lines if name in marks)

    @property
    def from_first_mark(self) -> bool:
        """Whether a step begins at the first mark: no mark shows that the session began in the middle of a step."""
        return STARTED not in self._texts

    @cached_property
    def has_forward_threads(self) -> bool:
        """Whether autograd nodes have the number of their forward thread."""
        return any(forward for _, forward in self.table.lanes)

    @property
    def has_nodes(self) -> bool:
        return self.has_engine or any(self._is_node_by_name(*names) for names in self._names)

    @cached_property
    def has_engine(self) -> bool:
        return any(map(is_node_range, self._texts))

    @property
    def has_operators(self) -> bool:
        """Whether CPU work was recorded. Calls of a device's runtime do not count: the device's events include them."""
        return any(group in _OF_CPU for group, _ in self._names)

    def count_of(self, names: Collection[str]) -> Counter[str]:
        numbers = {number: name for number, name in enumerate(self._texts) if name in names}
        return Counter(numbers[number] for number in self._cpu.name if number in numbers)

    @property
    def has_compiled(self) -> bool:
        return any(event_kind(name) is Kind.REGION for name in self._texts)

    @property
    def has_memory(self) -> bool:
        return any(group is MEMORY_EVENTS for group, _ in self._names)

    @property
    def has_shapes(self) -> bool:
        return self.table.signatures.has_shapes

    @property
    def labels(self) -> list[str]:
        return [*filter(is_module_label, self._texts)]

    @property
    def module_names(self) -> set[str]:
        """The names of the events of modules, as ``with_stack=True`` records them."""
        return {name for group, name in self._names if group is MODULE}

    def classes(self) -> dict[str, str]:
        """The class of the labelled module for each of torchprof's labels, if the trace has events of modules."""
        classes: dict[str, str] = {}
        for number, around in self._in_modules():
            if self._texts[number].startswith(PREFIX):
                classes.setdefault(self._texts[number], traced_class_name(around))
        return classes

    def modules(self) -> list[ModuleCall]:
        """The modules that were called (from the events of ``with_stack=True``), in the order of first calls."""
        parents: dict[str, dict[str, None]] = {}
        for number, around in self._in_modules():
            group, name = self._names[number]
            if group is MODULE:
                parents.setdefault(name, {})[around] = None
        return [ModuleCall(name, tuple(above)) for name, above in parents.items()]

    def _in_modules(self) -> Iterator[tuple[int, str]]:
        """The calls of modules and the events inside them: the number of the name, and the module around it or ""."""
        of_module = [group is MODULE for group, _ in self._names]
        events = self._cpu_events() if any(of_module) else ()
        return nested(events, self.table.lanes, self._texts, of_module)

    def ranges(self) -> list[RangeCall]:
        """The ranges of users and of torch, in the order of first calls, without those of backward work and those that
        torch's pipelines put around their actions. After this call, ``columns`` gives the ranges of backward work as
        user labels, even if their names are in ``sites``."""
        kinds, names = self._kinds(()), self._texts
        of_pipelines = folded_names(names)
        wanted = [
            kind is Kind.USER_LABEL and bool(name) and name not in of_pipelines for kind, name in zip(kinds, names)
        ]
        if not any(wanted):
            return []
        events, lanes, are_nodes = self._cpu_events(), self.table.lanes, self._are_nodes(kinds)
        calls, self._in_backward = ranges_in(
            events, lanes, names=names, kinds=kinds, wanted=wanted, are_nodes=are_nodes
        )
        return calls

    def _cpu_events(self) -> Iterator[TraceRow]:
        """The CPU's events in the order of their start, without memory events, which have no duration."""
        is_memory = [group is MEMORY_EVENTS for group, _ in self._names]
        return (line for line in self._cpu.in_order() if not is_memory[line[2]])

    def _are_nodes(self, kinds: Sequence[Kind | None]) -> list[bool]:
        """Whether each name, by its number, is that of an autograd node (of the event inside the engine's range): so
        nodes without a sequence number are recognized."""
        inner = {name.removeprefix(NODE_PREFIX) for name, kind in zip(self._texts, kinds) if kind is Kind.NODE}
        return [name in inner or self._is_node_by_name(group, name) for group, name in self._names]

    def _is_node_by_name(self, group: str, name: str) -> bool:
        """Whether this is the name of a node, in a trace without ranges of the engine around nodes (torch 1.8). Unless
        nodes have the numbers of their forward threads, the pattern of the name decides."""
        if group not in (OP, OP_OR_RANGE) or self.has_engine:
            return False
        return name.startswith(_AUTOGRAD_PREFIX) or (
            not self.has_forward_threads and _NODE_NAME.fullmatch(name) is not None
        )

    # The interface of a recording

    def called_from(self, signature: int, source: int) -> int:
        """The signature as it is: operators in a trace have no source lines."""
        return signature

    def columns(self, sites: Collection[str]) -> EventColumns:
        """All events; of a trace of torchprof, those of its recording. ``sites``: the names of the ranges and modules
        that are layers."""
        kinds = self._kinds(sites)
        columns = TraceColumns(self.table, kinds, self._are_nodes(kinds), self.base_ns).columns(self._in_backward)
        keep_recorded(columns)
        return columns

    def _kinds(self, sites: Collection[str]) -> list[Kind | None]:
        """The kind of event for each name, by its number; None for events that are left out. The names in ``sites`` are
        labels of layers."""
        kinds: list[Kind | None] = []
        for number, (group, name) in enumerate(self._names):
            kind: Kind | None = Kind.OP if group is RUNTIME_CALLS else event_kind(name)
            if group is DEVICE_WORK:
                kind = Kind.KERNEL
            elif group is MEMORY_EVENTS:
                kind = Kind.MEMORY
            elif group is MODULE or kind is Kind.LABEL:
                # A module that is no layer is left out.
                of_module = PREFIX + name.removeprefix(HOOKS) if name.startswith(HOOKS) else name
                kind = Kind.LABEL if of_module in sites else None
            elif group is RANGE and is_a_common_name(name):  # a user's range with a name that torch.compile uses, too
                kind = Kind.USER_LABEL
            elif kind is Kind.OP and is_collective(name):
                kind = Kind.COLLECTIVE
            elif kind is Kind.OP and (
                group is RANGE
                or (
                    group is OP_OR_RANGE
                    and "::" not in name
                    and number not in self.table.signatures.operators
                    and not self._is_node_by_name(group, name)
                )
            ):
                kind = Kind.LABEL if name in sites else Kind.USER_LABEL
            kinds.append(kind)
        return kinds
