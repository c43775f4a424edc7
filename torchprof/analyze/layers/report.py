"""The reports on all layers: as a tree, by class, and their single calls."""

from __future__ import annotations

from itertools import repeat

from torchprof.analyze.columns import CALLS, Column, column_called, columns_of, default_column, hot_path_column
from torchprof.analyze.groups import by_class
from torchprof.analyze.layers.entries import (
    all_entries,
    down_to,
    entries_of,
    keep_top,
    mark_hot,
    sort_entries,
    table_rows,
)
from torchprof.analyze.operators.ranking import (
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
from torchprof.run.cost import Cost
from torchprof.run.formats import Cell, ReportCell, format_number, format_time
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
