"""torch's flight recorder: the last collectives that this process started, each with its process group."""

from __future__ import annotations

import json
from typing import Any

from torchprof.attribute.gloo_queues import Queued
from torchprof.record.job import Job
from torchprof.record.torch_internals import optional
from torchprof.run.words import is_host_collective


def queued_collectives(job: Job, since_ns: int | None) -> list[Queued]:
    """The collectives that this process put into the queues of gloo since a time on the clock of the profiler.

    The recorder keeps the last ``TORCH_FR_BUFFER_SIZE`` (2,000) of the process. Empty if it is switched off, if this
    torch has none for gloo, and if the group of all collectives is known without it.
    """
    if job.group is not None or not job.groups or since_ns is None:
        return []
    dump = optional("torch._C._distributed_c10d._dump_fr_trace_json")
    if dump is None:
        return []
    of_name = {group.name: group for group in job.groups}
    queued = []
    for entry in json.loads(dump(True, False)).get("entries", ()):
        time_ns, name, group = _read(entry)
        if time_ns >= since_ns and is_host_collective(name) and group in of_name:
            queued.append(Queued(time_ns, name, of_name[group]))
    return queued


def _read(entry: dict[str, Any]) -> tuple[int, str, str]:
    """The time, the name of the range and the name of the group of one entry."""
    return int(entry["time_created_ns"]), str(entry["profiling_name"]), str(entry["process_group"][0])
