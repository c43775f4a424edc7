"""Profiling whole programs: which modules are models, what is recorded, and what is restored."""

from __future__ import annotations

import copy
import gc
import os
import resource
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from build.models import Layers, Mlp, Recursive, Several
from build.processes import in_thread
from build.warnings import sentences
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.profiler import record_function

import torchprof
from torchprof import Run, TorchprofError
from torchprof.profile import program
from torchprof.profile.program import Program
from torchprof.record.plan import Plan
from torchprof.run.measures import FIELDS

LABELING = "torchprof: labels a model"


def profiled(body: Callable[[], Any], **options: Any) -> Run:
    with Program(**options) as block:
        body()
    return block.run


def calls(run: Run) -> dict[str, int]:
    """The forward calls of each layer that was called, by path."""
    return {
        node.layer.name: node.calls
        for root in range(len(run.roots))
        for node in run.tree("forward", root).walk()
        if node.calls
    }


def costs(run: Run, *fields: str) -> Counter[tuple[str, str, tuple[str, ...]]]:
    """Calls, and some fields of the costs, by layer, phase and frames, without the range in which torchprof labels."""
    sums: Counter[Any] = Counter()
    for row in run.rows:
        names = tuple(frame.name for frame in row.frames if frame.kind != "python")
        if len(names) == len(row.frames) and names[:1] != (LABELING,):
            key = (row.layer.name if row.layer else "(outside)", row.phase, names)
            sums[(*key, "calls")] += row.calls
            for field in fields:
                sums[(*key, field)] += getattr(row.cost, field)
    return +sums


def train(model: nn.Module, steps: int = 3, accumulate: int = 1, width: int = 4) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps):
        for _ in range(accumulate):
            model(torch.rand(3, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.fixture
def short_cycles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cycle ends at each call of a model if no backward is outstanding."""
    monkeypatch.setattr(program, "_CYCLE_S", 1e-9)
    monkeypatch.setattr(program, "_PATIENCE", float("inf"))
    yield


# Which modules are models


def test_a_model_is_found_and_labelled_at_its_first_call(model: Mlp) -> None:
    run = profiled(lambda: train(model))
    assert calls(run) == {"Mlp": 3, "Mlp.fc1": 3, "Mlp.act": 3, "Mlp.fc2": 3}
    assert run.layers[1].input_shapes == ((3, 4),) and run.layers[1].params == 4 * 8 + 8
    assert run.meta.model == ("Mlp",)
    assert run.tree("backward").total.cpu_ns > 0
    assert "Optimizer.step#SGD.step" in run.report("tree")


def test_it_records_the_same_as_a_profile_of_the_model() -> None:
    """Rows, calls, MACs and bytes of forward and backward equal those of a Profile of the model."""
    model, other = Mlp(), Mlp()
    train(copy.deepcopy(model))  # neither recording has the work that only a first step does
    run = profiled(lambda: train(model), with_flops=True, profile_memory=True)
    with torchprof.Profile(other, with_flops=True, profile_memory=True) as prof:
        train(other)
    fields = [name for name in FIELDS if not name.endswith("_ns")]
    assert costs(run, *fields) == costs(prof.run, *fields)
    assert run.tree().total.flops > 0 and run.tree().total.cpu_allocated > 0


def test_what_was_noted_of_calls_lives_longer_than_the_model() -> None:
    """As in a script whose model lives in ``def main()``."""

    def main() -> None:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU())
        for rows in (2, 2, 3):
            model(torch.ones(rows, 4)).sum().backward()
        with torch.no_grad():
            model(torch.ones(2, 4))

    with Program() as block:
        main()
        gc.collect()
    root, linear, relu = block.run.layers
    assert (root.input_shapes, root.same_shapes, root.grad_calls) == (((2, 4),), False, 3)
    assert (linear.input_shapes, linear.output_shapes, relu.input_shapes) == (((2, 4),), ((2, 8),), ((2, 8),))


def test_two_models_are_found_and_their_submodules_are_not_models() -> None:
    def gan() -> None:
        generator = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 4))
        critic = Mlp()
        for _ in range(2):
            fake = generator(torch.rand(5, 2))
            (critic(fake.detach()).mean() - critic(torch.rand(5, 4)).mean()).backward()
            critic(fake).mean().backward()

    run = profiled(gan)
    found = calls(run)
    assert [root.name for root in run.roots] == ["Sequential", "Mlp"]
    assert (found["Sequential"], found["Sequential.2"], found["Mlp"], found["Mlp.fc1"]) == (2, 2, 6, 6)


def test_a_new_instance_is_a_new_model() -> None:
    def folds() -> None:
        for steps in (1, 2, 3):
            train(Mlp(), steps)

    run = profiled(folds)
    assert [root.name for root in run.roots] == ["Mlp", "Mlp#2", "Mlp#3"]
    assert [calls(run)[f"{name}.fc1"] for name in ("Mlp", "Mlp#2", "Mlp#3")] == [1, 2, 3]
    assert all(run.tree("backward", root).total.cpu_ns > 0 for root in range(3))


class PerceptualLoss(Layers):
    """A loss that compares features: it has layers, so it is a model."""

    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        return mse_loss(self.features(one), self.features(other))


def test_losses_and_empty_modules_are_not_models() -> None:
    def program() -> None:
        model = Mlp()
        weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.3, 0.7]))
        weighted(nn.Softmax(1)(model(torch.rand(3, 4))), torch.tensor([0, 1, 1])).backward()
        PerceptualLoss(features=nn.Linear(2, 3))(torch.rand(3, 2), torch.rand(3, 2))

    run = profiled(program)
    assert [root.name for root in run.roots] == ["Mlp", "PerceptualLoss"]
    outside = {row.frames[0].name for row in run.rows if row.layer is None and row.frames}
    assert {"aten::softmax", "aten::cross_entropy_loss"} <= outside


def test_after_an_error_in_a_forward_the_next_call_is_outermost() -> None:
    model, other = Mlp(), Several()

    def program() -> None:
        for wrong in (torch.rand(3, 5), torch.rand(3, 7)):
            with pytest.raises(RuntimeError):
                model(wrong)
        other(torch.rand(2, 4))

    run = profiled(program)
    assert [root.name for root in run.roots] == ["Mlp", "Several"]
    assert (calls(run)["Mlp"], calls(run)["Mlp.fc1"], calls(run)["Several"]) == (2, 2, 1)


class CallsItself(Layers):
    """Its own ``__call__`` does not call that of ``nn.Module``."""

    def __call__(self, x: Tensor) -> Tensor:
        return self.fc(x)


class CallsMore(Mlp):
    """Its own ``__call__`` does something before it calls that of ``nn.Module``."""

    def __call__(self, x: Tensor) -> Tensor:
        return super().__call__(x * 2)


X = torch.ones(2, 4)
ONCE = {"Mlp": 1, "Mlp.fc1": 1, "Mlp.act": 1, "Mlp.fc2": 1}
PROGRAMS: dict[str, tuple[Callable[[Mlp], Any], dict[str, int]]] = {
    "a part that is called before its model is one": (lambda model: (model.fc1(X), model(X)), {"Linear": 1, **ONCE}),
    "a part that is called after it is a part": (lambda model: (model(X), model.fc1(X)), {**ONCE, "Mlp.fc1": 2}),
    "the module of DataParallel": (lambda model: nn.DataParallel(model)(X), ONCE),
    "recursive and shared layers": (
        lambda model: (Recursive()(X), Several()(X)),
        {"Recursive": 4, "Recursive.fc": 4, "Several": 1, "Several.shared": 3, "Several.once": 1},
    ),
    "modules that override call": (
        lambda model: (CallsItself(fc=nn.Linear(4, 4))(X), CallsMore()(X)),
        {"Linear": 1, **{name.replace("Mlp", "CallsMore"): 1 for name in ONCE}},
    ),
}


@pytest.mark.parametrize(("body", "found"), PROGRAMS.values(), ids=PROGRAMS)
def test_the_models_of_a_program_and_their_calls(body: Callable[[Mlp], Any], found: dict[str, int], model: Mlp) -> None:
    """Each parameter is counted once."""
    run = profiled(lambda: body(model))
    assert calls(run) == found
    assert [root.name for root in run.roots] == [name for name in found if "." not in name]
    own = sum(param.numel() for param in model.parameters())
    assert "Mlp" not in found or sum(layer.params or 0 for layer in run.layers) == own


def test_lazy_modules_are_found() -> None:
    def program() -> None:
        lazy = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
        lstm = nn.LSTM(8, 16, num_layers=2)
        for _ in range(2):
            lazy(torch.rand(3, 4))
            lstm(torch.rand(5, 3, 8))

    run = profiled(program)
    found = calls(run)
    assert found == {"Sequential": 2, "Sequential.0": 2, "Sequential.1": 2, "Sequential.2": 2, "LSTM": 2}
    assert [layer.params for layer in run.layers] == [0, 4 * 8 + 8, 0, 8 * 2 + 2, 4 * 16 * (8 + 16 + 16 + 16 + 4)]
    assert run.layers[1].kind == "Linear"


def test_scripted_traced_and_graph_modules_are_found() -> None:
    plain = Mlp()
    x = torch.rand(3, 4)
    scripted, traced = torch.jit.script(Mlp()), torch.jit.trace(Mlp(), x)
    graph = torch.fx.symbolic_trace(Mlp())

    def program() -> None:
        for model in (plain, scripted, traced, graph):
            model(x)
            model(x)

    run = profiled(program)
    assert [root.name for root in run.roots][:3] == ["Mlp", "RecursiveScriptModule", "TopLevelTracedModule"]
    found = calls(run)
    assert [found[root.name] for root in run.roots] == [2, 2, 2, 2]
    assert found[f"{run.roots[3].name}.fc1"] == 2 and run.layers[4].kind == "Mlp"


@pytest.mark.usefixtures("short_cycles")
def test_scripting_tracing_and_symbolic_tracing_inside_the_block() -> None:
    x = torch.rand(3, 4)
    made: list[nn.Module] = []

    def program() -> None:
        model = Mlp()
        with torch.no_grad():
            model(x)
            made.append(torch.jit.trace(copy.deepcopy(model), x))  # the model was never called
            made.extend([torch.jit.script(model), torch.fx.symbolic_trace(model)])
        made.append(copy.deepcopy(model))

    profiled(program)
    expected = made[-1](x)
    for module in made[:-1]:
        torch.testing.assert_close(module(x), expected)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_model_is_not_compiled_again(in_place: bool) -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters

    def graphs(block: Any) -> tuple[int, int]:
        torch._dynamo.reset()
        counters.clear()
        model = Mlp()
        if in_place:
            model.compile(backend="eager")
        compiled = model if in_place else torch.compile(model, backend="eager")
        compiled(torch.rand(3, 4))
        with block:
            for _ in range(3):
                compiled(torch.rand(3, 4))
        compiled(torch.rand(3, 4))
        stats = counters["stats"]
        return stats["unique_graphs"], stats["calls_captured"]

    plain = graphs(nullcontext())
    block = Program()
    assert graphs(block) == plain and plain[0] == 1
    assert calls(block.run)["Mlp"] == 3


@pytest.mark.parametrize("of_function", [False, True])
def test_a_model_compiled_inside_gives_one_graph(of_function: bool) -> None:
    counters = pytest.importorskip("torch._dynamo.utils").counters

    def graphs() -> int:
        torch._dynamo.reset()
        counters.clear()
        model = Mlp()
        compiled = torch.compile((lambda x: model(x)) if of_function else model, backend="eager", fullgraph=True)
        for _ in range(3):
            compiled(torch.rand(3, 4))
        return int(counters["stats"]["unique_graphs"])

    assert graphs() == 1
    counted: list[int] = []
    run = profiled(lambda: counted.append(graphs()))
    assert counted == [1]
    if of_function:  # the model is inlined into its graph; older versions of torch call the leaves from the graph
        assert "Mlp" not in run.meta.model
    else:
        assert calls(run)["Mlp"] == 3


def test_distributed_data_parallel_is_shown_as_its_module(world_of_one: None) -> None:
    run = profiled(lambda: train(nn.parallel.DistributedDataParallel(Mlp())))
    assert calls(run) == {"Mlp": 3, "Mlp.fc1": 3, "Mlp.act": 3, "Mlp.fc2": 3}
    assert run.tree("backward").total.cpu_ns > 0


def test_recomputations_of_checkpoints_are_not_calls_of_models(model: Mlp) -> None:
    def program() -> None:
        for _ in range(4):
            hidden = torch.utils.checkpoint.checkpoint(model, torch.rand(3, 4, requires_grad=True), use_reentrant=False)
            hidden.sum().backward()

    run = profiled(program, warmup_calls=1, max_calls=2)
    assert calls(run)["Mlp"] == 2
    assert run.tree("recompute").calls == 2


def test_calls_on_other_threads_give_a_warning() -> None:
    model, other = Mlp(), Several()
    x = torch.rand(2, 4)
    results: list[Tensor] = []

    def elsewhere() -> None:
        results.extend([model(x), other(x), other(x)])

    def program() -> None:
        model(x)
        in_thread(elsewhere)

    run = profiled(program)
    assert [root.name for root in run.roots] == ["Mlp"] and calls(run)["Mlp"] == 1
    assert torch.equal(results[0], model(x))
    assert any("threads that torch's profiler does not record are missing: Several (2)" in w for w in sentences(run))
    assert any("1 call of Mlp on other threads" in warning for warning in sentences(run))


def test_only_the_first_models_are_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_MOST_MODELS", 3)
    run = profiled(lambda: [Several()(torch.rand(2, 4)) for _ in range(5)])
    assert [root.name for root in run.roots] == ["Several", "Several#2", "Several#3"]
    assert "Only the first 3 models have layers. The work of later models counts outside of layers." in sentences(run)
    outside = sum(
        row.calls for row in run.rows if row.layer is None and row.frames[-1:] and row.frames[-1].name == "aten::linear"
    )
    assert outside == 2 * 4


def test_layers_added_after_the_first_call_give_a_warning() -> None:
    model = Mlp()

    def program() -> None:
        model(torch.rand(1, 4))
        model.fc2 = nn.Linear(8, 3)
        model(torch.rand(1, 4))

    run = profiled(program)
    assert calls(run)["Mlp"] == 2 and calls(run)["Mlp.fc2"] == 1
    assert any("Mlp.fc2" in warning and "replaced" in warning for warning in sentences(run))


def test_a_program_without_models_or_operators() -> None:
    run = profiled(lambda: time.sleep(0.05))
    assert not run.layers and run.meta.wall_ns >= 50_000_000
    assert sentences(run) == ("No model was called: all recorded work is outside of models.",)
    assert run.report("tree") and run.report("top").splitlines()[2].startswith("100.0%")


# What is recorded


def test_the_labelling_of_a_later_model_is_in_a_range_of_torchprof(monkeypatch: pytest.MonkeyPatch) -> None:
    first, later = Mlp(), Several()
    add = Plan.add

    def slow(plan: Plan, model: nn.Module) -> Any:
        time.sleep(0.2)
        return add(plan, model)

    def program() -> None:
        first(torch.rand(1, 4))
        monkeypatch.setattr(Plan, "add", slow)
        later(torch.rand(1, 4))

    run = profiled(program)
    ours = [row for row in run.rows if row.frames and row.frames[0].name == LABELING]
    in_range = sum(row.cost.cpu_ns for row in ours if row.layer is None and row.frames[0].kind == "label")
    assert in_range >= 200_000_000
    assert run.meta.wall_ns - in_range < 150_000_000


def test_warmup_calls_and_max_calls_limit_what_is_recorded(model: Mlp) -> None:
    seen: list[bool] = []

    def program() -> None:
        for _ in range(9):
            seen.append(torch.autograd._profiler_enabled())
            model(torch.rand(1, 4))
            torch.ones(7)

    run = profiled(program, warmup_calls=2, max_calls=3)
    assert calls(run)["Mlp"] == calls(run)["Mlp.fc1"] == 3
    assert seen == [False] * 3 + [True] * 3 + [False] * 3
    assert sentences(run)[0] == "3 model calls recorded, as requested. The program then continued without recording."
    assert sum(row.calls for row in run.rows if row.frames and row.frames[-1].name == "aten::ones") == 3


def test_too_few_calls_for_the_warm_up_give_a_warning() -> None:
    run = profiled(lambda: Mlp()(torch.rand(1, 4)), warmup_calls=2)
    assert sentences(run) == (
        "Nothing was recorded: the first 2 model calls are left out as warm-up, and there were 1.",
    )
    assert run.roots and not calls(run)
    assert all(run.report(name) for name in ("top", "python", "tree", "ops"))


@pytest.mark.parametrize("options", [{"max_calls": 0}, {"max_calls": 1.5}, {"warmup_calls": -1}, {"warmup_calls": "2"}])
def test_invalid_numbers_of_calls_raise(options: dict[str, Any]) -> None:
    with pytest.raises(TorchprofError, match=next(iter(options))):
        Program(**options)


def test_the_run_before_the_end_raises() -> None:
    block = Program()
    with pytest.raises(TorchprofError, match="not ended"):
        _ = block.run
    with block, pytest.raises(TorchprofError, match="not ended"):
        _ = block.run
    assert block.run is block.run


def test_a_long_start_gives_a_warning(model: Mlp) -> None:

    def program() -> None:
        time.sleep(0.2)
        model(torch.rand(1, 4))

    [warned] = [warning for warning in profiled(program).warnings if warning.code == "long_start"]
    assert 199_000_000 <= warned.facts["start_ns"] <= warned.facts["wall_ns"]
    run = profiled(lambda: (program(), program()), warmup_calls=1)
    assert not any("before the first model call" in warning for warning in sentences(run))


def sleeps(seconds: float) -> None:
    time.sleep(seconds)


class Sleeper(Layers):
    """Sleeps between its two layers, and in a label."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        sleeps(0.2)
        with torch.profiler.record_function("NAP"):
            sleeps(0.1)
        return self.last(x)


def test_samples_show_where_python_is_between_operators() -> None:
    """Samples by layer and label are at the line that slept, in proportion to the time."""
    line = sleeps.__code__.co_firstlineno + 1

    def program() -> None:
        model = Sleeper(first=nn.Linear(4, 4), last=nn.Linear(4, 4))
        model(torch.rand(1, 4))
        sleeps(0.3)

    run = profiled(program)
    seen: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for row in run.rows:
        if (
            row.frames
            and row.frames[-1].kind == "python"
            and row.frames[-1].name.endswith(f":{line} sleeps → time.sleep")
        ):
            where = row.layer.name if row.layer else "(outside)"
            seen[where, tuple(frame.name for frame in row.frames[:-1])] += row.calls
    assert set(seen) == {("Sleeper", ()), ("Sleeper", ("NAP",)), ("(outside)", ())}
    # 5 ms each. A busy machine makes sleeps longer, so only their order is certain.
    assert seen["Sleeper", ("NAP",)] < seen["Sleeper", ()] < seen["(outside)", ()]
    assert f":{line} sleeps" in run.report("top").splitlines()[2]


# Cycles


@pytest.mark.parametrize("accumulate", [1, 3])
def test_the_sum_of_many_cycles_equals_one_cycle(accumulate: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def body(model: nn.Module) -> Callable[[], None]:
        def run() -> None:
            train(model, steps=4, accumulate=accumulate)
            with torch.no_grad():
                model(torch.rand(2, 4))
                model(torch.rand(2, 4))

        return run

    profiled(body(Mlp()))
    options = {"with_flops": True, "profile_memory": True}
    once = profiled(body(Mlp()), **options)
    monkeypatch.setattr(program, "_CYCLE_S", 1e-9)
    monkeypatch.setattr(program, "_PATIENCE", float("inf"))
    often = profiled(body(Mlp()), **options)
    assert once.meta.cycles == 1 and often.meta.cycles == 1 + 4 + 2
    fields = ["macs", "flops", "uncounted", "cpu_allocated"]
    assert costs(often, *fields) == costs(once, *fields)
    assert [layer.output_shapes for layer in often.layers] == [layer.output_shapes for layer in once.layers]
    spreads = [
        {key: spread.count for key, spread in run.samples.items() if key.measure == "cpu_ns"} for run in (once, often)
    ]
    assert spreads[0] == spreads[1]


@pytest.mark.usefixtures("short_cycles")
def test_a_model_that_is_first_called_in_a_later_cycle() -> None:
    def program() -> None:
        train(Mlp(), 2)
        train(Several(), 3)

    run = profiled(program)
    assert calls(run)["Mlp.fc1"] == 2 and calls(run)["Several.shared"] == 9
    assert run.meta.cycles >= 5


@pytest.mark.usefixtures("short_cycles")
def test_a_cycle_may_end_inside_ranges_of_the_program() -> None:
    """They are closed there and opened again. A range that is open across two sessions of torch breaks the process."""

    def body() -> None:
        model = Mlp()
        with record_function("loop"):
            for _ in range(4):
                with torch.no_grad(), record_function("forward"):
                    model(torch.rand(2, 4))

    run = profiled(body)
    assert run.meta.cycles == 1 + 4 and calls(run)["Mlp"] == 4
    of_layers = [row for row in run.rows if row.layer is not None]
    assert {tuple(frame.name for around in row.within for frame in around.frames) for row in of_layers} == {
        ("loop", "forward")
    }
    assert sum(run.rows.columns["cpu_ns"]) == run.meta.wall_ns


def test_a_function_with_a_range_is_scripted_inside_the_block() -> None:
    def program() -> None:
        @torch.jit.script
        def double(x: Tensor) -> Tensor:
            with record_function("in a script"):
                return x * 2

        assert double(torch.ones(1)).item() == 2

    assert "in a script" in {frame.name for row in profiled(program).rows for frame in row.frames}


def test_without_an_optimizer_a_cycle_ends_after_a_longer_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_CYCLE_S", 1e-9)
    run = profiled(lambda: [Mlp()(torch.rand(1, 4)) for _ in range(7)])
    assert run.meta.cycles == 1 + 4 and calls(run)["Mlp"] == 1


def test_a_cycle_ends_after_many_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_CYCLE_EVENTS", 300)
    model = Mlp().eval()

    def program_body() -> None:
        with torch.no_grad():
            for _ in range(50):
                model(torch.rand(1, 4))

    run = profiled(program_body)
    events = sum(run.rows.columns["calls"])
    assert calls(run)["Mlp"] == 50
    assert events / 300 / 2 < run.meta.cycles <= events / 300 * 2 + 2


def test_a_cycle_does_not_end_inside_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_CYCLE_S", 1e-9)
    model = nn.Sequential(Mlp(), nn.Linear(2, 2))

    def body() -> None:
        x = torch.rand(3, 4, requires_grad=True)
        for _ in range(3):
            hidden = torch.utils.checkpoint.checkpoint(model[0], x, use_reentrant=False)
            hidden = torch.utils.checkpoint.checkpoint(model[0], hidden @ torch.rand(2, 4), use_reentrant=False)
            hidden.sum().backward()

    run = profiled(body)
    assert run.tree("recompute").calls == 6


# Other profilers


def keys(profiler: Any) -> Counter[str]:
    return Counter({event.key: event.count for event in profiler.key_averages() if "torchprof" not in event.key})


def with_torchs_profiler(model: nn.Module) -> Any:
    with torch.profiler.profile() as profiler:
        train(model)
    return keys(profiler)


def with_a_schedule(model: nn.Module) -> Any:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    ready: list[Any] = []
    with torch.profiler.profile(schedule=schedule, on_trace_ready=lambda one: ready.append(keys(one))) as profiler:
        for _ in range(9):
            train(model, 1)
            profiler.step()
    assert len(ready) == 2
    return ready


def with_the_autograd_profiler(model: nn.Module) -> Any:
    found = []
    for _ in range(2):
        with torch.autograd.profiler.profile() as profiler:
            train(model)
        found.append(keys(profiler))
    return found


def with_a_profile(model: nn.Module) -> Any:
    with torchprof.Profile(model) as profiler:
        train(model)
    return costs(profiler.run)


def with_labels_for_tools(model: nn.Module) -> Any:
    with torch.autograd.profiler.emit_itt():
        train(model)
    return True


@pytest.mark.parametrize("warmup_calls", [0, 2])
@pytest.mark.parametrize(
    "others", [with_torchs_profiler, with_a_schedule, with_the_autograd_profiler, with_a_profile, with_labels_for_tools]
)
def test_recording_ends_when_another_profiler_starts(
    others: Callable[[nn.Module], Any], warmup_calls: int, model: Mlp
) -> None:
    expected = others(Mlp())
    got: list[Any] = []

    def program() -> None:
        train(model, 4)
        got.append(others(model))
        train(model)

    run = profiled(program, warmup_calls=warmup_calls)
    assert got == [expected]
    assert sentences(run)[0].startswith("The recording ended early: the program started a profiler of its own")
    waited = 1 if others is with_a_schedule else 0  # its first step is a wait step, so our recording goes on
    assert calls(run)["Mlp"] == 4 - warmup_calls + waited
    again = profiled(lambda: train(model))
    assert calls(again)["Mlp"] == 3 and not any("The recording ended early" in warning for warning in sentences(again))


def test_another_profiler_may_start_before_we_record(model: Mlp) -> None:
    got: list[Any] = []

    def program() -> None:
        got.append(with_torchs_profiler(model))
        train(model)

    run = profiled(program, warmup_calls=2)
    assert got == [with_torchs_profiler(model)]
    gave_way, nothing, *_ = sentences(run)
    assert "The recording ended early" in gave_way and nothing.startswith("Nothing was recorded") and not calls(run)


def test_entering_inside_another_profiler_raises() -> None:
    call = nn.Module.__call__
    with torch.autograd.profiler.profile(), pytest.raises(TorchprofError, match="Another profiler is active"):
        Program().__enter__()
    assert nn.Module.__call__ is call


# What is restored


def test_everything_is_restored_afterwards(model: Mlp) -> None:
    before = (nn.Module.__call__, Mlp.forward, torch.autograd.profiler.profile._start_trace, dict(vars(model)))
    ranges = dict(vars(record_function))
    with pytest.raises(ZeroDivisionError), Program():
        train(model)
        assert nn.Module.__call__ is not before[0] and Mlp.forward is not before[1]
        raise ZeroDivisionError
    after = (nn.Module.__call__, Mlp.forward, torch.autograd.profiler.profile._start_trace, dict(vars(model)))
    assert after == before
    assert dict(vars(record_function)) == ranges
    assert not torch.autograd._profiler_enabled()
    assert not _global_optimizer_post_hooks
    assert not [thread for thread in threading.enumerate() if thread.name == "torchprof"]


def test_a_kept_reference_to_our_call_still_calls_the_module(model: Mlp) -> None:
    """torch.fx stores the ``nn.Module.__call__`` of the time when it is imported."""
    with Program():
        kept = nn.Module.__call__
    x = torch.rand(1, 4)
    assert torch.equal(kept(model, x), model(x))


def test_a_replacement_of_our_call_is_not_undone() -> None:
    before = nn.Module.__call__
    try:
        with Program():
            ours = nn.Module.__call__
            theirs = lambda module, *args: ours(module, *args)  # noqa: E731
            nn.Module.__call__ = theirs  # type: ignore[method-assign, assignment]
        assert nn.Module.__call__ is theirs
        assert nn.Linear(4, 4)(torch.rand(1, 4)).shape == (1, 4)
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def test_models_that_the_program_frees_are_freed() -> None:
    alive: list[int] = []
    models: list[weakref.ref[nn.Module]] = []

    def program() -> None:
        for _ in range(4):
            model = Mlp()
            models.append(weakref.ref(model))
            train(model)
            del model
            gc.collect()
            alive.append(sum(ref() is not None for ref in models))

    run = profiled(program)
    assert [calls(run)[root.name] for root in run.roots] == [3, 3, 3, 3]
    assert [layer.params for layer in run.layers if layer.path[-1] == "fc1"] == [40] * 4
    assert alive == [0] * 4


@pytest.mark.skipif(not hasattr(os, "fork") or not Path("/proc/self/statm").exists(), reason="no fork, or no figures")
def test_a_forked_process_records_nothing() -> None:
    """Workers of a DataLoader live long, so data that is never read must not accumulate in them."""

    def pages() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1])

    read, write = os.pipe()
    with Program():
        torch.ones(2) + 1
        child = os.fork()
        if not child:
            signal.alarm(60)
            x, before = torch.ones(2), pages()
            for _ in range(20_000):
                x = x + 1
            os.write(write, str((pages() - before) * resource.getpagesize()).encode())
            os._exit(0)
        os.waitpid(child, 0)
    assert int(os.read(read, 20)) < 10_000 * 1000


# Start-up


def start_up_of(run: Run) -> dict[str, int]:
    """The facts of the warning about start-up."""
    [facts] = [warning.facts for warning in run.warnings if warning.code == "start_up"]
    return dict(facts)


def test_what_runs_before_the_first_call_and_the_first_step_is_left_out() -> None:
    def program() -> None:
        torch.rand(50, 50).sin().sum()
        train(Mlp(), steps=6)

    began = time.perf_counter_ns()
    run = profiled(program, warmup_calls=None)
    took = time.perf_counter_ns() - began
    assert calls(run)["Mlp"] == 5 and run.meta.cycles == 1
    assert "aten::sin" not in {frame.name for row in run.rows for frame in row.frames}
    facts = start_up_of(run)
    assert facts["calls"] == 1 and facts["before_ns"] > 0 and facts["first_ns"] > 0
    assert facts["before_ns"] + facts["first_ns"] + run.meta.wall_ns == facts["all_ns"] < took


def test_without_its_start_up_a_program_has_the_rows_of_a_profile_of_its_later_steps() -> None:
    model, other = Mlp(), Mlp()
    run = profiled(lambda: train(model, steps=5), warmup_calls=None, with_flops=True)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    with torchprof.Profile(other, with_flops=True) as prof:
        for _ in range(4):
            other(torch.rand(3, 4)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    of_layers = [
        Counter({key: n for key, n in costs(one, "macs").items() if key[0] != "(outside)"}) for one in (run, prof.run)
    ]
    assert of_layers[0] == of_layers[1] and of_layers[0]


@pytest.mark.parametrize(
    ("steps", "accumulate", "recorded", "first"),
    [(3, 1, 3, 0), (4, 1, 3, 1), (2, 2, 4, 0), (3, 2, 4, 2), (1, 1, 1, 0)],
    ids=["too few follow", "enough follow", "two calls follow", "a step of two calls", "one step"],
)
def test_the_first_step_is_left_out_if_enough_calls_follow(
    steps: int, accumulate: int, recorded: int, first: int
) -> None:
    run = profiled(lambda: train(Mlp(), steps, accumulate), warmup_calls=None)
    assert calls(run)["Mlp"] == recorded
    assert start_up_of(run)["calls"] == first


def test_without_gradients_a_step_is_a_call() -> None:
    def program() -> None:
        model = Mlp()
        with torch.no_grad():
            for _ in range(5):
                model(torch.rand(3, 4))

    assert calls(profiled(program, warmup_calls=None))["Mlp"] == 4


def test_a_first_step_without_an_end_is_not_left_out() -> None:
    """With gradients, but without a step of an optimizer: the backward of the first call may still come."""

    def program() -> None:
        model = Mlp()
        losses = [model(torch.rand(3, 4)).sum() for _ in range(5)]
        sum(losses).backward()  # type: ignore[union-attr]

    run = profiled(program, warmup_calls=None)
    assert calls(run)["Mlp"] == 5 and start_up_of(run)["calls"] == 0
    assert run.tree("backward").total.cpu_ns > 0


def test_a_program_without_a_model_has_everything() -> None:
    run = profiled(lambda: torch.rand(50, 50).sin(), warmup_calls=None)
    assert "aten::sin" in {frame.name for row in run.rows for frame in row.frames}
    assert not any(warning.code == "start_up" for warning in run.warnings)


@pytest.mark.parametrize("most", [1, 2, 4])
def test_the_first_step_does_not_count_for_max_calls(most: int) -> None:
    assert calls(profiled(lambda: train(Mlp(), steps=9), warmup_calls=None, max_calls=most))["Mlp"] == most


def test_start_up_is_left_out_of_a_program_of_many_cycles(short_cycles: None) -> None:
    run = profiled(lambda: train(Mlp(), steps=6), warmup_calls=None)
    assert calls(run)["Mlp"] == 5 and run.meta.cycles == 5 and start_up_of(run)["calls"] == 1


def test_the_first_step_of_several_models_ends_where_the_first_one_is_called_again() -> None:
    """Between the calls of the critic, backward through the generator's output follows: it must be recorded with it."""

    def program() -> None:
        generator, critic = nn.Sequential(nn.Linear(2, 8), nn.Linear(8, 4)), Mlp()
        of_generator, of_critic = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (generator, critic))
        for _ in range(5):
            fake = generator(torch.rand(5, 2))
            critic(fake.detach()).mean().backward()
            of_critic.step()
            critic(fake).mean().backward()
            of_generator.step()

    run = profiled(program, warmup_calls=None)
    assert calls(run)["Sequential"] == 4 and calls(run)["Mlp"] == 8 and start_up_of(run)["calls"] == 3
    linear = [row for row in run.rows if any("AddmmBackward" in frame.name for frame in row.frames)]
    layers = {row.layer.name if row.layer else "(outside)" for row in linear}
    assert layers == {"Sequential.0", "Sequential.1", "Mlp.fc1", "Mlp.fc2"}


# Memory in use, without profile_memory


@pytest.mark.parametrize(
    ("megabytes", "growth"),
    [
        ([100, 300, 310, 350, 390, 430], 40),  # the first two starts of cycles do not count
        ([100, 100, 100, 120, 140, 160], 20),
        ([100, 300, 300, 300, 400, 500], 0),  # not in each cycle
        ([100, 300, 310, 320, 330, 340], 0),  # too little
        ([100, 200, 300, 400], 0),  # too few cycles
    ],
)
def test_memory_that_grows_from_cycle_to_cycle_is_a_warning(
    megabytes: list[float], growth: int, model: Mlp, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``growth``: by how much a call makes it grow, of the calls between the cycles."""
    in_use = iter(megabytes)
    monkeypatch.setattr("torchprof.profile.program.bytes_in_use", lambda: round(next(in_use) * 2**20))
    monkeypatch.setattr("torchprof.profile.program._CYCLE_EVENTS", 1)
    with Program() as program, torch.no_grad():
        for _ in megabytes[1:]:
            model(torch.rand(4, 4))
    found = [warning.facts for warning in program.run.warnings if warning.code == "memory_grows"]
    assert found == [{"nbytes": growth * 2**20}] * bool(growth)
