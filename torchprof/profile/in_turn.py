"""Two versions of a program, each in a process of its own, that take turns: one runs while the other one is stopped."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path
from typing import Any, BinaryIO, NoReturn, cast
from weakref import WeakSet

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from torchprof.errors import TorchprofError
from torchprof.profile.pass_times import StepClock
from torchprof.profile.passes import Settling
from torchprof.profile.program import is_model, may_be_in_pass
from torchprof.profile.script import Script, die_by, flush
from torchprof.profile.signals import SigtermAsError, Terminated
from torchprof.record.forwards import OutermostCalls
from torchprof.record.peak import clock_that_waits
from torchprof.run.measures import FEWEST_PAIRS, median_interval

_TURN_S = 0.2  # a turn has as many steps as take so long, at least one
_NARROW = 0.02  # of the time, the whole interval
_FEWEST_STEPS = 5  # in a run: with fewer, whole runs are compared
_LEAST_LIMIT_S, _TIMES = 120.0, 10  # of a turn, and as a multiple of all turns so far
_PR_SET_PDEATHSIG = 1  # of prctl(2)
_ENDS_WITHIN_S = 10.0  # after SIGTERM
_LOOK_S = 0.2
_TAIL_BYTES = 4000  # of stderr
_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])
from torchprof.profile.in_turn import run_in_turn
sys.path.pop()
run_in_turn(*sys.argv[2:])
"""


@dataclass
class Version:
    """What was measured of one of both versions.

    - ``steps``: the times of a step in each turn, in seconds, without the first step. A step begins where a model is
      called while no backward is outstanding, and ends where the next one begins.
    - ``start_up_s``: until the end of the first step, of the first run. ``whole_s``: of each run to the program's end.
      None and empty if no run came so far. ``counts``: the steps of these runs.
    - ``output``: the lines that the first run printed on stdout.
    """

    name: str
    steps: list[float] = field(default_factory=list)
    start_up_s: float | None = None
    whole_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    output: list[str] = field(default_factory=list)


@dataclass
class InTurn:
    """Two versions of a program that ran in turn. ``unit``: what is compared, "step"; "run" if both came to their end
    and have only a few steps, or not equally many. ``pairs``: of turns of both versions, or of runs."""

    before: Version
    after: Version

    @property
    def unit(self) -> str:
        counts = [each.counts[0] for each in (self.before, self.after) if each.counts]
        is_other = len(counts) == 2 and (counts[0] != counts[1] or counts[0] < _FEWEST_STEPS)
        return "run" if is_other else "step"

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """The times of both, in seconds."""
        of_both = [each.steps if self.unit == "step" else each.whole_s for each in (self.before, self.after)]
        return [*zip(*of_both)]

    @property
    def gain(self) -> float | None:
        """The share of the time of all pairs that the later version saves; negative if it takes longer; None without
        pairs."""
        befores, afters = (sum(each) for each in zip(*self.pairs)) if self.pairs else (0.0, 0.0)
        return 1 - afters / befores if befores else None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Between which values the gain is, with 95 % confidence: the interval of the median of pairs by the sign test,
        wider if ``gain`` is outside of it. None with fewer than six pairs."""
        if self.gain is None or len(self.pairs) < FEWEST_PAIRS:
            return None
        low, high = median_interval([1 - after / before for before, after in self.pairs])
        return min(low, self.gain), max(high, self.gain)

    @property
    def first_difference(self) -> tuple[int, str, str] | None:
        """The number of the first line of stdout, from 1 on, that differs, and both lines; None if all lines that both
        printed are equal."""
        for number, lines in enumerate(zip(self.before.output, self.after.output), 1):
            if lines[0] != lines[1]:
                return number, *lines
        return None


def run_both(before: Script, after: Script, seconds: float, show: Callable[[str], None] = lambda line: None) -> InTurn:
    """Run two versions of a program in turn, until the interval of the gain is 2 % wide, or for ``seconds``.

    Start-up comes on top: all until the end of the first step. A version that has not ended by then gets SIGTERM: its
    ``finally`` blocks run. If both end before the time, they are run again. ``show``: shows the progress, a line at a
    time. Ctrl-C ends both, and the result has what is known; raised again if that is nothing.

    While one runs, the processes of the other one are stopped (SIGSTOP): its workers prepare no batches meanwhile. Both
    have their memory all the time. Raises TorchprofError if a version fails, and where processes cannot be stopped.
    """
    if not hasattr(signal, "SIGSTOP"):
        raise TorchprofError("Versions run in turn only where a process can be stopped: on Linux or macOS.")
    result = InTurn(Version(_name(before)), Version(_name(after)))
    left = seconds
    try:
        with SigtermAsError():  # else a version would stay stopped
            while left > 0 and not _is_known(result):
                had = len(result.pairs)
                left -= _one_round(result, (before, after), left, show)
                if len(result.pairs) == had:  # neither a step nor a run was completed by both
                    break
    except KeyboardInterrupt:
        if not result.pairs:
            raise
    except Terminated:
        flush()
        die_by(signal.SIGTERM)
    return result


def _name(script: Script) -> str:
    return " ".join(["-m"] * script.is_module + [script.target, *script.args])


def _is_known(result: InTurn) -> bool:
    return result.interval is not None and result.interval[1] - result.interval[0] <= _NARROW


def _one_round(result: InTurn, scripts: Sequence[Script], seconds: float, show: Callable[[str], None]) -> float:
    """Run both from their start. Returns how long that took, in seconds, in the first round without start-up."""
    versions = (result.before, result.after)
    is_first, began = result.before.start_up_s is None, time.monotonic()
    with ExitStack() as stack:
        both = [stack.enter_context(_running(script)) for script in scripts]
        for version, process in zip(versions, both):
            show(f"{version.name}: start-up")
            other_s = both[0].total_s  # 0 for the first one, which waits for nobody
            process.turn(1, other_s and max(_LEAST_LIMIT_S, _TIMES * other_s))
            version.start_up_s = version.start_up_s or process.total_s
        if is_first:
            began = time.monotonic()
        steps = turns = 1
        while not any(process.has_ended for process in both):
            times, limit_s = {}, max(_LEAST_LIMIT_S, _TIMES * max(process.total_s for process in both))
            for number in (0, 1) if turns % 2 else (1, 0):
                times[number] = both[number].turn(steps, limit_s)
            if not any(process.has_ended for process in both):  # the last turn has what follows the loop
                for number, version in enumerate(versions):
                    version.steps.append(times[number] / steps)
                steps = max(ceil(steps * _TURN_S / max(times.values())), 1)
            turns += 1
            if time.monotonic() - began > seconds or _is_known(result):
                break
            show(f"{turns - 1} turns of {result.before.name} and {result.after.name}")
        for version, process in zip(versions, both):
            while not process.has_ended and time.monotonic() - began < seconds and any(each.has_ended for each in both):
                process.turn(steps)
            if process.has_ended:
                version.whole_s.append(process.total_s)
                version.counts.append(process.steps)
            version.output = version.output or process.printed()
    return time.monotonic() - began


class _Turns:
    """The process of a version, as seen by its parent. ``steps``: that it has begun. ``total_s``: of all its turns."""

    def __init__(self, script: Script, process: subprocess.Popen[bytes], files: tuple[BinaryIO, ...], folder: str):
        self.has_ended = False
        self.steps = 0
        self.total_s = 0.0
        self._name, self._process, self._folder = _name(script), process, Path(folder)
        self._to, self._from = files

    def turn(self, steps: int, limit_s: float = 0.0) -> float:
        """Let it run for so many steps, or to its end. Returns how long that took, in seconds. Raises TorchprofError if
        it fails, and after ``limit_s``, if that is not 0."""
        self._signal(signal.SIGCONT)
        began = time.monotonic()
        with suppress(BrokenPipeError):  # it has ended; said below
            self._to.write(b"%d\n" % steps)
        while not select.select([self._from], [], [], _LOOK_S)[0]:
            if self._process.poll() is not None and not select.select([self._from], [], [], 0)[0]:
                break
            if limit_s and time.monotonic() - began > limit_s:
                raise TorchprofError(
                    f"{self._name} has made {self.steps} steps, and the next one took more than {limit_s:.0f} s while "
                    "the other version was stopped. It may wait for what the other one holds: a file, a lock, a port. "
                    "Give each version its own."
                )
        else:
            if words := self._from.readline().split():
                self._signal(signal.SIGSTOP)
                self.steps, taken_s = int(words[1]), int(words[2]) / 1e9
                self.total_s += taken_s
                self.has_ended = words[0] == b"end"
                if self.has_ended and (code := int(words[3])):
                    raise self._failure(code)
                return taken_s
        code = self._process.wait()
        raise self._failure(code if code >= 0 else 128 - code)

    def _failure(self, code: int) -> TorchprofError:
        errors = (self._folder / "stderr").read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()
        return TorchprofError(f"{self._name} left with exit code {code} after {self.steps} steps. {errors}".rstrip())

    def printed(self) -> list[str]:
        """The whole lines on stdout so far."""
        text = (self._folder / "stdout").read_text(encoding="utf-8", errors="replace")
        return text[: text.rfind("\n") + 1].splitlines()

    def end(self) -> None:
        """End the program as SIGTERM does, and all processes that it has started. If it has come to its end, its
        threads and ``atexit`` functions have time to end, too."""
        try:
            self._signal(signal.SIGCONT)
            if self.has_ended:
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDS_WITHIN_S)
            if self._process.poll() is None:
                self._process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_ENDS_WITHIN_S)
        finally:  # also at a second Ctrl-C
            self._signal(signal.SIGKILL)
            self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(self._process.pid, number)


@contextmanager
def _running(script: Script) -> Iterator[_Turns]:
    """A process that waits for its first turn before the first line of the program."""
    interpreter = [sys.executable, *cast(Any, subprocess)._args_from_interpreter_flags()]
    kind = "module" if script.is_module else "path"
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        (orders, to), (results, answers) = os.pipe(), os.pipe()
        files = stack.enter_context(os.fdopen(to, "wb", buffering=0)), stack.enter_context(os.fdopen(results, "rb"))
        stdout, stderr = (stack.enter_context(Path(folder, name).open("wb")) for name in ("stdout", "stderr"))
        arguments = [str(Path(__file__).parents[2]), str(orders), str(answers), kind, script.target, *script.args]
        try:
            process = subprocess.Popen(
                [*interpreter, "-c", _PROGRAM, *arguments],
                cwd=script.folder,
                env=script.environment,
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                pass_fds=(orders, answers),
                start_new_session=True,
            )
        finally:
            os.close(orders)
            os.close(answers)
        turns = _Turns(script, process, files, folder)
        stack.callback(turns.end)
        yield turns


# In the process of a version


def run_in_turn(orders: str, answers: str, kind: str, target: str, *args: str) -> NoReturn:
    """Run a program, a turn at a time. ``orders``, ``answers``: descriptors of pipes. An order is a line with the
    number of steps in a turn; the answer has "turn" or "end", the steps so far, the turn's ns, and the exit code."""
    _end_with_parent()
    turns = OwnTurns(int(orders), int(answers))
    ending = Script(target, args, is_module=kind == "module").run(lambda: turns)
    turns.answer("end", ending.code)
    ending.end()


def _end_with_parent() -> None:
    """On Linux, end where the parent ends, even by SIGKILL: who is stopped does not see its pipe close."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class OwnTurns:
    """In a ``with`` block, steps are counted, and at the end of each turn the program waits for the next one."""

    def __init__(self, orders: int, answers: int) -> None:
        for descriptor in (orders, answers):
            os.set_inheritable(descriptor, False)
        self._orders, self._answers = os.fdopen(orders, "rb"), os.fdopen(answers, "wb")
        self._process = os.getpid()
        self._models = WeakSet[nn.Module]()
        self._devices = set[torch.device]()
        self._settling = Settling(StepClock(), lambda: self._models)
        self._outermost = OutermostCalls(self._before_call, lambda module, ns: None, lambda module: False)
        self._undo = ExitStack()
        self._steps = self._last = 0  # how many steps have begun, and at the end of which one the turn ends
        self._began_ns = self._taken_ns = 0

    def __enter__(self) -> OwnTurns:
        self._undo.callback(self._outermost.detach)
        self._outermost.attach()
        self._undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
        self._undo.callback(self._settling.off)
        self._settling.on()
        self._wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._taken_ns = self._now() - self._began_ns
        self._undo.close()

    def answer(self, word: str, code: int = 0) -> None:
        flush()  # so that what is printed so far can be compared
        self._answers.write(f"{word} {self._steps} {self._taken_ns} {code}\n".encode())
        self._answers.flush()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._settling.note_step(optimizer)

    def _before_call(self, module: nn.Module) -> bool:
        if os.getpid() != self._process or not may_be_in_pass() or not is_model(module) or _is_capturing():
            return False
        if module not in self._models:
            self._models.add(module)
            self._devices |= {tensor.device for tensor in (*module.parameters(), *module.buffers())}
        if self._settling.may_begin_pass:
            if self._steps == self._last:
                self._taken_ns = self._now() - self._began_ns
                self.answer("turn")
                self._wait()
            self._steps += 1
        self._settling.note_call()
        return False

    def _wait(self) -> None:
        self._last = -1  # if a signal ends this, ``finally`` blocks of the program may call models
        if not (order := self._orders.readline()):
            raise KeyboardInterrupt  # whoever gave the orders has ended
        self._last = self._steps + int(order)
        self._began_ns = self._now()

    def _now(self) -> int:
        """The time. What devices have to do until now would run in the turn of the other version."""
        return int(clock_that_waits(self._devices, time.perf_counter_ns)())


def _is_capturing() -> bool:
    """Whether a CUDA graph is captured: waiting for the device would end that."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
