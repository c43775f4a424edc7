"""The parts of all recorded time, by layer, phase and operator, and the report "top" of the largest ones."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import NamedTuple

from torchprof.analyze.device import about_use, short_kernel_name
from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    pattern_of,
    phase_cell,
    report,
    shortened,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import LEGEND, about_sums, warnings_below
from torchprof.errors import printable, some
from torchprof.run.formats import Cell, ReportCell, format_count, format_share, format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import (
    ANY_STEP,
    BETWEEN,
    BETWEEN_OPS,
    INTERRUPTIONS,
    LAUNCH_NOT_RECORDED,
    NOT_ATTRIBUTABLE,
    OTHER_MODULE,
    OUTSIDE,
    PHASES,
    WAITS_FOR_THREADS,
    Frame,
    FrameKind,
    SourceLine,
    is_overhead,
    is_runtime_call,
    phase_of,
    range_in_words,
    sampled_line,
    torchs_range,
)

# The parts of the recorded time

_OWN_WORK = "(torch.compile's own work)"
"""The name of all that torch.compile does around its graphs, such as checking guards."""
_WAITS_FOR_THREADS = range_in_words(FrameKind.WAIT, WAITS_FOR_THREADS)
_NAMED_RANGES = {FrameKind.REGION, FrameKind.WAIT, *INTERRUPTIONS}
"""The kinds of ranges that are the work of a row if nothing else is inside them."""
_UNKNOWN_LAUNCH = Frame(FrameKind.LABEL, LAUNCH_NOT_RECORDED)


class Where(NamedTuple):
    """A layer by its index (negative: no layer), a phase by its number, and the innermost label of the user's ("": no
    label). ``waits``: only the time in which it waits for other threads."""

    layer: int
    phase: int
    label: str
    waits: bool = False

    @property
    def phase_name(self) -> str:
        return phase_of(self.layer, PHASES[self.phase])

    def name(self, run: Run) -> str:
        """The name for users: the path of the layer, or the name of work of no layer, and the label."""
        name = run.layers.name_of(self.layer)
        known = torchs_range(self.label)
        if known and self.layer == OUTSIDE:
            return known
        label = known or f"{self.label} (label)"
        return printable(", ".join([name, *[label] * bool(self.label), *[_WAITS_FOR_THREADS] * self.waits]))


class KindOfWork(NamedTuple):
    """One kind of work, in any layer: a phase by its number, the innermost label, and the name of the work, which is
    that of an operator for its self, of a kernel whose launch was not recorded, or ``(between ops)``."""

    phase: int
    label: str
    name: str

    def at(self, layer: int) -> Where:
        """The place of this work in a layer."""
        return Where(layer, self.phase, self.label, self.name == _WAITS_FOR_THREADS)

    @property
    def has_lines(self) -> bool:
        """Whether lines of Python that were sampled in it say what it is."""
        return self.name in (BETWEEN_OPS, _WAITS_FOR_THREADS)

    @property
    def may_be_below(self) -> bool:
        """Whether it is the work of compiled kernels whose layers are unknown, and may be layers below."""
        is_between = self.name.startswith(f"({BETWEEN}")
        return is_between or (NOT_ATTRIBUTABLE in self.name and OTHER_MODULE not in self.name)


Parts = dict[tuple[int, KindOfWork], int]
"""The amount of each kind of work in each layer (by its index, negative for no layer)."""


def parts_of(run: Run, field: str) -> Parts:
    """The amount of ``cpu_ns``, ``device_ns`` or ``flops`` of each part, without parts of amount 0 and without work
    that was launched before the recording. They are kept with the run, for the other reports: do not change them."""
    known: dict[str, Parts] = vars(run).setdefault("_parts_of_work", {})
    if field not in known:
        kinds: dict[tuple[str, str], int] = {}
        kind_of = [kinds.setdefault((_label(frames), _work(frames)), len(kinds)) for frames in run.rows.frames]
        sums = run.rows.of_recording.summed(("layer", "phase", "frames"), field)
        amounts = sums_by_key(((layer, phase, kind_of[chain]), ns) for (layer, phase, chain), ns in sums.items())
        names = [*kinds]
        known[field] = {
            (layer, KindOfWork(phase, *names[kind])): amount
            for (layer, phase, kind), amount in amounts.items()
            if amount > 0
        }
    return known[field]


def _label(frames: Sequence[Frame]) -> str:
    """The innermost label, "" without one. The label of a step does not count, because all work is in it."""
    labels = [frame.name for frame in frames if frame.kind == FrameKind.LABEL and frame.name != ANY_STEP]
    return labels[-1] if labels else ""


def _work(frames: Sequence[Frame]) -> str:
    """The name of the work of a row: of its innermost operator or collective, or ``(between ops)``; of a kernel, if
    no operator is known to have launched it.

    Kernels of a compiled graph that are one row of the run, such as those of several layers, are one work, and so is
    all that torch.compile does around its graphs. Examples::

        aten::linear > aten::addmm > gemm_kernel    aten::addmm
        cudaLaunchKernel > gemm_kernel              gemm_kernel
        a label of the user's                       (between ops)
    """
    if len(frames) > 1 and frames[-1].kind == FrameKind.KERNEL:
        launcher = frames[-2]
        is_runtime = launcher.kind == FrameKind.OP and is_runtime_call(launcher.name)
        if is_runtime or launcher == _UNKNOWN_LAUNCH:
            return short_kernel_name(frames[-1].name)
    inner = [frame for frame in frames if frame.kind != FrameKind.KERNEL]
    for frame in inner:
        if frame.kind == FrameKind.KERNELS or (frame is inner[-1] and frame.kind in _NAMED_RANGES):
            return range_in_words(frame.kind, frame.name)
    if inner and is_overhead(inner[-1].name):
        return _OWN_WORK
    return inner[-1].name if inner and inner[-1].kind in {FrameKind.OP, FrameKind.COLLECTIVE} else BETWEEN_OPS


# Sampled source lines between operators

_FEWEST_SAMPLES = 5  # with fewer the line with the most samples may be there by chance
_NEARLY_ALL_SAMPLES = 0.9  # of a line


def source_lines(run: Run) -> dict[Where, Counter[SourceLine]]:
    """The number of samples of each source line between operators, and in waits for other threads, by place."""

    def is_between_ops(frames: Sequence[Frame]) -> bool:
        return sampled_line(frames) is not None and all(map(_has_lines, frames[:-1]))

    lines: defaultdict[Where, Counter[SourceLine]] = defaultdict(Counter)
    sampled = run.rows.summed(("layer", "phase", "frames"), "calls", frames=is_between_ops)
    for (layer, phase, chain), samples in sampled.items():
        frames = run.rows.frames[chain]
        if (line := sampled_line(frames)) is not None:
            waits = any(frame.kind == FrameKind.WAIT for frame in frames)
            lines[Where(layer, phase, _label(frames), waits)][line] += samples
    return dict(lines)


def _has_lines(frame: Frame) -> bool:
    return frame.kind == FrameKind.LABEL or (frame.kind == FrameKind.WAIT and frame.name == WAITS_FOR_THREADS)


def most_sampled(samples_of: Counter[SourceLine]) -> tuple[str, float] | None:
    """The source line with the most samples, and its share of them. If it has fewer than five: the function, if all
    samples are in one, else None. A function of a library that the line calls is named, too, if nearly all samples of
    the line are in it."""
    # Without the function that a line calls.
    by_place = sums_by_key((line.at, samples) for line, samples in samples_of.items())
    for place, samples in by_place.most_common(1):
        if samples >= _FEWEST_SAMPLES:
            line = max((line for line in samples_of if line.at == place), key=samples_of.__getitem__)
            is_one_call = samples_of[line] >= _NEARLY_ALL_SAMPLES * samples
            return line if is_one_call else place, samples / by_place.total()
    functions = {line.owner for line in samples_of}
    is_known = len(functions) == 1 and not any(line.function == "<module>" for line in samples_of)
    return (functions.pop(), 1.0) if is_known else None


# The top report

_USUAL_TYPE = "float32"
_ALIKE = 3  # so many layers that are alike become one row
_OUTLIER = 1.5  # so many times the median of layers that are alike, and a layer is named in the row of the others
_NO_OPERATOR = {
    "cpu_ns": f"{BETWEEN_OPS}: {LEGEND[BETWEEN_OPS]}.",
    "device_ns": "(between ops): no operator launched it.",
}


@report("top", "the largest places: an operator in a layer and phase", answers="time")
def top(run: Run, *, top: int = 8) -> Section:
    """The largest parts of all recorded time: the self of an operator in one layer and phase, or the time there between
    operators, which is Python and libraries that it calls.

    On the CPU, 100 % is the recorded time, plus what other threads did at the same time. If a device was
    measured, a table of its time comes first, and above it its idle time. A run without times has a table of FLOPs. The
    type of a layer's parameters is shown if it is not float32. A source line is the one with the most samples between
    operators of that part, with its own share of all recorded time; from fewer than five samples it is only the
    function, if all are in one. It needs samples, which ``lines=False`` leaves out.
    """
    sentences: list[Part] = [*about_sums(run), warnings_below(run)]
    return spaced([*largest_parts(run, top), stacked(sentences)])


def largest_parts(run: Run, limit: int, width: int | None = None) -> list[Part]:
    """The sections of the report "top", without the sentences below it. ``width``: the number of characters of a line;
    names are shortened to it, and no sentences follow: this is for the first screen."""
    tables = (_table(run, field, heading, limit, width) for field, heading in measures_of(run))
    return [*about_idle_devices(run), *tables] or ["Neither times nor FLOPs were measured."]


def title_of_parts(run: Run) -> str:
    """The heading of the largest parts: of FLOPs if no time was measured."""
    return "Where the FLOPs are" if {"cpu_ns", "device_ns"}.isdisjoint(run.meta.measured) else "Where the time goes"


def about_idle_devices(run: Run) -> Iterator[str]:
    """For how long each device was idle, as sentences."""
    if "device_ns" not in run.meta.measured:
        return
    if not run.device_use:
        yield f"Nothing ran on {run.meta.device_heading}."
    yield from about_use(run, "idle")


def measures_of(run: Run) -> Iterator[tuple[str, str]]:
    """The measures by which parts are the largest, the first one first: the field of ``Cost`` and its heading."""
    meta = run.meta
    if "device_ns" in meta.measured and any(meta.busy_devices for meta in run.metas):
        yield "device_ns", f"{meta.device_heading} time"
    if "cpu_ns" in meta.measured:
        yield "cpu_ns", "CPU time"
    elif "flops" in meta.measured:
        yield "flops", "Counted FLOPs" if "uncounted" in run.rows.nonzero else "FLOPs"


def _table(run: Run, field: str, heading: str, limit: int, width: int | None) -> Part:
    """The largest parts in one measure; without a width, below them sentences about time in no operator and about parts
    that are hidden."""
    parts = parts_of(run, field)
    whole = sum(parts.values())
    rows = sorted(_alike_as_one(run, parts), key=lambda row: -row.amount)
    shown = rows[:limit]
    hidden = rows[len(shown) :]
    lines = source_lines(run)
    write = format_count if field == "flops" else format_time
    headings = ["Share", heading, "Layer", "Type", "Phase", "In"]
    texts: list[list[Cell]] = []
    for row in shown:
        figures = format_share(row.amount / whole), write(row.amount)
        phase = row.work.at(row.first).phase_name
        layer = _name_of(run, row.work, row.layers), _type_of(run, row.first), phase_cell(phase)
        texts.append([*figures, *layer, _with_line(row, lines, whole)])
    if width is not None:
        _fit(headings, texts, width)
    table_rows = [TableRow(cells, layer=row.first) for cells, row in zip(texts, shown)]
    table = ReportTable(headings, table_rows, f"largest_by_{field}")
    if width is not None:
        return table
    sentences = [_NO_OPERATOR[field]] if field in _NO_OPERATOR and any(row.is_between for row in shown) else []
    if hidden:
        rest = sum(row.amount for row in hidden)
        sentences.append(f"Smaller parts are hidden: {len(hidden)}, together {rest / whole:.1%}.")
    return stacked([table, *sentences])


class _Row(NamedTuple):
    """One kind of work in one layer, or in several alike ones. ``layers``: the amount of each (negative: no layer)."""

    amount: int
    work: KindOfWork
    layers: Mapping[int, int]

    @property
    def first(self) -> int:
        return next(iter(self.layers))

    @property
    def is_between(self) -> bool:
        """Whether it is time in which no operator ran."""
        return self.work.name == BETWEEN_OPS


def _alike_as_one(run: Run, parts: Parts) -> list[_Row]:
    """The rows: the same work in at least three layers that are alike is one."""
    alike = run.layers.alike  # an equal number for layers that are alike
    amounts: dict[tuple[int, KindOfWork], dict[int, int]] = {}
    for (layer, work), amount in parts.items():
        amounts.setdefault((alike[layer] if layer >= 0 else layer, work), {})[layer] = amount
    rows = []
    for (_, work), layers in amounts.items():
        if len(layers) >= _ALIKE:
            rows.append(_Row(sum(layers.values()), work, layers))
        else:
            rows += [_Row(amount, work, {layer: amount}) for layer, amount in layers.items()]
    return rows


def _name_of(run: Run, work: KindOfWork, amounts: Mapping[int, int]) -> Cell:
    """The layer of a row, or the pattern of its layers, how many they are, and which of them are slower."""
    name = work.at(next(iter(amounts))).name(run)
    if len(amounts) == 1:
        return name
    layers = [run.layers[number] for number in amounts]
    pattern = pattern_of([layer.path for layer in layers])
    label = f", {work.label} (label)" if work.label else ""
    text = printable(f"{pattern} ({len(layers)} layers{_about_slower(layers, [*amounts.values()])}){label}")
    return ReportCell(text, pattern, ids={"layers": [layer.name for layer in layers]})


def _about_slower(layers: Sequence[Layer], amounts: Sequence[int]) -> str:
    """How much longer the slower layers of a row take than the others, and what is different in their paths."""
    usual = median(amounts)
    slow = {layer.path: amount for layer, amount in zip(layers, amounts) if amount > usual * _OUTLIER}
    if not slow:
        return ""
    factor = mean(slow.values()) / usual
    names_by_depth = zip(*(layer.path for layer in layers))
    differing = [depth for depth, names in enumerate(names_by_depth) if len(set(names)) > 1]
    names = [".".join(path[depth] for depth in differing) for path in slow]
    verb = "takes" if len(slow) == 1 else "take"
    return f"; {len(slow)} of {len(layers)} {verb} {factor:.1f} × as long: {some(names, 3)}"


def _type_of(run: Run, layer: int) -> str:
    """The class of a layer, and the types of its parameters that are unusual; "" for no layer."""
    if layer < 0:
        return ""
    unusual = (dtype for dtype, _ in run.layers[layer].dtype_bytes if dtype != _USUAL_TYPE)
    return ", ".join(filter(None, [run.layers[layer].kind, *unusual]))


def _with_line(row: _Row, lines: Mapping[Where, Counter[SourceLine]], whole: int) -> str:
    """The name of the work; between operators with the source line that takes most, and its share of the whole."""
    sampled_layers = [layer for layer in row.layers if row.work.has_lines and row.work.at(layer) in lines]
    sampled = most_sampled(sum((lines[row.work.at(layer)] for layer in sampled_layers), Counter[SourceLine]()))
    if sampled is None:
        return row.work.name
    line, share_of_samples = sampled
    share = str(format_share(sum(row.layers[layer] for layer in sampled_layers) * share_of_samples / whole))
    return row.work.name if share == str(format_share(0)) else f"{row.work.name}, {share} at {line}"


# Rows as wide as a terminal

_GAP = len(" | ")
_ABOUT_SLOWER = re.compile(r"; \d+ of \d+ takes? [^)]*(?=\))")
_LEAST_NAME = 24  # names are not made shorter than this
_FOLDERS = re.compile(r"(?<![^\s:])[^\s:]*[/\\](?=[^\s/\\:]+:\d+ )")  # of a source line


def _fit(headings: Sequence[str], table: list[list[Cell]], width: int) -> None:
    """Shorten the names of layers and work to lines of so many characters: first "(between ops)" before a source line
    and the folders of its file, then the middle of the longer names, then that of classes."""
    layer, kind, work = (headings.index(heading) for heading in ("Layer", "Type", "In"))

    def excess() -> int:
        widths = (max(len(str(cell)) for cell in column) for column in zip(headings, *table))
        return sum(widths) + _GAP * (len(headings) - 1) - width

    if excess() > 0:
        for row in table:
            row[work] = _shown_as(row[work], _FOLDERS.sub("", str(row[work]).removeprefix(f"{BETWEEN_OPS}, ")))
    longest = [max((len(str(row[column])) for row in table), default=0) for column in (layer, work)]
    room = sum(longest) - max(excess(), 0)  # the longer of the two is shortened first, down to half of the room
    for column, length, other in zip((layer, work), longest, reversed(longest)):
        most = max(room - other, room // 2, _LEAST_NAME)
        if column == layer:
            for row in table if length > most else ():
                row[layer] = _shown_as(row[layer], _without_front(str(row[layer]), most))
        _shorten(table, column, max((len(str(row[column])) for row in table), default=0) - most)
    _shorten(table, kind, excess())


def _without_front(name: str, most: int) -> str:
    """The name of layers in fewer characters, if there is a way: without what is said of the slower ones, and without
    the first steps of its path: "…layers.*.linear2 (12 layers)"."""
    name = _ABOUT_SLOWER.sub("", name) if len(name) > most else name
    path, space, rest = name.partition(" ")
    while len(path) + len(space) + len(rest) > most and "." in path.strip("…"):
        path = f"…{path.partition('.')[2]}"
    return f"{path}{space}{rest}"


def _shorten(table: list[list[Cell]], column: int, by: int) -> None:
    """Make the longest names of a column shorter ``by`` so many characters, if that is not negative."""
    most = max((len(str(row[column])) for row in table), default=0) - by
    for row in table if by > 0 else ():
        row[column] = _shown_as(row[column], shortened(str(row[column]), max(most, 1)))


def _shown_as(cell: Cell, text: str) -> Cell:
    """A cell with another text; its data stays."""
    if isinstance(cell, ReportCell):
        return cell.written(text)
    return cell if cell == text else ReportCell(text, cell)
