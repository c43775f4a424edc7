"""The figures of layers, for all views of a run: which figure is exact, ``≥``, ``–`` or blank; the sum of several; and
whether the shapes of a layer vary from call to call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from torchprof.analyze.compiled_regions import may_be_of_layers_below
from torchprof.analyze.report import kept_with_run
from torchprof.run.formats import Bound, Figure, Unit
from torchprof.run.groups import lists_by_key, sums_by_key
from torchprof.run.measures import NO_COST, Cost, Measure, sum_of_costs
from torchprof.run.meta import sum_if_known
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, LAUNCHED_BEFORE, NO_LAYERS, OUTSIDE, PHASES, Frame, FrameKind

_Path = tuple[str, ...]

# The figures of one row

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
    has_more_calls: bool = False  # perhaps: in code compiled around it, or in a recording that is lost
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
        lacks = self.unknown or phase in self.incomplete
        return phase in self.total and not lacks and not self.total[phase].uncounted

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
        """A lower bound if there may be more: inside a compiled region a layer has no calls."""
        if self.has_more_calls:
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


# The figures of each layer

_PREPARES = ("aten::empty", "aten::copy_", "aten::clone")
"""Prefixes of the ops with which a compiled graph prepares its inputs and results. No layer calls them."""


def figures_of_layers(run: Run, phases: Sequence[str]) -> dict[_Path, Figures]:
    """The figures of each layer by path, depth first. Those of layers that were not selected are blank."""
    params = run.total_params()
    selected = None if run.meta.paths is None else set(run.meta.paths)
    incomplete = incomplete_phases(run)
    is_lost = any(warning.code == "recording_lost" for meta in run.metas for warning in meta.warnings)
    warnings = (each for meta in run.metas for each in meta.warnings if each.code == "calls_not_recorded")
    on_other_threads = sums_by_key((name, each.facts["calls"]) for each in warnings for name in {*each.layers})
    figures_of = {}
    for root in range(len(run.roots)):
        for nodes in zip(*(run.tree(phase, root).walk() for phase in phases)):
            layer, recorded = nodes[0].layer, nodes[0].calls
            calls = recorded + on_other_threads[layer.name]
            figures_of[layer.path] = Figures()
            if selected is None or layer.path in selected:
                totals, selves = incomplete.get(layer.path, (frozenset(), frozenset()))
                figures_of[layer.path] = Figures(
                    own={phase: node.self for phase, node in zip(phases, nodes)},
                    total={phase: node.total for phase, node in zip(phases, nodes)},
                    calls=calls,
                    params=params[layer.path],
                    own_params=layer.params,
                    has_params=True,
                    unknown=not any(node.calls or node.total for node in nodes),
                    has_more_calls=is_lost or (layer.compiled and not calls),
                    incomplete=frozenset(phases) if 0 < recorded < calls else totals,
                    incomplete_self=frozenset(phases) if 0 < recorded < calls else selves,
                )
    return figures_of


def figures_of_no_layer(run: Run, phases: Sequence[str]) -> Iterator[tuple[int, str, Figures]]:
    """The work of no layer, by its key in ``NO_LAYERS`` and its name; last what was launched before the recording."""
    for key, name in NO_LAYERS.items():
        costs = {phase: run.no_layer(phase, selected=key == OUTSIDE) for phase in phases}
        if any(costs.values()):
            yield key, name, Figures(costs, costs)
    if run.left_over:
        costs = {FORWARD: run.left_over}
        yield OUTSIDE, LAUNCHED_BEFORE, Figures(costs, costs, left_over=True)


def incomplete_phases(run: Run) -> Mapping[_Path, tuple[Set[str], Set[str]]]:
    """The phases in which the total of a layer is incomplete, and those in which its self is, by path.

    One cause are compiled kernels that worked for several layers at once: they count for a layer above these. The other
    are kernels that could not be attributed: a kernel of a region may belong to any layer that was compiled into the
    region, but counts for the region's layer.

    Example: a forward kernel of ``net.a.x`` and ``net.b`` counts for ``net``. Then the totals of ``net.a``, ``net.a.x``
    and ``net.b`` lack it in forward, and so do the selves of ``net.a.x`` and ``net.b``.
    """
    incomplete: dict[_Path, tuple[set[str], set[str]]] = {}
    places = run.rows.summed(("layer", "phase", "shared", "frames"), "calls", frames=_group_of_kernels)
    for counted_for, phase, shared, chain in places:
        group = _group_of_kernels(run.rows.frames[chain])
        is_unknown = group is not None and may_be_of_layers_below(group)
        worked_for = _inlined_below(run, counted_for) if is_unknown else run.rows.shared[shared]
        depth = len(run.layers[counted_for].path) if counted_for >= 0 else 0
        for layer in worked_for:
            path = run.layers[layer].path
            for length in range(depth + 1, len(path) + 1):  # the layers from there down to this one lack the kernel
                totals, selves = incomplete.setdefault(path[:length], (set(), set()))
                totals.add(PHASES[phase])
                if length == len(path):
                    selves.add(PHASES[phase])
    return incomplete


def _group_of_kernels(frames: Sequence[Frame]) -> Frame | None:
    """The frame of kind kernels among these frames, which groups kernels of a compiled graph; None without one."""
    for outer, inner in pairwise(frames):
        if outer.kind == FrameKind.KERNELS:
            return None if may_be_of_layers_below(outer) and inner.name.startswith(_PREPARES) else outer
    return None


def _inlined_below(run: Run, above: int) -> Collection[int]:
    """The layers below a layer (all layers if it is negative) that ran only inside code compiled around them."""
    below = range(len(run.layers)) if above < 0 else run.layers.at_or_below({above}) - {above}
    return [index for index in below if run.layers[index].compiled and not run.rows.forward_calls(index)]


# The sums of several figures


def summed_figures(members: Sequence[Figures], paths: Sequence[_Path] = ()) -> Figures:
    """The figures of several layers together. ``paths``: the paths of the layers, if one may be above another.

    Self costs add up. The total of a layer includes the layers below it, so only the outermost of these layers count in
    the sum of totals: of ``blocks``, ``blocks.0`` and ``head``, the first and the last. A layer that was never called
    adds nothing; if it may have run as a part of a compiled region, the sum is a lower bound.
    """
    called = [figures for figures in members if not figures.unknown]
    outermost = _outermost(members, paths)
    outermost_called = _outermost(called, [path for path, figures in zip(paths, members) if not figures.unknown])
    phases = frozenset(phase for figures in members for phase in figures.total)
    may_have_run = any(figures.unknown and figures.has_more_calls for figures in members)
    calls = [figures.calls for figures in members if figures.calls >= 0]  # 0 of a layer that was never called
    no_phase = frozenset[str]()
    return Figures(
        own=_sums_by_phase(figures.own for figures in called) or dict.fromkeys(phases, NO_COST),
        total=_sums_by_phase(figures.total for figures in outermost_called) or dict.fromkeys(phases, NO_COST),
        calls=sum(calls) if calls else -1,
        params=sum_if_known(*(figures.params for figures in outermost)),
        own_params=sum_if_known(*(figures.own_params for figures in members)),
        has_params=any(figures.has_params for figures in members),
        unknown=not called,
        has_more_calls=any(figures.has_more_calls for figures in members),
        incomplete=phases if may_have_run else no_phase.union(*(figures.incomplete for figures in outermost_called)),
        incomplete_self=phases if may_have_run else no_phase.union(*(figures.incomplete_self for figures in called)),
    )


def _outermost(members: Sequence[Figures], paths: Sequence[_Path]) -> Sequence[Figures]:
    """The layers that have no other one of these above them; all without ``paths``."""
    if not paths:
        return members
    known = {*paths}
    is_nested = (any(path[:steps] in known for steps in range(1, len(path))) for path in paths)
    return [figures for figures, nested in zip(members, is_nested) if not nested]


def _sums_by_phase(members: Iterable[Mapping[str, Cost]]) -> dict[str, Cost]:
    by_phase = lists_by_key((phase, cost) for costs in members for phase, cost in costs.items())
    return {phase: sum_of_costs(costs) for phase, costs in by_phase.items()}


# Whether the shapes of calls vary


def varying_calls(run: Run, *, of_model: bool = False) -> Mapping[_Path, bool | None]:
    """For each layer, whether the shapes in its forward calls varied from call to call, layers below it included. A
    layer that is used twice in each call of the model, on two shapes, varies. Only of one that does not can a mean be
    shown with a shape.

    True: the model was called with different shapes (``Layer.same_shapes``), or an operator ran on some shapes only in
    some of the calls. None: unknown. The shapes of operators are known with ``record_shapes`` or ``with_flops``.

    ``of_model``: whether its work varied from one forward call of the model to the next: in shapes, or in how often a
    layer was called. That is not detected if the sum of the calls is a multiple of the model's.
    """
    return _varying(run)[of_model]


@kept_with_run
def _varying(run: Run) -> tuple[Mapping[_Path, bool | None], Mapping[_Path, bool | None]]:
    """``varying_calls`` from one call of a layer, and of the model, to the next."""
    calls, with_operators, calls_by_shapes = _forward_calls(run)
    lineages = [run.layers.lineage(index) for index in range(len(run.layers))]  # from the model to the layer
    operators = lists_by_key(  # those at or below each layer
        (at_or_above, by_shapes) for (index, _), by_shapes in calls_by_shapes.items() for at_or_above in lineages[index]
    )
    ran_operators = {at_or_above for index in with_operators for at_or_above in lineages[index]}
    uneven: set[int] = set()  # the number of calls varies between calls of the model, for it or a layer below
    for index, (model, *_) in enumerate(lineages):
        if calls[model] and calls[index] % calls[model]:
            uneven.update(lineages[index])

    def varies(index: int, of_model: bool) -> bool | None:
        layer, model = run.layers[index], lineages[index][0]
        compared = calls[model if of_model else index]
        does_vary = _shapes_vary(operators[index], compared) if index in ran_operators else None
        if index not in ran_operators and calls[index] <= 1:
            does_vary = False
        if layer.same_shapes is False or (of_model and index in uneven):
            return True
        if does_vary is None and run.layers[model].same_shapes and compared == calls[model]:
            return False
        return does_vary

    of_layer, of_model = (
        {layer.path: varies(at, whole) for at, layer in enumerate(run.layers)} for whole in (False, True)
    )
    return of_layer, of_model


def _shapes_vary(operators: Sequence[Counter[object]], calls: int) -> bool | None:
    """Whether some operator had different shapes in some of the calls of a layer; None: unknown.

    ``operators``: for each operator, its calls by shapes. In 4 calls of a layer, an operator that ran 3 times on one
    shape and once on another varied. If it ran 4 times on each of two shapes, it is unknown: each call may have used
    both shapes, or only one.
    """
    if calls <= 1:
        return False
    several = [by_shapes for by_shapes in operators if len(by_shapes) > 1]
    if any(count % calls for by_shapes in several for count in by_shapes.values()):
        return True
    return None if several or not operators else False


def _forward_calls(run: Run) -> tuple[Counter[int], set[int], dict[tuple[int, object], Counter[object]]]:
    """In forward: the calls of each layer; the layers in which operators ran; and the calls of each operator by shapes,
    keyed by its layer and the names of the operators around it."""
    names = [tuple((frame.kind, frame.name) for frame in chain) for chain in run.rows.frames]
    calls: Counter[int] = Counter()
    with_operators: set[int] = set()
    calls_by_shapes: defaultdict[tuple[int, object], Counter[object]] = defaultdict(Counter)
    for (layer, chain), count in run.rows.summed(("layer", "frames"), "calls", phase=FORWARD).items():
        if layer < 0:
            continue
        if not (frames := run.rows.frames[chain]):
            calls[layer] += count
            continue
        if frames[-1].kind == FrameKind.PYTHON:
            continue
        with_operators.add(layer)
        signature = frames[-1].signature
        if signature is not None and (frames[-1].kind != FrameKind.COLLECTIVE or signature.shapes[0] is not None):
            calls_by_shapes[layer, names[chain]][signature.shapes] += count
    return calls, with_operators, calls_by_shapes
