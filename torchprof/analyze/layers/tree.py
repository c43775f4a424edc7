"""The tree report: every layer with self and total costs and calls."""

from __future__ import annotations

from torchprof.analyze.columns import column_called, columns_of, default_column, hot_path_column
from torchprof.analyze.layers.entries import (
    Entry,
    all_entries,
    entries_of,
    keep_top,
    mark_path,
    sort_entries,
    what_is_hidden,
)
from torchprof.analyze.report import (
    HOT,
    ReportTable,
    Section,
    TableRow,
    branches,
    check_number,
    report,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import about_flops, about_sums, warnings_below
from torchprof.run.run import Run
from torchprof.run.words import FrameKind


@report("tree", "every layer, with self and total of all that was measured", answers="time", suffix=".txt")
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
) -> Section:
    """The module tree with a row for each layer.

    The user's ranges (``record_function``) are rows marked as labels below the layer that opened them. The total of a
    label includes the layers called in it, which have rows of their own, too. ``show_events`` adds below each layer the
    operators that ran directly in it; those of backward and recompute are marked. ``depth`` hides the layers below that
    depth (0: the model alone); totals do not change. ``sort_by`` orders siblings by a column, largest first: its
    heading, or that in lower case with underscores (``self_cpu_total``; also ``calls``). ``top``: the number of layers,
    those with the largest self in that column (default: CPU time, else FLOPs), shown with the layers above them; layers
    at ``depth`` are ranked by their totals. ``percent`` adds to each time its share of all time of that phase.
    ``tablefmt``: any of tabulate's formats. The run's warnings are below the table.

    ``hot`` orders siblings by their total in one column, so that the hottest path comes first, and marks that path:
    from the largest model into the largest child each time, until a layer's self is larger than any child's total. The
    column is ``sort_by``, else device time if any was measured, else CPU time, else FLOPs. ``color`` colors each figure
    by its share of the column's sum, cold to hot, with colors of 256. It works only without ``tablefmt``, because the
    output of tabulate's formats is for other programs.

    Raises TorchprofError for an unknown column or format, for a negative number, and for a hottest path by a column
    without totals.
    """
    check_number("depth", depth, "levels")
    check_number("top", top, "rows")
    columns = columns_of(run, show_events)
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    lines = entries_of(run, show_events)
    figures = [line.figures for line in all_entries(lines)]
    sentences = []
    if hot:
        sorting = hot_path_column(columns, figures, sorting)
        mark_path(lines, sorting)
        if any(line.hot for line in lines):
            sentences.append(f"{HOT} marks the hottest path by {sorting.heading}: each time into the largest layer.")
    if sorting is not None:
        sort_entries(lines, sorting)
    largest_by = sorting or default_column(columns)
    if top is not None:
        keep_top(lines, largest_by, top, depth)
        sentences.append(what_is_hidden(lines, largest_by, top, depth))

    def below(line: Entry, level: int) -> list[Entry]:
        deeper = depth is None or level < depth
        return [*line.ops, *(child for child in line.children if deeper and child.shown)]

    wholes = [column.whole(figures) for column in columns]
    shares_of = wholes if percent else [None] * len(columns)
    rows = [
        TableRow(
            [line.cell(), *(column.text(line.figures, whole) for column, whole in zip(columns, shares_of))],
            lead,
            line.hot,
            is_part=not line.figures.left_over,
        )
        for lead, line in branches([line for line in lines if line.shown], below)
    ]
    if any(frame.kind == FrameKind.LABEL for within in run.rows.within for around in within for frame in around.frames):
        sentences.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    headings = ["Module", *(column.heading for column in columns)]
    table = ReportTable(headings, rows, tablefmt, wholes=[None, *wholes], in_color=color)
    return spaced([table, stacked([*sentences, *about_flops(run), *about_sums(run), warnings_below(run)])])
