"""Figures as text: cells of tables, bounds, a format for each unit, ranks in words; and amounts as users write them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from fractions import Fraction
from itertools import chain, groupby, pairwise
from operator import eq
from typing import Any, NamedTuple, TypeAlias

UNKNOWN = "–"
AT_LEAST = "≥"

Value = str | int | float | None
"""What a cell of a table stands for."""


class Unit(Enum):
    """The unit of a measured figure. It decides how the figure is formatted."""

    TIME = "ns"
    BYTES = "bytes"
    COUNT = "count"


class Bound(Enum):
    """Whether a figure is exact, a lower bound, unknown, or blank."""

    EXACT = "exact"
    AT_LEAST = "at least"  # the sum is incomplete; shown with ≥
    UNKNOWN = "unknown"  # shown as –
    BLANK = "blank"  # does not apply; shown as an empty cell


@dataclass(slots=True)  # not frozen: a table makes thousands
class ReportCell:
    """A cell of a table that is a figure or an id.

    - ``text``: what a table shows; also ``str()`` of the cell.
    - ``value``: the number in ``unit``, or the id as files write it: the path of a layer. None: unknown.
    - ``unit``: the text of a ``Unit`` ("ns", "bytes", "count"), or that of a derived figure: "per second", "share" (a
      fraction of 1), "ratio"; "" for text.
    - ``at_least``: the number is a lower bound.
    - ``ids``: more ids of the row, by name, such as the layer that an operator ran in.
    """

    text: str
    value: Value = None
    unit: str = ""
    at_least: bool = False
    ids: Mapping[str, Value | list[str]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.text

    def written(self, text: str) -> ReportCell:
        """The same with another text."""
        return ReportCell(text, self.value, self.unit, self.at_least, self.ids)


Cell: TypeAlias = str | ReportCell
"""A cell of a table: a figure or an id, or other text."""


class Figure(NamedTuple):
    """A number and its ``Bound``. ``value`` has no meaning if the bound is UNKNOWN or BLANK. ``lead``: a word before
    it, such as "first" for the figure of a first call."""

    value: float
    bound: Bound = Bound.EXACT
    lead: str = ""

    @classmethod
    def of_sum(cls, value: float, is_complete: bool) -> Figure:
        """A sum: a lower bound if it is incomplete, and unknown if it is incomplete and 0."""
        return cls(value, Bound.EXACT if is_complete else Bound.AT_LEAST if value else Bound.UNKNOWN)

    @property
    def is_known(self) -> bool:
        """Whether there is a number to show."""
        return self.bound in (Bound.EXACT, Bound.AT_LEAST)

    def text(self, write: Callable[[float], ReportCell]) -> Cell:
        """The text of a table cell; ``write`` formats the value with its unit."""
        if not self.is_known:
            return UNKNOWN if self.bound is Bound.UNKNOWN else ""
        cell = write(self.value)
        if self.bound is Bound.AT_LEAST:
            cell = as_lower_bound(cell)
        return cell.written(f"{self.lead} {cell}") if self.lead else cell


def as_lower_bound(cell: ReportCell) -> ReportCell:
    """The same figure as a lower bound."""
    return ReportCell(f"{AT_LEAST} {cell}", cell.value, cell.unit, True, cell.ids)


def format_time(ns: float) -> ReportCell:
    """Nanoseconds in the format of torch's tables: ``49.693us``, ``1.808ms``, ``2.500s``."""
    if abs(ns) >= 1e9:
        text = f"{ns / 1e9:.3f}s"
    elif abs(ns) >= 1e6:
        text = f"{ns / 1e6:.3f}ms"
    else:
        text = f"{ns / 1e3:.3f}us"
    return ReportCell(text, ns, "ns")


def short_time(ns: float) -> str:
    """A time in three digits, as text alone: ``81.2ms``."""
    # What would round to 1000ms is shown in s.
    unit, size = ("s", 1e9) if ns >= 0.9995e9 else ("ms", 1e6) if ns >= 0.9995e6 else ("us", 1e3)
    number = ns / size
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


def as_range(least: str, most: str) -> str:
    """Two figures as a range, with their unit once if both have it: "81–95.2ms"."""
    unit = most.lstrip("0123456789.")
    return f"{least.removesuffix(unit) if least.lstrip('0123456789.') == unit else least}–{most}"


def format_memory(nbytes: float) -> ReportCell:
    """Bytes in the format of torch's tables, in units of 1024: ``16 B``, ``756.50 KB``, ``3.71 MB``."""
    for unit, size in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if abs(nbytes) >= size:
            return ReportCell(f"{nbytes / size:.2f} {unit}", nbytes, "bytes")
    return ReportCell(f"{nbytes} B", nbytes, "bytes")


def format_count(number: float) -> ReportCell:
    """A count in units of 1000: ``512``, ``61.71 K``, ``11.17 G``."""
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(number) >= size * 0.999995:  # what would round to 1000.00 of the smaller unit has this one
            return ReportCell(f"{number / size:.2f} {unit}", number, "count")
    return ReportCell(f"{number:.0f}" if number == round(number) else f"{number:.2f}", number, "count")


def format_rate(per_s: float) -> ReportCell:
    """A count per second, written as a count."""
    return ReportCell(str(format_count(per_s)), per_s, "per second")


def format_share(share: float) -> ReportCell:
    """A fraction of 1 in percent: ``12.5%``."""
    return ReportCell(f"{share:.1%}", share, "share")


def format_number(number: int) -> ReportCell:
    """A whole number with all its digits: calls, ranks, steps."""
    return ReportCell(str(number), number, "count")


FORMATS: Mapping[Unit, Callable[[float], ReportCell]] = {
    Unit.TIME: format_time,
    Unit.BYTES: lambda value: format_memory(round(value)),
    Unit.COUNT: format_count,
}
"""The format of a value by its unit. Values may be means over calls, and so no integers."""


class NumberRanges(Sequence[int]):
    """Different whole numbers, ascending, as ranges: a job of a million ranks takes no more memory than one of two."""

    def __init__(self, ranges: Iterable[range]) -> None:
        self.ranges = tuple(filter(len, ranges))

    @classmethod
    def of(cls, numbers: Iterable[int]) -> NumberRanges:
        if isinstance(numbers, cls):
            return numbers
        ordered = enumerate(sorted(set(numbers)))
        # Of successive numbers, each minus its position is the same.
        rows = ([number for _, number in group] for _, group in groupby(ordered, lambda line: line[1] - line[0]))
        return cls(range(row[0], row[-1] + 1) for row in rows)

    @classmethod
    def below(cls, size: int, without: Iterable[int]) -> NumberRanges:
        """The numbers from 0 up to ``size`` that are not ``without``."""
        ends = [-1, *sorted({number for number in without if 0 <= number < size}), size]
        return cls(range(last + 1, end) for last, end in pairwise(ends))

    def __len__(self) -> int:
        return sum(map(len, self.ranges))

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.ranges)

    def __contains__(self, number: object) -> bool:
        return any(number in numbers for numbers in self.ranges)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(eq, self, other))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<{numbers_in_words(self)}>"


def ranks_in_words(ranks: Iterable[int], noun: str = "rank") -> str:
    """As in "rank 2", "ranks 2 and 5" and "ranks 0 to 3, 5 and 7"."""
    numbers = NumberRanges.of(ranks)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {numbers_in_words(numbers)}"


def numbers_in_words(numbers: Iterable[int]) -> str:
    """As in "2", "2 and 5" and "0 to 3, 5 and 7"."""
    words: list[str] = []
    for row in NumberRanges.of(numbers).ranges:
        words += [f"{row[0]} to {row[-1]}"] if len(row) > 2 else map(str, row)
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


# Amounts as users write them: ``24GB``, ``4.2G``, ``10k``, ``12ms``.

UNITS = {
    Unit.TIME: {"ns": 1, "us": 1000, "µs": 1000, "ms": 10**6, "s": 10**9},
    Unit.BYTES: {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40},
    Unit.COUNT: {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15},
}
"""How large each unit is: in ns, in bytes, or a count. Bytes go by 1024, counts by 1000."""
EXAMPLES = {Unit.TIME: "12ms", Unit.BYTES: "1.5GB", Unit.COUNT: "4.2G"}
_PREFIXES = {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}
_OTHER_SPELLINGS = {
    Unit.TIME: {"μs": 1000},  # with the Greek letter; the other one is the micro sign
    Unit.BYTES: _PREFIXES | {f"{prefix}ib": size for prefix, size in _PREFIXES.items()},
    Unit.COUNT: {},
}
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-zµμ]*)")


def parse_amount(text: str, unit: Unit) -> Fraction | None:
    """The amount in ns, in bytes, or as a count; None if the text is not such an amount. Units of bytes and counts may
    be written in small letters; those of time are as in ``UNITS``."""
    if (match := _AMOUNT.fullmatch(text.strip())) is None:
        return None
    spelled = str if unit is Unit.TIME else str.lower
    sizes = {spelled(name): size for name, size in (UNITS[unit] | _OTHER_SPELLINGS[unit]).items()}
    size = sizes.get(spelled(match[2]))
    return None if size is None else Fraction(match[1]) * size
