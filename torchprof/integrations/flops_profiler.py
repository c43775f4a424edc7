"""flops-profiler as a drop-in: its functions, its convention of counting, its text.

``get_model_profile`` and ``FlopsProfiler`` have the arguments of flops-profiler 0.1.2 and of DeepSpeed's, and print the
same three parts. docs/coming-from-flops-profiler.md says which figures differ, and why.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import nn

from torchprof import TorchprofError
from torchprof.integrations import conventions, recorded_model
from torchprof.integrations.conventions import duration_text, macs_text, number_to_string, params_to_string, rate_text
from torchprof.integrations.recorded_model import FiguresByModule, LayerFigures, ModelFigures, ModelRecording, Position

__all__ = ["FlopsProfiler", "get_model_profile"]


class FlopsProfiler(ModelRecording):
    """Profile a model between ``start_profile`` and ``stop_profile``, and print the results as flops-profiler does.

    ``ds_engine``: a DeepSpeed engine; its sizes and timers go into the summary. ``recompute_fwd_factor``: the share of
    the forward that backward recomputes (activation checkpointing). It is used if the engine timed backward and the
    profile does not include it.
    """

    convention = conventions.FLOPS_PROFILER

    def __init__(self, model: nn.Module, ds_engine: Any = None, recompute_fwd_factor: float = 0.0) -> None:
        super().__init__(model)
        if not conventions.is_number(recompute_fwd_factor) or recompute_fwd_factor < 0:
            expected = "the share of the forward that backward does again, 0 or more"
            raise TorchprofError(f"recompute_fwd_factor is {expected}, not {recompute_fwd_factor!r}.")
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
        return whole.bounded(macs_text(whole.macs)) if as_string else whole.macs

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
        lines = [*_summary_lines(figures, profile_step, self.ds_engine, self.recompute_fwd_factor)]
        lines += [_AGGREGATED, *lines_by_depth(figures, module_depth, top_modules)]
        if detailed:
            lines += [_DETAILED, *recorded_model.repr_lines(figures.model, partial(_module_text, figures))]
        text = "\n".join([*lines, _END])
        if not output_file:
            recorded_model.show(text)
            return
        try:
            Path(output_file).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise TorchprofError(f"output_file={str(output_file)!r} cannot be written: {error}") from error

    def print_model_aggregated_profile(self, module_depth: int = -1, top_modules: int = 1) -> None:
        """Print the ``top_modules`` classes of modules with the largest sums, for each depth up to ``module_depth``.
        The sums are of parameters, flops, MACs and forward latency."""
        _check_printing(module_depth, top_modules, None)
        recorded_model.show("\n".join(lines_by_depth(self.figures(), module_depth, top_modules)))


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
    the model's parameters. ``func_name``, or ``mode``: the method to call, such as ``generate``. ``as_string``: return
    text such as ``"22.36 G"``. For the others see ``FlopsProfiler.print_model_profile`` and ``start_profile``.

    Gradients are recorded if the caller has them enabled. Afterwards, every module is in the mode (train or eval) that
    it had before. Raises TorchprofError for bad arguments; errors of the model pass through.
    """
    profiler = FlopsProfiler(model)
    if mode is not None and func_name not in ("forward", mode):
        raise TorchprofError(f"mode={mode!r} and func_name={func_name!r} are two names of one thing: leave one out.")
    call = _method(model, func_name if mode is None else mode)
    recorded_model.check_whole("warm_up", warm_up, 0)
    _check_printing(module_depth, top_modules, output_file)
    _check_inputs(input_shape, args, kwargs)

    def inputs() -> tuple[Sequence[Any], Mapping[str, Any]]:
        if input_shape is None:
            return args or (), kwargs or {}
        return (recorded_model.ones(model, "input_shape", input_shape),), kwargs or {}

    profiler.record_call(call, inputs, warm_up, ignore_modules)
    if print_profile:
        profiler.print_model_profile(warm_up, module_depth, top_modules, detailed, output_file)
    flops, macs = profiler.get_total_flops(as_string), profiler.get_total_macs(as_string)
    return flops, macs, profiler.get_total_params(as_string)


def _check_printing(module_depth: Any, top_modules: Any, output_file: Any) -> None:
    recorded_model.check_whole("module_depth", module_depth, -1)
    recorded_model.check_whole("top_modules", top_modules, 1)
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


# The summary

_HEADER = """
-------------------------- Flops Profiler --------------------------
Profile Summary at step {step}:
Notations:
params: parameters; MACs: multiply-accumulates; flops: floating-point operations; FLOPS: flops a second;
dp_size, mp_size: over how many devices the data and the model are split; fwd, bwd: forward, backward;
latency: how long it took; step: the optimizer's; iter: fwd, bwd and step together
"""
_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)
_LABEL_WIDTH = 60
_WORLD_SIZE, _MODEL_PARALLEL, _BATCH = "world size", "model parallel size", "batch size per device"


def _summary_lines(figures: ModelFigures, step: int, engine: Any, recompute: float) -> Iterator[str]:
    """``engine``: a DeepSpeed engine or None. ``recompute``: the share of the forward that backward recomputes."""
    yield _HEADER.format(step=step)
    sizes = _sizes_of_job(engine, figures.model)
    for label, value in (
        *sizes.items(),
        *_figures_of_model(figures, sizes.get(_MODEL_PARALLEL) or 1),
        *_times(figures, sizes, _engine_seconds(engine), 2 + recompute),
    ):
        yield f"{label + ': ':<{_LABEL_WIDTH}}  {value}"
    yield ""
    own = figures.run.tree("forward").total
    own_flops = conventions.at_least(number_to_string(own.flops or (None if own.uncounted else 0)), own.uncounted > 0)
    yield f"{_CONVENTION} By torchprof's own convention, which counts all elementwise work, fwd: {own_flops}."
    if figures.backward().work:
        yield "Backward flops are torchprof's own count of what autograd ran."
    yield from figures.sentences()


def _figures_of_model(figures: ModelFigures, parts: int) -> Iterator[tuple[str, str]]:
    """Parameters and work of this device, and of the whole model, which is split into ``parts``."""
    params, whole = figures.params, figures.whole
    of_model = (None if params is None else params * parts, None if whole.work is None else whole.work * parts)
    yield "params per device", params_to_string(params)
    yield "params of model = params per device * mp_size", params_to_string(of_model[0])
    yield "fwd MACs per device", whole.bounded(macs_text(whole.macs))
    yield "fwd flops per device", whole.bounded(number_to_string(whole.work))
    yield "fwd flops of model = fwd flops per device * mp_size", whole.bounded(number_to_string(of_model[1]))


def _times(
    figures: ModelFigures, sizes: Mapping[str, int], engine_seconds: tuple[float, ...] | None, factor: float
) -> Iterator[tuple[str, str]]:
    """Latency and throughput of forward, backward and step, if they were timed. ``factor``: how often backward does the
    work of the forward, if only the engine has timed it."""
    whole, backward = figures.whole, figures.backward()
    fwd, bwd, step = engine_seconds or (whole.seconds or 0.0, backward.ns / 1e9, figures.optimizer_ns() / 1e9)
    if not fwd:
        return
    yield "fwd latency", duration_text(fwd)
    yield "fwd FLOPS per device = fwd flops per device / fwd latency", whole.bounded(rate_text(whole.work, fwd))
    if not bwd:
        return
    flops: float = backward.work
    bwd_label, both_label = "bwd flops per device", "fwd+bwd flops per device"
    if backward.ns:
        yield bwd_label, number_to_string(backward.work)
    else:
        flops = factor * (whole.work or 0)
        bwd_label, both_label = f"{factor:g} * fwd flops per device", f"{factor + 1:g} * fwd flops per device"
    yield "bwd latency", duration_text(bwd)
    yield f"bwd FLOPS per device = {bwd_label} / bwd latency", rate_text(flops, bwd)
    flops += whole.work or 0
    yield f"fwd+bwd FLOPS per device = {both_label} / (fwd+bwd latency)", rate_text(flops, fwd + bwd)
    if step:
        yield "step latency", duration_text(step)
        yield "iter latency", duration_text(fwd + bwd + step)
        yield f"FLOPS per device = {both_label} / iter latency", rate_text(flops, fwd + bwd + step)
        if _BATCH in sizes and _WORLD_SIZE in sizes:
            yield "samples/second", f"{sizes[_BATCH] * sizes[_WORLD_SIZE] / (fwd + bwd + step):.2f}"


def _sizes_of_job(engine: Any, model: nn.Module) -> dict[str, int]:
    """The number of processes, over how many the data and the model are split, and the batch size, if they are known:
    from a DeepSpeed engine, its ``mpu`` (Megatron's parallel units), or torch.distributed."""
    units = getattr(engine, "mpu", None)
    world_size = _first_attribute(engine, "world_size")
    data = _first_attribute(engine, "dp_world_size") or _first_attribute(units, "get_data_parallel_world_size")
    split = _first_attribute(engine, "mp_world_size") or _first_attribute(
        units, "get_model_parallel_world_size", "get_tensor_model_parallel_world_size"
    )
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = world_size or distributed.get_world_size()
        group = getattr(model, "process_group", None)  # of DistributedDataParallel and of FSDP
        data = data or (None if group is None else distributed.get_world_size(group))
    batch = _first_attribute(engine, "train_micro_batch_size_per_gpu")
    sizes = {_WORLD_SIZE: world_size, "data parallel size": data, _MODEL_PARALLEL: split, _BATCH: batch}
    return {label: size for label, size in sizes.items() if size is not None}


def _first_attribute(thing: Any, *names: str) -> Any:
    """The first of these attributes that exists and is not None; a method is called. None if there is none."""
    value = next((found for name in names if (found := getattr(thing, name, None)) is not None), None)
    return value() if callable(value) else value


def _engine_seconds(engine: Any) -> tuple[float, ...] | None:
    """The seconds of forward, backward and step from an engine's timers; None if it does not time all three."""
    timers = getattr(engine, "timers", None)
    if timers is None or not _first_attribute(engine, "wall_clock_breakdown"):
        return None

    def read(*names: str) -> float:
        known = [name for name in names if not hasattr(timers, "has_timer") or timers.has_timer(name)]
        return max((timers(name).elapsed(False) / 1e3 for name in known), default=0.0)

    # The timers' names in flops-profiler 0.1.2, and in DeepSpeed today.
    times = read("forward", "fwd"), read("backward", "bwd"), read("step")
    return times if all(times) else None


# The text below the summary: by depth, and by module

_AGGREGATED = """
----------------------------- Aggregated Profile per Device -----------------------------"""
_DETAILED = """
------------------------------ Detailed Profile per Device ------------------------------
Each module profile is listed after its name in the following order:
module: what it did with all below it, and which share of the model that is; functionals: the same by functional; then \
what the module says of itself

Note: 1. What a module does itself is not in the modules that it holds, so these may make up less.
2. Flops follow from shapes alone. What a kernel saves is not taken off.
3. The latency of a module is how long its forward lasted, or on a device, its kernels.
"""
_END = "------------------------------------------------------------------------------"


def lines_by_depth(figures: ModelFigures, module_depth: int, top_modules: int) -> Iterator[str]:
    """For each depth, the module classes with the largest sums."""
    yield f"Top {top_modules} modules in terms of params, flops, MACs or duration at different model depths:"
    last = figures.deepest if module_depth == -1 else min(module_depth, figures.deepest)
    for depth in range(last + 1):
        classes = figures.by_class(depth)
        columns: dict[str, FiguresByModule] = {
            "params": {name: (params, params_to_string(params)) for name, _, params in classes},
            "flops": {name: (own.work, own.bounded(number_to_string(own.work))) for name, own, _ in classes},
            "MACs": {name: (own.macs, own.bounded(macs_text(own.macs))) for name, own, _ in classes},
            "fwd latency": {name: (own.seconds, duration_text(own.seconds)) for name, own, _ in classes},
        }
        yield f"depth {depth}:"
        for label, column in columns.items():
            yield f"    {label:<11} - {recorded_model.largest(column, top_modules)}"


def _module_text(figures: ModelFigures, position: Position) -> str:
    own, whole = figures.at(position), figures.whole
    params = recorded_model.parameter_count(position.module)
    module = {
        "param": params_to_string(params),
        "flops": own.bounded(number_to_string(own.work)),
        "macs": own.bounded(macs_text(own.macs)),
        "duration": duration_text(own.seconds),
        "FLOPS": own.bounded(rate_text(own.work, own.seconds)),
        "params%": conventions.share_text(params, figures.params),
        "flops%": conventions.share_text(own.work, whole.work),
        "macs%": conventions.share_text(own.macs, whole.macs),
        "duration%": conventions.share_text(own.seconds, whole.seconds),
    }
    functionals = {name: _functional_texts(counted, whole) for name, counted in own.functionals.items()}
    lasted = duration_text(own.functional_seconds)
    return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"


def _functional_texts(counted: conventions.Counted, whole: LayerFigures) -> dict[str, Any]:
    seconds = counted.ns / 1e9
    return {
        "flops": number_to_string(counted.work),
        "macs": macs_text(counted.macs),
        "duration": duration_text(seconds),
        "FLOPS": rate_text(counted.work, seconds),
        "flops%": conventions.share_text(counted.work, whole.work),
        "macs%": conventions.share_text(counted.macs, whole.macs),
        "duration%/allfuncs": conventions.share_text(seconds, whole.functional_seconds),
        "duration%/e2e": conventions.share_text(seconds, whole.seconds),
    }
