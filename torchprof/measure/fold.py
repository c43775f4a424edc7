"""Sum attributed events into rows and samples."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from operator import add

from torchprof.attribute.events import Kind
from torchprof.attribute.places import Attributed, Place
from torchprof.run.cost import FIELDS
from torchprof.run.layers import Layer
from torchprof.run.rows import Around, Chains, Rows, rows_of_lines
from torchprof.run.samples import SampleKey, Spread
from torchprof.run.words import PHASES, Frame, Signature

_Call = tuple[int, int, int]
"""Start, duration and thread of a call or of a garbage collection."""
_Values = dict[tuple[int, str], list[int]]
"""By index of a place and device: a value for each field of ``Cost``, and last the number of calls."""

_CPU_NS, _DEVICE_NS, _COLLECTIVE_NS, _MACS = map(FIELDS.index, ("cpu_ns", "device_ns", "collective_ns", "macs"))
_ALLOCATED = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}  # by: is it the CPU
_FREED = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}


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
    """Sum events: rows; samples with the durations of calls; and the busy time of each device.

    Self time: each event adds its time to its place and subtracts it from the place around it. The CPU is busy while
    any recorded thread is inside any op or range. Without ``timed``, all times are 0 and there are no samples.

    ``places``: the list that the attribution fills while ``attributed`` is read. ``counts`` may fill meanwhile, too:
    index of a place → MACs, FLOPs, and the number of calls and kernels without a formula.

    This function is long because its loop runs for each of perhaps a million events: a call for each would cost more
    than the additions.
    """
    cpu_ns: list[int] = []  # by index of a place
    calls: list[int] = []
    other: _Values = {}  # what a place has beside CPU time and calls
    durations: dict[tuple[int, str], list[_Call]] = {}
    collections: list[_Call] = []
    busy: dict[str, int] = {}
    busy_until: dict[str, int] = {}
    memory, kernel, label, step = Kind.MEMORY, Kind.KERNEL, Kind.LABEL, Kind.STEP
    collective, garbage = Kind.COLLECTIVE, Kind.GARBAGE
    covered = covered_until = 0

    for event, place, around, counted, ns, _ in attributed:
        kind = event[0]
        if kind is memory or kind is kernel:
            device = event.device
            values = other.setdefault((place.index, device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[_DEVICE_NS] += ns
                values[-1] += counted
                until = busy_until.get(device, event.start_ns)
                busy[device] = busy.get(device, 0) + max(0, event.end_ns - max(until, event.start_ns))
                busy_until[device] = max(until, event.end_ns)
            elif event.nbytes >= 0:
                values[_ALLOCATED[device == "cpu"]] += event.nbytes
            else:
                values[_FREED[device == "cpu"]] -= event.nbytes
            continue
        if kind is step or (kind is garbage and not timed):  # a garbage collection has only a time
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
            values[_COLLECTIVE_NS] += event.end_ns - event.start_ns
            continue
        cpu_ns[index] += ns
        if around is not None:
            cpu_ns[around.index] -= ns
        else:  # outermost on its thread: it adds the time that no earlier one on any thread covers
            end = event.start_ns + ns
            covered += max(0, end - max(covered_until, event.start_ns))
            covered_until = max(covered_until, end)
        if kind is label and counted and place.layer >= 0:
            durations.setdefault((place.layer, place.phase), []).append((event.start_ns, ns, event.thread))
        elif kind is garbage:
            collections.append((event.start_ns, ns, event.thread))

    _add_cpu(other, cpu_ns, calls)
    _add_counts(other, counts or {})
    rows = _rows(other, places, layers, rank, signatures)
    collected = _by_thread(collections)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of(_without(collected, calls_of))
        for (layer, phase), calls_of in sorted(durations.items())
    }
    if timed:
        busy["cpu"] = covered
    return rows, samples, busy


def _add_cpu(values: _Values, cpu_ns: Iterable[int], calls: Iterable[int]) -> None:
    """Add the CPU time and the calls of places, both by index."""
    for index, (ns, counted) in enumerate(zip(cpu_ns, calls)):
        if ns or counted:
            of_place = values.setdefault((index, "cpu"), [0] * (len(FIELDS) + 1))
            of_place[_CPU_NS] = ns
            of_place[-1] = counted


def _add_counts(values: _Values, counts: Mapping[int, tuple[int, int, int]]) -> None:
    """Add MACs, FLOPs and uncounted calls. Those of a kernel belong to its device: its place has no row of the CPU."""
    device_of = dict(sorted(values, key=lambda key: key[1] == "cpu"))
    for index, count in counts.items():
        key = (index, device_of.get(index, "cpu"))
        values.setdefault(key, [0] * (len(FIELDS) + 1))[_MACS : _MACS + 3] = count


def _by_thread(collections: Iterable[_Call]) -> dict[int, tuple[list[int], list[int]]]:
    """By thread: the starts of its garbage collections, in order; and the total time of the first 0, 1, 2, … ones."""
    found: dict[int, tuple[list[int], list[int]]] = {}
    for start, ns, thread in collections:
        starts, sums = found.setdefault(thread, ([], [0]))
        starts.append(start)
        sums.append(sums[-1] + ns)
    return found


def _without(
    collected: Mapping[int, tuple[Sequence[int], Sequence[int]]], calls: Iterable[_Call]
) -> list[tuple[int, int]]:
    """Start and duration of calls, less the garbage collections that interrupted them."""
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
    """The rows of these values; places that differ only in what rows do not keep become one row."""
    chains = Chains()
    numbers: dict[tuple[int, Frame, int], int] = {}  # (the outer chain, a frame, its signature) → the chain of both
    chain_of = [0] * len(places)
    shares: dict[tuple[int, ...], int] = {(): 0}
    arounds: list[tuple[Around, ...]] = [()]
    within_of = [0] * len(places)
    of_within: dict[int, int] = {}  # index of the place that a layer is within → its number in ``arounds``
    for place in places:  # a place comes after its ``outer`` and its ``within``
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
    return rows_of_lines(layers, lines, chains.all, devices, arounds, shares)
