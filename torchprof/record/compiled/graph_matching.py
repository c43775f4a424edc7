"""Which parts of compiled graphs belong together: a call of a library in the source of a graph and a node of its text;
a backward graph and its forward graph. Nothing records either, so they are matched by names, order, types and sizes."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from torchprof.measure.flops.graphs import GraphNode, GraphTensor, GraphText, GraphValue
from torchprof.record.compiled.kept_graph import TANGENTS, GraphSource, SourceKernel, plain_kernel_name
from torchprof.run.torch_names import VIEWS

_SAME_KERNELS = {"bias_addmm": "addmm"}  # a kernel with another name than its operator (torch/_inductor/kernel/mm.py)


class _LibraryCall(NamedTuple):
    """A call of a library: its kernel, and the inputs of the graph that it reads."""

    kernel_index: int
    kernel: SourceKernel
    inputs: frozenset[str]


def nodes_of_calls(source: GraphSource, text: GraphText) -> dict[int, GraphNode]:
    """The node of each library call, by the index of its kernel; without the calls whose nodes are unknown.

    Inductor numbers the buffers of one operator's results in the order of its nodes, but may call in another order::

        text                       source                                       node
        mm   = aten.mm(x, w1)      0: extern_kernels.mm(x, w1, out=buf0)        mm
        mm_1 = aten.mm(mm, w2)     1: extern_kernels.mm(buf0, w3, out=buf2)     mm_2
        mm_2 = aten.mm(mm, w3)     2: extern_kernels.mm(buf0, w2, out=buf1)     mm_1

    If the counts of calls and nodes differ, or if a call reads an input that its node does not read, only those calls
    are known that alone read an input. Above, that would be all three: w1, w2 and w3 have one call each.
    """
    inputs_of = _inputs_of_nodes(text)
    nodes: dict[int, GraphNode] = {}
    for operator, calls in _calls_by_operator(source).items():
        of_operator = candidates = _nodes_named(text, {operator})
        if len(candidates) < len(calls):  # a node that is a function of Inductor's own does not tell its operator
            candidates = _nodes_named(text, {operator, ""})
        if is_ordered := len(candidates) == 1 or all(call.kernel.number is not None for call in calls):
            calls = sorted(calls, key=lambda call: call.kernel.number or 0)
        pairs = [*zip(calls, candidates)]
        is_complete = is_ordered and len(calls) == len(candidates)
        if not is_complete or not all(call.inputs <= inputs_of[node.name] for call, node in pairs):
            pairs = _paired_by_inputs(calls, of_operator, inputs_of)
        nodes.update({call.kernel_index: node for call, node in pairs})
    return nodes


def _inputs_of_nodes(text: GraphText) -> Mapping[str, Set[str]]:
    """The inputs of the graph that each node reads, also as views."""
    shown: dict[str, Set[str]] = {name: {name} for name in text.inputs}
    inputs: dict[str, Set[str]] = {}
    for name, node in text.nodes.items():
        inputs[name] = {given for read in node.reads for given in shown.get(read, ())}
        if node.operator in VIEWS:
            shown[name] = inputs[name]
    return inputs


def _calls_by_operator(source: GraphSource) -> Mapping[str, list[_LibraryCall]]:
    """The calls of libraries in the order of the source, by the name of their operator without its namespace."""
    inputs = frozenset(source.inputs)
    calls: defaultdict[str, list[_LibraryCall]] = defaultdict(list)
    for index, kernel in enumerate(source.kernels):
        if kernel.name and kernel.is_library:
            name = plain_kernel_name(kernel.name)
            calls[_SAME_KERNELS.get(name, name)].append(_LibraryCall(index, kernel, kernel.reads & inputs))
    return calls


def _nodes_named(text: GraphText, operators: Set[str]) -> list[GraphNode]:
    """The nodes that call some operators, named without their namespaces."""
    return [node for node in text.nodes.values() if node.is_call and node.operator.rpartition("::")[2] in operators]


def _paired_by_inputs(
    calls: Sequence[_LibraryCall], nodes: Sequence[GraphNode], inputs_of: Mapping[str, Set[str]]
) -> list[tuple[_LibraryCall, GraphNode]]:
    """The calls with an input that no other call and only one node reads, each with that node."""
    pairs = []
    for call in calls:
        readers = [node for node in nodes if call.inputs and call.inputs <= inputs_of[node.name]]
        rivals = [other for other in calls if call.inputs <= other.inputs]  # and the call itself
        if len(readers) == len(rivals) == 1:
            pairs.append((call, readers[0]))
    return pairs


def saves_for(forward: GraphText, backward: GraphText) -> bool:
    """Whether a backward may be that of a forward: it takes what the forward returns last, and returns a gradient for
    each input of the forward, with the same types and sizes::

        def forward(primals_1, primals_2): …  return (mm, primals_1, relu)
        def backward(primals_1, relu, tangents_1): …  return (gradient of primals_1, gradient of primals_2)
    """
    saved = [(name, value) for name, value in backward.inputs.items() if not name.startswith(TANGENTS)]
    saved.sort(key=lambda pair: not isinstance(pair[1], GraphTensor))  # a forward returns numbers last
    returned = forward.outputs[len(forward.outputs) - len(saved) :]
    if [name for name, _ in saved] != [name for name, _ in returned] or len(backward.outputs) != len(forward.inputs):
        return False
    pairs = [(value, other) for (_, value), (_, other) in zip(saved, returned)]
    pairs += [(gradient, value) for (name, gradient), value in zip(backward.outputs, forward.inputs.values()) if name]
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
