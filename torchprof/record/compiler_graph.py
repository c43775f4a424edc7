"""The graphs that torch.compile makes: which module each node comes from."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from math import prod
from types import CodeType
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import SELF, CompiledKernel, OwnedWork, Owner, TracedModule
from torchprof.run.words import GRAPH_NOT_READ, NESTED_GRAPHS

_GRADIENT_SUM = "Gradient addition node"
"""How torch explains a sum of the gradients of a tensor with several uses (``torch/fx/traceback.py``)."""
_SOURCE = re.compile(r"([LG]\['[^']*'\])(.*)")
"""What Dynamo calls where something comes from: a local or a global variable of the compiled function, and the way
from there (``torch/_dynamo/source.py``)."""
_STEP = re.compile(r"""\.(\w+)|\[(\d+)\]|\[(?:'([^']*)'|"([^"]*)")\]""")
"""A step of that way: an attribute, an index or a key."""
_OWN_TENSOR = re.compile(r".*(\._|\['_)(parameters|buffers)('\])?\['[^']*'\]")
"""A parameter or a buffer that a module has itself, as the end of that way."""
_NO_STEPS = frozenset({"__dict__", "_modules", "_parameters", "_buffers"})
"""The steps through which a module has what it has: Dynamo names some of them, those of a class with a ``__getattr__``
of its own all."""
_PASS_ON = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.clone.default", "aten.alias.default"})
"""The ops beside views that take as gradient what they give: their backward may be no node at all."""


class _Node(NamedTuple):
    """A node of a graph before Inductor's own passes.

    ``users`` without the graph's output. ``sums``: it adds the gradients of the several uses of one tensor; ``relays``
    and ``recomputes``: see ``_relays`` and ``_recomputes``; ``is_given``: it is an input of the graph. ``sequence`` is
    the number of the op that autograd saw, which its backward has as well; ``gradient_of``: the output of the forward
    graph whose gradient it is; ``passes_on``: the gradient of what it takes may be just that of what it gives.
    """

    inputs: tuple[str, ...]
    users: tuple[str, ...]
    owner: Owner | None
    sums: bool
    relays: bool
    is_given: bool
    recomputes: bool
    sequence: int | None
    gradient_of: Any
    passes_on: bool

    @property
    def hands_on(self) -> bool:
        return self.sums or self.relays


class _Work(NamedTuple):
    """A node that a kernel is made from, for whom it works, whether that is to compute again what the forward inside a
    checkpoint computed, and what it does. ``flops`` is None where there is no
    formula: it counts then as one for each of the ``elements``."""

    node: str
    owners: list[Owner | None]
    recomputes: bool
    flops: int | None
    elements: int
    nbytes: int


class Graph:
    """A graph that is being compiled, as it was before Inductor's own passes, and the kernels that it got since.

    ``forward`` is the graph whose backward it is, None where that is not known.
    """

    def __init__(self, forward: Graph | None = None, is_backward: bool = False) -> None:
        self._is_backward = is_backward
        self.why_unknown = ""  # the reason, where reading it failed, or some kernels are in functions of their own
        self._forward = forward if forward is not None and not forward.why_unknown else None
        self._kernels: list[tuple[str, set[str], list[_Work]]] = []  # with the node that a library is called for
        self._of_library: set[str] = set()  # all those nodes, and those that templates are for
        self._nodes: dict[str, _Node] = {}
        self._of_sequence: dict[int, list[str]] = {}
        self._outputs: dict[Any, str] = {}  # but for what is only kept for backward
        self._summed: dict[str, str | None] = {}
        self._called: str | None = None  # the root of what was traced from the module whose forward this is
        self._lowered: tuple[Any, dict[str, tuple[int, Any]]] = (None, {})

    @contextmanager
    def reading(self) -> Iterator[None]:
        """In here an error is none of the program that is compiled: it only makes the graph unknown."""
        try:
            yield
        except Exception:
            self.why_unknown = GRAPH_NOT_READ

    def read(self, graph: Any) -> None:
        self._called = _called_module() if self._forward is None else self._forward._called
        for node in graph.nodes:
            description = node.meta.get("desc")
            if node.op == "output":
                names = [getattr(one, "name", "") for one in node.args[0]]
                self._outputs = {one: name for one, name in zip(description or (), names) if not _is_kept(one)}
                continue
            self._nodes[node.name] = _Node(
                tuple(one.name for one in node.all_input_nodes),
                tuple(one.name for one in node.users if one.op != "output"),
                _owner(node),
                _GRADIENT_SUM in str(node.meta.get("stack_trace", "")),
                _relays(node),
                node.op in ("placeholder", "get_attr"),
                _recomputes(node),
                node.meta.get("seq_nr"),
                getattr(description, "output", None),
                _is_view(node) or str(node.target) in _PASS_ON,
            )
            if node.meta.get("seq_nr") is not None:
                self._of_sequence.setdefault(node.meta["seq_nr"], []).append(node.name)

    def nodes_from(self, lowering: Any, names: Iterable[str]) -> list[Any]:
        """The nodes that a kernel is made from, in their order."""
        if hasattr(lowering, "parent"):
            self.why_unknown = NESTED_GRAPHS
        if self._lowered[0] is not lowering:
            self._lowered = lowering, {node.name: (at, node) for at, node in enumerate(lowering.module.graph.nodes)}
        found = {name: self._lowered[1][name] for name in names if name in self._lowered[1]}
        return [node for _, node in sorted(found.values(), key=operator.itemgetter(0))]

    def forget_lowering(self) -> None:
        """It holds tensors."""
        self._lowered = None, {}

    def add(self, name: str, nodes: Sequence[Any], template: Sequence[Any] = (), prologue: Sequence[Any] = ()) -> None:
        """A kernel that was made from some nodes of the graph, of which views and constants are no work. An op of a
        library is only the last of those that it is said to be made from: the others made what it takes. So is a
        ``template``, but for what is computed in it before, the ``prologue``."""
        called = [node for node in nodes if "." in name and _is_op(node, name)][-1:]
        made_for = {node.name for node in (*called, *template)}
        self._of_library |= made_for
        made = called or self._made_in(nodes, prologue)
        working = [node for node in made if not _is_view(node)] or made
        works = [
            _Work(
                node.name,
                self._owners_of(node),
                self._is_recomputed(node),
                _flops(node),
                _elements(node),
                _nbytes(node),
            )
            for node in [node for node in working if node.all_input_nodes] or working
        ]
        self._kernels.append((_op_name(called[0]) if called else _plain(name), made_for, works))

    def _made_in(self, nodes: Sequence[Any], prologue: Sequence[Any]) -> list[Any]:
        """The nodes that a kernel is said to be made from but for those that made what it takes: where a library or a
        template is called for one of them, what comes before that."""
        among, found = set(nodes), set(prologue)
        waiting = [node for node in nodes if among.isdisjoint(node.users)]
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                if node.name not in self._of_library:
                    waiting.extend(among.intersection(node.all_input_nodes))
        return [node for node in nodes if node in found]

    @property
    def written(self) -> int:
        """How many kernels there are so far."""
        return len(self._kernels)

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:
        return tuple(
            CompiledKernel(
                name,
                tuple(self._parts(works, made_for)) or (OwnedWork(None, 0, 0),),
                self._is_backward and bool(works) and all(work.recomputes for work in works),
            )
            for name, made_for, works in self._kernels
        )

    def _parts(self, works: Iterable[_Work], made_for: Set[str]) -> Iterator[OwnedWork]:
        for work in works:
            # What a library does, a kernel may prepare: that is not the work of a product.
            prepares = work.node in self._of_library and work.node not in made_for
            flops = work.elements if work.flops is None or prepares else work.flops
            for owner in work.owners:
                yield OwnedWork(self._from_self(owner), flops // len(work.owners), work.nbytes // len(work.owners))

    def _from_self(self, owner: Owner | None) -> Owner | None:
        """With ``SELF`` for the module whose forward this is, and for no other."""
        if owner is None:
            return None
        return tuple(one._replace(root=_root(one.root, self._called)) for one in owner)

    def _is_recomputed(self, node: Any) -> bool:
        """Whether a node of the graph that kernels are made from, or what it is in the place of, computes again."""
        known = {node.name} if node.name in self._nodes else self._replaced_by(node)
        return bool(known) and all(self._nodes[name].recomputes for name in known or ())

    def _owners_of(self, node: Any) -> list[Owner | None]:
        """For whom a node works, of the graph that kernels are made from."""
        if node.name in self._nodes:
            return self._owners(node.name)
        replaced = self._replaced_by(node)
        if replaced is None:
            return [_owner(node)]
        return list(dict.fromkeys(owner for name in sorted(replaced) for owner in self._owners(name)))

    def _owners(self, name: str) -> list[Owner | None]:
        node = self._nodes[name]
        if node.hands_on:
            of_uses = self._of_all_uses(name) if node.sums else None
            return [self._of_all_inputs(name) if of_uses is None else of_uses]
        if node.owner is None and not node.inputs:  # for those that use it: a parameter, the seed of random numbers
            users = [self._nodes[user] for user in node.users]
            return list(dict.fromkeys(user.owner for user in users if not user.hands_on)) or [None]
        return [node.owner]

    def _of_all_inputs(self, name: str) -> Owner | None:
        """The innermost module that all inputs of a node come from."""
        common: Owner | None = None
        seen, waiting = {name}, [name]
        while waiting:
            for inner in self._nodes[waiting.pop()].inputs:
                node = self._nodes[inner]
                if inner in seen or node.is_given:
                    continue
                seen.add(inner)
                if node.hands_on:
                    waiting.append(inner)
                elif node.owner is None:
                    return None
                else:
                    common = node.owner if common is None else _common(common, node.owner)
        return common

    def _of_all_uses(self, name: str) -> Owner | None:
        """The innermost module that has all uses of the tensor whose gradients a node adds; None where that is not
        known."""
        summed = self._sums_for(name)
        owners = [] if summed is None or self._forward is None else self._forward._users(summed)
        common = owners[0] if owners else None
        for owner in owners[1:]:
            common = None if common is None or owner is None else _common(common, owner)
        return common

    def _sums_for(self, name: str) -> str | None:
        """The tensor of the forward graph whose gradients a node adds, None where that is not known.

        Each of these may be the gradient of some tensors. It is the only one of several uses that all of them may be
        the gradient of; where there are more, the one that passes its gradient on to the others.
        """
        if name not in self._summed:
            self._summed[name] = None
            forward = self._forward
            taken = [self._gradient_of(inner) for inner in self._nodes[name].inputs]
            if forward is not None and taken:
                shared = {one for one in set.intersection(*taken) if len(forward._users(one)) > 1}
                found = [one for one in shared if shared <= forward._passed_on([one])]
                self._summed[name] = found[0] if len(found) == 1 else None
        return self._summed[name]

    def _gradient_of(self, name: str) -> set[str]:
        """The tensors of the forward graph that a node may be the gradient of."""
        node, forward = self._nodes[name], self._forward
        takes: list[str | None] = []
        if forward is not None and node.sums:
            takes = [self._sums_for(name)]
        elif forward is not None and node.gradient_of is not None:
            takes = [forward._outputs.get(node.gradient_of)]
        elif forward is not None:
            made = forward._of_sequence.get(node.sequence, []) if node.sequence is not None else []
            takes = [one for maker in made for one in forward._nodes[maker].inputs if one not in made]
        return set() if forward is None else forward._passed_on(one for one in takes if one)

    def _passed_on(self, names: Iterable[str]) -> set[str]:
        """Some tensors, and those that have a gradient from them that may be just theirs."""
        found: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name not in found:
                found.add(name)
                waiting.extend(self._nodes[name].inputs if self._nodes[name].passes_on else ())
        return found

    def _users(self, name: str) -> list[Owner | None]:
        """The modules of the operators that use a tensor. An output of the graph is a use by no module."""
        users = [(user, self._nodes[user]) for user in self._nodes[name].users]
        owners = {(user if node.sequence is None else node.sequence): node.owner for user, node in users}
        return [*owners.values(), *([()] if name in self._outputs.values() else [])]

    def _replaced_by(self, node: Any) -> set[str] | None:
        """The nodes that a pass put another in the place of: all between what that takes and what it gives. None where
        torch does not say what it gives, or they take something else."""
        gives = self._in_place_of(node)
        takes = {one.name if one.name in self._nodes else self._in_place_of(one) for one in node.all_input_nodes}
        found: set[str] = set()
        waiting = [] if gives is None else [gives]
        while waiting:
            name = waiting.pop()
            if name in takes or name in found:
                continue
            if self._nodes[name].is_given:
                return None
            found.add(name)
            waiting.extend(self._nodes[name].inputs)
        return found or None

    def _in_place_of(self, node: Any) -> str | None:
        """The node whose result another gives, which a pass put there; None where torch does not say."""
        sources = node.meta.get("from_node", ())
        while sources:  # a pass may have replaced what another put there
            replaced = [one for one in sources if any(action.name == "REPLACE" for action in one.action)]
            if replaced and replaced[-1].name in self._nodes:
                return str(replaced[-1].name)
            sources = replaced[-1].from_node if replaced else ()
        return None


def _is_op(node: Any, kernel: str) -> bool:
    """Whether a node is the op that a kernel of a library is named after."""
    return _last_name(node.target) == _plain(kernel)


def _op_name(node: Any) -> str:
    """The name in events of the op that a node carries out."""
    return _last_name(_op_and_inputs(node)[0])


def _op_and_inputs(node: Any) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node carries out, and what it takes. Some are handed the op: inside a checkpoint, what saves and
    restores the state of random numbers around it (``torch/_prims/rng_prims.py``)."""
    for at, one in enumerate(node.args[:2]):
        if hasattr(one, "overloadpacket"):
            return one, node.args[at + 1 :]
    return node.target, node.args


def _last_name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op)).rpartition(".")[2]


def _relays(node: Any) -> bool:
    """Whether a node of no module's puts a new value into an input of its graph, as that of a buffer, or lays out anew
    what another gives."""
    if str(node.target) == "aten.copy_.default":
        return str(node.args[0].op) == "placeholder"
    return str(node.target) == "prims.inductor_force_stride_order.default"


def _is_kept(output: Any) -> bool:
    """Whether an output of a graph is there only for backward."""
    return type(output).__name__.startswith("SavedForBackwards")


def _is_view(node: Any) -> bool:
    """Whether a node gives what it takes, or a part of it, in another shape."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    of_result = schema.returns[0].alias_info if schema.returns else None
    return of_result is not None and not of_result.is_write


def _plain(kernel: str) -> str:
    """The name of a kernel as events have it, from ``extern_kernels.addmm``, ``torch.ops.aten.addmm.default`` and the
    like; one of Inductor's own has no dots."""
    steps = kernel.split(".")
    if steps[0] in ("extern_kernels", "inductor_extern_kernels"):
        return steps[-1]
    if steps[:2] == ["torch", "ops"]:
        return steps[3]
    return steps[1] if len(steps) > 2 or steps[0] == "aten" else steps[-1]


def _sizes(value: Any) -> list[tuple[int, int]]:
    """Elements and bytes of each tensor in what a node gives."""
    return [
        (prod(_shape(one)), prod(_shape(one)) * one.dtype.itemsize)
        for one in (value if isinstance(value, (tuple, list)) else [value])
        if hasattr(one, "dtype") and hasattr(one, "shape")
    ]


def _shape(tensor: Any) -> tuple[int, ...]:
    """With its hint for a size that is no number yet: to ask that for its number would make it one for good, and
    torch.compile would compile again for every other."""
    return tuple(_number(size) for size in tensor.shape)


def _number(size: Any) -> int:
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def _in_numbers(value: Any) -> Any:
    """What an op takes or gives, for a formula: of tensors their shapes."""
    if isinstance(value, (tuple, list)):
        return [_in_numbers(one) for one in value]
    if hasattr(value, "meta"):
        return _in_numbers(value.meta.get("val"))
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        return _shape(value)
    return _number(value) if hasattr(value, "node") else value


def _flops(node: Any) -> int | None:
    """As ``torch.utils.flop_counter`` counts them."""
    from torch.utils.flop_counter import flop_registry

    op, inputs = _op_and_inputs(node)
    formula = flop_registry.get(getattr(op, "overloadpacket", None))
    if formula is None:
        return None
    try:
        kwargs = {name: _in_numbers(value) for name, value in node.kwargs.items()}
        return int(formula(*map(_in_numbers, inputs), **kwargs, out_val=_in_numbers(node)))
    except Exception:  # it takes something else
        return None


def _elements(node: Any) -> int:
    """Of the largest tensor that a node takes or gives."""
    elements = [size for one in (node, *node.all_input_nodes) for size, _ in _sizes(one.meta.get("val"))]
    return max(elements, default=0)


def _nbytes(node: Any) -> int:
    """What a node takes and gives, each once."""
    return sum(size for one in (node, *node.all_input_nodes) for _, size in _sizes(one.meta.get("val")))


def _owner(node: Any) -> Owner | None:
    """The modules that a node was traced in; None where that is not known."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if stack:
        return tuple(_step(path, cls) for path, cls in stack.values())
    if meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack"):
        return ()
    # What a pass put around an op has no traces of its own, but what takes its results apart has those of the op.
    of_results = {_owner(user) for user in node.users if user.target is operator.getitem} - {None}
    return of_results.pop() if len(of_results) == 1 else None


def _recomputes(node: Any) -> bool:
    """Whether a node of a backward graph computes again what the forward inside a checkpoint computed: torch marks such
    nodes of the forward, and puts copies of them into backward (``torch/_functorch/partitioners.py``)."""
    if _op_and_inputs(node)[0] is not node.target:
        results = [user for user in node.users if user.target is operator.getitem and user.meta]
        return bool(results) and all(map(_recomputes, results))
    is_marked = getattr(node.meta.get("recompute"), "name", "").endswith("_RECOMPUTE")
    return is_marked and node.meta.get("partitioner_tag") != "is_backward"


def _called_module() -> str | None:
    """What the function that is compiled now calls the module whose forward it is; None where it is none."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    function = InstructionTranslator.current_tx().output.root_tx
    names = [
        name
        for name, value in function.f_locals.items()
        if hasattr(type(value), "forward") and _is_forward_of(value, function.f_code)
    ]
    return f"L['{names[0]}']" if len(names) == 1 else None


def _is_forward_of(module: Any, code: CodeType) -> bool:
    """Whether code is that of a module's forward, of what it decorates, or of the rest of it after a graph break."""
    waiting = [cls.__dict__.get("forward") for cls in type(module).__mro__]
    waiting.append(vars(module).get("forward"))
    while waiting:
        function = waiting.pop()
        own = getattr(function, "__code__", None)
        if own is not None and own.co_filename == code.co_filename:
            last = max((line for _, _, line in own.co_lines() if line), default=0)
            if own.co_firstlineno <= code.co_firstlineno <= last:
                return True
        if function is not None:
            waiting.append(getattr(function, "__wrapped__", None))
    return False


def _step(source: str, cls: Any) -> TracedModule:
    """A module from what Dynamo calls where it comes from: ``L['self'].layers.0``, ``L['self']._modules['fc']``,
    ``L['self'].__dict__['_modules']['fc']``. What comes otherwise is a root of its own."""
    kind = (cls if isinstance(cls, str) else getattr(cls, "__name__", "")).rpartition(".")[2]
    found = _SOURCE.fullmatch(source)
    if found is None or _STEP.sub("", found[2]):
        return TracedModule(source, (), kind)
    path = (next(filter(None, step), "") for step in _STEP.findall(found[2]))
    return TracedModule(found[1], tuple(step for step in path if step not in _NO_STEPS), kind)


def _root(root: str, called: str | None) -> str:
    """``SELF`` for what the compiled function calls the module whose forward it is, and for nothing else."""
    return SELF if root == called else f"{SELF} of a function" if root == SELF else root


class Taken(NamedTuple):
    """An input of a compiled function's graph that it takes from a module: its number among all, and what the function
    calls that module."""

    number: int
    root: str
    path: tuple[str, ...]


def taken_by(graph: Any) -> list[Taken]:
    """What a compiled function takes from modules: of each that it names, and of each that such a one has, one tensor.
    A parameter rather than a buffer, which a forward may replace. Nothing of the module whose forward it is: a label
    tells that."""
    called = _called_module()
    found: dict[str, dict[tuple[str, tuple[str, ...]], Taken]] = {"parameters": {}, "buffers": {}}
    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        name = getattr(getattr(node, "_dynamo_source", None), "name", "")
        source = str(name() if callable(name) else name)
        if own := _OWN_TENSOR.fullmatch(source):
            step = _step(source, "")
            taken = Taken(number, _root(step.root, called), step.path[:-1])
            if taken.root != SELF:
                found[own[2]].setdefault((taken.root, taken.path[:1]), taken)
    return [*{**found["buffers"], **found["parameters"]}.values()]


def _common(one: Owner, other: Owner) -> Owner:
    return tuple(ours for ours, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
