"""The memory report: the peak of each device, what was live then, memory over time, and a table by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from torchprof.analyze.columns import Column, column_called
from torchprof.analyze.figures import Figures, figure_of, figures_of_layers, varying_calls
from torchprof.analyze.layers import Entry, down_to, entries_by_path, keep_top, sort_entries, table_rows
from torchprof.analyze.report import Part, ReportTable, TableRow, name_of_layer, phase_cell, report, spaced, stacked
from torchprof.analyze.sentences import peak_in_words, summed_over, warnings_below
from torchprof.errors import TorchprofError
from torchprof.run.formats import UNKNOWN, Cell, Figure, Unit, format_memory, format_number, format_share, format_time
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layers
from torchprof.run.measures import Cost, Measure, SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS, Holder, Memory, Timeline
from torchprof.run.words import FORWARD, NO_LAYERS, NOT_SELECTED, OUTSIDE, PHASES, phase_of

_LIVE_SHOWN = 10
"""The rows of live memory by layer, if ``top`` is not given."""


@report("memory", "live memory at the peak by layer and kind, peaks of layers, saved activations", answers="fit")
def memory(
    run: Run, *, depth: int | None = None, sort_by: str | None = None, top: int | None = None, phase: str | None = None
) -> Part:
    """The peak of each device and what was live then, memory over time (``Profile(..., with_timeline=True)``), and a
    table by layer. docs/memory.md describes kinds and columns.

    ``phase``: only the columns of one phase. Memory that was live at the peak below ``depth`` counts for the layer
    above. ``top``: the number of rows of live memory (default: 10) and of layers, by their self in the column
    ``sort_by`` (default: Allocated).

    Raises TorchprofError for a run without memory and an unknown column.
    """
    phases = _phases(run, phase)
    columns = list(_columns_of(phases))
    order = column_called(sort_by, columns) if sort_by is not None else None
    samples = samples_by_device(run)
    by_layer = _MemoryByLayer(run, phases, _MemoryUse.of(run), varying_calls(run))
    parts: list[Part] = []
    for device, device_memory in enumerate(run.memory):
        of_device = samples.get((device_memory.rank, device_memory.device), ())
        parts += about_peak(run, device_memory, of_device, depth, _LIVE_SHOWN if top is None else top)
        parts += _picture(run, device_memory)
        if not by_layer.used[device].is_in_layers:
            continue
        entries = by_layer.entries(device, of_device)
        if order is not None:
            sort_entries(entries, order)
        down_to(entries, depth)
        hidden = [] if top is None else keep_top(entries, order or columns[0], top)
        heading = "Module" if len(run.memory) == 1 else f"Module, on {name_of_device(run, device_memory)}"
        headings = [heading, *(column.heading for column in columns)]
        rows = table_rows(entries, lambda entry: (column.text(entry.figures, None) for column in columns))
        table = ReportTable(headings, rows)
        parts += [table.of("layers", device=device_memory.device, rank=device_memory.rank), *hidden]
    if not run.memory:
        has_allocated = not run.rows.nonzero.isdisjoint(("cpu_allocated", "device_allocated"))
        older = 'This run has no peaks: an older torchprof wrote it. What each layer allocated is in the "tree" report.'
        parts.append(older if has_allocated else "No allocation was recorded.")
    return spaced([*parts, stacked(_below_tables(run, by_layer.used))])


def _phases(run: Run, phase: str | None) -> list[str]:
    """The phases to show. Raises TorchprofError for a run without memory."""
    if "cpu_allocated" not in run.meta.requested:
        raise TorchprofError(
            "Memory was not recorded. Use torchprof.Profile(model, profile_memory=True), "
            "or its trace with torch.profiler.profile(profile_memory=True)."
        )
    return list(run.phases()) if phase is None else [phase]


def _below_tables(run: Run, used: Sequence[_MemoryUse]) -> Iterator[Part]:
    """The sentences below the tables, the run's warnings last."""
    if any(use.is_in_layers for use in used) and (over := summed_over(run)):
        yield (
            f"Allocated, Freed and Net are sums over {over}. Of one call are Peak (the largest of all calls), "
            "Activations (the first call) and Saved for backward (the mean of the calls of the model: it adds up)."
        )
    if any(memory.growth is None for memory in run.memory):
        yield "Whether memory grows call by call is unknown: at least 8 calls of a model in one cycle tell."
    if run.memory and run.timeline is None:
        yield "To see memory over time, record with_timeline=True (Profile, from_trace)."
    if run.timeline is not None and len(run.metas) > 1:
        yield f"Memory over time is that of rank {run.timeline.rank}: a run has one timeline."
    yield warnings_below(run)


def name_of_device(run: Run, memory: Memory) -> str:
    """The name of a device, with its rank if the run has several."""
    return memory.device if len(run.metas) == 1 else f"{memory.device} of rank {memory.rank}"


# The memory peak of each device

_MODELS_OWN = ("parameters", "buffers", "gradients")  # the kinds whose size at the start is known, also if it is 0
_FREED_SINCE = "(live at the start, freed since)"

_Samples = Sequence[tuple[SampleKey, Spread]]


def samples_by_device(run: Run) -> Mapping[tuple[int, str], _Samples]:
    """The samples of memory by rank and device."""
    measures = ("peak_bytes", "kept_bytes", "device_peak_bytes")
    samples = (sample for sample in run.samples.items() if sample[0].measure in measures)
    return lists_by_key(((key.rank, key.device), (key, spread)) for key, spread in samples)


def about_peak(run: Run, memory: Memory, samples: _Samples, depth: int | None, shown: int) -> Iterator[Part]:
    """The peak of one device: a sentence, the live memory by kind and by layer, and torch's allocator statistics.

    ``samples``: those of the device. ``shown``: the number of rows of the table by layer.
    """
    device, peak = name_of_device(run, memory), peak_in_words(run, memory.peak_bytes)
    if memory.peak_bytes <= 0:
        yield f"{device} peak: never above the start."
    elif not memory.held:
        yield f"{device} peak: {peak} above the start. When and where was not recorded."
    else:
        where = _where_reached(run, memory, samples)
        start = "the start of its cycle" if run.meta.cycles > 1 else "the start"
        when = f"above {start}, after {format_time(memory.peak_ns)}"
        yield f"{device} peak: {peak} {when}{where}. Live at the peak:"
    if memory.held or memory.before:
        yield _by_kind(memory)
    if memory.held:
        yield _by_layer(run, memory, depth, shown)
    yield from _growth(run, memory, shown)
    if memory.allocator:
        headings = [f"torch's allocator of {device}", "At the start", "At the end"]
        rows = [(name, format_memory(start), format_memory(end)) for name, start, end in memory.allocator]
        yield ReportTable.of_cells(headings, rows).of("allocator", device=memory.device, rank=memory.rank)
    if (others := memory.others) is not None:
        yield f"{format_memory(others.nbytes)} of other tensors and parameters are in {holder_in_words(others)}."
    if memory.before is None:
        yield "Memory from before the recording is unknown, and its frees: the peak may be lower than shown."


def growth_in_words(memory: Memory) -> str:
    """What stays of each call, and what keeps it, without a period."""
    calls = max((growth.calls for growth in memory.growth or ()), default=0)
    text = f"{format_memory(round(memory.growth_per_call or 0))} of each of {calls:,} calls stay"
    if (holder := memory.holder) is None:
        return text
    if holder.kind == "tensor":
        return f"{text} in the autograd graph of `{holder.name}` ({holder.where})"
    return f"{text} in {holder_in_words(holder)}"


def holder_in_words(holder: Holder) -> str:
    """What keeps memory: "the list `history` (train.py), with 28 tensors of float32"."""
    where = f"the {holder.kind} `{holder.name}` ({holder.where})"
    if holder.kind == "tensor":
        return f"{where}, of {holder.dtype}"
    graphs = " and autograd graphs" * holder.with_graph
    return f"{where}, with {holder.tensors:,} tensor{'s' * (holder.tensors != 1)} of {holder.dtype}{graphs}"


def _growth(run: Run, memory: Memory, shown: int) -> Iterator[Part]:
    """What stays call by call: a sentence, and a table of where it is made."""
    if memory.growth is None:
        return
    if not memory.growth:
        yield "No memory stays allocated call by call."
        return
    yield f"{growth_in_words(memory)}."
    rows = []
    for growth in memory.growth[:shown]:
        place = [name_of_layer(run, growth.layer), phase_cell(phase_of(growth.layer, growth.phase)), growth.kind]
        sizes = map(format_memory, (round(growth.nbytes / growth.calls), growth.least, growth.most, growth.nbytes))
        rows.append(TableRow([*place, *sizes, format_number(growth.calls)], layer=growth.layer))
    headings = ["Grows in", "Phase", "Kind", "A call (mean)", "Least", "Most", "In all", "Calls"]
    yield ReportTable(headings, rows).of("growth", device=memory.device, rank=memory.rank)


def _where_reached(run: Run, memory: Memory, samples: _Samples) -> str:
    """The layer and phase in which the peak of a device was reached, as the end of a sentence; "" if unknown."""
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
    sizes, blocks = Counter[str](), Counter[str]()
    for held in memory.held:
        kind = held.kind if held.nbytes >= 0 else _FREED_SINCE
        sizes[kind] += held.nbytes
        blocks[kind] += held.blocks
    before = dict(memory.before or ())
    has_unknown = memory.before is not None and memory.device == "cpu"  # its allocator does not tell what is live
    rows: list[TableRow] = []
    for kind in sorted({*sizes, *before}, key=lambda kind: (-sizes[kind], kind)):
        is_freed = kind == _FREED_SINCE
        is_known = memory.before is not None and (kind in _MODELS_OWN or kind in before)
        at_start = format_memory(before.get(kind, 0)) if is_known else "" if is_freed else UNKNOWN
        share = "" if is_freed else _share(sizes[kind], memory)
        count = format_number(blocks[kind]) if blocks[kind] else ""
        rows.append(TableRow([kind, format_memory(sizes[kind]), share, count, at_start], is_part=not is_freed))
    if has_unknown and "unknown" not in sizes:
        rows.append(TableRow(["unknown", "", "", "", UNKNOWN]))
    share = "" if _FREED_SINCE in sizes else format_share(1)
    at_start = Figure.of_sum(sum(before.values()), memory.before is not None and not has_unknown).text(format_memory)
    rows.append(TableRow(["all", format_memory(memory.peak_bytes), share, "", at_start], is_part=False))
    table = ReportTable(["Kind", "At the peak", "Share", "Blocks", "Live at the start"], rows)
    return table.of("live_by_kind", device=memory.device, rank=memory.rank)


def _by_layer(run: Run, memory: Memory, depth: int | None, shown: int) -> ReportTable:
    """The memory that was live at the peak by layer, phase and kind, largest first; hidden rows are summed in one."""
    sizes, blocks = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    for held in memory.held:
        if held.nbytes >= 0:
            path = run.layers[held.layer].path if held.layer >= 0 else ()
            layer = run.layers.index_of[path[: depth + 1]] if path and depth is not None else held.layer
            sizes[layer, held.phase, held.kind] += held.nbytes
            blocks[layer, held.phase, held.kind] += held.blocks
    largest_first = sorted(sizes, key=lambda place: (-sizes[place], place))

    def figures(places: Sequence[tuple[int, str, str]]) -> list[Cell]:
        nbytes = sum(sizes[place] for place in places)
        return [format_memory(nbytes), _share(nbytes, memory), format_number(sum(blocks[place] for place in places))]

    rows = []
    for layer, phase, kind in largest_first[:shown]:
        place = [name_of_layer(run, layer), phase_cell(phase_of(layer, phase)), kind]
        rows.append(TableRow([*place, *figures([(layer, phase, kind)])], layer=layer))
    if rest := largest_first[shown:]:
        rows.append(TableRow([f"({len(rest)} more)", "", "", *figures(rest)], is_part=False))
    table = ReportTable(["Made in", "Phase", "Kind", "At the peak", "Share", "Blocks"], rows)
    return table.of("live_by_layer", device=memory.device, rank=memory.rank)


def _share(nbytes: int, memory: Memory) -> Cell:
    """The share of all memory that was allocated since the start and live at the peak."""
    whole = sum(held.nbytes for held in memory.held if held.nbytes > 0)
    return format_share(nbytes / whole) if whole else ""


# The table by layer

_ALLOCATED = Measure("Allocated", Unit.BYTES, (("cpu_allocated", 1), ("device_allocated", 1)))
_FREED = Measure("Freed", Unit.BYTES, (("cpu_freed", 1), ("device_freed", 1)))
_NET = Measure("Net", Unit.BYTES, (*_ALLOCATED.fields, *((name, -1) for name, _ in _FREED.fields)))
_FIELDS = tuple(name for name, _ in _NET.fields)


@dataclass(frozen=True)
class _MemoryUse:
    """Bytes allocated and freed on one device, by layer and phase: self, and total with all layers below."""

    own: Mapping[tuple[int, str], Cost]
    total: Mapping[tuple[int, str], Cost]

    @classmethod
    def of(cls, run: Run) -> list[_MemoryUse]:
        """The memory use of each device in ``run.memory``, in one pass over the rows."""
        used: dict[tuple[str, int], dict[tuple[int, str], Cost]]
        used = {(memory.device, memory.rank): {} for memory in run.memory}
        sums = run.rows.summed(("device", "rank", "layer", "phase"), _FIELDS)
        for (device, rank, layer, phase), values in sums.items():
            if (own := used.get((run.rows.devices[device], rank))) is not None:
                own[layer, PHASES[phase]] = Cost(**dict(zip(_FIELDS, values)))
        return [cls(own, run.layers.roll_up_by_phase(own)) for own in used.values()]

    @property
    def is_in_layers(self) -> bool:
        """Whether any of it was in a layer, or in one that was not selected."""
        return any(cost and layer != OUTSIDE for (layer, _), cost in self.own.items())


def _columns_of(phases: Sequence[str]) -> Iterator[Column]:
    """The columns of the table for these phases."""
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        for measure in (_ALLOCATED, _FREED, _NET):
            yield Column(f"{lead}{measure.heading}".capitalize(), "cost", phase, measure)
        yield Column(f"{lead}peak".capitalize(), "peak", phase)
        if phase == FORWARD:
            yield Column("Activations", "activations")
            yield Column("Saved for backward in a model call", "saved")


@dataclass(frozen=True)
class _MemoryByLayer:
    """What the tables of all devices are made of. ``used``: the use of each device in ``run.memory``. ``varying``: what
    ``varying_calls`` returns."""

    run: Run
    phases: Sequence[str]
    used: Sequence[_MemoryUse]
    varying: Mapping[tuple[str, ...], bool | None]

    def entries(self, device: int, samples: _Samples) -> list[Entry]:
        """The rows of a device: the models with all layers below them, then work of no layer. ``samples``: those of
        the device."""
        run = self.run
        of_rank = [other for other, memory in enumerate(run.memory) if memory.rank == run.memory[device].rank]
        figures_of_calls = _figures_of_calls(run.layers, samples)
        figures = {}
        for path, of_layer in figures_of_layers(run, run.phases()).items():
            figures[path] = Figures()
            if of_layer.total:  # blank for layers that were not selected
                layer = run.layers.index_of[path]
                figures[path] = self._figures(device, layer, is_unknown=of_layer.unknown)
                figures[path].more = {
                    ("activations", FORWARD, False): self._activations(device, layer, of_rank),
                    **figures_of_calls(layer, figures[path]),
                }
        entries = [entry for path, entry in entries_by_path(figures).items() if len(path) == 1]
        for layer, name in NO_LAYERS.items():
            of_no_layer = self._figures(device, layer)
            if any(of_no_layer.own.values()):
                entries.append(Entry(name, replace(of_no_layer, total=of_no_layer.own), is_layer=False))
        return entries

    def _figures(self, device: int, layer: int, *, is_unknown: bool = False) -> Figures:
        own, total = (
            {phase: costs.get((layer, phase), Cost()) for phase in self.phases}
            for costs in (self.used[device].own, self.used[device].total)
        )
        return Figures(own, total, unknown=is_unknown)

    def _activations(self, device: int, layer: int, of_rank: Sequence[int]) -> Figure:
        """The outputs of one call, unknown unless the layer allocated most on this one of the devices ``of_rank``."""

        def allocated(other: int) -> int:
            return _ALLOCATED.of(self.used[other].total.get((layer, FORWARD), Cost()))

        is_here = device == max(of_rank, key=lambda other: (allocated(other), self.run.memory[other].peak_bytes))
        is_first = self.varying[self.run.layers[layer].path] is not False
        return figure_of(self.run.layers[layer].output_bytes if is_here else None, "first" if is_first else "")


def _figures_of_calls(
    layers: Layers, samples: _Samples
) -> Callable[[int, Figures], dict[tuple[str, str, bool], Figure]]:
    """A function that returns figures of a layer, from its index and its other figures: its peak in a call, in each
    phase, unknown if it worked and has none; and what it saved for backward in a call of the outermost layer around it
    that was called."""
    peaks: defaultdict[int, dict[str, int]] = defaultdict(dict)
    saved = [0] * len(layers)
    calls: dict[int, int] = {}
    for key, spread in samples:
        if key.measure == "peak_bytes":
            peaks[key.layer][key.phase] = spread.max
        elif key.measure == "kept_bytes":
            saved[key.layer], calls[key.layer] = spread.sum, spread.count
    for layer in calls:  # a layer that was called before the first allocation has no sample of a peak
        peaks[layer].setdefault(FORWARD, 0)
    of_model = [
        next((calls[above] for above in layers.lineage(layer) if above in calls), 0) for layer in range(len(layers))
    ]
    all_saved = layers.roll_up(saved)

    def figures(layer: int, of_layer: Figures) -> dict[tuple[str, str, bool], Figure]:
        count = 0 if of_layer.unknown else of_model[layer]
        of_peaks = {
            ("peak", phase, False): figure_of(peaks[layer].get(phase))
            for phase, total in of_layer.total.items()
            if phase in peaks[layer] or of_layer.unknown or total
        }
        return of_peaks | {
            ("saved", FORWARD, is_self): figure_of(nbytes[layer] / count if count else None)
            for is_self, nbytes in ((False, all_saved), (True, saved))
        }

    return figures


# Memory over time

_PICTURE_WIDTH, _PICTURE_HEIGHT = 80, 10
_FILLS = dict(zip(KINDS, "PG█O▒░oW"))


def _picture(run: Run, memory: Memory) -> Iterator[str]:
    """Memory above the start over time. Each column shows the live memory by kind at the maximum of its interval."""
    timeline = run.timeline
    if not timeline or memory.device not in timeline.devices or memory.rank != timeline.rank:
        return
    end = max(timeline.columns["time_ns"]) + 1
    maxima = _maxima(timeline, timeline.devices.index(memory.device), end)
    highest = max(map(sum, maxima))
    if highest <= 0:
        return
    row_bytes = highest / _PICTURE_HEIGHT
    columns = [_column(live, row_bytes) for live in maxima]
    labels = [str(format_memory(highest)), *[""] * (_PICTURE_HEIGHT - 2), str(format_memory(round(row_bytes)))]
    width = max(map(len, labels))
    rows = [
        f"{label:>{width}} ┤{''.join(column[row] for column in columns)}".rstrip()
        for label, row in zip(labels, range(_PICTURE_HEIGHT - 1, -1, -1))
    ]
    axis = f"{'0':>{width}} ┼{'─' * _PICTURE_WIDTH}"
    times = f"{'':>{width}}  0{format_time(end)!s:>{_PICTURE_WIDTH - 1}}"
    drawn = [kind for number, kind in enumerate(_FILLS) if any(live[number] for live in maxima)]
    legend = "   ".join(f"{_FILLS[kind]} {kind}" for kind in drawn)
    cycle = " of the last cycle" if run.meta.cycles > 1 else ""
    scale = f"a column is {format_time(end / _PICTURE_WIDTH)}, a row {format_memory(round(row_bytes))}"
    title = f"Memory on {memory.device} above the start{cycle}, over time: {scale}."
    if timeline.dropped:
        title += f" The last {timeline.dropped:,} allocations and frees were not kept."
    yield "\n".join([title, legend, *rows, axis, times])


def _column(live: Sequence[int], row_bytes: float) -> str:
    """A column of the picture from the bottom up: each kind on top of the one before."""
    column, height = "", 0
    for fill, nbytes in zip(_FILLS.values(), live):
        height += nbytes
        column += fill * (round(min(height, sum(live)) / row_bytes) - len(column))
    return column.ljust(_PICTURE_HEIGHT)


def _maxima(timeline: Timeline, device: int, end: int) -> list[list[int]]:
    """For each column of the picture, the live bytes of each kind at the maximum of its interval; the last kind is the
    unknown one. ``end``: the end of the last interval, in ns.

    Example: +3 and -3 bytes in the first interval, +1 in the second, nothing in the third: the maxima are 3, 1 and 1.
    """
    columns = (timeline.columns[name] for name in ("time_ns", "nbytes", "device", "kind"))
    changes = ((time, nbytes, kind) for time, nbytes, on, kind in zip(*columns) if on == device)
    time, nbytes, kind = next(changes, (inf, 0, 0))
    live = [0] * (len(KINDS) + 1)
    maxima = []
    for interval in range(1, _PICTURE_WIDTH + 1):
        maximum, total = list(live), sum(live)
        highest = total
        while time * _PICTURE_WIDTH < interval * end:
            live[kind] += nbytes  # index -1, the unknown kind, is the last
            total += nbytes
            if total > highest:
                highest, maximum = total, list(live)
            time, nbytes, kind = next(changes, (inf, 0, 0))
        maxima.append(maximum)
    return maxima
