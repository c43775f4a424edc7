"""A report as a value: tables with their figures, and sentences. Renderers make text, HTML and data of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import NamedTuple, TypeAlias, TypeVar
from weakref import finalize

from torchprof.errors import TorchprofError
from torchprof.run.cost import UNKNOWN, Cell, ReportCell, format_time
from torchprof.run.run import Run
from torchprof.run.words import OTHER

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

    - ``look``: one of tabulate's formats for its text; None: torchprof's own look.
    - ``name``: its name in data. ``ids``: the rank or the device that it is about.
    - ``text``: what terminals and notebooks show in place of a table; None: the table.
    - ``wholes``: the sum of each column, of which its figures are shares; None: they are not. ``in_color``: text in
      torchprof's own look has these shares as colors.
    """

    headings: Sequence[str]
    rows: Sequence[TableRow]
    look: str | None = None
    name: str = ""
    ids: Mapping[str, str | int] = field(default_factory=dict)
    text: str | None = None
    wholes: Sequence[float | None] = ()
    in_color: bool = False

    @classmethod
    def of_cells(cls, headings: Sequence[str], rows: Iterable[Sequence[Cell]], look: str | None = None) -> ReportTable:
        """A table of rows that are nothing but cells."""
        return cls(headings, [*map(TableRow, rows)], look)

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
    """Register a function as a report of that name: ``of`` a "run", or of the "diff" of two runs.

    ``shows``: its line in the list of reports. ``answers``: a key of ``QUESTIONS``. ``suffix``: ``export`` writes this
    report to files with this suffix.
    """

    def register(function: Callable[..., _Part]) -> Callable[..., _Part]:
        REPORTS[of][name] = Report(function, answers, shows, suffix)
        return function

    return register


# What several reports need


def kept_with_run(function: Callable[[Run], _Result]) -> Callable[[Run], _Result]:
    """Keep what a function makes of a run as long as the run: several reports ask for it, and a job may have thousands
    of ranks. It must not hold the run."""
    kept: dict[int, _Result] = {}  # by the id of the run

    @wraps(function)
    def of(run: Run) -> _Result:
        if id(run) not in kept:
            kept[id(run)] = function(run)
            finalize(run, kept.pop, id(run))
        return kept[id(run)]

    return of


def check_number(name: str, number: object, of: str) -> None:
    """Raise TorchprofError if an option is neither None nor an integer of at least 0."""
    if number is not None and (not isinstance(number, int) or number < 0):
        raise TorchprofError(f"{name} is a number of {of}, not {number!r}.")


def phase_cell(phase: str) -> Cell:
    """A phase in a table: that of work outside all layers that is not backward is empty there, and "other" in files."""
    return ReportCell("", phase) if phase == OTHER else phase


def time_cell(ns: float | None) -> Cell:
    """A time in a table; – if it is unknown."""
    return UNKNOWN if ns is None else format_time(ns)


def printable(name: str) -> str:
    """A name with unprintable characters, such as line breaks, written as escapes: they would break tables."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def rows_hidden(hidden: int, shown: int, which: str) -> str:
    """The start of a sentence: how many rows are hidden, and which are shown (``which``: "largest")."""
    rows = "1 row is" if hidden == 1 else f"{hidden} rows are"
    return f"{rows} hidden: shown {f'is the {which}' if shown == 1 else f'are the {shown} {which}'}"


def branches(
    roots: Sequence[_Branch], below: Callable[[_Branch, int], Sequence[_Branch]]
) -> Iterator[tuple[str, _Branch]]:
    """Each item of a tree, depth first, after the lines of the tree that lead to it.

    ``below`` returns the children of an item at a level; roots are at level 0.
    """
    waiting = [(root, "", "", 0) for root in reversed(roots)]
    while waiting:
        item, own, lines, level = waiting.pop()
        yield own, item
        children = below(item, level)
        for number in range(len(children) - 1, -1, -1):
            last = number == len(children) - 1
            waiting.append(
                (children[number], lines + ("└── " if last else "├── "), lines + (" " if last else "│"), level + 1)
            )
