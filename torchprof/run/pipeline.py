"""The pipeline of a rank: each forward and backward of a microbatch in a stage, and the waiting before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchprof.run.checked_json import demand
from torchprof.run.words import NOT_SELECTED

KEPT_STEPS = 100
"""Of so many steps, the last ones, a ``Pipeline`` has the times."""


class StageAction(NamedTuple):
    """One microbatch in one stage. ``what`` is as in torch's schedules: "F" forward, "B" backward, or its parts "I",
    the gradients of the inputs, and "W", those of the weights.

    For each of the steps that are kept: ``took_ns``, its time, and ``waited_ns``, the waiting since the end of the
    action before it, or since the start of the step: on the CPU for something to receive, on a device the time in which
    communication ran, and nothing else.
    """

    stage: int
    what: str
    microbatch: int
    took_ns: tuple[int, ...]
    waited_ns: tuple[int, ...]


ACTIONS = ("F", "B", "I", "W")


@dataclass(frozen=True)
class Pipeline:
    """What a rank did for its stages of a pipeline, in the time of one device.

    - ``schedule``: the class of torch's schedule, "" if unknown.
    - ``stages``: the number of stages of the whole pipeline; 0 if unknown.
    - ``group``: the ranks of the pipeline, in their order in it; empty if unknown.
    - ``roots``: (stage, layer) for each stage of this rank: the index of the model that the stage calls, negative if
      it was not profiled, or only parts of it.
    - ``steps``: how many steps had exactly these ``actions``, which are in the order in which they began. If steps
      differ, as with an evaluation between them, these are the actions of most steps. On a device, steps of whose
      actions no kernel was recorded do not count.
    - ``step_ns``: the duration of the schedule's step in each of the last ``KEPT_STEPS`` of them.
    """

    device: str
    rank: int
    schedule: str
    stages: int
    group: tuple[int, ...]
    roots: tuple[tuple[int, int], ...]
    steps: int
    step_ns: tuple[int, ...]
    actions: tuple[StageAction, ...]

    def __add__(self, cycle: Pipeline) -> Pipeline:
        """The steps of two cycles; if their actions differ, of the one with more steps, or else with more actions: a
        cycle may begin or end inside a step."""
        if [action[:3] for action in self.actions] != [action[:3] for action in cycle.actions]:
            return max(cycle, self, key=lambda pipeline: (pipeline.steps, len(pipeline.actions)))
        actions = (
            before._replace(
                took_ns=(before.took_ns + after.took_ns)[-KEPT_STEPS:],
                waited_ns=(before.waited_ns + after.waited_ns)[-KEPT_STEPS:],
            )
            for before, after in zip(self.actions, cycle.actions)
        )
        step_ns = (self.step_ns + cycle.step_ns)[-KEPT_STEPS:]
        return replace(cycle, steps=self.steps + cycle.steps, step_ns=step_ns, actions=tuple(actions))

    @property
    def waited_ns(self) -> int:
        """The waiting in all its steps; of those that are not kept, as long as in the others."""
        kept = sum(sum(action.waited_ns) for action in self.actions)
        return kept * self.steps // len(self.step_ns)

    def of_a_comparison(self) -> Pipeline:
        """Which stages the rank has, and nothing else: ranks with other stages are not compared with it."""
        roots = tuple((stage, NOT_SELECTED) for stage, _ in self.roots)
        return replace(self, roots=roots, step_ns=self.step_ns[-1:], actions=())

    def renumbered(self, to: Sequence[int]) -> Pipeline:
        return replace(self, roots=tuple((stage, to[layer]) for stage, layer in self.roots))

    def check(self, layers: int) -> None:
        for _, layer in self.roots:
            demand(NOT_SELECTED <= layer < layers, f"layer {layer} of a stage")
        kept, stages = len(self.step_ns), {stage for stage, _ in self.roots}
        demand(0 < kept <= self.steps, "the number of steps of a pipeline")
        for action in self.actions:
            demand(action.what in ACTIONS and action.stage in stages, f"{action[:3]!r} instead of a stage's action")
            demand(len(action.took_ns) == len(action.waited_ns) == kept, "the times of a stage's action")
