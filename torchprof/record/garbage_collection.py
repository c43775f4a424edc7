"""Collections of Python's garbage collector, as ranges in whatever profiler records the thread that they interrupt."""

from __future__ import annotations

import gc
import sys
from typing import Any, ClassVar

from torchprof.attribute.event_names import GARBAGE_COLLECTION_LABEL
from torchprof.record.session import is_observed, record

_OLD = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation whose collection also looks at old objects: the incremental collector of Python 3.14 does so
a part at a time."""


class CollectionRanges:
    """While it is on, each collection that looks at old objects is a range on the thread that it interrupts.

    Such a collection takes as long as there are objects in the process, and interrupts whatever runs when it is due: it
    belongs to no layer. Collections of young objects alone are left out: what they cost is in proportion to what was
    made right before, so it counts where that was made.

    It may be on several times, one inside another or overlapping. Python runs one collection at a time, without
    another inside, and calls back at its start and its end on the same thread; so there is one open range at most.
    """

    _users: ClassVar[int] = 0
    _open: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._is_on = False

    def on(self) -> None:
        if not self._is_on:
            self._is_on = True
            CollectionRanges._users += 1
            if CollectionRanges._users == 1:
                gc.callbacks.append(mark_collection)

    def off(self) -> None:
        if self._is_on:
            self._is_on = False
            CollectionRanges._users -= 1
            if not CollectionRanges._users:
                if mark_collection in gc.callbacks:  # other code may have emptied the list
                    gc.callbacks.remove(mark_collection)
                while CollectionRanges._open:  # a finalizer ended the recording inside a collection
                    CollectionRanges._open.pop().__exit__(None, None, None)


def mark_collection(phase: str, info: dict[str, int]) -> None:
    """What Python calls at the start and at the end of each collection (``gc.callbacks``)."""
    if phase == "start":
        if info["generation"] >= _OLD and is_observed():
            opened = record(GARBAGE_COLLECTION_LABEL)
            opened.__enter__()
            CollectionRanges._open.append(opened)
    elif CollectionRanges._open:
        CollectionRanges._open.pop().__exit__(None, None, None)
