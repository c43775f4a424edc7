"""Sums of operators over the rows of a run: self, total and calls. Every view of operators uses these.

Views group rows into operators in different ways: by name and phase, by layer, by input shapes. A view numbers its
operators. For each ``RowKey`` it gives a ``Way``: the operators that rows with this key count for.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress
from typing import NamedTuple

from torchprof.run.measures import FIELDS, NO_COST, Cost
from torchprof.run.rows import Around, Rows
from torchprof.run.words import BETWEEN_OPS, RANGES, Frame, FrameKind, number_of_phase


class RowKey(NamedTuple):
    """The columns of ``Rows`` that decide which operators a row counts for."""

    layer: int
    phase: int
    within: int
    frames: int


class Way(NamedTuple):
    """The operators that a row counts for, by number: for the total of each of ``totals``, and for the self and the
    calls of ``inner`` (negative: of none)."""

    totals: tuple[int, ...]
    inner: int


@dataclass
class Sums:
    """The sums of an operator. ``self`` excludes the operators inside it. ``total`` is that of its outermost
    occurrences, with everything in them. ``calls`` is 0 for the time between operators. ``parts`` is how many of the
    calls were made inside an operator whose MACs and FLOPs include those of the operators that it calls; 0 if the view
    does not request it."""

    calls: int = 0
    parts: int = 0
    self: Cost = field(default_factory=Cost)
    total: Cost = field(default_factory=Cost)


def sum_operators(
    rows: Rows,
    way_of: Callable[[RowKey], Way | None],
    is_part: Callable[[tuple[int, int, int, int]], bool] | None = None,
) -> list[Sums]:
    """The sums of each numbered operator over all rows, without rows of Python source lines, which are not work.
    ``way_of`` is called once for each key of the rows; rows for which it returns None are left out. ``is_part``:
    whether the calls of rows with a key were made inside an operator whose MACs and FLOPs include theirs."""
    measures = tuple(name for name in FIELDS if name in rows.nonzero)
    lines = rows.summed(RowKey._fields, ("calls", *measures), frames=_is_work)
    ways = {key: way for key in map(RowKey._make, lines) if (way := way_of(key)) is not None}
    size = 1 + max((number for way in ways.values() for number in (*way.totals, way.inner)), default=-1)
    is_call = [bool(frames) and not is_kernel(frames) for frames in rows.frames]
    calls, parts = [0] * size, [0] * size
    own, totals = [[0] * size for _ in measures], [[0] * size for _ in measures]
    for key, way in ways.items():
        called, *values = lines[key]
        if way.inner >= 0 and is_call[key.frames]:
            calls[way.inner] += called
            if is_part is not None and is_part(key):
                parts[way.inner] += called
        for sums, selves, value in zip(totals, own, values):
            if value:
                for number in way.totals:
                    sums[number] += value
                if way.inner >= 0:
                    selves[way.inner] += value
    return [*map(Sums, calls, parts, _costs(measures, own, size), _costs(measures, totals, size))]


def _is_work(frames: Sequence[Frame]) -> bool:
    return not frames or frames[-1].kind != FrameKind.PYTHON


def _costs(measures: Sequence[str], sums: Sequence[Sequence[int]], size: int) -> list[Cost]:
    """The costs with these sums, in which each measure has a value for each of ``size`` operators."""
    columns = dict(zip(measures, sums))
    nothing = [0] * size
    return [
        Cost(*values) if any(values) else NO_COST for values in zip(*(columns.get(name, nothing) for name in FIELDS))
    ]


def is_kernel(frames: Sequence[Frame]) -> bool:
    return bool(frames) and frames[-1].kind == FrameKind.KERNEL


def rows_in_ranges(rows: Rows) -> Rows:
    """The rows of work inside a range, such as a label or a compiled region: no other row counts for a range."""
    is_in_range = [_has_range(frames) for frames in rows.frames]
    is_called_in_range = [any(_has_range(around.frames) for around in within) for within in rows.within]
    kept: list[bool] = []
    if any(is_in_range) or any(is_called_in_range):
        chains, within = rows.columns["frames"], rows.columns["within"]
        kept = [is_in_range[chain] or is_called_in_range[number] for chain, number in zip(chains, within)]
    columns = {name: array("q", compress(column, kept)) for name, column in rows.columns.items()}
    return replace(rows, columns=columns)


def _has_range(frames: Iterable[Frame]) -> bool:
    return any(frame.kind in RANGES for frame in frames)


@dataclass
class Op:
    """An operator under a layer, in one phase or in all of them. It runs directly in the layer, not in a child layer.

    ``name`` is torch's ("aten::mm") or that of the label; ``calls`` counts its calls, 0 for the time between ops.
    ``self`` excludes the ops inside it; ``total`` is that of its outermost occurrences, including layers that it calls.
    A kernel counts for the op that launched it. ``kind`` is op or one of ``RANGES``, for example label for a range of
    the user, region for code of torch.compile. ``inside`` are the ops and ranges directly in a range. The layer's own
    time between ops has the name ``(between ops)``.
    """

    name: str
    kind: FrameKind = FrameKind.OP
    calls: int = 0
    self: Cost = field(default_factory=Cost)
    total: Cost = field(default_factory=Cost)
    inside: list[Op] = field(default_factory=list)


def operators_of_layers(rows: Rows, phase: str | None) -> dict[int, list[Op]]:
    """``Run.ops``, by the index of the layer in place of its path."""
    wanted = None if phase is None else number_of_phase(phase)
    made: list[Op] = []
    by_layer: dict[int, dict[tuple[FrameKind, str], int]] = {}  # indices in ``made``, by layer, kind and name
    levels: dict[int, dict[tuple[FrameKind, str], int]] = {}  # the same for ops inside a range, by its index

    def ops_on_path(layer: int, names: Sequence[tuple[FrameKind, str]]) -> list[int]:
        """The numbers of the ops with these kinds and names, outer to inner; new ones are added to ``made``."""
        level = by_layer.setdefault(layer, {})
        siblings: list[Op] | None = None
        numbers = []
        for name in names:
            number = level.get(name)
            if number is None:
                number = level[name] = len(made)
                made.append(Op(name[1], name[0], 0, NO_COST, NO_COST))
                if siblings is not None:
                    siblings.append(made[number])
            numbers.append(number)
            if name[0] in RANGES:
                level, siblings = levels.setdefault(number, {}), made[number].inside
        return numbers

    def ops_around(here: bool, within: Sequence[Around]) -> Iterator[int]:
        """The ops and ranges of other layers around a row's layer that the row counts for. A label counts every
        phase."""
        for around in within:
            names = _names(around.frames)
            if phase is not None and around.phase != phase:
                names = [name for name in names if here and name[0] == FrameKind.LABEL]
            for number in ops_on_path(around.layer, names):
                if here or made[number].kind not in RANGES:
                    yield number

    names = [_names(frames) or [(FrameKind.OP, BETWEEN_OPS)] for frames in rows.frames]

    def way_of(key: RowKey) -> Way | None:
        here, within = wanted in (None, key.phase), rows.within[key.within]
        if not here and not within:
            return None
        outer = [*ops_around(here, within)]
        inner = ops_on_path(key.layer, names[key.frames]) if here else []
        return Way(tuple(dict.fromkeys(outer + inner)), inner[-1] if here else -1)

    for op, sums in zip(made, sum_operators(rows, way_of)):
        op.calls, op.self, op.total = sums.calls, sums.self, sums.total
    return {layer: [made[number] for number in level.values()] for layer, level in by_layer.items()}


def _names(frames: Sequence[Frame]) -> list[tuple[FrameKind, str]]:
    """Kind and name of each frame but kernels: a kernel counts for the op that launched it."""
    return [(frame.kind, frame.name) for frame in frames if frame.kind != FrameKind.KERNEL]
