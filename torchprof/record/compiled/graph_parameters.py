"""The parameters that the kernels of a compiled graph work for, without knowledge of how it was compiled.

A graph of Inductor keeps its source and the text of its nodes, and it is called with the parameters themselves. A call
of a library that reads a parameter, or that computes the gradient of one, is work for the module that has it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Set

from torchprof.attribute.compiled_graphs import CompiledKernel, Span, TracedModule
from torchprof.measure.flops.graph_text import GraphTensor, GraphText, GraphValue
from torchprof.record.compiled.fx_nodes import plain_kernel_name
from torchprof.record.compiled.graph_flow import GraphSpans
from torchprof.record.compiled.kept_graph import TANGENTS, KeptGraph
from torchprof.run.words import IN_CPP

_IN_CPP = "aoti_torch_"
"""What the source of a graph contains that was made with ``torch._inductor.config.cpp_wrapper``."""
_Kernels = dict[str, "tuple[CompiledKernel, ...] | str"]


def kernels_by_parameters(called: Mapping[str, KeptGraph], why_unknown: str) -> tuple[_Kernels, set[str]]:
    """The kernels of all graphs that were called, by key; the reason if they are unknown. And the keys of graphs in
    which some kernels have no events, see ``CompiledGraphs``. ``why_unknown``: why the modules of the others are
    unknown."""
    graphs = {key: graph for key, graph in called.items() if graph.is_readable}
    kernels: _Kernels = {key: IN_CPP for key, graph in called.items() if _IN_CPP in graph.code}
    hiding: set[str] = set()
    forwards = {key: GraphSpans(graph) for key, graph in graphs.items() if not graph.source.is_backward}
    for key, graph in graphs.items():
        if any(kernel.name and not kernel.has_event for kernel in graph.source.kernels):
            hiding.add(key)
        if not graph.source.is_backward:
            if graph.roots:
                kernels[key] = tuple(_kernels(forwards[key], graph.roots, why_unknown))
            continue
        fitting = {
            tuple(_kernels(GraphSpans(graph, forward), graphs[other].roots, why_unknown))
            for other, forward in forwards.items()
            if graphs[other].roots and _saves_for(graphs[other].text, graph.text)
        }
        if len(fitting) == 1:
            kernels[key] = fitting.pop()
    return kernels, hiding


def _saves_for(forward: GraphText, backward: GraphText) -> bool:
    """Whether a backward takes what a forward returns last, by name, type and sizes, and returns gradients of its
    inputs, by type and sizes."""
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
    sizes = [(ours, theirs) for ours, theirs in zip(first.sizes, other.sizes)]
    return all(
        ours.value == theirs.value
        for ours, theirs in sizes
        if isinstance(ours, ast.Constant) and isinstance(theirs, ast.Constant)
    )


def _kernels(spans: GraphSpans, roots: Mapping[str, str], why_unknown: str) -> Iterator[CompiledKernel]:
    """The kernels of a graph that have events. A call of a library has the parameters that it works for as owners; of
    any other kernel it is known which layers work before and after it. ``roots``: of the parameters."""
    repeated = _roots(spans.repeated, roots)
    for index, kernel in enumerate(spans.source.kernels):
        if kernel.name and kernel.has_event:
            op = spans.node_of.get(index)
            names = frozenset() if op is None else spans.works_for(op)
            owners = [(TracedModule(roots[name], (), ""),) for name in sorted(names)]
            between = frozenset() if names else spans.of_kernel(index)
            yield CompiledKernel(
                plain_kernel_name(kernel.name),
                tuple(owners) or (None,),
                op is not None and spans.is_recomputed(op),
                why_unknown=why_unknown,
                repeated=repeated,
                between=frozenset(
                    Span(_roots(before, roots), _roots(after, roots), is_own) for before, after, is_own in between
                ),
            )


def _roots(names: Set[str], roots: Mapping[str, str]) -> frozenset[str]:
    return frozenset(roots[name] for name in names)
