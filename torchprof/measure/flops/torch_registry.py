"""Formulas in torch's registry, with those that users add with ``@register_flop_formula``.

They are called as ``FlopCounterMode`` calls them: with the arguments of the op and its result. Here these are meta
tensors, made from the recorded signature; nothing is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils.flop_counter import flop_registry

from torchprof.attribute.events import Detail
from torchprof.measure.flops.operation import Work, detail_of, does_no_arithmetic, formula_of
from torchprof.run.torch_names import DTYPES, NO_TENSORS
from torchprof.run.words import Signature

_TORCHS_MODULE = "torch.utils.flop_counter"  # of torch's own formulas
_outside_of_modes: Callable[[], AbstractContextManager[Any]] = getattr(
    _python_dispatch, "_disable_current_modes", nullcontext
)
"""Runs an op without the modes of the user, which would see it."""
_DTYPES = {recorded: dtype.name for dtype in DTYPES for recorded in dtype.recorded}  # names in torch


def registered_formula(name: str) -> Callable[..., Any] | None:
    """The registered formula of an op by its name in a profile (``mine::scan``); None if there is none."""
    if (packet := _packet(name)) is None:
        return None
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    if formula is None:  # torch 2.4 registers each overload
        overloads = (getattr(packet, overload) for overload in packet.overloads())
        formula = next(filter(None, map(flop_registry.get, overloads)), None)
    return formula


def has_users_formula(name: str) -> bool:
    """Whether the registered formula of an op is a user's, and not torch's."""
    formula = registered_formula(name)
    return formula is not None and getattr(formula, "__module__", None) != _TORCHS_MODULE


def has_formula(name: str) -> bool:
    """Whether an op is counted if its shapes are recorded."""
    return formula_of(name) is not None or registered_formula(name) is not None


def detail_for(name: str, least: Detail) -> Detail:
    """How much of an op's inputs to read; ``least`` if they do not count."""
    if has_users_formula(name):
        return Detail.SCALARS
    if does_no_arithmetic(name) or "::" not in name:
        return least
    if formula_of(name) is None and registered_formula(name) is not None:
        return Detail.SCALARS
    return detail_of(name)


def registered_work(name: str, signature: Signature) -> Work | None:
    """The work of one call by the registered formula; None if the formula fails.

    torch's registry counts two FLOPs for each multiply-accumulate and nothing else, so the MACs are half of the FLOPs.
    For an op that does not run on the meta device, the formula gets None as the result.
    """
    packet, formula = _packet(name), registered_formula(name)
    if packet is None or formula is None:
        return None
    for overload in packet.overloads():
        op = getattr(packet, overload)
        try:
            args, kwargs = _arguments(op._schema, signature)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            continue  # the inputs are those of another overload
        result = None
        with suppress(Exception), torch.no_grad(), _outside_of_modes():
            result = op(*args, **kwargs)
        try:
            flops = int(formula(*args, **kwargs, out_val=result))
        except Exception:  # the user's code
            continue
        return Work(flops // 2, flops)
    return None


# What torch's dispatcher tells of an op

_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"
"""Dispatch keys of kernels that call other ops. A device's own kernel comes before an explicit one."""


def calls_only_ops(name: str) -> bool:
    """Whether an op is defined by the ops that it calls, and has no kernel on any device."""
    return _all_overloads(name, (_IMPLICIT,)) is True


def is_made_of_ops(name: str) -> bool:
    """Whether the ops that an op calls are all its work. It is known for torch's ops, and assumed for all others."""
    return not name.startswith("aten::") or _all_overloads(name, (_IMPLICIT, _EXPLICIT)) is not False


def _all_overloads(name: str, keys: Sequence[str]) -> bool | None:
    """Whether all overloads of an op, except those with ``out=``, have a kernel under one of these dispatch keys.

    None for an op that this version of torch does not have.
    """
    packet = _packet(name)
    has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    have_all = None
    for overload in packet.overloads() if packet is not None and has_kernel is not None else ():
        full = name if overload == "default" else f"{name}.{overload}"
        with suppress(RuntimeError):  # an overload that exists only in TorchScript
            if not overload.endswith("out"):
                have_all = have_all is not False and any(has_kernel(full, key) for key in keys)
    return have_all


def operator_of(name: str, overload: str) -> Any:
    """An operator by its name in a profile; None if this torch does not have it."""
    return getattr(_packet(name), overload, None)


def _packet(name: str) -> Any:
    """All overloads of an operator; None if this torch does not have it."""
    namespace, _, op = name.rpartition("::")
    if not namespace:
        return None
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except (AttributeError, RuntimeError):
        return None


def _arguments(schema: Any, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Meta tensors and scalars for one call. Raises ``ValueError`` if the signature does not fit the schema."""
    given = itertools.zip_longest(signature.shapes, signature.dtypes, signature.scalars)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if len(signature.dtypes) > len(schema.arguments):
        raise ValueError
    for argument, (shape, dtype, scalar) in zip(schema.arguments, given):
        value: Any = scalar
        is_tensor = "Tensor" in str(argument.type)
        if dtype == "TensorList":
            value = [torch.empty(of_tensor, device="meta") for of_tensor in shape]
        elif dtype not in NO_TENSORS:
            value = torch.empty(shape, dtype=getattr(torch, _DTYPES[dtype]), device="meta")
        if is_tensor != (isinstance(value, torch.Tensor) or dtype == "TensorList") and value is not None:
            raise ValueError
        if value is None:
            value = argument.default_value  # strings are not recorded
        if isinstance(value, tuple):
            value = list(value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs
