"""The modules and parameters of a model, found without recursion, so that deep models work as well."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy


class Position(NamedTuple):
    """One place in the tree of modules. ``path``: the root's class name, then attribute names. ``module`` is None if
    the child is None, as after ``self.downsample = None`` for a registered module."""

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


def repr_lines(model: nn.Module, figures_at: Callable[[Position], str | None]) -> Iterator[str]:
    """The lines of the model's repr, with the figures of each module before its ``extra_repr``. Where they are None, a
    module is written without figures, and without the modules in it."""
    opened = 0  # how many modules are not written to their end yet
    shown: float = inf  # the greatest depth that is written here
    for position in positions(model):
        if position.depth > shown:
            continue
        while opened > position.depth:
            opened -= 1
            yield "  " * opened + ")"
        pad = "  " * position.depth
        head = f"{pad}({position.name}): " if position.depth else ""
        module = position.module
        if module is None:
            yield f"{head}None"
            continue
        figures, text = figures_at(position), module.extra_repr()
        shown = position.depth if figures is None else inf
        text = text if figures is None else f"{figures}, {text}"
        head += f"{module._get_name()}("
        if "\n" not in text and (figures is None or not module._modules):
            yield f"{head}{text})"
            continue
        yield head
        yield from (f"{pad}  {line}".rstrip() for line in text.rstrip().split("\n"))
        opened += 1
    yield from ("  " * depth + ")" for depth in reversed(range(opened)))


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. ``Module.modules()`` fails on models deeper than Python's recursion limit."""
    modules = (position.module for position in positions(model))
    return list({id(module): module for module in modules if module is not None}.values())


def parameters_of(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of a model, each once."""
    params = (param for module in modules_of(model) for param in module._parameters.values() if param is not None)
    return list({id(param): param for param in params}.values())


def parameter_sizes(model: nn.Module) -> dict[int, int | None]:
    """The number of elements of each parameter, by the parameter's ``id``; None if it is unknown. It is unknown for
    lazy parameters, and for the packed parameters of a quantized module (by the ``id`` of that module)."""
    packed = {id(module): None for module in modules_of(model) if hasattr(module, "_packed_params")}
    return packed | {id(param): None if is_lazy(param) else param.numel() for param in parameters_of(model)}
