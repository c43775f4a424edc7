"""Formulas: attention."""

from __future__ import annotations

from math import prod

from torchprof.measure.flops.formulas.elementwise import SOFTMAX
from torchprof.measure.flops.formulas.normalization import NORM
from torchprof.measure.flops.operation import Operation, Shape, Unknown, bare, broadcast, counts
from torchprof.run.torch_names import FORWARD_ATTENTION, without_aten


def _attention(query: Shape, key: Shape, value: Shape) -> tuple[int, int, int]:
    """(multiply-accumulates of Q·Kᵀ, those of scores·V, number of scores) for [*, heads, length, width] inputs.

    Key and value may have fewer heads (grouped queries) and a smaller batch (broadcasting). All scores are counted:
    masks and ``is_causal`` skip nothing.
    """
    heads = max(query[-3], key[-3], value[-3]) if len(query) > 2 else 1
    batch = prod(broadcast([query[:-3], key[:-3], value[:-3]]))
    scores = batch * heads * query[-2] * key[-2]
    return scores * query[-1], scores * value[-1], scores


@counts(*without_aten(FORWARD_ATTENTION))
def _forward_attention(op: Operation) -> tuple[int, int]:
    of_scores, of_values, scores = _attention(op.shape(0), op.shape(1), op.shape(2))
    return of_scores + of_values, (SOFTMAX + 1) * scores


@counts(
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _backward_attention(op: Operation) -> tuple[int, int]:
    # The scores again; the gradients of query and key from the scores; the gradients of value and probabilities.
    of_scores, of_values, scores = _attention(op.shape(1), op.shape(2), op.shape(3))
    return 3 * of_scores + 2 * of_values, 7 * scores


def _heads_first(shape: Shape) -> Shape:
    """[batch, length, heads, width] → [batch, heads, length, width]."""
    if len(shape) != 4:
        raise Unknown
    return shape[0], shape[2], shape[1], shape[3]


@counts("_flash_attention_forward", "_efficient_attention_forward", "flash_attn::_flash_attn_forward")
def _forward_attention_heads_last(op: Operation) -> tuple[int, int]:
    lengths = {"_flash_attention_forward": (3, 4), "_efficient_attention_forward": (4, 5)}.get(bare(op.name), ())
    if any(op.has(index) for index in lengths):
        raise Unknown  # packed sequences: their lengths are in the data, which is not recorded
    of_scores, of_values, scores = _attention(*(_heads_first(op.shape(index)) for index in range(3)))
    return of_scores + of_values, (SOFTMAX + 1) * scores


@counts("_flash_attention_backward", "flash_attn::_flash_attn_backward")
def _backward_attention_heads_last(op: Operation) -> tuple[int, int]:
    if "flash_attn" not in op.name and (op.has(6) or op.has(7)):
        raise Unknown
    of_scores, of_values, scores = _attention(*(_heads_first(op.shape(index)) for index in (1, 2, 3)))
    return 3 * of_scores + 2 * of_values, 7 * scores


def _multi_head(query: Shape, key: Shape, value: Shape, heads: int) -> tuple[int, int]:
    """(MACs, others) for [batch, length, width] inputs: three projections, attention, projection of the result."""
    width = query[-1]
    tokens = prod(query[:-1]) + prod(key[:-1]) + prod(value[:-1])

    def split(shape: Shape) -> Shape:
        return shape[0], heads, shape[1], width // heads

    of_scores, of_values, scores = _attention(split(query), split(key), split(value))
    result = prod(query)
    macs = tokens * width * width + of_scores + of_values + result * width
    return macs, tokens * width + (SOFTMAX + 1) * scores + result


@counts("_native_multi_head_attention", scalars=True)
def _native_multi_head_attention(op: Operation) -> tuple[int, int]:
    return _multi_head(op.shape(0), op.shape(1), op.shape(2), op.scalar(4))


@counts("_transformer_encoder_layer_fwd", scalars=True)
def _transformer_encoder_layer(op: Operation) -> tuple[int, int]:
    source, hidden = op.shape(0), op.shape(14)[0]
    tokens, width = prod(source[:-1]), source[-1]
    macs, others = _multi_head(source, source, source, op.scalar(2))
    macs += 2 * tokens * width * hidden
    others += tokens * (2 * hidden + width)  # two biases, the activation
    return macs, others + tokens * width * 2 * (1 + NORM + 2)  # twice: the residual, and a norm with weight and bias
