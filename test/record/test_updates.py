"""Which parameters change while we record, and how many calls record a graph."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import torchprof
from torchprof import Run


def updated(run: Run) -> dict[str, int | None]:
    return {layer.name: layer.updated_params for layer in run.layers}


def test_the_parameters_of_the_optimizers_that_made_a_step_are_known(tmp_path: Path) -> None:
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
    prof.run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == prof.run


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
