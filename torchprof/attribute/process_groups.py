"""The process groups of a rank, read from the entries that torch keeps in a job and writes to a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.meta import MeshDim

_OF_MESH = "mesh_"
"""Prefix of the description of a group that is one dimension of a ``DeviceMesh``. The name of the dimension follows."""


def sole_group(groups: Iterable[Mapping[str, Any]]) -> GroupOfRanks | None:
    """The group that runs the collectives that do not name a group.

    None if there are several groups; ``NOT_RECORDED`` if no group is known. Groups of one rank exchange nothing and do
    not count. Groups of the same ranks count as one.

    ``groups``: the entries of "pg_config" in a trace, each with name, description and ranks. An empty list of ranks
    means all ranks of the job.
    """
    groups = list(groups)
    if not groups:
        return NOT_RECORDED
    described: dict[tuple[int, ...], GroupOfRanks] = {}
    for group in groups:
        known = _group_of_ranks(group)
        if known is not None:
            described.setdefault(_ranks(group), known)
    return next(iter(described.values())) if len(described) == 1 else None


def _group_of_ranks(group: Mapping[str, Any]) -> GroupOfRanks | None:
    """The group that an entry describes; None if it has one rank, which exchanges nothing, or an unknown size."""
    size, ranks = group.get("group_size", group.get("pg_size")), _ranks(group)
    if type(size) is not int or size <= 1:
        return None
    text = str(list(ranks)) if ranks else ""
    return GroupOfRanks(str(group.get("pg_name", "")), str(group.get("pg_desc", "")), size, text)


def mesh_of_groups(groups: Iterable[Mapping[str, Any]], rank: int) -> tuple[MeshDim, ...]:
    """The dimensions of a ``DeviceMesh`` that the groups are named after, each with its size and the position of
    ``rank`` in it."""
    dims: dict[str, MeshDim] = {}
    for group in groups:
        name, ranks = str(group.get("pg_desc", "")), _ranks(group)
        if name.startswith(_OF_MESH) and rank in ranks:
            name = name.removeprefix(_OF_MESH)
            dims.setdefault(name, MeshDim(name, len(ranks), ranks.index(rank)))
    return tuple(dims.values())


def _ranks(group: Mapping[str, Any]) -> tuple[int, ...]:
    ranks = group.get("ranks")
    return tuple(rank for rank in ranks if type(rank) is int) if isinstance(ranks, list) else ()
