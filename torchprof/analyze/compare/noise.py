"""Whether two sets of times differ by more than they differ among themselves. Knows only the standard library.

The rank test is that of Mann and Whitney (1947, Annals of Mathematical Statistics 18), the false discovery rate that of
Benjamini and Hochberg (1995, Journal of the Royal Statistical Society B 57). The limits of both are in docs/compare.md.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from itertools import repeat
from math import comb, erfc, sqrt
from typing import NamedTuple

from torchprof.run.samples import quantile

ALPHA = 0.05
"""The share of false alarms among the differences that are said to be none of noise."""

FEWEST = 4
"""From so many calls on each side the rank test can tell at all: 2 / C(8, 4) = 0.029 is below ``ALPHA``, 2 / C(6, 3)
= 0.1 is not."""

_EXACT = 40  # so many values of both sides together, and p is counted out; of more the normal approximation is as good


class Noise(NamedTuple):
    """How the times of two sets compare: their ``medians`` and interquartile ranges (``spreads``), the number of values
    of each, and the ``p`` of the rank test."""

    medians: tuple[float, float]
    spreads: tuple[float, float]
    counts: tuple[int, int]
    p: float

    @property
    def shift(self) -> float:
        """By how much the median of the second is larger."""
        return self.medians[1] - self.medians[0]

    @property
    def spread(self) -> float:
        """What the difference of the medians must exceed: the interquartile range of the noisier set."""
        return max(self.spreads)

    def could_tell(self, tests: int) -> bool:
        """Whether so few values could pass a test that is one of so many, if it alone found a difference."""
        return 2 / comb(sum(self.counts), self.counts[0]) <= ALPHA / tests


def noise_of(before: Sequence[float], after: Sequence[float]) -> Noise:
    """Compare two sets of values, at least one in each."""
    first, second = sorted(before), sorted(after)
    medians = quantile(first, 0.5), quantile(second, 0.5)
    spreads = quantile(first, 0.75) - quantile(first, 0.25), quantile(second, 0.75) - quantile(second, 0.25)
    return Noise(medians, spreads, (len(first), len(second)), rank_test(first, second))


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the test of Mann and Whitney on two sets of sorted values.

    It is the probability that the ranks of one set lie at least as far from their expectation, if both are draws of
    one distribution. Equal values share their mean rank. Up to 40 values are counted out over all ways to deal the
    ranks, ties and all, as Streitberg and Röhmel do (1986, Statistical Software Newsletter 12); for more there is the
    normal approximation, corrected for ties and for continuity.
    """
    n, m = len(first), len(second)
    # U: in how many pairs the first is the larger one, doubled, so that a tie, which counts for half a pair, is whole.
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
    """The share of the ways to choose ``n`` of all ranks whose doubled sum is at least so far from its expectation.

    ``ties`` are the sizes of the groups of equal values, from the smallest on.
    """
    total = sum(ties)
    expected, every = n * (total + 1), comb(total, n)
    ways, digit = _ways(n, ties)
    nearer = ways >> ((expected - distance + 1) * digit) & ((1 << max(0, 2 * distance - 1) * digit) - 1)
    # A number and the sum of its digits leave the same rest when divided by the largest digit, and the sum is less.
    return (every - nearer % ((1 << digit) - 1)) / every


@lru_cache(maxsize=1024)
def _ways(n: int, ties: tuple[int, ...]) -> tuple[int, int]:
    """How many ways to choose ``n`` of all ranks lead to each doubled sum, and the bits of a digit.

    It is one large integer with a digit for each sum: to add a rank is to shift it.
    """
    total = sum(ties)
    digit = comb(total, n).bit_length() + 1
    ways = [1, *[0] * n]  # by the number of ranks chosen so far
    below = 0
    for size in ties:
        rank = 2 * below + size + 1  # twice the mean of the ranks below + 1 to below + size
        for at in range(below, below + size):
            # Of those before it at most ``at`` are chosen, and those behind it must be enough for the rest.
            for chosen in range(min(n, at + 1), max(0, n - (total - at)), -1):
                ways[chosen] += ways[chosen - 1] << (rank * digit)
        below += size
    return ways[n], digit


def false_discovery_rates(ps: Sequence[float]) -> list[float]:
    """For each p the smallest share of false alarms at which it still counts, after Benjamini and Hochberg."""
    rates = [1.0] * len(ps)
    smallest = 1.0
    for rank, at in reversed(list(enumerate(sorted(range(len(ps)), key=ps.__getitem__), 1))):
        smallest = rates[at] = min(smallest, ps[at] * len(ps) / rank)
    return rates
