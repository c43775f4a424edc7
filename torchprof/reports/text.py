"""Text for terminals: tables, trees and color."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest
from shutil import get_terminal_size
from typing import Any
from unicodedata import east_asian_width

from tabulate import tabulate, tabulate_formats

from torchprof.analyze.report import Part, ReportTable, Section, TableRow, tables_and_sentences
from torchprof.errors import TorchprofError, suggest
from torchprof.first_screen.overview import overview
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, as_key
from torchprof.run.processes import paused_gc
from torchprof.run.run import Run

_BOLD = "1"
# The smallest share of the whole for each color, the hottest first, as SGR codes (ECMA-48). The colors are of xterm's
# cube of 256, which nearly every terminal shows alike; the 16 basic colors depend on the user's theme (yellow is often
# unreadable on white). Their contrast is at least 3.4:1 on white and on the dark gray of dark themes.
_HEAT = ((0.5, "1;38;5;196"), (0.25, "38;5;166"), (0.1, "38;5;100"), (0.05, "38;5;64"), (0.01, "38;5;31"))
_COLD = "38;5;244"

_FIRST_WIDE = "\u1100"  # Hangul: no letter before it is wide
_COLOR = re.compile(r"\033\[[\d;]*m")


def text_of(part: Part, look: str | None = None) -> str:
    """A report, or a part of one, as text. Raises TorchprofError for a table with an unknown look."""
    if isinstance(part, Section):
        return part.separator.join(text_of(inner, look) for inner in part.parts)
    if isinstance(part, str):
        return part
    if part.text is not None:
        return part.text
    if look is None:
        return _in_own_look(part.headings, [_painted(row, part) if part.in_color else _texts(row) for row in part.rows])
    if look in tabulate_formats:
        rows = [*map(_texts, part.rows)]
        return str(tabulate(rows, part.headings, look, disable_numparse=True, preserve_whitespace=True))
    raise TorchprofError(f"tabulate has no format {look!r}. {suggest(str(look), tabulate_formats)}")


def _texts(row: TableRow) -> list[str]:
    """The text of each cell of a row."""
    return [row.first, *map(str, row.cells[1:])]


def _painted(row: TableRow, table: ReportTable) -> list[str]:
    """The text of each cell, in the color of its share; a name on the hottest path is bold."""
    name, *figures = _texts(row)
    _, *shares = table.shares(row)
    painted = [text if share is None else _in_color(text, heat(share)) for text, share in zip(figures, shares)]
    return [_in_color(name, _BOLD) if row.is_hot else name, *painted]


def heat(share: float) -> str:
    """The color of a figure with this share of the whole, as an SGR code."""
    return next((color for least, color in _HEAT if share >= least), _COLD)


def _in_color(text: str, color: str) -> str:
    return f"\033[{color}m{text}\033[0m"


def _in_own_look(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The look of torchprof 1's table: no outer bars, and a line of dashes below the headings."""
    columns, line = [], []
    for texts in zip_longest(headings, *rows, fillvalue=""):
        widths = [*map(_width, texts)]
        widest = max(widths)
        columns.append([text + " " * (widest - width) for text, width in zip(texts, widths)])
        line.append("-" * widest)
    first, *others = (" | ".join(row).rstrip() for row in zip(*columns))
    return "\n".join([first, "-|-".join(line), *others])


def _width(text: str) -> int:
    """How many columns of a terminal a text takes. Letters of Chinese, Japanese and Korean take two."""
    if "\033" in text:
        text = _COLOR.sub("", text)
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    return len(text) + sum(east_asian_width(char) in "WF" for char in text)


@paused_gc()
def printed(run: Run, whole: str = 'run.report("tree") shows all.') -> str:
    """What ``print`` shows of a run: the overview, as wide as the terminal. ``whole``: see ``overview``."""
    return text_of(overview(run, width=terminal_width(), whole=whole))


def terminal_width() -> int:
    """The number of characters of a line: ``COLUMNS``, else that of the terminal, else 160."""
    return get_terminal_size((160, 50)).columns


# The data of a report: the rows of its tables with their figures in base units, and its sentences.


def data_of(name: str, content: Part) -> dict[str, Any]:
    """What JSON stores of a report.

    - ``report``: its name.
    - ``tables``: each has a ``name``, ``columns`` and ``rows``, and the ``rank`` and ``device`` that it is about, if it
      is about one. A column has ``key``, ``heading`` and ``unit`` ("ns", "bytes", "count", "share" as a fraction of 1,
      …; "" for text). A row has an entry for each column, by key: none if the cell is empty, null if the figure is
      unknown. ``at_least`` lists the columns in which the figure is a lower bound. Ids that are not a column, such as
      the ``layer`` of an operator, are entries, too.
    - ``sentences``: all other text, in the order of the report.
    """
    parts = [*tables_and_sentences(content)]
    return {
        "report": name,
        "tables": [_data_of_table(part, name) for part in parts if isinstance(part, ReportTable)],
        "sentences": [part for part in parts if isinstance(part, str)],
    }


def _data_of_table(table: ReportTable, report: str) -> dict[str, Any]:
    keys = _keys(table.headings)
    columns = [
        {"key": key, "heading": heading, "unit": unit} for key, heading, unit in zip(keys, table.headings, table.units)
    ]
    return {
        "name": table.name or report,
        **table.ids,
        "columns": columns,
        "rows": [_data_of_row(keys, row.cells) for row in table.rows if not row.continues],
    }


def _keys(headings: Sequence[str]) -> list[str]:
    """A key for each heading: the name of the column in options such as ``sort_by``."""
    keys: list[str] = []
    for heading in headings:
        key = re.sub(r"[^\w/]+", "_", as_key(heading)).strip("_")
        keys.append(f"{key}_{keys.count(key) + 1}" if key in keys else key)
    return keys


def _data_of_row(keys: Sequence[str], row: Sequence[Cell]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    bounds: list[str] = []
    for key, cell in zip(keys, row):
        if isinstance(cell, ReportCell):
            if cell.value is not None:
                data[key] = cell.value
            data.update((name, value) for name, value in cell.ids.items() if name not in keys)
            bounds += [key] if cell.at_least else []
        elif cell == UNKNOWN:
            data[key] = None
        elif cell:
            data[key] = cell
    return {**data, "at_least": bounds} if bounds else data
