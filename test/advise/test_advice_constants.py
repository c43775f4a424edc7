"""The rule about tensors that a layer makes in each call, and that about gradients of zeros."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from build.findings import of
from build.models import Layers
from torch import nn

import torchprof
from torchprof.advise import rules
from torchprof.advise.evidence import Evidence
from torchprof.advise.layers import constants
from torchprof.run.run import Run


class Masked(Layers):
    """Multiplies by a mask and adds positions. ``learned``: they depend on a parameter."""

    def __init__(self, learned: bool = False) -> None:
        super().__init__(scale=nn.Parameter(torch.ones(1)), learned=learned)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.arange(x.shape[1])
        if self.learned:
            at = at * self.scale
        return x * torch.ones(x.shape[1], x.shape[2]).tril() * self.scale + at.pow(2).sin()[:, None]


def trained(model: nn.Module, *sizes: int) -> Run:
    def step(size: int) -> None:
        model(torch.rand(2, size, size)).sum().backward()

    step(sizes[0])
    with torchprof.Profile(model) as prof:
        for size in sizes:
            step(size)
    return prof.run


def of_operators(run: Run, *names: str) -> int:
    """The time of the operators that the layer calls, and of those inside them."""
    return sum(
        one.cost.cpu_ns
        for one in run.rows
        if one.layer is run.layers[1] and one.phase == "forward" and one.frames and one.frames[0].name in names
    )


def test_the_time_of_constants_is_that_of_their_operators() -> None:
    run = trained(nn.Sequential(Masked()), *[256] * 3)
    [(layer, ns)] = constants(Evidence(run)).items()  # the rule itself needs 3 % of the time, which start-up may take
    truth = of_operators(run, "aten::arange", "aten::tril", "aten::pow", "aten::sin")
    assert ns == truth > 0
    assert run.layers[layer].name == "Sequential.0"


def test_what_depends_on_a_parameter_is_no_constant() -> None:
    run = trained(nn.Sequential(Masked(learned=True)), *[256] * 3)
    [ns] = constants(Evidence(run)).values()
    assert ns == of_operators(run, "aten::arange", "aten::tril") > 0


@pytest.mark.parametrize("sizes", [(256,), (256, 128, 256)])
def test_tensors_of_different_sizes_are_no_constants(sizes: tuple[int, ...]) -> None:
    assert of(trained(nn.Sequential(Masked()), *sizes), "constants_in_layers") == []


class Triangle(Layers):
    """The lower triangle of a parameter is computed in each call: it is no constant."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight.tril()


def test_the_triangle_of_a_parameter_is_no_constant() -> None:
    model = nn.Sequential(Triangle(weight=nn.Parameter(torch.rand(256, 256))))
    assert of(trained(model, *[256] * 3), "constants_in_layers") == []


def test_an_average_of_parameters_is_no_update_of_an_optimizer() -> None:
    model, average = TwoHeads(), TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters())
    with torchprof.Profile([model, average]) as prof:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            with torch.no_grad():
                average(torch.rand(4, 8))
            (model(torch.rand(4, 8)).sum() + model(torch.rand(4, 8), other=True).sum()).backward()
            optimizer.step()
            with torch.no_grad():
                for one, other in zip(average.parameters(), model.parameters()):
                    one.lerp_(other, 0.1)
    [found] = rules()["gradients_zeroed"](Evidence(prof.run))
    assert "no gradient" not in found.finding


class TwoHeads(Layers):
    def __init__(self) -> None:
        super().__init__(body=nn.Linear(8, 64), task=nn.Linear(64, 8), other=nn.Linear(64, 4096))

    def forward(self, x: torch.Tensor, other: bool = False) -> Any:
        x = self.body(x).relu()
        return self.other(x) if other else self.task(x)


def test_zeros_as_gradients_update_parameters() -> None:
    model = TwoHeads()
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.rand(4, 8)
    model(x, other=True).sum().backward()
    with torchprof.Profile(model) as prof:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(x).sum().backward()
            optimizer.step()
    [found] = rules()["gradients_zeroed"](Evidence(prof.run))
    assert found.finding.endswith("the optimizer also updates layers that no gradient reaches: TwoHeads.other.")
    rows = [(row.cost.cpu_ns, {frame.name.partition("#")[0] for frame in row.frames}) for row in prof.run.rows]
    zeroed = sum(ns for ns, names in rows if "Optimizer.zero_grad" in names and "aten::zero_" in names)
    added = sum(ns for ns, names in rows if "torch::autograd::AccumulateGrad" in names and "aten::add_" in names)
    optimizer = sum(ns for ns, names in rows if names & {"Optimizer.zero_grad", "Optimizer.step"})
    params = [sum(tensor.numel() for tensor in part.parameters()) for part in (model.other, model)]
    assert found.gain_ns == pytest.approx(zeroed + added + (optimizer - zeroed) * params[0] / params[1], abs=2)


class Lends(Layers):
    """Uses the weight of a layer that it does not call."""

    def forward(self, x: torch.Tensor) -> Any:
        return nn.functional.linear(self.first(x), self.lender.weight)


def test_a_weight_that_the_layer_above_uses_has_a_gradient() -> None:
    model = Lends(first=nn.Linear(8, 64), lender=nn.Linear(64, 4096, bias=False))
    optimizer = torch.optim.AdamW(model.parameters())
    with torchprof.Profile(model) as prof:
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            model(torch.rand(4, 8)).sum().backward()
            optimizer.step()
    [found] = rules()["gradients_zeroed"](Evidence(prof.run))
    assert "no gradient" not in found.finding
