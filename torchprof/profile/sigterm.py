"""Delay signals for a while.

An error from a signal handler, such as KeyboardInterrupt, must not come between two steps that belong together. And
SIGTERM, which torchrun sends to all ranks as soon as one has failed, must not stop a gather.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_ALL = tuple(map(int, signal.valid_signals()))


class DelayedSignals:
    """Inside the block, Python's signal handlers are not called in the main thread: Ctrl-C above all, and alarms.

    At the end, the handlers of the signals that came are called, and their errors are raised from there. A second
    Ctrl-C is not delayed. Signals that end the process, or that C code handles, are not delayed.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}
        self._delayed: list[int] = []  # the signals whose handler is ours now
        self._came: list[int] = []

    def __enter__(self) -> DelayedSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _ALL:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        self._delayed.append(number)
                        signal.signal(number, self._note)
            except BaseException:  # from the handler of a signal that is not delayed yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._deliver()

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and number in self._came:
            self._handlers[number](number, frame)
        elif number not in self._came:
            self._came.append(number)

    def _restore(self) -> None:
        while self._delayed:
            try:
                if signal.getsignal(self._delayed[-1]) == self._note:
                    signal.signal(self._delayed[-1], self._handlers[self._delayed[-1]])
                self._delayed.pop()
            except BaseException:  # from the handler of a signal that is no longer delayed
                self._restore()
                raise

    def _deliver(self) -> None:
        while self._came:
            number = self._came.pop(0)
            try:
                self._handlers[number](number, sys._getframe())
            except BaseException:
                self._deliver()
                raise


def uninterrupted(work: Callable[[], object]) -> None:
    """Call ``work`` without interruption by signal handlers; their errors are raised afterwards."""
    has_begun = False
    try:
        with DelayedSignals():
            has_begun = True
            work()
    finally:
        if not has_begun:  # a handler raised before signals were delayed
            with DelayedSignals():
                work()


class DelayedSigterm:
    """Inside the block, SIGTERM is delayed, in the main thread, if its handler was set by Python.

    ``came``: whether it came. If so, it is delivered at the end to the handler from before the block; or ``later_s``
    seconds after the end, so that the gathered run can still be written. If it is ``expected``, it is delayed by
    ``later_s`` even if it comes after the end.
    """

    def __init__(self, later_s: float = 0.0) -> None:
        self.came = False
        self.expected = False
        self.later_s = later_s
        self._before: Any = None

    def __enter__(self) -> DelayedSigterm:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)  # None if C code has set it: Python could not restore it
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            return
        if self.expected and self.later_s and not self.came:
            signal.signal(signal.SIGTERM, self._put_off)
            return
        signal.signal(signal.SIGTERM, self._before)
        if self.came and self.later_s:
            self._send_later()
        elif self.came:
            signal.raise_signal(signal.SIGTERM)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def _put_off(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._before)
        self._send_later()

    def _send_later(self) -> None:
        later = threading.Timer(self.later_s, os.kill, (os.getpid(), signal.SIGTERM))
        later.daemon = True  # a process that ends earlier does not need the signal
        later.start()
