"""The cost of the block while the model runs: a forward under torchprof compared with one under torch's own profiler.

Each measurement enters a new block, so it includes the first call of each layer, which does more work than later calls.
It runs with one thread and with gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, show, take_turns
from benchmarks.subjects import Subject, bare, subjects

FLAGS: dict[str, dict[str, Any]] = {"plain": {}, "memory": {"profile_memory": True}}
ROUNDS = {"500 tiny Linear": 50, "AlexNet 1x3x224x224": 30, "BERT-base 1x128": 20}


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    rows = []
    for subject in subjects(quick):
        for flags_name, flags in FLAGS.items():
            subject.forward()
            took = take_turns(
                {
                    "unprofiled": lambda: timed(subject),  # noqa: B023  called within this round of the loop
                    "bare": lambda: timed(subject, lambda: bare(**flags)),  # noqa: B023
                    "torchprof": lambda: timed(subject, lambda: torchprof.Profile(subject.model, **flags)),  # noqa: B023
                },
                2 if quick else ROUNDS[subject.name],
                f"inside the block, {subject.name}, {flags_name}",
            )
            ratio = Ratio.of(took["torchprof"], took["bare"])
            rows.append(
                [
                    subject.name,
                    flags_name,
                    *(median_ms(took[way]) for way in took),
                    str(Ratio.of(took["bare"], took["unprofiled"])),
                    str(ratio),
                    ratio.spread,
                    ratio.verdict(subject.inside),
                ]
            )
    show(
        "Inside the block: one forward, one thread",
        [
            "Model",
            "Flags",
            "Unprofiled",
            "Bare",
            "torchprof",
            "Bare/unprofiled",
            "torchprof/bare",
            "Quartiles",
            "Limit",
        ],
        rows,
        "Bare: torch.autograd.profiler.profile(use_kineto=True) with the same flags. Medians of pairs that took turns.",
    )


def timed(subject: Subject, block: Callable[[], Any] | None = None) -> float:
    """The seconds of one forward inside a block, without entering and leaving the block."""
    if block is None:
        start = time.perf_counter()
        subject.forward()
        return time.perf_counter() - start
    with block():
        start = time.perf_counter()
        subject.forward()
        return time.perf_counter() - start


if __name__ == "__main__":
    measure(asked_quick(__doc__))
