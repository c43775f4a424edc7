"""What does not add up, such as the time of each call: count, sum, extremes and a sample, merged associatively."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class Spread:
    """How a measure that does not add up was distributed over the calls.

    ``first`` is the first call's. ``sample`` holds at most ``Spread.SIZE`` values, those of which a hash of the time of
    start, in ``hashes``, is the smallest: so it is the same whatever the order they come in, and in whatever groups.
    It holds all values where there are no more. Both are in the order of the values.
    """

    count: int
    sum: int
    min: int
    max: int
    first: int
    sample: tuple[int, ...]
    hashes: tuple[int, ...]

    SIZE = 256

    @classmethod
    def of(cls, calls: Sequence[tuple[int, int]]) -> Spread:
        """From (start in ns, value), in any order, at least one."""
        values = [value for _, value in calls]
        sample = cls._by_value(nsmallest(cls.SIZE, ((scrambled(start), value) for start, value in calls)))
        return cls(len(values), sum(values), min(values), max(values), min(calls)[1], *sample)

    def __add__(self, later: Spread) -> Spread:
        """The spread of the calls of both."""
        sample = self.sample, self.hashes
        entering = [*zip(later.hashes, later.sample)]
        if len(self.sample) == self.SIZE:  # in a long loop hardly any value enters the sample
            highest = max(self.hashes)
            entering = [one for one in entering if one[0] <= highest]
        if entering:
            sample = self._by_value(sorted([*zip(self.hashes, self.sample), *entering])[: self.SIZE])
        return Spread(
            self.count + later.count,
            self.sum + later.sum,
            min(self.min, later.min),
            max(self.max, later.max),
            self.first,
            *sample,
        )

    @staticmethod
    def _by_value(chosen: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        values = sorted((value, number) for number, value in chosen)
        return tuple(value for value, _ in values), tuple(number for _, number in values)

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` (0 to 1) of the sample lies, linear between two neighbours."""
        return quantile(self.sample, q)

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def quantile(values: Sequence[float], q: float) -> float:
    """The value below which the share ``q`` (0 to 1) of sorted values lies, linear between two neighbors."""
    at = q * (len(values) - 1)
    low = int(at)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (at - low)


def scrambled(number: int) -> int:
    """A hash of 63 bits that is the same in every process: the finaliser of SplitMix64 (Steele et al., 2014)."""
    mask = 2**64 - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return (number ^ (number >> 31)) >> 1


class SampleKey(NamedTuple):
    """What a ``Spread`` is of. ``layer`` is an index, negative for what belongs to no layer. ``measure`` is one of

    - ``cpu_ns``: the duration of a forward range, one value a call, its child layers included, and garbage collections
      not;
    - ``peak_bytes``: how far memory rose inside a call, or a stretch of backward, above what there was at its start;
    - ``kept_bytes``: what was allocated directly in a forward call and left for backward (docs/memory.md);
    - ``device_peak_bytes``: the peak of the device, under the layer and phase where it was reached, one value a cycle;
    - ``step_cpu_ns``, ``step_device_ns``: what one step took in the layer and all below it (of no layer: in what
      belongs to none), one value a step;
    - ``step_ns`` (of no layer): how long a step lasted; and outside all layers ``step_data_ns`` for loading data,
      ``step_optimizer_ns`` in the optimizer, ``step_copy_ns`` for copies between host and device, ``step_wait_ns``
      waiting for the device, ``step_gc_ns`` in garbage collections, ``step_other_ns`` in other ops, whatever the phase;
      ``step_gap_ns`` in no op, no layer and no range of torch's; ``step_overlap_ns``: how much of all this several
      threads did at the same time. A step is the sum of its models, of what was not selected, and of these, the overlap
      taken off. On a device (data, optimizer, copy, other): what was launched there. Where ranges of a trace are the
      layers, waiting and copies count inside of them, too, and are in the overlap once more.
    """

    layer: int
    phase: str
    rank: int
    device: str
    measure: str


def of_smallest_hash(numbers: Iterable[int], size: int, salt: int = 0) -> tuple[int, ...]:
    return tuple(sorted(nsmallest(size, numbers, key=lambda number: scrambled(number ^ salt))))
