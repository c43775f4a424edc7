"""Formulas: the count of a single op against a calculation by hand from its definition."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from build.events import walk_of
from build.examples import examples
from build.libraries import HAS_SHAPES_OF_LISTS, RELEASE
from build.phases import in_column_of
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import torchprof
from torchprof.attribute.events import Detail, Event, Kind
from torchprof.attribute.rule import Attribution
from torchprof.measure.flops.estimate import Estimate
from torchprof.measure.flops.operation import (
    COMMUNICATION,
    FORMULAS,
    NO_ARITHMETIC,
    Count,
    Operation,
    Work,
    detail_of,
    does_no_arithmetic,
    formula_of,
    work_of,
)
from torchprof.run.words import Signature

aten = torch.ops.aten


def x(*shape: int) -> Tensor:
    """Numbers between a quarter and three quarters: inside the domain of every function."""
    return torch.empty(*shape).uniform_(0.25, 0.75)


def g(*shape: int) -> Tensor:
    return x(*shape).requires_grad_()


class Found(NamedTuple):
    """MACs, FLOPs in addition to those of the MACs, and calls that were not counted."""

    macs: int
    others: int
    uncounted: int = 0


def profiled(step: Callable[[], Any]) -> torchprof.Run:
    with torchprof.Profile(nn.Identity(), with_flops=True) as prof:
        step()
    return prof.run


def found(run: torchprof.Run, phase: str = "forward") -> Found:
    costs = [row.cost for row in run.rows if in_column_of(row.phase) == phase]
    macs = sum(cost.macs for cost in costs)
    return Found(macs, sum(cost.flops for cost in costs) - 2 * macs, sum(cost.uncounted for cost in costs))


def counted(step: Callable[[], Any]) -> Found:
    return found(profiled(step))


def ran(run: torchprof.Run) -> set[str]:
    """The counted ops of a run, by the names of their formulas."""
    names = {row.frames[-1].name for row in run.rows if row.frames and (row.cost.flops or row.cost.uncounted)}
    bare = {name.removeprefix("aten::") for name in names}
    return bare | {name.removesuffix("_") for name in bare}


# One op, forward. The op that is meant may be called directly or by what calls it; nothing else in the step counts.


class Case(NamedTuple):
    """A step, and its count by hand. ``since``: the first version of torch that can run it; ``until``: the first one
    that cannot."""

    step: Callable[[], Any]
    macs: int
    others: int = 0
    since: tuple[int, int] = (2, 4)
    given: Callable[[], tuple[Any, ...]] = tuple  # makes the inputs of the step, before it is counted
    until: tuple[int, int] = (99, 0)


def bf16(*shape: int) -> Tensor:
    return x(*shape).bfloat16()


def float8(*shape: int) -> Tensor:
    return x(*shape).to(torch.float8_e4m3fn)


def int8(*shape: int) -> Tensor:
    return torch.ones(*shape, dtype=torch.int8)


def ends(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def on_mkldnn(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    return tuple(x(*shape).to_mkldnn() for shape in shapes)


def complex64(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.complex64)


MATRICES = {
    "mm": Case(lambda: torch.mm(x(2, 3), x(3, 4)), 2 * 3 * 4),
    "mm, out": Case(lambda: torch.mm(x(2, 3), x(3, 4), out=torch.empty(0)), 2 * 3 * 4),
    "mm of nothing": Case(lambda: torch.mm(x(0, 3), x(3, 4)), 0),
    "_int_mm": Case(lambda: torch._int_mm(int8(32, 16), int8(16, 8)), 32 * 16 * 8),
    "_scaled_mm": Case(
        lambda: torch._scaled_mm(
            float8(16, 32), float8(8, 32).t(), scale_a=torch.ones(()), scale_b=torch.ones(()), out_dtype=torch.bfloat16
        ),
        16 * 32 * 8,
        0,
        (2, 9),
    ),
    "_weight_int8pack_mm": Case(lambda: torch._weight_int8pack_mm(bf16(2, 32), int8(16, 32), bf16(16)), 2 * 32 * 16),
    "addmm": Case(lambda: torch.addmm(x(4), x(2, 3), x(3, 4)), 24, 2 * 4),
    "_addmm_activation": Case(lambda: torch._addmm_activation(x(4), x(2, 3), x(3, 4)), 24, 2 * 2 * 4),
    "addbmm": Case(lambda: torch.addbmm(x(2, 4), x(5, 2, 3), x(5, 3, 4)), 5 * 24, 2 * 4),
    "baddbmm": Case(lambda: torch.baddbmm(x(5, 2, 4), x(5, 2, 3), x(5, 3, 4)), 5 * 24, 5 * 2 * 4),
    "addmv": Case(lambda: torch.addmv(x(2), x(2, 3), x(3)), 2 * 3, 2),
    "addr": Case(lambda: torch.addr(x(2, 3), x(2), x(3)), 2 * 3, 2 * 3),
    "bmm": Case(lambda: torch.bmm(x(5, 2, 3), x(5, 3, 4)), 5 * 24),
    "mv": Case(lambda: torch.mv(x(2, 3), x(3)), 2 * 3),
    "dot": Case(lambda: torch.dot(x(7), x(7)), 7),
    "vdot": Case(lambda: torch.vdot(x(7), x(7)), 7),
    "outer": Case(lambda: torch.outer(x(2), x(3)), 0, 2 * 3),  # nothing is accumulated
    "ger": Case(lambda: torch.ger(x(2), x(3)), 0, 2 * 3),
    "_grouped_mm": Case(lambda: torch._grouped_mm(bf16(6, 8), bf16(2, 8, 16), offs=ends(2, 6)), 6 * 8 * 16, 0, (2, 9)),
    "_grouped_mm, whole batches": Case(
        lambda: torch._grouped_mm(bf16(2, 3, 8), bf16(2, 8, 16)), 2 * 3 * 8 * 16, 0, (2, 9)
    ),
    "_grouped_mm, gradient of the weights": Case(
        lambda: torch._grouped_mm(bf16(8, 16), bf16(16, 8), offs=ends(8, 16)), 8 * 16 * 8, 0, (2, 9)
    ),
    "mkldnn::_linear_pointwise": Case(
        lambda: torch.ops.mkldnn._linear_pointwise(x(2, 5, 3), x(4, 3), x(4), "none", [], ""), 10 * 3 * 4, 10 * 4
    ),
    "mkldnn_linear": Case(torch._C._nn.mkldnn_linear, 2 * 3 * 4, 2 * 4, given=lambda: on_mkldnn((2, 3), (4, 3), (4,))),
    "linear": Case(lambda: F.linear(x(2, 5, 3), x(4, 3), x(4)), 10 * 3 * 4, 10 * 4),
    "linear of a vector": Case(lambda: F.linear(x(3), x(4, 3), x(4)), 12, 4),
    "linear of nothing": Case(lambda: F.linear(x(0, 3), x(4, 3), x(4)), 0),
    "matmul, vectors": Case(lambda: x(3) @ x(3), 3),
    "matmul, a vector and matrices": Case(lambda: x(3) @ x(5, 3, 4), 5 * 3 * 4),
    "matmul, matrices and a vector": Case(lambda: x(5, 2, 3) @ x(3), 5 * 2 * 3),
    "matmul, broadcasting": Case(lambda: x(2, 1, 3, 4) @ x(5, 4, 6), 2 * 5 * 3 * 4 * 6),
    "einsum": Case(
        lambda: torch.einsum("bij,bjk,kl->bil", x(2, 3, 4), x(2, 4, 5), x(5, 6)), 2 * 3 * 4 * 5 + 2 * 3 * 5 * 6
    ),
    "einsum, a diagonal": Case(lambda: torch.einsum("ii->i", x(3, 3)), 0),
    "einsum, element by element": Case(lambda: torch.einsum("ij,ij->ij", x(2, 3), x(2, 3)), 0, 2 * 3),
    "tensordot": Case(lambda: torch.tensordot(x(3, 4, 5), x(4, 5, 6), 2), 3 * 4 * 5 * 6),
    "inner": Case(lambda: torch.inner(x(2, 3), x(4, 3)), 24),
    "multi_dot": Case(lambda: torch.linalg.multi_dot([x(2, 3), x(3, 4), x(4, 5)]), 2 * 3 * 4 + 2 * 4 * 5),
    "matrix_power": Case(lambda: torch.matrix_power(x(3, 3), 3), 2 * 27),
    # y = x₁ᵀAx₂: the first product gives a matrix for each output, the second sums it up.
    "bilinear": Case(lambda: F.bilinear(x(2, 3), x(2, 4), x(5, 3, 4)), 5 * (2 * 3 * 4 + 2 * 4), 5 * 2),
    "bilinear of nothing": Case(lambda: F.bilinear(x(0, 3), x(0, 4), x(5, 3, 4)), 0),
    "complex mm": Case(lambda: complex64(2, 3) @ complex64(3, 4), 4 * 24),
    "complex bmm": Case(lambda: torch.bmm(complex64(5, 2, 3), complex64(5, 3, 4)), 4 * 5 * 24),
    "complex linear": Case(lambda: F.linear(complex64(5, 3), complex64(4, 3), complex64(4)), 4 * 5 * 12, 2 * 5 * 4),
    "complex vdot": Case(lambda: torch.vdot(complex64(7), complex64(7)), 4 * 7),
}


def image(*shape: int) -> Tensor:
    return x(*(shape or (2, 4, 9, 8)))


CONVOLUTIONS = {
    "convolution": Case(lambda: F.conv2d(image(), x(6, 4, 3, 2), x(6)), 2 * 6 * 7 * 7 * 4 * 6, 2 * 6 * 7 * 7),
    "convolution, stride and padding": Case(
        lambda: F.conv2d(image(), x(6, 4, 3, 3), stride=(2, 3), padding=(1, 0)), 2 * 6 * 5 * 2 * 4 * 9
    ),
    "convolution, dilated": Case(lambda: F.conv2d(image(), x(6, 4, 3, 3), dilation=(2, 3)), 2 * 6 * 5 * 2 * 4 * 9),
    "convolution, grouped": Case(lambda: F.conv2d(image(), x(6, 2, 3, 3), groups=2), 2 * 6 * 7 * 6 * 2 * 9),
    "convolution, depthwise": Case(lambda: F.conv2d(image(), x(8, 1, 3, 3), groups=4), 2 * 8 * 7 * 6 * 9),
    "convolution, one dimension": Case(lambda: F.conv1d(x(2, 3, 9), x(4, 3, 2), x(4)), 2 * 4 * 8 * 6, 2 * 4 * 8),
    "convolution, three dimensions": Case(lambda: F.conv3d(x(1, 2, 4, 5, 6), x(3, 2, 2, 2, 2)), 3 * 3 * 4 * 5 * 16),
    "convolution without a batch": Case(lambda: F.conv2d(image(4, 9, 8), x(6, 4, 3, 2)), 6 * 7 * 7 * 4 * 6),
    "convolution, padding=same": Case(lambda: F.conv2d(image(), x(6, 4, 2, 4), padding="same"), 2 * 6 * 9 * 8 * 4 * 8),
    "convolution, padding=valid": Case(lambda: F.conv2d(image(), x(6, 4, 3, 3), padding="valid"), 2 * 6 * 7 * 6 * 36),
    "convolution of nothing": Case(lambda: F.conv2d(image(0, 4, 9, 8), x(6, 4, 3, 3), x(6)), 0),
    "convolution in double": Case(
        lambda: F.conv2d(image().double(), x(6, 2, 3, 3).double(), groups=2, dilation=2), 2 * 6 * 5 * 4 * 2 * 9
    ),
    "convolution in bfloat16": Case(lambda: F.conv2d(image().bfloat16(), bf16(6, 4, 3, 3)), 2 * 6 * 7 * 6 * 4 * 9),
    # torch makes three real convolutions of a complex one (Gauss), and those are what it runs.
    "convolution, complex": Case(
        lambda: F.conv1d(complex64(1, 2, 8), complex64(3, 2, 3)),
        3 * (18 * 2 * 3),
        # A sum of parts of the image, one of the weights, three differences, and real + i · imaginary.
        16 + 18 + 3 * 18 + (6 + 2) * 18,
    ),
    "transposed": Case(
        lambda: F.conv_transpose2d(image(), x(4, 3, 3, 3), x(3), stride=2, padding=1, output_padding=1),
        2 * 4 * 9 * 8 * 3 * 9,
        2 * 3 * 18 * 16,
    ),
    "transposed, grouped and dilated": Case(
        lambda: F.conv_transpose1d(x(2, 4, 5), x(4, 3, 2), x(6), groups=2, dilation=3), 2 * 4 * 5 * 3 * 2, 2 * 6 * 8
    ),
    "transposed without a batch": Case(lambda: F.conv_transpose3d(x(2, 3, 3, 3), x(2, 4, 2, 2, 2)), 2 * 27 * 4 * 8),
    "_convolution": Case(
        lambda: aten._convolution(
            image(), x(6, 4, 3, 3), x(6), [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, False
        ),
        2 * 6 * 7 * 6 * 36,
        2 * 6 * 7 * 6,
    ),
    "mkldnn_convolution": Case(
        lambda: torch.mkldnn_convolution(image(), x(6, 2, 3, 3), x(6), (1, 0), (2, 1), (1, 2), 2),
        2 * 6 * 5 * 4 * 2 * 9,
        2 * 6 * 5 * 4,
    ),
    "conv_tbc": Case(lambda: torch.conv_tbc(x(7, 2, 3), x(3, 3, 4), x(4), 1), 7 * 2 * 4 * 9, 7 * 2 * 4),
}


def attention(
    *shapes: tuple[int, ...], function: Callable[..., Any] = F.scaled_dot_product_attention, **options: Any
) -> Callable[[], Any]:
    return lambda: function(*(x(*shape) for shape in shapes), **options)


def multi_head(**options: Any) -> Callable[[], Any]:
    layer = nn.MultiheadAttention(8, 2, batch_first=True).eval()
    return lambda: layer(*[x(2, 5, 8)] * 3, **options)


def of(layer: nn.Module, *shape: int) -> Callable[[], Any]:
    return torch.no_grad()(lambda: layer(x(*shape)))


_SCORES = 2 * 3 * 5 * 7  # batch, heads, queries, keys
_QKV = (2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 6)
_TOKENS = 2 * 5  # of the layers above, 8 wide, with 2 heads: 4 projections, and scores of 5 times 5
_HEADS = Found(4 * _TOKENS * 64 + 2 * (2 * 2 * 25 * 4), 4 * _TOKENS * 8 + 6 * (2 * 2 * 25))

ATTENTION = {
    "scaled_dot_product_attention": Case(attention(*_QKV), _SCORES * (4 + 6), 6 * _SCORES),
    "attention, causal": Case(attention((2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), is_causal=True), 150 * 8, 6 * 150),
    "attention, three dimensions": Case(attention((2, 5, 4), (2, 7, 4), (2, 7, 6)), 70 * 10, 6 * 70),
    "attention, two dimensions": Case(attention((5, 4), (7, 4), (7, 6)), 35 * 10, 6 * 35),
    "attention, five dimensions": Case(attention(*((2, *shape) for shape in _QKV)), 2 * _SCORES * 10, 12 * _SCORES),
    "attention, broadcasting": Case(attention((2, 3, 5, 4), (1, 1, 7, 4), (1, 1, 7, 4)), _SCORES * 8, 6 * _SCORES),
    "attention, one head of queries": Case(
        attention((2, 1, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)), _SCORES * 8, 6 * _SCORES
    ),
    "attention, grouped queries": Case(
        attention((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), enable_gqa=True), 2 * 4 * 35 * 8, 6 * 2 * 4 * 35, (2, 5)
    ),
    "attention, a mask": Case(
        lambda: F.scaled_dot_product_attention(*(x(*shape) for shape in _QKV), attn_mask=x(5, 7)),
        _SCORES * 10,
        6 * _SCORES,
    ),
    "_scaled_dot_product_attention_math": Case(
        attention(*_QKV, function=lambda *qkv: aten._scaled_dot_product_attention_math(*qkv)), _SCORES * 10, 6 * _SCORES
    ),
    "_scaled_dot_product_flash_attention_for_cpu": Case(
        attention(*[_QKV[0]] * 3, function=lambda *qkv: aten._scaled_dot_product_flash_attention_for_cpu(*qkv)),
        150 * 8,
        6 * 150,
    ),
    "_native_multi_head_attention": Case(torch.no_grad()(multi_head(need_weights=False)), *_HEADS[:2]),
    # Outside the fast path: query is scaled before the product, and softmax is 5 a score; the weights' mean over heads.
    "multi-head attention in pieces": Case(multi_head(), _HEADS.macs, 4 * _TOKENS * 8 + _TOKENS * 8 + 5 * 100 + 100),
    "_transformer_encoder_layer_fwd": Case(
        of(nn.TransformerEncoderLayer(8, 2, 12, batch_first=True).eval(), 2, 5, 8),
        _HEADS.macs + 2 * _TOKENS * 8 * 12,
        # Biases and activation; twice a residual, and a norm with weight and bias.
        _HEADS.others + _TOKENS * (12 + 12 + 8) + 2 * _TOKENS * 8 * (1 + 5 + 2),
    ),
}


def recurrent(kind: type[nn.RNNBase], **options: Any) -> Callable[[], Any]:
    return of(kind(4, 3, **options), 5, 2, 4)


RECURRENT = {
    # A gate's sum of two products, itself; the three products, one sum and the tanh of the cell: 13 for each unit.
    "mkldnn_rnn_layer": Case(recurrent(nn.LSTM), 10 * 12 * (4 + 3), 10 * 3 * (13 + 8)),
    "LSTM without biases": Case(recurrent(nn.LSTM, bias=False), 10 * 12 * (4 + 3), 10 * 3 * 13),
    "LSTM, two layers and directions": Case(
        recurrent(nn.LSTM, num_layers=2, bidirectional=True), 10 * 12 * 2 * ((4 + 3) + (6 + 3)), 10 * 3 * 4 * (13 + 8)
    ),
    "LSTM, projected": Case(recurrent(nn.LSTM, proj_size=2), 10 * (12 * 4 + 12 * 2 + 3 * 2), 10 * 3 * (13 + 8)),
    "GRU": Case(recurrent(nn.GRU), 10 * 9 * (4 + 3), 10 * 3 * (10 + 6)),
    "RNN": Case(recurrent(nn.RNN), 10 * 3 * (4 + 3), 10 * 3 * (2 + 2)),
    "LSTM cell": Case(lambda: nn.LSTMCell(4, 3)(x(2, 4), (x(2, 3), x(2, 3))), 2 * 12 * 7, 2 * 3 * (13 + 8)),
    "GRU cell": Case(lambda: nn.GRUCell(4, 3)(x(2, 4), x(2, 3)), 2 * 9 * 7, 2 * 3 * (10 + 6)),
    "RNN cell": Case(lambda: nn.RNNCell(4, 3)(x(2, 4), x(2, 3)), 2 * 3 * 7, 2 * 3 * (2 + 2)),
}

WHOLE = ("amax", "amin", "aminmax", "argmax", "argmin", "max", "mean", "median", "min", "nanmedian", "nansum", "prod")
REDUCTIONS = {
    **{name: Case(lambda name=name: getattr(aten, name)(x(2, 3)), 0, 6) for name in (*WHOLE, "sum", "trace")},
    **{
        name: Case(lambda name=name: getattr(aten, name)(x(2, 3), 1), 0, 6)
        for name in ("cummax", "cummin", "cumprod", "cumsum", "logcumsumexp", "mode", "topk")
    },
    "kthvalue": Case(lambda: x(2, 3).kthvalue(1), 0, 6),
    "max of two": Case(lambda: torch.max(x(2, 1), x(3)), 0, 6),
    "min of a dimension": Case(lambda: x(2, 3).min(0), 0, 6),
    "mean of a dimension": Case(lambda: x(2, 3).mean(0), 0, 6),
    "sum, out": Case(lambda: torch.sum(x(2, 3), 0, out=torch.empty(0)), 0, 6),
    **{
        name: Case(lambda name=name: getattr(torch, name)(x(2, 3), x(2, 3), torch.ones(2, 3).long(), 0), 0, 6)
        for name in ("_cummax_helper", "_cummin_helper")
    },
    "add, scaled": Case(lambda: torch.add(x(2, 3), x(3), alpha=2), 0, 2 * 6),
    "sub, scaled": Case(lambda: x(2, 3).sub_(x(3), alpha=-1), 0, 2 * 6),
    "rsub, scaled": Case(lambda: torch.rsub(x(2, 3), x(3), alpha=0.5), 0, 2 * 6),
    "histc": Case(lambda: x(2, 3).histc(4, 0, 1), 0, 3 * 6),  # difference, product, rounding
    "norm": Case(lambda: aten.norm(x(2, 3)), 0, 2 * 6),
    "linalg_vector_norm": Case(lambda: torch.linalg.vector_norm(x(2, 3)), 0, 2 * 6),
    "logsumexp": Case(lambda: x(2, 3).logsumexp(1), 0, 4 * 6),
    **{
        name: Case(lambda name=name: getattr(torch, name)(x(2, 3)), 0, 4 * 6)
        for name in ("std", "std_mean", "var", "var_mean")
    },
    "dist": Case(lambda: torch.dist(x(2, 3), x(3)), 0, 3 * 6),
    "_softmax": Case(lambda: x(2, 3).softmax(-1), 0, 5 * 6),
    "_log_softmax": Case(lambda: x(2, 3).log_softmax(0), 0, 5 * 6),
    "_masked_softmax": Case(
        lambda: torch._masked_softmax(x(2, 3, 4, 4), torch.zeros(4, 4, dtype=torch.bool), 3, 0), 0, 5 * 96
    ),
    "sort": Case(lambda: x(2, 8).sort(), 0, 16 * 3),
    "sort of another dimension": Case(lambda: x(8, 2).sort(0), 0, 16 * 3),
    "sort of one": Case(lambda: x(2, 1).sort(), 0, 0),
    "stable sort of another dimension": Case(lambda: torch.sort(x(8, 2), dim=0, stable=True), 0, 16 * 3),
    "argsort": Case(lambda: x(2, 8).argsort(), 0, 16 * 3),
    "argsort of another dimension": Case(lambda: x(8, 2).argsort(0), 0, 16 * 3),
    "msort": Case(lambda: torch.msort(x(8, 2)), 0, 16 * 3),
    "searchsorted": Case(lambda: torch.searchsorted(torch.arange(8.0), x(5)), 0, 5 * 3),
    "bucketize into two": Case(lambda: torch.bucketize(x(5), torch.ones(1)), 0, 5),
    "bucketize": Case(lambda: torch.bucketize(x(5), torch.arange(8.0)), 0, 5 * 3),
}


_E = 2 * 3 * 4 * 4
_STATISTICS = torch.zeros(3), torch.ones(3)
NORMS = {
    "native_layer_norm": Case(of(nn.LayerNorm(4), 2, 3, 4), 0, 24 * (5 + 2)),
    "layer norm without bias": Case(of(nn.LayerNorm(4, bias=False), 2, 3, 4), 0, 24 * (5 + 1)),
    "layer norm alone": Case(of(nn.LayerNorm(4, elementwise_affine=False), 2, 3, 4), 0, 24 * 5),
    "native_group_norm": Case(of(nn.GroupNorm(3, 3), 2, 3, 4, 4), 0, _E * (5 + 2)),
    "rms_norm": Case(lambda: F.rms_norm(x(2, 3, 4), (4,), x(4)), 0, 24 * (3 + 1), (2, 7)),
    "_fused_rms_norm": Case(lambda: aten._fused_rms_norm(x(2, 3, 4), [4], None, 1e-6), 0, 24 * 3, (2, 9)),
    "native_batch_norm": Case(of(nn.BatchNorm2d(3), 2, 3, 4, 4), 0, _E * (5 + 2)),
    "batch norm in eval": Case(of(nn.BatchNorm2d(3).eval(), 2, 3, 4, 4), 0, _E * (2 + 2)),
    "batch norm alone": Case(of(nn.BatchNorm2d(3, affine=False).eval(), 2, 3, 4, 4), 0, _E * 2),
    "instance norm": Case(of(nn.InstanceNorm2d(3, affine=True), 2, 3, 4, 4), 0, _E * (5 + 2)),
    "_native_batch_norm_legit": Case(
        lambda: aten._native_batch_norm_legit(x(2, 3, 4, 4), x(3), x(3), *_STATISTICS, True, 0.1, 1e-5), 0, _E * 7
    ),
    "batch norm without statistics": Case(
        lambda: aten._native_batch_norm_legit(x(2, 3, 4, 4), x(3), x(3), True, 0.1, 1e-5), 0, _E * 7
    ),
    "_native_batch_norm_legit_no_training": Case(
        lambda: aten._native_batch_norm_legit_no_training(x(2, 3, 4, 4), x(3), x(3), *_STATISTICS, 0.1, 1e-5), 0, _E * 4
    ),
    "_batch_norm_with_update": Case(
        lambda: aten._batch_norm_with_update(x(2, 3, 4, 4), x(3), x(3), *_STATISTICS, 0.1, 1e-5), 0, _E * 7
    ),
    "_batch_norm_with_update_functional": Case(
        lambda: aten._batch_norm_with_update_functional(x(2, 3, 4, 4), x(3), None, *_STATISTICS, 0.1, 1e-5), 0, _E * 6
    ),
    "_batch_norm_no_update": Case(
        lambda: aten._batch_norm_no_update(x(2, 3, 4, 4), x(3), x(3), *_STATISTICS, 0.1, 1e-5), 0, _E * 4
    ),
    "_weight_norm": Case(lambda: torch._weight_norm(x(4, 3), x(4, 1), 0), 0, 3 * 12),
    "_weight_norm_interface": Case(lambda: torch._weight_norm_interface(x(4, 3), x(4, 1), 0), 0, 3 * 12),
    "native_dropout": Case(lambda: torch.native_dropout(x(2, 3), 0.5, True), 0, 2 * 6),
    "glu": Case(lambda: F.glu(x(2, 6)), 0, 2 * 6),
}

POOLS = {
    "avg_pool1d": Case(lambda: F.avg_pool1d(x(2, 3, 9), 3, 2), 0, 6 * 4 * 3),
    "avg_pool2d": Case(lambda: F.avg_pool2d(image(), (3, 2)), 0, 8 * (3 * 4) * 6),
    "avg_pool3d": Case(lambda: F.avg_pool3d(x(1, 2, 4, 4, 4), 2), 0, 2 * 8 * 8),
    "avg pool, padded and rounded up": Case(lambda: F.avg_pool1d(x(1, 1, 9), 3, 3, 1, ceil_mode=True), 0, 4 * 3),
    "max_pool1d": Case(lambda: torch.max_pool1d(x(2, 3, 9), 3, 2), 0, 6 * 4 * 3),
    "max pool without a batch": Case(lambda: F.max_pool2d(image(4, 9, 8), 3), 0, 4 * (3 * 2) * 9),
    "max_pool2d_with_indices": Case(lambda: F.max_pool2d(image(), 3, 2, 1), 0, 8 * (5 * 4) * 9),
    "max_pool3d_with_indices": Case(lambda: F.max_pool3d(x(1, 2, 4, 4, 4), 2), 0, 2 * 8 * 8),
    "max pool, dilated": Case(lambda: F.max_pool2d(image(), 3, 1, 0, (1, 2)), 0, 8 * (7 * 4) * 9),
    "mkldnn_max_pool2d": Case(
        lambda i: F.max_pool2d(i, 3, 2, 1), 0, 8 * (5 * 4) * 9, given=lambda: on_mkldnn((2, 4, 9, 8))
    ),
    "mkldnn_max_pool3d": Case(lambda i: F.max_pool3d(i, 2), 0, 2 * 8 * 8, given=lambda: on_mkldnn((1, 2, 4, 4, 4))),
    "_adaptive_avg_pool2d": Case(lambda: F.adaptive_avg_pool2d(image(2, 4, 9, 8), (3, 2)), 0, 8 * 9 * 8),
    "adaptive average, overlapping": Case(lambda: F.adaptive_avg_pool2d(x(1, 1, 5, 4), (2, 4)), 0, (3 + 3) * 4),
    "adaptive average, to one": Case(lambda: F.adaptive_avg_pool2d(x(2, 3, 5, 4), 1), 0, 2 * 3 * 20),
    "_adaptive_avg_pool3d": Case(lambda: F.adaptive_avg_pool3d(x(1, 2, 4, 4, 4), 2), 0, 2 * 64),
    "adaptive_max_pool2d": Case(lambda: F.adaptive_max_pool2d(x(1, 1, 5, 4), (2, 4)), 0, (3 + 3) * 4),
    "adaptive_max_pool3d": Case(lambda: F.adaptive_max_pool3d(x(1, 2, 4, 4, 4), 2), 0, 2 * 64),
    "mkldnn_adaptive_avg_pool2d": Case(
        lambda i: F.adaptive_avg_pool2d(i, (3, 2)), 0, 8 * 9 * 8, given=lambda: on_mkldnn((2, 4, 9, 8))
    ),
    "upsample_linear1d": Case(lambda: F.interpolate(x(2, 3, 4), size=7, mode="linear"), 0, 2 * 3 * 7 * 3),
    "upsample_bilinear2d": Case(lambda: F.interpolate(image(), scale_factor=1.5, mode="bilinear"), 0, 8 * 13 * 12 * 7),
    "upsample_bicubic2d": Case(lambda: F.interpolate(image(), size=(3, 5), mode="bicubic"), 0, 8 * 15 * 31),
    "upsample_trilinear3d": Case(
        lambda: F.interpolate(x(1, 2, 3, 3, 3), scale_factor=2, mode="trilinear"), 0, 2 * 216 * 15
    ),
    "upsampling to the nearest": Case(lambda: F.interpolate(image(), scale_factor=2), 0, 0),
    "grid_sampler_2d": Case(lambda: F.grid_sample(image(), x(2, 3, 5, 2), align_corners=False), 0, 2 * 15 * 4 * 7),
    "grid sampler, nearest": Case(
        lambda: F.grid_sample(image(), x(2, 3, 5, 2), mode="nearest", align_corners=False), 0, 0
    ),
    "grid sampler, bicubic": Case(
        lambda: F.grid_sample(image(), x(2, 3, 5, 2), mode="bicubic", align_corners=False), 0, 2 * 15 * 4 * 31
    ),
    "grid_sampler_3d": Case(
        lambda: F.grid_sample(x(2, 3, 4, 4, 4), x(2, 2, 2, 2, 3), align_corners=False), 0, 2 * 8 * 3 * 15
    ),
}

CLASSES, FIRST = torch.tensor([0, 2]), torch.zeros(2, 4, dtype=torch.long)
LOSSES = {
    "mse_loss": Case(lambda: F.mse_loss(x(2, 3), x(2, 3)), 0, 3 * 6),
    "mse_loss of each": Case(lambda: F.mse_loss(x(2, 3), x(2, 3), reduction="none"), 0, 2 * 6),
    "smooth_l1_loss": Case(lambda: F.smooth_l1_loss(x(2, 3), x(2, 3)), 0, 6 * 6),
    "huber_loss": Case(lambda: F.huber_loss(x(2, 3), x(2, 3), reduction="none"), 0, 5 * 6),
    "binary_cross_entropy": Case(lambda: F.binary_cross_entropy(x(2, 3), x(2, 3)), 0, 7 * 6),
    "weighted binary cross entropy": Case(lambda: F.binary_cross_entropy(x(2, 3), x(2, 3), x(3)), 0, 8 * 6),
    "nll_loss_forward": Case(lambda: F.nll_loss(x(2, 3), CLASSES), 0, 2),
    "weighted nll loss": Case(lambda: F.nll_loss(x(2, 3), CLASSES, x(3)), 0, 2 * 2),
    "nll_loss2d_forward": Case(lambda: F.nll_loss(x(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)), 0, 32),
    "cross entropy": Case(lambda: F.cross_entropy(x(2, 3), CLASSES), 0, 5 * 6 + 2),
    "l1 loss": Case(lambda: F.l1_loss(x(2, 3), x(2, 3)), 0, 3 * 6),
}
PLACES = {
    "embedding": Case(lambda: F.embedding(CLASSES, x(5, 4)), 0, 0),
    "_embedding_bag": Case(lambda: torch._embedding_bag(x(5, 4), torch.tensor([0, 2, 1]), torch.tensor([0])), 0, 12),
    "_embedding_bag_forward_only": Case(lambda: F.embedding_bag(torch.tensor([[0, 2, 1]]), x(5, 4), mode="sum"), 0, 12),
    "index_add": Case(lambda: x(5, 4).index_add(0, CLASSES, x(2, 4)), 0, 8),
    "scatter_add": Case(lambda: x(5, 4).scatter_add(0, FIRST, x(2, 4)), 0, 8),
    "scatter_add of a part": Case(lambda: x(5, 4).scatter_add(0, FIRST[:1], x(2, 4)), 0, 4),
    "scatter_reduce": Case(lambda: x(5, 4).scatter_reduce(0, FIRST, x(2, 4), "sum"), 0, 8),
    "index_reduce": Case(lambda: x(5, 4).index_reduce(0, CLASSES, x(2, 4), "prod"), 0, 8),
    "index_put": Case(lambda: x(5, 4).index_put((CLASSES,), x(2, 4), accumulate=True), 0, 8),
    "index_put without sums": Case(lambda: x(5, 4).index_put((CLASSES,), x(2, 4)), 0, 0),
    "_index_put_impl": Case(lambda: aten._index_put_impl_(x(5, 4), [CLASSES], x(2, 4), True), 0, 8),
    "_unsafe_index_put": Case(lambda: aten._unsafe_index_put(x(5, 4), [CLASSES], x(2, 4), True), 0, 8),
    "col2im": Case(lambda: F.fold(x(2, 12, 9), (4, 4), 2), 0, 2 * 12 * 9),
}
if hasattr(aten, "_unsafe_masked_index_put_accumulate"):  # not in torch 2.4
    _MASKED = lambda: (x(5, 4), torch.tensor([[True], [False]]), [CLASSES], x(2, 4))  # noqa: E731
    PLACES["_unsafe_masked_index_put_accumulate"] = Case(aten._unsafe_masked_index_put_accumulate, 0, 8, given=_MASKED)


def real_fft(length: int) -> int:
    return round(5 * length * math.log2(length) / 2)


TRANSFORMS = {
    "_cdist_forward": Case(lambda: torch.cdist(x(5, 2, 4), x(5, 3, 4)), 0, 3 * 5 * 2 * 3 * 4),
    "_pdist_forward": Case(lambda: F.pdist(x(5, 4)), 0, 3 * 10 * 4),
    "_fft_c2c": Case(lambda: torch.fft.fft(complex64(8)), 0, 5 * 8 * 3),
    "fft of two dimensions": Case(lambda: torch.fft.fft2(complex64(3, 4, 8)), 0, 3 * 5 * 32 * 5),
    "_fft_r2c": Case(lambda: torch.fft.rfft(x(2, 8)), 0, 2 * real_fft(8)),
    "_fft_c2r": Case(lambda: torch.fft.irfft(complex64(2, 9)), 0, 2 * real_fft(16)),
    "linalg_cholesky_ex": Case(lambda: torch.linalg.cholesky_ex(torch.eye(6).repeat(2, 1, 1)), 0, 2 * 72),
    "cholesky": Case(lambda: torch.cholesky(torch.eye(6)), 0, 72, until=(2, 14)),
    "linalg_lu_factor_ex": Case(lambda: torch.linalg.lu_factor_ex(x(6, 6)), 0, 144),
    # m·n² − n³/3 multiplications and as many additions, for m rows and n columns.
    "LU of what is no square": Case(lambda: torch.linalg.lu_factor_ex(x(6, 3)), 0, 6 * 9 - 9),
    "_linalg_det": Case(lambda: torch.linalg.det(x(6, 6)), 0, 144),
    "_linalg_slogdet": Case(lambda: torch.linalg.slogdet(x(6, 6)), 0, 144),
    "linalg_inv_ex": Case(lambda: torch.linalg.inv_ex(x(6, 6)), 0, 432),
    "_linalg_solve_ex": Case(lambda: aten._linalg_solve_ex(x(6, 6), x(6, 2)), 0, 144 + 2 * 36 * 2),
    "linalg_solve_triangular": Case(
        lambda: torch.linalg.solve_triangular(torch.eye(6), x(6, 2), upper=False), 0, 36 * 2
    ),
    "triangular_solve": Case(lambda: torch.triangular_solve(x(6, 2), torch.eye(6)), 0, 36 * 2),
    "linalg_cross": Case(lambda: torch.linalg.cross(x(2, 3), x(2, 3)), 0, 3 * 6),
    "cross": Case(lambda: torch.cross(x(2, 3), x(2, 3), dim=1), 0, 3 * 6),
    "inverse": Case(lambda: torch.linalg.inv(torch.eye(6)), 0, 432),
}


def fused(name: str, states: str, **options: Any) -> Callable[[], Any]:
    """A step of a fused optimizer on two parameters of 6 and 4 elements. ``states``: one letter for each list after
    parameters and gradients: like these, empty, or of steps."""

    def step() -> None:
        lists = {"s": lambda: [x(2, 3), x(4)], "-": list, "n": lambda: [torch.ones(()), torch.ones(())]}
        getattr(torch, name)(*(lists[each]() for each in f"ss{states}"), **options)

    return step


_SGD = {"momentum": 0.9, "lr": 0.1, "dampening": 0.0, "nesterov": False, "maximize": False, "is_first_step": False}
_ADAM = {"lr": 0.1, "beta1": 0.9, "beta2": 0.9, "weight_decay": 0.0, "eps": 1e-8, "amsgrad": False, "maximize": False}
LISTS = (2, 4) if HAS_SHAPES_OF_LISTS else (99, 0)
OPTIMIZERS = {
    "_fused_sgd": Case(fused("_fused_sgd_", "s", weight_decay=0.0, **_SGD), 0, 10 * (2 + 2), LISTS),
    "SGD, decay and Nesterov": Case(
        fused("_fused_sgd_", "s", weight_decay=0.1, **{**_SGD, "nesterov": True}), 0, 10 * (2 + 2 + 2 + 2), LISTS
    ),
    "SGD, dampened": Case(
        fused("_fused_sgd_", "s", weight_decay=0.0, **{**_SGD, "dampening": 0.5}), 0, 10 * (2 + 2 + 1), LISTS
    ),
    "SGD, plain": Case(fused("_fused_sgd_", "-", weight_decay=0.0, **{**_SGD, "momentum": 0.0}), 0, 10 * 2, LISTS),
    "_fused_adam": Case(fused("_fused_adam_", "ss-n", **_ADAM), 0, 10 * 13, LISTS),
    "Adam, decay and AMSGrad": Case(
        fused("_fused_adam_", "sssn", **{**_ADAM, "weight_decay": 0.1, "amsgrad": True}), 0, 10 * (13 + 2 + 1), LISTS
    ),
    "_fused_adamw": Case(fused("_fused_adamw_", "ss-n", **{**_ADAM, "weight_decay": 0.1}), 0, 10 * (13 + 1), LISTS),
    "_fused_adagrad": Case(
        fused("_fused_adagrad_", "sn", lr=0.1, lr_decay=0.0, weight_decay=0.0, eps=1e-8, maximize=False),
        0,
        10 * 7,
        LISTS,
    ),
    "_amp_foreach_non_finite_check_and_unscale": Case(
        lambda: torch._amp_foreach_non_finite_check_and_unscale_([x(2, 3), x(4)], torch.zeros(1), torch.ones(1)),
        0,
        2 * 10,
        LISTS,
    ),
    "_foreach_add of two lists": Case(lambda: torch._foreach_add([x(2, 3), x(4)], [x(2, 3), x(4)]), 0, 10, LISTS),
    "_foreach_sub, scaled": Case(
        lambda: torch._foreach_sub([x(2, 3), x(4)], [x(2, 3), x(4)], alpha=0.5), 0, 2 * 10, LISTS
    ),
    "_foreach_norm": Case(lambda: torch._foreach_norm([x(2, 3), x(4)]), 0, 2 * 10, LISTS),
    "_foreach_max": Case(lambda: torch._foreach_max([x(2, 3), x(4)]), 0, 10, LISTS),
    "_foreach_mul of many": Case(lambda: torch._foreach_mul([x(3) for _ in range(200)], 2.0), 0, 600, LISTS),
}

BY_HAND: dict[str, Case] = {**MATRICES, **CONVOLUTIONS, **ATTENTION, **RECURRENT, **REDUCTIONS, **NORMS, **POOLS}
BY_HAND |= {**LOSSES, **PLACES, **TRANSFORMS, **OPTIMIZERS}


def cases(table: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, case, id=name) for name, case in table.items()]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "case"), cases(BY_HAND))
def test_an_op_counts_what_it_does_by_hand(name: str, case: Case) -> None:
    if not case.since <= RELEASE < case.until:
        pytest.skip(f"torch {torch.__version__} cannot run it, or does not record enough")
    given = case.given()
    run = profiled(lambda: case.step(*given))
    assert found(run) == Found(case.macs, case.others)
    assert name not in FORMULAS or name in ran(run)


# One op, backward: what is counted in that phase, of a step whose result goes back with ones.


class Back(NamedTuple):
    step: Callable[[], Tensor]
    macs: int
    others: int = 0
    since: tuple[int, int] = (2, 4)


def conv(
    weight: tuple[int, ...], of_input: bool = True, of_weight: bool = True, **options: Any
) -> Callable[[], Tensor]:
    def step() -> Tensor:
        function = F.conv_transpose2d if options.pop("transposed", False) else F.conv2d
        return function(image().requires_grad_(of_input), x(*weight).requires_grad_(of_weight), **options)

    return step


def fused_attention(*shapes: tuple[int, ...], **options: Any) -> Callable[[], Tensor]:
    return lambda: F.scaled_dot_product_attention(*(g(*shape) for shape in shapes), **options)


def lstm(**options: Any) -> Callable[[], Tensor]:
    layer = nn.LSTM(4, 3, **options)
    return lambda: layer(g(5, 2, 4))[0]


_FORWARD = 2 * 6 * 7 * 6 * 2 * 9  # of a convolution in two groups
BACKWARD = {
    "mm": Back(lambda: g(2, 3) @ g(3, 4), 2 * 24),
    "mm, frozen weight": Back(lambda: g(2, 3) @ x(3, 4), 24),
    "mm, first layer": Back(lambda: x(2, 3) @ g(3, 4), 24),
    "linear": Back(lambda: F.linear(g(2, 3), g(4, 3), g(4)), 2 * 24, 2 * 4),  # the bias: a sum over rows
    "bmm": Back(lambda: torch.bmm(g(5, 2, 3), g(5, 3, 4)), 2 * 120),
    "convolution_backward": Back(conv((6, 2, 3, 3), groups=2), 2 * _FORWARD),
    "convolution, frozen weight": Back(conv((6, 2, 3, 3), of_weight=False, groups=2), _FORWARD),
    "convolution, first layer": Back(conv((6, 2, 3, 3), of_input=False, groups=2), _FORWARD),
    "convolution, only the bias": Back(lambda: F.conv2d(image(), x(6, 4, 3, 3), g(6)), 0, 2 * 6 * 7 * 6),
    "convolution, depthwise": Back(conv((4, 1, 3, 3), groups=4), 2 * (2 * 4 * 7 * 6 * 9)),
    "transposed": Back(conv((4, 3, 2, 2), transposed=True, stride=2), 2 * (2 * 4 * 72 * 3 * 4)),
    "transposed, grouped": Back(conv((4, 3, 2, 2), transposed=True, groups=2), 2 * (2 * 4 * 72 * 3 * 4)),
    # A fused kernel makes QKᵀ again: five products for the forward's two.
    "_scaled_dot_product_flash_attention_for_cpu_backward": Back(
        fused_attention((2, 3, 5, 4), (2, 3, 7, 4), (2, 3, 7, 4)), 5 * _SCORES * 4, 7 * _SCORES
    ),
    "attention, grouped queries": Back(
        fused_attention((2, 4, 5, 4), (2, 2, 7, 4), (2, 2, 7, 4), enable_gqa=True),
        5 * 2 * 4 * 35 * 4,
        7 * 2 * 4 * 35,
        (2, 7),  # before, no fused kernel of the CPU has it
    ),
    "mkldnn_rnn_layer_backward": Back(lstm(), 2 * 10 * 12 * 7, 2 * 10 * 3 * 13),
    "_softmax_backward_data": Back(lambda: g(2, 3).softmax(-1), 0, 4 * 6),
    "_log_softmax_backward_data": Back(lambda: g(2, 3).log_softmax(-1), 0, 4 * 6),
    "_masked_softmax_backward": Back(
        lambda: torch._masked_softmax(g(2, 3, 4, 4), torch.zeros(2, 3, 4, 4, dtype=torch.bool), 3, 2), 0, 4 * 96
    ),
    "glu_backward": Back(lambda: F.glu(g(2, 6)), 0, 2 * 12),
    # Of the input 10 an element, of the weight 2, of the bias 1.
    "native_layer_norm_backward": Back(lambda: F.layer_norm(g(2, 3, 4), (4,), g(4), g(4)), 0, 24 * 13),
    "layer norm, frozen": Back(lambda: F.layer_norm(g(2, 3, 4), (4,), x(4), x(4)), 0, 24 * 10),
    "native_group_norm_backward": Back(lambda: F.group_norm(g(2, 3, 4, 4), 3, g(3), g(3)), 0, _E * 13),
    "native_batch_norm_backward": Back(
        lambda: F.batch_norm(g(2, 3, 4, 4), None, None, g(3), g(3), training=True), 0, _E * 13
    ),
    "batch norm in eval": Back(
        lambda: F.batch_norm(g(2, 3, 4, 4), *(s.clone() for s in _STATISTICS), g(3), g(3)), 0, _E * (2 + 2 + 1)
    ),
    "_weight_norm_interface_backward": Back(lambda: torch._weight_norm_interface(g(4, 3), g(4, 1), 0)[0], 0, 6 * 12),
    "avg_pool2d_backward": Back(lambda: F.avg_pool2d(g(2, 4, 9, 8), 3, 2), 0, 8 * (4 * 3) * 9),
    "avg_pool3d_backward": Back(lambda: F.avg_pool3d(g(1, 2, 4, 4, 4), 2), 0, 2 * 8 * 8),
    "_adaptive_avg_pool2d_backward": Back(lambda: F.adaptive_avg_pool2d(g(1, 1, 5, 4), (2, 4)), 0, (3 + 3) * 4),
    "_adaptive_avg_pool3d_backward": Back(lambda: F.adaptive_avg_pool3d(g(1, 2, 4, 4, 4), 2), 0, 2 * 64),
    "max_pool2d_with_indices_backward": Back(lambda: F.max_pool2d(g(2, 4, 9, 8), 3), 0, 8 * 6),
    "max_pool3d_with_indices_backward": Back(lambda: F.max_pool3d(g(1, 2, 4, 4, 4), 2), 0, 2 * 8),
    "adaptive_max_pool2d_backward": Back(lambda: F.adaptive_max_pool2d(g(1, 1, 5, 4), (2, 4)), 0, 8),
    "adaptive_max_pool3d_backward": Back(lambda: F.adaptive_max_pool3d(g(1, 2, 4, 4, 4), 2), 0, 16),
    "upsample_linear1d_backward": Back(lambda: F.interpolate(g(2, 3, 4), size=7, mode="linear"), 0, 42 * 2 * 2),
    "upsample_bilinear2d_backward": Back(
        lambda: F.interpolate(g(2, 4, 9, 8), scale_factor=2, mode="bilinear"), 0, 8 * 18 * 16 * 8
    ),
    "upsample_bicubic2d_backward": Back(
        lambda: F.interpolate(g(2, 4, 9, 8), size=(3, 5), mode="bicubic"), 0, 8 * 15 * 32
    ),
    "upsample_trilinear3d_backward": Back(
        lambda: F.interpolate(g(1, 2, 3, 3, 3), scale_factor=2, mode="trilinear"), 0, 2 * 216 * 16
    ),
    **{
        f"{op}{dims}d_backward": Back(
            lambda dims=dims, mode=mode: F.interpolate(g(1, 2, *[3] * dims), scale_factor=2, mode=mode), 0, 2 * 6**dims
        )
        for op, mode in (("upsample_nearest", "nearest"), ("_upsample_nearest_exact", "nearest-exact"))
        for dims in (1, 2, 3)
    },
    **{
        f"{op}_pad{dims}d_backward": Back(
            lambda dims=dims, mode=mode: F.pad(g(1, 2, *[3] * dims), [1] * 2 * dims, mode=mode), 0, 2 * 5**dims
        )
        for op, mode in (("reflection", "reflect"), ("replication", "replicate"))
        for dims in (1, 2, 3)
    },
    "mse_loss_backward": Back(lambda: F.mse_loss(g(2, 3), x(2, 3)), 0, 3 * 6),
    "smooth_l1_loss_backward": Back(lambda: F.smooth_l1_loss(g(2, 3), x(2, 3)), 0, 3 * 6),
    "huber_loss_backward": Back(lambda: F.huber_loss(g(2, 3), x(2, 3)), 0, 3 * 6),
    "binary_cross_entropy_backward": Back(lambda: F.binary_cross_entropy(g(2, 3), x(2, 3)), 0, 5 * 6),
    "nll_loss_backward": Back(lambda: F.nll_loss(g(2, 3), CLASSES), 0, 2),
    "nll_loss2d_backward": Back(lambda: F.nll_loss(g(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.long)), 0, 32),
    "embedding_backward": Back(lambda: F.embedding(CLASSES, g(5, 4)), 0, 8),
    "_embedding_bag_dense_backward": Back(
        lambda: F.embedding_bag(torch.tensor([[0, 2, 1]]), g(5, 4), mode="sum"), 0, 12
    ),
    "unfold_backward": Back(lambda: g(6).unfold(0, 2, 2), 0, 6),
    "col2im": Back(lambda: F.unfold(g(2, 3, 4, 4), 2), 0, 2 * 12 * 9),
    "indexing": Back(lambda: g(5, 4)[CLASSES], 0, 8),
    "dropout": Back(lambda: F.dropout(g(2, 3)), 0, 6),
    "native_dropout_backward": Back(lambda: torch.native_dropout(g(2, 3), 0.5, True)[0], 0, 2 * 6),
    "_prelu_kernel_backward": Back(lambda: torch._prelu_kernel(g(2, 3), g(2, 3)), 0, 2 * 6),
    "tanh_backward": Back(lambda: torch.tanh(g(2, 3)), 0, 6),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "case"), cases(BACKWARD))
def test_the_backward_of_an_op_counts_what_it_does_by_hand(name: str, case: Back) -> None:
    if case.since > RELEASE:
        pytest.skip(f"torch {torch.__version__} cannot run it")

    def step() -> None:
        result = case.step()
        result.backward(torch.ones_like(result))

    run = profiled(step)
    assert found(run, "backward") == Found(case.macs, case.others)
    assert name not in FORMULAS or name in ran(run)


# Ops that this machine cannot run, from hand-made signatures.

_SPELLED = {
    torch.float32: "float",
    torch.bfloat16: "c10::BFloat16",
    torch.int32: "int",
    torch.int64: "long int",
    torch.complex64: "c10::complex<float>",
}


def signature(*inputs: Any) -> Signature:
    """A signature as torch records it. Tensors and lists of tensors give shapes; all other inputs give their value."""
    shapes: list[Any] = []
    dtypes: list[str] = []
    for value in inputs:
        if isinstance(value, Tensor):
            shapes.append(tuple(value.shape))
            dtypes.append(_SPELLED[value.dtype])
        elif isinstance(value, list) and value and isinstance(value[0], Tensor):
            shapes.append(tuple(tuple(tensor.shape) for tensor in value))
            dtypes.append("TensorList")
        else:
            shapes.append(())
            dtypes.append("" if value is None else "ScalarList" if isinstance(value, (list, tuple)) else "Scalar")
    scalars = [
        None if dtype not in ("Scalar", "ScalarList") else tuple(value) if isinstance(value, (list, tuple)) else value
        for value, dtype in zip(inputs, dtypes)
    ]
    return Signature(tuple(shapes), tuple(dtypes), tuple(scalars))


def work(name: str, *inputs: Any) -> Found | None:
    result = work_of(Operation(name if "::" in name else f"aten::{name}", signature(*inputs)))
    return None if result is None else Found(result.macs, result.flops - 2 * result.macs)


def t(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")


def weights_of(layer: nn.RNNBase) -> list[Tensor]:
    return [weight.to("meta") for weight in layer._flat_weights]


class Made(NamedTuple):
    name: str
    inputs: tuple[Any, ...]
    macs: int
    others: int = 0


_Q, _K, _V = t(2, 3, 5, 4), t(2, 3, 7, 4), t(2, 3, 7, 6)
_LAST = t(2, 5, 3, 4), t(2, 7, 3, 4), t(2, 7, 3, 6)  # heads before the width
_O, _L = t(2, 3, 5, 6), t(2, 3, 5)
_FLASH_BACK = Found(_SCORES * (3 * 4 + 2 * 6), 7 * _SCORES)
_FLASH = Found(_SCORES * (4 + 6), 6 * _SCORES)
_LSTM = nn.LSTM(4, 3, num_layers=2, bidirectional=True, proj_size=2)
_LSTM_MACS = 10 * 2 * ((12 * 4 + 12 * 2 + 3 * 2) + (12 * 4 + 12 * 2 + 3 * 2))
_GRU_WEIGHTS = weights_of(nn.GRU(4, 3))
_RNN_WEIGHTS = weights_of(nn.RNN(4, 3, bias=False))


def cudnn_rnn(weights: list[Tensor], mode: int, hidden: int = 3) -> tuple[Any, ...]:
    return (t(5, 2, 4), weights, 4, t(99), t(1, 2, 3), None, mode, hidden, 0, 1, False, 0.0, True, False, (), None)


def gru_backward(*mask: bool) -> tuple[Any, ...]:
    states = t(1, 2, 3), None, t(5, 2, 3), t(5, 2, 3), t(1, 2, 3), None
    return (t(5, 2, 4), _GRU_WEIGHTS, 4, t(99), *states, 3, 3, 0, 1, False, 0.0, True, False, (), None, t(9), mask)


_B, _C = t(2, 3, 4, 4), t(3)
_BATCH = _B, _C, _C
_GROUPED = t(2, 4, 9, 8), t(6, 2, 3, 3)
HAND_MADE = [
    Made("_scaled_grouped_mm", (t(6, 8), t(2, 8, 16), t(6), t(2, 16), t(2)), 6 * 8 * 16),
    Made("mkl::_mkl_linear", (t(2, 5, 3), t(99), t(4, 3), t(4), 10), 10 * 12, 10 * 4),
    Made("mkl::_mkl_linear", (t(2, 5, 3), t(99), t(4, 3), None, 10), 10 * 12),
    *(
        Made(
            "mkldnn::_convolution_pointwise",
            (t(2, 3, 8, 8), t(4, 3, 3, 3), t(4), [1, 1], [1, 1], [1, 1], 1, after, [], ""),
            512 * 27,
            512 * (1 if after == "none" else 2),
        )
        for after in ("none", "relu")
    ),
    Made(
        "mkldnn::_convolution_transpose_pointwise",
        (t(2, 4, 5, 5), t(6, 4, 2, 2), t(6), [0, 0], [0, 0], [2, 2], [1, 1], 1, "none", [], ""),
        2 * 4 * 5 * 5 * 6 * 4,
        2 * 6 * 10 * 10,
    ),
    Made(
        "convolution_overrideable",
        (*_GROUPED, t(6), (2, 1), (1, 0), (1, 2), False, (0, 0), 2),
        2 * 6 * 5 * 4 * 2 * 9,
        2 * 6 * 5 * 4,
    ),
    Made("cudnn_convolution", (*_GROUPED, (1, 0), (2, 1), (1, 2), 2, False, False, True), 2 * 6 * 20 * 18),
    Made("miopen_convolution", (*_GROUPED, t(6), (1, 0), (2, 1), (1, 2), 2, False, False), 2 * 6 * 20 * 18, 2 * 6 * 20),
    *(
        Made(f"_scaled_dot_product_{kind}", (_Q, _K, _V, None, True, 0.0), *_FLASH[:2])
        for kind in ("attention_math_for_mps", *(f"{kind}_attention" for kind in ("cudnn", "efficient", "flash")))
    ),
    Made("_scaled_dot_product_fused_attention_overrideable", (_Q, _K, _V, None, True, 0.0), *_FLASH[:2]),
    *(
        Made(f"_scaled_dot_product_{kind}_attention{more}_backward", (_O, _Q, _K, _V, _O, _L), *_FLASH_BACK[:2])
        for kind, more in (("cudnn", ""), ("efficient", ""), ("flash", ""), ("fused", "_overrideable"))
    ),
    Made("_flash_attention_forward", (*_LAST, None, None, 5, 7, 0.0, False, False), *_FLASH[:2]),
    Made("_efficient_attention_forward", (*_LAST, None, None, None, 5, 7, 0.0, 0, False), *_FLASH[:2]),
    Made("flash_attn::_flash_attn_forward", (*_LAST, 0.0, 0.5, False, -1, -1, 0.0, None, False), *_FLASH[:2]),
    Made("_flash_attention_backward", (_LAST[0], *_LAST, _LAST[0], _L, None, None, 5, 7, 0.0, False), *_FLASH_BACK[:2]),
    Made("flash_attn::_flash_attn_backward", (_LAST[0], *_LAST, _LAST[0], _L, None, None, None), *_FLASH_BACK[:2]),
    # Two layers, two directions, each with 13 a unit and two biases of 4 a unit.
    Made("_cudnn_rnn", cudnn_rnn(weights_of(_LSTM), 2), _LSTM_MACS, 10 * 4 * 3 * (13 + 8)),
    Made("_cudnn_rnn", cudnn_rnn(_GRU_WEIGHTS, 3), 10 * 9 * 7, 10 * 3 * (10 + 6)),
    Made("_cudnn_rnn", cudnn_rnn(_RNN_WEIGHTS, 1), 10 * 3 * 7, 10 * 3 * 2),
    Made("miopen_rnn", (t(5, 2, 4), _GRU_WEIGHTS, 4, t(1, 2, 3), None, 3, 3, 1), 10 * 9 * 7, 10 * 3 * (10 + 6)),
    Made("_cudnn_rnn_backward", gru_backward(True, True, False, True), 2 * 10 * 9 * 7, 2 * 10 * 3 * (10 + 6)),
    Made("_cudnn_rnn_backward", gru_backward(True, True, False, False), 10 * 9 * 7, 2 * 10 * 3 * (10 + 6)),
    Made("_thnn_fused_lstm_cell", (t(2, 12), t(2, 12), t(2, 3), t(12), t(12)), 0, 2 * 3 * (13 + 8)),
    Made("_thnn_fused_lstm_cell", (t(2, 12), t(2, 12), t(2, 3), None, None), 0, 2 * 3 * 13),
    Made("_thnn_fused_lstm_cell_backward_impl", (t(2, 3), t(2, 3), t(2, 3), t(2, 3), t(2, 12), True), 0, 2 * 6 * 13),
    Made("_thnn_fused_gru_cell", (t(2, 9), t(2, 9), t(2, 3), t(9), t(9)), 0, 2 * 3 * (10 + 6)),
    Made("_thnn_fused_gru_cell_backward", (t(2, 3), t(2, 15), True), 0, 2 * 6 * 10),
    Made("_fused_dropout", (t(2, 3), 0.5), 0, 2 * 6),
    Made("cudnn_batch_norm", (*_BATCH, _C, _C, True, 0.1, 1e-5), 0, _E * 7),
    Made("miopen_batch_norm", (*_BATCH, _C, _C, False, 0.1, 1e-5), 0, _E * 4),
    Made("batch_norm_stats", (_B, 1e-5), 0, _E * 3),
    Made("batch_norm_elemt", (*_BATCH, _C, _C, 1e-5), 0, _E * 4),
    Made("batch_norm_elemt", (_B, None, None, _C, _C, 1e-5), 0, _E * 2),
    Made("batch_norm_backward_reduce", (_B, _B, _C, _C, _C, True, True, True), 0, _E * 3),
    Made("batch_norm_backward_elemt", (_B, _B, *[_C] * 5, t(1)), 0, _E * 7),
    Made("cudnn_batch_norm_backward", (_B, _B, *[_C] * 5, 1e-5, t(9)), 0, _E * 13),
    Made("miopen_batch_norm_backward", (_B, _B, *[_C] * 5, 1e-5), 0, _E * 13),
    Made("batch_norm_backward", (_B, _B, *[_C] * 5, True, 1e-5, (True, False, True), t(9)), 0, _E * 11),
    Made("batch_norm_backward", (_B, _B, *[_C] * 5, False, 1e-5, (True, True, True), t(9)), 0, _E * 5),
    Made("_fused_rms_norm_backward", (t(2, 3, 4), t(2, 3, 4), (4,), t(2, 3, 1), t(4), (True, True)), 0, 24 * (7 + 2)),
    Made("_fused_rms_norm_backward", (t(2, 3, 4), t(2, 3, 4), (4,), t(2, 3, 1), None, (True, False)), 0, 24 * 7),
    Made("mkldnn_max_pool2d_backward", (t(2, 3, 2, 2), t(2, 3, 2, 2), t(2, 3, 4, 4), (2, 2)), 0, 24),
    Made("mkldnn_max_pool3d_backward", (t(2, 3, 2, 2, 2), t(2, 3, 2, 2, 2), t(2, 3, 4, 4, 4), (2, 2, 2)), 0, 48),
    Made("embedding_dense_backward", (t(2, 4), t(2).long(), 5, -1, False), 0, 8),
    Made("avg_pool2d", (t(2, 3, 8, 8), (2, 2), None, None, False, True, None), 0, 6 * 16 * 4),
    Made("max_pool1d_with_indices", (t(2, 3, 9), (3,), (2,), (0,), (1,), False), 0, 6 * 4 * 3),
]


@pytest.mark.parametrize("made", HAND_MADE, ids=lambda made: made.name)
def test_an_op_of_another_device_counts_what_it_does_by_hand(made: Made) -> None:
    assert work(made.name, *made.inputs) == Found(made.macs, made.others)


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        # Packed sequences: their lengths are in the data, which is not recorded.
        ("_flash_attention_forward", (*_LAST, t(3), t(3), 5, 7, 0.0, False, False)),
        ("_efficient_attention_forward", (*_LAST, None, t(3), t(3), 5, 7, 0.0, 0, False)),
        ("_flash_attention_backward", (_LAST[0], *_LAST, _LAST[0], _L, t(3), t(3), 5, 7, 0.0, False)),
        ("_cudnn_rnn", (t(5, 2, 4), None, 4)),
        ("mm", (t(2, 3),)),
        ("addmm", (t(4), None, t(3, 4))),
        ("convolution", (t(2, 4, 9, 8), t(6, 4, 3, 3), None, (1, 1), (0, 0), (1, 1))),
        ("add", (t(2, 3), None, 1)),
        ("foo", (t(2, 3),)),
        ("mine::mm", (t(2, 3), t(3, 4))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_work_is_unknown_if_the_inputs_do_not_determine_it(name: str, inputs: tuple[Any, ...]) -> None:
    assert work(name, *inputs) is None


def test_a_bias_does_not_hide_the_work_of_efficient_attention() -> None:
    assert work("_efficient_attention_forward", *_LAST, t(2, 3, 5, 7), None, None, 5, 7) == _FLASH


@pytest.mark.parametrize(
    ("name", "inputs"),
    [
        ("mm", (t(2, 3), t(4, 5))),
        ("bmm", (t(2, 2, 3), t(2, 4, 5))),
        ("mv", (t(2, 3), t(4))),
        ("dot", (t(3), t(4))),
        ("addmm", (t(5), t(2, 3), t(4, 5), 1, 1)),
        ("baddbmm", (t(2, 2, 5), t(2, 2, 3), t(2, 4, 5), 1, 1)),
        ("addmv", (t(2), t(2, 3), t(4), 1, 1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_product_that_torch_rejects_has_no_work(name: str, inputs: tuple[Any, ...]) -> None:
    assert work(name, *inputs) == Found(0, 0)


# All other formulas count operations for each element of the result.

_SEVERAL = {"addcmul": 3, "addcdiv": 3, "lerp": 3}
_ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "ldexp": lambda: (x(2, 3), x(2, 3)),
    "polygamma": lambda: (1, x(2, 3)),
    "polygamma_": lambda: (x(2, 3), 1),
    "clamp": lambda: (x(2, 3), 0.3),
    "clamp_": lambda: (x(2, 3), 0.3),
    "float_power_": lambda: (x(2, 3).double(), 2.0),
    "threshold_": lambda: (x(2, 3), 0.5, 0.5),
    "prelu": lambda: (x(2, 3), x(1)),
    "rrelu_with_noise": lambda: (x(2, 3), x(2, 3)),
    "rrelu_with_noise_backward": lambda: (x(2, 3), x(2, 3), x(2, 3), 0.1, 0.3, False, False),
    "log_sigmoid_backward": lambda: (x(2, 3), x(2, 3), x(2, 3)),
    "gelu_backward": lambda: (x(2, 3), x(2, 3)),
}
_NAMED = {case.name for case in HAND_MADE} | BY_HAND.keys() | BACKWARD.keys()
ELEMENTWISE = sorted(name for name in FORMULAS if name not in _NAMED and not name.startswith("_foreach_"))
FOREACH = sorted(name for name in FORMULAS if name.startswith("_foreach_") and name not in _NAMED)


def elementwise_steps(name: str) -> Iterator[Callable[[], Any]]:
    """The ways to call an op that its schemas allow: with a broadcast second tensor, and with two of one shape."""
    op = getattr(aten, name)
    if name in _ARGUMENTS:
        yield lambda: op(*_ARGUMENTS[name]())
        return
    for overload in sorted(op.overloads(), key=lambda name: name not in ("default", "Tensor", "self")):
        arguments = getattr(op, overload)._schema.arguments
        kinds = [str(argument.type) for argument in arguments if not argument.has_default_value()]
        if any(argument.is_out for argument in arguments) or "Tensor" not in kinds:
            continue
        for second in ((3,), (2, 3)):

            def step(kinds: list[str] = kinds, second: tuple[int, ...] = second, overload: str = overload) -> Any:
                made: list[Any] = []
                for kind in kinds:
                    if kind.startswith("Tensor") or kind == "Optional[Tensor]":
                        made.append(x(*((2, 3) if not made else second)))
                    else:
                        made.append({"bool": False, "int": 1}.get(kind, 0.5))
                return getattr(op, overload)(*made)

            yield step


@pytest.mark.parametrize("name", [*ELEMENTWISE, *(f"{name}_" for name in ELEMENTWISE if hasattr(aten, f"{name}_"))])
def test_an_elementwise_op_counts_each_element_of_its_result(name: str) -> None:
    if not hasattr(aten, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    for step in elementwise_steps(name):
        try:
            result = step()
        except (RuntimeError, TypeError, NotImplementedError, IndexError):
            continue
        elements = (result if isinstance(result, Tensor) else result[0]).numel()
        assert counted(step) == Found(0, _SEVERAL.get(name.removesuffix("_"), 1) * elements)
        return
    raise AssertionError(f"no way to call {name} was found")


@pytest.mark.skipif(not HAS_SHAPES_OF_LISTS, reason="this torch records no shapes of lists")
@pytest.mark.parametrize("name", [name for name in FOREACH if hasattr(aten, name)])
def test_an_op_on_a_list_counts_each_of_its_tensors(name: str) -> None:
    def tensors() -> list[Tensor]:
        return [x(2, 3), x(4)]

    times = _SEVERAL.get(name.removeprefix("_foreach_"), 1)
    for more in ((), (0.5,), (tensors(),), (tensors(), 0.5), (tensors(), tensors())):
        try:
            getattr(torch, name)(tensors(), *more)
        except (RuntimeError, TypeError):
            continue
        assert counted(lambda more=more: getattr(torch, name)(tensors(), *more)) == Found(0, 10 * times)
        return
    raise AssertionError(f"no way to call {name} was found")


@given(st.lists(st.integers(1, 4), max_size=4), st.lists(st.integers(0, 4), max_size=4), st.data())
def test_elementwise_work_is_that_of_the_broadcast_shape(
    first: list[int], second: list[int], data: st.DataObject
) -> None:
    for at in range(1, min(len(first), len(second)) + 1):  # make them fit: equal, or one of them 1
        if data.draw(st.booleans()):
            first[-at] = 1
        else:
            second[-at] = first[-at] if first[-at] != 1 else second[-at]
    assume(all(a == b or 1 in (a, b) for a, b in zip(reversed(first), reversed(second))))
    third = second[1:]
    expected = torch.broadcast_shapes(tuple(first), tuple(second))
    assert work("add", t(*first), t(*second), 1) == Found(0, math.prod(expected))
    assert work("addcmul", t(*first), t(*second), t(*third), 1) == Found(0, 3 * math.prod(expected))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "step",
    [
        lambda out: torch.add(x(2, 3), x(3), out=out),
        lambda out: torch.mul(x(2, 3), 2.0, out=out),
        lambda out: torch.sigmoid(x(2, 3), out=out),
        lambda out: torch.clamp(x(2, 3), 0.3, 0.5, out=out),
        lambda out: torch.pow(x(2, 3), 2, out=out),
    ],
)
@pytest.mark.parametrize("shape", [(2, 3), (0,), (7,)], ids=str)
def test_an_out_tensor_does_not_change_the_count(step: Callable[[Tensor], Any], shape: tuple[int, ...]) -> None:
    assert counted(lambda: step(torch.empty(*shape))) == Found(0, 6)


# Kinds of numbers


@pytest.mark.parametrize(
    "step",
    [
        lambda i: i + i,
        lambda i: i * 2,
        lambda i: -i,
        lambda i: i.abs(),
        lambda i: i == 2,
        lambda i: i.sum(),
        lambda i: i.cumsum(0),
        lambda i: i.sort(),
        lambda i: i.max(),
        lambda i: i.clamp(0, 3),
        lambda i: (i > 2) & (i < 4),
        lambda i: torch.maximum(i, i),
        lambda i: i.add_(1),
    ],
)
def test_integers_make_no_floating_point_operations(step: Callable[[Tensor], Any]) -> None:
    assert counted(lambda: step(torch.arange(6))) == Found(0, 0)


def test_integers_beside_floats_do() -> None:
    integers = torch.arange(6)
    assert counted(lambda: integers * x(6)) == Found(0, 6)
    assert counted(lambda: integers + 0.5) == Found(0, 6)
    assert counted(lambda: torch.ones(6, dtype=torch.bool) * x(6)) == Found(0, 6)
    assert counted(lambda: integers.float().mean()) == Found(0, 6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_dtype_does_not_change_the_count(dtype: torch.dtype) -> None:
    layer = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.LayerNorm(6)).to(dtype)
    assert counted(lambda: layer(x(2, 4).to(dtype))) == Found(48, 12 + 12 + 12 * 7)


def test_a_product_of_complex_numbers_is_six_operations_and_others_two() -> None:
    assert counted(lambda: complex64(5) * complex64(5)) == Found(0, 6 * 5)
    assert counted(lambda: complex64(5) / complex64(5)) == Found(0, 6 * 5)
    assert counted(lambda: complex64(5) + complex64(5)) == Found(0, 2 * 5)
    assert counted(lambda: complex64(5).sum()) == Found(0, 2 * 5)


# Shapes that a formula works out, against those that torch gives.

_SIZE = st.integers(1, 3)


@examples(200)
@given(st.data())
def test_the_result_of_a_convolution_has_the_size_of_torchs_result(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))
    sizes = st.lists(_SIZE, min_size=dims, max_size=dims)
    stride, dilation, kernel = data.draw(sizes), data.draw(sizes), data.draw(sizes)
    padding = data.draw(st.lists(st.integers(0, 3), min_size=dims, max_size=dims))
    groups, inside, outside = data.draw(_SIZE), data.draw(_SIZE), data.draw(_SIZE)
    batch = data.draw(st.lists(st.integers(0, 2), max_size=1))
    transposed = data.draw(st.booleans())
    more = [data.draw(st.integers(0, max(a, b) - 1)) if transposed else 0 for a, b in zip(stride, dilation)]
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=dims, max_size=dims))
    image = t(*batch, inside * groups, *lengths)
    weight = t(inside * groups, outside, *kernel) if transposed else t(outside * groups, inside, *kernel)
    bias = t(outside * groups)
    try:
        if transposed:
            function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[dims - 1]
            result = function(image, weight, bias, stride, padding, more, groups, dilation)
        else:
            result = (F.conv1d, F.conv2d, F.conv3d)[dims - 1](image, weight, bias, stride, padding, dilation, groups)
    except RuntimeError:  # no window fits
        assume(False)
    # Each element of the result (transposed: of the input) is combined with the weights of one output (input) channel.
    macs = (image if transposed else result).numel() * weight[0].numel()
    given = tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(more), groups
    assert work("convolution", image, weight, bias, *given) == Found(macs, result.numel())
    assert work("convolution", image, weight, None, *given) == Found(macs, 0)
    for mask in ((True, True, True), (True, False, False), (False, True, False), (False, False, True)):
        back = result, image, weight, (outside * groups,), *given, mask
        assert work("convolution_backward", *back) == Found(macs * sum(mask[:2]), result.numel() * mask[2])
    if not transposed:
        assert work("mkldnn_convolution", image, weight, bias, given[1], given[0], given[2], groups) == Found(
            macs, result.numel()
        )


@examples(150)
@given(st.data())
def test_pooling_counts_its_windows(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 3))

    def each(low: int, high: int) -> list[int]:
        return data.draw(st.lists(st.integers(low, high), min_size=dims, max_size=dims))

    kernel, stride, dilation, lengths = each(1, 3), each(1, 3), each(1, 2), each(3, 9)
    padding = [data.draw(st.integers(0, size // 2)) for size in kernel]
    round_up = data.draw(st.booleans())
    inputs = t(2, *lengths)

    def windows(gaps: list[int]) -> int:
        """A loop over all starts: a window fits, or it is the additional one inside the image that rounding up
        allows."""
        count = 1
        for length, size, step, border, gap in zip(lengths, kernel, stride, padding, gaps):
            starts, start = 0, -border
            while start + gap * (size - 1) < length + border:
                starts, start = starts + 1, start + step
            partial = start - step + gap * (size - 1) < length + border - 1 and start < length
            count *= starts + bool(round_up and partial)
        return count

    try:
        largest = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[dims - 1](
            inputs[None], kernel, stride, padding, dilation, round_up
        )
    except RuntimeError:
        assume(False)
    assert largest.numel() == 2 * windows(dilation)
    expected = Found(0, largest.numel() * math.prod(kernel))
    name = "max_pool1d" if dims == 1 else f"max_pool{dims}d_with_indices"
    assert work(name, inputs[None], kernel, stride, padding, dilation, round_up) == expected
    average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[dims - 1](inputs[None], kernel, stride, padding, round_up)
    assert average.numel() == 2 * windows([1] * dims)
    expected = Found(0, average.numel() * math.prod(kernel))
    assert work(f"avg_pool{dims}d", inputs[None], kernel, stride, padding, round_up, True) == expected


@examples(50)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9))
def test_adaptive_pooling_reads_as_many_elements_as_its_gradient_shows(h: int, w: int, height: int, width: int) -> None:
    """An average with overlapping windows: the number of derivatives that are not 0 is the number of elements read."""
    picture = torch.rand(1, h, w)
    read = torch.autograd.functional.jacobian(lambda p: F.adaptive_avg_pool2d(p, (height, width)), picture)
    expected = Found(0, 3 * int((read != 0).sum()))
    assert work("_adaptive_avg_pool2d", t(3, h, w), (height, width)) == expected
    assert work("adaptive_max_pool2d", t(3, h, w), (height, width)) == expected
    assert work("_adaptive_avg_pool2d_backward", t(3, height, width), t(3, h, w)) == expected


@examples(50)
@given(st.integers(1, 9), st.sampled_from([0.4, 0.75, 1.5, 2.0, 2.5]), st.integers(1, 3))
def test_the_result_of_an_interpolation_has_the_size_of_torchs_result(length: int, factor: float, dims: int) -> None:
    assume(int(length * factor) > 0)
    mode = ("linear", "bilinear", "trilinear")[dims - 1]
    inputs = t(2, 3, *[length] * dims)
    result = F.interpolate(inputs, scale_factor=factor, mode=mode)
    expected = Found(0, result.numel() * (2 * 2**dims - 1))
    name = f"upsample_{mode}{dims}d"
    assert work(name, inputs, None, False, (factor,) * dims) == expected
    assert work(name, inputs, tuple(result.shape[2:]), False, *[None] * dims) == expected


# The lists themselves


def real_ops() -> set[str]:
    """The names of torch's ops, also without the ``_`` of in-place ops."""
    names = {name.split(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    names |= {schema.name for schema in torch._C._jit_get_all_schemas()}  # those of TorchScript alone
    bare = {name.split("::")[1] for name in names if name.startswith(("aten::", "prims::"))}
    return bare | {name.removesuffix("_") for name in bare}


@pytest.mark.skipif(RELEASE < (2, 13), reason="older torch lacks some of the ops")
def test_every_name_is_an_op_of_torch() -> None:
    real = real_ops()
    named = {name for name in FORMULAS if "::" not in name and not name.startswith("_foreach_")}
    assert named - real <= {"cholesky"}  # torch 2.14 removed it
    assert not NO_ARITHMETIC - real


def test_every_formula_is_checked_here_and_no_op_both_has_one_and_counts_0() -> None:
    """Each by hand, by a hand-made signature, or as an elementwise op; those on lists as far as this torch has them."""
    assert not FORMULAS.keys() & NO_ARITHMETIC
    assert _NAMED | set(ELEMENTWISE) | set(FOREACH) >= FORMULAS.keys()


def test_formulas_are_found_by_the_names_in_a_profile() -> None:
    assert formula_of("aten::add_") is formula_of("aten::add") is formula_of("prims::add") is not None
    assert formula_of("mine::add") is None and formula_of("aten::view") is None
    assert (detail_of("aten::convolution"), detail_of("aten::mm")) == (Detail.SCALARS, Detail.SHAPES)
    assert all(does_no_arithmetic(f"aten::{name}") for name in ("view", "cat", "zero_", "index_select", "embedding"))
    assert not does_no_arithmetic("aten::mm") and not does_no_arithmetic("aten::dropout_mask")
    assert all(does_no_arithmetic(f"{namespace}::allreduce_") for namespace in COMMUNICATION)
    assert not does_no_arithmetic("mine::view")


# Which ops count, on hand-made events


class Call(NamedTuple):
    """An op with the ops inside it."""

    name: str
    inputs: tuple[Any, ...] = ()
    inside: tuple[Call, ...] = ()


def estimated(*calls: Call) -> Count:
    """The counts of some calls, one after another on one thread."""
    signatures = [Signature((), ())]
    events: list[Event] = []

    def record(call: Call, start: int) -> int:
        signatures.append(signature(*call.inputs))
        number, at = len(signatures) - 1, len(events)
        end = start + 1
        for inner in call.inside:
            end = record(inner, end)
        events.insert(at, Event(Kind.OP, call.name, start, end + 1, thread=1, signature=number))
        return end + 1

    end = 0
    for call in calls:
        end = record(call, end)
    estimate = Estimate(signatures)
    for _ in estimate.observe(walk_of(Attribution({}, []), events)):
        pass
    return Count(*map(sum, zip((0, 0, 0), *estimate.counts.values())))


def mm(rows: int, *inside: Call) -> Call:
    return Call("aten::mm", (t(rows, 3), t(3, 4)), inside)


def test_the_outermost_op_with_a_formula_counts() -> None:
    addmm = Call("aten::addmm", (t(4), t(2, 3), t(3, 4)), (mm(2), Call("aten::add_", (t(2, 4), t(4)))))
    assert estimated(addmm) == (24, 48 + 8, 0)
    assert estimated(addmm, addmm, mm(5)) == (2 * 24 + 60, 2 * 56 + 120, 0)


def test_an_op_without_a_formula_counts_as_the_ops_inside_it() -> None:
    assert estimated(Call("aten::linear", (), (Call("aten::t"), mm(2)))) == (24, 48, 0)
    assert estimated(Call("aten::_unheard_of", (), (mm(2),))) == (24, 48, 0)
    assert estimated(Call("aten::_unheard_of", (), (Call("aten::empty"),))) == (0, 0, 1)
    assert estimated(Call("aten::_unheard_of"), Call("aten::_unheard_of")) == (0, 0, 2)
    # Made of other ops by torch's own account: dropout in eval, flatten of what is flat.
    assert estimated(Call("aten::dropout", (t(2, 3), 0.5, False))) == (0, 0, 0)


def test_nothing_counts_inside_an_op_without_arithmetic() -> None:
    assert estimated(Call("aten::to", (), (mm(2),))) == (0, 0, 0)
    assert estimated(Call("c10d::allreduce_", (), (Call("aten::add", (t(2), t(2))),))) == (0, 0, 0)


def test_under_vmap_the_op_on_the_whole_batch_counts() -> None:
    """The outer op has the shapes of one example; a batched product may have another name."""
    assert estimated(mm(2, Call("aten::bmm", (t(5, 2, 3), t(5, 3, 4))))) == (120, 240, 0)
    assert estimated(mm(2, mm(10))) == (120, 240, 0)
    relu = Call("aten::relu", (t(2),), (Call("aten::relu", (t(5, 2),)),))
    assert estimated(relu) == (0, 10, 0)
    # An op that only calls itself again is one op.
    assert estimated(mm(2, mm(2))) == (24, 48, 0)


def test_of_a_distributed_tensor_the_part_on_this_rank_counts() -> None:
    """Torch before 2.11 says only by the shapes that an op calls itself on a part, after a trial on the whole."""
    assert estimated(mm(4, mm(2))) == (24, 48, 0)
    assert estimated(mm(4, mm(4), mm(2))) == (24, 48, 0)
    relu = Call("aten::relu", (t(6),), (Call("aten::relu", (t(6),)), Call("aten::relu", (t(3),))))
    assert estimated(relu) == (0, 3, 0)


def test_trials_of_a_distributed_tensor_are_no_work() -> None:
    """They run on fake tensors, under a mode. What computes beside the op, as an exchange does, is work."""

    def dispatched(*inside: Call) -> Call:
        return mm(4, Call("PythonSubclass", (), inside))

    def in_mode(*inside: Call) -> Call:
        return Call("PythonDispatchMode", (), inside)

    trial = mm(4, in_mode(mm(4)))
    product = Call("aten::bmm", (t(5, 2, 3), t(5, 3, 4)))
    assert estimated(dispatched(mm(2))) == (24, 48, 0)
    assert estimated(dispatched(trial, mm(2))) == (24, 48, 0)
    assert estimated(dispatched(trial, mm(4))) == (48, 96, 0)  # each rank has the whole
    assert estimated(dispatched(product, mm(2))) == (24, 48, 0)  # by which torch seeks a way to split it
    assert estimated(dispatched(Call("aten::div", (t(7),)), trial, mm(2))) == (24, 48 + 7, 0)
    # With nothing but a trial, it is not known to be one: a user's tensor may compute under a mode.
    assert estimated(dispatched(trial)) == (48, 96, 0)
    # An op around it has the shapes of the whole as well.
    around = Call("aten::addmm", (t(4), t(4, 3), t(3, 4)), (dispatched(trial, mm(2)),))
    assert estimated(around) == (24, 48, 0)


def test_an_op_that_asks_for_the_indices_of_its_input_is_sparse() -> None:
    assert estimated(mm(2, Call("aten::_nnz"))) == (0, 0, 1)
    assert estimated(mm(2, Call("aten::values"))) == (0, 0, 1)
    assert estimated(Call("aten::linear", (), (mm(2, Call("aten::crow_indices")), mm(2)))) == (24, 48, 1)


def test_if_a_formula_has_no_result_the_ops_inside_count() -> None:
    unknown = Call("aten::mm", (None, None), (Call("aten::bmm", (t(5, 2, 3), t(5, 3, 4))),))
    assert estimated(unknown) == (120, 240, 0)
    assert estimated(Call("aten::mm", (None, None))) == (0, 0, 1)


def test_a_quantized_op_is_not_counted() -> None:
    shapes, dtypes = ((2, 3), (3, 4)), ("c10::quint8", "c10::qint8")
    assert work_of(Operation("aten::mm", Signature(shapes, dtypes))) is None
    assert work_of(Operation("aten::mm", Signature(shapes, ("float", "float")))) == Work(24, 48)


# Uncounted calls


UNCOUNTED: dict[str, tuple[Callable[[], Any], int | None]] = {  # with the number of calls where it is one
    "antialiased": (lambda: F.interpolate(image(), size=3, mode="bilinear", antialias=True), 1),
    "sparse softmax": (lambda: torch.sparse.softmax(torch.eye(9).to_sparse(), 1), 1),
    "lu_solve": (lambda: torch.linalg.lu_solve(*torch.linalg.lu_factor_ex(torch.eye(6))[:2], x(6, 2)), None),
    "multilabel": (lambda: F.multilabel_margin_loss(x(2, 3), torch.tensor([[0, -1, 0], [1, -1, 0]])), None),
    "sparse sum": (lambda: torch.sparse.sum(torch.eye(9).to_sparse(), 0), None),
    "qr": (lambda: torch.linalg.qr(x(3, 3)), None),
    "svd": (lambda: torch.linalg.svd(x(3, 3)), None),
    "eig": (lambda: torch.linalg.eig(x(3, 3)), 1),
    "multi margin loss": (lambda: F.multi_margin_loss(x(2, 3), CLASSES), None),
    "quantize": (lambda: torch.quantize_per_tensor(x(2, 3), 0.1, 0, torch.quint8), None),
}


@pytest.mark.parametrize(("step", "calls"), UNCOUNTED.values(), ids=UNCOUNTED)
def test_an_op_without_formula_is_uncounted(step: Callable[[], Any], calls: int | None) -> None:
    uncounted = counted(step).uncounted
    assert uncounted == calls if calls else uncounted > 0


@pytest.mark.parametrize(
    "step",
    [lambda: torch.linalg.matrix_exp(x(3, 3)), lambda: F.embedding(CLASSES, x(5, 4), max_norm=0.1)],
    ids=["matrix_exp", "embedding with a norm"],
)
def test_an_op_that_only_calls_counted_ops_is_not_uncounted(step: Callable[[], Any]) -> None:
    result = counted(step)
    assert result.macs + result.others > 0
    assert result.uncounted == 0
