"""What DistributedDataParallel does with the gradients of a model: which it exchanges, and in which buckets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

import torch
from torch.nn import Module
from torch.nn.parallel import DistributedDataParallel

from torchprof.record.modules import instances_of


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
                known += all_replicas()
            ours = {id(module) for module, _ in modules}
            known = [*{id(model): model for model in known if _is_built(model)}.values()]
            known = [model for model in known if any(id(module) in ours for module in model.modules())]
            self._found = [ref(model) for model in known]
        return known


def all_replicas() -> list[DistributedDataParallel]:
    """All DistributedDataParallel modules of this process."""
    return instances_of(DistributedDataParallel)


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
