"""The memory report: the peak of each device and what was alive then, memory over time, and what each layer used."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter

from torchprof.analyze.figures import Figures
from torchprof.analyze.varying import varying_calls
from torchprof.errors import TorchprofError, suggest
from torchprof.reports import report
from torchprof.reports.columns import Column, CostColumn, column_called
from torchprof.reports.notes import warnings_of
from torchprof.reports.text import branches, check_number, draw, printable
from torchprof.reports.tree import Entry, keep_top, sort_entries, what_is_hidden
from torchprof.run.cost import UNKNOWN, Cost, Measure, Unit, format_memory, format_time
from torchprof.run.memory import KINDS, Memory
from torchprof.run.run import Run
from torchprof.run.timeline import Timeline
from torchprof.run.words import FORWARD, NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME, PHASES

_HOLDERS_SHOWN = 10
_WIDTH, _HEIGHT = 80, 10
_FILLS = dict(zip(KINDS, "PG█O▒░"))
_MODELS_OWN = ("parameters", "buffers", "gradients")  # the kinds that are known from before the start
_FREED_SINCE = "(there at the start, freed since)"

_ALLOCATED = Measure("Allocated", Unit.BYTES, (("cpu_allocated", 1), ("device_allocated", 1)))
_FREED = Measure("Freed", Unit.BYTES, (("cpu_freed", 1), ("device_freed", 1)))
_NET = Measure("Net", Unit.BYTES, (*_ALLOCATED.fields, *((name, -1) for name, _ in _FREED.fields)))
_FIELDS = [name for name, _ in _NET.fields]


@dataclass
class Use(Figures):
    """What a layer used of one device. ``peaks`` by phase; ``returned``: the bytes of the outputs of its first call,
    ``varies``: whether later calls may have returned others; ``kept`` and ``own_kept``: the bytes kept for backward of
    one forward call, with those of the layers below and without. None: not known."""

    peaks: dict[str, int] = field(default_factory=dict)
    returned: int | None = None
    varies: bool = False
    kept: float | None = None
    own_kept: float | None = None


@dataclass(frozen=True)
class PeakColumn(Column):
    """By how much memory rose inside a call, or a stretch of backward, at most."""

    phase: str = FORWARD

    def of(self, figures: Figures) -> float:
        return figures.peaks.get(self.phase, 0) if isinstance(figures, Use) else 0

    def text(self, figures: Figures, whole: float | None) -> str:
        if not isinstance(figures, Use) or not figures.total:
            return ""
        if self.phase in figures.peaks:
            return format_memory(figures.peaks[self.phase])
        return UNKNOWN if figures.unknown or figures.total[self.phase] else ""


@dataclass(frozen=True)
class ActivationsColumn(Column):
    """How large the outputs of one call are."""

    def of(self, figures: Figures) -> float:
        return (figures.returned or 0) if isinstance(figures, Use) else 0

    def text(self, figures: Figures, whole: float | None) -> str:
        if not isinstance(figures, Use) or not figures.total:
            return ""
        if figures.returned is None:
            return UNKNOWN
        return f"first {format_memory(figures.returned)}" if figures.varies else format_memory(figures.returned)


@dataclass(frozen=True)
class KeptColumn(Column):
    """What one forward call left for backward, on average."""

    is_self: bool = False

    @property
    def ranking(self) -> Column:
        return replace(self, is_self=True)

    @property
    def with_below(self) -> Column:
        return replace(self, is_self=False)

    def of(self, figures: Figures) -> float:
        if not isinstance(figures, Use):
            return 0
        return (figures.own_kept if self.is_self else figures.kept) or 0

    def text(self, figures: Figures, whole: float | None) -> str:
        if not isinstance(figures, Use) or not figures.total:
            return ""
        return UNKNOWN if figures.kept is None else format_memory(round(figures.kept))


@report("memory")
def memory(
    run: Run,
    *,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> str:
    """The peak of each device and what was alive then, memory over time, and what each layer used.

    First, for each device, by how much memory rose above what there was at the start, when and where; then what was
    alive at that moment, by kind and by layer, beside what the model had at the start (docs/memory.md says what the
    kinds are). With ``Profile(..., with_timeline=True)`` a picture of memory over time. Then a row for each layer:

    - *Allocated*, *Freed* and *Net*: what was, inside the layer and all below it;
    - *Peak*: by how much memory rose inside one call, the layers below included, at most; in backward, inside one
      unbroken stretch of its work;
    - *Activations*: the bytes of the outputs of one call; of the first, and marked so, where calls are not known to
      have been on the same shapes;
    - *Kept for backward*: what one forward call and those inside it left for backward, the mean over the calls.

    These are of forward; backward and recompute have their own, after them, where they occurred. ``phase`` ("forward",
    "backward" or "recompute") shows those of one phase alone. ``depth`` hides the layers below that depth (0: the model
    alone): what they held at the peak counts for the layer above. ``sort_by`` orders siblings by a column, largest
    first: its heading, or that in lower case with underscores. ``top`` shows only so many of what was alive (10 where
    nobody says) and so many layers, the largest by their own figure in that column (of what they allocated where there
    is none; at the ``depth`` with all below), with those above them. ``tablefmt`` is any of tabulate's formats.

    Raises TorchprofError for a run without memory, an unknown phase, column or format, and a negative number.
    """
    check_number("depth", depth, "levels")
    check_number("top", top, "rows")
    if phase is not None and phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    if "cpu_allocated" not in run.meta.requested:
        raise TorchprofError(
            "This run was recorded without memory: record it with torchprof.Profile(model, profile_memory=True), "
            "or its trace with torch.profiler.profile(profile_memory=True)."
        )
    phases = list(run.phases()) if phase is None else [phase]
    columns = list(_columns(phases))
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    used = [Used.of(run, one) for one in run.memory]
    parts: list[str] = []
    for at, one in enumerate(run.memory):
        parts += _of_peak(run, one, depth, _HOLDERS_SHOWN if top is None else top, tablefmt)
        parts += _picture(run, one)
        if not used[at].by_layers:
            continue
        lines = _lines(run, at, phases, used)
        if sorting is not None:
            sort_entries(lines, sorting)
        hidden = []
        if top is not None:
            keep_top(lines, sorting or columns[0], top, depth)
            hidden = [what_is_hidden(lines, sorting or columns[0], top, depth)]
        heading = "Module" if len(run.memory) == 1 else f"Module, on {_name(run, one)}"
        parts += [_table(heading, lines, columns, depth, tablefmt), *hidden]
    if not run.memory:
        has_bytes = any(any(run.rows.columns[name]) for name in ("cpu_allocated", "device_allocated"))
        parts.append(
            'An older torchprof wrote this run: it knows no peaks. What each layer allocated is in the "tree" report.'
            if has_bytes
            else "No allocation was recorded."
        )
    notes = warnings_of(run)
    if any(memory.before is None for memory in run.memory):
        notes.insert(0, "What was there before the recording is unknown, and its frees: peaks may be lower than shown.")
    if run.timeline is not None and len(run.metas) > 1:
        notes.insert(0, f"Memory over time is that of rank {run.timeline.rank}: of several ranks one timeline is kept.")
    if run.memory and run.timeline is None:
        notes.insert(0, "Of a run with_timeline=True (Profile, from_trace), memory over time is drawn here.")
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def _columns(phases: Sequence[str]) -> Iterator[Column]:
    for phase in phases:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        for measure in (_ALLOCATED, _FREED, _NET):
            heading = f"{lead}{measure.heading.lower()}" if lead else measure.heading
            yield CostColumn(heading, True, phase, measure)
        yield PeakColumn(f"{lead}peak" if lead else "Peak", True, phase)
        if phase == FORWARD:
            yield ActivationsColumn("Activations")
            yield KeptColumn("Kept for backward")


# The peak, and what was alive then


def _of_peak(run: Run, memory: Memory, depth: int | None, shown: int, tablefmt: str | None) -> Iterator[str]:
    device = _name(run, memory)
    if memory.peak_bytes <= 0:
        yield f"{device}: memory never rose above what there was at the start."
    elif not memory.held:
        yield f"{device}: memory rose by {format_memory(memory.peak_bytes)} at most. This run says no more about it."
    else:
        where = _where_reached(run, memory)
        when = f"{format_time(memory.peak_ns)} after the start" + (" of its cycle" if run.meta.cycles > 1 else "")
        yield f"{device}: memory rose by {format_memory(memory.peak_bytes)} at most, {when}{where}. Alive then:"
    if memory.held or memory.before:
        yield _by_kind(memory, tablefmt)
    if memory.held:
        yield _by_layer(run, memory, depth, shown, tablefmt)
    if memory.allocator:
        headings = [f"torch's allocator of {device}", "At the start", "At the end"]
        rows = [[name, format_memory(start), format_memory(end)] for name, start, end in memory.allocator]
        yield draw(headings, rows, tablefmt)


def _name(run: Run, memory: Memory) -> str:
    return memory.device if len(run.metas) == 1 else f"{memory.device} of rank {memory.rank}"


def _where_reached(run: Run, memory: Memory) -> str:
    for key, spread in run.samples.items():
        if key[2:] == (memory.rank, memory.device, "device_peak_bytes") and spread.max == memory.peak_bytes:
            if key.layer >= 0:
                return f", in {run.layers[key.layer].name} ({key.phase})"
            if key.layer == NOT_SELECTED:
                return f", in layers that were not selected ({key.phase})"
            return ", outside all layers" if key.phase == FORWARD else f", outside all layers ({key.phase})"
    return ""


def _layer_name(run: Run, layer: int) -> str:
    return printable(run.layers[layer].name) if layer >= 0 else OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME


def _by_kind(memory: Memory, tablefmt: str | None) -> str:
    """What was alive at the peak by kind, beside what the model had at the start."""
    sums: dict[str, list[int]] = {}
    for held in memory.held:
        kind = held.kind if held.nbytes >= 0 else _FREED_SINCE
        entry = sums.setdefault(kind, [0, 0])
        entry[0] += held.nbytes
        entry[1] += held.blocks
    before = dict(memory.before or ())
    rows = []
    for kind in sorted({*sums, *before}, key=lambda kind: (-sums.get(kind, [0])[0], kind)):
        nbytes, blocks = sums.get(kind, (0, 0))
        is_known = kind in _MODELS_OWN and memory.before is not None
        there = format_memory(before.get(kind, 0)) if is_known else "" if kind == _FREED_SINCE else UNKNOWN
        share = "" if kind == _FREED_SINCE else _share(nbytes, memory)
        rows.append([kind, format_memory(nbytes), share, str(blocks or ""), there])
    rows.append(["all", format_memory(memory.peak_bytes), "" if _FREED_SINCE in sums else "100.0%", "", ""])
    return draw(["Kind", "At the peak", "Share", "Blocks", "There at the start"], rows, tablefmt)


def _by_layer(run: Run, memory: Memory, depth: int | None, shown: int, tablefmt: str | None) -> str:
    """What was alive at the peak by layer, phase and kind, the largest first, what is not shown in one line."""
    number = {layer.path: index for index, layer in enumerate(run.layers)}
    sums: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for held in memory.held:
        if held.nbytes >= 0:
            path = run.layers[held.layer].path if held.layer >= 0 else ()
            layer = number[path[: depth + 1]] if path and depth is not None else held.layer
            entry = sums[layer, held.phase, held.kind]
            entry[0] += held.nbytes
            entry[1] += held.blocks
    largest = sorted(sums.items(), key=lambda one: (-one[1][0], one[0]))
    rows = [
        [_layer_name(run, layer), phase, kind, format_memory(nbytes), _share(nbytes, memory), str(blocks)]
        for (layer, phase, kind), (nbytes, blocks) in largest[:shown]
    ]
    if len(largest) > shown:
        nbytes, blocks = (sum(entry[at] for _, entry in largest[shown:]) for at in (0, 1))
        others = f"({len(largest) - shown} more)"
        rows.append([others, "", "", format_memory(nbytes), _share(nbytes, memory), str(blocks)])
    return draw(["Made in", "Phase", "Kind", "At the peak", "Share", "Blocks"], rows, tablefmt)


def _share(nbytes: int, memory: Memory) -> str:
    """Of all that was made since the start and was alive at the peak."""
    whole = sum(held.nbytes for held in memory.held if held.nbytes > 0)
    return f"{nbytes / whole:.1%}" if whole else ""


# Memory over time


def _picture(run: Run, memory: Memory) -> Iterator[str]:
    """Memory above the start over time: in each column what was alive at the highest moment of that time, by kind."""
    timeline = run.timeline
    if not timeline or memory.device not in timeline.devices or memory.rank != timeline.rank:
        return
    moments, end = _moments(timeline, timeline.devices.index(memory.device))
    highest = max(sum(moment) for moment in moments)
    if highest <= 0:
        return
    high = highest / _HEIGHT
    columns = []
    for moment in moments:
        column, sofar = "", 0
        for fill, nbytes in zip(_FILLS.values(), moment):
            sofar += nbytes
            column += fill * (round(min(sofar, sum(moment)) / high) - len(column))
        columns.append(column.ljust(_HEIGHT))
    labels = [format_memory(highest), *[""] * (_HEIGHT - 2), format_memory(round(high))]
    width = max(map(len, labels))
    rows = [
        f"{label:>{width}} ┤{''.join(column[row] for column in columns)}".rstrip()
        for label, row in zip(labels, range(_HEIGHT - 1, -1, -1))
    ]
    axis = f"{'0':>{width}} ┼{'─' * _WIDTH}"
    times = f"{'':>{width}}  0{format_time(end):>{_WIDTH - 1}}"
    seen = [kind for at, kind in enumerate(_FILLS) if any(moment[at] for moment in moments)]
    legend = "   ".join(f"{_FILLS[kind]} {kind}" for kind in seen)
    cycle = " of the last cycle" if run.meta.cycles > 1 else ""
    title = (
        f"Memory on {memory.device} above the start{cycle}, over time: a column is {format_time(end / _WIDTH)}, a row "
        f"{format_memory(round(high))}."
    )
    if timeline.dropped:
        title += f" The last {timeline.dropped:,} allocations and frees were not kept."
    yield "\n".join([title, legend, *rows, axis, times])


def _moments(timeline: Timeline, device: int) -> tuple[list[list[int]], int]:
    """For each column of the picture, the bytes of each kind at the moment when they were most; and when it all ends.
    A last number is what nobody knows the kind of."""
    columns = [timeline.columns[name] for name in ("time_ns", "nbytes", "device", "kind")]
    steps = [(time, nbytes, kind) for time, nbytes, of, kind in zip(*columns) if of == device]
    end = max(timeline.columns["time_ns"]) + 1
    now = [0] * (len(KINDS) + 1)
    moments = []
    at = 0
    for column in range(1, _WIDTH + 1):
        most, total = list(now), sum(now)
        highest = total
        while at < len(steps) and steps[at][0] * _WIDTH < column * end:
            _, nbytes, kind = steps[at]
            now[kind] += nbytes  # -1, the unknown kind, is the last
            total += nbytes
            if total > highest:
                highest, most = total, list(now)
            at += 1
        moments.append(most)
    return moments, end


# What the layers used


@dataclass(frozen=True)
class Used:
    """Bytes allocated and freed on one device, by layer and phase: by each layer itself, and with those below it."""

    own: Mapping[tuple[int, str], Cost]
    total: Mapping[tuple[int, str], Cost]

    @classmethod
    def of(cls, run: Run, memory: Memory) -> Used:
        rows, columns = run.rows, run.rows.columns
        sums: defaultdict[tuple[int, str], list[int]] = defaultdict(lambda: [0] * len(_FIELDS))
        device = rows.devices.index(memory.device) if memory.device in rows.devices else None
        for at, (number, rank) in enumerate(zip(columns["device"], columns["rank"])):
            if number == device and rank == memory.rank:
                entry = sums[columns["layer"][at], PHASES[columns["phase"][at]]]
                for of_field, name in enumerate(_FIELDS):
                    entry[of_field] += columns[name][at]
        own = {key: Cost(**dict(zip(_FIELDS, entry))) for key, entry in sums.items()}
        total = dict(own)
        for index, above in _upwards(run):
            for phase in PHASES:
                if (index, phase) in total:
                    total[above, phase] = total.get((above, phase), Cost()) + total[index, phase]
        return cls(own, total)

    @property
    def by_layers(self) -> bool:
        """Whether any of this was in a layer."""
        return any(cost and layer != OUTSIDE for (layer, _), cost in self.own.items())

    def made(self, layer: int) -> int:
        """What was allocated in the forward of a layer and all below it."""
        return _ALLOCATED.of(self.total.get((layer, FORWARD), Cost()))


def _table(
    heading: str, lines: Sequence[Entry], columns: Sequence[Column], depth: int | None, tablefmt: str | None
) -> str:
    def below(line: Entry, level: int) -> list[Entry]:
        return [child for child in line.children if (depth is None or level < depth) and child.shown]

    table = [
        [text, *(column.text(line.figures, None) for column in columns)]
        for text, line in branches([line for line in lines if line.shown], attrgetter("name"), below)
    ]
    return draw([heading, *(column.heading for column in columns)], table, tablefmt)


def _upwards(run: Run) -> Iterator[tuple[int, int]]:
    """Each layer with the one above it, those below first."""
    number = {layer.path: index for index, layer in enumerate(run.layers)}
    for path, index in reversed(number.items()):
        if len(path) > 1:
            yield index, number[path[:-1]]


def _lines(run: Run, device: int, phases: Sequence[str], used: Sequence[Used]) -> list[Entry]:
    """A line for each layer, below the one above it; then those for the work of no layer.

    ``used``: what was used of each of the run's devices, of which ``device`` is the number of the one to be shown.
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
    kept = dict(own_kept)
    for index, above in _upwards(run):
        kept[above] = kept.get(above, 0) + kept.get(index, 0)
    selected = None if run.meta.paths is None else set(run.meta.paths)
    varying = varying_calls(run)
    number = {layer.path: index for index, layer in enumerate(run.layers)}
    lines: dict[tuple[str, ...], Entry] = {}
    for root in range(len(run.roots)):
        for node in run.tree(None, root).walk():
            path, index = node.layer.path, number[node.layer.path]
            lines[path] = Entry(path[-1], Figures())
            if len(path) > 1:
                lines[path[:-1]].children.append(lines[path])
                if (
                    index not in calls and path[:-1] in number
                ):  # what nobody calls is used in the calls of what is above
                    calls[index] = calls.get(number[path[:-1]], 0)
            if selected is not None and path not in selected:
                continue
            if index in own_kept:  # what was called before anything was allocated has no sample
                peaks[index].setdefault(FORWARD, 0)
            at_home = max(range(len(used)), key=lambda at: (used[at].made(index), run.memory[at].peak_bytes))
            called = bool(node.calls or node.total)
            lines[path].figures = Use(
                {phase: here.own.get((index, phase), Cost()) for phase in phases},
                {phase: here.total.get((index, phase), Cost()) for phase in phases},
                unknown=not called,
                peaks=peaks[index],
                returned=node.layer.output_bytes if at_home == device else None,
                varies=varying[path] is not False,
                kept=kept.get(index, 0) / calls[index] if called and calls.get(index) else None,
                own_kept=own_kept.get(index, 0) / calls[index] if called and calls.get(index) else None,
            )
    found = [line for path, line in lines.items() if len(path) == 1]
    for name, layer in ((NOT_SELECTED_NAME, NOT_SELECTED), (OUTSIDE_NAME, OUTSIDE)):
        costs = {phase: here.own.get((layer, phase), Cost()) for phase in phases}
        if any(costs.values()):
            found.append(Entry(name, Figures(costs, costs), is_layer=False))
    return found
