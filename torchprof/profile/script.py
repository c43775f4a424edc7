"""Run a Python program as ``python`` would, inside a context manager of ours.

The program sees its own ``__main__``, ``sys.argv`` and ``sys.path``, as with ``python script.py``. An error ends it
with a traceback and an exit code; Ctrl-C and SIGTERM end it by the signal. Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import builtins
import cProfile
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from importlib.machinery import SourceFileLoader, SourcelessFileLoader
from pathlib import Path
from pkgutil import get_importer
from types import ModuleType, TracebackType
from typing import Any, NamedTuple, NoReturn, cast

from torchprof.profile.signals import SigtermAsError, Terminated
from torchprof.record.python_lines import OUR_FILES


@dataclass(frozen=True)
class Script:
    """A program: a file, a folder or zip file with a ``__main__.py``, or with ``is_module`` the name of a module.
    ``args``: its arguments, without the program's name. ``folder`` and ``environment``: the working directory and the
    environment variables at its start. The defaults are copies, since the program may change the originals."""

    target: str
    args: Sequence[str] = ()
    is_module: bool = False
    folder: str = field(default_factory=lambda: str(Path.cwd()))
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    def run(self, around: Callable[[], AbstractContextManager[object]]) -> Ending:
        """Run the program in the main thread of this process. Returns how it ended.

        ``around()`` is entered right before the first line of ``__main__``: after that is compiled, and for a module
        after its parent packages are imported. It is left as soon as that code has ended, also after an error; the
        error is not passed to it. Threads that are still running continue. Errors of ``around`` are raised, errors of
        the program are not: a traceback, or the text of ``sys.exit("text")``, is written before ``around`` is left, so
        that the user sees it even if the report takes long or is interrupted.

        SIGTERM raises an error (a BaseException) in the main thread, as Ctrl-C does, so that all open profiler ranges
        end before the report. Unlike in plain Python, ``finally`` blocks run. A second SIGTERM kills at once. A program
        that handles or ignores SIGTERM itself continues to do so. After the program has ended, the first SIGTERM is
        ignored while ``around`` is left: torchrun sends it to all ranks as soon as one has failed.

        A process that the program forked ends here as under plain Python: it neither leaves ``around`` nor returns.
        """
        own_process = os.getpid()
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
                        raise  # entering around failed: an error of the caller, not of the program
                    error = raised
                # Outside the except block, since sys.exc_info() must be empty for the script's excepthook.
                if error is not None and not sigterm.came:
                    code = _print_error(error)
                if os.getpid() == own_process:
                    sigterm.ignore_first()
            except Terminated as raised:  # SIGTERM came while another error was printed
                error = raised
            by_signal = None
            if sigterm.came or type(error) is KeyboardInterrupt:  # as in Python, not a subclass
                by_signal = signal.SIGTERM if sigterm.came else signal.SIGINT
            ending = Ending(code if by_signal is None else 128 + by_signal, error, by_signal, began)
            if os.getpid() != own_process:
                _end_forked_process(ending)
            if context is not None and began:
                context.__exit__(None, None, None)
        return ending

    def _execute(self, begin: Callable[[], None]) -> None:
        """Make ``__main__``, call ``begin``, and run the program. Raises the program's errors."""
        main = ModuleType("__main__")
        vars(main).update(__builtins__=builtins)
        if sys.version_info < (3, 14):
            vars(main).update(__annotations__={})
        sys.modules["__main__"] = main
        # os.path.join keeps a "./" in the path, as Python does in tracebacks; Path would drop it.
        file = os.path.join(Path.cwd(), self.target)  # noqa: PTH118
        # "-m" as with python -m, while the parent packages are imported.
        sys.argv[:] = ["-m" if self.is_module else self.target, *self.args]
        if self.is_module:
            _set_first_path(str(Path.cwd()))
            _run_as_runpy(self.target, True, begin)
        elif get_importer(file) is not None:
            _set_first_path(file, always=True)
            _run_as_runpy("__main__", False, begin)
        else:
            _set_first_path(str(Path(self.target).resolve().parent))
            code = _load_file(main, file)
            begin()
            exec(code, vars(main))


@dataclass(frozen=True)
class Ending:
    """How a program ended. ``end`` ends this process in the same way. ``code``: the exit code as a shell shows it: 128
    + ``signal`` if a signal ended the program. ``error``: the error that ended it, or a SystemExit. ``began``: False if
    it could not be started (no such file, a syntax error)."""

    code: int
    error: BaseException | None
    signal: int | None
    began: bool

    @property
    def outcome(self) -> str:
        """The end of a sentence that begins with the program's name: ``failed: ValueError: …``."""
        if self.signal is not None:
            return "was interrupted (Ctrl-C)" if self.signal == signal.SIGINT else "was terminated (SIGTERM)"
        if self.error is None or isinstance(self.error, SystemExit):
            return f"left with exit code {self.code}" if self.code else "ended"
        message = "".join(str(self.error).splitlines()[:1])
        return f"failed: {type(self.error).__name__}{message and f': {message}'}"

    def end(self) -> NoReturn:
        """End this process as the program ended, by exit code or signal, after its threads and ``atexit`` functions: by
        SystemExit or KeyboardInterrupt, so that Python shuts down normally. Nothing is printed."""
        if self.signal == signal.SIGTERM:
            flush()
            die_by(signal.SIGTERM)  # as in plain Python, without Python's shutdown
        if self.signal == signal.SIGINT:
            printed, hook = self.error, sys.excepthook

            def hook_for_others(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
                if error is not printed:
                    hook(kind, error, trace)

            sys.excepthook = hook_for_others
            raise cast(BaseException, printed)
        raise SystemExit(self.code)


def _set_first_path(first: str, always: bool = False) -> None:
    """Put the program's folder at ``sys.path[0]``, as Python does; with -P or -I only if ``always`` (folder or zip)."""
    has_none = getattr(sys.flags, "safe_path", sys.flags.isolated)
    if not has_none:
        sys.path[0] = first
    elif always:
        sys.path.insert(0, first)


def _load_file(main: ModuleType, file: str) -> Any:
    """The code of a file (source or .pyc). Sets ``__file__`` and loader of ``__main__``. Exits if it cannot be read."""
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
    """Run a module, or the ``__main__`` of ``sys.path[0]``, with the same function of runpy as the interpreter. Call
    ``begin`` after the code was found, and before it runs."""
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


def _print_error(error: BaseException) -> int:
    """Print what Python prints when this error ends a program. Returns the exit code."""
    flush()
    _remove_our_frames(error)
    if isinstance(error, SystemExit):
        return _print_exit(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except Terminated:
        raise
    except SystemExit as exit_of_hook:
        return _print_exit(exit_of_hook)
    except BaseException as failure:
        _remove_our_frames(failure)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)
    return 1


def _print_exit(error: SystemExit) -> int:
    """Print the text of ``sys.exit("text")``. Returns the exit code."""
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return int(error.code)  # True is 1
    print(error.code, file=sys.stderr)
    return 1


def _remove_our_frames(error: BaseException) -> None:
    """Remove torchprof's frames from the traceback of an error, and of its causes and contexts."""
    waiting: list[BaseException | None] = [error]
    seen = set()
    while waiting:
        raised = waiting.pop()
        if raised is None or id(raised) in seen:
            continue
        seen.add(id(raised))
        kept = []
        trace = raised.__traceback__
        while trace is not None:
            if not trace.tb_frame.f_code.co_filename.startswith(OUR_FILES):
                kept.append(trace)
            trace = trace.tb_next
        for outer, inner in zip(kept, [*kept[1:], None]):
            outer.tb_next = inner
        raised.__traceback__ = kept[0] if kept else None
        waiting += [raised.__cause__, raised.__context__, *getattr(raised, "exceptions", ())]


def flush() -> None:
    """Flush stdout and stderr; errors are ignored."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # a closed stream or pipe
            stream.flush()


def die_by(number: int) -> None:
    """End this process by a signal."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)


def _end_forked_process(ending: Ending) -> NoReturn:
    """End a process that the program forked, without returning to the callers, whose frames are the parent process's.
    It does what Python does at shutdown, in the same order, as ``multiprocessing`` in the processes that it forks."""
    if ending.signal != signal.SIGTERM:
        cast(Any, threading)._shutdown()
        atexit._run_exitfuncs()
    flush()
    if ending.signal is not None:
        die_by(ending.signal)
    os._exit(ending.code & 0xFF)


# Once more, under cProfile, for the time of its Python functions

_TAIL_BYTES = 4000  # of stderr
_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])
from torchprof.profile.script import record_functions
sys.path.pop()
try:
    import torch  # imported before the first pass, too; else its import would dominate the profile
except ImportError:
    pass
record_functions(*sys.argv[2:])
"""


class PythonFunction(NamedTuple):
    """A function's times from cProfile. ``total_ns`` includes the functions that it called, ``self_ns`` does not. The
    built-in functions, torch's too, have the file "~", the line 0 and a name as ``<built-in method torch.conv2d>``."""

    file: str
    line: int
    function: str
    calls: int
    self_ns: int
    total_ns: int


class PythonPass(NamedTuple):
    """A run under cProfile: its functions by self time, largest first; its exit code; the end of its stderr."""

    functions: tuple[PythonFunction, ...]
    code: int
    errors: str


def profile_python(script: Script) -> PythonPass:
    """Run a script once more, in a process of its own, under cProfile.

    Interpreter, flags, arguments, folder and environment are the same as in the first run. The user has seen the
    script's output there, so stdout is dropped now; stdin is empty, since the first run has read it. The end of stderr
    is kept, in case this run fails and the first did not.

    cProfile records only the main thread of the first process. If the script raises or is interrupted, the result has
    the functions that ran until then; if it ends by ``os._exit`` or is killed, the result has none.
    """
    try:
        # The second run must not outlive this process.
        with SigtermAsError(), tempfile.TemporaryDirectory() as folder:
            functions, errors = Path(folder, "functions.json"), Path(folder, "stderr")
            exit_code = _run_under_cprofile(script, functions, errors)
            end_of_errors = errors.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            rows = json.loads(functions.read_text(encoding="utf-8")) if functions.exists() else []
    except Terminated:
        flush()
        die_by(signal.SIGTERM)
    return PythonPass(tuple(PythonFunction(*row) for row in rows), exit_code, end_of_errors)


def _run_under_cprofile(script: Script, functions: Path, errors: Path) -> int:
    """Run the script in a process that writes its functions and its stderr to these files. Returns its exit code."""
    interpreter = [sys.executable, *cast(Any, subprocess)._args_from_interpreter_flags()]
    kind = "module" if script.is_module else "path"
    arguments = [str(Path(__file__).parents[2]), str(functions), kind, script.target, *script.args]
    with errors.open("wb") as stderr:
        ended = subprocess.run(
            [*interpreter, "-c", _PROGRAM, *arguments],
            cwd=script.folder,
            env=script.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            check=False,
        )
    return ended.returncode if ended.returncode >= 0 else 128 - ended.returncode


def record_functions(file: str, kind: str, target: str, *args: str) -> NoReturn:
    """In the child process: run the script, write its functions to a file, and end as the script ended."""
    profile = cProfile.Profile()
    ending = Script(target, args, is_module=kind == "module").run(lambda: profile)
    rows = _functions_of(profile)
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    ending.end()


def _functions_of(profile: cProfile.Profile) -> list[PythonFunction]:
    """The functions of a profile by self time, largest first. cProfile's own row objects must not outlive this call:
    Python's shutdown may clear their type before it clears a frame that holds such an object, and then it writes a
    SystemError to stderr."""
    sums_of: dict[tuple[str, int, str], list[float]] = {}
    for code, calls, _, total_s, self_s, _ in profile.getstats():
        if isinstance(code, str):
            file, line, name = "~", 0, code
        else:
            file, line, name = code.co_filename, code.co_firstlineno, code.co_name
        if file.startswith(OUR_FILES) or file == cProfile.__file__ or "_lsprof.Profiler" in name:
            continue
        # A function that is defined in a loop has several code objects.
        sums = sums_of.setdefault((file, line, name), [0, 0, 0])
        for column, value in enumerate((calls, self_s, total_s)):
            sums[column] += value
    functions = [
        PythonFunction(*function, round(calls), round(self_s * 1e9), round(total_s * 1e9))
        for function, (calls, self_s, total_s) in sums_of.items()
    ]
    return sorted(functions, key=lambda function: -function.self_ns)
