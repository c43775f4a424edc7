"""The passes of a loop that marks no steps, and the calls without gradients, as in evaluation."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import REGION
from torchprof.attribute.event_names import ENGINE_LABEL, is_engine, is_of_a_call
from torchprof.run.words import OPTIMIZER_STEP


class NamedRange(NamedTuple):
    name: str
    start_ns: int
    end_ns: int
    thread: int


class Loop(NamedTuple):
    """``ends``: where each pass ends, in ns. ``without_gradients``: the outermost calls of labeled modules without
    gradients, if there is backward, too. None in compiled code, whose operators have no events."""

    ends: Sequence[int] = ()
    without_gradients: Sequence[NamedRange] = ()


def loop_of(
    names: Iterable[str],
    ranges_of: Callable[[Set[str]], Iterable[NamedRange]],
    sequenced: Callable[[int], Iterable[int]],
) -> Loop:
    """The loop that was recorded. A pass ends

    - with optimizers: where each class of optimizer has made a step since the last end, with a backward pass before. So
      accumulated gradients are one pass, and so are the steps of a critic and a generator with different optimizers;
    - with backward alone: where the first call of autograd's engine after a call of a model ends;
    - else: where a call of the model ends that was called first.

    ``names``: of all ranges of the CPU. ``ranges_of``: the ranges with some of these names, in the order of start.
    ``sequenced``: when the operators of a thread began that have a sequence number of autograd, in order: they have one
    if gradients are enabled.
    """
    seen = set(names)
    optimizers = {name for name in seen if name.startswith(OPTIMIZER_STEP)}
    engine = seen & {ENGINE_LABEL}
    backward = engine or {name for name in seen if is_engine(name)}
    labels = {name for name in seen if is_of_a_call(name)}
    calls = _outermost(ranges_of(labels)) if labels else []
    if optimizers:
        ends = _of_optimizers(ranges_of(optimizers | backward), optimizers, not backward)
    elif engine:
        ends = _of_backward(ranges_of(engine | labels))
    else:
        ends = [one.end_ns for one in calls if one.name == calls[0].name]
    without: list[NamedRange] = []
    if calls and backward and not any(name.startswith(REGION) for name in seen):
        without = _without_gradients(calls, [*sequenced(calls[0].thread)])
    if without and engine:  # reentrant checkpointing: the forward is without gradients, and runs again in backward
        inside = _inside(_outermost(ranges_of(engine)), ranges_of(labels))
        without = [one for one in without if one.name not in inside]
    return Loop(ends, without)


def _of_optimizers(ranges: Iterable[NamedRange], optimizers: Set[str], worked_always: bool) -> list[int]:
    """``worked_always``: backward was not recorded."""
    of_both = [*ranges]
    steps = set(_outermost(one for one in of_both if one.name in optimizers))
    ends: list[int] = []
    missing, worked = {*optimizers}, worked_always
    # In the order of their ends: the closure of an optimizer runs backward inside its step.
    for one in sorted(of_both, key=lambda one: one.end_ns):
        if one.name not in optimizers:
            worked = True
        elif one in steps:
            missing.discard(one.name)
            if worked and not missing:
                ends.append(one.end_ns)
                missing, worked = {*optimizers}, worked_always
    return ends


def _of_backward(ranges: Iterable[NamedRange]) -> list[int]:
    ends: list[int] = []
    called = False
    for one in _outermost(ranges):
        if one.name != ENGINE_LABEL:
            called = True
        elif called:
            ends.append(one.end_ns)
            called = False
    return ends


def _outermost(ranges: Iterable[NamedRange]) -> list[NamedRange]:
    """The ranges of the thread with the first one that are in no other of them."""
    found: list[NamedRange] = []
    for one in ranges:
        if not found or (one.thread == found[0].thread and one.start_ns >= found[-1].end_ns):
            found.append(one)
    return found


def _inside(outer: Sequence[NamedRange], ranges: Iterable[NamedRange]) -> set[str]:
    """The names of the ranges that begin inside others."""
    starts = [one.start_ns for one in outer]
    found = set()
    for one in ranges:
        at = bisect_right(starts, one.start_ns) - 1
        if at >= 0 and one.start_ns < outer[at].end_ns:
            found.add(one.name)
    return found


def _without_gradients(calls: Iterable[NamedRange], sequenced: Sequence[int]) -> list[NamedRange]:
    """The calls in which no operator has a sequence number."""
    nexts = ((one, bisect_left(sequenced, one.start_ns)) for one in calls)
    return [one for one, at in nexts if at == len(sequenced) or sequenced[at] >= one.end_ns]
