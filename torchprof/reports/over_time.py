"""What ran and what was live when, as pictures: the timeline, and memory over time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from math import inf
from typing import NamedTuple

from torchprof.analyze.report import report
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
from torchprof.run.formats import format_memory, short_time
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS, Memory, Timeline
from torchprof.run.words import NO_LAYERS

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
