"""flops-profiler's interface: ``FlopsProfiler`` between start and stop, ``get_model_profile`` of one call."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchprof import Profile, TorchprofError
from torchprof.encoding import encodable
from torchprof.integrations.figures import at_least
from torchprof.integrations.flops_profiler.measured import Measured, is_one_of
from torchprof.integrations.flops_profiler.printed import lines_by_depth, printed_text
from torchprof.integrations.flops_profiler.strings import duration_text, macs_text, number_text, params_text


class FlopsProfiler:
    """Profile a model between ``start_profile`` and ``stop_profile``, and print the results as flops-profiler does.

    Figures can be read and printed from ``stop_profile`` to ``end_profile``; at other times that raises TorchprofError.
    torchprof allows one profile at a time in a process: if the code after ``start_profile`` may raise, put
    ``end_profile`` into a ``finally``.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise TorchprofError(f"FlopsProfiler needs a torch.nn.Module, not {model!r:.80}.")
        self.model = model
        self.started = False
        self._ignored: tuple[Any, ...] = ()
        self._block: Profile | None = None
        self._figures: Measured | None = None

    def start_profile(self, ignore_list: Iterable[Any] | None = None) -> None:
        """Start profiling. If a profile is open, it is dropped, and profiling starts again. ``ignore_list``: modules of
        the model, or classes of modules. Their work is not counted; their time is still part of the latency."""
        ignored = _checked_ignored(ignore_list, self.model)
        self.end_profile()
        block = Profile(self.model, with_flops=True)
        block.__enter__()
        self._block, self._ignored, self.started = block, ignored, True

    def stop_profile(self) -> None:
        """Stop profiling. Does nothing if it has not been started."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
            self._figures = Measured(block.run, self.model, self._ignored)

    def reset_profile(self) -> None:
        """Drop the figures. If a profile is open, profiling starts again."""
        if self._block is not None:
            self.start_profile(self._ignored)
        self._figures = None

    def end_profile(self) -> None:
        """Drop the figures. If a profile is open, stop it."""
        if self._block is not None:
            block, self._block = self._block, None
            block.__exit__(None, None, None)
        self._figures = None
        self.started = False

    def get_total_flops(self, as_string: bool = False) -> int | str | None:
        """The floating-point operations of the model's forwards; None (as text ``–``) if no operator could be counted.
        The text has a ``≥`` if some operators could not be counted."""
        whole = self._measured().whole
        return at_least(number_text(whole.known[0]), whole.is_lower_bound) if as_string else whole.known[0]

    def get_total_macs(self, as_string: bool = False) -> int | str | None:
        """The multiply-accumulates of the model's forwards, in the form of ``get_total_flops``."""
        whole = self._measured().whole
        return at_least(macs_text(whole.known[1]), whole.is_lower_bound) if as_string else whole.known[1]

    def get_total_params(self, as_string: bool = False) -> int | str | None:
        """The number of parameters; None (as text ``–``) if a lazy layer has not made its parameters yet."""
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
        """Print the aggregated profile and, with ``detailed``, the profile of each module; then how they were counted.

        ``module_depth``: the last depth of the aggregated profile; -1 for all. ``output_file``: write to this file
        instead of stdout. Raises TorchprofError for a file that cannot be written.
        """
        measured = self._measured()
        _check_printing(module_depth, top_modules, output_file)
        text = printed_text(measured, profile_step, module_depth, top_modules, detailed)
        if not output_file:
            print(encodable(text, sys.stdout))
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the ``top_modules`` classes of modules with the largest sums, for each depth up to ``module_depth``.
        The sums are of parameters, flops, MACs and forward latency."""
        measured = self._measured()
        _check_printing(module_depth, top_modules, None)
        print(encodable("\n".join(lines_by_depth(measured, module_depth, top_modules)), sys.stdout))

    def _measured(self) -> Measured:
        if self._block is not None:
            raise TorchprofError("Profiling is still going on: call stop_profile() first.")
        if self._figures is None:
            raise TorchprofError(
                "There are no figures: call start_profile(), then the model, then stop_profile(). They are there until "
                "reset_profile() or end_profile()."
            )
        return self._figures


def _checked_ignored(ignore: Any, model: nn.Module) -> tuple[Any, ...]:
    if ignore is None:
        return ()
    if not isinstance(ignore, Iterable) or isinstance(ignore, (str, nn.Module)):
        raise TorchprofError(
            f"What is to be ignored is a list of classes of modules, [nn.Dropout], or of modules, not {ignore!r:.80}."
        )
    ignored = tuple(ignore)
    for kind in ignored:
        if isinstance(kind, nn.Module):
            if not is_one_of(kind, model.modules()):
                raise TorchprofError(f"{kind!r:.80}, which is to be ignored, is not a module of the model.")
        elif not isinstance(kind, type):
            raise TorchprofError(f"{kind!r:.80} cannot be ignored: it is neither a class of modules nor a module.")
    return ignored


def _check_printing(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    """Check the options of printing. Raises TorchprofError."""
    if not isinstance(module_depth, int) or module_depth < -1:
        raise TorchprofError(f"module_depth is 0 or more, or -1 for all depths, not {module_depth!r}.")
    if not isinstance(top_modules, int) or top_modules < 1:
        raise TorchprofError(f"top_modules is how many are listed, 1 or more, not {top_modules!r}.")
    if output_file:
        if not isinstance(output_file, (str, PathLike)):
            raise TorchprofError(f"output_file is the name of a file, not {output_file!r:.80}.")
        folder = Path(output_file).absolute().parent
        if not folder.is_dir():
            raise TorchprofError(
                f"output_file={str(output_file)!r}: there is no folder {str(folder)!r}. Make it first."
            )


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
        raise TorchprofError(f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out.")
    call = _method(model, func_name if mode is None else mode)
    if not isinstance(warm_up, int) or warm_up < 0:
        raise TorchprofError(f"warm_up is a number of calls, 0 or more, not {warm_up!r}.")
    _check_printing(module_depth, top_modules, output_file)
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
        raise TorchprofError(f"{type(model).__name__} has no method {name!r} to profile.")
    return method


def _inputs(model: nn.Module, shape: Any, args: Any, kwargs: Any) -> tuple[list[Any], dict[str, Any]]:
    """The arguments and keyword arguments of the call."""
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TorchprofError(f"kwargs is a dict of named arguments, not {kwargs!r:.80}.")
    named = dict(kwargs or {})
    if shape is not None:
        sizes = list(shape) if isinstance(shape, Sequence) and not isinstance(shape, str) else []
        if not sizes or not all(isinstance(size, int) and size >= 0 for size in sizes):
            raise TorchprofError(f"input_shape is a tuple of sizes, (1, 3, 224, 224), not {shape!r:.80}.")
        first = next(model.parameters(), None)
        dtype, device = (None, None) if first is None else (first.dtype, first.device)
        return [torch.zeros(sizes, dtype=dtype, device=device)], named
    if args is not None and not isinstance(args, (list, tuple)):
        raise TorchprofError(f"args is a list of arguments, [x], not {type(args).__name__}.")
    if not args and not named:
        raise TorchprofError("The model needs something to be called on: give input_shape, args or kwargs.")
    return list(args or []), named
