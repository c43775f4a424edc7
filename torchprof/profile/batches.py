"""The batches of a benchmark: the user's inputs, cut or repeated to fit each batch size."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchprof.errors import TorchprofError
from torchprof.record.modules import arguments_of
from torchprof.record.torch_internals import needed

_pytree = needed("torch.utils._pytree")
_USE_A_FUNCTION = "Give a function instead that makes the inputs of a batch size: inputs=lambda size: (...)."


class Batch:
    """The arguments of a call. The tensors are copies, so that the model cannot change the user's tensors."""

    def __init__(self, inputs: Any, copied: Callable[[Tensor], Tensor]) -> None:
        args, kwargs = arguments_of(inputs)
        self.args, self.kwargs = _pytree.tree_map(
            lambda leaf: copied(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs)
        )
        self.tensors = tensors_in((self.args, self.kwargs))
        if any(tensor.is_meta for tensor in self.tensors):
            raise TorchprofError("inputs are on the meta device, which computes nothing: there is no time to measure.")


def batches_of(inputs: Any) -> Callable[[int], Batch]:
    """A function that makes the batch of a given size from the user's ``inputs``."""
    if callable(inputs) and not isinstance(inputs, Tensor):
        return lambda size: Batch(inputs(size), _copied)
    # size(0), since a nested tensor in strided layout has no ``shape``.
    lengths = [tensor.size(0) for tensor in tensors_in(arguments_of(inputs)) if tensor.dim()]
    if not lengths or not lengths[0]:
        what = "holds an empty batch" if lengths else "holds no tensor with a dimension"
        raise TorchprofError(f"inputs {what}, so there is nothing to resize. {_USE_A_FUNCTION}")
    return lambda size: Batch(inputs, partial(_resized, length=lengths[0], size=size))


def tensors_in(tree: Any) -> list[Tensor]:
    return [leaf for leaf in _pytree.tree_flatten(tree)[0] if isinstance(leaf, Tensor)]


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _resized(tensor: Tensor, length: int, size: int) -> Tensor:
    """A copy in the same memory format. If dimension 0 is ``length`` long, it is cut or repeated to ``size``."""
    if not tensor.dim() or tensor.size(0) != length or size == length:
        return _copied(tensor)
    try:
        data = tensor.detach()
        if size < length:
            return data[:size].clone().requires_grad_(tensor.requires_grad)
        pieces = [data] * (size // length)
        if size % length:  # cat with an empty piece loses the memory format
            pieces.append(data[: size % length])
        return torch.cat(pieces).requires_grad_(tensor.requires_grad)
    except RuntimeError as error:
        if ran_out_of_memory(error):
            raise
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TorchprofError(
            f"torch can neither cut nor repeat this {kind} tensor, so that its batch of {length} cannot become one of "
            f"{size}. {_USE_A_FUNCTION}"
        ) from error


def ran_out_of_memory(error: Exception) -> bool:
    message = str(error).lower()
    return isinstance(error, (MemoryError, torch.cuda.OutOfMemoryError)) or (
        isinstance(error, RuntimeError)
        and any(words in message for words in ("out of memory", "can't allocate memory", "not enough memory"))
    )
