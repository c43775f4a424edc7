"""The functions of ``reports`` and ``analyze`` that methods of ``Run`` call, by name.

They are imported when they are first called, so ``run`` imports none of the packages that read it.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_FILES = {
    "benchmark_table": "torchprof.reports.benchmark",
    "dataframe": "torchprof.analyze.dataframe",
    "export": "torchprof.reports",
    "metrics": "torchprof.analyze.metrics",
    "printed": "torchprof.reports.overview",
    "render": "torchprof.reports",
    "all_warnings": "torchprof.analyze.caveats",
    "show_page": "torchprof.reports.notebook",
}


def output(name: str) -> Callable[..., Any]:
    """The function of that name."""
    return getattr(import_module(_FILES[name]), name)  # type: ignore[no-any-return]
