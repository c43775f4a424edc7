"""Data over time for the page: memory of each device, and calls of each layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any

from torchprof.analyze.memory.peak import about_peak, samples_by_device
from torchprof.analyze.report import stacked
from torchprof.reports.page.tables import report_data
from torchprof.run.memory import KINDS, Memory
from torchprof.run.run import Run
from torchprof.run.timeline import Timeline
from torchprof.run.words import FORWARD, PHASES

_CALLS = 100
"""The largest number of calls that are shown for a layer."""
_LIVE_SHOWN = 200
"""The largest number of rows of what was live at the peak; the last row is the sum of all others."""
_INTERVALS = 600
"""The number of equal intervals into which memory over time is divided."""


def calls_over_time(run: Run, nodes: Mapping[int, int]) -> Iterator[tuple[int, int, list[int]]]:
    """For each layer with more than one call in the last cycle: its node, a stride n, and the durations of every nth
    forward call in ns, in the order of time."""
    if run.timeline is None or run.timeline.spans is None:
        return
    columns = run.timeline.spans.columns
    names = ("start_ns", "end_ns", "layer", "phase", "name")
    calls = sorted(
        (start, end - start, layer)
        for start, end, layer, phase, name in zip(*(columns[name] for name in names))
        if layer >= 0 and name < 0 and PHASES[phase] == FORWARD
    )
    lasted: dict[int, list[int]] = {}
    for _, ns, layer in calls:
        lasted.setdefault(layer, []).append(ns)
    for layer, values in lasted.items():
        if len(values) > 1:
            every = -(-len(values) // _CALLS)
            yield nodes[layer], every, values[::every]


def memory_of(run: Run, nodes: Mapping[int, int]) -> Iterator[tuple[Memory, dict[str, Any]]]:
    """Each device of which there is something to show: its peak, what was live at the peak, as in the report "memory",
    and memory over time if the run has it."""
    samples = samples_by_device(run)
    for memory in run.memory:
        timeline = run.timeline
        if timeline is not None and timeline.rank != memory.rank:  # a run of several ranks has the timeline of only one
            timeline = None
        course = None if timeline is None or memory.device not in timeline.devices else _course(timeline, memory.device)
        if memory.peak_bytes > 0 or memory.held or course:
            of_device = samples.get((memory.rank, memory.device), ())
            about = stacked(about_peak(run, memory, of_device, depth=None, shown=_LIVE_SHOWN))
            yield (
                memory,
                {
                    "device": memory.device,
                    "peakBytes": memory.peak_bytes,
                    "peakNs": memory.peak_ns,
                    "report": report_data(about, nodes),
                    "course": course,
                    "dropped": 0 if timeline is None else timeline.dropped,
                },
            )


def _course(timeline: Timeline, device: str) -> dict[str, Any] | None:
    """Memory over time above the start, as a step function: from each of ``timesNs`` until the next one, ``heights``
    has the bytes by kind (the last kind: unknown). Each interval has two steps: its maximum and its last level."""
    number = timeline.devices.index(device)
    columns = timeline.columns
    steps = [index for index, where in enumerate(columns["device"]) if where == number]
    if not steps:
        return None
    length = max(columns["time_ns"][steps[-1]] // _INTERVALS, 1)
    alive = [0] * (len(KINDS) + 1)
    times: list[int] = [0]
    heights: list[list[int]] = [alive[:]]

    def add(time: int, level: list[int]) -> None:
        if level != heights[-1]:
            times.append(time)
            heights.append(level)

    for _, interval in groupby(steps, lambda index: columns["time_ns"][index] // length):
        whole = sum(alive)
        highest, top, level = whole, times[-1], alive[:]
        time = top
        for index in interval:
            time, nbytes = columns["time_ns"][index], columns["nbytes"][index]
            alive[columns["kind"][index]] += nbytes
            whole += nbytes
            if whole > highest:
                highest, top, level = whole, time, alive[:]
        add(top, level)
        add(time, alive[:])
    return {"lastNs": columns["time_ns"][steps[-1]], "timesNs": times, "heights": heights}
