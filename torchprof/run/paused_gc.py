"""Pause Python's garbage collector while many objects are made that all stay alive."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector in this block, and enable it again afterwards if it was enabled.

    Reading a run makes a million objects and no cyclic garbage; the collections that this would cause take as long as
    the reading itself.
    """
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
