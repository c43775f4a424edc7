"""How evenly ranks share the work of a job: what each did, in which layers they differ, and who waits for whom."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import add, attrgetter
from statistics import median, median_low
from typing import NamedTuple

from torchprof.attribute import FORWARD, OUTSIDE, PHASES
from torchprof.run import GAP, STEP, WORK, GroupOfRanks, Lockstep, LockstepKey, Run

SLOWER_BY = 0.1
"""By which part of the median rank's own work a rank has to exceed it to be called slow."""


class Times(NamedTuple):
    """How often something was so: in so many ``times`` ``of`` all."""

    times: int
    of: int


@dataclass(frozen=True)
class OverRanks:
    """A figure of several ranks: a value for each of ``ranks``, which ascend."""

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
        """The rank with the largest value, the lowest of equal ones."""
        return self.ranks[self.values.index(self.max)]

    @property
    def above_mean(self) -> float:
        """By how much the largest value exceeds the mean: what all would save where nobody goes on before the last."""
        return self.max - self.sum / len(self.values)

    @property
    def imbalance(self) -> float | None:
        """The largest value over the mean, 1 where all have the same; None of one rank alone, and where all have none.

        That is the load imbalance of a bulk-synchronous program (Valiant, CACM 33(8), 1990): a step lasts as long as
        its slowest rank, so it lasts so many times as long as with the same work shared out evenly.
        """
        return self.max * len(self.values) / self.sum if len(self.values) > 1 and self.sum > 0 else None


@dataclass(frozen=True)
class OneRank:
    """What one rank did. ``work_ns`` and ``waiting_ns`` are of one step, the mean over the ``steps``; None: not known.

    ``work_ns``: its own work, in layers or not. ``slowest``: in how many steps no other rank took longer, None where
    the steps of ranks cannot be paired. ``waiting_ns``: how long it waited in collectives for the last to come, at
    least so long where ``waits_longer``, since not all of them can be told; ``last``: how often it was that last one.
    ``peaks``: (kind of device, bytes) by which memory rose, of several devices of a kind the most. ``flops`` are those
    of all that was recorded, a lower bound where ``has_more_flops``.
    """

    rank: int
    steps: int
    work_ns: int | None = None
    slowest: Times | None = None
    waiting_ns: int | None = None
    waits_longer: bool = False
    last: Times | None = None
    peaks: tuple[tuple[str, int], ...] = ()
    flops: int | None = None
    has_more_flops: bool = False


IN_NO_OP = -3
"""Where a layer's index stands: what a rank did in no operator and no range, as waiting for data."""


@dataclass(frozen=True)
class OneLayer:
    """A layer (by its index, negative for none) with all below it in one phase, over the ranks that have it.

    All is of one step. ``work``: own work in ns; ``slowest``: how often the rank with the most of it was the last;
    ``flops``, and whether there are ``more_flops`` that nobody counted; ``peak``: how far memory rose in a call, in
    bytes. ``waiting``: ns in the collectives of the layer and those below, of the ranks that were in them; None where
    it is not known, or where there are no ``collectives``; at least so long where they ``wait_longer``.
    """

    layer: int
    phase: str
    work: OverRanks | None = None
    slowest: Times | None = None
    flops: OverRanks | None = None
    more_flops: bool = False
    peak: OverRanks | None = None
    collectives: bool = False
    waiting: OverRanks | None = None
    wait_longer: bool = False


@dataclass(frozen=True)
class OneCollective:
    """A collective that a layer asked for, between the ranks of one group. ``ranks`` are those that recorded it.

    ``calls`` are those of all ranks. ``waiting``: ns in one step, of each rank; None where it is not known which call
    of one rank belongs to which of another. The ranks in ``longer`` wait at least so long: all where others of the
    group are missing, and those on which several such are under way at once. ``beside``: for how long in a step another
    collective may have been under way, too, of which this waiting does not know. ``last``: how often each rank was the
    last to come, each of the times one of them.
    """

    layer: int
    phase: str
    name: str
    group: GroupOfRanks | None
    ranks: tuple[int, ...]
    calls: int
    waiting: OverRanks | None = None
    longer: tuple[int, ...] = ()
    beside: tuple[int, ...] = ()
    last: OverRanks | None = None

    @property
    def wait_longer(self) -> bool:
        return bool(self.longer)


@dataclass(frozen=True)
class Slow:
    """The ranks that are slow, the slowest first: how long their own work takes in a step, and that of the median of
    the others. ``slowest``: in how many steps one of them was the slowest, ``last``: in how many collectives one of
    them was the last to come. ``others_wait_ns``: how long each other rank waits in a step, the median; at least so
    long where they ``wait_longer``.

    ``layer`` (by its index, negative for none): the innermost layer in which at least half of what the slowest rank
    takes longer is, by ``excess_ns``; None where there is no such. ``phase``: the one with at least half of the whole,
    None where it is in several. ``flops``: how many times those of the other ranks' median the slowest rank has.
    """

    ranks: tuple[int, ...]
    work_ns: tuple[int, ...]
    others_ns: float
    slowest: Times | None = None
    last: Times | None = None
    others_wait_ns: float | None = None
    wait_longer: bool = False
    layer: int | None = None
    phase: str | None = None
    excess_ns: float = 0
    flops: float | None = None


@dataclass(frozen=True)
class Balance:
    """How a run's ranks share the work. ``time``: whose own work is compared, "device" or "cpu"; None for none."""

    time: str | None
    ranks: tuple[OneRank, ...]
    layers: tuple[OneLayer, ...] = field(repr=False)
    collectives: tuple[OneCollective, ...] = field(repr=False)
    slow: Slow | None = None

    @property
    def flops(self) -> int | None:
        """Those of all ranks together; None where one of them counted none."""
        counts = [one.flops for one in self.ranks if one.flops is not None]
        return sum(counts) if len(counts) == len(self.ranks) else None


def balance_of(run: Run) -> Balance:
    """Compare the ranks of a run: ranks ascending, layers in their order, collectives in that of the run.

    Own work is what ``Run.lockstep`` says, of the device where every rank measured one and anything ran there. It takes
    the same time on ranks that do the same and are equally fast: communication is no part of it.
    """
    compared = _Compared(run)
    collectives = tuple(_collectives(compared))
    ranks = tuple(_ranks(compared, collectives))
    layers = tuple(_layers(compared, collectives))
    return Balance(compared.time, ranks, layers, collectives, _slow(compared, ranks, layers, collectives))


class _Compared:
    """A run whose ranks are compared: whose time, how many steps each took, and what it did in all of them."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.metas = sorted(run.metas, key=attrgetter("rank"))
        self.ranks = tuple(meta.rank for meta in self.metas)
        self.time: str | None = None
        self.whole = Lockstep((), (), (), (), (), ())
        for device, name in (("cpu", "cpu_ns"), ("device", "device_ns")):
            whole = run.lockstep.get(LockstepKey(OUTSIDE, FORWARD, device, STEP))
            if whole is not None and any(whole.ns) and self.have_measured(name):
                self.time, self.whole = device, whole
        self.steps = {meta.rank: meta.steps or meta.cycles for meta in self.metas}
        self.steps |= dict(zip(self.whole.ranks, self.whole.counts))
        number = {layer.path: index for index, layer in enumerate(run.layers)}
        self.above = [number.get(layer.path[:-1], OUTSIDE) for layer in run.layers]

    def have_measured(self, name: str) -> bool:
        """Whether all ranks measured a field of ``Cost``."""
        return all(name in meta.measured for meta in self.metas)

    def a_step(self, rank: int, value: int) -> int:
        """What is so much in all, in one step."""
        return round(value / max(self.steps[rank], 1))

    def over_those_with(self, layer: int, values: Mapping[int, int]) -> OverRanks:
        """Values by rank, of those that have the layer: 0 of one that did nothing in it."""
        ranks = (self.run.layers[layer].ranks if layer >= 0 else ()) or self.ranks
        return OverRanks(ranks, tuple(values.get(rank, 0) for rank in ranks))

    def rolled_up(self, name: str) -> dict[tuple[int, str], dict[int, int]]:
        """A column of the rows in one step, of each layer with all below it, in each phase, by rank; only of layers and
        phases that have any."""
        columns = self.run.rows.columns
        if not any(columns[name]):
            return {}
        place = {rank: at for at, rank in enumerate(self.ranks)}
        width = len(PHASES) * len(place)
        sums = [0] * (len(self.run.layers) * width)  # one pass over the rows, which may be millions
        for layer, phase, rank, value in zip(columns["layer"], columns["phase"], columns["rank"], columns[name]):
            if value and layer >= 0:
                sums[layer * width + phase * len(place) + place[rank]] += value
        for layer in range(len(self.above) - 1, -1, -1):  # those below come after those above
            above = self.above[layer]
            if above >= 0:
                own = sums[layer * width : (layer + 1) * width]
                sums[above * width : (above + 1) * width] = map(add, sums[above * width : (above + 1) * width], own)
        found = {}
        for number in range(len(self.above) * len(PHASES)):
            values = sums[number * len(place) : (number + 1) * len(place)]
            if any(values):
                layer, phase = divmod(number, len(PHASES))
                found[layer, PHASES[phase]] = dict(zip(self.ranks, map(self.a_step, self.ranks, values)))
        return found


def _collectives(compared: _Compared) -> Iterator[OneCollective]:
    of_job = max(len(compared.ranks), *(meta.world_size for meta in compared.metas))
    for key, lockstep in compared.run.lockstep.items():
        if not key.is_collective:
            continue
        size = of_job if key.group is None or key.group.size is None else key.group.size
        is_complete = len(lockstep.ranks) >= size
        once = all(count <= max(compared.steps[rank], 1) for rank, count in zip(lockstep.ranks, lockstep.counts))
        waiting = last = None
        longer: tuple[int, ...] = ()
        if lockstep.is_paired and (is_complete or len(lockstep.ranks) > 1):
            least = sum(lockstep.last_ns)
            # Of several in a step nobody knows which are beside each other: at least what is beside none is waiting.
            doubtful = (0,) * len(lockstep.ranks) if once else lockstep.beside_ns
            waits = [max(0, ns - least - beside) for ns, beside in zip(lockstep.ns, doubtful)]
            waiting = OverRanks(lockstep.ranks, tuple(map(compared.a_step, lockstep.ranks, waits)))
            longer = lockstep.ranks
            if is_complete:
                longer = tuple(rank for rank, ns, sure in zip(lockstep.ranks, lockstep.ns, waits) if ns - least > sure)
            if is_complete:  # else another may come even later
                times = Counter(lockstep.last_rank)
                last = OverRanks(lockstep.ranks, tuple(times[rank] for rank in lockstep.ranks))
        yield OneCollective(
            key.layer,
            key.phase,
            key.what,
            key.group,
            lockstep.ranks,
            sum(lockstep.counts),
            waiting,
            longer,
            tuple(map(compared.a_step, lockstep.ranks, lockstep.beside_ns)) if once else (0,) * len(lockstep.ranks),
            last,
        )


def _ranks(compared: _Compared, collectives: Sequence[OneCollective]) -> Iterator[OneRank]:
    run, whole = compared.run, compared.whole
    work = dict(zip(whole.ranks, whole.ns))
    slowest = Counter(whole.last_rank)
    are_paired = whole.is_paired and whole.ranks == compared.ranks
    waits = _Waits()
    last: Counter[int] = Counter()
    of: Counter[int] = Counter()
    for one in collectives:
        waits.add(one)
        if one.last is not None:
            for rank, times in zip(one.ranks, one.last.values):
                last[rank] += times
                of[rank] += one.last.sum
    flops, uncounted = (_by_rank(run, name) for name in ("flops", "uncounted"))
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for memory in run.memory:
        kind = memory.device.partition(":")[0]
        peaks[memory.rank][kind] = max(peaks[memory.rank].get(kind, 0), memory.peak_bytes)
    for meta in compared.metas:
        rank = meta.rank
        yield OneRank(
            rank,
            meta.steps,
            compared.a_step(rank, work[rank]) if rank in work else None,
            Times(slowest[rank], len(whole.last_rank)) if are_paired else None,
            waits.ns(rank),
            rank in waits.are_longer,
            Times(last[rank], of[rank]) if rank in of else None,
            tuple(sorted(peaks[rank].items())),
            flops[rank] if "flops" in meta.measured else None,
            uncounted[rank] > 0,
        )


def _by_rank(run: Run, name: str) -> Counter[int]:
    """The sums of a column of the rows."""
    sums: Counter[int] = Counter()
    columns = run.rows.columns
    if any(columns[name]):
        for rank, value in zip(columns["rank"], columns[name]):
            if value:
                sums[rank] += value
    return sums


def _layers(compared: _Compared, collectives: Iterable[OneCollective]) -> Iterator[OneLayer]:
    run = compared.run
    work = {
        (key.layer, key.phase): lockstep
        for key, lockstep in run.lockstep.items()
        if key.what == WORK and key.device == compared.time
    }
    gap = run.lockstep.get(LockstepKey(OUTSIDE, FORWARD, compared.time or "", GAP))
    if gap is not None:
        work[IN_NO_OP, FORWARD] = gap
    has_flops = compared.have_measured("flops")
    flops, uncounted = (compared.rolled_up(name) if has_flops else {} for name in ("flops", "uncounted"))
    peaks = _peaks(compared)
    waits = _waits(compared, collectives)
    selected = None if run.meta.paths is None else set(run.meta.paths)
    keys = {*work, *flops, *uncounted, *peaks, *waits}
    for layer, phase in sorted(keys, key=lambda key: (key[0] < 0, abs(key[0]), PHASES.index(key[1]))):
        if layer >= 0 and selected is not None and run.layers[layer].path not in selected:
            continue  # what it did itself is of no layer
        key = layer, phase
        took = slowest = None
        if key in work:
            times = work[key]
            took = compared.over_those_with(layer, dict(zip(times.ranks, map(compared.a_step, times.ranks, times.ns))))
            if times.is_paired and times.last_rank and len(took.ranks) > 1:
                slowest = Times(times.last_rank.count(took.highest), len(times.last_rank))
        waits_here = waits.get(key, _Waits())
        yield OneLayer(
            layer,
            phase,
            took,
            slowest,
            compared.over_those_with(layer, flops[key]) if key in flops else None,
            key in uncounted,
            peaks.get(key),
            key in waits,
            waits_here.over_ranks(),
            bool(waits_here.are_longer),
        )


def _peaks(compared: _Compared) -> dict[tuple[int, str], OverRanks]:
    """How far memory rose in a call of a layer: of the device where all ranks measured one, of several the most."""
    on_device = compared.have_measured("device_allocated")
    if not on_device and not compared.have_measured("cpu_allocated"):
        return {}
    found: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    for key, spread in compared.run.samples.items():
        if key.measure == "peak_bytes" and key.layer >= 0 and (key.device != "cpu") == on_device:
            peaks = found[key.layer, key.phase]
            peaks[key.rank] = max(peaks.get(key.rank, 0), spread.max)
    return {(layer, phase): compared.over_those_with(layer, peaks) for (layer, phase), peaks in found.items()}


class _Waits:
    """What is known of the waiting in some collectives: of each rank, and of which ranks it is not all.

    A rank that waits in several at once waits once. While it exchanges one thing beside another it may wait in both or
    in none: so its waiting is at least what it waits in each of them beyond the time beside others, and at least what
    it waits in any one.
    """

    def __init__(self) -> None:
        self.are_longer: set[int] = set()
        self._alone: Counter[int] = Counter()
        self._in_one: Counter[int] = Counter()

    def add(self, one: OneCollective) -> None:
        self.are_longer.update(one.ranks if one.waiting is None else one.longer)
        if one.waiting is not None:
            for rank, ns, beside in zip(one.ranks, one.waiting.values, one.beside):
                self._alone[rank] += max(0, ns - beside)
                self._in_one[rank] = max(self._in_one[rank], ns)
                if ns and beside:
                    self.are_longer.add(rank)

    def ns(self, rank: int) -> int | None:
        return max(self._alone[rank], self._in_one[rank]) if rank in self._alone else None

    def over_ranks(self) -> OverRanks | None:
        ranks = tuple(sorted(self._alone))
        return OverRanks(ranks, tuple(self.ns(rank) or 0 for rank in ranks)) if ranks else None


def _waits(compared: _Compared, collectives: Iterable[OneCollective]) -> dict[tuple[int, str], _Waits]:
    """Of each layer with all below it, and each phase, that waits in any collective."""
    found: defaultdict[tuple[int, str], _Waits] = defaultdict(_Waits)
    for one in collectives:
        layer = one.layer
        while True:
            found[layer, one.phase].add(one)
            if layer < 0 or compared.above[layer] < 0:
                break
            layer = compared.above[layer]
    return dict(found)


def _slow(
    compared: _Compared,
    ranks: Sequence[OneRank],
    layers: Iterable[OneLayer],
    collectives: Iterable[OneCollective],
) -> Slow | None:
    """The ranks whose own work takes ``SLOWER_BY`` longer than the median rank's (of two in the middle, the faster
    one's), if in more than half of the steps one of them was the slowest, or steps cannot be paired."""
    work = {one.rank: one.work_ns for one in ranks if one.work_ns is not None}
    if len(work) < max(2, len(ranks)):
        return None
    least = max((1 + SLOWER_BY) * median_low(work.values()), 1)
    slow = sorted((rank for rank, ns in work.items() if ns >= least), key=lambda rank: (-work[rank], rank))
    whole = compared.whole
    slowest = None
    if whole.is_paired:
        times = Counter(whole.last_rank)
        slowest = Times(sum(times[rank] for rank in slow), len(whole.last_rank))
    if not slow or (slowest is not None and 2 * slowest.times <= slowest.of):
        return None
    others = [one for one in ranks if one.rank not in slow]
    waits = [one.waiting_ns for one in others if one.waiting_ns is not None]
    of_others = median(work[one.rank] for one in others)
    layer, phase, excess = _where(compared, layers, slow, (work[slow[0]] - of_others) / 2)
    last = [one.last for one in collectives if one.last is not None and not set(slow).isdisjoint(one.ranks)]
    came_last = sum(times for one in last for rank, times in zip(one.ranks, one.values) if rank in slow)
    return Slow(
        tuple(slow),
        tuple(work[rank] for rank in slow),
        of_others,
        slowest,
        Times(came_last, sum(one.sum for one in last)) if last else None,
        median(waits) if len(waits) == len(others) else None,
        any(one.waits_longer for one in others),
        layer,
        phase,
        excess,
        _times_the_flops(compared, ranks, slow),
    )


def _where(
    compared: _Compared, layers: Iterable[OneLayer], slow: Sequence[int], least: float
) -> tuple[int | None, str | None, float]:
    """The innermost layer, and the phase of it, in which the first of the slow ranks takes at least so much longer than
    the median of the others in a step; and how much that is. A rank that does not have a layer takes 0 there."""
    others = [rank for rank in compared.ranks if rank not in slow]
    by_rank: defaultdict[int, Counter[int]] = defaultdict(Counter)
    by_phase: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for one in layers:
        if one.work is not None:
            took = dict(zip(one.work.ranks, one.work.values))
            by_rank[one.layer].update(took)
            by_phase[one.layer][one.phase] = took.get(slow[0], 0) - median(took.get(rank, 0) for rank in others)
    excess = {layer: took[slow[0]] - median(took[rank] for rank in others) for layer, took in by_rank.items()}
    at: int | None = None
    below = [layer for layer in excess if layer < 0 or compared.above[layer] < 0]
    while below and excess[largest := max(below, key=excess.__getitem__)] >= least:
        at = largest
        below = [layer for layer in excess if layer >= 0 and compared.above[layer] == at]
    if at is None:
        return None, None, 0
    phase, most = max(by_phase[at].items(), key=lambda one: one[1])
    return (at, phase, most) if most >= least else (at, None, excess[at])


def _times_the_flops(compared: _Compared, ranks: Iterable[OneRank], slow: Sequence[int]) -> float | None:
    """How many times the FLOPs of the other ranks' median the first of the slow ranks has in a step; None where that is
    not known."""
    flops = {
        one.rank: one.flops / max(compared.steps[one.rank], 1)
        for one in ranks
        if one.flops is not None and not one.has_more_flops
    }
    if len(flops) < len(compared.ranks):
        return None
    of_others = median(count for rank, count in flops.items() if rank not in slow)
    return flops[slow[0]] / of_others if of_others else None
