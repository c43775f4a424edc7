"""The launches of device work: the places of kernels, and which were launched before a recording began."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate, islice

from torchprof.attribute.events import Attributed, Event, Place, Places
from torchprof.attribute.op_groups import OpGroup
from torchprof.run.collectives import RECORDS_COLLECTIVE
from torchprof.run.words import BEFORE, LAUNCH_NOT_RECORDED, LAUNCHED_BEFORE, REPLAY, FrameKind

_ENOUGH = 1000  # kernels to look at: if no correlation ID of these is that of a call, none will be


def first_correlation_id(calls: Iterable[int], launched: Iterable[int]) -> int:
    """The lowest correlation ID of a runtime call in a recording; 0 if it is unknown.

    A kernel without a recorded launch and with a lower ID was launched before the recording began.

    ``calls``: the IDs of all recorded calls of the CUDA runtime. The runtime counts them up over the life of a process
    (CUPTI Activity API, "correlation ID"), and a kernel has the ID of the call that launched it. ``launched``: the IDs
    of the kernels with a recorded launch. If none of them is the ID of a call, kernels are numbered in another way, and
    the result is 0.

    The order on a stream does not show which kernels were launched before: some launches inside a recording are not
    recorded either, for example those of the CUDA driver before torch 2.1.
    """
    first, is_known = 0, False
    numbers = set(islice(launched, _ENOUGH))
    for number in calls:
        if number > 0:
            first = min(first or number, number)
            is_known = is_known or number in numbers
    return first if is_known else 0


def threads_of_overhead(times: Sequence[int], operators: Iterable[tuple[int, int]]) -> list[int]:
    """For each of some times, in their order: the thread on which the last operator before it started, 0 if there is
    none.

    The profiler records its overhead without a thread, or with that of the caller of autograd for what is in a backward
    pass. It is in an operator that launches work: no other operator starts meanwhile on the thread. ``operators``:
    start and thread of each.
    """
    last_before = [(-1, 0)] * len(times)
    until = times[-1] if times else -1
    for start, thread in operators:
        if start <= until:
            index = bisect_left(times, start)
            last_before[index] = max(last_before[index], (start, thread))
    return [thread for _, thread in accumulate(last_before, max)]


class Launches:
    """The places of device work: it belongs to the op that launched it. ``outside``: the place of no layer."""

    def __init__(self, places: Places, outside: Place) -> None:
        self._places = places
        self._outside = outside
        self._launched_by: dict[int, Place] = {}  # by the correlation of an op
        self._replayed: dict[Place, Place] = {}  # the launching place → the place of the CUDA graph's kernels
        self._collectives: dict[int, tuple[int, Place]] = {}  # by thread: end of the last collective's op, its place

    def note_op(self, correlation: int, thread: int, place: Place, around: Place | None, end_ns: int) -> None:
        """An op may launch work. A call of the device's runtime has a negative correlation, and its work belongs to the
        range ``around``, which ends at ``end_ns``."""
        launcher = place if correlation > 0 or around is None else self._last_collective(thread, around, end_ns)
        self._launched_by[correlation] = launcher

    def note_group(self, group: OpGroup, correlations: Sequence[int], end_ns: int) -> None:
        """The ops of a group may launch work. ``end_ns``: of the range around them."""
        if not any(correlations):
            return
        places, tree = group.places(), group.tree
        around_all = None if group.outer is None else group.place
        for correlation, path, parent in zip(correlations, tree.path_of, tree.parents):
            if correlation > 0:
                self._launched_by[correlation] = places[path]
            elif correlation and parent >= 0:
                self._launched_by[correlation] = places[tree.path_of[parent]]
            elif correlation:
                self.note_op(correlation, group.thread, places[path], around_all, end_ns)

    def note_replay(self, outer: Place, place: Place) -> None:
        """A call in ``outer`` replays a graph of kernels."""
        self._replayed[outer] = self._replayed[place] = self._places.inside(outer, FrameKind.KERNELS, REPLAY)

    def note_collective(self, event: Event, place: Place, around: Place | None, outer: Attributed | None) -> None:
        """A collective begins. ``around``, ``outer``: the range around it."""
        if event.correlation:
            self._launched_by[event.correlation] = place
        if around is None or outer is None or not _records_collective(around):
            return
        # The op launches the kernel, and the range that begins in the op names the collective. If two ranges begin in
        # one op, it is unknown which of the two a kernel belongs to.
        until, other = self._collectives.get(event.thread, (0, place))
        last = place if until != outer.end_ns or other is place else around
        self._collectives[event.thread] = outer.end_ns, last
        if outer.event.correlation > 0:
            self._launched_by[outer.event.correlation] = last

    def kernel(self, event: Event) -> Attributed:
        """The work, with its place."""
        launcher = self._launched_by.get(event.correlation)
        if launcher is None:
            reason = LAUNCHED_BEFORE if event.correlation == BEFORE else LAUNCH_NOT_RECORDED
            launcher = self._places.inside(self._outside, FrameKind.LABEL, reason)
        launcher = self._replayed.get(launcher, launcher)
        inner = self._places.inside(launcher, FrameKind.KERNEL, event.name, event.signature)
        return Attributed(event, inner, None, 1, event.end_ns - event.start_ns)

    def _last_collective(self, thread: int, around: Place, end_ns: int) -> Place:
        """In an op that records collectives, the last collective launches the work of all calls."""
        until, collective = self._collectives.get(thread, (0, around))
        return collective if until == end_ns and _records_collective(around) else around


def _records_collective(place: Place) -> bool:
    return place.frame is not None and place.frame.name == RECORDS_COLLECTIVE
