"""The events that attribution works on: the kinds, one event, and what a label stands for."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PREFIX = "torchprof:"
"""Prefix of the names of all our labels."""
HOOKS = PREFIX + "!hooks:"
"""Prefix of the label around the hooks in which a parallel module exchanges data before and after its forward; the
rest of the module's label follows."""
GIVEN = PREFIX + "!given:"
"""Prefix of the label around a call of a compiled function's graphs; a number follows, which stands for the tensors
that the function took from modules."""


class Kind(Enum):
    """What an event reports."""

    __hash__ = object.__hash__  # Enum's own is a function in Python, and a table by kind asks for it at every event

    OP = "op"
    USER_LABEL = "label"
    LABEL = "forward of a labelled module"
    NODE = "autograd node, with the engine's work around it"
    BACKWARD_FUNCTION = "autograd node"
    STOPPED = "mark: the op before it was not executed"
    STEP = "mark: a step ends here, and the next begins"
    COLLECTIVE = "a collective, from its beginning to its end"
    GUARDS = "guards of torch.compile, before the region that they guard"
    REGION = "code that torch.compile made"
    GRAPH = "kernels of a compiled graph"
    COMPILING = "torch.compile compiles"
    GIVEN = "mark: the inputs that the compiled function inside took from modules"
    PIECE = "a piece of an op that is divided among layers, but for the last"
    GARBAGE = "a run of Python's garbage collector"
    SAMPLE = "a sampled source line of Python"
    KERNEL = "kernel"
    MEMORY = "memory"


class Detail(Enum):
    """How much is read of the inputs of an op."""

    NOTHING = 0
    SHAPES = 1
    ONES = 2  # shapes, and which of the scalars are 0 or 1: all others read as 2
    SCALARS = 3  # shapes, and the values of all scalars


class Event(NamedTuple):
    """The part of one profiler event that attribution needs.

    ``name``: of a LABEL its label, of a SAMPLE its source line. ``thread``: of a KERNEL the number of its stream. A
    COLLECTIVE lasts from ``start_ns`` to ``end_ns``, whatever its thread does meanwhile. ``sequence``: the autograd
    sequence number (-1: none); ``forward_thread``: the thread that it was counted on.

    ``correlation``: of an op its own number (0: none; negative: a call of the device's runtime, whose kernels belong to
    the op around it); of a KERNEL the number of the op that launched it (BEFORE: launched before the recording began);
    of a MEMORY event the address (0: unknown). ``device``: where the memory is or the kernel ran. ``nbytes``: negative
    for a free. ``signature``: the number of the recorded inputs of the op (0: not recorded).
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
    """What a label stands for: one module. ``layers``: one for each of its paths, first path first.

    ``wrapper``: the label of a module that only wraps this one and is shown as the same layer. Its range directly
    around this one is the same call.
    """

    layers: tuple[int, ...]
    wrapper: str | None = None
