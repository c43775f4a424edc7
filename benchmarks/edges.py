"""The time to enter and leave the block, compared with torch's own profiler; and the cost of a disabled block."""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch

import torchprof
from benchmarks.ratios import Ratio, asked_quick, show, take_turns
from benchmarks.subjects import Subject, bare, on_stop, subjects, tiny_layers

NOTHING = 1.01


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    of_edges(quick)
    of_disabled(quick)


def of_edges(quick: bool) -> None:
    many = 1_000 if quick else 10_000
    large = Subject(f"{many:,} tiny Linear", tiny_layers(many).eval(), torch.rand(1, 8), 0.0)
    rows = []
    for subject in [*subjects(quick), large]:
        subject.forward()
        ours: list[tuple[float, float, float]] = []
        theirs: list[tuple[float, float, float]] = []
        take_turns(
            {
                "bare": partial(bare_edges, subject, theirs),
                "torchprof": partial(our_edges, subject, ours),
            },
            2 if quick else 5,
            f"edges, {subject.name}",
        )
        bare_enter, bare_stop, _ = medians_ms(theirs)
        enter, stop, leave = medians_ms(ours)
        rows.append([subject.name, bare_enter, enter, bare_stop, stop, leave])
    show(
        "The edges of the block (for information; the collector runs between, not inside)",
        ["Model", "Enter, bare", "Enter, torchprof", "Stop, bare", "Stop, torchprof", "Leave, after the stop"],
        rows,
    )


def medians_ms(found: list[tuple[float, float, float]]) -> list[str]:
    return [f"{statistics.median(seconds) * 1e3:.2f} ms" for seconds in zip(*found)]


def bare_edges(subject: Subject, found: list[tuple[float, float, float]]) -> float:
    """Seconds to enter, to stop, and 0: torch's own profiler does nothing after its stop."""
    block = bare()
    start = time.perf_counter()
    block.__enter__()
    entered = time.perf_counter()
    subject.forward()
    leaving = time.perf_counter()
    block.__exit__(None, None, None)
    left = time.perf_counter()
    found.append((entered - start, left - leaving, 0.0))
    return left - start


def our_edges(subject: Subject, found: list[tuple[float, float, float]]) -> float:
    """Seconds to enter, until torch's own stop has returned, and from there until the block was left."""
    stopped: list[float] = []
    prof = torchprof.Profile(subject.model)
    start = time.perf_counter()
    prof.__enter__()
    entered = time.perf_counter()
    on_stop(prof._session._profiler, lambda: stopped.append(time.perf_counter()))
    subject.forward()
    leaving = time.perf_counter()
    prof.__exit__(None, None, None)
    left = time.perf_counter()
    found.append((entered - start, stopped[0] - leaving, left - stopped[0]))
    return left - start


def of_disabled(quick: bool) -> None:
    rows = []
    for subject in subjects(quick=True):
        subject.forward()
        took = take_turns(
            {"without": partial(forward, subject), "disabled": partial(forward_disabled, subject)},
            5 if quick else 80,
            f"disabled, {subject.name}",
        )
        ratio = Ratio.of(took["disabled"], took["without"])
        rows.append([subject.name, str(ratio), ratio.spread, ratio.verdict(NOTHING)])
    show(
        "enabled=False: making, entering and leaving the block and one forward, against the forward alone",
        ["Model", "Ratio", "Quartiles", "Limit"],
        rows,
    )


def forward(subject: Subject) -> float:
    start = time.perf_counter()
    subject.forward()
    return time.perf_counter() - start


def forward_disabled(subject: Subject) -> float:
    start = time.perf_counter()
    with torchprof.Profile(subject.model, enabled=False):
        subject.forward()
    return time.perf_counter() - start


if __name__ == "__main__":
    measure(asked_quick(__doc__))
