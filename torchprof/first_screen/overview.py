"""The answer first: the verdict, the largest places, and the tree of layers in few rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import groupby
from statistics import median

from torchprof.analyze.columns import Column, columns_of, hot_path_column
from torchprof.analyze.figures import Figures, summed_figures
from torchprof.analyze.layers import Entry, all_entries, entries_of
from torchprof.analyze.ops import shortened
from torchprof.analyze.report import ReportTable, Section, TableRow, branches, printable, report, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_sums, other_warnings_of
from torchprof.analyze.top import largest_parts, title_of_parts
from torchprof.first_screen.verdict import verdict
from torchprof.run.formats import UNKNOWN, Bound, Cell, ReportCell, Value, as_range, format_time, short_time
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, PHASES

_GAP = len(" | ")
_LONGEST_LABEL = 40
_EQUAL_SIBLINGS = 3  # so many become one row
_CHILDREN = 12  # the most rows that one layer opens into


@report("overview", "what ran, what would help, the largest places and the layers: read it first", answers="time")
def overview(
    run: Run,
    *,
    rows: int = 50,
    places: int = 5,
    width: int | None = None,
    whole: str = 'The report "tree" shows all.',
    color: bool = False,
) -> Section:
    """What to read first: what ran, what would help, the largest places, and the layers in at most so many rows.

    The tree has all layers if they fit in ``rows``. Else equal siblings are one row with their sum ("0–79"), the layers
    with the largest totals are open, and the rest is added up. Columns for which a line has no room are left out.
    """
    sections = verdict(run, width)
    if places:
        first, *more = largest_parts(run, places, width=width)
        sections += [stacked([title_of_parts(run), first]), *more]
    if run.layers:
        sections.append(short_tree(run, rows, width, whole, color=color))
    return spaced([*sections, stacked([*about_flops(run), *other_sentences(run)])])


def other_sentences(run: Run) -> list[str]:
    """The sentences and warnings that are not in the verdict."""
    return [*about_sums(run), *map(printable, other_warnings_of(run))]


# The table of layers: its columns


def short_tree(run: Run, limit: int, width: int | None, whole: str, *, color: bool = False) -> Section:
    """The table of layers of the overview, whose options these are, and below it what it does not show."""
    lines = entries_of(run)
    figures = [line.figures for line in all_entries(lines)]
    columns = sorted(columns_of(run), key=_place)
    by = hot_path_column(columns, figures, None)
    kinds = {layer.path: layer.kind for layer in run.layers}
    short = outline(lines, kinds, lambda of_row: _size(of_row, by), limit)
    leads, entries = zip(*branches(short, lambda line: line.below))
    names: list[Cell] = ["Module", *(_with_class(entry, kinds) for entry in entries)]
    cells: dict[Column, Sequence[Cell]] = {
        column: [column.heading, *(column.text(entry.figures, None) for entry in entries)] for column in columns
    }
    if any(entry.parts for entry in entries):
        each = Column(f"{by.heading} of one")
        cells[each] = [each.heading, *(_of_each(entry, by) for entry in entries)]
    room = None if width is None else width - max(len(f"{lead}{name}") for lead, name in zip(("", *leads), names))
    shown = _with_room(cells, by, room)
    if len(shown) < len(cells):
        brief = {column: [_short_heading(column), *map(_short_time, texts)] for column, (_, *texts) in cells.items()}
        shown = _with_room(brief, by, room)
    headings, *rows = zip(names, *shown.values())
    table = ReportTable(
        [*map(str, headings)],
        [TableRow(row, lead, is_part=not entry.figures.left_over) for row, lead, entry in zip(rows, leads, entries)],
        name="layers",
        wholes=[None, *(column.whole(figures) for column in shown)],
        in_color=color,
    )
    left_out = [column.heading for column in cells if column not in shown]
    hidden = len(run.layers) - sum(len(entry.each) for entry in entries if entry.path)
    below = []
    if hidden:
        are = "1 layer is" if hidden == 1 else f"{hidden} layers are"
        below.append(f"{are} not shown; (+9): so many below that layer.")
    if left_out:
        below.append(f"No room for {', '.join(left_out)}.")
    if below or any(entry.parts for entry in entries):
        below.append(whole)
    return stacked([table, *below])


_Columns = Mapping[Column, Sequence[Cell]]
"""The heading and the cells of each column."""


def _place(column: Column) -> tuple[int, bool]:
    """The order of columns: that of the catalogue, but time of the device before that of the CPU."""
    phase = column.phase if column.what == "cost" else None
    group = 0 if phase == FORWARD else 1 if phase is None else 1 + PHASES.index(phase)
    return group, group != 1 and "device_ns" not in column.fields


def _size(figures: Figures, by: Column) -> float:
    """How large a row is: all of it, in all phases."""
    if by.measure is None:  # nothing was measured
        return by.of(figures)
    return sum(map(by.measure.of, figures.total.values()))


def _with_class(entry: Entry, kinds: Mapping[tuple[str, ...], str]) -> Cell:
    """The name of a layer, with its class and how many layers it stands for; of a label or an operator, shortened."""
    name = entry.name if entry.is_layer else shortened(entry.name, _LONGEST_LABEL)
    if not entry.path:
        return entry.cell(name)
    kind = "" if len(entry.path) == 1 else printable(kinds.get(entry.path, ""))  # a model has the name of its class
    ids: dict[str, Value | list[str]] = {"type": kinds.get(entry.path, "")}
    if entry.parts:
        kind = f"{len(entry.parts)} × {kind}" if kind else f"{len(entry.parts)} layers"
        ids["layers"] = [".".join(part.path) for part in entry.parts]
    below = f" (+{entry.hidden})" if entry.hidden else ""
    return ReportCell(f"{name}{'  ' if kind else ''}{kind}{below}", ".".join((*entry.path[:-1], entry.name)), ids=ids)


def _of_each(entry: Entry, by: Column) -> Cell:
    """The median of the rows that one stands for, with the smallest and the largest."""
    if not (entry.parts and entry.path):
        return ""
    figures = [by.figure(part.figures) for part in entry.parts]
    if any(figure.bound is not Bound.EXACT for figure in figures):
        return figures[0].text(by.write) if len({*figures}) == 1 else UNKNOWN
    values = [figure.value for figure in figures]
    least, middle, most = (str(_short_time(by.write(value))) for value in (min(values), median(values), max(values)))
    return by.write(median(values)).written(f"median of {len(values)}: {middle} ({as_range(least, most)})")


def _short_heading(column: Column) -> str:
    """The heading where there is no room for all columns: "Self CPU" for "Self CPU total"."""
    return "Calls" if column.what == "calls" else column.heading.replace(" total", "")


def _short_time(cell: Cell) -> Cell:
    """A time in three digits; any other cell as it is."""
    if isinstance(cell, ReportCell) and isinstance(cell.value, (int, float)):
        return cell.written(short_time(cell.value)) if cell.text == str(format_time(cell.value)) else cell
    return cell


def _with_room(cells: _Columns, by: Column, room: int | None) -> _Columns:
    """The columns that fit in so many characters, the most telling first; ``by`` always does."""
    if room is None:
        return cells
    shown = set()
    for column in sorted(cells, key=lambda column: _rank(column, by)):
        width = _GAP + max(len(str(cell)) for cell in cells[column])
        if width <= room or column == by:
            shown.add(column)
            room -= width
    return {column: texts for column, texts in cells.items() if column in shown}


def _rank(column: Column, by: Column) -> int:
    """Which columns tell most: the lowest number first. Those that an option asked for come before all others."""
    if column == by:
        return 0
    if column.what != "cost":
        return {"params": 1, "text": 4, "calls": 5}.get(column.what, 7)
    if column.is_self:
        return 6
    if column.is_time:
        return 2
    return 1 if column.phase == FORWARD else 3


# Its rows: equal siblings as one, the largest layers open, the rest added up


def outline(
    lines: Sequence[Entry], kinds: Mapping[tuple[str, ...], str], size: Callable[[Figures], float], limit: int
) -> list[Entry]:
    """The rows of a tree that has at most about ``limit`` of them.

    A tree that fits stays as it is. Else siblings with consecutive numbers, of one class and with equal layers below,
    become one row with their sum. Then layers are opened, the one of the largest ``size`` first, while there is room;
    of many layers below one, the smallest are one row with their sum. So the hottest path is open, and the totals of
    the rows below an open layer add up as in the whole tree. ``kinds``: the class of each layer by its path.
    """
    every = [*all_entries(lines)]
    if sum(1 + _operators(line) for line in every) <= limit:
        return list(lines)
    sizes: dict[int, float] = {}  # by the id of the row; of a layer that was not selected: of all below it
    shapes: dict[int, int] = {}  # by the id: equal for layers of one class that have equal layers, by name, below them
    numbers: dict[Hashable, int] = {}
    for line in reversed(every):  # children before the rows above them
        sizes[id(line)] = size(line.figures) if line.figures.total else sum(sizes[id(child)] for child in line.children)
        below = tuple((child.name, shapes[id(child)]) for child in line.children)
        shape = (kinds.get(line.path, ""), line.is_layer and not line.ops, below)
        shapes[id(line)] = numbers.setdefault(shape, len(numbers))

    def size_of(row: Entry) -> float:
        """That of a row "(N more)" is 0, because nothing opens it."""
        return sum(sizes.get(id(part), 0) for part in row.each)

    shown: dict[int, list[Entry]] = {}
    waiting: list[tuple[float, int, Entry]] = []
    room, number = limit, 0
    opened = list(lines)
    while True:
        for line in opened:
            room -= 1 + _operators(line)
            number += 1
            heappush(waiting, (-size_of(line), number, line))
        if not waiting or room < 1:
            return [_with_shown(line, shown) for line in lines]
        _, _, line = heappop(waiting)
        rows = _below(line, shapes)
        opened = _largest(rows, size_of, min(room, _CHILDREN)) if len(rows) == 1 or room > 1 else []
        shown[id(line)] = opened


def _operators(line: Entry) -> int:
    """How many rows of labels and operators are under a layer's."""
    return sum(1 + _operators(op) for op in line.ops)


def _below(line: Entry, shapes: Mapping[int, int]) -> list[Entry]:
    """The rows below a row, equal neighbors as one."""
    rows = line.children
    if line.parts:
        rows = [_as_one(same, same[0].name) for same in zip(*(part.children for part in line.parts))]

    def key(numbered: tuple[int, Entry]) -> Hashable:
        position, row = numbered
        single = row.each[0]
        if not single.is_layer or single.ops or not single.name.isdecimal():
            return f"{position}"
        return int(single.name) - position, shapes[id(single)]

    lines: list[Entry] = []
    for _, neighbors in groupby(enumerate(rows), key):
        equal = [row for _, row in neighbors]
        if len(equal) < _EQUAL_SIBLINGS:
            lines += equal
        else:
            lines.append(_as_one([part for row in equal for part in row.each], f"{equal[0].name}–{equal[-1].name}"))
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


def _largest(rows: Sequence[Entry], size: Callable[[Entry], float], limit: int) -> list[Entry]:
    """At most so many rows: the largest, in their order, and one for the rest."""
    if len(rows) <= limit:
        return list(rows)
    kept = {id(row) for row in sorted(rows, key=size, reverse=True)[: limit - 1]}
    rest = [row for row in rows if id(row) not in kept]
    parts = [part.figures for row in rest for part in row.each]
    more = Entry(f"({len(parts)} more)", summed_figures(parts), hidden=len(parts) + sum(map(_hidden, rest)))
    return [*(row for row in rows if id(row) in kept), more]


def _hidden(row: Entry) -> int:
    """How many layers are below a row."""
    return sum(1 for part in row.each for _ in all_entries(part.children))


def _with_shown(line: Entry, shown: Mapping[int, list[Entry]]) -> Entry:
    """A row with the rows below it that are shown."""
    children = [_with_shown(child, shown) for child in shown.get(id(line), ())]
    return replace(line, children=children, hidden=line.hidden or (0 if children else _hidden(line)))
