"""The times of steps of a loop: against hand-made times, a second count of each ns, and the rows of real loops."""

from __future__ import annotations

import itertools
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from build.events import ENGINE, MAIN, kernel, label, node, op, step, user_label, walk_of
from build.examples import examples
from build.hand_made import row, run_of
from build.models import Checkpointed, Mlp
from build.warnings import run_warnings
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from torchprof import Profile, TorchprofError
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.attribute.torch_ranges import add_engine_calls
from torchprof.measure.fold import fold
from torchprof.measure.steps import Steps, with_marks
from torchprof.record.labels import label_of
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.merge import add_cycle
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, BEFORE, FORWARD, NOT_SELECTED, OUTSIDE, PHASES, RECOMPUTE

PATHS = (("Net",), ("Net", "a"), ("Net", "b"))
LAYERS = tuple(Layer(path, "Module") for path in PATHS)
SITES = {label_of(path): Site((number,)) for number, path in enumerate(PATHS)}
NET, A, B = SITES
DATA = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
SGD = "Optimizer.step#SGD.step"
PARTS = ("data", "optimizer", "copy", "wait", "backward", "other", "gap", "overlap")


class Counted(NamedTuple):
    """The results of some events: the samples of their steps, the hashes of these steps in order, and the run."""

    samples: dict[SampleKey, Spread]
    order: list[int]
    run: Run

    def of(self, measure: str, layer: int = OUTSIDE, phase: str = FORWARD, device: str = "cpu") -> list[int]:
        """The values of a measure for each step; [] if it has none."""
        if (spread := self.samples.get(SampleKey(layer, phase, 0, device, measure))) is None:
            return []
        assert sorted(spread.hashes) == sorted(self.order)  # a value for each step
        by_step = dict(zip(spread.hashes, spread.sample))
        return [by_step[number] for number in self.order]


def count(
    *events: Event,
    selected: set[int] | None = None,
    kernels: Sequence[Event] = (),
    layers: tuple[Layer, ...] = LAYERS,
) -> Counted:
    """Count events, which may be in any order; those of the device come last."""
    marks = [event.start_ns for event in events if event.kind is Kind.STEP]
    attribution = Attribution(SITES, PATHS, selected)
    watched = Steps(layers)
    in_order = [*sorted(events, key=lambda e: (e.start_ns, -e.end_ns)), *kernels]
    columns = EventColumns.of(in_order)
    add_engine_calls(columns)
    attributed = watched.observe(walk_of(attribution, columns))
    rows, _, _ = fold(attributed, attribution.places.all, layers)
    samples = watched.result().get("samples", {})
    order = [Spread.of([(start, 0)]).hashes[0] for start in sorted(marks)[:-1]]
    meta = Meta(("Net",), steps=watched.count, wall_ns=sum(marks[-1:]) - sum(marks[:1]))
    return Counted(samples, order, Run((meta,), layers, rows, samples))


def test_a_step_with_known_times() -> None:
    """Data, forward with two children, loss, backward (first that of the loss), optimizer; gaps between all of them."""
    found = count(
        step(0),
        user_label(DATA, 3, 10),
        op("aten::stack", 4, 9),
        label(NET, 12, 40),
        label(A, 13, 23),
        op("aten::mm", 14, 20, sequence=1),
        op("aten::relu", 24, 26, sequence=2),
        label(B, 27, 39),
        op("aten::mm", 28, 38, sequence=3),
        op("aten::loss", 41, 45, sequence=4),
        node("X", 46, 49, 4),
        node("X", 50, 57, 3),
        node("X", 57, 59, 2),
        node("X", 59, 70, 1),
        user_label(SGD, 72, 90),
        op("aten::add_", 75, 85),
        step(100),
    )
    assert found.of("step_ns") == [100]
    assert found.of("step_cpu_ns", 0) == [28]
    assert found.of("step_cpu_ns", 1) == [10]
    assert found.of("step_cpu_ns", 2) == [12]
    assert found.of("step_cpu_ns", 0, BACKWARD) == [20]
    assert found.of("step_cpu_ns", 1, BACKWARD) == [11]
    assert found.of("step_cpu_ns", 2, BACKWARD) == [7]
    assert found.of("step_cpu_ns", OUTSIDE) == [7 + 4 + 18 + 3 + 2 + 1 + 1 + 2 + 10]
    assert found.of("step_cpu_ns", OUTSIDE, BACKWARD) == [3 + 1]
    assert found.of("step_data_ns") == [7]
    assert found.of("step_optimizer_ns") == [18]
    assert found.of("step_backward_ns") == [3 + 1]
    assert found.of("step_other_ns") == [4]
    assert found.of("step_gap_ns") == [3 + 2 + 1 + 1 + 2 + 10]
    assert found.of("step_copy_ns") == found.of("step_wait_ns") == found.of("step_overlap_ns") == []


def test_the_closure_of_an_optimizer_is_not_the_optimizers_time() -> None:
    """Lightning passes the loss to the optimizer's step as a closure; LBFGS calls a closure several times."""
    once = [
        user_label("Optimizer.zero_grad#SGD.zero_grad", 12, 15),
        op("aten::zero_", 13, 14),
        label(NET, 20, 40),
        op("aten::mm", 21, 30, sequence=1),
        op("aten::loss", 41, 45, sequence=4),
        op("aten::loss", 42, 43),  # directly inside an op of the same name: the same call
        node("X", 46, 49, 4),
        node("X", 50, 60, 1),
        op("aten::add_", 70, 80),
        op("aten::mul_", 71, 73),
    ]
    again = [event._replace(start_ns=event.start_ns + 100, end_ns=event.end_ns + 100) for event in once]
    found = count(step(0), user_label(SGD, 10, 190), *once, *again, step(200))
    assert found.of("step_cpu_ns", 0) == [2 * 20]
    assert found.of("step_cpu_ns", 0, BACKWARD) == [2 * 10]
    # Python from the beginning of the step to the end of backward, and from the second call of the model.
    of_closures = (60 - 10 - 3 - 20 - 4 - 14) + (160 - 120 - 20 - 4 - 14)
    assert found.of("step_optimizer_ns") == [180 - 2 * (20 + 4 + 14) - of_closures]
    assert found.of("step_backward_ns") == [2 * (3 + 1)]
    assert found.of("step_other_ns") == [2 * 4]
    assert found.of("step_gap_ns") == [20 + of_closures]
    assert found.of("step_overlap_ns") == []


def test_a_closure_in_a_step_inside_a_step() -> None:
    """ZeroRedundancyOptimizer passes its closure to the optimizer inside it."""
    inside = [
        user_label(SGD, 12, 88),
        label(NET, 20, 40),
        op("aten::mm", 21, 30, sequence=1),
        op("aten::loss", 41, 45, sequence=4),
        node("X", 50, 60, 1),
        op("aten::add_", 70, 80),
    ]
    found = count(step(0), user_label("Optimizer.step#Zero.step", 10, 90), *inside, step(100))
    assert found.of("step_other_ns") == [4]
    assert found.of("step_gap_ns") == [20 + (60 - 10) - 20 - 4 - 10]
    assert found.of("step_optimizer_ns") == [90 - 60]


def test_labels_of_the_user_have_no_purpose_and_hide_nothing() -> None:
    """A label around two epochs of steps, and one around the optimizer: everything else is as without them."""
    bare = [
        event
        for start in (0, 100, 200)
        for event in (
            user_label(DATA, start + 2, start + 12),
            label(NET, start + 15, start + 45),
            op("aten::loss", start + 50, start + 54),
            user_label(SGD, start + 60, start + 80),
        )
    ]
    marks = [step(at) for at in (0, 100, 200, 300)]
    plain = count(*marks, *bare)
    labelled = count(
        *marks,
        *bare,
        user_label("epoch 1", 1, 148),  # ends inside the step after its last mark
        user_label("epoch 2", 148, 299),
        user_label("update", 55, 90),
    )
    for part in PARTS:
        assert labelled.of(f"step_{part}_ns") == plain.of(f"step_{part}_ns")
    assert plain.of("step_data_ns") == [10] * 3
    assert plain.of("step_optimizer_ns") == [20] * 3
    assert plain.of("step_other_ns") == [4] * 3
    assert plain.of("step_gap_ns") == [36] * 3
    # All but the time of the layer is outside all layers, with a label around it and without.
    assert plain.of("step_cpu_ns") == labelled.of("step_cpu_ns") == [100 - 30] * 3


def test_events_in_no_finished_step_are_in_no_sample() -> None:
    found = count(label(NET, 0, 8), step(10), label(NET, 12, 17), step(20), label(NET, 21, 29))
    assert found.of("step_cpu_ns", 0) == [5]
    assert found.of("step_ns") == [10]
    assert count(step(0), label(NET, 1, 5)).samples == {}
    assert count(label(NET, 1, 5)).samples == {}


def test_a_layer_without_work_in_a_step_has_0_for_it() -> None:
    found = count(step(0), label(NET, 1, 5), step(10), step(20), label(NET, 21, 27), label(B, 22, 24), step(30))
    assert found.of("step_cpu_ns", 0) == [4, 0, 6]
    assert found.of("step_cpu_ns", 2) == [0, 0, 2]
    assert found.of("step_cpu_ns", 1) == []


@pytest.mark.parametrize("around", [None, "backward"])
def test_backward_on_another_thread_is_no_gap(around: str | None) -> None:
    """On a GPU, the engine has its own thread, and the thread of the loop waits: in no range, or in the user's
    label."""
    events = [
        step(0),
        label(NET, 5, 25),
        op("aten::mm", 6, 16, sequence=1),
        node("X", 40, 70, 1, thread=ENGINE),
        step(100),
    ]
    found = count(*events, *([user_label(around, 30, 80)] if around else []))
    assert found.of("step_cpu_ns", 0, BACKWARD) == [30]
    assert found.of("step_gap_ns") == [50]
    assert found.of("step_overlap_ns") == []


def test_waits_and_copies_are_separate_from_the_ranges_around_them() -> None:
    """A copy to the device, a copy within the device, and ``loss.item()``; the optimizer waits, too."""
    found = count(
        step(0),
        op("aten::copy_", 1, 20, correlation=11),
        op("cudaMemcpyAsync", 5, 15),
        op("aten::copy_", 20, 30, correlation=12),
        op("cudaMemcpyAsync", 22, 26),
        op("aten::item", 30, 60, correlation=13),
        op("cudaMemcpyAsync", 31, 34, correlation=0),
        op("cudaStreamSynchronize", 34, 54),
        user_label(SGD, 60, 90),
        op("aten::_foreach_add_", 62, 70, correlation=14),
        op("cudaLaunchKernel", 63, 66),
        op("cudaDeviceSynchronize", 80, 86),
        step(100),
        kernels=[
            kernel("Memcpy HtoD (Pageable -> Device)", 15, 40, 11),
            kernel("Memcpy DtoD (Device -> Device)", 40, 42, 12),
            kernel("Memcpy DtoH (Device -> Pinned)", 42, 43, 13),
            kernel("multi_tensor_apply", 70, 77, 14),
        ],
    )
    assert found.of("step_copy_ns") == [10 + 3]
    assert found.of("step_wait_ns") == [20 + 6]
    assert found.of("step_optimizer_ns") == [30 - 6]
    assert found.of("step_other_ns") == [19 - 10 + 10 + 30 - 3 - 20]
    assert found.of("step_gap_ns") == [1 + 10]
    assert found.of("step_copy_ns", device="cuda:0") == [25 + 1]
    assert found.of("step_other_ns", device="cuda:0") == [2]
    assert found.of("step_optimizer_ns", device="cuda:0") == [7]
    assert found.of("step_device_ns", device="cuda:0") == [35]


def test_waits_and_copies_also_count_inside_layers_that_are_ranges() -> None:
    """A range may be around any work; a layer of a model keeps everything in its forward. The sum is still the step."""
    events = [
        step(0),
        label(NET, 5, 80),
        op("aten::copy_", 10, 30, correlation=11),
        op("cudaMemcpyAsync", 12, 22),
        op("aten::copy_", 30, 36, correlation=12),
        op("cudaMemcpyAsync", 31, 35),
        op("cudaStreamSynchronize", 40, 70),
        op("cudaDeviceSynchronize", 90, 95),
        step(100),
    ]
    kernels = [
        kernel("Memcpy HtoD (Pageable -> Device)", 15, 40, 11),
        kernel("Memcpy DtoD (Device -> Device)", 40, 43, 12),
    ]
    ranges = tuple(replace(one, kind="") for one in LAYERS)
    of_model, of_ranges = count(*events, kernels=kernels), count(*events, kernels=kernels, layers=ranges)
    assert of_model.of("step_wait_ns") == [5]
    assert of_model.of("step_copy_ns") == of_model.of("step_overlap_ns") == []
    assert of_ranges.of("step_wait_ns") == [30 + 5]
    assert of_ranges.of("step_copy_ns") == [10]  # a copy within the device does not count as a copy
    assert of_ranges.of("step_overlap_ns") == [30 + 10]
    assert of_ranges.of("step_copy_ns", device="cuda:0") == of_ranges.of("step_overlap_ns", device="cuda:0") == [25]
    for found in (of_model, of_ranges):
        assert found.of("step_cpu_ns", 0) == [75]
        assert found.of("step_device_ns", 0, device="cuda:0") == [28]
        parts = {part: sum(found.of(f"step_{part}_ns")) for part in PARTS}
        assert 75 + sum(parts.values()) - 2 * parts["overlap"] == 100
    run = replace(
        of_ranges.run, metas=(replace(of_ranges.run.meta, model=(), device="cuda", measured=("cpu_ns", "device_ns")),)
    )
    lines = {
        line.split("|")[0].strip(): line.split("|")[-1].strip()
        for line in run.report("steps").splitlines()
        if "|" in line
    }
    assert lines["counted twice (several threads, or in ranges)"] == "-0.025us"
    assert lines["host-device copies"] == "0.025us"
    assert lines["Step"] == "0.028us"


def test_a_kernel_counts_in_the_step_that_launched_it() -> None:
    found = count(
        step(0),
        label(NET, 0, 50),
        label(A, 10, 40),
        op("aten::mm", 11, 30, correlation=5),
        step(100),
        op("aten::loss", 110, 120, correlation=6),
        step(200),
        op("aten::loss", 210, 220, correlation=7),
        kernels=[
            kernel("gemm", 150, 170, 5),
            kernel("gemm", 170, 171, 5, "cuda:1"),
            kernel("loss", 190, 193, 6),
            kernel("loss", 195, 199, 7),  # launched after the last step, by the clock of the device before
            kernel("graph", 130, 131, 99),  # its launch is unknown
            kernel("of before", 3, 60, BEFORE),  # launched before the recording
        ],
    )
    assert found.of("step_device_ns", 1, device="cuda:0") == [20, 0]
    assert found.of("step_device_ns", 0, device="cuda:0") == [20, 0]
    assert found.of("step_device_ns", 0, device="cuda:1") == [1, 0]
    assert found.of("step_device_ns", OUTSIDE, device="cuda:0") == [0, 3 + 1]
    assert found.of("step_other_ns", OUTSIDE, device="cuda:0") == [0, 4]


# A second count: the owner of each nanosecond


class Span(NamedTuple):
    """A range with the ranges inside it."""

    kind: str
    name: str
    start: int
    end: int
    inside: tuple[Span, ...]


NAMES = {
    "layer": (A, B),
    "label": ("mine", "yours", DATA, SGD),
    "op": ("aten::mm", "aten::add", "cudaStreamSynchronize", "cudaMemcpyAsync"),
}


@st.composite
def spans(draw: st.DrawFn, start: int, end: int, level: int = 0) -> tuple[Span, ...]:
    found = []
    while start < end and draw(st.integers(0, 3)):
        begin = draw(st.integers(start, end - 1))
        stop = draw(st.integers(begin + 1, end))
        kind = draw(st.sampled_from(sorted(NAMES)))
        inside = draw(spans(begin, stop, level + 1)) if level < 3 else ()
        found.append(Span(kind, draw(st.sampled_from(NAMES[kind])), begin, stop, inside))
        start = stop
    return tuple(found)


def events_of(spans: Sequence[Span], thread: int) -> Iterator[Event]:
    kinds = {"layer": Kind.LABEL, "label": Kind.USER_LABEL, "op": Kind.OP}
    for span in spans:
        yield Event(kinds[span.kind], span.name, span.start, span.end, thread)
        yield from events_of(span.inside, thread)


def owner(spans: Sequence[Span], at: int) -> str | None:
    """The owner of a nanosecond of a thread: the label of a layer, a part of the step, or None."""
    chain: list[Span] = []
    while True:
        around = [span for span in spans if span.start <= at < span.end]
        if not around:
            break
        chain += around
        spans = around[0].inside
    if inner := [span.name for span in chain if span.kind == "layer"]:
        return inner[-1]
    if not chain:
        return None
    if chain[-1].name == "cudaStreamSynchronize":
        return "wait"
    if chain[-1].name == "cudaMemcpyAsync":
        return "copy"
    for span in chain:
        if span.name in (DATA, SGD):
            return "data" if span.name == DATA else "optimizer"
    return "other" if any(span.kind == "op" for span in chain) else None


def calls_back(spans: Sequence[Span], in_optimizer: bool = False) -> bool:
    """Whether a layer is called inside an optimizer's step; another test checks these times."""
    return any(
        (in_optimizer and span.kind == "layer") or calls_back(span.inside, in_optimizer or span.name == SGD)
        for span in spans
    )


@examples(200)
@given(spans(0, 40), spans(0, 40), st.sets(st.integers(0, 40), min_size=2, max_size=6))
def test_every_nanosecond_of_every_step_has_its_owner(
    main: tuple[Span, ...], engine: tuple[Span, ...], marks: set[int]
) -> None:
    assume(not calls_back(main) and not calls_back(engine))
    found = count(*map(step, marks), *events_of(main, MAIN), *events_of(engine, ENGINE))
    bounds = sorted(marks)
    for number, (start, end) in enumerate(itertools.pairwise(bounds)):
        owned: Counter[str] = Counter()
        explained = 0
        for at in range(start, end):
            owners = [one for one in (owner(main, at), owner(engine, at)) if one is not None]
            owned.update(owners)
            explained += bool(owners)

        def value(measure: str, layer: int = OUTSIDE, number: int = number) -> int:
            values = found.of(measure, layer)
            return values[number] if values else 0

        assert value("step_ns") == end - start
        assert value("step_cpu_ns", 1) == owned[A]
        assert value("step_cpu_ns", 2) == owned[B]
        assert value("step_cpu_ns", 0) == owned[A] + owned[B]
        for part in ("data", "optimizer", "copy", "wait", "other"):
            assert value(f"step_{part}_ns") == owned[part], part
        assert value("step_gap_ns") == end - start - explained
        assert value("step_overlap_ns") == owned.total() - explained


# Several cycles


def test_two_cycles_give_the_same_samples_as_one() -> None:
    """A layer without work in one of them has 0 for its steps."""
    first = [step(0), label(NET, 5, 25), label(A, 6, 9), step(100), label(NET, 110, 114), step(200)]
    second = [step(200), label(NET, 205, 215), label(B, 206, 214), user_label(DATA, 220, 229), step(300)]
    both = add_cycle(count(*first).run, count(*second).run)
    assert both.samples == count(*first, *second[1:]).samples


# Real loops


class Slow(Dataset[Tensor]):
    """Eight samples; each takes this number of seconds to load."""

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(self.seconds)
        return torch.full((4,), float(index))


class SlowSgd(torch.optim.SGD):
    """Sleeps in each step."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


def train(model: nn.Module, *, loading: float = 0, updating: float = 0, between: float = 0, **options: Any) -> Run:
    """Two epochs of four steps with two samples; nothing runs after the last step."""
    optimizer = SlowSgd(model.parameters(), lr=0.1)
    optimizer.seconds = updating
    with Profile(model, **options) as prof:
        for _ in range(2):
            batches = iter(DataLoader(Slow(loading), batch_size=2))
            for _ in range(4):
                model(next(batches)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                time.sleep(between)
                prof.step()
    return prof.run


def of_steps(run: Run, measure: str, layer: int = OUTSIDE, phase: str = FORWARD) -> int:
    """The sum of a measure over all steps."""
    spread = run.samples.get(SampleKey(layer, phase, 0, "cpu", measure))
    return spread.sum if spread is not None else 0


def schedule(**of: int) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of a schedule without warm-up
        return torch.profiler.schedule(**of)


LOOPS = [  # the schedule and how many steps it records
    pytest.param(None, 8, id="one cycle"),
    pytest.param(schedule(wait=0, warmup=0, active=1), 8, id="many"),
    pytest.param(schedule(wait=1, warmup=1, active=2), 4, id="with rests"),
]


@pytest.mark.parametrize("paths", [None, ["fc1"]], ids=["all layers", "one layer"])
@pytest.mark.parametrize("schedule, expected", LOOPS)
def test_steps_and_rows_of_a_real_loop_agree(schedule: Any, expected: int, paths: list[str] | None) -> None:
    """All recorded work is inside steps, so their sums equal those of the rows, to the ns. What follows the last step
    of a cycle is outside of all layers."""
    run = train(Mlp(), paths=paths, schedule=schedule)
    assert run.meta.steps == expected
    after = run.meta.wall_ns - of_steps(run, "step_ns")
    for phase in PHASES:
        assert of_steps(run, "step_cpu_ns", 0, phase) == run.tree(phase).total.cpu_ns
        outside = run.no_layer(phase).cpu_ns - (after if phase == FORWARD else 0)
        assert of_steps(run, "step_cpu_ns", OUTSIDE, phase) == outside
        assert of_steps(run, "step_cpu_ns", NOT_SELECTED, phase) == run.no_layer(phase, selected=False).cpu_ns
        for branch in run.tree(phase).walk():
            at = run.layers.index(branch.layer)
            assert of_steps(run, "step_cpu_ns", at, phase) == branch.total.cpu_ns
    assert sum(
        of_steps(run, "step_cpu_ns", layer, phase) for layer in (0, OUTSIDE, NOT_SELECTED) for phase in PHASES
    ) == of_steps(run, "step_ns")


@pytest.mark.parametrize("schedule, expected", LOOPS)
@pytest.mark.parametrize("model", [Mlp, lambda: Checkpointed(True)], ids=["plain", "checkpoint"])
def test_the_parts_add_up_to_the_steps_and_these_to_the_time(model: Any, schedule: Any, expected: int) -> None:
    run = train(model(), schedule=schedule)
    layers = sum(of_steps(run, "step_cpu_ns", layer, phase) for layer in (0, NOT_SELECTED) for phase in PHASES)
    parts = {part: of_steps(run, f"step_{part}_ns") for part in PARTS}
    assert layers + sum(parts.values()) - 2 * parts["overlap"] == of_steps(run, "step_ns")
    assert min(parts["data"], parts["optimizer"], parts["other"], parts["gap"]) > 0
    assert parts["overlap"] == parts["copy"] == parts["wait"] == 0
    assert of_steps(run, "step_ns") < run.meta.wall_ns + 1e6 * run.meta.cycles  # measured by another clock
    assert run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")].count == run.meta.steps == expected
    if RECOMPUTE in run.phases():
        assert of_steps(run, "step_cpu_ns", 0, RECOMPUTE) > 0


def test_steps_last_from_mark_to_mark() -> None:
    with Profile(Mlp()) as prof:
        for _ in range(5):
            time.sleep(0.001)
            prof.step()
        time.sleep(0.01)
    marks = [event.end_ns for event in prof._session.columns().events() if event.kind is Kind.STEP]
    spread = prof.run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")]
    assert sorted(end - start for start, end in itertools.pairwise(marks)) == list(spread.sample)
    assert spread.sum <= prof.run.meta.wall_ns - 9e6  # the second sleep is in no step


@pytest.mark.parametrize(
    "where, part, times", [("loading", "data", 2), ("updating", "optimizer", 1), ("between", "gap", 1)]
)
def test_a_planted_sleep_is_in_its_part_of_the_step(where: str, part: str, times: int) -> None:
    """In each step. The parts add up to the step, so it is in no other part."""
    seconds = 0.01
    run = train(Mlp(), **{where: seconds})
    spread = run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", f"step_{part}_ns")]
    assert spread.count == 8
    assert spread.min >= times * seconds * 1e9 * 0.99  # clocks differ by a little


# The report


def table_of(text: str, number: int) -> list[list[str]]:
    """The cells of one table of the report, headings first."""
    lines = text.split("\n\n")[number].split("\n")
    return [[cell.strip() for cell in line.split("|")] for line in lines if not set(line) <= set("-|")]


def as_ns(text: str) -> float:
    for unit, factor in (("us", 1e3), ("ms", 1e6), ("s", 1e9)):
        if text.endswith(unit):
            return float(text.removesuffix(unit)) * factor
    raise AssertionError(text)


def made_by_hand() -> Run:
    """Two steps of 100 and 200 µs, with and without a device."""
    events = [step(0)]
    for start, factor in ((0, 1), (100, 2)):
        for name, kind, begin, end in (
            (DATA, Kind.USER_LABEL, 0, 10),
            (NET, Kind.LABEL, 10, 40),
            (A, Kind.LABEL, 15, 35),
            ("aten::loss", Kind.OP, 40, 45),
            (SGD, Kind.USER_LABEL, 50, 90),
        ):
            events.append(
                Event(kind, name, start + factor * begin, start + factor * end, MAIN, correlation=len(events))
            )
        events.append(step(start + factor * 100))
    kernels = [kernel("gemm", 20, 28, 3), kernel("gemm", 130, 142, 9), kernel("adam", 300, 330, 5)]
    in_us = [
        event._replace(start_ns=event.start_ns * 1000, end_ns=event.end_ns * 1000) for event in [*events, *kernels]
    ]
    found = count(*[event for event in in_us if event.kind is not Kind.KERNEL], kernels=in_us[len(events) :]).run
    measured = ("cpu_ns", "device_ns")
    meta = replace(found.meta, device="cuda", requested=measured, measured=measured, warnings=run_warnings("A doubt."))
    return replace(found, metas=(meta,))


def test_the_report_of_steps_made_by_hand(golden: Callable[..., None]) -> None:
    """Steps of 100 and 200 us: data loading takes 10 % of each, Net 30 %, of which a takes 20 %, the loss 5 %, the
    optimizer 40 %. Depth and top hide layers and nothing else; without its times the device is unknown."""
    run = made_by_hand()
    layers = {
        str(options): run.report("steps", **options).split("\n\n")[2]
        for options in ({"depth": 0}, {"top": 1}, {"top": 1, "depth": 0}, {"top": 0})
    }
    device = replace(run, metas=(replace(run.meta, measured=("cpu_ns",)),))
    longer = replace(run, metas=(replace(run.meta, wall_ns=400_000),))
    golden(
        run.report("steps"),
        layers,
        {
            "device not measured": device.report("steps").split("\n\n")[1],
            "time in no step": longer.report("steps").split("\n\n")[-1],
        },
    )


def test_the_means_that_are_printed_add_up() -> None:
    run = train(Mlp(), paths=["fc1"])
    table = table_of(run.report("steps"), 1)
    means = {name: as_ns(mean) for name, mean, *_ in table[1:]}
    total = means.pop("Step")
    assert sum(means.values()) == pytest.approx(total, abs=len(means) * 1e3)  # each is printed to 1 µs or better
    assert "(not selected), forward" in means


def test_time_that_would_count_twice_has_its_own_line(golden: Callable[..., None]) -> None:
    """Two operators of 50 us in a step of 100, at the same time for 20."""
    events = [step(0), op("aten::mm", 10_000, 60_000), op("aten::mm", 40_000, 90_000, thread=ENGINE), step(100_000)]
    golden(count(*events).run.report("steps"))


def test_the_deepest_shown_layers_include_the_layers_below_them() -> None:
    """b took 10 itself and 35 with the layer below it, which took 25; a took 30."""
    run = run_of([row(index, cpu_ns=1) for index in range(4)])
    took = {0: 80, 1: 30, 2: 35, 3: 25}
    samples = {SampleKey(index, FORWARD, 0, "cpu", "step_cpu_ns"): Spread.of([(0, ns)]) for index, ns in took.items()}
    samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")] = Spread.of([(0, 100)])
    run = replace(run, samples=samples, metas=(replace(run.meta, wall_ns=100, steps=1),))
    for depth, shown in ((1, ["Net", "└── b"]), (2, ["Net", "└── a"]), (None, ["Net", "└── a"])):
        assert [one[0] for one in table_of(run.report("steps", top=1, depth=depth), 2)][1:] == shown


def test_a_run_without_a_loop_says_where_steps_end() -> None:
    with Profile(Mlp()) as prof:
        pass
    with pytest.raises(TorchprofError, match=r"No loop was recorded. Steps end where `prof\.step\(\)`"):
        prof.run.report("steps")


def test_each_rank_has_its_tables() -> None:
    run = made_by_hand()
    second = {key._replace(rank=1): spread for key, spread in run.samples.items()}
    metas = (run.meta, replace(run.meta, rank=1))
    text = replace(run, metas=metas, samples={**run.samples, **second}).report("steps")
    alone = run.report("steps").removesuffix("\n\nA doubt.")
    assert text == f"Rank 0\n\n{alone}\n\nRank 1\n\n{alone}\n\nA doubt."


def test_work_of_another_thread_that_goes_on_beyond_the_end_of_a_pass_is_of_two_steps() -> None:
    """The passes of a loop without marks end at 50 and 90; the second operator begins after the first end."""
    events = [step(0), label(NET, 10, 50), op("aten::a", 45, 48, thread=2), op("aten::b", 55, 59, thread=2)]
    events.append(label(NET, 70, 90))
    ends = (50, 90)
    watched = Steps(LAYERS)
    attributed = Attribution(SITES, PATHS).attribute(EventColumns.of(events), ends)
    for _ in watched.observe(with_marks(attributed, ends, None, 1)):
        pass
    other = [spread for key, spread in watched.result()["samples"].items() if key.measure == "step_other_ns"]
    assert [spread.sample for spread in other] == [(3, 4)]
