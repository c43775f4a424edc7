"""Sum attributed events by place, and make rows, samples of calls, and the busy time of devices from the sums."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from operator import add
from typing import NamedTuple

from torchprof.attribute.events import Attributed, Kind, Place
from torchprof.attribute.op_groups import OpGroup, OpTree
from torchprof.measure.busy import Covered
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, SampleKey, Spread
from torchprof.run.rows import Around, Chains, Rows
from torchprof.run.words import PHASES, Frame, FrameKind, Signature

_Call = tuple[int, int, int]  # start, duration and thread of a call or of a garbage collection
_Values = dict[tuple[int, str], list[int]]
"""By index of a place and device: a value for each field of ``Cost``, and last the number of calls."""
_Groups = dict[tuple[Place, OpTree], list[int]]
"""By the place around groups, and their tree: how many there are, and then the time of each event in all of them."""
_GroupValues = defaultdict[tuple[Place, OpTree], dict[tuple[int, str], list[int]]]
"""What groups have in addition to CPU time and calls: by path and device, a value for each field of ``Cost``."""
_Counts = tuple[int, int, int]  # MACs, FLOPs and the number of uncounted calls

_DEVICE_NS, _COLLECTIVE_NS, _MACS = map(FIELDS.index, ("device_ns", "collective_ns", "macs"))
_ALLOCATED = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}
_FREED = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}
"""By whether the memory is on the CPU: the index of a field of ``Cost``."""


def fold(
    attributed: Iterable[Attributed | OpGroup],
    places: Sequence[Place],
    layers: tuple[Layer, ...],
    rank: int = 0,
    *,
    counts: Mapping[int, _Counts] | None = None,
    group_counts: Mapping[tuple[Place, OpTree], Mapping[int, _Counts]] | None = None,
    signatures: Sequence[Signature] = (),
    timed: bool = True,
    recorded_ns: int = 0,
) -> tuple[Rows, dict[SampleKey, Spread], dict[str, int]]:
    """Rows; samples with the durations of calls; and the busy time of each device.

    Self time: each event adds its time to its place and subtracts it from the place around it. The CPU is busy while
    any recorded thread is inside any op or range. Without ``timed``, all times are 0 and there are no samples.
    ``recorded_ns``: the recorded time. What the CPU was not busy for is outside all layers.

    Example: a call of layer A lasts 10 ns. In it, an op runs for 6 ns and launches a kernel of 3 ns. The rows are: A,
    between ops, 4 ns; A, the op, 6 ns; A, the kernel in the op, 3 ns on the device.

    ``places``: the list that the attribution fills while ``attributed`` is read; the first is outside all layers.
    ``counts`` may fill meanwhile, too: index of a place → MACs, FLOPs, and the number of calls and kernels without a
    formula. ``group_counts``: the same for groups, by the place around them, their tree, and path.
    """
    sums = _sums_of(attributed, places, timed)
    busy_ns = {device: covered.ns for device, covered in sums.on_devices.items()}
    if timed:
        busy_ns["cpu"] = sums.on_cpu.ns
        sums.cpu_ns[0] += max(recorded_ns - sums.on_cpu.ns, 0)
    _add_counts(sums.other, counts or {}, places)
    for alike, of_group in (group_counts or {}).items():
        for path, counted in of_group.items():
            sums.of_groups[alike].setdefault((path, "cpu"), [0] * len(FIELDS))[_MACS : _MACS + 3] = counted
    rows = _rows(sums, places, layers, rank, signatures)
    interrupted = _by_thread(sums.interruptions)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of([*_less_interruptions(interrupted, calls_of)])
        for (layer, phase), calls_of in sorted(sums.durations.items())
    }
    return rows, samples, busy_ns


# Sums by place


@dataclass
class _Sums:
    """The sums of all events. ``cpu_ns`` and ``calls``: by index of a place. ``other``: what a place has in addition.
    ``groups``: the time of groups; ``of_groups``: what they have in addition; ``outermost_ns``: the time of those
    outside all ranges. ``durations``: the calls of a layer in a phase. ``on_cpu``, ``on_devices``: when they are busy.
    """

    cpu_ns: list[int] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)
    other: _Values = field(default_factory=dict)
    groups: _Groups = field(default_factory=dict)
    of_groups: _GroupValues = field(default_factory=lambda: defaultdict(dict))
    outermost_ns: Counter[Place] = field(default_factory=Counter)
    durations: dict[tuple[int, str], list[_Call]] = field(default_factory=dict)
    interruptions: list[_Call] = field(default_factory=list)
    on_cpu: Covered = field(default_factory=lambda: Covered(0))
    on_devices: dict[str, Covered] = field(default_factory=dict)

    def make_room(self, places: int) -> None:
        """Begin the sums of new places with 0."""
        missing = [0] * (places - len(self.cpu_ns))
        self.cpu_ns += missing
        self.calls += missing

    def finish(self, places: int, timed: bool) -> None:
        self.make_room(places)
        if not timed:
            self.groups = {alike: [times, *[0] * len(ns)] for alike, (times, *ns) in self.groups.items()}
            return
        for place, ns in self.outermost_ns.items():
            self.cpu_ns[place.index] += ns


def _sums_of(attributed: Iterable[Attributed | OpGroup], places: Sequence[Place], timed: bool) -> _Sums:
    """One loop over perhaps a million events: calls of functions that add would take longer than the additions."""
    sums = _Sums()
    cpu_ns, calls, other, groups = sums.cpu_ns, sums.calls, sums.other, sums.groups
    on_cpu, on_devices = sums.on_cpu, sums.on_devices
    memory, kernel, label, step = Kind.MEMORY, Kind.KERNEL, Kind.LABEL, Kind.STEP
    collective, interruption = Kind.COLLECTIVE, Kind.INTERRUPTION

    for item in attributed:
        if isinstance(item, OpGroup):
            alike = item.place, item.tree
            before = groups.get(alike)
            groups[alike] = [1, *item.ns] if before is None else [before[0] + 1, *map(add, before[1:], item.ns)]
            if item.outer is None:
                sums.outermost_ns[item.place] += _add_outermost(item, on_cpu)
            if item.tree.memory:
                _add_memory(sums.of_groups[alike], item)
            continue
        event, place, around, counted, ns, _ = item
        kind = event[0]
        if kind is memory or kind is kernel:
            device = event.device
            values = other.setdefault((place.index, device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[_DEVICE_NS] += ns
                values[-1] += counted
                if device not in on_devices:
                    on_devices[device] = Covered(event.start_ns)
                on_devices[device].add(event.start_ns, event.end_ns)
            elif event.nbytes >= 0:
                values[_ALLOCATED[device == "cpu"]] += event.nbytes
            else:
                values[_FREED[device == "cpu"]] -= event.nbytes
            continue
        if kind is step or (kind is interruption and not timed):  # which has only a time
            continue
        index = place.index
        if index >= len(cpu_ns):
            sums.make_room(len(places))
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
        elif event.start_ns + ns > on_cpu.until:  # outermost on its thread: the CPU is busy for longer
            on_cpu.ns += event.start_ns + ns - max(on_cpu.until, event.start_ns)
            on_cpu.until = event.start_ns + ns
        if kind is label and counted and place.layer >= 0:
            sums.durations.setdefault((place.layer, place.phase), []).append((event.start_ns, ns, event.thread))
        elif kind is interruption:
            sums.interruptions.append((event.start_ns, ns, event.thread))

    sums.finish(len(places), timed)
    return sums


def _add_outermost(group: OpGroup, on_cpu: Covered) -> int:
    """Add a group outside all ranges to the CPU's busy time. Returns the time of its outermost ops."""
    outermost_ns = 0
    for start, end in group.outermost():
        outermost_ns += end - start
        if end > on_cpu.until:
            on_cpu.ns += end - max(on_cpu.until, start)
            on_cpu.until = end
    return outermost_ns


def _add_memory(values: dict[tuple[int, str], list[int]], group: OpGroup) -> None:
    for _, path, device, _, nbytes in group.memory():
        if (of_path := values.get((path, device))) is None:
            of_path = values[path, device] = [0] * len(FIELDS)
        if nbytes >= 0:
            of_path[_ALLOCATED[device == "cpu"]] += nbytes
        else:
            of_path[_FREED[device == "cpu"]] -= nbytes


def _add_counts(values: _Values, counts: Mapping[int, _Counts], places: Sequence[Place]) -> None:
    """Add MACs, FLOPs and uncounted calls. Those of a kernel belong to its device: its place has no row of the CPU."""
    device_of: dict[int, str] = dict(values.keys())
    for index, counted in counts.items():
        device = device_of.get(index, "cpu") if places[index].kind == FrameKind.KERNEL else "cpu"
        values.setdefault((index, device), [0] * (len(FIELDS) + 1))[_MACS : _MACS + 3] = counted


# Samples

_Interruptions = dict[int, tuple[list[int], list[int]]]
"""By thread: the starts of its interruptions, in order; and the total time of the first 0, 1, 2, … ones."""


def _by_thread(interruptions: Iterable[_Call]) -> _Interruptions:
    of_thread: _Interruptions = {}
    for start, ns, thread in interruptions:
        starts, sums = of_thread.setdefault(thread, ([], [0]))
        starts.append(start)
        sums.append(sums[-1] + ns)
    return of_thread


def _less_interruptions(interrupted: _Interruptions, calls: Iterable[_Call]) -> Iterator[tuple[int, int]]:
    """Start and duration of calls, less the interruptions inside them."""
    for start, ns, thread in calls:
        if thread in interrupted:
            starts, sums = interrupted[thread]
            ns += sums[bisect_left(starts, start)] - sums[bisect_left(starts, start + ns)]
        yield start, ns


# Rows


def _rows(
    sums: _Sums, places: Sequence[Place], layers: tuple[Layer, ...], rank: int, signatures: Sequence[Signature]
) -> Rows:
    """Places that differ only in what rows do not keep become one row."""
    surroundings = _surroundings(places, signatures)
    chains = surroundings.chains
    trees_in: dict[int, list[tuple[OpTree, int, list[int]]]] = {}  # by index of a place: tree, times, ns by path
    for (place, tree), (times, *taken) in sums.groups.items():
        own_ns = tree.self_ns(taken)
        sums.cpu_ns[place.index] += own_ns[0]
        trees_in.setdefault(place.index, []).append((tree, times, own_ns))
    other_in = lists_by_key((index, (device, values)) for (index, device), values in sorted(sums.other.items()))
    columns = _RowColumns()
    chains_of: dict[tuple[int, OpTree], list[int]] = {}  # of the paths of a tree inside a place with this chain
    shares: dict[tuple[int, ...], int] = {(): 0}
    phases = {phase: number for number, phase in enumerate(PHASES)}
    for place, ns, called in zip(places, sums.cpu_ns, sums.calls):
        index = place.index
        trees = trees_in.get(index, ())
        if not (ns or called or trees or index in other_in):
            continue
        chain, within = surroundings.chain_of[index], surroundings.within_of[index]
        home = place.layer, phases[place.phase], shares.setdefault(place.shared, len(shares)), within
        if ns or called:
            columns.add(home, "cpu", (chain,), (called,), (ns,))
        for tree, times, own_ns in trees:
            if (of_paths := chains_of.get((chain, tree))) is None:
                of_paths = chains_of[chain, tree] = _chains_inside(chains, chain, tree, signatures)
            calls = [times * calls_in_one for calls_in_one in tree.calls[1:]]
            columns.add(home, "cpu", of_paths[1:], calls, own_ns[1:])
            for (path, device), costs in sums.of_groups.get((place, tree), {}).items():
                columns.add_costs(home, device, of_paths[path], 0, costs)
        for device, (*costs, called) in other_in.get(index, ()):
            columns.add_costs(home, device, chain, called, costs)
    return columns.rows(layers, rank, chains.all, surroundings.arounds, shares)


class _Surroundings(NamedTuple):
    """The ``chains`` of frames, and for each place the number of its chain, ``chain_of``. ``arounds``: what can be
    around a layer's range; ``within_of``: for each place the number of what is around its layer's."""

    chains: Chains
    chain_of: list[int]
    arounds: list[tuple[Around, ...]]
    within_of: list[int]


def _surroundings(places: Sequence[Place], signatures: Sequence[Signature]) -> _Surroundings:
    chains = Chains()
    numbers: dict[tuple[int, Frame, int], int] = {}  # (the outer chain, a frame, its signature) → the chain of both
    chain_of = [0] * len(places)
    arounds: list[tuple[Around, ...]] = [()]
    within_of = [0] * len(places)
    of_within: dict[int, int] = {}  # index of the place that a layer is within → its number in ``arounds``
    for place in places:  # a place comes after its ``outer`` and its ``within``
        if place.outer is not None and place.frame is not None:
            step = (chain_of[place.outer.index], place.frame, place.signature)
            if (number := numbers.get(step)) is None:
                number = numbers[step] = chains.inside(step[0], _signed(place.frame, place.signature, signatures))
            chain_of[place.index] = number
        if (outer := place.within) is not None:
            if (number := of_within.get(outer.index)) is None:
                number = of_within[outer.index] = len(arounds)
                around = Around(outer.layer, outer.phase, chains.all[chain_of[outer.index]])
                arounds.append((*arounds[within_of[outer.index]], around))
            within_of[place.index] = number
    return _Surroundings(chains, chain_of, arounds, within_of)


def _chains_inside(chains: Chains, around: int, tree: OpTree, signatures: Sequence[Signature]) -> list[int]:
    """The chain of each path of a tree; that of the first is ``around``."""
    inside = [around]
    for outer, name, signature in tree.paths[1:]:
        frame = _signed(Frame(FrameKind.OP, name), signature, signatures)
        inside.append(chains.inside(inside[outer], frame))
    return inside


def _signed(frame: Frame, signature: int, signatures: Sequence[Signature]) -> Frame:
    return frame._replace(signature=signatures[signature]) if signature else frame


_Home = tuple[int, int, int, int]
"""The number of a layer, a phase, the layers that share the work, and what is around the layer's range."""


class _RowColumns:
    """The columns of rows, while values are added to them. Devices, chains and so on are numbers in them."""

    def __init__(self) -> None:
        self._devices: dict[str, int] = {}
        self._numbers: dict[tuple[_Home, int], dict[int, int]] = {}  # by home and device: chain → number of the row
        self._blocks: list[tuple[_Home, int, int]] = []  # rows with one home and device, and how many
        self._chains: list[int] = []
        self._calls: list[int] = []
        self._cpu_ns: list[int] = []
        self._costs: dict[int, list[int]] = {}  # by number of a row: what it has beside CPU time

    def add(self, home: _Home, device: str, chains: Sequence[int], calls: Sequence[int], cpu_ns: Sequence[int]) -> None:
        """Add calls and CPU time to the rows with these chains of frames."""
        on = self._devices.setdefault(device, len(self._devices))
        known = self._numbers.setdefault((home, on), {})
        if known and not known.keys().isdisjoint(chains):
            if len(chains) > 1:
                for chain, of_chain, ns in zip(chains, calls, cpu_ns):
                    self.add(home, device, (chain,), (of_chain,), (ns,))
                return
            number = known[chains[0]]
            self._calls[number] += calls[0]
            self._cpu_ns[number] += cpu_ns[0]
            return
        known.update(zip(chains, count(len(self._chains))))
        self._blocks.append((home, on, len(chains)))
        self._chains += chains
        self._calls += calls
        self._cpu_ns += cpu_ns

    def add_costs(self, home: _Home, device: str, chain: int, calls: int, costs: Sequence[int]) -> None:
        """Add calls, and a value for each field of ``Cost``, to the row with this chain."""
        self.add(home, device, (chain,), (calls,), (0,))
        number = self._numbers[home, self._devices[device]][chain]
        before = self._costs.get(number)
        self._costs[number] = [*costs] if before is None else [*map(add, before, costs)]

    def rows(
        self,
        layers: tuple[Layer, ...],
        rank: int,
        chains: Sequence[tuple[Frame, ...]],
        arounds: Iterable[tuple[Around, ...]],
        shares: Iterable[tuple[int, ...]],
    ) -> Rows:
        size = len(self._chains)
        used = {chain: number for number, chain in enumerate(dict.fromkeys([0, *self._chains]))}
        homes, on, sizes = zip(*self._blocks) if self._blocks else ((), (), ())

        def repeated(values: Iterable[int]) -> Iterable[int]:
            return (value for value, times in zip(values, sizes) for _ in range(times))

        columns: dict[str, Iterable[int]] = {
            **dict(zip(("layer", "phase", "shared", "within"), map(repeated, zip(*homes)))),
            "frames": map(used.__getitem__, self._chains),
            "device": repeated(on),
            "rank": [rank] * size,
            "calls": self._calls,
            "cpu_ns": self._cpu_ns,
        }
        arrays = {name: array("q", columns.get(name, bytes(8 * size))) for name in Rows.COLUMNS}
        for number, costs in self._costs.items():
            for name, value in zip(FIELDS, costs):
                arrays[name][number] += value
        frames = tuple(map(chains.__getitem__, used))
        return Rows(layers, frames, tuple(self._devices), arrays, within=tuple(arounds), shared=tuple(shares))
