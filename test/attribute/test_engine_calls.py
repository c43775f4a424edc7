"""The time of autograd's engine: which pass, which layer, and that nothing is counted twice."""

from __future__ import annotations

from build.events import ENGINE, MAIN, Walked, engine, label, node, op, user_label
from hypothesis import given
from hypothesis import strategies as st

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.torch_ranges import add_engine_calls
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, FORWARD, OUTSIDE

PATHS = [("net",), ("net", "a"), ("net", "b")]
SITES = {"a": Site((1,)), "b": Site((2,))}
FORWARD_OF_BOTH = [label("a", 0, 10), op("x", 2, 8, sequence=1), label("b", 10, 20), op("y", 12, 18, sequence=2)]
ENGINES = (AUTOGRAD_ENGINE,)


def walked(*events: Event) -> Walked:
    columns = EventColumns.of([*FORWARD_OF_BOTH, *events])
    add_engine_calls(columns)
    return Walked(columns, SITES, PATHS)


def test_time_before_between_and_after_nodes_is_the_engines():
    found = walked(engine(30, 100), node("Y", 35, 50, 2), node("X", 60, 90, 1)).self_ns()
    assert found[OUTSIDE, BACKWARD, ENGINES] == 5 + 10 + 10
    assert sum(ns for (_, phase, _), ns in found.items() if phase == BACKWARD) == 100 - 30


def test_time_between_two_nodes_of_one_layer_is_that_layers():
    found = walked(engine(30, 100), node("X", 35, 50, 1), node("X", 60, 90, 1)).self_ns()
    assert found[1, BACKWARD, ENGINES] == 10
    assert found[OUTSIDE, BACKWARD, ENGINES] == 5 + 10


def test_an_op_between_two_nodes_is_backward_of_no_layer():
    walk = walked(engine(30, 100), node("X", 35, 50, 1), op("aten::add", 52, 55), node("X", 60, 90, 1))
    assert walk.owner("aten::add") == (OUTSIDE, BACKWARD)
    assert walk.self_ns()[OUTSIDE, BACKWARD, ENGINES] == 70 - 15 - 3 - 30
    assert (1, BACKWARD, ENGINES) not in walk.self_ns()


def test_without_the_call_a_pass_goes_from_its_first_node_to_the_end_of_its_last():
    walk = walked(node("Y", 35, 50, 2), op("aten::add", 51, 54), node("X", 60, 90, 1), op("aten::mul", 95, 97))
    assert walk.owner("aten::add") == (OUTSIDE, BACKWARD)
    assert walk.owner("aten::mul") == (OUTSIDE, FORWARD)
    assert walk.self_ns()[OUTSIDE, BACKWARD, ENGINES] == 10 - 3


def test_forward_work_between_two_passes_is_in_neither():
    between = [user_label("Optimizer.step#SGD.step", 92, 110), label("a", 120, 130), op("x", 121, 129, sequence=3)]
    for thread in (MAIN, ENGINE):
        walk = walked(node("X", 60, 90, 1, thread=thread), *between, node("X", 150, 170, 3, thread=thread))
        assert all(ns == 0 for key, ns in walk.self_ns().items() if key[2] == ENGINES)
        assert walk.owner("Optimizer.step#SGD.step") == (OUTSIDE, FORWARD)


def test_a_pass_inside_a_label_of_the_user():
    walk = walked(user_label("train", 30, 120), node("Y", 35, 50, 2), node("X", 60, 90, 1), op("aten::mul", 95, 97))
    found = walk.self_ns()
    assert found[OUTSIDE, BACKWARD, ENGINES] == 10
    assert found[OUTSIDE, FORWARD, ("train",)] == 90 - 55 - 2


def test_nodes_on_a_thread_of_their_own_and_the_thread_that_waits_for_them():
    nodes = [node("Y", 40, 50, 2, thread=ENGINE), node("X", 65, 90, 1, thread=ENGINE)]
    walk = walked(engine(30, 100), *nodes)
    found = walk.self_ns()
    # 30 to 40 and 90 to 100 on the calling thread, 50 to 65 on the other one: 70 ns in all are backward, once.
    assert found[OUTSIDE, BACKWARD, ENGINES] == 10 + 15 + 10
    assert sum(ns for (_, phase, _), ns in found.items() if phase == BACKWARD) == 70
    assert sum(each.calls for each in walk.all if each.event.kind is Kind.ENGINE) == 1


def test_a_pass_inside_a_node_is_part_of_that_node():
    walk = walked(engine(30, 100), node("X", 35, 90, 1), engine(40, 80), node("Y", 45, 60, 2), node("Y", 65, 75, 2))
    found = walk.self_ns()
    assert found[OUTSIDE, BACKWARD, ENGINES] == 5 + 10
    inner = {key: ns for key, ns in found.items() if key[2][-1:] == ENGINES and key[0] == 1}
    assert sum(inner.values()) == 5 + 5  # before the first and after the last; between the two it is that of "b"
    assert found[2, BACKWARD, ENGINES] == 5


def test_a_thread_that_waits_and_runs_nodes_counts_each_once():
    """On the calling thread 30 to 40, 60 to 75 and 90 to 100; autograd's thread runs nodes from 40 to 90."""
    others = node("Y", 40, 55, 2, thread=ENGINE), node("Y", 70, 90, 2, thread=ENGINE)
    own = node("X", 60, 75, 1)
    walk = walked(engine(30, 100), others[0], own, others[1])
    assert sum(each.calls for each in walk.all if each.event.kind is Kind.ENGINE and each.event.name) == 1
    parts = [each.event[2:4] for each in walk.all if each.event.kind is Kind.ENGINE and each.event.thread == MAIN]
    assert parts == [(30, 40), (60, 75), (90, 100)]
    backward = sum(ns for (_, phase, _), ns in walk.self_ns().items() if phase == BACKWARD)
    assert backward == (10 + 15 + 10) + 50


def test_a_second_call_while_another_thread_is_in_backward():
    walk = walked(engine(20, 90, thread=3), node("Y", 25, 50, 2, thread=ENGINE), engine(30, 100), node("X", 60, 70, 1))
    assert all(each.event.end_ns >= each.event.start_ns >= 0 and each.ns >= 0 for each in walk.all)


def test_nodes_of_the_calling_thread_until_the_end_of_its_call():
    walk = walked(engine(30, 100), node("Y", 40, 60, 2, thread=ENGINE), node("X", 50, 95, 1))
    parts = [each.event[2:4] for each in walk.all if each.event.kind is Kind.ENGINE and each.event.thread == MAIN]
    assert parts == [(30, 40), (50, 100)]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6),
)
def test_the_time_of_two_threads_adds_up(own, others):
    """The calling thread counts its call without the time from the first to the last node of the other thread, but
    with its own nodes."""

    def nodes(parts, name, sequence, thread):
        at = 30
        for gap, ns in parts:
            yield node(name, at + gap, at + gap + ns, sequence, thread=thread)
            at += gap + ns

    mine, theirs = [*nodes(own, "X", 1, MAIN)], [*nodes(others, "Y", 2, ENGINE)]
    end = max((event.end_ns for event in (*mine, *theirs)), default=30) + 5
    walk = walked(engine(30, end), *sorted((*mine, *theirs), key=lambda event: event.start_ns))
    waiting = set(range(theirs[0].start_ns, theirs[-1].end_ns)) if theirs else set()
    run_by_caller = {at for event in mine for at in range(event.start_ns, event.end_ns)}
    expected = len(set(range(30, end)) - (waiting - run_by_caller)) + len(waiting)
    assert sum(ns for (_, phase, _), ns in walk.self_ns().items() if phase == BACKWARD) == expected
    assert all(ns >= 0 for ns in walk.self_ns().values())


def test_a_call_does_not_join_a_pass_that_began_before_it():
    early = node("X", 20, 25, -1, thread=ENGINE)
    walk = walked(early, engine(30, 100), node("Y", 40, 50, 2, thread=ENGINE))
    assert all(ns >= 0 for ns in walk.self_ns().values())
    assert sum(ns for (_, phase, _), ns in walk.self_ns().items() if phase == BACKWARD) == 5 + 70


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9), st.sampled_from("XY+")), max_size=8), st.booleans())
def test_a_backward_pass_adds_up_to_its_duration(parts, has_call):
    at, events = 30, []
    for gap, ns, what in parts:
        start, at = at + gap, at + gap + ns
        events.append(op("aten::add", start, at) if what == "+" else node(what, start, at, 1 if what == "X" else 2))
    nodes = [event for event in events if event.kind is Kind.NODE]
    first, last = (30, at + 5) if has_call else (nodes[0].start_ns, nodes[-1].end_ns) if nodes else (0, 0)
    walk = walked(*([engine(first, last)] if has_call else []), *events)
    backward = sum(ns for (_, phase, _), ns in walk.self_ns().items() if phase == BACKWARD)
    assert backward == last - first


def test_a_range_that_starts_with_the_first_node_stays_around_the_pass():
    events = [*FORWARD_OF_BOTH, user_label("backward", 100, 300), node("Y", 100, 150, 2), node("X", 160, 200, 1)]
    columns = EventColumns.of(events)
    add_engine_calls(columns)
    found = [(event.name, event.start_ns, event.end_ns) for event in columns.events() if event.start_ns >= 100]
    assert found[:2] == [("backward", 100, 300), ("engine", 100, 200)]
