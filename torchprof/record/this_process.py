"""This process: which rank of which job it is, and its environment: torch, its build, the devices, the threads, the
machine and the script."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.attribute.process_groups import mesh_of_groups, sole_group
from torchprof.record.peak import measured_peaks
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import MeshDim, Meta, name_of_job
from torchprof.run.processes import usable_cpus
from torchprof.version import __version__


class Job(NamedTuple):
    """``group``: the ranks of this rank's collectives; None if it is in groups of different ranks, or without a job.
    ``in_traces``: the job as JSON, in the form that ``torch.profiler.profile`` writes into traces; None without a job.
    ``name``: the job ID of torchrun or Slurm, "" without one."""

    rank: int = 0
    world_size: int = 1
    mesh: tuple[MeshDim, ...] = ()
    group: GroupOfRanks | None = None
    in_traces: str | None = None
    name: str = ""


def this_job(models: Iterable[nn.Module], before: Job | None = None) -> Job:
    """The job of this process, with the mesh of these models. ``before``: an earlier result for this process.

    Without a process group, it is ``before``, if that had one; otherwise it follows from the environment variables of
    torchrun and similar launchers. A process without them is a job of one rank.
    """
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if before is not None and before.in_traces is not None:
            return before
        of_process, of_job = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
        if of_process.isdecimal() and of_job.isdecimal() and int(of_process) < int(of_job):
            return Job(int(of_process), int(of_job), name=name_of_job())
        return Job()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    groups = _groups()
    described = {"backend": distributed.get_backend(), "rank": rank, "world_size": size, "pg_config": groups}
    mesh = _mesh_of(models) or mesh_of_groups(groups, rank)
    return Job(rank, size, mesh, sole_group(groups), json.dumps(described), name_of_job())


def _groups() -> list[Mapping[str, Any]]:
    """The process groups of this rank, as torch's profiler writes them into traces. Without the private API, none."""
    world = getattr(torch.distributed.distributed_c10d, "_world", None)
    try:
        return list(world.pg_config_info) if world is not None else []
    except (AttributeError, KeyError, TypeError):
        return []


def _mesh_of(models: Iterable[nn.Module]) -> tuple[MeshDim, ...]:
    """The device mesh of sharded parameters; the root mesh, if torch gives it."""
    for model in models:
        for param in model.parameters():
            mesh = getattr(param, "device_mesh", None)
            if mesh is None:
                continue
            find_root = getattr(mesh, "_get_root_mesh", None)
            if find_root is None:  # torch 2.6 and before
                resources: Any = getattr(torch.distributed.device_mesh, "_mesh_resources", None)
                mesh = resources.get_root_mesh(mesh) if hasattr(resources, "get_root_mesh") else mesh
            else:
                mesh = find_root()
            names, positions = mesh.mesh_dim_names, mesh.get_coordinate()
            if names is not None and positions is not None:
                return tuple(MeshDim(name, mesh.size(index), positions[index]) for index, name in enumerate(names))
    return ()


def this_process(job: Job) -> Meta:
    """The metadata of a run in this process that are known before it is recorded. ``job``: the job of this process."""
    return Meta(
        model=(),
        rank=job.rank,
        world_size=job.world_size,
        job=job.name,
        mesh=job.mesh,
        peaks=measured_peaks(),
        versions=(("torchprof", __version__), ("torch", torch.__version__), ("python", platform.python_version())),
        environment=environment(),
        switches=switches(),
        machine=platform.node(),
        script=str(Path(sys.argv[0]).absolute()) if sys.argv and sys.argv[0] else "",
    )


def environment() -> tuple[tuple[str, str], ...]:
    """(name, value) of what two comparable runs share, without names of hosts and users. No device is initialized."""
    threads = f"{torch.get_num_threads()} in an operator, {torch.get_num_interop_threads()} between operators"
    device = [("CUDA", _cuda())] if torch.cuda.is_available() or torch.version.cuda else []
    return (
        ("torch", f"{torch.__version__} on Python {platform.python_version()}"),
        ("built", _build()),
        *device,
        ("threads", threads),
        ("CPU", f"{cpu_name()}, {_usable()} usable of {os.cpu_count()}"),
        ("system", f"{platform.system()} {platform.release()} {platform.machine()}"),
    )


def switches() -> tuple[tuple[str, str], ...]:
    """(name, value) of torch's current settings that change the speed of a model."""
    on_cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    capability = ".".join(map(str, torch.cuda.get_device_capability())) if on_cuda else ""
    return (
        ("float32_matmul_precision", torch.get_float32_matmul_precision()),
        ("cudnn_tf32", str(torch.backends.cudnn.allow_tf32)),
        ("cudnn_benchmark", str(torch.backends.cudnn.benchmark)),
        ("deterministic_algorithms", str(torch.are_deterministic_algorithms_enabled())),
        ("detect_anomaly", str(torch.is_anomaly_enabled())),
        ("num_threads", str(torch.get_num_threads())),
        ("usable_cpus", str(_usable())),
        *((("compute_capability", capability),) if capability else ()),
    )


def _build() -> str:
    """What CPU operators use: the instruction set of their kernels on this machine, and libraries."""
    libraries = (
        ("oneDNN", torch.backends.mkldnn.is_available()),
        ("MKL", torch.backends.mkl.is_available()),
        ("OpenMP", torch.backends.openmp.is_available()),
    )
    kernels = f"kernels for {torch.backends.cpu.get_cpu_capability()}"
    checks = ["with assertions (DEBUG=1), which is slow"] if torch.version.debug else []
    return ", ".join([kernels, *(name for name, there in libraries if there), *checks])


def _cuda() -> str:
    version = f"{torch.version.cuda}"
    if not torch.cuda.is_available():
        return f"{version}, but no device was found"
    if not torch.cuda.is_initialized():  # reading their names would allocate memory on them
        return f"{version}, {torch.cuda.device_count()} device(s), not used"
    devices = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    counts = Counter(f"{device.name} ({device.total_memory / 2**30:.0f} GB)" for device in devices)
    cudnn = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
    libraries = [f"cuDNN {cudnn}"] if cudnn else []
    tf32 = ["float32 products in TF32"] if torch.get_float32_matmul_precision() != "highest" else []
    return ", ".join([version, *libraries, *(f"{count} × {name}" for name, count in counts.items()), *tf32])


@cache
def cpu_name() -> str:
    """The model of the processor; "" if neither Linux nor Python knows it."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), name)
    return name


def _usable() -> int:
    """How many logical processors this process may use, by its affinity and the quota of its container."""
    quota = _quota()
    return usable_cpus() if quota is None else max(1, min(usable_cpus(), round(quota)))


def _quota() -> float | None:
    """How many processors the control group of this process may use (docs.kernel.org, "Control Group v2", ``cpu.max``;
    in version 1 ``cpu.cfs_quota_us``); None without a limit."""
    root = Path("/sys/fs/cgroup")
    try:
        if (root / "cpu.max").is_file():
            quota, period = (root / "cpu.max").read_text(encoding="utf-8").split()[:2]
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return float(quota) / float(period) if float(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # "max": no limit
        return None
