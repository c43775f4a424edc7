"""Which rank of which job this process is, as ``torch.distributed`` knows it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from torchprof.attribute.process_groups import group_of_ranks, mesh_of_groups, sole_group
from torchprof.run.lockstep import GroupOfRanks
from torchprof.run.meta import MeshDim, name_of_job


class Job(NamedTuple):
    """``group``: the ranks of this rank's collectives; None if it is in groups of different ranks, or without a job.
    ``groups``: all groups of this rank that exchange anything.
    ``in_traces``: the job as JSON, in the form that ``torch.profiler.profile`` writes into traces; None without a job.
    ``name``: the job ID of torchrun or Slurm, "" without one."""

    rank: int = 0
    world_size: int = 1
    mesh: tuple[MeshDim, ...] = ()
    group: GroupOfRanks | None = None
    groups: tuple[GroupOfRanks, ...] = ()
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
    known = tuple(known for group in groups if (known := group_of_ranks(group)) is not None)
    return Job(rank, size, mesh, sole_group(groups), known, json.dumps(described), name_of_job())


def _groups() -> list[Mapping[str, Any]]:
    """The process groups of this rank, in the form that torch's profiler writes into traces. The API is private:
    without it, there are none."""
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
