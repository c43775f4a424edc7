"""torch's own ``EventList``: of a whole session, and of some calls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.autograd.profiler_util import EventList

from torchprof.attribute.event_names import MEMORY
from torchprof.record.torch_internals import needed


class TimeRange(Protocol):
    """A range of time on one thread."""

    @property
    def start_ns(self) -> int: ...

    @property
    def end_ns(self) -> int: ...

    @property
    def thread(self) -> int: ...


class _Results(NamedTuple):
    """The part of torch's profiler result that its parser reads, for some of the events."""

    raws: list[Any]
    start_ns: int

    def events(self) -> list[Any]:
        return self.raws

    def trace_start_ns(self) -> int:
        return self.start_ns


def event_list_of(profiler: Any, raws: list[Any]) -> EventList:
    """The list that ``torch.autograd.profiler.profile`` makes of some of its raw events."""
    results = profiler.kineto_results
    if results is None:
        return empty_event_list()
    needed("torch.autograd.profiler.profile._parse_kineto_results")
    parsed = profiler._parse_kineto_results(_Results(raws, results.trace_start_ns()))
    events = EventList(parsed, use_device=profiler.use_device, profile_memory=profiler.profile_memory)
    events._build_tree()
    return events


def empty_event_list() -> EventList:
    """The list of a profiler that was switched off."""
    needed("torch.autograd.profiler_util.EventList._build_tree")
    events = EventList([])
    events._build_tree()
    return events


def raws_in(ranges: Iterable[TimeRange], raws: Sequence[Any]) -> list[list[Any]]:
    """For each range, the raw events in it: ops, their kernels and their memory. ``raws``: in the order of start."""
    by_thread: dict[int, list[Any]] = {}
    kernels: dict[int, list[Any]] = {}  # by the correlation ID of the op
    for raw in raws:
        launcher = raw.linked_correlation_id()
        if launcher:
            kernels.setdefault(launcher, []).append(raw)
        elif raw.device_type() == DeviceType.CPU or raw.name() == MEMORY:
            by_thread.setdefault(raw.start_thread_id(), []).append(raw)
    starts = {thread: [raw.start_ns() for raw in on_thread] for thread, on_thread in by_thread.items()}
    events = []
    for event in ranges:
        on_thread = starts.get(event.thread, [])
        first, last = bisect_left(on_thread, event.start_ns), bisect_left(on_thread, event.end_ns)
        inside = by_thread.get(event.thread, [])[first:last]
        launched = [
            kernel for raw in inside if raw.correlation_id() for kernel in kernels.get(raw.correlation_id(), ())
        ]
        events.append(inside + launched)
    return events
