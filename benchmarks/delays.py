"""In how many jobs with a planted delay the rank and the place of it are named, and that none is named without one.

Real jobs of 2 to 4 processes on this machine, in which one rank takes 80 ms more in each step, in one place: ranks that
train the same model, and the stages of a pipeline. Judged is the report "ranks" of the gathered run. On a busy machine,
processes that get less of a processor are stragglers, too.

``SCRIPTS`` are the scripts. Each has ``PLACES``, with words of the report for each, and ``SLOW_RANK``; called with
"gather" and a place, or "nowhere", it writes ``job.json``.
"""

from __future__ import annotations

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torchprof
from benchmarks.ratios import say, show, verdict
from torchprof.ranks import balance_of
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.ranks.sentences import sentences

_ROOT = Path(__file__).parents[1]
SCRIPTS = tuple(_ROOT / "test" / "build" / f"delayed_{what}.py" for what in ("training", "pipeline"))
NOWHERE = "nowhere"
JOBS = 20
RANKS = (2, 3, 4)  # of the first job, the second, the third, and again
TIMEOUT_S = 120


class Planted(NamedTuple):
    """A place of the delay: what the report says of it, and the rank that has it; None for both without a delay."""

    script: Path
    place: str
    words: str | None = None
    rank: int | None = None

    def is_named_in(self, run: torchprof.Run) -> tuple[bool, bool]:
        """Whether the report names this rank and no other one, or none if none has a delay; and whether it names the
        place. A microbatch may be named without a rank: it is long in one stage."""
        balance = balance_of(run)
        stages = [judged.slow for judged in judged_pipelines(run)]
        parts = (balance.slow, balance.late, *stages)
        named = {rank for part in parts if part is not None for rank in part.ranks}
        text = " ".join(sentences(run, balance))
        expected = set() if self.rank is None else {self.rank}
        in_place = named <= expected and (self.words or "") in text
        return named == expected or (self.words is not None and in_place), in_place


def places() -> Iterator[Planted]:
    for script in SCRIPTS:
        names = runpy.run_path(str(script))
        for place, words in names["PLACES"].items():
            yield Planted(script, place, words, names["SLOW_RANK"])
        yield Planted(script, NOWHERE)


def run_of_job(planted: Planted, ranks: int) -> torchprof.Run:
    with tempfile.TemporaryDirectory() as folder:
        job = ("--standalone", "--nproc-per-node", str(ranks), str(planted.script), "gather", planted.place)
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", *job],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(_ROOT), "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99"},
            stderr=subprocess.DEVNULL,
            timeout=TIMEOUT_S,
            check=True,
        )
        return torchprof.load(Path(folder) / "job.json")


def judged(planted: Planted, jobs: int) -> list[str]:
    """A row of the table."""
    named = []
    for number in range(jobs):
        say(f"{planted.place}: {number + 1} of {jobs}", again=number > 0)
        named.append(planted.is_named_in(run_of_job(planted, RANKS[number % len(RANKS)])))
    right, in_place = (sum(of_all) for of_all in zip(*named))
    place = "" if planted.words is None else f"{in_place} of {jobs}"
    least = min(right, in_place)
    return [planted.script.stem, planted.place, f"{right} of {jobs}", place, verdict(least, jobs, at_least=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one job of each place: shows that it runs")
    jobs = 1 if parser.parse_args().quick else JOBS
    show(
        "Jobs in which the rank with the delay is named, alone; without a delay: in which none is",
        ["Job", "Place", "Rank", "Place named", "Limit"],
        [judged(planted, jobs) for planted in places()],
    )


if __name__ == "__main__":
    main()
