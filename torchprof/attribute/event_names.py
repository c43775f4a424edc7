"""What the names of events say: our labels and marks, torch's bookkeeping, and the passes of a loop without steps."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence, Set
from typing import NamedTuple

from torchprof.attribute.compiled_graphs import CALL, COMPILES, COMPILES_TOO, REGION
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import COMPILED_INPUTS, PIPELINE, PREFIX, Event, Kind
from torchprof.run.words import ANY_STEP, GUARDS, NODE_PREFIX, OPTIMIZER_STEP, StepEnd

RAISED = PREFIX + "!raised"
"""A label of length 0 inside the range of a call that did not return, because it raised an exception."""
STOPPED = PREFIX + "!stopped"
"""A label of length 0 where activation checkpointing stops a recompute early: the op before it was not executed."""
OPENED = PREFIX + "!opened"
"""The first label of a session: torch allocates its buffers there. Nothing is recorded until the first mark."""
STEP_MARK = PREFIX + "!step"
"""A label of length 0 at the start of a recording, and at the end of each step in it."""
STARTED = PREFIX + "!started"
"""A label of length 0 at the start of a recording that begins in the middle of a step."""
ENDED = PREFIX + "!ended"
"""A label of length 0 at the end of a recording. What follows in its session is work of torchprof."""
GARBAGE_COLLECTION_LABEL = PREFIX + "!gc"
"""The label around a collection of Python's garbage collector; reports show it as ``GARBAGE_COLLECTION``."""
ENGINE_LABEL = PREFIX + "!engine"
"""The label around a call of autograd's engine."""
MEMORY = "[memory]"
"""The name of every event of an allocation or a free."""

# Bookkeeping of record_function and of autograd. torch's EventList omits it, too (torch.autograd.profiler_util).
_BOOKKEEPING = (
    *("profiler::_record_function_enter", "profiler::_record_function_enter_new", "profiler::_record_function_exit"),
    *("aten::is_leaf", "aten::output_nr", "aten::_version", "[OutOfMemory]"),
)
OF_THE_PROFILER = frozenset(
    {"Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource", "UVM Activity Init"}
)
"""What the CUDA profiler does inside the operators that it measures: it allocates memory for what it records, 2 ms at
the first launch of each thread, and instruments kernels (CUPTI Activity API, ``CUpti_ActivityOverheadKind``)."""
OVERHEAD = OF_THE_PROFILER.union(
    ("Unknown", "Driver Compiler", "Runtime Triggered Module Loading", "Lazy Function Loading", "Command Buffer Full")
)
"""All that it records as overhead. These are the driver's: it loads and compiles kernels, or waits for a full queue."""
_TORCHS_STEP = re.compile(r"ProfilerStep#\d+")
_KINDS: dict[str, Kind | None] = {
    **dict.fromkeys((*_BOOKKEEPING, RAISED)),
    **dict.fromkeys((GARBAGE_COLLECTION_LABEL, *OF_THE_PROFILER), Kind.INTERRUPTION),
    **dict.fromkeys((STEP_MARK, STARTED), Kind.STEP),
    **dict.fromkeys(COMPILES, Kind.COMPILING),
    MEMORY: Kind.MEMORY,
    OPENED: Kind.OPENED,
    ENDED: Kind.ENDED,
    STOPPED: Kind.STOPPED,
    ENGINE_LABEL: Kind.ENGINE,
    GUARDS: Kind.GUARDS,
}
_KINDS_OF_PREFIXES = {
    COMPILED_INPUTS: Kind.COMPILED_INPUTS,
    PIPELINE: Kind.PIPELINE,
    PREFIX: Kind.LABEL,  # after the two that begin with it
    NODE_PREFIX: Kind.NODE,
    REGION: Kind.REGION,
    CALL: Kind.GRAPH,
}


def event_kind(name: str) -> Kind | None:
    """The kind of CPU events with this name: None for events to omit, OP for names without a special meaning."""
    if name in _KINDS:
        return _KINDS[name]
    for prefix, kind in _KINDS_OF_PREFIXES.items():
        if name.startswith(prefix):
            return kind
    return Kind.COMPILING if name.endswith(COMPILES_TOO) else Kind.OP


def is_a_common_name(name: str) -> bool:
    """Whether torch.compile or the profiler has a range with this name, and users may choose it for a label, too."""
    return name in COMPILES or name in OF_THE_PROFILER


def is_torchs_step(name: str) -> bool:
    """Whether this is the range of a step of ``torch.profiler.profile``."""
    return _TORCHS_STEP.fullmatch(name) is not None


def is_engine(name: str) -> bool:
    """Whether this is the range of autograd's engine around a node."""
    return name.startswith(NODE_PREFIX)


def numbers_of_devices(of_work: Iterable[int], of_memory: Iterable[int]) -> dict[int, int]:
    """For ROCm: the number of each device in kernel events → its number in torch (``cuda:0``) and in memory events.

    Kernel events count all agents of the machine, CPUs included. Both numberings have the same order. Empty if they do
    not have the same length: then the devices cannot be matched.
    """
    work, memory = sorted(set(of_work)), sorted(set(of_memory))
    return dict(zip(work, memory)) if len(work) == len(memory) else {}


def is_of_a_call(name: str) -> bool:
    """Whether one of our labels is around the forward of a module, and is neither a mark nor another range of ours."""
    return name.startswith(PREFIX) and not name.startswith(PREFIX + "!")


# Marks of recordings and steps


def keep_recorded(columns: EventColumns) -> int | None:
    """Keep the events between the marks at the start and the end of a recording; all events of a session without them.
    The time between the two, in ns; None if there is no such pair."""
    opened, ended = columns.of_kinds(Kind.OPENED), columns.of_kinds(Kind.ENDED)
    begin = end = None
    if opened:
        since, marks = columns.start[opened[0][0]], columns.of_kinds(Kind.STEP)
        begin = next((index for index, _ in marks if columns.start[index] >= since), None)
        if begin is None:  # nothing was recorded
            columns.threads, columns.kernels = [], ()
            return None
    if ended:
        end = ended[0][0]
    columns.keep_between(begin, end)
    return None if begin is None or end is None else columns.start[end] - columns.end[begin]


def add_steps(columns: EventColumns, steps: int) -> None:
    """Add a STEP mark where each step of ``torch.profiler.profile`` begins, and where the last of ``steps`` ends. torch
    numbers their ranges; here they all get the same name."""
    ranges = [
        (index, thread)
        for index, thread in columns.of_kinds(Kind.USER_LABEL)
        if is_torchs_step(columns.kinds[columns.number[index]].name)
    ]
    columns.rename((index for index, _ in ranges), ANY_STEP)
    times = [(columns.start[index], thread) for index, thread in ranges]
    times += [(columns.end[index], thread) for index, thread in ranges[steps - 1 : steps]]
    columns.add(before=[Event(Kind.STEP, STEP_MARK, time, time, thread) for time, thread in times])


# The passes of a loop that marks no steps, and the calls without gradients, as in evaluation


class NamedRange(NamedTuple):
    """A range of the profiler, on the clock of the events."""

    name: str
    start_ns: int
    end_ns: int
    thread: int


class OpenPass(NamedTuple):
    """What is known of the loop at the end of a recording, for the one that begins right there.

    ``optimizers``: those seen so far, and ``missing`` of them in the open pass. ``has_backward``: whether any backward
    pass was seen; ``has_gradients``: any call with gradients. ``worked``: whether a backward pass was in the open pass;
    ``called``: a call of a model. ``model``: the label of the one that was called first.
    """

    optimizers: frozenset[str] = frozenset()
    missing: frozenset[str] = frozenset()
    has_backward: bool = False
    has_gradients: bool = False
    worked: bool = False
    called: bool = False
    model: str = ""


class Loop(NamedTuple):
    """``ends``: where each pass ends, in ns, and ``step_end`` what ends it; None if nothing can. ``thread``: where the
    passes run. ``without_gradients``: the outermost calls of labeled modules without gradients, if there is backward,
    too. None in compiled code, whose operators have no events. ``open``: the state at the end."""

    ends: Sequence[int] = ()
    without_gradients: Sequence[NamedRange] = ()
    step_end: StepEnd | None = None
    thread: int = 0
    open: OpenPass = OpenPass()


_NOTHING = Loop()  # before a recording that follows no other


def loop_of(
    names: Iterable[str],
    ranges_of: Callable[[Set[str]], Iterable[NamedRange]],
    has_gradients: Callable[[NamedRange], bool],
    before: Loop = _NOTHING,
) -> Loop:
    """The loop that was recorded. A pass ends

    - with optimizers: where each class of optimizer has made a step since the last end, with a backward pass before. So
      accumulated gradients are one pass, and so are the steps of a critic and a generator with different optimizers;
    - with backward alone: where the first call of autograd's engine after a call of a model with gradients ends;
    - else: where a call of the model ends that was called first.

    ``names``: of all ranges of the CPU. ``ranges_of``: the ranges with some of these names, in the order of start.
    ``has_gradients``: whether an operator in a call has a sequence number of autograd: it has one if gradients are
    enabled. ``before``: the loop in the recording right before this one. Once optimizers, or backward, have ended a
    pass, nothing less does: an evaluation that takes a whole recording ends none.
    """
    seen = set(names)
    optimizers = {name for name in seen if name.startswith(OPTIMIZER_STEP)}
    engine = seen & {ENGINE_LABEL}
    backward = engine or {name for name in seen if is_engine(name)}
    labels = {name for name in seen if is_of_a_call(name)}
    calls = _outermost(ranges_of(labels)) if labels else []
    last = before.open._replace(has_backward=before.open.has_backward or bool(backward))
    without: list[NamedRange] = []
    if calls and last.has_backward and not any(name.startswith(REGION) for name in seen):
        without = [call for call in calls if not has_gradients(call)]
    if without and engine:  # reentrant checkpointing: the forward is without gradients, and runs again in backward
        passes = _outermost(ranges_of(engine))
        inside = {inner.name for inner in ranges_of(labels) if _is_inside(inner, passes)}
        without = [call for call in without if call.name not in inside]
    last = last._replace(has_gradients=last.has_gradients or len(without) < len(calls))
    if optimizers or before.step_end == StepEnd.OPTIMIZER:
        ends, thread, open_pass = _of_optimizers(ranges_of(optimizers | backward), optimizers, last)
        return Loop(ends, without, StepEnd.OPTIMIZER, thread, open_pass)
    last = last._replace(worked=last.worked or bool(backward))
    if engine or before.step_end == StepEnd.BACKWARD:
        outermost = _outermost(ranges_of(engine | labels))
        of_evaluation = set(without) if last.has_gradients else set()  # in some models, no operator tells
        ends, called = [], last.called
        for event in outermost:
            if event.name != ENGINE_LABEL:
                called |= event not in of_evaluation
            elif called:
                ends.append(event.end_ns)
                called = False
        return Loop(ends, without, StepEnd.BACKWARD, _thread_of(outermost), last._replace(called=called))
    model = last.model or (calls[0].name if calls else "")
    ends = [call.end_ns for call in calls if call.name == model]
    return Loop(ends, without, StepEnd.CALL if model else None, _thread_of(calls), last._replace(model=model))


def _of_optimizers(
    ranges: Iterable[NamedRange], optimizers: Set[str], last: OpenPass
) -> tuple[list[int], int, OpenPass]:
    """The ends, their thread, and the pass that is open at the end. ``last``: the one that was open at the start."""
    of_both = [*ranges]
    steps = _outermost(call for call in of_both if call.name in optimizers)
    new = {call.name for call in steps} - last.optimizers  # an optimizer inside another one makes no step by itself
    every = last.optimizers | new
    ends: list[int] = []
    missing, worked = {*last.missing, *new}, last.worked
    are_steps = set(steps)
    # In the order of their ends: the closure of an optimizer runs backward inside its step.
    for event in sorted(of_both, key=lambda event: event.end_ns):
        if event.name not in optimizers:
            worked = True
        elif event in are_steps:
            missing.discard(event.name)
            if (worked or not last.has_backward) and not missing:
                ends.append(event.end_ns)
                missing, worked = {*every}, False
    return ends, _thread_of(steps), last._replace(optimizers=every, missing=frozenset(missing), worked=worked)


def _thread_of(ranges: Sequence[NamedRange]) -> int:
    return ranges[0].thread if ranges else 0


def _outermost(ranges: Iterable[NamedRange]) -> list[NamedRange]:
    """The ranges of the thread with the first one that are in no other of them."""
    outermost: list[NamedRange] = []
    for event in ranges:
        if not outermost or (event.thread == outermost[0].thread and event.start_ns >= outermost[-1].end_ns):
            outermost.append(event)
    return outermost


def _is_inside(inner: NamedRange, ranges: Sequence[NamedRange]) -> bool:
    """Whether a range begins inside one of others, which do not overlap and are in order."""
    last = bisect_right(ranges, inner.start_ns, key=lambda event: event.start_ns) - 1
    return last >= 0 and inner.start_ns < ranges[last].end_ns
