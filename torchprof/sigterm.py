"""SIGTERM put off for a while: torchrun sends it to all ranks of a job as soon as one has failed."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any


class HeldSigterm:
    """While entered, SIGTERM waits, if Python is who handles it and this is the main thread.

    ``came`` says whether it came. Then it is delivered at the end, to whatever handled it before; or ``later_s``
    seconds after the end, so that what was brought home in the meantime can still be written. Where it is ``expected``,
    it is delivered so much later even if it comes only after the end.
    """

    def __init__(self, later_s: float = 0.0) -> None:
        self.came = False
        self.expected = False
        self.later_s = later_s
        self._before: Any = None

    def __enter__(self) -> HeldSigterm:
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGTERM)  # None: not set by Python, which could not put it back
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
        later.daemon = True  # a process that ends before needs no signal
        later.start()
