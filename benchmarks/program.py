"""The cost of ``torchprof run`` while a script runs: the script alone, under torch's profiler, and under torchprof.

Recorded events are read after the script, or every few seconds between two calls of a model. That time is not included;
``python -m benchmarks reading`` measures it. It runs with one thread and with gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, show, take_turns
from benchmarks.subjects import Subject, bare, subjects
from torchprof.profile.program import Program

LIMIT = 1.05
CALLS = {"500 tiny Linear": 10, "AlexNet 1x3x224x224": 4, "BERT-base 1x128": 2}
ROUNDS = {"500 tiny Linear": 30, "AlexNet 1x3x224x224": 15, "BERT-base 1x128": 12}


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    rows = []
    for subject in subjects(quick):
        first: dict[str, list[float]] = {}
        blocks: dict[str, Callable[[], AbstractContextManager[object]]] = {
            "bare": nullcontext,
            "torch": bare,
            "Profile": partial(torchprof.Profile, subject.model),
            "run": Program,
        }
        took = take_turns(
            {way: partial(body, subject, block, first.setdefault(way, [])) for way, block in blocks.items()},
            2 if quick else ROUNDS[subject.name],
            f"a script, {subject.name}",
        )
        ratio = Ratio.of(took["run"], took["Profile"])
        found = statistics.median(ours - theirs for ours, theirs in zip(first["run"], first["torch"]))
        rows.append(
            [
                subject.name,
                *(median_ms(took[way]) for way in took),
                str(Ratio.of(took["torch"], took["bare"])),
                str(Ratio.of(took["run"], took["torch"])),
                str(ratio),
                ratio.spread,
                f"{found * 1e3:.2f} ms",
                ratio.verdict(LIMIT),
            ]
        )
    show(
        "torchprof run: a script's calls of a model, one thread",
        [
            "Model",
            "Bare",
            "torch",
            "Profile",
            "run",
            "torch/bare",
            "run/torch",
            "run/Profile",
            "Quartiles",
            "First call, more",
            "Limit",
        ],
        rows,
        "torch: torch.autograd.profiler.profile(use_kineto=True); Profile: torchprof.Profile of the model; run: what "
        "`torchprof run` has around a script.\nLimit: what run adds beyond what the profiler itself costs; tiny layers "
        "are the worst case.\nFirst call: what finding and labelling the model takes, once.",
    )


def body(subject: Subject, block: Callable[[], AbstractContextManager[object]], first: list[float]) -> float:
    """The seconds of the later calls of a model inside a block. The time of the first call is stored."""
    with block():
        start = time.perf_counter()
        subject.forward()
        met = time.perf_counter()
        for _ in range(CALLS[subject.name]):
            subject.forward()
        end = time.perf_counter()
    first.append(met - start)
    return end - met


if __name__ == "__main__":
    measure(asked_quick(__doc__))
