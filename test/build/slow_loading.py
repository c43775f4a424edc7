"""A job in which rank 1 loads its data slowly: 20 ms for each of four samples in a batch.

``torchrun slow_loading.py FOLDER WORKERS`` writes the run of each rank into the folder.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from torchprof import Profile


class Samples(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if os.environ["RANK"] == "1":
            time.sleep(0.02)
        return torch.full((16,), float(index))


def train(folder: str, workers: str) -> None:
    model = nn.parallel.DistributedDataParallel(nn.Linear(16, 1))
    loader = DataLoader(Samples(), batch_size=4, num_workers=int(workers))
    with Profile(model) as prof:
        for batch in loader:
            model(batch).sum().backward()
            prof.step()
    prof.run.save(Path(folder, f"rank{dist.get_rank()}.json"))


if __name__ == "__main__":
    dist.init_process_group("gloo")
    train(*sys.argv[1:])
    dist.barrier()
    dist.destroy_process_group()
