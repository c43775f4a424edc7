"""Which stage of a pipeline is slow, and what another split of the model, or more microbatches, would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, median_low
from typing import NamedTuple

from torchprof.analyze.pipeline.bubble import Bubble, UnknownBubble, bubble_of, simulated
from torchprof.analyze.pipeline.values import (
    Action,
    AlikePipelines,
    OnePipeline,
    Order,
    StageTimes,
    mean_times,
    pipelines_of,
    stages_of,
)
from torchprof.analyze.ranks.significance import stragglers
from torchprof.analyze.report import kept_with_run
from torchprof.run.layers import Layers
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, PHASES, RECOMPUTE

WORTH_SAVING = 0.03
"""The share of a step that another split, or more microbatches, must save."""
_MOST_LAYERS = 2  # that are moved
_FEW_STEPS = 3
_SLOWER = 0.05  # than the other ranks: less is the usual difference between equal layers

Means = Mapping[tuple[int, str], float]
"""The duration of the actions of each stage, by what they are, in ns."""
_Place = tuple[int, ...]  # the stages of a rank


class Saving(NamedTuple):
    """By how much a step would be shorter: in ns, and as a share of it."""

    ns: float
    share: float


class Move(NamedTuple):
    """``layers``, by their indices, from the end or the start of one stage to a neighbor."""

    layers: tuple[int, ...]
    source: int
    target: int


@dataclass(frozen=True)
class SlowStages:
    """The ``stages`` of the ranks of a pipeline that take longest, of several if they take equally long; and all
    ``ranks`` that have them, of ``places`` in each pipeline.

    ``own_ns``: a microbatch in the stages of such a rank, of the slowest one, forward and backward. ``others_ns``: the
    median of the other ranks. In ``times`` of the ``steps``, all other ranks took less, in the median replica.
    ``may_be_chance``: there are too few steps to exclude chance.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    places: int
    own_ns: float
    others_ns: float
    times: int
    steps: int
    may_be_chance: bool


@dataclass(frozen=True)
class Split:
    """What is known of the split of a model into stages.

    ``slow``: None if no rank takes clearly longer than the others. ``move``: the best, with what it saves; None if none
    saves ``WORTH_SAVING``. ``doubled``: what twice as many microbatches would save that take half the time each,
    which is the least that half the size takes; None if that is unknown, or less than that. ``microbatches``: their
    number now.
    """

    slow: SlowStages | None
    move: tuple[Move, Saving] | None
    doubled: Saving | None
    microbatches: int


@dataclass(frozen=True)
class Judged:
    """Pipelines that do the same. ``bubbles``: of those that are judged. ``split``: what is known of the split of their
    model; None if no bubble is known."""

    replicas: AlikePipelines
    bubbles: tuple[Bubble | UnknownBubble, ...]
    split: Split | None

    @property
    def bubble(self) -> Bubble | None:
        """The mean over the pipelines whose bubble is known; None if it is of none."""
        known = [bubble for bubble in self.bubbles if isinstance(bubble, Bubble)]
        return Bubble(*map(fmean, zip(*known))) if known else None


@kept_with_run
def judged_pipelines(run: Run) -> list[Judged]:
    """The pipelines of a run with what is known of them."""
    judged = []
    for replicas in pipelines_of(run):
        launches = replicas.device == "cpu" and _used_a_device(run, replicas)
        bubbles = tuple(_ONLY_LAUNCHES if launches else bubble_of(pipeline) for pipeline in replicas.judged)
        known = (pipeline for pipeline, of in zip(replicas.judged, bubbles) if isinstance(of, Bubble))
        split = next((_split(run, replicas, pipeline) for pipeline in known), None)
        judged.append(Judged(replicas, bubbles, split))
    return judged


_ONLY_LAUNCHES = UnknownBubble("times are of the CPU, which only launches the work of the device")


def _used_a_device(run: Run, replicas: AlikePipelines) -> bool:
    """Whether a rank used a device: one whose times were not recorded, or on which something ran."""
    ranks = {member.rank for member in replicas.members}
    return any(
        (meta.device is not None and "device_ns" not in meta.measured)
        or any(ns > 0 for ns in meta.busy_devices.values())
        for meta in run.metas
        if meta.rank in ranks
    )


def _split(run: Run, replicas: AlikePipelines, pipeline: OnePipeline) -> Split:
    """Judge the split of a model. ``pipeline``: one of the replicas, with a known bubble.

    A step is simulated with the mean durations of the stages, and with those after a change. The difference is a share
    of the recorded step, or of the simulated one if that is longer.
    """
    means = mean_times(replicas)
    now = _length(pipeline, means)
    whole = max(now, fmean(pipeline.step_ns[step] for step in pipeline.typical_steps), 1.0)
    slow = slow_stages(replicas, pipeline)

    def saving(ns: float) -> Saving | None:
        return Saving(ns, ns / whole) if ns >= WORTH_SAVING * whole else None

    after_moves = {} if slow is None else dict(_moves(run, replicas, means, slow))
    saved = {move: now - _length(pipeline, after) for move, after in after_moves.items()}
    best = max(saved, key=lambda move: (saved[move], -len(move.layers)), default=None)
    of_best = None if best is None else saving(saved[best])
    then = _length_with_twice_the_microbatches(pipeline, means)
    doubled = None if then is None else saving(now - then)
    return Split(slow, None if best is None or of_best is None else (best, of_best), doubled, pipeline.microbatches)


def _length(pipeline: OnePipeline, means: Means) -> float:
    """The length of a step in which the actions of a stage take equally long, of a pipeline that can be simulated."""
    took = {action: means[action.stage, action.what] for order in pipeline.orders for action in order}
    step = simulated(pipeline.orders, took, pipeline.stages)
    assert step is not None
    return step.ns


def _length_with_twice_the_microbatches(pipeline: OnePipeline, means: Means) -> float | None:
    """The length of a step with twice as many microbatches that take half the time each; None if it is unknown how the
    schedule would order them."""
    order_of = _ORDERS.get(pipeline.members[0].schedule)
    count, stages = pipeline.microbatches, pipeline.stages
    if order_of is None or pipeline.orders != [order_of(stage, stages, count) for stage in range(stages)]:
        return None
    orders = [order_of(stage, stages, 2 * count) for stage in range(stages)]
    took = {action: means[action.stage, action.what] / 2 for order in orders for action in order}
    step = simulated(orders, took, stages)
    return None if step is None else step.ns


def _order_of_gpipe(stage: int, stages: int, microbatches: int) -> Order:
    return [Action(stage, what, number) for what in "FB" for number in range(microbatches)]


def _order_of_1f1b(stage: int, stages: int, microbatches: int) -> Order:
    """As many forwards as there are stages from this one on, then a backward and a forward in turn."""
    forwards, backwards = ([Action(stage, what, number) for number in range(microbatches)] for what in "FB")
    ahead = stages - stage
    order = forwards[:ahead]
    for number, backward in enumerate(backwards):
        order += [backward, *forwards[number + ahead : number + ahead + 1]]
    return order


_ORDERS = {"ScheduleGPipe": _order_of_gpipe, "Schedule1F1B": _order_of_1f1b}
"""What a rank does in torch's schedules of one stage on each rank."""


class _LayerShares:
    """Which share of the forward and of the backward of its stage a layer takes, as recorded in the rows of a run.

    Recomputing is a part of backward. So is the backward of the loss in the last stage, which is in no layer.
    """

    def __init__(self, run: Run, replicas: AlikePipelines) -> None:
        self._last = replicas.stages - 1
        self._layers = run.layers
        field = "cpu_ns" if replicas.device == "cpu" else "device_ns"
        self._forward = self._times(run, field, (FORWARD,))
        self._backward = self._times(run, field, (BACKWARD, RECOMPUTE))
        self._loss: Counter[int] = Counter()  # by rank
        for layer, phase, rank, ns in zip(*(run.rows.columns[name] for name in ("layer", "phase", "rank", field))):
            if layer < 0 and PHASES[phase] == BACKWARD:
                self._loss[rank] += ns

    def _times(self, run: Run, field: str, phases: Sequence[str]) -> list[int]:
        """The time of each layer with all layers below it."""
        own = [0] * len(run.layers)
        for (layer, phase), (cost, _) in run.rows.by_layer.items():
            if layer >= 0 and PHASES[phase] in phases:
                own[layer] += getattr(cost, field)
        return self._layers.roll_up(own)

    def of(self, layers: Sequence[int], stage: StageTimes, what: str) -> float | None:
        """The share of some layers of a stage; None if the stage took no time that was recorded."""
        times = self._forward if what == "F" else self._backward
        whole = times[stage.root]
        if stage.stage == self._last and what != "F":
            whole += sum(self._loss[rank] for rank in stage.ranks)
        return sum(times[layer] for layer in layers) / whole if whole > 0 else None


def _moves(run: Run, replicas: AlikePipelines, means: Means, slow: SlowStages) -> Iterator[tuple[Move, Means]]:
    """Each move of one or two layers at the border of a slow stage to a stage on another rank, with the durations after
    it. Without those of the layers there are none."""
    shares = _LayerShares(run, replicas)
    for source in slow.stages:
        stage = replicas.times[source]
        blocks = numbered_layers(run.layers, stage.root)
        for target in {source - 1, source + 1}.difference(slow.stages).intersection(range(replicas.stages)):
            for count in range(1, min(_MOST_LAYERS, len(blocks) - 1) + 1):
                layers = blocks[:count] if target < source else blocks[-count:]
                moved = {what: shares.of(layers, stage, what) for what in stage.by_what}
                after = _after(means, source, target, moved)
                if after is not None:
                    yield Move(tuple(layers), source, target), after


def _after(means: Means, source: int, target: int, shares: Mapping[str, float | None]) -> Means | None:
    """The durations after a move of layers, which take these shares of their stage; None if they are unknown."""
    changed = dict(means)
    for what, share in shares.items():
        if share is None or (target, what) not in means:
            return None
        ns = share * means[source, what]
        changed[source, what] -= ns
        changed[target, what] += ns
    return changed


def slow_stages(replicas: AlikePipelines, pipeline: OnePipeline) -> SlowStages | None:
    """The slow stages, if they are on at most half of the ranks. ``pipeline``: a complete one of the replicas.

    They take longer than the median of the other ranks by at least ``_SLOWER``, in the median microbatch (of replicas
    in the median one, of two in the faster one) and by the test of ``stragglers`` over the microbatches of all steps.
    """
    busy = {
        place: sum(median_low(replicas.times[stage].of_rank.values()) for stage in place)
        for place in map(stages_of, pipeline.members)
    }
    longest = max(busy.values())
    slow = {place for place, ns in busy.items() if (1 + _SLOWER) * ns >= longest}
    others_ns = _of_others(slow, busy)
    if others_ns is None or min(busy[place] for place in slow) < (1 + _SLOWER) * others_ns:
        return None
    complete = (pipeline for pipeline in replicas.judged if pipeline.is_complete and pipeline.step_ns)
    in_replicas = [[*_busy_by_microbatch(pipeline)] for pipeline in complete]
    times = [microbatch for of_replica in in_replicas for microbatch in of_replica]
    own = [min(ns[place] for place in slow) for ns in times]
    others = [round(_of_others(slow, ns) or 0) for ns in times]
    tested = stragglers([own, others], least=_SLOWER, of=len(busy))
    if tested is not None and tested.slow != (0,):
        return None
    are_slowest = (_are_slowest(slow, of_replica, pipeline.microbatches) for of_replica in in_replicas)
    slowest_in = [median_low(of_step) for of_step in zip(*are_slowest)]
    return SlowStages(
        tuple(sorted(stage for place in slow for stage in place)),
        tuple(sorted(member.rank for member in replicas.members if stages_of(member) in slow)),
        len(slow),
        longest,
        others_ns,
        sum(slowest_in),
        len(slowest_in),
        tested is None or tested.may_be_chance or len(slowest_in) < _FEW_STEPS,
    )


def _of_others(slow: Collection[_Place], busy: Mapping[_Place, float]) -> float | None:
    """The median of the other ranks; None if these are fewer than half of all."""
    others = [ns for place, ns in busy.items() if place not in slow]
    return median(others) if 2 * len(others) >= len(busy) else None


def _are_slowest(slow: Collection[_Place], busy: Sequence[Mapping[_Place, int]], microbatches: int) -> list[bool]:
    """Whether all other ranks took less, in each step. ``busy``: by microbatch, one step after the other."""
    steps = [busy[first : first + microbatches] for first in range(0, len(busy), microbatches)]
    sums = ({place: sum(microbatch[place] for microbatch in step) for place in step[0]} for step in steps)
    return [
        min(step[place] for place in slow) > max(ns for place, ns in step.items() if place not in slow) for step in sums
    ]


def _busy_by_microbatch(pipeline: OnePipeline) -> Iterator[dict[_Place, int]]:
    """The time of each rank of a complete pipeline in each microbatch, by its stages, one step after the other."""
    numbers = sorted({action.microbatch for action in pipeline.members[0].actions})
    of_ranks = {}  # by the stages of the rank, in the order of steps and microbatches
    for member in pipeline.members:
        sums = [
            map(sum, zip(*(action.took_ns for action in member.actions if action.microbatch == number)))
            for number in numbers
        ]
        of_ranks[stages_of(member)] = [ns for step in zip(*sums) for ns in step]
    yield from (dict(zip(of_ranks, times)) for times in zip(*of_ranks.values()))


def numbered_layers(layers: Layers, root: int) -> list[int]:
    """The layers of a stage that can be moved, in their order: the children of the container that has most of them,
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
