"""What the jobs with a planted delay in a pipeline run: equal stages, one on each rank, of which one takes longer.

``delayed_pipeline.py gather PLACE`` saves the gathered run of the job in ``job.json``. PLACE is one of ``PLACES``, or
"nowhere". A stage sleeps 10 ms in the forward of a microbatch and 20 ms in its backward.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import torchprof

SLOW_RANK = 1
SLOW_MICROBATCH = 3
PLACES = {
    "stage": f"Stage {SLOW_RANK} (rank {SLOW_RANK}) is the slow one",
    "microbatch": f"Microbatch {SLOW_MICROBATCH} takes ",
}
"""The places, with words of the report "ranks" for each."""
MICROBATCHES = 8
STEPS = 8
FORWARD_S, BACKWARD_S = 0.01, 0.02
DELAYS_S = {"stage": 0.01, "microbatch": 0.08}
"""What the forward of the slow stage takes longer: of each microbatch, and of one."""


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(BACKWARD_S)
        return gradients[0], None


class Part(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.linear = nn.Linear(64, 64)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> Any:
        microbatch = self.calls % MICROBATCHES
        self.calls += 1
        is_late = self.place == "stage" or (self.place == "microbatch" and microbatch == SLOW_MICROBATCH)
        more = DELAYS_S[self.place] if is_late and dist.get_rank() == SLOW_RANK else 0.0
        return Sleeping.apply(self.linear(x), FORWARD_S + more)


def main(how: str, place: str) -> None:
    assert how == "gather", how
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(place)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    batch = torch.rand(8 * MICROBATCHES, 64)

    def step() -> None:
        schedule.step(*([batch] if rank == 0 else []), target=batch if rank == ranks - 1 else None)

    step()
    part.calls = 0  # torch has called the stage once more, to know the shapes
    with torchprof.Profile(part) as prof:
        for _ in range(STEPS):
            step()
            prof.step()
    if (run := prof.gather()) is not None:
        run.save("job.json")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
