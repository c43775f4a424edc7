"""A script under cProfile: which Python functions take the time."""

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
    import torch  # the first pass has it before it begins, and here it would hide all else
except ImportError:
    pass
record_functions(*sys.argv[2:])
"""


class PythonFunction(NamedTuple):
    """What cProfile says of a function. Built-in ones, torch's among them, have the file "~", the line 0 and a name as
    ``<built-in method torch.conv2d>``. ``self_ns`` is without, ``total_ns`` with the functions it called."""

    file: str
    line: int
    function: str
    calls: int
    self_ns: int
    total_ns: int


class PythonPass(NamedTuple):
    """A run under cProfile: its functions, most time of their own first, its exit code, the end of its stderr."""

    functions: tuple[PythonFunction, ...]
    code: int
    errors: str


def profile_python(script: Script) -> PythonPass:
    """Run a script once more, in a process of its own, under cProfile.

    The same interpreter, flags, arguments, folder and environment. What the script writes was seen in the first pass
    and is not shown again: stdout is thrown away, the end of stderr is kept for the case that this pass fails where the
    first did not (``code`` tells). Stdin is empty, since the first pass has read it, and nobody sees a prompt.

    As ever with cProfile, the main thread of the starting process counts. However the script ended, what ran until then
    is there; a script that leaves by ``os._exit``, or is killed, leaves no functions.
    """
    sigterm = SigtermAsError()  # so that the second pass does not outlive us
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
            said = errors.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
            rows = json.loads(functions.read_text(encoding="utf-8")) if functions.exists() else []
    except Terminated:
        flush()
        die_by(signal.SIGTERM)
    code = ended.returncode if ended.returncode >= 0 else 128 - ended.returncode
    return PythonPass(tuple(PythonFunction(*row) for row in rows), code, said)


def record_functions(file: str, kind: str, target: str, *args: str) -> NoReturn:
    """The second pass, in its process: run the script, write its functions to a file, and end as it ended."""
    profile = cProfile.Profile()
    ending = Script(target, args, is_module=kind == "module").run(lambda: profile)
    found: dict[tuple[str, int, str], list[float]] = {}
    for code, calls, _, total_s, self_s, _ in profile.getstats():
        where = ("~", 0, code) if isinstance(code, str) else (code.co_filename, code.co_firstlineno, code.co_name)
        if where[0].startswith(OUR_FILES) or where[0] == cProfile.__file__ or "_lsprof.Profiler" in where[2]:
            continue
        sums = found.setdefault(where, [0, 0, 0])  # code objects made again by a loop are one function
        for column, value in enumerate((calls, self_s, total_s)):
            sums[column] += value
    rows = [
        PythonFunction(*where, round(calls), round(self_s * 1e9), round(total_s * 1e9))
        for where, (calls, self_s, total_s) in found.items()
    ]
    rows.sort(key=lambda row: -row.self_ns)
    Path(file).write_text(json.dumps(rows), encoding="utf-8")
    ending.end()
