"""The protocol of observers: each computes a part of a run from the attributed events while they stream by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol, TypeVar

from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.places import Attributed

Result_co = TypeVar("Result_co", covariant=True)


class Observer(Protocol[Result_co]):
    """One walk over the attributed events of one session: for memory, steps, FLOPs, timeline, devices or lockstep.

    ``observe`` passes every event on, unchanged and in order, and reads it. ``result`` is valid after the last event.
    ``assemble`` lists the observers of a run.
    """

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]: ...

    def result(self) -> Result_co: ...
