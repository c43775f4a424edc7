"""A graph of torch.compile before Inductor's own passes: the modules that each node was traced in, and the nodes that
each kernel was made from. All is read from the ``target``, the arguments and the ``meta`` of ``torch.fx.Node``."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import CompiledKernel, Owner
from torchprof.record.compiled.dynamo_code import called_module, module_of_source, root_of
from torchprof.record.compiled.kept_graph import TANGENTS, plain_kernel_name
from torchprof.run.layers import common_prefix
from torchprof.run.words import GRAPH_NOT_READ, NESTED_GRAPHS

_GRADIENT_SUM = "Gradient addition node"  # the stack trace of a node that sums gradients (``torch/fx/traceback.py``)
_SAME_GRADIENT = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.clone.default", "aten.alias.default"})
"""Ops, other than views, with the same gradient for input and output: their backward may need no node."""


class TracedNode(NamedTuple):
    """A node of a graph.

    ``inputs`` and ``users``: by name, without the graph's output. ``owner``: see ``owner_of``. ``is_given``: it is an
    input of the graph. ``sums_gradients``: it adds the gradients of the several uses of one tensor.
    ``inherits_owner``: the compiler added it, to sum gradients or to copy a value (into an input of the graph, such as
    a buffer that the forward changes, or into another memory layout): its owner follows from the nodes around it.
    ``restores_random_state``: it runs an op inside a checkpoint again with the random numbers of the forward
    (``torch/_prims/rng_prims.py``). ``sequence``: the sequence number of autograd, which an op and its backward share.
    ``gradient_of``: the output of the forward graph whose gradient it is. ``keeps_gradient``: the gradient of an input
    may be the unchanged gradient of its output. ``is_product``: there is a formula for its FLOPs.
    """

    inputs: tuple[str, ...]
    users: tuple[str, ...]
    owner: Owner | None
    is_given: bool
    sums_gradients: bool
    inherits_owner: bool
    restores_random_state: bool
    sequence: int | None
    gradient_of: Any
    keeps_gradient: bool
    is_product: bool

    @classmethod
    def of(cls, node: Any) -> TracedNode:
        target = str(node.target)
        copies_into_input = target == "aten.copy_.default" and node.args[0].op == "placeholder"
        sums_gradients = _GRADIENT_SUM in str(node.meta.get("stack_trace", ""))
        return cls(
            inputs=tuple(input_node.name for input_node in node.all_input_nodes),
            users=tuple(user.name for user in node.users if user.op != "output"),
            owner=owner_of(node),
            is_given=node.op in ("placeholder", "get_attr"),
            sums_gradients=sums_gradients,
            inherits_owner=sums_gradients or copies_into_input or target == "prims.inductor_force_stride_order.default",
            restores_random_state="run_with_rng_state" in target,
            sequence=node.meta.get("seq_nr"),
            gradient_of=getattr(node.meta.get("desc"), "output", None),
            keeps_gradient=is_view(node) or target in _SAME_GRADIENT,
            is_product=_is_product(node),
        )


def owner_of(node: Any) -> Owner | None:
    """The modules in whose forwards a node was traced, outer to inner; None if unknown."""
    meta = node.meta
    if stack := meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack"):
        return tuple(module_of_source(path, cls) for path, cls in stack.values())
    if meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack"):
        return ()
    # A node that a pass put around an op has no stack. The nodes that unpack its results have the stack of the op.
    of_results = {owner_of(user) for user in node.users if user.target is operator.getitem} - {None}
    return of_results.pop() if len(of_results) == 1 else None


def is_view(node: Any) -> bool:
    """Whether the output of a node is its input, or a part of it, in another shape."""
    if (schema := getattr(node.target, "_schema", None)) is None:
        return node.target is operator.getitem
    of_result = schema.returns[0].alias_info if schema.returns else None
    return of_result is not None and not of_result.is_write


def _is_product(node: Any) -> bool:
    """Whether ``torch.utils.flop_counter`` has a formula for the op of a node."""
    from torch.utils.flop_counter import flop_registry

    return getattr(_op_of(node), "overloadpacket", None) in flop_registry


def _op_of(node: Any) -> Any:
    """The op that a node runs. Some nodes get it as an argument: inside a checkpoint, nodes that save and restore the
    state of random numbers around the op (``torch/_prims/rng_prims.py``)."""
    return next((arg for arg in node.args[:2] if hasattr(arg, "overloadpacket")), node.target)


def _last_name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op)).rpartition(".")[2]


class _Work(NamedTuple):
    """The work of a node for some modules (``owners``). ``recomputes``: it repeats work of the forward."""

    node: str
    owners: list[Owner | None]
    recomputes: bool


class _WrittenKernel(NamedTuple):
    """A kernel in the code that Inductor writes. ``made_for``: the nodes of the library op or template that it is."""

    name: str
    made_for: Set[str]
    works: Sequence[_Work]


class TracedGraph:
    """A graph that is being compiled, and the kernels made from it so far. ``forward``: the graph whose backward this
    graph is, None if unknown. ``why_unknown``: why its kernels are unknown. ``written``: its kernels in the order in
    which Inductor writes them."""

    def __init__(self, forward: TracedGraph | None = None, is_backward: bool = False) -> None:
        self._is_backward = is_backward
        self.why_unknown = ""
        self._forward = forward if forward is not None and not forward.why_unknown else None
        self.written: list[_WrittenKernel] = []
        self._of_library: set[str] = set()  # the nodes of library ops and templates, of all kernels
        self._nodes: dict[str, TracedNode] = {}
        self._of_gradients: set[str] = set()  # what needs the gradients that a backward takes
        self._of_sequence: dict[int | None, list[str]] = {}
        self._outputs: dict[Any, str] = {}  # without tensors that are only saved for backward
        self._summed_tensors: dict[str, str | None] = {}
        self._called: str | None = None  # Dynamo's name for the module whose forward this graph is
        self._lowering: Any = None  # the graph that Inductor lowers, and its nodes by name, with their numbers
        self._lowered: dict[str, tuple[int, Any]] = {}

    @contextmanager
    def reading(self) -> Iterator[None]:
        """A context in which an error only makes the graph unknown: the user's program continues."""
        try:
            yield
        except Exception:
            self.why_unknown = GRAPH_NOT_READ

    def read(self, graph: Any) -> None:
        """Read the nodes of a ``torch.fx.Graph``."""
        self._called = called_module() if self._forward is None else self._forward._called
        for node in graph.nodes:
            if node.op == "output":
                names = [getattr(output, "name", "") for output in node.args[0]]
                returned = zip(node.meta.get("desc") or (), names)
                self._outputs = {
                    value: name for value, name in returned if not type(value).__name__.startswith("SavedForBackwards")
                }
                continue
            traced = self._nodes[node.name] = TracedNode.of(node)
            if node.name.startswith(TANGENTS) or not self._of_gradients.isdisjoint(traced.inputs):
                self._of_gradients.add(node.name)
            if traced.sequence is not None:
                self._of_sequence.setdefault(traced.sequence, []).append(node.name)

    def nodes_from(self, lowering: Any, names: Iterable[str]) -> list[Any]:
        """The nodes with these names in the graph that Inductor lowers, in the graph's order."""
        if hasattr(lowering, "parent"):
            self.why_unknown = NESTED_GRAPHS
        if self._lowering is not lowering:
            self._lowering = lowering
            self._lowered = {node.name: (index, node) for index, node in enumerate(lowering.module.graph.nodes)}
        lowered = {name: self._lowered[name] for name in names if name in self._lowered}
        return [node for _, node in sorted(lowered.values(), key=operator.itemgetter(0))]

    def forget_lowering(self) -> None:
        """Drop the reference to the graph that was lowered: it keeps tensors alive."""
        self._lowering, self._lowered = None, {}

    def add(self, name: str, nodes: Sequence[Any], template: Sequence[Any] = (), prologue: Sequence[Any] = ()) -> None:
        """Add a kernel that was made from some nodes of the graph. Views and constants are not work. Inductor also
        lists the nodes that made the inputs of a library op: only the last node, the op itself, counts. So it is with a
        ``template``, but the nodes that are computed in it before (``prologue``) count, too."""
        plain_name = plain_kernel_name(name)
        called = [node for node in nodes if "." in name and _last_name(node.target) == plain_name][-1:]
        made_for = {node.name for node in (*called, *template)}
        self._of_library |= made_for
        made = called or self._made_in(nodes, prologue)
        working = [node for node in made if not is_view(node)] or made
        works = [
            _Work(node.name, self._owners_of(node), self._is_recomputed(node))
            for node in [node for node in working if node.all_input_nodes] or working
        ]
        self.written.append(_WrittenKernel(_last_name(_op_of(called[0])) if called else plain_name, made_for, works))

    def _made_in(self, nodes: Sequence[Any], prologue: Sequence[Any]) -> list[Any]:
        """The nodes that are computed in a kernel, of those that Inductor lists for it: without the nodes before a
        library op or a template, which only made its inputs."""
        among, within = set(nodes), set(prologue)
        waiting = [node for node in nodes if among.isdisjoint(node.users)]
        while waiting:
            node = waiting.pop()
            if node not in within:
                within.add(node)
                if node.name not in self._of_library:
                    waiting.extend(among.intersection(node.all_input_nodes))
        return [node for node in nodes if node in within]

    @property
    def kernels(self) -> tuple[CompiledKernel, ...]:
        """The kernels so far. The nodes of those that only prepare the inputs of a library op are that op's."""
        return tuple(
            CompiledKernel(
                name,
                tuple(self._from_self(owner) for work in works for owner in work.owners) or (None,),
                self._is_backward and bool(works) and all(work.recomputes for work in works),
                tuple(work.node for work in works if work.node in made_for or work.node not in self._of_library),
            )
            for name, made_for, works in self.written
        )

    def _from_self(self, owner: Owner | None) -> Owner | None:
        """An owner with the root ``SELF`` for the module whose forward this graph is."""
        if owner is None:
            return None
        return tuple(taken._replace(root=root_of(taken.root, self._called)) for taken in owner)

    def _is_recomputed(self, node: Any) -> bool:
        """Whether a node of the lowered graph, or what it replaced, is of the forward, too, and needs no gradients."""
        known = {node.name} if node.name in self._nodes else self._replaced_by(node) or set()
        forward = {} if self._forward is None else self._forward._nodes
        repeated = {name for name in known if name in forward and not forward[name].is_given}
        repeated |= {name for name in known if self._nodes[name].restores_random_state}
        return bool(known) and repeated == known and known.isdisjoint(self._of_gradients)

    def _owners_of(self, node: Any) -> list[Owner | None]:
        """The owners of a node of the lowered graph. A product that also adds something is that of the product."""
        if node.name in self._nodes:
            return self._owners(node.name)
        if (replaced := self._replaced_by(node)) is None:
            return [owner_of(node)]
        products = {name for name in replaced if self._nodes[name].is_product}
        return list(dict.fromkeys(owner for name in sorted(products or replaced) for owner in self._owners(name)))

    def _owners(self, name: str) -> list[Owner | None]:
        node = self._nodes[name]
        if node.inherits_owner:
            summed = self._summed_tensor(name) if node.sums_gradients else None
            of_uses = None if summed is None or self._forward is None else _around(self._forward._users(summed))
            return [self._of_all_inputs(name) if of_uses is None else of_uses]
        if node.owner is None and not node.inputs:  # a parameter or the seed of random numbers: of its users
            users = [self._nodes[user] for user in node.users]
            return list(dict.fromkeys(user.owner for user in users if not user.inherits_owner)) or [None]
        return [node.owner]

    def _of_all_inputs(self, name: str) -> Owner | None:
        """The innermost module that contains the origins of all inputs of a node; None if unknown."""
        origins = self._reached([name], lambda node: node.inputs if node.inherits_owner else ())
        nodes = [self._nodes[origin] for origin in origins]
        return _around([node.owner for node in nodes if not (node.inherits_owner or node.is_given)])

    def _summed_tensor(self, name: str) -> str | None:
        """The tensor of the forward graph whose gradients a node adds; None if unknown.

        Each gradient that the node adds may be that of several tensors. The sum belongs to the tensor with several uses
        that all have in common; of several such tensors, to the one that all others get their gradient from unchanged::

            forward: h = relu(x); v = h.view(…); y = mm(v, w1) + mm(v, w2)
            backward: add of the gradients that come from mm(v, w1) and from mm(v, w2): v has two uses, so it is v
        """
        if name not in self._summed_tensors:
            self._summed_tensors[name] = None
            forward = self._forward
            taken = [self._gradient_of(inner) for inner in self._nodes[name].inputs]
            if forward is not None and taken:
                shared = {name for name in set.intersection(*taken) if len(forward._users(name)) > 1}
                same = [name for name in shared if shared <= forward._same_gradient([name])]
                self._summed_tensors[name] = same[0] if len(same) == 1 else None
        return self._summed_tensors[name]

    def _gradient_of(self, name: str) -> set[str]:
        """The tensors of the forward graph whose gradient a node may be."""
        node, forward = self._nodes[name], self._forward
        if forward is None:
            return set()
        if node.sums_gradients:
            takes = [self._summed_tensor(name)]
        elif node.gradient_of is not None:
            takes = [forward._outputs.get(node.gradient_of)]
        else:
            made = forward._of_sequence.get(node.sequence, [])
            takes = [name for maker in made for name in forward._nodes[maker].inputs if name not in made]
        return forward._same_gradient(name for name in takes if name)

    def _same_gradient(self, names: Iterable[str]) -> set[str]:
        """Some tensors, and those whose gradient may be the unchanged gradient of one of them."""
        return self._reached(names, lambda node: node.inputs if node.keeps_gradient else ())

    def _reached(self, names: Iterable[str], next_of: Callable[[TracedNode], Iterable[str]]) -> set[str]:
        """Some nodes, and all nodes that follow from them."""
        reached: set[str] = set()
        waiting = [*names]
        while waiting:
            name = waiting.pop()
            if name not in reached:
                reached.add(name)
                waiting.extend(next_of(self._nodes[name]))
        return reached

    def _users(self, name: str) -> list[Owner | None]:
        """The owners of the operators that use a tensor, with () if the tensor is an output of the graph."""
        users = [(user, self._nodes[user]) for user in self._nodes[name].users]
        owners = {(user if node.sequence is None else node.sequence): node.owner for user, node in users}
        return [*owners.values(), *([()] if name in self._outputs.values() else [])]

    def _replaced_by(self, node: Any) -> set[str] | None:
        """The nodes that a pass of Inductor replaced by this node: all between its inputs and its result. None if torch
        does not record which result it replaces, or if the replaced nodes have other inputs."""
        result = self._replaced_node(node)
        inputs = {
            input_node.name if input_node.name in self._nodes else self._replaced_node(input_node)
            for input_node in node.all_input_nodes
        }
        last = [] if result is None or result in inputs else [result]
        between = self._reached(last, lambda node: (name for name in node.inputs if name not in inputs))
        return None if any(self._nodes[name].is_given for name in between) else between or None

    def _replaced_node(self, node: Any) -> str | None:
        """The node whose result a node that a pass added computes instead; None if torch does not record it."""
        sources = node.meta.get("from_node", ())
        while sources:  # a pass may have replaced a node that another pass added
            replaced = [source for source in sources if any(action.name == "REPLACE" for action in source.action)]
            if replaced and replaced[-1].name in self._nodes:
                return str(replaced[-1].name)
            sources = replaced[-1].from_node if replaced else ()
        return None


def _around(owners: Sequence[Owner | None]) -> Owner | None:
    """The innermost module that contains all owners; None if there is none, or if one of them is unknown."""
    known = [owner for owner in owners if owner is not None]
    return common_prefix(known) if known and len(known) == len(owners) else None
