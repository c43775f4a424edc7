"""What was recorded and what the model is, assembled into a ``Run``: the left half of the picture, in its order."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import replace

from torchprof.attribute.collectives import Exchanges
from torchprof.attribute.compiled import CompiledGraphs
from torchprof.attribute.event_names import with_steps
from torchprof.attribute.events import Detail, Event, Kind
from torchprof.attribute.rule import Attribution
from torchprof.measure.devices import DeviceTimes
from torchprof.measure.fold import fold
from torchprof.measure.live_memory import NOTHING, Holding, allocators_between, with_frees
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.memory import Allocations
from torchprof.measure.recording import Asked, Planned, Recorded, Seen
from torchprof.measure.steps import Steps
from torchprof.measure.timeline import OpenSpans
from torchprof.measure.warnings import (
    about_calls,
    about_cost,
    about_exchanges,
    about_labels,
    about_modules,
    about_shapes,
)
from torchprof.run.cost import FIELDS
from torchprof.run.layers import Layer
from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.memory import Memory
from torchprof.run.meta import CompiledRegion, Meta
from torchprof.run.paused_gc import collector_at_rest
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.timeline import Timeline
from torchprof.run.warnings import Caveat
from torchprof.run.words import OUTSIDE, Signature


def wanted_detail(asked: Asked) -> Callable[[str], Detail] | None:
    """How much is to be read of an op's inputs, by its name; None for nothing at all."""
    least = Detail.SHAPES if asked.record_shapes or asked.with_stack else Detail.NOTHING
    if asked.with_flops:
        from torchprof.measure.flops.estimate import Estimate  # which asks torch's registry: a trace may do without

        return lambda name: Estimate.detail(name) if Estimate.detail(name) is not Detail.NOTHING else least
    return None if least is Detail.NOTHING else lambda name: least


def attribution_of(
    plan: Planned,
    signatures: Sequence[Signature] = (),
    called_from: Callable[[int, int], int] | None = None,
    is_one_group: bool = True,
    graphs: CompiledGraphs | None = None,
) -> Attribution:
    """The rule of ownership for the labels of a plan. ``signatures``: what ops were called on; ``is_one_group``:
    whether all exchanges are between the same ranks; ``graphs``: what is known of compiled ones."""
    exchanges = Exchanges(plan.fqns, plan.layer_paths, signatures, plan.replicated, is_one_group)
    return Attribution(plan.sites, plan.layer_paths, plan.selected, called_from, exchanges, graphs)


@collector_at_rest()
def assemble(
    recording: Recorded,
    events: Iterable[Event],
    plan: Planned,
    layers: tuple[Layer, ...],
    asked: Asked,
    seen: Seen,
    *,
    origin: Meta,
    start: Holding = NOTHING,
    end: Holding = NOTHING,
    steps: bool = False,
    from_first_mark: bool = True,
    group: GroupOfRanks | None = None,
    graphs: CompiledGraphs | None = None,
    regions: Iterable[CompiledRegion] = (),
    python_samples: Iterable[tuple[int, str, int]] | None = None,
    began_ns: int = 0,
) -> Run:
    """The run of one recording, without its warnings; ``seen`` grows by what was noticed on the way.

    ``events`` are those of the recording, with what ``wanted_detail`` says of their inputs. ``layers`` are those of the
    plan, as they were at the end; ``origin``: what is known of where it was recorded; ``start`` and ``end``: what
    memory was held then; ``steps``: whether steps were marked in the recording by us; ``from_first_mark``: whether one
    began with it; ``group``: between which ranks collectives are that do not say so, as ``sole_group`` has it;
    ``graphs``: what is known of compiled graphs, and ``regions`` of compiled code, of that which ran and of other;
    ``python_samples``: at which time Python was seen at which line, and for how many intervals that stands.
    ``began_ns``: when the recording's first mark was made. Both, and the notes of frees in ``start``, are on the clock
    of ``time.perf_counter_ns``, which never jumps; that of the events may be another.
    """
    rank = origin.rank
    signatures = recording.signatures
    called_from = recording.called_from if asked.with_stack else None
    is_one_group = group not in (None, NOT_RECORDED) or origin.world_size == 1
    attribution = attribution_of(plan, signatures, called_from, is_one_group, graphs)
    places = attribution.places.all
    estimate = None
    if asked.with_flops:
        from torchprof.measure.flops.estimate import Estimate

        estimate = Estimate(signatures)
    allocations = Allocations(layers, rank, end.addresses, recording.start_ns) if asked.profile_memory else None
    steps_seen = Steps(layers, rank, from_first_mark) if steps or recording.torchs_steps else None
    spans = OpenSpans(layers, plan.selected, recording.start_ns, from_first_mark) if asked.with_timeline else None

    if start.blocks:
        events = with_frees(events, start, began_ns)
    if recording.torchs_steps:
        events = with_steps(events, recording.torchs_steps)
    if python_samples is not None:
        events = _with_samples(events, python_samples, began_ns)
    attributed = attribution.attribute(events)
    device_times = DeviceTimes(rank) if recording.device else None
    locksteps = None
    if origin.world_size > 1 and asked.timed:
        locksteps = Locksteps(layers, rank, signatures, group, from_first_mark)
    for watcher in (estimate, allocations, steps_seen, spans, device_times, locksteps):
        if watcher is not None:
            attributed = watcher.watch(attributed)
    rows, samples, busy = fold(
        attributed,
        places,
        layers,
        rank,
        counts=estimate.counts if estimate else None,
        signatures=signatures,
        timed=asked.timed,
    )
    attribution.places.close()
    if not asked.on_cpu:
        busy.pop("cpu", None)
    memory: tuple[Memory, ...] = ()
    timeline = None
    if allocations is not None:
        memory, of_memory, timeline = allocations.result(None if start is NOTHING else start.sizes, asked.with_timeline)
        allocators = allocators_between(start, end)
        memory = tuple(replace(one, allocator=allocators.get(one.device, ())) for one in memory)
        samples.update(of_memory)
    if spans is not None:
        without_memory = Timeline((), {name: array("q") for name in Timeline.COLUMNS}, rank=rank)
        timeline = replace(without_memory if timeline is None else timeline, spans=spans.result())
    if steps_seen is not None:
        samples.update(steps_seen.samples())
    seen.callers |= attribution.callers
    seen.labels += attribution.labels
    if origin.world_size > 1:
        seen.unmatched += attribution.exchanges.unmatched
        seen.uncertain += attribution.exchanges.uncertain

    ran = {place.frame.name for place in places if place.frame is not None and place.frame.kind == "region"}
    regions_in = {place.layer for place in places if place.frame is not None and place.frame.kind == "region"}
    layers = _with_inlined(layers, regions_in, {layer for (layer, _), (_, calls) in rows.by_layer.items() if calls})
    rows = replace(rows, layers=layers)
    names = [name for name in FIELDS if asked.measures(name)]
    of_cpu = [name for name in names if not name.startswith("device_")]
    meta = replace(
        origin,
        model=tuple(layer.kind for layer in layers if len(layer.path) == 1 and layer.kind),
        device=asked.device,
        requested=tuple(names if asked.device else of_cpu),
        measured=tuple(names if recording.device else of_cpu),
        paths=plan.selected_paths,
        wall_ns=recording.wall_ns,
        process_cpu_ns=recording.cpu_time.process_ns if recording.cpu_time else None,
        run_delay_ns=recording.cpu_time.run_delay_ns if recording.cpu_time else None,
        steps=steps_seen.count if steps_seen else 0,
        busy_ns=tuple(sorted(busy.items())),
        flags=(
            ("use_cuda", asked.device == "cuda"),
            ("profile_memory", asked.profile_memory),
            ("with_flops", asked.with_flops),
            ("record_shapes", asked.record_shapes),
            ("with_stack", asked.with_stack),
            ("compile_layers", asked.compile_layers),
        ),
        regions=tuple(region for region in regions if region.name in ran),
    )
    times = device_times.result() if device_times else ()
    ended = None if recording.start_ns is None else recording.start_ns + recording.wall_ns
    unfinished = locksteps.unfinished(ended) if locksteps else ()
    lockstep = locksteps.result() if locksteps else {}
    return Run((meta,), layers, rows, samples, memory, timeline, times, lockstep, unfinished)


def _with_inlined(layers: tuple[Layer, ...], regions_in: Set[int], called: Set[int]) -> tuple[Layer, ...]:
    """Layers of which those that were not called may have run all the same: below one that compiled code ran in, and
    where it ran outside of all, anywhere."""
    anywhere = any(index < 0 for index in regions_in)
    above = {layers[index].path for index in regions_in if index >= 0}

    def may_run(path: tuple[str, ...]) -> bool:
        return anywhere or any(path[:steps] in above for steps in range(1, len(path)))

    return tuple(
        replace(one, compiled=True) if regions_in and index not in called and may_run(one.path) else one
        for index, one in enumerate(layers)
    )


def _with_samples(events: Iterable[Event], samples: Iterable[tuple[int, str, int]], began_ns: int) -> Iterator[Event]:
    """Events with those of the samples between them, in the order of time, on the thread that began the session: it
    made the first mark, at ``began_ns`` on the clock of the samples."""
    thread: int | None = None
    waiting: Iterator[Event] = iter(())
    sample: Event | None = None
    for event in events:
        if thread is None and event.kind is Kind.STEP:
            thread, offset_ns = event.thread, event.start_ns - began_ns
            waiting = (
                Event(Kind.SAMPLE, line, at_ns + offset_ns, at_ns + offset_ns, event.thread)
                for at_ns, line, intervals in samples
                for _ in range(intervals)
            )
            sample = next(waiting, None)
        while sample is not None and sample.start_ns < event.start_ns:
            yield sample
            sample = next(waiting, None)
        yield event
    while sample is not None:
        yield sample
        sample = next(waiting, None)


def with_warnings(run: Run, plan: Planned, seen: Seen) -> Run:
    """The run with the warnings that do not follow from it, and what only its calls tell of layers."""
    paths = [layer.path for layer in run.layers]
    recursive = {
        inner for outer, inner in seen.callers if outer >= 0 and paths[outer][: len(paths[inner])] == paths[inner]
    }
    if recursive:
        layers = tuple(replace(layer, recursive=index in recursive) for index, layer in enumerate(run.layers))
        run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    return replace(run, metas=(replace(run.meta, warnings=tuple(_warnings(run, plan, seen))),))


def _warnings(run: Run, plan: Planned, seen: Seen) -> Iterator[Caveat]:
    yield from seen.notes
    yield from about_modules(seen.added, seen.removed)
    yield from about_exchanges(seen.unmatched, seen.uncertain)
    chosen = plan.selected
    layer_of = {
        label: site.layers[0]
        for label, site in plan.sites.items()
        if chosen is None or not chosen.isdisjoint(site.layers)
    }
    unobserved = {layer_of[label]: calls for label, calls in seen.unobserved.items() if label in layer_of}
    unlabelled = [layer_of[label] for label in seen.unlabelled if label in layer_of]
    yield from about_labels(run.layers, unobserved, sorted(unlabelled))
    if seen.nothing:
        yield seen.nothing
        return
    called = {layer for (layer, _), (_, calls) in run.rows.by_layer.items() if layer >= 0 and calls}
    inlined = {index for index, layer in enumerate(run.layers) if layer.compiled}
    silent = plan.callable_layers - called - set(unobserved) - inlined
    yield from about_calls(run.layers, plan.callable_layers, called, silent, seen.callers)
    yield from about_shapes(run.rows, _has_formula)
    if seen.label_ns is not None:
        yield from about_cost(seen.labels, seen.label_ns, _own_ns(run.rows), run.meta.wall_ns)


def _has_formula(operator: str) -> bool:
    from torchprof.measure.flops.estimate import Estimate

    return Estimate.has_formula(operator)


def _own_ns(rows: Rows) -> int:
    """The time of all labelled ranges in no op and no range inside of them, in which their labels' own cost is."""
    of_range = [not frames for frames in rows.frames]
    columns = rows.columns
    lines = zip(columns["layer"], columns["frames"], columns["cpu_ns"])
    return sum(ns for layer, chain, ns in lines if layer != OUTSIDE and of_range[chain])
