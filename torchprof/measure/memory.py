"""Memory: peaks of calls and of the run, the live memory at the peak, and the kind of each block."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

from torchprof.attribute.events import Attributed, Kind, OpenRanges, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.measure.memory_blocks import (
    ACTIVATIONS,
    FEWEST_CALLS,
    GRADIENTS,
    INPUTS,
    NONE,
    OPTIMIZER_STATE,
    TEMPORARIES,
    Blocks,
    LiveBlocks,
    Stage,
)
from torchprof.run.groups import lists_by_key
from torchprof.run.layers import Layer, Layers
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import Held, Holder, Memory
from torchprof.run.torch_names import CASTS
from torchprof.run.words import BACKWARD, FORWARD, OPTIMIZER_RANGE, OUTSIDE, FrameKind

_OP = FrameKind.OP  # members of an enum are found slowly before Python 3.12


@dataclass(slots=True)
class _Range:
    """An interval with a peak: a call of a layer, with its ``stage`` and number; or a stretch of a layer's backward,
    without a stage. ``within``: the end of the node around a stretch. By device: ``base`` is the live memory at the
    start, and ``top`` the largest after that, if it was larger."""

    start_ns: int
    end_ns: float
    layer: int
    phase: str
    base: Mapping[str, int]
    stage: Stage | None = None
    call: int = NONE
    within: float = inf
    top: dict[str, int] = field(default_factory=dict)

    def note_live(self, device: str, live_bytes: int) -> None:
        if live_bytes > self.top.get(device, self.base.get(device, 0)):
            self.top[device] = live_bytes


_Samples = defaultdict[tuple[int, str, str], list[tuple[int, int]]]
"""(layer, phase, device) → the start and the peak of each range."""


def _leave(samples: _Samples, ranges: list[_Range]) -> None:
    """End the innermost range. Its peak also counts for the range around it."""
    inner = ranges.pop()
    for device in {**inner.base, **inner.top}:
        base = inner.base.get(device, 0)
        top = inner.top.get(device, base)
        if ranges:
            ranges[-1].note_live(device, top)
        if inner.layer >= 0:
            samples[inner.layer, inner.phase, device].append((inner.start_ns, top - base))


def _is_of_autocast(group: OpGroup, index: int) -> bool:
    """Whether an event of a group is a cast of autocast, or inside one: a cast with gradients, in an operator without
    gradients."""
    columns, parents, was_cast = group.columns, group.tree.parents, False
    while columns.sequence and index >= 0:
        number = group.first + index
        kind, has_gradients = columns.kinds[columns.number[number]], columns.sequence[number] >= 0
        if was_cast and not has_gradients:
            return True
        was_cast = has_gradients and kind.name in CASTS
        index = parents[index]
    return _is_range_of_autocast(group.outer, was_cast)


def _is_range_of_autocast(opened: Attributed | None, was_cast: bool = False) -> bool:
    """The same of a range. ``was_cast``: whether what is directly in it is a cast with gradients."""
    while opened is not None and opened.event.kind is Kind.OP:
        has_gradients = opened.event.sequence >= 0
        if was_cast and not has_gradients:
            return True
        was_cast = has_gradients and opened.event.name in CASTS
        opened = opened.outer
    return False


HolderOf = Callable[[Mapping[tuple[str, int], int]], "Holder | None"]
"""Finds what in Python keeps blocks, given the number of a call by device and address."""


class Allocations:
    """Observes memory events, and the calls, nodes and optimizer steps that they happen in.

    The kind of a block follows from when it was allocated and freed:

    - *activation*: allocated in a forward or recomputed call, and live when the outermost call ended: it was saved for
      backward, or returned. Also: allocated outside calls, and live when backward began (a loss). Also: allocated
      outside calls, after a call that made a graph, and freed by a backward pass.
    - *gradient*: allocated in a backward pass, and live when it ended. If a later pass frees it, it is an activation.
    - *optimizer state*: allocated in an optimizer's step, and live when the step ended.
    - *input*: allocated outside of all these, and live when the next call of a model began.
    - *weight cast*: made by a cast with gradients inside an operator without, in a call without any other operator with
      gradients, and live when it ended: autocast casts weights so, and keeps the casts until its context ends.
    - *parameter*: at the address of a parameter or buffer, and live at the end of the recording.
    - *temporary*: all others; *optimizer temporary* in an optimizer's step.

    A backward pass lasts from its first node to its last. A node after a forward op belongs to the next pass.

    Example, a training step: the batch is an input; what the model saves and returns, and the loss, are activations;
    then come gradients, and in the first step optimizer state. What an op frees before it returns is temporary.

    It has open ranges of its own: a stretch of backward is not an event, and lasts longer than the node that begins
    it. A memory event counts for the ranges of all threads.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rank: int = 0,
        parameters: frozenset[tuple[str, int]] = frozenset(),
        start_ns: int | None = None,
        before: Mapping[str, tuple[tuple[str, int], ...]] | None = None,
        with_timeline: bool = False,
        allocators: Mapping[str, tuple[tuple[str, int, int], ...]] | None = None,
        holder_of: HolderOf | None = None,
        others: Mapping[str, Holder | None] | None = None,
        live: LiveBlocks | None = None,
    ) -> None:
        """``parameters``: (device, address) of the model's parameters and buffers at the end. ``start_ns``: when the
        recording began, if no mark was recorded. ``before``: by device, (kind, bytes) of the model's live memory at the
        start; None if it was not measured. ``allocators``: by device, ``Memory.allocator``. ``holder_of``: finds
        what keeps blocks that stay. ``others``: by device, ``Memory.others``. ``live``: blocks that
        earlier cycles recorded."""
        self._allocators = allocators or {}
        self._holder_of, self._others = holder_of, others or {}
        self.live: dict[tuple[str, int], tuple[str, int]] = {**(live or {})}
        """After ``result``: the live blocks that were recorded in this cycle and before."""
        self._outermost: dict[Stage, int] = {}  # for each outermost forward call, the number of the first event in it
        self._rank = rank
        self._before = before
        self._with_timeline = with_timeline
        self._parameters = parameters
        self._lineages = [*map(Layers.of(layers).lineage, range(len(layers)))]
        self._recording_start_ns = start_ns
        self._start_ns: int | None = None
        self._live_bytes: dict[str, int] = {}  # by device, now
        self._peaks: dict[str, tuple[int, int, Place]] = {}  # by device: bytes, number of the event, its place
        self._samples: _Samples = defaultdict(list)
        self._leave = partial(_leave, self._samples)  # no bound method: its reference cycle would keep all blocks alive
        self._ranges: OpenRanges[_Range] = OpenRanges(self._leave)
        self._node_ends: dict[int, float] = {}  # by thread: the end of the outermost node
        self._calls: list[tuple[int, int, Stage]] = []  # forward calls: layer, start, the outermost call around
        self._no_graph_yet: Stage | None = None  # the outermost call, until an op in it makes a graph
        self._passes: list[Stage] = []
        self._in_pass = False
        self._nodes = Counter[tuple[int, str]]()  # of this pass, by layer and name
        self._optimizer = Stage(OPTIMIZER_STATE, 0, 0)
        self._between = Stage(TEMPORARIES, 0)
        self._blocks = Blocks()

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        for item in stream:
            yield item
            if isinstance(item, OpGroup):
                self._on_group(item)
            else:
                self._on_event(item)
        self._ranges.close_all()

    def _on_group(self, group: OpGroup) -> None:
        columns, first, sequences = group.columns, group.first, group.columns.sequence
        in_op = group.place.kind == _OP
        has_casts = False
        if self._no_graph_yet is not None and sequences and (in_op or max(sequences[first : group.after]) >= 0):
            has_casts = True  # perhaps, until an operator with gradients is found
            for index in range(first, group.after):
                if sequences[index] < 0 or columns.kinds[columns.number[index]].kind is not Kind.OP:
                    continue
                if not _is_of_autocast(group, index - first):
                    self._on_graph(columns.start[index])
                    has_casts = False
                    break
        for index, (start, path, device, address, nbytes) in zip(group.tree.memory, group.memory()):
            self._on_memory(start, group.thread, group.place, path > 0 or in_op, device, address, nbytes)
            if nbytes > 0 and address:
                if has_casts and _is_of_autocast(group, index):
                    self._blocks.casts.add(self._blocks.live[device, address])
                if group.place.layer == OUTSIDE:
                    around = group.tree.parents[index]
                    is_inside = around >= 0  # else directly in the range around the group, which may be an operator
                    name = columns.kinds[columns.number[first + around]].name if is_inside else group.place.name
                    self._blocks.note_joined(name, device, address)

    def _on_event(self, item: Attributed) -> None:
        event, place = item.event, item.place
        if (kind := event.kind) is Kind.OP:
            # A sequence number: gradients are enabled.
            if self._no_graph_yet is not None and event.sequence >= 0 and not _is_range_of_autocast(item):
                self._on_graph(event.start_ns)
        elif kind is Kind.MEMORY:
            in_op = place.frame is not None and place.frame.kind == _OP
            self._on_memory(event.start_ns, event.thread, place, in_op, event.device, event.correlation, event.nbytes)
            if event.nbytes > 0 and event.correlation:
                if self._no_graph_yet is not None and _is_range_of_autocast(item.outer):
                    self._blocks.casts.add(self._blocks.live[event.device, event.correlation])
                if place.layer == OUTSIDE:
                    self._blocks.note_joined(place.name, event.device, event.correlation)
        elif kind is Kind.NODE or kind is Kind.BACKWARD_FUNCTION:
            if place.is_node:
                self._on_node(item)
        elif kind is Kind.LABEL:
            if item.calls:
                self._on_call(item)
        elif kind is Kind.USER_LABEL:
            if event.name.startswith(OPTIMIZER_RANGE) and event.end_ns > self._optimizer.end_ns:
                self._on_optimizer(item)
        elif kind is Kind.STEP and self._start_ns is None:
            self._start_ns = event.start_ns

    # Events

    def _on_memory(
        self, time: int, thread: int, place: Place, in_op: bool, device: str, address: int, size: int
    ) -> None:
        """Memory is allocated or freed. ``in_op``: whether by an op, and not directly in a range."""
        if self._in_pass and place.phase == FORWARD and in_op:
            self._end_pass()  # frees of the engine between two nodes do not count: they are in no op
        blocks = self._blocks
        block = blocks.live.pop((device, address), NONE) if address else NONE
        self.live.pop((device, address), None)
        if size > 0 and block != NONE:
            self._live_bytes[device] -= blocks.free_before_reuse(time, device, block)
        number = len(blocks.times)
        live_bytes = self._live_bytes[device] = self._live_bytes.get(device, 0) + size
        if live_bytes > 0 and (device not in self._peaks or live_bytes > self._peaks[device][0]):
            self._peaks[device] = live_bytes, number, place
        for ranges_on, ranges in self._ranges.by_thread.items():
            if ranges and ranges[-1].end_ns <= time:
                self._ranges.at(ranges_on, time)
            if ranges and size > 0:
                ranges[-1].note_live(device, live_bytes)
        if size > 0 and address:
            stage, call = self._stage_of_block(place, time, self._ranges.by_thread.get(thread))
            blocks.allocate(time, size, device, address, place=place, stage=stage, call=call)
        else:
            blocks.add_event(time, size, device, block)
            if block != NONE:
                blocks.died[block] = number
            elif size < 0 and not address:
                blocks.frees_without_address[device, -size].append(number)

    def _stage_of_block(self, place: Place, time: int, ranges: list[_Range] | None) -> tuple[Stage, int]:
        """The stage in which a block is allocated, and the number of the call. ``ranges``: those open on its thread."""
        inner = ranges[-1] if ranges else None
        stage, call = self._between, NONE
        if inner is not None and inner.stage is not None:
            stage, call = inner.stage, inner.call
        elif self._passes and (self._in_pass or place.phase == BACKWARD):
            stage = self._passes[-1]
        if time < self._optimizer.end_ns:
            started = stage.start_ns if inner is None else inner.start_ns
            # Some optimizers call the model: blocks of this call, its loss and its backward are not optimizer state.
            if started <= self._optimizer.start_ns or (stage is self._between and not stage.has_graph):
                return self._optimizer, NONE
        return stage, call

    def _on_graph(self, time: int) -> None:
        """An op ran with gradients enabled."""
        call, self._no_graph_yet = self._no_graph_yet, None
        if call is not None and time < call.end_ns:
            call.has_graph = self._between.has_graph = True

    def _on_optimizer(self, item: Attributed) -> None:
        if item.place.phase == FORWARD:  # otherwise it runs inside backward, for a weight whose gradient is ready
            self._end_pass()
        self._optimizer = Stage(OPTIMIZER_STATE, item.event.start_ns, item.event.end_ns)

    def _on_call(self, item: Attributed) -> None:
        event, place, _, _, ns, _ = item
        start, end = event.start_ns, event.start_ns + ns
        if place.phase == FORWARD:
            self._end_pass()
        ranges = self._ranges.at(event.thread, start)
        stage = ranges[-1].stage if ranges else None
        if stage is None:
            stage = Stage(ACTIVATIONS, start, end)
            if place.phase == FORWARD:
                self._begin_next(start, INPUTS)
                self._no_graph_yet = stage
                self._outermost[stage] = len(self._blocks.times)
        call = NONE
        if place.phase == FORWARD:
            call = len(self._calls)
            self._calls.append((place.layer, start, stage))
        ranges.append(_Range(start, end, place.layer, place.phase, dict(self._live_bytes), stage, call))

    def _on_node(self, item: Attributed) -> None:
        event, place, around, _, ns, _ = item
        start, end, thread = event.start_ns, event.start_ns + ns, event.thread
        ranges = self._ranges.at(thread, start)
        if not self._in_pass:
            self._in_pass = True
            self._begin_next(start, ACTIVATIONS)
            self._passes.append(Stage(GRADIENTS, start, end, has_graph=True))
            self._nodes.clear()
        self._nodes[place.layer, event.name] += 1
        self._passes[-1].graphs = max(self._passes[-1].graphs, self._nodes[place.layer, event.name])
        is_inner = around is not None and around.phase != FORWARD and (not around.is_engine or around.node is not None)
        if is_inner:  # a backward pass inside a node, as with checkpoints
            within = self._node_ends.get(thread, inf)
        else:
            within = inf
            self._node_ends[thread] = end
            self._passes[-1].end_ns = max(self._passes[-1].end_ns, end)
            if ranges and ranges[-1].stage is None and ranges[-1].layer == place.layer:
                return  # most nodes continue the stretch of the node before
        self._continue_stretches(ranges, place.layer, start, within)

    def _continue_stretches(self, ranges: list[_Range], node_layer: int, start: int, within: float) -> None:
        """A node begins: end the stretches that it does not continue, and begin those that are missing. ``ranges``: all
        that are open on its thread. ``within``: the end of the node around it.

        Example: stretches of block and block.conv are open. A node of block.norm ends that of conv, and begins its own.
        """
        first = len(ranges)  # index of the first stretch that this node may continue
        while first and ranges[first - 1].stage is None and ranges[first - 1].within == within:
            first -= 1
        limit = min(within, ranges[first - 1].end_ns) if first else within
        open_already = {open_range.layer for open_range in ranges[:first] if open_range.stage is None}
        of_node = self._lineages[node_layer] if node_layer >= 0 else ()
        lineage = [layer for layer in of_node if layer not in open_already]
        same = 0
        while same < len(lineage) and first + same < len(ranges) and ranges[first + same].layer == lineage[same]:
            same += 1
        while len(ranges) > first + same:
            self._leave(ranges)
        for layer in lineage[same:]:
            ranges.append(_Range(start, limit, layer, BACKWARD, dict(self._live_bytes), within=within))

    def _begin_next(self, time: int, keeps: str) -> None:
        """A call of a model or a backward pass begins, and uses the live blocks allocated since the last one: they are
        of the kind ``keeps``."""
        self._between.end_ns = time
        self._between.keeps = keeps
        self._between = Stage(TEMPORARIES, time, has_graph=self._between.has_graph and keeps == INPUTS)

    def _end_pass(self) -> None:
        """Work that is not backward begins."""
        if self._in_pass:
            self._in_pass = False
            for ranges in self._ranges.by_thread.values():
                while ranges and ranges[-1].stage is None:
                    self._leave(ranges)

    # Results

    def result(self) -> dict[str, Any]:
        """The peak of each device with the live memory at that time, peaks and saved bytes of calls, the timeline. Σ
        ``held`` is the peak: the kind "unknown" has the blocks without an address, and as negative bytes the blocks
        that were allocated before the start and freed before the peak."""
        ends = self._blocks.ends()
        kinds = self._blocks.kinds(ends, self._passes, self._parameters)
        for address, block in self._blocks.live.items():
            self.live[address] = kinds[block], self._blocks.sizes[self._blocks.born[block]]
        devices = sorted({*self._live_bytes, *(self._before or ())})
        memory = tuple(self._memory_on(device, kinds) for device in devices)
        samples = {
            SampleKey(layer, phase, self._rank, device, "peak_bytes"): Spread.of(values)
            for (layer, phase, device), values in sorted(self._samples.items())
        }
        for device, (peak, index, place) in sorted(self._peaks.items()):
            key = SampleKey(place.layer, place.phase, self._rank, device, "device_peak_bytes")
            samples[key] = Spread.of([(self._blocks.times[index], peak)])
        samples.update(self._saved(ends))
        timeline = {"timeline": self._blocks.timeline(kinds, self._zero, self._rank)} if self._with_timeline else {}
        return {"memory": memory, "samples": samples, **timeline}

    def _memory_on(self, device: str, kinds: Sequence[str]) -> Memory:
        before = None if self._before is None else self._before.get(device, ())
        memory = Memory(device, self._rank, before=before, allocator=self._allocators.get(device, ()))
        memory = replace(memory, others=self._others.get(device))
        if device not in self._peaks:
            return memory
        peak, index, _ = self._peaks[device]
        held = self._blocks.live_at(index, device, kinds)
        if rest := peak - sum(nbytes for nbytes, _ in held.values()):
            held[OUTSIDE, FORWARD, "unknown"][0] = rest
        largest = sorted((Held(*key, *value) for key, value in held.items()), key=lambda row: (-row.nbytes, row))
        peak_at_ns = self._blocks.times[index] - self._zero
        memory = replace(memory, peak_bytes=peak, peak_ns=peak_at_ns, held=tuple(largest))
        if len(self._outermost) < FEWEST_CALLS or not self._blocks.places:
            return memory
        grown = self._blocks.growth(device, kinds, self._outermost, self._passes)
        stay = {block for _, blocks in grown for block in blocks}
        starts = [*self._outermost.values()]
        calls = {
            address: bisect_right(starts, self._blocks.born[block])
            for address, block in self._blocks.live.items()
            if block in stay
        }
        holder = self._holder_of(calls) if calls and self._holder_of else None
        return replace(memory, growth=tuple(growth for growth, _ in grown), holder=holder)

    @property
    def _zero(self) -> int:
        """When the session began, on the clock of the events."""
        known = (self._start_ns, self._recording_start_ns, *self._blocks.times[:1], 0)
        return next(start for start in known if start is not None)

    def _saved(self, ends: Sequence[float]) -> Iterator[tuple[SampleKey, Spread]]:
        """The bytes that each forward call saved for backward. ``ends``: when each block was freed."""
        outermost_calls = [stage for _, _, stage in self._calls]
        saved_bytes = self._blocks.saved_by(outermost_calls, ends, self._passes)
        for device, of_calls in saved_bytes.items():
            values = lists_by_key(
                (layer, (start, nbytes)) for (layer, start, _), nbytes in zip(self._calls, of_calls) if layer >= 0
            )
            for layer, calls in sorted(values.items()):
                yield SampleKey(layer, FORWARD, self._rank, device, "kept_bytes"), Spread.of(calls)
