"""The calls of modules that are part of no other module's call: where a program meets its models."""

from __future__ import annotations

import functools
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn

from torchprof.record.forwards import leave_to_eager


class OutermostCalls:
    """From ``attach`` to ``detach``, calls ``before(module)`` right before every outermost call of a module on this
    thread, and ``elsewhere(module)`` before every one on another thread. ``inner`` counts the calls inside of those.

    ``nn.Module.__call__`` is replaced meanwhile: unlike a hook, it comes before the module's forward is looked up, so
    that a label put on in ``before`` is on that very call; and torch.compile, which takes no notice of it, need not
    compile again.
    """

    def __init__(self, before: Callable[[nn.Module], None], elsewhere: Callable[[nn.Module], None]) -> None:
        self.inner = 0
        self._before = before
        self._elsewhere = elsewhere
        self._original = self._ours = nn.Module.__dict__["__call__"]

    def attach(self) -> None:
        original = self._original = nn.Module.__dict__["__call__"]
        home = get_ident()
        is_compiling, thread = torch.compiler.is_compiling, get_ident
        inside: set[int] = set()  # the threads that are in a call

        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():  # first, so that torch.compile sees nothing else of this
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

        leave_to_eager(call)
        for ours in (self._before, self._elsewhere):
            leave_to_eager(ours, with_calls=True)
        self._ours = call
        nn.Module.__call__ = call  # type: ignore[method-assign]

    def detach(self) -> None:
        """Leave the class as it was; where other code has kept or replaced it since, ours passes calls through."""
        self._before = self._elsewhere = _nothing
        if nn.Module.__dict__["__call__"] is self._ours:
            nn.Module.__call__ = self._original  # type: ignore[method-assign]


def _nothing(module: nn.Module) -> None:
    pass
