"""Attributed events, summed: rows and samples. And runs of one rank, cycle after cycle, summed into one."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Attributed, Frame, Kind, Place, Signature
from torchprof.cost import FIELDS
from torchprof.run import (
    Around,
    CompiledRegion,
    DeviceTime,
    Layer,
    Lockstep,
    LockstepKey,
    Memory,
    Meta,
    Rows,
    Run,
    SampleKey,
    Spread,
    StreamTime,
)


def fold(
    attributed: Iterable[Attributed],
    places: Sequence[Place],
    layers: tuple[Layer, ...],
    rank: int = 0,
    *,
    counts: Mapping[int, tuple[int, int, int]] | None = None,
    signatures: Sequence[Signature] = (),
    timed: bool = True,
) -> tuple[Rows, dict[SampleKey, Spread], dict[str, int]]:
    """Sum events into rows, the durations of calls into samples, and the time in which each device was busy.

    Of the CPU that is how long any thread that was recorded was inside any op or range.

    ``places`` is the list that the attribution fills while ``attributed`` is read, and ``counts`` (MACs, FLOPs and
    uncounted calls by the index of a place) may fill meanwhile, too. Self time: each event adds its time to its place
    and takes it from the place around it; without ``timed`` all times are 0, and there are no samples.
    """
    cpu_ns: list[int] = []
    calls: list[int] = []
    other: dict[tuple[int, str], list[int]] = {}  # (place, device) → a value for each field, then calls
    durations: dict[tuple[int, str], list[tuple[int, int]]] = {}
    busy: dict[str, int] = {}
    busy_until: dict[str, int] = {}
    allocated = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}
    freed = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}
    device_ns = FIELDS.index("device_ns")
    memory, kernel, label, step = Kind.MEMORY, Kind.KERNEL, Kind.LABEL, Kind.STEP
    covered = covered_until = 0

    for event, place, around, counted, ns in attributed:
        kind = event[0]
        if kind is memory or kind is kernel:
            device = event.device
            values = other.setdefault((place.index, device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[device_ns] += ns
                values[-1] += counted
                until = busy_until.get(device, event.start_ns)
                busy[device] = busy.get(device, 0) + max(0, event.end_ns - max(until, event.start_ns))
                busy_until[device] = max(until, event.end_ns)
            elif event.nbytes >= 0:
                values[allocated[device == "cpu"]] += event.nbytes
            else:
                values[freed[device == "cpu"]] -= event.nbytes
            continue
        if kind is step:
            continue
        index = place.index
        if index >= len(cpu_ns):
            missing = len(places) - len(cpu_ns)
            cpu_ns.extend([0] * missing)
            calls.extend([0] * missing)
        calls[index] += counted
        if not timed:
            continue
        cpu_ns[index] += ns
        if around is not None:
            cpu_ns[around.index] -= ns
        else:  # in no range of its thread; beside one of another thread it adds only what sticks out
            end = event.start_ns + ns
            covered += max(0, end - max(covered_until, event.start_ns))
            covered_until = max(covered_until, end)
        if kind is label and counted and place.layer >= 0:
            durations.setdefault((place.layer, place.phase), []).append((event.start_ns, ns))

    at_cpu_ns = FIELDS.index("cpu_ns")
    for index, (ns, counted) in enumerate(zip(cpu_ns, calls)):
        if ns or counted:
            key = (index, "cpu")
            if key not in other:
                other[key] = [0] * (len(FIELDS) + 1)
            other[key][at_cpu_ns] = ns
            other[key][-1] = counted
    at_macs = FIELDS.index("macs")
    for index, count in (counts or {}).items():
        other.setdefault((index, "cpu"), [0] * (len(FIELDS) + 1))[at_macs : at_macs + 3] = count
    rows = _rows(other, places, layers, rank, signatures)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of(values)
        for (layer, phase), values in sorted(durations.items())
    }
    if timed:
        busy["cpu"] = covered
    return rows, samples, busy


def _rows(
    values: Mapping[tuple[int, str], Sequence[int]],
    places: Sequence[Place],
    layers: tuple[Layer, ...],
    rank: int,
    signatures: Sequence[Signature],
) -> Rows:
    chains: list[tuple[Frame, ...]] = [()]
    numbers: dict[tuple[int, Frame, int], int] = {}  # (the chain outside of a frame, the frame, signature) → the chain
    chain_of = [0] * len(places)
    shares: dict[tuple[int, ...], int] = {(): 0}
    arounds: list[tuple[Around, ...]] = [()]
    within_of = [0] * len(places)
    of_within: dict[int, int] = {}  # the place that a layer is within → the number of that
    for place in places:  # a place comes after the one outside of it, and after the one its layer is within
        if place.outer is not None and place.frame is not None:
            step = (chain_of[place.outer.index], place.frame, place.signature)
            number = numbers.get(step)
            if number is None:
                number = numbers[step] = len(chains)
                frame = place.frame
                if place.signature:
                    frame = frame._replace(signature=signatures[place.signature])
                chains.append((*chains[step[0]], frame))
            chain_of[place.index] = number
        outer = place.within
        if outer is not None:
            number = of_within.get(outer.index)
            if number is None:
                number = of_within[outer.index] = len(arounds)
                around = Around(outer.layer, outer.phase, chains[chain_of[outer.index]])
                arounds.append((*arounds[within_of[outer.index]], around))
            within_of[place.index] = number
    devices: dict[str, int] = {}
    phases = {phase: number for number, phase in enumerate(PHASES)}
    lines: dict[tuple[int, ...], Sequence[int]] = {}
    for (index, device), line in sorted(values.items()):
        place = places[index]
        number = devices.setdefault(device, len(devices))
        shared = shares.setdefault(place.shared, len(shares))
        key = (place.layer, phases[place.phase], shared, within_of[index], chain_of[index], number, rank)
        lines[key] = (line[-1], *line[:-1])
    return _table(layers, lines, chains, devices, arounds, shares)


def _table(
    layers: tuple[Layer, ...],
    lines: Mapping[tuple[int, ...], Sequence[int]],
    frames: Iterable[tuple[Frame, ...]],
    devices: Iterable[str],
    within: Iterable[tuple[Around, ...]],
    shared: Iterable[tuple[int, ...]],
) -> Rows:
    """Rows from lines: what ``Rows.COLUMNS`` holds, the key up to the rank, the values from the calls on."""
    columns = dict(zip(Rows.COLUMNS, zip(*((*key, *line) for key, line in lines.items()))))
    arrays = {name: array("q", columns.get(name, ())) for name in Rows.COLUMNS}
    return Rows(layers, tuple(frames), tuple(devices), arrays, tuple(within), tuple(shared))


def add_cycle(before: Run | None, cycle: Run) -> Run:
    """One run of all cycles up to now, of one process, from the run up to then and the run of a new cycle.

    Rows of equal keys sum, and the times of devices; samples join; of the memory what was alive at the higher peak
    stays, and of the timeline the new one. The layers are those that the new cycle saw, with the shapes of their first
    call in any; it may know more.
    """
    if before is None:
        return cycle
    known = len(before.layers)
    layers = (*map(_first_seen, before.layers, cycle.layers), *cycle.layers[known:])
    samples = _with_zeros(before.samples, cycle.samples)
    for of, spread in _with_zeros(cycle.samples, before.samples).items():
        samples[of] = samples[of] + spread if of in samples else spread
    return Run(
        (_sum_of_metas(before.meta, cycle.meta),),
        layers,
        _sum_of_rows(layers, before.rows, cycle.rows),
        samples,
        _higher_peaks(before.memory, cycle.memory),
        cycle.timeline,
        _sum_of_devices(before.device_times, cycle.device_times),
        _one_after_the_other(before.lockstep, cycle.lockstep),
    )


def _sum_of_rows(layers: tuple[Layer, ...], *several: Rows) -> Rows:
    """The rows of all on the same layers; those of equal keys are one."""
    lines: dict[tuple[int, ...], Sequence[int]] = {}
    frames: dict[tuple[Frame, ...], int] = {}
    within: dict[tuple[Around, ...], int] = {}
    shared: dict[tuple[int, ...], int] = {}
    devices: dict[str, int] = {}
    for rows in several:
        frames_here = [frames.setdefault(chain, len(frames)) for chain in rows.frames]
        within_here = [within.setdefault(around, len(within)) for around in rows.within]
        shared_here = [shared.setdefault(by, len(shared)) for by in rows.shared]
        devices_here = [devices.setdefault(device, len(devices)) for device in rows.devices]
        for layer, phase, by, around, chain, device, rank, *values in zip(
            *(rows.columns[name] for name in Rows.COLUMNS)
        ):
            key = (layer, phase, shared_here[by], within_here[around], frames_here[chain], devices_here[device], rank)
            line = lines.get(key)
            lines[key] = values if line is None else [*map(sum, zip(line, values))]
    return _table(layers, lines, frames, devices, within, shared)


def _with_zeros(samples: Mapping[SampleKey, Spread], other: Mapping[SampleKey, Spread]) -> dict[SampleKey, Spread]:
    """The samples of some cycles, with 0 for each of their steps where only the ``other`` cycles saw anything."""
    complete = dict(samples)
    for key in other:
        steps = samples.get(SampleKey(OUTSIDE, FORWARD, key.rank, "cpu", "step_ns"))
        if steps is not None and key.measure.startswith("step_") and key not in samples:
            complete[key] = Spread(steps.count, 0, 0, 0, 0, (0,) * len(steps.sample), tuple(sorted(steps.hashes)))
    return complete


def _one_after_the_other(
    before: Mapping[LockstepKey, Lockstep], now: Mapping[LockstepKey, Lockstep]
) -> dict[LockstepKey, Lockstep]:
    """What one rank did in some cycles, and then in those after."""
    joined = dict(before)
    for key, later in now.items():
        known = joined.get(key)
        if known is not None:
            later = Lockstep(
                later.ranks,
                tuple(map(add, known.counts, later.counts)),
                tuple(map(add, known.ns, later.ns)),
                tuple(map(add, known.beside_ns, later.beside_ns)),
                known.last_ns + later.last_ns,
                known.last_rank + later.last_rank,
            )
        joined[key] = later
    return joined


def _first_seen(before: Layer, now: Layer) -> Layer:
    now = replace(now, recursive=before.recursive or now.recursive)
    if not before.input_shapes and not before.output_shapes:
        return now
    return replace(
        now,
        input_shapes=before.input_shapes,
        output_shapes=before.output_shapes,
        output_bytes=before.output_bytes,
        training=before.training,
    )


def _sum_of_metas(before: Meta, now: Meta) -> Meta:
    busy = dict(before.busy_ns)
    for device, ns in now.busy_ns:
        busy[device] = busy.get(device, 0) + ns
    return replace(
        now,
        wall_ns=before.wall_ns + now.wall_ns,
        cycles=before.cycles + now.cycles,
        steps=before.steps + now.steps,
        warnings=tuple(dict.fromkeys(before.warnings + now.warnings)),
        busy_ns=tuple(sorted(busy.items())),
        regions=_all_of_one_name(before.regions + now.regions),
    )


def _all_of_one_name(regions: Sequence[CompiledRegion]) -> tuple[CompiledRegion, ...]:
    """Each once; torch.compile may have begun anew and called another by a name: of that one nothing is known."""
    found: dict[str, set[CompiledRegion]] = {}
    for region in regions:
        found.setdefault(region.name, set()).add(region)
    return tuple(one for ones in found.values() if len(ones) == 1 for one in ones)


def _higher_peaks(before: Sequence[Memory], now: Sequence[Memory]) -> tuple[Memory, ...]:
    highest = {(memory.rank, memory.device): memory for memory in before}
    for memory in now:
        known = highest.get((memory.rank, memory.device))
        if known is None or memory.peak_bytes > known.peak_bytes:
            highest[memory.rank, memory.device] = memory
    return tuple(highest[key] for key in sorted(highest))


def _sum_of_devices(before: Sequence[DeviceTime], now: Sequence[DeviceTime]) -> tuple[DeviceTime, ...]:
    sums = {(time.rank, time.device): time for time in before}
    for time in now:
        known = sums.get((time.rank, time.device))
        sums[time.rank, time.device] = time if known is None else _sum_of_times(known, time)
    return tuple(sums[key] for key in sorted(sums))


def _sum_of_times(before: DeviceTime, now: DeviceTime) -> DeviceTime:
    streams = {stream.stream: stream for stream in before.streams}
    for stream in now.streams:
        known = streams.get(stream.stream)
        if known is not None:
            stream = StreamTime(stream.stream, *map(sum, zip(known[1:], stream[1:])))
        streams[stream.stream] = stream
    return replace(
        now,
        span_ns=before.span_ns + now.span_ns,
        busy_ns=before.busy_ns + now.busy_ns,
        compute_ns=before.compute_ns + now.compute_ns,
        communication_ns=before.communication_ns + now.communication_ns,
        copy_ns=before.copy_ns + now.copy_ns,
        overlap_ns=before.overlap_ns + now.overlap_ns,
        streams=tuple(streams[number] for number in sorted(streams)),
    )


def on_layers(run: Run, layers: tuple[Layer, ...]) -> Run:
    """The same run with its layers among others: those of ``layers`` that have their paths. What it knows of a layer
    whose path they have not is outside of all."""
    number = {layer.path: index for index, layer in enumerate(layers)}
    return renumbered(run, [number.get(layer.path, OUTSIDE) for layer in run.layers], layers)


def renumbered(run: Run, numbers: Sequence[int], layers: tuple[Layer, ...]) -> Run:
    """The same run on these layers: of each of its own, which number it has among them."""
    run = replace(run, layers=layers, rows=replace(run.rows, layers=layers))
    if all(number == index for index, number in enumerate(numbers)):
        return run
    to = [*numbers, NOT_SELECTED, OUTSIDE]  # negative numbers stay: Python counts them from the end

    def column(columns: Mapping[str, array[int]]) -> dict[str, array[int]]:
        return {**columns, "layer": array("q", map(to.__getitem__, columns["layer"]))}

    within = tuple(tuple(around._replace(layer=to[around.layer]) for around in chain) for chain in run.rows.within)
    shared = tuple(tuple(to[layer] for layer in by) for by in run.rows.shared)
    timeline = run.timeline
    if timeline is not None:
        spans = timeline.spans
        if spans is not None:
            spans = replace(spans, columns=column(spans.columns))
        timeline = replace(timeline, columns=column(timeline.columns), spans=spans)
    return replace(
        run,
        rows=replace(run.rows, columns=column(run.rows.columns), within=within, shared=shared),
        samples={key._replace(layer=to[key.layer]): spread for key, spread in run.samples.items()},
        memory=tuple(
            replace(memory, held=tuple(held._replace(layer=to[held.layer]) for held in memory.held))
            for memory in run.memory
        ),
        timeline=timeline,
        lockstep={key._replace(layer=to[key.layer]): lockstep for key, lockstep in run.lockstep.items()},
    )
