"""Sentences about the ranks of a job: stragglers, hangs; and the choice of the ranks that are worth having whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

from torchprof.analyze.report import name_of_layer
from torchprof.analyze.sentences import about_missing_ranks
from torchprof.errors import printable
from torchprof.ranks import Balance, balance_of
from torchprof.ranks.compared import IN_NO_OP, Times
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.ranks.pipeline_report import about_pipeline
from torchprof.ranks.significance import CLEARLY_SLOWER
from torchprof.ranks.slow import PARTS, Difference, Late, Slow
from torchprof.run.collectives import Entered, Unfinished
from torchprof.run.formats import UNKNOWN, NumberRanges, format_time, ranks_in_words
from torchprof.run.groups import lists_by_key
from torchprof.run.measures import SampleKey
from torchprof.run.merge import merge
from torchprof.run.meta import RunWarning
from torchprof.run.run import Run
from torchprof.run.sentences import RANKS_CHOSEN
from torchprof.run.words import FORWARD, OUTSIDE, StepEnd

_ALIKE = 0.01  # FLOPs that differ by a smaller share are the same work
_WORTH_SAYING = 0.005  # of a step
_MANY_TIMES = 10
_HANGS = 2  # a step that took this many times the longest other step is a hang
_MAY_BE_CHANCE = "This may be chance: too few steps, or steps that were not kept or not matched between ranks."


def sentences(run: Run, balance: Balance) -> Iterator[str]:
    """The number of ranks and the missing ones; hangs; stragglers, where they are slow, and how long others wait."""
    mesh = " × ".join(f"{printable(dim.name)} {dim.size}" for dim in run.meta.mesh)
    yield f"{len(run.metas)} ranks{f'; mesh: {mesh}' if mesh else ''}."
    yield from about_missing_ranks(run)
    yield from about_hang(run)
    late_first = balance.late is not None and balance.late.exceeds_slow
    about_slow = [] if balance.slow is None else [*_about_slow(run, balance.slow, late_first)]
    about_late = [] if balance.late is None else [*_about_late(run, balance.late, bool(about_slow) and not late_first)]
    yield from about_late + about_slow if late_first else about_slow + about_late
    if run.choice is None:
        yield from _about_none(run, balance)
    for judged in judged_pipelines(run):
        yield from about_pipeline(judged)
    if balance.inferred:
        yield (
            f"The group of {balance.inferred} calls of collectives is not in the traces. All {len(run.metas)} ranks of "
            "the job made the same calls, so the group is assumed to be all of them."
        )
    if any(layer.ranks for layer in run.layers) and len(balance.peers) == 1:
        yield "Some layers are only on some ranks: their work differs by design."


def verdict_on_ranks(run: Run) -> tuple[bool, str]:
    """Whether a job has stragglers beyond chance; and in words these, or that there are none, or they are unknown."""
    balance = balance_of(run)
    named = [part for part in (balance.slow, balance.late) if part is not None]
    sentence = straggler(run, balance) or " ".join(_about_none(run, balance))
    return any(not part.may_be_chance for part in named), sentence


def _about_none(run: Run, balance: Balance) -> Iterator[str]:
    """Sentences that stragglers are unknown, or that there are none; none if there are some."""
    medians = [rank.typical_ns for rank in balance.ranks if rank.typical_ns is not None]
    is_median = len(medians) == len(balance.ranks)
    work = medians if is_median else [rank.work_ns for rank in balance.ranks if rank.work_ns is not None]
    if len(work) < len(balance.ranks):
        which = "all ranks" if not work else "some ranks"
        yield f"Stragglers are unknown: so is the own work of {which}."
    elif balance.slow is not None or balance.late is not None:
        return
    elif not any(len(peers) > 1 for peers in balance.peers):
        yield "The ranks have different stages of a pipeline. Their work differs by design, so it is not compared."
    elif len(balance.peers) > 1:
        yield "No straggler found among ranks with the same stages of a pipeline."
        yield _about_detection(balance.detectable)
    else:
        least, most = format_time(min(work)), format_time(max(work))
        over_steps = " (medians over the steps)" if is_median and any(meta.steps > 1 for meta in run.metas) else ""
        yield f"No straggler found: own work takes {least} to {most}{unit_of(run)}{over_steps}."
        yield _about_detection(balance.detectable)
        if not balance.compares_waiting:
            yield "Whether others wait for a rank is unknown: ranks are missing, or groups or steps are unknown."


def straggler(run: Run, balance: Balance) -> str:
    """The sentence that names the stragglers of a job; "" if none was found."""
    first = balance.first
    if first is None:
        return ""
    sentence = next(_about_late(run, first, False) if isinstance(first, Late) else _about_slow(run, first, False))
    return f"{sentence} {_MAY_BE_CHANCE}" if first.may_be_chance else sentence


def _about_detection(detectable: float | None) -> str:
    """A sentence: how slow a rank must be to be found."""
    if detectable is None:
        few = "Steps are too few, or were not kept or not matched between ranks"
        return f"{few}: only a rank whose own work takes {CLEARLY_SLOWER:.0%} longer would have been named."
    if detectable < 1:
        return f"A rank whose own work takes {ceil(100 * detectable)}% longer would most likely have been found."
    times = "many times" if detectable > _MANY_TIMES else f"{1 + detectable:.1f} times"
    return f"Only a rank whose own work takes {times} as long would have been found."


def unit_of(run: Run) -> str:
    """The unit of times as the end of a phrase: " a step", " a cycle" or ""."""
    if any(meta.steps for meta in run.metas):
        return " a step"
    return " a cycle" if any(meta.cycles > 1 for meta in run.metas) else ""


def _about_slow(run: Run, slow: Slow, are_more: bool) -> Iterator[str]:
    """Sentences about ranks whose own work takes longer. ``are_more``: late ranks were named before."""
    is_one, unit = len(slow.ranks) == 1, unit_of(run)
    words, takes = ranks_in_words(slow.ranks), _from_to(slow.work_ns)
    others = f"the others with {ranks_in_words(slow.stages, 'stage')}" if slow.stages else "the others"
    the_others = f"that of {others} {format_time(slow.others_ns)} (median)"
    if are_more:
        yield f"The own work of {words} takes longer, too: {takes}{unit}, {the_others}."
    else:
        are = "is the straggler: its" if is_one else "are the stragglers: their"
        cost = ""
        if slow.costs is not None and slow.costs >= _WORTH_SAYING:
            cost = f"; without that,{unit or ' the recording'} would be up to {slow.costs:.0%} shorter"
        yield f"{words.capitalize()} {are} own work takes {takes}{unit}, {the_others}{cost}."
    who = "It" if is_one else "One of them"
    findings = []
    if slow.slowest_in is not None and slow.slowest_in.of > 1:
        findings.append(f"the slowest in {often(slow.slowest_in)} {unit.removeprefix(' a ')}s")
    is_last = slow.last_in is not None and 2 * slow.last_in.times > slow.last_in.of
    if slow.last_in is not None and (is_last or are_more):
        findings.append(f"the last to arrive in {often(slow.last_in)} collectives")
    if findings:
        yield f"{who} was {(' and ' if is_last else ', but ').join(findings)}."
    if slow.may_be_chance:
        yield _MAY_BE_CHANCE
    if slow.others_waiting_ns and not are_more:
        least = "at least " if slow.others_waiting_is_lower_bound else ""
        yield f"The others wait in collectives for {least}{format_time(slow.others_waiting_ns)}{unit} (median)."
    if slow.difference is not None:
        yield _about_difference(run, slow.difference, slow.ranks)
    if slow.times_flops is not None:
        who = "It" if is_one else f"Rank {slow.ranks[0]}"
        if slow.times_flops >= 1 + CLEARLY_SLOWER:
            yield f"{who} has more work: {slow.times_flops:.2f} times the FLOPs of the others (median)."
        elif abs(slow.times_flops - 1) < _ALIKE:
            yield f"{who} has as many FLOPs as the others (median): the same work takes longer there."


def _from_to(times: Sequence[int]) -> str:
    """The shortest and the longest time; once if they look the same."""
    return " to ".join(dict.fromkeys(str(format_time(ns)) for ns in (min(times), max(times))))


def _about_late(run: Run, late: Late, are_more: bool) -> Iterator[str]:
    """Sentences about ranks that are late in collectives, though their own work is not longer as far as it is compared.
    ``are_more``: slow ranks were named before."""
    is_one = len(late.ranks) == 1
    are = "is the straggler" if is_one else "are the stragglers"
    if are_more:
        are = "is late, too" if is_one else "are late, too"
    yield (
        f"{ranks_in_words(late.ranks).capitalize()} {are}: in collectives the others wait {_from_to(late.late_ns)}"
        f"{unit_of(run)} longer than {'it' if is_one else 'they'} (median), {late.share:.0%} of a step."
    )
    if late.may_be_chance:
        yield _MAY_BE_CHANCE
    if late.difference is not None:
        yield _about_difference(run, late.difference, late.ranks)


def _about_difference(run: Run, difference: Difference, ranks: Sequence[int]) -> str:
    """A sentence: the layer, or the part of the step, that the ranks spend more time in."""
    of_rank = "" if len(ranks) == 1 else f" of rank {ranks[0]}"
    where = f"{name_of(run, difference.layer)}{f' in {difference.phase}' if difference.phase else ''}"
    if difference.layer == IN_NO_OP:
        where = "in no operator (Python, or waiting for data)"
    elif difference.part is not None:
        where = PARTS[difference.part]
    elif difference.layer == OUTSIDE:
        where = "outside of all layers"
    return f"Most of the difference{of_rank} is {where}: {format_time(difference.excess_ns)}{unit_of(run)}."


def often(times: Times | None) -> str:
    """How often, as "3 of 4"."""
    return UNKNOWN if times is None else f"{times.times} of {times.of}"


def name_of(run: Run, layer: int) -> str:
    """The printable name of a layer by its index, of work of no layer, or of time in no operator."""
    return "(in no operator)" if layer == IN_NO_OP else name_of_layer(run, layer)


# Hangs


def about_hang(run: Run) -> Iterator[str]:
    """Where each rank was when the recording ended, if the job hangs: the last step has taken far longer than any
    other, or ranks wait in a collective that other ranks never called."""
    missed = {step.rank: _first_missed(run, step) for step in run.unfinished if _stays(step)}
    if not any(_hangs(run, step) or (step.waits and missed.get(step.rank)) for step in run.unfinished):
        return
    ranks_by_place = lists_by_key((_where(run, step), step.rank) for step in run.unfinished)
    lasted = format_time(max(step.ns for step in run.unfinished))
    where_each_is = "; ".join(
        f"{ranks_in_words(ranks)} {'was' if len(ranks) == 1 else 'were'} {where}"
        for where, ranks in ranks_by_place.items()
    )
    yield f"A step was still running at the end of the recording, after {lasted}: {where_each_is}."
    for called, absent in dict(filter(None, missed.values())).items():
        yield f"{ranks_in_words(absent).capitalize()} had not called {called}, which others had."


def hanging_ranks(run: Run) -> list[int]:
    """The ranks that others wait for, if the job hangs: those that had not called a collective, or that stay in a place
    where they wait for none."""
    if not [*about_hang(run)]:
        return []
    missed = filter(None, (_first_missed(run, step) for step in run.unfinished if _stays(step)))
    absent = {rank for _, ranks in missed for rank in ranks}
    return sorted(absent or {step.rank for step in run.unfinished if _stays(step) and not step.waits})


def _stays(step: Unfinished) -> bool:
    """Whether the rank was in the same place for most of the step."""
    return 2 * step.since_ns > step.ns


def _hangs(run: Run, step: Unfinished) -> bool:
    """Whether the step took far longer than any other, in one layer, operator or collective. In a loop that marks no
    steps, work of no layer may be what follows the loop, such as saving the model."""
    steps = run.samples.get(SampleKey(OUTSIDE, FORWARD, step.rank, "cpu", "step_ns"))
    are_marked = any(meta.rank == step.rank and meta.step_end == StepEnd.MARK for meta in run.metas)
    is_of_step = step.layer >= 0 or (step.name != "" and are_marked)
    return steps is not None and step.ns > _HANGS * steps.max and _stays(step) and is_of_step


def _first_missed(run: Run, step: Unfinished) -> tuple[str, list[int]] | None:
    """The first collective of a rank's last step that other ranks have not called as often, and these ranks. Ranks that
    have not called it in any step are not expected to."""

    def times(other: Unfinished, called: Entered) -> int:
        return sum(each.times for each in other.entered if each[:3] == called[:3])

    for called in step.entered:
        peers = {
            rank
            for key, lockstep in run.lockstep.items()
            if (key.layer, key.phase, key.what) == called[:3]
            for rank in lockstep.ranks
        }
        absent = [other.rank for other in run.unfinished if other.rank in peers and times(other, called) < called.times]
        if absent:
            return _collective(run, called.layer, called.phase, called.name), absent
    return None


def _collective(run: Run, layer: int, phase: str, name: str) -> str:
    return f"{printable(name)} of {name_of_layer(run, layer)} in {phase}"


def _where(run: Run, step: Unfinished) -> str:
    """Where a rank was when the recording ended, and for how long."""
    lasted = format_time(step.since_ns)
    if step.waits:
        return f"in {_collective(run, step.layer, step.phase, step.name)} for {lasted}"
    if step.layer < 0 and not step.name:
        return f"in no operator and in no layer for {lasted}"
    inside = f"{printable(step.name)} of " if step.name else ""
    return f"in {inside}{name_of_layer(run, step.layer)} in {step.phase} for {lasted}"


# The ranks of a large job whose whole runs are worth having

MOST_WHOLE_RANKS = 64
"""The largest number of ranks that views of a whole run show one by one, the page and ``torchprof show``."""
_STRAGGLERS = 3  # the most slow ranks, and the most late ranks, that are chosen


def chosen_ranks(comparison: Run) -> tuple[int, ...]:
    """The ranks to have whole, ascending. ``comparison``: the merged ``Run.to_compare`` of all ranks.

    They are ranks that let the others hang, the slowest stragglers, or else the rank with the most own work, and ranks
    that are not slow: from the fastest to the one in the middle, in pipelines with the same stages. The pipeline of the
    first is chosen whole.
    """
    balance = balance_of(comparison)
    work = {rank.rank: rank.work_ns if rank.typical_ns is None else rank.typical_ns for rank in balance.ranks}
    known = sorted((ns, rank) for rank, ns in work.items() if ns is not None)
    ordered = [rank for _, rank in known] or [rank.rank for rank in balance.ranks]  # the fastest first
    slow, late = _stragglers(balance)
    named = {*hanging_ranks(comparison)[:_STRAGGLERS], *slow[:_STRAGGLERS], *late[:_STRAGGLERS]} or {ordered[-1]}
    first = (*slow, *late, *named)[0]
    peers = next(peers for peers in balance.peers if first in peers)
    others = [rank for rank in ordered if rank in peers and rank not in named.union(slow, late)]
    middle = len(others) // 2
    spread_out = [others[number * middle // len(named)] for number in range(len(named) + 1)] if others else []
    pipeline = {rank for pipeline in comparison.pipelines if pipeline.rank == first for rank in pipeline.group}
    return tuple(sorted(named.union(spread_out, pipeline.intersection(ordered))))


def _stragglers(balance: Balance) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The slow ranks and the late ranks."""
    return balance.slow.ranks if balance.slow else (), balance.late.ranks if balance.late else ()


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
        missing=tuple((ranks[0], ranks[-1]) for ranks in NumberRanges.of(comparison.missing_ranks).ranges),
        slow=slow,
        late=late,
        may_be_chance=balance.slow is not None and balance.slow.may_be_chance,
    )
    return replace(run, metas=tuple(replace(meta, warnings=(*meta.warnings, warning)) for meta in run.metas))
