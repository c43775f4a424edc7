"""The overview: the verdict, the largest places, and the layers as a tree of few rows. Read it first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count, groupby
from statistics import median

from torchprof.analyze.columns import Column, columns_of, hot_path_column
from torchprof.analyze.figures import Figures, summed_figures
from torchprof.analyze.layers import Entry, all_entries, entries_of
from torchprof.analyze.report import ReportTable, Section, TableRow, branches, report, shortened, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_sums, other_warnings_of
from torchprof.analyze.top import largest_parts, title_of_parts
from torchprof.errors import printable
from torchprof.first_screen.verdict import verdict
from torchprof.run.formats import UNKNOWN, Bound, Cell, ReportCell, Value, as_range, format_time, short_time
from torchprof.run.groups import lists_by_key
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


# The table of layers


def short_tree(run: Run, limit: int, width: int | None, whole: str, *, color: bool = False) -> Section:
    """The table of layers of the overview, whose options these are, and below it what it does not show."""
    all_rows = entries_of(run)
    figures = [row.figures for row in all_entries(all_rows)]
    columns = sorted(columns_of(run), key=_order)
    ranking = hot_path_column(columns, figures, None)
    kinds = {layer.path: layer.kind for layer in run.layers}
    outlined = outline(all_rows, kinds, lambda of_row: _size(of_row, ranking), limit)
    leads, rows = zip(*branches(outlined, lambda row: row.below))
    names: list[Cell] = ["Module", *(_with_class(row, kinds) for row in rows)]
    cells = _cells_of(columns, rows, ranking)
    room = None if width is None else width - max(len(f"{lead}{name}") for lead, name in zip(("", *leads), names))
    shown = _fitting(cells, ranking, room)
    headings, *cells_of_rows = zip(names, *shown.values())
    table = ReportTable(
        [*map(str, headings)],
        [
            TableRow(texts, lead, is_part=not row.figures.left_over)
            for texts, lead, row in zip(cells_of_rows, leads, rows)
        ],
        name="layers",
        wholes=[None, *(column.whole(figures) for column in shown)],
        in_color=color,
    )
    left_out = [column.heading for column in cells if column not in shown]
    return stacked([table, *_about_hidden(run, rows, left_out, whole)])


def _about_hidden(run: Run, rows: Sequence[Entry], left_out: Sequence[str], whole: str) -> list[str]:
    """Sentences on what the table does not show. ``left_out``: the headings of columns; ``whole``: see ``OPTIONS``."""
    sentences = []
    if hidden := len(run.layers) - sum(len(row.each) for row in rows if row.path):
        are = "1 layer is" if hidden == 1 else f"{hidden} layers are"
        sentences.append(f"{are} not shown; (+9): so many below that layer.")
    if left_out:
        sentences.append(f"No room for {', '.join(left_out)}.")
    if sentences or any(row.parts for row in rows):
        sentences.append(whole)
    return sentences


# Its columns

_Columns = Mapping[Column, Sequence[Cell]]
"""The heading and the cells of each column."""


def _cells_of(columns: Sequence[Column], rows: Sequence[Entry], ranking: Column) -> _Columns:
    """All columns; the last one is for rows that stand for several layers, if there are such rows."""
    cells: dict[Column, Sequence[Cell]] = {
        column: [column.heading, *(column.text(row.figures, None) for row in rows)] for column in columns
    }
    if any(row.parts for row in rows):
        of_one = Column(f"{ranking.heading} of one")
        cells[of_one] = [of_one.heading, *(_of_one(row, ranking) for row in rows)]
    return cells


def _order(column: Column) -> tuple[int, bool]:
    """The order of columns: that of the catalogue, but time of the device before that of the CPU."""
    if column.what != "cost":  # parameters, calls, rates: after the costs of forward
        return 1, False
    group = 0 if column.phase == FORWARD else 1 + PHASES.index(column.phase)
    return group, "device_ns" not in column.fields


def _with_class(row: Entry, kinds: Mapping[tuple[str, ...], str]) -> Cell:
    """The name of a layer, with its class and how many layers the row stands for and hides; of a label or an operator,
    the shortened name."""
    name = row.name if row.is_layer else shortened(row.name, _LONGEST_LABEL)
    if not row.path:
        return row.cell(name)
    kind = "" if len(row.path) == 1 else printable(kinds.get(row.path, ""))  # a model has the name of its class
    ids: dict[str, Value | list[str]] = {"type": kinds.get(row.path, "")}
    if row.parts:
        kind = f"{len(row.parts)} × {kind}" if kind else f"{len(row.parts)} layers"
        ids["layers"] = [".".join(part.path) for part in row.parts]
    below = f" (+{row.hidden})" if row.hidden else ""
    return ReportCell(f"{name}{'  ' if kind else ''}{kind}{below}", ".".join((*row.path[:-1], row.name)), ids=ids)


def _of_one(row: Entry, ranking: Column) -> Cell:
    """The median of the layers that a row stands for, with the smallest and the largest."""
    if not (row.parts and row.path):
        return ""
    figures = [ranking.figure(part.figures) for part in row.parts]
    if any(figure.bound is not Bound.EXACT for figure in figures):
        return figures[0].text(ranking.write) if len({*figures}) == 1 else UNKNOWN
    values = [figure.value for figure in figures]
    least, middle, most = (
        str(_short_time(ranking.write(value))) for value in (min(values), median(values), max(values))
    )
    return ranking.write(median(values)).written(f"median of {len(values)}: {middle} ({as_range(least, most)})")


def _short_heading(column: Column) -> str:
    """The heading where there is no room for all columns: "Self CPU" for "Self CPU total"."""
    return "Calls" if column.what == "calls" else column.heading.replace(" total", "")


def _short_time(cell: Cell) -> Cell:
    """A time in three digits; any other cell as it is."""
    if isinstance(cell, ReportCell) and isinstance(cell.value, (int, float)):
        return cell.written(short_time(cell.value)) if cell.text == str(format_time(cell.value)) else cell
    return cell


def _fitting(cells: _Columns, ranking: Column, room: int | None) -> _Columns:
    """The columns that fit in so many characters (None: all), in their order. If not all do, they are written shorter:
    that makes room for more."""
    shown = _most_telling(cells, ranking, room)
    if len(shown) == len(cells):
        return shown
    short = {column: [_short_heading(column), *map(_short_time, texts)] for column, (_, *texts) in cells.items()}
    return _most_telling(short, ranking, room)


def _most_telling(cells: _Columns, ranking: Column, room: int | None) -> _Columns:
    """The columns for which there is room, those of the lowest ``_rank`` first; ``ranking`` is always one of them."""
    if room is None:
        return cells
    shown = set()
    for column in sorted(cells, key=lambda column: _rank(column, ranking)):
        width = _GAP + max(len(str(cell)) for cell in cells[column])
        if width <= room or column == ranking:
            shown.add(column)
            room -= width
    return {column: texts for column, texts in cells.items() if column in shown}


def _rank(column: Column, ranking: Column) -> int:
    """Which columns tell most: the lowest number first. Those that an option asked for come before all others."""
    if column == ranking:
        return 0
    if column.what != "cost":
        return {"params": 1, "text": 4, "calls": 5}.get(column.what, 7)
    if column.is_self:
        return 6
    if column.is_time:
        return 2
    return 1 if column.phase == FORWARD else 3


# Its rows: equal siblings as one, the largest layers open, the rest added up

_Kinds = Mapping[tuple[str, ...], str]
"""The class of each layer by its path."""


def outline(entries: Sequence[Entry], kinds: _Kinds, size: Callable[[Figures], float], limit: int) -> list[Entry]:
    """The rows of a tree that has at most about ``limit`` of them.

    A tree that fits stays as it is. Else siblings with consecutive numbers, of one class and with equal layers below,
    become one row with their sum. Then layers are opened, the one of the largest ``size`` first, while there is room;
    of many layers below one, the smallest are one row with their sum. So the hottest path is open, and the totals of
    the rows below an open layer add up as in the whole tree.

    Example: a tree of 22 rows with a ``limit`` of 7. "attn" has 9 layers below it: 3 in each of 3 blocks.

    - net: embed, blocks, head        - net
      - blocks: 0, 1, 2                 - embed
        - 0: attn, mlp          ->      - blocks
          - attn: q, k, v                 - 0–2
        - 1 and 2: as 0                     - attn (+9)
                                            - mlp
                                        - head
    """
    every = [*all_entries(entries)]
    if sum(1 + _count_of_ops(row) for row in every) <= limit:
        return list(entries)
    sizes = _sizes(every, size)
    structures = _structures(every, kinds)

    def size_of(row: Entry) -> float:
        """That of a row "(N more)" is 0, because nothing opens it."""
        return sum(sizes.get(id(part), 0) for part in row.each)

    rows_below: dict[int, list[Entry]] = {}  # those that are shown, by the id of the row above
    closed: list[tuple[float, int, Entry]] = []  # a heap of the shown rows that may be opened, the largest first
    numbers = count()  # rows of equal size are opened in the order of the tree
    room, added = limit, list(entries)
    while True:
        for row in added:
            room -= 1 + _count_of_ops(row)
            heappush(closed, (-size_of(row), next(numbers), row))
        if not closed or room < 1:
            return [_with_rows_below(row, rows_below) for row in entries]
        _, _, largest = heappop(closed)
        below = _equal_as_one(largest, structures)
        added = _largest(below, size_of, min(room, _CHILDREN)) if len(below) == 1 or room > 1 else []
        rows_below[id(largest)] = added


def _count_of_ops(row: Entry) -> int:
    """How many rows of labels and operators are below a row of a layer."""
    return sum(1 + _count_of_ops(op) for op in row.ops)


def _size(figures: Figures, ranking: Column) -> float:
    """How large a row is: its total in all phases."""
    if ranking.measure is None:  # nothing was measured
        return ranking.sort_key(figures)
    return sum(map(ranking.measure.of, figures.total.values()))


def _sizes(every: Sequence[Entry], size: Callable[[Figures], float]) -> dict[int, float]:
    """The size of each row, by its id; of a layer that was not selected, that of all below it."""
    sizes: dict[int, float] = {}
    for row in reversed(every):  # children before the rows above them
        sizes[id(row)] = size(row.figures) if row.figures.total else sum(sizes[id(child)] for child in row.children)
    return sizes


def _structures(every: Sequence[Entry], kinds: _Kinds) -> dict[int, int]:
    """A number for each row, by its id: equal for layers of one class that have equal layers, by name, below them."""
    structures: dict[int, int] = {}
    numbers: dict[Hashable, int] = {}
    for row in reversed(every):  # children before the rows above them
        below = tuple((child.name, structures[id(child)]) for child in row.children)
        structure = (kinds.get(row.path, ""), row.is_layer and not row.ops, below)
        structures[id(row)] = numbers.setdefault(structure, len(numbers))
    return structures


def _equal_as_one(above: Entry, structures: Mapping[int, int]) -> list[Entry]:
    """The rows below a row. At least three neighbors with consecutive numbers and equal structures are one: of "0",
    "1", "2" and "head", the first three become "0–2"."""
    rows = above.children
    if above.parts:  # these layers have equal children: the first children of all are one row, and so on
        rows = [_as_one(children, children[0].name) for children in zip(*(part.children for part in above.parts))]

    def group(numbered: tuple[int, Entry]) -> Hashable:
        """Equal for neighbors that become one row: their number minus their position is the same."""
        position, row = numbered
        layer = row.each[0]
        if not layer.is_layer or layer.ops or not layer.name.isdecimal():
            return f"{position}"  # alone
        return int(layer.name) - position, structures[id(layer)]

    shown: list[Entry] = []
    for _, neighbors in groupby(enumerate(rows), group):
        equal = [row for _, row in neighbors]
        if len(equal) < _EQUAL_SIBLINGS:
            shown += equal
        else:
            shown.append(_as_one([part for row in equal for part in row.each], f"{equal[0].name}–{equal[-1].name}"))
    return shown


def _as_one(parts: Sequence[Entry], name: str) -> Entry:
    """One row with the sum of several that have equal layers below."""
    figures = summed_figures([part.figures for part in parts])
    ops = _ops_as_one([op for part in parts for op in part.ops])
    return replace(parts[0], name=name, figures=figures, children=[], ops=ops, parts=tuple(parts))


def _ops_as_one(ops: Sequence[Entry]) -> list[Entry]:
    """The rows of labels and operators of several layers: one row for each name, with its sum."""
    by_name = lists_by_key((op.name, op) for op in ops)
    return [
        replace(
            same[0],
            figures=summed_figures([op.figures for op in same]),
            ops=_ops_as_one([inner for op in same for inner in op.ops]),
        )
        for same in by_name.values()
    ]


def _largest(rows: Sequence[Entry], size_of: Callable[[Entry], float], limit: int) -> list[Entry]:
    """At most so many rows: the largest, in their order, and one for the rest."""
    if len(rows) <= limit:
        return list(rows)
    kept = {id(row) for row in sorted(rows, key=size_of, reverse=True)[: limit - 1]}
    rest = [row for row in rows if id(row) not in kept]
    parts = [part.figures for row in rest for part in row.each]
    hidden = len(parts) + sum(map(_count_of_layers_below, rest))
    return [
        *(row for row in rows if id(row) in kept),
        Entry(f"({len(parts)} more)", summed_figures(parts), hidden=hidden),
    ]


def _count_of_layers_below(row: Entry) -> int:
    return sum(1 for part in row.each for _ in all_entries(part.children))


def _with_rows_below(row: Entry, rows_below: Mapping[int, list[Entry]]) -> Entry:
    """A row with the rows below it that are shown, and theirs."""
    children = [_with_rows_below(child, rows_below) for child in rows_below.get(id(row), ())]
    hidden = row.hidden or (0 if children else _count_of_layers_below(row))
    return replace(row, children=children, hidden=hidden)
