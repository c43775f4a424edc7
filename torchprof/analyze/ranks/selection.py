"""Chooses the ranks of a job folder to load, if the job is too large to load all of them."""

from __future__ import annotations

from statistics import median_low
from typing import NamedTuple

from torchprof.analyze.ranks.significance import stragglers
from torchprof.run.job_folder import JobFolder
from torchprof.run.lockstep import STEP, ranks_in_words

_DEVICES = {"device": "device_ns", "cpu": "cpu_ns"}
"""Where own work may have been measured, the first choice first, and the field of ``Cost`` that says so."""


class Selection(NamedTuple):
    """Some ``ranks`` of a job, ascending, and a ``sentence`` that says which and why."""

    ranks: tuple[int, ...]
    sentence: str


class _OwnWork(NamedTuple):
    """The own work of a rank, in ns, in each of the steps with these ``numbers``."""

    rank: int
    numbers: list[int]
    ns: list[int]


def select_ranks(job: JobFolder) -> Selection:
    """The slow ranks of a job, by the test of ``stragglers``; if none is slow, the rank with the most own work. With
    them the rank with the least own work, and one in the middle.

    Own work is that in the median step, as in ``balance_of``. DuckDB reads it; no run is loaded. Raises TorchprofError
    without DuckDB.
    """
    everyone = job.ranks
    work = _own_work(job)
    if not work:
        why = "the own work of the ranks was not recorded"
        return Selection(everyone[:1], f"Loaded rank {everyone[0]} of {len(everyone):,} ranks: {why}.")
    by_work = [of_rank.rank for of_rank in sorted(work, key=lambda of_rank: median_low(of_rank.ns))]
    fastest, typical, slowest = by_work[0], by_work[(len(by_work) - 1) // 2], by_work[-1]
    are_paired = len(work) == len(everyone) and all(of_rank.numbers == work[0].numbers for of_rank in work)
    found = stragglers([of_rank.ns for of_rank in work]) if are_paired else None
    slow = [work[index].rank for index in found.slow] if found else []
    first = f"{ranks_in_words(slow)} (slow)" if slow else f"rank {slowest} (the most own work, but not slow)"
    ranks = tuple(sorted({*(slow or [slowest]), typical, fastest}))
    return Selection(
        ranks,
        f"Loaded {len(ranks)} of {len(everyone):,} ranks: {first}, rank {typical} (typical) and rank {fastest} (the "
        "least own work). --rank N loads one rank.",
    )


def _own_work(job: JobFolder) -> list[_OwnWork]:
    """The own work of the ranks, ascending: on the device if all ranks measured it and any worked there, else on the
    CPU; empty if unknown."""
    for device, measure in _DEVICES.items():
        [(are_measured,)] = job.sql(f"SELECT bool_and(list_contains(measured, '{measure}')) FROM ranks").fetchall()
        if not are_measured:
            continue
        lines = job.sql(
            "SELECT rank, list(number ORDER BY number), list(ns ORDER BY number) FROM steps "
            f"WHERE what = '{STEP}' AND device = '{device}' GROUP BY rank ORDER BY rank"
        ).fetchall()
        if any(any(ns) for _, _, ns in lines):
            return [_OwnWork(*line) for line in lines]
    return []
