"""Sentences about a hang: where each rank was when the recording ended in the middle of a step."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.records import layer_name
from torchprof.analyze.report import printable
from torchprof.run.cost import format_time
from torchprof.run.lockstep import ranks_in_words
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey
from torchprof.run.unfinished import Entered, Unfinished
from torchprof.run.words import FORWARD, OUTSIDE, StepEnd

_HANGS = 2  # a step that took this many times the longest other step is a hang


def about_hang(run: Run) -> Iterator[str]:
    """Where each rank was when the recording ended, if the job hangs: the last step has taken far longer than any
    other, or ranks wait in a collective that other ranks never called."""
    missed = {step.rank: _first_missed(run, step) for step in run.unfinished if _stays(step)}
    if not any(_hangs(run, step) or (step.waits and missed.get(step.rank)) for step in run.unfinished):
        return
    places: dict[str, list[int]] = {}
    for step in run.unfinished:
        places.setdefault(_where(run, step), []).append(step.rank)
    lasted = format_time(max(step.ns for step in run.unfinished))
    where_each_is = "; ".join(
        f"{ranks_in_words(which)} {'was' if len(which) == 1 else 'were'} {where}" for where, which in places.items()
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
    """Whether the step took far longer than any other, in one layer, operator or collective.

    In a loop that marks no steps, work of no layer may be what follows the loop, such as saving the model.
    """
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
    lasted = format_time(step.since_ns)
    if step.waits:
        return f"in {_collective(run, step.layer, step.phase, step.name)} for {lasted}"
    if step.layer < 0 and not step.name:
        return f"in no operator and in no layer for {lasted}"
    inside = f"{printable(step.name)} of " if step.name else ""
    return f"in {inside}{name_of_layer(run, step.layer)} in {step.phase} for {lasted}"


def name_of_layer(run: Run, layer: int) -> str:
    """The printable name of a layer by its index, or of work of no layer."""
    return printable(layer_name(run, layer))
