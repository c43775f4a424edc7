"""The tensors of modules: which modules own one, whether it changes while we record, and which gradients
DistributedDataParallel exchanges, in which buckets."""

from __future__ import annotations

import gc
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from threading import get_ident
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchprof.measure.recording import Freed, LiveMemory
from torchprof.record.modules import instances_of

_Path = tuple[str, ...]


class Owners:
    """The modules of a profile by their own tensors. ``modules``: their real paths; None for one that was freed."""

    def __init__(self, modules: Iterable[tuple[_Path, Module | None]]) -> None:
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

    def of(self, tensor: Tensor | None) -> tuple[_Path, ...] | None:
        """The paths of the modules that have a tensor; ``()`` if only other modules have it, None if none has it."""
        if tensor is None or id(tensor) in self._by_tensor:
            return None if tensor is None else tuple(self._by_tensor[id(tensor)])
        if self._elsewhere is None:
            # torch.compile's own modules have the tensors that freezing made parts of graphs.
            every = (value for value in gc.get_objects() if issubclass(type(value), Module))
            modules = [module for module in every if not issubclass(type(module), torch.fx.GraphModule)]
            self._elsewhere = {id(tensor) for module in modules for tensor in _own_tensors(module)}
        if id(tensor) in self._elsewhere:
            return ()
        return tuple(self._by_memory.get(_memory_of(tensor) or (0, 0), ())) or None


def _own_tensors(module: Module) -> Iterator[Tensor]:
    """A module's own parameters and buffers, without those of its children."""
    for name in ("_parameters", "_buffers"):
        yield from (value for value in module.__dict__.get(name, {}).values() if value is not None)


def _memory_of(tensor: Tensor) -> tuple[int, int] | None:
    """Where the elements of a tensor begin, and their count; None if they are nowhere."""
    try:
        return (tensor.data_ptr(), tensor.numel()) if tensor.numel() and tensor.data_ptr() else None
    except Exception:  # a lazy parameter, a layout or a subclass without memory of its own
        return None


def _gathered_in(module: Module) -> Iterator[tuple[Module, Tensor]]:
    """The whole parameters that FSDP2 makes for calls of a sharded module, each with the module that it is of.

    Private names of ``torch/distributed/fsdp/_fully_shard/_fsdp_param.py``; without them nothing is found.
    """
    with suppress(Exception):
        state: Any = getattr(module, "_get_fsdp_state", lambda: None)()
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for param in (param for group in groups for param in getattr(group, "fsdp_params", ())):
            if hasattr(param, "_unsharded_param"):
                yield param._module_info.module, param._unsharded_param


class Updates:
    """Compares the versions of parameters with those at the first look. torch counts a version for each change in
    place, by an optimizer or by hand; compiled code may change a parameter without it.

    A parameter is known by its id, so it must be alive. The fused steps of torch's optimizers count no version.
    """

    def __init__(self) -> None:
        self._before: dict[int, int] = {}

    def look(self, parameters: Iterable[Tensor]) -> None:
        """Note the versions of parameters that are not known."""
        for parameter in parameters:
            if not parameter.is_inference():  # has no version
                self._before.setdefault(id(parameter), parameter._version)

    def changed(self, parameter: Tensor) -> bool:
        """Whether a parameter changed since the first look; False for unknown ones."""
        before = self._before.get(id(parameter))
        return before is not None and not parameter.is_inference() and parameter._version != before


class Replicas:
    """The ``DistributedDataParallel`` modules among some modules or around them.

    A model may be the module inside of a DistributedDataParallel, because training loops give that to callbacks. The
    one around it is then searched among all objects of the process. Found ones are kept as weak references; the search
    is repeated only while a model is in none of them, because it may be wrapped later.

    Methods take ``modules``, each with the number of its layer, None for a module that was freed; and ``models``.
    """

    def __init__(self) -> None:
        self._found: list[ref[DistributedDataParallel]] = []
        self._exchanged: dict[int, set[int]] = {}  # what ``exchanged_layers`` gave last

    def exchanged_layers(
        self, modules: Sequence[tuple[Module | None, int]], models: Sequence[Module]
    ) -> dict[int, set[int]]:
        """The layers whose gradients are exchanged. The value: the numbers of elements of those own parameters that
        DistributedDataParallel ignores, without sizes that an exchanged parameter of the layer has, too. A layer is
        left out if all its own parameters are ignored. A layer of a freed module keeps its last value."""
        exchanged: dict[int, set[int]] = {}  # by the id of a module
        for replica in self._replicas(modules, models):
            exchanged[id(replica)] = set()
            ignored: set[str] = set(getattr(replica, "parameters_to_ignore", ()))  # not public
            for name, module in replica.module.named_modules():
                params = {f"{name}.{key}": param for key, param in module._parameters.items() if param is not None}
                sizes = {param.numel() for key, param in params.items() if key not in ignored}
                if sizes or not params:
                    exchanged[id(module)] = {param.numel() for param in params.values()} - sizes
        freed = self._exchanged.keys() & {layer for module, layer in modules if module is None}
        self._exchanged = {layer: self._exchanged[layer] for layer in freed}
        self._exchanged.update((layer, exchanged[id(module)]) for module, layer in modules if id(module) in exchanged)
        return self._exchanged

    def layers_with_unordered_buckets(
        self, modules: Sequence[tuple[Module | None, int]], models: Sequence[Module]
    ) -> list[int]:
        """The layers that are replicated models with several buckets of gradients that are not in the order in which
        the gradients become ready. DistributedDataParallel rebuilds the buckets in that order before its second
        forward, but in some cases never."""
        layer_of = {id(module): layer for module, layer in reversed(modules)}
        ids: set[int] = set()
        for replica in self._replicas(modules, models):
            recorded = _logging_data(replica)
            if not recorded.get("has_rebuilt_buckets") and "," in str(recorded.get("bucket_sizes", "")):
                ids.add(next(layer_of[id(module)] for module in replica.modules() if id(module) in layer_of))
        return sorted(ids)

    def _replicas(
        self, modules: Sequence[tuple[Module | None, int]], models: Sequence[Module]
    ) -> list[DistributedDataParallel]:
        known = [replica for alive in self._found if (replica := alive()) is not None]
        inside = {id(module) for model in known for module in model.modules()}
        if not known or any(id(model) not in inside for model in models):
            known = [module for module, _ in modules if isinstance(module, DistributedDataParallel)]
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                known += instances_of(DistributedDataParallel)
            ours = {id(module) for module, _ in modules}
            known = [*{id(model): model for model in known if _is_built(model)}.values()]
            known = [model for model in known if any(id(module) in ours for module in model.modules())]
            self._found = [ref(model) for model in known]
        return known


def _is_built(replica: DistributedDataParallel) -> bool:
    """Whether its ``__init__`` ended without an error. After an error, the object may live on with the exception, but
    exchanges nothing. ``__init__`` sets ``logger`` last, unless a hook does all of the exchange (neither is public)."""
    is_by_hook: bool = getattr(replica, "_delay_all_reduce_all_params", False)
    return is_by_hook or getattr(replica, "logger", None) is not None


def _logging_data(replica: DistributedDataParallel) -> dict[str, Any]:
    """What DistributedDataParallel logs about itself, as its buckets; empty if this torch or this module has none."""
    try:
        recorded: dict[str, Any] = replica._get_ddp_logging_data()  # not public
    except (AttributeError, AssertionError, RuntimeError):
        return {}
    return recorded


# Memory that a profiler session does not record: that of the model, and the statistics of torch's allocators.

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
