"""The arithmetic of the calls of compiled graphs, from the text that Inductor keeps of each graph.

The text is that of ``torch.fx.GraphModule.print_readable``: a Python function whose variables are annotated with type
and sizes, such as ``addmm: "f32[s0, 16][16, 1]cpu" = torch.ops.aten.addmm.default(bias, x, weight)``. It is parsed and
never executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_names import graph_of
from torchprof.measure.flops.operation import Count, Operation, Unknown, Work, does_no_arithmetic, formula_of, work_of
from torchprof.measure.flops.torch_registry import operator_of, registered_formula, registered_work
from torchprof.measure.recording import CalledGraph
from torchprof.run.torch_names import DTYPES
from torchprof.run.words import Signature, is_generated

_Counts = list[tuple[int, Count]]  # of places, by their index
_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[^\]]*)\]")
_NUMBER = re.compile(r"Sym\((?P<value>.*)\)")
"""Annotations of a tensor, such as ``f32[s0, 16][16, 1]cpu``, and of a number, such as ``Sym(s0)``."""
_OPERATOR = re.compile(r"torch\.ops\.(?P<namespace>\w+)\.(?P<name>\w+)(\.(?P<overload>\w+))?")
"""A function that is an operator. Some have no overloads, such as ``torch.ops.mkl._mkl_linear``."""
_DTYPES = {dtype.short: dtype.recorded[0] for dtype in DTYPES if dtype.short}
"""The types in the text, as torch's profiler spells them."""
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
"""What expressions of sizes may do."""
_FREE_NAMES = """
    inductor_seed inductor_seeds inductor_lookup_seed inductor_random inductor_randint inductor_force_stride_order
    _inductor_bucketize _low_memory_max_pool_offsets_to_indices _low_memory_max_pool2d_offsets_to_indices rev
"""
_FREE = frozenset(f"prims::{name}" for name in _FREE_NAMES.split())
"""Operators of Inductor's graphs (``torch/_inductor/inductor_prims.py``) that do no floating-point arithmetic."""
_SAME_AS = {
    "prims::_low_memory_max_pool2d_with_offsets": "aten::max_pool2d_with_indices",
    "prims::prepare_softmax_online": "aten::logsumexp",  # maximum, difference, exponential, sum
}
"""Operators of Inductor's graphs that do the arithmetic of others, with the same inputs."""


class GraphTensor(NamedTuple):
    """A tensor of a graph: its type, and its sizes as expressions of the symbols of the graph."""

    dtype: str
    sizes: tuple[ast.expr, ...]


GraphValue = GraphTensor | ast.expr | None
"""What the text has of a value: a tensor, an expression of a number, or nothing."""


class GraphNode(NamedTuple):
    """A node of a graph, and the names of the nodes that it ``reads``. ``is_call``: whether it calls something, with
    the nodes ``given`` in its arguments, in their order. ``operator``: the name of the operator that it calls, as in a
    profile; "" for anything else. ``inputs``: of that operator, in the order of its schema: a ``GraphTensor``, a list
    of inputs, an expression of a number, or a constant."""

    name: str
    reads: frozenset[str]
    is_call: bool = False
    operator: str = ""
    inputs: tuple[Any, ...] = ()
    given: tuple[str, ...] = ()

    def is_like(self, other: GraphNode) -> bool:
        """Whether two nodes call the same operator with inputs of the same types, sizes and numbers."""
        ours, theirs = (list(map(_comparable, node.inputs)) for node in (self, other))
        return self.operator == other.operator and ours == theirs


class GraphText(NamedTuple):
    """``inputs``: by name the inputs of the graph, tensors or expressions of numbers; None for anything else.
    ``nodes``: by name, in their order. ``outputs``: the name and value of what the graph returns; "" for a constant."""

    inputs: dict[str, GraphValue]
    nodes: dict[str, GraphNode]
    outputs: tuple[tuple[str, GraphValue], ...] = ()

    def symbols(self, given: Sequence[Any]) -> dict[str, int]:
        """The values of the symbols in a call of the graph. ``given``: by input, the sizes of a tensor, or a number."""
        numbers: dict[str, int] = {}
        for ours, theirs in zip(self.inputs.values(), given):
            sizes = ours.sizes if isinstance(ours, GraphTensor) else [ours]
            for size, value in zip(sizes, theirs if isinstance(theirs, tuple) else [theirs]):
                if isinstance(size, ast.Name) and isinstance(value, int):
                    numbers.setdefault(size.id, value)
        return numbers


@lru_cache(maxsize=256)
def read_graph(text: str) -> GraphText:
    """Parse the text of a graph. Raises ValueError if it is not such a text."""
    try:
        # The class has the name of the graph's, which may be that of a lambda.
        module = ast.parse(re.sub(r"\bclass <lambda>\(", "class GraphModule(", text, count=1))
        functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    except SyntaxError as error:
        raise ValueError(f"not the text of a graph: {error}") from error
    if len(functions) != 1:
        raise ValueError("not the text of one graph")
    values: dict[str, Any] = {
        argument.arg: _read_annotation(argument.annotation) for argument in functions[0].args.args
    }
    inputs = {argument.arg: values[argument.arg] for argument in functions[0].args.args[1:]}
    outputs: tuple[tuple[str, GraphValue], ...] = ()
    nodes: dict[str, GraphNode] = {}
    known = {*inputs}
    for line in functions[0].body:
        if isinstance(line, ast.Return) and isinstance(line.value, ast.Tuple):
            names = [element.id if isinstance(element, ast.Name) else "" for element in line.value.elts]
            outputs = tuple((name, values.get(name)) for name in names)
        if not isinstance(line, (ast.Assign, ast.AnnAssign)) or isinstance(line.value, (ast.Constant, type(None))):
            continue  # "x = None" frees it
        target = line.target if isinstance(line, ast.AnnAssign) else line.targets[0]
        node = target.id if isinstance(target, ast.Name) else f"line {line.lineno}"
        if isinstance(line, ast.AnnAssign):
            values[node] = _read_annotation(line.annotation)
        nodes[node] = _read_node(node, line.value, values, known)
        known.add(node)
    return GraphText(inputs, nodes, outputs)


def work_of_nodes(graph: GraphText, symbols: Mapping[str, int]) -> dict[str, Work | None]:
    """The work of the nodes of a graph in one call, by name; None if it is unknown. Without those that do none."""
    return {
        node.name: _work_of_node(node, symbols)
        for node in graph.nodes.values()
        if node.is_call and not (does_no_arithmetic(node.operator) or node.operator in _FREE)
    }


def _work_of_node(node: GraphNode, symbols: Mapping[str, int]) -> Work | None:
    """The work of a node in one call, by the formula of its operator; None if it is unknown."""
    if not node.operator:
        return None
    try:
        recorded = [_recorded(value, symbols) for value in node.inputs]
    except (Unknown, ArithmeticError):
        return None
    signature = Signature(*zip(*recorded)) if recorded else Signature((), ())
    name = _SAME_AS.get(node.operator, node.operator)
    if name == "prims::fma":
        product, total = (work_of(Operation(f"aten::{name}", signature)) for name in ("mul", "add"))
        return Work(0, product.flops + total.flops) if product is not None and total is not None else None
    if name == "prims::_low_memory_max_pool_with_offsets":
        name = f"aten::max_pool{len(signature.scalars[1] or ())}d_with_indices"
    work = work_of(Operation(name, signature))
    if work is None and formula_of(name) is None and registered_formula(name) is not None:
        work = registered_work(name, signature)
    return work


def _read_annotation(annotation: ast.expr | None) -> GraphValue:
    """The tensor or the number of an annotation; None for anything else."""
    text = annotation.value if isinstance(annotation, ast.Constant) else None
    if not isinstance(text, str):
        return None
    tensor, number = _TENSOR.match(text), _NUMBER.fullmatch(text)
    with suppress(SyntaxError):
        if number is not None:
            return ast.parse(number["value"], mode="eval").body
        if tensor is not None:
            sizes = ast.parse(f"[{tensor['sizes']}]", mode="eval").body
            assert isinstance(sizes, ast.List)
            return GraphTensor(_DTYPES.get(tensor["dtype"], tensor["dtype"]), tuple(sizes.elts))
    return None


def _read_node(name: str, value: ast.expr, values: Mapping[str, Any], known: Set[str]) -> GraphNode:
    """A node from the expression that is assigned to it. ``values``: those before it; ``known``: their names."""

    def names_in(*expressions: ast.expr) -> tuple[str, ...]:
        inner = (part for expression in expressions for part in ast.walk(expression))
        return tuple(part.id for part in inner if isinstance(part, ast.Name) and part.id in known)

    reads = frozenset(names_in(value))
    if not isinstance(value, ast.Call):
        return GraphNode(name, reads)
    given = names_in(*value.args, *(keyword.value for keyword in value.keywords))
    match = _OPERATOR.fullmatch(ast.unparse(value.func))
    operator_name = f"{match['namespace']}::{match['name']}" if match else ""
    schema = getattr(operator_of(operator_name, match["overload"] or "default"), "_schema", None) if match else None
    if schema is None:
        return GraphNode(name, reads, is_call=True, given=given)
    written: dict[str, Any] = {argument.name: part for argument, part in zip(schema.arguments, value.args)}
    written.update({keyword.arg: keyword.value for keyword in value.keywords if keyword.arg is not None})
    inputs = (
        _read_argument(written[argument.name], values) if argument.name in written else argument.default_value
        for argument in schema.arguments
    )
    return GraphNode(name, reads, True, operator_name, tuple(inputs), given)


def _comparable(value: Any) -> Any:
    """An input of an operator, in a form in which equal ones compare equal."""
    if isinstance(value, GraphTensor):
        return value.dtype, list(map(_comparable, value.sizes))
    if isinstance(value, list):
        return list(map(_comparable, value))
    return ast.dump(value) if isinstance(value, ast.expr) else value


def _read_argument(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of an argument: see ``GraphNode``."""
    if isinstance(expression, ast.Name):
        return values.get(expression.id, expression)
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, (ast.List, ast.Tuple)):
        return [_read_argument(element, values) for element in expression.elts]
    return expression


def _recorded(value: Any, symbols: Mapping[str, int]) -> tuple[Any, str, Any]:
    """Shape, type and value of an input, as torch's profiler records them: see ``Signature``."""
    if isinstance(value, GraphTensor):
        return tuple(_number(size, symbols) for size in value.sizes), value.dtype, None
    if isinstance(value, list):
        inner = [_recorded(part, symbols) for part in value]
        if any(isinstance(part, GraphTensor) for part in value):
            return tuple(shape for shape, _, _ in inner), "TensorList", None
        return (), "ScalarList", tuple(scalar for _, _, scalar in inner)
    if value is None:
        return (), "", None
    if isinstance(value, ast.expr):
        try:
            return (), "Scalar", _number(value, symbols)
        except Unknown:
            return (), "", None
    return (), "Scalar" if isinstance(value, (bool, int, float)) else "", value


def _number(expression: ast.expr, symbols: Mapping[str, int]) -> int:
    """The value of an expression. Raises Unknown if it is more than arithmetic on symbols."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, (int, float)):
        return expression.value  # type: ignore[return-value]
    if isinstance(expression, ast.Name) and expression.id in symbols:
        return symbols[expression.id]
    if isinstance(expression, ast.UnaryOp) and isinstance(expression.op, ast.USub):
        return -_number(expression.operand, symbols)
    if isinstance(expression, ast.BinOp) and type(expression.op) in _ARITHMETIC:
        left, right = (_number(side, symbols) for side in (expression.left, expression.right))
        return _ARITHMETIC[type(expression.op)](left, right)
    raise Unknown


# The calls of graphs, and the kernels in them whose layers are known


@dataclass
class GraphCall:
    """One call of a graph: the work of its nodes, and the ops that ``ran`` directly in it so far, each with the index
    of its place. ``uncounted``: the operators of nodes whose work is unknown. ``layers``: of the kernels, if known."""

    key: str
    nodes: Mapping[str, Work | None]
    uncounted: Set[str]
    layers: CompiledGraphs | None
    ran: list[tuple[str, int]] = field(default_factory=list)

    def counts(self, place: int, found: Sequence[_Counts]) -> tuple[_Counts, set[int]]:
        """The counts by place, and the places of kernels whose work is known.

        ``place``: of the call. ``found``: the counts of each op directly in it, in their order. Library ops keep
        theirs; those of a node whose work is unknown are all that is known of it. A kernel whose layers are known has
        the work of its nodes, a node of several kernels in the first of them; any other kernel in a layer is not
        counted. The rest of the graph's work, or all of it if the ops have more, is at the call itself.

        Example: the nodes of a graph are a product of 100 MACs and a ``relu`` of 10 FLOPs. An ``addmm`` of 100 MACs and
        a generated kernel ran in it. The 10 FLOPs are at the kernel if its layers are known, else at the call.
        """
        of_ops: _Counts = []
        of_unknown: _Counts = []
        explained = 0
        for (name, _), counts in zip(self.ran, found):
            if name in self.uncounted:
                of_unknown += counts
                explained += 1
            else:
                of_ops += [(place, count._replace(uncounted=0)) for place, count in counts if count.macs or count.flops]
        left = dict(self.nodes)
        known: set[int] = set()
        if self.layers is not None:
            for works, of_kernel in self._kernels(left):
                of_ops.append((of_kernel, Count(0, 0, 1) if works is None else _sum(works)))
                if works is not None:
                    known.add(of_kernel)
        whole = _sum([*self.nodes.values()])
        macs = whole.macs - sum(count.macs for _, count in of_ops)
        flops = whole.flops - sum(count.flops for _, count in of_ops)
        if macs >= 0 and flops >= 0:
            unknown = max(sum(work is None for work in left.values()) - explained, 0)
            return [*of_ops, *of_unknown, (place, Count(macs, flops, unknown))], known
        whole = whole._replace(uncounted=max(whole.uncounted - explained, 0))
        if "" in self.uncounted:  # functions of Inductor's own, which may call any operator
            return [*of_ops, *of_unknown, (place, Count(0, 0, whole.uncounted))], known
        return [*(of_ops if known else [(place, whole)]), *of_unknown], known

    def _kernels(self, left: dict[str, Work | None]) -> Iterator[tuple[list[Work | None] | None, int]]:
        """For each generated kernel that ran: the work of its nodes, which are taken out of ``left`` (None: it is
        unknown which kernel it is), and its place."""
        assert self.layers is not None
        numbers = self.layers.called(self.key, [name for name, _ in self.ran])
        for (name, place), number in zip(self.ran, numbers):
            if is_generated(name):
                nodes = None if number is None else self.layers.kernel(self.key, number).nodes
                yield None if nodes is None else [left.pop(node) for node in nodes if node in left], place


class GraphCalls:
    """The calls of compiled graphs, one after the other. ``graphs``: by key. ``layers``: of their kernels, if known."""

    def __init__(self, graphs: Mapping[str, CalledGraph], layers: CompiledGraphs | None = None) -> None:
        self._graphs = graphs
        self._layers = layers
        self._texts: dict[str, GraphText | None] = {}  # None: it cannot be read
        # By key and values of the symbols: the work of each node, and the operators without a known one.
        self._work: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[Mapping[str, Work | None], Set[str]]] = {}
        self._calls: Counter[str] = Counter()  # by key: the calls so far

    def next(self, name: str) -> GraphCall | None:
        """The next call, by the name of the range around it; None if the graph is not known."""
        key = graph_of(name)
        graph = self._graphs.get(key)
        if graph is not None and key not in self._texts:
            self._texts[key] = None
            with suppress(ValueError):
                self._texts[key] = read_graph(graph.text)
        text = self._texts.get(key)
        if graph is None or text is None:
            return None
        symbols: dict[str, int] = {}
        if graph.has_symbols:
            number = self._calls[key]
            self._calls[key] += 1
            if number >= len(graph.calls):
                return None
            symbols = text.symbols(graph.calls[number])
        with_sizes = key, tuple(symbols.items())
        if with_sizes not in self._work:
            works = work_of_nodes(text, symbols)
            unknown = {text.nodes[name].operator for name, work in works.items() if work is None}
            self._work[with_sizes] = works, unknown
        nodes, uncounted = self._work[with_sizes]
        has_layers = self._layers is not None and not self._layers.why_unknown(key)
        return GraphCall(key, nodes, uncounted, self._layers if has_layers else None)


def _sum(works: Sequence[Work | None]) -> Count:
    """The sum of the known works, and how many are unknown."""
    known = [work for work in works if work is not None]
    return Count(sum(work.macs for work in known), sum(work.flops for work in known), len(works) - len(known))
