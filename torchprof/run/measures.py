"""What is measured: ``Cost`` has the measures that add up over layers, ops and ranks; a ``Spread`` is the distribution
of one that does not, such as the time of a call. Adding either is associative. A ``Trial`` is what a remedy gained."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from heapq import nsmallest
from itertools import chain
from math import comb
from operator import add, attrgetter, itemgetter
from sys import intern
from typing import Any, NamedTuple

from torchprof.run.formats import FORMATS, ReportCell, Unit, as_range, format_time
from torchprof.run.groups import lists_by_key
from torchprof.run.part import PerRank, RunPart, Scale, demand, demand_layer, fields_of
from torchprof.run.words import FORWARD, OUTSIDE


@dataclass(frozen=True, slots=True)
class Cost:
    """Additive self measures: times in nanoseconds, memory in bytes. ``device`` is everything but the CPU.

    - ``cpu_ns``: time on the CPU. ``device_ns``: time of kernels, copies and sets on devices.
    - ``cpu_allocated``, ``cpu_freed``, ``device_allocated``, ``device_freed``: bytes of memory.
    - ``macs`` are multiply-accumulates, ``flops`` floating-point operations.
    - ``uncounted``: the number of op calls and kernels of unknown FLOPs: then ``macs`` and ``flops`` are lower bounds.
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
    """A column of tables that shows something of a ``Cost``.

    - ``heading``: ``{device}`` in it stands for the kind of device that was profiled.
    - ``unit``: of the value, which is the sum of ``fields``, each with its sign: memory is allocated minus freed.
    - ``lower_bound_if``: the field that counts what this may have missed. If it is not 0, this is a lower bound.
    """

    heading: str
    unit: Unit
    fields: tuple[tuple[str, int], ...]
    lower_bound_if: str | None = None

    def of(self, cost: Cost) -> int:
        """The value of this measure in a cost, in its ``unit``."""
        return sum(sign * getattr(cost, name) for name, sign in self.fields)

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


# Measures that do not add up


@dataclass(frozen=True, slots=True)
class Spread:
    """The distribution of a measure over calls.

    - ``count``: how many values were added. ``sum``, ``min``, ``max``: of all of them.
    - ``first``: the value of the first call.
    - ``sample``: all values, or ``Spread.SIZE`` of them: those with the smallest ``hashes`` of the start times of their
      calls. So it does not depend on the order or grouping of the additions. Both are sorted by value.
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
        """The spread of calls, each (start in ns, value), in any order; at least one."""
        values = [value for _, value in calls]
        hashed = ((scrambled(start), value) for start, value in calls)
        sample = cls._by_value(nsmallest(cls.SIZE, hashed) if len(calls) > cls.SIZE else hashed)
        return cls(len(values), sum(values), min(values), max(values), min(calls)[1], *sample)

    @classmethod
    def of_all(cls, spreads: Sequence[Spread]) -> Spread:
        """The spread of the calls of all of these, at least one: their sum, in one pass."""
        pairs = chain.from_iterable(zip(spread.hashes, spread.sample) for spread in spreads)
        return cls(
            sum(spread.count for spread in spreads),
            sum(spread.sum for spread in spreads),
            min(spread.min for spread in spreads),
            max(spread.max for spread in spreads),
            spreads[0].first,
            *cls._by_value(nsmallest(cls.SIZE, pairs)),
        )

    def __add__(self, later: Spread) -> Spread:
        sample = self.sample, self.hashes
        entering = [*zip(later.hashes, later.sample)]
        if len(self.sample) == self.SIZE:  # in a long loop, few values enter the sample
            highest = max(self.hashes)
            entering = [pair for pair in entering if pair[0] <= highest]
        if len(entering) == 1 and len(self.sample) < self.SIZE:  # as in a cycle of one step
            sample = self._sample_with(*entering[0])
        elif entering:
            sample = self._by_value(sorted([*zip(self.hashes, self.sample), *entering])[: self.SIZE])
        return Spread(
            self.count + later.count,
            self.sum + later.sum,
            min(self.min, later.min),
            max(self.max, later.max),
            self.first,
            *sample,
        )

    def _sample_with(self, hash_of_start: int, value: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sample and the hashes with one more value."""
        first, last = bisect_left(self.sample, value), bisect_right(self.sample, value)
        slot = bisect_left(self.hashes, hash_of_start, first, last)  # equal values are sorted by their hashes
        sample = (*self.sample[:slot], value, *self.sample[slot:])
        return sample, (*self.hashes[:slot], hash_of_start, *self.hashes[slot:])

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle it in half the time that a dataclass takes: the runs of many ranks go from process to process."""
        return Spread, (self.count, self.sum, self.min, self.max, self.first, self.sample, self.hashes)

    def scaled(self, scale: Scale, is_time: bool) -> Spread:
        """The distribution over all passes, as estimated from that over some."""
        count, single = scale.number(self.count), scale.single
        if not is_time:
            return replace(self, count=count, sum=scale.number(self.sum))
        sample = tuple(map(single, self.sample))
        least, most, first = single(self.min), single(self.max), single(self.first)
        return Spread(count, scale.total(self.sum), least, most, first, sample, self.hashes)

    @staticmethod
    def _by_value(hashed: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sample and the hashes of pairs (hash, value)."""
        pairs = sorted((value, hash_of_start) for hash_of_start, value in hashed)
        return tuple(value for value, _ in pairs), tuple(hash_of_start for _, hash_of_start in pairs)

    def quantile(self, q: float) -> float:
        return quantile(self.sample, q)

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def spreads_at(starts: Sequence[int]) -> Callable[[Sequence[int]], Spread]:
    """A function that makes the ``Spread`` of a value for each of these starts, which must be different. The hashes of
    the starts, which take most of the time, are computed once for all spreads."""
    hashes = [*map(scrambled, starts)]
    chosen = nsmallest(Spread.SIZE, range(len(starts)), hashes.__getitem__)
    first = min(range(len(starts)), key=starts.__getitem__)

    def spread(values: Sequence[int]) -> Spread:
        sample = Spread._by_value((hashes[index], values[index]) for index in chosen)
        return Spread(len(values), sum(values), min(values), max(values), values[first], *sample)

    return spread


def quantile(values: Sequence[float], q: float) -> float:
    """The quantile ``q`` (0 to 1) of sorted values, interpolated linearly."""
    position = q * (len(values) - 1)
    low = int(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


def scrambled(number: int) -> int:
    """A hash of 63 bits that is the same in every process: the finalizer of SplitMix64 (Steele et al., 2014)."""
    mask = 2**64 - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return (number ^ (number >> 31)) >> 1


def of_smallest_hash(numbers: Iterable[int], size: int, salt: int = 0) -> tuple[int, ...]:
    """The ``size`` numbers with the smallest hashes, sorted. Another ``salt`` gives another choice."""
    return tuple(sorted(nsmallest(size, numbers, key=lambda number: scrambled(number ^ salt))))


# The samples of a run


class SampleKey(NamedTuple):
    """What a ``Spread`` in ``Run.samples`` is of: a ``measure`` of a ``layer`` (by its index, negative for none) in a
    phase, on one ``rank`` and ``device``. ``measure`` is one of

    - ``cpu_ns``: the duration of a forward call, including child layers, without garbage collections;
    - ``no_grad_ns`` (models): the duration of a forward call without gradients, with the garbage collections
      in it, if the run has backward, too;
    - ``ordinary_ns``, ``bfloat16_ns``, ``float32_ns``: what a call took on ordinary values, after the recording
      (``record.peak``);
    - ``peak_bytes``: the peak of memory inside a call, or a stretch of backward, above its start;
    - ``kept_bytes``: what was allocated directly in a forward call and saved for backward (docs/memory.md);
    - ``device_peak_bytes``: the peak of the device, in the layer and phase that reached it, one value per cycle;
    - ``step_cpu_ns``, ``step_device_ns``: the time of a step in the layer and all layers below it (with no layer: in
      work of no layer), one value per step;
    - ``step_ns`` (no layer): the duration of a step.

    The rest of a step, outside all layers and in any phase: ``step_data_ns`` for loading data, ``step_optimizer_ns`` in
    the optimizer, ``step_copy_ns`` in copies between host and device, ``step_wait_ns`` waiting for the device,
    ``step_gc_ns`` in garbage collections, ``step_backward_ns`` in backward of no layer, ``step_other_ns`` in other ops,
    ``step_awaited_ns`` waiting for other threads or ranks, ``step_start_ns`` in the start-up of the device,
    ``step_gap_ns`` in no op, no layer and no range of torch. ``step_overlap_ns`` is the time that is counted more than
    once because several threads worked at the same time. A step is the sum of its models, of layers that are not
    selected, and of these parts, minus the overlap.

    On a device, data, optimizer, copy, backward and other are the work that was launched there. If the layers are
    ranges of a trace, waiting and copies count inside them, too, and once more in the overlap.
    """

    layer: int
    phase: str
    rank: int
    device: str
    measure: str


_Samples = Mapping[SampleKey, Spread]
_NAMES = itemgetter("phase", "device", "measure")
_NUMBERS = itemgetter("layer", "rank", "count", "sum", "min", "max", "first")
_FIELDS = len(SampleKey._fields) + len(Spread.__slots__)


class SamplesPart(RunPart[_Samples]):
    def of_ranks(self, value: _Samples, ranks: Collection[int]) -> dict[int, _Samples]:
        by_rank = lists_by_key((key.rank, (key, spread)) for key, spread in value.items())
        return {rank: dict(by_rank[rank]) for rank in ranks}

    def renumbered(self, value: _Samples, to: Sequence[int]) -> _Samples:
        return {key._replace(layer=to[key.layer]): spread for key, spread in value.items()}

    def added(self, before: _Samples, cycle: _Samples) -> _Samples:
        samples = _with_zeros(before, cycle)
        for key, spread in _with_zeros(cycle, before).items():
            samples[key] = samples[key] + spread if key in samples else spread
        return samples

    def scaled(self, value: _Samples, scale: Scale) -> _Samples:
        """All but the peaks of devices, of which each cycle has one."""
        return {
            key: spread.scaled(scale.on(key.device), key.measure.endswith("_ns"))
            if key.measure != "device_peak_bytes"
            else spread
            for key, spread in value.items()
        }

    def merge(self, so_far: Any, value: _Samples) -> Any:
        so_far = {} if so_far is None else so_far
        so_far.update(value)
        return so_far

    def to_json(self, value: _Samples) -> Iterator[dict[str, Any]]:
        return ({**key._asdict(), **fields_of(spread)} for key, spread in value.items())

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> _Samples:
        return dict(_sample(entry, layers, ranks) for entry in stored)


def _with_zeros(samples: _Samples, other: _Samples) -> dict[SampleKey, Spread]:
    """``samples``, with 0 for each of its steps added for every per-step measure that only ``other`` has."""
    complete = dict(samples)
    for key in other:
        steps = samples.get(SampleKey(OUTSIDE, FORWARD, key.rank, "cpu", "step_ns"))
        if steps is not None and key.measure.startswith("step_") and key not in samples:
            zeros = (0,) * len(steps.sample)
            hashes = tuple(sorted(steps.hashes))  # all values are equal, so the order of hashes decides
            complete[key] = Spread(steps.count, sum=0, min=0, max=0, first=0, sample=zeros, hashes=hashes)
    return complete


def _sample(entry: dict[str, Any], layers: int, ranks: Set[int]) -> tuple[SampleKey, Spread]:
    """A sample of a file. There are many of them: this takes a third of the time of ``read_as``."""
    phase, device, measure = map(intern, _NAMES(entry))
    layer, rank, count, total, least, most, first = array("q", _NUMBERS(entry))
    key = SampleKey(layer, phase, rank, device, measure)
    sample, hashes = tuple(array("q", entry["sample"])), tuple(array("q", entry["hashes"]))
    spread = Spread(count, total, least, most, first, sample, hashes)
    demand_layer(key, layers)
    demand(rank in ranks, f"no metadata of rank {rank}")
    if len(entry) != _FIELDS or not spread.count >= len(spread.sample) == len(spread.hashes) > 0:
        raise ValueError(f"the values of sample {tuple(key)}")
    return key, spread


# Remedies that were carried out


@dataclass(frozen=True)
class Trial:
    """A remedy of a finding, carried out on a copy of the model, in turn with another copy as it is.

    - ``rank``: which. ``rule`` and ``layers``: those of the finding. ``how``: the lines that were run, to be copied.
    - ``why_not``: why it was not tried; "" if it was. If not, the rest is 0.
    - ``pairs``: how often both ran. ``before_ns``, ``after_ns``: the median times of what was run: a call of the model,
      in training with its backward and, if its optimizer is one of torch's, a step of that.
    - ``gain``: the share of the recorded time that the remedy saves, by the median of the pairs; it is from ``low`` to
      ``high`` with 95 % confidence (the interval of the sign test, times the least and the most that what was run may
      be of the recorded time). Negative if it takes longer.
    - ``difference``: the largest difference of the outputs of both for the same inputs, as a share of the largest
      output; of the remedy of an optimizer, that of the parameters after a step. None if outputs are random, or not
      numbers. ``compile_ns``: by how much the first call with the remedy took longer.
    """

    rank: int
    rule: str
    layers: tuple[str, ...]
    how: str = ""
    why_not: str = ""
    pairs: int = 0
    before_ns: int = 0
    after_ns: int = 0
    gain: float = 0.0
    low: float = 0.0
    high: float = 0.0
    difference: float | None = None
    compile_ns: int = 0

    @property
    def has_gained(self) -> bool:
        """Whether it is faster with the remedy, beyond noise."""
        return not self.why_not and self.low > 0

    @property
    def result(self) -> str:
        """What it gained, in words: "Measured: 28% (27–30%)"."""
        interval = as_range(f"{self.low:.0%}", f"{self.high:.0%}")
        return f"Measured: {self.gain:.0%} ({interval})" if self.has_gained else f"Tried: no gain ({interval})"

    @property
    def how_it_went(self) -> str:
        """What was run, and what is different with it, in sentences."""
        if self.why_not:
            return f"Its remedy was not tried: {self.why_not.rstrip('.')}."
        apart = (
            f"differ by {self.difference:.1g} of the largest" if self.difference is not None else "were not compared"
        )
        compiling = f" Compiling took {format_time(self.compile_ns)}." if self.compile_ns > self.before_ns else ""
        return f"It was tried {self.pairs} times in turn: `{self.how}`. Outputs {apart}.{compiling}"

    def renumbered(self, to: Sequence[int]) -> Trial:
        """Layers have their names."""
        return self

    def scaled(self, scale: Scale) -> Trial:
        """Gains are shares."""
        return self

    def check(self, layers: int) -> None:
        demand(self.low <= self.gain <= self.high, "the interval of a trial")
        demand(min(self.pairs, self.before_ns, self.after_ns, self.compile_ns) >= 0, "a negative number of a trial")


class TrialsPart(PerRank):
    """The trials as a part of a run: those of a later recording come last."""

    def added(self, before: tuple[Any, ...], cycle: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*before, *cycle)


COMBINED = "combined"
"""In place of a rule: all remedies that gained, together."""
FEWEST_PAIRS = 6
"""With fewer, no interval has a confidence of 95 %."""


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """The interval that has the median of what these values are a sample of, with a confidence of 95 %; at least six.

    It goes from the k-th smallest to the k-th largest value, by the sign test: fewer than k of n values are below the
    median with a probability of at most 2.5 % (Conover, Practical Nonparametric Statistics, 1999, chapter 3.2).
    """
    n, below, k = len(values), 0.0, 0
    while (below := below + comb(n, k) / 2**n) <= 0.025:
        k += 1
    ordered = sorted(values)
    return ordered[max(k - 1, 0)], ordered[-max(k, 1)]
