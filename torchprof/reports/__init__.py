"""Reports: each reads one ``Run`` and returns text. A new report is one new file here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from torchprof.errors import TorchprofError, suggest

if TYPE_CHECKING:
    from torchprof.run import Run

_reports: dict[str, Callable[..., str]] = {}


def report(name: str) -> Callable[[Callable[..., str]], Callable[..., str]]:
    """Register a function ``(run, **options) -> str`` as the report of that name."""

    def register(function: Callable[..., str]) -> Callable[..., str]:
        _reports[name] = function
        return function

    return register


def known() -> dict[str, Callable[..., str]]:
    """All reports by name."""
    for room in iter_modules(__path__):
        import_module(f"{__name__}.{room.name}")
    return _reports


def render(name: str, run: Run, options: dict[str, Any]) -> str:
    """The report of that name. Raises TorchprofError for an unknown name or option."""
    reports = known()
    if name not in reports:
        raise TorchprofError(f"There is no report {name!r}. {suggest(str(name), reports)}")
    accepted = list(inspect.signature(reports[name]).parameters)[1:]
    for option in options:
        if option not in accepted:
            raise TorchprofError(f"The report {name!r} has no option {option!r}. {suggest(option, accepted)}")
    return reports[name](run, **options)
