"""The cost of a long loop: the resident size after the 10th and after the last cycle, and the time to read a cycle.

The loop is a training loop (forward, backward, SGD) under a schedule that warms up for one step and records the next.
It runs with one thread. Memory is measured on Linux only.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, say, show, verdict
from benchmarks.subjects import tiny_layers

LAYERS = 20
FLAT = 1.05
STEADY = 1.5
EARLY = 10


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
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


class Loop:
    """A training loop over random inputs."""

    def __init__(self, model: nn.Module, name: str) -> None:
        self.model = model
        self._name = name
        self._optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        self._x = torch.rand(4, 8)

    def run(self, profiler: Any, cycles: int) -> tuple[list[float], list[int]]:
        """For each cycle, the seconds of the call of step() that ended it, and the resident size after that."""
        took, resident = [], []
        with profiler:
            for cycle in range(cycles):
                say(f"a loop, {self._name}: cycle {cycle + 1} of {cycles}", again=cycle > 0)
                for records in (False, True):
                    self.model(self._x).sum().backward()
                    self._optimizer.step()
                    self._optimizer.zero_grad()
                    start = time.perf_counter()
                    profiler.step()
                    if records:
                        took.append(time.perf_counter() - start)
                        resident.append(resident_size())
        return took, resident


def every_other_step() -> Callable[[int], torch.profiler.ProfilerAction]:
    return torch.profiler.schedule(wait=0, warmup=1, active=1)


def torch_profiler(options: dict[str, Any]) -> Any:
    return torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=every_other_step(),
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
