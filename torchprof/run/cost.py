"""``Cost``: the measures that are summed over layers, ops and ranks. A ``Cost`` holds additive *self*
measures only. Tables, sort keys and files show those of ``MEASURES``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from operator import add, attrgetter

from torchprof.run.formats import FORMATS, ReportCell, Unit


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
