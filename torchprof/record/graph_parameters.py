"""The parameters that the kernels of a compiled graph work for, without knowledge of how it was compiled.

A graph of Inductor keeps its source and the text of its nodes, and it is called with the parameters themselves. A call
of a library that reads a parameter, or that computes the gradient of one, is work for the module that has it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from torchprof.attribute.compiled_graphs import CompiledKernel, OwnedWork, TracedModule
from torchprof.measure.flops.graph_text import GraphTensor, GraphText, read_graph
from torchprof.record.dynamo_sources import Taken
from torchprof.record.graph_nodes import plain_kernel_name
from torchprof.record.graph_source import GraphSource, read_source
from torchprof.record.noted_calls import NotedCalls

_PRODUCTS = frozenset({"mm", "bmm", "mv", "convolution", "convolution_backward", "_scaled_mm", "_int_mm"})
_NAMES_OF_VIEWS = "alias as_strided expand permute reshape select slice split squeeze t transpose unsqueeze view"
_VIEWS = frozenset(f"aten::{name}" for name in _NAMES_OF_VIEWS.split())
_PRODUCTS_AND_SUMS = frozenset({"addmm", "baddbmm", "addmv"})
"""Products that add their first argument."""


class _Called(NamedTuple):
    """A graph that was called: its source, its text, and its inputs that are parameters."""

    source: str
    text: str
    taken: tuple[Taken, ...]


class _Graph(NamedTuple):
    source: GraphSource
    text: GraphText
    parameters: dict[str, Taken]  # by the name of the input


class GraphParameters:
    """The graphs that were called, and with which parameters.

    A call only notes the parameters: the graphs are read when their kernels are asked for.
    """

    def __init__(self) -> None:
        self._called: dict[str, _Called | None] = {}  # by key; None: it does not keep its source and text
        self._numbers: dict[str, set[int]] = {}  # by key: the numbers of its calls

    def number_of(self, key: str, graph: Any, inputs: Sequence[Any], calls: NotedCalls) -> int | None:
        """The number of a call; None if the graph takes no parameters."""
        if key not in self._called:
            self._called[key] = _called(key, graph, inputs)
        known = self._called[key]
        if known is None or not known.taken:
            return None
        try:
            number = calls.number_of(known.taken, inputs)
        except (IndexError, TypeError):  # not the inputs of the first call
            return None
        self._numbers.setdefault(key, set()).add(number)
        return number

    def __bool__(self) -> bool:
        return any(one is not None and one.taken for one in self._called.values())

    def known(self, calls: NotedCalls, why_unknown: str) -> KnownGraphs:
        """What is known of all graphs that were called. ``why_unknown``: why the modules of the others are unknown."""
        graphs = {key: graph for key, one in self._called.items() if one and (graph := _read(one)) is not None}
        found = KnownGraphs({}, set(), {})
        for key, graph in graphs.items():
            if any(one.name and not one.has_event for one in graph.source.kernels):
                found.hiding.add(key)
            if not graph.source.is_backward:
                if graph.parameters:
                    found.kernels[key] = tuple(_kernels(graph, graph, why_unknown))
                continue
            forwards = [
                other
                for other, one in graphs.items()
                if one.parameters and not one.source.is_backward and _saves_for(one.text, graph.text)
            ]
            forwards_of = self._forward_calls(key, graph, {other: graphs[other] for other in forwards}, calls)
            found.same.update({number: known[1] if known else None for number, known in forwards_of.items()})
            keys = {known[0] for known in forwards_of.values() if known} or {*forwards}
            if len(keys) == 1:
                found.kernels[key] = tuple(_kernels(graph, graphs[keys.pop()], why_unknown))
        return found

    def _forward_calls(
        self, key: str, graph: _Graph, forwards: Mapping[str, _Graph], calls: NotedCalls
    ) -> dict[int, tuple[str, int] | None]:
        """For each number of a backward, the key and the number of its forward: the only one with the same parameters;
        None if there are several, or none.

        Tensors that the forward made of parameters, as in another layout, are no parameters here.
        """
        found: dict[int, tuple[str, int] | None] = {}
        for number in self._numbers.get(key, ()):
            given = calls.tensors_of(number)
            by_name = {name: given.get(one.root) for name, one in graph.parameters.items()}
            fitting = []
            for other, forward in forwards.items():
                for of_forward in self._numbers.get(other, ()):
                    tensors = calls.tensors_of(of_forward)
                    named = {name: tensors.get(one.root) for name, one in forward.parameters.items()}
                    if all(one is not None and named.get(name) is one for name, one in by_name.items()):
                        fitting.append((other, of_forward))
            found[number] = fitting[0] if len(fitting) == 1 else None
        return found


class KnownGraphs(NamedTuple):
    """What is known of graphs by their parameters. ``kernels``: by key. ``hiding``: see ``CompiledGraphs``.
    ``same``: for a number of a backward's call, the number of its forward's call; None if that is unknown."""

    kernels: dict[str, tuple[CompiledKernel, ...]]
    hiding: set[str]
    same: dict[int, int | None]


def _called(key: str, graph: Any, inputs: Sequence[Any]) -> _Called | None:
    """What a graph keeps of itself, and which of its inputs are parameters; None if it keeps nothing."""
    source, text = (getattr(graph, name, None) for name in ("source_code", "inductor_post_grad_graph_str"))
    taken = [Taken(at, f"{key}/{at}", ()) for at, one in enumerate(inputs) if isinstance(one, nn.Parameter)]
    if not isinstance(source, str) or not isinstance(text, str):
        return None
    return _Called(source, text, tuple(taken))


def _read(called: _Called) -> _Graph | None:
    """A graph that was called; None if it cannot be read."""
    try:
        source, text = read_source(called.source), read_graph(called.text)
    except ValueError:
        return None
    if source.inputs != tuple(text.inputs) or any(one.number >= len(source.inputs) for one in called.taken):
        return None
    return _Graph(source, text, {source.inputs[one.number]: one for one in called.taken})


def _saves_for(forward: GraphText, backward: GraphText) -> bool:
    """Whether a backward takes what a forward returns last, by name, type and sizes, and returns gradients of its
    inputs, by type and sizes."""
    saved = [(name, value) for name, value in backward.inputs.items() if not name.startswith("tangents_")]
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


def _kernels(graph: _Graph, forward: _Graph, why_unknown: str) -> Iterator[CompiledKernel]:
    """The kernels of a graph, with the parameters that they work for as owners: those that a product reads, and those
    of which it computes the gradient. Of any other kernel nothing is known: it may also do work of others. So may a
    product that adds what is no parameter, such as the other branch of a residual connection, or another gradient.
    """
    parameters = {*forward.parameters}
    gradients: defaultdict[str, set[str]] = defaultdict(set)  # one product may be the gradient of several parameters
    if graph is not forward:
        for name, of in zip(graph.source.returned, forward.source.inputs):
            if name and of in parameters:
                gradients[name].add(of)
    nodes = _nodes(graph.text, parameters)
    node_of = _matched(graph.source, nodes, parameters)
    for at, kernel in enumerate(graph.source.kernels):
        if not kernel.name or not kernel.has_event:
            continue
        name, node = plain_kernel_name(kernel.name), node_of.get(at)
        roots: set[str] = set()
        is_recomputed = graph is not forward and node is not None and not node.takes_gradients
        is_recomputed &= not any(written in gradients for written in kernel.writes)
        is_added = kernel.first in parameters if node is None else node.adds_parameter
        if kernel.is_library and (name in _PRODUCTS or (name in _PRODUCTS_AND_SUMS and is_added)):
            roots = roots.union(*(gradients[written] for written in kernel.writes if written in gradients))
            if node is not None:
                roots |= node.parameters
            elif graph is forward or all(one.takes_gradients for one in nodes if one.op == name):
                roots |= parameters & kernel.reads  # else it may be recomputed
        owners = [(TracedModule(forward.parameters[name].root, (), ""),) for name in sorted(roots)]
        parts = [OwnedWork(owner, 0, 0) for owner in owners]
        yield CompiledKernel(name, tuple(parts) or (OwnedWork(None, 0, 0),), is_recomputed, why_unknown=why_unknown)


class _Node(NamedTuple):
    """A node that calls an operator: its name and settings, the parameters that it reads, as bits the nodes that it
    needs, its own bit, whether it needs the gradients that a backward takes (else it repeats work of the forward), and
    whether its first argument is a parameter."""

    op: str
    settings: tuple[float, ...]
    parameters: frozenset[str]
    needs: int
    bit: int
    takes_gradients: bool
    adds_parameter: bool


def _nodes(text: GraphText, parameters: set[str]) -> list[_Node]:
    """The nodes that call operators."""
    called = {op.node: (bit, op) for bit, op in enumerate(text.ops)}
    needs: dict[str, int] = {}
    of_gradients = {name for name in text.inputs if name.startswith("tangents_")}
    made_of: dict[str, str] = {name: name for name in parameters}  # a tensor made of one parameter alone → it
    found = []
    base_of: dict[str, str] = {}  # a view → the tensor that it shows
    views: defaultdict[str, set[str]] = defaultdict(set)  # the other way round
    for name, reads in text.reads.items():
        needs[name] = 0
        for read in reads:
            needs[name] |= needs.get(read, 0)
        op = called[name][1] if name in called else None
        first = "" if op is None else base_of.get(op.first, op.first)
        if op is not None and op.name in _VIEWS:
            base_of[name] = first
            views[first].add(name)
        if not reads.isdisjoint(of_gradients):
            of_gradients.add(name)
            if op is not None and op.name.endswith("_"):  # in place: all that shows this memory changes
                of_gradients |= {first, *views[first]}
        origins = {made_of.get(read, "") for read in reads}
        if len(origins) == 1 and "" not in origins:
            made_of[name] = origins.pop()
        if name in called:
            bit, op = called[name]
            of_op = frozenset(made_of[read] for read in reads if read in made_of)
            kind = op.name.rpartition("::")[2]
            adds = op.first in made_of
            found.append(_Node(kind, op.settings, of_op, needs[name], bit, name in of_gradients, adds))
            needs[name] |= 1 << bit
    return found


def _matched(source: GraphSource, nodes: Sequence[_Node], parameters: set[str]) -> dict[int, _Node]:
    """The nodes that calls of libraries are, by the number of the kernel, as far as there is no other possibility.

    A call is the node of the same operator that alone reads the same parameters; or if among the others of its
    operator and settings, the order of the nodes gives it only one place. The source alone does not tell all: a kernel
    before may have made a tensor of another type or layout of a parameter.
    """
    found: dict[int, _Node] = {}
    calls = {at: one for at, one in enumerate(source.kernels) if one.name and one.is_library}
    left: defaultdict[tuple[str, tuple[float, ...]], list[int]] = defaultdict(list)
    for at, call in calls.items():
        name, direct = plain_kernel_name(call.name), parameters & call.reads
        same = [node for node in nodes if node.op == name and direct and direct <= node.parameters]
        others = [one for one in calls.values() if plain_kernel_name(one.name) == name and direct <= one.reads]
        if len(same) == len(others) == 1:
            found[at] = same[0]
        else:
            left[name, call.settings].append(at)
    taken = {node.bit for node in found.values()}
    for (name, settings), kernels in left.items():
        alike = [node for node in nodes if (node.op, node.settings) == (name, settings) and node.bit not in taken]
        for node in alike:
            before = sum(node.needs >> other.bit & 1 for other in alike if other is not node)
            after = sum(other.needs >> node.bit & 1 for other in alike if other is not node)
            if before + after == len(alike) - 1 == len(kernels) - 1:
                found[kernels[before]] = node
    return found
