"""Ranks compared: the work and the waiting of each, the layers in which they differ, who is slow, who is late."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchprof.analyze.report import kept_with_run
from torchprof.ranks.compared import INFERRED, Compared, OneCollective, OneLayer, OneRank, OverRanks, Times
from torchprof.ranks.slow import Late, Slow, compares_waiting, late_ranks, slow_among_peers
from torchprof.run.lockstep import NOT_RECORDED, Lockstep, LockstepKey
from torchprof.run.run import Run
from torchprof.run.words import PHASES


@dataclass(frozen=True)
class Balance:
    """The comparison of the ranks of a run.

    - ``measured_on``: "device" or "cpu", whose time is compared; None for none.
    - ``ranks``, ``layers``, ``collectives``: the figures of each. ``slow``, ``late``: the stragglers, if there are any.
    - ``inferred``: the number of calls of collectives that recorded no group and are taken to be between all ranks.
    - ``detectable``: a rank whose own work takes longer by this share would have been found; None: there was no test.
    - ``peers``: the ranks that do the same work by design, together.
    - ``compares_waiting``: the waiting of all ranks was compared, to find ``late``.
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
    def first(self) -> Slow | Late | None:
        """The stragglers that are named first; None if none was found."""
        late, slow = self.late, self.slow
        if late is not None and (slow is None or late.exceeds_slow or (slow.may_be_chance and not late.may_be_chance)):
            return late
        return slow

    @property
    def flops(self) -> int | None:
        """The FLOPs of all ranks; None if a rank counted none."""
        counts = [rank.flops for rank in self.ranks if rank.flops is not None]
        return sum(counts) if len(counts) == len(self.ranks) else None


@kept_with_run
def balance_of(run: Run) -> Balance:
    """Compare the ranks of a run: ranks ascending, layers and collectives in the order of the run.

    Own work comes from ``Run.lockstep``. Without communication, equally fast ranks with equal work have equal times.
    """
    compared = Compared.of(run)
    collectives = tuple(_collective(compared, *item) for item in run.lockstep.items() if item[0].is_collective)
    ranks = tuple(_ranks(compared, collectives))
    slow, detectable = slow_among_peers(compared, ranks, collectives)
    late = late_ranks(compared, ranks, slow)
    inferred = (call for call in collectives if call.group is not None and call.group.description == INFERRED)
    return Balance(
        measured_on=compared.measured_on,
        ranks=ranks,
        layers=tuple(_layers(compared, collectives)),
        collectives=collectives,
        slow=slow,
        late=late,
        inferred=sum(collective.calls for collective in inferred),
        detectable=detectable,
        peers=compared.peers,
        compares_waiting=late is not None or compares_waiting(compared),
    )


def _collective(compared: Compared, key: LockstepKey, lockstep: Lockstep) -> OneCollective:
    """A collective. If rank 0 takes 12 ms in a call and rank 1 5 ms, rank 0 waits for 7 ms and rank 1 came last."""
    group, is_paired = key.group, lockstep.is_paired
    if group == NOT_RECORDED:
        group, is_paired = compared.all_ranks, compared.all_ranks is not None
    ranks = lockstep.ranks
    nothing = (0,) * len(ranks)
    size = compared.ranks_of_job if group is None or group.size is None else group.size
    is_complete = len(ranks) >= size
    once_a_step = all(count <= max(compared.steps[rank], 1) for rank, count in zip(ranks, lockstep.counts))
    collective = OneCollective(
        layer=key.layer,
        phase=key.phase,
        name=key.what,
        group=group,
        ranks=ranks,
        calls=sum(lockstep.counts),
        beside=compared.each_per_step(ranks, lockstep.beside_ns) if once_a_step else nothing,
        paired_calls=len(lockstep.last_rank),
    )
    if not is_paired or (len(ranks) == 1 and not is_complete):
        return collective
    waited = [lockstep.waiting_ns(rank) or 0 for rank in ranks]
    # Which of several calls in a step overlap is unknown. Only the part without overlap is certainly waiting.
    overlap = nothing if once_a_step else lockstep.beside_ns
    certain = [max(0, ns - beside) for ns, beside in zip(waited, overlap)]
    waiting = OverRanks(ranks, compared.each_per_step(ranks, certain))
    if not is_complete:  # a rank that is missing here may have come even later
        return replace(collective, waiting=waiting, lower_bound_on=ranks)
    times = Counter(lockstep.last_rank)
    return replace(
        collective,
        waiting=waiting,
        lower_bound_on=tuple(rank for rank, ns, least in zip(ranks, waited, certain) if ns > least),
        came_last=OverRanks(ranks, tuple(times[rank] for rank in ranks)),
    )


def _ranks(compared: Compared, collectives: Sequence[OneCollective]) -> Iterator[OneRank]:
    run, whole = compared.run, compared.step_work
    work, medians = dict(zip(whole.ranks, whole.ns)), compared.medians(whole)
    times_slowest = Counter(whole.last_rank)
    waits = _Waits()
    times_last: Counter[int] = Counter()
    paired_calls: Counter[int] = Counter()
    for collective in collectives:
        waits.add(collective)
        if collective.came_last is not None:
            times_last.update(dict(zip(collective.ranks, collective.came_last.values)))
            paired_calls.update(dict.fromkeys(collective.ranks, collective.paired_calls))
    flops, uncounted = (run.rows.summed("rank", name) for name in ("flops", "uncounted"))
    peaks = _peaks_of_ranks(run)
    for meta in compared.metas:
        rank = meta.rank
        yield OneRank(
            rank=rank,
            steps=meta.steps,
            work_ns=compared.per_step(rank, work[rank]) if rank in work else None,
            typical_ns=medians.get(rank),
            slowest_in=Times(times_slowest[rank], len(whole.last_rank)) if compared.are_paired else None,
            waiting_ns=waits.ns(rank),
            waiting_is_lower_bound=rank in waits.lower_bound_on,
            last_in=Times(times_last[rank], paired_calls[rank]) if rank in paired_calls else None,
            peaks=tuple(sorted(peaks[rank].items())),
            flops=flops.get(rank, 0) if "flops" in meta.measured else None,
            flops_is_lower_bound=uncounted.get(rank, 0) > 0,
        )


def _peaks_of_ranks(run: Run) -> Mapping[int, dict[str, int]]:
    """For each rank the peak of memory by kind of device; of several devices of a kind the largest."""
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    for memory in run.memory:
        kind = memory.device.partition(":")[0]
        peaks[memory.rank][kind] = max(peaks[memory.rank].get(kind, 0), memory.peak_bytes)
    return peaks


def _layers(compared: Compared, collectives: Iterable[OneCollective]) -> Iterator[OneLayer]:
    work = compared.work(compared.measured_on)
    has_flops = compared.have_measured("flops")
    flops, uncounted = (compared.rolled_up(name) if has_flops else {} for name in ("flops", "uncounted"))
    peaks = _peaks_of_layers(compared)
    waits = _waits_of_layers(compared, collectives)
    keys = {*work, *flops, *uncounted, *peaks, *waits}
    # In the order of layers; after them, what is of no layer.
    for layer, phase in sorted(keys, key=lambda key: (key[0] < 0, abs(key[0]), PHASES.index(key[1]))):
        if not compared.is_selected(layer):
            continue  # its own work belongs to no layer
        key = layer, phase
        means = slowest_in = None
        if key in work:
            times = work[key]
            ranks = times.ranks
            means = compared.over_those_with(layer, dict(zip(ranks, compared.each_per_step(ranks, times.ns))))
            if times.is_paired and times.last_rank and len(means.ranks) > 1:
                slowest_in = Times(times.last_rank.count(means.highest), len(times.last_rank))
        waits_here = waits.get(key, _Waits())
        yield OneLayer(
            layer=layer,
            phase=phase,
            work=means,
            slowest_in=slowest_in,
            flops=compared.over_those_with(layer, flops[key]) if key in flops else None,
            flops_is_lower_bound=key in uncounted,
            peak=peaks.get(key),
            has_collectives=key in waits,
            waiting=waits_here.over_ranks(),
            waiting_is_lower_bound=bool(waits_here.lower_bound_on),
        )


def _peaks_of_layers(compared: Compared) -> dict[tuple[int, str], OverRanks]:
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
    one collective. A rank that waits for 10 ms in one collective, and for 8 ms in another that overlaps it for 3 ms,
    waits for at least max(10 + (8 - 3), 10, 8) = 15 ms.
    """

    def __init__(self) -> None:
        self.lower_bound_on: set[int] = set()
        self._without_overlaps: Counter[int] = Counter()
        self._longest: Counter[int] = Counter()

    def add(self, collective: OneCollective) -> None:
        self.lower_bound_on.update(collective.ranks if collective.waiting is None else collective.lower_bound_on)
        if collective.waiting is not None:
            for rank, ns, beside in zip(collective.ranks, collective.waiting.values, collective.beside):
                self._without_overlaps[rank] += max(0, ns - beside)
                self._longest[rank] = max(self._longest[rank], ns)
                if ns and beside:
                    self.lower_bound_on.add(rank)

    def ns(self, rank: int) -> int | None:
        """At least how long a rank waited; None if that is unknown."""
        return max(self._without_overlaps[rank], self._longest[rank]) if rank in self._longest else None

    def over_ranks(self) -> OverRanks | None:
        ranks = tuple(sorted(self._longest))
        return OverRanks(ranks, tuple(self.ns(rank) or 0 for rank in ranks)) if ranks else None


def _waits_of_layers(compared: Compared, collectives: Iterable[OneCollective]) -> dict[tuple[int, str], _Waits]:
    """The waiting by layer (with all layers below it) and phase, where these called collectives."""
    waits: defaultdict[tuple[int, str], _Waits] = defaultdict(_Waits)
    for collective in collectives:
        for layer in compared.run.layers.lineage(collective.layer):
            waits[layer, collective.phase].add(collective)
    return dict(waits)
