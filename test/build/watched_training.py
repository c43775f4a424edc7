"""A rank of a training under ``torchprof.watch``, with 200 steps. Rank 0 evaluates alone: before the training, and in
the middle of recorded steps. Prints the log, and then which steps were recorded."""

from __future__ import annotations

import logging
import sys

import torch
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof.profile import gather, watch


def main() -> None:
    logging.basicConfig(stream=sys.stdout, level=logging.INFO, format="%(levelname)s %(message)s")
    gather._PATIENCE_S = 60  # on a busy machine, too
    watch._MOST_COST = 1e9  # one burst in 64 steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    wrapped = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, recorded = torch.rand(4, 8), []

    def evaluate() -> None:
        with torch.no_grad():
            for _ in range(5):
                model(x)

    watched = torchprof.watch(model, every=1e-9, use_cuda=False)
    if dist.get_rank() == 0:
        evaluate()
    for number in range(200):
        if dist.get_rank() == 0 and number in (66, 130):
            evaluate()
        wrapped(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            recorded.append(number)
    watched.stop()
    dist.destroy_process_group()
    print(*recorded)


if __name__ == "__main__":
    main()
