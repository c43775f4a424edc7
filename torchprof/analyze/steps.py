"""The report on the steps of a loop, and the parts of all recorded time, which the first screen has in a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import Figures
from torchprof.analyze.layers import Entry, down_to, entries_by_path, keep_top, table_rows
from torchprof.analyze.report import Part, ReportTable, Section, report, spaced, stacked
from torchprof.analyze.sentences import warnings_below
from torchprof.errors import TorchprofError
from torchprof.run.formats import UNKNOWN, Cell, format_number, format_share, format_time
from torchprof.run.measures import MEASURES, Cost, SampleKey, Spread
from torchprof.run.meta import Meta
from torchprof.run.passes import Passes, Unusual
from torchprof.run.run import Run
from torchprof.run.torch_names import (
    AWAITED,
    COPY,
    DATA,
    GARBAGE,
    NO_OP,
    OF_NO_LAYER,
    OPTIMIZER,
    START_UP,
    WAIT,
    purpose_of,
)
from torchprof.run.words import (
    BACKWARD,
    COMPILING,
    FORWARD,
    NO_LAYERS,
    NOT_SELECTED,
    NOT_SELECTED_NAME,
    OPTIMIZER_STEP,
    OTHER,
    OUTSIDE,
    OUTSIDE_NAME,
    PHASES,
    RECOMPUTE,
    WAITS_FOR_RANKS,
    WAITS_IN_WORDS,
    FrameKind,
    StepEnd,
)

# The steps report

_WHERE_STEPS_END = {
    StepEnd.OPTIMIZER: "where the optimizer has made its step",
    StepEnd.BACKWARD: "where backward has ended",
    StepEnd.CALL: "with the call of the model",
}
_SHARE_OUTSIDE = 0.01  # of the recorded time in no step: from this on a sentence says so
_BEHIND = 1.05  # work on the device that takes so many times a step on the CPU waits in the device's queue


@report("steps", "the steps of a loop: forward, backward, optimizer, data loading", answers="time")
def steps(run: Run, *, depth: int | None = None, top: int | None = None) -> Section:
    """The steps of a loop in three tables.

    First, the duration of a step. Second, the parts of a step: forward, backward and recompute of the layers; loading
    data (with torch's DataLoader), the optimizer, copies between host and device, waiting for the device, garbage
    collection, other ops such as those of the loss, waiting for other threads or ranks; and time in no op: Python,
    other libraries, or waiting. The means of the parts add up to the mean of the step; if several threads worked at the
    same time, a line subtracts what would count twice. Columns for devices have the time of the work that each part
    launched. Third, the layers, each with all layers below it.

    If only some passes of the loop were recorded, the duration is of the others, the rest is scaled to them, and two
    more tables have each kind of passes, and those that took far longer than others of their kind.

    Median, P95 and IQR (interquartile range) are over all steps (over a uniform sample of 256, if there were more).
    They are not additive.

    ``top``: the number of layers, those with the largest self over all phases.

    Without marks, a step ends with that of the optimizers; without optimizers where backward has ended; without
    backward with the call of the model.

    Raises TorchprofError if no loop was recorded.
    """
    texts: list[Part] = []
    sentences: list[str] = []
    for meta in run.metas:
        loop = _Loop(run, meta)
        if len(run.metas) > 1:
            texts.append(f"Rank {meta.rank}")
        for table in (_duration(loop), *_passes(loop), _parts(loop), _tree(loop, depth, top)):
            texts.append(replace(table, ids={"rank": meta.rank}))
        if meta.step_end != StepEnd.MARK:
            sentences.append(f"The loop marks no steps: a step ends {_WHERE_STEPS_END[meta.step_end]}.")
        outside = meta.wall_ns - loop.whole.sum
        if outside > _SHARE_OUTSIDE * meta.wall_ns:
            share = f"{format_time(outside)} ({outside / meta.wall_ns:.1%})"
            sentences.append(f"{share} of the recorded time is in no step, but before or after the steps of a cycle.")
        if behind := ns_behind_the_cpu(run, meta):
            sentences.append(
                f"The CPU runs ahead of the device: on {meta.device_heading}, the work of a step takes "
                f"{format_time(behind)}. In a long loop, a step takes no less."
            )
    return spaced([*texts, stacked([*sentences, warnings_below(run)])])


def ns_behind_the_cpu(run: Run, meta: Meta) -> float:
    """How long the busiest device works on what a step launches, if that is longer than a step lasts on the CPU of this
    rank: work waits in the device's queue then, and the loop is as slow as the device. 0 if it is not, or unknown.

    The durations of kernels that overlap on several streams count once, in the ratio of the whole recording.
    """
    steps = run.samples.get(SampleKey(OUTSIDE, FORWARD, meta.rank, "cpu", "step_ns"))
    if steps is None or "device_ns" not in meta.measured:
        return 0
    outermost = {OUTSIDE, NOT_SELECTED, *run.layers.roots}
    launched: Counter[str] = Counter()
    for key, spread in run.samples.items():
        if key.measure == "step_device_ns" and key.rank == meta.rank and key.layer in outermost:
            launched[key.device] += spread.sum
    on_devices = run.rows.summed("device", "device_ns", rank=meta.rank)
    kernels_ns = {run.rows.devices[device]: ns for device, ns in on_devices.items()}
    busy_ns = (launched[name] * min(1, ns / kernels_ns[name]) for name, ns in meta.busy_ns if kernels_ns.get(name))
    busiest = max(busy_ns, default=0) / steps.count
    return busiest if busiest > _BEHIND * steps.sum / steps.count else 0


class _Device(NamedTuple):
    """A device: its name in the run, and in headings. ``measured``: False if its times are unknown."""

    name: str
    heading: str
    measured: bool = True


class _Loop:
    """The steps of one rank: ``whole`` is their duration, ``layers`` those that the rank has, with their indices."""

    def __init__(self, run: Run, meta: Meta) -> None:
        self.run = run
        self.meta = meta
        if (whole := self.outside("step_ns")) is None:
            warnings = (str(warning) for warning in run.warnings if meta.rank in warning.ranks)
            raise TorchprofError(
                "No loop was recorded. Steps end where `prof.step()` marks it, inside the block of a Profile or of "
                "torch.profiler.profile; without marks where optimizers make a step, after backward, or after a call "
                f"of the model, at least twice.{''.join(f' {warning}' for warning in warnings)}"
            )
        self.whole = whole
        self.layers = [
            (number, layer) for number, layer in enumerate(run.layers) if not layer.ranks or meta.rank in layer.ranks
        ]
        self.phases = [phase for phase in PHASES if phase in run.phases()]
        self.cpu = _Device("cpu", "CPU")
        self.accelerators: list[_Device] = []
        if meta.device is not None:
            used = {key.device for key in run.samples if key.measure == "step_device_ns" and key.rank == meta.rank}
            for name in sorted(used) or [meta.device]:
                heading = name if len(used) > 1 else meta.device
                self.accelerators.append(_Device(name, heading.upper(), "device_ns" in meta.measured))

    def outside(self, measure: str, device: str = "cpu") -> Spread | None:
        """A measure of steps that is of no layer."""
        return self.run.samples.get(SampleKey(OUTSIDE, FORWARD, self.meta.rank, device, measure))

    def of_layer(self, layer: int, phase: str, device: _Device) -> Spread | None:
        """The time of a layer in a step."""
        measure = "step_cpu_ns" if device is self.cpu else "step_device_ns"
        return self.run.samples.get(SampleKey(layer, phase, self.meta.rank, device.name, measure))

    def worked(self, layer: int) -> bool:
        """Whether anything was recorded of a layer in any step."""
        devices = [self.cpu, *self.accelerators]
        return any(self.of_layer(layer, phase, device) is not None for phase in self.phases for device in devices)


def _distribution(spread: Spread | None) -> list[Cell]:
    """The cells of median, 95th percentile and interquartile range; 0 for what is in no step."""
    if spread is None:
        return [format_time(0)] * 3
    quartiles = spread.quantile(0.75) - spread.quantile(0.25)
    return [format_time(spread.median), format_time(spread.quantile(0.95)), format_time(quartiles)]


def _duration(loop: _Loop) -> ReportTable:
    """The table of the duration of a step."""
    whole = loop.whole
    mean = format_time(whole.sum / whole.count)
    cells: list[Cell] = [format_number(whole.count), format_number(loop.meta.cycles), mean]
    cells += [*_distribution(whole), format_time(whole.min), format_time(whole.max)]
    headings = ["Steps", "Cycles", "Mean", "Median", "P95", "IQR", "Min", "Max"]
    return ReportTable.of_cells(headings, [cells]).of("duration")


def _passes(loop: _Loop) -> Iterator[ReportTable]:
    """The tables of the kinds of passes, and of unusual passes, if not all were recorded."""
    kinds = [passes for passes in loop.run.passes if passes.rank == loop.meta.rank]
    names = [_name_of_kind(loop.run, passes) for passes in kinds]
    if not kinds:
        return
    headings = ["Passes", "Number", "Recorded", "Profiled mean", "Median", "P95", "IQR", "Unusual"]
    cells = []
    for name, passes in zip(names, kinds):
        profiled = format_time(passes.recorded_ns / passes.recorded) if passes.recorded else UNKNOWN
        others = [UNKNOWN] * 3 if passes.ns is None else _distribution(passes.ns)
        unusual = format_time(passes.unusual_ns)
        cells.append([name, format_number(passes.count), format_number(passes.recorded), profiled, *others, unusual])
    yield ReportTable.of_cells(headings, cells).of("passes")
    unusual_passes = [(name, each) for name, passes in zip(names, kinds) for each in passes.unusual]
    if unusual_passes:
        rows: list[list[Cell]] = [
            [
                name,
                format_number(each.number + 1),
                format_time(each.ns),
                each.line or UNKNOWN,
                _layer_of(loop.run, each),
            ]
            for name, each in unusual_passes
        ]
        yield ReportTable.of_cells(["Unusual passes", "Number", "Time", "Most often at", "In"], rows).of("unusual")


def _layer_of(run: Run, unusual: Unusual) -> str:
    """The layer where an unusual pass was sampled most often; unknown without samples."""
    if not unusual.line:
        return UNKNOWN
    return run.layers[unusual.layer].name if unusual.layer >= 0 else NO_LAYERS[unusual.layer]


def _name_of_kind(run: Run, passes: Passes) -> str:
    layer = run.layers[passes.layer].name if passes.layer >= 0 else NO_LAYERS[passes.layer]
    mode = "training" if passes.training else "evaluation"
    return f"{layer}, {mode}{'' if passes.gradients else ', no gradients'}"


class _Part(NamedTuple):
    """A part of a step that is of no layer. ``launches``: whether it may launch work on devices. ``shown``: None if
    that depends on whether it was recorded."""

    name: str
    measure: str
    launches: bool = False
    shown: bool | None = True


def _parts(loop: _Loop) -> ReportTable:
    """The table of the parts of a step, on the CPU and on each device. Parts add up to the step."""
    steps = loop.whole.count
    launched_ns = dict.fromkeys(loop.accelerators, 0)
    table = []

    def add(name: str, on_cpu: Spread | None, launched: Sequence[Spread | None] | None, sign: int = 1) -> None:
        """A row. ``launched``: the work on each device; None: it launches none."""
        total = sign * on_cpu.sum if on_cpu else 0
        share = format_share(total / loop.whole.sum) if loop.whole.sum else UNKNOWN
        row: list[Cell] = [name, format_time(total / steps), share]
        row += _distribution(on_cpu) if sign > 0 else [""] * 3
        for device, on_device in zip(loop.accelerators, launched or ()):
            ns = sign * on_device.sum if on_device else 0
            launched_ns[device] += ns
            row.append(_mean(device, ns, steps))
        table.append(row if launched is not None else row + [""] * len(loop.accelerators))

    models = [(number, layer.name) for number, layer in loop.layers if len(layer.path) == 1]
    for layer, name in [*models, *([(NOT_SELECTED, NOT_SELECTED_NAME)] if loop.worked(NOT_SELECTED) else [])]:
        for phase in loop.phases:
            launched = [loop.of_layer(layer, phase, device) for device in loop.accelerators]
            add(f"{name}, {phase}", loop.of_layer(layer, phase, loop.cpu), launched)
    for part in _parts_of_no_layer(loop):
        on_cpu = loop.outside(part.measure)
        if part.shown or (part.shown is None and on_cpu is not None):
            launched = [loop.outside(part.measure, device.name) for device in loop.accelerators]
            sign = -1 if part.measure == "step_overlap_ns" else 1
            add(part.name, on_cpu, launched if part.launches else None, sign)
    table[-1][6:] = [_mean(device, ns, steps) for device, ns in launched_ns.items()]  # of the row "Step"
    headings = ["Part", "Mean", "Share", "Median", "P95", "IQR"]
    headings += [f"{device.heading} mean" for device in loop.accelerators]
    return ReportTable.of_cells(headings, table).of("parts")


PARTS_OF_NO_LAYER = {
    "step_data_ns": "data loading",
    "step_optimizer_ns": "optimizer",
    "step_copy_ns": "host-device copies",
    "step_wait_ns": "waiting for the device",
    "step_gc_ns": "garbage collection",
    "step_backward_ns": "backward of no layer",
    "step_other_ns": "loss and other ops",
    "step_start_ns": "start-up of the device",
    "step_awaited_ns": "waiting for other threads or ranks",
    "step_gap_ns": "in no op",
}
"""The parts of a step outside all layers, see ``SampleKey``, in words."""
_LAUNCHING = ("step_data_ns", "step_optimizer_ns", "step_copy_ns", "step_backward_ns", "step_other_ns")
_ALWAYS_SHOWN = ("step_data_ns", "step_optimizer_ns", "step_other_ns", "step_gap_ns")
_OF_DEVICES = ("step_copy_ns", "step_wait_ns")  # shown if a device was recorded


def _parts_of_no_layer(loop: _Loop) -> list[_Part]:
    has_device = bool(loop.accelerators)
    are_ranges = bool(loop.run.roots) and not loop.run.meta.model
    twice = "several threads, or in ranges" if are_ranges else "several threads"
    return [
        *(
            _Part(name, part, part in _LAUNCHING, has_device if part in _OF_DEVICES else part in _ALWAYS_SHOWN or None)
            for part, name in PARTS_OF_NO_LAYER.items()
        ),
        _Part(f"counted twice ({twice})", "step_overlap_ns", launches=are_ranges, shown=None),
        _Part("Step", "step_ns"),
    ]


def _mean(device: _Device, total: int, steps: int) -> Cell:
    return format_time(total / steps) if device.measured else UNKNOWN


_NO_LAYER = {NOT_SELECTED_NAME: NOT_SELECTED, OUTSIDE_NAME: OUTSIDE}
_TIME = Column("Time", "cost", measure=MEASURES[0])


def _tree(loop: _Loop, depth: int | None, top: int | None) -> ReportTable:
    """The table of layers."""
    columns = [(phase, device) for phase in loop.phases for device in (loop.cpu, *loop.accelerators)]
    headings = ["Module"]
    for phase, device in columns:
        lead = "" if phase == FORWARD else f"{phase.capitalize()} "
        headings += [f"{lead}{device.heading} {figure}" for figure in ("median", "P95", "IQR")]
    entries = _entries(loop)
    down_to(entries, depth)
    if top is not None:
        keep_top(entries, _TIME, top)

    def cells(entry: Entry) -> Iterator[Cell]:
        layer = loop.run.layers.index_of[entry.path] if entry.is_layer else _NO_LAYER[entry.name]
        has_worked = loop.worked(layer)
        for phase, device in columns:
            if entry.is_layer and not entry.figures.total:
                yield from [""] * 3
            elif not has_worked or not device.measured:
                yield from [UNKNOWN] * 3
            else:
                yield from _distribution(loop.of_layer(layer, phase, device))

    return ReportTable(headings, table_rows(entries, cells)).of("layers")


def _entries(loop: _Loop) -> list[Entry]:
    """The rows of the models with all layers below them, then the rows of work of no layer. Their figures are the time
    that ranks layers: on devices if that was measured, in all phases; blank for layers that were not selected."""
    selected = None if loop.meta.paths is None else set(loop.meta.paths)
    devices = [device for device in loop.accelerators if device.measured] or [loop.cpu]
    totals = [0] * len(loop.run.layers)
    for number, _ in loop.layers:
        spreads = [loop.of_layer(number, phase, device) for phase in loop.phases for device in devices]
        totals[number] = sum(spread.sum for spread in spreads if spread is not None)
    figures = {}
    for number, layer in loop.layers:
        figures[layer.path] = Figures()
        if selected is None or layer.path in selected:
            own = totals[number] - sum(totals[child] for child in loop.run.layers.children[number])
            figures[layer.path] = Figures({FORWARD: Cost(cpu_ns=own)}, {FORWARD: Cost(cpu_ns=totals[number])})
    models = [entry for path, entry in entries_by_path(figures).items() if len(path) == 1]
    return models + [Entry(name, Figures(), is_layer=False) for name, layer in _NO_LAYER.items() if loop.worked(layer)]


# The parts of the recorded time, which add up to all of it

_NAMES = {  # of parts outside of layers
    DATA: "data",
    OPTIMIZER: "optimizer",
    COPY: "copies",
    WAIT: "waiting for the device",
    START_UP: "start-up of the device",
    GARBAGE: "garbage collection",
    OF_NO_LAYER: BACKWARD,
}
IDLE = "idle"
STAGES = "waiting for other stages"
COMPILING_PART = "torch.compile compiling"
NO_GRAD = "forward (no grad)"
FIRST_CALL, LATER_CALLS = "first call", "later calls"
_LONG_FIRST_CALL = 2
"""The first call of a model is a part of its own if it took more than this many times as long as the median one."""
_ORDER = (
    *(_NAMES[START_UP], COMPILING_PART, "data", FIRST_CALL, LATER_CALLS),
    *(FORWARD, NO_GRAD, RECOMPUTE, BACKWARD, "optimizer"),
    *("copies", _NAMES[WAIT], *WAITS_IN_WORDS.values(), STAGES, _NAMES[GARBAGE], OTHER, IDLE),
)


def time_parts(run: Run, field: str) -> dict[str, int]:
    """The ns of each part in ``cpu_ns`` or ``device_ns``, in the order in which a step has them; parts of 0 are left
    out. Work that was launched before the recording is left out, as in all shares.

    Forward on the CPU is divided: without gradients, as in evaluation, if the run has backward; and without backward
    the first call of the model, if it took much longer than the others, as the prompt of a language model does. In a
    pipeline, waiting for other stages is a part of its own. While a thread waits for backward, the time of backward is
    that of another thread."""
    chains = run.rows.frames
    compiles = [any(frame.kind == FrameKind.REGION and frame.name == COMPILING for frame in chain) for chain in chains]
    closures = optimizers_with_closure(run)
    parts: Counter[str] = Counter()
    sums = run.rows.of_recording.summed(("layer", "phase", "frames"), field)
    for (layer, phase, chain), ns in sums.items():
        if compiles[chain]:
            parts[COMPILING_PART] += ns
        elif layer != OUTSIDE:
            parts[PHASES[phase]] += ns
        else:
            purpose, frames = purpose_of(PHASES[phase], chains[chain]), chains[chain]
            if purpose == OPTIMIZER and frames and frames[-1].kind == FrameKind.LABEL and frames[-1].name in closures:
                purpose = NO_OP  # the closure's Python
            waits = frames[-1].name if purpose in (AWAITED, NO_OP) and frames else ""
            parts[WAITS_IN_WORDS.get(waits) or _NAMES.get(purpose, OTHER)] += ns
    if field == "cpu_ns":
        no_grad = sum(spread.sum for key, spread in run.samples.items() if key.measure == "no_grad_ns")
        parts[NO_GRAD] = min(no_grad, parts[FORWARD])
        parts[FORWARD] -= parts[NO_GRAD]
        parts[FIRST_CALL] = 0 if parts[COMPILING_PART] else min(_first_call_ns(run), parts[FORWARD])
        if parts[FIRST_CALL]:
            parts[LATER_CALLS] = parts.pop(FORWARD) - parts[FIRST_CALL]
        waited = sum(pipeline.waited_ns for pipeline in run.pipelines if pipeline.device == "cpu")
        for part in (WAITS_IN_WORDS[WAITS_FOR_RANKS], OTHER):
            of_stages = min(waited - parts[STAGES], parts[part])
            parts[STAGES] += of_stages
            parts[part] -= of_stages
    return {name: parts[name] for name in _ORDER if parts[name] > 0}


def optimizers_with_closure(run: Run) -> set[str]:
    """The ranges of optimizers in whose steps layers were called: they have a closure, whose Python is the user's."""
    return {
        frame.name
        for chain in run.rows.within
        for around in chain
        for frame in around.frames
        if frame.kind == FrameKind.LABEL and frame.name.startswith(OPTIMIZER_STEP)
    }


def spreads_of(run: Run, layer: int, measure: str) -> list[Spread]:
    """The distribution of a time of the forward of a layer on the CPU, of each rank that has one."""
    keys = (SampleKey(layer, FORWARD, meta.rank, "cpu", measure) for meta in run.metas)
    return [run.samples[key] for key in keys if key in run.samples]


def _first_call_ns(run: Run) -> int:
    """The first call of the only model of one rank, in a run without backward; 0 if it is as long as others."""
    spreads = [spread for root in run.layers.roots for spread in spreads_of(run, root, "cpu_ns")]
    if len(spreads) != 1 or spreads[0].count < 2 or BACKWARD in run.phases():
        return 0
    return spreads[0].first if spreads[0].first > _LONG_FIRST_CALL * spreads[0].median else 0


def device_parts(run: Run) -> dict[str, int]:
    """The parts of the time of all devices from their first to their last work, with that in which they were idle.
    Kernels that ran at the same time share it in proportion to their durations."""
    parts = time_parts(run, "device_ns")
    worked, kernels = sum(time.busy_ns for time in run.device_use), sum(parts.values())
    if not kernels or not worked:
        return {}
    idle = sum(time.idle_ns for time in run.device_use)
    shared = {name: round(ns * worked / kernels) for name, ns in parts.items()}
    return {**shared, IDLE: idle} if idle else shared


def percents(parts: Mapping[str, int]) -> dict[str, int]:
    """The parts in whole percent of their sum, which add up to 100: those with the largest remainders are rounded up.
    Three equal parts are 34, 33 and 33. Parts of 0 % are left out."""
    if not (whole := sum(parts.values())):
        return {}
    shares = {name: 100 * ns // whole for name, ns in parts.items()}
    by_remainder = sorted(parts, key=lambda name: 100 * parts[name] % whole, reverse=True)
    for name in by_remainder[: 100 - sum(shares.values())]:
        shares[name] += 1
    return {name: share for name, share in shares.items() if share}
