"""The ranges that are open where a session of torch's profiler ends and the next one begins.

torch writes the end of a range into the session in which the range began. If another session has begun meanwhile, that
memory is no longer there, and the process crashes, now or later (torch 2.13). So such ranges are closed before the end
and opened again in the next session.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, ClassVar

from torch.autograd.profiler import record_function

from torchprof.record.forwards import leave_to_eager

_METHODS = ("__enter__", "__exit__")


class _OfThread(threading.local):
    """The open ranges of a thread, outer to inner, and those that are closed for a while."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.closed: list[Any] = []


class OpenRanges:
    """From ``on`` to ``off``, the ranges of ``record_function`` are known while they are open; those that are
    ``Reopened``, always."""

    _of_thread: ClassVar[_OfThread] = _OfThread()

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}
        self._ours: dict[str, Any] = {}

    def on(self) -> None:
        enter, leave = (record_function.__dict__[name] for name in _METHODS)
        of_thread = OpenRanges._of_thread

        @functools.wraps(enter)
        def entered(opened: Any) -> Any:
            result = enter(opened)
            of_thread.open.append(opened)
            return result

        @functools.wraps(leave)
        def left(opened: Any, *error: Any) -> Any:
            _forget(opened)
            return leave(opened, *error)

        for name, original, ours in zip(_METHODS, (enter, leave), (entered, left)):
            leave_to_eager(ours)
            self._originals[name], self._ours[name] = original, ours
            setattr(record_function, name, ours)

    def off(self) -> None:
        """Restore ``record_function``. If other code still calls our functions, they pass calls through."""
        for name, ours in self._ours.items():
            if record_function.__dict__[name] is ours:
                setattr(record_function, name, self._originals[name])
        self._ours.clear()
        OpenRanges._of_thread.open.clear()

    def close(self) -> None:
        """Close the open ranges of this thread, the inner ones first."""
        of_thread = OpenRanges._of_thread
        of_thread.closed = [*of_thread.open]
        for opened in reversed(of_thread.closed):
            opened.__exit__(None, None, None)

    def reopen(self) -> None:
        """Open again what ``close`` has closed."""
        closed, OpenRanges._of_thread.closed = OpenRanges._of_thread.closed, []
        for opened in closed:
            opened.__enter__()


class Reopened:
    """A range of ours around code in which a session may end."""

    __slots__ = ("_range",)

    def __init__(self, opened: Any) -> None:
        self._range = opened

    def __enter__(self) -> None:
        self._range.__enter__()
        OpenRanges._of_thread.open.append(self)

    def __exit__(self, *error: Any) -> None:
        _forget(self)
        self._range.__exit__(None, None, None)


def _forget(opened: Any) -> None:
    ranges = OpenRanges._of_thread.open
    for index in reversed(range(len(ranges))):
        if ranges[index] is opened:
            del ranges[index]
            return
