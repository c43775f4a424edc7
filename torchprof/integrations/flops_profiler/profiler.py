"""flops-profiler's interface: ``FlopsProfiler`` between start and stop, ``get_model_profile`` of one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch import nn

from torchprof import TorchprofError
from torchprof.integrations.conventions import (
    FLOPS_PROFILER,
    MACS,
    is_number,
    number_to_string,
    params_to_string,
    text_in_units,
)
from torchprof.integrations.flops_profiler.printed import duration_text, lines_by_depth, printed_lines, summary_lines
from torchprof.integrations.model_recording import ModelRecording, check_whole, ones, show


class FlopsProfiler(ModelRecording):
    """Profile a model between ``start_profile`` and ``stop_profile``, and print the results as flops-profiler does.

    ``ds_engine``: a DeepSpeed engine; its sizes and timers go into the summary. ``recompute_fwd_factor``: the share of
    the forward that backward recomputes (activation checkpointing). It is used if the engine timed backward and the
    profile does not include it.
    """

    convention = FLOPS_PROFILER

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model)
        if not is_number(recompute_fwd_factor) or recompute_fwd_factor < 0:
            raise TorchprofError(
                "recompute_fwd_factor is the share of the forward that backward does again, 0 or more, not "
                f"{recompute_fwd_factor!r}."
            )
        self.ds_engine = ds_engine
        self.recompute_fwd_factor = recompute_fwd_factor

    def get_total_flops(self, as_string: bool = False) -> int | str | None:
        """The floating-point operations of the model's forwards; None (as text ``–``) if no operator could be counted.
        The text has a ``≥`` if some operators could not be counted."""
        whole = self.figures().whole
        return whole.bounded(number_to_string(whole.work)) if as_string else whole.work

    def get_total_macs(self, as_string: bool = False) -> int | str | None:
        """The multiply-accumulates of the model's forwards, in the form of ``get_total_flops``."""
        whole = self.figures().whole
        return whole.bounded(text_in_units(whole.macs, MACS)) if as_string else whole.macs

    def get_total_params(self, as_string: bool = False) -> int | str | None:
        """The number of parameters; None (as text ``–``) if a lazy layer has not made its parameters yet."""
        params = self.figures().params
        return params_to_string(params) if as_string else params

    def get_total_duration(self, as_string: bool = False) -> float | str | None:
        """How long the model's forwards lasted, in seconds; None (as text ``–``) if there was none."""
        seconds = self.figures().whole.seconds
        return duration_text(seconds) if as_string else seconds

    def get_total_functional_duration(self, as_string: bool = False) -> float | str | None:
        """How long the functionals in the model's forwards lasted, in the form of ``get_total_duration``."""
        seconds = self.figures().whole.functional_seconds
        return duration_text(seconds) if as_string else seconds

    def print_model_profile(
        self,
        profile_step: int = 1,
        module_depth: int = -1,
        top_modules: int = 1,
        detailed: bool = True,
        output_file: str | PathLike[str] | None = None,
    ) -> None:
        """Print the summary, the aggregated profile and, with ``detailed``, the profile of each module.

        ``module_depth``: the last depth of the aggregated profile; -1 for all. ``output_file``: write to this file
        instead of stdout. Raises TorchprofError for a file that cannot be written.
        """
        _check_printing(module_depth, top_modules, output_file)
        figures = self.figures()
        summary = summary_lines(figures, profile_step, self.ds_engine, self.recompute_fwd_factor)
        text = "\n".join([*summary, *printed_lines(figures, module_depth, top_modules, detailed)])
        if not output_file:
            show(text)
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the ``top_modules`` classes of modules with the largest sums, for each depth up to ``module_depth``.
        The sums are of parameters, flops, MACs and forward latency."""
        _check_printing(module_depth, top_modules, None)
        show("\n".join(lines_by_depth(self.figures(), module_depth, top_modules)))


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
    the model's parameters. ``func_name``, or ``mode``: the method to call, such as ``generate``. ``module_depth``,
    ``top_modules``, ``detailed`` and ``output_file`` are for the text: see ``FlopsProfiler.print_model_profile``.
    ``as_string``: return text such as ``"22.36 G"``. ``ignore_modules``: see ``FlopsProfiler.start_profile``.

    Gradients are recorded if the caller has them enabled. Afterwards, every module is in the mode (train or eval) that
    it had before. Raises TorchprofError for bad arguments; errors of the model pass through.
    """
    profiler = FlopsProfiler(model)
    if mode is not None and func_name not in ("forward", mode):
        raise TorchprofError(f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out.")
    call = _method(model, func_name if mode is None else mode)
    check_whole("warm_up", warm_up, 0)
    _check_printing(module_depth, top_modules, output_file)
    _check_inputs(input_shape, args, kwargs)

    def inputs() -> tuple[Sequence[Any], Mapping[str, Any]]:
        return args or () if input_shape is None else (ones(model, "input_shape", input_shape),), kwargs or {}

    profiler.record_call(call, inputs, warm_up, ignore_modules)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    return (
        profiler.get_total_flops(as_string),
        profiler.get_total_macs(as_string),
        profiler.get_total_params(as_string),
    )


def _check_printing(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    check_whole("module_depth", module_depth, -1)
    check_whole("top_modules", top_modules, 1)
    if output_file:
        if not isinstance(output_file, (str, PathLike)):
            raise TorchprofError(f"output_file is the name of a file, not {output_file!r:.80}.")
        if not Path(output_file).absolute().parent.is_dir():
            raise TorchprofError(f"output_file={str(output_file)!r}: there is no such folder. Make it first.")


def _check_inputs(shape: Any, args: Any, kwargs: Any) -> None:
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TorchprofError(f"kwargs is a dict of named arguments, not {kwargs!r:.80}.")
    if args is not None and not isinstance(args, (list, tuple)):
        raise TorchprofError(f"args is a list of arguments, [x], not {type(args).__name__}.")
    if shape is None and not args and not kwargs:
        raise TorchprofError("The model needs something to be called on: give input_shape, args or kwargs.")


def _method(model: nn.Module, name: Any) -> Any:
    if name == "forward":
        return model
    method = getattr(model, name, None) if isinstance(name, str) else None
    if not callable(method):
        raise TorchprofError(f"{type(model).__name__} has no method {name!r} to profile.")
    return method
