"""The time and the peak memory to merge the runs of many ranks, and to write their page, compared with ``json.load`` of
the same files.

One run is recorded, of some training steps of BERT-base. The runs of the ranks are made from it: they have the same
rows with different numbers, as in data-parallel training. ``json.load`` does not keep what it loads. ``torchprof show``
writes the page of the files, end to end: of more than 256 ranks it compares all and loads some, so it alone is measured
with more ranks than are merged here. Each variant runs in its own process, since the peak memory of a process never
falls. It is measured on Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

from benchmarks.ratios import say, show, verdict

RANKS = (64, 256, 1024, 4096)
MERGED = 1024  # of more ranks, not all are merged: that of 4,096 takes 6 GB
GROUP = 32
SECONDS = 60.0
GIGABYTES = 2.0
PAGE_SECONDS = 15.0  # for each 1,024 ranks
STEPS = 3
COLLECTIVES = 200  # in each step
JSON = "json.load"
SHOW = "torchprof show -o page.html"
WAYS = {
    "torchprof.merge": "flat",
    f"by {os.cpu_count()} processes": "processes",
    f"in groups of {GROUP}": "tree",
    SHOW: "show",
    JSON: "json",
}


def measure(quick: bool, of_so_many: Callable[[Path, int, str], None]) -> None:
    """Measure jobs of several sizes: ``of_so_many`` gets the folder of the runs, their number, and the model."""
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (4, 8) if quick else RANKS:
            write(Path(folder), ranks, quick)
            of_so_many(Path(folder), ranks, "AlexNet" if quick else "BERT-base")


def of_so_many(folder: Path, ranks: int, model: str) -> None:
    answers = {}
    for way, asked in WAYS.items():
        if ranks <= MERGED or way in (SHOW, JSON):
            say(f"merging {ranks:,} ranks, {way}")
            answers[way] = ask_fresh_process(asked, folder, ranks)
    plain = answers[JSON]["cpu"]
    megabytes = sum(file.stat().st_size for file in files_of(folder, ranks)) / 1e6
    show(
        f"Merging {ranks:,} ranks, each of {STEPS} training steps of {model}: {megabytes:,.0f} MB of files",
        ["", "Time", "CPU time", "Beside json.load", "Peak of memory", "The page after it", "Limits"],
        [
            [
                way,
                f"{answer['seconds']:.1f} s",
                f"{answer['cpu']:.1f} s",
                f"{answer['cpu'] / plain:.1f}x",
                f"{answer['peak'] / 1e9:.2f} GB",
                f"{answer['page']:.1f} s, {answer['megabytes']:.2f} MB" if "page" in answer else "",
                limits(way, answer, ranks),
            ]
            for way, answer in answers.items()
        ],
        "Time: to read and merge; of torchprof show, to write and print, too. CPU time: of all processes. Memory: of "
        "the first one. The page after it: its CPU time and size.",
    )


def limits(way: str, answer: dict[str, float], ranks: int) -> str:
    """Whether the figures of a variant are within their limits."""
    of_page = PAGE_SECONDS * max(ranks / 1024, 1)
    if way == JSON:
        return ""
    if way == SHOW:
        return f"{verdict(answer['seconds'], of_page)} (s)"
    kept = f"{verdict(answer['seconds'], SECONDS)} (s), {verdict(answer['peak'] / 1e9, GIGABYTES)} (GB)"
    return f"{kept}, {verdict(answer['page'], of_page)} (page)" if "page" in answer else kept


def ask_fresh_process(way: str, folder: Path, ranks: int) -> dict[str, float]:
    """The output of this file in a new process."""
    command = [sys.executable, "-m", "benchmarks.merge", "--way", way, "--folder", str(folder), "--ranks", str(ranks)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def merge(way: str, folder: Path, ranks: int) -> dict[str, float]:
    """The seconds and the CPU seconds of one variant, and the peak memory of its process in bytes; of a merged run also
    the CPU seconds and the megabytes of its page."""
    from torchprof import load
    from torchprof import merge as merged
    from torchprof.cli import main as main_of_torchprof

    files = files_of(folder, ranks)
    run = None
    start, cpu = time.perf_counter(), cpu_seconds()
    if way == "json":
        for file in files:
            json.loads(file.read_bytes())
    elif way == "show":
        with redirect_stdout(StringIO()):
            assert main_of_torchprof(["show", *map(str, files), "-o", str(folder / "page.html")]) == 0
    elif way == "processes":
        run = load(files, processes=os.cpu_count() or 1)
    else:
        size = GROUP if way == "tree" else ranks
        run = merged(merged(map(load, files[at : at + size])) for at in range(0, ranks, size))
    answer = {"seconds": time.perf_counter() - start, "cpu": cpu_seconds() - cpu, "peak": peak_resident()}
    if way != "flat":
        return answer
    assert run is not None and len(run.metas) == ranks
    start = time.process_time()
    megabytes = len(run.report("html")) / 1e6
    return {**answer, "page": time.process_time() - start, "megabytes": megabytes}


def cpu_seconds() -> float:
    """The CPU time of this process, and of those that it started and that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def peak_resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("Only Linux tells the peak of a process.")


def files_of(folder: Path, ranks: int) -> list[Path]:
    return [folder / f"rank{rank}.json" for rank in range(ranks)]


def write(folder: Path, ranks: int, quick: bool) -> None:
    """Write the runs of the ranks that have no file yet."""
    files = {rank: file for rank, file in enumerate(files_of(folder, ranks)) if not file.exists()}
    first = folder / "first.json"
    if not first.exists():
        say("recording the run that the ranks are made of")
        first.write_text(recorded(quick), encoding="utf-8")
    text = first.read_text(encoding="utf-8")
    say(f"writing {len(files):,} files")
    for rank, file in files.items():
        file.write_text(json.dumps(of_rank(json.loads(text), rank), separators=(",", ":")), encoding="utf-8")


def recorded(quick: bool) -> str:
    """A run of one rank, as the text of its file."""
    import torch

    import torchprof
    from benchmarks.subjects import subjects
    from torchprof.run.file import json_of_run
    from torchprof.run.lockstep import EXCHANGES, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
    from torchprof.run.measures import SampleKey
    from torchprof.run.words import FORWARD, OUTSIDE

    subject = subjects(quick)[-1]
    optimizer = torch.optim.SGD(subject.model.parameters(), lr=0.0)
    with torchprof.Profile(subject.model, profile_memory=True, with_flops=True) as prof:
        for _ in range(STEPS):
            result = subject.forward()
            (result[0] if isinstance(result, tuple) else result).sum().backward()
            del result
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    run = prof.run
    lockstep = {
        LockstepKey(key.layer, key.phase, "cpu", WORK): Lockstep.of(0, spread.sample)
        for key, spread in run.samples.items()
        if key.measure == "step_cpu_ns"
    }
    steps = run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")].sample
    lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)] = Lockstep.of(0, steps)
    group = GroupOfRanks("0", "default_pg", max(RANKS))
    lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", EXCHANGES, group)] = Lockstep.of(0, steps)
    times = [random.randrange(10**6) for _ in range(STEPS * COLLECTIVES)]
    lockstep[LockstepKey(OUTSIDE, FORWARD, "cpu", "all_reduce", group)] = Lockstep.of(0, times)
    return json_of_run(replace(run, metas=(replace(run.meta, world_size=max(RANKS)),), lockstep=lockstep))


def of_rank(document: dict[str, Any], rank: int) -> dict[str, Any]:
    """The file of a run, changed to another rank: it took up to twice as long, and began at another time."""
    chance = random.Random(rank)
    slower = 1 + chance.random()

    def scaled(values: list[int]) -> list[int]:
        return [int(value * slower) for value in values]

    rows = document["rows"]
    rows.update(rank=[rank] * len(rows["rank"]), cpu_ns=scaled(rows["cpu_ns"]))
    for one in (*document["metas"], *document["samples"], *document["memory"]):
        one["rank"] = rank
    for sample in document["samples"]:
        names = ("sum", "min", "max", "first")
        sample.update(zip(names, scaled([sample[name] for name in names])))
        sample["sample"] = scaled(sample["sample"])
        sample["hashes"] = [chance.getrandbits(63) for _ in sample["hashes"]]
    for together in document["lockstep"]:
        times = scaled(together["last_ns"])
        together.update(ranks=[rank], last_rank=[rank] * len(times), last_ns=times, ns=scaled(together["ns"]))
    return document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few ranks: shows that it runs, not what it costs")
    parser.add_argument("--way", choices=tuple(WAYS.values()), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ranks", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(merge(options.way, options.folder, options.ranks)))
    else:
        measure(options.quick, of_so_many)


if __name__ == "__main__":
    main()
