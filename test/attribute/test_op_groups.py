"""Groups of operators: nothing may depend on whether operators are attributed one by one or in groups."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from build.events import each_event, op
from build.forests import Forest, Paths, sessions
from build.models import Checkpointed, Mlp, Recursive, Several, Tied
from build.raw_events import BACKWARD_FUNCTION, FUNCTION, NODE_PREFIX, USER, Raw, columns_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import DeviceType

import torchprof
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import MEMORY, OPENED, STEP_MARK
from torchprof.attribute.events import PREFIX, Event, Kind, Site
from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.rule import Attribution
from torchprof.measure.flops.estimate import Estimate
from torchprof.measure.fold import fold
from torchprof.measure.lockstep import Locksteps
from torchprof.measure.memory import Allocations
from torchprof.measure.recording import Observations
from torchprof.measure.steps import Steps
from torchprof.measure.timeline import OpenSpans
from torchprof.run.layers import Layer, Layers
from torchprof.run.run import Run
from torchprof.run.words import Signature

SCOPES = {Kind.USER_LABEL: USER, Kind.BACKWARD_FUNCTION: BACKWARD_FUNCTION}
PREFIXES = {Kind.LABEL: PREFIX, Kind.NODE: NODE_PREFIX}


def raws_of(forest: Forest, late: Iterable[int]) -> list[Raw]:
    """The events as torch gives them. ``late``: how much later than recorded each one ends, as if clocks differed."""
    late = iter(late)
    found = []
    for event in forest.events():
        if event.kind not in (Kind.SAMPLE, Kind.KERNEL):
            end = event.end_ns + (next(late, 0) if event.end_ns > event.start_ns else 0)
            scope = SCOPES.get(event.kind, FUNCTION)
            name = PREFIXES.get(event.kind, "") + event.name
            found.append(Raw(name, event.start_ns, end, event.thread, scope, event.sequence, event.forward_thread))
    return found


@contextmanager
def one_by_one() -> Iterator[None]:
    """Attribute each operator by itself."""
    with mock.patch.object(EventColumns, "groupable", lambda columns: bytes(len(columns))):
        yield


def by_thread(event: Event) -> int:
    return event.thread


def result_of(columns: EventColumns, paths: Paths, selected: set[int] | None) -> tuple[Any, ...]:
    """All that is made of some events: rows, samples, time by device and step, memory, spans, who called whom."""
    layers = tuple(Layer(path, "Module") for path in paths)
    sites = {f"{PREFIX}label {number}": Site((number,)) for number in range(len(paths))}
    attribution = Attribution(sites, paths, selected)
    steps, memory, spans = Steps(Layers(layers), 0, True), Allocations(layers, with_timeline=True), OpenSpans(layers)
    flops, lockstep = Estimate([Signature((), ())] * 4), Locksteps(layers, 0, [Signature((), ())] * 4, None)
    stream = attribution.attribute(columns)
    for observer in (flops, memory, steps, spans, lockstep):
        stream = observer.observe(stream)
    rows, samples, busy = fold(
        stream, attribution.places.all, layers, counts=flops.counts, group_counts=flops.group_counts
    )
    values = {
        (row.layer, row.selected, row.phase, row.within, row.frames, row.device): (row.calls, row.cost) for row in rows
    }
    assert len(values) == len(rows)
    observed = steps.result(), memory.result(), spans.result(), lockstep.result()
    each = [*each_event(Attribution(sites, paths, selected).attribute(columns))]
    events = [item.event for item in each]
    assert [event.start_ns for event in events] == sorted(event.start_ns for event in events)
    assert sorted(events, key=by_thread) == sorted(columns.events(), key=by_thread)
    made = [(item.place.layer, item.place.phase, item.place.frames, item.calls, item.ns) for item in each]
    outer = [item.outer and item.outer.event for item in each]
    return values, samples, busy, observed, attribution.callers, attribution.labels, made, outer


@given(sessions(), st.data())
def test_random_sessions_have_the_same_result(session: tuple[Paths, Forest], data: st.DataObject) -> None:
    paths, forest = session
    late = data.draw(st.lists(st.integers(0, 3), max_size=12))
    selected = data.draw(st.none() | st.sets(st.integers(0, len(paths) - 1)))
    raws = [Raw(STEP_MARK, 0, 1), *raws_of(forest, late)]
    end = max(raw._end for raw in raws)
    raws.append(Raw(STEP_MARK, end + 1, end + 2))
    columns = columns_of(raws, None)
    found = result_of(columns, paths, selected)
    with one_by_one():
        assert result_of(columns, paths, selected) == found


def groups_of(raws: list[Raw], device: str | None = None) -> list[list[str] | str]:
    """The names of the events in each group, and those of the others."""
    columns = columns_of(raws, device)
    attribution = Attribution({"torchprof:Model": Site((0,))}, [("Model",)])
    return [
        [each.event.name for each in item.items()] if isinstance(item, OpGroup) else item.event.name
        for item in attribution.attribute(columns)
    ]


def test_operators_and_memory_in_one_range_are_a_group() -> None:
    raws = [
        Raw("torchprof:Model", 0, 100),
        Raw("aten::linear", 10, 90, _sequence=3),
        Raw(MEMORY, 15, 15, _nbytes=8),
        Raw("aten::t", 20, 40),
        Raw("aten::transpose", 25, 35),
        Raw("aten::addmm", 50, 80, _sequence=4),
        Raw("aten::relu", 95, 99),
    ]
    names = ["aten::linear", MEMORY, "aten::t", "aten::transpose", "aten::addmm", "aten::relu"]
    assert groups_of(raws) == ["torchprof:Model", names]
    (_, group) = Attribution({"torchprof:Model": Site((0,))}, [("Model",)]).attribute(columns_of(raws, None))
    assert isinstance(group, OpGroup)
    assert group.tree.parents == [-1, 0, 0, 2, 0, -1]
    assert group.ns == [80, 0, 20, 10, 30, 4]
    assert [start for start, _ in group.outermost()] == [10, 95]


@pytest.mark.parametrize(
    "other",
    [
        Raw("torchprof:Model.fc", 30, 31),
        Raw("mine", 30, 31, _scope=USER),
        Raw("c10d::allreduce_", 30, 31),
        Raw("AddBackward", 30, 31, _scope=BACKWARD_FUNCTION, _sequence=3),
        Raw(NODE_PREFIX + "AddBackward", 30, 31),
        Raw("cudaGraphLaunch", 30, 31),
    ],
    ids=lambda raw: raw._name,
)
def test_what_contains_anything_else_is_in_no_group(other: Raw) -> None:
    raws = [Raw("aten::a", 0, 100), Raw("aten::b", 10, 20), other, Raw("aten::c", 40, 50), Raw("aten::d", 42, 44)]
    assert groups_of(raws) == ["aten::a", ["aten::b"], other._name, ["aten::c", "aten::d"]]


def test_a_group_ends_before_another_thread_works() -> None:
    raws = [Raw("aten::a", 0, 100), Raw("aten::b", 10, 20, _thread=2), Raw("aten::c", 30, 40)]
    assert groups_of(raws) == ["aten::a", ["aten::b"], ["aten::c"]]


def test_of_a_session_that_recorded_nothing_no_kernel_is_left() -> None:
    kernel = Raw("mm", 20, 30, 7, _correlation=9, _linked=1, _device=DeviceType.CUDA, _index=0)
    assert not [*columns_of([Raw(OPENED, 0, 1), Raw("aten::mm", 5, 10, _correlation=1), kernel]).events()]


def test_equal_groups_share_what_was_found_once() -> None:
    raws = []
    for start in (0, 100, 200):
        raws += [Raw("mine", start, start + 90, _scope=USER), Raw("aten::a", start + 10, start + 20)]
    found = Attribution({}, []).attribute(columns_of(raws, None))
    assert len({id(item.tree) for item in found if isinstance(item, OpGroup)}) == 1


def test_an_op_directly_inside_one_of_the_same_name_is_the_same_call() -> None:
    raws = [Raw("aten::a", 0, 50), Raw("aten::a", 5, 45), Raw("aten::b", 10, 20), Raw("aten::b", 12, 15)]
    (group,) = Attribution({}, []).attribute(columns_of(raws, None))
    assert isinstance(group, OpGroup)
    assert group.tree.is_call == [1, 0, 1, 0]


class Outside(nn.Module):
    """Its operators are directly in its forward, and in ranges of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("mine"):
            x = x.softmax(-1) + x.to(torch.float64).to(torch.float32)
        return torch.relu(self.fc(x))


def train(model: nn.Module, prof: torchprof.Profile) -> None:
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.rand(3, 4)).square().mean().backward()
        optimizer.step()
        prof.step()


def with_closure(model: nn.Module, prof: torchprof.Profile) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(3, 4)).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(2):
        optimizer.step(closure)
        prof.step()


def comparable(run: Run) -> tuple[Any, ...]:
    rows = Counter({row._replace(layer=None): row.layer.path if row.layer else None for row in run.rows})
    return rows, run.samples, run.meta, [dataclasses.astuple(layer) for layer in run.layers]


@pytest.mark.parametrize("model", [Mlp, Several, Recursive, Tied, partial(Checkpointed, False), Outside])
@pytest.mark.parametrize("work", [train, with_closure])
@pytest.mark.parametrize("is_selected", [False, True])
@pytest.mark.parametrize("has_options", [False, True])
def test_a_real_recording_has_the_same_run(
    model: Callable[[], nn.Module], work: Callable[..., None], is_selected: bool, has_options: bool
) -> None:
    module = model()
    paths = [(type(module).__name__,)] if is_selected else None
    with torchprof.Profile(module, paths=paths, profile_memory=has_options, with_flops=has_options) as prof:
        work(module, prof)
    cycle = prof._cycles.last
    assert cycle is not None
    found = []
    for grouped in (nullcontext(), one_by_one()):
        seen = Observations()
        with grouped:
            run = cycle.read(prof._plan.layers(), seen)
        found.append((*comparable(run), seen))
    assert found[0] == found[1]


def test_events_are_added_to_no_events() -> None:
    columns = EventColumns.of([])
    columns.add(before=[op("aten::mm", 1, 2)], after=[op("aten::add", 3, 4, sequence=7)])
    assert [(event.name, event.sequence) for event in columns.events()] == [("aten::mm", -1), ("aten::add", 7)]
