"""``merge``: one run from the runs of the ranks of a job."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, compress
from operator import ge, le
from os import PathLike
from statistics import median_low
from typing import Any

from torchprof.errors import TorchprofError
from torchprof.run.cycles import add_cycle, same_shapes
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import NO_LAST_RANK, Lockstep, LockstepKey
from torchprof.run.memory import Memory
from torchprof.run.meta import Meta
from torchprof.run.paused_gc import paused_gc
from torchprof.run.rows import Rows, compacted, stretches_of
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.timeline import DeviceTime, Timeline
from torchprof.run.unfinished import Unfinished
from torchprof.run.warnings import Caveat, caveat, sharing_key

_Path = tuple[str, ...]

_COUNTED = ("params", "trainable_params", "param_bytes", "buffers", "buffer_bytes", "grad_calls", "updated_params")
"""Counts of a layer: kept in the merged layer if equal on all ranks, else None."""
_IF_ANY = ("compiled", "tied", "recursive")
"""True of a merged layer if true on any rank."""
_UNCALLED: Mapping[str, Any] = {"input_shapes": (), "output_shapes": (), "same_shapes": None, "grad_calls": None}
"""What a layer is before its first call, for cycles that do not have it."""


@paused_gc()
def merge(runs: Iterable[Run], *, add_cycles: bool = False) -> Run:
    """Merge runs of single ranks, or of ranks that were merged before, into one run of all ranks of a job.

    ``runs`` are read once, one at a time: ``merge(map(torchprof.load, paths))`` never holds more than one of them. The
    result does not depend on order or grouping. A single run is returned as it is.

    - Layers are matched by path; ``Layer.ranks`` are the ranks that have a layer. A merged layer is that of the lowest
      of these ranks. Its counts and bytes of parameters and buffers are None if they differ between ranks.
    - Everything else keeps its rank. The timeline is that of the lowest rank that has one.

    ``add_cycles``: several runs of one rank were recorded by one process, in the order given, and are added up like the
    cycles of one ``Profile``. Warnings that follow from a run are computed from the sum; each stored warning keeps the
    numbers of the runs that had it.

    Raises TorchprofError if there is no run, if something is not a run, for two runs of one rank, and for runs of
    different jobs.
    """
    if isinstance(runs, (str, PathLike, Run)) or not isinstance(runs, Iterable):
        raise TorchprofError(f"merge needs several runs, as a list or a generator, but got {runs!r:.80} alone.")
    found: Iterator[Run] = map(_checked, runs)
    if add_cycles:
        found = iter(_sums_of_cycles(found))
    first, second = next(found, None), next(found, None)
    if first is None:
        raise TorchprofError("merge needs at least one run; it got none.")
    if second is None:
        return first
    merged = _Merged()
    for run in chain((first, second), found):
        merged.add(run)
    return merged.run()


def _checked(run: Any) -> Run:
    if isinstance(run, Run):
        return run
    problem = f"merge needs runs, not {run!r:.80}."
    if isinstance(run, (str, PathLike)):
        raise TorchprofError(f"{problem} To merge files: torchprof.merge(map(torchprof.load, paths)).")
    if hasattr(run, "run"):
        raise TorchprofError(f"{problem} Give prof.run, which a Profile has after its block.")
    raise TorchprofError(problem)


def _sums_of_cycles(runs: Iterable[Run]) -> list[Run]:
    """One run for each rank: the sum of its cycles, with the stored warnings of all of them."""
    of_rank: dict[tuple[int, ...], Run] = {}
    stored: dict[tuple[int, ...], list[tuple[Caveat, ...]]] = {}  # the warnings of each run, if a rank has several
    for run in runs:
        ranks = tuple(meta.rank for meta in run.metas)
        before = of_rank.get(ranks)
        if before is not None and len(ranks) > 1:
            raise TorchprofError(
                "Two of the runs are of several ranks, the same in both: first add up the cycles of each rank, then "
                "merge the ranks."
            )
        if before is None:
            of_rank[ranks] = run
        else:
            stored.setdefault(ranks, [before.meta.warnings]).append(run.meta.warnings)
            of_rank[ranks] = _one_after_the_other(before, run)
    for ranks, of_runs in stored.items():
        total = of_rank[ranks]
        of_rank[ranks] = replace(total, metas=(replace(total.meta, warnings=_warnings_of_sum(of_runs)),))
    return [*of_rank.values()]


def _warnings_of_sum(of_runs: Sequence[Sequence[Caveat]]) -> tuple[Caveat, ...]:
    """The stored warnings of a sum of runs, from those of each run. Each has the numbers of the runs that had it.

    A stored warning is about one recording: a layer that was never called in one may be called in the next. The
    exception are operators without recorded shapes: if one recording knows that they have a formula, it holds for all.
    """
    numbers: dict[Caveat, list[int]] = {}
    without_shapes: dict[str, None] = {}
    for number, warnings in enumerate(of_runs, 1):
        for warning in dict.fromkeys(warnings):
            if warning.code == WITHOUT_SHAPES:
                without_shapes.update(dict.fromkeys(warning.facts.get("names", ())))
            else:
                numbers.setdefault(warning, []).append(number)
    count = len(of_runs)
    found = [replace(one, added=((tuple(by), count), *one.added)) for one, by in numbers.items()]
    return (*found, *([caveat(WITHOUT_SHAPES, names=tuple(without_shapes))] if without_shapes else []))


def _one_after_the_other(before: Run, after: Run) -> Run:
    """The sum of two cycles that may have different layers."""
    layers = {layer.path: replace(layer, **_UNCALLED) for layer in (*before.layers, *after.layers)}

    def among_all(run: Run) -> Run:
        own = {layer.path: layer for layer in run.layers}
        return run.on_layers(own.get(path, layer) for path, layer in layers.items())

    return add_cycle(among_all(before), among_all(after))


class _Known:
    """A layer of the merged run so far, as on ``rank``, the lowest rank that has it. ``place``: its index among the
    layers of that rank. ``ranks``: all ranks that have it."""

    __slots__ = ("layer", "number", "place", "rank", "ranks")

    def __init__(self, number: int, layer: Layer, ranks: Sequence[int], place: int) -> None:
        self.number = number
        self.layer = layer
        self.rank = ranks[0]
        self.place = place
        self.ranks = [*ranks]

    def add(self, layer: Layer, ranks: Sequence[int], place: int) -> None:
        """Add the same layer of other ranks, which ascend."""
        if ranks[0] < self.rank:
            self.layer, self.rank, self.place = _both(layer, self.layer), ranks[0], place
        else:
            self.layer = _both(self.layer, layer)
        self.ranks += ranks

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key among its siblings.

        Numbers come first and in their order, because a pipeline spreads numbered layers over ranks. Then come names:
        those of the lowest rank first, in its order.
        """
        name = self.layer.path[-1]
        return (int(name) if name.isdecimal() else float("inf"), self.rank, self.place)


def _both(first: Layer, other: Layer) -> Layer:
    """The layer of two ranks: that of the lower rank, which is ``first``, with what differs left out."""
    if first == other:
        return first
    changes: dict[str, Any] = {name: getattr(first, name) or getattr(other, name) for name in _IF_ANY}
    changes.update((name, None) for name in _COUNTED if getattr(first, name) != getattr(other, name))
    changes["same_shapes"] = same_shapes(first, other)
    if first.dtype_bytes != other.dtype_bytes:
        changes["dtype_bytes"] = ()
    return replace(first, **changes)


class _Together:
    """The lockstep of some ranks so far: a list with one entry per rank for each figure, None if not all ranks have
    it."""

    __slots__ = ("counts", "figures", "first", "is_paired", "key", "last_ns", "last_rank", "ranks", "times")

    def __init__(self, key: LockstepKey, first: Lockstep) -> None:
        self.key = key
        self.first = first
        self.ranks = [*first.ranks]
        self.counts = [*first.counts]
        self.times = first.times
        self.figures = self._figures(first)
        self.is_paired = first.is_paired
        self.last_ns = [*first.last_ns]
        self.last_rank = [*first.last_rank]

    def add(self, other: Lockstep) -> None:
        self.is_paired &= other.is_paired and self.counts[0] == other.counts[0] and self.times == other.times
        if self.is_paired:
            # in a collective the last rank has the shortest time, else the longest
            is_later = le if self.key.is_collective else ge
            later = map(is_later, other.last_ns, self.last_ns)
            for at in compress(range(len(self.last_ns)), later):  # few times, if there are many ranks
                is_equal = other.last_ns[at] == self.last_ns[at]
                self.last_ns[at] = other.last_ns[at]
                self.last_rank[at] = NO_LAST_RANK if is_equal else other.last_rank[at]
        self.ranks += other.ranks
        self.counts += other.counts
        self.figures = [
            None if mine is None or its is None else mine + its for mine, its in zip(self.figures, self._figures(other))
        ]

    def _figures(self, one: Lockstep) -> list[list[Any] | None]:
        """For each rank: ``ns``, ``beside_ns``, ``kept_ns``, the median of the kept times, and the kept times."""
        kept, medians, values = one.kept_ns, one.medians, one.values
        if len(one.ranks) == 1 and one.last_ns:  # the times of this rank
            values = (one.last_ns,)
            kept = (sum(one.last_ns),)
            medians = (median_low(one.last_ns),)
        return [
            [*one.ns],
            [*one.beside_ns],
            [*kept] if kept and one.times else None,
            [*medians] if medians and not self.key.is_collective else None,
            [*values] if values and self.key.keeps_values else None,
        ]

    def lockstep(self, known: dict[Any, Any]) -> Lockstep:
        """The ``Lockstep`` of all ranks. ``known`` has the tuples made so far: equal tuples are one object."""
        if len(self.ranks) == 1:
            return self.first
        order = sorted(range(len(self.ranks)), key=self.ranks.__getitem__)

        def sorted_by_rank(values: Sequence[Any] | None) -> tuple[Any, ...]:
            found = () if values is None else tuple(values[at] for at in order)
            return known.setdefault(found, found)  # type: ignore[no-any-return]

        ns, beside_ns, kept_ns, medians, values = map(sorted_by_rank, self.figures)
        is_paired = self.is_paired
        return Lockstep(
            sorted_by_rank(self.ranks),
            sorted_by_rank(self.counts),
            ns,
            beside_ns,
            tuple(self.last_ns) if is_paired else (),
            tuple(self.last_rank) if is_paired else (),
            known.setdefault(self.times, self.times) if is_paired else (),
            kept_ns if is_paired else (),
            medians,
            values if is_paired else (),
        )


class _Table:
    """Entries that rows refer to by number, each once. ``first`` are the entries that come first, if there are any."""

    def __init__(self, *first: Any) -> None:
        self.numbers: dict[Any, int] = {entry: number for number, entry in enumerate(first)}
        self._last: tuple[Sequence[Any], list[int]] = ((), [])

    def numbers_of(self, entries: Sequence[Any]) -> list[int]:
        """The number of each entry. Two ranks have the same entries as a rule: comparing them is faster than
        hashing."""
        if entries != self._last[0]:
            self._last = entries, [self.numbers.setdefault(entry, len(self.numbers)) for entry in entries]
        return self._last[1]


class _Merged:
    """The merged run so far. Layers are numbered in the order in which they come; ``run`` sorts them."""

    def __init__(self) -> None:
        self._metas: dict[int, Meta] = {}
        self._warnings: dict[tuple[Any, ...], Caveat] = {}
        self._layers: dict[_Path, _Known] = {}
        self._tables = {"shared": _Table(()), "within": _Table(()), "frames": _Table(()), "device": _Table()}
        self._columns = {name: array("q") for name in Rows.COLUMNS}
        self._samples: dict[SampleKey, Spread] = {}
        self._memory: list[Memory] = []
        self._device_times: list[DeviceTime] = []
        self._timeline: Timeline | None = None
        self._lockstep: dict[LockstepKey, _Together] = {}
        self._unfinished: list[Unfinished] = []

    def add(self, run: Run) -> None:
        """Add the ranks of one more run."""
        self._add_metas(run.metas)
        run = run.renumbered(self._add_layers(run), run.layers)
        self._add_rows(run.rows)
        self._samples.update(run.samples)
        self._memory += run.memory
        self._device_times += run.device_times
        self._unfinished += run.unfinished
        if run.timeline is not None and (self._timeline is None or run.timeline.rank < self._timeline.rank):
            self._timeline = run.timeline
        for key, lockstep in run.lockstep.items():
            together = self._lockstep.get(key)
            if together is None:
                self._lockstep[key] = _Together(key, lockstep)
            else:
                together.add(lockstep)

    def _add_metas(self, metas: Iterable[Meta]) -> None:
        for meta in metas:
            if meta.rank in self._metas:
                raise TorchprofError(
                    f"Two of the runs are of rank {meta.rank}. If they are of one process, one after the other, "
                    "merge(runs, add_cycles=True) adds them up. Processes that are not one job all have rank 0, and "
                    "cannot be merged."
                )
            shared = tuple(self._warnings.setdefault(sharing_key(warning), warning) for warning in meta.warnings)
            self._metas[meta.rank] = replace(meta, warnings=shared)
        sizes = {meta.world_size: meta.rank for meta in self._metas.values() if meta.world_size > 1}
        if len(sizes) > 1:
            which = " and ".join(f"of {size} ranks (rank {rank})" for size, rank in sorted(sizes.items()))
            raise TorchprofError(f"The runs are of different jobs, {which}. Merge those of one job.")
        jobs = {meta.job: meta.rank for meta in self._metas.values() if meta.job}
        if len(jobs) > 1:
            which = " and ".join(f"{job} (rank {rank})" for job, rank in sorted(jobs.items()))
            raise TorchprofError(f"The runs are of different jobs, {which}. Merge those of one job.")

    def _add_layers(self, run: Run) -> list[int]:
        """Add the layers of a run. Returns the number of each in the merged run."""
        everyone = tuple(sorted(meta.rank for meta in run.metas))
        for place, layer in enumerate(run.layers):
            ranks = layer.ranks or everyone
            if layer.ranks:
                layer = replace(layer, ranks=())
            known = self._layers.get(layer.path)
            if known is None:
                self._layers[layer.path] = _Known(len(self._layers), layer, ranks, place)
            else:
                known.add(layer, ranks, place)
        return [self._layers[layer.path].number for layer in run.layers]

    def _add_rows(self, rows: Rows) -> None:
        entries = {"shared": rows.shared, "within": rows.within, "frames": rows.frames, "device": rows.devices}
        for name, column in rows.columns.items():
            if name in entries:
                numbers = self._tables[name].numbers_of(entries[name])
                if numbers != [*range(len(numbers))]:
                    column = array("q", map(numbers.__getitem__, column))
            self._columns[name].extend(column)

    def run(self) -> Run:
        """The merged run, with layers and ranks in order."""
        metas = tuple(self._metas[rank] for rank in sorted(self._metas))
        ordered = _depth_first(self._layers)
        everyone = tuple(meta.rank for meta in metas)
        of_ranks: dict[tuple[int, ...], tuple[int, ...]] = {everyone: ()}
        layers = []
        for known in ordered:
            ranks = tuple(sorted(known.ranks))
            layers.append(replace(known.layer, ranks=of_ranks.setdefault(ranks, ranks)))
        numbers = {known.number: place for place, known in enumerate(ordered)}
        tuples: dict[Any, Any] = {}
        merged = Run(
            metas,
            Layers(),
            self._rows(),
            self._samples,
            tuple(sorted(self._memory, key=_rank)),
            self._timeline,
            tuple(sorted(self._device_times, key=_rank)),
            {key: together.lockstep(tuples) for key, together in self._lockstep.items()},
            tuple(sorted(self._unfinished, key=_rank)),
        )
        return merged.renumbered([numbers[number] for number in range(len(numbers))], layers)

    def _rows(self) -> Rows:
        stretches = stretches_of(self._columns["rank"])
        in_order = sorted(stretches, key=lambda stretch: stretch[0])
        for name in Rows.COLUMNS if in_order != stretches else ():
            column, unordered = array("q"), self._columns[name]
            for _, start, stop in in_order:
                column.extend(unordered[start:stop])
            self._columns[name] = column  # column by column, so at most one exists twice
        return compacted((), self._columns, {name: [*table.numbers] for name, table in self._tables.items()})


def _rank(one: Memory | DeviceTime | Unfinished) -> int:
    return one.rank


def _depth_first(layers: Mapping[_Path, _Known]) -> list[_Known]:
    """All layers, parents before children, without recursion: models are deeper than Python's limit."""
    below: dict[_Path, list[_Known]] = {}
    for path, known in layers.items():
        below.setdefault(path[:-1], []).append(known)
    for siblings in below.values():
        siblings.sort(key=lambda known: known.order, reverse=True)
    ordered = []
    waiting = below.get((), [])
    while waiting:
        ordered.append(waiting.pop())
        waiting.extend(below.get(ordered[-1].layer.path, ()))
    return ordered
