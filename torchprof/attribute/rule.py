"""The rule of ownership: which layer an event worked for, and in which phase.

``Attribution.attribute`` walks over the events and keeps the open ranges of each thread. Most ops are attributed in
groups, and the others by ``_op``. Each other kind of event has the method that a table at the end of this file names.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import compress

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import BEYOND, IN_NODE, EventColumns
from torchprof.attribute.event_names import WAITS, frame_of_interruption
from torchprof.attribute.events import (
    ACCUMULATES,
    HOOKS,
    PREFIX,
    Attributed,
    CommonAncestor,
    Event,
    Kind,
    NodeMakers,
    Place,
    Places,
    Site,
    nearest,
)
from torchprof.attribute.launches import CollectiveOwners, Launches
from torchprof.attribute.op_groups import LookAhead, OpGroup, OpTrees, ThreadWalk, in_order_of_time, times_within
from torchprof.attribute.torch_ranges import CompiledRanges, NodeGaps
from torchprof.run.collectives import C10D_OPS
from torchprof.run.words import BACKWARD, FORWARD, MOST_NESTED, NOT_SELECTED, OUTSIDE, RECOMPUTE, REPLAYS, FrameKind

_OP = FrameKind.OP  # members of an enum are found slowly before Python 3.12
_GRAPH_NODE = "DifferentiableGraphBackward"

_Open = tuple[int, "Place | None", "str | None", int, "Attributed | None", int]
"""A range that is open on a thread: its end; its place; the label of the innermost module around it; the layer of that
module, whether selected or not; the range itself; the index of the first event of the thread after it."""
_NOTHING_OPEN: _Open = (0, None, None, OUTSIDE, None, BEYOND)

_Opened = tuple[Place, int, "str | None", int]
"""A range that begins: its place; 1 if it is a call, else 0; label and layer as in ``_Open``."""


class Attribution:
    """One walk over the events of one session. After it, ``callers`` has the time of calls by pair (calling layer,
    called layer), where OUTSIDE is code outside all layers. ``labels``: the number of labelled ranges."""

    def __init__(
        self,
        sites: Mapping[str, Site],
        paths: Sequence[tuple[str, ...]],
        selected: Set[int] | None = None,
        called_from: Callable[[int, int], int] | None = None,
        collective_owners: CollectiveOwners | None = None,
        graphs: CompiledGraphs | None = None,
    ) -> None:
        """``sites``: by label. ``paths``: of the layers. ``selected``: the layers with rows of their own, None for all.
        Work of other layers is part of the selected layer around it, or of NOT_SELECTED if there is none.

        ``called_from(signature, source)``, if source lines were recorded: the number of a signature like the first,
        with the source lines of the second. The ops of backward get the lines of the op that created their node, not
        those of autograd's engine. ``graphs``: those that torch.compile made.
        """
        self.graphs = graphs or CompiledGraphs()
        self._called_from = called_from
        self.collective_owners = collective_owners or CollectiveOwners({}, paths, [])
        self.places = Places()
        self.callers: Counter[tuple[int, int]] = Counter()
        self.labels = 0
        self._sites = sites
        self._paths = paths
        self._selected = selected
        self._outside = self.places.of_layer(OUTSIDE, FORWARD)
        self._common_ancestor = CommonAncestor(self.places, paths, selected)
        self._compiled = CompiledRanges(self.places, self.graphs, self._common_ancestor)
        self._columns: EventColumns
        self._ahead: LookAhead
        self._ends: Sequence[int] = ()
        self._trees: OpTrees
        self._stacks: dict[int, list[_Open]] = {}  # by thread: the open ranges, outer to inner
        # Autograd nodes.
        self._makers: defaultdict[int, NodeMakers] = defaultdict(NodeMakers)  # by forward thread
        self._made_in: dict[tuple[int, int], int] = {}  # (forward thread, sequence number) → layer, selected or not
        self._gaps = NodeGaps(self.places)
        self._node_before: dict[tuple[int, int], Place | None] = {}  # (thread, depth) → the place of its last maker
        self._nearest_of: dict[tuple[str, int], int] = {}  # (label, calling layer) → its layer in this call
        self._launches = Launches(self.places, self._outside)
        self._extra: list[Attributed] = []  # a gap of autograd's engine before the current event

    def attribute(self, columns: EventColumns, ends: Sequence[int] = ()) -> Iterator[Attributed | OpGroup]:
        """Find the layer and phase of every event.

        - Forward work belongs to the innermost labelled range around it on its thread. A labelled range inside backward
          is recompute.
        - Backward work belongs to the layer of the op that created its autograd node, on any thread.
        - Time of autograd's engine between two nodes belongs to a layer only if both nodes do.
        - A kernel belongs to the op that launched it.
        - A garbage collection, or work of the profiler itself, belongs to no layer, with everything inside it: it can
          interrupt anything.
        - Work without a layer gets the layer OUTSIDE. No event is dropped.

        Events come in the order of their start, outer ones before inner ones, and kernels after all others. Ops of
        which nothing else is to be known come as groups, if no other thread works meanwhile, and none of ``ends`` is
        in between: where passes of a loop end, in ns.
        """
        self._columns = columns
        self._ahead = LookAhead(columns, self.graphs)
        self._trees = OpTrees(columns, self._called_from)
        self._made_by = columns.makes_nodes()
        self._ends = ends if len(columns.threads) > 1 else ()  # on one thread, groups end there, too
        groupable = columns.groupable()
        walks = [ThreadWalk(*events, columns, groupable) for events in columns.threads]
        for walk, horizon in in_order_of_time(walks, columns.start):
            yield from self._walk(walk, horizon, groupable)
        for kernel in columns.kernels:
            yield self._launches.kernel(kernel)

    def _walk(self, walk: ThreadWalk, horizon: float, groupable: bytes) -> Iterator[Attributed | OpGroup]:
        """The events of one thread that begin before ``horizon``."""
        starts, thread, extra = self._columns.start, walk.thread, self._extra
        stack = self._stacks.setdefault(thread, [])
        while walk.at < walk.after and (start := starts[walk.at]) < horizon:
            index = walk.at
            while stack and stack[-1][0] <= start:
                stack.pop()
            open_range = stack[-1] if stack else _NOTHING_OPEN
            end = horizon
            if self._ends and (number := bisect_right(self._ends, start)) < len(self._ends):
                end = min(horizon, self._ends[number])
            until = walk.end_of_group(open_range[5], end)
            if until > index and (groupable[index] != IN_NODE or (open_range[1] or self._outside).is_node):
                walk.at = until
                yield self._group(index, until, thread, open_range)
                continue
            walk.at = index + 1
            attributed = self._single(index, thread, stack, open_range)
            if extra:
                yield from extra
                extra.clear()
            if attributed is not None:
                yield attributed

    def _group(self, first: int, after: int, thread: int, open_range: _Open) -> OpGroup:
        """The events from ``first`` up to ``after``, and all that is inside them."""
        columns = self._columns
        end, around, _, layer, outer_range, _ = open_range
        place = around or self._outside
        tree = self._trees.of(first, after, place)
        starts, ends = columns.start[first:after].tolist(), columns.end[first:after].tolist()
        ns = times_within(tree.parents, starts, ends, end or BEYOND)
        group = tuple.__new__(OpGroup, (tree, columns, thread, first, ns, place, outer_range, self.places))
        if place.is_engine and tree.outermost:
            self._gaps.note_op(thread, outer_range, ends[tree.outermost[-1]])
        if self._made_by.find(1, first, after) >= 0 and not place.is_closed:
            self._note_made(group, layer)
        if columns.correlation:
            self._launches.note_group(group, columns.correlation[first:after], end)
        return group

    def _note_made(self, group: OpGroup, layer: int) -> None:
        """Note which autograd nodes the ops of a group created. ``layer``: of the innermost module around them."""
        first, after = group.first, group.after
        makers, sequences = self._makers[group.thread], self._columns.sequence
        assert sequences is not None
        numbers = [*compress(sequences[first:after], self._made_by[first:after])]
        made = dict.fromkeys(numbers, group.place)  # all ops of a group have the same layer
        if self._called_from is not None:
            places = group.places()
            made = dict(zip(numbers, map(places.__getitem__, compress(group.tree.path_of, self._made_by[first:after]))))
        for number in sorted(made):
            makers.add(number, made[number])
        if self._selected is not None:
            self._made_in.update(((group.thread, number), layer) for number in numbers)

    def _single(self, index: int, thread: int, stack: list[_Open], open_range: _Open) -> Attributed | None:
        """An event that is in no group; None if it is left out. What comes before it is in ``_extra``."""
        limit, around, label, layer, outer_range, limit_at = open_range
        event = self._columns.event(index, thread)
        kind, _, start, end, _, sequence, *_ = event
        if kind in _NEEDS_LATER_EVENTS and (kind is not Kind.NODE or sequence < 0):
            event = self._ahead.completed(event, index)
        if stack and end > limit:  # clocks of different sources differ by a few ns
            end = limit
        if kind is Kind.OP:
            place, calls = self._op(event, open_range)
            if event.sequence >= 0 and not place.is_closed:
                self._makers[thread].add(event.sequence, place)
                if self._selected is not None:
                    self._made_in[thread, event.sequence] = layer
                if self._compiled.has_inputs:
                    self._compiled.note_op(thread, event.sequence, start)
        elif kind is Kind.MEMORY or kind is Kind.STOPPED or kind is Kind.STEP:
            return Attributed(event, around or self._outside, around, 0, 0, outer_range)
        elif kind in _INSTANTS:
            return _INSTANTS[kind](self, event, end, open_range)
        elif around is not None and around.is_closed and kind is not Kind.INTERRUPTION:
            place, calls = around, 0
        else:
            place, calls, label, layer = _RANGES[kind](self, event, open_range)
        if place is around and place.depth >= MOST_NESTED and kind is not Kind.LABEL:
            calls = 0
        if around is not None and around.is_engine:
            gap = self._gaps.gap_before(event, place, around, outer_range)
            if gap is not None:
                self._extra.append(gap)
        attributed = tuple.__new__(Attributed, (event, place, around, calls, end - start, outer_range))
        until = index + self._columns.size[index]
        stack.append((end, place, label, layer, attributed, until if until < limit_at else limit_at))
        if event.correlation:
            self._launches.note_op(event.correlation, thread, place, around, limit)
        return attributed

    # Ops

    def _op(self, event: Event, open_range: _Open) -> tuple[Place, int]:
        """The place of an op, and 1 if it is a call: inside an op of the same name it is part of that call."""
        thread, name, signature = event.thread, event.name, event.signature
        around, layer = open_range[1], open_range[3]
        outer = around or self._outside
        is_request = name.startswith(C10D_OPS)
        if is_request and around is not None:
            outer = self._requester(thread, around, name, signature)
        kernels, frame, calls = self._ahead.kernels, outer.frame, 1
        if kernels and not outer.is_closed and (thread, event.start_ns, event.end_ns) in kernels:
            graph, number = kernels.pop((thread, event.start_ns, event.end_ns))
            place = self._compiled.place_of_kernel(event, outer, layer, graph, number)
        elif outer.is_closed or (frame is not None and frame.name == name and frame.kind == _OP):
            place, calls = outer, 0
        else:
            if self._called_from is not None and outer.phase == BACKWARD:
                signature = self._called_from(signature, outer.signature)
            place = self.places.inside(outer, _OP, name, signature)
        if name in REPLAYS and not outer.is_closed:
            self._launches.note_replay(outer, place)
        if is_request:
            self.collective_owners.note_request(event, place)
        return place, calls

    # Events that open no range

    def _sample(self, event: Event, end: int, open_range: _Open) -> Attributed | None:
        """A sampled line of Python: between ops, or inside the outermost other range under the same labels."""
        around = self.places.of_lines(open_range[1] or self._outside)
        place = self.places.inside(around, FrameKind.PYTHON, event.name)
        return Attributed(event, place, open_range[1], 1, 0, open_range[4])

    def _begin_call(self, event: Event, end: int, open_range: _Open) -> None:
        """A compiled function is called. The range may be inside its op, whose sequence number its backward has."""
        self._compiled.enter_call(event, end)
        outer_range = open_range[4]
        if outer_range is not None and outer_range.event.sequence >= 0:
            self._compiled.note_op(event.thread, outer_range.event.sequence, event.start_ns)

    def _begin_collective(self, event: Event, end: int, open_range: _Open) -> Attributed:
        """A collective belongs to the op that requested it: the op around it, or an op on another thread."""
        _, around, _, _, outer_range, _ = open_range
        if around is not None:
            self.collective_owners.note_started_inside(around)
        requester = around or self.collective_owners.requester(event)
        signature = self.collective_owners.signature_of(event)
        place = self.places.inside(requester or self._outside, FrameKind.COLLECTIVE, event.name, signature)
        self._launches.note_collective(event, place, around, outer_range)
        return Attributed(event, place, None, 1, 0, outer_range)

    # Ranges

    def _interruption(self, event: Event, open_range: _Open) -> _Opened:
        """It belongs to no layer, with everything inside it."""
        return self.places.inside(self._outside, *frame_of_interruption(event.name)), 1, None, OUTSIDE

    def _wait(self, event: Event, open_range: _Open) -> _Opened:
        """It belongs where the thread waits; inside an operator, or another wait, it is part of that."""
        _, around, label, layer, _, _ = open_range
        outer = around or self._outside
        if outer.kind in (FrameKind.OP, FrameKind.WAIT):
            return outer, 0, label, layer
        return self.places.inside(outer, FrameKind.WAIT, event.name.removeprefix(WAITS)), 1, label, layer

    def _compiled_range(self, event: Event, open_range: _Open) -> _Opened:
        _, around, label, layer, _, _ = open_range
        return self._compiled.place_of_range(event.kind, event.name, around or self._outside), 1, label, layer

    def _label(self, event: Event, open_range: _Open) -> _Opened:
        """One of our labels: around a forward, around hooks, or of another active profile."""
        _, around, label, layer, _, _ = open_range
        name = event.name
        if name in self._sites:
            place, calls, layer = self._of_label(event, around, label, layer)
            if place.phase == FORWARD:
                self.collective_owners.forget_gradients()
            return place, calls, name, layer
        if name.startswith(HOOKS):
            return self._of_hooks(name, around, layer), 0, label, layer
        return self._range(event, open_range)

    def _of_label(
        self, event: Event, around: Place | None, label_around: str | None, caller: int
    ) -> tuple[Place, int, int]:
        """The forward range of a module: its place; 1 if it is a call, else 0; and its layer. Inside backward work it
        is recompute. Directly inside its wrapper's range, it is part of that call."""
        self.labels += 1
        label = event.name
        layers, wrapper = self._sites[label]
        if (label, caller) not in self._nearest_of:
            self._nearest_of[label, caller] = nearest(self._paths, layers, caller)
        layer = self._nearest_of[label, caller]
        phase = FORWARD if around is None or around.phase == FORWARD else RECOMPUTE
        if self._selected is not None and layer not in self._selected:
            if around is not None and around.layer >= 0:
                return around, 0, layer
            return self.places.of_layer(NOT_SELECTED, phase, around), 1, layer
        place = self.places.of_layer(layer, phase, around)
        if wrapper is not None and wrapper == label_around:
            return place, 0, layer
        if phase == FORWARD:
            self.callers[around.layer if around is not None else OUTSIDE, layer] += event.end_ns - event.start_ns
        return place, 1, layer

    def _of_hooks(self, name: str, around: Place | None, caller: int) -> Place:
        """Hooks that exchange data for a module run outside its forward, but belong to it."""
        outer = around or self._outside
        site = self._sites.get(PREFIX + name.removeprefix(HOOKS))
        layer = NOT_SELECTED if site is None else nearest(self._paths, site.layers, caller)
        if layer == NOT_SELECTED or (self._selected is not None and layer not in self._selected):
            return outer
        return self.places.of_layer(layer, RECOMPUTE if outer.phase == BACKWARD else outer.phase, around)

    def _engine(self, event: Event, open_range: _Open) -> _Opened:
        _, around, label, layer, _, _ = open_range
        return self._gaps.place_of_call(around), int(bool(event.name)), label, layer

    def _node(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node with the engine's work around it: backward of the layer of the op that created the node."""
        _, around, label, _, outer_range, _ = open_range
        if around is not None and around.is_engine and outer_range is not None:
            around = outer_range.around
        thread, sequence, forward_thread = event.thread, event.sequence, event.forward_thread
        level = (thread, len(self._stacks[thread]))
        if sequence >= 0:
            of_graph = event.name.endswith(_GRAPH_NODE)
            maker = self._makers[forward_thread].find(sequence, of_graph)
        else:
            # AccumulateGrad has no sequence number: the engine runs it right after the node that made its gradient.
            # A node that is not run has none either: autograd.grad returns the gradient that would go into it.
            maker = self._node_before.get(level)
        self._node_before[level] = maker
        if self._compiled.has_inputs:
            self._compiled.enter_node(event)
        layer = OUTSIDE if maker is None else maker.layer
        signature = 0 if maker is None or self._called_from is None else self._called_from(0, maker.signature)
        outer = self.places.of_layer(layer, BACKWARD, around)
        for frame in () if maker is None else maker.frames:
            if frame.kind == FrameKind.REGION:
                outer = self.places.inside(outer, FrameKind.REGION, frame.name)
        place = self.places.inside(outer, FrameKind.OP, event.name, signature)
        place.is_node = True
        if event.name.endswith(ACCUMULATES):
            self.collective_owners.note_gradient(thread, layer)
        return place, 1, label, self._made_in.get((forward_thread, sequence), layer)

    def _backward_function(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node itself: it is inside the engine's range around it, if that was recorded."""
        _, around, label, layer, _, _ = open_range
        if around is None or not around.is_node:
            return self._node(event, open_range)
        signature = around.signature if self._called_from is not None else 0
        if event.name.endswith(ACCUMULATES):
            self.collective_owners.note_gradient_size(event.thread, event.signature)
        return self.places.inside(around, FrameKind.OP, event.name, signature), 1, label, layer

    def _range(self, event: Event, open_range: _Open) -> _Opened:
        """A range of the user or of torch belongs to the place around it; one of FSDP to the layers that its name
        contains: in hooks, FSDP gathers the parameters of layers that run next, and reduces the gradients of others."""
        _, around, label, layer, _, _ = open_range
        name, outer = event.name, around or self._outside
        if (layers := self.collective_owners.layers_of_range(name, outer.layer)) is None:
            return self.places.inside(outer, FrameKind.LABEL, name, event.signature), 1, label, layer
        phase = outer.phase
        if "backward" in name:
            phase = BACKWARD
        elif phase == BACKWARD and name.startswith(("FSDP::pre_forward", "FSDP::post_forward")):
            phase = RECOMPUTE
        if layers:
            outer = self._common_ancestor.place(layers, phase, outer)
        # a range of torch is an op, not a label of the user
        return self.places.inside(outer, FrameKind.OP, name, event.signature), 1, label, layer

    def _requester(self, thread: int, around: Place, op: str, signature: int) -> Place:
        """The place in which an op requests a collective: usually that around it. If DistributedDataParallel requests
        it when the last gradient of a bucket is ready, it belongs to all layers with gradients in the bucket."""
        node = around.node
        if node is None or not node.name.endswith(ACCUMULATES):
            return around
        layers = self.collective_owners.layers_of_bucket(thread, op, signature)
        return self._common_ancestor.place(layers, BACKWARD, around) if layers else around


_NEEDS_LATER_EVENTS = frozenset({Kind.NODE, Kind.GUARDS, Kind.GRAPH})
"""See ``LookAhead``."""
_INSTANTS: Mapping[Kind, Callable[[Attribution, Event, int, _Open], Attributed | None]] = {
    Kind.SAMPLE: Attribution._sample,
    Kind.COLLECTIVE: Attribution._begin_collective,
    Kind.COMPILED_INPUTS: Attribution._begin_call,
    Kind.PIPELINE: lambda *_: None,  # read in ``pipeline_ranges``; here they would only split rows
}
"""The methods for events that open no range."""
_RANGES: Mapping[Kind, Callable[[Attribution, Event, _Open], _Opened]] = {
    Kind.LABEL: Attribution._label,
    Kind.ENGINE: Attribution._engine,
    Kind.NODE: Attribution._node,
    Kind.BACKWARD_FUNCTION: Attribution._backward_function,
    Kind.INTERRUPTION: Attribution._interruption,
    Kind.WAIT: Attribution._wait,
    **dict.fromkeys((Kind.GUARDS, Kind.REGION, Kind.GRAPH, Kind.COMPILING), Attribution._compiled_range),
    Kind.USER_LABEL: Attribution._range,
}
"""The methods for events that open a range, but for ops."""
