"""The rows of tables of layers, as trees, and what reports do with them: each is a function on the list of the topmost
rows. A report makes its rows, calls those that its options ask for, and ``table_rows`` makes the table's rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures, figures_of_layers
from torchprof.analyze.report import TableRow, branches, printable, rows_hidden
from torchprof.run.formats import Cell, ReportCell
from torchprof.run.measures import NO_COST, Cost, sum_of_costs
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
    hot: bool = False
    path: tuple[str, ...] = ()
    parts: tuple[Entry, ...] = ()
    hidden: int = 0

    def cell(self, text: str = "") -> Cell:
        """The cell with the name, or with another text for it."""
        return ReportCell(text or self.name, self.id, ids=self.ids) if self.id else text or self.name

    @property
    def below(self) -> list[Entry]:
        """The rows directly below this one: operators, labels and regions, then layers."""
        return [*self.ops, *self.children]


def all_entries(lines: Sequence[Entry]) -> Iterator[Entry]:
    """All rows except those of operators and ranges, depth first."""
    waiting = [*reversed(lines)]
    while waiting:
        line = waiting.pop()
        yield line
        waiting.extend(reversed(line.children))


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


def down_to(lines: Sequence[Entry], depth: int | None) -> None:
    """Hide the layers below a depth: at 0, those below the models. None hides nothing."""
    level = lines if depth is not None else ()
    while depth and level:
        level = [child for line in level for child in line.children]
        depth -= 1
    for line in level:
        line.hidden, line.children = sum(1 for _ in all_entries(line.children)), []


def keep_top(lines: list[Entry], column: Column, top: int) -> str:
    """Hide all layers but those with the largest self of a column, and the layers above them. Returns a sentence that
    says so. A layer with hidden layers below it is ranked by its total, because it stands for them."""
    by_self, by_total = column.ranking.of, column.with_below.of
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
    by = column.heading if column.ranking == column else f"self of {column.heading}"
    if any(line.hidden for line in layers):
        depth = next(len(line.path) for line in layers if line.hidden) - 1
        by += f", at depth {depth} with all below"
    return f"{rows_hidden(hidden, top, 'largest')} by {by}, with the layers above."


def table_rows(lines: Sequence[Entry], cells: Callable[[Entry], Iterable[Cell]]) -> list[TableRow]:
    """The rows of a table. ``cells``: those after the name."""
    return [
        TableRow([line.cell(), *cells(line)], lead, line.hot, is_part=not line.figures.left_over)
        for lead, line in branches(lines, lambda line: line.below)
    ]


# Layers added up: all of one class, and all with one pattern of their path, as the same layer of every block.

UNKNOWN_CLASS = "(unknown)"
_Path = tuple[str, ...]


class Group(NamedTuple):
    """Layers that are shown as one.

    ``name``: the class, or the pattern. ``kind``: the class, ``UNKNOWN_CLASS`` for layers of a trace without a model.
    ``figures``: their sum. Self costs add up; a total counts a layer only if no other of the group is above it.
    ``members``: the figures of each layer by its path, in the order of the model.
    """

    name: str
    kind: str
    figures: Figures
    members: Mapping[_Path, Figures]


def by_class(run: Run) -> list[Group]:
    """A group for each class of layers."""
    groups = _grouped(run, [layer.kind for layer in run.layers])
    return [Group(kind, kind, summed_figures([*members.values()], [*members]), members) for kind, members in groups]


def pattern_of(paths: Sequence[_Path]) -> str:
    """The dotted path that fits all of these, which are equally long: ``*`` for a step in which they differ."""
    return ".".join(steps[0] if len(set(steps)) == 1 else "*" for steps in zip(*paths))


def _grouped(run: Run, keys: Sequence[Hashable]) -> list[tuple[str, dict[_Path, Figures]]]:
    """The class and the members of each group, in the order of the model. ``keys``: of each layer."""
    groups: dict[Hashable, dict[_Path, Figures]] = {}
    for path, figures in figures_of_layers(run, run.phases()).items():
        if figures.total:  # blank for layers that were not selected
            groups.setdefault(keys[run.layers.index_of[path]], {})[path] = figures
    kinds = {layer.path: layer.kind or UNKNOWN_CLASS for layer in run.layers}
    return [(kinds[next(iter(members))], members) for members in groups.values()]


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
    return Figures(
        own=_added(figures.own for figures in called) or dict.fromkeys(phases, NO_COST),
        total=_added(figures.total for figures in ran) or dict.fromkeys(phases, NO_COST),
        calls=sum(calls) if calls else -1,
        params=_sum([figures.params for figures in outermost]),
        own_params=_sum([figures.own_params for figures in members]),
        has_params=any(figures.has_params for figures in members),
        unknown=not called,
        inlined=any(figures.inlined for figures in members),
        incomplete=phases if may_have_run else _union(figures.incomplete for figures in ran),
        incomplete_self=phases if may_have_run else _union(figures.incomplete_self for figures in called),
    )


def _outermost(members: Sequence[Figures], paths: Sequence[_Path]) -> list[Figures]:
    """Without those that have another one above them."""
    known = {*paths}
    nested = [any(path[:steps] in known for steps in range(1, len(path))) for path in paths]
    return [figures for figures, is_nested in zip_longest(members, nested) if not is_nested]


def _sum(numbers: Sequence[int | None]) -> int | None:
    """Unknown if any of them is."""
    known = [number for number in numbers if number is not None]
    return sum(known) if len(known) == len(numbers) else None


def _added(costs: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    by_phase: dict[str, list[Cost]] = {}
    for by_part in costs:
        for phase, cost in by_part.items():
            by_phase.setdefault(phase, []).append(cost)
    return {phase: sum_of_costs(of_phase) for phase, of_phase in by_phase.items()}


def _union(sets: Iterable[Set[str]]) -> Set[str]:
    return frozenset[str]().union(*sets)
