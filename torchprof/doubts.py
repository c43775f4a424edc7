"""What a reader of a run should know before believing it: each doubt a sentence or two, shown under the table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE
from torchprof.compiled import DIVISORS
from torchprof.cost import format_time
from torchprof.regions import compiled_in
from torchprof.run import NOT_SELECTED_NAME, OUTSIDE_NAME, Layer, Rows, Run, SampleKey, Spread, ranks_in_words

_SLOW_START = 2  # so many times a later call's time, and the first call's is told
_DOUBTS_SHOWN = 10  # of several ranks: there may be a thousand, each with figures of its own in its sentences
_WORTH_TELLING = 0.01  # the share of the kernels' time from which on it is told that nobody knows its layer
_WORTH_SAYING = 0.02  # the share of the time from which on the labels' own cost is told


SAYS_WHY = 'The report "compiled" says why.'


def some(names: Sequence[str], limit: int = 3) -> str:
    """A few names, and how many more there are."""
    more = len(names) - limit
    return ", ".join(names[:limit]) + (f" and {more} more" if more > 0 else "")


def doubts_of(run: Run) -> list[str]:
    """What a report says under its figures: who is missing, and each warning once, of whom where it is not of all.

    What the figures of several ranks are, ``about_sums`` says.
    """
    said: dict[str, list[int]] = {}
    for meta in run.metas:
        for warning in dict.fromkeys(meta.warnings):
            said.setdefault(warning, []).append(meta.rank)
    doubts = []
    for warning, ranks in sorted(said.items(), key=lambda item: -len(item[1])):
        of_all = len(ranks) == len(run.metas)
        doubts.append(warning if of_all else f"{ranks_in_words(ranks).capitalize()}: {warning}")
    if len(run.metas) > 1 and len(doubts) > _DOUBTS_SHOWN:
        hidden = len(doubts) - _DOUBTS_SHOWN
        doubts[_DOUBTS_SHOWN:] = [f"More of single ranks are hidden: {hidden}. run.of_rank(N) has those of rank N."]
    return [*_about_missing_ranks(run), *doubts]


def _about_missing_ranks(run: Run) -> Iterator[str]:
    missing = run.missing_ranks
    if missing and len(run.metas) > 1:  # a run of one rank is not merged yet, or was taken out of others
        words, size = ranks_in_words(missing).capitalize(), len(run.metas) + len(missing)
        is_missing = "is missing: it is" if len(missing) == 1 else "are missing: they are"
        yield f"{words} of {size} {is_missing} not in this run."


def about_sums(run: Run) -> Iterator[str]:
    """What the figures of several ranks are, where they stand for all of them."""
    if len(run.metas) > 1:
        ranks = ranks_in_words(meta.rank for meta in run.metas)
        yield (
            f"Times, calls, memory and FLOPs are sums over {ranks}, rates are of one rank on average, peaks the "
            'highest of any: the report "ranks" compares them.'
        )


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
    number = {layer.path: index for index, layer in enumerate(layers)}
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


def about_start(layers: Sequence[Layer], samples: Mapping[SampleKey, Spread]) -> Iterator[str]:
    """Models whose first call took much longer than the later ones."""
    for key, spread in samples.items():
        later = (spread.sum - spread.first) / (spread.count - 1) if spread.count > 1 else 0
        of_calls = key.measure == "cpu_ns" and key.phase == FORWARD and len(layers[key.layer].path) == 1
        if of_calls and 0 < later * _SLOW_START < spread.first:
            yield (
                f"The first call of {layers[key.layer].name} took {format_time(spread.first)}, the later ones "
                f"{format_time(later)} on average: that start-up, the model's or the profiler's own, is in the totals."
            )


def about_cost(calls: int, label_ns: float, wall_ns: int) -> Iterator[str]:
    """What the labels themselves took, where it is much of the time."""
    cost = calls * label_ns
    if cost > _WORTH_SAYING * wall_ns:
        yield (
            f"The labels themselves took about {format_time(cost)} of {format_time(wall_ns)} ({cost / wall_ns:.0%}): "
            f"{calls} calls of {format_time(label_ns)}, measured here."
        )


def about_compiled(run: Run) -> Iterator[str]:
    """Graph breaks, compiling while it was recorded, kernels that were divided, and those that nobody can give away."""
    found = compiled_in(run)
    places = [f"{PurePath(region.file).name}:{region.break_line}" for region in found.breaks]
    if places:
        breaks = f"graph break{'s' if len(places) > 1 else ''}"
        yield f"{len(places)} {breaks} of torch.compile: {some(places)}. {SAYS_WHY}"
    if found.compiled:
        by_layers = ("compile_layers", True) in run.meta.flags
        without = "warmup=1 leaves it out" if by_layers else "call the model once before, or use warmup=1"
        took = format_time(found.compiling.cpu_ns)
        yield f"torch.compile was at work while this was recorded, for {took}, which is in the totals: {without}."
    kernels = {frame.name.partition(":")[0] for chain in run.rows.frames for frame in chain if frame.kind == "kernels"}
    for how in sorted(kernels & {f"divided by {divisor}" for divisor in DIVISORS}):
        yield f"Kernels of several layers are {how} among them: their times are estimates."
    times = [shares.times(run) for shares in found.shares.values()]
    whole, unknown = sum(map(sum, times)), sum(of_phase[-1] for of_phase in times)
    if unknown > _WORTH_TELLING * whole:
        yield (
            f"Not attributable: {unknown / whole:.0%} of the time in kernels of compiled graphs. Most often these were "
            "compiled before the block: for compile_layers they have to be compiled in it, as with warmup=1 after "
            "torch.compiler.reset()."
        )


def about_uncounted(rows: Rows) -> Iterator[str]:
    """Ops whose arithmetic is not in the MACs and FLOPs, each with its calls and where they were."""
    calls: Counter[str] = Counter()
    where: dict[str, dict[str, None]] = {}
    columns = rows.columns
    for at, uncounted in enumerate(columns["uncounted"]):
        if uncounted:
            name = rows.frames[columns["frames"][at]][-1].name
            layer = columns["layer"][at]
            calls[name] += uncounted
            place = OUTSIDE_NAME if layer == OUTSIDE else NOT_SELECTED_NAME
            where.setdefault(name, {})[rows.layers[layer].name if layer >= 0 else place] = None
    for name, count in calls.most_common():
        yield f"Not counted: {name} ({count} call{'s' if count > 1 else ''}, in {some(list(where[name]))})."
