"""Self and total of a layer, for docs/attribution.md, from a recorded call: python docs/pictures/self_and_total.py."""

from __future__ import annotations

from pathlib import Path

import torch
from drawing import COLORS, GAP, LEFT, ROW, WIDTH, bar, in_ms, ranges, svg
from torch import nn

import torchprof

FILE = Path(__file__).with_suffix(".svg")


class Net(nn.Module):
    """The two operators between its layers are work of Net itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(512, 1024)
        self.head = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.encoder(x))
        return torch.softmax(self.head(hidden), -1)


def recorded_call() -> torchprof.Run:
    model, x = Net(), torch.rand(256, 512)
    with torch.no_grad():
        for _ in range(3):
            model(x)
        with torchprof.Profile(model, with_timeline=True) as prof:
            model(x)
    return prof.run


def draw(found: list[tuple[str, str, int, int]]) -> str:
    (_, _, first, last), *inner = found

    def x(ns: int) -> float:
        return LEFT + (ns - first) / (last - first) * (WIDTH - LEFT - 8)

    tops = [8 + row * (ROW + GAP) for row in range(4)]
    titles = ("Net", "its children", "self of Net", "total of Net")
    parts = [f'<text x="0" y="{top + 16}" class="title">{title}</text>' for top, title in zip(tops, titles)]
    parts += bar(x(first), tops[0], x(last) - x(first), COLORS["Net"], f"Net: {in_ms(last - first)}", "Net")
    edges = [first]
    for _, layer, start, end in inner:
        about = f"{layer}: {in_ms(end - start)}"
        parts += bar(x(start), tops[1], x(end) - x(start), COLORS[layer], about, about.removeprefix("Net."))
        edges += [start, end]
    edges.append(last)
    gaps = [*zip(edges[::2], edges[1::2])]
    for start, end in gaps:
        about = in_ms(end - start)
        parts += bar(x(start), tops[2], x(end) - x(start), COLORS["Net"], f"self of Net: {about}", about)
    y = tops[3] + ROW / 2
    for edge in (x(first), x(last)):
        parts.append(f'<path d="M{edge:.1f} {y - 7}v14" stroke="#7b828c" stroke-width="2"/>')
    parts.append(f'<path d="M{x(first):.1f} {y}H{x(last):.1f}" stroke="#7b828c" stroke-width="2"/>')
    own = sum(end - start for start, end in gaps)
    children = sum(end - start for _, _, start, end in inner)
    text = f"total {in_ms(last - first)} = self {in_ms(own)} + children {in_ms(children)}"
    parts.append(f'<text x="{LEFT}" y="{tops[3] + ROW + 14}">{text}</text>')
    return svg(parts, tops[3] + ROW + 24, "A call of a layer: its self time and its total time")


if __name__ == "__main__":
    FILE.write_text(draw(ranges(recorded_call())), encoding="utf-8")
