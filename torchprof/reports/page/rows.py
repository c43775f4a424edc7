"""The rows of all runs on the page as one table of columns."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from itertools import chain
from operator import sub
from typing import Any

from torchprof.analyze.operators.operators import parts_of_operators
from torchprof.reports.page.tree import LEFT_OVER, Take, Tree
from torchprof.run.cost import FIELDS
from torchprof.run.words import PHASES, Frame, is_left_over


class Names:
    """Indexes of frames, and of chains of frames without signatures. Each occurs once."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str], int] = {}
        self.chains: dict[tuple[int, ...], int] = {}
        self.within: dict[tuple[Any, ...], int] = {}

    def chain(self, frames: Sequence[Frame]) -> int:
        key = tuple(self.frames.setdefault((kind, name), len(self.frames)) for kind, name, _ in frames)
        return self.chains.setdefault(key, len(self.chains))

    def tables(self) -> dict[str, Any]:
        return {"frames": list(self.frames), "chains": list(self.chains), "within": list(self.within)}


def rows_of(
    takes: Sequence[Take], tree: Tree, names: Names, source_of: Mapping[tuple[int, int | None], int]
) -> dict[str, array[int]]:
    """The rows of all takes as columns, without columns of zeros. ``node`` has differences."""
    joined: dict[str, array[int]] = {
        name: array("q") for name in ("node", "phase", "source", "chain", "within", "calls", "parts", *FIELDS)
    }
    names.within.setdefault((), 0)
    for at, take in enumerate(takes):
        rows, nodes = take.run.rows, tree.nodes[at]
        chains = [names.chain(frames) for frames in rows.frames]
        within = []
        for step in rows.within:
            key = tuple((nodes[one.layer], PHASES.index(one.phase), names.chain(one.frames)) for one in step)
            within.append(names.within.setdefault(key, len(names.within)))
        columns = rows.columns
        left_over = [*map(is_left_over, rows.frames)]
        joined["node"].extend(
            nodes[LEFT_OVER if left_over[chain] else layer] for layer, chain in zip(columns["layer"], columns["frames"])
        )
        sources = {rank: source_of.get((at, rank), at) for rank in dict.fromkeys(columns["rank"])}
        joined["source"].extend(map(sources.__getitem__, columns["rank"]))
        joined["chain"].extend(map(chains.__getitem__, columns["frames"]))
        joined["within"].extend(map(within.__getitem__, columns["within"]))
        joined["parts"].extend(parts_of_operators(rows))
        for name in ("phase", "calls", *FIELDS):
            joined[name].extend(columns[name])
    joined["node"] = differences(joined["node"])
    return {name: column for name, column in joined.items() if name in ("node", "chain") or any(column)}


def differences(values: Sequence[int]) -> array[int]:
    """Each value minus the one before it. Most of these are small or equal, so they are written in few bytes."""
    return array("q", map(sub, values, chain((0,), values)))
