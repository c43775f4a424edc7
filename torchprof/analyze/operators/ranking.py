"""A sorted table of figures: shared by the reports "ops" and "kernels"."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchprof.analyze.columns import Column, column_called, columns_of
from torchprof.analyze.figures import Figures
from torchprof.analyze.operators.operators import Operator
from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    printable,
    rows_hidden,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.run.cost import Cost
from torchprof.run.formats import Cell, ReportCell, format_time
from torchprof.run.operators import Sums
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, range_in_words

_CALLS = "Calls"
SUM_OF_PHASES = "the requested phases"
"""The key in ``Figures`` of the sum of all requested phases."""

# torch's names of columns, and ours. "cpu" may be replaced by a kind of device in both.
_TORCHS_NAMES = {
    "self_cpu_time_total": "self_cpu_total",
    "cpu_time_total": "cpu_total",
    "cpu_time": "cpu_avg",
    "self_cpu_memory_usage": "self_cpu_mem",
    "cpu_memory_usage": "cpu_mem",
    "count": "calls",
}
_WIDTH = 60


@dataclass
class TableLine(Figures):
    """A line of the table: its figures, and its texts by heading, each of one or several lines."""

    texts: Mapping[str, Sequence[Cell]] = field(default_factory=dict)


def line_of(texts: Mapping[str, Sequence[Cell]], sums: Sums, *, left_over: bool = False) -> TableLine:
    """A line with these figures; 0 calls are blank. ``left_over``: it was launched before the recording."""
    return TableLine(
        {SUM_OF_PHASES: sums.self},
        {SUM_OF_PHASES: sums.total},
        sums.calls or -1,
        left_over=left_over,
        texts=texts,
        is_part=0 < sums.calls == sums.parts,
    )


def line_of_figures(texts: Mapping[str, Sequence[Cell]], figures: Figures, phases: Sequence[str]) -> TableLine:
    """A line with the sum of the figures over these phases."""
    own, total = (sum((costs.get(phase, Cost()) for phase in phases), Cost()) for costs in (figures.own, figures.total))
    return TableLine(
        {SUM_OF_PHASES: own},
        {SUM_OF_PHASES: total},
        figures.calls,
        unknown=figures.unknown,
        inlined=figures.inlined,
        incomplete={SUM_OF_PHASES} if figures.incomplete & {*phases} else frozenset(),
        incomplete_self={SUM_OF_PHASES} if figures.incomplete_self & {*phases} else frozenset(),
        texts=texts,
    )


def figure_columns(run: Run) -> list[Column]:
    """The columns of a run: self, total and average of times; memory, MACs and FLOPs; calls."""
    columns: list[Column] = []
    for column in columns_of(run):
        if column.what == "cost" and column.phase == FORWARD:
            columns.append(replace(column, phase=SUM_OF_PHASES))
            if column.is_time and not column.is_self:
                heading = f"{column.heading.removesuffix(' total')} avg"
                columns.append(replace(columns[-1], heading=heading, what="average"))
    return [*columns, Column(_CALLS, "calls")]


def largest_by(columns: Sequence[Column], *, of_self: bool) -> Column:
    """The column of the default order: device time, else CPU time, else the first column."""
    times = [column for column in columns if column.is_time and column.measured and column.is_self == of_self]
    return [*reversed(times), *columns][0]


def shares_of(columns: Sequence[Column], own: Cost, total: Cost) -> dict[Column, float]:
    """What 100 % is in each column of times: ``own`` in columns of self, ``total`` in columns of totals."""
    return {
        column: column.measure.of(own if column.is_self else total)
        for column in columns
        if column.is_time and column.measure
    }


def about_wholes(what: str, wholes: Mapping[Column, float]) -> list[str]:
    """A sentence: what 100 % is in each column of times. ``what`` describes it."""
    columns: dict[float, str] = {}
    for column, ns in wholes.items():
        if ns:
            columns.setdefault(ns, f"{format_time(ns)} {column.heading}")  # once if self and total are the same
    return [f"100 % is {what}: {', '.join(columns.values())}."] if columns else []


def ranked(
    run: Run,
    texts: Sequence[str],
    lines: Sequence[TableLine],
    columns: Sequence[Column],
    usual: Column,
    *,
    wholes: Mapping[Column, float],
    more_texts: Sequence[str] = (),
    sentences: Sequence[str] = (),
    sort_by: str | None = None,
    top: int | None = None,
) -> Section:
    """The lines as a table; below it the sentences, how many rows are hidden, and the run's warnings.

    ``texts``: headings of the text columns left of the figures; ``more_texts``: of those right of them. The table is
    sorted by the column ``sort_by``, or by ``usual`` if that is None: figures from the largest, texts from A to Z.
    ``wholes``: what 100 % is in the columns that show shares.

    Raises TorchprofError for an unknown column.
    """
    every = [*map(Column, texts), *columns, *map(Column, more_texts)]
    order = usual if sort_by is None else column_called(_our_name(sort_by, every, run), every)
    if order.what == "text":
        lines = sorted(lines, key=lambda line: [*map(str, line.texts[order.heading])])
    else:
        lines = sorted(lines, key=lambda line: -order.of(line))
    shown = lines[:top]
    table = [row for line in shown for row in _rows(line, every, wholes)]
    text = ReportTable([column.heading for column in every], table)
    hidden = [_hidden(len(lines), len(shown), order)] if len(shown) < len(lines) else []
    below: list[Part] = [*sentences, *hidden, *about_sums(run), warnings_below(run)]
    return spaced([text, stacked(below)])


def _hidden(all_lines: int, shown: int, order: Column) -> str:
    """A sentence: how many rows are hidden, and which rows are shown."""
    which = "first" if order.what == "text" else "largest"
    return f"{rows_hidden(all_lines - shown, shown, which)} by {order.heading}."


def _rows(line: TableLine, columns: Sequence[Column], wholes: Mapping[Column, float]) -> Iterable[TableRow]:
    """A line as rows of cells: several rows if a text has several lines."""
    cells = [
        list(line.texts[column.heading]) if column.what == "text" else [column.text(line, wholes.get(column))]
        for column in columns
    ]
    yield TableRow(
        [
            ReportCell(str(cell[0]), "\n".join(map(str, cell))) if len(cell) > 1 else cell[0] if cell else ""
            for cell in cells
        ]
    )
    for number in range(1, max(1, *map(len, cells))):
        yield TableRow([cell[number] if number < len(cell) else "" for cell in cells], continues=True)


def _our_name(name: str, columns: Sequence[Column], run: Run) -> str:
    """Our name of a column for torch's name of it; any other name unchanged."""
    device = run.meta.device or "device"
    known = dict(_TORCHS_NAMES)
    for torchs, ours in _TORCHS_NAMES.items():
        for kind in ("device", device):
            known[torchs.replace("cpu", kind)] = ours.replace("cpu", device)
    ours = known.get(str(name), name)
    return ours if any(column.key == ours for column in columns) else name


def operator_name(operator: Operator) -> str:
    """The name of an operator in tables: long names shortened, ranges marked."""
    name = shortened(operator.name)
    return range_in_words(operator.kind, name)


def shortened(name: str, width: int = _WIDTH) -> str:
    """A name of at most ``width`` characters, long ones without their middle; unprintable characters as escapes."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
