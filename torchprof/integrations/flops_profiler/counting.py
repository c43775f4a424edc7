"""flops-profiler's convention: its names of functionals, and the flops of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from typing import Any

from torchprof import Run
from torchprof.integrations.convention import Counted, CountingRule, count, input_elements, input_shape, zero_flops

LayerPath = tuple[str, ...]

# The formulas. Each takes the signature of one call and returns flops; an input without a recorded shape counts 0.


def _normalized(weight: int) -> Any:
    """4 for each element, 5 if there is a weight. ``weight``: the number of the input that is the weight."""

    def flops(signature: Any) -> int:
        return input_elements(signature) * (4 + (input_shape(signature, weight) is not None))

    return flops


def _batch_normalized(signature: Any) -> int:
    """1 for each element, 4 in training (to compute mean and variance), and 1 more if there is a weight."""
    has_weight = input_shape(signature, 1) is not None
    in_training = len(signature.scalars) > 5 and signature.scalars[5] is True
    return input_elements(signature) * ((4 if in_training else 1) + has_weight)


def _added_product(signature: Any) -> int:
    """2 for each multiply-accumulate, and 1 for each element of the added tensor, before it is broadcast."""
    added, first, second = (input_shape(signature, index) for index in range(3))
    if added is None or first is None or second is None:
        return 0
    return 2 * prod(first) * second[-1] + prod(added)


def _interpolated(signature: Any) -> int:
    """1 for each element of the result. The scalar inputs have the output size or the scale factors."""
    image, scalars = input_shape(signature), signature.scalars
    if image is None or len(scalars) < 2:
        return 0
    sizes, factors = scalars[1], scalars[-1]
    if isinstance(sizes, tuple):
        return prod(image[: -len(sizes)]) * prod(sizes)
    if isinstance(factors, tuple):
        return prod(image[:2]) * prod(int(length * factor) for length, factor in zip(image[2:], factors))
    return 0


_RULES: dict[str, CountingRule] = {}


def _count_as(flops: Any, names: Mapping[str, str] | str) -> None:
    """Add a rule for each operator in ``names``: torch's names by the tool's name, or names that both have."""
    named = names if isinstance(names, Mapping) else {name: name for name in names.split()}
    for name, ops in named.items():
        for op in ops.split():
            _RULES[f"aten::{op}"] = CountingRule(name, flops)


_count_as("macs", "linear matmul mm bmm mv einsum bilinear scaled_dot_product_attention")
_count_as(
    "macs",
    {
        "multi_head_attention_forward": "_native_multi_head_attention",
        "transformer_encoder_layer": "_transformer_encoder_layer_fwd",
    },
)
_count_as("flops", "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution")
_count_as("flops", "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
_count_as(_added_product, "addmm baddbmm")
for _name in ("relu", "prelu", "elu", "leaky_relu", "relu6", "silu", "gelu"):
    _count_as(input_elements, {_name: f"{_name} {_name}_"})
_count_as(input_elements, "softmax")
for _dims in (1, 2, 3):
    _count_as(input_elements, f"avg_pool{_dims}d adaptive_avg_pool{_dims}d adaptive_max_pool{_dims}d")
    _count_as(input_elements, {f"max_pool{_dims}d": f"max_pool{_dims}d max_pool{_dims}d_with_indices"})
_count_as(_normalized(weight=2), "layer_norm group_norm")
_count_as(_normalized(weight=1), "instance_norm")
_count_as(
    _interpolated,
    {
        "interpolate": "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa"
    },
)
_count_as(zero_flops, "embedding")
_count_as(zero_flops, {"interpolate": "upsample_nearest1d upsample_nearest2d upsample_nearest3d"})
_count_as(zero_flops, "batch_norm")  # _BATCH_NORM counts it: only the inner operator has the training flag
_BATCH_NORM = {
    "aten::instance_norm": CountingRule("", zero_flops),  # calls a batch norm, which is not counted
    "aten::native_batch_norm": CountingRule("batch_norm", _batch_normalized),
    "aten::cudnn_batch_norm": CountingRule("batch_norm", _batch_normalized),
    "aten::miopen_batch_norm": CountingRule("batch_norm", _batch_normalized),
}
# These call operators that count, but flops-profiler does not count them.
_count_as(zero_flops, {"": "selu selu_ celu celu_ rrelu rrelu_"})


def functionals(run: Run) -> tuple[dict[LayerPath, dict[str, Counted]], Counter[str]]:
    """The sums of the operators in each layer's forward, by the layer's path and the tool's name of the operator; and,
    by name, how many calls were not counted because their shapes are unknown (nested tensors).

    Child layers are not included. If the tool does not know an operator with multiply-accumulates, torch's name is
    used.
    """
    rules = dict(_RULES)
    unknown: Counter[str] = Counter()
    for row in run.rows:
        if row.layer is None or row.phase != "forward" or not row.frames:
            continue
        *around, name = (frame.name for frame in row.frames)
        if any(outer in rules for outer in around):
            continue
        rule = rules.get(name)
        if rule is None:
            if row.cost.macs:
                rules[name] = CountingRule(name.removeprefix("aten::"), "macs")
        elif callable(rule.flops) and rule.flops is not zero_flops and input_shape(row.signature) is None:
            unknown[rule.name] += row.calls
    counts = count(run, rules)
    for path, functionals in count(run, _BATCH_NORM).items():
        if "batch_norm" in functionals:
            counts.setdefault(path, {}).setdefault("batch_norm", Counted()).flops += functionals["batch_norm"].flops
    for functionals in counts.values():
        functionals.pop("", None)
    return counts, unknown
