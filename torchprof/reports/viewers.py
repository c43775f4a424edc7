"""Files for viewers: the timeline as a Chrome trace, for https://ui.perfetto.dev, and stacks for speedscope."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Any

from torchprof.analyze.columns import MEASURE_OF
from torchprof.analyze.report import report
from torchprof.errors import TorchprofError, suggest
from torchprof.run.formats import Unit, format_time
from torchprof.run.measures import FIELDS
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.timeline import Lane, Spans, Timeline
from torchprof.run.words import BACKWARD, PHASES, Frame, FrameKind, range_in_words
from torchprof.version import __version__

# The Chrome trace: the JSON object form of "Trace Event Format", Google, 2016
# (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU)

_PROCESS = 1  # the process of rank 0. Perfetto takes process 0 and thread 0 for idle ones
_STEPS_TRACK = 1  # the thread number of the track of steps


@report("chrome-trace", "the last cycle over time, for Perfetto and chrome://tracing", suffix=".trace.json")
def chrome_trace(run: Run) -> str:
    """The timeline of the last cycle, in Chrome's Trace Event Format. docs/timeline.md describes the tracks and ranges.

    On each track, two ranges are either nested or disjoint. Times are in µs after the start, with three decimals (ns).
    Raises TorchprofError if the run has no spans.
    """
    timeline = run.timeline
    if timeline is None or timeline.spans is None:
        raise TorchprofError(
            "This run does not say what ran when: record it with torchprof.Profile(model, with_timeline=True), or read "
            "its trace with torchprof.from_trace(file, with_timeline=True)."
        )
    run = run.of_rank(timeline.rank)
    events = [*_tracks(run, timeline.spans), *_ranges(run, timeline.spans), *_memory(run, timeline)]
    missing = (timeline.spans.dropped, "ranges"), (timeline.dropped, "allocations and frees")
    notes = [f"The last {number:,} {what} were not kept." for number, what in missing if number]
    notes += map(str, run.warnings)
    # displayTimeUnit is left out: some versions of Perfetto read it as the unit of the timestamps.
    about = {"otherData": {"model": ", ".join(run.meta.model), "notes": " ".join(notes)}}
    return '{"traceEvents":[\n' + ",\n".join(events) + "\n]," + json.dumps(about)[1:] + "\n"


def _us(ns: int) -> str:
    """A time in µs, with three decimals."""
    return f"{ns / 1000:.3f}"


def tracks_of(spans: Spans) -> tuple[dict[tuple[int, int], int], list[str]]:
    """The number of the track of each (lane, phase), in the order of display, and the names of the tracks. On a device,
    all phases share one track."""

    def order(lane: Lane) -> tuple[bool, str, int, int]:
        """Threads before devices; lanes of one stream are adjacent."""
        return lane.device != "cpu", lane.device, -1 if lane.stream is None else lane.stream, lane.number

    seen = set(zip(spans.columns["lane"], spans.columns["phase"]))
    keys = sorted(seen, key=lambda key: (*order(spans.lanes[key[0]]), key[1]))
    tracks: dict[tuple[int, int], int] = {}
    numbers: dict[tuple[int, int], int] = {}
    names: dict[int, str] = {}
    for lane, phase in keys:
        device, number, stream = spans.lanes[lane]
        track = tracks.setdefault((lane, phase if device == "cpu" else 0), len(tracks))
        numbers[lane, phase] = track
        of_stream = "" if stream is None else f", stream {stream}"
        beside = "" if number == 1 else f", at the same time ({number})"
        names[track] = f"{PHASES[phase]}, thread {number}" if device == "cpu" else f"{device}{of_stream}{beside}"
    return numbers, [*names.values()]


def _tracks(run: Run, spans: Spans) -> Iterator[str]:
    """Metadata events: the names of the process and its tracks, and their order."""
    process = _PROCESS + run.meta.rank

    def about(what: str, track: int, **values: Any) -> str:
        return json.dumps({"ph": "M", "name": what, "pid": process, "tid": track, "args": values})

    models = f": {', '.join(run.meta.model)}" if run.meta.model else ""
    yield about("process_name", 0, name=f"rank {run.meta.rank}{models}")
    yield about("process_sort_index", 0, sort_index=run.meta.rank)
    names = {_STEPS_TRACK: "steps"} if spans.steps else {}
    names |= dict(enumerate(tracks_of(spans)[1], _STEPS_TRACK + 1))
    for track, name in names.items():
        yield about("thread_name", track, name=name)
        yield about("thread_sort_index", track, sort_index=track)


def _ranges(run: Run, spans: Spans) -> Iterator[str]:
    """The events of steps, layers, labels and kernels."""
    process = _PROCESS + run.meta.rank

    def text(kind: str, name: str, values: dict[str, Any]) -> str:
        """The JSON of an event without its track and times: ranges of one layer differ only in these."""
        return json.dumps({"ph": "X", "cat": kind, "name": name, "pid": process, "args": values})[:-1]

    for number, (start, end) in enumerate(zip(spans.steps, spans.steps[1:]), 1):
        step = text("step", f"step {number}", {})
        yield f'{step}, "tid": {_STEPS_TRACK}, "ts": {_us(start)}, "dur": {_us(end - start)}}}'
    tracks = {key: _STEPS_TRACK + 1 + track for key, track in tracks_of(spans)[0].items()}
    texts: dict[tuple[int, int, int, bool], str] = {}
    for start, end, lane, layer, phase, name in zip(*(spans.columns[name] for name in Spans.COLUMNS)):
        is_thread = spans.lanes[lane].device == "cpu"
        key = (layer, phase, name, is_thread)
        if (known := texts.get(key)) is None:
            if name < 0:
                known = text(PHASES[phase], _short_name(run, layer), _about_layer(run, layer, phase))
            else:
                about = {"layer": run.layers.name_of(layer), "phase": PHASES[phase]}
                known = text("label" if is_thread else "kernel", spans.names[name], about)
            texts[key] = known
        yield f'{known}, "tid": {tracks[lane, phase]}, "ts": {_us(start)}, "dur": {_us(end - start)}}}'


def _short_name(run: Run, layer: int) -> str:
    """The last name of the path; if it is a number, with the names above it up to the first that is not."""
    path = run.layers.path_of(layer)
    first = len(path) - 1
    while first and path[first].isdecimal():
        first -= 1
    return ".".join(path[first:])


def _about_layer(run: Run, layer: int, phase: int) -> dict[str, Any]:
    """The arguments of the ranges of a layer in a phase."""
    if layer < 0:
        return {}
    facts = run.layers[layer]
    about: dict[str, Any] = {"path": facts.name, "class": facts.kind}
    if facts.settings:
        about["settings"] = facts.settings
    if facts.input_shapes or facts.output_shapes:
        about["input shapes, first call"] = _shapes(facts.input_shapes)
        about["output shapes, first call"] = _shapes(facts.output_shapes)
    cost, calls = run.rows.by_layer.get((layer, phase), (None, 0))
    if PHASES[phase] != BACKWARD:
        about["calls in the run"] = calls
    if cost is not None and "cpu_ns" in run.meta.measured:
        about["self CPU in the run"] = str(format_time(cost.cpu_ns))
    return about


def _shapes(shapes: Iterable[tuple[int, ...]]) -> str:
    return ", ".join("×".join(map(str, shape)) or "scalar" for shape in shapes)


def _memory(run: Run, timeline: Timeline) -> Iterator[str]:
    """A counter for each device: allocated bytes above the start."""
    process = _PROCESS + run.meta.rank
    for number, device in enumerate(timeline.devices):
        name = json.dumps(f"memory on {device} above the start")
        of_device = [index for index, where in enumerate(timeline.columns["device"]) if where == number]
        times, sizes = ([timeline.columns[name][index] for index in of_device] for name in ("time_ns", "nbytes"))
        for time, level in zip(times, accumulate(sizes)):
            yield f'{{"ph": "C", "name": {name}, "pid": {process}, "ts": {_us(time)}, "args": {{"bytes": {level}}}}}'


# Stacks for flame graphs: from the model inward to an operator or a kernel

StackEntry = int | Frame
"""A layer, by its index (negative for none), or an operator, label or kernel."""

Stack = tuple[StackEntry, ...]


def stacks(run: Run, measure: str) -> dict[tuple[int, str], Counter[Stack]]:
    """The self cost of each stack, by rank and phase; ``measure`` is a field of ``Cost``.

    A stack starts at the model, and each layer of the path is an entry. An operator or label around the call of a layer
    comes after the layer that it belongs to, or first if it belongs to no layer of the path. A matrix product in the
    layer "head", which was called inside the label "loss", has the stack ``(label loss, Net, head, aten::linear,
    aten::mm)``. Stacks that cost nothing are left out.

    Σ over the stacks is Σ over the rows of that rank and phase. The sum of the stacks with a layer in them is the
    layer's total, and of those with an operator in them the operator's total in this phase.

    Raises TorchprofError for what was not measured, and for a file with negative costs.
    """
    known = measured(run)
    if measure not in known:
        what = f"{measure!r} was not measured in this run" if measure in FIELDS else f"There is no measure {measure!r}"
        raise TorchprofError(f"{what}. {suggest(str(measure), known)}")
    paths: list[Stack] = [run.layers.lineage(index) for index in range(len(run.layers))]
    chains = [tuple(frame._replace(signature=None) for frame in frames) for frames in run.rows.frames]
    costs_of: dict[tuple[int, str], Counter[Stack]] = {}
    sums = run.rows.summed(("rank", "phase", "layer", "within", "frames"), measure)
    for (rank, phase, layer, within, chain), value in sums.items():
        if not value:
            continue
        path = paths[layer] if layer >= 0 else (layer,)
        if run.rows.within[within]:
            path = _with_surroundings(path, run.rows.within[within], PHASES[phase])
        stack = (*path, *chains[chain])
        costs_of.setdefault((rank, PHASES[phase]), Counter())[stack] += value
    if any(value < 0 for costs in costs_of.values() for value in costs.values()):
        raise TorchprofError(f"In this run {measure!r} is less than 0 somewhere, and no graph of stacks can show that.")
    return {key: costs_of[key] for key in sorted(costs_of, key=lambda key: (key[0], PHASES.index(key[1])))}


def measured(run: Run) -> list[str]:
    """The measures of this run that stacks can show."""
    known = {name for meta in run.metas for name in meta.measured}
    return [name for name in FIELDS if name in known]


def _with_surroundings(path: Stack, within: Sequence[Around], phase: str) -> Stack:
    """A path with the operators and labels that its layers were called in. Operators of another phase are left out;
    labels have no phase."""
    inside: dict[int | None, list[Frame]] = {}  # by the layer that the frames belong to
    for around in within:
        owner = around.layer if around.layer in path else None
        inside.setdefault(owner, []).extend(
            frame._replace(signature=None)
            for frame in around.frames
            if frame.kind == FrameKind.LABEL or around.phase == phase
        )
    entries: list[StackEntry] = [*inside.get(None, ())]
    for layer in path:
        entries.append(layer)
        if isinstance(layer, int):
            entries.extend(inside.get(layer, ()))
    return tuple(entries)


# Flame graphs for https://www.speedscope.app. Profiles are of the type "sampled": a list of stacks with weights.

_SCHEMA = "https://www.speedscope.app/file-format-schema.json"
_SHOWN = {
    "cpu_ns": "CPU time",
    "device_ns": "{device} time",
    "cpu_allocated": "allocated on the CPU",
    "device_allocated": "allocated on {device}",
    "flops": "FLOPs",
}
_UNITS = {Unit.TIME: "nanoseconds", Unit.BYTES: "bytes", Unit.COUNT: "none"}


@report("speedscope", "stacks for speedscope.app", suffix=".speedscope.json")
def speedscope(run: Run) -> str:
    """A profile for each phase and each recorded measure, and for each rank if there are several, of the stacks in
    ``stacks``. Its name says if FLOPs are a lower bound. Raises TorchprofError if nothing was recorded."""
    numbers: dict[StackEntry, int] = {}
    if not (profiles := [*_profiles(run, numbers)]):
        raise TorchprofError("Nothing of what speedscope can show was recorded in this run.")
    names = (
        range_in_words(entry.kind, entry.name) if isinstance(entry, Frame) else run.layers.name_of(entry)
        for entry in numbers
    )
    document = {
        "$schema": _SCHEMA,
        "exporter": f"torchprof {__version__}",
        "name": ", ".join(run.meta.model) or "torchprof",
        "shared": {"frames": [{"name": name} for name in names]},
        "profiles": profiles,
    }
    return json.dumps(document, separators=(",", ":"))


def _profiles(run: Run, numbers: dict[StackEntry, int]) -> Iterator[dict[str, Any]]:
    """The profiles. ``numbers``: the number of each entry of a stack; grows by those that are new."""
    several = len({meta.rank for meta in run.metas}) > 1
    uncounted = stacks(run, "uncounted") if "uncounted" in measured(run) else {}
    device = run.meta.device_heading
    for measure in measured(run):
        if measure not in _SHOWN:
            continue
        for (rank, phase), weights in stacks(run, measure).items():
            title = f"rank {rank}, " * several + f"{phase}, {_SHOWN[measure].format(device=device)}"
            missed = uncounted.get((rank, phase))
            if measure == "flops" and missed:
                title += f", at least ({missed.total()} calls not counted)"
            # speedscope merges adjacent samples with a common prefix: sort them by their entries.
            samples = sorted(
                ([numbers.setdefault(entry, len(numbers)) for entry in stack], weight)
                for stack, weight in weights.items()
            )
            yield {
                "type": "sampled",
                "name": title,
                "unit": _UNITS[MEASURE_OF[measure].unit],
                "startValue": 0,
                "endValue": weights.total(),
                "samples": [sample for sample, _ in samples],
                "weights": [weight for _, weight in samples],
            }
