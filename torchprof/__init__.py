"""torchprof: which layer? Time, memory and calls of a PyTorch model, layer by layer, forward and backward.

The public names are loaded when they are first used, so that reading a saved run does not import torch. The classes of
the values in a run are in ``torchprof.types``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchprof.version import __version__

if TYPE_CHECKING:
    from torchprof import types
    from torchprof.comparison import compare
    from torchprof.comparison.budget import BudgetExceeded, assert_budget
    from torchprof.comparison.diff import Diff
    from torchprof.errors import TorchprofError
    from torchprof.profile.benchmark import benchmark
    from torchprof.profile.flops import flops
    from torchprof.profile.passes import sampled
    from torchprof.profile.profile import Profile
    from torchprof.profile.torch_profiler import annotate, from_profiler, log_stragglers, tensorboard_trace_handler
    from torchprof.profile.watch import watch
    from torchprof.record.peak import peak
    from torchprof.run.merge import merge
    from torchprof.run.run import Run
    from torchprof.run.saved import load, open_job
    from torchprof.traces.read import from_trace

__all__ = [
    "BudgetExceeded",
    "Diff",
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
    "log_stragglers",
    "merge",
    "open_job",
    "peak",
    "sampled",
    "tensorboard_trace_handler",
    "types",
    "watch",
]

_FILES = {
    "comparison.budget": "BudgetExceeded assert_budget",
    "comparison": "compare",
    "comparison.diff": "Diff",
    "errors": "TorchprofError",
    "profile.benchmark": "benchmark",
    "profile.flops": "flops",
    "profile.passes": "sampled",
    "profile.profile": "Profile",
    "profile.torch_profiler": "annotate from_profiler log_stragglers tensorboard_trace_handler",
    "profile.watch": "watch",
    "record.peak": "peak",
    "run.merge": "merge",
    "run.run": "Run",
    "run.saved": "load open_job",
    "traces.read": "from_trace",
}
_FILE_OF = {name: file for file, names in _FILES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    from importlib import import_module
    from sys import modules

    if name in ("profile", "types"):  # ``import torchprof`` is enough to use them; of profile also in torchprof 1.4.0
        return import_module(f"torchprof.{name}")
    if name not in _FILE_OF:
        # ``name`` and ``obj`` let Python say which name may have been meant
        raise AttributeError(f"module 'torchprof' has no attribute {name!r}", name=name, obj=modules[__name__])
    from torchprof.run.processes import paused_gc

    with paused_gc():  # with torch imported, one collection takes as long as half of our files
        return getattr(import_module(f"torchprof.{_FILE_OF[name]}"), name)


def __dir__() -> list[str]:
    return __all__
