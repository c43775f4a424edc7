"""The places of torch.compile's ranges and of the kernels of its graphs."""

from __future__ import annotations

from torchprof.attribute.compiled_graphs import Block, CompiledGraphs, KernelLayers
from torchprof.attribute.event_names import COMPILES_BACKWARD, OF_BACKWARD, REGION, graph_of, region_of
from torchprof.attribute.events import CommonAncestor, Event, Kind, OpenRanges, Place, Places
from torchprof.run.words import (
    BACKWARD,
    BETWEEN,
    COMPILING,
    GRAPH,
    GUARDS,
    NOT_ATTRIBUTABLE,
    OUTSIDE,
    RECOMPUTE,
    UNKNOWN_KERNEL,
    FrameKind,
)

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
