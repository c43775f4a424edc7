"""Collectives with a job of one process: NCCL on a GPU, gloo on the CPU."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from build.machine import Machine, whole
from torch import nn
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.jobs


@pytest.fixture(scope="module", autouse=True)
def _job() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    backend = "nccl" if Machine().is_gpu else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(0)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=address, rank=0, world_size=1, timeout=timedelta(seconds=60))
    yield
    dist.destroy_process_group()


def test_collectives_in_a_step(machine: Machine, figure: Callable[..., None]) -> None:
    """A kernel of NCCL for a job of one process is a copy or nothing: what it says of itself is kept as a figure."""
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)).to(machine.device)
    parallel = DistributedDataParallel(model, device_ids=[0] if machine.is_gpu else None)
    x = torch.rand(32, 256, device=machine.device)
    values = torch.ones(1000, device=machine.device)

    def step() -> None:
        parallel(x).sum().backward()
        dist.all_reduce(values)
        dist.broadcast(values, 0)

    prof = machine.recorded(parallel, step, record_shapes=True)
    machine.adds_up(prof)
    text = prof.run.report("collectives")
    figure("collectives of a job of one", text.splitlines()[:12])
    arguments = {
        event.name: event.metadata_json
        for event in prof._session._profiler.function_events or ()
        if getattr(event, "metadata_json", None) and "ollective" in event.metadata_json
    }
    figure("what torch says of collectives", arguments)
    names = {frame.name for row in prof.run.rows for frame in row.frames if frame.kind == "collective"}
    assert any("all_reduce" in name for name in names)
    assert any("broadcast" in name for name in names)
    assert whole(prof.run).collective_ns > 0 or machine.is_gpu
