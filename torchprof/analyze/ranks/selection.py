"""Chooses the ranks of a large job whose whole runs are worth having, from a comparison of all of them: for
``prof.gather`` inside of a job, for job folders and saved runs, and for the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchprof.analyze.ranks.balance import Balance, balance_of
from torchprof.analyze.ranks.sentences import about_hang, hanging_ranks, verdict_on_ranks
from torchprof.run.merge import merge
from torchprof.run.run import Run
from torchprof.run.sentences import RANKS_CHOSEN
from torchprof.run.warnings import RunWarning

MOST_WHOLE_RANKS = 64
"""The largest number of ranks that views of a whole run show one by one, the page and ``torchprof show``."""
_STRAGGLERS = 3  # the most slow ranks, and the most late ranks, that are chosen


def chosen_ranks(comparison: Run) -> tuple[int, ...]:
    """The ranks to have whole, ascending. ``comparison``: the merged ``Run.to_compare`` of all ranks.

    They are ranks that let the others hang, the slowest stragglers, or else the rank with the most own work, and more
    ranks that are not slow: from the fastest to the one in the middle. In pipelines these have the same stages as the
    first of the slowest, and its pipeline is chosen whole.
    """
    balance = balance_of(comparison)
    work = {rank.rank: rank.work_ns if rank.typical_ns is None else rank.typical_ns for rank in balance.ranks}
    known = sorted((ns, rank) for rank, ns in work.items() if ns is not None)
    ordered = [rank for _, rank in known] or [rank.rank for rank in balance.ranks]
    slow, late = _stragglers(balance)
    named = {*hanging_ranks(comparison)[:_STRAGGLERS], *slow[:_STRAGGLERS], *late[:_STRAGGLERS]} or {ordered[-1]}
    first = (*slow, *late, *named)[0]
    peers = next(peers for peers in balance.peers if first in peers)
    others = [rank for rank in ordered if rank in peers and rank not in named.union(slow, late)]
    spread_out = _spread_out(others[: len(others) // 2 + 1], len(named) + 1)
    pipeline = {rank for of in comparison.pipelines if of.rank == first for rank in of.group}
    return tuple(sorted(named.union(spread_out, pipeline.intersection(ordered))))


def _stragglers(balance: Balance) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return balance.slow.ranks if balance.slow else (), balance.late.ranks if balance.late else ()


def _spread_out(ranks: Sequence[int], count: int) -> list[int]:
    """At most so many of the ranks, at equal distances, with the first and the last."""
    return [ranks[number * (len(ranks) - 1) // (count - 1)] for number in range(count)] if ranks else []


def run_of_chosen(run: Run) -> Run:
    """The run of the chosen ranks of a run of all ranks, with the warning of ``with_comparison``."""
    comparison = run.to_compare()
    return with_comparison(merge(run.of_ranks(chosen_ranks(comparison))), comparison)


def with_comparison(run: Run, comparison: Run) -> Run:
    """The run of the chosen ranks, with a warning that has the verdict on all ranks. Its report names only these
    stragglers: the chosen ranks differ more than any few ranks would."""
    balance = balance_of(comparison)
    slow, late = _stragglers(balance)
    warning = RunWarning.of(
        RANKS_CHOSEN,
        count=len(comparison.metas),
        verdict=" ".join([*about_hang(comparison), verdict_on_ranks(comparison)[1]]),
        ranks=tuple(meta.rank for meta in run.metas),
        missing=comparison.missing_ranks,
        slow=slow,
        late=late,
        may_be_chance=balance.slow is not None and balance.slow.may_be_chance,
    )
    return replace(run, metas=tuple(replace(meta, warnings=(*meta.warnings, warning)) for meta in run.metas))
