"""Attributed events, summed: rows and samples. And runs of one rank, cycle after cycle, summed into one."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import add

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Attributed, Frame, Kind, Place, Signature
from torchprof.collectives import tells_collective
from torchprof.cost import FIELDS
from torchprof.run import (
    NOT_RECORDED,
    STEP,
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

_Call = tuple[int, int, int]
"""When a call, or a garbage collection, started, how long it lasted, and on which thread."""


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

    ``places`` is the list that the attribution fills while ``attributed`` is read, and ``counts`` (MACs, FLOPs, and the
    calls and kernels that are in neither, by the index of a place) may fill meanwhile, too. Self time: each event adds
    its time to its place and takes it from the place around it; without ``timed`` all times are 0, and there are no
    samples.
    """
    cpu_ns: list[int] = []
    calls: list[int] = []
    other: dict[tuple[int, str], list[int]] = {}  # (place, device) → a value for each field, then calls
    durations: dict[tuple[int, str], list[_Call]] = {}
    collections: list[_Call] = []
    busy: dict[str, int] = {}
    busy_until: dict[str, int] = {}
    allocated = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}
    freed = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}
    device_ns, collective_ns = FIELDS.index("device_ns"), FIELDS.index("collective_ns")
    memory, kernel, label, step = Kind.MEMORY, Kind.KERNEL, Kind.LABEL, Kind.STEP
    collective, garbage = Kind.COLLECTIVE, Kind.GARBAGE
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
        if kind is step or (kind is garbage and not timed):  # of a collection nothing but its time is of interest
            continue
        index = place.index
        if index >= len(cpu_ns):
            missing = len(places) - len(cpu_ns)
            cpu_ns.extend([0] * missing)
            calls.extend([0] * missing)
        calls[index] += counted
        if not timed:
            continue
        if kind is collective:
            values = other.setdefault((index, "cpu"), [0] * (len(FIELDS) + 1))
            values[collective_ns] += event.end_ns - event.start_ns
            continue
        cpu_ns[index] += ns
        if around is not None:
            cpu_ns[around.index] -= ns
        else:  # in no range of its thread; beside one of another thread it adds only what sticks out
            end = event.start_ns + ns
            covered += max(0, end - max(covered_until, event.start_ns))
            covered_until = max(covered_until, end)
        if kind is label and counted and place.layer >= 0:
            durations.setdefault((place.layer, place.phase), []).append((event.start_ns, ns, event.thread))
        elif kind is garbage:
            collections.append((event.start_ns, ns, event.thread))

    at_cpu_ns = FIELDS.index("cpu_ns")
    for index, (ns, counted) in enumerate(zip(cpu_ns, calls)):
        if ns or counted:
            key = (index, "cpu")
            if key not in other:
                other[key] = [0] * (len(FIELDS) + 1)
            other[key][at_cpu_ns] = ns
            other[key][-1] = counted
    at_macs = FIELDS.index("macs")
    device_of = dict(sorted(other, key=lambda key: key[1] == "cpu"))  # a kernel's place has no row of the CPU's
    for index, count in (counts or {}).items():
        key = (index, device_of.get(index, "cpu"))
        other.setdefault(key, [0] * (len(FIELDS) + 1))[at_macs : at_macs + 3] = count
    rows = _rows(other, places, layers, rank, signatures)
    collected = _by_thread(collections)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of(_without(collected, calls_of))
        for (layer, phase), calls_of in sorted(durations.items())
    }
    if timed:
        busy["cpu"] = covered
    return rows, samples, busy


def _by_thread(collections: Iterable[_Call]) -> dict[int, tuple[list[int], list[int]]]:
    """By thread: when garbage collections started, in order, and what the first so many took, from none to all."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for start, ns, thread in collections:
        starts, sums = found.setdefault(thread, ([], [0]))
        starts.append(start)
        sums.append(sums[-1] + ns)
    return found


def _without(
    collected: Mapping[int, tuple[Sequence[int], Sequence[int]]], calls: Iterable[_Call]
) -> list[tuple[int, int]]:
    """Start and duration of calls, without the garbage collections that interrupted them."""
    if not collected:
        return [(start, ns) for start, ns, _ in calls]
    found = []
    for start, ns, thread in calls:
        starts, sums = collected.get(thread, ((), (0,)))
        found.append((start, ns - sums[bisect_left(starts, start + ns)] + sums[bisect_left(starts, start)]))
    return found


def _rows(
    values: Mapping[tuple[int, str], Sequence[int]],
    places: Sequence[Place],
    layers: tuple[Layer, ...],
    rank: int,
    signatures: Sequence[Signature],
) -> Rows:
    chains = _Chains()
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
                frame = place.frame
                if place.signature:
                    frame = frame._replace(signature=signatures[place.signature])
                number = numbers[step] = chains.inside(step[0], frame)
            chain_of[place.index] = number
        outer = place.within
        if outer is not None:
            number = of_within.get(outer.index)
            if number is None:
                number = of_within[outer.index] = len(arounds)
                around = Around(outer.layer, outer.phase, chains.all[chain_of[outer.index]])
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
        known = lines.get(key)
        lines[key] = (line[-1], *line[:-1]) if known is None else (known[0] + line[-1], *map(add, known[1:], line))
    return _table(layers, lines, chains.all, devices, arounds, shares)


SIGNATURES = 64
"""On so many different inputs the calls of an operator in one place have rows of their own."""


class _Chains:
    """Chains of frames, by number, ``()`` first. Of an operator that was called on more than ``SIGNATURES`` different
    inputs in one place, all further ones share a chain in which the shapes are unknown."""

    def __init__(self) -> None:
        self.all: list[tuple[Frame, ...]] = [()]
        self._numbers: dict[tuple[int, Frame], int] = {}
        self._signatures: Counter[tuple[int, str, str]] = Counter()

    def inside(self, outer: int, frame: Frame) -> int:
        """The number of the chain that has this frame more than the one of this number."""
        number = self._numbers.get((outer, frame))
        if number is not None:
            return number
        if frame.signature is not None:
            other = _on_other_shapes(frame)
            place = outer, frame.kind, frame.name
            if other != frame and self._signatures[place] >= SIGNATURES:
                number = self._numbers[outer, frame] = self.inside(outer, other)
                return number
            self._signatures[place] += other != frame
        number = self._numbers[outer, frame] = len(self.all)
        self.all.append((*self.all[outer], frame))
        return number

    def number_of(self, chain: Iterable[Frame]) -> int:
        """The number of a chain, as far as its shapes have chains of their own."""
        number = 0
        for frame in chain:
            number = self.inside(number, frame)
        return number

    def around(self, around: Around) -> Around:
        """The same with the chain that it has here."""
        return around._replace(frames=self.all[self.number_of(around.frames)])


def _on_other_shapes(frame: Frame) -> Frame:
    """The same frame, called on inputs of the same types and of unknown shapes. Of a collective all else
    that is told stays."""
    signature = frame.signature
    if signature is None:
        return frame
    shapes = tuple(() if shape == () else None for shape in signature.shapes)
    scalars = signature.scalars if tells_collective(frame) else (None,) * len(signature.scalars)
    return frame._replace(signature=signature._replace(shapes=shapes, scalars=scalars))


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
    call in any; it may know more. The sum has no warnings yet: those of a part need not hold for all.
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
        cycle.unfinished,
    )


def _sum_of_rows(layers: tuple[Layer, ...], *several: Rows) -> Rows:
    """The rows of all on the same layers; those of equal keys are one."""
    lines: dict[tuple[int, ...], Sequence[int]] = {}
    chains = _Chains()
    within: dict[tuple[Around, ...], int] = {}
    shared: dict[tuple[int, ...], int] = {}
    devices: dict[str, int] = {}
    for rows in several:
        frames_here = [*map(chains.number_of, rows.frames)]
        within_here = [
            within.setdefault(tuple(map(chains.around, surroundings)), len(within)) for surroundings in rows.within
        ]
        shared_here = [shared.setdefault(by, len(shared)) for by in rows.shared]
        devices_here = [devices.setdefault(device, len(devices)) for device in rows.devices]
        for layer, phase, by, around, chain, device, rank, *values in zip(
            *(rows.columns[name] for name in Rows.COLUMNS)
        ):
            key = (layer, phase, shared_here[by], within_here[around], frames_here[chain], devices_here[device], rank)
            line = lines.get(key)
            lines[key] = values if line is None else [*map(sum, zip(line, values))]
    return _table(layers, lines, chains.all, devices, within, shared)


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
    """What one rank did in some cycles, and then in those after: 0 in each step of those cycles that did not see it."""
    joined = {}
    for key in dict.fromkeys((*before, *now)):
        earlier = before.get(key) or _nothing_in_each_step(key, before)
        later = now.get(key) or _nothing_in_each_step(key, now)
        joined[key] = earlier + later if earlier and later else earlier or later
    return {key: lockstep for key, lockstep in joined.items() if lockstep is not None}


def _nothing_in_each_step(key: LockstepKey, cycles: Mapping[LockstepKey, Lockstep]) -> Lockstep | None:
    """0 for each step of some cycles. None for collectives, which count in calls, and where what is missing may be
    unknown: the steps, or the groups."""
    steps = cycles.get(LockstepKey(OUTSIDE, FORWARD, "cpu", STEP))  # the same steps as those of the device
    if steps is None or key.is_collective or key.group == NOT_RECORDED:
        return None
    return replace(steps, ns=(0,), beside_ns=(0,), last_ns=(0,) * len(steps.last_ns), medians=())


def _first_seen(before: Layer, now: Layer) -> Layer:
    now = replace(now, recursive=before.recursive or now.recursive)
    if not before.input_shapes and not before.output_shapes:
        return now
    return replace(
        now,
        input_shapes=before.input_shapes,
        output_shapes=before.output_shapes,
        same_shapes=same_shapes(before, now) if now.input_shapes or now.output_shapes else before.same_shapes,
        output_bytes=before.output_bytes,
        training=before.training,
    )


def same_shapes(one: Layer, other: Layer) -> bool | None:
    """``Layer.same_shapes`` of the calls of both; None where it is not known of either."""
    if one.same_shapes is None or other.same_shapes is None:
        return None
    return one.same_shapes and other.same_shapes and one.input_shapes == other.input_shapes


def _sum_of_metas(before: Meta, now: Meta) -> Meta:
    busy = dict(before.busy_ns)
    for device, ns in now.busy_ns:
        busy[device] = busy.get(device, 0) + ns
    return replace(
        now,
        wall_ns=before.wall_ns + now.wall_ns,
        process_cpu_ns=_sum_of_known(before.process_cpu_ns, now.process_cpu_ns),
        run_delay_ns=_sum_of_known(before.run_delay_ns, now.run_delay_ns),
        cycles=before.cycles + now.cycles,
        steps=before.steps + now.steps,
        warnings=(),
        busy_ns=tuple(sorted(busy.items())),
        regions=_all_of_one_name(before.regions + now.regions),
    )


def _sum_of_known(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else before + now


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
        unfinished=tuple(
            replace(
                one, layer=to[one.layer], entered=tuple(each._replace(layer=to[each.layer]) for each in one.entered)
            )
            for one in run.unfinished
        ),
    )
