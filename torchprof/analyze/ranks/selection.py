"""Chooses the ranks of a large job whose whole runs are worth having, from a comparison of all of them: for
``prof.gather`` inside of a job, and for job folders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.ranks.sentences import straggler
from torchprof.run.run import Run
from torchprof.run.warnings import RunWarning

_STRAGGLERS = 3  # the most slow ranks, and the most late ranks, that are chosen


def chosen_ranks(comparison: Run) -> tuple[int, ...]:
    """The ranks to have whole, ascending. ``comparison``: the merged ``Run.to_compare`` of all ranks.

    They are the slowest stragglers, or the rank with the most own work if there is none, and more ranks that are not
    slow: from the fastest to the one in the middle. So in the run of the chosen ranks, too, most are not slow.
    """
    balance = balance_of(comparison)
    ordered = [rank.rank for rank in sorted(balance.ranks, key=lambda rank: rank.typical_ns or rank.work_ns or 0)]
    slow = balance.slow.ranks[:_STRAGGLERS] if balance.slow else ()
    late = balance.late.ranks[:_STRAGGLERS] if balance.late else ()
    named = {*slow, *late} or {ordered[-1]}
    others = [rank for rank in ordered if rank not in named]
    return tuple(sorted(named.union(_spread_out(others[: len(others) // 2 + 1], len(named) + 1))))


def _spread_out(ranks: Sequence[int], count: int) -> list[int]:
    """At most so many of the ranks, at equal distances, with the first and the last."""
    return [ranks[number * (len(ranks) - 1) // (count - 1)] for number in range(count)] if ranks else []


def with_comparison(run: Run, comparison: Run) -> Run:
    """The run of the chosen ranks, with a warning that has the verdict on all ranks."""
    verdict = straggler(comparison) or "no straggler found."
    whole = tuple(meta.rank for meta in run.metas)
    warning = RunWarning.of("ranks_chosen", count=len(comparison.metas), verdict=verdict, ranks=whole)
    return replace(run, metas=tuple(replace(meta, warnings=(*meta.warnings, warning)) for meta in run.metas))
