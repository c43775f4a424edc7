"""Tables of layers as trees. ``Entry`` is a row with the rows below it.

A report makes a list of the topmost rows, with ``entries_of`` or ``entries_by_path``. Its options choose which of
``sort_entries``, ``mark_hot``, ``down_to`` and ``keep_top`` change the list. ``table_rows`` makes a table of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures, figures_of_layers, figures_of_no_layer
from torchprof.analyze.report import HOT, TableRow, branches, rows_hidden
from torchprof.errors import printable
from torchprof.run.formats import Cell, ReportCell
from torchprof.run.measures import Cost
from torchprof.run.operators import Op, operators_of_layers, rows_in_ranges
from torchprof.run.run import Run
from torchprof.run.words import BETWEEN_OPS, FORWARD, LAUNCHED_BEFORE, RANGES, FrameKind, is_overhead, range_in_words


@dataclass
class Entry:
    """A row of the table with the rows below it.

    - ``id``: the name as files write it, "" if it is ``name``; ``ids``: see ``ReportCell``.
    - ``children``: the rows of the layers below it; ``ops``: those of the labels, regions and operators in it.
    - ``is_layer``: False for operators and for work of no layer. ``hot``: it is a layer on the hottest path.
    - ``path``: the path of the layer, () for other rows.
    - ``parts``: the rows that this one stands for, if it is the sum of several.
    - ``hidden``: how many layers it stands for, or has below it, that have no row of their own.
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


def all_entries(entries: Sequence[Entry]) -> Iterator[Entry]:
    """All rows except those of operators and ranges, depth first."""
    return (entry for _, entry in branches(entries, lambda entry: entry.children))


# The rows of a run


def entries_of(run: Run, show_events: bool = False, phases: Sequence[str] | None = None) -> list[Entry]:
    """The rows of the models and of work of no layer, with all rows below them. ``phases``: the phases with figures;
    None: all phases of the run. ``show_events``: with rows of operators."""
    phases = run.phases() if phases is None else phases
    rows = run.rows if show_events else rows_in_ranges(run.rows)
    ops_of = {phase: operators_of_layers(rows, phase) for phase in phases}
    has_ops = {layer for by_layer in ops_of.values() for layer in by_layer}
    by_path = entries_by_path(figures_of_layers(run, phases))
    for path, entry in by_path.items():
        layer = run.layers.index_of[path]
        if entry.figures.total and layer in has_ops:
            ops = {phase: ops_of[phase].get(layer, []) for phase in phases}
            entry.ops = _ops_below(ops, entry.id, show_events)
    models = [entry for path, entry in by_path.items() if len(path) == 1]
    outside = []
    for key, name, figures in figures_of_no_layer(run, phases):
        outside.append(Entry(name, figures, is_layer=False))
        if not figures.left_over:
            ops = {phase: [op for op in ops_of[phase].get(key, []) if op.name != LAUNCHED_BEFORE] for phase in phases}
            outside[-1].ops = _ops_below(ops, name, show_events)
    return models + outside


def entries_by_path(figures: Mapping[tuple[str, ...], Figures]) -> dict[tuple[str, ...], Entry]:
    """A row for each layer, by path; each is among the children of the layer above it. ``figures``: of all layers,
    parents first."""
    entries: dict[tuple[str, ...], Entry] = {}
    for path, figures_of_layer in figures.items():
        entries[path] = Entry(printable(path[-1]), figures_of_layer, ".".join(path), path=path)
        if len(path) > 1:
            entries[path[:-1]].children.append(entries[path])
    return entries


def _ops_below(ops: Mapping[str, Sequence[Op]], layer: str, show_events: bool) -> list[Entry]:
    """The rows of the labels, compiled regions and kernels directly in a layer or in a range, and with ``show_events``
    of operators.

    A label has one row for all phases, and so has a region; an operator has one for each phase. ``ops``: by phase.
    ``layer``: the path of the layer, or ``(outside)``.
    """
    top: list[Entry] = []
    waiting = [(ops, top)]
    while waiting:
        ops, entries = waiting.pop()
        ranges: dict[tuple[str, str], tuple[Entry, dict[str, Op]]] = {}  # the row of each range, and the range by phase
        for phase, of_phase in ops.items():
            for op in sorted(of_phase, key=lambda op: op.name == BETWEEN_OPS):
                if op.kind not in RANGES:
                    if show_events:
                        entries.append(_operator_entry(op, phase, layer))
                    continue
                if (op.kind, op.name) not in ranges:
                    entries.append(_range_entry(op, phase, layer))
                    ranges[op.kind, op.name] = entries[-1], {}
                ranges[op.kind, op.name][1][phase] = op
        for entry, by_phase in ranges.values():
            entry.figures.own = {phase: _own_of_range(op) for phase, op in by_phase.items()}
            entry.figures.total = {phase: op.total for phase, op in by_phase.items()}
            if not any(op.kind == FrameKind.KERNELS for op in by_phase.values()):  # a group of kernels has no calls
                entry.figures.calls = next((op.calls for op in by_phase.values() if op.calls), 0)
            waiting.append(({phase: op.inside for phase, op in by_phase.items()}, entry.ops))
    return top


def _operator_entry(op: Op, phase: str, layer: str) -> Entry:
    figures = Figures({phase: op.self}, {phase: op.total}, -1 if op.name == BETWEEN_OPS else op.calls)
    name = printable(op.name) + (f" ({phase})" if phase != FORWARD else "")
    ids = {"layer": layer, "kind": op.kind, "phase": phase}
    return Entry(name, figures, op.name, ids, is_layer=False)


def _range_entry(op: Op, phase: str, layer: str) -> Entry:
    """The row of a range, still without figures. ``phase``: the first in which it ran."""
    name = range_in_words(op.kind, op.name)
    if op.kind == FrameKind.LABEL and phase != FORWARD:
        name = f"{op.name} (label, {phase})"
    return Entry(printable(name), Figures(), op.name, {"layer": layer, "kind": op.kind}, is_layer=False)


def _own_of_range(op: Op) -> Cost:
    """The self of a range's row. That of a region includes its overhead; that of a group of kernels is its total."""
    if op.kind == FrameKind.KERNELS:
        return op.total
    overhead = [inner.self for inner in op.inside if op.kind == FrameKind.REGION and is_overhead(inner.name)]
    return sum(overhead, op.self)


# What options of reports do with rows


def sort_entries(entries: list[Entry], column: Column) -> None:
    """Sort siblings by a column, largest first, on all levels. Work of no layer stays last."""
    entries.sort(key=lambda entry: (not entry.is_layer, -column.sort_key(entry.figures) if entry.is_layer else 0))
    for entry in [*all_entries(entries)]:
        entry.children.sort(key=lambda child: -column.sort_key(child.figures))
        for _, op in [*branches([entry], lambda row: row.ops)]:
            op.ops.sort(key=lambda inner: -column.sort_key(inner.figures))


def mark_hot(entries: Sequence[Entry], column: Column) -> list[str]:
    """Mark the hottest path: from the largest model down, the child with the largest total, until a layer's self is at
    least as large as the total of its largest child. Returns a sentence about the mark, if there is a path."""
    self_of, total_of = column.ranking.sort_key, column.sort_key
    about_mark: list[str] = []
    self_above = 0.0
    while entries := [entry for entry in entries if entry.is_layer]:
        hottest = max(entries, key=lambda entry: total_of(entry.figures))
        if total_of(hottest.figures) <= self_above:
            break
        hottest.hot = True
        about_mark = [f"{HOT} marks the hottest path by {column.heading}: each time into the largest layer."]
        self_above, entries = max(0, self_of(hottest.figures)), hottest.children
    return about_mark


def down_to(entries: Sequence[Entry], depth: int | None) -> None:
    """Hide the layers below a depth: at 0, those below the models. None hides nothing."""
    level = entries if depth is not None else ()
    while depth and level:
        level = [child for entry in level for child in entry.children]
        depth -= 1
    for entry in level:
        entry.hidden, entry.children = sum(1 for _ in all_entries(entry.children)), []


def keep_top(entries: list[Entry], column: Column, top: int) -> list[str]:
    """Hide all layers but those with the largest self of a column, and the layers above them. Returns a sentence about
    what is hidden, if anything is.

    A layer with hidden layers below it is ranked by its total, because it stands for them.
    """
    self_of, total_of = column.ranking.sort_key, replace(column, is_self=False).sort_key
    layers = [entry for entry in all_entries(entries) if entry.is_layer]
    ranked = [entry for entry in layers if entry.figures.total and not entry.figures.unknown]
    ranked.sort(key=lambda entry: -(total_of if entry.hidden else self_of)(entry.figures))
    kept = {id(entry) for entry in ranked[:top]}
    for entry in reversed(layers):  # children before the rows above them
        entry.children = [child for child in entry.children if id(child) in kept]
        if entry.children:
            kept.add(id(entry))
    entries[:] = [entry for entry in entries if not entry.is_layer or id(entry) in kept]
    hidden = len(layers) - len(kept) + sum(entry.hidden for entry in layers)
    if not hidden:
        return []
    by = column.heading if column.ranking == column else f"self of {column.heading}"
    if any(entry.hidden for entry in layers):
        depth = next(len(entry.path) for entry in layers if entry.hidden) - 1
        by += f", at depth {depth} with all below"
    return [f"{rows_hidden(hidden, top, 'largest')} by {by}, with the layers above."]


def fitting_depth(run: Run, limit: int) -> int:
    """The deepest ``depth`` with which a table has at most ``limit`` layers; 0 if the models alone are more."""
    fitting, layers = 0, 0
    for length, count in sorted(Counter(len(layer.path) for layer in run.layers).items()):  # of paths
        layers += count
        if layers <= limit:
            fitting = length - 1
    return fitting


def table_rows(entries: Sequence[Entry], cells: Callable[[Entry], Iterable[Cell]]) -> list[TableRow]:
    """The rows of a table. ``cells``: those after the name."""
    return [
        TableRow([entry.cell(), *cells(entry)], lead, entry.hot, is_part=not entry.figures.left_over)
        for lead, entry in branches(entries, lambda entry: entry.below)
    ]
