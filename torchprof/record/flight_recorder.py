"""torch's flight recorder: the last collectives that this process started, each with its process group."""

from __future__ import annotations

import json

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
    of_name = {group.name: group for group in job.groups}
    return [
        Queued(time_ns, name, of_name[group])
        for time_ns, name, group in _entries()
        if time_ns >= since_ns and is_host_collective(name) and group in of_name
    ]


def _entries() -> list[tuple[int, str, str]]:
    """For each collective of the recorder: its time, the name of its range, and the name of its group. The API is
    private: without it, there are none."""
    dump = optional("torch._C._distributed_c10d._dump_fr_trace_json")
    try:
        entries = [] if dump is None else json.loads(dump())["entries"]
        return [(entry["time_created_ns"], entry["profiling_name"], entry["process_group"][0]) for entry in entries]
    except (LookupError, TypeError, ValueError):
        return []
