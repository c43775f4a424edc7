"""The figures of a model, layer by layer, from the time while DeepSpeed's profiler was on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torchprof import Profile
from torchprof.integrations.convention import count
from torchprof.integrations.deepspeed.counting import RULES, macs_of, uncounted_calls
from torchprof.integrations.deepspeed.strings import macs_to_string


@dataclass
class LayerSums:
    """Sums of one layer, or of several: forward calls, multiply-adds, nanoseconds, operator calls not counted."""

    calls: int = 0
    macs: int = 0
    ns: int = 0
    uncounted: int = 0

    def add(self, other: LayerSums) -> None:
        self.calls += other.calls
        self.macs += other.macs
        self.ns += other.ns
        self.uncounted += other.uncounted

    @property
    def known_macs(self) -> int | None:
        """The multiply-adds; None if nothing was called, or if nothing could be counted."""
        return self.macs if self.macs or (self.calls and not self.uncounted) else None

    @property
    def seconds(self) -> float | None:
        return self.ns / 1e9 if self.calls or self.ns else None

    def macs_text(self, precision: int) -> str:
        """The multiply-adds as text, with ``≥`` if some calls are not counted."""
        bound = "≥ " if self.uncounted and self.known_macs is not None else ""
        return bound + macs_to_string(self.known_macs, precision=precision)


class Recorded:
    """The figures of a profile that has ended.

    The self work of modules of an ``ignored`` type does not count; the work of their children does.
    """

    def __init__(self, profile: Profile, ignored: frozenset[type] = frozenset()) -> None:
        self.own: dict[tuple[str, ...], LayerSums] = {}  # by the path of the layer, without child layers
        run = profile.run
        # The path of a module, with wrappers → the path of its layer.
        self.layer_of = layer_of = _layers_of(profile.traces, run.layers)
        # The last one stays: of a wrapper's layer the inner module.
        modules = {layer_of[trace.path]: trace.module for trace in profile.traces}
        left_out = {layer_of[trace.path] for trace in profile.traces if type(trace.module) in ignored}
        counted, uncounted = count(run, RULES), uncounted_calls(run)
        self.device = run.meta.device if "device_ns" in run.meta.measured else None
        tree = run.tree("forward")
        for node in tree.walk():
            path = node.layer.path
            own = self.own.setdefault(path, LayerSums())
            if path not in left_out:
                own.calls += node.calls
                own.macs += sum(macs_of(name, work, modules[path]) for name, work in counted.get(path, {}).items())
                own.ns += node.self.device_ns if self.device else node.self.cpu_ns
                own.uncounted += uncounted[path]
        self.by_torchprof = tree.total
        self.warnings = [*map(str, run.warnings)]

    def total(self) -> LayerSums:
        """The sum over all layers."""
        sums = LayerSums()
        for own in self.own.values():
            sums.add(own)
        return sums

    def totals(self) -> dict[tuple[str, ...], LayerSums]:
        """For each layer, by path, the sum over the layer and all layers below it."""
        totals = {path: replace(own) for path, own in self.own.items()}
        for path in reversed(totals):  # children come after their parents
            if len(path) > 1:
                totals[path[:-1]].add(totals[path])
        return totals


def _layers_of(traces: Iterable[Any], layers: Iterable[Any]) -> dict[tuple[str, ...], tuple[str, ...]]:
    """For each module, by its path with wrappers, the path of its layer. Parents come before their children.

    A wrapper (DistributedDataParallel) and the module inside it share one layer.
    """
    kinds = {layer.path: layer.kind for layer in layers}
    above: dict[tuple[str, ...], Any] = {}
    paths: dict[tuple[str, ...], tuple[str, ...]] = {}
    for trace in traces:
        kind = type(trace.module).__name__
        if len(trace.path) == 1:
            paths[trace.path] = next(iter(kinds))
        else:
            shared = paths[trace.path[:-1]]
            own = (*shared, trace.path[-1])
            is_wrapped = kinds[shared] == kind != above[trace.path[:-1]]
            paths[trace.path] = shared if is_wrapped or own not in kinds else own
        above[trace.path] = kind
    return paths
