"""What the values of a compiled graph are made of: of which parameters, of gradients, of the results of library calls.

The graph is the text that Inductor keeps of its nodes; which of them are calls of libraries follows from its source.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set

from torchprof.measure.flops.graph_text import GraphOp, GraphTensor, GraphText
from torchprof.record.compiled.fx_nodes import plain_kernel_name
from torchprof.record.compiled.graph_source import TANGENTS, GraphSource, SourceKernel
from torchprof.record.compiled.kept_graph import KeptGraph
from torchprof.run.torch_names import PRODUCTS_AND_SUMS, VIEWS, aten

_KEEP_GRADIENTS = VIEWS | aten("_to_copy add clone copy mul neg")
_KEEP_GRADIENTS |= {"prims::convert_element_type", "prims::inductor_force_stride_order"}
"""Operators after which the gradient of a parameter is still one: in another type or layout, in a sum, scaled."""
_SAME_KERNELS = {"bias_addmm": "addmm"}
"""Kernels of Inductor's with another name than their operator (``torch/_inductor/kernel/mm.py``)."""


class GraphFlow:
    """The values of a graph by the names of their nodes.

    ``made_of``: a value that is computed of parameters alone → these; of none for numbers and constants. ``forward``:
    the flow of the graph whose backward this is; its results have the same names here.
    """

    def __init__(self, graph: KeptGraph, forward: GraphFlow | None = None) -> None:
        self.text = text = graph.text
        self.node_of = _nodes_of(graph.source, text)
        parameters = graph.roots if forward is None else ()
        self.made_of: dict[str, frozenset[str]] = {name: frozenset([name]) for name in parameters}
        for name, value in text.inputs.items():
            if not isinstance(value, GraphTensor):
                self.made_of[name] = frozenset()
            elif forward is not None and name in forward.made_of:
                self.made_of[name] = forward.made_of[name]
        self.of_gradients = {name for name in text.inputs if name.startswith(TANGENTS)}
        self._forward = forward
        self.calls = {op.node: op for op in self.node_of.values()}
        self._results: dict[str, frozenset[str]] = {}  # a value that is the result of calls, or has it as a term
        self._follow()
        self.operands = frozenset().union(*(self.reads(op) for op in self.node_of.values()))
        """The parameters that calls of libraries read."""
        self.gradients: defaultdict[str, set[str]] = defaultdict(set)
        """The parameters whose gradient a call computes, by its node."""
        for (name, _), of in zip(text.outputs, () if forward is None else forward.text.inputs):
            for call in self._results.get(name, ()) if forward and of in forward.operands else ():
                self.gradients[call].add(of)

    def _follow(self) -> None:
        """Find for each node what it is made of."""
        ops = {op.node: op for op in self.text.ops}
        base_of: dict[str, str] = {}  # a view → the tensor that it shows
        views: defaultdict[str, set[str]] = defaultdict(set)  # the other way round
        for name, reads in self.text.reads.items():
            op = ops.get(name)
            first = op.given[0] if op is not None and op.given else ""
            first = base_of.get(first, first)
            if op is not None and op.name in VIEWS:
                base_of[name] = first
                views[first].add(name)
            if not reads.isdisjoint(self.of_gradients):
                self.of_gradients.add(name)
                if op is not None and op.name.endswith("_"):  # in place: all that shows this memory changes
                    self.of_gradients |= {first, *views[first]}
            if name in self.calls:  # a product may add its first argument: the sum of two gradients
                added = first if op is not None and op.name in PRODUCTS_AND_SUMS else ""
                self._results[name] = self._results.get(added, frozenset()) | {name}
                continue
            if all(read in self.made_of for read in reads) and name not in self.made_of:
                self.made_of[name] = frozenset().union(*(self.made_of[read] for read in reads))
            of_calls = [self._results[read] for read in reads if read in self._results]
            others = [read for read in reads if read not in self._results and read not in self.made_of]
            is_sum = op is not None and op.name == "aten::add"  # a gradient in a sum of gradients is one, too
            if of_calls and (op is None or op.name in _KEEP_GRADIENTS) and (is_sum or not others):
                self._results[name] = frozenset().union(*of_calls)

    def reads(self, op: GraphOp) -> frozenset[str]:
        """The parameters that a call reads, also in another type or layout."""
        return frozenset().union(*(self.made_of.get(name, frozenset()) for name in op.given))

    def works_for(self, op: GraphOp) -> frozenset[str]:
        """The parameters that a call works for: those that it reads, else those whose gradients it computes.

        The gradient of a parameter that is added to the input of a layer is computed by that layer. Only a call whose
        forward multiplies two parameters reads one and computes the gradient of the other.
        """
        reads, gradients = self.reads(op), frozenset(self.gradients.get(op.node, ()))
        if not reads or not gradients or self._forward is None:
            return reads or gradients
        both = reads | gradients
        multiplied = (self._forward.reads(other) for other in self._forward.node_of.values())
        return both if any(both <= of_call for of_call in multiplied) else reads

    def is_recomputed(self, op: GraphOp) -> bool:
        """Whether a call in a backward repeats one of its forward."""
        if self._forward is None or op.node in self.of_gradients:
            return False
        return any(op.is_like(other) for other in self._forward.node_of.values())


def _nodes_of(source: GraphSource, text: GraphText) -> dict[int, GraphOp]:
    """The node of each library call, by the number of the kernel.

    Of each operator, the calls in the order of their buffers are the nodes in the order of the text. Nodes that are
    functions of Inductor's own do not tell their operator: they count where nodes are missing. If the counts still
    differ, or if a call reads an input of the graph that its node does not read, only those are known that alone read
    an input.
    """
    inputs = _inputs_of(text)
    calls: defaultdict[str, list[tuple[int, SourceKernel]]] = defaultdict(list)
    for index, kernel in enumerate(source.kernels):
        if kernel.name and kernel.is_library:
            name = plain_kernel_name(kernel.name)
            calls[_SAME_KERNELS.get(name, name)].append((index, kernel))
    ops: dict[int, GraphOp] = {}
    given = frozenset(source.inputs)
    for name, of_name in calls.items():
        alike = of_operator = [op for op in text.ops if op.name.rpartition("::")[2] == name]
        if len(alike) < len(of_name):
            alike = [op for op in text.ops if op.name.rpartition("::")[2] in (name, "")]
        if len(alike) == 1 or all(kernel.number is not None for _, kernel in of_name):
            of_name = sorted(of_name, key=lambda call: call[1].number or 0)
        else:
            alike = []
        pairs = [(index, kernel.reads & given, op) for (index, kernel), op in zip(of_name, alike)]
        if len(alike) == len(of_name) and all(reads <= inputs[op.node] for _, reads, op in pairs):
            ops.update({index: op for index, _, op in pairs})
            continue
        for index, kernel in of_name:
            reads = kernel.reads & given
            same = [op for op in of_operator if reads and reads <= inputs[op.node]]
            others = [other for _, other in of_name if reads <= other.reads]
            if len(same) == len(others) == 1:
                ops[index] = same[0]
    return ops


def _inputs_of(text: GraphText) -> Mapping[str, Set[str]]:
    """The inputs of the graph that each node reads, also as views."""
    ops = {op.node: op for op in text.ops}
    shown: dict[str, Set[str]] = {name: {name} for name in text.inputs}
    made_of: dict[str, Set[str]] = {}
    for name, reads in text.reads.items():
        made_of[name] = _union(shown.get(read, frozenset()) for read in reads)
        if name in ops and ops[name].name in VIEWS:
            shown[name] = made_of[name]
    return made_of


def _union(sets: Iterable[Set[str]]) -> Set[str]:
    return {name for each in sets for name in each}
