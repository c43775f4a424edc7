"""The operators of a model's forward, each with the layers that called it: a trace is aligned with them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from torchprof.attribute.events import Detail, Event, Kind
from torchprof.errors import TorchprofError
from torchprof.record.labels import Labels, label_of
from torchprof.record.modules import first_line, shape_of, without_data, wrapped_step
from torchprof.record.plan import Plan
from torchprof.record.session import Session, refuse_if_profiled
from torchprof.record.torch_internals import needed
from torchprof.traces.aligned_calls import LayerCall, ReferenceOp
from torchprof.traces.alignment import Reference

_pytree = needed("torch.utils._pytree")
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # torch has fused operators for inference
_SMALL = 2**30  # the most bytes of a model that is copied and called on the CPU
_IMAGE, _LENGTH = 224, 16  # the likely sizes of an image, and of a sequence
_MODES = ((True, True), (False, False), (False, True))
"""How a model is called, on which its operators may depend: whether in training mode, and whether with gradients."""


def references_of(
    model: nn.Module, root: str, args: Sequence[Any] | None, kwargs: Mapping[str, Any]
) -> list[Reference]:
    """The different orders of operators that a forward of the model may have: in training and in inference.

    A copy of the model runs on the meta device: nothing is computed. A small model on the CPU also runs there if it
    cannot run without data, or if torch has fused operators for it that it does not use on the meta device. ``root``:
    the name of the model in its labels. ``args``: None if they are not known; then inputs are tried that fit the first
    layer. Raises TorchprofError if the model cannot be copied or does not run.
    """
    refuse_if_profiled()
    path: tuple[str, ...] = (root,)
    wrapped = model
    while (step := wrapped_step(wrapped)) is not None:  # the copy is of the wrapped model
        path, wrapped = (*path, step), getattr(wrapped, step)
    twin = without_data(model)
    inputs = [tuple(args)] if args is not None else [(tensor,) * _arguments(twin) for tensor in _likely_inputs(twin)]
    references: dict[tuple[tuple[str, tuple[LayerCall, ...]], ...], Reference] = {}  # by what tells them apart
    failure: BaseException | None = None

    def run(model: nn.Module, device: str) -> None:
        nonlocal failure
        for training, with_gradients in _MODES:
            model.train(training)
            for args in inputs:
                reference = _recorded(model, path, device, args, kwargs, with_gradients)
                if isinstance(reference, Exception):
                    failure = failure or reference
                    continue
                references.setdefault(tuple((op.name, op.calls) for op in reference), reference)
                break

    run(twin, "meta")
    has_fused = any(isinstance(module, _FUSED) for module in wrapped.modules())
    if (not references or has_fused) and _is_small_on_cpu(wrapped):
        run(_on_cpu(wrapped), "cpu")
    if not references:
        name, what = type(model).__name__, "the inputs" if args is not None else "likely inputs"
        raise TorchprofError(
            f"The forward of {name} does not run on the meta device with {what}"
            f"{f': {first_line(failure)}' if failure is not None else '.'} Give inputs that it can be called with: "
            "from_trace(trace, model, inputs=(x,)), or --input 1,3,224,224."
        )
    return [*references.values()]


def _is_small_on_cpu(model: nn.Module) -> bool:
    tensors = [*model.parameters(), *model.buffers()]
    are_on_cpu = all(tensor.device.type in ("cpu", "meta") for tensor in tensors)
    return are_on_cpu and sum(tensor.nbytes for tensor in tensors) <= _SMALL


def _on_cpu(model: nn.Module) -> nn.Module:
    """A copy of the model on the CPU, with zeros for tensors without data."""
    twin = copy.deepcopy(model)
    if any(tensor.is_meta for tensor in (*twin.parameters(), *twin.buffers())):
        twin.to_empty(device="cpu")
        with torch.no_grad():
            for tensor in (*twin.parameters(), *twin.buffers()):
                tensor.zero_()
    return twin


def _zeros_on_cpu(value: Any) -> Any:
    """A tensor's copy on the CPU, zeros if its data are elsewhere. Others unchanged."""
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone() if value.device.type == "cpu" else torch.zeros(value.shape, dtype=value.dtype)


def _recorded(
    twin: nn.Module,
    root: tuple[str, ...],
    device: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    with_gradients: bool,
) -> Reference | Exception:
    """The operators of one call; or its error: likely inputs may not fit. ``root``: the beginning of its labels."""
    on_device = shape_of if device == "meta" else _zeros_on_cpu
    args, kwargs = _pytree.tree_map(on_device, (tuple(args), dict(kwargs)))
    plan = Plan([twin], None)
    labels, session = Labels(plan.targets), Session(None, record_shapes=True)
    labels.attach()
    try:
        session.start()
        session.begin()
        try:
            # torch uses no fused operators inside a context of a device.
            where = torch.device("meta") if device == "meta" else nullcontext()
            with torch.random.fork_rng([]), where, torch.set_grad_enabled(with_gradients):
                twin(*args, **kwargs)
        except Exception as error:  # of the user's code
            return error
        finally:
            session.stop()
    finally:
        labels.detach()
    label_at = {label_of(spot.path): label_of((*root, *spot.path[1:])) for spot in plan.spots}
    return tuple(_ops(session.columns(lambda name: Detail.SHAPES).events(), session, label_at))


def _ops(events: Iterator[Event], session: Session, label_at: Mapping[str, str]) -> Iterator[ReferenceOp]:
    """The operators directly in layers, without those inside other operators."""
    calls: list[tuple[int, LayerCall]] = []
    until, number = 0, 0
    for event in events:
        while calls and calls[-1][0] <= event.start_ns:
            calls.pop()
        if event.kind is Kind.LABEL:
            if event.name not in label_at:  # of hooks that exchange data
                continue
            number += 1
            calls.append((event.end_ns, LayerCall(label_at[event.name], number)))
        elif event.kind is Kind.OP and event.start_ns >= until and calls:
            if "::" in event.name:  # not a function of autograd in Python
                until = max(event.end_ns, event.start_ns + 1)
            # torch before 2.13 gives no shapes of lists.
            shapes = tuple(tuple(shape or ()) for shape in session.signatures[event.signature].shapes)
            yield ReferenceOp(event.name, shapes, tuple(call for _, call in calls))


def _arguments(model: nn.Module) -> int:
    """How many arguments a model needs at least."""
    parameters = inspect.signature(model.forward).parameters.values()
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return max(sum(each.default is each.empty and each.kind in by_position for each in parameters), 1)


def _likely_inputs(model: nn.Module) -> Iterator[torch.Tensor]:
    """Inputs that may fit the first layer that has parameters."""
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            yield torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            sizes = module.weight.dim() - 2
            for size in (_IMAGE, 32):
                yield torch.empty(1, module.in_channels, *[size if sizes < 3 else 16] * sizes, device="meta")
        elif isinstance(module, nn.Linear):
            yield torch.empty(1, _LENGTH, module.in_features, device="meta")
            yield torch.empty(1, module.in_features, device="meta")
        elif isinstance(module, nn.RNNBase):
            yield torch.empty(_LENGTH, 1, module.input_size, device="meta")
        else:
            continue
        return
