"""The jobs of which ``draw.py`` draws pictures: ``torchrun --nproc-per-node N jobs.py ranks|pipeline``.

"ranks": the example ``two_ranks.py``, saved as ranks.json. "pipeline": blocks on four ranks, of which the third has
five and the others three, saved as pipeline.json. A block sleeps, so that ranks do not wait for the cores of the
machine.
"""

import runpy
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torchprof

BLOCKS = (3, 3, 5, 3)
FORWARD_S, BACKWARD_S = 0.005, 0.01
MICROBATCHES, STEPS = 8, 8


class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        time.sleep(FORWARD_S)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        time.sleep(BACKWARD_S)
        return gradient


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> Any:
        return Sleep.apply(self.linear(x))


def pipeline() -> torchprof.Run | None:
    """The gathered run on rank 0, None on the others."""
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layers = nn.Sequential(*(Block() for _ in range(BLOCKS[rank])))
    stage = PipelineStage(layers, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    batch = torch.rand(8 * MICROBATCHES, 64)
    with torchprof.Profile(layers) as prof:
        for _ in range(STEPS + 1):  # in the first, torch finds out the shapes
            schedule.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)
            prof.step()
    run = prof.gather()
    dist.destroy_process_group()
    return run


torch.set_num_threads(1)
name = sys.argv[1]
example = Path(__file__).parent.parent.parent / "examples" / "two_ranks.py"
run = pipeline() if name == "pipeline" else runpy.run_path(str(example))["run"]
if run is not None:
    run.save(f"{name}.json")
