"""Pipelines on the page: the report "pipeline", and a step as a picture."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from torchprof.analyze.pipeline.bubble import judged_pipelines
from torchprof.analyze.pipeline.report import about_alike
from torchprof.analyze.pipeline.values import OnePipeline
from torchprof.reports.page.tables import report_data
from torchprof.run.formats import format_time, ranks_in_words
from torchprof.run.pipeline import ACTIONS
from torchprof.run.run import Run

_MOST_ACTIONS = 6_000
"""The largest number of actions in a picture: the ranks that come after them are hidden."""


def pipelines_of_page(run: Run, nodes: Mapping[int, int]) -> list[dict[str, Any]]:
    """Pipelines that do the same are one: their part of the report, and a step of the first of them whose times are
    known, None if there is none. ``nodes``: the node of each layer."""
    pipelines = []
    for number, judged in enumerate(judged_pipelines(run)):
        known = (pipeline for pipeline in judged.replicas.pipelines if pipeline.typical_steps)
        drawn = next(known, None)
        report = report_data(about_alike(run, number, judged), nodes)
        pipelines.append({"report": report, "step": None if drawn is None else _step(drawn)})
    return pipelines


def _step(pipeline: OnePipeline) -> dict[str, Any]:
    """The step of median length: the actions of its ranks in their order, as columns. ``line``: the index of the rank
    in ``ranks``; ``what``: an index in ``kinds``.

    A rank that began the step before the others waits before its first action only as long as they let it.
    """
    steps = pipeline.steps_by_length
    step = steps[(len(steps) - 1) // 2]
    shown = pipeline.members[: max(_MOST_ACTIONS // len(pipeline.members[0].actions), 1)]
    lines = []
    for line, member in enumerate(shown):
        early = pipeline.early_ns(member)[step]
        for action in member.actions:
            waited, took = action.waited_ns[step] - early, action.took_ns[step]
            lines.append((line, action.stage, ACTIONS.index(action.what), action.microbatch, waited, took))
            early = 0
    columns = ("line", "stage", "what", "microbatch", "waitedNs", "tookNs")
    hidden = len(pipeline.members) - len(shown)
    ns, ranks = pipeline.step_ns[step], [member.rank for member in shown]
    return {
        "about": f"The step of median length, {format_time(ns)}, on {ranks_in_words(ranks)}. Numbers are microbatches. "
        "Time in which a rank neither works nor waits, such as that of sending, is at its end."
        f"{f' {hidden} ranks are hidden.' if hidden else ''}",
        "ns": ns,
        "ranks": ranks,
        "kinds": ACTIONS,
        "actions": {name: array("q", column) for name, column in zip(columns, zip(*lines))},
    }
