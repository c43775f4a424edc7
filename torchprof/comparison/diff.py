"""The comparison of two runs, as a value; and whether two sets of times differ by more than noise."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import repeat
from math import comb, erfc, sqrt
from os import PathLike
from typing import Any, NamedTuple

from torchprof.analyze.columns import Column
from torchprof.analyze.warnings import waited_share
from torchprof.errors import printable
from torchprof.run.formats import Bound, Figure
from torchprof.run.layers import Layer
from torchprof.run.measures import quantile
from torchprof.run.run import ReportText, Run, output

# Noise

ALPHA = 0.05
"""The false discovery rate: the share of false alarms among the differences that are reported as real."""

FEWEST = 4
"""The fewest values on each side with which the rank test can be significant: 2 / C(8, 4) = 0.029 is below ``ALPHA``,
2 / C(6, 3) = 0.1 is not."""

_EXACT = 40  # up to so many values of both sides, p is exact; with more, the normal approximation is as good


class Noise(NamedTuple):
    """The comparison of two sets of times: their ``medians``, interquartile ranges (``spreads``) and numbers of values
    (``counts``), and the ``p`` of the rank test. Its limits are in docs/compare.md."""

    medians: tuple[float, float]
    spreads: tuple[float, float]
    counts: tuple[int, int]
    p: float

    @property
    def shift(self) -> float:
        """The median of the second set minus that of the first."""
        return self.medians[1] - self.medians[0]

    @property
    def spread(self) -> float:
        """The threshold for the difference of the medians: the interquartile range of the noisier set."""
        return max(self.spreads)

    def could_tell(self, tests: int) -> bool:
        """Whether this many values can be significant as one of so many ``tests``, if no other one is."""
        return 2 / comb(sum(self.counts), self.counts[0]) <= ALPHA / tests


def noise_of(before: Sequence[float], after: Sequence[float]) -> Noise:
    """Compare two sets of values, at least one in each."""
    first, second = sorted(before), sorted(after)
    medians = quantile(first, 0.5), quantile(second, 0.5)
    spreads = quantile(first, 0.75) - quantile(first, 0.25), quantile(second, 0.75) - quantile(second, 0.25)
    return Noise(medians, spreads, (len(first), len(second)), rank_test(first, second))


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the test of Mann and Whitney (1947, Annals of Mathematical Statistics 18) on two sorted sets.

    For up to 40 values it is exact: all ways to assign the ranks, ties included, are counted as by Streitberg and
    Röhmel (1986, Statistical Software Newsletter 12). For more it is the normal approximation. See docs/compare.md.
    """
    n, m = len(first), len(second)
    # U: in how many pairs the first value is larger. It is doubled, because a tie counts for half a pair.
    twice_u = sum(map(bisect_left, repeat(second), first)) + sum(map(bisect_right, repeat(second), first))
    distance = abs(twice_u - n * m)
    ties = tuple(Counter(sorted([*first, *second])).values())  # in the order of the values
    if n + m <= _EXACT:
        return _exact(n, ties, distance)
    total = n + m
    variance = n * m / 12 * (total + 1 - sum(t**3 - t for t in ties) / (total * (total - 1)))
    if not variance:
        return 1.0
    return min(1.0, erfc(max(0.0, distance / 2 - 0.5) / sqrt(2 * variance)))


def _exact(n: int, ties: tuple[int, ...], distance: int) -> float:
    """The share of the ways to choose ``n`` of all ranks whose doubled sum is at least ``distance`` from its
    expectation. ``ties``: the sizes of the groups of equal values, in the order of the values.

    Example: two of the ranks 1 to 4, without ties. The doubled sums are 6, 8, 10, 10, 12 and 14, 10 is expected. Two of
    these six are at least 4 from that: 6 and 14.
    """
    total = sum(ties)
    expected, every = n * (total + 1), comb(total, n)
    ways, digit = _ways(n, ties)
    nearer = ways >> ((expected - distance + 1) * digit) & ((1 << max(0, 2 * distance - 1) * digit) - 1)
    # A number and the sum of its digits have the same remainder modulo the largest digit. The sum is less than that.
    return (every - nearer % ((1 << digit) - 1)) / every


@lru_cache(maxsize=1024)
def _ways(n: int, ties: tuple[int, ...]) -> tuple[int, int]:
    """In how many ways ``n`` of all ranks have each doubled sum, and the number of bits of a digit.

    The counts are one large integer with one digit for each sum, so that adding a rank to all sums is one shift. In the
    example of ``_exact`` digit 10 is 2, the digits 6, 8, 12 and 14 are 1, all others 0.
    """
    total = sum(ties)
    digit = comb(total, n).bit_length() + 1
    ways = [1, *[0] * n]  # by the number of ranks chosen so far
    below = 0
    for size in ties:
        rank = 2 * below + size + 1  # twice the mean of the ranks below + 1 to below + size
        for place in range(below, below + size):
            # At most ``place`` ranks were chosen before this one, and those after it must be enough for the rest.
            for chosen in range(min(n, place + 1), max(0, n - (total - place)), -1):
                ways[chosen] += ways[chosen - 1] << (rank * digit)
        below += size
    return ways[n], digit


def false_discovery_rates(ps: Sequence[float]) -> list[float]:
    """For each p the smallest false discovery rate at which it is significant (Benjamini and Hochberg, 1995,
    Journal of the Royal Statistical Society B 57)."""
    rates = [1.0] * len(ps)
    smallest = 1.0
    for rank, index in reversed(list(enumerate(sorted(range(len(ps)), key=ps.__getitem__), 1))):
        smallest = rates[index] = min(smallest, ps[index] * len(ps) / rank)
    return rates


# Changes

MORE, LESS, SAME = "more", "less", "same"
"""The verdicts of a change of an exact quantity."""
SLOWER, FASTER, WITHIN_NOISE, UNDECIDED = "slower", "faster", "within noise", "unknown"
"""The verdicts of a change of a time."""
BUSY = "unclear: the machine was busy"
"""The verdict of a change of elapsed time that waiting for a processor may explain."""


def waited_at_most(run: Run) -> float:
    """The largest share of the time, over ranks, for which the main thread waited for a processor; 0 if negligible."""
    return max(map(waited_share, run.metas), default=0.0)


class Change(NamedTuple):
    """One quantity before and after.

    ``before`` and ``after`` are None where they are unknown, and in a run that does not have the layer. If one of them
    is unknown, so is ``difference``; for an added or removed layer it is what the layer adds or takes away.
    ``verdict``: "slower", "faster", "within noise" or ``BUSY`` for times whose ``noise`` is known; "more", "less" or
    "same" for exact quantities; "unknown" for unknown ones, and for times that too few values test. ``at_least``: lower
    bounds of ``before`` and ``after`` if these are None because a part of a sum is missing, else None.
    """

    before: float | None
    after: float | None
    difference: float | None
    verdict: str
    noise: Noise | None = None
    at_least: tuple[float | None, float | None] = (None, None)

    def figure(self, side: int) -> Figure:
        """The figure before (0) or after (1): exact, a lower bound, or unknown."""
        value, least = (self.before, self.after)[side], self.at_least[side]
        if value is not None:
            return Figure(value)
        return Figure(0, Bound.UNKNOWN) if least is None else Figure(least, Bound.AT_LEAST)

    @property
    def ratio(self) -> float | None:
        """``after / before``; None if one of them is unknown, ``before`` is not positive, or ``after`` is negative."""
        if self.before is None or self.after is None or self.before <= 0 or self.after < 0:
            return None
        return self.after / self.before


@dataclass
class Pair:
    """One layer in both runs, or in one of them, or the work of no layer (``before`` and ``after`` are None).

    ``path``: the path after, or before for a removed layer; ``name`` is its last part. ``children``: the pairs of the
    layers below. ``how``: "same", "moved", "renamed", "added" or "removed". In a subtree that was moved or renamed only
    the top layer is marked so; in one that was added or removed every layer is. ``changes``: every quantity of the diff
    by key; the work of no layer has only the measures of costs. ``differs``: what changed in the layer itself, as
    (what, before, after).
    """

    path: tuple[str, ...]
    before: Layer | None
    after: Layer | None
    how: str
    changes: dict[str, Change] = field(default_factory=dict)
    children: list[Pair] = field(default_factory=list)
    differs: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def is_layer(self) -> bool:
        return self.before is not None or self.after is not None

    def walk(self) -> Iterator[Pair]:
        """This pair and all below, depth first, without recursion."""
        waiting = [self]
        while waiting:
            pair = waiting.pop()
            yield pair
            waiting.extend(reversed(pair.children))


def _changes_in(pair: Pair, quantity: Column) -> Iterator[tuple[Pair, Change]]:
    """The layers at or below a pair that have a quantity, with its change."""
    return ((layer, layer.changes[quantity.key]) for layer in pair.walk() if quantity.key in layer.changes)


# The comparison

MOST_NAMED = 3  # the most layers that are named as the cause of a difference


class Denominator(NamedTuple):
    """What totals can be divided by. ``counted``: "call" (forward calls of ``model``), "step" if the model was never
    called itself, or None. ``counts``: how many of them each run recorded; 1 with neither."""

    counted: str | None
    counts: tuple[int, int]
    model: str = ""

    @property
    def unit(self) -> str | None:
        """What additive quantities are divided by: "call", "step", or None if both runs recorded equally many."""
        return self.counted if self.counts[0] != self.counts[1] else None


class LargestParts(NamedTuple):
    """The ``layers`` that hold most of a difference (``hold_most``), or its largest parts. ``beyond_noise``: " beyond
    noise" if they are the largest only among the changes that are, else ""."""

    layers: list[tuple[Pair, Change]]
    hold_most: bool
    beyond_noise: str


@dataclass(frozen=True, repr=False)
class Diff:
    """Two runs compared, ``before`` and ``after``. Made by ``torchprof.compare``; the reports of a diff read it.

    ``pairs``: the models, with the layers below them in their order after (a removed layer is below its parent before),
    then the work of layers that were not selected, and the work outside all layers. ``quantities``: what is compared,
    in the order of the tree's columns. ``denominator``: how many calls or steps each run recorded. If these numbers
    differ, additive quantities are per call or step: see ``unit``. ``whole``: the changes of the run itself, by key:
    "step" (how long one lasted), "cpu_peak", "cuda_peak" or that of another device. ``notes``: sentences on differences
    between the runs that make them hard to compare. ``warnings``: the warnings of the two runs.
    """

    before: Run
    after: Run
    pairs: tuple[Pair, ...]
    quantities: tuple[Column, ...]
    denominator: Denominator
    whole: Mapping[str, Change]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        return self.report("table")

    def __repr__(self) -> str:
        models = [", ".join(run.meta.model) or "no model" for run in (self.before, self.after)]
        return printable(f"<Diff of {models[0]} and {models[1]}>")

    @property
    def counted(self) -> str | None:
        return self.denominator.counted

    @property
    def counts(self) -> tuple[int, int]:
        return self.denominator.counts

    @property
    def unit(self) -> str | None:
        """See ``Denominator.unit``."""
        return self.denominator.unit

    @property
    def calls_in_figures(self) -> int:
        """How many calls of the model, or steps, the additive figures after are for: 1 if they are per call or step."""
        return self.counts[1] if self.unit is None else 1

    def walk(self) -> Iterator[Pair]:
        """All pairs, parents before children."""
        for pair in self.pairs:
            yield from pair.walk()

    def quantity(self, key: str) -> Column | None:
        """The quantity with that key; None if not both runs measured it."""
        return next((quantity for quantity in self.quantities if quantity.key == key), None)

    def self_of(self, quantity: Column) -> Column:
        """The self quantity that goes with a total; the quantity itself if there is none."""
        own = replace(quantity, heading="", is_self=True)
        matching = (column for column in self.quantities if replace(column, heading="") == own)
        return next(matching, quantity)

    def weight(self, change: Change) -> float:
        """The size of a change, for ranking. If its noise is known: the difference of the medians, times the calls, so
        that one call on a busy machine weighs little."""
        if change.noise is None:
            return change.difference or 0
        return change.noise.shift * self.calls_in_figures

    def largest_parts(self, pair: Pair, quantity: Column) -> LargestParts:
        """The first three layers at or below a pair whose self changed with the sign of the whole difference, the
        largest ``weight`` first, without changes within noise and unclear ones.

        A quantity without a self, such as a peak, is taken from the layers without children. They hold most if they are
        more than half of the difference, and of all self changes with its sign, those within noise included.
        """
        if quantity.is_self or not pair.children:
            return LargestParts([], False, "")
        own = self.self_of(quantity)
        difference = pair.changes[quantity.key].difference or 0
        with_its_sign = [
            (layer, change)
            for layer, change in _changes_in(pair, own)
            if (own.is_self or not layer.children) and change.difference and (change.difference > 0) == (difference > 0)
        ]
        clear = [part for part in with_its_sign if part[1].verdict not in (WITHIN_NOISE, BUSY)]
        layers = sorted(clear, key=self._by_weight)[:MOST_NAMED]
        named = [abs(change.difference or 0) for _, change in layers]
        whole = max(sum(abs(change.difference or 0) for _, change in with_its_sign), abs(difference))
        noisy = [abs(change.difference or 0) for _, change in with_its_sign if change.verdict == WITHIN_NOISE]
        # Quantities without a self, such as peaks, do not add up to the whole.
        hold_most = own.is_self and 2 * sum(named) > whole
        beyond_noise = " beyond noise" if max(noisy, default=0) > min(named, default=0) else ""
        return LargestParts(layers, hold_most, "" if hold_most else beyond_noise)

    def beyond_noise(self, pair: Pair, quantity: Column) -> list[tuple[Pair, Change]]:
        """The layers at or below a pair whose own time changed beyond noise, in any direction, the largest first."""
        changes = _changes_in(pair, self.self_of(quantity))
        return sorted((part for part in changes if part[1].verdict in (SLOWER, FASTER)), key=self._by_weight)

    def _by_weight(self, part: tuple[Pair, Change]) -> float:
        return -abs(self.weight(part[1]))

    def _repr_html_(self) -> str | None:
        return self.report("table")._repr_html_()

    def report(self, name: str = "table", **options: Any) -> ReportText:
        """A report as text: "table", "markdown", "json". Raises TorchprofError for an unknown name or option."""
        return output("render")(name, self, options, of="diff")  # type: ignore[no-any-return]

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by the file's suffix, as ``Run.export`` does: ``diff.export("diff.md")``.

        Raises TorchprofError for an unknown suffix or option, OSError as ``open`` does.
        """
        output("export")(path, self, options, of="diff")
