"""Custom ops of users and libraries, recorded by the profiler in every version of torch.

torch 2.15 calls a ``torch.library.custom_op`` without its dispatcher ("PyObject dispatch", pytorch#187949). torch's
profiler observes the dispatcher, so it would record only what the op calls: the op would have no row, and a FLOPs
formula that the user registered for it would not be used.
"""

from __future__ import annotations

import sys
from typing import Any, ClassVar


class CustomOps:
    """All custom ops of the process: between ``on`` and ``off`` they pass through the dispatcher, as in older torch.

    Such pairs may overlap: the last ``off`` restores the ops. Ops that are defined in between are not changed.
    """

    _users: ClassVar[int] = 0
    _changed: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        self._is_on = False

    def on(self) -> None:
        if self._is_on:
            return
        self._is_on = True
        CustomOps._users += 1
        known: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        for definition in list(known.values()):
            op: Any = getattr(definition, "_opoverload", None)
            if getattr(op, "_pyobj_dispatcher", None) is not None and hasattr(op, "_enable_pyobj_dispatch"):
                op._enable_pyobj_dispatch(False)
                self._changed.append(op)

    def off(self) -> None:
        if not self._is_on:
            return
        self._is_on = False
        CustomOps._users -= 1
        while self._changed and not CustomOps._users:
            self._changed.pop()._enable_pyobj_dispatch(True)
