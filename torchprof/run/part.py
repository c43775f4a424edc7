"""The parts of a run: how each is split by rank, renumbered, added up over cycles, merged over ranks, written and read.

``RUN_PARTS`` in ``torchprof.run.run`` lists them. Metadata, layers and rows are not parts: they depend on each other.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from operator import attrgetter
from sys import intern
from types import NoneType
from typing import Any, NamedTuple, Protocol, TypeVar, get_args, get_origin, get_type_hints

from torchprof.run.groups import lists_by_key
from torchprof.run.words import NOT_SELECTED, PHASES

# JSON values. A file may be damaged or changed by hand, so each is checked: these functions raise TypeError,
# ValueError, KeyError or OverflowError if a value does not fit.


_LARGEST = 2**63 - 1
"""No number in a file is larger: it fits into 64 bits, with its sign."""


def demand(holds: bool, what: str) -> None:
    """Raise an error about ``what`` unless it ``holds``."""
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
    """Columns of integers of one length: layers, phases and others. ``limits``: by the name of a column, the least
    number in it and the first that is too large. ``of``: what has the columns, in words."""
    columns = {name: array("q", document[name]) for name in names}
    demand(len({len(column) for column in columns.values()}) == 1, f"columns of the {of} that differ in length")
    for name, (low, high) in {"layer": (NOT_SELECTED, layers), "phase": (0, len(PHASES)), **limits}.items():
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
        entry = _reader(parts[0])
        return lambda value: tuple(map(entry, read_list(value)))
    if get_origin(kind) is tuple or hasattr(kind, "_fields"):
        return _record_reader(kind, [*map(_reader, parts or get_type_hints(kind).values())])
    if kind is Any:
        return _plain_value
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind

    def as_it_is(value: Any) -> Any:
        if (type(value) is not kind and not (kind is float and type(value) is int)) or (
            type(value) is int and abs(value) > _LARGEST
        ):
            raise ValueError(f"{value!r:.80} instead of {kind.__name__}")
        return value

    # A string is interned: a thousand runs contain the same names.
    return (lambda value: intern(as_it_is(value))) if kind is str else as_it_is


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


def _plain_value(value: Any) -> Any:
    """A plain value, with tuples in place of lists."""
    demand(not isinstance(value, dict), f"{value!r:.80} instead of a plain value")
    return tuple(_plain_value(each) for each in value) if isinstance(value, list) else value


# From some passes to all


class Scale(NamedTuple):
    """What the figures of some passes of a loop are multiplied by, to be those of all: ``counting`` for calls, bytes
    and FLOPs, ``timing`` for times. Each is a fraction (numerator, denominator) of positive integers."""

    counting: tuple[int, int]
    timing: tuple[int, int]

    def on(self, device: str) -> Scale:
        """The scale of what was measured on a device ("cpu", "device", "cuda:0"): only the CPU's times are longer where
        it is profiled."""
        return self if device == "cpu" else Scale(self.counting, self.counting)

    def counts(self, values: Iterable[int]) -> array[int]:
        """Each is rounded alone: layers that are called equally often still are."""
        return array("q", map(self.number, values))

    def times(self, values: Iterable[int]) -> array[int]:
        """What is rounded off one time is added to the next: their sum is right, and a time of 0 stays 0."""
        numerator, denominator = self.timing
        times = array("q")
        so_far = before = 0
        for ns in values:
            so_far += ns * numerator
            times.append(so_far // denominator - before)
            before = so_far // denominator
        return times

    def number(self, count: int) -> int:
        """One count."""
        return (2 * count * self.counting[0] + self.counting[1]) // (2 * self.counting[1])

    def total(self, ns: int) -> int:
        """A sum of times."""
        return ns * self.timing[0] // self.timing[1]

    def single(self, ns: int) -> int:
        """The time of one call or step, as a mean."""
        return ns * self.timing[0] * self.counting[1] // (self.timing[1] * self.counting[0])


# Parts of a run

_Value = TypeVar("_Value")


class RunPart(Protocol[_Value]):
    """A part of a run. Its value is what the field of ``Run`` has; it is never changed."""

    def of_ranks(self, value: _Value, ranks: Collection[int]) -> dict[int, _Value]:
        """The value of each of these ranks alone."""

    def renumbered(self, value: _Value, to: Sequence[int]) -> _Value:
        """The same with other indices of layers. ``to``: the new index at each old one. Its last entries are -2 and -1:
        Python counts negative indices from the end, so these keep their meaning."""

    def added(self, before: _Value, cycle: _Value) -> _Value:
        """The value of the earlier cycles of a rank and one more."""
        return cycle

    def scaled(self, value: _Value, scale: Scale) -> _Value:
        """The value of all passes of a rank, as estimated from that of some."""
        return value

    def merge(self, so_far: Any, value: _Value) -> Any:
        """The values so far and that of more ranks. ``so_far`` is None at first; it may be changed."""

    def merged(self, so_far: Any) -> _Value:
        """The value of all ranks. It does not depend on their order."""
        return so_far  # type: ignore[no-any-return]

    def to_json(self, value: _Value) -> Any:
        """What the file has of it. A list that may be long is an iterator."""

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> _Value:
        """Read what ``to_json`` wrote, of a run of so many ``layers`` and these ``ranks``. Raises an error if a value
        does not fit."""


class PerRank(RunPart[tuple[Any, ...]]):
    """A part that is a tuple of objects of one class, in the order of their ``rank``: one for each of its devices. The
    cycles of a device add up with ``+``."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def of_ranks(self, value: tuple[Any, ...], ranks: Collection[int]) -> dict[int, tuple[Any, ...]]:
        items = lists_by_key((item.rank, item) for item in value)
        return {rank: tuple(items[rank]) for rank in ranks}

    def renumbered(self, value: tuple[Any, ...], to: Sequence[int]) -> tuple[Any, ...]:
        return tuple(item.renumbered(to) for item in value)

    def scaled(self, value: tuple[Any, ...], scale: Scale) -> tuple[Any, ...]:
        return tuple(item.scaled(scale) for item in value)

    def merge(self, so_far: Any, value: tuple[Any, ...]) -> Any:
        return [*(so_far or ()), *value]

    def merged(self, so_far: Any) -> tuple[Any, ...]:
        return tuple(sorted(so_far, key=attrgetter("rank")))

    def to_json(self, value: tuple[Any, ...]) -> Any:
        return map(fields_of, value)

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> tuple[Any, ...]:
        items: tuple[Any, ...] = read_as(tuple[self._kind, ...], stored)  # type: ignore[name-defined]
        for item in items:
            demand(item.rank in ranks, f"no metadata of rank {item.rank}")
            item.check(layers)
        return items

    def added(self, before: tuple[Any, ...], cycle: tuple[Any, ...]) -> tuple[Any, ...]:
        sums = {(item.rank, item.device): item for item in before}
        for item in cycle:
            known = sums.get((item.rank, item.device))
            sums[item.rank, item.device] = item if known is None else known + item
        return tuple(sums[key] for key in sorted(sums))
