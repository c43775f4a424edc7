"""How modules and ranges are nested in a trace, before its layers are known."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torchprof.attribute.events import Kind
from torchprof.attribute.nesting import OpenRanges
from torchprof.traces.columns import BEYOND
from torchprof.traces.layers import RangeCall

Line = tuple[int, int, int, int, int, int, int]
"""A CPU event as ``Columns.in_order`` returns it: start, ns, name, lane, sequence, number, signature."""


class _Open(NamedTuple):
    """An open range or node. ``range``: the innermost forward range that it is or is inside, "" for none. ``opened``:
    the innermost range that its node opened, None for none."""

    end_ns: int
    range: str
    in_backward: bool
    opened: _InBackward | None


class _Wanted(NamedTuple):
    """An open event of a wanted name."""

    end_ns: int
    name: str


@dataclass(slots=True, eq=False)
class _InBackward:
    """A range inside an autograd node. ``name``: the number of its name. ``records``: whether an operator inside it
    records an autograd graph."""

    start: int
    thread: int
    name: int
    outer: _InBackward | None
    records: bool = False


def nested(
    events: Iterable[Line], lanes: Sequence[tuple[int, int]], names: Sequence[str], wanted: Sequence[bool]
) -> Iterator[tuple[int, str]]:
    """The events of ``wanted`` names and the events inside them, in the order of their start.

    Each event is (number of its name, name of the innermost wanted event around it or "").
    ``events`` must not contain memory events, which have no duration. ``lanes``: (thread, forward thread or 0) by lane.
    """
    open_ranges: OpenRanges[_Wanted] = OpenRanges()
    by_thread = open_ranges.by_thread
    for start, ns, number, lane, *_ in events:
        thread = lanes[lane][0]
        stack = by_thread.get(thread)
        if stack is None or (stack and stack[-1].end_ns <= start):  # a call for each event would double the time
            stack = open_ranges.at(thread, start)
        if wanted[number]:
            yield number, stack[-1].name if stack else ""
            end = start + ns
            # A range ends with the one around it at the latest, as in the attribution.
            stack.append(_Wanted(min(end, stack[-1].end_ns) if stack else end, names[number]))
        elif stack:
            yield number, stack[-1].name


def ranges_in(
    events: Iterable[Line],
    lanes: Sequence[tuple[int, int]],
    names: Sequence[str],
    kinds: Sequence[Kind | None],
    wanted: Sequence[bool],
    is_inner_node: Sequence[bool],
) -> tuple[list[RangeCall], set[tuple[int, int, int]]]:
    """The ranges of ``wanted`` names that may be layers, in the order of their first call; and those of backward, each
    as (start, thread, number of the name).

    A range that opens inside an autograd node belongs to backward, even if a forward range has the same name. The
    exception is a recomputed forward, as under activation checkpointing: a range of that name ran in forward, and
    operators inside this one record an autograd graph, which nothing else in backward does.
    """
    full: set[str] = set()  # names of ranges with work inside
    parents: dict[str, dict[str, None]] = {}
    in_backward: list[_InBackward] = []
    open_ranges: OpenRanges[_Open] = OpenRanges()
    by_thread = open_ranges.by_thread
    nothing = _Open(BEYOND, "", False, None)
    for start, ns, number, lane, sequence, _, _ in events:
        thread, forward = lanes[lane]
        stack = by_thread.get(thread)
        if stack is None or (stack and stack[-1].end_ns <= start):
            stack = open_ranges.at(thread, start)
        around = stack[-1] if stack else nothing
        end = min(start + ns, around.end_ns)  # a range ends with the one around it at the latest, as in the attribution
        name = names[number]
        if wanted[number]:
            opened = None
            if around.in_backward:
                opened = _InBackward(start, thread, number, around.opened)
                in_backward.append(opened)
            else:
                parents.setdefault(name, {})[around.range] = None
            stack.append(_Open(end, name, around.in_backward, opened))
            continue
        kind = kinds[number]
        if kind not in (None, Kind.COLLECTIVE):
            full.add(around.range)
        if kind in (Kind.NODE, Kind.BACKWARD_FUNCTION) or (
            kind is Kind.OP and (forward if sequence >= 0 else is_inner_node[number])
        ):
            stack.append(_Open(end, around.range, True, None))
        elif sequence >= 0 and around.opened is not None:
            around.opened.records = True
    _include_outer(full, parents)
    calls = [RangeCall(name, tuple(above), name in full) for name, above in parents.items()]
    return calls, {(event.start, event.thread, event.name) for event in _not_recomputed(in_backward, names, parents)}


def _include_outer(full: set[str], parents: Mapping[str, Iterable[str]]) -> None:
    """Add the ranges around those in ``full``: work inside a range is also inside the ranges around it."""
    waiting = list(full)
    while waiting:
        outer = {*parents.get(waiting.pop(), ())} - full
        full |= outer
        waiting += outer


def _not_recomputed(
    in_backward: Sequence[_InBackward], names: Sequence[str], forward: Container[str]
) -> Iterator[_InBackward]:
    """The ranges inside autograd nodes, without those of a forward that is computed again."""
    for event in reversed(in_backward):  # inner ones come after those around them
        if event.records and event.outer is not None:
            event.outer.records = True
    return (event for event in in_backward if not (event.records and names[event.name] in forward))
