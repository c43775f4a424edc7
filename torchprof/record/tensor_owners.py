"""Which modules have a tensor as their own parameter or buffer."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn

_Path = tuple[str, ...]


class Owners:
    """The modules of a profile by their own tensors. ``modules``: their real paths; None for one that was freed."""

    def __init__(self, modules: Iterable[tuple[_Path, nn.Module | None]]) -> None:
        self._by_tensor: defaultdict[int, list[_Path]] = defaultdict(list)
        self._by_memory: defaultdict[tuple[int, int], list[_Path]] = defaultdict(list)
        path_of: dict[int, _Path] = {}
        alive = [(path, module) for path, module in modules if module is not None]
        for path, module in alive:
            path_of[id(module)] = path
            for tensor in _own_tensors(module):
                self._by_tensor[id(tensor)].append(path)
                if memory := _memory_of(tensor):
                    self._by_memory[memory].append(path)
        for _, module in alive:
            for of, tensor in _gathered_in(module):
                if id(of) in path_of:
                    self._by_tensor[id(tensor)].append(path_of[id(of)])
        self._elsewhere: set[int] | None = None  # the tensors of all modules of the process

    def of(self, tensor: torch.Tensor | None) -> tuple[_Path, ...] | None:
        """The paths of the modules that have a tensor; ``()`` if only other modules have it, None if none has it."""
        if tensor is None or id(tensor) in self._by_tensor:
            return None if tensor is None else tuple(self._by_tensor[id(tensor)])
        if self._elsewhere is None:
            # torch.compile's own modules have the tensors that freezing made parts of graphs.
            every = (value for value in gc.get_objects() if issubclass(type(value), nn.Module))
            modules = [module for module in every if not issubclass(type(module), torch.fx.GraphModule)]
            self._elsewhere = {id(tensor) for module in modules for tensor in _own_tensors(module)}
        if id(tensor) in self._elsewhere:
            return ()
        return tuple(self._by_memory.get(_memory_of(tensor) or (0, 0), ())) or None


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    for name in ("_parameters", "_buffers"):
        yield from (value for value in module.__dict__.get(name, {}).values() if value is not None)


def _memory_of(tensor: torch.Tensor) -> tuple[int, int] | None:
    """Where the elements of a tensor begin, and their count; None if they are nowhere."""
    try:
        return (tensor.data_ptr(), tensor.numel()) if tensor.numel() and tensor.data_ptr() else None
    except Exception:  # a lazy parameter, a layout or a subclass without memory of its own
        return None


def _gathered_in(module: nn.Module) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """The whole parameters that FSDP2 makes for calls of a sharded module, each with the module that it is of.

    Private names of ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``; without them nothing is found.
    """
    with suppress(Exception):
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups for param in getattr(group, "fsdp_params", ())):
            if hasattr(param, "_unsharded_param"):
                yield param._module_info.module, param._unsharded_param
