"""Count a run by another tool's convention: which operators count, and for how much."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchprof import Run

PER_CALL = Callable[[Any], int]
"""FLOPs of one call, from its signature: ``shapes``, ``dtypes``, ``scalars``."""


class Rule(NamedTuple):
    """How a tool counts an operator.

    ``name`` is what the tool calls it. ``flops``: "macs", two for each multiply-accumulate that torchprof counted in
    it; "flops", all that torchprof counted in it; or a function of one call's signature.
    """

    name: str
    flops: str | PER_CALL


@dataclass
class Counted:
    """What an operator did in one layer, itself and what it called: ``ns`` on the CPU, ``device_ns`` on the device."""

    calls: int = 0
    macs: int = 0
    flops: int = 0
    ns: int = 0
    device_ns: int = 0

    def add(self, other: Counted) -> None:
        self.calls += other.calls
        self.macs += other.macs
        self.flops += other.flops
        self.ns += other.ns
        self.device_ns += other.device_ns


def count(run: Run, rules: Mapping[str, Rule]) -> dict[tuple[str, ...], dict[str, Counted]]:
    """By path of a layer and the tool's name of an operator, what ran directly in the layer's forward.

    ``rules`` are by torch's name (``aten::linear``). Of operators inside each other the outermost with a rule counts,
    and all time and work inside is its own. What has no rule does not count.
    """
    found: dict[tuple[str, ...], dict[str, Counted]] = {}
    for row in run.rows:
        if row.layer is None or row.phase != "forward":
            continue
        outermost = next((at for at, frame in enumerate(row.frames) if frame.name in rules), None)
        if outermost is None:
            continue
        rule = rules[row.frames[outermost].name]
        counted = found.setdefault(row.layer.path, {}).setdefault(rule.name, Counted())
        counted.ns += row.cost.cpu_ns
        counted.device_ns += row.cost.device_ns
        counted.macs += row.cost.macs
        if rule.flops == "macs":
            counted.flops += 2 * row.cost.macs
        elif rule.flops == "flops":
            counted.flops += row.cost.flops
        if outermost == len(row.frames) - 1:
            counted.calls += row.calls
            if callable(rule.flops) and row.signature is not None:
                counted.flops += row.calls * rule.flops(row.signature)
    return found
