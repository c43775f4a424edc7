"""The outermost calls of modules, which are not nested in the call of another module. They show a program's models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from torchprof.record.forwards import leave_to_eager, never_compiled
from torchprof.record.shared_changes import replaced


class OutermostCalls:
    """From ``attach`` to ``detach``, calls ``before(module)`` right before each outermost call of a module on this
    thread, and ``elsewhere(module)`` before each one on another thread. ``inner``: the number of nested calls.

    It replaces ``nn.Module.__call__``, not a hook, because that runs before the forward of the module is looked up: a
    label that ``before`` attaches is already on this call. torch.compile has no guard on it and does not compile again.
    """

    def __init__(self, before: Callable[[nn.Module], None], elsewhere: Callable[[nn.Module], None]) -> None:
        self.inner = 0
        self._before = before
        self._elsewhere = elsewhere
        self._restore: Callable[[], None] = lambda: None

    def attach(self) -> None:
        original = nn.Module.__dict__["__call__"]
        home = get_ident()
        is_compiling, thread = torch.compiler.is_compiling, get_ident
        inside: set[int] = set()  # the threads with an open outermost call

        @leave_to_eager
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # first, so that torch.compile traces nothing else of this
                return original(module, *args, **kwargs)
            here = thread()
            if here in inside:
                self.inner += 1
                return original(module, *args, **kwargs)
            if here == home:
                self._before(module)
            else:
                self._elsewhere(module)
            inside.add(here)
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.discard(here)

        self._before, self._elsewhere = never_compiled(self._before), never_compiled(self._elsewhere)
        self._restore = replaced(nn.Module, "__call__", call)

    def detach(self) -> None:
        """Restore ``nn.Module``. If other code still calls our function, it passes calls through."""
        self._before = self._elsewhere = lambda module: None
        self._restore()
