"""A table of lines, the largest first: what the reports of operators, kernels and layers of an operator share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchprof.analyze.figures import Figures
from torchprof.analyze.operators import Operator, Sums
from torchprof.reports.columns import CallsColumn, Column, CostColumn, column_called, columns_of
from torchprof.reports.notes import about_sums, warnings_of
from torchprof.reports.text import check_number, draw, printable
from torchprof.run.cost import Bound, Cost, Figure, Unit, format_time
from torchprof.run.lockstep import range_in_words
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

CALLS = "Calls"
_PHASES = "the phases asked for"  # their sum, as a key of ``Figures``

# What torch's own tables call our columns; "cpu" stands for a kind of device, too.
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
class Line(Figures):
    """A line of the table: what stands under the headings of its texts, in one line or several, and its figures."""

    texts: Mapping[str, Sequence[str]] = field(default_factory=dict)
    is_part: bool = False  # of ops around it, whose MACs and FLOPs count for it, too


@dataclass(frozen=True)
class TextColumn(Column):
    """A column of names. A table is sorted by it from A to Z."""


@dataclass(frozen=True)
class SumColumn(CostColumn):
    """One measure, self or total, in all phases asked for: blank where MACs and FLOPs stand with an op around it."""

    phase: str = _PHASES

    def figure(self, figures: Figures) -> Figure:
        if isinstance(figures, Line) and figures.is_part and self.measure.unit is Unit.COUNT and not self.of(figures):
            return Figure(0, Bound.BLANK)
        return super().figure(figures)


@dataclass(frozen=True)
class AverageColumn(Column):
    """The total time of another column, for one call."""

    total: Column = field(default_factory=lambda: Column(""))

    def of(self, figures: Figures) -> float:
        return self.total.of(figures) / figures.calls if figures.calls > 0 else 0

    def figure(self, figures: Figures) -> Figure:
        if figures.calls <= 0:
            return Figure(0, Bound.BLANK)
        return Figure(self.of(figures), Bound.EXACT if self.measured else Bound.UNKNOWN)

    def write(self, value: float) -> str:
        return format_time(value)


def line_of(texts: Mapping[str, Sequence[str]], sums: Sums, *, left_over: bool = False) -> Line:
    """A line with these figures; what nobody calls has a blank for its calls, and what is left over no share."""
    return Line(
        {_PHASES: sums.self},
        {_PHASES: sums.total},
        sums.calls or -1,
        left_over=left_over,
        texts=texts,
        is_part=0 < sums.calls == sums.parts,
    )


def figure_columns(run: Run) -> list[Column]:
    """Self, total and average of the times that a run holds, memory, MACs and FLOPs, and calls."""
    columns: list[Column] = []
    for column in columns_of(run):
        if isinstance(column, CostColumn) and column.phase == FORWARD:
            columns.append(SumColumn(column.heading, column.measured, measure=column.measure, is_self=column.is_self))
            if column.measure.unit is Unit.TIME and not column.is_self:
                heading = f"{column.heading.removesuffix(' total')} avg"
                columns.append(AverageColumn(heading, column.measured, columns[-1]))
    return [*columns, CallsColumn(CALLS)]


def largest_by(columns: Sequence[Column], *, of_self: bool) -> Column:
    """The column whose largest stand first where nobody says: time of the device, else of the CPU, else the first."""
    times = [
        column
        for column in columns
        if isinstance(column, CostColumn) and column.measure.unit is Unit.TIME and column.measured
        if column.is_self == of_self
    ]
    return [*reversed(times), *columns][0]


def shares_of(columns: Sequence[Column], own: Cost, total: Cost) -> dict[Column, float]:
    """What 100 % is in each column of times: of those of self ``own``, of those of totals ``total``."""
    return {
        column: column.measure.of(own if column.is_self else total)
        for column in columns
        if isinstance(column, CostColumn) and column.measure.unit is Unit.TIME
    }


def said(what: str, wholes: Mapping[Column, float]) -> list[str]:
    """A sentence that tells what 100 % is, in every column of which it is anything."""
    columns: dict[float, str] = {}
    for column, ns in wholes.items():
        if ns:
            columns.setdefault(ns, f"{format_time(ns)} {column.heading}")  # of self and total alike it is told once
    return [f"100 % is {what}: {', '.join(columns.values())}."] if columns else []


def ranked(
    run: Run,
    texts: Sequence[str],
    lines: Sequence[Line],
    columns: Sequence[Column],
    usual: Column,
    *,
    wholes: Mapping[Column, float],
    more_texts: Sequence[str] = (),
    notes: Sequence[str] = (),
    sort_by: str | None = None,
    row_limit: int | None = None,
    tablefmt: str | None = None,
) -> str:
    """The lines as a table; under it the notes, how many rows are hidden, and the run's doubts.

    ``texts`` are the headings of what stands left of the figures, ``more_texts`` right of them. Lines are in the order
    of the column called ``sort_by``: figures from the largest, texts from A to Z; by ``usual`` where that is None.
    ``wholes``: what is 100 % in a column, where shares are shown.

    Raises TorchprofError for an unknown column or format and for a negative number.
    """
    check_number("row_limit", row_limit, "rows")
    every = [*map(TextColumn, texts), *columns, *map(TextColumn, more_texts)]
    order = usual if sort_by is None else column_called(_our_name(sort_by, every, run), every)
    if isinstance(order, TextColumn):
        lines = sorted(lines, key=lambda line: list(line.texts[order.heading]))
    else:
        lines = sorted(lines, key=lambda line: -order.of(line))
    shown = lines[:row_limit]
    table = [row for line in shown for row in _rows(line, every, wholes)]
    text = draw([column.heading for column in every], table, tablefmt)
    hidden = [_hidden(len(lines), len(shown), order)] if len(shown) < len(lines) else []
    below = [*notes, *hidden, *about_sums(run), *warnings_of(run)]
    return "\n".join([text, *([""] if below else []), *below])


def _hidden(all_lines: int, shown: int, order: Column) -> str:
    """How many rows are hidden, and what the others are."""
    hidden = all_lines - shown
    rows = "1 row is" if hidden == 1 else f"{hidden} rows are"
    which = "first" if isinstance(order, TextColumn) else "largest"
    those = f"is the {which}" if shown == 1 else f"are the {shown} {which}"
    return f"{rows} hidden: shown {those} by {order.heading}."


def _rows(line: Line, columns: Sequence[Column], wholes: Mapping[Column, float]) -> Iterable[list[str]]:
    """A line as rows of cells: more than one where a text has more than one line."""
    cells = [
        list(line.texts[column.heading]) if isinstance(column, TextColumn) else [column.text(line, wholes.get(column))]
        for column in columns
    ]
    for number in range(max(1, *map(len, cells))):
        yield [cell[number] if number < len(cell) else "" for cell in cells]


def _our_name(name: str, columns: Sequence[Column], run: Run) -> str:
    """The name by which we know a column that torch's tables call by another; any other name as it is."""
    device = run.meta.device or "device"
    known = dict(_TORCHS_NAMES)
    for torchs, ours in _TORCHS_NAMES.items():
        for kind in ("device", device):
            known[torchs.replace("cpu", kind)] = ours.replace("cpu", device)
    ours = known.get(str(name), name)
    return ours if any(column.key == ours for column in columns) else name


def operator_name(operator: Operator) -> str:
    """As rows show it: a long name shortened, a range marked."""
    name = shortened(operator.name)
    return range_in_words(operator.kind, name)


def shortened(name: str, width: int = _WIDTH) -> str:
    """A long name with its middle left out; what cannot be printed is written out."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"
