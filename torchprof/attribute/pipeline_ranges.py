"""The ranges of pipelines: ours around the work of stages in torch.distributed.pipelining, and torch's own."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import NamedTuple
from urllib.parse import quote, unquote

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import PIPELINE, Event, Kind, OpenRanges
from torchprof.run.collectives import C10D_OPS, POINT_TO_POINT, name_of_collective
from torchprof.run.timeline import ACTIONS
from torchprof.run.words import PIPELINE_RANGE, is_host_collective

WAIT_LABEL = PIPELINE + "wait"
"""The label in which a schedule waits for an exchange in which it receives something."""
SENDS_LABEL = PIPELINE + "wait for sends"
"""The label in which it waits until what it sends has been taken."""
_STEP = re.compile(rf"{PIPELINE}step (\S+) (\d+) ([\d,]*)")
_ACTION = re.compile(rf"(\d+)([{''.join(ACTIONS)}])(\d+)")
"""An action, as torch writes it after a prefix: ``0F3`` is the forward of microbatch 3 in stage 0."""
_TORCHS = re.compile(rf"{PIPELINE_RANGE}(?:\d+([A-Z_]+)\d*|\(.*\)([A-Z_0-9]+))")
"""A range of torch: ``PP:0F3``, ``PP:1RECV_B0``, ``PP:0UNSHARD``, ``PP:(0F1;1B0)OVERLAP_F_B``."""
_OF_GPIPE = re.compile(r"(Forward|Backward) \d+")  # a range of torch's GPipe; users may name theirs so, too
_SEVERAL = "OVERLAP_F_B"  # the kind of a range of torch around several actions
_BEFORE_ACTIONS = ("UNSHARD", "RECV_F")  # the kinds of ranges with which a step may begin
_EXCHANGES = tuple(C10D_OPS + name for name in POINT_TO_POINT)
_IN_WORDS = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def action_label(stage: int, what: str, microbatch: int) -> str:
    """The label around an action of a stage."""
    return f"{PIPELINE}{stage}{what}{microbatch}"


def step_label(schedule: str, stages: int, group: Iterable[int]) -> str:
    """The label around a step of a schedule. ``stages``, ``group``: as of a ``Pipeline``."""
    return f"{PIPELINE}step {quote(schedule)} {stages} {','.join(map(str, group))}"


class ActionRange(NamedTuple):
    """An action that ran. ``ns``: its time without that of other actions inside it."""

    stage: int
    what: str
    microbatch: int
    start_ns: int
    end_ns: int
    ns: int


class PipelineStep(NamedTuple):
    """A step of a schedule; ``schedule``, ``stages`` and ``group`` as of a ``Pipeline``. ``waits``: start and end of
    the times in which the schedule waited for something to receive. Both lists are in the order of start."""

    start_ns: int
    end_ns: int
    schedule: str
    stages: int
    group: tuple[int, ...]
    actions: list[ActionRange]
    waits: list[tuple[int, int]]


def steps_in(columns: EventColumns) -> list[PipelineStep]:
    """The steps of schedules, in the order of their start: from our ranges, without any from those of torch."""
    ours = [*columns.events_of(Kind.PIPELINE)]
    return _steps_of(ours) if ours else _steps_of_torch(columns)


def _steps_of(ranges: Sequence[Event]) -> list[PipelineStep]:
    """A step inside another one is a part of it."""
    starts = [span.start_ns for span in ranges]
    steps: list[PipelineStep] = []
    for number, span in enumerate(ranges):
        match = _STEP.fullmatch(span.name)
        if match is None or (steps and span.start_ns < steps[-1].end_ns):
            continue
        inside = ranges[number + 1 : bisect_left(starts, span.end_ns)]
        ranks = tuple(map(int, filter(None, match[3].split(","))))
        waits = [(wait.start_ns, wait.end_ns) for wait in inside if wait.name == WAIT_LABEL]
        about = unquote(match[1]), int(match[2]), ranks
        steps.append(PipelineStep(span.start_ns, span.end_ns, *about, _actions(inside), waits))
    return steps


def _actions(ranges: Sequence[Event]) -> list[ActionRange]:
    """The actions among some ranges. What runs in an action inside another one counts for the inner one alone."""
    actions: dict[Event, ActionRange] = {}
    open_actions: OpenRanges[Event] = OpenRanges()
    for span in ranges:
        if (match := _ACTION.fullmatch(span.name.rpartition(":")[2])) is None:
            continue
        around = open_actions.at(span.thread, span.start_ns)
        ns = span.end_ns - span.start_ns
        if around:
            outer = actions[around[-1]]
            actions[around[-1]] = outer._replace(ns=outer.ns - ns)
        around.append(span)
        actions[span] = ActionRange(int(match[1]), match[2], int(match[3]), span.start_ns, span.end_ns, ns)
    return [*actions.values()]


def _steps_of_torch(columns: EventColumns) -> list[PipelineStep]:
    """The steps from torch's ranges ``PP:…``. The class of the schedule and the ranks are unknown. Such a range has the
    wait for what its action needs, then the action, and in the last stage the loss, which counts as a part of the
    forward. The wait ends where a receive does on the CPU: torch ends its range when it is waited for. There are no
    steps if ranges have several actions. A step begins where an action comes again: PP:1F0 PP:1F1 PP:1B0 PP:1B1 |
    PP:1F0 … If the step begins with a receive or an unshard (PP:1RECV_F0), these belong to it."""
    names = {kind.name: _TORCHS.fullmatch(kind.name) for kind in columns.kinds if kind.kind is Kind.USER_LABEL}
    kinds = {name: match[1] or match[2] for name, match in names.items() if match is not None}
    if not kinds or _SEVERAL in kinds.values():
        return []
    received = sorted(
        span.end_ns
        for span in columns.events_of(Kind.COLLECTIVE)
        if is_host_collective(span.name) and name_of_collective(span.name) == "recv"
    )
    steps: list[PipelineStep] = []
    in_step: set[str] = set()  # the actions of the current step
    begin: int | None = None  # of the next step, if it has begun
    for span in columns.events_of(Kind.USER_LABEL):
        kind = kinds.get(span.name)
        if kind in ACTIONS:
            if not steps or span.name in in_step:
                steps.append(PipelineStep(span.start_ns if begin is None else begin, 0, "", 0, (), [], []))
                in_step = set()
            in_step.add(span.name)
            begin = None
            number = bisect_right(received, span.end_ns) - 1
            start = max(span.start_ns, received[number] if number >= 0 else 0)
            steps[-1].waits.append((span.start_ns, start))
            steps[-1].actions.extend(_actions([span._replace(start_ns=start)]))
        elif begin is None and kind in _BEFORE_ACTIONS:
            begin = span.start_ns
        if kind is not None and begin is None and steps:
            steps[-1] = steps[-1]._replace(end_ns=span.end_ns)
    return steps


def folded_names(names: Collection[str]) -> dict[str, str]:
    """The names of torch's ranges around actions, each with the name that its kind of action has here: ``PP:forward``.
    Those of GPipe, which users give, too, count if there are point-to-point exchanges, or our ranges of a pipeline."""
    may_be_gpipe = any(name.startswith((PIPELINE, *_EXCHANGES)) for name in names)
    folded = {}
    for name in names:
        if (match := _TORCHS.fullmatch(name)) is not None:
            what = match[1] or match[2]
            folded[name] = PIPELINE_RANGE + _IN_WORDS.get(what, what.lower())
        elif may_be_gpipe and _OF_GPIPE.fullmatch(name):
            folded[name] = PIPELINE_RANGE + name.partition(" ")[0].lower()
    return folded


def with_folded_names(columns: EventColumns) -> EventColumns:
    """The same events, with one name for all of torch's ranges around one kind of action: else each layer has a row for
    each microbatch. ``columns`` stay as they are."""
    if not (folded := folded_names({kind.name for kind in columns.kinds})):
        return columns
    columns = copy(columns)
    columns.kinds = [
        kind._replace(name=folded.get(kind.name, kind.name)) if kind.kind is Kind.USER_LABEL else kind
        for kind in columns.kinds
    ]
    return columns
