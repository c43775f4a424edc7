"""Scripts behave as under plain Python: what they see, what they print, how they end. And the run under cProfile."""

from __future__ import annotations

import json
import os
import pstats
import signal
import subprocess
import sys
import time
import zipapp
from pathlib import Path
from typing import NamedTuple

import pytest
from build.places import ROOT
from build.processes import killed_after

from torchprof.profile.script import PythonFunction, Script, profile_python

pytestmark = pytest.mark.jobs

PYTHON = sys.executable

# A replacement for the command line. It prints nothing, so that all output is the script's.
DRIVER = """
import os, sys
from torchprof.profile.script import profile_python
from torchprof.profile.script import Script

def log(*what):
    with open(os.environ["LOG"], "a") as file:
        print(*what, file=file)

class Around:
    def __enter__(self):
        log("entered", os.getpid() == starter)
    def __exit__(self, *error):
        for _ in range(int(os.environ.get("SIGTERMS", 0))):
            os.kill(os.getpid(), int(os.environ.get("SIGNAL", 15)))
        log("left", os.getpid() == starter, error == (None, None, None))

starter = os.getpid()
given = sys.argv[1:]
is_module = given[0] == "-m"
given = given[is_module:]
script = Script(given[0], given[1:], is_module)
try:
    if os.environ.get("PASS"):
        profile_python(script)
    ending = script.run(Around)
    log("began" if ending.began else "never began", ending.code, ending.outcome)
    ending.end()
finally:
    log("torch" in sys.modules)
"""
ONCE = ["entered True", "left True True"]

SHOW = """
import sys, __main__
print(sys.argv, sys.path, __name__, __main__.__dict__ is globals())
for name, value in sorted(vars().copy().items()):
    if name == "__loader__":
        value = type(value).__name__, getattr(value, "name", None), getattr(value, "path", None)
    if name == "__spec__" and value is not None:
        value = value.name, value.origin, value.parent
    print(name, value)
"""


class Seen(NamedTuple):
    code: int
    out: str
    err: str


class Ran(NamedTuple):
    plain: Seen
    ours: Seen
    log: list[str]


def environment(folder: Path, **more: str) -> dict[str, str]:
    log = folder / "log"
    log.write_text("")
    return {**os.environ, "PYTHONPATH": f"{ROOT}", "LOG": str(log), **more}


def start(folder: Path, *command: str, **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [PYTHON, *command],
        cwd=folder,
        env=environment(folder, **more),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def both(folder: Path, *command: str, flags: tuple[str, ...] = (), send: int | None = None) -> Ran:
    """Run a command under plain Python and under torchprof, in parallel; ``send`` a signal when the script is ready."""
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    seen = []
    processes = [start(folder, *flags, *command), start(folder, *flags, str(driver), *command)]
    with killed_after(120, processes[0]), killed_after(120, processes[1]):
        for process in processes:
            ready = ""
            if send is not None:
                assert process.stdout is not None
                ready = process.stdout.readline()
                assert ready == "ready\n"
                process.send_signal(send)
            out, err = process.communicate("typed\n", timeout=60)
            seen.append(Seen(process.returncode, ready + out, err))
    return Ran(seen[0], seen[1], (folder / "log").read_text().splitlines())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "work"
    made.mkdir()
    return made


def same(ran: Ran) -> list[str]:
    """Check that both runs were equal. Returns what the driver wrote about the ending."""
    assert ran.ours == ran.plain
    assert ran.log[:2] == ONCE
    assert ran.log[3:] == ["False"], "torch was imported, or a process that was forked came out of run"
    return ran.log[2].split(maxsplit=2)


# What the script sees.

FORMS = {
    "file": ["show.py", "a", "-b"],
    "folder": ["sub/show.py", "--x=1"],
    "link": ["link.py"],
    "module": ["-m", "show", "a"],
    "module in a package": ["-m", "package.show", "-m", "b"],
    "package": ["-m", "package", "c"],
    "app": ["app", "d"],
    "zip": ["app.zip", "e"],
    "compiled": ["compiled.pyc"],
}


def make_forms(folder: Path) -> None:
    for name in ("show.py", "sub/show.py", "app/__main__.py"):
        write(folder, name, '"""What is here."""\n' + SHOW)
    (folder / "link.py").symlink_to("sub/show.py")
    write(folder, "package/__init__.py", "import sys\nprint(sys.argv)\nvalue = 7\n")
    write(folder, "package/other.py", "from . import value\n")
    write(folder, "package/show.py", "from .other import value\nfrom . import other\ndel other\n" + SHOW)
    write(folder, "package/__main__.py", "from .show import value\n" + SHOW)
    zipapp.create_archive(folder / "app", folder / "app.zip")
    subprocess.run(
        [PYTHON, "-c", "import py_compile; py_compile.compile('show.py', 'compiled.pyc')"], cwd=folder, timeout=300
    )


@pytest.mark.parametrize("command", FORMS.values(), ids=FORMS)
def test_a_script_sees_what_it_sees_in_plain_python(folder: Path, command: list[str]) -> None:
    make_forms(folder)
    assert same(both(folder, *command)) == ["began", "0", "ended"]


@pytest.mark.parametrize("form", ["file", "zip"])
def test_python_that_is_isolated_has_no_folder_of_the_script_in_its_path(folder: Path, form: str) -> None:
    make_forms(folder)
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    find_us = "import sys; sys.path.append(sys.argv.pop(1)); exec(open(sys.argv.pop(1)).read())"
    ours = start(folder, "-I", "-c", find_us, str(ROOT), str(driver), *FORMS[form])
    plain = start(folder, "-I", *FORMS[form])
    out, _ = plain.communicate(timeout=60)
    assert ours.communicate(timeout=60)[0].replace(f", '{ROOT}'", "", 1) == out
    assert (ours.returncode, plain.returncode) == (0, 0)
    assert f"'{folder}'" not in out


# How it ends.

ENDS = {
    "nothing": ("", 0),
    "none": ("sys.exit()", 0),
    "large": ("sys.exit(300)", 300),
    "negative": ("sys.exit(-1)", -1),
    "true": ("sys.exit(True)", 1),
    "text": ("print('out'); sys.exit('text')", 1),
    "object": ("sys.exit((1, 2.5))", 1),
    "nested": ("def f():\n    sys.exit(4)\nf()", 4),
}


@pytest.mark.parametrize("name", ENDS)
def test_the_exit_code_is_that_of_the_script(folder: Path, name: str) -> None:
    line, code = ENDS[name]
    write(folder, "script.py", f"import sys\n{line}")
    outcome = f"left with exit code {code}" if code else "ended"
    assert same(both(folder, "script.py")) == ["began", str(code), outcome]


ERRORS = {
    "error": "import json\ndef f(_):\n    raise ValueError('bad')\nprint('before')\njson.loads('{}', object_hook=f)",
    "cause, context and group": "def f():\n    try:\n        1 / 0\n    finally:\n        {}['x']\n"
    "def g():\n    try:\n        f()\n    except KeyError as e:\n        raise OSError('cause') from e\n"
    "try:\n    g()\nexcept OSError as e:\n    raise ExceptionGroup('g', [e]) from None",
    "future is not inherited": "def f(x: unknown): pass\nprint(f.__annotations__)",
    "hook": "import sys\n"
    "sys.excepthook = lambda k, e, t: print('hooked', k, e, t.tb_next, t.tb_lineno, sys.exc_info())\n1 / 0",
    "hook fails": "import sys\ndef hook(*_):\n    raise OSError('hook')\nsys.excepthook = hook\n1 / 0",
    "hook exits": "import sys\nsys.excepthook = lambda *_: sys.exit(9)\n1 / 0",
    "subclass": "class Mine(KeyboardInterrupt): pass\nraise Mine",
    "syntax error in an import": "import bad",
    "order": "import atexit, sys, threading, time\n"
    "atexit.register(lambda: print('atexit', sys.last_value, sys.last_traceback.tb_lineno, flush=True))\n"
    "threading.Thread(target=lambda: (time.sleep(0.02), print('thread', flush=True))).start()\n1 / 0",
}


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_printed_as_in_plain_python(folder: Path, name: str) -> None:
    write(folder, "script.py", ERRORS[name])
    write(folder, "bad.py", "def f(:\n    pass\n")
    ran = both(folder, "script.py")
    began, code, outcome = same(ran)
    assert (began, code) == ("began", str(ran.plain.code))
    if name == "error":
        assert outcome == "failed: ValueError: bad"
    if name != "future is not inherited":  # Python 3.14 looks at annotations later
        assert ran.plain.code


@pytest.mark.parametrize("command", [["app"], ["-m", "package.imports"]], ids=str)
def test_the_traceback_of_a_module_equals_that_of_plain_python(folder: Path, command: list[str]) -> None:
    write(folder, "package/__init__.py", "")
    write(folder, "package/fails.py", "def f():\n    1 / 0\nf()\n")
    write(folder, "package/imports.py", "from . import fails\n")
    write(folder, "app/__main__.py", "1 / 0\n")
    ran = both(folder, *command)
    assert same(ran) == ["began", "1", "failed: ZeroDivisionError: division by zero"]
    assert "Traceback" in ran.plain.err and "runpy" in ran.plain.err


NEVER = {
    "missing file": ["nowhere.py", "a"],
    "syntax error": ["bad.py"],
    "missing module": ["-m", "nowhere"],
    "missing in a package": ["-m", "package.nowhere"],
    "no package": ["-m", "good.nowhere"],
    "package that cannot run": ["-m", "package"],
    "folder that cannot run": ["package"],
    "syntax error in a module": ["-m", "bad"],
    "package that fails": ["-m", "broken.module"],
    "package that exits": ["-m", "leaving.module"],
}


@pytest.mark.parametrize("command", NEVER.values(), ids=NEVER)
def test_a_script_that_cannot_start_prints_the_error_of_plain_python(folder: Path, command: list[str]) -> None:
    write(folder, "good.py", "")
    write(folder, "bad.py", "x = 1\ndef f(:\n    pass\n")
    write(folder, "package/__init__.py", "")
    write(folder, "broken/__init__.py", "1 / 0")
    write(folder, "broken/module.py", "")
    write(folder, "leaving/__init__.py", "import sys\nsys.exit(3)")
    write(folder, "leaving/module.py", "")
    ran = both(folder, *command)
    assert ran.ours == ran.plain
    assert ran.plain.code
    assert ran.log[0].startswith(f"never began {ran.plain.code} ")
    assert ran.log[1:] == ["False"]


def test_our_frames_in_the_middle_of_a_traceback_are_removed(folder: Path) -> None:
    write(
        folder,
        "script.py",
        "from torchprof.errors import suggest\n"
        "def choices():\n    yield 'a'\n    raise ValueError('inner')\n"
        "def call():\n    suggest('b', choices())\n"
        "try:\n    call()\nexcept ValueError as inner:\n    raise KeyError('outer') from inner\n",
    )
    ran = both(folder, "script.py")
    assert "torchprof" in ran.plain.err, "this script was to have a frame of ours"
    lines = [line for line in ran.ours.err.splitlines() if line.startswith("  File")]
    assert [line.split(", ", 1)[1] for line in lines] == [
        "line 8, in <module>",
        "line 6, in call",
        "line 4, in choices",
        "line 10, in <module>",
    ]
    assert "torchprof" not in ran.ours.err


def test_an_error_of_around_is_raised(folder: Path) -> None:
    code = (
        "from torchprof.profile.script import Script\n"
        "class Around:\n"
        "    def __enter__(self):\n        assert {enter}, 'not entered'\n"
        "    def __exit__(self, *error):\n        assert False, 'not left'\n"
        "try:\n    Script('script.py').run(Around)\nexcept AssertionError as error:\n    print(error)\n"
    )
    write(folder, "script.py", "print('script')")
    for enter, out in (False, "not entered\n"), (True, "script\nnot left\n"):
        process = start(folder, "-c", code.format(enter=enter))
        assert process.communicate(timeout=60) == (out, "")


# Signals.

READY = "print('ready', flush=True), os.read(0, 9)"  # prints it and waits: the signal comes in this line
INTERRUPTED = ["began", "130", "was interrupted (Ctrl-C)"]
TERMINATED = ["began", "143", "was terminated (SIGTERM)"]


def waiting(before: str = "") -> str:
    return f"import os, signal, sys\n{before}\n{READY}\n"


def test_ctrl_c_ends_the_script_as_in_plain_python(folder: Path) -> None:
    write(folder, "script.py", waiting("import atexit\natexit.register(print, 'atexit')"))
    # Without the marks under the part of the line that was running when the signal came.
    ran = both(folder, "script.py", flags=("-X", "no_debug_ranges"), send=signal.SIGINT)
    assert same(ran) == INTERRUPTED
    assert ran.plain.code == -signal.SIGINT
    assert ran.plain.out == "ready\natexit\n" and "KeyboardInterrupt" in ran.plain.err


def test_ctrl_c_ends_a_module_as_in_plain_python(folder: Path) -> None:
    write(folder, "script.py", "raise KeyboardInterrupt")
    ran = both(folder, "-m", "script")
    assert same(ran) == INTERRUPTED
    assert ran.plain.code == -signal.SIGINT


REPLACES_AND_CATCHES_THE_ERROR = (
    f"import os, sys\ntry:\n    try:\n        try:\n            {READY}\n        finally:\n            1 / 0\n"
    "    finally:\n        sys.exit(0)\nexcept BaseException:\n    pass\n"
)


@pytest.mark.parametrize(
    "script", [waiting("import atexit\natexit.register(print, 'atexit')"), REPLACES_AND_CATCHES_THE_ERROR]
)
def test_sigterm_ends_the_script_by_the_signal(folder: Path, script: str) -> None:
    write(folder, "script.py", script)
    ran = both(folder, "script.py", send=signal.SIGTERM)
    assert ran.plain.code == -signal.SIGTERM
    assert ran.ours == ran.plain
    assert ran.log == [*ONCE, " ".join(TERMINATED)]


def test_a_second_sigterm_kills_at_once(folder: Path) -> None:
    script = (
        f"import os, signal\nwhile True:\n    try:\n        {READY}\n"
        "    except BaseException:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    write(folder, "script.py", script)
    ran = both(folder, "script.py", send=signal.SIGTERM)
    assert ran.ours == ran.plain
    assert ran.log == ONCE[:1]


@pytest.mark.parametrize("handler", ["", "import signal\nsignal.signal(15, lambda *_: sys.exit(7))\n"])
def test_a_sigterm_after_the_script_has_failed_changes_nothing_and_a_second_kills(handler: str, folder: Path) -> None:
    """As in a job of torchrun after one rank has failed: the others fail, too, and torchrun sends them SIGTERM."""
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    write(folder, "script.py", f"import sys\n{handler}print(1)\n1/0")
    for sigterms, code, log in (
        ("1", 1, [*ONCE, "began 1 failed: ZeroDivisionError: division by zero", "False"]),
        ("2", -signal.SIGTERM, ONCE[:1]),
    ):
        process = start(folder, str(driver), "script.py", SIGTERMS=sigterms)
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "1\n") and err.endswith("ZeroDivisionError: division by zero\n")
        assert (folder / "log").read_text().splitlines() == log


@pytest.mark.parametrize("handler", ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "])
def test_a_ctrl_c_after_the_end_is_ignored_and_a_second_stops_the_reading(handler: str, folder: Path) -> None:
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    write(folder, "script.py", f"{handler}print(1)")
    stopped = ONCE[:1] if handler else [*ONCE[:1], "False"]  # the default of the system leaves no time for the log
    for times, code, log in (("1", 0, [*ONCE, "began 0 ended", "False"]), ("2", -signal.SIGINT, stopped)):
        (folder / "log").unlink(missing_ok=True)
        process = start(folder, str(driver), "script.py", SIGTERMS=times, SIGNAL=str(int(signal.SIGINT)))
        out, err = process.communicate(timeout=60)
        assert (process.returncode, out) == (code, "1\n")
        assert "the script has ended, and what was recorded is being read. Ctrl-C again stops that." in err
        assert ("KeyboardInterrupt" in err) == (times == "2" and not handler)
        assert (folder / "log").read_text().splitlines() == log


OWN = {
    "own for ctrl-c": ("signal.signal(signal.SIGINT, lambda *_: sys.exit(7))", signal.SIGINT),
    "own that was asked for what was there": (
        "old = signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(7))",
        signal.SIGTERM,
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_a_sigterm_handler_of_the_script_is_called(folder: Path, name: str) -> None:
    before, number = OWN[name]
    write(folder, "script.py", waiting(before))
    ran = both(folder, "script.py", send=number)
    assert same(ran) == ["began", "7", "left with exit code 7"]
    assert ran.plain.code == 7


def test_a_script_that_ignores_or_resets_sigterm_is_not_changed(folder: Path) -> None:
    kill = "os.kill(os.getpid(), signal.SIGTERM)"
    write(folder, "ignores.py", f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{kill}\nprint(1)")
    assert same(both(folder, "ignores.py")) == ["began", "0", "ended"]
    write(folder, "resets.py", f"import os, signal\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n{kill}\nprint(1)")
    ran = both(folder, "resets.py")
    assert ran.ours == ran.plain
    assert ran.plain.code == -signal.SIGTERM


# Pickles and processes.

PICKLE = """
from __future__ import annotations
import dataclasses, pickle, sys, typing

@dataclasses.dataclass
class Point:
    x: int = 1
    class Inner:
        pass

if __name__ == "__main__":
    assert pickle.loads(pickle.dumps(Point(5))) == Point(5)
    assert type(pickle.loads(pickle.dumps(Point.Inner()))) is Point.Inner
    print(Point.__module__, typing.get_type_hints(Point), input())
"""

PROCESSES = """
import atexit, multiprocessing, os, sys

class Thing:
    def __init__(self, n): self.n = n
    def __call__(self, x): return Thing(self.n * x.n)

def work(queue, thing):
    queue.put((thing(Thing(6)), os.getppid()))

def fail(queue, thing):
    1 / 0

def hang(queue, thing):
    queue.put("hanging")
    import time
    time.sleep(60)

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    queue = context.Queue()
    process = context.Process(target=work, args=(queue, Thing(7)))
    process.start()
    thing, parent = queue.get()
    process.join()
    print(type(thing) is Thing, thing.n, parent == os.getpid(), process.exitcode)
    process = context.Process(target=fail, args=(queue, None))
    process.start()
    process.join()
    print(process.exitcode)
    process = context.Process(target=hang, args=(queue, None))
    process.start()
    print(queue.get())
    process.terminate()
    process.join()
    print(process.exitcode)
"""


def test_classes_of_the_script_can_be_pickled(folder: Path) -> None:
    write(folder, "script.py", PICKLE)
    ran = both(folder, "script.py")
    assert same(ran) == ["began", "0", "ended"]
    assert ran.plain.out == "__main__ {'x': <class 'int'>} typed\n"


@pytest.mark.parametrize("command", [["script.py", "fork"], ["script.py", "spawn"], ["-m", "package.script", "spawn"]])
def test_worker_processes_run_as_in_plain_python(folder: Path, command: list[str]) -> None:
    write(folder, "script.py", PROCESSES)
    write(folder, "package/__init__.py", "")
    write(folder, "package/script.py", PROCESSES)
    ran = both(folder, *command)
    assert same(ran) == ["began", "0", "ended"]
    assert ran.plain.out == "True 42 True 0\n1\nhanging\n-15\n"
    assert ran.plain.err.count("ZeroDivisionError") == 1


FORKED = {
    "": 0,
    "sys.exit(5)": 5,
    "sys.exit('text')": 1,
    "1 / 0": 1,
    "raise KeyboardInterrupt": -2,
    "os.kill(os.getpid(), signal.SIGTERM)": -15,
    "os._exit(6)": 6,
}
"""How the processes end that a script forks, and their exit codes."""


def test_forked_processes_end_as_in_plain_python_without_a_report(folder: Path) -> None:
    script = (
        "import atexit, os, signal, sys, threading\n"
        "atexit.register(print, 'atexit')\n"
        f"for line in {[*FORKED]}:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        threading.Thread(target=lambda: (threading.main_thread().join(60), print('thread'))).start()\n"
        "        print('child', line, flush=True)\n        exec(line)\n        break\n"
        "    print('parent', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
    )
    write(folder, "script.py", script)
    ran = both(folder, "script.py", flags=("-W", "ignore"))
    assert same(ran) == ["began", "0", "ended"]
    at_exit = {line: "" if code in (-15, 6) else "thread\natexit\n" for line, code in FORKED.items()}
    ends = [f"child {line}\n{at_exit[line]}parent {code}\n" for line, code in FORKED.items()]
    assert ran.plain.out == "".join([*ends, "atexit\n"])


# The second pass, under cProfile.

COUNTED = """
import math, os, sys

class Net:
    def forward(self, n):
        return [math.factorial(k) for k in range(n)] if n else loop(3)

def loop(n):
    for k in range(n):
        loop(k)

def main():
    net = Net()
    for _ in range(7):
        net.forward(4)
    net.forward(0)
    print(sys.argv[1:], file=sys.stderr)
    print("shown?")

if __name__ == "__main__":
    main()
"""


def counts(functions: tuple[PythonFunction, ...], file: str) -> dict[tuple[int, str], int]:
    return {(one.line, one.function): one.calls for one in functions if one.file == file}


def test_the_second_pass_counts_what_cprofile_counts(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = str(write(folder, "script.py", COUNTED))
    found = profile_python(Script("script.py", ["a", "-m"], folder=str(folder)))
    assert found.code == 0
    assert found.errors == "['a', '-m']\n"
    assert capfd.readouterr() == ("", "")
    assert counts(found.functions, file)[5, "forward"] == 8
    assert counts(found.functions, file)[8, "loop"] == 8  # loop(3): one, and 1 + 2 + 4 inside

    out = folder / "stats"
    command = [PYTHON, "-m", "cProfile", "-o", str(out), "script.py"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True, timeout=300)
    truth = pstats.Stats(str(out)).stats  # type: ignore[attr-defined]
    assert counts(found.functions, file) == {
        key[1:]: row[1] for key, row in truth.items() if Path(key[0]).name == "script.py"
    }
    builtin = {one.function: one.calls for one in found.functions if one.file == "~"}
    assert builtin["<built-in method math.factorial>"] == 28
    assert not [one for one in found.functions if "torch" in one.file or "_lsprof" in one.function]
    total = {one.function: one.total_ns for one in found.functions if one.file == file}
    own = {one.function: one.self_ns for one in found.functions if one.file == file}
    assert total["<module>"] >= total["main"] >= total["forward"] >= total["loop"] >= own["loop"] > 0
    assert [one.self_ns for one in found.functions] == sorted((one.self_ns for one in found.functions), reverse=True)


@pytest.fixture
def no_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of modules for a second pass that finds no torch: it starts in 0.1 s instead of 2."""
    write(tmp_path / "no_torch", "torch.py", "raise ImportError")
    path = os.pathsep.join([str(tmp_path / "no_torch"), str(ROOT)])
    monkeypatch.setenv("PYTHONPATH", path)
    return path


PASSES = {
    "exits": ("sys.exit(3)", 3, "", True),
    "fails": ("raise ValueError('second')", 1, "ValueError: second\n", True),
    "reads": ("input()", 1, "EOFError: EOF when reading a line\n", True),
    "is interrupted": ("raise KeyboardInterrupt", 130, "KeyboardInterrupt\n", True),
    "is terminated": ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "", True),
    "leaves at once": ("import os; os._exit(6)", 6, "", False),
    "says much": ("print('x' * 99999 + 'end', file=sys.stderr)", 0, "xend\n", True),
}


@pytest.mark.usefixtures("no_torch")
@pytest.mark.parametrize("name", PASSES)
def test_the_second_pass_survives_how_a_script_ends(folder: Path, name: str) -> None:
    line, code, errors, recorded = PASSES[name]
    write(folder, "package/script.py", f"import sys\ndef work():\n    pass\nwork()\n{line}\n")
    found = profile_python(Script("package.script", is_module=True, folder=str(folder)))
    assert found.code == code
    assert found.errors.endswith(errors) and len(found.errors) <= 4000
    assert bool(errors) == bool(found.errors)
    assert [one.calls for one in found.functions if one.function == "work"] == [1] * recorded


@pytest.mark.usefixtures("no_torch")
def test_the_second_pass_starts_in_the_same_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import json, os, sys\njson.dump([os.getcwd(), os.environ['HERE'], sys.path], open('seen', 'w'))\n"
    write(folder, "script.py", text)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HERE", "first")
    script = Script("script.py")
    monkeypatch.chdir("/")
    monkeypatch.setenv("HERE", "later")
    assert profile_python(script).code == 0
    found = json.loads((folder / "seen").read_text())
    subprocess.run([PYTHON, "script.py"], cwd=folder, env={**os.environ, "HERE": "first"}, check=True, timeout=300)
    assert found == json.loads((folder / "seen").read_text())


def test_the_second_pass_has_the_same_flags_and_does_not_read_stdin(folder: Path, no_torch: str) -> None:
    text = "import sys\nprint(sys.flags, sys.warnoptions, file=open('seen', 'a'))\nprint('shown', *sys.stdin)\n"
    write(folder, "script.py", text)
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    process = start(folder, "-O", "-W", "error::UserWarning", str(driver), "script.py", PASS="1", PYTHONPATH=no_torch)
    assert process.communicate("typed", timeout=60) == ("shown typed\n", "")
    first, second = (folder / "seen").read_text().splitlines()
    assert first == second and "optimize=1" in first and "error" in first


def test_the_second_pass_does_not_outlive_this_process(folder: Path, no_torch: str) -> None:
    text = "import os, time\nopen('new', 'w').write(str(os.getpid()))\nos.rename('new', 'pid')\ntime.sleep(60)\n"
    write(folder, "script.py", text)
    driver = write(folder.parent / "driver", "driver.py", DRIVER)
    process = start(folder, str(driver), "script.py", PASS="1", PYTHONPATH=no_torch)
    until = time.monotonic() + 60
    while not (folder / "pid").exists():
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.01)
    process.terminate()
    assert process.communicate(timeout=60) == ("", "")
    assert process.returncode == -signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)
