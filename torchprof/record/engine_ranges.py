"""Ranges around the calls of autograd's engine, for the profiler of the thread that calls it."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, ClassVar

from torchprof.attribute.event_names import ENGINE_LABEL
from torchprof.record.forwards import never_compiled
from torchprof.record.session import is_observed, record
from torchprof.record.torch_internals import optional

_MODULES = ("torch.autograd", "torch.autograd.graph")
"""The modules through whose ``_engine_run_backward`` ``backward()`` and ``grad()`` enter the engine."""


class EngineRanges:
    """From ``on`` to ``off``, each call of autograd's engine is a range. Several objects may be on at the same time."""

    _users: ClassVar[int] = 0
    _replaced: ClassVar[list[tuple[Any, Any, Any]]] = []  # the module, what was there, and what is there now

    def __init__(self) -> None:
        self._is_on = False

    def on(self) -> None:
        if not self._is_on:
            self._is_on = True
            EngineRanges._users += 1
            if EngineRanges._users == 1:
                for name in _MODULES:
                    run_backward = optional(f"{name}._engine_run_backward")
                    if run_backward is not None:
                        self._replace(importlib.import_module(name), run_backward)

    def off(self) -> None:
        if self._is_on:
            self._is_on = False
            EngineRanges._users -= 1
            while not EngineRanges._users and EngineRanges._replaced:
                module, before, ours = EngineRanges._replaced.pop()
                if module._engine_run_backward is ours:  # other code may have replaced it meanwhile
                    module._engine_run_backward = before

    @staticmethod
    def _replace(module: Any, run_backward: Callable[..., Any]) -> None:
        @functools.wraps(run_backward)
        def in_a_range(*args: Any, **kwargs: Any) -> Any:
            if not is_observed():
                return run_backward(*args, **kwargs)
            with record(ENGINE_LABEL):
                return run_backward(*args, **kwargs)

        ours = never_compiled(in_a_range)
        module._engine_run_backward = ours
        EngineRanges._replaced.append((module, run_backward, ours))
