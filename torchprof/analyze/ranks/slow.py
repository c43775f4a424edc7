"""Which ranks of a job are slow or late, and in what. Knows only the standard library."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from torchprof.analyze.ranks.significance import SLOWER_BY, stragglers
from torchprof.analyze.ranks.values import Compared, OneCollective, OneLayer, OneRank, OverRanks, Times
from torchprof.run.lockstep import EXCHANGES, NO_LAST_RANK, NOT_RECORDED
from torchprof.run.words import OUTSIDE


@dataclass(frozen=True)
class Difference:
    """In what a slow rank takes longer than the others: most of it, by ``excess_ns`` in a step.

    ``layer`` (by its index, negative for none): the innermost layer in which at least half of it is; ``phase``: the one
    with at least half of the whole, None where it is in several. ``part``: outside all layers what of a step it is, one
    of ``PARTS``; None where it is in several. ``device``: which time it is, "cpu" or "device".
    """

    device: str
    layer: int
    phase: str | None
    excess_ns: float
    part: str | None = None


PARTS = ("step_data_ns", "step_optimizer_ns", "step_copy_ns", "step_wait_ns", "step_gc_ns")
"""The parts of a step outside all layers that have names; see ``SampleKey``."""


@dataclass(frozen=True)
class Slow:
    """The ranks whose own work takes longer, the slowest first: how long in a step, the median over the steps, and that
    of the median of the others. ``slowest``: in how many steps one of them was the slowest, ``last``: in how many
    collectives one of them was the last to come. ``others_wait_ns``: how long each other rank waits in a step, the
    median; at least so long where they ``wait_longer``. ``may_be_chance``: the steps are too few, or do not belong
    together, so that it cannot be told from chance.

    ``difference``: in what the slowest of them takes longer, None where nothing is most of it. ``flops``: how many
    times those of the other ranks' median the slowest rank has.
    """

    ranks: tuple[int, ...]
    work_ns: tuple[int, ...]
    others_ns: float
    slowest: Times | None = None
    last: Times | None = None
    others_wait_ns: float | None = None
    wait_longer: bool = False
    may_be_chance: bool = False
    difference: Difference | None = None
    flops: float | None = None


@dataclass(frozen=True)
class Late:
    """The ranks that others wait for, the latest first: by how much less than the median of the others each waits in
    collectives in a step, the median over the steps, which is ``share`` of a step of the latest. ``may_be_chance`` and
    ``difference`` are as in ``Slow``. ``exceeds_slow``: there are slow ranks, too, and the latest is late by more than
    their own work exceeds that of the others, and by more than these are late."""

    ranks: tuple[int, ...]
    late_ns: tuple[int, ...]
    share: float
    may_be_chance: bool = False
    difference: Difference | None = None
    exceeds_slow: bool = False


def slow_ranks(
    compared: Compared,
    ranks: Sequence[OneRank],
    layers: Iterable[OneLayer],
    collectives: Iterable[OneCollective],
) -> Slow | None:
    """The ranks whose own work takes longer than that of the others, as ``stragglers`` says. Where the steps are too
    few for that, or do not belong together: those whose work takes ``SLOWER_BY`` longer than the median rank's, if in
    more than half of the steps one of them was the slowest."""
    whole = compared.whole
    work = compared.typical(whole)
    if len(work) < max(2, len(ranks)):
        return None
    found = stragglers(whole.values) if compared.are_paired and whole.values else None
    if found is None:
        last = whole.last_rank if compared.are_paired else None
        named = _seem_slow(work, max(SLOWER_BY * median_low(work.values()), 1), last)
    else:
        named = [whole.ranks[at] for at in found]
    if not named:
        return None
    slow = sorted(named, key=lambda rank: (-work[rank], rank))
    slowest = None
    if whole.is_paired:
        times = Counter(whole.last_rank)
        slowest = Times(sum(times[rank] for rank in slow), len(whole.last_rank))
    others = [one for one in ranks if one.rank not in slow]
    waits = [one.waiting_ns for one in others if one.waiting_ns is not None]
    of_others = median(work[one.rank] for one in others)
    lasts = [(one.last, one.of) for one in collectives if one.last is not None and not set(slow).isdisjoint(one.ranks)]
    came_last = sum(times for one, _ in lasts for rank, times in zip(one.ranks, one.values) if rank in slow)
    device = compared.time or "cpu"
    excess = {(one.layer, one.phase): one.typical for one in layers if one.typical is not None}
    return Slow(
        tuple(slow),
        tuple(work[rank] for rank in slow),
        of_others,
        slowest,
        Times(came_last, sum(calls for _, calls in lasts)) if lasts else None,
        median(waits) if len(waits) == len(others) else None,
        any(one.waits_longer for one in others),
        found is None,
        _difference(compared, device, excess, slow, (work[slow[0]] - of_others) / 2),
        _times_the_flops(compared, ranks, slow),
    )


def _seem_slow(values: Mapping[int, float], more: float, last: Sequence[int] | None) -> list[int]:
    """The ranks that have so much ``more`` than the median rank (of two in the middle, the one that has less), if the
    ``last`` of each step is one of them in more than half; None: which was the last is not known."""
    least = median_low(values.values()) + more
    found = [rank for rank, value in values.items() if value >= least]
    if last is not None and 2 * sum(rank in found for rank in last) <= len(last):
        return []
    return found


def late_ranks(compared: Compared, ranks: Sequence[OneRank], slow: Slow | None) -> Late | None:
    """The ranks that others wait for, by ``SLOWER_BY`` of a step and more, unless their own work says so already."""
    if compared.step_ns <= 0:
        return None
    known = () if slow is None else slow.ranks
    late: dict[int, int] = {}
    may_be_chance = False
    for waits in _waiting_together(compared):
        among = [*waits]
        found = stragglers([[-ns for ns in waits[rank]] for rank in among], compared.step_ns)
        if found is None:
            least = [min(step) for step in zip(*waits.values())]
            alone = [[rank for rank in among if waits[rank][at] == ns] for at, ns in enumerate(least)]
            last = [ones[0] if len(ones) == 1 else NO_LAST_RANK for ones in alone]
            typical = {rank: -median(waits[rank]) for rank in among}
            named = _seem_slow(typical, max(SLOWER_BY * compared.step_ns, 1), last)
        else:
            named = [among[at] for at in found]
        others = [waits[rank] for rank in among if rank not in named]
        for rank in named:
            may_be_chance |= found is None and rank not in known
            late[rank] = round(median(median(step) - ns for step, ns in zip(zip(*others), waits[rank])))
    if not any(key.what == EXCHANGES for key in compared.run.lockstep):
        late, may_be_chance = _late_by_calls(compared, ranks), True
    of_slow = [late.pop(rank, 0) for rank in known]
    if not late:
        return None
    slowest = tuple(sorted(late, key=lambda rank: (-late[rank], rank)))
    most = late[slowest[0]]
    exceeds_slow = slow is not None and most > max(slow.work_ns[0] - slow.others_ns, *of_slow)
    difference = None
    for device in dict.fromkeys((compared.time or "cpu", "cpu")):
        work = {
            key: compared.over_those_with(key[0], compared.typical(times))
            for key, times in compared.work(device).items()
        }
        difference = difference or _difference(compared, device, work, slowest, most / 2)
    late_ns = tuple(map(late.__getitem__, slowest))
    return Late(slowest, late_ns, most / compared.step_ns, may_be_chance, difference, exceeds_slow)


def _late_by_calls(compared: Compared, ranks: Sequence[OneRank]) -> dict[int, int]:
    """In a run of torchprof 2.6, which kept single calls alone: the ranks that were the last to come in most of them,
    and by how much less than the others they waited in a step."""
    waits = {one.rank: one.waiting_ns for one in ranks if one.waiting_ns is not None}
    if len(waits) < len(ranks):
        return {}
    seem = _seem_slow({rank: -ns for rank, ns in waits.items()}, max(SLOWER_BY * compared.step_ns, 1), None)
    named = [
        one.rank for one in ranks if one.rank in seem and one.last is not None and 2 * one.last.times > one.last.of
    ]
    of_others = [ns for rank, ns in waits.items() if rank not in named]
    return {rank: round(median(of_others) - waits[rank]) for rank in named}


def _waiting_together(compared: Compared) -> Iterator[dict[int, list[int]]]:
    """How long each rank waited in the collectives of its groups in each step, of ranks that are connected by groups.

    In one group that is what a rank was longer in its collectives than the one that was in them for the shortest."""
    whole = compared.whole
    if not (compared.are_paired and whole.values):
        return
    of_job = max(len(compared.ranks), *(meta.world_size for meta in compared.metas))
    waits = {rank: [0] * len(whole.last_ns) for rank in compared.ranks}
    connected: list[set[int]] = []
    for key, lockstep in compared.run.lockstep.items():
        group = compared.all_ranks if key.group == NOT_RECORDED else key.group
        if key.what != EXCHANGES or group is None or not lockstep.is_paired or lockstep.times != whole.times:
            continue
        size = of_job if group.size is None else group.size
        if len(lockstep.ranks) < max(size, 2) or lockstep.counts[0] != whole.counts[0]:
            continue  # one that is not here may have come even later
        values = lockstep.values
        least = [min(step) for step in zip(*values)]
        for rank, took in zip(lockstep.ranks, values):
            waits[rank] = [before + ns - none for before, ns, none in zip(waits[rank], took, least)]
        touching = [one for one in connected if not one.isdisjoint(lockstep.ranks)]
        connected = [one for one in connected if one not in touching]
        connected.append(set(lockstep.ranks).union(*touching))
    for ranks in connected:
        yield {rank: waits[rank] for rank in sorted(ranks)}


def _difference(
    compared: Compared,
    device: str,
    work: Mapping[tuple[int, str], OverRanks],
    slow: Sequence[int],
    least: float,
) -> Difference | None:
    """The innermost layer, and the phase of it, in which the first of the slow ranks takes at least so much longer than
    the median of the others in a step; outside all layers the part of the step. A rank that does not have a layer takes
    0 there."""
    others = [rank for rank in compared.ranks if rank not in slow]
    by_rank: defaultdict[int, Counter[int]] = defaultdict(Counter)
    by_phase: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for (layer, phase), over in work.items():
        took = dict(zip(over.ranks, over.values))
        by_rank[layer].update(took)
        by_phase[layer][phase] = _excess(took, slow[0], others)
    excess = {layer: _excess(took, slow[0], others) for layer, took in by_rank.items()}
    at: int | None = None
    below = [layer for layer in excess if layer < 0 or compared.run.layers.parent[layer] < 0]
    while below and excess[largest := max(below, key=excess.__getitem__)] >= least:
        at = largest
        below = [layer for layer in excess if layer >= 0 and compared.run.layers.parent[layer] == at]
    if at is None:
        return None
    phase, most = max(by_phase[at].items(), key=lambda one: one[1])
    if at == OUTSIDE:
        parts = {part: _excess(_part(compared, device, part), slow[0], others) for part in PARTS}
        part = max(parts, key=parts.__getitem__)
        if parts[part] >= least:
            return Difference(device, at, None, parts[part], part)
    return Difference(device, at, phase, most) if most >= least else Difference(device, at, None, excess[at])


def _excess(took: Mapping[int, float], rank: int, others: Sequence[int]) -> float:
    return took.get(rank, 0) - median(took.get(other, 0) for other in others)


def _part(compared: Compared, device: str, measure: str) -> Counter[int]:
    """What a part of the step takes in the median step, by rank."""
    found: Counter[int] = Counter()
    for key, spread in compared.run.samples.items():
        if key.measure == measure and (key.device == "cpu") == (device == "cpu"):
            found[key.rank] += round(spread.median)
    return found


def _times_the_flops(compared: Compared, ranks: Iterable[OneRank], slow: Sequence[int]) -> float | None:
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
