"""Ratios to the usual: rows made by hand, and a real loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build.hand_made import kernel, label, op, row, run_of
from torch import nn

from torchprof import Profile
from torchprof.analyze.ratios import ratios_of, unusual_ratios
from torchprof.run.run import Run
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, OUTSIDE

MS = 1_000_000
NODE = "autograd::engine::evaluate_function: MulBackward0"
TIMES = ("cpu_ns", "device_ns")


def training(backward: int = 20, elementwise: int = 2, filled: int = 1, copied: int = 2, optimizer: int = 5) -> Run:
    """100 ms: 20 in the forward of layers, the rest outside and in the backward of a layer. All in milliseconds."""
    rest = 80 - backward - filled - copied - optimizer
    rows = [
        row(1, op("aten::mm"), cpu_ns=(20 - elementwise) * MS),
        row(2, op("aten::mul"), cpu_ns=elementwise * MS),
        row(1, op("MmBackward0"), op("aten::mm"), phase=BACKWARD, cpu_ns=backward * MS),
        row(OUTSIDE, op("aten::zeros"), op("aten::fill_"), cpu_ns=filled * MS),
        row(OUTSIDE, op("aten::to"), op("aten::copy_"), cpu_ns=copied * MS),
        row(OUTSIDE, label("Optimizer.step#SGD.step"), op("aten::add_"), cpu_ns=optimizer * MS),
        row(OUTSIDE, op("aten::mse_loss"), cpu_ns=rest * MS),
    ]
    return run_of(rows, wall_ns=100 * MS)


def test_the_ratios_of_a_run() -> None:
    run = training()
    assert [ratio.value for ratio in ratios_of(run)] == [1.0, 0.1, 0.01, 0.02, 0.05, None]
    assert [ratio.where for ratio in ratios_of(run)] == ["Net.a", "Net.b", "", "", "", ""]
    text = run.report("ratios")
    assert "Elementwise operators take … of the forward of layers   | 10%  | 20%          | Net.b\n" in text
    assert "Backward runs … times a step                            | –    | 1.0          |" in text
    assert unusual_ratios(run) == ""


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"backward": 79, "filled": 0, "copied": 0, "optimizer": 0}, ""),  # 3.95 times
        (
            {"backward": 80, "filled": 0, "copied": 0, "optimizer": 0},
            "Unusual: backward takes 4.0 times as long as the forward of layers (usual is up to 2.3; most of it in "
            "Net.a).",
        ),
        ({"elementwise": 5}, ""),
        (
            {"elementwise": 6},
            "Unusual: elementwise operators take 30% of the forward of layers (usual is up to 20%; most of it in "
            "Net.b).",
        ),
        (
            {"copied": 30, "filled": 20, "backward": 10},
            "Unusual: filling tensors with one value takes 20% of the time (usual is up to 5%), copies and casts take "
            "30% of the time (usual is up to 10%).",
        ),
        ({"optimizer": 60, "backward": 10}, "Unusual: optimizers take 60% of the time (usual is up to 30%)."),
    ],
)
def test_what_is_far_from_the_usual_is_said(changed: dict[str, int], sentence: str) -> None:
    run = training(**changed)
    assert unusual_ratios(run) == sentence
    assert (sentence in " ".join(str(run).split())) if sentence else "Unusual" not in str(run)


def test_without_a_forward_of_layers_its_multiples_are_unknown() -> None:
    rows = [row(1, op("aten::mul"), cpu_ns=4), row(1, op("MulBackward0"), phase=BACKWARD, cpu_ns=96)]
    assert [ratio.value for ratio in ratios_of(run_of(rows))][:2] == [None, None]
    assert [*ratios_of(run_of([], measured=()))] == [] and "No time" in run_of([], measured=()).report("ratios")


def test_on_a_device_its_time_counts() -> None:
    meta: dict[str, Any] = {"device": "cuda", "measured": TIMES, "requested": TIMES, "busy_ns": (("cuda:0", 9),)}
    rows = [
        row(1, op("aten::mul"), cpu_ns=900),
        row(1, op("aten::mul"), kernel("k"), device="cuda:0", device_ns=1),
        row(1, op("aten::mm"), kernel("gemm"), device="cuda:0", device_ns=3),
        row(1, op(NODE), kernel("k"), phase=BACKWARD, device="cuda:0", device_ns=8),
    ]
    assert [ratio.value for ratio in ratios_of(run_of(rows, **meta))][:2] == [2.0, 0.25]


def test_backward_passes_are_those_of_the_loop() -> None:
    """Three losses, each with a backward of its own, in each of four steps."""
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters())
    with Profile(model) as prof:
        for _ in range(4):
            for _ in range(3):
                model(torch.rand(2, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            prof.step()
    engines = [row.calls for row in prof.run.rows if row.frames and row.frames[-1].name == AUTOGRAD_ENGINE]
    assert sum(engines) == 12
    assert [ratio.value for ratio in ratios_of(prof.run)][-1] == 3.0
    assert "backward runs 3.0 times a step (usual is up to 1.0)" in " ".join(str(prof.run).split())
