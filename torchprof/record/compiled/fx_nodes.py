"""One node of an FX graph that torch.compile makes: its op and its owner.

All is read from the ``target``, the arguments and the ``meta`` of a ``torch.fx.Node``.
"""

from __future__ import annotations

import operator
import re
from types import CodeType
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import SELF, Owner, TracedModule

# Names that Dynamo gives to modules while it traces a function, parsed into paths of modules.
#
# Dynamo calls such a name a source: an expression that starts at a variable of the compiled function
# (``torch/_dynamo/source.py``).

_SOURCE = re.compile(r"([LG]\['[^']*'\])(.*)")
"""A source: a local or a global variable of the compiled function, and the steps from there."""
_STEP = re.compile(r"""\.(\w+)|\[(\d+)\]|\[(?:'([^']*)'|"([^"]*)")\]""")
"""A step of a source: an attribute, an index or a key."""
_OWN_TENSOR = re.compile(r".*(\._|\['_)(parameters|buffers)('\])?\['[^']*'\]")
"""A source that ends with a module's own parameter or buffer."""
_NO_STEPS = frozenset({"__dict__", "_modules", "_parameters", "_buffers"})
"""Steps that are not part of a module's path. Dynamo writes some of them; for a class that defines ``__getattr__`` it
writes all."""


class Taken(NamedTuple):
    """A graph input of a compiled function that is a tensor of a module: the number of the input, and the function's
    name for the module (see ``TracedModule``)."""

    number: int
    root: str
    path: tuple[str, ...]


def taken_by(graph: Any) -> list[Taken]:
    """The tensors that a compiled function takes from modules, one for each module that it names and for each child of
    such a module.

    A parameter is preferred to a buffer, because a forward may replace a buffer. The module to which the compiled
    forward belongs is left out: its label is known from the range around the call.
    """
    called = called_module()
    tensors: dict[str, dict[tuple[str, tuple[str, ...]], Taken]] = {"parameters": {}, "buffers": {}}
    for number, node in enumerate(node for node in graph.nodes if node.op == "placeholder"):
        name = getattr(getattr(node, "_dynamo_source", None), "name", "")
        source = str(name() if callable(name) else name)
        if own := _OWN_TENSOR.fullmatch(source):
            step = step_of(source, "")
            taken = Taken(number, root_of(step.root, called), step.path[:-1])
            if taken.root != SELF:
                tensors[own[2]].setdefault((taken.root, taken.path[:1]), taken)
    return [*{**tensors["buffers"], **tensors["parameters"]}.values()]


def step_of(source: str, cls: Any) -> TracedModule:
    """The module of a source, such as ``L['self'].layers.0``, ``L['self']._modules['fc']`` or
    ``L['self'].__dict__['_modules']['fc']``. A source of another form is a root without a path. ``cls``: the class of
    the module, or its qualified name."""
    kind = (cls if isinstance(cls, str) else getattr(cls, "__name__", "")).rpartition(".")[2]
    match = _SOURCE.fullmatch(source)
    if match is None or _STEP.sub("", match[2]):
        return TracedModule(source, (), kind)
    path = (next(filter(None, step), "") for step in _STEP.findall(match[2]))
    return TracedModule(match[1], tuple(step for step in path if step not in _NO_STEPS), kind)


def root_of(root: str, called: str | None) -> str:
    """``SELF`` if ``root`` is ``called``, the variable of the module whose forward is compiled. No other root stays
    equal to ``SELF``: ``self`` may also be the argument of a function that is not the forward of a module."""
    return SELF if root == called else f"{SELF} of a function" if root == SELF else root


def called_module() -> str | None:
    """The variable that holds the module whose forward is being compiled (``L['self']``); None if the function that is
    being compiled is not the forward of exactly one of its variables."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    function = InstructionTranslator.current_tx().output.root_tx
    names = [
        name
        for name, value in function.f_locals.items()
        if hasattr(type(value), "forward") and _is_forward_of(value, function.f_code)
    ]
    return f"L['{names[0]}']" if len(names) == 1 else None


def _is_forward_of(module: Any, code: CodeType) -> bool:
    """Whether code belongs to a module's forward: to the forward itself, to a function that it decorates, or to the
    part of it after a graph break."""
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


_GRADIENT_SUM = "Gradient addition node"
"""The stack trace that torch gives a node that sums gradients (``torch/fx/traceback.py``)."""
_SAME_GRADIENT = frozenset({"aten.add.Tensor", "aten.sub.Tensor", "aten.clone.default", "aten.alias.default"})
"""Ops, other than views, with the same gradient for input and output: their backward may need no node."""


class TracedNode(NamedTuple):
    """A node of a graph before Inductor's own passes.

    ``inputs`` and ``users``: by name, without the graph's output. ``owner``: see ``owner_of``. ``is_given``: it is an
    input of the graph. ``sums_gradients``: it adds the gradients of the several uses of one tensor.
    ``only_copies``: the compiler added it to copy a value: into an input of the graph, such as a buffer that the
    forward changes, or into another memory layout. ``restores_random_state``: it runs an op inside a checkpoint again
    with the random numbers of the forward (``torch/_prims/rng_prims.py``). ``sequence``: the sequence number of
    autograd, which an op and its backward share. ``gradient_of``: the output of the forward graph whose gradient it is.
    ``keeps_gradient``: the gradient of an input may be the unchanged gradient of its output. ``is_product``: there is a
    formula for its FLOPs.
    """

    inputs: tuple[str, ...]
    users: tuple[str, ...]
    owner: Owner | None
    is_given: bool
    sums_gradients: bool
    only_copies: bool
    restores_random_state: bool
    sequence: int | None
    gradient_of: Any
    keeps_gradient: bool
    is_product: bool

    @classmethod
    def of(cls, node: Any) -> TracedNode:
        target = str(node.target)
        copies_into = str(node.args[0].op) if target == "aten.copy_.default" else ""
        return cls(
            inputs=tuple(input_node.name for input_node in node.all_input_nodes),
            users=tuple(user.name for user in node.users if user.op != "output"),
            owner=owner_of(node),
            is_given=node.op in ("placeholder", "get_attr"),
            sums_gradients=_GRADIENT_SUM in str(node.meta.get("stack_trace", "")),
            only_copies=copies_into == "placeholder" or target == "prims.inductor_force_stride_order.default",
            restores_random_state="run_with_rng_state" in target,
            sequence=node.meta.get("seq_nr"),
            gradient_of=getattr(node.meta.get("desc"), "output", None),
            keeps_gradient=is_view(node) or target in _SAME_GRADIENT,
            is_product=_is_product(node),
        )

    @property
    def inherits_owner(self) -> bool:
        """Whether the compiler added the node, so that its owner follows from the nodes around it."""
        return self.sums_gradients or self.only_copies


def is_op_of_kernel(node: Any, kernel: str) -> bool:
    """Whether a library kernel is named after a node's op."""
    return _last_name(node.target) == plain_kernel_name(kernel)


def op_name(node: Any) -> str:
    """The name of a node's op, as in the profiler's events."""
    return _last_name(_op_of(node))


def _op_of(node: Any) -> Any:
    """The op that a node runs. Some nodes get it as an argument: inside a checkpoint, nodes that save and restore the
    state of random numbers around the op (``torch/_prims/rng_prims.py``)."""
    return next((arg for arg in node.args[:2] if hasattr(arg, "overloadpacket")), node.target)


def _last_name(op: Any) -> str:
    return str(getattr(op, "overloadpacket", op)).rpartition(".")[2]


def plain_kernel_name(kernel: str) -> str:
    """The name of a kernel as in the profiler's events: ``addmm`` for ``extern_kernels.addmm`` or
    ``torch.ops.aten.addmm.default``. The names of Inductor's own kernels have no dots and stay."""
    steps = kernel.split(".")
    if steps[0] in ("extern_kernels", "inductor_extern_kernels"):
        return steps[-1]
    if steps[:2] == ["torch", "ops"]:
        return steps[3]
    return steps[1] if len(steps) > 2 or steps[0] == "aten" else steps[-1]


def is_saved_for_backward(output: Any) -> bool:
    """Whether a graph has an output only for its backward. ``output``: its description by torch."""
    return type(output).__name__.startswith("SavedForBackwards")


def is_view(node: Any) -> bool:
    """Whether the output of a node is its input, or a part of it, in another shape."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return node.target is operator.getitem
    of_result = schema.returns[0].alias_info if schema.returns else None
    return of_result is not None and not of_result.is_write


def _is_product(node: Any) -> bool:
    """Whether ``torch.utils.flop_counter`` has a formula for the op of a node."""
    from torch.utils.flop_counter import flop_registry

    return getattr(_op_of(node), "overloadpacket", None) in flop_registry


def owner_of(node: Any) -> Owner | None:
    """The modules in whose forwards a node was traced, outer to inner; None if unknown."""
    meta = node.meta
    stack = meta.get("nn_module_stack") or meta.get("fwd_nn_module_stack")
    if stack:
        return tuple(step_of(path, cls) for path, cls in stack.values())
    if meta.get("source_fn_stack") or meta.get("fwd_source_fn_stack"):
        return ()
    # A node that a pass put around an op has no stack. The nodes that unpack its results have the stack of the op.
    of_results = {owner_of(user) for user in node.users if user.target is operator.getitem} - {None}
    return of_results.pop() if len(of_results) == 1 else None
