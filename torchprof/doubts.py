"""What a reader of a run should know before believing it: each doubt a sentence or two, shown under the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torchprof.attribute import FORWARD
from torchprof.cost import format_time
from torchprof.run import Layer, SampleKey, Spread

_SLOW_START = 2  # so many times a later call's time, and the first call's is told
_WORTH_SAYING = 0.02  # the share of the time from which on the labels' own cost is told


def some(names: Sequence[str], limit: int = 3) -> str:
    """A few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def about_modules(added: Sequence[str], removed: Sequence[str]) -> Iterator[str]:
    """Modules that changed inside the block."""
    if added:
        yield f"Added or replaced inside the block, and part of the layer above: {some(added)}."
    if removed:
        yield f"Removed inside the block: {some(removed)}. They show what they did until then."


def about_labels(unobserved: Mapping[str, int], unlabelled: Sequence[str]) -> Iterator[str]:
    """Calls that the profiler did not see, by the layer's name, and layers that could not be labelled."""
    for name, calls in sorted(unobserved.items()):
        yield (
            f"Not counted: {calls} call{'s' if calls > 1 else ''} of {name} on a thread that torch's profiler does not "
            "record. It records the thread that enters the block, and autograd's."
        )
    if unlabelled:
        yield f"Could not be labelled, and are part of the layer above: {some(unlabelled)}."


def about_calls(
    layers: Sequence[Layer],
    callable_layers: Iterable[int],
    samples: Mapping[SampleKey, Spread],
    callers: Iterable[tuple[int, int]],
) -> Iterator[str]:
    """Layers that were never called, called from elsewhere than the tree says, or slow to start.

    ``callers`` are pairs of layer indices (caller, called), negative for what is no layer.
    """
    called = {key.layer for key in samples}
    silent = [layers[index].name for index in sorted(callable_layers) if index not in called]
    if silent:
        yield (
            f"Never called: {some(silent)}. If they did work, it ran in a function of the layer above, and is shown "
            "there."
        )
    crossing = [
        f"{layers[inner].name} by {layers[outer].name}"
        for outer, inner in sorted(callers)
        if min(outer, inner) >= 0 and layers[inner].path[: len(layers[outer].path)] != layers[outer].path
    ]
    if crossing:
        yield (
            f"Called from outside the layer above them: {some(crossing)}. Their time is in their own place in the "
            "tree, not in the caller's total."
        )
    for key, spread in samples.items():
        later = (spread.sum - spread.first) / (spread.count - 1) if spread.count > 1 else 0
        if key.phase == FORWARD and len(layers[key.layer].path) == 1 and 0 < later * _SLOW_START < spread.first:
            yield (
                f"The first call of {layers[key.layer].name} took {format_time(spread.first)}, the later ones "
                f"{format_time(later)} on average: that start-up is in the totals (warmup= leaves the model's out)."
            )


def about_cost(calls: int, label_ns: float, wall_ns: int) -> Iterator[str]:
    """What the labels themselves took, where it is much of the time."""
    cost = calls * label_ns
    if cost > _WORTH_SAYING * wall_ns:
        yield (
            f"The labels themselves took about {format_time(cost)} of {format_time(wall_ns)} ({cost / wall_ns:.0%}): "
            f"{calls} calls of {format_time(label_ns)}, measured here."
        )
