"""The picture of docs/attribution.md, drawn anew from a recorded step: python docs/pictures/attribution.py.

Forward and backward of a small network: each range has the color of the layer that it belongs to.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

import torch
from torch import nn

import torchprof
from torchprof.run.words import PHASES

FILE = Path(__file__).with_suffix(".svg")
COLORS = {"Net": "#6b717c", "Net.encoder": "#2f6cc0", "Net.gelu": "#237a54", "Net.head": "#b8651b"}
WIDTH, LEFT, ROW, GAP = 800, 96, 24, 5


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(1024, 2048)
        self.gelu = nn.GELU()
        self.head = nn.Linear(2048, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gelu(self.encoder(x)))


def recorded_step() -> torchprof.Run:
    model, x = Net(), torch.rand(256, 1024)
    for _ in range(3):
        model(x).sum().backward()
    with torchprof.Profile(model, with_timeline=True) as prof:
        model(x).sum().backward()
    return prof.run


def ranges(run: torchprof.Run) -> list[tuple[str, str, int, int]]:
    """(phase, layer, start, end) of each range of a layer, outer ones first; times in ns after the start."""
    assert run.timeline is not None
    columns = run.timeline.spans.columns
    rows = zip(*(columns[name] for name in ("phase", "layer", "start_ns", "end_ns", "name")))
    return [
        (PHASES[phase], run.layers[layer].name, start, end)
        for phase, layer, start, end, name in rows
        if layer >= 0 and name == -1
    ]


def svg(found: list[tuple[str, str, int, int]]) -> str:
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
            left, wide = x(start), max(x(end) - x(start), 1)
            y = top + depth * (ROW + GAP)
            about = f"{escape(layer)}, {phase}: {in_ms(end - start)}"
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{wide:.1f}" height="{ROW}" rx="3" fill="{COLORS[layer]}">'
                f"<title>{about}</title></rect>"
            )
            name = layer.rpartition(".")[2]
            if wide > 8 * len(name):
                parts.append(f'<text x="{left + 6:.1f}" y="{y + 16}" class="in">{escape(name)}</text>')
        top += 2 * (ROW + GAP) + 18
    legend = LEFT
    for layer, color in COLORS.items():
        parts.append(f'<rect x="{legend}" y="{top}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{legend + 18}" y="{top + 11}" class="small">{escape(layer)}</text>')
        legend += 36 + 8 * len(layer)
    duration = f"one step, {in_ms(last - first)}"
    parts.append(f'<text x="{WIDTH - 8}" y="{top + 11}" class="small" text-anchor="end">{duration}</text>')
    # Gray text is readable on white and on black: a picture does not know the theme of the page.
    style = (
        "text{font:13px system-ui,sans-serif;fill:#7b828c}.title{font-weight:600}.small{font-size:12px}.in{fill:#fff}"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 20}" role="img" '
        f'aria-label="Forward and backward of a step, by layer">\n<style>{style}</style>\n{body}\n</svg>\n'
    )


def in_ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"


if __name__ == "__main__":
    FILE.write_text(svg(ranges(recorded_step())), encoding="utf-8")
