"""Python commands in processes that have torch imported already: they start in 0.1 s instead of 2.

A server process imports torch once and forks for each command (``multiprocessing``'s "forkserver"). What a command does
after that is its own: arguments, environment, folder, streams, exit code. torchprof is not imported before. Variables
that Python or torch read when they start have the values of pytest's environment; OMP_NUM_THREADS is applied again.

Not for tests of how a process starts or ends: signals, closed streams, encodings, child processes, a script without
torch. For those start a Python of their own.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from build.places import ROOT
from build.torchrun import Job

_FORKS = multiprocessing.get_context("forkserver")
# Optimizers import torch._dynamo.
_FORKS.set_forkserver_preload(["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor"])


class WarmPython:
    """A command that runs: ``arguments`` are those of ``python``, a file or ``-m`` and a module first. Its streams are
    the device ``terminal``, or files."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], terminal: str = ""
    ) -> None:
        self._arguments = [str(one) for one in arguments]
        self._streams = Path(tempfile.mkdtemp(prefix="streams-", dir=folder.parent))
        for name in ("out", "error"):
            (self._streams / name).touch()
        self._process = _FORKS.Process(
            target=_run, args=(self._arguments, str(folder), dict(environment), str(self._streams), terminal)
        )
        self._since = time.monotonic()
        self._process.start()

    def wait(self, until: float) -> subprocess.CompletedProcess[str]:
        """How it ended. It is killed if it still runs at ``until`` (``time.monotonic``): TimeoutExpired is raised."""
        try:
            self._process.join(max(0.0, until - time.monotonic()))
            code = self._process.exitcode
        finally:
            self.kill()
        out, error = ((self._streams / name).read_text(encoding="utf-8") for name in ("out", "error"))
        shutil.rmtree(self._streams)
        if code is None:
            raise subprocess.TimeoutExpired(self._arguments, until - self._since, out, error)
        return subprocess.CompletedProcess(self._arguments, code, out, error)

    def kill(self) -> None:
        """Kill the process if it still runs: ``multiprocessing`` waits for it without a limit when pytest ends."""
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join(30)


def run_warm(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None, timeout_s: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run ``python`` with these arguments in ``folder`` and wait until it ends."""
    return WarmPython(arguments, folder, _environment(environment)).wait(time.monotonic() + timeout_s)


def warm_job(folder: Path, ranks: int, *arguments: str, timeout_s: float = 150) -> Job:
    """Run a command on so many ranks, with the environment that torchrun gives them, and wait until all have ended.

    For jobs that end well: nobody ends the other ranks when one has failed, and the store is that of rank 0.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    until = time.monotonic() + timeout_s
    of_all = {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": f"job-{port}",
    }
    started: list[WarmPython] = []
    try:
        for rank in range(ranks):
            environment = _environment({**of_all, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            started.append(WarmPython(arguments, folder, environment))
        ended = [one.wait(until) for one in started]
    finally:  # if one was too late, the others are not waited for
        for one in started:
            one.kill()
    code = next((one.returncode for one in ended if one.returncode), 0)
    return Job(code, tuple(one.stdout for one in ended), tuple(one.stderr for one in ended), "")


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    paths = [str(ROOT), str(ROOT / "test"), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "KINETO_LOG_LEVEL": "99", "OMP_NUM_THREADS": "1"}
    return {**os.environ, **own, **(more or {})}


def _run(arguments: list[str], folder: str, environment: dict[str, str], streams: str, terminal: str) -> None:
    """Do in the forked process what ``python`` does with these arguments."""
    _open_streams(Path(streams), terminal)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for name in [name for name in sys.modules if name.split(".")[0] in ("build", "__mp_main__")]:
        del sys.modules[name]
    first, *rest = arguments
    is_module = first == "-m"
    here = "" if is_module else str(Path(first).resolve().parent)
    of_python = [path for path in sys.path if path.startswith((sys.prefix, sys.base_prefix))]
    sys.path[:] = [here, *environment["PYTHONPATH"].split(os.pathsep), *of_python]
    sys.argv[:] = rest if is_module else arguments
    _set_threads(int(environment["OMP_NUM_THREADS"]))
    code = 0
    try:
        if is_module:
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(first, run_name="__main__")
    except SystemExit as ended:
        code = _exit_code(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]  # as Python does before it calls what is registered
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _set_threads(number: int) -> None:
    import torch

    torch.set_num_threads(number)  # OpenMP read OMP_NUM_THREADS in the server, when torch was imported


def _open_streams(folder: Path, terminal: str) -> None:
    for number, opened in (
        (0, os.open(terminal or os.devnull, os.O_RDONLY)),
        (1, os.open(terminal or folder / "out", os.O_WRONLY)),
        (2, os.open(terminal or folder / "error", os.O_WRONLY)),
    ):
        os.dup2(opened, number)
        os.close(opened)
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, encoding="utf-8", errors="backslashreplace", closefd=False)


def _exit_code(given: Any) -> int:
    if given is None or isinstance(given, int):
        return given or 0
    print(given, file=sys.stderr)
    return 1
