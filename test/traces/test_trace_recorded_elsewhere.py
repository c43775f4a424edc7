"""``from_trace`` of traces of real jobs, compared with sums over the events in the file."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from build.trace_files import exact_ns, write
from build.traced_runs import A100, MI250, NEEDS_TRACES, events_in, rows_of, samples_of, trace_in

import torchprof
from torchprof.run.run import Run
from torchprof.run.words import AUTOGRAD_ENGINE, Frame, FrameKind

BOTH = pytest.mark.parametrize("path", [A100, MI250], ids=["a100", "mi250"])
DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_WORK = ("cpu_op", "user_annotation", "cuda_runtime")


@cache
def run_of_file(path: Path) -> Run:
    return torchprof.from_trace(path)


@NEEDS_TRACES
@BOTH
def test_the_rows_have_all_device_work(path: Path) -> None:
    work = [event for event in events_in(path) if event.get("cat") in DEVICE_WORK]
    run = run_of_file(path)
    truth: Counter[str] = Counter()
    for event in work:
        truth[event["name"]] += exact_ns(event["dur"])
    found: Counter[str] = Counter()
    for row in run.rows:
        if row.frames and row.frames[-1].kind == "kernel":
            found[row.frames[-1].name] += row.cost.device_ns
    assert found == truth
    assert sum(row.cost.device_ns for row in run.rows) == sum(truth.values()) > 0
    assert sum(row.calls for row in run.rows if row.frames and row.frames[-1].kind == "kernel") == len(work)


def host_lanes(events: Iterable[dict[str, Any]]) -> dict[Any, list[tuple[int, int, dict[str, Any]]]]:
    """The ranges of each thread, outer before inner: start, end, event. Collectives get a length of 0."""
    lanes: defaultdict[Any, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["cat"] in HOST_WORK:
            lasts = 0 if event["name"].startswith("nccl:") else exact_ns(event["dur"])
            lanes[event["pid"], event["tid"]].append((exact_ns(event["ts"]), exact_ns(event["ts"]) + lasts, event))
    for lane in lanes.values():
        lane.sort(key=lambda one: (one[0], -one[1]))
    return lanes


@NEEDS_TRACES
@BOTH
def test_the_rows_have_all_cpu_time(path: Path) -> None:
    truth = 0
    for lane in host_lanes(events_in(path)).values():
        until = 0
        for start, end, _ in lane:
            if start >= until:
                truth += end - start
                until = end
    run = run_of_file(path)
    between_nodes = sum(
        row.cost.cpu_ns for row in run.rows if row.frames[-1:] == (Frame(FrameKind.OP, AUTOGRAD_ENGINE),)
    )
    idle = sum(row.cost.cpu_ns for row in run.rows if row.layer is None and not row.frames)
    assert sum(row.cost.cpu_ns for row in run.rows) - between_nodes - idle == truth > 0
    assert all(row.cost.cpu_ns >= 0 for row in run.rows)


@NEEDS_TRACES
def test_backward_belongs_to_the_operators_at_the_start_of_the_arrows() -> None:
    """An arrow leads from a forward operator to the node that it made: the calls of nodes by layer, counted by hand."""
    events = events_in(A100)
    lanes = host_lanes(events)
    arrows: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event.get("cat") == "fwdbwd":
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 543

    def is_node(name: str) -> bool:
        return name.endswith(("Backward0", "Backward1")) and ":" not in name

    def around(lane: Any, at: int, name: str) -> bool:
        return any(start <= at < end and event["name"] == name for start, end, event in lane)

    ours = "DistributedDataParallel.forward"
    nodes: dict[Any, bool] = {}
    for arrow in arrows.values():
        start, end = arrow["s"], arrow["f"]
        nodes[end["tid"], exact_ns(end["ts"])] = around(lanes[start["pid"], start["tid"]], exact_ns(start["ts"]), ours)
    assert len(nodes) == 543
    truth: Counter[tuple[str, bool]] = Counter()
    for (_, tid), lane in lanes.items():
        for start, _, event in lane:
            if (tid, start) in nodes and is_node(event["name"]):
                truth[event["name"], nodes[tid, start]] += 1
    assert sum(truth.values()) == 543
    assert {inside for _, inside in truth} == {False, True}
    run = run_of_file(A100)
    found: Counter[tuple[str, bool]] = Counter()
    for row in run.rows:
        name = row.frames[-1].name if row.frames else ""
        if row.phase == "backward" and is_node(name):
            found[name, bool(row.layer and row.layer.path[-1] == ours)] += row.calls
    assert found == truth


@NEEDS_TRACES
@BOTH
def test_external_ids_and_launches_give_the_same_operator_of_a_kernel(path: Path) -> None:
    """Either the kernel has the External id, or the launch is inside the operator."""
    events = events_in(path)
    innermost: dict[Any, Any] = {}  # correlation ID of a launch → External id of the operator around it
    for lane in host_lanes(events).values():
        stack: list[tuple[int, Any]] = []
        for start, end, event in lane:
            while stack and stack[-1][0] <= start:
                stack.pop()
            if event["cat"] == "cuda_runtime":
                innermost[event["args"]["correlation"]] = stack[-1][1] if stack else None
            else:
                stack.append((end, event["args"]["External id"]))
    work = [event["args"] for event in events if event.get("cat") in DEVICE_WORK]
    assert len(work) == {A100: 3774, MI250: 16}[path]
    assert all(innermost[args["correlation"]] == args["External id"] for args in work)


@NEEDS_TRACES
def test_the_metadata_has_the_machine_of_the_trace() -> None:
    run = run_of_file(A100)
    assert (run.meta.rank, run.meta.device, run.meta.steps) == (0, "cuda", 3)
    assert dict(run.meta.environment) == {"devices": "8 × NVIDIA A100-PG509-200 (39 GB)", "ranks": "2, nccl 2.17.1"}
    assert [layer.name for layer in run.layers] == [
        "## forward ##",
        "## forward ##.DistributedDataParallel.forward",
        "## backward ##",
        "## optimizer ##",
    ]
    assert {layer.params for layer in run.layers} == {None}


@NEEDS_TRACES
@BOTH
def test_the_order_of_events_in_the_file_does_not_matter(path: Path, trace: Path) -> None:
    whole = trace_in(path)
    random.Random(6).shuffle(whole["traceEvents"])
    mixed = torchprof.from_trace(write(trace, whole))
    run = run_of_file(path)
    assert rows_of(mixed) == rows_of(run)
    assert samples_of(mixed) == samples_of(run)
    assert mixed.device_times == run.device_times
