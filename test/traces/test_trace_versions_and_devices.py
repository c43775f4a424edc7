"""``from_trace`` of traces of other versions of torch, and of devices."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import DoublesInside, Mlp
from build.trace_files import trace_event, write
from build.traced_runs import X, annotated, assert_same, names_of, settle, trace_in, training, two_steps
from build.warnings import sentences
from torch.profiler import record_function

import torchprof
from torchprof.analyze import records
from torchprof.reports.page.data import page_data
from torchprof.reports.page.layers import Take


def as_torch_1_12_wrote_it(path: Path) -> dict[str, Any]:
    """The same trace with the old categories, and the thread IDs of operators as text."""
    whole = trace_in(path)
    for event in whole["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            event.update(cat="Operator", tid=str(event["tid"]))
        elif event.get("cat") == "fwdbwd":
            event["cat"] = "forward_backward"
    return whole


@pytest.mark.parametrize("shapes", [True, False], ids=["with shapes", "without"])
def test_old_traces_give_the_same_run(shapes: bool, trace: Path, tmp_path: Path) -> None:
    model = DoublesInside()
    x = X.clone().requires_grad_()

    def step() -> None:
        with record_function("## forward ##"):
            y = model(x).relu()
        with record_function("## backward ##"):
            y.sum().backward()

    settle(step)
    with torch.profiler.profile(record_shapes=shapes, profile_memory=True) as theirs:
        step()
    theirs.export_chrome_trace(str(trace))
    new = torchprof.from_trace(trace)
    assert names_of(new) == ["## forward ##", "## backward ##"]
    old = torchprof.from_trace(write(tmp_path / "old.json", as_torch_1_12_wrote_it(trace)))
    assert_same(new, old)


def test_kernels_without_a_launch_have_a_row_of_their_own(trace: Path) -> None:
    events = [
        trace_event("user_annotation", "forward", 0, 50),
        trace_event("cpu_op", "aten::mm", 10, 20, External_id=2),
        trace_event("cuda_runtime", "cudaLaunchKernel", 12, 5, correlation=5),
        trace_event("kernel", "gemm", 40, 8, External_id=2, correlation=5, device=0, stream=7),
        trace_event("kernel", "gemm", 60, 3.5, External_id=90, correlation=91, device=0, stream=7),
        trace_event("gpu_user_annotation", "forward", 40, 30),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    kernels = {
        (row.layer and row.layer.name, tuple(frame.name for frame in row.frames)): row.cost.device_ns
        for row in run.rows
        if row.cost.device_ns
    }
    assert kernels == {("forward", ("aten::mm", "gemm")): 8000, (None, ("(launch not recorded)", "gemm")): 3500}
    assert "(launch not recorded)" in run.report("tree", show_events=True)


def test_kernels_launched_before_the_recording_are_in_no_total(trace: Path, tmp_path: Path) -> None:
    """They have a row and a warning; everything else is as without them."""
    run = torchprof.from_trace(write(trace, two_steps(8)))
    bare = torchprof.from_trace(write(tmp_path / "bare.json", two_steps(0)))
    assert sum(run.rows.columns["device_ns"]) == 8 * 3_000 + 18_000
    assert run.left_over.device_ns == 8 * 3_000
    assert run.tree().total.device_ns + run.no_layer("forward").device_ns == 18_000
    warnings = [one for one in sentences(run) if "launched before" in one]
    assert [one[:72] for one in warnings] == [
        "8 kernels were launched before the recording began: 24.000us, 57.1% of t"
    ]
    assert {key: spread for key, spread in run.samples.items() if key.measure.startswith("step_")} == {
        key: spread for key, spread in bare.samples.items() if key.measure.startswith("step_")
    }
    assert run.lockstep == bare.lockstep
    compared = torchprof.compare(bare, run).report("table").splitlines()
    assert compared[:-1] == torchprof.compare(bare, bare).report("table").splitlines()
    assert compared[-1].startswith("After: 8 kernels were launched before")
    for name in ("headline", "top"):
        assert run.report(name).splitlines()[2:6] == bare.report(name).splitlines()[2:6]
    (line,) = [line for line in run.report("tree", percent=True).splitlines() if line.startswith("(launched before")]
    assert line.split()[-2:] == ["24.000us", "|"]
    with_shares = [
        line for line in run.report("tree", percent=True).splitlines() if line.startswith(("forward", "(out"))
    ]
    assert with_shares == [
        line for line in bare.report("tree", percent=True).splitlines() if line.startswith(("forward", "(out"))
    ]
    for name in ("ops", "kernels"):
        shares = [
            line.count("%") for line in run.report(name).splitlines() if "(launched before" in line and "|" in line
        ]
        assert shares == [0]
        assert "18.000us" in next(line for line in run.report(name).splitlines() if line.startswith("100 %"))


def test_kernels_launched_before_the_recording_are_in_every_export(trace: Path) -> None:
    run = torchprof.from_trace(write(trace, two_steps(8)))
    for table in ("layers", "operators", "rows"):
        frame = records.records_of(run, table)
        layer, ns = list(frame.columns).index("layer"), list(frame.columns).index("self_device_ns")
        sums: Counter[Any] = Counter()
        for record in frame.records:
            sums[record[layer]] += record[ns]
        assert sums == {"forward": 16_000, "(outside)": 2_000, "(launched before the recording)": 24_000}
    page = page_data([Take("", run)])
    node = len(page["layers"]["name"]) + 2
    assert page["names"][2] == "(launched before the recording)"
    (column,) = (
        number
        for number, of in enumerate(page["columns"])
        if (of["where"], of.get("field"), of.get("phase"), of.get("self")) == ("chart", "device_ns", -1, False)
    )
    figures = page["figures"]
    assert figures["vectors"][figures["values"][0][column]][node] == 24_000
    (device,) = run.device_times  # busy time includes these kernels
    assert device.busy_ns == 8 * 3_000 + 18_000


@pytest.mark.parametrize("with_launches", [False, True])
def test_a_trace_without_cpu_events_shows_kernels_and_nothing_about_the_cpu(
    with_launches: bool, trace: Path, cli: Any
) -> None:
    """CPU work was not recorded, so nothing counts as Python. Runtime calls are recorded with the device."""
    name = "void at::native::gemm<float>(int)"
    events = [trace_event("kernel", name, 10 * at, 8, correlation=5 + at, device=0, stream=7) for at in range(5)]
    if with_launches:
        events += [trace_event("cuda_runtime", "cudaLaunchKernel", 10 * at, 1, correlation=5 + at) for at in range(5)]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert (run.meta.requested, run.meta.measured) == (("device_ns",), ("device_ns",))
    assert dict(run.meta.busy_ns) == {"cuda:0": 40_000}
    (warning,) = sentences(run)
    assert warning.startswith("trace.json has no operators, as if recorded without ProfilerActivity.CPU")
    assert "gemm<float>" in run.report("headline") and "CPU" not in run.report("headline")
    out = cli("show", str(trace)).out
    assert "Python" not in out and "CPU time" not in out and "Between the operators" not in out
    assert "The kernels\n" in out and "gemm<float>" in out.partition("The kernels\n")[2]


def test_kernels_launched_before_the_recording_make_no_rank_a_straggler(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{rank}.json", two_steps(8 * rank, rank)) for rank in (0, 1)]
    assert "No straggler found" in torchprof.from_trace(files).report("ranks")


@pytest.mark.parametrize("shapes", [{}, {"Input_Dims": [[4]], "Input_type": ["float"]}], ids=["bare", "with shapes"])
def test_an_old_collective_contains_no_work_that_runs_before_it_ends(shapes: dict[str, Any], trace: Path) -> None:
    events = [
        trace_event("Operator", "nccl:all_reduce", 5, 1000, **shapes),
        trace_event("Operator", "layer", 20, 30),
        trace_event("Operator", "aten::mm", 21, 5),
        trace_event("Operator", "aten::mm", 61, 5),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert dict(run.meta.busy_ns) == {"cpu": 30_000 + 5000}
    of_collective = [row for row in run.rows if any(frame.name == "nccl:all_reduce" for frame in row.frames)]
    assert [(len(row.frames), row.cost.cpu_ns) for row in of_collective] == [(1, 0)]


COPIES = [("Memcpy HtoD (Pageable -> Device)", 20, 9), ("Memcpy DtoD (Device -> Device)", 30, 11)]


@pytest.mark.parametrize("numbers", ["External ids", "correlations alone"])
def test_copies_count_in_their_step_with_external_ids_and_without(numbers: str, trace: Path) -> None:
    """The first operator copies to the device: 5 us of the CPU and 7 us of the device. The second copies within it."""
    events = [trace_event("user_annotation", f"ProfilerStep#{at}", 100 * at + 0.5, 99) for at in range(2)]
    for name, start, correlation in COPIES:
        of_op = {"External_id": correlation + 100} if numbers == "External ids" else {}
        events += [
            trace_event("cpu_op", "aten::copy_", start, 8, **of_op),
            trace_event("cuda_runtime", "cudaMemcpyAsync", start + 1, 5, correlation=correlation, **of_op),
            trace_event("gpu_memcpy", name, start + 30, 7, correlation=correlation, device=0, stream=7, **of_op),
        ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    found = {(key.measure, key.device): list(spread.sample) for key, spread in run.samples.items() if key.layer < 0}
    assert found["step_copy_ns", "cpu"] == [0, 5000]
    assert found["step_copy_ns", "cuda:0"] == [0, 7000]
    assert found["step_other_ns", "cpu"] == [0, 8000 + 8000 - 5000]
    assert found["step_other_ns", "cuda:0"] == [0, 7000]


def test_several_processes_in_one_file_give_a_warning(trace: Path) -> None:
    """External ids, correlation IDs and sequence numbers are the same in both processes."""
    own = [trace_event("user_annotation", "forward", 0.5, 100), trace_event("cpu_op", "aten::a", 1, 10, External_id=5)]
    others = [{**one, "pid": 2} for one in own]
    (warning,) = sentences(torchprof.from_trace(write(trace, {"traceEvents": own + others})))
    assert warning.startswith("trace.json has events of 2 processes")
    assert not sentences(torchprof.from_trace(write(trace, {"traceEvents": own})))


def test_backward_without_sequence_numbers_has_no_layer_and_gives_a_warning(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    assert not sentences(torchprof.from_trace(trace))
    whole = trace_in(trace)
    for one in whole["traceEvents"]:
        for key in ("Sequence number", "Fwd thread id"):
            one.get("args", {}).pop(key, None)
    run = torchprof.from_trace(write(trace, whole))
    (warning,) = sentences(run)
    assert warning.startswith("trace.json has no sequence numbers")
    assert not [row for row in run.rows if row.phase == "backward" and row.layer]
    assert any(row.phase == "backward" for row in run.rows)


def test_backward_in_the_oldest_traces_has_no_layer_and_gives_a_warning(trace: Path) -> None:
    events = [
        trace_event("Operator", "forward", 0, 50),
        trace_event("Operator", "aten::mm", 5, 30),
        trace_event("Operator", "MmBackward", 100, 50, tid=2),
        trace_event("Operator", "aten::mm", 110, 30, tid=2),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert names_of(run) == ["forward"]
    of_backward = {row.frames[-1].name: row.cost.cpu_ns for row in run.rows if row.phase == "backward"}
    assert of_backward == {"MmBackward": 20_000, "aten::mm": 30_000}
    assert [warning[:40] for warning in sentences(run)] == ["trace.json has no sequence numbers, as i"]
