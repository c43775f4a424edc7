"""Findings on layers in a loop: rows made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
from build.findings import of
from build.hand_made import op, row, run_of

from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD

MS = 1_000_000
PATHS = {"Net": "Net", "Net.items": "ModuleList", "Net.items.0": "Linear", "Net.items.0.inner": "ReLU"}


def looped(
    calls: int = 100,
    ns: int = 32 * MS,
    kind: str = "Linear",
    compiled: bool = False,
    params: int = 80,
    own: int = 20 * MS,
) -> Run:
    """5 calls of Net, and so many of a layer below a ModuleList, which is not called, with a layer in it."""
    kinds = {**PATHS, "Net.items.0": kind}
    layers = [
        Layer(tuple(path.split(".")), of_path, params if path == "Net.items.0" else 0, compiled=compiled)
        for path, of_path in kinds.items()
    ]
    rows = [
        row(0, calls=5, cpu_ns=own),
        row(2, calls=calls, cpu_ns=ns // 2),
        row(3, calls=calls, cpu_ns=ns // 4),
        row(2, op("AddmmBackward0"), phase=BACKWARD, cpu_ns=ns // 4),
    ]
    return run_of(rows, layers=layers, wall_ns=100 * MS)


def test_a_layer_that_is_called_for_each_item() -> None:
    [advice] = of(looped(), "layers_in_a_loop")
    assert advice.gain_ns == (32 + 20) * MS * 8 // 10 and advice.layer == "Net.items.0"
    assert advice.finding == "It is called 20 times in a call of Net, one item after the other."
    assert advice.remedy.startswith("If no item depends on an earlier one, call it once: ")


@pytest.mark.parametrize(
    "run",
    [
        looped(calls=99),
        looped(calls=100, ns=41 * MS),
        looped(ns=5 * MS, own=MS),
        looped(kind="LSTMCell", calls=39),
        looped(compiled=True),
    ],
    ids=["19 times", "long", "5 %", "a cell 7 times", "compiled"],
)
def test_layers_that_are_not_reported(run: Run) -> None:
    assert of(run, "layers_in_a_loop") == []


def test_a_cell_that_is_called_for_each_time_step() -> None:
    """32 ms of the cell, and 20 ms of the layer that calls it."""
    [advice] = of(looped(kind="LSTMCell", calls=40), "layers_in_a_loop")
    assert advice.gain_ns == (32 + 20) * MS * 8 // 10
    assert advice.finding == "It is called 8 times in a call of Net, one time step after the other."
    assert "`torch.nn.LSTM(" in advice.remedy


def test_a_cell_in_float64_has_no_fused_kernel_on_the_cpu() -> None:
    run = looped(kind="LSTMCell")
    layers = tuple(replace(layer, dtype_bytes=(("float64", 8),)) for layer in run.layers)
    assert of(replace(run, layers=layers, rows=replace(run.rows, layers=layers)), "layers_in_a_loop") == []
