"""``Cost``: the measures that are summed over layers, ops and ranks; and how numbers with units become text. A ``Cost``
holds additive *self* measures only. Tables, sort keys and files show those of ``MEASURES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from operator import add, attrgetter
from typing import NamedTuple, TypeAlias

Value = str | int | float | None
"""What a cell of a table stands for."""


class Unit(Enum):
    """The unit of a number. It decides how the number is formatted."""

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
    - ``unit``: "ns", "bytes", "count", "per second", "share" (a fraction of 1), "ratio"; "" for text.
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


UNKNOWN = "–"
AT_LEAST = "≥"


def as_lower_bound(cell: ReportCell) -> ReportCell:
    """The same figure as a lower bound."""
    return ReportCell(f"{AT_LEAST} {cell}", cell.value, cell.unit, True, cell.ids)


@dataclass(frozen=True, slots=True)
class Cost:
    """Additive self measures: times in nanoseconds, memory in bytes. ``device`` is everything but the CPU.

    - ``cpu_ns``: time on the CPU. ``device_ns``: time of kernels, copies and sets on devices.
    - ``cpu_allocated``, ``cpu_freed``, ``device_allocated``, ``device_freed``: bytes of memory.
    - ``macs`` are multiply-accumulates, ``flops`` floating-point operations.
    - ``uncounted`` is the number of op calls and kernels whose FLOPs are unknown. If it is not 0, ``macs`` and
      ``flops`` are lower bounds.
    - ``collective_ns`` is the duration of the ranges of collectives, from start to end. These ranges may end on another
      thread, so their time is not in ``cpu_ns``. If the CPU runs the collective (gloo), it is how long the collective
      took, including the wait for the slowest rank.
    """

    cpu_ns: int = 0
    device_ns: int = 0
    cpu_allocated: int = 0
    cpu_freed: int = 0
    device_allocated: int = 0
    device_freed: int = 0
    macs: int = 0
    flops: int = 0
    uncounted: int = 0
    collective_ns: int = 0

    def __add__(self, other: Cost) -> Cost:
        if self is NO_COST:
            return other
        if not other:
            return self
        return Cost(*map(add, _values(self), _values(other)))

    def __bool__(self) -> bool:
        return any(_values(self))


NO_COST = Cost()
FIELDS: tuple[str, ...] = tuple(field.name for field in fields(Cost))
_values: Callable[[Cost], tuple[int, ...]] = attrgetter(*FIELDS)


def sum_of_costs(costs: Iterable[Cost]) -> Cost:
    """The sum of costs. It takes less time than adding one after the other."""
    several = [cost for cost in costs if cost is not NO_COST]
    return several[0] if len(several) == 1 else Cost(*map(sum, zip(*map(_values, several)))) if several else NO_COST


@dataclass(frozen=True)
class Measure:
    """What a table can show of a ``Cost``: the sum of ``fields``, each with its sign: memory is shown net, allocated
    minus freed. ``unit``: of the sum. ``{device}`` in the ``heading`` stands for the kind of device that was profiled.
    ``lower_bound_if``: the field that counts what this may have missed. If it is not 0, this is a lower bound."""

    heading: str
    unit: Unit
    fields: tuple[tuple[str, int], ...]
    lower_bound_if: str | None = None

    def of(self, cost: Cost) -> int:
        """The value of this measure in a cost, in its ``unit``."""
        value = 0
        for name, sign in self.fields:
            value += sign * getattr(cost, name)
        return value

    def is_lower_bound(self, cost: Cost) -> bool:
        """Whether the cost has work that this measure could not count."""
        return self.lower_bound_if is not None and bool(getattr(cost, self.lower_bound_if))

    def text(self, value: float) -> ReportCell:
        return FORMATS[self.unit](value)


MEASURES = (
    Measure("CPU total", Unit.TIME, (("cpu_ns", 1),)),
    Measure("{device} total", Unit.TIME, (("device_ns", 1),)),
    Measure("CPU Mem", Unit.BYTES, (("cpu_allocated", 1), ("cpu_freed", -1))),
    Measure("{device} Mem", Unit.BYTES, (("device_allocated", 1), ("device_freed", -1))),
    Measure("MACs", Unit.COUNT, (("macs", 1),), lower_bound_if="uncounted"),
    Measure("FLOPs", Unit.COUNT, (("flops", 1),), lower_bound_if="uncounted"),
)


def as_key(heading: str) -> str:
    """A heading as users write it in options: ``Self CPU total`` is ``self_cpu_total``."""
    return heading.lower().replace(" ", "_")


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
    """A time in three digits: ``81.2ms``."""
    unit, size = next(((unit, size) for unit, size in (("s", 1e9), ("ms", 1e6)) if ns >= 0.9995 * size), ("us", 1e3))
    number = ns / size
    return f"{number:.0f}{unit}" if number >= 100 else f"{number:.3g}{unit}"


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
