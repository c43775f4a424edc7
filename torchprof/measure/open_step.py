"""The step that is open where a cycle of a recording ends: the next cycle has the rest of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torchprof.attribute.loops import Loop
from torchprof.run.layers import Layers
from torchprof.run.lockstep import LockstepKey
from torchprof.run.samples import SampleKey
from torchprof.run.words import NOT_SELECTED, OUTSIDE

_Key = TypeVar("_Key", SampleKey, LockstepKey)
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class OpenStep:
    """The part of a step that was recorded so far.

    ``layers``: those that the keys number. ``samples``: its time by sample; ``work`` that by key of the lockstep.
    ``calls``: of each collective, the time of each call, and how much of that another one was running, too. ``steps``:
    how many whole steps the lockstep has before this one, and ``counts`` how many calls of each collective in them.
    """

    layers: Layers
    samples: Mapping[SampleKey, int] = field(default_factory=dict)
    work: Mapping[LockstepKey, int] = field(default_factory=dict)
    calls: Mapping[LockstepKey, Sequence[tuple[int, int]]] = field(default_factory=dict)
    steps: int = 0
    counts: Mapping[LockstepKey, int] = field(default_factory=dict)

    def on_layers(self, layers: Layers) -> OpenStep:
        """The same with the numbers of these layers, which are matched by path. A layer that is gone is left out: the
        layers above have its time, too."""
        to = [*(layers.index_of.get(layer.path) for layer in self.layers), NOT_SELECTED, OUTSIDE]

        def renumbered(keys: Mapping[_Key, _Value]) -> dict[_Key, _Value]:
            numbers = ((key, to[key.layer], value) for key, value in keys.items())
            return {key._replace(layer=layer): value for key, layer, value in numbers if layer is not None}

        samples, work, calls = renumbered(self.samples), renumbered(self.work), renumbered(self.calls)
        return OpenStep(layers, samples, work, calls, self.steps, renumbered(self.counts))


class CycleEnd(NamedTuple):
    """Where a cycle of a recording without gaps ends: the ``loop`` so far, and the ``step`` that is open; None if none
    has begun. The default is the start of the recording."""

    loop: Loop = Loop()
    step: OpenStep | None = None


@dataclass(frozen=True)
class Pieces:
    """A cycle of a recording without gaps, cut where steps end, into ``count`` pieces. The first is the rest of the
    step that was open at its start, if ``goes_on``, else of no whole step; the last is open at its end.
    """

    count: int
    goes_on: bool

    @property
    def whole(self) -> slice:
        """The pieces that are whole steps, once the first has what was recorded of it before."""
        return slice(0 if self.goes_on else 1, max(self.count - 1, 0))

    def cut(
        self, values: Mapping[_Key, Sequence[int]], before: Mapping[_Key, int]
    ) -> tuple[dict[_Key, list[int]], dict[_Key, int]]:
        """Of values for each piece: those of the whole steps, and that of the last piece. ``before``: what was recorded
        of the first step before. Keys without a value in whole steps are left out there."""
        pieces = {key: list(of_pieces) for key, of_pieces in values.items()}
        for key, value in before.items():
            pieces.setdefault(key, [0] * self.count)[0] += value
        of_whole = {key: of_pieces[self.whole] for key, of_pieces in pieces.items()}
        whole = {key: of_steps for key, of_steps in of_whole.items() if any(of_steps)}
        return whole, {key: of_pieces[-1] for key, of_pieces in pieces.items()}

    @property
    def has_open(self) -> bool:
        """Whether the last piece is of a step that has begun."""
        return self.goes_on or self.count > 1
