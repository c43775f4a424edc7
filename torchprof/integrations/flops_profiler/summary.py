"""The summary on flops-profiler's page, with data from a DeepSpeed engine or torch.distributed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.integrations.flops_profiler.measured import Measured
from torchprof.integrations.flops_profiler.strings import (
    at_least,
    duration_text,
    macs_text,
    number_text,
    params_text,
    rate_text,
)

_CONVENTION = (
    "Flops are counted as flops-profiler counts them: 2 for each multiply-accumulate, the bias of convolutions, and a "
    "number for each element in norms, activations, softmax and pooling."
)


class _Job(NamedTuple):
    """The number of processes, over how many the data and the model are split, the batch size; None if unknown."""

    world_size: int | None
    data_parallel: int | None
    model_parallel: int | None
    batch: int | None


def summary_lines(measured: Measured, step: int, engine: Any, recompute: float) -> Iterator[str]:
    """``engine``: a DeepSpeed engine or None. ``recompute``: the share of the forward that backward recomputes."""
    job = _job(engine, measured.model)
    device = next((param.device for param in measured.model.parameters()), "cpu")
    yield ""
    yield "-------------------------- Flops Profiler --------------------------"
    yield f"Profile on Device: {device}"
    yield f"Profile Summary at step {step}:"
    yield "Notations:"
    yield "params: parameters; MACs: multiply-accumulates; flops: floating-point operations; FLOPS: flops a second;"
    yield "dp_size, mp_size: over how many devices the data and the model are split; fwd, bwd: forward, backward;"
    yield "latency: how long it took; step: the optimizer's; iter: fwd, bwd and step together"
    yield ""
    for label, number in (
        ("world size", job.world_size),
        ("data parallel size", job.data_parallel),
        ("model parallel size", job.model_parallel),
        ("batch size per device", job.batch),
    ):
        if number is not None:
            yield _line(label, number)
    yield from _model_lines(measured, job.model_parallel or 1)
    yield from _time_lines(measured, job, engine, recompute)
    yield ""
    yield from _notes(measured)


def _line(label: str, value: Any) -> str:
    return f"{label + ': ':<60}  {value}"


def _model_lines(measured: Measured, parts: int) -> Iterator[str]:
    """Parameters and work of this device, and of the whole model, which is split into ``parts``."""
    whole = measured.whole
    yield _line("params per device", params_text(whole.params))
    all_params = None if whole.params is None else whole.params * parts
    yield _line("params of model = params per device * mp_size", params_text(all_params))
    flops, macs, _ = whole.known
    yield _line("fwd MACs per device", at_least(macs_text(macs), whole.is_lower_bound))
    yield _line("fwd flops per device", at_least(number_text(flops), whole.is_lower_bound))
    all_flops = at_least(number_text(None if flops is None else flops * parts), whole.is_lower_bound)
    yield _line("fwd flops of model = fwd flops per device * mp_size", all_flops)


def _time_lines(measured: Measured, job: _Job, engine: Any, recompute: float) -> Iterator[str]:
    """Latency and throughput of forward, backward and step, if they were timed."""
    whole = measured.whole
    fwd_ns, bwd_ns, step_ns = _engine_ns(engine) or (whole.ns, measured.backward_ns, measured.step_ns)
    if fwd_ns:
        yield _line("fwd latency", duration_text(fwd_ns))
        rate = at_least(rate_text(whole.known[0], fwd_ns), whole.is_lower_bound)
        yield _line("fwd FLOPS per device = fwd flops per device / fwd latency", rate)
    if not fwd_ns or not bwd_ns:
        return
    if measured.backward_ns:
        flops: float = measured.backward_flops
        bwd, both = "bwd flops per device", "fwd+bwd flops per device"
        yield _line(bwd, number_text(measured.backward_flops))
    else:
        factor = 2 + recompute
        flops = factor * whole.flops
        bwd, both = f"{factor:g} * fwd flops per device", f"{factor + 1:g} * fwd flops per device"
    yield _line("bwd latency", duration_text(bwd_ns))
    yield _line(f"bwd FLOPS per device = {bwd} / bwd latency", rate_text(flops, bwd_ns))
    flops += whole.flops
    yield _line(f"fwd+bwd FLOPS per device = {both} / (fwd+bwd latency)", rate_text(flops, fwd_ns + bwd_ns))
    if step_ns:
        iter_ns = fwd_ns + bwd_ns + step_ns
        yield _line("step latency", duration_text(step_ns))
        yield _line("iter latency", duration_text(iter_ns))
        yield _line(f"FLOPS per device = {both} / iter latency", rate_text(flops, iter_ns))
        if job.batch is not None and job.world_size is not None:
            yield _line("samples/second", f"{job.batch * job.world_size / iter_ns * 1e9:.2f}")


def _notes(measured: Measured) -> Iterator[str]:
    """How the figures were counted, what they do not include, and the run's warnings."""
    yield f"{_CONVENTION} By torchprof's own convention, which counts all elementwise work, fwd: {measured.own_flops}."
    if measured.backward_flops:
        yield "Backward flops are torchprof's own count of what autograd ran."
    if measured.outside:
        yield f"Outside of the model's forward (code around it, a loss), not among these figures: {measured.outside}."
    for name, calls in measured.unknown.items():
        yield f"Not counted: {name} ({calls} call{'s' if calls > 1 else ''} on tensors whose shapes are not known)."
    yield from map(str, measured.run.warnings)


def _job(engine: Any, model: nn.Module) -> _Job:
    """The sizes from a DeepSpeed engine, its ``mpu`` (Megatron's parallel units), or torch.distributed."""
    world_size = _first_attribute(engine, "world_size")
    data = _first_attribute(engine, "dp_world_size")
    split = _first_attribute(engine, "mp_world_size")
    units = getattr(engine, "mpu", None)
    data = _first_attribute(units, "get_data_parallel_world_size") if data is None else data
    if split is None:
        split = _first_attribute(units, "get_model_parallel_world_size", "get_tensor_model_parallel_world_size")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        world_size = distributed.get_world_size() if world_size is None else world_size
        group = getattr(model, "process_group", None)  # of DistributedDataParallel and of FSDP
        if data is None and group is not None:
            data = distributed.get_world_size(group)
    return _Job(world_size, data, split, _first_attribute(engine, "train_micro_batch_size_per_gpu"))


def _first_attribute(thing: Any, *names: str) -> Any:
    """The first of these attributes that exists and is not None; a method is called. None if there is none."""
    for name in names:
        value = getattr(thing, name, None)
        if value is not None:
            return value() if callable(value) else value
    return None


def _engine_ns(engine: Any) -> tuple[float, float, float] | None:
    """The nanoseconds of forward, backward and step from an engine's timers; None if it does not time all three."""
    timers = getattr(engine, "timers", None)
    if timers is None or not _first_attribute(engine, "wall_clock_breakdown"):
        return None

    def read(*names: str) -> float:
        known = [name for name in names if not hasattr(timers, "has_timer") or timers.has_timer(name)]
        return max((timers(name).elapsed(False) * 1e6 for name in known), default=0.0)

    # The timers' names in flops-profiler 0.1.2, and in DeepSpeed today.
    times = read("forward", "fwd"), read("backward", "bwd"), read("step")
    return times if all(times) else None
