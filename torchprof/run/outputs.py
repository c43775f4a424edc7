"""Who shows a run: the functions of other packages that the methods of ``Run`` and of other values call, by name.

They are loaded when they are first called. So the packages of values import nothing of those that read them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

_FILES = {
    "benchmark_table": "torchprof.reports.benchmark",
    "dataframe": "torchprof.analyze.dataframe",
    "export": "torchprof.reports",
    "render": "torchprof.reports",
    "all_warnings": "torchprof.analyze.caveats",
    "show_page": "torchprof.reports.notebook",
}


def output(name: str) -> Callable[..., Any]:
    """The function of that name."""
    return getattr(import_module(_FILES[name]), name)  # type: ignore[no-any-return]
