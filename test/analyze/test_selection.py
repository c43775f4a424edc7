"""Which ranks of a large job are loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from build.hand_made_ranks import run_of_ranks

import torchprof
from torchprof.analyze.ranks.selection import Selection, select_ranks

pytest.importorskip("pyarrow")
pytest.importorskip("duckdb")

US = 1_000
EQUAL = [10_000 * US] * 20


def selected(times: Mapping[int, Sequence[int]], tmp_path: Path, **options: Any) -> Selection:
    """The selection of a job in which ranks had so much own work in each step."""
    for rank, own in times.items():
        run_of_ranks({("Net.a", "forward"): {rank: own}}, world_size=len(times), **options).save(f"{tmp_path}/job/")
    return select_ranks(torchprof.open_job(tmp_path / "job"))


def jittered(rank: int, ns: int) -> list[int]:
    chance = Random(rank)
    return [ns + chance.randrange(ns // 100) for _ in range(20)]


def test_slow_ranks_a_typical_one_and_the_fastest_are_selected(tmp_path: Path) -> None:
    """Of 40 ranks, 7 and 31 take 50 % longer, and 3 takes 10 % less."""
    base = {**dict.fromkeys(range(40), 10_000), 7: 15_000, 31: 15_000, 3: 9_000}
    times = {rank: jittered(rank, us * US) for rank, us in base.items()}
    selection = selected(times, tmp_path)
    by_work = sorted(times, key=lambda rank: sorted(times[rank])[9])
    typical = by_work[19]
    assert by_work[0] == 3
    assert selection.ranks == tuple(sorted([3, 7, 31, typical]))
    assert selection.sentence == (
        f"Loaded 4 of 40 ranks: ranks 7 and 31 (slow), rank {typical} (typical) and rank 3 (the least own work). "
        "--rank N loads one rank."
    )


def test_without_slow_ranks_the_one_with_the_most_work_is_selected(tmp_path: Path) -> None:
    times = {rank: [(10_000 + rank) * US] * 20 for rank in range(5)}
    selection = selected(times, tmp_path)
    assert selection.ranks == (0, 2, 4)
    assert "Loaded 3 of 5 ranks: rank 4 (the most own work, but not slow), rank 2 (typical)" in selection.sentence


@pytest.mark.parametrize("short", ["few steps", "another number of steps"])
def test_without_a_test_of_significance_the_one_with_the_most_work_is_selected(short: str, tmp_path: Path) -> None:
    """One step; and steps of which rank 1 has one less, so that they are not paired."""
    count = 1 if short == "few steps" else 20
    times = {rank: [(10_000 + 9_000 * (rank == 2)) * US] * count for rank in range(3)}
    times[1] = times[1][: max(count - 1, 1)]
    assert "rank 2 (the most own work, but not slow)" in selected(times, tmp_path).sentence


def test_the_work_of_the_device_counts_if_all_ranks_measured_it(tmp_path: Path) -> None:
    """Rank 1 is slow on the device, rank 2 on the CPU."""
    for all_measured in (True, False):
        for rank in range(5):
            on_device = run_of_ranks(
                {("Net.a", "forward"): {rank: [ns * (2 if rank == 1 else 1) for ns in EQUAL]}}, device="device"
            )
            on_cpu = run_of_ranks({("Net.a", "forward"): {rank: [ns * (2 if rank == 2 else 1) for ns in EQUAL]}})
            run = replace(on_device, lockstep={**on_device.lockstep, **on_cpu.lockstep})
            if rank == 4 and not all_measured:
                run = replace(run, metas=on_cpu.metas)
            run.save(f"{tmp_path}/{all_measured}/")
        sentence = select_ranks(torchprof.open_job(tmp_path / str(all_measured))).sentence
        assert f"rank {1 if all_measured else 2} (slow)" in sentence


def test_without_own_work_one_rank_is_selected(tmp_path: Path) -> None:
    for rank in range(2, 5):
        run = run_of_ranks({("Net.a", "forward"): {rank: EQUAL}})
        replace(run, lockstep={}).save(f"{tmp_path}/job/")
    selection = select_ranks(torchprof.open_job(tmp_path / "job"))
    assert selection == ((2,), "Loaded rank 2 of 3 ranks: the own work of the ranks was not recorded.")
