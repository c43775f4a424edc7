"""The rule of ownership: which layer an event worked for, and in which phase.

``Attribution.attribute`` walks over the events and keeps the open ranges of each thread. Each kind of event has its own
method: ``_op``, and those in the tables at the end of this file.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from torchprof.attribute.collectives import ACCUMULATES, RECORDS_COLLECTIVE, CollectiveOwners
from torchprof.attribute.common_ancestor import CommonAncestor
from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.compiled_ranges import CompiledRanges, WeightedPlaces, divide, regions_around
from torchprof.attribute.engine_calls import NodeGaps
from torchprof.attribute.events import HOOKS, PREFIX, Event, Kind, Site
from torchprof.attribute.lookahead import LookAhead
from torchprof.attribute.node_makers import NodeMakers
from torchprof.attribute.places import Attributed, Place, Places
from torchprof.run.collectives import C10D_OPS
from torchprof.run.words import (
    BACKWARD,
    BEFORE,
    FORWARD,
    GARBAGE_COLLECTION,
    LAUNCH_NOT_RECORDED,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    OUTSIDE,
    RECOMPUTE,
    REPLAY,
    REPLAYS,
)

_GRAPH_NODE = "DifferentiableGraphBackward"

_Open = tuple[int, "Place | None", "str | None", int, "Attributed | None"]
"""A range that is open on a thread: its end; its place; the label of the innermost module around it; the layer of that
module, whether selected or not; the range itself."""
_NOTHING_OPEN: _Open = (0, None, None, OUTSIDE, None)

_Opened = tuple[Place, int, "str | None", int]
"""A range that begins: its place; 1 if it is a call, else 0; label and layer as in ``_Open``."""


def _records_collective(place: Place) -> bool:
    return place.frame is not None and place.frame.name == RECORDS_COLLECTIVE


class Attribution:
    """One walk over the events of one session, in the order of their start.

    After the walk, ``callers`` has the time of calls by pair (calling layer, called layer) (OUTSIDE: code outside all
    layers), ``labels`` is the number of labelled ranges, and ``places`` has all places.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        paths: Sequence[tuple[str, ...]],
        selected: Set[int] | None = None,
        called_from: Callable[[int, int], int] | None = None,
        collective_owners: CollectiveOwners | None = None,
        graphs: CompiledGraphs | None = None,
    ) -> None:
        """``sites``: by label. ``paths``: of the layers; for a module with several paths, they decide which path a call
        belongs to. ``selected``: the layers with rows of their own, None for all. Work of other layers is part of the
        selected layer around it, or of NOT_SELECTED if there is none.

        ``called_from(signature, source)``, if source lines were recorded: the number of a signature like the first,
        with the source lines of the second. The ops of backward get the lines of the op that created their node, not
        those of autograd's engine. ``collective_owners``: finds the owners of the session's collectives. ``graphs``:
        the graphs that torch.compile made.
        """
        self.graphs = graphs or CompiledGraphs()
        self._called_from = called_from
        self.collective_owners = collective_owners or CollectiveOwners({}, paths, ())
        self.places = Places()
        self.callers: Counter[tuple[int, int]] = Counter()
        self.labels = 0
        self._sites = sites
        self._paths = paths
        self._selected = selected
        self._outside = self.places.of_layer(OUTSIDE, FORWARD)
        self._common_ancestor = CommonAncestor(self.places, paths, selected)
        self._compiled = CompiledRanges(self.places, self.graphs, self._common_ancestor)
        self._compiled_kernels: dict[tuple[int, int, int], tuple[str, int | None]] = {}  # see LookAhead.kernels
        self._stacks: dict[int, list[_Open]] = {}  # by thread: the open ranges, outer to inner
        # Autograd nodes.
        self._makers: defaultdict[int, NodeMakers] = defaultdict(NodeMakers)  # by forward thread
        self._made_in: dict[tuple[int, int], int] = {}  # (forward thread, sequence number) → layer, selected or not
        self._gaps = NodeGaps(self.places)
        self._node_before: dict[tuple[int, int], Place | None] = {}  # (thread, depth) → the place of its last maker
        self._nearest_of: dict[tuple[str, int], int] = {}  # (label, calling layer) → its layer in this call
        self._launched_by: dict[int, Place] = {}  # by correlation ID: the place of the device work
        self._divided: dict[int, WeightedPlaces] = {}  # by correlation ID: of the ops that are divided among places
        self._shares: dict[Place, WeightedPlaces] = {}  # by the last of these places
        self._replayed: dict[Place, Place] = {}  # the launching place → the place of the CUDA graph's kernels
        self._collectives: dict[int, tuple[int, Place]] = {}  # by thread: end of the last collective's op, its place
        self._pieces: list[Attributed] = []  # of the current op: all pieces but the last

    def attribute(self, events: Iterable[Event]) -> Iterator[Attributed]:
        """Find the layer and phase of every event.

        - Forward work belongs to the innermost labelled range around it on its thread. A labelled range inside backward
          is recompute.
        - Backward work belongs to the layer of the op that created its autograd node, on any thread.
        - Time of autograd's engine between two nodes belongs to a layer only if both nodes do.
        - A kernel belongs to the op that launched it.
        - A garbage collection belongs to no layer, with everything inside it: it can interrupt anything.
        - Work without a layer gets the layer OUTSIDE. No event is dropped.

        Events must come in the order of their start, outer ones before inner ones, and kernels after all others.

        This function is long because the loop runs for each of perhaps a million events, and a call would take longer
        than the work in it. So the loop does what nearly every event needs, and methods do the rest.
        """
        new = tuple.__new__  # takes a third of the time of Attributed(...)
        op, kernel, marks = Kind.OP, Kind.KERNEL, (Kind.MEMORY, Kind.STOPPED, Kind.STEP)
        outside, inside, stacks, pieces = self._outside, self.places.inside, self._stacks, self._pieces
        launched_by, replayed, shares, divided = self._launched_by, self._replayed, self._shares, self._divided
        collectives, compiled, makers, selected = self._collectives, self._compiled, self._makers, self._selected
        called_from = self._called_from
        look_ahead = LookAhead(self.graphs)
        compiled_kernels = self._compiled_kernels = look_ahead.kernels

        for event in look_ahead.pass_on(events):
            kind, name, start, end, thread, sequence, _, correlation, _, _, signature, inside_it = event
            if kind is kernel:
                launcher = launched_by.get(correlation)
                if launcher is None:
                    launcher = self._unknown_launcher(correlation)
                if correlation in divided:
                    yield from self._divided_kernel(event)
                    continue
                launcher = replayed.get(launcher, launcher)
                yield new(Attributed, (event, inside(launcher, "kernel", name, signature), None, 1, end - start, None))
                continue

            stack = stacks.get(thread)
            if stack is None:
                stack = stacks[thread] = []
            while stack and stack[-1][0] <= start:
                stack.pop()
            open_range = _NOTHING_OPEN
            if stack:
                open_range = stack[-1]
                # Clocks of different sources differ by a few ns. An end after the outer end would break the nesting.
                if end > open_range[0]:
                    end = open_range[0]
            _, around, label, layer, outer_range = open_range

            if kind is op:
                # The same as in _op, for an op with a known place, as nearly all have. A call would double the time.
                outer = around or outside
                is_usual = not compiled_kernels and (called_from is None or outer.phase != BACKWARD)
                known = outer._inner if is_usual else None
                found = known.get((name, signature) if signature else name) if known else None
                if found is not None and not name.startswith(C10D_OPS):
                    place, calls = found, 1
                else:
                    place, calls = self._op(event, end, open_range)
                    if pieces:  # the op is divided: this event becomes its last piece
                        yield from pieces
                        start = pieces[-1].event.end_ns
                        event = event._replace(start_ns=start)
                        pieces.clear()
                if sequence >= 0 and not place.is_closed:
                    makers[thread].add(sequence, place)
                    if selected is not None:
                        self._made_in[thread, sequence] = layer
                    if compiled.has_inputs:
                        compiled.note_op(thread, sequence, start)
            elif kind in marks:
                yield new(Attributed, (event, around or outside, around, 0, 0, outer_range))
                continue
            elif kind in _INSTANTS:
                instant = _INSTANTS[kind](self, event, end, open_range)
                if instant is not None:
                    yield instant
                continue
            elif around is not None and around.is_closed and kind is not Kind.GARBAGE:
                place, calls = around, 0
            else:
                place, calls, label, layer = _RANGES[kind](self, event, open_range)

            if inside_it is not None:
                if self._is_usual(place, kind) and end == event[3]:
                    for number in inside_it.sequences:
                        if number >= 0:
                            makers[thread].add(number, place)
                            if selected is not None:
                                self._made_in[thread, number] = layer
                else:
                    event = look_ahead.open_up(event)
            if around is not None and around.is_engine:
                yield from self._gaps.before(event, place, around, outer_range)
            attributed = new(Attributed, (event, place, around, calls, end - start, outer_range))
            stack.append((end, place, label, layer, attributed))
            if correlation:
                launcher = place if correlation > 0 or around is None else around
                if launcher is around and thread in collectives:
                    launcher = self._launcher(launcher, thread, open_range[0])
                launched_by[correlation] = launcher
                if shares and place in shares:
                    divided[correlation] = shares[place]
            yield attributed

    def _is_usual(self, place: Place, kind: Kind) -> bool:
        """Whether the ops inside a range of this place need no events of their own: each belongs to the same layer and
        phase, and nothing else is to be known of it. Outside of layers, steps need to know each op."""
        is_in_op = kind is Kind.LABEL and place.frame is not None  # it may be an op of the same name
        is_compiled = self._compiled_kernels or self._compiled.has_inputs
        needs_each = place.layer < 0 or place.is_closed or is_in_op or is_compiled or self._called_from is not None
        return not needs_each

    # Ops

    def _op(self, event: Event, end: int, open_range: _Open) -> tuple[Place, int]:
        """The place of an op, and 1 if it is a call, else 0: inside an op of the same name it is part of that call.

        A compiled kernel that is divided among layers gets the last of their places. The others are in ``_pieces``.
        """
        _, name, start, full_end, thread, _, _, _, _, _, signature, _ = event
        around = open_range[1]
        outer = around or self._outside
        asks = name.startswith(C10D_OPS)
        if asks and around is not None:
            outer = self._requester(thread, around, name, signature)
        frame = outer.frame
        calls = 1
        if outer.is_closed or (frame is not None and frame.name == name and frame.kind == "op"):
            place, calls = outer, 0
        elif self._compiled_kernels and (thread, start, full_end) in self._compiled_kernels:
            place = self._compiled_kernel(event, end, open_range, outer)
        else:
            if self._called_from is not None and outer.phase == BACKWARD:
                signature = self._called_from(signature, outer.signature)
            # The same as in Places.inside: a call for each op would double the time.
            known = outer._inner
            found = known.get((name, signature) if signature else name) if known else None
            if found is None:
                found = self.places.inside(outer, "op", name, signature)
                if name in REPLAYS:
                    self._replayed[outer] = self._replayed[found] = self.places.inside(outer, "kernels", REPLAY)
            place = found
        if asks:
            self.collective_owners.note_request(name, place, signature)
        return place, calls

    def _compiled_kernel(self, event: Event, end: int, open_range: _Open, outer: Place) -> Place:
        """The place of a kernel of a compiled graph; the last of its places if it is divided among several."""
        graph, number = self._compiled_kernels.pop((event.thread, event.start_ns, event.end_ns))
        _, around, _, layer, outer_range = open_range
        shares = self._compiled.kernel(event, outer, layer, graph, number)
        if len(shares) > 1:  # everything inside it is divided in the same way
            shares[-1][0].is_closed = True
            self._shares[shares[-1][0]] = shares
        *before, (place, _, _) = divide(shares, event.start_ns, end)
        for part, cut, until in before:
            piece = event._replace(kind=Kind.PIECE, start_ns=cut, end_ns=until)
            self._pieces.append(Attributed(piece, part, around, 1, until - cut, outer_range))
        return place

    # Device work

    def _launcher(self, launcher: Place, thread: int, end: int) -> Place:
        """The place that launches the device work of an op that ends at ``end``: in an op that records collectives, it
        is the last collective."""
        until, collective = self._collectives[thread]
        return collective if until == end and _records_collective(launcher) else launcher

    def _unknown_launcher(self, correlation: int) -> Place:
        reason = LAUNCHED_BEFORE if correlation == BEFORE else LAUNCH_NOT_RECORDED
        return self.places.inside(self._outside, "label", reason)

    def _divided_kernel(self, event: Event) -> Iterator[Attributed]:
        """A kernel of an op that is divided among places: it is divided in the same way."""
        for place, start, end in divide(self._divided[event.correlation], event.start_ns, event.end_ns):
            piece = event._replace(start_ns=start, end_ns=end)
            inner = self.places.inside(place, "kernel", event.name, event.signature)
            yield Attributed(piece, inner, None, 1, end - start)

    # Events that open no range

    def _sample(self, event: Event, end: int, open_range: _Open) -> Attributed | None:
        """A sampled line of Python: between ops, or inside the outermost op. In backward it says nothing."""
        around = self.places.of_lines(open_range[1] or self._outside)
        others = (ranges for on, ranges in self._stacks.items() if on != event.thread)
        if around is None or any(ranges and ranges[0][0] > event.start_ns for ranges in others):
            return None  # if another thread works, it is that of autograd, and this one waits for it
        place = self.places.inside(around, "python", event.name)
        return Attributed(event, place, open_range[1], 1, 0, open_range[4])

    def _begin_call(self, event: Event, end: int, open_range: _Open) -> None:
        """A compiled function is called on tensors that it took from modules. The range may be inside the op of the
        function, whose sequence number its backward has, too."""
        self._compiled.enter_call(event, end)
        outer_range = open_range[4]
        if outer_range is not None and outer_range.event.sequence >= 0:
            self._compiled.note_op(event.thread, outer_range.event.sequence, event.start_ns)

    def _begin_collective(self, event: Event, end: int, open_range: _Open) -> Attributed:
        """A collective belongs to the op that requested it: the op around it, or an op on another thread."""
        limit, around, _, _, outer_range = open_range
        if around is not None:
            self.collective_owners.note_started_inside(around)
        requester = around or self.collective_owners.requester(event.name, event.signature)
        place = self.places.inside(requester or self._outside, "collective", event.name, event.signature)
        if event.correlation:
            self._launched_by[event.correlation] = place
        if around is not None and _records_collective(around):
            # The op launches the kernel, and the range that begins in the op names the collective. If two ranges begin
            # in one op, it is unknown which of the two a kernel belongs to.
            until, other = self._collectives.get(event.thread, (0, place))
            last = place if until != limit or other is place else around
            self._collectives[event.thread] = limit, last
            if outer_range is not None and outer_range.event.correlation > 0:
                self._launched_by[outer_range.event.correlation] = last
        return Attributed(event, place, None, 1, 0, outer_range)

    # Ranges

    def _garbage(self, event: Event, open_range: _Open) -> _Opened:
        """A garbage collection belongs to no layer, with everything inside it."""
        return self.places.inside(self._outside, "gc", GARBAGE_COLLECTION), 1, None, OUTSIDE

    def _compiled_range(self, event: Event, open_range: _Open) -> _Opened:
        _, around, label, layer, _ = open_range
        return self._compiled.range(event.kind, event.name, around or self._outside), 1, label, layer

    def _label(self, event: Event, open_range: _Open) -> _Opened:
        """One of our labels: around the forward of a module, around its hooks, or of another active profile."""
        _, around, label, layer, _ = open_range
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
        """The forward range of a module: its place; 1 if it is a call, else 0; and its layer.

        It is recompute if it is inside backward work. Directly inside its wrapper's range, it is part of that call.
        """
        self.labels += 1
        label = event.name
        layers, wrapper = self._sites[label]
        layer = layers[0]
        if len(layers) > 1:
            if (label, caller) not in self._nearest_of:
                self._nearest_of[label, caller] = self._nearest(layers, caller)
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
        """The place of hooks that exchange data for a module: they run outside its forward, but belong to it."""
        outer = around or self.places.of_layer(OUTSIDE, FORWARD)
        site = self._sites.get(PREFIX + name.removeprefix(HOOKS))
        if site is None:
            return outer
        layer = self._nearest(site.layers, caller)
        if self._selected is not None and layer not in self._selected:
            return outer
        return self.places.of_layer(layer, RECOMPUTE if outer.phase == BACKWARD else outer.phase, around)

    def _engine(self, event: Event, open_range: _Open) -> _Opened:
        _, around, label, layer, _ = open_range
        return self._gaps.call(around), int(bool(event.name)), label, layer

    def _node(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node with the engine's work around it: backward of the layer of the op that created the node.
        The ranges around it do not matter."""
        _, around, label, _, outer_range = open_range
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
        for region in regions_around(maker):
            outer = self.places.inside(outer, "region", region)
        place = self.places.inside(outer, "op", event.name, signature)
        place.is_node = True
        if event.name.endswith(ACCUMULATES):
            self.collective_owners.note_gradient(thread, layer)
        return place, 1, label, self._made_in.get((forward_thread, sequence), layer)

    def _backward_function(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node itself: it is inside the engine's range around it, if that was recorded."""
        _, around, label, layer, _ = open_range
        if around is None or not around.is_node:
            return self._node(event, open_range)
        signature = around.signature if self._called_from is not None else 0
        if event.name.endswith(ACCUMULATES):
            self.collective_owners.note_gradient_size(event.thread, event.signature)
        return self.places.inside(around, "op", event.name, signature), 1, label, layer

    def _range(self, event: Event, open_range: _Open) -> _Opened:
        """A range of the user or of torch: it belongs to the place around it.

        A range of FSDP belongs to the layers that its name contains: in hooks, FSDP gathers the parameters of layers
        that run next, and reduces and scatters the gradients of others.
        """
        _, around, label, layer, _ = open_range
        name, outer = event.name, around or self._outside
        layers = self.collective_owners.layers_of_range(name, outer.layer)
        if layers is None:
            return self.places.inside(outer, "label", name, event.signature), 1, label, layer
        phase = outer.phase
        if "backward" in name:
            phase = BACKWARD
        elif phase == BACKWARD and name.startswith(("FSDP::pre_forward", "FSDP::post_forward")):
            phase = RECOMPUTE
        if layers:
            outer = self._common_ancestor.place(layers, phase, outer)
        # a range of torch is an op, not a label of the user
        return self.places.inside(outer, "op", name, event.signature), 1, label, layer

    def _requester(self, thread: int, around: Place, op: str, signature: int) -> Place:
        """The place in which an op requests a collective: usually the place around it. DistributedDataParallel requests
        one when the last gradient of a bucket is ready: it belongs to all layers with gradients in the bucket."""
        outer: Place | None = around
        while outer is not None and not outer.is_node:
            outer = outer.outer
        if outer is None or outer.frame is None or not outer.frame.name.endswith(ACCUMULATES):
            return around
        layers = self.collective_owners.layers_of_bucket(thread, op, signature)
        return self._common_ancestor.place(layers, BACKWARD, around) if layers else around

    def _nearest(self, layers: tuple[int, ...], caller: int) -> int:
        """The layer of a module with several paths: the one whose path has most steps in common with its caller's. The
        first layer if none has any."""
        if caller < 0:
            return layers[0]
        around = self._paths[caller]

        def shared(layer: int) -> int:
            steps = 0
            for ours, theirs in zip(self._paths[layer], around):
                if ours != theirs:
                    break
                steps += 1
            return steps

        return max(layers, key=shared)


_INSTANTS: Mapping[Kind, Callable[[Attribution, Event, int, _Open], Attributed | None]] = {
    Kind.SAMPLE: Attribution._sample,
    Kind.COLLECTIVE: Attribution._begin_collective,
    Kind.COMPILED_INPUTS: Attribution._begin_call,
}
"""The methods for events that open no range."""
_RANGES: Mapping[Kind, Callable[[Attribution, Event, _Open], _Opened]] = {
    Kind.LABEL: Attribution._label,
    Kind.ENGINE: Attribution._engine,
    Kind.NODE: Attribution._node,
    Kind.BACKWARD_FUNCTION: Attribution._backward_function,
    Kind.GARBAGE: Attribution._garbage,
    Kind.GUARDS: Attribution._compiled_range,
    Kind.REGION: Attribution._compiled_range,
    Kind.GRAPH: Attribution._compiled_range,
    Kind.COMPILING: Attribution._compiled_range,
    Kind.USER_LABEL: Attribution._range,
    Kind.PIECE: Attribution._range,
}
"""The methods for events that open a range, but for ops."""
