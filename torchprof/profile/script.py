"""A Python program run as Python itself would run it, with something of ours around it; and where its Python goes.

``python script.py`` is more than executing a file: ``__main__``, ``sys.argv`` and ``sys.path`` are the program's own,
an error ends it with a traceback and an exit code, Ctrl-C and SIGTERM end it by the signal. All that stays as it is.
"""

from __future__ import annotations

import atexit
import builtins
import os
import runpy
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NoReturn, cast

from torchprof.record.python_lines import OUR_FILES


@dataclass(frozen=True)
class Script:
    """A program: a file, a folder or a zip with a ``__main__.py``, or with ``is_module`` the name of a module.

    ``args`` are its arguments, without its own name. ``folder`` and ``environment`` are where it starts: by default
    the current ones, kept, since the program may change its own.
    """

    target: str
    args: Sequence[str] = ()
    is_module: bool = False
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, around: Callable[[], AbstractContextManager[object]]) -> Ending:
        """Run the program in this process, in its main thread, and say how it ended.

        ``around()`` is entered right before the first line of ``__main__``: after it was compiled, and for a module
        after the packages above it were imported. It is left as soon as that code has ended, however it ended, and it
        is not told of errors. Threads that are still running go on; Python waits for them at its end, as ever.

        A traceback, or the text of ``sys.exit("text")``, is written at once and not by ``Ending.end``: when a program
        fails, Python says so before anything else, and it must be said even if the report takes long or is broken off.
        So the report comes last, where it is seen, and ``Ending.outcome`` is there to remind of the failure above it.

        SIGTERM becomes an error (a BaseException) in the main thread, as Ctrl-C does: only so do all open ranges close
        before the report, but ``finally`` blocks run that plain Python would skip. A second SIGTERM kills at once. A
        program that has a handler of its own, or ignores the signal, keeps that. Once the program has ended a SIGTERM
        changes nothing any more: ``around`` is left in peace, since in a job torchrun sends it to all ranks as soon as
        one has failed, and the others may just have failed of that. Again a second one kills at once.

        A process forked by the program that comes to the end of the program ends here, as it would have: it never
        leaves ``around`` and never returns. Raises what ``around`` raises, and nothing of the program.
        """
        starter = os.getpid()
        context: AbstractContextManager[object] | None = None
        began = False

        def begin() -> None:
            nonlocal context, began
            context = around()
            context.__enter__()
            began = True

        error: BaseException | None = None
        code = 0
        sigterm = SigtermAsError()
        with sigterm:
            try:
                try:
                    self._execute(begin)
                except BaseException as raised:
                    if context is not None and not began:
                        raise  # it is not the program's but the caller's: around could not be entered
                    error = raised
                # Outside the except block: the script's own excepthook is to find no error under way, as ever.
                if error is not None and not sigterm.came:
                    code = _tell(error)
                if os.getpid() == starter:
                    sigterm.hold()
            except Terminated as raised:  # it came while we told of another error
                error = raised
            if sigterm.came:
                ending = Ending(128 + signal.SIGTERM, error, signal.SIGTERM, began)
            elif type(error) is KeyboardInterrupt:  # Python, too, looks for the exact class
                ending = Ending(128 + signal.SIGINT, error, signal.SIGINT, began)
            else:
                ending = Ending(code, error, None, began)
            if os.getpid() != starter:
                _end_forked_process(ending)
            if context is not None and began:
                context.__exit__(None, None, None)
        return ending

    def _execute(self, begin: Callable[[], None]) -> None:
        """Make ``__main__``, call ``begin``, and run the program; its errors come out."""
        main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins)
        if sys.version_info < (3, 14):
            vars(main).update(__annotations__={})
        sys.modules["__main__"] = main
        # The path as given, only made absolute: Python keeps "./" in tracebacks, Path would drop it.
        file = os.path.join(Path.cwd(), self.target)  # noqa: PTH118
        if self.is_module:
            sys.argv[:] = ["-m", *self.args]  # which is what a package sees while its module is looked for
            _set_first_path(str(Path.cwd()))
            _run_as_runpy(self.target, True, begin)
        elif get_importer(file) is not None:
            sys.argv[:] = [self.target, *self.args]
            _set_first_path(file, always=True)
            _run_as_runpy("__main__", False, begin)
        else:
            sys.argv[:] = [self.target, *self.args]
            _set_first_path(str(Path(self.target).resolve().parent))
            code = _load_file(main, file)
            begin()
            exec(code, vars(main))


@dataclass(frozen=True)
class Ending:
    """How a program ended: ``end`` ends this process in the same way.

    ``code`` is the exit code as a shell shows it: 128 + the number of the ``signal`` where one ended the program.
    ``error`` is what came out of it, a SystemExit included. Where it did not ``begin`` (there is no such file, a syntax
    error), ``around`` was never entered and there is nothing to report.
    """

    code: int
    error: BaseException | None
    signal: int | None
    began: bool

    @property
    def outcome(self) -> str:
        """How it ended, in a few words: the end of a sentence that begins with the program."""
        if self.signal is not None:
            return "was interrupted (Ctrl-C)" if self.signal == signal.SIGINT else "was terminated (SIGTERM)"
        if self.error is None or isinstance(self.error, SystemExit):
            return f"left with exit code {self.code}" if self.code else "ended"
        said = (str(self.error).splitlines() or [""])[0]
        return f"failed: {type(self.error).__name__}: {said}" if said else f"failed: {type(self.error).__name__}"

    def end(self) -> NoReturn:
        """End this process as the program would have ended: exit code or signal; threads and ``atexit`` before that.

        By raising, so that Python itself shuts down. Nothing is written: that was done when the program ended.
        """
        if self.signal == signal.SIGTERM:
            flush()
            die_by(signal.SIGTERM)  # which spares Python's shutdown, as it does without us
        if self.signal == signal.SIGINT:
            told, hook = self.error, sys.excepthook

            def hook_for_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
                if error is not told:
                    hook(kind, error, trace)

            sys.excepthook = hook_for_others
            raise cast(BaseException, told)
        raise SystemExit(self.code)


class Terminated(BaseException):
    """SIGTERM came. Nobody is to catch it, as nobody can catch the signal."""


class SigtermAsError:
    """While entered, SIGTERM raises Terminated in this process, if until then it would have killed it.

    ``came`` says whether it did, whatever the program made of the error. Forked processes die by the signal, as ever.
    From ``hold`` on it raises nothing, and does nothing the first time.
    """

    came = False

    def __enter__(self) -> None:
        self._handler: Any = signal.SIG_DFL  # what was there before, and will be again
        self._raises = True
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            self._start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def hold(self) -> None:
        self._raises = False
        handler = signal.getsignal(signal.SIGTERM)
        if callable(handler) and handler != self._terminate:  # the program's own
            self.stop()
            self._handler = handler
            self._start()

    def stop(self) -> None:
        if self in _raising:
            _raising.remove(self)
            if signal.getsignal(signal.SIGTERM) == self._terminate:
                signal.signal(signal.SIGTERM, self._handler)

    def _start(self) -> None:
        signal.signal(signal.SIGTERM, self._terminate)
        _raising.append(self)

    def _terminate(self, *_: object) -> None:
        self._handler = signal.SIG_DFL
        self.stop()
        if self._raises:
            self.came = True
            raise Terminated


_raising: list[SigtermAsError] = []


def _stop_raising() -> None:
    for sigterm in list(_raising):
        sigterm.stop()


if hasattr(os, "register_at_fork"):  # not on Windows, which cannot fork
    os.register_at_fork(after_in_child=_stop_raising)


def _set_first_path(first: str, always: bool = False) -> None:
    """Put ``first`` where Python puts the folder of the program; ``python -P`` and ``-I`` have no such place."""
    has_none = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if not has_none:
        sys.path[0] = first
    elif always:
        sys.path.insert(0, first)


def _load_file(main: ModuleType, file: str) -> Any:
    """The code of a file (source or .pyc), with ``__main__`` made ready for it. Exits where it cannot be read."""
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        print(f"{sys.orig_argv[0]}: can't open file {file!r}: {why}", file=sys.stderr)
        raise SystemExit(2) from None
    vars(main).update(__file__=file, __cached__=None)
    if file.endswith(".pyc"):
        compiled = main.__loader__ = SourcelessFileLoader("__main__", file)
        return compiled.get_code("__main__")
    main.__loader__ = SourceFileLoader("__main__", file)
    return compile(content, file, "exec", dont_inherit=True)


def _run_as_runpy(name: str, alter_argv: bool, begin: Callable[[], None]) -> None:
    """Run a module, or the ``__main__`` of ``sys.path[0]``, with the function that the interpreter calls for it.

    ``begin`` is called between finding the code and running it.
    """
    private = cast(Any, runpy)
    run_code = private._run_code

    def begin_and_run(*args: Any) -> Any:
        private._run_code = run_code
        begin()
        return run_code(*args)

    private._run_code = begin_and_run
    try:
        private._run_module_as_main(name, alter_argv)
    finally:
        private._run_code = run_code


def _tell(error: BaseException) -> int:
    """Write what Python writes when a program ends by this error, and return the exit code."""
    flush()
    _leave_out_our_frames(error)
    if isinstance(error, SystemExit):
        return _tell_exit(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Terminated:
        raise
    except SystemExit as exit_of_hook:
        return _tell_exit(exit_of_hook)
    except BaseException as failure:
        _leave_out_our_frames(failure)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _tell_exit(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return int(error.code)  # True is 1
    print(error.code, file=sys.stderr)
    return 1


def _leave_out_our_frames(error: BaseException) -> None:
    """Take the frames of torchprof out of the traceback of an error, and of those that led to it."""
    waiting: list[BaseException | None] = [error]
    seen = set()
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        kept = []
        trace = one.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(OUR_FILES):
                kept.append(trace)
            trace = trace.tb_next
        for outer, inner in zip(kept, [*kept[1:], None]):
            outer.tb_next = inner
        one.__traceback__ = kept[0] if kept else None
        waiting += [one.__cause__, one.__context__, *getattr(one, "exceptions", ())]


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed, or nobody reads it any more
            stream.flush()


def die_by(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_forked_process(ending: Ending) -> NoReturn:
    """End a process that the program forked without unwinding the frames above, which belong to the one it left.

    So it does what Python does at its end, in Python's order, as ``multiprocessing`` does in the processes it forks.
    """
    if ending.signal != signal.SIGTERM:
        cast(Any, threading)._shutdown()
        atexit._run_exitfuncs()
    flush()
    if ending.signal is not None:
        die_by(ending.signal)
    os._exit(ending.code & 0xFF)
