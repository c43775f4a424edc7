"""Which layers work before and after a kernel that works for no parameter alone: it lies between them.

What a graph computes between two layers ran in the module around both, or in a module inside that. Of all layers
before a value, the last one in the text counts, and the first one of all after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import Span
from torchprof.record.compiled.graph_flow import GraphFlow
from torchprof.record.compiled.kept_graph import KeptGraph

_Names = frozenset[str]
_NONE: _Names = frozenset()


class _Work(NamedTuple):
    """Work for parameters: the number of its node in the order of the text, and the parameters."""

    number: int
    parameters: _Names


_NOTHING = _Work(-1, _NONE)
_MOST_NODES = 500
"""Of more nodes in one kernel nothing is known: it is not between layers, and the search would take long."""


class GraphSpans:
    """The values of a graph, and for each the parameters of the layers that work before and after it.

    ``forward``: the spans of the graph whose backward this is.
    """

    def __init__(self, graph: KeptGraph, forward: GraphSpans | None = None) -> None:
        self.source = graph.source
        self.flow: GraphFlow = GraphFlow(graph, None if forward is None else forward.flow)
        flow = self.flow
        every = {name: self._parameters_of(name) for name in flow.text.reads}
        self._own = {name: parameters for name, parameters in every.items() if parameters}
        number_of = {name: number for number, name in enumerate(flow.text.reads)}
        self._before: dict[str, _Work] = {}
        for name, reads in flow.text.reads.items():
            # What a backward computes again of the forward does not tell where the gradients after it are computed.
            alike = reads & flow.of_gradients if name in flow.of_gradients else reads
            last = (self._last(read, number_of.get(read, -1)) for read in alike)
            self._before[name] = max(last, key=lambda work: (bool(work.parameters), work.number), default=_NOTHING)
        self._node_of = self._written()
        uses = Counter(name for own in self._own.values() for name in own)
        self.repeated: _Names = (
            forward.repeated if forward is not None else frozenset(name for name in uses if uses[name] > 1)
        )
        """The parameters that several nodes of the forward work for: their layers may be called several times."""
        self._after: dict[str, _Work] = {}
        for name, reads in reversed([*flow.text.reads.items()]):
            own = self._own.get(name)
            work = _Work(number_of[name], own) if own else self._after.get(name, _NOTHING)
            alike = reads & flow.of_gradients if name in flow.of_gradients else reads
            for read in alike if work.parameters else ():
                self._after[read] = min(work, self._after.get(read, work), key=lambda known: known.number)

    def _parameters_of(self, name: str) -> _Names:
        """The parameters that a node works for or reads directly."""
        flow = self.flow
        if name in flow.made_of:
            return _NONE
        if name in flow.calls:
            return flow.works_for(flow.calls[name])
        return _NONE.union(*(flow.made_of.get(read, _NONE) for read in flow.text.reads[name]))

    def _last(self, name: str, number: int) -> _Work:
        """The last work for parameters that a value needs; ``number``: of the node."""
        own = self._own.get(name)
        return _Work(number, own) if own else self._before.get(name, _NOTHING)

    def _written(self) -> Mapping[str, str]:
        """The nodes of buffers, as far as they are arguments or results of library calls, or outputs of the graph. Of
        an input that a kernel may write to, it is what is written."""
        names = {name: name for name in self.source.inputs}
        copies = [op.given for op in self.flow.text.ops if op.name == "aten::copy_" and len(op.given) > 1]
        names.update((given[0], given[1]) for given in copies)
        for index, op in self.flow.node_of.items():
            kernel = self.source.kernels[index]
            names.update(dict.fromkeys(kernel.writes, op.node) if kernel.number is not None else {})
            if len(kernel.given) == len(op.given):
                names.update((name, node) for name, node in zip(kernel.given, op.given) if name not in names)
        returned = zip(self.source.returned, self.flow.text.outputs)
        names.update((name, node) for name, (node, _) in returned if name and node and name not in names)
        return names

    def of_kernel(self, number: int) -> frozenset[Span]:
        """Of what a kernel computes, the parameters of the layers before and after; empty if that is unknown. Names of
        parameters stand for their roots. If it is unknown which values are in a buffer, those count that are computed
        from it.
        """
        kernel = self.source.kernels[number]
        op = self.flow.node_of.get(number)
        nodes = {op.node} if op is not None else self._computed(number)
        if not kernel.name or not nodes:
            return frozenset()
        return frozenset(self._span(node) for node in nodes if self.flow.made_of.get(node, {node}))

    def _span(self, node: str) -> Span:
        if own := self.flow.made_of.get(node) or self._own.get(node):
            return Span(own, own, is_own=True)
        return Span(self._before[node].parameters, self._after.get(node, _NOTHING).parameters)

    def _computed(self, number: int) -> Set[str]:
        """The nodes that a generated kernel computes, perhaps with some of the generated kernels around it; none if it
        is unknown what is in a buffer."""
        kernels = self.source.kernels
        results, unknown = self._nodes_written(kernels[number].writes)
        read: set[str] = set()
        for later in kernels[number + 1 :] if unknown else ():
            if not unknown.isdisjoint(later.reads):
                read |= later.reads
                nodes, buffers = self._nodes_written(later.writes)
                results |= nodes
                unknown |= buffers
                if later.is_library:
                    return set()
        if not unknown <= read:
            return set()
        reads = {self._node_of[name] for name in kernels[number].reads if name in self._node_of} - results
        inside: set[str] = set()
        waiting = [*results]
        while waiting and len(inside) <= _MOST_NODES:
            node = waiting.pop()
            is_inside = node not in reads and node in self.flow.text.reads and node not in self.flow.calls
            if is_inside and node not in inside:
                inside.add(node)
                waiting.extend(self.flow.text.reads[node])
        return inside if len(inside) <= _MOST_NODES else set()

    def _nodes_written(self, writes: Set[str]) -> tuple[set[str], set[str]]:
        """The nodes of some buffers, and the buffers of which they are unknown."""
        unknown = {name for name in writes if name not in self._node_of}
        return {self._node_of[name] for name in writes - unknown}, unknown
