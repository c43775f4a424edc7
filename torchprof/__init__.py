"""torchprof: which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.

The public names are loaded when they are first used, so that reading a saved run does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchprof.version import __version__

if TYPE_CHECKING:
    from torchprof.analyze.columns import Column
    from torchprof.analyze.compare.budget import BudgetExceeded, assert_budget
    from torchprof.analyze.compare.comparison import compare
    from torchprof.analyze.compare.diff import Change, Diff, Pair, Parts
    from torchprof.analyze.compare.noise import Noise
    from torchprof.errors import TorchprofError
    from torchprof.profile.annotate import annotate, from_profiler
    from torchprof.profile.benchmark import benchmark
    from torchprof.profile.flops import flops
    from torchprof.profile.latency import BenchmarkResult, Latency, Machine
    from torchprof.profile.profile import Profile
    from torchprof.profile.tensorboard import tensorboard_trace_handler
    from torchprof.record.modules import Trace
    from torchprof.record.peak import peak
    from torchprof.run.cost import Bound, Cost, Figure, Measure, ReportCell, Unit
    from torchprof.run.file import load
    from torchprof.run.layers import Layer, Layers
    from torchprof.run.lockstep import GroupOfRanks, Lockstep, LockstepKey
    from torchprof.run.memory import Held, Memory
    from torchprof.run.merge import merge
    from torchprof.run.meta import Compilation, CompiledRegion, MeshDim, Meta, Peak
    from torchprof.run.operators import Op
    from torchprof.run.outputs import ReportText
    from torchprof.run.rows import Around, Row, Rows
    from torchprof.run.run import Node, Run
    from torchprof.run.samples import SampleKey, Spread
    from torchprof.run.timeline import DeviceTime, Lane, Spans, StreamTime, Timeline
    from torchprof.run.unfinished import Entered, Unfinished
    from torchprof.run.warnings import Caveat
    from torchprof.run.words import Frame, Signature
    from torchprof.traces.read import from_trace


__all__ = [
    "Around",
    "BenchmarkResult",
    "Bound",
    "BudgetExceeded",
    "Caveat",
    "Change",
    "Column",
    "Compilation",
    "CompiledRegion",
    "Cost",
    "DeviceTime",
    "Diff",
    "Entered",
    "Figure",
    "Frame",
    "GroupOfRanks",
    "Held",
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
    "Parts",
    "Peak",
    "Profile",
    "ReportCell",
    "ReportText",
    "Row",
    "Rows",
    "Run",
    "SampleKey",
    "Signature",
    "Spans",
    "Spread",
    "StreamTime",
    "Timeline",
    "TorchprofError",
    "Trace",
    "Unfinished",
    "Unit",
    "__version__",
    "annotate",
    "assert_budget",
    "benchmark",
    "compare",
    "flops",
    "from_profiler",
    "from_trace",
    "load",
    "merge",
    "peak",
    "tensorboard_trace_handler",
]

_FILES = {
    "Around": "run.rows",
    "BenchmarkResult": "profile.latency",
    "Bound": "run.cost",
    "BudgetExceeded": "analyze.compare.budget",
    "Caveat": "run.warnings",
    "Change": "analyze.compare.diff",
    "Column": "analyze.columns",
    "Compilation": "run.meta",
    "CompiledRegion": "run.meta",
    "Cost": "run.cost",
    "DeviceTime": "run.timeline",
    "Diff": "analyze.compare.diff",
    "Entered": "run.unfinished",
    "Figure": "run.cost",
    "Frame": "run.words",
    "GroupOfRanks": "run.lockstep",
    "Held": "run.memory",
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
    "Parts": "analyze.compare.diff",
    "Peak": "run.meta",
    "Profile": "profile.profile",
    "ReportCell": "run.cost",
    "ReportText": "run.outputs",
    "Row": "run.rows",
    "Rows": "run.rows",
    "Run": "run.run",
    "SampleKey": "run.samples",
    "Signature": "run.words",
    "Spans": "run.timeline",
    "Spread": "run.samples",
    "StreamTime": "run.timeline",
    "Timeline": "run.timeline",
    "TorchprofError": "errors",
    "Trace": "record.modules",
    "Unfinished": "run.unfinished",
    "Unit": "run.cost",
    "annotate": "profile.annotate",
    "assert_budget": "analyze.compare.budget",
    "benchmark": "profile.benchmark",
    "compare": "analyze.compare.comparison",
    "flops": "profile.flops",
    "from_profiler": "profile.annotate",
    "from_trace": "traces.read",
    "load": "run.file",
    "merge": "run.merge",
    "peak": "record.peak",
    "tensorboard_trace_handler": "profile.tensorboard",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from sys import modules

    if name == "profile":  # in torchprof 1.4.0, too, ``import torchprof`` was enough to use it
        return import_module("torchprof.profile")
    if name not in _FILES:
        # ``name`` and ``obj`` let Python say which name may have been meant
        raise AttributeError(f"module 'torchprof' has no attribute {name!r}", name=name, obj=modules[__name__])
    return getattr(import_module(f"torchprof.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
