"""The page's layers: their tree, their descriptions, all their figures, and the operators in each."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import add, attrgetter, itemgetter, sub
from typing import Any, NamedTuple

from torchprof.analyze.columns import Column, as_measured
from torchprof.analyze.device import short_kernel_name
from torchprof.analyze.figures import Figures, measured_by_all, varying_calls
from torchprof.analyze.layers import Entry, entries_of
from torchprof.analyze.operators import operators_below
from torchprof.analyze.ops import SUM_OF_PHASES, line_of_figures
from torchprof.reports.charts import CLASSES
from torchprof.run.formats import Bound
from torchprof.run.layers import Layer
from torchprof.run.measures import NO_COST, Cost, sum_of_costs
from torchprof.run.run import Run
from torchprof.run.words import (
    LAUNCHED_BEFORE,
    NOT_SELECTED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    PHASES,
    FrameKind,
)

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
    }


# The figures of all nodes, and what ran in each

ALL_PHASES = -1
"""The number of the sum of all phases."""
_OF_NO_LAYER = (OUTSIDE_NAME, NOT_SELECTED_NAME, LAUNCHED_BEFORE)  # in the order of their nodes
_NO_ROW = len(Bound)
_NUMBER = {bound: number for number, bound in enumerate(Bound)}
_EXACT = _NUMBER[Bound.EXACT]
_MOST_WITH_OPERATORS = 2_000  # layers: the panels of smaller ones show no operators

ShownRun = tuple[Run, Mapping[tuple[str, ...], int]]
"""A run that the page shows at once, and the nodes of its layers by their paths."""


def differences(values: Sequence[int]) -> array[int]:
    """Each value minus the one before it. Most of these are small or equal, so they are written in few bytes."""
    return array("q", map(sub, values, chain((0,), values)))


class FiguresOfPage:
    """The figures of all nodes of a page in all sources, from the rows of the terminal's table of each source.

    Nodes are the layers, then the rows of work of no layer, then everything, then the ranges: labels, compiled regions
    and their kernels, each after its parent. ``are_ranks``: the sources are ranks of one run, and all of them together.
    A layer of another stage of a pipeline has no row in a rank.
    """

    def __init__(self, sources: Sequence[ShownRun], tree: Tree, *, are_ranks: bool) -> None:
        self.sources, self.tree, self.are_ranks = sources, tree, are_ranks
        self.layers = len(tree.layers)
        self.everything = self.layers + len(_OF_NO_LAYER)
        self.phases = [phase for phase in PHASES if any(phase in run.phases() for run, _ in sources)]
        self.ranges: dict[tuple[int, str], int] = {}  # (the node above, its name) → its node
        self.rows: list[dict[int, Figures]] = []
        for run, nodes in reversed(sources):  # the last source is all ranks: its ranges are in the terminal's order
            of_run = dict(_rows(entries_of(run, phases=self.phases), nodes, self.layers, self.ranges))
            self.rows.insert(0, {**of_run, self.everything: _everything(run, self.phases)})
        self.measured = [measured_by_all(run) for run, _ in sources]

    @property
    def nodes(self) -> int:
        """The number of nodes."""
        return self.everything + 1 + len(self.ranges)

    def of_columns(self, columns: Sequence[Column]) -> dict[str, Any]:
        """The figures of these columns for the page's script. ``values`` and ``bounds`` have, by source and column, the
        index of a vector; ``vectors`` the values of all nodes, in which those without a figure are 0; ``boundVectors``
        lists of (bound, count): the next ``count`` nodes have this bound (0 to 3 as in ``Bound``, 4: no such row).

        A layer that was not selected has no figure; its value is the sum of those below it, for the widths of blocks.
        """
        vectors: dict[bytes, int] = {}
        kept: list[array[int]] = []
        bound_vectors: dict[tuple[tuple[int, int], ...], int] = {}
        values: list[list[int]] = []
        bounds: list[list[int]] = []
        for rows, measured in zip(self.rows, self.measured):
            costs = _Costs(rows, self.nodes, self.tree.parents)
            values.append([])
            bounds.append([])
            for column in columns:
                vector = costs.values(column)
                number = vectors.setdefault(vector.tobytes(), len(vectors))
                kept += [vector] if number == len(kept) else []
                values[-1].append(number)
                of_nodes = self._bounds(rows, as_measured(column, measured))
                runs = tuple((number, len(list(nodes))) for number, nodes in groupby(of_nodes))
                bounds[-1].append(bound_vectors.setdefault(runs, len(bound_vectors)))
        return {"values": values, "vectors": kept, "bounds": bounds, "boundVectors": list(bound_vectors)}

    def _bounds(self, rows: Mapping[int, Figures], column: Column) -> list[int]:
        missing = _NO_ROW if self.are_ranks else _NUMBER[Bound.UNKNOWN]
        numbers = [missing] * self.layers + [_NO_ROW] * (self.nodes - self.layers)
        phases = self.phases if column.phase == SUM_OF_PHASES else [column.phase]
        for node, row in rows.items():
            if column.what == "cost" and column.measured and all(map(row.is_exact, phases)):
                numbers[node] = _EXACT
                continue
            of_phases = line_of_figures({}, row, phases) if column.phase == SUM_OF_PHASES and row.total else row
            numbers[node] = _NUMBER[column.figure(of_phases).bound]
        return numbers

    def range_data(self) -> dict[str, Any]:
        return {"parent": [above for above, _ in self.ranges], "name": [name for _, name in self.ranges]}

    def classes(self, field: str) -> list[str]:
        """The classes that have a color of their own: those with most self, by the ``field`` of their costs."""
        sums: Counter[str] = Counter()
        rows = self.rows[-1 if self.are_ranks else 0]
        for node, layer in enumerate(self.tree.layers):
            own = rows[node].own.values() if node in rows else ()
            sums[layer.kind] += max(sum(getattr(cost, field) for cost in own), 0)
        return [kind for kind, _ in sums.most_common() if kind][:CLASSES]

    def operators(self, field: str, fields: Sequence[str]) -> dict[str, Any]:
        """The operators in each layer and all below it, by phase and in all phases, as columns of integers, those of a
        layer in a row. The largest ``layers`` have them, by the ``field`` of their costs.

        ``node`` has differences, ``name`` indices in ``names``, which has kinds and names, of kernels also the full
        ones. ``self`` and ``inside``: the sums of each of the ``fields``, of self, and of all that is inside an
        operator. ``isAll``: in all phases; those in one phase only are that, too.
        """
        names: dict[tuple[str, str], int] = {}
        lines: list[tuple[int, ...]] = []
        for source, (run, nodes) in enumerate(self.sources):
            node_of = dict(enumerate(nodes[layer.path] for layer in run.layers))
            node_of |= {OUTSIDE: self.layers, NOT_SELECTED: self.layers + 1}
            sums_of = dict(operators_below(run, self._largest(source, node_of, field)))
            in_all = {(layer, operator): sums for (layer, phase, operator), sums in sums_of.items() if phase is None}
            for (layer, phase, operator), sums in sums_of.items():
                is_all = phase is not None and sums == in_all[layer, operator]
                if phase is None and any(sums_of.get((layer, one, operator)) == sums for one in PHASES):
                    continue
                name = names.setdefault((operator.kind, operator.name), len(names))
                number = ALL_PHASES if phase is None else PHASES.index(phase)
                inside = (getattr(sums.total, one) - getattr(sums.self, one) for one in fields)
                is_part = 0 < sums.calls == sums.parts
                head = (source, node_of[layer], number, name, sums.calls, is_part, is_all or phase is None)
                lines.append((*head, *(getattr(sums.self, one) for one in fields), *inside))
        lines.sort(key=itemgetter(0, 1))
        keys = ("source", "node", "phase", "name", "calls", "isPart", "isAll")
        columns = [array("q", column) for column in zip(*lines)] or [array("q")] * (len(keys) + 2 * len(fields))
        of_self, of_inside = columns[len(keys) :][: len(fields)], columns[len(keys) + len(fields) :]
        columns[1] = differences(columns[1])
        return {
            "layers": _MOST_WITH_OPERATORS,
            "names": [
                (kind, short_kernel_name(name), name) if kind == FrameKind.KERNEL else (kind, name)
                for kind, name in names
            ],
            **dict(zip(keys, columns)),
            "self": dict(zip(fields, of_self)),
            "inside": dict(zip(fields, of_inside)),
        }

    def _largest(self, source: int, nodes: Mapping[int, int], field: str) -> set[int]:
        """The layers whose operators are on the page, and the work of no layer. ``nodes``: those of both."""
        costs = {index: self.rows[source][node].total for index, node in nodes.items() if index >= 0}
        sums = {index: sum(getattr(cost, field) for cost in total.values()) for index, total in costs.items()}
        return {*sorted(sums, key=lambda index: -sums[index])[:_MOST_WITH_OPERATORS], OUTSIDE, NOT_SELECTED}


class _Costs:
    """The costs of all nodes of one source, by phase: those of self and the totals."""

    def __init__(self, rows: Mapping[int, Figures], nodes: int, parents: Sequence[int]) -> None:
        self.rows, self.nodes = rows, nodes
        self.blank = [  # layers that were not selected, those below first
            (node, parents[node]) for node in range(len(parents) - 1, -1, -1) if node in rows and not rows[node].total
        ]
        self.children: dict[int, list[int]] = {node: [] for node, _ in self.blank}
        for node, above in enumerate(parents):
            if above in self.children:
                self.children[above].append(node)
        self._costs: dict[tuple[str, bool], list[Cost]] = {}

    def _of(self, phase: str, is_self: bool) -> list[Cost]:
        if (phase, is_self) not in self._costs:
            costs = self._costs[phase, is_self] = [NO_COST] * self.nodes
            for node, row in self.rows.items():
                costs[node] = row.cost(phase, is_self)
        return self._costs[phase, is_self]

    def values(self, column: Column) -> array[int]:
        """The value of each node in a column of costs or calls; 0 in others."""
        if column.what == "calls":
            calls = {node: row.number_of_calls().value for node, row in self.rows.items()}
            return array("q", (int(calls.get(node, 0)) for node in range(self.nodes)))
        values = array("q", bytes(8 * self.nodes))
        if column.what != "cost" or column.measure is None:
            return values
        for phase in PHASES if column.phase == SUM_OF_PHASES else [column.phase]:
            for name, sign in column.measure.fields:
                of_field = map(attrgetter(name), self._of(phase, column.is_self))
                values = array("q", map(add if sign > 0 else sub, values, of_field))
        for node, _ in () if column.is_self else self.blank:
            values[node] = sum(values[child] for child in self.children[node])
        return values


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
