"""The events of a session as torch gives them, in the order of start, with some of their fields as columns.

To call a method of torch by ``map`` for all events takes less time than calling it in a loop.
"""

from __future__ import annotations

import operator
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from itertools import count, islice, repeat
from typing import Any

from torchprof.attribute.event_names import NODE_PREFIX
from torchprof.attribute.inner_ops import InnerOps, OpTree
from torchprof.record.torch_internals import needed

RawEvent = needed("torch._C._autograd._KinetoEvent")
BACKWARD_SCOPE, USER_SCOPE = 1, 7  # that of a function is 0
_name, _start_ns, _thread = RawEvent.name, RawEvent.start_ns, RawEvent.start_thread_id
_scope, _sequence = RawEvent.scope, RawEvent.sequence_nr
end_ns: Callable[[Any], int] = getattr(RawEvent, "end_ns", lambda raw: raw.start_ns() + raw.duration_ns())  # torch 2.4


class RawEvents:
    """``all``: the events. By index of an event: ``names_of``, the index of its name in ``names``; ``starts``, in ns;
    ``threads``."""

    def __init__(self, raws: Sequence[Any]) -> None:
        """``raws``: those of torch. They usually come sorted; of equal starts, the first one stays the first."""
        starts = array("q", map(_start_ns, raws))
        if not all(map(operator.le, starts, islice(starts, 1, None))):
            raws = sorted(raws, key=_start_ns)
            starts = array("q", sorted(starts))
        self.all = raws
        self.starts = starts
        self.threads = [*map(_thread, raws)]  # small numbers, of which Python has one object each
        numbers = _Numbers()
        self.names_of = array("l", map(numbers.__getitem__, map(_name, raws)))
        self.names = [*numbers]


class _Numbers(dict[str, int]):
    """Numbers for names, in the order of first use."""

    def __missing__(self, name: str) -> int:
        number = self[name] = len(self)
        return number


class InnerOpsOfRanges:
    """Finds the ops inside a range, if it contains nothing else."""

    def __init__(self, events: RawEvents, are_ops: Iterable[bool]) -> None:
        """``are_ops``: by name, whether events with this name and the scope of functions are ops of which nothing is to
        be known but their name and times."""
        self._events = events
        scopes = bytes(map(_scope, events.all))
        is_other = [not one for one in are_ops]
        of_function = scopes.translate(bytes([0] + [1] * 255))  # 0 for that of a function, else 1
        self._others = bytes(map(operator.or_, map(is_other.__getitem__, events.names_of), of_function))
        self._next_other = -1
        threads = events.threads
        # They refer to the sequence numbers of ops. The range around one is there even if a hook failed before it ran.
        self._has_nodes = BACKWARD_SCOPE in scopes or any(name.startswith(NODE_PREFIX) for name in events.names)
        self._is_one_thread = not threads or threads.count(threads[0]) == len(threads)
        self._trees: dict[tuple[int, bytes, tuple[int, ...]], OpTree] = {}

    def find(self, index: int, end: int, is_named: bool) -> tuple[InnerOps | None, int]:
        """The ops inside the range of an event, and the index of the last one; None if it contains none, or anything
        else. ``end``: of the range, in ns. ``is_named``: whether ops of the same name inside it are the same call."""
        events = self._events
        starts, first = events.starts, index + 1
        if first >= len(starts) or starts[first] >= end:
            return None, index
        if self._next_other < first:
            found = self._others.find(b"\x01", first)
            self._next_other = found if found >= 0 else len(starts)
        until = self._next_other
        if until < len(starts) and starts[until] < end:
            return None, index
        until = bisect_left(starts, end, first, until)
        size = until - first
        if not self._is_one_thread and events.threads[first:until].count(events.threads[index]) != size:
            return None, index
        raws = events.all[first:until]
        inner_starts, ends = starts[first:until].tolist(), [*map(end_ns, raws)]
        after = tuple(map(bisect_left, repeat(inner_starts), ends, count(1)))  # for each, the first one not inside it
        numbers = events.names_of[first:until]
        key = events.names_of[index] if is_named else -1, numbers.tobytes(), after
        tree = self._trees.get(key)
        if tree is None:
            names = [events.names[number] for number in numbers]
            tree = self._trees[key] = OpTree(events.names[key[0]] if is_named else "", names, after)
        if not all(map(operator.le, ends, tree.ends_of_parents([*ends, end]))):
            return None, index  # clocks differ
        sequences = [*map(_sequence, raws)] if self._has_nodes else []
        return InnerOps(tree, inner_starts, ends, sequences), until - 1
