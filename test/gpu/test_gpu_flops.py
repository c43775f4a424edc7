"""FLOPs: what is counted from the operators of a device equals what is counted on the CPU, and torch's own counter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.libraries import HAS_SHAPES_OF_LISTS
from build.machine import Machine, on_gpu, whole
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import torchprof
from examples.large_models import Llama, ResNet50
from torchprof.run.words import BACKWARD, FORWARD


def moved(inputs: Any, device: torch.device) -> Any:
    if isinstance(inputs, torch.Tensor):
        return inputs.to(device)
    return type(inputs)(moved(one, device) for one in inputs) if isinstance(inputs, (list, tuple)) else inputs


def tensors_in(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    values = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else ()
    return [tensor for value in values for tensor in tensors_in(value)]


def back(output: Any) -> None:
    wanted = [tensor for tensor in tensors_in(output) if tensor.requires_grad]
    torch.stack([tensor.float().sum() for tensor in wanted]).sum().backward()


def counted(model: nn.Module, inputs: Any, device: torch.device) -> torchprof.Run:
    model, inputs = copy.deepcopy(model).to(device), moved(inputs, device)
    with torchprof.Profile(model, device=device, with_flops=True) as prof:
        back(model(*inputs))
    return prof.run


def macs(run: torchprof.Run, phase: str) -> dict[str, int]:
    return {node.layer.name: node.self.macs for node in run.tree(phase).walk()}


@on_gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_has_the_counts_of_the_cpu(name: str, machine: Machine) -> None:
    """Libraries for a GPU have operators of their own for convolutions, recurrent layers, norms and attention. Those of
    the CPU are held against torch's counter in test/measure/test_flops.py."""
    architecture = ARCHITECTURES[name]
    model, inputs = architecture.make(), architecture.inputs()
    if not HAS_SHAPES_OF_LISTS and any(isinstance(module, nn.RNNBase) for module in model.modules()):
        pytest.skip("this torch records no shapes of lists, in which cuDNN gets the weights of a recurrent layer")
    here, there = (counted(model, inputs, device) for device in (torch.device("cpu"), machine.device))
    assert macs(there, FORWARD) == macs(here, FORWARD)
    if not architecture.attention:
        assert macs(there, BACKWARD) == macs(here, BACKWARD)
    uncounted = [str(one) for one in there.warnings if one.code.startswith("uncounted")]
    assert not uncounted


RECURRENT = {
    "LSTM": lambda: nn.LSTM(32, 48, num_layers=2, bidirectional=True),
    "LSTM with a projection": lambda: nn.LSTM(32, 48, proj_size=16),
    "GRU": lambda: nn.GRU(32, 48, num_layers=2, dropout=0.1),
    "RNN": lambda: nn.RNN(32, 48, nonlinearity="relu"),
}


@pytest.mark.skipif(not HAS_SHAPES_OF_LISTS, reason="this torch records no shapes of lists")
@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_of_the_library_have_the_counts_of_the_cpu(name: str, machine: Machine) -> None:
    model, inputs = RECURRENT[name](), (torch.rand(7, 4, 32, requires_grad=True),)
    here, there = (counted(model, inputs, device) for device in (torch.device("cpu"), machine.device))
    assert whole(there).macs == whole(here).macs > 0


@pytest.mark.parametrize("name", ["ResNet-50", "Llama"])
def test_a_training_step_has_the_counts_of_torchs_counter(name: str, machine: Machine) -> None:
    if name == "ResNet-50":
        model, x = ResNet50(), torch.rand(2, 3, 224, 224) if machine.is_gpu else torch.rand(2, 3, 64, 64)
    else:
        model, x = Llama(100, 64, 2, 8, 4, 96), torch.randint(0, 100, (2, 64))
    model, x = model.to(machine.device), x.to(machine.device)
    with FlopCounterMode(display=False) as forward:
        output = model(x)
    with FlopCounterMode(display=False) as backward:
        back(output)
    run = machine.recorded(model, lambda: back(model(x)), calls=1, with_flops=True).run
    if isinstance(model, Llama):
        assert run.tree(FORWARD).total.macs == model.macs(2, 64, 64)
    else:
        assert run.tree(FORWARD).total.macs == 2 * 4_089_184_256 or not machine.is_gpu
    if machine.is_gpu or name != "Llama":  # it does not know the fused attention of the CPU
        assert 2 * run.tree(FORWARD).total.macs == forward.get_total_flops()
        assert 2 * run.tree(BACKWARD).total.macs == backward.get_total_flops()


# What the device can do

DENSE = {
    "H200": {"float32": 67, "bfloat16": 989, "float16": 989, "bytes": 4.8},
    "H100": {"float32": 67, "bfloat16": 989, "float16": 989, "bytes": 3.35},
    "A100": {"float32": 19.5, "bfloat16": 312, "float16": 312, "bytes": 2.04},
}
"""TFLOP/s without sparsity and without TF32, and TB/s: NVIDIA's data sheets of the SXM versions."""


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_what_the_device_reaches_is_near_the_data_sheet(
    name: str, machine: Machine, figure: Callable[..., None]
) -> None:
    if not machine.is_gpu and name != "float32":
        pytest.skip("slow on a CPU without such instructions")
    found = torchprof.peak(machine.device, getattr(torch, name))
    sheet: dict[str, float] = {}
    if machine.is_gpu:
        called = torch.cuda.get_device_name()
        sheet = next((figures for key, figures in DENSE.items() if key in called), {})
    figure(f"peak of {name}", found.flops_per_s / 1e12, sheet.get(name), "TFLOP/s")
    figure("peak of a copy", found.bytes_per_s / 1e12, sheet.get("bytes"), "TB/s")
    assert found.flops_per_s > 0 and found.bytes_per_s > 0
    if sheet:
        assert 0.5 * sheet[name] < found.flops_per_s / 1e12 < 1.05 * sheet[name]
        assert 0.6 * sheet["bytes"] < found.bytes_per_s / 1e12 < 1.02 * sheet["bytes"]


@on_gpu
def test_a_large_product_uses_most_of_the_device(machine: Machine, figure: Callable[..., None]) -> None:
    """FLOPs from our count and time from our attribution, against ``peak()``, which has neither."""
    model = nn.Linear(8192, 8192, bias=False).to(machine.device, torch.bfloat16)
    x = torch.randn(8192, 8192, device=machine.device, dtype=torch.bfloat16)
    reachable = torchprof.peak(machine.device, torch.bfloat16).flops_per_s

    def products() -> None:
        with torch.no_grad():
            for _ in range(10):
                model(x)

    cost = machine.recorded(model, products, with_flops=True).run.tree().total
    assert cost.flops == 10 * 2 * 8192**3
    share = cost.flops / (cost.device_ns * 1e-9) / reachable
    figure("share of the peak in a product of 8192 x 8192", share)
    assert 0.85 <= share <= 1.1
