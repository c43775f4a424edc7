"""Which of several ranks are slower than the others, by more than chance. Knows only the standard library."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from math import comb, erfc, sqrt
from statistics import median, median_low

SLOWER_BY = 0.1
"""By which part a rank has to exceed the others to be called slow."""
FALSE_DISCOVERIES = 0.1
"""The part of the ranks named that may be wrong, in expectation, where only chance decides."""
SPREADS = 3
"""How many robust standard deviations of the ranks a rank has to be slower by."""
_HICCUP = 6  # robust standard deviations of a rank's own steps
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_EXACT = 32  # steps up to which probabilities are counted out


def stragglers(times: Sequence[Sequence[int]], whole: float | None = None) -> list[int] | None:
    """Which of several ranks take longer in most steps: their places in ``times``, which holds for each rank how long
    each step took, as many of each. None where there are too few steps to tell that from chance.

    A rank is slow where all of this holds:

    - In its median step it exceeds the median of the other ranks in that step by ``SLOWER_BY``, as a part of what these
      take, or of ``whole``. Comparing within each step leaves out what all ranks have in common.
    - Of four ranks and more: that excess lies ``SPREADS`` robust standard deviations above that of the median rank. The
      deviation is the median absolute one of the ranks below the median, so that slow ranks do not widen it.
    - It is slow in more steps than chance would have it. In each step its position among the ranks, from 0 for the
      fastest on, is uniform where all are alike (Friedman, *The use of ranks to avoid the assumption of normality
      implicit in the analysis of variance*, JASA 32, 1937), so that the sum of the positions is that of as many dice.
      Of two ranks this is the paired sign test. Over the ranks the false discovery rate is held at
      ``FALSE_DISCOVERIES`` (Benjamini and Hochberg, *Controlling the false discovery rate*, JRSS B 57, 1995).

    Never are more than half of the ranks slow. In single steps a rank may take several times as long, and that says
    nothing of the rank: for its positions, a step in which it exceeds its own median excess by far counts as its median
    one.
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
    below = [middle - one for one in typical if one <= middle]
    least = max(SLOWER_BY, middle + SPREADS * _NORMAL * median(below)) if ranks > 3 else SLOWER_BY
    usual = [
        _without_hiccups(own, beside, each, one, whole)
        for own, beside, each, one in zip(times, others, excess, typical)
    ]
    in_steps = [sorted(step) for step in zip(*usual)]
    chance = {
        rank: _chance(sum(map(_twice_position, in_steps, usual[rank])) // 2, ranks, steps)
        for rank, one in enumerate(typical)
        if one >= least
    }
    by_chance = sorted(chance, key=lambda rank: chance[rank])
    found = max(
        (number for number, rank in enumerate(by_chance, 1) if chance[rank] <= FALSE_DISCOVERIES * number / ranks),
        default=0,
    )
    return sorted(by_chance[:found]) if 2 * found <= ranks else []


def _median_of_others(ordered: Sequence[int], ns: int) -> int:
    """The median, of two in the middle the faster one's, of the ranks but for one that took so long."""
    at = (len(ordered) - 2) // 2
    return ordered[at + 1 if ns <= ordered[at] else at]


def _without_hiccups(
    own: Sequence[int], others: Sequence[int], excess: Sequence[float], typical: float, whole: float | None
) -> list[float]:
    most = typical + _HICCUP * _NORMAL * median(abs(one - typical) for one in excess)
    return [
        ns if one <= most else other + typical * (whole or other or 1) for ns, other, one in zip(own, others, excess)
    ]


def _twice_position(ordered: Sequence[float], ns: float) -> int:
    """Of equal ones each has the mean of their positions."""
    return bisect_left(ordered, ns) + bisect_right(ordered, ns) - 1


@cache
def _chance(total: int, ranks: int, steps: int) -> float:
    """How probable it is that positions, one in each step, each of 0 to ``ranks - 1`` alike, have at least this sum:
    the count of what so many dice show (de Moivre), of many its limit."""
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
