"""The warnings of a recording: about modules, labels, calls, shapes, communication and the clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from torchprof.measure.recording import Observations
from torchprof.run.layers import Layer, Layers
from torchprof.run.meta import RunWarning
from torchprof.run.rows import Rows
from torchprof.run.run import Run
from torchprof.run.sentences import WITHOUT_SHAPES
from torchprof.run.torch_names import ON_PARAMETERS
from torchprof.run.words import NOT_SELECTED, OUTSIDE, FrameKind, SourceLine

_CALLS_MATTER = 0.01  # from this share of the recorded time on, calls that bypass a layer are a warning
_THREADS_MATTER = 0.2  # of the time: another thread that uses so much of a processor is a warning
_LABELS_MATTER = 0.02  # the time of labels is a warning if it is more than this share of the recorded time


def recorded_warnings(run: Run, observations: Observations) -> Iterator[RunWarning]:
    """All warnings of a cycle, in the order of reports: those of the recording, then those that its run shows."""
    yield from observations.warnings
    yield from about_modules(observations.added, observations.removed)
    if observations.unmatched:
        yield RunWarning.of("collectives_unmatched", count=observations.unmatched)
    if observations.uncertain:
        yield RunWarning.of("buckets_uncertain", count=observations.uncertain)
    yield from about_threads(observations.threads)
    yield from about_labels(run.layers, observations.unobserved, sorted(observations.unlabelled))
    if observations.nothing:
        yield observations.nothing
        return
    called = {layer for (layer, _phase), (_cost, calls) in run.rows.by_layer.items() if layer >= 0 and calls}
    inlined = {index for index, layer in enumerate(run.layers) if layer.compiled}
    silent = observations.callable_layers - called - {*observations.unobserved} - inlined
    yield from about_uncalled(run.rows, run.layers, called, silent)
    yield from _about_exported(run.layers, called)
    callers = observations.callers
    yield from about_callers(run.layers, observations.callable_layers, called, callers, run.meta.wall_ns)
    yield from _about_shapes(run.rows)
    if observations.label_ns is not None:
        yield from about_cost(observations.labels, observations.label_ns, own_ns_of_layers(run.rows), run.meta.wall_ns)


def about_modules(added: Sequence[str], removed: Sequence[str]) -> Iterator[RunWarning]:
    """Modules that were added to or removed from the models during the recording."""
    if added:
        yield RunWarning.of("modules_added", added)
    if removed:
        yield RunWarning.of("modules_removed", removed)


def about_threads(threads: Mapping[SourceLine, Mapping[str, int]]) -> Iterator[RunWarning]:
    """Other threads that run Python, and use much of a processor: Python's interpreter runs one thread at a time."""
    for line, use in threads.items():
        if use["cpu_ns"] >= _THREADS_MATTER * use["over_ns"] > 0:
            yield RunWarning.of("thread_runs", line=line, share=round(use["cpu_ns"] / use["over_ns"], 2))


def about_labels(
    layers: Sequence[Layer], unobserved: Mapping[int, int], unlabelled: Iterable[int]
) -> Iterator[RunWarning]:
    """Calls that the profiler did not record, and layers that could not be labelled."""
    for index, calls in sorted(unobserved.items()):
        yield RunWarning.of("calls_not_recorded", [layers[index].name], calls=calls)
    if unobserved:
        yield RunWarning.of("threads_not_recorded")
    if bare := [layers[index].name for index in unlabelled]:
        yield RunWarning.of("layers_unlabelled", bare)


def about_uncalled(rows: Rows, layers: Sequence[Layer], called: Set[int], silent: Set[int]) -> Iterator[RunWarning]:
    """Models without a call, and layers without a call that have parameters. Of such layers inside one another, the
    outermost. Layers are left out whose parameters the layer around them probably uses in its own operators, as in
    nn.MultiheadAttention, or whose parameters are probably those of a called layer, as in tied embeddings.

    ``called``: the layers with recorded calls. ``silent``: those whose calls would have been recorded.
    """
    tree = Layers.of(layers)
    used = {tree.index_of.get(path, OUTSIDE) for index in called for path in layers[index].shared_with}
    calls_below = tree.roll_up([index in called for index in range(len(layers))])
    if not (unused := {index for index in silent - used if not calls_below[index]}):
        return
    params = tree.roll_up([layer.params != 0 for layer in layers])
    with_ops = rows.summed("layer", "calls", frames=lambda chain: any(frame.name in ON_PARAMETERS for frame in chain))
    tied = {(layers[index].kind, layers[index].settings) for index in called if layers[index].tied}

    def matters(index: int) -> bool:
        *above, _ = tree.lineage(index)
        if not above or not unused.isdisjoint(above):
            return not above
        caller = next((layer for layer in reversed(above) if layer in called), OUTSIDE)
        is_tied = (layers[index].kind, layers[index].settings) in tied
        return bool(params[index]) and caller not in with_ops and not is_tied

    if names := [layers[index].name for index in sorted(unused) if matters(index)]:
        yield RunWarning.of("never_called", names)


def _about_exported(layers: Sequence[Layer], called: Set[int]) -> Iterator[RunWarning]:
    """Graphs of torch.export, which run the operators of the layers below them themselves."""
    hiding = {layer.path[:-1] for index, layer in enumerate(layers) if layer.compiled and index not in called}
    modules = [
        layers[index].name
        for index in sorted(called)
        if layers[index].kind == "GraphModule" and layers[index].path in hiding
    ]
    if modules:
        yield RunWarning.of("exported", modules)


def about_callers(
    layers: Sequence[Layer],
    callable_layers: Set[int],
    called: Set[int],
    callers: Mapping[tuple[int, int], int],
    wall_ns: int,
) -> Iterator[RunWarning]:
    """Layers that were called by another layer than their parent, so that totals differ much from the time of calls.

    ``callable_layers``: those with a forward. ``callers``: the time of calls by (caller, or negative; called layer).
    """
    tree = Layers.of(layers)

    def is_misleading(outer: int, inner: int) -> bool:
        """Whether the total of ``outer``, or of a layer that the call bypassed, is not the time of its own calls."""
        *above, _ = tree.lineage(inner)
        if outer in (inner, NOT_SELECTED):
            return False
        if outer != OUTSIDE and outer not in above:
            return True
        bypassed = above[above.index(outer) + 1 :] if outer in above else above
        return any(layer in callable_layers and layer in called for layer in bypassed)

    least_ns = _CALLS_MATTER * wall_ns
    past = [pair for pair, ns in sorted(callers.items()) if ns >= least_ns and is_misleading(*pair)]
    if past:
        names = [layers[outer].name if outer >= 0 else "" for outer, _ in past]
        yield RunWarning.of("called_by_others", [layers[inner].name for _, inner in past], callers=tuple(names))


def _about_shapes(rows: Rows) -> Iterator[RunWarning]:
    """The operators that were not counted only because their shapes were not recorded."""
    uncounted = rows.of_recording.summed("frames", "uncounted")
    without_shapes: dict[str, None] = {}  # names of operators, in order
    for chain in (chain for chain, calls in uncounted.items() if calls):
        kind, name, signature = rows.frames[chain][-1]
        if kind != FrameKind.KERNEL and not (signature and signature.shapes):
            without_shapes[name] = None
    if without_shapes:
        from torchprof.measure.flops.torch_registry import has_formula  # imports torch

        if names := tuple(filter(has_formula, without_shapes)):
            yield RunWarning.of(WITHOUT_SHAPES, names=names)


def about_cost(calls: int, label_ns: float, own_ns: int, wall_ns: int) -> Iterator[RunWarning]:
    """The time that the labels themselves took, if it is much of the recorded time. ``label_ns``: that of one label.
    ``own_ns``: the self time of all labelled ranges, which includes the labels."""
    cost = min(calls * label_ns, own_ns)
    if cost > _LABELS_MATTER * wall_ns:
        yield RunWarning.of("label_cost", calls=calls, cost_ns=cost, is_at_most=cost >= own_ns, wall_ns=wall_ns)


def own_ns_of_layers(rows: Rows) -> int:
    """The self time of all labelled ranges, between ops. It includes the cost of the labels."""
    return rows.total("cpu_ns", layer=lambda layer: layer != OUTSIDE, frames=())


# What the observations do not have: ``profile`` adds these warnings itself

_CLOCK_JUMP, _CLOCK_JUMP_NS = 0.01, 1_000_000
"""A jump of the clock up to this share of the recorded time, or up to this time, gives no warning."""


def about_buckets(unordered: Sequence[str]) -> Iterator[RunWarning]:
    """Models whose gradient buckets are not in the order in which gradients become ready."""
    if unordered:
        yield RunWarning.of("buckets_unordered", unordered)


def about_clock(jump_ns: int, wall_ns: int) -> list[RunWarning]:
    """The system's clock was set during the recording. torch's profiler takes its times from this clock."""
    if abs(jump_ns) <= max(_CLOCK_JUMP * wall_ns, _CLOCK_JUMP_NS):
        return []
    return [RunWarning.of("clock_set", jump_ns=jump_ns, wall_ns=wall_ns)]
