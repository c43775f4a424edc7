"""Notes on a comparison: differences between two runs, and between their conditions, that make them hard to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchprof.analyze.figures import measured_by_all
from torchprof.comparison.diff import Denominator
from torchprof.run.layers import Layer
from torchprof.run.measures import MEASURES
from torchprof.run.run import Run
from torchprof.run.words import PHASES

_Runs = tuple[Run, Run]  # before and after
_Models = Sequence[tuple[int, int]]  # those that both runs have, by their indices before and after


def notes_on(runs: _Runs, models: _Models, denominator: Denominator, device: str) -> Iterator[str]:
    """The notes on the comparison of two runs, as sentences, in the order in which reports show them."""
    yield from _about_counts(runs, models, denominator)
    yield from _about_measures(runs, device)
    yield from _about_models(runs, models)
    yield from _about_conditions(runs)


def _about_counts(runs: _Runs, models: _Models, denominator: Denominator) -> Iterator[str]:
    new, counts = runs[1], denominator.counts
    if denominator.counted is None and new.layers:
        yield "Figures are totals of the runs: the number of calls of a model, or of steps, is unknown."
    if denominator.unit is not None:
        what = f"forward call{{}} of {denominator.model}" if denominator.unit == "call" else "step{}"
        yield (
            f"The runs recorded different numbers of {what.format('s')}: {counts[0]} before, {counts[1]} "
            f"after. Times, FLOPs, calls and net memory are per {what.format('')}."
        )
    if denominator.unit == "call":
        for before, after in models:
            calls = runs[0].rows.forward_calls(before), runs[1].rows.forward_calls(after)
            if calls[0] * counts[1] != calls[1] * counts[0]:
                yield (
                    f"{new.layers[after].name} was called {calls[0]} times before and {calls[1]} times after. "
                    f"Its number of calls per call of {denominator.model} differs."
                )


def _about_models(runs: _Runs, models: _Models) -> Iterator[str]:
    old, new = runs
    for before, after in models:
        old_model, other = old.layers[before], new.layers[after]
        if old_model.path[-1] != other.path[-1]:
            yield f"The models differ: {old_model.name} before, {other.name} after."
        for what, was, now in differences_of(old_model, other, with_settings=False):
            if what in ("input shapes", "training"):
                yield _unlike(f"{what} of {other.name}", was, now)
    types = [_types(run) for run in runs]
    if types[0] and types[1] and types[0] != types[1]:
        yield _unlike("types of the parameters", *types)
    if len(old.metas) != len(new.metas):
        yield _unlike("ranks", str(len(old.metas)), str(len(new.metas)))
    if old.meta.paths != new.meta.paths:
        yield _unlike("selected layers (paths=)", *(_selected(run) for run in runs))
    phases = [set(run.phases()) for run in runs]
    for phase in PHASES:
        if (phase in phases[0]) != (phase in phases[1]):
            yield f"Only the run {'before' if phase in phases[0] else 'after'} has {phase} work."


def _about_measures(runs: _Runs, device: str) -> Iterator[str]:
    all_measured = [*map(measured_by_all, runs)]
    for measure in MEASURES:
        names = {name for name, _ in measure.fields}
        measured = [names <= of_run for of_run in all_measured]
        if measured[0] != measured[1]:
            heading = measure.heading.format(device=device)
            yield f"{heading} is not compared: it was measured only {'before' if measured[0] else 'after'}."
    flags = [dict(run.meta.flags) for run in runs]
    for flag in flags[0]:
        if flag in flags[1] and flags[0][flag] != flags[1][flag]:
            where = "before" if flags[0][flag] else "after"
            yield f"{flag} was on only {where}. It adds profiler overhead to the times."


def _about_conditions(runs: _Runs) -> Iterator[str]:
    old, new = (run.meta for run in runs)
    if old.environment and new.environment:
        words = [dict(meta.environment) for meta in (old, new)]
    else:
        words = [{name: word for name, word in meta.versions if name != "torchprof"} for meta in (old, new)]
    say_all = ["torch" in words_of for words_of in words]
    if say_all[0] != say_all[1]:
        which = "before" if say_all[1] else "after"
        yield f"The environment of the run {which} is incomplete: it was read from a trace."
    elif bool(old.environment) != bool(new.environment):
        which = "before" if new.environment else "after"
        yield f"The environment of the run {which} was not recorded."
    if not all(say_all):  # what only one run states is unknown for the other
        words = [{name: words[side][name] for name in words[side] if name in words[1 - side]} for side in (0, 1)]
    switches = [dict(meta.settings) for meta in (old, new)] if old.switches and new.switches else []
    for conditions in (words, switches):
        for name in {name: None for side in conditions for name in side}:
            was, now = (side.get(name, "not there") for side in conditions)
            if was != now:
                yield _unlike(name, was, now)
    if old.device != new.device:
        yield _unlike("device", old.device or "cpu", new.device or "cpu")
    if old.machine and new.machine and old.machine != new.machine:
        yield _unlike("machine", old.machine, new.machine)


def warnings_of_both(before: Run, after: Run) -> Iterator[str]:
    """The warnings of the runs; a warning that both have comes once."""
    texts = [list(dict.fromkeys(map(str, run.warnings))) for run in (before, after)]
    for text in texts[0]:
        yield f"{'Both runs' if text in texts[1] else 'Before'}: {text}"
    for text in texts[1]:
        if text not in texts[0]:
            yield f"After: {text}"


def differences_of(before: Layer, after: Layer, with_settings: bool) -> Iterator[tuple[str, str, str]]:
    """What differs between a layer before and after, with the values of both in words."""
    called = before.input_shapes and after.input_shapes
    for what, was, now, is_known in (
        ("kind", before.kind, after.kind, before.kind and after.kind),
        ("settings", before.settings, after.settings, with_settings),
        ("parameters", before.params, after.params, None not in (before.params, after.params)),
        ("input shapes", before.input_shapes, after.input_shapes, called),
        ("output shapes", before.output_shapes, after.output_shapes, called),
        ("training", before.training, after.training, None not in (before.training, after.training)),
    ):
        if is_known and was != now:
            yield what, _in_words(was), _in_words(now)


def _in_words(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join("×".join(map(str, shape)) or "scalar" for shape in value) or "none"
    return {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value)


def _types(run: Run) -> str:
    """The dtypes of the parameters of all layers; "" if they are unknown for every layer."""
    types = ", ".join(sorted({name for layer in run.layers for name, _ in layer.dtype_bytes})) or "none"
    return "" if all(layer.param_bytes is None for layer in run.layers) else types


def _selected(run: Run) -> str:
    return "all" if run.meta.paths is None else ", ".join(".".join(path) for path in run.meta.paths)


def _unlike(what: str, before: str, after: str) -> str:
    return f"Different {what}: {before} before, {after} after."
