"""The time of each step of a loop: by layer and phase; outside all layers by purpose (data, optimizer, …)."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, repeat
from operator import add
from typing import Any

from torchprof.attribute.events import Attributed, Event, Kind, Place
from torchprof.attribute.op_groups import OpGroup
from torchprof.measure.recording import OpenStep, Pieces
from torchprof.run.layers import Layer, Layers
from torchprof.run.measures import SampleKey, spreads_at
from torchprof.run.torch_names import PURPOSES, WITHIN_DEVICES, purpose_of
from torchprof.run.words import BEFORE, FORWARD, OUTSIDE, ZERO_GRAD

_PARTS = tuple(f"step_{part}_ns" for part in (*PURPOSES, "overlap"))
DATA_NS, OPTIMIZER_NS, COPY_NS, WAIT_NS, GC_NS, BACKWARD_NS, OTHER_NS, *_, GAP_NS, OVERLAP_NS = _PARTS
"""The parts of a step outside all layers, by purpose; see ``SampleKey``."""
_IN_RANGES = (COPY_NS, WAIT_NS)
"""The parts that also count inside layers that are only ranges of a trace: such a range may be around anything."""
RECORDING_END = Place(-1, OUTSIDE, FORWARD, None, (), None, None, 0)
"""The place of the mark at the end of a recording that ends inside a step. No other place is this object."""
_LOOP_END = Place(-1, OUTSIDE, FORWARD, None, (), None, None, 0)
"""The place of the other marks that were not recorded."""


class Steps:
    """Observes all events: the time of each step, from the end of one STEP mark to the end of the next. A range that is
    open at a mark is split there. A kernel counts in the step that launched it. Events after the last mark are in none.
    """

    def __init__(
        self,
        layers: Sequence[Layer],
        rank: int = 0,
        from_first_mark: bool = True,
        is_cycle: bool = False,
        before: OpenStep | None = None,
    ) -> None:
        """``from_first_mark``: whether the session begins with a step. ``is_cycle``: whether it is a cycle of a
        recording without gaps, whose first and last marks are inside steps. ``before``: the step open at its start."""
        self._from_first_mark = from_first_mark
        self._is_cycle = is_cycle
        self._before = before
        self._layers = Layers.of(layers)
        self._rank = rank
        self._starts: list[int] = []  # of the steps, and the end of the last step
        self._cpu: dict[tuple[int, str], array[int]] = {}  # (layer, phase) → self time, by step
        self._outside: list[defaultdict[str, int]] = []  # by step: part → time
        self._device: defaultdict[str, dict[tuple[int, str], array[int]]] = defaultdict(dict)
        self._device_outside: dict[tuple[str, str], array[int]] = {}  # (part, device) → time, by step
        # Whether the layers are only ranges of a trace without a model.
        self._are_ranges = not any(layer.kind for layer in layers if len(layer.path) == 1)
        self._parts = _Parts(self._are_ranges)

    @property
    def count(self) -> int:
        return max(len(self._starts) - 1, 0)

    def observe(self, stream: Iterable[Attributed | OpGroup]) -> Iterator[Attributed | OpGroup]:
        """Pass all events on. It is one loop, because a call for each event would take longer than the additions."""
        self_ns: defaultdict[Place, int] = defaultdict(int)  # of the current step, by place in ``alike``
        last: dict[int, Attributed] = {}  # by thread: the range that began last
        bare: set[Place] = set()  # the user's labels outside all layers, and waits: self time without a purpose
        explained = 0  # time of the current step in which any thread is inside a range that is not bare
        until = 0  # the end of the last of these ranges
        covered = covered_until = 0  # the same for all ranges
        launched: dict[int, int] = {}  # correlation of an op → its step
        copies: dict[int, tuple[int, Place, int]] = {}  # correlation of an op → step, place and time of its copy
        step, kernel, user_label = Kind.STEP, Kind.KERNEL, Kind.USER_LABEL
        memory, stopped, sample, wait = Kind.MEMORY, Kind.STOPPED, Kind.SAMPLE, Kind.WAIT
        parts, alike = self._parts, _Alike(self._parts)
        closure = _Closure(parts)
        in_optimizer = 0  # the end of the latest range of an optimizer's step

        for given in stream:
            yield given
            if isinstance(given, OpGroup):
                # In a layer, all are alike: what they take from the range around them, they give to the same sum.
                is_alike = given.place.layer >= 0 and given.outer is not None and not self._are_ranges
                if is_alike or given.start_ns >= in_optimizer or closure.note_group(given):
                    if given.outer is None or given.place in bare:
                        for start, end in given.outermost():
                            if end > until:
                                explained += end - max(until, start)
                                until = end
                            if given.outer is None and end > covered_until:
                                covered += end - max(covered_until, start)
                                covered_until = end
                    self._note_launches(given, launched)
                    if not is_alike:
                        self._add_group(given, alike, self_ns, copies)
                    if (innermost := given.outer if is_alike else given.last_item()) is not None:
                        last[given.thread] = innermost
                    continue
            for item in given.items() if isinstance(given, OpGroup) else (given,):
                event, place, around, _, ns, outer = item
                kind, _, start, _, thread, _, _, correlation, _, _, _ = event
                if kind is kernel:
                    self._note_kernel(item, launched, copies)
                elif kind is step:
                    time = event.end_ns
                    beyond = _beyond(time, last.values(), alike)
                    rest, covered_rest = max(until - time, 0), max(covered_until - time, 0)
                    if self._starts:
                        for inside, ns_beyond in beyond.items():
                            self_ns[inside] -= ns_beyond
                        self._end_step(time, self_ns, bare, explained - rest, covered - covered_rest)
                        closure.move(self._outside[-1])
                    if self._from_first_mark:
                        self._starts.append(time)
                    self._from_first_mark = True
                    self_ns, explained, covered = beyond, rest, covered_rest
                elif kind is not memory and kind is not stopped and kind is not sample:
                    end = start + ns
                    part = parts[place] if kind is user_label or kind is wait else OTHER_NS
                    if start < in_optimizer:
                        closure.note(item)
                    elif part == OPTIMIZER_NS:
                        in_optimizer = end
                        closure.begin(place, start)
                    if part == GAP_NS:
                        bare.add(place)
                    elif end > until and (around is None or around in bare):
                        explained += end - max(until, start)
                        until = end
                    taken_by = alike[place]
                    if around is None:
                        self_ns[taken_by] += ns
                        if end > covered_until:
                            covered += end - max(covered_until, start)
                            covered_until = end
                    elif (taken_from := alike[around]) is not taken_by:
                        self_ns[taken_by] += ns
                        self_ns[taken_from] -= ns
                    if correlation:
                        launched[correlation] = len(self._starts) - 1
                    # Device work of a copy refers to the op around the runtime call, or to the runtime call itself.
                    if correlation <= 0 and parts[place] == COPY_NS:
                        by = correlation or (outer.event.correlation if outer is not None else 0)
                        if by:
                            copies[by] = len(self._starts) - 1, place, ns
                    last[thread] = item

    def _note_launches(self, group: OpGroup, launched: dict[int, int]) -> None:
        if correlations := group.columns.correlation:
            launched.update(zip(correlations[group.first : group.after], repeat(len(self._starts) - 1)))
            launched.pop(0, None)

    def _add_group(
        self,
        group: OpGroup,
        alike: Mapping[Place, Place],
        self_ns: defaultdict[Place, int],
        copies: dict[int, tuple[int, Place, int]],
    ) -> None:
        """Add the times of a group to ``self_ns``, path by path, and note its copies."""
        step, first, correlations = len(self._starts) - 1, group.first, group.columns.correlation
        places = group.places()
        sums = zip(places, group.tree.self_ns(group.ns))
        for place, ns in islice(sums, group.outer is None, None):  # the first takes from the range around the group
            self_ns[alike[place]] += ns
        if not any(self._parts[place] == COPY_NS for place in places):
            return
        for index, (path, parent) in enumerate(zip(group.tree.path_of, group.tree.parents)):
            own = correlations[first + index] if correlations else 0
            if own > 0 or self._parts[places[path]] != COPY_NS:
                continue
            # Device work of a copy refers to the op around the runtime call, or to the runtime call itself.
            around = 0 if group.outer is None else group.outer.event.correlation
            if parent >= 0:
                around = correlations[first + parent] if correlations else 0
            if by := own or around:
                copies[by] = step, places[path], group.ns[index]

    def _end_step(self, end: int, self_ns: dict[Place, int], bare: set[Place], explained: int, covered: int) -> None:
        lasted = end - self._starts[-1]
        own_ns: defaultdict[tuple[int, str], int] = defaultdict(int)
        own_ns[OUTSIDE, FORWARD] = max(lasted - covered, 0)  # no range was open
        parts: defaultdict[str, int] = defaultdict(int)
        overlap = -explained
        for place, ns in self_ns.items():
            own_ns[place.layer, place.phase] += ns
            if place in bare:
                continue
            overlap += ns
            if place.layer == OUTSIDE:
                parts[self._parts[place]] += ns
            elif (part := self._parts[place]) in _IN_RANGES:  # counts both in the layer and as this part
                parts[part] += ns
                overlap += ns
        parts[OVERLAP_NS] += overlap
        parts[GAP_NS] = lasted - explained
        for key, ns in own_ns.items():
            if (column := self._cpu.get(key)) is None:
                column = self._cpu[key] = array("q")
            if len(column) < len(self._outside):
                column.frombytes(bytes(8 * (len(self._outside) - len(column))))  # 0 in the steps before
            column.append(ns)
        self._outside.append(parts)

    def _note_kernel(
        self, item: Attributed, launched: dict[int, int], copies: dict[int, tuple[int, Place, int]]
    ) -> None:
        event, place, _, _, ns, _ = item
        if event.correlation == BEFORE:
            return  # launched before the first step, though it may run in a later one
        step = launched.get(event.correlation)
        if step is None:  # its launch was not recorded: it counts in the step in which it ran
            step = bisect_right(self._starts, event.start_ns) - 1
        if not 0 <= step < self.count:
            return
        part = self._parts[place]
        parts = (part,) if place.layer == OUTSIDE else (part, OVERLAP_NS) if part in _IN_RANGES else ()
        counts_in: list[tuple[dict[Any, array[int]], Any]] = [
            (self._device[event.device], (place.layer, place.phase)),
            *((self._device_outside, (name, event.device)) for name in parts),
        ]
        for sums, key in counts_in:
            if key not in sums:
                sums[key] = array("q", bytes(8 * self.count))
            sums[key][step] += ns
        if event.correlation in copies and WITHIN_DEVICES.fullmatch(event.name):
            step, copying, took = copies.pop(event.correlation)
            self._outside[step][COPY_NS] -= took
            if copying.layer == OUTSIDE:
                self._outside[step][OTHER_NS if copying.outer is None else self._parts[copying.outer]] += took
            else:
                self._outside[step][OVERLAP_NS] -= took

    def result(self) -> dict[str, Any]:
        """The samples, with one value for each step; how many steps there are; and for a cycle, the part of the step
        that is open at its end."""
        if not self.count:
            return {}
        values: Mapping[SampleKey, Sequence[int]] = dict(self._values())
        starts, of_open = self._starts[: self.count], {}
        if self._is_cycle:
            pieces = Pieces(self.count, self._before is not None)
            values, last = pieces.cut(values, self._before.samples if self._before else {})
            starts = self._starts[pieces.whole]
            of_open = {"open": {"samples": last}} if pieces.has_open else {}
        spread_of = spreads_at(starts) if starts else None
        samples = {key: spread_of(of_key) for key, of_key in values.items()} if spread_of else {}
        return {"samples": samples, "steps": len(starts), **of_open}

    def _values(self) -> Iterator[tuple[SampleKey, Sequence[int]]]:
        """By sample, a value for each step."""

        def key(measure: str, layer: int = OUTSIDE, phase: str = FORWARD, device: str = "cpu") -> SampleKey:
            return SampleKey(layer, phase, self._rank, device, measure)

        yield key("step_ns"), array("q", (end - start for start, end in zip(self._starts, self._starts[1:])))
        for own in self._cpu.values():
            own.frombytes(bytes(8 * (self.count - len(own))))
        for (layer, phase), totals in sorted(self._layers.roll_up_by_phase(self._cpu, _sum).items()):
            yield key("step_cpu_ns", layer, phase), totals
        on_devices = {
            (*place, device): totals
            for device, own in self._device.items()
            for place, totals in self._layers.roll_up_by_phase(own, _sum).items()
        }
        for (layer, phase, device), totals in sorted(on_devices.items()):
            yield key("step_device_ns", layer, phase, device), totals
        for measure in _PARTS:
            values = array("q", (parts[measure] for parts in self._outside))
            if any(values):
                yield key(measure), values
        for (measure, device), values in sorted(self._device_outside.items()):
            yield key(measure, device=device), values


def _sum(first: array[int], other: array[int]) -> array[int]:
    return array("q", map(add, first, other))


def with_marks(
    stream: Iterable[Attributed | OpGroup], ends: Iterable[int], ended_ns: int | None, thread: int
) -> Iterator[Attributed | OpGroup]:
    """The events in their order, with a STEP mark where each pass of a loop on this thread ends. ``ended_ns``: where
    the recording ends, if it ends inside a step; that has a mark, too."""
    places = [*((time, _LOOP_END) for time in ends), *([] if ended_ns is None else [(ended_ns, RECORDING_END)])]
    marks = deque(Attributed(Event(Kind.STEP, "", time, time, thread), place, None, 0, 0) for time, place in places)
    for item in stream:
        while marks and (
            item.start_ns >= marks[0].event.end_ns
            or (isinstance(item, Attributed) and item.event.kind is Kind.KERNEL)  # kernels come last
        ):
            yield marks.popleft()
        yield item
    yield from marks


class _Parts(dict[Place, str]):
    """The part of a step that the time of a place belongs to. Inside layers it is OTHER_NS, except for waits and copies
    in layers that ``are_ranges`` of a trace."""

    def __init__(self, are_ranges: bool) -> None:
        self._are_ranges = are_ranges

    def __missing__(self, place: Place) -> str:
        is_outside = place.layer == OUTSIDE or self._are_ranges
        part = f"step_{purpose_of(place.phase, place.frames)}_ns" if is_outside else OTHER_NS
        if place.layer != OUTSIDE and part not in _IN_RANGES:
            part = OTHER_NS
        self[place] = part
        return part


class _Alike(dict[Place, Place]):
    """For each place, the first place that is alike: a step has only the sum of their times. These are the places of a
    layer and phase that have no part of their own."""

    def __init__(self, parts: Mapping[Place, str]) -> None:
        self._parts = parts
        self._first: dict[tuple[int, str], Place] = {}

    def __missing__(self, place: Place) -> Place:
        has_part = place.layer == OUTSIDE or self._parts[place] != OTHER_NS
        first = self[place] = place if has_part else self._first.setdefault((place.layer, place.phase), place)
        return first


class _Closure:
    """The time of a closure inside an optimizer's step, as with LBFGS and Lightning: it runs the model and backward.

    What is outside layers is not the optimizer's work from the first call of a layer in the closure to the end of
    backward; the optimizer calls the first closure at once, so for this one from the beginning of the step.
    """

    def __init__(self, parts: Mapping[Place, str]) -> None:
        self._parts = parts
        self._self_ns: defaultdict[Place, int] = defaultdict(int)  # of ops in the closure, outside layers
        self._ranges: set[Place] = set()  # the optimizer's step, and the labels and steps of optimizers inside it
        self._began: int | None = None  # the beginning of the step, then that of a closure
        self._until = 0  # the end of backward in the closure
        self._inside = self._inside_until = 0  # the time directly in the ranges: since ``_began``, and up to ``_until``
        self._python_ns = 0  # of the closures that have ended
        self._called = self._in_backward = False

    def begin(self, place: Place, start: int) -> None:
        self._end_closure()
        self._ranges.add(place)
        self._began, self._inside = start, 0

    def note_group(self, group: OpGroup) -> bool:
        """The same as ``note`` for all events of a group. False: nothing was noted, since each of them matters."""
        if self._called or self._in_backward or group.place.phase != FORWARD or group.place.layer != OUTSIDE:
            return False
        if group.outer is not None and group.place in self._ranges and self._began is not None:
            self._inside += sum(end - start for start, end in group.outermost())
        return True

    def note(self, item: Attributed) -> None:
        event, place, around, _, ns, _ = item
        is_outside = place.layer == OUTSIDE
        is_of_optimizer = is_outside and self._parts[place] == OPTIMIZER_NS
        if is_of_optimizer and event.kind is Kind.USER_LABEL and not event.name.startswith(ZERO_GRAD):
            self._ranges.add(place)
            return
        if place.phase != FORWARD:
            self._in_backward = self._called
        elif not is_outside and around in self._ranges:
            self._called = True
            if self._began is None:
                self._began, self._inside = event.start_ns, 0
        elif is_of_optimizer and event.kind is Kind.OP:
            if self._in_backward:
                self._end_closure()
            if self._called and (place.outer in self._ranges or place.outer in self._self_ns):
                self._self_ns[place] += ns
                if around is not None and around in self._self_ns:
                    self._self_ns[around] -= ns
        if around in self._ranges and self._began is not None:
            self._inside += ns
            if self._in_backward:
                self._until, self._inside_until = event.start_ns + ns, self._inside

    def _end_closure(self) -> None:
        if self._in_backward and self._began is not None:
            self._python_ns += self._until - self._began - self._inside_until
        self._called = self._in_backward = False
        self._began = None

    def move(self, parts: dict[str, int]) -> None:
        """At the end of a step: move the time of the closure from the optimizer's part to other parts."""
        self._end_closure()
        in_ops = sum(self._self_ns.values())
        parts[OPTIMIZER_NS] -= in_ops + self._python_ns
        parts[OTHER_NS] += in_ops
        parts[GAP_NS] += self._python_ns
        self._self_ns.clear()
        self._python_ns = 0


def _beyond(time: int, last: Iterable[Attributed], alike: Mapping[Place, Place]) -> defaultdict[Place, int]:
    """The time of the open ranges after ``time``, as self time by their place in ``alike``. ``last``: the range that
    began last on each thread."""
    beyond: defaultdict[Place, int] = defaultdict(int)
    for innermost in last:
        item: Attributed | None = innermost
        while item is not None:
            rest = item.end_ns - time
            if rest > 0:
                beyond[alike[item.place]] += rest
                if item.around is not None:
                    beyond[alike[item.around]] -= rest
            item = item.outer
    return beyond
