"""MFU: the FLOPs of a model over what its devices could have done in the same time."""

from __future__ import annotations

from collections import Counter

from torchprof.analyze.figures import measured_by_all
from torchprof.run.cost import Cost
from torchprof.run.dtypes import DTYPES
from torchprof.run.formats import Figure
from torchprof.run.meta import Meta, Peak
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, PHASES

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
        if peak is None or not meta.wall_ns or _devices_used(run, meta.rank) > 1:
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


def _devices_used(run: Run, rank: int) -> int:
    """How many devices a rank used, the CPU not counted."""
    return sum(map(bool, run.rows.summed("device", "device_ns", rank=rank).values()))
