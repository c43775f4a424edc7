"""What attribution needs to know of one event of the profiler."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

PREFIX = "torchprof:"
"""What the name of each of our labels begins with."""
HOOKS = PREFIX + "!hooks:"
"""What that begins with around the hooks by which a parallel module exchanges data before and after its forward; the
rest of the module's own label follows."""
GIVEN = PREFIX + "!given:"
"""What that begins with around a call of a compiled function's graphs; a number follows, which stands for the tensors
that the function took from modules."""


class Kind(Enum):
    """What sort of thing an event reports."""

    __hash__ = object.__hash__  # Enum's own is a function in Python, and a table by kind asks for it at every event

    OP = "op"
    USER_LABEL = "label"
    LABEL = "forward of a labelled module"
    NODE = "autograd node, with the engine's work around it"
    BACKWARD_FUNCTION = "autograd node"
    STOPPED = "mark: the op before it was not carried out"
    STEP = "mark: here a step ends, and the next begins"
    COLLECTIVE = "an exchange between ranks, from its beginning to its end"
    GUARDS = "guards of torch.compile, before what they guard"
    REGION = "code that torch.compile made"
    GRAPH = "kernels of a compiled graph"
    COMPILING = "torch.compile at work"
    GIVEN = "mark: what the compiled function inside took from modules"
    PIECE = "what comes before the last piece of an op that is divided"
    GARBAGE = "Python's garbage collector at work"
    SAMPLE = "the line at which Python was seen"
    KERNEL = "kernel"
    MEMORY = "memory"


class Detail(Enum):
    """How much is read of what an op was called on."""

    NOTHING = 0
    SHAPES = 1
    ONES = 2  # and which of the scalars are 0 or 1: the others read as 2
    SCALARS = 3  # and all their values


class Event(NamedTuple):
    """What ``attribute`` needs of one profiler event, and no more.

    ``name`` of a LABEL event is its label, that of a SAMPLE its source line. ``thread`` of a KERNEL event is the number
    of the stream that it ran on. A COLLECTIVE lasts from ``start_ns`` to ``end_ns`` whatever its thread does meanwhile.
    ``sequence`` is the autograd sequence number (-1: none) and ``forward_thread`` the thread that it was counted on.
    ``correlation`` is an op's own number (0: none), a kernel's number of the op that launched it (BEFORE: it was
    launched before the recording began), and a MEMORY event's address (0: not known). A negative one is that of a call
    of the device's runtime: what it launched belongs to the op around it. ``device`` names where the memory is or the
    kernel ran, ``nbytes`` is negative for a free. ``signature`` is the number of what an op was called on (0: not
    recorded).
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
    """What a label stands for: one module, and the layers it may be, one for each of its paths, first path first.

    ``wrapper`` is the label of the module that only wraps this one and is shown as the same layer: its range around
    ours is the same call.
    """

    layers: tuple[int, ...]
    wrapper: str | None = None
