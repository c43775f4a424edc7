"""The rows of a run: columns of integers, with layers, frames and signatures interned."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from torchprof.run.collectives import tells_collective
from torchprof.run.cost import FIELDS, Cost
from torchprof.run.layers import Layer
from torchprof.run.words import NOT_SELECTED, PHASES, Frame, Signature, is_left_over


def tidy(layers: tuple[Layer, ...], columns: Mapping[str, array[int]], tables: Mapping[str, Sequence[Any]]) -> Rows:
    """Rows that refer to what is in these tables, with what they refer to alone, in the order of its first use."""
    columns = dict(columns)
    used: dict[str, tuple[Any, ...]] = {}
    for name, table in tables.items():
        found: dict[Any, int] = {} if name == "device" else {(): 0}
        numbers = {number: found.setdefault(table[number], len(found)) for number in dict.fromkeys(columns[name])}
        if any(before != now for before, now in numbers.items()):
            columns[name] = array("q", map(numbers.__getitem__, columns[name]))
        used[name] = tuple(found)
    return Rows(layers, used["frames"], used["device"], columns, used["within"], used["shared"])


SIGNATURES = 64
"""The most different inputs of an operator in one place that have rows of their own."""


class Chains:
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
    """The same frame, called on inputs of the same types and of unknown shapes. Of a collective all that
    describes it stays."""
    signature = frame.signature
    if signature is None:
        return frame
    shapes = tuple(() if shape == () else None for shape in signature.shapes)
    scalars = signature.scalars if tells_collective(frame) else (None,) * len(signature.scalars)
    return frame._replace(signature=signature._replace(shapes=shapes, scalars=scalars))


def rows_of_lines(
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


class Around(NamedTuple):
    """An op or a label that a layer's range is inside of: the ``frames`` down to it, in the layer (by its index,
    negative for none) and the phase it runs in. Nearly all layers are called by a layer itself, not by an op of it."""

    layer: int
    phase: str
    frames: tuple[Frame, ...]


class Row(NamedTuple):
    """One line of the finest table there is: every other table is a group-by over rows.

    ``layer`` is None for work of no layer; ``selected`` is then False where the work belongs to layers that ``paths=``
    did not select. Work that served several layers at once names them in ``shared_by``, and ``layer`` is their nearest
    common ancestor. ``within`` are the ops and labels that the layer's range is inside of, outer to inner. ``frames``
    lead from the layer inward, ``()`` is the layer's own time between ops. ``cost`` is self. The calls of a row whose
    last frame is of kind python are how often Python was seen there.
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
        """What the innermost op was called on, None where that was not recorded."""
        return self.frames[-1].signature if self.frames else None


NO_COST = Cost()


@dataclass(frozen=True)
class Rows(Sequence[Row]):
    """The rows as columns of integers; a ``Row`` is a view of one line."""

    layers: tuple[Layer, ...] = field(repr=False)
    frames: tuple[tuple[Frame, ...], ...] = field(repr=False)
    devices: tuple[str, ...]
    columns: Mapping[str, array[int]] = field(repr=False)
    within: tuple[tuple[Around, ...], ...] = field(repr=False, default=((),))
    shared: tuple[tuple[int, ...], ...] = field(repr=False, default=((),))

    COLUMNS = ("layer", "phase", "shared", "within", "frames", "device", "rank", "calls", *FIELDS)

    def __len__(self) -> int:
        return len(self.columns["layer"])

    def __getitem__(self, index: int) -> Row:  # type: ignore[override]
        if isinstance(index, slice):
            raise TypeError("rows have no slices: take list(run.rows)[a:b]")
        layer, phase, shared, within, frames, device, rank, calls, *cost = (
            self.columns[name][index] for name in self.COLUMNS
        )
        return Row(
            self.layers[layer] if layer >= 0 else None,
            layer != NOT_SELECTED,
            PHASES[phase],
            self.within[within],
            self.frames[frames],
            self.devices[device],
            rank,
            calls,
            Cost(*cost),
            tuple(self.layers[number] for number in self.shared[shared]),
        )

    def __iter__(self) -> Iterator[Row]:
        return (self[index] for index in range(len(self)))

    @cached_property
    def by_layer(self) -> dict[tuple[int, int], tuple[Cost, int]]:
        """Self cost and calls of each (layer index, phase number), in one pass over the columns.

        What was launched before the recording is in none of them: it is no work of what was recorded.
        """
        own_time = [not frames for frames in self.frames]
        left_over = [*map(is_left_over, self.frames)]
        keys: list[tuple[int, int] | None] = list(zip(self.columns["layer"], self.columns["phase"]))
        if any(left_over):
            keys = [None if left_over[chain] else key for key, chain in zip(keys, self.columns["frames"])]
        calls = dict.fromkeys(keys, 0)
        for key, frames, count in zip(keys, self.columns["frames"], self.columns["calls"]):
            if own_time[frames]:
                calls[key] += count
        sums = {key: [0] * len(FIELDS) for key in calls}
        for number, name in enumerate(FIELDS):
            if any(self.columns[name]):
                for key, value in zip(keys, self.columns[name]):
                    sums[key][number] += value
        return {key: (Cost(*total), calls[key]) for key, total in sums.items() if key is not None}
