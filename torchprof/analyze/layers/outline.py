"""The tree of layers in few rows: equal siblings as one, the largest layers open, the rest added up."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby

from torchprof.analyze.figures import Figures
from torchprof.analyze.groups import summed_figures
from torchprof.analyze.layers.entries import Entry, all_entries

_EQUAL_SIBLINGS = 3  # so many become one row
_CHILDREN = 12  # the most rows that one layer opens into


def outline(
    lines: Sequence[Entry], kinds: Mapping[tuple[str, ...], str], size: Callable[[Figures], float], limit: int
) -> list[Entry]:
    """The rows of a tree that has at most about ``limit`` of them.

    A tree that fits stays as it is. Else siblings with consecutive numbers, of one class and with equal layers below,
    become one row with their sum. Then layers are opened, the one of the largest ``size`` first, while there is room;
    of many layers below one, the smallest are one row with their sum. So the hottest path is open, and the totals of
    the rows below an open layer add up as in the whole tree. ``kinds``: the class of each layer by its path.
    """
    if sum(1 for _ in all_entries(lines)) + sum(map(_operators, all_entries(lines))) <= limit:
        return list(lines)
    shapes = _shapes(lines, kinds)
    sizes = _sizes(lines, size)
    shown: dict[int, list[Entry]] = {}
    waiting: list[tuple[float, int, Entry]] = []
    room, number = limit, 0
    opened = list(lines)
    while True:
        for line in opened:
            room -= 1 + _operators(line)
            number += 1
            heappush(waiting, (-_size(line, sizes), number, line))
        if not waiting or room < 1:
            return [_with_shown(line, shown) for line in lines]
        _, _, line = heappop(waiting)
        below = _below(line, shapes)
        opened = _largest(below, sizes, min(room, _CHILDREN)) if len(below) == 1 or room > 1 else []
        shown[id(line)] = opened


def _sizes(lines: Sequence[Entry], size: Callable[[Figures], float]) -> dict[int, float]:
    """The size of each row, by its id. Of a layer that was not selected, whose figures are blank: of all below it."""
    sizes: dict[int, float] = {}
    for line in reversed([*all_entries(lines)]):  # children before the rows above them
        sizes[id(line)] = size(line.figures) if line.figures.total else sum(sizes[id(child)] for child in line.children)
    return sizes


def _size(row: Entry, sizes: Mapping[int, float]) -> float:
    """The size of a row, which may be the sum of several; that of a row "(N more)" is 0, because nothing opens it."""
    return sum(sizes.get(id(part), 0) for part in (row.parts or (row,)))


def _operators(line: Entry) -> int:
    """How many rows of labels and operators are under a layer's."""
    return sum(1 + _operators(op) for op in line.ops)


def _shapes(lines: Sequence[Entry], kinds: Mapping[tuple[str, ...], str]) -> dict[int, int]:
    """A number for each row, by its id: equal for layers of one class that have equal layers, by name, below them."""
    numbers: dict[Hashable, int] = {}
    shapes: dict[int, int] = {}
    for line in reversed([*all_entries(lines)]):  # children before the rows above them
        below = tuple((child.name, shapes[id(child)]) for child in line.children)
        shape = (kinds.get(line.path, ""), line.is_layer and not line.ops, below)
        shapes[id(line)] = numbers.setdefault(shape, len(numbers))
    return shapes


def _below(line: Entry, shapes: Mapping[int, int]) -> list[Entry]:
    """The rows below a row, equal neighbors as one."""
    if line.parts:
        rows = [_as_one(same, same[0].name) for same in zip(*(part.children for part in line.parts))]
    else:
        rows = line.children

    def key(numbered: tuple[int, Entry]) -> Hashable:
        position, row = numbered
        single = row.parts[0] if row.parts else row
        if not single.is_layer or single.ops or not single.name.isdecimal():
            return f"{position}"
        return int(single.name) - position, shapes[id(single)]

    lines: list[Entry] = []
    for _, neighbors in groupby(enumerate(rows), key):
        equal = [row for _, row in neighbors]
        if len(equal) < _EQUAL_SIBLINGS:
            lines += equal
        else:
            parts = [part for row in equal for part in (row.parts or (row,))]
            lines.append(_as_one(parts, f"{equal[0].name}–{equal[-1].name}"))
    return lines


def _as_one(parts: Sequence[Entry], name: str) -> Entry:
    """One row with the sum of several that have equal layers below."""
    figures = summed_figures([part.figures for part in parts])
    ops = _ops_as_one([op for part in parts for op in part.ops])
    return replace(parts[0], name=name, figures=figures, children=[], ops=ops, parts=tuple(parts))


def _ops_as_one(ops: Sequence[Entry]) -> list[Entry]:
    """The rows of labels and operators of several layers: one row for each name, with its sum."""
    alike: dict[str, list[Entry]] = {}
    for op in ops:
        alike.setdefault(op.name, []).append(op)
    return [
        replace(
            same[0],
            figures=summed_figures([op.figures for op in same]),
            ops=_ops_as_one([inner for op in same for inner in op.ops]),
        )
        for same in alike.values()
    ]


def _largest(rows: Sequence[Entry], sizes: Mapping[int, float], limit: int) -> list[Entry]:
    """At most so many rows: the largest, in their order, and one for the rest."""
    if len(rows) <= limit:
        return list(rows)
    ranked = sorted(rows, key=lambda row: -_size(row, sizes))
    kept = {id(row) for row in ranked[: limit - 1]}
    rest = [row for row in rows if id(row) not in kept]
    parts = [part for row in rest for part in (row.parts or (row,))]
    below = sum(map(_hidden, rest))
    more = Entry(f"({len(parts)} more)", summed_figures([part.figures for part in parts]), hidden=len(parts) + below)
    return [*(row for row in rows if id(row) in kept), more]


def _hidden(row: Entry) -> int:
    """How many layers are below a row."""
    return sum(1 for part in (row.parts or (row,)) for _ in all_entries(part.children))


def _with_shown(line: Entry, shown: Mapping[int, list[Entry]]) -> Entry:
    """A row with the rows below it that are shown."""
    children = shown.get(id(line), [])
    if not children:
        return replace(line, children=[], hidden=line.hidden or _hidden(line))
    return replace(line, children=[_with_shown(child, shown) for child in children])
