"""Runs made by hand, row by row, and their tables read back, cell by cell."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from torchprof.run.layers import Layer
from torchprof.run.measures import Cost
from torchprof.run.meta import Meta
from torchprof.run.rows import Around, Rows
from torchprof.run.run import Run
from torchprof.run.words import PHASES, Frame, FrameKind, Signature, SourceLine

FORWARD = PHASES[0]
NET = ("Net", "Net.a", "Net.b", "Net.b.0")
TIMES = ("cpu_ns",)


def op(name: str, *shapes: Any, dtypes: Sequence[str] | None = None, stack: Sequence[str] = ()) -> Frame:
    if not shapes and not stack:
        return Frame(FrameKind.OP, name)
    return Frame(FrameKind.OP, name, Signature(shapes, tuple(dtypes or ["float"] * len(shapes)), (), tuple(stack)))


def label(name: str) -> Frame:
    return Frame(FrameKind.LABEL, name)


def python_line(text: str) -> Frame:
    """A sampled line: "train.py:7 log → print"."""
    return Frame(FrameKind.PYTHON, SourceLine.of_file(text))


def kernel(name: str) -> Frame:
    return Frame(FrameKind.KERNEL, name)


def row(
    layer: int,
    *frames: Frame,
    phase: str = FORWARD,
    within: tuple[Around, ...] = (),
    device: str = "cpu",
    calls: int = 1,
    shared: tuple[int, ...] = (),
    rank: int = 0,
    **cost: int,
) -> tuple[Any, ...]:
    return layer, phase, within, frames, device, calls, Cost(**cost), shared, rank


def run_of(rows: Sequence[tuple[Any, ...]], *, layers: Sequence[Layer] | None = None, **meta: Any) -> Run:
    """A run with these rows. ``layers``: the layers that the indices in rows refer to; None: those of ``NET``."""
    of_net = (Layer(tuple(path.split(".")), "Module", of_torch=False) for path in NET)
    layers = tuple(of_net if layers is None else layers)
    chains = list(dict.fromkeys(one[3] for one in rows))
    withins = list(dict.fromkeys(one[2] for one in rows))
    devices = list(dict.fromkeys(["cpu", *(one[4] for one in rows)]))
    shares = list(dict.fromkeys([(), *(one[7] for one in rows)]))
    columns = {name: array("q") for name in Rows.COLUMNS}
    for layer, phase, within, frames, device, calls, cost, shared, rank in rows:
        values = {
            "layer": layer,
            "phase": PHASES.index(phase),
            "within": withins.index(within),
            "frames": chains.index(frames),
            "device": devices.index(device),
            "rank": rank,
            "shared": shares.index(shared),
            "calls": calls,
        }
        for name in Rows.COLUMNS:
            columns[name].append(values[name] if name in values else getattr(cost, name))
    table = Rows(layers, tuple(chains), tuple(devices), columns, tuple(withins), tuple(shares))
    models = tuple(layer.path[0] for layer in layers if len(layer.path) == 1)
    return Run((Meta(models, **{"requested": TIMES, "measured": TIMES, **meta}),), layers, table, {})


def headings(table: str) -> list[str]:
    return [cell.strip() for cell in table.splitlines()[0].split("|")]


def cells(table: str) -> list[list[str]]:
    """The rows below the headings; the first cell of each is the name."""
    return [[cell.strip() for cell in line.split("|")] for line in table.split("\n\n")[0].splitlines()[2:]]


def names(table: str) -> list[str]:
    return [line[0] for line in cells(table)]


def line(table: str, name: str) -> dict[str, str]:
    (found,) = [one for one in cells(table) if one[0] == name]
    return dict(zip(headings(table), found))
