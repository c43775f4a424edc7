"""What memory is held beside what a session records, by the model and by torch's allocators: the value, for one moment.
Knows no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import finalize


@dataclass(frozen=True)
class Holding:
    """What was held at one moment.

    ``sizes``: (kind, bytes) of the model's parameters, buffers and gradients, by device. ``addresses``: (device,
    address) of the parameters and buffers. ``allocator``: figures of torch's caching allocator in bytes, by device;
    none for the CPU, which has none. ``blocks``: the bytes of each storage, by device and address. ``gone``: where that
    was watched, what of it was let go since, in order: (time in ns since the epoch, device, address).
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    addresses: frozenset[tuple[str, int]]
    allocator: Mapping[str, Mapping[str, int]]
    blocks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    gone: list[tuple[int, str, int]] = field(default_factory=list)
    watches: list[finalize[Any, Any]] = field(default_factory=list)

    def stop_watching(self) -> None:
        """Note no more of what goes."""
        for one in self.watches:
            one.detach()
        self.watches.clear()


NOTHING = Holding({}, frozenset(), {})
"""Where nobody looked."""


def allocators_between(start: Holding, end: Holding) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """For each device, each figure of its allocator: name, bytes at the start, bytes at the end."""
    return {
        device: tuple((name, start.allocator.get(device, {}).get(name, 0), size) for name, size in figures.items())
        for device, figures in end.allocator.items()
    }
