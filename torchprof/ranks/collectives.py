"""The collectives report: collectives by name, group and size, with bandwidth; and by layer and phase."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from torchprof.analyze.device import short_kernel_name
from torchprof.analyze.report import Part, ReportTable, phase_cell, report, spaced, stacked
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.errors import printable
from torchprof.run import formats
from torchprof.run.collectives import Collective, collective_of, shows_collective
from torchprof.run.formats import UNKNOWN, Bound, Cell, Figure, ReportCell, format_number, format_time
from torchprof.run.rows import Row
from torchprof.run.run import Run
from torchprof.run.torch_names import KernelWork, kind_of_work
from torchprof.run.words import NOT_SELECTED_NAME, OUTSIDE_NAME, Frame, FrameKind, is_host_collective

_UNNAMED = ("", "undefined")  # the description in torch of a group without one
_WHAT = ("Collective", "Group", "Ranks", "Type")
_OF_ANY_SIZE = "all_to_all"
"""The collective whose calls differ in size, as experts get different numbers of tokens in each: they share a row."""


class _Source(Enum):
    """The kind of row that a collective was recorded as."""

    KERNEL = auto()
    HOST_RANGE = auto()  # of a backend that runs on the CPU, such as gloo
    LAUNCH = auto()  # the range, or the record, of a collective that launches kernels


class _Use(NamedTuple):
    """A row of the run that is a collective. ``on_host``: the CPU runs it. ``ns``: how long it took, as kernels or as a
    range on the host; None if unknown."""

    row: Row
    collective: Collective
    on_host: bool
    ns: int | None


@dataclass
class _Line:
    """A line of a table: the sum over calls of collectives. ``key``: its first cells. ``ran_on``: the cell of where it
    ran, if the table has it. ``whole_ns``: the time of all collectives there.

    ``ns`` is the duration of the ``timed`` calls. ``nbytes`` sums the larger of input and output size; ``sized`` calls
    have at least one of the two sizes, ``counted`` calls have both. With ``counted < calls``, ``nbytes`` is a lower
    bound. ``sizes``: the different sizes of the input and of the output of a call, as far as they are known."""

    key: tuple[Cell, ...]
    ran_on: list[Cell]
    whole_ns: int
    calls: int = 0
    timed: int = 0
    sized: int = 0
    counted: int = 0
    ns: int = 0
    nbytes: int = 0
    sizes: tuple[set[int], set[int]] = field(default_factory=lambda: (set(), set()))

    def add(self, use: _Use) -> None:
        calls = use.row.calls
        self.calls += calls
        if use.ns is not None:
            self.timed += calls
            self.ns += use.ns
        sizes = use.collective.bytes_in, use.collective.bytes_out
        for size, different in zip(sizes, self.sizes):
            different.update(() if size is None else (size,))
        if known := [size for size in sizes if size is not None]:
            self.sized += calls
            self.counted += calls * (len(known) == 2)
            self.nbytes += calls * max(known)

    @property
    def bytes_text(self) -> Cell:
        if not self.sized:
            return UNKNOWN
        return Figure(self.nbytes, _bound(self.counted == self.calls)).text(formats.format_memory)

    @property
    def bandwidth_text(self) -> Cell:
        if not self.ns or not self.nbytes or self.timed < self.calls:
            return UNKNOWN
        rate = self.nbytes * 1e9 / self.ns
        return formats.as_lower_bound(ReportCell(f"{formats.format_count(rate)}B/s", rate, "bytes per second"))

    @property
    def calls_and_time(self) -> list[Cell]:
        """The cells of calls, time, average and share of a whole."""
        if not self.timed:
            return [format_number(self.calls), *[UNKNOWN] * 3]
        time = Figure(self.ns, _bound(self.timed == self.calls)).text(format_time)
        share = formats.format_share(self.ns / (self.whole_ns or 1))
        return [format_number(self.calls), time, format_time(self.ns / self.timed), share]


def _bound(is_complete: bool) -> Bound:
    return Bound.EXACT if is_complete else Bound.AT_LEAST


def _size_text(sizes: Set[int]) -> Cell:
    """A size, or the smallest and the largest."""
    if not sizes:
        return UNKNOWN
    low, high = formats.format_memory(min(sizes)), formats.format_memory(max(sizes))
    return high if len(sizes) == 1 else high.written(f"{low} to {high}")


@report("collectives", "collectives between ranks: bytes, bandwidth and time, by layer", answers="waits")
def collectives(run: Run) -> Part:
    """Communication between ranks: a table by collective, group and size, and a table by layer and phase.

    docs/collectives.md describes the columns. *Bandwidth* is the larger of In and Out, divided by the time: a lower
    bound, because the time includes waiting for the slowest rank.
    """
    warnings: list[Part] = [*about_sums(run), warnings_below(run)]
    if not (uses := [*_uses(run)]):
        return stacked(["This run recorded no communication between ranks.", *warnings])
    tables = _Tables(run, uses)
    return spaced([tables.by_collective(), tables.by_layer(), stacked([*tables.sentences(), *warnings])])


class _Tables:
    """The two tables of the uses of a run, at least one. If a run has both kinds, a column says where each ran."""

    def __init__(self, run: Run, uses: Sequence[_Use]) -> None:
        self._uses = uses
        # By ``on_host``:
        self._names = {False: run.meta.device_heading, True: "CPU"}
        self._wholes = {on_host: sum(use.ns or 0 for use in uses if use.on_host is on_host) for on_host in self._names}
        present = [self._names[on_host] for on_host in sorted({use.on_host for use in uses})]
        self._on, self._time = (["On"], "Time") if len(present) > 1 else ([], f"{present[0]} time")

    def by_collective(self) -> ReportTable:
        rows = [
            [*line.key, *map(_size_text, line.sizes), *line.ran_on, *line.calls_and_time, line.bandwidth_text]
            for line in self._summed(_what, _sizes)
        ]
        headings = [*_WHAT, "In", "Out", *self._on, "Calls", self._time, "Avg", "Share", "Bandwidth"]
        return ReportTable.of_cells(headings, rows).of("by_collective")

    def by_layer(self) -> ReportTable:
        rows = [[*line.key, *line.ran_on, line.bytes_text, *line.calls_and_time] for line in self._summed(_where)]
        headings = ["Module", "Phase", *self._on, "Bytes", "Calls", self._time, "Avg", "Share"]
        return ReportTable.of_cells(headings, rows).of("by_layer")

    def _summed(
        self, key: Callable[[_Use], tuple[Cell, ...]], apart: Callable[[_Use], tuple[str, ...]] = lambda use: ()
    ) -> list[_Line]:
        """The lines of a table, the largest first. Equal texts are one line, unless ``apart`` keeps them apart."""
        lines: dict[object, _Line] = {}
        for use in self._uses:
            cells = key(use)
            texts = use.on_host, tuple(map(str, cells)), apart(use)
            ran_on: list[Cell] = [self._names[use.on_host]] if self._on else []
            lines.setdefault(texts, _Line(cells, ran_on, self._wholes[use.on_host])).add(use)
        return sorted(lines.values(), key=lambda line: (line.ns, line.nbytes), reverse=True)

    def sentences(self) -> Iterator[str]:
        wholes = [f"{format_time(ns)} {self._names[on_host]} time" for on_host, ns in self._wholes.items() if ns]
        if wholes:
            yield f"100 % is all communication: {', '.join(wholes)}."
        if self._wholes[True]:
            span = "the time from its beginning to its end, with the waiting for the slowest rank"
            yield f"CPU time of a collective is {span}."
        if any(use.ns is None and not use.on_host for use in self._uses):
            yield f"{UNKNOWN} under {self._time}: no kernel of it was recorded, only its range on the CPU."
        if any(use.ns is None and use.on_host for use in self._uses):
            yield f"{UNKNOWN} under {self._time}: the run does not say how long it took."


def _uses(run: Run) -> Iterator[_Use]:
    """The rows of collectives, each collective once: if a rank has communication kernels, these count and the ranges
    that launched them do not."""
    sources = [_source(frames) for frames in run.rows.frames]
    numbers, ranks = run.rows.columns["frames"], run.rows.columns["rank"]
    with_kernels = {rank for rank, number in zip(ranks, numbers) if sources[number] is _Source.KERNEL}
    for index, number in enumerate(numbers):
        source = sources[number]
        if source is None or (source is _Source.LAUNCH and ranks[index] in with_kernels):
            continue
        row = run.rows[index]
        if row.calls:  # a row without calls has only memory that an op around it allocated
            collective = collective_of(row.frames) or Collective(short_kernel_name(row.frames[-1].name))
            took = {_Source.KERNEL: row.cost.device_ns, _Source.HOST_RANGE: row.cost.collective_ns or None}
            yield _Use(row, collective, source is _Source.HOST_RANGE, took.get(source))


def _source(frames: Sequence[Frame]) -> _Source | None:
    """The source of a row whose innermost frame is a collective; None for other rows, and for parts of a collective."""
    if not frames:
        return None
    last = frames[-1]
    if last.kind == FrameKind.KERNEL:
        is_one = shows_collective(last) or kind_of_work(last.name) is KernelWork.COMMUNICATION
        return _Source.KERNEL if is_one else None
    if not shows_collective(last) or any(map(shows_collective, frames[:-1])):
        return None
    return _Source.HOST_RANGE if is_host_collective(last.name) else _Source.LAUNCH


def _what(use: _Use) -> tuple[Cell, ...]:
    """The key of the first table: a cell for each of ``_WHAT``. Groups of one description are one group, whose name
    differs from rank to rank."""
    collective = use.collective
    group = collective.group if collective.description in _UNNAMED else collective.description
    return (
        printable(collective.name),
        printable(group) or UNKNOWN,
        UNKNOWN if collective.size is None else format_number(collective.size),
        printable(collective.dtype) or UNKNOWN,
    )


def _sizes(use: _Use) -> tuple[str, ...]:
    """What keeps rows of the first table apart: the sizes as they are shown, of all-to-alls whether they are known."""
    sizes = use.collective.bytes_in, use.collective.bytes_out
    if use.collective.name == _OF_ANY_SIZE:
        return tuple(str(size is None) for size in sizes)
    return tuple(str(_size_text(set() if size is None else {size})) for size in sizes)


def _where(use: _Use) -> tuple[Cell, ...]:
    """The key of the second table: the layer, and the phase."""
    no_layer = OUTSIDE_NAME if use.row.selected else NOT_SELECTED_NAME
    name = use.row.layer.name if use.row.layer else no_layer
    layers = len(use.row.shared_by)
    return (f"{name} ({layers} layers below)" if layers else name, phase_cell(use.row.phase))
