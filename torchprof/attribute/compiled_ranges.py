"""The rule of ownership for the ranges of torch.compile and the kernels of its graphs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from torchprof.attribute.compiled_graphs import (
    COMPILES_BACKWARD,
    OF_BACKWARD,
    REGION,
    Block,
    CompiledGraphs,
    KernelLayers,
    graph_of,
    region_of,
)
from torchprof.attribute.events import Event, Kind, OpenRanges, Place, Places
from torchprof.run.layers import common_prefix
from torchprof.run.words import (
    BACKWARD,
    BETWEEN,
    COMPILING,
    GRAPH,
    GUARDS,
    NOT_ATTRIBUTABLE,
    NOT_SELECTED,
    OUTSIDE,
    OUTSIDE_NAME,
    RECOMPUTE,
    UNKNOWN_KERNEL,
    FrameKind,
)

_MOST_NAMED = 3
"""How many of the layers before and after a kernel are named."""


class CommonAncestor:
    """The places and names of work for several layers at once. ``selected``: the layers with own rows, None for all."""

    def __init__(self, places: Places, paths: Sequence[tuple[str, ...]], selected: Set[int] | None) -> None:
        self._places = places
        self._paths = paths
        self._index = {path: index for index, path in enumerate(paths)}
        self._selected = selected

    def place(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of the layers' work: their nearest common ancestor that is selected."""
        path = self._path(layers)
        layer = self._index.get(path, OUTSIDE)
        while self._selected is not None and layer not in self._selected:
            path = path[:-1]
            layer = self._index.get(path, NOT_SELECTED)
            if layer == NOT_SELECTED:
                break
        shared = layers if len(layers) > 1 else ()
        if (layer, phase, shared) == (around.layer, around.phase, around.shared):
            return around
        return self._places.of_layer(layer, phase, around if around.layer != OUTSIDE or around.frame else None, shared)

    def names(self, layers: tuple[int, ...], most: int | None = None, below: int | None = None) -> str:
        """The paths of the layers, relative to their nearest common ancestor, or to the layer they are ``below``. A
        negative layer is outside all. ``most``: how many are named, None for all."""
        common = self._path(layers if below is None else (*layers, below)) if min(layers) >= 0 else ()
        paths = [self._paths[layer] if layer >= 0 else (OUTSIDE_NAME,) for layer in layers]
        named = paths if most is None or len(paths) <= most + 1 else paths[:most]
        more = [f"{len(paths) - len(named)} more"] if len(named) < len(paths) else []
        return " + ".join([*(".".join(path[len(common) :]) or "itself" for path in named), *more])

    def _path(self, layers: Iterable[int]) -> tuple[str, ...]:
        """The path of the nearest common ancestor; ``()`` if the layers are in different models."""
        return common_prefix(self._paths[layer] for layer in layers)


def nearest(paths: Sequence[tuple[str, ...]], layers: Sequence[int], caller: int) -> int:
    """The layer of a module with several paths: the one whose path has most steps in common with its caller's. The
    first layer if none has any, or if it has no caller (negative)."""
    if caller < 0:
        return layers[0]
    return max(layers, key=lambda layer: len(common_prefix((paths[layer], paths[caller]))))


class CompiledRanges:
    """The places of ranges of torch.compile and of kernels of compiled graphs, in one walk over events."""

    def __init__(self, places: Places, graphs: CompiledGraphs, common_ancestor: CommonAncestor) -> None:
        self._places = places
        self._common_ancestor = common_ancestor
        self._graphs = graphs
        self.has_inputs = False  # whether any COMPILED_INPUTS range has begun
        # COMPILED_INPUTS ranges, and backwards with the names of those of their forward. Inside a backward may be
        # forwards that a checkpoint runs again.
        self._inputs: OpenRanges[Event] = OpenRanges()
        self._inputs_of_node: dict[tuple[int, int], str] = {}  # (forward thread, sequence number) → that name

    def enter_call(self, event: Event, end: int) -> None:
        """A COMPILED_INPUTS range begins. Its name stands for the tensors that the function took from modules."""
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

    def range(self, kind: Kind, name: str, outer: Place) -> Place:
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

    def kernel(self, event: Event, around: Place, layer: int, graph: str, kernel: int | None) -> Place:
        """The place of one kernel of a compiled graph.

        ``layer``: the layer in which the graph runs. ``kernel``: the kernel's number in the graph, None if it is
        unknown.
        """
        layers: KernelLayers = UNKNOWN_KERNEL
        phase = around.phase
        inputs = self._inputs_at(event.thread, event.start_ns)
        if kernel is not None:
            layers = self._graphs.layers_of(graph, kernel, layer, inputs)
            phase = RECOMPUTE if phase == BACKWARD and self._graphs.kernel(graph, kernel).recomputes else phase

        def inner(outer: Place, described: str = "") -> Place:
            outer = self._places.inside(outer, FrameKind.KERNELS, described) if described else outer
            return self._places.inside(outer, FrameKind.OP, event.name, event.signature)

        # Of such a graph, the call itself may be of layers: it is in a row with the kernels that are unknown for the
        # same reason. All others are beside that row.
        why_call = self._graphs.why_call_is_unknown(graph)
        if why_call and (layers, phase) == (why_call, around.phase):
            return inner(around)
        if why_call and around.outer is not None and around.outer.outer is not None:
            around = self._places.inside(around.outer.outer, FrameKind.OP, GRAPH)
        if isinstance(layers, Block):
            names = self._common_ancestor.names(layers.neighbors, _MOST_NAMED, layers.layer)
            described = "" if layers.is_own else f"{BETWEEN}{names}"
            return inner(self._for_layers((layers.layer,), phase, around), described)
        if isinstance(layers, str):
            outer = around if phase == around.phase else self._places.of_layer(around.layer, phase, around)
            return inner(outer, f"{NOT_ATTRIBUTABLE}: {layers}")
        described = f"fused: {self._common_ancestor.names(layers)}" if len(layers) > 1 else ""
        return inner(self._for_layers(layers, phase, around), described)

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
