"""The page's layers: their tree, descriptions and memory traffic; the bounds of their figures."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import prod
from operator import attrgetter
from typing import Any, NamedTuple

from torchprof.analyze.columns import Column, as_measured
from torchprof.analyze.figures import Figures, measured_by_all, varying_calls
from torchprof.analyze.layers import Entry, entries_of
from torchprof.run.formats import Bound
from torchprof.run.layers import Layer
from torchprof.run.measures import NO_COST, Cost, sum_of_costs
from torchprof.run.run import Run
from torchprof.run.words import LAUNCHED_BEFORE, NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE_NAME, PHASES

LEFT_OVER = -3
"""The index of a layer for work that was launched before the recording."""

Path = tuple[str, ...]


class Take(NamedTuple):
    """A run on the page, with its name. ``paths``: the path in the page's tree by the layer's own path, for layers that
    have another path in another run."""

    name: str
    run: Run
    paths: Mapping[Path, Path] = {}


@dataclass(frozen=True)
class Tree:
    """The layers of all takes, each once, depth first."""

    layers: Sequence[Layer]
    names: Sequence[str]
    parents: Sequence[int]
    nodes: Sequence[Mapping[int, int]]  # by take: the index of a layer in its run → its node

    @classmethod
    def of(cls, takes: Sequence[Take]) -> Tree:
        layers: dict[Path, Layer] = {}
        order: dict[Path, list[Path]] = {(): []}
        for take in takes:
            for layer in take.run.layers:
                path = take.paths.get(layer.path, layer.path)
                if path not in order:  # if several takes have a layer, the first one describes it
                    layers[path] = layer
                    order[path] = []
                    order[path[:-1]].append(path)
        paths: list[Path] = []
        waiting = order[()][::-1]
        while waiting:
            path = waiting.pop()
            paths.append(path)
            waiting.extend(reversed(order[path]))
        number = {path: index for index, path in enumerate(paths)}
        of_none = {-1: len(paths), NOT_SELECTED: len(paths) + 1, LEFT_OVER: len(paths) + 2}
        nodes = [
            {index: number[take.paths.get(layer.path, layer.path)] for index, layer in enumerate(take.run.layers)}
            for take in takes
        ]
        return cls(
            [layers[path] for path in paths],
            [path[-1] for path in paths],
            [number.get(path[:-1], -1) for path in paths],
            [of_take | of_none for of_take in nodes],
        )


_READ = attrgetter(
    *("kind", "settings", "params", "dtype_bytes", "input_shapes", "output_shapes", "training"),
    *("shared_with", "param_bytes", "output_bytes", "tied"),
)
"""All that the description of a layer is made of."""


def layer_data(run: Run, tree: Tree, take: int) -> dict[str, Any]:
    """The description of the layers in one take. Equal ones are once in ``described``; ``of`` has the index of each
    node's, -1 for layers that the take does not have. ``params``: those of each node and all below it, -1 if unknown.
    """
    numbers: dict[Hashable, int] = {}
    described: list[dict[str, Any]] = []
    of, params = [-1] * len(tree.layers), [-1] * len(tree.layers)
    totals = run.total_params()
    varying = varying_calls(run)
    for index, layer in enumerate(run.layers):
        varies = varying[layer.path] is not False
        number = numbers.setdefault((varies, *_READ(layer)), len(described))
        if number == len(described):
            described.append(_described(layer, varies))
        node, total = tree.nodes[take][index], totals[layer.path]
        of[node], params[node] = number, -1 if total is None else total
    return {"described": described, "of": array("q", of), "params": array("q", params)}


def _described(layer: Layer, varies: bool) -> dict[str, Any]:
    return {
        "kind": layer.kind,
        "settings": layer.settings,
        "params": layer.params,
        "dtypes": ", ".join(dtype for dtype, _ in layer.dtype_bytes),
        "inputs": layer.input_shapes,
        "outputs": layer.output_shapes,
        "shapesVary": varies,
        "training": layer.training,
        "sharedWith": [".".join(path) for path in layer.shared_with],
        "traffic": None if varies else traffic_bytes(layer),
    }


def traffic_bytes(layer: Layer) -> int | None:
    """The minimum memory traffic of a forward call: parameters, inputs and outputs of the layer, each once.

    Inputs are assumed to have the type of the outputs. None if unknown: with a dynamic size, outputs of unknown or of
    several types, parameters that cannot be counted, or parameters that are counted at another layer.
    """
    is_dynamic = any(-1 in size for size in (*layer.input_shapes, *layer.output_shapes))
    if layer.param_bytes is None or layer.tied or not layer.output_bytes or not layer.input_shapes or is_dynamic:
        return None
    of_outputs = sum(prod(shape) for shape in layer.output_shapes)
    if not of_outputs or layer.output_bytes % of_outputs:
        return None
    itemsize = layer.output_bytes // of_outputs
    return layer.param_bytes + layer.output_bytes + itemsize * sum(prod(shape) for shape in layer.input_shapes)


# What the page's script does not compute from rows: the bound of each figure, and the figures of ranges

_OF_NO_LAYER = (OUTSIDE_NAME, NOT_SELECTED_NAME, LAUNCHED_BEFORE)  # in the order of their nodes
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

    ``are_ranks``: the sources are ranks of one run. A layer of another stage of a pipeline has no row in a rank.
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
                    of_ranges[node - everything - 1] = own_column.sort_key(row)
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
