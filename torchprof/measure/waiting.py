"""Communication between ranks: which work that is, and when a thread of the CPU waits for it."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from functools import cache

from torchprof.run.collectives import C10D_OPS, RECORDS_COLLECTIVE, shows_collective
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.words import FSDP_RANGE, Frame, FrameKind, is_collective

_COMMUNICATION = (C10D_OPS, "_c10d_functional::", "_c10d_functional_autograd::", RECORDS_COLLECTIVE, FSDP_RANGE)
"""Prefixes of the ops and ranges that exchange data between ranks, wait for it, or prepare it."""
PROMPTLY_NS = 1_000_000
"""A thread that continues within this time after the end of an exchange has waited for the exchange."""
_RECORDED_LATE_NS = 100_000
"""The recorded end of a collective may be this much later than the time when the waiting thread continues. After a long
wait it may be a tenth of that, up to ``PROMPTLY_NS``: gloo's thread ends its range last, once it gets a processor."""


def is_communication(frames: Sequence[Frame]) -> bool:
    """Whether work in these frames (outer to inner) is communication, and not the rank's own work.

    Communication is the range or kernel of a collective, and everything inside torch's ops and ranges around one.
    """
    return any(map(_communicates, frames))


@cache
def _has_communication_name(kind: FrameKind, name: str) -> bool:
    if kind == FrameKind.KERNEL:
        return kind_of_work(name) is KernelWork.COMMUNICATION
    return name.startswith(_COMMUNICATION) or is_collective(name)


def _communicates(frame: Frame) -> bool:
    return _has_communication_name(frame.kind, frame.name) or (
        frame.kind == FrameKind.KERNEL and shows_collective(frame)
    )


class Intervals:
    """A union of intervals. They must be added in the order of their start."""

    def __init__(self) -> None:
        self._starts = array("q")
        self._ends = array("q")

    def add(self, start: int, end: int) -> None:
        if self._ends and start <= self._ends[-1]:
            self._ends[-1] = max(self._ends[-1], end)
        else:
            self._starts.append(start)
            self._ends.append(end)

    def within(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """The pieces of the union inside an interval, in reverse order."""
        index = bisect_right(self._starts, end) - 1
        while index >= 0 and self._ends[index] > start:
            yield max(start, self._starts[index]), min(end, self._ends[index])
            index -= 1


class Covered:
    """The length of a union of intervals, which must be added in the order of their start. ``until``: its end."""

    __slots__ = ("ns", "start_ns", "until")

    def __init__(self, start: int) -> None:
        self.ns = 0
        self.start_ns = self.until = start

    def add(self, start: int, end: int) -> int:
        """Add an interval. The length that this adds."""
        new = max(0, end - max(start, self.until))
        self.ns += new
        self.until = max(self.until, end)
        return new


def covered_ns(pieces: Iterable[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    covered = until = 0
    for start, end in sorted(pieces):
        covered += max(0, end - max(start, until))
        until = max(until, end)
    return covered


class Waiting:
    """Finds the times in which CPU threads waited for exchanges between ranks that run on the CPU.

    torch records no event for a wait. An exchange can start long before its result is needed, and a thread that works
    meanwhile does not wait. A gap is an interval in which a thread runs no operator and calls nothing. The end of a gap
    shows whether the thread waited in it:

    - An exchange ended, and the thread continues within ``PROMPTLY_NS``: it waited until the end of the exchange.
    - The thread continues later, but it most likely waited for a collective that ended in the gap. This is so if its
      last action before the gap was to request a collective. It is also so if the gap is in the loop around the model,
      or in a call of autograd's engine: DistributedDataParallel waits there, at the end of backward. The thread waited
      until the end of the collective; the rest of the gap is Python. This rule does not hold for sends and receives:
      they usually start ahead of time.

    In all other gaps, Python was running.
    """

    def __init__(self) -> None:
        self._by_end: list[tuple[int, int, bool]] = []

    def add(self, start: int, end: int, is_collective: bool) -> None:
        insort(self._by_end, (end, start, is_collective))

    def within(self, start: int, end: int, for_any: bool) -> list[tuple[int, int]]:
        """The parts of a gap in which its thread waited. ``for_any``: any collective that ended in the gap counts."""
        late = max(_RECORDED_LATE_NS, min((end - start) // 10, PROMPTLY_NS))
        index = bisect_right(self._by_end, (end + late, end, True))
        ended = []
        while index and self._by_end[index - 1][0] > start:
            index -= 1
            # The recorded end of a receive is when a thread waits for it. That may be soon after a gap without waits.
            until, begun, is_collective = self._by_end[index]
            if begun < end and (is_collective or until <= end):
                ended.append(self._by_end[index])
        if not ended or ended[0][0] < end - PROMPTLY_NS:
            ended = [call for call in ended if for_any and call[2]]
        return [(max(start, begun), min(until, end)) for until, begun, _ in ended]
