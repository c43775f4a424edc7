"""Takes a run of several ranks apart: one run per rank."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import groupby, product
from typing import TYPE_CHECKING

from torchprof.run.lockstep import Lockstep, LockstepKey
from torchprof.run.renumber import on_layers
from torchprof.run.rows import Rows, compacted
from torchprof.run.samples import SampleKey, Spread

if TYPE_CHECKING:
    from torchprof.run.run import Run


def stretches_of(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """The stretches of consecutive rows of the same rank: (rank, first row, row after the last)."""
    stretches = []
    start = 0
    for rank, same in groupby(ranks):
        stop = start + sum(1 for _ in same)
        stretches.append((rank, start, stop))
        start = stop
    return stretches


def of_ranks(run: Run, ranks: Collection[int]) -> Iterator[Run]:
    """The run of each of these ranks, like ``Run.of_rank``, in one pass over the run."""
    if len(run.metas) == 1:
        yield run
        return
    samples: dict[int, dict[SampleKey, Spread]] = {rank: {} for rank in ranks}
    for sample, spread in run.samples.items():
        if sample.rank in samples:
            samples[sample.rank][sample] = spread
    lockstep: dict[int, dict[LockstepKey, Lockstep]] = {rank: {} for rank in ranks}
    for key, together in run.lockstep.items():
        for at, rank in enumerate(together.ranks):
            if rank in lockstep:
                lockstep[rank][key] = _of_one_rank(together, at)
    places: dict[int, list[tuple[int, int]]] = {rank: [] for rank in ranks}
    for rank, start, stop in stretches_of(run.rows.columns["rank"]):
        if rank in places:
            places[rank].append((start, stop))
    tables = {
        "shared": run.rows.shared,
        "within": run.rows.within,
        "frames": run.rows.frames,
        "device": run.rows.devices,
    }
    for rank in ranks:
        columns = {name: array("q") for name in Rows.COLUMNS}
        for (name, column), (start, stop) in product(columns.items(), places[rank]):
            column.extend(run.rows.columns[name][start:stop])
        timeline = run.timeline
        part = replace(
            run,
            metas=tuple(meta for meta in run.metas if meta.rank == rank),
            rows=compacted(run.layers, columns, tables),
            samples=samples[rank],
            memory=tuple(memory for memory in run.memory if memory.rank == rank),
            timeline=timeline if timeline is not None and timeline.rank == rank else None,
            device_times=tuple(time for time in run.device_times if time.rank == rank),
            lockstep=lockstep[rank],
            unfinished=tuple(one for one in run.unfinished if one.rank == rank),
        )
        its_layers = (layer for layer in run.layers if not layer.ranks or rank in layer.ranks)
        yield on_layers(part, tuple(replace(layer, ranks=()) if layer.ranks else layer for layer in its_layers))


def _of_one_rank(together: Lockstep, at: int) -> Lockstep:
    """The part of the rank at index ``at``. It has single times only if they are kept for every rank."""
    if len(together.ranks) == 1:
        return together
    rank = together.ranks[at]
    alone = Lockstep((rank,), (together.counts[at],), (together.ns[at],), (together.beside_ns[at],), (), ())
    if together.values:
        values = together.values[at]
        return replace(alone, last_ns=values, last_rank=(rank,) * len(values), times=together.times)
    return replace(alone, medians=together.medians[at : at + 1])
