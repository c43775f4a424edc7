"""The columns of tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torchprof.analyze.figures import Figures, measured_by_all
from torchprof.errors import TorchprofError, suggest
from torchprof.run.cost import MEASURES, Bound, Figure, Measure, Unit, as_key, format_count
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

CALLS = "Number of Calls"


@dataclass(frozen=True)
class Column:
    """A column of figures. ``measured`` is False where they were asked for and could not be had."""

    heading: str
    measured: bool = True

    @property
    def key(self) -> str:
        """The name by which a table is sorted by this column."""
        return as_key(self.heading)

    @property
    def ranking(self) -> Column:
        """The column that tells which layers are the largest by themselves."""
        return self

    @property
    def with_below(self) -> Column:
        """The column that tells which layers are the largest, those below them included."""
        return self

    def is_called(self, name: str) -> bool:
        """Whether a user means this column: by its heading, or that in lower case with underscores."""
        return name in (self.heading, as_key(self.heading), self.key)

    def of(self, figures: Figures) -> float:
        """The figure of a row, 0 where it has none; what rows are sorted by."""
        raise NotImplementedError

    def whole(self, figures: Iterable[Figures]) -> float | None:
        """What 100 % is, from all rows; None where a share of this column says nothing."""
        return None

    def figure(self, figures: Figures) -> Figure:
        """The figure of a row with how far it is known."""
        raise NotImplementedError

    def write(self, value: float) -> str:
        """A figure as text, with its unit."""
        return format_count(value)

    def share(self, figures: Figures, whole: float | None) -> float | None:
        """Which part of the whole the figure of a row is; None where it has no figure, or there is no whole."""
        known = whole is not None and whole > 0 and self.figure(figures).is_known
        return self.of(figures) / whole if known and whole and not figures.left_over else None

    def text(self, figures: Figures, whole: float | None) -> str:
        """The cell; with its share of ``whole`` where that is given."""
        return self.figure(figures).text(self.write)


@dataclass(frozen=True)
class CostColumn(Column):
    """One measure in one phase, self or total."""

    phase: str = FORWARD
    measure: Measure = MEASURES[0]
    is_self: bool = False

    @property
    def ranking(self) -> Column:
        return self if self.is_self else replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)

    def of(self, figures: Figures) -> float:
        return self.measure.of(figures.cost(self.phase, self.is_self))

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(self.measure.of(row.cost(self.phase, is_self=True)) for row in figures if not row.left_over)

    def figure(self, figures: Figures) -> Figure:
        return figures.measure(self.measure, self.phase, self.is_self, self.measured)

    def write(self, value: float) -> str:
        return self.measure.text(value)

    def text(self, figures: Figures, whole: float | None) -> str:
        figure = self.figure(figures)
        has_share = self.measure.unit is Unit.TIME and figure.bound is Bound.EXACT and not figures.left_over
        return figure.text(self.write) + (f" ({figure.value / whole:.1%})" if whole and has_share else "")


@dataclass(frozen=True)
class RateColumn(Column):
    """FLOPs in a second: of the device's time where that was measured, else of the CPU's."""

    phase: str = FORWARD
    on_device: bool = False

    def of(self, figures: Figures) -> float:
        return self.figure(figures).value

    def figure(self, figures: Figures) -> Figure:
        return figures.rate(self.phase, self.on_device, self.measured)


@dataclass(frozen=True)
class CallsColumn(Column):
    """How often the layer's forward was called, or the operator."""

    @property
    def key(self) -> str:
        return "calls"

    def of(self, figures: Figures) -> float:
        return figures.calls

    def figure(self, figures: Figures) -> Figure:
        return figures.number_of_calls()

    def write(self, value: float) -> str:
        return str(value)


@dataclass(frozen=True)
class ParamsColumn(Column):
    """The parameters of the layer and all below it, each counted at the first layer that holds it."""

    is_self: bool = False

    @property
    def ranking(self) -> Column:
        return replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)

    def of(self, figures: Figures) -> float:
        return (figures.own_params if self.is_self else figures.params) or 0

    def whole(self, figures: Iterable[Figures]) -> float | None:
        return sum(row.own_params or 0 for row in figures)

    def figure(self, figures: Figures) -> Figure:
        return figures.parameters()


def columns_of(run: Run, show_events: bool = False) -> list[Column]:
    """The columns that a run can fill: forward first, then calls, then what the other phases took.

    What was asked for and could not be measured has a column of unknowns; what was not asked for has none. Self columns
    of backward and recompute stand only beside operators, those of counts nowhere: what a layer does itself is what its
    children leave.
    """
    meta = run.meta
    device = meta.device_heading
    with_flops = "flops" in meta.requested
    of_all = measured_by_all(run)
    columns: list[Column] = []
    for phase in run.phases():
        lead = "" if phase == FORWARD else phase.capitalize() + " "
        if with_flops and phase == FORWARD:
            columns.append(ParamsColumn("Params"))
        for measure in MEASURES:
            names = {name for name, _ in measure.fields}
            if not names <= set(meta.requested):
                continue
            heading = measure.heading.format(device=device)
            measured = names <= of_all
            if measure.unit is not Unit.COUNT and (phase == FORWARD or show_events):
                columns.append(CostColumn(f"{lead}Self {heading}", measured, phase, measure, True))
            columns.append(CostColumn(f"{lead}{heading}", measured, phase, measure))
        if with_flops and "cpu_ns" in meta.requested:
            on_device = "device_ns" in meta.requested
            measured = {"flops", "device_ns" if on_device else "cpu_ns"} <= of_all
            columns.append(RateColumn(f"{lead}FLOP/s", measured, phase, on_device))
        if phase == FORWARD:
            columns.append(CallsColumn(CALLS))
    return columns


def column_called(name: str, columns: Sequence[Column]) -> Column:
    for column in columns:
        if column.is_called(name):
            if not column.measured:
                raise TorchprofError(f"{column.heading!r} was not measured in this run: there is no order by it.")
            return column
    raise TorchprofError(f"This run has no column {name!r}. {suggest(str(name), [column.key for column in columns])}")


def usual_columns(columns: Sequence[Column]) -> Column:
    """The column that tells which layers are the largest where nobody says: the first of time, else that of FLOPs."""
    costs = [column for column in columns if isinstance(column, CostColumn) and column.phase == FORWARD]
    timed = [column for column in costs if column.measure.unit is not Unit.COUNT]
    return [*timed[:1], *costs[-1:], *columns][0]


def path_column(columns: Sequence[Column], figures: Sequence[Figures], asked: Column | None) -> Column:
    """The column of totals that the hottest path follows."""
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
    times = [column for column in here if column.measure.unit is Unit.TIME]
    counts = [column for column in here if column.measure.unit is Unit.COUNT]
    usual = [*reversed(times), *reversed(counts)]
    return next((column for column in usual if any(map(column.of, figures))), usual_columns(columns))
