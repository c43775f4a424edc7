"""Stragglers: the test of a rank, and the error rates in simulated jobs are as documented."""

from __future__ import annotations

import random
from math import exp, lgamma, pi, sqrt

import pytest

from torchprof.ranks.significance import CHANCE, Stragglers, stragglers, t_quantile, t_tail


def integrated(value: float, freedom: int, parts: int = 20_000) -> float:
    """The tail of Student's distribution: a sum over its density, at ``value / u`` for u from 0 to 1."""
    scale = exp(lgamma((freedom + 1) / 2) - lgamma(freedom / 2)) / sqrt(freedom * pi)
    at = [(number + 0.5) / parts for number in range(parts)]
    return sum(scale * (1 + (value / u) ** 2 / freedom) ** (-(freedom + 1) / 2) * value / u**2 for u in at) / parts


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 11, 30, 1999, 2000])
def test_the_tail_is_the_integral_of_the_density(freedom: int) -> None:
    for value in (0.5, 2.0, 4.0):
        assert t_tail(value, freedom) == pytest.approx(
            integrated(value, freedom), rel=0.05 if freedom == 2000 else 1e-6
        )


@pytest.mark.parametrize(
    ("probability", "freedom", "value"),
    [(0.05, 1, 6.314), (0.025, 4, 2.776), (0.005, 10, 3.169), (0.0005, 120, 3.373), (0.001, 10_000, 3.09)],
)
def test_quantiles_are_those_of_printed_tables(probability: float, freedom: int, value: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(value, abs=0.001)


def test_the_limit_by_hand() -> None:
    """Rank 0 exceeds rank 1 by 1 to 5 %: by 3 % without the first and the last.

    Those replaced by their neighbors, 2, 2, 3, 4, 4, have a variance of 1, so the error is 1 * sqrt(5) / 3 = 0.745 %.
    That of the median rank, from the median of variances with 2 degrees of freedom, is 0.745 / (1 - 2 / 18) ** 1.5 =
    0.889 %. So t = 3.37: 3.9 % of equal ranks exceed it."""
    times = [[1030, 1010, 1050, 1020, 1040], [1000] * 5]  # successive steps are not alike
    result = stragglers([[10 * ns for ns in rank] for rank in times], 10_000)
    assert result is not None and result.slow == ()
    error = 0.01 * sqrt(5) / 3 / (1 - 2 / 18) ** 1.5
    limit = t_quantile(CHANCE / 2, 2)
    margin = 1.6449 * error * sqrt(1 + limit**2 / 4)
    assert t_tail(0.03 / error, 2) == pytest.approx(0.039, abs=0.001)
    assert result.detectable == pytest.approx(limit * error + margin, rel=1e-3)


def job(
    chance: random.Random, ranks: int, steps: int, hiccups: float, slower: float = 1.0, noise: float = 0.02
) -> list[list[int]]:
    """Steps of about 100 us, with a random length that is equal for all ranks. Rank 0 is slower by a factor, and each
    rank takes several times as long in some random steps."""
    lengths = [100_000 * chance.lognormvariate(0, 0.1) for _ in range(steps)]
    return [
        [
            round(
                length
                * chance.lognormvariate(0, noise)
                * (1 if rank else slower)
                * (1 + chance.expovariate(1 / 4) if chance.random() < hiccups else 1)
            )
            for length in lengths
        ]
        for rank in range(ranks)
    ]


def result_of(times: list[list[int]]) -> Stragglers:
    result = stragglers(times)
    assert result is not None
    return result


@pytest.mark.parametrize("hiccups", [0.02, 0.05])
@pytest.mark.parametrize(("ranks", "jobs"), [(8, 200), (64, 100), (1024, 3)])
def test_of_equal_ranks_none_is_named_and_a_slow_one_is(ranks: int, jobs: int, hiccups: float) -> None:
    """20 steps that vary by 1 %, as sums of ten layers that vary by 3 % do: of equal ranks none is named; a rank that
    is 5 % slower is found in 90 % of the jobs, one that is 10 % slower in 99 %."""
    chance = random.Random(ranks + round(100 * hiccups))
    assert not any(result_of(job(chance, ranks, 20, hiccups, noise=0.01)).slow for _ in range(jobs))
    for slower, least in ((1.05, 0.9), (1.1, 0.99)):
        results = [result_of(job(chance, ranks, 20, hiccups, slower, 0.01)) for _ in range(jobs)]
        assert sum(result.slow == (0,) and not result.may_be_chance for result in results) >= least * jobs


@pytest.mark.parametrize("hiccups", [0.02, 0.05])
@pytest.mark.parametrize(("ranks", "steps", "jobs"), [(2, 10, 300), (3, 10, 300), (64, 5, 100)])
def test_in_few_steps_a_rank_is_named_that_may_be_slow_by_chance(
    ranks: int, steps: int, jobs: int, hiccups: float
) -> None:
    chance = random.Random(ranks * steps + round(100 * hiccups))
    equal = [result_of(job(chance, ranks, steps, hiccups)) for _ in range(jobs)]
    slow = [result_of(job(chance, ranks, steps, hiccups, 1.15)) for _ in range(jobs)]
    assert sum(bool(result.slow) for result in equal) <= 0.02 * jobs
    assert sum(result.slow == (0,) for result in slow) > 0.93 * jobs


@pytest.mark.parametrize("noise", [0.03, 0.1])
def test_equal_ranks_with_much_noise_are_not_named(noise: float) -> None:
    chance = random.Random(7)
    for ranks, jobs in ((2, 200), (4, 200), (16, 100)):
        results = [result_of(job(chance, ranks, 10, 0.02, 1, noise)) for _ in range(jobs)]
        assert sum(bool(result.slow) for result in results) < 0.03 * jobs
        assert sum(bool(result.slow) and not result.may_be_chance for result in results) <= 1


@pytest.mark.parametrize(("ranks", "steps"), [(2, 20), (3, 20), (8, 10), (64, 10)])
def test_what_is_detectable_is_found(ranks: int, steps: int) -> None:
    """A rank that is slower by what jobs with equal ranks call detectable is found in most jobs; by half, in few."""
    chance = random.Random(ranks)
    equal = [result_of(job(chance, ranks, steps, 0.02, noise=0.03)).detectable for _ in range(40)]
    share = sorted(equal)[20]

    def found(slower: float) -> float:
        results = [result_of(job(chance, ranks, steps, 0.02, 1 + slower, 0.03)) for _ in range(200)]
        return sum(result.slow == (0,) and not result.may_be_chance for result in results) / 200

    assert found(share) > 0.65
    assert found(share / 2) < 0.3


def test_of_a_rank_that_takes_many_times_as_long_the_variation_does_not_matter_much() -> None:
    """Its time over that of the other varies by a factor of four, its logarithm from 2.8 to 4.2."""
    result = result_of([[53_000] * 4, [900, 2_000, 3_300, 1_500]])
    assert result.slow == (0,)


def test_noise_that_does_not_grow_with_the_time_hides_no_long_one() -> None:
    """In one of three steps the other rank waited 9 ms for a processor. The ratio varies by a factor of five, but the
    difference only from 41 to 50 ms."""
    result = result_of([[52_000] * 3, [1_800, 11_000, 2_000]])
    assert result.slow == (0,) and result.may_be_chance


@pytest.mark.parametrize(("ranks", "steps", "alike", "most"), [(2, 50, 0.5, 1), (8, 50, 0.8, 1), (8, 20, 0.9, 5)])
def test_equal_ranks_with_steps_that_drift_are_not_named(ranks: int, steps: int, alike: float, most: int) -> None:
    """The noise of a rank is an autoregressive process: a slow step is followed by slow ones. Without the wider error
    of such means about 2, 10 and 33 of 100 jobs name a rank."""
    chance = random.Random(ranks * steps)

    def drifting() -> list[int]:
        times, level = [], chance.gauss(0, 0.05)
        for _ in range(steps):
            times.append(round(1e6 * exp(level)))
            level = alike * level + chance.gauss(0, 0.05) * sqrt(1 - alike**2)
        return times

    results = [result_of([drifting() for _ in range(ranks)]) for _ in range(100)]
    assert sum(bool(result.slow) and not result.may_be_chance for result in results) <= most


def test_up_to_half_of_the_ranks_can_be_slow() -> None:
    times = [[100, 101, 99, 100, 102, 100, 98, 100, 101, 100]] * 3 + [[160 + number for number in range(10)]] * 3
    assert result_of(times).slow == (3, 4, 5)
    assert result_of([*times, times[3]]).slow == ()
    assert result_of([*times[:2], *times[3:5]]).slow == (2, 3)


def test_a_rank_that_is_slow_in_a_few_steps_is_not_slow() -> None:
    times = [[100] * 20, [100] * 20, [100] * 13 + [500] * 7]
    assert result_of(times).slow == ()


def test_a_straggler_exceeds_the_others_by_two_percent_or_by_what_is_asked_for() -> None:
    def jobs(ns: int) -> list[list[int]]:
        return [[10_000] * 10, [10_000] * 10, [ns] * 10]

    assert result_of(jobs(10_199)).slow == () and result_of(jobs(10_200)).slow == (2,)
    asked = stragglers(jobs(10_200), least=0.03)
    assert asked is not None and asked.slow == ()


def test_the_excess_can_be_relative_to_another_time() -> None:
    """An excess of 9 is less than 2 % of 500, although it is most of the ranks' own time."""
    times = [[10] * 10, [10] * 10, [19] * 10]
    for whole, slow in ((500, ()), (450, (2,)), (None, (2,))):
        result = stragglers(times, whole)
        assert result is not None and result.slow == slow


@pytest.mark.parametrize(("ranks", "steps"), [(1, 10), (2, 2), (64, 1), (2, 0), (0, 0)])
def test_too_few_ranks_or_steps_give_none(ranks: int, steps: int) -> None:
    assert stragglers([[100 * (rank + 1)] * steps for rank in range(ranks)]) is None
