"""Blocks of memory: those that are live at one moment, and those that are allocated and freed during a recording."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate, islice, pairwise
from math import inf
from typing import Any, NamedTuple
from weakref import finalize

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import MEMORY
from torchprof.attribute.events import Event, Kind, Place
from torchprof.run.timeline import KINDS, Growth, Holder, Timeline
from torchprof.run.torch_names import JOINS
from torchprof.run.words import FORWARD, OUTSIDE, PHASES

PARAMETERS, GRADIENTS, ACTIVATIONS, OPTIMIZER_STATE, INPUTS, TEMPORARIES, OPTIMIZER_TEMPORARIES, WEIGHT_CASTS = KINDS
OTHERS = OTHER_PARAMETERS, OTHER_TENSORS = "other parameters", "other tensors"
"""The kinds of what is live at the start and is not of the models and their optimizers: parameters of other
modules, and all other tensors that Python code has."""
NONE = -1  # in place of the number of a block or of a call: there is none
_UNKNOWN_THREAD = -1  # a number that no thread has: an event with it is inside no range


# The live memory at one moment

LiveBlocks = Mapping[tuple[str, int], tuple[str, int]]
"""(device, address) of a live block → its kind and bytes."""


@dataclass(frozen=True)
class LiveMemory:
    """The live memory at one moment.

    ``sizes``: by device, (kind, bytes) of the model's parameters, buffers and gradients, of the state of its
    optimizers, and of ``OTHERS``. ``addresses``: (device, address) of the parameters and buffers; ``others``: of the
    others; ``holders``: by device, what keeps most of these. ``allocator``: by device, figures of torch's caching
    allocator in bytes; the CPU has none. ``blocks``: the bytes of each storage of the CPU, by device and address.
    ``freed``: those of them that were freed since then, in the order of time, as far as ``watches`` noted them.
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    addresses: frozenset[tuple[str, int]]
    allocator: Mapping[str, Mapping[str, int]]
    blocks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    freed: list[Freed] = field(default_factory=list)
    watches: list[finalize[Any, Any]] = field(default_factory=list)
    others: frozenset[tuple[str, int]] = frozenset()
    holders: Mapping[str, Holder | None] = field(default_factory=dict)

    def stop_watching(self) -> None:
        for watch in self.watches:
            watch.detach()
        self.watches.clear()


class Freed(NamedTuple):
    """A free of a block. ``at_ns``: when, on the clock of ``time.perf_counter_ns``. ``on_same_thread``: whether it was
    on the thread that made the ``LiveMemory``. ``block``: its device and address."""

    at_ns: int
    on_same_thread: bool
    block: tuple[str, int]


NOT_MEASURED = LiveMemory({}, frozenset(), {})
"""The live memory was not measured."""


def allocators_between(start: LiveMemory, end: LiveMemory) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """By device: the figures of its allocator, as (name, bytes at the start, bytes at the end)."""
    return {
        device: tuple((name, start.allocator.get(device, {}).get(name, 0), size) for name, size in figures.items())
        for device, figures in end.allocator.items()
    }


# Frees that torch's profiler does not record


def add_frees(columns: EventColumns, start: LiveMemory, began_ns: int) -> None:
    """Add the missing frees of the CPU's blocks that the model had at the start.

    torch's CPU allocator records a free only if a session recorded an allocation at that address, and then with the
    size of that allocation. So a block counts as freed at the first of: its free event, its entry in ``start.freed``,
    an allocation at its address. The free gets the true size. A later event of the same free is left out.

    ``began_ns``: the end of the first STEP event of the recording on the clock of ``start.freed``.

    Example: blocks A and B are live at the start. ``start.freed`` has A at time 3; torch records a free at the address
    of A at 4, and an allocation at the address of B at 5. A is freed at 3 and B at 5, and the event at 4 is left out.
    """
    live, noted = dict(start.blocks), deque(start.freed)
    while noted and noted[0].at_ns < began_ns:
        live.pop(noted.popleft().block, None)
    marks = columns.of_kinds(Kind.STEP)
    if not marks:  # then the clock of ``start.freed`` is unknown
        noted.clear()
    mark, main_thread = marks[0] if marks else (0, _UNKNOWN_THREAD)
    offset_ns = columns.end[mark] - began_ns if marks else 0  # from that clock to that of the events
    added: list[Event] = []
    added_from_notes: set[tuple[str, int]] = set()  # torch may record the same free later
    duplicates: set[int] = set()

    def add_noted_until(time: float) -> None:
        while noted and noted[0].at_ns + offset_ns <= time:
            at_ns, on_same_thread, block = noted.popleft()
            if block in live:
                added_from_notes.add(block)
                thread = main_thread if on_same_thread else _UNKNOWN_THREAD
                added.append(_free(block, live.pop(block), at_ns + offset_ns, thread))

    for index, thread in columns.of_kinds(Kind.MEMORY):
        event = columns.event(index, thread)
        add_noted_until(event.start_ns)
        block = event.device, event.correlation
        if block in live:
            added.append(_free(block, live.pop(block), event.start_ns, event.thread))
        elif block in added_from_notes:
            added_from_notes.discard(block)
        else:
            continue
        if event.nbytes < 0:
            duplicates.add(index)
    add_noted_until(inf)
    if added:
        columns.add(before=added, without=duplicates)


def _free(block: tuple[str, int], nbytes: int, at_ns: int, thread: int) -> Event:
    device, address = block
    return Event(Kind.MEMORY, MEMORY, at_ns, at_ns, thread, correlation=address, device=device, nbytes=-nbytes)


# The blocks of a recording


@dataclass(slots=True, eq=False)
class Stage:
    """The stage of a loop in which a block was allocated: a call of a model, a backward pass, an optimizer's step, or
    the time between these. ``keeps``: the kind of its blocks that are live when it ends. ``has_graph``: whether it made
    an autograd graph: then its blocks that a later backward pass frees were part of the graph."""

    keeps: str
    start_ns: int
    end_ns: float = inf
    has_graph: bool = False
    graphs: int = 0


class Blocks:
    """The memory events of a recording, and the blocks that they allocate and free.

    Some columns have an entry for each event: ``times``, ``sizes``, ``devices`` and ``numbers``, that of its block. The
    others have one for each block: its ``places``, ``stages`` and ``calls``, and the numbers of its events in ``born``
    and ``died``. ``live``: those live now, by device and address. ``frees_without_address``: events by device and size.
    ``casts``: those that a cast with gradients made, in a call that had none so far. ``joined``: those that
    ``torch.cat`` made outside of layers.
    """

    def __init__(self) -> None:
        self.times = array("q")
        self.sizes = array("q")
        self.devices: list[str] = []
        self.numbers = array("q")
        self.places: list[Place] = []
        self.stages: list[Stage] = []
        self.calls = array("q")
        self.born = array("q")
        self.died = array("q")
        self.live: dict[tuple[str, int], int] = {}
        self.casts: set[int] = set()
        self.joined: set[int] = set()
        self.frees_without_address: defaultdict[tuple[str, int], list[int]] = defaultdict(list)

    def add_event(self, time: int, size: int, device: str, block: int) -> None:
        self.times.append(time)
        self.sizes.append(size)
        self.devices.append(device)
        self.numbers.append(block)

    def allocate(
        self, time: int, size: int, device: str, address: int, *, place: Place, stage: Stage, call: int
    ) -> None:
        block = self.live[device, address] = len(self.places)
        self.places.append(place)
        self.stages.append(stage)
        self.calls.append(call)
        self.born.append(len(self.times))
        self.died.append(NONE)
        self.times.append(time)  # as add_event, without another call for each event
        self.sizes.append(size)
        self.devices.append(device)
        self.numbers.append(block)

    def note_joined(self, op: str, device: str, address: int) -> None:
        """An operator allocated a block outside of layers."""
        if op in JOINS:
            self.joined.add(self.live[device, address])

    def free_before_reuse(self, time: int, device: str, block: int) -> int:
        """The address of a block is used again: it was freed before. Either the address of the free is unknown, as of
        some on CUDA; or it was not recorded, as of unobserved threads. Returns its bytes then, else 0."""
        nbytes = self.sizes[self.born[block]]
        frees = self.frees_without_address[device, nbytes]
        first_later = bisect_right(frees, self.born[block])
        if first_later < len(frees):
            self.died[block] = frees.pop(first_later)
            return 0
        self.died[block] = len(self.times)
        self.add_event(time, -nbytes, device, block)
        return nbytes

    def ends(self) -> list[float]:
        """When each block was freed."""
        return [self.times[died] if died != NONE else inf for died in self.died]

    def kinds(self, ends: Sequence[float], passes: Sequence[Stage], parameters: Set[tuple[str, int]]) -> list[str]:
        """The kind of each block, by the rules in ``Allocations``. ``passes``: the backward passes. ``parameters``: the
        devices and addresses of parameters and buffers at the end."""
        starts = [backward.start_ns for backward in passes]

        def is_in_a_pass(time: float) -> bool:
            index = bisect_right(starts, time) - 1
            return index >= 0 and time < passes[index].end_ns

        kinds = []
        for block, (stage, end) in enumerate(zip(self.stages, ends)):
            if end < stage.end_ns:
                kinds.append(OPTIMIZER_TEMPORARIES if stage.keeps == OPTIMIZER_STATE else TEMPORARIES)
            elif block in self.casts and not stage.has_graph:
                kinds.append(WEIGHT_CASTS)
            elif stage.has_graph and is_in_a_pass(end):
                kinds.append(ACTIVATIONS)
            else:
                kinds.append(stage.keeps)
        for address, block in self.live.items():
            if address in parameters:
                kinds[block] = PARAMETERS
        return kinds

    def live_at(self, event: int, device: str, kinds: Sequence[str]) -> defaultdict[tuple[int, str, str], list[int]]:
        """The blocks of a device that are live after an event: bytes and number, by layer, phase and kind."""
        sums: defaultdict[tuple[int, str, str], list[int]] = defaultdict(lambda: [0, 0])
        for block, (born, died) in enumerate(zip(self.born, self.died)):
            if born <= event and (died > event or died == NONE) and self.devices[born] == device:
                place = self.places[block]
                of_kind = sums[place.layer, place.phase, kinds[block]]
                of_kind[0] += self.sizes[born]
                of_kind[1] += 1
        return sums

    def growth(
        self, device: str, kinds: Sequence[str], calls: Mapping[Stage, int], passes: Sequence[Stage]
    ) -> list[tuple[Growth, list[int]]]:
        """What stays call by call on a device, the most first, with its blocks. ``calls``: for each outermost forward
        call, the number of the first event in it. A call lasts until the next one begins. What a call made counts from
        the end of the backward pass through it on, since until then it may be needed. The state of optimizers is made
        to stay, and does not count."""
        needed_until, starts = self._ends_of_backward(passes, calls.keys()), [*calls.values()]
        spans: defaultdict[tuple[int, str, str], list[tuple[int, int, int, int]]] = defaultdict(list)
        for block, (born, died) in enumerate(zip(self.born, self.died)):
            first = bisect_right(starts, max(born, needed_until.get(self.stages[block], 0))) - 1
            last = bisect_right(starts, died) - 1 if died != NONE else len(calls)
            if last > max(first, 0) and self.devices[born] == device:
                place = self.places[block]
                spans[place.layer, place.phase, kinds[block]].append((first, last, self.sizes[born], block))
        grown = []
        for (layer, phase, kind), of_kind in spans.items():
            if kind == OPTIMIZER_STATE:
                continue
            has_graph = any(self.stages[block].has_graph for _, _, _, block in of_kind)
            by_call = bytes_that_stay([span[:3] for span in of_kind], len(calls), may_repeat=has_graph)
            joined = [span[:3] for span in of_kind if span[3] in self.joined]
            if by_call is None and joined:
                by_call = bytes_that_stay(joined, len(calls), are_copied=True)
            if by_call is not None:
                values = by_call.values()
                growth = Growth(layer, phase, kind, sum(values), len(values), min(values), max(values))
                grown.append((growth, [block for first, _, _, block in of_kind if by_call.get(first)]))
        return sorted(grown, key=lambda each: -each[0].nbytes)

    def _ends_of_backward(self, passes: Sequence[Stage], outermost: Set[Stage]) -> dict[Stage, int]:
        """For each stage whose graph a backward pass went through, the number of the first event after that pass: it
        frees blocks of the stage, or has as many nodes as there were calls with graphs since the pass before.
        ``outermost``: the calls."""
        starts = [backward.start_ns for backward in passes]
        ends: dict[Stage, int] = {}
        waiting: defaultdict[int, set[Stage]] = defaultdict(set)  # by the next pass
        for stage, died in zip(self.stages, self.died):
            if not stage.has_graph:
                continue
            if stage in outermost:
                waiting[bisect_left(starts, stage.end_ns)].add(stage)
            if died != NONE:
                index = bisect_right(starts, self.times[died]) - 1
                if index >= 0 and self.times[died] < passes[index].end_ns:
                    ends[stage] = max(ends.get(stage, 0), index)
        for index, stages in waiting.items():
            if index < len(passes) and passes[index].graphs >= len(stages):
                ends.update((stage, max(ends.get(stage, 0), index)) for stage in stages)
        return {stage: bisect_left(self.times, passes[index].end_ns) for stage, index in ends.items()}

    def saved_by(
        self, outermost_calls: Sequence[Stage], ends: Sequence[float], passes: Sequence[Stage]
    ) -> dict[str, list[int]]:
        """By device, the bytes that each call saved for backward. ``outermost_calls``: the one around each call.

        These are the blocks of the call that are live when the first backward pass after the outermost call begins. If
        no block of the outermost call is live then, its graph was dropped: the blocks count that are live when it ends.
        """
        starts = [backward.start_ns for backward in passes]
        needed_at: dict[Stage, float] = {}  # outermost call → when the next backward pass begins
        for stage in {stage for stage in outermost_calls if stage.has_graph}:
            index = bisect_left(starts, stage.end_ns)
            needed_at[stage] = starts[index] if index < len(starts) else inf
        keep_graph = {stage for stage, end in zip(self.stages, ends) if stage in needed_at and end >= needed_at[stage]}
        saved_bytes = {device: [0] * len(outermost_calls) for device in sorted({*self.devices})}
        for stage, call, born, end in zip(self.stages, self.calls, self.born, ends):
            if call == NONE or stage not in needed_at:
                continue
            if end >= (needed_at[stage] if stage in keep_graph else stage.end_ns):
                saved_bytes[self.devices[born]][call] += self.sizes[born]
        return saved_bytes

    def timeline(self, kinds: Sequence[str], zero: int, rank: int) -> Timeline:
        """All events, with times since ``zero``."""
        numbers = {device: number for number, device in enumerate(sorted({*self.devices}))}
        columns = {name: array("q") for name in Timeline.COLUMNS}
        limit = Timeline.LIMIT
        for time, size, device, block in islice(zip(self.times, self.sizes, self.devices, self.numbers), limit):
            place = self.places[block] if block != NONE else None
            columns["time_ns"].append(time - zero)
            columns["nbytes"].append(size)
            columns["device"].append(numbers[device])
            columns["layer"].append(place.layer if place else OUTSIDE)
            columns["phase"].append(PHASES.index(place.phase if place else FORWARD))
            columns["kind"].append(KINDS.index(kinds[block]) if place else NONE)
        return Timeline(tuple(numbers), columns, max(0, len(self.times) - limit), rank=rank)


_FEWEST_IN_A_ROW, _FEWEST_GROWING = 6, 4
"""Memory grows if it does so in a row of at least so many calls, in so many of them."""
FEWEST_CALLS = _FEWEST_IN_A_ROW + 2
"""With fewer calls it is unknown whether memory grows."""
_FEWEST_COPIED = 8  # of memory that is copied to a larger block in each call
_MANY_CLIMBS = 3
_LEAST_STAYS = 0.8  # of what the calls allocate and do not free: otherwise they replace older memory


def bytes_that_stay(
    spans: Sequence[tuple[int, int, int]], calls: int, are_copied: bool = False, may_repeat: bool = False
) -> dict[int, int] | None:
    """The bytes that stay of each call of a row of calls in which memory grows steadily; None if it does not.

    ``spans``: of each block the call that allocates it, that in which it is freed, or ``calls`` if it is not, and its
    bytes. ``are_copied``: whether each has the content of the one before it, as with ``torch.cat``. ``may_repeat``:
    whether memory also grows if it falls and rises again and again: a cache of keys is freed after each sequence.

    The row goes from where the least was live, after the second call, to where the most was. Its blocks that are live
    at its end are what stays. In each third of the row it is at least half as much as in the mean, and the total rises
    by as much: a cache that is full, and a loop that replaces what it keeps, do not grow. Of blocks that are copied, it
    is the rise of the total, which never falls.

    Example: 3 bytes stay of each of 9 calls, which are freed then: {2: 3, 3: 3, …, 8: 3}.
    """
    changes = Counter[int]()
    for first, last, nbytes in spans:
        changes[max(first, 1)] += nbytes
        changes[max(last, 1)] -= nbytes
    changing = [1, *(call for call in sorted(changes) if 1 < call < calls)]
    levels = [*zip(changing, accumulate(changes[call] for call in changing))]  # live at the end of a call, and later
    top = max(range(len(levels)), key=lambda at: levels[at][1])
    low = min(range(top + 1), key=lambda at: (levels[at][1], -at))
    least, half = levels[low][1], (levels[low][1] + levels[top][1]) / 2
    climbs = sum(now > half >= before for (_, before), (_, now) in pairwise(levels))
    if climbs >= _MANY_CLIMBS and not may_repeat:
        return None
    drop = next((at for at in range(top + 1, len(levels)) if levels[at][1] <= half), len(levels))
    start = changing[low + 1] - 1 if low < top else changing[low]
    end = changing[drop] - 1 if drop < len(levels) else calls - 1
    stays = dict.fromkeys(range(start + 1, end + 1), 0)
    if are_copied:
        rises = {call: level - before for (_, before), (call, level) in pairwise(levels[low:drop])}
        is_steady = min(rises.values(), default=0) >= 0 and _is_steady(stays := stays | rises, _FEWEST_COPIED)
        return stays if is_steady else None
    for first, last, nbytes in spans:
        if start < first <= end < last:
            stays[first] += nbytes
    replaces = levels[drop - 1][1] - least < _LEAST_STAYS * sum(stays.values())
    return stays if not replaces and _is_steady(stays, _FEWEST_IN_A_ROW) else None


def _is_steady(by_call: Mapping[int, int], fewest: int) -> bool:
    """Whether bytes come steadily, in enough calls: each third of the calls has half of its part, or more."""
    values = [*by_call.values()]
    if len(values) < fewest or sum(map(bool, values)) < _FEWEST_GROWING:
        return False
    cuts = [len(values) * third // 3 for third in range(4)]
    return all(sum(values[low:high]) / (high - low) >= sum(values) / len(values) / 2 for low, high in pairwise(cuts))
