"""The memory that is there beside what a session records: what a model holds, and what torch's allocators count."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "allocated at most": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved at most": "reserved_bytes.all.peak",
}


@dataclass(frozen=True)
class Holding:
    """What was held at one moment.

    ``sizes``: (kind, bytes) of the model's parameters, buffers and gradients, by device. ``addresses``: (device,
    address) of the parameters and buffers. ``allocator``: figures of torch's caching allocator in bytes, by device;
    none for the CPU, which has none.
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    addresses: frozenset[tuple[str, int]]
    allocator: Mapping[str, Mapping[str, int]]

    @classmethod
    def now(cls, models: Iterable[nn.Module]) -> Holding:
        """What is held at this moment. A storage counts once, whatever shares it."""
        sizes: dict[str, dict[str, int]] = {}
        held: dict[tuple[str, int], str] = {}  # device and address → kind
        for model in models:
            params = [param for param in model.parameters() if not is_lazy(param)]
            for kind, tensors in (
                ("parameters", params),
                ("buffers", [buffer for buffer in model.buffers() if not is_lazy(buffer)]),
                ("gradients", [param.grad for param in params if param.grad is not None]),
            ):
                for tensor in tensors:
                    place = _storage(tensor)
                    if place is not None and place[:2] not in held:
                        held[place[:2]] = kind
                        of_device = sizes.setdefault(place[0], {})
                        of_device[kind] = of_device.get(kind, 0) + place[2]
        by_device = {device: tuple(of_device.items()) for device, of_device in sizes.items()}
        addresses = frozenset(place for place, kind in held.items() if kind != "gradients")
        return cls(by_device, addresses, _allocators())


NOTHING = Holding({}, frozenset(), {})


def allocators_between(start: Holding, end: Holding) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """For each device, each figure of its allocator: name, bytes at the start, bytes at the end."""
    return {
        device: tuple((name, start.allocator.get(device, {}).get(name, 0), size) for name, size in figures.items())
        for device, figures in end.allocator.items()
    }


def _storage(tensor: torch.Tensor) -> tuple[str, int, int] | None:
    """Device, address and bytes of a tensor's storage; None where it has none that one could point to."""
    try:
        storage = tensor.untyped_storage()
        address, size = storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # sparse, fake and wrapped tensors
        return None
    if not address:
        return None
    kind, index = tensor.device.type, tensor.device.index
    return (kind if kind == "cpu" else f"{kind}:{index or 0}"), address, size


def _allocators() -> dict[str, dict[str, int]]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    figures = {}
    for index in range(torch.cuda.device_count()):
        statistics = torch.cuda.memory_stats(index)
        figures[f"cuda:{index}"] = {name: statistics.get(key, 0) for name, key in _FIGURES.items()}
    return figures
