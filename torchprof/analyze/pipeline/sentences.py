"""Sentences about pipelines: how long ranks are idle and why, and the slow stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from torchprof.analyze.pipeline.bubble import Bubble, Judged, SlowStages, UnknownBubble, judged_pipelines
from torchprof.analyze.pipeline.values import AlikePipelines
from torchprof.analyze.report import printable
from torchprof.run.formats import format_time, ranks_in_words
from torchprof.run.layers import Layers
from torchprof.run.run import Run

_WORTH_SAYING = 0.005  # of the time of all ranks
_OUTLIER = 2.0  # times the other microbatches
_OF_A_STEP = 0.01  # an outlier takes at least this share of a step longer
_FEW_STEPS = 3
_MOST_NAMED = 3  # microbatches, and pipelines
_MAY_BE_CHANCE = "; that may be chance"


def about_pipeline(judged: Judged) -> Iterator[str]:
    """What is known of pipelines that do the same: what they are, and why their ranks are idle."""
    yield _what_it_is(judged.replicas)
    yield from _about_missing(judged.replicas)
    yield _about_bubble(judged)
    if judged.slow is not None:
        yield _about_slow_stages(judged.slow)
    yield from _about_outliers(judged.replicas)


def pipelines_in_short(run: Run) -> Iterator[str]:
    """For each pipeline whose bubble is known, how long its ranks are idle and why, and the slow stage, in one line."""
    for judged in judged_pipelines(run):
        if judged.bubble is not None:
            slow = "" if judged.slow is None else f" {_about_slow_stages(judged.slow)}"
            yield f"{_about_bubble(judged, of_schedule=True)}{slow}"


def _what_it_is(replicas: AlikePipelines) -> str:
    """The stages, the schedule and the ranks of pipelines that do the same."""
    first = replicas.first
    about = _schedule_of(replicas)
    stages = f"{first.stages} stage{'s' if first.stages > 1 else ''}" if first.stages else "an unknown number of stages"
    ranks = [
        ranks_in_words(sorted(pipeline.ranks or [member.rank for member in pipeline.members]))
        for pipeline in replicas.pipelines
    ]
    if not first.ranks:
        have = "has" if len(first.members) == 1 else "have"
        return f"{ranks[0].capitalize()} {have} stages of pipelines whose ranks are unknown, of {stages} ({about})."
    if len(ranks) == 1:
        return f"Pipeline of {stages} on {ranks[0]} ({about})."
    more = [f"and {len(ranks) - _MOST_NAMED} more"] if len(ranks) > _MOST_NAMED else []
    return f"{len(ranks)} pipelines of {stages} ({about}): {'; '.join([*ranks[:_MOST_NAMED], *more])}."


def _schedule_of(replicas: AlikePipelines) -> str:
    """As in "8 microbatches, 1F1B"."""
    count = replicas.first.microbatches
    schedule = printable(replicas.first.members[0].schedule.removeprefix("Schedule"))
    return ", ".join(filter(None, [f"{count} microbatch{'es' if count != 1 else ''}", schedule]))


def _about_missing(replicas: AlikePipelines) -> Iterator[str]:
    here = {member.rank for member in replicas.members}
    missing = sorted({rank for pipeline in replicas.pipelines for rank in pipeline.ranks} - here)
    if missing:
        yield f"{ranks_in_words(missing).capitalize()} {'is' if len(missing) == 1 else 'are'} not in this run."


def _about_bubble(judged: Judged, *, of_schedule: bool = False) -> str:
    """How long the ranks are idle in a step, and why. ``of_schedule``: with the schedule."""
    bubble = judged.bubble
    if bubble is None:
        whys = dict.fromkeys(of.why for of in judged.bubbles if isinstance(of, UnknownBubble))
        return f"How long its ranks are idle (the bubble) is unknown: {'; '.join(whys)}."
    of = f" ({judged.replicas.stages} stages, {_schedule_of(judged.replicas)})" if of_schedule else ""
    parts = [f"{bubble.schedule:.0%} is the schedule's own{of}"]
    for what, share in (("unequal stages", bubble.stages), ("microbatches that differ", bubble.microbatches)):
        if abs(share) >= _WORTH_SAYING:
            parts.append(f"{what} {'add' if share > 0 else 'take away'} {abs(share):.0%}")
    if bubble.rest >= _WORTH_SAYING:
        parts.append(f"the rest, {bubble.rest:.0%}, is communication, the loss and the host")
    elif bubble.rest <= -_WORTH_SAYING:
        parts.append(f"the rest takes away {-bubble.rest:.0%}: steps were shorter than in the simulation")
    known = sum(isinstance(of, Bubble) for of in judged.bubbles)
    pipelines = len(judged.replicas.pipelines)
    mean = f" (mean of {known}{f' of {pipelines}' if known < pipelines else ''} pipelines)" if pipelines > 1 else ""
    return f"Ranks are idle for {bubble.measured:.0%} of a step, the bubble{mean}: {'; '.join(parts)}."


def _about_slow_stages(slow: SlowStages) -> str:
    """The stages that take longest, and how long; the ranks, if these have several stages each."""
    stages, ranks = ranks_in_words(slow.stages, "stage"), ranks_in_words(slow.ranks)
    if len(slow.stages) > slow.places:  # ranks have several stages, and are compared by the sum of them
        which, is_one = f"{ranks.capitalize()} ({stages})", len(slow.ranks) == 1
    else:
        which, is_one = f"{stages.capitalize()} ({ranks})", len(slow.stages) == 1
    are = "is the slow one" if is_one else "are the slow ones"
    often = f", in {slow.times} of {slow.steps} steps" if slow.steps > 1 else ""
    up_to = "up to " if slow.places > 1 else ""
    may_be_chance = _MAY_BE_CHANCE if slow.may_be_chance else ""
    return (
        f"{which} {are}{often}: a microbatch takes {up_to}{format_time(slow.own_ns)} there, "
        f"{format_time(slow.others_ns)} on the other ranks (median){may_be_chance}."
    )


def _about_outliers(replicas: AlikePipelines) -> Iterator[str]:
    """Microbatches that take several times as long as the others."""
    step_ns = median(ns for member in replicas.members for ns in member.step_ns)
    times_longer: defaultdict[int, dict[int, float]] = defaultdict(dict)  # how many times, by microbatch and stage
    for stage, times in replicas.times.items():
        for microbatch, ns in times.of_microbatch.items():
            others = [other for number, other in times.of_microbatch.items() if number != microbatch]
            usual = median(others) if len(others) > 1 else ns
            if usual and ns >= _OUTLIER * usual and ns - usual >= _OF_A_STEP * step_ns:
                times_longer[microbatch][stage] = ns / usual
    few = min(member.steps for member in replicas.members) < _FEW_STEPS
    for microbatch, by_stage in sorted(times_longer.items(), key=lambda item: -max(item[1].values()))[:_MOST_NAMED]:
        where = "all stages" if len(by_stage) == len(replicas.times) > 1 else ranks_in_words([*by_stage], "stage")
        so_long = f"{max(by_stage.values()):.1f} times as long as the others (median)"
        may_be_chance = _MAY_BE_CHANCE if few else ""
        yield f"Microbatch {microbatch} takes {so_long} in {where}{may_be_chance}."


def _name_in_stage(run: Run, root: int, layer: int) -> str:
    """The path of a layer in the model of its stage: ``layers.4``."""
    depth = len(run.layers[root].path)
    return printable(".".join(run.layers[layer].path[depth:]))


def layers_of_stage(run: Run, root: int) -> str:
    """What a stage has, in short: ``embed, layers.0–layers.3``; the name of its model if that is not a list of layers.

    ``root``: the model of the stage, by its index; negative if unknown, which gives "".
    """
    if root < 0:
        return ""
    blocks = numbered_layers(run.layers, root)
    if not blocks:
        return printable(run.layers[root].name)
    first, last = _name_in_stage(run, root, blocks[0]), _name_in_stage(run, root, blocks[-1])
    of_blocks = first if len(blocks) == 1 else f"{first}–{last}"
    container = run.layers.parent[blocks[0]]
    children = run.layers.children[root]
    if container not in children or len(children) > 5:
        return of_blocks
    return ", ".join(of_blocks if child == container else _name_in_stage(run, root, child) for child in children)


def numbered_layers(layers: Layers, root: int) -> list[int]:
    """The numbered layers of a stage, in their order: the children of the container that has most of them,
    if all its children are numbered (``layers.4``); empty without. ``root``: the model of the stage, by its index."""
    best: list[int] = []
    waiting = [root] if root >= 0 else []
    while waiting:
        children = layers.children[waiting.pop()]
        numbered = [child for child in children if layers[child].path[-1].isdecimal()]
        if len(numbered) < len(children):
            waiting += children
        elif len(numbered) > len(best):
            best = sorted(numbered, key=lambda child: int(layers[child].path[-1]))
    return best
