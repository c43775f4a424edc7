"""Advice: each planted fault is found, in the layer where it is, and nothing is advised for what is right."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build.machine import Machine, on_gpu
from build.models import Layers
from torch import Tensor, nn

from torchprof import Profile
from torchprof.advise import advise

pytestmark = on_gpu


def found(prof: Any) -> dict[str, str]:
    """The rules that found something, and where."""
    return {one.rule: one.layer for one in advise(prof.run)}


def products(device: torch.device) -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(4))).to(device)
    return model, torch.rand(4096, 2048, device=device)


def test_tf32_that_is_off(machine: Machine, figure: Callable[..., None]) -> None:
    model, x = products(machine.device)
    before = torch.get_float32_matmul_precision()
    rules = {}
    try:
        for precision in ("highest", "high"):
            torch.set_float32_matmul_precision(precision)
            prof = machine.recorded(model, lambda: model(x).sum().backward(), record_shapes=True)
            rules[precision] = found(prof)
            figure(f"products of {precision} precision", machine.adds_up(prof), unit="ns")
    finally:
        torch.set_float32_matmul_precision(before)
    assert "tf32_not_used" in rules["highest"]
    assert "tf32_not_used" not in rules["high"]


def test_autocast_that_is_off(machine: Machine) -> None:
    model, x = products(machine.device)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert "autocast_not_used" in found(machine.recorded(model, lambda: model(x).sum().backward()))

        def cast() -> None:
            with torch.autocast("cuda", torch.bfloat16):
                y = model(x)
            y.float().sum().backward()

        assert "autocast_not_used" not in found(machine.recorded(model, cast))
    finally:
        torch.set_float32_matmul_precision(before)


def test_a_layout_that_is_converted_for_each_convolution(machine: Machine, figure: Callable[..., None]) -> None:
    """Whether cuDNN converts depends on the algorithm that it chooses: kept as a figure. With channels last never."""
    for layout in (torch.contiguous_format, torch.channels_last):
        model = nn.Sequential(*(nn.Conv2d(128, 128, 3, padding=1) for _ in range(3)))
        model = model.to(machine.device, torch.bfloat16, memory_format=layout)
        x = torch.rand(32, 128, 56, 56, device=machine.device, dtype=torch.bfloat16).to(memory_format=layout)
        rules = found(machine.recorded(model, lambda: model(x).sum().backward()))  # noqa: B023
        figure(f"advice on convolutions, {layout}", rules)
        assert layout is not torch.channels_last or "channels_last_missed" not in rules


class Waits(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = self.fc(x)
            x = x / max(x.abs().max().item(), 1.0)
        return x


@torch.no_grad()
def test_a_wait_in_a_layer(machine: Machine) -> None:
    model, x = Waits(fc=nn.Linear(256, 256)).to(machine.device), torch.rand(64, 256, device=machine.device)
    assert found(machine.recorded(model, lambda: model(x)))["waits_for_values"] == "Waits"


@torch.no_grad()
def test_many_small_kernels(machine: Machine) -> None:
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(200))).to(machine.device)
    x = torch.rand(4, 32, device=machine.device)

    def step() -> None:
        for _ in range(5):
            model(x)

    assert "launches_slower_than_the_device" in found(machine.recorded(model, step))


def test_batches_from_pageable_memory(machine: Machine) -> None:
    model = nn.Linear(4096, 8).to(machine.device)
    for pinned in (False, True):
        batches = [torch.rand(4096, 4096) for _ in range(4)]
        batches = [batch.pin_memory() for batch in batches] if pinned else batches
        with machine.profile(model) as prof:
            for batch in batches:
                model(batch.to(machine.device, non_blocking=True)).sum().backward()
                prof.step()
            machine.wait()
        assert ("pageable_batches" in found(prof)) == (not pinned)


class Makes(Layers):
    """Makes a constant on the CPU in each forward."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(20):
            x = self.fc(x) + torch.ones(256).to(x.device)
        return x


@torch.no_grad()
def test_copies_in_a_layer(machine: Machine) -> None:
    model, x = Makes(fc=nn.Linear(256, 256)).to(machine.device), torch.rand(64, 256, device=machine.device)
    assert found(machine.recorded(model, lambda: model(x)))["copies_in_layers"] == "Makes"


def test_an_optimizer_that_loops_over_tensors(machine: Machine) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(60))).to(machine.device)
    x = torch.rand(4, 64, device=machine.device)
    for foreach in (False, True):
        optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)

        def step() -> None:
            model(x).sum().backward()
            optimizer.step()  # noqa: B023
            optimizer.zero_grad()  # noqa: B023

        with machine.profile(model) as prof:
            for _ in range(3):
                step()
                prof.step()
            machine.wait()
        assert ("optimizer_step_per_tensor" in found(prof)) == (not foreach)


def test_remedies_that_are_tried_gain_what_a_stopwatch_shows(
    machine: Machine, figure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """TF32 on copies of the model, against the user's own model with TF32. Nothing of the user's changes."""
    model, x = products(machine.device)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    times = {}
    try:
        for precision in ("high", "highest"):
            torch.set_float32_matmul_precision(precision)
            for count in (3, 20):
                torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(count):
                    model(x).sum().backward()
                torch.cuda.synchronize()
                times[precision] = (time.perf_counter() - start) / count
        with Profile(model, use_cuda=True, record_shapes=True) as prof:
            for _ in range(5):
                model(x).sum().backward()
        state, weights = torch.cuda.get_rng_state(), [parameter.clone() for parameter in model.parameters()]
        run = prof.verify(x, seconds=10)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.equal(state, torch.cuda.get_rng_state()) and all(map(torch.equal, weights, model.parameters()))
    [trial] = [trial for trial in run.trials if trial.rule == "tf32_not_used"]
    gain = 1 - times["high"] / times["highest"]
    figure("the gain of TF32, by a trial and by a stopwatch", trial.gain, gain, "share")
    assert trial.has_gained and trial.difference and trial.low - 0.1 <= gain <= trial.high + 0.1
