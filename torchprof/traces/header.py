"""The header of a trace: everything in the file but its events."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchprof.attribute.process_groups import mesh_of_groups
from torchprof.run.meta import Meta
from torchprof.version import __version__

_GIGABYTE = 2**30


def meta_of_header(path: Path, header: Mapping[str, Any]) -> Meta:
    """Where the trace was recorded: machine, devices, rank, process groups."""
    distributed = _distributed(header)
    rank, ranks = (_number(distributed.get(key)) for key in ("rank", "world_size"))
    devices: Counter[str] = Counter()
    properties = header.get("deviceProperties")
    for device in properties if isinstance(properties, list) else ():
        if isinstance(device, dict) and device.get("name"):
            memory = device.get("totalGlobalMem")
            size = f" ({memory / _GIGABYTE:.0f} GB)" if isinstance(memory, int) and memory > 0 else ""
            devices[f"{device['name']}{size}"] += 1
    environment = [("devices", ", ".join(f"{count} × {name}" for name, count in devices.items()))] if devices else []
    if ranks:
        backend = " ".join(str(distributed[key]) for key in ("backend", "nccl_version") if distributed.get(key))
        environment.append(("ranks", f"{ranks}{', ' if backend else ''}{backend}"))
    machine = header.get("host_name")
    return Meta(
        model=(),
        rank=rank,
        world_size=max(ranks, 1),
        mesh=mesh_of_groups(process_groups(header), rank),
        versions=(("torchprof", __version__),),
        environment=tuple(environment),
        machine=machine if isinstance(machine, str) else "",
        script=str(path.absolute()),
    )


def _distributed(header: Mapping[str, Any]) -> Mapping[str, Any]:
    distributed = header.get("distributedInfo")
    return distributed if isinstance(distributed, dict) else {}


def _number(value: object) -> int:
    return value if type(value) is int and value > 0 else 0


def process_groups(header: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The process groups of the rank, as torch describes them in the header."""
    groups = _distributed(header).get("pg_config")
    return [group for group in groups if isinstance(group, dict)] if isinstance(groups, list) else []
