"""The layers by class ("types"), and by the pattern of their paths ("patterns")."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from torchprof.analyze.columns import Column
from torchprof.analyze.groups import Group, by_class, by_pattern
from torchprof.analyze.operators import check_phase
from torchprof.analyze.report import Section
from torchprof.reports import report
from torchprof.reports.ranking import (
    SUM_OF_PHASES,
    TableLine,
    about_wholes,
    figure_columns,
    largest_by,
    line_of_figures,
    ranked,
    shares_of,
)
from torchprof.reports.text import printable
from torchprof.run.cost import Bound, Cost, format_number
from torchprof.run.run import Run

_SPREAD = ("Smallest", "Median", "Largest", "Largest layer")


@report("types", "all layers of a class together: Linear, BatchNorm2d, …", answers="time")
def types(
    run: Run,
    *,
    sort_by: str | None = None,
    row_limit: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> Section:
    """A row for each class of layers: all ``BatchNorm2d`` together, the largest first.

    *Self* adds up over all layers of the class, so the rows add up to the whole model. *Total* has the layers below,
    too; a layer inside another one of its class counts once. Shares are of all layers. A layer that was never called
    adds nothing.

    ``phase`` is "forward", "backward" or "recompute"; None adds them up. ``sort_by``: any column, by its heading or as
    ``self_cpu_total``; the default is self time, of the device if it was measured. ``row_limit``: the number of rows.
    ``tablefmt``: any of tabulate's formats.

    Raises TorchprofError for an unknown phase, column or format, and for a negative number.
    """
    groups = by_class(run)
    texts: list[dict[str, Sequence[str]]] = [
        {"Type": [printable(one.kind)], "Layers": [format_number(len(one.members))]} for one in groups
    ]
    return _table(run, groups, texts, sort_by, row_limit, phase, tablefmt)


@report("patterns", "the same layer of every block together, with its spread: layers.*.mlp", answers="time")
def patterns(
    run: Run,
    *,
    sort_by: str | None = None,
    row_limit: int | None = 20,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> Section:
    """A row for the same layer of every block: ``Net.layers.*.mlp`` for ``Net.layers.0.mlp``, ``Net.layers.1.mlp``, …

    Layers are one row if their paths differ in numbers alone, and their class, its settings and the types of their
    parameters are equal. In addition to the sums there are the smallest, the median and the largest of the layers in
    the column that sorts the table, and which layer is the largest. Options and errors are those of "types".
    """
    groups = by_pattern(run)
    texts: list[dict[str, Sequence[str]]] = [
        {"Pattern": [printable(one.name)], "Type": [printable(one.kind)], "Layers": [format_number(len(one.members))]}
        for one in groups
    ]
    return _table(run, groups, texts, sort_by, row_limit, phase, tablefmt, spread=True)


def _table(
    run: Run,
    groups: Sequence[Group],
    texts: Sequence[Mapping[str, Sequence[str]]],
    sort_by: str | None,
    row_limit: int | None,
    phase: str | None,
    tablefmt: str | None,
    *,
    spread: bool = False,
) -> Section:
    check_phase(phase)
    phases = run.phases() if phase is None else [phase]
    columns = figure_columns(run)
    order = largest_by(columns, of_self=True)
    if sort_by is not None and spread:
        order = next((column for column in columns if column.is_called(sort_by)), order)
    lines = []
    for group, text in zip(groups, texts):
        members = {path: line_of_figures({}, one, phases) for path, one in group.members.items()}
        more = _spread(members, order) if spread else {}
        lines.append(line_of_figures({**text, **more}, group.figures, phases))
    own = sum((line.cost(SUM_OF_PHASES, is_self=True) for line in lines), Cost())
    wholes = shares_of(columns, own, own)
    return ranked(
        run,
        [*texts[0]] if texts else ["Type"],
        lines,
        columns,
        order,
        wholes=wholes,
        more_texts=_SPREAD if spread else (),
        notes=about_wholes("what all layers took", wholes),
        sort_by=sort_by,
        row_limit=row_limit,
        tablefmt=tablefmt,
    )


def _spread(members: Mapping[tuple[str, ...], TableLine], order: Column) -> dict[str, Sequence[str]]:
    """What the members of a group have in one column; blank for a single one."""
    figures = {path: order.figure(line) for path, line in members.items()}
    exact = {path: figure.value for path, figure in figures.items() if figure.bound is Bound.EXACT}
    if len(exact) < 2:
        return {heading: [""] for heading in _SPREAD}
    largest = max(exact, key=exact.__getitem__)
    values = [min(exact.values()), median(exact.values()), exact[largest]]
    return dict(zip(_SPREAD, [*([order.write(_plain(value))] for value in values), [printable(".".join(largest))]]))


def _plain(value: float) -> float:
    """A whole number as an integer: the median of two calls is 2, not 2.0."""
    return int(value) if value == int(value) else value
