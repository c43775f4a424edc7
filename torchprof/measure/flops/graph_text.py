"""The arithmetic of a graph that torch.compile made, from the text that Inductor keeps of it.

The text is that of ``torch.fx.GraphModule.print_readable``: a Python function whose variables are annotated with type
and sizes, such as ``addmm: "f32[s0, 16][16, 1]cpu" = torch.ops.aten.addmm.default(bias, x, weight)``. It is parsed and
never executed.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple

from torchprof.measure.flops.operation import Operation, Unknown, Work, formula_of, work_of
from torchprof.measure.flops.torch_registry import does_no_arithmetic, operator_of, registered_formula, registered_work
from torchprof.run.torch_names import DTYPES
from torchprof.run.words import Signature

_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<sizes>[^\]]*)\]")
_NUMBER = re.compile(r"Sym\((?P<value>.*)\)")
_OPERATOR = re.compile(r"torch\.ops\.(?P<namespace>\w+)\.(?P<name>\w+)(\.(?P<overload>\w+))?")
"""A function that is an operator. Some have no overloads, such as ``torch.ops.mkl._mkl_linear``."""
_DTYPES = {dtype.short: dtype.recorded[0] for dtype in DTYPES if dtype.short}
"""The types in the text, as torch's profiler spells them."""
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


_FREE = frozenset(
    {
        "prims::inductor_seed",
        "prims::inductor_seeds",
        "prims::inductor_lookup_seed",
        "prims::inductor_random",
        "prims::inductor_randint",
        "prims::inductor_force_stride_order",
        "prims::_inductor_bucketize",
        "prims::_low_memory_max_pool_offsets_to_indices",
        "prims::_low_memory_max_pool2d_offsets_to_indices",
        "prims::rev",
    }
)
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
    """A node of a graph, and the names of the nodes that it ``reads``.

    ``is_call``: whether it calls something, with the nodes ``given`` in its arguments, in their order. ``operator``:
    the name of the operator that it calls, as in a profile; "" for anything else. ``inputs``: of that operator, in the
    order of its schema: a ``GraphTensor``, a list of inputs, an expression of a number, or a constant.
    """

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
    values: dict[str, Any] = {}
    for argument in functions[0].args.args:
        values[argument.arg] = _annotated(argument.annotation)
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
            values[node] = _annotated(line.annotation)
        nodes[node] = _node(node, line.value, values, known)
        known.add(node)
    return GraphText(inputs, nodes, outputs)


def work_of_nodes(graph: GraphText, symbols: Mapping[str, int]) -> dict[str, Work | None]:
    """The work of the nodes of a graph in one call, by name; None if it is unknown. Without those that do none."""
    return {
        node.name: _work_of(node, symbols)
        for node in graph.nodes.values()
        if node.is_call and not (node.operator and (does_no_arithmetic(node.operator) or node.operator in _FREE))
    }


def _work_of(node: GraphNode, symbols: Mapping[str, int]) -> Work | None:
    """The work of one operator; None if it is unknown."""
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


def _annotated(annotation: ast.expr | None) -> GraphValue:
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


def _node(name: str, value: ast.expr, values: Mapping[str, Any], known: Set[str]) -> GraphNode:
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
        _value(written[argument.name], values) if argument.name in written else argument.default_value
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


def _value(expression: ast.expr, values: Mapping[str, Any]) -> Any:
    """The value of an argument: see ``GraphNode``."""
    if isinstance(expression, ast.Name):
        return values.get(expression.id, expression)
    if isinstance(expression, ast.Constant):
        return expression.value
    if isinstance(expression, (ast.List, ast.Tuple)):
        return [_value(element, values) for element in expression.elts]
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
    if isinstance(expression, ast.BinOp) and type(expression.op) in _OPERATORS:
        left, right = (_number(side, symbols) for side in (expression.left, expression.right))
        return _OPERATORS[type(expression.op)](left, right)
    raise Unknown
