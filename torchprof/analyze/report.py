"""A report as a value: tables with their figures, and sentences. Renderers make text, HTML and data of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, NamedTuple, TypeAlias, TypeVar
from weakref import finalize

from torchprof.errors import TorchprofError, printable
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, format_time
from torchprof.run.run import Run
from torchprof.run.words import OTHER, number_of_phase

_Branch = TypeVar("_Branch")
_Result = TypeVar("_Result")

HOT = "◄"
"""The sign after the names of layers on the hottest path."""


@dataclass(slots=True)  # not frozen: a table makes thousands
class TableRow:
    """A row of a table. A cell that is a figure or an id is a ``ReportCell``.

    - ``lead``: the lines of the tree before the first cell. ``is_hot``: it is a layer on the hottest path.
    - ``is_part``: its figures are parts of the sums of their columns. Rows about several others are not: they stay last
      where a reader sorts the table.
    - ``layer``: the index of the layer that it is about, negative for work of no layer; None if it is about none.
    - ``continues``: it continues the texts of the row above, which stands for both in data.
    """

    cells: Sequence[Cell]
    lead: str = ""
    is_hot: bool = False
    is_part: bool = True
    continues: bool = False
    layer: int | None = None

    @property
    def first(self) -> str:
        """The text of the first cell, with the lines of the tree before it and the sign of the hottest path."""
        return f"{self.lead}{self.cells[0]}{f' {HOT}' if self.is_hot else ''}"


@dataclass(frozen=True)
class ReportTable:
    """A table: its headings and its rows.

    - ``name``: its name in data. ``ids``: the rank or the device that it is about.
    - ``text``: what terminals and notebooks show in place of a table; None: the table.
    - ``wholes``: the sum of each column, of which its figures are shares; None: they are not. ``in_color``: text in
      torchprof's own look has these shares as colors.
    """

    headings: Sequence[str]
    rows: Sequence[TableRow]
    name: str = ""
    ids: Mapping[str, str | int] = field(default_factory=dict)
    text: str | None = None
    wholes: Sequence[float | None] = ()
    in_color: bool = False

    @classmethod
    def of_cells(cls, headings: Sequence[str], rows: Iterable[Sequence[Cell]]) -> ReportTable:
        """A table of rows that are nothing but cells."""
        return cls(headings, [*map(TableRow, rows)])

    def of(self, name: str, **ids: str | int) -> ReportTable:
        """This table with a name and ids."""
        return replace(self, name=name, ids=ids)

    @property
    def units(self) -> list[str]:
        """The unit of the figures of each column; "" for a column without figures."""

        def unit(number: int) -> str:
            cells = (row.cells[number] for row in self.rows)
            return next((cell.unit for cell in cells if isinstance(cell, ReportCell) and cell.unit), "")

        return [*map(unit, range(len(self.headings)))]

    @property
    def are_texts(self) -> list[bool]:
        """Whether each column has texts, and no figures."""
        columns = zip(self.units, *(row.cells for row in self.rows))
        return [not unit and any(str(cell) not in ("", UNKNOWN) for cell in cells) for unit, *cells in columns]

    def shares(self, row: TableRow) -> list[float | None]:
        """The fraction that each figure of a row is of the sum of its column; None for other cells."""
        if not row.is_part or not self.wholes:
            return [None] * len(row.cells)
        figures = [cell.value if isinstance(cell, ReportCell) else None for cell in row.cells]
        return [
            figure / whole if isinstance(figure, (int, float)) and whole is not None and whole > 0 else None
            for figure, whole in zip(figures, self.wholes)
        ]


@dataclass(frozen=True)
class Section:
    """Parts of a report, one after the other, with a ``separator`` between their texts. It is false if it has no
    text. ``has_warnings``: its parts are the run's warnings."""

    parts: Sequence[Part]
    separator: str = "\n"
    has_warnings: bool = False

    def __bool__(self) -> bool:
        return any(self.parts) or (len(self.parts) > 1 and bool(self.separator))


Part: TypeAlias = str | ReportTable | Section
"""A part of a report: a sentence or a piece of text, a table, or several parts."""


def stacked(parts: Iterable[Part]) -> Section:
    """The parts below each other; empty sections are left out, and an empty text is an empty line."""
    return Section([part for part in parts if part or isinstance(part, str)])


def spaced(parts: Iterable[Part]) -> Section:
    """The parts with an empty line between them; empty parts are left out."""
    return Section([part for part in parts if part], "\n\n")


def without_warnings(part: Part) -> Part:
    """A report without the run's warnings, where other text has them."""
    if not isinstance(part, Section):
        return part
    inner = [without_warnings(part) for part in part.parts if not (isinstance(part, Section) and part.has_warnings)]
    return replace(part, parts=[part for part in inner if part or isinstance(part, str)])


def tables_and_sentences(part: Part) -> Iterator[ReportTable | str]:
    """The innermost parts of a report, in its order. Empty ones are left out."""
    waiting = [part]
    while waiting:
        part = waiting.pop()
        if isinstance(part, Section):
            waiting.extend(reversed(part.parts))
        elif part:
            yield part


# The catalogue of reports

QUESTIONS = {
    "time": "Where does the time go?",
    "why": "Why?",
    "fit": "Does it fit?",
    "changed": "What changed?",
    "waits": "Who waits?",
    "": "To keep, and for other programs",
}
"""What users ask, in the order of every list of reports. The key is what a report ``answers``."""


class Option(NamedTuple):
    """An option of reports: what it does, and the check that raises TorchprofError for a value that it cannot have."""

    meaning: str
    check: Callable[[str, Any], None] = lambda name, value: None


def _number_of(what: str) -> Callable[[str, Any], None]:
    """The check of an option that is None or an integer of at least 0."""

    def check(name: str, number: Any) -> None:
        if number is not None and (not isinstance(number, int) or number < 0):
            raise TorchprofError(f"{name} is a number of {what}, not {number!r}.")

    return check


def _phase(name: str, phase: Any) -> None:
    if phase is not None:
        number_of_phase(phase)


OPTIONS: Mapping[str, Option] = {
    "depth": Option("hide the layers below this depth; totals stay", _number_of("levels")),
    "sort_by": Option("order siblings by a column, largest first: cpu_total, self_cpu_mem, calls, …"),
    "top": Option("only the N largest rows; layers with those above them", _number_of("rows")),
    "phase": Option("only in this phase: forward, backward or recompute", _phase),
    "layer": Option("only in these layers and below them: features.0, layer.*"),
    "op": Option("the layers that use this operator: aten::mm"),
    "show_events": Option("list the operators of each layer"),
    "percent": Option("add shares in percent"),
    "hot": Option("order siblings by their total, and mark the hottest path"),
    "group_by_input_shape": Option("a row for each shape of the inputs"),
    "group_by_stack_n": Option("a row for each N innermost source lines", _number_of("source lines")),
    "full_names": Option("names in full"),
    "lines": Option("the number of source lines of each row", _number_of("lines")),
    "rows": Option("the number of layers in the tree", _number_of("rows")),
    "places": Option("the number of largest places", _number_of("rows")),
    "width": Option("the number of characters of a line; None: any", _number_of("characters")),
    "whole": Option("the sentence below a tree that is not whole"),
    "color": Option("color each figure by its share of its column"),
    "tablefmt": Option("any of tabulate's formats: github, html, …"),
    "of": Option("the records to write: layers, operators or rows"),
    "strip": Option("leave out names of the user's files and machine"),
    "beside": Option("other runs on the same page, by name"),
    "compared": Option("the run that compares all ranks of the job"),
}
"""All options of reports. ``content_of`` in ``reports`` checks their values before it calls a report, so a report only
says what is special about an option in it. Checks that need the run, as of columns and layers, are in the reports.

A column is named by its heading, or by that in lower case with underscores (``self_cpu_total``). At ``depth`` 0 the
model is alone; with ``top``, layers at ``depth`` are ranked with all below them."""


class Report(NamedTuple):
    """A function of a run, or of a diff, and options; the question that it answers; in a few words what it shows; and
    the suffix of its files, None if it is not written to files."""

    write: Callable[..., Part]
    answers: str
    shows: str
    suffix: str | None


_Part = TypeVar("_Part", bound=Part)
REPORTS: dict[str, dict[str, Report]] = {"run": {}, "diff": {}}
"""All reports of a run and of a diff by name, of the files that are imported: see ``reports.known``."""


def report(
    name: str, shows: str = "", *, answers: str = "", suffix: str | None = None, of: str = "run"
) -> Callable[[Callable[..., _Part]], Callable[..., _Part]]:
    """Register a function as a report of that name: ``of`` a "run", or of the "diff" of two runs. Its keyword arguments
    are options, of which ``OPTIONS`` has the meaning. A report that ``answers`` a question has the option ``tablefmt``,
    too: how the tables are drawn.

    ``shows``: its line in the list of reports. ``answers``: a key of ``QUESTIONS``. ``suffix``: ``export`` writes this
    report to files with this suffix.
    """

    def register(function: Callable[..., _Part]) -> Callable[..., _Part]:
        REPORTS[of][name] = Report(function, answers, shows, suffix)
        return function

    return register


# What several reports need

_LONG_NAME = 60  # characters; longer names are shortened


def kept_with_run(function: Callable[[Run], _Result]) -> Callable[[Run], _Result]:
    """Keep what a function makes of a run as long as the run: several reports ask for it, and a job may have thousands
    of ranks. It must not hold the run."""
    kept: dict[int, _Result] = {}  # by the id of the run

    @wraps(function)
    def kept_result(run: Run) -> _Result:
        if id(run) not in kept:
            kept[id(run)] = function(run)
            finalize(run, kept.pop, id(run))
        return kept[id(run)]

    return kept_result


def check_device(run: Run, lacks: str) -> None:
    """Raise TorchprofError for a run that recorded no device. ``lacks``: what it has not, as "has no device times"."""
    if all("device_ns" not in meta.requested for meta in run.metas):
        raise TorchprofError(
            f"This run recorded no device, so it {lacks}: where the model runs on a GPU, profile it with "
            'Profile(model, device="cuda"), or "xpu" or another kind; for a trace, with '
            "ProfilerActivity.CUDA in the activities of torch.profiler.profile."
        )
    if all("device_ns" not in meta.measured for meta in run.metas):
        why = f"{run.meta.device_heading} was requested, but its times are unknown. run.warnings says why."
        raise TorchprofError(f"This run {lacks}: {why}")


def phase_cell(phase: str) -> Cell:
    """A phase in a table: that of work outside all layers that is not backward is empty there, and "other" in files."""
    return ReportCell("", phase) if phase == OTHER else phase


def time_cell(ns: float | None) -> Cell:
    """A time in a table; – if it is unknown."""
    return UNKNOWN if ns is None else format_time(ns)


def shortened(name: str, width: int = _LONG_NAME) -> str:
    """A name of at most ``width`` characters, long ones without their middle; unprintable characters as escapes."""
    name = printable(name)
    if len(name) <= width:
        return name
    head = (width - 1) * 3 // 5
    return f"{name[:head]}…{name[len(name) - (width - 1 - head) :]}"


def name_of_layer(run: Run, index: int) -> str:
    """The name of a layer, or of work of no layer, printable."""
    return printable(run.layers.name_of(index))


def pattern_of(paths: Sequence[tuple[str, ...]]) -> str:
    """The dotted path that fits all of these, which are equally long: "blocks.*.mlp" of "blocks.0.mlp" and
    "blocks.1.mlp"."""
    return ".".join(names[0] if len(set(names)) == 1 else "*" for names in zip(*paths))


def rows_hidden(hidden: int, shown: int, which: str) -> str:
    """The start of a sentence: how many rows are hidden, and which are shown (``which``: "largest")."""
    rows = "1 row is" if hidden == 1 else f"{hidden} rows are"
    return f"{rows} hidden: shown {f'is the {which}' if shown == 1 else f'are the {shown} {which}'}"


def branches(roots: Sequence[_Branch], below: Callable[[_Branch], Sequence[_Branch]]) -> Iterator[tuple[str, _Branch]]:
    """Each item of a tree, depth first, after the lines of the tree that lead to it: ("", root), ("├── ", child),
    ("│└── ", its child), ("└── ", last child). ``below``: the children of one."""
    waiting = [(root, "", "") for root in reversed(roots)]
    while waiting:
        item, own, lines = waiting.pop()
        yield own, item
        fork, line = "└── ", " "  # of the last child
        for child in reversed(below(item)):
            waiting.append((child, lines + fork, lines + line))
            fork, line = "├── ", "│"
