"""What the jobs in test_jobs.py run: a model, made parallel in one way or another, profiled for three steps.

``torchrun distributed_models.py HOW FOLDER [OPTION…]`` writes into the folder, for each rank, its run, the trace of the
same session, and what torch itself says of it.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import nn

from torchprof import Profile

STEPS = 3
DELAY_S = 0.15
"""Far above what a process waits for a processor on a busy machine."""
BATCH, WIDTH, INNER, CLASSES = 8, 64, 256, 10


class Block(nn.Sequential):
    """What a transformer has between its attentions."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Slow(nn.Linear):
    """A layer that takes its time on one rank."""

    slow_rank = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.slow_rank:
            time.sleep(DELAY_S)
        return super().forward(x)


class Ahead(Net):
    """A stage of a pipeline that posts its receive before it computes, on the rank that takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1][2] = Slow(INNER, WIDTH)  # type: ignore[index, operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        data = torch.zeros(4)
        if dist.get_rank() != Slow.slow_rank:
            out = super().forward(x)
            dist.send(data, Slow.slow_rank)
            return out
        received = dist.irecv(data, 0)
        out = super().forward(x)
        received.wait()
        return out


class Experts(nn.Module):
    """A mixture of experts, one on each rank, with most of the tokens for that of rank 2."""

    TOKENS = (10, 10, 60, 20)

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.experts = nn.ModuleDict({str(rank): nn.Linear(WIDTH, WIDTH, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = [expert(x[: self.TOKENS[int(rank)]]) for rank, expert in self.experts.items()]
        dist.all_reduce(total := torch.stack([part.sum() for part in out]).detach())
        return torch.cat(out) + total.mean()


class Mixture(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.moe = Experts(rank)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.moe(self.embed(x))


def ddp(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.1)


def fsdp(model: nn.Module, *, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh

    try:
        from torch.distributed.fsdp import fully_shard
    except ImportError:  # torch 2.4 and 2.5
        from torch.distributed._composable.fsdp import fully_shard  # type: ignore[no-redef]

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model.layers:  # type: ignore[union-attr]
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def tp(model: nn.Module, *, mesh: Any = None) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    for layer in model.layers:  # type: ignore[union-attr]
        parallelize_module(layer, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def both(model: nn.Module) -> nn.Module:
    """Two by two: tensor parallel inside, sharded outside."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    return fsdp(tp(model, mesh=mesh["tp"]), mesh=mesh["dp"])


def slow(model: nn.Module) -> nn.Module:
    model.layers[1][2] = Slow(INNER, WIDTH)  # type: ignore[index, operator]
    return ddp(model)


def ahead(_: nn.Module) -> nn.Module:
    return Ahead()


def experts(_: nn.Module) -> nn.Module:
    return Mixture(dist.get_rank())


def train(model: nn.Module, x: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def said_by_torch(model: nn.Module) -> dict[str, Any]:
    """The parameters in each of DDP's buckets, and what this rank holds of each parameter."""
    buckets: list[list[str]] = []
    if isinstance(model, nn.parallel.DistributedDataParallel):
        names = [name for name, _ in model.module.named_parameters()]
        said = model._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        buckets = [[names[int(index)] for index in bucket.split()] for bucket in said.split(",")]
    held = {name: getattr(param, "_local_tensor", param).numel() for name, param in model.named_parameters()}
    return {"buckets": buckets, "held": held}


def main(how: str, folder: str, *options: str) -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = globals()[how](Net())
    before = {name: (vars(module).copy(), [*module._forward_hooks.values()]) for name, module in model.named_modules()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(60 if how == "experts" else BATCH, WIDTH)
    # DistributedDataParallel orders its buckets after the first step. In the first calls of a DTensor's ops are trials.
    for _ in range(0 if how == "tp" else 2):
        train(model, x, optimizer)
    with Profile(model, **dict.fromkeys(options, True)) as prof:
        for _ in range(STEPS):
            train(model, x, optimizer)
            prof.step()
        time.sleep(0.1)  # gloo's thread may still be busy to end the range of the last exchange
    after = {name: (vars(module).copy(), [*module._forward_hooks.values()]) for name, module in model.named_modules()}
    assert {name: hooks for name, (_, hooks) in before.items()} == {name: hooks for name, (_, hooks) in after.items()}
    prof.run.save(Path(folder, f"rank{rank}.json"))
    prof.export_chrome_trace(Path(folder, f"trace{rank}.json"))
    Path(folder, f"torch{rank}.json").write_text(json.dumps(said_by_torch(model)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
