"""The events that attribution reads: their kinds, one event, and the module that a label stands for."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PREFIX = "torchprof:"
"""Prefix of the names of all our labels."""
HOOKS = PREFIX + "!hooks:"
"""Prefix of the label around hooks in which a parallel module exchanges data before and after its forward. The label
of the module follows, without ``PREFIX``."""
COMPILED_INPUTS = PREFIX + "!given:"
"""Prefix of the label around one call of a compiled function. A number follows: it stands for the tensors that the
function took from modules."""

PIPELINE = PREFIX + "!pipeline:"
"""Prefix of the labels around the steps of a pipeline's schedule, and around what a stage does in it."""


class Kind(Enum):
    """The kind of an event."""

    __hash__ = object.__hash__  # faster: Enum's is a Python function, and dicts by kind are read for every event

    OP = "op"
    USER_LABEL = "label"
    LABEL = "forward of a labeled module"
    ENGINE = "autograd's engine, from its call to its return; without a name, a part of a call"
    NODE = "autograd node, with the engine's work around it"
    BACKWARD_FUNCTION = "autograd node"
    STOPPED = "mark: the op before it was not executed"
    OPENED = "mark: a session begins, and its recording follows"
    STEP = "mark: a step ends here, and the next begins"
    ENDED = "mark: the recording ends here, and its session follows"
    COLLECTIVE = "a collective, from its beginning to its end"
    GUARDS = "guards of torch.compile, before the region that they guard"
    REGION = "code that torch.compile made"
    GRAPH = "kernels of a compiled graph"
    COMPILING = "torch.compile compiles"
    COMPILED_INPUTS = "mark: the tensors that the compiled function inside took from modules"
    PIPELINE = "a step of a pipeline's schedule, an action or a wait in it: no part of what is attributed"
    INTERRUPTION = "what can interrupt anything: Python's garbage collector, or the profiler itself"
    SAMPLE = "a sampled source line of Python"
    KERNEL = "kernel"
    MEMORY = "memory"


class Detail(Enum):
    """How much of the inputs of an op is read."""

    NOTHING = 0
    SHAPES = 1
    ONES = 2  # shapes, and which scalars are 0 or 1; any other scalar reads as 2
    SCALARS = 3  # shapes, and the values of all scalars


class Event(NamedTuple):
    """The part of one profiler event that attribution needs.

    ``name``: the label of a LABEL, the source line of a SAMPLE. ``thread``: the stream number of a KERNEL. A COLLECTIVE
    lasts from ``start_ns`` to ``end_ns``; its thread may run other events meanwhile. ``sequence``: the autograd
    sequence number (-1: none). ``forward_thread``: the thread that this number was counted on.

    ``correlation``: of an op, its own number (0: none; negative: a call of the device's runtime, and its kernels belong
    to the op around it); of a KERNEL, the number of the op that launched it (BEFORE: launched before the recording
    began); of a MEMORY event, the address (0: unknown). ``device``: where the memory is, or where the kernel ran.
    ``nbytes``: negative for a free. ``signature``: the number of the op's recorded inputs (0: not recorded).
    """

    kind: Kind
    name: str
    start_ns: int
    end_ns: int
    thread: int
    sequence: int = -1
    forward_thread: int = 0
    correlation: int = 0
    device: str = "cpu"
    nbytes: int = 0
    signature: int = 0


class Site(NamedTuple):
    """The module that a label stands for. ``layers``: one layer for each path of the module, in the order of paths.

    ``wrapper``: the label of a module that only wraps this one and is shown as the same layer. If the wrapper's range
    is directly around the range of this module, both are one call.
    """

    layers: tuple[int, ...]
    wrapper: str | None = None
