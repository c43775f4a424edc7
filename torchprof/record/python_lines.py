"""A thread that samples the source line of another thread every few milliseconds: it shows the time of the user's
Python between operators, NumPy for example. Importable without torch."""

from __future__ import annotations

import atexit
import dis
import linecache
import os
import re
import sys
import sysconfig
import threading
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from operator import add
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from torchprof.record.torch_internals import SharedChange
from torchprof.run.processes import paused_gc
from torchprof.run.words import SourceLine

OUR_FILES = str(Path(__file__).parents[1]) + os.sep  # the prefix of the file names of torchprof
_LIBRARIES = tuple(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_Stack = list[tuple[CodeType, int]]
_USER, _LIBRARY, _NEITHER = "user", "library", "torch, torchprof, or no file"
_MOST_SAMPLES = 1_000_000  # 20 MB; an even number, as the next
_MOST_OFTEN = 500  # so many at intervals of less than 4 ms: then it samples half as often
_OFTEN_S = 0.004
_NS = 1_000_000_000
_CALL_INSTRUCTIONS = ("CALL", "PRECALL", "BEFORE_WITH")  # the names of instructions that call something begin so
_CALLED_NAME = re.compile(r"(?:(?:async )?with )?([A-Za-z_][\w.]*)\s*(?:\(|:|$)")
_WITH = re.compile(r"(?:async )?with (.*?\))(?: as .*|:.*|,.*)?\s*")
_LAST_OF_CHAIN = re.compile(r"[)\]]\.(\w+)$")  # of what another call, or an item, is asked for
_MODULE_CALLERS = ("_call_impl", "inner")  # the functions of nn.Module that call forwards and hooks
_ITERATION = ("__iter__", "__next__")
_OTHERS_EVERY, _MOST_OTHERS = 32, 16  # so many samples, then so many other threads are looked at
_GOLDEN = 0.618_033_988_749_895  # its multiples, without their integers, are spread evenly over 0 to 1
_starts = count()
_NAME = "torchprof"  # of our threads
_SWITCH_S = 0.0005  # the longest time that a thread keeps the GIL if the sampler waits for it
_JOIN_S = 10.0  # the longest wait for the end of the sampling thread
_frames_stay = paused_gc if sys.version_info[:2] == (3, 11) else nullcontext
"""A block in which the frames of other threads can be read. Only Python 3.11 may collect garbage while it makes the
object of a frame for ``f_back``. Finalizers then let other threads run: the frame returns before the object is made."""


class Sample(NamedTuple):
    """At ``at_ns`` (``time.perf_counter_ns``) the thread was at ``line``. The sample stands for ``intervals``.
    ``module``: the id of the module whose call was the innermost; 0 for none, and if that is not sampled."""

    at_ns: int
    line: SourceLine
    intervals: int
    module: int = 0


class ThreadUse(NamedTuple):
    """Another thread than the one that is sampled: the processor time that it used in ``over_ns``, and the line at
    which it was most often when it had used some."""

    cpu_ns: int
    over_ns: int
    line: SourceLine


@dataclass
class _Other:
    """Another thread: its processor time and the clock, when it was first seen and now; how often it was at a place."""

    first_ns: tuple[int, int]
    last_ns: tuple[int, int]
    places: Counter[int] = field(default_factory=Counter)


class _Location(NamedTuple):
    """An instruction of a function, by its byte offset, and its line. ``called``: the library's function that ran in
    it, if known. ``caller``: the code of ``nn.Module`` that called the function, and the offset there; None for others.
    ``module``: as in ``Sample``.
    A location keeps its code alive, so that no other object gets the id of the code."""

    code: CodeType
    line: int
    offset: int
    called: CodeType | None
    caller: tuple[CodeType, int] | None
    module: int


class Sampler(SharedChange):
    """Samples the current line of a thread every ``interval_s``, from ``start`` to ``stop``.

    The line is that of the innermost frame of the user's code, which is in a file, and not in the standard library, an
    installed package (site-packages), torch or torchprof; without one, of the innermost frame outside torchprof.

    With the line comes what it called, as it is written there ("time.sleep"). Without the source, with Python 3.10, and
    for a loop over an object it is the function of a library ("DataLoader.__iter__"), but no other function of torch.

    While it samples, a thread that waits for the GIL gets it after 0.5 ms: at Python's 5 ms most samples of a loop are
    at its next call that releases the GIL, instead of at its slow line. C code that holds the GIL, such as NumPy's,
    delays the sampler; when it returns, the thread is still at the line that called it. A sample stands for all
    intervals since the one before: the sum of all intervals times ``interval_s`` is the sampled time.

    At most a million samples are kept: 83 minutes at 5 ms. After that, every second sample is dropped, its intervals
    are added to the sample before it, and the interval between samples is doubled. At intervals of less than 4 ms this
    comes after 500: so a short recording has enough samples, and a long one does not pay for them.

    The first sample comes after a part of an interval, another one at each start: what begins a recording is sampled as
    often as what ends it.

    The sampling thread is a daemon. It pauses while the process forks, does not run in the child, and ends before the
    interpreter does. Started again, a sampler adds samples.
    """

    def __init__(self, thread_ident: int, interval_s: float = 0.005, with_modules: bool = False) -> None:
        self.interval_s = interval_s
        self._ident = thread_ident
        self._with_modules = with_modules
        self._every = 1  # intervals from one sample to the next
        self._folder = str(Path.cwd())  # at the start, because the script may change it
        self._owners: dict[str, str] = {}  # by file
        self._locations: list[_Location] = []
        self._indices: dict[tuple[object, ...], int] = {}  # of locations
        self._times = array("q")
        self._places = array("i")  # indices of locations
        self._intervals = array("q")
        self._others: dict[int, _Other] = {}  # by the number of the thread
        self._until_others = _OTHERS_EVERY
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self not in self._all_on:
            self.on()
            atexit.register(self.stop)
            self._resume()

    def stop(self) -> None:
        """End the sampling. Does nothing if it is not running."""
        try:
            self._pause()
        finally:
            self.off()
            atexit.unregister(self.stop)

    def _make(self) -> None:
        """Let threads that wait for the GIL get it sooner."""
        self._set(sys.getswitchinterval, sys.setswitchinterval, min(_SWITCH_S, sys.getswitchinterval()))

    def samples(self) -> Iterator[Sample]:
        """All samples until now in the order of time."""
        # First, because a sample may come meanwhile, with a new location.
        taken = [*zip(self._times, self._places, self._intervals)]
        for file in {location.code.co_filename for location in self._locations}:
            linecache.checkcache(file)
        lines = [_source_line(location, self._folder) for location in self._locations]
        for at_ns, index, intervals in taken:
            yield Sample(at_ns, lines[index], intervals, self._locations[index].module)

    def other_threads(self) -> list[ThreadUse]:
        """The other threads that run Python code, and used the processor."""
        used = []
        for other in list(self._others.values()):
            (cpu_ns, over_ns) = (last - first for first, last in zip(other.first_ns, other.last_ns))
            if cpu_ns > 0 and other.places:
                [(place, _)] = other.places.most_common(1)
                used.append(ThreadUse(cpu_ns, over_ns, _source_line(self._locations[place], self._folder)))
        return used

    def forget(self) -> None:
        """Drop all samples until now, and sample as often as at the start."""
        self._every = 1
        self._others.clear()
        count = len(self._intervals)  # appended last: the others have as many, or more
        for column in (self._times, self._places, self._intervals):
            del column[:count]

    def _resume(self) -> None:
        # The thread sleeps by waiting for this lock: `_pause` wakes it up by releasing the lock.
        self._stopping = threading.Lock()
        self._stopping.acquire()
        thread = threading.Thread(target=self._watch, args=(self._stopping,), name=_NAME, daemon=True)
        thread.start()
        self._thread = thread

    def _pause(self) -> None:
        if self._thread is not None:
            self._stopping.release()
            self._thread.join(_JOIN_S)
            self._thread = None

    def _watch(self, stopping: threading.Lock) -> None:
        """Sample until the lock is released. Runs in the sampling thread."""
        interval = round(self.interval_s * _NS)
        part = 1 - next(_starts) * _GOLDEN % 1
        due = time.monotonic_ns() + round(part * interval * self._every)
        while not stopping.acquire(timeout=max(due - time.monotonic_ns(), 0) / _NS):
            late = max(time.monotonic_ns() - due, 0) // interval
            self._add_sample(self._every + late)
            due += interval * (late + self._every)

    def _add_sample(self, intervals: int) -> None:
        self._until_others = self._until_others - 1 or _OTHERS_EVERY
        with _frames_stay():
            stacks, module = self._stacks_now(with_others=self._until_others == _OTHERS_EVERY)
        index = self._location_of(stacks.pop(self._ident, []), module)
        self._look_at_others(stacks)
        if index is None:
            return
        self._times.append(time.perf_counter_ns())
        self._places.append(index)
        self._intervals.append(intervals)
        is_often = self.interval_s * self._every < _OFTEN_S
        if len(self._times) >= (_MOST_OFTEN if is_often else _MOST_SAMPLES):  # drop every second one
            self._times = self._times[::2]
            self._places = self._places[::2]
            self._intervals = array("q", map(add, self._intervals[::2], self._intervals[1::2]))
            self._every *= 2

    def _stacks_now(self, *, with_others: bool) -> tuple[dict[int, _Stack], int]:
        """The stack of the thread, and with ``with_others`` those of 16 others, by the number of the thread; and the
        module whose call is the innermost.

        No frame is kept, and nothing slow is done with one: a frame that we still have when its function returns keeps
        the variables of the function, and our thread would free their memory, of which the profiler sees nothing.
        """
        frames = sys._current_frames()
        try:
            module = _module_in(frames.get(self._ident)) if self._with_modules else 0
            ours = {self._ident, threading.get_ident()}
            others = [ident for ident in frames if with_others and ident not in ours][:_MOST_OTHERS]
            return {ident: _stack_of(frames.get(ident)) for ident in (self._ident, *others)}, module
        finally:
            frames.clear()  # one of them is ours, and has all of them

    def _look_at_others(self, stacks: Mapping[int, _Stack]) -> None:
        """Note the processor time of the other threads, and where those are that have used some since the last time."""
        threads = threading.enumerate() if stacks else ()
        natives = {thread.ident: thread.native_id for thread in threads if thread.name != _NAME}
        for ident, stack in stacks.items():
            if (cpu_ns := _cpu_ns_of(natives.get(ident))) is None:
                continue
            now = cpu_ns, time.perf_counter_ns()
            other = self._others.setdefault(ident, _Other(now, now))
            index = self._location_of(stack) if now[0] > other.last_ns[0] else None
            other.last_ns = now
            if index is not None:
                other.places[index] += 1

    def _location_of(self, stack: _Stack, module: int = 0) -> int | None:
        """The index of a thread's location in ``_locations``; None if the thread has ended."""
        ours = next((number for number, (code, _) in enumerate(stack) if not _is_ours(code)), len(stack))
        number, called = self._user_call(stack, ours)
        if number >= len(stack):
            return None
        (code, offset), caller = stack[number], _calling_module(stack, number)
        key = id(code), offset, id(called), caller, module
        if (index := self._indices.get(key)) is None:
            index = self._indices[key] = len(self._locations)
            self._locations.append(_Location(code, _line_at(code, offset), offset, called, caller, module))
        return index

    def _user_call(self, stack: _Stack, innermost: int) -> tuple[int, CodeType | None]:
        """The position of the innermost call of the user's code, or else of the innermost one; and the library's
        function that it called."""
        called = None
        for number in range(innermost, len(stack)):
            code = stack[number][0]
            if (owner := self._owners.get(code.co_filename)) is None:
                owner = self._owners[code.co_filename] = _owner_of(code.co_filename)
            if owner == _USER:
                return _enclosing(stack, number), called
            is_named = owner == _LIBRARY or code.co_name in _ITERATION  # torch's DataLoader
            called = code if is_named else None
        return innermost, None


def _cpu_ns_of(native_id: int | None) -> int | None:
    """The processor time of a thread by its number in the system; None if it has ended, and where there is no /proc. To
    ask for the clock of a thread that has ended is undefined in C."""
    try:
        with open(f"/proc/self/task/{native_id}/schedstat", "rb", buffering=0) as file:  # noqa: PTH123 (faster)
            return int(file.read(64).split()[0])
    except (OSError, ValueError, IndexError):
        return None


def _stack_of(frame: FrameType | None) -> _Stack:
    """The functions that a thread is in, the innermost first, each with the offset of its instruction."""
    stack = []
    while frame is not None:
        stack.append((frame.f_code, frame.f_lasti))
        frame = frame.f_back
    return stack


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(OUR_FILES)


def _line_at(code: CodeType, offset: int) -> int:
    """The line of an instruction; of one without, that of the instructions before it."""
    known = code.co_firstlineno
    for start, _, line in code.co_lines():
        if start > offset:
            break
        known = line or known
    return known


def _enclosing(stack: _Stack, number: int) -> int:
    """The position of the function that a comprehension or a lambda is written in, if that is its caller."""
    while number + 1 < len(stack):
        (code, _), (outer, _) = stack[number : number + 2]
        is_function = not code.co_name.startswith("<") or code.co_name == "<module>"
        if is_function or not any(code is constant for constant in outer.co_consts):
            break
        number += 1
    return number


def _calling_module(stack: _Stack, number: int) -> tuple[CodeType, int] | None:
    """The code of ``nn.Module`` that calls this function, and the instruction that does; None for other callers."""
    caller = stack[number + 1] if number + 1 < len(stack) else None
    return caller if caller is not None and _calls_forward(caller[0]) else None


def _calls_forward(code: CodeType) -> bool:
    """Whether this is a function of ``nn.Module`` that calls forwards and hooks."""
    if code.co_name not in _MODULE_CALLERS:
        return False
    return code.co_filename == getattr(sys.modules.get("torch.nn.modules.module"), "__file__", None)


def _module_in(frame: FrameType | None) -> int:
    """The id of the module whose call is the innermost; 0 outside all calls."""
    while frame is not None and not _calls_forward(frame.f_code):
        frame = frame.f_back
    return 0 if frame is None else id(frame.f_locals.get("self"))


def _owner_of(file: str) -> str:
    """Whose code a file is. The user's is a file, and not of torchprof, Python, torch or an installed package, nor the
    script of an installed command, such as ``bin/torchprof``."""
    torch = getattr(sys.modules.get("torch"), "__file__", None)
    if file.startswith(("<", OUR_FILES)) or (torch is not None and file.startswith(str(Path(torch).parent) + os.sep)):
        return _NEITHER
    is_installed = (
        file.startswith(_LIBRARIES)
        or {"site-packages", "dist-packages"} & set(Path(file).parts)
        or Path(file).parent == Path(sys.executable).parent
    )
    return _LIBRARY if is_installed else _USER


def _source_line(location: _Location, folder: str) -> SourceLine:
    """The line of a location. ``folder``: see ``_shown_path``."""
    code, caller = location.code, location.caller
    return SourceLine(
        _shown_path(code.co_filename, folder),
        location.line,
        code.co_name,
        _called_name(code, location.offset, location.called),
        caller is not None and _called_name(*caller).endswith("hook"),  # else it calls the module's forward
    )


def _called_name(code: CodeType, offset: int, called: CodeType | None = None) -> str:
    """What a call at this instruction calls, as it is written in the source; else the name of ``called``, if any."""
    positions = getattr(code, "co_positions", None)
    while offset > 0 and dis.opname[code.co_code[offset]] == "CACHE":  # the rest of the instruction before it
        offset -= 2
    if positions is not None and dis.opname[code.co_code[offset]].startswith(_CALL_INSTRUCTIONS):
        line, last, begin, end = next(islice(positions(), offset // 2, None), (None,) * 4)
        if line is not None and begin is not None and end is not None:
            text = linecache.getline(code.co_filename, line).encode()
            written = text[begin : end if last == line else None].decode(errors="replace")
            with_block = _WITH.fullmatch(written)  # where a block begins or ends
            call = with_block[1] if with_block else written
            chain = _LAST_OF_CHAIN.search(_callee(call)) if last == line or with_block else None
            if (match := chain or _CALLED_NAME.match(written)) is not None:
                return match[1]
    return getattr(called, "co_qualname", called.co_name) if called is not None else ""


def _callee(call: str) -> str:
    """A call without its arguments: ``model(x).sum().backward`` of ``model(x).sum().backward()``."""
    depth = 0
    for at in reversed(range(len(call))):
        depth += {")": 1, "(": -1}.get(call[at], 0)
        if not depth:
            return call[:at]
    return call


def _shown_path(file: str, folder: str) -> str:
    """A path as it is shown: relative to ``folder`` if it is below it, otherwise its last folder and its name."""
    if file.startswith("<"):
        return file
    path = Path(os.path.normpath(file))
    return str(path.relative_to(folder) if path.is_relative_to(folder) else Path(*path.parts[-2:]))


def _for_all(method: Callable[[Sampler], None]) -> None:
    for sampler in list(Sampler._all_on):
        method(sampler)


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    # Python warns of a fork while other threads run: our thread must not be the cause of the warning.
    os.register_at_fork(
        before=partial(_for_all, Sampler._pause),
        after_in_parent=partial(_for_all, Sampler._resume),
        after_in_child=partial(_for_all, Sampler.stop),
    )
