"""The figures of a run, layer by layer, by flops-profiler's convention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from torchprof import Run
from torchprof.integrations.convention import Counted
from torchprof.integrations.figures import known_sum
from torchprof.integrations.flops_profiler.counting import LayerPath, functionals
from torchprof.integrations.flops_profiler.strings import at_least, macs_text, number_text
from torchprof.integrations.modules import parameter_sizes


class LayerFigures:
    """A layer with all layers below it: parameters, nanoseconds of its forwards, functionals by name.

    If ``seen`` is False, only the parameters are known: the layer is inside a ScriptModule or a compiled module, and
    its work is part of that module's work.
    """

    def __init__(self, kind: str, params: int | None, ns: int, seen: bool) -> None:
        self.kind = kind
        self.params = params
        self.ns = ns
        self.seen = seen
        self.uncounted = 0  # calls of operators without a formula
        self.functionals: dict[str, Counted] = {}

    @property
    def flops(self) -> int:
        return sum(counted.flops for counted in self.functionals.values())

    @property
    def macs(self) -> int:
        return sum(counted.macs for counted in self.functionals.values())

    @property
    def known(self) -> tuple[int | None, int | None, int | None]:
        """(flops, MACs, nanoseconds), each None if it is unknown."""
        if not self.seen:
            return None, None, None
        return (self.flops or None, self.macs or None, self.ns) if self.uncounted else (self.flops, self.macs, self.ns)

    @property
    def is_lower_bound(self) -> bool:
        """Whether the work of some operators is missing from flops and MACs."""
        return self.uncounted > 0


class Measured:
    """The figures of a run by flops-profiler's convention: of each layer by path (``of``).

    Times are CPU times; if a device was recorded, they are the times of its kernels.
    """

    def __init__(self, run: Run, model: nn.Module, ignored: Sequence[Any]) -> None:
        self.run = run
        self.model = model
        self.time = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
        self.root = run.roots[0].path
        self._kinds = {layer.path: layer.kind for layer in run.layers}
        self._modules = dict(self._modules_in_run())
        self._ignored = {
            path for path, module in self._modules.items() if type(module) in ignored or is_one_of(module, ignored)
        }
        self.of = self._layers_without_work()
        self.unknown = self._add_work()
        self.whole = self.of[self.root]
        self.functionals_ns = sum(self.ns(counted) for counted in self.whole.functionals.values())
        own = run.tree("forward").total
        own_flops = own.flops or (None if own.uncounted else 0)
        self.own_flops = at_least(number_text(own_flops), own.uncounted > 0)  # torchprof's own count
        outside = run.no_layer("forward")
        self.outside = f"{macs_text(outside.macs)}, {number_text(outside.flops)} flops" if outside.flops else ""

    def _layers_without_work(self) -> dict[LayerPath, LayerFigures]:
        totals = self.run.total_params()
        measured = {}
        for node in self.run.tree("forward").walk():
            layer, module = node.layer, self._modules.get(node.layer.path)
            params = totals[layer.path] if module is None else known_sum(parameter_sizes(module).values())
            ns = getattr(node.total, self.time)
            measured[layer.path] = LayerFigures(layer.kind, params, ns, seen=bool(node.total) or not layer.compiled)
        return measured

    def _add_work(self) -> Counter[str]:
        """Add the functionals and the uncounted calls of each layer to the layer and to all layers above it.

        Returns, by name, how many calls of an operator were not counted because their shapes are unknown.
        """
        direct, unknown = functionals(self.run)
        for path in self.of:
            for name, counted in ({} if self._is_ignored(path) else direct.get(path, {})).items():
                for steps in range(1, len(path) + 1):
                    self.of[path[:steps]].functionals.setdefault(name, Counted()).add(counted)
        for row in self.run.rows:
            if row.layer is None or row.phase != "forward" or not row.cost.uncounted:
                continue
            if not self._is_ignored(row.layer.path):
                for steps in range(1, len(row.layer.path) + 1):
                    self.of[row.layer.path[:steps]].uncounted += row.cost.uncounted
        return unknown

    def _is_ignored(self, path: LayerPath) -> bool:
        return any(path[:steps] in self._ignored for steps in range(1, len(path) + 1))

    def ns(self, counted: Counted) -> int:
        """The nanoseconds of a functional, on the CPU or on the device."""
        return counted.device_ns if self.time == "device_ns" else counted.ns

    def below(self, module: nn.Module, path: LayerPath) -> Iterator[tuple[str, nn.Module | None, LayerPath | None]]:
        """The children of a module: name, module, path. The path is None if the run does not have this layer."""
        are_layers = any((*path, name) in self._kinds for name, _ in module._modules.items())
        is_wrapper = not are_layers and _class_name(module) != self._kinds[path]  # it and its module share one layer
        for name, child in module._modules.items():
            child_path = path if is_wrapper else (*path, name)
            yield name, child, child_path if child is not None and child_path in self._kinds else None

    def _modules_in_run(self) -> Iterator[tuple[LayerPath, nn.Module]]:
        waiting = [(self.root, self.model)]
        while waiting:
            path, module = waiting.pop()
            yield path, module
            waiting.extend(
                (child_path, child)
                for _, child, child_path in self.below(module, path)
                if child is not None and child_path is not None
            )

    def params_at(self, paths: Iterable[LayerPath]) -> int | None:
        """The sum of the parameters of some layers; a module with several paths counts once."""
        return known_sum({id(self._modules.get(path, path)): self.of[path].params for path in paths}.values())


def _class_name(module: nn.Module) -> str:
    """The name of a module's class; for a ScriptModule, of the class from which it was made."""
    return module.original_name if isinstance(module, torch.jit.ScriptModule) else type(module).__name__


def is_one_of(module: nn.Module, modules: Iterable[Any]) -> bool:
    """Whether the object ``module`` itself is in ``modules``."""
    return any(module is known for known in modules)
