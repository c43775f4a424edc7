"""``flops``: count MACs and FLOPs from shapes alone, on the meta device, whose tensors have no data."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.rnn import PackedSequence

from torchprof.errors import TorchprofError
from torchprof.profile.profile import Profile
from torchprof.record.modules import walk_modules, wrapped_step
from torchprof.record.torch_internals import needed
from torchprof.run.run import Run
from torchprof.run.warnings import caveat

_pytree = needed("torch.utils._pytree")
_ON_DATA = "Profile it on data: torchprof.Profile(model, with_flops=True)."
_SAYS_META = re.compile(r"\bmeta\b", re.IGNORECASE)


class _Untimed(Profile):
    """A Profile without times, which mean nothing on the meta device."""

    _timed = False


def flops(model: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Count parameters, MACs and FLOPs of ``model(*args, **kwargs)`` without computing it.

    A copy of the model runs once on the meta device, where tensors have shapes but no data. This needs no memory and no
    arithmetic, for models of any size: one made under ``with torch.device("meta"):`` need not fit into memory. The
    model and its arguments are not changed. If gradients are enabled and an output requires one, backward runs as well,
    from all outputs; for the forward alone, call this under ``torch.no_grad()``. On the meta device, attention and
    recurrent layers run as separate operators. Their forward counts the same as on other devices, but their backward
    lacks the work that a fused kernel repeats (QKᵀ, a fifth of attention's backward).

    The run has no times. Hooks of the model run as in any call.

    Raises TorchprofError for anything but a module, for a model that cannot be copied without its data, for lazy
    parameters and TorchScript, and if the forward needs the values of tensors (``if x.sum() > 0``). Such a model can be
    profiled on data, with ``torchprof.Profile(model, with_flops=True)``. Other errors of the model pass through.
    """
    return flops_of_call(model, "forward", args, kwargs)


def flops_of_call(model: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """``flops`` of a call of one of the model's methods; "forward" means the model itself."""
    if not isinstance(model, nn.Module):
        raise TorchprofError(f"flops needs a torch.nn.Module and the arguments to call it with, not {model!r:.80}.")
    twin = _without_data(model)
    args, kwargs = _pytree.tree_map(_shape_of, (args, kwargs), is_leaf=lambda value: isinstance(value, PackedSequence))
    failure = None
    with _Untimed(twin, device="cpu", with_flops=True) as prof, torch.device("meta"):
        try:
            result = (twin if method == "forward" else getattr(twin, method))(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            if not _SAYS_META.search(str(error)):
                raise
            raise TorchprofError(
                f"The {method} of {type(twin).__name__} does not run on the meta device, where tensors have no values: "
                f"{_first_line(error)} {_ON_DATA}"
            ) from error
        outputs = [
            leaf for leaf in _pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor) and leaf.requires_grad
        ]
        if outputs and torch.is_grad_enabled():
            try:
                torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
            except (RuntimeError, NotImplementedError) as error:
                failure = error
    run = prof.run
    if failure is not None:
        incomplete = caveat("backward_incomplete", error=_first_line(failure))
        run = replace(run, metas=(replace(run.meta, warnings=(*run.meta.warnings, incomplete)),))
    return run


def _without_data(model: nn.Module) -> nn.Module:
    """A copy of a model, with its tensors on the meta device."""
    while (step := wrapped_step(model)) is not None:
        model = getattr(model, step)
    name = type(model).__name__
    if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
        raise TorchprofError(f"{name} contains TorchScript, which has its own constants: {_ON_DATA}")
    if any(is_lazy(tensor) for tensor in model.parameters()):
        raise TorchprofError(f"{name} has lazy parameters without shapes: call the model once before.")
    # deepcopy takes a tensor's copy from the memo if it is there, so no data is copied.
    memo: dict[int, Any] = {}
    try:
        for tensor in {id(tensor): tensor for tensor in _tensors_of(model)}.values():
            memo[id(tensor)] = _shape_of(tensor)
        twin = copy.deepcopy(model, memo)
    except Exception as error:  # the user's classes may raise anything when they are copied
        raise TorchprofError(
            f"{name} cannot be copied without its data: {type(error).__name__}: {_first_line(error)} {_ON_DATA}"
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


def _shape_of(value: Any) -> Any:
    """A tensor on the meta device with the same shape, strides and dtype; a parameter stays one. Others unchanged."""
    if isinstance(value, PackedSequence):
        return value._replace(data=_shape_of(value.data))  # the batch sizes and indices stay on the CPU
    if not isinstance(value, torch.Tensor):
        return value
    empty = torch.empty_like(value, device="meta") if value.is_meta else value.detach().to("meta")
    if isinstance(value, nn.Parameter):
        return nn.Parameter(empty, requires_grad=value.requires_grad)
    return empty.requires_grad_(value.requires_grad)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return text if text[-1] in ".!?" else f"{text}."
