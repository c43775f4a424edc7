"""The busy time of each device and of each of its streams, by kind of work: computing, communicating, copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torchprof.attribute.events import Event, Kind
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.places import Attributed
from torchprof.measure.waiting import Covered
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.timeline import DeviceTime, StreamTime

_BESIDE = (KernelWork.COMMUNICATION.value, KernelWork.COMPUTING.value, None)
"""For each kind of work: the kind whose overlap with it is counted."""


class _Times:
    """The busy time of a device or of one of its streams so far: of all work, and of each kind of work."""

    __slots__ = ("busy", "by_work", "kernels", "overlap_ns")

    def __init__(self, start: int) -> None:
        self.kernels = self.overlap_ns = 0
        self.busy = Covered(start)
        self.by_work = [Covered(start) for _ in KernelWork]

    def add(self, kind: KernelWork, start: int, end: int) -> None:
        """Add an interval. Intervals must come in the order of their start."""
        self.kernels += 1
        self.busy.add(start, end)
        new_from = end - self.by_work[kind.value].add(start, end)
        other = _BESIDE[kind.value]
        if other is not None:
            # All earlier intervals have begun. So after this start, the other kind covers one piece, up to its end. A
            # later interval of the other kind will add its own overlap with this interval.
            self.overlap_ns += max(0, min(end, self.by_work[other].until) - new_from)

    def kinds(self) -> tuple[int, int, int, int]:
        """The times: busy, computing, communicating, copying."""
        computing, communication, copying = (work.ns for work in self.by_work)
        return self.busy.ns, computing, communication, copying


class DeviceTimes:
    """Observes kernels: the busy time of each device and stream.

    Kernels of one device must come in the order of their start. So it is enough to keep the latest end of each kind of
    work on each stream.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._devices: dict[str, tuple[_Times, dict[int, _Times]]] = {}  # the whole device, and its streams

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        """Pass all events on, and add up the busy times of devices."""
        for item in stream:
            yield item
            if isinstance(item, Attributed) and item.event.kind is Kind.KERNEL:
                self._note(item.event)

    def _note(self, event: Event) -> None:
        start, device, stream = event.start_ns, event.device, event.thread
        if device not in self._devices:
            self._devices[device] = _Times(start), {}
        whole, streams = self._devices[device]
        if stream not in streams:
            streams[stream] = _Times(start)
        for times in (whole, streams[stream]):
            times.add(kind_of_work(event.name), start, event.end_ns)

    def result(self) -> dict[str, tuple[DeviceTime, ...]]:
        """The times of each device that ran any work."""
        times = (
            DeviceTime(
                device,
                self._rank,
                whole.busy.until - whole.busy.start_ns,
                *whole.kinds(),
                whole.overlap_ns,
                tuple(StreamTime(stream, times.kernels, *times.kinds()) for stream, times in sorted(streams.items())),
            )
            for device, (whole, streams) in sorted(self._devices.items())
        )
        return {"device_times": tuple(times)}
