"""Samples of source lines add rows of lines, and change nothing else: the same recording is read with and without."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from torchprof import Profile
from torchprof.measure.recording import Observations
from torchprof.record.python_lines import Sample
from torchprof.run.run import Run
from torchprof.run.words import SourceLine, sampled_line

LINE = SourceLine("train.py", 7, "main", "log")


class Sampler:
    """Many samples at random times of a recording."""

    def __init__(self, began_ns: int, wall_ns: int, count: int, seed: int) -> None:
        at = random.Random(seed)
        self.times = sorted(began_ns + at.randrange(wall_ns) for _ in range(count))

    def samples(self) -> Iterator[Sample]:
        return (Sample(at_ns, LINE, 1) for at_ns in self.times)

    def other_threads(self) -> list[Any]:
        return []


def training(model: nn.Module) -> None:
    kept = torch.zeros(0, 32)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(20):
        outputs = torch.utils.checkpoint.checkpoint(model, torch.rand(16, 32), use_reentrant=False)
        kept = torch.cat([kept, outputs.detach()])
        torch.stack([outputs, outputs]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def without_lines(run: Run) -> Any:
    rows = sorted((row for row in run.rows if sampled_line(row.frames) is None), key=repr)
    return rows, run.samples, run.memory, run.timeline, run.layers, run.device_times


@pytest.mark.parametrize("seed", range(5))
def test_samples_change_no_figure(seed: int) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(inplace=True), nn.Linear(64, 32))
    with Profile(model, profile_memory=True, with_timeline=True, with_flops=True, lines=False) as prof:
        training(model)
    cycle, layers = prof._cycles.last, prof.run.layers
    assert cycle is not None and prof._cycles.session is not None
    plain = cycle.read(layers, Observations())
    began_ns, wall_ns = cycle.session.began_ns, cycle.session.wall_ns
    cycle._sampler = Sampler(began_ns, wall_ns, 300, seed)  # type: ignore[assignment]
    sampled = cycle.read(layers, Observations())
    assert sum(row.calls for row in sampled.rows if sampled_line(row.frames) is not None) == 300
    for before, after in zip(without_lines(plain), without_lines(sampled)):
        assert before == after
