"""The pipeline report: stages, waiting, microbatches and the bubble of pipelines."""

from __future__ import annotations

from statistics import median

from torchprof.analyze.pipeline.bubble import Bubble, Judged, judged_pipelines
from torchprof.analyze.pipeline.sentences import about_pipeline, layers_of_stage
from torchprof.analyze.pipeline.values import AlikePipelines, OnePipeline, StageTimes
from torchprof.analyze.report import (
    ReportTable,
    Section,
    TableRow,
    printable,
    report,
    rows_hidden,
    spaced,
    stacked,
    time_cell,
)
from torchprof.analyze.sentences import warnings_below
from torchprof.run.formats import (
    UNKNOWN,
    Cell,
    format_number,
    format_share,
    format_time,
    numbers_in_words,
)
from torchprof.run.run import Run

_ROWS = 16
_MOST_STAGES = 8  # with columns of their own


@report("pipeline", "stages of a pipeline: their times, who waits for whom, why ranks are idle", answers="waits")
def pipeline(run: Run, *, top: int | None = None) -> Section:
    """The pipelines of a job that uses ``torch.distributed.pipelining``: sentences about the bubble and the slow
    stage, then tables.

    The first table has a row for each stage: the median time of a microbatch in forward and in backward, and, in a
    step, its time and the waiting before its actions. The second has a row for each pipeline: how long its ranks are
    idle, and why. The third has a row for each microbatch, with its time in each stage. docs/pipelines.md has the
    formulas.

    ``top``: the number of microbatches (16): those that take longest.
    """
    pipelines = judged_pipelines(run)
    if not pipelines:
        nothing = "This run recorded no pipeline of torch.distributed.pipelining."
        if run.pipelines:
            nothing = "A comparison of ranks has no times of pipelines: they are in the run of each rank."
        return stacked([nothing, warnings_below(run)])
    limit = _ROWS if top is None else top
    sections = [about_alike(run, number, judged, limit) for number, judged in enumerate(pipelines)]
    return spaced([*sections, warnings_below(run)])


def about_alike(run: Run, number: int, judged: Judged, limit: int = _ROWS) -> Section:
    """The sentences and the three tables about pipelines that do the same, which have this ``number``."""
    return spaced(
        [
            Section([*about_pipeline(judged)], " "),
            _table_of_stages(run, number, judged.replicas),
            _table_of_pipelines(number, judged),
            _table_of_microbatches(number, judged.replicas, limit),
        ]
    )


def _table_of_stages(run: Run, number: int, replicas: AlikePipelines) -> Section:
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
            is_one = len({*times.of_rank.values()}) > 1
            slowest = [format_number(times.slowest) if is_one else "", format_time(times.of_rank[times.slowest])]
        return [
            format_number(stage),
            numbers_in_words(times.ranks),
            layers_of_stage(run, times.root) or UNKNOWN,
            time_cell(times.by_what.get("F")),
            time_cell(times.backward_ns),
            *(time_cell(times.by_what.get(what)) for what in parts),
            *(slowest if has_replicas else []),
            *map(time_cell, (times.step_ns, times.before_ns, times.after_ns, times.other_ns)),
        ]

    stages = sorted({*range(replicas.stages), *replicas.times})
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
        shares: list[Cell] = [*map(format_share, bubble)] if isinstance(bubble, Bubble) else [UNKNOWN] * 5
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
    hidden = len(judged.replicas.pipelines) - len(rows)
    if hidden:
        sentences.append(f"{hidden} pipelines are hidden: shown are {len(rows)}, evenly chosen.")
    return stacked([ReportTable.of_cells(headings, rows).of("pipelines", pipeline=number), *sentences])


def _table_of_microbatches(number: int, replicas: AlikePipelines, limit: int) -> Section:
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
        sentences.append(f"{rows_hidden(len(microbatches) - len(listed), len(listed), 'largest')}.")
    if len(shown) < len(stages):
        sentences.append(f"{len(stages) - len(shown)} stages are hidden: shown are the {len(shown)} largest.")
    headings = ["Microbatch", *(f"Stage {times.stage}" for times in shown)]
    return stacked([ReportTable.of_cells(headings, rows).of("microbatches", pipeline=number), *sentences])
