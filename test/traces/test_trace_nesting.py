"""The labels, modules and ranges in a trace, and what is nested in what."""

from __future__ import annotations

from build.trace_files import node, op, trace_event
from build.traced_events import read

from torchprof.attribute.events import Kind


def test_labels_are_those_of_torchprof_without_marks() -> None:
    trace = read(
        op("torchprof:Net", 1, 9), op("torchprof:!step", 0, 0), op("torchprof:Net.a", 2, 3), op("aten::a", 3, 1)
    )
    assert trace.labels == ["torchprof:Net", "torchprof:Net.a"]
    assert (trace.marks, trace.torchs_steps) == (1, 0)


def test_steps_are_counted_on_the_cpu() -> None:
    trace = read(
        *(trace_event("user_annotation", f"ProfilerStep#{at}", 10 * at, 9) for at in range(3)),
        *(trace_event("gpu_user_annotation", f"ProfilerStep#{at}", 10 * at, 9, pid=0) for at in range(3)),
        op("ProfilerStep#4", 40, 1),
    )
    assert trace.torchs_steps == 3


def test_modules_have_their_callers() -> None:
    module = "nn.Module: "
    trace = read(
        trace_event("python_function", module + "Net_0", 0, 100),
        trace_event("python_function", "net.py(3): forward", 1, 98),
        trace_event("python_function", module + "Linear_0", 10, 20),
        op("aten::linear", 12, 8),
        trace_event("python_function", module + "Linear_1", 40, 20),
        trace_event("python_function", module + "Linear_0", 200, 20),
    )
    assert trace.modules() == [
        (module + "Net_0", ("",)),
        (module + "Linear_0", (module + "Net_0", "")),
        (module + "Linear_1", (module + "Net_0",)),
    ]


def test_ranges_have_their_parents_and_whether_operators_ran_in_them() -> None:
    trace = read(
        trace_event("user_annotation", "outer", 0, 100),
        trace_event("user_annotation", "inner", 10, 20),
        op("aten::linear", 12, 8),
        trace_event("user_annotation", "empty", 40, 20),
        trace_event("user_annotation", "elsewhere", 0, 100, tid=9),
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [
        ("outer", ("",), True),
        ("elsewhere", ("",), False),
        ("inner", ("outer",), True),
        ("empty", ("outer",), False),
    ]


def test_ranges_inside_nodes_are_backward_unless_they_record_a_graph() -> None:
    """A range of forward inside a node is recompute if its operators have sequence numbers, as under a checkpoint."""
    trace = read(
        trace_event("user_annotation", "block", 0, 50),
        trace_event("user_annotation", "helper", 5, 10),
        op("aten::mm", 6, 5, Sequence_number=1, Fwd_thread_id=0),
        op("aten::mm", 30, 5, Sequence_number=2, Fwd_thread_id=0),
        trace_event("user_annotation", "backward", 100, 900),
        *node("Mm", 110, 90, 2, 1),
        trace_event("user_annotation", "block", 120, 40),  # recompute
        trace_event("user_annotation", "helper", 125, 10),
        op("aten::mm", 126, 5, Sequence_number=3, Fwd_thread_id=0),
        op("aten::mm", 170, 5),
        *node("Mine", 300, 90, 1, 1),
        trace_event("user_annotation", "helper", 310, 20),
        op("aten::mm", 315, 5),
        trace_event("user_annotation", "only here", 340, 20),
        op("aten::mm", 345, 5, Sequence_number=4, Fwd_thread_id=0),
        trace_event("user_annotation", "helper", 500, 20),  # outside of nodes
        op("aten::mm", 505, 5),
    )
    ranges = trace.ranges()
    assert {call.name: call.parents for call in ranges} == {
        "block": ("",),
        "helper": ("block", "backward"),
        "backward": ("",),
    }
    found = [
        event
        for event in trace.columns({"block", "helper", "backward"}).events()
        if event.kind in (Kind.LABEL, Kind.USER_LABEL)
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


def test_a_collective_contains_no_range() -> None:
    """The collective ends long after the range in which it started; later ranges are inside neither of them."""
    trace = read(
        trace_event("user_annotation", "first", 0, 10),
        trace_event("user_annotation", "nccl:all_gather", 5, 1000),
        trace_event("user_annotation", "nccl:all_gather", 15, 1000),
        trace_event("user_annotation", "second", 20, 30),
        op("aten::mm", 21, 5),
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [
        ("first", ("",), False),
        ("second", ("",), True),
    ]


def test_a_range_ends_with_its_parent() -> None:
    """In whole microseconds, ends are off by one. A range that ends after its parent is cut off there."""
    ranges = [("outer", 0, 10), ("inner", 5, 6), ("next", 10, 30)]
    trace = read(*[trace_event("user_annotation", *one) for one in ranges])
    assert [(call.name, call.parents) for call in trace.ranges()] == [
        ("outer", ("",)),
        ("inner", ("outer",)),
        ("next", ("",)),
    ]
    trace = read(*[trace_event("python_function", f"nn.Module: {name}_0", *times) for name, *times in ranges])
    assert [call.parents for call in trace.modules()] == [("",), ("nn.Module: outer_0",), ("",)]


def test_a_range_without_a_name_is_no_range() -> None:
    """The name "" means no parent, so a range of this name would hide its children."""
    trace = read(
        trace_event("user_annotation", "", 0, 100),
        trace_event("user_annotation", "inner", 10, 20),
        op("aten::mm", 11, 5),
    )
    assert [(call.name, call.parents, call.has_ops) for call in trace.ranges()] == [("inner", ("",), True)]
