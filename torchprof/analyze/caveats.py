"""The warnings that follow from what a run holds, and those of several recordings of one process, added up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath

from torchprof.analyze.compiled import compiled_in
from torchprof.analyze.uncounted import about_uncounted
from torchprof.analyze.varying import varying_work
from torchprof.errors import some
from torchprof.run.cost import format_time
from torchprof.run.run import Run
from torchprof.run.warnings import SAYS_WHY, about_processors
from torchprof.run.words import (
    AMBIGUOUS_MODULE,
    COMPILED_BEFORE,
    DIVISORS,
    FORWARD,
    GRAPH_NOT_READ,
    LAUNCHED_BEFORE,
    NESTED_GRAPHS,
    OTHER_MODULE,
    UNKNOWN_KERNEL,
    UNKNOWN_MODULE,
    is_left_over,
)


def following_from(run: Run, has_formula: Callable[[str], bool]) -> Iterator[str]:
    """The warnings that need nothing but the run of one rank: computed anew for a sum, they hold for all of it.

    ``has_formula``: see ``about_uncounted``.
    """
    yield from about_start(run)
    yield from about_left_over(run)
    yield from about_compiled(run)
    yield from about_uncounted(run.rows, has_formula)
    yield from about_processors(run.meta)


def of_sum(total: Run, of_parts: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """The warnings of a sum of runs: those that follow from it, and for each run that was added what else it said.

    ``of_parts``: ``not_following`` of each. Such a sentence speaks of one recording, and says of which: a layer that
    was never called in one of them may be called in the next.
    """
    numbers: dict[str, list[int]] = {}
    for number, said in enumerate(of_parts, 1):
        for text in said:
            numbers.setdefault(text, []).append(number)
    count = len(of_parts)
    others = [
        f"Each of the {count} runs added: {text}"
        if len(found) == count
        else f"Run{'s' if len(found) > 1 else ''} {', '.join(map(str, found))} of the {count} added: {text}"
        for text, found in numbers.items()
    ]
    return (*others, *following_from(total, _nobody_knows))


def not_following(run: Run) -> list[str]:
    """The warnings of a run that do not follow from what it holds, each once."""
    if not run.meta.warnings:
        return []
    following = {*following_from(run, _nobody_knows)}
    return [text for text in dict.fromkeys(run.meta.warnings) if text not in following]


def _nobody_knows(operator: str) -> bool:
    """Which operators have a formula, torch says: saved runs are read without it. All are listed by their names then,
    and what a run said of shapes that were not recorded stays, as a sentence of that run."""
    return False


_SLOW_START = 2  # so many times a later call's time, and the first call's is told
_WORTH_TELLING = 0.01  # the share of the kernels' time from which on it is told that nobody knows its layer


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
        ns, device = run.left_over.device_ns, run.meta.device_heading
        verb = "was" if kernels == 1 else "were"
        yield (
            f"{kernels} kernel{'s' * (kernels > 1)} {verb} launched before the recording began: "
            f"{format_time(ns)}, {ns / max(sum(columns['device_ns']), 1):.1%} of the {device} time in the recording. "
            f"The row {LAUNCHED_BEFORE} has {'it' if kernels == 1 else 'them'}; no layer, step, share or comparison "
            "does."
        )


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
