"""``torchprof.compare``: makes the ``Diff`` of two runs, layer by layer. docs/compare.md describes what is compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from operator import add, sub
from os import PathLike, fspath
from typing import NamedTuple

from torchprof.analyze.columns import Column, as_key, catalogue
from torchprof.analyze.figures import Figures, figure_of, figures_of_layers, measured_by_all
from torchprof.analyze.steps import PARTS_OF_NO_LAYER
from torchprof.comparison import diff
from torchprof.comparison.diff import Change, Denominator, Diff, Noise, Pair
from torchprof.comparison.layers import UNCHANGED, match_layers
from torchprof.comparison.notes import differences_of, notes_on, warnings_of_both
from torchprof.errors import TorchprofError
from torchprof.run.formats import Bound, Figure, format_time
from torchprof.run.groups import lists_by_key, sums_by_key
from torchprof.run.measures import SampleKey
from torchprof.run.run import Run
from torchprof.run.saved import load
from torchprof.run.words import FORWARD, NO_LAYERS, PHASES


def compare(before: Run | str | PathLike[str], after: Run | str | PathLike[str]) -> Diff:
    """Compare two runs, or files of saved ones, layer by layer and phase by phase.

    Layers are matched by path; moved and renamed layers by their content. If the runs recorded different numbers of
    calls of the model, additive quantities are per call. A difference of times is tested against noise if both runs
    hold enough steps, or enough calls. See docs/compare.md.

    Raises TorchprofError for an argument that is neither a run nor the file of one, OSError if a file cannot be read.
    """
    return _Comparison(as_run(before, "before", "compare"), as_run(after, "after", "compare")).diff()


def as_run(run: object, name: str, function: str) -> Run:
    """The run itself, or the run in a file. Raises TorchprofError for anything else."""
    if isinstance(run, Run):
        return run
    if isinstance(run, (str, PathLike)):
        return load(fspath(run))
    raise TorchprofError(
        f"{name} is {type(run).__name__}, not a run. {function} takes `prof.run`, or the path of a file that "
        "`prof.run.save(path)` wrote."
    )


_MOST_DRIFTING, _WORTH_NAMING = 3, 0.05
"""So many layers and parts of a step are named, and none with less than this share of the difference."""


def drift(before: Run, after: Run, when: str) -> tuple[bool, str]:
    """Whether the steps of a loop take longer than before, by more than noise; and in words how they changed, and
    where: the layers (their self time, by phase) and the other parts of a step that changed most, each beyond noise.
    ``when``: the steps before, in words.

    The test is that of ``compare``. For each quantity, its values in the steps of one run are set against those in the
    steps of the other: of whole steps all, of layers those of the recorded steps. "" if there are no steps.
    """
    before = before.on_layers(after.layers)
    noises = {key: diff.noise_of(*both) for key, both in _values_of_both(before, after)}
    step = next((key for key in noises if key.measure == "step_ns"), None)
    if step is None:
        return False, ""
    whole = noises.pop(step)
    shift = _exact(*whole.medians, *whole.medians)
    if _verdict(shift, whole, whole.p, 1) not in (diff.SLOWER, diff.FASTER):
        return False, f"No change beyond noise since {when} ({format_time(whole.medians[0])})."
    tested = {key: noise for key, noise in noises.items() if min(noise.counts) >= diff.FEWEST}
    rates = dict(zip(tested, diff.false_discovery_rates([noise.p for noise in tested.values()])))
    clear = [
        key
        for key, noise in tested.items()
        if rates[key] <= diff.ALPHA and abs(noise.shift) > noise.spread and (noise.shift > 0) == (whole.shift > 0)
    ]
    clear = [key for key in clear if abs(tested[key].shift) >= _WORTH_NAMING * abs(whole.shift)]
    largest = sorted(clear, key=lambda key: -abs(tested[key].shift))[:_MOST_DRIFTING]
    parts = [
        f"{_place_of(key, after)} ({'+' * (tested[key].shift > 0)}{format_time(tested[key].shift)})" for key in largest
    ]
    where = f"Largest beyond noise: {', '.join(parts)}." if parts else "No layer is known to differ beyond noise."
    by, word = abs(whole.shift) / max(whole.medians[0], 1), "longer" if whole.shift > 0 else "shorter"
    return whole.shift > 0, f"That is {by:.1%} {word} than {when} ({format_time(whole.medians[0])}). {where}"


def _values_of_both(before: Run, after: Run) -> Iterator[tuple[SampleKey, tuple[Sequence[float], Sequence[float]]]]:
    """By sample of steps, its values in both runs: whole steps, self times of layers, parts outside all layers. A part
    that one run does not have took no time there."""
    for key in {**before.samples, **after.samples}:
        is_layer = key.measure in ("step_cpu_ns", "step_device_ns")
        if key.measure.startswith("step_") and (key.layer >= 0 if is_layer else key.measure != "step_overlap_ns"):
            values = [_values_in(run, key, is_layer) for run in (before, after)]
            if all(values):
                yield key, (values[0], values[1])


def _values_in(run: Run, key: SampleKey, is_layer: bool) -> Sequence[float]:
    if key not in run.samples:
        recorded = max((len(each.sample) for of, each in run.samples.items() if of.measure == "step_cpu_ns"), default=0)
        return [0] * (0 if is_layer or key.measure == "step_ns" else recorded)
    return [*_self_by_step(run, key).values()] if is_layer else run.samples[key].sample


def _self_by_step(run: Run, key: SampleKey) -> dict[int, int]:
    """The self time of a layer in each sampled step, by the hash of the step's start."""
    own = dict(zip(run.samples[key].hashes, run.samples[key].sample))
    for child in run.layers.children[key.layer]:
        if (below := run.samples.get(key._replace(layer=child))) is not None:
            for step, ns in zip(below.hashes, below.sample):
                own[step] = own.get(step, 0) - ns
    return own


def _place_of(key: SampleKey, run: Run) -> str:
    """A layer and phase, or a part of a step, in words."""
    where = PARTS_OF_NO_LAYER[key.measure] if key.layer < 0 else f"{run.layers[key.layer].name}, {key.phase}"
    return where if key.device == "cpu" else f"{where} on {key.device}"


_NEARLY_ALL_TIME = 0.99  # times of steps and of calls differ slightly by the cost of measuring them


class _Side:
    """One of the two runs, with its figures by layer. Lists are indexed as ``run.layers``, and end with the work of
    ``NOT_SELECTED`` (-2) and ``OUTSIDE`` (-1)."""

    def __init__(self, run: Run) -> None:
        self.run = run
        layers = run.layers
        self.below: list[list[int]] = [*layers.children, [], []]
        of_layers = figures_of_layers(run, PHASES)
        self.figures = [of_layers[layer.path] for layer in layers]
        for selected_only in (False, True):
            costs = {phase: run.no_layer(phase, selected=selected_only) for phase in PHASES}
            self.figures.append(Figures(costs, costs))
        self.known = [bool(figures.total) and not figures.unknown for figures in self.figures]
        self.params = run.total_params()
        self.knows_params = any(layer.params is not None for layer in layers)
        self.peaks = self._peaks()
        self.measured = measured_by_all(run)
        self.steps = sum(meta.marked_steps for meta in run.metas)
        self._steps_of = self._sampled_steps() if self.steps and self._steps_hold_all() else {}
        samples = run.samples.items()  # of all devices
        self._spreads = lists_by_key(((key.layer, key.phase, key.rank, key.measure), spread) for key, spread in samples)

    def worked(self, index: int, phase: str) -> bool:
        """Whether a layer that was selected, or one below it, did anything in a phase."""
        _, calls = self.run.rows.by_layer.get((index, PHASES.index(phase)), (None, 0))
        return bool(calls or self.figures[index].cost(phase))

    def _peaks(self) -> dict[tuple[int, str, bool], int]:
        """The largest peak of memory above the start of a call, in bytes, by layer, phase and whether on a device."""
        peaks: dict[tuple[int, str, bool], int] = {}
        for key, spread in self.run.samples.items():
            place = (key.layer, key.phase, key.device != "cpu")
            if key.measure == "peak_bytes":
                peaks[place] = max(spread.max, peaks.get(place, spread.max))
            elif key.measure == "kept_bytes":  # memory was recorded: without a peak it allocated nothing
                peaks.setdefault(place, 0)
        return peaks

    def _steps_hold_all(self) -> bool:
        """Whether all forward work of the models was in steps. An evaluation after the last one is in no step."""
        of_steps = ((key, of_one) for key, of_one in self.run.samples.items() if key.measure == "step_cpu_ns")
        in_steps = sums_by_key((key.layer, of_one.sum) for key, of_one in of_steps if key.phase == FORWARD)
        totals = [self.run.tree(FORWARD, number).total.cpu_ns for number in range(len(self.run.roots))]
        return all(in_steps[root] >= _NEARLY_ALL_TIME * total for root, total in zip(self.run.layers.roots, totals))

    def _sampled_steps(self) -> dict[int, tuple[int, ...]]:
        """The steps in the samples, by rank: each is identified by the hash of its start time."""
        steps = {}
        for key, spread in self.run.samples.items():
            if key.measure == "step_ns":
                if len(set(spread.hashes)) < len(spread.hashes):  # values cannot be assigned to steps
                    return {}
                steps[key.rank] = spread.hashes
        return steps

    def of_steps(self, index: int, phase: str, field: str, is_self: bool = False) -> list[float]:
        """The total or self time of a layer in each step, in the order of ``_sampled_steps``; empty without steps."""
        values: list[float] = []
        for rank, steps in self._steps_of.items():
            taken = [0] * len(steps)
            for spread in self._spreads[index, phase, rank, f"step_{field}"]:
                by_step = dict(zip(spread.hashes, spread.sample))
                taken = list(map(add, taken, map(by_step.get, steps, repeat(0))))
            values += taken
        for child in self.below[index] if is_self else ():
            values = list(map(sub, values, self.of_steps(child, phase, field)))
        return values

    def of_calls(self, index: int, phase: str) -> list[float]:
        """The time of each sampled call of a layer, times the number of its calls: so they compare to totals."""
        spreads = [spread for meta in self.run.metas for spread in self._spreads[index, phase, meta.rank, "cpu_ns"]]
        count = sum(spread.count for spread in spreads)
        return [value * count for spread in spreads for value in spread.sample]


class _IndexedPair(NamedTuple):
    """A pair, and the indices of its layer before and after: None for a run without it, negative for no layer."""

    pair: Pair
    before: int | None
    after: int | None


class _Comparison:
    """Makes a ``Diff``: first what is compared and per what, then the figures and their noise, then the pairs."""

    def __init__(self, before: Run, after: Run) -> None:
        self.runs = before, after
        self.sides = _Side(before), _Side(after)
        self.waited = tuple(map(diff.waited_at_most, self.runs))
        self.matches = match_layers(before.layers, after.layers)
        self.models = [
            (old, new)
            for old, new, _ in self.matches
            if old is not None and new is not None and len(after.layers[new].path) == 1
        ]
        self.denominator = self._denominator()
        # Samples are always divided by the calls of the model. Totals only if the runs hold different numbers of calls.
        self.scale = self.denominator.counts if self.denominator.unit else (1, 1)
        kinds = {run.meta.device or "device" for run in self.runs}
        self.device = (kinds.pop() if len(kinds) == 1 else "device").upper()
        self.quantities = tuple(self._quantities())
        # By layers, phase, field and whether it is self. Without children, self is total: both share one entry.
        self._noises: dict[tuple[int, int, str, str, bool], Noise | None] = {}

    def diff(self) -> Diff:
        return Diff(
            *self.runs,
            self._pairs(),
            self.quantities,
            self.denominator,
            self._changes_of_run(),
            notes=tuple(notes_on(self.runs, self.models, self.denominator, self.device)),
            warnings=tuple(warnings_of_both(*self.runs)),
        )

    def _denominator(self) -> Denominator:
        for before, after in self.models:
            counts = self.runs[0].rows.forward_calls(before), self.runs[1].rows.forward_calls(after)
            if all(counts) and not (self.runs[0].layers[before].recursive or self.runs[1].layers[after].recursive):
                return Denominator("call", counts, self.runs[1].layers[after].name)
        counts = self.sides[0].steps, self.sides[1].steps
        return Denominator("step", counts) if all(counts) else Denominator(None, (1, 1))

    def _quantities(self) -> Iterator[Column]:
        """What is compared: what both runs measured, without rates; a peak only of phases in which both have one."""
        measured = self.sides[0].measured & self.sides[1].measured
        phases = [phase for phase in PHASES if any(phase in run.phases() for run in self.runs)]
        for column in catalogue(phases, measured, measured, self.device):
            if column.what == "rate" or (column.what == "params" and not all(side.knows_params for side in self.sides)):
                continue
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
        """``leaves``: the layer has no layers below it in either run."""
        sides = [*zip((before, after), self.sides, self.denominator.counts)]
        samples = [  # times per call of the model: a step may hold several calls
            [value * side.steps / count for value in side.of_steps(index, quantity.phase, name, quantity.is_self)]
            for index, side, count in sides
        ]
        are_few = any(len(values) < diff.FEWEST for values in samples)
        if are_few and name == "cpu_ns" and (leaves or not quantity.is_self):
            of_calls = [[ns / count for ns in side.of_calls(index, quantity.phase)] for index, side, count in sides]
            if all(of_calls) and min(map(len, of_calls)) > min(map(len, samples)):
                samples = of_calls
        return diff.noise_of(*samples) if all(samples) else None

    def _judge(self, pairs: Sequence[_IndexedPair]) -> None:
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
            testable = [number for number, noise in noises.items() if min(noise.counts) >= diff.FEWEST]
            rates = dict(zip(testable, diff.false_discovery_rates([noises[number].p for number in testable])))
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
        for which the main thread waited for a processor. A layer's share is taken to be that of the run."""
        if noise is None or verdict not in (diff.SLOWER, diff.FASTER):
            return verdict
        slower = 1 if verdict == diff.SLOWER else 0
        worked = noise.medians[slower] * (1 - self.waited[slower])
        is_clear = worked - noise.medians[1 - slower] > noise.spread
        return verdict if is_clear or not self.waited[slower] else diff.BUSY

    # The tree

    def _pairs(self) -> tuple[Pair, ...]:
        """The pairs of the models, with all others below them, and of the work of no layer."""
        pairs = self._matched_pairs()
        tops = _nested(pair for pair, _, _ in pairs)
        for index, name in NO_LAYERS.items():
            if any(cost for side in self.sides for cost in side.figures[index].own.values()):
                tops.append(Pair((name,), None, None, UNCHANGED))
                pairs.append(_IndexedPair(tops[-1], index, index))
        for quantity in self.quantities:
            figures = [self._figures(side, quantity) for side in (0, 1)]
            for pair, before, after in pairs:
                if pair.is_layer or quantity.what == "cost":
                    was = None if before is None else figures[0][before]
                    now = None if after is None else figures[1][after]
                    pair.changes[quantity.key] = _between(was, now)
        self._judge(pairs)
        return tuple(tops)

    def _matched_pairs(self) -> list[_IndexedPair]:
        """The pairs of all layers, without changes."""
        layers = self.runs[0].layers, self.runs[1].layers
        with_settings = all(any(layer.settings for layer in side) for side in layers)
        pairs = []
        for before, after, how in self.matches:
            old = None if before is None else layers[0][before]
            new = None if after is None else layers[1][after]
            shown = new or old
            assert shown is not None
            differs = tuple(differences_of(old, new, with_settings)) if old and new else ()
            pairs.append(_IndexedPair(Pair(shown.path, old, new, how, differs=differs), before, after))
        return pairs

    def _changes_of_run(self) -> dict[str, Change]:
        """The changes of the run itself: the time of a step, and the peaks of memory."""
        whole = {}
        steps = [
            [spread for key, spread in run.samples.items() if key.measure == "step_ns" and spread.count]
            for run in self.runs
        ]
        if all(steps) and all(self.sides[side].steps for side in (0, 1)):
            means = [sum(spread.sum for spread in side) / sum(spread.count for spread in side) for side in steps]
            noise = diff.noise_of(*([value for spread in side for value in spread.sample] for side in steps))
            change = _exact(*means, *means)
            testable = min(noise.counts) >= diff.FEWEST
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


def _nested(pairs: Iterable[Pair]) -> list[Pair]:
    """Put the pairs below those of their parents; returns those without a parent. A removed layer goes below the pair
    of its old parent, wherever that parent is now."""
    pairs = [*pairs]
    by_path_before = {pair.before.path: pair for pair in pairs if pair.before}
    by_path_after = {pair.after.path: pair for pair in pairs if pair.after}
    tops: list[Pair] = []
    for pair in pairs:
        parent = (by_path_after if pair.after else by_path_before).get(pair.path[:-1])
        (tops if parent is None else parent.children).append(pair)
    return tops


def _between(before: Figure | None, after: Figure | None) -> Change:
    """The change between two figures; None for a layer that the run does not have. That of lower bounds is unknown."""
    was, now = _value(before, Bound.EXACT), _value(after, Bound.EXACT)
    change = _exact(was, now, 0 if before is None else was, 0 if after is None else now)
    return change._replace(at_least=(_value(before, Bound.AT_LEAST), _value(after, Bound.AT_LEAST)))


def _value(figure: Figure | None, bound: Bound) -> float | None:
    """The value of a figure with this bound, None for a figure with another one."""
    return figure.value if figure is not None and figure.bound is bound else None


def _exact(before: float | None, after: float | None, old: float | None, new: float | None) -> Change:
    """A change without noise, from ``old`` to ``new``; these are 0 for a run that does not have the layer."""
    if old is None or new is None:
        return Change(before, after, None, diff.UNDECIDED)
    return Change(before, after, new - old, diff.SAME if new == old else diff.MORE if new > old else diff.LESS)


_LARGE = 0.5  # of the larger median: calls that differ much among themselves do not hide that most of the time is gone


def _verdict(change: Change, noise: Noise | None, rate: float | None, tests: int) -> str:
    """Whether a difference of times is more than noise. ``rate``: the smallest false discovery rate at which it counts;
    ``tests``: the number of tests of this quantity.

    docs/compare.md says why the rank test alone is not enough.
    """
    if change.difference == 0:
        return diff.SAME
    if change.difference is None or noise is None or rate is None:
        return diff.UNDECIDED
    is_small = abs(noise.shift) <= noise.spread and abs(noise.shift) < _LARGE * max(noise.medians)
    if is_small or (noise.shift > 0) != (change.difference > 0):
        return diff.WITHIN_NOISE
    if rate <= diff.ALPHA:
        return diff.SLOWER if noise.shift > 0 else diff.FASTER
    return diff.WITHIN_NOISE if noise.could_tell(tests) else diff.UNDECIDED
