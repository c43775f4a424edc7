"""The rule of ownership: which layer an event worked for, and in which phase.

``Attribution.attribute`` walks over the events and keeps the open ranges of each thread. What each kind of event means
is a method of its own: ``_op``, ``_label``, ``_node`` and so on, listed in a table by kind. The loop itself does only
what nearly every event needs: there a call for each event would cost more than the work in it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from torchprof.attribute.collectives import ACCUMULATES, RECORDS_COLLECTIVE, Exchanges
from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.compiled_ranges import CompiledRanges, Shares, divide, regions_around
from torchprof.attribute.events import HOOKS, PREFIX, Event, Kind, Site
from torchprof.attribute.lookahead import LookAhead
from torchprof.attribute.node_makers import NodeMakers
from torchprof.attribute.places import Attributed, Place, Places
from torchprof.run.collectives import ASKS
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
"""A range that is open on a thread: its end; its place; the label of the innermost module around, and the layer of
that module, selected or not; the range itself."""
_NOTHING_OPEN: _Open = (0, None, None, OUTSIDE, None)

_Opened = tuple[Place, int, "str | None", int]
"""What a range is that begins: its place; 1 if it is a call, else 0; label and layer as in ``_Open``."""


def _records_collective(place: Place) -> bool:
    return place.frame is not None and place.frame.name == RECORDS_COLLECTIVE


class Attribution:
    """One walk over the events of one session, in the order of their start.

    After the walk, ``callers`` holds which layer called which (OUTSIDE: code outside all layers), ``labels`` the number
    of labelled ranges, and ``places`` all places.
    """

    def __init__(
        self,
        sites: Mapping[str, Site],
        paths: Sequence[tuple[str, ...]],
        selected: Set[int] | None = None,
        called_from: Callable[[int, int], int] | None = None,
        exchanges: Exchanges | None = None,
        graphs: CompiledGraphs | None = None,
    ) -> None:
        """``sites`` by label; ``paths`` of the layers, by which calls of a module with several paths are told apart;
        ``selected``: the layers that get rows of their own, None for all. Work of other layers is part of the selected
        layer around it, and NOT_SELECTED if there is none.

        If source lines were recorded, ``called_from(signature, source)`` gives the number of a signature like the first
        with the lines of the second: the ops of backward come from the lines that made their node, not from autograd's
        engine. ``exchanges``: the collectives of the session. ``graphs``: the graphs that torch.compile made.
        """
        self.graphs = graphs or CompiledGraphs()
        self._called_from = called_from
        self.exchanges = exchanges or Exchanges({}, paths, ())
        self.places = Places()
        self.callers: set[tuple[int, int]] = set()
        self.labels = 0
        self._sites = sites
        self._paths = paths
        self._index = {path: index for index, path in enumerate(paths)}
        self._selected = selected
        self._outside = self.places.of_layer(OUTSIDE, FORWARD)
        self._compiled = CompiledRanges(self.places, self.graphs)
        self._compiled_kernels: dict[tuple[int, int, int], tuple[str, int | None]] = {}  # see LookAhead.kernels
        self._stacks: dict[int, list[_Open]] = {}  # by thread: the open ranges, outer to inner
        # Autograd nodes.
        self._makers: defaultdict[int, NodeMakers] = defaultdict(NodeMakers)  # by forward thread
        self._made_in: dict[tuple[int, int], int] = {}  # (forward thread, number) → the layer, selected or not
        self._node_before: dict[tuple[int, int], Place | None] = {}  # (thread, depth) → who made the last node there
        self._nearest_of: dict[tuple[str, int], int] = {}  # (label, calling layer) → which of its layers it is there
        # Device work, by correlation number.
        self._launched_by: dict[int, Place] = {}
        self._divided: dict[int, Shares] = {}  # the launches of an op whose time is divided among places
        self._shares: dict[Place, Shares] = {}  # by the last of those places
        self._replayed: dict[Place, Place] = {}  # the launching place → that of the CUDA graph's kernels
        self._collectives: dict[int, tuple[int, Place]] = {}  # by thread: end of the last collective's op, its place
        self._pieces: list[Attributed] = []  # of the op at hand: what comes before its last piece

    def attribute(self, events: Iterable[Event]) -> Iterator[Attributed]:
        """Give every event the layer it worked for, and the phase.

        Forward work belongs to the innermost labelled range around it on its thread; a labelled range inside backward
        is recompute. Backward work belongs to the layer of the op that made its autograd node, wherever it runs; a
        kernel to the op that launched it. A garbage collection can interrupt anything: it belongs to no layer, with all
        inside it. Work without a layer gets the layer OUTSIDE; no event is dropped.

        Events must come in the order of their start, an outer one before an inner one, and kernels after all others.
        """
        new = tuple.__new__  # a third of the time that Attributed(...) takes, once for every event
        op, kernel, marks = Kind.OP, Kind.KERNEL, (Kind.MEMORY, Kind.STOPPED, Kind.STEP)
        instants = {Kind.SAMPLE: self._sample, Kind.COLLECTIVE: self._begin_collective, Kind.GIVEN: self._begin_call}
        ranges = {
            Kind.LABEL: self._label,
            Kind.NODE: self._node,
            Kind.BACKWARD_FUNCTION: self._backward_function,
            Kind.GARBAGE: self._garbage,
            Kind.GUARDS: self._compiled_range,
            Kind.REGION: self._compiled_range,
            Kind.GRAPH: self._compiled_range,
            Kind.COMPILING: self._compiled_range,
            Kind.USER_LABEL: self._range,
            Kind.PIECE: self._range,
        }
        outside, inside, stacks, makers, pieces = (
            self._outside,
            self.places.inside,
            self._stacks,
            self._makers,
            self._pieces,
        )
        launched_by, replayed, shares, divided = self._launched_by, self._replayed, self._shares, self._divided
        collectives, compiled, selected = self._collectives, self._compiled, self._selected
        called_from = self._called_from
        look_ahead = LookAhead(self.graphs)
        compiled_kernels = self._compiled_kernels = look_ahead.kernels

        for event in look_ahead.pass_on(events):
            kind, name, start, end, thread, sequence, _, correlation, _, _, signature = event
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
                # Clocks of different sources differ by a few ns: what sticks out would break the nesting after it.
                if end > open_range[0]:
                    end = open_range[0]
            _, around, label, layer, outer_range = open_range

            if kind is op:
                # As in _op, for an op that came here before: nearly all do, and a call takes as long as all else here.
                outer = around or outside
                is_usual = not compiled_kernels and (called_from is None or outer.phase != BACKWARD)
                known = outer._inner if is_usual else None
                found = known.get((name, signature) if signature else name) if known else None
                if found is not None and not name.startswith(ASKS):
                    place, calls = found, 1
                else:
                    place, calls = self._op(event, end, open_range)
                    if pieces:  # it is divided: what is left is the last piece
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
            elif kind in instants:
                instant = instants[kind](event, end, open_range)
                if instant is not None:
                    yield instant
                continue
            elif around is not None and around.is_closed and kind is not Kind.GARBAGE:
                place, calls = around, 0
            else:
                place, calls, label, layer = ranges[kind](event, open_range)

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

    # Ops

    def _op(self, event: Event, end: int, open_range: _Open) -> tuple[Place, int]:
        """The place of an op, and whether it is a call: inside an op of its own name it is part of that call.

        A compiled kernel that is divided among layers gets the last of their places; the others are in ``_pieces``.
        """
        _, name, start, full_end, thread, _, _, _, _, _, signature = event
        around = open_range[1]
        outer = around or self._outside
        asks = name.startswith(ASKS)
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
            # As in Places.inside: a call of that for each op would take as long as the rest.
            known = outer._inner
            found = known.get((name, signature) if signature else name) if known else None
            if found is None:
                found = self.places.inside(outer, "op", name, signature)
                if name in REPLAYS:
                    self._replayed[outer] = self._replayed[found] = self.places.inside(outer, "kernels", REPLAY)
            place = found
        if asks:
            self.exchanges.ask(name, place, signature)
        return place, calls

    def _compiled_kernel(self, event: Event, end: int, open_range: _Open, outer: Place) -> Place:
        """The place of a kernel of a compiled graph; the last of its places if it is divided among several."""
        graph, number = self._compiled_kernels.pop((event.thread, event.start_ns, event.end_ns))
        _, around, _, layer, outer_range = open_range
        shares = self._compiled.kernel(event, outer, layer, graph, number, self._of_layers, self._name_layers)
        if len(shares) > 1:  # all that runs inside is divided with it
            shares[-1][0].is_closed = True
            self._shares[shares[-1][0]] = shares
        *before, (place, _, _) = divide(shares, event.start_ns, end)
        for part, cut, until in before:
            piece = event._replace(kind=Kind.PIECE, start_ns=cut, end_ns=until)
            self._pieces.append(Attributed(piece, part, around, 1, until - cut, outer_range))
        return place

    # Device work

    def _launcher(self, launcher: Place, thread: int, end: int) -> Place:
        """What launches the device work of an op that ends then: in an op that records collectives, the last one."""
        until, collective = self._collectives[thread]
        return collective if until == end and _records_collective(launcher) else launcher

    def _unknown_launcher(self, correlation: int) -> Place:
        why = LAUNCHED_BEFORE if correlation == BEFORE else LAUNCH_NOT_RECORDED
        return self.places.inside(self._outside, "label", why)

    def _divided_kernel(self, event: Event) -> Iterator[Attributed]:
        """The device work of an op that is divided among places, divided as the op is."""
        for place, start, end in divide(self._divided[event.correlation], event.start_ns, event.end_ns):
            piece = event._replace(start_ns=start, end_ns=end)
            inner = self.places.inside(place, "kernel", event.name, event.signature)
            yield Attributed(piece, inner, None, 1, end - start)

    # What opens no range

    def _sample(self, event: Event, end: int, open_range: _Open) -> Attributed | None:
        """A sampled line of Python. It is dropped inside an op, which explains the time itself, and while another
        thread works: that is autograd's, and this one waits for it."""
        _, around, _, _, outer_range = open_range
        if around is not None and around.frame is not None and around.frame.kind != "label":
            return None
        if any(ranges and ranges[0][0] > event.start_ns for on, ranges in self._stacks.items() if on != event.thread):
            return None
        place = self.places.inside(around or self._outside, "python", event.name)
        return Attributed(event, place, around, 1, 0, outer_range)

    def _begin_call(self, event: Event, end: int, open_range: _Open) -> None:
        """A compiled function is called on tensors that it took from modules."""
        self._compiled.enter_call(event, end)

    def _begin_collective(self, event: Event, end: int, open_range: _Open) -> Attributed:
        """A collective belongs to the op that asked for it: the one around it, or one on another thread."""
        limit, around, _, _, outer_range = open_range
        if around is not None:
            self.exchanges.begun_inside(around)
        requester = around or self.exchanges.asker(event.name, event.signature)
        place = self.places.inside(requester or self._outside, "collective", event.name, event.signature)
        if event.correlation:
            self._launched_by[event.correlation] = place
        if around is not None and _records_collective(around):
            # The op launches the kernel, and the range that begins in it names the collective. If two ranges begin in
            # one op, it is unknown which of them a kernel belongs to.
            until, other = self._collectives.get(event.thread, (0, place))
            last = place if until != limit or other is place else around
            self._collectives[event.thread] = limit, last
            if outer_range is not None and outer_range.event.correlation > 0:
                self._launched_by[outer_range.event.correlation] = last
        return Attributed(event, place, None, 1, 0, outer_range)

    # Ranges

    def _garbage(self, event: Event, open_range: _Open) -> _Opened:
        """A garbage collection belongs to no layer, with all inside it."""
        return self.places.inside(self._outside, "gc", GARBAGE_COLLECTION), 1, None, OUTSIDE

    def _compiled_range(self, event: Event, open_range: _Open) -> _Opened:
        _, around, label, layer, _ = open_range
        return self._compiled.range(event.kind, event.name, around or self._outside), 1, label, layer

    def _label(self, event: Event, open_range: _Open) -> _Opened:
        """One of our labels: the forward of a module, the hooks around it, or one of another profile's."""
        _, around, label, layer, _ = open_range
        name = event.name
        if name in self._sites:
            place, calls, layer = self._of_label(name, around, label, layer)
            if place.phase == FORWARD:
                self.exchanges.forget_gradients()
            return place, calls, name, layer
        if name.startswith(HOOKS):
            return self._of_hooks(name, around, layer), 0, label, layer
        return self._range(event, open_range)

    def _of_label(
        self, label: str, around: Place | None, label_around: str | None, caller: int
    ) -> tuple[Place, int, int]:
        """The forward range of a module: its place, whether it is a call, and its layer.

        It is recompute if backward work is around it. Directly inside the range of its wrapper it is the same call.
        """
        self.labels += 1
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
            self.callers.add((around.layer if around is not None else OUTSIDE, layer))
        return place, 1, layer

    def _of_hooks(self, name: str, around: Place | None, caller: int) -> Place:
        """Hooks of a module that exchange data for it: they run outside its forward, and belong to it."""
        outer = around or self.places.of_layer(OUTSIDE, FORWARD)
        site = self._sites.get(PREFIX + name.removeprefix(HOOKS))
        if site is None:
            return outer
        layer = self._nearest(site.layers, caller)
        if self._selected is not None and layer not in self._selected:
            return outer
        return self.places.of_layer(layer, RECOMPUTE if outer.phase == BACKWARD else outer.phase, around)

    def _node(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node with the engine's work: in the backward of the layer whose op made it, whatever is around
        it."""
        _, around, label, _, _ = open_range
        thread, sequence, forward_thread = event.thread, event.sequence, event.forward_thread
        level = (thread, len(self._stacks[thread]))
        if sequence >= 0:
            of_graph = event.name.endswith(_GRAPH_NODE)
            maker = self._makers[forward_thread].find(sequence, of_graph)
        else:
            # AccumulateGrad has no number; the engine runs it right after the node that made its gradient. Nor has a
            # node that is not run because autograd.grad returns the gradient that would go into it.
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
            self.exchanges.accumulate(thread, layer)
        return place, 1, label, self._made_in.get((forward_thread, sequence), layer)

    def _backward_function(self, event: Event, open_range: _Open) -> _Opened:
        """An autograd node itself: part of the engine's range around it, if that was recorded."""
        _, around, label, layer, _ = open_range
        if around is None or not around.is_node:
            return self._node(event, open_range)
        signature = around.signature if self._called_from is not None else 0
        if event.name.endswith(ACCUMULATES):
            self.exchanges.accumulated(event.thread, event.signature)
        return self.places.inside(around, "op", event.name, signature), 1, label, layer

    def _range(self, event: Event, open_range: _Open) -> _Opened:
        """A range of the user's or of torch's: inside what is around it.

        A range of FSDP's names the layers whose parameters it is about: it gathers those of layers that are used next,
        and reduces and scatters gradients of others, in hooks. It belongs to these layers.
        """
        _, around, label, layer, _ = open_range
        name, outer = event.name, around or self._outside
        layers = self.exchanges.named_by(name, outer.layer)
        if layers is None:
            return self.places.inside(outer, "label", name, event.signature), 1, label, layer
        phase = outer.phase
        if "backward" in name:
            phase = BACKWARD
        elif phase == BACKWARD and name.startswith(("FSDP::pre_forward", "FSDP::post_forward")):
            phase = RECOMPUTE
        if layers:
            outer = self._of_layers(layers, phase, outer)
        # torch's own range is an op, not a label of the user's
        return self.places.inside(outer, "op", name, event.signature), 1, label, layer

    # Work for several layers

    def _requester(self, thread: int, around: Place, op: str, signature: int) -> Place:
        """The place in which an op asks for a collective. Usually where it is; DistributedDataParallel asks when the
        last gradient of a bucket is ready, and that belongs to all layers with gradients in the bucket."""
        outer: Place | None = around
        while outer is not None and not outer.is_node:
            outer = outer.outer
        if outer is None or outer.frame is None or not outer.frame.name.endswith(ACCUMULATES):
            return around
        layers = self.exchanges.bucket(thread, op, signature)
        return self._of_layers(layers, BACKWARD, around) if layers else around

    def _of_layers(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of work for several layers at once: at their nearest common ancestor that is selected."""
        path = self.exchanges.common(layers)
        layer = self._index.get(path, OUTSIDE)
        while self._selected is not None and layer not in self._selected:
            path = path[:-1]
            layer = self._index.get(path, NOT_SELECTED)
            if layer == NOT_SELECTED:
                break
        shared = layers if len(layers) > 1 else ()
        if (layer, phase, shared) == (around.layer, around.phase, around.shared):
            return around
        return self.places.of_layer(layer, phase, around if around.layer != OUTSIDE or around.frame else None, shared)

    def _name_layers(self, layers: tuple[int, ...]) -> str:
        """The paths of several layers, from their nearest common ancestor on."""
        common = self.exchanges.common(layers) if min(layers) >= 0 else ()
        paths = [self._paths[layer] if layer >= 0 else ("(outside)",) for layer in layers]
        return " + ".join(".".join(path[len(common) :]) or "itself" for path in paths)

    def _nearest(self, layers: tuple[int, ...], caller: int) -> int:
        """Of the layers of a module with several paths, the one that shares most steps with its caller's path; the
        first if none shares any."""
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
