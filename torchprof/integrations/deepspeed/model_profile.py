"""Profile one call of a model, as DeepSpeed's ``get_model_profile`` does."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from torchprof import Profile, TorchprofError
from torchprof.integrations.deepspeed.arguments import check_model, check_whole, checked_ignored_types, is_whole
from torchprof.integrations.deepspeed.printed import Printed
from torchprof.integrations.deepspeed.recorded import Recorded
from torchprof.integrations.deepspeed.strings import params_to_string
from torchprof.integrations.modules import modules_of, parameters_of


def get_model_profile(
    model: nn.Module,
    input_res: Any,
    input_constructor: Callable[[Any], Mapping[str, Any]] | None = None,
    print_profile: bool = True,
    print_aggregated_profile: bool = True,
    depth: int = -1,
    top_num: int = 3,
    warm_up: int = 10,
    as_strings: bool = True,
    ignore_modules: Iterable[type] | None = None,
) -> tuple[int | str | None, int | str | None]:
    """Profile one forward of a model in eval mode, print it, and return (multiply-adds, parameters).

    ``input_res``: the shape of one example. The model is called on a batch with one example, a tensor of ones with the
    dtype and the device of the model's parameters. With ``input_constructor``, the call is
    ``model(**input_constructor(input_res))``. ``depth`` and ``top_num`` are for the aggregated profile: depth 0 is the
    model itself, -1 the innermost modules. ``warm_up`` calls come first and are not measured. ``as_strings`` returns
    text (``"429.25 KMac"``, ``"61.71 k"``). The self work of modules whose type is in ``ignore_modules`` does not
    count. Gradients are recorded if the caller has them enabled.

    Afterwards, every module is in the mode (train or eval) that it had before. Raises TorchprofError for bad arguments;
    errors of the model pass through.
    """
    check_model(model)
    check_whole("depth", depth, -1)
    check_whole("top_num", top_num, 1)
    check_whole("warm_up", warm_up, 0)
    ignored = checked_ignored_types(ignore_modules)
    inputs = _inputs_from(input_constructor, input_res) if input_constructor is not None else _ones(model, input_res)
    # A frozen ScriptModule has no attribute ``training``.
    modes = [(module, module.training) for module in modules_of(model) if hasattr(module, "training")]
    try:
        for module, _ in modes:
            module.training = False  # a model may override model.eval() to do more
        for _ in range(warm_up):
            args, kwargs = inputs()
            model(*args, **kwargs)
        args, kwargs = inputs()
        with Profile(model, with_flops=True) as profile:
            model(*args, **kwargs)
    finally:
        for module, mode in modes:
            module.training = mode
    printed = Printed(model, Recorded(profile, ignored))
    printed.show(depth, top_num, tree=print_profile, top=print_aggregated_profile)
    if as_strings:
        return printed.total.macs_text(precision=2), params_to_string(printed.params)
    return printed.total.known_macs, printed.params


_Inputs = Callable[[], "tuple[tuple[Any, ...], Mapping[str, Any]]"]
"""Makes the arguments and keyword arguments of one call of the model."""


def _ones(model: nn.Module, input_res: Any) -> _Inputs:
    """A function that makes a batch with one example, a tensor of ones."""
    sizes = list(input_res) if isinstance(input_res, (tuple, list)) else []
    if not sizes or not all(is_whole(size) and size > 0 for size in sizes):
        raise TorchprofError(
            f"input_res={input_res!r:.80} are not the sizes of one example: write a tuple of numbers from 1 on, "
            "without the batch, (3, 224, 224). For inputs of another kind give an input_constructor that makes them."
        )
    floating = (param for param in parameters_of(model) if param.is_floating_point() or param.is_complex())
    like = next(floating, None)
    dtype, device = (None, None) if like is None else (like.dtype, like.device)
    return lambda: ((torch.ones((1, *sizes), dtype=dtype, device=device),), {})


def _inputs_from(constructor: Callable[[Any], Mapping[str, Any]], input_res: Any) -> _Inputs:
    """A function that makes the model's keyword arguments with ``input_constructor``."""
    if not callable(constructor):
        raise TorchprofError(
            f"input_constructor={constructor!r} cannot be called: give a function that takes input_res and returns the "
            "model's keyword arguments as a dict."
        )

    def inputs() -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        made = constructor(input_res)
        if not isinstance(made, Mapping) or not all(isinstance(name, str) for name in made):
            raise TorchprofError(
                f"input_constructor returned a {type(made).__name__} where a dict of the model's keyword arguments "
                'belongs: the model is called as model(**input_constructor(input_res)). Return {"x": tensor}.'
            )
        return (), made

    return inputs
