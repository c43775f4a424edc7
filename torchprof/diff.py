"""``Diff``: two runs compared, layer by layer. Made by ``torchprof.compare``. Knows only the standard library.

Which layer is which, is found in ``matching.py``; whether a difference of times is more than noise, in ``noise.py``.
What is compared how, and where that ends, is in docs/compare.md.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import add, sub
from os import PathLike, fspath
from typing import Any, NamedTuple

from torchprof.attribute import FORWARD, NOT_SELECTED, OUTSIDE, PHASES
from torchprof.cost import (
    FIELDS,
    MEASURES,
    Bound,
    Figure,
    Measure,
    Unit,
    as_key,
    format_count,
    format_memory,
    format_time,
)
from torchprof.errors import TorchprofError
from torchprof.figures import Figures, figures_of_layers, measured_by_all
from torchprof.matching import match_layers
from torchprof.noise import ALPHA, FEWEST, Noise, false_discovery_rates, noise_of
from torchprof.run import NOT_SELECTED_NAME, OUTSIDE_NAME, Layer, Run, SampleKey, Spread
from torchprof.run_file import load

MORE, LESS, SAME = "more", "less", "same"
SLOWER, FASTER, WITHIN_NOISE, UNKNOWN = "slower", "faster", "within noise", "unknown"

_NAMED = 3  # so many layers are named as those that made a difference

FORMATS: Mapping[Unit, Callable[[float], str]] = {
    Unit.TIME: format_time,
    Unit.BYTES: lambda value: format_memory(round(value)),
    Unit.COUNT: format_count,
}
"""How the mean of a quantity over calls is written."""

_NEARLY_ALL = 0.99  # of a time that two ways of measuring tell apart by their own cost


class Quantity(NamedTuple):
    """One thing that is compared of every layer. ``key`` and ``heading`` are those of the tree's columns.

    ``what`` is the field that both are made of: a ``Measure`` of costs, "calls", "params" or "peak"; ``device`` is the
    device whose ``peak`` it is: "cpu", or "device" for all that are not. ``is_self``: of the layer without those below.
    """

    key: str
    heading: str
    unit: Unit
    phase: str
    is_self: bool
    what: Measure | str
    device: str = "cpu"

    @property
    def is_time(self) -> bool:
        return self.unit is Unit.TIME

    def text(self, value: float) -> str:
        """A value of it, as the tables write it."""
        return FORMATS[self.unit](value)


class Change(NamedTuple):
    """What one quantity was before and after.

    ``before`` and ``after`` are None where they are not known, and where the layer was not there. Then ``difference``
    is None, too, but for an added or removed layer it is what that adds or takes away. ``verdict``: "slower", "faster",
    "within noise" for times whose ``noise`` is known; "more", "less", "same" for what is exact; "unknown" for what is
    not known, and for a difference of times of which nobody can tell whether it is noise. ``at_least``: lower bounds of
    ``before`` and ``after`` where these are None because a sum lacks something, else None.
    """

    before: float | None
    after: float | None
    difference: float | None
    verdict: str
    noise: Noise | None = None
    at_least: tuple[float | None, float | None] = (None, None)

    def figure(self, side: int) -> Figure:
        """What it was before (0) or is after (1), with how far that is known."""
        value, least = (self.before, self.after)[side], self.at_least[side]
        if value is not None:
            return Figure(value)
        return Figure(0, Bound.UNKNOWN) if least is None else Figure(least, Bound.AT_LEAST)

    @property
    def ratio(self) -> float | None:
        """``after / before``; None where either is not known, is 0 or below before, as net memory may be."""
        if self.before is None or self.after is None or self.before <= 0 or self.after < 0:
            return None
        return self.after / self.before


@dataclass
class Pair:
    """One layer in both runs, or in one of them, or the work of no layer (both None).

    ``name`` is its last step, ``path`` all of them, as after, or before where it was removed. ``how``: "same", "moved",
    "renamed", "added" or "removed"; of a subtree that was moved or renamed the topmost layer alone is told, of one that
    was added or removed every layer is. ``changes`` has every quantity of the diff by its key, but for those that the
    work of no layer has not. ``differs``: what the layer is that it was not: (what, before, after).
    """

    path: tuple[str, ...]
    before: Layer | None
    after: Layer | None
    how: str
    changes: dict[str, Change] = field(default_factory=dict)
    children: list[Pair] = field(default_factory=list)
    differs: tuple[tuple[str, str, str], ...] = ()

    @property
    def name(self) -> str:
        return self.path[-1]

    @property
    def is_layer(self) -> bool:
        return self.before is not None or self.after is not None

    def walk(self) -> Iterator[Pair]:
        """This pair and all below, depth first, without recursion."""
        waiting = [self]
        while waiting:
            pair = waiting.pop()
            yield pair
            waiting.extend(reversed(pair.children))


class Parts(NamedTuple):
    """The layers whose own parts made most of a difference, the largest first.

    ``hold_most``: they hold more than half of it, and of all own parts that changed in its sense, be it within noise.
    ``beyond_noise`` are the words for it if there are larger ones, but within noise; ``ending`` is that of "parts".
    """

    layers: list[tuple[Pair, Change]]
    hold_most: bool
    beyond_noise: str
    ending: str


@dataclass(frozen=True, repr=False)
class Diff:
    """Two runs compared. Made by ``torchprof.compare``; the reports of a diff read it.

    ``pairs`` are the models, with the layers below them as they stand after (a removed one under what it stood under
    before), then what was not selected and what is outside of all layers. ``quantities`` are what is compared, in the
    order of the tree's columns. ``counts`` are how many forward calls of the model each run recorded (``counted`` is
    "call"), or steps, where the model was never called itself ("step"); None: neither, and both are 1. Where they
    differ, all that adds up is for one of them: ``unit`` says for which. ``whole``: what is of the run and of no layer,
    by a key: "step" (how long one lasted), "cpu_peak" and "cuda_peak" or the like. ``notes`` are sentences on what
    makes the comparison doubtful, ``doubts`` those that the runs have of themselves.
    """

    before: Run
    after: Run
    pairs: tuple[Pair, ...]
    quantities: tuple[Quantity, ...]
    counted: str | None
    counts: tuple[int, int]
    whole: Mapping[str, Change]
    notes: tuple[str, ...]
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        return self.report("table")

    def __repr__(self) -> str:
        models = [", ".join(run.meta.model) or "no model" for run in (self.before, self.after)]
        return f"<Diff of {models[0]} and {models[1]}>"

    @property
    def unit(self) -> str | None:
        """None where ``before`` and ``after`` of all that adds up are totals of the runs; "call" or "step" where they
        are for one call or step."""
        return self.counted if self.counts[0] != self.counts[1] else None

    def walk(self) -> Iterator[Pair]:
        """All pairs, each before those below it."""
        for pair in self.pairs:
            yield from pair.walk()

    def quantity(self, key: str) -> Quantity | None:
        """The quantity of that key, None where the runs did not both measure it."""
        return next((one for one in self.quantities if one.key == key), None)

    def self_of(self, quantity: Quantity) -> Quantity:
        """The same quantity without the layers below; itself where there is none."""
        wanted = (quantity.what, quantity.phase, quantity.device, True)
        found = (one for one in self.quantities if (one.what, one.phase, one.device, one.is_self) == wanted)
        return next(found, quantity)

    def weight(self, change: Change) -> float:
        """By how much something changed: the median by which it did, times the calls, where the noise is known. One
        call that met a busy machine says little."""
        if change.noise is None:
            return change.difference or 0
        return change.noise.shift * (self.counts[1] if self.unit is None else 1)

    def contributions(self, pair: Pair, quantity: Quantity) -> list[tuple[Pair, Change]]:
        """The layers at or below one whose own part changed in the sense in which the whole did, by ``weight``.

        What has no own part, as a peak, is that of layers that have none below. What changed within noise is left out.
        Where a quantity is itself without the layers below, there is none but the layer.
        """
        found = [each for each in self._in_its_sense(pair, quantity) if each[1].verdict != WITHIN_NOISE]
        return sorted(found, key=lambda each: -abs(self.weight(each[1])))

    def largest_parts(self, pair: Pair, quantity: Quantity) -> Parts:
        """The first three ``contributions``, and whether they are most of what changed.

        None for what has no parts: a layer with none below, and a quantity that is of a layer by itself.
        """
        layers = self.contributions(pair, quantity)[:_NAMED] if pair.children and not quantity.is_self else []
        named = [abs(change.difference or 0) for _, change in layers]
        all_in_its_sense = self._in_its_sense(pair, quantity)
        everything = sum(abs(change.difference or 0) for _, change in all_in_its_sense)
        whole = max(everything, abs(pair.changes[quantity.key].difference or 0))
        noisy = [abs(change.difference or 0) for _, change in all_in_its_sense if change.verdict == WITHIN_NOISE]
        # What has no own part does not add up to the whole.
        hold_most = self.self_of(quantity).is_self and 2 * sum(named) > whole
        beyond_noise = " beyond noise" if max(noisy, default=0) > min(named, default=0) else ""
        return Parts(layers, hold_most, "" if hold_most else beyond_noise, "s" if len(layers) > 1 else "")

    def _in_its_sense(self, pair: Pair, quantity: Quantity) -> list[tuple[Pair, Change]]:
        """The layers at or below one whose own part changed in the sense in which the whole did."""
        own = self.self_of(quantity)
        whole = pair.changes[quantity.key].difference or 0
        found = []
        for one in [pair] if quantity.is_self else pair.walk():
            change = one.changes.get(own.key)
            if change is None or not change.difference or (one.children and not own.is_self):
                continue
            if (change.difference > 0) == (whole > 0):
                found.append((one, change))
        return found

    def report(self, name: str = "table", **options: Any) -> str:
        """A report as text: "table", "markdown", "json". Raises TorchprofError for an unknown name or option."""
        from torchprof.reports import render

        return render(name, self, options, of="diff")

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by how its name ends, as ``Run.export`` does: ``diff.export("diff.md")``.

        Raises TorchprofError for a name that ends otherwise and for an unknown option, OSError as ``open`` does.
        """
        from torchprof.reports import export

        export(path, self, options, of="diff")


def compare(before: Run | str | PathLike[str], after: Run | str | PathLike[str]) -> Diff:
    """Compare two runs, or files of saved ones, layer by layer and phase by phase.

    Layers are matched by path, moved and renamed ones by what they are. Of each: what both runs measured, before and
    after. Where the runs recorded different numbers of calls of the model, all that adds up is for one call. A
    difference of times is told from noise where both runs hold enough steps, or enough calls. See docs/compare.md.

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


class _Side:
    """One of the two runs, and its figures by layer: lists over the index in ``run.layers``, with those of
    ``NOT_SELECTED`` (-2) and ``OUTSIDE`` (-1) at their ends."""

    def __init__(self, run: Run) -> None:
        self.run = run
        layers = run.layers
        size = len(layers) + 2
        number = {layer.path: index for index, layer in enumerate(layers)}
        above = [number.get(layer.path[:-1], OUTSIDE) for layer in layers]
        self.below: list[list[int]] = [[] for _ in range(size)]
        for index, around in enumerate(above):
            if around != OUTSIDE:
                self.below[around].append(index)
        self.own = {(phase, name): [0] * size for phase in PHASES for name in FIELDS}
        self.calls = {phase: [0] * size for phase in PHASES}
        for (index, at), (cost, calls) in run.rows.by_layer.items():
            self.calls[PHASES[at]][index] = calls
            for name in FIELDS:
                self.own[PHASES[at], name][index] = getattr(cost, name)
        self.total = {key: list(values) for key, values in self.own.items()}
        upwards = [(index, around) for index, around in enumerate(above) if around != OUTSIDE][::-1]
        for values in self.total.values():
            if any(values):
                for index, around in upwards:  # those below come after those above
                    values[around] += values[index]
        self.worked = {
            phase: [any(seen) for seen in zip(self.calls[phase], *(self.total[phase, name] for name in FIELDS))]
            for phase in PHASES
        }
        of_layers = figures_of_layers(run, PHASES)
        self.figures = [of_layers[layer.path] for layer in layers]
        for selected_only in (False, True):
            costs = {phase: run.no_layer(phase, selected=selected_only) for phase in PHASES}
            self.figures.append(Figures(costs, costs))
        self.known = [bool(one.total) and not one.unknown for one in self.figures]
        self.params = run.total_params()
        self.knows_params = any(layer.params is not None for layer in layers)
        self.peaks = self._peaks()
        self.measured = measured_by_all(run)
        self.steps = sum(meta.steps for meta in run.metas)
        self._steps_of = self._sampled_steps() if self._steps_hold_all() else {}
        self._device_keys: defaultdict[tuple[int, str, int], list[SampleKey]] = defaultdict(list)
        self._call_spreads: defaultdict[tuple[int, str], list[Spread]] = defaultdict(list)
        for key, spread in run.samples.items():
            if key.measure == "step_device_ns":
                self._device_keys[key.layer, key.phase, key.rank].append(key)
            elif key.measure == "cpu_ns":
                self._call_spreads[key.layer, key.phase].append(spread)

    def _peaks(self) -> dict[tuple[int, str, str], int]:
        """How far memory rose, at most over the calls, devices and ranks, by layer, phase and kind of device."""
        peaks: dict[tuple[int, str, str], int] = {}
        for key, spread in self.run.samples.items():
            of = (key.layer, key.phase, _kind_of(key.device))
            if key.measure == "peak_bytes":
                peaks[of] = max(spread.max, peaks.get(of, spread.max))
            elif key.measure == "kept_bytes":  # it was watched; it has no peak where it allocated nothing
                peaks.setdefault(of, 0)
        return peaks

    def _steps_hold_all(self) -> bool:
        """Whether all forward work of the models was in steps: what came after the last one, as an evaluation, is in
        the totals and in no step."""
        in_steps: defaultdict[int, int] = defaultdict(int)
        for key, spread in self.run.samples.items():
            if key.measure == "step_cpu_ns" and key.phase == FORWARD:
                in_steps[key.layer] += spread.sum
        totals = self.total[FORWARD, "cpu_ns"]
        roots = (index for index, layer in enumerate(self.run.layers) if len(layer.path) == 1)
        return all(in_steps[root] >= _NEARLY_ALL * totals[root] for root in roots)

    def _sampled_steps(self) -> dict[int, tuple[int, ...]]:
        """The steps whose values are kept, by rank: the hashes of their times of start, which tell them apart."""
        steps = {}
        for key, spread in self.run.samples.items():
            if key.measure == "step_ns":
                if len(set(spread.hashes)) < len(spread.hashes):  # an older torchprof did not keep them
                    return {}
                steps[key.rank] = spread.hashes
        return steps

    def of_steps(self, index: int, phase: str, field: str) -> list[float] | None:
        """What the steps took in a layer and all below it, in the order of ``_sampled_steps``; None without steps."""
        if not self._steps_of:
            return None
        values: list[float] = []
        for rank, steps in self._steps_of.items():
            if field == "cpu_ns":
                keys = [SampleKey(index, phase, rank, "cpu", "step_cpu_ns")]
            else:
                keys = self._device_keys[index, phase, rank]
            taken = [0] * len(steps)
            for key in keys:
                spread = self.run.samples.get(key)
                if spread is not None:
                    by_step = dict(zip(spread.hashes, spread.sample))
                    taken = list(map(add, taken, map(by_step.get, steps, repeat(0))))
            values += taken
        return values

    def of_steps_by_itself(self, index: int, phase: str, field: str) -> list[float] | None:
        """The same without what the layers below took, step by step."""
        values = self.of_steps(index, phase, field)
        for child in self.below[index]:
            below = self.of_steps(child, phase, field)
            if values is not None and below is not None:
                values = list(map(sub, values, below))
        return values

    def of_calls(self, index: int, phase: str) -> list[float]:
        """What single calls of a layer took, times how many there were of it."""
        spreads = self._call_spreads[index, phase]
        count = sum(spread.count for spread in spreads)
        return [value * count for spread in spreads for value in spread.sample]


class _Comparison:
    """Two runs, on the way to their ``Diff``."""

    def __init__(self, before: Run, after: Run) -> None:
        self.runs = before, after
        self.sides = _Side(before), _Side(after)
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
            tuple(self._doubts()),
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

        def quantity(heading: str, unit: Unit, phase: str, is_self: bool, what: Measure | str, on: str) -> Quantity:
            lead = "" if phase == FORWARD else phase.capitalize() + " "
            heading = f"{lead}{'Self ' if is_self else ''}{heading}"
            key = "calls" if what == "calls" else as_key(heading)
            return Quantity(key, heading, unit, phase, is_self, what, on)

        for phase in phases:
            if phase == FORWARD and all(side.knows_params for side in self.sides):
                for is_self in (True, False):
                    yield quantity("Params", Unit.COUNT, phase, is_self, "params", "cpu")
            for measure in MEASURES:
                if {name for name, _ in measure.fields} <= measured:
                    for is_self in (True, False):
                        heading = measure.heading.format(device=self.device)
                        yield quantity(heading, measure.unit, phase, is_self, measure, "cpu")
            for kind, name in (("cpu", "CPU"), ("device", self.device)):
                if all(any(key[1:] == (phase, kind) for key in side.peaks) for side in self.sides):
                    yield quantity(f"{name} Peak", Unit.BYTES, phase, False, "peak", kind)
            if phase == FORWARD:
                yield quantity("Number of Calls", Unit.COUNT, phase, False, "calls", "cpu")

    # The figures

    def _figures(self, side: int, quantity: Quantity) -> list[Figure]:
        """What a quantity is of each layer, for one call or step where the diff is; of measures, of the work of no
        layer, too."""
        figures, layers, scale = self.sides[side], self.runs[side].layers, self.scale[side]
        what, phase = quantity.what, quantity.phase
        if what == "params":
            return [_figure(layer.params if quantity.is_self else figures.params[layer.path]) for layer in layers]
        if what == "calls":
            return [_for_one(one.number_of_calls(), scale) for one in figures.figures[: len(layers)]]
        if isinstance(what, Measure):
            return [_for_one(one.measure(what, phase, quantity.is_self), scale) for one in figures.figures]
        # A layer that did nothing in this phase has a peak of 0.
        nothing = [None if worked else 0 for worked in figures.worked[phase]]
        peaks = (figures.peaks.get((index, phase, quantity.device), nothing[index]) for index in range(len(layers)))
        return [_figure(peak if known else None) for peak, known in zip(peaks, figures.known)]

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
            peaks = [[one.peak_bytes for one in run.memory if _kind_of(one.device) == kind] for run in self.runs]
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
            yield f"The run {which} does not say what it ran on: an older torchprof wrote it."
        if not all(say_all):  # what is missing then, nobody knows
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

    def _doubts(self) -> Iterator[str]:
        """The warnings of the runs, those of both once."""
        said = [list(dict.fromkeys(text for meta in run.metas for text in meta.warnings)) for run in self.runs]
        for text in said[0]:
            yield f"{'Both runs' if text in said[1] else 'Before'}: {text}"
        for text in said[1]:
            if text not in said[0]:
                yield f"After: {text}"


def _figure(value: float | None) -> Figure:
    return Figure(0, Bound.UNKNOWN) if value is None else Figure(value)


def _for_one(figure: Figure, divided_by: int) -> Figure:
    """A figure for one call or step."""
    return figure if divided_by == 1 else figure._replace(value=figure.value / divided_by)


def _between(before: Figure | None, after: Figure | None) -> Change:
    """The change from one figure to the other; None where the layer was not there. Nobody knows how a lower bound
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
        return Change(before, after, None, UNKNOWN)
    return Change(before, after, new - old, SAME if new == old else MORE if new > old else LESS)


def _verdict(change: Change, noise: Noise | None, rate: float | None, tests: int) -> str:
    """Whether a difference of times is more than noise; ``rate`` is the false discovery rate at which it counts.

    It counts where that is at most ``ALPHA`` and where the medians differ by more than the spread, in the sense in
    which the sums do. Calls in one process are not independent: the ranks alone would find differences in what drifts.
    And where sums and medians disagree, a few calls made the difference.
    """
    if change.difference is None:
        return UNKNOWN
    if change.difference == 0:
        return SAME
    if noise is None or rate is None:
        return UNKNOWN
    if abs(noise.shift) <= noise.spread or (noise.shift > 0) != (change.difference > 0):
        return WITHIN_NOISE
    if rate <= ALPHA:
        return SLOWER if noise.shift > 0 else FASTER
    return WITHIN_NOISE if noise.could_tell(tests) else UNKNOWN


def _kind_of(device: str) -> str:
    return "cpu" if device == "cpu" else "device"


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
