"""``torchprof.compare``: makes the ``Diff`` of two runs, layer by layer. docs/compare.md describes what is compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os import PathLike, fspath

from torchprof.analyze.columns import Column, as_key, catalogue
from torchprof.analyze.figures import figure_of
from torchprof.analyze.warnings import waited_share
from torchprof.comparison.diff import (
    ALPHA,
    BUSY,
    FASTER,
    FEWEST,
    LESS,
    MORE,
    SAME,
    SLOWER,
    UNDECIDED,
    WITHIN_NOISE,
    Change,
    Diff,
    Noise,
    Pair,
    false_discovery_rates,
    noise_of,
)
from torchprof.comparison.layers import Side, match_layers
from torchprof.comparison.notes import Denominator, differences_of, notes_on, warnings_of_both
from torchprof.errors import TorchprofError
from torchprof.run.formats import Bound, Figure
from torchprof.run.run import Run
from torchprof.run.saved import load
from torchprof.run.words import NO_LAYERS, PHASES


def compare(before: Run | str | PathLike[str], after: Run | str | PathLike[str]) -> Diff:
    """Compare two runs, or files of saved ones, layer by layer and phase by phase.

    Layers are matched by path; moved and renamed layers by their content. If the runs recorded different numbers of
    calls of the model, additive quantities are per call. A difference of times is tested against noise if both runs
    hold enough steps, or enough calls. See docs/compare.md.

    Raises TorchprofError for an argument that is neither a run nor the file of one, OSError if a file cannot be read.
    """
    return _Comparison(as_run(before, "before", "compare"), as_run(after, "after", "compare")).diff()


def as_run(run: object, name: str, function: str) -> Run:
    """The run itself, or the run in a file. Raises TorchprofError for anything else, with the name of the argument and
    of the function."""
    if isinstance(run, Run):
        return run
    if isinstance(run, (str, PathLike)):
        return load(fspath(run))
    raise TorchprofError(
        f"{name} is {type(run).__name__}, not a run. {function} takes `prof.run`, or the path of a file that "
        "`prof.run.save(path)` wrote."
    )


class _Comparison:
    def __init__(self, before: Run, after: Run) -> None:
        self.runs = before, after
        self.sides = Side(before), Side(after)
        self.waited = tuple(max(map(waited_share, run.metas), default=0.0) for run in self.runs)
        self.matches = match_layers(before.layers, after.layers)
        self.models = [
            (old, new)
            for old, new, _ in self.matches
            if old is not None and new is not None and len(after.layers[new].path) == 1
        ]
        self.counted = self._counted()
        # Samples are always divided by the calls of the model. Totals only if the runs hold different numbers of calls.
        self.scale = self.counted.counts if self.counted.unit else (1, 1)
        kinds = {run.meta.device or "device" for run in self.runs}
        self.device = (kinds.pop() if len(kinds) == 1 else "device").upper()
        self.quantities = tuple(self._quantities())
        # By layers, phase, field and whether it is self. Without children, self is total: both share one entry.
        self._noises: dict[tuple[int, int, str, str, bool], Noise | None] = {}

    def diff(self) -> Diff:
        notes = tuple(notes_on(self.runs, self.models, self.counted, self.device))
        warnings = tuple(warnings_of_both(*self.runs))
        what, counts, _ = self.counted
        return Diff(*self.runs, self._pairs(), self.quantities, what, counts, self._whole(), notes, warnings)

    def _counted(self) -> Denominator:
        """What totals can be divided by."""
        for before, after in self.models:
            counts = self.runs[0].rows.forward_calls(before), self.runs[1].rows.forward_calls(after)
            if all(counts) and not (self.runs[0].layers[before].recursive or self.runs[1].layers[after].recursive):
                return Denominator("call", counts, self.runs[1].layers[after].name)
        counts = self.sides[0].steps, self.sides[1].steps
        return Denominator("step", counts) if all(counts) else Denominator(None, (1, 1))

    def _quantities(self) -> Iterator[Column]:
        measured = self.sides[0].measured & self.sides[1].measured
        phases = [phase for phase in PHASES if any(phase in run.phases() for run in self.runs)]
        for column in catalogue(phases, measured, measured, self.device):
            if column.what == "rate" or (column.what == "params" and not all(side.knows_params for side in self.sides)):
                continue  # rates are not compared
            place = (column.phase, column.on_device)
            if column.what != "peak" or all(any(key[1:] == place for key in side.peaks) for side in self.sides):
                yield column

    # The figures

    def _figures(self, side: int, quantity: Column) -> list[Figure]:
        """One quantity of each layer, per call or step if the diff is; of measures also for the work of no layer."""
        figures, layers, scale = self.sides[side], self.runs[side].layers, self.scale[side]
        if quantity.what == "params":
            return [figure_of(layer.params if quantity.is_self else figures.params[layer.path]) for layer in layers]
        if quantity.what in ("calls", "cost"):
            per_one = [quantity.figure(row) for row in figures.figures]
            per_one = [figure._replace(value=figure.value / scale) for figure in per_one] if scale != 1 else per_one
            return per_one[: len(layers)] if quantity.what == "calls" else per_one
        place = (quantity.phase, quantity.on_device)
        peaks = [figures.peaks.get((index, *place)) for index in range(len(layers))]
        for index, known in enumerate(figures.known[: len(layers)]):
            if not known:
                peaks[index] = None
            elif peaks[index] is None and not figures.worked(index, quantity.phase):
                peaks[index] = 0  # that of a layer that did nothing in this phase is known
        return [*map(figure_of, peaks)]

    def _noise(self, before: int, after: int, quantity: Column) -> Noise | None:
        """The test of the times of both runs: of steps if both runs have enough of them, else of calls."""
        [name] = quantity.fields  # a time is one field of the costs
        leaves = not (self.sides[0].below[before] or self.sides[1].below[after])
        key = (before, after, quantity.phase, name, quantity.is_self and not leaves)
        if key not in self._noises:
            self._noises[key] = self._noise_of(before, after, quantity, name, leaves)
        return self._noises[key]

    def _noise_of(self, before: int, after: int, quantity: Column, name: str, leaves: bool) -> Noise | None:
        per_call = []
        for side, index in enumerate((before, after)):
            figures = self.sides[side]
            values = figures.of_steps(index, quantity.phase, name, quantity.is_self)
            # Per call of the model: a step may hold several calls.
            per_call.append([value * figures.steps / self.counted.counts[side] for value in values])
        are_few = any(len(values) < FEWEST for values in per_call)
        if are_few and name == "cpu_ns" and (leaves or not quantity.is_self):
            calls = [
                [value / self.counted.counts[side] for value in self.sides[side].of_calls(index, quantity.phase)]
                for side, index in enumerate((before, after))
            ]
            if all(calls) and min(map(len, calls)) > min(map(len, per_call)):
                per_call = calls
        return noise_of(*per_call) if all(per_call) else None

    def _judge(self, pairs: Sequence[tuple[Pair, int | None, int | None]]) -> None:
        """Set the verdict of each difference of times: more than noise, or not."""
        for quantity in self.quantities:
            if not quantity.is_time:
                continue
            noises = {}
            for number, (pair, before, after) in enumerate(pairs):
                if before is None or after is None or pair.changes[quantity.key].difference is None:
                    continue
                if (noise := self._noise(before, after, quantity)) is not None:
                    noises[number] = noise
            testable = [number for number, noise in noises.items() if min(noise.counts) >= FEWEST]
            rates = dict(zip(testable, false_discovery_rates([noises[number].p for number in testable])))
            for number, (pair, _, _) in enumerate(pairs):
                change = pair.changes[quantity.key]
                noise = noises.get(number)
                verdict = _verdict(change, noise, rates.get(number), len(testable))
                if quantity.is_elapsed:
                    verdict = self._without_waiting(verdict, noise)
                if noise is not None or verdict != change.verdict:
                    pair.changes[quantity.key] = change._replace(verdict=verdict, noise=noise)

    def _without_waiting(self, verdict: str, noise: Noise | None) -> str:
        """``BUSY`` in place of "slower" or "faster", if the difference is no longer more than noise without the time
        for which the main thread waited for a processor. A layer's share of that is unknown: it is taken to be that of
        the run."""
        if noise is None or verdict not in (SLOWER, FASTER):
            return verdict
        slow = verdict == SLOWER
        worked = noise.medians[slow] * (1 - self.waited[slow])
        return verdict if worked - noise.medians[not slow] > noise.spread or not self.waited[slow] else BUSY

    # The tree

    def _pairs(self) -> tuple[Pair, ...]:
        layers = self.runs[0].layers, self.runs[1].layers
        with_settings = all(any(layer.settings for layer in side) for side in layers)
        of_before: dict[tuple[str, ...], Pair] = {}
        of_after: dict[tuple[str, ...], Pair] = {}
        everything: list[tuple[Pair, int | None, int | None]] = []
        tops: list[Pair] = []
        for before, after, how in self.matches:
            old = None if before is None else layers[0][before]
            new = None if after is None else layers[1][after]
            shown = new or old
            assert shown is not None
            differs = tuple(differences_of(old, new, with_settings)) if old and new else ()
            pair = Pair(shown.path, old, new, how, differs=differs)
            everything.append((pair, before, after))
            if old:
                of_before[old.path] = pair
            if new:
                of_after[new.path] = pair
        for pair, _, _ in everything:
            # A removed layer goes below the pair of its old parent, wherever that parent is now.
            around = of_after.get(pair.path[:-1]) if pair.after else of_before.get(pair.path[:-1])
            (tops if around is None else around.children).append(pair)
        for index, name in NO_LAYERS.items():
            if any(cost for side in self.sides for cost in side.figures[index].own.values()):
                pair = Pair((name,), None, None, "same")
                everything.append((pair, index, index))
                tops.append(pair)
        for quantity in self.quantities:
            figures = [self._figures(side, quantity) for side in (0, 1)]
            for pair, before, after in everything:
                if pair.is_layer or quantity.what == "cost":
                    was = None if before is None else figures[0][before]
                    now = None if after is None else figures[1][after]
                    pair.changes[quantity.key] = _between(was, now)
        self._judge(everything)
        return tuple(tops)

    def _whole(self) -> dict[str, Change]:
        """The changes of the run itself: the time of a step, and the peaks of memory."""
        whole = {}
        steps = [
            [spread for key, spread in run.samples.items() if key.measure == "step_ns" and spread.count]
            for run in self.runs
        ]
        if all(steps) and all(self.sides[side].steps for side in (0, 1)):
            means = [sum(spread.sum for spread in side) / sum(spread.count for spread in side) for side in steps]
            noise = noise_of(*([value for spread in side for value in spread.sample] for side in steps))
            change = _exact(*means, *means)
            testable = min(noise.counts) >= FEWEST
            verdict = self._without_waiting(_verdict(change, noise, noise.p if testable else None, 1), noise)
            whole["step"] = change._replace(verdict=verdict, noise=noise)
        for on_cpu, key in ((True, "cpu_peak"), (False, as_key(f"{self.device} Peak"))):
            peaks = [
                [memory.peak_bytes for memory in run.memory if (memory.device == "cpu") == on_cpu] for run in self.runs
            ]
            if all(peaks):
                largest = max(peaks[0]), max(peaks[1])
                whole[key] = _exact(*largest, *largest)
        return whole


def _between(before: Figure | None, after: Figure | None) -> Change:
    """The change between two figures; None for a layer that the run does not have. The difference of lower bounds is
    unknown."""
    was, now = _value(before, Bound.EXACT), _value(after, Bound.EXACT)
    change = _exact(was, now, 0 if before is None else was, 0 if after is None else now)
    return change._replace(at_least=(_value(before, Bound.AT_LEAST), _value(after, Bound.AT_LEAST)))


def _value(figure: Figure | None, bound: Bound) -> float | None:
    """The value of a figure with this bound, None for a figure with another one."""
    return figure.value if figure is not None and figure.bound is bound else None


def _exact(before: float | None, after: float | None, old: float | None, new: float | None) -> Change:
    """A change without noise, from ``old`` to ``new``; these are 0 for a run that does not have the layer."""
    if old is None or new is None:
        return Change(before, after, None, UNDECIDED)
    return Change(before, after, new - old, SAME if new == old else MORE if new > old else LESS)


def _verdict(change: Change, noise: Noise | None, rate: float | None, tests: int) -> str:
    """Whether a difference of times is more than noise. ``rate``: the smallest false discovery rate at which it counts;
    ``tests``: the number of tests of this quantity.

    A difference counts if ``rate`` is at most ``ALPHA``, and if the medians differ by more than the spread, with the
    same sign as the sums. The rank test alone is not enough: calls in one process are not independent, and it would
    find differences in times that drift. If sums and medians disagree in sign, a few calls made the difference.
    """
    if change.difference == 0:
        return SAME
    if change.difference is None or noise is None or rate is None:
        return UNDECIDED
    if abs(noise.shift) <= noise.spread or (noise.shift > 0) != (change.difference > 0):
        return WITHIN_NOISE
    if rate <= ALPHA:
        return SLOWER if noise.shift > 0 else FASTER
    return WITHIN_NOISE if noise.could_tell(tests) else UNDECIDED
