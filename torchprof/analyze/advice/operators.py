"""The operators that a layer calls directly, and their nodes of autograd, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchprof.run.torch_names import ELEMENTWISE, without_aten
from torchprof.run.words import NODE_PREFIX, Frame, FrameKind

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The node that writes or adds up the gradient of a parameter."""
_NODE = re.compile(NODE_PREFIX + r"(\w+)Backward\d*")
ELEMENTWISE_NODES = frozenset(name.replace("_", "") for name in without_aten(ELEMENTWISE))


def outermost_op(frames: Sequence[Frame]) -> str | None:
    """The name of the op that a layer calls directly; user labels may be around it."""
    outermost = next((frame for frame in frames if frame.kind != FrameKind.LABEL), None)
    return outermost.name if outermost is not None and outermost.kind == FrameKind.OP else None


def node_of(frames: Sequence[Frame]) -> str | None:
    """The operator whose backward the outermost autograd node is, in lower case without underscores: "leakyrelu"."""
    match = _NODE.fullmatch(outermost_op(frames) or "")
    return match[1].lower() if match else None
