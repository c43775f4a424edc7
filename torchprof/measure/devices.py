"""The busy time of each device and of each of its streams, by kind of work: computing, communicating, copying."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import itemgetter

from torchprof.attribute.events import Event, Kind
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.places import Attributed
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.timeline import DeviceTime, StreamTime

_BESIDE = (KernelWork.COMMUNICATION.value, KernelWork.COMPUTING.value, None)
"""For each kind of work: the kind whose overlap with it is counted."""


class _Times:
    """The busy time of a device or of one of its streams so far: lengths of unions of intervals, in ns.

    ``busy_ns`` is the busy time of all work, and ``until`` is the end of that work. ``by_work`` and ``until_by_work``
    are the same for each kind of work, in the order of ``KernelWork``.
    """

    __slots__ = ("busy_ns", "by_work", "kernels", "overlap_ns", "start_ns", "until", "until_by_work")

    def __init__(self, start: int) -> None:
        self.kernels = self.busy_ns = self.overlap_ns = 0
        self.start_ns = self.until = start
        self.by_work = [0] * len(KernelWork)
        self.until_by_work = [start] * len(KernelWork)

    def add(self, work: int, start: int, end: int) -> None:
        """Add an interval. Intervals must come in the order of their start."""
        self.kernels += 1
        if start >= self.until:  # nothing else runs, as in nearly all cases
            self.busy_ns += end - start
            self.by_work[work] += end - start
            self.until = self.until_by_work[work] = end
            return
        self.busy_ns += max(0, end - self.until)
        self.until = max(end, self.until)
        until = self.until_by_work[work]
        new_from = min(max(start, until), end)
        self.by_work[work] += end - new_from
        self.until_by_work[work] = max(end, until)
        other = _BESIDE[work]
        if other is not None:
            # All earlier intervals have begun. So after this start, the other kind covers one piece, up to its end. A
            # later interval of the other kind will add its own overlap with this interval.
            self.overlap_ns += max(0, min(end, self.until_by_work[other]) - new_from)

    def kinds(self) -> tuple[int, int, int, int]:
        """The times: busy, computing, communicating, copying."""
        computing, communication, copying = self.by_work
        return self.busy_ns, computing, communication, copying


class DeviceTimes:
    """Observes kernels: the busy time of each device and stream.

    Kernels of one device must come in the order of their start. So it is enough to keep the latest end of each kind of
    work on each stream.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._devices: dict[str, _Times] = {}
        self._streams: dict[tuple[str, int], tuple[_Times, _Times]] = {}  # (of the device, of the stream)
        self._works: dict[str, int] = {}  # by name

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        """Pass all events on, and add up the busy times of devices."""
        for item in stream:
            yield item
            if isinstance(item, Attributed) and item.event.kind is Kind.KERNEL:
                self._note(item.event)

    def _note(self, event: Event) -> None:
        name, start, end, device = event.name, event.start_ns, event.end_ns, event.device
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = kind_of_work(name).value
        times = self._streams.get((device, event.thread))
        if times is None:
            whole = self._devices.setdefault(device, _Times(start))
            times = self._streams[device, event.thread] = whole, _Times(start)
        for stream in times:
            stream.add(work, start, end)

    def result(self) -> dict[str, tuple[DeviceTime, ...]]:
        """The times of each device that ran any work."""
        times = (
            DeviceTime(
                device,
                self._rank,
                whole.until - whole.start_ns,
                *whole.kinds(),
                whole.overlap_ns,
                tuple(
                    StreamTime(stream, times.kernels, *times.kinds())
                    for (of_device, stream), (_, times) in sorted(self._streams.items(), key=itemgetter(0))
                    if of_device == device
                ),
            )
            for device, whole in sorted(self._devices.items(), key=itemgetter(0))
        )
        return {"device_times": tuple(times)}
