"""Why the ranks of a pipeline are idle: its bubble, by simulation of a step, and its slow stages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import NamedTuple

from torchprof.analyze.report import kept_with_run
from torchprof.ranks.pipeline import Action, OnePipeline, Order, ReplicaPipelines, pipelines_of, stages_of
from torchprof.ranks.significance import stragglers
from torchprof.run.groups import lists_by_key
from torchprof.run.run import Run

OVERLAP = 0.02
"""A step that is shorter by more than this share than its actions allow, one after the other, has some at once."""
FEW_STEPS = 3
_SLOWER = 0.05  # than the other ranks: less is the usual difference between equal layers

_Stages = tuple[int, ...]  # of a rank, ascending


class Bubble(NamedTuple):
    """The shares of the time of all ranks in which they are idle, in a step. The last four add up to ``measured``.

    ``schedule``: with equal stages. ``stages``, ``microbatches``: what is added if each stage, and each action, takes
    its own time. ``rest``: communication, the loss, the host, and others. docs/pipelines.md has the formulas.
    """

    measured: float
    schedule: float
    stages: float
    microbatches: float
    rest: float


@dataclass(frozen=True)
class SlowStages:
    """The stages of a pipeline that take longest.

    - ``stages``: those of the slowest rank, or of several ranks that take equally long. ``ranks``: all that have them,
      ``ranks_per_pipeline`` in each replica.
    - ``own_ns``: the time of a microbatch in the stages of the slowest rank. ``others_ns``: the median of the others.
    - ``times``: in how many of the ``steps`` all other ranks took less, in the median replica.
    - ``may_be_chance``: there are too few steps to exclude chance.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    ranks_per_pipeline: int
    own_ns: float
    others_ns: float
    times: int
    steps: int
    may_be_chance: bool


@dataclass(frozen=True)
class Judged:
    """Pipelines that do the same.

    - ``bubbles``: of each pipeline of ``replicas.judged``; or why it is unknown, as the end of a sentence.
    - ``slow``: their slow stages; None if no bubble is known, or if no rank takes clearly longer than the others.
    """

    replicas: ReplicaPipelines
    bubbles: tuple[Bubble | str, ...]
    slow: SlowStages | None

    @property
    def bubble(self) -> Bubble | None:
        """The mean over the pipelines whose bubble is known; None if it is of none."""
        known = [bubble for bubble in self.bubbles if isinstance(bubble, Bubble)]
        return Bubble(*map(fmean, zip(*known))) if known else None


@kept_with_run
def judged_pipelines(run: Run) -> list[Judged]:
    """The pipelines of a run with what is known of them."""
    only_launches = "times are of the CPU, which only launches the work of the device"
    judged = []
    for replicas in pipelines_of(run):
        launches = replicas.device == "cpu" and _used_a_device(run, replicas)
        bubbles = tuple(only_launches if launches else _bubble_of(pipeline) for pipeline in replicas.judged)
        known = [pipeline for pipeline, bubble in zip(replicas.judged, bubbles) if isinstance(bubble, Bubble)]
        slow = _slow_stages(replicas, known[0]) if known else None
        judged.append(Judged(replicas, bubbles, slow))
    return judged


def _used_a_device(run: Run, replicas: ReplicaPipelines) -> bool:
    """Whether a rank used a device: one whose times were not recorded, or on which something ran."""
    ranks = {member.rank for member in replicas.members}
    return any(
        (meta.device is not None and "device_ns" not in meta.measured)
        or any(ns > 0 for device, ns in meta.busy_ns if device != "cpu")
        for meta in run.metas
        if meta.rank in ranks
    )


# The bubble


def _bubble_of(pipeline: OnePipeline) -> Bubble | str:
    """The bubble of a pipeline in steps of usual length: the mean over them; or why it is unknown."""
    if not pipeline.is_complete:
        return "ranks of it are not in this run" if pipeline.ranks else "its ranks are unknown"
    trains = any(action.what != "F" for member in pipeline.members for action in member.actions)
    if not trains and len(pipeline.members) > 1:
        return "without backward, steps overlap: a rank begins the next one while others do this one"
    if not pipeline.typical_steps:
        return "its ranks recorded different numbers of steps"
    idle_shares = []  # for each step: as measured, and in each of the simulations
    for step in pipeline.typical_steps:
        took = pipeline.took(step)
        step_ns: list[float] = [pipeline.step_ns[step]]
        for durations in (
            _means(took, lambda action: action.what),
            _means(took, lambda action: (action.stage, action.what)),
            took,
        ):
            if (ends := simulated(pipeline.orders, durations, pipeline.stages)) is None:
                return "its actions do not fit together in the recorded order"
            step_ns.append(max(ends.values()))
        idle_shares.append([1 - sum(took.values()) / (len(pipeline.members) * max(ns, 1)) for ns in step_ns])
    measured, equal_stages, own_of_stages, own_of_actions = map(fmean, zip(*idle_shares))
    if measured < 1 - (1 - own_of_actions) / (1 - OVERLAP):
        return "a step is shorter than its actions one after the other: some run at the same time"
    return Bubble(
        measured=measured,
        schedule=equal_stages,
        stages=own_of_stages - equal_stages,
        microbatches=own_of_actions - own_of_stages,
        rest=measured - own_of_actions,
    )


def _means(took: Mapping[Action, float], key: Callable[[Action], Hashable]) -> dict[Action, float]:
    """The same actions, each with the mean duration of those with the same key."""
    times = lists_by_key((key(action), ns) for action, ns in took.items())
    means = {name: fmean(ns) for name, ns in times.items()}
    return {action: means[key(action)] for action in took}


# The simulation


def simulated(orders: Sequence[Order], took: Mapping[Action, float], stages: int) -> dict[Action, float] | None:
    """When each action ends in a simulated step of a pipeline with so many ``stages``, in ns after the start of the
    step. ``orders``: the actions of each rank, different ones on each. ``took``: the duration of each action in ns.

    All ranks start together; docs/pipelines.md says what an action waits for. What is sent arrives at once.

    None if an action needs one that no rank has, or one that would run only after it.

    Two ranks with a stage each and the order F0 F1 B0 B1, in which F takes 1 and B takes 2::

        start    0  1  2  3  4  5  6  7  8
        stage 0  F0 F1          B0 B0 B1 B1
        stage 1     F0 F1 B0 B0 B1 B1
    """
    if (needs := _needs(orders, stages)) is None:
        return None
    ends: dict[Action, float] = {}
    now = [0.0] * len(orders)
    done = [0] * len(orders)
    blocked: defaultdict[Action, list[int]] = defaultdict(list)  # the ranks that wait for an action
    ready = [*range(len(orders))]
    while ready:
        rank = ready.pop()
        while done[rank] < len(orders[rank]):
            action = orders[rank][done[rank]]
            missing = next((need for need in needs[action] if need not in ends), None)
            if missing is not None:
                blocked[missing].append(rank)
                break
            start = max([now[rank], *(ends[need] for need in needs[action])])
            ends[action] = now[rank] = start + took[action]
            done[rank] += 1
            ready += blocked.pop(action, ())
    return ends if len(ends) == len(needs) else None


def _needs(orders: Sequence[Order], stages: int) -> dict[Action, list[Action]] | None:
    """The actions that each action needs; None if no rank has one of them, or if an action is there twice."""
    actions = [action for order in orders for action in order]
    known = set(actions)
    if len(known) < len(actions):
        return None
    needs: dict[Action, list[Action]] = {}
    for action in actions:
        stage, what, microbatch = action
        wanted: list[tuple[Action, ...]] = []  # of each one of several
        if what == "W":
            wanted.append((Action(stage, "I", microbatch),))
        elif what != "F":
            wanted.append((Action(stage, "F", microbatch),))
            if stage < stages - 1:
                wanted.append((Action(stage + 1, "B", microbatch), Action(stage + 1, "I", microbatch)))
        elif stage > 0:
            wanted.append((Action(stage - 1, "F", microbatch),))
        needs[action] = [choice for choices in wanted for choice in choices if choice in known]
        if len(needs[action]) < len(wanted):
            return None
    return needs


# The slow stages


def _slow_stages(replicas: ReplicaPipelines, pipeline: OnePipeline) -> SlowStages | None:
    """The slow stages, if they are on at most half of the ranks. ``pipeline``: a complete one of the replicas.

    They take longer than the median of the other ranks by at least ``_SLOWER``, in the median microbatch (of two
    replicas in the faster one) and by the test of ``stragglers`` over the microbatches of all steps.
    """
    busy = {  # by the stages of a rank
        stages: sum(median_low(replicas.times[stage].of_rank.values()) for stage in stages)
        for stages in map(stages_of, pipeline.members)
    }
    longest = max(busy.values())
    slow = {stages for stages, ns in busy.items() if (1 + _SLOWER) * ns >= longest}
    others_ns = _of_others(slow, busy)
    if others_ns is None or min(busy[stages] for stages in slow) < (1 + _SLOWER) * others_ns:
        return None
    complete = (pipeline for pipeline in replicas.judged if pipeline.is_complete and pipeline.step_ns)
    by_replica = [[*_busy_by_microbatch(pipeline)] for pipeline in complete]
    microbatches = [microbatch for steps in by_replica for step in steps for microbatch in step]
    own = [min(ns[stages] for stages in slow) for ns in microbatches]
    others = [round(_of_others(slow, ns) or 0) for ns in microbatches]
    tested = stragglers([own, others], least=_SLOWER, of=len(busy))
    if tested is not None and tested.slow != (0,):
        return None
    are_slowest = ([_are_slowest(slow, step) for step in steps] for steps in by_replica)
    slowest_in = [median_low(of_step) for of_step in zip(*are_slowest)]  # for each step, in the median replica
    return SlowStages(
        stages=tuple(sorted(stage for stages in slow for stage in stages)),
        ranks=tuple(sorted(member.rank for member in replicas.members if stages_of(member) in slow)),
        ranks_per_pipeline=len(slow),
        own_ns=longest,
        others_ns=others_ns,
        times=sum(slowest_in),
        steps=len(slowest_in),
        may_be_chance=tested is None or tested.may_be_chance or len(slowest_in) < FEW_STEPS,
    )


def _of_others(slow: Collection[_Stages], busy: Mapping[_Stages, float]) -> float | None:
    """The median of the other ranks; None if these are fewer than half of all."""
    others = [ns for stages, ns in busy.items() if stages not in slow]
    return median(others) if 2 * len(others) >= len(busy) else None


def _are_slowest(slow: Collection[_Stages], step: Sequence[Mapping[_Stages, int]]) -> bool:
    """Whether all other ranks took less in a step. ``step``: its microbatches."""
    sums = {stages: sum(microbatch[stages] for microbatch in step) for stages in step[0]}
    return min(sums[stages] for stages in slow) > max(ns for stages, ns in sums.items() if stages not in slow)


def _busy_by_microbatch(pipeline: OnePipeline) -> Iterator[list[dict[_Stages, int]]]:
    """For each step of a complete pipeline, and each microbatch in it, the time of each rank, by its stages."""
    numbers = sorted({action.microbatch for action in pipeline.members[0].actions})
    of_ranks = {}  # by the stages of the rank: in each step the time of each microbatch
    for member in pipeline.members:
        sums = [
            map(sum, zip(*(action.took_ns for action in member.actions if action.microbatch == number)))
            for number in numbers
        ]
        of_ranks[stages_of(member)] = zip(*sums)
    for step in zip(*of_ranks.values()):
        yield [dict(zip(of_ranks, times)) for times in zip(*step)]
