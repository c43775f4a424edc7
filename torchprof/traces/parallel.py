"""Reads several traces at once, each in a process of its own."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from torchprof.errors import TorchprofError

_Result = TypeVar("_Result")


def read_in_processes(
    files: Sequence[Path], read: Callable[[Path], _Result], processes: int, progress: Callable[[int], None]
) -> list[_Result]:
    """``read`` of each file, called in several processes; results and ``read`` must be picklable.

    ``progress`` is called with the number of bytes that were read so far.
    """
    from concurrent.futures import ProcessPoolExecutor, as_completed  # slow to import
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    bytes_read = 0
    with ProcessPoolExecutor(processes, get_context("spawn"), _exit_quietly_on_sigint) as pool:
        with _sigint_blocked():
            readings = {pool.submit(read, file): file for file in files}
        try:
            for reading in as_completed(readings):
                reading.result()
                bytes_read += readings[reading].stat().st_size
                progress(bytes_read)
        except BrokenProcessPool as error:
            raise TorchprofError(
                f"One of the {processes} processes that read traces was killed, perhaps because memory ran out. "
                "Use fewer processes at once."
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)
    return [reading.result() for reading in readings]


@contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread. Processes that it starts inherit this, and print no traceback while they start."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_quietly_on_sigint() -> None:
    """Let Ctrl-C end this process without a traceback.

    The terminal sends it to all processes, and the main process already reports it.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
