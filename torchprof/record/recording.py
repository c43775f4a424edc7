"""The events of one profiler session. This file and ``session`` are the only ones that use ``torch.autograd.profiler``.

They hide all differences between the profilers of torch's versions.
"""

from __future__ import annotations

import gzip
import shutil
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence, Set
from functools import partial
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler_util import EventList

from torchprof.attribute.collectives import ACCUMULATES, RECORDS_COLLECTIVE
from torchprof.attribute.event_names import (
    MEMORY,
    RAISED,
    STOPPED,
    event_kind,
    is_a_common_name,
    is_of_a_call,
    is_torchs_step,
    numbers_of_devices,
)
from torchprof.attribute.events import PREFIX, Detail, Event, Kind
from torchprof.attribute.launches import first_correlation_id
from torchprof.attribute.loops import Loop, NamedRange, loop_of
from torchprof.attribute.nesting import OpenRanges
from torchprof.errors import TorchprofError
from torchprof.record.cpu_time import CpuTime
from torchprof.record.event_lists import event_list_of, raws_in
from torchprof.record.raw_events import BACKWARD_SCOPE, USER_SCOPE, InnerOpsOfRanges, RawEvent, RawEvents, end_ns
from torchprof.record.signatures import InputSignatures
from torchprof.record.torch_internals import optional
from torchprof.run.collectives import C10D_OPS
from torchprof.run.words import BEFORE, REPLAYS, Signature, is_collective, is_runtime_call

OURS = "_is_torchprofs"
"""The attribute that marks a ``torch.autograd.profiler.profile`` as one of torchprof's sessions."""

_is_python_function: Callable[[Any], bool] = getattr(RawEvent, "is_python_function", lambda raw: False)
_is_annotation: Callable[[Any], bool] | None = getattr(RawEvent, "is_user_annotation", None)
# The stream of a kernel. In a torch that does not record it, all work of a device has one number.
_stream: Callable[[Any], int] = getattr(RawEvent, "device_resource_id", RawEvent.start_thread_id)

HAS_COLLECTIVE_METADATA = "expose_kineto_event_metadata" in (
    getattr(optional("torch._C._profiler._ExperimentalConfig"), "__init__", None).__doc__ or ""
)
"""Whether this torch gives the metadata of events, as the shapes of collectives, not only in trace files."""


_OF_COMPILED_CODE = {Kind.GUARDS, Kind.REGION, Kind.GRAPH, Kind.COMPILING, Kind.COMPILED_INPUTS}


class Call(NamedTuple):
    """One forward call of a labelled module: its label, thread and time, and whether it ended without an error."""

    label: str
    start_ns: int
    end_ns: int
    thread: int
    finished: bool


class _OpenCall(NamedTuple):
    """A call that has not ended, and its number in the order of start."""

    end_ns: int
    number: int


class Recording:
    """The events of one session of torch's profiler, to be read after its end.

    ``profiler``: a ``torch.autograd.profiler.profile``. ``device``: the kind of device whose kernels it recorded
    ("cuda", "xpu", …), None for the CPU alone. ``called_from``: see ``InputSignatures``.
    """

    def __init__(self, profiler: Any) -> None:
        self._profiler = profiler
        self.device: str | None = profiler.use_device
        self.cpu_time: CpuTime | None = None
        self._inputs = InputSignatures(self.with_stack)
        self.signatures: list[Signature] = self._inputs.all
        self.called_from = self._inputs.called_from  # not a method around it: it is called for each event of backward
        self._trace: Path | None = None
        self.loop = Loop()

    @property
    def has(self) -> dict[str, bool]:
        """Which options of the profiler have an effect on the events: ``profile_memory``, ``record_shapes``,
        ``with_stack``. Without ``experimental_config=_ExperimentalConfig(verbose=True)`` events have no source lines,
        even if ``with_stack`` is set."""
        has = {name: bool(getattr(self._profiler, name)) for name in ("profile_memory", "record_shapes", "with_stack")}
        has["with_stack"] = has["with_stack"] and any(raw.stack() for raw in self._raw())
        return has

    @property
    def with_stack(self) -> bool:
        """Whether Python's calls were recorded."""
        return bool(self._profiler.with_stack)

    @property
    def wall_ns(self) -> int:
        """The duration of the session as torch recorded it; in older versions, from the first event to the last."""
        start, end = (getattr(self._profiler, f"profiling_{which}_time_ns", 0) for which in ("start", "end"))
        if end > start > 0:
            return int(end - start)
        events = self._read()
        return max(map(end_ns, events.all)) - events.starts[0] if events.all else 0

    @property
    def torchs_steps(self) -> int:
        """The number of ranges that ``torch.profiler.profile`` recorded for its steps."""
        return sum(is_torchs_step(raw.name()) for raw in self._raw() if raw.device_type() == DeviceType.CPU)

    @property
    def start_ns(self) -> int | None:
        """When the session began, on the clock of the events; None if nothing was recorded."""
        results = self._profiler.kineto_results
        return None if results is None else int(results.trace_start_ns())

    def events(
        self, detail: Callable[[str], Detail] | None = None, addresses: bool = False, each_op: bool = True
    ) -> Iterator[Event]:
        """All events in the order of start: first those of the CPU (ops, labels, autograd nodes, memory), then the
        work of the device.

        The device's come last because it has another clock: a kernel may seem to start before its launch. ``detail``:
        for the name of an op, what is read of its inputs; None for nothing. It needs a session with ``record_shapes``.
        The signature of an event is an index in ``signatures``. ``addresses``: memory events have addresses.
        ``each_op``: whether each op has an event. If not, ops of the CPU alone, without ``detail``, may be in
        ``Event.inside`` of the range around them.

        ``loop`` is known after the call.
        """
        events = self._read()
        self.loop = loop_of(events.names, partial(_ranges_of, events), partial(_has_gradients, events))
        return self._events_of(events, detail, self._addresses() if addresses else {}, each_op)

    def _events_of(
        self,
        events: RawEvents,
        detail: Callable[[str], Detail] | None,
        address_of: dict[tuple[int, int, int], int],
        each_op: bool,
    ) -> Iterator[Event]:
        """See ``events``. The function is long because its loop runs for each of perhaps a million events: a function
        for each kind of event would add a call for each event."""
        raws, names, names_of, starts, lanes = events.all, events.names, events.names_of, events.starts, events.threads
        on_device = self.device is not None
        kinds: dict[int, Kind | None] = {}  # by index of a name; None: such events are left out
        details: dict[str, Detail] = {}  # by name of an op
        nothing = Detail.NOTHING
        number_of = self._inputs.number_of
        threads: dict[int, int] = {}  # correlation ID of an op → its thread
        devices: dict[tuple[Any, int], str] = {}
        work: list[Any] = []
        calls: list[int] = []  # the correlation IDs of calls of the device's runtime
        unlinked: set[int] = set()  # those of the calls outside of all ops, as the replay of a CUDA graph may be
        cpu = DeviceType.CPU
        memory, node, backward, user_label = Kind.MEMORY, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.USER_LABEL
        op, label, collective, compiling = Kind.OP, Kind.LABEL, Kind.COLLECTIVE, Kind.COMPILING
        correlation = 0
        new = tuple.__new__  # takes a third of the time of Event(...)
        if on_device:
            threads = {raw.correlation_id(): raw.start_thread_id() for raw in raws if not raw.linked_correlation_id()}
        has_more = on_device or self.with_stack or detail is not None
        inner = None if each_op or has_more else _inner_ops(events)
        index, last = -1, len(raws) - 1
        while index < last:
            index += 1
            raw, name_number, thread = raws[index], names_of[index], lanes[index]
            name = names[name_number]
            if on_device:
                if raw.device_type() != cpu and name != MEMORY:
                    work.append(raw)
                    continue
                # A call of the device's runtime (cudaLaunchKernel) is linked to its op, and counts on the op's thread.
                launcher = raw.linked_correlation_id()
                thread = threads.get(launcher, thread) if launcher else thread
                correlation = raw.correlation_id()
                if launcher or (is_runtime_call(name) and raw.scope() != USER_SCOPE):
                    calls.append(correlation)
                    if not launcher:
                        unlinked.add(correlation)
                    # Runtime calls have IDs of their own, which may equal those of ops.
                    correlation = 0 if launcher else -correlation
            try:
                kind = kinds[name_number]
            except KeyError:
                kind = kinds[name_number] = _kind(raw, name)
            if kind is None:
                continue
            start = starts[index]
            if kind is memory:
                size = raw.nbytes()
                address = address_of.get((start, thread, size), 0)
                device = _device(raw.device_type(), raw.device_index(), devices)
                yield new(Event, (kind, name, start, start, thread, -1, 0, address, device, size, 0, None))
                continue
            if kind is op or kind is user_label:  # a user's label may have the name of an op
                kind = user_label if raw.scope() == USER_SCOPE else op
            elif kind is compiling and is_a_common_name(name) and raw.scope() == USER_SCOPE:
                kind = user_label
            sequence = raw.sequence_nr()
            end = end_ns(raw)
            forward_thread = signature = 0
            if kind is user_label:
                if is_collective(name):
                    kind = collective
                    if detail is not None:
                        signature = number_of(raw, Detail.SHAPES)
                elif raw.is_async() or raw.end_thread_id() != thread:
                    end = start  # it ends on another thread: it takes no time of this one
            elif sequence >= 0:
                if kind is node:
                    forward_thread = raw.fwd_thread_id()
                elif raw.scope() == BACKWARD_SCOPE:
                    kind = backward
                    forward_thread = raw.fwd_thread_id()
            if detail is not None and (kind is op or (kind is backward and name.endswith(ACCUMULATES))):
                wanted = details.get(name)
                if wanted is None:
                    wanted = details[name] = detail(name)
                if wanted is not nothing:
                    signature = number_of(raw, wanted)
            if name == RECORDS_COLLECTIVE and HAS_COLLECTIVE_METADATA:
                signature = self._inputs.number_of_collective(raw) or signature
            inside = None
            if inner is not None and (kind is op or kind is label or kind is backward):
                inside, index = inner.find(index, end, kind is not label)
            values = kind, name, start, end, thread, sequence, forward_thread, correlation, "cpu", 0, signature, inside
            yield new(Event, values)
        yield from _device_work(work, calls, unlinked, {names[number]: kind for number, kind in kinds.items()}, devices)

    def _addresses(self) -> dict[tuple[int, int, int], int]:
        """The address of each memory event, by its time, thread and bytes. Only torch's tree of events has it."""
        found: dict[tuple[int, int, int], int] = {}
        results = self._profiler.kineto_results
        waiting = [] if results is None else [results.experimental_event_tree()]
        allocation = optional("torch._C._profiler._ExtraFields_Allocation")
        if allocation is None:
            return {}
        while waiting:
            for event in waiting.pop():
                children = event.children
                if children:
                    waiting.append(children)
                    continue  # no allocation; `extra_fields` makes a copy, so it is read only if needed
                fields = event.extra_fields
                if type(fields) is allocation:
                    found[event.start_time_ns, event.start_tid, fields.alloc_size] = fields.ptr
        return found

    def calls(self) -> list[Call]:
        """The forward calls of labelled modules, in the order in which they ended."""
        found: list[Call] = []
        open_calls: OpenRanges[_OpenCall] = OpenRanges()
        for raw in self._raw():
            name = raw.name()
            if not name.startswith(PREFIX) or raw.device_type() != DeviceType.CPU:
                continue
            start, thread = raw.start_ns(), raw.start_thread_id()
            around = open_calls.at(thread, start)
            if name in (RAISED, STOPPED) and around:
                number = around[-1].number
                found[number] = found[number]._replace(finished=False)
            elif is_of_a_call(name):
                end = end_ns(raw)
                around.append(_OpenCall(end, len(found)))
                found.append(Call(name, start, end, thread, True))
        return sorted(found, key=lambda call: call.end_ns)

    def event_list(self) -> EventList:
        """torch's own list of the whole session, without our labels."""
        return event_list_of(self._profiler, self._unlabelled())

    def event_lists(self, calls: list[Call]) -> list[EventList]:
        """For each call, torch's own list of the events in it: ops, their kernels and their memory."""
        return [event_list_of(self._profiler, raws) for raws in raws_in(calls, self._unlabelled())]

    def export_chrome_trace(self, path: str | PathLike[str]) -> None:
        """Write torch's own trace of the session, gzipped if the name ends in ``.gz``."""
        if self._trace is None:  # torch can write it only once
            folder = Path(mkdtemp(prefix="torchprof-"))
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
            self._profiler.kineto_results.save(str(folder / "trace.json"))
            self._trace = folder / "trace.json"
        wanted = Path(path)
        with (
            self._trace.open("rb") as trace,
            gzip.open(wanted, "wb") if wanted.suffix == ".gz" else wanted.open("wb") as file,
        ):
            shutil.copyfileobj(trace, file)

    def _unlabelled(self) -> list[Any]:
        return [raw for raw in self._raw() if not raw.name().startswith(PREFIX)]

    def _raw(self) -> Sequence[Any]:
        """The events of torch in the order of start."""
        return self._read().all

    def _read(self) -> RawEvents:
        results = self._profiler.kineto_results
        raws = [] if results is None else results.events()
        return RawEvents([raw for raw in raws if _has_name(raw)] if self.with_stack else raws)


def finished_recording(profiler: Any) -> Recording:
    """The recording of a user's profiler. Raises TorchprofError if it is no profiler of torch's or has not ended."""
    inner = getattr(profiler, "profiler", profiler)  # torch.profiler.profile has torch.autograd.profiler.profile inside
    if inner is None or not isinstance(inner, torch_profiler.profile):
        if isinstance(profiler, torch.profiler.profile):
            raise TorchprofError("This profiler was not started: nothing was recorded.")
        raise TorchprofError(
            f"{profiler!r:.80} is not a profiler of torch: give a torch.profiler.profile or a "
            "torch.autograd.profiler.profile."
        )
    if inner.kineto_results is None:
        raise TorchprofError("This profiler has not ended, or has recorded nothing: read it after its block.")
    return Recording(inner)


def _kind(raw: Any, name: str) -> Kind | None:
    """The kind of the CPU events of one name; None if they are left out."""
    kind = event_kind(name)
    if kind is not Kind.OP:
        return kind
    if _is_python_function(raw):
        return None
    if raw.scope() == USER_SCOPE:
        return Kind.USER_LABEL
    return Kind.BACKWARD_FUNCTION if raw.scope() == BACKWARD_SCOPE else Kind.OP


def _has_name(raw: Any) -> bool:
    """Whether the name of an event can be read: torch may cut a long name of a Python function inside a character."""
    try:
        return bool(raw.name())
    except UnicodeDecodeError:
        return False


def _device(device_type: Any, index: int, known: dict[tuple[Any, int], str]) -> str:
    """The name of a device. torch calls a ROCm device "cuda"; only the profiler's memory events call it "hip"."""
    device = known.get((device_type, index))
    if device is None:
        kind = device_type.name.lower().replace("hip", "cuda")
        device = "cpu" if kind in ("cpu", "mkldnn", "ideep") else f"{kind}:{max(index, 0)}"
        known[device_type, index] = device
    return device


def _ranges_of(events: RawEvents, wanted: Set[str]) -> Iterator[NamedRange]:
    """The CPU's ranges with some of these names, in the order of start."""
    names = {number: name for number, name in enumerate(events.names) if name in wanted}
    for raw, number, start, thread in zip(events.all, events.names_of, events.starts, events.threads):
        if number in names and raw.device_type() == DeviceType.CPU:
            yield NamedRange(names[number], start, end_ns(raw), thread)


def _has_gradients(events: RawEvents, call: NamedRange) -> bool:
    """Whether an event in a call has a sequence number. In a call with gradients, one of the first has."""
    for index in range(bisect_left(events.starts, call.start_ns), len(events.starts)):
        if events.starts[index] >= call.end_ns:
            return False
        if events.threads[index] == call.thread and events.all[index].sequence_nr() >= 0:
            return True
    return False


def _inner_ops(events: RawEvents) -> InnerOpsOfRanges | None:
    """Finds ops that need no events of their own. None if torch.compile made any event: then each op counts."""
    kinds = [*map(event_kind, events.names)]
    if _OF_COMPILED_CODE.intersection(kinds):
        return None
    are_ops = [
        kind is Kind.OP and name != RECORDS_COLLECTIVE and name not in REPLAYS and not name.startswith(C10D_OPS)
        for kind, name in zip(kinds, events.names)
    ]
    return InnerOpsOfRanges(events, are_ops)


def _device_work(
    work: list[Any],
    calls: list[int],
    unlinked: Set[int],
    kinds: dict[str, Kind | None],
    devices: dict[tuple[Any, int], str],
) -> Iterator[Event]:
    """The events of a device. ``calls``: the correlation IDs of its runtime's calls; ``unlinked``: those that are linked
    to no op. ``kinds``: of the CPU's events, by name. ``devices``: the names of the devices of memory events; more are
    added."""
    hip = [index for device_type, index in devices if device_type.name == "HIP"]
    counted = numbers_of_devices((raw.device_index() for raw in work), hip)
    first = first_correlation_id(calls, (raw.correlation_id() for raw in work if raw.linked_correlation_id()))
    new = tuple.__new__
    for raw in work:
        name = raw.name()
        # A copy of a CPU range on the device's timeline is no work. If this torch does not mark such copies, they are
        # recognized by the name of the range; only then, because a user's kernel may have the name of a range, too.
        if name.startswith(PREFIX) or (
            _is_annotation(raw) if _is_annotation is not None else kinds.get(name) is Kind.USER_LABEL
        ):
            continue
        start, end, stream = raw.start_ns(), end_ns(raw), _stream(raw)
        launcher, index = raw.linked_correlation_id(), raw.device_index()
        device = _device(raw.device_type(), counted.get(index, index), devices)
        if not launcher:
            call = raw.correlation_id()
            if call in unlinked:
                launcher = -call
            elif 0 < call < first:
                launcher = BEFORE
        yield new(Event, (Kind.KERNEL, name, start, end, stream, -1, 0, launcher, device, 0, 0, None))
