"""The times of a pipeline on a device. One process has all stages, so nothing is sent and no rank waits."""

from __future__ import annotations

import socket
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from build.machine import Machine, on_gpu
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

from torchprof import Profile

pytestmark = [pytest.mark.jobs, on_gpu]
SIZES = (2, 2, 4, 2)
"""The layers of each stage."""
WIDTH, MICROBATCHES, STEPS = 4096, 8, 3


@pytest.fixture(scope="module", autouse=True)
def _job() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("nccl", init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


class Stopwatch:
    """The device's own clock around each forward of a stage."""

    def __init__(self) -> None:
        self._events: dict[int, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)

    def around(self, stage: int, part: nn.Module) -> None:
        def begin(*_: Any) -> None:
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            self._events[stage].append(pair)

        part.register_forward_pre_hook(begin)
        part.register_forward_hook(lambda *_: self._events[stage][-1][1].record())

    def forwards_ms(self, stage: int) -> list[float]:
        return [begin.elapsed_time(end) for begin, end in self._events[stage]]


def test_the_forwards_of_each_stage_take_what_the_devices_clock_says(
    machine: Machine, figure: Callable[..., None]
) -> None:
    parts = [
        nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(size))).to(machine.device)
        for size in SIZES
    ]
    stages = [PipelineStage(part, index, len(parts), machine.device) for index, part in enumerate(parts)]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    x = torch.rand(MICROBATCHES * 512, WIDTH, device=machine.device)
    target = torch.rand_like(x)
    for _ in range(2):
        schedule.step(x, target=target)
    machine.wait()
    stopwatch = Stopwatch()
    for index, part in enumerate(parts):
        stopwatch.around(index, part)
    with Profile(nn.ModuleList(parts), device=machine.device) as prof:
        for _ in range(STEPS):
            schedule.step(x, target=target)
            machine.wait()
            prof.step()

    (pipeline,) = (pipeline for pipeline in prof.run.pipelines if pipeline.device != "cpu")
    assert pipeline.steps == STEPS
    assert len(pipeline.actions) == 2 * MICROBATCHES * len(SIZES)
    figure("report of a pipeline in one process", prof.run.report("pipeline").splitlines())
    for stage in range(len(SIZES)):
        took = [action.took_ns for action in pipeline.actions if (action.stage, action.what) == (stage, "F")]
        ours = statistics.median(ns for times in took for ns in times) / 1e6
        theirs = statistics.median(stopwatch.forwards_ms(stage))
        figure(f"forward of stage {stage}", ours, theirs, "ms")
        assert ours == pytest.approx(theirs, rel=0.1)
    for step, step_ns in enumerate(pipeline.step_ns):
        took_ns = sum(action.took_ns[step] for action in pipeline.actions)
        figure("actions and the step", took_ns, step_ns, "ns")
        assert 0.8 * step_ns < took_ns <= step_ns
    assert all(waited == 0 for action in pipeline.actions for waited in action.waited_ns)
