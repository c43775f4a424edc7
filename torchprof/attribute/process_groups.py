"""The process groups of a rank, from what torch writes about them in a job and in a trace."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torchprof.run.lockstep import NOT_RECORDED, GroupOfRanks
from torchprof.run.meta import MeshDim

_OF_MESH = "mesh_"
"""Prefix of the description of a group that is one dimension of a ``DeviceMesh``; the dimension's name follows."""


def sole_group(groups: Iterable[Mapping[str, Any]]) -> GroupOfRanks | None:
    """The group of collectives that do not name one: None if there are several, ``NOT_RECORDED`` if none is known.

    ``groups`` are the entries of "pg_config" in a trace: name, description, and ranks, empty for all ranks of the job.
    Groups of one rank exchange nothing and do not count; groups of the same ranks count as one.
    """
    groups = list(groups)
    if not groups:
        return NOT_RECORDED
    found: dict[tuple[int, ...], GroupOfRanks] = {}
    for group in groups:
        size, ranks = group.get("group_size", group.get("pg_size")), _ranks(group)
        if type(size) is int and size > 1:
            text = str(list(ranks)) if ranks else ""
            described = GroupOfRanks(str(group.get("pg_name", "")), str(group.get("pg_desc", "")), size, text)
            found.setdefault(ranks, described)
    return next(iter(found.values())) if len(found) == 1 else None


def mesh_of_groups(groups: Iterable[Mapping[str, Any]], rank: int) -> tuple[MeshDim, ...]:
    """The dimensions of a ``DeviceMesh`` that groups are named after, with the size and the position of ``rank``."""
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
