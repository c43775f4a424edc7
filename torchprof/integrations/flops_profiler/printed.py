"""The text that flops-profiler prints below its summary: the part by depth, and the part by module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.integrations.conventions import (
    MACS,
    RATES,
    Counted,
    at_least,
    duration_to_string,
    number_to_string,
    params_to_string,
    per_second,
    share_text,
    text_in_units,
)
from torchprof.integrations.model_figures import (
    LayerFigures,
    ModelFigures,
    Position,
    largest,
    parameter_count,
    repr_lines,
)


def printed_lines(figures: ModelFigures, module_depth: int, top_modules: int, detailed: bool) -> Iterator[str]:
    """The part by depth and, if ``detailed``, the part by module."""
    yield ""
    yield "----------------------------- Aggregated Profile per Device -----------------------------"
    yield from lines_by_depth(figures, module_depth, top_modules)
    if detailed:
        yield ""
        yield "------------------------------ Detailed Profile per Device ------------------------------"
        yield "Each module profile is listed after its name in the following order:"
        yield (
            "module: what it did with all below it, and which share of the model that is; functionals: the same by "
            "functional; then what the module says of itself"
        )
        yield ""
        yield "Note: 1. What a module does itself is not in the modules that it holds, so these may make up less."
        yield "2. Flops follow from shapes alone. What a kernel saves is not taken off."
        yield "3. The latency of a module is how long its forward lasted, or on a device, its kernels."
        yield ""
        yield from repr_lines(figures.model, lambda position: _module_text(figures, position))
    yield "------------------------------------------------------------------------------"


def lines_by_depth(figures: ModelFigures, module_depth: int, top_modules: int) -> Iterator[str]:
    """For each depth, the module classes with the largest sums."""
    yield f"Top {top_modules} modules in terms of params, flops, MACs or duration at different model depths:"
    last = figures.deepest if module_depth == -1 else min(module_depth, figures.deepest)
    for depth in range(last + 1):
        classes = figures.by_class(depth)
        sums = {name: own.figures for name, own in classes.items()}
        columns: dict[str, dict[str, tuple[float | None, str]]] = {
            "params": {name: (own.params, params_to_string(own.params)) for name, own in classes.items()},
            "flops": {name: (own.work, own.bounded(number_to_string(own.work))) for name, own in sums.items()},
            "MACs": {name: (own.macs, own.bounded(text_in_units(own.macs, MACS))) for name, own in sums.items()},
            "fwd latency": {name: (own.seconds, duration_text(own.seconds)) for name, own in sums.items()},
        }
        yield f"depth {depth}:"
        for label, column in columns.items():
            yield f"    {label:<11} - {largest(column, top_modules)}"


def _module_text(figures: ModelFigures, position: Position) -> str:
    own, whole = figures.at(position), figures.whole
    params = parameter_count(position.module)
    module = {
        "param": params_to_string(params),
        "flops": own.bounded(number_to_string(own.work)),
        "macs": own.bounded(text_in_units(own.macs, MACS)),
        "duration": duration_text(own.seconds),
        "FLOPS": own.bounded(rate_text(own.work, own.seconds)),
        "params%": share_text(params, figures.params),
        "flops%": share_text(own.work, whole.work),
        "macs%": share_text(own.macs, whole.macs),
        "duration%": share_text(own.seconds, whole.seconds),
    }
    functionals = {name: _functional_texts(counted, whole) for name, counted in own.functionals.items()}
    lasted = duration_text(own.functional_seconds)
    return f"module = {module}, functionals = {functionals}, functionals_duration = {lasted}"


def _functional_texts(counted: Counted, whole: LayerFigures) -> dict[str, Any]:
    seconds = counted.ns / 1e9
    return {
        "flops": number_to_string(counted.work),
        "macs": text_in_units(counted.macs, MACS),
        "duration": duration_text(seconds),
        "FLOPS": rate_text(counted.work, seconds),
        "flops%": share_text(counted.work, whole.work),
        "macs%": share_text(counted.macs, whole.macs),
        "duration%/allfuncs": share_text(seconds, whole.functional_seconds),
        "duration%/e2e": share_text(seconds, whole.seconds),
    }


def duration_text(seconds: float | None) -> str:
    return "0.0" if seconds == 0 else duration_to_string(seconds)


def rate_text(flops: float | None, seconds: float | None) -> str:
    """Floating-point operations per second."""
    return text_in_units(per_second(flops, seconds), RATES)


# The summary that flops-profiler prints first, with what a DeepSpeed engine or torch.distributed knows of the job.

_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)


_SIZES = ("world size", "data parallel size", "model parallel size", "batch size per device")


class _Job(NamedTuple):
    """The ``_SIZES``: processes, over how many the data and the model are split, the batch size; None if unknown."""

    world_size: int | None
    data_parallel: int | None
    model_parallel: int | None
    batch: int | None


def summary_lines(figures: ModelFigures, step: int, engine: Any, recompute: float) -> Iterator[str]:
    """``engine``: a DeepSpeed engine or None. ``recompute``: the share of the forward that backward recomputes."""
    yield ""
    yield "-------------------------- Flops Profiler --------------------------"
    yield f"Profile Summary at step {step}:"
    yield "Notations:"
    yield "params: parameters; MACs: multiply-accumulates; flops: floating-point operations; FLOPS: flops a second;"
    yield "dp_size, mp_size: over how many devices the data and the model are split; fwd, bwd: forward, backward;"
    yield "latency: how long it took; step: the optimizer's; iter: fwd, bwd and step together"
    yield ""
    job = _job(engine, figures.model)
    for label, value in (
        *(size for size in zip(_SIZES, job) if size[1] is not None),
        *_model_figures(figures, job.model_parallel or 1),
        *_times(figures, job, _engine_seconds(engine), 2 + recompute),
    ):
        yield f"{label + ': ':<60}  {value}"
    yield ""
    own = figures.run.tree("forward").total
    own_flops = at_least(number_to_string(own.flops or (None if own.uncounted else 0)), own.uncounted > 0)
    yield f"{_CONVENTION} By torchprof's own convention, which counts all elementwise work, fwd: {own_flops}."
    if figures.backward().work:
        yield "Backward flops are torchprof's own count of what autograd ran."
    yield from figures.sentences()


def _model_figures(figures: ModelFigures, parts: int) -> Iterator[tuple[str, str]]:
    """Parameters and work of this device, and of the whole model, which is split into ``parts``."""
    params, whole = figures.params, figures.whole
    of_model = (None if params is None else params * parts, None if whole.work is None else whole.work * parts)
    yield "params per device", params_to_string(params)
    yield "params of model = params per device * mp_size", params_to_string(of_model[0])
    yield "fwd MACs per device", whole.bounded(text_in_units(whole.macs, MACS))
    yield "fwd flops per device", whole.bounded(number_to_string(whole.work))
    yield "fwd flops of model = fwd flops per device * mp_size", whole.bounded(number_to_string(of_model[1]))


def _times(
    figures: ModelFigures, job: _Job, engine_seconds: tuple[float, ...] | None, factor: float
) -> Iterator[tuple[str, str]]:
    """Latency and throughput of forward, backward and step, if they were timed. ``factor``: how often backward does the
    work of the forward, if only the engine has timed it."""
    whole, backward = figures.whole, figures.backward()
    recorded = (whole.seconds or 0.0, backward.ns / 1e9, figures.optimizer_ns() / 1e9)
    fwd, bwd, step = engine_seconds or recorded
    if not fwd:
        return
    yield "fwd latency", duration_text(fwd)
    rate = whole.bounded(rate_text(whole.work, fwd))
    yield "fwd FLOPS per device = fwd flops per device / fwd latency", rate
    if not bwd:
        return
    flops: float = backward.work
    of_bwd, of_both = "bwd flops per device", "fwd+bwd flops per device"
    if backward.ns:
        yield of_bwd, number_to_string(backward.work)
    else:
        flops = factor * (whole.work or 0)
        of_bwd, of_both = f"{factor:g} * fwd flops per device", f"{factor + 1:g} * fwd flops per device"
    yield "bwd latency", duration_text(bwd)
    yield f"bwd FLOPS per device = {of_bwd} / bwd latency", rate_text(flops, bwd)
    flops += whole.work or 0
    yield f"fwd+bwd FLOPS per device = {of_both} / (fwd+bwd latency)", rate_text(flops, fwd + bwd)
    if step:
        yield "step latency", duration_text(step)
        yield "iter latency", duration_text(fwd + bwd + step)
        yield f"FLOPS per device = {of_both} / iter latency", rate_text(flops, fwd + bwd + step)
        if job.batch is not None and job.world_size is not None:
            yield "samples/second", f"{job.batch * job.world_size / (fwd + bwd + step):.2f}"


def _job(engine: Any, model: nn.Module) -> _Job:
    """The sizes from a DeepSpeed engine, its ``mpu`` (Megatron's parallel units), or torch.distributed."""
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
    return _Job(world_size, data, split, _first_attribute(engine, "train_micro_batch_size_per_gpu"))


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
