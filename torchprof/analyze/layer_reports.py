"""The reports on layers: "tree" with a row for each, "calls" with the times of its calls, "python" with the time
between its operators, and "types" with a row for each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import repeat
from typing import NamedTuple

from torchprof.analyze.columns import CALLS, Column, column_called, columns_of, default_column, hot_path_column
from torchprof.analyze.figures import Figures, figures_of_layers, summed_figures
from torchprof.analyze.layers import all_entries, down_to, entries_of, keep_top, mark_hot, sort_entries, table_rows
from torchprof.analyze.ops import SUM_OF_PHASES, Whole, figure_columns, largest_by, line_of_figures, ranked
from torchprof.analyze.report import Part, ReportTable, name_of_layer, phase_cell, report, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_sums, warnings_below
from torchprof.analyze.top import parts_of, source_lines
from torchprof.errors import printable
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, format_number, format_share, format_time
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
) -> Part:
    """The module tree with a row for each layer.

    The user's ranges (``record_function``) are rows marked as labels below the layer that opened them. ``show_events``
    adds below each layer the operators that ran directly in it; those of backward and recompute are marked. ``top``:
    the number of layers, those with the largest self in the column ``sort_by`` (default: CPU time, else FLOPs).
    ``percent`` adds to each time its share of all time of that phase.

    ``hot`` orders siblings by their total in one column, and marks the path of ``mark_hot``. The column is ``sort_by``,
    else device time if any was measured, else CPU time, else FLOPs. ``color`` colors each figure by its share of the
    column's sum, with colors of 256: not with ``tablefmt``, whose output is for other programs.

    Raises TorchprofError for an unknown column, and for a hottest path by a column without totals.
    """
    columns = columns_of(run, show_events)
    order = column_called(sort_by, columns) if sort_by is not None else None
    entries = entries_of(run, show_events)
    figures = [entry.figures for entry in all_entries(entries)]
    sentences: list[str] = []
    if hot:
        order = hot_path_column(columns, figures, order)
        sentences += mark_hot(entries, order)
    if order is not None:
        sort_entries(entries, order)
    down_to(entries, depth)
    if top is not None:
        sentences += keep_top(entries, order or default_column(columns), top)
    wholes = [column.whole(figures) for column in columns]
    shares = wholes if percent else [None] * len(columns)
    rows = table_rows(entries, lambda entry: map(Column.text, columns, repeat(entry.figures), shares))
    if any(frame.kind == FrameKind.LABEL for within in run.rows.within for around in within for frame in around.frames):
        sentences.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    headings = ["Module", *(column.heading for column in columns)]
    table = ReportTable(headings, rows, wholes=[None, *wholes], in_color=color)
    return spaced([table, stacked([*sentences, *about_flops(run), *about_sums(run), warnings_below(run)])])


@report("calls", "single calls of each layer: the first, the median, the spread", answers="time")
def calls(run: Run, *, depth: int | None = None) -> Part:
    """CPU time of a forward call of each layer that was called, its child layers included.

    The first call has a column of its own: it often includes allocations, kernel loading and caches that later calls
    reuse. The median and the 5th to 95th percentile are over all calls (of more, a uniform sample of 256).
    """
    headings = ["Module", CALLS, "First call", "Median", "P5 to P95", "Min", "Max"]
    table: list[list[Cell]] = []
    for key, spread in sorted(run.samples.items()):
        is_of_calls = key.phase == FORWARD and key.measure == "cpu_ns"
        if is_of_calls and (depth is None or len(run.layers[key.layer].path) <= depth + 1):
            p5, p95 = spread.quantile(0.05), spread.quantile(0.95)
            middle = ReportCell(f"{format_time(p5)} to {format_time(p95)}", p95, "ns", ids={"p5": p5, "p95": p95})
            cells = [format_number(spread.count), format_time(spread.first), format_time(spread.median), middle]
            name = name_of_layer(run, key.layer)
            table.append([name, *cells, format_time(spread.min), format_time(spread.max)])
    return ReportTable.of_cells(headings, table) if table else "No call of a layer was recorded in this run."


@report("python", "the time between operators: Python and what it calls", answers="time")
def python(run: Run, *, top: int | None = 10, lines: int | None = 3) -> Part:
    """The CPU time in which no operator ran: Python, and libraries that it calls, such as NumPy. By layer, label and
    phase, largest first.

    Below each row are the ``lines`` source lines with the most samples, and the part of the time that their samples
    stand for. Samples need a sampling thread, which ``torchprof run`` has; without it they are unknown. Short times may
    have no samples.
    """
    parts = parts_of(run, "cpu_ns")
    whole = sum(parts.values())
    between_ops = Counter({work.at(layer): ns for (layer, work), ns in parts.items() if work.has_lines})
    shown = between_ops.most_common(top)
    sampled = source_lines(run)
    cells = []
    for where, ns in shown:
        samples_of = sampled.get(where, Counter())
        whole_count = sum(samples_of.values())
        figures = [format_time(ns), format_share(ns / whole), format_number(whole_count) if sampled else UNKNOWN]
        cells.append([where.name(run), phase_cell(where.phase_name), *figures])
        for line, count in samples_of.most_common(lines):
            line_ns = ns * count / whole_count
            time = format_time(line_ns).written(f"~{format_time(line_ns)}")
            cells.append([ReportCell(f"  {line}", line), "", time, format_share(line_ns / whole), format_number(count)])
    headings = ["Layer, and where in the source", "Phase", "Between ops", "Share", "Samples"]
    hidden = len(between_ops) - len(shown)
    more = [f"Layers with less are hidden: {hidden}."] if hidden else []
    return stacked([ReportTable.of_cells(headings, cells), *more, *about_sums(run), warnings_below(run)])


@report("types", "all layers of a class together: Linear, BatchNorm2d, …", answers="time")
def types(run: Run, *, sort_by: str | None = None, top: int | None = None, phase: str | None = None) -> Part:
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


UNKNOWN_CLASS = "(unknown)"


class Group(NamedTuple):
    """Layers of one class (``UNKNOWN_CLASS`` in a trace without a model), the sum of their figures, and the figures of
    each by its path. Self costs add up; a total counts a layer only if no other of the group is above it."""

    name: str
    figures: Figures
    members: Mapping[tuple[str, ...], Figures]


def by_class(run: Run) -> list[Group]:
    """A group for each class of layers, in the order of the model."""
    groups: dict[str, dict[tuple[str, ...], Figures]] = {}
    for path, figures in figures_of_layers(run, run.phases()).items():
        if figures.total:  # blank for layers that were not selected
            kind = run.layers[run.layers.index_of[path]].kind or UNKNOWN_CLASS
            groups.setdefault(kind, {})[path] = figures
    return [Group(kind, summed_figures([*members.values()], [*members]), members) for kind, members in groups.items()]
