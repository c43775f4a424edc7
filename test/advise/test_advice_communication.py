"""Advice about what ranks exchange: rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build.collectives import ALL_REDUCE, kernel
from build.findings import of
from build.hand_made import kernel as computing
from build.hand_made import row, run_of
from build.hand_made_ranks import everybody, lockstep

from torchprof.run.lockstep import LockstepKey
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime
from torchprof.run.words import BACKWARD

MS = 1_000_000
MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES, "wall_ns": 100 * MS}


def exchanging(exposed: int = 64, mb: int = 4, calls: int = 16, ns: int = 64 * MS, **meta: Any) -> Run:
    """All-reduces of so many MiB each, beside 30 ms of computing, on a device that worked for 100 ms."""
    args = {**ALL_REDUCE, "In msg nelems": mb * 2**18, "Out msg nelems": mb * 2**18}
    rows = [
        row(1, computing("gemm"), device="cuda:0", device_ns=30 * MS),
        row(2, kernel(args), phase=BACKWARD, device="cuda:0", calls=calls, device_ns=ns),
    ]
    busy = DeviceTime("cuda:0", 0, 100 * MS, (30 + exposed) * MS, 30 * MS, 64 * MS, 0, (64 - exposed) * MS, ())
    return replace(run_of(rows, **{**CUDA, **meta}), device_times=(busy,))


def test_communication_without_computation_is_reported() -> None:
    [advice] = of(exchanging(), "exposed_communication")
    assert (advice.layer, advice.gain_ns) == ("Net.b", 64 * MS)
    assert advice.finding.startswith(
        "Exposed communication takes 64.000ms of the 100.000ms (64%) between the first and the last work of cuda: it "
        "communicates, and computes nothing. All communication takes 64.000ms, most of it in all_reduce."
    )


@pytest.mark.parametrize("run", [exchanging(exposed=5), exchanging(wall_ns=1300 * MS), run_of([], **CUDA)])
def test_communication_that_overlaps_computation_is_not_reported(run: Run) -> None:
    assert of(run, "exposed_communication") == []


def test_a_slow_link_is_reported() -> None:
    """16 times 4 MiB in 64 ms."""
    [advice] = of(exchanging(), "slow_collectives")
    assert advice.layer == "Net.b" and advice.gain_ns is None
    assert advice.finding == (
        "16 calls of all_reduce (4.00 MB on average) take 64.000ms, including waiting for other ranks: a bandwidth of "
        "at least 1.05 GB/s."
    )


@pytest.mark.parametrize(
    "run",
    [
        exchanging(mb=8),  # 2.1 GB/s
        exchanging(mb=1, calls=10, ns=4 * MS),  # not 5 % of the time
        exchanging(mb=0),  # small ones take as long as it takes to start them
    ],
)
def test_a_fast_link_is_not_reported(run: Run) -> None:
    assert of(run, "slow_collectives") == []


def test_waiting_for_other_ranks_is_not_reported_as_a_slow_link() -> None:
    """Of two ranks one waits 60 ms in the kernel for the other: 4 of 64 ms are the exchange."""
    run, rule = exchanging(mb=4, calls=16), "slow_collectives"
    key = LockstepKey(2, BACKWARD, "device", "all_reduce", everybody(2))
    waited = lockstep({0: [62 * MS], 1: [2 * MS]}, key)
    assert of(replace(run, lockstep={key: waited}), "slow_collectives") == []
    [advice] = of(replace(exchanging(ns=40 * MS), lockstep={key: lockstep({0: [22 * MS], 1: [18 * MS]}, key)}), rule)
    assert "take 36.000ms, without waiting for other ranks: a bandwidth of 1.86 GB/s." in advice.finding
    of_eight = key._replace(group=everybody(8))  # six may be even later
    assert len(of(replace(run, lockstep={of_eight: waited}), "slow_collectives")) == 1
    alone = replace(waited, ranks=(0,), counts=(1,), ns=(62 * MS,), beside_ns=(0,))
    assert len(of(replace(run, lockstep={key: alone}), "slow_collectives")) == 1
