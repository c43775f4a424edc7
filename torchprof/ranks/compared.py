"""What is compared between ranks: figures of each rank, layer and collective; ``Compared`` takes them from a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, attrgetter
from statistics import median, median_low
from typing import NamedTuple

from torchprof.ranks.pipeline import stages_of
from torchprof.run.groups import lists_by_key
from torchprof.run.lockstep import GAP, NO_LOCKSTEP, NOT_RECORDED, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
from torchprof.run.measures import SampleKey
from torchprof.run.run import Run
from torchprof.run.torch_names import purpose_of
from torchprof.run.words import FORWARD, OUTSIDE, PHASES

INFERRED = "all ranks (inferred)"
"""The name of the group of collectives that recorded no group, and are taken to be between all ranks."""
IN_NO_OP = -3
"""Used as a layer's index: the time of a rank in no operator and no range, for example waiting for data."""


class Times(NamedTuple):
    """How often something happened: ``times`` out of ``of``."""

    times: int
    of: int


@dataclass(frozen=True)
class OverRanks:
    """A figure of several ranks: one value per rank, in ascending order of ``ranks``."""

    ranks: tuple[int, ...]
    values: tuple[int, ...]

    @cached_property
    def min(self) -> int:
        return min(self.values)

    @cached_property
    def max(self) -> int:
        return max(self.values)

    @cached_property
    def median(self) -> float:
        return median(self.values)

    @cached_property
    def sum(self) -> int:
        return sum(self.values)

    @property
    def highest(self) -> int:
        """The rank with the largest value; the lowest rank if several have it."""
        return self.ranks[self.values.index(self.max)]

    @property
    def above_mean(self) -> float:
        """The largest value minus the mean: what perfect balance would save."""
        return self.max - self.sum / len(self.values)

    @property
    def imbalance(self) -> float | None:
        """The largest value over the mean: 1 if all are equal. None for a single rank, and if all values are 0. This is
        the load imbalance of a bulk-synchronous program (Valiant, CACM 33(8), 1990)."""
        return self.max * len(self.values) / self.sum if len(self.values) > 1 and self.sum > 0 else None


@dataclass(frozen=True)
class OneRank:
    """The figures of one rank. Times are per step, the mean over the ``steps``; None: unknown. A field that ends in
    ``is_lower_bound`` says so of the figure that its name begins with.

    - ``work_ns``: its own work, in layers or not. ``typical_ns``: the median of that over the steps.
    - ``slowest_in``: in how many steps all others were faster; None if the steps of ranks cannot be paired.
    - ``waiting_ns``: its waiting in collectives for the last rank; ``waiting_is_lower_bound`` if not every collective
      can be measured. ``last_in``: in how many calls of collectives it was that last rank.
    - ``peaks``: (kind of device, peak bytes above the start), the largest if there are several devices of a kind.
    - ``flops``: of the whole recording.
    """

    rank: int
    steps: int
    work_ns: int | None = None
    typical_ns: int | None = None
    slowest_in: Times | None = None
    waiting_ns: int | None = None
    waiting_is_lower_bound: bool = False
    last_in: Times | None = None
    peaks: tuple[tuple[str, int], ...] = ()
    flops: int | None = None
    flops_is_lower_bound: bool = False


@dataclass(frozen=True)
class OneLayer:
    """A layer (by its index, negative for none) with all layers below it in one phase, over the ranks that have it.

    All figures are per step.

    - ``work``: own work in ns, the mean over the steps. ``slowest_in``: in how many of them the rank with the most work
      was the slowest.
    - ``flops``: floating-point operations. ``peak``: peak bytes above the start of a call.
    - ``has_collectives``: the layer, or one below, called collectives. ``waiting``: ns in these, for the ranks that
      took part; None if unknown.
    """

    layer: int
    phase: str
    work: OverRanks | None = None
    slowest_in: Times | None = None
    flops: OverRanks | None = None
    flops_is_lower_bound: bool = False
    peak: OverRanks | None = None
    has_collectives: bool = False
    waiting: OverRanks | None = None
    waiting_is_lower_bound: bool = False


@dataclass(frozen=True)
class OneCollective:
    """A collective that a layer called, between the ranks of one group.

    - ``ranks``: those that recorded it. ``calls``: of all ranks.
    - ``waiting``: ns per step of each rank; None if the calls of different ranks cannot be paired. It is a lower bound
      for the ranks in ``lower_bound_on``: for all ranks if ranks of the group are missing, else for those on which
      several of these collectives overlapped.
    - ``beside``: for how many ns per step another collective may have overlapped it, on each rank.
    - ``came_last``: how often each rank came last, in ``paired_calls``; if several came last together, none counts.
    """

    layer: int
    phase: str
    name: str
    group: GroupOfRanks | None
    ranks: tuple[int, ...]
    calls: int
    waiting: OverRanks | None = None
    lower_bound_on: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    came_last: OverRanks | None = None
    paired_calls: int = 0

    @property
    def waiting_is_lower_bound(self) -> bool:
        """Whether it is one for any rank."""
        return bool(self.lower_bound_on)


class Compared:
    """Ranks of a run that are compared with each other.

    - ``metas``, ``ranks``: the metadata and the numbers of these ranks, ascending. ``steps``: how many steps each
      recorded; without steps, how many cycles.
    - ``ranks_of_job``: how many ranks the job has, also those that are missing.
    - ``measured_on``: where the time that counts was measured, "cpu" or "device"; None for nowhere. ``step_work``: the
      own work of the ranks in whole steps, on that. ``are_paired``: whether these steps can be matched.
    """

    def __init__(self, run: Run, ranks: Collection[int], measured_on: str | None, step_work: Lockstep) -> None:
        self.run = run
        self.metas = sorted((meta for meta in run.metas if meta.rank in ranks), key=attrgetter("rank"))
        self.ranks = tuple(meta.rank for meta in self.metas)
        self.ranks_of_job = max(len(run.metas), *(meta.world_size for meta in run.metas))
        self.measured_on, self.step_work = measured_on, step_work
        self.steps = {meta.rank: meta.steps or meta.cycles for meta in self.metas}
        self.steps |= dict(zip(step_work.ranks, step_work.counts))
        self.are_paired = step_work.is_paired and step_work.ranks == self.ranks
        self._selected = None if run.meta.paths is None else set(run.meta.paths)

    @classmethod
    def of(cls, run: Run) -> Compared:
        """All ranks of a run: on the device if all ranks measured its time and anything ran there, else on the CPU."""
        ranks = {meta.rank for meta in run.metas}
        for device, field in (("device", "device_ns"), ("cpu", "cpu_ns")):
            work = run.lockstep.get(LockstepKey(OUTSIDE, FORWARD, device, STEP))
            if work is not None and any(work.ns) and all(field in meta.measured for meta in run.metas):
                return cls(run, ranks, device, work)
        return cls(run, ranks, None, NO_LOCKSTEP)

    def among(self, ranks: Collection[int]) -> Compared:
        """The same, of some of the ranks: they are compared with each other alone."""
        if len(ranks) == len(self.ranks):
            return self
        return Compared(self.run, ranks, self.measured_on, self.step_work.of_some(ranks))

    def is_selected(self, layer: int) -> bool:
        return layer < 0 or self._selected is None or self.run.layers[layer].path in self._selected

    @cached_property
    def stages(self) -> dict[int, tuple[int, ...]]:
        """The stages that each rank has of a pipeline; a rank without a pipeline is not in it."""
        return {pipeline.rank: stages_of(pipeline) for pipeline in self.run.pipelines}

    @cached_property
    def peers(self) -> list[tuple[int, ...]]:
        """The ranks that do the same work by design, together: those with the same stages of a pipeline."""
        kinds = {pipeline.rank: (pipeline.schedule, pipeline.stages) for pipeline in self.run.pipelines}
        together = lists_by_key(((kinds.get(rank), self.stages.get(rank)), rank) for rank in self.ranks)
        return [*map(tuple, together.values())]

    def work(self, device: str | None) -> dict[tuple[int, str], Lockstep]:
        """Own work of the CPU or the device, by layer and phase."""
        work = {
            (key.layer, key.phase): lockstep
            for key, lockstep in self.run.lockstep.items()
            if key.what == WORK and key.device == device and self.is_selected(key.layer)
        }
        gap = self.run.lockstep.get(LockstepKey(OUTSIDE, FORWARD, device or "", GAP))
        return work if gap is None else {**work, (IN_NO_OP, FORWARD): gap}

    def medians(self, times: Lockstep) -> dict[int, int]:
        """The median over the steps, by rank; empty if single steps were not kept."""
        return dict(zip(times.ranks, (median_low(times.own_ns),) if times.own_ns else times.medians))

    def typical(self, times: Lockstep) -> dict[int, int]:
        """The median over the steps, by rank; the mean if the median is unknown."""
        return self.medians(times) or dict(zip(times.ranks, self.each_per_step(times.ranks, times.ns)))

    @cached_property
    def all_ranks(self) -> GroupOfRanks | None:
        """All ranks of the job, as the group of the collectives whose group was not recorded. None if ranks are missing
        or did not make the same calls: then there are other groups."""
        is_complete = not self.run.missing_ranks and all(
            collective.ranks == self.ranks and collective.is_paired
            for key, collective in self.run.lockstep.items()
            if key.is_collective and key.group == NOT_RECORDED
        )
        return GroupOfRanks("", INFERRED, len(self.ranks)) if is_complete else None

    @cached_property
    def step_ns(self) -> float:
        """The duration of a step, or of a cycle if there are no steps: the median over ranks of their medians."""
        marked = {meta.rank for meta in self.metas if meta.steps}
        steps = [self.run.samples.get(SampleKey(OUTSIDE, FORWARD, rank, "cpu", "step_ns")) for rank in marked]
        known = [spread.median for spread in steps if spread is not None]
        return median(known or [meta.wall_ns / max(meta.cycles, 1) for meta in self.metas])

    def have_measured(self, name: str) -> bool:
        """Whether all ranks measured a field of ``Cost``."""
        return all(name in meta.measured for meta in self.metas)

    def per_step(self, rank: int, value: int) -> int:
        """A sum over all steps of a rank, per step."""
        return round(value / max(self.steps[rank], 1))

    def each_per_step(self, ranks: Sequence[int], values: Sequence[int]) -> tuple[int, ...]:
        """A sum over all steps of each of these ranks, per step."""
        return tuple(map(self.per_step, ranks, values))

    def over_those_with(self, layer: int, values: Mapping[int, int]) -> OverRanks:
        """The values of the ranks that have the layer; 0 for a rank that did nothing in it."""
        ranks = (self.run.layers[layer].ranks if layer >= 0 else ()) or self.ranks
        return OverRanks(ranks, tuple(values.get(rank, 0) for rank in ranks))

    def outside(self, purpose: str, name: str) -> Counter[int]:
        """A column of the rows outside all layers for one purpose ("data"), per step, by rank."""
        rows = self.run.rows
        sums: Counter[int] = Counter()
        for (phase, chain, rank), value in rows.summed(("phase", "frames", "rank"), name, layer=OUTSIDE).items():
            if value and purpose == purpose_of(PHASES[phase], rows.frames[chain]):
                sums[rank] += value
        return Counter({rank: self.per_step(rank, value) for rank, value in sums.items()})

    def rolled_up(self, name: str) -> dict[tuple[int, str], dict[int, int]]:
        """A column of the rows per step, by layer (with all layers below it), phase and rank, where it is not 0."""
        if name not in self.run.rows.nonzero:
            return {}
        position_of = {rank: position for position, rank in enumerate(self.ranks)}
        sums: dict[tuple[int, int], list[int]] = {}  # one for each rank
        for (layer, phase, rank), value in self.run.rows.summed(("layer", "phase", "rank"), name).items():
            if value and layer >= 0:
                sums.setdefault((layer, phase), [0] * len(position_of))[position_of[rank]] = value
        totals = self.run.layers.roll_up_by_phase(sums, lambda first, other: [*map(add, first, other)])
        return {
            (layer, PHASES[phase]): dict(zip(self.ranks, self.each_per_step(self.ranks, values)))
            for (layer, phase), values in sorted(totals.items())
            if any(values)
        }
