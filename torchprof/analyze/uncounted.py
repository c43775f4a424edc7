"""What is not in the MACs and FLOPs of a run, in sentences: one for each reason, with where and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torchprof.errors import some
from torchprof.run.rows import Rows
from torchprof.run.words import (
    GRAPH,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    REPLAY,
    REPLAYS,
    Frame,
    is_generated,
    is_left_over,
)

_OPERATOR = "{names} ({count} call{s}, in {layers})"
_NO_SHAPES = "{count} call{s} of {names} (in {layers}), recorded without shapes: record_shapes=True records them"
_GENERATED = "{count} generated kernel{s} of torch.compile (in {layers})"
_GRAPH = "{count} call{s} of compiled graphs, whose kernels were not recorded (in {layers})"
_REPLAYED = "{count} kernel{s} that CUDA graphs replayed (in {layers})"
_REPLAY = "{count} CUDA graph{s}, whose kernels were not recorded (in {layers})"
_NO_OPERATOR = "{count} kernel{s} that no operator launched: {names} (in {layers})"
_NO_LAUNCH = "{count} kernel{s} whose launch was not recorded: {names} (in {layers})"

_OPERATORS = 8  # so many have a sentence each
_WIDTH = 60  # of a name


@dataclass
class _Work:
    """Calls by the name of what was called, and the names of the layers, in the order of first use."""

    calls: Counter[str] = field(default_factory=Counter)
    layers: dict[str, None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.calls.values())

    def said(self, reason: str) -> str:
        names = some([_short(name) for name, _ in self.calls.most_common()])
        layers = some([*map(_short, self.layers)])
        return reason.format(count=self.count, s="" if self.count == 1 else "s", names=names, layers=layers)


def about_uncounted(rows: Rows, has_formula: Callable[[str], bool]) -> Iterator[str]:
    """A sentence for each reason why work is not counted, and one for each of the operators without a formula, those
    with the most calls first.

    ``has_formula``: whether an operator of that name would be counted, had its shapes been recorded.
    """
    found: dict[tuple[str, str], _Work] = {}
    columns = rows.columns
    for at, uncounted in enumerate(columns["uncounted"]):
        frames = rows.frames[columns["frames"][at]]
        if uncounted and not is_left_over(frames):  # what was launched before the recording is in no sum
            reason = _reason(frames, has_formula)
            name = frames[-1].name
            work = found.setdefault((reason, name if reason == _OPERATOR else ""), _Work())
            work.calls[name] += uncounted
            layer = columns["layer"][at]
            nowhere = OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME
            work.layers[rows.layers[layer].name if layer >= 0 else nowhere] = None
    most_first = sorted(found.items(), key=lambda item: -item[1].count)
    operators = [work for (reason, _), work in most_first if reason == _OPERATOR]
    for work in operators[:_OPERATORS]:
        yield f"Not counted: {work.said(_OPERATOR)}."
    if len(operators) > _OPERATORS:
        rest = operators[_OPERATORS:]
        yield f"Not counted: {len(rest)} more without a formula (calls: {sum(work.count for work in rest)})."
    for (reason, _), work in most_first:
        if reason != _OPERATOR:
            yield f"Not counted: {work.said(reason)}."


def _reason(frames: Sequence[Frame], has_formula: Callable[[str], bool]) -> str:
    kind, name, signature = frames[-1]
    if kind == "kernel":
        if any(frame.kind == "kernels" and frame.name == REPLAY for frame in frames):
            return _REPLAYED
        has_no_launch = frames[0].kind == "label" and frames[0].name == LAUNCH_NOT_RECORDED
        return _NO_LAUNCH if has_no_launch else _NO_OPERATOR
    if name in REPLAYS:
        return _REPLAY
    if name == GRAPH:
        return _GRAPH
    if is_generated(name):
        return _GENERATED
    is_without_shapes = signature is None or not signature.shapes
    return _NO_SHAPES if is_without_shapes and has_formula(name) else _OPERATOR


def _short(name: str) -> str:
    """A long name with its middle left out."""
    head = _WIDTH * 3 // 5
    return name if len(name) <= _WIDTH else f"{name[:head]}…{name[len(name) - (_WIDTH - 1 - head) :]}"
