"""Converts JSON values to types, and checks them: a file may be damaged, or changed by hand. All functions raise
TypeError, ValueError, KeyError or OverflowError if a value does not fit."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from sys import intern
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from torchprof.run.words import NOT_SELECTED, PHASES


def demand(holds: bool, what: str) -> None:
    if not holds:
        raise ValueError(what)


def demand_layer(value: Any, layers: int) -> None:
    """Check the ``layer`` and the ``phase`` of a value in a run of so many ``layers``."""
    if not (NOT_SELECTED <= value.layer < layers and value.phase in PHASES):
        raise ValueError(f"the layer or the phase of {value!r:.200}")


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass. Unlike ``asdict`` it copies no values: a thousand ranks have millions."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def read_columns(
    document: Mapping[str, Any], names: Sequence[str], layers: int, limits: Mapping[str, tuple[int, int]], of: str
) -> dict[str, array[int]]:
    """Columns of integers of one length: layers, phases and others. ``limits``: the least number of a column, and that
    above its greatest."""
    limits = {"layer": (NOT_SELECTED, layers), "phase": (0, len(PHASES)), **limits}
    columns = {name: array("q", document[name]) for name in names}
    demand(len({len(column) for column in columns.values()}) == 1, f"columns of the {of} that differ in length")
    for name, (low, high) in limits.items():
        column = columns[name]
        demand(not column or low <= min(column) <= max(column) < high, f"a number in {name!r} of the {of}")
    return columns


def read_as(kind: Any, value: Any) -> Any:
    """Convert a JSON value to the type ``kind``, an annotation: JSON has only lists and dicts."""
    return _reader(kind)(value)


@cache
def _reader(kind: Any) -> Callable[[Any], Any]:
    """The function that converts JSON values to a type. Cached: a file has a great many values of few types."""
    parts = get_args(kind)
    if NoneType in parts:
        known = _reader(parts[0])
        return lambda value: None if value is None else known(value)
    if isinstance(kind, type) and is_dataclass(kind):
        readers = {name: _reader(hint) for name, hint in get_type_hints(kind).items()}
        return lambda value: kind(**{name: readers[name](each) for name, each in value.items()})
    if parts == (int, ...):
        return lambda value: tuple(array("q", read_list(value)))
    if parts and parts[-1] is ...:
        each_of_them = _reader(parts[0])
        return lambda value: tuple(map(each_of_them, read_list(value)))
    if get_origin(kind) is tuple or hasattr(kind, "_fields"):
        return _record_reader(kind, [*map(_reader, parts or get_type_hints(kind).values())])
    if kind is Any:
        return _plain_value
    if kind is str:
        return _text
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind

    def as_it_is(value: Any) -> Any:
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise ValueError(f"{value!r:.80} instead of {kind.__name__}")
        return value

    return as_it_is


def _record_reader(kind: Any, readers: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
    """The function that reads a tuple or named tuple, part by part. Parts with defaults may be missing."""
    has_names = hasattr(kind, "_fields")
    least = len(kind._fields) - len(kind._field_defaults) if has_names else len(readers)

    def record(value: Any) -> Any:
        if not least <= len(read_list(value)) <= len(readers):
            raise ValueError(f"{value!r:.80}, which is not of {len(readers)} parts")
        each = [reader(part) for reader, part in zip(readers, value)]
        return kind(*each) if has_names else tuple(each)

    return record


def read_list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.80} instead of a list")
    return value


def _text(value: Any) -> str:
    """A string, interned: a thousand runs contain the same names."""
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} instead of str")
    return intern(value)


def _plain_value(value: Any) -> Any:
    """A plain value, with tuples in place of lists."""
    demand(not isinstance(value, dict), f"{value!r:.80} instead of a plain value")
    return tuple(_plain_value(each) for each in value) if isinstance(value, list) else value
