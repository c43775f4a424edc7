"""The tree table: every layer with self and total costs and calls, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import NamedTuple

from torchprof.analyze.figures import Figures, figures_of_layers
from torchprof.reports import report
from torchprof.reports.columns import (
    Column,
    column_called,
    columns_of,
    path_column,
    usual_columns,
)
from torchprof.reports.notes import about_flops, about_sums, warnings_of
from torchprof.reports.text import branches, check_number, draw, heat, painted, printable
from torchprof.run.cost import Cost
from torchprof.run.lockstep import range_in_words
from torchprof.run.run import Op, Run
from torchprof.run.words import (
    BETWEEN_OPS,
    FORWARD,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    RANGES,
    is_overhead,
)

HOT = "◄"  # behind the names of the layers on the hottest path

_ON_THE_PATH = "1"


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
        yield painted(name, _ON_THE_PATH) if color and entry.hot else name
        for column in table.columns:
            whole = table.wholes[column]
            figure = column.text(entry.figures, whole if percent else None)
            share = column.share(entry.figures, whole) if color else None
            yield figure if share is None else painted(figure, heat(share))

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
        sorting = path_column(columns, figures, sorting)
        mark_path(lines, sorting)
        if any(line.hot for line in lines):
            notes.append(f"{HOT} marks the hottest path by {sorting.heading}: each time into the largest layer.")
    if sorting is not None:
        sort_entries(lines, sorting)
    largest_by = sorting or usual_columns(columns)
    if top is not None:
        keep_top(lines, largest_by, top, depth)
        notes.append(what_is_hidden(lines, largest_by, top, depth))

    def below(line: Entry, level: int) -> list[Entry]:
        deeper = depth is None or level < depth
        return [*line.ops, *(child for child in line.children if deeper and child.shown)]

    rows = [*branches([line for line in lines if line.shown], attrgetter("name"), below)]
    if any(frame.kind == "label" for within in run.rows.within for around in within for frame in around.frames):
        notes.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    notes += [*about_flops(run), *about_sums(run), *map(printable, warnings_of(run))]
    return Table(columns, rows, {column: column.whole(figures) for column in columns}, notes)


def fitting_depth(run: Run, limit: int) -> int:
    """The deepest level down to which there are no more than so many layers; 0 where the models alone are more."""
    depth, rows = 0, 0
    for steps, count in sorted(Counter(len(layer.path) for layer in run.layers).items()):
        rows += count
        if rows <= limit:
            depth = steps - 1
    return depth


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
