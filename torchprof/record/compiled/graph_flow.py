"""The parameters that the kernels of a compiled graph work for, without knowledge of how it was compiled.

A graph of Inductor keeps its source and the text of its nodes, and it is called with the parameters themselves. A call
of a library that reads a parameter, or that computes the gradient of one, is work for the module that has it.

A kernel that works for no parameter alone lies between layers. What a graph computes between two layers ran in the
module around both, or in a module inside that. The last layer before a value in the text counts, and the first after.
"""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import CompiledKernel, Span, TracedModule
from torchprof.measure.flops.graphs import GraphNode, GraphTensor, GraphText, GraphValue
from torchprof.record.compiled.kept_graph import TANGENTS, GraphSource, KeptGraph, SourceKernel, plain_kernel_name
from torchprof.run.groups import sets_by_key
from torchprof.run.torch_names import PRODUCTS_AND_SUMS, VIEWS, aten
from torchprof.run.words import IN_CPP

_CPP_WRAPPER = "aoti_torch_"  # in the source of a graph that was made with ``torch._inductor.config.cpp_wrapper``
_Parameters = frozenset[str]  # names of inputs of a forward graph, of which each is a parameter of a module
_KernelsOfGraphs = dict[str, "tuple[CompiledKernel, ...] | str"]


def kernels_by_parameters(called: Mapping[str, KeptGraph], why_unknown: str) -> tuple[_KernelsOfGraphs, set[str]]:
    """The kernels of all graphs that were called, by key, or the reason if they are unknown; and the keys of graphs in
    which some kernels have no events. ``why_unknown``: why the modules of the others are, see ``CompiledGraphs``."""
    kernels: _KernelsOfGraphs = {key: IN_CPP for key, graph in called.items() if _CPP_WRAPPER in graph.code}
    readable = {key: graph for key, graph in called.items() if graph.is_readable}
    forwards = {key: GraphFlow(graph) for key, graph in readable.items() if not graph.source.is_backward}
    hiding = set()
    for key, graph in readable.items():
        if key in forwards:
            flows = [forwards[key]]
        else:  # a backward, perhaps of several forwards
            flows = [GraphFlow(graph, forward) for forward in forwards.values() if saves_for(forward.text, graph.text)]
        possible = {tuple(_kernels(flow, why_unknown)) for flow in flows if flow.roots}
        if len(possible) == 1:
            kernels[key] = possible.pop()
        if any(kernel.name and not kernel.has_event for kernel in graph.source.kernels):
            hiding.add(key)
    return kernels, hiding


def _kernels(flow: GraphFlow, why_unknown: str) -> Iterator[CompiledKernel]:
    """The kernels of a graph that have events. A call of a library has the parameters that it works for as owners; of
    any other kernel it is known which layers work before and after it."""
    roots = flow.roots

    def roots_of(names: Iterable[str]) -> frozenset[str]:
        return frozenset(roots[name] for name in names)

    nodes, repeated = KernelNodes(flow), roots_of(flow.repeated)
    for index, kernel in enumerate(flow.graph.source.kernels):
        if kernel.name and kernel.has_event:
            call = flow.node_of.get(index)
            parameters = frozenset() if call is None else flow.works_for(call)
            owners = [(TracedModule(roots[name], (), ""),) for name in sorted(parameters)]
            between = () if parameters else flow.spans(nodes.computed_by(index))
            yield CompiledKernel(
                plain_kernel_name(kernel.name),
                tuple(owners) or (None,),
                call is not None and flow.is_recomputed(call),
                why_unknown=why_unknown,
                repeated=repeated,
                between=frozenset(Span(roots_of(before), roots_of(after), is_own) for before, after, is_own in between),
            )


class GraphFlow:
    """What the values of a graph have to do with parameters. Values have the names of their nodes.

    ``node_of``: the node of each library call, by the index of the kernel. ``made_of``: a value that is computed of
    parameters alone → these; of none for numbers and constants. ``of_gradients``: the values that need the gradients
    that a backward takes. ``repeated``: the parameters that several nodes of the forward work for: their layers may be
    called several times. ``roots``: of the parameters.
    """

    def __init__(self, graph: KeptGraph, forward: GraphFlow | None = None) -> None:
        """``forward``: the flow of the graph whose backward this is. Values that it saves have the same names here."""
        self.graph, self.text = graph, graph.text
        self._forward = forward
        self.roots: Mapping[str, str] = graph.roots if forward is None else forward.roots
        self.node_of = nodes_of_calls(graph.source, self.text)
        self.calls = {node.name: node for node in self.node_of.values()}
        base_of = _bases(self.text)
        self.of_gradients = _needing_gradients(self.text, base_of)
        known = {name: frozenset([name]) for name in graph.roots}
        if forward is not None:
            known = {name: forward.made_of[name] for name in self.text.inputs if name in forward.made_of}
        self.made_of: Mapping[str, _Parameters] = _made_of_parameters(self.text, self.calls, known)
        self._gradients: Mapping[str, Set[str]] = {}
        if forward is not None:
            terms = _terms(self.text, self.calls, self.made_of, base_of)
            self._gradients = _gradients_computed(forward, self.text, terms)
        self._own = self._own_work()
        # What a backward computes again of the forward does not tell where the gradients after it are computed.
        reads_of = {
            name: node.reads & self.of_gradients if name in self.of_gradients else node.reads
            for name, node in self.text.nodes.items()
        }
        self._before = _work_before(reads_of, self._own)
        self._after = _work_after(reads_of, self._own)
        uses = Counter(name for own in self._own.values() for name in own.parameters)
        used_again = frozenset(name for name in uses if uses[name] > 1)
        self.repeated: _Parameters = used_again if forward is None else forward.repeated

    def reads(self, node: GraphNode) -> _Parameters:
        """The parameters that a call reads, also in another type or layout."""
        return frozenset().union(*(self.made_of.get(name, frozenset()) for name in node.given))

    def works_for(self, call: GraphNode) -> _Parameters:
        """The parameters that a call works for: those that it reads, else those whose gradients it computes. The
        gradient of a parameter that is added to the input of a layer is computed by that layer. Only a call whose
        forward multiplies two parameters reads one and computes the gradient of the other."""
        reads, gradients = self.reads(call), frozenset(self._gradients.get(call.name, ()))
        if not reads or not gradients or self._forward is None:
            return reads or gradients
        both = reads | gradients
        return both if any(both <= self._forward.reads(product) for product in self._forward.calls.values()) else reads

    def is_recomputed(self, call: GraphNode) -> bool:
        """Whether a call in a backward repeats one of its forward."""
        if self._forward is None or call.name in self.of_gradients:
            return False
        return any(map(call.is_like, self._forward.calls.values()))

    def spans(self, names: Iterable[str]) -> Iterator[Span]:
        """The parameters of the layers that work before and after some nodes, without nodes of constants alone."""
        for name in names:
            own = self._own.get(name, _NO_WORK).parameters or self.made_of.get(name)
            if own:
                yield Span(own, own, is_own=True)
            elif own is None:
                yield Span(self._before[name].parameters, self._after.get(name, _NO_WORK).parameters)

    def _own_work(self) -> Mapping[str, _Work]:
        """The nodes that work for parameters or read some directly, in the order of the text."""
        own: dict[str, _Work] = {}
        for number, (name, node) in enumerate(self.text.nodes.items()):
            if name in self.calls:
                parameters = self.works_for(node)
            else:
                parameters = frozenset().union(*(self.made_of.get(read, ()) for read in node.reads))
            if parameters and name not in self.made_of:
                own[name] = _Work(number, parameters)
        return own


class _Work(NamedTuple):
    """Work for parameters: the number of its node in the order of the text, and the parameters."""

    number: int
    parameters: _Parameters


_NO_WORK = _Work(-1, frozenset())


def _made_of_parameters(
    text: GraphText, calls: Mapping[str, GraphNode], known: Mapping[str, _Parameters]
) -> Mapping[str, _Parameters]:
    """The values that are computed of parameters alone, without calls of libraries. ``known``: such inputs, which are
    parameters or what the forward saved; and parameters that are a part of the graph::

        cat = aten.cat([w1, w2])      {w1, w2}
        mul = aten.mul(cat, 2)        {w1, w2}
        add = aten.add(mul, x)        –
    """
    numbers = [name for name, value in text.inputs.items() if not isinstance(value, GraphTensor)]
    made_of = {**known, **dict.fromkeys(numbers, frozenset[str]())}
    for name, node in text.nodes.items():
        if name not in calls and name not in made_of and all(read in made_of for read in node.reads):
            made_of[name] = frozenset().union(*(made_of[read] for read in node.reads))
    return made_of


def _bases(text: GraphText) -> Mapping[str, str]:
    """For each value, the tensor whose memory it shows: a view shows its first argument, any other value itself."""
    base_of = {name: name for name in text.inputs}
    for name, node in text.nodes.items():
        base_of[name] = base_of[node.given[0]] if node.operator in VIEWS and node.given else name
    return base_of


def _needing_gradients(text: GraphText, base_of: Mapping[str, str]) -> Set[str]:
    """The gradients that a backward takes, and all values that are computed from them."""
    of_gradients = {name for name in text.inputs if name.startswith(TANGENTS)}
    for name, node in text.nodes.items():
        if not node.reads.isdisjoint(of_gradients):
            of_gradients.add(name)
            if node.operator.endswith("_") and node.given:  # in place: all that shows this memory changes
                changed = base_of[node.given[0]]
                of_gradients |= {value for value, base in base_of.items() if base == changed}
    return of_gradients


_KEEP_GRADIENTS = VIEWS | aten("_to_copy add clone copy mul neg")
_KEEP_GRADIENTS |= {"prims::convert_element_type", "prims::inductor_force_stride_order"}
"""Operators after which the gradient of a parameter is still one: in another type or layout, in a sum, scaled."""


def _terms(
    text: GraphText, calls: Mapping[str, GraphNode], made_of: Mapping[str, _Parameters], base_of: Mapping[str, str]
) -> Mapping[str, Set[str]]:
    """The calls of libraries whose results a value is the sum of. Of a value that is anything else, such as the product
    of a result, there are none::

        mm   = aten.mm(tangents_1, x)         {mm}
        mm_1 = aten.mm(tangents_2, y)         {mm_1}
        add  = aten.add(mm, mm_1)             {mm, mm_1}
        t    = aten.permute(add, [1, 0])      {mm, mm_1}
        relu = aten.relu(t)                   –
    """
    terms: dict[str, Set[str]] = {}
    for name, node in text.nodes.items():
        if name in calls:  # a product may add its first argument: the sum of two gradients
            added = [base_of[name] for name in node.given[:1] if node.operator in PRODUCTS_AND_SUMS]
            terms[name] = {name}.union(*(terms.get(base, ()) for base in added))
            continue
        of_calls = [terms[read] for read in node.reads if read in terms]
        is_of_calls_alone = all(read in terms or read in made_of for read in node.reads)
        is_sum = node.operator == "aten::add"  # a gradient in a sum of gradients is one, too
        if of_calls and (node.operator in _KEEP_GRADIENTS or not node.is_call) and (is_sum or is_of_calls_alone):
            terms[name] = set().union(*of_calls)
    return terms


def _gradients_computed(
    forward: GraphFlow, backward: GraphText, terms: Mapping[str, Set[str]]
) -> Mapping[str, Set[str]]:
    """The parameters whose gradients each call of a library computes. A backward returns the gradients of the inputs of
    its forward, in their order. Only a parameter that a call of the forward reads has its gradient from a call."""
    operands = frozenset().union(*map(forward.reads, forward.calls.values()))
    pairs = ((gradient, name) for (gradient, _), name in zip(backward.outputs, forward.text.inputs) if name in operands)
    return sets_by_key((call, parameter) for gradient, parameter in pairs for call in terms.get(gradient, ()))


def _work_before(reads_of: Mapping[str, Set[str]], own: Mapping[str, _Work]) -> Mapping[str, _Work]:
    """For each node, the last work for parameters among all that it needs. An example, in which the kernel of relu lies
    between the layers of w1 and w2; the column on the right is from ``_work_after``::

                                      own     before     after
        mm = aten.mm(x, w1)           w1      –          w2
        relu = aten.relu(mm)          –       w1         w2
        mm_1 = aten.mm(relu, w2)      w2      w1         –
    """
    before: dict[str, _Work] = {}
    for name, reads in reads_of.items():
        last = (own.get(read) or before.get(read, _NO_WORK) for read in reads)
        before[name] = max(last, key=lambda work: (bool(work.parameters), work.number), default=_NO_WORK)
    return before


def _work_after(reads_of: Mapping[str, Set[str]], own: Mapping[str, _Work]) -> Mapping[str, _Work]:
    """For each value, the first work for parameters among all that needs it; without the values that none needs."""
    after: dict[str, _Work] = {}
    for name, reads in reversed([*reads_of.items()]):
        work = own.get(name) or after.get(name, _NO_WORK)
        for read in reads if work.parameters else ():
            after[read] = min(work, after.get(read, work), key=lambda known: known.number)
    return after


_MOST_NODES = 500  # of more nodes in one kernel nothing is known: it is not between layers, and the search takes long


class KernelNodes:
    """The nodes of the text that the kernels of the source compute, as far as buffers tell::

        text                          source
        mm = aten.mm(x, w1)           0: extern_kernels.mm(x, w1, out=buf0)
        add = aten.add(mm, 1)         1: cpp_fused_add_relu(buf0, buf1)
        relu = aten.relu(add)
        mm_1 = aten.mm(relu, w2)      2: extern_kernels.mm(buf1, w2, out=buf2)

    By the calls of libraries, mm is in buf0, relu in buf1, mm_1 in buf2. Kernel 1 computes relu from mm: so add, too.
    """

    def __init__(self, flow: GraphFlow) -> None:
        self._kernels = flow.graph.source.kernels
        self._flow = flow
        self._node_in = _nodes_in_buffers(flow)

    def computed_by(self, index: int) -> Set[str]:
        """The nodes that a kernel computes, perhaps with some of the kernels around it; none if unknown."""
        if (call := self._flow.node_of.get(index)) is not None:
            return {call.name}
        results = self._first_known_results(index)
        reads = {self._node_in[name] for name in self._kernels[index].reads if name in self._node_in} - results
        computed: set[str] = set()
        waiting = [*results]
        while waiting and len(computed) <= _MOST_NODES:
            name = waiting.pop()
            node = self._flow.text.nodes.get(name)
            if node is not None and name not in reads and name not in self._flow.calls and name not in computed:
                computed.add(name)
                waiting.extend(node.reads)
        return computed if len(computed) <= _MOST_NODES else set()

    def _first_known_results(self, index: int) -> set[str]:
        """The nodes that a kernel writes. For a buffer whose node is unknown, those that later kernels compute from it;
        none if a call of a library does, or if no kernel reads the buffer."""
        results, unknown = self._written_by(self._kernels[index])
        read: set[str] = set()
        for later in self._kernels[index + 1 :] if unknown else ():
            if not unknown.isdisjoint(later.reads):
                if later.is_library:
                    return set()
                read |= later.reads
                nodes, buffers = self._written_by(later)
                results |= nodes
                unknown |= buffers
        return results if unknown <= read else set()

    def _written_by(self, kernel: SourceKernel) -> tuple[set[str], set[str]]:
        """The nodes in the buffers that a kernel writes, and the buffers of which they are unknown."""
        unknown = {name for name in kernel.writes if name not in self._node_in}
        return {self._node_in[name] for name in kernel.writes - unknown}, unknown


def _nodes_in_buffers(flow: GraphFlow) -> Mapping[str, str]:
    """The nodes of inputs and buffers, as far as they are arguments or results of library calls, or outputs of the
    graph. Of an input that a kernel may write to, it is what is written."""
    source, text = flow.graph.source, flow.text
    node_in = {name: name for name in source.inputs}
    for node in text.nodes.values():
        if node.operator == "aten::copy_" and len(node.given) > 1:
            node_in[node.given[0]] = node.given[1]
    for index, node in flow.node_of.items():
        kernel = source.kernels[index]
        if kernel.number is not None:
            node_in.update(dict.fromkeys(kernel.writes, node.name))
        if len(kernel.given) == len(node.given):
            for name, argument in zip(kernel.given, node.given):
                node_in.setdefault(name, argument)
    for name, (returned, _) in zip(source.returned, text.outputs):
        if name and returned:
            node_in.setdefault(name, returned)
    return node_in


# Which parts of graphs belong together: a call of a library in the source of a graph and a node of its text; a backward
# graph and its forward graph. Nothing records either, so they are matched by names, order, types and sizes.

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
