"""Words that all packages share, and what they mean: phases, kinds of frames, names of rows and of torch's ranges."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import Enum
from functools import cache
from typing import Any, NamedTuple

from torchprof.errors import TorchprofError, suggest

# Layers and phases

OUTSIDE = -1
"""The layer index of work that belongs to no layer: loss, optimizer, data."""
NOT_SELECTED = -2
"""The layer index of work in layers that ``paths=`` did not select."""

FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
PHASES = (FORWARD, BACKWARD, RECOMPUTE)
OTHER = "other"
"""The phase of work outside all layers that is not backward: data, loss, optimizer, logging. The column of the
phase has the number of ``FORWARD`` there."""
LAUNCH_NOT_RECORDED = "(launch not recorded)"
"""The label of kernels whose launch is not in the recording."""
LAUNCHED_BEFORE = "(launched before the recording)"
"""The label of kernels that ran in the recording but were launched before it began, by an earlier step or a warm-up.
They count for no layer, not for ``(outside)``, and in no step, share, comparison or work of a rank."""
BEFORE = -(1 << 63)
"""In place of the number of the launching op of a kernel that was launched before the recording began."""

GARBAGE_COLLECTION = "garbage collection"
"""The name of the frames of Python's garbage collections, whatever they interrupt."""


class StepEnd(str, Enum):
    """What ends a step of a loop, the strongest first. A member equals its text and is written as it."""

    MARK = "mark"
    """``prof.step()``, or a step of torch's profiler. The others are for a loop that marks none."""
    OPTIMIZER = "optimizer"
    """All optimizers have made a step."""
    BACKWARD = "backward"
    """A backward pass has ended."""
    CALL = "call"
    """A call of the model has ended."""


# Frames: the way from a layer inward to an event


class FrameKind(str, Enum):
    """What a frame is. A member equals its text, ``FrameKind.OP == "op"``, and is written as it."""

    OP = "op"
    LABEL = "label"
    """A range of the user."""
    COLLECTIVE = "collective"
    KERNEL = "kernel"
    PYTHON = "python"
    """A source line."""
    REGION = "region"
    """Code of torch.compile, named by its compile id."""
    KERNELS = "kernels"
    """A group of kernels of a compiled graph."""
    GC = "gc"
    """Python's garbage collector."""
    PROFILER = "profiler"
    """Work of the profiler itself."""
    START_UP = "start-up"
    """A call of a device's runtime before the device has done any work."""
    WAIT = "wait"
    """A thread runs no operator, and something recorded says what it waits for."""

    __str__ = str.__str__
    __repr__ = str.__repr__


MOST_NESTED = 128
"""The most ranges and operators inside one another, and the most levels of layers in a trace. What is deeper belongs to
what is around it. Each row lists all names around it: without a limit, their size would grow with the square of the
depth."""
INTERRUPTIONS = frozenset({FrameKind.GC, FrameKind.PROFILER, FrameKind.START_UP})
"""The kinds of what can interrupt anything, and belongs to no layer."""
RANGES = frozenset({FrameKind.LABEL, FrameKind.REGION, FrameKind.KERNELS, FrameKind.WAIT, *INTERRUPTIONS})
"""The kinds of frames that are ranges: everything that ran in them is in their total."""


class Signature(NamedTuple):
    """The inputs of an op: for each input a shape, a type and a value; and the source lines of the call.

    - ``shapes``: a tuple of sizes; for a list of tensors a tuple of those tuples; None if unknown.
    - ``dtypes``: as torch's profiler spells them ("float", "c10::BFloat16", "long int", …); "Scalar", "ScalarList" and
      "TensorList" for those; "" for None and for inputs without a shape.
    - ``scalars``: the value of an input that is not a tensor, None for tensors; ``()`` if they were not recorded.
    - ``stack``: the source lines of the call, as "file(line): function", innermost first; ``()`` if not recorded.
    """

    shapes: tuple[Any, ...]
    dtypes: tuple[str, ...]
    scalars: tuple[Any, ...] = ()
    stack: tuple[str, ...] = ()


class SourceLine(str):
    """A sampled line of Python. It equals its text, and is written as it:
    ``SourceLine("train.py", 7, "log", "print") == "train.py:7 log → print"``.

    ``file``: as it is shown. ``function``: the one that the line is in. ``calls``: what the line was calling, as it is
    written there; "" for nothing. ``is_hook``: torch calls the function with a module, and it is not its forward.
    ``owner``: the function and its file, as text.
    """

    file: str
    line: int
    function: str
    calls: str
    is_hook: bool
    owner: str

    _TEXT = re.compile(r"(?:(.*):(\d+) )?(.*?)( \(hook\))?(?: → (.*))?", re.DOTALL)

    def __new__(cls, file: str, line: int, function: str, calls: str = "", is_hook: bool = False) -> SourceLine:
        shown = f"{function} (hook)" if is_hook else function
        place = f"{file}:{line} {shown}" if file else shown
        text = super().__new__(cls, f"{place} → {calls}" if calls else place)
        text.file, text.line, text.function, text.calls, text.is_hook = file, line, function, calls, is_hook
        text.owner = f"{file} {shown}" if file else shown
        return text

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceLine, (self.file, self.line, self.function, self.calls, self.is_hook)

    @property
    def at(self) -> SourceLine:
        """The line without what it calls."""
        return SourceLine(self.file, self.line, self.function, is_hook=self.is_hook)

    @classmethod
    def of_file(cls, text: str) -> SourceLine:
        """The line with this text, in a file of a run."""
        match = cls._TEXT.fullmatch(text)
        assert match is not None  # it matches any text
        file, line, function, hook, calls = match.groups(default="")
        return cls(file, int(line or 0), function, calls, bool(hook))


class Frame(NamedTuple):
    """One step from a layer inward to an event. ``name`` is torch's, or that of the range; of a sampled line, a
    ``SourceLine``. ``signature`` has the inputs of an op; None if they were not recorded. ``kind`` is compared with
    text as well: ``frame.kind == "op"``."""

    kind: FrameKind
    name: str
    signature: Signature | None = None


def sampled_line(frames: Sequence[Frame]) -> SourceLine | None:
    """The sampled line of Python that a row with these frames is; None for other rows."""
    name = frames[-1].name if frames else None
    return name if isinstance(name, SourceLine) else None


OUTSIDE_NAME = "(outside)"
NOT_SELECTED_NAME = "(not selected)"
NO_LAYERS = {NOT_SELECTED: NOT_SELECTED_NAME, OUTSIDE: OUTSIDE_NAME}
BETWEEN_OPS = "(between ops)"
WAITS_FOR_AUTOGRAD = "waits for autograd"
"""The name of the frame for the time in which a thread runs nothing, and a backward pass that it called runs on other
threads."""
WAITS_FOR_RANKS, WAITS_FOR_THREADS = "waits for other ranks", "waits for other threads"
"""The names of the frames of calls of Python that wait: ``Work.wait()``; ``Thread.join()``, ``Condition.wait()``."""
WAITS_IN_WORDS = {
    WAITS_FOR_AUTOGRAD: "waiting for backward",
    WAITS_FOR_RANKS: "waiting for other ranks",
    WAITS_FOR_THREADS: "waiting for other threads",
}
"""The names of these in sentences."""
AUTOGRAD_ENGINE = "(autograd engine)"
"""The name of the frame for the time in a backward pass that is in no autograd node."""
UNUSUAL_PASSES = "(unusual passes)"
"""The name of the frame for the time of passes of a loop that none of the recorded ones stands for."""


def is_left_over(frames: Sequence[Frame]) -> bool:
    """Whether a row with these frames is device work that was launched before the recording began."""
    return bool(frames) and frames[0].name == LAUNCHED_BEFORE and frames[0].kind == FrameKind.LABEL


def phase_of(layer: int, phase: str) -> str:
    """The phase of work by the index of its layer: ``OTHER`` in place of forward for work outside all layers. In sums,
    columns and filters by phase it is with the forward."""
    return OTHER if layer == OUTSIDE and phase == FORWARD else phase


def number_of_phase(phase: str) -> int:
    """The index of a phase in ``PHASES``. Raises TorchprofError for an unknown phase."""
    if phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    return PHASES.index(phase)


# torch.compile

GUARDS = "TorchDynamo Cache Lookup"
"""The range in which torch.compile checks the guards of all versions of a region, right before the region runs."""
GRAPH = "CompiledFxGraph"
"""The name here of all calls of compiled graphs. In torch, the key of the graph follows."""
COMPILING = "compiling"
"""The name of the region that stands for all ranges in which torch.compile compiles."""
REPLAYS = frozenset({"cudaGraphLaunch", "hipGraphLaunch"})
"""The runtime calls that replay a graph of kernels."""
REPLAY = "CUDA graph replay"

NOT_ATTRIBUTABLE = "not attributable"
"""Prefix of the name of a group of kernels with unknown layers. ``: `` and one of the reasons below follow."""
BETWEEN = "between: "
"""Prefix of the name of a group of kernels of which only the layers before and after are known. Their names follow."""
COMPILED_BEFORE = "compiled before"
LAYERS_NOT_RECORDED = "layers not recorded"
NESTED_GRAPHS = "nested graphs"
GRAPH_NOT_READ = "graph not read"
UNKNOWN_KERNEL = "unknown kernel"
UNKNOWN_MODULE = "unknown module"
OTHER_MODULE = "other module"
AMBIGUOUS_MODULE = "ambiguous module"
SHARED_PARAMETER = "shared parameter"
REPLACED_PARAMETER = "replaced parameter"
FROZEN_PARAMETER = "frozen parameter"
IN_CPP = "C++ wrapper"

COMPILE_IN_BLOCK = (
    "compile the model inside the block (call torch.compiler.reset() before the block, or start a new process); "
    "warmup=1 leaves the first call, which compiles, out of the figures"
)
"""How to have the layers of compiled code recorded."""

WHY_UNKNOWN = {
    COMPILED_BEFORE: f"they were compiled before the block. To see their layers, {COMPILE_IN_BLOCK}",
    LAYERS_NOT_RECORDED: f"these were not recorded. To record them, use compile_layers=True, and {COMPILE_IN_BLOCK}",
    NESTED_GRAPHS: "they are in graphs inside another graph (torch.cond, torch.while_loop, nested regions)",
    GRAPH_NOT_READ: "their graphs could not be read during compilation",
    UNKNOWN_KERNEL: "their names are in no graph, or several kernels have the same name",
    UNKNOWN_MODULE: "torch does not record which module their operations come from",
    OTHER_MODULE: "they belong to modules that are not profiled",
    AMBIGUOUS_MODULE: "the compiled function may have called any of several modules of one class",
    SHARED_PARAMETER: "their parameter is of several layers, or of an embedding that other code multiplies with",
    REPLACED_PARAMETER: "their parameter was replaced or freed before the block ended",
    FROZEN_PARAMETER: "torch._inductor.config.freezing is on, and the compiler made their weights anew",
    IN_CPP: "torch._inductor.config.cpp_wrapper is on, and its calls of libraries have no events",
}
"""Why the layers of kernels of torch.compile are unknown, by the reason in the name of their row."""

NODE_PREFIX = "autograd::engine::evaluate_function: "
"""Prefix of the engine's range around an autograd node. The name of the node follows."""
_OVERHEAD = re.compile(
    rf"{GUARDS}|Pregraph bytecode|AOTDispatcher Runtime Wrapper Prologue"
    rf"|({NODE_PREFIX})?CompiledFunction(Backward)?\d*"
)
_GENERATED = re.compile(r"(graph_\d+_)?(cpp|triton)_\w+")


def is_overhead(op: str) -> bool:
    """Whether an op in a compiled region is overhead of torch.compile, such as checking guards. The call of the graph
    is not: its time includes that of C++ kernels that have no ranges of their own."""
    return _OVERHEAD.fullmatch(op) is not None


def is_generated(kernel: str) -> bool:
    """Whether Inductor generated this kernel. Other kernels are from libraries."""
    return _GENERATED.fullmatch(kernel) is not None


# Ranges of torch

LOADING = "enumerate(Data"
"""Prefix of the range that torch puts around each batch of a DataLoader or a DataPipe."""
OPTIMIZER_RANGE = "Optimizer."
"""Prefix of the ranges that torch.optim puts around its methods."""
OPTIMIZER_STEP = "Optimizer.step#"
"""Prefix of the ranges around optimizer steps; the class name and ``.step`` follow."""
ZERO_GRAD = "Optimizer.zero_grad#"
FSDP_RANGE = "FSDP::"
"""Prefix of the ranges that FSDP puts around its work. They name their layers: ``FSDP::pre_forward (layers.0)``."""
ANY_STEP = "ProfilerStep*"
"""The name here of the ranges of all profiler steps, as in torch's own tables."""
PIPELINE_RANGE = "PP:"
"""Prefix of the ranges that torch's schedules of pipelines put around their actions: ``PP:0F3``."""


def torchs_range(name: str) -> str:
    """What one of torch's own ranges is, in words; "" for other ranges."""
    if name.startswith(LOADING):
        return "data loading"
    for prefix, what in ((OPTIMIZER_STEP, "optimizer"), (ZERO_GRAD, "zero_grad")):
        if name.startswith(prefix):
            return f"{what} ({name.removeprefix(prefix).partition('.')[0]})"
    return ""


_COLLECTIVE = re.compile(r"(nccl|gloo|mpi|ucc|xccl|hccl|rccl):\w+( \d+(->|<-)\d+)?")
_HOST_BACKENDS = ("gloo:", "mpi:", "ucc:")
_RUNTIME_CALL = re.compile(r"(cuda|cu|hip|ze|ur|musa|mu)[A-Z]\w*")


def is_collective(name: str) -> bool:
    """Whether this is the range of a collective (``nccl:all_reduce``). It ends when the collective does, maybe on
    another thread, so its time is not time of the thread on which it started."""
    return _COLLECTIVE.fullmatch(name) is not None


def is_host_collective(name: str) -> bool:
    """Whether this is the range of a collective that the CPU runs. It lasts as long as the collective."""
    return name.startswith(_HOST_BACKENDS) and is_collective(name)


@cache
def is_runtime_call(name: str) -> bool:
    """Whether an event is a call of a device runtime, such as ``cudaLaunchKernel``. Not for ranges of the user."""
    return _RUNTIME_CALL.fullmatch(name) is not None


def range_in_words(kind: FrameKind, name: str) -> str:
    """What a range is called in tables: what the user said, or what torch.compile made. An op as it is."""
    if kind == FrameKind.LABEL:
        return f"{name} (label)"
    if kind not in RANGES:
        return name
    if kind in (FrameKind.PROFILER, FrameKind.START_UP):
        return f"({kind}: {name})"
    return f"(region {name})" if kind == FrameKind.REGION and name != COMPILING else f"({name})"
