"""The timeline: its rule on hand-made and random events, real runs against torch's events, and the trace."""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
import tempfile
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.browser import Tab
from build.events import ENGINE, MAIN, kernel, label, memory, node, op, step, user_label, walk_of
from build.examples import examples
from build.forests import Paths, sessions
from build.hand_made import row, run_of
from build.models import Checkpointed, Holder, Mlp, Raises, Recursive, Several, Tied, trained
from build.places import ROOT
from build.processes import in_thread
from build.warnings import run_warnings
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import torchprof
from torchprof import Profile, Run
from torchprof.attribute.event_names import WAITS
from torchprof.attribute.events import PREFIX, Attributed, Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure import assemble
from torchprof.measure.timeline import OpenSpans
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey
from torchprof.run.timeline import Lane, Spans, Timeline
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE, PHASES, RECOMPUTE

# A garbage collection may interrupt a call, and has spans of its own.
pytestmark = pytest.mark.usefixtures("garbage_is_not_collected")

PATHS: Paths = (("Net",), ("Net", "a"), ("Net", "a", "x"), ("Net", "a", "y"), ("Net", "b"), ("Other",))
NET, A, X, Y, B, OTHER = range(6)
OF = {layer: 10 * (layer + 1) for layer in range(6)}  # the sequence number of the op of each layer


class Span(NamedTuple):
    """One row of the columns, with the meanings of its numbers."""

    start: int
    end: int
    lane: Lane
    layer: int
    phase: str
    name: str | None  # None: the layer's own


def lines(spans: Spans) -> list[Span]:
    return [
        Span(start, end, spans.lanes[lane], layer, PHASES[phase], spans.names[name] if name >= 0 else None)
        for start, end, lane, layer, phase, name in zip(*(spans.columns[name] for name in Spans.COLUMNS))
    ]


def spans_of(run: Run) -> Spans:
    assert run.timeline is not None and run.timeline.spans is not None
    return run.timeline.spans


def assert_nested(ranges: Sequence[tuple[int, int]]) -> None:
    """In this order the ranges open and close like brackets; ranges that only touch do not overlap."""
    stack: list[tuple[int, int]] = []
    last = -math.inf
    for start, end in ranges:
        assert last <= start <= end
        last = start
        while stack and stack[-1][1] <= start:
            stack.pop()
        assert not stack or end <= stack[-1][1], f"{(start, end)} sticks out of {stack[-1]}"
        stack.append((start, end))


def assert_all_nested(spans: Spans) -> None:
    lanes: defaultdict[Lane, list[tuple[int, int]]] = defaultdict(list)
    for one in lines(spans):
        lanes[one.lane].append((one.start, one.end))
    for ranges in lanes.values():
        assert_nested(ranges)


# Hand-made events


def call(layer: int, start: int, end: int, thread: int = MAIN) -> Event:
    return label(f"label {layer}", start, end, thread)


def node_of(layer: int, start: int, end: int, thread: int = MAIN) -> Event:
    """A node that an op of this layer created; OUTSIDE: a node without a known op."""
    return node("Back", start, end, OF.get(layer, 1), thread=thread)


FORWARDS = [  # each layer works once, the loss at 60
    call(NET, 10, 50),
    op("aten::op", 11, 12, sequence=OF[NET]),
    call(A, 15, 30),
    op("aten::op", 16, 17, sequence=OF[A]),
    call(X, 18, 22),
    op("aten::op", 19, 20, sequence=OF[X], correlation=7),
    call(Y, 24, 28),
    op("aten::op", 25, 26, sequence=OF[Y]),
    call(B, 35, 45),
    op("aten::op", 36, 37, sequence=OF[B]),
    call(OTHER, 52, 58),
    op("aten::op", 53, 54, sequence=OF[OTHER]),
    op("aten::op", 60, 61, sequence=90),
]


def attributed_of(
    events: Sequence[Event], paths: Paths = PATHS, selected: set[int] | None = None
) -> tuple[list[Attributed], Spans]:
    """All attributed events, and their spans."""
    sites = {f"label {number}": Site((number,)) for number in range(len(paths))}
    attribution = Attribution(sites, paths, selected)
    watcher = OpenSpans([Layer(path, "Module") for path in paths], selected, start_ns=0)
    attributed = list(walk_of(attribution, events))
    assert list(watcher.observe(attributed)) == attributed
    return attributed, watcher.result()["timeline"].spans


def walked(*events: Event, selected: set[int] | None = None) -> Spans:
    at_work = [event for event in events if event.kind is not Kind.KERNEL]
    kernels = [event for event in events if event.kind is Kind.KERNEL]
    spans = attributed_of([step(0), *sorted(at_work, key=lambda one: one.start_ns), *kernels], selected=selected)[1]
    assert_all_nested(spans)
    return spans


def of_phase(spans: Spans, phase: str) -> list[tuple[int, int, int]]:
    return [(one.start, one.end, one.layer) for one in lines(spans) if one.phase == phase and one.name is None]


def test_each_call_is_a_span() -> None:
    spans = walked(*FORWARDS)
    thread = Lane("cpu", 1)
    assert lines(spans) == [
        Span(10, 50, thread, NET, FORWARD, None),
        Span(15, 30, thread, A, FORWARD, None),
        Span(18, 22, thread, X, FORWARD, None),
        Span(24, 28, thread, Y, FORWARD, None),
        Span(35, 45, thread, B, FORWARD, None),
        Span(52, 58, thread, OTHER, FORWARD, None),
    ]
    assert (spans.steps, spans.dropped) == ((), 0)


def test_a_wrapper_and_the_wrapped_module_are_one_span() -> None:
    sites = {"wrapper": Site((NET,)), "wrapped": Site((NET,), "wrapper"), "a": Site((A,))}
    watcher = OpenSpans([Layer(path, "Module") for path in PATHS], start_ns=0)
    calls = [("wrapper", 10, 50), ("wrapped", 12, 48), ("a", 20, 30), ("wrapped", 60, 70)]
    events = [label(*each) for each in calls]
    list(watcher.observe(walk_of(Attribution(sites, PATHS), events)))
    assert of_phase(watcher.result()["timeline"].spans, FORWARD) == [(10, 50, NET), (20, 30, A), (60, 70, NET)]


def test_times_are_after_the_first_mark() -> None:
    events = [step(1000), call(NET, 1010, 1050)]
    assert of_phase(attributed_of(events)[1], FORWARD) == [(10, 50, NET)]
    watcher = OpenSpans([Layer(path, "Module") for path in PATHS], start_ns=900)
    attribution = Attribution({"label 0": Site((0,))}, PATHS)
    list(watcher.observe(walk_of(attribution, events[1:])))
    assert of_phase(watcher.result()["timeline"].spans, FORWARD) == [(110, 150, NET)]


@pytest.mark.parametrize("thread", [MAIN, ENGINE])
def test_backward_is_stretches_of_a_layer_and_of_the_layers_below_it(thread: int) -> None:
    """The node of the loss has no layer. Net's stretch lasts from b's node to its own; the time between x and y belongs
    to a."""
    spans = walked(
        *FORWARDS,
        node_of(OUTSIDE, 70, 75, thread=thread),
        node_of(B, 80, 85, thread=thread),
        node_of(Y, 90, 95, thread=thread),
        node_of(X, 100, 105, thread=thread),
        node_of(A, 110, 115, thread=thread),
        node_of(NET, 120, 125, thread=thread),
    )
    assert of_phase(spans, BACKWARD) == [(80, 125, NET), (80, 85, B), (90, 115, A), (90, 95, Y), (100, 105, X)]
    assert {one.lane.number for one in lines(spans) if one.phase == BACKWARD} == {thread}


@pytest.mark.parametrize(
    ("between", "is_break"),
    [
        (node_of(OUTSIDE, 90, 91), True),
        (node_of(OTHER, 90, 91), True),
        (op("aten::op", 90, 91), True),
        (op("aten::op", 85, 91), True),  # as soon as the node has ended
        # A pass on the engine's thread has ended, and the next forward runs on another thread.
        (op("aten::op", 90, 91, thread=3), True),
        (user_label("mine", 90, 91), True),
        (user_label("mine", 90, 91, thread=3), True),
        (call(B, 90, 91), True),
        (call(B, 90, 91, thread=3), True),
        (step(90), True),
        (memory(90, -8), False),  # what the engine frees between two nodes
        (op("aten::op", 82, 83), False),  # the node's own
    ],
)
def test_what_breaks_a_stretch(between: Event, is_break: bool) -> None:
    spans = walked(*FORWARDS, node_of(X, 80, 85), between, node_of(X, 100, 105))
    ours = [one for one in of_phase(spans, BACKWARD) if one[2] != OTHER]
    if is_break:
        assert ours == [(start, start + 5, layer) for start in (80, 100) for layer in (NET, A, X)]
    else:
        assert ours == [(80, 105, layer) for layer in (NET, A, X)]


def test_forward_on_another_thread_does_not_break_a_node() -> None:
    """Forward work that begins inside a node is not between two nodes; forward work after it is."""
    spans = walked(
        *FORWARDS, node_of(X, 80, 90, thread=ENGINE), op("aten::op", 85, 86), node_of(X, 95, 99, thread=ENGINE)
    )
    assert of_phase(spans, BACKWARD) == [(80, 99, NET), (80, 99, A), (80, 99, X)]
    spans = walked(
        *FORWARDS,
        node_of(X, 70, 75, thread=ENGINE),
        node_of(X, 80, 90, thread=ENGINE),
        op("aten::op", 85, 86),
        node_of(X, 95, 99, thread=ENGINE),
    )
    assert of_phase(spans, BACKWARD) == [(70, 99, NET), (70, 99, A), (70, 99, X)]
    spans = walked(
        *FORWARDS,
        node_of(X, 80, 90, thread=ENGINE),
        op("aten::op", 85, 86),
        op("aten::op", 92, 93),
        node_of(X, 95, 99, thread=ENGINE),
    )
    assert of_phase(spans, BACKWARD)[:3] == [(80, 90, NET), (80, 90, A), (80, 90, X)]


def test_a_checkpoint_inside_a_node() -> None:
    """The node is Net's. Inside it a runs again, and then its nodes: x below a, both in Net's stretch."""
    spans = walked(
        *FORWARDS,
        node_of(NET, 80, 140),
        call(A, 85, 95),
        op("aten::op", 86, 87, sequence=200),
        call(X, 88, 92),
        op("aten::op", 89, 90, sequence=201),
        node("Back", 100, 110, 201),
        node("Back", 115, 120, 200),
        node_of(B, 150, 155),
    )
    assert of_phase(spans, RECOMPUTE) == [(85, 95, A), (88, 92, X)]
    assert of_phase(spans, BACKWARD) == [(80, 155, NET), (100, 120, A), (100, 110, X), (150, 155, B)]


def test_a_gradient_inside_a_call() -> None:
    """A layer that computes a gradient in its forward: the stretch ends with the call at the latest."""
    spans = walked(
        *FORWARDS,
        call(B, 100, 150),
        node_of(X, 110, 120),
        node_of(X, 160, 170),
        call(B, 200, 210),
        op("aten::op", 201, 202),
    )
    assert of_phase(spans, BACKWARD) == [
        (start, end, layer) for start, end in ((110, 120), (160, 170)) for layer in (NET, A, X)
    ]


def test_a_range_that_ends_after_its_parent_is_cut() -> None:
    """Clocks of different sources differ by some ns."""
    spans = walked(call(NET, 10, 50), user_label("mine", 40, 53), call(A, 45, 54))
    assert [(one.start, one.end) for one in lines(spans)] == [(10, 50), (40, 50), (45, 50)]


def test_kernels_have_lanes_by_stream() -> None:
    """Within a stream, overlapping kernels have different lanes. A device with one stream does not name it."""
    spans = walked(
        call(X, 10, 20),
        op("aten::op", 11, 12, sequence=OF[X], correlation=7),
        kernel("one", 100, 110, 7)._replace(thread=20),
        kernel("two", 105, 115, 7)._replace(thread=7),
        kernel("three", 107, 109, 7)._replace(thread=7),
        kernel("four", 112, 120, 7)._replace(thread=20),
        kernel("five", 116, 118, 7)._replace(thread=7),
        kernel("one", 100, 101, 7, "cuda:1")._replace(thread=20),
    )
    assert [(one.name, one.lane) for one in lines(spans)[1:]] == [
        ("one", Lane("cuda:0", 1, 20)),
        ("two", Lane("cuda:0", 1, 7)),
        ("three", Lane("cuda:0", 2, 7)),
        ("four", Lane("cuda:0", 1, 20)),
        ("five", Lane("cuda:0", 1, 7)),
        ("one", Lane("cuda:1", 1)),
    ]


def test_steps_last_from_mark_to_mark() -> None:
    events = [step(100), call(NET, 110, 120), step(130), step(150)]
    assert attributed_of(events)[1].steps == (0, 30, 50)
    watcher = OpenSpans([Layer(path, "Module") for path in PATHS], from_first_mark=False)
    list(watcher.observe(walk_of(Attribution({"label 0": Site((0,))}, PATHS), events)))
    assert watcher.result()["timeline"].spans.steps == (30, 50)


def test_spans_over_the_limit_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first spans stay, and a stretch that stays continues to its end."""
    events = [*FORWARDS, node_of(Y, 80, 85), node_of(X, 90, 95), node_of(B, 100, 110)]
    whole = walked(*events)
    for limit in range(len(whole) + 1):
        monkeypatch.setattr(Spans, "LIMIT", limit)
        spans = walked(*events)
        assert lines(spans) == lines(whole)[:limit]
        assert len(spans) + spans.dropped == len(whole)


# Random events


class Node(NamedTuple):
    """A node of the walk: its index in the list, its times, its layer, and the ranges directly around it."""

    at: int
    start: int
    end: int
    layer: int
    thread: int
    around: tuple[tuple[int, str], ...]  # places in the list of the nodes and spans around it, outer to inner


def stretches_by_hand(
    attributed: Sequence[Attributed], paths: Paths, selected: Iterable[int]
) -> Counter[tuple[int, int, int, int]]:
    """The backward spans (thread, layer, start, end) by the rule, found for each layer separately and not in one
    walk."""
    nodes: list[Node] = []
    breaks: list[tuple[int, int, int | None, tuple[tuple[int, str], ...]]] = []  # where, when, its thread (None: any)
    open_ones: defaultdict[int, list[tuple[int, tuple[int, str]]]] = defaultdict(list)
    for at, (event, place, _, calls, ns, _) in enumerate(attributed):
        kind = event.kind
        if kind is Kind.KERNEL:
            continue
        opened = open_ones[event.thread]
        while opened and opened[-1][0] <= event.start_ns:
            opened.pop()
        around = tuple(one for _, one in opened)
        is_node = kind in (Kind.NODE, Kind.BACKWARD_FUNCTION) and place.is_node
        is_span = calls > 0 and (
            kind is Kind.USER_LABEL or (kind is Kind.LABEL and (place.layer >= 0 or place.frame is not None))
        )
        if is_node:
            nodes.append(Node(at, event.start_ns, event.start_ns + ns, place.layer, event.thread, around))
        elif is_span:
            breaks.append((at, event.start_ns, event.thread, around))
        if place.phase == FORWARD and kind in (Kind.OP, Kind.LABEL, Kind.USER_LABEL, Kind.STEP):
            breaks.append((at, event.start_ns, None, ()))
        if is_node or is_span:
            opened.append((event.start_ns + ns, (at, "node" if is_node else "span")))
    of_node = {one.at: one for one in nodes}
    found: Counter[tuple[int, int, int, int]] = Counter()
    for layer in selected:
        below = {at for at, path in enumerate(paths) if path[: len(paths[layer])] == paths[layer]}

        def is_ours(one: Node, below: set[int] = below) -> bool:
            return one.layer in below

        levels: defaultdict[tuple[int, tuple[tuple[int, str], ...]], list[Node]] = defaultdict(list)
        for one in nodes:
            if not any(kind == "node" and is_ours(of_node[at]) for at, kind in one.around):
                levels[one.thread, one.around].append(one)
        for (thread, around), siblings in levels.items():
            stretch: list[Node] = []
            following: list[Node | None] = [*siblings, None]
            for after in following:
                goes_on = (
                    bool(stretch)
                    and after is not None
                    and is_ours(after)
                    and not any(
                        stretch[-1].at < at < after.at
                        and (of is None or (of, where) == (thread, around))
                        and stretch[-1].end <= when
                        for at, when, of, where in breaks
                    )
                )
                if stretch and not goes_on:
                    found[thread, layer, stretch[0].start, stretch[-1].end] += 1
                    stretch = []
                if after is not None and is_ours(after):
                    stretch.append(after)
    return found


@examples(100)
@given(sessions(), st.data())
def test_the_rule_on_random_events(session: tuple[Paths, Any], data: st.DataObject) -> None:
    """Calls, labels and kernels are spans; backward follows the rule; all spans are nested."""
    paths, forest = session
    selected = data.draw(st.none() | st.sets(st.integers(0, len(paths) - 1)))
    attributed, spans = attributed_of(forest.events(), paths, selected)
    assert_all_nested(spans)
    ranges: Counter[tuple[Any, ...]] = Counter()
    threads: dict[int, None] = {}  # in the order of their first spans
    for event, place, _, calls, ns, _ in attributed:
        is_call = event.kind is Kind.LABEL and calls and place.layer >= 0
        if is_call or event.kind in (Kind.USER_LABEL, Kind.KERNEL):
            name = None if is_call else event.name
            ranges[event.start_ns, event.start_ns + ns, place.layer, place.phase, name] += 1
        if is_call or event.kind is Kind.USER_LABEL or (place.is_node and place.layer >= 0):
            threads[event.thread] = None
    ours = lines(spans)
    assert ranges == Counter(
        (one.start, one.end, one.layer, one.phase, one.name) for one in ours if one.name or one.phase != BACKWARD
    )
    of_thread = [*threads]
    stretches = Counter(
        (of_thread[one.lane.number - 1], one.layer, one.start, one.end)
        for one in ours
        if one.phase == BACKWARD and not one.name
    )
    assert stretches == stretches_by_hand(attributed, paths, range(len(paths)) if selected is None else selected)


# Real runs


def profiled(model: nn.Module | list[nn.Module], scene: Callable[[], Any], **options: Any) -> Profile:
    with Profile(model, with_timeline=True, **options) as prof:
        scene()
    return prof


def raws_of(prof: Profile) -> list[tuple[str, int, int, int, int]]:
    """torch's own events on the CPU: name, scope, start and end since the session's first mark, thread."""
    assert prof._session is not None
    raws = [
        (raw.name(), raw.scope(), raw.start_ns(), raw.start_ns() + raw.duration_ns(), raw.start_thread_id())
        for raw in prof._session._profiler.kineto_results.events()
        if raw.device_type().name == "CPU"
    ]
    (zero, *_) = (start for name, _, start, _, _ in raws if name == PREFIX + "!step")
    return [(name, scope, start - zero, end - zero, thread) for name, scope, start, end, thread in raws]


def check(prof: Profile, *, called_inside_parents: bool = True) -> Spans:
    """Spans equal torch's events, to the ns, and the other figures of the run."""
    run, spans = prof.run, spans_of(prof.run)
    ours = lines(spans)
    assert_all_nested(spans)
    raws = raws_of(prof)
    calls = Counter((start, end) for name, _, start, end, _ in raws if name.startswith(PREFIX) and "!" not in name)
    assert calls
    assert calls == Counter((one.start, one.end) for one in ours if one.phase != BACKWARD and one.name is None)
    labels = Counter(
        (f"({name.removeprefix(WAITS)})" if name.startswith(WAITS) else name, start, end)
        for name, scope, start, end, _ in raws
        if (scope == 7 and not name.startswith(PREFIX)) or name.startswith(WAITS)
    )
    assert labels == Counter((one.name, one.start, one.end) for one in ours if one.name is not None)

    of_layer: defaultdict[tuple[int, str], list[tuple[int, int]]] = defaultdict(list)
    for one in ours:
        if one.name is None:
            of_layer[one.layer, one.phase].append((one.start, one.end))
    totals = {
        (layer.path, phase): node
        for phase in (FORWARD, RECOMPUTE)
        for root in range(len(run.roots))
        for node in run.tree(phase, root).walk()
        for layer in [node.layer]
    }
    for (number, phase), ranges in of_layer.items():
        if phase == BACKWARD:
            continue
        node = totals[run.layers[number].path, phase]
        assert len(ranges) == node.calls
        spread = run.samples[SampleKey(number, phase, 0, "cpu", "cpu_ns")]
        assert (spread.count, spread.sum) == (len(ranges), sum(end - start for start, end in ranges))
        if called_inside_parents:
            outermost = [
                (start, end)
                for start, end in ranges
                if not any(other != (start, end) and other[0] <= start and end <= other[1] for other in ranges)
            ]
            assert sum(end - start for start, end in outermost) == node.total.cpu_ns
    check_backward(prof, of_layer)
    return spans


def check_backward(prof: Profile, of_layer: dict[tuple[int, str], list[tuple[int, int]]]) -> None:
    """The stretches of a layer contain all its nodes and those of the layers below, and begin and end with one of them.
    Two consecutive nodes of the layer, without anything between them, are in one stretch."""
    run = prof.run
    attribution = assemble.attribution_of(prof._plan.layer_plan())
    assert prof._session is not None
    attributed = [*walk_of(attribution, prof._session.columns().events())]
    zero = next(one.event.start_ns for one in attributed if one.event.kind is Kind.STEP)
    nodes = [
        (event.start_ns - zero, event.start_ns + ns - zero, place.layer)
        for event, place, _, _, ns, _ in attributed
        if place.is_node and event.kind in (Kind.NODE, Kind.BACKWARD_FUNCTION)
    ]
    others = [
        event.start_ns - zero for event, place, *_ in attributed if place.phase == FORWARD and event.kind is Kind.OP
    ]
    for number, layer in enumerate(run.layers):
        stretches = of_layer.get((number, BACKWARD), [])
        below = {at for at, one in enumerate(run.layers) if one.path[: len(layer.path)] == layer.path}
        ours = [one for one in nodes if one[2] in below]
        assert bool(ours) == bool(stretches)
        assert {start for start, _ in stretches} <= {start for start, _, _ in ours}
        assert {end for _, end in stretches} <= {end for _, end, _ in ours}
        holders = [[one for one in stretches if one[0] <= start and end <= one[1]] for start, end, _ in ours]
        assert all(holders)
        for one, after in pairwise(nodes):
            if {one[2], after[2]} <= below and not any(one[0] < at < after[0] for at in others):
                assert holders[ours.index(one)] == holders[ours.index(after)]


def of_architecture(name: str, steps: int) -> Profile:
    model = ARCHITECTURES[name].make()
    return profiled(model, lambda: [model(*ARCHITECTURES[name].inputs()).sum().backward() for _ in range(steps)])


def two_models() -> Profile:
    models = [Mlp(), Holder(nn.Linear(2, 2))]
    return profiled(models, lambda: models[1](models[0](torch.rand(3, 4))).sum().backward())


def without_gradients() -> Profile:
    model = Mlp()

    @torch.no_grad()
    def run() -> None:
        model(torch.rand(3, 4))

    return profiled(model, run)


def a_call_on_an_unobserved_thread() -> Profile:
    model = Mlp()

    def run() -> None:
        in_thread(model, torch.rand(3, 4))
        model(torch.rand(3, 4)).sum().backward()

    return profiled(model, run)


def labels() -> Profile:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters())

    def run() -> None:
        for _ in range(2):
            with torch.profiler.record_function("pass"):
                with torch.profiler.record_function('data "<b>"'):
                    x = torch.rand(3, 4)
                model(x).sum().backward()
            optimizer.step()

    return profiled(model, run, profile_memory=True)


def a_label_in_a_hook() -> Profile:
    model = Mlp()

    def hook(grad: Tensor) -> Tensor:
        with torch.profiler.record_function("hook"):
            return grad * 2

    def run() -> None:
        y = model.fc1(torch.rand(3, 4))
        y.register_hook(hook)
        model.fc2(y).sum().backward()

    return profiled(model, run)


SCENES: dict[str, Callable[[], Profile]] = {
    "mlp": lambda: trained(Mlp(), with_timeline=True),
    "AlexNet": lambda: of_architecture("AlexNet", steps=2),
    "encoder and decoder": lambda: of_architecture("encoder and decoder", steps=1),
    "one layer called three times": lambda: trained(Several(), with_timeline=True),
    "a module at two paths": lambda: trained(Tied(), with_timeline=True),
    "recursion": lambda: trained(Recursive(), with_timeline=True),
    "memory and FLOPs as well": lambda: trained(Mlp(), with_timeline=True, profile_memory=True, with_flops=True),
    "two models": two_models,
    "without gradients": without_gradients,
    "a call on an unobserved thread": a_call_on_an_unobserved_thread,
    "labels": labels,
    "a label in a hook": a_label_in_a_hook,
}


@cache
def recorded(name: str) -> Profile:
    """The profile of a scene, once for all tests."""
    return SCENES[name]()


@pytest.mark.parametrize("name", SCENES)
def test_spans_are_what_torch_recorded(name: str) -> None:
    check(recorded(name))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_runs_again_inside_backward(use_reentrant: bool) -> None:
    prof = trained(Checkpointed(use_reentrant), torch.rand(3, 4, requires_grad=True), with_timeline=True)
    ours = lines(check(prof, called_inside_parents=False))
    names = [layer.name for layer in prof.run.layers]
    again = [one for one in ours if one.phase == RECOMPUTE]
    assert Counter(names[one.layer] for one in again) == Counter(
        [f"Checkpointed.block{below}" for below in ("", ".0", ".1")]
    )
    (root,) = [one for one in ours if one.phase == BACKWARD and one.layer == 0]
    assert all(root.start < one.start and one.end < root.end and one.lane == root.lane for one in again)


def test_an_exception_ends_the_spans() -> None:
    model = Raises()
    with pytest.raises(ValueError, match="second call"), Profile(model, with_timeline=True) as prof:
        for _ in range(2):
            model(torch.rand(3, 4))
    assert Counter(one.layer for one in lines(check(prof))) == {0: 2, 1: 2}


def test_the_last_cycle_and_its_steps() -> None:
    """Two cycles of two steps: the spans are those of the last cycle, and are inside its steps."""
    model = Mlp()
    with Profile(
        model, with_timeline=True, schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=2)
    ) as prof:
        for _ in range(6):
            model(torch.rand(3, 4)).sum().backward()
            prof.step()
    run, spans = prof.run, spans_of(prof.run)
    assert (run.meta.cycles, run.meta.steps, len(spans.steps)) == (2, 4, 3)
    calls = [(one.start, one.end) for one in lines(spans) if one.layer == 0 and one.phase == FORWARD]
    assert len(calls) == 2
    for (start, end), begun, over in zip(calls, spans.steps[:-1], spans.steps[1:], strict=True):
        assert begun <= start < end <= over
    lasted = run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")].sample
    assert {over - begun for begun, over in zip(spans.steps, spans.steps[1:])} <= {*lasted}
    marks = [start for name, _, start, *_ in raws_of(prof) if name == PREFIX + "!step"]
    assert len(marks) == 3
    assert all(mark <= step for mark, step in zip(marks, spans.steps, strict=True))


def test_a_step_that_began_before_the_recording_does_not_count() -> None:
    model = Mlp()
    with Profile(model, with_timeline=True, warmup=1) as prof:
        for _ in range(4):
            model(torch.rand(3, 4))
            prof.step()
    steps = spans_of(prof.run).steps
    assert (prof.run.meta.steps, len(steps)) == (2, 3)
    assert steps[0] > next(one.end for one in lines(spans_of(prof.run)))


def test_memory_only_on_request() -> None:
    model = Mlp()
    timeline = profiled(model, lambda: model(torch.rand(3, 4))).run.timeline
    assert timeline is not None and timeline.spans is not None
    assert (len(timeline), timeline.devices, len(timeline.spans)) == (0, (), 4)
    timeline = profiled(model, lambda: model(torch.rand(3, 4)), profile_memory=True).run.timeline
    assert timeline is not None and timeline.spans is not None
    assert (timeline.devices, len(timeline.spans)) == (("cpu",), 4)
    assert len(timeline) > 0


def test_no_spans_are_collected_without_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def watch(*_: Any) -> None:
        raise AssertionError("spans were not requested")

    monkeypatch.setattr(OpenSpans, "observe", watch)
    model = Mlp()
    with Profile(model, profile_memory=True) as prof:
        model(torch.rand(3, 4))
    assert prof.run.timeline is None
    with pytest.raises(AssertionError, match="not requested"):
        profiled(model, lambda: model(torch.rand(3, 4))).run  # noqa: B018


# The file


@st.composite
def timelines(draw: st.DrawFn, layers: int) -> Timeline:
    """A timeline with random spans in no order: a file may contain any."""
    streams = st.none() | st.integers(0, 2**40)
    lanes = draw(st.lists(st.builds(Lane, st.sampled_from(["cpu", "cuda:0"]), st.integers(1, 9), streams), max_size=3))
    names = draw(st.lists(st.text(max_size=5), max_size=3))
    one = st.tuples(
        st.integers(0, 2**50),
        st.integers(0, 2**50),
        st.integers(0, max(len(lanes) - 1, 0)),
        st.integers(-2, layers - 1),
        st.integers(0, 2),
        st.integers(-1, len(names) - 1),
    )
    rows = [(start, start + lasts, *rest) for start, lasts, *rest in draw(st.lists(one, max_size=4 * bool(lanes)))]
    columns = {name: array("q", (row[at] for row in rows)) for at, name in enumerate(Spans.COLUMNS)}
    steps = tuple(sorted(draw(st.lists(st.integers(0, 2**50), max_size=3))))
    spans = Spans(tuple(lanes), tuple(names), columns, steps, draw(st.integers(0, 3)))
    return Timeline((), {name: array("q") for name in Timeline.COLUMNS}, 0, draw(st.none() | st.just(spans)))


@examples(50)
@given(timelines(4))
def test_a_saved_timeline_loads_as_it_was(timeline: Timeline) -> None:
    run = replace(run_of([row(0)]), timeline=timeline)
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder) / "run.json")
        loaded = torchprof.load(Path(folder) / "run.json")
    assert loaded == run
    if timeline.spans is not None and len(timeline.spans):
        run.report("chrome-trace")


# The trace


Tracks = dict[str, list[dict[str, Any]]]


def ns(us: float) -> int:
    """A time as Perfetto reads it: rounded to the ns."""
    return round(us * 1000)


def tracks_of(text: str) -> tuple[Tracks, dict[str, Any]]:
    """The ranges of each track by name, in the order of the file, and the whole document."""
    document = json.loads(text)
    events = document["traceEvents"]
    assert {event["pid"] for event in events} == {1}
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    order = {event["tid"]: event["args"]["sort_index"] for event in events if event["name"] == "thread_sort_index"}
    assert len({*names.values()}) == len(names)
    tracks: Tracks = {names[tid]: [] for tid in sorted(names, key=order.__getitem__)}
    for event in events:
        if event["ph"] == "X":
            tracks[names[event["tid"]]].append(event)
        else:
            assert event["ph"] in "MC"
    for track in tracks.values():
        assert_nested([(ns(event["ts"]), ns(event["ts"]) + ns(event["dur"])) for event in track])
    return tracks, document


@pytest.mark.parametrize("name", SCENES)
def test_the_trace_has_every_span_once(name: str) -> None:
    run = recorded(name).run
    tracks, _ = tracks_of(run.report("chrome-trace"))
    written = Counter(
        (ns(event["ts"]), ns(event["ts"]) + ns(event["dur"]), track, event["name"])
        for track, events in tracks.items()
        for event in events
    )
    expected: Counter[tuple[Any, ...]] = Counter()
    for one in lines(spans_of(run)):
        shown = one.name or run.layers[one.layer].path[-1]
        if shown.isdecimal():
            shown = next(event for event in written if event[0] == one.start and event[3].endswith("." + shown))[3]
        expected[one.start, one.end, f"{one.phase}, thread {one.lane.number}", shown] += 1
    assert written == expected


def trace_of_training() -> Run:
    model = nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 2)))
    with Profile(model, with_timeline=True, profile_memory=True) as prof:
        for _ in range(3):
            with torch.profiler.record_function("pass"):
                model(torch.rand(3, 4)).sum().backward()
            prof.step()
    return prof.run


def test_the_text_of_a_trace(golden: Callable[..., None]) -> None:
    """Tracks for steps, phases and threads, and after them for streams, of all phases; what a range is about; memory as
    a counter; the process of the rank; what was not kept, and warnings."""
    spans = walked(
        user_label("all", 5, 99),
        *FORWARDS,
        node_of(X, 70, 80),
        op("aten::op", 72, 73, correlation=8),
        step(90),
        kernel("one", 100, 110, 7)._replace(thread=20),
        kernel("two", 105, 115, 7)._replace(thread=7),
        kernel("three", 107, 109, 8)._replace(thread=7),
        kernel("one", 100, 101, 7, "cuda:1")._replace(thread=20),
    )
    columns = {name: array("q", [{"time_ns": 30, "nbytes": 64}.get(name, 0)]) for name in Timeline.COLUMNS}
    layers = tuple(
        Layer(path, "Linear", settings="size=1", input_shapes=((2, 3),), output_shapes=((2, 4),)) for path in PATHS
    )
    run = run_of(
        [row(0, cpu_ns=40), row(1, cpu_ns=7, calls=3)], layers=layers, warnings=run_warnings("Careful."), rank=3
    )
    run = replace(run, timeline=Timeline(("cpu",), columns, 5, replace(spans, dropped=3), rank=3))
    golden(run.report("chrome-trace"))


def test_memory_is_a_counter() -> None:
    """Its highest value is the peak of the run, which is computed elsewhere."""
    run = trace_of_training()
    _, document = tracks_of(run.report("chrome-trace"))
    counts = [event for event in document["traceEvents"] if event["ph"] == "C"]
    assert {event["name"] for event in counts} == {"memory on cpu above the start"}
    assert run.timeline is not None
    assert len(counts) == len(run.timeline)
    highest = max(counts, key=lambda event: event["args"]["bytes"])
    assert (highest["args"]["bytes"], ns(highest["ts"])) == (run.memory[0].peak_bytes, run.memory[0].peak_ns)


def named(names: tuple[str, ...]) -> Run:
    """A run with a span of 1 ms for each name."""
    values = [(at * 10**6, (at + 1) * 10**6, 0, 0, 0, at) for at in range(len(names))]
    columns = {name: array("q", (one[at] for one in values)) for at, name in enumerate(Spans.COLUMNS)}
    steps = {name: array("q") for name in Timeline.COLUMNS}
    return replace(run_of([row(0)]), timeline=Timeline((), steps, 0, Spans((Lane("cpu", 1),), names, columns, ())))


HOSTILE = ("<script>alert(1)</script>", 'a "b"\n', "line\nbreak", "\x1b[31mred", "\ud800", "a;b|c", "模", "\u2028")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    run = named(HOSTILE)
    tracks, _ = tracks_of(run.report("chrome-trace"))
    assert tuple(event["name"] for event in tracks["forward, thread 1"]) == HOSTILE
    run.export(tmp_path / "a.trace.json.gz")
    assert gzip.decompress((tmp_path / "a.trace.json.gz").read_bytes()).decode() == run.report("chrome-trace")


@given(st.integers(-(10**6), 10**15))
def test_no_ns_is_lost(time: int) -> None:
    """The written time is exact to the ns, for readers that round and for readers that use the decimals as text."""
    run = named(("one",))
    columns = {**spans_of(run).columns, "start_ns": array("q", [time]), "end_ns": array("q", [time + 10])}
    assert run.timeline is not None
    run = replace(run, timeline=replace(run.timeline, spans=replace(spans_of(run), columns=columns)))
    (written,) = re.findall(r'"ts": (-?\d+\.\d{3}), "dur": 0\.010}', run.report("chrome-trace"))
    assert Decimal(written) * 1000 == time
    assert ns(float(written)) == time


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every code block of docs/timeline.md runs, and the tracks that it names are in the file."""
    root = ROOT
    monkeypatch.syspath_prepend(str(root))
    monkeypatch.chdir(tmp_path)
    page = (root / "docs" / "timeline.md").read_text(encoding="utf-8")
    space: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "timeline.md", "exec"), space)
    tracks, document = tracks_of(gzip.decompress((tmp_path / "alexnet.trace.json.gz").read_bytes()).decode())
    shown = {*tracks, *(event["name"] for event in document["traceEvents"] if event["ph"] == "C")}
    assert len(shown) == 4
    assert all(f"| {name} |" in page for name in shown)


def test_speedscope_reads_the_trace(tmp_path: Path, open_tab: Callable[..., Tab], speedscope: Path) -> None:
    """Its table of the first track has the same time for each layer as our spans."""
    model = Mlp()
    run = profiled(model, lambda: [model(torch.rand(64, 4)) for _ in range(3)]).run
    text = base64.b64encode(run.report("chrome-trace").encode()).decode()
    (tmp_path / "load.js").write_text(f"speedscope.loadFileFromBase64('a.trace.json', '{text}')", encoding="utf-8")
    index = speedscope / "dist" / "release" / "index.html"
    tab = open_tab(index, fragment=f"localProfilePath={tmp_path / 'load.js'}")
    tab.page.wait_for_function("document.body.innerText.includes('forward, thread 1')")
    tab.page.keyboard.press("3")  # the view with the table
    tab.page.wait_for_function("document.body.innerText.includes('Symbol Name')")
    shown = tab.page.evaluate("document.body.innerText")
    assert not tab.errors
    unit = {"ns": 1, "µs": 1e3, "ms": 1e6, "s": 1e9}
    time = r"([\d.]+)(ns|µs|ms|s) \([<>]?[\d.]+%\)"
    found = re.findall(rf"{time}\s+{time}\s+(\w+) \{{", shown)
    rows = {name: (float(total) * unit[one], float(own) * unit[other]) for total, one, own, other, name in found}
    totals = Counter[str]()
    for one in lines(spans_of(run)):
        totals[run.layers[one.layer].path[-1]] += one.end - one.start
    own = {**totals, "Mlp": 2 * totals["Mlp"] - totals.total()}
    assert rows == {name: pytest.approx((totals[name], own[name]), rel=0.01) for name in ("Mlp", "fc1", "act", "fc2")}
