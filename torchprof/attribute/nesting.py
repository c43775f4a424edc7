"""Which ranges are open on a thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar


class HasEnd(Protocol):
    """A range: all that is needed of it here is when it ends."""

    @property
    def end_ns(self) -> float: ...


Range = TypeVar("Range", bound=HasEnd)


class OpenRanges(Generic[Range]):
    """The ranges that are open on each thread, while events pass by in the order of their start.

    Whoever opens a range appends it to the list that ``at`` returns. On a thread, an inner range ends no later than the
    one around it: cut a range off at the end of the outer one (``Attributed.ns`` is cut already).

    ``Attribution`` nests all events of a recording and has this loop inline. This class is for those who nest
    something else: the ranges of a trace before its layers are known, the operators that count, or stretches of
    backward, which are not events.
    """

    def __init__(self, close: Callable[[list[Range]], Any] = list.pop) -> None:
        """``close`` takes the last range, which has ended, from the list of its thread.

        It must not be a method of an object that holds this one: the cycle would keep both until a full collection.
        """
        self._close = close
        self.by_thread: dict[int, list[Range]] = {}  # outer to inner

    def at(self, thread: int, time: int) -> list[Range]:
        """The ranges of a thread that are open at a time, outer to inner, after closing those that have ended."""
        ranges = self.by_thread.get(thread)
        if ranges is None:
            ranges = self.by_thread[thread] = []
        while ranges and ranges[-1].end_ns <= time:
            self._close(ranges)
        return ranges

    def close_all(self, thread: int | None = None) -> None:
        """Close all open ranges of a thread, or of all threads, the inner ones of a thread first."""
        for ranges in self.by_thread.values() if thread is None else (self.by_thread.get(thread, []),):
            while ranges:
                self._close(ranges)
