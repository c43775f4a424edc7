"""Text for terminals: tables, trees and color."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import TypeVar
from unicodedata import east_asian_width

from tabulate import tabulate, tabulate_formats

from torchprof.analyze.report import Part, Section
from torchprof.errors import TorchprofError, suggest
from torchprof.run.cost import Cell, ReportCell
from torchprof.run.words import OTHER

_Branch = TypeVar("_Branch")

# The smallest share of the whole for each color, the hottest first. The colors are of xterm's cube of 256, which nearly
# every terminal shows alike; the 16 basic colors depend on the user's theme (yellow is often unreadable on white).
# Their contrast is at least 3.4:1 on white and on the dark gray of dark themes.
_HEAT = ((0.5, "1;38;5;196"), (0.25, "38;5;166"), (0.1, "38;5;100"), (0.05, "38;5;64"), (0.01, "38;5;31"))
_COLD = "38;5;244"

_FIRST_WIDE = "\u1100"  # Hangul: no letter before it is wide
_COLOR = re.compile(r"\033\[[\d;]*m")


def heat(share: float) -> str:
    """The color of a figure with this share of the whole, as an SGR code (ECMA-48)."""
    return next((color for least, color in _HEAT if share >= least), _COLD)


def painted(cell: Cell, color: str) -> Cell:
    """A cell in a color, which is an SGR code."""
    return written(cell, f"\033[{color}m{cell}\033[0m")


def written(cell: Cell, text: str) -> Cell:
    """A cell with another text; its data stays."""
    return cell.written(text) if isinstance(cell, ReportCell) else text


def check_number(name: str, number: object, of: str) -> None:
    """Raise TorchprofError if an option is neither None nor an integer of at least 0."""
    if number is not None and (not isinstance(number, int) or number < 0):
        raise TorchprofError(f"{name} is a number of {of}, not {number!r}.")


def text_of(part: Part) -> str:
    """A report, or a part of one, as text. Raises TorchprofError for a table with an unknown look."""
    if isinstance(part, Section):
        return part.separator.join(map(text_of, part.parts))
    if isinstance(part, str):
        return part
    if part.text is not None:
        return part.text
    if part.look is None:
        return _in_own_look(part.headings, part.rows)
    if part.look in tabulate_formats:
        rows = [[*map(str, row)] for row in part.rows]
        return str(tabulate(rows, part.headings, part.look, disable_numparse=True, preserve_whitespace=True))
    raise TorchprofError(f"tabulate has no format {part.look!r}. {suggest(str(part.look), tabulate_formats)}")


def _in_own_look(headings: Sequence[str], table: Sequence[Sequence[Cell]]) -> str:
    """The look of torchprof 1's table: no outer bars, and a line of dashes below the headings."""
    columns, line = [], []
    for column in zip_longest(headings, *table, fillvalue=""):
        texts = [*map(str, column)]
        widths = [*map(_width, texts)]
        widest = max(widths)
        columns.append([text + " " * (widest - width) for text, width in zip(texts, widths)])
        line.append("-" * widest)
    first, *rows = (" | ".join(row).rstrip() for row in zip(*columns))
    return "\n".join([first, "-|-".join(line), *rows])


def _width(text: str) -> int:
    """How many columns of a terminal a text takes. Letters of Chinese, Japanese and Korean take two."""
    if "\033" in text:
        text = _COLOR.sub("", text)
    if text.isascii() or max(text) < _FIRST_WIDE:
        return len(text)
    return len(text) + sum(east_asian_width(char) in "WF" for char in text)


def phase_cell(phase: str) -> Cell:
    """A phase in a table: that of work outside all layers that is not backward is empty there, and "other" in files."""
    return ReportCell("", phase) if phase == OTHER else phase


def printable(name: str) -> str:
    """A name with unprintable characters, such as line breaks, written as escapes: they would break tables."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def rows_hidden(hidden: int, shown: int, which: str) -> str:
    """The start of a sentence: how many rows are hidden, and which are shown (``which``: "largest")."""
    rows = "1 row is" if hidden == 1 else f"{hidden} rows are"
    return f"{rows} hidden: shown {f'is the {which}' if shown == 1 else f'are the {shown} {which}'}"


def branches(
    roots: Sequence[_Branch], name: Callable[[_Branch], str], below: Callable[[_Branch, int], Sequence[_Branch]]
) -> Iterator[tuple[str, _Branch]]:
    """Each item of a tree, depth first, with its name after the lines of the tree.

    ``below`` returns the children of an item at a level; roots are at level 0.
    """
    waiting = [(root, "", "", 0) for root in reversed(roots)]
    while waiting:
        item, own, lines, level = waiting.pop()
        of_item = name(item)
        yield own + of_item, item
        children = below(item, level)
        for number in range(len(children) - 1, -1, -1):
            last = number == len(children) - 1
            waiting.append(
                (children[number], lines + ("└── " if last else "├── "), lines + (" " if last else "│"), level + 1)
            )
