"""The ranks of a job on the page: their comparison, and their sum if they are too many."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add, attrgetter
from typing import Any

from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.ranks.sentences import sentences, unit_of
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import PHASES

_DIFFERING = 24
"""The number of layers that are compared over ranks in each phase: those whose slowest rank exceeds the mean most."""


def compared_ranks(run: Run, nodes: Mapping[int, int]) -> dict[str, Any]:
    """The comparison of ranks on the page. ``work``: own work in layers, in ns per step for each rank, None for a rank
    that does not have the layer."""
    balance = balance_of(run)
    differing: set[int] = set()
    for phase in PHASES:
        layers = [row for row in balance.layers if row.phase == phase and row.work is not None]
        layers.sort(key=lambda row: row.work.above_mean if row.work else 0, reverse=True)
        differing.update(row.layer for row in layers[:_DIFFERING])
    work = []
    for row in balance.layers:
        if row.layer in nodes and row.layer in differing and row.work is not None:
            of_rank = dict(zip(row.work.ranks, row.work.values))
            values = [of_rank.get(other.rank) for other in balance.ranks]
            work.append([nodes[row.layer], PHASES.index(row.phase), values])
    return {
        "sentences": list(sentences(run, balance)),
        "unit": unit_of(run),
        "ranks": [rank.rank for rank in balance.ranks],
        "lines": [
            [rank.work_ns, rank.slowest, rank.waiting_ns, rank.waits_longer, rank.last, rank.steps, rank.typical_ns]
            for rank in balance.ranks
        ],
        "work": work,
    }


def sum_of_ranks(run: Run) -> Run:
    """A run of several ranks as a run of one, the lowest: rows with equal keys are summed, samples are merged. Of each
    kind of device it has the memory of the one with the largest peak and the times of the busiest one, named with their
    ranks."""
    first = run.meta.rank
    lines: dict[tuple[int, ...], list[int]] = {}
    position = Rows.COLUMNS.index("calls")
    for line in zip(*(run.rows.columns[name] for name in Rows.COLUMNS if name != "rank")):
        key, values = line[: position - 1], line[position - 1 :]
        known = lines.get(key)
        lines[key] = [*values] if known is None else [*map(add, known, values)]
    columns = {name: array("q") for name in Rows.COLUMNS}
    for key, summed in lines.items():
        for name, value in zip(Rows.COLUMNS, (*key, first, *summed)):
            columns[name].append(value)
    of_ranks: defaultdict[tuple[Any, ...], list[Spread]] = defaultdict(list)
    for (layer, phase, _, device, measure), spread in run.samples.items():
        of_ranks[layer, phase, first, device, measure].append(spread)
    samples = {SampleKey(*key): Spread.of_all(spreads) for key, spreads in of_ranks.items()}
    memory = {peak.device.partition(":")[0]: peak for peak in sorted(run.memory, key=attrgetter("peak_bytes"))}
    times = {time.device.partition(":")[0]: time for time in sorted(run.device_times, key=attrgetter("busy_ns"))}
    return replace(
        run,
        metas=(replace(run.meta, measured=tuple(common(meta.measured for meta in run.metas))),),
        rows=replace(run.rows, columns=columns),
        samples=samples,
        timeline=None,  # it would be that of one rank
        memory=tuple(
            replace(peak, device=f"{peak.device} of rank {peak.rank}", rank=first) for peak in memory.values()
        ),
        device_times=tuple(
            replace(time, device=f"{time.device} of rank {time.rank}", rank=first) for time in times.values()
        ),
        lockstep={},
        unfinished=(),
        pipelines=(),
    )


def common(sets: Iterable[Sequence[str]]) -> list[str]:
    """The names that are in all sets, in the order of the first."""
    first, *others = sets
    return [name for name in first if all(name in other for other in others)]
