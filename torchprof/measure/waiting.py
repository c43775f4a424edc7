"""Communication between ranks: which work that is, when a thread of the CPU waits for it, and where a rank hangs."""

from __future__ import annotations

from array import array
from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import itemgetter

from torchprof.attribute.events import Attributed, Place
from torchprof.run.collectives import (
    C10D_OPS,
    POINT_TO_POINT,
    RECORDS_COLLECTIVE,
    Entered,
    Unfinished,
    name_of_collective,
    shows_collective,
)
from torchprof.run.torch_names import KernelWork, kind_of_work
from torchprof.run.words import FORWARD, FSDP_RANGE, OUTSIDE, Frame, FrameKind, is_collective

_COMMUNICATION = (C10D_OPS, "_c10d_functional::", "_c10d_functional_autograd::", RECORDS_COLLECTIVE, FSDP_RANGE)
"""Prefixes of the ops and ranges that exchange data between ranks, wait for it, or prepare it."""
PROMPTLY_NS = 1_000_000
"""A thread that continues within this time after the end of an exchange has waited for the exchange."""
_RECORDED_LATE_NS = 100_000
"""The recorded end of a collective may be this much later than the waiting thread continues; after a long wait a tenth
of that, up to ``PROMPTLY_NS``: gloo's thread ends its range last, once it gets a processor."""


def is_communication(frames: Sequence[Frame]) -> bool:
    """Whether work in these frames is communication, and not the rank's own work: the range or kernel of a collective,
    and everything inside torch's ops and ranges around one."""
    return any(
        _has_communication_name(frame.kind, frame.name) or (frame.kind == FrameKind.KERNEL and shows_collective(frame))
        for frame in frames
    )


@cache
def _has_communication_name(kind: FrameKind, name: str) -> bool:
    if kind == FrameKind.KERNEL:
        return kind_of_work(name) is KernelWork.COMMUNICATION
    return name.startswith(_COMMUNICATION) or is_collective(name)


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


# What a rank did since its last step ended

_Interval = tuple[int, int, "Place | None", bool]
"""An interval in which a thread began nothing new: its length and start; the place of the thread (None: in no range);
whether the last action of the thread was to request an exchange."""


class ThreadState:
    """A thread. ``until``: its time is counted up to here. ``innermost``: its innermost range that has not ended then.
    ``has_requested``: whether its last action was to request a collective. ``first`` and ``began``: the starts of its
    first and of its last range."""

    __slots__ = ("began", "first", "has_requested", "innermost", "until")

    def __init__(self, until: int) -> None:
        self.innermost: Attributed | None = None
        self.first = self.began = self.until = until
        self.has_requested = False


class LastStep:
    """If the recording ends in a hang, this shows where.

    ``longest`` is the longest time in which the thread with the steps began nothing new.
    """

    def __init__(self) -> None:
        self.longest: _Interval = (0, 0, None, False)
        self.longest_elsewhere: _Interval = (0, 0, None, False)  # the same on all other threads
        self._entered: Counter[tuple[int, str, str]] = Counter()
        self._request: Place | None = None  # the last one
        self.exchanges: list[tuple[int, int, Place]] = []

    def note_request(self, place: Place) -> None:
        """An op or range of communication begins. torch's ops request a collective."""
        if place.name.startswith(C10D_OPS):
            self._request = place
            name = name_of_collective(place.name)
            if not name.startswith(POINT_TO_POINT):
                self._entered[place.layer, place.phase, name] += 1

    def unfinished(
        self, rank: int, threads: Mapping[int, ThreadState], main: int, since: int | None, ended: int | None
    ) -> tuple[Unfinished, ...]:
        if main not in threads:
            return ()
        since = min(thread.first for thread in threads.values()) if since is None else since
        ends = [*map(open_until, threads.values()), *(end for _, end, _ in self.exchanges)]
        ended = max([since, *ends, *([] if ended is None else [ended])])
        longest, elsewhere = self.longest, self.longest_elsewhere
        for number, thread in threads.items():
            for interval in _intervals_at_end(thread, since, ended):
                if number == main:
                    longest = max(longest, interval, key=itemgetter(0))
                elif interval[2] is not None:
                    elsewhere = max(elsewhere, interval, key=itemgetter(0))
        if longest[2] is None and 2 * elsewhere[0] > longest[0]:
            longest = elsewhere  # autograd's thread, for example: the main thread waits for it
        ns, start, place, has_requested = longest
        waits = self._waits_for(ns, start, place, has_requested)
        owner = waits or place
        entered = tuple(Entered(*key, times) for key, times in self._entered.items())
        layer, phase, name = (OUTSIDE, FORWARD, "") if owner is None else (owner.layer, owner.phase, owner.name)
        name = name if waits is None else name_of_collective(name)
        return (Unfinished(rank, ended - since, ns, layer, phase, name, waits is not None, entered),)

    def _waits_for(self, ns: int, start: int, place: Place | None, has_requested: bool) -> Place | None:
        """The exchange that the rank waits for: one that it called, or one that runs for most of this time. None if it
        does not wait. Sends and receives that run do not count: they start ahead of time."""
        if place is not None and is_communication(place.frames):
            return place
        if has_requested and self._request is not None:
            return self._request
        if place is not None and place.kind == FrameKind.OP and "::" in place.name:
            return None
        overlaps = [
            (min(end, start + ns) - max(begun, start), number)
            for number, (begun, end, of) in enumerate(self.exchanges)
            if not name_of_collective(of.name).startswith(POINT_TO_POINT)
        ]
        most, number = max(overlaps, default=(0, 0))
        return self.exchanges[number][2] if 2 * most > ns else None


def open_until(thread: ThreadState) -> int:
    """The latest end of the open ranges of a thread; 0 if there is none."""
    end, item = 0, thread.innermost
    while item is not None:
        end, item = max(end, item.end_ns), item.outer
    return end


def _intervals_at_end(thread: ThreadState, since: int, ended: int) -> Iterator[_Interval]:
    """The intervals of a thread after its last range began: one for each range that was open then, inner to outer."""
    time = max(thread.began, since)
    has_requested = thread.has_requested
    item = thread.innermost
    while item is not None:
        if item.end_ns > time:
            yield item.end_ns - time, time, item.place, has_requested
            time = item.end_ns
        has_requested = is_communication(item.place.frames)
        item = item.outer
    if ended > time:
        yield ended - time, time, None, has_requested
