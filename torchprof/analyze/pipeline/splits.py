"""Which stage of a pipeline is slow, and what another split of the model, or more microbatches, would save."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import NamedTuple

from torchprof.analyze.pipeline.bubble import Bubble, UnknownBubble, bubble_of, mean_bubble
from torchprof.analyze.pipeline.simulation import Action, Order, simulated
from torchprof.analyze.pipeline.slow_stages import SlowStages, slow_stages
from torchprof.analyze.pipeline.values import AlikePipelines, OnePipeline, StageTimes, mean_times, pipelines_of
from torchprof.analyze.report import kept_with_run
from torchprof.run.layers import Layers
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, PHASES, RECOMPUTE

WORTH_SAVING = 0.03
"""The share of a step that another split, or more microbatches, must save."""
_MOST_LAYERS = 2  # that are moved

Means = Mapping[tuple[int, str], float]
"""The duration of the actions of each stage, by what they are, in ns."""


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
        return mean_bubble(bubble for bubble in self.bubbles if isinstance(bubble, Bubble))


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
        or any(ns > 0 for device, ns in meta.busy_ns if device != "cpu")
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
