"""``annotate`` and ``from_profiler``: our labels in the user's own profiler."""

import asyncio
import gc
import json
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from build.architectures import ARCHITECTURES
from build.examples import examples
from build.models import Mlp
from build.snapshots import snapshot
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import profiler as autograd_profiler

import torchprof
from torchprof.record.labels import Label, Labels
from torchprof.record.plan import Plan
from torchprof.run.run import Run


def structure(run: Run) -> list[Any]:
    """The figures that must be equal in two runs of one model: calls, memory and FLOPs of each row."""
    return sorted(
        (
            row.layer.name if row.layer else "",
            row.phase,
            tuple(frame[:2] for frame in row.frames),
            row.calls,
            row.cost.cpu_allocated,
            row.cost.cpu_freed,
            row.cost.macs,
            row.cost.flops,
        )
        for row in run.rows
    )


@pytest.mark.parametrize("name", ["ResNeXt", "U-Net", "einsum attention"])
def test_the_run_equals_that_of_profile(name: str) -> None:
    """Calls, bytes, MACs and FLOPs of each row are equal. The times add up to the recorded time, and without the time
    in which nothing ran to that of torch's own list."""
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()

    def step() -> None:
        model(*inputs).sum().backward()
        model.zero_grad()

    step()
    gc.collect()
    with torchprof.Profile(model, profile_memory=True, with_flops=True, record_shapes=True, lines=False) as prof:
        step()
    gc.collect()
    with torchprof.annotate(model), torch.profiler.profile(profile_memory=True, record_shapes=True) as theirs:
        step()
    run = torchprof.from_profiler(theirs, model)
    assert structure(run) == structure(prof.run)
    ours = sum(row.cost.cpu_ns for row in run.rows)
    assert ours == run.meta.wall_ns
    ours -= sum(row.cost.cpu_ns for row in run.rows if row.layer is None and not row.frames)
    marks = {event.name for event in theirs.events() if event.name.startswith("torchprof:!")}
    assert marks == {"torchprof:!engine"}
    assert ours / 1000 == pytest.approx(sum(event.self_cpu_time_total for event in theirs.events()), abs=0.01)
    assert run.phases() == prof.run.phases()
    assert run.meta.measured == ("cpu_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")


def test_only_what_was_recorded_is_measured() -> None:
    model = Mlp()
    with torchprof.annotate(model), autograd_profiler.profile() as theirs:
        model(torch.rand(3, 4))
    run = torchprof.from_profiler(theirs, model)
    assert run.meta.measured == run.meta.requested == ("cpu_ns",)
    assert [node.calls for node in run.tree("forward").walk()] == [1] * 4
    assert not run.memory


def test_the_order_of_the_two_blocks_does_not_matter() -> None:
    model = Mlp()
    with autograd_profiler.profile() as theirs, torchprof.annotate(model):
        model(torch.rand(3, 4))
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 1


def test_annotate_decorates_a_function() -> None:
    model = Mlp()

    @torchprof.annotate(model)
    def infer() -> torch.Tensor:
        return model(torch.rand(3, 4))

    with autograd_profiler.profile() as theirs:
        infer()
        infer()
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 2


def test_with_a_schedule_from_profiler_reads_a_cycle_in_on_trace_ready() -> None:
    model = Mlp()
    runs: list[Run] = []
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)
    with (
        torchprof.annotate(model),
        torch.profiler.profile(
            schedule=schedule, on_trace_ready=lambda theirs: runs.append(torchprof.from_profiler(theirs, model))
        ) as theirs,
    ):
        for _ in range(8):
            model(torch.rand(3, 4)).sum().backward()
            theirs.step()
    assert [run.tree("forward").calls for run in runs] == [2, 2]
    labels = [op.name for op in runs[0].ops("forward")[("(outside)",)] if op.kind == "label"]
    assert labels == ["ProfilerStep*"]  # the name of all steps in torch's own tables
    assert [run.meta.steps for run in runs] == [2, 2]
    (steps,) = {op.calls for op in runs[0].ops("forward")[("(outside)",)] if op.kind == "label"}
    assert steps == 2


def test_selected_paths_and_several_models() -> None:
    models = [Mlp(), nn.ReLU()]
    with torchprof.annotate(models, paths=["Mlp.fc1", "ReLU"]), autograd_profiler.profile() as theirs:
        models[1](models[0](torch.rand(3, 4)))
    run = torchprof.from_profiler(theirs, models, paths=["Mlp.fc1", "ReLU"])
    assert run.meta.paths == (("Mlp", "fc1"), ("ReLU",))
    assert [run.tree("forward", root).calls for root in range(2)] == [0, 1]
    assert run.tree("forward").children[0].calls == 1
    assert not [row for row in run.rows if row.layer and row.layer.name == "Mlp.fc2"]


def test_the_model_is_restored_also_after_an_error() -> None:
    model = Mlp()
    forward = Mlp.forward
    with pytest.raises(ZeroDivisionError), torchprof.annotate(model):
        assert Mlp.forward is not forward
        raise ZeroDivisionError
    assert Mlp.forward is forward
    assert "forward" not in vars(model)


def test_emit_itt_and_emit_nvtx_work_with_the_labels() -> None:
    """``emit_itt`` and ``emit_nvtx`` see the same ranges. Without their tools, they must at least not fail."""
    model = Mlp()
    with torchprof.annotate(model), autograd_profiler.emit_itt():
        assert model(torch.rand(3, 4)).shape == (3, 2)


def test_the_exported_trace_has_the_labels(tmp_path: Path) -> None:
    model = Mlp()
    with torchprof.annotate(model), torch.profiler.profile() as theirs:
        model(torch.rand(3, 4))
    theirs.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = {event["name"] for event in events if event.get("name", "").startswith("torchprof:")}
    assert labels == {"torchprof:Mlp", *(f"torchprof:Mlp.{name}" for name in ("fc1", "act", "fc2"))}


def unstarted() -> Any:
    return torch.profiler.profile()


def open_one() -> Any:
    profiler = autograd_profiler.profile()
    profiler.entered = True
    return profiler


def without_labels() -> Any:
    with autograd_profiler.profile() as theirs:
        torch.rand(3)
    return theirs


def of_another_model() -> Any:
    model = nn.ReLU()
    with torchprof.annotate(model), autograd_profiler.profile() as theirs:
        model(torch.rand(3))
    return theirs


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: 3, ["3 is not a profiler of torch", "torch.profiler.profile"]),
        (unstarted, ["was not started"]),
        (open_one, ["has not ended"]),
        (without_labels, ["no call of an annotated model", "torchprof.annotate(model)"]),
        (of_another_model, ["other modules than those of Mlp", "torchprof:ReLU"]),
    ],
)
def test_profilers_that_cannot_be_read_raise(make: Callable[[], Any], says: list[str]) -> None:
    with pytest.raises(torchprof.TorchprofError) as refused:
        torchprof.from_profiler(make(), Mlp())
    for words in says:
        assert words in str(refused.value)


def test_anything_but_a_module_raises() -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"needs a torch\.nn\.Module"), torchprof.annotate("model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(torchprof.TorchprofError, match="No module"), torchprof.annotate(Mlp(), paths=["thrid"]):
        pass


def test_a_call_counts_once_if_several_blocks_label_it() -> None:
    """Around a Profile, inside a Profile, around another annotate. Afterwards each has its own labels again."""
    model = Mlp()

    def step() -> None:
        model(torch.rand(3, 4)).sum().backward()

    with torchprof.annotate(model), torchprof.annotate(model), autograd_profiler.profile() as theirs:
        step()
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 1
    with torchprof.annotate(model):
        with torchprof.Profile(model, with_flops=True) as around:
            step()
        with autograd_profiler.profile() as theirs:
            step()
    with torchprof.Profile(model, with_flops=True) as inside:
        with torchprof.annotate(model.fc1):
            step()
        step()
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 1
    for prof, calls in ((around, 1), (inside, 2)):
        assert [node.calls for node in prof.run.tree("forward").walk()] == [calls] * 4
        assert prof.run.tree("forward").total.macs == calls * 3 * (4 * 8 + 8 * 2)
        assert not any(op.kind == "label" for ops in prof.run.ops("forward").values() for op in ops)
    assert "forward" not in vars(model)


# Blocks that overlap


class Own(nn.Module):
    """A class with one instance that has its own ``forward`` attribute."""

    def __init__(self, carries: bool = False) -> None:
        super().__init__()
        if carries:
            self.forward = torch.sin

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@contextmanager
def recorded_names() -> Iterator[list[str]]:
    """The names of all ranges of labels."""
    names: list[str] = []

    @contextmanager
    def note(name: str) -> Iterator[None]:
        names.append(name)
        yield

    before = Label.record
    Label.record = staticmethod(note)  # type: ignore[assignment]
    try:
        yield names
    finally:
        Label.record = before


@examples(60)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=14))
def test_blocks_can_be_entered_and_left_in_any_order(moves: list[tuple[int, bool]]) -> None:
    """Blocks of annotate and of Profile, on models that share modules and classes. A call has one label: that of the
    Profile, or else that of the first block. In the end, everything is restored."""
    shared, own = nn.Linear(2, 2), Own(carries=True)
    first, second = nn.Sequential(shared, Own()), nn.Sequential(Own(), own, shared)
    whole = nn.ModuleList([first, second])
    before, limit = snapshot(whole), sys.getrecursionlimit()
    blocks = [
        Labels(Plan([model], None).targets, gives_way=gives_way)
        for model in (first, second, shared)
        for gives_way in (True, False)
    ]
    there: list[Labels] = []
    for number, leaves_first in moves:
        block = blocks[number]
        if leaves_first and there:
            there.pop(0).detach()
        elif block in there:
            there.remove(block)
            block.detach()
        else:
            block.attach()
            there.append(block)
        assert sys.getrecursionlimit() == (2 * limit if there else limit)
        with recorded_names() as names:
            for model in (first, second):
                model(torch.rand(1, 2))
        wanted = []
        for module in (first, *first, second, *second):
            of_module = [
                (labels.gives_way, target.label)
                for labels in there
                for target in labels.targets
                if target.module() is module
            ]
            wanted += [label for _, label in sorted(of_module, key=lambda one: one[0])[:1]]
        assert names == wanted
    for block in there:
        block.detach()
    assert snapshot(whole) == before


def two_blocks(model: nn.Module) -> None:
    first, second = torchprof.annotate(model), torchprof.annotate(model)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    model(torch.rand(3, 4))
    second.__exit__(None, None, None)


def tasks(model: nn.Module) -> None:
    async def request() -> None:
        with torchprof.annotate(model):
            model(torch.rand(3, 4))
            await asyncio.sleep(0)
            model(torch.rand(3, 4))

    async def requests() -> None:
        await asyncio.gather(*(request() for _ in range(40)))

    asyncio.run(requests())


def threads(model: nn.Module) -> None:
    errors = []

    def work() -> None:
        try:
            for _ in range(20):
                with torchprof.annotate(model):
                    model(torch.rand(3, 4))
        except BaseException as error:
            errors.append(error)

    workers = [threading.Thread(target=work) for _ in range(3)]
    sys.setswitchinterval(1e-6)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert errors == []


def generators(model: nn.Module) -> None:
    def results() -> Iterator[torch.Tensor]:
        with torchprof.annotate(model):
            for _ in range(3):
                yield model(torch.rand(3, 4))

    open_ones = [results() for _ in range(40)]
    for one in open_ones:
        next(one)
    while open_ones:
        open_ones.pop(0).close()


def beside_a_profile(model: nn.Module) -> None:
    for begins_first in (True, False):
        blocks: list[AbstractContextManager[Any]] = [torchprof.annotate(model), torchprof.Profile(model)]
        for block in blocks if begins_first else reversed(blocks):
            block.__enter__()
        model(torch.rand(3, 4))
        for block in blocks if begins_first else reversed(blocks):
            block.__exit__(None, None, None)
        assert isinstance(blocks[1], torchprof.Profile)
        assert [node.calls for node in blocks[1].run.tree("forward").walk()] == [1] * 4


@pytest.mark.parametrize("work", [two_blocks, tasks, threads, generators, beside_a_profile])
def test_the_model_is_restored_after_overlapping_blocks(work: Callable[[nn.Module], None]) -> None:
    model = Mlp()
    before = snapshot(model)
    work(model)
    assert snapshot(model) == before


@pytest.mark.parametrize("limit", [2**30, 2**31 - 1])
def test_a_large_recursion_limit_of_the_user_is_kept(limit: int) -> None:
    """We raise the limit, up to the largest value that Python accepts."""
    sys.setrecursionlimit(limit)
    with torchprof.annotate(Mlp()), torchprof.annotate(Mlp()):
        assert sys.getrecursionlimit() == 2**31 - 1
    assert sys.getrecursionlimit() == limit


def test_a_recursion_limit_that_the_user_sets_between_blocks_is_kept() -> None:
    was = sys.getrecursionlimit()
    with torchprof.annotate(Mlp()):
        sys.setrecursionlimit(was + 100)
        with torchprof.annotate(Mlp()):
            pass
        assert sys.getrecursionlimit() == was + 100
    assert sys.getrecursionlimit() == was + 100
