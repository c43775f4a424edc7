"""The names of the models of pipeline stages, and the ranges of torch.distributed.pipelining, in one process."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from build.libraries import RELEASE
from build.models import Layers, Mlp
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.attribute.events import PIPELINE
from torchprof.attribute.pipeline_ranges import SENDS_LABEL, WAIT_LABEL
from torchprof.record import layers
from torchprof.record.plan import Plan
from torchprof.record.ranges import PipelineRanges, stages_of_modules
from torchprof.run.layers import kind_of_root, root_of_stage, stage_of_root
from torchprof.run.words import NOT_SELECTED, OUTSIDE

if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

CPU = torch.device("cpu")
X, Y = torch.rand(4, 8), torch.rand(4, 8)


class Net(Layers):
    def __init__(self) -> None:
        super().__init__(layers=nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture(scope="module", autouse=True)
def job() -> Iterator[None]:
    """A job of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stage_of(module: nn.Module, number: int = 0, count: int = 1) -> Any:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage(module, number, count, CPU)


def gpipe(stage: Any, loss: Any = nn.functional.mse_loss) -> Any:
    from torch.distributed.pipelining import ScheduleGPipe

    return ScheduleGPipe(stage, 2, loss_fn=loss)


def actions_of(run: Run) -> list[str]:
    return [f"{action.stage}{action.what}{action.microbatch}" for one in run.pipelines for action in one.actions]


recorded = pytest.mark.skipif(RELEASE < (2, 9), reason="the pipelines of this torch are not recorded")


# Names


def test_a_model_is_named_by_the_stage_that_calls_it() -> None:
    nets = [Net() for _ in range(4)]
    stages = [stage_of(nets[0], 2, 4), stage_of(nn.parallel.DistributedDataParallel(nets[1]), 3, 4)]
    named = Plan([*nets, Mlp()], None)
    assert named.names == ["Net (stage 2)", "Net (stage 3)", "Net", "Net#2", "Mlp"]
    assert Plan([stages[1].submod], None).names == ["Net (stage 3)"]
    assert {path[0] for path in named.layer_paths} == {*named.names}
    assert named.changes() == ([], [])


def test_two_pipelines_may_have_models_of_one_stage() -> None:
    nets = [Net(), Net()]
    stages = [stage_of(net, 1, 2) for net in nets]
    assert Plan([stage.submod for stage in stages], None).names == ["Net (stage 1)", "Net (stage 1)#2"]


def test_a_model_of_several_stages_has_the_name_of_its_class() -> None:
    net = Net()
    stages = [stage_of(net, number, 2) for number in range(2)]
    assert Plan([net], None).names == ["Net"] and len(stages) == 2


def test_without_pipelining_nothing_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    net = Net()
    stage = stage_of(net)
    assert stages_of_modules() == {id(net): stage.stage_index}
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining.stage")
    assert stages_of_modules() == {}


@recorded
def test_frozen_stages_are_known_if_they_are_given() -> None:
    stage = stage_of(Net(), 2, 4)
    schedule = gpipe(stage)
    gc.freeze()
    try:
        for given, name in ((schedule, "Net (stage 2)"), ([stage], "Net (stage 2)"), (stage.submod, "Net")):
            with Profile(given) as prof:
                stage.submod(X)
            assert [layer.name for layer in prof.run.roots] == [name]
        with torchprof.annotate(schedule), torch.profiler.profile() as profiler:
            stage.submod(X)
        assert [layer.name for layer in torchprof.from_profiler(profiler, schedule).roots] == ["Net (stage 2)"]
    finally:
        gc.unfreeze()


def test_given_stages_are_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that is garbage may call the same module under another number."""
    net = Net()
    stage, _other = stage_of(net, 1, 4), stage_of(net, 3, 4)
    assert Plan([net, Mlp()], None, [stage]).names == ["Net (stage 1)", "Mlp"]
    monkeypatch.setattr(layers, "stages_of_modules", lambda: pytest.fail("a search"))
    assert Plan([net], None, stage).names == ["Net (stage 1)"]


@pytest.mark.parametrize(
    "name, kind, stage",
    [("Net", "Net", None), ("Net#2", "Net", None), ("Net (stage 12)", "Net", 12), ("Net (stage 1)#2", "Net", 1)],
)
def test_the_class_and_the_stage_of_a_model_are_in_its_name(name: str, kind: str, stage: int | None) -> None:
    assert (kind_of_root(name), stage_of_root(name)) == (kind, stage)
    if stage is not None:
        assert name.startswith(root_of_stage(kind, stage))


# What is recorded


@recorded
@pytest.mark.parametrize("given", ["schedule", "stage", "model"])
def test_a_schedule_or_a_stage_stands_for_its_models(given: str) -> None:
    stage = stage_of(Net())
    schedule = gpipe(stage)
    schedule.step(X, target=Y)
    with Profile({"schedule": schedule, "stage": stage, "model": [stage.submod]}[given]) as prof:
        schedule.step(X, target=Y)
    assert actions_of(prof.run) == ["0F0", "0F1", "0B0", "0B1"]
    assert prof.run.pipelines[0].roots == ((0, 0),)
    assert [layer.name for layer in prof.run.roots] == ["Net (stage 0)"]
    assert prof.run.tree().calls == 2


@recorded
def test_stages_of_one_rank_have_roots_of_their_own() -> None:
    from torch.distributed.pipelining import ScheduleInterleaved1F1B

    nets = [Net() for _ in range(2)]
    schedule = ScheduleInterleaved1F1B([stage_of(net, number, 2) for number, net in enumerate(nets)], 2, nn.MSELoss())
    schedule.step(X, target=Y)
    with Profile(nets) as prof:
        schedule.step(X, target=Y)
    names = {stage: prof.run.layers[layer].name for stage, layer in prof.run.pipelines[0].roots}
    assert names == {0: "Net (stage 0)", 1: "Net (stage 1)"}
    assert {name[0] + name[1] for name in actions_of(prof.run)} == {"0F", "0B", "1F", "1B"}


@recorded
def test_selected_layers_have_pipelines_without_models() -> None:
    schedule = gpipe(stage_of(Net()))
    schedule.step(X, target=Y)
    for paths, kept in ((["layers.0"], 1), (["Net (stage 0).layers.*"], 2)):
        with Profile(schedule, paths=paths) as prof:
            schedule.step(X, target=Y)
        assert prof.run.pipelines[0].roots == ((0, NOT_SELECTED),)
        called = {row.layer.name for row in prof.run.rows if row.layer is not None}
        assert called == {f"Net (stage 0).layers.{number}" for number in range(kept)}
    with Profile(Mlp()) as prof:
        schedule.step(X, target=Y)
    assert prof.run.pipelines[0].roots == ((0, OUTSIDE),)


@recorded
def test_another_profiler_of_an_annotated_schedule_has_its_pipeline() -> None:
    schedule = gpipe(stage_of(Net()))
    schedule.step(X, target=Y)
    with torchprof.annotate(schedule), torch.profiler.profile() as profiler:
        schedule.step(X, target=Y)
    run = torchprof.from_profiler(profiler, schedule)
    assert actions_of(run) == ["0F0", "0F1", "0B0", "0B1"]
    assert run.layers[run.pipelines[0].roots[0][1]].name == "Net (stage 0)"


@recorded
def test_an_evaluation_has_forwards_alone() -> None:
    schedule = gpipe(stage_of(Net()))
    schedule.step(X, target=Y)
    with Profile(schedule) as prof:
        schedule.eval(X, target=Y)
    assert actions_of(prof.run) == ["0F0", "0F1"]
    inference = gpipe(stage_of(Net()), loss=None)
    with Profile(inference) as prof, torch.no_grad():
        inference.step(X)
    assert actions_of(prof.run) == ["0F0", "0F1"]


@recorded
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_a_step_that_fails_is_no_step_with_other_actions() -> None:
    schedule = gpipe(stage_of(Net()))
    schedule.step(X, target=Y)
    with Profile(schedule) as prof:
        for target in (Y, Y, torch.rand(4, 3)):  # of another size
            try:
                schedule.step(X, target=target)
            except RuntimeError:
                schedule._internal_losses.clear()
    assert actions_of(prof.run) == ["0F0", "0F1", "0B0", "0B1"]
    assert prof.run.pipelines[0].steps == 2


@recorded
def test_a_torch_that_calls_its_stages_in_another_way_has_no_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = stage_of(Net())
    monkeypatch.setattr(type(stage).__mro__[1], "forward_one_chunk", lambda self, number: number + 1)
    with Profile(stage) as prof:
        assert stage.forward_one_chunk(number=1) == 2
    assert prof.run.pipelines == ()


@recorded
def test_a_group_that_torch_does_not_know_has_unknown_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def fails(group: object) -> list[int]:
        asked.append(group)
        raise KeyError(group)

    monkeypatch.setattr(dist, "get_process_group_ranks", fails)
    schedule = gpipe(stage_of(Net()))
    with Profile(schedule) as prof:
        for _ in range(3):
            schedule.step(X, target=Y)
    (pipeline,) = prof.run.pipelines
    assert (pipeline.schedule, pipeline.stages, pipeline.group, pipeline.steps) == ("ScheduleGPipe", 1, (), 3)
    assert len(asked) == 1


@recorded
def test_a_label_that_fails_does_not_stop_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(type(gpipe(stage_of(Net())))):  # type: ignore[misc]
        def __hash__(self) -> int:
            raise RuntimeError("of the user")

    stage = stage_of(Net())
    schedule = Odd(stage, 2, loss_fn=nn.functional.mse_loss)
    with Profile(stage):
        schedule.step(X, target=Y)


class Work:
    def wait(self) -> None: ...


@recorded
def test_waits_for_sends_are_told_from_waits_for_receives(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch exchanges what is alike one by one, and the rest at once."""
    from torch.distributed.pipelining import schedules

    def exchange(tensor: torch.Tensor, **_: object) -> Work:
        return Work()

    sends, receives = (lambda *args, **kwargs: exchange(*args, **kwargs) for _ in range(2))
    monkeypatch.setattr(dist, "isend", sends)
    monkeypatch.setattr(dist, "irecv", receives)
    monkeypatch.setattr(dist, "batch_isend_irecv", lambda ops: [Work() for _ in ops])

    def ops(*what: object) -> list[Any]:
        return [SimpleNamespace(op=op, tensor=X, group=None, tag=0, group_peer=0, peer=0) for op in what]

    with torch.profiler.profile() as profiler, torchprof.annotate(Net()):
        for of_exchange in (ops(sends, sends), ops(receives), ops(sends, receives), []):
            schedules._wait_batch_p2p(schedules._batch_p2p(of_exchange))
        for works in schedules._sorted_batch_p2p(ops(sends)).values():
            schedules._wait_batch_p2p(works)
    waits = [event.name for event in profiler.events() if event.name.startswith(PIPELINE)]
    assert waits == [SENDS_LABEL, WAIT_LABEL, WAIT_LABEL, WAIT_LABEL, SENDS_LABEL]


@recorded
def test_torch_is_as_it_was_after_the_last_of_several_recordings() -> None:
    from torch.distributed.pipelining import schedules, stage

    owners = stage._PipelineStageBase, schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti, schedules
    before = [dict(vars(owner)) for owner in owners]
    first, second = PipelineRanges(), PipelineRanges()
    for ranges in (first, first, second):
        ranges.on()
    first.off()
    first.off()
    ours = [dict(vars(owner)) for owner in owners]
    changed = {name for old, new in zip(before, ours) for name in old if old[name] is not new[name]}
    assert changed == {
        "forward_one_chunk",
        "backward_one_chunk",
        "backward_weight_one_chunk",
        "step",
        "_batch_p2p",
        "_wait_batch_p2p",
    }
    second.off()
    assert [dict(vars(owner)) for owner in owners] == before


def test_other_things_are_no_models() -> None:
    from torch.distributed.pipelining import SplitPoint

    with pytest.raises(TorchprofError, match="SplitPoint"), Profile(SplitPoint.BEGINNING):
        pass
    with pytest.raises(TorchprofError, match=r"a list of them, not 3\."), Profile([Net(), 3]):
        pass
