"""Checks and conversions of the values in a trace's JSON, which may be anything."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from torchprof.traces.columns import BEYOND


def nanoseconds(microseconds: float) -> int:
    """The same time in ns. The whole part and the fraction are converted separately, so that no digit is lost."""
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def parse_int(value: Any, default: int | None = None) -> int:
    """An integer, from a number or from text. Other values give the default; without one, they raise ValueError."""
    try:
        return int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, TypeError):
        if default is None:
            raise ValueError from None
        return default


def encodable_text(value: Any) -> str:
    """A string that UTF-8 can encode; "" for other values.

    JSON can escape half of a surrogate pair, which is not a character: it is replaced by "?".
    """
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def parse_shape(value: Any) -> Any:
    """The sizes of a tensor as a tuple, or a tuple of these for a list of tensors; None for other values."""
    if not isinstance(value, list):
        return None
    if value and all(isinstance(part, list) for part in value):
        tensors = tuple(map(_sizes, value))
        return None if None in tensors else tensors
    return _sizes(value)


def _sizes(value: Iterable[Any]) -> tuple[int, ...] | None:
    sizes = tuple(value)
    return sizes if all(type(size) is int and 0 <= size < BEYOND for size in sizes) else None


def frozen(value: Any) -> Any:
    """The value with tuples in place of lists, and None in place of values that JSON cannot hold (complex numbers)."""
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if known else None
