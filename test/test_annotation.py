"""``annotate`` and ``from_profiler``: our labels in a profiler of the user's."""

import gc
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from torch import nn
from torch.autograd import profiler as autograd_profiler

import torchprof
from torchprof.attribute import PHASES
from torchprof.run import Run


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def structure(run: Run) -> list[Any]:
    """What two runs of one model have in common, whoever recorded them: calls, memory and arithmetic of each row."""
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
def test_the_run_is_the_one_that_profile_gives(name: str) -> None:
    """Calls, bytes, MACs and FLOPs of each row; and all time that torch's own list has."""
    model, inputs = ARCHITECTURES[name].make(), ARCHITECTURES[name].inputs()

    def step() -> None:
        model(*inputs).sum().backward()
        model.zero_grad()

    step()
    gc.collect()
    with torchprof.Profile(model, profile_memory=True, with_flops=True, record_shapes=True) as prof:
        step()
    gc.collect()
    with (
        torchprof.annotate(model),
        torch.profiler.profile(profile_memory=True, record_shapes=True) as theirs,
    ):
        step()
    run = torchprof.from_profiler(theirs, model)
    assert structure(run) == structure(prof.run)
    ours = sum(row.cost.cpu_ns for row in run.rows)
    marks = [event for event in theirs.events() if event.name.startswith("torchprof:!")]
    assert not marks
    assert ours / 1000 == pytest.approx(sum(event.self_cpu_time_total for event in theirs.events()), abs=0.01)
    assert run.phases() == prof.run.phases()
    assert run.meta.measured == ("cpu_ns", "cpu_allocated", "cpu_freed", "macs", "flops", "uncounted")


def test_only_what_was_recorded_is_measured() -> None:
    model = Mlp()
    with torchprof.annotate(model), autograd_profiler.profile() as theirs:
        model(torch.rand(3, 4))
    run = torchprof.from_profiler(theirs, model)
    assert run.meta.measured == run.meta.requested == ("cpu_ns",)
    assert [node.calls for node in run.tree("forward").walk()] == [1, 1, 1]
    assert not run.memory


def test_the_order_of_the_two_blocks_does_not_matter() -> None:
    model = Mlp()
    with autograd_profiler.profile() as theirs, torchprof.annotate(model):
        model(torch.rand(3, 4))
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 1


def test_annotate_is_a_decorator_too() -> None:
    model = Mlp()

    @torchprof.annotate(model)
    def infer() -> torch.Tensor:
        return model(torch.rand(3, 4))

    with autograd_profiler.profile() as theirs:
        infer()
        infer()
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 2


def test_a_schedule_is_read_when_a_cycle_is_ready() -> None:
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
    labels = [op.name for op in runs[0].ops("forward")[-1] if op.kind == "label"]
    assert labels == ["ProfilerStep*"]  # as torch's own tables call them all
    assert [run.meta.steps for run in runs] == [2, 2]
    (steps,) = {op.calls for op in runs[0].ops("forward")[-1] if op.kind == "label"}
    assert steps == 2


def test_selected_paths_and_several_models() -> None:
    models = [Mlp(), nn.ReLU()]
    with torchprof.annotate(models, paths=["Mlp.first", "ReLU"]), autograd_profiler.profile() as theirs:
        models[1](models[0](torch.rand(3, 4)))
    run = torchprof.from_profiler(theirs, models, paths=["Mlp.first", "ReLU"])
    assert run.meta.paths == (("Mlp", "first"), ("ReLU",))
    assert [run.tree("forward", root).calls for root in range(2)] == [0, 1]
    assert run.tree("forward").children[0].calls == 1
    assert not [row for row in run.rows if row.layer and row.layer.name == "Mlp.second"]


def test_the_model_is_as_it_was_also_after_an_error() -> None:
    model = Mlp()
    forward = Mlp.forward
    with pytest.raises(ZeroDivisionError), torchprof.annotate(model):
        assert Mlp.forward is not forward
        raise ZeroDivisionError
    assert Mlp.forward is forward
    assert "forward" not in vars(model)


def test_other_tools_than_the_profiler_see_the_labels() -> None:
    """``emit_itt`` and ``emit_nvtx`` observe the same ranges: without their tool they must at least not fail."""
    model = Mlp()
    with torchprof.annotate(model), autograd_profiler.emit_itt():
        assert model(torch.rand(3, 4)).shape == (3, 2)


def test_the_exported_trace_carries_the_labels(tmp_path: Path) -> None:
    model = Mlp()
    with torchprof.annotate(model), torch.profiler.profile() as theirs:
        model(torch.rand(3, 4))
    theirs.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event.get("name", "").startswith("torchprof:")} == {
        "torchprof:Mlp",
        "torchprof:Mlp.first",
        "torchprof:Mlp.second",
    }


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
        (lambda: 3, ["3 is no profiler of torch's", "torch.profiler.profile"]),
        (unstarted, ["was not started"]),
        (open_one, ["has not ended"]),
        (without_labels, ["no call of an annotated model", "torchprof.annotate(model)"]),
        (of_another_model, ["other modules than those of Mlp", "torchprof:ReLU"]),
    ],
)
def test_what_cannot_be_read_is_refused(make: Callable[[], Any], says: list[str]) -> None:
    with pytest.raises(torchprof.TorchprofError) as refused:
        torchprof.from_profiler(make(), Mlp())
    for words in says:
        assert words in str(refused.value)


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(torchprof.TorchprofError, match=r"needs a torch\.nn\.Module"), torchprof.annotate("model"):  # type: ignore[arg-type]
        pass
    with pytest.raises(torchprof.TorchprofError, match="No module"), torchprof.annotate(Mlp(), paths=["thrid"]):
        pass


def test_the_run_has_every_phase_and_sums() -> None:
    """Law 2, on a run from a profiler of the user's."""
    model = Mlp()
    with torchprof.annotate(model), autograd_profiler.profile() as theirs:
        model(torch.rand(3, 4)).sum().backward()
    run = torchprof.from_profiler(theirs, model)
    for phase in PHASES:
        for node in run.tree(phase).walk():
            assert node.total.cpu_ns == node.self.cpu_ns + sum(child.total.cpu_ns for child in node.children)


def test_a_call_counts_once_whoever_labels_it_besides() -> None:
    """Around a Profile, inside of one, around another annotate; and afterwards each has its labels again."""
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
        with torchprof.annotate(model.first):
            step()
        step()
    assert torchprof.from_profiler(theirs, model).tree("forward").calls == 1
    for prof, calls in ((around, 1), (inside, 2)):
        assert [node.calls for node in prof.run.tree("forward").walk()] == [calls] * 3
        assert prof.run.tree("forward").total.macs == calls * 3 * (4 * 8 + 8 * 2)
        assert not any(op.kind == "label" for ops in prof.run.ops("forward").values() for op in ops)
    assert "forward" not in vars(model)
