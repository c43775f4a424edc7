"""The icicle as a picture: the layers of a run, as wide as their shares; and of two runs, with what changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torchprof.analyze.columns import MEASURE_OF, Column
from torchprof.analyze.figures import measured_by_all
from torchprof.analyze.report import report
from torchprof.comparison.diff import FASTER, LESS, MORE, SAME, SLOWER, WITHIN_NOISE, Change, Diff, Pair
from torchprof.comparison.layers import ADDED, REMOVED
from torchprof.comparison.table import diff_headline, main_of, signed
from torchprof.errors import TorchprofError, printable
from torchprof.first_screen.headline import main_field
from torchprof.reports.charts import (
    CLASSES,
    WIDTH,
    Axis,
    Sign,
    axis_x,
    fitted,
    hint,
    picture,
    standalone,
    tag,
    text,
    width_of,
)
from torchprof.run.formats import AT_LEAST, FORMATS, as_range, format_share
from torchprof.run.run import Run
from torchprof.run.words import NO_LAYERS

_ROW = 22  # pixels of a row of blocks


def time_measured(run: Run) -> str:
    """The field of the time in which layers are compared: of the device, if all ranks measured it."""
    return "device_ns" if "device_ns" in measured_by_all(run) else "cpu_ns"


class Colors:
    """The class of CSS for each class of layers: the classes with most self have a color of their own."""

    def __init__(self, kinds: Iterable[str]) -> None:
        self.kinds = [*kinds][:CLASSES]

    def of(self, kind: str) -> str:
        return f"class-{self.kinds.index(kind) if kind in self.kinds else CLASSES}" if kind else "no-class"

    def signs(self, kinds: Iterable[str]) -> list[Sign]:
        """The legend of those that a picture has."""
        drawn = {*kinds} - {""}
        signs = [Sign(self.of(kind), kind) for kind in self.kinds if kind in drawn]
        return [*signs, *([Sign(f"class-{CLASSES}", "other classes")] if drawn - {*self.kinds} else [])]


def colors_of(run: Run) -> Colors:
    """The colors of a run, the same in all its pictures: by self in what the headline speaks of."""
    own = run.rows.of_recording.summed("layer", main_field(run))
    sums: Counter[str] = Counter()
    for index, layer in enumerate(run.layers):
        sums[layer.kind] += max(own.get(index, 0), 0)
    return Colors(kind for kind, _ in sums.most_common() if kind)


# The icicle

_FEWEST_EQUAL = 3
_ALIKE = 1.5  # times: the largest of equal layers, the smallest
_LEAST_WIDTH = 1.0  # pixels; smaller neighbors are one block
_MOST_ROWS = 40


class _Block(NamedTuple):
    """Equal neighbors as one block, or one layer (negative: work of no layer, or everything). ``hidden``: the number of
    layers that are too small for a block of their own."""

    members: tuple[int, ...]
    siblings: int
    left: float
    width: float
    row: int
    hidden: int = 0


_EVERYTHING = -9  # in place of a layer's index


class Icicle:
    """The blocks of a run: of a field of ``Cost``, in one phase or (None) in all. ``grouped``: equal layers are one."""

    def __init__(self, run: Run, field: str, phase: str | None = None, *, grouped: bool = True) -> None:
        self.run, self.field = run, field
        layers = run.layers
        self.own = dict(run.rows.of_recording.summed("layer", field, phase=phase))
        self.totals = dict(enumerate(layers.roll_up([self.own.get(index, 0) for index in range(len(layers))])))
        self.totals |= {index: self.own.get(index, 0) for index in NO_LAYERS}
        self.below: dict[int, list[int]] = {_EVERYTHING: []}
        for index in range(len(layers)):
            above = layers.parent[index]
            self.below.setdefault(above if above >= 0 else _EVERYTHING, []).append(index)
        self.below[_EVERYTHING] += [index for index in NO_LAYERS if self.totals[index] > 0]
        self.whole = sum(max(self.totals[index], 0) for index in self.below[_EVERYTHING])
        self.totals[_EVERYTHING] = self.whole
        self.write = FORMATS[MEASURE_OF[field].unit]
        counter = MEASURE_OF[field].lower_bound_if
        self.is_lower_bound = counter is not None and run.rows.total(counter, phase=phase) > 0
        paths = run.meta.paths
        self.selected = None if paths is None else {*paths}
        self._shapes = self._numbers_of_shapes() if grouped else {}

    def _numbers_of_shapes(self) -> dict[int, int]:
        """A number for each layer: equal for two if they and all below them, by name, have the same classes, settings
        and parameters."""
        known: dict[Any, int] = {}
        shapes: dict[int, int] = {}
        layers = self.run.layers
        for index in range(len(layers) - 1, -1, -1):  # children come after their parents
            layer = layers[index]
            inside = tuple((layers[child].path[-1], shapes[child]) for child in self.below.get(index, ()))
            shapes[index] = known.setdefault((layer.kind, layer.settings, layer.params, inside), len(known))
        return shapes

    def draw(self, width: float, color_of: Callable[[int], str]) -> tuple[list[str], float]:
        """The blocks in a width, and their height. ``color_of``: the class of CSS of a layer."""
        blocks = [*self._blocks(width)] if self.whole > 0 else []
        height = _ROW * (1 + max((block.row for block in blocks), default=-1))
        return [self._drawn(block, color_of) for block in blocks], height

    def _blocks(self, width: float) -> Iterator[_Block]:
        """The blocks, each before those below it. The first is everything, or the only model if nothing else ran."""
        tops = self.below[_EVERYTHING]
        waiting = [_Block((tops[0] if len(tops) == 1 else _EVERYTHING,), 1, 0.0, width, 0)]
        while waiting:
            block = waiting.pop()
            yield block
            if block.hidden or block.row + 1 >= _MOST_ROWS:
                continue
            whole = sum(max(self.totals[index], 0) for index in block.members)
            children = [self.below.get(index, ()) for index in block.members]
            left = block.left
            small: _Block | None = None  # neighbors that are too narrow are one block
            for first, end in _groups(children, self.totals, self._shapes):
                members = tuple(index for of_member in children for index in of_member[first:end])
                part = block.width * sum(max(self.totals[index], 0) for index in members) / whole if whole else 0
                if part >= _LEAST_WIDTH:
                    waiting += [_Block(members, end - first, left, part, block.row + 1), *([small] if small else [])]
                    small = None
                elif part > 0:
                    small = small or _Block(members, 1, left, 0.0, block.row + 1)
                    small = small._replace(width=small.width + part, hidden=small.hidden + len(members))
                left += part
            waiting += [small] if small else []

    def _drawn(self, block: _Block, color_of: Callable[[int], str]) -> str:
        """A block with as much of its name, its class and its share as it has room for."""
        layers, [index, *_] = self.run.layers, block.members
        if block.hidden:
            place = {"x": block.left, "y": float(block.row * _ROW), "width": max(block.width - 1, 0.5)}
            words = f"{block.hidden} smaller layer{'s' * (block.hidden > 1)}"
            inside = [tag("rect", hint([words]), **place, height=_ROW - 1, rx=2, class_="rest")]
            return "".join([*inside, text(fitted(words, block.width - 8), block.left + 4, place["y"] + 15)])
        kind = layers[index].kind if index >= 0 else ""
        path = layers[index].path if index >= 0 else (NO_LAYERS.get(index, "everything"),)
        shares = sorted(self.totals[member] / self.whole for member in block.members)
        least, most = (str(format_share(share)) for share in (shares[0], shares[-1]))
        each = most if least == most else as_range(least, most)
        share = f"{len(shares)} × {each}" if len(shares) > 1 else each
        is_selected = index < 0 or self.selected is None or path in self.selected
        if not is_selected or self.is_lower_bound:  # if not selected, its width is that of the layers in it
            share = ""
        last = layers[block.members[block.siblings - 1]].path[-1] if block.siblings > 1 else ""
        name = printable(f"{path[-1]}–{last}" if last else path[-1])
        x, y = block.left, float(block.row * _ROW)
        inside = [tag("rect", x=x, y=y, width=max(block.width - 1, 0.5), height=_ROW - 1, rx=2, class_=color_of(index))]
        room = block.width - 10
        if (both := f"{name} {share}") == fitted(both, room):
            has_room = width_of(f"{name}  {kind} {share}") <= room
            shown = kind if kind != name and has_room else ""
            inside.append(text(name, x + 5, y + 15, shown, class_="ink"))
            inside.append(text(share, x + block.width - 6, y + 15, text_anchor="end", class_="ink"))
        elif shortened := fitted(name, block.width - 8):
            inside.append(text(shortened, x + 4, y + 15, class_="ink"))
        more = f" and {len(block.members) - 1} like it" if len(block.members) > 1 else ""
        figure = self.write(sum(self.totals[member] for member in block.members))
        about = f"{figure}, {share} of the total" if share else f"{figure}, or more" if is_selected else "not selected"
        return tag("g", hint([f"{'.'.join(path)}{more}", kind, about]), *inside)


def _groups(
    children: Sequence[Sequence[int]], totals: Mapping[int, int], shapes: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """The first and the end of each group of equal neighbors. ``children``: those of each member of the block above."""
    siblings = children[0]
    sums = [sum(max(totals[others[place]], 0) for others in children) for place in range(len(siblings))]
    first = 0
    while first < len(siblings):
        end = first + 1
        while end < len(siblings) and shapes.get(siblings[end], -1) == shapes.get(siblings[first], -2):
            of_group = sums[first : end + 1]
            if not min(of_group) > 0 or max(of_group) > _ALIKE * min(of_group):
                break
            end += 1
        end = end if end - first >= _FEWEST_EQUAL else first + 1
        yield first, end
        first = end


@report("icicle", "a picture: the layers, as wide as their shares", suffix="icicle.svg")
def icicle(run: Run, *, phase: str | None = None) -> str:
    """The layers as blocks, each as wide as its share of what the headline speaks of (time of the device or the CPU,
    FLOPs), with the layers in it below it. Three or more equal layers in a row are one block.

    ``phase``: None is the sum of all. Raises TorchprofError if nothing of that was recorded.
    """
    drawn = Icicle(run, main_field(run), phase)
    name = _name_of(run, drawn.field)
    if drawn.whole <= 0:
        in_phase = "" if phase is None else f" in {phase}"
        raise TorchprofError(f"This run has no {name}{in_phase}, so there are no blocks to draw.")
    colors = colors_of(run)
    kinds: set[str] = set()

    def color_of(index: int) -> str:
        kind = run.layers[index].kind if index >= 0 else ""
        kinds.add(kind)
        return colors.of(kind)

    parts, height = drawn.draw(WIDTH, color_of)
    phases = " and ".join(run.phases() if phase is None else [phase])
    whole = f"{AT_LEAST} {drawn.write(drawn.whole)}" if drawn.is_lower_bound else drawn.write(drawn.whole)
    ranks = f", the sum of {len(run.metas)} ranks" if len(run.metas) > 1 else ""
    caption = f"Width: {name}, {phases}{ranks}; the whole is {whole}."
    return standalone(picture(title_of(run, "layers"), caption, parts, (WIDTH, height), colors.signs(kinds)))


def title_of(run: Run, what: str) -> str:
    """The title of a picture: the model, and what is shown of it."""
    return f"{run.meta.title}: {what}"


def _name_of(run: Run, field: str) -> str:
    device = run.meta.device_heading
    names = {"cpu_ns": "CPU time", "device_ns": f"{device} time"}
    return names.get(field) or MEASURE_OF[field].heading.format(device=device)


# The picture of a comparison

_CHANGES = 10
_NAMES = 330  # pixels of the names of layers
_FIGURES = 250  # pixels of their figures
_SIGNS = (
    Sign("less", "less than before"),
    Sign("quiet", "the same, within noise, or unknown"),
    Sign("more", "more than before, or added"),
    Sign("removed", "removed"),
)


@report("picture", "a picture: the largest changes, and the layers before and after", suffix="diff.svg", of="diff")
def diff_picture(diff: Diff) -> str:
    """The ten largest changes of self as bars with their noise, and the layers before above those after, on one scale,
    in the colors of the change. See ``drawn_diff``."""
    return standalone(drawn_diff(diff, diff_headline(diff)))


def drawn_diff(diff: Diff, lead: str = "") -> str:
    """Bars: the change of self of the main quantity of the report "table" in each phase, the largest first, those
    within noise last. A line over a bar is as long as the interquartile range of the noisier run on both sides, where
    that is known. ``lead``: how the caption begins."""
    main = main_of(diff)
    totals = [main]
    if main.measure is not None:
        totals = [other for other in diff.quantities if other.measure == main.measure and not other.is_self]
    parts, height = _bars(diff, [*map(diff.self_of, totals)])
    phases = " and ".join(total.phase for total in totals)
    words = [f"Bars: change of self, {phases}." if parts else "No layer changed."]
    if any('class="noise"' in part for part in parts):
        words.append("A line reaches the interquartile range of the noisier run to each side, or to the edge.")
    if main.measure is not None and main.what == "cost":
        below, high = _before_and_after(diff, totals)
        parts.append(tag("g", *below, transform=f"translate(0 {height + 8:.0f})"))
        height += 8 + high
        words.append(
            "Below: the layers before and after, on one scale, in all phases; colors are of the change of totals."
        )
    return picture(
        f"{main.heading}: what changed", " ".join(filter(None, [lead, *words])), parts, (WIDTH, height), _SIGNS
    )


def _bars(diff: Diff, quantities: Sequence[Column]) -> tuple[list[str], float]:
    changed = [
        (pair, quantity, change)
        for pair in diff.walk()
        for quantity in quantities
        if (change := pair.changes.get(quantity.key)) and change.difference
    ]
    changed.sort(key=lambda part: (part[2].verdict in (SAME, WITHIN_NOISE), -abs(diff.weight(part[2]))))
    shown = changed[:_CHANGES]
    if not shown:
        return [], 0.0
    shown.sort(key=lambda part: (color_of_change(part[0], [part[2]]) == "quiet", -abs(part[2].difference or 0)))
    noise = [change.noise.spread * diff.calls_in_figures if change.noise else 0.0 for _, _, change in shown]
    ends = [change.difference or 0 for _, _, change in shown]
    most = 2 * max(map(abs, ends))  # longer lines are cut off
    reach = [max(min(end + sign * spread, most), -most) for end, spread in zip(ends, noise) for sign in (-1, 1)]
    axis = Axis(min(0, *ends, *reach), max(0, *ends, *reach), _NAMES, WIDTH - _FIGURES)
    height = float(_ROW * len(shown))
    parts = [axis_x(axis, 0, height, lambda value: _rounded(str(signed(quantities[0], value))) if value else "0")]
    for number, ((pair, quantity, change), spread, end) in enumerate(zip(shown, noise, ends)):
        y = number * _ROW
        left, right = sorted((axis(0), axis(end)))
        name = ".".join(pair.path) + (f", {quantity.phase}" if len(quantities) > 1 else "")
        parts.append(
            text(name if len(name) < 50 else f"…{name[-48:]}", _NAMES - 8, y + 15, text_anchor="end", class_="ink")
        )
        words = [name, str(signed(quantity, end)), change.verdict]
        css = color_of_change(pair, [change])
        parts.append(
            tag("rect", hint(words), x=left, y=y + 3, width=max(right - left, 1.0), height=_ROW - 6, class_=css)
        )
        if spread:
            middle = y + _ROW / 2
            parts.append(
                tag("line", x1=axis(end - spread), x2=axis(end + spread), y1=middle, y2=middle, class_="noise")
            )
        parts.append(text(_figures_of(quantity, pair, change), WIDTH - _FIGURES + 10, y + 15))
    parts.append(tag("line", x1=axis(0), x2=axis(0), y1=0, y2=height, class_="zero"))
    return parts, height + 24


def _rounded(words: str) -> str:
    """A round number without its decimals: "+5ms"."""
    return re.sub(r"\.0+(?=\D|$)", "", words)


def _figures_of(quantity: Column, pair: Pair, change: Change) -> str:
    """The figures before and after, and their ratio: "12.0ms → 15.1ms (1.26×)"."""
    before, after = (str(change.figure(side).text(quantity.write)) for side in (0, 1))
    if pair.how in (ADDED, REMOVED):
        return f"{after}, added" if pair.how == ADDED else f"{before}, removed"
    ratio = "" if change.ratio is None else f" ({change.ratio:.2f}×)"
    return f"{before} → {after}{ratio}"


def color_of_change(pair: Pair, changes: Sequence[Change]) -> str:
    """The class of CSS of a change in one or several phases, as on the page: that of the phases in which it is beyond
    noise."""
    if pair.how in (ADDED, REMOVED):
        return "more" if pair.how == ADDED else "removed"
    beyond = [change for change in changes if change.verdict in (SLOWER, FASTER, MORE, LESS)]
    difference = sum(change.difference or 0 for change in beyond)
    return "quiet" if not difference else "more" if difference > 0 else "less"


def _before_and_after(diff: Diff, totals: Sequence[Column]) -> tuple[list[str], float]:
    """The layers of both runs, in the phases of these quantities, which are all: widths are for a call or a step if the
    figures are."""
    assert totals[0].measure is not None
    field = totals[0].measure.fields[0][0]
    pairs = [pair for pair in diff.walk() if pair.is_layer]
    of_sides = (
        {pair.before.path: pair for pair in pairs if pair.before},
        {pair.after.path: pair for pair in pairs if pair.after},
    )
    of_none = {pair.name: pair for pair in diff.walk() if not pair.is_layer}
    drawn = [Icicle(run, field, grouped=False) for run in (diff.before, diff.after)]
    counts = diff.counts if diff.unit else (1, 1)
    wholes = [each.whole / count for each, count in zip(drawn, counts)]
    parts: list[str] = []
    y = 0.0
    for words, each, whole, of_side in zip(("before", "after"), drawn, wholes, of_sides):

        def color_of(index: int, each: Icicle = each, of_side: Mapping[tuple[str, ...], Pair] = of_side) -> str:
            is_layer = index >= 0
            pair = of_side.get(each.run.layers[index].path) if is_layer else of_none.get(NO_LAYERS.get(index, ""))
            if pair is None:
                return "quiet"
            return color_of_change(pair, [pair.changes[total.key] for total in totals if total.key in pair.changes])

        blocks, height = each.draw(WIDTH * whole / max(*wholes, 1e-9), color_of)
        per = f" a {diff.unit}" if diff.unit else ""
        parts.append(text(f"{words}: {each.write(round(whole))}{per}", 0, y + 12, class_="ink"))
        parts.append(tag("g", *blocks, transform=f"translate(0 {y + 18:.0f})"))
        y += 18 + height + 10
    return parts, y
