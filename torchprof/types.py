"""The classes of the values that a run, a comparison and a benchmark hold: for annotations and ``isinstance``.

They are loaded when they are first used, like the names of ``torchprof``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchprof.analyze.columns import Column
    from torchprof.analyze.compare.diff import Change, Pair
    from torchprof.analyze.compare.noise import Noise
    from torchprof.profile.latency import BenchmarkResult, Latency, Machine
    from torchprof.record.modules import Trace
    from torchprof.run.cost import Bound, Cost, Figure, Measure, ReportCell, Unit
    from torchprof.run.job_folder import JobFolder
    from torchprof.run.layers import Layer, Layers
    from torchprof.run.lockstep import GroupOfRanks, Lockstep, LockstepKey
    from torchprof.run.memory import Held, Memory
    from torchprof.run.meta import Compilation, CompiledRegion, MeshDim, Meta, Peak
    from torchprof.run.operators import Op
    from torchprof.run.outputs import ReportText
    from torchprof.run.pipeline import Pipeline, StageAction
    from torchprof.run.rows import Around, Row, Rows
    from torchprof.run.run import Node
    from torchprof.run.samples import SampleKey, Spread
    from torchprof.run.timeline import DeviceTime, Lane, Spans, StreamTime, Timeline
    from torchprof.run.unfinished import Entered, Unfinished
    from torchprof.run.warnings import RunWarning
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
    "Machine",
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
    "Around": "run.rows",
    "BenchmarkResult": "profile.latency",
    "Bound": "run.cost",
    "RunWarning": "run.warnings",
    "Change": "analyze.compare.diff",
    "Column": "analyze.columns",
    "Compilation": "run.meta",
    "CompiledRegion": "run.meta",
    "Cost": "run.cost",
    "DeviceTime": "run.timeline",
    "Entered": "run.unfinished",
    "Figure": "run.cost",
    "Frame": "run.words",
    "FrameKind": "run.words",
    "GroupOfRanks": "run.lockstep",
    "Held": "run.memory",
    "JobFolder": "run.job_folder",
    "Lane": "run.timeline",
    "Latency": "profile.latency",
    "Layer": "run.layers",
    "Layers": "run.layers",
    "Lockstep": "run.lockstep",
    "LockstepKey": "run.lockstep",
    "Machine": "profile.latency",
    "Measure": "run.cost",
    "Memory": "run.memory",
    "MeshDim": "run.meta",
    "Meta": "run.meta",
    "Node": "run.run",
    "Noise": "analyze.compare.noise",
    "Op": "run.operators",
    "Pair": "analyze.compare.diff",
    "Peak": "run.meta",
    "Pipeline": "run.pipeline",
    "ReportCell": "run.cost",
    "ReportText": "run.outputs",
    "Row": "run.rows",
    "Rows": "run.rows",
    "SampleKey": "run.samples",
    "Signature": "run.words",
    "Spans": "run.timeline",
    "Spread": "run.samples",
    "StageAction": "run.pipeline",
    "StepEnd": "run.words",
    "StreamTime": "run.timeline",
    "Timeline": "run.timeline",
    "Trace": "record.modules",
    "Unfinished": "run.unfinished",
    "Unit": "run.cost",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from sys import modules

    if name not in _FILES:
        raise AttributeError(f"module 'torchprof.types' has no attribute {name!r}", name=name, obj=modules[__name__])
    return getattr(import_module(f"torchprof.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
