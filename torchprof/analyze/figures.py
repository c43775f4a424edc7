"""What a row shows, and how far it is known: the one rule of exact, ``≥``, ``–`` and blank, for every view of a run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from torchprof.analyze.compiled import may_be_of_layers_below
from torchprof.run.cost import Bound, Cost, Figure, Measure, Unit
from torchprof.run.run import Node, Run
from torchprof.run.words import FORWARD, PHASES, Frame

_PREPARES = ("aten::empty", "aten::copy_", "aten::clone")
"""How the names of ops begin by which a compiled graph prepares its inputs and results: no layer asked for these."""
_BLANK = Figure(0, Bound.BLANK)
_UNKNOWN = Figure(0, Bound.UNKNOWN)


@dataclass
class Figures:
    """What one row shows: self and total by phase (no entry: blank), calls (-1: blank) and parameters.

    ``measure``, ``rate``, ``number_of_calls`` and ``parameters`` say of each figure how far it is known. A view asks
    them, and has no rule of its own.
    """

    own: Mapping[str, Cost] = field(default_factory=dict)
    total: Mapping[str, Cost] = field(default_factory=dict)
    calls: int = -1
    params: int | None = None  # None: unknown, as of a lazy layer that has not made them yet
    own_params: int | None = None
    has_params: bool = False  # whether parameters are a thing that this row could have
    unknown: bool = False  # never called: what it would have cost is unknown
    inlined: bool = False  # never called, but compiled into what is around it, where it may have run
    incomplete: Set[str] = frozenset()  # the phases in which work of it, or of layers below, counts for a layer above
    incomplete_self: Set[str] = frozenset()  # those in which that is work of its own
    timeless: bool = False  # outside of all layers, between ops: no range tells how long that was on the CPU
    left_over: bool = False  # launched before the recording began: in no share

    def cost(self, phase: str, is_self: bool = False) -> Cost:
        return (self.own if is_self else self.total).get(phase, Cost())

    def measure(self, measure: Measure, phase: str, is_self: bool = False, measured: bool = True) -> Figure:
        """One measure in one phase, self or total.

        Blank where the row has no such phase; unknown where it was not ``measured``, and of layers that were never
        called; at least so much where a part of it could not be counted, or counts for a layer above.
        """
        if phase not in self.total:
            return _BLANK
        if not measured or self.unknown or (self.timeless and measure.fields[0][0] == "cpu_ns"):
            return _UNKNOWN
        cost = self.cost(phase, is_self)
        is_of_kernels = measure.unit is Unit.TIME or measure.lower_bound_if is not None
        lacks_kernels = is_of_kernels and phase in (self.incomplete_self if is_self else self.incomplete)
        return Figure.of_sum(measure.of(cost), not (measure.is_lower_bound(cost) or lacks_kernels))

    def is_exact(self, phase: str) -> bool:
        """Whether ``measure`` calls all that was measured in a phase exact: a quick answer for nearly all rows."""
        return (
            phase in self.total
            and not (self.unknown or self.timeless or phase in self.incomplete)
            and not self.total[phase].uncounted
        )

    def rate(self, phase: str, on_device: bool, measured: bool = True) -> Figure:
        """FLOPs in a second of the device's time, or of the CPU's, in one phase; unknown where either is, and where
        both are lower bounds."""
        if phase not in self.total:
            return _BLANK
        cost = self.total[phase]
        ns = cost.device_ns if on_device else cost.cpu_ns
        if not measured or self.unknown or self.timeless or phase in self.incomplete or ns <= 0:
            return _UNKNOWN
        return Figure.of_sum(cost.flops / ns * 1e9, not cost.uncounted)

    def number_of_calls(self) -> Figure:
        return _UNKNOWN if self.inlined else _BLANK if self.calls < 0 else Figure(self.calls)

    def parameters(self) -> Figure:
        """Those of the layer and all below it."""
        if not self.total or not self.has_params:
            return _BLANK
        return _UNKNOWN if self.params is None else Figure(self.params)


def measured_by_all(run: Run) -> Set[str]:
    """The fields of ``Cost`` that every rank of a run measured: of others no sum over the ranks is known."""
    return frozenset.intersection(*(frozenset(meta.measured) for meta in run.metas))


def figures_of_layers(run: Run, phases: Sequence[str]) -> dict[tuple[str, ...], Figures]:
    """The figures of each layer by its path, depth first: blank ones of layers that were not selected."""
    params = run.total_params()
    selected = None if run.meta.paths is None else set(run.meta.paths)
    incomplete = incomplete_phases(run)
    nothing: tuple[Set[str], Set[str]] = (frozenset(), frozenset())
    found = {}
    for root in range(len(run.roots)):
        for nodes in zip(*(run.tree(phase, root).walk() for phase in phases)):
            path = nodes[0].layer.path
            if selected is None or path in selected:
                found[path] = _figures(phases, nodes, params[path], *incomplete.get(path, nothing))
            else:
                found[path] = Figures()
    return found


def _figures(
    phases: Sequence[str], nodes: Sequence[Node], params: int | None, incomplete: Set[str], incomplete_self: Set[str]
) -> Figures:
    layer = nodes[0].layer
    return Figures(
        {phase: node.self for phase, node in zip(phases, nodes)},
        {phase: node.total for phase, node in zip(phases, nodes)},
        nodes[0].calls,
        params,
        layer.params,
        has_params=True,
        unknown=not any(node.calls or node.total for node in nodes),
        inlined=layer.compiled and not nodes[0].calls,
        incomplete=incomplete,
        incomplete_self=incomplete_self,
    )


def incomplete_phases(run: Run) -> dict[tuple[str, ...], tuple[Set[str], Set[str]]]:
    """The phases in which the total of a layer, and those in which its self, is not all that it took, by path.

    That is where a compiled kernel worked for several layers at once, and counts for one above them; and where a kernel
    could not be attributed: it may be of any layer below the one whose region it ran in that was compiled into it.
    """
    columns = run.rows.columns
    groups = [_group_of_kernels(chain) for chain in run.rows.frames]
    found: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}
    for layer, phase, shared, chain in set(zip(*(columns[name] for name in ("layer", "phase", "shared", "frames")))):
        group = groups[chain]
        if group is None:
            continue
        above = run.layers[layer].path if layer >= 0 else ()
        by = _inlined_below(run, above) if may_be_of_layers_below(group) else run.rows.shared[shared]
        for one in by:
            path = run.layers[one].path
            for steps in range(len(above) + 1, len(path) + 1):
                totals, selves = found.setdefault(path[:steps], (set(), set()))
                totals.add(PHASES[phase])
                if steps == len(path):
                    selves.add(PHASES[phase])
    return dict(found)


def _group_of_kernels(frames: Sequence[Frame]) -> Frame | None:
    """What the kernels of a compiled graph among these frames have in common, None where there are none."""
    for outer, inner in pairwise(frames):
        if outer.kind == "kernels":
            return None if may_be_of_layers_below(outer) and inner.name.startswith(_PREPARES) else outer
    return None


def _inlined_below(run: Run, above: tuple[str, ...]) -> Collection[int]:
    """The layers below a path that were compiled into what is around them."""
    forward = PHASES.index(FORWARD)
    return [
        index
        for index, layer in enumerate(run.layers)
        if layer.compiled
        and len(layer.path) > len(above)
        and layer.path[: len(above)] == above
        and not run.rows.by_layer.get((index, forward), (None, 0))[1]
    ]
