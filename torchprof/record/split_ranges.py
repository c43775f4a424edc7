"""The ranges that are open where a session of torch's profiler ends and the next one begins are split there.

torch writes the end of a range into the session in which the range began. If another session has begun meanwhile, that
memory is no longer there, and the process crashes, now or later (torch 2.13). So such ranges are closed before the end
and opened again in the next session.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, ClassVar

from torch.profiler import record_function

from torchprof.record.forwards import leave_to_eager


class _OfThread(threading.local):
    """The open ranges of a thread, outer to inner, and those that are closed for a while."""

    def __init__(self) -> None:
        self.open: list[Any] = []
        self.closed: list[Any] = []


class SplitRanges:
    """From ``on`` to ``off``, the ranges of ``record_function`` are known while they are open; those that are
    ``Reopened``, always. Several objects may be on at the same time."""

    _of_thread: ClassVar[_OfThread] = _OfThread()
    _users: ClassVar[int] = 0
    _replaced: ClassVar[list[tuple[str, Any, Any]]] = []  # a method, what was there, and what is there now

    def __init__(self) -> None:
        self._is_on = False

    def on(self) -> None:
        if not self._is_on:
            self._is_on = True
            SplitRanges._users += 1
            if SplitRanges._users == 1:
                self._replace("__enter__", _entering)
                self._replace("__exit__", _leaving)

    def off(self) -> None:
        if self._is_on:
            self._is_on = False
            SplitRanges._users -= 1
            of_thread = SplitRanges._of_thread
            of_thread.open = [opened for opened in of_thread.open if isinstance(opened, Reopened)]
            while not SplitRanges._users and SplitRanges._replaced:
                name, before, ours = SplitRanges._replaced.pop()
                if record_function.__dict__[name] is ours:  # other code may have replaced it meanwhile
                    setattr(record_function, name, before)

    @staticmethod
    def _replace(name: str, wrapper_of: Callable[[Any], Any]) -> None:
        original = record_function.__dict__[name]
        ours = functools.wraps(original)(wrapper_of(original))  # TorchScript compiles the source of the original
        leave_to_eager(ours)
        setattr(record_function, name, ours)
        SplitRanges._replaced.append((name, original, ours))

    def close(self) -> None:
        """Close the open ranges of this thread, the inner ones first."""
        of_thread = SplitRanges._of_thread
        of_thread.closed = [*of_thread.open]
        for opened in reversed(of_thread.closed):
            opened.__exit__(None, None, None)

    def reopen(self) -> None:
        """Open again what ``close`` has closed."""
        closed, SplitRanges._of_thread.closed = SplitRanges._of_thread.closed, []
        for opened in closed:
            opened.__enter__()


class Reopened:
    """A range of ours around code in which a session may end."""

    __slots__ = ("_range",)

    def __init__(self, opened: Any) -> None:
        self._range = opened

    def __enter__(self) -> None:
        self._range.__enter__()
        SplitRanges._of_thread.open.append(self)

    def __exit__(self, *error: Any) -> None:
        _forget(self)
        self._range.__exit__(None, None, None)


def _entering(enter: Any) -> Any:
    def entered(opened: Any) -> Any:
        result = enter(opened)
        SplitRanges._of_thread.open.append(opened)
        return result

    return entered


def _leaving(leave: Any) -> Any:
    def left(opened: Any, *error: Any) -> Any:
        _forget(opened)
        return leave(opened, *error)

    return left


def _forget(opened: Any) -> None:
    ranges = SplitRanges._of_thread.open
    for index in reversed(range(len(ranges))):
        if ranges[index] is opened:
            del ranges[index]
            return
