"""The ranges that are open where a session of torch's profiler ends and the next one begins are split there.

torch writes the end of a range into the session in which the range began. If another session has begun meanwhile, that
memory is no longer there, and the process crashes, now or later (torch 2.13). So such ranges are closed before the end
and opened again in the next session.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

from torch.profiler import record_function

from torchprof.record.forwards import leave_to_eager
from torchprof.record.shared_changes import SharedChange


class _OfThread(threading.local):
    """Whether a thread is closing ranges or opening them again just now."""

    is_splitting = False


class _Open:
    """A range that is open. ``is_closed``: for a while, between ``close`` and ``reopen``."""

    __slots__ = ("is_closed", "range")

    def __init__(self, opened: Any) -> None:
        self.range = opened
        self.is_closed = False


class SplitRanges(SharedChange):
    """From ``on`` to ``off``, open ranges of ``record_function`` are known; those that are ``Reopened``, always."""

    _of_thread: ClassVar[_OfThread] = _OfThread()
    _open: ClassVar[dict[tuple[int, int], _Open]] = {}  # by the thread and the id of a range; outer to inner

    def _make(self) -> None:
        enter: Any = record_function.__enter__
        leave: Any = record_function.__exit__

        @leave_to_eager
        @functools.wraps(enter)  # TorchScript compiles the source of the original
        def entered(opened: Any) -> Any:
            result = enter(opened)
            _note(opened)
            return result

        @leave_to_eager
        @functools.wraps(leave)
        def left(opened: Any, *error: Any) -> Any:
            _forget(opened)
            return leave(opened, *error)

        self._undo.append(_forget_all)
        self._put(record_function, "__enter__", entered)
        self._put(record_function, "__exit__", left)

    def close(self) -> None:
        """Close the open ranges of this thread, the inner ones first."""
        with _splitting():
            for opened in reversed(_of_this_thread()):
                if not opened.is_closed:
                    opened.is_closed = True
                    opened.range.__exit__(None, None, None)

    def reopen(self) -> None:
        """Open again what ``close`` has closed, except what has been left since."""
        with _splitting():
            for opened in _of_this_thread():
                if opened.is_closed:
                    opened.is_closed = False
                    opened.range.__enter__()


@contextmanager
def _splitting() -> Iterator[None]:
    """A block in which ranges are entered and left, but not by the user."""
    SplitRanges._of_thread.is_splitting = True
    try:
        yield
    finally:
        SplitRanges._of_thread.is_splitting = False


def _of_this_thread() -> list[_Open]:
    thread = threading.get_ident()
    return [opened for (of_thread, _), opened in SplitRanges._open.copy().items() if of_thread == thread]


class Reopened:
    """A range of ours around code in which a session may end."""

    __slots__ = ("_range",)

    def __init__(self, opened: Any) -> None:
        self._range = opened

    def __enter__(self) -> None:
        self._range.__enter__()
        _note(self)

    def __exit__(self, *error: Any) -> None:
        _forget(self)
        self._range.__exit__(None, None, None)


def _note(opened: Any) -> None:
    if not SplitRanges._of_thread.is_splitting:
        key = threading.get_ident(), id(opened)
        SplitRanges._open.pop(key, None)  # it may be open already: a decorated function that calls itself
        SplitRanges._open[key] = _Open(opened)


def _forget(opened: Any) -> None:
    """A range that was left is not open. It may have been entered on another thread."""
    if SplitRanges._of_thread.is_splitting:
        return
    if SplitRanges._open.pop((threading.get_ident(), id(opened)), None) is None:
        for key in [key for key in SplitRanges._open.copy() if key[1] == id(opened)]:
            SplitRanges._open.pop(key, None)


def _forget_all() -> None:
    """Nothing will tell when the ranges of others end."""
    for key, opened in SplitRanges._open.copy().items():
        if not isinstance(opened.range, Reopened):
            SplitRanges._open.pop(key, None)
