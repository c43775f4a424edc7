"""What a job folder of many ranks takes: bytes for each rank, seconds to write it, and seconds for "who is slow".

The runs of the ranks are those of ``benchmarks.merge``. Each part runs in its own process, since the peak memory of a
process never falls. It is measured on Linux only.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.merge import STEPS, files_of, measure, peak_resident
from benchmarks.ratios import say, show, verdict

SECONDS_TO_ASK = 2.0
GIGABYTES = 0.5
PAGE = Path(__file__).parent.parent / "docs" / "job-folder.md"


def of_so_many(folder: Path, ranks: int, model: str) -> None:
    answers = {}
    for part in PARTS:
        say(f"{ranks:,} ranks: {part}")
        answers[part] = ask_fresh_process(part, folder, ranks)
    job = job_of(folder, ranks)
    sizes = [
        f"{table} {sum(file.stat().st_size for file in (job / table).iterdir()) / ranks / 1e3:.1f} KB"
        for table in ("steps", "rows", "ranks")
    ]
    before = sum(file.stat().st_size for file in files_of(folder, ranks)) / ranks / 1e3
    show(
        f"A job folder of {ranks:,} ranks, each of {STEPS} training steps of {model}",
        ["", "Time", "Peak of memory", "Limits"],
        [
            [part, f"{answer['seconds']:.2f} s", f"{answer['peak'] / 1e9:.2f} GB", limit_of(part, answer)]
            for part, answer in answers.items()
        ],
        f"A rank has {', '.join(sizes)}; its JSON file had {before:.1f} KB.",
    )


def limit_of(part: str, answer: dict[str, float]) -> str:
    if part == "write":
        return f"{verdict(answer['peak'] / 1e9, GIGABYTES)} (GB)"
    return f"{verdict(answer['seconds'], SECONDS_TO_ASK)} (s)" if part == "who is slow" else ""


def ask_fresh_process(part: str, folder: Path, ranks: int) -> dict[str, float]:
    """The output of this file in a new process."""
    options = ["--part", part, "--folder", str(folder), "--ranks", str(ranks)]
    command = [sys.executable, "-m", "benchmarks.job_folder", *options]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def job_of(folder: Path, ranks: int) -> Path:
    return folder / f"job-of-{ranks}"


def write_folder(folder: Path, ranks: int) -> None:
    import torchprof

    for file in files_of(folder, ranks):
        torchprof.load(file).save(f"{job_of(folder, ranks)}/")


def ask(folder: Path, ranks: int) -> None:
    """The query of the page, over the files of all ranks."""
    import torchprof

    query = re.findall(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)[0]
    assert torchprof.open_job(job_of(folder, ranks)).sql(query).fetchall()


def choose(folder: Path, ranks: int) -> None:
    """What ``torchprof show job/`` does for a large job: choose ranks, and merge them."""
    import torchprof
    from torchprof.ranks.sentences import chosen_ranks

    job = torchprof.open_job(job_of(folder, ranks))
    job.run(chosen_ranks(job.comparison()))


PARTS: dict[str, Callable[[Path, int], None]] = {
    "write": write_folder,
    "who is slow": ask,
    "choose and load ranks": choose,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few ranks: shows that it runs, not what it costs")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.part:
        measure(options.quick, of_so_many)
        return
    start = time.perf_counter()
    PARTS[options.part](options.folder, options.ranks)
    print(json.dumps({"seconds": time.perf_counter() - start, "peak": peak_resident()}))


if __name__ == "__main__":
    main()
