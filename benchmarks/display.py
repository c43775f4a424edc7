"""The time to draw the table of a large model. The time per layer must not grow with the number of layers."""

from __future__ import annotations

import statistics
import time

import torch
from torch import nn

import torchprof
from benchmarks.ratios import Ratio, asked_quick, show, take_turns

LINEAR = 1.3
SHAPES = {"flat": "all layers side by side", "nested": "ten in each container"}


def measure(quick: bool) -> None:
    torch.set_num_threads(1)
    sizes = (100, 1_000) if quick else (1_000, 10, 10_000, 100_000)  # ratios are to the first
    rows = []
    for shape, build in (("flat", flat), ("nested", nested)):
        runs = {}
        for size in sizes:
            model = build(size)
            with torchprof.Profile(model) as prof:
                model(torch.rand(1, 1))
            runs[size] = prof.run
        for show_events in (False, True):

            def draw(run: torchprof.Run, show_events: bool = show_events) -> float:
                again = max(1, 1_000 // len(run.layers))
                start = time.perf_counter()
                for _ in range(again):
                    run.report("tree", show_events=show_events)
                return (time.perf_counter() - start) / again / len(run.layers)

            ways = {str(size): lambda run=run: draw(run) for size, run in runs.items()}  # type: ignore[misc]
            took = take_turns(
                ways, 1 if quick or show_events else 3, f"drawing, {shape}, {'with' if show_events else 'no'} events"
            )
            for size in sizes[1:]:
                ratio = Ratio.of(took[str(size)], took[str(sizes[0])])
                rows.append(
                    [
                        shape,
                        "layers and operators" if show_events else "layers",
                        f"{len(runs[size].layers):,}",
                        f"{statistics.median(took[str(sizes[0])]) * 1e6:.1f} us",
                        f"{statistics.median(took[str(size)]) * 1e6:.1f} us",
                        str(ratio),
                        ratio.verdict(LINEAR) if size > sizes[0] else "for information",
                    ]
                )
    show(
        "Drawing the table: time for each layer",
        ["Model", "Rows", "Layers", "In the first", "Per layer", "Ratio", "Limit"],
        rows,
        "; ".join(f"{name}: {text}" for name, text in SHAPES.items()) + ". The run was made before.",
    )


def flat(size: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(1, 1) for _ in range(size - 1)))


def nested(size: int) -> nn.Module:
    """A tree of about ``layers`` layers in which each container has ten modules."""
    level: list[nn.Module] = [nn.Linear(1, 1) for _ in range(round(size * 0.9))]
    while len(level) > 1:
        level = [nn.Sequential(*level[start : start + 10]) for start in range(0, len(level), 10)]
    return level[0]


if __name__ == "__main__":
    measure(asked_quick(__doc__))
