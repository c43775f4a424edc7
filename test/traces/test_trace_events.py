"""The events of a trace as a session gives them: order, kinds, backward, devices."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from build.trace_files import arrow, kernel, memory_event, node, op, trace_event
from build.traced_events import events_of, read, the

from torchprof.attribute.events import Kind
from torchprof.run.torch_names import KernelWork, kind_of_work
from torchprof.run.words import BEFORE

# Order


def test_events_are_sorted_by_start_for_any_order_in_the_file() -> None:
    ordered = [op(f"aten::{at}", at + 0.5, 0.25) for at in range(500)]
    mixed = list(ordered)
    random.Random(1).shuffle(mixed)
    assert [event.name for event in events_of(*mixed)] == [one["name"] for one in ordered]


def test_the_threads_of_a_file_are_merged() -> None:
    """torch writes all events of one thread, then all of the next. These are more than are sorted at a time."""
    first = [op(f"aten::{at}", 2 * at + 0.5, 1, tid=1) for at in range(9000)]
    second = [op(f"aten::{at}", 2 * at + 1.5, 1, tid=2) for at in range(9000)]
    found = events_of(*second, *first)
    assert [event.start_ns for event in found] == [1000 * at + 500 for at in range(18000)]
    assert [event.thread for event in found] == [2, 1] * 9000


def test_in_whole_microseconds_the_outer_one_comes_first() -> None:
    """Of events with equal starts, the longest is outermost; of equally long ones, that with the smallest number."""
    found = events_of(
        op("aten::inner", 100, 20, External_id=4),
        op("aten::middle", 100, 30, External_id=3),
        op("aten::outer", 100, 30, External_id=2),
        op("aten::before", 90, 1, External_id=1),
    )
    assert [event.name for event in found] == ["aten::before", "aten::outer", "aten::middle", "aten::inner"]


def test_in_whole_microseconds_memory_events_follow_operators_in_the_order_of_the_file() -> None:
    """They are inside the innermost operator that starts at this time. Bytes and addresses do not change the order."""
    found = events_of(
        memory_event(100, 64, Addr=9),
        memory_event(100, 512_000, Addr=5),
        memory_event(105, -512_000, Addr=5),
        memory_event(105, 512_000, Addr=2),
        op("aten::outer", 100, 30),
        op("aten::inner", 100, 20),
    )
    assert [event.name if event.kind is Kind.OP else event.nbytes for event in found] == [
        "aten::outer",
        "aten::inner",
        64,
        512_000,
        -512_000,
        512_000,
    ]


@pytest.mark.parametrize("number", [9, 900])
@pytest.mark.parametrize("first", [True, False], ids=["op first in the file", "launch first"])
def test_in_whole_microseconds_an_operator_contains_a_launch_of_its_length(number: int, first: bool) -> None:
    """External ids and correlation IDs are different numbers, so comparing them means nothing."""
    events = [
        op("aten::fill_", 10, 5, External_id=500),
        trace_event("cuda_runtime", "cudaMemsetAsync", 10, 5, correlation=number),
    ]
    found = events_of(*(events if first else events[::-1]))
    assert [event.name for event in found] == ["aten::fill_", "cudaMemsetAsync"]


def test_device_work_comes_last() -> None:
    found = events_of(kernel("k", 1, 1), op("aten::a", 5, 1), kernel("early", 0, 1), op("aten::b", 3, 1))
    assert [event.name for event in found] == ["aten::b", "aten::a", "early", "k"]


# Kinds


def test_each_category_gives_its_kind() -> None:
    found = events_of(
        op("aten::mm", 10, 10),
        op("torchprof:Net", 9, 20),
        op("torchprof:!step", 8, 0),
        op("torchprof:!stopped", 9.5, 0),
        trace_event("user_annotation", "mine", 7, 90),
        trace_event("cuda_runtime", "cudaLaunchKernel", 12, 2),
        *node("MmBackward0", 40, 9, 3, 1),
        *node("torch::autograd::AccumulateGrad", 50, 9, -1, 0),
        memory_event(13, 512),
        kernel("gemm", 15, 2),
        kernel("Memcpy HtoD (Pageable -> Device)", 17, 2, category="gpu_memcpy"),
        kernel("Memset (Device)", 19, 2, category="gpu_memset"),
        sites=("torchprof:Net",),
    )
    assert [(event.kind, event.name) for event in found] == [
        (Kind.USER_LABEL, "mine"),
        (Kind.STEP, "torchprof:!step"),
        (Kind.LABEL, "torchprof:Net"),
        (Kind.STOPPED, "torchprof:!stopped"),
        (Kind.OP, "aten::mm"),
        (Kind.OP, "cudaLaunchKernel"),
        (Kind.MEMORY, "[memory]"),
        (Kind.NODE, "autograd::engine::evaluate_function: MmBackward0"),
        (Kind.BACKWARD_FUNCTION, "MmBackward0"),
        (Kind.NODE, "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"),
        (Kind.BACKWARD_FUNCTION, "torch::autograd::AccumulateGrad"),
        (Kind.KERNEL, "gemm"),
        (Kind.KERNEL, "Memcpy HtoD (Pageable -> Device)"),
        (Kind.KERNEL, "Memset (Device)"),
    ]


@pytest.mark.parametrize("category", ["cpu_op", "user_annotation"])
def test_the_ranges_of_torch_compile_have_their_own_kinds(category: str) -> None:
    """torch records them as its own ranges, or, in earlier versions, as user ranges."""
    names = {
        "TorchDynamo Cache Lookup": Kind.GUARDS,
        "Torch-Compiled Region: 1/0": Kind.REGION,
        "## Call CompiledFxGraph fabcdef ##": Kind.GRAPH,
        "_compile.compile_inner (dynamo_timed)": Kind.COMPILING,
    }
    found = events_of(*(trace_event(category, name, at, 1) for at, name in enumerate(names)))
    assert {event.name: event.kind for event in found} == names


def test_a_user_range_with_a_name_of_torch_compile_stays_a_label() -> None:
    found = events_of(
        op("dynamo", 1, 8),
        op("entire_frame_compile", 2, 6),
        trace_event("user_annotation", "dynamo", 10, 8),
        trace_event("user_annotation", "entire_backward_compile", 11, 6),
    )
    assert [event.kind for event in found] == [Kind.COMPILING] * 2 + [Kind.USER_LABEL] * 2


def test_overhead_of_the_profiler_is_on_the_thread_whose_operator_it_interrupts() -> None:
    """It has no thread in the file. The driver's part of it is work of the operator."""
    trace = read(
        trace_event("overhead", "Activity Buffer Request", 5, 2, pid=-1, tid=0),  # before all operators
        op("aten::mm", 10, 100, tid=1),
        op("aten::mm", 200, 100, tid=2),
        op("aten::add", 290, 5, tid=2),
        trace_event("overhead", "Activity Buffer Request", 20, 70, pid=-1, tid=0),
        trace_event("overhead", "Lazy Function Loading", 210, 9, pid=-1, tid=0),
        trace_event("user_annotation", "Resource", 400, 5, tid=1),  # a user's range
    )
    found = [(event.name, event.kind, event.thread) for event in trace.columns(()).events()]
    [first, second] = [thread for name, _, thread in found if name == "aten::mm"]
    assert found == [
        ("aten::mm", Kind.OP, first),
        ("Activity Buffer Request", Kind.INTERRUPTION, first),
        ("aten::mm", Kind.OP, second),
        ("Lazy Function Loading", Kind.OP, second),
        ("aten::add", Kind.OP, second),
        ("Resource", Kind.USER_LABEL, first),
    ]
    assert trace.table.unread == 0
    assert len(trace.table.processes) == 1


@pytest.mark.parametrize(
    "event",
    [
        trace_event("gpu_user_annotation", "## forward ##", 1, 50, pid=0),
        trace_event("cuda_sync", "Stream Synchronize", 1, 50, pid=0),
        trace_event("python_function", "net.py(3): forward", 1, 50),
        trace_event("python_function", "nn.Module: Linear_0", 1, 50),
        trace_event("", "nothing", 1, 50),
        trace_event("a category of next year", "nothing", 1, 50),
        op("[OutOfMemory]", 1, 0),
        op("aten::is_leaf", 1, 1),
        op("profiler::_record_function_enter_new", 1, 1),
        op("torchprof:!raised", 1, 0),
        {"ph": "M", "name": "process_name", "pid": 7, "tid": 0, "ts": 1, "args": {"name": "python"}},
        {"ph": "i", "name": "Iteration Start: PyTorch Profiler", "s": "g", "pid": "Traces", "tid": "T", "ts": 1},
        {"ph": "i", "name": "[OutOfMemory]", "s": "t", "pid": 7, "tid": 7, "ts": 1, "args": {"Bytes": 5}},
        {"ph": "s", "id": 1, "cat": "ac2g", "name": "ac2g", "pid": 7, "tid": 7, "ts": 1},
        {"ph": "C", "name": "GPU 0 Utilization", "pid": 0, "ts": 1, "args": {"GPU Utilization": 1.0}},
    ],
    ids=lambda event: f"{event.get('cat', event['ph'])}: {event['name']}",
)
def test_events_that_are_no_work_are_ignored_and_not_counted_as_unread(event: Any) -> None:
    trace = read(op("aten::mm", 0, 100), event)
    assert [found.name for found in trace.columns(()).events()] == ["aten::mm"]
    assert trace.table.unread == 0


def test_the_events_of_sites_are_labels() -> None:
    events = [
        trace_event("user_annotation", "encoder", 0, 9),
        trace_event("user_annotation", "other", 1, 3),
        trace_event("python_function", "nn.Module: Linear_0", 2, 1),
        trace_event("python_function", "nn.Module: Linear_1", 4, 1),
    ]
    found = events_of(*events, sites=["encoder", "nn.Module: Linear_0"])
    assert [(event.kind, event.name) for event in found] == [
        (Kind.LABEL, "encoder"),
        (Kind.USER_LABEL, "other"),
        (Kind.LABEL, "nn.Module: Linear_0"),
    ]


def test_the_range_of_a_collective_has_its_kind_and_its_signature() -> None:
    """The range ends with the collective, on any thread. A user range may have a similar name."""
    found = events_of(
        trace_event("user_annotation", "nccl:all_reduce", 1, 500, Input_Dims=[[3, 4]], Input_type=["float"]),
        trace_event("user_annotation", "gloo:broadcast", 2, 500),
        trace_event("user_annotation", "nccl: my own range", 3, 500),
    )
    assert [event.kind for event in found] == [Kind.COLLECTIVE, Kind.COLLECTIVE, Kind.USER_LABEL]
    assert [event.end_ns - event.start_ns for event in found] == [500_000] * 3
    assert found[0].signature > 0 == found[1].signature


def test_the_range_of_an_old_collective_has_its_kind_and_its_signature() -> None:
    """It has the category of operators, and inputs. A user's autograd function has both, too, and is an operator."""
    about = {"Input_Dims": [[4]], "Input_type": ["float"]}
    trace = read(
        trace_event("Operator", "nccl:all_reduce", 5, 1000, **about),
        trace_event("Operator", "MyFunction", 2000, 50, **about),
    )
    collective, function = trace.columns(()).events()
    assert (collective.kind, collective.end_ns - collective.start_ns) == (Kind.COLLECTIVE, 1_000_000)
    assert (function.kind, function.end_ns - function.start_ns) == (Kind.OP, 50_000)
    assert trace.signatures[collective.signature].shapes == ((4,),)


# Backward


def test_the_arrow_gives_the_forward_thread_of_a_node() -> None:
    """A trace numbers the threads of operators and the forward threads of nodes in two ways. If two threads ran forward
    operators, these have the same sequence numbers, and only the arrows distinguish them."""
    forward = [op("aten::mm", 10, 5, tid=tid, Sequence_number=3, Fwd_thread_id=0) for tid in (100, 200)]
    nodes = [*node("MmBackward0", 40, 9, 3, 5, tid=300), *node("MmBackward0", 60, 9, 3, 2, tid=300)]
    arrows = [
        arrow(1, "s", 10, tid=200),
        arrow(1, "f", 41, tid=300),
        arrow(2, "s", 10, tid=100),
        arrow(2, "f", 61, tid=300),
    ]
    mixed = [forward[0], forward[1], arrows[0], arrows[2], nodes[0], nodes[1], arrows[1], nodes[2], nodes[3], arrows[3]]
    found = events_of(*mixed)
    first, second = (event.thread for event in found if event.kind is Kind.OP)
    of_nodes = [event for event in found if event.kind is Kind.NODE]
    assert [event.forward_thread for event in of_nodes] == [second, first]
    assert first != second
    inner = [event for event in found if event.kind is Kind.BACKWARD_FUNCTION]
    assert [event.forward_thread for event in inner] == [second, first]


def test_without_arrows_sequence_numbers_give_the_forward_thread() -> None:
    forward = [op("aten::mm", 10 * at, 5, tid=100, Sequence_number=at) for at in range(8)]
    other = [op("aten::mm", 10 * at + 1, 5, tid=200, Sequence_number=at) for at in range(3)]
    nodes = [one for at in range(8) for one in node("MmBackward0", 200 + 10 * at, 9, at, 4, tid=300)]
    found = events_of(*other, *forward, *nodes)
    main = {event.thread for event in found if event.sequence == 7 and event.kind is Kind.OP}
    assert {event.forward_thread for event in found if event.kind is Kind.NODE} == main


def test_operators_have_a_sequence_number_and_no_forward_thread() -> None:
    found = events_of(
        op("aten::mm", 1, 1, Sequence_number=12, Fwd_thread_id=0),
        op("aten::add", 3, 1, Sequence_number=-1),
        op("aten::relu", 5, 1),
    )
    assert [(event.kind, event.sequence, event.forward_thread) for event in found] == [
        (Kind.OP, 12, 0),
        (Kind.OP, -1, 0),
        (Kind.OP, -1, 0),
    ]


# Devices


def test_recent_kernels_name_their_operator() -> None:
    """The External id is that of the innermost operator around the launch, even if the launch is not in the file."""
    found = events_of(
        op("aten::mm", 10, 20, External_id=2),
        op("aten::add", 40, 20, External_id=3),
        trace_event("cuda_runtime", "cudaLaunchKernel", 12, 2, External_id=2, correlation=900),
        kernel("gemm", 100, 5, External_id=2, correlation=900, device=1, stream=7),
        kernel("add", 105, 5, External_id=3, correlation=901, device=1, stream=20),
        kernel("lost", 110, 5, External_id=4, correlation=902, device=0, stream=7),
    )
    assert the(found, "aten::mm").correlation == 2
    works = [event for event in found if event.kind is Kind.KERNEL]
    assert [(event.correlation, event.device, event.thread) for event in works] == [
        (2, "cuda:1", 7),
        (3, "cuda:1", 20),
        (0, "cuda:0", 7),
    ]


def test_the_external_id_of_kernels_of_2022_and_2023_is_ignored() -> None:
    """It repeats the correlation ID, and can be the External id of another operator. The launch is used instead."""
    found = events_of(
        op("aten::mm", 10, 20, External_id=900),
        op("aten::add", 40, 20, External_id=3),
        trace_event("cuda_runtime", "cudaLaunchKernel", 42, 2, External_id=900, correlation=900),
        kernel("add", 100, 5, External_id=900, correlation=900, device=0, stream=7),
    )
    assert the(found, "aten::mm").correlation == 0
    assert the(found, "add").correlation == the(found, "cudaLaunchKernel").correlation == -900


CALL = trace_event("cuda_runtime", "cudaLaunchKernel", 12, 2, External_id=2, correlation=900)
DRIVER = trace_event("cuda_driver", "cuLaunchKernel", 15, 2, External_id=2, correlation=897)


@pytest.mark.parametrize(
    ("calls", "number", "launched", "expected"),
    [
        ([CALL], 899, 900, BEFORE),
        ([CALL], 901, 900, 0),  # its launch is not in the trace
        ([CALL, DRIVER], 899, 900, 0),
        ([CALL, DRIVER], 896, 900, BEFORE),
        ([CALL], 0, 900, 0),  # it has no correlation ID
        ([CALL], 899, 17, 0),  # kernels and calls are numbered differently
        ([], 899, 900, 0),
        ([CALL], 899, None, 0),
    ],
)
def test_kernels_with_a_lower_number_than_all_recorded_calls_were_launched_before(
    calls: list[Any], number: int, launched: int | None, expected: int
) -> None:
    work = [kernel("k", 11, 5, External_id=1, correlation=number, stream=7)]
    if launched is not None:
        work.append(kernel("gemm", 20, 5, External_id=2, correlation=launched, stream=20))
    found = events_of(op("aten::mm", 10, 20, External_id=2), *calls, *work)
    assert the(found, "k").correlation == expected


def test_a_cuda_graph_launches_many_kernels_at_once() -> None:
    found = events_of(
        op("graph", 10, 20, External_id=2),
        trace_event("cuda_runtime", "cudaGraphLaunch", 12, 2, External_id=2, correlation=50),
        *(kernel(f"k{at}", 100 + at, 1, External_id=0, correlation=50, device=0, stream=7) for at in range(3)),
    )
    assert [event.correlation for event in found] == [0, -50, -50, -50, -50]


@pytest.mark.parametrize(
    ("category", "kind"),
    [
        ("cuda_runtime", "cuda"),
        ("cuda_driver", "cuda"),
        ("xpu_runtime", "xpu"),
        ("xpu_driver", "xpu"),
        ("mtia_runtime", "mtia"),
        ("privateuse1_runtime", "privateuse1"),
    ],
)
def test_the_category_of_the_runtime_gives_the_kind_of_the_device(category: str, kind: str) -> None:
    trace = read(trace_event(category, "launch", 1, 1, correlation=9), kernel("k", 5, 1, correlation=9, device=2))
    assert trace.device == kind
    launch, found = trace.columns(()).events()
    assert found.device == f"{kind}:2"
    assert found.correlation == launch.correlation == -9


def test_without_device_work_there_is_no_device() -> None:
    assert read(op("aten::mm", 1, 1)).device is None


def test_process_and_thread_replace_missing_numbers_of_devices_and_streams() -> None:
    """If the args have no device and stream, these are the process and the thread of the event."""
    found = events_of(
        trace_event("kernel", "a", 1, 1, pid=3, tid=11),
        trace_event("kernel", "b", 2, 1, pid="GPU", tid="stream 7"),
        trace_event("kernel", "c", 3, 1, pid=3, tid=11, device=-1, stream="13"),
    )
    assert [(event.device, event.thread) for event in found] == [("cuda:3", 11), ("cuda:0", 0), ("cuda:0", 13)]


def test_memory_events_are_signed_and_have_a_device() -> None:
    found = events_of(
        memory_event(5, 512, Addr=0x7F00, Device_Id=-1, Device_Type=0),
        memory_event(6, -512, Addr=0x7F00, Device_Id=1, Device_Type=1),
        memory_event(7, 64, Device_Id=2, Device_Type=12),
        memory_event(8, 64, Device_Id=2, Device_Type=20),
        memory_event(9, "32", Addr="0x10", Device_Type=6, Device_Id=0),
    )
    assert [(event.nbytes, event.correlation, event.device) for event in found] == [
        (512, 0x7F00, "cpu"),
        (-512, 0x7F00, "cuda:1"),
        (64, 0, "xpu:2"),
        (64, 0, "privateuse1:2"),
        (32, 16, "cuda:0"),  # torch's name for ROCm devices
    ]
    assert {(event.kind, event.name, event.sequence) for event in found} == {(Kind.MEMORY, "[memory]", -1)}


def test_work_of_mtia_is_read_without_its_waits() -> None:
    """The category of MTIA's command processors has kernels (7 us), copies (2 us), and waits (40 us), which are no
    work."""
    trace = read(
        op("aten::mm", 0, 50, External_id=3),
        trace_event("mtia_runtime", "runFunctionDynamic", 2, 3, correlation=9),
        kernel("fbgemm_mm", 10, 4, category="mtia_ccp_events", correlation=9, External_id=3, device=1, stream=102),
        kernel("softmax", 16, 3, category="mtia_ccp_events", correlation=9, External_id=3, device=1, stream=102),
        kernel("dma_d2h", 20, 2, category="mtia_ccp_events", device=1, stream=1),
        kernel("StreamSync", 25, 40, category="mtia_ccp_events", device=1, stream=1),
    )
    work = [event for event in trace.columns(()).events() if event.kind is Kind.KERNEL]
    assert trace.device == "mtia"
    assert {event.device for event in work} == {"mtia:1"}
    took: Counter[KernelWork] = Counter()
    for event in work:
        took[kind_of_work(event.name)] += event.end_ns - event.start_ns
    assert took == {KernelWork.COMPUTING: 7000, KernelWork.COPYING: 2000}
    assert [event.correlation for event in work] == [3, 3, 0]
    assert trace.table.unread == 0
    alone = read(kernel("fbgemm_mm", 10, 4, category="mtia_ccp_events"))
    assert alone.device == "mtia"


@pytest.mark.parametrize(
    ("with_kernels", "in_memory_events", "names"),
    [
        ((9,), (0,), ["cuda:0"]),
        ((3, 9), (0, 1), ["cuda:0", "cuda:1"]),
        ((9,), (0, 1), ["cuda:9"]),  # it is unknown which of the two it is
        ((9,), (), ["cuda:9"]),
    ],
)
def test_a_device_of_rocm_has_one_name(
    with_kernels: tuple[int, ...], in_memory_events: tuple[int, ...], names: list[str]
) -> None:
    """Kernels have its number among all agents of the machine; memory events have torch's number, and the type hip."""
    trace = read(
        *(memory_event(5 + device, 512, Device_Type=6, Device_Id=device) for device in in_memory_events),
        *(kernel("gemm", 20 + device, 1, device=device) for device in with_kernels),
    )
    events = [*trace.columns(()).events()]
    assert [event.device for event in events if event.kind is Kind.MEMORY] == [
        f"cuda:{device}" for device in in_memory_events
    ]
    assert [event.device for event in events if event.kind is Kind.KERNEL] == names
