"""What ranks and devices do in a step, as pictures: the parts of a step, own work by layer, a step of a pipeline."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from math import log2
from statistics import median
from typing import NamedTuple

from torchprof.analyze.report import ReportTable, report, tables_and_sentences
from torchprof.analyze.steps import PARTS_OF_NO_LAYER, steps
from torchprof.errors import TorchprofError
from torchprof.ranks import Balance, balance_of
from torchprof.ranks.compared import OneRank
from torchprof.ranks.pipeline import OnePipeline
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.ranks.sentences import name_of, unit_of
from torchprof.reports.charts import WIDTH, Axis, Sign, axis_x, fitted, hint, picture, standalone, tag, text, time_words
from torchprof.reports.icicle import title_of
from torchprof.run.formats import Cell, ReportCell, format_share, format_time, ranks_in_words, short_time
from torchprof.run.run import Run
from torchprof.run.timeline import ACTIONS, DeviceTime
from torchprof.run.words import LOADING, OPTIMIZER_STEP, PHASES, number_of_phase

_ROW = 22  # pixels

# The parts of a step

_BAR = 26  # pixels
_NAME_OF_BAR = 70
_MOST_BARS = 16  # of ranks, and of steps
_IN_STEPS = 0.95  # of the recorded time, from which on that of a device, divided by the steps, is about that of a step
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
    """What a step is made of in the mean, on each rank, how the devices of the slowest rank used it, and the steps of
    the timeline. Raises TorchprofError if no loop was recorded."""
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
    if devices:
        caption += " Devices: the time from their first work to their last, divided by the steps."
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
    """The time of each device of a rank, from its first work to its last, for a step in the mean. Nothing if more
    than a little of the recorded time is in no step: what ran then is not known."""
    steps = _value(duration["Steps"])
    (wall_ns,) = (meta.wall_ns for meta in run.metas if meta.rank == rank)
    in_steps = steps * _value(duration["Mean"]) >= _IN_STEPS * wall_ns
    for time in run.device_times:
        if time.rank == rank and in_steps and time.span_ns:
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


# The own work of ranks as a heat map

_MOST_LAYERS = 24
_MOST_COLUMNS = 64  # with more ranks, neighbors share a column
_WRITTEN_COLUMNS = 12  # with up to so many columns, cells have their figures
_DEEPEST = log2(1.5)  # the ratio to the median from which on the color does not get deeper
_NAMES, _FIRST_CELL = 310, 390
_WIDEST_CELL = 90
_STRONG = 0.55  # of a color, with another color of text

_SIGNS = (Sign("less", "less than the median"), Sign("quiet", "the median"), Sign("more", "more than the median"))
_ABSENT = Sign("removed", "layer not on this rank")


@report("ranks-chart", "a picture: own work of each rank by layer, relative to the median", suffix="ranks.svg")
def ranks_chart(run: Run, *, phase: str | None = None) -> str:
    """The own work of each rank relative to the median of the ranks, as a heat map of the layers that differ most.

    ``phase``: None is the sum of all. Raises TorchprofError if the run has one rank, or no times of single layers by
    rank.
    """
    phases = run.phases() if phase is None else [PHASES[number_of_phase(phase)]]
    drawn = drawn_ranks(run, balance_of(run), phases) if len(run.metas) > 1 else None
    if drawn is None:
        in_phase = "" if phase is None else f" in {phase}"
        raise TorchprofError(
            f"This run has no times of layers by rank{in_phase}: merge the runs of all ranks with torchprof.merge, or "
            "open a job folder."
        )
    return standalone(drawn)


class _Line(NamedTuple):
    """A layer, its own work on each rank that has it, and the median of that. ``layer``: as in ``OneLayer``."""

    layer: int
    name: str
    work: Mapping[int, int]
    median: float

    @property
    def above_mean(self) -> float:
        return max(self.work.values()) - sum(self.work.values()) / len(self.work)


def drawn_ranks(
    run: Run, balance: Balance, phases: Sequence[str], nodes: Mapping[int, int | None] | None = None
) -> str | None:
    """The heat map of these phases; None if nothing is known of them. ``nodes``: those of the layers on the page."""
    lines = _lines(run, balance, phases)
    if not lines:
        return None
    columns = [*_columns(balance.ranks)]
    cell = min((WIDTH - _FIRST_CELL) / len(columns), _WIDEST_CELL)
    every = 1 if cell >= _ROW else 8
    parts = [text("median", _FIRST_CELL - 10, 12, text_anchor="end")]
    for number, ranks in enumerate(columns):
        if number % every == 0:
            parts.append(text(str(ranks[0]), _FIRST_CELL + (number + 0.5) * cell, 12, text_anchor="middle"))
    for row, line in enumerate(lines, 1):
        y = row * _ROW
        node = None if nodes is None else nodes.get(line.layer)
        name = fitted(line.name[::-1], _NAMES)[::-1]  # its end says more than its beginning
        parts.append(tag("g", hint([line.name]), text(name, 0, y + 15, class_="ink"), data_link=node))
        parts.append(text(str(format_time(round(line.median))), _FIRST_CELL - 10, y + 15, text_anchor="end"))
        parts += [
            _cell(line, ranks, (_FIRST_CELL + number * cell, y, cell - 1), is_written=len(columns) <= _WRITTEN_COLUMNS)
            for number, ranks in enumerate(columns)
        ]
    together = len(columns[0])
    each = f"One column for up to {together} ranks, the one with the most:" if together > 1 else "One column per rank:"
    caption = (
        f"{each} own work{unit_of(run)} of a layer with all below it, {' and '.join(phases)}, relative to the median "
        "of the ranks. Full color: 1.5× or more, 0.67× or less. The layers that differ most."
    )
    signs = [*_SIGNS, *([_ABSENT] if any(len(line.work) < len(balance.ranks) for line in lines) else [])]
    return picture(title_of(run, "own work of the ranks"), caption, parts, (WIDTH, _ROW * (len(lines) + 1)), signs)


def _lines(run: Run, balance: Balance, phases: Sequence[str]) -> list[_Line]:
    """The layers that differ most, in the order of the model."""
    work: dict[int, dict[int, int]] = {}
    for row in balance.layers:
        if row.work is not None and row.phase in phases:
            sums = work.setdefault(row.layer, {})
            for rank, ns in zip(row.work.ranks, row.work.values):
                sums[rank] = sums.get(rank, 0) + ns
    lines = [_Line(layer, name_of(run, layer), of_rank, median(of_rank.values())) for layer, of_rank in work.items()]
    differing = sorted(lines, key=lambda line: -line.above_mean)[:_MOST_LAYERS]
    return [line for line in lines if line in differing]


def _columns(ranks: Sequence[OneRank]) -> Iterator[list[int]]:
    numbers = [rank.rank for rank in ranks]
    together = -(-len(numbers) // _MOST_COLUMNS)
    for first in range(0, len(numbers), together):
        yield numbers[first : first + together]


def _cell(line: _Line, ranks: Sequence[int], place: tuple[float, int, float], *, is_written: bool) -> str:
    """The cell of some ranks that share a column: of the one with the most work."""
    x, y, width = place
    box = {"x": x, "y": float(y), "width": width, "height": _ROW - 1}
    rank = max((rank for rank in ranks if rank in line.work), key=line.work.__getitem__, default=None)
    if rank is None:
        to = f" to {ranks[-1]}" if len(ranks) > 1 else ""
        return tag("rect", hint([f"{line.name} is not on rank {ranks[0]}{to}"]), **box, class_=_ABSENT.class_)
    ns = line.work[rank]
    ratio = ns / line.median if line.median > 0 else None
    strength = 0.0 if ns == line.median else min(abs(log2(ratio)) / _DEEPEST, 1) if ratio else 1.0
    times = "" if ratio is None else f", {ratio:.2f}× the median {format_time(round(line.median))}"
    parts = [hint([f"{line.name}, rank {rank}: {format_time(ns)}{times}"]), tag("rect", **box, class_="quiet")]
    if strength:
        color = "more" if ns > line.median else "less"
        parts.append(tag("rect", **box, class_=color, fill_opacity=f"{strength:.2f}"))
    if is_written:
        words = str(format_time(ns)) if ratio is None else f"{ratio:.2f}"
        css = "strong" if strength > _STRONG else "ink"
        parts.append(text(words, x + width / 2, y + 15, text_anchor="middle", class_=css))
    return tag("g", *parts)


# A step of a pipeline

_MOST_ACTIONS = 6_000  # in a picture: the ranks that come after them are hidden
_FIRST_ACTION = 170
_NAMES_OF_ACTIONS = {"F": "forward", "B": "backward", "I": "backward, inputs", "W": "backward, weights"}
_COLORS = {"F": "class-1", "B": "class-5", "I": "class-0", "W": "class-2"}
_OPACITY = 0.85, 0.35  # of the first stage of a rank and of its last


@report("pipeline-chart", "a picture: a step of a pipeline, rank by rank", suffix="pipeline.svg")
def pipeline_chart(run: Run) -> str:
    """The forwards and backwards of a step over time, a line for each rank: of the first pipeline whose times are
    known. Raises TorchprofError if there is none."""
    for judged in judged_pipelines(run):
        for pipeline in judged.replicas.pipelines:
            if pipeline.typical_steps:
                return standalone(drawn_pipeline(run, pipeline))
    raise TorchprofError(
        "This run has no pipeline with times: record one of torch.distributed.pipelining on all its ranks, and merge "
        "their runs."
    )


def drawn_pipeline(run: Run, pipeline: OnePipeline) -> str:
    """The step of median length. A rank that began the step before the others waits before its first action only as
    long as they let it."""
    steps = pipeline.steps_by_length
    step = steps[(len(steps) - 1) // 2]
    ns = pipeline.step_ns[step]
    shown = pipeline.members[: max(_MOST_ACTIONS // len(pipeline.members[0].actions), 1)]
    axis = Axis(0, ns, _FIRST_ACTION, WIDTH)
    height = float(_ROW * len(shown))
    parts = [axis_x(axis, 0, height, time_words)]
    later = False
    for row, member in enumerate(shown):
        stages = sorted({action.stage for action in member.actions})
        later |= len(stages) > 1
        y = float(row * _ROW)
        words = f"rank {member.rank}, {'stages' if len(stages) > 1 else 'stage'} {', '.join(map(str, stages))}"
        parts.append(tag("g", hint([words]), text(fitted(words, _FIRST_ACTION - 10), 0, y + 15, class_="ink")))
        end, early = 0, pipeline.early_ns(member)[step]
        for action in member.actions:
            waited, took = action.waited_ns[step] - early, action.took_ns[step]
            early = 0
            if waited > 0:
                about = f"rank {member.rank} waits for {format_time(waited)}"
                parts.append(_block(axis, end, waited, y, about, "waiting"))
                end += waited
            after = f", after waiting for {format_time(waited)}" if waited > 0 else ""
            what = f"{_NAMES_OF_ACTIONS[action.what]} of microbatch {action.microbatch} in stage {action.stage}"
            about = f"{what}, rank {member.rank}: {format_time(took)}{after}"
            share = stages.index(action.stage) / max(len(stages) - 1, 1)
            opacity = _OPACITY[0] + share * (_OPACITY[1] - _OPACITY[0])
            parts.append(_block(axis, end, took, y, about, _COLORS[action.what], str(action.microbatch), opacity))
            end += took
    hidden = len(pipeline.members) - len(shown)
    ranks = ranks_in_words([member.rank for member in shown])
    caption = (
        f"The step of median length, {format_time(ns)}, on {ranks}. Numbers are microbatches. Time in which a rank "
        "neither works nor waits, such as that of sending, is at its end."
        f"{' Fainter: the later stages of a rank.' if later else ''}{f' {hidden} ranks are hidden.' if hidden else ''}"
    )
    used = {action.what for member in shown for action in member.actions}
    signs = [Sign(_COLORS[what], _NAMES_OF_ACTIONS[what]) for what in ACTIONS if what in used]
    signs.append(Sign("waiting", "waiting"))
    return picture(title_of(run, "a step of the pipeline"), caption, parts, (WIDTH, height + 18), signs)


def _block(
    axis: Axis, start: int, ns: int, y: float, about: str, css: str, words: str = "", opacity: float | None = None
) -> str:
    x, width = axis(start), axis(start + ns) - axis(start)
    style = None if opacity is None else f"fill-opacity:{opacity:.2f}"
    inside = [tag("rect", x=x, y=y, width=max(width - 0.5, 0.5), height=_ROW - 2, class_=css, style=style)]
    if words and fitted(words, width - 4) == words:
        inside.append(text(words, x + width / 2, y + 15, text_anchor="middle", class_="ink"))
    return tag("g", hint([about]), *inside)
