"""Memory: peaks of calls and of the run, the live memory at the peak, and the kind of each block."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import inf
from typing import Any

from torchprof.attribute.events import Attributed, Kind, OpenRanges, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.run.layers import Layer, Layers
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.timeline import KINDS, Held, Memory, Timeline
from torchprof.run.words import BACKWARD, FORWARD, OPTIMIZER_RANGE, OUTSIDE, PHASES, FrameKind

PARAMETERS, GRADIENTS, ACTIVATIONS, OPTIMIZER_STATE, INPUTS, TEMPORARIES = KINDS
_OP = FrameKind.OP  # members of an enum are found slowly before Python 3.12
_NONE = -1


@dataclass(slots=True, eq=False)
class _Stage:
    """The stage of a loop in which a block was allocated: a call of a model, a backward pass, an optimizer's step, or
    the time between these. ``keeps``: the kind of its blocks that are live when it ends. ``has_graph``: whether it made
    an autograd graph: then its blocks that a later backward pass frees were part of the graph."""

    keeps: str
    start_ns: int
    end_ns: float = inf
    has_graph: bool = False


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
    stage: _Stage | None = None
    call: int = _NONE
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


class Allocations:
    """Observes memory events, and the calls, nodes and optimizer steps that they happen in.

    The kind of a block follows from when it was allocated and freed:

    - *activation*: allocated in a forward or recomputed call, and live when the outermost call ended: it was saved for
      backward, or returned. Also: allocated outside calls, and live when backward began (a loss). Also: allocated
      outside calls, after a call that made a graph, and freed by a backward pass.
    - *gradient*: allocated in a backward pass, and live when the pass ended. If a later pass freed it, it is an
      activation.
    - *optimizer state*: allocated in an optimizer's step, and live when the step ended.
    - *input*: allocated outside of all these, and live when the next call of a model began.
    - *parameter*: at the address of a parameter or buffer, and live at the end of the recording.
    - *temporary*: all others.

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
    ) -> None:
        """``parameters``: (device, address) of the model's parameters and buffers at the end. ``start_ns``: when the
        recording began, if no mark was recorded. ``before``: by device, (kind, bytes) of the model's live memory at the
        start; None if it was not measured. ``allocators``: by device, ``Memory.allocator``."""
        self._allocators = allocators or {}
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
        self._calls: list[tuple[int, int, _Stage]] = []  # forward calls: layer, start, the outermost call around
        self._no_graph_yet: _Stage | None = None  # the outermost call, until an op in it makes a graph
        self._passes: list[_Stage] = []
        self._in_pass = False
        self._optimizer = _Stage(OPTIMIZER_STATE, 0, 0)
        self._between = _Stage(TEMPORARIES, 0)
        # One entry for each memory event.
        self._times = array("q")
        self._sizes = array("q")
        self._devices: list[str] = []
        self._blocks = array("q")
        # One entry for each block. ``_born`` and ``_died``: the numbers of its events.
        self._places: list[Place] = []
        self._stages: list[_Stage] = []
        self._call_of = array("q")
        self._born = array("q")
        self._died = array("q")
        self._live_blocks: dict[tuple[str, int], int] = {}  # by device and address
        # By device and bytes: the numbers of the frees of which only these are known.
        self._frees_without_address: defaultdict[tuple[str, int], list[int]] = defaultdict(list)

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        for item in stream:
            yield item
            if isinstance(item, OpGroup):
                self._on_group(item)
            else:
                self._on_event(item)
        self._ranges.close_all()

    def _on_group(self, group: OpGroup) -> None:
        columns, first = group.columns, group.first
        if self._no_graph_yet is not None and columns.sequence:
            for index in range(first, group.after):
                if columns.sequence[index] >= 0 and columns.kinds[columns.number[index]].kind is Kind.OP:
                    self._on_graph(columns.start[index])
                    break
        in_op = group.place.kind == _OP
        for start, path, device, address, nbytes in group.memory():
            self._on_memory(start, group.thread, group.place, path > 0 or in_op, device, address, nbytes)

    def _on_event(self, item: Attributed) -> None:
        event, place = item.event, item.place
        kind = event.kind
        if kind is Kind.OP:
            if self._no_graph_yet is not None and event.sequence >= 0:  # a sequence number: gradients are enabled
                self._on_graph(event.start_ns)
        elif kind is Kind.MEMORY:
            in_op = place.frame is not None and place.frame.kind == _OP
            self._on_memory(event.start_ns, event.thread, place, in_op, event.device, event.correlation, event.nbytes)
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
        block = self._live_blocks.pop((device, address), _NONE) if address else _NONE
        if size > 0 and block != _NONE:
            self._on_reuse(time, device, block)
        number = len(self._times)
        live_bytes = self._live_bytes[device] = self._live_bytes.get(device, 0) + size
        if live_bytes > 0 and (device not in self._peaks or live_bytes > self._peaks[device][0]):
            self._peaks[device] = live_bytes, number, place
        for ranges_on, ranges in self._ranges.by_thread.items():
            if ranges and ranges[-1].end_ns <= time:
                self._ranges.at(ranges_on, time)
            if ranges and size > 0:
                ranges[-1].note_live(device, live_bytes)
        if size > 0 and address:
            block = self._live_blocks[device, address] = len(self._places)
            self._new_block(place, number, time, self._ranges.by_thread.get(thread))
        elif block != _NONE:
            self._died[block] = number
        elif size < 0 and not address:
            self._frees_without_address[device, -size].append(number)
        self._add_event(time, size, device, block)

    def _on_reuse(self, time: int, device: str, block: int) -> None:
        """The address of a block is used again: it was freed before. Either the address of the free is unknown, as of
        some on CUDA; or the free was not recorded: the profiler does not observe all threads."""
        nbytes = self._sizes[self._born[block]]
        frees = self._frees_without_address[device, nbytes]
        first_later = bisect_right(frees, self._born[block])
        if first_later < len(frees):
            self._died[block] = frees.pop(first_later)
            return
        self._live_bytes[device] -= nbytes
        self._died[block] = len(self._times)
        self._add_event(time, -nbytes, device, block)

    def _add_event(self, time: int, size: int, device: str, block: int) -> None:
        self._times.append(time)
        self._sizes.append(size)
        self._devices.append(device)
        self._blocks.append(block)

    def _new_block(self, place: Place, number: int, time: int, ranges: list[_Range] | None) -> None:
        inner = ranges[-1] if ranges else None
        stage, call = self._between, _NONE
        if inner is not None and inner.stage is not None:
            stage, call = inner.stage, inner.call
        elif self._passes and (self._in_pass or place.phase == BACKWARD):
            stage = self._passes[-1]
        if time < self._optimizer.end_ns:
            started = stage.start_ns if inner is None else inner.start_ns
            # Some optimizers call the model: blocks of this call, its loss and its backward are not optimizer state.
            if started <= self._optimizer.start_ns or (stage is self._between and not stage.has_graph):
                stage, call = self._optimizer, _NONE
        self._places.append(place)
        self._stages.append(stage)
        self._call_of.append(call)
        self._born.append(number)
        self._died.append(_NONE)

    def _on_graph(self, time: int) -> None:
        """An op ran with gradients enabled."""
        call, self._no_graph_yet = self._no_graph_yet, None
        if call is not None and time < call.end_ns:
            call.has_graph = self._between.has_graph = True

    def _on_optimizer(self, item: Attributed) -> None:
        if item.place.phase == FORWARD:  # otherwise it runs inside backward, for a weight whose gradient is ready
            self._end_pass()
        self._optimizer = _Stage(OPTIMIZER_STATE, item.event.start_ns, item.event.end_ns)

    def _on_call(self, item: Attributed) -> None:
        event, place, _, _, ns, _ = item
        start, end = event.start_ns, event.start_ns + ns
        if place.phase == FORWARD:
            self._end_pass()
        ranges = self._ranges.at(event.thread, start)
        stage = ranges[-1].stage if ranges else None
        if stage is None:
            stage = _Stage(ACTIVATIONS, start, end)
            if place.phase == FORWARD:
                self._begin_next(start, INPUTS)
                self._no_graph_yet = stage
        call = _NONE
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
            self._passes.append(_Stage(GRADIENTS, start, end, has_graph=True))
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

        Example: the stretches of Model, Model.block and Model.block.conv are open. A node of Model.block.norm ends that
        of conv and begins one of norm.
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
        self._between = _Stage(TEMPORARIES, time, has_graph=self._between.has_graph and keeps == INPUTS)

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
        ends = [self._times[died] if died != _NONE else inf for died in self._died]
        kinds = self._kinds(ends)
        devices = sorted({*self._live_bytes, *(self._before or ())})
        memory = tuple(self._memory_on(device, kinds) for device in devices)
        samples = {
            SampleKey(layer, phase, self._rank, device, "peak_bytes"): Spread.of(values)
            for (layer, phase, device), values in sorted(self._samples.items())
        }
        for device, (peak, index, place) in sorted(self._peaks.items()):
            key = SampleKey(place.layer, place.phase, self._rank, device, "device_peak_bytes")
            samples[key] = Spread.of([(self._times[index], peak)])
        samples.update(self._saved(ends))
        timeline = {"timeline": self._timeline(kinds)} if self._with_timeline else {}
        return {"memory": memory, "samples": samples, **timeline}

    def _kinds(self, ends: Sequence[float]) -> list[str]:
        """The kind of each block. ``ends``: when it was freed."""
        starts = [backward.start_ns for backward in self._passes]
        kinds = []
        for stage, end in zip(self._stages, ends):
            if end < stage.end_ns:
                kinds.append(TEMPORARIES)
            elif stage.has_graph and self._in_a_pass(starts, end):
                kinds.append(ACTIVATIONS)
            else:
                kinds.append(stage.keeps)
        for address, block in self._live_blocks.items():
            if address in self._parameters:
                kinds[block] = PARAMETERS
        return kinds

    def _in_a_pass(self, starts: Sequence[int], time: float) -> bool:
        index = bisect_right(starts, time) - 1
        return index >= 0 and time < self._passes[index].end_ns

    def _memory_on(self, device: str, kinds: Sequence[str]) -> Memory:
        before = None if self._before is None else self._before.get(device, ())
        allocator = self._allocators.get(device, ())
        if device not in self._peaks:
            return Memory(device, self._rank, before=before, allocator=allocator)
        peak, index, _ = self._peaks[device]
        held: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])  # bytes, number of blocks
        rest = peak
        for block, (born, died) in enumerate(zip(self._born, self._died)):
            if born <= index and (died > index or died == _NONE) and self._devices[born] == device:
                place = self._places[block]
                of_kind = held[place.layer, place.phase, kinds[block]]
                of_kind[0] += self._sizes[born]
                of_kind[1] += 1
                rest -= self._sizes[born]
        if rest:
            held[OUTSIDE, FORWARD, "unknown"][0] = rest
        largest = sorted((Held(*key, *value) for key, value in held.items()), key=lambda row: (-row.nbytes, row))
        return Memory(device, self._rank, peak, self._times[index] - self._zero, tuple(largest), before, allocator)

    @property
    def _zero(self) -> int:
        """When the session began, on the clock of the events."""
        known = (self._start_ns, self._recording_start_ns, self._times[0])
        return next(start for start in known if start is not None)

    def _saved(self, ends: Sequence[float]) -> Iterator[tuple[SampleKey, Spread]]:
        """The bytes that each forward call saved for backward. ``ends``: when each block was freed.

        These are the blocks of the call that are live when the first backward pass after the outermost call begins. If
        no block of the outermost call is live then, its graph was dropped: the blocks count that are live when it ends.
        """
        starts = [backward.start_ns for backward in self._passes]
        needed_at: dict[_Stage, float] = {}  # outermost call → when the next backward pass begins
        for stage in {stage for _, _, stage in self._calls if stage.has_graph}:
            index = bisect_left(starts, stage.end_ns)
            needed_at[stage] = starts[index] if index < len(starts) else inf
        keep_graph = {stage for stage, end in zip(self._stages, ends) if stage in needed_at and end >= needed_at[stage]}
        saved_bytes = {device: [0] * len(self._calls) for device in sorted(self._live_bytes)}
        for stage, call, born, end in zip(self._stages, self._call_of, self._born, ends):
            if call == _NONE or stage not in needed_at:
                continue
            if end >= (needed_at[stage] if stage in keep_graph else stage.end_ns):
                saved_bytes[self._devices[born]][call] += self._sizes[born]
        for device, of_calls in saved_bytes.items():
            values: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)
            for (layer, start, _), nbytes in zip(self._calls, of_calls):
                if layer >= 0:
                    values[layer].append((start, nbytes))
            for layer, calls in sorted(values.items()):
                yield SampleKey(layer, FORWARD, self._rank, device, "kept_bytes"), Spread.of(calls)

    def _timeline(self, kinds: Sequence[str]) -> Timeline:
        devices = {device: number for number, device in enumerate(sorted(self._live_bytes))}
        columns = {name: array("q") for name in Timeline.COLUMNS}
        limit = Timeline.LIMIT
        for time, size, device, block in islice(zip(self._times, self._sizes, self._devices, self._blocks), limit):
            place = self._places[block] if block != _NONE else None
            columns["time_ns"].append(time - self._zero)
            columns["nbytes"].append(size)
            columns["device"].append(devices[device])
            columns["layer"].append(place.layer if place else OUTSIDE)
            columns["phase"].append(PHASES.index(place.phase if place else FORWARD))
            columns["kind"].append(KINDS.index(kinds[block]) if place else _NONE)
        return Timeline(tuple(devices), columns, max(0, len(self._times) - limit), rank=self._rank)
