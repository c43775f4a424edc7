"""The rule of ownership: which layer an event worked for, and in which phase. Knows no torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from torchprof.attribute.collectives import ACCUMULATES, RECORDS_COLLECTIVE, Exchanges
from torchprof.attribute.compiled import (
    COMPILES_BACKWARD,
    OF_BACKWARD,
    REGION,
    CompiledGraphs,
    graph_of,
    pieces,
    region_of,
)
from torchprof.attribute.events import HOOKS, PREFIX, Event, Kind, Site
from torchprof.attribute.lookahead import LookAhead
from torchprof.attribute.makers import Makers
from torchprof.attribute.places import Attributed, Place, Places
from torchprof.run.collectives import ASKS
from torchprof.run.words import (
    BACKWARD,
    BEFORE,
    COMPILING,
    FORWARD,
    GARBAGE_COLLECTION,
    GRAPH,
    GUARDS,
    LAUNCH_NOT_RECORDED,
    LAUNCHED_BEFORE,
    NOT_ATTRIBUTABLE,
    NOT_SELECTED,
    OUTSIDE,
    RECOMPUTE,
    REPLAY,
    REPLAYS,
    UNKNOWN_KERNEL,
)

_GRAPH_NODE = "DifferentiableGraphBackward"


_OF_COMPILE = frozenset({Kind.GUARDS, Kind.REGION, Kind.GRAPH, Kind.COMPILING})


def _records_collective(place: Place) -> bool:
    return place.frame is not None and place.frame.name == RECORDS_COLLECTIVE


def _regions_around(place: Place | None) -> list[str]:
    """The compiled code that a place is inside of, in its layer, outer to inner."""
    found = []
    while place is not None:
        if place.frame is not None and place.frame.kind == "region":
            found.append(place.frame.name)
        place = place.outer
    return found[::-1]


def _pieces(shares: Sequence[tuple[Place, int]], start: int, end: int) -> list[tuple[Place, int, int]]:
    """A stretch of time divided among places, in proportion to their weights: each with its start and end."""
    cuts = pieces(start, end, [weight for _, weight in shares])
    return [(place, *cut) for (place, _), cut in zip(shares, cuts)]


class Attribution:
    """One walk over the events of one session, in the order of their start.

    After the walk, ``callers`` holds which layer called which (OUTSIDE: nobody), ``labels`` how many labelled ranges
    there were, and ``places`` all places.
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
        """``sites`` by label; ``paths`` of the layers, which tell the calls of a module with several paths apart;
        ``selected``: the layers to be told apart, None for all. Work of other layers is part of the selected layer
        around it, and NOT_SELECTED where there is none.

        Where source lines were recorded, ``called_from`` gives the number of a signature that is like the first and has
        the lines of the second: backward's ops come from the lines that made their node, not from the engine.
        ``exchanges``: what FSDP calls the layers, and how large what is exchanged is. ``graphs``: what is known of
        graphs that torch.compile made.
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
        self._makers: defaultdict[int, Makers] = defaultdict(Makers)  # by forward thread
        self._made_in: dict[tuple[int, int], int] = {}  # (forward thread, number) → the layer, selected or not
        self._found: dict[tuple[str, int], int] = {}  # (label, its caller) → which of its layers it is there
        self._node_before: dict[tuple[int, int], Place | None] = {}  # (thread, depth) → who made the last node there
        self._given: dict[int, tuple[int, str]] = {}  # by thread: until when, and the name of the range that tells it
        self._given_to: dict[tuple[int, int], str] = {}  # (forward thread, number) of what was called in such a range

    def attribute(self, events: Iterable[Event]) -> Iterator[Attributed]:
        """Say, for every event, which layer it worked for and in which phase.

        Forward work belongs to the innermost labelled range around it on its thread; a labelled range inside backward
        is recompute. Backward work belongs to the layer of the op that made its autograd node, wherever it runs; a
        kernel to the op that launched it. A garbage collection interrupts whatever is under way, and is of no layer,
        with all inside of it. Work that belongs to nobody has the layer OUTSIDE: it is shown, never
        dropped. Events must come in the order of their start, an outer one before an inner one, and kernels after all.
        """
        inside = self.places.inside
        outside = self.places.of_layer(OUTSIDE, FORWARD)
        # By thread: end, place, label, its layer, correlation.
        stacks: dict[int, list[tuple[int, Place, str | None, int, int]]] = {}
        launched_by: dict[int, Place] = {}
        begun: dict[int, tuple[int, Place]] = {}  # by thread: the collective that began last, and the end of its op
        new = tuple.__new__  # a third of the time that Attributed(...) takes, once for every event
        op, label_kind, node, kernel = Kind.OP, Kind.LABEL, Kind.NODE, Kind.KERNEL
        sample, collective, garbage, given = Kind.SAMPLE, Kind.COLLECTIVE, Kind.GARBAGE, Kind.GIVEN
        exchanges = self.exchanges
        called_from = self._called_from
        unranged = (Kind.MEMORY, Kind.STOPPED, Kind.STEP, sample)
        looking = LookAhead(self.graphs)
        of_graphs = looking.kernels
        replayed: dict[Place, Place] = {}
        sharing: dict[Place, list[tuple[Place, int]]] = {}  # by the last of the places that an op is divided among
        divided: dict[int, list[tuple[Place, int]]] = {}  # by the correlation number of what launched a kernel

        for event in looking.pass_on(events):
            kind, name, start, end, thread, sequence, _, correlation, _, _, signature = event
            if kind is kernel:
                launcher = launched_by.get(correlation)
                if launcher is None:
                    why = LAUNCHED_BEFORE if correlation == BEFORE else LAUNCH_NOT_RECORDED
                    launcher = inside(outside, "label", why)
                launcher = replayed.get(launcher, launcher)
                if correlation in divided:
                    for place, cut, until in _pieces(divided[correlation], start, end):
                        piece = event._replace(start_ns=cut, end_ns=until)
                        yield new(Attributed, (piece, inside(place, "kernel", name, signature), None, 1, until - cut))
                    continue
                yield new(Attributed, (event, inside(launcher, "kernel", name, signature), None, 1, end - start))
                continue
            stack = stacks.get(thread)
            if stack is None:
                stack = stacks[thread] = []
            while stack and stack[-1][0] <= start:
                stack.pop()
            around: Place | None = None
            label: str | None = None
            layer = OUTSIDE
            limit = launcher_number = 0
            if stack:
                limit, around, label, layer, launcher_number = stack[-1]
                # Clocks of different sources differ by a few ns: what sticks out would break the nesting after it.
                if end > limit:
                    end = limit
            if kind is not op and kind in unranged:
                if kind is not sample:
                    yield new(Attributed, (event, around or outside, around, 0, 0))
                elif (around is None or around.frame is None or around.frame.kind == "label") and not any(
                    other and other[0][0] > start for on, other in stacks.items() if on != thread
                ):
                    # Where an op is around it, that explains where the time went; where another thread is at work,
                    # it is autograd's, and this one waits for it.
                    yield new(Attributed, (event, inside(around or outside, "python", name), around, 1, 0))
                continue

            if kind is given:
                self._given[thread] = end, name
                continue

            if kind is collective:
                if around is not None:
                    exchanges.begun_inside(around)
                asker = around or exchanges.asker(name, signature)
                place = inside(asker or outside, "collective", name, signature)
                if correlation:
                    launched_by[correlation] = place
                if around is not None and _records_collective(around):
                    # The op launches the kernel, and the range that begins in it says what the kernel does. Of two
                    # ranges in one op nobody knows which of them a kernel is of.
                    until, other = begun.get(thread, (0, place))
                    begun[thread] = limit, place if until != limit or other is place else around
                    if launcher_number > 0:
                        launched_by[launcher_number] = begun[thread][1]
                yield new(Attributed, (event, place, None, 1, 0))
                continue

            calls = 1
            if kind is op:
                outer = around or outside
                asks = name.startswith(ASKS)
                if asks and around is not None:
                    outer = self._served(thread, around, name, signature)
                frame = outer.frame
                if outer.is_closed or (frame is not None and frame.name == name and frame.kind == "op"):
                    place, calls = outer, 0
                elif of_graphs and (thread, start, event[3]) in of_graphs:
                    shares = self._of_kernel(event, outer, layer, *of_graphs.pop((thread, start, event[3])))
                    if len(shares) > 1:  # and so is what runs inside, with it
                        shares[-1][0].is_closed = True
                        sharing[shares[-1][0]] = shares
                    *before, (place, start, _) = _pieces(shares, start, end)
                    for part, cut, until in before:
                        piece = event._replace(kind=Kind.PIECE, start_ns=cut, end_ns=until)
                        yield new(Attributed, (piece, part, around, 1, until - cut))
                    event = event._replace(start_ns=start)
                else:
                    if called_from is not None and outer.phase == BACKWARD:
                        signature = called_from(signature, outer.signature)
                    # As in Places.inside: a call of that for each op would take as long as the rest.
                    known = outer._inner
                    found = known.get((name, signature) if signature else name) if known else None
                    if found is None:
                        found = inside(outer, "op", name, signature)
                        if name in REPLAYS:
                            replayed[outer] = replayed[found] = inside(outer, "kernels", REPLAY)
                    place = found
                if sequence >= 0 and not place.is_closed:
                    self._makers[thread].add(sequence, place)
                    if self._selected is not None:
                        self._made_in[thread, sequence] = layer
                    if self._given and (told := self._given_at(thread, start)):
                        self._given_to[thread, sequence] = told
                if asks:
                    exchanges.ask(name, place, signature)
            elif kind is garbage:
                place, label, layer = inside(outside, "gc", GARBAGE_COLLECTION), None, OUTSIDE
            elif around is not None and around.is_closed:
                place, calls = around, 0
            elif kind is label_kind and name in self._sites:
                place, calls, layer = self._of_label(name, around, label, layer)
                label = name
                if place.phase == FORWARD:
                    exchanges.forget_gradients()
            elif kind is label_kind and name.startswith(HOOKS):
                place, calls = self._of_hooks(name, around, layer), 0
            elif kind is node or (kind is Kind.BACKWARD_FUNCTION and not (around is not None and around.is_node)):
                place = self._of_node(event, around, len(stack))
                layer = self._made_in.get((event.forward_thread, sequence), place.layer)
                if name.endswith(ACCUMULATES):
                    exchanges.accumulate(thread, place.layer)
            elif kind is Kind.BACKWARD_FUNCTION and around is not None:  # it is of the node around it
                place = inside(around, "op", name, around.signature if called_from is not None else 0)
                if name.endswith(ACCUMULATES):
                    exchanges.accumulated(thread, signature)
            elif kind in _OF_COMPILE:
                place, calls = self._of_compiled(kind, name, around or outside)
            else:
                place = self._of_range(name, around, signature)

            stack.append((end, place, label, layer, correlation))
            if correlation:
                launcher = place if correlation > 0 or around is None else around
                if launcher is around and _records_collective(launcher) and begun.get(thread, (0,))[0] == limit:
                    launcher = begun[thread][1]
                launched_by[correlation] = launcher
                if place in sharing:
                    divided[correlation] = sharing[place]
            yield new(Attributed, (event, place, around, calls, end - start))

    def _of_label(
        self, label: str, around: Place | None, label_around: str | None, caller: int
    ) -> tuple[Place, int, int]:
        """The forward range of a module: its place, whether it is a call, and the layer it is.

        It is recompute where backward work is around it, and no call of its own directly inside its wrapper's range.
        """
        self.labels += 1
        layers, wrapper = self._sites[label]
        layer = layers[0]
        if len(layers) > 1:
            if (label, caller) not in self._found:
                self._found[label, caller] = self._nearest(layers, caller)
            layer = self._found[label, caller]
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
        """Hooks of a module that exchange data for it: they run outside its forward, and are its work all the same."""
        outer = around or self.places.of_layer(OUTSIDE, FORWARD)
        site = self._sites.get(PREFIX + name.removeprefix(HOOKS))
        if site is None:
            return outer
        layer = self._nearest(site.layers, caller)
        if self._selected is not None and layer not in self._selected:
            return outer
        return self.places.of_layer(layer, RECOMPUTE if outer.phase == BACKWARD else outer.phase, around)

    def _of_node(self, event: Event, around: Place | None, depth: int) -> Place:
        """An autograd node: in the backward of the layer whose op made it, whatever is around it."""
        level = (event.thread, depth)
        if event.sequence >= 0:
            of_graph = event.name.endswith(_GRAPH_NODE)
            maker = self._makers[event.forward_thread].find(event.sequence, of_graph)
        else:
            # AccumulateGrad has no number; the engine runs it right after the node that made its gradient. Nor has a
            # node that is not run, where autograd.grad takes the gradient that it is given.
            maker = self._node_before.get(level)
        self._node_before[level] = maker
        if told := self._given_to.get((event.forward_thread, event.sequence)):
            self._given[event.thread] = event.end_ns, told
        layer = OUTSIDE if maker is None else maker.layer
        signature = 0 if maker is None or self._called_from is None else self._called_from(0, maker.signature)
        outer = self.places.of_layer(layer, BACKWARD, around)
        for region in _regions_around(maker):
            outer = self.places.inside(outer, "region", region)
        place = self.places.inside(outer, "op", event.name, signature)
        place.is_node = True
        return place

    def _of_compiled(self, kind: Kind, name: str, outer: Place) -> tuple[Place, int]:
        """What torch.compile did, or made: its place, and whether it is a call."""
        inside = self.places.inside
        if kind is Kind.COMPILING:
            if name == COMPILES_BACKWARD:
                outer = self._in_backward(outer)
            place = inside(outer, "region", COMPILING)
            place.is_closed = True
            return place, 1
        if kind is Kind.GRAPH:
            if self.graphs.is_asked and (reason := self.graphs.why_unknown(graph_of(name))):
                outer = inside(outer, "kernels", f"{NOT_ATTRIBUTABLE}: {reason}")
            return inside(outer, "op", GRAPH), 1
        region = outer
        if name.startswith(REGION):
            if region_of(name).startswith(OF_BACKWARD):
                outer = self._in_backward(outer)
            region = inside(outer, "region", region_of(name))
        return (region, 1) if kind is Kind.REGION else (inside(region, "op", GUARDS), 1)

    def _of_kernel(
        self, event: Event, around: Place, layer: int, graph: str, kernel: int | None
    ) -> list[tuple[Place, int]]:
        """A kernel of a compiled graph: its place, or one for each layer that it is divided among, with its weight."""
        layers: tuple[tuple[int, int], ...] | str = UNKNOWN_KERNEL
        phase = around.phase
        if kernel is not None:
            layers = self.graphs.layers_of(graph, kernel, layer, self._given_at(event.thread, event.start_ns))
            phase = RECOMPUTE if phase == BACKWARD and self.graphs.recomputes(graph, kernel) else phase

        def inner(outer: Place, said: str = "") -> Place:
            outer = self.places.inside(outer, "kernels", said) if said else outer
            return self.places.inside(outer, "op", event.name, event.signature)

        if isinstance(layers, str):
            outer = around if phase == around.phase else self.places.of_layer(around.layer, phase, around)
            return [(inner(outer, f"{NOT_ATTRIBUTABLE}: {layers}"), 1)]
        numbers = tuple(number for number, _ in layers)
        if len(layers) == 1:
            return [(inner(self._for_layers(numbers, phase, around)), 1)]
        divisor, names = self.graphs.divisor, self._in_words(numbers)
        if divisor is not None and any(weight for _, weight in layers):
            said = f"divided by {divisor}: {names}"
            return [
                (inner(self._for_layers((number,), phase, around), said), weight) for number, weight in layers if weight
            ]
        return [(inner(self._for_layers(numbers, phase, around), f"fused: {names}"), 1)]

    def _in_words(self, layers: tuple[int, ...]) -> str:
        """Several layers, as they are called below the nearest that is above them all."""
        common = self.exchanges.common(layers) if min(layers) >= 0 else ()
        paths = [self._paths[layer] if layer >= 0 else ("(outside)",) for layer in layers]
        return " + ".join(".".join(path[len(common) :]) or "itself" for path in paths)

    def _for_layers(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of work for some layers, of which negative ones are none."""
        if min(layers) >= 0:
            return self._of_layers(layers, phase, around)
        if (layers, phase) == ((around.layer,), around.phase):
            return around
        return self.places.of_layer(OUTSIDE, phase, around, tuple(layer for layer in layers if layer >= 0))

    def _in_backward(self, around: Place) -> Place:
        """The place of backward work that no autograd node is around, as compiled autograd runs it."""
        return around if around.phase == BACKWARD else self.places.of_layer(around.layer, BACKWARD, around)

    def _given_at(self, thread: int, at: int) -> str:
        """The name of the range that tells what a compiled function took from modules, "" where none is around."""
        until, name = self._given.get(thread, (at, ""))
        return name if at < until else ""

    def _of_range(self, name: str, around: Place | None, signature: int) -> Place:
        """A range of the user's, or of torch's: where it is, but for one of FSDP's, which names the layers whose
        parameters it is about: it gathers some that are used next, and scatters gradients of others, in hooks."""
        outer = around or self.places.of_layer(OUTSIDE, FORWARD)
        layers = self.exchanges.named_by(name, outer.layer)
        if layers is not None:
            phase = outer.phase
            if "backward" in name:
                phase = BACKWARD
            elif phase == BACKWARD and name.startswith(("FSDP::pre_forward", "FSDP::post_forward")):
                phase = RECOMPUTE
            if layers:
                outer = self._of_layers(layers, phase, outer)
            return self.places.inside(outer, "op", name, signature)  # torch's own, and no label of the user's
        return self.places.inside(outer, "label", name, signature)

    def _served(self, thread: int, around: Place, op: str, signature: int) -> Place:
        """The place in which an op asks for an exchange: where it is, but for one that DistributedDataParallel makes
        when the last gradient of a bucket has come: that serves all layers whose gradients are in it."""
        outer: Place | None = around
        while outer is not None and not outer.is_node:
            outer = outer.outer
        if outer is None or outer.frame is None or not outer.frame.name.endswith(ACCUMULATES):
            return around
        layers = self.exchanges.bucket(thread, op, signature)
        return self._of_layers(layers, BACKWARD, around) if layers else around

    def _of_layers(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of what serves some layers at once: of their nearest common ancestor that was selected."""
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

    def _nearest(self, layers: tuple[int, ...], caller: int) -> int:
        """Of a module's several paths, the one that shares most steps with its caller's; the first where none does."""
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
