"""``from_trace``: the run of a trace equals the live run of the same session."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.models import (
    Checkpointed,
    DoublesInside,
    Functional,
    Layers,
    Mlp,
    PackedLstm,
    Raises,
    Recursive,
    Several,
    Tied,
    WritesToViews,
)
from build.traced_runs import HAS_LIST_SHAPES, X, annotated, assert_same, names_of, settle, training
from build.warnings import sentences
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof.run.run import Run
from torchprof.run.words import Frame, FrameKind


def profiled(model: Any, step: Callable[[], Any], path: Path, *, steps: int = 0, **options: Any) -> Run:
    """The same inside a ``torchprof.Profile``, which marks steps."""
    options = {"profile_memory": True, "with_flops": True, "record_shapes": True, **options}
    with torchprof.Profile(model, lines=False, **options) as prof:
        step()
        for _ in range(steps):
            prof.step()
            step()
    prof.export_chrome_trace(path)
    return prof.run


# Models and training steps


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_run_of_a_trace_equals_the_live_run(name: str, trace: Path) -> None:
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
    step = settle(training(model, *inputs))
    live = annotated(model, step, trace)
    assert len(live.rows) > 20
    assert_same(live, torchprof.from_trace(trace, model))
    assert_same(live, torchprof.from_trace(trace), with_model=False)


def of_a_view(model: nn.Module) -> Callable[[], None]:
    """A training step whose input requires a gradient."""
    x = X.clone().requires_grad_()
    return training(model, x)


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[], None]]]] = {
    "several": lambda: with_step(Several()),
    "recursive": lambda: with_step(Recursive()),
    "functional": lambda: with_step(Functional()),
    "writes to views": lambda: with_step(WritesToViews(), of_a_view),
    "custom function": lambda: with_step(DoublesInside(), of_a_view),
    "reentrant checkpoint": lambda: with_step(Checkpointed(True)),
    "checkpoint": lambda: with_step(Checkpointed(False)),
    "packed LSTM": lambda: with_step(PackedLstm(), lambda m: training(m, torch.rand(2, 4, 3), torch.tensor([4, 2]))),
}


def with_step(
    model: nn.Module, step: Callable[[nn.Module], Callable[[], None]] = lambda model: training(model, X)
) -> tuple[nn.Module, Callable[[], None]]:
    return model, step(model)


@pytest.mark.parametrize("name", MODELS)
def test_the_trace_of_a_profile_equals_its_run(name: str, trace: Path) -> None:
    """Including its steps, timeline and memory."""
    model, step = MODELS[name]()
    settle(step)
    live = profiled(model, step, trace, steps=2, with_timeline=True)
    read = torchprof.from_trace(trace, model, with_timeline=True)
    assert read.meta.steps == 2
    assert_same(live, read)
    assert read.timeline == live.timeline
    assert read.timeline is not None and read.timeline.spans is not None
    assert_same(live, torchprof.from_trace(trace), with_model=False)


def test_a_shared_module_has_all_its_paths_only_with_the_model(trace: Path) -> None:
    """A label has only the first path of a module; the model has all paths."""
    model, step = with_step(Tied())
    settle(step)
    live = annotated(model, step, trace)
    assert_same(live, torchprof.from_trace(trace, model))
    calls = {node.layer.name: node.calls for node in torchprof.from_trace(trace).tree("forward").walk() if node.layer}
    assert calls == {"Tied": 1, "Tied.left": 1, "Tied.right": 2, "Tied.left.inner": 3}


def test_a_trace_without_shapes_and_memory_gives_a_run_without_them(trace: Path) -> None:
    model = Mlp()
    live = annotated(model, training(model, X), trace, record_shapes=False, profile_memory=False)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)
    assert read.meta.measured == ("cpu_ns",)
    assert not read.memory


def test_calls_that_raise_equal_the_live_run(trace: Path) -> None:
    model = Raises()

    def step() -> None:
        for _ in range(3):
            try:
                model(X).sum().backward()
            except ValueError:
                model.calls += 0
        model.calls = 0

    settle(step)
    live = profiled(model, step, trace)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)
    assert read.tree("forward").calls == 3


def test_selected_paths_and_several_models_equal_the_live_run(trace: Path) -> None:
    models = [Mlp(), Mlp(), nn.Linear(2, 4)]

    def step() -> None:
        models[1](models[2](models[0](X))).sum().backward()

    settle(step)
    live = profiled(models, step, trace)
    assert_same(live, torchprof.from_trace(trace, models))
    some = ["Mlp.fc1", "Linear"]
    live = profiled(models, step, trace, paths=some)
    assert_same(live, torchprof.from_trace(trace, models, paths=some))


def test_labels_inside_selected_layers_are_no_rows(trace: Path) -> None:
    """A session with paths= would not have labelled them: their operators count as the selected layer's self time."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    step = settle(training(model, X))
    annotated(model, step, trace)
    read = torchprof.from_trace(trace, model, paths=["0"])
    assert {row.layer.name for row in read.rows if row.layer} == {"Sequential.0"}
    assert not [frame for row in read.rows for frame in row.frames if frame.name.startswith("torchprof:")]
    assert not [warning for warning in sentences(read) if warning.startswith("Labeled")]
    live = profiled(model, step, trace, paths=["0"])

    def calls(run: Run) -> Counter[Any]:
        """By layer, phase and frames, without signatures."""
        found: Counter[Any] = Counter()
        for row in run.rows:
            if row.layer:
                found[row.layer.name, row.phase, tuple(frame[:2] for frame in row.frames)] += row.calls
        return found

    assert calls(read) == calls(live)


def test_warmup_inside_a_step_equals_the_live_run(trace: Path) -> None:
    model = Mlp()
    live = profiled(model, training(model, X), trace, warmup=2, steps=5)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)


def test_a_training_loop_equals_the_live_run(trace: Path) -> None:
    model = Mlp()
    optimizer = torch.optim.Adam(model.parameters())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.rand(8, 4)), batch_size=4)

    def step() -> None:
        for (batch,) in data:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()

    settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


def test_ranges_of_the_user_stay_labels(trace: Path) -> None:
    model = Mlp()

    def step() -> None:
        with record_function("## step ##"), record_function("aten::add"):
            training(model, X)()

    settle(step)
    live = annotated(model, step, trace)
    assert_same(live, torchprof.from_trace(trace, model))
    assert any(frame == Frame(FrameKind.LABEL, "aten::add") for row in live.rows for frame in row.frames)


def test_double_backward_equals_the_live_run(trace: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def step() -> None:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


def test_unusual_operators_equal_the_live_run(trace: Path) -> None:
    """Inputs of every type: lists, strings, infinities, complex numbers, large integers; vmap, jvp."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def step() -> None:
        torch.func.vmap(model)(X)
        torch.func.jacrev(model)(X[0])
        torch.func.jvp(model, (X,), (X,))
        torch.autograd.functional.hessian(lambda y: model(y).sum(), X[0])
        torch.full((2,), float("nan")), torch.full((2,), 1 + 2j), torch.arange(2**62, 2**62 + 3)
        torch.ones(3).clamp(min=-float("inf"), max=1e-7)
        torch.ones(3)[torch.tensor([True, False, True])]
        if HAS_LIST_SHAPES:  # otherwise only the trace has FLOPs for it
            torch._foreach_add([X, X], [X, X])
        torch.stft(torch.rand(64), 16, return_complex=True, window=torch.ones(16))
        nn.functional.interpolate(torch.ones(1, 1, 4, 4), scale_factor=2.5, mode="bilinear")
        torch.cat([model(X), X]).split([2, 4])

    settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)], ids=["script", "trace"])
def test_torchscript_equals_the_live_run(make: Callable[[nn.Module], Any], trace: Path) -> None:
    """Some operators have no input: the file has no inputs of them."""

    class Net(Layers):
        def __init__(self) -> None:
            super().__init__(first=nn.Linear(4, 4), scripted=make(nn.Sequential(nn.Linear(4, 4), nn.Tanh())))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(self.first(x))

    model = Net()
    step = training(model, X)
    for _ in range(4):
        settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


@pytest.mark.usefixtures("dynamo")
def test_a_compiled_model_equals_the_live_run(trace: Path) -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="eager")
    step = settle(training(compiled, X))
    assert_same(annotated(compiled, step, trace), torchprof.from_trace(trace, compiled))


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("record", [annotated, profiled])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compilation_equals_the_live_run(backend: str, record: Callable[..., Run], trace: Path) -> None:
    """A user's range with the name of one of torch.compile's ranges stays a label, next to it and around it."""
    model = Mlp()
    compiled: Any = torch.compile(model, backend=backend)

    def step() -> None:
        with record_function("dynamo"):
            torch.ones(2).mul(3)
        with record_function("mine"):
            training(compiled, X)()
        with record_function("dynamo"):
            torch.ones(2).mul(3)

    live = record(compiled, step, trace)
    assert_same(live, torchprof.from_trace(trace, compiled))
    label, compiling = Frame(FrameKind.LABEL, "dynamo"), Frame(FrameKind.REGION, "compiling")
    rows = [row for row in live.rows if label in row.frames]
    assert sum(row.calls for row in rows if row.frames == (label,)) == 2
    assert sum(row.calls for row in rows if [frame.name for frame in row.frames] == ["dynamo", "aten::mul"]) == 2
    assert not [row for row in rows if compiling in row.frames]
    at_work = [row for row in live.rows if row.frames and row.frames[-1] == compiling]
    assert at_work and all(row.cost.cpu_ns > 0 for row in at_work)
    assert not [row for row in live.rows if compiling in row.frames[:-1]]
    assert not [row for row in live.rows if any(compiling in around.frames for around in row.within)]


def test_a_ddp_model_equals_the_live_run(trace: Path, world_of_one: None) -> None:
    """The range of gloo's all-reduce ends on another thread, and the file has its inputs."""
    model = nn.parallel.DistributedDataParallel(Mlp())
    train = training(model, X)

    def step() -> None:
        train()
        # DDP waits until the tensor is reduced, not until gloo's thread has ended the range: that can come after
        # the recording. A barrier waits for both, and for its own range.
        torch.distributed.barrier()

    settle(step)
    settle(step)
    live = annotated(model, step, trace)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)
    assert any(frame.name == "gloo:all_reduce" for row in read.rows for frame in row.frames)
    assert dict(read.meta.environment)["ranks"] == "1, gloo"


def test_backward_of_two_forward_threads_equals_the_live_run(trace: Path) -> None:
    """The sequence numbers of both threads are the same; only the arrows distinguish their nodes."""
    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:
        pytest.skip("this torch records one thread")
    models = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))]
    losses: dict[int, Tensor] = {}

    def forward(at: int) -> None:
        losses[at] = models[at](X).sum()

    def step() -> None:
        threads = [threading.Thread(target=forward, args=(at,)) for at in range(2)]
        for thread in threads:
            thread.start()
            thread.join(60)
        (losses[0] + losses[1]).backward()

    settle(step)
    live = annotated(models, step, trace, profile_memory=False, experimental_config=config)
    assert_same(live, torchprof.from_trace(trace, models))
    for root in range(2):
        assert live.tree("backward", root).total.cpu_ns > 0


def test_a_sample_of_many_calls_equals_that_of_the_live_run(trace: Path) -> None:
    """Start times decide which calls are in the sample: those of the trace, plus its base time."""
    model = nn.Linear(4, 4)
    live = annotated(model, lambda: [model(X) for _ in range(300)], trace)
    read = torchprof.from_trace(trace, model)
    (calls,) = {spread.count for key, spread in read.samples.items() if key.measure == "cpu_ns"}
    assert calls == 300
    assert_same(live, read)


class Rounds(torch.autograd.Function):
    """A function with two ranges in its backward: a new name, and a name that forward has, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with record_function("helper"):
            return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        with record_function("all to all"):
            gradient = gradient + 1
        with record_function("helper"):
            return gradient * 2


# Ranges inside backward


@pytest.mark.parametrize("reentrant", [None, True, False], ids=str)
def test_a_range_in_backward_is_recompute_if_a_checkpoint_runs_it(reentrant: bool | None, trace: Path) -> None:
    """A range that a checkpoint runs again is recompute; a range in the backward of a user's function is not."""
    linear = nn.Linear(4, 4)

    def block(x: Tensor) -> Tensor:
        with record_function("block"):
            return linear(x).relu()

    def step() -> None:
        with record_function("forward"):
            y = Rounds.apply(X.clone().requires_grad_())
            y = block(y) if reentrant is None else checkpoint(block, y, use_reentrant=reentrant)
        y.sum().backward()

    settle(step)
    with torch.profiler.profile() as theirs:
        step()
    theirs.export_chrome_trace(str(trace))
    run = torchprof.from_trace(trace)
    assert names_of(run) == ["forward", "forward.helper", "forward.block"]
    again = {row.layer.name for row in run.rows if row.layer and row.phase == "recompute"}
    assert again == (set() if reentrant is None else {"forward.block"})
    calls = {node.layer.name: node.calls for node in run.tree("recompute").walk()}
    assert calls["forward.block"] == (reentrant is not None)
    labels = {
        (row.layer and row.layer.name, row.phase, row.frames[-1].name): row.calls
        for row in run.rows
        if row.frames and row.frames[-1].kind == "label"
    }
    assert labels == {("forward", "backward", "all to all"): 1, ("forward", "backward", "helper"): 1}
    assert not [row for row in run.rows if row.layer is None and row.frames and row.frames[-1].name == "aten::mul"]
    if reentrant is None:
        assert "checkpoint" not in run.report("findings")


def test_a_range_in_the_backward_of_a_live_run_is_a_label_of_its_layer(trace: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rounds.apply(x)

    model = Net()
    with torchprof.annotate(model), torch.profiler.profile() as theirs:
        model(X.clone().requires_grad_()).sum().backward()
    theirs.export_chrome_trace(str(trace))
    with torchprof.Profile(model, lines=False) as prof:
        model(X.clone().requires_grad_()).sum().backward()
    for run in (torchprof.from_profiler(theirs, model), torchprof.from_trace(trace), prof.run):
        assert run.phases() == ("forward", "backward")
        labels = {
            (row.layer.name, row.phase, row.frames[-1].name)
            for row in run.rows
            if row.layer and row.frames[-1:] and row.frames[-1].kind == "label"
        }
        assert labels == {
            ("Net", "forward", "helper"),
            ("Net", "backward", "all to all"),
            ("Net", "backward", "helper"),
        }
