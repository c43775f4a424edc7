"""The passes of a loop of which only some were recorded: how many there were, and how long the others took."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

from torchprof.run.groups import lists_by_key
from torchprof.run.measures import Spread
from torchprof.run.part import PerRank, Scale, demand, fields_of
from torchprof.run.words import NOT_SELECTED, OUTSIDE

MOST_UNUSUAL = 10
"""Of so many unusual passes of a kind, the longest ones, the single times are kept."""


MOST_STRETCHES = 64
_SHORTEST = 8  # passes


class Stretch(NamedTuple):
    """So many consecutive ``passes`` that were not recorded, and how long they took together, in ``ns``."""

    passes: int
    ns: int


class Unusual(NamedTuple):
    """A pass that took far longer than others of its kind: its ``number`` among them, from 0 on, its time in ``ns``,
    and the source ``line`` and the innermost ``layer`` (its index, negative for none) where it was most often sampled;
    "" without samples."""

    number: int
    ns: int
    line: str
    layer: int = OUTSIDE


@dataclass(frozen=True)
class Passes:
    """The passes of one kind of a rank. A pass begins where a model is called while no backward is outstanding, and
    ends where the next one begins. Its kind is the ``layer`` that is called first (by its index, negative for none),
    and whether that is in ``training`` mode and records ``gradients``.

    ``count``: of all passes, of which ``recorded`` ran under the profiler, for ``recorded_ns``. ``ns``: the times of
    the others, as they are without the profiler; None if there are none. ``unusual_ns``: by how much unusual passes
    took longer than the median, of the recorded ones or of the others. ``unusual``: the longest of the others, the
    longest first. ``trend``: the others in their order, in 64 stretches at most.
    """

    rank: int
    layer: int
    training: bool
    gradients: bool
    count: int
    recorded: int
    recorded_ns: int
    ns: Spread | None = None
    unusual_ns: int = 0
    unusual: tuple[Unusual, ...] = ()
    trend: tuple[Stretch, ...] = ()

    @property
    def kind(self) -> tuple[int, int, bool, bool]:
        return self.rank, self.layer, self.training, self.gradients

    def __add__(self, later: Passes) -> Passes:
        known = [spread for spread in (self.ns, later.ns) if spread is not None]
        moved = (each._replace(number=each.number + self.count) for each in later.unusual)
        return replace(
            self,
            count=self.count + later.count,
            recorded=self.recorded + later.recorded,
            recorded_ns=self.recorded_ns + later.recorded_ns,
            ns=Spread.of_all(known) if known else None,
            unusual_ns=self.unusual_ns + later.unusual_ns,
            unusual=longest([*self.unusual, *moved]),
            trend=joined(self.trend + later.trend),
        )

    def renumbered(self, to: Sequence[int]) -> Passes:
        unusual = tuple(each._replace(layer=to[each.layer]) for each in self.unusual)
        return replace(self, layer=to[self.layer], unusual=unusual)

    def scaled(self, scale: Scale) -> Passes:
        """They are all passes already."""
        return self

    def stripped(self) -> Passes:
        """The same without source lines."""
        return replace(self, unusual=tuple(each._replace(line="") for each in self.unusual))

    def check(self, layers: int) -> None:
        for layer in (self.layer, *(each.layer for each in self.unusual)):
            demand(NOT_SELECTED <= layer < layers, f"layer {layer} of passes")
        timed = 0 if self.ns is None else self.ns.count
        demand(0 <= self.recorded <= self.recorded + timed <= self.count, "the number of passes")
        demand(min(self.recorded_ns, self.unusual_ns) >= 0, "a negative time of passes")
        demand(all(each.passes > 0 <= each.ns for each in self.trend), "a stretch of passes")

    @property
    def slowdown(self) -> tuple[float, float] | None:
        """The times of a pass in the first and in the last quarter of those that were not recorded: the medians of the
        means of their stretches, of which a few may have unusual passes. None unless there are eight or more in a
        quarter, and all of the last took longer than half of the first."""
        means = [stretch.ns / stretch.passes for stretch in self.trend]
        quarter = len(means) // 4
        if quarter < _FEWEST or min(means[-quarter:]) <= median(means[:quarter]):
            return None
        return median(means[:quarter]), median(means[-quarter:])


_FEWEST = 8  # stretches: that 8 of 12 equal ones are above the 4 others has a probability of 1 in 495


def lengthened(trend: Sequence[Stretch], times: Iterable[int]) -> tuple[Stretch, ...]:
    """The stretches with the times of passes after them."""
    stretches = [*trend]
    size = max([_SHORTEST, *(stretch.passes for stretch in trend)])
    for ns in times:
        if not stretches or stretches[-1].passes >= size:
            if len(stretches) == MOST_STRETCHES:
                stretches, size = [*joined(stretches, MOST_STRETCHES // 2)], 2 * size
            stretches.append(Stretch(0, 0))
        passes, so_far = stretches[-1]
        stretches[-1] = Stretch(passes + 1, so_far + ns)
    return tuple(stretches)


def joined(stretches: Sequence[Stretch], most: int = MOST_STRETCHES) -> tuple[Stretch, ...]:
    """The same passes in at most so many stretches: each two that follow each other become one."""
    while len(stretches) > most:
        pairs = (stretches[place : place + 2] for place in range(0, len(stretches), 2))
        stretches = [Stretch(sum(each.passes for each in pair), sum(each.ns for each in pair)) for pair in pairs]
    return tuple(stretches)


def longest(unusual: Sequence[Unusual]) -> tuple[Unusual, ...]:
    """The longest unusual passes, the longest first."""
    return tuple(sorted(unusual, key=lambda each: (-each.ns, each.number))[:MOST_UNUSUAL])


class PassesPart(PerRank):
    """The passes as a part of a run. Those of one kind in several recordings add up."""

    def added(self, before: tuple[Passes, ...], cycle: tuple[Passes, ...]) -> tuple[Passes, ...]:
        kinds = lists_by_key((passes.kind, passes) for passes in (*before, *cycle))
        return tuple(sum(same[1:], same[0]) for same in kinds.values())

    def merged(self, so_far: Any) -> tuple[Passes, ...]:
        return tuple(sorted(so_far or (), key=lambda passes: passes.kind))

    def to_json(self, value: tuple[Passes, ...]) -> Iterator[dict[str, Any]]:
        for passes in value:
            yield {**fields_of(passes), "ns": None if passes.ns is None else fields_of(passes.ns)}
