"""The text that DeepSpeed's profiler prints: the model's repr with figures, the largest modules, sentences."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from torch import nn

from torchprof.encoding import encodable
from torchprof.integrations.deepspeed.recorded import LayerSums, Recorded
from torchprof.integrations.deepspeed.strings import (
    duration_to_string,
    flops_to_string,
    number_to_string,
    params_to_string,
)
from torchprof.integrations.figures import UNKNOWN_TEXT, known_sum, share_text
from torchprof.integrations.modules import Position, parameter_sizes, positions, repr_lines


def _largest(column: Mapping[str, tuple[float | None, str]], number: int) -> dict[str, str]:
    """The texts of the ``number`` largest values, largest first, unknown values last. Equal values keep their order."""

    def size(kind: str) -> float:
        value = column[kind][0]
        return -1 if value is None else value

    return {kind: column[kind][1] for kind in sorted(column, key=size, reverse=True)[:number]}


class Printed:
    """The text for a model and its recorded figures."""

    def __init__(self, model: nn.Module, recorded: Recorded) -> None:
        self._model = model
        self._recorded = recorded
        self.totals = recorded.totals()
        self.total = recorded.total()
        self.params = known_sum(parameter_sizes(model).values())

    def _figures(self, path: tuple[str, ...]) -> LayerSums:
        """The figures of the module at a path; all 0 if the module was added after the recording."""
        layer = self._recorded.layer_of.get(path)
        return self.totals.get(layer, LayerSums()) if layer is not None else LayerSums()

    def _line(self, position: Position) -> str:
        figures = self._figures(position.path)
        params = known_sum(parameter_sizes(position.module).values()) if position.module is not None else None
        macs, seconds = figures.known_macs, figures.seconds
        rate: float | None = None
        if macs is not None and seconds is not None and (seconds or not macs):
            rate = 2 * macs / seconds if seconds else 0
        return ", ".join(
            (
                params_to_string(params),
                f"{share_text(params, self.params, 3)} Params",
                figures.macs_text(3),
                f"{share_text(macs, self.total.known_macs, 3)} MACs",
                duration_to_string(seconds, precision=3),
                f"{share_text(seconds, self.total.seconds, 2)} time",
                f"{UNKNOWN_TEXT} TFLOPS" if rate is None else flops_to_string(rate, "TFLOPS", 3),
            )
        )

    def tree(self) -> str:
        """The model's repr with figures."""
        return "\n".join(repr_lines(self._model, self._line))

    def top(self, depth: int, top_num: int) -> str:
        """The module classes at one depth with the most multiply-adds, parameters and time."""
        modules = [(position, position.module) for position in positions(self._model) if position.module is not None]
        deepest = max(position.depth for position, _ in modules)
        depth = deepest if depth == -1 else min(depth, deepest)
        work: dict[str, LayerSums] = {}
        sizes: dict[str, dict[int, int | None]] = {}
        for position, module in modules:
            if position.depth == depth:
                kind = type(module).__name__
                work.setdefault(kind, LayerSums()).add(self._figures(position.path))
                sizes.setdefault(kind, {}).update(parameter_sizes(module))
        params = {kind: known_sum(each.values()) for kind, each in sizes.items()}
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
        """Print the tree, the largest modules, or both, and then the sentences."""
        if tree:
            print(encodable(self.tree(), sys.stdout))
        if top:
            print(encodable(self.top(depth, top_num), sys.stdout))
        if tree or top:
            print(encodable(self.sentences(), sys.stdout))

    def sentences(self) -> str:
        """One line about the difference between this count and torchprof's own, and the run's warnings."""
        count = self._recorded.by_torchprof
        bound = "at least " if count.uncounted else ""
        macs, flops = (number_to_string(number if self.total.calls else None) for number in (count.macs, count.flops))
        difference = (
            "Multiply-adds by this tool's convention: products of convolution (plus its bias), linear and recurrent "
            "layers, one for each input element of pooling, relu-like functions and softmax, two of batch norm, 0 for "
            f"all else; torchprof itself counts {bound}{macs} MACs and {bound}{flops} FLOPs here."
        )
        if self._recorded.device is not None:
            difference += f" Time is that of the work on the {self._recorded.device} device."
        return "\n".join((difference, *self._recorded.warnings))
