"""The names of events in a session and in a trace: our labels and marks, torch's bookkeeping, and steps."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from torchprof.attribute.compiled_graphs import CALL, COMPILES, COMPILES_TOO, REGION
from torchprof.attribute.event_columns import EventColumns
from torchprof.attribute.events import COMPILED_INPUTS, PIPELINE, PREFIX, Event, Kind
from torchprof.run.words import ANY_STEP, GUARDS, NODE_PREFIX

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
"""The label around a collection of Python's garbage collector, in the events. Reports show such a range under the name
``GARBAGE_COLLECTION`` of ``run.words``."""
ENGINE_LABEL = PREFIX + "!engine"
"""The label around a call of autograd's engine."""
MEMORY = "[memory]"
"""The name of every event of an allocation or a free."""

# Bookkeeping of record_function and of autograd. torch's EventList omits it, too (torch.autograd.profiler_util).
_BOOKKEEPING = (
    "profiler::_record_function_enter",
    "profiler::_record_function_enter_new",
    "profiler::_record_function_exit",
    "aten::is_leaf",
    "aten::output_nr",
    "aten::_version",
    "[OutOfMemory]",
)
OF_THE_PROFILER = frozenset(
    {"Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource", "UVM Activity Init"}
)
"""What the CUDA profiler does inside the operators that it measures: it allocates memory for what it records, 2 ms at
the first launch of each thread, and instruments kernels (CUPTI Activity API, ``CUpti_ActivityOverheadKind``)."""
OVERHEAD = OF_THE_PROFILER | {
    "Unknown",
    "Driver Compiler",
    "Runtime Triggered Module Loading",
    "Lazy Function Loading",
    "Command Buffer Full",
}
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
    """Whether torch.compile or the profiler has a range with this name, and users may easily choose the same name for a
    label."""
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


def keep_recorded(columns: EventColumns, note: Callable[[int], object] = int) -> None:
    """Keep the events between the marks at the start and the end of a recording; all events of a session without them.
    ``note`` is called with the time between these marks, in ns."""
    opened, ended = columns.of_kinds(Kind.OPENED), columns.of_kinds(Kind.ENDED)
    begin = end = None
    if opened:
        begin = next(
            (index for index, _ in columns.of_kinds(Kind.STEP) if columns.start[index] >= columns.start[opened[0][0]]),
            None,
        )
        if begin is None:  # nothing was recorded
            columns.threads, columns.kernels = [], ()
            return
    if ended:
        end = ended[0][0]
        if begin is not None:
            note(columns.start[end] - columns.end[begin])
    columns.keep_between(begin, end)


def add_steps(columns: EventColumns, steps: int) -> None:
    """Add a STEP mark where each step of ``torch.profiler.profile`` begins, and where the last of ``steps`` ends.

    torch numbers the ranges of steps; here they all get the same name.
    """
    ranges = [
        (index, thread)
        for index, thread in columns.of_kinds(Kind.USER_LABEL)
        if is_torchs_step(columns.kinds[columns.number[index]].name)
    ]
    columns.rename((index for index, _ in ranges), ANY_STEP)
    marks = [_mark(columns.start[index], thread) for index, thread in ranges]
    if len(ranges) >= steps:
        index, thread = ranges[steps - 1]
        marks.append(_mark(columns.end[index], thread))
    columns.add(before=marks)


def _mark(time: int, thread: int) -> Event:
    return Event(Kind.STEP, STEP_MARK, time, time, thread)
