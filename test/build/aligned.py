"""Take the labels out of a trace, find its layers by the order of operators, and compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from torch import nn

import torchprof
from torchprof import Run
from torchprof.run.words import AUTOGRAD_ENGINE


def without_labels(trace: Path) -> Path:
    """The same trace without torchprof's ranges."""
    data = json.loads(trace.read_text(encoding="utf-8"))
    data["traceEvents"] = [one for one in data["traceEvents"] if not str(one.get("name")).startswith("torchprof:")]
    stripped = trace.with_name("stripped.json")
    stripped.write_text(json.dumps(data), encoding="utf-8")
    return stripped


class Amount(NamedTuple):
    calls: int = 0
    ns: int = 0


def op_amounts(run: Run, *, nodes: bool = True) -> dict[tuple[Any, ...], Amount]:
    """The calls and the time of operators, and of autograd nodes, by layer, phase and the operators around them."""
    found: dict[tuple[Any, ...], Amount] = {}
    for row in run.rows:
        # Only labels say when autograd's engine was called.
        frames = tuple(frame.name for frame in row.frames if frame.kind == "op" and frame.name != AUTOGRAD_ENGINE)
        if frames and row.frames[-1].kind != "python" and (nodes or "aten::" in frames[-1]):
            key = (row.layer.name if row.layer else "", row.phase, frames)
            before = found.get(key, Amount())
            found[key] = Amount(before.calls + row.calls, before.ns + row.cost.cpu_ns)
    return found


def compared(trace: Path, model: nn.Module, inputs: Any, *, nodes: bool = True, **options: Any) -> tuple[float, Run]:
    """The share of the layers' calls of operators that was found again. Asserts that none is at a wrong layer.

    ``nodes``: also compare autograd nodes.
    """
    aligned = torchprof.from_trace(without_labels(trace), model, inputs=inputs, **options)
    return share_found(torchprof.from_trace(trace, model), aligned, nodes=nodes), aligned


def share_found(labelled: Run, aligned: Run, *, nodes: bool = True) -> float:
    """The share of the layers' calls of operators in one run that is at the same layers in the other. Asserts that the
    rest is outside.

    The share of their time would depend on which operator the machine happened to delay.
    """
    wanted, found = op_amounts(labelled, nodes=nodes), op_amounts(aligned, nodes=nodes)
    nothing = Amount()
    # Without its label, a collection of Python's garbage collector is the time of the operator in which it began.
    collected = sum(row.cost.cpu_ns for row in labelled.rows if row.frames and row.frames[0].kind == "gc")
    for at, amount in found.items():
        if at[0]:
            known = wanted.get(at, nothing)
            most = known.ns + collected
            assert (amount.calls <= known.calls, amount.ns <= most) == (True, True), (at, amount, known)
    more = sum(amount.ns for amount in found.values()) - sum(amount.ns for amount in wanted.values())
    assert 0 <= more <= collected
    return _calls_in_layers(found) / _calls_in_layers(wanted)


def _calls_in_layers(amounts: dict[tuple[Any, ...], Amount]) -> int:
    return sum(amount.calls for at, amount in amounts.items() if at[0])
