"""Custom ops of users and libraries, recorded by the profiler in every version of torch.

torch 2.15 calls a ``torch.library.custom_op`` without its dispatcher ("PyObject dispatch", pytorch#187949). torch's
profiler observes the dispatcher, so it would record only what the op calls: the op would have no row, and a FLOPs
formula that the user registered for it would not be used.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from torchprof.record.shared_changes import SharedChange


class CustomOps(SharedChange):
    """All custom ops of the process: between ``on`` and ``off`` they pass through the dispatcher, as in older torch.
    Ops that are defined in between are not changed."""

    def on(self) -> None:
        self._all_on.add(self)
        known: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        for definition in list(known.values()):
            op: Any = getattr(definition, "_opoverload", None)
            if getattr(op, "_pyobj_dispatcher", None) is not None and hasattr(op, "_enable_pyobj_dispatch"):
                op._enable_pyobj_dispatch(False)
                self._undo.append(partial(op._enable_pyobj_dispatch, True))
