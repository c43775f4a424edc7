"""The live memory of the model and of torch's allocators at one moment, and the frees of it during the recording."""

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


class Freed(NamedTuple):
    """A free of a block. ``at_ns``: when, on the clock of ``time.perf_counter_ns``. ``on_same_thread``: whether it was
    on the thread that made the ``LiveMemory``. ``block``: its device and address."""

    at_ns: int
    on_same_thread: bool
    block: tuple[str, int]


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
        """Note no more frees."""
        for watch in self.watches:
            watch.detach()
        self.watches.clear()


NOT_MEASURED = LiveMemory({}, frozenset(), {})
"""The live memory was not measured."""


def allocators_between(start: LiveMemory, end: LiveMemory) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """By device: the figures of its allocator, as (name, bytes at the start, bytes at the end)."""
    return {
        device: tuple((name, start.allocator.get(device, {}).get(name, 0), size) for name, size in figures.items())
        for device, figures in end.allocator.items()
    }


def add_frees(columns: EventColumns, start: LiveMemory, began_ns: int) -> None:
    """Add the missing frees to the events of a recording: of the CPU's blocks that the model had at the start.

    torch records few of these frees: its CPU allocator records a free only if a session recorded an allocation at that
    address, and then with the size of that allocation. So a block counts as freed at the first of: its free event, its
    entry in ``start.freed``, an allocation at its address. The free gets the true size. A later event of the same free
    is omitted.

    ``began_ns``: the end of the first STEP event of the recording on the clock of ``start.freed``.
    """
    live = dict(start.blocks)
    noted: set[tuple[str, int]] = set()  # freed according to ``start.freed``; torch may record the free later
    notes = deque(start.freed)
    while notes and notes[0].at_ns < began_ns:
        live.pop(notes.popleft().block, None)
    main, offset_ns = _UNKNOWN_THREAD, 0  # the offset is from the clock of the notes to that of the events
    marks = columns.of_kinds(Kind.STEP)
    if marks:
        index, main = marks[0]
        offset_ns = columns.end[index] - began_ns
    else:
        notes.clear()
    added: list[Event] = []
    omitted: set[int] = set()

    def note_until(time: float) -> None:
        while notes and notes[0].at_ns + offset_ns <= time:
            at_ns, on_same_thread, block = notes.popleft()
            if block in live:
                noted.add(block)
                added.append(
                    _free(block, live.pop(block), at_ns + offset_ns, main if on_same_thread else _UNKNOWN_THREAD)
                )

    for index, thread in columns.of_kinds(Kind.MEMORY):
        event = columns.event(index, thread)
        note_until(event.start_ns)
        block = event.device, event.correlation
        if block in live:
            added.append(_free(block, live.pop(block), event.start_ns, event.thread))
        elif block in noted:
            noted.discard(block)
        else:
            continue
        if event.nbytes < 0:
            omitted.add(index)
    note_until(inf)
    if added:
        columns.add(before=added, without=omitted)


def _free(block: tuple[str, int], nbytes: int, at_ns: int, thread: int) -> Event:
    device, address = block
    return Event(Kind.MEMORY, MEMORY, at_ns, at_ns, thread, correlation=address, device=device, nbytes=-nbytes)
