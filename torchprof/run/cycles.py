"""The sum of several cycles: recordings of one process, one after the other."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import add

from torchprof.run.cost import FIELDS
from torchprof.run.layers import Layer, Layers
from torchprof.run.lockstep import NOT_RECORDED, STEP, Lockstep, LockstepKey
from torchprof.run.memory import Memory
from torchprof.run.meta import Compilation, CompiledRegion, Meta
from torchprof.run.rows import Around, Chains, Rows, rows_of_lines
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.timeline import DeviceTime, StreamTime
from torchprof.run.words import FORWARD, OUTSIDE

_VALUES = ("calls", *FIELDS)
_KEYS = tuple(name for name in Rows.COLUMNS if name not in _VALUES)


def add_cycle(before: Run | None, cycle: Run) -> Run:
    """Add the run of a new cycle to ``before``, the sum of the earlier cycles of the process (None: there are none).

    - Rows with equal keys are added up, and so are device times.
    - The samples of both are joined.
    - Of each device's memory, the higher peak stays, with what was live at it.
    - The timeline is that of the new cycle.
    - The layers are those of the new cycle, which may have more at the end. The shapes are those of a layer's first
      call in any cycle.
    - The sum has no stored warnings: a warning of one cycle need not hold for the sum.
    """
    if before is None:
        return cycle
    known = len(before.layers)
    layers = Layers((*map(_first_seen, before.layers, cycle.layers), *cycle.layers[known:]))
    if layers == before.layers:
        layers = before.layers  # it has computed its tree
    samples = _with_zeros(before.samples, cycle.samples)
    for of, spread in _with_zeros(cycle.samples, before.samples).items():
        samples[of] = samples[of] + spread if of in samples else spread
    return Run(
        (_sum_of_metas(before.meta, cycle.meta),),
        layers,
        sum_of_rows(layers, before.rows, cycle.rows),
        samples,
        _higher_peaks(before.memory, cycle.memory),
        cycle.timeline,
        _sum_of_devices(before.device_times, cycle.device_times),
        _sum_of_lockstep(before.lockstep, cycle.lockstep),
        cycle.unfinished,
    )


def sum_of_rows(layers: tuple[Layer, ...], before: Rows, now: Rows) -> Rows:
    """The sum of two tables of rows on the same layers: rows with equal keys become one row."""
    if _have_equal_keys(before, now):  # as in most loops: each step does the same
        columns = dict(before.columns)
        for name in _VALUES:
            if any(now.columns[name]):
                columns[name] = array("q", map(add, before.columns[name], now.columns[name]))
        return replace(before, layers=layers, columns=columns)
    lines: dict[tuple[int, ...], Sequence[int]] = {}
    chains = Chains()
    within: dict[tuple[Around, ...], int] = {}
    shared: dict[tuple[int, ...], int] = {}
    devices: dict[str, int] = {}
    for rows in (before, now):
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
    return rows_of_lines(layers, lines, chains.all, devices, within, shared)


def _have_equal_keys(before: Rows, now: Rows) -> bool:
    """Whether two tables have rows with the same keys in the same order."""
    return (
        all(before.columns[name] == now.columns[name] for name in _KEYS)
        and before.frames == now.frames
        and (before.within, before.shared, before.devices) == (now.within, now.shared, now.devices)
    )


def _with_zeros(samples: Mapping[SampleKey, Spread], other: Mapping[SampleKey, Spread]) -> dict[SampleKey, Spread]:
    """``samples``, with 0 for each of its steps added for every per-step measure that only ``other`` has."""
    complete = dict(samples)
    for key in other:
        steps = samples.get(SampleKey(OUTSIDE, FORWARD, key.rank, "cpu", "step_ns"))
        if steps is not None and key.measure.startswith("step_") and key not in samples:
            complete[key] = Spread(steps.count, 0, 0, 0, 0, (0,) * len(steps.sample), tuple(sorted(steps.hashes)))
    return complete


def _sum_of_lockstep(
    before: Mapping[LockstepKey, Lockstep], now: Mapping[LockstepKey, Lockstep]
) -> dict[LockstepKey, Lockstep]:
    """The lockstep of one rank over all cycles. What one side did not record took 0 in each of its steps."""
    joined = {}
    for key in dict.fromkeys((*before, *now)):
        earlier = before.get(key) or _zero_in_each_step(key, before)
        later = now.get(key) or _zero_in_each_step(key, now)
        joined[key] = earlier + later if earlier and later else earlier or later
    return {key: lockstep for key, lockstep in joined.items() if lockstep is not None}


def _zero_in_each_step(key: LockstepKey, cycles: Mapping[LockstepKey, Lockstep]) -> Lockstep | None:
    """0 for each step of these cycles.

    None for collectives (they are counted by calls, not by steps), and if the steps or the groups are unknown.
    """
    steps = cycles.get(LockstepKey(OUTSIDE, FORWARD, "cpu", STEP))  # the device has the same steps
    if steps is None or key.is_collective or key.group == NOT_RECORDED:
        return None
    return replace(steps, ns=(0,), beside_ns=(0,), last_ns=(0,) * len(steps.last_ns), medians=())


def _first_seen(before: Layer, now: Layer) -> Layer:
    """A layer with the shapes, output size and mode of its first call in any cycle."""
    if now == before:
        return before
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
        # Of all cycles so far.
        grad_calls=before.grad_calls if now.grad_calls is None else now.grad_calls,
        updated_params=before.updated_params if now.updated_params is None else now.updated_params,
    )


def same_shapes(one: Layer, other: Layer) -> bool | None:
    """``Layer.same_shapes`` over the calls of both; None if it is unknown for either."""
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
        regions=_unambiguous(before.regions + now.regions),
        compilations=_each_once(before, now),
    )


def _sum_of_known(before: int | None, now: int | None) -> int | None:
    return None if before is None or now is None else before + now


def _unambiguous(regions: Sequence[CompiledRegion]) -> tuple[CompiledRegion, ...]:
    """Each region once. A name that stands for two different regions (torch.compile was reset) is left out: it is
    ambiguous."""
    found: dict[str, set[CompiledRegion]] = {}
    for region in regions:
        found.setdefault(region.name, set()).add(region)
    return tuple(one for ones in found.values() if len(ones) == 1 for one in ones)


def _each_once(before: Meta, now: Meta) -> tuple[Compilation, ...]:
    """The compilations of two recordings. The later one also knows those in the earlier one, as before it."""
    found = {(one.name, one.phase, one.began_ns): one for one in before.compilations}
    for one in now.compilations:
        step = None if one.step is None else before.steps + one.step
        found.setdefault((one.name, one.phase, one.began_ns), one._replace(step=step))
    return tuple(sorted(found.values(), key=lambda one: one.began_ns))


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
