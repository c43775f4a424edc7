"""Warnings about work that is missing from the MACs and FLOPs of a run, one for each reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from itertools import compress

from torchprof.run.rows import Rows
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.warnings import RunWarning
from torchprof.run.words import (
    GRAPH,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    REPLAY,
    REPLAYS,
    Frame,
    FrameKind,
    is_generated,
    is_left_over,
)

_OPERATOR = "uncounted_operator"

_OPERATORS = 8  # the most operators that have a warning of their own


@dataclass
class _UncountedWork:
    """Uncounted calls by name, and the names of their layers, in the order of first use."""

    calls: Counter[str] = field(default_factory=Counter)
    layers: dict[str, None] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return sum(self.calls.values())

    def warning(self, code: str) -> RunWarning:
        names = tuple(name for name, _ in self.calls.most_common())
        return RunWarning.of(code, list(self.layers), names=names, count=self.count)


def about_uncounted(rows: Rows, without_shapes: Set[str]) -> Iterator[RunWarning]:
    """A warning for each operator without a formula, most calls first, and one for each other reason why work is not
    counted.

    ``without_shapes``: the operators that have a formula, but were recorded without shapes.
    """
    works: dict[tuple[str, str], _UncountedWork] = {}
    columns = rows.columns
    for index in compress(range(len(rows)), columns["uncounted"]):
        frames, uncounted = rows.frames[columns["frames"][index]], columns["uncounted"][index]
        # Rows without frames are Python's time: no FLOPs. Work launched before the recording is not part of the sums.
        if frames and not is_left_over(frames):
            reason = _reason(frames, without_shapes)
            name = frames[-1].name
            work = works.setdefault((reason, name if reason == _OPERATOR else ""), _UncountedWork())
            work.calls[name] += uncounted
            layer = columns["layer"][index]
            nowhere = OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME
            work.layers[rows.layers[layer].name if layer >= 0 else nowhere] = None
    most_first = sorted(works.items(), key=lambda item: -item[1].count)
    operators = [work for (reason, _), work in most_first if reason == _OPERATOR]
    for work in operators[:_OPERATORS]:
        yield work.warning(_OPERATOR)
    if len(operators) > _OPERATORS:
        rest = operators[_OPERATORS:]
        yield RunWarning.of("uncounted_more", operators=len(rest), calls=sum(work.count for work in rest))
    for (reason, _), work in most_first:
        if reason != _OPERATOR:
            yield work.warning(reason)


def _reason(frames: Sequence[Frame], without_shapes: Set[str]) -> str:
    kind, name, signature = frames[-1]
    if kind == FrameKind.KERNEL:
        if any(frame.kind == FrameKind.KERNELS and frame.name == REPLAY for frame in frames):
            return "uncounted_replayed"
        has_no_launch = frames[0].kind == FrameKind.LABEL and frames[0].name == LAUNCH_NOT_RECORDED
        return "uncounted_no_launch" if has_no_launch else "uncounted_no_operator"
    if name in REPLAYS:
        return "uncounted_replay"
    if name == GRAPH:
        return "uncounted_graph"
    if is_generated(name):
        return "uncounted_generated"
    has_shapes = signature is not None and signature.shapes
    return WITHOUT_SHAPES if name in without_shapes and not has_shapes else _OPERATOR
