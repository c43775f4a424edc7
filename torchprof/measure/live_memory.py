"""The memory of the model and of torch's allocators at one moment; and which of it was freed during the recording."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from weakref import finalize

from torchprof.attribute.event_names import MEMORY
from torchprof.attribute.events import Event, Kind

_UNKNOWN_THREAD = -1
"""The number of no real thread: an event on it is inside no range."""


class Freed(NamedTuple):
    """A block that was freed. ``at_ns``: on the clock of ``time.perf_counter_ns``. ``at_home``: whether that was on the
    thread that made the ``LiveMemory``. ``block``: its device and address."""

    at_ns: int
    at_home: bool
    block: tuple[str, int]


@dataclass(frozen=True)
class LiveMemory:
    """The allocated memory at one moment.

    ``sizes``: (kind, bytes) of the model's parameters, buffers and gradients, by device. ``addresses``: (device,
    address) of the parameters and buffers. ``allocator``: figures of torch's caching allocator in bytes, by device;
    the CPU has none. ``blocks``: the bytes of each storage, by device and address. ``freed``: those that were freed
    since, in the order of time, if ``watches`` noted them.
    """

    sizes: Mapping[str, tuple[tuple[str, int], ...]]
    addresses: frozenset[tuple[str, int]]
    allocator: Mapping[str, Mapping[str, int]]
    blocks: Mapping[tuple[str, int], int] = field(default_factory=dict)
    freed: list[Freed] = field(default_factory=list)
    watches: list[finalize[Any, Any]] = field(default_factory=list)

    def stop_watching(self) -> None:
        """Do not note frees any more."""
        for one in self.watches:
            one.detach()
        self.watches.clear()


NOT_MEASURED = LiveMemory({}, frozenset(), {})
"""The memory was not looked up."""


def allocators_between(start: LiveMemory, end: LiveMemory) -> dict[str, tuple[tuple[str, int, int], ...]]:
    """By device, the figures of its allocator: (name, bytes at the start, bytes at the end)."""
    return {
        device: tuple((name, start.allocator.get(device, {}).get(name, 0), size) for name, size in figures.items())
        for device, figures in end.allocator.items()
    }


def with_frees(events: Iterable[Event], start: LiveMemory, began_ns: int) -> Iterator[Event]:
    """The events of a recording, in which each block that the model had at the start is freed once, if it is freed.

    torch records few of these: its CPU allocator records a free only if some session recorded the allocation at that
    address, and with the size of that one. So a block counts as freed at the first of: its free event, its entry in
    ``start.freed``, an allocation at its address. It gets its true size; a later event of the same free is left out.

    ``began_ns``: when the first mark of the recording was made, on the clock of ``start.freed``: the first STEP event.
    """
    there = dict(start.blocks)
    noted: set[tuple[str, int]] = set()  # freed according to ``start.freed``: torch may record it later
    notes = deque(start.freed)
    while notes and notes[0].at_ns < began_ns:
        there.pop(notes.popleft().block, None)
    home = _UNKNOWN_THREAD
    offset_ns: int | None = None  # from the clock of the notes to that of the events

    def next_note(offset_ns: int) -> Iterator[Event]:
        at_ns, at_home, block = notes.popleft()
        if block in there:
            noted.add(block)
            yield _free(block, there.pop(block), at_ns + offset_ns, home if at_home else _UNKNOWN_THREAD)

    for event in events:
        if offset_ns is None and event.kind is Kind.STEP:
            home, offset_ns = event.thread, event.start_ns - began_ns
        # Kernels come last, on a clock of their own.
        while (
            notes
            and offset_ns is not None
            and (event.kind is Kind.KERNEL or notes[0].at_ns + offset_ns <= event.start_ns)
        ):
            yield from next_note(offset_ns)
        if event.kind is Kind.MEMORY and event.correlation:
            block = event.device, event.correlation
            is_told = block in there or block in noted
            if block in there:
                yield _free(block, there.pop(block), event.start_ns, event.thread)
            noted.discard(block)
            if is_told and event.nbytes < 0:
                continue
        yield event
    while notes and offset_ns is not None:
        yield from next_note(offset_ns)


def _free(block: tuple[str, int], nbytes: int, at_ns: int, thread: int) -> Event:
    device, address = block
    return Event(Kind.MEMORY, MEMORY, at_ns, at_ns, thread, correlation=address, device=device, nbytes=-nbytes)
