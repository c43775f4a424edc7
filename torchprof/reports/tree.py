"""The tree table: every layer with self and total costs and calls, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate, tabulate_formats

from torchprof.attribute import FORWARD, LAUNCHED_BEFORE, NOT_SELECTED, OUTSIDE, RANGES
from torchprof.compiled import is_overhead
from torchprof.cost import AT_LEAST as AT_LEAST
from torchprof.cost import MEASURES, Bound, Cost, Figure, Measure, Unit, as_key, format_count
from torchprof.cost import UNKNOWN as UNKNOWN
from torchprof.doubts import about_flops, about_sums, doubts_of
from torchprof.errors import TorchprofError, suggest
from torchprof.figures import Figures, figures_of_layers, measured_by_all
from torchprof.reports import report
from torchprof.run import BETWEEN_OPS, NOT_SELECTED_NAME, OUTSIDE_NAME, Op, Run, range_in_words

_Branch = TypeVar("_Branch")

CALLS = "Number of Calls"

HOT = "◄"  # behind the names of the layers on the hottest path

# From which share of the whole on a figure has which colour, the hottest first. xterm's cube of 256 colours is the same
# on nearly every terminal, where the 16 basic ones are what the user's theme makes of them (yellow is often unreadable
# on white). These have a contrast of at least 3.4 to 1 with white and with the near black of dark themes.
_HEAT = ((0.5, "1;38;5;196"), (0.25, "38;5;166"), (0.1, "38;5;100"), (0.05, "38;5;64"), (0.01, "38;5;31"))
_COLD = "38;5;244"
_ON_THE_PATH = "1"

# How torchprof's table always looked: no outer bars, and a line of dashes under the headings.
LOOK = TableFormat(
    lineabove=None,
    linebelowheader=Line("", "-", "-|-", ""),
    linebetweenrows=None,
    linebelow=None,
    headerrow=DataRow("", " | ", ""),
    datarow=DataRow("", " | ", ""),
    padding=0,
    with_header_hide=None,
)


@dataclass(frozen=True)
class Column:
    """A column of figures. ``measured`` is False where they were asked for and could not be had."""

    heading: str
    measured: bool = True

    @property
    def key(self) -> str:
        """The name by which a table is sorted by this column."""
        return as_key(self.heading)

    @property
    def ranking(self) -> Column:
        """The column that tells which layers are the largest by themselves."""
        return self

    @property
    def with_below(self) -> Column:
        """The column that tells which layers are the largest, those below them included."""
        return self

    def is_called(self, name: str) -> bool:
        """Whether a user means this column: by its heading, or that in lower case with underscores."""
        return name in (self.heading, as_key(self.heading), self.key)

    def of(self, figures: Figures) -> float:
        """The figure of a row, 0 where it has none; what rows are sorted by."""
        raise NotImplementedError

    def whole(self, figures: Iterable[Figures]) -> float | None:
        """What 100 % is, from all rows; None where a share of this column says nothing."""
        return None

    def figure(self, figures: Figures) -> Figure:
        """The figure of a row with how far it is known."""
        raise NotImplementedError

    def write(self, value: float) -> str:
        """A figure as text, with its unit."""
        return format_count(value)

    def share(self, figures: Figures, whole: float | None) -> float | None:
        """Which part of the whole the figure of a row is; None where it has no figure, or there is no whole."""
        known = whole is not None and whole > 0 and self.figure(figures).is_known
        return self.of(figures) / whole if known and whole and not figures.left_over else None

    def text(self, figures: Figures, whole: float | None) -> str:
        """The cell; with its share of ``whole`` where that is given."""
        return self.figure(figures).text(self.write)


@dataclass(frozen=True)
class CostColumn(Column):
    """One measure in one phase, self or total."""

    phase: str = FORWARD
    measure: Measure = MEASURES[0]
    is_self: bool = False

    @property
    def ranking(self) -> Column:
        return self if self.is_self else replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)

    def of(self, figures: Figures) -> float:
        return self.measure.of(figures.cost(self.phase, self.is_self))

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(self.measure.of(row.cost(self.phase, is_self=True)) for row in figures if not row.left_over)

    def figure(self, figures: Figures) -> Figure:
        return figures.measure(self.measure, self.phase, self.is_self, self.measured)

    def write(self, value: float) -> str:
        return self.measure.text(value)

    def text(self, figures: Figures, whole: float | None) -> str:
        figure = self.figure(figures)
        has_share = self.measure.unit is Unit.TIME and figure.bound is Bound.EXACT and not figures.left_over
        return figure.text(self.write) + (f" ({figure.value / whole:.1%})" if whole and has_share else "")


@dataclass(frozen=True)
class RateColumn(Column):
    """FLOPs in a second: of the device's time where that was measured, else of the CPU's."""

    phase: str = FORWARD
    on_device: bool = False

    def of(self, figures: Figures) -> float:
        return self.figure(figures).value

    def figure(self, figures: Figures) -> Figure:
        return figures.rate(self.phase, self.on_device, self.measured)


@dataclass(frozen=True)
class CallsColumn(Column):
    """How often the layer's forward was called, or the operator."""

    @property
    def key(self) -> str:
        return "calls"

    def of(self, figures: Figures) -> float:
        return figures.calls

    def figure(self, figures: Figures) -> Figure:
        return figures.number_of_calls()

    def write(self, value: float) -> str:
        return str(value)


@dataclass(frozen=True)
class ParamsColumn(Column):
    """The parameters of the layer and all below it, each counted at the first layer that holds it."""

    is_self: bool = False

    @property
    def ranking(self) -> Column:
        return replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)

    def of(self, figures: Figures) -> float:
        return (figures.own_params if self.is_self else figures.params) or 0

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(row.own_params or 0 for row in figures)

    def figure(self, figures: Figures) -> Figure:
        return figures.parameters()


@dataclass
class Entry:
    """A row of the table with the rows below it. ``is_layer`` is False for operators and for work of no layer, ``hot``
    is True for layers on the hottest path; ``path`` is a layer's."""

    name: str
    figures: Figures
    children: list[Entry] = field(default_factory=list)
    ops: list[Entry] = field(default_factory=list)
    is_layer: bool = True
    shown: bool = True
    hot: bool = False
    path: tuple[str, ...] = ()


class Table(NamedTuple):
    """What a table of the tree shows, whoever draws it.

    ``rows`` are the entries in their order, each behind its part of the lines of the tree; ``wholes`` what is 100 % in
    each column; ``notes`` the sentences that stand under the table, the run's doubts the last of them.
    """

    columns: list[Column]
    rows: list[tuple[str, Entry]]
    wholes: dict[Column, float | None]
    notes: list[str]


def columns_of(run: Run, show_events: bool = False) -> list[Column]:
    """The columns that a run can fill: forward first, then calls, then what the other phases took.

    What was asked for and could not be measured has a column of unknowns; what was not asked for has none. Self columns
    of backward and recompute stand only beside operators, those of counts nowhere: what a layer does itself is what its
    children leave.
    """
    meta = run.meta
    device = (meta.device or "device").upper()
    with_flops = "flops" in meta.requested
    of_all = measured_by_all(run)
    columns: list[Column] = []
    for phase in run.phases():
        lead = "" if phase == FORWARD else phase.capitalize() + " "
        if with_flops and phase == FORWARD:
            columns.append(ParamsColumn("Params"))
        for measure in MEASURES:
            names = {name for name, _ in measure.fields}
            if not names <= set(meta.requested):
                continue
            heading = measure.heading.format(device=device)
            measured = names <= of_all
            if measure.unit is not Unit.COUNT and (phase == FORWARD or show_events):
                columns.append(CostColumn(f"{lead}Self {heading}", measured, phase, measure, True))
            columns.append(CostColumn(f"{lead}{heading}", measured, phase, measure))
        if with_flops and "cpu_ns" in meta.requested:
            on_device = "device_ns" in meta.requested
            measured = {"flops", "device_ns" if on_device else "cpu_ns"} <= of_all
            columns.append(RateColumn(f"{lead}FLOP/s", measured, phase, on_device))
        if phase == FORWARD:
            columns.append(CallsColumn(CALLS))
    return columns


@report("tree", suffix=".txt")
def tree(
    run: Run,
    *,
    show_events: bool = False,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    percent: bool = False,
    tablefmt: str | None = None,
    hot: bool = False,
    color: bool = False,
) -> str:
    """The module tree with a row for each layer.

    Ranges of the user's (``record_function``) are rows marked as labels under the layer that opened them; the total of
    a label is all that ran in it, the layers that it calls included, which have rows of their own, too.
    ``show_events`` lists under each layer the operators that ran directly in it, those of backward and recompute marked
    so. ``depth`` hides the layers below that depth (0: the model alone); totals stay. ``sort_by`` orders siblings by a
    column, largest first: its heading, or that in lower case with underscores (``self_cpu_total``; also ``calls``).
    ``top`` shows only so many layers, the largest by self of that column (of CPU time where there is none, else of
    FLOPs), with those above them; with ``depth``, the deepest shown count with all that is hidden below them.
    ``percent`` writes beside each time its share of all that was recorded in that phase. ``tablefmt`` is any of
    tabulate's formats. Under the table stand the run's doubts.

    ``hot`` orders siblings by their total of one column, so that the hottest path comes first, and marks that path:
    from the largest model down into the largest layer each time, until one has more itself than any layer below it.
    The column is what ``sort_by`` names, else the time of the device where any was measured, else CPU time, else FLOPs.
    ``color`` shows each figure in a colour of 256 by its share of all in its column, cold to hot; it is for terminals,
    and so for torchprof's own look alone: tabulate's formats are for other programs to read.

    Raises TorchprofError for an unknown column or format, for a negative number, and for a hottest path by what has no
    total.
    """
    table = table_of(run, show_events=show_events, depth=depth, sort_by=sort_by, top=top, hot=hot)
    color = color and tablefmt is None

    def cells(text: str, entry: Entry) -> Iterator[str]:
        name = f"{text} {HOT}" if entry.hot else text
        yield _painted(name, _ON_THE_PATH) if color and entry.hot else name
        for column in table.columns:
            whole = table.wholes[column]
            figure = column.text(entry.figures, whole if percent else None)
            share = column.share(entry.figures, whole) if color else None
            yield figure if share is None else _painted(figure, heat(share))

    text = draw(
        ["Module", *(column.heading for column in table.columns)],
        [[*cells(text, entry)] for text, entry in table.rows],
        tablefmt,
    )
    return "\n".join([text, *([""] if table.notes else []), *table.notes])


def table_of(
    run: Run,
    *,
    show_events: bool = False,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    hot: bool = False,
) -> Table:
    """The table of the tree before it is drawn; ``tree`` says what the options do and what is raised."""
    check_number("depth", depth, "levels")
    check_number("top", top, "rows")
    columns = columns_of(run, show_events)
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    lines = entries_of(run, show_events)
    figures = [line.figures for line in _all(lines)]
    notes = []
    if hot:
        sorting = _path_column(columns, figures, sorting)
        mark_path(lines, sorting)
        if any(line.hot for line in lines):
            notes.append(f"{HOT} marks the hottest path by {sorting.heading}: each time into the largest layer.")
    if sorting is not None:
        sort_entries(lines, sorting)
    largest_by = sorting or _usual(columns)
    if top is not None:
        keep_top(lines, largest_by, top, depth)
        notes.append(what_is_hidden(lines, largest_by, top, depth))

    def below(line: Entry, level: int) -> list[Entry]:
        deeper = depth is None or level < depth
        return [*line.ops, *(child for child in line.children if deeper and child.shown)]

    rows = [*branches([line for line in lines if line.shown], attrgetter("name"), below)]
    if any(frame.kind == "label" for within in run.rows.within for around in within for frame in around.frames):
        notes.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    notes += [*about_flops(run), *about_sums(run), *map(printable, doubts_of(run))]
    return Table(columns, rows, {column: column.whole(figures) for column in columns}, notes)


def fitting_depth(run: Run, limit: int) -> int:
    """The deepest level down to which there are no more than so many layers; 0 where the models alone are more."""
    depth, rows = 0, 0
    for steps, count in sorted(Counter(len(layer.path) for layer in run.layers).items()):
        rows += count
        if rows <= limit:
            depth = steps - 1
    return depth


def heat(share: float) -> str:
    """The colour of a figure that is this part of the whole, as a terminal is told it (ECMA-48, "SGR")."""
    return next((color for least, color in _HEAT if share >= least), _COLD)


def _painted(text: str, color: str) -> str:
    return f"\033[{color}m{text}\033[0m"


def check_number(name: str, number: object, of: str) -> None:
    """Raise TorchprofError for an option that is no number from 0 on."""
    if number is not None and (not isinstance(number, int) or number < 0):
        raise TorchprofError(f"{name} is a number of {of}, not {number!r}.")


def draw(headings: Sequence[str], table: Sequence[Sequence[str]], tablefmt: str | None = None) -> str:
    """A table as text, in torchprof's own look or any of tabulate's formats; tree lines keep their indentation."""
    if tablefmt is not None:
        if tablefmt not in tabulate_formats:
            raise TorchprofError(f"tabulate has no format {tablefmt!r}. {suggest(str(tablefmt), tabulate_formats)}")
        return str(tabulate(table, headings, tablefmt, disable_numparse=True, preserve_whitespace=True))
    # As a heading tabulate would make each column two characters wider than its content.
    rows = [headings, SEPARATING_LINE, *table]
    return str(tabulate(rows, tablefmt=LOOK, disable_numparse=True, preserve_whitespace=True))


def column_called(name: str, columns: Sequence[Column]) -> Column:
    for column in columns:
        if column.is_called(name):
            if not column.measured:
                raise TorchprofError(f"{column.heading!r} was not measured in this run: there is no order by it.")
            return column
    raise TorchprofError(f"This run has no column {name!r}. {suggest(str(name), [column.key for column in columns])}")


def _usual(columns: Sequence[Column]) -> Column:
    """The column that tells which layers are the largest where nobody says: the first of time, else that of FLOPs."""
    costs = [column for column in columns if isinstance(column, CostColumn) and column.phase == FORWARD]
    timed = [column for column in costs if column.measure.unit is not Unit.COUNT]
    return [*timed[:1], *costs[-1:], *columns][0]


def _path_column(columns: Sequence[Column], figures: Sequence[Figures], asked: Column | None) -> Column:
    """The column of totals that the hottest path follows."""
    totals = [column for column in columns if isinstance(column, CostColumn) and not column.is_self]
    if asked is not None:
        for column in totals:
            if isinstance(asked, CostColumn) and (column.phase, column.measure) == (asked.phase, asked.measure):
                return column
        raise TorchprofError(
            f"{asked.heading!r} has no total that a hottest path could follow. Sort by one of "
            f"{', '.join(column.key for column in totals)}, or by nothing."
        )
    here = [column for column in totals if column.phase == FORWARD and column.measured]
    times = [column for column in here if column.measure.unit is Unit.TIME]
    counts = [column for column in here if column.measure.unit is Unit.COUNT]
    usual = [*reversed(times), *reversed(counts)]
    return next((column for column in usual if any(map(column.of, figures))), _usual(columns))


def mark_path(lines: Sequence[Entry], column: Column) -> None:
    """Mark the hottest path: each time into the layer with the largest total, until one has more by itself."""
    by_self, by_total = column.ranking.of, column.of
    left = 0.0
    while lines := [line for line in lines if line.is_layer]:
        hottest = max(lines, key=lambda line: by_total(line.figures))
        if by_total(hottest.figures) <= left:
            return
        hottest.hot = True
        left, lines = max(0, by_self(hottest.figures)), hottest.children


def entries_of(run: Run, show_events: bool = False, phases: Sequence[str] | None = None) -> list[Entry]:
    """The rows of the models and of work of no layer, each with those below it. ``phases``: those that have figures,
    None for those of the run."""
    phases = run.phases() if phases is None else phases
    chains = [*run.rows.frames, *(around.frames for within in run.rows.within for around in within)]
    has_ranges = any(frame.kind in RANGES for frames in chains for frame in frames)
    ops = {phase: run.ops(phase) if show_events or has_ranges else {} for phase in phases}
    index = {layer.path: number for number, layer in enumerate(run.layers)}
    lines: list[Entry] = []
    lines_of: dict[tuple[str, ...], Entry] = {}
    for path, figures in figures_of_layers(run, phases).items():
        line = lines_of[path] = Entry(printable(path[-1]), figures, path=path)
        if figures.total:
            line.ops = _op_lines({phase: ops[phase].get(index[path], []) for phase in ops}, show_events)
        (lines if len(path) == 1 else lines_of[path[:-1]].children).append(line)
    for name, key in ((NOT_SELECTED_NAME, NOT_SELECTED), (OUTSIDE_NAME, OUTSIDE)):
        costs = {phase: run.no_layer(phase, selected=key == OUTSIDE) for phase in phases}
        if any(costs.values()):
            line = Entry(name, Figures(costs, costs), is_layer=False)
            found = {phase: [op for op in ops[phase].get(key, []) if op.name != LAUNCHED_BEFORE] for phase in ops}
            line.ops = _op_lines(found, show_events, key == OUTSIDE)
            lines.append(line)
    if run.left_over:
        costs = {FORWARD: run.left_over}
        lines.append(Entry(LAUNCHED_BEFORE, Figures(costs, costs, left_over=True), is_layer=False))
    return lines


def _op_lines(ops: dict[str, list[Op]], show_events: bool, in_no_layer: bool = False) -> list[Entry]:
    """The lines of the user's labels, of compiled regions and their kernels, and with ``show_events`` of operators. A
    label is one line in all phases, and so is a region."""
    lines = []
    labels: dict[tuple[str, str], tuple[Entry, dict[str, Op]]] = {}  # its line, and what of it is in which phase
    for phase, found in ops.items():
        for op in sorted(found, key=lambda op: op.name == BETWEEN_OPS):
            if op.kind in RANGES:
                if (op.kind, op.name) not in labels:
                    name = range_in_words(op.kind, op.name)
                    if op.kind == "label" and phase != FORWARD:
                        name = f"{op.name} (label, {phase})"
                    lines.append(Entry(printable(name), Figures(), is_layer=False))
                    labels[op.kind, op.name] = lines[-1], {}
                labels[op.kind, op.name][1][phase] = op
            elif show_events:
                own_time = op.name == BETWEEN_OPS
                figures = Figures({phase: op.self}, {phase: op.total}, -1 if own_time else op.calls)
                figures.timeless = own_time and in_no_layer
                name = printable(op.name) + (f" ({phase})" if phase != FORWARD else "")
                lines.append(Entry(name, figures, is_layer=False))
    for line, parts in labels.values():
        line.figures.own = {phase: own_of_range(op) for phase, op in parts.items()}
        line.figures.total = {phase: op.total for phase, op in parts.items()}
        if not any(op.kind == "kernels" for op in parts.values()):  # a group of them is nothing that is called
            line.figures.calls = next((op.calls for op in parts.values() if op.calls), 0)
        line.ops = _op_lines({phase: op.inside for phase, op in parts.items()}, show_events)
    return lines


def own_of_range(op: Op) -> Cost:
    """The self of a range's line: of a region with what leads to its graph, of some kernels all of it."""
    if op.kind == "kernels":
        return op.total
    leading = [inner.self for inner in op.inside if op.kind == "region" and is_overhead(inner.name)]
    return sum(leading, op.self)


def printable(name: str) -> str:
    """A name that somebody chose, with line breaks and the like written out: they would break the table."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def sort_entries(lines: list[Entry], column: Column) -> None:
    waiting = [lines]
    while waiting:
        siblings = waiting.pop()
        siblings.sort(key=lambda line: (not line.is_layer, -column.of(line.figures) if line.is_layer else 0))
        for line in siblings:
            levels = [line.ops]
            while levels:
                level = levels.pop()
                level.sort(key=lambda op: -column.of(op.figures))
                levels.extend(op.ops for op in level)
            waiting.append(line.children)


def _layers(lines: Sequence[Entry]) -> Iterator[tuple[Entry, Entry | None, int]]:
    """Every layer's line, with the line above it and its depth; those above come first."""
    waiting: list[tuple[Entry, Entry | None, int]] = [(line, None, 0) for line in lines if line.is_layer]
    while waiting:
        line, above, depth = waiting.pop()
        yield line, above, depth
        waiting.extend((child, line, depth + 1) for child in line.children)


def keep_top(lines: Sequence[Entry], column: Column, top: int, depth: int | None) -> None:
    """Show only the layers with the largest self of a column, down to a depth, and those above them.

    At that depth a layer stands for all below it, which is hidden: its total counts.
    """
    by_self, by_total = column.ranking.of, column.with_below.of
    seen = []
    for line, above, level in _layers(lines):
        line.shown = False
        if depth is None or level <= depth:
            size = by_total if level == depth and line.children else by_self
            seen.append((line, above, size(line.figures)))
    known = [(size, line) for line, _, size in seen if line.figures.total and not line.figures.unknown]
    kept = {id(line) for _, line in sorted(known, key=lambda one: -one[0])[:top]}
    for line, above, _ in reversed(seen):
        line.shown = id(line) in kept
        if line.shown and above is not None:
            kept.add(id(above))


def what_is_hidden(lines: Sequence[Entry], column: Column, top: int, depth: int | None) -> str:
    """How many layers ``top`` and ``depth`` hide, and what the others are."""
    hidden = sum(not line.shown for line, _, _ in _layers(lines))
    rows = "1 row is" if hidden == 1 else f"{hidden} rows are"
    which = "is the largest" if top == 1 else f"are the {top} largest"
    by = column.heading if column.ranking == column else f"self of {column.heading}"
    if any(level == depth and line.children for line, _, level in _layers(lines)):
        by += f", at depth {depth} with all below"
    return f"{rows} hidden: shown {which} by {by}, with the layers above."


def _all(lines: Sequence[Entry]) -> Iterator[Entry]:
    """All rows but those of operators."""
    waiting = list(lines)
    while waiting:
        line = waiting.pop()
        yield line
        waiting.extend(line.children)


def branches(
    roots: Sequence[_Branch], name: Callable[[_Branch], str], below: Callable[[_Branch, int], Sequence[_Branch]]
) -> Iterator[tuple[str, _Branch]]:
    """Each item of a tree, depth first, with its name behind the lines of the tree.

    ``below`` gives the items under one, which stands at a level from 0.
    """
    waiting = [(root, "", "", 0) for root in reversed(roots)]
    while waiting:
        item, own, lines, level = waiting.pop()
        yield own + name(item), item
        children = below(item, level)
        for number in range(len(children) - 1, -1, -1):
            last = number == len(children) - 1
            waiting.append(
                (children[number], lines + ("└── " if last else "├── "), lines + (" " if last else "│"), level + 1)
            )
