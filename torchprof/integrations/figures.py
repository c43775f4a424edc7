"""Figures that may be unknown: an unknown number is None, and ``–`` as text."""

from __future__ import annotations

from collections.abc import Iterable

UNKNOWN_TEXT = "–"


def known_sum(numbers: Iterable[int | None]) -> int | None:
    """The sum; None if one of the numbers is unknown."""
    total = 0
    for number in numbers:
        if number is None:
            return None
        total += number
    return total


def share_text(part: float | None, whole: float | None, decimals: int = 2) -> str:
    """``part / whole`` in percent; 0 if the whole is 0."""
    if part is None or whole is None:
        return UNKNOWN_TEXT
    return f"{part / whole if whole else 0:.{decimals}%}"
