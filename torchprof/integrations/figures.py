"""Figures as text. A figure may be unknown: then it is None, and ``–`` as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

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


def scaled(value: float | None, units: Mapping[str, float], precision: int = 2) -> str:
    """A value in the first unit that is not larger than it, or else in the last one. ``units``: largest first.
    ``precision`` is the maximum number of decimals. A whole number in a unit of 1 stays as it is."""
    if value is None:
        return UNKNOWN_TEXT
    unit = next((unit for unit, size in units.items() if abs(value) >= size), [*units][-1])
    number = value if units[unit] == 1 and isinstance(value, int) else round(value / units[unit], precision)
    return f"{number} {unit}".rstrip()


def at_least(text: str, is_lower_bound: bool) -> str:
    """Put ``≥`` before a figure that is a lower bound; an unknown figure stays ``–``."""
    return f"≥ {text}" if is_lower_bound and text != UNKNOWN_TEXT else text
