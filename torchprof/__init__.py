"""torchprof: which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.

The public names are loaded when they are first used, so that reading a saved run imports no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchprof.version import __version__

if TYPE_CHECKING:
    from torchprof.annotation import annotate, from_profiler
    from torchprof.budget import assert_budget
    from torchprof.diff import compare
    from torchprof.errors import TorchprofError
    from torchprof.latency import benchmark
    from torchprof.merging import merge
    from torchprof.peaks import peak
    from torchprof.profile import Profile
    from torchprof.run import Run
    from torchprof.run_file import load
    from torchprof.shapes import flops
    from torchprof.tensorboard import tensorboard_trace_handler
    from torchprof.trace import from_trace

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

_ROOMS = {
    "Profile": "profile",
    "Run": "run",
    "TorchprofError": "errors",
    "annotate": "annotation",
    "assert_budget": "budget",
    "benchmark": "latency",
    "compare": "diff",
    "flops": "shapes",
    "from_profiler": "annotation",
    "from_trace": "trace",
    "load": "run_file",
    "merge": "merging",
    "peak": "peaks",
    "profile": "profile",
    "tensorboard_trace_handler": "tensorboard",
}


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module 'torchprof' has no attribute {name!r}")
    from importlib import import_module

    room = import_module(f"torchprof.{_ROOMS[name]}")
    return room if name == "profile" else getattr(room, name)


def __dir__() -> list[str]:
    return __all__
