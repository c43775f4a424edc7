"""A copy of a model on the meta device, whose tensors have shapes but no data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from torchprof.errors import TorchprofError
from torchprof.record.modules import walk_modules, with_wrapped
from torchprof.record.torch_internals import needed

_pytree = needed("torch.utils._pytree")
ON_DATA = "Profile it on data: torchprof.Profile(model, with_flops=True)."


def without_data(model: nn.Module) -> nn.Module:
    """A copy of a model, with its tensors on the meta device."""
    model = with_wrapped(model)[-1]
    name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TorchprofError(f"{name} contains TorchScript, which has its own constants: {ON_DATA}")
    if any(is_lazy(tensor) for tensor in model.parameters()):
        raise TorchprofError(f"{name} has lazy parameters without shapes: call the model once before.")
    # deepcopy takes a tensor's copy from the memo if it is there, so no data is copied.
    memo: dict[int, Any] = {}
    try:
        for tensor in {id(tensor): tensor for tensor in _tensors_of(model)}.values():
            memo[id(tensor)] = shape_of(tensor)
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # the user's classes may raise anything when they are copied
        raise TorchprofError(
            f"{name} cannot be copied without its data: {type(error).__name__}: {first_line(error)} {ON_DATA}"
        ) from error
    for module in twin.modules():
        module._compiled_call_impl = None  # run eagerly: torch.compile would compile for the meta device
    return twin


def _tensors_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers, and tensors in plain attributes of modules."""
    for _, _, module in walk_modules(model):
        yield from _tensors(module._parameters.values())
        yield from _tensors(module._buffers.values())
        yield from _tensors(value for name, value in vars(module).items() if name not in ("_parameters", "_buffers"))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, dict)) and not isinstance(value, nn.Module):
            yield from (leaf for leaf in _pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def shape_of(value: Any) -> Any:
    """A tensor on the meta device with the same shape, strides and dtype; a parameter stays one. Others unchanged."""
    if isinstance(value, PackedSequence):
        return value._replace(data=shape_of(value.data))  # the batch sizes and indices stay on the CPU
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty_like(value, device="meta") if value.is_meta else value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def first_line(error: BaseException) -> str:
    """The first line of the message of an error, as a sentence."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if text[-1] in ".!?" else f"{text}."
