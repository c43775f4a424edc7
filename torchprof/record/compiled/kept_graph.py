"""A compiled graph as Inductor keeps it, as source and as text; and the tensors of modules that it was called with.

The source has a function ``call`` with one statement for each kernel, such as
``extern_kernels.addmm(primals_2, primals_3, reinterpret_tensor(primals_1, …), out=buf0)``. It is parsed and never run.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import ref

from torch import nn

from torchprof.attribute.compiled_graphs import FROZEN, ModuleTensor
from torchprof.attribute.events import COMPILED_INPUTS
from torchprof.record.compiled.dynamo_code import TakenTensor

if TYPE_CHECKING:
    from torchprof.measure.flops.graphs import GraphText

_FROZEN = re.compile(r"(\w+): \"[^\"]*\" = self\.(_frozen_param\d+)")
"""The line of a tensor that is a part of the graph, with ``torch._inductor.config.freezing``: its node, its name."""
_BUFFER = re.compile(r"buf(\d+)")
TANGENTS = "tangents_"  # the prefix of the inputs of a backward graph that are gradients of the forward's outputs


class SourceKernel(NamedTuple):
    """A kernel that a graph calls: its ``name`` in the source, and the names of what it ``reads`` and ``writes``.

    ``is_library``: it is a call of a library, else Inductor generated it. ``has_event``: a profile has an event of it.
    ``given``: what it reads, in the order of its arguments. Without a name, it only renames the memory that it reads.
    """

    name: str
    reads: frozenset[str]
    writes: frozenset[str]
    is_library: bool = False
    has_event: bool = False
    given: tuple[str, ...] = ()

    @property
    def number(self) -> int | None:
        """The number of the buffer with the result of a call of a library; None if it writes into what another one
        made. Inductor numbers buffers in the order of their nodes, and may call the kernels in another order."""
        numbers = [int(match[1]) for name in self.writes if (match := _BUFFER.fullmatch(name))]
        return numbers[0] if len(numbers) == 1 and self.writes.isdisjoint(self.reads) else None


class GraphSource(NamedTuple):
    """``inputs``: the names of a graph's inputs. ``kernels``: in the order of their calls. ``returned``: the name of
    each output, as a kernel writes it; "" for one that none writes."""

    inputs: tuple[str, ...]
    kernels: tuple[SourceKernel, ...]
    returned: tuple[str, ...]

    @property
    def is_backward(self) -> bool:
        return any(name.startswith(TANGENTS) for name in self.inputs)


@dataclass(frozen=True)
class KeptGraph:
    """A graph that was called. Its ``code`` and its ``nodes`` are text: ``source`` and ``text`` parse them. ``taken``:
    its inputs that are parameters, then the tensors that are parts of the graph. ``frozen``: their names, by node."""

    code: str
    nodes: str
    taken: tuple[TakenTensor, ...] = ()
    frozen: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, graph: Any, inputs: Sequence[Any]) -> KeptGraph:
        """What a graph of Inductor keeps of itself, and which inputs are parameters; both empty if it keeps nothing."""
        code, nodes = (getattr(graph, name, None) for name in ("source_code", "inductor_post_grad_graph_str"))
        if not isinstance(code, str) or not isinstance(nodes, str):
            return cls("", "")
        given = () if TANGENTS in nodes else inputs  # a backward's parameters are those of its forward
        parameters = [index for index, value in enumerate(given) if isinstance(value, nn.Parameter)]
        taken = [TakenTensor(index, f"input {index}", ()) for index in parameters]
        frozen = dict(_FROZEN.findall(nodes))
        taken += [TakenTensor(len(inputs) + index, f"{FROZEN}{node}", ()) for index, node in enumerate(frozen)]
        return cls(code, nodes, tuple(taken), frozen)

    def number_of(self, graph: Any, inputs: Sequence[Any], calls: NotedCalls) -> int | None:
        """The number of a call; None if the graph takes no parameters, or is a backward. That gets the number of its
        forward's call from the events: both have the same sequence number."""
        if not self.taken:
            return None
        try:
            return calls.number_of(self.taken, [*inputs, *self._frozen_tensors(graph)] if self.frozen else inputs)
        except (IndexError, TypeError):  # not the inputs of the first call
            return None

    def _frozen_tensors(self, graph: Any) -> list[Any]:
        """The tensors that are parts of a graph, from the module with its code; None for one that it does not have."""
        code = getattr(graph, "current_callable", None)
        of_module = getattr(getattr(code, "__func__", code), "__globals__", {})
        return [of_module.get(name) for name in self.frozen.values()]

    @cached_property
    def source(self) -> GraphSource:
        """Raises ValueError if it cannot be read."""
        return read_source(self.code)

    @cached_property
    def text(self) -> GraphText:
        """Raises ValueError if it cannot be read."""
        from torchprof.measure.flops.graphs import read_graph  # it imports all formulas of FLOPs

        return read_graph(self.nodes)

    @property
    def is_readable(self) -> bool:
        """Whether source and text can be read, and are of the same graph."""
        with suppress(ValueError):
            count = len(self.source.inputs) + len(self.frozen)
            return self.source.inputs == (*self.text.inputs,) and all(taken.number < count for taken in self.taken)
        return False

    @cached_property
    def roots(self) -> dict[str, str]:
        """By the name of an input that is a parameter: its root, see ``TracedModule``."""
        names = [*self.source.inputs, *self.frozen]
        return {names[taken.number]: taken.root for taken in self.taken}


class NotedCalls:
    """The tensors of modules that compiled functions were called with, as weak references. Calls with the same tensors
    share one number. After ``MOST`` numbers only parameters are noted, because a forward may replace a buffer in each
    call; after ``2 * MOST``, no tensors: one number for each function."""

    MOST: ClassVar[int] = 10_000

    def __init__(self) -> None:
        self._free = itertools.count()  # atomic: threads that call at the same time get different numbers
        self._tensors: dict[int, list[tuple[TakenTensor, Callable[[], Any]]]] = {}  # by number
        self._numbers: dict[tuple[tuple[TakenTensor, ...], tuple[int, ...]], int] = {}  # by the ids of the tensors

    def number_of(self, taken: tuple[TakenTensor, ...], inputs: Sequence[Any]) -> int:
        """The number of a call. Raises IndexError or TypeError if the inputs are not those of the compiled graph."""
        noted = tensors = [inputs[place.number] for place in taken]
        for most in (NotedCalls.MOST, 2 * NotedCalls.MOST, None):
            key = taken, tuple(map(id, noted))
            number = self._numbers.get(key)
            if number is not None and all(
                known() is tensor for (_, known), tensor in zip(self._tensors[number], noted)
            ):
                return number
            if most is None or len(self._tensors) < most:
                break
            is_full = most > NotedCalls.MOST
            noted = [None if is_full or not isinstance(tensor, nn.Parameter) else tensor for tensor in tensors]
        number = next(self._free)
        self._tensors[number] = [
            (place, (lambda: None) if tensor is None else ref(tensor)) for place, tensor in zip(taken, noted)
        ]
        self._numbers[key] = number
        return number

    def given(self, holders_of: Callable[[Sequence[Any]], Sequence[Any]]) -> dict[str, list[ModuleTensor]]:
        """The tensors taken in each call, by the name of its range. ``holders_of``: see ``Plan``."""
        calls = [*self._tensors.items()]
        tensors = [tensor() for _, call in calls for _, tensor in call]
        known = iter(zip(holders_of(tensors), tensors))  # call after call
        return {
            f"{COMPILED_INPUTS}{number}": [
                ModuleTensor(place.root, place.path, holders, tensor is None)
                for (place, _), (holders, tensor) in zip(call, known)
            ]
            for number, call in calls
        }


# Reading a source

_LIBRARY = re.compile(r"(inductor_)?extern_kernels\.\w+|(torch\.ops\.)?aten\.\w+(\.\w+)?|torch\.ops\.\w+\.\w+\.\w+")
_HAVE_EVENTS = ("RAIIAtenRecordFunctionHandle", "@triton")
"""What the source of a generated kernel with an event contains: C++ that opens a range, or Triton."""


def plain_kernel_name(kernel: str) -> str:
    """The name of a kernel as in the profiler's events: ``addmm`` for ``extern_kernels.addmm`` or
    ``torch.ops.aten.addmm.default``. The names of Inductor's own kernels have no dots and stay."""
    steps = kernel.split(".")
    if steps[0] in ("extern_kernels", "inductor_extern_kernels"):
        return steps[-1]
    if steps[:2] == ["torch", "ops"]:
        return steps[3]
    return steps[1] if len(steps) > 2 or steps[0] == "aten" else steps[-1]


@lru_cache(maxsize=256)
def read_source(source: str) -> GraphSource:
    """Parse the source of a graph. Raises ValueError if it has another form."""
    try:
        module = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"not the source of a graph: {error}") from error
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    calls = [function for function in functions if function.name == "call"]
    if len(calls) != 1 or any(function.name.startswith("partition_") for function in functions):
        raise ValueError("not the source of one graph")
    return _Reader(module).read(calls[0])


class _Reader:
    """Reads the function ``call`` of a source, statement by statement."""

    def __init__(self, module: ast.Module) -> None:
        sources, types = _assigned(module)
        self._events = {name for name, text in sources.items() if any(mark in text for mark in _HAVE_EVENTS)}
        self._outputs = {name: _outputs(name, text, types.get(name)) for name, text in sources.items()}
        self._part_of: dict[str, str] = {}  # a part of a result → the result
        self._inputs: tuple[str, ...] = ()
        self._kernels: list[SourceKernel] = []
        self._returned: tuple[str, ...] = ()

    def read(self, call: ast.FunctionDef) -> GraphSource:
        for statement in _flat(call.body):
            match statement:
                case ast.Assign(targets=[ast.Tuple(elts=elements), *_], value=ast.Name(id="args")):
                    self._inputs = tuple(element.id for element in elements if isinstance(element, ast.Name))
                case ast.Assign(targets=[ast.Name(id=name), *_], value=value):
                    self._assign(name, value)
                case ast.Return(value=ast.Tuple(elts=elements)):
                    self._returned = tuple(next(iter(self._names(element)), "") for element in elements)
                case ast.Expr(value=ast.Call() as called):
                    is_known = self._call(called, None) or ast.unparse(called.func).startswith("assert_")
                    if not is_known and self._names(called):
                        raise ValueError(f"an unknown statement: {ast.unparse(statement)}")
        return GraphSource(self._inputs, tuple(self._kernels), self._returned)

    def _assign(self, target: str, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and self._call(value, target):
            return
        names = self._names(value)
        if isinstance(value, ast.Subscript) and names:
            self._part_of[target] = names[0]
        elif names:  # the name stands for what is written to this memory from here on
            self._kernels.append(SourceKernel("", reads=frozenset(names), writes=frozenset([target])))

    def _call(self, call: ast.Call, result: str | None) -> bool:
        """Read a call of a kernel; False if it is not one."""
        name = ast.unparse(call.func)
        generated = name.removesuffix(".run")
        is_generated = generated in self._outputs
        if not is_generated and not _LIBRARY.fullmatch(name):
            return False
        by_argument = [self._names(argument) for argument in call.args]
        given = tuple(itertools.chain.from_iterable(by_argument))
        by_keyword = {keyword.arg: self._names(keyword.value) for keyword in call.keywords}
        results = [*by_keyword.pop("out", ()), *([] if result is None else [result])]
        reads = frozenset(given).union(*by_keyword.values())
        if is_generated:
            is_written = self._outputs[generated] or [True] * len(by_argument)
            writes = frozenset().union(*itertools.compress(by_argument, is_written))
            kernel = SourceKernel(generated, reads, writes, has_event=generated in self._events, given=given)
        else:  # without results, it writes in place
            writes = frozenset(results) or reads
            kernel = SourceKernel(name, reads, writes, is_library=True, has_event=True, given=given)
        self._kernels.append(kernel)
        return True

    def _names(self, expression: ast.expr) -> list[str]:
        """The inputs and buffers in an expression; for a part of a result, the result."""
        names = [node.id for node in ast.walk(expression) if isinstance(node, ast.Name)]
        return [self._part_of.get(name, name) for name in names if name in self._inputs or _BUFFER.fullmatch(name)]


def _assigned(module: ast.Module) -> tuple[dict[str, str], dict[str, Sequence[ast.expr]]]:
    """Of the kernels that Inductor generated: the source of each, and the types of its arguments if that is C++."""
    sources: dict[str, str] = {}
    types: dict[str, Sequence[ast.expr]] = {}
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call(func=function, args=arguments)):
                if ast.unparse(function).startswith("async_compile."):
                    values = [argument.value for argument in arguments if isinstance(argument, ast.Constant)]
                    sources[name] = max((text for text in values if isinstance(text, str)), key=len, default="")
                if arguments and isinstance(arguments[0], ast.List):
                    types[name] = arguments[0].elts
    return sources, types


def _outputs(name: str, source: str, types: Sequence[ast.expr] | None) -> list[bool] | None:
    """For each argument of a generated kernel whether it is written to; None if unknown."""
    if types is not None:
        return ["const" not in ast.unparse(declared) for declared in types]
    match = re.search(rf"def {re.escape(name)}\(([^)]*)\)", source)  # Triton
    return None if match is None else ["out_ptr" in argument for argument in match[1].split(",")]


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements, with those inside ``with``."""
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        else:
            yield statement
