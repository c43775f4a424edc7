"""TorchprofError, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class TorchprofError(RuntimeError):
    """The only exception that torchprof defines. The message says what is wrong, what was expected and what to do."""

    __module__ = "torchprof"  # where users import it from: tracebacks and pickles show it

    def __str__(self) -> str:
        return printable_lines(super().__str__())


def printable(name: str) -> str:
    """A name with unprintable characters, such as line breaks and those that command a terminal, as escapes."""
    return name if name.isprintable() else "".join(char if char.isprintable() else repr(char)[1:-1] for char in name)


def printable_lines(text: str) -> str:
    """The same for a text of several lines."""
    return "\n".join(map(printable, text.split("\n")))


def suggest(given: str, choices: Iterable[str], limit: int = 3, *, every: bool = False) -> str:
    """Sentences with the valid choices that are most similar to what was given, if there are any, and with all of them.

    Up to 8 choices are all listed, after the most similar one. Of more, the ``limit`` most similar ones are listed;
    if none is similar, the first 20. With ``every``, all are listed after the similar ones, sorted.
    """
    if not (known := list(choices)):
        return "There is none."
    are_few = len(known) <= 8 and not every
    near = difflib.get_close_matches(given, known, n=1 if are_few else limit, cutoff=0.5)
    meant = "Did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    if near and (len(near) == len(known) or not (are_few or every)):
        return meant
    shown = sorted(known) if every else known[:20]
    more = f" and {len(known) - len(shown)} more" if len(known) > len(shown) else ""
    listed = "Choose from " + ", ".join(repr(choice) for choice in shown) + more + "."
    return f"{meant} {listed}" if near else listed


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` names, and how many more there are: ``a, b, c and 2 more``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
