"""Take the labels out of a trace, find its layers by the order of operators, and compare."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from torch import nn

import torchprof
from torchprof import Run


def without_labels(trace: Path) -> Path:
    """The same trace without torchprof's ranges."""
    data = json.loads(trace.read_text(encoding="utf-8"))
    data["traceEvents"] = [one for one in data["traceEvents"] if not str(one.get("name")).startswith("torchprof:")]
    stripped = trace.with_name("stripped.json")
    stripped.write_text(json.dumps(data), encoding="utf-8")
    return stripped


def op_times(run: Run, *, nodes: bool = True) -> Counter[tuple[Any, ...]]:
    """The time of operators by layer, phase and the operators around them; also that of autograd nodes."""
    found: Counter[tuple[Any, ...]] = Counter()
    for row in run.rows:
        frames = tuple(frame.name for frame in row.frames if frame.kind == "op")
        if frames and (nodes or "aten::" in frames[-1]):
            found[row.layer.name if row.layer else "", row.phase, frames] += row.cost.cpu_ns
    return found


def compared(trace: Path, model: nn.Module, inputs: Any, *, nodes: bool = True, **options: Any) -> tuple[float, Run]:
    """The share of the layers' time that was found again. Asserts that none is at a wrong layer.

    ``nodes``: also compare the own time of autograd nodes.
    """
    aligned = torchprof.from_trace(without_labels(trace), model, inputs=inputs, **options)
    return share_found(torchprof.from_trace(trace, model), aligned, nodes=nodes), aligned


def share_found(labelled: Run, aligned: Run, *, nodes: bool = True) -> float:
    """The share of the layers' time in one run that is at the same layers in the other. Asserts that the rest is
    outside."""
    wanted, found = op_times(labelled, nodes=nodes), op_times(aligned, nodes=nodes)
    wrong = {key: (ns, wanted[key]) for key, ns in found.items() if key[0] and ns > wanted[key]}
    assert wrong == {}
    assert sum(found.values()) == sum(wanted.values())
    in_layers = sum(ns for key, ns in wanted.items() if key[0])
    return sum(ns for key, ns in found.items() if key[0]) / in_layers
