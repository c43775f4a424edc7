"""One node of an FX graph that torch.compile makes: its op and its owner.

All is read from the ``target``, the arguments and the ``meta`` of a ``torch.fx.Node``.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

from torchprof.attribute.compiled_graphs import Owner
from torchprof.record.compiled.dynamo_sources import step_of

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
