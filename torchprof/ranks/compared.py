"""What is compared between ranks: figures of each rank, layer and collective; ``Compared`` takes them from a run."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import add, attrgetter
from statistics import median, median_low
from typing import Any, NamedTuple

from torchprof.ranks.pipeline import stages_of
from torchprof.run.lockstep import GAP, NO_LAST_RANK, NOT_RECORDED, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey
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
    """The figures of one rank. Times are per step, the mean over the ``steps``; None: unknown.

    - ``work_ns``: its own work, in layers or not. ``typical_ns``: the median of that over the steps.
    - ``slowest``: in how many steps all others were faster, None if the steps of ranks cannot be paired.
    - ``waiting_ns``: its waiting in collectives for the last rank; a lower bound if ``waits_longer``, because not every
      collective can be measured. ``last``: how often it was that last rank.
    - ``peaks``: (kind of device, peak bytes above the start), the largest if there are several devices of a kind.
    - ``flops``: of the whole recording, a lower bound if ``has_more_flops``.
    """

    rank: int
    steps: int
    work_ns: int | None = None
    typical_ns: int | None = None
    slowest: Times | None = None
    waiting_ns: int | None = None
    waits_longer: bool = False
    last: Times | None = None
    peaks: tuple[tuple[str, int], ...] = ()
    flops: int | None = None
    has_more_flops: bool = False


@dataclass(frozen=True)
class OneLayer:
    """A layer (by its index, negative for none) with all layers below it in one phase, over the ranks that have it.

    All figures are per step.

    - ``work``: own work in ns, the mean over the steps. ``slowest``: how often the rank with the most work was the
      slowest.
    - ``flops``: a lower bound if ``has_more_flops``. ``peak``: peak bytes above the start of a call.
    - ``waiting``: ns in the ``collectives`` of the layer and of those below, for the ranks that took part; None if
      unknown or without collectives; a lower bound if ``waits_longer``.
    """

    layer: int
    phase: str
    work: OverRanks | None = None
    slowest: Times | None = None
    flops: OverRanks | None = None
    has_more_flops: bool = False
    peak: OverRanks | None = None
    collectives: bool = False
    waiting: OverRanks | None = None
    waits_longer: bool = False


@dataclass(frozen=True)
class OneCollective:
    """A collective that a layer called, between the ranks of one group.

    - ``ranks``: those that recorded it. ``calls``: of all ranks.
    - ``waiting``: ns per step of each rank; None if the calls of different ranks cannot be paired. It is a lower bound
      for the ranks in ``waits_longer_on``: for all ranks if ranks of the group are missing, else for those on which
      several of these collectives overlapped.
    - ``beside``: for how long per step another collective may have overlapped, which is not part of ``waiting``.
    - ``times_last``: how often each rank came last, in ``paired_calls``; if several came last together, none counts.
    """

    layer: int
    phase: str
    name: str
    group: GroupOfRanks | None
    ranks: tuple[int, ...]
    calls: int
    waiting: OverRanks | None = None
    waits_longer_on: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    times_last: OverRanks | None = None
    paired_calls: int = 0

    @property
    def waits_longer(self) -> bool:
        return bool(self.waits_longer_on)


class Compared:
    """Ranks of a run that are compared with each other.

    ``measured_on``: where the time that counts was measured, "cpu" or "device"; None for nowhere. ``step_work``: the
    own work of the ranks in whole steps, on that. ``ranks_of_job``: how many ranks the job has, also those that are
    missing.
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
        return cls(run, ranks, None, Lockstep((), (), (), (), (), ()))

    def among(self, ranks: Collection[int]) -> Compared:
        """The same, of some of the ranks: they are compared with each other alone."""
        if len(ranks) == len(self.ranks):
            return self
        return Compared(self.run, ranks, self.measured_on, _of_some(self.step_work, ranks))

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
        together: defaultdict[object, list[int]] = defaultdict(list)
        for rank in self.ranks:
            together[kinds.get(rank), self.stages.get(rank)].append(rank)
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
        if len(times.ranks) == 1 and times.last_ns:
            return {times.ranks[0]: median_low(times.last_ns)}
        return dict(zip(times.ranks, times.medians))

    def typical(self, times: Lockstep) -> dict[int, int]:
        """The median over the steps, by rank; the mean if the median is unknown."""
        return self.medians(times) or dict(zip(times.ranks, map(self.per_step, times.ranks, times.ns)))

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
        place = {rank: position for position, rank in enumerate(self.ranks)}
        sums: dict[tuple[int, int], list[int]] = {}
        for (layer, phase, rank), value in self.run.rows.summed(("layer", "phase", "rank"), name).items():
            if value and layer >= 0:
                sums.setdefault((layer, phase), [0] * len(place))[place[rank]] = value
        totals = self.run.layers.roll_up_by_phase(sums, lambda first, other: [*map(add, first, other)])
        return {
            (layer, PHASES[phase]): dict(zip(self.ranks, map(self.per_step, self.ranks, values)))
            for (layer, phase), values in sorted(totals.items())
            if any(values)
        }


def _of_some(times: Lockstep, ranks: Collection[int]) -> Lockstep:
    """The times of some ranks. Without the single times of each rank, those of the last rank are unknown."""
    chosen = set(ranks)
    places = [index for index, rank in enumerate(times.ranks) if rank in chosen]

    def some(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[place] for place in places) if values else ()

    of_some, values = some(times.ranks), some(times.values)
    steps = [*zip(*values)]
    last_ns = tuple(map(max, steps))
    last_rank = tuple(
        of_some[step.index(ns)] if step.count(ns) == 1 else NO_LAST_RANK for step, ns in zip(steps, last_ns)
    )
    of_each = (some(times.counts), some(times.ns), some(times.beside_ns))
    kept = times.times if steps else ()
    return Lockstep(of_some, *of_each, last_ns, last_rank, kept, medians=some(times.medians), values=values)
