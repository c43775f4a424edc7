"""What a rank does for its stages of a pipeline: the time of each action, and the waiting before it."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torchprof.attribute.event_columns import EventColumns, Intervals
from torchprof.attribute.events import Attributed, Kind, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.pipeline_ranges import PipelineStep
from torchprof.measure.busy import Covered, covered_ns
from torchprof.measure.waiting import is_communication
from torchprof.run.timeline import KEPT_STEPS, Pipeline, StageAction
from torchprof.run.words import OUTSIDE

_NO_ACTION = -1  # in place of the number of an action: work of a step that is in none


class _StepTimes(NamedTuple):
    """The times of a step on a device: its own, and for each of its actions."""

    ns: int
    took_ns: Sequence[int]
    waited_ns: Sequence[int]


class Pipelines:
    """Observes the layers that stages call, and the kernels that were launched in their actions.

    - On the CPU, the time of an action is that of its range. The waiting before it is the time in which the schedule
      waited to receive something since the action before.
    - On a device, the time of an action is that of the kernels launched in it, on any thread, without communication.
      The waiting is the time since the kernels of the action before in which communication ran, and nothing else. A
      step begins with that on the CPU, or when the work of the steps before has ended, and ends with the last of its
      kernels. A step without any kernel of its actions is left out.
    """

    def __init__(self, steps: Sequence[PipelineStep], columns: EventColumns, rank: int) -> None:
        self._rank = rank
        chosen = _most_frequent(steps)
        self._count = len(chosen)
        self._steps = chosen[-KEPT_STEPS:]
        self._forwards = [action for step in steps for action in step.actions if action.what == "F"]
        self._forward_starts = [action.start_ns for action in self._forwards]
        self._called: defaultdict[int, set[int]] = defaultdict(set)  # by stage: the layers of the outermost calls
        self._last_call = (-1, 0)  # the number of a forward, and the end of the last outermost call in it
        self._columns = columns
        self._launched: dict[int, tuple[int, int]] | None = None  # made when it is needed: it is large
        self._devices: dict[str, _OnDevice] = {}
        self._communicates: dict[Place, bool] = {}

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        label, kernel = Kind.LABEL, Kind.KERNEL
        for item in stream:
            yield item
            if isinstance(item, Attributed):
                if item.event.kind is label:
                    self._on_call(item)
                elif item.event.kind is kernel:
                    self._on_kernel(item)

    def _on_call(self, item: Attributed) -> None:
        """A module that a forward calls, and not another module, may be the model of the stage."""
        number = bisect_right(self._forward_starts, item.start_ns) - 1
        if number < 0 or item.start_ns >= self._forwards[number].end_ns:
            return
        if self._last_call[0] != number or item.start_ns >= self._last_call[1]:
            self._last_call = number, item.end_ns
            self._called[self._forwards[number].stage].add(item.place.layer)

    def _root_of(self, stage: int) -> int:
        """The model that a stage calls. A stage that calls several layers has none: they are parts of it."""
        return next(iter(self._called[stage])) if len(self._called[stage]) == 1 else OUTSIDE

    def _on_kernel(self, item: Attributed) -> None:
        event, place = item.event, item.place
        if (communicates := self._communicates.get(place)) is None:
            communicates = self._communicates[place] = is_communication(place.frames)
        device = self._devices.setdefault(event.device, _OnDevice(self._steps))
        if self._launched is None:
            self._launched = _launched_in(self._steps, self._columns)
        device.add(event.start_ns, event.end_ns, communicates, self._launched.get(event.correlation))

    def result(self) -> dict[str, tuple[Pipeline, ...]]:
        """The pipeline of this rank, in the time of the CPU and in that of each device on which actions ran."""
        if not self._steps:
            return {}
        times = {"cpu": [*map(_on_cpu, self._steps)]}
        times |= {name: device.times() for name, device in sorted(self._devices.items())}
        return {"pipelines": tuple(self._pipeline(device, of_steps) for device, of_steps in times.items() if of_steps)}

    def _pipeline(self, device: str, times: Sequence[_StepTimes]) -> Pipeline:
        step = self._steps[-1]
        actions = []
        for index, action in enumerate(step.actions):
            took, waited = zip(*((of_step.took_ns[index], of_step.waited_ns[index]) for of_step in times))
            actions.append(StageAction(action.stage, action.what, action.microbatch, took, waited))
        roots = tuple((stage, self._root_of(stage)) for stage in sorted({action.stage for action in actions}))
        return Pipeline(
            device,
            self._rank,
            step.schedule,
            stages=step.stages,
            group=step.group,
            roots=roots,
            steps=self._count - len(self._steps) + len(times),
            step_ns=tuple(of_step.ns for of_step in times),
            actions=tuple(actions),
        )


def _most_frequent(steps: Sequence[PipelineStep]) -> list[PipelineStep]:
    """The steps with the schedule and the actions that most steps have; if others are as many, those with more actions:
    a recording may begin or end inside a step. Steps without actions do not count."""
    keys = []
    for step in steps:
        actions = tuple((action.stage, action.what, action.microbatch) for action in step.actions)
        keys.append((step.schedule, step.group, actions))
    if not (counts := Counter(key for key in keys if key[-1])):
        return []
    most_frequent = max(reversed(keys), key=lambda key: (counts[key], len(key[-1])))
    return [step for step, key in zip(steps, keys) if key == most_frequent]


def _on_cpu(step: PipelineStep) -> _StepTimes:
    """Its times on the CPU. Example: the schedule waits from 2 to 5, an action runs from 6 to 9: took 3, waited 3."""
    waits = Intervals()
    for start, end in step.waits:
        waits.add(start, end)
    waited, since = [], step.start_ns
    for action in step.actions:
        waited.append(covered_ns(waits.within(since, max(since, action.start_ns))))
        since = max(since, action.end_ns)
    return _StepTimes(step.end_ns - step.start_ns, [action.ns for action in step.actions], waited)


def _launched_in(steps: Sequence[PipelineStep], columns: EventColumns) -> dict[int, tuple[int, int]]:
    """By the number of an op (``Event.correlation``), the numbers of the step and the action during which it began."""
    launched: dict[int, tuple[int, int]] = {}
    if (correlations := columns.correlation) is None:
        return launched
    for number, step in enumerate(steps):
        # An action inside another one comes after it.
        spans = [(_NO_ACTION, step.start_ns, step.end_ns)]
        spans += [(index, action.start_ns, action.end_ns) for index, action in enumerate(step.actions)]
        for index, start, end in spans:
            for _, first, after in columns.threads:
                begin, until = (bisect_left(columns.start, time, first, after) for time in (start, end))
                launched.update(zip(correlations[begin:until], itertools.repeat((number, index))))
    launched.pop(0, None)  # events without a number
    return launched


class _OnDevice:
    """The kernels of a device, in the order of their start."""

    def __init__(self, steps: Sequence[PipelineStep]) -> None:
        self._steps = steps
        self._work = Intervals()  # without communication
        self._communication = Intervals()
        self._of_actions: dict[tuple[int, int], Covered] = {}  # by step and action, without communication
        self._spans: dict[int, tuple[int, int]] = {}  # by step: its begin, and the end of its last kernel
        self._until = 0  # the latest end of a kernel

    def add(self, start: int, end: int, communicates: bool, launched_in: tuple[int, int] | None) -> None:
        """``launched_in``: as in ``_launched_in``, None if it was launched in no step."""
        if launched_in is not None:
            step, action = launched_in
            begin, until = self._spans.get(step, (0, 0))
            begin = begin or max(self._steps[step].start_ns, min(self._until, start))
            self._spans[step] = begin, max(until, end)
            if action != _NO_ACTION and not communicates:
                self._of_actions.setdefault(launched_in, Covered(start)).add(start, end)
        (self._communication if communicates else self._work).add(start, end)
        self._until = max(self._until, end)

    def times(self) -> list[_StepTimes]:
        """The times of the steps with kernels of actions. Those of other steps were not recorded."""
        return [self._times_of(step) for step in sorted({step for step, _ in self._of_actions})]

    def _times_of(self, number: int) -> _StepTimes:
        since, end = self._spans[number]
        step_ns, took, waited = end - since, [], []
        for index in range(len(self._steps[number].actions)):
            busy = self._of_actions.get((number, index))
            took.append(0 if busy is None else busy.ns)
            waited.append(0 if busy is None else self._waited(since, busy.start_ns))
            since = since if busy is None else max(since, busy.until)
        return _StepTimes(step_ns, took, waited)

    def _waited(self, start: int, end: int) -> int:
        """The time in an interval in which communication ran, and nothing else."""
        work = [*self._work.within(start, max(start, end))]
        return covered_ns([*work, *self._communication.within(start, max(start, end))]) - covered_ns(work)
