"""What a thread waits for while it runs no operator."""

from __future__ import annotations

from pathlib import Path

import pytest
from build.events import ENGINE, Walked, engine, label, node, op, user_label
from build.exchanges import exchange
from build.intervals import times_of
from hypothesis import given
from hypothesis import strategies as st

import torchprof
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.torch_ranges import add_engine_calls, add_waits_for_exchanges
from torchprof.run.words import FORWARD, OUTSIDE, WAITS_FOR_AUTOGRAD, WAITS_FOR_RANKS, Frame, FrameKind

WAIT = (WAITS_FOR_AUTOGRAD,)
FORWARD_OF_NET = [label("net", 0, 20), op("x", 2, 8, sequence=1), op("y", 12, 18, sequence=2)]
TRACES = Path(__file__).parents[3] / "shared" / "traces"
RECORDED = Path(__file__).parents[1] / "data" / "gpu"


def walked(*events: Event) -> Walked:
    columns = EventColumns.of(sorted([*FORWARD_OF_NET, *events], key=lambda event: (event.start_ns, -event.end_ns)))
    add_engine_calls(columns)
    return Walked(columns, {"net": Site((0,))}, [("net",)])


def waits(walk: Walked) -> list[tuple[int, int]]:
    return [item.event[2:4] for item in walk.all if item.place.kind == FrameKind.WAIT and item.event.kind is Kind.WAIT]


NODES = [node("Y", 40, 50, 2, thread=ENGINE), node("X", 65, 90, 1, thread=ENGINE)]


def test_the_caller_waits_from_the_first_node_to_the_end_of_the_last():
    for call in ([engine(30, 100)], [engine(30, 100), user_label("hook", 52, 60)]):
        walk = walked(*call, *NODES)
        assert waits(walk) == ([(40, 90)] if len(call) == 1 else [(40, 52), (60, 90)])
        assert walk.self_ns()[OUTSIDE, FORWARD, WAIT] == (50 if len(call) == 1 else 42)


def test_without_a_recorded_call_the_thread_that_made_the_first_node_waits():
    walk = walked(user_label("step", 22, 120), *NODES, op("aten::add_", 95, 99))
    assert waits(walk) == [(40, 90)]
    found = walk.self_ns()
    assert found[OUTSIDE, FORWARD, ("step", *WAIT)] == 50
    assert found[OUTSIDE, FORWARD, ("step",)] == 98 - 50 - 4


def test_who_runs_the_nodes_does_not_wait_for_them():
    assert not waits(walked(node("Y", 40, 50, 2), node("X", 65, 90, 1)))
    assert not waits(walked(engine(30, 100), node("Y", 40, 50, 2), node("X", 65, 90, 1)))


def test_a_thread_that_works_meanwhile_does_not_wait():
    walk = walked(node("Y", 40, 50, 2, thread=ENGINE), op("aten::mul", 55, 60), node("X", 65, 90, 1, thread=ENGINE))
    assert waits(walk) == [(40, 50), (65, 90)]  # the work ends the first pass


def test_it_is_part_of_the_operator_that_waits():
    walk = walked(op("aten::solve", 30, 100), *NODES)
    assert (OUTSIDE, FORWARD, WAIT) not in walk.self_ns()
    assert walk.self_ns()[OUTSIDE, FORWARD, ("aten::solve",)] == 70


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 30)), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6),
)
def test_a_wrapper_waits_where_it_runs_nothing_and_an_exchange_runs(exchanges, ops):
    """Nanosecond by nanosecond: in the label of torch from 20 to 90, on its own thread."""
    ran, time = [], 22
    for gap, ns in ops:
        ran.append(op("aten::mul", time + gap, min(time + gap + ns, 88)))
        time = ran[-1].end_ns
    ran = [event for event in ran if event.start_ns < event.end_ns <= 88]
    sent = [exchange("gloo:broadcast", start, start + ns) for start, ns in exchanges]
    columns = EventColumns.of(
        sorted([user_label("DistributedDataParallel.forward", 20, 90), *ran, *sent], key=lambda event: event.start_ns)
    )
    add_waits_for_exchanges(columns)
    found = [event for event in columns.events() if event.kind is Kind.WAIT]
    waited = [ns for event in found for ns in range(event.start_ns, event.end_ns)]
    busy = {ns for event in ran for ns in range(event.start_ns, event.end_ns)}
    running = {ns for event in sent for ns in range(event.start_ns, event.end_ns)}
    assert len(waited) == len(set(waited))
    assert set(waited) == (set(range(20, 90)) - busy) & running
    assert {event.name for event in found} <= {WAITS_FOR_RANKS}


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=9),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 9)), max_size=5),
)
def test_a_wait_is_in_no_operator_and_inside_backward_on_other_threads(parts, own):
    """Nanosecond by nanosecond."""
    time, nodes = 30, []
    for number, (gap, ns) in enumerate(parts):
        nodes.append(node("XY"[number % 2], time + gap, time + gap + ns, 1 + number % 2, thread=ENGINE))
        time += gap + ns
    time, ran = 25, []
    for gap, ns in own:
        ran.append(op("aten::mul", time + gap, time + gap + ns))
        time += gap + ns
    walk = walked(*nodes, *ran)
    waited = {ns for start, end in waits(walk) for ns in range(start, end)}
    assert waited <= set(range(nodes[0].start_ns, nodes[-1].end_ns))
    in_nodes = {ns for event in nodes for ns in range(event.start_ns, event.end_ns)}
    busy = {ns for event in ran for ns in range(event.start_ns, event.end_ns)}
    assert waited.isdisjoint(busy)
    assert in_nodes - busy <= waited  # while a node runs, its caller cannot do anything else
    assert all(ns >= 0 for ns in walk.self_ns().values())
    assert walk.self_ns().get((OUTSIDE, FORWARD, WAIT), 0) == len(waited)


def is_wait(frames: tuple[Frame, ...]) -> bool:
    return bool(frames) and frames[-1].kind == FrameKind.WAIT


@pytest.mark.parametrize(
    "path", [*sorted(TRACES.glob("*.json.gz")), *sorted(RECORDED.glob("*/trace.json.gz"))], ids=lambda path: path.name
)
def test_a_second_program_finds_the_same_waits_in_recorded_traces(path: Path):
    run = torchprof.from_trace(path)
    found = run.rows.total("cpu_ns", frames=is_wait)
    expected = max(times_of(path).waits.values(), default=0)
    assert abs(found - expected) < 1000
