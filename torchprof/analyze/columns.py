"""The catalogue of columns of a run, with heading, unit, order and sort key.

The table, the page, the exported records, the comparison of two runs and the options of the command line all read it.
The fields of ``Cost``, and their format, are declared in ``run/cost.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field, replace

from torchprof.analyze.figures import Figures, measured_by_all
from torchprof.errors import TorchprofError, suggest
from torchprof.run.cost import (
    MEASURES,
    Bound,
    Cell,
    Figure,
    Measure,
    ReportCell,
    Unit,
    as_key,
    format_count,
    format_number,
    format_rate,
)
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

CALLS = "Number of Calls"


@dataclass(frozen=True)
class Column:
    """A column of figures. ``measured`` is False if it was requested but could not be measured."""

    heading: str
    measured: bool = True

    @property
    def key(self) -> str:
        """The name of this column as a sort key."""
        return as_key(self.heading)

    @property
    def unit(self) -> Unit:
        """The unit of its figures."""
        return Unit.COUNT

    @property
    def fields(self) -> Set[str]:
        """The fields of ``Cost`` that the column is computed from."""
        return frozenset()

    @property
    def ranking(self) -> Column:
        """The column that ranks layers by their self, without the layers below."""
        return self

    @property
    def with_below(self) -> Column:
        """The column that ranks layers with all layers below included."""
        return self

    def is_called(self, name: str) -> bool:
        """Whether a user's ``name`` means this column: its heading, or the heading in lower case with underscores."""
        return name in (self.heading, as_key(self.heading), self.key)

    def of(self, figures: Figures) -> float:
        """The sort key: the figure of a row, 0 if it has none."""
        raise NotImplementedError

    def whole(self, figures: Iterable[Figures]) -> float | None:
        """The value that is 100 %, from all rows; None if shares of this column have no meaning."""
        return None

    def figure(self, figures: Figures) -> Figure:
        """The figure of a row: exact, a lower bound, unknown or blank."""
        raise NotImplementedError

    def write(self, value: float) -> ReportCell:
        """A figure as text, with its unit."""
        return format_count(value)

    def text(self, figures: Figures, whole: float | None) -> Cell:
        """The text of a cell; with its share of ``whole`` if that is given."""
        return self.figure(figures).text(self.write)


@dataclass(frozen=True)
class SelfOrTotalColumn(Column):
    """A column of the layers' self, or of their totals."""

    is_self: bool = field(default=False, kw_only=True)

    @property
    def ranking(self) -> Column:
        return replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)


@dataclass(frozen=True)
class CostColumn(SelfOrTotalColumn):
    """One measure in one phase, self or total."""

    phase: str = FORWARD
    measure: Measure = MEASURES[0]

    @property
    def unit(self) -> Unit:
        return self.measure.unit

    @property
    def fields(self) -> Set[str]:
        return {name for name, _ in self.measure.fields}

    def of(self, figures: Figures) -> float:
        return self.measure.of(figures.cost(self.phase, self.is_self))

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(self.measure.of(row.cost(self.phase, is_self=True)) for row in figures if not row.left_over)

    def figure(self, figures: Figures) -> Figure:
        return figures.measure(self.measure, self.phase, self.is_self, self.measured)

    def write(self, value: float) -> ReportCell:
        return self.measure.text(value)

    def text(self, figures: Figures, whole: float | None) -> Cell:
        figure = self.figure(figures)
        has_share = self.unit is Unit.TIME and figure.bound is Bound.EXACT and not figures.left_over
        text = figure.text(self.write)
        if whole and has_share and isinstance(text, ReportCell):
            return text.written(f"{text} ({figure.value / whole:.1%})")
        return text


@dataclass(frozen=True)
class RateColumn(Column):
    """FLOP/s: per second of device time if that was measured, else of CPU time."""

    phase: str = FORWARD
    on_device: bool = False

    @property
    def fields(self) -> Set[str]:
        return {"flops", "device_ns" if self.on_device else "cpu_ns"}

    def of(self, figures: Figures) -> float:
        return self.figure(figures).value

    def figure(self, figures: Figures) -> Figure:
        return figures.rate(self.phase, self.on_device, self.measured)

    def write(self, value: float) -> ReportCell:
        return format_rate(value)


@dataclass(frozen=True)
class CallsColumn(Column):
    """The number of calls of the layer's forward, or of the operator."""

    @property
    def key(self) -> str:
        return "calls"

    def of(self, figures: Figures) -> float:
        return figures.calls

    def figure(self, figures: Figures) -> Figure:
        return figures.number_of_calls()

    def write(self, value: float) -> ReportCell:
        return format_number(int(value))


@dataclass(frozen=True)
class ParamsColumn(SelfOrTotalColumn):
    """The parameters of the layer and all below it, each counted at the first layer that holds it."""

    def of(self, figures: Figures) -> float:
        return (figures.own_params if self.is_self else figures.params) or 0

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(row.own_params or 0 for row in figures)

    def figure(self, figures: Figures) -> Figure:
        return figures.parameters()


@dataclass(frozen=True)
class PeakColumn(Column):
    """The memory peak inside one call, on the CPU or on another device. It is not additive and not part of ``Figures``:
    only the comparison of two runs shows it as a column."""

    phase: str = FORWARD
    on_cpu: bool = True

    @property
    def unit(self) -> Unit:
        return Unit.BYTES


def catalogue(phases: Iterable[str], requested: Set[str], measured: Set[str], device: str) -> Iterator[Column]:
    """Every column of runs with these phases, in the order of all views; a view selects among them.

    ``requested`` and ``measured``: fields of ``Cost``. A column that was not requested is left out; one that was
    requested but could not be measured has unknown figures. ``device``: the name of the device in headings.
    """
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        found: list[Column] = []
        if phase == FORWARD:
            found += [ParamsColumn("Self Params", is_self=True), ParamsColumn("Params")]
        for measure in MEASURES:
            heading = measure.heading.format(device=device)
            found.append(CostColumn(f"{lead}Self {heading}", True, phase, measure, is_self=True))
            found.append(CostColumn(f"{lead}{heading}", True, phase, measure))
        if "cpu_ns" in requested:
            found.append(RateColumn(f"{lead}FLOP/s", True, phase, "device_ns" in requested))
        found += [PeakColumn(f"{lead}CPU Peak", True, phase), PeakColumn(f"{lead}{device} Peak", True, phase, False)]
        if phase == FORWARD:
            found.append(CallsColumn(CALLS))
        for column in found:
            if column.fields <= requested:
                yield as_measured(column, measured)


def as_measured(column: Column, measured: Set[str]) -> Column:
    """The same column for a run that measured these fields of ``Cost``."""
    return replace(column, measured=column.fields <= measured)


def columns_of(run: Run, show_events: bool = False) -> list[Column]:
    """The columns of a run's table: forward first, then calls, then the other phases.

    Self columns of backward and recompute are shown only with operators (``show_events``), self columns of counts
    never: the self of a layer is its total minus those of its children.
    """
    requested = frozenset(run.meta.requested)
    device = run.meta.device_heading

    def is_shown(column: Column) -> bool:
        if isinstance(column, ParamsColumn):
            return "flops" in requested and not column.is_self
        if isinstance(column, CostColumn) and column.is_self:
            return column.unit is not Unit.COUNT and (column.phase == FORWARD or show_events)
        return not isinstance(column, PeakColumn)

    return [*filter(is_shown, catalogue(run.phases(), requested, measured_by_all(run), device))]


def measures_of_records(run: Run) -> list[Measure]:
    """The measures in records: each field of ``Cost`` that any rank requested, and net memory (allocated minus freed).

    A heading is the name of a column without its "self\\_" or "total\\_", and ends in a unit: ``cpu_ns``.
    """
    requested = {name for meta in run.metas for name in meta.requested}
    found = []
    counters = {}
    for measure in MEASURES:
        fields = [(name, sign) for name, sign in measure.fields if name in requested]
        found += [
            Measure(_with_unit(name, measure), measure.unit, ((name, 1),), measure.lower_bound_if) for name, _ in fields
        ]
        if len(fields) > 1:
            where, _, _ = fields[0][0].partition("_")
            found.append(Measure(_with_unit(f"{where}_net", measure), measure.unit, tuple(fields)))
        if fields and measure.lower_bound_if is not None:
            counters[measure.lower_bound_if] = Measure(
                measure.lower_bound_if, Unit.COUNT, ((measure.lower_bound_if, 1),)
            )
    return [*found, *counters.values()]


def _with_unit(name: str, measure: Measure) -> str:
    unit = measure.unit.value
    return name if measure.unit is Unit.COUNT or name.endswith(f"_{unit}") else f"{name}_{unit}"


# Choosing one column


def column_called(name: str, columns: Sequence[Column]) -> Column:
    """The column of that name. Raises TorchprofError if there is none, or if it was not measured."""
    for column in columns:
        if column.is_called(name):
            if not column.measured:
                raise TorchprofError(f"{column.heading!r} was not measured in this run: there is no order by it.")
            return column
    raise TorchprofError(f"This run has no column {name!r}. {suggest(str(name), [column.key for column in columns])}")


def default_column(columns: Sequence[Column]) -> Column:
    """The column that ranks layers by default: the first time, else FLOPs."""
    costs = [column for column in columns if isinstance(column, CostColumn) and column.phase == FORWARD]
    timed = [column for column in costs if column.unit is not Unit.COUNT]
    return [*timed[:1], *costs[-1:], *columns][0]


def hot_path_column(columns: Sequence[Column], figures: Sequence[Figures], asked: Column | None) -> Column:
    """The column of totals that the hottest path follows. Raises TorchprofError if ``asked`` has no total."""
    totals = [column for column in columns if isinstance(column, CostColumn) and not column.is_self]
    if asked is not None:
        for column in totals:
            if isinstance(asked, CostColumn) and (column.phase, column.measure) == (asked.phase, asked.measure):
                return column
        raise TorchprofError(
            f"{asked.heading!r} has no total that a hottest path could follow. Sort by one of "
            f"{', '.join(column.key for column in totals)}, or by nothing."
        )
    here = [column for column in totals if column.phase == FORWARD and column.measured]
    times = [column for column in here if column.unit is Unit.TIME]
    counts = [column for column in here if column.unit is Unit.COUNT]
    preferred = [*reversed(times), *reversed(counts)]
    return next((column for column in preferred if any(map(column.of, figures))), default_column(columns))
