"""The rows and columns of the memory report's table by layer, for one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torchprof.analyze.columns import Column, CostColumn, SelfOrTotalColumn
from torchprof.analyze.figures import Figures
from torchprof.analyze.layers.entries import Entry
from torchprof.analyze.report import ReportTable, TableRow, branches
from torchprof.analyze.varying import varying_calls
from torchprof.run.cost import UNKNOWN, Cell, Cost, Measure, Unit, format_memory
from torchprof.run.memory import Memory
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME, PHASES

_ALLOCATED = Measure("Allocated", Unit.BYTES, (("cpu_allocated", 1), ("device_allocated", 1)))
_FREED = Measure("Freed", Unit.BYTES, (("cpu_freed", 1), ("device_freed", 1)))
_NET = Measure("Net", Unit.BYTES, (*_ALLOCATED.fields, *((name, -1) for name, _ in _FREED.fields)))
_FIELDS = [name for name, _ in _NET.fields]


@dataclass
class MemoryFigures(Figures):
    """The figures of a layer on one device. ``peaks``: by phase. ``returned``: the bytes of the outputs of its first
    call; ``varies``: later calls may have returned other sizes. ``kept`` and ``own_kept``: the bytes that one forward
    call saved for backward, with and without the layers below. None: unknown."""

    peaks: dict[str, int] = field(default_factory=dict)
    returned: int | None = None
    varies: bool = False
    kept: float | None = None
    own_kept: float | None = None


@dataclass(frozen=True)
class CallPeakColumn(Column):
    """The peak above the start inside one call, or inside one interval of backward; the largest of them."""

    phase: str = FORWARD

    def of(self, figures: Figures) -> float:
        return figures.peaks.get(self.phase, 0) if isinstance(figures, MemoryFigures) else 0

    def text(self, figures: Figures, whole: float | None) -> Cell:
        if not isinstance(figures, MemoryFigures) or not figures.total:
            return ""
        if self.phase in figures.peaks:
            return format_memory(figures.peaks[self.phase])
        return UNKNOWN if figures.unknown or figures.total[self.phase] else ""


@dataclass(frozen=True)
class ActivationsColumn(Column):
    """The bytes of the outputs of one call."""

    def of(self, figures: Figures) -> float:
        return (figures.returned or 0) if isinstance(figures, MemoryFigures) else 0

    def text(self, figures: Figures, whole: float | None) -> Cell:
        if not isinstance(figures, MemoryFigures) or not figures.total:
            return ""
        if figures.returned is None:
            return UNKNOWN
        size = format_memory(figures.returned)
        return size.written(f"first {size}") if figures.varies else size


@dataclass(frozen=True)
class KeptColumn(SelfOrTotalColumn):
    """The bytes that one forward call saved for backward, the mean over the calls."""

    def of(self, figures: Figures) -> float:
        if not isinstance(figures, MemoryFigures):
            return 0
        return (figures.own_kept if self.is_self else figures.kept) or 0

    def text(self, figures: Figures, whole: float | None) -> Cell:
        if not isinstance(figures, MemoryFigures) or not figures.total:
            return ""
        return UNKNOWN if figures.kept is None else format_memory(round(figures.kept))


def columns_of_phases(phases: Sequence[str]) -> Iterator[Column]:
    """The columns of the table for these phases."""
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        for measure in (_ALLOCATED, _FREED, _NET):
            heading = f"{lead}{measure.heading.lower()}" if lead else measure.heading
            yield CostColumn(heading, True, phase, measure)
        yield CallPeakColumn(f"{lead}peak" if lead else "Peak", True, phase)
        if phase == FORWARD:
            yield ActivationsColumn("Activations")
            yield KeptColumn("Saved for backward")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes allocated and freed on one device, by layer and phase: self, and total with all layers below."""

    own: Mapping[tuple[int, str], Cost]
    total: Mapping[tuple[int, str], Cost]

    @classmethod
    def of(cls, run: Run, memory: Memory) -> MemoryUse:
        rows, columns = run.rows, run.rows.columns
        sums: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * len(_FIELDS))
        device = rows.devices.index(memory.device) if memory.device in rows.devices else None
        for at, (number, rank) in enumerate(zip(columns["device"], columns["rank"])):
            if number == device and rank == memory.rank:
                entry = sums[columns["layer"][at], PHASES[columns["phase"][at]]]
                for of_field, name in enumerate(_FIELDS):
                    entry[of_field] += columns[name][at]
        own = {key: Cost(**dict(zip(_FIELDS, entry))) for key, entry in sums.items()}
        return cls(own, run.layers.roll_up_by_phase(own))

    @property
    def by_layers(self) -> bool:
        """Whether any of it was in a layer."""
        return any(cost and layer != OUTSIDE for (layer, _), cost in self.own.items())

    def forward_bytes(self, layer: int) -> int:
        """The bytes allocated in the forward of a layer and all layers below it."""
        return _ALLOCATED.of(self.total.get((layer, FORWARD), Cost()))


def entries_of_device(run: Run, device: int, phases: Sequence[str], used: Sequence[MemoryUse]) -> list[Entry]:
    """The rows of the models with all layers below them, then the rows of work of no layer.

    ``used``: the memory use of each device of the run; ``device``: the index of the device to show.
    """
    memory, here = run.memory[device], used[device]
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    calls: dict[int, int] = {}
    own_kept: dict[int, int] = {}
    for key, spread in run.samples.items():
        if key.rank == memory.rank and key.device == memory.device:
            if key.measure == "peak_bytes":
                peaks[key.layer][key.phase] = spread.max
            elif key.measure == "kept_bytes":
                own_kept[key.layer], calls[key.layer] = spread.sum, spread.count
    kept = run.layers.roll_up([own_kept.get(index, 0) for index in range(len(run.layers))])
    selected = None if run.meta.paths is None else set(run.meta.paths)
    varying = varying_calls(run)
    number = run.layers.index_of
    lines: dict[tuple[str, ...], Entry] = {}
    for root in range(len(run.roots)):
        for node in run.tree(None, root).walk():
            path, index = node.layer.path, number[node.layer.path]
            lines[path] = Entry(path[-1], Figures(), ".".join(path))
            if len(path) > 1:
                lines[path[:-1]].children.append(lines[path])
                if index not in calls and path[:-1] in number:
                    # A layer that is never called itself is used in the calls of its parent.
                    calls[index] = calls.get(number[path[:-1]], 0)
            if selected is not None and path not in selected:
                continue
            if index in own_kept:  # a layer that was called before the first allocation has no sample
                peaks[index].setdefault(FORWARD, 0)
            main_device = max(
                range(len(used)), key=lambda at: (used[at].forward_bytes(index), run.memory[at].peak_bytes)
            )
            called = bool(node.calls or node.total)
            lines[path].figures = MemoryFigures(
                {phase: here.own.get((index, phase), Cost()) for phase in phases},
                {phase: here.total.get((index, phase), Cost()) for phase in phases},
                unknown=not called,
                peaks=peaks[index],
                returned=node.layer.output_bytes if main_device == device else None,
                varies=varying[path] is not False,
                kept=kept[index] / calls[index] if called and calls.get(index) else None,
                own_kept=own_kept.get(index, 0) / calls[index] if called and calls.get(index) else None,
            )
    found = [line for path, line in lines.items() if len(path) == 1]
    for name, layer in ((NOT_SELECTED_NAME, NOT_SELECTED), (OUTSIDE_NAME, OUTSIDE)):
        costs = {phase: here.own.get((layer, phase), Cost()) for phase in phases}
        if any(costs.values()):
            found.append(Entry(name, Figures(costs, costs), is_layer=False))
    return found


def draw_entries(
    heading: str, lines: Sequence[Entry], columns: Sequence[Column], depth: int | None, tablefmt: str | None
) -> ReportTable:
    """The rows as a table; ``heading`` is that of the first column."""

    def below(line: Entry, level: int) -> list[Entry]:
        return [child for child in line.children if (depth is None or level < depth) and child.shown]

    table = [
        TableRow([line.cell(), *(column.text(line.figures, None) for column in columns)], lead)
        for lead, line in branches([line for line in lines if line.shown], below)
    ]
    return ReportTable([heading, *(column.heading for column in columns)], table, tablefmt)
