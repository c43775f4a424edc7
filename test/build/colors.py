"""Colors and their contrast, by the Web Content Accessibility Guidelines (https://www.w3.org/TR/WCAG22)."""

from __future__ import annotations

from collections.abc import Sequence


def luminance(color: Sequence[float]) -> float:
    """The relative luminance of an sRGB color, from 0 to 1. ``color``: red, green and blue, from 0 to 255."""
    parts = [part / 255 for part in color[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear))
