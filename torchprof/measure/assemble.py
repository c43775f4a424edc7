"""Assemble a ``Run`` from a recording and the plan of its layers: attribution, then observers, then sums."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from torchprof.attribute.compiled_graphs import CompiledGraphs
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Detail, Event, Kind, Place
from torchprof.attribute.launches import CollectiveOwners
from torchprof.attribute.loop import add_steps
from torchprof.attribute.pipeline_ranges import steps_in, with_folded_names
from torchprof.attribute.rule import Attribution
from torchprof.attribute.torch_ranges import add_engine_calls, add_waits_for_exchanges
from torchprof.measure.busy import DeviceTimes
from torchprof.measure.fold import fold
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.memory import Allocations
from torchprof.measure.memory_blocks import NOT_MEASURED, LiveBlocks, add_frees, allocators_between
from torchprof.measure.pipelines import Pipelines
from torchprof.measure.recording import CycleEnd, LayerPlan, Observations, Observer, OpenStep, Options, Recording
from torchprof.measure.steps import Steps, with_marks
from torchprof.measure.timeline import OpenSpans
from torchprof.measure.warnings import recorded_warnings
from torchprof.run.layers import Layers
from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.measures import FIELDS, SampleKey, Spread
from torchprof.run.meta import Compilation, CompiledRegion, Meta, RunWarning
from torchprof.run.processes import paused_gc
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, MOST_NESTED, OUTSIDE, FrameKind, Signature, SourceLine, StepEnd

if TYPE_CHECKING:
    from torchprof.measure.flops.estimate import Estimate


_FLAGS = ("profile_memory", "with_flops", "record_shapes", "with_stack", "compile_layers")
"""The fields of ``Options`` that are kept in ``Meta.flags``."""
_FEWEST_PASSES = 2
"""At least this many passes are a loop, if it marks no steps."""


@paused_gc()
def assemble(recording: Recording, plan: LayerPlan, options: Options) -> Run:
    """The run of one recording, without its warnings. Adds to ``recording.observations``."""
    source, layers = recording.source, Layers.of(recording.layers)
    columns = _columns_of(recording)
    attribution = _attribution(recording, plan, options)
    places = attribution.places.all
    flops = _flops_of(recording) if options.with_flops else None
    step_end = _step_end(recording)
    observers = [*_observers(recording, plan, options, columns)]
    observers_of_steps = [*_observers_of_steps(recording, options, step_end)]
    columns = with_folded_names(columns)
    stream = attribution.attribute(columns, source.loop.ends)
    if flops:
        stream = flops.observe(stream)
    for observer in observers:
        stream = observer.observe(stream)
    if step_end not in (None, StepEnd.MARK):
        stream = with_marks(stream, source.loop.ends, _cut_ns(recording, columns), source.loop.thread)
    for observer in observers_of_steps:
        stream = observer.observe(stream)
    rows, samples, busy_ns = fold(
        stream,
        places,
        layers,
        recording.origin.rank,
        counts=flops.counts if flops else None,
        group_counts=flops.group_counts if flops else None,
        signatures=source.signatures,
        timed=options.timed,
        recorded_ns=source.wall_ns if options.on_cpu else 0,
    )
    attribution.places.close()
    if not options.on_cpu:
        busy_ns.pop("cpu", None)
    parts = _results([*observers, *observers_of_steps], samples)
    parts["samples"] |= dict(_without_gradients(recording, plan))
    live = next((observer.live for observer in observers if isinstance(observer, Allocations)), {})
    _note_end(recording, parts.pop("open", None), live)
    _note_observations(recording, plan, attribution)
    around = [sum(len(step.frames) for step in within) for within in rows.within]
    chains = zip(rows.columns["frames"], rows.columns["within"])
    if any(len(rows.frames[chain]) + around[within] >= MOST_NESTED for chain, within in chains):
        recording.observations.warnings.append(RunWarning.of("nested_too_deep", most=MOST_NESTED))
    rows, regions = _with_compiled(recording, places, rows)
    meta = _meta(recording, plan, options)
    if not _device_times_are_right(recording, columns, *parts.pop("overlapping", (0, 0))):
        meta = replace(meta, measured=tuple(name for name in meta.measured if name != "device_ns"))
        busy_ns = {device: ns for device, ns in busy_ns.items() if device == "cpu"}
        rows = replace(rows, columns={**rows.columns, "device_ns": array("q", bytes(8 * len(rows)))})
        parts["samples"] = {key: spread for key, spread in parts["samples"].items() if key.device == "cpu"}
        del parts["device_times"]
    meta = replace(
        meta,
        model=tuple(layers[root].kind for root in layers.roots if layers[root].kind),
        steps=parts.pop("steps", 0),
        step_end=step_end or StepEnd.MARK,
        busy_ns=tuple(sorted(busy_ns.items())),
        regions=regions,
        compilations=_compilations_of(recording, regions),
    )
    return Run((meta,), Layers.of(rows.layers), rows, **parts)


_FEW_WRONG, _SOME_WRONG = 0.01, 3
"""Up to this share of launches without a kernel, or of kernels that overlap, or this number, device times are shown."""


def _device_times_are_right(recording: Recording, columns: EventColumns, overlapping: int, kernels: int) -> bool:
    """Whether nearly all kernels were recorded, and do not overlap on their stream. Adds the warnings about others."""
    warnings = recording.observations.warnings
    is_lost = columns.lost > max(_FEW_WRONG * columns.launched, _SOME_WRONG)
    is_wrong = overlapping > max(_FEW_WRONG * kernels, _SOME_WRONG)
    if columns.lost:
        warnings.append(RunWarning.of("kernels_lost", lost=columns.lost, launched=columns.launched, unknown=is_lost))
    if overlapping:
        warnings.append(RunWarning.of("kernels_overlap", overlapping=overlapping, kernels=kernels, unknown=is_wrong))
    return not (is_lost or is_wrong)


def with_warnings(run: Run, observations: Observations) -> Run:
    """Add to a run the warnings that do not follow from it, and mark its recursive layers."""
    paths = [layer.path for layer in run.layers]
    recursive = {
        inner
        for outer, inner in observations.callers
        if outer >= 0 and paths[outer][: len(paths[inner])] == paths[inner]
    }
    if recursive:
        layers = Layers(replace(layer, recursive=index in recursive) for index, layer in enumerate(run.layers))
        run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    return replace(run, metas=(replace(run.meta, warnings=tuple(recorded_warnings(run, observations))),))


# Events, with those that torch's profiler does not record


def wanted_detail(options: Options) -> Callable[[str], Detail] | None:
    """Name of an op → how much to read of its inputs. None to read nothing."""
    least = Detail.SHAPES if options.record_shapes or options.with_stack else Detail.NOTHING
    if options.with_flops:
        # It imports torch for its registry of operators. A trace is read without torch.
        from torchprof.measure.flops.torch_registry import detail_for

        return lambda name: detail_for(name, least)
    return None if least is Detail.NOTHING else lambda name: least


def _columns_of(recording: Recording) -> EventColumns:
    """The events of a recording, with those that torch's profiler does not record: frees, marks of steps, samples, and
    the passes of autograd's engine."""
    columns = recording.columns()
    if recording.start.blocks:
        add_frees(columns, recording.start, recording.began_ns)
    if recording.source.torchs_steps:
        add_steps(columns, recording.source.torchs_steps)
    if recording.python_samples is not None:
        ended_ns = recording.began_ns + recording.source.wall_ns
        samples = (sample for sample in recording.python_samples if recording.began_ns <= sample[0] < ended_ns)
        _add_samples(columns, samples, recording.began_ns)
    columns.mark_start_up()
    add_engine_calls(columns)
    add_waits_for_exchanges(columns)
    return columns


def _add_samples(columns: EventColumns, samples: Iterable[tuple[int, SourceLine, int, int]], began_ns: int) -> None:
    """Add SAMPLE events on the thread that made the first STEP mark, which ended at ``began_ns`` on their clock."""
    if not (marks := columns.of_kinds(Kind.STEP)):
        return
    index, thread = marks[0]
    offset_ns = columns.end[index] - began_ns
    taken = [*samples]
    unit = min((intervals for _, _, intervals, _ in taken), default=1)  # more than 1 where samples were dropped
    times = ((at_ns + offset_ns, line) for at_ns, line, intervals, _ in taken for _ in range(intervals // unit))
    columns.add(after=(Event(Kind.SAMPLE, line, time, time, thread) for time, line in times))


def _cut_ns(recording: Recording, columns: EventColumns) -> int | None:
    """When a cycle of a recording without gaps ended, on the clock of the events; None for other recordings."""
    marks = columns.of_kinds(Kind.STEP)
    if recording.before is None or not marks:
        return None
    return columns.end[marks[0][0]] + recording.source.wall_ns


# Attribution and observers


def attribution_of(
    plan: LayerPlan,
    signatures: list[Signature] | None = None,
    called_from: Callable[[int, int], int] | None = None,
    graphs: CompiledGraphs | None = None,
    group: GroupOfRanks | None = None,
    is_one_group: bool = True,
) -> Attribution:
    """The rule of ownership for the labels of a plan. ``signatures``: the inputs of ops, by number; those of
    collectives in ``group`` are added. ``graphs``: the compiled graphs that are known. ``group``, ``is_one_group``: as
    in ``CollectiveOwners``."""
    inputs = [] if signatures is None else signatures
    owners = CollectiveOwners(plan.fqns, plan.layer_paths, inputs, plan.replicated, group, is_one_group)
    return Attribution(plan.sites, plan.layer_paths, plan.selected, called_from, owners, graphs)


def _attribution(recording: Recording, plan: LayerPlan, options: Options) -> Attribution:
    """The rule of ownership for a recording."""
    group = None if recording.group == NOT_RECORDED else recording.group
    return attribution_of(
        plan,
        recording.source.signatures,
        called_from=recording.source.called_from if options.with_stack else None,
        graphs=recording.graphs,
        group=group,
        is_one_group=group is not None or recording.origin.world_size == 1,
    )


def _step_end(recording: Recording) -> StepEnd | None:
    """What ends the steps of a recording; None if it has no steps."""
    source = recording.source
    if recording.has_steps or source.torchs_steps:
        return StepEnd.MARK
    is_loop = recording.before is not None or len(source.loop.ends) >= _FEWEST_PASSES
    return source.loop.step_end if is_loop else None


def _flops_of(recording: Recording) -> Estimate:
    from torchprof.measure.flops.estimate import Estimate
    from torchprof.measure.flops.graphs import GraphCalls

    return Estimate(recording.source.signatures, GraphCalls(recording.called, recording.graphs))


def _observers(recording: Recording, plan: LayerPlan, options: Options, columns: EventColumns) -> Iterator[Observer]:
    """The observers of the measures that were requested and that can be measured, but for those that count in steps."""
    source, layers, rank = recording.source, recording.layers, recording.origin.rank
    if options.profile_memory:
        start, end = recording.start, recording.end
        yield Allocations(
            layers,
            rank,
            parameters=end.addresses,
            start_ns=source.start_ns,
            before=None if start is NOT_MEASURED else start.sizes,
            with_timeline=options.with_timeline,
            allocators=allocators_between(start, end),
            holder_of=recording.holder_of,
            others=start.holders,
            live=recording.before.live if recording.before is not None else None,
        )
    if options.with_timeline:
        yield OpenSpans(layers, plan.selected, source.start_ns, recording.from_first_mark, rank=rank)
    if source.device:
        yield DeviceTimes(rank)
    if options.timed and (steps := steps_in(columns)):
        yield Pipelines(steps, columns, rank)


def _observers_of_steps(recording: Recording, options: Options, step_end: StepEnd | None) -> Iterator[Observer]:
    """The observers of the measures that count in steps."""
    source, layers, rank = recording.source, recording.layers, recording.origin.rank
    is_cycle = recording.before is not None and step_end is not None
    from_first_mark = recording.from_first_mark or is_cycle
    before = _open_step(recording) if is_cycle else None
    if step_end is not None:
        yield Steps(layers, rank, from_first_mark, is_cycle=is_cycle, before=before)
    if recording.origin.world_size > 1 and options.timed:
        yield Locksteps(
            layers,
            rank,
            source.signatures,
            recording.group,
            from_first_mark=from_first_mark,
            ended_ns=source.ended_ns,
            is_cycle=is_cycle,
            before=before,
        )


def _open_step(recording: Recording) -> OpenStep | None:
    """The step that was open at the start of a recording; None if something else than before ends the steps now."""
    before = recording.before
    if before is None or before.step is None or before.loop.step_end != recording.source.loop.step_end:
        return None
    return before.step.on_layers(Layers.of(recording.layers))


# Results


def _results(observers: Iterable[Observer], samples: Mapping[SampleKey, Spread]) -> dict[str, Any]:
    """Fields of ``Run`` and ``Meta``, with what all observers have of each. ``samples``: those of the calls."""
    parts: dict[str, Any] = {"samples": samples}
    for observer in observers:
        for name, value in observer.result().items():
            parts[name] = parts[name] | value if name in parts else value
    return parts


def _without_gradients(recording: Recording, plan: LayerPlan) -> Iterator[tuple[SampleKey, Spread]]:
    """The durations of the calls of each model without gradients, in a recording with backward."""
    calls: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
    for label, start, end, _ in recording.source.loop.without_gradients:
        layer = plan.sites[label].layers[0] if label in plan.sites else OUTSIDE
        if layer != OUTSIDE and len(recording.layers[layer].path) == 1:  # with paths=, an inner layer may be outermost
            calls[layer].append((start, end - start))
    for layer, of_layer in calls.items():
        yield SampleKey(layer, FORWARD, recording.origin.rank, "cpu", "no_grad_ns"), Spread.of(of_layer)


def _note_end(recording: Recording, open_step: dict[str, Any] | None, live: LiveBlocks) -> None:
    """Keep the end of a cycle for the next one. ``open_step``: the fields of the step that is open there."""
    if recording.before is not None:
        step = None if open_step is None else OpenStep(Layers.of(recording.layers), **open_step)
        recording.observations.end = CycleEnd(recording.source.loop, step, live)


def _note_observations(recording: Recording, plan: LayerPlan, attribution: Attribution) -> None:
    observations = recording.observations
    observations.callable_layers = plan.callable_layers
    observations.callers.update(attribution.callers)
    observations.labels += attribution.labels
    if recording.origin.world_size > 1:
        observations.unmatched += attribution.collective_owners.unmatched
        observations.uncertain += attribution.collective_owners.uncertain


def _with_compiled(
    recording: Recording, places: Sequence[Place], rows: Rows
) -> tuple[Rows, tuple[CompiledRegion, ...]]:
    """The rows, with a mark on the layers that ran inside compiled code; and the compiled regions that ran. Notes a
    warning for each layer that was to be compiled, and was not."""
    regions = [place for place in places if place.kind == FrameKind.REGION]
    regions_in, names = {place.layer for place in regions}, {place.name for place in regions}
    called = {layer for (layer, _), (_, calls) in rows.by_layer.items() if calls}
    recording.observations.warnings += _not_compiled(recording, regions_in, called)
    if regions:
        rows = replace(rows, layers=_with_inlined(Layers.of(rows.layers), regions_in, called))
    return rows, tuple(region for region in recording.regions if region.name in names)


def _not_compiled(recording: Recording, regions_in: Set[int], called: Set[int]) -> Iterator[RunWarning]:
    """A warning for each layer that was called through torch.compile, and in which no compiled code ran.
    ``regions_in``: the layers that compiled code ran in; outside all layers it may be of any."""
    layers = recording.layers
    failures = {(each.file, each.line): each.failure for each in recording.compilations if each.failure}
    if any(index < 0 for index in regions_in):
        return
    compiled = [layers[index].path for index in regions_in]
    for layer, function, file, line in recording.under_compile:
        path = layers[layer].path
        if layer in called and not any(other[: len(path)] == path or path[: len(other)] == other for other in compiled):
            where, reason = f"{function} ({PurePath(file).name}:{line})", failures.get((file, line), "")
            yield RunWarning.of("no_compiled_code", [layers[layer].name], where=where, reason=reason)


def _with_inlined(layers: Layers, regions_in: Set[int], called: Set[int]) -> Layers:
    """Set ``compiled`` on the layers without calls that may have run inside compiled code: those below one of
    ``regions_in``, which it ran in, or all layers if it ran outside all of them."""
    anywhere = any(index < 0 for index in regions_in)
    inside = layers.at_or_below(regions_in)
    return Layers(
        replace(layer, compiled=True) if index not in called and (anywhere or above in inside) else layer
        for index, (layer, above) in enumerate(zip(layers, layers.parent))
    )


def _meta(recording: Recording, plan: LayerPlan, options: Options) -> Meta:
    """The metadata of a run, as far as it does not depend on the events."""
    source = recording.source
    names = [name for name in FIELDS if options.measures(name)]
    of_cpu = [name for name in names if not name.startswith("device_")]
    return replace(
        recording.origin,
        device=options.device,
        requested=tuple(names if options.device else of_cpu),
        measured=tuple(names if source.device else of_cpu),
        paths=None if plan.selected is None else tuple(plan.layer_paths[layer] for layer in sorted(plan.selected)),
        wall_ns=source.wall_ns,
        process_cpu_ns=source.cpu_time.process_ns if source.cpu_time else None,
        run_delay_ns=source.cpu_time.run_delay_ns if source.cpu_time else None,
        flags=(("use_cuda", options.device == "cuda"), *((flag, getattr(options, flag)) for flag in _FLAGS)),
    )


def _compilations_of(recording: Recording, ran: Sequence[CompiledRegion]) -> tuple[Compilation, ...]:
    """The compilations during the recording, and the last ones before it of the regions that ran: earlier ones of the
    same name are of code that torch.compile forgot meanwhile."""
    code = {(region.name, region.file, region.line) for region in ran}
    before = [compilation for compilation in recording.compilations if compilation.step is None]
    during = [compilation for compilation in recording.compilations if compilation.step is not None]
    last = {(compilation.name, compilation.phase): compilation for compilation in before}
    return (*(last_one for last_one in last.values() if (last_one.name, last_one.file, last_one.line) in code), *during)
