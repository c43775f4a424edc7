"""The classes of the values that a run, a comparison and a benchmark hold: for annotations and ``isinstance``.

They are loaded when they are first used, like the names of ``torchprof``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchprof.analyze.columns import Column
    from torchprof.comparison.diff import Change, Noise, Pair
    from torchprof.profile.benchmark import BenchmarkResult, Latency
    from torchprof.record.modules import Trace
    from torchprof.run.collectives import Entered, Unfinished
    from torchprof.run.formats import Bound, Figure, ReportCell, Unit
    from torchprof.run.layers import Layer, Layers
    from torchprof.run.lockstep import GroupOfRanks, Lockstep, LockstepKey
    from torchprof.run.measures import Cost, Measure, SampleKey, Spread
    from torchprof.run.meta import Compilation, CompiledRegion, MeshDim, Meta, Peak, RunWarning
    from torchprof.run.operators import Op
    from torchprof.run.rows import Around, Row, Rows
    from torchprof.run.run import Node, ReportText
    from torchprof.run.saved import JobFolder
    from torchprof.run.timeline import (
        DeviceTime,
        Held,
        Lane,
        Memory,
        Pipeline,
        Spans,
        StageAction,
        StreamTime,
        Timeline,
    )
    from torchprof.run.words import Frame, FrameKind, Signature, StepEnd


__all__ = [
    "Around",
    "BenchmarkResult",
    "Bound",
    "Change",
    "Column",
    "Compilation",
    "CompiledRegion",
    "Cost",
    "DeviceTime",
    "Entered",
    "Figure",
    "Frame",
    "FrameKind",
    "GroupOfRanks",
    "Held",
    "JobFolder",
    "Lane",
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
    "Timeline",
    "Trace",
    "Unfinished",
    "Unit",
]

_FILES = {
    "analyze.columns": "Column",
    "comparison.diff": "Change Noise Pair",
    "profile.benchmark": "BenchmarkResult Latency",
    "record.modules": "Trace",
    "run.collectives": "Entered Unfinished",
    "run.formats": "Bound Figure ReportCell Unit",
    "run.layers": "Layer Layers",
    "run.lockstep": "GroupOfRanks Lockstep LockstepKey",
    "run.measures": "Cost Measure SampleKey Spread",
    "run.meta": "Compilation CompiledRegion MeshDim Meta Peak RunWarning",
    "run.operators": "Op",
    "run.rows": "Around Row Rows",
    "run.run": "Node ReportText",
    "run.saved": "JobFolder",
    "run.timeline": "DeviceTime Held Lane Memory Pipeline Spans StageAction StreamTime Timeline",
    "run.words": "Frame FrameKind Signature StepEnd",
}
"""By file, the names that are loaded from it."""
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from sys import modules

    if name not in _FILE_OF:
        raise AttributeError(f"module 'torchprof.types' has no attribute {name!r}", name=name, obj=modules[__name__])
    return getattr(import_module(f"torchprof.{_FILE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
