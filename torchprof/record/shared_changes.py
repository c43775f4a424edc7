"""Changes of the whole process that several recordings share, as functions of torch that are replaced meanwhile."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar
from weakref import WeakSet

_MOST_RECURSION = 2**31 - 1  # a C int


class SharedChange:
    """A change of the process, from ``on`` to ``off``. Several objects may be on at the same time: the first one makes
    the change, the last one undoes it. Both methods may be called again.

    Each class has a change of its own: ``_make`` makes it, and adds what undoes it to ``_undo``. If that stays empty,
    the change could not be made yet, and the next ``on`` tries it again.
    """

    _all_on: ClassVar[WeakSet[Any]]  # one that is freed is no longer on
    _undo: ClassVar[list[Callable[[], object]]]

    def __init_subclass__(cls) -> None:
        cls._all_on, cls._undo = WeakSet(), []

    def on(self) -> None:
        self._all_on.add(self)
        if not self._undo:
            self._make()

    def off(self) -> None:
        self._all_on.discard(self)
        while self._undo and not self._all_on:
            self._undo.pop()()

    def _make(self) -> None:
        raise NotImplementedError

    def _put(self, owner: Any, name: str, ours: Any) -> None:
        self._undo.append(replaced(owner, name, ours))


def replaced(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Replace an attribute of a class or a module. Returns what restores it, unless others have replaced it."""
    before = getattr(owner, name)
    setattr(owner, name, ours)

    def restore() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return restore


class RecursionLimit(SharedChange):
    """Python's recursion limit while labels are attached. One of four frames of a nested call is ours, and calls that
    fitted into the limit before must still fit."""

    def _make(self) -> None:
        before = sys.getrecursionlimit()
        raised = min(2 * before, _MOST_RECURSION)

        def restore() -> None:
            if sys.getrecursionlimit() == raised:  # else other code has set it meanwhile
                sys.setrecursionlimit(before)

        self._undo.append(restore)
        sys.setrecursionlimit(raised)


class CustomOps(SharedChange):
    """All custom ops of the process pass through the dispatcher, as in older torch. Ops that are defined after ``on``
    are not changed.

    torch 2.15 calls a ``torch.library.custom_op`` without its dispatcher ("PyObject dispatch", pytorch#187949). torch's
    profiler observes the dispatcher, so it would record only what the op calls: the op would have no row, and a FLOPs
    formula that the user registered for it would not be used.
    """

    def on(self) -> None:
        self._all_on.add(self)
        known: Any = getattr(sys.modules.get("torch._library.custom_ops"), "OPDEFS", {})
        for definition in list(known.values()):
            op: Any = getattr(definition, "_opoverload", None)
            if getattr(op, "_pyobj_dispatcher", None) is not None and hasattr(op, "_enable_pyobj_dispatch"):
                op._enable_pyobj_dispatch(False)
                self._undo.append(partial(op._enable_pyobj_dispatch, True))
