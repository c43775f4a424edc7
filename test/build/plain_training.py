"""What the jobs in test_job_steps.py run: a training script that marks no steps.

``plain_training.py [HOW…]`` trains in a job. In each step, 10 ms are loading data, and rank 1 takes 120 ms more for a
"layer" or for "data". With "evaluation", rank 0 evaluates after every third step; with "cycles", torchprof begins new
cycles after few events, and on each rank at other steps; with "profile", the script has a Profile around its loop and
writes the run and the trace of each rank; with "torch", the same with the profiler of torch.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof.profile import program

STEPS = 12
DELAY_S = 0.12
BATCH_S = 0.01


class Slow(nn.Linear):
    """A layer that sleeps on rank 1, in training."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "layer" in sys.argv and dist.get_rank() == 1 and self.training:
            time.sleep(DELAY_S)
        return super().forward(x)


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(BATCH_S + (DELAY_S if "data" in sys.argv and dist.get_rank() == 1 else 0))
        return torch.full((8, 64), 1.0 + index)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 256)
        self.second = Slow(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[int]:
    """Yields the number of each step that has ended."""
    for step, batch in enumerate(torch.utils.data.DataLoader(Batches(), batch_size=None)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
        yield step


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        for _ in range(4):
            model(torch.ones(8, 64))
    model.train()


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = Net()
    model = nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if "cycles" in sys.argv:
        program._CYCLE_EVENTS = 100 if dist.get_rank() == 0 else 250
    recording: AbstractContextManager[Any] = nullcontext()
    if "profile" in sys.argv:
        recording = torchprof.Profile(model)
    if "torch" in sys.argv:
        recording = torch.profiler.profile()
    with recording as prof:
        for step in train(model, optimizer):
            if "evaluation" in sys.argv and dist.get_rank() == 0 and step % 3 == 2:
                evaluate(net)
        # Gloo's thread may end the range of the last exchange later: if the recording has ended then, it is not in it.
        time.sleep(BATCH_S if "torch" in sys.argv else 0)
    if "profile" in sys.argv:
        prof.run.save(f"rank{dist.get_rank()}.json")
    if "profile" in sys.argv or "torch" in sys.argv:
        prof.export_chrome_trace(f"trace{dist.get_rank()}.json")
    dist.barrier()
    # Gloo's thread may still end the last exchange. If it waits for the GIL then, which the main thread holds while it
    # frees the model and its groups, neither goes on.
    time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
