"""The pipeline report: stages, waiting, microbatches and the bubble of pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import median

from torchprof.analyze import report as reporting
from torchprof.analyze.report import ReportTable, Section, TableRow, report, spaced, stacked, time_cell
from torchprof.analyze.sentences import warnings_below
from torchprof.errors import printable
from torchprof.ranks.pipeline import OnePipeline, ReplicaPipelines, StageTimes
from torchprof.ranks.pipeline_bubble import FEW_STEPS, Bubble, Judged, SlowStages, judged_pipelines
from torchprof.run import formats
from torchprof.run.formats import UNKNOWN, Cell, format_number, format_time, numbers_in_words, ranks_in_words
from torchprof.run.layers import Layers
from torchprof.run.run import Run

# Sentences

_WORTH_SAYING = 0.005  # of the time of all ranks
_OUTLIER = 2.0  # an outlier takes so many times as long as the other microbatches
_OF_A_STEP = 0.01  # and at least this share of a step longer
_MOST_NAMED = 3  # microbatches, and pipelines
_MOST_STAGES = 4096  # that have a row although nothing is known of them
_MAY_BE_CHANCE = "; that may be chance"


def about_pipeline(judged: Judged) -> Iterator[str]:
    """What is known of pipelines that do the same: what they are, and why their ranks are idle."""
    replicas = judged.replicas
    yield _what_it_is(replicas)
    here = {member.rank for member in replicas.members}
    missing = sorted({rank for pipeline in replicas.pipelines for rank in pipeline.ranks} - here)
    if missing:
        yield f"{ranks_in_words(missing).capitalize()} {'is' if len(missing) == 1 else 'are'} not in this run."
    yield _about_bubble(judged)
    if judged.slow is not None:
        yield _about_slow_stages(judged.slow)
    yield from _about_outliers(replicas)


def pipelines_in_short(run: Run) -> Iterator[str]:
    """For each pipeline whose bubble is known, how long its ranks are idle and why, and the slow stage, in one line."""
    for judged in judged_pipelines(run):
        if judged.bubble is not None:
            slow = "" if judged.slow is None else f" {_about_slow_stages(judged.slow)}"
            yield f"{_about_bubble(judged, of_schedule=True)}{slow}"


def _what_it_is(replicas: ReplicaPipelines) -> str:
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


def _schedule_of(replicas: ReplicaPipelines) -> str:
    """As in "8 microbatches, 1F1B"."""
    count = replicas.first.microbatches
    schedule = printable(replicas.first.members[0].schedule.removeprefix("Schedule"))
    return ", ".join(filter(None, [f"{count} microbatch{'es' if count != 1 else ''}", schedule]))


def _about_bubble(judged: Judged, *, of_schedule: bool = False) -> str:
    """How long the ranks are idle in a step, and why. ``of_schedule``: with the schedule."""
    if (bubble := judged.bubble) is None:
        reasons = dict.fromkeys(bubble for bubble in judged.bubbles if isinstance(bubble, str))
        return f"How long its ranks are idle (the bubble) is unknown: {'; '.join(reasons)}."
    of = f" ({judged.replicas.first.stages} stages, {_schedule_of(judged.replicas)})" if of_schedule else ""
    parts = [f"{bubble.schedule:.0%} is the schedule's own{of}"]
    for what, share in (("unequal stages", bubble.stages), ("microbatches that differ", bubble.microbatches)):
        if abs(share) >= _WORTH_SAYING:
            parts.append(f"{what} {'add' if share > 0 else 'take away'} {abs(share):.0%}")
    if bubble.rest >= _WORTH_SAYING:
        parts.append(f"the rest, {bubble.rest:.0%}, is communication, the loss and the host")
    elif bubble.rest <= -_WORTH_SAYING:
        parts.append(f"the rest takes away {-bubble.rest:.0%}: steps were shorter than in the simulation")
    known = sum(isinstance(bubble, Bubble) for bubble in judged.bubbles)
    pipelines = len(judged.replicas.pipelines)
    mean = f" (mean of {known}{f' of {pipelines}' if known < pipelines else ''} pipelines)" if pipelines > 1 else ""
    return f"Ranks are idle for {bubble.measured:.0%} of a step, the bubble{mean}: {'; '.join(parts)}."


def _about_slow_stages(slow: SlowStages) -> str:
    """The stages that take longest, and how long; the ranks, if these have several stages each."""
    stages, ranks = ranks_in_words(slow.stages, "stage"), ranks_in_words(slow.ranks)
    if len(slow.stages) > slow.ranks_per_pipeline:  # ranks have several stages, and are compared by the sum of them
        which, is_one = f"{ranks.capitalize()} ({stages})", len(slow.ranks) == 1
    else:
        which, is_one = f"{stages.capitalize()} ({ranks})", len(slow.stages) == 1
    are = "is the slow one" if is_one else "are the slow ones"
    often = f", in {slow.times} of {slow.steps} steps" if slow.steps > 1 else ""
    up_to = "up to " if slow.ranks_per_pipeline > 1 else ""
    may_be_chance = _MAY_BE_CHANCE if slow.may_be_chance else ""
    return (
        f"{which} {are}{often}: a microbatch takes {up_to}{format_time(slow.own_ns)} there, "
        f"{format_time(slow.others_ns)} on the other ranks (median){may_be_chance}."
    )


def _about_outliers(replicas: ReplicaPipelines) -> Iterator[str]:
    """Microbatches that take several times as long as the others."""
    step_ns = median(ns for member in replicas.members for ns in member.step_ns)
    times_longer: defaultdict[int, dict[int, float]] = defaultdict(dict)  # how many times, by microbatch and stage
    for stage, times in replicas.times.items():
        for microbatch, ns in times.of_microbatch.items():
            others = [other for number, other in times.of_microbatch.items() if number != microbatch]
            usual = median(others) if len(others) > 1 else ns
            if usual and ns >= _OUTLIER * usual and ns - usual >= _OF_A_STEP * step_ns:
                times_longer[microbatch][stage] = ns / usual
    few = min(member.steps for member in replicas.members) < FEW_STEPS
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
    """What a stage has, in short: ``embed, layers.0–layers.3``; the name of its model if that is not a list of layers;
    "" if its model (``root``) is unknown."""
    if root < 0:
        return ""
    if not (blocks := numbered_layers(run.layers, root)):
        return printable(run.layers[root].name)
    first, last = _name_in_stage(run, root, blocks[0]), _name_in_stage(run, root, blocks[-1])
    of_blocks = first if len(blocks) == 1 else f"{first}–{last}"
    container = run.layers.parent[blocks[0]]
    children = run.layers.children[root]
    if container not in children or len(children) > 5:
        return of_blocks
    return ", ".join(of_blocks if child == container else _name_in_stage(run, root, child) for child in children)


def numbered_layers(layers: Layers, root: int) -> list[int]:
    """The numbered layers of a stage, in their order: the children of the container that has most of them, if all its
    children are numbered (``layers.4``)."""
    longest: list[int] = []
    remaining = [root] if root >= 0 else []
    while remaining:
        children = layers.children[remaining.pop()]
        numbered = [child for child in children if layers[child].path[-1].isdecimal()]
        if len(numbered) < len(children):
            remaining += children
        elif len(numbered) > len(longest):
            longest = sorted(numbered, key=lambda child: int(layers[child].path[-1]))
    return longest


# Tables

_ROWS = 16  # for microbatches
_MOST_STAGES = 8  # with columns of their own


@report("pipeline", "stages of a pipeline: their times, who waits for whom, why ranks are idle", answers="waits")
def pipeline(run: Run, *, top: int | None = None) -> Section:
    """The pipelines of a job that uses ``torch.distributed.pipelining``: sentences about the bubble and the slow stage,
    then tables by stage, by pipeline and by microbatch. docs/pipelines.md has the formulas.

    Times are medians. The waiting of a stage is that before its actions in a step. ``top``: the number of microbatches
    (16): those that take longest.
    """
    if not (pipelines := judged_pipelines(run)):
        nothing = "This run recorded no pipeline of torch.distributed.pipelining."
        if run.pipelines:
            nothing = "A comparison of ranks has no times of pipelines: they are in the run of each rank."
        return stacked([nothing, warnings_below(run)])
    limit = _ROWS if top is None else top
    sections = [section_of_replicas(run, number, judged, limit) for number, judged in enumerate(pipelines)]
    return spaced([*sections, warnings_below(run)])


def section_of_replicas(run: Run, number: int, judged: Judged, limit: int = _ROWS) -> Section:
    """The sentences and the three tables about pipelines that do the same, which have this ``number``."""
    return spaced(
        [
            Section([*about_pipeline(judged)], " "),
            _table_of_stages(run, number, judged.replicas),
            _table_of_pipelines(number, judged),
            _table_of_microbatches(number, judged.replicas, limit),
        ]
    )


def _table_of_stages(run: Run, number: int, replicas: ReplicaPipelines) -> Section:
    """A row for each stage, with the ranks that have it."""
    parts = [what for what in "IW" if any(what in times.by_what for times in replicas.times.values())]
    has_replicas = len(replicas.pipelines) > 1
    headings = ["Stage", "Ranks", "Layers", "Forward", "Backward"]
    headings += [{"I": "Inputs", "W": "Weights"}[what] for what in parts]
    headings += [*(["Slowest rank", "Its time"] if has_replicas else []), "A step", "Waits for inputs"]
    headings += ["Waits for gradients", "Waits otherwise"]

    def cells(stage: int, times: StageTimes) -> list[Cell]:
        slowest: list[Cell] = [UNKNOWN, UNKNOWN]
        if len(times.ranks) > 1:
            rank, differ = times.slowest_rank, len({*times.of_rank.values()}) > 1
            slowest = [format_number(rank) if differ else "", format_time(times.of_rank[rank])]
        return [
            format_number(stage),
            numbers_in_words(times.ranks),
            layers_of_stage(run, times.root) or UNKNOWN,
            time_cell(times.by_what.get("F")),
            time_cell(times.backward_ns),
            *(time_cell(times.by_what.get(what)) for what in parts),
            *(slowest if has_replicas else []),
            *map(time_cell, (times.step_ns, times.inputs_ns, times.gradients_ns, times.other_ns)),
        ]

    stages = sorted({*range(min(replicas.first.stages, _MOST_STAGES)), *replicas.times})
    unknown: list[Cell] = [UNKNOWN] * (len(headings) - 1)
    rows = [
        TableRow(cells(stage, times), layer=times.root) if times else TableRow([format_number(stage), *unknown])
        for stage, times in ((stage, replicas.times.get(stage)) for stage in stages)
    ]
    sentences = [
        "Forward and Backward are of a microbatch, A step and waiting of a step: medians over steps, microbatches and "
        "ranks.",
        "Waits for inputs: before forwards that need the stage before. Waits for gradients: before backwards that need "
        "the stage after. Waits otherwise: before actions that need nothing from another rank.",
        "Waiting is the time in which the rank received something."
        if replicas.device == "cpu"
        else "Waiting is the time without another kernel in which communication ran.",
    ]
    if parts:
        sentences.append("Backward has two parts: the gradients of the Inputs (I), and of the Weights (W).")
    if has_replicas:
        sentences.append("Its time: of a microbatch, forward and backward, on the slowest rank of the stage.")
    return stacked([ReportTable(headings, rows, "stages", {"pipeline": number}), *sentences])


def _table_of_pipelines(number: int, judged: Judged) -> Section:
    """A row for each pipeline: its bubble, and what it is made of."""
    headings = ["Ranks", "Schedule", "Stages", "Microbatches", "Steps", "Step"]
    headings += ["Idle", "Schedule's own", "Unequal stages", "Unequal microbatches", "Rest"]

    def cells(pipeline: OnePipeline, bubble: object) -> list[Cell]:
        first = pipeline.members[0]
        shares: list[Cell] = [*map(formats.format_share, bubble)] if isinstance(bubble, Bubble) else [UNKNOWN] * 5
        steps = {member.steps for member in pipeline.members}
        return [
            numbers_in_words(pipeline.ranks or [member.rank for member in pipeline.members]),
            printable(first.schedule) or UNKNOWN,
            format_number(pipeline.stages) if pipeline.stages else UNKNOWN,
            format_number(pipeline.microbatches),
            format_number(steps.pop()) if len(steps) == 1 else UNKNOWN,
            time_cell(median(pipeline.step_ns) if pipeline.is_complete and pipeline.step_ns else None),
            *shares,
        ]

    rows = [cells(*of_pipeline) for of_pipeline in zip(judged.replicas.judged, judged.bubbles)]
    sentences = [
        "Idle: the share of the time of all ranks in which no action of a stage runs, in steps of usual length; the "
        "columns after it add up to it."
    ]
    if hidden := len(judged.replicas.pipelines) - len(rows):
        sentences.append(f"{hidden} pipelines are hidden: shown are {len(rows)}, evenly chosen.")
    return stacked([ReportTable.of_cells(headings, rows).of("pipelines", pipeline=number), *sentences])


def _table_of_microbatches(number: int, replicas: ReplicaPipelines, limit: int) -> Section:
    """A row for each microbatch, with its time in each stage. Of many, those that take longest."""
    stages = [*replicas.times.values()]
    shown = sorted(sorted(stages, key=lambda times: -times.microbatch_ns)[:_MOST_STAGES], key=lambda times: times.stage)
    microbatches = sorted({microbatch for times in stages for microbatch in times.of_microbatch})

    def size(microbatch: int) -> float:
        return sum(times.of_microbatch.get(microbatch, 0) for times in stages)

    listed = sorted(sorted(microbatches, key=lambda microbatch: -size(microbatch))[:limit])
    rows = [
        [format_number(microbatch), *(time_cell(times.of_microbatch.get(microbatch)) for times in shown)]
        for microbatch in listed
    ]
    sentences = ["Forward and backward of a microbatch in each stage: medians over steps and ranks."]
    if len(listed) < len(microbatches):
        sentences.append(f"{reporting.rows_hidden(len(microbatches) - len(listed), len(listed), 'largest')}.")
    if len(shown) < len(stages):
        sentences.append(f"{len(stages) - len(shown)} stages are hidden: shown are the {len(shown)} largest.")
    headings = ["Microbatch", *(f"Stage {times.stage}" for times in shown)]
    return stacked([ReportTable.of_cells(headings, rows).of("microbatches", pipeline=number), *sentences])
