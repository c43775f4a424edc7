"""``get_model_profile``: profile one call of a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any

import torch
from torch import nn

import torchprof
from torchprof.integrations.flops_profiler.profiler import FlopsProfiler, check_printing


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] | None = [],  # the default of flops-profiler; it is never modified
    kwargs: Mapping[str, Any] | None = {},
    print_profile: bool = True,
    detailed: bool = True,
    module_depth: int = -1,
    top_modules: int = 10,
    warm_up: int = 3,
    as_string: bool = False,
    output_file: str | PathLike[str] | None = None,
    ignore_modules: Iterable[Any] | None = None,
    func_name: str = "forward",
    *,
    mode: str | None = None,
) -> tuple[int | str | None, int | str | None, int | str | None]:
    """Profile one call of a model in eval mode, after ``warm_up`` calls. Returns (flops, MACs, parameters).

    ``input_shape``: call the model on one tensor of this shape, in place of ``args``, with the dtype and the device of
    the model's first parameter. ``func_name``, or ``mode``: the method to call, such as ``generate``. ``module_depth``,
    ``top_modules``, ``detailed`` and ``output_file`` are for the text: see ``FlopsProfiler.print_model_profile``.
    ``as_string``: return text such as ``"22.36 G"``. ``ignore_modules``: see ``FlopsProfiler.start_profile``.

    Gradients are recorded if the caller has them enabled. Afterwards, every module is in the mode (train or eval) that
    it had before. Raises TorchprofError for bad arguments; errors of the model pass through.
    """
    profiler = FlopsProfiler(model)
    if mode is not None and func_name not in ("forward", mode):
        raise torchprof.TorchprofError(
            f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out."
        )
    call = _method(model, func_name if mode is None else mode)
    if not isinstance(warm_up, int) or warm_up < 0:
        raise torchprof.TorchprofError(f"warm_up is a number of calls, 0 or more, not {warm_up!r}.")
    check_printing(module_depth, top_modules, output_file)
    given, named = _inputs(model, input_shape, args, kwargs)
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for _ in range(warm_up):
            call(*given, **named)
        profiler.start_profile(ignore_modules)
        call(*given, **named)
        profiler.stop_profile()
        if print_profile:
            profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
        return (
            profiler.get_total_flops(as_string),
            profiler.get_total_macs(as_string),
            profiler.get_total_params(as_string),
        )
    finally:
        profiler.end_profile()
        for module, training in modes:
            module.training = training


def _method(model: nn.Module, name: Any) -> Any:
    if name == "forward":
        return model
    method = getattr(model, name, None) if isinstance(name, str) else None
    if not callable(method):
        raise torchprof.TorchprofError(f"{type(model).__name__} has no method {name!r} to profile.")
    return method


def _inputs(model: nn.Module, shape: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keyword arguments of the call."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise torchprof.TorchprofError(f"kwargs is a dict of named arguments, not {kwargs!r:.80}.")
    named = dict(kwargs or {})
    if shape is not None:
        sizes = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else []
        if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise torchprof.TorchprofError(f"input_shape is a tuple of sizes, (1, 3, 224, 224), not {shape!r:.80}.")
        first = next(model.parameters(), None)
        dtype, device = (None, None) if first is None else (first.dtype, first.device)
        return [torch.zeros(sizes, dtype=dtype, device=device)], named
    if args is not None and not isinstance(args, (list, tuple)):
        raise torchprof.TorchprofError(f"args is a list of arguments, [x], not {type(args).__name__}.")
    if not args and not named:
        raise torchprof.TorchprofError("The model needs something to be called on: give input_shape, args or kwargs.")
    return list(args or []), named
