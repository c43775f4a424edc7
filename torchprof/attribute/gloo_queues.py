"""The process groups of gloo's collectives: what torch's flight recorder noted, matched with the events of a session.

No event of gloo names a group. But each group has a queue and threads of its own, which take from no other queue.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from torchprof.attribute.events import Event, Kind
from torchprof.run.lockstep import GroupOfRanks

if TYPE_CHECKING:
    from torchprof.attribute.event_columns import EventColumns

_CLOCK_ERROR_NS = 50_000
"""The flight recorder and the profiler read the clock in different ways: their times differ by at most this."""
_IDLE_NS = 1_000_000
"""If no collective runs for this time, none is in a queue: a thread that waits for one takes it sooner."""


class Queued(NamedTuple):
    """A collective that the rank put into the queue of a group. ``time_ns``: when, on the clock of the events.
    ``name``: that of its range ("gloo:all_reduce")."""

    time_ns: int
    name: str
    group: GroupOfRanks


class Queues:
    """The collectives that a rank put into queues during a session, as far as the flight recorder still has them: it
    keeps the last ones."""

    def __init__(self, queued: Sequence[Queued] = ()) -> None:
        self._queued = sorted(queued)
        self._times = [each.time_ns for each in self._queued]

    def group_between(self, start_ns: int, end_ns: int) -> GroupOfRanks | None:
        """The group of the collective that an op put into a queue in this time; None if it is unknown."""
        first, after = bisect_left(self._times, start_ns), bisect_right(self._times, end_ns)
        groups = {each.group for each in self._queued[first:after]}
        return groups.pop() if len(groups) == 1 else None

    def of_threads(self, columns: EventColumns) -> dict[int, GroupOfRanks]:
        """The group that each thread of gloo works for, as far as it is certain.

        When a thread begins a collective, one of this name is in the queue of its group. If this is so in one queue
        alone, the thread is known, and takes what it begins from this queue. If a thread begins what is in no queue,
        something is missing, and all threads are unknown.
        """
        queued = self._queued
        names = {each.name for each in queued}  # gloo's sends and receives go through no queue
        begun = [event for event in columns.events_of(Kind.COLLECTIVE) if event.name in names] if names else []
        if not begun:
            return {}
        if begun[0].start_ns < queued[0].time_ns - _CLOCK_ERROR_NS:
            queued, begun = _after_idle(queued, begun)
        known: dict[int, GroupOfRanks] = {}
        count = -1
        while count < len(known):  # a thread that is known now was not before, so another may be certain
            count = len(known)
            if not _find_threads(queued, begun, known):
                return {}
        return known


class KnownGroups(NamedTuple):
    """What is known of the groups of a rank's collectives that name none.

    ``sole``: the group of all of them; None if there are several, or if it is unknown. ``are_one``: whether all are
    between the same ranks. ``of_thread``: the groups of the threads of gloo. ``queues``: tell the groups of requests.
    """

    sole: GroupOfRanks | None = None
    are_one: bool = True
    of_thread: Mapping[int, GroupOfRanks] = MappingProxyType({})
    queues: Queues = Queues()


ONE_GROUP = KnownGroups()
"""All ranks are in one group, or there is one rank."""


def _after_idle(queued: Sequence[Queued], begun: Sequence[Event]) -> tuple[list[Queued], list[Event]]:
    """Those after the first time in which all queues were empty. Before, there may be collectives in them that the
    flight recorder no longer has."""
    idle_from = queued[0].time_ns
    for number, each in enumerate(begun):
        if each.start_ns - idle_from >= _IDLE_NS:
            return [one for one in queued if one.time_ns > idle_from], [*begun[number:]]
        idle_from = max(idle_from, each.end_ns)
    return [], []


def _find_threads(queued: Sequence[Queued], begun: Sequence[Event], known: dict[int, GroupOfRanks]) -> bool:
    """Add to ``known`` the threads that are certain. Returns whether each collective was in a queue when it began."""
    # By name and group: how many are in the queue, at most. Those that a thread of an unknown group took are not
    # subtracted, until all queues together are empty.
    waiting: defaultdict[str, Counter[GroupOfRanks]] = defaultdict(Counter)
    in_all: Counter[str] = Counter()
    upcoming = iter(queued)
    following = next(upcoming, None)
    for each in begun:
        while following is not None and following.time_ns <= each.start_ns + _CLOCK_ERROR_NS:
            waiting[following.name][following.group] += 1
            in_all[following.name] += 1
            following = next(upcoming, None)
        of_name = waiting[each.name]
        of_thread = known.get(each.thread)
        fitting = [group for group, count in of_name.items() if count and of_thread in (None, group)]
        in_all[each.name] -= 1
        if not fitting or in_all[each.name] < 0:
            return False
        if len(fitting) == 1:
            known[each.thread] = fitting[0]
            of_name[fitting[0]] -= 1
        if not in_all[each.name]:
            of_name.clear()
    return True
