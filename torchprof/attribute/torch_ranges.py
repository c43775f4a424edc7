"""Ranges of torch. Autograd's engine: where its calls begin and end if torch recorded only nodes, and the places of its
time; waits for other ranks that torch does not record; the places of torch.compile's ranges, and of its kernels."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from heapq import merge
from math import inf
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import Block, CompiledGraphs, KernelLayers
from torchprof.attribute.event_columns import EventColumns, Intervals
from torchprof.attribute.event_names import COMPILES_BACKWARD, OF_BACKWARD, REGION, graph_of, region_of
from torchprof.attribute.events import Attributed, CommonAncestor, Event, Kind, OpenRanges, Place, Places
from torchprof.run.words import (
    AUTOGRAD_ENGINE,
    BACKWARD,
    BETWEEN,
    COMPILING,
    FSDP_RANGE,
    GRAPH,
    GUARDS,
    NOT_ATTRIBUTABLE,
    OUTSIDE,
    RECOMPUTE,
    UNKNOWN_KERNEL,
    WAITS_FOR_AUTOGRAD,
    WAITS_FOR_RANKS,
    FrameKind,
)

_GRADIENT_SUMS = frozenset({"aten::add", "aten::add_"})
"""The engine adds gradients up with these operators, in old versions of torch between two nodes."""
_ENDS_A_PASS = frozenset({Kind.OP, Kind.LABEL, Kind.USER_LABEL, Kind.REGION, Kind.STEP, Kind.ENGINE})
"""The kinds of events that end a pass if they begin on a thread that waits for it, or on its thread between nodes."""
_OF_WRAPPERS = ("DistributedDataParallel.", "FullyShardedDataParallel.", FSDP_RANGE)
"""Prefixes of torch's own ranges of distributed wrappers."""


def add_engine_calls(columns: EventColumns) -> None:
    """Add an ENGINE event around the nodes of each backward pass, and WAIT events where its caller waits for them. For
    example, a pass called on thread 1::

        thread 1  |call..............................|   before
                  |call|wait................|........|   after
        thread 2       |node|  |node|  |node|            before
                       |engine..............|            after: added

    - Nodes on the thread that called the engine are inside the call, if that was recorded.
    - Other nodes with time between them get an ENGINE from the first of a pass to the end of its last, thread by
      thread. A pass ends where its thread, or a thread that made its nodes, does other work, and where a range ends
      that was open at its first node.
    - A thread that called the engine waits from the first node to the end of the last one if these are on other
      threads, but for what it runs meanwhile, such as nodes of parameters on the CPU. If the call was not recorded, its
      thread is the one that made the first node: the loss is computed where ``backward()`` is called. It does no other
      work meanwhile, since that ends the pass.
    """
    if not _has_nodes_outside_calls(columns):
        return
    added: list[Event] = []
    replaced: set[int] = set()
    places: dict[tuple[int, int], int] = {}
    for current in _passes(columns):
        waits = [*current.waits(columns)]
        added += [*waits, *current.engine_events(waits)]
        places.update(current.first_nodes)
        if current.call is not None and current.spans:
            replaced.add(current.call_index)
            places[current.call.thread, current.call.start_ns] = current.call_index
    columns.add(before=added, without=replaced, places=places)


def _has_nodes_outside_calls(columns: EventColumns) -> bool:
    """Whether there are nodes that are in no recorded call of the engine on their thread."""
    until: dict[int, int] = {}
    for index, thread in columns.of_kinds(Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.ENGINE):
        if until.get(thread, 0) <= columns.start[index]:
            if columns.kinds[columns.number[index]].kind is not Kind.ENGINE:
                return True
            until[thread] = columns.end[index]
    return False


def _passes(columns: EventColumns) -> Iterator[_Pass]:
    """The backward passes in the order of time: each from the engine's call, or its first node, to where it ends."""
    busy: dict[int, int] = {}  # by thread: the end of the last node that is in no other, or of the engine's call
    open_ends: defaultdict[int, list[float]] = defaultdict(lambda: [inf])  # by thread: the ends of the open ranges
    in_op: dict[int, int] = {}  # by thread: the end of its operators so far
    current: _Pass | None = None
    engine, node, backward = Kind.ENGINE, Kind.NODE, Kind.BACKWARD_FUNCTION
    kinds, numbers, starts, ends = columns.kinds, columns.number, columns.start, columns.end
    for _, index, thread in merge(*(_deciding(columns, *of_thread) for of_thread in columns.threads)):
        kind, name, _ = kinds[numbers[index]]
        start, end, ends_around = starts[index], ends[index], open_ends[thread]
        while ends_around[-1] <= start:
            ends_around.pop()
        if current is not None and current.is_ended_by(kind, name, start, thread, busy):
            yield current
            current = None
        if (kind is node or kind is backward or kind is engine) and busy.get(thread, 0) <= start:
            busy[thread] = end
            if current is None:
                current = _Pass(dict(in_op))
            current.add(columns.event(index, thread), index, ends_around[-1])
        if end > start:
            ends_around.append(end)
            if kind is Kind.OP and end > in_op.get(thread, 0):
                in_op[thread] = end
    if current is not None:
        yield current


def _deciding(columns: EventColumns, thread: int, first: int, after: int) -> Iterator[tuple[int, int, int]]:
    """Start, index and thread of the events of a thread, without those inside operators and nodes that have no other
    node or call of the engine inside: these cannot begin or end a pass."""
    are_nodes = bytes(kind.kind in (Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.ENGINE) for kind in columns.kinds)
    are_engines = bytes(kind.kind is Kind.ENGINE for kind in columns.kinds)
    is_plain = bytes(kind.kind is Kind.OP and kind.name not in _GRADIENT_SUMS for kind in columns.kinds)
    numbers, sizes = columns.number[first:after], columns.size[first:after]
    is_node, is_engine = bytes(map(are_nodes.__getitem__, numbers)), bytes(map(are_engines.__getitem__, numbers))
    index, count = 0, after - first
    while index < count:
        yield columns.start[first + index], first + index, thread
        number, end = numbers[index], index + sizes[index]
        if is_plain[number]:
            index = end if is_node.find(1, index + 1, end) < 0 else index + 1
        elif are_nodes[number] and not are_engines[number]:
            index = end if is_engine.find(1, index + 1, end) < 0 else index + 1
        else:
            index += 1


class _NodeSpan(NamedTuple):
    """From the start of the first node on a thread to the end of the last. ``in_nodes_ns``: the time of all nodes."""

    start_ns: int
    end_ns: int
    in_nodes_ns: int


class _Pass:
    """One backward pass.

    - ``in_op``: by thread, until when it is in an operator that began before the pass.
    - ``call``, ``call_index``: the engine's call, if that was recorded, and its index.
    - ``first_nodes``: by thread and start, the index of the first node of a thread.
    - ``spans``: of the nodes of each thread, but for nodes inside the call.
    """

    def __init__(self, in_op: Mapping[int, int]) -> None:
        self.in_op = in_op
        self.call: Event | None = None
        self.call_index = -1
        self.first_nodes: dict[tuple[int, int], int] = {}
        self.spans: dict[int, _NodeSpan] = {}
        self._caller: int | None = None  # the thread that made the first node
        self._ends_around: dict[int, float] = {}  # by thread: the end of the range around the first node
        self._forward_threads: set[int] = set()  # the threads whose forward made the nodes

    def add(self, event: Event, index: int, until: float) -> None:
        """Add a node, or the call of the engine, inside a range that ends at ``until``. ``index``: its index."""
        if event.kind is Kind.ENGINE:
            self.call, self.call_index = event, index
            return
        if event.thread not in self.spans:
            self.first_nodes[event.thread, event.start_ns] = index
        start, end, ns = self.spans.get(event.thread, (event.start_ns, event.end_ns, 0))
        self.spans[event.thread] = _NodeSpan(start, max(end, event.end_ns), ns + event.end_ns - event.start_ns)
        self._ends_around.setdefault(event.thread, until)
        if event.sequence >= 0:
            self._forward_threads.add(event.forward_thread)
            if self._caller is None:
                self._caller = event.forward_thread

    def is_ended_by(self, kind: Kind, name: str, start: int, thread: int, busy: dict[int, int]) -> bool:
        """Whether the pass is over when an event begins. ``busy``: see ``_passes``."""
        call = self.call
        if call is not None:  # it lasts until the call returns
            return thread == call.thread and start >= call.end_ns
        if kind is Kind.ENGINE or start >= self._ends_around.get(
            thread, inf
        ):  # another call, or what called this one ended
            return True
        if kind not in _ENDS_A_PASS or busy.get(thread, 0) > start:  # inside a node, or no work
            return False
        if thread in self.spans:  # between two nodes, only the engine works
            return not (kind is Kind.OP and name in _GRADIENT_SUMS)
        return thread in self._forward_threads  # such a thread waits for the pass

    def engine_events(self, waits: Iterable[Event]) -> list[Event]:
        """The ENGINE events around the nodes; with nodes on other threads, also the parts of the call around its
        ``waits``."""
        call, spans = self.call, self.spans
        name = "" if call is not None else "engine"
        events = [
            Event(Kind.ENGINE, name, span.start_ns, span.end_ns, thread)
            for thread, span in spans.items()
            if span.in_nodes_ns < span.end_ns - span.start_ns
        ]
        if call is not None and spans:
            for wait in waits:
                events.append(call._replace(end_ns=wait.start_ns))
                call = call._replace(name="", start_ns=wait.end_ns)
            if call.name or call.start_ns < call.end_ns:
                events.append(call)
        return events

    def waits(self, columns: EventColumns) -> Iterator[Event]:
        """The time in which the thread that called the engine ran nothing and other threads ran the nodes."""
        thread = self._caller if self.call is None else self.call.thread
        events_of = {events.thread: events for events in columns.threads}
        others = [span for of_thread, span in self.spans.items() if of_thread != thread]
        if thread not in events_of or not others:
            return
        began, last = min(span.start_ns for span in others), max(span.end_ns for span in others)
        free = max(began, self.in_op.get(thread, 0))
        if self.call is not None:
            began, free, last = self.call.start_ns, max(free, self.call.start_ns), min(last, self.call.end_ns)
        _, first, after = events_of[thread]
        for index in range(bisect_left(columns.start, began, first, after), after):
            start, end = columns.start[index], columns.end[index]
            if start >= last:
                break
            if index != self.call_index and max(free, start) < end:
                if free < start:
                    yield Event(Kind.WAIT, WAITS_FOR_AUTOGRAD, free, start, thread)
                free = end
        if free < last:
            yield Event(Kind.WAIT, WAITS_FOR_AUTOGRAD, free, last, thread)


def add_waits_for_exchanges(columns: EventColumns) -> None:
    """Add WAIT events where a thread runs nothing in a range of torch's distributed wrappers while an exchange with
    other ranks runs on another thread of the CPU. For example, while the buffers of a model are sent::

        thread 1  |DistributedDataParallel.forward  |op|  |    before
                  |        |wait.........|          |op|  |    after
        thread 2           |gloo:broadcast|                    before
    """
    is_wrapper = [kind.name.startswith(_OF_WRAPPERS) for kind in columns.kinds]
    places = columns.of_kinds(Kind.COLLECTIVE) if any(is_wrapper) else []
    exchanges = Intervals()
    for index, _ in places:
        exchanges.add(columns.start[index], columns.end[index])
    waits = []
    for thread, first, after in columns.threads if places else ():
        for index in range(first, after):
            if not is_wrapper[columns.number[index]]:
                continue
            free, inner, beyond = columns.start[index], index + 1, index + columns.size[index]
            while inner <= beyond:
                until = columns.start[inner] if inner < beyond else columns.end[index]
                pieces = exchanges.within(free, until) if free < until else ()
                waits += [Event(Kind.WAIT, WAITS_FOR_RANKS, start, end, thread) for start, end in pieces if start < end]
                if inner < beyond:
                    free = max(free, columns.end[inner])
                inner += columns.size[inner] if inner < beyond else 1
    columns.add(after=sorted(waits, key=lambda wait: wait.start_ns))


class NodeGaps:
    """The places of the engine's time: of its calls, and of the gaps between two nodes. A gap between two nodes of one
    layer is a part of this layer; one between nodes of two layers stays a part of the call, which has no layer."""

    def __init__(self, places: Places) -> None:
        self._places = places
        # By thread: the call of the engine; the end of the last event directly inside it; its layer if that was a node.
        self._last: dict[int, tuple[Attributed | None, int, int]] = {}

    def place_of_call(self, around: Place | None) -> Place:
        """The place of a call of the engine: backward of no layer. Inside a node it is a part of that node."""
        in_node = around is not None and around.node is not None
        outer = around if around is not None and in_node else self._places.of_layer(OUTSIDE, BACKWARD, around)
        place = self._places.inside(outer, FrameKind.OP, AUTOGRAD_ENGINE)
        place.is_engine = True
        return place

    def note_op(self, thread: int, engine: Attributed | None, end_ns: int) -> None:
        """An op ran directly inside a call of the engine, up to this time."""
        self._last[thread] = engine, end_ns, OUTSIDE

    def gap_before(self, event: Event, place: Place, call: Place, engine: Attributed | None) -> Attributed | None:
        """The engine's time between the last node and this event, if both are nodes of one layer and nothing ran in
        between. ``call`` and ``engine``: the call around the event."""
        last_call, since, layer = self._last.get(event.thread, (None, 0, OUTSIDE))
        layer_after = place.layer if place.is_node else OUTSIDE
        self._last[event.thread] = engine, event.end_ns, layer_after
        if engine is None or engine is not last_call or layer != layer_after or layer < 0 or event.start_ns <= since:
            return None
        place_around = self._places.of_layer(layer, BACKWARD, engine.around)
        place_of_gap = self._places.inside(place_around, FrameKind.OP, AUTOGRAD_ENGINE)
        gap = Event(Kind.ENGINE, "", since, event.start_ns, event.thread)
        return Attributed(gap, place_of_gap, call, 0, event.start_ns - since, engine)


# torch.compile

_MOST_NAMED = 3  # of the layers before and after a kernel


class CompiledRanges:
    """Finds these places in one walk over events. The first three methods record on which tensors compiled functions
    are called: they decide which module a kernel is of."""

    def __init__(self, places: Places, graphs: CompiledGraphs, common_ancestor: CommonAncestor) -> None:
        self._places = places
        self._common_ancestor = common_ancestor
        self._graphs = graphs
        self.has_inputs = False  # whether any COMPILED_INPUTS range has begun
        # COMPILED_INPUTS ranges, and backward nodes with the name of the range of their forward. In such a node may be
        # forwards that a checkpoint runs again.
        self._inputs: OpenRanges[Event] = OpenRanges()
        self._inputs_of_node: dict[tuple[int, int], str] = {}  # (forward thread, sequence number) → that name

    def enter_call(self, event: Event, end: int) -> None:
        """A COMPILED_INPUTS range begins. ``end``: its end, or that of the range around it if that is earlier."""
        self.has_inputs = True
        self._inputs.at(event.thread, event.start_ns).append(event._replace(end_ns=end))

    def note_op(self, thread: int, sequence: int, start: int) -> None:
        """An op with a sequence number. Inside a COMPILED_INPUTS range, its backward is a call on the same tensors."""
        if name := self._inputs_at(thread, start):
            self._inputs_of_node[thread, sequence] = name

    def enter_node(self, node: Event) -> None:
        """An autograd node begins. It may be the backward of a compiled function."""
        if name := self._inputs_of_node.get((node.forward_thread, node.sequence)):
            self._inputs.at(node.thread, node.start_ns).append(node._replace(name=name))

    def _inputs_at(self, thread: int, time: int) -> str:
        """The name of the COMPILED_INPUTS range around a time on a thread; "" if there is none."""
        ranges = self._inputs.at(thread, time)
        return ranges[-1].name if ranges else ""

    def place_of_range(self, kind: Kind, name: str, outer: Place) -> Place:
        """The place of a range of torch.compile. Such a range is always a call."""
        inside = self._places.inside
        if kind is Kind.COMPILING:
            if name == COMPILES_BACKWARD:
                outer = self._in_backward(outer)
            place = inside(outer, FrameKind.REGION, COMPILING)
            place.is_closed = True
            return place
        if kind is Kind.GRAPH:
            if self._graphs.is_asked and (reason := self._graphs.why_call_is_unknown(graph_of(name))):
                outer = inside(outer, FrameKind.KERNELS, f"{NOT_ATTRIBUTABLE}: {reason}")
            return inside(outer, FrameKind.OP, GRAPH)
        region = outer
        if name.startswith(REGION):
            if region_of(name).startswith(OF_BACKWARD):
                outer = self._in_backward(outer)
            region = inside(outer, FrameKind.REGION, region_of(name))
        return region if kind is Kind.REGION else inside(region, FrameKind.OP, GUARDS)

    def place_of_kernel(self, event: Event, around: Place, layer: int, graph: str, kernel: int | None) -> Place:
        """The place of a kernel of a compiled graph that runs in ``layer``. ``kernel``: its number, None if unknown."""
        layers: KernelLayers = UNKNOWN_KERNEL
        phase = around.phase
        if kernel is not None:
            layers = self._graphs.layers_of(graph, kernel, layer, self._inputs_at(event.thread, event.start_ns))
            phase = RECOMPUTE if phase == BACKWARD and self._graphs.kernel(graph, kernel).recomputes else phase
        outer, described = self._around_kernel(layers, phase, around, self._graphs.why_call_is_unknown(graph))
        if described:
            outer = self._places.inside(outer, FrameKind.KERNELS, described)
        return self._places.inside(outer, FrameKind.OP, event.name, event.signature)

    def _around_kernel(self, layers: KernelLayers, phase: str, around: Place, why_call: str) -> tuple[Place, str]:
        """The place around a kernel of these layers, and the name of the row of such kernels in it, "" for none.

        ``why_call``: why the call of the graph, ``around``, may be of layers. Then ``place_of_range`` has put the call
        into a row for this reason. Only kernels that are unknown for the same reason belong there, too::

            region
              not attributable: why_call
                (graph)                       the call, and kernels that are unknown for this reason
              (graph)                         all other kernels
        """
        if why_call and (layers, phase) == (why_call, around.phase):
            return around, ""
        if why_call and around.outer is not None and (region := around.outer.outer) is not None:
            around = self._places.inside(region, FrameKind.OP, GRAPH)
        if isinstance(layers, Block):
            names = self._common_ancestor.names(layers.neighbors, _MOST_NAMED, layers.layer)
            described = "" if layers.is_own else f"{BETWEEN}{names}"
            return self._for_layers((layers.layer,), phase, around), described
        if isinstance(layers, str):
            outer = around if phase == around.phase else self._places.of_layer(around.layer, phase, around)
            return outer, f"{NOT_ATTRIBUTABLE}: {layers}"
        described = f"fused: {self._common_ancestor.names(layers)}" if len(layers) > 1 else ""
        return self._for_layers(layers, phase, around), described

    def _for_layers(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of work for these layers. A negative layer is code outside all layers."""
        if min(layers) >= 0:
            return self._common_ancestor.place(layers, phase, around)
        if (layers, phase) == ((around.layer,), around.phase):
            return around
        return self._places.of_layer(OUTSIDE, phase, around, tuple(layer for layer in layers if layer >= 0))

    def _in_backward(self, around: Place) -> Place:
        """The place of backward work that compiled autograd runs, without an autograd node around it."""
        return around if around.phase == BACKWARD else self._places.of_layer(around.layer, BACKWARD, around)
