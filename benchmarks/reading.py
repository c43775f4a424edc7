"""The time and memory from the return of torch's stop to the printed table.

They are compared with ``function_events``, torch's own list, made from the same point of the same recording. The time
of the stop itself is torch's, and is shown separately.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

import torchprof
from benchmarks.ratios import Ratio, say, show, verdict
from benchmarks.subjects import Subject, on_stop, subjects, tiny_layers

FASTER = 12.0
LINEAR = 1.3
MEMORY = 0.1
WHOLE_BLOCK = 1.3
BLOCKS = ("torchprof", "torch")
SIZES = (10_000, 100_000, 1_000_000, 4_000_000)


class Recording:
    """Some forwards (and backwards) under torchprof, measured from the return of the profiler's stop.

    ``profiler``: torch's own profile object; torchprof and torch's list both read from it. ``left``: the seconds that
    torchprof needed to leave the block after the stop.
    """

    def __init__(self, subject: Subject, forwards: int = 1, backward: bool = False, **flags: Any) -> None:
        self.prof = torchprof.Profile(subject.model, **flags)
        with self.prof:
            self.profiler = self.prof._session._profiler
            on_stop(self.profiler, self._stopped)
            for _ in range(forwards):
                result = subject.forward()
                if backward:
                    (result[0] if isinstance(result, tuple) else result).sum().backward()
                del result
            self._leaving = time.perf_counter()
        self.left = time.perf_counter() - self._stop_returned
        self.stop = self._stop_returned - self._leaving
        subject.model.zero_grad()
        self.events = sum(1 for _ in self.profiler.kineto_results.events())

    def _stopped(self) -> None:
        self._stop_returned = time.perf_counter()

    def table(self) -> float:
        """The seconds from the stop to the finished table."""
        start = time.perf_counter()
        self.make_run()
        str(self.prof)
        return self.left + time.perf_counter() - start

    def make_run(self) -> float:
        """The seconds to read, attribute and sum the events, from the stop on."""
        start = time.perf_counter()
        assert self.prof.run
        return self.left + time.perf_counter() - start

    def event_list(self) -> float:
        """The seconds from the stop to torch's own list."""
        start = time.perf_counter()
        assert self.profiler.function_events
        return time.perf_counter() - start


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    against_event_list(quick)
    if not quick:
        in_fresh_processes()
    by_size(quick)
    memory(quick)


CASES: dict[str, dict[str, Any]] = {
    "1 forward": {},
    "1 forward, memory": {"profile_memory": True},
    "1 training step": {"backward": True},
    "10 forwards": {"forwards": 10},
}


def against_event_list(quick: bool) -> None:
    """Both variants in turn on the same recordings, for each model."""
    rows = []
    for subject in subjects(quick):
        subject.forward()
        for name, options in list(CASES.items())[: 1 if quick else None]:
            took: dict[str, list[float]] = {"stop": [], "torchprof": [], "function_events": []}
            rounds = 2 if quick else 3 if options.get("forwards") else 5
            for number in range(rounds):
                say(f"reading {subject.name}, {name}: {number + 1} of {rounds}", again=number > 0)
                recording = Recording(subject, **options)
                ways = {"torchprof": recording.table, "function_events": recording.event_list}
                for way in ways if number % 2 else reversed(ways):
                    gc.collect()
                    took[way].append(ways[way]())
                took["stop"].append(recording.stop)
            ratio = Ratio.of(took["function_events"], took["torchprof"])
            rows.append(
                [
                    subject.name,
                    name,
                    str(recording.events),
                    *(f"{statistics.median(took[way]) / recording.events * 1e6:.2f} us" for way in took),
                    f"{ratio.median:.1f}x",
                    f"{ratio.quartiles[0]:.1f} to {ratio.quartiles[1]:.1f}",
                    ratio.verdict(FASTER, at_least=True),
                ]
            )
    show(
        "From the profiler's stop to the printed table, for each event",
        ["Model", "Recorded", "Events", "(the stop)", "torchprof", "function_events", "Faster", "Quartiles", "Limit"],
        rows,
        "torchprof: leaving the block, reading, attributing, summing, drawing. The garbage collector is on for both.",
    )


def in_fresh_processes() -> None:
    """The first table of a process: it includes imports and filling caches, as in most scripts."""
    took: dict[str, list[float]] = {"torchprof": [], "function_events": []}
    for number in range(3):
        for way in took:
            say(f"the first table of a process: {number + 1} of 3", again=number > 0 or way != "torchprof")
            took[way].append(ask_fresh_process("--first-of", way)["seconds"])
    ratio = Ratio.of(took["function_events"], took["torchprof"])
    cells = [f"{statistics.median(seconds) * 1e3:.1f} ms" for seconds in took.values()]
    show(
        "The same as the first thing that a fresh process does: one forward of 500 tiny Linear",
        ["", "torchprof", "function_events", "Faster", "Quartiles", "Limit"],
        [["first table", *cells, f"{ratio.median:.1f}x", ratio.spread, "for information"]],
    )


def by_size(quick: bool) -> None:
    """The same for more and more events of one model: the time per event must not grow."""
    subject = Subject("", tiny_layers().eval(), torch.rand(1, 8), 0.0)
    per_forward = Recording(subject).events
    sizes = (5_000, 10_000) if quick else SIZES
    rounds = 1 if quick else 2
    found: dict[int, list[PerEvent]] = {size: [] for size in sizes}
    for number in range(rounds):
        for size in sizes:
            say(f"reading {size:,} events: {number + 1} of {rounds}", again=number > 0)
            forwards = max(1, round(size / per_forward))
            few = [per_event(Recording(subject, forwards)) for _ in range(1 if quick or size >= 500_000 else 5)]
            found[size].append(PerEvent(*(statistics.median(values) for values in zip(*few))))
    rows = []
    for size in sizes:
        stop, run, table = zip(*found[size])
        of_run, of_table = (Ratio.of(ours, first) for ours, first in zip((run, table), list(zip(*found[sizes[0]]))[1:]))
        rows.append(
            [
                f"{size:,}",
                *(f"{statistics.median(values) * 1e6:.2f} us" for values in (stop, run, table)),
                str(of_run),
                str(of_table),
                verdict(max(of_run.median, of_table.median), LINEAR) if size != sizes[0] else "",
            ]
        )
    show(
        "500 tiny Linear, more and more events: time for each, without the drawing (run) and with it (table)",
        ["Events", "(the stop)", "Run", "Table", "Run, to the first", "Table, to the first", "Limit"],
        rows,
    )


class PerEvent(NamedTuple):
    """Seconds per event: of torch's own stop, from there to the run, and from there to the table."""

    stop: float
    run: float
    table: float


def per_event(recording: Recording) -> PerEvent:
    gc.collect()
    run = recording.make_run()
    table = run + recording.table() - recording.left
    return PerEvent(*(seconds / recording.events for seconds in (recording.stop, run, table)))


def memory(quick: bool) -> None:
    """Resident memory per event; each variant runs in a new process."""
    size = 5_000 if quick else 100_000
    found = {}
    for way in ("torchprof", "function_events"):
        say(f"memory of {way}")
        found[way] = ask_fresh_process("--memory-of", way, "--events", str(size))
    rows = []
    for name in ("peak", "held"):
        ours, theirs = found["torchprof"][name], found["function_events"][name]
        rows.append(
            [name, f"{ours:,.0f} B", f"{theirs:,.0f} B", f"{ours / theirs:.3f}x", verdict(ours / theirs, MEMORY)]
        )
    show(
        f"Resident memory for each of {size:,} events, over that at the stop's return",
        ["", "torchprof", "function_events", "Ratio", "Limit"],
        rows,
        "Each in a fresh process. Held: with the run and its text, or the list, still there.",
    )
    forwards = 10 if quick else 400
    ours, theirs = (ask_fresh_process("--block-of", way, "--events", str(forwards))["peak"] for way in BLOCKS)
    ratio = f"{ours / theirs:.2f}x"
    show(
        f"Resident memory at the peak of a whole block of {forwards:,} forwards of 500 layers, over that at its start",
        ["", "torchprof", "torch", "Ratio", "Limit"],
        [
            [
                "peak",
                f"{ours / 2**20:,.0f} MiB",
                f"{theirs / 2**20:,.0f} MiB",
                ratio,
                verdict(ours / theirs, WHOLE_BLOCK),
            ]
        ],
        "torch: its profiler inside annotate(model), so with the same events, which it keeps. Ours: with the run.",
    )


def block_of(way: str, forwards: int) -> dict[str, float]:
    """The resident bytes at the peak of a whole block, from its start to the run. Linux only."""
    torch.set_num_threads(1)
    subject = Subject("", tiny_layers().eval(), torch.rand(1, 8), 0.0)
    Recording(subject).table()
    gc.collect()
    give_back_freed()
    restart_peak()
    before = resident()
    block: Any = torchprof.Profile(subject.model) if way == "torchprof" else torch.autograd.profiler.profile()
    with nullcontext() if way == "torchprof" else torchprof.annotate(subject.model), block:
        for _ in range(forwards):
            subject.forward()
    assert way != "torchprof" or block.run.rows
    return {"peak": peak_resident() - before}


def ask_fresh_process(*options: str) -> dict[str, float]:
    """The output of this file in a new process."""
    command = [sys.executable, "-m", "benchmarks.reading", *options]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def first_of(way: str) -> dict[str, float]:
    """The seconds of one variant, as the first work of its process."""
    torch.set_num_threads(1)
    recording = Recording(Subject("", tiny_layers().eval(), torch.rand(1, 8), 0.0))
    return {"seconds": recording.table() if way == "torchprof" else recording.event_list()}


def memory_of(way: str, events: int) -> dict[str, float]:
    """The peak and the final resident bytes per event that one variant adds after the stop. Linux only."""
    torch.set_num_threads(1)
    subject = Subject("", tiny_layers().eval(), torch.rand(1, 8), 0.0)
    warm = Recording(subject)  # a first recording, so that imports and caches are not measured
    warm.table()
    warm.event_list()
    per_forward = warm.events
    del warm
    gc.collect()
    prof = torchprof.Profile(subject.model)
    with prof:
        for _ in range(round(events / per_forward)):
            subject.forward()
    profiler = prof._session._profiler
    give_back_freed()
    restart_peak()
    before = resident()
    kept = str(prof) if way == "torchprof" else profiler.function_events
    peak = peak_resident()
    gc.collect()
    give_back_freed()
    held = resident()
    assert kept
    count = sum(1 for _ in profiler.kineto_results.events())
    return {"peak": (peak - before) / count, "held": (held - before) / count}


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def peak_resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def restart_peak() -> None:
    """Reset the peak to the current resident size. If the system forbids it, the stop's own peak may hide ours."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def give_back_freed() -> None:
    """Make the C library return freed memory to the system, so that later allocations are visible."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    parser.add_argument("--memory-of", choices=("torchprof", "function_events"), help=argparse.SUPPRESS)
    parser.add_argument("--first-of", choices=("torchprof", "function_events"), help=argparse.SUPPRESS)
    parser.add_argument("--block-of", choices=BLOCKS, help=argparse.SUPPRESS)
    parser.add_argument("--events", type=int, default=100_000, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of:
        print(json.dumps(memory_of(options.memory_of, options.events)))
    elif options.block_of:
        print(json.dumps(block_of(options.block_of, options.events)))
    elif options.first_of:
        print(json.dumps(first_of(options.first_of)))
    else:
        measure(options.quick)


if __name__ == "__main__":
    main()
