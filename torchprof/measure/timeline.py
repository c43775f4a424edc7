"""The timeline: spans of calls, stretches of backward, labels and kernels."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from math import inf

from torchprof.attribute.events import Attributed, Kind, OpenRanges
from torchprof.attribute.op_groups import OpGroup
from torchprof.run.layers import Layer, Layers
from torchprof.run.timeline import Lane, Spans, Timeline
from torchprof.run.words import BACKWARD, FORWARD, INTERRUPTIONS, PHASES, FrameKind, range_in_words

_NONE = -1


@dataclass(slots=True)
class _OpenSpan:
    """An open span: a call, a label or a node, until ``end_ns``; or a stretch of backward of a ``layer``, with its
    ``row``: its ``end_ns`` is that of the span around it, and it may end earlier."""

    end_ns: float
    layer: int = _NONE
    row: int = _NONE


_WITH_SPANS = {*INTERRUPTIONS, FrameKind.WAIT}
"""The kinds of ranges with spans of their own that end no stretch of backward."""


class OpenSpans:
    """Observes all events: spans for calls of layers in forward or recompute, labels, garbage collections and kernels.

    Backward has no calls. There, a span of a layer is a stretch: uninterrupted work on one thread. It begins with an
    autograd node of the layer or of a layer below it. It ends with the last such node before one of these begins: a
    node of another layer, a call or a label on this thread, or forward work (an op, a call, a label, a step) on any
    thread. The time between two nodes of a stretch is part of it. A node inside another node, as with checkpoints, is
    part of the stretches around the outer node. It begins stretches of the layers that have none yet, and these end
    with the outer node at the latest. Example, the nodes of one thread and the stretches of three layers:

        nodes    (block.norm)  (block.norm)  (block.conv)  (head)
        spans    [ block                                ]  [head]
                 [ block.norm             ]  [block.conv]

    So two spans of one thread are either nested or do not overlap. A kernel that overlaps the one before it goes to
    another lane of its stream.

    It has open spans of its own: a stretch of backward is not an event, and lasts longer than the node that begins it.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        selected: Set[int] | None = None,
        start_ns: int | None = None,
        from_first_mark: bool = True,
        rank: int = 0,
    ) -> None:
        """``selected``: the layers that have spans, None for all. ``start_ns``: when the recording began, if no mark
        was recorded. ``from_first_mark``: whether it began with a step."""
        lineages = map(Layers.of(layers).lineage, range(len(layers)))
        self._lineages = [[layer for layer in path if selected is None or layer in selected] for path in lineages]
        self._recording_start_ns = start_ns
        self._start_ns: int | None = None
        self._marks: list[int] = []
        self._from_first_mark = from_first_mark
        self._rank = rank
        self._open: OpenRanges[_OpenSpan] = OpenRanges()
        self._in_backward = False  # whether any stretch is open
        self._lanes: list[Lane] = []
        self._of_thread: dict[int, int] = {}  # its lane
        self._of_stream: dict[tuple[str, int], list[int]] = {}  # its lanes
        self._busy_until: dict[int, int] = {}  # by lane of a stream: the end of its last kernel
        self._names: dict[str, int] = {}
        self._columns = {name: array("q") for name in Spans.COLUMNS}
        self._ends = self._columns["end_ns"]
        self._dropped = 0

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        op, label, user_label, node, kernel = Kind.OP, Kind.LABEL, Kind.USER_LABEL, Kind.NODE, Kind.KERNEL
        backward, step, interruption = Kind.BACKWARD_FUNCTION, Kind.STEP, Kind.INTERRUPTION
        region, compiling, wait = Kind.REGION, Kind.COMPILING, Kind.WAIT
        for item in stream:
            yield item
            if isinstance(item, OpGroup):
                if self._in_backward and item.place.phase == FORWARD and item.tree.last_op >= 0:
                    self._break(item.columns.start[item.first + item.tree.last_op])
                continue
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
            elif (kind is interruption or kind is wait) and place.kind in _WITH_SPANS:  # ends no stretch of backward
                name = self._number_of(range_in_words(place.kind, place.name))
                lane = self._lane_of(event.thread)
                self._add(event.start_ns, event.start_ns + item.ns, lane, place.layer, place.phase, name)
            elif kind is step:
                if self._start_ns is None:
                    self._start_ns = event.start_ns
                self._marks.append(event.end_ns)
                self._break(event.start_ns)

    def _break(self, time: int) -> None:
        """Forward work begins: end all stretches of backward that are not inside a node."""
        self._in_backward = False
        for ranges in self._open.by_thread.values():
            while ranges and (ranges[-1].end_ns <= time or ranges[-1].layer != _NONE):
                ranges.pop()
            # A node may still be running on another thread.
            self._in_backward |= any(open_range.layer != _NONE for open_range in ranges)

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
        ranges.append(_OpenSpan(end))
        name = _NONE if is_layers else self._number_of(event.name)
        self._add(start, end, self._lane_of(event.thread), place.layer, place.phase, name)

    def _on_node(self, item: Attributed) -> None:
        event, place, _, _, ns, _ = item
        start, end = event.start_ns, event.start_ns + ns
        self._in_backward = True
        ranges = self._open.at(event.thread, start)
        # The stretches from ``first`` on are those that this node may continue; it continues ``same`` of them.
        first = len(ranges)
        while first and ranges[first - 1].layer != _NONE:
            first -= 1
        limit = ranges[first - 1].end_ns if first else inf
        open_already = {open_range.layer for open_range in ranges[:first]}
        of_node = self._lineages[place.layer] if place.layer >= 0 else ()
        lineage = [layer for layer in of_node if layer not in open_already]
        same = 0
        while same < len(lineage) and first + same < len(ranges) and ranges[first + same].layer == lineage[same]:
            row = ranges[first + same].row
            if row != _NONE:
                self._ends[row] = end
            same += 1
        del ranges[first + same :]
        for layer in lineage[same:]:
            row = self._add(start, end, self._lane_of(event.thread), layer, BACKWARD, _NONE)
            ranges.append(_OpenSpan(limit, layer, row))
        ranges.append(_OpenSpan(end))

    def _on_kernel(self, item: Attributed) -> None:
        event, place, _, _, _, _ = item
        lanes = self._of_stream.setdefault((event.device, event.thread), [])
        lane = next((lane for lane in lanes if self._busy_until[lane] <= event.start_ns), None)
        if lane is None:
            lane = len(self._lanes)
            lanes.append(lane)
            self._lanes.append(Lane(event.device, len(lanes), event.thread))
        self._busy_until[lane] = event.end_ns
        self._add(event.start_ns, event.end_ns, lane, place.layer, place.phase, self._number_of(event.name))

    def _lane_of(self, thread: int) -> int:
        if (lane := self._of_thread.get(thread)) is None:
            lane = self._of_thread[thread] = len(self._lanes)
            self._lanes.append(Lane("cpu", len(self._of_thread)))
        return lane

    def _number_of(self, name: str) -> int:
        return self._names.setdefault(name, len(self._names))

    def _add(self, start: int, end: int, lane: int, layer: int, phase: str, name: int) -> int:
        """Add a span and return its row; _NONE if there are too many spans."""
        row = len(self._ends)
        if row >= Spans.LIMIT:
            self._dropped += 1
            return _NONE
        for column, value in zip(self._columns.values(), (start, end, lane, layer, PHASES.index(phase), name)):
            column.append(value)
        return row

    def result(self) -> dict[str, Timeline]:
        """A timeline of the spans alone, with times in ns since the start of the session."""
        known = (self._start_ns, self._recording_start_ns, *self._columns["start_ns"][:1], 0)
        zero = next(start for start in known if start is not None)
        columns = {
            name: array("q", (time - zero for time in column)) if name.endswith("_ns") else column
            for name, column in self._columns.items()
        }
        marks = self._marks if self._from_first_mark else self._marks[1:]
        steps = tuple(mark - zero for mark in marks) if len(marks) > 1 else ()
        streams = Counter(device for device, _ in self._of_stream)
        lanes = tuple(lane if streams[lane.device] > 1 else lane._replace(stream=None) for lane in self._lanes)
        spans = Spans(lanes, tuple(self._names), columns, steps, self._dropped)
        return {"timeline": Timeline.of_spans(spans, self._rank)}
