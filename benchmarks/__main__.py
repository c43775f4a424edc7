"""``python -m benchmarks [--quick] [QUESTION ...]``: run all questions, or the given ones, each in a new process."""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

QUESTIONS = {
    "inside": "what the block costs while the model runs",
    "block": "what the whole block with one forward costs, and the table after it, beside other profilers",
    "reading": "what it takes from the profiler's stop to the printed table",
    "flops": "what counting FLOPs costs",
    "memory": "what the analysis of memory over time costs",
    "display": "what drawing the table of a large model takes",
    "importing": "what importing torchprof takes",
    "program": "what torchprof run costs while a script runs",
    "scripts": "what whole scripts take under torchprof run, beside other profilers (25 minutes)",
    "edges": "what entering and leaving the block takes, and what a disabled one costs",
    "page": "what the HTML report of 10,000 layers takes to write, and to answer a click in a browser",
    "traces": "what reading a trace takes, beside json.load of the same file",
    "alignment": "what it costs to find the layers of a trace that names none, beside reading it without layers",
    "merge": "what merging the runs of 64 to 4,096 ranks and writing their page takes: time and memory",
    "job_folder": "what a job folder of 64 to 4,096 ranks takes: bytes, writing, and who is slow",
    "stragglers": "how often the ranks report names a rank, in simulated jobs with and without a slow one",
    "delays": "how often the rank and the place of a planted delay are named, in real jobs (25 minutes)",
    "gather": "what comparing the ranks of a large job inside of it takes, at its end and during training",
    "compile": "how much is known of compiled models layer by layer, and what that costs",
    "device": "what profiling training steps costs on a GPU; on the CPU, with small models, where there is none",
    "faults": "what the first screen says of scripts with a planted fault, beside other profilers (20 minutes)",
    "trials": "whether remedies gain in a script what their trials have measured (12 minutes)",
    "memory_faults": "the same for faults of memory, and whether the remedy lowers the peak (4 minutes)",
    "fuzz": "whether damaged files of every kind are read or refused, and nothing else (30 minutes)",
    "growth": "how time and memory of reading and drawing grow with the file, by what grows in it (5 minutes)",
    "loops": "what a long loop takes: memory after the first and the last cycles, reading one, and watching the loop",
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="What torchprof costs, as ratios within one run, with their limits.",
        epilog="\n".join(f"{name:<10} {text}" for name, text in QUESTIONS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help=f"of: {', '.join(QUESTIONS)}; default: all")
    parser.add_argument(
        "--quick", action="store_true", help="shows in half a minute that all of it runs, not what it costs"
    )
    options = parser.parse_args()
    for name in options.questions:
        if name not in QUESTIONS:
            parser.error(f"there is no question {name!r}; there are {', '.join(QUESTIONS)}")
    start = time.perf_counter()
    failed = False
    for name in options.questions or QUESTIONS:
        command = [sys.executable, "-m", f"benchmarks.{name}", *(["--quick"] if options.quick else [])]
        failed |= subprocess.run(command, check=False).returncode != 0
    print(f"It took {time.perf_counter() - start:.0f} s.", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
