"""``from_trace``: against the live run of the same session, against a plain pass over the JSON, and what it refuses."""

from __future__ import annotations

import gc
import gzip
import itertools
import json
import os
import random
import re
import subprocess
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.models import (
    Checkpointed,
    DoublesInside,
    Functional,
    Mlp,
    PackedLstm,
    Raises,
    Recursive,
    Several,
    Tied,
    WritesToViews,
)
from build.places import TRACES
from build.trace_files import session, trace_event, write
from build.warnings import sentences
from torch import Tensor, nn
from torch.profiler import record_function
from torch.utils.checkpoint import checkpoint

import torchprof
from torchprof import reports
from torchprof.analyze import records
from torchprof.cli import main
from torchprof.reports.page.data import page_data
from torchprof.reports.page.tree import Take
from torchprof.run.cost import Cost
from torchprof.run.cycles import add_cycle
from torchprof.run.memory import Memory
from torchprof.run.run import Run
from torchprof.run.words import Frame

A100 = TRACES / "a100_ddp_train_rank0_of_2.json.gz"
MI250 = TRACES / "mi250_toy_train_rocm62.json.gz"
BOTH = pytest.mark.parametrize("path", [A100, MI250], ids=["a100", "mi250"])
FOREIGN = pytest.mark.skipif(not TRACES.is_dir(), reason="the folder of traces is not there")

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
HOST_WORK = ("cpu_op", "user_annotation", "cuda_runtime")
KNOWS_LISTS = hasattr(torch._C._autograd._KinetoEvent, "structured_input_shapes")  # torch 2.4 does not

X = torch.rand(3, 4)


# Two runs, field by field


def known_frames(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """With the shapes of lists of tensors as unknown where a live run does not know them."""
    if KNOWS_LISTS:
        return tuple(frames)
    return tuple(
        frame
        if frame.signature is None
        else frame._replace(
            signature=frame.signature._replace(
                shapes=tuple(
                    None if dtype == "TensorList" else shape
                    for shape, dtype in zip(frame.signature.shapes, frame.signature.dtypes)
                )
            )
        )
        for frame in frames
    )


def path_of(run: Run, layer: int) -> Any:
    return run.layers[layer].path if layer >= 0 else layer


def rows_of(run: Run) -> dict[Any, tuple[int, Cost]]:
    rows: dict[Any, tuple[int, Cost]] = {}
    for row in run.rows:
        within = tuple((path_of(run, around.layer), around.phase, known_frames(around.frames)) for around in row.within)
        path = row.layer.path if row.layer else None
        key = path, row.selected, row.phase, within, known_frames(row.frames), row.device, row.rank
        calls, cost = rows.get(key, (0, Cost()))
        rows[key] = calls + row.calls, cost + row.cost
    assert len(rows) == len(run.rows) or not KNOWS_LISTS
    return rows


def samples_of(run: Run) -> dict[Any, Any]:
    return {(path_of(run, key.layer), *key[1:]): spread for key, spread in run.samples.items()}


def memory_of(run: Run) -> list[Memory]:
    """Without what only the process knows: what there was at the start, and what its allocators say."""
    return [replace(memory, before=None, allocator=()) for memory in run.memory]


def layers_of(run: Run) -> list[Any]:
    """Without what no trace tells of a call: shapes and mode."""
    of_calls: dict[str, Any] = {"input_shapes": (), "output_shapes": (), "output_bytes": None, "same_shapes": None}
    return [replace(layer, training=None, **of_calls) for layer in run.layers]


def warnings_of(run: Run) -> list[str]:
    """Without what the labels cost, and whether a slow first call had other shapes: only the process knows that."""
    warnings = [warning for warning in sentences(run) if not warning.startswith("The labels themselves")]
    return [re.sub(r"^(The first call of .* on average): .*", r"\1", warning) for warning in warnings]


def assert_same(live: Run, read: Run, *, with_model: bool = True) -> None:
    """All that both can know is equal: every row, every sample, memory, steps, layers."""
    assert rows_of(read) == rows_of(live)
    assert samples_of(read) == samples_of(live)
    assert read.device_times == live.device_times
    for name in ("rank", "device", "requested", "measured", "cycles", "steps", "busy_ns", "flags"):
        assert getattr(read.meta, name) == getattr(live.meta, name), name
    if with_model:
        assert layers_of(read) == layers_of(live)
        assert memory_of(read) == memory_of(live)
        assert read.meta.model == live.meta.model
        assert read.meta.paths == live.meta.paths
        assert warnings_of(read) == warnings_of(live)


# Recording


def settle(step: Callable[[], Any]) -> None:
    """What a first call does differs from what later ones do; and let no old garbage be freed inside a recording."""
    step()
    gc.collect()


def annotated(model: Any, step: Callable[[], Any], path: Path, **options: Any) -> Run:
    """The live run of a step under torch's own profiler, and its trace in ``path``."""
    options = {"record_shapes": True, "profile_memory": True, **options}
    with torchprof.annotate(model), torch.profiler.profile(**options) as theirs:
        step()
    theirs.export_chrome_trace(str(path))
    return torchprof.from_profiler(theirs, model)


def profiled(model: Any, step: Callable[[], Any], path: Path, *, steps: int = 0, **options: Any) -> Run:
    """The same inside a Profile of ours, which marks steps."""
    options = {"profile_memory": True, "with_flops": True, "record_shapes": True, **options}
    with torchprof.Profile(model, **options) as prof:
        step()
        for _ in range(steps):
            prof.step()
            step()
    prof.export_chrome_trace(path)
    return prof.run


def training(model: nn.Module, *inputs: Any) -> Callable[[], None]:
    def step() -> None:
        out = model(*inputs)
        (out if isinstance(out, Tensor) else out[0]).sum().backward()
        model.zero_grad()

    return step


def events_in(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = trace_in(path)["traceEvents"]
    return found


@cache
def foreign(path: Path) -> Run:
    return torchprof.from_trace(path)


def trace_in(path: Path) -> dict[str, Any]:
    """The file, its numbers exact."""
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found: dict[str, Any] = json.loads(data, parse_float=Decimal)
    return found


def ns(microseconds: Any) -> int:
    return int(Decimal(microseconds) * 1000)


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace.json"


# The live run is the truth


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_run_of_a_trace_is_the_live_one(name: str, trace: Path) -> None:
    torch.manual_seed(0)
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()
    step = training(model, *inputs)
    settle(step)
    live = annotated(model, step, trace)
    assert len(live.rows) > 20
    assert_same(live, torchprof.from_trace(trace, model))
    assert_same(live, torchprof.from_trace(trace), with_model=False)


def of_a_view(model: nn.Module) -> Callable[[], None]:
    """Its input needs a gradient, too."""
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
def test_special_models_are_read_alike(name: str, trace: Path) -> None:
    model, step = MODELS[name]()
    settle(step)
    live = annotated(model, step, trace)
    assert_same(live, torchprof.from_trace(trace, model))
    assert_same(live, torchprof.from_trace(trace), with_model=False)


@pytest.mark.parametrize("name", MODELS)
def test_our_own_sessions_are_read_alike(name: str, trace: Path) -> None:
    """With its steps, its spans and its memory."""
    model, step = MODELS[name]()
    settle(step)
    live = profiled(model, step, trace, steps=2, with_timeline=True)
    read = torchprof.from_trace(trace, model, with_timeline=True)
    assert read.meta.steps == 2
    assert_same(live, read)
    assert read.timeline == live.timeline
    assert read.timeline is not None and read.timeline.spans is not None


def test_a_shared_module_has_its_paths_with_the_model_alone(trace: Path) -> None:
    """A label names the first path of a module; which one it was called by, the model tells."""
    model, step = with_step(Tied())
    settle(step)
    live = annotated(model, step, trace)
    assert_same(live, torchprof.from_trace(trace, model))
    calls = {node.layer.name: node.calls for node in torchprof.from_trace(trace).tree("forward").walk() if node.layer}
    assert calls == {"Tied": 1, "Tied.left": 1, "Tied.right": 2, "Tied.left.inner": 3}


def test_without_shapes_and_memory_there_are_none(trace: Path) -> None:
    model = Mlp()
    live = annotated(model, training(model, X), trace, record_shapes=False, profile_memory=False)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)
    assert read.meta.measured == ("cpu_ns",)
    assert not read.memory


def test_flops_are_those_of_the_live_run(trace: Path) -> None:
    """By hand: 3 × (4·8 + 8·2) multiply-accumulates forward; backward the same for weights, and fc2's input."""
    model = Mlp()
    profiled(model, training(model, X), trace)
    for read in (torchprof.from_trace(trace, model), torchprof.from_trace(trace)):
        assert read.tree("forward").total.macs == 3 * (4 * 8 + 8 * 2)
        assert read.tree("backward").total.macs == 3 * (4 * 8 + 2 * 8 * 2)


def test_an_exception_inside(trace: Path) -> None:
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


def test_selected_paths_and_several_models(trace: Path) -> None:
    models = [Mlp(), Mlp(), nn.Linear(2, 4)]

    def step() -> None:
        models[1](models[2](models[0](X))).sum().backward()

    settle(step)
    live = profiled(models, step, trace)
    assert_same(live, torchprof.from_trace(trace, models))
    some = ["Mlp.fc1", "Linear"]
    live = profiled(models, step, trace, paths=some)
    assert_same(live, torchprof.from_trace(trace, models, paths=some))


def test_paths_select_in_a_trace_of_all(trace: Path) -> None:
    model = Mlp()
    live = annotated(model, training(model, X), trace)
    read = torchprof.from_trace(trace, model, paths=["fc1"])
    assert read.meta.paths == (("Mlp", "fc1"),)
    assert {row.layer.name for row in read.rows if row.layer} == {"Mlp.fc1"}
    assert not all(row.selected for row in read.rows)
    for phase in ("forward", "backward"):
        nodes = {node.layer.name: node for node in live.tree(phase).walk() if node.layer}
        found = {node.layer.name: node for node in read.tree(phase).walk() if node.layer}
        assert found["Mlp.fc1"].total == nodes["Mlp.fc1"].total
    assert sum(row.cost.cpu_ns for row in read.rows) == sum(row.cost.cpu_ns for row in live.rows)


def test_labels_inside_what_paths_selected_are_no_rows(trace: Path) -> None:
    """A session with paths= would not have labelled them: their ops are the selected layer's own."""
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), nn.Linear(4, 2))
    step = training(model, X)
    settle(step)
    annotated(model, step, trace)
    read = torchprof.from_trace(trace, model, paths=["0"])
    assert {row.layer.name for row in read.rows if row.layer} == {"Sequential.0"}
    assert not [frame for row in read.rows for frame in row.frames if frame.name.startswith("torchprof:")]
    assert not [warning for warning in sentences(read) if warning.startswith("Labelled")]
    live = profiled(model, step, trace, paths=["0"])

    def calls(run: Run) -> Counter[Any]:
        """By layer, phase and frames, without signatures."""
        found: Counter[Any] = Counter()
        for row in run.rows:
            if row.layer:
                found[row.layer.name, row.phase, tuple(frame[:2] for frame in row.frames)] += row.calls
        return found

    assert calls(read) == calls(live)


def test_warm_up_calls_begin_in_the_middle_of_a_step(trace: Path) -> None:
    model = Mlp()
    live = profiled(model, training(model, X), trace, warmup=2, steps=5)
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)


def test_a_loop_with_loader_and_optimizer(trace: Path) -> None:
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
    assert any(frame == Frame("label", "aten::add") for row in live.rows for frame in row.frames)


def test_double_backward(trace: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))

    def step() -> None:
        x = X.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()

    settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


def test_odd_operators(trace: Path) -> None:
    """Values of every sort in the inputs: lists, words, infinities, complex numbers, large integers; vmap, jvp."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def step() -> None:
        torch.func.vmap(model)(X)
        torch.func.jacrev(model)(X[0])
        torch.func.jvp(model, (X,), (X,))
        torch.autograd.functional.hessian(lambda y: model(y).sum(), X[0])
        torch.full((2,), float("nan")), torch.full((2,), 1 + 2j), torch.arange(2**62, 2**62 + 3)
        torch.ones(3).clamp(min=-float("inf"), max=1e-7)
        torch.ones(3)[torch.tensor([True, False, True])]
        if KNOWS_LISTS:  # else the trace knows arithmetic that the live run does not
            torch._foreach_add([X, X], [X, X])
        torch.stft(torch.rand(64), 16, return_complex=True, window=torch.ones(16))
        nn.functional.interpolate(torch.ones(1, 1, 4, 4), scale_factor=2.5, mode="bilinear")
        torch.cat([model(X), X]).split([2, 4])

    settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, X)], ids=["script", "trace"])
def test_torchscript(make: Callable[[nn.Module], Any], trace: Path) -> None:
    """Ops without any input are among them: their inputs are not in the file."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.scripted = make(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            return self.scripted(self.first(x))

    model = Net()
    step = training(model, X)
    for _ in range(4):
        settle(step)
    assert_same(annotated(model, step, trace), torchprof.from_trace(trace, model))


def test_a_compiled_model(trace: Path) -> None:
    model = Mlp()
    compiled = torch.compile(model, backend="eager")
    step = training(compiled, X)
    settle(step)
    assert_same(annotated(compiled, step, trace), torchprof.from_trace(trace, compiled))
    torch._dynamo.reset()


@pytest.mark.parametrize("record", [annotated, profiled])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_torch_compile_at_work(backend: str, record: Callable[..., Run], trace: Path) -> None:
    """A range of the user's that is called as one of its own stays a label, beside it and around it."""
    torch._dynamo.reset()
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
    torch._dynamo.reset()
    assert_same(live, torchprof.from_trace(trace, compiled))
    label, compiling = Frame("label", "dynamo"), Frame("region", "compiling")
    rows = [row for row in live.rows if label in row.frames]
    assert sum(row.calls for row in rows if row.frames == (label,)) == 2
    assert sum(row.calls for row in rows if [frame.name for frame in row.frames] == ["dynamo", "aten::mul"]) == 2
    assert not [row for row in rows if compiling in row.frames]
    at_work = [row for row in live.rows if row.frames and row.frames[-1] == compiling]
    assert at_work and all(row.cost.cpu_ns > 0 for row in at_work)
    assert not [row for row in live.rows if compiling in row.frames[:-1]]
    assert not [row for row in live.rows if any(compiling in around.frames for around in row.within)]


def test_a_wrapped_model_in_one_process_of_a_group(trace: Path, tmp_path: Path) -> None:
    """The range of gloo's all-reduce ends on another thread, and the file says what it was called on."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(Mlp())
        step = training(model, X)
        settle(step)
        settle(step)
        live = annotated(model, step, trace)
    finally:
        torch.distributed.destroy_process_group()
    read = torchprof.from_trace(trace, model)
    assert_same(live, read)
    assert any(frame.name == "gloo:all_reduce" for row in read.rows for frame in row.frames)
    assert dict(read.meta.environment)["ranks"] == "1, gloo"


def test_two_forward_threads(trace: Path) -> None:
    """Their sequence numbers are the same: the arrows tell the nodes of one from those of the other."""
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


def test_more_calls_than_a_sample_holds(trace: Path) -> None:
    """The sample is chosen by the times of start: those of the trace, and its base."""
    model = nn.Linear(4, 4)
    live = annotated(model, lambda: [model(X) for _ in range(300)], trace)
    read = torchprof.from_trace(trace, model)
    (calls,) = {spread.count for key, spread in read.samples.items() if key.measure == "cpu_ns"}
    assert calls == 300
    assert_same(live, read)


# Steps and cycles


def cycles_of(model: nn.Module, folder: Path, schedule: Any, passes: int) -> tuple[list[Run], list[Path]]:
    runs: list[Run] = []
    files: list[Path] = []

    def ready(theirs: Any) -> None:
        runs.append(torchprof.from_profiler(theirs, model))
        files.append(folder / f"cycle{len(files)}.pt.trace.json")
        theirs.export_chrome_trace(str(files[-1]))

    options = {"record_shapes": True, "profile_memory": True, "schedule": schedule, "on_trace_ready": ready}
    with torchprof.annotate(model), torch.profiler.profile(**options) as theirs:
        for _ in range(passes):
            training(model, X)()
            theirs.step()
    return runs, files


def test_steps_of_torchs_profiler_are_steps(tmp_path: Path) -> None:
    model = Mlp()
    runs, files = cycles_of(model, tmp_path, torch.profiler.schedule(wait=1, warmup=1, active=3), 5)
    (live,), (file,) = runs, files
    read = torchprof.from_trace(file, model)
    assert_same(live, read)
    ranges = [
        event for event in events_in(file) if event["name"].startswith("ProfilerStep#") and event["cat"] != "Trace"
    ]
    assert read.meta.steps == len(ranges) == 3
    ranges.sort(key=lambda event: event["ts"])
    ends = [ns(event["ts"]) for event in ranges[1:]] + [ns(ranges[-1]["ts"]) + ns(ranges[-1]["dur"])]
    lasted = [end - ns(event["ts"]) for event, end in zip(ranges, ends)]
    (steps,) = [spread for key, spread in read.samples.items() if key.measure == "step_ns"]
    assert sorted(lasted) == list(steps.sample)


def test_the_files_of_several_cycles_add_up(tmp_path: Path) -> None:
    model = Mlp()
    runs, files = cycles_of(model, tmp_path, torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=3), 12)
    assert len(files) == 3
    both = add_cycle(add_cycle(runs[0], runs[1]), runs[2])
    for order in (files, files[::-1]):
        read = torchprof.from_trace(order, model)
        assert (read.meta.cycles, read.meta.steps) == (3, 6)
        assert rows_of(read) == rows_of(both)
        assert samples_of(read) == samples_of(both)
        assert memory_of(read) == memory_of(both)
        assert layers_of(read) == layers_of(both)
        assert read.meta.busy_ns == both.meta.busy_ns
    singles = [torchprof.from_trace(file, model) for file in files]
    assert read.meta.wall_ns == sum(run.meta.wall_ns for run in singles)


class Chooses(nn.Module):
    """Calls one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor, which: str) -> Tensor:
        return self.last(self.a(x) if which == "a" else self.b(x))


def test_cycles_that_call_different_layers(tmp_path: Path) -> None:
    """What one cycle did not call, another did: nothing is said to be never called; and layers keep their place."""
    model = Chooses()
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for which, file in zip("ab", files):
        annotated(model, lambda which=which: model(X, which), file)  # type: ignore[misc]
    read = torchprof.from_trace(files, model)
    assert not [warning for warning in sentences(read) if "Never called" in warning]
    assert "Never called: Chooses.b" in sentences(torchprof.from_trace(files[0], model))[0]
    for run in (read, torchprof.from_trace(files)):
        calls = {node.layer.name: node.calls for node in run.tree("forward").walk() if node.layer}
        assert calls == {"Chooses": 2, "Chooses.a": 1, "Chooses.b": 1, "Chooses.last": 2}


def test_a_warning_stands_there_once(tmp_path: Path) -> None:
    model, files = Mlp(), [tmp_path / "1.json", tmp_path / "2.json"]
    for file in files:
        annotated(model, lambda: [training(model, X)() for _ in range(3)], file)
        write(file, {**trace_in(file), "traceEvents": [*events_in(file), {"ph": "X", "cat": "cpu_op", "name": "?"}]})
    warnings = sentences(torchprof.from_trace(files, model))
    assert len({warning.partition(" took ")[0] for warning in warnings}) == len(warnings)
    assert sum("missing" in warning for warning in warnings) == 2  # each names its file


def test_a_doubt_about_modules_is_told_once(tmp_path: Path) -> None:
    """Which of two alike is which, both cycles leave open."""
    model, files = Several(), [tmp_path / "1.json", tmp_path / "2.json"]
    for file in files:
        with_modules(model, training(model, X), file)
    alone = sentences(torchprof.from_trace(files[0], model))
    doubts = [warning for warning in sentences(torchprof.from_trace(files, model)) if warning in alone]
    assert len(set(doubts)) == len(doubts) > 0


def test_a_trace_that_was_merged_with_itself_is_the_same_run(trace: Path, tmp_path: Path) -> None:
    """Every figure, steps included; and it is said."""
    model = Mlp()
    with torch.profiler.profile(record_shapes=True, profile_memory=True) as theirs, torchprof.annotate(model):
        for _ in range(2):
            model(X).sum().backward()
            theirs.step()
    theirs.export_chrome_trace(str(trace))
    doubled = trace_in(trace)
    doubled["traceEvents"] *= 2
    run, twice = torchprof.from_trace(trace), torchprof.from_trace(write(tmp_path / "twice.json", doubled))
    assert_same(run, twice, with_model=False)
    assert memory_of(twice) == memory_of(run)
    (said,) = [warning for warning in sentences(twice) if "in it twice" in warning]
    events = trace_in(trace)["traceEvents"]
    read = sum(one["name"] == "[memory]" or (one["ph"] == "X" and one["cat"] != "Trace") for one in events)
    assert said.startswith(f"{read} events of twice.json stand in it twice")


def test_one_recording_twice_is_refused(trace: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.json.gz"
    copy.write_bytes(gzip.compress(with_ranges(trace).read_bytes()))
    for files in ([trace, trace], [trace, copy]):
        with pytest.raises(torchprof.TorchprofError, match="of the same time: one recording twice"):
            torchprof.from_trace(files)


def test_one_recording_twice_is_refused_without_its_end(trace: Path, tmp_path: Path) -> None:
    """What was cut off has not the event that tells how long the session lasted."""
    copy, text = tmp_path / "copy.json", with_ranges(trace).read_text()
    for file in (trace, copy):
        file.write_text(text[: len(text) // 2])
    assert "PyTorch Profiler (0)" not in trace.read_text()
    with pytest.raises(torchprof.TorchprofError, match="of the same time: one recording twice"):
        torchprof.from_trace([trace, copy])


@pytest.mark.parametrize(("second", "process"), [(100.5, 1), (150, 2)], ids=["one process", "two without a rank"])
def test_sessions_at_the_same_time_are_refused(second: float, process: int, tmp_path: Path) -> None:
    """The first lasts from 100 to 200 us."""
    files = []
    for at, (start, pid) in enumerate([(100, 1), (second, process)]):
        events = [session(start, 100), {**trace_event("cpu_op", "aten::mm", start + 1, 5), "pid": pid}]
        files.append(write(tmp_path / f"{at}.json", {"traceEvents": events}))
    for order in (files, files[::-1]):
        with pytest.raises(torchprof.TorchprofError, match="two processes that do not tell their rank"):
            torchprof.from_trace(order)


@pytest.mark.parametrize(("lasted", "wall_ns"), [(100, 300_000), (None, 15_000)], ids=["whole", "without their ends"])
def test_a_session_may_begin_when_the_one_before_ends(lasted: float | None, wall_ns: int, tmp_path: Path) -> None:
    files = []
    for start in (100, 200, 300):
        events = [
            trace_event("cpu_op", "aten::mm", start + 1, 5),
            *([] if lasted is None else [session(start, lasted)]),
        ]
        files.append(write(tmp_path / f"{start}.json", {"traceEvents": events}))
    run = torchprof.from_trace(files)
    assert (run.meta.cycles, run.meta.wall_ns, sum(row.cost.cpu_ns for row in run.rows)) == (3, wall_ns, 15_000)


def test_the_warnings_of_a_sum_are_about_the_sum(tmp_path: Path) -> None:
    """Calls of 50, 10 and 10 us, then of 30, 10 and 10 us: by its own, each file's first call is a slow one; of all six
    only the first is, and the others took 14 us on average. An op without a formula is called 2 and 3 times."""
    files = []
    for at, lasted in enumerate([(50, 10, 10), (30, 10, 10)]):
        calls = [
            trace_event("cpu_op", "torchprof:Net", 1000 * at + 100 * call, ns) for call, ns in enumerate(lasted, 1)
        ]
        ops = [
            trace_event(
                "cpu_op", "aten::special_bessel_j0", 1000 * at + 500 + call, 0.5, Input_Dims=[[8]], Input_type=["float"]
            )
            for call in range(2 + at)
        ]
        marks = session(1000 * at + 1, 900)
        files.append(write(tmp_path / f"{at}.json", {"traceEvents": [marks, *calls, *ops]}))
    singles = [sentences(torchprof.from_trace(file)) for file in files]
    assert [[warning[:37] for warning in warnings] for warnings in singles] == [
        ["The first call of Net took 50.000us, ", "Not counted: aten::special_bessel_j0 "],
        ["The first call of Net took 30.000us, ", "Not counted: aten::special_bessel_j0 "],
    ]
    start, uncounted = sentences(torchprof.from_trace(files))
    assert start.startswith("The first call of Net took 50.000us, the later ones 14.000us on average")
    assert uncounted.startswith("Not counted: aten::special_bessel_j0 (5 calls")


# Traces that others recorded


@FOREIGN
@BOTH
def test_all_work_of_the_device_is_in_the_rows(path: Path) -> None:
    work = [event for event in events_in(path) if event.get("cat") in DEVICE_WORK]
    run = foreign(path)
    truth: Counter[str] = Counter()
    for event in work:
        truth[event["name"]] += ns(event["dur"])
    found: Counter[str] = Counter()
    for row in run.rows:
        if row.frames and row.frames[-1].kind == "kernel":
            found[row.frames[-1].name] += row.cost.device_ns
    assert found == truth
    assert sum(row.cost.device_ns for row in run.rows) == sum(truth.values()) > 0
    assert sum(row.calls for row in run.rows if row.frames and row.frames[-1].kind == "kernel") == len(work)


def host_lanes(events: Iterable[dict[str, Any]]) -> dict[Any, list[tuple[int, int, dict[str, Any]]]]:
    """The ranges of each thread, outer before inner: start, end, event. Those of collectives have no length."""
    lanes: defaultdict[Any, list[tuple[int, int, dict[str, Any]]]] = defaultdict(list)
    for event in events:
        if event.get("ph") == "X" and event["cat"] in HOST_WORK:
            lasts = 0 if event["name"].startswith("nccl:") else ns(event["dur"])
            lanes[event["pid"], event["tid"]].append((ns(event["ts"]), ns(event["ts"]) + lasts, event))
    for lane in lanes.values():
        lane.sort(key=lambda one: (one[0], -one[1]))
    return lanes


@FOREIGN
@BOTH
def test_all_time_of_the_host_is_in_the_rows(path: Path) -> None:
    truth = 0
    for lane in host_lanes(events_in(path)).values():
        until = 0
        for start, end, _ in lane:
            if start >= until:
                truth += end - start
                until = end
    run = foreign(path)
    assert sum(row.cost.cpu_ns for row in run.rows) == truth > 0
    assert all(row.cost.cpu_ns >= 0 for row in run.rows)


@FOREIGN
def test_backward_belongs_where_the_arrows_come_from() -> None:
    """Every arrow of the trace leads from a forward op to the node that it made: time by layer, both by hand."""
    events = events_in(A100)
    lanes = host_lanes(events)
    arrows: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event.get("cat") == "fwdbwd":
            arrows[event["id"]][event["ph"]] = event
    assert len(arrows) == 543

    def is_node(name: str) -> bool:
        return name.endswith(("Backward0", "Backward1")) and ":" not in name

    def around(lane: Any, at: int, name: str) -> bool:
        return any(start <= at < end and event["name"] == name for start, end, event in lane)

    ours = "DistributedDataParallel.forward"
    nodes: dict[Any, bool] = {}
    for arrow in arrows.values():
        start, end = arrow["s"], arrow["f"]
        nodes[end["tid"], ns(end["ts"])] = around(lanes[start["pid"], start["tid"]], ns(start["ts"]), ours)
    assert len(nodes) == 543
    truth: Counter[tuple[str, bool]] = Counter()
    for (_, tid), lane in lanes.items():
        for start, _, event in lane:
            if (tid, start) in nodes and is_node(event["name"]):
                truth[event["name"], nodes[tid, start]] += 1
    assert sum(truth.values()) == 543
    assert {inside for _, inside in truth} == {False, True}
    run = foreign(A100)
    found: Counter[tuple[str, bool]] = Counter()
    for row in run.rows:
        name = row.frames[-1].name if row.frames else ""
        if row.phase == "backward" and is_node(name):
            found[name, bool(row.layer and row.layer.path[-1] == ours)] += row.calls
    assert found == truth


@FOREIGN
@BOTH
def test_both_ways_from_a_kernel_to_its_op_lead_to_one(path: Path) -> None:
    """By External id, and by the launch and its time."""
    events = events_in(path)
    innermost: dict[Any, Any] = {}  # the number of a launch → that of the op around it
    for lane in host_lanes(events).values():
        stack: list[tuple[int, Any]] = []
        for start, end, event in lane:
            while stack and stack[-1][0] <= start:
                stack.pop()
            if event["cat"] == "cuda_runtime":
                innermost[event["args"]["correlation"]] = stack[-1][1] if stack else None
            else:
                stack.append((end, event["args"]["External id"]))
    work = [event["args"] for event in events if event.get("cat") in DEVICE_WORK]
    assert len(work) == {A100: 3774, MI250: 16}[path]
    assert all(innermost[args["correlation"]] == args["External id"] for args in work)


@FOREIGN
def test_what_the_trace_says_of_its_machine() -> None:
    run = foreign(A100)
    assert (run.meta.rank, run.meta.device, run.meta.steps) == (0, "cuda", 3)
    assert dict(run.meta.environment) == {"devices": "8 × NVIDIA A100-PG509-200 (39 GB)", "ranks": "2, nccl 2.17.1"}
    assert [layer.name for layer in run.layers] == [
        "## forward ##",
        "## forward ##.DistributedDataParallel.forward",
        "## backward ##",
        "## optimizer ##",
    ]
    assert {layer.params for layer in run.layers} == {None}


@FOREIGN
@BOTH
def test_the_order_of_the_file_does_not_matter(path: Path, trace: Path) -> None:
    whole = trace_in(path)
    random.Random(6).shuffle(whole["traceEvents"])
    mixed = torchprof.from_trace(write(trace, whole))
    run = foreign(path)
    assert rows_of(mixed) == rows_of(run)
    assert samples_of(mixed) == samples_of(run)
    assert mixed.device_times == run.device_times


# Ranges inside backward


class Rounds(torch.autograd.Function):
    """A function with ranges in its backward, of a name of its own and of one that forward has, too."""

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


@pytest.mark.parametrize("reentrant", [None, True, False], ids=str)
def test_a_range_in_backward_is_recompute_where_a_checkpoint_runs_it(reentrant: bool | None, trace: Path) -> None:
    """What torch's checkpoint computes again is, what a function of the user's opens in its backward is not."""
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
        assert "checkpoint" not in run.report("advice")


def test_a_range_in_the_backward_of_a_live_run_is_a_label_of_its_layer(trace: Path) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rounds.apply(x)

    model = Net()
    with torchprof.annotate(model), torch.profiler.profile() as theirs:
        model(X.clone().requires_grad_()).sum().backward()
    theirs.export_chrome_trace(str(trace))
    with torchprof.Profile(model) as prof:
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


# Traces of other versions and other devices


def as_torch_1_12_wrote_it(path: Path) -> dict[str, Any]:
    """The same trace with the categories of old, and the threads of ops as text."""
    whole = trace_in(path)
    for event in whole["traceEvents"]:
        if event.get("cat") in ("cpu_op", "user_annotation"):
            event.update(cat="Operator", tid=str(event["tid"]))
        elif event.get("cat") == "fwdbwd":
            event["cat"] = "forward_backward"
    return whole


@pytest.mark.parametrize("shapes", [True, False], ids=["with shapes", "without"])
def test_old_traces_give_the_same_run(shapes: bool, trace: Path, tmp_path: Path) -> None:
    model = DoublesInside()
    x = X.clone().requires_grad_()

    def step() -> None:
        with record_function("## forward ##"):
            y = model(x).relu()
        with record_function("## backward ##"):
            y.sum().backward()

    settle(step)
    with torch.profiler.profile(record_shapes=shapes, profile_memory=True) as theirs:
        step()
    theirs.export_chrome_trace(str(trace))
    new = torchprof.from_trace(trace)
    assert names_of(new) == ["## forward ##", "## backward ##"]
    old = torchprof.from_trace(write(tmp_path / "old.json", as_torch_1_12_wrote_it(trace)))
    assert_same(new, old)


def test_kernels_without_a_launch_have_a_row_of_their_own(trace: Path) -> None:
    events = [
        trace_event("user_annotation", "forward", 0, 50),
        trace_event("cpu_op", "aten::mm", 10, 20, External_id=2),
        trace_event("cuda_runtime", "cudaLaunchKernel", 12, 5, correlation=5),
        trace_event("kernel", "gemm", 40, 8, External_id=2, correlation=5, device=0, stream=7),
        trace_event("kernel", "gemm", 60, 3.5, External_id=90, correlation=91, device=0, stream=7),
        trace_event("gpu_user_annotation", "forward", 40, 30),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    kernels = {
        (row.layer and row.layer.name, tuple(frame.name for frame in row.frames)): row.cost.device_ns
        for row in run.rows
        if row.cost.device_ns
    }
    assert kernels == {
        ("forward", ("aten::mm", "gemm")): 8000,
        (None, ("(launch not recorded)", "gemm")): 3500,
    }
    assert "(launch not recorded)" in run.report("tree", show_events=True)


def two_steps(left_over: int, rank: int = 0) -> dict[str, Any]:
    """Two steps of 100 us with one kernel of 8 us each, one whose launch was lost, and so many of 3 us, which were
    launched before the recording and run in the first step, on two streams."""
    events = []
    for number in (0, 1):
        start, launch = 100 * number, 50 + number
        events += [
            trace_event("user_annotation", f"ProfilerStep#{number + 1}", start, 100),
            trace_event("user_annotation", "forward", start + 5, 50),
            trace_event("cpu_op", "aten::mm", start + 10, 20, External_id=2 + number),
            trace_event("cuda_runtime", "cudaLaunchKernel", start + 12, 5, correlation=launch, External_id=2 + number),
            trace_event(
                "kernel", "gemm", start + 60, 8, External_id=2 + number, correlation=launch, device=0, stream=7
            ),
        ]
    events += [
        trace_event("kernel", "old", 2 + 4 * number, 3, correlation=20 + number, device=0, stream=7 + number % 2)
        for number in range(left_over)
    ]
    events.append(trace_event("kernel", "lost", 150, 2, correlation=77, device=0, stream=7))
    return {"traceEvents": events, "distributedInfo": {"rank": rank, "world_size": 2}}


def test_kernels_that_were_launched_before_the_recording_count_nowhere(trace: Path, tmp_path: Path) -> None:
    """They have a row and a sentence; all else is as if they had not been."""
    run = torchprof.from_trace(write(trace, two_steps(8)))
    bare = torchprof.from_trace(write(tmp_path / "bare.json", two_steps(0)))
    assert sum(run.rows.columns["device_ns"]) == 8 * 3_000 + 18_000
    assert run.left_over.device_ns == 8 * 3_000
    assert run.tree().total.device_ns + run.no_layer("forward").device_ns == 18_000
    said = [one for one in sentences(run) if "launched before" in one]
    assert [one[:72] for one in said] == ["8 kernels were launched before the recording began: 24.000us, 57.1% of t"]
    assert {key: spread for key, spread in run.samples.items() if key.measure.startswith("step_")} == {
        key: spread for key, spread in bare.samples.items() if key.measure.startswith("step_")
    }
    assert run.lockstep == bare.lockstep
    compared = torchprof.compare(bare, run).report("table").splitlines()
    assert compared[:-2] == torchprof.compare(bare, bare).report("table").splitlines()
    assert compared[-1].startswith("After: 8 kernels were launched before")
    for name in ("headline", "top"):
        assert run.report(name).splitlines()[2:6] == bare.report(name).splitlines()[2:6]
    (line,) = [line for line in run.report("tree", percent=True).splitlines() if line.startswith("(launched before")]
    assert line.split()[-2:] == ["24.000us", "|"]
    with_shares = [
        line for line in run.report("tree", percent=True).splitlines() if line.startswith(("forward", "(out"))
    ]
    assert with_shares == [
        line for line in bare.report("tree", percent=True).splitlines() if line.startswith(("forward", "(out"))
    ]
    for name in ("ops", "kernels"):
        shares = [
            line.count("%") for line in run.report(name).splitlines() if "(launched before" in line and "|" in line
        ]
        assert shares == [0]
        assert "18.000us" in next(line for line in run.report(name).splitlines() if line.startswith("100 %"))


def test_what_was_launched_before_the_recording_is_in_every_export(trace: Path) -> None:
    run = torchprof.from_trace(write(trace, two_steps(8)))
    for table in ("layers", "operators", "rows"):
        frame = records.records_of(run, table)
        layer, ns = list(frame.columns).index("layer"), list(frame.columns).index("self_device_ns")
        sums: Counter[Any] = Counter()
        for record in frame.records:
            sums[record[layer]] += record[ns]
        assert sums == {"forward": 16_000, "(outside)": 2_000, "(launched before the recording)": 24_000}
    told = page_data([Take("", run)])
    node = len(told["layers"]["name"]) + 2
    assert told["names"][2] == "(launched before the recording)"
    assert sum(ns for at, ns in zip(told["rows"]["node"], told["rows"]["device_ns"]) if at == node) == 24_000
    (device,) = run.device_times  # it was busy all the same
    assert device.busy_ns == 8 * 3_000 + 18_000


@pytest.mark.parametrize("with_launches", [False, True])
def test_a_trace_of_a_device_alone_names_its_kernels_and_says_nothing_of_the_cpu(
    with_launches: bool, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nobody recorded what the CPU did: that is no Python. Calls of the runtime come with the device."""
    name = "void at::native::gemm<float>(int)"
    events = [trace_event("kernel", name, 10 * at, 8, correlation=5 + at, device=0, stream=7) for at in range(5)]
    if with_launches:
        events += [trace_event("cuda_runtime", "cudaLaunchKernel", 10 * at, 1, correlation=5 + at) for at in range(5)]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert (run.meta.requested, run.meta.measured) == (("device_ns",), ("device_ns",))
    assert dict(run.meta.busy_ns) == {"cuda:0": 40_000}
    (said,) = sentences(run)
    assert said.startswith("trace.json holds no operators, as without ProfilerActivity.CPU")
    assert "gemm<float>" in run.report("headline") and "CPU" not in run.report("headline")
    assert main(["trace", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "Python" not in out and "CPU time" not in out and "Between the operators" not in out
    assert "The kernels\n" in out and "gemm<float>" in out.partition("The kernels\n")[2]


def test_a_rank_is_not_slow_for_what_was_launched_before_the_recording(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{rank}.json", two_steps(8 * rank, rank)) for rank in (0, 1)]
    assert "No rank stands out" in torchprof.from_trace(files).report("ranks")


@pytest.mark.parametrize(("runtime", "kind"), [("xpu_runtime", "xpu"), ("mtia_runtime", "mtia"), ("Runtime", "cuda")])
def test_devices_have_their_names(runtime: str, kind: str, trace: Path) -> None:
    events = [
        trace_event("user_annotation", "forward", 0, 50),
        trace_event("cpu_op", "aten::mm", 10, 20, External_id=2),
        trace_event(runtime, "launch", 12, 5, correlation=5),
        trace_event("kernel", "gemm", 40, 8, External_id=2, correlation=5, device=1),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert run.meta.device == kind
    assert "device_ns" in run.meta.measured
    assert dict(run.meta.busy_ns)[f"{kind}:1"] == 8000
    assert run.tree("forward").total.device_ns == 8000
    assert f"{kind.upper()} total" in run.report("tree")


def own_ns(run: Run, name: str) -> int:
    """What the rows of a layer hold."""
    return sum(row.cost.cpu_ns for row in run.rows if row.layer and row.layer.name == name)


def test_a_collective_that_goes_on_is_around_no_other_range(trace: Path) -> None:
    events = [
        trace_event("user_annotation", "first", 0.001, 10),
        trace_event("cpu_op", "aten::mm", 1, 2),
        trace_event("user_annotation", "nccl:all_gather", 5, 1000),
        trace_event("user_annotation", "second", 20, 30),
        trace_event("cpu_op", "aten::mm", 21, 5),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert {name: own_ns(run, name) for name in names_of(run)} == {"first": 10_000, "second": 30_000}
    assert not sentences(run)


@pytest.mark.parametrize("shapes", [{}, {"Input_Dims": [[4]], "Input_type": ["float"]}], ids=["bare", "with shapes"])
def test_what_runs_while_an_old_collective_goes_on_is_not_its_own(shapes: dict[str, Any], trace: Path) -> None:
    events = [
        trace_event("Operator", "nccl:all_reduce", 5, 1000, **shapes),
        trace_event("Operator", "layer", 20, 30),
        trace_event("Operator", "aten::mm", 21, 5),
        trace_event("Operator", "aten::mm", 61, 5),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert dict(run.meta.busy_ns) == {"cpu": 30_000 + 5000}
    of_collective = [row for row in run.rows if any(frame.name == "nccl:all_reduce" for frame in row.frames)]
    assert [(len(row.frames), row.cost.cpu_ns) for row in of_collective] == [(1, 0)]


def test_a_range_in_many_places_counts_in_each(trace: Path) -> None:
    """32 layers of 8 experts each, in which "w1" is called once: as many of its own rows as there are experts."""
    events = []
    for layer in range(32):
        events.append(trace_event("user_annotation", f"layer {layer}", 1000 * layer + 0.5, 900))
        for expert in range(8):
            start = 1000 * layer + 100 * expert
            events += [
                trace_event("user_annotation", f"expert {expert}", start + 1, 90),
                trace_event("user_annotation", "w1", start + 2, 50),
                trace_event("cpu_op", "aten::mm", start + 3, 10),
            ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    called = {row.layer.path: row.calls for row in run.rows if row.layer and not row.frames}
    assert {path: calls for path, calls in called.items() if path[-1] == "w1"} == {
        (f"layer {layer}", f"expert {expert}", "w1"): 1 for layer in range(32) for expert in range(8)
    }
    assert set(called.values()) == {1}
    assert not sentences(run)


def held(start: float, nbytes: int, address: int) -> dict[str, Any]:
    about = {"Bytes": nbytes, "Addr": address, "Device Type": 0, "Device Id": -1}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": start, "args": about}


@pytest.mark.parametrize("nbytes", [512, 100_000_000], ids=["few bytes", "many bytes"])
def test_memory_in_whole_microseconds(nbytes: int, trace: Path) -> None:
    """An op allocates as it begins, frees, and allocates again in the same microsecond: never twice at a time."""
    events = [
        trace_event("user_annotation", "layer", 0, 100),
        trace_event("cpu_op", "aten::b", 60, 20),
        held(60, nbytes, 0x10),
        held(65, -nbytes, 0x10),
        held(65, nbytes, 0x20),
        held(70, -nbytes, 0x20),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    (memory,) = run.memory
    assert memory.peak_bytes == nbytes
    assert "What was there before the recording is unknown" in run.report("memory")
    allocated = {row.frames[-1].name if row.frames else "": row.cost.cpu_allocated for row in run.rows}
    assert allocated == {"": 0, "aten::b": 2 * nbytes}


def test_a_launch_as_long_as_its_op_is_inside_it(trace: Path) -> None:
    events = [
        trace_event("user_annotation", "layer", 0, 100),
        trace_event("cpu_op", "aten::fill_", 10, 5, External_id=500),
        trace_event("cuda_runtime", "cudaMemsetAsync", 10, 5, correlation=9),
        trace_event("gpu_memset", "Memset", 50, 5, correlation=9, device=0, stream=7),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert {tuple(frame.name for frame in row.frames) for row in run.rows} == {
        (),
        ("aten::fill_",),
        ("aten::fill_", "cudaMemsetAsync"),
        ("aten::fill_", "Memset"),
    }


COPIES = [("Memcpy HtoD (Pageable -> Device)", 20, 9), ("Memcpy DtoD (Device -> Device)", 30, 11)]


@pytest.mark.parametrize("numbers", ["External ids", "correlations alone"])
def test_copies_count_in_their_step_however_a_trace_names_the_op(numbers: str, trace: Path) -> None:
    """To the device copies the first op, for 5 us of the CPU and 7 of the device; the second within the device."""
    events = [trace_event("user_annotation", f"ProfilerStep#{at}", 100 * at + 0.5, 99) for at in range(2)]
    for name, start, correlation in COPIES:
        of_op = {"External_id": correlation + 100} if numbers == "External ids" else {}
        events += [
            trace_event("cpu_op", "aten::copy_", start, 8, **of_op),
            trace_event("cuda_runtime", "cudaMemcpyAsync", start + 1, 5, correlation=correlation, **of_op),
            trace_event("gpu_memcpy", name, start + 30, 7, correlation=correlation, device=0, stream=7, **of_op),
        ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    found = {(key.measure, key.device): list(spread.sample) for key, spread in run.samples.items() if key.layer < 0}
    assert found["step_copy_ns", "cpu"] == [0, 5000]
    assert found["step_copy_ns", "cuda:0"] == [0, 7000]
    assert found["step_other_ns", "cpu"] == [0, 8000 + 8000 - 5000]
    assert found["step_other_ns", "cuda:0"] == [0, 7000]


def test_several_processes_in_one_file_are_said(trace: Path) -> None:
    """Their numbers of ops, of launches and of autograd are the same ones."""
    own = [trace_event("user_annotation", "forward", 0.5, 100), trace_event("cpu_op", "aten::a", 1, 10, External_id=5)]
    others = [{**one, "pid": 2} for one in own]
    (said,) = sentences(torchprof.from_trace(write(trace, {"traceEvents": own + others})))
    assert said.startswith("trace.json holds 2 processes")
    assert not sentences(torchprof.from_trace(write(trace, {"traceEvents": own})))


def test_a_backward_without_sequence_numbers_is_nobodys_and_that_is_said(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    assert not sentences(torchprof.from_trace(trace))
    whole = trace_in(trace)
    for one in whole["traceEvents"]:
        for key in ("Sequence number", "Fwd thread id"):
            one.get("args", {}).pop(key, None)
    run = torchprof.from_trace(write(trace, whole))
    (said,) = sentences(run)
    assert said.startswith("trace.json has no sequence numbers")
    assert not [row for row in run.rows if row.phase == "backward" and row.layer]
    assert any(row.phase == "backward" for row in run.rows)


def test_the_backward_of_the_oldest_traces_is_nobodys_and_that_is_said(trace: Path) -> None:
    events = [
        trace_event("Operator", "forward", 0, 50),
        trace_event("Operator", "aten::mm", 5, 30),
        trace_event("Operator", "MmBackward", 100, 50, thread=2),
        trace_event("Operator", "aten::mm", 110, 30, thread=2),
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert names_of(run) == ["forward"]
    of_backward = {row.frames[-1].name: row.cost.cpu_ns for row in run.rows if row.phase == "backward"}
    assert of_backward == {"MmBackward": 20_000, "aten::mm": 30_000}
    assert [warning[:40] for warning in sentences(run)] == ["trace.json has no sequence numbers, like"]


@pytest.mark.parametrize("model", [None, Mlp()], ids=["alone", "with the model"])
def test_source_lines_of_operators_are_no_modules(model: nn.Module | None, trace: Path) -> None:
    """What with_stack=True gave in old versions of torch: it was recorded so, and tells none."""
    lines = {"Call_stack": "torch/nn/modules/module.py(1051): _call_impl;net.py(7): forward"}
    write(trace, {"traceEvents": [trace_event("Operator", "aten::mm", 5, 30, **lines)]})
    if model is not None:
        with pytest.raises(torchprof.TorchprofError, match="by an old torch, which wrote source lines"):
            torchprof.from_trace(trace, model)
    else:
        (said,) = sentences(torchprof.from_trace(trace))
        assert "by an old torch, which wrote source lines" in said


class Block(nn.Module):
    """A block of a small ResNet, with two linear layers, or with three."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act, self.second = nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.act(self.first(x))) + x)


class Bottleneck(Block):
    def __init__(self) -> None:
        super().__init__()
        self.third = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.third(self.act(self.second(self.act(self.first(x))))) + x)


class Residual(nn.Module):
    def __init__(self, block: type[Block], *counts: int) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 4)
        self.stages = nn.Sequential(*(nn.Sequential(*(block() for _ in range(count))) for count in counts))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


@pytest.mark.parametrize("labels", [True, False], ids=["labels", "modules"])
def test_a_model_that_is_not_the_one_that_was_traced_is_refused(labels: bool, trace: Path) -> None:
    """Of the same class, and with modules of the same names in it, as ResNet-50 and ResNet-18."""
    traced, other = Residual(Block, 2, 2), Residual(Bottleneck, 3, 4)
    if labels:
        annotated(traced, lambda: traced(X), trace)
    else:
        with torch.profiler.profile(with_stack=True) as theirs:
            traced(X)
        theirs.export_chrome_trace(str(trace))
    with pytest.raises(
        torchprof.TorchprofError, match=r"of another model: in the one that was given, Residual\.stages\.0"
    ):
        torchprof.from_trace(trace, other)
    run = torchprof.from_trace(trace, Residual(Block, 2, 2))
    assert not [warning for warning in sentences(run) if "Never called" in warning or "Not found" in warning]
    compiled = trace_in(trace)  # what is inlined shows no calls
    compiled["traceEvents"].append(trace_event("cpu_op", "Torch-Compiled Region: 0/0", 0, 1))
    torchprof.from_trace(write(trace, compiled), other)


@pytest.mark.parametrize("annotation", [True, False], ids=["annotate", "Profile"])
def test_modules_without_labels_inside_selected_ones_refuse_no_model(annotation: bool, trace: Path) -> None:
    """A recording with ``paths`` labels of what is inside a selected module only what is selected itself."""
    model = Residual(Block, 2, 2)
    blocks = [f"stages.{stage}.{block}" for stage in "01" for block in "01"]
    paths = [path for block in blocks for path in (block, f"{block}.first")]

    def record(paths: list[str]) -> None:
        if annotation:
            with torch.profiler.profile() as theirs, torchprof.annotate(model, paths=paths):
                model(X)
            theirs.export_chrome_trace(str(trace))
        else:
            with torchprof.Profile(model, paths=paths) as ours:
                model(X)
            ours.export_chrome_trace(str(trace))

    record(paths)
    run = torchprof.from_trace(trace, model, paths=paths)
    calls = {node.layer.name.removeprefix("Residual."): node.calls for node in run.tree().walk() if node.calls}
    assert calls == dict.fromkeys(paths, 1)
    with pytest.raises(torchprof.TorchprofError, match=r"Residual\.stages\.0\.0\.act .* and the paths, of the"):
        torchprof.from_trace(trace, model)  # a model whose blocks hold ``first`` alone would have the same labels
    record(["stages", "stages.0.0", "stages.1.0", "stages.1.0.first"])
    assert torchprof.from_trace(trace, model).meta.model == ("Residual",)


def test_layers_without_a_class_are_no_models(trace: Path, tmp_path: Path) -> None:
    run = torchprof.from_trace(with_ranges(trace))
    assert run.meta.model == ()
    assert repr(run).startswith("<Run of a trace: 2 layers")
    run.export(tmp_path / "report.html")
    assert "<title>torchprof" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_headline_calls_layers_what_they_are(trace: Path) -> None:
    """A label below the model does not tell a class, and is no range; and a range is no part of a forward."""
    events = [
        trace_event("cpu_op", "torchprof:Net", 0.5, 100),
        trace_event("cpu_op", "torchprof:Net.a", 1, 60),
        trace_event("cpu_op", "torchprof:Net.a.b", 2, 40),
        trace_event("cpu_op", "aten::mm", 5, 2),
    ]
    said = torchprof.from_trace(write(trace, {"traceEvents": events})).report("headline")
    assert said.startswith("60% of the forward is in `a`, 67% of that in the layer `a.b`.")
    for one, name in zip(events, ("all", "a", "b")):
        one.update(cat="user_annotation", name=name)
    said = torchprof.from_trace(write(trace, {"traceEvents": events})).report("headline")
    assert "in the range `a.b`" in said
    assert "forward" not in said


HALF = "\ud800x"
"""Half of a pair of code units, as JSON may escape it: no character, and nothing that UTF-8 could be made of."""


@pytest.mark.parametrize("suffix", [".html", ".json", ".json.gz", ".md", ".csv", ".trace.json"])
def test_half_a_character_in_a_name_can_be_saved_and_exported(suffix: str, trace: Path, tmp_path: Path) -> None:
    events = [
        trace_event("user_annotation", HALF, 0.5, 50),
        trace_event("cpu_op", f"aten::{HALF}", 10, 20, External_id=2),
        trace_event("kernel", HALF, 40, 8, External_id=2, device=0, stream=7),
    ]
    assert "\\ud800x" in write(trace, {"traceEvents": events}).read_text()
    run = torchprof.from_trace(trace, with_timeline=True)
    assert names_of(run) == ["?x"]
    assert {tuple(frame.name for frame in row.frames) for row in run.rows} == {(), ("aten::?x",), ("aten::?x", "?x")}
    run.export(tmp_path / f"run{suffix}")
    if suffix.startswith(".json"):
        run.save(tmp_path / f"saved{suffix}")
        assert torchprof.load(tmp_path / f"saved{suffix}") == run


@pytest.mark.parametrize(
    "header",
    [
        {"deviceProperties": 5},
        {"deviceProperties": ["A100", None, {"name": 7}, {"name": "A100", "totalGlobalMem": "80"}]},
        {"distributedInfo": "two ranks"},
        {"distributedInfo": {"rank": "0", "world_size": "2"}},
        {"distributedInfo": {"rank": -1, "world_size": 1.5}},
        {"distributedInfo": {"rank": None, "world_size": True}},
        {"baseTimeNanoseconds": "yesterday"},
        {"baseTimeNanoseconds": -5},
        {"baseTimeNanoseconds": 2**80},
        {"host_name": 5, "schemaVersion": None},
    ],
    ids=str,
)
def test_a_header_may_say_anything(header: dict[str, Any], trace: Path, tmp_path: Path) -> None:
    events = [
        trace_event("user_annotation", "forward", 0, 50),
        trace_event("cpu_op", "aten::mm", 10, 20, External_id=2),
    ]
    run = torchprof.from_trace(write(trace, {**header, "traceEvents": events}))
    assert run.meta.rank == 0
    assert run.tree("forward").total.cpu_ns == 50_000
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run


# What the layers are taken from


def with_modules(model: nn.Module, step: Callable[[], Any], path: Path) -> Path:
    """A trace with Python's events and without labels."""
    with torch.profiler.profile(with_stack=True, record_shapes=True) as theirs, record_function("## step ##"):
        step()
    theirs.export_chrome_trace(str(path))
    return path


def with_ranges(path: Path) -> Path:
    model = Mlp()
    with torch.profiler.profile() as theirs:
        with record_function("## forward ##"):
            y = model(X)
        with record_function("## backward ##"):
            y.sum().backward()
    theirs.export_chrome_trace(str(path))
    return path


def names_of(run: Run) -> list[str]:
    return [layer.name for layer in run.layers]


def test_labels_come_before_modules_and_modules_before_ranges(trace: Path) -> None:
    model = Mlp()
    step = training(model, X)
    settle(step)
    with_modules(model, step, trace)
    assert names_of(torchprof.from_trace(trace)) == ["Mlp", "Mlp.Linear_0", "Mlp.ReLU_0", "Mlp.Linear_1"]
    labelled = ["Mlp", "Mlp.fc1", "Mlp.act", "Mlp.fc2"]
    assert names_of(torchprof.from_trace(trace, model)) == labelled
    with torchprof.annotate(model):
        with_modules(model, step, trace)
    read = torchprof.from_trace(trace)
    assert names_of(read) == labelled
    assert [layer.kind for layer in read.layers] == ["Mlp", "Linear", "ReLU", "Linear"]
    assert names_of(torchprof.from_trace(with_ranges(trace))) == ["## forward ##", "## backward ##"]


def test_modules_hold_the_same_work_as_labels(trace: Path) -> None:
    """Python's events are around the labels, of which both are around the ops: calls of all ops, by layer."""
    model = Mlp()
    step = training(model, X)
    settle(step)
    with torchprof.annotate(model):
        with_modules(model, step, trace)
    by_label = torchprof.from_trace(trace, model)
    whole = trace_in(trace)
    whole["traceEvents"] = [one for one in whole["traceEvents"] if not one["name"].startswith("torchprof:")]
    by_module = torchprof.from_trace(write(trace, whole), model)

    def work(run: Run) -> Counter[Any]:
        found: Counter[Any] = Counter()
        for row in run.rows:
            if row.frames and row.frames[-1].kind == "op":
                found[row.layer and row.layer.name, row.phase, row.frames] += row.calls
        return found

    assert work(by_module) == work(by_label)
    assert [layer.params for layer in by_module.layers] == [0, 40, 0, 18]


def test_what_a_trace_cannot_know_is_unknown(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace, record_shapes=False, profile_memory=False)
    read = torchprof.from_trace(trace)
    for layer in read.layers:
        assert (layer.params, layer.trainable_params, layer.param_bytes, layer.buffers, layer.training) == (None,) * 5
    with_model = torchprof.from_trace(trace, model)
    assert [layer.params for layer in with_model.layers] == [0, 40, 0, 18]
    assert {layer.training for layer in with_model.layers} == {None}
    table = read.report("tree")
    assert "Params" not in table and "MACs" not in table


# What is refused


def test_a_trace_without_modules_has_no_use_for_a_model(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match="tells nothing of modules"):
        torchprof.from_trace(with_ranges(trace), Mlp())


def test_labels_of_another_model_are_refused(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    with pytest.raises(torchprof.TorchprofError, match="other modules than those of Several: Mlp"):
        torchprof.from_trace(trace, Several())


def test_labels_that_the_model_has_not_are_told(trace: Path) -> None:
    """Of a longer model: what its other modules did counts as work of the layer around them."""
    longer = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    step = training(longer, X)
    settle(step)
    annotated(longer, step, trace)
    (said,) = sentences(torchprof.from_trace(trace, nn.Sequential(nn.Linear(4, 4))))
    assert said.startswith("Labelled in the trace and not in the model")
    assert said.endswith(": Sequential.1, Sequential.2.")
    assert not sentences(torchprof.from_trace(trace, longer))


def test_modules_of_another_model_are_refused(trace: Path) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten())
    with_modules(model, lambda: model(torch.rand(1, 1, 4, 4)), trace)
    with pytest.raises(torchprof.TorchprofError, match="of another model"):
        torchprof.from_trace(trace, Several())


def test_paths_need_a_model(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match="give from_trace the model, too"):
        torchprof.from_trace(with_ranges(trace), paths=["fc1"])
    with pytest.raises(torchprof.TorchprofError, match="No module"):
        torchprof.from_trace(trace, Mlp(), paths=["fc3"])


def test_no_trace_at_all() -> None:
    with pytest.raises(torchprof.TorchprofError, match="the list is empty"):
        torchprof.from_trace([])


def test_a_missing_file_is_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        torchprof.from_trace(tmp_path / "nothing.json")


def test_a_folder_without_traces_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "trace.txt", two_steps(0))
    torchprof.from_trace(tmp_path / "trace.txt").save(tmp_path / "run.json")
    (tmp_path / "more.json").mkdir()
    with pytest.raises(torchprof.TorchprofError, match="is a folder without traces: their names end in"):
        torchprof.from_trace(tmp_path)


def test_a_folder_is_the_traces_in_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path / f"rank{rank}.pt.trace.json", two_steps(0, rank)) for rank in (1, 0)]
    run = torchprof.from_trace(files)
    run.save(tmp_path / "run.json.gz")
    (tmp_path / "notes.txt").write_text("none")
    assert torchprof.from_trace(tmp_path) == torchprof.from_trace([str(tmp_path)]) == run
    assert main(["trace", str(tmp_path)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(f"torchprof: {files[1]}, {files[0]}. Recorded")


def test_a_saved_run_is_no_trace(tmp_path: Path) -> None:
    with torchprof.Profile(Mlp()) as prof:
        pass
    prof.run.save(tmp_path / "run.json")
    with pytest.raises(torchprof.TorchprofError, match="python -m torchprof show"):
        torchprof.from_trace(tmp_path / "run.json")


def test_a_trace_is_no_saved_run(trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"is a trace, and no saved run: torchprof.from_trace\(path\)"):
        torchprof.load(with_ranges(trace))


@pytest.mark.parametrize(
    "events",
    [
        [],
        [{"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "chrome"}}],
        [
            {"ph": "B", "name": "draw", "cat": "gpu", "pid": 1, "tid": 1, "ts": 5},
            {"ph": "E", "pid": 1, "tid": 1, "ts": 9},
        ],
        [{"ph": "X", "name": "PaintLayer", "cat": "devtools.timeline", "pid": 1, "tid": 1, "ts": 5, "dur": 4}],
    ],
    ids=["none", "names", "pairs", "of a browser"],
)
def test_what_holds_nothing_of_torchs_is_refused(events: list[Any], trace: Path) -> None:
    with pytest.raises(torchprof.TorchprofError, match="holds no event of torch's profiler"):
        torchprof.from_trace(write(trace, {"traceEvents": events}))


def test_what_holds_nothing_that_can_be_read_says_why(trace: Path) -> None:
    broken = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5}
    with pytest.raises(torchprof.TorchprofError, match=r"that can be read.* 3 event\(s\) of trace.json are missing"):
        torchprof.from_trace(write(trace, {"traceEvents": [broken] * 3}))


def test_a_file_that_was_cut_off_is_read_as_far_as_it_goes(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp()
    annotated(model, lambda: [model(X) for _ in range(20)], trace)
    text = trace.read_text()
    trace.write_text(text[: len(text) * 2 // 3])
    read = torchprof.from_trace(trace, model)
    assert 0 < read.tree("forward").calls < 20
    assert main(["trace", str(trace)]) == 0
    assert "ends in the middle" in capsys.readouterr().out
    (warning,) = [one for one in sentences(read) if "ends in the middle" in one]
    assert trace.name in warning
    assert warning in read.report("tree")


def test_what_could_not_be_read_is_said(trace: Path) -> None:
    model = Mlp()
    annotated(model, lambda: model(X), trace)
    whole = trace_in(trace)
    whole["traceEvents"] += [{"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 5}] * 2
    read = torchprof.from_trace(write(trace, whole), model)
    assert "2 event(s) of trace.json are missing" in sentences(read)[0]


# Several ranks


def of_rank(path: Path, rank: int, folder: Path, *, ranks: int = 2, process: int | None = None) -> Path:
    """The same trace as another rank would have written it."""
    whole = trace_in(path)
    whole["distributedInfo"] = {"backend": "gloo", "rank": rank, "world_size": ranks}
    if process is not None:
        for event in whole["traceEvents"]:
            if isinstance(event.get("pid"), int):
                event["pid"] = process
    return write(folder / f"rank{rank}-{process}.json", whole)


def test_ranks_stand_beside_each_other(trace: Path, tmp_path: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    files = [of_rank(trace, rank, tmp_path, process=100 + rank) for rank in (1, 0)]
    for given in (model, None):
        run = torchprof.from_trace(files, given)
        assert [meta.rank for meta in run.metas] == [0, 1]
        singles = [torchprof.from_trace(file, given) for file in files]
        assert rows_of(run) == {**rows_of(singles[0]), **rows_of(singles[1])}
        assert samples_of(run) == {**samples_of(singles[0]), **samples_of(singles[1])}
        assert {key[-1] for key in rows_of(run)} == {0, 1}


def test_ranks_that_know_different_layers(tmp_path: Path) -> None:
    model = Chooses()
    files = []
    for rank, which in enumerate("ba"):
        annotated(model, lambda which=which: model(X, which), tmp_path / "one.json")  # type: ignore[misc]
        files.append(of_rank(tmp_path / "one.json", rank, tmp_path))
    run = torchprof.from_trace(files)
    rows = {(row.layer.name, row.rank): row.calls for row in run.rows if row.layer and not row.frames}
    assert rows == {
        ("Chooses", 0): 1,
        ("Chooses.b", 0): 1,
        ("Chooses.last", 0): 1,
        ("Chooses", 1): 1,
        ("Chooses.a", 1): 1,
        ("Chooses.last", 1): 1,
    }


def test_two_processes_of_one_rank_are_refused(trace: Path, tmp_path: Path) -> None:
    files = [of_rank(with_ranges(trace), 0, tmp_path, process=process) for process in (100, 200)]
    with pytest.raises(torchprof.TorchprofError, match="both of rank 0, and of different processes"):
        torchprof.from_trace(files)


def of_two_ranks(folder: Path) -> list[Path]:
    """One layer with one kernel, in steps of 100 us; rank 1 takes three times as long for everything."""
    files = []
    for rank, times in enumerate((1, 3)):
        events = [
            session(0.5, 250 * times),
            trace_event("user_annotation", "layer", 1, 100 * times),
            trace_event("cpu_op", "aten::mm", 2, 50 * times, External_id=5),
            trace_event("kernel", "gemm", 60, 40 * times, External_id=5, correlation=9, device=0, stream=7),
        ]
        ranks = {"distributedInfo": {"backend": "nccl", "rank": rank, "world_size": 2}}
        files.append(write(folder / f"rank{rank}.json", {**ranks, "traceEvents": events}))
    return files


def test_what_is_said_of_a_device_is_said_of_each_rank(tmp_path: Path) -> None:
    run = torchprof.from_trace(of_two_ranks(tmp_path))
    assert [line for line in run.report("top").splitlines() if "idle" in line] == [
        "cuda:0 of rank 0 was idle for 210.000us of 250.000us (84.0%).",
        "cuda:0 of rank 1 was idle for 630.000us of 750.000us (84.0%).",
    ]
    said = run.report("kernels")
    assert "cuda:0 of rank 0 was busy for 40.000us of 250.000us, idle for 210.000us (84.0%)." in said
    assert "cuda:0 of rank 1 was busy for 120.000us of 750.000us, idle for 630.000us (84.0%)." in said


# Progress, and what is imported


def test_progress_rises_to_one(trace: Path, tmp_path: Path) -> None:
    model, files = nn.Linear(4, 4), [trace, tmp_path / "2.json"]
    for file in files:
        annotated(model, lambda: [model(X) for _ in range(100)], file)
    shares: list[float] = []
    torchprof.from_trace(files, progress=shares.append)
    assert shares == sorted(shares)
    assert len(shares) > 4
    assert 0 < shares[0] < 0.5 and shares[-1] == 1


def test_several_processes_read_what_one_reads(trace: Path, tmp_path: Path) -> None:
    """With the model, which they do not get, and without; of each file it is told when it was read."""
    model, files = Mlp(), [trace, tmp_path / "later.json"]
    for file in files:
        annotated(model, training(model, X), file)
    for given in (None, model):
        shares: list[float] = []
        read = torchprof.from_trace(files, given, with_timeline=True, progress=shares.append, processes=2)
        assert read == torchprof.from_trace(files, given, with_timeline=True)
        assert len(shares) == 2 and shares == sorted(shares) and shares[-1] == 1
        assert read.meta.cycles == 2
    (ranks := tmp_path / "ranks").mkdir()
    files = of_two_ranks(ranks)
    assert torchprof.from_trace(files, processes=3) == torchprof.from_trace(files)


def test_what_one_of_several_processes_cannot_read_is_named(trace: Path, tmp_path: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    wrong = write(tmp_path / "wrong.json", {"no": "trace"})
    with pytest.raises(torchprof.TorchprofError, match=r"wrong\.json"):
        torchprof.from_trace([trace, wrong], processes=2)
    for processes in (0, "two"):
        with pytest.raises(torchprof.TorchprofError, match="from 1 on"):
            torchprof.from_trace([trace], processes=processes)


def in_a_fresh_process(code: str) -> str:
    options = {"capture_output": True, "text": True, "env": {**os.environ, "PYTHONWARNINGS": "error"}, "timeout": 300}
    done = subprocess.run([sys.executable, "-c", code], **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_no_torch_is_imported_where_none_is_needed(trace: Path) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace, record_shapes=False)
    code = (
        f"import sys, torchprof; run = torchprof.from_trace({str(trace)!r}); run.report('tree'); "
        "print([layer.name for layer in run.layers], 'torch' in sys.modules)"
    )
    assert in_a_fresh_process(code) == "['Mlp', 'Mlp.fc1', 'Mlp.act', 'Mlp.fc2'] False\n"


# Everything works on it as on a live run


def kinds_of_runs(trace: Path) -> dict[str, Run]:
    model = Mlp()
    step = training(model, X)
    settle(step)
    annotated(model, step, trace)
    runs = {
        "with the model": torchprof.from_trace(trace, model, with_timeline=True),
        "without": torchprof.from_trace(trace, with_timeline=True),
        "times alone": torchprof.from_trace(with_ranges(trace)),
    }
    if TRACES.is_dir():
        runs["A100"] = torchprof.from_trace(A100, with_timeline=True)
        runs["MI250"] = torchprof.from_trace(MI250)
    return runs


REFUSED = {
    "with the model": {"kernels", "device", "steps"},
    "without": {"kernels", "device", "steps"},
    "times alone": {"kernels", "device", "steps", "chrome-trace", "memory"},
    "A100": {"memory"},
    "MI250": {"memory", "chrome-trace"},
}
"""What needs something that was not recorded."""


def test_every_report_and_every_format_works(trace: Path, tmp_path: Path) -> None:
    for name, run in kinds_of_runs(trace).items():
        some_op = next(frame.name for row in run.rows for frame in row.frames if frame.kind == "op")
        refused = set()
        for report, one in reports.known().items():
            try:
                assert run.report(report, **({"op": some_op} if report == "layers" else {}))
                if one.suffix is not None:
                    run.export(tmp_path / f"{name}{one.suffix}")
                    assert (tmp_path / f"{name}{one.suffix}").stat().st_size > 0
            except torchprof.TorchprofError:
                refused.add(report)
        assert refused == REFUSED[name], name


def test_whatever_a_trace_says_of_inputs_is_saved_and_loaded(trace: Path, tmp_path: Path) -> None:
    kinds = ["text", 5, {"a": 1}, [["a"]], [[1.5]], [[2**70]], [[2**61, 2**61]], [[-1]], [None]]
    events = [
        trace_event(
            "cpu_op", name, 10 * number, 2, Input_Dims=dims * 2 if isinstance(dims, list) else dims, Input_type=types
        )
        for number, (name, dims, types) in enumerate(
            itertools.product(["aten::mm", "nccl:all_reduce"], kinds, [["float", "float"], "float", [3], None])
        )
    ]
    run = torchprof.from_trace(write(trace, {"traceEvents": events}))
    assert sum(row.calls for row in run.rows if row.frames) == len(events)
    run.save(tmp_path / "run.json")
    assert torchprof.load(tmp_path / "run.json") == run


def test_a_run_of_a_trace_is_saved_and_loaded(trace: Path, tmp_path: Path) -> None:
    for run in kinds_of_runs(trace).values():
        run.save(tmp_path / "run.json.gz")
        assert torchprof.load(tmp_path / "run.json.gz") == run


def test_compared_with_the_live_run_nothing_changed(trace: Path) -> None:
    model = Mlp()
    step = training(model, X)
    settle(step)
    live = annotated(model, step, trace)
    for before, after in ((live, torchprof.from_trace(trace, model)), (torchprof.from_trace(trace),) * 2):
        diff = torchprof.compare(before, after)
        pairs = [pair for pair in diff.walk() if pair.is_layer]
        assert [(pair.how, pair.differs) for pair in pairs] == [("same", ())] * 4
        changes = [change for pair in diff.walk() for change in pair.changes.values()]
        assert len(changes) > 40
        assert {change.difference for change in changes} <= {0, None}
        assert all(change.before == change.after for change in changes)
        assert not [note for note in diff.notes if "it was read from a trace" not in note]


# The command line


def test_the_command_prints_the_table_and_writes_files(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    files = ["report.html", "run.json", "t.trace.json", "table.md", "rows.csv.gz"]
    given = [part for file in files for part in ("-o", str(tmp_path / file))]
    assert main(["trace", str(trace), *given]) == 0
    out, err = capsys.readouterr()
    run = torchprof.from_trace(trace)
    assert run.report("tree").splitlines()[0].rstrip() in out
    assert str(trace) in out
    assert [line.partition(":")[0] for line in err.splitlines()] == ["Written"] * len(files)
    assert rows_of(torchprof.load(tmp_path / "run.json")) == rows_of(run)
    assert all((tmp_path / file).stat().st_size > 0 for file in files)


def test_the_command_reads_several_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *map(str, of_two_ranks(tmp_path))]) == 0
    out, _ = capsys.readouterr()
    assert "cuda:0 of rank 1" in out


def test_the_command_prints_no_half_of_a_report(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(with_ranges(trace)), "--sort-by", "nosuch"]) == 2
    out, err = capsys.readouterr()
    assert "nosuch" in err
    assert "Where the time goes" not in out


NET = """
import torch
from torch import nn


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.fc1 = nn.Linear(4, width)
        self.act = nn.ReLU()
        self.fc2 = nn.Linear(width, 2)
"""


@pytest.fixture
def spec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "some_net.py").write_text(NET)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "some_net", raising=False)
    monkeypatch.chdir(tmp_path)
    return "some_net.py:Mlp"


def test_the_command_takes_a_model(spec: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = Mlp()
    annotated(model, training(model, X), trace)
    assert main(["trace", str(trace), "--model", spec, "--paths", "fc1", "-o", "run.json"]) == 0
    run = torchprof.load("run.json")
    assert [layer.params for layer in run.layers] == [0, 40, 0, 18]
    assert run.meta.paths == (("Mlp", "fc1"),)
    assert main(["trace", str(trace), "--model", spec, "--kwargs", '{"width": 3}', "-o", "run.json"]) == 0
    assert [layer.params for layer in torchprof.load("run.json").layers] == [0, 15, 0, 8]
    assert main(["trace", str(trace), "--report", "ops"]) == 0
    assert "aten::addmm" in capsys.readouterr().out


@FOREIGN
def test_the_command_on_the_trace_of_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", str(A100), "--report", "device"]) == 0
    assert "cuda:0" in capsys.readouterr().out
    assert main(["trace", str(A100), "--depth", "1"]) == 0
    out = capsys.readouterr().out
    assert "## forward ##" in out and "CUDA total" in out and "Params" not in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.json"], "No such file"),
        (["empty_folder"], "is a folder without traces"),
        (["run.json"], "python -m torchprof show"),
        (["text.json"], "torch.profiler"),
        (["empty.json"], "is empty"),
        (["trace.json", "--paths", "fc1"], "give from_trace the model"),
        (["trace.json", "--kwargs", "{}x"], "--kwargs"),
        (["trace.json", "--kwargs", '{"a": 1}'], "say which with --model"),
        (["trace.json", "-o", "report.pdf"], "which format"),
        (["trace.json", "--report", "tre"], "tree"),
        (["trace.json", "--model", "some_net.py:Mpl"], "Mlp"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, list) else "",
)
def test_the_command_refuses(
    arguments: Sequence[str], says: str, spec: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_ranges(trace)
    with torchprof.Profile(Mlp()) as prof:
        pass
    prof.run.save("run.json")
    Path("text.json").write_text("no trace")
    Path("empty.json").write_text("")
    Path("empty_folder").mkdir(exist_ok=True)
    capsys.readouterr()
    try:
        code = main(["trace", *arguments])
    except SystemExit as exit:
        code = exit.code  # type: ignore[assignment]
    out, err = capsys.readouterr()
    assert code == 2
    assert says in err
    assert not out
