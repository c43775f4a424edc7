"""The picture of docs/attribution.md, drawn anew from a recorded step: python docs/pictures/attribution.py.

Forward and backward of a small network: each range has the color of the layer that it belongs to.
"""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import COLORS, GAP, LEFT, ROW, WIDTH, Net, bar, in_ms, ranges, svg

import torchprof

FILE = Path(__file__).with_suffix(".svg")


def recorded_step() -> torchprof.Run:
    model, x = Net(), torch.rand(256, 1024)
    for _ in range(3):
        model(x).sum().backward()
    with torchprof.Profile(model, with_timeline=True) as prof:
        model(x).sum().backward()
    return prof.run


def draw(found: list[tuple[str, str, int, int]]) -> str:
    first, last = min(start for _, _, start, _ in found), max(end for *_, end in found)

    def x(ns: int) -> float:
        return LEFT + (ns - first) / (last - first) * (WIDTH - LEFT - 8)

    parts = []
    tracks = (("forward", "Forward", "labels"), ("backward", "Backward", "autograd nodes"))
    top = 8
    for phase, title, what in tracks:
        parts.append(f'<text x="0" y="{top + 16}" class="title">{title}</text>')
        parts.append(f'<text x="0" y="{top + 32}" class="small">{what}</text>')
        for _, layer, start, end in (one for one in found if one[0] == phase):
            depth = layer.count(".")
            y = top + depth * (ROW + GAP)
            about = f"{layer}, {phase}: {in_ms(end - start)}"
            parts += bar(x(start), y, x(end) - x(start), COLORS[layer], about, layer.rpartition(".")[2])
        top += 2 * (ROW + GAP) + 18
    legend = LEFT
    for layer, color in COLORS.items():
        parts.append(f'<rect x="{legend}" y="{top}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{legend + 18}" y="{top + 11}" class="small">{layer}</text>')
        legend += 36 + 8 * len(layer)
    duration = f"one step, {in_ms(last - first)}"
    parts.append(f'<text x="{WIDTH - 8}" y="{top + 11}" class="small" text-anchor="end">{duration}</text>')
    return svg(parts, top + 20, "Forward and backward of a step, by layer")


if __name__ == "__main__":
    FILE.write_text(draw(ranges(recorded_step())), encoding="utf-8")
