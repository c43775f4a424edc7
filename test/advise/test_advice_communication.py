"""Advice about what ranks exchange: rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build.collectives import ALL_REDUCE, kernel
from build.findings import of
from build.hand_made import kernel as computing
from build.hand_made import row, run_of

from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime
from torchprof.run.words import BACKWARD

MS = 1_000_000
MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES, "wall_ns": 100 * MS}


def exchanging(exposed: int = 64, **meta: Any) -> Run:
    """16 all-reduces, beside 30 ms of computing, on a device that worked for 100 ms."""
    rows = [
        row(1, computing("gemm"), device="cuda:0", device_ns=30 * MS),
        row(2, kernel(ALL_REDUCE), phase=BACKWARD, device="cuda:0", calls=16, device_ns=64 * MS),
    ]
    busy = DeviceTime("cuda:0", 0, 100 * MS, (30 + exposed) * MS, 30 * MS, 64 * MS, 0, (64 - exposed) * MS, ())
    return replace(run_of(rows, **{**CUDA, **meta}), device_times=(busy,))


def test_communication_without_computation_is_reported() -> None:
    [advice] = of(exchanging(), "exposed_communication")
    assert (advice.layer, advice.gain_ns) == ("Net", 64 * MS)
    assert advice.finding.startswith(
        "Exposed communication takes 64.000ms of the 100.000ms (64%) between the first and the last work of cuda: it "
        "communicates, and computes nothing. All communication takes 64.000ms, most of it in all_reduce."
    )


@pytest.mark.parametrize("run", [exchanging(exposed=5), exchanging(wall_ns=1300 * MS), run_of([], **CUDA)])
def test_communication_that_overlaps_computation_is_not_reported(run: Run) -> None:
    assert of(run, "exposed_communication") == []
