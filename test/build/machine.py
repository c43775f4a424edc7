"""The device that the tests of ``test/gpu`` run on, and what torch itself says of the work on it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from build.torchs_list import torchs_list
from torch import nn
from torch.autograd import DeviceType

from torchprof import Profile
from torchprof.attribute.event_names import ENDED, MEMORY, OPENED, STARTED, STEP_MARK
from torchprof.attribute.events import PREFIX
from torchprof.run.measures import Cost
from torchprof.run.run import Run

DEVICE = "TORCHPROF_TEST_DEVICE"
"""The environment variable with the device: "cuda" or "cpu"."""
FOLDER = "TORCHPROF_TEST_FOLDER"
"""The environment variable with the folder for figures and recordings. Without it, nothing is kept."""


def device_here() -> torch.device:
    return torch.device(os.environ.get(DEVICE) or ("cuda" if torch.cuda.is_available() else "cpu"))


on_gpu = pytest.mark.skipif(device_here().type == "cpu", reason="needs a GPU")


@dataclass(frozen=True)
class Machine:
    """A device. On a CPU, its work is the operators, and tests are small: they show that the tests themselves work."""

    device: torch.device = field(default_factory=device_here)

    @property
    def is_gpu(self) -> bool:
        return self.device.type != "cpu"

    def profile(self, model: Any, **options: Any) -> Profile:
        return Profile(model, device=self.device, **options)

    def wait(self) -> None:
        """Wait until the device has done all work."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def recorded(self, model: nn.Module, step: Callable[[], Any], calls: int = 2, **options: Any) -> Profile:
        """A profile of one call of ``step``, after ``calls`` calls that are not recorded."""
        for _ in range(calls):
            step()
        self.wait()
        with self.profile(model, **options) as prof:
            step()
            self.wait()
        return prof

    def ns(self, cost: Cost) -> int:
        """The time on the device."""
        return cost.device_ns if self.is_gpu else cost.cpu_ns

    def working_ns(self, run: Run) -> int:
        """The time of all rows on the device; of a CPU, without the time in which nothing ran."""
        idle = [row.cost for row in run.rows if row.layer is None and not row.frames]
        return self.ns(whole(run)) - sum(map(self.ns, idle)) * (not self.is_gpu)

    def work(self, prof: Profile) -> list[tuple[str, int]]:
        """Name and duration of all work of the device, as torch recorded it: kernels, copies and sets."""
        if not self.is_gpu:
            events = [event for event in torchs_list(prof) if event.cpu_parent is None and not event.is_async]
            events = [event for event in events if not event.name.startswith((OPENED, STEP_MARK, STARTED, ENDED))]
            return [(event.name, round(event.time_range.elapsed_us() * 1e3)) for event in events]
        return [
            (event.name(), event.duration_ns())
            for event in prof._session._profiler.kineto_results.events()
            if event.device_type() == DeviceType.CUDA
            and not event.is_user_annotation()
            and not event.name().startswith(PREFIX)
            and event.name() != MEMORY
        ]

    def adds_up(self, prof: Profile) -> int:
        """Assert that the rows of the run have all the time of the device, to the ns. Returns this time."""
        work = self.work(prof)
        ours, theirs = self.working_ns(prof.run), sum(ns for _, ns in work)
        assert ours == theirs if self.is_gpu else ours == pytest.approx(theirs, rel=1e-6)
        assert ours > 0
        if self.is_gpu:
            assert len(kernels(prof.run)) == len({name for name, _ in work})
            assert sum(kernels(prof.run).values()) == len(work)
        return ours


def whole(run: Run) -> Cost:
    """All rows added up."""
    return sum((row.cost for row in run.rows), Cost())


def kernels(run: Run) -> dict[str, int]:
    """How often each kernel ran, by its name."""
    found: dict[str, int] = {}
    for row in run.rows:
        if row.frames and row.frames[-1].kind == "kernel":
            found[row.frames[-1].name] = found.get(row.frames[-1].name, 0) + row.calls
    return found


def note(part: str, name: str, value: Any, reference: Any = None, unit: str = "") -> None:
    """Keep a figure in ``figures.jsonl``: a line for each, so that what was measured outlasts a crash."""
    if folder := os.environ.get(FOLDER):
        line = {"part": part, "name": name, "value": value, "reference": reference, "unit": unit}
        with Path(folder, "figures.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
