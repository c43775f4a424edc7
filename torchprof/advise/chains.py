"""Predicates on chains of frames: what rules ask of the place of a row. ``Evidence`` finds the chains that match."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torchprof.run.torch_names import ELEMENTWISE, without_aten
from torchprof.run.words import INTERRUPTIONS, LOADING, NODE_PREFIX, OPTIMIZER_RANGE, OPTIMIZER_STEP, Frame, FrameKind

Frames = Sequence[Frame]
"""The frames of a row, outer to inner."""
Holds = Callable[[Frames], bool]

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The node that writes or adds up the gradient of a parameter."""
_NODE = re.compile(NODE_PREFIX + r"(\w+)Backward\d*")
ELEMENTWISE_NODES = frozenset(name.replace("_", "") for name in without_aten(ELEMENTWISE))


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
    """A predicate that is only asked of the chains that match a ``wider`` one."""

    wider: Holds
    test: Holds

    def __call__(self, frames: Frames) -> bool:
        return self.wider(frames) and self.test(frames)


def among(wider: Holds) -> Callable[[Holds], Among]:
    """Decorate a predicate that is only asked of the chains that match a wider one."""
    return lambda test: Among(wider, test)


# Traits


def ops_in(frames: Frames) -> Collection[str]:
    """The names of all ops among the frames."""
    return {frame.name for frame in frames if frame.kind == FrameKind.OP}


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
    """The predicate: an op of one of these names is among the frames."""
    return Having(ops_in, frozenset(names))


def calling(names: Collection[str]) -> Having:
    """The predicate: the op that the layer calls directly has one of these names."""
    return Having(directly_called, frozenset(names))


def always(frames: Frames) -> bool:
    """A predicate: all rows."""
    return True


is_device_work = Having(innermost_kind, frozenset({FrameKind.KERNEL}))
"""The predicate: it is the work of a device."""
is_op = Having(innermost_kind, frozenset({FrameKind.OP}))
"""The predicate: it is the self of an operator, or of an autograd node."""
is_line = Having(innermost_kind, frozenset({FrameKind.PYTHON}))
"""The predicate: it is a sampled line of Python."""
has_label = Having(kinds_in, frozenset({FrameKind.LABEL}))
is_interruption = Having(kinds_in, frozenset(INTERRUPTIONS))
"""The predicate: it is a garbage collection, or work of the profiler itself."""


def is_own_time(frames: Frames) -> bool:
    """Whether it is the time of a layer or a label outside operators."""
    return all(frame.kind == FrameKind.LABEL for frame in frames)


@among(is_op)
def is_outermost(frames: Frames) -> bool:
    """Whether it is the self of an operator or a node that has nothing around it."""
    return len(frames) == 1


@among(is_op)
def is_direct(frames: Frames) -> bool:
    """Whether it is an operator that Python calls, not another operator."""
    return is_own_time(frames[:-1])


def is_in_op(frames: Frames) -> bool:
    """Whether it is in an operator that a layer calls directly, or in an autograd node."""
    return outermost_op(frames) is not None


@among(is_in_op)
def is_node(frames: Frames) -> bool:
    """Whether it is in an autograd node that is the backward of an operator."""
    return node_of(frames) is not None


@among(has_label)
def is_optimizer(frames: Frames) -> bool:
    """Whether it is in a range of an optimizer."""
    return depth_of_label(frames, OPTIMIZER_RANGE) >= 0


@among(is_optimizer)
def is_step(frames: Frames) -> bool:
    """Whether it is in a step of an optimizer."""
    return depth_of_label(frames, OPTIMIZER_STEP) >= 0


@among(has_label)
def is_loading(frames: Frames) -> bool:
    """Whether it is inside the label that torch puts around each batch of a DataLoader or a DataPipe. Steps and user
    labels may be around it."""
    return depth_of_label(frames, LOADING) >= 0


@among(is_interruption)
def is_collection(frames: Frames) -> bool:
    """Whether it is a collection of Python's garbage collector."""
    return frames[0].kind == FrameKind.GC


def depth_of_label(frames: Frames, beginning: str) -> int:
    """The position among the frames of the first label with this prefix, -1 if there is none."""
    for depth, frame in enumerate(frames):
        if frame.kind == FrameKind.LABEL and frame.name.startswith(beginning):
            return depth
    return -1


def shape_of_input(frame: Frame, index: int) -> tuple[int, ...]:
    """The shape of one input of an op; ``()`` if it was not recorded, is not a tensor, or has no dimension."""
    shapes = frame.signature.shapes if frame.signature is not None else ()
    shape = shapes[index] if index < len(shapes) else None
    return tuple(shape) if shape and all(type(size) is int for size in shape) else ()
