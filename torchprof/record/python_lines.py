"""Where a thread's Python is, looked up every few milliseconds by a thread of its own.

It sees what no operator explains: the user's lines between the operators, NumPy among them.
"""

from __future__ import annotations

import atexit
import os
import sys
import sysconfig
import threading
import time
from array import array
from collections.abc import Iterator
from operator import add
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from torchprof.errors import TorchprofError

OUR_FILES = str(Path(__file__).parents[1]) + os.sep
"""What the names of torchprof's own files begin with."""
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_MOST_SAMPLES = 1_000_000  # 20 MB; an even number
_NS = 1_000_000_000
_PATIENCE_S = 10.0  # for the thread to end, which it does at once: nothing is to wait for ever


class CodeLocation(NamedTuple):
    """A line of source: its file as a reader finds it, its number, and the name of the function it is in."""

    file: str
    line: int
    function: str


class Sample(NamedTuple):
    """At ``at_ns`` (as ``time.perf_counter_ns``) the thread was at ``location``, which stands for so many intervals."""

    at_ns: int
    location: CodeLocation
    intervals: int


class Sampler:
    """Notes every ``interval_s`` at which line a thread is, from ``start`` to ``stop``, or inside a ``with`` block.

    The line is that of the innermost frame of the user's code: code that is not of the standard library, of an
    installed package (site-packages), of torch or of torchprof, and that lies in a file. Where there is none, it is the
    innermost frame of all but torchprof's.

    A sample stands for all intervals since the one before (``intervals``): C code that does not let go of the GIL, as
    NumPy's, keeps the sampler waiting, and when it returns, the thread is still at the line that called it. So all
    intervals times ``interval_s`` are the time that was sampled.

    At most a million samples of 20 bytes are kept: 83 minutes at 5 ms. When they are full, every second one is dropped,
    its intervals added to the one before, and from then on half as many are taken.

    The thread is a daemon, stands still while the process forks, does not exist in the process that was forked, and
    ends before the interpreter does. A sampler may be started again: its samples go on. Raises TorchprofError for an
    interval that is not positive.
    """

    def __init__(self, thread_ident: int, interval_s: float = 0.005) -> None:
        if not interval_s * _NS >= 1:
            raise TorchprofError(f"interval_s is the seconds between two samples, as 0.005, not {interval_s!r}.")
        self.interval_s = interval_s
        self._ident = thread_ident
        self._every = 1  # intervals from one sample to the next
        self._folder = str(Path.cwd())  # at the start: the script may go elsewhere
        self._is_users: dict[str, bool] = {}
        self._indices: dict[tuple[int, int], int] = {}
        self._locations: list[
            tuple[CodeType, int]
        ] = []  # which also keeps the code alive, so that its id stays its own
        self._times = array("q")
        self._at = array("i")
        self._intervals = array("q")
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, or go on."""
        if self not in _running:
            _running.add(self)
            atexit.register(self.stop)
            self._resume()

    def stop(self) -> None:
        """End the sampling; nothing happens where it was not going on."""
        self._pause()
        _running.discard(self)
        atexit.unregister(self.stop)

    def __enter__(self) -> Sampler:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def samples(self) -> Iterator[Sample]:
        """All samples, in the order of time; to be asked for after ``stop``."""
        locations = [
            CodeLocation(_shown(code.co_filename, self._folder), line, code.co_name) for code, line in self._locations
        ]
        for at_ns, index, intervals in zip(self._times, self._at, self._intervals):
            yield Sample(at_ns, locations[index], intervals)

    def _resume(self) -> None:
        # A lock that somebody holds is the cheapest thing to sleep on that can be woken: stopping lets go of it.
        self._stopping = threading.Lock()
        self._stopping.acquire()
        self._thread = threading.Thread(target=self._watch, args=(self._stopping,), name="torchprof", daemon=True)
        self._thread.start()

    def _pause(self) -> None:
        if self._thread is not None:
            self._stopping.release()
            self._thread.join(_PATIENCE_S)
            self._thread = None

    def _watch(self, stopping: threading.Lock) -> None:
        interval = round(self.interval_s * _NS)
        due = time.monotonic_ns() + interval * self._every
        while not stopping.acquire(timeout=max(due - time.monotonic_ns(), 0) / _NS):
            late = max(time.monotonic_ns() - due, 0) // interval
            self._note(self._every + late)
            due += interval * (late + self._every)

    def _note(self, intervals: int) -> None:
        frame = sys._current_frames().get(self._ident)
        while frame is not None and frame.f_code.co_filename.startswith(OUR_FILES):
            frame = frame.f_back
        frame = self._users(frame) or frame
        if frame is None:  # the thread is over
            return
        key = id(frame.f_code), frame.f_lineno
        index = self._indices.get(key)
        if index is None:
            index = self._indices[key] = len(self._locations)
            self._locations.append((frame.f_code, frame.f_lineno))
        self._times.append(time.perf_counter_ns())
        self._at.append(index)
        self._intervals.append(intervals)
        if len(self._times) >= _MOST_SAMPLES:
            self._thin()

    def _users(self, frame: FrameType | None) -> FrameType | None:
        while frame is not None:
            file = frame.f_code.co_filename
            users = self._is_users.get(file)
            if users is None:
                users = self._is_users[file] = _is_users(file)
            if users:
                return frame
            frame = frame.f_back
        return None

    def _thin(self) -> None:
        self._times = self._times[::2]
        self._at = self._at[::2]
        self._intervals = array("q", map(add, self._intervals[::2], self._intervals[1::2]))
        self._every *= 2


def _is_users(file: str) -> bool:
    """Whether a file is the user's own: none of ours, of Python, of torch, of what was installed, and a file at all."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if torch is not None and file.startswith(str(Path(torch).parent) + os.sep):
        return False
    return not (
        file.startswith(("<", OUR_FILES, *_LIBRARIES)) or {"site-packages", "dist-packages"} & set(Path(file).parts)
    )


def _shown(file: str, folder: str) -> str:
    """A path as a reader finds it: from the current folder where it is below that, else its last folder and name."""
    if file.startswith("<"):
        return file
    path = Path(os.path.normpath(file))
    if path.is_relative_to(folder):
        return str(path.relative_to(folder))
    return str(Path(*path.parts[-2:]))


_running: set[Sampler] = set()


def _before_fork() -> None:
    for sampler in list(_running):
        sampler._pause()


def _after_fork_in_parent() -> None:
    for sampler in list(_running):
        sampler._resume()


def _after_fork_in_child() -> None:
    for sampler in list(_running):
        sampler.stop()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    # Python warns of a fork while other threads run, and would do so because of us.
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
