"""Real runs against an independent truth: torch's own figures, bytes counted by hand, and cases with a known answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import pytest
import torch
import torch._dynamo
from build.calls import calls_of
from build.events import walk_of
from build.libraries import usable_transformers
from build.models import (
    Checkpointed,
    Deep,
    DoublesInside,
    Functional,
    Layers,
    Mlp,
    PackedLstm,
    Raises,
    Recursive,
    Several,
    Tied,
    Work,
    WritesToViews,
    profiled,
    trained,
)
from build.phases import in_column_of
from build.processes import in_thread
from build.torchs_list import torchs_list
from build.warnings import sentences
from torch import nn
from torch._dynamo.utils import counters

import torchprof
from torchprof import Profile
from torchprof.attribute.events import PREFIX
from torchprof.measure.assemble import attribution_of
from torchprof.run.measures import Cost, SampleKey
from torchprof.run.operators import Op
from torchprof.run.words import (
    AUTOGRAD_ENGINE,
    BACKWARD,
    BETWEEN_OPS,
    FORWARD,
    NOT_SELECTED_NAME,
    OUTSIDE_NAME,
    PHASES,
    RECOMPUTE,
    Frame,
    FrameKind,
)

pytestmark = pytest.mark.usefixtures("garbage_is_not_collected")
NODE_PREFIX = "autograd::engine::evaluate_function: "
MARKS = tuple(PREFIX + mark for mark in ("!opened", "!step", "!started", "!ended"))
ACCUMULATE = "torch::autograd::AccumulateGrad"

Ops = dict[str, dict[str, int]]


def ops_of(prof: Profile, phase: str) -> Ops:
    """Calls of each op under each layer, by names; what belongs to no layer under the name that the table gives it.

    An op inside a label counts with those of its name that are in none.
    """
    found: Ops = {}
    for path, ops in prof.run.ops(phase).items():
        calls = found[".".join(path)] = {}
        for op in with_inside(ops):
            if op.name != BETWEEN_OPS:
                calls[op.name] = calls.get(op.name, 0) + op.calls
    return found


def with_inside(ops: list[Op]) -> Iterator[Op]:
    """The operators and labels, and those inside the labels."""
    for op in ops:
        yield op
        yield from with_inside(op.inside)


def nodes_of(prof: Profile) -> Ops:
    """Calls of each autograd node under each layer, without the engine's ranges and the ops inside."""
    found = {}
    for layer, ops in ops_of(prof, BACKWARD).items():
        nodes = {name.removeprefix(NODE_PREFIX): n for name, n in ops.items() if name.startswith(NODE_PREFIX)}
        if nodes:
            found[layer] = nodes
    return found


def makers_of(prof: Profile, node: str) -> dict[str, int]:
    """Which layers own an autograd node of that name, and how often it ran for each."""
    return {layer: nodes[node] for layer, nodes in nodes_of(prof).items() if node in nodes}


def owners_of(prof: Profile, op: str, phase: str = FORWARD) -> dict[str, int]:
    """Which layers own an op of that name, and how often it ran for each."""
    return {layer: ops[op] for layer, ops in ops_of(prof, phase).items() if op in ops}


def cost_of(prof: Profile, layer: str, phase: str) -> Cost:
    """The self cost of a layer, by name."""
    run = prof.run
    trees = [run.tree(phase, root) for root in range(len(run.roots))]
    return next(node.self for tree in trees for node in tree.walk() if node.layer.name == layer)


def everything(prof: Profile) -> Cost:
    """All rows added up."""
    return sum((row.cost for row in prof.run.rows), Cost())


def no_layer(prof: Profile, phase: str) -> dict[str, Cost]:
    """What belongs to no layer in a phase, by the name that the table gives it."""
    costs = {OUTSIDE_NAME: Cost(), NOT_SELECTED_NAME: Cost()}
    for row in prof.run.rows:
        if row.layer is None and in_column_of(row.phase) == phase:
            name = OUTSIDE_NAME if row.selected else NOT_SELECTED_NAME
            costs[name] = costs[name] + row.cost
    return costs


def raw_events(prof: Profile) -> Any:
    """The events as the profiler recorded them."""
    return prof._session._profiler.kineto_results.events()


def check_sums(prof: Profile) -> None:
    """Σ self over our rows = the recorded time; without the time in which nothing ran, that of torch's list, to the ns;
    the same for memory; totals obey law 2."""
    truth = torchs_list(prof)
    marks = [event for event in truth if event.name.startswith(MARKS) and event.cpu_parent is None]
    theirs = sum(event.self_cpu_time_total for event in truth) - sum(mark.cpu_time_total for mark in marks)
    whole = everything(prof)
    assert whole.cpu_ns == prof.run.meta.wall_ns
    idle = sum(row.cost.cpu_ns for row in prof.run.rows if row.layer is None and row.selected and not row.frames)
    assert (whole.cpu_ns - idle) / 1000 == pytest.approx(theirs, abs=0.0005)
    changes = [event.nbytes() for event in raw_events(prof) if event.name() == "[memory]"]
    assert whole.cpu_allocated == sum(nbytes for nbytes in changes if nbytes > 0)
    assert whole.cpu_freed == -sum(nbytes for nbytes in changes if nbytes < 0)
    for phase in PHASES:
        tops = [prof.run.tree(phase, root).total for root in range(len(prof.run.roots))]
        tops += no_layer(prof, phase).values()
        whole = Cost()
        for top in tops:
            whole = whole + top
        rows = sum((row.cost for row in prof.run.rows if in_column_of(row.phase) == phase), Cost())
        assert whole == rows


# Sums against torch's own list

SCENES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    "a training step": (Mlp, lambda model: model(torch.rand(3, 4)).sum().backward()),
    "several calls": (Several, lambda model: model(torch.rand(3, 4)).sum().backward()),
    "a recursive module": (Recursive, lambda model: model(torch.rand(3, 4)).sum().backward()),
    "reentrant checkpoints": (lambda: Checkpointed(True), lambda model: model(torch.rand(3, 4)).sum().backward()),
    "other checkpoints": (lambda: Checkpointed(False), lambda model: model(torch.rand(3, 4)).sum().backward()),
    "writes to views": (WritesToViews, lambda model: model(torch.rand(3, 4)).sum().backward()),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        lambda model: model(torch.rand(2, 3, 10, 10)).sum().backward(),
    ),
    "a packed lstm": (PackedLstm, lambda model: model(torch.rand(2, 5, 3), torch.tensor([5, 3])).sum().backward()),
}


@pytest.mark.parametrize("scene", SCENES)
def test_the_ops_of_a_layer_agree_with_torchs_list_of_its_calls(scene: str) -> None:
    """Self time and calls of each op under each leaf, against the averages over the lists that ``raw()`` gives."""
    prof = recorded(scene)
    raw = prof.raw()
    assert raw is not None
    traces, lists = raw
    phases = [prof.run.ops(FORWARD), prof.run.ops(RECOMPUTE)]
    checked = 0
    for trace in traces:
        if not trace.leaf or not lists[trace.path]:
            continue
        theirs: dict[str, tuple[float, int]] = {}
        for events in lists[trace.path]:
            for event in events.key_averages():
                if event.key != "[memory]":
                    time, count = theirs.get(event.key, (0.0, 0))
                    theirs[event.key] = time + event.self_cpu_time_total, count + event.count
        unfinished = (
            sum(node.calls for node in prof.run.tree(RECOMPUTE).walk() if node.layer.path == trace.path)
            + sum(node.calls for node in prof.run.tree(FORWARD).walk() if node.layer.path == trace.path)
            - len(lists[trace.path])
        )
        if unfinished:
            continue  # a recomputation that stopped early: its events are in our rows only
        ours: dict[str, tuple[float, int]] = {}
        for ops in phases:
            for op in ops.get(trace.path, []):
                if op.name != BETWEEN_OPS:
                    time, count = ours.get(op.name, (0.0, 0))
                    ours[op.name] = time + op.self.cpu_ns / 1000, count + op.calls
        assert set(ours) == set(theirs)
        for name, (time, count) in theirs.items():
            assert ours[name][0] == pytest.approx(time, abs=0.0005)
            assert ours[name][1] == count
            checked += 1
    assert checked


def test_durations_of_calls_are_those_of_their_ranges() -> None:
    """The sampled durations are the ranges', and a total is the time of a layer's ranges, to the ns."""
    model = nn.Sequential(Mlp(), nn.Sequential(Functional(), nn.ReLU()), Mlp())
    model[2].fc1 = nn.Linear(4, 8)
    model[0].fc2 = nn.Linear(8, 4)
    with Profile(model) as prof:
        for _ in range(3):
            model(torch.rand(2, 4))
    ranges: dict[str, list[int]] = {}
    for event in raw_events(prof):
        if event.name().startswith(PREFIX):
            ranges.setdefault(event.name().removeprefix(PREFIX), []).append(event.duration_ns())
    totals = {node.layer.name: node.total.cpu_ns for node in prof.run.tree(FORWARD).walk()}
    for number, layer in enumerate(prof.run.layers):
        spread = prof.run.samples[SampleKey(number, FORWARD, 0, "cpu", "cpu_ns")]
        assert list(spread.sample) == sorted(ranges[layer.name])
        assert spread.first == ranges[layer.name][0]
        assert (spread.count, spread.sum) == (3, sum(ranges[layer.name]))
        assert totals[layer.name] == spread.sum


# Totals of ops and labels against torch's own list


def outermost_in(prof: Profile) -> dict[str, tuple[int, float]]:
    """By name: the calls that torch counts, and how long those lasted that are in no other of their name, in µs."""
    found: dict[str, tuple[int, float]] = {}
    for event in torchs_list(prof):
        if event.name == "[memory]" or event.name.startswith(PREFIX):
            continue
        calls, time = found.get(event.name, (0, 0.0))
        around = event.cpu_parent
        while around is not None and around.name != event.name:
            around = around.cpu_parent
        found[event.name] = calls + 1, time + (event.cpu_time_total if around is None else 0)
    return found


def whole_run(prof: Profile) -> dict[str, tuple[int, float]]:
    """The same from the rows of our run: all that is in ops and labels of a name, whatever layer that counts for."""
    found: dict[str, tuple[int, float]] = {}
    for row in prof.run.rows:
        if row.frames and row.frames[-1].kind in ("op", "label"):
            name = row.frames[-1].name
            calls, time = found.get(name, (0, 0.0))
            found[name] = calls + row.calls, time
        frames = [frame for around in row.within for frame in around.frames] + list(row.frames)
        for name in {frame.name for frame in frames if frame.kind in ("op", "label")}:
            calls, time = found.get(name, (0, 0.0))
            found[name] = calls, time + row.cost.cpu_ns / 1000
    found.pop(AUTOGRAD_ENGINE, None)  # torch has no such event: see test_engine_calls
    return found


def check_totals(prof: Profile) -> None:
    """Calls and totals of every op and label over the whole run are torch's, to the ns."""
    ours, theirs = whole_run(prof), outermost_in(prof)
    assert set(ours) == set(theirs)
    for name, (calls, time) in theirs.items():
        assert ours[name] == (calls, pytest.approx(time, abs=0.0005)), name


def averages_of(prof: Profile) -> dict[str, tuple[int, float]]:
    """Calls and total time in µs of each row of torch's own averages."""
    return {event.key: (event.count, event.cpu_time_total) for event in prof.key_averages()}


def ops_under(prof: Profile, layer: str, phase: str = FORWARD) -> list[Op]:
    """The ops and labels directly in a layer, by the name that the table gives it."""
    return prof.run.ops(phase).get(tuple(layer.split(".")), [])


def labels_under(prof: Profile, layer: str, phase: str = FORWARD) -> dict[str, Op]:
    return {op.name: op for op in ops_under(prof, layer, phase) if op.kind == "label"}


def figures(op: Op) -> tuple[int, Any]:
    """Calls and total time in µs, to be held against torch's."""
    return op.calls, pytest.approx(op.total.cpu_ns / 1000, abs=0.0005)


class Tutorial(Layers):
    """The model of torch's profiler tutorial: a label around the call of a child, and one around a mask."""

    def __init__(self) -> None:
        super().__init__(linear=nn.Linear(50, 5))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.profiler.record_function("LABEL1: linear pass"):
            out = self.linear(x)
        with torch.profiler.record_function("LABEL2: masked indices"):
            threshold = out.sum(dim=1).mean().item()
            indices = (mask > threshold).nonzero()
        return out, indices


LABELLED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Any]]] = {
    **SCENES,
    "the tutorial": (Tutorial, lambda model: model(torch.rand(8, 50), torch.rand(9, 9))[0].sum().backward()),
    "a custom function": (DoublesInside, lambda model: model(torch.rand(3, requires_grad=True)).sum().backward()),
    "a backward in a label": (Mlp, lambda model: labelled_backward(model(torch.rand(3, 4)).sum())),
    "a recursive module in labels": (Recursive, lambda model: [labelled(model, torch.rand(2, 4), 3) for _ in range(2)]),
}


def labelled_backward(loss: torch.Tensor) -> None:
    with torch.profiler.record_function("backward pass"):
        loss.backward()


def labelled(model: nn.Module, *inputs: Any) -> Any:
    with torch.profiler.record_function("forward pass"):
        return model(*inputs)


@cache
def recorded(scene: str, with_paths: bool = False) -> Profile:
    """The profile of a scene, once for all tests; ``with_paths``: with one layer selected."""
    make, work = LABELLED[scene]
    model = make()
    child = next((name for name, _ in model.named_children()), type(model).__name__)
    with Profile(model, profile_memory=True, paths=[child] if with_paths else None) as prof:
        work(model)
    return prof


@pytest.mark.parametrize("scene", LABELLED)
@pytest.mark.parametrize("with_paths", [False, True], ids=["all layers", "one layer"])
def test_rows_and_totals_of_ops_agree_with_torchs_list(scene: str, with_paths: bool) -> None:
    """Σ self CPU and Σ memory, to the ns and the byte; totals of ops that call layers (checkpoints), of labels around
    layers, and of ops of which one is in another of its name. With one layer selected, the rest is not lost."""
    prof = recorded(scene, with_paths)
    check_sums(prof)
    check_totals(prof)
    if with_paths and scene in SCENES:
        assert no_layer(prof, FORWARD)[NOT_SELECTED_NAME].cpu_ns > 0
        assert not cost_of(prof, prof.run.layers[0].name, FORWARD), "the root was not selected"


def test_a_label_around_a_layer_holds_what_ran_in_it() -> None:
    """Both labels of the tutorial have the totals of torch's own rows, the linear layer has its own row beside."""
    model = Tutorial()
    with Profile(model) as prof:
        for _ in range(3):
            model(torch.rand(8, 50), torch.rand(9, 9))
    theirs = averages_of(prof)
    labels = labels_under(prof, "Tutorial")
    assert list(labels) == ["LABEL1: linear pass", "LABEL2: masked indices"]
    for name, label in labels.items():
        assert figures(label) == theirs[name]
    first, second = labels.values()
    linear = prof.run.tree().children[0]
    assert first.total.cpu_ns == first.self.cpu_ns + linear.total.cpu_ns
    assert first.inside == []
    assert {op.name for op in second.inside} >= {"aten::sum", "aten::mean", "aten::item", "aten::gt", "aten::nonzero"}
    assert owners_of(prof, "aten::linear") == {"Tutorial.linear": 3}


def test_labels_in_labels_are_nested() -> None:
    """Each under the one it is in; one of the same name inside itself is not counted twice."""

    class Nests(Layers):
        """An outer label around an inner one, which is around a layer, and the outer one once more inside."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("outer"):
                x = x.sin()
                with torch.profiler.record_function("inner"):
                    x = self.fc(x).relu()
                    with torch.profiler.record_function("outer"):
                        return x.tanh()

    model = Nests(fc=nn.Linear(4, 4))
    with Profile(model) as prof:
        model(torch.rand(2, 4))
        model(torch.rand(2, 4))
    (outer,) = labels_under(prof, "Nests").values()
    theirs = outermost_in(prof)
    assert (outer.name, outer.calls) == ("outer", 2)
    assert figures(outer)[1] == theirs["outer"][1]
    (inner,) = (op for op in outer.inside if op.kind == "label")
    assert figures(inner) == theirs["inner"]
    assert [op.name for op in outer.inside if op.kind == "op"] == ["aten::sin"]
    again = next(op for op in inner.inside if op.kind == "label")
    assert (again.name, again.calls, [op.name for op in again.inside]) == ("outer", 2, ["aten::tanh"])
    assert theirs["outer"][0] == outer.calls + again.calls
    check_totals(prof)


def test_a_label_inside_an_op() -> None:
    """In the forward and in the backward of a Function of the user's: the label is in the op, and in its total."""

    class Cubes(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            with torch.profiler.record_function("cubing"):
                return x * x * x

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("deriving"):
                (x,) = ctx.saved_tensors
                return 3 * x * x * grad

    class Uses(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Cubes.apply(x)

    prof = trained(Uses(), torch.rand(5, requires_grad=True))
    theirs = averages_of(prof)
    for phase, function, label, products in (
        (FORWARD, "Cubes", "cubing", 2),
        (BACKWARD, "CubesBackward", "deriving", 3),
    ):
        ops = {op.name: op for op in ops_under(prof, "Uses", phase)}
        assert figures(ops[label]) == theirs[label]
        assert figures(ops[function]) == theirs[function]
        assert [(op.name, op.calls) for op in ops[label].inside if op.name == "aten::mul"] == [("aten::mul", products)]
        assert "aten::mul" not in ops, "the products are in the label"
    check_totals(prof)


def test_a_label_around_backward() -> None:
    """It is outside of all layers, in the phase forward, and holds all nodes, which belong to their layers."""
    model = Mlp()
    with Profile(model) as prof:
        labelled_backward(model(torch.rand(3, 4)).sum())
    (label,) = labels_under(prof, OUTSIDE_NAME).values()
    (in_backward,) = labels_under(prof, OUTSIDE_NAME, BACKWARD).values()
    calls, theirs = averages_of(prof)["backward pass"]
    both = label.total.cpu_ns + in_backward.total.cpu_ns
    assert (label.calls, both / 1000) == (calls, pytest.approx(theirs, abs=0.0005))
    nodes = prof.run.tree(BACKWARD).total.cpu_ns + prof.run.no_layer(BACKWARD).cpu_ns
    assert (in_backward.total.cpu_ns, in_backward.self.cpu_ns, in_backward.calls) == (nodes, 0, 0)
    assert label.total.cpu_ns == label.self.cpu_ns + sum(op.self.cpu_ns for op in label.inside)
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 1, "Mlp.fc2": 1}


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class NamedAsItsFunction(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.profiler.record_function("Doubled"):
            return Doubled.apply(x)


def test_a_label_named_as_the_op_inside() -> None:
    """One is a range of the user's, the other an op that made an autograd node: it knows which layer backward is of."""
    model = nn.Sequential(nn.Linear(4, 4), NamedAsItsFunction(), nn.Linear(4, 4))
    with Profile(model) as prof:
        for _ in range(2):
            model(torch.rand(3, 4)).sum().backward()
    (label,) = labels_under(prof, "Sequential.1").values()
    assert (label.name, label.calls) == ("Doubled", 2)
    assert [(op.name, op.calls) for op in label.inside][:1] == [("Doubled", 2)]
    assert makers_of(prof, "DoubledBackward") == {"Sequential.1": 2}


def test_the_node_of_a_reentrant_checkpoint_holds_what_it_recomputes() -> None:
    """Its total is torch's: the forward that runs again and the backward of that, though they have layers' own rows."""
    model = Checkpointed(True)
    with Profile(model) as prof:
        for _ in range(2):
            model(torch.rand(3, 4)).sum().backward()
    theirs = averages_of(prof)
    names = [f"{NODE_PREFIX}CheckpointFunctionBackward", "CheckpointFunctionBackward"]
    ops = {op.name: op for op in ops_under(prof, "Checkpointed", BACKWARD)}
    for name in names:
        assert figures(ops[name]) == theirs[name]
    block = next(node for node in prof.run.tree(RECOMPUTE).walk() if node.layer.path[-1] == "block")
    inside = block.total.cpu_ns + next(
        node.total.cpu_ns for node in prof.run.tree(BACKWARD).walk() if node.layer.path[-1] == "block"
    )
    assert inside > 0
    assert ops[names[1]].total.cpu_ns >= ops[names[1]].self.cpu_ns + inside
    (forward,) = (op for op in ops_under(prof, "Checkpointed") if op.name == "CheckpointFunction")
    assert figures(forward) == theirs["CheckpointFunction"]
    check_totals(prof)


def test_the_labels_of_the_optimizer_and_of_the_data_loader() -> None:
    """torch puts them there itself: outside of all layers, with torch's own figures and what ran in them inside."""
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    with Profile(model) as prof:
        for x in torch.utils.data.DataLoader(torch.rand(6, 4), batch_size=3):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    loading = "enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__"
    labels = labels_under(prof, OUTSIDE_NAME)
    assert list(labels) == [loading, "Optimizer.zero_grad#SGD.zero_grad", "Optimizer.step#SGD.step"]
    theirs = averages_of(prof)
    for name, label in labels.items():
        assert figures(label) == theirs[name]
    assert [labels[name].calls for name in labels] == [3, 2, 2], "the loader is asked once more than it gives"
    assert {op.name for op in labels[loading].inside} >= {"aten::stack"}
    assert "aten::add_" in {op.name for op in labels["Optimizer.step#SGD.step"].inside}
    assert owners_of(prof, "aten::add_")[OUTSIDE_NAME] >= 8
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 2, "Mlp.fc2": 2}
    check_totals(prof)


def test_one_label_inside_a_layer_and_outside_of_it() -> None:
    """Under each place it has a row of its own: what the layer opened, and what the user put around the layer."""

    class Opens(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.profiler.record_function("work"):
                return x + 1

    model = Opens()
    with Profile(model) as prof, torch.profiler.record_function("work"):
        model(torch.rand(3))
    outer, inner = labels_under(prof, OUTSIDE_NAME)["work"], labels_under(prof, "Opens")["work"]
    assert (outer.calls, inner.calls) == (1, 1)
    assert outer.total.cpu_ns > prof.run.tree().total.cpu_ns > inner.total.cpu_ns
    assert figures(outer)[1] == outermost_in(prof)["work"][1]
    check_totals(prof)


# Memory, counted by hand


def memory_of(prof: Profile, phase: str = FORWARD) -> dict[str, tuple[int, int]]:
    """Self and total CPU memory of each layer, net."""
    return {
        node.layer.name: (
            node.self.cpu_allocated - node.self.cpu_freed,
            node.total.cpu_allocated - node.total.cpu_freed,
        )
        for node in prof.run.tree(phase).walk()
    }


@pytest.mark.parametrize(
    ("model", "inputs", "outputs"),
    [
        (
            nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8, bias=False)),
            (4, 16),
            ((4, 32), (4, 32), (4, 8)),
        ),
        (
            nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3, stride=2), nn.AvgPool2d(2)),
            (2, 3, 20, 20),
            ((2, 8, 18, 18), (2, 4, 8, 8), (2, 4, 4, 4)),
        ),
    ],
    ids=["linear", "convolutions"],
)
def test_memory_of_layers_without_grad(model: nn.Module, inputs: Any, outputs: Any) -> None:
    """Each layer allocates its output, and frees what it needs meanwhile; the container frees each when the next one
    has been made."""
    x = torch.rand(inputs)
    with torch.no_grad(), Profile(model, profile_memory=True) as prof:
        y = model(x)
    first, second, third = (4 * math.prod(shape) for shape in outputs)
    assert memory_of(prof) == {
        "Sequential": (-first - second, third),
        "Sequential.0": (first, first),
        "Sequential.1": (second, second),
        "Sequential.2": (third, third),
    }
    assert y.shape == outputs[-1]


def test_memory_of_a_forward_that_keeps_its_activations() -> None:
    """With grad, the output of ReLU is kept for backward; what went into it dies in the net, when ReLU is done."""
    model = Mlp()
    with Profile(model, profile_memory=True) as prof:
        y = model(torch.rand(4, 4))
    hidden, out = 4 * 8 * 4, 4 * 2 * 4
    assert memory_of(prof) == {
        "Mlp": (-hidden, hidden + out),
        "Mlp.fc1": (hidden, hidden),
        "Mlp.act": (hidden, hidden),
        "Mlp.fc2": (out, out),
    }
    assert y.shape == (4, 2)


def test_memory_of_backward_is_the_gradients() -> None:
    """After backward the layers hold the gradients of their parameters, and have let their activations go."""
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 8))
    x, grad = torch.rand(4, 16), torch.ones(4, 8)
    with Profile(model, profile_memory=True) as prof:
        y = model(x)
        y.backward(grad)
    gradients = sum(parameter.numel() * 4 for parameter in model.parameters())
    hidden, out = 4 * 32 * 4, 4 * 8 * 4
    forward, backward = memory_of(prof), memory_of(prof, BACKWARD)
    assert forward["Sequential"] == (-hidden, hidden + out), "the output of Tanh is kept, that of the first layer not"
    assert backward["Sequential"] == (0, gradients - hidden)
    whole = everything(prof)
    assert whole.cpu_allocated - whole.cpu_freed == gradients + out
    assert y.shape == (4, 8)


# Calls and owners in scenes whose answer is known


def test_a_training_step() -> None:
    """Each node at the layer that made it, the loss outside, the gradients with the node before them."""
    prof = trained(Mlp())
    assert calls_of(prof) == {"Mlp": 1, "Mlp.fc1": 1, "Mlp.act": 1, "Mlp.fc2": 1}
    assert nodes_of(prof) == {
        "Mlp.fc1": {"AddmmBackward0": 1, "TBackward0": 1, ACCUMULATE: 2},
        "Mlp.act": {"ReluBackward0": 1},
        "Mlp.fc2": {"AddmmBackward0": 1, "TBackward0": 1, ACCUMULATE: 2},
        OUTSIDE_NAME: {"SumBackward0": 1},
    }
    assert owners_of(prof, "aten::linear") == {"Mlp.fc1": 1, "Mlp.fc2": 1}
    assert owners_of(prof, "aten::sum") == {OUTSIDE_NAME: 1}
    assert prof.run.phases() == (FORWARD, BACKWARD)
    assert not cost_of(prof, "Mlp", BACKWARD)


def test_convolutions_and_norms() -> None:
    """Convolution and batch norm own their backward."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
    with Profile(model) as prof:
        model(torch.rand(2, 3, 8, 8)).mean().backward()
    assert makers_of(prof, "ConvolutionBackward0") == {"Sequential.0": 1, "Sequential.2": 1}
    assert makers_of(prof, "NativeBatchNormBackward0") == {"Sequential.1": 1}
    assert makers_of(prof, ACCUMULATE) == {"Sequential.0": 2, "Sequential.1": 2, "Sequential.2": 2}
    assert makers_of(prof, "MeanBackward0") == {OUTSIDE_NAME: 1}


def test_a_module_called_several_times() -> None:
    """Three calls, three nodes, the gradients accumulated once."""
    prof = trained(Several())
    assert calls_of(prof) == {"Several": 1, "Several.shared": 3, "Several.once": 1}
    assert makers_of(prof, "AddmmBackward0") == {"Several.shared": 3, "Several.once": 1}
    assert makers_of(prof, ACCUMULATE) == {"Several.shared": 2, "Several.once": 2}


def test_a_recursive_module() -> None:
    """Four calls of which three are nested; the total is the outermost range's."""
    prof = trained(Recursive())
    assert calls_of(prof) == {"Recursive": 4, "Recursive.fc": 4}
    assert makers_of(prof, "AddmmBackward0") == {"Recursive.fc": 4}
    outermost = max(e.duration_ns() for e in raw_events(prof) if e.name() == PREFIX + "Recursive")
    assert prof.run.tree(FORWARD).total.cpu_ns == outermost


def test_one_module_at_two_paths() -> None:
    """Its calls are distinguished by the parent that made them; its parameters count once."""
    prof = trained(Tied())
    assert calls_of(prof) == {"Tied": 1, "Tied.left": 1, "Tied.left.inner": 1, "Tied.right": 2, "Tied.right.inner": 2}
    assert owners_of(prof, "aten::linear") == {"Tied.left.inner": 1, "Tied.right.inner": 2}
    assert sum(layer.params for layer in prof.run.layers) == 4 * 4 + 4
    raw = prof.raw()
    assert raw is not None
    assert {path: len(lists) for path, lists in raw[1].items()} == {
        ("Tied", "left", "inner"): 1,
        ("Tied", "right", "inner"): 2,
    }
    assert makers_of(prof, "AddmmBackward0") == {"Tied.left.inner": 1, "Tied.right.inner": 2}


def interleaved(one: Mlp, other: Mlp) -> None:
    """The layers of two models take turns, forward and backward."""
    x = torch.rand(3, 4)
    a, b = one.fc1(x), other.fc1(x)
    a, b = one.act(a), other.act(b)
    (one.fc2(a) + other.fc2(b) + one(x)).sum().backward()


def test_two_models_interleaved() -> None:
    """Each layer of each model has its own work; the second model of a class has a number."""
    one, other = Mlp(), Mlp()
    with Profile([one, other]) as prof:
        interleaved(one, other)
    assert calls_of(prof) == {
        "Mlp": 1,
        "Mlp.fc1": 2,
        "Mlp.act": 2,
        "Mlp.fc2": 2,
        "Mlp#2": 0,
        "Mlp#2.fc1": 1,
        "Mlp#2.act": 1,
        "Mlp#2.fc2": 1,
    }
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 2, "Mlp.fc2": 2, "Mlp#2.fc1": 1, "Mlp#2.fc2": 1}
    assert makers_of(prof, "AddBackward0") == {OUTSIDE_NAME: 2}
    check_sums(prof)


def test_only_one_of_two_models_of_a_class() -> None:
    """The other model's work is outside, forward and backward, though it shares every class."""
    one, other = Mlp(), Mlp()
    with Profile(one) as prof:
        interleaved(one, other)
    assert calls_of(prof) == {"Mlp": 1, "Mlp.fc1": 2, "Mlp.act": 2, "Mlp.fc2": 2}
    assert owners_of(prof, "aten::linear") == {"Mlp.fc1": 2, "Mlp.fc2": 2, OUTSIDE_NAME: 2}
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 2, "Mlp.fc2": 2, OUTSIDE_NAME: 2}


def test_functional_ops_belong_to_the_container() -> None:
    """Between its children a container has work of its own, and its backward."""
    model = Functional()
    x = torch.rand(3, 4, requires_grad=True)
    prof = trained(model, x)
    assert owners_of(prof, "aten::softmax") == {"Functional": 1}
    assert owners_of(prof, "aten::tanh") == {"Functional": 1}
    assert owners_of(prof, "aten::linear") == {"Functional.fc": 1}
    assert makers_of(prof, "SoftmaxBackward0") == {"Functional": 1}
    assert makers_of(prof, "TanhBackward0") == {"Functional": 1}
    assert makers_of(prof, "AddmmBackward0") == {"Functional.fc": 1}


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoints(use_reentrant: bool) -> None:
    """The block runs once forward and once again in backward; that is recompute, and no call."""
    prof = trained(Checkpointed(use_reentrant), profile_memory=True)
    names = ["Checkpointed", "Checkpointed.first", "Checkpointed.block", "Checkpointed.block.0", "Checkpointed.block.1"]
    assert calls_of(prof) == dict.fromkeys([*names, "Checkpointed.last"], 1)
    again = calls_of(prof, RECOMPUTE)
    assert again == {**dict.fromkeys(names[:2], 0), **dict.fromkeys(names[2:], 1), "Checkpointed.last": 0}
    assert owners_of(prof, "aten::linear", RECOMPUTE) == {"Checkpointed.block.0": 1}
    assert owners_of(prof, "aten::tanh", RECOMPUTE) == {"Checkpointed.block.1": 1}
    assert makers_of(prof, "AddmmBackward0") == dict.fromkeys(
        ["Checkpointed.first", "Checkpointed.block.0", "Checkpointed.last"], 1
    )
    assert makers_of(prof, "TanhBackward0") == {"Checkpointed.block.1": 1}
    assert makers_of(prof, ACCUMULATE) == {
        "Checkpointed.first": 2,
        "Checkpointed.block.0": 3 if use_reentrant else 2,  # one more for the input, cut off from its graph
        "Checkpointed.last": 2,
    }
    if use_reentrant:
        assert makers_of(prof, "CheckpointFunctionBackward") == {"Checkpointed": 1}
    assert prof.run.phases() == PHASES
    assert "Recompute CPU total" in prof.display()


def test_nested_checkpoints() -> None:
    """A checkpoint in a checkpoint is recomputed for each: all of that is recompute."""
    inner = Checkpointed(False)

    class Outer(Layers):
        """Checkpoints a module that has a checkpoint itself."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    prof = trained(Outer(inner=inner), torch.rand(3, 4, requires_grad=True))
    assert set(calls_of(prof).values()) == {1}
    again = calls_of(prof, RECOMPUTE)
    assert again["Outer"] == 0
    assert again["Outer.inner"] == again["Outer.inner.first"] == 1
    assert again["Outer.inner.block"] == again["Outer.inner.block.0"] == 2
    assert makers_of(prof, "AddmmBackward0") == dict.fromkeys(
        ["Outer.inner.first", "Outer.inner.block.0", "Outer.inner.last"], 1
    )


def test_a_frozen_first_layer_has_no_backward() -> None:
    """Nothing flows back to it."""
    model = Mlp()
    model.fc1.requires_grad_(False)
    prof = trained(model)
    assert set(nodes_of(prof)) == {"Mlp.fc2", OUTSIDE_NAME}
    assert not cost_of(prof, "Mlp.fc1", BACKWARD)
    assert not cost_of(prof, "Mlp.act", BACKWARD)
    first = prof.run.layers[1]
    assert (first.params, first.trainable_params) == (40, 0)


def test_a_frozen_layer_in_the_middle_passes_gradients_on() -> None:
    """Its node runs, but no gradient of its own is accumulated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].requires_grad_(False)
    prof = trained(model)
    assert makers_of(prof, "AddmmBackward0") == {"Sequential.0": 1, "Sequential.1": 1, "Sequential.2": 1}
    assert makers_of(prof, ACCUMULATE) == {"Sequential.0": 2, "Sequential.2": 2}


def test_backward_called_twice() -> None:
    """Both times the nodes find their layers."""
    model = Mlp()
    with Profile(model) as prof:
        loss = model(torch.rand(3, 4)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 2, "Mlp.fc2": 2}
    assert makers_of(prof, ACCUMULATE) == {"Mlp.fc1": 4, "Mlp.fc2": 4}
    assert calls_of(prof)["Mlp.fc1"] == 1


def test_backward_in_pieces() -> None:
    """``autograd.grad`` of the second half, then of the first: each node once, at its layer."""
    model = Mlp()
    with Profile(model) as prof:
        hidden = model.act(model.fc1(torch.rand(3, 4)))
        (grad,) = torch.autograd.grad(model.fc2(hidden).sum(), hidden)
        torch.autograd.grad(hidden, list(model.fc1.parameters()), grad)
    nodes = nodes_of(prof)
    assert nodes["Mlp.fc2"]["AddmmBackward0"] == 1
    assert nodes["Mlp.fc1"]["AddmmBackward0"] == 1
    assert nodes["Mlp.act"] == {"ReluBackward0": 1}
    assert set(nodes) == {"Mlp.fc1", "Mlp.act", "Mlp.fc2", OUTSIDE_NAME}
    assert set(nodes[OUTSIDE_NAME]) == {"SumBackward0"}


def test_a_graph_made_before_the_block_is_outside() -> None:
    """Its backward is shown, but belongs to no layer: the forward that made it was not recorded."""
    model = Mlp()
    loss = model(torch.rand(3, 4)).sum()
    with Profile(model) as prof:
        model(torch.rand(3, 4))
        loss.backward()
    assert set(nodes_of(prof)) == {OUTSIDE_NAME}
    assert makers_of(prof, "AddmmBackward0") == {OUTSIDE_NAME: 2}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_there_is_no_backward(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """The forward is the same, and there is one phase only."""
    model = Mlp()
    with mode(), Profile(model) as prof:
        model(torch.rand(3, 4))
    assert calls_of(prof) == {"Mlp": 1, "Mlp.fc1": 1, "Mlp.act": 1, "Mlp.fc2": 1}
    assert prof.run.phases() == (FORWARD,)
    assert owners_of(prof, "aten::linear") == {"Mlp.fc1": 1, "Mlp.fc2": 1}
    assert "Backward" not in prof.display()
    check_sums(prof)


def test_autocast() -> None:
    """The casts belong to the layer that needed them, forward and backward."""
    model = Mlp()
    with Profile(model) as prof:
        with torch.autocast("cpu", torch.bfloat16):
            y = model(torch.rand(3, 4))
        assert y.dtype == torch.bfloat16
        y.backward(torch.ones_like(y))
    casts = owners_of(prof, "aten::_to_copy")
    assert casts == {"Mlp.fc1": 3, "Mlp.fc2": 2}, "input, weight and bias; then the input is bfloat16 already"
    assert makers_of(prof, "ToCopyBackward0") == {"Mlp.fc1": 2, "Mlp.fc2": 2}, "the input needs no gradient"
    assert makers_of(prof, ACCUMULATE) == {"Mlp.fc1": 2, "Mlp.fc2": 2}
    assert OUTSIDE_NAME not in nodes_of(prof)


def test_multihead_attention_on_its_fast_path() -> None:
    """In eval without grad one fused op does it all; its output projection is not called."""
    model = nn.MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.rand(2, 5, 16)
    with torch.no_grad(), Profile(model) as prof:
        model(x, x, x)
    assert owners_of(prof, "aten::_native_multi_head_attention") == {"MultiheadAttention": 1}
    assert calls_of(prof) == {"MultiheadAttention": 1, "MultiheadAttention.out_proj": 0}


def test_multihead_attention_in_training() -> None:
    """Off the fast path its work and its backward are its own: it calls no child module."""
    model = nn.MultiheadAttention(16, 4, batch_first=True)
    x = torch.rand(2, 5, 16)
    with Profile(model) as prof:
        model(x, x, x)[0].sum().backward()
    assert owners_of(prof, "aten::_native_multi_head_attention") == {}
    assert set(nodes_of(prof)) == {"MultiheadAttention", OUTSIDE_NAME}
    assert nodes_of(prof)[OUTSIDE_NAME] == {"SumBackward0": 1}


def test_a_transformer_layer_on_its_fast_path() -> None:
    """The labels leave the fused path on; the children are not called, and get no time."""
    model = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True).eval()
    with torch.no_grad(), Profile(model) as prof:
        model(torch.rand(2, 5, 16))
    assert owners_of(prof, "aten::_transformer_encoder_layer_fwd") == {"TransformerEncoderLayer": 1}
    calls = calls_of(prof)
    assert calls.pop("TransformerEncoderLayer") == 1
    assert set(calls.values()) == {0}
    tree = prof.run.tree(FORWARD)
    assert tree.self == tree.total


def test_a_transformer_layer_in_training() -> None:
    """Off the fast path every child has its call and its backward."""
    prof = trained(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), torch.rand(2, 5, 16))
    assert owners_of(prof, "aten::_transformer_encoder_layer_fwd") == {}
    root = "TransformerEncoderLayer."
    calls = calls_of(prof)
    assert [calls[root + name] for name in ("self_attn", "linear1", "linear2", "norm1", "norm2", "dropout")] == [1] * 6
    assert makers_of(prof, "NativeLayerNormBackward0") == {root + "norm1": 1, root + "norm2": 1}
    assert {root + "linear1", root + "linear2", root + "self_attn"} <= set(nodes_of(prof))
    assert nodes_of(prof)[OUTSIDE_NAME] == {"SumBackward0": 1}


def test_packed_sequences_and_lstm() -> None:
    """Packing is the caller's, the recurrence the LSTM's, each with its backward."""
    model = PackedLstm()
    x = torch.rand(3, 6, 3, requires_grad=True)
    prof = trained(model, x, torch.tensor([6, 4, 2]))
    assert calls_of(prof) == {"PackedLstm": 1, "PackedLstm.lstm": 1, "PackedLstm.head": 1}
    assert owners_of(prof, "aten::lstm") == {"PackedLstm.lstm": 1}
    assert owners_of(prof, "aten::_pack_padded_sequence") == {"PackedLstm": 1}
    assert owners_of(prof, "aten::_pad_packed_sequence") == {"PackedLstm": 1}
    assert makers_of(prof, "PackPaddedSequenceBackward0") == {"PackedLstm": 1}
    assert set(makers_of(prof, "SigmoidBackward0")) == {"PackedLstm.lstm"}
    assert set(makers_of(prof, ACCUMULATE)) == {"PackedLstm.lstm", "PackedLstm.head", OUTSIDE_NAME} or set(
        makers_of(prof, ACCUMULATE)
    ) == {"PackedLstm.lstm", "PackedLstm.head", "PackedLstm"}, "that of x itself follows the packing"
    assert nodes_of(prof)[OUTSIDE_NAME] == {"SumBackward0": 1}
    check_sums(prof)


def test_a_custom_function() -> None:
    """Its forward and its backward belong to the layer that applied it, the ops inside too."""
    prof = trained(nn.Sequential(nn.Linear(4, 4), DoublesInside(), nn.Linear(4, 4)))
    assert owners_of(prof, "Double") == {"Sequential.1": 1}
    assert makers_of(prof, "DoubleBackward") == {"Sequential.1": 1}
    assert owners_of(prof, "aten::mul", FORWARD) == {"Sequential.1": 1}
    assert owners_of(prof, "aten::mul", BACKWARD) == {"Sequential.1": 1}
    assert makers_of(prof, "AddmmBackward0") == {"Sequential.0": 1, "Sequential.2": 1}


def test_in_place_writes_to_views() -> None:
    """They renumber nodes: those still belong to the module that wrote, the others to theirs."""
    prof = trained(WritesToViews(), torch.rand(3, 4, requires_grad=True))
    assert makers_of(prof, "torch::autograd::CopySlices") == {"WritesToViews": 2}
    assert makers_of(prof, "AddmmBackward0") == {"WritesToViews.fc": 1, "WritesToViews.last": 1}
    nodes = nodes_of(prof)
    assert nodes[OUTSIDE_NAME] == {"SumBackward0": 1}
    assert set(nodes["WritesToViews.fc"]) == {"AddmmBackward0", "TBackward0", ACCUMULATE}
    assert nodes["WritesToViews"]["MulBackward0"] == 1


def test_a_forward_that_raises() -> None:
    """The error comes through, the model is as it was, what was recorded is shown, ``raw()`` leaves the call out."""
    model = Raises()
    prof = Profile(model)
    with pytest.raises(ValueError, match="second call"), prof:
        model(torch.rand(3, 4))
        model(torch.rand(3, 4))
    assert calls_of(prof) == {"Raises": 2, "Raises.fc": 2}
    assert owners_of(prof, "aten::linear") == {"Raises.fc": 2}
    assert owners_of(prof, "aten::tanh") == {"Raises": 1}
    raw = prof.raw()
    assert raw is not None
    assert len(raw[1]["Raises", "fc"]) == 2, "the linear layer had finished both times"
    check_sums(prof)


def test_user_hooks_belong_to_the_caller() -> None:
    """They run around the forward: a child's in the parent's range, the root's outside."""
    model = Mlp()
    model.fc1.register_forward_hook(lambda module, args, result: torch.erf(result))
    model.fc1.register_forward_pre_hook(lambda module, args: (torch.sin(args[0]),))
    model.register_forward_hook(lambda module, args, result: torch.exp(result))
    prof = trained(model)
    assert owners_of(prof, "aten::erf") == {"Mlp": 1}
    assert owners_of(prof, "aten::sin") == {"Mlp": 1}
    assert owners_of(prof, "aten::exp") == {OUTSIDE_NAME: 1}
    assert makers_of(prof, "ErfBackward0") == {"Mlp": 1}
    assert makers_of(prof, "ExpBackward0") == {OUTSIDE_NAME: 1}
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 1, "Mlp.fc2": 1}


def test_hooks_on_gradients_belong_to_the_node() -> None:
    """The work of a tensor's hook in backward belongs to the layer of the autograd node that called it."""
    model = Mlp()

    def hook(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.cos_()

    model.fc2.weight.register_post_accumulate_grad_hook(hook)
    prof = trained(model)
    assert owners_of(prof, "aten::cos_", BACKWARD) == {"Mlp.fc2": 1}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_script_module_is_one_row(how: str) -> None:
    """TorchScript runs without Python: the module has its time, its backward, and no layers inside that were called."""
    scripted = torch.jit.script(Mlp()) if how == "script" else torch.jit.trace(Mlp(), torch.rand(3, 4))
    model = nn.Sequential(nn.Linear(4, 4), scripted)
    x, other = torch.rand(3, 4), torch.jit.script(nn.Sequential(nn.ReLU()))
    for _ in range(3):
        expected = model(x)  # the first calls optimise the graph
    with Profile(model) as prof:
        assert torch.equal(model(x), expected)
        other(x)
        model(x).sum().backward()
    assert "Never called" not in "\n".join(sentences(prof.run)), "the script runs what is inside, unlabelled"
    assert {layer.path[:2] for layer in prof.run.layers if layer.compiled} == {("Sequential", "1")}
    assert not prof.run.layers[2].compiled, "Python calls the script itself"
    calls = {name: calls for name, calls in calls_of(prof).items() if calls}
    assert calls == {"Sequential": 2, "Sequential.0": 2, "Sequential.1": 2}
    owners = {layer for layer, ops in ops_of(prof, FORWARD).items() if {"aten::linear", "aten::addmm"} & set(ops)}
    assert owners == {"Sequential.0", "Sequential.1"}
    assert set(nodes_of(prof)) <= {"Sequential.0", "Sequential.1", OUTSIDE_NAME}
    assert "Sequential.1" in nodes_of(prof)
    assert torch.equal(model(x), expected)
    check_sums(prof)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_script_module_as_the_model() -> None:
    """The root may be a ScriptModule itself. It keeps the name of the class that it was made from."""
    model = torch.jit.script(Mlp())
    x = torch.rand(3, 4)
    model(x), model(x)
    prof = profiled(model, x)
    assert prof.run.tree().calls == 1
    assert prof.run.tree().self.cpu_ns > 0
    assert prof.run.layers[0].kind == "Mlp"


# torch.compile


def compiled_whole() -> nn.Module:
    """``torch.compile(model)``."""
    return torch.compile(Mlp(), backend="eager", fullgraph=True)


def compiled_in_place() -> nn.Module:
    """``model.compile()``."""
    model = Mlp()
    model.compile(backend="eager")
    return model


def compiled_part() -> nn.Module:
    """One child replaced by its compiled self."""
    model = nn.Sequential(nn.Linear(4, 4), Mlp())
    model[1] = torch.compile(model[1], backend="eager")
    return model


def compiled_part_in_place() -> nn.Module:
    """One child compiled where it is."""
    model = nn.Sequential(nn.Linear(4, 4), Mlp())
    model[1].compile(backend="eager")
    return model


COMPILED = [compiled_whole, compiled_in_place, compiled_part, compiled_part_in_place]


@pytest.mark.usefixtures("dynamo")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_script_module_in_compiled_code_has_no_label() -> None:
    """torch.compile does not trace TorchScript. It would try again with a label on the forward."""
    model = torch.compile(nn.Sequential(nn.Linear(4, 4), torch.jit.script(Mlp())), backend="eager")
    x = torch.rand(3, 4)
    expected = model(x)
    breaks = sum(counters["graph_break"].values())
    with Profile(model) as prof:
        assert torch.equal(model(x), expected)
    assert sum(counters["graph_break"].values()) == breaks == 1
    assert {name for name, calls in calls_of(prof).items() if calls} == {"Sequential", "Sequential.0"}


@pytest.mark.parametrize("make", COMPILED)
def test_a_part_compiled_earlier_is_not_compiled_again(make: Callable[[], nn.Module], dynamo: Any) -> None:
    """Before, inside and after: the same graphs. The compiled part is one row with one call, its inside none."""
    model = make()
    x = torch.rand(3, 4)
    expected = model(x)
    model(x)
    before = dynamo()
    assert before == 1
    with Profile(model) as prof:
        assert torch.equal(model(x), expected)
        assert dynamo() == before
        model(x).sum().backward()
    assert dynamo() == before
    assert torch.equal(model(x), expected)
    assert dynamo() == before
    compiled_itself = len(prof.run.layers) == 4
    row = "Mlp" if compiled_itself else "Sequential.1"
    calls = {name: calls for name, calls in calls_of(prof).items() if calls}
    assert calls == ({"Mlp": 2} if compiled_itself else {"Sequential": 2, "Sequential.0": 2, "Sequential.1": 2})
    assert not any("_orig_mod" in layer.path for layer in prof.run.layers)
    assert makers_of(prof, "ReluBackward0") == {row: 1}
    check_sums(prof)


# Deep, wrapped, trained


def test_a_model_deeper_than_the_recursion_limit() -> None:
    """3,000 nested modules, all labelled, one of them called: nothing here recurses with the depth."""
    model: nn.Module | None = None
    innermost = None
    for _ in range(3000):
        model = Deep(model)
        innermost = innermost or model
    assert model is not None
    with Profile(model) as prof:
        model(torch.rand(2))
        innermost(torch.rand(2))
    assert len(prof.run.layers) == 3000
    tree = prof.run.tree()
    nodes = list(tree.walk())
    assert len(nodes) == 3000
    assert [(index, node.calls) for index, node in enumerate(nodes) if node.calls] == [(0, 1), (2999, 1)]
    assert tree.total == tree.self + nodes[-1].self
    assert "Deep" in prof.display(depth=2)
    assert len(prof.display().splitlines()) > 3000
    raw = prof.raw()
    assert raw is not None
    assert len(raw[0]) == 3000
    assert len(raw[1][nodes[-1].layer.path]) == 1


@pytest.mark.usefixtures("world_of_one")
@pytest.mark.parametrize("shown", ["wrapper", "wrapped"])
def test_distributed_data_parallel(shown: str) -> None:
    """One call for the wrapper and the model in it, paths without ``module``, backward at the layers."""
    core = Mlp()
    model = nn.parallel.DistributedDataParallel(core)
    with Profile(model if shown == "wrapper" else core, profile_memory=True) as prof:
        model(torch.rand(3, 4)).sum().backward()
    assert calls_of(prof) == {"Mlp": 1, "Mlp.fc1": 1, "Mlp.act": 1, "Mlp.fc2": 1}
    assert makers_of(prof, "AddmmBackward0") == {"Mlp.fc1": 1, "Mlp.fc2": 1}
    assert makers_of(prof, "ReluBackward0") == {"Mlp.act": 1}
    assert sum(makers_of(prof, ACCUMULATE).values()) == 4
    assert OUTSIDE_NAME not in makers_of(prof, ACCUMULATE)
    assert len(prof.run.roots) == 1
    check_sums(prof)


def test_a_gradient_penalty() -> None:
    """Double backward: the nodes that backward ops made belong to the layers of those."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.rand(3, 4, requires_grad=True)
    with Profile(model) as prof:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.square().sum().backward()
    nodes = nodes_of(prof)
    assert makers_of(prof, "MmBackward0") == {"Sequential.0": 1, "Sequential.2": 1}
    assert makers_of(prof, "TanhBackwardBackward0") == {"Sequential.1": 1}
    assert makers_of(prof, "PowBackward0") == {OUTSIDE_NAME: 1}
    assert makers_of(prof, "AddmmBackward0")["Sequential.0"] == 2, "for the gradient of x, and in the second backward"
    assert set(makers_of(prof, ACCUMULATE)) <= {"Sequential.0", "Sequential.1", "Sequential.2"}
    assert set(nodes[OUTSIDE_NAME]) == {"SumBackward0", "PowBackward0", "ExpandBackward0"} or set(
        nodes[OUTSIDE_NAME]
    ) == {"SumBackward0", "PowBackward0"}
    check_sums(prof)


def test_forces_from_energies() -> None:
    """A module that runs backward inside its forward: its nodes are backward work of the layers that made them."""

    class Forces(Layers):
        """The gradient of a network's output by its input."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(self.energy(x).sum(), x)[0]

    prof = profiled(Forces(energy=Mlp()), torch.rand(3, 4, requires_grad=True))
    assert makers_of(prof, "AddmmBackward0") == {"Forces.energy.fc1": 1, "Forces.energy.fc2": 1}
    assert makers_of(prof, "SumBackward0") == {"Forces": 1}
    assert OUTSIDE_NAME not in nodes_of(prof)
    check_sums(prof)


@pytest.mark.parametrize("heavy", [0, 1, 2])
def test_the_layer_with_a_hundred_times_the_work_has_the_largest_backward(heavy: int) -> None:
    """It has the largest forward too, wherever it is in the model. The fastest of three steps counts for each layer."""
    model = nn.Sequential(*(Work(160, 100 if number == heavy else 1) for number in range(3)))
    x = torch.rand(160, 160)
    model(x).sum().backward()
    times: dict[str, list[list[int]]] = {FORWARD: [], BACKWARD: []}
    for _ in range(3):
        prof = trained(model, x)
        assert makers_of(prof, "MmBackward0") == {f"Sequential.{at}": 100 if at == heavy else 1 for at in range(3)}
        for phase, steps in times.items():
            steps.append([node.total.cpu_ns for node in prof.run.tree(phase).children])
    for steps in times.values():
        fastest = [min(layer) for layer in zip(*steps)]
        assert fastest.index(max(fastest)) == heavy


# Hugging Face


def test_a_bert() -> None:
    """A BERT made from its configuration: practically all backward time finds its layer."""
    transformers = usable_transformers()
    config = transformers.BertConfig(
        vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64
    )
    model = transformers.BertModel(config)
    with Profile(model, profile_memory=True) as prof:
        out = model(torch.randint(0, 100, (2, 16)), attention_mask=torch.ones(2, 16, dtype=torch.long))
        hidden = out.last_hidden_state
        hidden.backward(torch.ones_like(hidden))
    owned = prof.run.tree(BACKWARD).total.cpu_ns
    outside = sum(cost.cpu_ns for cost in no_layer(prof, BACKWARD).values())
    engine = sum(
        one.cost.cpu_ns
        for one in prof.run.rows
        if one.layer is None and one.frames[-1:] == (Frame(FrameKind.OP, AUTOGRAD_ENGINE),)
    )
    assert owned / (owned + outside - engine) >= 0.999
    calls = calls_of(prof)
    for number in (0, 1):
        layer = f"BertModel.encoder.layer.{number}"
        assert calls[layer] == calls[f"{layer}.attention.self.query"] == calls[f"{layer}.output.dense"] == 1
        assert makers_of(prof, "AddmmBackward0")[f"{layer}.attention.self.query"] == 1
        assert makers_of(prof, "GeluBackward0")[f"{layer}.intermediate.intermediate_act_fn"] == 1
    assert set(makers_of(prof, "EmbeddingBackward0")) == {
        f"BertModel.embeddings.{name}_embeddings" for name in ("word", "token_type", "position")
    }
    assert sum(layer.params for layer in prof.run.layers) == sum(p.numel() for p in model.parameters())
    check_sums(prof)


def test_generate() -> None:
    """``generate`` of a GPT-2: it works as without us, and each new token is a call of every block."""
    transformers = usable_transformers()
    config = transformers.GPT2Config(
        vocab_size=50, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=49, pad_token_id=49
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    prompt = torch.tensor([[1, 2, 3]])
    options = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "min_new_tokens": 4, "max_new_tokens": 4}
    expected = model.generate(prompt, **options)
    with Profile(model) as prof:
        tokens = model.generate(prompt, **options)
    assert torch.equal(tokens, expected)
    calls = calls_of(prof)
    root = "GPT2LMHeadModel"
    names = [root, f"{root}.transformer", f"{root}.transformer.wte", f"{root}.lm_head"]
    names += [f"{root}.transformer.h.{number}.attn.c_attn" for number in (0, 1)]
    assert [calls[name] for name in names] == [4] * len(names)
    assert prof.run.phases() == (FORWARD,)
    assert sum(layer.params for layer in prof.run.layers) == sum(p.numel() for p in model.parameters())
    check_sums(prof)


def test_the_version_is_reported() -> None:
    """A run says which torch it came from."""
    with Profile(nn.ReLU()) as prof:
        prof(torch.rand(2))
    assert dict(prof.run.meta.versions)["torch"] == torch.__version__
    assert dict(prof.run.meta.versions)["torchprof"] == torchprof.__version__


# Shared modules and selection


class SharedBranches(nn.Module):
    """One Linear in two branches, the first of which calls it twice."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(4, 4)
        self.a = nn.Sequential(shared, nn.Identity(), shared)
        self.b = nn.Sequential(shared)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))


@pytest.mark.parametrize(
    ("paths", "calls"),
    [
        (None, {"a.0": 2, "a.2": 0, "b.0": 1}),
        (["b.0"], {"a.0": 0, "b.0": 1}),
        (["b.0", "b"], {"b": 1, "b.0": 1}),
        (["a"], {"a": 1, "a.0": 0, "b.0": 0}),
    ],
)
def test_a_shared_module_belongs_where_it_is_called_also_when_selected(
    paths: list[str] | None, calls: dict[str, int]
) -> None:
    with Profile(SharedBranches(), paths=paths) as prof:
        prof(torch.rand(1, 4))
    counted = {node.layer.name.partition(".")[2]: node.calls for node in prof.run.tree("forward").walk()}
    assert {name: counted[name] for name in calls} == calls
    lists = prof.raw()[1]
    if paths == ["b.0"]:
        assert {path: len(found) for path, found in lists.items()} == {("SharedBranches", "b", "0"): 1}
        assert prof.run.no_layer("forward", selected=False).cpu_ns > 0
    if paths == ["a"]:
        linears = {op.name: op.calls for op in prof.run.ops("forward")["SharedBranches", "a"]}["aten::linear"]
        assert linears == 2, "what is not selected inside a selected layer is that layer's own work"


def test_the_second_place_of_a_module_in_one_parent_is_a_layer_too() -> None:
    relu = nn.ReLU()
    prof = profiled(nn.Sequential(relu, nn.Linear(2, 2), relu), torch.rand(1, 2), paths=["2", "1"])
    assert [trace.path[-1] for trace in prof.traces] == ["Sequential", "0", "1", "2"]
    assert prof.run.layers[1].shared_with == (("Sequential", "2"),)
    assert prof.run.meta.paths == (("Sequential", "1"), ("Sequential", "2"))


def test_a_user_label_with_our_prefix_stays_the_users() -> None:
    model = nn.Linear(2, 2)
    with Profile(model) as prof, torch.autograd.profiler.record_function("torchprof:mine"):
        model(torch.rand(1, 2))
    frames = {row.frames[0] for row in prof.run.rows if row.frames and row.layer is None}
    assert Frame(FrameKind.LABEL, "torchprof:mine") in frames
    assert prof.run.tree("forward").calls == 1


def test_the_labels_of_layers_that_were_not_selected_cost_too() -> None:
    prof = profiled(nn.Sequential(*(nn.Identity() for _ in range(300))), torch.rand(1), paths=["0"])
    attribution = attribution_of(prof._plan.layer_plan())
    list(walk_of(attribution, prof._session.columns().events()))
    assert attribution.labels == 301


def test_two_wrapped_models_of_different_classes() -> None:
    """The wrappers have one class name, the models two: each call goes to its own model."""
    model, other = nn.Sequential(nn.Linear(2, 2)), Mlp()
    wrapped = [torch.compile(one, backend="eager") for one in (model, other)]
    with Profile(wrapped) as prof:
        wrapped[0](torch.rand(1, 2))
        for _ in range(3):
            wrapped[1](torch.rand(1, 4))
    assert [(root.name, prof.run.tree(root=number).calls) for number, root in enumerate(prof.run.roots)] == [
        ("Sequential", 1),
        ("Mlp", 3),
    ]
    assert [trace.path for trace in prof.traces if len(trace.path) == 1] == [
        ("OptimizedModule",),
        ("OptimizedModule#2",),
    ]


# What a layer is


def test_parameters_are_counted_where_they_are_held_and_once() -> None:
    """By hand: the tied weight counts at its first layer, a frozen one is not trainable, bfloat16 takes two bytes."""
    model = nn.Module()
    model.embed = nn.Embedding(10, 4)
    model.body = nn.Linear(4, 4).to(torch.bfloat16)
    model.head = nn.Linear(4, 10, bias=False)
    model.head.weight = model.embed.weight
    model.scale = nn.Parameter(torch.ones(3))
    model.body.bias.requires_grad_(False)
    with Profile(model) as prof:
        model.embed(torch.tensor([1]))
    found = {layer.name: (layer.params, layer.trainable_params, layer.param_bytes) for layer in prof.run.layers}
    assert found == {
        "Module": (3, 3, 12),
        "Module.embed": (40, 40, 160),
        "Module.body": (20, 16, 40),
        "Module.head": (0, 0, 0),
    }
    assert sum(layer.params or 0 for layer in prof.run.layers) == sum(one.numel() for one in model.parameters())


def test_the_parameters_of_a_lazy_layer_are_unknown_before_its_first_call() -> None:
    called, idle = nn.LazyLinear(2), nn.LazyLinear(2)
    model = nn.ModuleList([called, idle])
    with Profile(model) as prof:
        called(torch.rand(1, 3))
    _, first, second = prof.run.layers
    assert (first.params, first.kind) == (8, "Linear")
    assert (second.params, second.trainable_params, second.param_bytes) == (None, None, None)


def test_warnings_name_only_selected_layers() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with Profile(model, paths=["0"]) as prof:
        in_thread(model, torch.rand(1, 2))
    told = "\n".join(sentences(prof.run))
    assert "1 call of Sequential.0 on other threads" in told
    assert "of Sequential on" not in told and "Sequential.1" not in told
