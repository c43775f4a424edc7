"""The live memory of a model at one moment, and the frees of it that torch's profiler does not record."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any, NamedTuple
from weakref import finalize

from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.event_names import MEMORY
from torchprof.attribute.events import Event, Kind

_UNKNOWN_THREAD = -1
"""A number that no thread has: an event with it is inside no range."""


@dataclass(frozen=True)
class LiveMemory:
    """The live memory at one moment.

    ``sizes``: by device, (kind, bytes) of the model's parameters, buffers and gradients. ``addresses``: (device,
    address) of the parameters and buffers. ``allocator``: by device, figures of torch's caching allocator in bytes; the
    CPU has none. ``blocks``: the bytes of each storage of the CPU, by device and address. ``freed``: those of them that
    were freed since then, in the order of time, as far as ``watches`` noted them.
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    addresses: frozenset[tuple[str, int]]
    allocator: Mapping[str, Mapping[str, int]]
    blocks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    freed: list[Freed] = field(default_factory=list)
    watches: list[finalize[Any, Any]] = field(default_factory=list)

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


def add_frees(columns: EventColumns, start: LiveMemory, began_ns: int) -> None:
    """Add the missing frees of the CPU's blocks that the model had at the start.

    torch's CPU allocator records a free only if a session recorded an allocation at that address, and then with the
    size of that allocation. So a block counts as freed at the first of: its free event, its entry in ``start.freed``,
    an allocation at its address. The free gets the true size. A later event of the same free is left out.

    ``began_ns``: the end of the first STEP event of the recording on the clock of ``start.freed``.

    Example: blocks A and B are live at the start. ``start.freed`` has A at time 3; torch records a free at the address
    of A at 4, and an allocation at the address of B at 5. A is freed at 3 and B at 5, and the event at 4 is left out.
    """
    noted = deque(start.freed)
    blocks = dict(start.blocks)
    while noted and noted[0].at_ns < began_ns:
        blocks.pop(noted.popleft().block, None)
    marks = columns.of_kinds(Kind.STEP)
    if marks:
        index, thread = marks[0]
        frees = _MissingFrees(blocks, noted, columns.end[index] - began_ns, thread)
    else:  # without a mark, the clock of the notes is unknown
        frees = _MissingFrees(blocks, deque(), 0, _UNKNOWN_THREAD)
    duplicates = {
        index for index, thread in columns.of_kinds(Kind.MEMORY) if frees.replace(columns.event(index, thread))
    }
    frees.add_noted_until(inf)
    if frees.added:
        columns.add(before=frees.added, without=duplicates)


class _MissingFrees:
    """The frees ``added`` to the events so far.

    ``live``: the bytes of the blocks of the start that are not freed yet. ``noted``: the frees noted after the start;
    ``offset_ns`` is from their clock to that of the events, and ``thread`` made the notes that are on the same thread.
    """

    def __init__(self, live: dict[tuple[str, int], int], noted: deque[Freed], offset_ns: int, thread: int) -> None:
        self.added: list[Event] = []
        self._live = live
        self._noted = noted
        self._offset_ns = offset_ns
        self._thread = thread
        self._added_from_notes: set[tuple[str, int]] = set()  # torch may record the same free later

    def replace(self, event: Event) -> bool:
        """Add the frees up to a memory event, and the one that it implies. Returns whether it is a duplicate of a free
        that is added."""
        self.add_noted_until(event.start_ns)
        block = event.device, event.correlation
        if block in self._live:
            self._add(block, event.start_ns, event.thread)
        elif block in self._added_from_notes:
            self._added_from_notes.discard(block)
        else:
            return False
        return event.nbytes < 0

    def add_noted_until(self, time: float) -> None:
        while self._noted and self._noted[0].at_ns + self._offset_ns <= time:
            at_ns, on_same_thread, block = self._noted.popleft()
            if block in self._live:
                self._added_from_notes.add(block)
                self._add(block, at_ns + self._offset_ns, self._thread if on_same_thread else _UNKNOWN_THREAD)

    def _add(self, block: tuple[str, int], at_ns: int, thread: int) -> None:
        device, address = block
        nbytes = -self._live.pop(block)
        self.added.append(
            Event(Kind.MEMORY, MEMORY, at_ns, at_ns, thread, correlation=address, device=device, nbytes=nbytes)
        )
