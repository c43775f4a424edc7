"""How the time and the memory of reading, drawing and saving grow with what is in a file, one dimension at a time.

Each dimension is doubled twice. The exponent is the slope between the first and the last size: 1 is linear, 2 a square.
What is above 1 by sorting, or by a cache that is too small, is within the limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
import tempfile
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torchprof
from benchmarks.merge import of_rank
from benchmarks.ratios import show, verdict
from torchprof import Run, TorchprofError
from torchprof.run.file import run_of
from torchprof.run.meta import RunWarning

LIMIT = 1.15
REPORTS = ("tree", "ops", "top", "summary", "memory", "markdown", "html", "csv", "json")


def event(name: str, start: float, lasts: float, category: str = "cpu_op", **more: Any) -> dict[str, Any]:
    given = {key: more.pop(key) for key in ("pid", "tid") if key in more}
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": lasts,
        "args": more,
        **given,
    }


def nested(count: int, name: Callable[[int], str], category: str = "cpu_op") -> list[dict[str, Any]]:
    return [event(name(number), number, 2 * (count - number), category) for number in range(count)]


def word(number: int) -> str:
    """A number without digits: names that differ in a number alone are one layer."""
    return str(number).translate(str.maketrans("0123456789", "abcdefghij"))


def on_device(number: int, **where: Any) -> list[dict[str, Any]]:
    launch = event("cudaLaunchKernel", 10 * number, 4, "cuda_runtime", correlation=number + 1)
    return [
        launch,
        event("gemm", 10 * number + 5, 4, "kernel", correlation=number + 1, pid=0, **{"stream": 7, **where}),
    ]


def optimizer_step(number: int, optimizer: int) -> dict[str, Any]:
    return event(f"Optimizer.step#{word(optimizer)}.step", 10 * number, 5, "user_annotation")


def memory(number: int) -> dict[str, Any]:
    about = {"Device Type": 0, "Device Id": -1, "Addr": number, "Bytes": 64, "Total Allocated": 64 * number}
    return {"ph": "i", "s": "t", "name": "[memory]", "pid": 1, "tid": 1, "ts": number + 2, "args": about}


def flat(make: Callable[[int], dict[str, Any]]) -> Callable[[int], list[dict[str, Any]]]:
    return lambda count: [make(number) for number in range(count)]


def in_model(count: int, name: Callable[[int], str]) -> list[dict[str, Any]]:
    ranges = [event(f"torchprof:Net.{name(number)}", 10 * number, 8, "user_annotation") for number in range(count)]
    return [event("torchprof:Net", 0, 10 * count, "user_annotation"), *ranges]


TRACES: dict[str, tuple[int, Callable[[int], Iterable[dict[str, Any]]]]] = {
    "events of one name": (60_000, flat(lambda n: event("aten::mm", 10 * n, 5))),
    "events of many names": (5_000, flat(lambda n: event(f"aten::{word(n)}", 10 * n, 5))),
    "threads": (10_000, flat(lambda n: event("aten::mm", 10 * n, 5, tid=n))),
    "processes": (10_000, flat(lambda n: event("aten::mm", 10 * n, 5, pid=n))),
    "devices": (2_000, lambda count: [part for n in range(count) for part in on_device(n, device=n, tid=7)]),
    "streams": (5_000, lambda count: [part for n in range(count) for part in on_device(n, device=0, stream=n, tid=n)]),
    "memory events": (20_000, lambda count: [event("aten::mm", 0, 2 * count), *map(memory, range(count))]),
    "steps": (5_000, flat(lambda n: event(f"ProfilerStep#{n}", 20 * n, 19, "user_annotation"))),
    "layers beside one another": (2_000, lambda count: in_model(count, lambda n: f"m{n}")),
    "layers of three levels": (2_000, lambda count: in_model(count, lambda n: f"m{n // 100}.m{n // 10}.m{n}")),
    "depth of operators": (10_000, lambda count: nested(count, lambda n: f"aten::{word(n)}")),
    "depth of ranges": (10_000, lambda count: nested(count, word, "user_annotation")),
    "depth of modules": (5_000, lambda count: nested(count, lambda n: f"nn.Module: Net_{n}", "python_function")),
    "depth of a label": (100_000, lambda n: [event("torchprof:" + ".".join(["a"] * n), 1, 9, "user_annotation")]),
    "arguments of an event": (100_000, lambda count: [event("aten::mm", 1, 9, **{f"k{n}": n for n in range(count)})]),
    "shapes of an event": (
        30_000,
        lambda count: [event("aten::mm", 1, 9, **{"Input Dims": [[n, 2] for n in range(count)]})],
    ),
    "values nan of an event": (100_000, lambda count: [event("aten::mm", 1, 9, values=[math.nan] * count)]),
    "broken events": (10_000, flat(lambda n: event("aten::mm", 10 * n, 5, **({"x": "NONE"} if n % 2 else {})))),
    "optimizers": (2_000, lambda count: [optimizer_step(n, n % count) for n in range(2 * count)]),
    "length of a name": (300_000, lambda count: [event("x" * count, 1, 9), event("y/" * (count // 2), 11, 9)]),
    "numbers in a name": (
        100_000,
        lambda count: [event("1 2" * count, 1, 9, "user_annotation"), event("aten::mm", 2, 3)],
    ),
    "labels of backslashes": (
        100_000,
        lambda count: [event("\\" * count, 1, 9, "user_annotation"), event("aten::mm", 2, 3)],
    ),
}
"""By what grows: its first number, and the events of a trace with so many of it."""


def used(run: Run, folder: Path) -> None:
    """Draw a run in every form, save it, and read it again."""
    str(run)
    for name in REPORTS:
        try:
            run.report(name)
        except TorchprofError:
            continue
    run.save(folder / "run.json")
    torchprof.load(folder / "run.json")


def reading(make: Callable[[int], Iterable[dict[str, Any]]], folder: Path) -> Callable[[int], Callable[[], None]]:
    def of(count: int) -> Callable[[], None]:
        path = folder / f"{count}.json"
        path.write_text(json.dumps({"traceEvents": [*make(count)]}).replace('"NONE"', "nan/"))
        return lambda: used(torchprof.from_trace(path, with_timeline=True), folder)

    return of


def of_ranks(folder: Path) -> Callable[[int], Callable[[], None]]:
    """Runs of so many ranks, each with a layer and with a warning of its own."""
    path = folder / "rank.json"
    path.write_text(json.dumps({"traceEvents": in_model(20, lambda number: f"m{number}")}))
    torchprof.from_trace(path).save(path)
    text = path.read_text()

    def of_one(rank: int) -> Run:
        run = run_of(json.dumps(of_rank(json.loads(text.replace("m19", f"m{19 + rank}")), rank)).encode(), f"{rank}")
        about = RunWarning.of("trace_cut", file=f"{rank}.json", events=1, reason="")
        return replace(run, metas=(replace(run.meta, world_size=10**6, warnings=(about,)),))

    def of(count: int) -> Callable[[], None]:
        runs = [*map(of_one, range(count))]
        return lambda: used(torchprof.merge(runs), folder)

    return of


def measured(work: Callable[[], None]) -> tuple[float, int]:
    """Seconds of the processor, the less of two, and bytes at the peak."""
    seconds = []
    for _ in range(2):
        gc.collect()
        start = time.process_time()
        work()
        seconds.append(time.process_time() - start)
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return min(seconds), peak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks growth", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small files: shows that it runs")
    parser.add_argument("dimensions", nargs="*", help="of those that it prints; default: all")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows, is_linear = [], True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files = {name: (first, reading(make, folder)) for name, (first, make) in TRACES.items()}
        for dimension, (first, of) in {**files, "ranks": (200, of_ranks(folder))}.items():
            if options.dimensions and dimension not in options.dimensions:
                continue
            first = 50 if options.quick else first
            of(50)()
            (seconds, least), _, (longest, most) = (measured(of(first * times)) for times in (1, 2, 4))
            slopes = math.log2(longest / seconds) / 2, math.log2(most / least) / 2
            is_linear &= options.quick or max(slopes) <= LIMIT
            figures = [f"{longest:.2f} s", f"{slopes[0]:.2f}", f"{most / 2**20:.0f} MiB", f"{slopes[1]:.2f}"]
            rows.append([dimension, f"{4 * first:,}", *figures, verdict(max(slopes), LIMIT)])
            print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    show("How time and memory grow", ["What grows", "Up to", "Time", "Exponent", "Memory", "Exponent", "Limit"], rows)
    sys.exit(not is_linear)


if __name__ == "__main__":
    main()
