"""The protocol of observers: each computes a part of a run from the attributed events while they stream by."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from torchprof.attribute.op_groups import OpGroup
from torchprof.attribute.places import Attributed


class Observer(Protocol):
    """One walk over the attributed events of one session: for memory, steps, timeline, devices or lockstep.

    ``observe`` passes every event on, unchanged and in order, and reads it. ``assemble`` lists the observers of a run.
    """

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]: ...

    def result(self) -> Mapping[str, Any]:
        """Fields of ``Run`` (and ``steps`` of ``Meta``), after the last event. If several observers have a field, ``|``
        joins what they have."""
