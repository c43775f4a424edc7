"""The rows of tables of the layer tree: making, sorting, hiding, and the hottest path."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures, figures_of_layers
from torchprof.analyze.report import TableRow, branches, printable, rows_hidden
from torchprof.run.cost import Cell, Cost, ReportCell
from torchprof.run.operators import Op, operators_of_layers, rows_in_ranges
from torchprof.run.run import Run
from torchprof.run.words import (
    BETWEEN_OPS,
    FORWARD,
    LAUNCHED_BEFORE,
    NO_LAYERS,
    OUTSIDE,
    RANGES,
    FrameKind,
    is_overhead,
    range_in_words,
)


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
    shown: bool = True
    hot: bool = False
    path: tuple[str, ...] = ()
    parts: tuple[Entry, ...] = ()
    hidden: int = 0

    def cell(self, text: str = "") -> Cell:
        """The cell with the name, or with another text for it."""
        return ReportCell(text or self.name, self.id, ids=self.ids) if self.id else text or self.name


def fitting_depth(run: Run, limit: int) -> int:
    """The deepest depth at which a table has at most ``limit`` layers; 0 if the models alone are more."""
    depth, rows = 0, 0
    for steps, count in sorted(Counter(len(layer.path) for layer in run.layers).items()):
        rows += count
        if rows <= limit:
            depth = steps - 1
    return depth


def mark_path(lines: Sequence[Entry], column: Column) -> None:
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
    lines: list[Entry] = []
    lines_of: dict[tuple[str, ...], Entry] = {}
    for path, figures in figures_of_layers(run, phases).items():
        line = lines_of[path] = Entry(printable(path[-1]), figures, ".".join(path), path=path)
        if figures.total and index[path] in has_ops:
            line.ops = _op_lines({phase: ops[phase].get(index[path], []) for phase in ops}, ".".join(path), show_events)
        (lines if len(path) == 1 else lines_of[path[:-1]].children).append(line)
    for key, name in NO_LAYERS.items():
        costs = {phase: run.no_layer(phase, selected=key == OUTSIDE) for phase in phases}
        if any(costs.values()):
            line = Entry(name, Figures(costs, costs), is_layer=False)
            in_phases = {phase: [op for op in ops[phase].get(key, []) if op.name != LAUNCHED_BEFORE] for phase in ops}
            line.ops = _op_lines(in_phases, name, show_events)
            lines.append(line)
    if run.left_over:
        costs = {FORWARD: run.left_over}
        lines.append(Entry(LAUNCHED_BEFORE, Figures(costs, costs, left_over=True), is_layer=False))
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
    """Every layer's row with its parent and its depth, parents before children."""
    waiting: list[tuple[Entry, Entry | None, int]] = [(line, None, 0) for line in lines if line.is_layer]
    while waiting:
        line, above, depth = waiting.pop()
        yield line, above, depth
        waiting.extend((child, line, depth + 1) for child in line.children)


def keep_top(lines: Sequence[Entry], column: Column, top: int, depth: int | None) -> str:
    """Show only the layers with the largest self of a column, and the layers above them. Returns a sentence that says
    so.

    Layers below ``depth`` are hidden; a layer at ``depth`` is ranked by its total, because it stands for all below it.
    """
    by_self, by_total = column.ranking.of, column.with_below.of
    layers, seen = [*_layers(lines)], []
    for line, above, level in layers:
        line.shown = False
        if depth is None or level <= depth:
            size = by_total if level == depth and line.children else by_self
            seen.append((line, above, size(line.figures)))
    known = [(size, line) for line, _, size in seen if line.figures.total and not line.figures.unknown]
    kept = {id(line) for _, line in sorted(known, key=lambda item: -item[0])[:top]}
    for line, above, _ in reversed(seen):
        line.shown = id(line) in kept
        if line.shown and above is not None:
            kept.add(id(above))
    hidden = sum(not line.shown for line, _, _ in layers)
    by = column.heading if column.ranking == column else f"self of {column.heading}"
    if any(level == depth and line.children for line, _, level in layers):
        by += f", at depth {depth} with all below"
    return f"{rows_hidden(hidden, top, 'largest')} by {by}, with the layers above."


def rows_of_table(
    lines: Sequence[Entry], columns: Sequence[Column], depth: int | None, wholes: Sequence[float | None] = ()
) -> list[TableRow]:
    """The rows of a table: those that are shown, down to a depth. ``wholes``: see ``Column.text``; () for none."""

    def below(line: Entry, level: int) -> list[Entry]:
        deeper = depth is None or level < depth
        return [*line.ops, *(child for child in line.children if deeper and child.shown)]

    return [
        TableRow(
            [line.cell(), *(column.text(line.figures, whole) for column, whole in zip_longest(columns, wholes))],
            lead,
            line.hot,
            is_part=not line.figures.left_over,
        )
        for lead, line in branches([line for line in lines if line.shown], below)
    ]


def all_entries(lines: Sequence[Entry]) -> Iterator[Entry]:
    """All rows except those of operators and ranges."""
    waiting = list(lines)
    while waiting:
        line = waiting.pop()
        yield line
        waiting.extend(line.children)
