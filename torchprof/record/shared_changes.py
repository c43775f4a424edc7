"""Changes of the whole process that several recordings share, as functions of torch that are replaced meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar
from weakref import WeakSet


class SharedChange:
    """A change of the process, from ``on`` to ``off``. Several objects may be on at the same time: the first one makes
    the change, the last one undoes it. Both methods do nothing the second time.

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
        """Replace an attribute of a class or a Python module."""
        restore = replaced(owner, name, ours)
        self._undo.append(restore)


def replaced(owner: Any, name: str, ours: Any) -> Callable[[], None]:
    """Replace an attribute of a class or a Python module. Returns what restores it, unless other code has replaced it
    meanwhile."""
    before = getattr(owner, name)
    setattr(owner, name, ours)

    def restore() -> None:
        if getattr(owner, name) is ours:
            setattr(owner, name, before)

    return restore
