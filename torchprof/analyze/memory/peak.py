"""The memory peak of each device: when and where it was reached, and what was live then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from torchprof.analyze.report import Part, ReportTable, TableRow, name_of_layer, phase_cell
from torchprof.run.formats import UNKNOWN, Cell, format_memory, format_number, format_share, format_time
from torchprof.run.memory import Memory
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import FORWARD, NOT_SELECTED, phase_of

_MODELS_OWN = ("parameters", "buffers", "gradients")  # the kinds whose size at the start is known
_FREED_SINCE = "(live at the start, freed since)"

_Samples = Sequence[tuple[SampleKey, Spread]]


def samples_by_device(run: Run) -> Mapping[tuple[int, str], _Samples]:
    """The samples of memory by rank and device."""
    samples: defaultdict[tuple[int, str], list[tuple[SampleKey, Spread]]] = defaultdict(list)
    for key, spread in run.samples.items():
        if key.measure in ("peak_bytes", "kept_bytes", "device_peak_bytes"):
            samples[key.rank, key.device].append((key, spread))
    return samples


def about_peak(run: Run, memory: Memory, samples: _Samples, depth: int | None, shown: int) -> Iterator[Part]:
    """The peak of one device: a sentence, the live memory by kind and by layer, and torch's allocator statistics.
    ``samples``: those of the device."""
    device = name_of_device(run, memory)
    if memory.peak_bytes <= 0:
        yield f"{device} peak: never above the start."
    elif not memory.held:
        yield f"{device} peak: +{format_memory(memory.peak_bytes)} above the start. When and where was not recorded."
    else:
        where = _where_reached(run, memory, samples)
        start = "the start of its cycle" if run.meta.cycles > 1 else "the start"
        when = f"above {start}, after {format_time(memory.peak_ns)}"
        yield f"{device} peak: +{format_memory(memory.peak_bytes)} {when}{where}. Live at the peak:"
    if memory.held or memory.before:
        yield _by_kind(memory)
    if memory.held:
        yield _by_layer(run, memory, depth, shown)
    if memory.allocator:
        headings = [f"torch's allocator of {device}", "At the start", "At the end"]
        rows: list[list[Cell]] = [
            [name, format_memory(start), format_memory(end)] for name, start, end in memory.allocator
        ]
        yield ReportTable.of_cells(headings, rows).of("allocator", device=memory.device, rank=memory.rank)
    if memory.before is None:
        yield "Memory from before the recording is unknown, and its frees: the peak may be lower than shown."


def name_of_device(run: Run, memory: Memory) -> str:
    """The name of a device, with its rank if the run has several."""
    return memory.device if len(run.metas) == 1 else f"{memory.device} of rank {memory.rank}"


def _where_reached(run: Run, memory: Memory, samples: _Samples) -> str:
    for key, spread in samples:
        if key.measure == "device_peak_bytes" and spread.max == memory.peak_bytes:
            if key.layer >= 0:
                return f", in {run.layers[key.layer].name} ({key.phase})"
            if key.layer == NOT_SELECTED:
                return f", in layers that were not selected ({key.phase})"
            return ", outside all layers" if key.phase == FORWARD else f", outside all layers ({key.phase})"
    return ""


def _by_kind(memory: Memory) -> ReportTable:
    """The memory that was live at the peak by kind, and what the model had at the start."""
    sums: dict[str, list[int]] = {}
    for held in memory.held:
        kind = held.kind if held.nbytes >= 0 else _FREED_SINCE
        entry = sums.setdefault(kind, [0, 0])
        entry[0] += held.nbytes
        entry[1] += held.blocks
    before = dict(memory.before or ())
    rows: list[TableRow] = []
    for kind in sorted({*sums, *before}, key=lambda kind: (-sums.get(kind, [0])[0], kind)):
        nbytes, blocks = sums.get(kind, (0, 0))
        is_known = kind in _MODELS_OWN and memory.before is not None
        there = format_memory(before.get(kind, 0)) if is_known else "" if kind == _FREED_SINCE else UNKNOWN
        share = "" if kind == _FREED_SINCE else _share(nbytes, memory)
        cells: list[Cell] = [kind, format_memory(nbytes), share, format_number(blocks) if blocks else "", there]
        rows.append(TableRow(cells, is_part=kind != _FREED_SINCE))
    share = "" if _FREED_SINCE in sums else format_share(1)
    rows.append(TableRow(["all", format_memory(memory.peak_bytes), share, "", ""], is_part=False))
    drawn = ReportTable(["Kind", "At the peak", "Share", "Blocks", "Live at the start"], rows)
    return drawn.of("live_by_kind", device=memory.device, rank=memory.rank)


def _by_layer(run: Run, memory: Memory, depth: int | None, shown: int) -> ReportTable:
    """The memory that was live at the peak by layer, phase and kind, largest first; hidden rows are summed in one."""
    number = run.layers.index_of
    sums: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for held in memory.held:
        if held.nbytes >= 0:
            path = run.layers[held.layer].path if held.layer >= 0 else ()
            layer = number[path[: depth + 1]] if path and depth is not None else held.layer
            entry = sums[layer, held.phase, held.kind]
            entry[0] += held.nbytes
            entry[1] += held.blocks
    largest = sorted(sums.items(), key=lambda item: (-item[1][0], item[0]))

    def cells(name: str, phase: Cell, kind: str, nbytes: int, blocks: int) -> list[Cell]:
        return [name, phase, kind, format_memory(nbytes), _share(nbytes, memory), format_number(blocks)]

    rows = [
        TableRow(cells(name_of_layer(run, layer), phase_cell(phase_of(layer, phase)), kind, *entry), layer=layer)
        for (layer, phase, kind), entry in largest[:shown]
    ]
    if len(largest) > shown:
        nbytes, blocks = (sum(entry[field] for _, entry in largest[shown:]) for field in (0, 1))
        rows.append(TableRow(cells(f"({len(largest) - shown} more)", "", "", nbytes, blocks), is_part=False))
    drawn = ReportTable(["Made in", "Phase", "Kind", "At the peak", "Share", "Blocks"], rows)
    return drawn.of("live_by_layer", device=memory.device, rank=memory.rank)


def _share(nbytes: int, memory: Memory) -> Cell:
    """The share of all memory that was allocated since the start and live at the peak."""
    whole = sum(held.nbytes for held in memory.held if held.nbytes > 0)
    return format_share(nbytes / whole) if whole else ""
