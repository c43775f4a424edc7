"""Which ranks of a large job are gathered or loaded whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from build.hand_made_ranks import run_of_ranks
from build.jobs import fed_slowly, planted

import torchprof
from torchprof.ranks import balance_of
from torchprof.ranks.sentences import chosen_ranks, with_comparison
from torchprof.run.run import Run

US = 1_000
EQUAL = [10_000 * US] * 20


def comparison(times: Mapping[int, Sequence[int]]) -> Run:
    """What is compared of a job in which ranks had so much own work in each step."""
    runs = [run_of_ranks({("Net.a", "forward"): {rank: own}}, world_size=len(times)) for rank, own in times.items()]
    return torchprof.merge(run.to_compare() for run in runs)


def jittered(rank: int, ns: int) -> list[int]:
    chance = Random(rank)
    return [ns + chance.randrange(ns // 100) for _ in range(20)]


def test_stragglers_and_more_that_are_not_slow_are_chosen() -> None:
    """Of 40 ranks, 7 and 31 take 50 % longer, and 3 takes 10 % less. With them three others: the fastest, the one in
    the middle of those that are not slow, and one between."""
    base = {**dict.fromkeys(range(40), 10_000), 7: 15_000, 31: 15_000, 3: 9_000}
    times = {rank: jittered(rank, us * US) for rank, us in base.items()}
    chosen = chosen_ranks(comparison(times))
    by_work = [rank for rank in sorted(times, key=lambda rank: sorted(times[rank])[9]) if rank not in (7, 31)]
    assert by_work[0] == 3
    assert chosen == tuple(sorted([7, 31, by_work[0], by_work[9], by_work[19]]))


def test_no_more_than_three_stragglers_are_chosen_the_slowest_first() -> None:
    times = {rank: jittered(rank, (10_000 + 1_000 * max(0, rank - 14)) * US) for rank in range(20)}
    chosen = chosen_ranks(comparison(times))
    assert {rank for rank in chosen if rank > 14} == {17, 18, 19} and len(chosen) == 7


def test_late_ranks_are_chosen_too() -> None:
    """Rank 2 has as much own work as the others, which wait for it."""
    assert 2 in chosen_ranks(fed_slowly().to_compare())


def test_without_stragglers_the_one_with_the_most_work_is_chosen() -> None:
    assert chosen_ranks(comparison({rank: [(10_000 + rank) * US] * 20 for rank in range(5)})) == (0, 2, 4)


def test_without_own_work_some_ranks_are_chosen() -> None:
    runs = [run_of_ranks({("Net.a", "forward"): {rank: EQUAL}}) for rank in range(2, 7)]
    compared = torchprof.merge(replace(run, lockstep={}).to_compare() for run in runs)
    assert chosen_ranks(compared) == (2, 4, 6)
    assert chosen_ranks(runs[0].to_compare()) == (2,)


def test_a_run_of_chosen_ranks_has_the_verdict_on_all() -> None:
    runs = list(planted().of_ranks([0, 2]))
    run = with_comparison(torchprof.merge(runs), planted().to_compare())
    (warning,) = (warning for warning in run.warnings if warning.code == "ranks_chosen")
    assert str(warning) == (
        "4 ranks were compared: Rank 2 is the straggler: its own work takes 25.000ms a step, that of the others "
        "16.000ms (median). Only ranks 0 and 2 are in this run, with all figures: stragglers, and some others."
    )
    assert str(warning) in run.report("ranks") and str(warning) in run.report("tree")


def test_a_run_of_chosen_ranks_names_no_other_stragglers_than_the_job_has(reloaded: Any) -> None:
    """200 ranks, whose speeds differ by 0.6 %: none is an outlier. The slowest differs from the fastest by more."""
    chance = Random(3)
    speeds = [1 + 0.006 * chance.gauss(0, 1) for _ in range(200)]
    own = {rank: [round(1e7 * speed * chance.gauss(1, 0.01)) for _ in range(20)] for rank, speed in enumerate(speeds)}
    whole = run_of_ranks({("Net.a", "forward"): own})
    assert balance_of(whole).slow is None
    chosen = chosen_ranks(whole.to_compare())
    run = torchprof.merge(whole.of_ranks(chosen))
    assert balance_of(run).slow is not None  # the test of these three alone
    run = with_comparison(run, whole.to_compare())
    assert balance_of(run).slow is None and balance_of(run).detectable is None
    assert run.report("ranks").count("No straggler found") == 1
    assert reloaded(run) == run


def test_unknown_work_is_not_called_equal() -> None:
    compared = replace(fed_slowly(), lockstep={}).to_compare()
    run = with_comparison(torchprof.merge(fed_slowly().of_ranks([0, 2])), compared)
    assert "4 ranks were compared: Stragglers are unknown: so is the own work of all ranks." in run.report("ranks")


def test_a_job_folder_has_the_comparison_of_the_runs_in_it(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("duckdb")
    for run in planted().of_ranks(range(4)):
        run.save(f"{tmp_path}/job/")
    whole = torchprof.merge(run.to_compare() for run in planted().of_ranks(range(4)))
    assert torchprof.open_job(f"{tmp_path}/job").comparison() == whole
