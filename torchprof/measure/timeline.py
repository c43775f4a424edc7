"""What ran when: each call of a layer, each stretch of its backward, each label and kernel."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from math import inf

from torchprof.attribute.events import Kind
from torchprof.attribute.nesting import OpenRanges
from torchprof.attribute.places import Attributed
from torchprof.run.layers import Layer, Layers
from torchprof.run.timeline import Lane, Spans
from torchprof.run.words import BACKWARD, FORWARD, GARBAGE_COLLECTION, PHASES

_NONE = -1


class _Open:
    """A span that is open on a thread: of a call, a label or a node, until ``end_ns``; or a stretch of backward of a
    ``layer``, with its ``row``, which lasts until the span around it ends, at most."""

    __slots__ = ("end_ns", "layer", "row")

    def __init__(self, end_ns: float, layer: int = _NONE, row: int = _NONE) -> None:
        self.end_ns = end_ns
        self.layer = layer
        self.row = row


class OpenSpans:
    """Observes all events: the spans of the timeline.

    A call of a layer is a span, in forward and in recompute; so is a label of the user's, a garbage collection, and a
    kernel.

    Backward has no calls. There a layer's span is an unbroken stretch of work on one thread: it begins with an autograd
    node of the layer, or of one below it, and ends with the last such node before something else begins: a node that is
    of neither, a call or a label on this thread, or forward work (an op, a call, a label, a step) on any. The time
    between two nodes of a stretch is part of it. A node inside another one, as with checkpoints, is in the stretches
    around that, and begins those of the layers that have none yet: they end with the outer node at the latest.

    So on each thread, of two spans one is inside the other, or they lie apart. A kernel that begins before the one
    before it on its stream has ended goes to the stream's next lane.

    It has open spans of its own: a stretch of backward is not an event, and lasts longer than the node that
    begins it, so ``Attributed.outer`` cannot show which stretches are open.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        selected: Set[int] | None = None,
        start_ns: int | None = None,
        from_first_mark: bool = True,
    ) -> None:
        """``selected``: the layers that have spans, None for all. ``start_ns``: when the recording began, used if no
        mark was recorded. ``from_first_mark``: whether it began with a step, and not in the middle of one."""
        ways = map(Layers.of(layers).lineage, range(len(layers)))
        self._ways = [[one for one in way if selected is None or one in selected] for way in ways]
        self._begun_ns = start_ns
        self._start_ns: int | None = None
        self._marks: list[int] = []
        self._from_first_mark = from_first_mark
        self._open: OpenRanges[_Open] = OpenRanges()
        self._in_backward = False  # whether any stretch is open
        self._lanes: list[Lane] = []
        self._of_thread: dict[int, int] = {}  # its lane
        self._of_stream: dict[tuple[str, int], list[list[int]]] = {}  # its lanes: number, and end of the last kernel
        self._names: dict[str, int] = {}
        self._columns = {name: array("q") for name in Spans.COLUMNS}
        self._ends = self._columns["end_ns"]
        self._dropped = 0

    def observe(self, attributed: Iterable[Attributed]) -> Iterator[Attributed]:
        """Pass all events on, and collect spans."""
        op, label, user_label, node, kernel = Kind.OP, Kind.LABEL, Kind.USER_LABEL, Kind.NODE, Kind.KERNEL
        backward, step, garbage = Kind.BACKWARD_FUNCTION, Kind.STEP, Kind.GARBAGE
        region, compiling = Kind.REGION, Kind.COMPILING
        for item in attributed:
            yield item
            event, place, _, _, _, _ = item
            kind = event[0]
            if kind is op:
                if self._in_backward and place.phase == FORWARD:
                    self._break(event.start_ns)
            elif kind is label or kind is user_label or kind is region or kind is compiling:
                self._on_label(item)
            elif kind is node or kind is backward:
                if place.is_node:
                    self._on_node(item)
            elif kind is kernel:
                self._on_kernel(item)
            elif kind is garbage:  # it ends no stretch of backward
                lane, name = self._lane_of(event.thread), self._number_of(f"({GARBAGE_COLLECTION})")
                self._add(event.start_ns, event.start_ns + item.ns, lane, place.layer, place.phase, name)
            elif kind is step:
                if self._start_ns is None:
                    self._start_ns = event.start_ns
                self._marks.append(event.end_ns)
                self._break(event.start_ns)

    def _break(self, time: int) -> None:
        """Forward work begins: it ends all stretches of backward that are not inside a node."""
        self._in_backward = False
        for ranges in self._open.by_thread.values():
            while ranges and (ranges[-1].end_ns <= time or ranges[-1].layer != _NONE):
                ranges.pop()
            if ranges and any(one.layer != _NONE for one in ranges):  # a node of another thread is still running
                self._in_backward = True

    def _on_label(self, item: Attributed) -> None:
        event, place, _, calls, ns, _ = item
        start, end = event.start_ns, event.start_ns + ns
        if self._in_backward and place.phase == FORWARD:
            self._break(start)
        is_layers = event.kind is Kind.LABEL and place.frame is None
        if not calls or (is_layers and place.layer < 0):
            return
        ranges = self._open.at(event.thread, start)
        while ranges and ranges[-1].layer != _NONE:
            ranges.pop()
        ranges.append(_Open(end))
        name = _NONE if is_layers else self._number_of(event.name)
        self._add(start, end, self._lane_of(event.thread), place.layer, place.phase, name)

    def _on_node(self, item: Attributed) -> None:
        event, place, _, _, ns, _ = item
        start, end = event.start_ns, event.start_ns + ns
        self._in_backward = True
        ranges = self._open.at(event.thread, start)
        first = len(ranges)  # index of the first stretch that this node may continue
        while first and ranges[first - 1].layer != _NONE:
            first -= 1
        limit = ranges[first - 1].end_ns if first else inf
        around = {one.layer for one in ranges[:first]}
        way = [layer for layer in (self._ways[place.layer] if place.layer >= 0 else ()) if layer not in around]
        same = 0
        while same < len(way) and first + same < len(ranges) and ranges[first + same].layer == way[same]:
            row = ranges[first + same].row
            if row != _NONE:
                self._ends[row] = end
            same += 1
        del ranges[first + same :]
        for layer in way[same:]:
            row = self._add(start, end, self._lane_of(event.thread), layer, BACKWARD, _NONE)
            ranges.append(_Open(limit, layer, row))
        ranges.append(_Open(end))

    def _on_kernel(self, item: Attributed) -> None:
        event, place, _, _, _, _ = item
        stream = self._of_stream.setdefault((event.device, event.thread), [])
        lane = next((one for one in stream if one[1] <= event.start_ns), None)
        if lane is None:
            lane = [len(self._lanes), 0]
            stream.append(lane)
            self._lanes.append(Lane(event.device, len(stream), event.thread))
        lane[1] = event.end_ns
        self._add(event.start_ns, event.end_ns, lane[0], place.layer, place.phase, self._number_of(event.name))

    def _lane_of(self, thread: int) -> int:
        lane = self._of_thread.get(thread)
        if lane is None:
            lane = self._of_thread[thread] = len(self._lanes)
            self._lanes.append(Lane("cpu", len(self._of_thread)))
        return lane

    def _number_of(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _add(self, start: int, end: int, lane: int, layer: int, phase: str, name: int) -> int:
        """Add a span; its row, or _NONE if there are too many."""
        row = len(self._ends)
        if row >= Spans.LIMIT:
            self._dropped += 1
            return _NONE
        for column, value in zip(self._columns.values(), (start, end, lane, layer, PHASES.index(phase), name)):
            column.append(value)
        return row

    def result(self) -> Spans:
        """All spans, with times in ns after the start of the session."""
        starts = self._columns["start_ns"]
        known = [start for start in (self._start_ns, self._begun_ns, *starts[:1]) if start is not None]
        zero = known[0] if known else 0
        columns = {
            name: array("q", (time - zero for time in column)) if name.endswith("_ns") else column
            for name, column in self._columns.items()
        }
        marks = self._marks if self._from_first_mark else self._marks[1:]
        steps = tuple(mark - zero for mark in marks) if len(marks) > 1 else ()
        streams = Counter(device for device, _ in self._of_stream)
        lanes = tuple(lane if streams[lane.device] > 1 else lane._replace(stream=None) for lane in self._lanes)
        return Spans(lanes, tuple(self._names), columns, steps, self._dropped)
