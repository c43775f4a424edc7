"""What the pictures of the documentation share: the network, its recorded step, and the SVG around a drawing."""

from __future__ import annotations

from html import escape

import torch
from torch import nn

import torchprof
from torchprof.run.words import PHASES

COLORS = {"Net": "#6b717c", "Net.encoder": "#2f6cc0", "Net.gelu": "#237a54", "Net.head": "#b8651b"}
WIDTH, LEFT, ROW, GAP = 800, 96, 24, 5
# Gray text is readable on white and on black: a picture does not know the theme of the page.
STYLE = "text{font:13px system-ui,sans-serif;fill:#7b828c}.title{font-weight:600}.small{font-size:12px}.in{fill:#fff}"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(1024, 2048)
        self.gelu = nn.GELU()
        self.head = nn.Linear(2048, 1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.gelu(self.encoder(x)))
        return y


def ranges(run: torchprof.Run) -> list[tuple[str, str, int, int]]:
    """(phase, layer, start, end) of each range of a layer, outer ones first; times in ns after the start."""
    assert run.timeline is not None and run.timeline.spans is not None
    columns = run.timeline.spans.columns
    rows = zip(*(columns[name] for name in ("phase", "layer", "start_ns", "end_ns", "name")))
    return [
        (PHASES[phase], run.layers[layer].name, start, end)
        for phase, layer, start, end, name in rows
        if layer >= 0 and name == -1
    ]


def bar(left: float, top: float, wide: float, color: str, about: str, name: str = "") -> list[str]:
    """A bar with a tooltip, and with its name if that fits."""
    wide = max(wide, 1)
    parts = [
        f'<rect x="{left:.1f}" y="{top}" width="{wide:.1f}" height="{ROW}" rx="3" fill="{color}">'
        f"<title>{escape(about)}</title></rect>"
    ]
    if name and wide > 8 * len(name):
        parts.append(f'<text x="{left + 6:.1f}" y="{top + 16}" class="in">{escape(name)}</text>')
    return parts


def svg(parts: list[str], height: float, label: str) -> str:
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label)}">\n<style>{STYLE}</style>\n{body}\n</svg>\n'
    )


def in_ms(ns: int) -> str:
    return f"{ns / 1e6:.2f} ms"
