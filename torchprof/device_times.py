"""How long each device and each of its streams was busy, and with what: computing, communicating, copying.

Knows no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import Enum
from operator import itemgetter

from torchprof.attribute import Attributed, Event, Kind
from torchprof.run import DeviceTime, StreamTime

_COMMUNICATION = re.compile(
    r"(void )?("
    r"nccl|rccl|oneccl|ccl|hccl|msccl|nvshmem|deep_ep::"  # libraries; on ROCm, names begin with nccl, too
    r"|dpsk::((\(anonymous namespace\)|\w+)::)*\w*(dispatch|combine)"  # DeepEP's kernels in DeepSeek's own namespace
    # All-reduce and its like over memory that devices share: torch's own (symmetric memory), and vLLM's.
    r"|(\(anonymous namespace\)::|\w+::)*(((multimem|one_shot|two_shot)_)+(all_)?(reduce|gather)|cross_device_reduce)"
    r").*",
    re.IGNORECASE | re.DOTALL,
)
_COPY = re.compile(
    r"(Mem(cpy|set)\b"  # CUDA, and ROCm and XPU in recent versions of torch
    r"|Copy(Host|Device)To(Host|Device)|FillBuffer|MEMORY_COPY_|__amd_rocclr_(copy|fill)"  # ROCm
    r"|zeCommandListAppendMemory(Copy|Fill)"  # XPU
    r"|dma"  # MTIA, as Holistic Trace Analysis has it (hta/utils/utils.py)
    r").*",
    re.DOTALL,
)


class Work(Enum):
    """What the work of a device is for."""

    COMPUTING = 0
    COMMUNICATION = 1
    COPYING = 2


_BESIDE = (Work.COMMUNICATION.value, Work.COMPUTING.value, None)
"""For each kind of work the one with which its overlap counts."""


def kind_of_work(name: str) -> Work:
    """What a kernel, copy or set of that name is for.

    Communication is what moves data between ranks: kernels of NCCL and its like, sends and receives among them, and
    those that reduce or gather over memory that devices share. Copies and sets go by the names that CUDA, ROCm, XPU and
    MTIA give them. All else is computing: also a kernel that does both, and one that copies by computing, as
    ``aten::cat``.
    """
    if _COMMUNICATION.fullmatch(name):
        return Work.COMMUNICATION
    return Work.COPYING if _COPY.fullmatch(name) else Work.COMPUTING


class _Times:
    """What a device, or one of its streams, did up to now: how long unions of intervals are, and how far they reach.

    ``by_work`` and ``until_by_work`` are numbered as ``Work`` is.
    """

    __slots__ = ("busy_ns", "by_work", "kernels", "overlap_ns", "start_ns", "until", "until_by_work")

    def __init__(self, start: int) -> None:
        self.kernels = self.busy_ns = self.overlap_ns = 0
        self.start_ns = self.until = start
        self.by_work = [0] * len(Work)
        self.until_by_work = [start] * len(Work)

    def add(self, work: int, start: int, end: int) -> None:
        """Take in what began no earlier than all before it."""
        self.kernels += 1
        if start >= self.until:  # nothing else runs, as nearly always
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
            # All before it has begun by now: from here on, what the other kind covers so far is one piece, to its end.
            # What it covers later than that, it compares with us.
            self.overlap_ns += max(0, min(end, self.until_by_work[other]) - new_from)

    def kinds(self) -> tuple[int, int, int, int]:
        """For how long it was busy, computed, communicated and copied."""
        computing, communication, copying = self.by_work
        return self.busy_ns, computing, communication, copying


class DeviceTimes:
    """One walk over the events of one session, between the attribution and the fold.

    The work of one device comes in the order of its start. So of all that was, only the ends have to be kept: one for
    each kind of work, on each stream.
    """

    def __init__(self, rank: int = 0) -> None:
        self._rank = rank
        self._devices: dict[str, _Times] = {}
        self._streams: dict[tuple[str, int], tuple[_Times, _Times]] = {}  # the times of the device, and of the stream
        self._works: dict[str, int] = {}  # by name

    def watch(self, attributed: Iterable[Attributed]) -> Iterator[Attributed]:
        """Pass everything on, and note how long devices were busy."""
        kernel = Kind.KERNEL
        for item in attributed:
            yield item
            event = item[0]
            if event[0] is kernel:
                self._note(event)

    def _note(self, event: Event) -> None:
        name, start, end, device = event.name, event.start_ns, event.end_ns, event.device
        work = self._works.get(name)
        if work is None:
            work = self._works[name] = kind_of_work(name).value
        times = self._streams.get((device, event.thread))
        if times is None:
            whole = self._devices.setdefault(device, _Times(start))
            times = self._streams[device, event.thread] = whole, _Times(start)
        for one in times:
            one.add(work, start, end)

    def result(self) -> tuple[DeviceTime, ...]:
        """The times of each device on which anything ran."""
        return tuple(
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
