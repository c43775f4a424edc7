"""Ranges around what the process does for all layers, for the profiler of the thread on which it happens: calls of
autograd's engine, and collections of Python's garbage collector."""

from __future__ import annotations

import functools
import gc
import importlib
import sys
from typing import Any, ClassVar

from torchprof.attribute.event_names import ENGINE_LABEL, GARBAGE_COLLECTION_LABEL
from torchprof.record.forwards import never_compiled
from torchprof.record.session import is_observed, record
from torchprof.record.shared_changes import SharedChange
from torchprof.record.torch_internals import optional

_ENTER_THE_ENGINE = ("torch.autograd", "torch.autograd.graph")
"""The modules through whose ``_engine_run_backward`` ``backward()`` and ``grad()`` enter the engine."""
_OLD = 1 if sys.version_info >= (3, 14) else 2
"""The youngest generation whose collection also visits old objects. In the incremental collector of Python 3.14, it
visits a part of them each time."""


class EngineRanges(SharedChange):
    """From ``on`` to ``off``, each call of autograd's engine is a range."""

    def _make(self) -> None:
        for name in _ENTER_THE_ENGINE:
            run_backward = optional(f"{name}._engine_run_backward")
            if run_backward is not None:
                self._put(importlib.import_module(name), "_engine_run_backward", _in_a_range(run_backward))


def _in_a_range(run_backward: Any) -> Any:
    @never_compiled
    @functools.wraps(run_backward)
    def in_a_range(*args: Any, **kwargs: Any) -> Any:
        if not is_observed():
            return run_backward(*args, **kwargs)
        with record(ENGINE_LABEL):
            return run_backward(*args, **kwargs)

    return in_a_range


class CollectionRanges(SharedChange):
    """From ``on`` to ``off``, each collection that visits old objects is a range on the thread that it interrupts.

    The time of such a collection depends on the number of objects in the process, and it interrupts any code: it
    belongs to no layer. Collections of young objects have no range: their time depends on the objects that were made
    just before, so it counts for the layer that made them.

    Python runs one collection at a time, and calls back on its thread at start and end: at most one range is open.
    """

    _open: ClassVar[list[Any]] = []

    def _make(self) -> None:
        gc.callbacks.append(mark_collection)
        self._undo.append(self._stop_marking)

    @classmethod
    def _stop_marking(cls) -> None:
        if mark_collection in gc.callbacks:  # other code may have emptied the list
            gc.callbacks.remove(mark_collection)
        while cls._open:  # a finalizer ended the recording inside a collection
            cls._open.pop().__exit__(None, None, None)


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
