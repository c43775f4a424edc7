"""Communication between ranks: which work that is, when a thread of the CPU waits for it, and where a rank hangs."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import NamedTuple

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


class Waiting:
    """Finds the times in which CPU threads waited for exchanges between ranks that run on the CPU.

    torch records no event for a wait. An exchange can start long before its result is needed, and a thread may work
    meanwhile. In a gap, a thread runs no operator and calls nothing. The end of a gap shows whether it waited:

    - An exchange ended, and the thread continues within ``PROMPTLY_NS``: it waited until the end of the exchange.
    - The thread continues later, but it most likely waited for a collective that ended in the gap. This is so if its
      last action before the gap was to request a collective. It is also so if the gap is in the loop around the model,
      or in a call of autograd's engine: DistributedDataParallel waits there, at the end of backward. The thread waited
      until the end of the collective; the rest is Python. Not so for sends and receives: most start ahead of time.

    In all other gaps, Python was running.
    """

    def __init__(self) -> None:
        self._exchanges: list[_Exchange] = []  # sorted

    def add(self, start: int, end: int, is_collective: bool) -> None:
        insort(self._exchanges, _Exchange(end, start, is_collective))

    def within(self, start: int, end: int, for_any: bool, after_nodes: bool) -> list[tuple[int, int]]:
        """The parts of a gap in which its thread waited. ``for_any``: any collective that ended in the gap counts.
        ``after_nodes``: it is in a call of the engine, or follows the last node of a backward pass of
        DistributedDataParallel, which waits there: an exchange whose end was recorded later counts as well.

        Example, in ms: an all_reduce runs from 2 to 8. In a gap from 1 to 8.5, the thread waited from 2 to 8. In one
        from 1 to 12, it waited then only if ``for_any``.
        """
        late = end - start if after_nodes else max(_RECORDED_LATE_NS, min((end - start) // 10, PROMPTLY_NS))
        index = bisect_right(self._exchanges, (end + late, end, True))
        ended = []
        while index and self._exchanges[index - 1].end_ns > start:
            index -= 1
            exchange = self._exchanges[index]
            # The recorded end of a receive is when a thread waits for it. That may be soon after a gap without waits.
            if exchange.start_ns < end and (exchange.is_collective or exchange.end_ns <= end):
                ended.append(exchange)
        if not ended or ended[0].end_ns < end - PROMPTLY_NS:
            ended = [exchange for exchange in ended if for_any and exchange.is_collective]
        return [(max(start, exchange.start_ns), min(exchange.end_ns, end)) for exchange in ended]


class _Exchange(NamedTuple):
    """An exchange that ran on the CPU. They are sorted by their end."""

    end_ns: int
    start_ns: int
    is_collective: bool


# What a rank did since its last step ended


class ThreadState:
    """A thread. ``until``: its time is counted up to here. ``innermost``: its innermost range that has not ended then.
    ``has_requested``, ``has_run_backward``: whether its last action was to request a collective, or a backward pass.
    ``first_start``, ``last_start``: of ranges.
    """

    __slots__ = ("first_start", "has_requested", "has_run_backward", "innermost", "last_start", "until")

    def __init__(self, until: int) -> None:
        self.innermost: Attributed | None = None
        self.first_start = self.last_start = self.until = until
        self.has_requested = self.has_run_backward = False


class Stall(NamedTuple):
    """An interval in which a thread began nothing new. ``place``: that of its innermost range; None if it is in none.
    ``has_requested``: whether the last action of the thread was to request an exchange."""

    ns: int
    start_ns: int
    place: Place | None
    has_requested: bool


class LastStep:
    """What a rank did since its last step ended. If the recording ends in a hang, this shows where.

    ``longest``: the longest stall of the thread with the steps; ``longest_elsewhere``: of all other threads.
    ``exchanges``: start, end and place of those that ran on the CPU.
    """

    def __init__(self) -> None:
        self.longest = self.longest_elsewhere = Stall(0, 0, None, False)
        self.exchanges: list[tuple[int, int, Place]] = []
        self._entered: Counter[tuple[int, str, str]] = Counter()  # calls of collectives by layer, phase and name
        self._last_request: Place | None = None

    def note_request(self, place: Place) -> None:
        """An op or range of communication begins. torch's ops request a collective."""
        if place.name.startswith(C10D_OPS):
            self._last_request = place
            name = name_of_collective(place.name)
            if not name.startswith(POINT_TO_POINT):
                self._entered[place.layer, place.phase, name] += 1

    def unfinished(
        self, rank: int, threads: Mapping[int, ThreadState], main: int, since: int | None, ended: int | None
    ) -> tuple[Unfinished, ...]:
        """The state of the rank when the recording ``ended``: its longest stall, and what it waits for. Empty if its
        thread with the steps, ``main``, was not recorded. ``since``: when the last step ended, None without steps."""
        if main not in threads:
            return ()
        since = min(thread.first_start for thread in threads.values()) if since is None else since
        ends = [*map(open_until, threads.values()), *(end for _, end, _ in self.exchanges)]
        ended = max([since, *ends, *([] if ended is None else [ended])])
        longest, elsewhere = self.longest, self.longest_elsewhere
        for number, thread in threads.items():
            for stall in _stalls_at_end(thread, since, ended):
                if number == main:
                    longest = max(longest, stall, key=attrgetter("ns"))
                elif stall.place is not None:
                    elsewhere = max(elsewhere, stall, key=attrgetter("ns"))
        if longest.place is None and 2 * elsewhere.ns > longest.ns:
            longest = elsewhere  # autograd's thread, for example: the main thread waits for it
        exchange = self._exchange_awaited_in(longest)
        owner = exchange or longest.place
        entered = tuple(Entered(*key, times) for key, times in self._entered.items())
        layer, phase, name = (OUTSIDE, FORWARD, "") if owner is None else (owner.layer, owner.phase, owner.name)
        name = name if exchange is None else name_of_collective(name)
        return (Unfinished(rank, ended - since, longest.ns, layer, phase, name, exchange is not None, entered),)

    def _exchange_awaited_in(self, stall: Stall) -> Place | None:
        """The exchange that the rank waits for: one that it called, or one that runs for most of this time. None if it
        does not wait. Sends and receives that run do not count: they start ahead of time."""
        place = stall.place
        if place is not None and is_communication(place.frames):
            return place
        if stall.has_requested and self._last_request is not None:
            return self._last_request
        if place is not None and place.kind == FrameKind.OP and "::" in place.name:
            return None
        overlaps = [
            (min(end, stall.start_ns + stall.ns) - max(start, stall.start_ns), number)
            for number, (start, end, exchange) in enumerate(self.exchanges)
            if not name_of_collective(exchange.name).startswith(POINT_TO_POINT)
        ]
        most, number = max(overlaps, default=(0, 0))
        return self.exchanges[number][2] if 2 * most > stall.ns else None


def open_until(thread: ThreadState) -> int:
    """The latest end of the open ranges of a thread; 0 if there is none."""
    end, item = 0, thread.innermost
    while item is not None:
        end, item = max(end, item.end_ns), item.outer
    return end


def _stalls_at_end(thread: ThreadState, since: int, ended: int) -> Iterator[Stall]:
    """The stalls of a thread after its last range began: one for each range that was open then, inner to outer."""
    time = max(thread.last_start, since)
    has_requested = thread.has_requested
    item = thread.innermost
    while item is not None:
        if item.end_ns > time:
            yield Stall(item.end_ns - time, time, item.place, has_requested)
            time = item.end_ns
        has_requested = is_communication(item.place.frames)
        item = item.outer
    if ended > time:
        yield Stall(ended - time, time, None, has_requested)
