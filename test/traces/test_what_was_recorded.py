"""What a trace has of a device, and what it lacks: extents, lost kernels, kernels that cannot be. A second program,
``build.intervals``, counts the same without torchprof."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
from build.intervals import events_of, interval, length
from build.trace_files import kernel, op, session, trace_event, write

import torchprof
from torchprof import Run
from torchprof.advise import advise
from torchprof.run.words import Frame, FrameKind

A100 = Path(__file__).parents[3] / "shared" / "traces" / "a100_ddp_train_rank0_of_2.json.gz"
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


def launches(count: int, start: float = 0, ns: float = 41, every: float = 100) -> list[dict[str, Any]]:
    """Operators that launch a kernel each, one every 100 us."""
    events = []
    for number in range(1, count + 1):
        at = start + every * (number - 1)
        events += [
            op("aten::mm", at, 60, External_id=number),
            trace_event("cuda_runtime", "cudaLaunchKernel", at + 10, 8, External_id=number, correlation=number),
            kernel("gemm", at + 25, ns, device=0, stream=7, correlation=number, External_id=number),
        ]
    return events


def read(folder: Path, events: list[dict[str, Any]]) -> Run:
    return torchprof.from_trace(write(folder / "trace.json", {"traceEvents": events}))


def warned(run: Run, code: str) -> list[dict[str, Any]]:
    return [dict(warning.facts) for warning in run.warnings if warning.code == code]


def test_time_of_the_session_outside_of_all_events_is_in_no_figure(tmp_path: Path) -> None:
    """A session of 30 ms has one step of 3.77 ms, in which the device works for 41 us of each 100."""
    marks = [session(0, 30_000), trace_event("user_annotation", "ProfilerStep#0", 11_900, 3_770)]
    run = read(tmp_path, [*marks, *launches(37, 11_910)])
    [time] = run.device_use
    assert run.meta.wall_ns == 3_770_000
    assert (time.busy_ns, time.span_ns) == (37 * 41_000, 36 * 100_000 + 41_000)
    assert warned(run, "session_outside") == [{"before_ns": 11_900_000, "after_ns": 30_000_000 - 15_670_000}]
    share = f"{time.idle_ns / time.span_ns:.0%}"
    for report in ("headline", "device", "top"):
        assert share in run.report(report) or f"{time.idle_ns / time.span_ns:.1%}" in run.report(report)
    gains = [finding.gain_ns or 0 for finding in advise(run)]
    assert gains and sum(gains) <= run.meta.wall_ns


def test_kernels_without_their_launch_in_the_trace_are_counted(tmp_path: Path) -> None:
    events = launches(100)
    kept = [event for event in events if event["cat"] != "kernel" or event["args"]["correlation"] % 10]
    run = read(tmp_path, kept)
    assert warned(run, "kernels_lost") == [{"lost": 10, "launched": 100, "unknown": True}]
    assert "device_ns" not in run.meta.measured and not run.device_use
    assert not any("idle" in run.report(name).splitlines()[0] for name in ("headline", "top"))
    nearly = [event for event in launches(200) if event["cat"] != "kernel" or event["args"]["correlation"] != 3]
    run = read(tmp_path, nearly)
    assert warned(run, "kernels_lost") == [{"lost": 1, "launched": 200, "unknown": False}]
    assert "device_ns" in run.meta.measured
    assert not warned(read(tmp_path, launches(100)), "kernels_lost")


def test_launches_while_a_graph_is_captured_run_no_kernel(tmp_path: Path) -> None:
    captured = [event for event in launches(50, 20_000) if event["cat"] != "kernel"]
    for event in captured:
        event["args"] = {name: number + 1000 for name, number in event["args"].items()}
    capture = [
        trace_event("cuda_runtime", "cudaStreamBeginCapture", 19_990, 5, correlation=900),
        trace_event("cuda_runtime", "cudaStreamEndCapture", 25_100, 5, correlation=901),
    ]
    run = read(tmp_path, [*launches(20), *captured, *capture])
    assert not warned(run, "kernels_lost") and "device_ns" in run.meta.measured


def test_kernels_that_overlap_on_their_stream_cannot_be_right(tmp_path: Path) -> None:
    """The fifth of 20 kernels takes 1.6 s, and covers the 15 after it."""
    events = launches(20)
    [fifth] = [event for event in events if event["cat"] == "kernel" and event["args"]["correlation"] == 5]
    fifth["dur"] = 1_600_000
    run = read(tmp_path, events)
    assert warned(run, "kernels_overlap") == [{"overlapping": 15, "kernels": 20, "unknown": True}]
    assert "device_ns" not in run.meta.measured and "100.0%" not in run.report("headline")
    fifth["dur"] = 100 + 5  # it ends 5 us after the next one has begun: programmatic dependent launch
    assert not warned(read(tmp_path, events), "kernels_overlap")


def test_kernels_of_nccl_show_their_collective(tmp_path: Path) -> None:
    """As torch records all_to_all: the launch is inside of nccl's range, which is in record_param_comms."""
    call = op("c10d::alltoall_base_", 0, 100, External_id=1)
    comms = op("record_param_comms", 10, 80, External_id=2)
    named = trace_event("user_annotation", "nccl:all_to_all", 20, 60, External_id=3)
    launch = trace_event("cuda_runtime", "cudaLaunchKernelExC", 30, 8, External_id=2, correlation=9)
    work = kernel("ncclDevKernel_SendRecv", 50, 500, device=0, stream=20, correlation=9, External_id=2)
    run = read(tmp_path, [call, comms, named, launch, work])
    top = run.report("top")
    assert "nccl:all_to_all" in top.split("CPU time")[0] and "(between ops)" not in top.split("CPU time")[0]


@pytest.mark.skipif(not A100.exists(), reason="needs the recorded trace")
def test_a_second_program_counts_the_same_in_a_recorded_trace() -> None:
    run = torchprof.from_trace(A100)
    events = events_of(A100)
    work = [interval(event) for event in events if event.get("cat") in ON_DEVICE]
    [time] = run.device_use
    assert abs(time.busy_ns - length(work)) < 1000
    assert abs(time.span_ns - (max(end for _, end in work) - min(start for start, _ in work))) < 1000
    inside = [*ON_DEVICE, "cpu_op", "user_annotation", "cuda_runtime"]
    every = [interval(event) for event in events if event.get("cat") in inside]
    assert abs(run.meta.wall_ns - (max(end for _, end in every) - min(start for start, _ in every))) < 1000


@pytest.mark.skipif(not A100.exists(), reason="needs the recorded trace")
@pytest.mark.parametrize("share", [0.001, 0.3, 0.9, 1.0])
def test_lost_kernels_never_raise_idle_without_a_warning(share: float, tmp_path: Path) -> None:
    events = events_of(A100)
    dice = random.Random(5)
    kept = [event for event in events if event.get("cat") not in ON_DEVICE or dice.random() >= share]
    lost = len(events) - len(kept)
    whole, some = torchprof.from_trace(A100), read(tmp_path, kept)
    idle = {name: sum(time.idle_ns for time in run.device_use) for name, run in (("all", whole), ("some", some))}
    assert lost and (idle["some"] <= idle["all"] or warned(some, "kernels_lost"))
    assert share < 0.1 or not some.device_use


def steps_of(count: int, ms: float, start: float = 0) -> list[dict[str, Any]]:
    return [
        trace_event("user_annotation", f"ProfilerStep#{number}", start + 1000 * ms * number, 1000 * ms)
        for number in range(count)
    ]


def test_making_the_context_is_start_up_and_in_no_step(tmp_path: Path) -> None:
    """It takes 981 ms inside an operator. Then each of 40 steps of 24.5 ms has 200 kernels, of 43 us each: the device
    is idle for 24.5 - 8.6 = 15.9 ms of a step."""
    called = trace_event("cuda_runtime", "cudaFree", 100, 981_000, correlation=9999)
    before = [op("aten::empty", 50, 981_100, External_id=9998), called]
    run = read(tmp_path, [*before, *steps_of(40, 24.5, 990_000), *launches(8000, 990_100, 43, 24_500 / 200)])
    start_up = Frame(FrameKind.START_UP, "cudaFree")
    assert run.rows.total("cpu_ns", frames=lambda frames: frames[:1] == (start_up,)) == 981_000_000
    assert run.rows.total("cpu_ns", frames=lambda frames: "aten::empty" in {frame.name for frame in frames}) == 100_000
    [bound] = [finding for finding in advise(run) if "launch-bound" in finding.finding]
    assert bound.gain_ns is not None and 15e6 < bound.gain_ns / 40 <= 15.9e6
    for text in (run.report("headline"), run.report("top")):
        assert "start-up" in text and "idle" in text


@pytest.mark.parametrize("name", ["cudaHostAlloc", "cudaLaunchKernel", "cudaFree"])
def test_what_may_wait_or_work_is_no_start_up(name: str, tmp_path: Path) -> None:
    """Page-locked memory takes long at any time, a launch may wait for a full queue, and of lost kernels it is unknown
    when they ran."""
    lost = trace_event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=99_999) if name == "cudaFree" else None
    events = [trace_event("cuda_runtime", name, 100, 24_000, correlation=9999), *launches(20, 30_000)]
    run = read(tmp_path, [*events, *filter(None, [lost])])
    assert not run.rows.total("cpu_ns", frames=lambda frames: frames[:1] == (Frame(FrameKind.START_UP, name),))


def test_the_start_of_a_loaders_workers_is_no_wait_of_each_step(tmp_path: Path) -> None:
    """The first batch takes 1.94 s, later ones 216 ms, and the rest of each step 57 ms."""
    events, at = [], 0.0
    for number in range(38):
        wait = 1_940_000 if number == 0 else 216_000
        events += [
            trace_event("user_annotation", f"ProfilerStep#{number}", at, wait + 57_000),
            trace_event("user_annotation", "enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", at, wait),
            op("aten::mm", at + wait, 57_000),
        ]
        at += wait + 57_000
    run = read(tmp_path, events)
    [finding] = [finding for finding in advise(run) if "DataLoader" in finding.remedy]
    said = f"{finding.finding} {run.report('headline')}"
    assert set(re.findall(r"([\d.]+m?s) (?:a|per) step", said)) <= {"216.000ms", "216ms"}
    assert finding.gain_ns is not None and finding.gain_ns / 38 <= 216e6


def test_exposed_communication_is_that_of_the_layers_it_names(tmp_path: Path) -> None:
    """Of 313 ms, 60 are in the first layer, and the rest in others."""
    events, at = [], 0.0
    times = {"embedding": 60, "attention": 90, "mlp": 85, "head": 78}
    for number, (name, ms) in enumerate(times.items(), 1):
        call = 10 * number
        events += [
            trace_event("user_annotation", name, at, 1000),
            op("aten::mm", at + 10, 100, External_id=call),
            trace_event("cuda_runtime", "cudaLaunchKernel", at + 20, 8, External_id=call, correlation=call),
            kernel("gemm", at + 60, 10_000, device=0, stream=7, correlation=call, External_id=call),
            op("c10d::allreduce_", at + 200, 100, External_id=call + 1),
            trace_event("cuda_runtime", "cudaLaunchKernel", at + 220, 8, External_id=call + 1, correlation=call + 1),
            kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", at + 10_060, 1000 * ms, device=0, stream=20,
                   correlation=call + 1, External_id=call + 1),
        ]  # fmt: skip
        at += 10_060 + 1000 * ms
    run = read(tmp_path, events)
    exposed = [finding for finding in advise(run) if "Exposed communication" in finding.finding]
    assert [finding.gain_ns for finding in exposed] == [313_000_000]
    assert "embedding" not in exposed[0].layer and "313.000ms" in exposed[0].finding
    assert "60.000ms" in run.report("collectives")
