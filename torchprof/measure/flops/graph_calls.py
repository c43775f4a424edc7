"""The arithmetic of the calls of compiled graphs, and of the kernels in them whose layers are known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import CompiledGraphs, graph_of
from torchprof.attribute.events import Place
from torchprof.attribute.op_groups import OpGroup, OpTree
from torchprof.measure.flops.graph_text import GraphText, read_graph, work_of_nodes
from torchprof.measure.flops.operation import Work
from torchprof.measure.recording import CalledGraph
from torchprof.run.words import is_generated


class Count(NamedTuple):
    """The work of one place, and the number of its calls that are not counted."""

    macs: int
    flops: int
    uncounted: int


_Counts = list[tuple[int, Count]]


@dataclass
class GraphCall:
    """One call of a graph: the work of its nodes, and the ops that ``ran`` directly in it so far, in their order, each
    with its place.

    ``uncounted``: the names of the operators of nodes whose work is unknown. ``layers``: of the kernels, if known.
    """

    key: str
    nodes: Mapping[str, Work | None]
    uncounted: Set[str]
    layers: CompiledGraphs | None
    ran: list[tuple[str, int]] = field(default_factory=list)

    def counts(self, place: int, found: Sequence[_Counts]) -> tuple[_Counts, set[int]]:
        """The counts by place, and the places of kernels whose work is known.

        ``place``: of the call. ``found``: the counts of each op directly in it, in their order. Library ops keep
        theirs; those of a node whose work is unknown are all that is known of it. A kernel whose layers are known has
        the work of its nodes, a node of several kernels in the first of them; any other kernel in a layer is not
        counted. The rest of the graph's work is at the call itself. If the ops have more than the whole graph, all of
        it is at the call.
        """
        of_ops: _Counts = []
        of_unknown: _Counts = []
        explained = 0
        for (name, _), counts in zip(self.ran, found):
            if name in self.uncounted:
                of_unknown += counts
                explained += 1
            else:
                of_ops += [(place, count._replace(uncounted=0)) for place, count in counts if count.macs or count.flops]
        left = dict(self.nodes)
        known: set[int] = set()
        if self.layers is not None:
            for works, of_kernel in self._kernels(left):
                of_ops.append((of_kernel, Count(0, 0, 1) if works is None else _sum(works)))
                if works is not None:
                    known.add(of_kernel)
        whole = _sum([*self.nodes.values()])
        macs, flops = (of_all - sum(count[field] for _, count in of_ops) for field, of_all in enumerate(whole[:2]))
        if macs >= 0 and flops >= 0:
            unknown = max(sum(work is None for work in left.values()) - explained, 0)
            return [*of_ops, *of_unknown, (place, Count(macs, flops, unknown))], known
        whole = whole._replace(uncounted=max(whole.uncounted - explained, 0))
        if "" in self.uncounted:  # functions of Inductor's own, which may call any operator
            return [*of_ops, *of_unknown, (place, Count(0, 0, whole.uncounted))], known
        return [*(of_ops if known else [(place, whole)]), *of_unknown], known

    def _kernels(self, left: dict[str, Work | None]) -> Iterator[tuple[list[Work | None] | None, int]]:
        """For each generated kernel that ran: the work of its nodes, which are taken out of ``left``; None if it is
        unknown which kernel it is. And its place."""
        assert self.layers is not None
        numbers = self.layers.called(self.key, [name for name, _ in self.ran])
        for (name, place), number in zip(self.ran, numbers):
            if is_generated(name):
                nodes = None if number is None else self.layers.kernel(self.key, number).nodes
                yield None if nodes is None else [left.pop(node) for node in nodes if node in left], place


class GraphCalls:
    """The calls of compiled graphs, one after the other."""

    def __init__(self, graphs: Mapping[str, CalledGraph], layers: CompiledGraphs | None = None) -> None:
        """``graphs``: by their keys. ``layers``: what is known of the layers of their kernels."""
        self._graphs = graphs
        self._layers = layers
        self._texts: dict[str, GraphText | None] = {}  # None: it cannot be read
        self._work: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[Mapping[str, Work | None], Set[str]]] = {}
        self._calls: Counter[str] = Counter()

    def next(self, name: str) -> GraphCall | None:
        """The next call, by the name of the range around it; None if the graph is not known."""
        key = graph_of(name)
        graph = self._graphs.get(key)
        if graph is not None and key not in self._texts:
            self._texts[key] = None
            with suppress(ValueError):
                self._texts[key] = read_graph(graph.text)
        text = self._texts.get(key)
        if graph is None or text is None:
            return None
        symbols: dict[str, int] = {}
        if graph.has_symbols:
            number = self._calls[key]
            self._calls[key] += 1
            if number >= len(graph.calls):
                return None
            symbols = text.symbols(graph.calls[number])
        of_call = key, tuple(symbols.items())
        if of_call not in self._work:
            works = work_of_nodes(text, symbols)
            unknown = {text.nodes[name].operator for name, work in works.items() if work is None}
            self._work[of_call] = works, unknown
        has_layers = self._layers is not None and not self._layers.why_unknown(key)
        return GraphCall(key, *self._work[of_call], self._layers if has_layers else None)


def _sum(works: Sequence[Work | None]) -> Count:
    known = [work for work in works if work is not None]
    return Count(sum(work.macs for work in known), sum(work.flops for work in known), len(works) - len(known))


# The counts of groups of ops: equal groups have equal counts, which are found once and multiplied.

_Kind = tuple[OpTree, bytes]


class GroupCounts:
    """``known_places``: the indices of places of groups whose work is known, where there may be kernels in them."""

    def __init__(self) -> None:
        self.known_places: set[int] = set()
        self._counts: dict[_Kind, Mapping[int, Count]] = {}  # by path
        self._known: dict[_Kind, list[int]] = {}  # the paths whose work is known
        self._times: Counter[tuple[Place, _Kind]] = Counter()  # how many groups, by the place around them
        self._places: dict[tuple[Place, OpTree], list[Place]] = {}  # the place of each path

    def has(self, group: OpGroup) -> bool:
        """Whether the counts of such groups are known."""
        return _kind(group) in self._counts

    def learn(self, group: OpGroup, counts: Mapping[int, Count], known: Set[int]) -> None:
        """The counts of such groups: those of this one, by index of a place. ``known``: places whose work is known."""
        paths = {place.index: path for path, place in enumerate(group.places())}
        self._counts[_kind(group)] = {paths[index]: count for index, count in counts.items()}
        self._known[_kind(group)] = [path for index, path in paths.items() if index in known]

    def add(self, group: OpGroup) -> None:
        """Count a group."""
        kind = _kind(group)
        self._times[group.place, kind] += 1
        if group.columns.correlation and self._times[group.place, kind] == 1:  # there may be kernels
            places = self._places[group.place, group.tree] = group.places()
            self.known_places.update(places[path].index for path in self._known[kind])

    def sums(self) -> dict[tuple[Place, OpTree], dict[int, Count]]:
        """By the place around groups and their tree: the sums of all of them, by path."""
        sums: dict[tuple[Place, OpTree], dict[int, Count]] = {}
        for (place, kind), times in self._times.items():
            of_tree = sums.setdefault((place, kind[0]), {})
            for path, count in self._counts[kind].items():
                before = of_tree.get(path, (0, 0, 0))
                of_tree[path] = Count(*(known + times * other for known, other in zip(before, count)))
        return sums

    def uncounted_places(self) -> Iterator[int]:
        """The indices of places of groups with uncounted work, where there may be kernels in them."""
        for (place, kind), _ in self._times.items():
            places = self._places.get((place, kind[0]))
            for path, count in self._counts[kind].items():
                if places is not None and count.uncounted:
                    yield places[path].index


def _kind(group: OpGroup) -> _Kind:
    """What makes the counts of groups equal. A function of the user's counts only if it may have a backward: others
    without a namespace are not operators."""
    sequences, first, functions = group.columns.sequence, group.first, group.tree.functions
    if not functions or sequences is None:
        return group.tree, b""
    return group.tree, bytes(sequences[first + index] >= 0 for index in functions)
