"""The warnings of a recording that do not follow from its run: about labels, calls and communication."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set

from torchprof.run.layers import Layer, Layers
from torchprof.run.rows import Rows
from torchprof.run.warnings import WITHOUT_SHAPES, Caveat, caveat
from torchprof.run.words import NOT_SELECTED, OUTSIDE, is_left_over

_CLOCK_JUMP, _CLOCK_JUMP_NS = 0.01, 1_000_000  # a jump up to this share of the time, or up to this time, is no warning
_LABELS_MATTER = 0.02  # warn if labels take more than this share of the recorded time


def about_modules(added: Sequence[str], removed: Sequence[str]) -> Iterator[Caveat]:
    """Modules that changed inside the block."""
    if added:
        yield caveat("modules_added", added)
    if removed:
        yield caveat("modules_removed", removed)


def about_exchanges(unmatched: int, uncertain: int) -> Iterator[Caveat]:
    """Collectives without a known caller, and buckets of gradients whose layers are unknown."""
    if unmatched:
        yield caveat("collectives_unmatched", count=unmatched)
    if uncertain:
        yield caveat("buckets_uncertain", count=uncertain)


def about_buckets(unordered: Sequence[str]) -> Iterator[Caveat]:
    """Models whose gradient buckets are not in the order in which gradients become ready."""
    if unordered:
        yield caveat("buckets_unordered", unordered)


def about_labels(layers: Sequence[Layer], unobserved: Mapping[int, int], unlabelled: Iterable[int]) -> Iterator[Caveat]:
    """Calls that the profiler did not record, by layer, and layers that could not be labelled."""
    for index, calls in sorted(unobserved.items()):
        yield caveat("calls_not_recorded", [layers[index].name], calls=calls)
    bare = [layers[index].name for index in unlabelled]
    if bare:
        yield caveat("layers_unlabelled", bare)


def about_calls(
    layers: Sequence[Layer],
    callable_layers: Set[int],
    called: Set[int],
    silent: Set[int],
    callers: Iterable[tuple[int, int]],
) -> Iterator[Caveat]:
    """Layers that were never called, and layers that were called by another layer than their parent.

    ``callable_layers``: the layers with a forward. ``called``: the layers with recorded calls. ``silent``: the layers
    whose calls would have been recorded, and that have none. ``callers``: pairs of indices (caller, called); negative
    for code outside all layers.
    """
    number = Layers.of(layers).index_of
    busy = {layers[index].path[:steps] for index in called for steps in range(1, len(layers[index].path))}
    busy |= {path for index in called for path in layers[index].shared_with}
    idle = [layers[index].name for index in sorted(silent) if layers[index].path not in busy]
    if idle:
        yield caveat("never_called", idle)

    def above(index: int) -> Iterator[int]:
        """The layers that may call this one: its ancestors up to the nearest one with a forward. Without such an
        ancestor, also code outside all layers."""
        path = layers[index].path[:-1]
        while path:
            yield number[path]
            if number[path] in callable_layers:
                return
            path = path[:-1]
        yield OUTSIDE

    past = [(outer, inner) for outer, inner in sorted(callers) if outer not in (*above(inner), inner, NOT_SELECTED)]
    if past:
        names = [layers[outer].name if outer >= 0 else "" for outer, _ in past]
        yield caveat("called_by_others", [layers[inner].name for _, inner in past], callers=tuple(names))


def about_cost(calls: int, label_ns: float, own_ns: int, wall_ns: int) -> Iterator[Caveat]:
    """The time that the labels themselves took, if it is much of the recorded time.

    ``label_ns``: the time of one label, measured right after the recording. ``own_ns``: the self time of all labelled
    ranges. It includes the labels, so they took at most this time.
    """
    cost = min(calls * label_ns, own_ns)
    if cost > _LABELS_MATTER * wall_ns:
        yield caveat("label_cost", calls=calls, cost_ns=cost, is_at_most=cost >= own_ns, wall_ns=wall_ns)


def about_clock(jump_ns: int, wall_ns: int) -> list[Caveat]:
    """The system's clock was set during the recording. torch's profiler takes its times from this clock."""
    if abs(jump_ns) <= max(_CLOCK_JUMP * wall_ns, _CLOCK_JUMP_NS):
        return []
    return [caveat("clock_set", jump_ns=jump_ns, wall_ns=wall_ns)]


def about_shapes(rows: Rows, has_formula: Callable[[str], bool]) -> Iterator[Caveat]:
    """The operators that were not counted only because their shapes were not recorded.

    ``has_formula(name)``: whether an operator is counted if its shapes are recorded. The number and layers of the calls
    follow from the run.
    """
    columns = rows.columns
    last = {
        rows.frames[chain][-1]: None
        for chain, uncounted in zip(columns["frames"], columns["uncounted"])
        if uncounted and not is_left_over(rows.frames[chain])
    }
    without = {
        name: None for kind, name, signature in last if kind != "kernel" and not (signature and signature.shapes)
    }
    names = tuple(filter(has_formula, without))
    if names:
        yield caveat(WITHOUT_SHAPES, names=names)
