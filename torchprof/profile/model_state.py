"""The state of a model that a benchmark puts back: parameters, buffers, gradients and random numbers."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a number


# The model, as it was


_FOLLOWED = (nn.Module, torch.optim.Optimizer, Tensor, dict, list, tuple)


class ModelState:
    """Everything that calls may change, and how it was: what can be reached from a model and others.

    Attributes are followed through modules, optimizers, dicts, lists and tuples. Of tensors the numbers are copied to
    the CPU, so that the device's memory is left to the model. With ``parameters=False`` those of parameters are not
    copied; ``written`` then names the ones that were written to.
    """

    def __init__(self, model: nn.Module, others: Iterable[Any], parameters: bool) -> None:
        self.tensors: list[Tensor] = []
        self.written: dict[str, None] = {}
        self._boxes: list[tuple[Any, Any]] = []
        # A frozen ScriptModule has no mode.
        self._modes = [(module, module.training) for module in model.modules() if hasattr(module, "training")]
        self._gradients: list[tuple[Tensor, bool, Tensor | None]] = []
        self._numbers: list[tuple[Tensor, Tensor, Tensor]] = []
        self._unlike: list[tuple[Tensor, Tensor, int]] = []
        self._uncopied: list[tuple[str, Tensor, int]] = []
        self._random = _random_states()
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        seen: set[int] = set()
        # A ScriptModule has its tensors elsewhere than in its dict.
        waiting: list[Any] = [model, list(model.parameters()), list(model.buffers()), *others]
        while waiting:
            value = waiting.pop()
            if not isinstance(value, _FOLLOWED) or id(value) in seen:
                continue
            seen.add(id(value))
            if isinstance(value, nn.Module):
                waiting.append(vars(value))
            elif isinstance(value, torch.optim.Optimizer):
                waiting += [vars(value), value.state, value.param_groups]  # of a wrapper these are another's
            elif isinstance(value, dict):
                if type(value) in (dict, OrderedDict, defaultdict):  # what derives from them may act on its own
                    self._boxes.append((value, dict(value)))
                waiting += value.values()
            elif isinstance(value, (list, tuple)):
                if type(value) is list:
                    self._boxes.append((value, list(value)))
                waiting += value
            else:
                self.tensors.append(value)
                if value.is_leaf:
                    self._gradients.append((value, value.requires_grad, value.grad))
                # What was made in inference mode carries no count of writes.
                if isinstance(value, nn.Parameter) and not parameters:
                    if not value.is_inference():
                        self._uncopied.append((names.get(id(value), "one outside of it"), value, value._version))
                elif is_traceable_wrapper_subclass(value):
                    waiting += [getattr(value, name) for name in value.__tensor_flatten__()[0]]
                elif value.layout is not torch.strided or value.is_quantized:
                    if not value.is_inference():
                        self._unlike.append((value, value.detach().clone(), value._version))
                elif not value.is_meta:
                    self._numbers.append((value, value.data, _bits(_once(value.data)).clone()))

    def clear_gradients(self) -> None:
        for tensor, _, _ in self._gradients:
            tensor.grad = None

    def put_back(self) -> None:
        """Make all as it was. Ctrl-C waits for that."""
        try:
            self._put_back()
        except KeyboardInterrupt:
            self._put_back()
            raise

    def _put_back(self) -> None:
        for box, then in self._boxes:
            if isinstance(box, list):
                if len(box) != len(then) or any(now is not was for now, was in zip(box, then)):
                    box[:] = then
                continue
            for key in [key for key in box if key not in then]:
                del box[key]
            for key, value in then.items():
                if key not in box or box[key] is not value:
                    box[key] = value
        for module, training in self._modes:
            if module.training is not training:
                module.training = training
        for name, tensor, version in self._uncopied:
            if tensor._version != version:
                self.written[name] = None
        for tensor, data, bits in self._numbers:
            if _place(tensor) != _place(data):
                tensor.data = data
            once = _once(data)
            if not torch.equal(_bits(once), bits):  # what was not written to may lie in memory that cannot be
                once.copy_(bits.view(once.dtype).view(once.shape))
        for tensor, data, version in self._unlike:
            if tensor._version != version:
                with torch.no_grad():
                    tensor.copy_(data)
        for tensor, requires_grad, gradient in self._gradients:
            if tensor.requires_grad is not requires_grad:
                tensor.requires_grad_(requires_grad)
            if tensor.grad is not gradient:
                tensor.grad = gradient
        for put, state in self._random:
            put(state)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride()


def _once(data: Tensor) -> Tensor:
    """An expanded tensor's numbers without their repetitions."""
    for dim, (size, stride) in enumerate(zip(data.shape, data.stride())):
        if stride == 0 and size > 1:
            data = data.narrow(dim, 0, 1)
    return data


def _bits(data: Tensor) -> Tensor:
    """The numbers as integers on the CPU: as these a NaN is equal to itself. They may share the memory of ``data``."""
    data = data.cpu().resolve_conj().resolve_neg()
    flat = (torch.view_as_real(data) if data.is_complex() else data).contiguous().view(-1)
    return flat.view(_INTEGERS[flat.element_size()])


def _random_states() -> list[tuple[Callable[[Any], object], Any]]:
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
