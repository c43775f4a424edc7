"""Ranks compared: the work and the waiting of each, the layers in which they differ, who is slow, who is late."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torchprof.analyze.report import kept_with_run
from torchprof.ranks.compared import INFERRED, Compared, OneCollective, OneLayer, OneRank, OverRanks, Times
from torchprof.ranks.slow import Late, Slow, compares_waiting, late_ranks, slow_among_peers
from torchprof.run.lockstep import NOT_RECORDED
from torchprof.run.run import Run
from torchprof.run.words import PHASES


@dataclass(frozen=True)
class Balance:
    """The comparison of the ranks of a run. ``measured_on``: "device" or "cpu", whose time is compared; None for none.
    ``inferred``: the number of calls of collectives that recorded no group and are taken to be between all ranks.
    ``detectable``: a rank whose own work takes longer by this share would have been found; None: there was no test.
    ``peers``: the ranks that do the same work by design, together. ``compares_waiting``: the waiting of all ranks was
    compared, to find ``late``.
    """

    measured_on: str | None
    ranks: tuple[OneRank, ...]
    layers: tuple[OneLayer, ...] = field(repr=False)
    collectives: tuple[OneCollective, ...] = field(repr=False)
    slow: Slow | None = None
    late: Late | None = None
    inferred: int = 0
    detectable: float | None = None
    peers: list[tuple[int, ...]] = field(default_factory=list)
    compares_waiting: bool = True

    @property
    def flops(self) -> int | None:
        """The FLOPs of all ranks; None if a rank counted none."""
        counts = [rank.flops for rank in self.ranks if rank.flops is not None]
        return sum(counts) if len(counts) == len(self.ranks) else None


@kept_with_run
def balance_of(run: Run) -> Balance:
    """Compare the ranks of a run: ranks ascending, layers and collectives in the order of the run.

    Own work comes from ``Run.lockstep``. It excludes communication, so equally fast ranks with equal work have equal
    times.
    """
    compared = Compared.of(run)
    collectives = tuple(_collectives(compared))
    ranks = tuple(_ranks(compared, collectives))
    layers = tuple(_layers(compared, collectives))
    slow, detectable = slow_among_peers(compared, ranks, collectives)
    late = late_ranks(compared, ranks, slow)
    inferred = sum(of.calls for of in collectives if of.group is not None and of.group.description == INFERRED)
    knows_late = late is not None or compares_waiting(compared)
    return Balance(
        compared.measured_on, ranks, layers, collectives, slow, late, inferred, detectable, compared.peers, knows_late
    )


def _collectives(compared: Compared) -> Iterator[OneCollective]:
    for key, lockstep in compared.run.lockstep.items():
        if not key.is_collective:
            continue
        group, is_paired = key.group, lockstep.is_paired
        if group == NOT_RECORDED:
            group, is_paired = compared.all_ranks, compared.all_ranks is not None
        size = compared.ranks_of_job if group is None or group.size is None else group.size
        is_complete = len(lockstep.ranks) >= size
        once = all(count <= max(compared.steps[rank], 1) for rank, count in zip(lockstep.ranks, lockstep.counts))
        waiting = last = None
        longer: tuple[int, ...] = ()
        if is_paired and (is_complete or len(lockstep.ranks) > 1):
            waited = [lockstep.waiting_ns(rank) or 0 for rank in lockstep.ranks]
            # Which of several calls in a step overlap is unknown. Only the part without overlap is certainly waiting.
            overlapping = (0,) * len(lockstep.ranks) if once else lockstep.beside_ns
            waits = [max(0, ns - beside) for ns, beside in zip(waited, overlapping)]
            waiting = OverRanks(lockstep.ranks, tuple(map(compared.per_step, lockstep.ranks, waits)))
            longer = lockstep.ranks
            if is_complete:  # else a rank that is missing here may have come even later
                longer = tuple(rank for rank, ns, certain in zip(lockstep.ranks, waited, waits) if ns > certain)
                times = Counter(lockstep.last_rank)
                last = OverRanks(lockstep.ranks, tuple(times[rank] for rank in lockstep.ranks))
        yield OneCollective(
            key.layer,
            key.phase,
            key.what,
            group,
            lockstep.ranks,
            sum(lockstep.counts),
            waiting,
            longer,
            tuple(map(compared.per_step, lockstep.ranks, lockstep.beside_ns)) if once else (0,) * len(lockstep.ranks),
            last,
            len(lockstep.last_rank),
        )


def _ranks(compared: Compared, collectives: Sequence[OneCollective]) -> Iterator[OneRank]:
    run, whole = compared.run, compared.step_work
    work, medians = dict(zip(whole.ranks, whole.ns)), compared.medians(whole)
    slowest = Counter(whole.last_rank)
    waits = _Waits()
    last: Counter[int] = Counter()
    of: Counter[int] = Counter()
    for collective in collectives:
        waits.add(collective)
        if collective.times_last is not None:
            for rank, times in zip(collective.ranks, collective.times_last.values):
                last[rank] += times
                of[rank] += collective.paired_calls
    flops, uncounted = (run.rows.summed("rank", name) for name in ("flops", "uncounted"))
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for memory in run.memory:
        kind = memory.device.partition(":")[0]
        peaks[memory.rank][kind] = max(peaks[memory.rank].get(kind, 0), memory.peak_bytes)
    for meta in compared.metas:
        rank = meta.rank
        yield OneRank(
            rank,
            meta.steps,
            compared.per_step(rank, work[rank]) if rank in work else None,
            medians.get(rank),
            Times(slowest[rank], len(whole.last_rank)) if compared.are_paired else None,
            waits.ns(rank),
            rank in waits.waits_longer_on,
            Times(last[rank], of[rank]) if rank in of else None,
            tuple(sorted(peaks[rank].items())),
            flops.get(rank, 0) if "flops" in meta.measured else None,
            uncounted.get(rank, 0) > 0,
        )


def _layers(compared: Compared, collectives: Iterable[OneCollective]) -> Iterator[OneLayer]:
    work = compared.work(compared.measured_on)
    has_flops = compared.have_measured("flops")
    flops, uncounted = (compared.rolled_up(name) if has_flops else {} for name in ("flops", "uncounted"))
    peaks = _peaks(compared)
    waits = _waits(compared, collectives)
    keys = {*work, *flops, *uncounted, *peaks, *waits}
    for layer, phase in sorted(keys, key=lambda key: (key[0] < 0, abs(key[0]), PHASES.index(key[1]))):
        if not compared.is_selected(layer):
            continue  # its own work belongs to no layer
        key = layer, phase
        took = slowest = None
        if key in work:
            times = work[key]
            means = dict(zip(times.ranks, map(compared.per_step, times.ranks, times.ns)))
            took = compared.over_those_with(layer, means)
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
            bool(waits_here.waits_longer_on),
        )


def _peaks(compared: Compared) -> dict[tuple[int, str], OverRanks]:
    """The peak of memory above the start of a call, by layer and phase: of the device if all ranks measured one, else
    of the CPU; the largest of several devices."""
    on_device = compared.have_measured("device_allocated")
    if not on_device and not compared.have_measured("cpu_allocated"):
        return {}
    peaks_by_rank: defaultdict[tuple[int, str], dict[int, int]] = defaultdict(dict)
    for key, spread in compared.run.samples.items():
        if key.measure == "peak_bytes" and key.layer >= 0 and (key.device != "cpu") == on_device:
            peaks = peaks_by_rank[key.layer, key.phase]
            peaks[key.rank] = max(peaks.get(key.rank, 0), spread.max)
    return {(layer, phase): compared.over_those_with(layer, peaks) for (layer, phase), peaks in peaks_by_rank.items()}


class _Waits:
    """The waiting of each rank in some collectives, and the ranks for which it is a lower bound.

    A rank that waits in several collectives at once waits once. While two of them overlap it may wait in both or in
    neither. So its waiting is at least the sum of the waiting outside such overlaps, and at least the waiting in any
    one collective.
    """

    def __init__(self) -> None:
        self.waits_longer_on: set[int] = set()
        self._alone: Counter[int] = Counter()
        self._in_one: Counter[int] = Counter()

    def add(self, collective: OneCollective) -> None:
        self.waits_longer_on.update(collective.ranks if collective.waiting is None else collective.waits_longer_on)
        if collective.waiting is not None:
            for rank, ns, beside in zip(collective.ranks, collective.waiting.values, collective.beside):
                self._alone[rank] += max(0, ns - beside)
                self._in_one[rank] = max(self._in_one[rank], ns)
                if ns and beside:
                    self.waits_longer_on.add(rank)

    def ns(self, rank: int) -> int | None:
        return max(self._alone[rank], self._in_one[rank]) if rank in self._alone else None

    def over_ranks(self) -> OverRanks | None:
        ranks = tuple(sorted(self._alone))
        return OverRanks(ranks, tuple(self.ns(rank) or 0 for rank in ranks)) if ranks else None


def _waits(compared: Compared, collectives: Iterable[OneCollective]) -> dict[tuple[int, str], _Waits]:
    """The waiting by layer, with all layers below it, and phase; only for those with collectives."""
    waits: defaultdict[tuple[int, str], _Waits] = defaultdict(_Waits)
    for collective in collectives:
        for layer in compared.run.layers.lineage(collective.layer):
            waits[layer, collective.phase].add(collective)
    return dict(waits)
