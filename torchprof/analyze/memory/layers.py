"""The rows and columns of the memory report's table by layer, for one device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import add

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures, figure_of
from torchprof.analyze.layers.entries import Entry
from torchprof.analyze.report import ReportTable, TableRow, branches
from torchprof.run.cost import Cost, Figure, Measure, Unit
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import FORWARD, NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME, PHASES

_ALLOCATED = Measure("Allocated", Unit.BYTES, (("cpu_allocated", 1), ("device_allocated", 1)))
_FREED = Measure("Freed", Unit.BYTES, (("cpu_freed", 1), ("device_freed", 1)))
_NET = Measure("Net", Unit.BYTES, (*_ALLOCATED.fields, *((name, -1) for name, _ in _FREED.fields)))
_FIELDS = [name for name, _ in _NET.fields]


def columns_of_phases(phases: Sequence[str]) -> Iterator[Column]:
    """The columns of the table for these phases."""
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        for measure in (_ALLOCATED, _FREED, _NET):
            heading = f"{lead}{measure.heading.lower()}" if lead else measure.heading
            yield Column(heading, "cost", phase, measure)
        yield Column(f"{lead}peak" if lead else "Peak", "peak", phase)
        if phase == FORWARD:
            yield Column("Activations", "activations")
            yield Column("Saved for backward", "saved")


@dataclass(frozen=True)
class MemoryUse:
    """Bytes allocated and freed on one device, by layer and phase: self, and total with all layers below."""

    own: Mapping[tuple[int, str], Cost]
    total: Mapping[tuple[int, str], Cost]

    @classmethod
    def of(cls, run: Run) -> list[MemoryUse]:
        """The memory use of each device in ``run.memory``, in one pass over the rows."""
        names, columns = run.rows.devices, run.rows.columns
        sums: dict[tuple[str, int], defaultdict[tuple[int, str], list[int]]] = {
            (memory.device, memory.rank): defaultdict(lambda: [0] * len(_FIELDS)) for memory in run.memory
        }
        figures = zip(*(columns[name] for name in _FIELDS))
        places = zip(*(columns[name] for name in ("device", "rank", "layer", "phase")))
        for (device, rank, layer, phase), values in zip(places, figures):
            of_device = sums.get((names[device], rank))
            if of_device is not None:
                entry = of_device[layer, PHASES[phase]]
                entry[:] = map(add, entry, values)
        own = ({key: Cost(**dict(zip(_FIELDS, entry))) for key, entry in each.items()} for each in sums.values())
        return [cls(each, run.layers.roll_up_by_phase(each)) for each in own]

    @property
    def by_layers(self) -> bool:
        """Whether any of it was in a layer."""
        return any(cost and layer != OUTSIDE for (layer, _), cost in self.own.items())

    def forward_bytes(self, layer: int) -> int:
        """The bytes allocated in the forward of a layer and all layers below it."""
        return _ALLOCATED.of(self.total.get((layer, FORWARD), Cost()))


def entries_of_device(
    run: Run,
    device: int,
    phases: Sequence[str],
    used: Sequence[MemoryUse],
    samples: Iterable[tuple[SampleKey, Spread]],
    varying: Mapping[tuple[str, ...], bool | None],
) -> list[Entry]:
    """The rows of the models with all layers below them, then the rows of work of no layer.

    ``used``: the memory use of each device of the run; ``device``: the index of the device to show, which has these
    ``samples``. ``varying``: what ``varying_calls`` returns.
    """
    memory, here = run.memory[device], used[device]
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    calls: dict[int, int] = {}
    own_kept: dict[int, int] = {}
    for key, spread in samples:
        if key.measure == "peak_bytes":
            peaks[key.layer][key.phase] = spread.max
        elif key.measure == "kept_bytes":
            own_kept[key.layer], calls[key.layer] = spread.sum, spread.count
    of_rank = [other for other in range(len(used)) if run.memory[other].rank == memory.rank]
    kept = run.layers.roll_up([own_kept.get(index, 0) for index in range(len(run.layers))])
    selected = None if run.meta.paths is None else set(run.meta.paths)
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
                of_rank, key=lambda other: (used[other].forward_bytes(index), run.memory[other].peak_bytes)
            )
            called = bool(node.calls or node.total)
            figures = Figures(
                {phase: here.own.get((index, phase), Cost()) for phase in phases},
                {phase: here.total.get((index, phase), Cost()) for phase in phases},
                unknown=not called,
            )
            returned = node.layer.output_bytes if main_device == device else None
            kept_by = calls.get(index) if called else None
            figures.more = {
                **dict(_peaks(figures, peaks[index])),
                ("activations", FORWARD, False): figure_of(returned, "first" if varying[path] is not False else ""),
                ("saved", FORWARD, False): figure_of(kept[index] / kept_by if kept_by else None),
                ("saved", FORWARD, True): figure_of(own_kept.get(index, 0) / kept_by if kept_by else None),
            }
            lines[path].figures = figures
    models = [line for path, line in lines.items() if len(path) == 1]
    for name, layer in ((NOT_SELECTED_NAME, NOT_SELECTED), (OUTSIDE_NAME, OUTSIDE)):
        costs = {phase: here.own.get((layer, phase), Cost()) for phase in phases}
        if any(costs.values()):
            models.append(Entry(name, Figures(costs, costs), is_layer=False))
    return models


def _peaks(figures: Figures, peaks: Mapping[str, int]) -> Iterator[tuple[tuple[str, str, bool], Figure]]:
    """The peaks of a layer by phase; unknown if it worked in a phase and has none there."""
    for phase, total in figures.total.items():
        if phase in peaks or figures.unknown or total:
            yield ("peak", phase, False), figure_of(peaks.get(phase))


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
