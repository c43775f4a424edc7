"""A run as a flat dict of numbers, for tools that track training runs: ``Run.metrics``. And MFU, which is one of them.

docs/metrics.md lists the names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set

from torchprof.analyze.columns import MEASURE_OF
from torchprof.analyze.figures import Figures, figures_of_layers, measured_by_all
from torchprof.errors import TorchprofError
from torchprof.run.formats import Bound, Figure
from torchprof.run.layers import find
from torchprof.run.measures import Cost
from torchprof.run.meta import Meta, Peak
from torchprof.run.run import Run
from torchprof.run.torch_names import DTYPES
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED, OUTSIDE, PHASES

_Metric = tuple[str, Figure]
_NS_PER_MS = 1e6
_TIMES = {"cpu_ms": MEASURE_OF["cpu_ns"], "device_ms": MEASURE_OF["device_ns"]}
_COUNTS = {"flops": MEASURE_OF["flops"], "macs": MEASURE_OF["macs"]}


def metrics(run: Run, layers: int | str | Iterable[str | tuple[str, ...]] | None = None) -> dict[str, int | float]:
    """``Run.metrics``: all numbers that are known, by name."""
    figures = figures_of_layers(run, run.phases())
    models = [figures[model.path] for model in run.roots]
    named = [*_work_metrics(run, models), *_step_metrics(run), *_memory_metrics(run), *_model_metrics(models)]
    for path in _paths_of(run, layers):
        named += _layer_metrics(run, ".".join(path), figures[path])
    known = {name: figure for name, figure in named if figure.is_known}
    at_least = [name for name, figure in known.items() if figure.bound is Bound.AT_LEAST]
    counts = {"ranks/count": len(run.metas), "warnings/count": len(run.warnings), "lower_bounds/count": len(at_least)}
    return {name: figure.value for name, figure in known.items()} | counts


def _paths_of(run: Run, layers: int | str | Iterable[str | tuple[str, ...]] | None) -> list[tuple[str, ...]]:
    """The paths of the layers to a depth, or of those that some paths name; none for None."""
    if layers is None:
        return []
    if isinstance(layers, int) and not isinstance(layers, bool) and layers >= 0:
        return [layer.path for layer in run.layers if len(layer.path) <= layers + 1]
    if not isinstance(layers, Iterable):
        raise TorchprofError(f"layers is a depth of 0 or more, a path or a list of paths, not {layers!r:.80}.")
    known = [(layer.path,) for layer in run.layers]
    numbers = {number for path in ([layers] if isinstance(layers, str) else layers) for number in find(path, known)}
    return [run.layers[number].path for number in sorted(numbers)]


def _work_metrics(run: Run, models: Sequence[Figures]) -> Iterator[_Metric]:
    """Time, FLOPs and MACs of all layers by phase, and the time of work of no layer; sums over ranks."""
    measured = measured_by_all(run)
    walls = [meta.wall_ns for meta in run.metas]
    if all(walls) and measured & {"cpu_ns", "device_ns"}:
        yield "time/recorded/wall_ms", Figure(max(walls) / _NS_PER_MS)
    of_layers = {phase: Cost() for phase in run.phases()}
    called = dict.fromkeys(of_layers, False)
    for (layer, number), (cost, calls) in run.rows.by_layer.items():
        if layer >= 0:
            of_layers[PHASES[number]] += cost
            called[PHASES[number]] |= calls > 0
    for phase, cost in of_layers.items():
        lacks = {phase for model in models if phase in model.incomplete}
        whole = Figures({phase: cost}, {phase: cost}, unknown=not called[phase] and not cost, incomplete=lacks)
        yield from _time_metrics(f"time/{phase}", whole, phase, measured)
        for name, measure in _COUNTS.items():
            yield f"{name}/{phase}", whole.measure(measure, phase, measured=measure.fields[0][0] in measured)
        if "flops" in measured and not whole.unknown:
            yield f"uncounted/{phase}", Figure(cost.uncounted)
    for layer, name in ((OUTSIDE, "outside"), (NOT_SELECTED, "not_selected")):
        costs = [run.no_layer(phase, selected=layer == OUTSIDE) for phase in PHASES]
        if layer == OUTSIDE or any(costs):
            in_all = {FORWARD: sum(costs, Cost())}
            yield from _time_metrics(f"time/{name}", Figures(in_all, in_all), FORWARD, measured)
    if "device_ns" in measured:
        yield "time/launched_before/device_ms", Figure(run.left_over.device_ns / _NS_PER_MS)
        if busy := [time.busy_ns / time.span_ns for time in run.device_use if time.span_ns]:
            yield "device/busy_share", Figure(sum(busy) / len(busy))
    if (share := mfu(run)) is not None:
        yield "mfu", share


def _time_metrics(prefix: str, figures: Figures, phase: str, measured: Set[str]) -> Iterator[_Metric]:
    for name, measure in _TIMES.items():
        time = figures.measure(measure, phase, measured=measure.fields[0][0] in measured)
        yield f"{prefix}/{name}", time._replace(value=time.value / _NS_PER_MS)


def _step_metrics(run: Run) -> Iterator[_Metric]:
    """The duration of a step on the rank with the longest mean; and the number of steps."""
    spreads = [spread for key, spread in run.samples.items() if key.measure == "step_ns" and spread.count]
    if not spreads:
        return
    slowest = max(spreads, key=lambda spread: spread.sum / spread.count)
    yield "steps/count", Figure(max(spread.count for spread in spreads))
    mean, p95 = slowest.sum / slowest.count, slowest.quantile(0.95)
    for name, ns in (("mean", mean), ("median", slowest.median), ("p95", p95), ("max", slowest.max)):
        yield f"time/step/{name}_ms", Figure(ns / _NS_PER_MS)


def _memory_metrics(run: Run) -> Iterator[_Metric]:
    """The highest peaks above the start, and what stays of a call, of the CPU and of any one device, over all ranks."""
    for name, is_cpu in (("cpu", True), ("device", False)):
        memories = [memory for memory in run.memory if (memory.device == "cpu") is is_cpu]
        if peaks := [memory.peak_bytes for memory in memories if memory.peak_bytes]:
            yield f"memory/{name}/peak_bytes", Figure.of_sum(max(peaks), is_complete=not run.passes)
        if growths := [memory.growth_per_call for memory in memories if memory.growth_per_call is not None]:
            yield f"memory/{name}/growth_bytes_per_call", Figure(max(growths))


def _model_metrics(models: Sequence[Figures]) -> Iterator[_Metric]:
    """The forward calls and the parameters of all models; only if they are known of each."""
    for name, figures in (
        ("calls/forward", [model.number_of_calls() for model in models]),
        ("parameters/count", [model.parameters() for model in models]),
    ):
        if figures and all(figure.is_known for figure in figures):
            yield name, Figure(sum(figure.value for figure in figures))


def _layer_metrics(run: Run, name: str, figures: Figures) -> Iterator[_Metric]:
    """The totals of a layer, with the layers below it, by phase."""
    measured = measured_by_all(run)
    for phase in run.phases():
        yield from _time_metrics(f"layer/{name}/{phase}", figures, phase, measured)
        counted = figures.measure(_COUNTS["flops"], phase, measured="flops" in measured)
        yield f"layer/{name}/{phase}/flops", counted


# MFU

_DTYPES = {
    recorded: dtype.name
    for dtype in DTYPES
    if dtype.name in ("float32", "float64", "float16", "bfloat16")
    for recorded in dtype.recorded
}


def mfu(run: Run) -> Figure | None:
    """The model FLOPs utilization: the FLOPs of all layers in forward and backward, without recomputation, over the
    elapsed time of the recording and the peak of the device; over all ranks together.

    The peak is that of ``torchprof.peak``, for the type of most MACs. None if FLOPs, times or the peak of a rank are
    unknown, and for a rank whose work ran on several devices.
    """
    measured = measured_by_all(run)
    dtype = dtype_of_most_macs(run)
    if dtype is None or "flops" not in measured or not measured & {"cpu_ns", "device_ns"}:
        return None
    possible = 0.0
    for meta in run.metas:
        peak = peak_of(meta, dtype)
        devices = sum(map(bool, run.rows.summed("device", "device_ns", rank=meta.rank).values()))  # without the CPU
        if peak is None or not meta.wall_ns or devices > 1:
            return None
        possible += peak.flops_per_s * meta.wall_ns / 1e9
    phases = {PHASES.index(FORWARD), PHASES.index(BACKWARD)}
    by_layer = run.rows.by_layer.items()
    done = sum((cost for (layer, phase), (cost, _) in by_layer if layer >= 0 and phase in phases), Cost())
    return Figure.of_sum(done.flops / possible, not done.uncounted)


def peak_of(meta: Meta, dtype: str | None) -> Peak | None:
    """The last measured peak, for this type, of the device that did the work of a rank; None if there is none."""
    kind = meta.device if "device_ns" in meta.measured else "cpu"
    peaks = [peak for peak in meta.peaks if peak.device.split(":")[0] == kind and peak.dtype == dtype]
    return peaks[-1] if peaks else None


def dtype_of_most_macs(run: Run, model: str | None = None) -> str | None:
    """The type ("float32") of the inputs of the operators with most MACs, in one model (by its name) or in all.

    None if no MACs were counted; "" if the type is unknown.
    """

    def is_counted(layer: int) -> bool:
        return layer >= 0 and model in (None, run.layers[layer].path[0])

    macs: Counter[str] = Counter()
    for chain, count in run.rows.summed("frames", "macs", layer=is_counted).items():
        frames = run.rows.frames[chain]
        if count and frames and frames[-1].signature is not None:
            dtypes = frames[-1].signature.dtypes
            macs[next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "")] += count
    return macs.most_common(1)[0][0] if macs else None
