"""Sums of operators over the rows of a run: self, total and calls. Every view of operators uses these."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import compress, repeat
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
    """The operators of a view that a row counts for, by number: for the total of each of ``totals``, and for the self
    and the calls of each of ``inner``. In a view by name with the numbers 0 for "aten::linear" and 1 for
    "aten::addmm", rows with these two frames have ``Way((0, 1), (1,))``. If layers are a part of the view, there is an
    inner one for each layer around the row."""

    totals: tuple[int, ...]
    inner: tuple[int, ...]


@dataclass
class Sums:
    """The sums of an operator.

    - ``calls``: 0 for the time between operators. ``parts``: how many of the calls were made inside an operator whose
      MACs and FLOPs include those of the operators that it calls; 0 if the view does not request it.
    - ``self``: its cost without the operators inside it. ``total``: that of its outermost occurrences.
    """

    calls: int = 0
    parts: int = 0
    self: Cost = field(default_factory=Cost)
    total: Cost = field(default_factory=Cost)


def added(one: Sums, other: Sums) -> Sums:
    """The sums of two operators, or of one at two places, as a new value."""
    self = one.self + other.self
    is_alone = one.total is one.self and other.total is other.self
    return Sums(one.calls + other.calls, one.parts + other.parts, self, self if is_alone else one.total + other.total)


def sum_operators(
    rows: Rows,
    way_of: Callable[[RowKey], Way | None],
    is_part: Callable[[int, int, int, int], bool] | None = None,
    place_of: Callable[[int, int], tuple[int, int]] | None = None,
) -> list[Sums]:
    """The sums of each numbered operator over all rows, without rows of Python source lines, which are not work.
    ``way_of`` is called once for each key of the rows; rows for which it returns None are left out. ``is_part``:
    whether the calls of rows with a key were made inside an operator whose MACs and FLOPs include theirs.

    ``place_of``: for a layer and a phase, those whose rows count for the same operators. It saves time."""
    measures = tuple(name for name in FIELDS if name in rows.nonzero)
    columns = [rows.columns[name] for name in RowKey._fields]
    parts_of_rows = repeat(False) if is_part is None else map(is_part, *columns)
    places = zip(*columns[:2]) if place_of is None else map(place_of, *columns[:2])
    lines = rows.summed_by(
        zip(places, *columns[2:], parts_of_rows),
        ("calls", *measures),
        frames=lambda frames: not frames or frames[-1].kind != FrameKind.PYTHON,
    )
    ways = [way_of(RowKey(place[0], place[1], within, frames)) for place, within, frames, _ in lines]
    size = 1 + max((number for way in ways if way for number in (*way.totals, *way.inner)), default=-1)
    is_call = [bool(frames) and not is_kernel(frames) for frames in rows.frames]
    calls, parts = [0] * size, [0] * size
    selves, totals = [[0] * size for _ in measures], [[0] * size for _ in measures]
    for ((_, _, frames, is_in_part), (called, *values)), way in zip(lines.items(), ways):
        if way is None:
            continue
        if called and is_call[frames]:
            for number in way.inner:
                calls[number] += called
                parts[number] += called if is_in_part else 0
        for total, own, value in zip(totals, selves, values):
            if value:
                for number in way.totals:
                    total[number] += value
                for number in way.inner:
                    own[number] += value
    return [*map(Sums, calls, parts, _costs(measures, selves, size), _costs(measures, totals, size))]


def is_kernel(frames: Sequence[Frame]) -> bool:
    """Whether rows with these frames are of a kernel."""
    return bool(frames) and frames[-1].kind == FrameKind.KERNEL


def _costs(measures: Sequence[str], sums: Sequence[Sequence[int]], size: int) -> list[Cost]:
    """The costs with these sums, in which each measure has a value for each of ``size`` operators."""
    columns = dict(zip(measures, sums))
    nothing = [0] * size
    return [
        Cost(*values) if any(values) else NO_COST for values in zip(*(columns.get(name, nothing) for name in FIELDS))
    ]


def rows_in_ranges(rows: Rows) -> Rows:
    """The rows of work inside a range, such as a label or a compiled region: no other row counts for a range."""
    is_in_range = [_has_range(frames) for frames in rows.frames]
    is_called_in_range = [any(_has_range(around.frames) for around in within) for within in rows.within]
    numbers = zip(rows.columns["frames"], rows.columns["within"])
    kept = [is_in_range[frames] or is_called_in_range[within] for frames, within in numbers]
    columns = {name: array("q", compress(column, kept)) for name, column in rows.columns.items()}
    return replace(rows, columns=columns)


def _has_range(frames: Iterable[Frame]) -> bool:
    return any(frame.kind in RANGES for frame in frames)


@dataclass
class Op:
    """An operator under a layer, in one phase or in all of them. It runs directly in the layer, not in a child layer.

    - ``name``: torch's ("aten::mm"), or that of the label; ``(between ops)`` for the layer's own time between ops.
    - ``kind``: op or one of ``RANGES``, for example label for a range of the user, region for code of torch.compile.
    - ``calls``, ``self``, ``total``: as of ``Sums``; the total has layers that it calls, and kernels that it launched.
    - ``inside``: the ops and ranges directly in a range.
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
    ops = _OpsOfLayers()
    names = [_names(frames) or [(FrameKind.OP, BETWEEN_OPS)] for frames in rows.frames]

    def ops_around(is_wanted: bool, within: Sequence[Around]) -> Iterator[int]:
        """The ops and ranges of other layers around a row's layer that the row counts for; labels in any phase."""
        for around in within:
            path = _names(around.frames)
            if phase is not None and around.phase != phase:
                path = [name for name in path if is_wanted and name[0] == FrameKind.LABEL]
            for number in ops.on_path(around.layer, path):
                if is_wanted or ops.all[number].kind not in RANGES:
                    yield number

    def way_of(key: RowKey) -> Way | None:
        is_wanted, within = wanted in (None, key.phase), rows.within[key.within]
        if not is_wanted and not within:
            return None
        outer = [*ops_around(is_wanted, within)]
        inner = ops.on_path(key.layer, names[key.frames]) if is_wanted else []
        return Way(tuple(dict.fromkeys(outer + inner)), tuple(inner[-1:]))

    for op, sums in zip(ops.all, sum_operators(rows, way_of)):
        op.calls, op.self, op.total = sums.calls, sums.self, sums.total
    return {layer: [ops.all[number] for number in level.values()] for layer, level in ops.by_layer.items()}


_Name = tuple[FrameKind, str]


class _OpsOfLayers:
    """The ops of all layers so far, numbered. An op is on the level of its layer, or on that of the range around it: of
    the frames label "step", op "aten::linear", op "aten::addmm", "step" is on the level of the layer, the others on
    that of "step"."""

    def __init__(self) -> None:
        self.all: list[Op] = []
        self.by_layer: dict[int, dict[_Name, int]] = {}  # the numbers of the ops on the level of each layer
        self._in_range: dict[int, dict[_Name, int]] = {}  # the same for each range, by its number

    def on_path(self, layer: int, path: Sequence[_Name]) -> list[int]:
        """The numbers of the ops with these names, outer to inner. New ones are added."""
        level = self.by_layer.setdefault(layer, {})
        siblings: list[Op] | None = None
        numbers = []
        for kind, name in path:
            if (number := level.get((kind, name))) is None:
                number = level[kind, name] = len(self.all)
                self.all.append(Op(name, kind, 0, NO_COST, NO_COST))
                if siblings is not None:
                    siblings.append(self.all[number])
            numbers.append(number)
            if kind in RANGES:
                level, siblings = self._in_range.setdefault(number, {}), self.all[number].inside
        return numbers


def _names(frames: Sequence[Frame]) -> list[_Name]:
    """Kind and name of each frame but kernels: a kernel counts for the op that launched it."""
    return [(frame.kind, frame.name) for frame in frames if frame.kind != FrameKind.KERNEL]
