"""What work costs, and the one place where units become text.

A ``Cost`` holds additive *self* measures only: whatever is summed over layers, ops or ranks is summed here. Each field
declares under which heading it is shown and in which unit; tables, sort keys and files read that declaration.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from operator import attrgetter


class Unit(Enum):
    """How an integer is written for people."""

    TIME = "ns"
    BYTES = "bytes"


@dataclass(frozen=True)
class Shown:
    """How one field of ``Cost`` is shown: under a heading, with a sign, in a unit.

    Fields of one heading are added up with their signs (memory is shown net: allocated minus freed). ``{device}`` in a
    heading stands for the kind of device that was profiled.
    """

    heading: str
    unit: Unit
    sign: int = 1


def _shown(heading: str, unit: Unit, sign: int = 1) -> int:
    field: int = dataclasses.field(default=0, metadata={"shown": Shown(heading, unit, sign)})
    return field


@dataclass(frozen=True, slots=True)
class Cost:
    """Additive self measures: times in nanoseconds, memory in bytes. ``device`` is whatever is not the CPU."""

    cpu_ns: int = _shown("CPU total", Unit.TIME)
    device_ns: int = _shown("{device} total", Unit.TIME)
    cpu_allocated: int = _shown("CPU Mem", Unit.BYTES)
    cpu_freed: int = _shown("CPU Mem", Unit.BYTES, -1)
    device_allocated: int = _shown("{device} Mem", Unit.BYTES)
    device_freed: int = _shown("{device} Mem", Unit.BYTES, -1)

    def __add__(self, other: Cost) -> Cost:
        if not other:
            return self
        return Cost(*[mine + theirs for mine, theirs in zip(_values(self), _values(other))])

    def __bool__(self) -> bool:
        return any(_values(self))


FIELDS: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Cost))
_values: Callable[[Cost], tuple[int, ...]] = attrgetter(*FIELDS)


@dataclass(frozen=True)
class Measure:
    """One thing a table can show of a ``Cost``: the fields that share a heading, each with its sign."""

    heading: str
    unit: Unit
    fields: tuple[tuple[str, int], ...]

    def of(self, cost: Cost) -> int:
        """The value of this measure in a cost, in nanoseconds or bytes."""
        return sum(sign * int(getattr(cost, name)) for name, sign in self.fields)

    def text(self, value: int) -> str:
        return format_time(value) if self.unit is Unit.TIME else format_memory(value)


def _measures() -> tuple[Measure, ...]:
    declared: dict[str, list[tuple[str, int]]] = {}
    units: dict[str, Unit] = {}
    for field in dataclasses.fields(Cost):
        shown: Shown = field.metadata["shown"]
        declared.setdefault(shown.heading, []).append((field.name, shown.sign))
        units[shown.heading] = shown.unit
    return tuple(Measure(heading, units[heading], tuple(fields)) for heading, fields in declared.items())


MEASURES: tuple[Measure, ...] = _measures()


def as_key(heading: str) -> str:
    """The name under which a column is asked for: ``Self CPU total`` is ``self_cpu_total``."""
    return heading.lower().replace(" ", "_")


def format_time(ns: float) -> str:
    """Nanoseconds as torch's own tables write them: ``49.693us``, ``1.808ms``, ``2.500s``."""
    if abs(ns) >= 1e9:
        return f"{ns / 1e9:.3f}s"
    if abs(ns) >= 1e6:
        return f"{ns / 1e6:.3f}ms"
    return f"{ns / 1e3:.3f}us"


def format_memory(nbytes: int) -> str:
    """Bytes as torch's own tables write them, in units of 1024: ``16 B``, ``756.50 KB``, ``3.71 MB``."""
    for unit, size in (("GB", 1024**3), ("MB", 1024**2), ("KB", 1024)):
        if abs(nbytes) >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"
