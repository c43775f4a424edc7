"""Groups: operators and memory events that follow each other inside one range, attributed all at once.

A model runs the same operators in each call of a layer, and in each layer of a class. What follows from their names,
inputs and nesting is found once, as an ``OpTree``. Only places, times and bytes differ from group to group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import count
from operator import le, sub
from typing import Any, NamedTuple

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Kind
from torchprof.attribute.places import Attributed, Place, Places
from torchprof.run.words import BACKWARD, FrameKind, is_runtime_call

_OP = FrameKind.OP  # members of an enum are found slowly before Python 3.12


class OpPath(NamedTuple):
    """A chain of operators: the index of the chain around it, and its last operator."""

    outer: int
    name: str
    signature: int


class OpTree:
    """What equal groups share.

    - ``paths``: the distinct chains of operators. Path 0 is the range around the group. A memory event has the path of
      the operator around it, and so has an operator directly inside one of the same name: it is part of that call.
    - ``calls``: how often each path is called in one such group.

    And of each event, in the order of start:

    - ``parents``: the index of the operator around it; -1 for the range around the group.
    - ``path_of``: the index of its path.
    - ``is_call``: 0 for memory, and for an operator that only continues a call, else 1.

    ``memory``: the indices of memory events. ``outermost``: those of the operators that are in no other one.
    ``last_op``: that of the last operator, -1 if there is none. ``functions``: those that may be autograd functions of
    the user: their names have no namespace.
    """

    __slots__ = ("calls", "functions", "is_call", "last_op", "memory", "outermost", "parents", "path_of", "paths")

    def __init__(self, events: Iterable[tuple[Kind, str, int, int]], around: str, is_closed: bool) -> None:
        """``events``: their kinds, names, signatures, and how many begin before each one ends, itself included.
        ``around``: the name of the range if it is an operator, else "". ``is_closed``: whether all is a part of it."""
        self.paths = [OpPath(0, around, 0)]
        self.calls = [0]
        self.parents: list[int] = []
        self.path_of: list[int] = []
        self.is_call: list[int] = []
        self.memory: list[int] = []
        self.outermost: list[int] = []
        self.functions: list[int] = []
        self.last_op = parent = -1
        numbers: dict[OpPath, int] = {}
        ends: list[int] = []  # for each event the index of the first later one that is not inside it
        for index, (kind, name, signature, size) in enumerate(events):
            while parent >= 0 and ends[parent] <= index:
                parent = self.parents[parent]
            ends.append(index + size if parent < 0 else min(index + size, ends[parent]))
            outer = path = self.path_of[parent] if parent >= 0 else 0
            is_memory = kind is Kind.MEMORY
            if not (is_memory or is_closed or name == self.paths[outer].name):
                new = OpPath(outer, name, signature)
                path = numbers.setdefault(new, len(self.paths))
                if path == len(self.paths):
                    self.paths.append(new)
                    self.calls.append(0)
                self.calls[path] += 1
            self.parents.append(parent)
            self.path_of.append(path)
            self.is_call.append(int(path != outer))
            if is_memory:
                self.memory.append(index)
                continue
            if parent < 0:
                self.outermost.append(index)
            if kind is Kind.OP and "::" not in name and not is_runtime_call(name):
                self.functions.append(index)
            self.last_op = parent = index

    def self_ns(self, ns: Sequence[int]) -> list[int]:
        """The self time of each path, from the time of each event. That of path 0 is what the operators take from the
        range around them: it is not positive."""
        sums = [0] * len(self.paths)
        path_of = [*self.path_of, 0]
        for path, parent, taken in zip(self.path_of, self.parents, ns):
            sums[path] += taken
            sums[path_of[parent]] -= taken
        return sums


class OpTrees:
    """The trees of the groups of some events. ``called_from``: see ``Attribution``."""

    def __init__(self, columns: EventColumns, called_from: Callable[[int, int], int] | None) -> None:
        self._columns = columns
        self._called_from = called_from
        self._ops = {kind.name for kind in columns.kinds if kind.kind is Kind.OP}
        self._known: dict[tuple[Any, ...], OpTree] = {}  # by all that makes groups equal

    def of(self, first: int, after: int, place: Place) -> OpTree:
        """The tree of the events from ``first`` up to ``after``, which are inside a place."""
        columns, frame = self._columns, place.frame
        source = place.signature if self._called_from is not None and place.phase == BACKWARD else None
        around = frame.name if frame is not None and frame.kind == _OP and frame.name in self._ops else ""
        key = around, place.is_closed, source, *columns.pattern(first, after)
        tree = self._known.get(key)
        if tree is None:
            events = [self._event(index, source) for index in range(first, after)]
            tree = self._known[key] = OpTree(events, around, place.is_closed)
        return tree

    def _event(self, index: int, source: int | None) -> tuple[Kind, str, int, int]:
        columns = self._columns
        kind, name, _ = columns.kinds[columns.number[index]]
        signature = columns.signature[index] if columns.signature and kind is Kind.OP else 0
        if source is not None and self._called_from is not None:
            signature = self._called_from(signature, source)
        return kind, name, signature, columns.size[index]


class OpGroup(NamedTuple):
    """The events of a thread from ``first`` up to ``first + len(ns)``.

    ``place``: that of the range around them, or outside; ``outer``: this range, None if there is none. ``ns``: of each
    event its time, cut at the end of the range around it. ``all_places``: of the attribution.
    """

    tree: OpTree
    columns: EventColumns
    thread: int
    first: int
    ns: list[int]
    place: Place
    outer: Attributed | None
    all_places: Places

    @property
    def after(self) -> int:
        return self.first + len(self.ns)

    @property
    def start_ns(self) -> int:
        return self.columns.start[self.first]

    def outermost(self) -> Iterator[tuple[int, int]]:
        """Start and end of the operators that are in no other one of the group."""
        starts, first, ns = self.columns.start, self.first, self.ns
        return ((starts[first + index], starts[first + index] + ns[index]) for index in self.tree.outermost)

    def memory(self) -> Iterator[tuple[int, int, str, int, int]]:
        """Of each memory event its start, its path in the tree, device, address and bytes."""
        columns, path_of = self.columns, self.tree.path_of
        nbytes, addresses = columns.nbytes, columns.address
        for index in self.tree.memory:
            number = self.first + index
            device = columns.kinds[columns.number[number]].device
            yield (
                columns.start[number],
                path_of[index],
                device,
                addresses[number] if addresses else 0,
                nbytes[number] if nbytes else 0,
            )

    def places(self) -> list[Place]:
        """The place of each path."""
        return places_of(self.all_places, self.place, self.tree)

    def items(self) -> Iterator[Attributed]:
        """The events, one by one."""
        tree, columns, thread = self.tree, self.columns, self.thread
        places = self.places()
        around = None if self.outer is None else self.place
        items: list[Attributed] = []
        rows = zip(count(self.first), tree.path_of, tree.is_call, self.ns, tree.parents)
        for index, path, is_call, ns, parent in rows:
            outer, taken_from = (items[parent], items[parent].place) if parent >= 0 else (self.outer, around)
            items.append(Attributed(columns.event(index, thread), places[path], taken_from, is_call, ns, outer))
            yield items[-1]


def places_of(all_places: Places, around: Place, tree: OpTree) -> list[Place]:
    """The place of each path of a tree inside another place."""
    places = all_places.of_trees.get((around, tree))
    if places is None:
        places = all_places.of_trees[around, tree] = [around]
        for outer, name, signature in tree.paths[1:]:
            places.append(all_places.inside(places[outer], FrameKind.OP, name, signature))
    return places


def times_within(parents: Sequence[int], starts: Sequence[int], ends: list[int], limit: int) -> list[int]:
    """The time of each event, cut at the end of the one around it. ``limit``: the end of the range around all. Clocks
    of different sources differ by a few ns, and an end after the outer end would break the nesting."""
    around = [*ends, limit]
    if not all(map(le, ends, map(around.__getitem__, parents))):
        for index, parent in enumerate(parents):
            around[index] = min(around[index], around[parent])
        ends = around[:-1]
    return [*map(sub, ends, starts)]
