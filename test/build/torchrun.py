"""Start a job of several processes on this machine, as ``torchrun`` does, and give back what each rank said."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from build.places import ROOT

_GRACE_S = 60  # torchrun itself gives its processes 30 s after SIGTERM, and then kills them


@dataclass(frozen=True)
class Job:
    """How a job ended: the exit code of torchrun, and by rank what each process wrote to stdout and stderr.

    ``said`` is what torchrun itself wrote: which rank failed first, and how.
    """

    code: int
    out: tuple[str, ...]
    errors: tuple[str, ...]
    said: str

    def __str__(self) -> str:
        """All of it, for the message of a test that failed."""
        ranks = [f"rank {rank}:\n{out}{error}" for rank, (out, error) in enumerate(zip(self.out, self.errors))]
        return "\n".join([f"exit code {self.code}", *ranks, self.said])


def torchrun(
    folder: Path,
    ranks: int,
    script: str,
    *arguments: str,
    module: bool = False,
    environment: Mapping[str, str] | None = None,
    timeout_s: float = 150,
) -> Job:
    """Run the text of a script on so many ranks, in ``folder``, and wait until all of them have ended.

    A ``script`` without a line's end is no text: it is the file to run, or with ``module`` the name of a module. Each
    process has one thread for its operators, and torchprof and the tests' own modules on its path. Raises
    TimeoutError, with all that was said, where the job takes longer than ``timeout_s``; nothing of it is left then.
    """
    if "\n" in script:
        folder.joinpath("job.py").write_text(script, encoding="utf-8")
        script = "job.py"
    number = sum(1 for _ in folder.glob("logs-*"))
    logs = folder / f"logs-{number}"
    paths = [str(ROOT), str(ROOT / "test"), *filter(None, [os.environ.get("PYTHONPATH")])]
    command = [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(ranks), "--redirects", "3", "--log-dir", str(logs)),
        *(["-m"] if module else []),
        script,
        *arguments,
    ]
    with subprocess.Popen(
        command,
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "KINETO_LOG_LEVEL": "99",
            "OMP_NUM_THREADS": "1",
            **(environment or {}),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as agent:
        late = False
        try:
            said, _ = agent.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            late = True
            agent.send_signal(signal.SIGTERM)  # it ends its processes, too
            try:
                said, _ = agent.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                agent.kill()
                raise
    job = Job(agent.returncode, *(tuple(_logs(logs, ranks, name)) for name in ("stdout.log", "stderr.log")), said)
    if late:
        raise TimeoutError(f"The job took longer than {timeout_s} s. {job}")
    return job


def _logs(folder: Path, ranks: int, name: str) -> list[str]:
    """What torchrun kept of each rank: in ``<folder>/<id of the job>/attempt_0/<rank>/``."""
    files = {int(file.parent.name): file for file in folder.glob(f"*/attempt_0/*/{name}")}
    return [files[rank].read_text(encoding="utf-8") if rank in files else "" for rank in range(ranks)]
