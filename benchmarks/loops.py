"""The cost of a long loop: the resident size after the 10th and after the last cycle, and the time to read a cycle.

The loop is a training loop (forward, backward, SGD) under a schedule that warms up for one step and records the next.
It runs with one thread. Memory is measured on Linux only.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, say, show, take_turns, verdict
from benchmarks.subjects import Subject, subjects, tiny_layers

LAYERS = 20
FLAT = 1.05
STEADY = 1.5
WATCHED = {20_000: 1.25, 2_000: 1.05}  # by the number of steps
EARLY = 10


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    of_long_loops(quick)
    of_one_step_in(quick)
    of_watched(quick)


def of_long_loops(quick: bool) -> None:
    cycles = 60 if quick else 1_000
    with TemporaryDirectory() as folder:
        ways: dict[str, dict[str, Any]] = {
            "plain": {},
            "memory, FLOPs": {"profile_memory": True, "with_flops": True},
            "traces written": {"on_trace_ready": lambda prof: prof.export_chrome_trace(Path(folder) / "trace.json")},
        }
        sizes, times = [], []
        for name, options in ways.items():
            loop = Loop(tiny_layers(LAYERS), name)
            prof = torchprof.Profile(loop.model, schedule=every_other_step(), **options)
            took, resident = loop.run(prof, cycles)
            growth = resident[-1] / resident[EARLY - 1]
            sizes.append([name, mb(resident[EARLY - 1]), mb(resident[-1]), f"{growth:.3f}x", verdict(growth, FLAT)])
            if "on_trace_ready" not in options:
                theirs, _ = loop.run(torch_profiler(options), EARLY)
                early, late = took[1:EARLY], took[1 - EARLY :]
                grown = Ratio.of(late, early)
                events = len(prof._session._profiler.kineto_results.events()) if prof._session else 0
                folding = statistics.median(late) - statistics.median(theirs)
                times.append(
                    [
                        name,
                        f"{events:,}",
                        median_ms(theirs),
                        median_ms(early),
                        median_ms(late),
                        f"{folding / events * 1e6:.1f} us",
                        str(grown),
                        grown.verdict(STEADY),
                    ]
                )
    headings = ["Flags", f"After cycle {EARLY}", f"After cycle {cycles:,}", "Ratio", "Limit"]
    show(f"Resident size of a training loop of {LAYERS} tiny Linear", headings, sizes)
    show(
        "The call of step() that ends a cycle",
        [
            "Flags",
            "Events",
            "torch",
            f"torchprof, first {EARLY}",
            f"torchprof, last {EARLY}",
            "More, per event",
            "Last/first",
            "Limit",
        ],
        times,
        "torch: torch.profiler.profile with the same flags, which stops and reads nothing. Medians.",
    )


def of_one_step_in(quick: bool) -> None:
    """What a loop takes if one step in N is recorded, and one more is the warm-up before it."""
    rows = []
    for subject in subjects(quick)[:2]:
        for every in (10,) if quick else (10, 100):
            schedule = torch.profiler.schedule(wait=every - 2, warmup=1, active=1)
            ways = {
                "unprofiled": nullcontext,
                "torch": partial(torch_profiler, {}, schedule),
                "torchprof": partial(torchprof.Profile, subject.model, schedule=schedule),
            }
            took = take_turns(
                {name: partial(seconds_of_steps, subject, every, make) for name, make in ways.items()},
                1 if quick else 9 if every == 10 else 3,
                f"one step in {every}, {subject.name}",
            )
            ratios = [Ratio.of(took[name], took["unprofiled"]) for name in ("torch", "torchprof")]
            each = [f"{statistics.median(seconds) / every * 1e3:.2f} ms" for seconds in took.values()]
            rows.append([subject.name, f"1 in {every}", *each, *map(str, ratios), ratios[1].spread])
    show(
        "A loop of forwards in which one step in N is recorded: a step on average (for information)",
        ["Model", "Recorded", "Unprofiled", "torch", "torchprof", "torch/unpr.", "torchprof/unpr.", "Quartiles"],
        rows,
        "torch: torch.profiler.profile with the same schedule, which reads nothing. Entering and leaving do not count.",
    )


def of_watched(quick: bool) -> None:
    """What a loop takes while ``torchprof.watch`` is on, which reports every 5 s here."""
    rows = []
    for name, model, size, steps in (
        (f"{LAYERS} tiny Linear", tiny_layers(LAYERS), 8, 300 if quick else 20_000),
        ("12 x Linear(512)", nn.Sequential(*(nn.Linear(512, 512) for _ in range(12))), 512, 100 if quick else 2_000),
    ):
        loop = Loop(model, name, size)
        sizes: list[int] = []

        def plain(loop: Loop = loop, steps: int = steps) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                loop.step()
            return time.perf_counter() - start

        def watched(loop: Loop = loop, steps: int = steps, sizes: list[int] = sizes) -> float:
            start = time.perf_counter()
            with torchprof.watch(loop.model, every=5):
                for number in range(steps):
                    loop.step()
                    if number in (steps // 10, steps - 1):
                        sizes.append(resident_size())
            return time.perf_counter() - start

        took = take_turns({"plain": plain, "watched": watched}, 1 if quick else 5, f"watched, {name}")
        ratio = Ratio.of(took["watched"], took["plain"])
        step = f"{statistics.median(took['plain']) / steps * 1e3:.2f} ms"
        growth = sizes[1] / sizes[0]
        rows.append(
            [
                name,
                step,
                f"{steps:,}",
                str(ratio),
                ratio.spread,
                ratio.verdict(WATCHED.get(steps, 2.0)),
                f"{growth:.3f}x",
                verdict(growth, FLAT),
            ]
        )
    headings = [
        "Model",
        "A step",
        "Steps",
        "watched/plain",
        "Quartiles",
        "Limit",
        "Resident size, last/first tenth",
        "Limit",
    ]
    show("A training loop while torchprof.watch is on", headings, rows)


def seconds_of_steps(subject: Subject, every: int, make: Callable[[], Any]) -> float:
    """The seconds of so many steps, of which one is recorded and read."""
    with make() as profiler:
        start = time.perf_counter()
        for _ in range(every):
            subject.forward()
            if profiler is not None:
                profiler.step()
        return time.perf_counter() - start


class Loop:
    """A training loop over random inputs."""

    def __init__(self, model: nn.Module, name: str, size: int = 8) -> None:
        self.model = model
        self._name = name
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._x = torch.rand(4, size)

    def step(self) -> None:
        self.model(self._x).sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def run(self, profiler: Any, cycles: int) -> tuple[list[float], list[int]]:
        """For each cycle, the seconds of the call of step() that ended it, and the resident size after that."""
        took, resident = [], []
        with profiler:
            for cycle in range(cycles):
                say(f"a loop, {self._name}: cycle {cycle + 1} of {cycles}", again=cycle > 0)
                for records in (False, True):
                    self.step()
                    start = time.perf_counter()
                    profiler.step()
                    if records:
                        took.append(time.perf_counter() - start)
                        resident.append(resident_size())
        return took, resident


def every_other_step() -> Callable[[int], torch.profiler.ProfilerAction]:
    return torch.profiler.schedule(wait=0, warmup=1, active=1)


def torch_profiler(options: dict[str, Any], schedule: Callable[[int], Any] | None = None) -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=schedule or every_other_step(),
        profile_memory=options.get("profile_memory", False),
        record_shapes=options.get("with_flops", False),
    )


def resident_size() -> int:
    """The resident size of this process in bytes."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"


if __name__ == "__main__":
    measure(asked_quick(__doc__))
