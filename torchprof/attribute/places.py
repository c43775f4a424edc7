"""Where events belong: a layer, a phase, and the frames around them; and the places of ops that created nodes."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from typing import Any, NamedTuple

from torchprof.attribute.events import Event
from torchprof.run.words import FORWARD, Frame, FrameKind


@dataclass(slots=True, eq=False, repr=False)
class Place:
    """Where work belongs: a layer, a phase, and the frames from the layer's range inward to the work itself.

    There is one object for each distinct place; ``index`` numbers them in the order of first use. Calls of an op with
    different ``signature`` have different places. ``within``: the op or label around the layer's range, usually None.
    ``is_node``: whether it is an autograd node; ``is_engine``: a call of autograd's engine. ``is_closed``: whether
    everything inside it counts as this place.
    ``shared``: the layers of work for several layers at once; ``layer`` is then their nearest common ancestor.
    """

    index: int
    layer: int
    phase: str
    within: Place | None
    shared: tuple[int, ...]
    outer: Place | None = None
    frame: Frame | None = None
    signature: int = 0
    is_engine: bool = False
    is_node: bool = False
    is_closed: bool = False
    _inner: dict[Any, Place] | None = None  # most places contain no others and need no dict

    @property
    def is_in_node(self) -> bool:
        """Whether it is an autograd node, or inside one."""
        place: Place | None = self
        while place is not None and not place.is_node:
            place = place.outer
        return place is not None

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The frames, outer to inner, without signatures. ``()`` is the layer's self time between ops."""
        frames = []
        place: Place | None = self
        while place is not None and place.frame is not None:
            frames.append(place.frame)
            place = place.outer
        return tuple(reversed(frames))


class Attributed(NamedTuple):
    """An event with its place.

    ``around``: the place that the event's time is taken from. ``calls``: 0 if the event only continues a call: an op
    directly inside an op of the same name, or a module inside its wrapper. ``ns``: the time of the event, cut at the
    end of the range around it. ``outer``: the innermost range around it on its thread, None if there is none. So the
    open ranges of a thread are the last one that began on it, the ``outer`` of that, and so on, as far as they have not
    ended.
    """

    event: Event
    place: Place
    around: Place | None
    calls: int
    ns: int
    outer: Attributed | None = None

    @property
    def start_ns(self) -> int:
        return self.event.start_ns

    @property
    def end_ns(self) -> int:
        return self.event.start_ns + self.ns


class Places:
    """All places of one run."""

    def __init__(self) -> None:
        self.all: list[Place] = []
        self._layers: dict[tuple[int, str, Place | None, tuple[int, ...]], Place] = {}
        self._frames: dict[str | tuple[FrameKind, str], Frame] = {}
        self.of_trees: dict[tuple[Place, Any], list[Place]] = {}  # see ``op_groups.places_of``

    def of_layer(self, layer: int, phase: str, around: Place | None = None, shared: tuple[int, ...] = ()) -> Place:
        """The place of a layer's self time. ``around`` is the place around the layer's range."""
        within = around if around is None or around.frame is not None else around.within
        key = (layer, phase, within, shared)
        place = self._layers.get(key)
        if place is None:
            place = self._layers[key] = Place(len(self.all), layer, phase, within, shared)
            self.all.append(place)
        return place

    def inside(self, outer: Place, kind: FrameKind, name: str, signature: int = 0) -> Place:
        """The place of a frame directly inside ``outer``."""
        step = name if kind is FrameKind.OP else (kind, name)  # most are ops
        key = (step, signature) if signature else step
        inner = outer._inner
        if inner is None:
            inner = outer._inner = {}
        place = inner.get(key)
        if place is None:
            frame = self._frames.get(step)
            if frame is None:
                frame = self._frames[step] = Frame(kind, name)
            place = inner[key] = Place(
                len(self.all), outer.layer, outer.phase, outer.within, outer.shared, outer, frame, signature
            )
            self.all.append(place)
        return place

    def of_lines(self, place: Place) -> Place | None:
        """The place that has the sampled lines of Python in another: of an op, the outermost op under the same labels.
        None for other ranges, and for ops that are not forward: there a line says nothing."""
        while place.frame is not None and place.frame.kind != FrameKind.LABEL:
            if place.frame.kind != FrameKind.OP or place.phase != FORWARD:
                return None
            outer = place.outer
            if outer is None or outer.frame is None or outer.frame.kind == FrameKind.LABEL:
                break
            place = outer
        return place

    def close(self) -> None:
        """Break the reference cycles between places, so that they are freed without a garbage collection. No place can
        be added afterwards."""
        self._layers.clear()
        self.of_trees.clear()
        for place in self.all:
            place._inner = None


class NodeMakers:
    """The places of the ops that created the autograd nodes of one forward thread, by sequence number.

    - Several ops can have the same number: the one that started last created the node.
    - An in-place write to a view gives its node a number that no op has. So the op with the largest number that is at
      most the number of the node created it.
    - TorchScript numbers the node of a whole graph before it runs the ops of the graph. For such a node it is the first
      op with a larger number.
    """

    def __init__(self) -> None:
        # Sorted columns take a tenth of the memory of dicts: a long recording has millions of numbers.
        self._numbers = array("q")
        self._first: list[Place] = []
        self._last: list[Place] = []

    def add(self, number: int, place: Place) -> None:
        numbers = self._numbers
        if not numbers or number > numbers[-1]:
            index = len(numbers)
        elif number == numbers[-1]:
            self._last[-1] = place
            return
        else:
            index = bisect_left(numbers, number)
            if numbers[index] == number:
                self._last[index] = place
                return
        numbers.insert(index, number)
        self._first.insert(index, place)
        self._last.insert(index, place)

    def find(self, number: int, of_graph: bool = False) -> Place | None:
        """The place of the op that created a node; None if it was not recorded. ``of_graph``: whether the node is that
        of a TorchScript graph."""
        index = bisect_right(self._numbers, number)
        if of_graph:
            return self._first[index] if index < len(self._numbers) else None
        return self._last[index - 1] if index else None
