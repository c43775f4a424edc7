"""The events of one session of torch's profiler, ours or the user's. What differs between the profilers of torch's
versions is handled here, in ``session`` and in ``session_columns``."""

from __future__ import annotations

import gzip
import shutil
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import partial
from itertools import compress
from os import PathLike
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd import profiler as torch_profiler
from torch.autograd.profiler_util import EventList

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import MEMORY, RAISED, STOPPED, is_module_label, is_torchs_step
from torchprof.attribute.events import PREFIX, Detail, OpenRanges
from torchprof.attribute.loop import Loop, NamedRange, loop_of
from torchprof.errors import TorchprofError
from torchprof.measure.recording import CpuTime
from torchprof.record.session_columns import InputSignatures, RawEvents, SessionColumns, end_ns
from torchprof.record.torch_internals import needed, optional
from torchprof.run.processes import paused_gc
from torchprof.run.words import Signature

OURS = "_is_torchprofs"  # the attribute that marks a ``torch.autograd.profiler.profile`` as a session of ours


class Call(NamedTuple):
    """One forward call of a labelled module: its label, thread and time, and whether it ended without an error."""

    label: str
    start_ns: int
    end_ns: int
    thread: int
    finished: bool


class SessionEvents:
    """The events of one session of torch's ``profiler``, to be read after its end. ``device``: the kind of device whose
    kernels it recorded ("cuda", "xpu", …), None for the CPU alone. ``loop_before``: the loop of the last session."""

    def __init__(self, profiler: Any) -> None:
        """``profiler``: a ``torch.autograd.profiler.profile``."""
        self._profiler = profiler
        self.device: str | None = profiler.use_device
        self.cpu_time: CpuTime | None = None
        self._inputs = InputSignatures(self.with_stack)
        self.signatures: list[Signature] = self._inputs.all
        self.called_from = self._inputs.called_from  # not a method around it: it is called for each event of backward
        self._trace: Path | None = None
        self.loop = self.loop_before = Loop()

    @property
    def has(self) -> dict[str, bool]:
        """Which options of the profiler have an effect: ``profile_memory``, ``record_shapes``, ``with_stack``. Without
        ``experimental_config=_ExperimentalConfig(verbose=True)`` events have no source lines in spite of the last."""
        has = {name: bool(getattr(self._profiler, name)) for name in ("profile_memory", "record_shapes", "with_stack")}
        has["with_stack"] = has["with_stack"] and any(raw.stack() for raw in self._read().all)
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
        return max(events.ends) - events.starts[0] if events.all else 0

    @property
    def torchs_steps(self) -> int:
        """The number of ranges that ``torch.profiler.profile`` recorded for its steps."""
        return sum(is_torchs_step(raw.name()) for raw in self._read().all if raw.device_type() == DeviceType.CPU)

    @property
    def start_ns(self) -> int | None:
        """When the session began, on the clock of the events; None if nothing was recorded."""
        results = self._profiler.kineto_results
        return None if results is None else int(results.trace_start_ns())

    @property
    def ended_ns(self) -> int | None:
        return None if self.start_ns is None else self.start_ns + self.wall_ns

    @paused_gc()
    def columns(self, detail: Callable[[str], Detail] | None = None, addresses: bool = False) -> EventColumns:
        """All events of the session. ``detail``: for the name of an op, what is read of its inputs; None for nothing.
        It needs a session with ``record_shapes``. The signature of an event is an index in ``signatures``.
        ``addresses``: memory events have addresses. ``loop`` is known after the call."""
        events = self._read()
        ranges_of, has_gradients = partial(_ranges_of, events), partial(_has_gradients, events)
        self.loop = loop_of(events.names, ranges_of, has_gradients, self.loop_before)
        session = SessionColumns(events, self._inputs, self.device is not None)
        return session.columns(detail, self._addresses() if addresses else {})

    def _addresses(self) -> dict[tuple[int, int, int], int]:
        """The address of each memory event, by its time, thread and bytes. Only torch's tree of events has it."""
        addresses: dict[tuple[int, int, int], int] = {}
        results, allocation = self._profiler.kineto_results, optional("torch._C._profiler._ExtraFields_Allocation")
        waiting = [] if results is None or allocation is None else [results.experimental_event_tree()]
        while waiting:
            for event in waiting.pop():
                if children := event.children:
                    waiting.append(children)
                    continue  # no allocation; `extra_fields` makes a copy, so it is read only if needed
                fields = event.extra_fields
                if type(fields) is allocation:
                    addresses[event.start_time_ns, event.start_tid, fields.alloc_size] = fields.ptr
        return addresses

    def calls(self) -> list[Call]:
        """The forward calls of labelled modules, in the order in which they ended."""
        calls: list[Call] = []
        open_calls: OpenRanges[Call] = OpenRanges()
        failed: set[int] = set()  # the ids of calls that an error ended
        for raw in self._read().all:
            name = raw.name()
            if not name.startswith(PREFIX) or raw.device_type() != DeviceType.CPU:
                continue
            start, thread = raw.start_ns(), raw.start_thread_id()
            around = open_calls.at(thread, start)
            if name in (RAISED, STOPPED) and around:
                failed.add(id(around[-1]))
            elif is_module_label(name):
                calls.append(Call(name, start, end_ns(raw), thread, True))
                around.append(calls[-1])
        calls.sort(key=lambda call: call.end_ns)
        return [call._replace(finished=False) if id(call) in failed else call for call in calls]

    def event_list(self) -> EventList:
        """torch's own list of the whole session, without our labels."""
        return _list_from(self._profiler, self._unlabelled())

    def event_lists(self, calls: list[Call]) -> list[EventList]:
        """For each call, torch's own list of the events in it: ops, their kernels and their memory."""
        return [_list_from(self._profiler, raws) for raws in _raws_in(calls, self._unlabelled())]

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
        return [raw for raw in self._read().all if not raw.name().startswith(PREFIX)]

    def _read(self) -> RawEvents:
        results = self._profiler.kineto_results
        raws = [] if results is None else results.events()
        return RawEvents.in_order([raw for raw in raws if _has_name(raw)] if self.with_stack else raws)


def ended_session(profiler: Any) -> SessionEvents:
    """The session of a user's profiler. Raises TorchprofError if it is not a profiler of torch's or has not ended."""
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
    return SessionEvents(inner)


def _has_name(raw: Any) -> bool:
    """Whether the name of an event can be read: torch may cut a long name of a Python function inside a character."""
    try:
        return bool(raw.name())
    except UnicodeDecodeError:
        return False


def _ranges_of(events: RawEvents, wanted: Set[str]) -> Iterator[NamedRange]:
    """The CPU's ranges with some of these names, in the order of start."""
    is_wanted = [name in wanted for name in events.names]
    for index in compress(range(len(events.starts)), map(is_wanted.__getitem__, events.names_of)):
        if events.all[index].device_type() == DeviceType.CPU:
            name = events.names[events.names_of[index]]
            yield NamedRange(name, events.starts[index], events.ends[index], events.threads[index])


def _has_gradients(events: RawEvents, call: NamedRange) -> bool:
    """Whether an event in a call has a sequence number. In a call with gradients, one of the first has."""
    for index in range(bisect_left(events.starts, call.start_ns), len(events.starts)):
        if events.starts[index] >= call.end_ns:
            return False
        if events.threads[index] == call.thread and events.sequences[index] >= 0:
            return True
    return False


# torch's own ``EventList``: of a whole session, and of some calls


def _list_from(profiler: Any, raws: list[Any]) -> EventList:
    """The list that ``torch.autograd.profiler.profile`` makes of some of its raw events."""
    if profiler.kineto_results is None:
        return event_list_of()
    needed("torch.autograd.profiler.profile._parse_kineto_results")
    # What its parser reads of a result
    results = SimpleNamespace(events=lambda: raws, trace_start_ns=profiler.kineto_results.trace_start_ns)
    parsed = profiler._parse_kineto_results(results)
    return event_list_of(parsed, use_device=profiler.use_device, profile_memory=profiler.profile_memory)


def event_list_of(parsed: Iterable[Any] = (), **options: Any) -> EventList:
    """torch's list of parsed events; without any, the list of a profiler that was switched off."""
    needed("torch.autograd.profiler_util.EventList._build_tree")
    events = EventList(parsed, **options)
    events._build_tree()
    return events


def _raws_in(calls: Iterable[Call], raws: Sequence[Any]) -> list[list[Any]]:
    """For each call, the raw events in it: ops, their kernels and their memory. ``raws``: in the order of start."""
    by_thread: defaultdict[int, list[Any]] = defaultdict(list)
    kernels: defaultdict[int, list[Any]] = defaultdict(list)  # by the correlation ID of the op
    for raw in raws:
        if launcher := raw.linked_correlation_id():
            kernels[launcher].append(raw)
        elif raw.device_type() == DeviceType.CPU or raw.name() == MEMORY:
            by_thread[raw.start_thread_id()].append(raw)
    starts = {thread: [raw.start_ns() for raw in on_thread] for thread, on_thread in by_thread.items()}
    events = []
    for call in calls:
        on_thread = starts.get(call.thread, [])
        first, last = bisect_left(on_thread, call.start_ns), bisect_left(on_thread, call.end_ns)
        inside = by_thread[call.thread][first:last]
        # The launcher of a kernel is never 0, the ID of events that launch nothing.
        events.append(inside + [kernel for raw in inside for kernel in kernels.get(raw.correlation_id(), ())])
    return events
