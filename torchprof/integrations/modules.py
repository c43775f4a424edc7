"""The modules and parameters of a model, found without recursion, so that deep models work as well."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy


class Position(NamedTuple):
    """One place in the tree of modules. ``path``: the root's class name, then attribute names.

    ``module`` is None if the child is None, as after ``self.downsample = None`` for a registered module.
    """

    depth: int
    name: str
    module: nn.Module | None
    path: tuple[str, ...]


def positions(model: nn.Module) -> Iterator[Position]:
    """All positions, depth first. A module that contains one of its own ancestors does not cause an endless loop."""
    waiting = [(Position(0, "", model, (type(model).__name__,)), frozenset([id(model)]))]
    while waiting:
        position, above = waiting.pop()
        yield position
        if position.module is not None:
            waiting.extend(
                (Position(position.depth + 1, name, child, (*position.path, name)), above | {id(child)})
                for name, child in reversed(position.module._modules.items())
                if id(child) not in above or child is None
            )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. ``Module.modules()`` fails on models deeper than Python's recursion limit."""
    modules = (position.module for position in positions(model))
    return list({id(module): module for module in modules if module is not None}.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of a model, each once."""
    params = (param for module in modules_of(model) for param in module._parameters.values() if param is not None)
    return list({id(param): param for param in params}.values())


def parameter_sizes(model: nn.Module) -> dict[int, int | None]:
    """The number of elements of each parameter, by the parameter's ``id``; None if it is unknown.

    It is unknown for lazy parameters, and for the packed parameters of a quantized module (by the ``id`` of that
    module).
    """
    packed = {id(module): None for module in modules_of(model) if hasattr(module, "_packed_params")}
    return packed | {id(param): None if is_lazy(param) else param.numel() for param in parameters_of(model)}
