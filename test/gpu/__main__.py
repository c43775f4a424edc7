"""``python -m gpu`` (in ``test``): everything that only a device can show, in parts, each with a limit of time.

It needs torch, pytest and tabulate, and no installation. One folder has the results: ``log.txt``, ``figures.jsonl`` (a
figure in each line) and ``recordings.zip``, which ``unzip -d test/data/gpu`` puts where the ordinary tests read it. A
part that fails or takes too long does not stop the others. Without a device it says so and ends with 0.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TextIO

sys.path.insert(0, str(Path(__file__).parents[2]))  # torchprof, which needs no installation
try:
    import torch
    from build.machine import DEVICE, FOLDER
    from build.places import ROOT
except ImportError as missing:
    sys.exit(f"This needs torch, tabulate and pytest in {sys.executable}: {missing}. Nothing was run.")

MINUTES = 9.0


class Part(NamedTuple):
    """A part: what it shows, the arguments of Python, and its limit in seconds."""

    shows: str
    arguments: tuple[str, ...]
    seconds: int


def tests(name: str, shows: str, seconds: int) -> Part:
    options = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--show-capture=no", "-W", "ignore")
    return Part(shows, (*options, f"test/gpu/test_gpu_{name}.py"), seconds)


COST = ("-m", "benchmarks.device", "--device", "{device}", "--figures", "{folder}/figures.jsonl")
PARTS = {
    "recordings": tests("recordings", "reference recordings of training and decoding, made and read back", 90),
    "kernels": tests("kernels", "all kernels, copies and sets, by layer; streams, types, attention", 75),
    "waits": tests("waits", "what a thread waits for, against the trace and a clock", 40),
    "memory": tests("memory", "the peak and the bytes of each layer, against the allocator", 60),
    "flops": tests("flops", "FLOPs against the CPU's and torch's counter; what the device can do", 75),
    "graphs": tests("graphs", "CUDA graphs: capture, replay, what layers they belong to", 40),
    "cost": Part("what profiling costs, against torch's own profiler", COST, 160),
    "advice": tests("advice", "each planted fault is found", 40),
    "ranks": tests("ranks", "collectives of a job of one process", 30),
    "pipelines": tests("pipelines", "the times of a pipeline's stages, against the device's clock", 40),
    "compiled": tests("compiled", "torch.compile in its modes, by layer", 240),
}
"""The most telling first: what comes last may run out of time."""


def main() -> int:
    lines = "\n".join(f"{name:<11} {part.shows}" for name, part in PARTS.items())
    parser = argparse.ArgumentParser(
        prog="python -m gpu",
        description=__doc__,
        epilog=f"parts:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="which parts; default: all")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), help="default: cuda; cpu shows that the tests themselves work"
    )
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "gpu", help="the folder of the results")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"for all parts together; default: {MINUTES:g}")
    options = parser.parse_args()
    for name in options.parts:
        if name not in PARTS:
            parser.error(f"there is no part {name!r}; there are {', '.join(PARTS)}")
    device = options.device or "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here, so nothing was run. --device cpu shows that the tests themselves work.")
        return 0
    folder = options.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for file in ("log.txt", "figures.jsonl", "recordings.zip"):
        (folder / file).unlink(missing_ok=True)
    with (folder / "log.txt").open("w", encoding="utf-8") as log:
        name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        tell(log, f"torch {torch.__version__}, Python {sys.version.split()[0]}, {name}")
        return run(options.parts or list(PARTS), device, folder, options.minutes, log)


def run(names: Sequence[str], device: str, folder: Path, minutes: float, log: TextIO) -> int:
    """Run the parts and print a line for each. Returns how many failed."""
    end = time.monotonic() + 60 * minutes
    environment = {
        **os.environ,
        DEVICE: device,
        FOLDER: str(folder),
        "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "test"))),
        "KINETO_LOG_LEVEL": "99",
    }
    failed = 0
    for name in names:
        part, left = PARTS[name], end - time.monotonic()
        if left < 15:
            tell(log, f"{name}: NOT RUN, no time is left")
            failed += 1
            continue
        log.write(f"\n===== {name}: {part.shows}\n")
        log.flush()
        start = time.monotonic()
        # A process of its own: one that crashes or hangs in a driver takes nothing with it.
        process = subprocess.Popen(
            [sys.executable, *(argument.format(device=device, folder=folder) for argument in part.arguments)],
            cwd=ROOT,
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | str = process.wait(min(part.seconds, left))
        except subprocess.TimeoutExpired:
            code = "took too long"
            os.killpg(process.pid, 9)
            process.wait()
        result = "passed" if code == 0 else f"FAILED ({code})"
        failed += code != 0
        tell(log, f"{name}: {result} after {time.monotonic() - start:.0f} s")
    print(f"Log, figures and recordings are in {folder}.", flush=True)
    return failed


def tell(log: TextIO, line: str) -> None:
    log.write(f"{line}\n")
    log.flush()
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
