"""Count the operators of a run by another tool's convention, given as rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

from torchprof import Run

PerCall = Callable[[Any], int]
"""Computes the FLOPs of one call from its signature: ``shapes``, ``dtypes``, ``scalars`` of the inputs."""

_NOT_A_TENSOR = ("", "Scalar", "ScalarList", "TensorList")
"""The dtypes of inputs that are not tensors. "" is also that of a tensor whose shape was not recorded."""


class CountingRule(NamedTuple):
    """How a tool counts an operator.

    ``name``: the tool's name for the operator. ``flops``: "macs" (2 × the multiply-accumulates that torchprof counted),
    "flops" (the FLOPs that torchprof counted), or a function of one call's signature.
    """

    name: str
    flops: str | PerCall


@dataclass
class Counted:
    """Sums of one operator in one layer, with the operators that it calls. ``ns`` is CPU time."""

    calls: int = 0
    macs: int = 0
    flops: int = 0
    ns: int = 0
    device_ns: int = 0

    def add(self, other: Counted) -> None:
        for name, number in vars(other).items():
            setattr(self, name, getattr(self, name) + number)


def input_shape(signature: Any, index: int = 0) -> tuple[int, ...] | None:
    """The shape of the input number ``index`` of an operator; None if it is not a tensor or its shape is unknown."""
    if signature is None or index >= len(signature.dtypes) or signature.dtypes[index] in _NOT_A_TENSOR:
        return None
    shape: tuple[int, ...] | None = signature.shapes[index]
    return shape


def input_elements(signature: Any) -> int:
    """The number of elements of an operator's first input; 0 if its shape is unknown."""
    shape = input_shape(signature)
    return 0 if shape is None else prod(shape)


def zero_flops(signature: Any) -> int:
    """The FLOPs of an operator that the tool counts as 0."""
    return 0


def count(run: Run, rules: Mapping[str, CountingRule]) -> dict[tuple[str, ...], dict[str, Counted]]:
    """The sums of the operators in each layer's forward, by the layer's path and the tool's name of the operator.

    Child layers are not included. The keys of ``rules`` are torch's names (``aten::linear``). If operators call each
    other, the outermost one with a rule counts, with all time and work inside it. Others do not count.
    """
    counts: dict[tuple[str, ...], dict[str, Counted]] = {}
    for row in run.rows:
        if row.layer is None or row.phase != "forward":
            continue
        outermost = next((depth for depth, frame in enumerate(row.frames) if frame.name in rules), None)
        if outermost is None:
            continue
        rule = rules[row.frames[outermost].name]
        counted = counts.setdefault(row.layer.path, {}).setdefault(rule.name, Counted())
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
    return counts
