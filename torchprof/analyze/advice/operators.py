"""The operators that a layer calls directly, and their nodes of autograd, by name."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchprof.run.words import Frame

_NAMES = """
    abs add addcdiv addcmul bitwise_and bitwise_not ceil clamp clamp_max clamp_min cos div elu eq erf exp expm1 floor ge
    gelu gt hardswish hardtanh le leaky_relu lerp log log1p logical_and logical_not lt masked_fill maximum minimum mish
    mul ne neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tanh threshold where
"""
ELEMENTWISE = frozenset(f"aten::{name}{in_place}" for name in _NAMES.split() for in_place in ("", "_"))
"""Each element of the result of such an operator depends on one element of each input."""
ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The node that writes or adds up the gradient of a parameter."""
_NODE = re.compile(r"autograd::engine::evaluate_function: (\w+)Backward\d*")
ELEMENTWISE_NODES = frozenset(name.replace("_", "") for name in _NAMES.split())


def outermost_op(frames: Sequence[Frame]) -> str | None:
    """The name of the op that a layer calls directly; user labels may be around it."""
    outermost = next((frame for frame in frames if frame.kind != "label"), None)
    return outermost.name if outermost is not None and outermost.kind == "op" else None


def node_of(frames: Sequence[Frame]) -> str | None:
    """The operator whose backward the outermost autograd node is, in lower case without underscores: "leakyrelu"."""
    found = _NODE.fullmatch(outermost_op(frames) or "")
    return found[1].lower() if found else None
