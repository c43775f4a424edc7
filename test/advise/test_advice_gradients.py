"""Advice about work for gradients: real models that recompute and that are partly frozen, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from build.even_times import evenly
from build.findings import of
from build.hand_made import FORWARD, op, row, run_of
from build.models import Layers
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchprof import Profile
from torchprof.advise import advise, judge
from torchprof.run.formats import format_memory, format_time
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, OUTSIDE, RECOMPUTE

MS = 1_000_000


def freeze(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


# Recomputed layers


class Blocks(nn.Module):
    """Three blocks, of which those that are asked for run under a checkpoint."""

    def __init__(self, *checkpointed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(3))
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=False) if number in self.checkpointed else block(x)
        return x


def trained(model: nn.Module, x: Tensor, **options: bool) -> Run:
    with Profile(model, **options) as prof:
        for _ in range(2):
            model(x).sum().backward()
    return evenly(prof.run)


def test_recomputed_blocks_are_reported() -> None:
    run = trained(Blocks(0, 2), torch.ones(256, 256), profile_memory=True)
    [advice] = of(run, "recomputed_layers")
    assert advice.layer == "Blocks.blocks.*" and set(advice.layers) == {"Blocks.blocks.0", "Blocks.blocks.2"}
    recompute = {node.layer.name: node.total.cpu_ns for node in run.tree(RECOMPUTE).walk()}
    ns = sum(recompute[name] for name in advice.layers)
    assert advice.gain_ns == ns > 0 and advice.gain_bytes is None
    assert f" runs forward again in backward 4 times, for {format_time(ns)} in total." in advice.finding
    saved = 0
    for name in advice.layers:
        # Each forward recomputes the block once, and that makes two results of 256 x 256 floats at least.
        number = next(number for number, layer in enumerate(run.layers) if layer.name == name)
        rises = run.samples[SampleKey(number, RECOMPUTE, 0, "cpu", "peak_bytes")].max
        assert rises >= 256 * 256 * 4
        saved += rises
    assert f" It saves up to {format_memory(saved)}." in advice.finding


def test_without_memory_the_finding_names_no_bytes() -> None:
    [advice] = of(trained(Blocks(0), torch.ones(256, 256)), "recomputed_layers")
    assert "It saves" not in advice.finding and advice.finding.endswith(" in total.")


def test_models_without_recomputation_are_not_reported() -> None:
    assert of(trained(Blocks(), torch.ones(256, 256)), "recomputed_layers") == []


def recomputed(wall_ms: int) -> Run:
    """Net.b is recomputed 4 times in 2 calls of the model, Net.b.0 inside of it; Net calls 1 op in recompute itself."""
    rows = [
        row(2, phase=RECOMPUTE, calls=4, cpu_ns=1 * MS),
        row(3, phase=RECOMPUTE, calls=4, cpu_ns=2 * MS),
        row(3, op("aten::mm"), phase=RECOMPUTE, calls=4, cpu_ns=3 * MS),
        row(3, op("aten::mm"), phase=BACKWARD, calls=4, cpu_ns=7 * MS),
    ]
    samples = {
        SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): Spread.of([(0, 9), (1, 9)]),
        SampleKey(2, RECOMPUTE, 0, "cpu", "cpu_ns"): Spread.of([(at, 9) for at in range(4)]),
        SampleKey(3, RECOMPUTE, 0, "cpu", "cpu_ns"): Spread.of([(at, 9) for at in range(4)]),
        SampleKey(2, RECOMPUTE, 0, "cpu", "peak_bytes"): Spread.of([(0, 1024), (1, 3072)]),
        SampleKey(3, RECOMPUTE, 0, "cpu", "peak_bytes"): Spread.of([(0, 9999)]),
    }
    return replace(run_of(rows, wall_ns=wall_ms * MS), samples=samples)


def test_the_outermost_recomputed_layer_has_the_time() -> None:
    """It is recomputed twice in each forward of the model: 2 x 3 KB would be held."""
    [advice] = of(recomputed(100), "recomputed_layers")
    assert advice.layer == "Net.b" and advice.gain_ns == 6 * MS
    assert advice.finding == (
        "Activation checkpointing runs forward again in backward 4 times, for 6.000ms in total. It saves up to 6.00 KB."
    )
    assert of(recomputed(120), "recomputed_layers") == []  # 5 % of the time


# Frozen layers


class Front(Layers):
    """A backbone of two layers, and a head; and something of its own after them."""

    def __init__(self) -> None:
        super().__init__(first=nn.Linear(256, 256), act=nn.ReLU(), second=nn.Linear(256, 256), head=nn.Linear(256, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.act(self.first(x)))).sigmoid()


def frozen_front() -> nn.Module:
    model = Front()
    freeze(model.first)
    freeze(model.second)
    return model


def an_input() -> Tensor:
    return torch.ones(8, 256, requires_grad=True)


def backward_of(run: Run, *names: str) -> int:
    return sum(
        row.cost.cpu_ns for row in run.rows if row.phase == BACKWARD and row.layer and row.layer.path[-1] in names
    )


def test_frozen_first_layers_with_gradients_are_reported(reloaded: Any) -> None:
    run = trained(frozen_front(), an_input())
    [advice] = of(run, "frozen_layers_with_gradients")
    assert advice.layer == "Front" and set(advice.layers) == {"Front.first", "Front.act", "Front.second"}
    assert advice.gain_ns == backward_of(run, "first", "act", "second") > 0
    assert advice.finding.startswith(
        f"Backward runs through layers that are frozen, for {format_time(advice.gain_ns)} in total. Nothing trainable "
        "in the model runs before them. The largest gain is in Front."
    )
    assert of(reloaded(run), "frozen_layers_with_gradients") == [advice]


def test_only_layers_before_the_first_trainable_layer_count() -> None:
    model = Front()
    freeze(model.first)
    freeze(model.head)
    run = trained(model, an_input())
    [advice] = of(run, "frozen_layers_with_gradients")
    assert set(advice.layers) == {"Front.first", "Front.act"} and advice.gain_ns == backward_of(run, "first", "act")


def test_frozen_first_layers_without_backward_are_not_reported() -> None:
    run = trained(frozen_front(), torch.ones(8, 256))
    assert backward_of(run, "head") and not backward_of(run, "first", "act", "second")
    assert of(run, "frozen_layers_with_gradients") == []


def trainable_before() -> nn.Module:
    model = Front()
    freeze(model.second)
    return model


class OwnWeight(Front):
    """Has a trainable weight of its own, used before all layers."""

    def __init__(self) -> None:
        super().__init__()
        freeze(self)
        self.scale = nn.Parameter(torch.ones(256))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale)


class BorrowedWeight(Front):
    """Uses the weight of a trainable layer before all others, and never calls that layer."""

    def __init__(self) -> None:
        super().__init__()
        freeze(self)
        self.never_called = nn.Linear(256, 256)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x @ self.never_called.weight)


class Twice(Front):
    """Comes back to its frozen front after a trainable layer."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.second(self.first(x)))))


class SharedFirst(nn.Module):
    """A trainable layer at two paths, called at the second; the last of the layers counts no parameters."""

    def __init__(self, share: str) -> None:
        super().__init__()
        self.head = nn.Linear(256, 256)
        self.front = nn.Linear(256, 256)
        if share == "module":
            self.front = self.head
        else:
            self.front.weight, self.front.bias = self.head.weight, self.head.bias
        self.frozen = freeze(nn.Linear(256, 256))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.frozen(self.front(x)))


def twice() -> nn.Module:
    model = Twice()
    freeze(model.first)
    return model


@pytest.mark.parametrize(
    "make",
    [
        trainable_before,
        lambda: freeze(Front()),  # whoever freezes all of it wants the gradient of the input
        Front,
        OwnWeight,
        BorrowedWeight,
        twice,
        lambda: SharedFirst("module"),
        lambda: SharedFirst("weight"),
        lambda: nn.Sequential(nn.ReLU(), nn.Linear(256, 256), freeze(nn.Linear(256, 256))),
    ],
)
def test_gradients_that_may_be_needed_are_not_reported(make: Callable[[], nn.Module]) -> None:
    run = trained(make(), an_input())
    assert BACKWARD in run.phases()
    assert of(run, "frozen_layers_with_gradients") == []


def test_a_frozen_model_after_another_model_is_not_reported() -> None:
    """As a perceptual loss: it first looks at the target, before the trained model has run."""
    judge, model = freeze(Front()), Front()
    with Profile([judge, model]) as prof:
        target = judge(torch.ones(8, 256)).detach()
        made = model(torch.ones(8, 256)) + model(torch.ones(8, 256))
        (judge(made.repeat(1, 64)) - target).sum().backward()
    assert backward_of(evenly(prof.run), "second") > 0
    assert of(evenly(prof.run), "frozen_layers_with_gradients") == []


def test_two_trained_models_are_not_reported() -> None:
    first, second = Front(), frozen_front()
    first.head = nn.Linear(256, 256)
    with Profile([second, first]) as prof:
        second(torch.ones(8, 256))
        second(first(torch.ones(8, 256))).sum().backward()
    assert of(evenly(prof.run), "frozen_layers_with_gradients") == []


@pytest.mark.parametrize("paths", [["second", "head"], [("Front",), "second", "head"]])
def test_selected_paths_give_no_finding(paths: list[Any]) -> None:
    model = Front()
    freeze(model.second)
    with Profile(model, paths=paths) as prof:
        model(an_input()).sum().backward()
    assert of(evenly(prof.run), "frozen_layers_with_gradients") == []


def test_a_small_share_of_the_time_is_not_reported() -> None:
    run = trained(frozen_front(), an_input())
    ns = backward_of(run, "first", "act", "second")
    assert of(replace(run, metas=(replace(run.meta, wall_ns=19 * ns),)), "frozen_layers_with_gradients")
    assert not of(replace(run, metas=(replace(run.meta, wall_ns=21 * ns),)), "frozen_layers_with_gradients")


def test_runs_without_time_or_work_give_no_finding() -> None:
    for run in (run_of([]), run_of([row(2, phase=RECOMPUTE), row(3, op("x"), phase=BACKWARD), row(OUTSIDE)])):
        assert {one.rule for one in advise(run)} & {"recomputed_layers", "frozen_layers_with_gradients"} == set()
        assert not judge(run).failed
