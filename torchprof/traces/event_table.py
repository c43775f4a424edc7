"""The events of a trace that torch's profiler wrote, parsed from JSON into columns of integers."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torchprof.attribute.event_columns import BEYOND
from torchprof.attribute.event_names import MEMORY
from torchprof.attribute.events import Detail
from torchprof.attribute.launches import threads_of_overhead
from torchprof.run.words import is_host_collective
from torchprof.traces.columns import (
    DEVICE_WORK,
    GROUPS,
    MEMORY_EVENTS,
    MODULE,
    MODULE_PREFIX,
    MTIA_WORK,
    NO_WORK,
    OP,
    OP_OR_RANGE,
    OVERHEAD_EVENTS,
    RUNTIME_CALLS,
    RUNTIMES,
    SESSION,
    Columns,
    TraceRow,
    TraceSignatures,
    encodable_text,
)

_HIP = 6
_DEVICE_TYPES = {1: "cuda", _HIP: "cuda", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}
"""The numbers of ``c10/core/DeviceType.h``, with the names that torch's own tables use."""
_CPUS = (0, 2, 5)
_ARROWS = ("fwdbwd", "forward_backward")
"""The categories of the arrows from an operator to the autograd node that it made."""
_MANY_ARROWS = 1 << 16
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class EventTable:
    """The events of one trace as columns. Add them piece by piece, then call ``drop_duplicates``, ``place_overhead``
    and ``separate``.

    - ``cpu``, ``work``: the columns of the CPU's events (operators, ranges, runtime calls, memory), and of device work.
    - ``names``: group and name of an event by the number of its name; the name of a memory event is its device.
    - ``lanes``: by the number in the column ``lane`` of ``cpu``: the number of the thread, from 1, and the number by
      which an autograd node names the thread of its forward, 0 for none.
    - ``streams``: by the number in the column ``lane`` of ``work``: the device and the stream.
    - ``device``: the kind of device whose work the trace has; None for the CPU alone.
    - ``session``: when the session began and ended, in ns; None if the trace does not have it.
    - ``unread``: how many events lack a necessary value.
    - ``hip_devices``: the ROCm devices that have memory events.
    - ``has_call_stacks``: whether operators have source lines, as torch wrote them before it recorded modules.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail`` returns for the name of an operator how much of its inputs is kept."""
        self.names: list[tuple[str, str]] = []
        self.cpu, self.work = Columns(self.names), Columns(self.names)
        self.lanes: list[tuple[int, int]] = []
        self.streams: list[tuple[int, int]] = []
        self.signatures = TraceSignatures(detail)
        self.arrows = Arrows()
        self.device: str | None = None
        self.session: tuple[int, int] | None = None
        self.unread = 0
        self.hip_devices: set[int] = set()
        self.has_call_stacks = False
        self._groups = dict(GROUPS)
        self._numbers_of: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by group: name → its number
        self._threads: dict[tuple[str, str], int] = {}  # (process, thread) → its number, from 1
        self._lane_numbers: dict[tuple[Any, ...], int] = {}  # (process, thread, forward thread of a node) → lane
        self._stream_numbers: dict[tuple[Any, Any], int] = {}  # (device, stream) → its number
        self._overhead: set[tuple[int, int, int]] = set()  # start, ns, number of the name
        self._work_rows: list[TraceRow] = []  # of the current piece
        self._last_node: tuple[int, int, int] | None = None  # thread, start, number of the forward thread

    def __len__(self) -> int:
        return len(self.cpu.start) + len(self.work.start)

    @property
    def processes(self) -> tuple[str, ...]:
        """The IDs of the processes that have events."""
        return tuple(sorted({process for process, _ in self._threads}))

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Add the events of one piece of the file. An event that lacks a necessary value is counted and dropped. The
        loop runs for each of millions of events, and a call in it would take a tenth more time. So what most events
        need is in one function: those of operators, ranges and runtime calls. Other events have methods of their
        own."""
        groups, numbers_of = self._groups, self._numbers_of
        module, runtime, no_work = MODULE, RUNTIME_CALLS, NO_WORK
        add_of = {DEVICE_WORK: self._add_work, OVERHEAD_EVENTS: self._add_overhead, SESSION: self._add_session}
        of_operator, operators = self.signatures.of_operator, self.signatures.operators
        rows: list[TraceRow] = []
        last_process = last_thread = None
        last_lane = 0
        for event in events:
            try:
                phase = event["ph"]
                if phase != "X":
                    if phase == "i" and event["name"] == MEMORY:
                        rows.append(self._memory_row(event))
                    elif (phase == "s" or phase == "f") and event.get("cat") in _ARROWS:
                        self._add_arrow(event)
                    continue
                category = event.get("cat", "")
                try:
                    group = groups[category]
                except KeyError:
                    group = self._add_category(category)
                if group in add_of:
                    add_of[group](event)
                    continue
                if group is no_work:
                    continue
                name = event["name"]
                if group is module and not name.startswith(MODULE_PREFIX):
                    continue
                try:
                    name_number = numbers_of[group][name]
                except KeyError:
                    name_number = self._name(group, name)

                time = event["ts"]
                start = int(time)
                start = start * 1000 + round((time - start) * 1000)  # as ``nanoseconds``
                ns = round(event["dur"] * 1000)
                args = event.get("args") or {}
                sequence, forward, signature = -1, 0, 0
                if group is runtime:
                    number = args.get("correlation", 0)
                else:
                    number = args.get("External id", 0)
                    if not self.has_call_stacks and "Call stack" in args:
                        self.has_call_stacks = True
                    if "Sequence number" in args:
                        sequence, forward = args["Sequence number"], args.get("Fwd thread id", 0)
                        if group is OP_OR_RANGE and parse_int(sequence) >= 0:
                            operators.add(name_number)
                    if ("Input Dims" in args or "Input dims" in args) and group is not module:
                        signature = of_operator(name, group, name_number, args)
                    elif "Collective name" in args:
                        signature = self.signatures.of_collective(args)
                if type(number) is not int or type(sequence) is not int or type(forward) is not int:
                    number, sequence, forward = parse_int(number), parse_int(sequence), parse_int(forward)
                # One test finds nearly all events valid. The sign of a negative number is in its high bits, too.
                if (ns | start | number | sequence + 1) >> 62 and (
                    not 0 <= ns < BEYOND or max(abs(start), abs(number), abs(sequence)) > BEYOND
                ):
                    raise ValueError

                process, thread = event["pid"], event["tid"]
                if forward:
                    lane = self._lane(process, thread, forward)
                    self._last_node = (self.lanes[lane][0], start, forward)
                elif thread == last_thread and process == last_process:
                    lane = last_lane
                else:
                    lane = last_lane = self._lane(process, thread, 0)
                    last_process, last_thread = process, thread
                rows.append((start, ns, name_number, lane, sequence, number, signature))
            except _MALFORMED:
                self.unread += 1
        self.cpu.add(rows)
        self.work.add(self._work_rows)
        self._work_rows.clear()

    def _add_category(self, category: Any) -> str:
        """The group of a new category: calls of a runtime, or no work."""
        device, _, kind = str(category).rpartition("_")
        group = NO_WORK
        if kind in ("runtime", "driver") and device in RUNTIMES:
            group = RUNTIME_CALLS
            self.device = device
        self._groups[category] = group
        return group

    def _add_work(self, event: Mapping[str, Any]) -> None:
        is_mtia = event["cat"] == MTIA_WORK
        if is_mtia and "Sync" in event["name"]:
            return
        if self.device is None:  # the category of a runtime call corrects this; in old traces it names no device
            self.device = "mtia" if is_mtia else "cuda"
        start, ns = _times(event)
        args = event.get("args") or {}
        where = args.get("device", event["pid"]), args.get("stream", event["tid"])
        if (stream := self._stream_numbers.get(where)) is None:
            numbers = max(parse_int(where[0], 0), 0), parse_int(where[1], 0)
            if max(map(abs, numbers)) > BEYOND:
                raise ValueError
            stream = self._stream_numbers[where] = len(self.streams)
            self.streams.append(numbers)
        launch = parse_int(args.get("correlation", 0))
        op = parse_int(args.get("External id", args.get("external id", 0)))
        if max(abs(launch), abs(op)) > BEYOND:
            raise ValueError
        signature = self.signatures.of_collective(args) if "Collective name" in args else 0
        self._work_rows.append((start, ns, self._name(DEVICE_WORK, event["name"]), stream, op, launch, signature))

    def _add_overhead(self, event: Mapping[str, Any]) -> None:
        start, ns = _times(event)
        self._overhead.add((start, ns, self._name(OVERHEAD_EVENTS, event["name"])))

    def _memory_row(self, event: Mapping[str, Any]) -> TraceRow:
        start, args = nanoseconds(event["ts"]), event["args"]
        nbytes, address = parse_int(args["Bytes"]), parse_int(args.get("Addr", 0))
        device, kind = "cpu", parse_int(args.get("Device Type", 0))
        if kind not in _CPUS:
            index = max(parse_int(args.get("Device Id", 0)), 0)
            device = f"{_DEVICE_TYPES.get(kind, f'device{kind}')}:{index}"
            if kind == _HIP:
                self.hip_devices.add(index)
        if max(abs(start), abs(nbytes), abs(address)) > BEYOND:
            raise ValueError
        lane = self._lane(event["pid"], event["tid"], 0)
        return start, nbytes, self._name(MEMORY_EVENTS, device), lane, -1, address, 0

    def _add_arrow(self, event: Mapping[str, Any]) -> None:
        """Add one end of an arrow. The end at a node directly follows the node in the file."""
        number = parse_int(event["id"])
        if not self.arrows.wants(number):
            return
        thread = self.lanes[self._lane(event["pid"], event["tid"], 0)][0]
        if event["ph"] == "s":
            self.arrows.add(number, False, thread)
        elif self._last_node is not None and self._last_node[:2] == (thread, nanoseconds(event["ts"])):
            self.arrows.add(number, True, self._last_node[2])

    def _add_session(self, event: Mapping[str, Any]) -> None:
        """Add a session of the profiler; several count from the first start to the last end."""
        start, ns = _times(event)
        first, last = self.session or (start, start)
        self.session = min(first, start), max(last, start + ns)

    def _name(self, group: str, name: Any) -> int:
        """The number of a name in a group. Raises TypeError if it is not a string."""
        if type(name) is not str:
            raise TypeError
        number = self._numbers_of[group].setdefault(name, len(self.names))
        if number == len(self.names):
            self.names.append((group, encodable_text(name)))
        return number

    def _lane(self, process: Any, thread: Any, forward: int) -> int:
        if (lane := self._lane_numbers.get((process, thread, forward))) is None:
            # In old traces, the same thread ID is text in some kinds of events and a number in others.
            number = self._threads.setdefault((str(process), str(thread)), len(self._threads) + 1)
            lane = self._lane_numbers[process, thread, forward] = len(self.lanes)
            self.lanes.append((number, forward))
        return lane

    # Corrections, after the last piece

    def drop_duplicates(self) -> int:
        """Drop the repetitions of events that the trace has several times, and return how many were dropped."""
        return sum(columns.drop_duplicates() for columns in (self.cpu, self.work))

    def place_overhead(self) -> None:
        """Put the profiler's overhead on the threads that it was on. What comes before all operators is left out."""
        if not self._overhead:
            return
        is_op = [group in (OP, OP_OR_RANGE) for group, _ in self.names]
        thread_of = [thread for thread, _ in self.lanes]
        lane_of = dict(zip(thread_of, range(len(thread_of))))
        overhead = sorted(self._overhead)
        events = zip(self.cpu.start, self.cpu.lane, self.cpu.name)
        ops = ((start, thread_of[lane]) for start, lane, name in events if is_op[name])
        threads = threads_of_overhead([start for start, _, _ in overhead], ops)
        self.cpu.add([(*event, lane_of[thread], -1, 0, 0) for event, thread in zip(overhead, threads) if thread])

    def separate(self) -> int:
        """Let ranges that only rounding makes overlap follow each other, and count others: ``Columns.separate``."""
        # Runtime calls and overhead have another clock: one may end after its operator.
        no_ranges = (MEMORY_EVENTS, RUNTIME_CALLS, OVERHEAD_EVENTS)
        is_left_out = [group in no_ranges or is_host_collective(name) for group, name in self.names]
        return self.cpu.separate([thread for thread, _ in self.lanes], is_left_out)

    def count_early_work(self) -> int:
        """How much device work begins over 1 us before the call that launched it, on the clocks of the trace."""
        called: dict[int, int] = {}
        is_call = [group is RUNTIME_CALLS for group, _ in self.names]
        for number, start, name in zip(self.cpu.number, self.cpu.start, self.cpu.name):
            if is_call[name] and number and called.get(number, start) >= start:  # the driver's call inside has it, too
                called[number] = start
        return sum(start + 1000 < called.get(number, 0) for start, number in zip(self.work.start, self.work.number))


class Arrows:
    """The arrows from operators to the autograd nodes that they made. Each event has the number of its thread, and a
    node has another number for the thread of its forward. An arrow starts at an operator on the thread and ends at the
    node, so it connects the two numbers. Only arrows with one end are kept. If they are many, some are enough: a part
    of them is dropped."""

    def __init__(self) -> None:
        # By the number of an arrow: the thread of the operator; the node's number of its forward thread.
        self._ends: tuple[dict[int, int], dict[int, int]] = ({}, {})
        self._votes: Counter[tuple[int, int]] = Counter()  # (node's number, thread) → how many arrows connect them
        self._dropped_bits = 0  # an arrow is dropped if its number has any of these bits

    def wants(self, number: int) -> bool:
        return not number & self._dropped_bits

    def add(self, number: int, is_at_node: bool, thread: int) -> None:
        """Add one end of an arrow, with the number of the thread that is known there."""
        if (other := self._ends[not is_at_node].pop(number, None)) is not None:
            self._votes[(thread, other) if is_at_node else (other, thread)] += 1
            return
        self._ends[is_at_node][number] = thread
        if len(self._ends[is_at_node]) > _MANY_ARROWS:
            self._dropped_bits = self._dropped_bits * 2 + 1
            for arrows in self._ends:
                for arrow in [arrow for arrow in arrows if arrow & self._dropped_bits]:
                    del arrows[arrow]

    def forward_threads(self, lanes: Sequence[tuple[int, int]], cpu: Columns) -> dict[int, int]:
        """The thread for each number of a forward thread. For a number without arrows, it is the thread with most
        operators that have the sequence numbers of its nodes. ``lanes``: those of ``EventTable``."""
        numbers = {forward for _, forward in lanes if forward}
        votes = Counter(self._votes)
        if unknown := numbers - {forward for forward, _ in votes}:
            wanted: dict[int, set[int]] = {}  # sequence number → numbers of forward threads in nodes that have it
            for lane, sequence in zip(cpu.lane, cpu.sequence):
                if sequence >= 0 and lanes[lane][1] in unknown:
                    wanted.setdefault(sequence, set()).add(lanes[lane][1])
            for lane, sequence in zip(cpu.lane, cpu.sequence):
                if sequence in wanted and not lanes[lane][1]:
                    votes.update((forward, lanes[lane][0]) for forward in wanted[sequence])
        return {forward: thread for (forward, thread), _ in reversed(votes.most_common())}


# Numbers in the JSON, which may be text or anything else


def _times(event: Mapping[str, Any]) -> tuple[int, int]:
    """Start and duration of an event, in ns. Raises ValueError if they are not possible."""
    start, ns = nanoseconds(event["ts"]), nanoseconds(event["dur"])
    if not 0 <= ns < BEYOND or abs(start) > BEYOND:
        raise ValueError
    return start, ns


def nanoseconds(microseconds: float) -> int:
    """The same time in ns. The whole part and the fraction are converted separately, so that no digit is lost."""
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def parse_int(value: Any, default: int | None = None) -> int:
    """An integer, from a number or from text. Other values give the default; without one, they raise ValueError."""
    try:
        return int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, TypeError):
        if default is None:
            raise ValueError from None
        return default
