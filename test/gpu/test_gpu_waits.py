"""What a thread waits for while a device works, against the trace of the same recording and the user's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import torch
from build.intervals import times_of
from build.machine import Machine, on_gpu
from torch import nn

import torchprof
from torchprof.run.words import WAITS_FOR_AUTOGRAD, Frame, FrameKind

pytestmark = on_gpu


def is_wait(frames: tuple[Frame, ...]) -> bool:
    return bool(frames) and frames[-1].kind == FrameKind.WAIT and frames[-1].name == WAITS_FOR_AUTOGRAD


def test_the_loop_waits_in_backward(machine: Machine, tmp_path: Path, figure: Callable[..., None]) -> None:
    """Live, the call of the engine is recorded; in the trace it is not: the waits are the same."""
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(20))).to(machine.device)
    x = torch.rand(64, 256, device=machine.device)
    clock: list[int] = []

    def step() -> None:
        loss = model(x).square().mean()
        begin = time.perf_counter_ns()
        loss.backward()
        clock.append(time.perf_counter_ns() - begin)

    step()
    machine.wait()
    clock.clear()
    with machine.profile(model) as prof:
        for _ in range(5):
            step()
        machine.wait()
    prof.export_chrome_trace(tmp_path / "trace.json")
    waited = prof.run.rows.total("cpu_ns", frames=is_wait)
    expected = max(times_of(tmp_path / "trace.json").waits.values())
    read = torchprof.from_trace(tmp_path / "trace.json").rows.total("cpu_ns", frames=is_wait)
    figure("waits for autograd", waited, expected, "ns")
    figure("the user's clock around backward", sum(clock), waited, "ns")
    assert 0 < waited <= sum(clock)
    assert abs(waited - expected) < 2000
    assert abs(read - expected) < 1000
