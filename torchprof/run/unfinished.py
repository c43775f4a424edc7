"""Where a rank was when its recording ended in the middle of a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torchprof.run.checked_json import demand_layer


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
    order of their first calls.
    """

    rank: int
    ns: int
    since_ns: int
    layer: int
    phase: str
    name: str = ""
    waits: bool = False
    entered: tuple[Entered, ...] = ()

    def renumbered(self, to: Sequence[int]) -> Unfinished:
        entered = tuple(call._replace(layer=to[call.layer]) for call in self.entered)
        return replace(self, layer=to[self.layer], entered=entered)

    def check(self, layers: int) -> None:
        demand_layer(self, layers)
        for call in self.entered:
            demand_layer(call, layers)
