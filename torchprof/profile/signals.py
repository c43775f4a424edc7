"""Delay all signals, or SIGTERM alone, while something must not be interrupted; and let SIGTERM raise an error.

An error from a signal handler, such as KeyboardInterrupt, must not come between two steps that belong together. And
SIGTERM, which torchrun sends to all ranks as soon as one has failed, must not stop a gather.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

_SIGNALS = tuple(map(int, signal.valid_signals()))


class DelayedSignals:
    """Inside the block, Python's signal handlers are not called in the main thread: Ctrl-C above all, and alarms. At
    the end, the handlers of the signals that came are called, and their errors are raised from there. A second Ctrl-C
    is not delayed, nor are signals that end the process or that C code handles."""

    def __init__(self) -> None:
        self._handlers: dict[int, Any] = {}  # by the signals that are delayed
        self._came: list[int] = []

    def __enter__(self) -> DelayedSignals:
        if threading.current_thread() is threading.main_thread():
            try:
                for number in _SIGNALS:
                    handler = signal.getsignal(number)
                    if callable(handler):
                        self._handlers[number] = handler
                        signal.signal(number, self._receive)
            except BaseException:  # from the handler of a signal that is not delayed yet
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._restore()
        finally:
            self._deliver()

    def _receive(self, number: int, frame: FrameType | None) -> None:
        """The handler while signals are delayed."""
        if number == signal.SIGINT and number in self._came:
            self._handlers[number](number, frame)
        elif number not in self._came:
            self._came.append(number)

    def _restore(self) -> None:
        try:
            for number, handler in reversed(self._handlers.items()):
                if signal.getsignal(number) == self._receive:
                    signal.signal(number, handler)
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
    """Inside the block, SIGTERM is delayed, in the main thread, if its handler was set by Python. ``came``: whether it
    came. If so, the handler from before the block gets it at the end, or ``later_s`` later, so that the gathered run
    can still be written. If it is ``expected``, that holds even if it comes after the end."""

    def __init__(self, later_s: float = 0.0) -> None:
        self.came = False
        self.expected = False
        self.later_s = later_s
        self._handler_before: Any = None

    def __enter__(self) -> DelayedSigterm:
        if threading.current_thread() is threading.main_thread():
            # None if C code has set it, which Python could not restore.
            self._handler_before = signal.getsignal(signal.SIGTERM)
            if self._handler_before is not None:
                signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler_before is None:
            return
        if self.expected and self.later_s and not self.came:
            signal.signal(signal.SIGTERM, self._receive_late)
            return
        signal.signal(signal.SIGTERM, self._handler_before)
        if self.came and self.later_s:
            self._send_later()
        elif self.came:
            signal.raise_signal(signal.SIGTERM)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.came = True

    def _receive_late(self, number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, self._handler_before)
        self._send_later()

    def _send_later(self) -> None:
        later = threading.Timer(self.later_s, os.kill, (os.getpid(), signal.SIGTERM))
        later.daemon = True  # a process that ends earlier does not need the signal
        later.start()


class Terminated(BaseException):
    """SIGTERM was received. A BaseException, so that ``except Exception`` does not catch it."""


class SigtermAsError:
    """Inside the block, SIGTERM raises Terminated in this process, unless the program handles or ignores the signal.
    ``came``: whether it was raised, even if the program has caught it. Forked processes die by the signal, as in plain
    Python. After ``ignore_first``, the first SIGTERM and the first Ctrl-C are ignored."""

    came = False

    def __enter__(self) -> None:
        self._handler: Any = signal.SIG_DFL  # the handler to restore
        self._interrupt_handler: Any = None  # that of Ctrl-C, while the first one is ignored
        self._raises = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._start()

    def __exit__(self, *_: object) -> None:
        self._restore_interrupt()
        self.stop()

    def ignore_first(self) -> None:
        """From now on, ignore the first SIGTERM and the first Ctrl-C, even if the program handles them."""
        self._raises = False
        if (interrupt := signal.getsignal(signal.SIGINT)) not in (None, signal.SIG_IGN):
            self._interrupt_handler = interrupt
            signal.signal(signal.SIGINT, self._ignore_interrupt)
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and handler != self._terminate:  # the program's own
            self.stop()
            self._handler = handler
            self._start()

    def _ignore_interrupt(self, *_: object) -> None:
        self._restore_interrupt()
        about = "the script has ended, and what was recorded is being read. Ctrl-C again stops that."
        with suppress(Exception):  # a stream that is closed, or whose reader the Ctrl-C ended, too
            print(f"\ntorchprof: {about}", file=sys.stderr, flush=True)

    def _restore_interrupt(self) -> None:
        if self._interrupt_handler is not None and signal.getsignal(signal.SIGINT) == self._ignore_interrupt:
            signal.signal(signal.SIGINT, self._interrupt_handler)

    def stop(self) -> None:
        """Restore the handler."""
        if self in _active:
            _active.remove(self)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, self._handler)

    def _start(self) -> None:
        self._pid = os.getpid()
        signal.signal(signal.SIGTERM, self._terminate)
        _active.append(self)

    def _terminate(self, *_: object) -> None:
        if os.getpid() != self._pid:  # forked a moment ago: where an error is raised now, Python may drop it
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
            return
        self._handler = signal.SIG_DFL
        self.stop()
        if self._raises:
            self.came = True
            raise Terminated


_active: list[SigtermAsError] = []  # those whose handler is set


def _stop_all() -> None:
    for sigterm in list(_active):
        sigterm.stop()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_stop_all)
