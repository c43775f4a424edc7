"""Tables of layers: the reports "tree", "calls" and "types", and the rows of layers as trees.

A report on layers makes a list of ``Entry``, the topmost rows. Its options choose which of ``sort_entries``,
``mark_hot``, ``down_to`` and ``keep_top`` change the list; ``table_rows`` makes a table of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import NamedTuple

from torchprof.analyze.columns import CALLS, Column, column_called, columns_of, default_column, hot_path_column
from torchprof.analyze.figures import Figures, figures_of_layers, figures_of_no_layer
from torchprof.analyze.ops import SUM_OF_PHASES, Whole, figure_columns, largest_by, line_of_figures, ranked
from torchprof.analyze.report import (
    HOT,
    Part,
    ReportTable,
    Section,
    TableRow,
    branches,
    printable,
    report,
    rows_hidden,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import about_flops, about_sums, warnings_below
from torchprof.run.formats import Cell, ReportCell, format_number, format_time
from torchprof.run.measures import NO_COST, Cost, sum_of_costs
from torchprof.run.operators import Op, operators_of_layers, rows_in_ranges
from torchprof.run.run import Run
from torchprof.run.words import BETWEEN_OPS, FORWARD, LAUNCHED_BEFORE, RANGES, FrameKind, is_overhead, range_in_words


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
        sentences += keep_top(lines, sorting or default_column(columns), top)
    wholes = [column.whole(figures) for column in columns]
    shares = wholes if percent else [None] * len(columns)
    rows = table_rows(lines, lambda line: map(Column.text, columns, repeat(line.figures), shares))
    if any(frame.kind == FrameKind.LABEL for within in run.rows.within for around in within for frame in around.frames):
        sentences.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    headings = ["Module", *(column.heading for column in columns)]
    table = ReportTable(headings, rows, wholes=[None, *wholes], in_color=color)
    return spaced([table, stacked([*sentences, *about_flops(run), *about_sums(run), warnings_below(run)])])


@report("calls", "single calls of each layer: the first, the median, the spread", answers="time")
def calls(run: Run, *, depth: int | None = None) -> Part:
    """CPU time of a forward call of each layer that was called, its child layers included.

    The first call has a column of its own: it often includes allocations, kernel loading and caches that later calls
    reuse. The median and the 5th to 95th percentile are over all calls (over a uniform sample of 256, if there were
    more).
    """
    table: list[list[Cell]] = []
    for key, spread in sorted(run.samples.items()):
        is_call = key.phase == FORWARD and key.measure == "cpu_ns"
        if is_call and (depth is None or len(run.layers[key.layer].path) <= depth + 1):
            low, high = spread.quantile(0.05), spread.quantile(0.95)
            middle = ReportCell(f"{format_time(low)} to {format_time(high)}", high, "ns", ids={"p5": low, "p95": high})
            cells = [format_number(spread.count), format_time(spread.first), format_time(spread.median), middle]
            name = printable(run.layers[key.layer].name)
            table.append([name, *cells, format_time(spread.min), format_time(spread.max)])
    headings = ["Module", CALLS, "First call", "Median", "P5 to P95", "Min", "Max"]
    return ReportTable.of_cells(headings, table) if table else "No call of a layer was recorded in this run."


# The rows of a tree of layers


@dataclass
class Entry:
    """A row of the table with the rows below it.

    ``is_layer`` is False for operators and for work of no layer. ``hot``: it is a layer on the hottest path. ``path``:
    the path of the layer, () for other rows. ``parts``: the rows that this one stands for, if it is the sum of several.
    ``hidden``: how many layers it stands for, or has below it, that have no row of their own. ``id``: the name as files
    write it, "" if it is ``name``; ``ids``: see ``ReportCell``.
    """

    name: str
    figures: Figures
    id: str = ""
    ids: Mapping[str, str] = field(default_factory=dict)
    children: list[Entry] = field(default_factory=list)
    ops: list[Entry] = field(default_factory=list)
    is_layer: bool = True
    hot: bool = False
    path: tuple[str, ...] = ()
    parts: tuple[Entry, ...] = ()
    hidden: int = 0

    def cell(self, text: str = "") -> Cell:
        """The cell with the name, or with another text for it."""
        return ReportCell(text or self.name, self.id, ids=self.ids) if self.id else text or self.name

    @property
    def each(self) -> tuple[Entry, ...]:
        """The rows that this one stands for: those that it is the sum of, or itself."""
        return self.parts or (self,)

    @property
    def below(self) -> list[Entry]:
        """The rows directly below this one: operators, labels and regions, then layers."""
        return [*self.ops, *self.children]


def all_entries(lines: Sequence[Entry]) -> Iterator[Entry]:
    """All rows except those of operators and ranges, depth first."""
    return (line for _, line in branches(lines, lambda line: line.children))


def entries_by_path(figures: Mapping[tuple[str, ...], Figures]) -> dict[tuple[str, ...], Entry]:
    """A row for each layer, by path; each is below that of the layer above it. ``figures``: of each, parents first."""
    lines: dict[tuple[str, ...], Entry] = {}
    for path, of_layer in figures.items():
        lines[path] = Entry(printable(path[-1]), of_layer, ".".join(path), path=path)
        if len(path) > 1:
            lines[path[:-1]].children.append(lines[path])
    return lines


def fitting_depth(run: Run, limit: int) -> int:
    """The deepest depth at which a table has at most ``limit`` layers; 0 if the models alone are more."""
    depth, rows = 0, 0
    for steps, count in sorted(Counter(len(layer.path) for layer in run.layers).items()):
        rows += count
        if rows <= limit:
            depth = steps - 1
    return depth


def mark_hot(lines: Sequence[Entry], column: Column) -> None:
    """Mark the hottest path: from the largest model down, the child with the largest total, until a layer's self is at
    least as large as the total of its largest child."""
    by_self, by_total = column.ranking.of, column.of
    own = 0.0
    while lines := [line for line in lines if line.is_layer]:
        hottest = max(lines, key=lambda line: by_total(line.figures))
        if by_total(hottest.figures) <= own:
            return
        hottest.hot = True
        own, lines = max(0, by_self(hottest.figures)), hottest.children


def entries_of(run: Run, show_events: bool = False, phases: Sequence[str] | None = None) -> list[Entry]:
    """The rows of the models and of work of no layer, with all rows below them. ``phases``: the phases with figures;
    None: all phases of the run. ``show_events``: with rows of operators."""
    phases = run.phases() if phases is None else phases
    rows = run.rows if show_events else rows_in_ranges(run.rows)
    ops = {phase: operators_of_layers(rows, phase) for phase in phases}
    has_ops = {layer for of_phase in ops.values() for layer in of_phase}
    index = run.layers.index_of
    by_path = entries_by_path(figures_of_layers(run, phases))
    for path, line in by_path.items():
        if line.figures.total and index[path] in has_ops:
            line.ops = _op_lines({phase: ops[phase].get(index[path], []) for phase in ops}, line.id, show_events)
    lines = [line for path, line in by_path.items() if len(path) == 1]
    for key, name, figures in figures_of_no_layer(run, phases):
        lines.append(Entry(name, figures, is_layer=False))
        if not figures.left_over:
            in_phases = {phase: [op for op in ops[phase].get(key, []) if op.name != LAUNCHED_BEFORE] for phase in ops}
            lines[-1].ops = _op_lines(in_phases, name, show_events)
    return lines


def _op_lines(ops: dict[str, list[Op]], layer: str, show_events: bool) -> list[Entry]:
    """The rows of the user's labels, of compiled regions and their kernels, and with ``show_events`` of operators. A
    label has one row for all phases, and so has a region; an operator has one for each phase. ``layer``: the path of
    the layer in which they ran, or ``(outside)``."""
    lines = []
    labels: dict[tuple[str, str], tuple[Entry, dict[str, Op]]] = {}  # its row, and its figures by phase
    for phase, in_phase in ops.items():
        for op in sorted(in_phase, key=lambda op: op.name == BETWEEN_OPS):
            if op.kind in RANGES:
                if (op.kind, op.name) not in labels:
                    name = range_in_words(op.kind, op.name)
                    if op.kind == FrameKind.LABEL and phase != FORWARD:
                        name = f"{op.name} (label, {phase})"
                    ids = {"layer": layer, "kind": op.kind}
                    lines.append(Entry(printable(name), Figures(), op.name, ids, is_layer=False))
                    labels[op.kind, op.name] = lines[-1], {}
                labels[op.kind, op.name][1][phase] = op
            elif show_events:
                own_time = op.name == BETWEEN_OPS
                figures = Figures({phase: op.self}, {phase: op.total}, -1 if own_time else op.calls)
                name = printable(op.name) + (f" ({phase})" if phase != FORWARD else "")
                ids = {"layer": layer, "kind": op.kind, "phase": phase}
                lines.append(Entry(name, figures, op.name, ids, is_layer=False))
    for line, parts in labels.values():
        line.figures.own = {phase: own_of_range(op) for phase, op in parts.items()}
        line.figures.total = {phase: op.total for phase, op in parts.items()}
        if not any(op.kind == FrameKind.KERNELS for op in parts.values()):  # a group of kernels has no calls
            line.figures.calls = next((op.calls for op in parts.values() if op.calls), 0)
        line.ops = _op_lines({phase: op.inside for phase, op in parts.items()}, layer, show_events)
    return lines


def own_of_range(op: Op) -> Cost:
    """The self of a range's row. That of a region includes its overhead; that of a group of kernels is its total."""
    if op.kind == FrameKind.KERNELS:
        return op.total
    leading = [inner.self for inner in op.inside if op.kind == FrameKind.REGION and is_overhead(inner.name)]
    return sum(leading, op.self)


def sort_entries(lines: list[Entry], column: Column) -> None:
    """Sort siblings by a column, largest first, on all levels. Work of no layer stays last."""
    lines.sort(key=lambda line: (not line.is_layer, -column.of(line.figures) if line.is_layer else 0))
    for line in [*all_entries(lines)]:
        line.children.sort(key=lambda child: -column.of(child.figures))
        for _, op in [*branches([line], lambda row: row.ops)]:
            op.ops.sort(key=lambda inner: -column.of(inner.figures))


def down_to(lines: Sequence[Entry], depth: int | None) -> None:
    """Hide the layers below a depth: at 0, those below the models. None hides nothing."""
    level = lines if depth is not None else ()
    while depth and level:
        level = [child for line in level for child in line.children]
        depth -= 1
    for line in level:
        line.hidden, line.children = sum(1 for _ in all_entries(line.children)), []


def keep_top(lines: list[Entry], column: Column, top: int) -> list[str]:
    """Hide all layers but those with the largest self of a column, and the layers above them. Returns a sentence about
    what is hidden, if anything is. A layer with hidden layers below it is ranked by its total, because it stands for
    them."""
    by_self, by_total = column.ranking.of, replace(column, is_self=False).of
    layers = [line for line in all_entries(lines) if line.is_layer]
    known = [line for line in layers if line.figures.total and not line.figures.unknown]
    known.sort(key=lambda line: -(by_total if line.hidden else by_self)(line.figures))
    kept = {id(line) for line in known[:top]}
    for line in reversed(layers):  # children before the rows above them
        line.children = [child for child in line.children if id(child) in kept]
        if line.children:
            kept.add(id(line))
    lines[:] = [line for line in lines if not line.is_layer or id(line) in kept]
    hidden = len(layers) - len(kept) + sum(line.hidden for line in layers)
    if not hidden:
        return []
    by = column.heading if column.ranking == column else f"self of {column.heading}"
    if any(line.hidden for line in layers):
        depth = next(len(line.path) for line in layers if line.hidden) - 1
        by += f", at depth {depth} with all below"
    return [f"{rows_hidden(hidden, top, 'largest')} by {by}, with the layers above."]


def table_rows(lines: Sequence[Entry], cells: Callable[[Entry], Iterable[Cell]]) -> list[TableRow]:
    """The rows of a table. ``cells``: those after the name."""
    return [
        TableRow([line.cell(), *cells(line)], lead, line.hot, is_part=not line.figures.left_over)
        for lead, line in branches(lines, lambda line: line.below)
    ]


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
        line_of_figures({"Type": [printable(name)], "Layers": [format_number(len(members))]}, figures, phases)
        for name, figures, members in by_class(run)
    ]
    own = sum((line.cost(SUM_OF_PHASES, is_self=True) for line in lines), Cost())
    texts = ["Type", "Layers"] if lines else ["Type"]
    order = largest_by(columns, of_self=True)
    whole = Whole("what all layers took", own, own)
    return ranked(run, texts, lines, columns, order, whole, sort_by=sort_by, top=top)


# Layers added up: all of one class, or those that are one row

UNKNOWN_CLASS = "(unknown)"
_Path = tuple[str, ...]


class Group(NamedTuple):
    """Layers of one class (``UNKNOWN_CLASS`` in a trace without a model), the sum of their figures, and the figures of
    each by its path. Self costs add up; a total counts a layer only if no other of the group is above it."""

    name: str
    figures: Figures
    members: Mapping[_Path, Figures]


def by_class(run: Run) -> list[Group]:
    """A group for each class of layers, in the order of the model."""
    groups: dict[str, dict[_Path, Figures]] = {}
    for path, figures in figures_of_layers(run, run.phases()).items():
        if figures.total:  # blank for layers that were not selected
            kind = run.layers[run.layers.index_of[path]].kind or UNKNOWN_CLASS
            groups.setdefault(kind, {})[path] = figures
    return [Group(kind, summed_figures([*of.values()], [*of]), of) for kind, of in groups.items()]


def pattern_of(paths: Sequence[_Path]) -> str:
    """The dotted path that fits all of these, which are equally long: ``*`` for a step in which they differ."""
    return ".".join(steps[0] if len(set(steps)) == 1 else "*" for steps in zip(*paths))


def summed_figures(members: Sequence[Figures], paths: Sequence[_Path] = ()) -> Figures:
    """The figures of several layers together. ``paths``: of each, if one may be above another, whose total holds it.

    A layer that was never called adds nothing; if it may have run as a part of a compiled region, the sum is a lower
    bound.
    """
    called = [figures for figures in members if not figures.unknown]
    outermost = _outermost(members, paths)
    ran = _outermost(called, [path for path, figures in zip(paths, members) if not figures.unknown])
    phases = frozenset(phase for figures in members for phase in figures.total)
    may_have_run = any(figures.unknown and figures.inlined for figures in members)
    calls = [figures.calls for figures in members if figures.calls >= 0]  # 0 of a layer that was never called
    nothing = frozenset[str]()
    return Figures(
        own=_added(figures.own for figures in called) or dict.fromkeys(phases, NO_COST),
        total=_added(figures.total for figures in ran) or dict.fromkeys(phases, NO_COST),
        calls=sum(calls) if calls else -1,
        params=_sum([figures.params for figures in outermost]),
        own_params=_sum([figures.own_params for figures in members]),
        has_params=any(figures.has_params for figures in members),
        unknown=not called,
        inlined=any(figures.inlined for figures in members),
        incomplete=phases if may_have_run else nothing.union(*(figures.incomplete for figures in ran)),
        incomplete_self=phases if may_have_run else nothing.union(*(figures.incomplete_self for figures in called)),
    )


def _outermost(members: Sequence[Figures], paths: Sequence[_Path]) -> Sequence[Figures]:
    """Without those that have another one above them."""
    if not paths:
        return members
    known = {*paths}
    is_nested = (any(path[:steps] in known for steps in range(1, len(path))) for path in paths)
    return [figures for figures, nested in zip(members, is_nested) if not nested]


def _sum(numbers: Sequence[int | None]) -> int | None:
    """Unknown if any of them is."""
    return None if None in numbers else sum(filter(None, numbers))


def _added(costs: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    by_phase: dict[str, list[Cost]] = {}
    for by_part in costs:
        for phase, cost in by_part.items():
            by_phase.setdefault(phase, []).append(cost)
    return {phase: sum_of_costs(of_phase) for phase, of_phase in by_phase.items()}
