"""The memory report: the peak of each device, what was live then, memory over time, and a table by layer."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torchprof.analyze.columns import Column, column_called
from torchprof.analyze.figures import Figures, figure_of, figures_of_layers, varying_calls
from torchprof.analyze.layers import Entry, down_to, entries_by_path, keep_top, sort_entries, table_rows
from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    name_of_layer,
    phase_cell,
    report,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import summed_over, warnings_below
from torchprof.errors import TorchprofError
from torchprof.run.formats import UNKNOWN, Cell, Figure, Unit, format_memory, format_number, format_share, format_time
from torchprof.run.layers import Layers
from torchprof.run.measures import Cost, Measure, SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS, Memory, Timeline
from torchprof.run.words import FORWARD, NO_LAYERS, NOT_SELECTED, OUTSIDE, PHASES, phase_of

# The memory peak of each device

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
        rows = [(name, format_memory(start), format_memory(end)) for name, start, end in memory.allocator]
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
    sizes, blocks = Counter[str](), Counter[str]()
    for held in memory.held:
        kind = held.kind if held.nbytes >= 0 else _FREED_SINCE
        sizes[kind] += held.nbytes
        blocks[kind] += held.blocks
    before = dict(memory.before or ())
    rows: list[TableRow] = []
    for kind in sorted({*sizes, *before}, key=lambda kind: (-sizes[kind], kind)):
        is_freed = kind == _FREED_SINCE
        is_known = kind in _MODELS_OWN and memory.before is not None
        there = format_memory(before.get(kind, 0)) if is_known else "" if is_freed else UNKNOWN
        share = "" if is_freed else _share(sizes[kind], memory)
        count = format_number(blocks[kind]) if blocks[kind] else ""
        rows.append(TableRow([kind, format_memory(sizes[kind]), share, count, there], is_part=not is_freed))
    share = "" if _FREED_SINCE in sizes else format_share(1)
    rows.append(TableRow(["all", format_memory(memory.peak_bytes), share, "", ""], is_part=False))
    drawn = ReportTable(["Kind", "At the peak", "Share", "Blocks", "Live at the start"], rows)
    return drawn.of("live_by_kind", device=memory.device, rank=memory.rank)


def _by_layer(run: Run, memory: Memory, depth: int | None, shown: int) -> ReportTable:
    """The memory that was live at the peak by layer, phase and kind, largest first; hidden rows are summed in one."""
    sizes, blocks = Counter[tuple[int, str, str]](), Counter[tuple[int, str, str]]()
    for held in memory.held:
        if held.nbytes >= 0:
            path = run.layers[held.layer].path if held.layer >= 0 else ()
            layer = run.layers.index_of[path[: depth + 1]] if path and depth is not None else held.layer
            sizes[layer, held.phase, held.kind] += held.nbytes
            blocks[layer, held.phase, held.kind] += held.blocks
    largest = sorted(sizes, key=lambda place: (-sizes[place], place))

    def figures(places: Sequence[tuple[int, str, str]]) -> list[Cell]:
        nbytes, count = (sum(of[place] for place in places) for of in (sizes, blocks))
        return [format_memory(nbytes), _share(nbytes, memory), format_number(count)]

    rows = []
    for layer, phase, kind in largest[:shown]:
        where = [name_of_layer(run, layer), phase_cell(phase_of(layer, phase)), kind]
        rows.append(TableRow([*where, *figures([(layer, phase, kind)])], layer=layer))
    if rest := largest[shown:]:
        rows.append(TableRow([f"({len(rest)} more)", "", "", *figures(rest)], is_part=False))
    drawn = ReportTable(["Made in", "Phase", "Kind", "At the peak", "Share", "Blocks"], rows)
    return drawn.of("live_by_layer", device=memory.device, rank=memory.rank)


def _share(nbytes: int, memory: Memory) -> Cell:
    """The share of all memory that was allocated since the start and live at the peak."""
    whole = sum(held.nbytes for held in memory.held if held.nbytes > 0)
    return format_share(nbytes / whole) if whole else ""


# The memory report

_LIVE_SHOWN = 10
_ALLOCATED = Measure("Allocated", Unit.BYTES, (("cpu_allocated", 1), ("device_allocated", 1)))
_FREED = Measure("Freed", Unit.BYTES, (("cpu_freed", 1), ("device_freed", 1)))
_NET = Measure("Net", Unit.BYTES, (*_ALLOCATED.fields, *((name, -1) for name, _ in _FREED.fields)))
_FIELDS = tuple(name for name, _ in _NET.fields)


@report("memory", "live memory at the peak by layer and kind, peaks of layers, saved activations", answers="fit")
def memory(
    run: Run,
    *,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    phase: str | None = None,
) -> Section:
    """The peak of each device and what was live then, memory over time, and a table by layer.

    For each device: the peak above the start, when and where it was reached; the memory that was live at the peak, by
    kind and by layer, and what the model had at the start (docs/memory.md describes the kinds). With
    ``Profile(..., with_timeline=True)`` a picture of memory over time. Then a row for each layer:

    - *Allocated*, *Freed* and *Net*: in the layer and all layers below it;
    - *Peak*: the peak inside one call above its start, layers below included, the largest over the calls; in backward,
      inside one uninterrupted interval of the layer's work;
    - *Activations*: the bytes of the outputs of one call; marked "first" if later calls may have had other shapes;
    - *Saved for backward*: the bytes that one forward call, with the calls inside it, saved for backward, the mean over
      the calls.

    These columns are for forward; backward and recompute have columns of their own after them, if they occurred.
    ``phase``: only the columns of one phase. Memory that was live at the peak below ``depth`` counts for the layer
    above. ``top``: the number of rows of live memory (default: 10) and of layers, by their self in the column
    ``sort_by`` (default: Allocated).

    Raises TorchprofError for a run without memory and an unknown column.
    """
    phases = _phases(run, phase)
    columns = list(columns_of_phases(phases))
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    used, samples, varying = MemoryUse.of(run), samples_by_device(run), varying_calls(run)
    parts: list[Part] = []
    for device, device_memory in enumerate(run.memory):
        of_device = samples.get((device_memory.rank, device_memory.device), ())
        parts += about_peak(run, device_memory, of_device, depth, _LIVE_SHOWN if top is None else top)
        parts += picture(run, device_memory)
        if not used[device].by_layers:
            continue
        lines = entries_of_device(run, device, phases, used, of_device, varying)
        if sorting is not None:
            sort_entries(lines, sorting)
        down_to(lines, depth)
        hidden = [] if top is None else keep_top(lines, sorting or columns[0], top)
        heading = "Module" if len(run.memory) == 1 else f"Module, on {name_of_device(run, device_memory)}"
        headings = [heading, *(column.heading for column in columns)]
        rows = table_rows(lines, lambda line: (column.text(line.figures, None) for column in columns))
        table = ReportTable(headings, rows)
        parts += [table.of("layers", device=device_memory.device, rank=device_memory.rank), *hidden]
    if not run.memory:
        has_allocated = not run.rows.nonzero.isdisjoint(("cpu_allocated", "device_allocated"))
        older = 'This run has no peaks: an older torchprof wrote it. What each layer allocated is in the "tree" report.'
        parts.append(older if has_allocated else "No allocation was recorded.")
    return spaced([*parts, stacked(_below_tables(run, used))])


def _phases(run: Run, phase: str | None) -> list[str]:
    """The phases to show. Raises TorchprofError for a run without memory."""
    if "cpu_allocated" not in run.meta.requested:
        raise TorchprofError(
            "Memory was not recorded. Use torchprof.Profile(model, profile_memory=True), "
            "or its trace with torch.profiler.profile(profile_memory=True)."
        )
    return list(run.phases()) if phase is None else [phase]


def _below_tables(run: Run, used: Sequence[MemoryUse]) -> Iterator[Part]:
    """The sentences below the tables, the run's warnings last."""
    if any(use.by_layers for use in used) and (over := summed_over(run)):
        yield (
            f"Allocated, Freed and Net are sums over {over}. Of one call are Peak (the largest of all calls), "
            "Activations (the first call) and Saved for backward (the mean of the calls)."
        )
    if run.memory and run.timeline is None:
        yield "To see memory over time, record with_timeline=True (Profile, from_trace)."
    if run.timeline is not None and len(run.metas) > 1:
        yield f"Memory over time is that of rank {run.timeline.rank}: a run has one timeline."
    yield warnings_below(run)


# The table by layer


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
        uses: dict[tuple[str, int], dict[tuple[int, str], Cost]]
        uses = {(memory.device, memory.rank): {} for memory in run.memory}
        sums = run.rows.summed(("device", "rank", "layer", "phase"), _FIELDS)
        for (device, rank, layer, phase), values in sums.items():
            if (own := uses.get((run.rows.devices[device], rank))) is not None:
                own[layer, PHASES[phase]] = Cost(**dict(zip(_FIELDS, values)))
        return [cls(own, run.layers.roll_up_by_phase(own)) for own in uses.values()]

    @property
    def by_layers(self) -> bool:
        """Whether any of it was in a layer."""
        return any(cost and layer != OUTSIDE for (layer, _), cost in self.own.items())


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
    here, figures_of_calls = used[device], _figures_of_calls(run.layers, samples)
    of_rank = [other for other, memory in enumerate(run.memory) if memory.rank == run.memory[device].rank]

    def allocated(other: int, layer: int) -> int:
        """The bytes allocated on a device in the forward of a layer and all layers below it."""
        return _ALLOCATED.of(used[other].total.get((layer, FORWARD), Cost()))

    def of_device(layer: int, is_unknown: bool) -> Figures:
        figures = Figures(
            {phase: here.own.get((layer, phase), Cost()) for phase in phases},
            {phase: here.total.get((layer, phase), Cost()) for phase in phases},
            unknown=is_unknown,
        )
        main_device = max(of_rank, key=lambda other: (allocated(other, layer), run.memory[other].peak_bytes))
        returned = run.layers[layer].output_bytes if main_device == device else None
        activations = figure_of(returned, "first" if varying[run.layers[layer].path] is not False else "")
        figures.more = {("activations", FORWARD, False): activations, **figures_of_calls(layer, figures)}
        return figures

    figures = {
        path: of_device(run.layers.index_of[path], of_layer.unknown) if of_layer.total else Figures()
        for path, of_layer in figures_of_layers(run, run.phases()).items()
    }
    lines = [line for path, line in entries_by_path(figures).items() if len(path) == 1]
    for layer, name in NO_LAYERS.items():
        costs = {phase: here.own.get((layer, phase), Cost()) for phase in phases}
        if any(costs.values()):
            lines.append(Entry(name, Figures(costs, costs), is_layer=False))
    return lines


def _figures_of_calls(
    layers: Layers, samples: Iterable[tuple[SampleKey, Spread]]
) -> Callable[[int, Figures], dict[tuple[str, str, bool], Figure]]:
    """A function from a layer and its figures to those of single calls: the peak in each phase, unknown if the layer
    worked and has none; and what a call saved for backward."""
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
    for layer, above in enumerate(layers.parent):
        if above >= 0:  # a layer that is never called itself is used in the calls of its parent
            calls.setdefault(layer, calls.get(above, 0))
    all_saved = layers.roll_up(saved)

    def figures(layer: int, of_layer: Figures) -> dict[tuple[str, str, bool], Figure]:
        count = 0 if of_layer.unknown else calls.get(layer, 0)
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
_FILLS = dict(zip(KINDS, "PG█O▒░"))


def picture(run: Run, memory: Memory) -> Iterator[str]:
    """Memory above the start over time. Each column shows the live memory by kind at the maximum of its interval."""
    timeline = run.timeline
    if not timeline or memory.device not in timeline.devices or memory.rank != timeline.rank:
        return
    moments, end = _moments(timeline, timeline.devices.index(memory.device))
    highest = max(sum(moment) for moment in moments)
    if highest <= 0:
        return
    high = highest / _PICTURE_HEIGHT
    columns = []
    for moment in moments:
        column, height = "", 0
        for fill, nbytes in zip(_FILLS.values(), moment):
            height += nbytes
            column += fill * (round(min(height, sum(moment)) / high) - len(column))
        columns.append(column.ljust(_PICTURE_HEIGHT))
    labels = [str(format_memory(highest)), *[""] * (_PICTURE_HEIGHT - 2), str(format_memory(round(high)))]
    width = max(map(len, labels))
    rows = [
        f"{label:>{width}} ┤{''.join(column[row] for column in columns)}".rstrip()
        for label, row in zip(labels, range(_PICTURE_HEIGHT - 1, -1, -1))
    ]
    axis = f"{'0':>{width}} ┼{'─' * _PICTURE_WIDTH}"
    times = f"{'':>{width}}  0{format_time(end)!s:>{_PICTURE_WIDTH - 1}}"
    seen = [kind for number, kind in enumerate(_FILLS) if any(moment[number] for moment in moments)]
    legend = "   ".join(f"{_FILLS[kind]} {kind}" for kind in seen)
    cycle = " of the last cycle" if run.meta.cycles > 1 else ""
    scale = f"a column is {format_time(end / _PICTURE_WIDTH)}, a row {format_memory(round(high))}"
    title = f"Memory on {memory.device} above the start{cycle}, over time: {scale}."
    if timeline.dropped:
        title += f" The last {timeline.dropped:,} allocations and frees were not kept."
    yield "\n".join([title, legend, *rows, axis, times])


def _moments(timeline: Timeline, device: int) -> tuple[list[list[int]], int]:
    """For each column of the picture, the bytes of each kind at the maximum of its interval; and the end of the
    timeline. The last kind is the unknown one."""
    columns = [timeline.columns[name] for name in ("time_ns", "nbytes", "device", "kind")]
    steps = [(time, nbytes, kind) for time, nbytes, of, kind in zip(*columns) if of == device]
    end = max(timeline.columns["time_ns"]) + 1
    now = [0] * (len(KINDS) + 1)
    moments = []
    index = 0
    for column in range(1, _PICTURE_WIDTH + 1):
        most, total = list(now), sum(now)
        highest = total
        while index < len(steps) and steps[index][0] * _PICTURE_WIDTH < column * end:
            _, nbytes, kind = steps[index]
            now[kind] += nbytes  # index -1, the unknown kind, is the last
            total += nbytes
            if total > highest:
                highest, most = total, list(now)
            index += 1
        moments.append(most)
    return moments, end
