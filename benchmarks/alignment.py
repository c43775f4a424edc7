"""What it costs to find the layers of a trace that names none, beside reading the trace without layers.

The trace is of training steps of BERT-base, recorded without labels. The layers are found by running the forward on the
meta device and aligning its operators with the trace.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torchprof
from benchmarks.ratios import Ratio, asked_quick, median_ms, show, take_turns
from examples.models import Bert
from torchprof.traces.reference import references_of


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    model, tokens = Bert(), torch.randint(0, 30522, (1, 16))
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with torch.profiler.profile() as prof:
            for _ in range(2 if quick else 20):
                model(tokens)[1].sum().backward()
        prof.export_chrome_trace(str(trace))
        ways: dict[str, Callable[[], object]] = {
            "no layers": lambda: torchprof.from_trace(trace),
            "the reference": lambda: references_of(model, "Bert", (tokens,), {}),
            "with the model": lambda: torchprof.from_trace(trace, model, inputs=(tokens,)),
        }
        took = take_turns({name: timed(way) for name, way in ways.items()}, 2 if quick else 7, "aligning a trace")
        events = len(json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
    rows = []
    for name, seconds in took.items():
        ratio = Ratio.of(seconds, took["no layers"])
        rows.append([name, median_ms(seconds), str(ratio), ratio.spread, "for information"])
    show(
        f"Layers for a trace that names none: BERT-base, training, {events:,} events",
        ["", "Median", "Ratio", "Quartiles", "Limit"],
        rows,
        "The reference: a copy of the model and three forwards on the meta device. With the model: all of it.",
    )


def timed(work: Callable[[], object]) -> Callable[[], float]:
    def seconds() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return seconds


if __name__ == "__main__":
    measure(asked_quick(__doc__))
