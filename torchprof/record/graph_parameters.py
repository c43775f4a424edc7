"""The parameters that the kernels of a compiled graph work for, without knowledge of how it was compiled.

A graph of Inductor keeps its source and the text of its nodes, and it is called with the parameters themselves. A call
of a library that reads a parameter, or that computes the gradient of one, is work for the module that has it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any, NamedTuple

from torch import nn

from torchprof.attribute.compiled_graphs import FROZEN, CompiledKernel, OwnedWork, Span, TracedModule
from torchprof.measure.flops.graph_text import GraphTensor, GraphText, read_graph
from torchprof.record.dynamo_sources import Taken
from torchprof.record.graph_flow import GraphFlow
from torchprof.record.graph_nodes import plain_kernel_name
from torchprof.record.graph_source import TANGENTS, GraphSource, read_source
from torchprof.record.graph_spans import GraphSpans
from torchprof.record.noted_calls import NotedCalls
from torchprof.run.words import IN_CPP

_IN_CPP = "aoti_torch_"
"""What the source of a graph contains that was made with ``torch._inductor.config.cpp_wrapper``."""
_FROZEN = re.compile(r"(\w+): \"[^\"]*\" = self\.(_frozen_param\d+)")
"""The line of a tensor that is a part of the graph, with ``torch._inductor.config.freezing``: its node, its name."""


class _Called(NamedTuple):
    """A graph that was called: its source, its text, its inputs that are parameters, and by node the names of the
    tensors that are parts of it. These follow the inputs in ``taken``."""

    source: str
    text: str
    taken: tuple[Taken, ...]
    frozen: Mapping[str, str]


class _Graph(NamedTuple):
    source: GraphSource
    text: GraphText
    roots: dict[str, str]  # by the name of an input that is a parameter: its root, see ``TracedModule``


class GraphParameters:
    """The graphs that were called, and with which parameters.

    A call only notes the parameters: the graphs are read when their kernels are asked for. The backward of a graph gets
    the number of its forward's call from the events: both have the same sequence number.
    """

    def __init__(self) -> None:
        self._called: dict[str, _Called | None] = {}  # by key; None: it does not keep its source and text

    def number_of(self, key: str, graph: Any, inputs: Sequence[Any], calls: NotedCalls) -> int | None:
        """The number of a call; None if the graph takes no parameters, or is a backward."""
        if key not in self._called:
            self._called[key] = _called(graph, inputs)
        known = self._called[key]
        if known is None or not known.taken:
            return None
        try:
            return calls.number_of(known.taken, [*inputs, *_frozen(graph, known.frozen)] if known.frozen else inputs)
        except (IndexError, TypeError):  # not the inputs of the first call
            return None

    def __bool__(self) -> bool:
        return any(one is not None and one.taken for one in self._called.values())

    def known(self, why_unknown: str) -> KnownGraphs:
        """What is known of all graphs that were called. ``why_unknown``: why the modules of the others are unknown."""
        graphs = {key: graph for key, one in self._called.items() if one and (graph := _read(one)) is not None}
        in_cpp: dict[str, tuple[CompiledKernel, ...] | str] = {
            key: IN_CPP for key, one in self._called.items() if one and _IN_CPP in one.source
        }
        forwards = {
            key: GraphSpans(graph.source, GraphFlow(graph.source, graph.text, {*graph.roots}))
            for key, graph in graphs.items()
            if not graph.source.is_backward
        }
        found = KnownGraphs(in_cpp, set())
        for key, graph in graphs.items():
            if any(one.name and not one.has_event for one in graph.source.kernels):
                found.hiding.add(key)
            if not graph.source.is_backward:
                if graph.roots:
                    found.kernels[key] = tuple(_kernels(graph, forwards[key], graph.roots, why_unknown))
                continue
            fitting = {
                tuple(_kernels(graph, _backward(graph, forward), graphs[other].roots, why_unknown))
                for other, forward in forwards.items()
                if graphs[other].roots and _saves_for(graphs[other].text, graph.text)
            }
            if len(fitting) == 1:
                found.kernels[key] = fitting.pop()
        return found


class KnownGraphs(NamedTuple):
    """What is known of graphs by their parameters. ``kernels``: by key; the reason if they are unknown. ``hiding``: see
    ``CompiledGraphs``."""

    kernels: dict[str, tuple[CompiledKernel, ...] | str]
    hiding: set[str]


def _called(graph: Any, inputs: Sequence[Any]) -> _Called | None:
    """What a graph keeps of itself, and which of its inputs are parameters; None if it keeps nothing."""
    source, text = (getattr(graph, name, None) for name in ("source_code", "inductor_post_grad_graph_str"))
    if not isinstance(source, str) or not isinstance(text, str):
        return None
    given = () if TANGENTS in text else inputs  # a backward's parameters are those of its forward
    taken = [Taken(at, f"input {at}", ()) for at, one in enumerate(given) if isinstance(one, nn.Parameter)]
    frozen = dict(_FROZEN.findall(text))
    taken += [Taken(len(inputs) + at, f"{FROZEN}{node}", ()) for at, node in enumerate(frozen)]
    return _Called(source, text, tuple(taken), frozen)


def _frozen(graph: Any, names: Mapping[str, str]) -> list[Any]:
    """The tensors with these names in the module with the code of a graph; None for one that it does not have."""
    code = getattr(graph, "current_callable", None)
    of_module = getattr(getattr(code, "__func__", code), "__globals__", {})
    return [of_module.get(name) for name in names.values()]


def _read(called: _Called) -> _Graph | None:
    """A graph that was called; None if it cannot be read."""
    try:
        source, text = read_source(called.source), read_graph(called.text)
    except ValueError:
        return None
    names = [*source.inputs, *called.frozen]
    if source.inputs != tuple(text.inputs) or any(one.number >= len(names) for one in called.taken):
        return None
    return _Graph(source, text, {names[one.number]: one.root for one in called.taken})


def _saves_for(forward: GraphText, backward: GraphText) -> bool:
    """Whether a backward takes what a forward returns last, by name, type and sizes, and returns gradients of its
    inputs, by type and sizes."""
    saved = [(name, value) for name, value in backward.inputs.items() if not name.startswith(TANGENTS)]
    saved.sort(key=lambda one: not isinstance(one[1], GraphTensor))  # a forward returns numbers last
    returned = forward.outputs[len(forward.outputs) - len(saved) :]
    if [name for name, _ in saved] != [name for name, _ in returned] or len(backward.outputs) != len(forward.inputs):
        return False
    pairs = [(value, other) for (_, value), (_, other) in zip(saved, returned)]
    pairs += [(value, other) for (name, value), other in zip(backward.outputs, forward.inputs.values()) if name]
    return all(_may_be_equal(one, other) for one, other in pairs)


def _may_be_equal(one: GraphTensor | ast.expr | None, other: GraphTensor | ast.expr | None) -> bool:
    """Whether two values of graphs have the same type and sizes, as far as these are numbers."""
    if not isinstance(one, GraphTensor) or not isinstance(other, GraphTensor):
        return isinstance(one, GraphTensor) is isinstance(other, GraphTensor)
    if (one.dtype, len(one.sizes)) != (other.dtype, len(other.sizes)):
        return False
    sizes = [(ours, theirs) for ours, theirs in zip(one.sizes, other.sizes)]
    return all(
        ours.value == theirs.value
        for ours, theirs in sizes
        if isinstance(ours, ast.Constant) and isinstance(theirs, ast.Constant)
    )


def _backward(graph: _Graph, forward: GraphSpans) -> GraphSpans:
    return GraphSpans(graph.source, GraphFlow(graph.source, graph.text, set(), forward.flow), forward)


def _kernels(graph: _Graph, spans: GraphSpans, roots: Mapping[str, str], why_unknown: str) -> Iterator[CompiledKernel]:
    """The kernels of a graph that have events. A call of a library has the parameters that it works for as owners; of
    any other kernel it is known which layers work before and after it. ``roots``: of the parameters."""
    flow = spans.flow
    repeated = _roots(spans.repeated, roots)
    for at, kernel in enumerate(graph.source.kernels):
        if kernel.name and kernel.has_event:
            op = flow.node_of.get(at)
            names = frozenset() if op is None else flow.works_for(op)
            parts = [OwnedWork((TracedModule(roots[name], (), ""),), 0) for name in sorted(names)]
            between = frozenset() if names else spans.of_kernel(at)
            yield CompiledKernel(
                plain_kernel_name(kernel.name),
                tuple(parts) or (OwnedWork(None, 0),),
                op is not None and flow.is_recomputed(op),
                why_unknown=why_unknown,
                repeated=repeated,
                between=frozenset(
                    Span(_roots(before, roots), _roots(after, roots), is_own) for before, after, is_own in between
                ),
            )


def _roots(names: Set[str], roots: Mapping[str, str]) -> frozenset[str]:
    return frozenset(roots[name] for name in names)
