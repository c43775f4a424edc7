"""The comparison of two runs, as a value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from os import PathLike
from typing import Any, NamedTuple

from torchprof.analyze.columns import Column
from torchprof.analyze.compare.noise import Noise
from torchprof.run.formats import Bound, Figure
from torchprof.run.layers import Layer
from torchprof.run.outputs import ReportText, output
from torchprof.run.run import Run

# The verdicts of a change: of exact quantities, and of times.
MORE, LESS, SAME = "more", "less", "same"
SLOWER, FASTER, WITHIN_NOISE, UNDECIDED = "slower", "faster", "within noise", "unknown"
BUSY = "unclear: the machine was busy"
"""The verdict of a change of elapsed time that waiting for a processor may explain."""

_NAMED = 3  # the most layers that are named as the cause of a difference


class Change(NamedTuple):
    """One quantity before and after.

    ``before`` and ``after`` are None where they are unknown, and in a run that does not have the layer. If one of them
    is unknown, so is ``difference``; for an added or removed layer it is what the layer adds or takes away.
    ``verdict``: "slower", "faster", "within noise" or ``BUSY`` for times whose ``noise`` is known; "more", "less" or
    "same" for exact quantities; "unknown" for unknown ones, and for times that too few values test. ``at_least``: lower
    bounds of ``before`` and ``after`` if these are None because a part of a sum is missing, else None.
    """

    before: float | None
    after: float | None
    difference: float | None
    verdict: str
    noise: Noise | None = None
    at_least: tuple[float | None, float | None] = (None, None)

    def figure(self, side: int) -> Figure:
        """The figure before (0) or after (1): exact, a lower bound, or unknown."""
        value, least = (self.before, self.after)[side], self.at_least[side]
        if value is not None:
            return Figure(value)
        return Figure(0, Bound.UNKNOWN) if least is None else Figure(least, Bound.AT_LEAST)

    @property
    def ratio(self) -> float | None:
        """``after / before``; None if one of them is unknown, ``before`` is not positive, or ``after`` is negative, as
        net memory may be."""
        if self.before is None or self.after is None or self.before <= 0 or self.after < 0:
            return None
        return self.after / self.before


@dataclass
class Pair:
    """One layer in both runs, or in one of them, or the work of no layer (``before`` and ``after`` are None).

    ``path``: the path after, or before for a removed layer; ``name`` is its last part. ``children``: the pairs of the
    layers below. ``how``: "same", "moved", "renamed", "added" or "removed". In a subtree that was moved or renamed only
    the top layer is marked so; in one that was added or removed every layer is. ``changes``: every quantity of the diff
    by key; the work of no layer has only the measures of costs. ``differs``: what changed in the layer itself, as
    (what, before, after).
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


def _changes_in(pair: Pair, quantity: Column) -> Iterator[tuple[Pair, Change]]:
    """The layers at or below a pair that have a quantity, with its change."""
    return ((layer, layer.changes[quantity.key]) for layer in pair.walk() if quantity.key in layer.changes)


@dataclass(frozen=True, repr=False)
class Diff:
    """Two runs compared, ``before`` and ``after``. Made by ``torchprof.compare``; the reports of a diff read it.

    ``pairs``: the models, with the layers below them in their order after (a removed layer is below its parent before),
    then the work of layers that were not selected, and the work outside all layers. ``quantities``: what is compared,
    in the order of the tree's columns. ``counts``: how many forward calls of the model each run recorded (``counted``
    is "call"), or how many steps, if the model was never called itself ("step"); with neither, ``counted`` is None and
    both counts are 1. If the counts differ, additive quantities are per call or step: see ``unit``.
    ``whole``: the changes of the run itself, by key: "step" (how long one lasted), "cpu_peak", "cuda_peak" or that of
    another device. ``notes``: sentences on differences between the runs that make them hard to compare. ``warnings``:
    the warnings of the two runs.
    """

    before: Run
    after: Run
    pairs: tuple[Pair, ...]
    quantities: tuple[Column, ...]
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
        """The unit of additive quantities: "call", "step", or None for totals of the runs."""
        return self.counted if self.counts[0] != self.counts[1] else None

    def walk(self) -> Iterator[Pair]:
        """All pairs, parents before children."""
        for pair in self.pairs:
            yield from pair.walk()

    def quantity(self, key: str) -> Column | None:
        """The quantity with that key; None if not both runs measured it."""
        return next((quantity for quantity in self.quantities if quantity.key == key), None)

    def self_of(self, quantity: Column) -> Column:
        """The self quantity that goes with a total; the quantity itself if there is none."""
        own = replace(quantity, heading="", is_self=True)
        matching = (column for column in self.quantities if replace(column, heading="") == own)
        return next(matching, quantity)

    def weight(self, change: Change) -> float:
        """The size of a change, for ranking. If its noise is known: the difference of the medians, times the calls, so
        that one call on a busy machine weighs little."""
        if change.noise is None:
            return change.difference or 0
        return change.noise.shift * (self.counts[1] if self.unit is None else 1)

    def largest_parts(self, pair: Pair, quantity: Column) -> tuple[list[tuple[Pair, Change]], bool, str]:
        """The first three layers at or below a pair whose self changed with the sign of the whole difference, the
        largest ``weight`` first, without changes within noise and unclear ones; whether they hold most of the
        difference; " beyond noise" or "".

        There are none for a layer without children, and for a self quantity. A quantity without a self, such as a peak,
        is taken from the layers without children. They hold most if they are more than half of the difference, and more
        than half of all self changes with its sign, those within noise included. If not, the text is " beyond noise" if
        a self change that is within noise is larger than one of these.
        """
        if quantity.is_self or not pair.children:
            return [], False, ""
        own = self.self_of(quantity)
        difference = pair.changes[quantity.key].difference or 0
        with_its_sign = [
            (layer, change)
            for layer, change in _changes_in(pair, own)
            if (own.is_self or not layer.children) and change.difference and (change.difference > 0) == (difference > 0)
        ]
        clear = [part for part in with_its_sign if part[1].verdict not in (WITHIN_NOISE, BUSY)]
        layers = sorted(clear, key=self._by_weight)[:_NAMED]
        named = [abs(change.difference or 0) for _, change in layers]
        whole = max(sum(abs(change.difference or 0) for _, change in with_its_sign), abs(difference))
        noisy = [abs(change.difference or 0) for _, change in with_its_sign if change.verdict == WITHIN_NOISE]
        # Quantities without a self, such as peaks, do not add up to the whole.
        hold_most = own.is_self and 2 * sum(named) > whole
        beyond_noise = " beyond noise" if max(noisy, default=0) > min(named, default=0) else ""
        return layers, hold_most, "" if hold_most else beyond_noise

    def beyond_noise(self, pair: Pair, quantity: Column) -> list[tuple[Pair, Change]]:
        """The layers at or below a pair whose own time changed beyond noise, in any direction, the largest first."""
        changes = _changes_in(pair, self.self_of(quantity))
        return sorted((part for part in changes if part[1].verdict in (SLOWER, FASTER)), key=self._by_weight)

    def _by_weight(self, part: tuple[Pair, Change]) -> float:
        return -abs(self.weight(part[1]))

    def _repr_html_(self) -> str | None:
        return self.report("table")._repr_html_()

    def report(self, name: str = "table", **options: Any) -> ReportText:
        """A report as text: "table", "markdown", "json". Raises TorchprofError for an unknown name or option."""
        text: ReportText = output("render")(name, self, options, of="diff")
        return text

    def export(self, path: str | PathLike[str], **options: Any) -> None:
        """Write a report into a file, chosen by the file's suffix, as ``Run.export`` does: ``diff.export("diff.md")``.

        Raises TorchprofError for an unknown suffix or option, OSError as ``open`` does.
        """
        output("export")(path, self, options, of="diff")
