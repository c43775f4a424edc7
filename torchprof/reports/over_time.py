"""What ran and what was live when, as pictures: the parts of a step, the timeline, and memory over time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, groupby, pairwise
from math import inf
from typing import NamedTuple

from torchprof.analyze.report import ReportTable, report, tables_and_sentences
from torchprof.analyze.steps import PARTS_OF_NO_LAYER, steps
from torchprof.errors import TorchprofError
from torchprof.reports.charts import (
    WIDTH,
    Axis,
    Sign,
    axis_x,
    axis_y,
    fitted,
    hint,
    picture,
    plot,
    standalone,
    tag,
    text,
    time_words,
)
from torchprof.reports.icicle import Colors, colors_of, title_of
from torchprof.reports.viewers import tracks_of
from torchprof.run.formats import Cell, ReportCell, format_memory, format_share, short_time
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS, DeviceTime, Memory, Timeline
from torchprof.run.words import LOADING, NO_LAYERS, OPTIMIZER_STEP, PHASES

# The parts of a step

_BAR = 26  # pixels
_NAME_OF_BAR = 70
_MOST_BARS = 16  # of ranks, and of steps
_COLORS_OF_PARTS = {
    "forward": "class-1",
    "backward": "class-5",
    "recompute": "class-6",
    PARTS_OF_NO_LAYER["step_optimizer_ns"]: "class-2",
    PARTS_OF_NO_LAYER["step_data_ns"]: "class-3",
    PARTS_OF_NO_LAYER["step_backward_ns"]: "kind-4",
    PARTS_OF_NO_LAYER["step_copy_ns"]: "class-4",
    PARTS_OF_NO_LAYER["step_wait_ns"]: "class-0",
    PARTS_OF_NO_LAYER["step_awaited_ns"]: "kind-2",
    PARTS_OF_NO_LAYER["step_other_ns"]: "class-7",
    "other": "removed",
    # of a device
    "computing": "kind-3",
    "overlapped communication": "kind-5",
    "exposed communication": "kind-7",
    "copying only": "kind-2",
    "idle": "rest",
}


@report("step", "a picture: the parts of a step, from the report steps", suffix="step.svg")
def step(run: Run) -> str:
    """What a step is made of in the mean, on each rank. Raises TorchprofError if no loop was recorded."""
    return standalone(drawn_step(run))


class _Bar(NamedTuple):
    """What a step is made of: the ``parts`` in ns, and how long it takes. ``name``: of the rank or the step. ``step``:
    the number of a step of the timeline, from 0 on, which a click on the page shows."""

    name: str
    parts: Sequence[tuple[str, float]]
    whole: float
    step: int | None = None


def drawn_step(run: Run) -> str:
    """The parts of a step as a bar for each rank, with those of the slowest rank as legend; a bar for each device of
    that rank; and a bar for each step of the timeline, if there is one."""
    tables = [part for part in tables_and_sentences(steps(run, top=0)) if isinstance(part, ReportTable)]
    means = [_mean_bar(table) for table in tables if table.name == "parts"]
    if len(means) == 1:
        means = [means[0]._replace(name="mean")]
    durations = [dict(zip(table.headings, table.rows[0].cells)) for table in tables if table.name == "duration"]
    single = [*_single_steps(run)]
    slowest = max(range(len(means)), key=lambda number: means[number].whole)
    devices = [*_device_bars(run, run.metas[slowest].rank if len(means) > 1 else run.meta.rank, durations[slowest])]
    bars = [*means[:_MOST_BARS], *devices, *single[:_MOST_BARS]]
    axis = Axis(0, max(sum(ns for _, ns in bar.parts) for bar in bars), _NAME_OF_BAR if len(bars) > 1 else 0, WIDTH)
    drawn = [_drawn_bar(bar, axis, row * _BAR, is_named=len(bars) > 1) for row, bar in enumerate(bars)]
    figures, most = durations[slowest], means[slowest]
    on_rank = f" on {most.name}, whose steps last longest," if len(means) > 1 else ""
    caption = f"A step takes {figures['Mean']}{on_rank} in the mean of {figures['Steps']}: median {figures['Median']}, "
    caption += f"P95 {figures['P95']}."
    if sum(ns for _, ns in most.parts) > 1.001 * most.whole:
        caption += " Parts that ran at the same time, on several threads, count more than once."
    if single and run.timeline is not None:
        of_rank = f" of rank {run.timeline.rank}" if len(means) > 1 else ""
        caption += f" Below: the steps of the timeline{of_rank}."
    for what, number in (("ranks", len(means)), ("steps", len(single))):
        caption += f" The first {_MOST_BARS} of {number} {what} are drawn." if number > _MOST_BARS else ""
    signs = [
        Sign(_color_of_part(name), f"{lead}{name} {_with_share(ns, bar.whole)}")
        for lead, bar in [("", most), *((f"{device.name}: ", device) for device in devices)]
        for name, ns in bar.parts
    ]
    signs += [Sign(_color_of_part("other"), "other, in a step of the timeline: in no layer")] if single else []
    return picture(title_of(run, "a step"), caption, drawn, (WIDTH, _BAR * len(bars)), signs)


def _with_share(ns: float, whole: float) -> str:
    return f"{short_time(ns)} ({format_share(ns / whole)})" if whole else short_time(ns)


def _drawn_bar(bar: _Bar, axis: Axis, y: float, *, is_named: bool) -> str:
    drawn = [text(bar.name, 0, y + 17)] if is_named else []
    start = 0.0
    for name, ns in bar.parts:
        x, width = axis(start), axis(start + ns) - axis(start)
        inside = [tag("rect", x=x, y=y, width=max(width - 1, 0.5), height=_BAR - 4, class_=_color_of_part(name))]
        share = f" {format_share(ns / bar.whole)}" if bar.whole else ""
        short = name.split(", ")[-1]
        if sum(other.endswith(f", {short}") for other, _ in bar.parts) > 1:  # of several models, or ranges
            short = name
        both = f"{short}{share}"  # a number is not cut off
        if words := both if fitted(both, width - 8) == both else fitted(short, width - 8):
            inside.append(text(words, x + 5, y + 15, class_="ink"))
        drawn.append(tag("g", hint([f"{bar.name}: {name}", _with_share(ns, bar.whole)]), *inside))
        start += ns
    return tag("g", hint([f"{bar.name}: {short_time(bar.whole)}"]), *drawn, data_link=bar.step)


def _mean_bar(table: ReportTable) -> _Bar:
    """The means of the parts of a rank that took time, without what is subtracted because it counts twice."""
    at = table.headings.index("Mean")
    means = [(str(row.cells[0]), _value(row.cells[at])) for row in table.rows]
    return _Bar(f"rank {table.ids['rank']}", [(name, ns) for name, ns in means[:-1] if ns > 0], means[-1][1])


def _device_bars(run: Run, rank: int, duration: Mapping[str, Cell]) -> Iterator[_Bar]:
    """The time of each device of a rank, from its first work to its last, for a step in the mean."""
    steps = _value(duration["Steps"])
    for time in run.device_times:
        if time.rank == rank and steps and time.span_ns:
            yield _device_bar(time, steps)


def _device_bar(time: DeviceTime, steps: float = 1) -> _Bar:
    parts = {
        "computing": time.compute_ns - time.overlap_ns,
        "overlapped communication": time.overlap_ns,
        "exposed communication": time.exposed_ns,
        "copying only": time.copy_alone_ns,
        "idle": time.idle_ns,
    }
    return _Bar(time.device, [(name, ns / steps) for name, ns in parts.items() if ns > 0], time.span_ns / steps)


def drawn_device(run: Run, time: DeviceTime) -> str:
    """How a device used its time, as a bar."""
    bar = _device_bar(time)
    rank = f" of rank {time.rank}" if len(run.metas) > 1 else ""
    axis = Axis(0, time.span_ns, 0, WIDTH)
    caption = f"From its first work to its last, {short_time(time.span_ns)}. Copying only: copies (memcpy) and fills "
    caption += "(memset) while the device neither computes nor communicates."
    signs = [Sign(_color_of_part(name), f"{name} {_with_share(ns, bar.whole)}") for name, ns in bar.parts]
    drawn = [_drawn_bar(bar, axis, 0, is_named=False)]
    return picture(title_of(run, f"{time.device}{rank}"), caption, drawn, (WIDTH, _BAR), signs)


def _value(cell: Cell) -> float:
    value = cell.value if isinstance(cell, ReportCell) else 0
    return value if isinstance(value, (int, float)) else 0


def _single_steps(run: Run) -> Iterator[_Bar]:
    """The steps of the timeline: the phases of layers, the optimizer, data, and the rest. Each moment counts once, for
    the innermost of these spans: what is recomputed inside a span of backward is not backward. Of several threads, the
    first one comes last: it waits for the others, as for that of backward on a device."""
    if run.timeline is None or run.timeline.spans is None or not len(run.timeline.spans):
        return
    spans = run.timeline.spans
    if spans.dropped:  # of what came after the last span nothing is known
        last = max(spans.columns["start_ns"])
        spans = replace(spans, steps=tuple(end for end in spans.steps if end <= last))
    times = [dict.fromkeys([*PHASES, *_LABELS.values()], 0) for _ in spans.steps[1:]]
    of_names = [next((part for start, part in _LABELS.items() if name.startswith(start)), "") for name in spans.names]
    of_lanes: defaultdict[int, list[_Stretch]] = defaultdict(list)
    columns = zip(*(spans.columns[name] for name in spans.COLUMNS))
    for start, end, lane, layer, phase, name in sorted(columns, key=lambda span: (span[0], -span[1])):
        part = of_names[name] if name >= 0 else PHASES[phase] if layer >= 0 else ""
        if part and spans.lanes[lane].device == "cpu":
            of_lanes[lane].append(_Stretch(start, end, part))
    free = [(number, start, end) for number, (start, end) in enumerate(pairwise(spans.steps))]
    for lane in sorted(of_lanes, reverse=True):
        free = _counted([*_innermost(of_lanes[lane])], free, times)
    for number, (of_step, (start, end)) in enumerate(zip(times, pairwise(spans.steps))):
        rest = max(end - start - sum(of_step.values()), 0)
        parts = [(part, ns) for part, ns in [*of_step.items(), ("other", rest)] if ns > 0]
        yield _Bar(f"step {number + 1}", parts, end - start, number)


_LABELS = {OPTIMIZER_STEP: PARTS_OF_NO_LAYER["step_optimizer_ns"], LOADING: PARTS_OF_NO_LAYER["step_data_ns"]}
"""The labels that are parts of a step, by how they begin."""


class _Stretch(NamedTuple):
    """A part of the time of a thread, in ns."""

    start: int
    end: int
    part: str


def _innermost(spans: Iterable[_Stretch]) -> Iterator[_Stretch]:
    """Of spans that are nested or apart, outer ones first: which is the innermost one when, in the order of time."""
    around: list[_Stretch] = []
    at = 0
    for span in chain(spans, [None]):
        while around and (span is None or around[-1].end <= span.start):
            inner = around.pop()
            if at < inner.end:
                yield _Stretch(at, inner.end, inner.part)
            at = max(at, inner.end)
        if span is not None:
            if around and at < span.start:
                yield _Stretch(at, span.start, around[-1].part)
            at = max(at, span.start)
            around.append(span)


def _counted(
    stretches: Sequence[_Stretch], free: Iterable[tuple[int, int, int]], times: Sequence[dict[str, int]]
) -> list[tuple[int, int, int]]:
    """Adds the stretches to the ``times`` of their steps where these are ``free``: (step, start, end). Returns what is
    still free. Both are in the order of time."""
    left = []
    first = 0
    for step, start, end in free:
        while first < len(stretches) and stretches[first].end <= start:
            first += 1
        for number in range(first, len(stretches)):
            if stretches[number].start >= end:
                break
            begin, until = max(stretches[number].start, start), min(stretches[number].end, end)
            left += [(step, start, begin)] if start < begin else []
            times[step][stretches[number].part] += until - begin
            start = until
        left += [(step, start, end)] if start < end else []
    return left


def _color_of_part(name: str) -> str:
    return _COLORS_OF_PARTS.get(name) or _COLORS_OF_PARTS.get(name.rpartition(", ")[2], "no-class")


# The timeline

_SPAN = 16  # pixels of a row of spans
_MEMORY_HEIGHT = 60
_TRACK_NAME = 16


@report("timeline", "a picture: what ran when, with memory on the same axis", suffix="timeline.svg")
def timeline(run: Run) -> str:
    """The spans of layers, labels and kernels over time, a line for each thread and phase and each stream; steps; and
    live memory on the same axis. Spans that are narrower than a pixel are drawn once for each pixel.

    Raises TorchprofError if the run does not have them: they are recorded with ``with_timeline=True``.
    """
    recorded = run.timeline
    if recorded is None or recorded.spans is None or not len(recorded.spans):
        raise TorchprofError(
            "This run does not say what ran when: record it with torchprof.Profile(model, with_timeline=True)."
        )
    spans = recorded.spans
    numbers, names = tracks_of(spans)
    of_tracks: list[list[tuple[int, ...]]] = [[] for _ in names]
    for start, end, lane, layer, phase, name in zip(*(spans.columns[name] for name in spans.COLUMNS)):
        of_tracks[numbers[lane, phase]].append((start, -end, layer, name))
    end_ns = max(max(spans.columns["end_ns"]), *spans.steps, 1)
    axis = Axis(0, end_ns, 0, WIDTH)
    colors = colors_of(run)
    parts: list[str] = []
    kinds: set[str] = set()
    y = float(_TRACK_NAME) if spans.steps else 0.0
    for name, track in zip(names, of_tracks):
        drawn, rows = _track(run, sorted(track), spans.names, axis, y + _TRACK_NAME, colors, kinds)
        parts += [text(name, 0, y + 11), *drawn]
        y += _TRACK_NAME + rows * _SPAN + 6
    for device in recorded.devices:
        course = course_of(recorded, device)
        if course is not None and run.of_rank(recorded.rank).memory:
            parts.append(_memory_strip(course, device, axis, y + _TRACK_NAME))
            y += _TRACK_NAME + _MEMORY_HEIGHT + 6
    parts += _step_marks(spans.steps, axis, y)
    parts.insert(0, axis_x(axis, 0, y, time_words))
    rank = f" on rank {recorded.rank}" if len(run.metas) > 1 else ""
    lost = f" The last {spans.dropped:,} spans were not recorded." if spans.dropped else ""
    caption = f"What ran when in the last cycle{rank}, {short_time(end_ns)}.{lost}"
    return standalone(picture(title_of(run, "timeline"), caption, parts, (WIDTH, y + 18), colors.signs(kinds)))


def _track(
    run: Run,
    spans: Sequence[tuple[int, ...]],
    names: Sequence[str],
    axis: Axis,
    top: float,
    colors: Colors,
    kinds: set[str],
) -> tuple[list[str], int]:
    """The spans of a track, nested as they ran; and how many rows they take."""
    parts: list[str] = []
    around: list[int] = []
    until: list[float] = []
    for start, minus_end, layer, name in spans:
        end = -minus_end
        while around and around[-1] <= start:
            around.pop()
        row = len(around)
        around.append(end)
        until += [-1.0] if row == len(until) else []
        x, width = axis(start), max(axis(end) - axis(start), 0.0)
        if width < 1 and x < until[row]:
            continue
        until[row] = x + max(width, 1.0)
        kind = run.layers[layer].kind if layer >= 0 and name < 0 else ""
        kinds.add(kind)
        words = names[name] if name >= 0 else run.layers[layer].path[-1] if layer >= 0 else NO_LAYERS.get(layer, "")
        path = run.layers.name_of(layer)
        y = top + row * _SPAN
        inside = [tag("rect", x=x, y=y, width=max(width - 0.5, 0.5), height=_SPAN - 1, class_=colors.of(kind))]
        if shortened := fitted(words, width - 4):
            inside.append(text(shortened, x + 2, y + 11, class_="ink"))
        about = [path, kind] if name < 0 else [names[name], f"in {path}"]
        parts.append(
            tag("g", hint([*filter(None, about), f"{short_time(end - start)}, from {short_time(start)}"]), *inside)
        )
    return parts, len(until)


def _step_marks(steps: Sequence[int], axis: Axis, bottom: float) -> list[str]:
    """A line where each step began, with its number at the top where there is room."""
    parts: list[str] = []
    written = -inf
    for number, start in enumerate(steps, 1):
        x = axis(start)
        parts.append(tag("line", x1=x, x2=x, y1=0, y2=bottom, class_="mark"))
        if number < len(steps) and x >= written:
            parts.append(text(f"step {number}", x + 3, 11))
            written = x + 60
    return parts


class Course(NamedTuple):
    """Memory over time above the start, as a step function: from each of ``times_ns`` until the next one, ``heights``
    has the bytes by kind (the last kind: unknown)."""

    times_ns: list[int]
    heights: list[list[int]]
    last_ns: int

    @property
    def levels(self) -> list[int]:
        """The bytes of all kinds together."""
        return [*map(sum, self.heights)]


_INTERVALS = 600  # the equal intervals into which memory over time is divided


def course_of(timeline: Timeline, device: str) -> Course | None:
    """The memory of a device over time. Each interval has two steps: its maximum and its last level."""
    if device not in timeline.devices:
        return None
    number = timeline.devices.index(device)
    columns = timeline.columns
    steps = [index for index, where in enumerate(columns["device"]) if where == number]
    if not steps:
        return None
    length = max(columns["time_ns"][steps[-1]] // _INTERVALS, 1)
    alive = [0] * (len(KINDS) + 1)
    times: list[int] = [0]
    heights: list[list[int]] = [alive[:]]

    def add(time: int, level: list[int]) -> None:
        if level != heights[-1]:
            times.append(time)
            heights.append(level)

    for _, interval in groupby(steps, lambda index: columns["time_ns"][index] // length):
        whole = sum(alive)
        highest, top, level = whole, times[-1], alive[:]
        time = top
        for index in interval:
            time, nbytes = columns["time_ns"][index], columns["nbytes"][index]
            alive[columns["kind"][index]] += nbytes
            whole += nbytes
            if whole > highest:
                highest, top, level = whole, time, alive[:]
        add(top, level)
        add(time, alive[:])
    return Course(times, heights, columns["time_ns"][steps[-1]])


def _memory_strip(course: Course, device: str, axis: Axis, top: float) -> str:
    """The memory of a device under a timeline, to its end: what is live after the last step stays so."""
    drawn = _per_pixel(course._replace(last_ns=max(course.last_ns, int(axis.most))), axis)
    levels = drawn.levels
    scale = Axis(min(0, *levels), max(1, *levels), top + _MEMORY_HEIGHT, top)
    words = f"memory on {device} above the start, up to {format_memory(max(levels))}"
    corners = _steps(drawn, levels, axis, scale)
    corners += [(corners[-1][0], scale(0)), (corners[0][0], scale(0))]
    return text(words, 0, top - 5) + tag("path", d=_area(corners), class_="class-1")


def _per_pixel(course: Course, axis: Axis) -> Course:
    """The same with at most two steps in each pixel of an axis: the highest, and the last."""
    kept: list[int] = []
    levels = course.levels
    for _, numbers in groupby(range(len(levels)), lambda number: int(axis(course.times_ns[number]))):
        of_pixel = [*numbers]
        kept += sorted({max(of_pixel, key=levels.__getitem__), of_pixel[-1]})
    return Course([course.times_ns[at] for at in kept], [course.heights[at] for at in kept], course.last_ns)


def _steps(course: Course, levels: Sequence[float], x: Axis, y: Axis) -> list[tuple[float, float]]:
    """The corners of a step function with at most two steps in a pixel. Each is at least half a pixel wide, so that a
    short peak can be seen."""
    ends = [*course.times_ns[1:], course.last_ns]
    corners = []
    right = 0.0
    for start, end, level in zip(course.times_ns, ends, levels):
        left = max(x(start), right)
        right = max(x(end), left + 0.5)
        corners += [(at, y(level)) for at in (left, right)]
    return corners


def _area(corners: Iterable[tuple[float, float]]) -> str:
    """The outline of an area as the data of a path, of horizontal and vertical lines."""
    parts: list[str] = []
    last = "", ""
    for corner in corners:
        x, y = (f"{number:.1f}".removesuffix(".0") for number in corner)
        if not parts:
            parts.append(f"M{x} {y}")
        else:
            parts += [f"H{x}"] * (x != last[0]) + [f"V{y}"] * (y != last[1])
        last = x, y
    return "".join(parts) + "Z"


# Memory over time

LEFT, _HEIGHT = 76, 240


@report("memory-chart", "a picture: memory over time by kind, with its peak", suffix="memory.svg")
def memory_chart(run: Run) -> str:
    """Live memory over time, by what it is used for, of the rank with a timeline, and of its device with the largest
    peak. Raises TorchprofError without one: it is recorded with ``profile_memory=True, with_timeline=True``."""
    recorded = run.timeline
    known = [memory for memory in run.memory if recorded is not None and memory.rank == recorded.rank]
    for memory in sorted(known, key=lambda memory: -memory.peak_bytes):
        if recorded is not None and (course := course_of(recorded, memory.device)) is not None:
            steps = recorded.spans.steps if recorded.spans is not None else ()
            return standalone(drawn_memory(memory, course, steps, title_of_memory(run, memory)))
    raise TorchprofError(
        "This run has no memory over time: record it with torchprof.Profile(model, profile_memory=True, "
        "with_timeline=True)."
    )


def title_of_memory(run: Run, memory: Memory) -> str:
    """The title of the chart of a device, with its rank if the run has several."""
    rank = f", rank {memory.rank}" if len(run.metas) > 1 else ""
    return title_of(run, f"memory on {memory.device}{rank}")


def drawn_memory(memory: Memory, course: Course, steps: Sequence[int], title: str) -> str:
    """Bytes by kind as a stack of steps. Memory that was allocated before the start and freed since is negative: the
    stack begins there, so its upper edge is always the sum."""
    used = [kind for kind in range(len(KINDS) + 1) if any(height[kind] > 0 for height in course.heights)]
    x = Axis(0, max(course.last_ns, 1), LEFT, WIDTH)
    course = _per_pixel(course, x)
    base = [sum(min(nbytes, 0) for nbytes in height) for height in course.heights]
    levels = course.levels
    highest = max(levels)
    y = Axis(min(0, *base), max(highest, 1), _HEIGHT, 10)
    parts = [
        axis_x(x, 10, _HEIGHT, time_words),
        axis_y(y, LEFT, WIDTH, _bytes, "bytes above the start", binary=True),
        plot(x, y, "ns bytes"),
    ]
    names = [*KINDS, "unknown"]
    lower = base
    for kind in used:
        upper = [low + max(height[kind], 0) for low, height in zip(lower, course.heights)]
        corners = [*_steps(course, upper, x, y), *_steps(course, lower, x, y)[::-1]]
        parts.append(tag("path", hint([names[kind]]), d=_area(corners), class_=f"band kind-{kind}"))
        lower = upper
    if not used:  # less than at the start all the time
        parts.append(tag("path", d=_area(_steps(course, levels, x, y)).removesuffix("Z"), class_="roof"))
    parts += [tag("line", x1=x(step), x2=x(step), y1=10, y2=_HEIGHT, class_="mark") for step in steps]
    peak = x(course.times_ns[levels.index(highest)])
    anchor = "end" if peak > WIDTH - 140 else "start"
    words = f"peak {format_memory(highest)}"
    parts += [
        tag("line", x1=float(LEFT), x2=float(WIDTH), y1=y(0), y2=y(0), class_="zero"),
        tag("line", x1=peak, x2=peak, y1=4, y2=_HEIGHT, class_="zero"),
        text(words, peak + (-5 if anchor == "end" else 5), 14, text_anchor=anchor, class_="name"),
    ]
    caption = "Live memory over time above the start of the recording, by what it is used for."
    caption += " Dashed: steps." if steps else ""
    if highest != memory.peak_bytes:  # of another cycle, or after what was recorded
        caption += f" This is the last cycle; the peak of all, {format_memory(memory.peak_bytes)}, is not in it."
    signs = [Sign(f"kind-{kind}", names[kind]) for kind in used]
    return picture(title, caption, parts, (WIDTH, _HEIGHT + 18), signs)


def _bytes(nbytes: float) -> str:
    """A round number of bytes: "16 MB"."""
    return str(format_memory(int(nbytes))).replace(".00 ", " ")
