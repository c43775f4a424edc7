"""Text as terminals show it: tables, trees and color."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from tabulate import SEPARATING_LINE, DataRow, Line, TableFormat, tabulate, tabulate_formats

from torchprof.errors import TorchprofError, suggest

_Branch = TypeVar("_Branch")

# From which share of the whole on a figure has which colour, the hottest first. xterm's cube of 256 colours is the same
# on nearly every terminal, where the 16 basic ones are what the user's theme makes of them (yellow is often unreadable
# on white). These have a contrast of at least 3.4 to 1 with white and with the near black of dark themes.
_HEAT = ((0.5, "1;38;5;196"), (0.25, "38;5;166"), (0.1, "38;5;100"), (0.05, "38;5;64"), (0.01, "38;5;31"))
_COLD = "38;5;244"

# How torchprof's table always looked: no outer bars, and a line of dashes under the headings.
LOOK = TableFormat(
    lineabove=None,
    linebelowheader=Line("", "-", "-|-", ""),
    linebetweenrows=None,
    linebelow=None,
    headerrow=DataRow("", " | ", ""),
    datarow=DataRow("", " | ", ""),
    padding=0,
    with_header_hide=None,
)


def heat(share: float) -> str:
    """The colour of a figure that is this part of the whole, as an SGR code of ECMA-48."""
    return next((color for least, color in _HEAT if share >= least), _COLD)


def painted(text: str, color: str) -> str:
    return f"\033[{color}m{text}\033[0m"


def check_number(name: str, number: object, of: str) -> None:
    """Raise TorchprofError for an option that is no number from 0 on."""
    if number is not None and (not isinstance(number, int) or number < 0):
        raise TorchprofError(f"{name} is a number of {of}, not {number!r}.")


def draw(headings: Sequence[str], table: Sequence[Sequence[str]], tablefmt: str | None = None) -> str:
    """A table as text, in torchprof's own look or any of tabulate's formats; tree lines keep their indentation."""
    if tablefmt is not None:
        if tablefmt not in tabulate_formats:
            raise TorchprofError(f"tabulate has no format {tablefmt!r}. {suggest(str(tablefmt), tabulate_formats)}")
        return str(tabulate(table, headings, tablefmt, disable_numparse=True, preserve_whitespace=True))
    # As a heading tabulate would make each column two characters wider than its content.
    rows = [headings, SEPARATING_LINE, *table]
    return str(tabulate(rows, tablefmt=LOOK, disable_numparse=True, preserve_whitespace=True))


def printable(name: str) -> str:
    """A name from the user's code, with line breaks and the like written out: they would break the table."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def branches(
    roots: Sequence[_Branch], name: Callable[[_Branch], str], below: Callable[[_Branch, int], Sequence[_Branch]]
) -> Iterator[tuple[str, _Branch]]:
    """Each item of a tree, depth first, with the lines of the tree before its name.

    ``below`` gives the items under one, which stands at a level from 0.
    """
    waiting = [(root, "", "", 0) for root in reversed(roots)]
    while waiting:
        item, own, lines, level = waiting.pop()
        yield own + name(item), item
        children = below(item, level)
        for number in range(len(children) - 1, -1, -1):
            last = number == len(children) - 1
            waiting.append(
                (children[number], lines + ("└── " if last else "├── "), lines + (" " if last else "│"), level + 1)
            )
