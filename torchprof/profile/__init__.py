"""What users call to make a run: ``Profile``, whole programs, other profilers, FLOPs from shapes, benchmarks.

The names that can be imported from here are loaded on first use: to import one file does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchprof.profile.profile import Profile
    from torchprof.record.modules import Trace, walk_modules

__all__ = ["Profile", "Trace", "walk_modules"]

_FILES = {"Profile": "profile.profile", "Trace": "record.modules", "walk_modules": "record.modules"}


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module 'torchprof.profile' has no attribute {name!r}")
    return getattr(import_module(f"torchprof.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
