"""The figures of a row. The one rule for all views of a run: which figure is exact, ``≥``, ``–`` or blank.
And MFU; and whether the shapes of the calls of a layer vary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import pairwise

from torchprof.analyze.compiled_regions import may_be_of_layers_below
from torchprof.run.formats import Bound, Figure, Unit
from torchprof.run.measures import NO_COST, Cost, Measure
from torchprof.run.meta import Meta, Peak
from torchprof.run.run import Run
from torchprof.run.torch_names import DTYPES
from torchprof.run.words import BACKWARD, FORWARD, LAUNCHED_BEFORE, NO_LAYERS, OUTSIDE, PHASES, Frame, FrameKind

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
    figures_of = {}
    for root in range(len(run.roots)):
        for nodes in zip(*(run.tree(phase, root).walk() for phase in phases)):
            layer, calls = nodes[0].layer, nodes[0].calls
            figures_of[layer.path] = Figures()
            if selected is None or layer.path in selected:
                totals, selves = incomplete.get(layer.path, (frozenset(), frozenset()))
                figures_of[layer.path] = Figures(
                    {phase: node.self for phase, node in zip(phases, nodes)},
                    {phase: node.total for phase, node in zip(phases, nodes)},
                    calls,
                    params[layer.path],
                    layer.params,
                    has_params=True,
                    unknown=not any(node.calls or node.total for node in nodes),
                    inlined=layer.compiled and not calls,
                    incomplete=totals,
                    incomplete_self=selves,
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


def incomplete_phases(run: Run) -> Mapping[tuple[str, ...], tuple[Set[str], Set[str]]]:
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
    return incomplete


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


# MFU

_DTYPES = {
    recorded: dtype.name
    for dtype in DTYPES
    if dtype.name in ("float32", "float64", "float16", "bfloat16")
    for recorded in dtype.recorded
}


def mfu(run: Run) -> Figure | None:
    """The model FLOPs utilization: the FLOPs of all layers in forward and backward, without recomputation, over the
    elapsed time of the recording and the peak of the device; over all ranks together.

    The peak is that of ``torchprof.peak``, for the type of most MACs. None if FLOPs, times or the peak of a rank are
    unknown, and for a rank whose work ran on several devices.
    """
    measured = measured_by_all(run)
    dtype = dtype_of_most_macs(run)
    if dtype is None or "flops" not in measured or not measured & {"cpu_ns", "device_ns"}:
        return None
    possible = 0.0
    for meta in run.metas:
        peak = peak_of(meta, dtype)
        devices = sum(map(bool, run.rows.summed("device", "device_ns", rank=meta.rank).values()))  # without the CPU
        if peak is None or not meta.wall_ns or devices > 1:
            return None
        possible += peak.flops_per_s * meta.wall_ns / 1e9
    phases = {PHASES.index(FORWARD), PHASES.index(BACKWARD)}
    by_layer = run.rows.by_layer.items()
    done = sum((cost for (layer, phase), (cost, _) in by_layer if layer >= 0 and phase in phases), Cost())
    return Figure.of_sum(done.flops / possible, not done.uncounted)


def peak_of(meta: Meta, dtype: str | None) -> Peak | None:
    """The last measured peak, for this type, of the device that did the work of a rank; None if there is none."""
    kind = meta.device if "device_ns" in meta.measured else "cpu"
    peaks = [peak for peak in meta.peaks if peak.device.split(":")[0] == kind and peak.dtype == dtype]
    return peaks[-1] if peaks else None


def dtype_of_most_macs(run: Run, model: str | None = None) -> str | None:
    """The type ("float32") of the inputs of the operators with most MACs, in one model (by its name) or in all.

    None if no MACs were counted; "" if the type is unknown.
    """

    def is_counted(layer: int) -> bool:
        return layer >= 0 and model in (None, run.layers[layer].path[0])

    macs: Counter[str] = Counter()
    for chain, count in run.rows.summed("frames", "macs", layer=is_counted).items():
        frames = run.rows.frames[chain]
        if count and frames and frames[-1].signature is not None:
            dtypes = frames[-1].signature.dtypes
            macs[next((_DTYPES[dtype] for dtype in dtypes if dtype in _DTYPES), "")] += count
    return macs.most_common(1)[0][0] if macs else None


# Varying shapes

_Path = tuple[str, ...]


def varying_calls(run: Run, *, of_model: bool = False) -> dict[_Path, bool | None]:
    """For each layer, whether the shapes in its forward calls varied from call to call, layers below it included. A
    layer that is used twice in each call of the model, on two shapes, varies. Only of one that does not can a mean be
    shown with a shape.

    True: the model was called with different shapes (``Layer.same_shapes``), or an operator ran on some shapes only in
    some of the calls. None: unknown. The shapes of operators are known with ``record_shapes`` or ``with_flops``.

    ``of_model``: whether its work varied from one forward call of the model to the next: in shapes, or in how often a
    layer was called. That is not detected if the sum of the calls is a multiple of the model's.
    """
    calls, ran, counts = _counts(run)
    lineages = [run.layers.lineage(index) for index in range(len(run.layers))]
    groups: defaultdict[int, list[Counter[object]]] = defaultdict(list)  # of operators at or below a layer
    for (index, _), by_shapes in counts.items():
        for around in lineages[index]:
            groups[around].append(by_shapes)
    busy = {around for index in ran for around in lineages[index]}
    uneven: set[int] = set()  # the number of calls varies between calls of the model, for it or a layer below
    for index, (model, *_) in enumerate(lineages):
        if of_model and calls[model] and calls[index] % calls[model]:
            uneven.update(lineages[index])
    varies: dict[_Path, bool | None] = {}
    for index, layer in enumerate(run.layers):
        model = lineages[index][0]
        times = calls[model if of_model else index]
        state = _state(groups[index], times) if index in busy else None if calls[index] > 1 else False
        if layer.same_shapes is False or index in uneven:
            state = True
        elif state is None and run.layers[model].same_shapes and times == calls[model]:
            state = False
        varies[layer.path] = state
    return varies


def _state(groups: Iterable[Counter[object]], calls: int) -> bool | None:
    """Whether some operator had different shapes in some calls; None: unknown. ``groups``: for each operator, its calls
    by shapes."""
    if calls <= 1:
        return False
    groups = list(groups)
    if any(len(by_shapes) > 1 and any(count % calls for count in by_shapes.values()) for by_shapes in groups):
        return True
    # Two calls of a layer, an operator twice on each of two shapes: each call may have used both shapes, or only one.
    return None if not groups or any(len(by_shapes) > 1 for by_shapes in groups) else False


def _counts(run: Run) -> tuple[Counter[int], set[int], dict[tuple[int, object], Counter[object]]]:
    """In forward: the calls of each layer; the layers in which operators ran; and the calls of each operator by shapes,
    keyed by its layer and the names of the operators around it."""
    names = [tuple((frame.kind, frame.name) for frame in chain) for chain in run.rows.frames]
    calls: Counter[int] = Counter()
    ran: set[int] = set()
    counts: defaultdict[tuple[int, object], Counter[object]] = defaultdict(Counter)
    for (layer, chain), count in run.rows.summed(("layer", "frames"), "calls", phase=FORWARD).items():
        if layer < 0:
            continue
        frames = run.rows.frames[chain]
        if not frames:
            calls[layer] += count
            continue
        if frames[-1].kind == FrameKind.PYTHON:
            continue
        ran.add(layer)
        signature = frames[-1].signature
        if signature is not None and (frames[-1].kind != FrameKind.COLLECTIVE or signature.shapes[0] is not None):
            counts[layer, names[chain]][signature.shapes] += count
    return calls, ran, counts
