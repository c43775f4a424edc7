"""What the jobs with a planted delay run: ranks that train together, in lockstep, and one of them is late in each step.

``delayed_training.py HOW PLACE [DELAY_MS]``: rank 1 takes so much longer in each step in that place, one of ``PLACES``;
in "nowhere" it does not. In each step, all ranks load data for 10 ms. HOW: "gather" saves the gathered run of the job
in ``job.json``; "log" trains in cycles, first without the delay and then with it, and prints what
``torchprof.log_stragglers`` logs.
"""

from __future__ import annotations

import logging
import sys
import time
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

import torchprof
from torchprof.profile import gather

SLOW_RANK = 1
BATCH_S = 0.01
NOWHERE = "nowhere"
PLACES = {
    "layer": ".layers.1 in forward",
    "data": "loading data",
    "optimizer": "the optimizer",
    "collective": "in backward",
}
"""The places, with words of the report "ranks" for each. A new one also calls ``_late`` where it is."""
STEPS = 20
CYCLE = {"wait": 1, "warmup": 1, "active": 8}

_slow_place = NOWHERE
_delay_s = 0.0


def _late(place: str) -> None:
    """Sleep, if this is the slow rank and the place of its delay."""
    if place == _slow_place and dist.get_rank() == SLOW_RANK:
        time.sleep(_delay_s)


class Layer(nn.Linear):
    """The layer with the number ``number``; that with number 1 may be slow."""

    def __init__(self, number: int) -> None:
        super().__init__(64, 64)
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.number == 1:
            _late("layer")
        return super().forward(x).relu()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*map(Layer, range(3)))

    def forward(self, x: torch.Tensor) -> Any:
        return self.layers(x)


class Batches(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return STEPS

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(BATCH_S)
        _late("data")
        return torch.full((8, 64), 1.0 + index)


class Sgd(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        _late("optimizer")
        return super().step(closure)


def _exchange(bucket: dist.GradBucket) -> Any:
    """What DistributedDataParallel calls to exchange the gradients of a bucket."""
    _late("collective")
    return allreduce_hook(None, bucket)  # type: ignore[arg-type]


def train(model: nn.Module, prof: torchprof.Profile) -> None:
    optimizer = Sgd(model.parameters(), lr=0.01)
    with prof:
        for batch in torch.utils.data.DataLoader(Batches(), batch_size=None):
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()
            prof.step()


def gathered(model: nn.Module) -> None:
    prof = torchprof.Profile(model)
    train(model, prof)
    if (run := prof.gather()) is not None:
        run.save("job.json")


def logged(model: nn.Module) -> None:
    global _slow_place
    gather._PATIENCE_S = 60  # on a busy machine, too
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(name)s %(levelname)s %(message)s")
    schedule = torch.profiler.schedule(**CYCLE)
    for place in (NOWHERE, _slow_place):
        _slow_place = place
        train(model, torchprof.Profile(model, schedule=schedule, on_trace_ready=torchprof.log_stragglers))


def main(how: str, place: str, delay_ms: str = "80") -> None:
    global _slow_place, _delay_s
    _slow_place, _delay_s = place, float(delay_ms) / 1000
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(Net())
    model.register_comm_hook(None, lambda _, bucket: _exchange(bucket))
    {"gather": gathered, "log": logged}[how](model)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
