"""The classes of the values that a run, a comparison and a benchmark hold: for annotations and ``isinstance``.

Those that need torch are loaded when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from sys import modules
from typing import TYPE_CHECKING, Any

from torchprof.analyze.columns import Column
from torchprof.comparison.diff import Change, Denominator, LargestParts, Noise, Pair
from torchprof.run.collectives import Entered, Unfinished
from torchprof.run.formats import Bound, Figure, ReportCell, Unit
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.measures import Cost, Measure, SampleKey, Spread, Trial
from torchprof.run.meta import Compilation, CompiledRegion, MeshDim, Meta, Peak, RunWarning
from torchprof.run.operators import Op
from torchprof.run.passes import Passes, Stretch, Unusual
from torchprof.run.rows import Around, Row, Rows
from torchprof.run.run import Node, ReportText
from torchprof.run.saved import JobFolder
from torchprof.run.timeline import (
    DeviceTime,
    Growth,
    Held,
    Holder,
    Lane,
    Memory,
    Pipeline,
    Spans,
    StageAction,
    StreamTime,
    Timeline,
)
from torchprof.run.words import Frame, FrameKind, Signature, StepEnd

if TYPE_CHECKING:
    from torchprof.profile.benchmark import BenchmarkResult, Latency
    from torchprof.profile.watch import Watch
    from torchprof.record.modules import Trace

__all__ = [
    "Around",
    "BenchmarkResult",
    "Bound",
    "Change",
    "Column",
    "Compilation",
    "CompiledRegion",
    "Cost",
    "Denominator",
    "DeviceTime",
    "Entered",
    "Figure",
    "Frame",
    "FrameKind",
    "GroupOfRanks",
    "Growth",
    "Held",
    "Holder",
    "JobFolder",
    "Lane",
    "LargestParts",
    "Latency",
    "Layer",
    "Layers",
    "Lockstep",
    "LockstepKey",
    "Measure",
    "Memory",
    "MeshDim",
    "Meta",
    "Node",
    "Noise",
    "Op",
    "Pair",
    "Passes",
    "Peak",
    "Pipeline",
    "ReportCell",
    "ReportText",
    "Row",
    "Rows",
    "RunWarning",
    "SampleKey",
    "Signature",
    "Spans",
    "Spread",
    "StageAction",
    "StepEnd",
    "StreamTime",
    "Stretch",
    "Timeline",
    "Trace",
    "Trial",
    "Unfinished",
    "Unit",
    "Unusual",
    "Watch",
]

_NEED_TORCH = {
    "BenchmarkResult": "profile.benchmark",
    "Latency": "profile.benchmark",
    "Trace": "record.modules",
    "Watch": "profile.watch",
}


def __getattr__(name: str) -> Any:
    if name not in _NEED_TORCH:
        raise AttributeError(f"module 'torchprof.types' has no attribute {name!r}", name=name, obj=modules[__name__])
    return getattr(import_module(f"torchprof.{_NEED_TORCH[name]}"), name)


def __dir__() -> list[str]:
    return __all__
