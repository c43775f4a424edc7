"""Runs of single ranks, made by hand row by row, to be merged."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

from torchprof.run.cost import Cost
from torchprof.run.layers import Layer
from torchprof.run.lockstep import GroupOfRanks, LockstepKey
from torchprof.run.meta import Meta
from torchprof.run.rows import Around, Rows
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, PHASES, Frame

MUL, ADD, MINE = Frame("op", "mul"), Frame("op", "add"), Frame("label", "mine")
NET = ("Net", "Net.a", "Net.b")
OF_TWO = GroupOfRanks("0", "default_pg", 2)
ALL_REDUCE = LockstepKey(0, FORWARD, "cpu", "all_reduce", OF_TWO)


def layer(name: str, **fields: Any) -> Layer:
    return Layer(tuple(name.split(".")), "Module", **fields)


def line(
    where: int,
    *frames: Frame,
    rank: int = 0,
    phase: str = FORWARD,
    within: tuple[Around, ...] = (),
    shared: tuple[int, ...] = (),
    device: str = "cpu",
    calls: int = 1,
    **cost: int,
) -> tuple[Any, ...]:
    return where, PHASES.index(phase), shared, within, frames, device, rank, calls, *astuple(Cost(**cost))


def rows_of(layers: Sequence[Layer], lines: Sequence[tuple[Any, ...]]) -> Rows:
    """Rows of these lines. Each table has entries in the order of first use, and one that no row refers to."""
    tables: dict[int, list[Any]] = {2: [(), (0,)], 3: [(), (Around(-1, FORWARD, ()),)], 4: [(), (ADD, ADD)], 5: []}
    columns = [array("q") for _ in Rows.COLUMNS]
    for one in lines:
        for at, (column, value) in enumerate(zip(columns, one)):
            table = tables.get(at)
            if table is not None:
                if value not in table:
                    table.append(value)
                value = table.index(value)
            column.append(value)
    shared, within, frames, devices = (tuple(table) for table in tables.values())
    return Rows(tuple(layers), frames, devices, dict(zip(Rows.COLUMNS, columns)), within, shared)


def run_of(
    rank: int, *lines: tuple[Any, ...], layers: Sequence[Layer | str] = NET, world: int = 1, **parts: Any
) -> Run:
    made = tuple(layer(one) if isinstance(one, str) else one for one in layers)
    metas = (Meta(("Net",), rank, world),)
    here = [(*one[:6], rank, *one[7:]) for one in lines]
    return Run(metas, made, rows_of(made, here), **{"samples": {}, **parts})
