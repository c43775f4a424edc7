"""The parts of the recorded time: data, forward, backward, optimizer, … They add up to all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from torchprof.run.purposes import COPY, DATA, GARBAGE, OF_NO_LAYER, OPTIMIZER, WAIT, purpose_of
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, OTHER, OUTSIDE, PHASES, RECOMPUTE, is_left_over

_NAMES = {
    DATA: "data",
    OPTIMIZER: "optimizer",
    COPY: "copies",
    WAIT: "waiting for the device",
    GARBAGE: "garbage collection",
    OF_NO_LAYER: BACKWARD,
}
IDLE = "idle"
_ORDER = ("data", FORWARD, RECOMPUTE, BACKWARD, "optimizer", "copies", _NAMES[WAIT], _NAMES[GARBAGE], OTHER, IDLE)


def time_parts(run: Run, field: str) -> dict[str, int]:
    """The ns of each part in ``cpu_ns`` or ``device_ns``, in the order in which a step has them; parts of 0 are left
    out. Work that was launched before the recording is left out, as in all shares."""
    columns = run.rows.columns
    chains = run.rows.frames
    names: dict[tuple[int, int], str] = {}  # by phase and chain of frames, outside all layers
    left_over = [*map(is_left_over, chains)]
    parts: Counter[str] = Counter()
    for layer, phase, chain, ns in zip(columns["layer"], columns["phase"], columns["frames"], columns[field]):
        if not ns or left_over[chain]:
            continue
        if layer != OUTSIDE:
            parts[PHASES[phase]] += ns
            continue
        name = names.get((phase, chain))
        if name is None:
            name = names[phase, chain] = _NAMES.get(purpose_of(PHASES[phase], chains[chain]), OTHER)
        parts[name] += ns
    return {name: parts[name] for name in _ORDER if parts[name] > 0}


def device_parts(run: Run) -> dict[str, int]:
    """The parts of the time of all devices, and the time in which they were idle. Kernels that ran at the same time
    share it in proportion to their durations."""
    busy = [(one.wall_ns, ns) for one in run.metas for name, ns in one.busy_ns if name != "cpu"]
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
    found = {name: 100 * ns // whole for name, ns in parts.items()}
    by_remainder = sorted(parts, key=lambda name: 100 * parts[name] % whole, reverse=True)
    for name in by_remainder[: 100 - sum(found.values())]:
        found[name] += 1
    return {name: share for name, share in found.items() if share}
