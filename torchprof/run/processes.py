"""Reading many files: ``in_processes`` calls a function in several processes, ``paused_gc`` pauses the collector."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torchprof.errors import TorchprofError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_PROCESSES = 60 if sys.platform == "win32" else sys.maxsize  # Windows waits for at most 63 at once
_AHEAD = 2  # calls for each process that are under way or done, and whose results were not taken yet


def usable_cpus() -> int:
    """How many CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux; a container may have few of the CPUs of its machine
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_processes(processes: int) -> None:
    """Raises TorchprofError if this is not a number of processes."""
    if not isinstance(processes, int) or processes < 1:
        raise TorchprofError(f"processes= must be a number of processes, 1 or more, not {processes!r}.")


def in_processes(call: Callable[[_Item], _Result], items: Sequence[_Item], processes: int) -> Iterator[_Result]:
    """``call`` of each item, in their order, made in so many processes a few items ahead; in this one if it is 1.

    Items, results and ``call`` must be picklable. The processes are spawned: they import the module of ``call`` and the
    ``__main__`` of this process. If that cannot be imported (a script from stdin), this process makes all calls.

    Raises what ``call`` raises, and TorchprofError if ``processes`` is not a number of processes, if one was killed,
    and for a result or an error that cannot be pickled.
    """
    check_processes(processes)
    count = min(processes, len(items), _MOST_PROCESSES)
    if count <= 1 or not _main_can_be_imported():
        return map(call, items)
    return _results(call, items, count)


def _results(call: Callable[[_Item], _Result], items: Sequence[_Item], count: int) -> Iterator[_Result]:
    """The results from ``count`` processes, each with a pipe of its own: in that of a ``ProcessPoolExecutor``, which
    they share, a process that is killed while it writes a result blocks the others."""
    from multiprocessing import get_context  # slow to import

    context = get_context("spawn")
    processes, idle = [], []
    try:
        for _ in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(call, theirs), daemon=True)
            with _sigint_blocked():
                process.start()
            theirs.close()  # so that this end is closed when the process ends
            processes.append(process)
            idle.append(ours)
        for result, error in _outcomes(items, idle):
            if error is not None:
                raise error
            yield result
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()


def _outcomes(items: Iterable[Any], idle: list[Connection]) -> Iterator[tuple[Any, Exception | None]]:
    """The result of each item, in their order, or the error. ``idle``: the connections to the processes. Raises
    TorchprofError if a process has ended. With two processes and a slow item 0, one works on that while the other one
    does 1, 2 and 3, but no more before the result of 0 is taken."""
    from multiprocessing.connection import wait

    count = len(idle)
    remaining = enumerate(items)
    busy: dict[Any, int] = {}  # by connection: the number of the item
    done: dict[int, tuple[Any, Exception | None]] = {}  # the outcomes that were not taken yet, by the same number
    next_number = 0
    try:
        while True:
            room = _AHEAD * count - len(busy) - len(done)
            for number, item in islice(remaining, min(len(idle), room)):
                connection = idle.pop()
                connection.send(item)
                busy[connection] = number
            if next_number in done:
                yield done.pop(next_number)
                next_number += 1
            elif busy:
                ready: list[Any] = wait([*busy])
                for connection in ready:
                    done[busy.pop(connection)] = connection.recv()
                    idle.append(connection)
            else:
                return
    except (EOFError, ConnectionError) as error:
        raise TorchprofError(
            f"One of the {count} processes that read files was killed, perhaps because memory ran out. Use fewer "
            'processes at once. A script that reads in several must do so below `if __name__ == "__main__":`.'
        ) from error
    finally:
        for connection in (*idle, *busy):
            connection.close()


def _work(call: Callable[[Any], Any], connection: Connection) -> None:
    """What a process does: ``call`` each item that comes, and send the result or the error. Ctrl-C, which the terminal
    sends to all processes, ends it without a traceback: the main process reports it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    with suppress(EOFError, ConnectionError):  # the main process has ended
        while True:
            connection.send_bytes(_outcome(call, connection.recv()))


def _outcome(call: Callable[[Any], Any], item: Any) -> bytes:
    """The result and the error of a call, pickled. What cannot be sent is a TorchprofError with its text."""
    result: Any = None
    error: Exception | None = None
    try:
        result = call(item)
    except Exception as failure:  # any error is one of the main process
        error = failure
    try:
        data = pickle.dumps((result, error))
        if error is not None:
            pickle.loads(data)  # fails for errors that are made of other arguments than they keep
        return data
    except Exception as failure:  # whatever pickling raises
        problem = f"{error!r:.500}" if error is not None else f"its result cannot be sent to another: {failure!r:.500}"
        return pickle.dumps((None, TorchprofError(f"One of the processes that read files failed: {problem}.")))


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


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause the garbage collector in this block, and enable it again afterwards if it was enabled. Reading a run makes
    a million objects, drawing a report thousands, and no cyclic garbage: collections would take longer."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()
