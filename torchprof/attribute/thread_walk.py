"""Walk over the events of several threads, in the order of time, and find groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from torchprof.attribute.event_columns import EventColumns


@dataclass(slots=True, eq=False)
class ThreadWalk:
    """How far the walk has come on one thread. ``at``: the next event; ``after``: the end of its events.
    ``groupable``: see ``EventColumns.groupable``."""

    thread: int
    at: int
    after: int
    columns: EventColumns
    groupable: bytes
    _single: int = -1  # the next event that is in no group

    def end_of_group(self, limit: int, horizon: float) -> int:
        """The index after the group that begins with the next event; that of the event itself if it is in no group.

        A group ends before any event that is in no group, and before an operator that contains one; at ``limit``, where
        the range around it ends; and before an operator that ends after ``horizon``, when another thread continues.
        """
        index, columns = self.at, self.columns
        if self._single < index:
            end = self.groupable.find(0, index, self.after)
            self._single = end if end >= 0 else self.after
        single, sizes, starts, ends = self._single, columns.size, columns.start, columns.end
        if limit > self.after:
            limit = self.after
        until = index
        while until < single and until < limit and ends[until] <= horizon and starts[until] < horizon:
            beyond = until + sizes[until]
            if beyond > limit:
                beyond = limit
            if beyond > single:
                break
            until = beyond
        return until


def next_walk(walks: Sequence[ThreadWalk], starts: Sequence[int]) -> tuple[ThreadWalk, float]:
    """The thread with the next event, and a time: all of its events before that come before those of other threads."""
    if len(walks) == 1:
        return walks[0], inf
    first, second = sorted(walks, key=lambda walk: starts[walk.at])[:2]
    horizon = starts[second.at]
    return first, horizon + 1 if starts[first.at] == horizon else horizon
