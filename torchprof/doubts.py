"""What a reader of a run should know before believing it: each doubt a sentence or two, shown under the table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import PurePath

from torchprof.attribute import FORWARD, LAUNCHED_BEFORE, NOT_SELECTED, OUTSIDE, PHASES
from torchprof.compiled import (
    AMBIGUOUS_MODULE,
    COMPILED_BEFORE,
    DIVISORS,
    GRAPH_NOT_READ,
    NESTED_GRAPHS,
    OTHER_MODULE,
    UNKNOWN_KERNEL,
    UNKNOWN_MODULE,
)
from torchprof.cost import format_time
from torchprof.regions import compiled_in
from torchprof.run import Layer, Meta, Run, is_left_over, ranks_in_words
from torchprof.varying import varying_work

_SLOW_START = 2  # so many times a later call's time, and the first call's is told
_DOUBTS_SHOWN = 10  # of several ranks: there may be a thousand, each with figures of its own in its sentences
_WORTH_TELLING = 0.01  # the share of the kernels' time from which on it is told that nobody knows its layer
_TOO_BUSY = 0.05  # the share of the time for which a thread waits for a processor, from which on it is told
_CLOCK_JUMP, _CLOCK_JUMP_NS = 0.01, 1_000_000  # the share of the recorded time, and the time, that a clock may jump by
_WORTH_SAYING = 0.02  # the share of the time from which on the labels' own cost is told


_COMPILE_IN_IT = (
    "compile the model inside the block (call torch.compiler.reset() before the block, or start a new process); "
    "warmup=1 leaves the first call, which compiles, out of the figures"
)
_WHY_UNKNOWN = {
    COMPILED_BEFORE: f"they were compiled before the block. To see their layers, {_COMPILE_IN_IT}",
    NESTED_GRAPHS: "they are in graphs inside of a graph (torch.cond, torch.while_loop, nested regions)",
    GRAPH_NOT_READ: "their graphs could not be read while they were compiled",
    UNKNOWN_KERNEL: "they ran under names that no kernel of their graph has, or that several may have",
    UNKNOWN_MODULE: "torch does not record which module their operations come from",
    OTHER_MODULE: "they work for modules that are not among the profiled ones",
    AMBIGUOUS_MODULE: "the compiled function may have called any of several modules of one class",
}
"""Why the layers of compiled kernels are not known, by the reason in the name of their row."""


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
        once_for_all = set(about_processors(meta)) if len(run.metas) > 1 else ()
        for warning in dict.fromkeys(meta.warnings):
            if warning not in once_for_all:
                said.setdefault(warning, []).append(meta.rank)
    doubts = []
    for warning, ranks in sorted(said.items(), key=lambda item: -len(item[1])):
        of_all = len(ranks) == len(run.metas)
        doubts.append(warning if of_all else f"{ranks_in_words(ranks).capitalize()}: {warning}")
    if len(run.metas) > 1 and len(doubts) > _DOUBTS_SHOWN:
        hidden = len(doubts) - _DOUBTS_SHOWN
        doubts[_DOUBTS_SHOWN:] = [f"More of single ranks are hidden: {hidden}. run.of_rank(N) has those of rank N."]
    return [*_about_missing_ranks(run), *doubts, *_about_busy_machines(run)]


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


def summed_over(run: Run) -> str:
    """What the sums of a run are over, in words: its steps, where any ended, else the calls of its models; "" for a
    single call."""
    steps = max(meta.steps for meta in run.metas)
    if steps > 1:
        return f"{steps} steps"
    roots = [index for index, layer in enumerate(run.layers) if len(layer.path) == 1]
    calls = sum(run.rows.by_layer.get((root, PHASES.index(FORWARD)), (None, 0))[1] for root in roots)
    whose = run.layers[roots[0]].name if len(roots) == 1 else "the models"
    return f"{calls} calls of {whose}" if calls > 1 else ""


def about_flops(run: Run) -> Iterator[str]:
    """That MACs and FLOPs in tables are not those of one call."""
    over = summed_over(run)
    if over and any(run.rows.columns["flops"]):
        yield f"MACs and FLOPs are summed over {over}."


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


def about_start(run: Run) -> Iterator[str]:
    """Models whose first call took much longer than the later ones: start-up, where all were on the same shapes."""
    for key, spread in run.samples.items():
        later = (spread.sum - spread.first) / (spread.count - 1) if spread.count > 1 else 0
        of_calls = key.measure == "cpu_ns" and key.phase == FORWARD and len(run.layers[key.layer].path) == 1
        if of_calls and 0 < later * _SLOW_START < spread.first:
            layer = run.layers[key.layer]
            why = {
                False: "that start-up, the model's or the profiler's own, is in the totals",
                True: "not all were on the same shapes, so how much of that is start-up is not known",
                None: "that is start-up or other shapes, which were not recorded, and is in the totals",
            }[varying_work(run)[layer.path]]
            yield (
                f"The first call of {layer.name} took {format_time(spread.first)}, the later ones "
                f"{format_time(later)} on average: {why}."
            )


def about_left_over(run: Run) -> Iterator[str]:
    """Work of devices that was launched before the recording began: how much, and where it is not."""
    columns = run.rows.columns
    left_over = [*map(is_left_over, run.rows.frames)]
    kernels = sum(calls for calls, chain in zip(columns["calls"], columns["frames"]) if left_over[chain])
    if kernels:
        ns, device = run.left_over.device_ns, (run.meta.device or "device").upper()
        verb = "was" if kernels == 1 else "were"
        yield (
            f"{kernels} kernel{'s' * (kernels > 1)} {verb} launched before the recording began: "
            f"{format_time(ns)}, {ns / max(sum(columns['device_ns']), 1):.1%} of the {device} time in the recording. "
            f"The row {LAUNCHED_BEFORE} has {'it' if kernels == 1 else 'them'}; no layer, step, share or comparison "
            "does."
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


def about_processors(meta: Meta) -> Iterator[str]:
    """A machine that was too busy to run what was measured: times are elapsed time."""
    waited, wall = meta.run_delay_ns, meta.wall_ns
    if waited is not None and waited > _TOO_BUSY * wall > 0:
        yield (
            f"The machine was busy: for {format_time(waited)} of {format_time(wall)} ({waited / wall:.0%}) the main "
            "thread was ready to run, and other threads or processes had all processors. CPU times are elapsed times, "
            "so that is in the times of whatever ran then. Measure again on an idle machine."
        )


def _about_busy_machines(run: Run) -> Iterator[str]:
    """One sentence for several ranks: each has figures of its own, and their sentences would hide others."""
    shares = {
        meta.rank: (meta.run_delay_ns or 0) / meta.wall_ns
        for meta in run.metas
        if any(sentence in meta.warnings for sentence in about_processors(meta))
    }
    if len(run.metas) > 1 and shares:
        most = max(shares, key=shares.__getitem__)
        yield (
            f"The machine was busy on {len(shares)} of {len(run.metas)} ranks: for up to {shares[most]:.0%} of the "
            f"time (rank {most}) the main thread was ready to run, and other threads or processes had all processors. "
            "CPU times are elapsed times, so that is in the times of whatever ran then. Measure again on an idle "
            "machine."
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


def about_compiled(run: Run) -> Iterator[str]:
    """Graph breaks, compiling while it was recorded, kernels that were divided, and those that nobody can give away."""
    found = compiled_in(run)
    places = [f"{PurePath(region.file).name}:{region.break_line}" for region in found.breaks]
    if places:
        breaks = f"graph break{'s' if len(places) > 1 else ''}"
        yield f"{len(places)} {breaks} of torch.compile: {some(places)}. {SAYS_WHY}"
    by_layers = ("compile_layers", True) in run.meta.flags
    if found.compiled:
        without = "warmup=1 leaves it out" if by_layers else "call the model once before, or use warmup=1"
        took = format_time(found.compiling.cpu_ns)
        yield f"torch.compile was at work while this was recorded, for {took}, which is in the totals: {without}."
    kernels = {frame.name.partition(":")[0] for chain in run.rows.frames for frame in chain if frame.kind == "kernels"}
    for how in sorted(kernels & {f"divided by {divisor}" for divisor in DIVISORS}):
        yield f"Kernels of several layers are {how} among them: their times are estimates."
    for reason, share in found.unknown_shares(run).items():
        if share > _WORTH_TELLING:
            why = _WHY_UNKNOWN.get(reason, reason)
            yield f"Not attributable: {share:.0%} of the time in kernels of compiled graphs: {why}."
    if not by_layers and found.has_graphs and _has_inlined_layers(run):
        yield (
            "Layers inside compiled code are not called one by one, so their times are unknown (–). To see their share "
            f"of the kernels, use compile_layers=True, and {_COMPILE_IN_IT}."
        )


def _has_inlined_layers(run: Run) -> bool:
    """Whether any layer may have run inside compiled code and was not called itself."""
    called = {layer for (layer, _), (_, calls) in run.rows.by_layer.items() if calls}
    return any(layer.compiled and index not in called for index, layer in enumerate(run.layers))
