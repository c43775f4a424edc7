"""The catalogue of columns of a run, with heading, unit, order and sort key.

The table, the page, the exported records, the comparison of two runs and the options of the command line all read it.
The fields of ``Cost`` are declared in ``run/measures.py``, formats in ``run/formats.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace

from torchprof.analyze.figures import BLANK, Figures, measured_by_all
from torchprof.errors import TorchprofError, suggest
from torchprof.run.formats import FORMATS, Bound, Cell, Figure, ReportCell, Unit, format_number, format_rate
from torchprof.run.measures import MEASURES, Measure
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

CALLS = "Number of Calls"
MEASURE_OF = {measure.fields[0][0]: measure for measure in MEASURES}
"""The measures by their field of ``Cost``; those of memory by the allocated bytes."""


def as_key(heading: str) -> str:
    """A heading as users write it in options: ``Self CPU total`` is ``self_cpu_total``."""
    return heading.lower().replace(" ", "_")


@dataclass(frozen=True)
class Column:
    """A column of a table: one figure of each row, or a text.

    - ``heading``: its name in tables.
    - ``what``: "cost" (a ``measure``, self or total), "average" (its total per call), "rate" (FLOP/s), "calls",
      "params", "text", or the name of a figure in ``Figures.more``, such as "peak".
    - ``phase``; ``is_self``: of the layer without the layers below it.
    - ``on_device``: a rate per second of device time, not CPU time; a peak of memory of a device.
    - ``measured``: False if it was requested but could not be measured.
    """

    heading: str
    what: str = "text"
    phase: str = FORWARD
    measure: Measure | None = None
    is_self: bool = False
    on_device: bool = False
    measured: bool = True

    @property
    def key(self) -> str:
        """The name of this column as a sort key."""
        return {"calls": "calls", "saved": "saved_for_backward"}.get(self.what) or as_key(self.heading)

    @property
    def unit(self) -> Unit:
        """The unit of its figures."""
        if self.measure is not None:
            return self.measure.unit
        return Unit.BYTES if self.what in _OF_MEMORY else Unit.COUNT

    @property
    def fields(self) -> Set[str]:
        """The fields of ``Cost`` that the column is computed from."""
        if self.what == "rate":
            return {"flops", "device_ns" if self.on_device else "cpu_ns"}
        return {name for name, _ in self.measure.fields} if self.measure else frozenset()

    @property
    def is_time(self) -> bool:
        """Whether it is a time that adds up."""
        return self.what == "cost" and self.unit is Unit.TIME

    @property
    def is_elapsed(self) -> bool:
        """Whether it is elapsed time of a thread, which includes waiting for a processor."""
        return self.is_time and "cpu_ns" in self.fields

    @property
    def ranking(self) -> Column:
        """The column that ranks layers by their self, without the layers below."""
        return replace(self, is_self=True) if self.what in _SELF_AND_TOTAL else self

    def figure(self, figures: Figures) -> Figure:
        """The figure of a row: exact, a lower bound, unknown or blank."""
        if self.measure is not None:
            if self.what == "average":
                return figures.average(self.measure, self.phase, self.measured)
            return figures.measure(self.measure, self.phase, self.is_self, self.measured)
        if self.what == "rate":
            return figures.rate(self.phase, self.on_device, self.measured)
        if self.what == "calls":
            return figures.number_of_calls()
        if self.what == "params":
            return figures.parameters(self.is_self)
        return figures.more.get((self.what, self.phase, self.is_self), BLANK)

    def sort_key(self, figures: Figures) -> float:
        """The figure of a row, 0 if it has none."""
        figure = self.figure(figures)
        return figure.value if figure.is_known else 0

    def whole(self, figures: Iterable[Figures]) -> float | None:
        """The value that is 100 %, from all rows; None if shares of this column have no meaning."""
        if self.what == "params":
            return sum(row.own_params or 0 for row in figures)
        if self.what != "cost" or self.measure is None:
            return None
        return sum(self.measure.of(row.cost(self.phase, is_self=True)) for row in figures if not row.left_over)

    def write(self, value: float) -> ReportCell:
        """A figure as text, with its unit."""
        if self.what == "rate":
            return format_rate(value)
        if self.what == "calls" and value == int(value):
            return format_number(int(value))
        return FORMATS[self.unit](value)

    def text(self, figures: Figures, whole: float | None) -> Cell:
        """The text of a cell; with its share of ``whole`` if that is given."""
        figure = self.figure(figures)
        cell = figure.text(self.write)
        may_have_share = self.is_time and figure.bound is Bound.EXACT and not figures.left_over
        if whole and may_have_share and isinstance(cell, ReportCell):
            return cell.written(f"{cell} ({figure.value / whole:.1%})")
        return cell


_SELF_AND_TOTAL = ("cost", "params", "saved")
_OF_MEMORY = ("peak", "activations", "saved")


def catalogue(phases: Iterable[str], requested: Set[str], measured: Set[str], device: str) -> Iterator[Column]:
    """Every column of runs with these phases, in the order of all views; a view selects among them.

    ``requested`` and ``measured``: fields of ``Cost``. A column that was not requested is left out; one that was
    requested but could not be measured has unknown figures. ``device``: the name of the device in headings.
    """
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        columns: list[Column] = []
        if phase == FORWARD:
            columns += [Column("Self Params", "params", is_self=True), Column("Params", "params")]
        for measure in MEASURES:
            heading = measure.heading.format(device=device)
            columns.append(Column(f"{lead}Self {heading}", "cost", phase, measure, is_self=True))
            columns.append(Column(f"{lead}{heading}", "cost", phase, measure))
        if "cpu_ns" in requested:
            columns.append(Column(f"{lead}FLOP/s", "rate", phase, on_device="device_ns" in requested))
        columns.append(Column(f"{lead}CPU Peak", "peak", phase))
        columns.append(Column(f"{lead}{device} Peak", "peak", phase, on_device=True))
        if phase == FORWARD:
            columns.append(Column(CALLS, "calls"))
        for column in columns:
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
        if column.what == "params":
            return "flops" in requested and not column.is_self
        if column.is_self:
            return column.unit is not Unit.COUNT and (column.phase == FORWARD or show_events)
        return column.what != "peak"

    return [*filter(is_shown, catalogue(run.phases(), requested, measured_by_all(run), device))]


def measures_of_records(run: Run) -> list[Measure]:
    """The measures in records: each field of ``Cost`` that any rank requested, and net memory (allocated minus freed).

    A heading is the name of a column without its "self\\_" or "total\\_", and ends in a unit: ``cpu_ns``.
    """
    requested = {name for meta in run.metas for name in meta.requested}
    measures = []
    counters = {}
    for measure in MEASURES:
        fields = [(name, sign) for name, sign in measure.fields if name in requested]
        measures += [
            Measure(_with_unit(name, measure), measure.unit, ((name, 1),), measure.lower_bound_if) for name, _ in fields
        ]
        if len(fields) > 1:
            where, _, _ = fields[0][0].partition("_")
            measures.append(Measure(_with_unit(f"{where}_net", measure), measure.unit, tuple(fields)))
        if fields and (counter := measure.lower_bound_if) is not None:
            counters[counter] = Measure(counter, Unit.COUNT, ((counter, 1),))
    return [*measures, *counters.values()]


def _with_unit(name: str, measure: Measure) -> str:
    unit = measure.unit.value
    return name if measure.unit is Unit.COUNT or name.endswith(f"_{unit}") else f"{name}_{unit}"


def column_called(name: str, columns: Sequence[Column]) -> Column:
    """The column of that name: its heading, or the heading in lower case with underscores. Raises TorchprofError if
    there is none, or if it was not measured."""
    for column in columns:
        if name == column.heading or as_key(str(name)) in (as_key(column.heading), column.key):
            if not column.measured:
                raise TorchprofError(f"{column.heading!r} was not measured in this run: there is no order by it.")
            return column
    raise TorchprofError(f"This run has no column {name!r}. {suggest(str(name), [column.key for column in columns])}")


def default_column(columns: Sequence[Column]) -> Column:
    """The column that ranks layers by default: the first time that was measured, else FLOPs."""
    costs = [column for column in columns if column.what == "cost" and column.phase == FORWARD]
    timed = [column for column in costs if column.unit is not Unit.COUNT and column.measured]
    return [*timed[:1], *costs[-1:], *columns][0]


def hot_path_column(columns: Sequence[Column], figures: Sequence[Figures], asked: Column | None) -> Column:
    """The column of totals that the hottest path follows. Raises TorchprofError if ``asked`` has no total."""
    totals = [column for column in columns if column.what == "cost" and not column.is_self]
    if asked is not None:
        for column in totals:
            if (column.phase, column.measure) == (asked.phase, asked.measure):
                return column
        raise TorchprofError(
            f"{asked.heading!r} has no total that a hottest path could follow. Sort by one of "
            f"{', '.join(column.key for column in totals)}, or by nothing."
        )
    here = [column for column in reversed(totals) if column.phase == FORWARD and column.measured]
    preferred = (column for unit in (Unit.TIME, Unit.COUNT) for column in here if column.unit is unit)
    return next((column for column in preferred if any(map(column.sort_key, figures))), default_column(columns))
