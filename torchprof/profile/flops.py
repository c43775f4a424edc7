"""``flops``: count MACs and FLOPs from shapes alone, on the meta device, whose tensors have no data."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from torchprof.errors import TorchprofError
from torchprof.profile.profile import Profile
from torchprof.record.modules import ON_DATA, first_line, shape_of, without_data
from torchprof.record.torch_internals import needed
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run

_pytree = needed("torch.utils._pytree")
_SAYS_META = re.compile(r"\bmeta\b", re.IGNORECASE)


class _Untimed(Profile):
    """A Profile without times, which mean nothing on the meta device."""

    _timed = False


def flops(model: nn.Module, *args: Any, **kwargs: Any) -> Run:
    """Count parameters, MACs and FLOPs of ``model(*args, **kwargs)`` without computing it.

    A copy of the model runs once on the meta device, where tensors have shapes but no data. This needs no memory and no
    arithmetic, for models of any size: one made under ``with torch.device("meta"):`` need not fit into memory. The
    model and its arguments are not changed. If gradients are enabled and an output requires one, backward runs as well,
    from all outputs; for the forward alone, call this under ``torch.no_grad()``. On the meta device, attention and
    recurrent layers run as separate operators. Their forward counts the same as on other devices, but their backward
    lacks the work that a fused kernel repeats (QKᵀ, a fifth of attention's backward).

    The run has no times. Hooks of the model run as in any call.

    Raises TorchprofError for anything but a module, for a model that cannot be copied without its data, for lazy
    parameters and TorchScript, and if the forward needs the values of tensors (``if x.sum() > 0``). Such a model can be
    profiled on data, with ``torchprof.Profile(model, with_flops=True)``. Other errors of the model pass through.
    """
    return flops_of_call(model, "forward", args, kwargs)


def flops_of_call(model: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """``flops`` of a call of one of the model's methods; "forward" means the model itself."""
    if not isinstance(model, nn.Module):
        raise TorchprofError(f"flops needs a torch.nn.Module and the arguments to call it with, not {model!r:.80}.")
    twin = without_data(model)
    args, kwargs = _pytree.tree_map(shape_of, (args, kwargs), is_leaf=lambda value: isinstance(value, PackedSequence))
    try:
        with torch.device("meta"):
            return _counted(twin, method, args, kwargs)
    except (RuntimeError, NotImplementedError) as error:
        if not _SAYS_META.search(str(error)):
            raise
        raise TorchprofError(
            f"The {method} of {type(twin).__name__} does not run on the meta device, where tensors have no values: "
            f"{first_line(error)} {ON_DATA}"
        ) from error


def flops_on_data(
    model: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any], failure: Exception
) -> Run:
    """The same of a call with data on the CPU, which needs memory and time. ``failure``: of the meta device, for a
    warning."""
    run = _counted(model, method, args, kwargs)
    return _with_warning(run, RunWarning.of("counted_on_data", reason=_reason(failure)))


def _reason(error: BaseException) -> str:
    """What failed, as the end of a sentence: the innermost line of code outside of torch and torchprof, and the first
    line of the error."""
    cause = error.__cause__ if isinstance(error, TorchprofError) and error.__cause__ is not None else error
    packages = str(Path(torch.__file__).parent), str(Path(__file__).parents[1])
    lines = [frame for frame in traceback.extract_tb(cause.__traceback__) if not frame.filename.startswith(packages)]
    where = f"`{lines[-1].line}` ({Path(lines[-1].filename).name}:{lines[-1].lineno}) failed: " if lines else ""
    return f"{where}{first_line(cause):.200}"


def _counted(model: nn.Module, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Run:
    """The run of a call and, if gradients are enabled, of backward."""
    with _Untimed(model, device="cpu", with_flops=True) as prof:
        result = (model if method == "forward" else getattr(model, method))(*args, **kwargs)
        failure = _run_backward(result) if torch.is_grad_enabled() else None
    if failure is None:
        return prof.run
    return _with_warning(prof.run, RunWarning.of("backward_incomplete", error=first_line(failure)))


def _with_warning(run: Run, warning: RunWarning) -> Run:
    return replace(run, metas=(replace(run.meta, warnings=(*run.meta.warnings, warning)),))


def _run_backward(result: Any) -> Exception | None:
    """Run backward from all outputs that require a gradient. Returns the error that ended it; None without one."""
    leaves = _pytree.tree_leaves(result)
    outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    try:
        if outputs:
            torch.autograd.backward(outputs, [torch.empty_like(output) for output in outputs])
    except (RuntimeError, NotImplementedError) as error:
        return error
    return None
