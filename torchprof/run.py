"""``Run``: everything one profiled run knows, frozen, and read by every report. Knows only the standard library."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from os import PathLike
from typing import Any, NamedTuple

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Attributed, Frame, Kind, Place, Signature
from torchprof.cost import FIELDS, Cost
from torchprof.errors import TorchprofError, suggest

OUTSIDE_NAME = "(outside)"
NOT_SELECTED_NAME = "(not selected)"


@dataclass(frozen=True)
class Layer:
    """What a layer is, not what it did.

    ``path``: root class name, then attribute names. ``kind``: class name. ``params``, ``trainable_params`` and
    ``param_bytes`` count the parameters that the layer itself holds (not its children), each at the first layer that
    holds it; None where a lazy layer has not made them yet, or a quantised one has packed them. ``dtype_bytes`` are the
    same bytes by type ("float32"), ``buffers`` and ``buffer_bytes`` the elements and bytes of its buffers. Shapes are
    those of the first forward call: one tuple for each tensor, with -1 for a size that is no number (nested tensors);
    ``()`` where it was not called. ``output_bytes`` is how large the tensors are that this call returned, None where
    that is not known.
    ``compiled``: inside a ScriptModule or a module under torch.compile, where it may run without being called.
    ``shared_with``: the other paths of the same module.
    """

    path: tuple[str, ...]
    kind: str
    params: int | None = 0
    trainable_params: int | None = 0
    param_bytes: int | None = 0
    dtype_bytes: tuple[tuple[str, int], ...] = ()
    buffers: int = 0
    buffer_bytes: int = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    output_bytes: int | None = None
    training: bool = True
    compiled: bool = False
    shared_with: tuple[tuple[str, ...], ...] = ()

    @property
    def name(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)


class Peak(NamedTuple):
    """The most that a device was seen to do: ``flops_per_s`` in a product of matrices of this ``dtype`` ("float32"),
    ``bytes_per_s`` read and written in a copy. ``threads`` is 0 for what is not the CPU."""

    device: str
    dtype: str
    threads: int
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True)
class Meta:
    """How a run came about; one per rank.

    ``requested`` and ``measured`` name fields of ``Cost``: what was asked for and not measured is shown as unknown.
    ``device`` is the kind of device that was asked for (``cuda``, ``xpu``, ``mps``), None for the CPU alone. ``paths``
    are the selected layers, None for all. ``peak_bytes`` is by how much memory rose above what there was at the start,
    for each device. ``peaks`` are what ``torchprof.peak`` had measured by then. ``warnings`` are sentences for the
    user. ``machine`` and ``script`` are names that ``save(strip=True)`` leaves out.
    """

    model: tuple[str, ...]
    rank: int = 0
    device: str | None = None
    requested: tuple[str, ...] = ("cpu_ns",)
    measured: tuple[str, ...] = ("cpu_ns",)
    paths: tuple[tuple[str, ...], ...] | None = None
    wall_ns: int = 0
    peak_bytes: tuple[tuple[str, int], ...] = ()
    peaks: tuple[Peak, ...] = ()
    warnings: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    machine: str = ""
    script: str = ""


class Row(NamedTuple):
    """One line of the finest table there is: every other table is a group-by over rows.

    ``layer`` is None for work of no layer; ``selected`` is then False where the work belongs to layers that ``paths=``
    did not select. ``frames`` lead from the layer inward, ``()`` is the layer's own time between ops. ``signature`` is
    what the innermost op was called on, None where that was not recorded. ``cost`` is self.
    """

    layer: Layer | None
    selected: bool
    phase: str
    frames: tuple[Frame, ...]
    signature: Signature | None
    device: str
    rank: int
    calls: int
    cost: Cost


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """The rows as columns of integers; a ``Row`` is a view of one line."""

    layers: tuple[Layer, ...] = field(repr=False)
    frames: tuple[tuple[Frame, ...], ...] = field(repr=False)
    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    signatures: tuple[Signature, ...] = field(repr=False, default=())  # numbered from 1 in the columns; 0 is none

    COLUMNS = ("layer", "phase", "frames", "signature", "device", "rank", "calls", *FIELDS)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if isinstance(index, slice):
            raise TypeError("rows have no slices: take list(run.rows)[a:b]")
        layer, phase, frames, signature, device, rank, calls, *cost = (
            self.columns[name][index] for name in self.COLUMNS
        )
        return Row(
            self.layers[layer] if layer >= 0 else None,
            layer != NOT_SELECTED,
            PHASES[phase],
            self.frames[frames],
            self.signatures[signature - 1] if signature else None,
            self.devices[device],
            rank,
            calls,
            Cost(*cost),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def by_layer(self) -> dict[tuple[int, int], tuple[Cost, int]]:
        """Self cost and calls of each (layer index, phase number), in one pass over the columns."""
        own_time = [not frames for frames in self.frames]
        keys = list(zip(self.columns["layer"], self.columns["phase"]))
        calls = dict.fromkeys(keys, 0)
        for key, frames, count in zip(keys, self.columns["frames"], self.columns["calls"]):
            if own_time[frames]:
                calls[key] += count
        sums = {key: [0] * len(FIELDS) for key in calls}
        for number, name in enumerate(FIELDS):
            if any(self.columns[name]):
                for key, value in zip(keys, self.columns[name]):
                    sums[key][number] += value
        return {key: (Cost(*total), calls[key]) for key, total in sums.items()}


@dataclass(frozen=True)
class Spread:
    """How a measure that does not add up was distributed over the calls.

    ``first`` is the first call's. ``sample`` holds at most ``Spread.SIZE`` values, chosen by a hash of their time of
    start, so that it is the same whatever the order they come in; it holds all values where there are no more.
    """

    count: int
    sum: int
    min: int
    max: int
    first: int
    sample: tuple[int, ...]

    SIZE = 256

    @classmethod
    def of(cls, calls: Sequence[tuple[int, int]]) -> Spread:
        """From (start in ns, value), in any order, at least one."""
        values = [value for _, value in calls]
        kept = calls
        if len(calls) > cls.SIZE:
            kept = nsmallest(cls.SIZE, calls, key=lambda call: (_scrambled(call[0]), call[1]))
        sample = tuple(sorted(value for _, value in kept))
        return cls(len(values), sum(values), min(values), max(values), min(calls)[1], sample)

    def quantile(self, q: float) -> float:
        """The value below which the share ``q`` (0 to 1) of the sample lies, linear between two neighbours."""
        at = q * (len(self.sample) - 1)
        low = math.floor(at)
        high = min(low + 1, len(self.sample) - 1)
        return self.sample[low] + (self.sample[high] - self.sample[low]) * (at - low)

    @property
    def median(self) -> float:
        return self.quantile(0.5)


def _scrambled(number: int) -> int:
    """A hash of 64 bits that is the same in every process: the finaliser of SplitMix64 (Steele et al., 2014)."""
    mask = 2**64 - 1
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB & mask
    return number ^ (number >> 31)


class SampleKey(NamedTuple):
    """What a ``Spread`` is of: ``measure`` is ``cpu_ns``, the duration of a forward range, one value a call."""

    layer: int
    phase: str
    rank: int
    device: str
    measure: str


@dataclass
class Node:
    """A layer in the tree: ``total`` = ``self`` + the ``total`` of the children. Nothing is counted twice."""

    layer: Layer
    calls: int
    self: Cost
    total: Cost
    children: list[Node]

    def walk(self) -> Iterator[Node]:
        """This node and all below, depth first, without recursion: models are deeper than Python's limit."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(reversed(node.children))


class Op(NamedTuple):
    """An operator under a layer, in one phase: what runs directly in the layer, not in its child layers.

    ``self`` is what no op inside it took, ``total`` the time of its outermost occurrences. A kernel counts for the op
    that launched it. The layer's own time between ops has the name ``(between ops)``.
    """

    name: str
    calls: int
    self: Cost
    total: Cost


BETWEEN_OPS = "(between ops)"


@dataclass(frozen=True, repr=False)
class Run:
    """One profiled run. Made by ``Profile`` or ``torchprof.load``; every report reads it and nothing else."""

    metas: tuple[Meta, ...]
    layers: tuple[Layer, ...]
    rows: Rows
    samples: Mapping[SampleKey, Spread]

    def __str__(self) -> str:
        return self.report("tree")

    def __repr__(self) -> str:
        return f"<Run of {', '.join(self.meta.model)}: {len(self.layers)} layers, {len(self.rows)} rows>"

    @property
    def meta(self) -> Meta:
        return self.metas[0]

    @property
    def roots(self) -> tuple[Layer, ...]:
        """The models, in the order they were given."""
        return tuple(layer for layer in self.layers if len(layer.path) == 1)

    def tree(self, phase: str | None = None, root: int = 0) -> Node:
        """The layers of one model, each with self and total costs and calls.

        ``phase``: "forward", "backward" or "recompute"; None adds them up. ``calls`` counts the calls of that phase
        (the forward calls for None; backward has no ranges of its own: 0). Raises TorchprofError for an unknown phase
        or root.
        """
        if not isinstance(root, int) or not 0 <= root < len(self.roots):
            raise TorchprofError(
                f"This run has {len(self.roots)} model(s), numbered from 0: there is no root {root!r}."
            )
        wanted = range(len(PHASES)) if phase is None else [_number_of(phase)]
        counted = PHASES.index(phase or FORWARD)
        nothing = (Cost(), 0)
        sums = self.rows.by_layer
        nodes: dict[tuple[str, ...], Node] = {}
        top = self.roots[root].path[0]
        for index, layer in enumerate(self.layers):
            if layer.path[0] != top:
                continue
            own = Cost()
            for number in wanted:
                own = own + sums.get((index, number), nothing)[0]
            node = Node(layer, sums.get((index, counted), nothing)[1], own, own, [])
            nodes[layer.path] = node
            if len(layer.path) > 1:
                nodes[layer.path[:-1]].children.append(node)
        for path, node in reversed(nodes.items()):
            if len(path) > 1:
                above = nodes[path[:-1]]
                above.total = above.total + node.total
        return nodes[(top,)]

    def no_layer(self, phase: str, *, selected: bool = True) -> Cost:
        """What belongs to no layer: loss, optimizer, data; with ``selected=False``, to layers not selected."""
        layer = OUTSIDE if selected else NOT_SELECTED
        return self.rows.by_layer.get((layer, _number_of(phase)), (Cost(), 0))[0]

    def ops(self, phase: str = FORWARD) -> dict[int, list[Op]]:
        """The operators of one phase under each layer (by index in ``layers``), in the order of first call.

        Σ self over the ops of a layer is the layer's self: ``(between ops)`` is one of them where it has any.
        """
        wanted = _number_of(phase)
        columns = self.rows.columns
        chains = [[frame.name for frame in frames if frame.kind != "kernel"] for frames in self.rows.frames]
        is_kernel = [bool(frames) and frames[-1].kind == "kernel" for frames in self.rows.frames]
        found: dict[int, dict[str, Op]] = {}
        for at, layer in enumerate(columns["layer"]):
            if columns["phase"][at] != wanted:
                continue
            chain = chains[columns["frames"][at]] or [BETWEEN_OPS]
            cost = Cost(*(columns[name][at] for name in FIELDS))
            calls = 0 if is_kernel[columns["frames"][at]] or chain[-1] == BETWEEN_OPS else columns["calls"][at]
            ops = found.setdefault(layer, {})
            for name in dict.fromkeys(chain):
                op = ops.get(name, Op(name, 0, Cost(), Cost()))
                innermost = name == chain[-1]
                ops[name] = Op(
                    name,
                    op.calls + (calls if innermost else 0),
                    op.self + cost if innermost else op.self,
                    op.total + cost,
                )
        return {layer: list(ops.values()) for layer, ops in found.items()}

    def total_params(self) -> dict[tuple[str, ...], int | None]:
        """The parameters of each layer and all below it, by path; None where a lazy layer has not made them yet."""
        totals: dict[tuple[str, ...], int | None] = {layer.path: layer.params for layer in self.layers}
        for path in reversed(totals):  # those below come after those above
            if len(path) > 1:
                above, own = totals[path[:-1]], totals[path]
                totals[path[:-1]] = None if above is None or own is None else above + own
        return totals

    def phases(self) -> tuple[str, ...]:
        """The phases in which any work was recorded, and always forward."""
        seen = set(self.rows.columns["phase"])
        return tuple(phase for number, phase in enumerate(PHASES) if phase == FORWARD or number in seen)

    def report(self, name: str, **options: Any) -> str:
        """A report as text: ``run.report("tree", depth=2)``. Raises TorchprofError for an unknown name or option."""
        from torchprof.reports import render

        return render(name, self, options)

    def save(self, path: str | PathLike[str], *, strip: bool = False) -> None:
        """Write the run as JSON (see docs/run-file.md), gzipped where the name ends in ``.gz``.

        The file holds names of layers, ops and the machine, shapes and figures; no tensor data and no source.
        ``strip=True`` leaves the names of files and machines out. Raises OSError as ``open`` does.
        """
        from torchprof.run_file import write

        write(self, path, strip=strip)


def _number_of(phase: str) -> int:
    if phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    return PHASES.index(phase)


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
    """Sum events into rows, the durations of calls into samples, and find the peak of each device's memory.

    ``places`` is the list that the attribution fills while ``attributed`` is read, and ``counts`` (MACs, FLOPs and
    uncounted calls by the index of a place) may fill meanwhile, too. Self time: each event adds its time to its place
    and takes it from the place around it; without ``timed`` all times are 0, and there are no samples. The peak is
    the highest running total of allocated minus freed bytes, above what there was at the start.
    """
    cpu_ns: list[int] = []
    calls: list[int] = []
    other: dict[tuple[int, str], list[int]] = {}  # (place, device) → a value for each field, then calls
    durations: dict[tuple[int, str], list[tuple[int, int]]] = {}
    held: dict[str, int] = {}
    peaks: dict[str, int] = {}
    allocated = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}
    freed = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}
    device_ns = FIELDS.index("device_ns")
    memory, kernel, label = Kind.MEMORY, Kind.KERNEL, Kind.LABEL

    for event, place, around, counted, ns in attributed:
        kind = event[0]
        if kind is memory or kind is kernel:
            device = event.device
            values = other.setdefault((place.index, device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[device_ns] += ns
                values[-1] += counted
                continue
            if event.nbytes >= 0:
                values[allocated[device == "cpu"]] += event.nbytes
            else:
                values[freed[device == "cpu"]] -= event.nbytes
            now = held[device] = held.get(device, 0) + event.nbytes
            peaks[device] = max(peaks.get(device, 0), now)
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
    return rows, samples, peaks


def _rows(
    values: Mapping[tuple[int, str], Sequence[int]],
    places: Sequence[Place],
    layers: tuple[Layer, ...],
    rank: int,
    signatures: Sequence[Signature],
) -> Rows:
    chains: list[tuple[Frame, ...]] = [()]
    numbers: dict[tuple[int, Frame], int] = {}  # (the chain outside of a frame, the frame) → the chain with it
    chain_of = [0] * len(places)
    for place in places:  # a place comes after the one outside of it
        if place.outer is not None and place.frame is not None:
            step = (chain_of[place.outer.index], place.frame)
            number = numbers.get(step)
            if number is None:
                number = numbers[step] = len(chains)
                chains.append((*chains[step[0]], place.frame))
            chain_of[place.index] = number
    devices: dict[str, int] = {}
    used: dict[int, int] = {}  # signature → its number here
    phases = {phase: number for number, phase in enumerate(PHASES)}
    # Places that differ only in the signatures of the ops around them are one row.
    lines: dict[tuple[int, ...], Sequence[int]] = {}
    for (index, device), line in sorted(values.items()):
        place = places[index]
        signature = used.setdefault(place.signature, len(used) + 1) if place.signature else 0
        key = (
            place.layer,
            phases[place.phase],
            chain_of[index],
            signature,
            devices.setdefault(device, len(devices)),
            rank,
        )
        before = lines.get(key)
        lines[key] = line if before is None else [*map(sum, zip(before, line))]
    columns = dict(zip(Rows.COLUMNS, zip(*((*key, line[-1], *line[:-1]) for key, line in lines.items()))))
    arrays = {name: array("q", columns.get(name, ())) for name in Rows.COLUMNS}
    return Rows(layers, tuple(chains), tuple(devices), arrays, tuple(signatures[number] for number in used))
