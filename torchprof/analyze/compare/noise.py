"""Whether two sets of times differ by more than noise.

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
"""The false discovery rate: the share of false alarms among the differences that are reported as real."""

FEWEST = 4
"""The fewest values on each side with which the rank test can be significant: 2 / C(8, 4) = 0.029 is below ``ALPHA``,
2 / C(6, 3) = 0.1 is not."""

_EXACT = 40  # up to so many values of both sides, p is exact; with more, the normal approximation is as good


class Noise(NamedTuple):
    """The comparison of two sets of times: their ``medians``, interquartile ranges (``spreads``) and numbers of values
    (``counts``), and the ``p`` of the rank test."""

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
        """Whether this many values can be significant at all as one of so many ``tests``, if no other test finds a
        difference."""
        return 2 / comb(sum(self.counts), self.counts[0]) <= ALPHA / tests


def noise_of(before: Sequence[float], after: Sequence[float]) -> Noise:
    """Compare two sets of values, at least one in each."""
    first, second = sorted(before), sorted(after)
    medians = quantile(first, 0.5), quantile(second, 0.5)
    spreads = quantile(first, 0.75) - quantile(first, 0.25), quantile(second, 0.75) - quantile(second, 0.25)
    return Noise(medians, spreads, (len(first), len(second)), rank_test(first, second))


def rank_test(first: Sequence[float], second: Sequence[float]) -> float:
    """The two-sided p of the test of Mann and Whitney on two sets of sorted values.

    It is the probability that the rank sum of one set is at least as far from its expectation, if both sets are drawn
    from one distribution. Equal values share their mean rank. For up to 40 values it is exact: all ways to assign the
    ranks, ties included, are counted as by Streitberg and Röhmel (1986, Statistical Software Newsletter 12). For more
    it is the normal approximation with corrections for ties and continuity.
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
    expectation.

    ``ties``: the sizes of the groups of equal values, in the order of the values.
    """
    total = sum(ties)
    expected, every = n * (total + 1), comb(total, n)
    ways, digit = _ways(n, ties)
    nearer = ways >> ((expected - distance + 1) * digit) & ((1 << max(0, 2 * distance - 1) * digit) - 1)
    # A number and the sum of its digits have the same remainder modulo the largest digit. The sum is less than that.
    return (every - nearer % ((1 << digit) - 1)) / every


@lru_cache(maxsize=1024)
def _ways(n: int, ties: tuple[int, ...]) -> tuple[int, int]:
    """In how many ways ``n`` of all ranks have each doubled sum, and the bits of a digit.

    The counts are one large integer with one digit for each sum, so adding a rank is one shift.
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
    """For each p the smallest false discovery rate at which it is significant (Benjamini and Hochberg)."""
    rates = [1.0] * len(ps)
    smallest = 1.0
    for rank, index in reversed(list(enumerate(sorted(range(len(ps)), key=ps.__getitem__), 1))):
        smallest = rates[index] = min(smallest, ps[index] * len(ps) / rank)
    return rates
