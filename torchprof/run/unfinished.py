"""Where a rank was when its recording ended in the middle of a step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchprof.run.checked_json import demand_layer
from torchprof.run.part import PerRank


class Entered(NamedTuple):
    """How often (``times``) a layer (by its index, negative for none) called the collective ``name`` in a phase."""

    layer: int
    phase: str
    name: str
    times: int


@dataclass(frozen=True)
class Unfinished:
    """Where a rank was when its recording ended in the middle of a step.

    The step had lasted ``ns`` by then, and for the last ``since_ns`` the rank was in ``layer`` (by its index, negative
    for none), in ``phase``: in the operator ``name``, or between operators (""). ``waits``: it waited in the
    collective ``name`` that the layer had called. ``entered``: the collectives that the rank called in the step, in the
    order of their first calls. ``began_before``: the step had begun before this recording, in the cycle before it, if
    there was one.
    """

    rank: int
    ns: int
    since_ns: int
    layer: int
    phase: str
    name: str = ""
    waits: bool = False
    entered: tuple[Entered, ...] = ()
    began_before: bool = False

    def __add__(self, cycle: Unfinished) -> Unfinished:
        """The step at the end of the next cycle: if it had begun before that, it is this one."""
        if not cycle.began_before:
            return cycle
        times: Counter[tuple[int, str, str]] = Counter()
        for call in (*self.entered, *cycle.entered):
            times[call[:3]] += call.times
        entered = tuple(Entered(*key, count) for key, count in times.items())
        return replace(cycle, ns=self.ns + cycle.ns, entered=entered, began_before=self.began_before)

    def renumbered(self, to: Sequence[int]) -> Unfinished:
        entered = tuple(call._replace(layer=to[call.layer]) for call in self.entered)
        return replace(self, layer=to[self.layer], entered=entered)

    def check(self, layers: int) -> None:
        demand_layer(self, layers)
        for call in self.entered:
            demand_layer(call, layers)


class UnfinishedPart(PerRank):
    """The unfinished steps as a part of a run. A step that is in several cycles is one."""

    def added(self, before: tuple[Unfinished, ...], cycle: tuple[Unfinished, ...]) -> tuple[Unfinished, ...]:
        earlier = {step.rank: step for step in before}
        return tuple(earlier[step.rank] + step if step.rank in earlier else step for step in cycle)
