"""Garbage collections have their own row and are in no layer's time: by hand and in real sessions."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from build.events import MAIN, label, memory, node, op, step, walk_of
from build.exchanges import GROUP, exchange
from build.hand_made import cells, line, names, row, run_of
from build.phases import in_column_of
from build.processes import in_thread
from torch import Tensor, nn

import torchprof
from torchprof import Profile
from torchprof.advise import Advice, advise
from torchprof.attribute.event_names import GARBAGE_COLLECTION_LABEL
from torchprof.attribute.events import Event, Kind, Site
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.steps import Steps
from torchprof.record.ranges import CollectionRanges, mark_collection
from torchprof.run.layers import Layer
from torchprof.run.lockstep import STEP, WORK, LockstepKey
from torchprof.run.measures import SampleKey
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, GARBAGE_COLLECTION, OTHER, OUTSIDE, Frame, FrameKind

pytestmark = pytest.mark.usefixtures("garbage_is_not_collected")  # collections come only where asked
MS = 1_000_000
NET, A = "torchprof:Net", "torchprof:Net.a"
PATHS = [("Net",), ("Net", "a")]
SITES = {NET: Site((0,)), A: Site((1,))}
LAYERS = tuple(Layer(path, "Module") for path in PATHS)
COLLECTOR = Frame(FrameKind.GC, GARBAGE_COLLECTION)
OLDEST = 2


def garbage(start: int, end: int, thread: int = MAIN) -> Event:
    return Event(Kind.INTERRUPTION, GARBAGE_COLLECTION_LABEL, start, end, thread)


EVENTS = [
    step(0),
    label(NET, 100, 1000),
    op("aten::relu", 150, 250),
    label(A, 300, 900),
    op("aten::mm", 400, 800, sequence=5),
    garbage(500, 700),  # inside an op of a layer
    memory(550, -64),
    op("aten::empty", 600, 650),  # of a finalizer
    garbage(920, 960),
    garbage(1100, 1150),  # in no range
    node("MmBackward0", 1200, 1500, 5),
    garbage(1250, 1350),
    step(2000),
]


def folded(*observers: Any) -> Run:
    attribution = Attribution(SITES, PATHS)
    attributed: Iterator[Any] = walk_of(attribution, EVENTS)
    for observer in observers:
        attributed = observer.observe(attributed)
    rows, samples, _ = fold(attributed, attribution.places.all, LAYERS)
    return Run((Meta(("Net",)),), LAYERS, rows, samples)


def own_ns(run: Run, path: tuple[str, ...] | None, phase: str = FORWARD) -> int:
    return sum(
        one.cost.cpu_ns
        for one in run.rows
        if (one.layer.path if one.layer else None) == path and in_column_of(one.phase) == phase
    )


def test_a_collection_belongs_to_no_layer_wherever_it_interrupts() -> None:
    run = folded()
    found = {one.frames[1:]: (one.calls, one.cost.cpu_ns) for one in run.rows if one.frames[:1] == (COLLECTOR,)}
    assert found == {(): (4, 390 - 50), (Frame(FrameKind.OP, "aten::empty"),): (1, 50)}
    assert {(one.layer, one.phase) for one in run.rows if COLLECTOR in one.frames} == {(None, OTHER)}
    [freed] = [one for one in run.rows if one.cost.cpu_freed]
    assert freed.frames == (COLLECTOR,) and freed.cost.cpu_freed == 64
    assert own_ns(run, ("Net", "a")) == 600 - 200
    assert own_ns(run, ("Net",)) == 900 - 600 - 40
    assert own_ns(run, ("Net", "a"), BACKWARD) == 300 - 100
    tree = run.tree(FORWARD)
    assert tree.total.cpu_ns == tree.self.cpu_ns + tree.children[0].total.cpu_ns == 900 - 240


def test_the_duration_of_calls_is_without_collections() -> None:
    """So the sum over the calls of a layer is its total."""
    run = folded()
    for index, layer_total in enumerate((660, 400)):
        assert run.samples[SampleKey(index, FORWARD, 0, "cpu", "cpu_ns")].sum == layer_total


def test_a_step_has_a_part_for_collections() -> None:
    steps = Steps(LAYERS)
    folded(steps)
    of = {
        key.measure: one.sum
        for key, one in steps.result()["samples"].items()
        if key.layer == OUTSIDE and key.device == "cpu"
    }
    assert of["step_gc_ns"] == 390  # with the operator of a finalizer
    assert "step_other_ns" not in of
    assert of["step_gap_ns"] == 2000 - 900 - 50 - 300


def test_a_collection_is_own_work_of_the_rank_while_a_collective_runs() -> None:
    """Python most likely waits for a collective; the garbage collector never does."""
    attribution = Attribution(SITES, PATHS)
    locksteps = Locksteps(LAYERS, 0, (), GROUP)
    events = [step(0), label(NET, 0, 100), exchange("gloo:all_reduce", 10, 90), garbage(20, 50), step(100)]
    for _ in locksteps.observe(walk_of(attribution, events)):
        pass
    found = locksteps.result()["lockstep"]
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", WORK)].ns == (30,)
    assert found[LockstepKey(0, FORWARD, "cpu", WORK)].ns == (20,)
    assert found[LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].ns == (50,)


def test_a_rank_waits_after_a_collection_too() -> None:
    """It requests an exchange, a collection runs, and from its end the rank waits until the exchange ends."""
    attribution = Attribution(SITES, PATHS)
    locksteps = Locksteps(LAYERS, 0, (), GROUP)
    late = 10 * MS  # the thread continues long after the collective has ended
    events = [step(0), label(NET, 0, 3 * late), op("c10d::allreduce_", 10, 20), exchange("gloo:all_reduce", 20, late)]
    events += [garbage(30, 40), op("aten::add", 2 * late, 2 * late + 10), step(3 * late)]
    for _ in locksteps.observe(walk_of(attribution, events)):
        pass
    own = locksteps.result()["lockstep"][LockstepKey(OUTSIDE, FORWARD, "cpu", STEP)].ns[0]
    assert own == 3 * late - 10 - (late - 40)  # the op that requests it is no own work either


def test_a_run_without_times_has_no_row_of_collections() -> None:
    attribution = Attribution(SITES, PATHS)
    rows, _, _ = fold(walk_of(attribution, EVENTS), attribution.places.all, LAYERS, timed=False)
    assert not [one for one in rows if one.frames == (COLLECTOR,) and one.calls]


def test_reports_show_collections_by_name() -> None:
    """It is not part of the time without operators, which would be Python of the program."""
    run = run_of([row(OUTSIDE, COLLECTOR, calls=3, cpu_ns=90), row(0, calls=1, cpu_ns=10)])
    assert line(run.report("tree"), "└── (garbage collection)")["CPU total"] == "0.090us"
    largest, own, *_ = cells(run.report("top"))
    assert [largest[2], largest[-1]] == ["(outside)", "(garbage collection)"] and own[-1] == "(between ops)"
    assert [one[0] for one in cells(run.report("python"))] == ["Net"]
    assert "in `(garbage collection)`" in run.report("headline")
    assert names(run.report("ops"))[:2] == ["(garbage collection)", "(between ops)"]


# Real sessions


class Slow:
    """Garbage that takes 20 ms to collect, and calls an operator meanwhile."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        time.sleep(0.02)
        torch.ones(8)


class Collects(nn.Module):
    def __init__(self, generation: int = OLDEST) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.generation = generation

    def forward(self, x: Tensor) -> Tensor:
        Slow()
        gc.collect(self.generation)
        return self.fc(x)


def collections(run: Run) -> list[tuple[int, int]]:
    return [(one.calls, one.cost.cpu_ns) for one in run.rows if one.frames == (COLLECTOR,)]


@pytest.mark.parametrize("options", [{}, {"with_stack": True, "profile_memory": True, "with_timeline": True}])
def test_a_real_collection_in_a_layer(options: dict[str, Any], tmp_path: Path, reloaded: Any) -> None:
    model = nn.Sequential(Collects())
    mine: list[str] = []
    callback: Callable[[str, dict[str, int]], None] = lambda phase, info: mine.append(phase)  # noqa: E731
    gc.callbacks.append(callback)
    before = list(gc.callbacks)
    try:
        with Profile(model, **options) as prof:
            for _ in range(2):
                model(torch.ones(2, 4)).sum().backward()
                prof.step()
    finally:
        gc.callbacks.remove(callback)
    assert [*gc.callbacks, callback] == before and mine == ["start", "stop"] * 2
    run = prof.run
    [(calls, ns)] = collections(run)
    assert calls == 2 and ns >= 40 * MS
    tree = run.tree(FORWARD)
    assert run.samples[SampleKey(0, FORWARD, 0, "cpu", "cpu_ns")].sum == tree.total.cpu_ns
    whole = sum(run.rows.columns["cpu_ns"])
    assert tree.total.cpu_ns + run.tree(BACKWARD).total.cpu_ns + ns <= whole <= run.meta.wall_ns
    assert "(garbage collection)" in run.report("tree") and "garbage collection" in run.report("steps")
    assert ("(garbage collection)" in run.timeline.spans.names) if run.timeline else not options
    prof.export_chrome_trace(tmp_path / "trace.json")
    assert collections(torchprof.from_trace(tmp_path / "trace.json", model)) == [(calls, ns)]
    assert reloaded(run) == run


def test_a_collection_of_young_objects_belongs_to_the_layer_that_made_them() -> None:
    with Profile(model := Collects(generation=0)) as prof:
        model(torch.ones(2, 4))
    assert collections(prof.run) == []
    assert prof.run.tree(FORWARD).self.cpu_ns >= 20 * MS


def test_a_profiler_of_the_user_records_collections_too() -> None:
    model = Collects()
    with (
        torchprof.annotate(model),
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
    ):
        model(torch.ones(2, 4))
    assert [calls for calls, _ in collections(torchprof.from_profiler(profiler, model))] == [1]
    assert mark_collection not in gc.callbacks


def test_a_collection_on_a_thread_that_is_not_recorded_is_omitted() -> None:
    with Profile(model := nn.Linear(4, 4)) as prof:
        in_thread(gc.collect)
        model(torch.ones(2, 4))
    assert collections(prof.run) == []


def test_a_finalizer_can_end_or_begin_a_recording() -> None:
    """The collection that runs then has no end, or no start, in the recording."""
    model = nn.Linear(4, 4)

    def collected(*calls: Callable[[], object]) -> None:
        class Calls:
            def __init__(self) -> None:
                self.itself = self

            def __del__(self) -> None:
                for call in calls:
                    call()

        Calls()
        gc.collect()

    first, second = Profile(model), Profile(model)
    first.start()
    model(torch.ones(2, 4))
    collected(first.stop)
    collected(second.start)
    model(torch.ones(2, 4))
    second.stop()
    assert [sum(one.calls for one in prof.run.rows if not one.frames) for prof in (first, second)] == [1, 1]
    assert mark_collection not in gc.callbacks and not CollectionRanges._open


def test_collections_are_not_marked_after_the_last_profile() -> None:
    outer, inner = CollectionRanges(), CollectionRanges()
    outer.on()
    inner.on()
    outer.on()  # a second call changes nothing
    assert gc.callbacks.count(mark_collection) == 1
    outer.off()
    assert gc.callbacks.count(mark_collection) == 1
    gc.callbacks.remove(mark_collection)  # another callback called it
    inner.off()
    inner.off()
    assert mark_collection not in gc.callbacks


# Findings of the advice


def collecting(ns: int, **meta: Any) -> list[Advice]:
    run = run_of([row(OUTSIDE, COLLECTOR, calls=3, cpu_ns=ns)], **{"wall_ns": 100 * MS, **meta})
    return [one for one in advise(run) if one.rule == "garbage_collection"]


def test_findings_about_collections() -> None:
    [advice] = collecting(12 * MS)
    assert (advice.layer, advice.gain_ns) == ("(outside)", 12 * MS)
    assert "3 times, for 12.000ms in total" in advice.finding and "gc.freeze()" in advice.remedy
    assert collecting(MS - 1) == collecting(0) == []


def test_no_finding_if_the_device_is_busy_during_collections() -> None:
    measures = ("cpu_ns", "device_ns")
    cuda: dict[str, Any] = {"device": "cuda", "requested": measures, "measured": measures}
    [advice] = collecting(12 * MS, busy_ns=(("cuda:0", 95 * MS),), **cuda)
    assert advice.gain_ns == 5 * MS
