"""One node of an FX graph that torch.compile makes: its op, its work, its sizes, its owner.

All is read from the ``target``, the arguments and the ``meta`` of a ``torch.fx.Node``.
"""

from __future__ import annotations

import operator
from math import prod
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
            is_product=flops_of(node) is not None,
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
    return _last_name(_op_and_inputs(node)[0])


def _op_and_inputs(node: Any) -> tuple[Any, tuple[Any, ...]]:
    """The op that a node runs, and its arguments. Some nodes get the op as an argument: inside a checkpoint, nodes that
    save and restore the state of random numbers around the op (``torch/_prims/rng_prims.py``)."""
    for index, arg in enumerate(node.args[:2]):
        if hasattr(arg, "overloadpacket"):
            return arg, node.args[index + 1 :]
    return node.target, node.args


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


def flops_of(node: Any) -> int | None:
    """The FLOPs of a node by ``torch.utils.flop_counter``; None if it has no formula for the op."""
    from torch.utils.flop_counter import flop_registry

    op, inputs = _op_and_inputs(node)
    formula = flop_registry.get(getattr(op, "overloadpacket", None))
    if formula is None:
        return None
    try:
        kwargs = {name: _in_numbers(value) for name, value in node.kwargs.items()}
        return int(formula(*map(_in_numbers, inputs), **kwargs, out_val=_in_numbers(node)))
    except Exception:  # the formula expects other arguments
        return None


def largest_numel_of(node: Any) -> int:
    """The number of elements of the largest tensor among a node's inputs and outputs."""
    values = [inner.meta.get("val") for inner in (node, *node.all_input_nodes)]
    parts = (part for value in values for part in (value if isinstance(value, (tuple, list)) else [value]))
    return max((prod(_shape(part)) for part in parts if _is_tensor(part)), default=0)


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


def _is_tensor(value: Any) -> bool:
    return hasattr(value, "dtype") and hasattr(value, "shape")


def _shape(tensor: Any) -> tuple[int, ...]:
    return tuple(_number(size) for size in tensor.shape)


def _number(size: Any) -> int:
    """A size as a number; for a symbolic size, its hint. ``int(size)`` would add a guard that fixes the size, and
    torch.compile would then compile again for every other size."""
    if isinstance(size, int):
        return size
    hint = getattr(getattr(size, "node", None), "hint", None)
    return hint if isinstance(hint, int) else 1


def _in_numbers(value: Any) -> Any:
    """An argument or a result of an op in the form that a FLOPs formula expects: tensors as their shapes."""
    if isinstance(value, (tuple, list)):
        return [_in_numbers(item) for item in value]
    if hasattr(value, "meta"):
        return _in_numbers(value.meta.get("val"))
    if _is_tensor(value):
        return _shape(value)
    return _number(value) if hasattr(value, "node") else value
