"""Custom ops of users and libraries, recorded by the profiler in every version of torch.

torch 2.15 calls a ``torch.library.custom_op`` without its dispatcher ("PyObject dispatch", pytorch#187949). torch's
profiler observes the dispatcher, so it would record only what the op calls: the op would have no row, and a FLOPs
formula that the user registered for it would not be used.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any, ClassVar


class CustomOps:
    """All custom ops of the process: between ``on`` and ``off`` they pass through the dispatcher, as in older torch.

    Such pairs may overlap: the last ``off`` restores the ops. Ops that are defined in between are not changed.
    """

    _on: ClassVar[weakref.WeakSet[CustomOps]] = weakref.WeakSet()  # one that is freed is no longer on
    _changed: ClassVar[list[Any]] = []

    def on(self) -> None:
        self._on.add(self)
        known: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        for definition in list(known.values()):
            op: Any = getattr(definition, "_opoverload", None)
            if getattr(op, "_pyobj_dispatcher", None) is not None and hasattr(op, "_enable_pyobj_dispatch"):
                op._enable_pyobj_dispatch(False)
                self._changed.append(op)

    def off(self) -> None:
        self._on.discard(self)
        while self._changed and not self._on:
            self._changed.pop()._enable_pyobj_dispatch(True)
