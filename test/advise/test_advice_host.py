"""Advice about copies, waits and launches, on rows made by hand as a GPU gives them, each figure calculated by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from build.findings import of
from build.hand_made import FORWARD, kernel, label, op, row, run_of
from build.models import Layers
from build.raw_events import MARKED, MODEL, USER, Raw, attributed
from build.raw_events import kernel as raw_kernel
from torch import Tensor, nn

from torchprof import Profile
from torchprof.advise import advise, judge
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.run import Run
from torchprof.run.words import (
    BACKWARD,
    COMPILING,
    GARBAGE_COLLECTION,
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    OUTSIDE,
    Frame,
    FrameKind,
)

MS = 1_000_000
MEASURES = ("cpu_ns", "device_ns")
CUDA: dict[str, Any] = {"device": "cuda", "requested": MEASURES, "measured": MEASURES}
HTOD = "Memcpy HtoD (Pageable -> Device)"
PINNED = "Memcpy HtoD (Pinned -> Device)"
DTOH = "Memcpy DtoH (Device -> Pageable)"
DTOD = "Memcpy DtoD (Device -> Device)"
TO = (op("aten::to"), op("aten::_to_copy"), op("aten::copy_"))
ITEM = (op("aten::item"), op("aten::_local_scalar_dense"))


def on_cuda(rows: list[Any], wall_ns: int = 100 * MS, idle_ns: int = 50 * MS, **meta: Any) -> Run:
    """A run of so long in which the device did nothing for so long; of the CPU's time only the rows are known."""
    return run_of(rows, **{**CUDA, "wall_ns": wall_ns, "busy_ns": (("cuda:0", wall_ns - idle_ns),), **meta})


def called(run: Run, **calls: int) -> Run:
    """The same, with so many forward calls of layers, by the last step of their path; each took 1 ms."""
    samples = dict(run.samples)
    for number, layer in enumerate(run.layers):
        if layer.path[-1] in calls:
            values = [(start, MS) for start in range(calls[layer.path[-1]])]
            samples[SampleKey(number, FORWARD, 0, "cpu", "cpu_ns")] = Spread.of(values)
    return replace(run, samples=samples)


def copies(layer: int, name: str = HTOD, phase: str = FORWARD) -> list[Any]:
    """Four copies: 6 ms of the CPU in the runtime's calls, 2 ms in the op around them, 4 ms of the device."""
    return [
        row(layer, *TO, calls=4, cpu_ns=2 * MS, phase=phase),
        row(layer, *TO, op("cudaMemcpyAsync"), calls=4, cpu_ns=5 * MS, phase=phase),
        row(layer, *TO, op("cudaStreamSynchronize"), calls=4, cpu_ns=1 * MS, phase=phase),
        row(layer, *TO, kernel(name), device="cuda:0", calls=4, device_ns=4 * MS, phase=phase),
    ]


def items(layer: int, *around: Any) -> list[Any]:
    """Eight values that Python asked for: 7 ms of the CPU in the runtime's calls, 1 ms in the ops around them."""
    return [
        row(layer, *around, *ITEM, calls=8, cpu_ns=1 * MS),
        row(layer, *around, *ITEM, op("cudaMemcpyAsync"), calls=8, cpu_ns=2 * MS),
        row(layer, *around, *ITEM, op("cudaStreamSynchronize"), calls=8, cpu_ns=5 * MS),
        row(layer, *around, *ITEM, kernel(DTOH), device="cuda:0", calls=8, device_ns=MS // 2),
    ]


# Copies in layers


def test_copies_in_a_layer_are_reported() -> None:
    run = called(on_cuda(copies(1)), a=2)
    [advice] = of(run, "copies_in_layers")
    assert advice.layer == "Net.a"
    assert advice.finding == (
        "4 copies between CPU and cuda in 2 forward calls (all in aten::to) take 6.000ms on the CPU and 4.000ms on "
        "the device."
    )
    assert advice.gain_ns == 6 * MS and advice.gain_bytes is None
    assert "register_buffer" in advice.remedy


def test_the_gain_of_copies_is_at_most_the_idle_and_copy_time_of_the_device() -> None:
    """It is idle for 1 ms and copies for 2·4: of the 12 ms that the CPU is in copies 9 can be saved, half in each."""
    run = on_cuda([*copies(1, DTOH), *copies(3)], idle_ns=1 * MS)
    found = of(run, "copies_in_layers")
    assert [(one.layer, one.gain_ns) for one in found] == [("Net.a", 9 * MS // 2), ("Net.b.0", 9 * MS // 2)]


@pytest.mark.parametrize(
    "rows, meta",
    [
        (copies(1, DTOD), {}),
        (copies(1, "Memset (Device)"), {}),
        (copies(1, "Memcpy HtoDevice, a kernel of somebody's"), {}),
        (copies(OUTSIDE), {}),
        (copies(NOT_SELECTED), {}),
        (items(1), {}),
        (copies(1), {"wall_ns": 1000 * MS}),  # 6 ms of a second are not worth it
    ],
)
def test_other_copies_are_not_reported(rows: list[Any], meta: dict[str, Any]) -> None:
    assert of(on_cuda(rows, **meta), "copies_in_layers") == []


def test_copies_in_backward_count_for_their_layer() -> None:
    [advice] = of(on_cuda([*copies(1), *copies(1, phase=BACKWARD)]), "copies_in_layers")
    assert advice.gain_ns == 12 * MS and advice.finding.startswith(
        "8 copies between CPU and cuda (all in aten::to) take "
    )


@MARKED
def test_copies_and_waits_as_torch_records_them() -> None:
    """The runtime's calls are linked to the op that they run in, and so is the work of the device."""

    def runtime(name: str, start: int, end: int, linked: int) -> Raw:
        return Raw(name, start, end, 4321, _correlation=8000 + start, _linked=linked)

    raws = [
        Raw(MODEL, 0, 9_000, _scope=USER, _correlation=1, _annotation=True),
        Raw("aten::to", 100, 2_000, _correlation=2),
        Raw("aten::_to_copy", 200, 1_900, _correlation=3),
        Raw("aten::copy_", 300, 1_800, _correlation=4),
        runtime("cudaMemcpyAsync", 400, 1_400, 4),
        runtime("cudaStreamSynchronize", 1_400, 1_700, 4),
        raw_kernel(HTOD, 500, 900, 4),
        Raw("aten::item", 3_000, 8_000, _correlation=5),
        Raw("aten::_local_scalar_dense", 3_100, 7_900, _correlation=6),
        runtime("cudaMemcpyAsync", 3_200, 3_300, 6),
        runtime("cudaStreamSynchronize", 3_400, 7_400, 6),
        raw_kernel(DTOH, 7_000, 7_100, 6),
    ]
    _, run = attributed(raws)
    run = replace(run, metas=(replace(run.meta, wall_ns=10_000, busy_ns=(("cuda:0", 500),)),))
    [copy] = of(run, "copies_in_layers")
    assert copy.gain_ns == 1_000 + 300 and copy.finding.startswith("1 copy between ")
    assert copy.finding.endswith(" takes 1.300us on the CPU and 0.400us on the device.")
    [wait] = of(run, "waits_for_values")
    assert wait.gain_ns == 100 + 4_000 and " 1 time in " in wait.finding and "(all in aten::item)" in wait.finding


# Batches from pageable memory


def loop(rows: list[Any], steps: int = 4, copy_ns: int = 5 * MS, wait_ns: int = 1 * MS, **meta: Any) -> Run:
    """Rows of a loop, and the time of its steps in copies and waiting, outside all layers."""
    run = on_cuda(rows, steps=steps, **meta)
    samples = {
        SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_copy_ns"): Spread.of([(1, copy_ns)]),
        SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_wait_ns"): Spread.of([(1, wait_ns)]),
        SampleKey(OUTSIDE, FORWARD, 0, "cuda:0", "step_copy_ns"): Spread.of([(1, 4 * MS)]),
    }
    return replace(run, samples=samples)


def test_batches_from_pageable_memory_are_reported() -> None:
    [advice] = of(loop(copies(OUTSIDE)), "pageable_batches")
    assert advice.layer == "(outside)" and advice.gain_ns == 6 * MS
    assert advice.finding == (
        "4 copies from pageable memory to cuda in 4 steps (all in aten::to) take 6.000ms on the CPU and 4.000ms on "
        "the device."
    )
    assert "pin_memory=True" in advice.remedy


def test_the_gain_of_pinning_is_limited_by_steps_and_by_the_idle_and_copy_time() -> None:
    assert of(loop(copies(OUTSIDE), copy_ns=2 * MS, wait_ns=0), "pageable_batches")[0].gain_ns == 2 * MS
    assert of(loop(copies(OUTSIDE), idle_ns=1 * MS), "pageable_batches")[0].gain_ns == (1 + 4) * MS


@pytest.mark.parametrize(
    "run",
    [
        loop(copies(OUTSIDE, PINNED)),
        loop(copies(OUTSIDE, DTOH)),
        loop(copies(OUTSIDE, "Memcpy HtoD (Host -> Device)")),  # ROCm does not say whether it was pinned
        loop(copies(1)),
        loop(copies(OUTSIDE), steps=0),
        loop(copies(OUTSIDE), steps=5),  # less than one a step
        loop(copies(OUTSIDE), copy_ns=0, wait_ns=0),  # before the steps: the model, most likely
    ],
)
def test_other_batches_are_not_reported(run: Run) -> None:
    assert of(run, "pageable_batches") == []


# Waits


def test_waits_in_a_layer_are_reported() -> None:
    run = called(on_cuda(items(3)), **{"0": 4})
    [advice] = of(run, "waits_for_values")
    assert advice.layer == "Net.b.0" and advice.gain_ns == 7 * MS
    assert advice.finding == (
        "The CPU synchronizes with cuda 8 times in 4 forward calls (all in aten::item). It waits 7.000ms, and then the "
        "device waits for work."
    )
    assert of(run, "copies_in_layers") == []


def test_a_wait_has_the_op_and_the_line_that_caused_it() -> None:
    [advice] = of(on_cuda(items(1, op("aten::masked_select"))), "waits_for_values")
    assert "8 times (all in aten::masked_select). " in advice.finding
    traced = op("aten::is_nonzero", (2,), stack=("net.py(7): forward", "train.py(3): main"))
    [advice] = of(on_cuda(items(1, label("mine"), traced)), "waits_for_values")
    assert "8 times (all in aten::is_nonzero at net.py(7): forward). " in advice.finding


def test_a_synchronize_in_a_layer_is_reported() -> None:
    rows = [row(1, op("cudaDeviceSynchronize"), calls=3, cpu_ns=3 * MS)]
    [advice] = of(on_cuda(rows), "waits_for_values")
    assert advice.gain_ns == 3 * MS and " 3 times (all in cudaDeviceSynchronize). " in advice.finding


def test_one_call_that_copies_and_waits_counts_once() -> None:
    rows = [row(1, *ITEM, op("hipMemcpyWithStream"), calls=8, cpu_ns=2 * MS)]
    [advice] = of(on_cuda(rows), "waits_for_values")
    assert advice.gain_ns == 2 * MS and "8 times" in advice.finding


def test_a_wait_costs_nothing_if_the_device_is_never_idle() -> None:
    assert of(on_cuda(items(1), idle_ns=0), "waits_for_values") == []
    assert of(on_cuda(items(1), idle_ns=3 * MS), "waits_for_values")[0].gain_ns == 3 * MS


@pytest.mark.parametrize(
    "rows",
    [
        copies(1),
        items(NOT_SELECTED),
        [row(1, *ITEM, calls=8, cpu_ns=5 * MS)],  # of a tensor on the CPU: the runtime is not called
        [row(1, op("aten::mm"), op("cudaLaunchKernel"), calls=8, cpu_ns=5 * MS)],
        [row(1, label("cudaDeviceSynchronize"), calls=8, cpu_ns=5 * MS)],
    ],
)
def test_calls_that_do_not_wait_are_not_reported(rows: list[Any]) -> None:
    assert of(on_cuda(rows), "waits_for_values") == []


def test_without_a_device_there_are_no_waits() -> None:
    assert of(run_of(items(1), wall_ns=100 * MS), "waits_for_values") == []
    assert of(run_of(items(OUTSIDE), wall_ns=100 * MS), "waits_for_values") == []


def test_waits_outside_all_layers_are_reported() -> None:
    [advice] = of(on_cuda(items(OUTSIDE), steps=8), "waits_for_values")
    assert advice.layer == "(outside)" and advice.gain_ns == 7 * MS
    assert " 8 times to read a value in 8 steps (all in aten::item). It waits 7.000ms" in advice.finding
    assert "detach()" in advice.remedy


@pytest.mark.parametrize(
    "rows",
    [
        [row(OUTSIDE, op("cudaDeviceSynchronize"), calls=3, cpu_ns=5 * MS)],
        items(OUTSIDE, label("Optimizer.step#LBFGS.step")),
        copies(OUTSIDE),
    ],
)
def test_other_waits_outside_all_layers_are_not_reported(rows: list[Any]) -> None:
    assert of(on_cuda(rows), "waits_for_values") == []


class Asks(Layers):
    """Asks for values in its forward, and copies."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x)
        if x.max() < 99:
            x = x[x.sum(1) < x.sum().abs().item() + 99]
        return x.to(torch.float64).cpu()


def test_on_the_cpu_alone_there_are_no_waits() -> None:
    model = Asks(fc=nn.Linear(8, 8))
    with Profile(model) as prof:
        for _ in range(5):
            model(torch.ones(4, 8)).sum().item()
    names = {row.frames[-1].name for row in prof.run.rows if row.frames}
    assert {"aten::item", "aten::is_nonzero", "aten::nonzero", "aten::to"} <= names  # all of it was recorded
    rules = {"copies_in_layers", "pageable_batches", "waits_for_values"}
    assert not rules & {one.rule for one in advise(prof.run)}


# Launches


def launches(kernels: int = 1000, cpu_ns: int = 60 * MS, device_ns: int = 20 * MS) -> list[Any]:
    return [
        row(1, op("aten::add"), op("cudaLaunchKernel"), calls=kernels, cpu_ns=cpu_ns // 2),
        row(1, op("aten::add"), calls=kernels, cpu_ns=cpu_ns // 2),
        row(1, op("aten::add"), kernel("add"), device="cuda:0", calls=kernels, device_ns=device_ns),
    ]


def launched_before(name: str) -> tuple[Any, ...]:
    return row(OUTSIDE, label(LAUNCHED_BEFORE), kernel(name), device="cuda:0", calls=1000, device_ns=5 * MS)


def test_a_device_that_waits_for_launches_is_reported() -> None:
    [advice] = of(on_cuda(launches(), idle_ns=80 * MS), "launches_slower_than_the_device")
    assert advice.layer == "Net" and advice.gain_ns == 60 * MS  # the CPU's time; idle were 80
    assert advice.finding == (
        "cuda is idle for 80% of the time from its first to its last work: the program is launch-bound. On average of "
        "1,000 kernels, the CPU takes 60.000us per kernel, and a kernel runs for 20.000us. The profiler slows down the "
        "CPU: without it, the device is idle for less time."
    )


def test_other_causes_of_idle_time_do_not_count_as_slow_launches() -> None:
    """90 ms idle, of which 40 for data, 5 for the first call: 45 are left. The CPU waits for 10 ms besides."""
    loading = label("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__")
    rows = [
        *launches(device_ns=10 * MS),
        row(OUTSIDE, loading, calls=4, cpu_ns=40 * MS),
        row(1, op("cudaStreamSynchronize"), calls=4, cpu_ns=10 * MS),
    ]
    run = on_cuda(rows, wall_ns=120 * MS, idle_ns=90 * MS)
    times = Spread.of([(0, 6 * MS), (1, 1 * MS), (2, 1 * MS)])
    run = replace(run, samples={SampleKey(0, FORWARD, 0, "cpu", "cpu_ns"): times})
    [advice] = of(run, "launches_slower_than_the_device")
    assert advice.gain_ns == (90 - 40 - 5) * MS
    assert f"takes {(60 - 5) / 1000 * 1000:.3f}us per kernel, " in advice.finding


@pytest.mark.parametrize(
    "rows, idle_ns",
    [
        (launches(), 30 * MS),  # busy for 70 %
        (launches(cpu_ns=30 * MS), 80 * MS),  # the CPU is in no operator either: somebody sleeps
        (launches(kernels=200), 80 * MS),  # 300 us a kernel: the CPU has work of its own
        (launches()[:2], 80 * MS),  # no kernel
        ([*launches(cpu_ns=10 * MS), row(1, op("cudaDeviceSynchronize"), cpu_ns=50 * MS)], 80 * MS),
        ([*launches(), row(OUTSIDE, label("enumerate(DataLoader)#x"), cpu_ns=50 * MS)], 80 * MS),
        *(
            ([*launches(cpu_ns=30 * MS), row(OUTSIDE, Frame(*meanwhile), cpu_ns=30 * MS)], 80 * MS)
            for meanwhile in (
                (FrameKind.GC, GARBAGE_COLLECTION),
                (FrameKind.PROFILER, "Instrumentation"),
                (FrameKind.START_UP, "cudaFree"),
                (FrameKind.REGION, COMPILING),
            )
        ),
        ([*launches(kernels=200), launched_before("gemm")], 80 * MS),  # 300 us for each of the 200 that it launched
    ],
)
def test_other_idle_time_is_not_reported(rows: list[Any], idle_ns: int) -> None:
    assert of(on_cuda(rows, idle_ns=idle_ns), "launches_slower_than_the_device") == []


def test_without_a_device_there_is_no_launch() -> None:
    assert of(run_of(launches(), wall_ns=100 * MS), "launches_slower_than_the_device") == []


def test_a_run_without_time_gives_no_finding() -> None:
    untimed = [row(1, *TO, kernel(HTOD), device="cuda:0"), row(1, *ITEM, op("cudaStreamSynchronize"))]
    assert {one.rule for one in advise(run_of(untimed, **CUDA)) if one.gain_ns is not None} == set()
    assert not judge(run_of(untimed, **CUDA)).failed


def test_copies_of_several_layers_are_one_finding() -> None:
    """Their sums, and the op that copies most often in all of them."""
    moved = kernel("Memcpy HtoD (Pinned -> Device)")

    def block(layer: int, calls: int, *ops: Any) -> list[tuple[Any, ...]]:
        copy, runtime = (
            row(layer, *ops, moved, device="cuda:0", calls=calls, device_ns=calls * MS),
            op("cudaMemcpyAsync"),
        )
        return [copy, row(layer, *ops, runtime, calls=calls, cpu_ns=2 * calls * MS)]

    rows = [*block(1, 2, op("aten::to")), *block(2, 3, op("aten::to")), *block(2, 4, op("aten::copy_"))]
    run = called(on_cuda(rows), a=2, b=5)
    blocks = [replace(run.layers[at], path=("Net", str(at)), kind="Block") for at in (1, 2)]
    run = replace(run, layers=(run.layers[0], *blocks))
    [advice] = of(run, "copies_in_layers")
    assert (advice.layer, advice.layers, advice.gain_ns) == ("Net.*", ("Net.2", "Net.1"), 18 * MS)
    assert advice.finding == (
        "9 copies between CPU and cuda in 7 forward calls (most often in aten::to) take 18.000ms on the CPU and "
        "9.000ms on the device. The largest gain is in Net.2: up to 14.000ms."
    )
