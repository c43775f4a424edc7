"""torchprof: which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.

The public names are loaded when they are first used, so that reading a saved run does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchprof.version import __version__

if TYPE_CHECKING:
    from torchprof.analyze.compare.budget import assert_budget
    from torchprof.analyze.compare.comparison import compare
    from torchprof.errors import TorchprofError
    from torchprof.profile.annotate import annotate, from_profiler
    from torchprof.profile.benchmark import benchmark
    from torchprof.profile.flops import flops
    from torchprof.profile.profile import Profile
    from torchprof.profile.tensorboard import tensorboard_trace_handler
    from torchprof.record.peak import peak
    from torchprof.run.file_read import load
    from torchprof.run.merge import merge
    from torchprof.run.run import Run
    from torchprof.traces.read import from_trace


__all__ = [
    "Profile",
    "Run",
    "TorchprofError",
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
    "Profile": "profile.profile",
    "Run": "run.run",
    "TorchprofError": "errors",
    "annotate": "profile.annotate",
    "assert_budget": "analyze.compare.budget",
    "benchmark": "profile.benchmark",
    "compare": "analyze.compare.comparison",
    "flops": "profile.flops",
    "from_profiler": "profile.annotate",
    "from_trace": "traces.read",
    "load": "run.file_read",
    "merge": "run.merge",
    "peak": "record.peak",
    "tensorboard_trace_handler": "profile.tensorboard",
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "profile":  # in torchprof 1.4.0, too, ``import torchprof`` was enough to use it
        return import_module("torchprof.profile")
    if name not in _FILES:
        raise AttributeError(f"module 'torchprof' has no attribute {name!r}")
    return getattr(import_module(f"torchprof.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
