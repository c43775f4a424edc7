"""The values in a trace's JSON, checked: a file may hold anything."""

from __future__ import annotations

from collections.abc import Iterable
from math import isfinite
from typing import Any

from torchprof.traces.columns import BEYOND


def nanoseconds(microseconds: float) -> int:
    whole = int(microseconds)
    return whole * 1000 + round((microseconds - whole) * 1000)


def whole_number(value: Any, otherwise: int | None = None) -> int:
    """A whole number, as torch writes it or as text. Raises ValueError for what is none, unless there is another."""
    try:
        return int(value, 0) if isinstance(value, str) else int(value)
    except (ValueError, TypeError):
        if otherwise is None:
            raise ValueError from None
        return otherwise


def text_of(value: Any) -> str:
    """A string that can be written into a file; "" for what is none.

    Half of a pair of code units that JSON escaped is no character.
    """
    return value.encode(errors="replace").decode() if isinstance(value, str) else ""


def shape_of(value: Any) -> Any:
    """The sizes of a tensor, or of each tensor of a list, as tuples; None for what is neither."""
    if not isinstance(value, list):
        return None
    if value and all(isinstance(one, list) for one in value):
        tensors = tuple(map(_sizes, value))
        return None if None in tensors else tensors
    return _sizes(value)


def _sizes(value: Iterable[Any]) -> tuple[int, ...] | None:
    sizes = tuple(value)
    return sizes if all(type(size) is int and 0 <= size < BEYOND for size in sizes) else None


def frozen(value: Any) -> Any:
    """Lists as tuples; what JSON does not know, as a complex number, as None."""
    if isinstance(value, (list, tuple)):
        return tuple(map(frozen, value))
    known = value is None or isinstance(value, (bool, int, str)) or (isinstance(value, float) and isfinite(value))
    return value if known else None
