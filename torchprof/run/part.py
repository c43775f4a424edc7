"""The parts of a run: how each is split by rank, renumbered, added up over cycles, merged over ranks, written and read.

``RUN_PARTS`` in ``torchprof.run.run`` lists them. Metadata, layers and rows are not among them: they depend on each
other.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from operator import attrgetter
from typing import Any, Protocol, TypeVar

from torchprof.run.checked_json import demand, fields_of, read_as

_Value = TypeVar("_Value")


class RunPart(Protocol[_Value]):
    """A part of a run. Its value is what the field of ``Run`` has; it is never changed."""

    def of_ranks(self, value: _Value, ranks: Collection[int]) -> dict[int, _Value]:
        """The value of each of these ranks alone."""

    def renumbered(self, value: _Value, to: Sequence[int]) -> _Value:
        """The same with other indices of layers. ``to``: by index; negative ones keep theirs."""

    def added(self, before: _Value, cycle: _Value) -> _Value:
        """The value of the earlier cycles of a rank and one more."""
        return cycle

    def merge(self, so_far: Any, value: _Value) -> Any:
        """The values so far and that of more ranks. ``so_far`` is None at first; it may be changed."""

    def merged(self, so_far: Any) -> _Value:
        """The value of all ranks. It does not depend on their order."""
        return so_far  # type: ignore[no-any-return]

    def to_json(self, value: _Value) -> Any:
        """What the file has of it. A list that may be long is an iterator."""

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> _Value:
        """Read what ``to_json`` wrote, of a run of so many layers and these ranks. Raises as in ``checked_json``."""


class PerRank(RunPart[tuple[Any, ...]]):
    """A part that is a tuple of objects of one class, in the order of their ``rank``. Those of the last cycle count."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def of_ranks(self, value: tuple[Any, ...], ranks: Collection[int]) -> dict[int, tuple[Any, ...]]:
        items: dict[int, list[Any]] = {rank: [] for rank in ranks}
        for item in value:
            if item.rank in items:
                items[item.rank].append(item)
        return {rank: tuple(of_rank) for rank, of_rank in items.items()}

    def renumbered(self, value: tuple[Any, ...], to: Sequence[int]) -> tuple[Any, ...]:
        return tuple(item.renumbered(to) for item in value)

    def merge(self, so_far: Any, value: tuple[Any, ...]) -> Any:
        return [*(so_far or ()), *value]

    def merged(self, so_far: Any) -> tuple[Any, ...]:
        return tuple(sorted(so_far, key=attrgetter("rank")))

    def to_json(self, value: tuple[Any, ...]) -> Any:
        return map(fields_of, value)

    def from_json(self, stored: Any, layers: int, ranks: Set[int]) -> tuple[Any, ...]:
        items: tuple[Any, ...] = read_as(tuple[self._kind, ...], stored)  # type: ignore[name-defined]
        for item in items:
            demand(item.rank in ranks, f"no metadata of rank {item.rank}")
            item.check(layers)
        return items


class PerDevice(PerRank):
    """The same, with one object for each device of a rank. Cycles of a device add up with ``+``."""

    def added(self, before: tuple[Any, ...], cycle: tuple[Any, ...]) -> tuple[Any, ...]:
        sums = {(item.rank, item.device): item for item in before}
        for item in cycle:
            known = sums.get((item.rank, item.device))
            sums[item.rank, item.device] = item if known is None else known + item
        return tuple(sums[key] for key in sorted(sums))
