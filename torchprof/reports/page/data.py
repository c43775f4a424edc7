"""What the HTML page is told: one or several runs over one tree of layers, as columns that JSON can hold.

The page sums rows itself, by layer, phase, operator and rank, as every report does: so whatever is clicked adds up.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from math import inf, prod
from operator import add, attrgetter
from typing import Any, NamedTuple

from torchprof.analyze.operators import parts_of_operators
from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.varying import varying_calls
from torchprof.reports.columns import CallsColumn, Column, CostColumn, ParamsColumn, RateColumn, columns_of
from torchprof.reports.notes import about_flops, warnings_of
from torchprof.reports.page.cells import cells
from torchprof.reports.ranks import sentences, unit_of
from torchprof.run.cost import FIELDS, MEASURES, Measure, Unit
from torchprof.run.layers import Layer
from torchprof.run.memory import KINDS, Memory
from torchprof.run.meta import Peak
from torchprof.run.rows import Rows
from torchprof.run.run import Run, of_ranks
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, Timeline
from torchprof.run.words import (
    FORWARD,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    NOT_SELECTED_NAME,
    OUTSIDE_NAME,
    PHASES,
    Frame,
    is_left_over,
)

_POINTS = 24
"""How many values show how the calls of a layer were distributed."""
_CALLS = 100
"""How many calls of a layer are shown in the order of time."""
_MOMENTS = 600
"""Into how many stretches memory over time is divided."""
_PER_CALL = ("cpu_ns", "step_cpu_ns", "step_device_ns")
_MOST_RANKS = 64
"""Of so many ranks each is a source of its own; of more, the page has the sums alone, and what compares them."""
_DIFFERING = 24
"""So many layers of each phase are compared over ranks: those whose slowest rank exceeds the mean by the most."""

_LEFT_OVER = -3
"""Where the index of a layer stands: work that was launched before the recording."""

Path = tuple[str, ...]


class Take(NamedTuple):
    """A run on the page, under a name. ``paths`` says where its layers stand in the tree of the page, by their own
    path: not as they are called where another run calls the same layer otherwise."""

    name: str
    run: Run
    paths: Mapping[Path, Path] = {}


@dataclass(frozen=True)
class Tree:
    """The layers of all takes, each once, depth first."""

    layers: tuple[Layer, ...]
    names: tuple[str, ...]
    parents: tuple[int, ...]
    nodes: tuple[dict[int, int], ...]  # by take: index of a layer → its node

    @classmethod
    def of(cls, takes: Sequence[Take]) -> Tree:
        layers: dict[Path, Layer] = {}
        for take in reversed(takes):  # what a layer is, the first take says
            for layer in take.run.layers:
                layers[take.paths.get(layer.path, layer.path)] = layer
        order: dict[Path, list[Path]] = {(): []}
        for take in takes:
            for layer in take.run.layers:
                path = take.paths.get(layer.path, layer.path)
                if path not in order:
                    order[path] = []
                    order[path[:-1]].append(path)
        paths: list[Path] = []
        waiting = order[()][::-1]
        while waiting:
            path = waiting.pop()
            paths.append(path)
            waiting.extend(reversed(order[path]))
        number = {path: index for index, path in enumerate(paths)}
        return cls(
            tuple(layers[path] for path in paths),
            tuple(path[-1] for path in paths),
            tuple(number.get(path[:-1], -1) for path in paths),
            tuple(
                {index: number[take.paths.get(layer.path, layer.path)] for index, layer in enumerate(take.run.layers)}
                | {-1: len(paths), NOT_SELECTED: len(paths) + 1, _LEFT_OVER: len(paths) + 2}
                for take in takes
            ),
        )


def page_data(takes: Sequence[Take]) -> dict[str, Any]:
    """All that the page shows of runs, in what JSON can hold.

    Rows of all takes stand in one table of columns; ``source`` tells them apart: it is the rank where there is one take
    alone, else the take. A node is a layer of the tree; after the last come ``(outside)``, ``(not selected)`` and what
    was launched before the recording, which is no part of everything.
    """
    doubts = [_doubts(take, takes) for take in takes]
    of_job = takes[0].run if len(takes) == 1 and len(takes[0].run.metas) > 1 else None
    if any(len(take.run.metas) > _MOST_RANKS for take in takes):
        takes = [take._replace(run=sum_of_ranks(take.run)) for take in takes]
    tree = Tree.of(takes)
    ranks = len(takes) == 1
    sources = [(0, meta.rank) for meta in takes[0].run.metas] if ranks else [(at, None) for at in range(len(takes))]
    metas = [[meta for meta in takes[at].run.metas if rank in (None, meta.rank)] for at, rank in sources]
    source_of = {key: number for number, key in enumerate(sources)}
    names = _Names()
    rows = _rows(takes, tree, names, source_of)
    columns = _columns(takes)
    shown = [
        (one, {layer.path: nodes[index] for index, layer in enumerate(take.run.layers)})
        for take, nodes in zip(takes, tree.nodes)
        for one in _each_rank_and_all(take.run, ranks)
    ]

    def source(take: int, rank: int) -> int:
        return source_of[take, rank if ranks else None]

    return {
        "phases": [phase for phase in PHASES if any(phase in take.run.phases() for take in takes)],
        "allPhases": PHASES,
        "names": [OUTSIDE_NAME, NOT_SELECTED_NAME, LAUNCHED_BEFORE],
        "kinds": KINDS,
        "sources": [
            {
                "name": f"rank {rank}" if ranks else takes[at].name,
                "take": at,
                "measured": _common(meta.measured for meta in of_source),
            }
            for (at, rank), of_source in zip(sources, metas)
        ],
        "areRanks": ranks,
        "ranks": None if of_job is None else _compared_ranks(of_job, tree.nodes[0]),
        "doubts": [doubt for of_take in doubts for doubt in of_take],
        "layers": {"parent": tree.parents, "name": tree.names},
        "takes": [_layers(take.run, tree, at) for at, take in enumerate(takes)],
        "columns": [_column(column, where) for column, where in columns],
        **cells(shown, len(tree.layers), [column for column, _ in columns]),
        "measures": [_measure(measure, takes) for measure in _measures(takes)],
        "fields": [name for name in FIELDS if name in rows],
        **names.tables(),
        "rows": rows,
        "samples": [
            [source(at, key.rank), tree.nodes[at][key.layer], PHASES.index(key.phase), key.measure, *_spread(spread)]
            for at, take in enumerate(takes)
            for key, spread in take.run.samples.items()
            if key.measure in _PER_CALL
        ],
        "calls": [
            [source(at, take.run.timeline.rank), *course]
            for at, take in enumerate(takes)
            if take.run.timeline is not None
            for course in _calls_over_time(take.run, tree.nodes[at])
        ],
        "peaks": [
            [source(at, key.rank), tree.nodes[at][key.layer], PHASES.index(key.phase), key.device, spread.max]
            for at, take in enumerate(takes)
            for key, spread in take.run.samples.items()
            if key.measure == "peak_bytes"
        ],
        "devices": [
            _device(time, source(at, time.rank)) for at, take in enumerate(takes) for time in take.run.device_times
        ],
        "memory": [
            _memory(memory, tree.nodes[at], source(at, memory.rank), _timeline_of(take.run, memory.rank))
            for at, take in enumerate(takes)
            for memory in take.run.memory
        ],
        "roofs": list(
            dict.fromkeys(tuple(peak) for take in takes for meta in take.run.metas for peak in _last(meta.peaks))
        ),
    }


def _each_rank_and_all(run: Run, ranks: bool) -> list[Run]:
    """What the page shows of a run: where ranks are told apart each alone, and last all together."""
    if not ranks or len(run.metas) == 1:
        return [run]
    return [*of_ranks(run, [meta.rank for meta in run.metas]), run]


def _doubts(take: Take, takes: Sequence[Take]) -> list[str]:
    return [
        doubt if len(takes) == 1 else f"{take.name}: {doubt}"
        for doubt in [*about_flops(take.run), *warnings_of(take.run)]
    ]


def _compared_ranks(run: Run, nodes: Mapping[int, int]) -> dict[str, Any]:
    """What the page says of the ranks of a job, and their own work in layers: in one step, in ns, of each rank; None
    where it does not have the layer."""
    balance = balance_of(run)
    differing: set[int] = set()
    for phase in PHASES:
        layers = [one for one in balance.layers if one.phase == phase and one.work is not None]
        layers.sort(key=lambda one: one.work.above_mean if one.work else 0, reverse=True)
        differing.update(one.layer for one in layers[:_DIFFERING])
    work = []
    for one in balance.layers:
        if one.layer in nodes and one.layer in differing and one.work is not None:
            took = dict(zip(one.work.ranks, one.work.values))
            values = [took.get(other.rank) for other in balance.ranks]
            work.append([nodes[one.layer], PHASES.index(one.phase), values])
    return {
        "sentences": list(sentences(run, balance)),
        "unit": unit_of(run),
        "ranks": [one.rank for one in balance.ranks],
        "lines": [
            [one.work_ns, one.slowest, one.waiting_ns, one.waits_longer, one.last, one.steps, one.typical_ns]
            for one in balance.ranks
        ],
        "work": work,
    }


def sum_of_ranks(run: Run) -> Run:
    """A run of several ranks as one of its lowest: rows of equal keys are summed, samples joined; of each device stays
    the memory that rose the highest, and the times of the one that was busy the longest, named by their ranks."""
    first = run.meta.rank
    lines: dict[tuple[int, ...], list[int]] = {}
    at = Rows.COLUMNS.index("calls")
    for line in zip(*(run.rows.columns[name] for name in Rows.COLUMNS if name != "rank")):
        key, values = line[: at - 1], line[at - 1 :]
        known = lines.get(key)
        lines[key] = [*values] if known is None else [*map(add, known, values)]
    columns = {name: array("q") for name in Rows.COLUMNS}
    for key, summed in lines.items():
        for name, value in zip(Rows.COLUMNS, (*key, first, *summed)):
            columns[name].append(value)
    samples: dict[SampleKey, Spread] = {}
    for of, spread in run.samples.items():
        of = of._replace(rank=first)
        samples[of] = samples[of] + spread if of in samples else spread
    memory = {one.device.partition(":")[0]: one for one in sorted(run.memory, key=attrgetter("peak_bytes"))}
    times = {one.device.partition(":")[0]: one for one in sorted(run.device_times, key=attrgetter("busy_ns"))}
    return replace(
        run,
        metas=(replace(run.meta, measured=tuple(_common(meta.measured for meta in run.metas))),),
        rows=replace(run.rows, columns=columns),
        samples=samples,
        timeline=None,  # it is of one rank alone
        memory=tuple(replace(one, device=f"{one.device} of rank {one.rank}", rank=first) for one in memory.values()),
        device_times=tuple(
            replace(one, device=f"{one.device} of rank {one.rank}", rank=first) for one in times.values()
        ),
        lockstep={},
        unfinished=(),
    )


def traffic_bytes(layer: Layer) -> int | None:
    """The least that a forward call of a layer reads and writes: its parameters, its inputs and its outputs, each once.

    Inputs are taken to be of the outputs' type. None where that is not known: a size that is no number, outputs of
    unknown or of several types, parameters that nobody can count, or that count at another layer.
    """
    sizes = [*layer.input_shapes, *layer.output_shapes]
    if (
        layer.param_bytes is None
        or layer.tied
        or not layer.output_bytes
        or not layer.input_shapes
        or any(-1 in size for size in sizes)
    ):
        return None
    of_outputs = sum(prod(shape) for shape in layer.output_shapes)
    if not of_outputs or layer.output_bytes % of_outputs:
        return None
    itemsize = layer.output_bytes // of_outputs
    return layer.param_bytes + layer.output_bytes + itemsize * sum(prod(shape) for shape in layer.input_shapes)


class _Names:
    """The names of frames, and the chains of frames without what they were called on, each once."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str], int] = {}
        self.chains: dict[tuple[int, ...], int] = {}
        self.within: dict[tuple[Any, ...], int] = {}

    def chain(self, frames: Sequence[Frame]) -> int:
        key = tuple(self.frames.setdefault((kind, name), len(self.frames)) for kind, name, _ in frames)
        return self.chains.setdefault(key, len(self.chains))

    def tables(self) -> dict[str, Any]:
        return {"frames": list(self.frames), "chains": list(self.chains), "within": list(self.within)}


def _rows(
    takes: Sequence[Take], tree: Tree, names: _Names, source_of: Mapping[tuple[int, int | None], int]
) -> dict[str, list[int]]:
    """The rows of all takes; a column of zeros alone is left out."""
    joined: dict[str, list[int]] = {
        name: [] for name in ("node", "phase", "source", "chain", "within", "calls", "parts", *FIELDS)
    }
    names.within.setdefault((), 0)
    for at, take in enumerate(takes):
        rows, nodes = take.run.rows, tree.nodes[at]
        chains = [names.chain(frames) for frames in rows.frames]
        within = []
        for step in rows.within:
            key = tuple((nodes[one.layer], PHASES.index(one.phase), names.chain(one.frames)) for one in step)
            within.append(names.within.setdefault(key, len(names.within)))
        columns = rows.columns
        left_over = [*map(is_left_over, rows.frames)]
        joined["node"] += [
            nodes[_LEFT_OVER if left_over[chain] else layer]
            for layer, chain in zip(columns["layer"], columns["frames"])
        ]
        joined["phase"] += columns["phase"]
        joined["source"] += [source_of.get((at, rank), at) for rank in columns["rank"]]
        joined["chain"] += [chains[number] for number in columns["frames"]]
        joined["within"] += [within[number] for number in columns["within"]]
        joined["calls"] += columns["calls"]
        joined["parts"] += parts_of_operators(rows)
        for name in FIELDS:
            joined[name] += columns[name]
    return {name: column for name, column in joined.items() if name in ("node", "chain") or any(column)}


def _layers(run: Run, tree: Tree, take: int) -> dict[str, list[Any]]:
    """What the layers of the tree are in one take; None where it does not have them."""
    layers: list[Layer | None] = [None] * len(tree.layers)
    for index, layer in enumerate(run.layers):
        layers[tree.nodes[take][index]] = layer
    selected = None if run.meta.paths is None else set(run.meta.paths)

    varying = varying_calls(run)

    def each(told: Callable[[Layer], Any]) -> list[Any]:
        return [None if layer is None else told(layer) for layer in layers]

    return {
        "kind": each(lambda layer: layer.kind),
        "settings": each(lambda layer: layer.settings),
        "params": each(lambda layer: layer.params),
        "dtypes": each(lambda layer: ", ".join(dtype for dtype, _ in layer.dtype_bytes)),
        "inputs": each(lambda layer: layer.input_shapes),
        "outputs": each(lambda layer: layer.output_shapes),
        "shapesVary": each(lambda layer: varying[layer.path] is not False),
        "training": each(lambda layer: layer.training),
        "compiled": each(lambda layer: layer.compiled),
        "selected": each(lambda layer: selected is None or layer.path in selected),
        "sharedWith": each(lambda layer: [".".join(path) for path in layer.shared_with]),
        "traffic": each(lambda layer: None if varying[layer.path] is not False else traffic_bytes(layer)),
    }


def _columns(takes: Sequence[Take]) -> list[tuple[Column, str]]:
    """The columns of which the page shows a figure anywhere, and of each where: in the tree, in the panel of a layer
    alone, or in the line under the icicle alone, which tells the self of counts, too."""
    found: dict[str, tuple[Column, str]] = {}
    for take in takes:
        in_tree = {column.heading for column in columns_of(take.run)}
        for column in columns_of(take.run, show_events=True):
            found.setdefault(column.heading, (column, "tree" if column.heading in in_tree else "panel"))
    for column, _ in list(found.values()):
        if isinstance(column, CostColumn) and column.measure.unit is Unit.COUNT:
            of_self = replace(column, heading=f"{column.heading} (self)", is_self=True)
            found.setdefault(of_self.heading, (of_self, "line"))
    return list(found.values())


def _column(column: Column, where: str) -> dict[str, Any]:
    told: dict[str, Any] = {"heading": column.heading, "key": column.key, "where": where}
    if isinstance(column, CostColumn):
        told |= {
            "kind": "cost",
            "phase": PHASES.index(column.phase),
            "self": column.is_self,
            "unit": column.measure.unit.value,
        }
        told |= {"fields": column.measure.fields}
    elif isinstance(column, RateColumn):
        told |= {"kind": "rate", "phase": PHASES.index(column.phase), "onDevice": column.on_device, "unit": "count"}
    elif isinstance(column, ParamsColumn):
        told |= {"kind": "params", "unit": "count"}
    elif isinstance(column, CallsColumn):
        told |= {"kind": "calls", "unit": "calls"}
    return told


def _measures(takes: Sequence[Take]) -> list[Measure]:
    """What widths can stand for: memory as what was allocated, for a width cannot be negative."""
    measured = {name for take in takes for meta in take.run.metas for name in meta.measured}
    return [measure for measure in MEASURES if measure.fields[0][0] in measured]


def _measure(measure: Measure, takes: Sequence[Take]) -> dict[str, Any]:
    device = next((meta.device for take in takes for meta in take.run.metas if meta.device), None) or "device"
    field = measure.fields[0][0]
    heading = {"cpu_ns": "CPU time", "device_ns": "{device} time"}.get(field, measure.heading)
    heading = heading.replace(" Mem", " memory allocated").format(device=device.upper())
    return {"heading": heading, "field": field, "unit": measure.unit.value, "doubt": measure.doubt}


def _spread(spread: Spread) -> list[Any]:
    """Count, sum, least, median, 95th percentile, most, first, and so many values from least to most."""
    sample = spread.sample
    points = [spread.quantile(at / (_POINTS - 1)) for at in range(_POINTS)] if len(sample) > _POINTS else sample
    told = [spread.min, round(spread.median), round(spread.quantile(0.95)), spread.max, spread.first]
    return [spread.count, spread.sum, *told, [round(value) for value in points]]


def _calls_over_time(run: Run, nodes: Mapping[int, int]) -> Iterator[tuple[int, int, list[int]]]:
    """Of each layer that was called more than once in the last cycle: its node, and what each so-manieth forward call
    took, in the order of time."""
    if run.timeline is None or run.timeline.spans is None:
        return
    columns = run.timeline.spans.columns
    names = ("start_ns", "end_ns", "layer", "phase", "name")
    calls = sorted(
        (start, end - start, layer)
        for start, end, layer, phase, name in zip(*(columns[name] for name in names))
        if layer >= 0 and name < 0 and PHASES[phase] == FORWARD
    )
    lasted: dict[int, list[int]] = {}
    for _, ns, layer in calls:
        lasted.setdefault(layer, []).append(ns)
    for layer, values in lasted.items():
        if len(values) > 1:
            every = -(-len(values) // _CALLS)
            yield nodes[layer], every, values[::every]


def _device(time: DeviceTime, source: int) -> dict[str, Any]:
    """The times of a device; ``parts`` are those that add up to its span, in the order of the bar that is drawn."""
    computing = time.compute_ns - time.overlap_ns
    return {
        "source": source,
        "device": time.device,
        "spanNs": time.span_ns,
        "busyNs": time.busy_ns,
        "communicationNs": time.communication_ns,
        "parts": [computing, time.overlap_ns, time.exposed_ns, time.copy_alone_ns, time.idle_ns],
        "streams": time.streams,
    }


def _timeline_of(run: Run, rank: int) -> Timeline | None:
    """A run of several ranks has the timeline of one."""
    return run.timeline if run.timeline is not None and run.timeline.rank == rank else None


def _memory(memory: Memory, nodes: Mapping[int, int], source: int, timeline: Timeline | None) -> dict[str, Any]:
    course = None if timeline is None or memory.device not in timeline.devices else _course(timeline, memory.device)
    return {
        "source": source,
        "device": memory.device,
        "peakBytes": memory.peak_bytes,
        "peakNs": memory.peak_ns,
        "held": [[nodes[one.layer], PHASES.index(one.phase), one.kind, one.nbytes, one.blocks] for one in memory.held],
        "before": memory.before,
        "course": course,
        "dropped": 0 if timeline is None else timeline.dropped,
    }


def _course(timeline: Timeline, device: str) -> dict[str, Any] | None:
    """Memory over time above what there was at the start, as steps: from each of the times on there is so much, by kind
    (the last: not known), until the next. Of each of so many stretches that are equally long, these are its highest
    moment and its last level."""
    number = timeline.devices.index(device)
    columns = timeline.columns
    steps = [at for at, where in enumerate(columns["device"]) if where == number]
    if not steps:
        return None
    length = max(columns["time_ns"][steps[-1]] // _MOMENTS, 1)
    alive = [0] * (len(KINDS) + 1)
    times: list[int] = [0]
    heights: list[list[int]] = [alive[:]]

    def add(time: int, level: list[int]) -> None:
        if level != heights[-1]:
            times.append(time)
            heights.append(level)

    for _, stretch in groupby(steps, lambda at: columns["time_ns"][at] // length):
        whole = sum(alive)
        highest, top, level = whole, times[-1], alive[:]
        time = top
        for at in stretch:
            time, nbytes = columns["time_ns"][at], columns["nbytes"][at]
            alive[columns["kind"][at]] += nbytes
            whole += nbytes
            if whole > highest:
                highest, top, level = whole, time, alive[:]
        add(top, level)
        add(time, alive[:])
    return {"lastNs": columns["time_ns"][steps[-1]], "timesNs": times, "heights": heights}


def _common(sets: Iterable[Sequence[str]]) -> list[str]:
    """What is in all of them, in the order of the first."""
    first, *others = sets
    return [name for name in first if all(name in other for other in others)]


def _last(peaks: Iterable[Peak]) -> list[Peak]:
    """The last of each device and type that can be drawn: a file may hold others."""
    drawn = [peak for peak in peaks if 0 < peak.flops_per_s < inf and 0 < peak.bytes_per_s < inf]
    return list({(peak.device, peak.dtype): peak for peak in drawn}.values())
