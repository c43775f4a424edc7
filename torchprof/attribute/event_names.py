"""What the names of CPU events mean: our labels and marks, ranges of torch.compile, and work of the profiler."""

from __future__ import annotations

import re

from torchprof.attribute.events import COMPILED_INPUTS, PIPELINE, PREFIX, Kind
from torchprof.run.words import GARBAGE_COLLECTION, GUARDS, NODE_PREFIX, FrameKind

# Our labels and marks

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
OPTIMIZER_MARK = PREFIX + "!optimizer:"
"""Prefix of the label of length 0 inside the step of an optimizer. The number of the object follows: torch's range has
the name of its class."""
WAITS = PREFIX + "!waits:"
"""Prefix of the label around a call of Python that waits for other ranks or threads. The name of its row follows."""

# The ranges of torch.compile

REGION = "Torch-Compiled Region"
"""Prefix of the range in which compiled code runs. Its compile ID follows (``torch/_dynamo/convert_frame.py``); in
``: 0/1`` it is the second version of the first function."""
CALL = "## Call CompiledFxGraph "
"""Prefix of the range in which the kernels of Inductor run. The key of their graph follows
(``torch/_inductor/output_code.py``)."""
COMPILES_BACKWARD = "compiled_autograd"
"""The range in which compiled autograd makes a graph of a whole backward (``torch/_dynamo/compiled_autograd.py``)."""
COMPILES = frozenset({"dynamo", "entire_frame_compile", "entire_backward_compile", COMPILES_BACKWARD})
"""The ranges in which torch.compile compiles."""
COMPILES_TOO = "(dynamo_timed)"
"""Suffix of the names of single steps of compilation. Older versions of torch record them without a range around."""
OF_BACKWARD = "!"
"""Prefix of the compile ID of what compiled autograd made of a whole backward (``torch/_guards.py``, ``CompileId``)."""

# What torch's profiler records of its own

MEMORY = "[memory]"
"""The name of every event of an allocation or a free."""
_BOOKKEEPING = (
    *("profiler::_record_function_enter", "profiler::_record_function_enter_new", "profiler::_record_function_exit"),
    *("aten::is_leaf", "aten::output_nr", "aten::_version", "[OutOfMemory]"),
)
"""Work of record_function and of autograd that torch's EventList omits, too (``torch/autograd/profiler_util.py``)."""
OF_THE_PROFILER = frozenset(
    {"Activity Buffer Request", "Buffer Flush", "Instrumentation", "Resource", "UVM Activity Init"}
)
"""What the CUDA profiler does inside the operators that it measures: it allocates memory for what it records, 2 ms at
the first launch of each thread, and instruments kernels (CUPTI Activity API, ``CUpti_ActivityOverheadKind``)."""
OVERHEAD = OF_THE_PROFILER.union(
    ("Unknown", "Driver Compiler", "Runtime Triggered Module Loading", "Lazy Function Loading", "Command Buffer Full")
)
"""All that the profiler records as overhead. In these five, the driver loads or compiles kernels, or waits."""

# The kind of an event, and other questions to its name

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
_KINDS_OF_PREFIXES: dict[str, Kind | None] = {
    OPTIMIZER_MARK: None,
    COMPILED_INPUTS: Kind.COMPILED_INPUTS,
    PIPELINE: Kind.PIPELINE,
    WAITS: Kind.WAIT,
    PREFIX: Kind.LABEL,  # after the longer prefixes that begin with it
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


def frame_of_interruption(name: str) -> tuple[FrameKind, str]:
    """The kind and the name of the frame for what interrupts a thread, from the name of its event."""
    if name == GARBAGE_COLLECTION_LABEL:
        return FrameKind.GC, GARBAGE_COLLECTION
    return FrameKind.PROFILER if name in OF_THE_PROFILER else FrameKind.START_UP, name


def region_of(name: str) -> str:
    """The compile ID of a region, from the name of its range."""
    return name.removeprefix(REGION).removeprefix(": ") or "?"


def graph_of(name: str) -> str:
    """The key of a compiled graph, from the name of a range in which its kernels run."""
    return name.removeprefix(CALL).removesuffix(" ##")


def is_a_common_name(name: str) -> bool:
    """Whether torch.compile or the profiler has a range with this name, and users may choose it for a label, too."""
    return name in COMPILES or name in OF_THE_PROFILER


def is_torchs_step(name: str) -> bool:
    """Whether this is the range of a step of ``torch.profiler.profile``."""
    return _TORCHS_STEP.fullmatch(name) is not None


def is_node_range(name: str) -> bool:
    """Whether this is the range of autograd's engine around a node."""
    return name.startswith(NODE_PREFIX)


def is_module_label(name: str) -> bool:
    """Whether one of our labels is around the forward of a module, and is neither a mark nor another range of ours.
    Paths are percent-escaped: they have no blanks."""
    return name.startswith(PREFIX) and not name.startswith((PREFIX + "!", PREFIX + " "))
