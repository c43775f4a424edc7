"""Which modules have a tensor: by the tensor itself, else by its memory."""

from __future__ import annotations

import torch
from torch import nn

from torchprof.record.parameters import Owners


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
