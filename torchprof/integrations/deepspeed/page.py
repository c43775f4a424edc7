"""The page that DeepSpeed's profiler prints."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.encoding import fitting
from torchprof.integrations.deepspeed.counting import Figures, Recorded
from torchprof.integrations.deepspeed.strings import (
    UNKNOWN,
    duration_to_string,
    flops_to_string,
    number_to_string,
    params_to_string,
)

# The page


class _Part(NamedTuple):
    """A module where it stands in the model; ``module`` is None for a child that is None."""

    depth: int
    name: str
    module: nn.Module | None
    path: tuple[str, ...]


def _parts(model: nn.Module) -> Iterator[_Part]:
    """All places of the model, depth first. A module that holds one of its own ancestors leads into no circle."""
    waiting = [(_Part(0, "", model, (type(model).__name__,)), frozenset([id(model)]))]
    while waiting:
        part, above = waiting.pop()
        yield part
        if part.module is not None:
            waiting.extend(
                (_Part(part.depth + 1, name, child, (*part.path, name)), above | {id(child)})
                for name, child in reversed(part.module._modules.items())
                if id(child) not in above or child is None
            )


def modules_of(model: nn.Module) -> list[nn.Module]:
    """All modules of a model, each once. torch's own walk ends at Python's limit of recursion."""
    return list({id(part.module): part.module for part in _parts(model) if part.module is not None}.values())


def params_of(model: nn.Module) -> list[nn.Parameter]:
    """All parameters of a model, each once."""
    held = (param for module in modules_of(model) for param in module._parameters.values() if param is not None)
    return list({id(param): param for param in held}.values())


def sizes_of(model: nn.Module) -> dict[int, int | None]:
    """The elements of a model's parameters, by identity; None where a lazy module has not made them yet, and for what
    a quantised module has packed."""
    packed = {id(module): None for module in modules_of(model) if hasattr(module, "_packed_params")}
    return packed | {id(param): None if is_lazy(param) else param.numel() for param in params_of(model)}


def sum_of_sizes(sizes: Mapping[int, int | None]) -> int | None:
    known = [size for size in sizes.values() if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _share(value: float | None, total: float | None, decimals: int) -> str:
    if value is None or total is None:
        return UNKNOWN
    return f"{value / total if total else 0:.{decimals}%}"


def _largest(column: Mapping[str, tuple[float | None, str]], number: int) -> dict[str, str]:
    """The texts of the largest values, largest first; of equal ones the first met; the unknown last."""

    def size(kind: str) -> float:
        value = column[kind][0]
        return -1 if value is None else value

    return {kind: column[kind][1] for kind in sorted(column, key=size, reverse=True)[:number]}


class Page:
    """What is printed of a model and what was recorded of it."""

    def __init__(self, model: nn.Module, recorded: Recorded) -> None:
        self._model = model
        self._recorded = recorded
        self.totals = recorded.totals()
        self.total = recorded.total()
        self._params = sum_of_sizes(sizes_of(model))

    def _figures(self, path: tuple[str, ...]) -> Figures:
        """What was recorded of a module; nothing where it was not there yet."""
        layer = self._recorded.layer_of.get(path)
        return self.totals.get(layer, Figures()) if layer is not None else Figures()

    def _line(self, part: _Part, module: nn.Module) -> str:
        figures = self._figures(part.path)
        params = sum_of_sizes(sizes_of(module))
        macs, seconds = figures.known_macs, figures.seconds
        rate: float | None = None
        if macs is not None and seconds is not None and (seconds or not macs):
            rate = 2 * macs / seconds if seconds else 0
        return ", ".join(
            (
                params_to_string(params),
                f"{_share(params, self._params, 3)} Params",
                figures.macs_text(3),
                f"{_share(macs, self.total.known_macs, 3)} MACs",
                duration_to_string(seconds, precision=3),
                f"{_share(seconds, self.total.seconds, 2)} time",
                f"{UNKNOWN} TFLOPS" if rate is None else flops_to_string(rate, "TFLOPS", 3),
            )
        )

    def tree(self) -> str:
        """The model's repr with figures, laid out as torch does: small leaves in one line."""
        lines = []
        opened = 0
        for part in _parts(self._model):
            while opened > part.depth:
                opened -= 1
                lines.append("  " * opened + ")")
            pad = "  " * part.depth
            head = f"{pad}({part.name}): " if part.depth else ""
            if part.module is None:
                lines.append(f"{head}None")
                continue
            head += f"{part.module._get_name()}("
            figures, more = self._line(part, part.module), part.module.extra_repr()
            if not part.module._modules and "\n" not in more:
                lines.append(f"{head}{figures}, {more})")
                continue
            lines.append(head)
            lines.extend(f"{pad}  {line}" for line in f"{figures}, {more}".rstrip().split("\n"))
            opened += 1
        lines.extend("  " * depth + ")" for depth in reversed(range(opened)))
        return "\n".join(lines)

    def top(self, depth: int, top_num: int) -> str:
        """The kinds of modules at one depth that have most multiply-adds, parameters and time."""
        parts = [(part, part.module) for part in _parts(self._model) if part.module is not None]
        deepest = max(part.depth for part, _ in parts)
        depth = deepest if depth == -1 else min(depth, deepest)
        work: dict[str, Figures] = {}
        sizes: dict[str, dict[int, int | None]] = {}
        for part, module in parts:
            if part.depth == depth:
                kind = type(module).__name__
                work.setdefault(kind, Figures()).add(self._figures(part.path))
                sizes.setdefault(kind, {}).update(sizes_of(module))
        params = {kind: sum_of_sizes(each) for kind, each in sizes.items()}
        columns: dict[str, dict[str, tuple[float | None, str]]] = {
            "flops": {kind: (done.known_macs, done.macs_text(2)) for kind, done in work.items()},
            "params": {kind: (number, params_to_string(number)) for kind, number in params.items()},
            "time": {kind: (done.seconds, duration_to_string(done.seconds)) for kind, done in work.items()},
        }
        return "\n".join(
            f"Top {min(top_num, len(work))} modules in {what} at depth {depth} are {_largest(column, top_num)}"
            for what, column in columns.items()
        )

    def show(self, depth: int, top_num: int, tree: bool = True, top: bool = True) -> None:
        """Print one of the two parts, or both, and what is to be known of them."""
        if tree:
            print(fitting(self.tree(), sys.stdout))
        if top:
            print(fitting(self.top(depth, top_num), sys.stdout))
        if tree or top:
            print(fitting(self.notes(), sys.stdout))

    def notes(self) -> str:
        """How the count differs from torchprof's own, in one line; then what the run is not sure of."""
        bound = "at least " if self._recorded.is_lower_bound else ""
        macs, flops = (
            number_to_string(number if self.total.calls else None)
            for number in (self._recorded.macs, self._recorded.flops)
        )
        difference = (
            "Multiply-adds by this tool's convention: products of convolution (plus its bias), linear and recurrent "
            "layers, one for each input element of pooling, relu-like functions and softmax, two of batch norm, 0 for "
            f"all else; torchprof itself counts {bound}{macs} MACs and {bound}{flops} FLOPs here."
        )
        if self._recorded.device is not None:
            difference += f" Time is that of the work on the {self._recorded.device} device."
        return "\n".join((difference, *self._recorded.warnings))
