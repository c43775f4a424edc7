"""Constants and small predicates that every package shares: phases, kinds of frames, names of rows that belong to no
layer, and names of ranges.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from torchprof.errors import TorchprofError, suggest

GUARDS = "TorchDynamo Cache Lookup"
"""The range right before that, in which the guards of all versions are tried until those of one hold."""
GRAPH = "CompiledFxGraph"
"""What that is called here, whatever the key."""
COMPILING = "compiling"
"""What all of them are called here, as a region."""
REPLAYS = frozenset({"cudaGraphLaunch", "hipGraphLaunch"})
"""The calls of a device's runtime that replay a graph of kernels."""

NOT_ATTRIBUTABLE = "not attributable"
"""What the name of a group of kernels without known layers begins with; ``: `` and one of these reasons follow."""
COMPILED_BEFORE = "compiled before"
NESTED_GRAPHS = "nested graphs"
GRAPH_NOT_READ = "graph not read"
UNKNOWN_KERNEL = "unknown kernel"
UNKNOWN_MODULE = "unknown module"
OTHER_MODULE = "other module"
AMBIGUOUS_MODULE = "ambiguous module"

REPLAY = "CUDA graph replay"

DIVISORS = ("flops", "bytes")
"""By what the time of a kernel of several layers can be divided."""

_OVERHEAD = re.compile(
    rf"{GUARDS}|Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue"
    r"|(autograd::engine::evaluate_function: )?CompiledFunction(Backward)?\d*"
)
_GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_\w+")


def is_overhead(op: str) -> bool:
    """Whether an op in a region leads to its graph: it is no kernel, nor what runs as it would without torch.compile.

    The calls of the graph itself are not: kernels of C++ that have no ranges of their own are in their time.
    """
    return _OVERHEAD.fullmatch(op) is not None


def is_generated(kernel: str) -> bool:
    """Whether Inductor has made a kernel; the others are those of libraries."""
    return _GENERATED.fullmatch(kernel) is not None


OUTSIDE = -1
"""The layer index of work that belongs to no layer: loss, optimizer, data."""
NOT_SELECTED = -2
"""The layer index of work in layers that ``paths=`` did not select."""

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
PHASES = (FORWARD, BACKWARD, RECOMPUTE)
LAUNCH_NOT_RECORDED = "(launch not recorded)"
"""The label of kernels whose launch is not in the recording."""
LAUNCHED_BEFORE = "(launched before the recording)"
"""The label of kernels that were launched before the recording began, and ran in it: work of an earlier step, or of a
warm-up. It is in no sum of layers or of ``(outside)``, in no step, share, comparison or rank's own work."""
BEFORE = -(1 << 63)
"""Where the number of what launched a kernel stands: it was launched before the recording began."""

GARBAGE_COLLECTION = "garbage collection"
"""What collections of Python's garbage collector are called, whatever they interrupt."""

RANGES = frozenset({"label", "region", "kernels", "gc"})
"""The kinds of frames that stand for all that ran in them, and have rows of their own beside those of layers."""


class Signature(NamedTuple):
    """What an op was called on: for each of its inputs a shape, a type, and a value.

    ``shapes``: a tuple of sizes; for a list of tensors a tuple of such tuples; None where that is not known.
    ``dtypes``: as torch's profiler spells them: "float", "c10::BFloat16", "long int", …; "Scalar", "ScalarList" and
    "TensorList" for those; "" for None and for what has no shape. ``scalars``: the value of what is no tensor, None
    for the others; ``()`` where they were not recorded. ``stack``: the source lines it was called from, as
    "file(line): function", innermost first; ``()`` where they were not recorded.
    """

    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    scalars: tuple[Any, ...] = ()
    stack: tuple[str, ...] = ()


class Frame(NamedTuple):
    """One step inward from a layer to an event: ``kind`` is op, label (the user's), collective (an exchange between
    ranks), kernel, python (a source line), region (code that torch.compile made, by its compile id), kernels (of a
    compiled graph: what they have in common) or gc (Python's garbage collector).

    ``signature`` is what an op was called on, None where that was not recorded.
    """

    kind: str
    name: str
    signature: Signature | None = None


OUTSIDE_NAME = "(outside)"
NOT_SELECTED_NAME = "(not selected)"


BETWEEN_OPS = "(between ops)"


def is_left_over(frames: Sequence[Frame]) -> bool:
    """Whether a row with these frames is work of a device that was launched before the recording began."""
    return bool(frames) and frames[0].name == LAUNCHED_BEFORE and frames[0].kind == "label"


def number_of_phase(phase: str) -> int:
    """Its index in ``PHASES``. Raises TorchprofError for what is no phase."""
    if phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    return PHASES.index(phase)


OPTIMIZER_RANGE = "Optimizer."
"""What the names of the ranges begin with that torch.optim puts around its methods."""
OPTIMIZER_STEP = "Optimizer.step#"
"""Of those around steps; the class and ``.step`` follow."""
ZERO_GRAD = "Optimizer.zero_grad#"


def is_optimizer_step(frames: Sequence[Frame]) -> bool:
    """Whether a row with these frames is the work of an optimizer's step."""
    return bool(frames) and frames[0].name.startswith(OPTIMIZER_STEP)


ANY_STEP = "ProfilerStep*"
"""What the ranges of all of torch's steps are called here, as in torch's own tables."""
_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc|xccl|hccl|rccl):\w+( \d+(->|<-)\d+)?")
_HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
_RUNTIME_CALL = re.compile(r"(cuda|cu|hip|ze|ur|musa|mu)[A-Z]\w*")


def is_collective(name: str) -> bool:
    """Whether this is the range of a collective (``nccl:all_reduce``). It may end on another thread, whenever that
    is done, so it is no time of the thread that it began on."""
    return _COLLECTIVE.fullmatch(name) is not None


def is_host_collective(name: str) -> bool:
    """Whether this is the range of a collective that the CPU carries out, from its beginning to its end."""
    return name.startswith(_HOST_BACKENDS) and is_collective(name)


@cache
def is_runtime_call(name: str) -> bool:
    """Whether an event that is no range of the user's is a call of a device's runtime, as ``cudaLaunchKernel``."""
    return _RUNTIME_CALL.fullmatch(name) is not None
