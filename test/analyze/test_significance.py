"""Stragglers: the probability is exact, and the error rates in simulated jobs are as documented."""

from __future__ import annotations

import math
import random
from itertools import product

import pytest

from torchprof.analyze.ranks.significance import probability_of_sum, stragglers


@pytest.mark.parametrize(("ranks", "steps"), [(2, 5), (3, 4), (5, 3), (4, 1)])
def test_the_probability_equals_a_count_of_all_throws(ranks: int, steps: int) -> None:
    sums = [sum(throw) for throw in product(range(ranks), repeat=steps)]
    for total in range(steps * (ranks - 1) + 1):
        assert probability_of_sum(total, ranks, steps) == sum(one >= total for one in sums) / len(sums)


def test_for_two_ranks_the_probability_is_that_of_the_sign_test() -> None:
    assert probability_of_sum(9, 2, 10) == pytest.approx(11 / 1024)


def test_for_many_steps_the_normal_limit_is_close() -> None:
    exact = sum(math.comb(40, k) for k in range(26, 41)) / 2**40
    assert probability_of_sum(26, 2, 40) == pytest.approx(exact, rel=0.02)


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


@pytest.mark.parametrize("hiccups", [0.02, 0.05])
@pytest.mark.parametrize(
    ("ranks", "steps", "jobs"), [(2, 10, 300), (3, 10, 300), (8, 10, 200), (64, 10, 80), (64, 50, 20)]
)
def test_equal_ranks_are_not_reported_and_a_slow_rank_is(ranks: int, steps: int, jobs: int, hiccups: float) -> None:
    """Fewer than 5 % of the jobs report any of their equal ranks; in more than 95 % exactly the rank that is 15 %
    slower is reported."""
    chance = random.Random(ranks * steps + round(100 * hiccups))
    named = sum(bool(stragglers(job(chance, ranks, steps, hiccups))) for _ in range(jobs))
    found = sum(stragglers(job(chance, ranks, steps, hiccups, 1.15)) == [0] for _ in range(jobs))
    assert named < 0.05 * jobs
    assert found > 0.95 * jobs


@pytest.mark.parametrize("noise", [0.05, 0.1])
def test_equal_ranks_with_much_noise_are_not_reported(noise: float) -> None:
    chance = random.Random(7)
    for ranks, jobs in ((2, 200), (4, 200), (16, 100)):
        assert sum(bool(stragglers(job(chance, ranks, 10, 0.02, 1, noise))) for _ in range(jobs)) < 0.05 * jobs


def test_up_to_half_of_the_ranks_can_be_slow() -> None:
    times = [[100, 101, 99, 100, 102, 100, 98, 100, 101, 100]] * 3 + [[160 + at for at in range(10)]] * 3
    assert stragglers(times) == [3, 4, 5]
    assert stragglers([*times, times[3]]) == []
    assert stragglers([*times[:2], *times[3:5]]) == [2, 3]


def test_a_rank_that_is_slow_in_a_few_steps_is_not_slow() -> None:
    times = [[100] * 20, [100] * 20, [100] * 13 + [500] * 7]
    assert stragglers(times) == []


def test_the_excess_can_be_relative_to_another_time() -> None:
    """An excess of 9 is less than a tenth of 100, although it is most of the ranks' own time."""
    times = [[10] * 10, [10] * 10, [19] * 10]
    assert stragglers(times, 100) == []
    assert stragglers(times, 90) == stragglers(times) == [2]


@pytest.mark.parametrize(("ranks", "steps"), [(1, 10), (2, 4), (64, 1), (3, 2), (2, 0), (0, 0)])
def test_too_few_ranks_or_steps_give_none(ranks: int, steps: int) -> None:
    assert stragglers([[100 * (rank + 1)] * steps for rank in range(ranks)]) is None
