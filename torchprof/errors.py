"""TorchprofError, and helpers for its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class TorchprofError(RuntimeError):
    """The only exception that torchprof defines. The message says what is wrong, what was expected and what to do."""

    __module__ = "torchprof"  # where users import it from: tracebacks and pickles show it


def suggest(given: str, choices: Iterable[str], limit: int = 3, *, every: bool = False) -> str:
    """A sentence with the valid choices: up to 8 are all listed.

    Of more than 8, the most similar ones are listed; if none is similar, the first 20. With ``every``, all choices are
    listed after the most similar ones.
    """
    known = list(choices)
    if not known:
        return "There is none."
    near = difflib.get_close_matches(given, known, n=limit, cutoff=0.5)
    meant = "Did you mean " + " or ".join(repr(choice) for choice in near) + "?"
    if every:
        listed = "Choose from " + ", ".join(repr(choice) for choice in sorted(known)) + "."
        return f"{meant} {listed}" if near else listed
    if near and len(known) > 8:
        return meant
    more = f" and {len(known) - 20} more" if len(known) > 20 else ""
    return "Choose from " + ", ".join(repr(choice) for choice in known[:20]) + more + "."


def some(names: Sequence[str], limit: int = 3) -> str:
    """The first ``limit`` names, and how many more there are: ``a, b, c and 2 more``."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
