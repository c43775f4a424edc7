"""The pipelines of a run: which ranks are one pipeline, which are replicas, and how long their actions take."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from statistics import median
from typing import Any, NamedTuple

from torchprof.run.groups import lists_by_key
from torchprof.run.run import Run
from torchprof.run.timeline import Pipeline, StageAction
from torchprof.run.words import NOT_SELECTED


class Action(NamedTuple):
    """A microbatch in a stage; ``what`` is as in ``StageAction``: "F", "B", "I" or "W"."""

    stage: int
    what: str
    microbatch: int


Order = Sequence[Action]
"""The actions of a rank in the order in which it runs them."""

_TYPICAL = 3  # one step in so many is typical: of the steps in the order of their length, the middle part
_MOST_STEPS = 9  # of a pipeline that are simulated
_MOST_PIPELINES = 16  # of those that do the same that are simulated


@dataclass(frozen=True)
class OnePipeline:
    """The ranks that run a model together. ``members``: what those in this run did, in their order in the pipeline.
    ``ranks``: all of them; ``()`` if unknown, and then the members may be of several pipelines."""

    members: tuple[Pipeline, ...]
    ranks: tuple[int, ...]

    @property
    def stages(self) -> int:
        return self.members[0].stages

    @cached_property
    def is_complete(self) -> bool:
        """Whether all its ranks are in this run, and each stage is on one of them."""
        stages = sorted(stage for member in self.members for stage in {action.stage for action in member.actions})
        has_all = len(stages) == self.stages and stages == [*range(len(stages))]
        return 0 < len(self.members) == len(self.ranks) and has_all

    @cached_property
    def orders(self) -> list[Order]:
        """The actions of each member."""
        return [[Action(*action[:3]) for action in member.actions] for member in self.members]

    @cached_property
    def microbatches(self) -> int:
        return len({action.microbatch for member in self.members for action in member.actions})

    @cached_property
    def step_ns(self) -> tuple[int, ...]:
        """The duration of each step, from the first action to the end of the last rank; ``()`` if steps cannot be
        paired. A rank that begins early only waits for the rank with the first stage: that is not part of the step."""
        if len({(member.steps, len(member.step_ns)) for member in self.members}) > 1:
            return ()
        times = [[ns - early for ns, early in zip(member.step_ns, self.early_ns(member))] for member in self.members]
        return tuple(map(max, zip(*times)))

    def early_ns(self, member: Pipeline) -> list[int]:
        """How long before the others a rank began each step: what it waited longer than the stages before it took. If
        the rank with stage 2 waits for 50 ms before its first forward, and the forwards of that microbatch in the
        stages 0 and 1 took 20 ms each, it began 10 ms early."""
        first = member.actions[0]
        before = [
            action.took_ns
            for member in self.members
            for action in member.actions
            if action.what == "F" and action.microbatch == first.microbatch and action.stage < first.stage
        ]
        if not before:  # it has the first stage
            return [0] * len(first.waited_ns)
        return [max(waited - sum(took), 0) for waited, *took in zip(first.waited_ns, *before)]

    @cached_property
    def steps_by_length(self) -> list[int]:
        """The numbers of the steps, the shortest first; none if the steps of the ranks cannot be paired."""
        return sorted(range(len(self.step_ns)), key=self.step_ns.__getitem__)

    @cached_property
    def typical_steps(self) -> list[int]:
        """The numbers of steps of usual length: the middle third, of these at most 9. Empty if the pipeline is not
        complete, or if its steps are unknown."""
        ordered = self.steps_by_length if self.is_complete else []
        left_out = len(ordered) // _TYPICAL  # at each end
        middle = ordered[left_out : len(ordered) - left_out]
        return middle[:: ceil(len(middle) / _MOST_STEPS)] if middle else []

    def took(self, step: int) -> dict[Action, float]:
        """The duration of each action in a step, in ns."""
        return {
            action: recorded.took_ns[step]
            for member, order in zip(self.members, self.orders)
            for action, recorded in zip(order, member.actions)
        }


@dataclass(frozen=True)
class StageTimes:
    """A stage over the ranks that have it. All times are medians, in ns, over steps, microbatches and ranks.

    - ``root``: the model that it calls, by its index; negative if unknown.
    - ``by_what``: the time of an action by what it is: "F", "B", "I", "W".
    - ``microbatch_ns``: of a microbatch, forward and backward; ``backward_ns``: its backward, in one part or in two,
      None without. ``of_rank``, ``of_microbatch``: ``microbatch_ns`` of each rank, and of each microbatch.
    - ``step_ns``: all its actions in a step.
    - ``inputs_ns``, ``gradients_ns``, ``other_ns``: the waiting in a step before forwards that need the stage before;
      before backwards that need the stage after; before actions that need nothing from another rank. The last two are
      None if the number of stages is unknown: the last stage needs no gradients.
    """

    stage: int
    ranks: tuple[int, ...]
    root: int
    by_what: dict[str, float]
    microbatch_ns: float
    backward_ns: float | None
    of_rank: dict[int, float]
    of_microbatch: dict[int, float]
    step_ns: float
    inputs_ns: float
    gradients_ns: float | None
    other_ns: float | None

    @property
    def slowest_rank(self) -> int:
        """The rank on which a microbatch takes longest."""
        return max(self.of_rank, key=self.of_rank.__getitem__)


@dataclass(frozen=True)
class ReplicaPipelines:
    """Pipelines that do the same: with the same schedule, stages and actions. One alone is its own replica."""

    pipelines: tuple[OnePipeline, ...]

    @property
    def first(self) -> OnePipeline:
        return self.pipelines[0]

    @property
    def device(self) -> str:
        return self.first.members[0].device

    @cached_property
    def judged(self) -> tuple[OnePipeline, ...]:
        """Some of them, evenly chosen, that are simulated: a job may have hundreds."""
        return self.pipelines[:: ceil(len(self.pipelines) / _MOST_PIPELINES)]

    @cached_property
    def members(self) -> list[Pipeline]:
        return [member for pipeline in self.pipelines for member in pipeline.members]

    @cached_property
    def times(self) -> dict[int, StageTimes]:
        """The times of each stage that is on a rank of this run."""
        by_stage = lists_by_key(
            (stage, member) for member in self.members for stage in {action.stage for action in member.actions}
        )
        return {stage: _times_of_stage(stage, members) for stage, members in sorted(by_stage.items())}


def stages_of(pipeline: Pipeline) -> tuple[int, ...]:
    """The stages of a rank, ascending: also in a comparison, which has no actions."""
    return tuple(sorted({stage for stage, _ in pipeline.roots} | {action.stage for action in pipeline.actions}))


def pipelines_of(run: Run) -> list[ReplicaPipelines]:
    """The pipelines of a run, replicas together, in the order of their lowest rank."""
    groups: list[tuple[list[OnePipeline], dict[tuple[int, ...], object]]] = []
    for pipeline in _pipelines(run):
        traits = _traits(pipeline)
        for replicas, known in groups:
            if all(known.get(stages, trait) == trait for stages, trait in traits.items()):
                replicas.append(pipeline)
                known.update(traits)  # one replica may lack ranks that another has
                break
        else:
            groups.append(([pipeline], traits))
    return [ReplicaPipelines(tuple(replicas)) for replicas, _ in groups]


def _traits(pipeline: OnePipeline) -> dict[tuple[int, ...], object]:
    """What pipelines that do the same have in common: for the stages of a rank, what that rank does; and for ``()``,
    the kind of device, the schedule and the number of stages."""
    first = pipeline.members[0]
    traits: dict[tuple[int, ...], object] = {}
    traits[()] = first.device.partition(":")[0], first.schedule, first.stages, bool(pipeline.ranks)
    for member, order in zip(pipeline.members, pipeline.orders):
        traits[stages_of(member)] = member.roots, order
    return traits


def _pipelines(run: Run) -> Iterator[OnePipeline]:
    """Each pipeline. Ranks that do not know theirs are one if they have each stage once, and no rank is missing; else
    those that do the same are together, of pipelines that are unknown."""
    groups: dict[tuple[int, ...], list[Pipeline]] = {}  # by the ranks of the pipeline, () if unknown
    for member in sorted(_of_one_device(run), key=lambda member: min(stages_of(member), default=0)):
        groups.setdefault(member.group if member.rank in member.group else (), []).append(member)
    unknown = groups.pop((), [])
    schedules = {(member.schedule, member.stages) for member in unknown}
    stages = sorted(stage for member in unknown for stage in stages_of(member))
    pipelines = [
        OnePipeline(tuple(sorted(members, key=lambda member: group.index(member.rank))), group)
        for group, members in groups.items()
    ]
    are_all = [count for _, count in schedules] == [len(stages)] and stages == [*range(len(stages))]
    if are_all and not run.missing_ranks:
        pipelines.append(OnePipeline(tuple(unknown), tuple(member.rank for member in unknown)))
    else:
        similar: dict[object, list[Pipeline]] = {}
        for member in unknown:
            microbatches = frozenset(action.microbatch for action in member.actions)
            similar.setdefault((member.schedule, member.stages, microbatches), []).append(member)
        pipelines += [OnePipeline(tuple(members), ()) for members in similar.values()]
    yield from sorted(pipelines, key=lambda pipeline: min(member.rank for member in pipeline.members))


def _of_one_device(run: Run) -> Iterable[Pipeline]:
    """The pipeline of each rank, in the time of its device (of several, that with most work); else that of the CPU."""
    recorded = [pipeline for pipeline in run.pipelines if pipeline.actions]
    recorded.sort(key=lambda pipeline: sum(sum(action.took_ns) for action in pipeline.actions))
    on_device = [pipeline for pipeline in recorded if pipeline.device != "cpu"]
    on_cpu = [pipeline for pipeline in recorded if pipeline.device == "cpu"]
    all_on_device = {pipeline.rank for pipeline in on_device} >= {pipeline.rank for pipeline in recorded}
    by_rank = {pipeline.rank: pipeline for pipeline in (on_device if all_on_device else on_cpu)}  # the last one counts
    return by_rank.values()


def _times_of_stage(stage: int, members: Sequence[Pipeline]) -> StageTimes:
    """The times of a stage. ``members``: the ranks that have it."""
    by_rank = {member.rank: [action for action in member.actions if action.stage == stage] for member in members}
    all_actions = [action for actions in by_rank.values() for action in actions]
    last_stage = members[0].stages - 1
    stages_on = {member.rank: stages_of(member) for member in members}

    def needs(rank: int, action: StageAction) -> str:
        """What this action needs from another rank: "inputs" (forward), "gradients" (backward) or nothing ("other")."""
        if action.what == "F" and stage > 0 and stage - 1 not in stages_on[rank]:
            return "inputs"
        if action.what in "BI" and stage < last_stage and stage + 1 not in stages_on[rank]:
            return "gradients"
        return "other"

    def waiting_ns(need: str) -> float:
        return _per_step(
            [action.waited_ns for action in actions if needs(rank, action) == need] for rank, actions in by_rank.items()
        )

    of_microbatch = _by_microbatch(all_actions)
    backward = _by_microbatch(action for action in all_actions if action.what != "F")
    return StageTimes(
        stage=stage,
        ranks=tuple(sorted(by_rank)),
        root=dict(members[0].roots).get(stage, NOT_SELECTED),
        by_what=_medians(all_actions, lambda action: action.what),
        microbatch_ns=median(of_microbatch.values()),
        backward_ns=median(backward.values()) if backward else None,
        of_rank={rank: median(_by_microbatch(actions).values()) for rank, actions in sorted(by_rank.items())},
        of_microbatch=of_microbatch,
        step_ns=_per_step([action.took_ns for action in actions] for actions in by_rank.values()),
        inputs_ns=waiting_ns("inputs"),
        gradients_ns=waiting_ns("gradients") if members[0].stages else None,
        other_ns=waiting_ns("other") if members[0].stages else None,
    )


def _medians(actions: Iterable[StageAction], key: Callable[[StageAction], Any]) -> dict[Any, float]:
    """The median time over the steps of all actions with the same key."""
    times = lists_by_key((key(action), ns) for action in actions for ns in action.took_ns)
    return {value: median(ns) for value, ns in times.items()}


def _by_microbatch(actions: Iterable[StageAction]) -> dict[int, float]:
    """The time of each microbatch, ascending: the sum of the medians of all that is done with it."""
    sums: defaultdict[int, float] = defaultdict(float)
    for (microbatch, _), ns in sorted(_medians(actions, lambda action: (action.microbatch, action.what)).items()):
        sums[microbatch] += ns
    return dict(sums)


def _per_step(times: Iterable[Sequence[Sequence[int]]]) -> float:
    """The median over steps and ranks of the sum of some actions of a step. ``times``: for each rank, for each of its
    actions, the time in each step. A rank with two actions, ``[[1, 2, 3], [10, 10, 10]]``, has the sums 11, 12, 13."""
    sums = [sum(step) for of_rank in times for step in zip(*of_rank)]
    return median(sums) if sums else 0.0
