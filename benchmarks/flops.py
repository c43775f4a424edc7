"""The cost of counting FLOPs: inside the block, for each event afterwards, and from shapes alone."""

from __future__ import annotations

import gc
import statistics
import subprocess
import sys

import torch

import torchprof
from benchmarks.inside import ROUNDS, timed
from benchmarks.ratios import Ratio, asked_quick, median_ms, say, show, take_turns, verdict
from benchmarks.reading import Recording
from benchmarks.subjects import bare, subjects

INSIDE = {"500 tiny Linear": 1.25, "AlexNet 1x3x224x224": 1.05, "BERT-base 1x128": 1.05}
ESTIMATE_US = 3.0
SHAPES_ALONE_S = 2.0
_BERT = """
import time, torch, torchprof
from examples.models import Bert
model, x = Bert().eval(), torch.randint(30522, (1, 128))
torchprof.flops
start = time.perf_counter()
with torch.set_grad_enabled({grad}):
    torchprof.flops(model, x)
print(time.perf_counter() - start)
"""


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    inside(quick)
    estimating(quick)
    if not quick:
        shapes_alone()


def inside(quick: bool) -> None:
    rows = []
    for subject in subjects(quick):
        subject.forward()
        took = take_turns(
            {
                "bare": lambda: timed(subject, lambda: bare(record_shapes=True)),  # noqa: B023
                "torchprof": lambda: timed(subject, lambda: torchprof.Profile(subject.model, with_flops=True)),  # noqa: B023
            },
            2 if quick else ROUNDS[subject.name],
            f"inside the block with FLOPs, {subject.name}",
        )
        ratio = Ratio.of(took["torchprof"], took["bare"])
        rows.append(
            [
                subject.name,
                *(median_ms(took[way]) for way in took),
                str(ratio),
                ratio.spread,
                ratio.verdict(INSIDE[subject.name]),
            ]
        )
    show(
        "Inside the block with FLOPs: one forward, one thread",
        ["Model", "Bare", "torchprof", "torchprof/bare", "Quartiles", "Limit"],
        rows,
        "Bare: torch.autograd.profiler.profile(use_kineto=True, record_shapes=True).",
    )


def estimating(quick: bool) -> None:
    """Two recordings of the same work with shapes: the extra time to make the run if FLOPs are counted."""
    rows = []
    for subject in subjects(quick):
        subject.forward()
        took: dict[str, list[float]] = {"plain": [], "with FLOPs": []}
        for number in range(2 if quick else 7):
            say(f"estimating, {subject.name}: {number + 1}", again=number > 0)
            for way in took:
                flags = {"with_flops": way == "with FLOPs", "record_shapes": True}
                recording = Recording(subject, 1 if quick else 10, backward=True, **flags)
                gc.collect()
                took[way].append((recording.make_run() - recording.left) / recording.events * 1e6)
                events = recording.events
                del recording
        more = statistics.median(ours - theirs for ours, theirs in zip(took["with FLOPs"], took["plain"]))
        rows.append(
            [
                subject.name,
                f"{events:,}",
                *(f"{statistics.median(values):.2f} us" for values in took.values()),
                f"{more:.2f} us",
                verdict(more, ESTIMATE_US),
            ]
        )
    show(
        "Making the run of ten training steps, for each event",
        ["Model", "Events", "Plain", "With FLOPs", "More", "Limit (us)"],
        rows,
    )


def shapes_alone() -> None:
    """torchprof.flops as the first call of a process after its imports."""
    rows = []
    for name, grad in (("forward", False), ("forward and backward", True)):
        seconds = []
        for number in range(3):
            say(f"torchprof.flops of BERT-base, {name}: {number + 1} of 3", again=number > 0)
            command = [sys.executable, "-c", _BERT.format(grad=grad)]
            seconds.append(float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout))
        median = statistics.median(seconds)
        rows.append(["BERT-base 1x128", name, f"{median:.2f} s", verdict(median, SHAPES_ALONE_S)])
    show("torchprof.flops in a fresh process, after import", ["Model", "", "Took", "Limit (s)"], rows)


if __name__ == "__main__":
    measure(asked_quick(__doc__))
