"""Busy time: how long at least one of several intervals lasts; and from that, how long devices and streams are busy."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import Any

from torchprof.attribute.events import Attributed, Event, Kind, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.run.timeline import DeviceTime, StreamTime
from torchprof.run.torch_names import KernelWork, kind_of_work
from torchprof.run.words import REPLAY

# Unions of intervals


class Covered:
    """The length of a union of intervals, which must be added in the order of their start. ``until``: its end."""

    __slots__ = ("ns", "start_ns", "until")

    def __init__(self, start: int) -> None:
        self.ns = 0
        self.start_ns = self.until = start

    def add(self, start: int, end: int) -> int:
        """Add an interval. Returns how much longer the union is now."""
        new = max(0, end - max(start, self.until))
        self.ns += new
        self.until = max(self.until, end)
        return new


def covered_ns(pieces: Iterable[tuple[int, int]]) -> int:
    """The length of the union of (start, end) intervals, in any order."""
    covered = until = 0
    for start, end in sorted(pieces):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


# Devices and their streams

_OVERLAPS_A_LITTLE = 10_000
"""In ns: a kernel may begin before the one before has ended (programmatic dependent launch): measured, up to 1.5 us."""


class DeviceTimes:
    """Observes kernels: the busy time of each device and stream, and how many kernels overlap on a stream, other than
    those of a replayed graph, which may. Kernels of one device must come in the order of their start."""

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._devices: dict[str, _BusyTimes] = {}
        self._streams: dict[tuple[str, int], _BusyTimes] = {}  # by device and number of the stream
        self._overlapping = 0
        self._work_of_name: dict[str, int] = {}  # by name of a kernel: the number of its ``KernelWork``

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        for item in stream:
            yield item
            if isinstance(item, Attributed) and item.event.kind is Kind.KERNEL:
                self._on_kernel(item.event, item.place)

    def _on_kernel(self, event: Event, place: Place) -> None:
        name, start, end, device = event.name, event.start_ns, event.end_ns, event.device
        if (work := self._work_of_name.get(name)) is None:
            work = self._work_of_name[name] = kind_of_work(name).value
        if (of_stream := self._streams.get((device, event.thread))) is None:
            of_stream = self._streams[device, event.thread] = _BusyTimes(start)
            self._devices.setdefault(device, _BusyTimes(start))
        if start + _OVERLAPS_A_LITTLE < of_stream.until and (place.outer is None or place.outer.name != REPLAY):
            self._overlapping += 1
        self._devices[device].add(work, start, end)
        of_stream.add(work, start, end)

    def result(self) -> dict[str, Any]:
        """The times of each device that ran any work; how many kernels overlap on a stream, and how many there are."""
        streams: defaultdict[str, list[StreamTime]] = defaultdict(list)
        for (device, number), times in sorted(self._streams.items(), key=itemgetter(0)):
            streams[device].append(StreamTime(number, times.kernels, *times.by_kind()))
        device_times = []
        for device, times in sorted(self._devices.items(), key=itemgetter(0)):
            lasted, of_streams = times.until - times.start_ns, tuple(streams[device])
            device_times.append(DeviceTime(device, self._rank, lasted, *times.by_kind(), times.overlap_ns, of_streams))
        kernels = sum(times.kernels for times in self._devices.values())
        return {"device_times": tuple(device_times), "overlapping": (self._overlapping, kernels)}


_OVERLAPS_WITH = (KernelWork.COMMUNICATION.value, KernelWork.COMPUTING.value, None)
"""By number of a ``KernelWork``: the other kind of work whose overlap with it is counted."""


class _BusyTimes:
    """The busy time of a device or of one of its streams so far: the length of a union of intervals, and its end
    ``until``. ``by_work`` and ``until_by_work``: the same for each kind of work, in the order of ``KernelWork``.

    Example: a kernel computes from 0 to 6, and one communicates from 4 to 9. The device is busy for 9, with 6 of
    computing, 5 of communication and an overlap of 2.
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
        if (other := _OVERLAPS_WITH[work]) is not None:
            # After this start, the other kind covers one piece, up to its end: all earlier intervals have begun. A
            # later one of the other kind will add its own overlap with this one.
            self.overlap_ns += max(0, min(end, self.until_by_work[other]) - new_from)

    def by_kind(self) -> tuple[int, int, int, int]:
        """The times: busy, computing, communicating, copying."""
        computing, communication, copying = self.by_work
        return self.busy_ns, computing, communication, copying
