"""The one error of torchprof, and the sentence that helps out of it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence


class TorchprofError(RuntimeError):
    """Something that torchprof cannot do. The message says what was wrong, what was expected and what to do."""


def suggest(given: str, choices: Iterable[str], limit: int = 3, *, every: bool = False) -> str:
    """List a few choices; of many, say which were probably meant, or the first ones when none is near. With ``every``,
    all of them are listed, too."""
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
    """A few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")
