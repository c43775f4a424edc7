"""Live memory over a training step by kind, for docs/memory.md, from a recording: python docs/pictures/memory.py."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import torch
from drawing import LEFT, WIDTH, in_ms, svg
from torch import nn

import torchprof
from torchprof.run.timeline import KINDS
from torchprof.run.words import PHASES

FILE = Path(__file__).with_suffix(".svg")
HEIGHT, TOP = 180, 26
COLORS = {
    "activations": "#2f6cc0",
    "gradients": "#b8651b",
    "optimizer state": "#8a4fb0",
    "inputs": "#237a54",
    "parameters": "#a8434f",
    "temporaries": "#6b717c",
    "unknown": "#a0a5ad",
}


def recorded_step() -> torchprof.Run:
    blocks = (nn.Sequential(nn.Linear(512, 512), nn.GELU()) for _ in range(4))
    model, x = nn.Sequential(*blocks), torch.rand(1024, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).sum().backward()
    optimizer.zero_grad()
    with torchprof.Profile(model, profile_memory=True, with_timeline=True) as prof:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return prof.run


def draw(run: torchprof.Run) -> str:
    (memory,), timeline = run.memory, run.timeline
    assert timeline is not None and timeline.spans is not None
    columns = timeline.columns
    # After each event: the time, and the live bytes of each kind.
    live = dict.fromkeys(COLORS, 0)
    points = [(0, dict(live))]
    for time, nbytes, number in zip(columns["time_ns"], columns["nbytes"], columns["kind"]):
        live[KINDS[number] if number >= 0 else "unknown"] += nbytes
        points.append((time, dict(live)))
    last = points[-1][0]
    peak = memory.peak_bytes
    assert max(sum(sizes.values()) for _, sizes in points) == peak

    def x(ns: int) -> float:
        return LEFT + ns / last * (WIDTH - LEFT - 8)

    def y(nbytes: int) -> float:
        return TOP + HEIGHT * (1 - nbytes / peak)

    base = [0] * len(points)
    parts, legend = [], LEFT
    for kind, color in COLORS.items():
        if not any(sizes[kind] for _, sizes in points):
            continue
        tops = [low + sizes[kind] for low, (_, sizes) in zip(base, points)]
        path = _steps([(x(time), y(top)) for (time, _), top in zip(points, tops)])
        back = _steps([(x(time), y(low)) for (time, _), low in zip(points, base)])
        outline = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*path, *reversed(back)])
        parts.append(f'<polygon points="{outline}" fill="{color}"><title>{kind}</title></polygon>')
        parts.append(f'<rect x="{legend}" y="{TOP + HEIGHT + 34}" width="12" height="12" rx="2" fill="{color}"/>')
        parts.append(f'<text x="{legend + 18}" y="{TOP + HEIGHT + 45}" class="small">{kind}</text>')
        legend += 36 + 8 * len(kind)
        base = tops
    spans = timeline.spans.columns
    for phase in ("forward", "backward"):
        rows = zip(spans["phase"], spans["layer"], spans["start_ns"], spans["end_ns"])
        own = [(start, end) for number, layer, start, end in rows if layer >= 0 and PHASES[number] == phase]
        start, end = x(min(own)[0]), x(max(end for _, end in own))
        line = TOP + HEIGHT + 8
        parts.append(f'<path d="M{start:.1f} {line}H{end:.1f}" stroke="#7b828c" stroke-width="2"/>')
        parts.append(f'<text x="{start:.1f}" y="{line + 15}" class="small">{phase}</text>')
    parts.append(f'<path d="M{LEFT} {TOP}H{WIDTH - 8}" stroke="#7b828c" stroke-dasharray="4 4"/>')
    about = f"peak: {peak / 2**20:.1f} MiB above the start, after {in_ms(memory.peak_ns)}"
    parts.append(f'<text x="{LEFT}" y="{TOP - 8}">{about}</text>')
    parts.append(f'<text x="0" y="{TOP + HEIGHT}" class="small">start</text>')
    parts.append(f'<text x="0" y="{TOP + 5}" class="small">{peak / 2**20:.1f} MiB</text>')
    return svg(parts, TOP + HEIGHT + 54, "Live memory over a training step, by kind")


def _steps(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The corners of a line that keeps its level until the next point."""
    corners = points[:1]
    for (_, before), (x, y) in pairwise(points):
        corners += [(x, before), (x, y)]
    return corners


if __name__ == "__main__":
    FILE.write_text(draw(recorded_step()), encoding="utf-8")
