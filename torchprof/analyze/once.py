"""Results of functions of a run that several reports need are computed once."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

from torchprof.run.run import Run

_Result = TypeVar("_Result")
_KEPT = "_kept"


def once(function: Callable[..., _Result]) -> Callable[..., _Result]:
    """Keep the results of a function of a run and hashable arguments with the run, which never changes. Callers must
    not change them; and they must not refer to the run, which would become garbage later."""

    @wraps(function)
    def kept(run: Run, *args: Any) -> _Result:
        results = vars(run).setdefault(_KEPT, {})
        key = (function.__name__, *args)
        if key not in results:
            results[key] = function(run, *args)
        return results[key]  # type: ignore[no-any-return]

    return kept
