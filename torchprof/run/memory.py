"""The memory of a run: the curve over time, and what was allocated at its peak."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Held(NamedTuple):
    """Bytes that were alive at a peak: so many ``blocks``, allocated for a layer (by its index, negative for none) in a
    phase. ``kind`` is one of ``KINDS``, or "unknown" where torch gave no addresses; that is negative where what was
    there before had been freed."""

    layer: int
    phase: str
    kind: str
    nbytes: int
    blocks: int


KINDS = ("parameters", "gradients", "activations", "optimizer state", "inputs", "temporaries")
"""What memory is held for. Activations: made in forward and kept when the model's call has ended."""


@dataclass(frozen=True)
class Memory:
    """The memory of one device of one rank.

    ``peak_bytes``: by how much it rose above what there was at the start, at most; ``peak_ns``: when that was, after
    the start; ``held``: what of it was alive then, the largest first. ``before``: (kind, bytes) of what the model had
    on this device when the recording began. ``allocator``: (name, bytes at the start, bytes at the end) of what torch's
    own allocator of the device counts.
    """

    device: str
    rank: int = 0
    peak_bytes: int = 0
    peak_ns: int = 0
    held: tuple[Held, ...] = ()
    before: tuple[tuple[str, int], ...] | None = None
    allocator: tuple[tuple[str, int, int], ...] = ()
