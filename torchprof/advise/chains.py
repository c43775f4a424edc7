"""Predicates on chains of frames: what rules ask of the place of a row. The docstring of each says when
it holds; ``Evidence`` finds the chains that match."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torchprof.run.words import (
    COMPILING,
    INTERRUPTIONS,
    LOADING,
    NODE_PREFIX,
    OPTIMIZER_RANGE,
    OPTIMIZER_STEP,
    WAITS_FOR_RANKS,
    WAITS_FOR_THREADS,
    Frame,
    FrameKind,
)

Frames = Sequence[Frame]
"""The frames of a row, outer to inner."""
Holds = Callable[[Frames], bool]

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The node that writes or adds up the gradient of a parameter."""
_NODE = re.compile(NODE_PREFIX + r"(\w+)Backward\d*")


@dataclass(frozen=True)
class Having:
    """A predicate: ``traits`` of the frames has one of ``wanted``. All chains are sorted once by each kind of traits:
    most rules ask for what few runs have."""

    traits: Callable[[Frames], Collection[str]]
    wanted: frozenset[str]

    def __call__(self, frames: Frames) -> bool:
        return not self.wanted.isdisjoint(self.traits(frames))


@dataclass(frozen=True, eq=False)
class Among:
    """A predicate whose ``test`` is only asked of the chains that match a ``wider`` one: these are few, and known."""

    wider: Holds
    test: Holds

    def __call__(self, frames: Frames) -> bool:
        return self.wider(frames) and self.test(frames)


# Traits


def ops_in(frames: Frames) -> Collection[str]:
    """The names of all ops among the frames."""
    return {frame.name for frame in frames if frame.kind == FrameKind.OP}


def regions_in(frames: Frames) -> Collection[str]:
    """The names of the regions of torch.compile among the frames."""
    return {frame.name for frame in frames if frame.kind == FrameKind.REGION}


def kinds_in(frames: Frames) -> Collection[str]:
    """The kinds of the frames."""
    return {frame.kind for frame in frames}


def innermost_kind(frames: Frames) -> Collection[str]:
    """The kind of the innermost frame."""
    return () if not frames else (frames[-1].kind,)


def directly_called(frames: Frames) -> Collection[str]:
    """The name of the op that a layer calls directly; user labels may be around it."""
    for kind, name, _ in frames:
        if kind != FrameKind.LABEL:
            return (name,) if kind == FrameKind.OP else ()
    return ()


def outermost_op(frames: Frames) -> str | None:
    """The same; None without one."""
    return next(iter(directly_called(frames)), None)


def node_of(frames: Frames) -> str | None:
    """The operator whose backward the outermost autograd node is, in lower case without underscores: "leakyrelu"."""
    match = _NODE.fullmatch(outermost_op(frames) or "")
    return match[1].lower() if match else None


# Predicates


def inside(*names: str) -> Having:
    """An op of one of these names is among the frames."""
    return Having(ops_in, frozenset(names))


def calling(names: Collection[str]) -> Having:
    """The op that the layer calls directly has one of these names."""
    return Having(directly_called, frozenset(names))


def always(frames: Frames) -> bool:
    """It is any row."""
    return True


is_device_work = Having(innermost_kind, frozenset({FrameKind.KERNEL}))
is_op = Having(innermost_kind, frozenset({FrameKind.OP}))
"""It is the self of an operator, or of an autograd node."""
is_line = Having(innermost_kind, frozenset({FrameKind.PYTHON}))
"""It is a sampled line of Python."""
is_wait = Having(innermost_kind, frozenset({FrameKind.WAIT}))
"""Its thread runs nothing, and waits."""
is_wait_for_ranks = Among(is_wait, lambda frames: frames[-1].name == WAITS_FOR_RANKS)
is_wait_for_threads = Among(is_wait, lambda frames: frames[-1].name == WAITS_FOR_THREADS)
has_label = Having(kinds_in, frozenset({FrameKind.LABEL}))
"""It is in a label, of the user's or of torch."""
is_interruption = Having(kinds_in, frozenset(INTERRUPTIONS))
"""It is a garbage collection, the start-up of a device, or work of the profiler itself."""
is_compiling = Having(regions_in, frozenset({COMPILING}))
"""It is in the compilation of code by torch.compile."""
is_collection = Among(is_interruption, lambda frames: frames[0].kind == FrameKind.GC)
"""It is a collection of Python's garbage collector."""


def is_own_time(frames: Frames) -> bool:
    """It is the time of a layer or a label outside operators."""
    return all(frame.kind == FrameKind.LABEL for frame in frames)


def is_in_op(frames: Frames) -> bool:
    """It is in an operator that a layer calls directly, or in an autograd node."""
    return outermost_op(frames) is not None


is_outermost = Among(is_op, lambda frames: len(frames) == 1)
"""It is the self of an operator or a node that has nothing around it."""
is_direct = Among(is_op, lambda frames: is_own_time(frames[:-1]))
"""It is an operator that Python calls, not another operator."""
is_node = Among(is_in_op, lambda frames: node_of(frames) is not None)
"""It is in an autograd node that is the backward of an operator."""


def in_label(beginning: str, wider: Holds = has_label) -> Among:
    """The predicate: it is in a label with this prefix. Steps and user labels may be around it."""
    return Among(wider, lambda frames: depth_of_label(frames, beginning) >= 0)


is_optimizer = in_label(OPTIMIZER_RANGE)
"""It is in a label that torch puts around an optimizer's methods."""
is_step = in_label(OPTIMIZER_STEP, is_optimizer)
is_loading = in_label(LOADING)
"""It is inside the label that torch puts around each batch of a DataLoader or a DataPipe."""
is_wait_in_the_loop = Among(is_wait, lambda frames: not is_loading(frames))
"""Its thread waits, but not for data."""


def depth_of_label(frames: Frames, beginning: str) -> int:
    """The position among the frames of the first label with this prefix, -1 if there is none."""
    for depth, frame in enumerate(frames):
        if frame.kind == FrameKind.LABEL and frame.name.startswith(beginning):
            return depth
    return -1
