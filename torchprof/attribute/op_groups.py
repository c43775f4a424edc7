"""Groups: operators and memory events that follow each other inside one range, attributed all at once; and the order
in which the rule walks over the events of several threads, with facts that only later events contain.

A model runs the same operators in each call of a layer, and in each layer of a class. What follows from their names,
inputs and nesting is found once, as an ``OpTree``. Only places, times and bytes differ from group to group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf
from operator import le, sub
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import graph_of
from torchprof.attribute.events import ACCUMULATES, Attributed, Event, Kind, Place, Places
from torchprof.run.words import BACKWARD, MOST_NESTED, FrameKind, is_runtime_call

_OP = FrameKind.OP  # members of an enum are found slowly before Python 3.12


class OpPath(NamedTuple):
    """A chain of operators: the index of the chain around it, and its last operator."""

    outer: int
    name: str
    signature: int


class OpTree:
    """What equal groups share. For example, ``linear`` calls ``t``, and ``addmm``, which allocates memory::

        events    linear                paths     0: (around the group)
                    t                             1: linear in 0
                    addmm                         2: t in 1
                      [memory]                    3: addmm in 1
        parents   -1, 0, 0, 2           path_of   1, 2, 3, 3           is_call   1, 1, 1, 0

    - ``paths``: the distinct chains of operators. Path 0 is the range around the group. A memory event has the path of
      the operator around it, and so has an operator directly inside one of the same name: it is part of that call.
    - ``calls``: how often each path is called in one such group.
    - ``parents``, of each event: the index of the operator around it; -1 for the range around the group.
    - ``path_of``, of each event: the index of its path.
    - ``is_call``, of each event: 0 for memory, and for an operator that only continues a call, else 1.

    ``memory``: the indices of memory events. ``outermost``: of the operators that are in no other one. ``last_op``: of
    the last operator, -1 for none. ``functions``: of those without a namespace, perhaps autograd functions of the user.
    """

    __slots__ = ("calls", "functions", "is_call", "last_op", "memory", "outermost", "parents", "path_of", "paths")

    def __init__(self, events: Iterable[tuple[Kind, str, int, int]], around: str, room: int) -> None:
        """``events``: kind, name, signature and size of each. ``around``: the name of the range if it is an operator,
        else "". ``room``: how many operators inside one another have places of their own there."""
        self.paths = [OpPath(0, around, 0)]
        depths = [0]
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
            if not (is_memory or depths[outer] == room or name == self.paths[outer].name):
                new = OpPath(outer, name, signature)
                path = numbers.setdefault(new, len(self.paths))
                if path == len(self.paths):
                    self.paths.append(new)
                    depths.append(depths[outer] + 1)
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
        room = 0 if place.is_closed else max(MOST_NESTED - place.depth, 0)
        key = around, room, source, *columns.pattern(first, after)
        if (tree := self._known.get(key)) is None:
            tree = self._known[key] = OpTree(self._events(first, after, source), around, room)
        return tree

    def _events(self, first: int, after: int, source: int | None) -> Iterator[tuple[Kind, str, int, int]]:
        columns = self._columns
        for index in range(first, after):
            kind, name, _ = columns.kinds[columns.number[index]]
            signature = columns.signature[index] if columns.signature and kind is Kind.OP else 0
            if source is not None and self._called_from is not None:
                signature = self._called_from(signature, source)
            yield kind, name, signature, columns.size[index]


class OpGroup(NamedTuple):
    """The events of a thread from ``first`` up to ``first + len(ns)``. ``place``: that of the range ``outer`` around
    them, or outside. ``ns``: of each event its time, cut at the end of the range around it."""

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
            start, device = columns.start[number], columns.kinds[columns.number[number]].device
            address, size = addresses[number] if addresses else 0, nbytes[number] if nbytes else 0
            yield start, path_of[index], device, address, size

    def places(self) -> list[Place]:
        """The place of each path."""
        known = self.all_places.of_trees
        if (places := known.get((self.place, self.tree))) is None:
            places = known[self.place, self.tree] = [self.place]
            for outer, name, signature in self.tree.paths[1:]:
                places.append(self.all_places.inside(places[outer], _OP, name, signature))
        return places

    def outermost_items(self) -> Iterator[Attributed]:
        """The operators that are in no other one of the group, one by one, each with the time of all inside it."""
        tree, places = self.tree, self.places()
        around = None if self.outer is None else self.place
        for index in tree.outermost:
            event = self.columns.event(self.first + index, self.thread)
            place = places[tree.path_of[index]]
            yield Attributed(event, place, around, tree.is_call[index], self.ns[index], self.outer)

    def last_item(self) -> Attributed | None:
        """The last operator, inside those around it; ``outer`` if there is none."""
        chain, index = [], self.tree.last_op
        while index >= 0:
            chain.append(index)
            index = self.tree.parents[index]
        places, item = self.places(), self.outer
        for index in reversed(chain):
            event, place = self.columns.event(self.first + index, self.thread), places[self.tree.path_of[index]]
            around = None if item is None else item.place
            item = Attributed(event, place, around, self.tree.is_call[index], self.ns[index], item)
        return item

    def items(self) -> Iterator[Attributed]:
        tree, columns, thread = self.tree, self.columns, self.thread
        places = self.places()
        around = None if self.outer is None else self.place
        items: list[Attributed] = []
        rows = zip(count(self.first), tree.path_of, tree.is_call, self.ns, tree.parents)
        for index, path, is_call, ns, parent in rows:
            outer, taken_from = (items[parent], items[parent].place) if parent >= 0 else (self.outer, around)
            items.append(Attributed(columns.event(index, thread), places[path], taken_from, is_call, ns, outer))
            yield items[-1]


def times_within(parents: Sequence[int], starts: Sequence[int], ends: list[int], limit: int) -> list[int]:
    """The time of each event, cut at the end of the one around it, as clocks of different sources differ by a few ns.
    ``limit``: the end of the range around all."""
    around = [*ends, limit]
    if not all(map(le, ends, map(around.__getitem__, parents))):
        for index, parent in enumerate(parents):
            around[index] = min(around[index], around[parent])
        ends = around[:-1]
    return [*map(sub, ends, starts)]


# The walk over the events of several threads, in the order of time


@dataclass(slots=True, eq=False)
class ThreadWalk:
    """How far the walk has come on one thread. ``at``: the next event; ``after``: the end of its events.
    ``groupable``: see ``EventColumns.groupable``."""

    thread: int
    at: int
    after: int
    columns: EventColumns
    groupable: bytes
    _single: int = -1  # the next event that is in no group

    def end_of_group(self, limit: int, horizon: float) -> int:
        """The index after the group that begins with the next event; that of the event itself if it is in no group. A
        group ends before any event that is in no group, and before an operator that contains one; at ``limit``, where
        the range around it ends; and before an operator that ends after ``horizon``, when another thread continues."""
        index, columns = self.at, self.columns
        if self._single < index:
            end = self.groupable.find(0, index, self.after)
            self._single = end if end >= 0 else self.after
        single, sizes, starts, ends = self._single, columns.size, columns.start, columns.end
        if limit > self.after:
            limit = self.after
        until = index
        while until < single and until < limit and ends[until] <= horizon and starts[until] < horizon:
            beyond = until + sizes[until]
            if beyond > limit:
                beyond = limit
            if beyond > single:
                break
            until = beyond
        return until


def in_order_of_time(walks: Sequence[ThreadWalk], starts: Sequence[int]) -> Iterator[tuple[ThreadWalk, float]]:
    """The thread with the next event, and a time: all of its events before that come before those of other threads. Who
    reads this walks over them before the next is taken."""
    waiting = [(starts[walk.at], number) for number, walk in enumerate(walks)]
    heapify(waiting)
    while waiting:
        start, number = heappop(waiting)
        walk, horizon = walks[number], waiting[0][0] if waiting else inf
        yield walk, max(horizon, start + 1)
        if walk.at < walk.after:
            heappush(waiting, (starts[walk.at], number))


class LookAhead:
    """Completes three kinds of events by facts that only later events contain:

    - NODE: torch omits the sequence number from the engine's range around an autograd node if a hook of the user or of
      FSDP runs an op or a range before the node. The BACKWARD_FUNCTION inside has it, except for AccumulateGrad.
    - GUARDS get the name of the compiled region right after them, to which they belong.
    - GRAPH: all ops in one call of a compiled graph are matched with the kernels of the graph. ``kernels`` is the
      result: (thread, start, end) of an op → the key of the graph and the number of the kernel (None: unknown).
    """

    def __init__(self, columns: EventColumns, graphs: CompiledGraphs) -> None:
        self.kernels: dict[tuple[int, int, int], tuple[str, int | None]] = {}
        self._graphs = graphs
        self._columns = columns
        self._after = {lane.thread: lane.after for lane in columns.threads}

    def completed(self, event: Event, index: int) -> Event:
        """The event with this index, with what later ones say of it."""
        if event.kind is Kind.NODE:
            return event if event.name.endswith(ACCUMULATES) else self._with_number(event, index)
        if event.kind is Kind.GUARDS:
            return self._of_region(event, index)
        if not self._graphs.why_unknown(graph_of(event.name)):
            self._find_kernels(event, index)
        return event

    def _later(self, index: int, thread: int) -> Iterator[Event]:
        return (self._columns.event(later, thread) for later in range(index + 1, self._after[thread]))

    def _with_number(self, node: Event, index: int) -> Event:
        for inner in self._later(index, node.thread):
            if inner.start_ns >= node.end_ns:
                break
            if inner.kind is Kind.BACKWARD_FUNCTION and node.name.endswith(inner.name):
                return node._replace(sequence=inner.sequence, forward_thread=inner.forward_thread)
        return node

    def _of_region(self, guards: Event, index: int) -> Event:
        for later in self._later(index, guards.thread):
            if later.start_ns >= guards.end_ns and later.kind not in (Kind.MEMORY, Kind.SAMPLE, Kind.INTERRUPTION):
                return guards._replace(name=later.name) if later.kind is Kind.REGION else guards
        return guards

    def _find_kernels(self, call: Event, index: int) -> None:
        inside: list[Event] = []
        until = call.start_ns
        for event in self._later(index, call.thread):
            if event.start_ns >= call.end_ns:
                break
            if event.start_ns >= until and event.kind in (Kind.OP, Kind.INTERRUPTION):
                until = event.end_ns  # events inside this one are not calls of the graph
                if event.kind is Kind.OP:
                    inside.append(event)
        graph = graph_of(call.name)
        kernels = self._graphs.called(graph, [event.name for event in inside])
        has_all = self._graphs.has_all(graph, kernels)
        for event, kernel in zip(inside, kernels):
            # If all kernels are found, the other ops are no kernels, but copies of inputs.
            if kernel is not None or not has_all:
                self.kernels[event.thread, event.start_ns, event.end_ns] = graph, kernel
