"""Finds the ranks that are slower than the others by more than chance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from math import atan2, cos, erfc, expm1, log, log1p, pi, sin, sqrt
from operator import mul
from statistics import fmean, median, median_low

WORTH_NAMING = 0.02
"""A straggler exceeds the others by at least this share of a step."""
CLEARLY_SLOWER = 0.1
"""The share from which a rank is named even if chance is not excluded; the report then says so."""
CHANCE = 1e-4
"""The highest probability that a job of equal ranks has a straggler."""
MAY_BE_CHANCE = 0.02
"""The same for ranks that are named with the warning that it may be chance."""
SPREADS = 3
"""A straggler is slower by at least this many robust standard deviations of the ranks."""
_TRIMMED = 0.2  # the share of the steps of a rank that is left out at each end, as outliers
_LEAST_STEPS = 3
_NORMAL = 1.4826  # the standard deviation of a normal distribution over its median absolute deviation
_POWER = 1.6449  # a normal value is below its mean plus so many standard deviations with a probability of 95 %
_MOST_ALIKE = 0.95  # the highest correlation of successive steps that is corrected for
_ROUNDING = 1e-9  # what a logarithm may be off
_MOST_EXCESS = 10.0  # the largest logarithm that is shown: more than any straggler has
_LARGE = 2000  # degrees of freedom from which the t-distribution is taken as normal

_Times = Sequence[Sequence[int]]  # of each rank, those of its steps


@dataclass(frozen=True)
class Stragglers:
    """The result of the test. ``slow``: the indices of the slow ranks. ``may_be_chance``: chance is not excluded.

    ``detectable``: a rank that exceeds the others by this share would have been named in most jobs like this one, in
    three of four or more; None if that is unknown.
    """

    slow: tuple[int, ...]
    may_be_chance: bool
    detectable: float | None


def stragglers(
    times: _Times, whole: float | None = None, least: float = WORTH_NAMING, of: int | None = None
) -> Stragglers | None:
    """The stragglers among ranks. ``times``: for each rank, the time of each step, equally many for all ranks. None if
    there are fewer than two ranks or three steps. ``of``: the number of ranks, if others of the job are in other tests.

    docs/ranks.md has the conditions. The *excess* of a rank in a step is what it takes more than the median of the
    other ranks in that step. It is tested in two scales: as the logarithm of the ratio, and as a share of the time of
    the median rank. With ``whole`` the second scale alone counts, as a share of that. The *typical excess* is the
    median over the steps, or the mean without the 20 % largest and the 20 % smallest if that is less. If three ranks
    take 10, 10 and 13 ms in each step, that of the last one is 30 %: a straggler if ``least`` is not more.

    Chance is excluded by the trimmed t-test (Yuen, *The two-sample trimmed t for unequal population variances*,
    Biometrika 61, 1974; Tukey and McLaughlin, Sankhya A 25, 1963) with Bonferroni's correction for ranks and scales. If
    more than half of the ranks would be slow, none is.
    """
    ranks, steps = len(times), len(times[0]) if times else 0
    if ranks < 2 or steps < _LEAST_STEPS:
        return None
    tests = of or ranks
    others = _medians_of_others(times)
    if whole is not None:
        scales = [_Scale(_differences(times, others, whole), float, float, tests)]
    else:
        typical = max(median_low(median(of_rank) for of_rank in times), 1)
        # In logarithms, half as long is as far from equal as twice as long.
        ratios = [[log(max(ns, 1) / max(middle, 1)) for ns, middle in zip(*of_rank)] for of_rank in zip(times, others)]
        scales = [
            _Scale(ratios, log1p, expm1, 2 * tests),
            _Scale(_differences(times, others, typical), float, float, 2 * tests),
        ]
    certain = {rank for scale in scales for rank in scale.slow(least, CHANCE)}
    named = certain or {rank for scale in scales for rank in scale.slow(max(least, CLEARLY_SLOWER), MAY_BE_CHANCE)}
    if 2 * len(named) > ranks:
        named = set()
    detectable = min(scale.detectable(least) for scale in scales)
    return Stragglers(tuple(sorted(named)), bool(named and not certain), detectable)


class _Scale:
    """The test of all ranks in one scale.

    ``excess``: that of each rank in each step. ``to_excess`` makes an excess of a share by which a rank takes longer,
    ``to_share`` does the opposite. ``tests``: how many tests are made, of all ranks in all scales.
    """

    def __init__(
        self,
        excess: Sequence[Sequence[float]],
        to_excess: Callable[[float], float],
        to_share: Callable[[float], float],
        tests: int,
    ) -> None:
        self._to_excess, self._to_share = to_excess, to_share
        ranks, steps = len(excess), len(excess[0])
        trimmed = int(_TRIMMED * steps)
        kept = steps - 2 * trimmed
        in_order = [sorted(values) for values in excess]
        self._typical = [min(fmean(ordered[trimmed : steps - trimmed]), median(ordered)) for ordered in in_order]
        without_outliers = [  # each replaced by the nearest value that is not (Winsorized)
            [min(max(value, ordered[trimmed]), ordered[-1 - trimmed]) for value in values]
            for values, ordered in zip(excess, in_order)
        ]
        wider = _widening(without_outliers)
        self._errors = [wider * _standard_error(values, kept) for values in without_outliers]
        self._usual_error = median(self._errors) / (1 - 2 / (9 * (kept - 1))) ** 1.5
        self._tests, self._kept = tests, kept
        self._freedom = (ranks - 1) * (kept - 1)
        self._spread = 0.0
        if ranks > 3:
            middle = median_low(self._typical)
            below = [middle - value for value in self._typical if value <= middle]
            self._spread = middle + SPREADS * _NORMAL * median(below)

    def slow(self, share: float, probability: float) -> list[int]:
        """The ranks that take longer by at least this share, by more than chance."""
        limit = t_quantile(probability / self._tests, self._freedom)
        least = max(self._to_excess(share), self._spread) - _ROUNDING
        return [
            rank
            for rank, (value, error) in enumerate(zip(self._typical, self._errors))
            if value >= least and value > limit * max(error, self._usual_error)
        ]

    def detectable(self, least: float) -> float:
        """See ``Stragglers.detectable``."""
        limit = t_quantile(CHANCE / self._tests, self._freedom)
        needed = max(self._to_excess(least), self._spread, limit * self._usual_error)
        margin = _POWER * self._usual_error * sqrt(1 + limit**2 / (2 * (self._kept - 1)))  # of the mean and its error
        return self._to_share(min(needed + margin, self._to_excess(expm1(_MOST_EXCESS))))


def _medians_of_others(times: _Times) -> list[Sequence[float]]:
    """For each rank the median of the other ranks, in each step."""
    steps = [(step, sorted(step)) for step in zip(*times)]
    return [*zip(*([_median_without(ordered, ns) for ns in step] for step, ordered in steps))]


def _differences(times: _Times, others: Sequence[Sequence[float]], whole: float) -> list[list[float]]:
    """For each rank its time minus the median of the others, in each step, as a share of ``whole``."""
    return [[(ns - median) / whole for ns, median in zip(*of_rank)] for of_rank in zip(times, others)]


def _median_without(ordered: Sequence[int], ns: int) -> float:
    """The median of sorted times without one of them, which is ``ns``."""
    low, high = (len(ordered) - 2) // 2, (len(ordered) - 1) // 2  # the middle of the others, if ns is after it
    return (ordered[low + (ns <= ordered[low])] + ordered[high + (ns <= ordered[high])]) / 2


def _standard_error(without_outliers: Sequence[float], kept: int) -> float:
    """The standard error of the mean of the ``kept`` values that are not outliers."""
    steps, mean = len(without_outliers), fmean(without_outliers)
    variance = sum((value - mean) ** 2 for value in without_outliers) / (steps - 1)
    return sqrt(variance * steps) / kept


def _widening(excess: Sequence[Sequence[float]]) -> float:
    """By how much the error of a mean is larger than that of independent steps, for an autoregressive process of first
    order: sqrt((1 + r) / (1 - r)). r is the correlation of successive steps over all ranks, with its bias in short
    series corrected (Marriott and Pope, Biometrika 41, 1954), and at least 0."""
    successive = total = 0.0
    for values in excess:
        mean = fmean(values)
        away = [value - mean for value in values]
        successive += sum(map(mul, away, away[1:]))
        total += sum(map(mul, away, away))
    r = successive / total if total else 0.0
    r = min(max(r + (1 + 3 * r) / len(excess[0]), 0.0), _MOST_ALIKE)
    return sqrt((1 + r) / (1 - r))


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """The value that Student's t-distribution exceeds with this probability (below 1/2), by bisection."""
    low, high = 0.0, 1.0
    while t_tail(high, freedom) > probability:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > probability else (low, middle)
    return high


def t_tail(value: float, freedom: int) -> float:
    """The probability that Student's t-distribution exceeds ``value`` (at least 0): the finite sums of Abramowitz and
    Stegun, *Handbook of Mathematical Functions*, 26.7.3 and 26.7.4; for many degrees the normal distribution."""
    if freedom >= _LARGE:
        return erfc(value / sqrt(2)) / 2
    angle = atan2(value, sqrt(freedom))
    is_odd = freedom % 2
    square = cos(angle) ** 2
    term, total = (cos(angle), 0.0) if is_odd else (1.0, 0.0)
    for number in range(1 + is_odd, freedom, 2):
        total += term
        term *= square * number / (number + 1)
    inside = 2 / pi * (angle + sin(angle) * total) if is_odd else sin(angle) * total
    return (1 - inside) / 2
