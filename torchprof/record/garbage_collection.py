"""Ranges around the collections of Python's garbage collector, for the profiler of the thread that they interrupt."""

from __future__ import annotations

import gc
import sys
from typing import Any, ClassVar

from torchprof.attribute.event_names import GARBAGE_COLLECTION_LABEL
from torchprof.record.forwards import never_compiled
from torchprof.record.session import is_observed, record

_OLD = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation whose collection also visits old objects. In the incremental collector of Python 3.14, it
visits a part of them each time."""


class CollectionRanges:
    """From ``on`` to ``off``, each collection that visits old objects is a range on the thread that it interrupts.

    The time of such a collection depends on the number of objects in the process, and it interrupts any code: it
    belongs to no layer. Collections of young objects have no range: their time depends on the objects that were made
    just before, so it counts for the layer that made them.

    Several objects may be on at the same time. Python runs one collection at a time and calls back at its start and end
    on the same thread, so at most one range is open.
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


@never_compiled
def mark_collection(phase: str, info: dict[str, int]) -> None:
    """Open or close a range. Python calls this at the start and the end of each collection (``gc.callbacks``)."""
    if phase == "start":
        if info["generation"] >= _OLD and is_observed():
            opened = record(GARBAGE_COLLECTION_LABEL)
            opened.__enter__()
            CollectionRanges._open.append(opened)
    elif CollectionRanges._open:
        CollectionRanges._open.pop().__exit__(None, None, None)
