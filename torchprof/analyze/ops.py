"""The report "ops": the cost of each operator, in the whole run or in some layers; or the layers that use one. And the
sorted table of figures, which it shares with the reports "kernels" and "types"."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torchprof.analyze.columns import Column, column_called, columns_of
from torchprof.analyze.figures import Figures
from torchprof.analyze.operators import Operator, layers_of_operator, operators
from torchprof.analyze.report import ReportTable, Section, TableRow, report, rows_hidden, shortened, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_sums, warnings_below
from torchprof.errors import TorchprofError
from torchprof.run.formats import Cell, ReportCell, format_time
from torchprof.run.measures import Cost
from torchprof.run.operators import Sums
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, LAUNCHED_BEFORE, FrameKind, range_in_words

# A sorted table of figures

_CALLS = "Calls"
SUM_OF_PHASES = "the requested phases"
"""The key in ``Figures`` of the sum of all requested phases."""
_TORCHS_NAMES = {
    "self_cpu_time_total": "self_cpu_total",
    "cpu_time_total": "cpu_total",
    "cpu_time": "cpu_avg",
    "self_cpu_memory_usage": "self_cpu_mem",
    "cpu_memory_usage": "cpu_mem",
    "count": "calls",
}
"""torch's names of columns, and ours. "cpu" may be replaced by a kind of device in both."""


class Whole(NamedTuple):
    """What 100 % is in the columns of times, in words and as costs: ``own`` in columns of self, ``total`` in others."""

    name: str
    own: Cost
    total: Cost

    def in_column(self, column: Column) -> float | None:
        """What 100 % is in a column; None if it has no shares."""
        if not column.is_time or not column.measure:
            return None
        return column.measure.of(self.own if column.is_self else self.total)

    def sentence(self, columns: Sequence[Column]) -> Iterator[str]:
        """What 100 % is in each column of times."""
        headings: dict[float, str] = {}
        for column in columns:
            if ns := self.in_column(column):
                headings.setdefault(ns, f"{format_time(ns)} {column.heading}")  # once if self and total are the same
        if headings:
            yield f"100 % is {self.name}: {', '.join(headings.values())}."


@dataclass
class TableLine(Figures):
    """A line of the table: its figures, and its texts by heading, each of one or several lines."""

    texts: Mapping[str, Sequence[Cell]] = field(default_factory=dict)


def line_of(texts: Mapping[str, Sequence[Cell]], sums: Sums, *, left_over: bool = False) -> TableLine:
    """A line with these figures; 0 calls are blank. ``left_over``: it was launched before the recording."""
    return TableLine(
        own={SUM_OF_PHASES: sums.self},
        total={SUM_OF_PHASES: sums.total},
        calls=sums.calls or -1,
        left_over=left_over,
        texts=texts,
        is_part=0 < sums.calls == sums.parts,
    )


def line_of_figures(texts: Mapping[str, Sequence[Cell]], figures: Figures, phases: Sequence[str]) -> TableLine:
    """A line with the sum of the figures over these phases."""
    own, total = (sum((costs.get(phase, Cost()) for phase in phases), Cost()) for costs in (figures.own, figures.total))
    return TableLine(
        own={SUM_OF_PHASES: own},
        total={SUM_OF_PHASES: total},
        calls=figures.calls,
        unknown=figures.unknown,
        has_more_calls=figures.has_more_calls,
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


def ranked(
    run: Run,
    texts: Sequence[str],
    lines: Sequence[TableLine],
    columns: Sequence[Column],
    default: Column,
    whole: Whole,
    *,
    more_texts: Sequence[str] = (),
    sentences: Iterable[str] = (),
    sort_by: str | None = None,
    top: int | None = None,
) -> Section:
    """The lines as a table; below it what 100 % is, the sentences, how many rows are hidden, and the run's warnings.

    ``texts``: headings of the text columns left of the figures; ``more_texts``: of those right of them. The table is
    sorted by the column ``sort_by``, or by ``default`` if that is None: figures from the largest, texts from A to Z.

    Raises TorchprofError for an unknown column.
    """
    all_columns = [*map(Column, texts), *columns, *map(Column, more_texts)]
    order = default if sort_by is None else column_called(_our_name(sort_by, all_columns, run), all_columns)
    if order.what == "text":
        lines = sorted(lines, key=lambda line: [*map(str, line.texts[order.heading])])
    else:
        lines = sorted(lines, key=lambda line: -order.sort_key(line))
    shown = lines[:top]
    rows = [row for line in shown for row in _rows(line, all_columns, whole)]
    table = ReportTable([column.heading for column in all_columns], rows)
    below = [*whole.sentence(columns), *sentences]
    if len(shown) < len(lines):
        which = "first" if order.what == "text" else "largest"
        below.append(f"{rows_hidden(len(lines) - len(shown), len(shown), which)} by {order.heading}.")
    return spaced([table, stacked([*below, *about_sums(run), warnings_below(run)])])


def _rows(line: TableLine, columns: Sequence[Column], whole: Whole) -> Iterator[TableRow]:
    """A line as rows of cells: several rows if a text has several lines. The first row has all lines as its data."""
    lines_of_cells = [
        list(line.texts[column.heading]) if column.what == "text" else [column.text(line, whole.in_column(column))]
        for column in columns
    ]
    yield TableRow(
        [
            ReportCell(str(lines[0]), "\n".join(map(str, lines))) if len(lines) > 1 else lines[0] if lines else ""
            for lines in lines_of_cells
        ]
    )
    for number in range(1, max(1, *map(len, lines_of_cells))):
        yield TableRow([lines[number] if number < len(lines) else "" for lines in lines_of_cells], continues=True)


def _our_name(name: str, columns: Sequence[Column], run: Run) -> str:
    """Our name of a column for torch's, such as "cuda_total" for "device_time_total"; any other name unchanged."""
    device = run.meta.device or "device"
    our_names = dict(_TORCHS_NAMES)
    for torchs_name, our_name in _TORCHS_NAMES.items():
        for kind in ("device", device):
            our_names[torchs_name.replace("cpu", kind)] = our_name.replace("cpu", device)
    our_name = our_names.get(str(name), name)
    return our_name if any(column.key == our_name for column in columns) else name


# The ops report

_SHAPES_SHOWN = 4  # of one operator
_SHAPES_OF_LIST_SHOWN = 2  # of one input that is a list of tensors


@report("ops", 'every operator, with self and total; op="aten::mm": the layers that use it', answers="time")
def ops(
    run: Run,
    *,
    op: str | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    group_by_input_shape: bool = False,
    group_by_stack_n: int = 0,
    layer: Any = None,
    phase: str | None = None,
) -> Section:
    """A row for each operator, and for each label of the user's, as in torch's ``key_averages().table()``.
    docs/operators.md describes the columns. Shares are of the self time of all rows, without work launched before the
    recording.

    ``op``: the name of an operator, as this table has it. The rows are then the layers that use it directly, not in a
    child layer, the largest total first; shares are of what it took in the whole run. ``phase``, ``sort_by``, ``top``
    work as without ``op``, the other options do not.

    ``layer``: a path or a pattern as in ``Profile(paths=…)``. ``phase``: None is their sum. ``sort_by`` may be torch's
    name of a column, too; the default is the self time of the device if that was measured, else of the CPU.

    Raises TorchprofError for an unknown operator, layer or column, for shapes or source lines that were not recorded,
    and for options that do not work with ``op``.
    """
    if op is not None:
        options = {"layer": layer, "group_by_input_shape": group_by_input_shape, "group_by_stack_n": group_by_stack_n}
        if refused := [name for name, value in options.items() if value]:
            raise TorchprofError(f"With op=, the rows are the layers of one operator: leave out {', '.join(refused)}.")
        return _layers_using(run, op, sort_by=sort_by, top=top, phase=phase)
    sums_of = operators(
        run, layer=layer, phase=phase, group_by_input_shape=group_by_input_shape, group_by_stack_n=group_by_stack_n
    )
    columns = figure_columns(run)
    whole = sum((sums.self for operator, sums in sums_of.items() if not _is_left_over(operator)), Cost())
    more_texts = ["Input Shapes"] * bool(group_by_input_shape) + ["Source Lines"] * bool(group_by_stack_n)
    return ranked(
        run,
        ["Operator"],
        [_line(operator, sums) for operator, sums in sums_of.items()],
        columns,
        largest_by(columns, of_self=True),
        Whole("the self of all rows", whole, whole),
        more_texts=more_texts,
        sentences=about_flops(run),
        sort_by=sort_by,
        top=top,
    )


def operator_name(operator: Operator) -> str:
    """The name of an operator in tables: long names shortened, ranges marked."""
    return range_in_words(operator.kind, shortened(operator.name))


def _line(operator: Operator, sums: Sums) -> TableLine:
    texts: dict[str, Sequence[Cell]] = {
        "Operator": [ReportCell(operator_name(operator), operator.name, ids={"kind": operator.kind})],
        "Input Shapes": [_shapes(operator.shapes)],
        "Source Lines": operator.stack,
    }
    return line_of(texts, sums, left_over=_is_left_over(operator))


def _is_left_over(operator: Operator) -> bool:
    return operator.kind == FrameKind.LABEL and operator.name == LAUNCHED_BEFORE


def _shapes(shapes: Sequence[Any], limit: int = _SHAPES_SHOWN) -> str:
    more = [f"… {len(shapes) - limit} more"] if len(shapes) > limit else []
    return ", ".join([*map(_shape, shapes[:limit]), *more])


def _shape(shape: Any) -> str:
    """The shape of a tensor, or of a list of tensors."""
    if shape is None:
        return "[?]"
    is_list = any(isinstance(size, tuple) for size in shape)
    return f"[{_shapes(shape, _SHAPES_OF_LIST_SHOWN)}]" if is_list else str(list(shape)).replace("-1", "?")


def _layers_using(run: Run, op: str, *, phase: str | None, **order: Any) -> Section:
    """A row for each layer that uses the operator ``op`` directly."""
    op = {operator_name(operator): operator.name for operator in operators(run)}.get(op, op)  # by the name in the table
    everywhere = [sums for operator, sums in operators(run, phase=phase).items() if operator.name == op]
    own, total = sum((sums.self for sums in everywhere), Cost()), sum((sums.total for sums in everywhere), Cost())
    lines = [line_of({"Module": [name]}, sums) for name, sums in layers_of_operator(run, op, phase=phase).items()]
    columns = figure_columns(run)
    whole = Whole(f"what {op} took everywhere", own, total)
    return ranked(run, ["Module"], lines, columns, largest_by(columns, of_self=False), whole, **order)
