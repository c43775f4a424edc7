"""Run a script once more, under cProfile, for the time of its Python functions. torch is not imported here."""

from __future__ import annotations

import cProfile
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from torchprof.profile.script import Script, die_by, flush
from torchprof.profile.signals import SigtermAsError, Terminated
from torchprof.record.python_lines import OUR_FILES

_TAIL_BYTES = 4000  # of stderr
_PROGRAM = """\
import sys
sys.path.append(sys.argv[1])
from torchprof.profile.python_functions import record_functions
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
