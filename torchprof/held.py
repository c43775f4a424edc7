"""The memory that is there beside what a session records: what a model holds, and what torch's allocators count."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.holding import Holding

_FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "allocated at most": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved at most": "reserved_bytes.all.peak",
}


def held_now(models: Iterable[nn.Module], watch: bool = False) -> Holding:
    """What is held at this moment. A storage counts once, whatever shares it.

    torch does not record that memory is freed which was there before the recording. With ``watch`` we note when the
    tensors of the model go, until ``stop_watching``: the gradients that zero_grad lets go, above all.
    """
    blocks: dict[tuple[str, int], int] = {}
    gone: list[tuple[int, str, int]] = []
    watches: list[finalize[Any, Any]] = []
    sizes: dict[str, dict[str, int]] = {}
    held: dict[tuple[str, int], str] = {}  # device and address → kind
    for model in models:
        params = [param for param in model.parameters() if not is_lazy(param)]
        for kind, tensors in (
            ("parameters", params),
            ("buffers", [buffer for buffer in model.buffers() if not is_lazy(buffer)]),
            ("gradients", [param.grad for param in params if param.grad is not None]),
        ):
            for tensor in map(_held_here, tensors):
                place = _storage(tensor)
                if place is not None and place[:2] not in held:
                    held[place[:2]] = kind
                    blocks[place[:2]] = place[2]
                    # A gradient that is a view, as those of DDP's buckets, may go and leave its storage.
                    if watch and tensor.nbytes == place[2]:
                        watches.append(finalize(tensor, _note_gone, gone, *place[:2]))
                        watches[-1].atexit = False
                    of_device = sizes.setdefault(place[0], {})
                    of_device[kind] = of_device.get(kind, 0) + place[2]
    by_device = {device: tuple(of_device.items()) for device, of_device in sizes.items()}
    addresses = frozenset(place for place, kind in held.items() if kind != "gradients")
    return Holding(by_device, addresses, _allocators(), blocks, gone, watches)


def _note_gone(gone: list[tuple[int, str, int]], device: str, address: int) -> None:
    gone.append((time.time_ns(), device, address))


def _held_here(tensor: torch.Tensor) -> torch.Tensor:
    """Of a tensor that is sharded over ranks (a ``DTensor``), what this one holds."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


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
