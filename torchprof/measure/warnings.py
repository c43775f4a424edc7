"""What a reader of a run should know before believing it: each doubt a sentence or two, shown under the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set

from torchprof.errors import some
from torchprof.run.cost import format_time
from torchprof.run.layers import Layer, Layers
from torchprof.run.words import NOT_SELECTED, OUTSIDE

_CLOCK_JUMP, _CLOCK_JUMP_NS = 0.01, 1_000_000  # the share of the recorded time, and the time, that a clock may jump by
_WORTH_SAYING = 0.02  # the share of the time from which on the labels' own cost is told


def about_modules(added: Sequence[str], removed: Sequence[str]) -> Iterator[str]:
    """Modules that changed inside the block."""
    if added:
        yield f"Added or replaced inside the block, and part of the layer above: {some(added)}."
    if removed:
        yield f"Removed inside the block: {some(removed)}. They show what they did until then."


def about_exchanges(unmatched: int, uncertain: int) -> Iterator[str]:
    """Collectives that nobody was seen to ask for, and buckets of which nobody knows whose gradients are in them."""
    if unmatched:
        yield f"Outside of layers: {unmatched} collective(s) of which nobody was seen to ask for them."
    if uncertain:
        yield (
            f"{uncertain} bucket(s) of gradients held others than came before them, as in the first backward of "
            "DistributedDataParallel: they count where the last of these came."
        )


def about_buckets(unordered: Sequence[str]) -> Iterator[str]:
    """Models whose buckets of gradients are not in order."""
    if unordered:
        yield (
            f"DistributedDataParallel had not put the buckets of {some(unordered)} in order when the recording began: "
            "it does so after its first backward, but not with find_unused_parameters=True. A bucket is said to serve "
            "the layers whose gradients were ready before it, and may be of others."
        )


def about_labels(layers: Sequence[Layer], unobserved: Mapping[int, int], unlabelled: Iterable[int]) -> Iterator[str]:
    """Calls that the profiler did not see, by layer, and layers that could not be labelled."""
    for index, calls in sorted(unobserved.items()):
        yield (
            f"Not counted: {calls} call{'s' if calls > 1 else ''} of {layers[index].name} on a thread that torch's "
            "profiler does not record. It records the thread that enters the block, and autograd's."
        )
    bare = [layers[index].name for index in unlabelled]
    if bare:
        yield f"Could not be labelled, and are part of the layer above: {some(bare)}."


def about_calls(
    layers: Sequence[Layer],
    callable_layers: Set[int],
    called: Set[int],
    silent: Set[int],
    callers: Iterable[tuple[int, int]],
) -> Iterator[str]:
    """Layers that were never called, and layers called by other than the layer above them.

    ``callable_layers``: those with a forward to be called; ``called``: those that were; ``silent``: those that could
    have been seen and were not. ``callers`` are pairs of layer indices (caller, called), negative for what is no layer.
    """
    number = Layers.of(layers).index_of
    busy = {layers[index].path[:steps] for index in called for steps in range(1, len(layers[index].path))}
    busy |= {path for index in called for path in layers[index].shared_with}
    idle = [layers[index].name for index in sorted(silent) if layers[index].path not in busy]
    if idle:
        yield f"Never called: {some(idle)}. What ran of them, if anything did, is shown where it ran."

    def above(index: int) -> Iterator[int]:
        """The layers that may call one: up to the next that would have been called itself; nobody, where none is."""
        path = layers[index].path[:-1]
        while path:
            yield number[path]
            if number[path] in callable_layers:
                return
            path = path[:-1]
        yield OUTSIDE

    past = []
    for outer, inner in sorted(callers):
        if outer not in (*above(inner), inner, NOT_SELECTED):
            past.append(f"{layers[inner].name} by {layers[outer].name if outer >= 0 else 'code outside the model'}")
    if past:
        yield (
            f"Called by other than the layer above them: {some(past)}. They count where they stand in the tree, so the "
            "totals above them are not how long those layers' own calls lasted."
        )


def about_cost(calls: int, label_ns: float, own_ns: int, wall_ns: int) -> Iterator[str]:
    """What the labels themselves took, where it is much of the time.

    ``label_ns`` is what one call took right after the recording. It is no more than ``own_ns``, the time of all
    labelled ranges in which nothing inside of them ran: the labels are part of that.
    """
    cost = min(calls * label_ns, own_ns)
    if cost > _WORTH_SAYING * wall_ns:
        about = "about" if cost < own_ns else "at most"
        yield (
            f"The labels themselves took {about} {format_time(cost)} of {format_time(wall_ns)} ({cost / wall_ns:.0%}): "
            f"{calls} calls of {format_time(cost / calls)}."
        )


def about_clock(jump_ns: int, wall_ns: int) -> list[str]:
    """The system's clock was set while something was recorded: torch's profiler takes its times from it."""
    if abs(jump_ns) <= max(_CLOCK_JUMP * wall_ns, _CLOCK_JUMP_NS):
        return []
    direction = "forward" if jump_ns > 0 else "back"
    return [
        f"The system's clock was set {direction} by {format_time(abs(jump_ns))} during a recording of "
        f"{format_time(wall_ns)}. torch's profiler measures with it: the times of this run are wrong."
    ]
