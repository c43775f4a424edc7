"""Findings on batches of few samples: rows made by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from build.hand_made import label, op, row, run_of

from torchprof.advise import Advice, advise
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, OUTSIDE

MS = 1_000_000


def of(run: Run) -> list[Advice]:
    return [one for one in advise(run) if one.rule == "tiny_batches"]


def called(batch: int = 2, calls: int = 20, op_ns: int = 5_000, python_ms: int = 0, same: bool | None = True) -> Run:
    """100 ms: 4,000 short operators, forward and backward, one long one, Python in the loop, and the gaps."""
    layer = Layer(("Net",), "Net", input_shapes=((batch, 8),), same_shapes=same)
    return run_of(work(calls, op_ns, python_ms), layers=[layer], wall_ns=100 * MS)


def work(calls: int = 20, op_ns: int = 5_000, python_ms: int = 0) -> list[Any]:
    return [
        row(0, calls=calls, cpu_ns=10 * MS),
        row(0, op("aten::relu"), calls=2000, cpu_ns=2000 * op_ns),
        row(0, op("ReluBackward0"), phase=BACKWARD, calls=2000, cpu_ns=2000 * op_ns),
        row(0, op("aten::mm"), calls=20, cpu_ns=15 * MS),
        row(OUTSIDE, cpu_ns=python_ms * MS),
    ]


def test_the_gain_is_most_of_what_is_in_no_long_operator() -> None:
    [advice] = of(called())
    assert advice.gain_ns == (100 - 15) * MS * 62 // 64 and advice.layer == "Net"
    assert advice.finding == (
        "A call gets 2 samples, and its operators are small. 85.000ms of the loop are in short operators and between "
        "them."
    )
    assert "batch_size=64" in advice.remedy


def test_a_larger_batch_has_fewer_steps_of_the_optimizer() -> None:
    run = called(batch=1)
    step = row(OUTSIDE, label("Optimizer.step#SGD.step"), op("aten::_fused_sgd_"), calls=20, cpu_ns=5 * MS)
    [advice] = of(run_of([*work(), step], layers=run.layers, wall_ns=100 * MS))
    assert advice.gain_ns == (100 - 15) * MS * 63 // 64


@pytest.mark.parametrize(
    "run",
    [
        called(batch=9),
        called(calls=9),
        called(op_ns=20_000),  # 80 ms in long operators
        called(python_ms=60),
        called(same=False),
        replace(called(), metas=(replace(called().meta, device="cuda", measured=("cpu_ns", "device_ns")),)),
    ],
    ids=["many samples", "few calls", "long operators", "Python", "shapes differ", "a device"],
)
def test_other_models_are_not_reported(run: Run) -> None:
    assert of(run) == []


@pytest.mark.parametrize(
    "threads, usable, ms, gain_ms",
    [(1, 8, 80, 60), (2, 8, 80, 40), (1, 4, 80, 40), (1, 2, 80, None), (3, 8, 80, None), (1, 8, 9, None)],
)
def test_products_on_few_threads(threads: int, usable: int, ms: int, gain_ms: int | None) -> None:
    """The gain is as if they ran on half of the usable processors: two of them may be one core."""
    rows = [row(0, op("aten::addmm"), calls=20, cpu_ns=ms * MS)]
    switches = (("num_threads", str(threads)), ("usable_cpus", str(usable)))
    found = [one for one in advise(run_of(rows, wall_ns=100 * MS, switches=switches)) if one.rule == "few_threads"]
    assert [one.gain_ns for one in found] == ([] if gain_ms is None else [gain_ms * MS])
    assert all(f"set_num_threads({usable // 2})" in one.remedy for one in found)


def test_short_products_gain_little_from_threads() -> None:
    rows = [row(0, op("aten::addmm"), calls=800, cpu_ns=80 * MS)]
    switches = (("num_threads", "1"), ("usable_cpus", "8"))
    assert not [one for one in advise(run_of(rows, wall_ns=100 * MS, switches=switches)) if one.rule == "few_threads"]
