"""One run from several: of the ranks of a job (``merge``), or of the cycles of one process (``add_cycle``)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from os import PathLike
from typing import Any

from torchprof.errors import TorchprofError
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer, Layers, stage_of_root
from torchprof.run.meta import Meta, RunWarning, sharing_key
from torchprof.run.processes import paused_gc
from torchprof.run.rows import Rows, compacted, stretches_of
from torchprof.run.run import RUN_PARTS, Run
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.words import StepEnd


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

    Raises TorchprofError for no run, for what is not a run, for two runs of one rank, for runs of different jobs, and
    for sums that do not fit into 64 bits.
    """
    if isinstance(runs, (str, PathLike, Run)) or not isinstance(runs, Iterable):
        raise TorchprofError(f"merge needs several runs, as a list or a generator, but got {runs!r:.80} alone.")
    checked: Iterator[Run] = map(_checked, runs)
    if add_cycles:
        checked = iter(_sums_of_cycles(checked))
    first, second = next(checked, None), next(checked, None)
    if first is None:
        raise TorchprofError("merge needs at least one run; it got none.")
    if second is None:
        return first
    merged = _Merged()
    for run in chain((first, second), checked):
        merged.add(run)
    return merged.run()


def _checked(run: Any) -> Run:
    if isinstance(run, Run):
        return run
    remedy = ""
    if isinstance(run, (str, PathLike)):
        remedy = " To merge files: torchprof.merge(map(torchprof.load, paths))."
    elif hasattr(run, "run"):
        remedy = " Give prof.run, which a Profile has after its block."
    raise TorchprofError(f"merge needs runs, not {run!r:.80}.{remedy}")


def _sums_of_cycles(runs: Iterable[Run]) -> list[Run]:
    """One run for each rank: the sum of its cycles, with the stored warnings of all of them."""
    sums: dict[tuple[int, ...], Run] = {}
    warnings: dict[tuple[int, ...], list[tuple[RunWarning, ...]]] = {}  # those of each run
    for run in runs:
        ranks = tuple(meta.rank for meta in run.metas)
        if ranks in sums and len(ranks) > 1:
            raise TorchprofError(
                "Two of the runs are of several ranks, the same in both: first add up the cycles of each rank, then "
                "merge the ranks."
            )
        try:
            sums[ranks] = add_cycle(sums.get(ranks), run)
        except OverflowError as error:
            raise TorchprofError(f"A sum of the cycles of rank {ranks[0]} does not fit into 64 bits.") from error
        warnings.setdefault(ranks, []).append(run.meta.warnings)
    for ranks, of_runs in warnings.items():
        if len(of_runs) > 1:
            meta = replace(sums[ranks].meta, warnings=_warnings_of_sum(of_runs))
            sums[ranks] = replace(sums[ranks], metas=(meta,))
    return [*sums.values()]


def _warnings_of_sum(of_runs: Sequence[Sequence[RunWarning]]) -> tuple[RunWarning, ...]:
    """The stored warnings of a sum of runs, from those of each run. Each has the numbers of the runs that had it: a
    stored warning is about one recording, and a layer that was never called in one may be called in the next. Operators
    without recorded shapes are an exception: that they have a formula holds for all recordings."""
    numbers: dict[RunWarning, list[int]] = {}
    without_shapes: dict[str, None] = {}
    for number, warnings in enumerate(of_runs, 1):
        for warning in dict.fromkeys(warnings):
            if warning.code == WITHOUT_SHAPES:
                without_shapes.update(dict.fromkeys(warning.facts.get("names", ())))
            else:
                numbers.setdefault(warning, []).append(number)
    of_sum = [replace(each, added=((tuple(had), len(of_runs)), *each.added)) for each, had in numbers.items()]
    if without_shapes:
        of_sum.append(RunWarning.of(WITHOUT_SHAPES, names=tuple(without_shapes)))
    return tuple(of_sum)


class _Merged:
    """The merged run so far. Layers are numbered in the order in which they come; ``run`` sorts them."""

    def __init__(self) -> None:
        self._metas: dict[int, Meta] = {}
        self._of_job: dict[str, tuple[int, str]] = {}  # what all ranks share: the first rank that has it, and its value
        self._warnings: dict[tuple[Any, ...], RunWarning] = {}  # equal warnings are one object
        self._layers = _MergingLayers()
        self._rows = _MergingRows()
        self._parts: dict[str, Any] = dict.fromkeys(RUN_PARTS)

    def add(self, run: Run) -> None:
        self._add_metas(run.metas)
        run = run.renumbered(self._layers.add(run.layers, sorted(meta.rank for meta in run.metas)), run.layers)
        self._rows.add(run.rows)
        for name, part in RUN_PARTS.items():
            self._parts[name] = part.merge(self._parts[name], getattr(run, name))

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
            if meta.world_size > 1:
                self._check_job("size", meta.rank, f"of {meta.world_size} ranks")
            if meta.job:
                self._check_job("name", meta.rank, meta.job)

    def _check_job(self, what: str, rank: int, value: str) -> None:
        """Raises TorchprofError if a rank differs from the first one in something that all ranks of a job share."""
        first, of_first = self._of_job.setdefault(what, (rank, value))
        if value != of_first:
            which = " and ".join(f"{job} (rank {rank})" for job, rank in sorted([(of_first, first), (value, rank)]))
            raise TorchprofError(f"The runs are of different jobs, {which}. Merge those of one job.")

    def run(self) -> Run:
        metas = tuple(self._metas[rank] for rank in sorted(self._metas))
        indices, layers = self._layers.merged(tuple(meta.rank for meta in metas))
        parts = {name: part.merged(self._parts[name]) for name, part in RUN_PARTS.items()}
        return Run(metas, Layers(), self._rows.merged(), **parts).renumbered(indices, layers)


class _MergingLayers:
    """The layers of the ranks so far, matched by path and numbered in the order in which they come."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], _Known] = {}

    def add(self, layers: Layers, all_ranks: Sequence[int]) -> list[int]:
        """Add the layers of a run with the ranks ``all_ranks``, which ascend. Returns the number of each."""
        for place, layer in enumerate(layers):
            ranks = layer.ranks or all_ranks
            if layer.ranks:
                layer = replace(layer, ranks=())
            if (known := self._known.get(layer.path)) is None:
                self._known[layer.path] = _Known(len(self._known), layer, ranks[0], place, [*ranks])
            else:
                known.add(layer, ranks, place)
        return [self._known[layer.path].number for layer in layers]

    def merged(self, all_ranks: tuple[int, ...]) -> tuple[list[int], Layers]:
        """For each number the index among the merged layers; and these."""
        ordered = _depth_first(self._known)
        stored_ranks: dict[tuple[int, ...], tuple[int, ...]] = {all_ranks: ()}  # equal tuples are one object
        indices = [0] * len(ordered)
        layers = []
        for index, known in enumerate(ordered):
            ranks = tuple(sorted(known.ranks))
            layers.append(replace(known.layer, ranks=stored_ranks.setdefault(ranks, ranks)))
            indices[known.number] = index
        return indices, Layers(layers)


@dataclass
class _Known:
    """A layer of the merged run so far, as on ``rank``, the lowest rank that has it. ``place``: its index among the
    layers of that rank. ``ranks``: all ranks that have it."""

    number: int
    layer: Layer
    rank: int
    place: int
    ranks: list[int]

    def add(self, layer: Layer, ranks: Sequence[int], place: int) -> None:
        if ranks[0] < self.rank:
            self.layer, self.rank, self.place = layer.merged(self.layer), ranks[0], place
        else:
            self.layer = self.layer.merged(layer)
        self.ranks += ranks

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key among its siblings. Numbers come first and in their order, because a pipeline spreads numbered
        layers over ranks, and so do its stages. Then come names: those of the lowest rank first, in its order."""
        name = self.layer.path[-1]
        number = int(name) if name.isdecimal() else stage_of_root(name)
        return (float("inf") if number is None else number, self.rank, self.place)


def _depth_first(layers: Mapping[tuple[str, ...], _Known]) -> list[_Known]:
    """All layers, parents before children, without recursion: models are deeper than Python's limit."""
    below = lists_by_key((path[:-1], known) for path, known in layers.items())
    for siblings in below.values():
        siblings.sort(key=lambda known: known.order, reverse=True)
    ordered = []
    waiting = below.get((), [])
    while waiting:
        ordered.append(waiting.pop())
        waiting.extend(below.get(ordered[-1].layer.path, ()))
    return ordered


class _Table:
    """A table of the merged rows: they refer to its entries by number. ``first``: those that it begins with."""

    def __init__(self, *first: Any) -> None:
        self.numbers: dict[Any, int] = {entry: number for number, entry in enumerate(first)}
        self._last: tuple[Sequence[Any], list[int]] = ((), [])

    def numbers_of(self, entries: Sequence[Any]) -> list[int]:
        """The number of each entry. Two ranks mostly have the same ones: comparing is faster than hashing."""
        if entries != self._last[0]:
            self._last = entries, [self.numbers.setdefault(entry, len(self.numbers)) for entry in entries]
        return self._last[1]


class _MergingRows:
    """The rows of the ranks so far, one rank after the other, with the numbers of common tables."""

    def __init__(self) -> None:
        self._tables = {"shared": _Table(()), "within": _Table(()), "frames": _Table(()), "device": _Table()}
        self._columns = {name: array("q") for name in Rows.COLUMNS}

    def add(self, rows: Rows) -> None:
        columns = dict(rows.columns)
        for name, entries in rows.tables.items():
            numbers = self._tables[name].numbers_of(entries)
            if numbers != [*range(len(numbers))]:
                columns[name] = array("q", map(numbers.__getitem__, columns[name]))
        for name, column in self._columns.items():
            column.extend(columns[name])

    def merged(self) -> Rows:
        """The rows in the order of ranks."""
        stretches = stretches_of(self._columns["rank"])
        in_order = sorted(stretches, key=lambda stretch: stretch[0])
        for name in Rows.COLUMNS if in_order != stretches else ():
            column, unordered = array("q"), self._columns[name]
            for _, start, stop in in_order:
                column.extend(unordered[start:stop])
            self._columns[name] = column  # column by column, so at most one exists twice
        return compacted((), self._columns, {name: [*table.numbers] for name, table in self._tables.items()})


# Cycles


def add_cycle(before: Run | None, cycle: Run) -> Run:
    """Add the run of a new cycle to ``before``, the sum of the earlier cycles of the process (None: there are none).
    Steps that end in different ways are not steps of one loop: only those of the stronger way are kept."""
    if before is None:
        return cycle
    if _strength(before) < _strength(cycle):
        before = _without_steps(before)
    elif _strength(cycle) < _strength(before):
        cycle = _without_steps(cycle)
    layers = before.layers.added(cycle.layers)
    before, cycle = before.on_layers(layers), cycle.on_layers(layers)
    sums = {name: part.added(getattr(before, name), getattr(cycle, name)) for name, part in RUN_PARTS.items()}
    return Run((before.meta + cycle.meta,), layers, before.rows.added(cycle.rows), **sums)


def _strength(run: Run) -> int:
    """How certain the ends of the steps are, from 0 for a run without steps."""
    return 0 if not run.meta.steps else len(StepEnd) - [*StepEnd].index(run.meta.step_end)


def _without_steps(run: Run) -> Run:
    """The run without what is kept of single steps, and without its lockstep, which counts in steps or cycles."""
    samples = {key: spread for key, spread in run.samples.items() if not key.measure.startswith("step_")}
    return replace(run, metas=(replace(run.meta, steps=0),), samples=samples, lockstep={})
