"""Processes and threads that a test starts, which end when the test ends."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def run_fresh(code: str) -> str:
    """What this code prints in a new Python process, without the spaces around it."""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def in_thread(work: Callable[..., object], *args: Any) -> None:
    """Does the work on a thread of its own, and waits for its end."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()


@contextmanager
def killed_after(seconds: float, process: subprocess.Popen[Any]) -> Iterator[None]:
    """Kill a process that still runs after so many seconds, or when the block is left: reading from it ends then."""
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        process.kill()  # does nothing where it has ended
