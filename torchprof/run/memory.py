"""The memory of a run: the peak of each device, and what was live at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchprof.run.checked_json import demand, demand_layer


class Held(NamedTuple):
    """Memory that was live at a peak: ``nbytes`` in ``blocks``, allocated for a layer (by its index, negative for none)
    in a phase. ``kind`` is one of ``KINDS``, or "unknown" if torch recorded no addresses. The bytes of "unknown" are
    negative if memory from before the recording had been freed by then."""

    layer: int
    phase: str
    kind: str
    nbytes: int
    blocks: int


KINDS = ("parameters", "gradients", "activations", "optimizer state", "inputs", "temporaries")
"""What memory is used for. Activations are made in forward and still live when the call of the model has ended."""


@dataclass(frozen=True)
class Memory:
    """The memory of one device of one rank.

    - ``peak_bytes``: the peak above the start of the recording; ``peak_ns``: when it was, in ns after the start.
    - ``held``: what was live at the peak, the largest first.
    - ``before``: (kind, bytes) of what the model had on this device when the recording began.
    - ``allocator``: (name, bytes at the start, bytes at the end) of each counter of torch's allocator of the device.
    """

    device: str
    rank: int = 0
    peak_bytes: int = 0
    peak_ns: int = 0
    held: tuple[Held, ...] = ()
    before: tuple[tuple[str, int], ...] | None = None
    allocator: tuple[tuple[str, int, int], ...] = ()

    def __add__(self, cycle: Memory) -> Memory:
        """The higher peak of two cycles of a device, with what was live at it."""
        return cycle if cycle.peak_bytes > self.peak_bytes else self

    def renumbered(self, to: Sequence[int]) -> Memory:
        return replace(self, held=tuple(storage._replace(layer=to[storage.layer]) for storage in self.held))

    def check(self, layers: int) -> None:
        for storage in self.held:
            demand_layer(storage, layers)
            demand(storage.kind in (*KINDS, "unknown"), f"{storage.kind!r} instead of a kind of memory")
