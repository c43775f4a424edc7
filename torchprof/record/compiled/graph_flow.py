"""The parameters that the kernels of a compiled graph work for, without knowledge of how it was compiled.

A graph of Inductor keeps its source and the text of its nodes, and it is called with the parameters themselves. A call
of a library that reads a parameter, or that computes the gradient of one, is work for the module that has it.

A kernel that works for no parameter alone lies between layers. What a graph computes between two layers ran in the
module around both, or in a module inside that. The last layer before a value in the text counts, and the first after.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import CompiledKernel, Span, TracedModule
from torchprof.measure.flops.graphs import GraphNode, GraphTensor, GraphText, GraphValue
from torchprof.record.compiled.kept_graph import TANGENTS, GraphSource, KeptGraph, SourceKernel, plain_kernel_name
from torchprof.run.torch_names import PRODUCTS_AND_SUMS, VIEWS, aten
from torchprof.run.words import IN_CPP

_KEEP_GRADIENTS = VIEWS | aten("_to_copy add clone copy mul neg")
_KEEP_GRADIENTS |= {"prims::convert_element_type", "prims::inductor_force_stride_order"}
"""Operators after which the gradient of a parameter is still one: in another type or layout, in a sum, scaled."""
_SAME_KERNELS = {"bias_addmm": "addmm"}
"""Kernels of Inductor's with another name than their operator (``torch/_inductor/kernel/mm.py``)."""
_IN_CPP = "aoti_torch_"
"""What the source of a graph contains that was made with ``torch._inductor.config.cpp_wrapper``."""
_Kernels = dict[str, "tuple[CompiledKernel, ...] | str"]
_MOST_NODES = 500
"""Of more nodes in one kernel nothing is known: it is not between layers, and the search would take long."""


def kernels_by_parameters(called: Mapping[str, KeptGraph], why_unknown: str) -> tuple[_Kernels, set[str]]:
    """The kernels of all graphs that were called, by key, or the reason if they are unknown; and the keys of graphs in
    which some kernels have no events. ``why_unknown``: why the modules of the others are, see ``CompiledGraphs``."""
    graphs = {key: graph for key, graph in called.items() if graph.is_readable}
    kernels: _Kernels = {key: IN_CPP for key, graph in called.items() if _IN_CPP in graph.code}
    hiding: set[str] = set()
    forwards = {key: GraphFlow(graph) for key, graph in graphs.items() if not graph.source.is_backward}
    for key, graph in graphs.items():
        if any(kernel.name and not kernel.has_event for kernel in graph.source.kernels):
            hiding.add(key)
        if not graph.source.is_backward:
            if graph.roots:
                kernels[key] = tuple(_kernels(forwards[key], graph.roots, why_unknown))
            continue
        fitting = {
            tuple(_kernels(GraphFlow(graph, forward), graphs[other].roots, why_unknown))
            for other, forward in forwards.items()
            if graphs[other].roots and _saves_for(graphs[other].text, graph.text)
        }
        if len(fitting) == 1:
            kernels[key] = fitting.pop()
    return kernels, hiding


def _saves_for(forward: GraphText, backward: GraphText) -> bool:
    """Whether a backward takes what a forward returns last, and returns gradients of its inputs, by types and sizes."""
    saved = [(name, value) for name, value in backward.inputs.items() if not name.startswith(TANGENTS)]
    saved.sort(key=lambda pair: not isinstance(pair[1], GraphTensor))  # a forward returns numbers last
    returned = forward.outputs[len(forward.outputs) - len(saved) :]
    if [name for name, _ in saved] != [name for name, _ in returned] or len(backward.outputs) != len(forward.inputs):
        return False
    pairs = [(value, other) for (_, value), (_, other) in zip(saved, returned)]
    pairs += [(value, other) for (name, value), other in zip(backward.outputs, forward.inputs.values()) if name]
    return all(_may_be_equal(first, other) for first, other in pairs)


def _may_be_equal(first: GraphValue, other: GraphValue) -> bool:
    """Whether two values of graphs have the same type and sizes, as far as these are numbers."""
    if not isinstance(first, GraphTensor) or not isinstance(other, GraphTensor):
        return isinstance(first, GraphTensor) is isinstance(other, GraphTensor)
    if (first.dtype, len(first.sizes)) != (other.dtype, len(other.sizes)):
        return False
    return all(
        ours.value == theirs.value
        for ours, theirs in zip(first.sizes, other.sizes)
        if isinstance(ours, ast.Constant) and isinstance(theirs, ast.Constant)
    )


def _kernels(flow: GraphFlow, roots: Mapping[str, str], why_unknown: str) -> Iterator[CompiledKernel]:
    """The kernels of a graph that have events. A call of a library has the parameters that it works for as owners; of
    any other kernel it is known which layers work before and after it. ``roots``: of the parameters."""

    def roots_of(names: Set[str]) -> frozenset[str]:
        return frozenset(roots[name] for name in names)

    repeated = roots_of(flow.repeated)
    for index, kernel in enumerate(flow.source.kernels):
        if kernel.name and kernel.has_event:
            op = flow.node_of.get(index)
            names = frozenset() if op is None else flow.works_for(op)
            owners = [(TracedModule(roots[name], (), ""),) for name in sorted(names)]
            between = frozenset() if names else flow.of_kernel(index)
            yield CompiledKernel(
                plain_kernel_name(kernel.name),
                tuple(owners) or (None,),
                op is not None and flow.is_recomputed(op),
                why_unknown=why_unknown,
                repeated=repeated,
                between=frozenset(Span(roots_of(before), roots_of(after), is_own) for before, after, is_own in between),
            )


class _Work(NamedTuple):
    """Work for parameters: the number of its node in the order of the text, and the parameters."""

    number: int
    parameters: frozenset[str]


_NOTHING = _Work(-1, frozenset())


class GraphFlow:
    """The values of a graph by the names of their nodes, and for each the parameters of the layers that work before and
    after it.

    ``made_of``: a value that is computed of parameters alone → these; of none for numbers and constants. ``node_of``:
    the node of each library call, by the number of the kernel. ``operands``: the parameters that calls of libraries
    read. ``gradients``: those whose gradient a call computes, by its node. ``repeated``: those that several nodes of
    the forward work for: their layers may be called several times. ``forward``: the flow of the graph whose backward
    this is; its results have the same names here.
    """

    def __init__(self, graph: KeptGraph, forward: GraphFlow | None = None) -> None:
        self.source, self.text = graph.source, graph.text
        self.node_of = _nodes_of(self.source, self.text)
        parameters = graph.roots if forward is None else ()
        self.made_of: dict[str, frozenset[str]] = {name: frozenset([name]) for name in parameters}
        for name, value in self.text.inputs.items():
            if not isinstance(value, GraphTensor):
                self.made_of[name] = frozenset()
            elif forward is not None and name in forward.made_of:
                self.made_of[name] = forward.made_of[name]
        self.of_gradients = {name for name in self.text.inputs if name.startswith(TANGENTS)}
        self._forward = forward
        self.calls = {node.name: node for node in self.node_of.values()}
        results = self._follow()
        self.operands = frozenset().union(*map(self.reads, self.calls.values()))
        self.gradients: defaultdict[str, set[str]] = defaultdict(set)
        if forward is not None:
            for (name, _), parameter in zip(self.text.outputs, forward.text.inputs):
                for call in results.get(name, ()) if parameter in forward.operands else ():
                    self.gradients[call].add(parameter)
        self._look_around()
        self._in_buffer = self._nodes_in_buffers()
        uses = Counter(name for own in self._own.values() for name in own.parameters)
        used_again = frozenset(name for name in uses if uses[name] > 1)
        self.repeated: frozenset[str] = used_again if forward is None else forward.repeated

    def _follow(self) -> dict[str, frozenset[str]]:
        """Find what each node is made of. The calls by the values that are their results, or have them as a term."""
        results: dict[str, frozenset[str]] = {}
        base_of: dict[str, str] = {}  # a view → the tensor that it shows
        views: defaultdict[str, set[str]] = defaultdict(set)  # the other way round
        for name, node in self.text.nodes.items():
            reads = node.reads
            first = node.given[0] if node.given else ""
            first = base_of.get(first, first)
            if node.operator in VIEWS:
                base_of[name] = first
                views[first].add(name)
            if not reads.isdisjoint(self.of_gradients):
                self.of_gradients.add(name)
                if node.operator.endswith("_"):  # in place: all that shows this memory changes
                    self.of_gradients |= {first, *views[first]}
            if name in self.calls:  # a product may add its first argument: the sum of two gradients
                added = first if node.operator in PRODUCTS_AND_SUMS else ""
                results[name] = results.get(added, frozenset()) | {name}
                continue
            if all(read in self.made_of for read in reads) and name not in self.made_of:
                self.made_of[name] = frozenset().union(*(self.made_of[read] for read in reads))
            of_calls = [results[read] for read in reads if read in results]
            others = [read for read in reads if read not in results and read not in self.made_of]
            is_sum = node.operator == "aten::add"  # a gradient in a sum of gradients is one, too
            if of_calls and (node.operator in _KEEP_GRADIENTS or not node.is_call) and (is_sum or not others):
                results[name] = frozenset().union(*of_calls)
        return results

    def _look_around(self) -> None:
        """Find for each node the last work for parameters before it, and the first after it."""
        # What a backward computes again of the forward does not tell where the gradients after it are computed.
        reads_of = {
            name: node.reads & self.of_gradients if name in self.of_gradients else node.reads
            for name, node in self.text.nodes.items()
        }
        self._own = {
            name: _Work(number, parameters)
            for number, (name, node) in enumerate(self.text.nodes.items())
            if (parameters := self._parameters_of(node))
        }
        self._before: dict[str, _Work] = {}
        for name, reads in reads_of.items():
            last = (self._own.get(read) or self._before.get(read, _NOTHING) for read in reads)
            self._before[name] = max(last, key=lambda work: (bool(work.parameters), work.number), default=_NOTHING)
        self._after: dict[str, _Work] = {}
        for name, reads in reversed(reads_of.items()):
            work = self._own.get(name) or self._after.get(name, _NOTHING)
            for read in reads if work.parameters else ():
                self._after[read] = min(work, self._after.get(read, work), key=lambda known: known.number)

    def reads(self, node: GraphNode) -> frozenset[str]:
        """The parameters that a call reads, also in another type or layout."""
        return frozenset().union(*(self.made_of.get(name, frozenset()) for name in node.given))

    def works_for(self, node: GraphNode) -> frozenset[str]:
        """The parameters that a call works for: those that it reads, else those whose gradients it computes.

        The gradient of a parameter that is added to the input of a layer is computed by that layer. Only a call whose
        forward multiplies two parameters reads one and computes the gradient of the other.
        """
        reads, gradients = self.reads(node), frozenset(self.gradients.get(node.name, ()))
        if not reads or not gradients or self._forward is None:
            return reads or gradients
        both = reads | gradients
        return both if any(both <= self._forward.reads(call) for call in self._forward.calls.values()) else reads

    def is_recomputed(self, node: GraphNode) -> bool:
        """Whether a call in a backward repeats one of its forward."""
        if self._forward is None or node.name in self.of_gradients:
            return False
        return any(map(node.is_like, self._forward.calls.values()))

    def _parameters_of(self, node: GraphNode) -> frozenset[str]:
        """The parameters that a node works for or reads directly."""
        if node.name in self.made_of:
            return frozenset()
        if node.name in self.calls:
            return self.works_for(node)
        return frozenset().union(*(self.made_of.get(read, ()) for read in node.reads))

    def _nodes_in_buffers(self) -> Mapping[str, str]:
        """The nodes of buffers, as far as they are arguments or results of library calls, or outputs of the graph. Of
        an input that a kernel may write to, it is what is written."""
        names = {name: name for name in self.source.inputs}
        for node in self.text.nodes.values():
            if node.operator == "aten::copy_" and len(node.given) > 1:
                names[node.given[0]] = node.given[1]
        for index, node in self.node_of.items():
            kernel = self.source.kernels[index]
            names.update(dict.fromkeys(kernel.writes, node.name) if kernel.number is not None else {})
            for name, given in zip(kernel.given, node.given) if len(kernel.given) == len(node.given) else ():
                names.setdefault(name, given)
        for name, (returned, _) in zip(self.source.returned, self.text.outputs):
            if name and returned:
                names.setdefault(name, returned)
        return names

    def of_kernel(self, number: int) -> frozenset[Span]:
        """Of what a kernel computes, the parameters of the layers before and after, by name; empty if that is unknown.
        If it is unknown which values are in a buffer, those count that are computed from it."""
        kernel = self.source.kernels[number]
        node = self.node_of.get(number)
        nodes = {node.name} if node is not None else self._computed(number)
        if not kernel.name or not nodes:
            return frozenset()
        return frozenset(self._span(node) for node in nodes if self.made_of.get(node, {node}))

    def _span(self, node: str) -> Span:
        own = self.made_of.get(node) or self._own.get(node, _NOTHING).parameters
        if own:
            return Span(own, own, is_own=True)
        return Span(self._before[node].parameters, self._after.get(node, _NOTHING).parameters)

    def _computed(self, number: int) -> Set[str]:
        """The nodes that a generated kernel computes, perhaps with some of the kernels around it; none if unknown."""
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
        reads = {self._in_buffer[name] for name in kernels[number].reads if name in self._in_buffer} - results
        inside: set[str] = set()
        waiting = [*results]
        while waiting and len(inside) <= _MOST_NODES:
            node = waiting.pop()
            is_inside = node not in reads and node in self.text.nodes and node not in self.calls
            if is_inside and node not in inside:
                inside.add(node)
                waiting.extend(self.text.nodes[node].reads)
        return inside if len(inside) <= _MOST_NODES else set()

    def _nodes_written(self, writes: Set[str]) -> tuple[set[str], set[str]]:
        """The nodes of some buffers, and the buffers of which they are unknown."""
        unknown = {name for name in writes if name not in self._in_buffer}
        return {self._in_buffer[name] for name in writes - unknown}, unknown


def _nodes_of(source: GraphSource, text: GraphText) -> dict[int, GraphNode]:
    """The node of each library call, by the number of the kernel.

    Of each operator, the calls in the order of their buffers are the nodes in the order of the text. Nodes that are
    functions of Inductor's own do not tell their operator: they count where nodes are missing. If the counts still
    differ, or if a call reads an input that its node does not read, only those are known that alone read an input.
    """
    inputs = _inputs_of(text)
    calls: defaultdict[str, list[tuple[int, SourceKernel]]] = defaultdict(list)
    for index, kernel in enumerate(source.kernels):
        if kernel.name and kernel.is_library:
            name = plain_kernel_name(kernel.name)
            calls[_SAME_KERNELS.get(name, name)].append((index, kernel))
    called = [node for node in text.nodes.values() if node.is_call]
    nodes: dict[int, GraphNode] = {}
    given = frozenset(source.inputs)
    for name, of_name in calls.items():
        alike = of_operator = [node for node in called if node.operator.rpartition("::")[2] == name]
        if len(alike) < len(of_name):
            alike = [node for node in called if node.operator.rpartition("::")[2] in (name, "")]
        if len(alike) == 1 or all(kernel.number is not None for _, kernel in of_name):
            of_name = sorted(of_name, key=lambda call: call[1].number or 0)
        else:
            alike = []
        pairs = [(index, kernel.reads & given, node) for (index, kernel), node in zip(of_name, alike)]
        if len(alike) == len(of_name) and all(reads <= inputs[node.name] for _, reads, node in pairs):
            nodes.update({index: node for index, _, node in pairs})
            continue
        for index, kernel in of_name:
            reads = kernel.reads & given
            same = [node for node in of_operator if reads and reads <= inputs[node.name]]
            others = [other for _, other in of_name if reads <= other.reads]
            if len(same) == len(others) == 1:
                nodes[index] = same[0]
    return nodes


def _inputs_of(text: GraphText) -> Mapping[str, Set[str]]:
    """The inputs of the graph that each node reads, also as views."""
    shown: dict[str, Set[str]] = {name: {name} for name in text.inputs}
    inputs: dict[str, Set[str]] = {}
    for name, node in text.nodes.items():
        inputs[name] = {given for read in node.reads for given in shown.get(read, ())}
        if node.operator in VIEWS:
            shown[name] = inputs[name]
    return inputs
