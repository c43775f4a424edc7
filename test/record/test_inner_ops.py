"""Ops that have no events of their own, but are part of the range around them: nothing may depend on it."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from build.forests import Forest, Paths, sessions
from build.models import Mlp, Recursive, Several, Tied
from build.raw_events import BACKWARD_FUNCTION, FUNCTION, NODE_PREFIX, USER, Raw, events_of
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof.attribute.event_names import MEMORY, RAISED, STEP_MARK
from torchprof.attribute.events import PREFIX, Event, Kind, Site
from torchprof.attribute.inner_ops import OpTree
from torchprof.attribute.rule import Attribution
from torchprof.measure.fold import fold
from torchprof.measure.recording import Observations
from torchprof.measure.steps import Steps
from torchprof.run.layers import Layer, Layers
from torchprof.run.run import Run

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


def result_of(events: list[Event], paths: Paths, selected: set[int] | None) -> tuple[Any, ...]:
    """All that is made of some events: rows, samples, time by device and step, who called whom."""
    layers = tuple(Layer(path, "Module") for path in paths)
    sites = {f"{PREFIX}label {number}": Site((number,)) for number in range(len(paths))}
    attribution = Attribution(sites, paths, selected)
    steps = Steps(Layers(layers), 0, True)
    walk = steps.observe(attribution.attribute(events))
    rows, samples, busy = fold(walk, attribution.places.all, layers)
    values = {
        (row.layer, row.selected, row.phase, row.within, row.frames, row.device): (row.calls, row.cost) for row in rows
    }
    assert len(values) == len(rows)
    return values, samples, busy, steps.result(), attribution.callers, attribution.labels


@given(sessions(), st.data())
def test_random_sessions_have_the_same_result(session: tuple[Paths, Forest], data: st.DataObject) -> None:
    paths, forest = session
    late = data.draw(st.lists(st.integers(0, 3), max_size=12))
    selected = data.draw(st.none() | st.sets(st.integers(0, len(paths) - 1)))
    raws = [Raw(STEP_MARK, 0, 1), *raws_of(forest, late)]
    end = max(raw._end for raw in raws)
    raws.append(Raw(STEP_MARK, end + 1, end + 2))
    each, few = (events_of(raws, None, each_op) for each_op in (True, False))
    assert result_of(few, paths, selected) == result_of(each, paths, selected)
    assert sum(1 if one.inside is None else 1 + len(one.inside.starts) for one in few) == len(each)


def test_the_node_of_an_op_is_known_even_if_it_did_not_run() -> None:
    """A hook raised an error before it: only the range of the engine around it is there."""
    raws = [
        Raw("torchprof:label 0", 0, 100),
        Raw("aten::linear", 10, 90, _sequence=0),
        Raw(NODE_PREFIX + "AddmmBackward0", 200, 210, _sequence=0, _forward_thread=1),
    ]
    each, few = (result_of(events_of(raws, None, each_op), (("Net",),), None) for each_op in (True, False))
    assert few == each
    assert [spot[0].name for spot in few[0] if spot[2] == "backward"] == ["Net"]


def test_a_range_with_ops_only_has_them_inside() -> None:
    raws = [
        Raw("torchprof:Model", 0, 100),
        Raw("aten::linear", 10, 90, _sequence=3),
        Raw("aten::t", 20, 40),
        Raw("aten::transpose", 25, 35),
        Raw("aten::addmm", 50, 80, _sequence=4),
    ]
    (label,) = events_of(raws, None, each_op=False)
    assert label.inside is not None
    tree = label.inside.tree
    assert tree.paths == [(0, ""), (0, "aten::linear"), (1, "aten::t"), (2, "aten::transpose"), (1, "aten::addmm")]
    assert tree.self_ns([80, 20, 10, 30]) == [-80, 80 - 20 - 30, 20 - 10, 10, 30]
    assert not label.inside.sequences  # no autograd node refers to them


@pytest.mark.parametrize(
    "other",
    [
        Raw(MEMORY, 30, 30, _nbytes=8),
        Raw(RAISED, 30, 30),
        Raw("torchprof:Model.fc", 30, 31),
        Raw("mine", 30, 31, _scope=USER),
        Raw("c10d::allreduce_", 30, 31),
        Raw("AddBackward", 30, 31, _scope=BACKWARD_FUNCTION, _sequence=3),
        Raw(NODE_PREFIX + "AddBackward", 30, 31),
        Raw("cudaGraphLaunch", 30, 31),
    ],
    ids=lambda raw: raw._name,
)
def test_a_range_with_anything_else_has_an_event_for_each(other: Raw) -> None:
    raws = [Raw("aten::a", 0, 100), Raw("aten::b", 10, 20), other, Raw("aten::c", 40, 50), Raw("aten::d", 42, 44)]
    found = {event.name: event.inside for event in events_of(raws, None, each_op=False)}
    assert found.pop("aten::a") is None and found.pop("aten::b") is None
    assert "aten::d" not in found and found["aten::c"] is not None


def test_ops_of_another_thread_are_not_inside() -> None:
    raws = [Raw("aten::a", 0, 100), Raw("aten::b", 10, 20, _thread=2), Raw("aten::c", 30, 40)]
    assert [event.inside for event in events_of(raws, None, each_op=False)] == [None] * 3


def test_an_op_directly_inside_one_of_the_same_name_is_the_same_call() -> None:
    tree = OpTree("aten::a", ["aten::a", "aten::b", "aten::b", "aten::a"], [4, 4, 3, 4])
    assert tree.paths == [(0, "aten::a"), (0, "aten::b"), (1, "aten::a")]
    assert tree.path_of == [0, 1, 1, 2] and tree.calls == [1, 1, 1]
    assert tree.self_ns([50, 40, 10, 5]) == [-40, 40 - 5, 5]


class Outside(nn.Module):
    """Its operators are directly in its forward, and in ranges of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("mine"):
            x = x.softmax(-1) + x.to(torch.float64).to(torch.float32)
        return torch.relu(self.fc(x))


class Checkpoints(nn.Module):
    """Calls its layers again in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(self.layers, x, use_reentrant=False)
        return found


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


@pytest.mark.parametrize("model", [Mlp, Several, Recursive, Tied, Checkpoints, Outside])
@pytest.mark.parametrize("work", [train, with_closure])
@pytest.mark.parametrize("is_selected", [False, True])
def test_a_real_recording_has_the_same_run(
    model: type[nn.Module], work: Callable[..., None], is_selected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = model()
    with torchprof.Profile(module, paths=[(model.__name__,)] if is_selected else None) as prof:
        work(module, prof)
    cycle = prof._cycles.last
    assert cycle is not None
    found = []
    for each_op in (True, False):
        monkeypatch.setattr(cycle, "_needs_each_op", lambda each_op=each_op: each_op)
        seen = Observations()
        run = cycle.read(prof._plan.layers(), seen)
        found.append((*comparable(run), seen))
    assert found[0] == found[1]
    inside = [event.inside for event in cycle.session.events(each_op=False)]
    assert sum(len(one.starts) for one in inside if one is not None) > len(inside)
