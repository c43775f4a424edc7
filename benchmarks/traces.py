"""The time and memory per event to read a trace, compared with ``json.load`` of the same file.

The traces are artificial and have the steps of a GPU: of a million events, 290,000 are operators and labels, 190,000
runtime calls, 95,000 kernels, 50,000 Python functions and 380,000 flow events. Each variant runs in its own process,
since the peak memory of a process never falls. It is measured on Linux only.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.ratios import Ratio, say, show, verdict

SECONDS_A_MILLION = 6.0
MB_A_MILLION = 60.0
MB_OF_EIGHT_MILLIONS = 500.0
LAYERS = 50
WAYS = {"torchprof.from_trace": "ours", "json.load": "json"}


def measure(quick: bool) -> None:
    events = 50_000 if quick else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        count = write(trace, events)
        of_time_and_memory(trace, count, 1 if quick else 5)
        if not quick:
            of_a_large_one(Path(folder) / "large.json")


def of_time_and_memory(trace: Path, count: int, rounds: int) -> None:
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        for way, asked in WAYS.items():
            say(f"reading {count:,} events: {number + 1} of {rounds}", again=number > 0 or way != next(iter(WAYS)))
            found[way].append(ask_fresh_process(asked, trace))
    seconds = {way: [answer["seconds"] / count * 1e6 for answer in answers] for way, answers in found.items()}
    megabytes = {way: statistics.median(answer["peak"] / count for answer in answers) for way, answers in found.items()}
    ratio = Ratio.of(*seconds.values())
    ours, theirs = (statistics.median(each) for each in seconds.values())
    mine, other = megabytes.values()
    show(
        f"Reading a trace of {count:,} events, {trace.stat().st_size / 1e6:,.0f} MB; for a million of them",
        ["", *WAYS, "Ratio", "Quartiles", "Limit"],
        [
            [
                "time",
                f"{ours:.2f} s",
                f"{theirs:.2f} s",
                f"{ratio.median:.2f}",
                ratio.spread,
                verdict(ours, SECONDS_A_MILLION),
            ],
            [
                "peak of memory",
                f"{mine:.0f} MB",
                f"{other:.0f} MB",
                f"{mine / other:.3f}",
                "",
                verdict(mine, MB_A_MILLION),
            ],
        ],
        "The memory is what the process grew by, after its imports.",
    )


def of_a_large_one(trace: Path) -> None:
    say("writing 8,000,000 events")
    count = write(trace, 8_000_000)
    say("reading 8,000,000 events")
    answer = ask_fresh_process("ours", trace)
    whole = answer["whole"] / 1e6
    show(
        f"A trace of {count:,} events, {trace.stat().st_size / 1e9:.2f} GB",
        ["", "torchprof.from_trace", "Limit"],
        [
            ["time", f"{answer['seconds']:.1f} s", ""],
            ["peak of the whole process", f"{whole:.0f} MB", verdict(whole, MB_OF_EIGHT_MILLIONS)],
        ],
    )


def ask_fresh_process(way: str, trace: Path) -> dict[str, float]:
    """The output of this file in a new process."""
    command = [sys.executable, "-m", "benchmarks.traces", "--way", way, "--trace", str(trace)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(answer.stdout)
    return found


def read(way: str, trace: Path) -> dict[str, float]:
    """The seconds of one variant, the growth of its process in bytes, and the peak in bytes."""
    from torchprof.traces.read import from_trace

    before = peak_resident()
    start = time.perf_counter()
    if way == "ours":
        kept: object = from_trace(trace)
    else:
        with trace.open(encoding="utf-8") as file:
            kept = json.load(file)
    seconds = time.perf_counter() - start
    assert kept
    return {"seconds": seconds, "peak": peak_resident() - before, "whole": peak_resident()}


def peak_resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise SystemExit("Only Linux tells the peak of a process.")


def write(path: Path, events: int) -> int:
    """Write a trace of about this many events. Returns their number."""
    count = 0
    with path.open("w", encoding="utf-8") as file:
        file.write('{\n  "schemaVersion": 1,\n  "traceEvents": [\n')
        step = 0
        while count < events:
            texts = list(of_step(step))
            file.write(",\n" if step else "")
            file.write(",\n".join(texts))
            count += len(texts)
            step += 1
        file.write('\n  ],\n  "traceName": "made up",\n  "baseTimeNanoseconds": 1700000000000000000\n}\n')
    return count


def ranged(category: str, name: str, start: float, length: float, thread: int, args: str) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": 4242, "tid": {thread},\n'
        f'    "ts": {start:.3f}, "dur": {length:.3f},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def arrow(category: str, phase: str, which: int, start: float, thread: int) -> str:
    return (
        f'  {{\n    "ph": "{phase}", "id": {which}, "pid": 4242, "tid": {thread}, "ts": {start:.3f},\n'
        f'    "cat": "{category}", "name": "{category}"\n  }}'
    )


def kernel(name: str, start: float, by: int, which: int) -> str:
    return (
        f'  {{\n    "ph": "X", "cat": "kernel", "name": "void {name}<float, 128, 2>(int, float*)", "pid": 0,\n'
        f'    "tid": 7, "ts": {start:.3f}, "dur": 21.344,\n    "args": {{\n      "External id": {by}, "queued": 0, '
        f'"device": 0, "context": 1, "stream": 7, "correlation": {which}, "registers per thread": 40, '
        '"grid": [512, 1, 1], "block": [512, 1, 1]\n    }\n  }'
    )


def of_step(step: int) -> Iterator[str]:
    """The events of one training step in Kineto's format, each with different numbers."""
    at = 4_458_676_000_000.123 + step * 100_000
    number = step * 20 * LAYERS
    launch = 1_000_000_000 + step * 10 * LAYERS
    sequence = step * LAYERS

    whole = 900.0 * LAYERS
    yield ranged(
        "user_annotation", f"ProfilerStep#{step}", at, whole * 2 + 60, 1, f'"External id": {number}, "Ev Idx": {number}'
    )
    for forward in (True, False):
        thread = 1 if forward else 2
        for layer in range(LAYERS):
            start = at + 20 + layer * 900.0 + (0 if forward else whole)
            own = number + (layer * 2 + (not forward)) * 8 + 1
            seen = f'"Record function id": 0, "Ev Idx": {own}'
            if forward:
                made = f'"Sequence number": {sequence + layer}, "Fwd thread id": 0, {seen}'
                yield ranged(
                    "python_function",
                    f"net.py({layer}): forward",
                    start,
                    850.0,
                    1,
                    f'"Python id": {own}, "Ev Idx": {own}',
                )
                yield ranged(
                    "cpu_op",
                    f"torchprof:Net.block{layer % 50}.linear",
                    start + 1,
                    800.0,
                    1,
                    f'"External id": {own}, {seen}',
                )
                yield ranged("cpu_op", "aten::linear", start + 2, 700.0, 1, f'"External id": {own + 1}, {made}')
                yield ranged("cpu_op", "aten::addmm", start + 3, 600.0, 1, f'"External id": {own + 2}, {made}')
                yield arrow("fwdbwd", "s", sequence + layer + 1, start + 3, 1)
            else:
                which = sequence + LAYERS - 1 - layer
                made = f'"Sequence number": {which}, "Fwd thread id": 1, {seen}'
                node = "AddmmBackward0"
                yield ranged(
                    "cpu_op",
                    f"autograd::engine::evaluate_function: {node}",
                    start + 1,
                    800.0,
                    2,
                    f'"External id": {own}, {made}',
                )
                yield ranged("cpu_op", node, start + 2, 700.0, 2, f'"External id": {own + 1}, {made}')
                yield arrow("fwdbwd", "f", which + 1, start + 2, 2)
                yield ranged("cpu_op", "aten::mm", start + 3, 600.0, 2, f'"External id": {own + 2}, {seen}')
            called = launch + (layer * 2 + (not forward)) * 2
            asked = f'"External id": {own + 2}, "cbid": 211, "correlation": '
            yield ranged("cuda_runtime", "cudaStreamIsCapturing", start + 9, 0.4, thread, f"{asked}{called + 1}")
            yield arrow("ac2g", "f", called + 1, start + 9, thread)
            yield ranged("cuda_runtime", "cudaLaunchKernel", start + 10, 9.5, thread, f"{asked}{called}")
            yield arrow("ac2g", "s", called, start + 10, thread)
            yield kernel("gemm", start + 400, own + 2, called)
            yield arrow("ac2g", "f", called, start + 400, 7)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    parser.add_argument("--way", choices=tuple(WAYS.values()), help=argparse.SUPPRESS)
    parser.add_argument("--trace", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.way:
        print(json.dumps(read(options.way, options.trace)))
    else:
        measure(options.quick)


if __name__ == "__main__":
    main()
