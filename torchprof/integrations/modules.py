"""The modules and parameters of a model, and its repr with figures, without recursion: deep models work as well."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
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


def repr_lines(model: nn.Module, figures_at: Callable[[Position], str]) -> Iterator[str]:
    """The lines of the model's repr, with the figures of each module before its ``extra_repr``."""
    opened = 0  # how many modules are not written to their end yet
    for position in positions(model):
        while opened > position.depth:
            opened -= 1
            yield "  " * opened + ")"
        pad = "  " * position.depth
        head = f"{pad}({position.name}): " if position.depth else ""
        module = position.module
        if module is None:
            yield f"{head}None"
            continue
        text = f"{figures_at(position)}, {module.extra_repr()}"
        head += f"{module._get_name()}("
        if "\n" not in text and not module._modules:
            yield f"{head}{text})"
            continue
        yield head
        yield from (f"{pad}  {line}".rstrip() for line in text.rstrip().split("\n"))
        opened += 1
    yield from ("  " * depth + ")" for depth in reversed(range(opened)))


def largest(figures: Mapping[str, tuple[float | None, str]], number: int) -> dict[str, str]:
    """The texts of the ``number`` largest values, largest first, unknown values last. Equal values keep their order."""

    def size(name: str) -> float:
        value = figures[name][0]
        return -1 if value is None else value

    return {name: figures[name][1] for name in sorted(figures, key=size, reverse=True)[:number]}


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


def parameter_count(module: nn.Module | None) -> int | None:
    """The number of parameters of a module, each counted once; None if it is unknown."""
    return None if module is None else known_sum(parameter_sizes(module).values())


def known_sum(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is unknown."""
    listed = list(numbers)
    known = [number for number in listed if number is not None]
    return sum(known) if len(known) == len(listed) else None
