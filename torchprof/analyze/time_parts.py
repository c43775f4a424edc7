"""The parts of the recorded time: data, forward, backward, optimizer, … They add up to all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torchprof.run.purposes import COPY, DATA, GARBAGE, OF_NO_LAYER, OPTIMIZER, WAIT, purpose_of
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, COMPILING, FORWARD, OTHER, OUTSIDE, PHASES, RECOMPUTE, FrameKind

_NAMES = {
    DATA: "data",
    OPTIMIZER: "optimizer",
    COPY: "copies",
    WAIT: "waiting for the device",
    GARBAGE: "garbage collection",
    OF_NO_LAYER: BACKWARD,
}
IDLE = "idle"
STAGES = "waiting for other stages"
COMPILING_PART = "torch.compile compiling"
NO_GRAD = "forward (no grad)"
FIRST_CALL, LATER_CALLS = "first call", "later calls"
_LONGER = 2
"""The first call of a model is a part of its own if it took this many times as long as the median one."""
_ORDER = (
    COMPILING_PART,
    "data",
    FIRST_CALL,
    LATER_CALLS,
    FORWARD,
    NO_GRAD,
    RECOMPUTE,
    BACKWARD,
    "optimizer",
    "copies",
    _NAMES[WAIT],
    STAGES,
    _NAMES[GARBAGE],
    OTHER,
    IDLE,
)


def time_parts(run: Run, field: str) -> dict[str, int]:
    """The ns of each part in ``cpu_ns`` or ``device_ns``, in the order in which a step has them; parts of 0 are left
    out. Work that was launched before the recording is left out, as in all shares.

    Forward on the CPU is divided: without gradients, as in evaluation, if the run has backward; and without backward
    the first call of the model, if it took much longer than the others, as the prompt of a language model does. In a
    pipeline, waiting for other stages is a part of its own."""
    chains = run.rows.frames
    compiles = [any(frame.kind == FrameKind.REGION and frame.name == COMPILING for frame in chain) for chain in chains]
    parts: Counter[str] = Counter()
    sums = run.rows.of_recording.summed(("layer", "phase", "frames"), field)
    for (layer, phase, chain), ns in sums.items():
        if compiles[chain]:
            parts[COMPILING_PART] += ns
        elif layer != OUTSIDE:
            parts[PHASES[phase]] += ns
        else:
            parts[_NAMES.get(purpose_of(PHASES[phase], chains[chain]), OTHER)] += ns
    if field == "cpu_ns":
        no_grad = sum(spread.sum for key, spread in run.samples.items() if key.measure == "no_grad_ns")
        parts[NO_GRAD] = min(no_grad, parts[FORWARD])
        parts[FORWARD] -= parts[NO_GRAD]
        parts[FIRST_CALL] = 0 if parts[COMPILING_PART] else min(_first_call_ns(run), parts[FORWARD])
        if parts[FIRST_CALL]:
            parts[LATER_CALLS] = parts.pop(FORWARD) - parts[FIRST_CALL]
        waited = sum(pipeline.waited_ns for pipeline in run.pipelines if pipeline.device == "cpu")
        parts[STAGES] = min(waited, parts[OTHER])
        parts[OTHER] -= parts[STAGES]
    return {name: parts[name] for name in _ORDER if parts[name] > 0}


def _first_call_ns(run: Run) -> int:
    """The first call of the only model of one rank, in a run without backward; 0 if it is as long as others."""
    spreads = [
        spread
        for key, spread in run.samples.items()
        if key.measure == "cpu_ns" and key.phase == FORWARD and key.layer in run.layers.roots
    ]
    if len(spreads) != 1 or spreads[0].count < 2 or BACKWARD in run.phases():
        return 0
    return spreads[0].first if spreads[0].first > _LONGER * spreads[0].median else 0


def device_parts(run: Run) -> dict[str, int]:
    """The parts of the time of all devices, and the time in which they were idle. Kernels that ran at the same time
    share it in proportion to their durations."""
    busy = [(meta.wall_ns, ns) for meta in run.metas for ns in meta.busy_devices.values()]
    parts = time_parts(run, "device_ns")
    worked, kernels = sum(ns for _, ns in busy), sum(parts.values())
    if not kernels or not worked:
        return {}
    idle = sum(max(wall - ns, 0) for wall, ns in busy)
    shared = {name: round(ns * worked / kernels) for name, ns in parts.items()}
    return {**shared, IDLE: idle} if idle else shared


def percents(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts in whole percent of their sum, which add up to 100: those with the largest remainders are rounded up.
    Parts of 0 % are left out."""
    whole = sum(parts.values())
    if not whole:
        return {}
    shares = {name: 100 * ns // whole for name, ns in parts.items()}
    by_remainder = sorted(parts, key=lambda name: 100 * parts[name] % whole, reverse=True)
    for name in by_remainder[: 100 - sum(shares.values())]:
        shares[name] += 1
    return {name: share for name, share in shares.items() if share}
