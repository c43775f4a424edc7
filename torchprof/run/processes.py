"""Calls a function for many files in several processes."""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from torchprof.errors import TorchprofError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_AHEAD = 2  # calls for each process that are under way or done, and whose results were not taken yet


def in_processes(call: Callable[[_Item], _Result], items: Iterable[_Item], processes: int) -> Iterator[_Result]:
    """``call`` of each item, in their order, made in so many processes a few items ahead; in this one if it is 1.

    Items, results and ``call`` must be picklable. The processes are spawned: they import the module of ``call`` and the
    ``__main__`` of this process. Where that cannot be imported, as if the script comes from stdin, this process makes
    all calls.

    Raises what ``call`` raises, and TorchprofError if a process was killed.
    """
    if processes == 1 or not _main_can_be_imported():
        yield from map(call, items)
        return
    from concurrent.futures import Future, ProcessPoolExecutor  # slow to import
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    remaining = iter(items)
    under_way: deque[Future[_Result]] = deque()
    with ProcessPoolExecutor(processes, get_context("spawn"), _exit_quietly_on_sigint) as pool:
        try:
            while True:
                with _sigint_blocked():  # each call may start a process
                    more = islice(remaining, _AHEAD * processes - len(under_way))
                    under_way.extend(pool.submit(call, item) for item in more)
                if not under_way:
                    return
                yield under_way.popleft().result()
        except BrokenProcessPool as error:
            raise TorchprofError(
                f"One of the {processes} processes that read files was killed, perhaps because memory ran out. Use "
                'fewer processes at once. A script that reads in several must do so below `if __name__ == "__main__":`.'
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


def _main_can_be_imported() -> bool:
    """Whether a new process can import the ``__main__`` of this one, or does not need to, as in notebooks."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    return getattr(main, "__spec__", None) is not None or file is None or Path(file).is_file()


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
