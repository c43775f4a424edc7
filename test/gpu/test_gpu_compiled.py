"""torch.compile: the kernels that it makes are complete, and as many as possible belong to a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from build.libraries import RELEASE
from build.machine import Machine, on_gpu, whole
from torch import nn

from examples.large_models import Llama
from torchprof.run.words import NOT_ATTRIBUTABLE

pytestmark = [pytest.mark.compiler, on_gpu]  # test/record/test_compile_layers.py is for the CPU

MODES = ["default", "reduce-overhead", "max-autotune-no-cudagraphs", "max-autotune"]


@pytest.fixture(autouse=True)
def _compiled_anew() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def small(machine: Machine) -> tuple[nn.Module, torch.Tensor]:
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256), nn.LayerNorm(256), nn.ReLU())
    return model.to(machine.device), torch.rand(64, 256, device=machine.device)


def share_in_layers(machine: Machine, run: Any) -> float:
    """The part of the device's time of a model that is in a layer below it, and in no row of unknown layers."""
    ours = [row for row in run.rows if row.layer is not None]
    unknown = [row for row in ours if any(frame.name.startswith(NOT_ATTRIBUTABLE) for frame in row.frames)]
    all_ns = sum(machine.ns(row.cost) for row in ours)
    return 1 - sum(machine.ns(row.cost) for row in unknown) / all_ns


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("by_layer", [False, True], ids=["regions", "layers"])
def test_a_compiled_model_adds_up(mode: str, by_layer: bool, machine: Machine, figure: Callable[..., None]) -> None:
    model, x = small(machine)
    fast = torch.compile(model, mode=mode)

    def step() -> None:
        model.zero_grad()  # a replay of the backward overwrites the gradients of the one before
        fast(x).sum().backward()
        machine.wait()

    with machine.profile(fast, compile_layers=by_layer, schedule=after_three) as prof:
        for _ in range(5):
            step()
            prof.step()
    figure(f"compiled, {mode}, {'layers' if by_layer else 'regions'}: device time", machine.adds_up(prof), unit="ns")
    run = prof.run
    inside = sum(machine.ns(node.self) for node in run.tree().walk())
    outside = sum(machine.ns(run.no_layer(phase)) for phase in run.phases())
    assert inside + outside + machine.ns(run.left_over) == machine.ns(whole(run))
    if by_layer:
        share = share_in_layers(machine, run)
        figure(f"compiled, {mode}: share of the time with known layers", share)
        replays = "overhead" in mode or mode == "max-autotune"
        if RELEASE >= (2, 13) and not replays:  # torch before does not tell all that is needed
            assert share > 0.8
            assert all(machine.ns(node.self) > 0 for node in run.tree().children[:1])


def after_three(step: int) -> torch.profiler.ProfilerAction:
    """Compile, then capture, then a step in advance, and record the last."""
    actions = torch.profiler.ProfilerAction
    return {3: actions.WARMUP, 4: actions.RECORD_AND_SAVE}.get(step, actions.NONE)


def test_a_compiled_transformer(machine: Machine, figure: Callable[..., None]) -> None:
    model = Llama(1000, 512, 4, 8, 4, 1376).to(machine.device)
    tokens = torch.randint(0, 100, (2, 128), device=machine.device)
    fast = torch.compile(model)
    with machine.profile(fast, compile_layers=True, schedule=after_three) as prof:
        for _ in range(5):
            fast(tokens).float().sum().backward()
            machine.wait()
            prof.step()
    machine.adds_up(prof)
    figure("compiled Llama: share of the time with known layers", share_in_layers(machine, prof.run))
