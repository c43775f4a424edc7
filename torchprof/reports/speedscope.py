"""Flame graphs for https://www.speedscope.app, in its own file format.

Format: https://www.speedscope.app/file-format-schema.json. Profiles are of the type "sampled": a list of stacks, each
with a weight.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from torchprof.analyze.report import report
from torchprof.analyze.stacks import Step, measured, stacks
from torchprof.errors import TorchprofError
from torchprof.run.cost import MEASURES
from torchprof.run.formats import Unit
from torchprof.run.run import Run
from torchprof.run.words import Frame, range_in_words
from torchprof.version import __version__

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SHOWN = {
    "cpu_ns": "CPU time",
    "device_ns": "{device} time",
    "cpu_allocated": "allocated on the CPU",
    "device_allocated": "allocated on {device}",
    "flops": "FLOPs",
}
_UNITS = {Unit.TIME: "nanoseconds", Unit.BYTES: "bytes", Unit.COUNT: "none"}


@report("speedscope", "stacks for speedscope.app", suffix=".speedscope.json")
def speedscope(run: Run) -> str:
    """A profile for each phase and each recorded measure, and for each rank if there are several.

    A stack is the path of a layer, then the operators, labels and kernels in it. Its weight is its self, so Σ weights =
    Σ rows of the run, including work of no layer. If FLOPs are a lower bound, the name of the profile says so. Raises
    TorchprofError if nothing was recorded.
    """
    frames: dict[Step, int] = {}
    profiles = [*_profiles(run, frames)]
    if not profiles:
        raise TorchprofError("Nothing of what speedscope can show was recorded in this run.")
    document = {
        "$schema": _SCHEMA,
        "exporter": f"torchprof {__version__}",
        "name": ", ".join(run.meta.model) or "torchprof",
        "shared": {"frames": [{"name": _name(run, step)} for step in frames]},
        "profiles": profiles,
    }
    return json.dumps(document, separators=(",", ":"))


def _profiles(run: Run, frames: dict[Step, int]) -> Iterator[dict[str, Any]]:
    """The profiles. ``frames``: the index of each step of a stack; grows by those that are new."""
    units = {name: _UNITS[measure.unit] for measure in MEASURES for name, _ in measure.fields}
    several = len({meta.rank for meta in run.metas}) > 1
    uncounted = stacks(run, "uncounted") if "uncounted" in measured(run) else {}
    device = run.meta.device_heading
    for measure in measured(run):
        if measure not in _SHOWN:
            continue
        for (rank, phase), weights in stacks(run, measure).items():
            title = f"rank {rank}, " * several + f"{phase}, {_SHOWN[measure].format(device=device)}"
            missed = uncounted.get((rank, phase))
            if measure == "flops" and missed:
                title += f", at least ({missed.total()} calls not counted)"
            # speedscope merges adjacent samples with a common prefix: sort them by their steps.
            samples = sorted(
                ([frames.setdefault(step, len(frames)) for step in stack], weight) for stack, weight in weights.items()
            )
            yield {
                "type": "sampled",
                "name": title,
                "unit": units[measure],
                "startValue": 0,
                "endValue": weights.total(),
                "samples": [sample for sample, _ in samples],
                "weights": [weight for _, weight in samples],
            }


def _name(run: Run, step: Step) -> str:
    if isinstance(step, Frame):
        return range_in_words(step.kind, step.name)
    return run.layers.name_of(step)
