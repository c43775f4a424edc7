"""The passes of a loop that marks no steps, and the calls without gradients, as in evaluation."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import REGION
from torchprof.attribute.event_names import ENGINE_LABEL, is_engine, is_of_a_call
from torchprof.run.words import OPTIMIZER_STEP


class NamedRange(NamedTuple):
    """A range of the profiler, on the clock of the events."""

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
    has_gradients: Callable[[NamedRange], bool],
) -> Loop:
    """The loop that was recorded. A pass ends

    - with optimizers: where each class of optimizer has made a step since the last end, with a backward pass before. So
      accumulated gradients are one pass, and so are the steps of a critic and a generator with different optimizers;
    - with backward alone: where the first call of autograd's engine after a call of a model ends;
    - else: where a call of the model ends that was called first.

    ``names``: of all ranges of the CPU. ``ranges_of``: the ranges with some of these names, in the order of start.
    ``has_gradients``: whether an operator in a call has a sequence number of autograd: it has one if gradients are
    enabled.
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
        ends = [call.end_ns for call in calls if call.name == calls[0].name]
    without: list[NamedRange] = []
    if calls and backward and not any(name.startswith(REGION) for name in seen):
        without = [call for call in calls if not has_gradients(call)]
    if without and engine:  # reentrant checkpointing: the forward is without gradients, and runs again in backward
        inside = _inside(_outermost(ranges_of(engine)), ranges_of(labels))
        without = [call for call in without if call.name not in inside]
    return Loop(ends, without)


def _of_optimizers(ranges: Iterable[NamedRange], optimizers: Set[str], worked_always: bool) -> list[int]:
    """``worked_always``: backward was not recorded."""
    of_both = [*ranges]
    steps = set(_outermost(call for call in of_both if call.name in optimizers))
    ends: list[int] = []
    missing, worked = {*optimizers}, worked_always
    # In the order of their ends: the closure of an optimizer runs backward inside its step.
    for event in sorted(of_both, key=lambda event: event.end_ns):
        if event.name not in optimizers:
            worked = True
        elif event in steps:
            missing.discard(event.name)
            if worked and not missing:
                ends.append(event.end_ns)
                missing, worked = {*optimizers}, worked_always
    return ends


def _of_backward(ranges: Iterable[NamedRange]) -> list[int]:
    ends: list[int] = []
    called = False
    for event in _outermost(ranges):
        if event.name != ENGINE_LABEL:
            called = True
        elif called:
            ends.append(event.end_ns)
            called = False
    return ends


def _outermost(ranges: Iterable[NamedRange]) -> list[NamedRange]:
    """The ranges of the thread with the first one that are in no other of them."""
    outermost: list[NamedRange] = []
    for event in ranges:
        if not outermost or (event.thread == outermost[0].thread and event.start_ns >= outermost[-1].end_ns):
            outermost.append(event)
    return outermost


def _inside(outer: Sequence[NamedRange], ranges: Iterable[NamedRange]) -> set[str]:
    """The names of the ranges that begin inside others."""
    starts = [event.start_ns for event in outer]
    names = set()
    for event in ranges:
        last = bisect_right(starts, event.start_ns) - 1
        if last >= 0 and event.start_ns < outer[last].end_ns:
            names.add(event.name)
    return names
