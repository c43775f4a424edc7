"""The events of a trace that torch's profiler wrote: kept as columns of integers, and handed out as ``Event``s.

Every difference between the traces of torch's versions and devices ends here.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from torchprof.attribute.collectives import ACCUMULATES
from torchprof.attribute.event_names import (
    MEMORY,
    NODE_PREFIX,
    STARTED,
    STEP_MARK,
    event_kind,
    is_a_common_name,
    is_torchs_step,
    numbers_of_devices,
)
from torchprof.attribute.events import HOOKS, PREFIX, Detail, Event, Kind
from torchprof.attribute.launches import first_correlation_id
from torchprof.run.words import BEFORE, is_collective
from torchprof.traces.categories import GROUPS, MODULE, MTIA_WORK, NO_WORK, OP, OP_OR_RANGE, RANGE, RUNTIMES, SESSION
from torchprof.traces.columns import BEYOND, DEVICE_WORK, MEMORY_EVENTS, RUNTIME_CALLS, Columns
from torchprof.traces.forward_threads import Arrows
from torchprof.traces.layers import ModuleCall, RangeCall, class_of
from torchprof.traces.nesting import Line, nested, ranges_in
from torchprof.traces.signatures import Signatures, shapes_in
from torchprof.traces.values import nanoseconds, text_of, whole_number

_NOT_CPU = frozenset((DEVICE_WORK, SESSION, NO_WORK))
_RANGES = (RANGE, OP_OR_RANGE)
_OF_CPU = (OP, RANGE, OP_OR_RANGE, MODULE)
_HIP = 6
_DEVICE_TYPES = {1: "cuda", _HIP: "cuda", 9: "xla", 12: "xpu", 13: "mps", 15: "hpu", 19: "mtia", 20: "privateuse1"}
"""The numbers of ``c10/core/DeviceType.h``, as torch's own tables name them."""
_CPUS = (0, 2, 5)
_IS_MODULE = "nn.Module: "
_ARROWS = ("fwdbwd", "forward_backward")
"""The categories of the arrows from an op to the node that it made."""
_TORCHS_NODES = "torch::autograd::"
_NODE_NAME = re.compile(r"\w+Backward\d*")
_NOT_AS_IT_MUST_BE = (AttributeError, KeyError, TypeError, ValueError, OverflowError)


class TraceEvents:
    """The events of one trace: added piece by piece, then read as those of a ``Recording`` are.

    ``device`` is the kind of device whose work it holds, None for the CPU alone; ``unread``: how many events lacked
    what they must have. ``base_ns``: what the times in the file count from, in ns since the epoch.
    ``has_call_stacks``: whether operators have source lines, as torch wrote before it recorded modules.
    """

    def __init__(self, detail: Callable[[str], Detail]) -> None:
        """``detail`` says for the name of an op what is kept of its inputs."""
        self.device: str | None = None
        self._signatures = Signatures(detail)
        self.signatures = self._signatures.all
        self.unread = self.base_ns = 0
        self.has_call_stacks = False
        self._groups = dict(GROUPS)
        self._cpu, self._work = Columns(), Columns()
        self._names: list[tuple[str, str]] = []  # group and name, of memory the name of its device
        self._numbers_of: defaultdict[str, dict[str, int]] = defaultdict(dict)  # by group: name → its number there
        self._threads: dict[tuple[str, str], int] = {}  # (process, thread) → its number, from 1
        self._lanes: dict[tuple[Any, ...], int] = {}  # (process, thread, number of a node's forward thread) → a number
        self._lane_of: list[tuple[int, int]] = []  # by that: thread, number of the forward thread
        self._streams: dict[tuple[Any, Any], int] = {}  # (device, stream) → a number
        self._stream_of: list[tuple[int, int]] = []
        self._hip: set[int] = set()  # ROCm devices that have memory events
        self._arrows = Arrows()
        self._node: tuple[int, int, int] | None = None  # the last: thread, start, number of the forward thread
        self._session: tuple[int, int] | None = None  # when it began and ended
        self._in_backward: set[tuple[int, int, int]] = set()  # ranges: start, thread, number of the name

    def __len__(self) -> int:
        return len(self._cpu.start) + len(self._work.start)

    # Reading

    def add(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Keep the events of one piece of the file. An event that lacks what it must have is counted, and left out.

        This is one long function because it runs once for each of millions of events: a call for each costs a tenth of
        the time that reading takes.
        """
        groups, numbers_of, cpu = self._groups, self._numbers_of, self._cpu
        module, runtime, not_cpu = MODULE, RUNTIME_CALLS, _NOT_CPU
        starts, lengths, names, lanes = cpu.start.append, cpu.ns.append, cpu.name.append, cpu.lane.append
        sequences, numbers, signatures = cpu.sequence.append, cpu.number.append, cpu.signature.append
        of_operator, operators = self._signatures.of_operator, self._signatures.operators
        last = cpu.last
        last_process = last_thread = None
        last_lane = 0
        for event in events:
            try:
                phase = event["ph"]
                if phase != "X":
                    if phase == "i":
                        if event["name"] == MEMORY:
                            self._add_memory(event)
                            last = cpu.last
                    elif (phase == "s" or phase == "f") and event.get("cat") in _ARROWS:
                        self._add_arrow(event)
                    continue
                category = event.get("cat", "")
                try:
                    group = groups[category]
                except KeyError:
                    group = self._add_category(category)
                if group in not_cpu:
                    if group is DEVICE_WORK:
                        self._add_work(event)
                    elif group is SESSION:
                        self._add_session(event)
                    continue
                name = event["name"]
                if group is module and not name.startswith(_IS_MODULE):
                    continue
                try:
                    name_number = numbers_of[group][name]
                except KeyError:
                    name_number = self._name(group, name)

                time = event["ts"]  # in us; those of a day and three decimals are nearly all the digits of a float
                start = int(time)
                start = start * 1000 + round((time - start) * 1000)
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
                        if group is OP_OR_RANGE and whole_number(sequence) >= 0:
                            operators.add(name_number)
                    if ("Input Dims" in args or "Input dims" in args) and group is not module:
                        signature = of_operator(name, group, name_number, args)
                    elif "Collective name" in args:
                        signature = self._signatures.of_collective(args)
                if type(number) is not int or type(sequence) is not int or type(forward) is not int:
                    number, sequence, forward = whole_number(number), whole_number(sequence), whole_number(forward)
                # One test for all of them, which nearly always do: a negative number has a sign in its bits, too.
                if (ns | start | number | sequence + 1) >> 62 and (
                    not 0 <= ns < BEYOND or max(abs(start), abs(number), abs(sequence)) > BEYOND
                ):
                    raise ValueError
                process, thread = event["pid"], event["tid"]
                if forward:
                    lane = self._lane(process, thread, forward)
                    self._node = (self._lane_of[lane][0], start, forward)
                elif thread == last_thread and process == last_process:
                    lane = last_lane
                else:
                    lane = last_lane = self._lane(process, thread, 0)
                    last_process, last_thread = process, thread
            except _NOT_AS_IT_MUST_BE:
                self.unread += 1
                continue
            if start < last:
                cpu.stretches.append(len(cpu.start))
            last = start
            starts(start)
            lengths(ns)
            names(name_number)
            lanes(lane)
            sequences(sequence)
            numbers(number)
            signatures(signature)

    def drop_doubles(self) -> int:
        """Leave out events that stand in the trace once more, and return how many these are. Call it after the last
        piece."""
        return sum(columns.drop_doubles(self._groups_of_names) for columns in (self._cpu, self._work))

    def _add_category(self, category: Any) -> str:
        """The group of a category that is new: of a runtime, or nothing."""
        device, _, kind = str(category).rpartition("_")
        group = NO_WORK
        if kind in ("runtime", "driver") and device in RUNTIMES:
            group = RUNTIME_CALLS
            self.device = RUNTIMES[device]
        self._groups[category] = group
        return group

    def _add_work(self, event: Mapping[str, Any]) -> None:
        """A kernel, a copy, or a set."""
        is_mtia = event["cat"] == MTIA_WORK
        if is_mtia and "Sync" in event["name"]:
            return
        if self.device is None:
            self.device = "mtia" if is_mtia else "cuda"  # until a runtime says otherwise: in old traces none has a name
        start, ns = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        args = event.get("args") or {}
        where = args.get("device", event["pid"]), args.get("stream", event["tid"])
        stream = self._streams.get(where)
        if stream is None:
            stream = self._streams[where] = len(self._stream_of)
            self._stream_of.append((max(whole_number(where[0], 0), 0), whole_number(where[1], 0)))
        launch, op = (
            whole_number(args.get("correlation", 0)),
            whole_number(args.get("External id", args.get("external id", 0))),
        )
        if not 0 <= ns < BEYOND or max(abs(start), abs(launch), abs(op)) > BEYOND:
            raise ValueError
        signature = self._signatures.of_collective(args) if "Collective name" in args else 0
        self._work.add(start, ns, self._name(DEVICE_WORK, event["name"]), stream, op, launch, signature)

    def _add_memory(self, event: Mapping[str, Any]) -> None:
        start, args = nanoseconds(event["ts"]), event["args"]
        nbytes, address = whole_number(args["Bytes"]), whole_number(args.get("Addr", 0))
        kind = whole_number(args.get("Device Type", 0))
        device = "cpu"
        if kind not in _CPUS:
            index = max(whole_number(args.get("Device Id", 0)), 0)
            device = f"{_DEVICE_TYPES.get(kind, f'device{kind}')}:{index}"
            if kind == _HIP:
                self._hip.add(index)
        if max(abs(start), abs(nbytes), abs(address)) > BEYOND:
            raise ValueError
        self._cpu.add(
            start, nbytes, self._name(MEMORY_EVENTS, device), self._lane(event["pid"], event["tid"], 0), -1, address, 0
        )

    def _add_arrow(self, event: Mapping[str, Any]) -> None:
        number = whole_number(event["id"])
        if not self._arrows.wants(number):
            return
        thread = self._lane_of[self._lane(event["pid"], event["tid"], 0)][0]
        if event["ph"] == "s":
            self._arrows.add_start(number, thread)
        elif self._node is not None and self._node[:2] == (thread, nanoseconds(event["ts"])):
            self._arrows.add_end(number, self._node[2])

    def _add_session(self, event: Mapping[str, Any]) -> None:
        start, ns = nanoseconds(event["ts"]), nanoseconds(event["dur"])
        if ns < 0:
            raise ValueError
        first, last = self._session or (start, start)
        self._session = min(first, start), max(last, start + ns)

    def _name(self, group: str, name: Any) -> int:
        if type(name) is not str:
            raise TypeError
        number = self._numbers_of[group].setdefault(name, len(self._names))
        if number == len(self._names):
            self._names.append((group, text_of(name)))
        return number

    def _lane(self, process: Any, thread: Any, forward: int) -> int:
        lane = self._lanes.get((process, thread, forward))
        if lane is None:
            # Old traces have numbers of threads as text, or not, by the kind of event.
            number = self._threads.setdefault((str(process), str(thread)), len(self._threads) + 1)
            lane = self._lanes[process, thread, forward] = len(self._lane_of)
            self._lane_of.append((number, forward))
        return lane

    # What it holds

    @property
    def start_ns(self) -> int | None:
        """When the session began, on the clock of the events; None where the trace does not say so."""
        return None if self._session is None else self.base_ns + self._session[0]

    @property
    def first_ns(self) -> int:
        """When the session began; where the trace does not say so, the first event."""
        starts = [min(columns.start) for columns in (self._cpu, self._work) if columns.start]
        return self.base_ns + (min(starts) if self._session is None else self._session[0])

    @property
    def wall_ns(self) -> int:
        """How long the session lasted; where the trace does not say, from the first event to the end of the last."""
        if self._session is not None:
            return self._session[1] - self._session[0]
        of_memory = {number for number, (group, _) in enumerate(self._names) if group is MEMORY_EVENTS}
        first, last = BEYOND, 0
        for columns in (self._cpu, self._work):
            for start, ns, name in zip(columns.start, columns.ns, columns.name):
                first, last = min(first, start), max(last, start if name in of_memory else start + ns)
        return max(last - first, 0)

    @property
    def cpu_time(self) -> None:
        """Not in a trace."""
        return

    @property
    def torchs_steps(self) -> int:
        """How many steps of ``torch.profiler.profile`` there are, as ranges of their own."""
        steps = {
            number for number, (group, name) in enumerate(self._names) if group in _RANGES and is_torchs_step(name)
        }
        return sum(name in steps for name in self._cpu.name) if steps else 0

    @property
    def marks(self) -> int:
        """How many marks there are of a session of ours: where it began, and where each of its steps ended."""
        marks = {number for number, (_, name) in enumerate(self._names) if name in (STARTED, STEP_MARK)}
        return sum(name in marks for name in self._cpu.name) if marks else 0

    @property
    def from_first_mark(self) -> bool:
        """Whether a step began with the first of them."""
        return not any(name == STARTED for _, name in self._names)

    @cached_property
    def has_numbers(self) -> bool:
        """Whether autograd's nodes have the number of their forward thread."""
        return any(forward for _, forward in self._lane_of)

    @property
    def has_nodes(self) -> bool:
        return self.has_engine or any(self._is_bare_node(*one) for one in self._names)

    @cached_property
    def has_engine(self) -> bool:
        """Whether there is a range of autograd's engine around each of its nodes."""
        return any(name.startswith(NODE_PREFIX) for _, name in self._names)

    @property
    def has_operators(self) -> bool:
        """Whether anything was recorded of the CPU but calls of a device's runtime, which come with the device."""
        return any(group in _OF_CPU for group, _ in self._names)

    @property
    def has_compiled(self) -> bool:
        """Whether code ran that torch.compile had made."""
        return any(event_kind(name) is Kind.REGION for _, name in self._names)

    @property
    def has_memory(self) -> bool:
        return any(group is MEMORY_EVENTS for group, _ in self._names)

    @property
    def has_shapes(self) -> bool:
        return self._signatures.has_shapes

    @property
    def _groups_of_names(self) -> list[str]:
        return [group for group, _ in self._names]

    @property
    def labels(self) -> list[str]:
        """Our labels, of modules and not of marks."""
        return [name for _, name in self._names if name.startswith(PREFIX) and not name.startswith(PREFIX + "!")]

    @property
    def processes(self) -> tuple[str, ...]:
        """The numbers of the processes whose threads it holds."""
        return tuple(sorted({process for process, _ in self._threads}))

    def classes(self) -> dict[str, str]:
        """The class of the module that each of our labels is on, as far as Python's events tell."""
        of_label = [name.startswith(PREFIX) for _, name in self._names]
        of_module = [group is MODULE for group, _ in self._names]
        if not any(of_module):
            return {}
        names = [name for _, name in self._names]
        classes: dict[str, str] = {}
        for number, _, around in nested(self._with_length(), self._lane_of, names, of_module):
            if of_label[number]:
                classes.setdefault(names[number], class_of(around))
        return classes

    def modules(self) -> list[ModuleCall]:
        """The modules whose calls Python's events tell of, in the order of first call."""
        wanted = [group is MODULE for group, _ in self._names]
        if not any(wanted):
            return []
        names = [name for _, name in self._names]
        seen: defaultdict[str, set[int]] = defaultdict(set)
        parents: dict[str, dict[str, None]] = {}
        for number, signature, around in nested(self._with_length(), self._lane_of, names, wanted):
            if wanted[number]:
                parents.setdefault(names[number], {})[around] = None
            elif signature:
                seen[around].add(signature)
        shapes = {name: frozenset(shapes_in(self.signatures[one] for one in numbers)) for name, numbers in seen.items()}
        return [ModuleCall(name, tuple(above), shapes.get(name, frozenset())) for name, above in parents.items()]

    def ranges(self) -> list[RangeCall]:
        """The ranges of users and of torch itself, in the order of first call, without those of backward work (see
        ``ranges_in``): these ``events`` gives as labels of the user's, whatever ``sites`` it is asked for."""
        kinds = self._kinds(())
        wanted = [kind is Kind.USER_LABEL and bool(name) for kind, (_, name) in zip(kinds, self._names)]
        if not any(wanted):
            return []
        names = [name for _, name in self._names]
        found = ranges_in(self._with_length(), self._lane_of, names, kinds, wanted, self._inner_nodes(kinds))
        self._in_backward = found.in_backward
        return found.calls

    def _with_length(self) -> Iterator[Line]:
        """The events of the CPU in the order of their start, without those of memory."""
        is_memory = [group is MEMORY_EVENTS for group, _ in self._names]
        return (line for line in self._cpu.in_order(self._groups_of_names) if not is_memory[line[2]])

    def _inner_nodes(self, kinds: Sequence[Kind | None]) -> list[bool]:
        """By the number of a name: whether it is that of a node of autograd inside the engine's range around it. One
        without a number is recognized by its name alone."""
        names = [name for _, name in self._names]
        inner = {name.removeprefix(NODE_PREFIX) for name, kind in zip(names, kinds) if kind is Kind.NODE}
        return [name in inner or self._is_bare_node(*one) for name, one in zip(names, self._names)]

    def _is_bare_node(self, group: str, name: str) -> bool:
        """Whether this is a node in a trace of a torch that puts no range of the engine around nodes, as 1.8: by its
        name alone, where it tells no numbers."""
        if group not in (OP, OP_OR_RANGE) or self.has_engine:
            return False
        return name.startswith(_TORCHS_NODES) or (not self.has_numbers and _NODE_NAME.fullmatch(name) is not None)

    # As a recording

    def called_from(self, signature: int, source: int) -> int:
        """Operators of a trace have no source lines."""
        return signature

    def events(self, sites: Collection[str]) -> Iterator[Event]:
        """What happened, in the order of start; then the work of devices, in that order.

        ``sites``: the names of what stands for a layer.
        """
        kinds, names = self._kinds(sites), [name for _, name in self._names]
        is_inner_node = self._inner_nodes(kinds)
        is_runtime = [group is RUNTIME_CALLS for group, _ in self._names]
        forward_threads = self._arrows.forward_threads(self._lane_of, self._cpu)
        launchers, launches = self._launchers()
        op, node, backward, memory = Kind.OP, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.MEMORY
        label, in_backward = Kind.LABEL, self._in_backward
        lane_of, base = self._lane_of, self.base_ns
        new = tuple.__new__  # a third of the time that Event(...) takes, once for every event
        for start, ns, name_number, lane, sequence, number, signature in self._cpu.in_order(self._groups_of_names):
            kind = kinds[name_number]
            if kind is None:
                continue
            name = names[name_number]
            thread, forward = lane_of[lane]
            if in_backward and kind is label and (start, thread, name_number) in in_backward:
                kind = Kind.USER_LABEL
            start += base
            if kind is memory:
                yield new(Event, (kind, MEMORY, start, start, thread, -1, 0, number, name, ns, 0))
                continue
            end = start + ns
            forward_thread = 0
            correlation = launchers.get(number, 0)
            if kind is op:
                if is_runtime[name_number]:
                    correlation = launches.get(number, 0)
                elif (forward and sequence >= 0) or (sequence < 0 and is_inner_node[name_number]):
                    kind, forward_thread = backward, forward_threads.get(forward, 0)
                    if not name.endswith(ACCUMULATES):
                        signature = 0
            elif kind is node:
                forward_thread = forward_threads.get(forward, 0)
            yield new(
                Event,
                (kind, name, start, end, thread, sequence, forward_thread, correlation, "cpu", 0, signature),
            )
        yield from self._device_events(launchers, launches, names)

    def _device_events(
        self, launchers: Mapping[int, int], launches: Mapping[int, int], names: list[str]
    ) -> Iterator[Event]:
        kind = self.device or "cuda"
        counted = numbers_of_devices((index for index, _ in self._stream_of), self._hip)
        first = self._first_call(launchers, launches)
        for start, ns, name, lane, by, launch, signature in self._work.in_order(self._groups_of_names):
            index, stream = self._stream_of[lane]
            start += self.base_ns
            launcher = launchers.get(by, 0) if by != launch and by in launchers else launches.get(launch, 0)
            yield Event(
                Kind.KERNEL,
                names[name],
                start,
                start + ns,
                stream,
                correlation=BEFORE if not launcher and 0 < launch < first else launcher,
                device=f"{kind}:{counted.get(index, index)}",
                signature=signature,
            )

    def _first_call(self, launchers: Mapping[int, int], launches: Mapping[int, int]) -> int:
        """The lowest number of a call of the device's runtime: see ``first_correlation_id``."""
        is_runtime = [group is RUNTIME_CALLS for group, _ in self._names]
        launched = (
            launch
            for by, launch in zip(self._work.sequence, self._work.number)
            if (by in launchers and by != launch) or launch in launches
        )
        calls = (number for number, name in zip(self._cpu.number, self._cpu.name) if is_runtime[name])
        return first_correlation_id(calls, launched)

    def _launchers(self) -> tuple[dict[int, int], dict[int, int]]:
        """By their numbers, the ops that launched something, and calls of the runtime that launched what names no such
        op: each with what stands for it in events.

        Recent traces name the op itself, so do very old ones; those of 2022 and 2023 repeat the number of the launch,
        which then tells of another op, or none.
        """
        is_runtime = [group is RUNTIME_CALLS for group, _ in self._names]
        work, cpu = self._work, self._cpu
        wanted = {op for op, launch in zip(work.sequence, work.number) if op > 0 and op != launch}
        ops: dict[int, int] = {}  # numbers are kept once: there may be millions
        if wanted:
            ops = {
                number: number
                for number, name in zip(cpu.number, cpu.name)
                if number in wanted and not is_runtime[name]
            }
        wanted = {
            launch for op, launch in zip(work.sequence, work.number) if launch > 0 and (op == launch or op not in ops)
        }
        launches: dict[int, int] = {}
        if wanted:
            launches = {
                number: -number for number, name in zip(cpu.number, cpu.name) if number in wanted and is_runtime[name]
            }
        return ops, launches

    def _kinds(self, sites: Collection[str]) -> list[Kind | None]:
        """By the number of a name; None for what is left out. What stands for a layer is a label."""
        kinds: list[Kind | None] = []
        for number, (group, name) in enumerate(self._names):
            kind: Kind | None = Kind.OP if group is RUNTIME_CALLS else event_kind(name)
            if group is DEVICE_WORK:
                kind = Kind.KERNEL
            elif group is MEMORY_EVENTS:
                kind = Kind.MEMORY
            elif group is MODULE or kind is Kind.LABEL:
                # The module is no layer: it is left out.
                of_module = PREFIX + name.removeprefix(HOOKS) if name.startswith(HOOKS) else name
                kind = Kind.LABEL if of_module in sites else None
            elif group is RANGE and is_a_common_name(name):  # a range of the user's of that name
                kind = Kind.USER_LABEL
            elif kind is Kind.OP and is_collective(name):
                kind = Kind.COLLECTIVE
            elif kind is Kind.OP and (
                group is RANGE
                or (
                    group is OP_OR_RANGE
                    and "::" not in name
                    and number not in self._signatures.operators
                    and not self._is_bare_node(group, name)
                )
            ):
                kind = Kind.LABEL if name in sites else Kind.USER_LABEL
            kinds.append(kind)
        return kinds
