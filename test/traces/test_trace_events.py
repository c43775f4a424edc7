"""``TraceEvents``: the traces of any torch and any device as columns, and as the events that a session gives."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import pytest

from torchprof.attribute.events import Detail, Event, Kind
from torchprof.run.kernels import KernelWork, kind_of_work
from torchprof.run.words import BEFORE
from torchprof.traces.event_table import EventTable
from torchprof.traces.events import TraceEvents

FIRST = 1  # the number of the first thread


def span(category: str, name: str, start: Any, lasted: Any, *, pid: Any = 7, tid: Any = 7, **args: Any) -> Any:
    """An event of the trace; the args' keys with _ for each blank."""
    about = {key.replace("_", " "): value for key, value in args.items()}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "ts": start,
        "dur": lasted,
        "pid": pid,
        "tid": tid,
        "args": about,
    }


def op(name: str, start: Any, lasted: Any, **more: Any) -> Any:
    return span("cpu_op", name, start, lasted, **more)


def kernel(name: str, start: Any, lasted: Any, *, category: str = "kernel", **args: Any) -> Any:
    return span(category, name, start, lasted, **{"pid": 0, "tid": 7, **args})


def memory(start: Any, nbytes: Any, *, tid: Any = 7, **args: Any) -> Any:
    about = {"Bytes": nbytes, **{key.replace("_", " "): value for key, value in args.items()}}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 7, "tid": tid, "ts": start, "args": about}


def arrow(number: int, which: str, start: Any, *, category: str = "fwdbwd", tid: Any = 7) -> Any:
    return {"ph": which, "id": number, "pid": 7, "tid": tid, "ts": start, "cat": category, "name": "fwdbwd"}


def node(name: str, start: Any, lasted: Any, sequence: int, forward: int, **more: Any) -> list[Any]:
    """The engine's range around an autograd node, and the node."""
    about = {"Sequence_number": sequence, "Fwd_thread_id": forward} if sequence >= 0 else {}
    outer = op(f"autograd::engine::evaluate_function: {name}", start, lasted, **about, **more)
    return [outer, op(name, start + 1, lasted - 2, **about, **more)]


def read(events: Iterable[Any]) -> TraceEvents:
    table = EventTable(lambda name: Detail.SCALARS)
    table.add(events)
    return TraceEvents(table)


def events_of(*events: Any, sites: Iterable[str] = ()) -> list[Event]:
    return list(read(events).events(set(sites)))


def the(events: Iterable[Event], name: str) -> Event:
    (found,) = [event for event in events if event.name == name]
    return found


def exact_ns(text: str) -> int:
    return int(Decimal(text) * 1000)


# Times


@pytest.mark.parametrize(
    ("start", "lasted"),
    [
        ("4458676522690.655", "156.777"),
        ("7948799999999.999", "0.001"),  # the end of a window of three months, after which Kineto's base time moves on
        ("1711964646000000", "17"),  # as torch wrote them before 2.4, since the epoch
        ("0.001", "99999999.999"),
        ("0", "0"),
    ],
)
def test_times_are_exact_to_the_nanosecond(start: str, lasted: str) -> None:
    event = json.loads(
        f'{{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": {start}, "dur": {lasted}}}'
    )
    (found,) = events_of(event)
    assert found.start_ns == exact_ns(start)
    assert found.end_ns - found.start_ns == exact_ns(lasted)


def test_no_time_of_many_is_off() -> None:
    dice = random.Random(6)
    texts = [f"{dice.randrange(7_948_800_000_000)}.{dice.randrange(1000):03}" for _ in range(3000)]
    found = events_of(*(op(text, float(text), float(text[-9:])) for text in texts))
    assert [(event.start_ns, event.end_ns - event.start_ns) for event in found] == sorted(
        (exact_ns(text), exact_ns(text[-9:])) for text in texts
    )


def test_the_session_says_how_long_it_lasted_and_else_the_events_do() -> None:
    ops = [op("aten::a", 10, 5), op("aten::b", 20, 7.5), memory(40, 512), kernel("k", 25, 10)]
    assert (read(ops).wall_ns, read(ops).start_ns) == (40_000 - 10_000, None)
    session = span("Trace", "PyTorch Profiler (0)", 8, 50.25, pid="Spans", tid="PyTorch Profiler")
    assert (read([*ops, session]).wall_ns, read([*ops, session]).start_ns) == (50_250, 8_000)


# Order


def test_events_come_in_the_order_of_their_start_whatever_that_of_the_file() -> None:
    ordered = [op(f"aten::{at}", at + 0.5, 0.25) for at in range(500)]
    mixed = list(ordered)
    random.Random(1).shuffle(mixed)
    assert [event.name for event in events_of(*mixed)] == [one["name"] for one in ordered]


def test_the_threads_of_a_file_are_merged() -> None:
    """As torch writes them: all of one thread, then all of the next; more than are put in order at a time."""
    first = [op(f"aten::{at}", 2 * at + 0.5, 1, tid=1) for at in range(9000)]
    second = [op(f"aten::{at}", 2 * at + 1.5, 1, tid=2) for at in range(9000)]
    found = events_of(*second, *first)
    assert [event.start_ns for event in found] == [1000 * at + 500 for at in range(18000)]
    assert [event.thread for event in found] == [2, 1] * 9000


def test_in_whole_microseconds_the_outer_one_comes_first() -> None:
    """Equal starts: the longer one is around the others; of equal ones that with the smaller number."""
    found = events_of(
        op("aten::inner", 100, 20, External_id=4),
        op("aten::middle", 100, 30, External_id=3),
        op("aten::outer", 100, 30, External_id=2),
        op("aten::before", 90, 1, External_id=1),
    )
    assert [event.name for event in found] == ["aten::before", "aten::outer", "aten::middle", "aten::inner"]


def test_in_whole_microseconds_memory_comes_after_the_ops_and_as_the_file_has_it() -> None:
    """By the innermost op that begins then. Neither many bytes nor an address is what puts one before another."""
    found = events_of(
        memory(100, 64, Addr=9),
        memory(100, 512_000, Addr=5),
        memory(105, -512_000, Addr=5),
        memory(105, 512_000, Addr=2),
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
def test_in_whole_microseconds_an_op_is_around_a_launch_of_its_length(number: int, first: bool) -> None:
    """Their numbers count different things, so that neither is the smaller one."""
    events = [
        op("aten::fill_", 10, 5, External_id=500),
        span("cuda_runtime", "cudaMemsetAsync", 10, 5, correlation=number),
    ]
    found = events_of(*(events if first else events[::-1]))
    assert [event.name for event in found] == ["aten::fill_", "cudaMemsetAsync"]


def test_the_work_of_devices_comes_last() -> None:
    found = events_of(kernel("k", 1, 1), op("aten::a", 5, 1), kernel("early", 0, 1), op("aten::b", 3, 1))
    assert [event.name for event in found] == ["aten::b", "aten::a", "early", "k"]


# Kinds


def test_each_category_gives_its_kind() -> None:
    found = events_of(
        op("aten::mm", 10, 10),
        op("torchprof:Net", 9, 20),
        op("torchprof:!step", 8, 0),
        op("torchprof:!stopped", 9.5, 0),
        span("user_annotation", "mine", 7, 90),
        span("cuda_runtime", "cudaLaunchKernel", 12, 2),
        *node("MmBackward0", 40, 9, 3, 1),
        *node("torch::autograd::AccumulateGrad", 50, 9, -1, 0),
        memory(13, 512),
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
def test_ranges_of_torch_compile_have_kinds_of_their_own(category: str) -> None:
    """Whether torch records them as its own ranges or, as in former versions, as the user's."""
    names = {
        "TorchDynamo Cache Lookup": Kind.GUARDS,
        "Torch-Compiled Region: 1/0": Kind.REGION,
        "## Call CompiledFxGraph fabcdef ##": Kind.GRAPH,
        "_compile.compile_inner (dynamo_timed)": Kind.COMPILING,
    }
    found = events_of(*(span(category, name, at, 1) for at, name in enumerate(names)))
    assert {event.name: event.kind for event in found} == names


def test_a_range_of_the_user_may_be_called_as_one_of_torch_compile_at_work() -> None:
    found = events_of(
        op("dynamo", 1, 8),
        op("entire_frame_compile", 2, 6),
        span("user_annotation", "dynamo", 10, 8),
        span("user_annotation", "entire_backward_compile", 11, 6),
    )
    assert [event.kind for event in found] == [Kind.COMPILING] * 2 + [Kind.USER_LABEL] * 2


@pytest.mark.parametrize(
    "event",
    [
        span("gpu_user_annotation", "## forward ##", 1, 50, pid=0),
        span("overhead", "Activity Buffer Request", 1, 50, pid=-1, tid=0),
        span("cuda_sync", "Stream Synchronize", 1, 50, pid=0),
        span("python_function", "net.py(3): forward", 1, 50),
        span("python_function", "nn.Module: Linear_0", 1, 50),
        span("", "nothing", 1, 50),
        span("a category of next year", "nothing", 1, 50),
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
def test_what_is_no_work_is_passed_over_and_nothing_is_missing(event: Any) -> None:
    trace = read([op("aten::mm", 0, 100), event])
    assert [found.name for found in trace.events(())] == ["aten::mm"]
    assert trace.table.unread == 0


def test_what_stands_for_a_layer_is_a_label() -> None:
    events = [
        span("user_annotation", "encoder", 0, 9),
        span("user_annotation", "other", 1, 3),
        span("python_function", "nn.Module: Linear_0", 2, 1),
        span("python_function", "nn.Module: Linear_1", 4, 1),
    ]
    found = events_of(*events, sites=["encoder", "nn.Module: Linear_0"])
    assert [(event.kind, event.name) for event in found] == [
        (Kind.LABEL, "encoder"),
        (Kind.USER_LABEL, "other"),
        (Kind.LABEL, "nn.Module: Linear_0"),
    ]


def test_the_range_of_a_collective_is_one_and_says_what_it_was_called_on() -> None:
    """It ends whenever the collective is done, on any thread; others may be called nearly the same."""
    found = events_of(
        span("user_annotation", "nccl:all_reduce", 1, 500, Input_Dims=[[3, 4]], Input_type=["float"]),
        span("user_annotation", "gloo:broadcast", 2, 500),
        span("user_annotation", "nccl: my own range", 3, 500),
    )
    assert [event.kind for event in found] == [Kind.COLLECTIVE, Kind.COLLECTIVE, Kind.USER_LABEL]
    assert [event.end_ns - event.start_ns for event in found] == [500_000] * 3
    assert found[0].signature > 0 == found[1].signature


def test_the_range_of_an_old_collective_is_one_too() -> None:
    """Its category is that of ops, and its inputs are there; a user's own function has both, and is an op."""
    about = {"Input_Dims": [[4]], "Input_type": ["float"]}
    trace = read(
        [span("Operator", "nccl:all_reduce", 5, 1000, **about), span("Operator", "MyFunction", 2000, 50, **about)]
    )
    collective, function = trace.events(())
    assert (collective.kind, collective.end_ns - collective.start_ns) == (Kind.COLLECTIVE, 1_000_000)
    assert (function.kind, function.end_ns - function.start_ns) == (Kind.OP, 50_000)
    assert trace.signatures[collective.signature].shapes == ((4,),)


# Backward


def test_a_node_knows_the_thread_of_its_op_by_the_arrow() -> None:
    """A trace numbers the threads of ops and the forward threads of nodes in two ways. Where two threads ran forward
    ops, their sequence numbers are the same, and only the arrows tell them apart."""
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


def test_without_arrows_the_thread_is_the_one_that_has_the_numbers() -> None:
    forward = [op("aten::mm", 10 * at, 5, tid=100, Sequence_number=at) for at in range(8)]
    other = [op("aten::mm", 10 * at + 1, 5, tid=200, Sequence_number=at) for at in range(3)]
    nodes = [one for at in range(8) for one in node("MmBackward0", 200 + 10 * at, 9, at, 4, tid=300)]
    found = events_of(*other, *forward, *nodes)
    main = {event.thread for event in found if event.sequence == 7 and event.kind is Kind.OP}
    assert {event.forward_thread for event in found if event.kind is Kind.NODE} == main


def test_ops_have_their_sequence_number_and_no_forward_thread() -> None:
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


def test_recent_kernels_name_their_op() -> None:
    """The External id is that of the innermost op around the launch, whether or not the launch is in the file."""
    found = events_of(
        op("aten::mm", 10, 20, External_id=2),
        op("aten::add", 40, 20, External_id=3),
        span("cuda_runtime", "cudaLaunchKernel", 12, 2, External_id=2, correlation=900),
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


def test_kernels_of_2022_and_2023_repeat_the_number_of_their_launch() -> None:
    """There the External id is that of another op, or none: the launch tells the op by its time."""
    found = events_of(
        op("aten::mm", 10, 20, External_id=900),
        op("aten::add", 40, 20, External_id=3),
        span("cuda_runtime", "cudaLaunchKernel", 42, 2, External_id=900, correlation=900),
        kernel("add", 100, 5, External_id=900, correlation=900, device=0, stream=7),
    )
    assert the(found, "aten::mm").correlation == 0
    assert the(found, "add").correlation == the(found, "cudaLaunchKernel").correlation == -900


CALL = span("cuda_runtime", "cudaLaunchKernel", 12, 2, External_id=2, correlation=900)
DRIVER = span("cuda_driver", "cuLaunchKernel", 15, 2, External_id=2, correlation=897)


@pytest.mark.parametrize(
    ("calls", "number", "launched", "expected"),
    [
        ([CALL], 899, 900, BEFORE),
        ([CALL], 901, 900, 0),  # its launch was lost
        ([CALL, DRIVER], 899, 900, 0),
        ([CALL, DRIVER], 896, 900, BEFORE),
        ([CALL], 0, 900, 0),  # it tells no number
        ([CALL], 899, 17, 0),  # kernels are not numbered as calls are
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
        span("cuda_runtime", "cudaGraphLaunch", 12, 2, External_id=2, correlation=50),
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
def test_the_runtime_tells_the_kind_of_the_device(category: str, kind: str) -> None:
    trace = read([span(category, "launch", 1, 1, correlation=9), kernel("k", 5, 1, correlation=9, device=2)])
    assert trace.device == kind
    launch, found = trace.events(())
    assert found.device == f"{kind}:2"
    assert found.correlation == launch.correlation == -9


def test_without_work_of_a_device_there_is_none() -> None:
    assert read([op("aten::mm", 1, 1)]).device is None


def test_streams_and_devices_without_a_number() -> None:
    """Where the args do not say it, it is the track that the work is drawn on."""
    found = events_of(
        span("kernel", "a", 1, 1, pid=3, tid=11),
        span("kernel", "b", 2, 1, pid="GPU", tid="stream 7"),
        span("kernel", "c", 3, 1, pid=3, tid=11, device=-1, stream="13"),
    )
    assert [(event.device, event.thread) for event in found] == [("cuda:3", 11), ("cuda:0", 0), ("cuda:0", 13)]


def test_memory_events_are_signed_and_say_where() -> None:
    found = events_of(
        memory(5, 512, Addr=0x7F00, Device_Id=-1, Device_Type=0),
        memory(6, -512, Addr=0x7F00, Device_Id=1, Device_Type=1),
        memory(7, 64, Device_Id=2, Device_Type=12),
        memory(8, 64, Device_Id=2, Device_Type=20),
        memory(9, "32", Addr="0x10", Device_Type=6, Device_Id=0),
    )
    assert [(event.nbytes, event.correlation, event.device) for event in found] == [
        (512, 0x7F00, "cpu"),
        (-512, 0x7F00, "cuda:1"),
        (64, 0, "xpu:2"),
        (64, 0, "privateuse1:2"),
        (32, 16, "cuda:0"),  # as ROCm's kernels, and as torch calls it
    ]
    assert {(event.kind, event.name, event.sequence) for event in found} == {(Kind.MEMORY, "[memory]", -1)}


# Signatures


def test_signatures_are_those_of_a_session() -> None:
    trace = read(
        [
            op(
                "aten::convolution",
                1,
                1,
                Input_Dims=[[1, 3, 8, 8], [4, 3, 3, 3], [], [], [], []],
                Input_type=["float", "c10::Half", "", "ScalarList", "Scalar", "Scalar"],
                Concrete_Inputs=["", "", "", "[1, -2]", "False", "1e-05"],
            ),
            op("aten::cat", 3, 1, Input_Dims=[[[2, 3], [4, 3]], []], Input_type=["TensorList", "Scalar"]),
            op(
                "aten::clamp",
                5,
                1,
                Input_Dims=[[2], [], [], []],
                Input_type=["double", "Scalar", "Scalar", "Scalar"],
                Concrete_Inputs=["", "-inf", "nan", "(1+2j)"],
            ),
        ]
    )
    conv, cat, clamp = (trace.signatures[event.signature] for event in trace.events(()))
    assert conv.shapes == ((1, 3, 8, 8), (4, 3, 3, 3), (), (), (), ())
    assert conv.dtypes == ("float", "c10::Half", "", "ScalarList", "Scalar", "Scalar")
    assert conv.scalars == (None, None, None, (1, -2), False, 1e-05)
    assert (cat.shapes, cat.dtypes) == ((((2, 3), (4, 3)), ()), ("TensorList", "Scalar"))
    assert clamp.scalars == (None, "-inf", "nan", None)


def test_equal_signatures_have_one_number_and_only_as_much_as_was_asked_for() -> None:
    def wanted(name: str) -> Detail:
        return {"aten::ones": Detail.ONES, "aten::mm": Detail.SHAPES}.get(name, Detail.SCALARS)

    table = EventTable(wanted)
    about = {"Input_Dims": [[2, 3], []], "Input_type": ["float", "Scalar"]}
    table.add(op("aten::ones", at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    table.add(op("aten::mm", 10 + at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    table.add(op("aten::all", 20 + at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    trace = TraceEvents(table)
    names: dict[str, list[int]] = {}
    for event in trace.events(()):
        names.setdefault(event.name, []).append(event.signature)
    assert [trace.signatures[number].scalars for number in names["aten::ones"]] == [
        (None, 0),
        (None, 1),
        *[(None, 2)] * 4,
    ]
    assert len(set(names["aten::ones"])) == 3
    assert len(set(names["aten::mm"])) == 1
    assert trace.signatures[names["aten::mm"][0]].scalars == ()
    assert len(set(names["aten::all"])) == 6


def test_what_was_recorded_is_known() -> None:
    bare, whole = read([op("aten::mm", 1, 1)]), read([op("aten::mm", 1, 1, Input_Dims=[[1]]), memory(1, 8)])
    assert (bare.has_shapes, bare.has_memory) == (False, False)
    assert (whole.has_shapes, whole.has_memory) == (True, True)


# Processes and threads


def test_two_processes_may_have_threads_of_one_number() -> None:
    trace = read(
        [op("aten::a", 1, 1, pid=1, tid=5), op("aten::b", 1, 1, pid=2, tid=5), op("aten::c", 3, 1, pid=1, tid=5)]
    )
    found = {event.name: event.thread for event in trace.events(())}
    assert found["aten::a"] == found["aten::c"] != found["aten::b"]
    assert trace.table.processes == ("1", "2")


def test_numbers_of_threads_as_text_are_the_same_threads() -> None:
    """Until torch 1.12 ops had them as text, and memory as numbers."""
    found = events_of(span("Operator", "aten::a", 1, 5, tid="5"), memory(2, 64, tid=5))
    assert {event.thread for event in found} == {FIRST}


# Traces of old versions of torch


def test_categories_until_torch_1_12() -> None:
    found = events_of(
        span("Operator", "ProfilerStep#1", 0, 500, tid="7", External_id=1),
        span("Operator", "aten::mm", 100, 100, tid="7", External_id=2),
        span("Runtime", "cudaLaunchKernel", 110, 10, tid="7", correlation=334, **{"external id": 2}),
        span("Runtime", "cudaMemcpyAsync", 130, 10, tid="7", correlation=335, **{"external id": 2}),
        kernel(
            "gemm", 150, 5, category="Kernel", tid="stream 7", device=0, stream=7, correlation=334, **{"external id": 2}
        ),
        kernel("Memcpy HtoD", 160, 5, category="Memcpy", device=0, stream=7, correlation=335, **{"external id": 2}),
        kernel("Memset (Device)", 170, 5, category="Memset", device=0, stream=7, correlation=336),
    )
    assert [(event.kind, event.name) for event in found] == [
        (Kind.USER_LABEL, "ProfilerStep#1"),
        (Kind.OP, "aten::mm"),
        (Kind.OP, "cudaLaunchKernel"),
        (Kind.OP, "cudaMemcpyAsync"),
        (Kind.KERNEL, "gemm"),
        (Kind.KERNEL, "Memcpy HtoD"),
        (Kind.KERNEL, "Memset (Device)"),
    ]
    assert [event.correlation for event in found[4:]] == [2, 2, 0]
    assert {event.device for event in found[4:]} == {"cuda:0"}


def test_the_device_of_old_traces_is_known() -> None:
    old = [
        span("Runtime", "cudaLaunchKernel", 110, 10, correlation=334),
        kernel("gemm", 150, 5, category="Kernel", device=0, stream=7, correlation=334),
    ]
    assert read(old).device == "cuda"


def test_the_device_is_known_where_no_launch_is_in_the_file() -> None:
    assert read([kernel("gemm", 150, 5, device=0, stream=7)]).device == "cuda"


def test_old_ranges_and_ops_have_one_category() -> None:
    """A range of a user's has no namespace, no inputs and no sequence number."""
    found = events_of(
        span("Operator", "## forward ##", 0, 90),
        span("Operator", "aten::mm", 1, 9),
        span("Operator", "MyFunction", 20, 9, Input_Dims=[[2, 3]], Input_type=["float"]),
    )
    assert [event.kind for event in found] == [Kind.USER_LABEL, Kind.OP, Kind.OP]


def test_old_nodes_are_nodes_without_shapes_too() -> None:
    about = {"Sequence_number": 3, "Fwd_thread_id": 1}
    found = events_of(
        span("Operator", "aten::mm", 1, 9, Sequence_number=3, Fwd_thread_id=0),
        span("Operator", "MyFunction", 12, 9, Sequence_number=4, Fwd_thread_id=0),
        span("Operator", "autograd::engine::evaluate_function: MmBackward", 100, 50, **about),
        span("Operator", "MmBackward", 101, 40, **about),
        span("Operator", "aten::mm", 102, 30),
    )
    assert [event.kind for event in found] == [Kind.OP, Kind.OP, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.OP]


OLDEST = [  # torch 1.8: no numbers, and no ranges of the engine
    span("Operator", "MyFunction", 10, 20),
    span("Operator", "aten::mm", 12, 9),
    span("Operator", "MyFunctionBackward", 100, 50, tid=8),
    span("Operator", "aten::mm", 102, 30, tid=8),
    span("Operator", "TBackward", 160, 10, tid=8),
    span("Operator", "torch::autograd::AccumulateGrad", 180, 10, tid=8),
]


def test_the_oldest_nodes_are_known_by_their_names() -> None:
    trace = read(OLDEST)
    node, function = Kind.BACKWARD_FUNCTION, Kind.USER_LABEL
    assert [event.kind for event in trace.events(())] == [function, Kind.OP, node, Kind.OP, node, node]
    assert [call.name for call in trace.ranges()] == ["MyFunction"]
    assert (trace.has_nodes, trace.has_numbers) == (True, False)


@pytest.mark.parametrize(
    "more",
    [
        op("autograd::engine::evaluate_function: Mm", 300, 10),
        op("Mm", 300, 10, Sequence_number=3, Fwd_thread_id=1),
    ],
)
def test_where_nodes_are_told_a_name_tells_none(more: Any) -> None:
    found = events_of(*OLDEST, more)
    kinds = {event.name: event.kind for event in found}
    assert kinds["MyFunctionBackward"] is kinds["TBackward"] is Kind.USER_LABEL


def test_an_old_node_of_a_loss_is_no_range() -> None:
    """Its gradient has no dimensions, and its inputs are a list of an empty list."""
    about = {"Sequence_number": 3, "Fwd_thread_id": 1, "Input_Dims": [[]], "Input_type": ["float"]}
    trace = read(
        [
            span("Operator", "autograd::engine::evaluate_function: SumBackward0", 100, 50, **about),
            span("Operator", "SumBackward0", 101, 40, **about),
            span("Operator", "aten::expand", 102, 30, Input_Dims=[[], [], []], Input_type=["float", "", ""]),
        ]
    )
    assert [event.kind for event in trace.events(())] == [Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.OP]
    assert not trace.ranges()


def test_the_shapes_of_the_oldest_traces_are_read() -> None:
    trace = read([span("Operator", "aten::mm", 1, 9, Input_dims=[[2, 3], [3, 4]], Input_type=["float", "float"])])
    (found,) = trace.events(())
    assert trace.signatures[found.signature].shapes == ((2, 3), (3, 4))


@pytest.mark.parametrize(
    ("args", "shapes", "dtypes", "scalars"),
    [
        ({"Input Dims": [[2, 3], [2**70], [-1], [1.5], ["a"], "text", None]}, ((2, 3), *[None] * 6), (), ()),
        ({"Input Dims": [[[2], [3]], [[2], "x"], [[2], [[3]]], [2, [3]]]}, (((2,), (3,)), *[None] * 3), (), ()),
        ({"Input Dims": [[2], [3]], "Input type": ["float", 5]}, ((2,), (3,)), ("float", ""), ()),
        ({"Input Dims": [[2], [3]], "Input type": ["float"]}, ((2,), (3,)), (), ()),
        ({"Input Dims": [[2], [3]], "Input type": "fl"}, ((2,), (3,)), (), ()),
        ({"Input Dims": [[2]], "Input type": ["\ud800"], "Concrete Inputs": ["\ud800"]}, ((2,),), ("?",), ("?",)),
        ({"Input Dims": [[2], []], "Concrete Inputs": [["a"], 5]}, ((2,), ()), (), (None, None)),
        ({"Input Dims": [[2], []], "Concrete Inputs": ["1"]}, ((2,), ()), (), ()),
        ({"Input Dims": [[2]] * 3, "Concrete Inputs": ["{1: 2}", "1e999", "..."]}, ((2,),) * 3, (), (None,) * 3),
        ({"Input Dims": [[2]], "Concrete Inputs": ["(" * 5000]}, ((2,),), (), ("(" * 5000,)),
    ],
    ids=str,
)
def test_of_inputs_that_are_not_as_torch_writes_them_nothing_is_known(
    args: Any, shapes: Any, dtypes: Any, scalars: Any
) -> None:
    """The event is read, with its time; what would be no file of a run is not taken over."""
    trace = read([{**GOOD, "args": args}])
    (event,) = trace.events(())
    assert trace.table.unread == 0
    assert trace.signatures[event.signature] == (shapes, dtypes, scalars, ())


@pytest.mark.parametrize("dims", ["text", 5, {"a": 1}, True])
def test_dims_that_are_no_list_are_no_shapes(dims: Any) -> None:
    trace = read([op("aten::mm", 1, 9, Input_Dims=dims, Input_type=["float"])])
    assert [event.signature for event in trace.events(())] == [0]
    assert (trace.table.unread, trace.has_shapes) == (0, False)


def test_empty_lists_of_shapes_are_no_shapes() -> None:
    """torch 1.8 wrote them for every op, whether or not shapes were recorded."""
    trace = read(
        [span("Operator", "aten::mm", 1, 9, Input_Dims=[]), span("Operator", "aten::add", 1, 9, Input_Dims=[])]
    )
    assert not trace.has_shapes


# What is broken


GOOD = op("aten::mm", 100, 100, External_id=1)


@pytest.mark.parametrize(
    "change",
    [
        {"dur": -1},
        {"dur": None},
        {"dur": "5"},
        {"ts": None},
        {"ts": "5"},
        {"ts": 1e300},
        {"ts": -1e300},
        {"ts": float("nan")},
        {"ts": float("inf")},
        {"dur": 18446744073709551.615},  # a negative one, wrapped around
        {"name": None},
        {"name": 5},
        {"name": ["a"]},
        {"tid": [1]},
        {"cat": ["cpu_op"]},
        {"args": "text"},
        {"args": 5},
        {"args": {"External id": 2**70}},
        {"args": {"External id": -(2**70)}},
        {"args": {"External id": "x"}},
        {"args": {"Sequence number": None}},
        {"args": {"Sequence number": 2**63}},
        {"args": {"Sequence number": 3, "Fwd thread id": "x"}},
    ],
    ids=str,
)
def test_a_broken_op_is_counted_and_the_others_are_read(change: dict[str, Any]) -> None:
    trace = read([GOOD, {**GOOD, "ts": 300, **change}, {**GOOD, "ts": 500}])
    assert trace.table.unread == 1
    assert [event.start_ns for event in trace.events(())] == [100_000, 500_000]


@pytest.mark.parametrize("key", ["ts", "dur", "name", "pid", "tid", "ph"])
def test_an_op_without_what_it_must_have_is_counted(key: str) -> None:
    broken = {name: value for name, value in GOOD.items() if name != key}
    trace = read([broken, GOOD])
    assert (trace.table.unread, len(trace.table)) == (1, 1)


@pytest.mark.parametrize("event", [5, "text", [], {}])
def test_what_is_no_event_is_counted(event: Any) -> None:
    trace = read([event, GOOD])
    assert (trace.table.unread, len(trace.table)) == (1, 1)


@pytest.mark.parametrize(
    "change",
    [
        {"dur": -1},
        {"dur": 18446744073709551.615},
        {"ts": None},
        {"ts": -1e300},
        {"name": 5},
        {"args": "text"},
        {"args": {"correlation": 2**70}},
        {"args": {"correlation": -(2**70)}},
        {"args": {"correlation": "x"}},
        {"args": {"stream": [1]}},
    ],
    ids=str,
)
def test_a_broken_kernel_is_counted(change: dict[str, Any]) -> None:
    good = kernel("k", 1, 1, correlation=4, device=0, stream=7)
    trace = read([good, {**good, **change}, {**good, "ts": 3}])
    assert trace.table.unread == 1
    assert [event.start_ns for event in trace.events(())] == [1000, 3000]


@pytest.mark.parametrize(
    "args",
    [None, "text", {}, {"Bytes": None}, {"Bytes": 2**70}, {"Bytes": 5, "Addr": 2**64}, {"Bytes": 5, "Addr": -(2**70)}],
    ids=str,
)
def test_broken_memory_is_counted(args: Any) -> None:
    trace = read([memory(1, 8), {**memory(2, 8), "args": args}])
    assert (trace.table.unread, len(trace.table)) == (1, 1)


@pytest.mark.parametrize("number", [None, "x", [1]])
def test_a_broken_arrow_is_counted(number: Any) -> None:
    trace = read([GOOD, {**arrow(1, "s", 1), "id": number}, {**arrow(1, "f", 1), "id": number}])
    assert trace.table.unread == 2
    assert len(list(trace.events(()))) == 1


@pytest.mark.parametrize("change", [{"ts": None}, {"dur": -5}, {"dur": "x"}], ids=str)
def test_a_broken_session_is_none(change: dict[str, Any]) -> None:
    session = span("Trace", "PyTorch Profiler (0)", 8, 50, pid="Spans", tid="PyTorch Profiler")
    trace = read([GOOD, {**session, **change}])
    assert (trace.table.unread, trace.start_ns, trace.wall_ns) == (1, None, 100_000)


def test_args_may_be_missing() -> None:
    found = events_of({key: value for key, value in GOOD.items() if key != "args"}, {**GOOD, "args": None})
    assert [(event.sequence, event.correlation, event.signature) for event in found] == [(-1, 0, 0)] * 2


# What stands there twice


EVERYTHING = [
    op("aten::mm", 10.5, 20, External_id=2),
    span("user_annotation", "range", 9.5, 40, External_id=1),
    span("cuda_runtime", "cudaLaunchKernel", 12.5, 2, correlation=900),
    kernel("gemm", 100.5, 5, correlation=900, device=0, stream=7),
    memory(13.5, 512, Addr=16),
    memory(14.5, -512, Addr=16),
    memory(15.5, 512, Addr=16),
]


@pytest.mark.parametrize("whole_us", [False, True])
@pytest.mark.parametrize("times", [2, 3])
def test_events_that_stand_there_twice_count_once(times: int, whole_us: bool) -> None:
    def at(event: Any) -> Any:
        return {**event, "ts": int(event["ts"])} if whole_us else event

    once, several = read(map(at, EVERYTHING)), read([*map(at, EVERYTHING)] * times)
    assert once.table.drop_doubles() == 0
    assert several.table.drop_doubles() == (times - 1) * len(EVERYTHING)
    assert list(several.events(())) == list(once.events(()))
    assert (several.wall_ns, len(several.table)) == (once.wall_ns, len(once.table))


@pytest.mark.parametrize(
    "events",
    [
        [op("aten::mm", 10, 20, External_id=2), op("aten::mm", 10, 20, External_id=3)],
        [op("aten::mm", 10, 20), op("aten::mm", 10, 20)],  # one in the other: in whole microseconds they are alike
        [op("aten::mm", 10.5, 20), op("aten::mm", 10.5, 20, tid=8)],
        [kernel("k", 10, 5, stream=7), kernel("k", 10, 5, stream=8)],
        [kernel("k", 10, 1, stream=7, correlation=5), kernel("k", 10, 1, stream=7, correlation=5)],  # of one graph
        [memory(10, 512, Addr=16), memory(10, -512, Addr=16), memory(10, 512, Addr=16)],
        [memory(10, 512), memory(10, 512)],
    ],
)
def test_events_that_only_look_alike_are_no_doubles(events: list[Any]) -> None:
    assert read(events).table.drop_doubles() == 0


# What it tells of layers


def test_labels_are_ours_and_marks_are_none() -> None:
    trace = read(
        [op("torchprof:Net", 1, 9), op("torchprof:!step", 0, 0), op("torchprof:Net.a", 2, 3), op("aten::a", 3, 1)]
    )
    assert trace.labels == ["torchprof:Net", "torchprof:Net.a"]
    assert (trace.marks, trace.torchs_steps) == (1, 0)


def test_steps_are_counted_on_the_cpu() -> None:
    trace = read(
        [
            *(span("user_annotation", f"ProfilerStep#{at}", 10 * at, 9) for at in range(3)),
            *(span("gpu_user_annotation", f"ProfilerStep#{at}", 10 * at, 9, pid=0) for at in range(3)),
            op("ProfilerStep#4", 40, 1),
        ]
    )
    assert trace.torchs_steps == 3


def test_modules_know_their_callers_and_what_was_called_on_what() -> None:
    module = "nn.Module: "
    trace = read(
        [
            span("python_function", module + "Net_0", 0, 100),
            span("python_function", "net.py(3): forward", 1, 98),
            span("python_function", module + "Linear_0", 10, 20),
            op("aten::linear", 12, 8, Input_Dims=[[2, 3], [4, 3], [4]], Input_type=["float"] * 3),
            span("python_function", module + "Linear_1", 40, 20),
            span("python_function", module + "Linear_0", 200, 20),
        ]
    )
    assert [(call.name, call.parents, call.shapes) for call in trace.modules()] == [
        (module + "Net_0", ("",), frozenset()),
        (module + "Linear_0", (module + "Net_0", ""), {(2, 3), (4, 3), (4,)}),
        (module + "Linear_1", (module + "Net_0",), frozenset()),
    ]


def test_ranges_know_their_callers_and_whether_anything_ran_in_them() -> None:
    trace = read(
        [
            span("user_annotation", "outer", 0, 100),
            span("user_annotation", "inner", 10, 20),
            op("aten::linear", 12, 8),
            span("user_annotation", "empty", 40, 20),
            span("user_annotation", "elsewhere", 0, 100, tid=9),
        ]
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [
        ("outer", ("",), True),
        ("elsewhere", ("",), False),
        ("inner", ("outer",), True),
        ("empty", ("outer",), False),
    ]


def test_ranges_inside_of_nodes_are_of_backward_unless_they_record_a_graph() -> None:
    """A name that forward has, too, is a forward again where operators in it have numbers, as under a checkpoint."""
    trace = read(
        [
            span("user_annotation", "block", 0, 50),
            span("user_annotation", "helper", 5, 10),
            op("aten::mm", 6, 5, Sequence_number=1, Fwd_thread_id=0),
            op("aten::mm", 30, 5, Sequence_number=2, Fwd_thread_id=0),
            span("user_annotation", "backward", 100, 900),
            *node("Mm", 110, 90, 2, 1),
            span("user_annotation", "block", 120, 40),  # computed again
            span("user_annotation", "helper", 125, 10),
            op("aten::mm", 126, 5, Sequence_number=3, Fwd_thread_id=0),
            op("aten::mm", 170, 5),
            *node("Mine", 300, 90, 1, 1),
            span("user_annotation", "helper", 310, 20),
            op("aten::mm", 315, 5),
            span("user_annotation", "only here", 340, 20),
            op("aten::mm", 345, 5, Sequence_number=4, Fwd_thread_id=0),
            span("user_annotation", "helper", 500, 20),  # in no node
            op("aten::mm", 505, 5),
        ]
    )
    ranges = trace.ranges()
    assert {call.name: call.parents for call in ranges} == {
        "block": ("",),
        "helper": ("block", "backward"),
        "backward": ("",),
    }
    found = [
        event for event in trace.events({"block", "helper", "backward"}) if event.kind in (Kind.LABEL, Kind.USER_LABEL)
    ]
    assert [(event.name, event.start_ns // 1000, event.kind is Kind.LABEL) for event in found] == [
        ("block", 0, True),
        ("helper", 5, True),
        ("backward", 100, True),
        ("block", 120, True),
        ("helper", 125, True),
        ("helper", 310, False),
        ("only here", 340, False),
        ("helper", 500, True),
    ]


def test_no_range_is_in_a_collective_that_goes_on() -> None:
    """It ends when it is done, long after the range that it began in: what began meanwhile is in neither of them."""
    trace = read(
        [
            span("user_annotation", "first", 0, 10),
            span("user_annotation", "nccl:all_gather", 5, 1000),
            span("user_annotation", "nccl:all_gather", 15, 1000),
            span("user_annotation", "second", 20, 30),
            op("aten::mm", 21, 5),
        ]
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [
        ("first", ("",), False),
        ("second", ("",), True),
    ]


def test_what_sticks_out_of_a_range_is_around_nothing_there() -> None:
    """In whole microseconds ends are off by one: the attribution cuts them off, and so do the layers."""
    ranges = [("outer", 0, 10), ("inner", 5, 6), ("next", 10, 30)]
    trace = read([span("user_annotation", *one) for one in ranges])
    assert [(call.name, call.parents) for call in trace.ranges()] == [
        ("outer", ("",)),
        ("inner", ("outer",)),
        ("next", ("",)),
    ]
    trace = read([span("python_function", f"nn.Module: {name}_0", *times) for name, *times in ranges])
    assert [call.parents for call in trace.modules()] == [("",), ("nn.Module: outer_0",), ("",)]


def test_a_range_without_a_name_is_no_range() -> None:
    """What nothing is around is around "": what it holds would stand below it."""
    trace = read(
        [
            span("user_annotation", "", 0, 100),
            span("user_annotation", "inner", 10, 20),
            op("aten::mm", 11, 5),
        ]
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [("inner", ("",), True)]


def test_half_a_character_in_a_name_is_a_question_mark() -> None:
    """JSON may escape half of a pair of code units, and no file could be written of it."""
    found = events_of(op("aten::\ud800", 1, 1), kernel("k\udfff", 5, 1), op("aten::\U0001f600", 3, 1))
    assert [event.name for event in found] == ["aten::?", "aten::\U0001f600", "k?"]


def test_a_piece_at_a_time_is_the_same() -> None:
    events = [
        op("aten::mm", 1, 5, Sequence_number=1, Fwd_thread_id=0),
        arrow(1, "s", 1),
        *node("MmBackward0", 20, 9, 1, 1, tid=8),
        arrow(1, "f", 21, tid=8),
        memory(3, 64),
        kernel("k", 9, 1, correlation=3),
        5,
    ]
    table = EventTable(lambda name: Detail.SCALARS)
    for event in events:
        table.add([event])
    whole, parts = read(events), TraceEvents(table)
    assert list(parts.events(())) == list(whole.events(()))
    assert Counter(event.kind for event in parts.events(()))[Kind.NODE] == 1
    assert len(parts.table) == len(whole.table) == 5
    assert parts.table.unread == whole.table.unread == 1


def test_what_mtia_did_and_not_what_it_waited_for() -> None:
    """Its command processors have a category of their own: kernels, copies by DMA, and waits, which are no work. 7 us
    of computing, 2 us of copying; the waits of 40 us are in neither."""
    trace = read(
        [
            op("aten::mm", 0, 50, External_id=3),
            span("mtia_runtime", "runFunctionDynamic", 2, 3, correlation=9),
            kernel("fbgemm_mm", 10, 4, category="mtia_ccp_events", correlation=9, External_id=3, device=1, stream=102),
            kernel("softmax", 16, 3, category="mtia_ccp_events", correlation=9, External_id=3, device=1, stream=102),
            kernel("dma_d2h", 20, 2, category="mtia_ccp_events", device=1, stream=1),
            kernel("StreamSync", 25, 40, category="mtia_ccp_events", device=1, stream=1),
        ]
    )
    work = [event for event in trace.events(()) if event.kind is Kind.KERNEL]
    assert trace.device == "mtia"
    assert {event.device for event in work} == {"mtia:1"}
    took: Counter[KernelWork] = Counter()
    for event in work:
        took[kind_of_work(event.name)] += event.end_ns - event.start_ns
    assert took == {KernelWork.COMPUTING: 7000, KernelWork.COPYING: 2000}
    assert [event.correlation for event in work] == [3, 3, 0]
    assert trace.table.unread == 0
    alone = read([kernel("fbgemm_mm", 10, 4, category="mtia_ccp_events")])
    assert alone.device == "mtia"


@pytest.mark.parametrize(
    ("worked", "told_of", "names"),
    [
        ((9,), (0,), ["cuda:0"]),
        ((3, 9), (0, 1), ["cuda:0", "cuda:1"]),
        ((9,), (0, 1), ["cuda:9"]),  # which of the two it is, nobody knows
        ((9,), (), ["cuda:9"]),
    ],
)
def test_a_device_of_rocm_has_one_name(worked: tuple[int, ...], told_of: tuple[int, ...], names: list[str]) -> None:
    """In kernels it has its number among all agents of the machine, in memory events torch's own, of the type hip."""
    trace = read(
        [
            *(memory(5 + device, 512, Device_Type=6, Device_Id=device) for device in told_of),
            *(kernel("gemm", 20 + device, 1, device=device) for device in worked),
        ]
    )
    events = [*trace.events(())]
    assert [event.device for event in events if event.kind is Kind.MEMORY] == [f"cuda:{device}" for device in told_of]
    assert [event.device for event in events if event.kind is Kind.KERNEL] == names
