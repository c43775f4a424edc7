"""The comparison of two runs, as a value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from os import PathLike
from typing import Any, NamedTuple

from torchprof.analyze.columns import CallsColumn, Column, CostColumn, ParamsColumn, PeakColumn
from torchprof.analyze.compare.noise import Noise
from torchprof.run.cost import Bound, Figure, Measure, Unit, format_count, format_memory, format_time
from torchprof.run.layers import Layer
from torchprof.run.outputs import output
from torchprof.run.run import Run
from torchprof.run.words import FORWARD

MORE, LESS, SAME = "more", "less", "same"
SLOWER, FASTER, WITHIN_NOISE, UNDECIDED = "slower", "faster", "within noise", "unknown"

_NAMED = 3  # so many layers are named as those that made a difference

FORMATS: Mapping[Unit, Callable[[float], str]] = {
    Unit.TIME: format_time,
    Unit.BYTES: lambda value: format_memory(round(value)),
    Unit.COUNT: format_count,
}
"""How the mean of a quantity over calls is written."""


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
    not known, and for a difference of times that cannot be told from noise. ``at_least``: lower bounds of
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
    "renamed", "added" or "removed"; of a subtree that was moved or renamed only the top layer is listed, of one that
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
    differ, all that adds up is for one of them: ``unit`` says for which. ``whole``: the changes of the run itself, by
    key: "step" (how long one lasted), "cpu_peak", "cuda_peak" or that of another device. ``notes``: sentences on
    differences between the runs that make them hard to compare. ``warnings``: the warnings of the two runs.
    """

    before: Run
    after: Run
    pairs: tuple[Pair, ...]
    quantities: tuple[Quantity, ...]
    counted: str | None
    counts: tuple[int, int]
    whole: Mapping[str, Change]
    notes: tuple[str, ...]
    warnings: tuple[str, ...]

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
        text: str = output("render")(name, self, options, of="diff")
        return text

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by how its name ends, as ``Run.export`` does: ``diff.export("diff.md")``.

        Raises TorchprofError for a name that ends otherwise and for an unknown option, OSError as ``open`` does.
        """
        output("export")(path, self, options, of="diff")


def quantity_of(column: Column) -> Quantity | None:
    """The quantity of a column of the catalogue; None for a rate, which is not compared."""
    shown = column.key, column.heading, column.unit
    if isinstance(column, CostColumn):
        return Quantity(*shown, column.phase, column.is_self, column.measure)
    if isinstance(column, ParamsColumn):
        return Quantity(*shown, FORWARD, column.is_self, "params")
    if isinstance(column, PeakColumn):
        return Quantity(*shown, column.phase, False, "peak", "cpu" if column.on_cpu else "device")
    if isinstance(column, CallsColumn):
        return Quantity(*shown, FORWARD, False, "calls")
    return None


def figure_of(value: float | None) -> Figure:
    return Figure(0, Bound.UNKNOWN) if value is None else Figure(value)


def for_one(figure: Figure, divided_by: int) -> Figure:
    """A figure for one call or step."""
    return figure if divided_by == 1 else figure._replace(value=figure.value / divided_by)
