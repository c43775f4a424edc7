"""The state of a model, saved and restored: parameters, buffers, gradients, modes, random number generators."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn

from torchprof.record.torch_internals import optional

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element

_has_tensors_inside: Callable[[Tensor], bool] = optional(
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass", lambda tensor: False
)

# The objects whose contents belong to the state, too.
_FOLLOWED = (nn.Module, torch.optim.Optimizer, Tensor, dict, list, tuple)


class ModelState:
    """A copy of all state that calls of a model may change, and that ``restore`` brings back.

    The state is all that can be reached from the model and ``others`` through the attributes of modules and optimizers,
    dicts, lists and tuples. Tensors are copied to the CPU, so that the copies take no memory of the device. With
    ``parameters=False`` parameters are not copied; then ``written`` has the names of parameters that were written to.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any], parameters: bool) -> None:
        self.tensors: list[Tensor] = []
        self.written: dict[str, None] = {}
        self._copies_parameters = parameters
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        self._containers: list[tuple[Any, Any]] = []  # a dict or list, and a copy of it
        # A frozen ScriptModule has no attribute ``training``.
        self._modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
        self._gradients: list[tuple[Tensor, bool, Tensor | None]] = []  # tensor, requires_grad, grad
        self._copied: list[tuple[Tensor, Tensor, Tensor]] = []  # tensor, its data, the bits
        self._cloned: list[tuple[Tensor, Tensor, int]] = []  # sparse and quantized: tensor, clone, version
        self._uncopied: list[tuple[str, Tensor, int]] = []  # name, parameter, version
        self._random = _random_states()
        # Parameters and buffers are listed, too: a ScriptModule does not keep them in its ``__dict__``.
        self._copy_all([model, list(model.parameters()), list(model.buffers()), *others])

    def _copy_all(self, waiting: list[Any]) -> None:
        seen: set[int] = set()
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _FOLLOWED) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                waiting.append(vars(value))
            elif isinstance(value, torch.optim.Optimizer):
                # An optimizer that wraps another may have the other's state and groups as properties.
                waiting += [vars(value), value.state, value.param_groups]
            elif isinstance(value, dict):
                if type(value) in (dict, OrderedDict, defaultdict):  # other subclasses may act when items are set
                    self._containers.append((value, dict(value)))
                waiting += value.values()
            elif isinstance(value, (list, tuple)):
                if type(value) is list:
                    self._containers.append((value, list(value)))
                waiting += value
            else:
                waiting += self._copy_tensor(value)

    def _copy_tensor(self, tensor: Tensor) -> list[Tensor]:
        """Copy a tensor. For a wrapper subclass, returns its inner tensors instead; they have to be copied then."""
        self.tensors.append(tensor)
        if tensor.is_leaf:
            self._gradients.append((tensor, tensor.requires_grad, tensor.grad))
        if isinstance(tensor, nn.Parameter) and not self._copies_parameters:
            if not tensor.is_inference():  # inference tensors have no version
                name = self._names.get(id(tensor), "one outside of it")
                self._uncopied.append((name, tensor, tensor._version))
        elif _has_tensors_inside(tensor):
            return [getattr(tensor, name) for name in cast(Any, tensor).__tensor_flatten__()[0]]
        elif tensor.layout is not torch.strided or tensor.is_quantized:
            if not tensor.is_inference():
                self._cloned.append((tensor, tensor.detach().clone(), tensor._version))
        elif not tensor.is_meta:
            self._copied.append((tensor, tensor.data, _bits(_without_repeats(tensor.data)).clone()))
        return []

    def clear_gradients(self) -> None:
        for tensor, _, _ in self._gradients:
            tensor.grad = None

    def restore(self) -> None:
        """Restore all state. If Ctrl-C interrupts this, it starts again before KeyboardInterrupt is raised."""
        try:
            self._restore()
        except KeyboardInterrupt:
            self._restore()
            raise

    def _restore(self) -> None:
        for container, before in self._containers:
            _restore_container(container, before)
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        for name, tensor, version in self._uncopied:
            if tensor._version != version:
                self.written[name] = None
        for tensor, data, bits in self._copied:
            if _memory_of(tensor) != _memory_of(data):
                tensor.data = data
            elements = _without_repeats(data)
            if not torch.equal(_bits(elements), bits):  # write only if needed: the memory may be read-only
                elements.copy_(bits.view(elements.dtype).view(elements.shape))
        for tensor, data, version in self._cloned:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(data)
        for tensor, requires_grad, gradient in self._gradients:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for set_state, state in self._random:
            set_state(state)


def _restore_container(container: Any, before: Any) -> None:
    """Give a dict or a list its earlier items again. Only items that differ are written."""
    if isinstance(container, list):
        if len(container) != len(before) or any(now is not was for now, was in zip(container, before)):
            container[:] = before
        return
    for key in [key for key in container if key not in before]:
        del container[key]
    for key, value in before.items():
        if key not in container or container[key] is not value:
            container[key] = value


def _memory_of(tensor: Tensor) -> tuple[Any, ...]:
    """Address, shape and strides: equal if two tensors are the same view of the same memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _without_repeats(data: Tensor) -> Tensor:
    """A view of an expanded tensor that has each of its elements once."""
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride())):
        if stride == 0 and size > 1:
            data = data.narrow(dim, 0, 1)
    return data


def _bits(data: Tensor) -> Tensor:
    """The elements as integers on the CPU, since NaN does not equal itself. May share memory with ``data``."""
    data = data.cpu().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _random_states() -> list[tuple[Callable[[Any], object], Any]]:
    """For each random number generator, the function that sets its state, and its state."""
    states: list[tuple[Callable[[Any], object], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    for module in (torch.cuda, torch.xpu):
        if module.is_available():
            states.append((module.set_rng_state_all, module.get_rng_state_all()))
    if torch.backends.mps.is_available():
        states.append((torch.mps.set_rng_state, torch.mps.get_rng_state()))
    return states
