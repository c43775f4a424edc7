"""What profiling costs on a GPU: the time inside the block, the whole block, ``torchprof run``, and a long loop.

Training steps, each followed by a wait for the device. Torch's own profiler, with the device, stands beside it.
``--device cpu`` shows on any machine that this runs, with small models.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import torchprof
from benchmarks.ratios import Ratio, median_ms, show, take_turns
from benchmarks.subjects import bare, tiny_layers
from examples.large_models import Llama, ResNet50
from examples.models import Bert
from torchprof.profile.program import Program

EVERY = 10


class Step(NamedTuple):
    """A training step of a model, and how often each way of running it is measured."""

    name: str
    model: nn.Module
    run: Callable[[], None]
    rounds: int


def steps(device: torch.device, quick: bool) -> list[Step]:
    """The subjects: full size on a GPU, small on the CPU."""
    torch.manual_seed(0)
    if device.type == "cpu":
        subjects: list[tuple[str, nn.Module, Sequence[int], bool]] = [
            ("small ResNet-50", ResNet50(), (2, 3, 32, 32), False),
            ("small Llama", Llama(100, 64, 2, 8, 4, 96), (2, 16), True),
            ("500 tiny Linear", tiny_layers(), (1, 8), False),
        ]
    else:
        subjects = [
            ("ResNet-50, 64 images", ResNet50(), (64, 3, 224, 224), False),
            ("BERT-large, 8 x 128", Bert(width=1024, layers=24, heads=16, hidden=4096), (8, 128), True),
            ("Llama layers, 4 x 1024", Llama(32_000, 2048, 8, 16, 8, 5632), (4, 1024), True),
            ("500 tiny Linear", tiny_layers(), (1, 8), False),
        ]
    found = []
    for name, model, shape, is_text in subjects:
        model = model.to(device)
        x = torch.randint(0, 100, shape, device=device) if is_text else torch.rand(*shape, device=device)
        found.append(Step(name, model, training_step(model, x, device), 3 if quick else 4))
    return found


def training_step(model: nn.Module, x: torch.Tensor, device: torch.device) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def run() -> None:
        optimizer.zero_grad()
        output = model(x)
        (output[0] if isinstance(output, tuple) else output).float().sum().backward()
        optimizer.step()
        if device.type != "cpu":
            torch.cuda.synchronize()

    return run


class Figures:
    """What was measured, as a line of JSON for each figure, if a file is given."""

    def __init__(self, file: Path | None) -> None:
        self._file = file

    def add(self, name: str, ratio: Ratio, reference: str) -> None:
        if self._file is not None:
            line = {
                "part": "cost",
                "name": name,
                "value": ratio.median,
                "reference": reference,
                "unit": "ratio",
                "quartiles": ratio.quartiles,
            }
            with self._file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")


def measure(device: torch.device, quick: bool, figures: Figures) -> None:
    kind = None if device.type == "cpu" else device.type
    options = {"use_device": kind} if kind else {}
    inside: list[list[str]] = []
    whole: list[list[str]] = []
    scripts: list[list[str]] = []
    loops: list[list[str]] = []
    for step in steps(device, quick):
        profile = partial(torchprof.Profile, step.model, device=device)
        own = partial(bare, **options)
        for _ in range(2):
            step.run()
        for block in (own, profile):
            in_block(step, block)
        took = take_turns(
            {
                "plain": partial(in_block, step, nullcontext),
                "bare": partial(in_block, step, own),
                "torchprof": partial(in_block, step, profile),
            },
            step.rounds,
            f"inside the block, {step.name}",
        )
        add(inside, figures, "inside the block", step, took, took["bare"])
        took = take_turns(
            {
                "plain": partial(with_block, step, nullcontext),
                "bare": partial(with_block, step, own),
                "torchprof": partial(with_block, step, profile),
                "and the table": partial(with_table, step, profile),
            },
            step.rounds,
            f"the whole block, {step.name}",
        )
        add(whole, figures, "the whole block", step, took, took["plain"])
        took = take_turns(
            {
                "plain": partial(in_block, step, nullcontext),
                "bare": partial(in_block, step, own),
                "torchprof run": partial(in_block, step, partial(Program, use_cuda=kind == "cuda")),
            },
            step.rounds,
            f"a script, {step.name}",
        )
        add(scripts, figures, "a script", step, took, took["bare"])
        took = take_turns(
            {"plain": partial(a_loop, step, None), "torchprof": partial(a_loop, step, profile)},
            2 if quick else 3,
            f"a loop, {step.name}",
        )
        add(loops, figures, f"a loop, one step in {EVERY} recorded", step, took, took["plain"])
    headings = ["Model", "Way", "Median", "Ratio", "Quartiles"]
    show("Inside the block: a training step, against torch's profiler", headings, inside)
    show("The whole block with one training step, against the step alone", headings, whole)
    show("torchprof run: a training step, against torch's profiler", headings, scripts)
    show(f"A loop of {EVERY} steps of which one is recorded, against the loop alone", headings, loops)


def add(
    rows: list[list[str]],
    figures: Figures,
    question: str,
    step: Step,
    took: dict[str, list[float]],
    reference: list[float],
) -> None:
    against = next(name for name, seconds in took.items() if seconds is reference)
    for name, seconds in took.items():
        ratio = Ratio.of(seconds, reference)
        rows.append([step.name, name, median_ms(seconds), str(ratio), ratio.spread])
        figures.add(f"{question}, {step.name}: {name}", ratio, against)


def in_block(step: Step, block: Callable[[], AbstractContextManager[Any]]) -> float:
    """The seconds of the step, without entering and leaving the block."""
    with block():
        start = time.perf_counter()
        step.run()
        return time.perf_counter() - start


def with_block(step: Step, block: Callable[[], AbstractContextManager[Any]]) -> float:
    start = time.perf_counter()
    with block():
        step.run()
    return time.perf_counter() - start


def with_table(step: Step, block: Callable[[], torchprof.Profile]) -> float:
    start = time.perf_counter()
    with block() as prof:
        step.run()
    prof.display()
    return time.perf_counter() - start


def a_loop(step: Step, block: Callable[..., torchprof.Profile] | None) -> float:
    schedule = torch.profiler.schedule(wait=EVERY - 2, warmup=1, active=1)
    with block(schedule=schedule) if block else nullcontext() as prof:
        start = time.perf_counter()
        for _ in range(EVERY):
            step.run()
            if prof is not None:
                prof.step()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.device", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repeats: shows that it runs, not what it costs")
    parser.add_argument("--device", help="default: cuda where there is one, else cpu")
    parser.add_argument("--figures", type=Path, help="a file to which each figure is added as a line of JSON")
    options = parser.parse_args()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_num_threads(1)
    measure(device, options.quick, Figures(options.figures))


if __name__ == "__main__":
    main()
