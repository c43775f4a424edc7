"""Advice about Python between operators: real models and loops, and rows made by hand."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from build.hand_made import FORWARD, kernel, label, op, python_line, row, run_of
from build.models import Layers
from torch import Tensor, nn

from torchprof import Profile
from torchprof.advise import Advice, advise
from torchprof.advise.python import FIND_THE_LINE, UNKNOWN_REASON
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, OUTSIDE, RECOMPUTE

MS = 1_000_000
MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES}


def of(run: Run, rule: str = "python_in_layers") -> list[Advice]:
    return [one for one in advise(run) if one.rule == rule]


def busy(seconds: float) -> None:
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass


class Transformer(Layers):
    """The user's own layer, with the name of one of torch's."""

    def forward(self, x: Tensor) -> Tensor:
        busy(0.01)
        return self.fc(x)


def test_a_layer_of_the_users_with_a_name_of_torchs_is_reported() -> None:
    model = nn.Sequential(nn.Linear(16, 16), Transformer(fc=nn.Linear(16, 16)))
    with Profile(model) as prof:
        for _ in range(3):
            model(torch.ones(4, 16))
    [advice] = of(prof.run)
    assert advice.layer == "Sequential.1" and "this is Python between operators" in advice.finding


class InNumpy(Layers):
    """Slow NumPy work between two layers."""

    def __init__(self, seconds: float) -> None:
        super().__init__(fc=nn.Linear(16, 16), seconds=seconds)

    def forward(self, x: Tensor) -> Tensor:
        array = self.fc(x).detach().numpy()
        busy(self.seconds)
        return torch.from_numpy(np.sort(array))


def test_numpy_in_a_real_layer_is_reported() -> None:
    model = nn.Sequential(nn.Linear(16, 16), InNumpy(0.01))
    model(torch.ones(4, 16))
    with Profile(model) as prof:
        for _ in range(3):
            model(torch.ones(4, 16))
    [advice] = of(prof.run)
    own = sum(
        row.cost.cpu_ns for row in prof.run.rows if row.layer and row.layer.name == "Sequential.1" and not row.frames
    )
    assert advice.layer == "Sequential.1"
    assert advice.gain_ns == own > 15 * MS
    assert " of 3 calls: this is Python between operators" in advice.finding
    assert "Tensors are converted to NumPy or to lists 3 times." in advice.finding and "NumPy" in advice.remedy


def calls(*ms: int) -> Spread:
    return Spread.of([(start, took * MS) for start, took in enumerate(ms)])


def layer(ns: int = 40 * MS, ops: int = 100, times: Any = (11, 11, 11, 11), child: int = 0, **meta: Any) -> Run:
    """A layer with several calls that calls operators; a user label is in its Python."""
    rows = [
        row(2, calls=len(times), cpu_ns=ns - 5 * MS),
        row(2, label("mine"), calls=1, cpu_ns=5 * MS),
        row(2, op("aten::add"), calls=ops - 10, cpu_ns=3 * MS),
        row(2, label("mine"), op("aten::add"), calls=10, cpu_ns=1 * MS),
        row(2, op("aten::add"), op("aten::to"), calls=500, cpu_ns=1 * MS),  # the op calls that, no Python does
    ]
    run = run_of(rows, **{"wall_ns": 100 * MS, **meta})
    samples = {SampleKey(2, FORWARD, 0, "cpu", "cpu_ns"): calls(*times)}
    if child:
        samples[SampleKey(3, FORWARD, 0, "cpu", "cpu_ns")] = calls(*[0] * child)
    return replace(run, samples=samples)


def test_the_figures_of_a_layer() -> None:
    """40 ms in all; 30 us for each of 4 calls, 100 operators and 50 calls below decide, but may go as well."""
    [advice] = of(layer(child=50))
    assert advice.layer == "Net.b" and advice.gain_ns == 40 * MS
    assert advice.finding == f"No operator runs for 40.000ms of 4 calls: {UNKNOWN_REASON}."
    assert advice.remedy == FIND_THE_LINE


def test_time_of_calls_beyond_the_median_is_subtracted() -> None:
    """36.88 of 40 ms remain, less 5 ms: the rest must be 5 % of the time."""
    times = (11, 11, 16, 11)
    assert of(layer(times=times, wall_ns=20 * 31_880_000))[0].gain_ns == 40 * MS
    assert of(layer(times=times, wall_ns=20 * 31_880_001)) == []
    assert of(layer(wall_ns=20 * 36_880_000))[0].gain_ns == 40 * MS


def test_time_of_layers_below_beyond_their_median_is_not_subtracted() -> None:
    """40 ms less 30 us for each of 108 calls, and less 10 - 7 ms."""
    below = {SampleKey(3, FORWARD, 0, "cpu", "cpu_ns"): calls(8, 1, 1, 1)}
    for ns, told in ((33_760_000, 1), (33_760_001, 0)):
        run = layer(times=(21, 11, 11, 11), wall_ns=20 * ns)
        assert len(of(replace(run, samples={**run.samples, **below}))) == told


def test_the_finding_names_the_line_that_was_sampled_most() -> None:
    run = layer()
    seen = [
        row(2, python_line("net.py:5 forward"), calls=2),
        row(2, label("mine"), python_line("net.py:7 forward"), calls=3),
        row(2, python_line("net.py:9 forward"), calls=9, phase=RECOMPUTE),
        row(0, python_line("net.py:1 forward"), calls=9),
    ]
    rows = [one for one in run.rows if one]
    with_lines = run_of(
        [
            *(
                (run.layers.index(one.layer), one.phase, (), one.frames, "cpu", one.calls, one.cost, (), 0)
                for one in rows
            ),
            *seen,
        ],
        wall_ns=100 * MS,
    )
    [advice] = of(replace(with_lines, samples=run.samples))
    assert advice.finding.endswith("this is Python between operators, most often at net.py:7 forward.")


def test_the_gain_is_at_most_the_idle_time_of_the_device() -> None:
    assert of(layer(busy_ns=(("cuda:0", 90 * MS),), **CUDA))[0].gain_ns == 10 * MS
    assert of(layer(busy_ns=(("cuda:0", 100 * MS),), **CUDA)) == []


@pytest.mark.parametrize(
    "run",
    [
        layer(ops=1000),  # 30 ms of 40 are calls of operators
        layer(wall_ns=1000 * MS),  # 4 % of the time
        layer(wall_ns=750 * MS),  # 5.3 %, and 4.9 % without the calls of operators
        layer(times=(50, 1, 1, 1)),
        layer(child=600),
    ],
)
def test_other_layers_are_not_reported(run: Run) -> None:
    assert of(run) == []


def test_compiled_layers_and_work_outside_layers_are_not_reported() -> None:
    run = layer()
    layers = (*run.layers[:2], replace(run.layers[2], compiled=True), *run.layers[3:])
    assert of(replace(run, layers=layers, rows=replace(run.rows, layers=layers))) == []
    assert of(run_of([row(OUTSIDE, calls=1, cpu_ns=90 * MS)], wall_ns=100 * MS)) == []


@pytest.mark.parametrize(("of_torch", "found"), [(True, 0), (False, 1), (None, 0)])
def test_torchs_own_layers_are_not_reported(of_torch: bool | None, found: int) -> None:
    """A Conv2d, whose first calls choose an algorithm; a layer of a trace, which may be anything."""
    run = layer()
    layers = (*run.layers[:2], replace(run.layers[2], of_torch=of_torch), *run.layers[3:])
    assert len(of(replace(run, layers=layers, rows=replace(run.rows, layers=layers)))) == found


def test_without_recorded_operators_python_is_not_reported() -> None:
    """A trace of device activity alone: operators may run between its ranges."""
    run = run_of([row(2, calls=4, cpu_ns=90 * MS), row(2, kernel("gemm"), device="cuda:0", device_ns=MS)], **CUDA)
    run = lasting(replace(run, samples={SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_gap_ns"): calls(20, 20)}), 100 * MS)
    assert of(run) == of(run, "python_in_the_loop") == []


# The loop


def test_python_in_a_real_loop_is_reported() -> None:
    model = nn.Linear(16, 16)
    with Profile(model, lines=False) as prof:
        for _ in range(4):
            busy(0.01)
            model(torch.ones(4, 16)).sum().backward()
            prof.step()
    [advice] = of(prof.run, "python_in_the_loop")
    own = [row for row in prof.run.rows if row.layer is None and not row.frames and row.phase == "other"]
    assert advice.layer == "(outside)" and advice.gain_ns == sum(row.cost.cpu_ns for row in own) > 30 * MS
    assert f": {UNKNOWN_REASON}." in advice.finding


def test_python_in_a_loop_without_steps_is_reported() -> None:
    model = nn.Linear(16, 16)
    with Profile(model) as prof:
        busy(0.04)
        model(torch.ones(4, 16))
    [advice] = of(prof.run, "python_in_the_loop")
    assert 30 * MS < (advice.gain_ns or 0) <= prof.run.meta.wall_ns


def loop(*gaps_ms: int, ops: int = 100, wall_ms: int = 100, **meta: Any) -> Run:
    rows = [
        row(OUTSIDE, op("aten::sum"), calls=ops, cpu_ns=5 * MS),
        row(OUTSIDE, op("aten::sum"), op("aten::to"), calls=500, cpu_ns=5 * MS),
        row(2, op("X"), phase=BACKWARD, calls=60, cpu_ns=5 * MS),
        row(2, op("X"), op("aten::mm"), phase=BACKWARD, calls=500, cpu_ns=5 * MS),
        row(2, op("aten::mm"), calls=500, cpu_ns=5 * MS),
        row(0, calls=4),
        row(OUTSIDE, cpu_ns=sum(gaps_ms) * MS),
        row(OUTSIDE, label("enumerate(DataLoader)#x"), cpu_ns=MS),
        row(OUTSIDE, label("Optimizer.step#SGD.step"), cpu_ns=MS),
    ]
    run = run_of(rows, wall_ns=wall_ms * MS, steps=len(gaps_ms), **meta)
    samples = {}
    if gaps_ms:
        samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_gap_ns")] = calls(*gaps_ms)
    return replace(run, samples=samples)


def lasting(run: Run, wall_ns: int) -> Run:
    return replace(run, metas=(replace(run.metas[0], wall_ns=wall_ns),))


def test_the_figures_of_a_loop() -> None:
    """45 ms in all; less 5 in the first step, and 30 us for each of 100 operators, 60 nodes and 4 calls of the model,
    it must be 5 % of the time."""
    left = 40_000_000 - 30_000 * 164
    [advice] = of(lasting(loop(15, 10, 10, 10), 20 * left), "python_in_the_loop")
    assert of(lasting(loop(15, 10, 10, 10), 20 * left + 20), "python_in_the_loop") == []
    assert advice.gain_ns == 45 * MS
    assert advice.finding == (f"No operator and no layer runs for 45.000ms: {UNKNOWN_REASON}.")


def test_the_gain_of_a_loop_is_at_most_the_idle_time_of_the_device() -> None:
    run = loop(10, 10, 10, 10, busy_ns=(("cuda:0", 90 * MS),), **CUDA)
    assert of(run, "python_in_the_loop")[0].gain_ns == 10 * MS


@pytest.mark.parametrize(
    "run",
    [
        loop(),
        loop(40, 1, 1, 1),  # the first step alone
        loop(10, 10, 10, 10, wall_ms=1000),
        loop(10, 10, 10, 10, wall_ms=750),  # 5.3 % of the time, and 4.7 % without the calls of operators
        loop(10, 10, 10, 10, ops=700),  # 21 ms for the operators
    ],
)
def test_other_loops_are_not_reported(run: Run) -> None:
    assert of(run, "python_in_the_loop") == []


@pytest.mark.parametrize("name", ["DistributedDataParallel.forward", "mine"])
def test_time_in_a_label_without_operators_is_not_called_python(name: str) -> None:
    """Nothing says what runs there: DistributedDataParallel waits for other ranks in such a label of torch."""

    class Wrapped(Layers):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.profiler.record_function(name):
                busy(0.03)
            return self.fc(x)

    model = Wrapped(fc=nn.Linear(16, 16))
    model(torch.ones(4, 16))
    with Profile(model, lines=False) as prof:
        for _ in range(2):
            model(torch.ones(4, 16))
    (advice,) = of(prof.run)
    assert advice.layer == "Wrapped" and UNKNOWN_REASON in advice.finding and "Replace" not in advice.remedy
