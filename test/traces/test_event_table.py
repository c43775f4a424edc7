"""Parsing the events of a trace: times, signatures, threads, broken events, duplicates."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from build.trace_files import arrow, exact_ns, kernel, memory_event, node, op, trace_event, write
from build.traced_events import events_of, read

import torchprof
from torchprof.attribute.events import Detail, Kind
from torchprof.traces.event_table import EventTable
from torchprof.traces.events import TraceEvents

GOOD = op("aten::mm", 100, 100, External_id=1)


# Times


@pytest.mark.parametrize(
    ("start", "lasted"),
    [
        ("4458676522690.655", "156.777"),
        ("7948799999999.999", "0.001"),  # the end of a period of three months, after which Kineto's base time changes
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


def test_many_times_are_exact() -> None:
    dice = random.Random(6)
    texts = [f"{dice.randrange(7_948_800_000_000)}.{dice.randrange(1000):03}" for _ in range(3000)]
    found = events_of(*(op(text, float(text), float(text[-9:])) for text in texts))
    assert [(event.start_ns, event.end_ns - event.start_ns) for event in found] == sorted(
        (exact_ns(text), exact_ns(text[-9:])) for text in texts
    )


def test_the_duration_is_that_of_the_events_and_not_of_the_session() -> None:
    ops = [op("aten::a", 10, 5), op("aten::b", 20, 7.5), memory_event(40, 512), kernel("k", 25, 10)]
    assert (read(*ops).wall_ns, read(*ops).start_ns, read(*ops).outside_ns) == (40_000 - 10_000, None, (0, 0))
    session = trace_event("Trace", "PyTorch Profiler (0)", 8, 50.25, pid="Spans", tid="PyTorch Profiler")
    trace = read(*ops, session)
    assert (trace.wall_ns, trace.start_ns, trace.outside_ns) == (40_000 - 10_000, 8_000, (2_000, 18_250))


# Signatures


def test_signatures_equal_those_of_a_session() -> None:
    trace = read(
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
    )
    conv, cat, clamp = (trace.signatures[event.signature] for event in trace.columns(()).events())
    assert conv.shapes == ((1, 3, 8, 8), (4, 3, 3, 3), (), (), (), ())
    assert conv.dtypes == ("float", "c10::Half", "", "ScalarList", "Scalar", "Scalar")
    assert conv.scalars == (None, None, None, (1, -2), False, 1e-05)
    assert (cat.shapes, cat.dtypes) == ((((2, 3), (4, 3)), ()), ("TensorList", "Scalar"))
    assert clamp.scalars == (None, "-inf", "nan", None)


def test_equal_signatures_have_one_number_and_only_the_wanted_detail() -> None:
    def wanted(name: str) -> Detail:
        return {"aten::ones": Detail.ONES, "aten::mm": Detail.SHAPES}.get(name, Detail.SCALARS)

    table = EventTable(wanted)
    about = {"Input_Dims": [[2, 3], []], "Input_type": ["float", "Scalar"]}
    table.add(op("aten::ones", at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    table.add(op("aten::mm", 10 + at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    table.add(op("aten::all", 20 + at, 0.5, Concrete_Inputs=["", str(at)], **about) for at in range(6))
    trace = TraceEvents(table)
    names: dict[str, list[int]] = {}
    for event in trace.columns(()).events():
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


def test_recorded_shapes_and_memory_are_detected() -> None:
    bare, whole = read(op("aten::mm", 1, 1)), read(op("aten::mm", 1, 1, Input_Dims=[[1]]), memory_event(1, 8))
    assert (bare.has_shapes, bare.has_memory) == (False, False)
    assert (whole.has_shapes, whole.has_memory) == (True, True)


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
def test_inputs_in_another_form_than_torchs_are_unknown(args: Any, shapes: Any, dtypes: Any, scalars: Any) -> None:
    """The event is read with its time. Values that a run file cannot hold are dropped."""
    trace = read({**GOOD, "args": args})
    (event,) = trace.columns(()).events()
    assert trace.table.unread == 0
    assert trace.signatures[event.signature] == (shapes, dtypes, scalars, ())


@pytest.mark.parametrize("dims", ["text", 5, {"a": 1}, True])
def test_dims_that_are_no_list_are_no_shapes(dims: Any) -> None:
    trace = read(op("aten::mm", 1, 9, Input_Dims=dims, Input_type=["float"]))
    assert [event.signature for event in trace.columns(()).events()] == [0]
    assert (trace.table.unread, trace.has_shapes) == (0, False)


# Processes and threads


def test_equal_thread_ids_of_two_processes_are_two_threads() -> None:
    trace = read(
        op("aten::a", 1, 1, pid=1, tid=5), op("aten::b", 1, 1, pid=2, tid=5), op("aten::c", 3, 1, pid=1, tid=5)
    )
    found = {event.name: event.thread for event in trace.columns(()).events()}
    assert found["aten::a"] == found["aten::c"] != found["aten::b"]
    assert trace.table.processes == ("1", "2")


def test_a_thread_id_as_text_is_the_same_thread() -> None:
    """Until torch 1.12, operators had text, and memory events had numbers."""
    found = events_of(trace_event("Operator", "aten::a", 1, 5, tid="5"), memory_event(2, 64, tid=5))
    assert {event.thread for event in found} == {1}


# Broken events


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
def test_a_broken_operator_is_counted_and_the_others_are_read(change: dict[str, Any]) -> None:
    trace = read(GOOD, {**GOOD, "ts": 300, **change}, {**GOOD, "ts": 500})
    assert trace.table.unread == 1
    assert [event.start_ns for event in trace.columns(()).events()] == [100_000, 500_000]


@pytest.mark.parametrize("key", ["ts", "dur", "name", "pid", "tid", "ph"])
def test_an_operator_without_a_necessary_value_is_counted(key: str) -> None:
    broken = {name: value for name, value in GOOD.items() if name != key}
    trace = read(broken, GOOD)
    assert (trace.table.unread, len(trace.table)) == (1, 1)


@pytest.mark.parametrize("event", [5, "text", [], {}])
def test_entries_that_are_no_events_are_counted(event: Any) -> None:
    trace = read(event, GOOD)
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
    trace = read(good, {**good, **change}, {**good, "ts": 3})
    assert trace.table.unread == 1
    assert [event.start_ns for event in trace.columns(()).events()] == [1000, 3000]


@pytest.mark.parametrize(
    "args",
    [None, "text", {}, {"Bytes": None}, {"Bytes": 2**70}, {"Bytes": 5, "Addr": 2**64}, {"Bytes": 5, "Addr": -(2**70)}],
    ids=str,
)
def test_broken_memory_is_counted(args: Any) -> None:
    trace = read(memory_event(1, 8), {**memory_event(2, 8), "args": args})
    assert (trace.table.unread, len(trace.table)) == (1, 1)


@pytest.mark.parametrize("number", [None, "x", [1]])
def test_a_broken_arrow_is_counted(number: Any) -> None:
    trace = read(GOOD, {**arrow(1, "s", 1), "id": number}, {**arrow(1, "f", 1), "id": number})
    assert trace.table.unread == 2
    assert len(list(trace.columns(()).events())) == 1


@pytest.mark.parametrize("change", [{"ts": None}, {"dur": -5}, {"dur": "x"}], ids=str)
def test_a_broken_session_is_ignored(change: dict[str, Any]) -> None:
    session = trace_event("Trace", "PyTorch Profiler (0)", 8, 50, pid="Spans", tid="PyTorch Profiler")
    trace = read(GOOD, {**session, **change})
    assert (trace.table.unread, trace.start_ns, trace.wall_ns) == (1, None, 100_000)


def test_args_may_be_missing() -> None:
    found = events_of({key: value for key, value in GOOD.items() if key != "args"}, {**GOOD, "args": None})
    assert [(event.sequence, event.correlation, event.signature) for event in found] == [(-1, 0, 0)] * 2


# Doubles


EVERYTHING = [
    op("aten::mm", 10.5, 20, External_id=2),
    trace_event("user_annotation", "range", 9.5, 40, External_id=1),
    trace_event("cuda_runtime", "cudaLaunchKernel", 12.5, 2, correlation=900),
    kernel("gemm", 100.5, 5, correlation=900, device=0, stream=7),
    memory_event(13.5, 512, Addr=16),
    memory_event(14.5, -512, Addr=16),
    memory_event(15.5, 512, Addr=16),
]


@pytest.mark.parametrize("whole_us", [False, True])
@pytest.mark.parametrize("times", [2, 3])
def test_events_that_are_in_the_trace_twice_count_once(times: int, whole_us: bool) -> None:
    def at(event: Any) -> Any:
        return {**event, "ts": int(event["ts"])} if whole_us else event

    once, several = read(*map(at, EVERYTHING)), read(*([*map(at, EVERYTHING)] * times))
    assert once.table.drop_duplicates() == 0
    assert several.table.drop_duplicates() == (times - 1) * len(EVERYTHING)
    assert list(several.columns(()).events()) == list(once.columns(()).events())
    assert (several.wall_ns, len(several.table)) == (once.wall_ns, len(once.table))


@pytest.mark.parametrize(
    "events",
    [
        [op("aten::mm", 10, 20, External_id=2), op("aten::mm", 10, 20, External_id=3)],
        [op("aten::mm", 10, 20), op("aten::mm", 10, 20)],  # nested: in whole microseconds, their fields can be equal
        [op("aten::mm", 10.5, 20), op("aten::mm", 10.5, 20, tid=8)],
        [kernel("k", 10, 5, stream=7), kernel("k", 10, 5, stream=8)],
        [kernel("k", 10, 1, stream=7, correlation=5), kernel("k", 10, 1, stream=7, correlation=5)],  # of one CUDA graph
        [memory_event(10, 512, Addr=16), memory_event(10, -512, Addr=16), memory_event(10, 512, Addr=16)],
        [memory_event(10, 512), memory_event(10, 512)],
    ],
)
def test_different_events_with_equal_fields_are_no_duplicates(events: list[Any]) -> None:
    assert read(*events).table.drop_duplicates() == 0


@pytest.mark.parametrize(
    ("second", "length"),
    [
        (op("aten::b", 29.999, 15), 19_999),  # begins 1 ns before the end of the first
        (op("aten::b", 29.1, 15), 19_100),
        (op("aten::b", 28.9, 15), 20_000),  # over 1 us: no rounding
        (op("aten::b", 29.999, 0.001), 20_000),  # inside, and ends with it
        (op("aten::b", 29.5, 0.6), 20_000),  # most of it is inside: it ends too late
        (op("aten::b", 29.999, 15, tid=8), 20_000),
        (trace_event("cuda_runtime", "cudaLaunchKernel", 29.999, 15), 20_000),
        (trace_event("user_annotation", "gloo:all_reduce", 29.999, 15), 20_000),
    ],
)
def test_ranges_that_overlap_by_rounding_follow_each_other(second: Any, length: int) -> None:
    found = read(op("aten::a", 10, 20), second)
    found.table.separate()
    assert list(found.table.cpu.ns) == [length, round(second["dur"] * 1000)]


def test_all_ranges_that_end_there_are_cut() -> None:
    found = read(op("aten::outer", 10, 20), op("aten::inner", 12, 18), op("aten::b", 29.999, 15))
    found.table.separate()
    assert list(found.table.cpu.ns) == [19_999, 17_999, 15_000]


# Names and pieces


def test_half_a_surrogate_pair_in_a_name_is_a_question_mark() -> None:
    """JSON can escape half of a surrogate pair, which UTF-8 cannot encode."""
    found = events_of(op("aten::\ud800", 1, 1), kernel("k\udfff", 5, 1), op("aten::\U0001f600", 3, 1))
    assert [event.name for event in found] == ["aten::?", "aten::\U0001f600", "k?"]


def test_events_added_one_at_a_time_are_the_same() -> None:
    events = [
        op("aten::mm", 1, 5, Sequence_number=1, Fwd_thread_id=0),
        arrow(1, "s", 1),
        *node("MmBackward0", 20, 9, 1, 1, tid=8),
        arrow(1, "f", 21, tid=8),
        memory_event(3, 64),
        kernel("k", 9, 1, correlation=3),
        5,
    ]
    table = EventTable(lambda name: Detail.SCALARS)
    for event in events:
        table.add([event])
    whole, parts = read(*events), TraceEvents(table)
    assert list(parts.columns(()).events()) == list(whole.columns(()).events())
    assert Counter(event.kind for event in parts.columns(()).events())[Kind.NODE] == 1
    assert len(parts.table) == len(whole.table) == 5
    assert parts.table.unread == whole.table.unread == 1


def test_ranges_that_cross_and_work_before_its_launch_are_counted(tmp_path: Path) -> None:
    """They are counted by hand: neither nested ranges nor those that rounding makes overlap are among them."""
    launch = trace_event("cuda_runtime", "cudaLaunchKernel", 12, 2, correlation=5)
    crossing = [op("aten::outer", 10, 20), op("aten::inner", 15, 5), op("aten::crossing", 25, 30)]
    rounded = [op("aten::first", 100, 11), op("aten::second", 110, 9), op("aten::third", 119, 2)]
    in_order = [launch, *crossing, *rounded, kernel("gemm", 11.5, 5, correlation=5)]
    trace = {"traceEvents": [*in_order, op("aten::ends_before_it_begins", 200, -3)]}

    def counts() -> dict[str, int]:
        run = torchprof.from_trace(write(tmp_path / "t.json", trace))
        return {warning.code: warning.facts["count"] for warning in run.meta.warnings if "count" in warning.facts}

    assert counts() == {"trace_events_missing": 1, "trace_ranges_cross": 1}
    trace["traceEvents"] += [kernel("early", 4, 5, correlation=6), {**launch, "args": {"correlation": 6}}]
    assert counts() == {"trace_events_missing": 1, "trace_ranges_cross": 1, "clocks_differ": 1}


def test_what_begins_after_the_cut_of_a_range_does_not_cross_it() -> None:
    """The second is cut at 100 us, so the third is not inside it; the fourth is cut at 200 us."""
    found = read(*[op("aten::x", start, lasted) for start, lasted in ((0, 100), (50, 100), (120, 80), (180, 100))])
    assert found.table.separate() == 2


def test_work_without_a_number_has_no_launch() -> None:
    calls = [trace_event("cuda_runtime", "cudaLaunchKernel", 10 * at, 5) for at in range(50)]
    found = read(*calls, *(kernel("gemm", 10 * at + 6, 2) for at in range(50)))
    assert found.table.count_early_work() == 0
