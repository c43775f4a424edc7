"""The events that attribution reads, the places where they belong, and the ranges that are open on a thread."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from torchprof.run.layers import common_prefix
from torchprof.run.words import (
    INTERRUPTIONS,
    MOST_NESTED,
    NOT_SELECTED,
    OUTSIDE,
    OUTSIDE_NAME,
    Frame,
    FrameKind,
    Signature,
)

PREFIX = "torchprof:"
"""Prefix of the names of all our labels."""
HOOKS = PREFIX + "!hooks:"
"""Prefix of the label around hooks in which a parallel module exchanges data before and after its forward. The label
of the module follows, without ``PREFIX``."""
COMPILED_INPUTS = PREFIX + "!given:"
"""Prefix of the label around a call of a compiled function. A number follows, for the tensors it took from modules."""
PIPELINE = PREFIX + "!pipeline:"
"""Prefix of the labels around the steps of a pipeline's schedule, and around what a stage does in it."""
ACCUMULATES = "AccumulateGrad"
"""Suffix of the name of the node that makes a gradient ready. There DistributedDataParallel fills its buckets."""


class Kind(Enum):
    """The kind of an event."""

    __hash__ = object.__hash__  # faster: Enum's is a Python function, and dicts by kind are read for every event

    OP = "op"
    USER_LABEL = "label"
    LABEL = "forward of a labeled module"
    ENGINE = "autograd's engine, from its call to its return; without a name, a part of a call"
    NODE = "autograd node, with the engine's work around it"
    BACKWARD_FUNCTION = "autograd node"
    STOPPED = "mark: the op before it was not executed"
    OPENED = "mark: a session begins, and its recording follows"
    STEP = "mark: a step ends here, and the next begins"
    ENDED = "mark: the recording ends here, and its session follows"
    COLLECTIVE = "a collective, from its beginning to its end"
    GUARDS = "guards of torch.compile, before the region that they guard"
    REGION = "code that torch.compile made"
    GRAPH = "kernels of a compiled graph"
    COMPILING = "torch.compile compiles"
    COMPILED_INPUTS = "mark: the tensors that the compiled function inside took from modules"
    PIPELINE = "a step of a pipeline's schedule, an action or a wait in it: no part of what is attributed"
    INTERRUPTION = "what can interrupt anything: Python's garbage collector, or the profiler itself"
    WAIT = "a thread runs nothing: it waits for what the name says"
    SAMPLE = "a sampled source line of Python"
    KERNEL = "kernel"
    MEMORY = "memory"


class Detail(Enum):
    """How much of the inputs of an op is read."""

    NOTHING = 0
    SHAPES = 1
    ONES = 2  # shapes, and which scalars are 0 or 1; any other scalar reads as 2
    SCALARS = 3  # shapes, and the values of all scalars


class SignatureTable:
    """The inputs of operators. Equal ones share one number, an index in ``all``; 0 is the empty signature."""

    def __init__(self) -> None:
        self.all: list[Signature] = [Signature((), ())]
        self._number_of: dict[Signature, int] = {self.all[0]: 0}
        # By what was recorded, as bytes: as a key they need half of the memory of nested tuples. Version 2 of marshal's
        # format writes no references between equal parts: the bytes depend on the values alone.
        self._number_of_bytes: dict[bytes, int] = {}

    def _number(self, signature: Signature) -> int:
        if (number := self._number_of.get(signature)) is None:
            number = len(self.all)
            self.all.append(signature)
            self._number_of[signature] = number
        return number


class Event(NamedTuple):
    """The part of one profiler event that attribution needs.

    ``name``: the label of a LABEL, the source line of a SAMPLE. ``thread``: the stream number of a KERNEL. A COLLECTIVE
    lasts from ``start_ns`` to ``end_ns``; its thread may run other events meanwhile. ``sequence``: the autograd
    sequence number (-1: none). ``forward_thread``: the thread that this number was counted on.

    ``correlation``: of an op, its own number (0: none; negative: a call of the device's runtime, and its kernels belong
    to the op around it); of a KERNEL, the number of the op that launched it (BEFORE: launched before the recording
    began); of a MEMORY event, the address (0: unknown). ``device``: where the memory is, or where the kernel ran.
    ``nbytes``: negative for a free. ``signature``: the number of the op's recorded inputs (0: not recorded).
    """

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    thread: int
    sequence: int = -1
    forward_thread: int = 0
    correlation: int = 0
    device: str = "cpu"
    nbytes: int = 0
    signature: int = 0


class Site(NamedTuple):
    """The module that a label stands for. ``layers``: one layer for each path of the module, in the order of paths.
    ``wrapper``: the label of a module that only wraps this one and is shown as the same layer. If the wrapper's range
    is directly around the range of this module, both are one call."""

    layers: tuple[int, ...]
    wrapper: str | None = None


# Where events belong

_LEAVES = frozenset({FrameKind.COLLECTIVE, FrameKind.KERNEL, FrameKind.PYTHON, *INTERRUPTIONS})
"""The kinds of frames that have no others inside."""


@dataclass(slots=True, eq=False, repr=False)
class Place:
    """Where work belongs: a layer, a phase, and the frames from the layer's range inward to the work itself.

    There is one object for each distinct place; ``index`` numbers them in the order of first use. Calls of an op with
    different ``signature`` have different places. ``within``: the op or label around the layer's range, usually None.
    ``shared``: the layers of work for several layers at once; ``layer`` is then their nearest common ancestor.
    ``is_node``: an autograd node; ``is_engine``: a call of autograd's engine. ``is_closed``: all inside belongs to it.
    ``depth``: the number of frames around and in it, also around the layer's range.
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
    depth: int = 0
    _inner: dict[Any, Place] | None = None  # most places contain no others and need no dict

    @property
    def name(self) -> str:
        """The name of its last frame; "" for the layer's self time between ops."""
        return "" if self.frame is None else self.frame.name

    @property
    def kind(self) -> FrameKind | None:
        """The kind of its last frame; None for the layer's self time between ops."""
        return None if self.frame is None else self.frame.kind

    @property
    def node(self) -> Place | None:
        """The autograd node that it is, or is inside of; None if there is none."""
        place: Place | None = self
        while place is not None and not place.is_node:
            place = place.outer
        return place

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
    end of the range around it. ``outer``: the innermost range around it on its thread. So the open ranges of a thread
    are the last one that began on it, the ``outer`` of that, and so on, as far as they have not ended.
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
        self.of_trees: dict[tuple[Place, Any], list[Place]] = {}  # see ``OpGroup.places``

    def of_layer(self, layer: int, phase: str, around: Place | None = None, shared: tuple[int, ...] = ()) -> Place:
        """The place of a layer's self time. ``around`` is the place around the layer's range."""
        within = around if around is None or around.frame is not None else around.within
        key = (layer, phase, within, shared)
        if (place := self._layers.get(key)) is None:
            depth = 0 if within is None else within.depth
            place = self._layers[key] = Place(len(self.all), layer, phase, within, shared, depth=depth)
            self.all.append(place)
        return place

    def inside(self, outer: Place, kind: FrameKind, name: str, signature: int = 0) -> Place:
        """The place of a frame directly inside ``outer``; ``outer`` itself if that is as deep as a place can be."""
        if outer.depth >= MOST_NESTED and kind not in _LEAVES:
            return outer
        step = name if kind is FrameKind.OP else (kind, name)  # most are ops
        key = (step, signature) if signature else step
        if (inner := outer._inner) is None:
            inner = outer._inner = {}
        if (place := inner.get(key)) is None:
            if (frame := self._frames.get(step)) is None:
                frame = self._frames[step] = Frame(kind, name)
            place = inner[key] = Place(
                len(self.all), outer.layer, outer.phase, outer.within, outer.shared, outer, frame, signature
            )
            place.depth = outer.depth + 1
            self.all.append(place)
        return place

    def of_lines(self, place: Place) -> Place:
        """The place that has the sampled lines of Python in another: that of the outermost op, wait, region or other
        range under the same labels. In backward the line is the one that called it."""
        while place.frame is not None and place.frame.kind != FrameKind.LABEL:
            outer = place.outer
            if outer is None or outer.frame is None or outer.frame.kind == FrameKind.LABEL:
                break
            place = outer
        return place

    def close(self) -> None:
        """Break the reference cycles between places, so that they are freed at once. No place can be added after it."""
        self._layers.clear()
        self.of_trees.clear()
        for place in self.all:
            place._inner = None


class CommonAncestor:
    """The places and names of work for several layers at once. ``selected``: those with own rows, None for all."""

    def __init__(self, places: Places, paths: Sequence[tuple[str, ...]], selected: Set[int] | None) -> None:
        self._places = places
        self._paths = paths
        self._index = {path: index for index, path in enumerate(paths)}
        self._selected = selected

    def place(self, layers: tuple[int, ...], phase: str, around: Place) -> Place:
        """The place of the layers' work: their nearest common ancestor that is selected."""
        path = self._path(layers)
        layer = self._index.get(path, OUTSIDE)
        while self._selected is not None and layer != NOT_SELECTED and layer not in self._selected:
            path = path[:-1]
            layer = self._index.get(path, NOT_SELECTED)
        shared = layers if len(layers) > 1 else ()
        if (layer, phase, shared) == (around.layer, around.phase, around.shared):
            return around
        return self._places.of_layer(layer, phase, around if around.layer != OUTSIDE or around.frame else None, shared)

    def names(self, layers: tuple[int, ...], most: int | None = None, below: int | None = None) -> str:
        """The paths of the layers, relative to their nearest common ancestor, or to the layer they are ``below``. A
        negative layer is outside all. ``most``: how many are named, None for all."""
        common = self._path(layers if below is None else (*layers, below)) if min(layers) >= 0 else ()
        paths = [self._paths[layer] if layer >= 0 else (OUTSIDE_NAME,) for layer in layers]
        named = paths if most is None or len(paths) <= most + 1 else paths[:most]
        more = [f"{len(paths) - len(named)} more"] if len(named) < len(paths) else []
        return " + ".join([*(".".join(path[len(common) :]) or "itself" for path in named), *more])

    def _path(self, layers: Iterable[int]) -> tuple[str, ...]:
        """The path of the nearest common ancestor; ``()`` if the layers are in different models."""
        return common_prefix(self._paths[layer] for layer in layers)


def nearest(paths: Sequence[tuple[str, ...]], layers: Sequence[int], caller: int) -> int:
    """The layer of a module with several paths: the one whose path has most steps in common with its caller's. The
    first layer if none has any, or if it has no caller (negative)."""
    if caller < 0:
        return layers[0]
    return max(layers, key=lambda layer: len(common_prefix((paths[layer], paths[caller]))))


class NodeMakers:
    """The places of the ops that created the autograd nodes of one forward thread, by sequence number.

    - Several ops can have the same number: the one that started last created the node.
    - An in-place write to a view gives its node a number that no op has. So the op with the next lower number counts.
    - TorchScript numbers the node of a whole graph before it runs its ops. So the first op with a larger number counts.

    For example, of ops with the numbers 3, 3 and 5, the second created the nodes 3 and 4, and the third the node 5. A
    TorchScript graph with the number 4 has the third as its first op.
    """

    def __init__(self) -> None:
        # Sorted columns take a tenth of the memory of dicts: a long recording has millions of numbers.
        self._numbers = array("q")
        self._first: list[Place] = []  # of the first op with each number
        self._last: list[Place] = []  # of the last op with each number

    def add(self, number: int, place: Place) -> None:
        numbers = self._numbers
        index = bisect_left(numbers, number) if numbers and number <= numbers[-1] else len(numbers)
        if index < len(numbers) and numbers[index] == number:
            self._last[index] = place
            return
        numbers.insert(index, number)
        self._first.insert(index, place)
        self._last.insert(index, place)

    def find(self, number: int, of_graph: bool = False) -> Place | None:
        """The place of the op that created a node; None if not recorded. ``of_graph``: that of a TorchScript graph."""
        index = bisect_right(self._numbers, number)
        if of_graph:
            return self._first[index] if index < len(self._numbers) else None
        return self._last[index - 1] if index else None


class HasEnd(Protocol):
    @property
    def end_ns(self) -> float: ...


Range = TypeVar("Range", bound=HasEnd)


class OpenRanges(Generic[Range]):
    """The ranges that are open on each thread, while events pass by in the order of their start. Whoever opens a range
    appends it to the list that ``at`` returns. On a thread, an inner range ends no later than the one around it: cut a
    range off at the end of the outer one (``Attributed.ns`` is cut already). ``Attribution`` has this loop inline."""

    def __init__(self, close: Callable[[list[Range]], Any] = list.pop) -> None:
        """``close`` takes the last range, which has ended, from the list of its thread. It must not be a method of an
        object that holds this one: the cycle would keep both until a full collection."""
        self._close = close
        self.by_thread: dict[int, list[Range]] = {}  # outer to inner

    def at(self, thread: int, time: int) -> list[Range]:
        """Close the ranges of a thread that have ended at a time; return those that are open, outer to inner."""
        if (ranges := self.by_thread.get(thread)) is None:
            ranges = self.by_thread[thread] = []
        while ranges and ranges[-1].end_ns <= time:
            self._close(ranges)
        return ranges

    def close_all(self, thread: int | None = None) -> None:
        """Close all open ranges of a thread, or of all threads, the inner ones of a thread first."""
        for ranges in self.by_thread.values() if thread is None else (self.by_thread.get(thread, []),):
            while ranges:
                self._close(ranges)
