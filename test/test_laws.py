"""The laws of the design, on random events, random trees and random models."""

from __future__ import annotations

import copy
import itertools
import random
import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torchs_list import torchs_list

import torchprof
from torchprof.attribute import (
    BACKWARD,
    FORWARD,
    OUTSIDE,
    PHASES,
    RECOMPUTE,
    Attribution,
    Event,
    Frame,
    Kind,
    Signature,
    Site,
)
from torchprof.cost import FIELDS, Cost
from torchprof.reports import known
from torchprof.run import BETWEEN_OPS, Layer, Meta, Rows, Run, SampleKey, Spread, fold

# Random models: paths of layers, depth first, and a label for each


@st.composite
def layer_trees(draw: st.DrawFn, most: int = 8) -> tuple[tuple[str, ...], ...]:
    """The paths of a random model, parents before children, depth first."""
    above = draw(st.lists(st.integers(0, most), max_size=most))
    children: dict[int, list[int]] = {}
    for child, at in enumerate(above, 1):
        children.setdefault(min(at, child - 1), []).append(child)
    paths: list[tuple[str, ...]] = []
    waiting: list[tuple[int, tuple[str, ...]]] = [(0, ("Net",))]
    while waiting:
        number, path = waiting.pop()
        paths.append(path)
        waiting.extend((child, (*path, str(child))) for child in reversed(children.get(number, [])))
    return tuple(paths)


# Random events: a forest on each of several threads, written down with start and end


@dataclass
class Span:
    """An event of the forest and what is inside it; ``own`` times lie before, between and after the children."""

    kind: Kind
    name: str
    children: list[Span]
    own: list[int]
    sequence: int = -1
    bytes_inside: list[int] = field(default_factory=list)

    @property
    def duration(self) -> int:
        return sum(self.own) + sum(child.duration for child in self.children)


KINDS = st.sampled_from([Kind.OP, Kind.OP, Kind.LABEL, Kind.LABEL, Kind.USER_LABEL, Kind.NODE, Kind.BACKWARD_FUNCTION])


@st.composite
def spans(draw: st.DrawFn, layers: int, depth: int = 4) -> Span:
    """A random event with random events inside."""
    kind = draw(KINDS)
    if kind is Kind.LABEL:
        name = f"label {draw(st.integers(0, layers - 1))}"
    elif kind is Kind.USER_LABEL:
        name = f"user {draw(st.integers(0, 1))}"
    elif kind is Kind.OP:
        name = f"op {draw(st.integers(0, 2))}"
    else:
        name = f"{kind.name} {draw(st.integers(0, 2))}"
    children = draw(st.lists(spans(layers, depth - 1), max_size=3)) if depth else []
    own = [draw(st.integers(0, 50)) for _ in range(len(children) + 1)]
    sequence = draw(st.integers(-1, 12)) if kind is not Kind.LABEL and kind is not Kind.USER_LABEL else -1
    return Span(kind, name, children, own, sequence, draw(st.lists(st.integers(-64, 64), max_size=2)))


@dataclass
class Forest:
    """Everything that one random session recorded."""

    threads: list[list[Span]]
    kernels: list[tuple[int, int]]  # (number of the op that launched it, or of none; duration)

    def events(self) -> list[Event]:
        """As the profiler would give them: in the order of start, an outer one before an inner one."""
        found: list[Event] = []
        numbers = itertools.count(1)
        for thread, roots in enumerate(self.threads, 1):
            at = 0
            for root in roots:
                at += 3
                found.extend(self._written(root, at, thread, numbers))
                at += root.duration
        end = max((event.end_ns for event in found), default=0)
        kernels = [
            Event(Kind.KERNEL, f"kernel {number}", end + number, end + number + ns, 0, correlation=op, device="cuda:0")
            for number, (op, ns) in enumerate(self.kernels)
        ]
        return sorted(found, key=lambda event: event.start_ns) + kernels

    def _written(self, span: Span, at: int, thread: int, numbers: Iterator[int]) -> Iterator[Event]:
        end = at + span.duration
        yield Event(
            span.kind, span.name, at, end, thread, span.sequence, 1 if span.sequence >= 0 else 0, next(numbers), "cpu"
        )
        for nbytes in span.bytes_inside:
            yield Event(Kind.MEMORY, "[memory]", at, at, thread, nbytes=nbytes)
        for child, before in zip(span.children, span.own):
            yield from self._written(child, at + before, thread, numbers)
            at += before + child.duration

    def walk(self) -> Iterator[Span]:
        """Every span of every thread."""
        waiting = [root for roots in self.threads for root in roots]
        while waiting:
            span = waiting.pop()
            yield span
            waiting.extend(span.children)


@st.composite
def sessions(draw: st.DrawFn) -> tuple[tuple[tuple[str, ...], ...], Forest]:
    """A random model and a random session of it."""
    paths = draw(layer_trees())
    threads = draw(st.lists(st.lists(spans(len(paths)), max_size=3), min_size=1, max_size=2))
    kernels = draw(st.lists(st.tuples(st.integers(1, 40), st.integers(0, 500)), max_size=6))
    return paths, Forest(threads, kernels)


def run_of(paths: tuple[tuple[str, ...], ...], forest: Forest) -> Run:
    """The run that these events give."""
    layers = tuple(Layer(path, "Module") for path in paths)
    sites = {f"label {number}": Site((number,)) for number in range(len(paths))}
    attribution = Attribution(sites, paths)
    rows, samples, _ = fold(attribution.attribute(forest.events()), attribution.places.all, layers)
    meta = Meta(model=("Module",), device="cuda", requested=FIELDS, measured=FIELDS)
    return Run((meta,), layers, rows, samples)


def no_layer(run: Run, phase: str) -> Cost:
    """What belongs to no layer in a phase, selected or not."""
    cost = Cost()
    for row in run.rows:
        if row.layer is None and row.phase == phase:
            cost = cost + row.cost
    return cost


# Law 1


@settings(deadline=None, max_examples=80)
@given(sessions())
def test_the_rows_add_up_to_the_events(session: tuple[tuple[tuple[str, ...], ...], Forest]) -> None:
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


@settings(deadline=None, max_examples=80)
@given(sessions())
def test_each_layer_owns_its_forward(session: tuple[tuple[tuple[str, ...], ...], Forest]) -> None:
    """The self time of each layer in forward, from a walk of the forest that knows nothing of stacks and clocks."""
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
        if row.phase == FORWARD:
            layer = index[row.layer.path] if row.layer else OUTSIDE
            owned[layer] = owned.get(layer, 0) + row.cost.cpu_ns
    assert {layer: ns for layer, ns in owned.items() if ns} == {layer: ns for layer, ns in expected.items() if ns}


# Law 2, on rows of any kind

FRAMES: tuple[tuple[Frame, ...], ...] = (
    (),
    (Frame("op", "a"),),
    (Frame("op", "a"), Frame("op", "b")),
    (Frame("op", "a"), Frame("op", "b"), Frame("op", "a")),
    (Frame("label", "mine"), Frame("op", "b")),
    (Frame("op", "a"), Frame("kernel", "gemm")),
    (Frame("kernel", "stray"),),
)
SIGNATURES = (
    Signature(((4, 3), (), None), ("float", "Scalar", "TensorList"), (None, 1.5, None)),
    Signature((((2,), (3, 1)), ()), ("TensorList", "ScalarList"), (None, (1, 2))),
)


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """A run with random rows: any layer or none, any phase, any frames."""
    paths = draw(layer_trees())
    if draw(st.booleans()):
        paths += tuple(("Other", *path[1:]) for path in paths[:3] if path[:-1] in (*paths[:3], ()) or len(path) == 1)
    layers = tuple(Layer(path, "Module", input_shapes=((1, 2),), shared_with=(path,)) for path in paths)
    lines = draw(
        st.lists(
            st.tuples(
                st.integers(-2, len(layers) - 1),
                st.integers(0, len(PHASES) - 1),
                st.integers(0, len(FRAMES) - 1),
                st.integers(0, len(SIGNATURES)),
                st.integers(0, 1),
                st.just(0),
                st.integers(0, 5),
                *[st.integers(0, 2**40) for _ in FIELDS],
            ),
            max_size=25,
        )
    )
    columns = {name: array("q", (line[at] for line in lines)) for at, name in enumerate(Rows.COLUMNS)}
    rows = Rows(layers, FRAMES, ("cpu", "cuda:0"), columns, SIGNATURES)
    keys = draw(st.sets(st.tuples(st.integers(0, len(layers) - 1), st.sampled_from([FORWARD, RECOMPUTE])), max_size=4))
    calls = st.lists(st.tuples(st.integers(0, 10**12), st.integers(0, 10**9)), min_size=1, max_size=5)
    samples = {SampleKey(layer, phase, 0, "cpu", "cpu_ns"): Spread.of(draw(calls)) for layer, phase in sorted(keys)}
    paths_chosen = draw(st.none() | st.just((layers[0].path,)))
    meta = Meta(
        model=("Module",),
        device=draw(st.sampled_from([None, "cuda"])),
        requested=draw(st.sampled_from([("cpu_ns",), FIELDS])),
        measured=draw(st.sampled_from([("cpu_ns",), FIELDS])),
        paths=paths_chosen,
        wall_ns=draw(st.integers(0, 10**10)),
        warnings=draw(st.sampled_from([(), ("Careful: “quoted”, and naïve.",)])),
        versions=(("torch", "2.13.0"),),
        flags=(("use_cuda", True),),
        machine="host",
        script="/tmp/x.py",
    )
    return Run((meta,), layers, rows, samples)


@settings(deadline=None, max_examples=80)
@given(runs(), st.sampled_from([None, *PHASES]))
def test_total_is_self_and_the_totals_of_the_children(run: Run, phase: str | None) -> None:
    """In every tree, at every node; and the trees and what has no layer hold all rows."""
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
    rows = Cost()
    for row in run.rows:
        if phase is None or row.phase == phase:
            rows = rows + row.cost
    assert everything == rows


@settings(deadline=None, max_examples=80)
@given(runs())
def test_the_operators_of_a_layer_add_up_to_its_self(run: Run) -> None:
    """Σ op self + (between ops) = the layer's self, for every layer and phase, and for what has no layer."""
    for phase in PHASES:
        expected: dict[int, Cost] = {}
        totals: dict[tuple[int, str], Cost] = {}
        for at, row in enumerate(run.rows):
            if row.phase == phase:
                layer = run.rows.columns["layer"][at]
                expected[layer] = expected.get(layer, Cost()) + row.cost
                for name in {frame.name for frame in row.frames if frame.kind != "kernel"} or {BETWEEN_OPS}:
                    totals[layer, name] = totals.get((layer, name), Cost()) + row.cost
        ops = run.ops(phase)
        assert set(ops) == set(expected)
        for layer, found in ops.items():
            whole = Cost()
            for op in found:
                whole = whole + op.self
                assert op.total == totals[layer, op.name], "the outermost occurrences hold all that is inside"
            assert whole == expected[layer]
            assert len({op.name for op in found}) == len(found)


# Law 4


@settings(deadline=None, max_examples=60)
@given(runs(), st.sampled_from(["run.json", "run.json.gz"]))
def test_a_saved_run_loads_as_it_was(run: Run, name: str) -> None:
    """``load(save(run)) == run``, plain and gzipped, and saving changes nothing."""
    before = copy.deepcopy(run)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        run.save(path)
        assert (path.read_bytes()[:2] == b"\x1f\x8b") == name.endswith(".gz")
        loaded = torchprof.load(path)
        assert loaded == run == before
        assert list(loaded.rows) == list(run.rows)
        loaded.save(path)
        assert torchprof.load(path) == run, "and once more"


@settings(deadline=None, max_examples=20)
@given(runs())
def test_a_stripped_run_differs_only_in_names_of_machines(run: Run) -> None:
    """``strip=True`` leaves the machine's and the script's names out, all else stays."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.json"
        run.save(path, strip=True)
        assert "host" not in path.read_text(encoding="utf-8")
        assert "x.py" not in path.read_text(encoding="utf-8")
        loaded = torchprof.load(path)
    assert loaded != run
    assert (loaded.layers, loaded.rows, loaded.samples) == (run.layers, run.rows, run.samples)


@pytest.mark.parametrize("name", ["run.json", "run.json.gz"])
def test_a_real_run_loads_as_it_was(tmp_path: Path, name: str) -> None:
    """The same for a run of a real training step."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with torchprof.Profile(model, profile_memory=True) as prof:
        model(torch.rand(5, 3)).sum().backward()
    prof.run.save(tmp_path / name)
    assert torchprof.load(tmp_path / name) == prof.run


# Law 5


@settings(deadline=None, max_examples=40)
@given(runs())
def test_reports_are_pure(run: Run) -> None:
    """Every report gives the same text for the same run, and leaves the run as it was."""
    before = copy.deepcopy(run)
    options = [{}, {"show_events": True}, {"depth": 1}, {"sort_by": "self_cpu_total"}, {"top": 2}, {"percent": True}]
    for name in known():
        assert run.report(name) == run.report(name)
    for chosen in options:
        first = run.report("tree", **chosen)
        assert isinstance(first, str)
        assert run.report("tree", **chosen) == first == before.report("tree", **chosen)
    assert run == before


@settings(deadline=None, max_examples=40)
@given(runs())
def test_show_events_adds_rows_and_changes_no_figure(run: Run) -> None:
    """``show_events`` adds rows, and a self column for each other phase; the layers' figures stay."""

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


# Samples


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 10**15), st.integers(0, 10**9)), min_size=1, max_size=600), st.randoms())
def test_a_spread_does_not_depend_on_the_order_of_the_calls(calls: list[tuple[int, int]], rng: random.Random) -> None:
    """The same calls in any order give the same spread; up to its size it holds all values."""
    shuffled = list(calls)
    rng.shuffle(shuffled)
    spread = Spread.of(calls)
    assert Spread.of(shuffled) == spread
    values = sorted(value for _, value in calls)
    assert (spread.count, spread.sum, spread.min, spread.max) == (len(values), sum(values), values[0], values[-1])
    if len(calls) <= Spread.SIZE:
        assert list(spread.sample) == values
    else:
        assert len(spread.sample) == Spread.SIZE
        assert set(spread.sample) <= set(values)


def test_a_spread_of_calls_that_started_together_does_not_depend_on_their_order() -> None:
    """Calls on several threads can start in the same nanosecond; which of them are kept is still fixed."""
    calls = [(start, value) for start in range(150) for value in (start, 1000 + start, 2000 + start)]
    spread = Spread.of(calls)
    assert Spread.of(calls[::-1]) == spread
    assert Spread.of(sorted(calls, key=lambda call: call[1])) == spread


def test_the_sample_of_a_spread_is_not_the_first_calls() -> None:
    """A sample of 10,000 rising values has about their median: it is drawn from all of them."""
    spread = Spread.of([(1000 * number, number) for number in range(10_000)])
    assert 3_500 < spread.median < 6_500
    assert spread.first == 0
    assert spread.max == 9_999


# All of it on random real models


@st.composite
def modules(draw: st.DrawFn, depth: int = 3) -> nn.Module:
    """A random module that takes and gives a (2, 4) tensor."""
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


class Twice(nn.Module):
    """Calls its child two times, with an op of its own in between."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.inner(x) * 2)


class Sum(nn.Module):
    """Two branches, added."""

    def __init__(self, left: nn.Module, right: nn.Module) -> None:
        super().__init__()
        self.left = left
        self.right = right

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) + self.right(x)


def calls_of(model: nn.Module) -> dict[tuple[str, ...], int]:
    """How often each layer is called in one call of the model, by its construction."""
    found: dict[tuple[str, ...], int] = {}
    waiting = [(model, (type(model).__name__,), 1)]
    while waiting:
        module, path, times = waiting.pop()
        found[path] = times
        times *= 2 if isinstance(module, Twice) else 1
        waiting.extend((child, (*path, name), times) for name, child in module.named_children())
    return found


@settings(deadline=None, max_examples=15)
@given(modules(), st.booleans())
def test_the_laws_hold_on_random_models(model: nn.Module, backward: bool) -> None:
    """Laws 1 and 2, the calls known from the construction, and the operators, on a real run."""
    x = torch.rand(2, 4, requires_grad=True)
    with torchprof.Profile(model, profile_memory=True) as prof:
        y = model(x).sum()
        if backward:
            y.backward()
    run = prof.run
    truth = torchs_list(prof)
    ours = sum(event.self_cpu_time_total for event in truth if event.name.startswith("torchprof:!"))
    theirs = sum(event.self_cpu_time_total for event in truth) - ours
    assert sum(row.cost.cpu_ns for row in run.rows) / 1000 == pytest.approx(theirs, abs=0.01)
    everything = Cost()
    for row in run.rows:
        everything = everything + row.cost
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
