"""Attributed events, summed into rows and samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import add

from torchprof.attribute.events import Kind
from torchprof.attribute.places import Attributed, Place
from torchprof.run.cost import FIELDS
from torchprof.run.layers import Layer
from torchprof.run.rows import Around, Chains, Rows, table
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import PHASES, Frame, Signature

_Call = tuple[int, int, int]
"""Start, duration and thread of a call or of a garbage collection."""


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

    The CPU is busy while any recorded thread is inside any op or range.

    ``places`` is the list that the attribution fills while ``attributed`` is read. ``counts`` may fill meanwhile, too:
    by the index of a place, MACs, FLOPs, and the calls and kernels without a formula. Self time: each event adds its
    time to its place and subtracts it from the place around it. Without ``timed`` all times are 0, and there are no
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

    for event, place, around, counted, ns, _ in attributed:
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
        if kind is step or (kind is garbage and not timed):  # a collection has nothing but its time
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
        else:  # outermost on its thread: it adds only the time that no earlier one, on any thread, covers
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
    """By thread: the starts of garbage collections, in order, and the total times of the first 0, 1, 2, … of them."""
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
    chains = Chains()
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
    return table(layers, lines, chains.all, devices, arounds, shares)
