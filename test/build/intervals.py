"""A second program that reads a trace of torch's profiler: plain unions of intervals, and nothing of torchprof."""

from __future__ import annotations

import gzip
import json
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

_NODE = "autograd::engine::evaluate_function"
_ON_CPU = ("cpu_op", "cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")

Interval = tuple[int, int]


class Times(NamedTuple):
    """What a trace says, in ns. ``waits``: by thread, the time in no operator from the first to the last node that
    another thread ran in that gap. ``synchronizing``: of all threads, in calls that wait for a device."""

    waits: dict[Any, int]
    synchronizing: int
    extent: Interval


def events_of(path: Path) -> list[dict[str, Any]]:
    """The events with a duration."""
    opened = gzip.open if path.suffix == ".gz" else open
    with opened(path, "rt", encoding="utf-8") as file:
        document = json.load(file)
    return [event for event in document["traceEvents"] if event.get("ph") == "X"]


def interval(event: dict[str, Any]) -> Interval:
    start = round(float(event["ts"]) * 1000)
    return start, start + round(float(event["dur"]) * 1000)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as intervals that do not touch, in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((start, end))
    return joined


def length(intervals: Iterable[Interval]) -> int:
    return sum(end - start for start, end in union(intervals))


def times_of(path: Path) -> Times:
    """Whatever runs on the thread of a loop, or begins there, is the end of a gap: it does not wait for autograd."""
    ran: defaultdict[Any, list[Interval]] = defaultdict(list)
    begins: defaultdict[Any, list[int]] = defaultdict(list)
    nodes: defaultdict[Any, list[Interval]] = defaultdict(list)
    synchronizing = 0
    every = []
    for event in events_of(path):
        category, name = str(event.get("cat")), event["name"]
        if category in (*_ON_CPU, *_ON_DEVICE, "user_annotation"):
            every.append(interval(event))
        if category == "user_annotation" or name.startswith("torchprof:"):
            begins[event["tid"]].append(interval(event)[0])
        elif category in _ON_CPU:
            ran[event["tid"]].append(interval(event))
            if name.startswith(_NODE):
                nodes[event["tid"]].append(interval(event))
            if "Synchronize" in name:
                synchronizing += event["dur"] * 1000
    waits: dict[Any, int] = {}
    for thread, own in ran.items():
        by_others = sorted(node for other, of_thread in nodes.items() if other != thread for node in of_thread)
        cuts = union([*own, *((start, start) for start in begins[thread])])
        waits[thread] = 0
        for (_, free), (until, _) in pairwise(cuts):
            first = bisect_left(by_others, (free, 0))
            if here := [node for node in by_others[first:] if node[0] < until]:
                waits[thread] += min(until, max(end for _, end in here)) - here[0][0]
    extent = min(start for start, _ in every), max(end for _, end in every)
    return Times(waits, round(synchronizing), extent)
