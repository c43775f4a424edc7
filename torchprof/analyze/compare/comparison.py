"""``Diff``: two runs compared, layer by layer. Made by ``torchprof.compare``. Knows only the standard library.

Layers are matched in ``layers.py``; ``noise.py`` decides whether a difference of times is more than noise. What is
compared, and how, is in docs/compare.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath

from torchprof.analyze.columns import catalogue
from torchprof.analyze.compare.diff import (
    FASTER,
    LESS,
    MORE,
    SAME,
    SLOWER,
    UNDECIDED,
    WITHIN_NOISE,
    Change,
    Diff,
    Pair,
    Quantity,
    figure_of,
    for_one,
    quantity_of,
)
from torchprof.analyze.compare.layers import match_layers
from torchprof.analyze.compare.noise import ALPHA, FEWEST, Noise, false_discovery_rates, noise_of
from torchprof.analyze.compare.side import Side, cpu_or_device
from torchprof.errors import TorchprofError
from torchprof.run.cost import MEASURES, Bound, Figure, Measure, as_key
from torchprof.run.file_read import load
from torchprof.run.layers import Layer
from torchprof.run.run import Run
from torchprof.run.words import FORWARD, NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME, PHASES


def compare(before: Run | str | PathLike[str], after: Run | str | PathLike[str]) -> Diff:
    """Compare two runs, or files of saved ones, layer by layer and phase by phase.

    Layers are matched by path, moved and renamed ones by what they are. Of each: what both runs measured, before and
    after. Where the runs recorded different numbers of calls of the model, all that adds up is for one call. A
    difference of times is told from noise if both runs hold enough steps, or enough calls. See docs/compare.md.

    Raises TorchprofError for what is neither a run nor the file of one, OSError where a file cannot be read.
    """
    return _Comparison(as_run(before, "before", "compare"), as_run(after, "after", "compare")).diff()


def as_run(run: object, name: str, function: str) -> Run:
    """A run, or that of a file. Raises TorchprofError for what is neither, as the argument ``name`` of ``function``."""
    if isinstance(run, Run):
        return run
    if isinstance(run, (str, PathLike)):
        return load(fspath(run))
    raise TorchprofError(
        f"{name} is {type(run).__name__}, no run: {function} takes `prof.run`, or the path of a file that "
        "`prof.run.save(path)` wrote."
    )


class _Comparison:
    """Two runs, on the way to their ``Diff``."""

    def __init__(self, before: Run, after: Run) -> None:
        self.runs = before, after
        self.sides = Side(before), Side(after)
        self.matches = match_layers(before.layers, after.layers)
        self.counted, self.counts, self.of_what = self._counts()
        self.unit = self.counted if self.counts[0] != self.counts[1] else None
        # Samples are always brought to one call of the model: their numbers do not matter, unlike those of totals.
        self.scale = self.counts if self.unit else (1, 1)
        kinds = {run.meta.device or "device" for run in self.runs}
        self.device = (kinds.pop() if len(kinds) == 1 else "device").upper()
        self.quantities = tuple(self._quantities())
        # By layers, phase, field, and whether it is without the layers below: what has none is the same with them.
        self._noises: dict[tuple[int, int, str, str, bool], Noise | None] = {}

    def diff(self) -> Diff:
        pairs = self._pairs()
        whole = self._whole()
        return Diff(
            *self.runs,
            pairs,
            self.quantities,
            self.counted,
            self.counts,
            whole,
            tuple(self._notes()),
            tuple(self._warnings()),
        )

    def _counts(self) -> tuple[str | None, tuple[int, int], str]:
        """What totals can be divided by, how many of that each run recorded, and of which model they are calls."""
        for before, after, _ in self.matches:
            if before is None or after is None or len(self.runs[1].layers[after].path) > 1:
                continue
            counts = self.sides[0].calls[FORWARD][before], self.sides[1].calls[FORWARD][after]
            if all(counts) and not (self.runs[0].layers[before].recursive or self.runs[1].layers[after].recursive):
                return "call", counts, self.runs[1].layers[after].name
        counts = self.sides[0].steps, self.sides[1].steps
        if all(counts):
            return "step", counts, ""
        return None, (1, 1), ""

    def _quantities(self) -> Iterator[Quantity]:
        measured = self.sides[0].measured & self.sides[1].measured
        phases = [phase for phase in PHASES if any(phase in run.phases() for run in self.runs)]
        for column in catalogue(phases, measured, measured, self.device):
            quantity = quantity_of(column)
            if quantity is None or (quantity.what == "params" and not all(side.knows_params for side in self.sides)):
                continue
            at = (quantity.phase, quantity.device)
            if quantity.what != "peak" or all(any(key[1:] == at for key in side.peaks) for side in self.sides):
                yield quantity

    # The figures

    def _figures(self, side: int, quantity: Quantity) -> list[Figure]:
        """What a quantity is of each layer, for one call or step where the diff is; of measures, of the work of no
        layer, too."""
        figures, layers, scale = self.sides[side], self.runs[side].layers, self.scale[side]
        what, phase = quantity.what, quantity.phase
        if what == "params":
            return [figure_of(layer.params if quantity.is_self else figures.params[layer.path]) for layer in layers]
        if what == "calls":
            return [for_one(one.number_of_calls(), scale) for one in figures.figures[: len(layers)]]
        if isinstance(what, Measure):
            return [for_one(one.measure(what, phase, quantity.is_self), scale) for one in figures.figures]
        # A layer that did nothing in this phase has a peak of 0.
        nothing = [None if worked else 0 for worked in figures.worked[phase]]
        peaks = (figures.peaks.get((index, phase, quantity.device), nothing[index]) for index in range(len(layers)))
        return [figure_of(peak if known else None) for peak, known in zip(peaks, figures.known)]

    def _noise(self, before: int, after: int, quantity: Quantity) -> Noise | None:
        """How the times of both sides compare, step by step where both have enough steps, else call by call."""
        assert isinstance(quantity.what, Measure)
        [(name, _)] = quantity.what.fields  # a time is one field of the costs
        leaves = not (self.sides[0].below[before] or self.sides[1].below[after])
        key = (before, after, quantity.phase, name, quantity.is_self and not leaves)
        if key not in self._noises:
            self._noises[key] = self._noise_of(before, after, quantity, name, leaves)
        return self._noises[key]

    def _noise_of(self, before: int, after: int, quantity: Quantity, name: str, leaves: bool) -> Noise | None:
        found = []
        for side, index in enumerate((before, after)):
            figures = self.sides[side]
            of = figures.of_steps_by_itself if quantity.is_self else figures.of_steps
            values = of(index, quantity.phase, name)
            # Brought to one call of the model: a step may hold several.
            found.append([value * figures.steps / self.counts[side] for value in values or ()])
        are_few = any(len(values) < FEWEST for values in found)
        if are_few and name == "cpu_ns" and (leaves or not quantity.is_self):
            calls = [
                [value / self.counts[side] for value in self.sides[side].of_calls(index, quantity.phase)]
                for side, index in enumerate((before, after))
            ]
            if all(calls) and min(map(len, calls)) > min(map(len, found)):
                found = calls
        return noise_of(*found) if all(found) else None

    def _judge(self, pairs: Sequence[tuple[Pair, int | None, int | None]]) -> None:
        """Say of each difference of times whether it is more than noise."""
        for quantity in self.quantities:
            if not quantity.is_time:
                continue
            noises = {}
            for number, (pair, before, after) in enumerate(pairs):
                if before is not None and after is not None and pair.changes[quantity.key].difference is not None:
                    noise = self._noise(before, after, quantity)
                    if noise is not None:
                        noises[number] = noise
            testable = [number for number, noise in noises.items() if min(noise.counts) >= FEWEST]
            rates = dict(zip(testable, false_discovery_rates([noises[number].p for number in testable])))
            for number, (pair, _, _) in enumerate(pairs):
                change = pair.changes[quantity.key]
                noise = noises.get(number)
                verdict = _verdict(change, noise, rates.get(number), len(testable))
                if noise is not None or verdict != change.verdict:
                    pair.changes[quantity.key] = change._replace(verdict=verdict, noise=noise)

    # The tree

    def _pairs(self) -> tuple[Pair, ...]:
        layers = self.runs[0].layers, self.runs[1].layers
        with_settings = all(any(layer.settings for layer in one) for one in layers)
        of_before: dict[tuple[str, ...], Pair] = {}
        of_after: dict[tuple[str, ...], Pair] = {}
        everything: list[tuple[Pair, int | None, int | None]] = []
        tops: list[Pair] = []
        for before, after, how in self.matches:
            old = None if before is None else layers[0][before]
            new = None if after is None else layers[1][after]
            at = new or old
            assert at is not None
            differs = tuple(_differs(old, new, with_settings)) if old and new else ()
            pair = Pair(at.path, old, new, how, differs=differs)
            everything.append((pair, before, after))
            if old:
                of_before[old.path] = pair
            if new:
                of_after[new.path] = pair
        for pair, _, _ in everything:
            # Where it stood before is known of all, so that a removed layer finds the one above it, wherever that is.
            around = of_after.get(pair.path[:-1]) if pair.after else of_before.get(pair.path[:-1])
            (tops if around is None else around.children).append(pair)
        for index, name in ((NOT_SELECTED, NOT_SELECTED_NAME), (OUTSIDE, OUTSIDE_NAME)):
            if any(values[index] for side in self.sides for values in side.own.values()):
                pair = Pair((name,), None, None, "same")
                everything.append((pair, index, index))
                tops.append(pair)
        for quantity in self.quantities:
            figures = [self._figures(side, quantity) for side in (0, 1)]
            for pair, before, after in everything:
                if pair.is_layer or isinstance(quantity.what, Measure):
                    was = None if before is None else figures[0][before]
                    now = None if after is None else figures[1][after]
                    pair.changes[quantity.key] = _between(was, now)
        self._judge(everything)
        return tuple(tops)

    def _whole(self) -> dict[str, Change]:
        """What is of the run and of no layer."""
        whole = {}
        steps = [
            [spread for key, spread in run.samples.items() if key.measure == "step_ns" and spread.count]
            for run in self.runs
        ]
        if all(steps):
            means = [sum(one.sum for one in side) / sum(one.count for one in side) for side in steps]
            noise = noise_of(*([value for one in side for value in one.sample] for side in steps))
            change = _exact(*means, *means)
            testable = min(noise.counts) >= FEWEST
            verdict = _verdict(change, noise, noise.p if testable else None, 1)
            whole["step"] = change._replace(verdict=verdict, noise=noise)
        for kind, key in (("cpu", "cpu_peak"), ("device", as_key(f"{self.device} Peak"))):
            peaks = [[one.peak_bytes for one in run.memory if cpu_or_device(one.device) == kind] for run in self.runs]
            if all(peaks):
                largest = max(peaks[0]), max(peaks[1])
                whole[key] = _exact(*largest, *largest)
        return whole

    # What a reader should know before believing it

    def _notes(self) -> Iterator[str]:
        old, new = self.runs
        if self.counted is None and new.layers:
            yield (
                "Nobody knows how many calls of a model these runs hold, or how many steps: figures are totals of the "
                "runs."
            )
        if self.unit is not None:
            what = f"forward call{{}} of {self.of_what}" if self.unit == "call" else "step{}"
            yield (
                f"The runs recorded different numbers of {what.format('s')}: {self.counts[0]} before, {self.counts[1]} "
                f"after. Times, FLOPs, calls and net memory are those of one {what.format('')}."
            )
        if self.unit == "call":
            for before, after, _ in self.matches:
                if before is None or after is None or len(new.layers[after].path) > 1:
                    continue
                calls = self.sides[0].calls[FORWARD][before], self.sides[1].calls[FORWARD][after]
                if calls[0] * self.counts[1] != calls[1] * self.counts[0]:
                    yield (
                        f"{new.layers[after].name} was called {calls[0]} times before and {calls[1]} times after: not "
                        f"as often for each call of {self.of_what}."
                    )
        yield from self._unlike_measures()
        for before, after, _ in self.matches:
            if before is not None and after is not None and len(new.layers[after].path) == 1:
                one, other = old.layers[before], new.layers[after]
                if one.path[-1] != other.path[-1]:
                    yield f"The model is {other.name} after, and was {one.name} before."
                for what, was, now in _differs(one, other, with_settings=False):
                    if what in ("input shapes", "training"):
                        yield _unlike(f"{what} of {other.name}", was, now)
        types = [_types(run) for run in self.runs]
        if types[0] and types[1] and types[0] != types[1]:
            yield _unlike("types of the parameters", *types)
        if len(old.metas) != len(new.metas):
            yield _unlike("ranks", str(len(old.metas)), str(len(new.metas)))
        if old.meta.paths != new.meta.paths:
            yield _unlike("selected layers (paths=)", *(_selected(run) for run in self.runs))
        phases = [set(run.phases()) for run in self.runs]
        for phase in PHASES:
            if (phase in phases[0]) != (phase in phases[1]):
                yield f"Only the run {'before' if phase in phases[0] else 'after'} holds any {phase} work."
        yield from self._unlike_conditions()

    def _unlike_measures(self) -> Iterator[str]:
        old, new = self.sides
        for measure in MEASURES:
            names = {name for name, _ in measure.fields}
            measured = [names <= side.measured for side in (old, new)]
            if measured[0] != measured[1]:
                heading = measure.heading.format(device=self.device)
                yield f"{heading} was measured only {'before' if measured[0] else 'after'}, so it is not compared."
        flags = [dict(run.meta.flags) for run in self.runs]
        for flag in flags[0]:
            if flag in flags[1] and flags[0][flag] != flags[1][flag]:
                where = "before" if flags[0][flag] else "after"
                yield f"{flag} was on only {where}: what a profiler records besides takes time of its own."

    def _unlike_conditions(self) -> Iterator[str]:
        old, new = (run.meta for run in self.runs)
        if old.environment and new.environment:
            words = [dict(meta.environment) for meta in (old, new)]
        else:
            words = [dict(meta.versions) for meta in (old, new)]
            for words_of in words:
                words_of.pop("torchprof", None)
        say_all = ["torch" in words_of for words_of in words]
        if say_all[0] != say_all[1]:
            which = "before" if say_all[1] else "after"
            yield f"The run {which} does not say all of what it ran on: it was read from a trace."
        elif bool(old.environment) != bool(new.environment):
            which = "before" if new.environment else "after"
            yield f"The run {which} does not say what it ran on."
        if not all(say_all):  # what is missing then is not known
            words = [{name: words[at][name] for name in words[at] if name in words[1 - at]} for at in (0, 1)]
        for conditions in (
            words,
            [dict(meta.switches) for meta in (old, new)] if old.switches and new.switches else [],
        ):
            for name in {name: None for side in conditions for name in side}:
                was, now = (side.get(name, "not there") for side in conditions)
                if was != now:
                    yield _unlike(name, was, now)
        if old.device != new.device:
            yield _unlike("device", old.device or "cpu", new.device or "cpu")
        if old.machine and new.machine and old.machine != new.machine:
            yield _unlike("machine", old.machine, new.machine)

    def _warnings(self) -> Iterator[str]:
        """The warnings of the runs, those of both once."""
        said = [list(dict.fromkeys(map(str, run.warnings))) for run in self.runs]
        for text in said[0]:
            yield f"{'Both runs' if text in said[1] else 'Before'}: {text}"
        for text in said[1]:
            if text not in said[0]:
                yield f"After: {text}"


def _between(before: Figure | None, after: Figure | None) -> Change:
    """The change from one figure to the other; None where the layer was not there. It is not known how a lower bound
    changed."""
    was, now = _value(before, Bound.EXACT), _value(after, Bound.EXACT)
    change = _exact(was, now, 0 if before is None else was, 0 if after is None else now)
    return change._replace(at_least=(_value(before, Bound.AT_LEAST), _value(after, Bound.AT_LEAST)))


def _value(figure: Figure | None, bound: Bound) -> float | None:
    """The value of a figure if this is how far it is known, else None."""
    return figure.value if figure is not None and figure.bound is bound else None


def _exact(before: float | None, after: float | None, old: float | None, new: float | None) -> Change:
    """A change that is no draw of chance: from ``old`` to ``new``, which are 0 where a layer was not there."""
    if old is None or new is None:
        return Change(before, after, None, UNDECIDED)
    return Change(before, after, new - old, SAME if new == old else MORE if new > old else LESS)


def _verdict(change: Change, noise: Noise | None, rate: float | None, tests: int) -> str:
    """Whether a difference of times is more than noise; ``rate`` is the false discovery rate at which it counts.

    It counts where that is at most ``ALPHA`` and where the medians differ by more than the spread, in the sense in
    which the sums do. Calls in one process are not independent: the ranks alone would find differences in what drifts.
    And where sums and medians disagree, a few calls made the difference.
    """
    if change.difference is None:
        return UNDECIDED
    if change.difference == 0:
        return SAME
    if noise is None or rate is None:
        return UNDECIDED
    if abs(noise.shift) <= noise.spread or (noise.shift > 0) != (change.difference > 0):
        return WITHIN_NOISE
    if rate <= ALPHA:
        return SLOWER if noise.shift > 0 else FASTER
    return WITHIN_NOISE if noise.could_tell(tests) else UNDECIDED


def _differs(before: Layer, after: Layer, with_settings: bool) -> Iterator[tuple[str, str, str]]:
    """What a layer is that it was not."""
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
    """The types of the parameters of all layers, "" where those of no layer are known."""
    if all(layer.param_bytes is None for layer in run.layers):
        return ""
    return ", ".join(sorted({name for layer in run.layers for name, _ in layer.dtype_bytes})) or "none"


def _selected(run: Run) -> str:
    return "all" if run.meta.paths is None else ", ".join(".".join(path) for path in run.meta.paths)


def _unlike(what: str, before: str, after: str) -> str:
    return f"Not the same: {what}: {before} before, {after} after."
