"""What the job in test_pipeline_jobs.py runs: schedules of torch.distributed.pipelining on two ranks, with delays.

``torchrun pipeline_models.py FOLDER SCHEDULE…`` writes into the folder, for each schedule and rank, the run, the
trace of the same session, what a stopwatch says of each action, and the order of actions in torch's own schedule; and
the run that rank 0 gathered.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, schedules, stage

from torchprof import Profile

STEPS, MICROBATCHES, ROWS, WIDTH = 3, 4, 4, 32
SLOW_STAGE, SLOW_FORWARD_S = 1, 0.01
"""Each forward of this stage sleeps so long."""
SLOW_MICROBATCH, SLOW_BACKWARD_S = 2, 0.03
"""The backward of this microbatch sleeps so long in the same stage."""
SLOW_LOSS_S = 0.005
"""Each call of the loss sleeps so long: that is no waiting."""
PLACES = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2, "InterleavedZeroBubble": 2, "ZBVZeroBubble": 2, "DualPipeV": 2}
"""The schedules, and their stages on each rank."""


class Sleep(torch.autograd.Function):
    """Sleeps in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(SLOW_BACKWARD_S)
        return gradient


class Net(nn.Module):
    """A stage. ``numbers``: the number of the microbatch, in each row."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        x = self.layers(x)
        if self.number == SLOW_STAGE and type(numbers) is torch.Tensor and not numbers.is_meta:
            time.sleep(SLOW_FORWARD_S)
            if int(numbers[0]) == SLOW_MICROBATCH:
                x = Sleep.apply(x)
        return x


def slow_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    time.sleep(SLOW_LOSS_S)
    return nn.functional.mse_loss(output, target)


class Stopwatch:
    """Takes the time of what schedules do, step by step: of the step, of the actions of stages by torch's names for
    them, and of the waits, "wait" if something is received, else "sends"."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[str, int]]] = []
        self._receiving: dict[int, Any] = {}  # by its id: work of an exchange in which something is received

    def around(self, schedule: Any, undo: ExitStack) -> None:
        base = stage._PipelineStageBase
        for owner, name, what in (
            (next(cls for cls in type(schedule).__mro__ if "step" in vars(cls)), "step", "step"),
            (base, "forward_one_chunk", "F"),
            (base, "backward_one_chunk", "B"),
            (base, "backward_weight_one_chunk", "W"),
            (schedules, "_wait_batch_p2p", "wait"),
        ):
            undo.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), what)))
        undo.enter_context(mock.patch.object(schedules, "_batch_p2p", self._noting(schedules._batch_p2p)))

    def _noting(self, exchange: Any) -> Any:
        def noting(ops: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
            works = exchange(ops, *args, **kwargs)
            if any("recv" in op.op.__name__ for op in ops):
                self._receiving |= {id(work): work for work in works}
            return works

        return noting

    def _timed(self, function: Any, what: str) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if what == "step":
                self.steps.append([])
            start = time.perf_counter_ns()
            result = function(*args, **kwargs)
            took = time.perf_counter_ns() - start
            name = what
            if len(what) == 1:
                kind = "I" if kwargs.get("full_backward") is False else what
                name = f"{args[0].stage_index}{kind}{args[1]}"
            elif what == "wait" and not any(id(work) in self._receiving for work in args[0]):
                name = "sends"
            self.steps[-1].append((name, took))
            return result

        return timed


def numbers_of_stages(how: str, rank: int, ranks: int) -> list[int]:
    if PLACES[how] == 1:
        return [rank]
    last = 2 * ranks - 1 - rank if how in ("ZBVZeroBubble", "DualPipeV") else ranks + rank
    return [rank, last]


def order_of(schedule: Any, rank: int) -> list[str]:
    """The actions of this rank in torch's own order, those that overlap one after the other."""
    actions = [action for action in schedule.pipeline_order[rank] if action is not None and action.is_compute_op]
    return [str(part) for action in actions for part in (getattr(action, "sub_actions", None) or (action,))]


def wrapped(net: nn.Module, wrapper: str) -> nn.Module:
    """A model that would be replicated or sharded over more ranks than this one."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("pp", "dp"))["dp"]
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(net, process_group=mesh.get_group())
    fully_shard(net, mesh=mesh)
    return net


def run(name: str, folder: Path) -> None:
    how, _, wrapper = name.partition("+")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    count = PLACES[how] * ranks
    nets: dict[int, nn.Module] = {number: Net(number) for number in numbers_of_stages(how, rank, ranks)}
    if wrapper:
        nets = {number: wrapped(net, wrapper) for number, net in nets.items()}
    stages = [PipelineStage(net, number, count, torch.device("cpu")) for number, net in nets.items()]
    of_class: Any = schedules.get_schedule_class(how)
    schedule = of_class(stages[0] if PLACES[how] == 1 else stages, MICROBATCHES, loss_fn=slow_loss)
    optimizer = torch.optim.SGD([param for net in nets.values() for param in net.parameters()], 0.01)
    x, target = torch.randn(ROWS * MICROBATCHES, WIDTH), torch.randn(ROWS * MICROBATCHES, WIDTH)
    numbers = torch.arange(MICROBATCHES).repeat_interleave(ROWS)
    watch = Stopwatch()

    def step() -> None:
        inputs = (x,) if 0 in nets else ()
        schedule.step(*inputs, numbers=numbers, target=target if count - 1 in nets else None)
        optimizer.step()
        optimizer.zero_grad()

    step()  # torch prepares its stages
    originals = vars(stage._PipelineStageBase).copy(), vars(schedules).copy()
    with ExitStack() as undo:
        watch.around(schedule, undo)
        with Profile(schedule if wrapper else [*nets.values()]) as prof:
            for _ in range(STEPS):
                step()
    assert (vars(stage._PipelineStageBase), vars(schedules)) == originals
    prof.run.save(folder / f"{name}-{rank}.json")
    prof.export_chrome_trace(folder / f"{name}-{rank}-trace.json")
    if (gathered := prof.gather()) is not None:
        gathered.save(folder / f"{name}-gathered.json")
    order = order_of(schedule, rank)
    (folder / f"{name}-{rank}-truth.json").write_text(json.dumps({"order": order, "watch": watch.steps}))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        run(name, Path(sys.argv[1]))
    dist.destroy_process_group()
