"""The whole block, as a user waits for it: entering, one forward, leaving; and then the printed table.

Torch's own profiler and flops-profiler (``pip install flops-profiler``; left out where it is not installed) stand
beside it. Each measurement is a new block of a model that was called before.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, show, take_turns
from benchmarks.subjects import Subject, bare, subjects

BLOCK = {"500 tiny Linear": 10.0, "AlexNet 1x3x224x224": 1.2, "BERT-base 1x128": 1.1}
ROUNDS = {"500 tiny Linear": 40, "AlexNet 1x3x224x224": 40, "BERT-base 1x128": 15}
OBJECTS = 5_000_000


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    of_blocks(quick)
    of_large_heaps(quick)


def of_blocks(quick: bool) -> None:
    rows = []
    for subject in subjects(quick):
        ways: dict[str, Callable[[], float]] = {
            "plain": partial(timed, subject.forward),
            "bare": partial(timed, partial(bare_block, subject)),
            "block": partial(timed, partial(our_block, subject)),
            "block without lines": partial(timed, partial(our_block, subject, lines=False)),
            "block + table": partial(timed, partial(our_table, subject)),
            "block + print": partial(timed, partial(our_print, subject)),
        }
        if importlib.util.find_spec("flops_profiler"):
            ways["flops-profiler"] = partial(timed, partial(flops_profiler_block, subject))
        for way in ways.values():
            way()
        took = take_turns(ways, 3 if quick else ROUNDS[subject.name], f"the block, {subject.name}")
        for name, seconds in took.items():
            ratio = Ratio.of(seconds, took["plain"])
            limited = name in ("block", "block + table")
            limit = ratio.verdict(BLOCK[subject.name]) if limited else "for information"
            rows.append([subject.name, name, median_ms(seconds), str(ratio), ratio.spread, limit])
    show(
        "The whole block with one forward, against the forward alone",
        ["Model", "Way", "Median", "Ratio", "Quartiles", "Limit"],
        rows,
        "Bare: torch.autograd.profiler.profile(use_kineto=True). Table: prof.display(). Print: str(prof). "
        "flops-profiler: its sums, without its text, which ends in an error for some of these models.",
    )


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def bare_block(subject: Subject) -> None:
    with bare():
        subject.forward()


def our_block(subject: Subject, *, lines: bool = True) -> torchprof.Profile:
    with torchprof.Profile(subject.model, lines=lines) as prof:
        subject.forward()
    return prof


def our_table(subject: Subject) -> None:
    our_block(subject).display()


def our_print(subject: Subject) -> None:
    str(our_block(subject))


def flops_profiler_block(subject: Subject) -> None:
    from flops_profiler.profiler import FlopsProfiler

    prof = FlopsProfiler(subject.model)
    prof.start_profile()
    subject.forward()
    prof.stop_profile()
    prof.get_total_flops()
    prof.end_profile()


def of_large_heaps(quick: bool) -> None:
    """Entering must not take longer because the process has many objects, as with a data set in Python objects."""
    subject = subjects(quick=True)[1]
    count = OBJECTS // 50 if quick else OBJECTS
    subject.forward()
    found: dict[str, list[float]] = {}
    for name in ("no objects", "objects"):
        heap = [[number] for number in range(count)] if name == "objects" else []
        found[name] = [enter(subject) for _ in range(3 if quick else 15)]
        del heap
    ratio = statistics.median(found["objects"]) / statistics.median(found["no objects"])
    show(
        f"Entering the block with {count:,} more objects alive",
        ["Model", *found, "Ratio", "Limit"],
        [
            [
                subject.name,
                *map(median_ms, found.values()),
                f"{ratio:.2f}x",
                "at most 1.3: " + ("met" if ratio <= 1.3 else "MISSED"),
            ]
        ],
    )


def enter(subject: Subject) -> float:
    prof = torchprof.Profile(subject.model)
    start = time.perf_counter()
    prof.__enter__()
    took = time.perf_counter() - start
    prof.__exit__(None, None, None)
    return took


if __name__ == "__main__":
    measure(asked_quick(__doc__))
