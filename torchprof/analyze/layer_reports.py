"""The reports on all layers: as a tree, by class, and their single calls."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby, repeat

from torchprof.analyze.columns import CALLS, Column, column_called, columns_of, default_column, hot_path_column
from torchprof.analyze.figures import Figures
from torchprof.analyze.layers import (
    Entry,
    all_entries,
    by_class,
    down_to,
    entries_of,
    keep_top,
    mark_hot,
    sort_entries,
    summed_figures,
    table_rows,
)
from torchprof.analyze.ops import (
    SUM_OF_PHASES,
    about_wholes,
    figure_columns,
    largest_by,
    line_of_figures,
    ranked,
    shares_of,
)
from torchprof.analyze.report import HOT, Part, ReportTable, Section, printable, report, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_sums, warnings_below
from torchprof.run.formats import Cell, ReportCell, format_number, format_time
from torchprof.run.measures import Cost
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, FrameKind


@report("tree", "every layer, with self and total of all that was measured", answers="time", suffix=".txt")
def tree(
    run: Run,
    *,
    show_events: bool = False,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    percent: bool = False,
    hot: bool = False,
    color: bool = False,
) -> Section:
    """The module tree with a row for each layer.

    The user's ranges (``record_function``) are rows marked as labels below the layer that opened them. The total of a
    label includes the layers called in it, which have rows of their own, too. ``show_events`` adds below each layer the
    operators that ran directly in it; those of backward and recompute are marked. ``top``: the number of layers, those
    with the largest self in the column ``sort_by`` (default: CPU time, else FLOPs). ``percent`` adds to each time its
    share of all time of that phase. The run's warnings are below the table.

    ``hot`` orders siblings by their total in one column, so that the hottest path comes first, and marks that path:
    from the largest model into the largest child each time, until a layer's self is larger than any child's total. The
    column is ``sort_by``, else device time if any was measured, else CPU time, else FLOPs. ``color`` colors each figure
    by its share of the column's sum, cold to hot, with colors of 256. It works only without ``tablefmt``, because the
    output of tabulate's formats is for other programs.

    Raises TorchprofError for an unknown column, and for a hottest path by a column without totals.
    """
    columns = columns_of(run, show_events)
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    lines = entries_of(run, show_events)
    figures = [line.figures for line in all_entries(lines)]
    sentences = []
    if hot:
        sorting = hot_path_column(columns, figures, sorting)
        mark_hot(lines, sorting)
        if any(line.hot for line in lines):
            sentences.append(f"{HOT} marks the hottest path by {sorting.heading}: each time into the largest layer.")
    if sorting is not None:
        sort_entries(lines, sorting)
    down_to(lines, depth)
    if top is not None:
        sentences.append(keep_top(lines, sorting or default_column(columns), top))
    wholes = [column.whole(figures) for column in columns]
    shares = wholes if percent else [None] * len(columns)
    rows = table_rows(lines, lambda line: map(Column.text, columns, repeat(line.figures), shares))
    if any(frame.kind == FrameKind.LABEL for within in run.rows.within for around in within for frame in around.frames):
        sentences.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    headings = ["Module", *(column.heading for column in columns)]
    table = ReportTable(headings, rows, wholes=[None, *wholes], in_color=color)
    return spaced([table, stacked([*sentences, *about_flops(run), *about_sums(run), warnings_below(run)])])


@report("types", "all layers of a class together: Linear, BatchNorm2d, …", answers="time")
def types(run: Run, *, sort_by: str | None = None, top: int | None = None, phase: str | None = None) -> Section:
    """A row for each class of layers: all ``BatchNorm2d`` together, the largest first.

    *Self* adds up over all layers of the class, so the rows add up to the whole model. *Total* has the layers below,
    too; a layer inside another one of its class counts once. Shares are of all layers. A layer that was never called
    adds nothing.

    Without ``phase``, all phases are added up. The order is by self time, of the device if it was measured. Raises
    TorchprofError for an unknown column.
    """
    phases = run.phases() if phase is None else [phase]
    columns = figure_columns(run)
    lines = [
        line_of_figures(
            {"Type": [printable(group.kind)], "Layers": [format_number(len(group.members))]}, group.figures, phases
        )
        for group in by_class(run)
    ]
    own = sum((line.cost(SUM_OF_PHASES, is_self=True) for line in lines), Cost())
    wholes = shares_of(columns, own, own)
    return ranked(
        run,
        ["Type", "Layers"] if lines else ["Type"],
        lines,
        columns,
        largest_by(columns, of_self=True),
        wholes=wholes,
        sentences=about_wholes("what all layers took", wholes),
        sort_by=sort_by,
        top=top,
    )


@report("calls", "single calls of each layer: the first, the median, the spread", answers="time")
def calls(run: Run, *, depth: int | None = None) -> Part:
    """CPU time of a forward call of each layer that was called, its child layers included.

    The first call has a column of its own: it often includes allocations, kernel loading and caches that later calls
    reuse. The median and the 5th to 95th percentile are over all calls (over a uniform sample of 256, if there were
    more).
    """
    headings = ["Module", CALLS, "First call", "Median", "P5 to P95", "Min", "Max"]
    table: list[list[Cell]] = []
    for key, spread in sorted(run.samples.items()):
        if key.phase != FORWARD or key.measure != "cpu_ns":
            continue
        if depth is None or len(run.layers[key.layer].path) <= depth + 1:
            table.append(
                [
                    printable(run.layers[key.layer].name),
                    format_number(spread.count),
                    format_time(spread.first),
                    format_time(spread.median),
                    _range(spread.quantile(0.05), spread.quantile(0.95)),
                    format_time(spread.min),
                    format_time(spread.max),
                ]
            )
    return ReportTable.of_cells(headings, table) if table else "No call of a layer was recorded in this run."


def _range(low: float, high: float) -> ReportCell:
    return ReportCell(f"{format_time(low)} to {format_time(high)}", high, "ns", ids={"p5": low, "p95": high})


# The tree of layers in few rows: equal siblings as one, the largest layers open, the rest added up.

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
