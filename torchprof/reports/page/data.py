"""The data of the HTML page as JSON: one or several runs over one tree of layers.

Every figure of a layer comes from the rows of the terminal's tables: the page's script does not add them up again. Only
those of a part of the timeline are its own sums, over the spans.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from torchprof.analyze.columns import MEASURE_OF, Column, columns_of
from torchprof.analyze.device import about_device
from torchprof.analyze.lines import largest_lines, title_of_lines
from torchprof.analyze.ops import SUM_OF_PHASES
from torchprof.analyze.ratios import unusual_ratios
from torchprof.analyze.report import Part, spaced, stacked
from torchprof.analyze.sentences import about_flops, about_times, other_warnings_of
from torchprof.analyze.top import largest_parts, measures_of, title_of_parts
from torchprof.errors import TorchprofError
from torchprof.first_screen.headline import main_field
from torchprof.ranks import balance_of
from torchprof.ranks.sentences import MOST_WHOLE_RANKS
from torchprof.reports.icicle import Colors
from torchprof.reports.over_ranks import drawn_device, drawn_step
from torchprof.reports.page.layers import ALL_PHASES, FiguresOfPage, Take, Tree, differences, layer_data
from torchprof.reports.page.tables import (
    calls_over_time,
    common,
    compared_ranks,
    memory_of,
    pipelines_of_page,
    report_data,
    sum_of_ranks,
    tabs_of_page,
    timeline_of,
)
from torchprof.reports.roofline import drawn_roofline
from torchprof.run.measures import Measure, SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS
from torchprof.run.words import FORWARD, LAUNCHED_BEFORE, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME, PHASES

_POINTS = 24  # values that show the distribution of a layer's calls
_IN_STEPS = 0.98  # of the recorded time, in a loop of which figures are shown for a step
_PLACES = 5  # as many as the report "overview" shows
_PER_CALL = ("cpu_ns", "step_cpu_ns", "step_device_ns")


def _about_figures(run: Run) -> list[str]:
    """Ratios that are unusual, and what makes times uncertain: the sentences below the verdict of the terminal."""
    return [*filter(None, [unusual_ratios(run)]), *about_times(run)]


def page_data(takes: Sequence[Take], compared: Run | None = None) -> dict[str, Any]:
    """All data of the runs on the page, as JSON with arrays of integers.

    The rows of all takes are in one table of columns. Their ``source`` is the rank if there is only one take, else the
    take. A node is a layer of the tree; the nodes after the last layer are ``(outside)``, ``(not selected)`` and work
    launched before the recording, which is in no total.

    ``compared``: what is compared of all ranks of the job, if the only take has some of them.
    """
    shown_first, whole = takes[0].run, takes
    lead = {take.name: "" if len(takes) == 1 else f"{take.name}: " for take in takes}
    sentences = {
        name: [f"{lead[take.name]}{sentence}" for take in takes for sentence in about(take.run)]
        for name, about in (("uncertain", _about_figures), ("warnings", other_warnings_of), ("notes", about_flops))
    }
    if compared is None and len(takes) == 1 and len(shown_first.metas) > 1:
        compared = shown_first
    if len(takes) > 1 and any(len(take.run.metas) > MOST_WHOLE_RANKS for take in takes):
        takes = [take._replace(run=sum_of_ranks(take.run)) for take in takes]
    tree = Tree.of(takes)
    sources = _Sources(takes)
    largest: list[tuple[Callable[[Run], str], list[Part]]] = [
        (title_of_lines, [*largest_lines(shown_first)]),
        (title_of_parts, largest_parts(shown_first, _PLACES) if any(measures_of(shown_first)) else []),
    ]
    shown = []  # each rank if ranks are sources, then all ranks together
    for take, nodes in zip(takes, tree.nodes):
        metas = take.run.metas
        ranks = take.run.of_ranks([meta.rank for meta in metas]) if sources.are_ranks and len(metas) > 1 else ()
        nodes_of = {path: nodes[index] for path, index in take.run.layers.index_of.items()}
        shown += [(run, nodes_of) for run in (*ranks, take.run)]
    figures = FiguresOfPage(shown, tree, are_ranks=sources.are_ranks)
    measures = measures_shown(takes)
    columns = columns_shown(takes, measures, figures.phases)
    classes = figures.classes(main_field(shown_first))
    return {
        "phases": figures.phases,
        "allPhases": PHASES,
        "names": [OUTSIDE_NAME, NOT_SELECTED_NAME, LAUNCHED_BEFORE],
        "kinds": [*KINDS, "unknown"],
        "sources": sources.data(),
        "areRanks": sources.are_ranks,
        "opensOn": _straggler(takes[0].run, sources),
        "largest": [
            (title_of(shown_first), report_data(spaced(parts), tree.nodes[0]))
            for title_of, parts in largest
            if parts and len(takes) == 1
        ],
        "ranks": None if compared is None else compared_ranks(compared, takes[0].run, tree.nodes[0], figures.phases),
        **sentences,
        "pipelines": [
            {"name": take.name if len(takes) > 1 else "", **pipeline}
            for take, nodes in zip(whole, tree.nodes)
            for pipeline in _pipelines(take.run, compared, nodes)
        ],
        "layers": {"parent": array("q", tree.parents), "name": tree.names},
        "takes": [layer_data(take.run, tree, number) for number, take in enumerate(takes)],
        "columns": [column_data(column, where) for column, where in columns],
        "ranges": figures.range_data(),
        "figures": figures.of_columns([column for column, _ in columns]),
        "measures": [measure_data(measure, _device_heading(takes)) for measure in measures],
        "reports": tabs_of_page(shown, figures.phases),
        "classes": classes,
        "operators": figures.operators(main_field(shown_first), [*map(field_of, measures), "uncounted"]),
        **_per_call(takes, tree, sources),
        **_of_devices(takes, tree, sources),
        "timeline": _timeline(takes, tree, sources),
        "step": _step(shown_first) if len(takes) == 1 else None,
        "rooflines": [drawn_roofline(run, nodes_of, Colors(classes)) for run, nodes_of in shown],
    }


def _pipelines(run: Run, compared: Run | None, nodes: Mapping[int, int]) -> list[dict[str, Any]]:
    """The pipelines of all ranks that are compared; those of the run if these were read without their times."""
    of_all = [] if compared is None or compared is run else pipelines_of_page(compared, {})
    return of_all or pipelines_of_page(run, nodes)


class _Sources:
    """The sources of rows: the ranks, if there is only one take, else the takes. ``keys`` are (take, rank or None)."""

    def __init__(self, takes: Sequence[Take]) -> None:
        self.takes = takes
        self.are_ranks = len(takes) == 1
        self.keys: list[tuple[int, int | None]] = [(number, None) for number in range(len(takes))]
        if self.are_ranks:
            self.keys = [(0, meta.rank) for meta in takes[0].run.metas]
        self.numbers = {key: number for number, key in enumerate(self.keys)}

    def of(self, take: int, rank: int) -> int:
        """The number of the source of a take and one of its ranks."""
        return self.numbers[take, rank if self.are_ranks else None]

    def data(self) -> list[dict[str, Any]]:
        sources = []
        for number, rank in self.keys:
            run = self.takes[number].run
            metas = [meta for meta in self.takes[number].run.metas if rank in (None, meta.rank)]
            name = f"rank {rank}" if self.are_ranks else self.takes[number].name
            sources.append(
                {
                    "name": name,
                    "take": number,
                    "measured": common(meta.measured for meta in metas),
                    "steps": _steps(run, rank),
                }
            )
        return sources


def _steps(run: Run, rank: int | None) -> int:
    """How many steps were recorded, of the first rank without ``rank``; 0 if no loop was, or if more than a little of
    the recorded time is in no step: then a total divided by the steps is more than what a step takes."""
    meta = next(meta for meta in run.metas if rank in (None, meta.rank))
    steps = run.samples.get(SampleKey(OUTSIDE, FORWARD, meta.rank, "cpu", "step_ns"))
    return 0 if steps is None or steps.sum < _IN_STEPS * meta.wall_ns else steps.count


class _Sample(NamedTuple):
    """A distribution, with the source and the node that it is of."""

    source: int
    node: int
    key: SampleKey
    spread: Spread


def _per_call(takes: Sequence[Take], tree: Tree, sources: _Sources) -> dict[str, Any]:
    """Durations of calls and steps: distributions, and calls in the order of time; memory peaks of calls."""

    def samples(measures: Sequence[str]) -> Iterator[_Sample]:
        for number, take in enumerate(takes):
            for key, spread in take.run.samples.items():
                of_calls = take.run.samples.get(key._replace(measure="cpu_ns"))
                is_call = key.measure != "cpu_ns" and of_calls is not None and _figures(of_calls) == _figures(spread)
                if key.measure in measures and not is_call:  # a layer may be called once in each step
                    yield _Sample(sources.of(number, key.rank), tree.nodes[number][key.layer], key, spread)

    return {
        "samples": _samples([sample for sample in samples(_PER_CALL) if sample.spread.count > 1]),
        "calls": [
            [sources.of(number, take.run.timeline.rank), *course]
            for number, take in enumerate(takes)
            if take.run.timeline is not None
            for course in calls_over_time(take.run, tree.nodes[number])
        ],
        "peaks": _peaks([*samples(("peak_bytes",))]),
    }


def _timeline(takes: Sequence[Take], tree: Tree, sources: _Sources) -> dict[str, Any] | None:
    """The timeline of the only run."""
    run = takes[0].run
    if len(takes) > 1 or run.timeline is None or (timeline := timeline_of(run, tree.nodes[0])) is None:
        return None
    return {"source": sources.of(0, run.timeline.rank), **timeline}


def _straggler(run: Run, sources: _Sources) -> int | None:
    """The source of the straggler of a job; None if there is none, or if it may be chance."""
    if not sources.are_ranks or len(run.metas) < 2 or (found := balance_of(run).first) is None:
        return None
    return None if found.may_be_chance else sources.numbers.get((0, found.ranks[0]))


def _step(run: Run) -> str | None:
    """The picture of the parts of a step; None if no loop was recorded."""
    try:
        return drawn_step(run)
    except TorchprofError:
        return None


def _figures(spread: Spread) -> tuple[Any, ...]:
    """All that does not depend on when the values were measured."""
    return spread.count, spread.sum, spread.min, spread.max, spread.first, spread.sample


def _of_devices(takes: Sequence[Take], tree: Tree, sources: _Sources) -> dict[str, Any]:
    """The time and the memory of each device."""
    return {
        "devices": [
            {
                "source": sources.of(number, time.rank),
                "device": time.device,
                "picture": drawn_device(take.run, time) if time.span_ns else None,
                "report": report_data(stacked(about_device(time, metas[time.rank])), {}),
            }
            for number, take in enumerate(takes)
            for metas in [{meta.rank: meta for meta in take.run.metas}]
            for time in take.run.device_times
        ],
        "memory": [
            {"source": sources.of(number, memory.rank), **of_device}
            for number, take in enumerate(takes)
            for memory, of_device in memory_of(take.run, tree.nodes[number], with_moves=len(takes) == 1)
        ],
    }


def _samples(samples: Sequence[_Sample]) -> dict[str, Any]:
    """Distributions as columns. ``points``: up to ``_POINTS`` values of each in ascending order, as differences;
    ``size``: how many; ``below`` and ``above``: by how much the smallest and the largest value of all are beyond
    them."""
    spreads = [sample.spread for sample in samples]
    values = [*map(_points, spreads)]
    return {
        **_places(samples),
        "measures": [*_PER_CALL],
        "measure": array("q", [_PER_CALL.index(sample.key.measure) for sample in samples]),
        "count": array("q", [spread.count for spread in spreads]),
        "below": array("q", [points[0] - spread.min for points, spread in zip(values, spreads)]),
        "above": array("q", [spread.max - points[-1] for points, spread in zip(values, spreads)]),
        "median": array("q", [round(spread.median) for spread in spreads]),
        "first": array("q", [spread.first for spread in spreads]),
        "size": array("q", map(len, values)),
        "points": array("q", chain.from_iterable(map(differences, values))),
    }


def _places(samples: Sequence[_Sample]) -> dict[str, array[int]]:
    return {
        "source": array("q", [sample.source for sample in samples]),
        "node": differences([sample.node for sample in samples]),
        "phase": array("q", [PHASES.index(sample.key.phase) for sample in samples]),
    }


def _points(spread: Spread) -> list[int]:
    sample = spread.sample
    points = [spread.quantile(step / (_POINTS - 1)) for step in range(_POINTS)] if len(sample) > _POINTS else sample
    return [*map(round, points)]


def _peaks(samples: Sequence[_Sample]) -> dict[str, Any]:
    """The largest peak of the calls of each layer, as columns."""
    devices = [*dict.fromkeys(sample.key.device for sample in samples)]
    return {
        **_places(samples),
        "devices": devices,
        "device": array("q", [devices.index(sample.key.device) for sample in samples]),
        "nbytes": array("q", [sample.spread.max for sample in samples]),
    }


def columns_shown(
    takes: Sequence[Take], measures: Sequence[Measure], phases: Sequence[str]
) -> list[tuple[Column, str]]:
    """Every column of the page with its place. "tree": the tree table; "panel": only the panel of a layer; "chart": the
    measures of the page by phase and in all phases, total and self: the widths of blocks, and the line below them."""
    shown: dict[str, tuple[Column, str]] = {}
    for take in takes:
        in_tree = {column.heading for column in columns_of(take.run)}
        for column in columns_of(take.run, show_events=True):
            shown.setdefault(column.heading, (column, "tree" if column.heading in in_tree else "panel"))
    return [*shown.values()] + [
        (Column(measure.heading, "cost", phase, measure, is_self=is_self), "chart")
        for measure in measures
        for phase in (*phases, SUM_OF_PHASES)
        for is_self in (False, True)
    ]


def column_data(column: Column, where: str) -> dict[str, Any]:
    """A column for the page's script."""
    unit = "calls" if column.what == "calls" else column.unit.value
    data = {"heading": column.heading, "key": column.key, "where": where, "kind": column.what, "unit": unit}
    phase = ALL_PHASES if column.phase == SUM_OF_PHASES else PHASES.index(column.phase)
    if column.measure is not None:
        return {**data, "phase": phase, "self": column.is_self, "field": field_of(column.measure)}
    return {**data, "phase": phase, "onDevice": column.on_device} if column.what == "rate" else data


def measures_shown(takes: Sequence[Take]) -> list[Measure]:
    """The measures for widths. For memory these are the allocated bytes, because a width cannot be negative."""
    measured = {name for take in takes for meta in take.run.metas for name in meta.measured}
    device = _device_heading(takes)
    measures = []
    for field, measure in MEASURE_OF.items():
        heading = {"cpu_ns": "CPU time", "device_ns": "{device} time"}.get(field, measure.heading)
        heading = heading.replace(" Mem", " memory allocated").format(device=device)
        of_field = Measure(heading, measure.unit, ((field, 1),), measure.lower_bound_if)
        measures += [of_field] if field in measured else []
    return measures


def _device_heading(takes: Sequence[Take]) -> str:
    """The kind of device as headings name it."""
    return next((meta.device_heading for take in takes for meta in take.run.metas if meta.device), "DEVICE")


def measure_data(measure: Measure, device: str) -> dict[str, Any]:
    """A measure for the page's script. ``operators``: its heading in the report of operators."""
    field = field_of(measure)
    of_operators = MEASURE_OF[field].heading.format(device=device)
    about = {"heading": measure.heading, "operators": of_operators, "field": field, "unit": measure.unit.value}
    return {**about, "lowerBoundIf": measure.lower_bound_if}


def field_of(measure: Measure) -> str:
    """The field of ``Cost`` by which the page's script knows a measure."""
    return measure.fields[0][0]
