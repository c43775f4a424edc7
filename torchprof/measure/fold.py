"""Sum attributed events into rows and samples."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from operator import add

from torchprof.attribute.events import Attributed, Kind, Place
from torchprof.attribute.op_groups import OpGroup, OpTree
from torchprof.measure.busy import Covered
from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, SampleKey, Spread
from torchprof.run.rows import Around, Chains, Rows
from torchprof.run.words import PHASES, Frame, FrameKind, Signature

_Call = tuple[int, int, int]
"""Start, duration and thread of a call or of a garbage collection."""
_Values = dict[tuple[int, str], list[int]]
"""By index of a place and device: a value for each field of ``Cost``, and last the number of calls."""
_Groups = dict[tuple[Place, OpTree], list[int]]
"""By the place around groups, and their tree: how many there are, and then the time of each event in all of them."""
_GroupValues = defaultdict[tuple[Place, OpTree], dict[tuple[int, str], list[int]]]
"""What groups have in addition to CPU time and calls: by path and device, a value for each field of ``Cost``."""
_Counts = tuple[int, int, int]
"""MACs, FLOPs and the number of uncounted calls."""

_DEVICE_NS, _COLLECTIVE_NS, _MACS = map(FIELDS.index, ("device_ns", "collective_ns", "macs"))
_ALLOCATED = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}  # by: is it the CPU
_FREED = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}


@dataclass
class _Sums:
    """The sums of all events. ``cpu_ns`` and ``calls``: by index of a place. ``other``: what a place has in addition.
    ``durations``: the calls of each layer in a phase. ``busy_ns``: by device; the CPU's only if it was timed."""

    cpu_ns: list[int]
    calls: list[int]
    other: _Values
    groups: _Groups
    of_groups: _GroupValues
    durations: dict[tuple[int, str], list[_Call]]
    interruptions: list[_Call]
    busy_ns: dict[str, int]


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

    ``places``: the list that the attribution fills while ``attributed`` is read; the first is outside all layers.
    ``counts`` may fill meanwhile, too: index of a place → MACs, FLOPs, and the number of calls and kernels without a
    formula. ``group_counts``: the same for groups, by the place around them, their tree, and path.
    """
    sums = _sums_of(attributed, places, timed)
    if timed:
        sums.cpu_ns[0] += max(recorded_ns - sums.busy_ns["cpu"], 0)
    _add_counts(sums.other, counts or {}, places)
    for alike, of_group in (group_counts or {}).items():
        for path, counted in of_group.items():
            sums.of_groups[alike].setdefault((path, "cpu"), [0] * len(FIELDS))[_MACS : _MACS + 3] = counted
    rows = _rows(sums, places, layers, rank, signatures)
    interrupted = _by_thread(sums.interruptions)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of([*_without(interrupted, calls_of)])
        for (layer, phase), calls_of in sorted(sums.durations.items())
    }
    return rows, samples, sums.busy_ns


def _sums_of(attributed: Iterable[Attributed | OpGroup], places: Sequence[Place], timed: bool) -> _Sums:
    """This function is long because its loop runs for each of perhaps a million events: a call for each would cost more
    than the additions."""
    cpu_ns: list[int] = []  # by index of a place
    calls: list[int] = []
    other: _Values = {}  # what a place has beside CPU time and calls
    groups: _Groups = {}
    of_groups: _GroupValues = defaultdict(dict)
    not_taken: defaultdict[Place, int] = defaultdict(int)
    durations: dict[tuple[int, str], list[_Call]] = {}
    interruptions: list[_Call] = []
    busy: dict[str, Covered] = {}
    memory, kernel, label, step = Kind.MEMORY, Kind.KERNEL, Kind.LABEL, Kind.STEP
    collective, interruption = Kind.COLLECTIVE, Kind.INTERRUPTION
    covered = covered_until = 0

    for item in attributed:
        if isinstance(item, OpGroup):
            alike = item.place, item.tree
            before = groups.get(alike)
            groups[alike] = [1, *item.ns] if before is None else [before[0] + 1, *map(add, before[1:], item.ns)]
            if item.outer is None:  # its time is taken from no range
                not_taken[item.place] += sum(end - start for start, end in item.outermost())
                for start, end in item.outermost():
                    if end > covered_until:
                        covered += end - max(covered_until, start)
                        covered_until = end
            if item.tree.memory:
                _add_memory(of_groups[alike], item)
            continue
        event, place, around, counted, ns, _ = item
        kind = event[0]
        if kind is memory or kind is kernel:
            device = event.device
            values = other.setdefault((place.index, device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[_DEVICE_NS] += ns
                values[-1] += counted
                if device not in busy:
                    busy[device] = Covered(event.start_ns)
                busy[device].add(event.start_ns, event.end_ns)
            elif event.nbytes >= 0:
                values[_ALLOCATED[device == "cpu"]] += event.nbytes
            else:
                values[_FREED[device == "cpu"]] -= event.nbytes
            continue
        if kind is step or (kind is interruption and not timed):  # which has only a time
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
        elif kind is interruption:
            interruptions.append((event.start_ns, ns, event.thread))

    missing = len(places) - len(cpu_ns)
    cpu_ns.extend([0] * missing)
    calls.extend([0] * missing)
    busy_ns = {device: of_device.ns for device, of_device in busy.items()}
    if timed:
        for place, ns in not_taken.items():
            cpu_ns[place.index] += ns
        busy_ns["cpu"] = covered
    else:
        groups = {alike: [times, *[0] * len(ns)] for alike, (times, *ns) in groups.items()}
    return _Sums(cpu_ns, calls, other, groups, of_groups, durations, interruptions, busy_ns)


def _add_memory(values: dict[tuple[int, str], list[int]], group: OpGroup) -> None:
    for _, path, device, _, nbytes in group.memory():
        of_path = values.get((path, device))
        if of_path is None:
            of_path = values[path, device] = [0] * len(FIELDS)
        if nbytes >= 0:
            of_path[_ALLOCATED[device == "cpu"]] += nbytes
        else:
            of_path[_FREED[device == "cpu"]] -= nbytes


def _add_counts(values: _Values, counts: Mapping[int, _Counts], places: Sequence[Place]) -> None:
    """Those of a kernel belong to its device: its place has no row of the CPU."""
    device_of: dict[int, str] = dict(values.keys())
    for index, counted in counts.items():
        device = device_of.get(index, "cpu") if places[index].kind == FrameKind.KERNEL else "cpu"
        values.setdefault((index, device), [0] * (len(FIELDS) + 1))[_MACS : _MACS + 3] = counted


_Interruptions = dict[int, tuple[list[int], list[int]]]
"""By thread: the starts of its interruptions, in order; and the total time of the first 0, 1, 2, … ones."""


def _by_thread(interruptions: Iterable[_Call]) -> _Interruptions:
    of_thread: _Interruptions = {}
    for start, ns, thread in interruptions:
        starts, sums = of_thread.setdefault(thread, ([], [0]))
        starts.append(start)
        sums.append(sums[-1] + ns)
    return of_thread


def _without(interrupted: _Interruptions, calls: Iterable[_Call]) -> Iterator[tuple[int, int]]:
    """Start and duration of calls, less what interrupted them."""
    for start, ns, thread in calls:
        if thread in interrupted:
            starts, sums = interrupted[thread]
            ns += sums[bisect_left(starts, start)] - sums[bisect_left(starts, start + ns)]
        yield start, ns


def _rows(
    sums: _Sums, places: Sequence[Place], layers: tuple[Layer, ...], rank: int, signatures: Sequence[Signature]
) -> Rows:
    """Places that differ only in what rows do not keep become one row."""
    chains, chain_of, arounds, within_of = _surroundings(places, signatures)
    inner: dict[int, list[tuple[OpTree, int, list[int]]]] = {}  # by index of a place: tree, times, ns by path
    for (place, tree), (times, *taken) in sums.groups.items():
        own_ns = tree.self_ns(taken)
        sums.cpu_ns[place.index] += own_ns[0]
        inner.setdefault(place.index, []).append((tree, times, own_ns))
    on_devices: dict[int, list[tuple[str, list[int]]]] = {}
    for (index, device), values in sorted(sums.other.items()):
        on_devices.setdefault(index, []).append((device, values))
    lines = _Lines()
    chains_of: dict[tuple[int, OpTree], list[int]] = {}  # of the paths of a tree inside a place with this chain
    shares: dict[tuple[int, ...], int] = {(): 0}
    phases = {phase: number for number, phase in enumerate(PHASES)}
    for place, ns, called in zip(places, sums.cpu_ns, sums.calls):
        index = place.index
        trees = inner.get(index, ())
        if not (ns or called or trees or index in on_devices):
            continue
        chain = chain_of[index]
        home = place.layer, phases[place.phase], shares.setdefault(place.shared, len(shares)), within_of[index]
        if ns or called:
            lines.add(home, "cpu", (chain,), (called,), (ns,))
        for tree, times, own_ns in trees:
            inside = chains_of.get((chain, tree))
            if inside is None:
                inside = chains_of[chain, tree] = _chains_inside(chains, chain, tree, signatures)
            lines.add(home, "cpu", inside[1:], [times * calls_in_one for calls_in_one in tree.calls[1:]], own_ns[1:])
            for (path, device), costs in sums.of_groups.get((place, tree), {}).items():
                lines.add_costs(home, device, inside[path], 0, costs)
        for device, (*costs, called) in on_devices.get(index, ()):
            lines.add_costs(home, device, chain, called, costs)
    return lines.rows(layers, rank, chains.all, arounds, shares)


def _surroundings(
    places: Sequence[Place], signatures: Sequence[Signature]
) -> tuple[Chains, list[int], list[tuple[Around, ...]], list[int]]:
    """The chains of frames, and for each place the number of its chain; what can be around a layer's range, and for
    each place the number of what is around its layer's."""
    chains = Chains()
    numbers: dict[tuple[int, Frame, int], int] = {}  # (the outer chain, a frame, its signature) → the chain of both
    chain_of = [0] * len(places)
    arounds: list[tuple[Around, ...]] = [()]
    within_of = [0] * len(places)
    of_within: dict[int, int] = {}  # index of the place that a layer is within → its number in ``arounds``
    for place in places:  # a place comes after its ``outer`` and its ``within``
        if place.outer is not None and place.frame is not None:
            step = (chain_of[place.outer.index], place.frame, place.signature)
            number = numbers.get(step)
            if number is None:
                number = numbers[step] = chains.inside(step[0], _signed(place.frame, place.signature, signatures))
            chain_of[place.index] = number
        outer = place.within
        if outer is not None:
            number = of_within.get(outer.index)
            if number is None:
                number = of_within[outer.index] = len(arounds)
                around = Around(outer.layer, outer.phase, chains.all[chain_of[outer.index]])
                arounds.append((*arounds[within_of[outer.index]], around))
            within_of[place.index] = number
    return chains, chain_of, arounds, within_of


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


class _Lines:
    """Rows, as columns, while values are added to them. All that is not a value is a number."""

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
                for line in zip(chains, calls, cpu_ns):
                    self.add(home, device, *((value,) for value in line))
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
        return Rows(
            layers, tuple(map(chains.__getitem__, used)), tuple(self._devices), arrays, tuple(arounds), tuple(shares)
        )
