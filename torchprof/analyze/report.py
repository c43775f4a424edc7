"""A report as a value: tables with their figures, and sentences. Renderers make text, HTML and data of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from torchprof.run.cost import Cell


@dataclass(frozen=True)
class ReportTable:
    """A table: its headings and the cells of its rows. A cell that is a figure or an id is a ``ReportCell``.

    - ``look``: one of tabulate's formats for its text; None: torchprof's own look.
    - ``name``: its name in data. ``ids``: the rank or the device that it is about.
    - ``text``: what terminals and notebooks show in place of a table; None: the table.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    look: str | None = None
    name: str = ""
    ids: Mapping[str, str | int] = field(default_factory=dict)
    text: str | None = None

    def of(self, name: str, **ids: str | int) -> ReportTable:
        """This table with a name and ids."""
        return replace(self, name=name, ids=ids)


class Continued(list[Cell]):
    """A row of a table that continues the texts of the row above: that one stands for both in data."""


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
