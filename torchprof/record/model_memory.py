"""Memory that a profiler session does not record: that of the model, and the statistics of torch's allocators."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from threading import get_ident
from typing import Any
from weakref import finalize

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchprof.measure.live_memory import Freed, LiveMemory

_FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "allocated at most": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "reserved at most": "reserved_bytes.all.peak",
}


def held_now(models: Iterable[nn.Module], watch: bool = False) -> LiveMemory:
    """The memory of parameters, buffers and gradients that is allocated now. A shared storage counts once.

    ``watch``: note when each storage of the CPU is freed, until ``stop_watching``; above all, gradients that zero_grad
    frees. torch's profiler does not record all of these; see ``add_frees``. Allocators of devices record all frees,
    with the size of the whole block.
    """
    blocks: dict[tuple[str, int], int] = {}
    freed: list[Freed] = []
    watches: list[finalize[Any, Any]] = []
    sizes: defaultdict[str, Counter[str]] = defaultdict(Counter)
    held: dict[tuple[str, int], str] = {}  # device and address → kind
    home = get_ident()
    for model in models:
        params = [param for param in model.parameters() if not is_lazy(param)]
        for kind, tensors in (
            ("parameters", params),
            ("buffers", [buffer for buffer in model.buffers() if not is_lazy(buffer)]),
            ("gradients", [param.grad for param in params if param.grad is not None]),
        ):
            for whole in tensors:
                tensor = getattr(whole, "_local_tensor", whole)  # of a DTensor, the part that is on this rank
                storage = _storage(tensor)
                if storage is None:
                    continue
                block = _device(tensor), storage.data_ptr()
                if block in held:
                    continue
                held[block] = kind
                sizes[block[0]][kind] += storage.nbytes()
                if block[0] == "cpu":
                    blocks[block] = storage.nbytes()
                    if watch:  # not the tensor: views and autograd graphs may share its storage
                        watches.append(finalize(storage, _note_freed, freed, home, block))
                        watches[-1].atexit = False
    by_device = {device: tuple(of_device.items()) for device, of_device in sizes.items()}
    addresses = frozenset(block for block, kind in held.items() if kind != "gradients")
    return LiveMemory(by_device, addresses, _allocators(), blocks, freed, watches)


def _note_freed(freed: list[Freed], home: int, block: tuple[str, int]) -> None:
    freed.append(Freed(time.perf_counter_ns(), get_ident() == home, block))


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    """A tensor's storage; None if it has no address."""
    try:
        storage = tensor.untyped_storage()
        return storage if storage.data_ptr() else None
    except RuntimeError:  # sparse, fake and wrapped tensors
        return None


def _device(tensor: torch.Tensor) -> str:
    """The device of a tensor, as the profiler's events name it."""
    kind, index = tensor.device.type, tensor.device.index
    return kind if kind == "cpu" else f"{kind}:{index or 0}"


def _allocators() -> dict[str, dict[str, int]]:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    figures = {}
    for index in range(torch.cuda.device_count()):
        statistics = torch.cuda.memory_stats(index)
        figures[f"cuda:{index}"] = {name: statistics.get(key, 0) for name, key in _FIGURES.items()}
    return figures
