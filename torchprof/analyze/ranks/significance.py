"""Finds the ranks that are slower than the others by more than chance."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from math import comb, erfc, sqrt
from statistics import median, median_low

SLOWER_BY = 0.1
"""A slow rank exceeds the others by at least this fraction."""
FALSE_DISCOVERIES = 0.1
"""The false discovery rate: the expected share of wrong ones among the ranks that are reported as slow."""
SPREADS = 3
"""A slow rank is slower by at least this many robust standard deviations of the ranks."""
_OUTLIER = 6  # robust standard deviations of a rank's own steps: a step beyond that is an outlier
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_EXACT = 32  # up to so many steps probabilities are exact


def stragglers(times: Sequence[Sequence[int]], whole: float | None = None) -> list[int] | None:
    """The stragglers, as indices into ``times``: for each rank, the time of each step (equally many for all ranks).
    None if there are too few steps for a significant result.

    A rank is slow if all of this holds:

    - In its median step it exceeds the median of the other ranks in that step by ``SLOWER_BY``, as a fraction of their
      time, or of ``whole``. The comparison within each step removes what all ranks have in common.
    - With four ranks or more: that excess is ``SPREADS`` robust standard deviations above that of the median rank. The
      deviation is the median absolute deviation of the ranks below the median, so that slow ranks do not widen it.
    - It is slow in more steps than by chance. If all ranks are equal, the position of a rank in a step, from 0 for the
      fastest, is uniform (Friedman, *The use of ranks to avoid the assumption of normality implicit in the analysis of
      variance*, JASA 32, 1937), and the sum of the positions is distributed as that of as many dice. For two ranks this
      is the paired sign test. Over the ranks the false discovery rate is limited to ``FALSE_DISCOVERIES`` (Benjamini
      and Hochberg, *Controlling the false discovery rate*, JRSS B 57, 1995).

    If more than half of the ranks would be slow, none is. A rank may take several times as long in single steps without
    being slow: for its positions, a step far above its own median excess counts as its median step.
    """
    ranks, steps = len(times), len(times[0]) if times else 0
    if ranks < 2 or not steps or float(ranks) ** -steps * ranks > FALSE_DISCOVERIES:
        return None
    in_steps = [sorted(step) for step in zip(*times)]
    others = [[_median_of_others(ordered, ns) for ordered, ns in zip(in_steps, own)] for own in times]
    excess = [
        [(ns - other) / (whole or other or 1) for ns, other in zip(own, beside)] for own, beside in zip(times, others)
    ]
    typical = [median(each) for each in excess]
    middle = median_low(typical)
    below = [middle - value for value in typical if value <= middle]
    least = max(SLOWER_BY, middle + SPREADS * _NORMAL * median(below)) if ranks > 3 else SLOWER_BY
    usual = [
        _without_outliers(own, beside, each, usual_excess, whole)
        for own, beside, each, usual_excess in zip(times, others, excess, typical)
    ]
    in_steps = [sorted(step) for step in zip(*usual)]
    chance = {
        rank: probability_of_sum(sum(map(_twice_position, in_steps, usual[rank])) // 2, ranks, steps)
        for rank, value in enumerate(typical)
        if value >= least
    }
    by_chance = sorted(chance, key=lambda rank: chance[rank])
    count = max(
        (number for number, rank in enumerate(by_chance, 1) if chance[rank] <= FALSE_DISCOVERIES * number / ranks),
        default=0,
    )
    return sorted(by_chance[:count]) if 2 * count <= ranks else []


def _median_of_others(ordered: Sequence[int], ns: int) -> int:
    """The lower median of the times of a step without one rank, which took ``ns``. ``ordered``: the times of all
    ranks."""
    middle = (len(ordered) - 2) // 2
    return ordered[middle + 1 if ns <= ordered[middle] else middle]


def _without_outliers(
    own: Sequence[int], others: Sequence[int], excess: Sequence[float], typical: float, whole: float | None
) -> list[float]:
    """The times of a rank; a step far above its median excess is replaced by its median step."""
    most = typical + _OUTLIER * _NORMAL * median(abs(value - typical) for value in excess)
    return [
        ns if value <= most else other + typical * (whole or other or 1)
        for ns, other, value in zip(own, others, excess)
    ]


def _twice_position(ordered: Sequence[float], ns: float) -> int:
    """Twice the position of a time among the sorted times of a step: equal times share their mean position."""
    return bisect_left(ordered, ns) + bisect_right(ordered, ns) - 1


@cache
def probability_of_sum(total: int, ranks: int, steps: int) -> float:
    """The probability that the positions of a rank, each uniform on 0 to ``ranks - 1``, sum to at least ``total`` over
    the steps: exact as for dice (de Moivre), or the normal limit for many steps."""
    if steps > _EXACT:
        mean, variance = steps * (ranks - 1) / 2, steps * (ranks**2 - 1) / 12
        return erfc((total - 0.5 - mean) / sqrt(2 * variance)) / 2
    missing = steps * (ranks - 1) - total
    ways: int = sum(
        (-1) ** number * comb(steps, number) * comb(missing - number * ranks + steps, steps)
        for number in range(missing // ranks + 1)
    )
    all_ways: int = ranks**steps
    return ways / all_ways
