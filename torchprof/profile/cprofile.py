"""Run a script again under cProfile, for the time of its Python functions."""

from __future__ import annotations

import cProfile
import json
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, cast

from torchprof.profile.script import Script, SigtermAsError, Terminated, die_by, flush
from torchprof.record.python_lines import OUR_FILES

_TAIL_BYTES = 4000
_PASS = """\
import sys
sys.path.append(sys.argv[1])
from torchprof.profile.cprofile import record_functions
sys.path.pop()
try:
    import torch  # imported before the first pass, too; else its import would dominate the profile
except ImportError:
    pass
record_functions(*sys.argv[2:])
"""


class PythonFunction(NamedTuple):
    """A function's times from cProfile. ``total_ns`` includes the functions that it called, ``self_ns`` does not.

    Built-in functions, torch's included, have the file "~", the line 0 and a name like
    ``<built-in method torch.conv2d>``.
    """

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
    script's output there, so stdout is dropped now. The end of stderr is kept, in case this run fails and the first did
    not (``code``). Stdin is empty, since the first run has read it.

    cProfile records only the main thread of the first process. If the script raises or is interrupted, the result has
    the functions that ran until then; if it ends by ``os._exit`` or is killed, the result has none.
    """
    sigterm = SigtermAsError()  # so that the second run does not outlive this process
    try:
        with sigterm, tempfile.TemporaryDirectory() as folder:
            functions = Path(folder, "functions.json")
            errors = Path(folder, "stderr")
            with errors.open("wb") as stderr:
                ended = subprocess.run(
                    [
                        sys.executable,
                        *cast(Any, subprocess)._args_from_interpreter_flags(),
                        "-c",
                        _PASS,
                        str(Path(__file__).parents[2]),
                        str(functions),
                        "module" if script.is_module else "path",
                        script.target,
                        *script.args,
                    ],
                    cwd=script.folder,
                    env=script.environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=stderr,
                    check=False,
                )
            end_of_errors = errors.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            rows = json.loads(functions.read_text(encoding="utf-8")) if functions.exists() else []
    except Terminated:
        flush()
        die_by(signal.SIGTERM)
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    return PythonPass(tuple(PythonFunction(*row) for row in rows), code, end_of_errors)


def record_functions(file: str, kind: str, target: str, *args: str) -> NoReturn:
    """In the child process: run the script, write its functions to a file, and end as the script ended."""
    profile = cProfile.Profile()
    ending = Script(target, args, is_module=kind == "module").run(lambda: profile)
    rows = _functions_of(profile)
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    ending.end()


def _functions_of(profile: cProfile.Profile) -> list[PythonFunction]:
    """The functions of a profile by self time, largest first.

    cProfile's own row objects must not outlive this call: Python's shutdown may clear their type before it clears a
    frame that holds such an object, and then it writes a SystemError to stderr.
    """
    sums_of: dict[tuple[str, int, str], list[float]] = {}
    for code, calls, _, total_s, self_s, _ in profile.getstats():
        where = ("~", 0, code) if isinstance(code, str) else (code.co_filename, code.co_firstlineno, code.co_name)
        if where[0].startswith(OUR_FILES) or where[0] == cProfile.__file__ or "_lsprof.Profiler" in where[2]:
            continue
        sums = sums_of.setdefault(where, [0, 0, 0])  # a function that is defined in a loop has several code objects
        for column, value in enumerate((calls, self_s, total_s)):
            sums[column] += value
    functions = [
        PythonFunction(*where, round(calls), round(self_s * 1e9), round(total_s * 1e9))
        for where, (calls, self_s, total_s) in sums_of.items()
    ]
    return sorted(functions, key=lambda function: -function.self_ns)
