"""Finds the slow and the late ranks of a job, and the layer or part of the step in which they differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from torchprof.ranks.compared import Compared, OneCollective, OneRank, Times
from torchprof.ranks.significance import CLEARLY_SLOWER, WORTH_NAMING, Stragglers, stragglers
from torchprof.run.lockstep import EXCHANGES, NO_LAST_RANK, NOT_RECORDED
from torchprof.run.words import OUTSIDE


@dataclass(frozen=True)
class Difference:
    """The place where a slow rank takes most of its extra time: ``excess_ns`` more per step than the other ranks.

    ``layer`` (by its index, negative for none): the innermost layer with at least half of the extra time. ``phase``:
    the phase with at least half of it, None if no phase has. ``part``: outside all layers, the part of a step, one of
    ``PARTS``; None if no part has half of it. ``device``: the time that is meant, "cpu" or "device".
    """

    device: str
    layer: int
    phase: str | None
    excess_ns: float
    part: str | None = None


PARTS = {
    "step_data_ns": "loading data",
    "step_optimizer_ns": "the optimizer",
    "step_copy_ns": "copies between host and device",
    "step_wait_ns": "synchronization: the CPU waits for the device",
    "step_gc_ns": "Python's garbage collection",
}
"""The named parts of a step outside all layers, see ``SampleKey``, and in words."""


@dataclass(frozen=True)
class Slow:
    """The ranks with the longer own work, the slowest first.

    - ``work_ns``: the own work of each in a step, the median over the steps; ``others_ns``: the median of the others.
    - ``slowest_in``: in how many steps one of them was the slowest. ``last_in``: in how many collectives one came last.
    - ``others_waiting_ns``: the median of what the other ranks wait in a step.
    - ``may_be_chance``: there are too few steps to exclude chance, or the steps of different ranks cannot be paired.
    - ``costs``: by which share a step would be shorter, at most, if they were no slower than the slowest of the others:
      the median over the steps; None if the steps cannot be paired, in a run of chosen ranks, and in a pipeline, where
      another stage may take as long.
    - ``difference``: where they differ from the others; None if no place has most of it.
    - ``times_flops``: the FLOPs of the slowest rank over the median of the others; None: unknown.
    - ``stages``: the others are the ranks that have these stages of a pipeline, too; ``()`` if all ranks are compared.
    """

    ranks: tuple[int, ...]
    work_ns: tuple[int, ...]
    others_ns: float
    slowest_in: Times | None = None
    last_in: Times | None = None
    others_waiting_ns: float | None = None
    others_waiting_is_lower_bound: bool = False
    may_be_chance: bool = False
    costs: float | None = None
    difference: Difference | None = None
    times_flops: float | None = None
    stages: tuple[int, ...] = ()


@dataclass(frozen=True)
class Late:
    """The ranks that others wait for, the latest first.

    - ``late_ns``: how much less each waits in collectives in a step than the median of the others, the median over the
      steps. ``share``: that of the latest rank, as a fraction of a step.
    - ``may_be_chance``, ``difference``: as in ``Slow``.
    - ``exceeds_slow``: there are slow ranks, too, and the latest rank is late by more than the slow ranks' own work
      exceeds that of the others, and by more than the slow ranks are late.
    """

    ranks: tuple[int, ...]
    late_ns: tuple[int, ...]
    share: float
    may_be_chance: bool = False
    difference: Difference | None = None
    exceeds_slow: bool = False


def slow_among_peers(
    compared: Compared, ranks: Sequence[OneRank], collectives: Sequence[OneCollective]
) -> tuple[Slow | None, float | None]:
    """The ranks whose own work takes longer than that of the others that do the same work by design, and from which
    share on a slow rank would have been found; None if there was no test.

    Of several groups of such ranks, it is the one with the largest difference of those that are not chance, if any is.
    """
    found: list[Slow] = []
    detectable: list[float | None] = []
    for members in compared.peers:
        if len(members) > 1:
            peers, numbers = compared.among(members), set(members)
            tested = _tested_work(peers, len(compared.ranks))
            detectable.append(None if tested is None else tested.detectable)
            slow = _slow_ranks(peers, tested, [rank for rank in ranks if rank.rank in numbers], collectives)
            if slow is not None and len(compared.peers) > 1:
                slow = replace(slow, costs=None, stages=compared.stages.get(members[0], ()))
            found += [slow] if slow is not None else []
    shares = [share for share in detectable if share is not None]
    slowest = max(found, key=lambda slow: (not slow.may_be_chance, slow.work_ns[0] - slow.others_ns), default=None)
    return slowest, max(shares) if shares and len(shares) == len(detectable) else None


def _tested_work(compared: Compared, of: int) -> Stragglers | None:
    """The test of ``stragglers`` on the own work of the ranks; None if the steps cannot be paired or are too few.
    ``of``: the number of ranks in all tests of this run.

    In a run of chosen ranks it is the test of all ranks of the job, which was made before.
    """
    whole = compared.step_work
    if (choice := compared.run.choice) is not None:
        slow, may_be_chance = choice.facts["slow"], choice.facts["may_be_chance"]
        return Stragglers(tuple(index for index, rank in enumerate(whole.ranks) if rank in slow), may_be_chance, None)
    if not (compared.are_paired and whole.values):
        return None
    work = median_low(compared.typical(whole).values())
    return stragglers(whole.values, least=WORTH_NAMING * max(1.0, compared.step_ns / max(work, 1)), of=of)


def _slow_ranks(
    compared: Compared, tested: Stragglers | None, ranks: Sequence[OneRank], collectives: Iterable[OneCollective]
) -> Slow | None:
    """The ranks whose own work takes longer than that of the others, by ``tested``. Without a test, those that take
    longer than the median rank by ``CLEARLY_SLOWER``, if one of them was the slowest in most steps."""
    whole = compared.step_work
    work = compared.typical(whole)
    if len(work) < max(2, len(ranks)):
        return None
    if tested is None:
        last = whole.last_rank if compared.are_paired else None
        named = _seem_slow(work, max(CLEARLY_SLOWER * median_low(work.values()), 1), last)
    else:
        named = [whole.ranks[index] for index in tested.slow]
    slow = sorted(named, key=lambda rank: (-work[rank], rank))
    others = [rank for rank in ranks if rank.rank not in slow]
    if not slow or not others:  # a run of chosen ranks may have only the slow ones
        return None
    slowest_in = Times(sum(rank in slow for rank in whole.last_rank), len(whole.last_rank))
    waits = [rank.waiting_ns for rank in others if rank.waiting_ns is not None]
    others_ns = median(work[rank.rank] for rank in others)
    return Slow(
        ranks=tuple(slow),
        work_ns=tuple(work[rank] for rank in slow),
        others_ns=others_ns,
        slowest_in=slowest_in if whole.is_paired else None,
        last_in=_last_in(collectives, slow),
        others_waiting_ns=median(waits) if len(waits) == len(others) else None,
        others_waiting_is_lower_bound=any(rank.waiting_is_lower_bound for rank in others),
        may_be_chance=tested is None or tested.may_be_chance,
        costs=_cost(compared, slow),
        difference=_difference(compared, compared.measured_on or "cpu", slow, (work[slow[0]] - others_ns) / 2),
        times_flops=_times_the_flops(compared, ranks, slow),
    )


def _last_in(collectives: Iterable[OneCollective], slow: Sequence[int]) -> Times | None:
    """In how many calls of their collectives a slow rank came last; None if that is unknown of all of them."""
    last_in = None
    for collective in collectives:
        if collective.came_last is not None and not set(slow).isdisjoint(collective.ranks):
            times, calls = last_in or (0, 0)
            times += sum(count for rank, count in zip(collective.ranks, collective.came_last.values) if rank in slow)
            last_in = Times(times, calls + collective.paired_calls)
    return last_in


def _cost(compared: Compared, slow: Sequence[int]) -> float | None:
    """See ``Slow.costs``."""
    whole, is_chosen = compared.step_work, compared.run.choice is not None  # then the slowest other rank may be missing
    if is_chosen or not (compared.are_paired and whole.values) or compared.step_ns <= 0:
        return None
    longer = [
        max(0, max(step) - max(ns for rank, ns in zip(whole.ranks, step) if rank not in slow))
        for step in zip(*whole.values)
    ]
    own = max(compared.typical(whole)[rank] for rank in slow)  # may be more than a step: if threads work at once
    return float(median(longer)) / max(compared.step_ns, own)


def _seem_slow(values: Mapping[int, float], more: float, last: Sequence[int] | None) -> list[int]:
    """The ranks whose value exceeds the lower median by at least ``more``. ``last``: the last rank of each step; if it
    is known, it must be one of them in more than half of the steps, else there are none."""
    least = median_low(values.values()) + more
    slow = [rank for rank, value in values.items() if value >= least]
    if last is not None and 2 * sum(rank in slow for rank in last) <= len(last):
        return []
    return slow


def late_ranks(compared: Compared, ranks: Sequence[OneRank], slow: Slow | None) -> Late | None:
    """The ranks that others wait for, by at least ``WORTH_NAMING`` of a step, without those that are slow."""
    if compared.step_ns <= 0:
        return None
    slow_ranks = () if slow is None else slow.ranks
    late: dict[int, int] = {}
    may_be_chance = False
    if any(key.what == EXCHANGES for key in compared.run.lockstep) or len(compared.peers) > 1:
        for waits in _waiting_together(compared):
            late_here, is_uncertain = _late_among(compared, waits)
            late.update(late_here)
            may_be_chance |= is_uncertain and not late_here.keys() <= {*slow_ranks}
    else:
        late, may_be_chance = _late_by_calls(compared, ranks), True
    of_slow = [late.pop(rank, 0) for rank in slow_ranks]
    if not late:
        return None
    latest, *_ = in_order = tuple(sorted(late, key=lambda rank: (-late[rank], rank)))
    peers = compared.among(next(peers for peers in compared.peers if latest in peers))
    difference = None
    for device in dict.fromkeys((compared.measured_on or "cpu", "cpu")):
        difference = difference or _difference(peers, device, in_order, late[latest] / 2)
    return Late(
        ranks=in_order,
        late_ns=tuple(late[rank] for rank in in_order),
        share=late[latest] / compared.step_ns,
        may_be_chance=may_be_chance,
        difference=difference,
        exceeds_slow=slow is not None and late[latest] > max(slow.work_ns[0] - slow.others_ns, *of_slow),
    )


def _late_among(compared: Compared, waits: Mapping[int, Sequence[int]]) -> tuple[dict[int, int], bool]:
    """By how much each late rank waits less than the others; and whether that may be chance. ``waits``: the waiting of
    each rank in each step, of ranks that wait for each other. Of three that wait for 50, 52 and 1 ms, the last one is
    late by 51 - 1 = 50 ms."""
    ranks = [*waits]
    tested = stragglers([[-ns for ns in waits[rank]] for rank in ranks], compared.step_ns, of=len(compared.ranks))
    if tested is None:
        typical = {rank: -median(waits[rank]) for rank in ranks}
        steps = [*zip(*waits.values())]
        last = [ranks[step.index(min(step))] if step.count(min(step)) == 1 else NO_LAST_RANK for step in steps]
        named = _seem_slow(typical, max(CLEARLY_SLOWER * compared.step_ns, 1), last)
    else:
        named = [ranks[index] for index in tested.slow]
    if (choice := compared.run.choice) is not None:
        named = [rank for rank in named if rank in choice.facts["late"]]
    others = [waits[rank] for rank in ranks if rank not in named]
    late = {rank: round(median(median(step) - ns for step, ns in zip(zip(*others), waits[rank]))) for rank in named}
    return late, tested is None or tested.may_be_chance


def _late_by_calls(compared: Compared, ranks: Sequence[OneRank]) -> dict[int, int]:
    """The late ranks in a run without the waiting per step: the ranks that came last in most collective calls, with how
    much less than the others they waited in a step. Runs of torchprof 2.6 kept only single calls."""
    waits = {rank.rank: rank.waiting_ns for rank in ranks if rank.waiting_ns is not None}
    if len(waits) < len(ranks):
        return {}
    seem = _seem_slow({rank: -ns for rank, ns in waits.items()}, max(CLEARLY_SLOWER * compared.step_ns, 1), None)
    named = [
        rank.rank
        for rank in ranks
        if rank.rank in seem and rank.last_in is not None and 2 * rank.last_in.times > rank.last_in.of
    ]
    others_ns = [ns for rank, ns in waits.items() if rank not in named]
    return {rank: round(median(others_ns) - waits[rank]) for rank in named}


def compares_waiting(compared: Compared) -> bool:
    """Whether ``late_ranks`` compares all ranks that exchange anything: groups and steps are known."""
    lockstep = compared.run.lockstep.items()
    exchanging = {rank for key, times in lockstep if key.what == EXCHANGES for rank in times.ranks}
    return exchanging <= {rank for waits in _waiting_together(compared) for rank in waits}


def _waiting_together(compared: Compared) -> Iterator[dict[int, list[int]]]:
    """The waiting of each rank in the collectives of its groups in each step, for each set of ranks that groups
    connect. Groups of ranks that differ by design are left out: who waits there is a matter of the schedule.

    In one group, a rank waits for as long as it spends more in the collectives than the rank that spends least in them.
    Groups (0, 1), (1, 2) and (3, 4) connect two sets of ranks: 0 to 2, where the waiting of rank 1 is its waiting in
    both of its groups, and 3 with 4.
    """
    whole = compared.step_work
    if not (compared.are_paired and whole.values):
        return
    waits = {rank: [0] * len(whole.last_ns) for rank in compared.ranks}
    connected: list[set[int]] = []
    kind_of = {rank: kind for kind, peers in enumerate(compared.peers) for rank in peers}
    for key, lockstep in compared.run.lockstep.items():
        group = compared.all_ranks if key.group == NOT_RECORDED else key.group
        if key.what != EXCHANGES or group is None or not lockstep.is_paired or lockstep.times != whole.times:
            continue
        size = compared.ranks_of_job if group.size is None else group.size
        if len(lockstep.ranks) < max(size, 2) or lockstep.counts[0] != whole.counts[0]:
            continue  # a rank that is missing here may have come even later
        if len({kind_of[rank] for rank in lockstep.ranks}) > 1:
            continue
        least_ns = [min(step) for step in zip(*lockstep.values)]
        for rank, took_ns in zip(lockstep.ranks, lockstep.values):
            waits[rank] = [so_far + ns - least for so_far, ns, least in zip(waits[rank], took_ns, least_ns)]
        touching = [ranks for ranks in connected if not ranks.isdisjoint(lockstep.ranks)]
        connected = [ranks for ranks in connected if ranks not in touching]
        connected.append(set(lockstep.ranks).union(*touching))
    for ranks in connected:
        yield {rank: waits[rank] for rank in sorted(ranks)}


def _difference(compared: Compared, device: str, slow: Sequence[int], least: float) -> Difference | None:
    """The innermost layer, and its phase, in which the first of the slow ranks takes at least ``least`` longer in a
    step than the median of the others; outside all layers, the part of the step. A rank without a layer takes 0 there.
    With ``least`` 5 ms, and 9 ms in ``Net``, 8 ms in ``Net.body`` and 4 ms in its two layers, it is ``Net.body``."""
    others = [rank for rank in compared.ranks if rank not in slow]
    by_rank: defaultdict[int, Counter[int]] = defaultdict(Counter)
    by_phase: defaultdict[int, dict[str, float]] = defaultdict(dict)
    for (layer, phase), times in compared.work(device).items():
        took = compared.typical(times)
        by_rank[layer].update(took)
        by_phase[layer][phase] = _excess(took, slow[0], others)
    excess = {layer: _excess(took, slow[0], others) for layer, took in by_rank.items()}
    lineage = compared.run.layers.lineage
    # The nearest layer above with work: those between may not have been selected.
    parent = {
        layer: next((above for above in reversed(lineage(layer)[:-1]) if above in excess), None) for layer in excess
    }
    innermost: int | None = None
    while children := [layer for layer in excess if parent[layer] == innermost]:
        largest = max(children, key=excess.__getitem__)
        if excess[largest] < least:
            break
        innermost = largest
    if innermost is None:
        return None
    if innermost == OUTSIDE:
        parts = {part: _excess(_part(compared, device, part), slow[0], others) for part in PARTS}
        part = max(parts, key=parts.__getitem__)
        if parts[part] >= least:
            return Difference(device, innermost, None, parts[part], part)
    phase, in_phase = max(by_phase[innermost].items(), key=lambda item: item[1])
    if in_phase >= least:
        return Difference(device, innermost, phase, in_phase)
    return Difference(device, innermost, None, excess[innermost])


def _excess(took: Mapping[int, float], rank: int, others: Sequence[int]) -> float:
    """How much longer a rank took than the median of the others."""
    return took.get(rank, 0) - median(took.get(other, 0) for other in others)


def _part(compared: Compared, device: str, measure: str) -> Counter[int]:
    """The median time of a part of the step, by rank. Without marks of steps, its time in a cycle."""
    if not all(meta.steps for meta in compared.metas):
        return compared.outside(measure.removeprefix("step_").removesuffix("_ns"), f"{device}_ns")
    medians: Counter[int] = Counter()
    for key, spread in compared.run.samples.items():
        if key.measure == measure and (key.device == "cpu") == (device == "cpu"):
            medians[key.rank] += round(spread.median)
    return medians


def _times_the_flops(compared: Compared, ranks: Iterable[OneRank], slow: Sequence[int]) -> float | None:
    """The FLOPs of the first of the slow ranks in a step, over the median of the other ranks; None: unknown."""
    flops = {
        rank.rank: rank.flops / max(compared.steps[rank.rank], 1)
        for rank in ranks
        if rank.flops is not None and not rank.flops_is_lower_bound
    }
    if len(flops) < len(compared.ranks):
        return None
    of_others = median(count for rank, count in flops.items() if rank not in slow)
    return flops[slow[0]] / of_others if of_others else None
