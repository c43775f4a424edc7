"""Kernels: which layer launched them, and that their sum is the device's. On a GPU, on real traces, and on fakes."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any

import pytest
from build.libraries import HAS_PYTHON_CALLS
from build.machine import whole
from build.nonempty import at_least_one
from build.phases import in_column_of
from build.places import TRACES
from build.raw_events import (
    BACKWARD_FUNCTION,
    MARKED,
    MODEL,
    NODE_PREFIX,
    USER,
    Raw,
    attributed,
    events_of,
    kernel,
    launch,
    small_step,
)
from torch.autograd import DeviceType

from torchprof.attribute.event_names import ENGINE_LABEL
from torchprof.attribute.events import Event, Kind
from torchprof.run.measures import Cost
from torchprof.run.rows import Row
from torchprof.run.words import (
    BACKWARD,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    LAUNCHED_BEFORE,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    REPLAY,
)

# Hand-made events


@MARKED
def test_kernels_belong_to_the_op_that_launched_them() -> None:
    """Forward and backward kernels in the layer, the rest outside, annotations nowhere."""
    found, run = attributed(small_step())
    kernels = {
        (each.event.name, each.event.start_ns): (each.place.layer, each.place.phase)
        for each in found
        if each.event.kind is Kind.KERNEL
    }
    assert kernels == {
        ("Memcpy HtoD (Pageable -> Device)", 95): (OUTSIDE, FORWARD),
        ("gemm", 400): (0, FORWARD),
        ("reduce", 2400): (OUTSIDE, FORWARD),
        ("gemm", 2430): (0, BACKWARD),
        ("Memset (Device)", 5430): (0, BACKWARD),
        ("multi_tensor_apply", 5500): (OUTSIDE, FORWARD),
        ("who launched this", 6000): (OUTSIDE, FORWARD),
    }
    assert run.tree(FORWARD).self.device_ns == 2000
    assert run.tree(BACKWARD).self.device_ns == 3000 + 4
    outside = {
        phase: [row.cost.device_ns for row in run.rows if row.layer is None and in_column_of(row.phase) == phase]
        for phase in PHASES
    }
    assert {phase: sum(times) for phase, times in outside.items()} == {
        FORWARD: 100 + 30 + 100 + 7,
        BACKWARD: 0,
        RECOMPUTE: 0,
    }


def test_a_kernel_without_a_recorded_op_is_found_by_the_runtimes_call() -> None:
    """The runtime counts its calls; one outside of all ops may have the number of an op, and is none. A kernel with a
    lower number than all calls was launched before the session."""

    def work(name: str, start: int, number: int, linked: int = 0) -> Raw:
        return Raw(name, start, start + 10, 7, _correlation=number, _linked=linked, _device=DeviceType.CUDA, _index=0)

    raws = [
        Raw("aten::mm", 0, 90, _correlation=890),
        Raw("cudaLaunchKernel", 10, 20, 4321, _correlation=880, _linked=890),
        Raw("cudaLaunchKernel", 100, 110, _correlation=885),
        Raw("cudaGraphLaunch", 120, 130, _correlation=886),
        Raw("cudaDeviceSynchronize", 200, 900, _correlation=890),
        work("old", 30, 879),
        work("mm", 40, 880, 890),
        work("of no op", 110, 885),
        work("replayed", 140, 886),
        work("by nobody", 160, 887),
    ]
    found, run = attributed(raws)
    frames = {
        one.event.name: [frame.name for frame in one.place.frames] for one in found if one.event.kind is Kind.KERNEL
    }
    assert frames == {
        "old": [LAUNCHED_BEFORE, "old"],
        "mm": ["aten::mm", "mm"],
        "of no op": ["cudaLaunchKernel", "of no op"],
        "replayed": [REPLAY, "replayed"],
        "by nobody": [LAUNCH_NOT_RECORDED, "by nobody"],
    }
    assert (run.left_over.device_ns, run.no_layer(FORWARD).device_ns, whole(run).device_ns) == (10, 40, 50)


@MARKED
def test_a_kernel_may_have_the_name_of_a_label() -> None:
    """Whoever writes a kernel often labels its call by the same name: the kernel is work, its label's mirror is not."""
    _, plain = attributed(small_step())
    _, run = attributed([*small_step(), kernel("mine", 700, 750, 4)])
    assert run.tree(FORWARD).self.device_ns == plain.tree(FORWARD).self.device_ns + 50


def test_device_time_counts_once_for_each_op_around_the_launch() -> None:
    """The op that launched has it as its self, those around it as their total; the runtime's call has none."""
    _, run = attributed(small_step())
    ops = {op.name: (op.self.device_ns, op.total.device_ns) for op in run.ops(FORWARD)[run.layers[0].path]}
    assert ops["aten::linear"] == (0, 2000)
    assert ops["aten::addmm"] == (2000, 2000)
    assert ops["cudaLaunchKernel"] == (0, 0)
    assert "gemm" not in ops, "a kernel is no op"
    assert {row.device for row in run.rows if row.cost.device_ns} == {"cuda:0"}


def test_a_runtime_call_is_inside_its_op() -> None:
    """It carries the system's thread number; its time is taken from the op's, not added beside it."""
    _, run = attributed(small_step())
    forward = {op.name: op.self.cpu_ns for op in run.ops(FORWARD)[run.layers[0].path]}
    assert forward["cudaLaunchKernel"] == 50
    assert forward["aten::addmm"] == 600 - 50
    backward = {op.name: op.self.cpu_ns for op in run.ops(BACKWARD)[run.layers[0].path]}
    assert backward["cudaLaunchKernel"] == 50
    assert backward["aten::mm"] == 200 - 50
    assert whole(run).cpu_ns == 90 + 900 + 100 + 40 + 500 + 80 + 200


def test_work_of_the_profiler_belongs_to_no_layer_and_launches_nothing() -> None:
    """CUPTI allocates a buffer at a thread's first launch. In a forward, the event has the number of the op. In a
    backward, it has thread and number of the range around the call of autograd (H100, torch 2.11). The driver loads a
    kernel: that is work of the op."""
    raws = [
        Raw(MODEL, 0, 1000, _scope=USER, _correlation=2, _annotation=True),
        Raw("aten::mm", 100, 900, _sequence=5, _correlation=4),
        Raw("Activity Buffer Request", 200, 700, _correlation=4),
        launch(700, 720, 4),
        Raw("Lazy Function Loading", 730, 750, _correlation=4),
        Raw("Resource", 1100, 1200, _scope=USER, _correlation=6, _annotation=True),  # a range of the user
        Raw(ENGINE_LABEL, 1350, 1900, _scope=USER, _correlation=7, _annotation=True),
        Raw("MmBackward0", 1400, 1800, 2, BACKWARD_FUNCTION, 5, 1, 10),
        Raw("aten::mm", 1500, 1700, 2, _correlation=11),
        Raw("Activity Buffer Request", 1550, 1650, _correlation=7),
        kernel("gemm", 750, 2000, 4),
        kernel("gemm", 2000, 3000, 11),
    ]
    _, run = attributed(raws)
    model = run.tree(FORWARD)
    assert model.self.cpu_ns == 1000 - 500 and model.self.device_ns == 1250
    assert run.tree(BACKWARD).self.cpu_ns == 400 - 100 and run.tree(BACKWARD).self.device_ns == 1000
    rows = {frames_of(row): (row.calls, row.cost.cpu_ns) for row in run.rows if row.layer is None and row.frames}
    assert rows.pop(("op (autograd engine)",)) == (1, 550)
    assert rows == {("profiler Activity Buffer Request",): (2, 600), ("label Resource",): (1, 100)}
    [loading] = [row for row in run.rows if row.frames and row.frames[-1].name == "Lazy Function Loading"]
    assert [frame.name for frame in loading.frames] == ["aten::mm", "Lazy Function Loading"]
    launchers = {row.frames[-2].name for row in run.rows if row.frames and row.frames[-1].kind == "kernel"}
    assert launchers == {"aten::mm"}
    [sample] = [sample for key, sample in run.samples.items() if key.measure == "cpu_ns"]
    assert sample.sum == 500
    assert "(profiler: Activity Buffer Request)" in run.report("top")


def frames_of(row: Row) -> tuple[str, ...]:
    return tuple(f"{frame.kind} {frame.name}" for frame in row.frames)


def test_a_kernel_may_seem_to_start_before_its_launch() -> None:
    """Host and device clocks differ: a kernel belongs to the op it is linked to, also where it seems to be earlier."""
    raws = small_step()
    early = next(raw for raw in raws if raw.name() == "gemm")
    early._start, early._end = 190, 2190
    _, run = attributed(raws)
    assert run.tree(FORWARD).self.device_ns == 2000


def test_a_session_without_a_device_has_the_same_cpu_figures() -> None:
    """A session of the CPU alone has the same CPU figures from the same events."""
    raws = [raw for raw in small_step() if raw.device_type() == DeviceType.CPU and raw.name() != "cudaLaunchKernel"]
    _, run = attributed(raws, device=None)
    assert whole(run) == Cost(cpu_ns=90 + 900 + 100 + 40 + 500 + 80 + 200)


def test_device_memory_belongs_to_the_op_around_it() -> None:
    """Memory events of the device stand on the CPU's timeline, on the thread of the op."""
    raws = small_step()
    for at, nbytes, thread in ((250, 512, 1), (1550, 2048, 2), (1650, -512, 2)):
        raws.append(Raw("[memory]", at, at, thread, _device=DeviceType.CUDA, _index=0, _nbytes=nbytes))
    raws.append(Raw("[memory]", 260, 260, 1, _nbytes=100))
    _, run = attributed(raws)
    forward, backward = run.tree(FORWARD).self, run.tree(BACKWARD).self
    assert (forward.device_allocated, forward.device_freed, forward.cpu_allocated) == (512, 0, 100)
    assert (backward.device_allocated, backward.device_freed, backward.cpu_allocated) == (2048, 512, 0)


def test_a_device_of_rocm_has_one_name() -> None:
    """In kernels it is the 9th of all agents of the machine, in memory events the first of hip's."""
    raws = small_step()
    for raw in raws:
        if raw.device_type() == DeviceType.CUDA:
            raw._index = 9
    raws.append(Raw("[memory]", 250, 250, 1, _device=DeviceType.HIP, _index=0, _nbytes=512))
    _, run = attributed(raws)
    assert {row.device for row in run.rows if row.cost.device_allocated} == {"cuda:0"}
    assert {row.device for row in run.rows if row.cost.device_ns} == {"cuda:0"}
    raws.append(Raw("[memory]", 255, 255, 1, _device=DeviceType.HIP, _index=1, _nbytes=512))
    _, unclear = attributed(raws)  # which of the two worked, nobody knows
    assert {row.device for row in unclear.rows if row.cost.device_ns} == {"cuda:9"}


def test_two_devices_have_separate_rows_and_add_up_in_layers() -> None:
    """Each row names its device."""
    raws = small_step()
    second = kernel("gemm", 3000, 3300, 4)
    second._index = 1
    raws.append(second)
    _, run = attributed(raws)
    assert {row.device for row in run.rows if row.frames and row.frames[-1].name == "gemm"} == {"cuda:0", "cuda:1"}
    assert run.tree(FORWARD).self.device_ns == 2000 + 300


@pytest.mark.skipif(not HAS_PYTHON_CALLS, reason="this torch gives no Python calls")
@MARKED
def test_python_frames_and_bookkeeping_of_torch_are_left_out() -> None:
    """Python frames and the bookkeeping of ``record_function`` are no work, and give their time to what is around."""
    raws = [
        *small_step(),
        Raw("profiler::_record_function_enter_new", 110, 120, _correlation=31),
        Raw("aten::is_leaf", 120, 125, _correlation=32),
        Raw("aten::_version", 125, 128, _correlation=33),
        Raw("net.py(7): forward", 130, 990, _python=True, _correlation=34),
    ]
    found, run = attributed(raws)
    _, plain = attributed(small_step())
    assert run.rows == plain.rows
    assert not [each for each in found if each.event.correlation in (31, 32, 33, 34)]


def test_an_asynchronous_range_takes_no_time_of_its_thread() -> None:
    """A collective's range ends long after its start, perhaps elsewhere: it takes no ops in, as in torch's lists."""
    raws = [*small_step(), Raw("gloo:all_reduce", 1420, 60_000, 2, USER, _correlation=40, _async=True)]
    _, run = attributed(raws)
    _, plain = attributed(small_step())
    assert whole(run).cpu_ns == whole(plain).cpu_ns
    assert (whole(run).collective_ns, whole(plain).collective_ns) == (60_000 - 1420, 0)
    assert replace(run.tree(BACKWARD).self, collective_ns=0) == plain.tree(BACKWARD).self
    assert [row.frames for row in run.rows if row.frames and row.frames[-1].name == "aten::mm"] == [
        row.frames for row in plain.rows if row.frames and row.frames[-1].name == "aten::mm"
    ]


def test_the_order_of_recording_does_not_matter() -> None:
    """Raw events that come in another order than that of their start give the same rows."""
    _, plain = attributed(small_step())
    _, run = attributed(small_step()[::-1])
    assert whole(run) == whole(plain)
    assert run.tree(FORWARD) == plain.tree(FORWARD)
    assert run.tree(BACKWARD) == plain.tree(BACKWARD)


# Recorded on real GPUs

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")


def ns(us: float) -> int:
    """The nanoseconds of a figure in microseconds with three decimals, exactly."""
    whole_us = int(us)
    return whole_us * 1000 + round((us - whole_us) * 1000)


@dataclass
class Trace:
    """A trace that somebody recorded, with one of its ranges taken for the forward of a model of one layer."""

    file: str
    range: str
    main: int  # thread numbers of the system
    autograd: int

    def events(self) -> list[dict[str, Any]]:
        path = TRACES / self.file
        if not path.exists():
            pytest.skip("the folder of traces is not there")
        with gzip.open(path) as file:
            found = json.load(file)["traceEvents"]
        return [event for event in found if event.get("ph") in ("X", "s", "f")]


A100 = Trace("a100_ddp_train_rank0_of_2.json.gz", "DistributedDataParallel.forward", 2910249, 2919752)
MI250 = Trace("mi250_toy_train_rocm62.json.gz", "ProfilerStep#1", 597913, 598009)
BOTH = pytest.mark.parametrize("trace", [A100, MI250], ids=["a100", "mi250"])


def raws_of(trace: Trace, events: list[dict[str, Any]]) -> list[Raw]:
    """What the profiler had in its hands before it wrote the trace, as far as the trace tells."""
    spans = [event for event in events if event["ph"] == "X" and event["cat"] != "Trace"]
    threads = {trace.main: 1, trace.autograd: 2}
    nodes = {event["name"].removeprefix(NODE_PREFIX) for event in spans if event["name"].startswith(NODE_PREFIX)}
    on_cpu = {event["args"]["External id"] for event in spans if event["cat"] in ("cpu_op", "user_annotation")}
    raws = []
    for event in spans:
        category, args = event["cat"], event["args"]
        name = MODEL if event["name"] == trace.range else event["name"]
        start = ns(event["ts"])
        raw = Raw(name, start, start + ns(event["dur"]), event["tid"])
        external = args.get("External id", 0)
        if category in ("cpu_op", "user_annotation"):
            raw._thread = threads[event["tid"]]
            raw._correlation = external
            raw._sequence = args.get("Sequence number", -1)
            raw._forward_thread = args.get("Fwd thread id", 0)
            if category == "user_annotation":
                raw._scope, raw._annotation = USER, True
            elif event["name"] in nodes:
                raw._scope = BACKWARD_FUNCTION
        else:
            raw._correlation = args.get("correlation", 0)
            raw._linked = external if external in on_cpu and external != raw._correlation else 0
            if category != "cuda_runtime":
                raw._device, raw._index = DeviceType.CUDA, args.get("device", 0)
                raw._annotation = category == "gpu_user_annotation"
        raws.append(raw)
    return sorted(raws, key=Raw.start_ns)


@BOTH
def test_kernels_of_a_real_trace_add_up(trace: Trace) -> None:
    """Σ device time over rows = Σ over the trace's kernels, copies and sets, read by a plain pass; nothing else."""
    events = trace.events()
    truth = sum(ns(event["dur"]) for event in events if event.get("cat") in DEVICE_WORK)
    annotations = sum(ns(event["dur"]) for event in events if event.get("cat") == "gpu_user_annotation")
    found, run = attributed(raws_of(trace, events))
    assert annotations > 0
    assert whole(run).device_ns == truth > 0
    calls = sum(row.calls for row in run.rows if row.frames and row.frames[-1].kind == "kernel")
    assert calls == sum(event.get("cat") in DEVICE_WORK for event in events)
    assert all(row.cost.cpu_ns >= 0 for row in run.rows)
    names = {event["name"] for event in events if event.get("cat") == "gpu_user_annotation"}
    assert not [each for each in found if each.event.kind is Kind.KERNEL and each.event.name in {*names, MODEL}]


@BOTH
def test_kernels_of_a_real_trace_by_layer(trace: Trace) -> None:
    """Each kernel against the trace's own arrows, which lead from the forward op that made a node to the node."""
    events = trace.events()
    ops = {
        event["args"]["External id"]: (event["tid"], ns(event["ts"]))
        for event in events
        if event.get("cat") in ("cpu_op", "user_annotation") and event["ph"] == "X"
    }
    forwards = [
        (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"] == trace.range
    ]
    made_at = {event["id"]: ns(event["ts"]) for event in events if event["cat"] == "fwdbwd" and event["ph"] == "s"}
    ends = {ns(event["ts"]): event["id"] for event in events if event["cat"] == "fwdbwd" and event["ph"] == "f"}
    nodes = sorted(
        (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]), event["name"])
        for event in events
        if event.get("cat") == "cpu_op" and event["tid"] == trace.autograd and event["name"].startswith(NODE_PREFIX)
    )
    starts = [start for start, _, _ in nodes]
    arrows = sorted(ends)

    def in_model(at: int) -> bool:
        return any(start <= at < end for start, end in forwards)

    expected: dict[tuple[str, int, int], tuple[int, str]] = {}
    for event in events:
        if event.get("cat") not in DEVICE_WORK:
            continue
        key = (event["name"], ns(event["ts"]), event["args"]["External id"])
        if (launcher := ops.get(event["args"]["External id"])) is None:
            expected[key] = (OUTSIDE, FORWARD)
            continue
        thread, at = launcher
        if thread == trace.main:
            expected[key] = (0 if in_model(at) else OUTSIDE, FORWARD)
            continue
        start, end, node = nodes[bisect_right(starts, at) - 1]
        arrow = arrows[min(bisect_right(arrows, start), len(arrows) - 1)]
        if not start <= at < end:
            expected[key] = (OUTSIDE, FORWARD)  # the engine's last callbacks, in no node
        elif start <= arrow < end:
            expected[key] = (0 if in_model(made_at[ends[arrow]]) else OUTSIDE, BACKWARD)
        elif node.endswith("AccumulateGrad"):
            expected[key] = (0, BACKWARD)  # it has no arrow; all parameters are the model's

    found, run = attributed(raws_of(trace, events))
    checked: dict[tuple[int, str], int] = {}
    for each in found:
        event = each.event
        if event.kind is Kind.KERNEL and (event.name, event.start_ns, event.correlation) in expected:
            place = expected[event.name, event.start_ns, event.correlation]
            assert (each.place.layer, each.place.phase) == place, event
            checked[place] = checked.get(place, 0) + event.end_ns - event.start_ns
    assert checked[0, FORWARD] > 0
    assert checked[0, BACKWARD] > 0
    assert sum(checked.values()) == whole(run).device_ns, "all of it was compared"
    assert run.tree(FORWARD).self.device_ns == checked[0, FORWARD]
    assert run.tree(BACKWARD).self.device_ns == checked[0, BACKWARD]


@BOTH
def test_a_real_trace_without_the_device(trace: Trace) -> None:
    """The same events without a device asked for: the CPU's figures of ops, labels and nodes stay as they are."""
    raws = [raw for raw in raws_of(trace, trace.events()) if raw.device_type() == DeviceType.CPU and not raw._linked]
    raws = [raw for raw in raws if raw._thread in (1, 2)]
    tops: dict[int, int] = {}
    until: dict[int, int] = {}
    for raw in raws:
        if raw.start_ns() >= until.get(raw._thread, 0):
            tops[raw._thread] = tops.get(raw._thread, 0) + raw.duration_ns()
            until[raw._thread] = raw.end_ns()
    _, run = attributed(raws, device=None)
    ranges = sum(raw.duration_ns() for raw in raws if raw.name().startswith("nccl:"))
    assert whole(run) == Cost(cpu_ns=sum(tops.values()), collective_ns=ranges)


# The result


def test_events_have_the_fields_that_attribution_reads() -> None:
    """What a session hands on are plain ``Event`` tuples with whole numbers."""
    for event in at_least_one(events_of(small_step())):
        assert type(event) is Event
        assert isinstance(event.kind, Kind)
        assert event.end_ns >= event.start_ns
        assert event.device == ("cuda:0" if event.kind is Kind.KERNEL else "cpu")
