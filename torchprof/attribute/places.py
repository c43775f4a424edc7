"""Where events belong: a layer, a phase and what is around."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchprof.attribute.events import Event
from torchprof.run.words import Frame


class Place:
    """Where work belongs: a layer, a phase, and the frames from the layer's range inward to the work itself.

    There is one object for each distinct place, numbered in the order of first use; calls of an op with different
    ``signature`` are different places. ``within`` is the op or label that the layer's range is inside of, None where
    it is inside of none, as nearly always. ``is_closed``: nobody asks what runs inside of it. ``shared``:
    where it works for several layers at once, which; ``layer`` is their nearest common ancestor then.
    """

    __slots__ = (
        "_inner",
        "frame",
        "index",
        "is_closed",
        "is_node",
        "layer",
        "outer",
        "phase",
        "shared",
        "signature",
        "within",
    )

    def __init__(
        self,
        index: int,
        layer: int,
        phase: str,
        within: Place | None,
        shared: tuple[int, ...],
        outer: Place | None,
        frame: Frame | None,
        signature: int,
    ) -> None:
        self.index = index
        self.layer = layer
        self.phase = phase
        self.within = within
        self.outer = outer
        self.frame = frame
        self.signature = signature
        self.shared = shared
        self.is_node = False
        self.is_closed = False
        self._inner: dict[Any, Place] | None = None  # most have none: a dict only for those that do

    @property
    def frames(self) -> tuple[Frame, ...]:
        """Outer to inner, without signatures; ``()`` is the layer's own time between ops."""
        frames = []
        place: Place | None = self
        while place is not None and place.frame is not None:
            frames.append(place.frame)
            place = place.outer
        return tuple(reversed(frames))


class Attributed(NamedTuple):
    """An event with its place. ``around`` is the place whose time it interrupts, ``calls`` is 0 where the event only
    continues a call (an op directly inside one of its name, a module inside its wrapper), ``ns`` its time."""

    event: Event
    place: Place
    around: Place | None
    calls: int
    ns: int


class Places:
    """All places of one run."""

    def __init__(self) -> None:
        self.all: list[Place] = []
        self._layers: dict[tuple[int, str, Place | None, tuple[int, ...]], Place] = {}
        self._frames: dict[str, Frame] = {}

    def of_layer(self, layer: int, phase: str, around: Place | None = None, shared: tuple[int, ...] = ()) -> Place:
        """The place of a layer's own time, where its range is inside ``around``."""
        within = around if around is None or around.frame is not None else around.within
        key = (layer, phase, within, shared)
        place = self._layers.get(key)
        if place is None:
            place = self._layers[key] = self._new(layer, phase, within, shared, None, None, 0)
        return place

    def inside(self, outer: Place, kind: str, name: str, signature: int = 0) -> Place:
        step = name if kind == "op" else f"{kind}:{name}"
        key = (step, signature) if signature else step
        inner = outer._inner
        if inner is None:
            inner = outer._inner = {}
        place = inner.get(key)
        if place is None:
            frame = self._frames.get(step)
            if frame is None:
                frame = self._frames[step] = Frame(kind, name)
            place = inner[key] = self._new(
                outer.layer, outer.phase, outer.within, outer.shared, outer, frame, signature
            )
        return place

    def close(self) -> None:
        """No place is new from now on. Places hold each other in circles: without this they wait for the collector."""
        self._layers.clear()
        for place in self.all:
            place._inner = None

    def _new(
        self,
        layer: int,
        phase: str,
        within: Place | None,
        shared: tuple[int, ...],
        outer: Place | None,
        frame: Frame | None,
        signature: int,
    ) -> Place:
        place = Place(len(self.all), layer, phase, within, shared, outer, frame, signature)
        self.all.append(place)
        return place
