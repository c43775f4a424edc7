"""The events of traces that old versions of torch wrote."""

from __future__ import annotations

from typing import Any

import pytest
from build.trace_files import kernel, op, trace_event
from build.traced_events import events_of, read

from torchprof.attribute.events import Kind


def test_categories_until_torch_1_12() -> None:
    found = events_of(
        trace_event("Operator", "ProfilerStep#1", 0, 500, tid="7", External_id=1),
        trace_event("Operator", "aten::mm", 100, 100, tid="7", External_id=2),
        trace_event("Runtime", "cudaLaunchKernel", 110, 10, tid="7", correlation=334, **{"external id": 2}),
        trace_event("Runtime", "cudaMemcpyAsync", 130, 10, tid="7", correlation=335, **{"external id": 2}),
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
        trace_event("Runtime", "cudaLaunchKernel", 110, 10, correlation=334),
        kernel("gemm", 150, 5, category="Kernel", device=0, stream=7, correlation=334),
    ]
    assert read(*old).device == "cuda"


def test_the_device_is_known_without_a_launch_in_the_file() -> None:
    assert read(kernel("gemm", 150, 5, device=0, stream=7)).device == "cuda"


def test_old_ranges_and_ops_have_one_category() -> None:
    """A user range has no namespace, no inputs and no sequence number."""
    found = events_of(
        trace_event("Operator", "## forward ##", 0, 90),
        trace_event("Operator", "aten::mm", 1, 9),
        trace_event("Operator", "MyFunction", 20, 9, Input_Dims=[[2, 3]], Input_type=["float"]),
    )
    assert [event.kind for event in found] == [Kind.USER_LABEL, Kind.OP, Kind.OP]


def test_old_nodes_are_recognized_without_shapes() -> None:
    about = {"Sequence_number": 3, "Fwd_thread_id": 1}
    found = events_of(
        trace_event("Operator", "aten::mm", 1, 9, Sequence_number=3, Fwd_thread_id=0),
        trace_event("Operator", "MyFunction", 12, 9, Sequence_number=4, Fwd_thread_id=0),
        trace_event("Operator", "autograd::engine::evaluate_function: MmBackward", 100, 50, **about),
        trace_event("Operator", "MmBackward", 101, 40, **about),
        trace_event("Operator", "aten::mm", 102, 30),
    )
    assert [event.kind for event in found] == [Kind.OP, Kind.OP, Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.OP]


OLDEST = [  # torch 1.8: no numbers, and no ranges of the engine
    trace_event("Operator", "MyFunction", 10, 20),
    trace_event("Operator", "aten::mm", 12, 9),
    trace_event("Operator", "MyFunctionBackward", 100, 50, tid=8),
    trace_event("Operator", "aten::mm", 102, 30, tid=8),
    trace_event("Operator", "TBackward", 160, 10, tid=8),
    trace_event("Operator", "torch::autograd::AccumulateGrad", 180, 10, tid=8),
]


def test_the_oldest_nodes_are_recognized_by_their_names() -> None:
    trace = read(*OLDEST)
    node, function = Kind.BACKWARD_FUNCTION, Kind.USER_LABEL
    assert [event.kind for event in trace.columns(()).events()] == [function, Kind.OP, node, Kind.OP, node, node]
    assert [call.name for call in trace.ranges()] == ["MyFunction"]
    assert (trace.has_nodes, trace.has_forward_threads) == (True, False)


@pytest.mark.parametrize(
    "more",
    [op("autograd::engine::evaluate_function: Mm", 300, 10), op("Mm", 300, 10, Sequence_number=3, Fwd_thread_id=1)],
)
def test_names_do_not_count_if_the_trace_marks_its_nodes(more: Any) -> None:
    found = events_of(*OLDEST, more)
    kinds = {event.name: event.kind for event in found}
    assert kinds["MyFunctionBackward"] is kinds["TBackward"] is Kind.USER_LABEL


def test_an_old_node_of_a_loss_is_no_range() -> None:
    """Its gradient has no dimensions, so its inputs are a list with an empty list."""
    about = {"Sequence_number": 3, "Fwd_thread_id": 1, "Input_Dims": [[]], "Input_type": ["float"]}
    trace = read(
        trace_event("Operator", "autograd::engine::evaluate_function: SumBackward0", 100, 50, **about),
        trace_event("Operator", "SumBackward0", 101, 40, **about),
        trace_event("Operator", "aten::expand", 102, 30, Input_Dims=[[], [], []], Input_type=["float", "", ""]),
    )
    assert [event.kind for event in trace.columns(()).events()] == [Kind.NODE, Kind.BACKWARD_FUNCTION, Kind.OP]
    assert not trace.ranges()


def test_the_shapes_of_the_oldest_traces_are_read() -> None:
    trace = read(trace_event("Operator", "aten::mm", 1, 9, Input_dims=[[2, 3], [3, 4]], Input_type=["float", "float"]))
    (found,) = trace.columns(()).events()
    assert trace.signatures[found.signature].shapes == ((2, 3), (3, 4))


def test_empty_lists_of_shapes_are_no_shapes() -> None:
    """torch 1.8 wrote them for every operator, even if no shapes were recorded."""
    trace = read(
        trace_event("Operator", "aten::mm", 1, 9, Input_Dims=[]),
        trace_event("Operator", "aten::add", 1, 9, Input_Dims=[]),
    )
    assert not trace.has_shapes
