"""The tensors of modules: which modules have one, which parameters change while we record, and how many calls record a
graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchprof
from torchprof import Run
from torchprof.record.modules import Owners


def owners(**modules: nn.Module | None) -> Owners:
    return Owners(((name,), module) for name, module in modules.items())


def test_the_modules_that_have_a_tensor() -> None:
    first, second = nn.Linear(2, 2), nn.BatchNorm1d(2)
    found = owners(first=first, second=second, gone=None)
    assert found.of(first.weight) == (("first",),)
    assert found.of(second.running_mean) == (("second",),)
    first.bias = second.bias
    assert set(owners(first=first, second=second).of(first.bias) or ()) == {("first",), ("second",)}


def test_a_tensor_with_the_memory_of_a_parameter() -> None:
    """A graph that was compiled with freezing has tensors of its own, which may show the memory of parameters."""
    module = nn.Linear(3, 4)
    found = owners(module=module)
    assert found.of(module.weight.detach().t()) == (("module",),)
    assert found.of(module.weight.detach().clone()) is None
    assert found.of(module.weight.detach()[1:]) is None  # only a part of it


def test_a_tensor_of_another_module_and_a_freed_one() -> None:
    module, other = nn.Linear(2, 2), nn.Linear(2, 2)
    found = owners(module=module)
    assert found.of(other.weight) == ()
    assert found.of(torch.rand(2, 2)) is None and found.of(None) is None
    other.weight = nn.Parameter(module.weight.detach())  # in the same memory
    assert owners(module=module).of(other.weight) == ()


def test_tensors_without_memory_are_known_by_themselves() -> None:
    lazy, meta, sparse = nn.LazyLinear(3), nn.Linear(3, 3, device="meta"), nn.Linear(2, 2)
    sparse.weight = nn.Parameter(torch.rand(2, 2).to_sparse(), requires_grad=False)
    found = owners(lazy=lazy, meta=meta, sparse=sparse)
    for name, module in (("lazy", lazy), ("meta", meta), ("sparse", sparse)):
        assert found.of(module.weight) == ((name,),)


def updated(run: Run) -> dict[str, int | None]:
    return {layer.name: layer.updated_params for layer in run.layers}


def test_the_parameters_of_the_optimizers_that_made_a_step_are_known(reloaded: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2))
    steps, never = torch.optim.SGD(model[2].parameters()), torch.optim.SGD(model[3].parameters())
    with torchprof.Profile(model) as prof:
        model(torch.rand(3, 4)).sum().backward()
        steps.step()
        never.zero_grad()
    assert updated(prof.run) == {
        "Sequential": 0,
        "Sequential.0": 0,
        "Sequential.1": 0,
        "Sequential.2": 8 * 2 + 2,
        "Sequential.3": 0,
    }
    assert reloaded(prof.run) == prof.run


def test_changes_by_hand_count_and_those_before_the_block_do_not() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    with torch.no_grad():
        model[1].weight.add_(1)
        with torchprof.Profile(model) as prof:
            model(torch.rand(3, 4))
            model[0].bias.mul_(2)
    assert updated(prof.run) == {"Sequential": 0, "Sequential.0": 8, "Sequential.1": 0}


def test_parameters_that_are_inference_tensors_have_no_version() -> None:
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(4, 8))
        with torchprof.Profile(model) as prof:
            model(torch.rand(3, 4))
    assert {*updated(prof.run).values()} == {None}


def test_without_a_step_it_is_unknown_what_is_updated() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    optimizer = torch.optim.SGD(model.parameters())
    with torchprof.Profile(model) as prof:
        model(torch.rand(3, 4)).sum().backward()
    optimizer.step()
    assert {*updated(prof.run).values()} == {None}


def test_calls_with_gradients_are_counted_for_models_over_all_cycles() -> None:
    model = nn.Sequential(nn.Linear(4, 8))
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1)
    with torchprof.Profile(model, schedule=schedule) as prof:
        for _ in range(6):
            model(torch.rand(3, 4))
            with torch.no_grad():
                model(torch.rand(3, 4))
            with torch.inference_mode():
                model(torch.rand(3, 4))
            prof.step()
    assert [layer.grad_calls for layer in prof.run.layers] == [3, 1]
    assert torchprof.merge([prof.run]).layers[0].grad_calls == 3
