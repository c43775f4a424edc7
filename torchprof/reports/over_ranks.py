"""What the ranks of a job did, as pictures: their own work by layer, and a step of a pipeline."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import log2
from statistics import median
from typing import NamedTuple

from torchprof.analyze.report import report
from torchprof.errors import TorchprofError
from torchprof.ranks import Balance, balance_of
from torchprof.ranks.compared import OneRank
from torchprof.ranks.pipeline import OnePipeline
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.ranks.sentences import name_of, unit_of
from torchprof.reports.charts import WIDTH, Axis, Sign, axis_x, fitted, hint, picture, standalone, tag, text, time_words
from torchprof.reports.icicle import title_of
from torchprof.run.formats import format_time, ranks_in_words
from torchprof.run.run import Run
from torchprof.run.timeline import ACTIONS
from torchprof.run.words import PHASES, number_of_phase

_ROW = 22  # pixels

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
