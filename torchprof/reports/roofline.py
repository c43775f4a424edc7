"""The roofline as a picture: FLOP/s of layers over their arithmetic intensity, and the measured peak of the machine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import inf, log10, prod, sqrt
from typing import NamedTuple

from torchprof.analyze.columns import MEASURE_OF
from torchprof.analyze.figures import figures_of_layers, measured_by_all, varying_calls
from torchprof.analyze.report import pattern_of, report
from torchprof.errors import TorchprofError
from torchprof.reports.charts import WIDTH, Axis, axis_x, axis_y, hint, picture, plot, standalone, tag, text, width_of
from torchprof.reports.icicle import Colors, colors_of, time_measured, title_of
from torchprof.reports.over_time import LEFT
from torchprof.run.formats import Bound, format_count, format_rate, short_time
from torchprof.run.layers import Layer
from torchprof.run.meta import Peak
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

_NAMED = 10
_LETTERS = 0.9  # of the width of a text: these are smaller
_MOST_POINTS = 400


class Point(NamedTuple):
    """An innermost layer: achieved FLOP/s in forward over its arithmetic intensity in FLOP/byte, and its time."""

    layer: int
    per_byte: float
    per_second: float
    ns: int


def points_of(run: Run) -> list[Point]:
    """The innermost layers with known FLOPs, time, calls and memory traffic, those with most time first."""
    field = time_measured(run)
    if not {"flops", field} <= measured_by_all(run):
        return []
    varying = varying_calls(run)
    inner = {*range(len(run.layers))} - {*run.layers.parent}
    points = []
    for path, figures in figures_of_layers(run, [FORWARD]).items():
        index = run.layers.index_of[path]
        if index not in inner or varying[path] is not False or not (nbytes := traffic_bytes(run.layers[index])):
            continue
        flops, time = (figures.measure(MEASURE_OF[name], FORWARD) for name in ("flops", field))
        calls = figures.number_of_calls()
        is_known = all(figure.bound is Bound.EXACT and figure.value > 0 for figure in (flops, time, calls))
        if is_known:
            per_second = flops.value / time.value * 1e9
            points.append(Point(index, flops.value / calls.value / nbytes, per_second, int(time.value)))
    return sorted(points, key=lambda point: -point.ns)


@report("roofline", "a picture: FLOP/s of the layers, and the measured peak of this machine", suffix="roofline.svg")
def roofline(run: Run) -> str:
    """Achieved FLOP/s of the innermost layers over their arithmetic intensity, with the measured peaks of
    ``torchprof.peak()``. Raises TorchprofError if FLOPs, times or shapes of all layers are unknown."""
    if (drawn := drawn_roofline(run)) is None:
        raise TorchprofError(
            "This run has no layer with known FLOPs, time and memory traffic. FLOPs are recorded with "
            "torchprof.Profile(model, with_flops=True); the traffic of a layer is unknown if the shapes vary from call "
            "to call, or if its parameters cannot be counted."
        )
    return standalone(drawn)


def drawn_roofline(
    run: Run, nodes: Mapping[tuple[str, ...], int] | None = None, colors: Colors | None = None
) -> str | None:
    """The roofline; None without points. ``nodes``: the number of each layer on the page, by its path. ``colors``:
    those of the page.

    Source: Williams, Waterman and Patterson, *Roofline*, CACM 52(4), 2009.
    """
    all_points = points_of(run)
    points = all_points[:_MOST_POINTS]
    if not points:
        return None
    is_on_cpu = time_measured(run) == "cpu_ns"
    roofs = [peak for peak in last_peaks(run) if (peak.device == "cpu") == is_on_cpu]
    height = 320
    right = WIDTH - 10
    x = Axis(min(point.per_byte for point in points), max(point.per_byte for point in points), LEFT, right, log=True)
    speeds = [*(point.per_second for point in points), *(peak.flops_per_s for peak in roofs)]
    y = Axis(min(speeds), max(speeds), height, 14, log=True)
    parts = [
        axis_x(x, 14, height, lambda value: f"{value:g}", "arithmetic intensity (FLOP/byte)"),
        axis_y(y, LEFT, right, lambda value: str(format_count(value)).replace(".00 ", " "), "FLOP/s"),
        plot(x, y, "intensity rate"),
    ]
    drawn_roofs = [_roof(peak, x, y, points) for peak in roofs]
    parts += [line for line, _ in drawn_roofs]
    labels: list[_Label] = []
    for label in (label for _, of_roof in drawn_roofs for label in of_roof):
        while any(map(label.overlaps, labels)):  # of a type that is as fast as another one
            label = label._replace(line=label.line + 13)
        labels.append(label)
    colors = colors or colors_of(run)
    for point in points:
        layer = run.layers[point.layer]
        about = (layer.name, layer.kind, f"{format_rate(point.per_second)} FLOP/s, {point.per_byte:.2f} FLOP/byte")
        of_page = {} if nodes is None else {"data_link": nodes[layer.path]}
        circle = {
            "cx": x(point.per_byte),
            "cy": y(point.per_second),
            "r": _radius(point, points),
            "class_": f"band {colors.of(layer.kind)}",
        }
        parts.append(tag("circle", hint([*about, short_time(point.ns)]), **of_page, **circle))
    names, leaders = _names_of_points(run, points, x, y, labels)
    labels += names
    parts += leaders
    parts += [text(label.words, label.right, label.line, text_anchor="end", class_="name") for label in labels]
    caption = (
        "Forward only. Left of the ridge: memory-bound. Right of it: compute-bound. Bytes are the minimum of a call: "
        "parameters, inputs and outputs, each once. Larger points took more time."
    )
    if not roofs:
        caption += " The roof was not measured: call torchprof.peak() before the profile."
    elif any(_is_above(point, roofs) for point in points):
        caption += " A layer above the roof was faster than the matrix products and copies that measured it."
    if len(points) < len(all_points):
        caption += f" The {_MOST_POINTS} layers with most time are drawn, of {len(all_points):,}."
    signs = colors.signs(run.layers[point.layer].kind for point in points)
    return picture(title_of(run, "roofline"), caption, parts, (WIDTH, height + 36), signs)


def _is_above(point: Point, roofs: Sequence[Peak]) -> bool:
    return all(point.per_second > min(roof.flops_per_s, point.per_byte * roof.bytes_per_s) for roof in roofs)


def last_peaks(run: Run) -> list[Peak]:
    """The last measured peak of each device and type, without zeros and infinities, which a file may have."""
    peaks = [peak for meta in run.metas for peak in meta.peaks]
    drawn = [peak for peak in peaks if 0 < peak.flops_per_s < inf and 0 < peak.bytes_per_s < inf]
    return list({(peak.device, peak.dtype): peak for peak in drawn}.values())


class _Label(NamedTuple):
    """A text and its place in pixels: its ends, and the line on which it is."""

    words: str
    left: float
    right: float
    line: float

    def overlaps(self, other: _Label) -> bool:
        return abs(self.line - other.line) <= 12 and self.left < other.right + 6 and other.left < self.right + 6

    def covers(self, x: float, y: float) -> bool:
        return self.left - 6 < x < self.right + 6 and self.line - 16 < y < self.line + 8


def _roof(peak: Peak, x: Axis, y: Axis, points: Sequence[Point]) -> tuple[str, list[_Label]]:
    """The roof of a device and type, bandwidth up to the ridge, then FLOP/s; and what is written at it, where it covers
    the fewest points."""
    low, high = 10.0**x.least, 10.0**x.most
    start = max(low, 10.0**y.least / peak.bytes_per_s)
    ridge = min(max(peak.flops_per_s / peak.bytes_per_s, start), high)
    corners = [(at, min(peak.flops_per_s, at * peak.bytes_per_s)) for at in (start, ridge, high)]
    line = " ".join(f"{x(at):.1f},{y(speed):.1f}" for at, speed in corners)
    words = f"{format_rate(peak.flops_per_s)} FLOP/s, {peak.dtype} on {peak.device}"
    width = _LETTERS * width_of(words)
    top, free = y(peak.flops_per_s) - 5, max(x.last - 4 - width - x(ridge), 0)
    places = [_Label(words, x.last - 4 - width - back, x.last - 4 - back, top) for back in (0, free / 2, free)]
    covered = [sum(label.covers(x(one.per_byte), y(one.per_second)) for one in points) for label in places]
    labels = [places[covered.index(min(covered))]]
    if ridge > start:
        middle = 10 ** ((log10(start) + log10(ridge)) / 2)
        words, right = f"{peak.bytes_per_s / 1e9:.3g} GB/s", x(middle) - 6
        labels.append(_Label(words, right - _LETTERS * width_of(words), right, y(middle * peak.bytes_per_s) - 6))
    return tag("polyline", points=line, class_="roof"), labels


def _names_of_points(
    run: Run, points: Sequence[Point], x: Axis, y: Axis, others: Sequence[_Label]
) -> tuple[list[_Label], list[str]]:
    """The names of the layers with most time: equal layers of several blocks have one. A name that has no room next to
    its point is above or below it, with a line to the point. ``others``: what is written elsewhere."""
    groups: defaultdict[tuple[str, ...], list[Point]] = defaultdict(list)
    for point in points:
        *blocks, last = run.layers[point.layer].path
        pattern = (*("*" if name.isdecimal() else name for name in blocks), last)
        groups[pattern].append(point)
    labels: list[_Label] = []
    leaders: list[str] = []
    for group in sorted(groups.values(), key=lambda group: -sum(point.ns for point in group))[:_NAMED]:
        path = pattern_of([run.layers[point.layer].path for point in group])
        words = path.partition(".")[2] or path
        words += f" ({len(group)})" if len(group) > 1 else ""
        width = _LETTERS * width_of(words)
        at_x, at_y, far = x(group[0].per_byte), y(group[0].per_second), _radius(group[0], points) + 4
        places = [(at_x + far, at_y + 4), (at_x - far - width, at_y + 4)]
        places += [(at_x - width / 2, at_y - far), (at_x - width / 2, at_y + far + 9)]
        near = len(places)
        aside = (at_x - far - 12 - width, at_x + far + 12, at_x - width / 2)
        places += [(left, at_y + 4 + sign * 14 * lines) for lines in range(1, 20) for sign in (1, -1) for left in aside]
        for number, (left, line) in enumerate(places):
            label = _Label(words, left, left + width, line)
            is_inside = label.left >= x.first and label.right <= x.last and y.last < line - 8 and line < y.first
            if not is_inside or any(map(label.overlaps, (*others, *labels))):
                continue
            if number >= near:
                if any(label.covers(x(point.per_byte), y(point.per_second)) for point in points):
                    continue
                end = min(max(at_x, label.left), label.right)
                edge = line - 10 if line > at_y else line + 2
                leaders.append(tag("line", x1=at_x, y1=at_y, x2=end, y2=float(edge), class_="mark"))
            labels.append(label)
            break
    return labels, leaders


def _radius(point: Point, points: Sequence[Point]) -> float:
    """That of a point, whose area is as its time; the first one has most."""
    return 3 + 9 * sqrt(point.ns / points[0].ns)


def traffic_bytes(layer: Layer) -> int | None:
    """The minimum memory traffic of a forward call: parameters, inputs and outputs of the layer, each once.

    Inputs are assumed to have the type of the outputs. None if unknown: with a dynamic size, outputs of unknown or of
    several types, parameters that cannot be counted, or parameters that are counted at another layer.
    """
    is_dynamic = any(-1 in size for size in (*layer.input_shapes, *layer.output_shapes))
    if layer.param_bytes is None or layer.tied or not layer.output_bytes or not layer.input_shapes or is_dynamic:
        return None
    of_outputs = sum(prod(shape) for shape in layer.output_shapes)
    if not of_outputs or layer.output_bytes % of_outputs:
        return None
    itemsize = layer.output_bytes // of_outputs
    return layer.param_bytes + layer.output_bytes + itemsize * sum(prod(shape) for shape in layer.input_shapes)
