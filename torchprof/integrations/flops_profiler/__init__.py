"""flops-profiler's interface over torchprof: its calls, its convention of counting, its page.

``get_model_profile`` and ``FlopsProfiler`` take what those of flops-profiler 0.1.2 and of DeepSpeed's flops profiler
take, and print the same three parts under the same labels. docs/coming-from-flops-profiler.md says which figures differ
and why.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchprof
from torchprof.encoding import fitting
from torchprof.integrations.flops_profiler.page import Measured, bounded, is_one_of, summary_of
from torchprof.integrations.flops_profiler.strings import duration_text, macs_text, number_text, params_text

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler:
    """Profile what a model does between ``start_profile`` and ``stop_profile``, and print it as flops-profiler does.

    ``ds_engine``: a DeepSpeed engine, whose sizes and timers go into the summary. ``recompute_fwd_factor``: how much of
    the forward backward does again (activation checkpointing); used where backward was timed by the engine and was not
    profiled.

    Figures can be asked for and printed from ``stop_profile`` to ``end_profile``; at other times that raises
    TorchprofError. torchprof allows one profile at a time in a process: where something may raise after
    ``start_profile``, put ``end_profile`` into a ``finally``.
    """

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        if not isinstance(model, nn.Module):
            raise torchprof.TorchprofError(f"FlopsProfiler needs a torch.nn.Module, not {model!r:.80}.")
        if not isinstance(recompute_fwd_factor, (int, float)) or recompute_fwd_factor < 0:
            raise torchprof.TorchprofError(
                "recompute_fwd_factor is the share of the forward that backward does again, 0 or more, not "
                f"{recompute_fwd_factor!r}."
            )
        self.model = model
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor
        self.started = False
        self._ignored: tuple[Any, ...] = ()
        self._block: torchprof.Profile | None = None
        self._figures: Measured | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling, anew where it had been started. What is in modules of ``ignore_list`` is not counted:
        classes, or modules of the model; their time is still part of the latency.
        """
        ignored = _checked_ignored(ignore_list, self.model)
        self.end_profile()
        on_cuda = any(param.is_cuda for param in self.model.parameters())
        block = torchprof.Profile(self.model, with_flops=True, use_cuda=on_cuda)
        block.__enter__()
        self._block, self._ignored, self.started = block, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling; does nothing where it is not going on."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            self._figures = Measured(block.run, self.model, self._ignored)

    def reset_profile(self) -> None:
        """Forget what was profiled; where profiling goes on, it begins anew."""
        if self._block is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Forget what was profiled, and stop where profiling goes on."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
        self._figures = None
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str | None:
        """The floating-point operations of the model's forwards; None (``–``) where nothing of them could be counted,
        and as a string with ``≥`` where not all could."""
        whole = self._measured().whole
        return bounded(whole, number_text(whole.known[0])) if as_string else whole.known[0]

    def get_total_macs(self, as_string: bool = False) -> int | str | None:
        """The multiply-accumulates of the model's forwards, as ``get_total_flops`` says its figure."""
        whole = self._measured().whole
        return bounded(whole, macs_text(whole.known[1])) if as_string else whole.known[1]

    def get_total_params(self, as_string: bool = False) -> int | str | None:
        """The model's parameters; None (``–``) where a lazy layer has not made them yet."""
        params = self._measured().whole.params
        return params_text(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str:
        """How long the model's forwards lasted, in seconds."""
        ns = self._measured().whole.ns
        return duration_text(ns) if as_string else ns / 1e9

    def get_total_functional_duration(self, as_string: bool = False) -> float | str:
        """How long the functionals in the model's forwards lasted, in seconds."""
        ns = self._measured().functionals_ns
        return duration_text(ns) if as_string else ns / 1e9

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> None:
        """Print the summary, the aggregated profile and, with ``detailed``, that of each module.

        ``module_depth`` is the last depth of the aggregated profile, -1 for all. ``output_file``: written there instead
        of to stdout. Raises TorchprofError for a file that cannot be written.
        """
        measured = self._measured()
        _check_page(module_depth, top_modules, output_file)
        lines = list(summary_of(measured, profile_step, self.ds_engine, self.recompute_fwd_factor))
        lines += ["", "----------------------------- Aggregated Profile per Device -----------------------------"]
        lines += measured.by_depth(module_depth, top_modules)
        if detailed:
            lines += [
                "",
                "------------------------------ Detailed Profile per Device ------------------------------",
                "Each module profile is listed after its name in the following order:",
                "module: what it did with all below it, and which share of the model that is; functionals: the same by "
                "functional; then what the module says of itself",
                "",
                "Note: 1. What a module does itself is not in the modules that it holds, so these may make up less.",
                "2. Flops follow from shapes alone. What a kernel saves is not taken off.",
                "3. The latency of a module is how long its forward lasted, or on a device, its kernels.",
                "",
                *measured.by_module(),
            ]
        lines.append("------------------------------------------------------------------------------")
        text = "\n".join(lines)
        if not output_file:
            print(fitting(text, sys.stdout))
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise torchprof.TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print, for each depth up to ``module_depth``, the ``top_modules`` classes of modules with the largest sums
        of parameters, flops, MACs and forward latency."""
        measured = self._measured()
        _check_page(module_depth, top_modules, None)
        print(fitting("\n".join(measured.by_depth(module_depth, top_modules)), sys.stdout))

    def _measured(self) -> Measured:
        if self._block is not None:
            raise torchprof.TorchprofError("Profiling is still going on: call stop_profile() first.")
        if self._figures is None:
            raise torchprof.TorchprofError(
                "There are no figures: call start_profile(), then the model, then stop_profile(). They are there until "
                "reset_profile() or end_profile()."
            )
        return self._figures


def _checked_ignored(ignore: Any, model: nn.Module) -> tuple[Any, ...]:
    if ignore is None:
        return ()
    if not isinstance(ignore, Iterable) or isinstance(ignore, (str, nn.Module)):
        raise torchprof.TorchprofError(
            f"What is to be ignored is a list of classes of modules, [nn.Dropout], or of modules, not {ignore!r:.80}."
        )
    ignored = tuple(ignore)
    for one in ignored:
        if isinstance(one, nn.Module):
            if not is_one_of(one, model.modules()):
                raise torchprof.TorchprofError(f"{one!r:.80}, which is to be ignored, is no module of the model.")
        elif not isinstance(one, type):
            raise torchprof.TorchprofError(
                f"{one!r:.80} cannot be ignored: it is neither a class of modules nor a module."
            )
    return ignored


def _check_page(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    if not isinstance(module_depth, int) or module_depth < -1:
        raise torchprof.TorchprofError(f"module_depth is 0 or more, or -1 for all depths, not {module_depth!r}.")
    if not isinstance(top_modules, int) or top_modules < 1:
        raise torchprof.TorchprofError(f"top_modules is how many are listed, 1 or more, not {top_modules!r}.")
    if output_file:
        if not isinstance(output_file, (str, PathLike)):
            raise torchprof.TorchprofError(f"output_file is the name of a file, not {output_file!r:.80}.")
        folder = Path(output_file).absolute().parent
        if not folder.is_dir():
            raise torchprof.TorchprofError(
                f"output_file={str(output_file)!r}: there is no folder {str(folder)!r}. Make it first."
            )


def get_model_profile(
    model: nn.Module,
    input_shape: Sequence[int] | None = None,
    args: Sequence[Any] | None = [],  # their defaults, never changed
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
    """Call a model once, in eval mode, after ``warm_up`` calls, and return its (flops, MACs, parameters).

    ``input_shape``: the model takes one tensor of this shape, of the type and on the device of its first parameter, in
    place of ``args``. ``func_name``, or ``mode``: the method to call, such as ``generate``. ``module_depth``,
    ``top_modules``, ``detailed`` and ``output_file`` are for the page: see ``FlopsProfiler.print_model_profile``.
    ``as_string``: ``"22.36 G"`` for a number. ``ignore_modules``: see ``FlopsProfiler.start_profile``.

    Gradients are recorded as the caller has it. All modules are in train or eval mode afterwards as they were before.
    Raises TorchprofError for arguments that do not fit, and what the model raises.
    """
    profiler = FlopsProfiler(model)
    if mode is not None and func_name not in ("forward", mode):
        raise torchprof.TorchprofError(
            f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out."
        )
    call = _method(model, func_name if mode is None else mode)
    if not isinstance(warm_up, int) or warm_up < 0:
        raise torchprof.TorchprofError(f"warm_up is a number of calls, 0 or more, not {warm_up!r}.")
    _check_page(module_depth, top_modules, output_file)
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
    """What the model is called on."""
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
