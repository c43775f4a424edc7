"""``Run``: everything one profiled run knows, frozen, and read by every report. Knows only the standard library."""

from __future__ import annotations

import gzip
import json
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from heapq import nsmallest
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE, PHASES, Attributed, Frame, Kind, Place
from torchprof.cost import FIELDS, Cost
from torchprof.errors import TorchprofError, suggest

SCHEMA = 1
"""Version of the run file. It grows by one whenever a reader of the old file would misread the new one."""
_FORMAT = "torchprof-run"

OUTSIDE_NAME = "(outside)"
NOT_SELECTED_NAME = "(not selected)"


@dataclass(frozen=True)
class Layer:
    """What a layer is, not what it did.

    ``path``: root class name, then attribute names. ``kind``: class name. ``params``, ``trainable_params`` and
    ``param_bytes`` count the parameters that the layer itself holds (not its children), each at the first layer that
    holds it; None where a lazy layer has not made them yet. Shapes are those of the first forward call: one tuple for
    each tensor, with -1 for a size that is no number (nested tensors); ``()`` where it was not called.
    ``shared_with``: the other paths of the same module.
    """

    path: tuple[str, ...]
    kind: str
    params: int | None = 0
    trainable_params: int | None = 0
    param_bytes: int | None = 0
    input_shapes: tuple[tuple[int, ...], ...] = ()
    output_shapes: tuple[tuple[int, ...], ...] = ()
    training: bool = True
    shared_with: tuple[tuple[str, ...], ...] = ()

    @property
    def name(self) -> str:
        """The path as a dotted string."""
        return ".".join(self.path)


@dataclass(frozen=True)
class Meta:
    """How a run came about; one per rank.

    ``requested`` and ``measured`` name fields of ``Cost``: what was asked for and not measured is shown as unknown.
    ``device`` is the kind of device that was asked for (``cuda``, ``xpu``, ``mps``), None for the CPU alone. ``paths``
    are the selected layers, None for all. ``warnings`` are sentences for the user. ``machine`` and ``script`` are names
    that ``save(strip=True)`` leaves out.
    """

    model: tuple[str, ...]
    rank: int = 0
    device: str | None = None
    requested: tuple[str, ...] = ("cpu_ns",)
    measured: tuple[str, ...] = ("cpu_ns",)
    paths: tuple[tuple[str, ...], ...] | None = None
    wall_ns: int = 0
    warnings: tuple[str, ...] = ()
    versions: tuple[tuple[str, str], ...] = ()
    flags: tuple[tuple[str, bool], ...] = ()
    machine: str = ""
    script: str = ""


class Row(NamedTuple):
    """One line of the finest table there is: every other table is a group-by over rows.

    ``layer`` is None for work of no layer; ``selected`` is then False where the work belongs to layers that ``paths=``
    did not select. ``frames`` lead from the layer inward, ``()`` is the layer's own time between ops. ``cost`` is self.
    """

    layer: Layer | None
    selected: bool
    phase: str
    frames: tuple[Frame, ...]
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

    COLUMNS = ("layer", "phase", "frames", "device", "rank", "calls", *FIELDS)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if isinstance(index, slice):
            raise TypeError("rows have no slices: take list(run.rows)[a:b]")
        layer, phase, frames, device, rank, calls, *cost = (self.columns[name][index] for name in self.COLUMNS)
        return Row(
            self.layers[layer] if layer >= 0 else None,
            layer != NOT_SELECTED,
            PHASES[phase],
            self.frames[frames],
            self.devices[device],
            rank,
            calls,
            Cost(*cost),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))


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


@dataclass(frozen=True)
class Run:
    """One profiled run. Made by ``Profile`` or ``torchprof.load``; every report reads it and nothing else."""

    metas: tuple[Meta, ...]
    layers: tuple[Layer, ...]
    rows: Rows
    samples: Mapping[SampleKey, Spread]

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
        if phase is not None and phase not in PHASES:
            raise TorchprofError(f"Unknown phase {phase!r}. {suggest(str(phase), PHASES)}")
        if not 0 <= root < len(self.roots):
            raise TorchprofError(f"This run has {len(self.roots)} model(s): root must be below that, not {root}.")
        costs, calls = self._by_layer(phase)
        return self._trees(costs, calls)[root]

    def no_layer(self, phase: str, *, selected: bool = True) -> Cost:
        """What belongs to no layer: loss, optimizer, data; with ``selected=False``, to layers not selected."""
        return self._by_layer(phase)[0].get(OUTSIDE if selected else NOT_SELECTED, Cost())

    def ops(self, phase: str = FORWARD) -> dict[int, list[Op]]:
        """The operators of one phase under each layer (by index in ``layers``), in the order of first call.

        Σ self over the ops of a layer is the layer's self: ``(between ops)`` is one of them where it has any.
        """
        wanted = PHASES.index(phase)
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

    def phases(self) -> tuple[str, ...]:
        """The phases in which any work was recorded, and always forward."""
        seen = set(self.rows.columns["phase"])
        return tuple(phase for number, phase in enumerate(PHASES) if phase == FORWARD or number in seen)

    def report(self, name: str, **options: Any) -> str:
        """A report as text: ``run.report("tree", depth=2)``. Raises TorchprofError for an unknown name or option."""
        from torchprof.reports import render

        return render(name, self, **options)

    def save(self, path: str | PathLike[str], *, strip: bool = False) -> None:
        """Write the run as JSON (see docs/run-file.md), gzipped where the name ends in ``.gz``.

        The file holds names of layers, ops and the machine, shapes and figures; no tensor data and no source.
        ``strip=True`` leaves the names of files and machines out. Raises OSError as ``open`` does.
        """
        metas = [replace(meta, machine="", script="") for meta in self.metas] if strip else self.metas
        document = {
            "format": _FORMAT,
            "schema": SCHEMA,
            "holds": "layer paths, operator and kernel names, shapes, costs; no tensor data"
            + ("" if strip else "; the names of the machine and the script"),
            "metas": [asdict(meta) for meta in metas],
            "layers": [asdict(layer) for layer in self.layers],
            "frames": self.rows.frames,
            "devices": self.rows.devices,
            "rows": {name: column.tolist() for name, column in self.rows.columns.items()},
            "samples": [{**key._asdict(), **asdict(spread)} for key, spread in self.samples.items()],
        }
        text = json.dumps(document, separators=(",", ":"))
        path = Path(path)
        if path.suffix == ".gz":
            path.write_bytes(gzip.compress(text.encode(), mtime=0))
        else:
            path.write_text(text, encoding="utf-8")

    def _by_layer(self, phase: str | None) -> tuple[dict[int, Cost], dict[int, int]]:
        """Self cost and calls of each layer index."""
        wanted = PHASES.index(phase) if phase is not None else None
        called = PHASES.index(phase or FORWARD)
        columns = self.rows.columns
        own_time = {number for number, frames in enumerate(self.rows.frames) if not frames}
        sums: dict[int, list[int]] = {}
        calls: dict[int, int] = {}
        values = list(zip(*(columns[name] for name in FIELDS)))
        for at, layer in enumerate(columns["layer"]):
            row_phase = columns["phase"][at]
            if row_phase == called and columns["frames"][at] in own_time:
                calls[layer] = calls.get(layer, 0) + columns["calls"][at]
            if wanted is None or row_phase == wanted:
                total = sums.setdefault(layer, [0] * len(FIELDS))
                for number, value in enumerate(values[at]):
                    total[number] += value
        return {layer: Cost(*total) for layer, total in sums.items()}, calls

    def _trees(self, costs: Mapping[int, Cost], calls: Mapping[int, int]) -> list[Node]:
        nodes: dict[tuple[str, ...], Node] = {}
        roots = []
        for index, layer in enumerate(self.layers):
            own = costs.get(index, Cost())
            node = nodes[layer.path] = Node(layer, calls.get(index, 0), own, own, [])
            if len(layer.path) == 1:
                roots.append(node)
            else:
                nodes[layer.path[:-1]].children.append(node)
        for layer in reversed(self.layers):
            if len(layer.path) > 1:
                parent = nodes[layer.path[:-1]]
                parent.total = parent.total + nodes[layer.path].total
        return roots


def fold(
    attributed: Iterable[Attributed], places: Sequence[Place], layers: tuple[Layer, ...], rank: int = 0
) -> tuple[Rows, dict[SampleKey, Spread]]:
    """Sum events into rows, and the durations of calls into samples.

    ``places`` is the list that the attribution fills while ``attributed`` is read. Self time: each event adds its time
    to its place and takes it from the place around it.
    """
    cpu_ns: list[int] = []
    calls: list[int] = []
    other: dict[tuple[int, str], list[int]] = {}  # (place, device) → a value for each field, then calls
    durations: dict[tuple[int, str], list[tuple[int, int]]] = {}
    allocated = {True: FIELDS.index("cpu_allocated"), False: FIELDS.index("device_allocated")}
    freed = {True: FIELDS.index("cpu_freed"), False: FIELDS.index("device_freed")}
    device_ns = FIELDS.index("device_ns")
    memory, kernel, label = Kind.MEMORY, Kind.KERNEL, Kind.LABEL

    for event, place, around, counted, ns in attributed:
        kind = event[0]
        if kind is memory or kind is kernel:
            values = other.setdefault((place.index, event.device), [0] * (len(FIELDS) + 1))
            if kind is kernel:
                values[device_ns] += ns
                values[-1] += counted
            elif event.nbytes >= 0:
                values[allocated[event.device == "cpu"]] += event.nbytes
            else:
                values[freed[event.device == "cpu"]] -= event.nbytes
            continue
        index = place.index
        if index >= len(cpu_ns):
            missing = len(places) - len(cpu_ns)
            cpu_ns.extend([0] * missing)
            calls.extend([0] * missing)
        cpu_ns[index] += ns
        calls[index] += counted
        if around is not None:
            cpu_ns[around.index] -= ns
        if kind is label and counted and place.layer >= 0:
            durations.setdefault((place.layer, place.phase), []).append((event.start_ns, ns))

    for index in range(len(cpu_ns)):
        if cpu_ns[index] or calls[index]:
            values = other.setdefault((index, "cpu"), [0] * (len(FIELDS) + 1))
            values[FIELDS.index("cpu_ns")] = cpu_ns[index]
            values[-1] = calls[index]
    rows = _rows(other, places, layers, rank)
    samples = {
        SampleKey(layer, phase, rank, "cpu", "cpu_ns"): Spread.of(values)
        for (layer, phase), values in sorted(durations.items())
    }
    return rows, samples


def _rows(
    values: Mapping[tuple[int, str], Sequence[int]], places: Sequence[Place], layers: tuple[Layer, ...], rank: int
) -> Rows:
    columns = {name: array("q") for name in Rows.COLUMNS}
    frames: dict[tuple[Frame, ...], int] = {}
    devices: dict[str, int] = {}
    for (index, device), (*cost, calls) in sorted(values.items()):
        place = places[index]
        line = (
            place.layer,
            PHASES.index(place.phase),
            frames.setdefault(place.frames, len(frames)),
            devices.setdefault(device, len(devices)),
            rank,
            calls,
            *cost,
        )
        for name, value in zip(Rows.COLUMNS, line):
            columns[name].append(value)
    return Rows(layers, tuple(frames), tuple(devices), columns)


def load(path: str | PathLike[str]) -> Run:
    """Read a run that ``Run.save`` wrote. Needs no torch.

    Raises OSError where the file cannot be read, TorchprofError where it is no run file, is damaged, or was written by
    a newer torchprof.
    """
    path = Path(path)
    data = path.read_bytes()
    try:
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    except (ValueError, EOFError, OSError) as error:
        raise TorchprofError(f"{path} is not a saved run: it does not read as JSON ({error}).") from error
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise TorchprofError(f"{path} is JSON, but no saved run: write one with `prof.run.save(path)`.")
    schema = document.get("schema")
    if not isinstance(schema, int) or schema > SCHEMA:
        raise TorchprofError(
            f"{path} has schema {schema}; this torchprof reads up to {SCHEMA}. Read it with a newer torchprof."
        )
    try:
        return _run(document)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise TorchprofError(f"{path} is a damaged run file: {type(error).__name__} {error}.") from error


def _run(document: dict[str, Any]) -> Run:
    layers = tuple(Layer(**_tuples(layer)) for layer in document["layers"])
    frames = tuple(tuple(Frame(*frame) for frame in chain) for chain in document["frames"])
    columns = {name: array("q", document["rows"][name]) for name in Rows.COLUMNS}
    if len({len(column) for column in columns.values()}) != 1:
        raise ValueError("the columns of its rows differ in length")
    rows = Rows(layers, frames, tuple(document["devices"]), columns)
    for _ in rows:  # every number must point somewhere
        pass
    samples = {}
    for sample in document["samples"]:
        key = SampleKey(**{name: sample.pop(name) for name in SampleKey._fields})
        samples[key] = Spread(**_tuples(sample))
    return Run(tuple(Meta(**_tuples(meta)) for meta in document["metas"]), layers, rows, samples)


def _tuples(document: dict[str, Any]) -> dict[str, Any]:
    """JSON knows only lists: give back the tuples they were."""

    def deep(value: Any) -> Any:
        return tuple(deep(item) for item in value) if isinstance(value, list) else value

    return {name: deep(value) for name, value in document.items()}
