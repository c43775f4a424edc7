"""Reports on the page: their tables and sentences, which the page's script draws."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import attrgetter, sub
from typing import Any

from torchprof.analyze.compiled import compiled
from torchprof.analyze.device import kernels_report
from torchprof.analyze.layer_reports import types
from torchprof.analyze.lines import lines, python
from torchprof.analyze.memory import about_peak, samples_by_device
from torchprof.analyze.memory import memory as memory_report
from torchprof.analyze.ops import ops
from torchprof.analyze.report import QUESTIONS, Part, ReportTable, TableRow, stacked, tables_and_sentences
from torchprof.analyze.sentences import warnings_of
from torchprof.analyze.steps import steps
from torchprof.errors import TorchprofError, printable
from torchprof.ranks import balance_of
from torchprof.ranks.collectives import collectives
from torchprof.ranks.compared import IN_NO_OP, OneLayer, OverRanks
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.ranks.pipeline_report import section_of_replicas
from torchprof.ranks.report import table_of_ranks
from torchprof.ranks.sentences import name_of, sentences, unit_of
from torchprof.reports.over_ranks import drawn_pipeline, drawn_ranks
from torchprof.reports.over_time import Course, course_of, drawn_memory, title_of_memory
from torchprof.reports.page.layers import differences
from torchprof.reports.viewers import tracks_of
from torchprof.run.formats import FORMATS, Cell, ReportCell, format_number, format_share, format_time, ranks_in_words
from torchprof.run.groups import lists_by_key
from torchprof.run.measures import SampleKey, Spread, quantile
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.run import Run
from torchprof.run.timeline import KINDS, DeviceTime, Memory, Timeline
from torchprof.run.words import FORWARD, NO_LAYERS, PHASES

_EM_SPACE = "\u2003"  # browsers keep these spaces
_USUAL = {**{unit.value: text_of for unit, text_of in FORMATS.items()}, "share": format_share}
"""The format of each unit that the page's script has, too."""


def report_data(
    content: Part, nodes: Mapping[int, int | None], without: Collection[str] = ()
) -> list[str | dict[str, Any]]:
    """The tables of a report and the paragraphs between them. ``nodes``: the node of each layer of its run.
    ``without``: sentences that are left out.

    A table has its ``headings``, the ``units`` of its columns ("" for text) and its ``rows``: the cells, and the node
    of the layer that the row is about, or None. A cell is a text, or a figure: its value if its text is the usual one
    of the unit, else its text and its value. The last rows, as many as ``sums``, are of all others.
    """

    def row_data(row: TableRow) -> list[Any]:
        cells = [*map(_cell, row.cells)]
        if row.lead:  # in place of the lines of a tree
            cells[0] = f"{_EM_SPACE * len(row.lead.rstrip('─ '))}{row.cells[0]}"
        return [cells, None if row.layer is None else nodes.get(row.layer)]

    parts: list[str | dict[str, Any]] = []
    kept = (part for part in tables_and_sentences(content) if part not in without)
    for is_text, group in groupby(kept, lambda part: isinstance(part, str)):
        if is_text:
            parts.append(" ".join(map(str, group)))
            continue
        for table in group:
            assert isinstance(table, ReportTable)
            parts.append(
                {
                    "headings": [*map(printable, table.headings)],
                    "units": table.units,
                    "isText": table.are_texts,
                    "rows": [*map(row_data, table.rows)],
                    "sums": sum(not row.is_part for row in table.rows),
                }
            )
    return parts


def _cell(cell: Cell) -> Any:
    if not isinstance(cell, ReportCell) or not cell.unit:
        return str(cell)
    usual = _USUAL.get(cell.unit)
    if usual is not None and isinstance(cell.value, (int, float)) and str(usual(cell.value)) == cell.text:
        return cell.value
    return [cell.text, cell.value]


# The reports that are tabs of the page

_ROWS_OF_REPORT = 200  # at most: the terminal has all


def _memory_of_layers(run: Run, **options: Any) -> Part:
    """The tables by layer of the report "memory": the page has its other parts in a section of their own."""
    parts = tables_and_sentences(memory_report(run, **options)) if run.memory else ()
    return stacked([part for part in parts if isinstance(part, ReportTable) and part.name == "layers"])


_TABS: dict[str, tuple[bool, Callable[..., Part], dict[str, Any]]] = {
    "Operators": (True, ops, {"top": _ROWS_OF_REPORT}),
    "Types": (True, types, {"top": _ROWS_OF_REPORT}),
    "Kernels": (True, kernels_report, {"top": _ROWS_OF_REPORT}),
    "Source lines": (False, lines, {"top": _ROWS_OF_REPORT}),
    "Between operators": (False, python, {"top": 50}),
    "Memory": (True, _memory_of_layers, {"top": _ROWS_OF_REPORT}),
    "Steps": (False, steps, {"top": 50}),
    "Compiled code": (False, compiled, {}),
    "Collectives": (False, collectives, {}),
}
"""By title: whether the report depends on the chosen phase, the report, and its options."""


def tabs_of_page(sources: Sequence[tuple[Run, Mapping[tuple[str, ...], int]]], phases: Sequence[str]) -> dict[str, Any]:
    """The reports that have a table, as in the terminal but for the warnings, which the page has at its top. ``of``: by
    source, the indices in ``contents`` for each of the ``phases`` and for all of them, or only one index if the report
    does not depend on them; None if it has no table."""
    contents: list[list[str | dict[str, Any]]] = []
    tabs = []
    for title, (is_by_phase, make, options) in _TABS.items():
        of: list[list[int | None]] = []
        for run, node_of in sources:
            nodes = {index: node_of[layer.path] for index, layer in enumerate(run.layers)}
            of.append([])
            for of_phase in [{"phase": phase} for phase in (*phases, None)] if is_by_phase else [{}]:
                parts = _table_of(run, partial(make, **options, **of_phase), nodes)
                of[-1].append(None if parts is None else len(contents))
                contents += [] if parts is None else [parts]
        if any(index is not None for of_source in of for index in of_source):
            tabs.append({"title": title, "of": of})
    return {"tabs": tabs, "contents": contents}


def _table_of(
    run: Run, make: Callable[[Run], Part], nodes: Mapping[int, int | None]
) -> list[str | dict[str, Any]] | None:
    """A report for the page; None if the run has nothing for it."""
    try:
        parts = report_data(make(run), nodes, [*map(printable, warnings_of(run))])
    except TorchprofError:
        return None
    return parts if any(isinstance(part, dict) and part["rows"] for part in parts) else None


# Data over time: memory of each device, and calls of each layer

_CALLS = 100  # the most calls that are shown for a layer
_LIVE_SHOWN = 200  # the most rows of what was live at the peak; the last row is the sum of all others
_MOST_SPANS = 200_000  # of the timeline
_MOST_MOVES = 100_000  # allocations and frees
_OF_MOVES = ("time_ns", "nbytes", "layer", "kind")


def calls_over_time(run: Run, nodes: Mapping[int, int]) -> Iterator[tuple[int, int, list[int]]]:
    """For each layer with more than one call in the last cycle: its node, a stride n, and the durations of every nth
    forward call in ns, in the order of time."""
    if run.timeline is None or run.timeline.spans is None:
        return
    columns = run.timeline.spans.columns
    names = ("start_ns", "end_ns", "layer", "phase", "name")
    calls = sorted(
        (start, end - start, layer)
        for start, end, layer, phase, name in zip(*(columns[name] for name in names))
        if layer >= 0 and name < 0 and PHASES[phase] == FORWARD
    )
    lasted = lists_by_key((layer, ns) for _, ns, layer in calls)
    for layer, values in lasted.items():
        if len(values) > 1:
            every = -(-len(values) // _CALLS)
            yield nodes[layer], every, values[::every]


def timeline_of(run: Run, nodes: Mapping[int, int]) -> dict[str, Any] | None:
    """What ran when in the last cycle, as columns, by start, outer spans first. ``ns``: how long each took; ``node``:
    its layer; ``name``: index in ``names``, which has labels and kernels, -1 for a call of the layer. ``threads``: the
    number of the thread of each track, 0 on a device. ``leftOut``: how many of the shortest spans are not on the page,
    and ``dropped``: how many were not recorded."""
    if run.timeline is None or run.timeline.spans is None or not len(run.timeline.spans):
        return None
    spans = run.timeline.spans
    tracks, names = tracks_of(spans)
    columns = [*zip(*(spans.columns[name] for name in spans.COLUMNS))]
    kept = sorted(
        sorted(columns, key=lambda span: span[0] - span[1])[:_MOST_SPANS], key=lambda span: (span[0], -span[1])
    )
    start, end, lane, layer, phase, name = (array("q", column) for column in zip(*kept))
    lanes = spans.lanes
    threads = {track: lanes[at].number for (at, _), track in tracks.items() if lanes[at].device == "cpu"}
    return {
        "tracks": names,
        "threads": [threads.get(track, 0) for track in range(len(names))],
        "names": spans.names,
        "steps": spans.steps,
        "start": differences(start),
        "ns": array("q", map(sub, end, start)),
        "track": array("q", [tracks[key] for key in zip(lane, phase)]),
        "node": array("q", [nodes[index] for index in layer]),
        "phase": phase,
        "name": name,
        "leftOut": len(columns) - len(kept),
        "dropped": spans.dropped,
    }


def memory_of(run: Run, nodes: Mapping[int, int], *, with_moves: bool) -> Iterator[tuple[Memory, dict[str, Any]]]:
    """Each device of which there is something to show: its peak, what was live at the peak, as in the report "memory",
    and memory over time if the run has it. ``with_moves``: also each allocation and free."""
    samples = samples_by_device(run)
    for memory in run.memory:
        timeline = run.timeline
        if timeline is not None and timeline.rank != memory.rank:  # a run of several ranks has the timeline of only one
            timeline = None
        course = None if timeline is None else course_of(timeline, memory.device)
        if memory.peak_bytes > 0 or memory.held or course:
            of_device = samples.get((memory.rank, memory.device), ())
            about = stacked(about_peak(run, memory, of_device, depth=None, shown=_LIVE_SHOWN))
            data = {
                "device": memory.device,
                "report": report_data(about, nodes),
                "levels": None if course is None else _levels(course),
                "moves": None
                if timeline is None or course is None or not with_moves
                else _moves(timeline, memory.device, nodes),
                "picture": None
                if course is None or timeline is None
                else _memory_picture(run, memory, course, timeline),
                "dropped": 0 if timeline is None else timeline.dropped,
            }
            yield memory, data


def _levels(course: Course) -> dict[str, Any]:
    """Live bytes from each time on, for the timeline."""
    return {"timesNs": course.times_ns, "nbytes": course.levels, "lastNs": course.last_ns}


def _moves(timeline: Timeline, device: str, nodes: Mapping[int, int]) -> dict[str, Any] | None:
    """Each allocation and free of a device, in the order of time, by the layer and the kind of its block. None if not
    all were recorded, or if they are too many for a page."""
    number, columns = timeline.devices.index(device), timeline.columns
    shown = [at for at, where in enumerate(columns["device"]) if where == number]
    if timeline.dropped or len(shown) > _MOST_MOVES:
        return None
    times, nbytes, layer, kinds = ([columns[name][at] for at in shown] for name in _OF_MOVES)
    return {
        "time": differences(times),
        "nbytes": array("q", nbytes),
        "node": array("q", map(nodes.__getitem__, layer)),
        "kind": array("q", [kind if kind >= 0 else len(KINDS) for kind in kinds]),
    }


def _memory_picture(run: Run, memory: Memory, course: Course, timeline: Timeline) -> str:
    steps = timeline.spans.steps if timeline.spans is not None else ()
    return drawn_memory(memory, course, steps, title_of_memory(run, memory))


# The ranks of a job: their comparison, and their sum if they are too many, and next to another run

_QUANTILES = {"Min": 0.0, "10 %": 0.1, "Median": 0.5, "90 %": 0.9, "Max": 1.0}


def compared_ranks(compared: Run, run: Run, nodes: Mapping[int, int], phases: Sequence[str]) -> dict[str, Any]:
    """The comparison of ranks on the page. ``compared`` has all ranks, ``run`` those whose layers are on the page, with
    the ``nodes`` of its layers.

    ``maps``: the pictures of own work in each of the ``phases``, if there are several, and in all; None without times.
    ``quantiles``: a table, if not all ranks are on the page. A layer that is not on the page has the node None.
    """
    balance = balance_of(compared)
    node_of = {path: nodes[index] for path, index in run.layers.index_of.items()}
    node_of |= {(name,): nodes[index] for index, name in NO_LAYERS.items()}
    page_nodes = {
        row.layer: None if row.layer == IN_NO_OP else node_of.get(compared.layers.path_of(row.layer))
        for row in balance.layers
    }
    known = [(row, row.work) for row in balance.layers if row.work is not None]
    by_difference = sorted(known, key=lambda of_row: of_row[1].above_mean, reverse=True)
    chosen = [*([phase] for phase in phases if len(phases) > 1), phases]
    whole_table = table_of_ranks(compared, balance, len(compared.metas))
    return {
        "about": _about(compared, run),
        "report": report_data(stacked([*sentences(compared, balance), whole_table]), {}),
        "unit": unit_of(compared),
        "compared": len(balance.ranks),
        "maps": [drawn_ranks(compared, balance, of_phases, page_nodes) for of_phases in chosen],
        "quantiles": [] if compared is run else report_data(_quantiles(compared, by_difference), page_nodes),
    }


def _quantiles(run: Run, layers: Iterable[tuple[OneLayer, OverRanks]]) -> ReportTable:
    """The own work in each layer and phase over the ranks that have the layer, with their number and the slowest. The
    layers whose slowest rank exceeds the mean most come first."""

    def cells(row: OneLayer, over: OverRanks) -> list[Cell]:
        values = sorted(over.values)
        times = (format_time(round(quantile(values, q))) for q in _QUANTILES.values())
        return [name_of(run, row.layer), row.phase, format_number(len(values)), *times, format_number(over.highest)]

    headings = ["Layer", "Phase", "Ranks", *_QUANTILES, "Slowest rank"]
    return ReportTable(headings, [TableRow(cells(row, over), layer=row.layer) for row, over in layers])


def _about(compared: Run, run: Run) -> str:
    """A sentence: which ranks the figures of the page are of."""
    if compared is run:
        return f"Figures are sums over {len(run.metas)} ranks, unless one is chosen. Parameters are those of one rank."
    words = ranks_in_words(meta.rank for meta in run.metas)
    figures = f"sums over {words}, unless one is chosen" if len(run.metas) > 1 else f"those of {words}"
    return (
        f"Figures are {figures}. Parameters are those of one rank. “{QUESTIONS['waits']}” below compares all "
        f"{len(compared.metas):,} ranks."
    )


def sum_of_ranks(run: Run) -> Run:
    """A run of several ranks as a run of one, the lowest: rows with equal keys are summed, samples are merged. Of each
    kind of device it has the memory of the one with the largest peak and the times of the busiest one, named with their
    ranks."""
    first, rows = run.meta.rank, run.rows
    by = tuple(name for name in Rows.KEYS if name != "rank")
    lines = {(*key, first): values for key, values in rows.summed(by, Rows.VALUES).items()}
    of_ranks: defaultdict[tuple[Any, ...], list[Spread]] = defaultdict(list)
    for (layer, phase, _, device, measure), spread in run.samples.items():
        of_ranks[layer, phase, first, device, measure].append(spread)
    samples = {SampleKey(*key): Spread.of_all(spreads) for key, spreads in of_ranks.items()}
    memory = {peak.device.partition(":")[0]: peak for peak in sorted(run.memory, key=attrgetter("peak_bytes"))}
    times = {time.device.partition(":")[0]: time for time in sorted(run.device_times, key=attrgetter("busy_ns"))}

    def named(of_device: Memory | DeviceTime) -> str:
        return f"{of_device.device} of rank {of_device.rank}"

    return replace(
        run,
        metas=(replace(run.meta, measured=tuple(common(meta.measured for meta in run.metas))),),
        rows=rows_of_lines(rows.layers, lines, rows.frames, rows.devices, rows.within, rows.shared),
        samples=samples,
        timeline=None,  # it would be that of one rank
        memory=tuple(replace(peak, device=named(peak), rank=first) for peak in memory.values()),
        device_times=tuple(replace(time, device=named(time), rank=first) for time in times.values()),
        lockstep={},
        unfinished=(),
        pipelines=(),
    )


def common(sets: Iterable[Sequence[str]]) -> list[str]:
    """The names that are in all sets, in the order of the first."""
    first, *others = sets
    return [name for name in first if all(name in other for other in others)]


# Pipelines: the report "pipeline", and a step as a picture


def pipelines_of_page(run: Run, nodes: Mapping[int, int]) -> list[dict[str, Any]]:
    """Pipelines that do the same are one: their part of the report, and the picture of a step of the first of them
    whose times are known, None if there is none. ``nodes``: the node of each layer."""
    pipelines = []
    for number, judged in enumerate(judged_pipelines(run)):
        known = (pipeline for pipeline in judged.replicas.pipelines if pipeline.typical_steps)
        drawn = next(known, None)
        report = report_data(section_of_replicas(run, number, judged), nodes)
        pipelines.append({"report": report, "step": None if drawn is None else drawn_pipeline(run, drawn)})
    return pipelines
