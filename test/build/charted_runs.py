"""Runs of which pictures are drawn: with memory over time, and with a roofline."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import torch
from build.hand_made import op, row, run_of
from torch import nn

from torchprof import Profile, Run
from torchprof.run.meta import Peak
from torchprof.run.timeline import Memory, Timeline


def trained(model: nn.Module, *shape: int, steps: int = 3) -> Run:
    """Steps of training on inputs of a shape, with all measures of the CPU."""
    with Profile(model, profile_memory=True, with_flops=True, with_timeline=True) as prof:
        for _ in range(steps):
            model(torch.rand(*shape)).sum().backward()
            prof.step()
    assert prof.run is not None
    return prof.run


def with_memory(run: Run, steps: Sequence[tuple[int, int, int]], memory: Memory) -> Run:
    """Steps of memory on the CPU: (time in ns, bytes, number of the kind)."""
    columns = {name: array("q", [0] * len(steps)) for name in Timeline.COLUMNS}
    for at, values in enumerate(steps):
        for name, value in zip(("time_ns", "nbytes", "kind"), values):
            columns[name][at] = value
    return replace(run, memory=(memory,), timeline=Timeline(("cpu",), columns))


STEPS = [(0, 300, 0), (25, 100, 2), (50, 500, -1), (75, -900, 2), (100, 100, 2)]


@cache
def roofline_run() -> Run:
    """Net.a: 1920 FLOPs per call, 192 bytes, 192 ns: 10 FLOP/byte, 10 GFLOP/s. Net.b.0: 1 FLOP/byte, 1 GFLOP/s."""
    counted = ("cpu_ns", "macs", "flops", "uncounted")
    run = run_of(
        [
            row(0, cpu_ns=100),
            row(1, calls=2, cpu_ns=84),
            row(1, op("aten::mm", (2, 4)), calls=2, cpu_ns=300, flops=3840, macs=1920),
            row(3, calls=1),
            row(3, op("aten::add"), calls=1, cpu_ns=96, flops=96),
        ],
        requested=counted,
        measured=counted,
        peaks=(
            Peak("cpu", "float32", 1, 5e10, 1e9),
            Peak("cpu", "float32", 2, 1e11, 5e10),
            Peak("cuda:0", "float32", 0, 1e14, 1e12),
        ),
    )
    size = {"input_shapes": ((4, 4),), "output_shapes": ((4, 4),), "output_bytes": 64}
    layers = (run.layers[0], replace(run.layers[1], param_bytes=64, **size), run.layers[2])
    layers += (replace(run.layers[3], input_shapes=((8,),), output_shapes=((16,),), output_bytes=64, param_bytes=0),)
    return replace(run, layers=layers, rows=replace(run.rows, layers=layers))
