"""Pause Python's garbage collector while many long-lived objects are made."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector in this block, and enable it again afterwards if it was enabled.

    Reading a run makes a million objects, drawing a report thousands, and both make no cyclic garbage. The collections
    would take longer than the work.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
