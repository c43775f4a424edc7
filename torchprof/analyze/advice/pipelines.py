"""Pipelines whose stages take unequally long, or that are idle while they fill and drain."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.pipeline.sentences import about_slow_stages, moved_layers, what_it_is
from torchprof.analyze.pipeline.splits import Judged, Saving
from torchprof.run.words import OUTSIDE_NAME


@rule
def unequal_stages(evidence: Evidence) -> Iterator[Advice]:
    """A stage of a pipeline that takes longer than the others, of which one or two layers can be moved to a neighbor so
    that a step is at least 3 % shorter.

    Evidence: the actions of all ranks of a pipeline, in whose recorded order a step is simulated with the mean
    durations of the stages, and with those after the move. A layer takes its share of the recorded time of its stage.
    The gain is the difference, on each rank and in each step. Needs a run of all ranks, with layers in a numbered
    container (``layers.4``).
    """
    for judged in evidence.pipelines:
        split = judged.split
        if split is None or split.slow is None or split.move is None:
            continue
        move, saving = split.move
        root = judged.replicas.times[move.source].root
        yield Advice(
            evidence.run.layers[root].name,
            about_slow_stages(split.slow),
            f"Move {moved_layers(evidence.run, judged.replicas, move)} to stage {move.target}: in a simulation of the "
            f"schedule, a step is then {saving.share:.0%} shorter.",
            _in_all_steps(judged, saving),
        )


@rule
def few_microbatches(evidence: Evidence) -> Iterator[Advice]:
    """A pipeline that is idle while it fills and drains, if twice as many microbatches of half the size would make a
    step at least 3 % shorter.

    Evidence: as of ``unequal_stages``, in the schedules GPipe and 1F1B. A step is simulated with twice as many
    microbatches, each of which takes half the time. The gain is the difference: it is smaller if half a microbatch
    takes more than half of the time.
    """
    for judged in evidence.pipelines:
        split, bubble = judged.split, judged.bubble
        if split is None or bubble is None or split.doubled is None:
            continue
        yield Advice(
            OUTSIDE_NAME,
            f"Ranks are idle for {bubble.schedule:.0%} of a step while the pipeline fills and drains. "
            f"{what_it_is(judged.replicas)}",
            f"Use more microbatches, such as {2 * split.microbatches} of half the size: a step is at most "
            f"{split.doubled.share:.0%} shorter. An interleaved schedule with several stages on each rank "
            "(`ScheduleInterleaved1F1B`) fills faster, too.",
            _in_all_steps(judged, split.doubled),
        )


def _in_all_steps(judged: Judged, saving: Saving) -> int:
    """What is saved in a step, on all ranks and in all steps, as the recorded time is."""
    return round(saving.ns * sum(member.steps for member in judged.replicas.members))
