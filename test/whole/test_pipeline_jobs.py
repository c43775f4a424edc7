"""Pipelines of torch.distributed.pipelining in real jobs of two ranks, with planted delays.

What is recorded is compared with a stopwatch around the same functions, with torch's own order of actions, and with the
trace of the same session.
"""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest
from build.aligned import without_labels
from build.libraries import RELEASE
from build.places import ROOT
from build.warm import run_warm, warm_job
from torch import distributed as dist

import torchprof
from torchprof import Run
from torchprof.ranks import balance_of
from torchprof.ranks.pipeline_bubble import judged_pipelines
from torchprof.run.timeline import Pipeline, StageAction

if not dist.is_available() or RELEASE < (2, 9):
    pytest.skip("the pipelines of this torch are not recorded", allow_module_level=True)

pytestmark = pytest.mark.jobs

SCRIPT = ROOT / "test" / "build" / "pipeline_models.py"
SCHEDULES = ("GPipe", "1F1B+ddp", "Interleaved1F1B+fsdp", "ZBVZeroBubble", "DualPipeV")
"""What the job runs."""
SLOW_STAGE, SLOW_MICROBATCH = 1, 2
SLOW_FORWARD_NS, SLOW_BACKWARD_NS, SLOW_LOSS_NS = 10_000_000, 30_000_000, 5_000_000
"""The delays in the forwards of a stage, in the backward of one microbatch there, and in each loss."""
NO_ACTIONS = ("wait", "sends", "step")
"""What the stopwatch knows beside actions."""
STEPS, MICROBATCHES = 3, 4


class Recorded(NamedTuple):
    """A rank, and what is known of it otherwise. ``order``: of its actions in torch's schedule. ``watch``: what the
    stopwatch says of each step, the actions, the waits, and last the step."""

    run: Run
    order: list[str]
    watch: list[list[tuple[str, int]]]
    trace: Path

    @property
    def pipeline(self) -> Pipeline:
        (pipeline,) = self.run.pipelines
        return pipeline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipelines")
    ended = warm_job(folder, 2, str(SCRIPT), str(folder), *SCHEDULES)
    assert ended.code == 0, ended
    return folder


@pytest.fixture(params=SCHEDULES)
def ranks(request: pytest.FixtureRequest, folder: Path) -> list[Recorded]:
    def recorded(rank: int) -> Recorded:
        first = f"{request.param}-{rank}"
        truth: dict[str, Any] = json.loads((folder / f"{first}-truth.json").read_text())
        watch = [[(name, ns) for name, ns in step] for step in truth["watch"]]
        return Recorded(torchprof.load(folder / f"{first}.json"), truth["order"], watch, folder / f"{first}-trace.json")

    return [recorded(0), recorded(1)]


def name_of(action: StageAction) -> str:
    return f"{action.stage}{action.what}{action.microbatch}"


def waits_before(step: list[tuple[str, int]]) -> list[int]:
    """What the stopwatch says of the waits to receive something before each action of a step."""
    before, waited = [], 0
    for name, ns in step:
        if name == "wait":
            waited += ns
        elif name not in NO_ACTIONS:
            before.append(waited)
            waited = 0
    return before


def test_actions_are_those_of_torch_in_its_order(ranks: list[Recorded]) -> None:
    for rank in ranks:
        of_watch = [name for name, _ in rank.watch[0] if name not in NO_ACTIONS]
        assert [name_of(action) for action in rank.pipeline.actions] == of_watch
        if rank.pipeline.schedule != "Schedule1F1B":  # torch's order for its last stage begins with microbatch 1
            assert of_watch == rank.order


def test_the_schedule_and_its_ranks_are_known(ranks: list[Recorded]) -> None:
    pipelines = [rank.pipeline for rank in ranks]
    on_ranks = [{stage for stage, _ in pipeline.roots} for pipeline in pipelines]
    stages = len(on_ranks[0]) + len(on_ranks[1])
    assert on_ranks[0] | on_ranks[1] == {*range(stages)}
    for number, pipeline in enumerate(pipelines):
        assert (pipeline.rank, pipeline.stages, pipeline.group) == (number, stages, (0, 1))
        assert (pipeline.device, pipeline.steps, len(pipeline.step_ns)) == ("cpu", STEPS, STEPS)
        assert pipeline.schedule.startswith("Schedule")


def test_times_are_those_of_a_stopwatch(ranks: list[Recorded]) -> None:
    """It is inside of the recorded ranges, so none may take less. Half of them may take at most 1 ms more."""
    for rank in ranks:
        pipeline, more = rank.pipeline, []
        for number, step in enumerate(rank.watch):
            actions = [ns for name, ns in step if name not in NO_ACTIONS]
            for action, ns, waited in zip(pipeline.actions, actions, waits_before(step), strict=True):
                more += [action.took_ns[number] - ns, action.waited_ns[number] - waited]
            more.append(pipeline.step_ns[number] - step[-1][1])
        assert min(more) >= 0
        assert median(more) < 1_000_000


def test_a_step_takes_at_least_its_parts(ranks: list[Recorded]) -> None:
    """Its actions, the waits before them, and what the loss takes in the last stage."""
    for rank in ranks:
        pipeline = rank.pipeline
        has_loss = any(action.stage == pipeline.stages - 1 for action in pipeline.actions)
        losses = MICROBATCHES * SLOW_LOSS_NS * has_loss
        for number, step_ns in enumerate(pipeline.step_ns):
            parts = [action.took_ns[number] + action.waited_ns[number] for action in pipeline.actions]
            assert sum(parts) + losses <= step_ns


def test_planted_delays_are_in_their_actions(ranks: list[Recorded]) -> None:
    slow = [action for rank in ranks for action in rank.pipeline.actions if action.stage == SLOW_STAGE]
    forwards = [action for action in slow if action.what == "F"]
    assert len(forwards) == MICROBATCHES
    assert min(ns for action in forwards for ns in action.took_ns) >= SLOW_FORWARD_NS
    backwards = [action for action in slow if action.what in "BI"]
    (planted,) = [action for action in backwards if action.microbatch == SLOW_MICROBATCH]
    assert min(planted.took_ns) >= SLOW_BACKWARD_NS
    assert planted == max(backwards, key=lambda action: min(action.took_ns))


def test_a_rank_waits_for_the_slow_stage(ranks: list[Recorded]) -> None:
    """Rank 0 waits for rank 1, which has this stage, at least as long as the slow backward takes. In a step in which
    rank 0 gets no processor, it may wait less."""
    waited = [[*map(sum, zip(*(action.waited_ns for action in rank.pipeline.actions)))] for rank in ranks]
    assert max(waited[0]) > min(waited[1])
    assert max(waited[0]) >= SLOW_BACKWARD_NS


def test_models_have_the_names_of_their_stages(ranks: list[Recorded]) -> None:
    for rank in ranks:
        roots = {stage: rank.run.layers[layer].name for stage, layer in rank.pipeline.roots}
        assert roots == {stage: f"Net (stage {stage})" for stage in roots}
        assert {layer.path[0] for layer in rank.run.layers} == {*roots.values()}
    merged = torchprof.merge(rank.run for rank in ranks)
    stages = sum(len(rank.pipeline.roots) for rank in ranks)
    assert [layer.name for layer in merged.roots] == [f"Net (stage {stage})" for stage in range(stages)]
    assert len(merged.layers) == sum(len(rank.run.layers) for rank in ranks)  # no layer is that of two stages
    for layer in merged.roots:
        on = [rank.run.meta.rank for rank in ranks if layer.name in {root.name for root in rank.run.roots}]
        assert layer.ranks == tuple(on)
    assert len(merged.pipelines) == 2
    for rank, pipeline in zip(ranks, merged.pipelines):
        names = {stage: merged.layers[layer].name for stage, layer in pipeline.roots}
        assert names == {stage: f"Net (stage {stage})" for stage in names}
        assert pipeline.actions == rank.pipeline.actions


def test_gathered_runs_and_job_folders_have_all_pipelines(ranks: list[Recorded], tmp_path: Path) -> None:
    merged = torchprof.merge(rank.run for rank in ranks)
    first = ranks[0].trace.name.removesuffix("-0-trace.json")
    assert torchprof.load(ranks[0].trace.with_name(f"{first}-gathered.json")).pipelines == merged.pipelines
    if find_spec("pyarrow") is not None:
        for rank in ranks:
            rank.run.save(f"{tmp_path}/job/")
        assert torchprof.load(f"{tmp_path}/job/").pipelines == merged.pipelines


def test_a_trace_of_the_session_gives_the_same_pipeline(ranks: list[Recorded]) -> None:
    for rank in ranks:
        of_trace = torchprof.from_trace(rank.trace)
        assert of_trace.pipelines == rank.run.pipelines
        assert {layer.path[1:] for layer in of_trace.layers} == {layer.path[1:] for layer in rank.run.layers}
        numbers = [re.search(r"\(stage \d\)", layer.name) for layer in of_trace.layers]
        assert None not in numbers


def test_ranges_of_torch_alone_give_nearly_the_same_pipeline(ranks: list[Recorded]) -> None:
    """Without our labels: an action has what the schedule does around it, too, and the last forward has the loss."""
    has_ranges = ranks[0].pipeline.schedule in ("ScheduleInterleaved1F1B", "ScheduleZBVZeroBubble")  # of each action
    for rank in ranks:
        run = torchprof.from_trace(without_labels(rank.trace))
        assert not [layer.name for layer in run.layers if re.match("PP:|Forward|Backward", layer.name)]
        assert len(run.pipelines) == has_ranges
        for pipeline, known in zip(run.pipelines, rank.run.pipelines):
            assert (pipeline.schedule, pipeline.stages, pipeline.group) == ("", 0, ())
            assert [*map(name_of, pipeline.actions)] == [*map(name_of, known.actions)]
            assert all(ns <= whole for ns, whole in zip(pipeline.step_ns, known.step_ns, strict=True))
            more, waited = [], []
            for action, live in zip(pipeline.actions, known.actions):
                has_loss = action.what == "F" and action.stage == known.stages - 1
                for number in range(STEPS):
                    more.append(action.took_ns[number] - live.took_ns[number] - has_loss * SLOW_LOSS_NS)
                    waited.append(abs(action.waited_ns[number] - live.waited_ns[number]))
            assert min(more) >= 0
            assert median(more) < 1_000_000
            assert median(waited) < 1_000_000


def test_ranges_of_microbatches_are_folded(ranks: list[Recorded]) -> None:
    """Their names have no numbers, and rows still add up to the recorded time of the thread."""
    for rank in ranks:
        rows = rank.run.rows
        frames = [*(frame for row in rows for frame in row.frames)]
        frames += [frame for row in rows for around in row.within for frame in around.frames]
        names = {frame.name for frame in frames if frame.kind == "label"}
        numbered = {name for name in names if re.match(r"PP:.*\d|(Forward|Backward) \d", name)}
        assert numbered == set()
        assert ("PP:forward" in names) is (rank.pipeline.schedule != "Schedule1F1B")  # it has no ranges of torch
        assert sum(rows.columns["cpu_ns"]) == rank.run.meta.wall_ns


def test_the_slow_stage_and_the_bubble_of_a_job(ranks: list[Recorded]) -> None:
    """Rank 1 sleeps for at least 70 ms in a step, rank 0 does not. All recorded orders can be simulated."""
    run = torchprof.merge(rank.run for rank in ranks)
    [judged] = judged_pipelines(run)
    assert judged.bubble is not None and judged.slow is not None
    assert 0 < judged.bubble.schedule < judged.bubble.measured < 1
    assert SLOW_STAGE in judged.slow.stages and judged.slow.ranks == (1,)
    slow = judged.replicas.times[SLOW_STAGE]
    assert slow.by_what["F"] >= SLOW_FORWARD_NS
    assert max(slow.of_microbatch, key=slow.of_microbatch.__getitem__) == SLOW_MICROBATCH
    assert balance_of(run).slow is None  # by design
    assert "Ranks are idle for " in run.report("ranks")


LATE = """
import torch
from torch import distributed as dist, nn

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe, schedules, stage

net = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
schedule = ScheduleGPipe(PipelineStage(net, 0, 1, torch.device("cpu")), 2, loss_fn=nn.functional.mse_loss)
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(6):
    schedule.step(torch.randn(4, 8), target=torch.randn(4, 8))
    optimizer.step()
    optimizer.zero_grad()
for _ in range(3):
    schedule.eval(torch.randn(4, 8), target=torch.randn(4, 8))
"""


def test_a_script_that_imports_pipelining_while_it_is_recorded(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(LATE)
    ended = run_warm(["-m", "torchprof", "run", "-o", "run.json", "script.py"], tmp_path)
    assert ended.returncode == 0, ended
    (pipeline,) = torchprof.load(tmp_path / "run.json").pipelines
    assert [name_of(action) for action in pipeline.actions] == ["0F0", "0F1", "0B0", "0B1"]
    assert (pipeline.schedule, pipeline.stages, pipeline.group) == ("ScheduleGPipe", 1, (0,))
    assert pipeline.steps >= 4  # the first is start-up
