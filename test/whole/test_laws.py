"""The laws of the design, on random events, random trees and random models."""

from __future__ import annotations

import copy
import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

import pytest
import torch
from build.events import walk_of
from build.examples import examples
from build.forests import SIGNATURES, Forest, Paths, Span, forests, layer_trees, sessions
from build.models import Layers
from build.phases import in_column_of
from build.random_runs import memories, runs, timelines
from build.torchs_list import torchs_list
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchprof
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.reports import known
from torchprof.run.layers import Layer
from torchprof.run.measures import FIELDS, Cost
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Meta
from torchprof.run.operators import Op, operators_of_layers
from torchprof.run.rows import Row
from torchprof.run.run import Run
from torchprof.run.words import (
    BACKWARD,
    BETWEEN_OPS,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    Frame,
    Signature,
)

IN_BACKWARD = (Kind.NODE, Kind.BACKWARD_FUNCTION)
"""The kinds of events that are backward work."""


# The expected totals of ops and labels, from a walk over a forest of events, without stacks and clocks


class Spot(NamedTuple):
    """What identifies an ``Op``: where it is, the labels around it there, its kind and its name."""

    layer: int
    phase: str
    labels: tuple[str, ...]
    kind: str
    name: str


ANY = "any phase"


class Where(NamedTuple):
    """A position in a walk over the forest: the layer and phase, the labels, and the op or label directly around it."""

    layer: int = OUTSIDE
    phase: str = FORWARD
    labels: tuple[str, ...] = ()
    inner: tuple[str, str] | None = None
    is_node: bool = False
    open: frozenset[Spot] = frozenset()


@dataclass
class Walked:
    """The results of a walk over the forest, without stacks and clocks."""

    totals: dict[Spot, Cost]
    calls: Counter[Spot]
    lines: Counter[tuple[int, str, str]]


def walked(forest: Forest, selected: Set[int] | None = None) -> Walked:
    """Totals and calls of all ops and labels. Nodes must have no sequence numbers, so they belong to no layer."""
    found = Walked({}, Counter(), Counter())
    costs = costs_of(forest)
    waiting = [(root, Where()) for roots in forest.threads for root in roots]
    while waiting:
        span, at = waiting.pop()
        spot = None
        call = True
        if span.kind is Kind.LABEL:
            layer = int(span.name.split()[1])
            phase = FORWARD if at.phase == FORWARD else RECOMPUTE
            if selected is None or layer in selected:
                at = Where(layer, phase, open=at.open)
            elif at.layer < 0:
                at = Where(NOT_SELECTED, phase, open=at.open)
        elif span.kind is Kind.NODE or (span.kind is Kind.BACKWARD_FUNCTION and not at.is_node):
            spot = Spot(OUTSIDE, BACKWARD, (), "op", span.name)
            at = Where(OUTSIDE, BACKWARD, (), ("op", span.name), True, at.open)
        else:
            kind = "label" if span.kind is Kind.USER_LABEL else "op"
            # A label holds work of any phase: each counts in its own.
            spot = Spot(at.layer, at.phase if kind == "op" else ANY, at.labels, kind, span.name)
            call = span.kind is not Kind.OP or at.inner != (kind, span.name)
            labels = (*at.labels, span.name) if kind == "label" else at.labels
            at = Where(at.layer, at.phase, labels, (kind, span.name), False, at.open)
        if spot is not None:
            found.calls[spot] += call
            if spot not in at.open:
                found.totals[spot] = found.totals.get(spot, Cost()) + costs[id(span)]
            at = at._replace(open=at.open | {spot})
        for line in span.lines_inside:
            found.lines[at.layer, at.phase, line] += 1
        waiting.extend((child, at) for child in span.children)
    return found


def costs_of(forest: Forest) -> dict[int, Cost]:
    """The cost of each span (by ``id``), including everything inside it."""
    numbers = itertools.count(1)
    device = Counter[int]()
    for op, ns in forest.kernels:
        device[op] += ns
    costs: dict[int, Cost] = {}

    def cost_of(span: Span) -> Cost:
        number = next(numbers)
        allocated = sum(nbytes for nbytes in span.bytes_inside if nbytes > 0)
        freed = -sum(nbytes for nbytes in span.bytes_inside if nbytes < 0)
        cost = Cost(sum(span.own), device[number], cpu_allocated=allocated, cpu_freed=freed)
        for child in span.children:
            cost = cost + cost_of(child)
        costs[id(span)] = cost
        assert cost.cpu_ns == span.duration
        return cost

    for roots in forest.threads:
        for root in roots:
            cost_of(root)
    return costs


# Runs


def folded(paths: Paths, events: Sequence[Event], selected: Set[int] | None = None) -> Run:
    """The run that is measured from these events."""
    layers = tuple(Layer(path, "Module") for path in paths)
    sites = {f"label {number}": Site((number,)) for number in range(len(paths))}
    attribution = Attribution(sites, paths, selected)
    rows, samples, busy = fold(walk_of(attribution, events), attribution.places.all, layers, signatures=SIGNATURES)
    meta = Meta(
        model=("Module",),
        device="cuda",
        requested=FIELDS,
        measured=FIELDS,
        busy_ns=tuple(busy.items()),
        wall_ns=max((event.end_ns for event in events), default=0)
        - min((event.start_ns for event in events), default=0),
    )
    return Run((meta,), layers, rows, samples)


def run_of(paths: Paths, forest: Forest, selected: Set[int] | None = None) -> Run:
    """The run of a session."""
    return folded(paths, forest.events(), selected)


def no_layer(run: Run, phase: str) -> Cost:
    """The cost of work of no layer in a phase, selected or not."""
    return sum((row.cost for row in run.rows if row.layer is None and in_column_of(row.phase) == phase), Cost())


# Law 1


@examples(80)
@given(sessions())
def test_the_rows_add_up_to_the_events(session: tuple[Paths, Forest]) -> None:
    """Σ rows = Σ events: self times, calls of layers, device time and memory; nothing dropped, nothing twice."""
    paths, forest = session
    run = run_of(paths, forest)
    rows = list(run.rows)
    everything = list(forest.walk())
    assert sum(row.cost.cpu_ns for row in rows) == sum(sum(span.own) for span in everything)
    assert sum(row.cost.device_ns for row in rows) == sum(ns for _, ns in forest.kernels)
    changes = [nbytes for span in everything for nbytes in span.bytes_inside]
    assert sum(row.cost.cpu_allocated for row in rows) == sum(nbytes for nbytes in changes if nbytes > 0)
    assert sum(row.cost.cpu_freed for row in rows) == -sum(nbytes for nbytes in changes if nbytes < 0)
    assert sum(row.calls for row in rows if row.layer and not row.frames) == sum(
        span.kind is Kind.LABEL for span in everything
    )
    assert sum(row.calls for row in rows if row.frames and row.frames[-1].kind == "kernel") == len(forest.kernels)
    assert all(row.cost.cpu_ns >= 0 for row in rows), "no self time is negative"


@examples(80)
@given(sessions())
def test_the_forward_self_time_of_each_layer_is_that_of_its_ranges(session: tuple[Paths, Forest]) -> None:
    """The expected times are from a walk over the forest, without stacks and clocks."""
    paths, forest = session
    expected: dict[int, int] = {}
    waiting = [(root, OUTSIDE) for roots in forest.threads for root in roots]
    while waiting:
        span, layer = waiting.pop()
        if span.kind in (Kind.NODE, Kind.BACKWARD_FUNCTION):
            continue  # all inside it is backward or recompute
        if span.kind is Kind.LABEL:
            layer = int(span.name.split()[1])
        expected[layer] = expected.get(layer, 0) + sum(span.own)
        waiting.extend((child, layer) for child in span.children)
    run = run_of(paths, forest)
    index = {layer.path: number for number, layer in enumerate(run.layers)}
    owned: dict[int, int] = {}
    for row in run.rows:
        if in_column_of(row.phase) == FORWARD:
            layer = index[row.layer.path] if row.layer else OUTSIDE
            owned[layer] = owned.get(layer, 0) + row.cost.cpu_ns
    assert {layer: ns for layer, ns in owned.items() if ns} == {layer: ns for layer, ns in expected.items() if ns}


@examples(60)
@given(sessions())
def test_calls_of_ops_are_counted_by_their_inputs(session: tuple[Paths, Forest]) -> None:
    """An op inside another op of the same name is not counted as a call."""
    paths, forest = session
    expected: Counter[tuple[str, Signature]] = Counter()
    waiting = [(root, "") for roots in forest.threads for root in roots]
    while waiting:
        span, around = waiting.pop()
        if span.signature and span.name != around:
            expected[span.name, SIGNATURES[span.signature]] += 1
        waiting.extend((child, span.name) for child in span.children)
    found: Counter[tuple[str, Signature]] = Counter()
    for row in run_of(paths, forest).rows:
        if row.signature is not None:
            found[row.frames[-1].name, row.signature] += row.calls
    assert found == expected


# Totals of labels and ops


def spots_in(run: Run) -> Iterator[tuple[Spot, Op]]:
    """Every op and label of a run, including those inside labels."""

    def below(ops: list[Op], layer: int, phase: str, labels: tuple[str, ...]) -> Iterator[tuple[Spot, Op]]:
        for op in ops:
            yield Spot(layer, phase, labels, op.kind, op.name), op
            yield from below(op.inside, layer, phase, (*labels, op.name))

    for phase in PHASES:
        for layer, ops in operators_of_layers(run.rows, phase).items():
            yield from below(ops, layer, phase, ())


@examples(100)
@given(sessions(), st.none() | st.sets(st.integers(0, 8)))
def test_the_total_of_a_label_is_the_time_of_its_outermost_ranges(
    session: tuple[Paths, Forest], selected: set[int] | None
) -> None:
    """The same for ops. Totals include layers called inside, backward and recomputation, device time and memory."""
    paths, forest = session
    for span in forest.walk():
        if span.kind in IN_BACKWARD:
            span.sequence = -1
    run = run_of(paths, forest, selected)
    expected = walked(forest, selected)
    found = [(spot, op) for spot, op in spots_in(run) if spot.name not in (BETWEEN_OPS, LAUNCH_NOT_RECORDED)]
    assert len({spot for spot, _ in found}) == len(found), "there is one of each"
    totals: defaultdict[Spot, Cost] = defaultdict(Cost)
    calls: Counter[Spot] = Counter()
    for spot, op in found:
        if spot.kind == "label":
            spot = spot._replace(phase=ANY)
        totals[spot] += op.total
        calls[spot] += op.calls
    stray = [ns for number, ns in forest.kernels if number > sum(1 for _ in forest.walk())]
    assert totals == expected.totals
    assert dict(calls) == dict(expected.calls)
    assert run.no_layer(FORWARD).device_ns >= sum(stray)
    assert sum(op.total.device_ns for spot, op in spots_in(run) if spot.name == LAUNCH_NOT_RECORDED) == sum(stray)


@examples(80)
@given(sessions())
def test_lines_of_python_are_counted_in_their_layer_and_cost_nothing(session: tuple[Paths, Forest]) -> None:
    """A sampled line counts in a layer, in a label, in an op of the forward or in no layer, and has no cost.

    Only one thread is tested: while the autograd thread works, the sampled line is where the main thread waits for it.
    """
    paths, forest = session
    del forest.threads[1:]
    for span in forest.walk():
        if span.kind in IN_BACKWARD:
            span.sequence = -1
    run = run_of(paths, forest)
    found: Counter[tuple[int, str, str]] = Counter()
    for row, layer in zip(run.rows, run.rows.columns["layer"]):
        if row.frames and row.frames[-1].kind == "python":
            found[layer, in_column_of(row.phase), row.frames[-1].name] += row.calls
            assert not row.cost
    assert found == walked(forest).lines


# Law 2, on random rows


@examples(80)
@given(runs(), st.sampled_from([None, *PHASES]))
def test_total_is_self_plus_the_totals_of_the_children(run: Run, phase: str | None) -> None:
    """At every node of every tree. The trees and the work of no layer add up to all rows."""
    everything = Cost()
    for root in range(len(run.roots)):
        tree = run.tree(phase, root)
        for node in tree.walk():
            expected = node.self
            for child in node.children:
                expected = expected + child.total
                assert child.layer.path[:-1] == node.layer.path
            assert node.total == expected
        everything = everything + tree.total
    for each in [phase] if phase else PHASES:
        everything = everything + no_layer(run, each)
    rows = sum((row.cost for row in run.rows if phase is None or in_column_of(row.phase) == phase), Cost())
    assert everything == rows


def spots_through(layer: int, phase: str, frames: Sequence[Frame]) -> Iterator[Spot]:
    """The ops and labels on the path from a layer to the last of these frames."""
    labels: tuple[str, ...] = ()
    for kind, name, _ in frames:
        if kind in ("op", "label"):
            yield Spot(layer, phase, labels, kind, name)
        if kind == "label":
            labels = (*labels, name)


@examples(80)
@given(runs())
def test_the_operators_of_a_layer_add_up_to_its_self(run: Run) -> None:
    """Σ op self + (between ops), those inside labels included, = the layer's self, for every layer and phase, and for
    what has no layer; and the totals hold all that is inside, of other layers too."""
    own: defaultdict[tuple[int, str], Cost] = defaultdict(Cost)
    totals: defaultdict[Spot, Cost] = defaultdict(Cost)
    for row, layer in zip(run.rows, run.rows.columns["layer"]):
        of_column = in_column_of(row.phase)
        own[layer, of_column] += row.cost
        spots = {spot for around in row.within for spot in spots_through(*around)}
        spots = {spot._replace(phase=of_column) if spot.kind == "label" else spot for spot in spots}
        spots.update(spots_through(layer, of_column, row.frames))
        if not row.frames or {frame.kind for frame in row.frames} == {"kernel"}:
            spots.add(Spot(layer, of_column, (), "op", BETWEEN_OPS))
        if not row.frames or row.frames[-1].kind != "python":
            for spot in spots:
                totals[spot] += row.cost
    found = dict(spots_in(run))
    assert {spot: op.total for spot, op in found.items() if op.total} == {
        key: total for key, total in totals.items() if total
    }
    selves: defaultdict[tuple[int, str], Cost] = defaultdict(Cost)
    for spot, op in found.items():
        selves[spot.layer, spot.phase] += op.self
    assert {key: cost for key, cost in selves.items() if cost} == {key: cost for key, cost in own.items() if cost}


# Law 3, of the cycles of one process


@st.composite
def cycles(draw: st.DrawFn, count: int = 3) -> tuple[Paths, list[list[Event]]]:
    """The sessions of so many cycles of one model, one after the other.

    Each has threads and numbers of its own: what a session counts, the next one does not know.
    """
    paths = draw(layer_trees(4))
    sessions: list[list[Event]] = []
    start = 0
    for number in range(1, count + 1):
        events = [
            event._replace(
                start_ns=event.start_ns + start,
                end_ns=event.end_ns + start,
                thread=event.thread + 10 * number,
                forward_thread=event.forward_thread + 10 * number if event.forward_thread else 0,
                correlation=event.correlation + 1000 * number if event.correlation else 0,
            )
            for event in draw(forests(len(paths), depth=2)).events()
        ]
        sessions.append([Event(Kind.STEP, "step", start, start, 1 + 10 * number), *events])
        start = max((event.end_ns for event in events), default=start) + draw(st.integers(1, 100))
    return paths, sessions


def all_at_once(sessions: Sequence[Sequence[Event]]) -> list[Event]:
    """The events in the order of a single session: kernels last."""
    events = [event for session in sessions for event in session]
    return sorted(events, key=lambda event: event.kind is Kind.KERNEL)


def as_a_set(run: Run) -> Counter[Row]:
    return Counter(run.rows)


@examples(40)
@given(cycles())
def test_the_sum_of_cycles_is_the_run_of_one_session_with_all_events(recorded: tuple[Paths, list[list[Event]]]) -> None:
    """Rows with equal keys are added up, samples joined, and busy times are equal. The order of rows may differ."""
    paths, sessions = recorded
    first, *later = [folded(paths, events) for events in sessions]
    summed = first
    for cycle in later:
        summed = add_cycle(summed, cycle)
    whole = folded(paths, all_at_once(sessions))
    assert as_a_set(summed) == as_a_set(whole)
    assert max(as_a_set(summed).values(), default=1) == 1, "equal keys have one row"
    assert dict(summed.samples) == dict(whole.samples)
    assert dict(summed.meta.busy_ns) == dict(whole.meta.busy_ns)
    assert (summed.meta.cycles, summed.layers) == (len(sessions), whole.layers)
    assert summed.tree() == whole.tree()


@examples(25)
@given(cycles(), st.integers(1, 3))
def test_a_cycle_that_does_the_same_again_doubles_every_value(
    recorded: tuple[Paths, list[list[Event]]], times: int
) -> None:
    """The keys stay as they are. The rows of the sum do not share columns with those of the cycle."""
    paths, (events, *_) = recorded
    cycle = folded(paths, events)
    before = as_a_set(cycle)
    summed = cycle
    for _ in range(times):
        summed = add_cycle(summed, cycle)
    expected = [
        one._replace(calls=one.calls * (times + 1), cost=sum([one.cost] * times, one.cost)) for one in cycle.rows
    ]
    assert [*summed.rows] == expected
    assert as_a_set(cycle) == before


@examples(25)
@given(cycles(), st.data())
def test_adding_cycles_is_associative(recorded: tuple[Paths, list[list[Event]]], data: st.DataObject) -> None:
    """For rows, samples, what was live at the highest peak, and everything else."""
    paths, sessions = recorded
    runs = []
    for events in sessions:
        memory = tuple(
            data.draw(memories(len(paths), device)) for device in data.draw(st.sampled_from(["", "a", "ab"]))
        )
        shapes = data.draw(st.sampled_from([(), ((1, 2),), ((3,),)]))
        run = folded(paths, events)
        runs.append(
            replace(
                run,
                layers=tuple(replace(layer, input_shapes=shapes) for layer in run.layers),
                memory=memory,
                timeline=data.draw(st.none() | timelines(len(paths))),
            )
        )
    first, second, third = runs
    left = add_cycle(add_cycle(first, second), third)
    right = add_cycle(first, add_cycle(second, third))
    assert as_a_set(left) == as_a_set(right)
    assert dict(left.samples) == dict(right.samples)
    assert (left.metas, left.layers, left.memory, left.timeline) == (
        right.metas,
        right.layers,
        right.memory,
        right.timeline,
    )
    peaks = {memory.device: memory.peak_bytes for memory in left.memory}
    seen = [memory for run in runs for memory in run.memory]
    assert peaks == {one.device: max(two.peak_bytes for two in seen if two.device == one.device) for one in seen}
    assert set(left.memory) <= set(seen)


# Law 5


NEEDED = {"layers": {"op": "a"}}
"""Options that a report cannot do without."""


def rendered(run: Run, name: str) -> str:
    """A report, or its error message: some reports need data that this run does not have."""
    try:
        return run.report(name, **NEEDED.get(name, {}))
    except torchprof.TorchprofError as error:
        return str(error)


@examples(40)
@given(runs())
def test_reports_are_pure(run: Run) -> None:
    """Every report gives the same text for the same run, and leaves the run as it was."""
    before = copy.deepcopy(run)
    options = [{}, {"show_events": True}, {"depth": 1}, {"sort_by": "self_cpu_total"}, {"top": 2}, {"percent": True}]
    for name in known():
        assert rendered(run, name) == rendered(run, name)
    for chosen in options:
        first = run.report("tree", **chosen)
        assert isinstance(first, str)
        assert run.report("tree", **chosen) == first == before.report("tree", **chosen)
    assert run == before


@examples(40)
@given(runs())
def test_show_events_adds_rows_and_keeps_the_figures_of_layers(run: Run) -> None:
    """``show_events`` also adds a self column for each other phase."""

    def table(show_events: bool) -> tuple[list[str], dict[str, list[list[str]]]]:
        lines = run.report("tree", show_events=show_events, tablefmt="tsv").split("\n\n")[0].splitlines()
        cells = [[cell.strip() for cell in line.split("\t")] for line in lines]
        rows: dict[str, list[list[str]]] = {}
        for first, *others in cells[1:]:
            blank = [""] * (len(cells[0]) - 1 - len(others))  # tabulate leaves blank cells at the end out
            rows.setdefault(first.lstrip("│├└─ "), []).append(others + blank)
        return cells[0], rows

    plain_headings, plain_rows = table(False)
    headings, rows = table(True)
    added = [heading for heading in headings if heading not in plain_headings]
    assert [heading for heading in headings if heading not in added] == plain_headings
    assert all(" Self " in heading for heading in added), "beside operators, backward too has a self"
    kept = [number - 1 for number, heading in enumerate(headings) if heading in plain_headings[1:]]
    for name, figures in plain_rows.items():
        same = [[cells[number] for number in kept] for cells in rows[name]]
        for one in figures:
            assert one in same


# All of it on random real models


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A random module that maps a (2, 4) tensor to a (2, 4) tensor."""
    kind = draw(st.sampled_from(["linear", "relu", "norm", "chain", "chain", "twice", "sum"] if depth else ["linear"]))
    if kind == "linear":
        return nn.Linear(4, 4)
    if kind == "relu":
        return nn.ReLU()
    if kind == "norm":
        return nn.LayerNorm(4)
    if kind == "chain":
        return nn.Sequential(*draw(st.lists(modules(depth - 1), max_size=3)))
    inner = draw(modules(depth - 1))
    return Twice(inner) if kind == "twice" else Sum(inner, draw(modules(depth - 1)))


class Twice(Layers):
    """Calls its child two times, with an op in between."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner=inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x) * 2)


class Sum(Layers):
    """Two branches, added."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__(left=left, right=right)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def calls_of(model: nn.Module) -> dict[tuple[str, ...], int]:
    """How often each layer is called in one call of the model, from its structure."""
    found: dict[tuple[str, ...], int] = {}
    waiting = [(model, (type(model).__name__,), 1)]
    while waiting:
        module, path, times = waiting.pop()
        found[path] = times
        times *= 2 if isinstance(module, Twice) else 1
        waiting.extend((child, (*path, name), times) for name, child in module.named_children())
    return found


@examples(15)
@given(modules(), st.booleans())
def test_the_laws_hold_on_random_models(model: nn.Module, backward: bool) -> None:
    """Laws 1 and 2, the calls known from the structure, and the operators, on a recorded run."""
    x = torch.rand(2, 4, requires_grad=True)
    with torchprof.Profile(model, profile_memory=True) as prof:
        y = model(x).sum()
        if backward:
            y.backward()
    run = prof.run
    truth = torchs_list(prof)
    ours = sum(
        event.self_cpu_time_total
        for event in truth
        if event.name.startswith(("torchprof:!opened", "torchprof:!step", "torchprof:!ended"))
    )
    theirs = sum(event.self_cpu_time_total for event in truth) - ours
    idle = sum(row.cost.cpu_ns for row in run.rows if row.layer is None and not row.frames)
    assert sum(row.cost.cpu_ns for row in run.rows) == run.meta.wall_ns
    assert (run.meta.wall_ns - idle) / 1000 == pytest.approx(theirs, abs=0.01)
    everything = sum((row.cost for row in run.rows), Cost())
    tree = run.tree()
    whole = tree.total
    for phase in PHASES:
        whole = whole + no_layer(run, phase)
    assert whole == everything
    for node in tree.walk():
        below = node.self
        for child in node.children:
            below = below + child.total
        assert node.total == below
    assert {node.layer.path: node.calls for node in tree.walk()} == calls_of(model)
    has_backward = any(row.phase == BACKWARD and row.layer for row in run.rows)
    assert has_backward == (backward and any(row.layer and row.frames for row in run.rows))
