"""The rows of a run: columns of integers. Layers, frames and other values are in tables; rows have their numbers."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import compress, count, groupby, product
from operator import add, eq
from typing import Any, NamedTuple

from torchprof.run.collectives import shows_collective
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.measures import FIELDS, Cost
from torchprof.run.part import Scale, demand, demand_layer, read_as, read_columns, read_list
from torchprof.run.words import (
    FORWARD,
    MOST_NESTED,
    NOT_SELECTED,
    PHASES,
    Frame,
    FrameKind,
    Signature,
    SourceLine,
    is_left_over,
    phase_of,
)


class Around(NamedTuple):
    """An op or a label around a layer's range: the ``frames`` down to it, in the layer (by its index, negative for
    none) and the phase that it runs in. Most layers have none: a layer calls them directly, not inside an op."""

    layer: int
    phase: str
    frames: tuple[Frame, ...]


class Row(NamedTuple):
    """One line of the finest table: every other table is a group-by over rows.

    - ``phase``: "forward", "backward", "recompute", or "other": work outside all layers that is not backward.
      ``device``: "cpu", "cuda:0", …; ``rank``: the rank that ran it.
    - ``layer``: None for work of no layer. Then ``selected`` is False if ``paths=`` did not select its layers.
    - ``shared_by``: the layers, if the work served several at once; ``layer`` is their nearest common ancestor then.
    - ``within``: the ops and labels around the layer's range, outer to inner.
    - ``frames``: from the layer inward; ``()`` is the layer's own time between ops.
    - ``cost``: self. ``calls``: of a row with a last frame of kind python, the number of samples in that source line.
    """

    layer: Layer | None
    selected: bool
    phase: str
    within: tuple[Around, ...]
    frames: tuple[Frame, ...]
    device: str
    rank: int
    calls: int
    cost: Cost
    shared_by: tuple[Layer, ...] = ()

    @property
    def signature(self) -> Signature | None:
        """The inputs of the innermost op; None if they were not recorded."""
        return self.frames[-1].signature if self.frames else None


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """Rows as columns of integers; indexing makes a ``Row`` of one line. ``columns`` has an array for each of
    ``Rows.COLUMNS``. Their numbers are indices in the tables ``layers`` (negative for no layer), ``frames``,
    ``devices``, ``within`` and ``shared``; phases are indices in ``PHASES``."""

    layers: tuple[Layer, ...] = field(repr=False)
    frames: tuple[tuple[Frame, ...], ...] = field(repr=False)
    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    within: tuple[tuple[Around, ...], ...] = field(repr=False, default=((),))
    shared: tuple[tuple[int, ...], ...] = field(repr=False, default=((),))

    KEYS = ("layer", "phase", "shared", "within", "frames", "device", "rank")
    VALUES = ("calls", *FIELDS)
    COLUMNS = (*KEYS, *VALUES)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if isinstance(index, slice):
            raise TypeError("rows cannot be sliced: use list(run.rows)[a:b]")
        layer, phase, shared, within, frames, device, rank, calls, *cost = (
            self.columns[name][index] for name in self.COLUMNS
        )
        return Row(
            layer=self.layers[layer] if layer >= 0 else None,
            selected=layer != NOT_SELECTED,
            phase=phase_of(layer, PHASES[phase]),
            within=self.within[within],
            frames=self.frames[frames],
            device=self.devices[device],
            rank=rank,
            calls=calls,
            cost=Cost(*cost),
            shared_by=tuple(self.layers[number] for number in self.shared[shared]),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    def renumbered(self, to: Sequence[int], layers: tuple[Layer, ...]) -> Rows:
        """The same with other layers. ``to``: see ``RunPart.renumbered``."""
        return replace(
            self,
            layers=layers,
            columns={**self.columns, "layer": array("q", map(to.__getitem__, self.columns["layer"]))},
            within=tuple(tuple(around._replace(layer=to[around.layer]) for around in chain) for chain in self.within),
            shared=tuple(tuple(map(to.__getitem__, by)) for by in self.shared),
        )

    def of_ranks(self, ranks: Collection[int]) -> Iterator[Rows]:
        """The rows of each of these ranks, with the entries of the tables that they use."""
        places = lists_by_key((rank, (start, stop)) for rank, start, stop in stretches_of(self.columns["rank"]))
        for rank in ranks:
            columns = {name: array("q") for name in self.COLUMNS}
            for (name, column), (start, stop) in product(columns.items(), places[rank]):
                column.extend(self.columns[name][start:stop])
            yield compacted(self.layers, columns, self.tables)

    @property
    def tables(self) -> dict[str, tuple[Any, ...]]:
        """The tables, by the columns that have their numbers."""
        return {"shared": self.shared, "within": self.within, "frames": self.frames, "device": self.devices}

    def added(self, cycle: Rows) -> Rows:
        """The sum of the rows of two cycles, on the same layers: rows with equal keys become one row."""
        has_same_keys = all(self.columns[name] == cycle.columns[name] for name in self.KEYS)
        if has_same_keys and self.tables == cycle.tables:  # as in most loops: each step does the same
            columns = dict(self.columns)
            for name in self.VALUES:
                if any(cycle.columns[name]):
                    columns[name] = array("q", map(add, columns[name], cycle.columns[name]))
            return replace(self, columns=columns)
        lines: dict[tuple[int, ...], Sequence[int]] = {}
        chains = Chains()
        within: dict[tuple[Around, ...], int] = {}
        shared: dict[tuple[int, ...], int] = {}
        devices: dict[str, int] = {}
        for rows in (self, cycle):
            frames_here = [*map(chains.number_of, rows.frames)]
            within_here = [
                within.setdefault(tuple(map(chains.around, surroundings)), len(within)) for surroundings in rows.within
            ]
            shared_here = [shared.setdefault(by, len(shared)) for by in rows.shared]
            devices_here = [devices.setdefault(device, len(devices)) for device in rows.devices]
            columns_here = (rows.columns[name] for name in self.COLUMNS)
            for layer, phase, by, around, chain, device, rank, *values in zip(*columns_here):
                tables = shared_here[by], within_here[around], frames_here[chain], devices_here[device]
                key = (layer, phase, *tables, rank)
                line = lines.get(key)
                lines[key] = values if line is None else [*map(add, line, values)]
        return rows_of_lines(self.layers, lines, chains.all, devices, within, shared)

    def scaled(self, scale: Scale) -> Rows:
        """The rows of all passes, as estimated from those of some."""
        columns = dict(self.columns)
        for name in FIELDS:
            is_time = name in ("cpu_ns", "collective_ns")
            columns[name] = (scale.times if is_time else scale.counts)(columns[name])
        # The calls of a layer, or an operator, may be in many rows, each of another range of the user around them.
        ends = [chain[-1:] for chain in self.frames]
        so_far: Counter[tuple[Any, ...]] = Counter()
        calls = array("q")
        rows = zip(*(self.columns[name] for name in ("layer", "phase", "frames", "device", "calls")))
        for layer, phase, chain, device, of_row in rows:
            key = layer, phase, ends[chain], device
            before, so_far[key] = scale.number(so_far[key]), so_far[key] + of_row
            calls.append(scale.number(so_far[key]) - before)
        return replace(self, columns={**columns, "calls": calls})

    def to_json(self) -> Iterator[tuple[str, Any]]:
        """The keys of the file for the rows and their tables, and the values. Frames have the number of their
        signature, from 1 on; 0 for no signature."""
        signatures: dict[Signature | None, int] = {None: 0}

        def chain(frames: Sequence[Frame]) -> list[tuple[str, str, int]]:
            return [(kind, name, signatures.setdefault(signature, len(signatures))) for kind, name, signature in frames]

        yield "frames", map(chain, self.frames)
        yield "within", ([[*around[:2], chain(around.frames)] for around in step] for step in self.within)
        yield "shared", self.shared
        yield "signatures", [*signatures][1:]
        yield "devices", self.devices
        yield "rows", self.columns

    @classmethod
    def from_json(cls, document: Mapping[str, Any], layers: Layers) -> Rows:
        """The rows of a file. Raises as described in ``run.part``."""
        signatures = [None, *read_as(tuple[Signature, ...], document["signatures"])]

        def chain(stored: Any) -> tuple[Frame, ...]:
            frames = []
            demand(len(stored) <= MOST_NESTED + 1, "frames that are nested too deep")  # a kernel is no range
            for kind, name, signature in map(read_list, read_list(stored)):
                demand(0 <= read_as(int, signature) < len(signatures), f"the signature of {name!r:.80}")
                text = read_as(str, name)
                text = SourceLine.of_file(text) if kind == FrameKind.PYTHON else text
                frames.append(Frame(FrameKind(kind), text, signatures[signature]))
            return tuple(frames)

        frames = tuple(map(chain, document["frames"]))
        within = tuple(
            tuple(Around(read_as(int, layer), read_as(str, phase), chain(frames)) for layer, phase, frames in step)
            for step in document["within"]
        )
        shared = read_as(tuple[tuple[int, ...], ...], document["shared"])
        devices = read_as(tuple[str, ...], document["devices"])
        tables = {"shared": shared, "within": within, "frames": frames, "device": devices}
        limits = {"calls": (0, 2**63), **{name: (0, len(table)) for name, table in tables.items()}}
        columns = read_columns(document["rows"], cls.COLUMNS, len(layers), limits, "rows")
        demand(all(0 <= layer < len(layers) for by in shared for layer in by), "a layer in 'shared'")
        for step in within:
            demand(len(step) <= MOST_NESTED, "layers that are nested too deep")
            for around in step:
                demand_layer(around, len(layers))
        return cls(layers, frames, devices, columns, within, shared)

    def summed(self, by: str | tuple[str, ...], of: str | tuple[str, ...], **where: Any) -> dict[Any, Any]:
        """The sums of one of ``VALUES``, or a tuple of several, over rows with the same numbers in one or several of
        ``KEYS``: by these numbers, in the order of first use. For the sums of one value, rows of 0 are left out.

        ``where``: by column, the value that rows have there, a predicate of it, or None for any: ``phase="forward"``,
        ``frames=is_left_over``. A predicate is called once for each value, not for each row. Work of no layer has the
        phase "forward" here, unless it is backward.
        """
        if isinstance(of, str) and of not in self.nonzero:
            return {}
        keys = self.columns[by] if isinstance(by, str) else zip(*(self.columns[name] for name in by))
        return self.summed_by(keys, of, **where)

    def summed_by(self, keys: Iterable[Hashable], of: str | tuple[str, ...], **where: Any) -> dict[Any, Any]:
        """``summed`` by any keys, of which there is one for each row."""
        chosen = self._chosen(where)
        if isinstance(of, str):
            values = self.columns[of]
            chosen = [*values] if chosen is None else [value and is_chosen for value, is_chosen in zip(values, chosen)]

        def column(name: str) -> Iterable[int]:
            return self.columns[name] if chosen is None else compress(self.columns[name], chosen)

        keys = [*(keys if chosen is None else compress(keys, chosen))]
        numbers = dict(zip(dict.fromkeys(keys), count()))
        groups = [*map(numbers.__getitem__, keys)]
        sums = []
        for name in (of,) if isinstance(of, str) else of:
            of_group = [0] * len(numbers)
            if name in self.nonzero:
                for group, value in zip(groups, column(name)):
                    of_group[group] += value
            sums.append(of_group)
        return dict(zip(numbers, sums[0] if isinstance(of, str) else zip(*sums)))

    def total(self, of: str, **where: Any) -> int:
        """The sum of one of ``VALUES`` over all rows, or over some of them, as for ``summed``."""
        chosen = self._chosen(where)
        return sum(self.columns[of] if chosen is None else compress(self.columns[of], chosen))

    def only(self, **where: Any) -> Rows:
        """The rows of which ``where`` holds, as for ``summed``."""
        if (chosen := self._chosen(where)) is None:
            return self
        columns = {name: array("q", compress(column, chosen)) for name, column in self.columns.items()}
        return replace(self, columns=columns)

    def without_source(self) -> Rows:
        """Without sampled lines of Python, and without the source lines of operators, which then are the same call."""

        def bare(frames: Iterable[Frame]) -> tuple[Frame, ...]:
            return tuple(
                frame if frame.signature is None else frame._replace(signature=frame.signature._replace(stack=()))
                for frame in frames
            )

        surroundings = (around.frames for step in self.within for around in step)
        every = {frame for chain in (*self.frames, *surroundings) for frame in chain}
        if not any(frame.kind == FrameKind.PYTHON or (frame.signature and frame.signature.stack) for frame in every):
            return self
        rows = self.only(frames=lambda frames: not (frames and frames[-1].kind == FrameKind.PYTHON))
        within = (tuple(around._replace(frames=bare(around.frames)) for around in step) for step in rows.within)
        tables = {**rows.tables, "frames": tuple(map(bare, rows.frames)), "within": tuple(within)}
        nothing = rows_of_lines(self.layers, {})
        return compacted(self.layers, rows.columns, tables).added(nothing)

    @property
    def of_recording(self) -> Rows:
        """Without device work that was launched before the recording began."""
        return self if self._of_recording is None else self._of_recording

    @cached_property
    def _of_recording(self) -> Rows | None:
        """None if that is all: with a reference to itself, it would live until a garbage collection."""
        rows = self.only(frames=lambda frames: not is_left_over(frames))
        return None if rows is self else rows

    def _chosen(self, where: Mapping[str, Any]) -> list[Any] | None:
        """For each row a value that is true if ``where`` holds of it; None if it holds of all."""
        chosen: list[Any] | None = None
        for name, wanted in where.items():
            if wanted is None:
                continue
            holds = wanted if callable(wanted) else partial(eq, wanted)
            column, table = self.columns[name], {"phase": PHASES, **self.tables}.get(name)
            if table is None:  # the numbers of the column are the values: layers, ranks, calls
                holds_of = {number: holds(number) for number in set(column)}
            else:
                holds_of = dict(enumerate(map(holds, table)))
            if not all(holds_of.values()):
                in_rows = map(holds_of.__getitem__, column)
                chosen = [*in_rows] if chosen is None else [before and here for before, here in zip(chosen, in_rows)]
        return chosen

    @cached_property
    def nonzero(self) -> frozenset[str]:
        """The columns with any value but 0."""
        return frozenset(name for name, column in self.columns.items() if any(column))

    def forward_calls(self, layer: int) -> int:
        """How often the forward of a layer was called."""
        return self.by_layer.get((layer, PHASES.index(FORWARD)), (None, 0))[1]

    @cached_property
    def by_layer(self) -> dict[tuple[int, int], tuple[Cost, int]]:
        """Self cost and calls of each (layer index, phase number). Without work launched before the recording."""
        place = ("layer", "phase")
        calls = self.summed(place, "calls", frames=())
        costs = self.of_recording.summed(place, FIELDS)
        return {key: (Cost(*cost), calls.get(key, 0)) for key, cost in costs.items()}


def rows_of_lines(
    layers: tuple[Layer, ...],
    lines: Mapping[tuple[int, ...], Sequence[int]],
    frames: Iterable[tuple[Frame, ...]] = ((),),
    devices: Iterable[str] = (),
    within: Iterable[tuple[Around, ...]] = ((),),
    shared: Iterable[tuple[int, ...]] = ((),),
) -> Rows:
    """Rows from ``lines``. A key has the values of ``Rows.COLUMNS`` up to the rank, a line those from the calls on."""
    values = dict(zip(Rows.COLUMNS, zip(*((*key, *line) for key, line in lines.items()))))  # {} without lines
    columns = {name: array("q", values.get(name, ())) for name in Rows.COLUMNS}
    return Rows(layers, tuple(frames), tuple(devices), columns, tuple(within), tuple(shared))


def compacted(
    layers: tuple[Layer, ...], columns: Mapping[str, array[int]], tables: Mapping[str, Sequence[Any]]
) -> Rows:
    """Rows with these columns, and the entries of ``tables`` that they use, in the order of first use. Of the devices
    ("cpu", "cuda:0", "cuda:1") and a column (2, 2, 0), ("cuda:1", "cpu") and (0, 0, 1) remain."""
    columns = dict(columns)
    used: dict[str, tuple[Any, ...]] = {}
    for name, table in tables.items():
        kept: dict[Any, int] = {} if name == "device" else {(): 0}
        numbers = {number: kept.setdefault(table[number], len(kept)) for number in dict.fromkeys(columns[name])}
        if any(before != now for before, now in numbers.items()):
            columns[name] = array("q", map(numbers.__getitem__, columns[name]))
        used[name] = tuple(kept)
    return Rows(layers, used["frames"], used["device"], columns, used["within"], used["shared"])


def stretches_of(ranks: Iterable[int]) -> list[tuple[int, int, int]]:
    """The stretches of consecutive rows of the same rank, each (rank, first row, row after the last): of the ranks of
    rows 3, 3, 5 these are (3, 0, 2) and (5, 2, 3)."""
    stretches = []
    start = 0
    for rank, same in groupby(ranks):
        stop = start + sum(1 for _ in same)
        stretches.append((rank, start, stop))
        start = stop
    return stretches


# Chains of frames, with a limit on their number

SIGNATURES = 64
"""How many different inputs of an operator in one place have rows of their own."""


class Chains:
    """Chains of frames, numbered; ``()`` has the number 0. If an operator was called on more than ``SIGNATURES``
    different inputs in one place, all further inputs share one chain, with unknown shapes."""

    def __init__(self) -> None:
        self.all: list[tuple[Frame, ...]] = [()]
        self._numbers: dict[tuple[int, Frame], int] = {}  # of the chain that is a numbered chain and one more frame
        self._signatures: Counter[tuple[int, str, str]] = Counter()  # by the chain outside, and the operator

    def inside(self, outer: int, frame: Frame) -> int:
        """The number of the chain that is chain ``outer`` plus this frame."""
        number = self._numbers.get((outer, frame))
        if number is not None:
            return number
        without_shapes = _without_shapes(frame)
        if without_shapes != frame:
            place = outer, frame.kind, frame.name
            if self._signatures[place] >= SIGNATURES:
                number = self._numbers[outer, frame] = self.inside(outer, without_shapes)
                return number
            self._signatures[place] += 1
        number = self._numbers[outer, frame] = len(self.all)
        self.all.append((*self.all[outer], frame))
        return number

    def number_of(self, chain: Iterable[Frame]) -> int:
        """The number of a chain."""
        number = 0
        for frame in chain:
            number = self.inside(number, frame)
        return number

    def around(self, around: Around) -> Around:
        """The same, with unknown shapes if there are too many different inputs."""
        return around._replace(frames=self.all[self.number_of(around.frames)])


def _without_shapes(frame: Frame) -> Frame:
    """The same frame with unknown shapes and scalars, but those of a collective, which describe it."""
    if (signature := frame.signature) is None:
        return frame
    shapes = tuple(() if shape == () else None for shape in signature.shapes)
    scalars = signature.scalars if shows_collective(frame) else (None,) * len(signature.scalars)
    return frame._replace(signature=signature._replace(shapes=shapes, scalars=scalars))
