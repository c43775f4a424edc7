"""What the page's script does not compute from rows: the bound of each figure, and the figures of ranges."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from torchprof.analyze.columns import Column, as_measured
from torchprof.analyze.figures import Figures, measured_by_all
from torchprof.analyze.layers.entries import Entry, entries_of
from torchprof.run.cost import NO_COST, Cost, sum_of_costs
from torchprof.run.formats import Bound
from torchprof.run.run import Run
from torchprof.run.words import LAUNCHED_BEFORE, NOT_SELECTED_NAME, OUTSIDE_NAME, PHASES

_OF_NO_LAYER = (OUTSIDE_NAME, NOT_SELECTED_NAME, LAUNCHED_BEFORE)
"""The rows of work of no layer, in the order of their nodes."""
_NO_ROW = len(Bound)
_NUMBER = {bound: number for number, bound in enumerate(Bound)}
_EXACT = _NUMBER[Bound.EXACT]

ShownRun = tuple[Run, Mapping[tuple[str, ...], int]]
"""A run that the page shows at once, and the nodes of its layers by their paths."""


def cells(sources: Sequence[ShownRun], layers: int, columns: Sequence[Column], *, are_ranks: bool) -> dict[str, Any]:
    """``ranges`` and ``bounds`` for the page, from the rows of the terminal's table of each source.

    Nodes are the ``layers``, then the rows of work of no layer, then everything, then the ranges: labels, compiled
    regions and their kernels, each after its parent. ``values``: the figures of ranges, by source and column.
    ``bounds`` has the bound of each node's figure: ``of``, by source and column, is an index in ``vectors``; a vector
    is a list of (number, count): the next ``count`` nodes have this bound (0 to 3 as in ``Bound``, 4: no such row).

    ``are_ranks``: the sources are ranks of one run. A layer that a rank does not have, because it is of another stage
    of a pipeline, has no row there. In other runs it has one.
    """
    everything = layers + len(_OF_NO_LAYER)
    phases = [phase for phase in PHASES if any(phase in run.phases() for run, _ in sources)]
    ranges: dict[tuple[int, str], int] = {}  # (the node above, its name) → its node
    rows: list[dict[int, Figures]] = []
    for run, nodes in reversed(sources):  # the last source is all ranks: its ranges are in the order of the terminal
        of_run = dict(_rows(entries_of(run, phases=phases), nodes, layers, ranges))
        rows.insert(0, {**of_run, everything: _everything(run, phases)})
    vectors: dict[tuple[tuple[int, int], ...], int] = {}
    bounds: list[list[int]] = []
    values: list[list[list[float]]] = []
    missing = _NO_ROW if are_ranks else _NUMBER[Bound.UNKNOWN]
    for (run, _), of_source in zip(sources, rows):
        measured = measured_by_all(run)
        bounds.append([])
        values.append([])
        exact = {phase: [node for node, row in of_source.items() if row.is_exact(phase)] for phase in phases}
        for column in columns:
            own_column = as_measured(column, measured)
            numbers = [missing] * layers + [_NO_ROW] * (len(_OF_NO_LAYER) + 1 + len(ranges))
            if own_column.what == "cost" and own_column.measured:
                for node in exact[own_column.phase]:
                    numbers[node] = _EXACT
            of_ranges = [0.0] * len(ranges)
            for node, row in of_source.items():
                if numbers[node] != _EXACT:
                    numbers[node] = _NUMBER[own_column.figure(row).bound]
                if node > everything:
                    of_ranges[node - everything - 1] = own_column.of(row)
            vector = tuple((number, len(list(nodes))) for number, nodes in groupby(numbers))
            bounds[-1].append(vectors.setdefault(vector, len(vectors)))
            values[-1].append(of_ranges)
    return {
        "ranges": {"parent": [above for above, _ in ranges], "name": [name for _, name in ranges], "values": values},
        "bounds": {"of": bounds, "vectors": list(vectors)},
    }


def _rows(
    entries: Sequence[Entry], nodes: Mapping[tuple[str, ...], int], layers: int, ranges: dict[tuple[int, str], int]
) -> Iterator[tuple[int, Figures]]:
    """The figures of all nodes of a run. ``ranges`` grows by those that are new."""
    waiting = [*entries]
    while waiting:
        entry = waiting.pop()
        node = nodes[entry.path] if entry.is_layer else layers + _OF_NO_LAYER.index(entry.name)
        yield node, entry.figures
        waiting += entry.children
        inside = [(node, op) for op in reversed(entry.ops)]
        while inside:
            above, op = inside.pop()
            number = ranges.setdefault((above, op.name), layers + len(_OF_NO_LAYER) + 1 + len(ranges))
            yield number, op.figures
            inside += [(number, inner) for inner in reversed(op.ops)]


def _everything(run: Run, phases: Sequence[str]) -> Figures:
    """The sum over all layers and work of no layer. It is complete: it includes work of unknown owner."""
    costs: dict[str, list[Cost]] = {phase: [] for phase in phases}
    for (_, number), (cost, _) in run.rows.by_layer.items():
        costs[PHASES[number]].append(cost)
    totals = {phase: sum_of_costs(of_phase) for phase, of_phase in costs.items()}
    return Figures(dict.fromkeys(phases, NO_COST), totals)
