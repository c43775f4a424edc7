"""How remedies of findings are carried out on a copy of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.run.processes import usable_cpus


class Remedy(NamedTuple):
    """How a remedy is carried out. ``how``: the lines for the user. ``change``: changes a copy of the model, given the
    layers of the finding in it; returns whether there was anything to change. ``around``: is entered around each call,
    with ``spans_backward`` also around its backward.
    ``cast``: the type of floating-point inputs.
    """

    how: str
    change: Callable[[nn.Module, Sequence[nn.Module]], bool] = lambda model, layers: True
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    cast: torch.dtype | None = None
    spans_backward: bool = False


def _in_float32(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    model.float()
    return True


def _compiled(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    for layer in layers:
        layer.compile()
    return bool(layers)


def _without_dropout(model: nn.Module, layers: Sequence[nn.Module]) -> bool:
    has_changed = False
    for module in {module for layer in layers for module in layer.modules()}:
        name = "p" if "Dropout" in type(module).__name__ else "dropout"
        if type(getattr(module, name, None)) is float and getattr(module, name) > 0:
            setattr(module, name, 0.0)
            has_changed = True
    return has_changed


@contextmanager
def _with_more_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(max(usable_cpus() // 2, 1))
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _without_denormals() -> Iterator[None]:
    was_on = not torch.tensor(1e-40, dtype=torch.float32, device="cpu").mul(1).item()
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_on)


_AUTOCAST = 'with torch.autocast("cpu", dtype=torch.bfloat16):'
REMEDIES = {
    "bfloat16_not_used": Remedy(_AUTOCAST, around=partial(torch.autocast, "cpu", dtype=torch.bfloat16)),
    "half_precision_on_the_cpu": Remedy("model.float(), x.float()", _in_float32, cast=torch.float32),
    "double_precision": Remedy("model.float(), x.float()", _in_float32, cast=torch.float32),
    "costly_dropout": Remedy("p=0 in each dropout", _without_dropout),
    "few_threads": Remedy("torch.set_num_threads(…)", around=_with_more_threads, spans_backward=True),
    "slower_than_usual": Remedy("torch.set_flush_denormal(True)", around=_without_denormals, spans_backward=True),
    "many_small_operators": Remedy("layer.compile()", _compiled),
}
"""By the rule of a finding, what is tried."""
