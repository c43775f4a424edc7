"""The figures of a row. The one rule for all views of a run: which figure is exact, ``≥``, ``–`` or blank."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from torchprof.analyze.compiled.regions import may_be_of_layers_below
from torchprof.run.cost import NO_COST, Cost, Measure
from torchprof.run.formats import Bound, Figure, Unit
from torchprof.run.run import Node, Run
from torchprof.run.words import PHASES, Frame, FrameKind

_PREPARES = ("aten::empty", "aten::copy_", "aten::clone")
"""Prefixes of the ops with which a compiled graph prepares its inputs and results. No layer calls them."""
BLANK = Figure(0, Bound.BLANK)
UNKNOWN_FIGURE = Figure(0, Bound.UNKNOWN)


@dataclass
class Figures:
    """The figures of one row: self and total by phase (no entry: blank), calls (-1: blank) and parameters.

    ``measure``, ``average``, ``rate``, ``number_of_calls`` and ``parameters`` decide whether a figure is exact, a lower
    bound, unknown or blank. Columns call them and have no rules of their own. ``more``: figures that do not add up, by
    name, phase and whether they are of self (no entry: blank).
    """

    own: Mapping[str, Cost] = field(default_factory=dict)
    total: Mapping[str, Cost] = field(default_factory=dict)
    calls: int = -1
    params: int | None = None  # None: unknown, as for a lazy layer before its first call
    own_params: int | None = None
    has_params: bool = False  # whether a row of this kind has parameters
    unknown: bool = False  # never called: its cost is unknown
    inlined: bool = False  # it, or one of several, was never called itself, but may have run in code compiled around it
    incomplete: Set[str] = frozenset()  # phases in which its work, or that of layers below, counts for a layer above
    incomplete_self: Set[str] = frozenset()  # phases in which that is its self
    left_over: bool = False  # launched before the recording began: not part of shares
    is_part: bool = False  # always nested in an op whose MACs and FLOPs include its own
    more: Mapping[tuple[str, str, bool], Figure] = field(default_factory=dict)

    def cost(self, phase: str, is_self: bool = False) -> Cost:
        return (self.own if is_self else self.total).get(phase, NO_COST)

    def measure(self, measure: Measure, phase: str, is_self: bool = False, measured: bool = True) -> Figure:
        """One measure in one phase, self or total.

        Blank if the row does not have this phase. Unknown if it was not ``measured``, or the layer was never called. A
        lower bound if a part could not be counted, or counts for a layer above.
        """
        if phase not in self.total:
            return BLANK
        cost = self.cost(phase, is_self)
        if self.is_part and measure.unit is Unit.COUNT and not measure.of(cost):
            return BLANK
        if not measured or self.unknown:
            return UNKNOWN_FIGURE
        is_of_kernels = measure.unit is Unit.TIME or measure.lower_bound_if is not None
        lacks_kernels = is_of_kernels and phase in (self.incomplete_self if is_self else self.incomplete)
        return Figure.of_sum(measure.of(cost), not (measure.is_lower_bound(cost) or lacks_kernels))

    def is_exact(self, phase: str) -> bool:
        """Whether every measured figure of a phase is exact: a fast check that is true for most rows."""
        return (
            phase in self.total and not (self.unknown or phase in self.incomplete) and not self.total[phase].uncounted
        )

    def average(self, measure: Measure, phase: str, measured: bool = True) -> Figure:
        """The total of a measure per call. Unknown if the number of calls is a lower bound."""
        calls = self.number_of_calls()
        if calls.bound is Bound.BLANK or not calls.value:
            return BLANK
        total = self.measure(measure, phase, measured=measured)
        return total._replace(value=total.value / calls.value) if calls.bound is Bound.EXACT else UNKNOWN_FIGURE

    def rate(self, phase: str, on_device: bool, measured: bool = True) -> Figure:
        """FLOPs per second of device or CPU time, in one phase. Unknown if FLOPs or time are, or if the time is a lower
        bound."""
        if phase not in self.total:
            return BLANK
        cost = self.total[phase]
        ns = cost.device_ns if on_device else cost.cpu_ns
        if not measured or self.unknown or phase in self.incomplete or ns <= 0:
            return UNKNOWN_FIGURE
        return Figure.of_sum(cost.flops / ns * 1e9, not cost.uncounted)

    def number_of_calls(self) -> Figure:
        """Of a sum, a lower bound if one of its layers may have run inside a compiled region, where it has no calls."""
        if self.inlined:
            return Figure.of_sum(max(self.calls, 0), False)
        return BLANK if self.calls < 0 else Figure(self.calls)

    def parameters(self, is_self: bool = False) -> Figure:
        """The parameters of the layer, with all layers below it or (``is_self``) without them."""
        if not self.total or not self.has_params:
            return BLANK
        return figure_of(self.own_params if is_self else self.params)


def figure_of(value: float | None, lead: str = "") -> Figure:
    """The figure of a value, unknown if that is None. ``lead``: see ``Figure``."""
    return UNKNOWN_FIGURE if value is None else Figure(value, lead=lead)


def measured_by_all(run: Run) -> Set[str]:
    """The fields of ``Cost`` that every rank of a run measured: only these have a sum over ranks."""
    return frozenset.intersection(*(frozenset(meta.measured) for meta in run.metas))


def figures_of_layers(run: Run, phases: Sequence[str]) -> dict[tuple[str, ...], Figures]:
    """The figures of each layer by path, depth first. Those of layers that were not selected are blank."""
    params = run.total_params()
    selected = None if run.meta.paths is None else set(run.meta.paths)
    incomplete = incomplete_phases(run)
    nothing: tuple[Set[str], Set[str]] = (frozenset(), frozenset())
    figures_of = {}
    for root in range(len(run.roots)):
        for nodes in zip(*(run.tree(phase, root).walk() for phase in phases)):
            path = nodes[0].layer.path
            if selected is None or path in selected:
                figures_of[path] = _figures(phases, nodes, params[path], *incomplete.get(path, nothing))
            else:
                figures_of[path] = Figures()
    return figures_of


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
    """The phases in which the total of a layer is incomplete, and those in which its self is, by path.

    One cause are compiled kernels that worked for several layers at once: they count for a layer above these. The other
    are kernels that could not be attributed: a kernel of a region may belong to any layer that was compiled into the
    region, but counts for the region's layer.
    """
    incomplete: dict[tuple[str, ...], tuple[set[str], set[str]]] = {}
    places = run.rows.summed(("layer", "phase", "shared", "frames"), "calls", frames=_group_of_kernels)
    for layer, phase, shared, chain in places:
        group = _group_of_kernels(run.rows.frames[chain])
        above = run.layers[layer].path if layer >= 0 else ()
        by = _inlined_below(run, layer) if group and may_be_of_layers_below(group) else run.rows.shared[shared]
        for index in by:
            path = run.layers[index].path
            for steps in range(len(above) + 1, len(path) + 1):
                totals, selves = incomplete.setdefault(path[:steps], (set(), set()))
                totals.add(PHASES[phase])
                if steps == len(path):
                    selves.add(PHASES[phase])
    return dict(incomplete)


def _group_of_kernels(frames: Sequence[Frame]) -> Frame | None:
    """The frame of kind kernels among these frames, which groups kernels of a compiled graph; None without one."""
    for outer, inner in pairwise(frames):
        if outer.kind == FrameKind.KERNELS:
            return None if may_be_of_layers_below(outer) and inner.name.startswith(_PREPARES) else outer
    return None


def _inlined_below(run: Run, above: int) -> Collection[int]:
    """The layers below a layer, of all if it is negative, that were compiled into code around them."""
    below = range(len(run.layers)) if above < 0 else run.layers.at_or_below({above}) - {above}
    return [index for index in below if run.layers[index].compiled and not run.rows.forward_calls(index)]
