"""Fusion: work in many small pieces that one kernel, or one layer, could do."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise

from torchprof.advice import Advice, rule
from torchprof.advice.evidence import Evidence, Took, inside
from torchprof.attribute import BACKWARD, FORWARD, RECOMPUTE, Frame
from torchprof.cost import format_time
from torchprof.run import Layer

_NAMES = """
    abs add addcdiv addcmul bitwise_and bitwise_not ceil clamp clamp_max clamp_min cos div elu eq erf exp expm1 floor ge
    gelu gt hardswish hardtanh le leaky_relu lerp log log1p logical_and logical_not lt masked_fill maximum minimum mish
    mul ne neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tanh threshold where
"""
_ELEMENTWISE = frozenset(f"aten::{name}{in_place}" for name in _NAMES.split() for in_place in ("", "_"))
_MANY = 5
_FEW_NS = 10_000
_A_LOOP = 100

_PRODUCTS = inside("aten::bmm", "aten::baddbmm")
_SOFTMAX = inside("aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data")
_MATH = inside("aten::_scaled_dot_product_attention_math")
_HAS_ITS_OWN = inside("aten::scaled_dot_product_attention", "aten::_native_multi_head_attention")
_SHORT = 256
_FUSED_ATTENTION = 7 / 8

_FEATURES = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_SUBSTANTIAL = 0.1


@rule
def many_elementwise_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call at least 5 elementwise ops (add, mul, tanh, …) themselves in each forward call, on average: a
    GELU, a norm, a rotation or a cell written out in Python.

    Each reads and writes all numbers, and is dispatched, or launched, by itself; fused they are one. Five, since a
    residual with its activation has two, and below five there is little to fuse. At most all but one n-th of their time
    can be saved, forward alone. Ops inside other ops are no ops of the layer's. Nothing is said of compiled layers.
    """
    calls = _forward_calls(evidence)
    took = evidence.took(_is_elementwise, phases=(FORWARD, RECOMPUTE))
    for number, one in took.items():
        layer_calls = calls.get(number, 0)
        if number < 0 or not layer_calls or one.calls < _MANY * layer_calls or evidence.run.layers[number].compiled:
            continue
        ns, a_call = evidence.time_of(one), one.calls / layer_calls
        mean = ns / one.calls
        kind = "small elementwise ops" if mean < _FEW_NS else "elementwise ops"
        yield Advice(
            evidence.name_of(number),
            f"Calls {a_call:.0f} {kind} in a forward call, {format_time(mean)} each, {format_time(ns)} in all.",
            "Fuse them: compile the layer (layer.compile() or torch.compile(model)), or use torch's own layer or "
            "function for it (torch.nn.functional).",
            int(ns * (1 - 1 / a_call)),
            None,
            "many_elementwise_ops",
        )


@rule
def many_tiny_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call at least 100 ops themselves in each forward call, on average, that take less than 10 us each: a
    Python loop over the rows of a tensor.

    To dispatch, or to launch, such an op takes longer than what it computes. A hundred, since layers that are written
    without a loop call a few dozen at most. The elementwise ones are left out: ``many_elementwise_ops`` counts them. At
    most all but one n-th of their time can be saved, forward alone; what Python takes between them comes on top. Ops
    inside other ops are no ops of the layer's. Nothing is said of compiled layers.
    """
    calls = _forward_calls(evidence)
    elementwise = evidence.took(_is_elementwise, phases=(FORWARD, RECOMPUTE))
    for number, one in evidence.took(_is_other_op, phases=(FORWARD, RECOMPUTE)).items():
        layer_calls, ns = calls.get(number, 0), evidence.time_of(one)
        if number < 0 or not layer_calls or one.calls < _A_LOOP * layer_calls or evidence.run.layers[number].compiled:
            continue
        a_call, mean = one.calls / layer_calls, ns / one.calls
        if mean >= _FEW_NS:
            continue
        kind = "ops that are not elementwise" if number in elementwise else "ops"
        yield Advice(
            evidence.name_of(number),
            f"Calls {a_call:,.0f} {kind} in a forward call, {format_time(mean)} each, {format_time(ns)} in all.",
            "Say it for all rows at once in place of a loop, or compile the layer with torch.compile.",
            int(ns * (1 - 1 / a_call)),
            None,
            "many_tiny_ops",
        )


@rule
def attention_not_fused(evidence: Evidence) -> Iterator[Advice]:
    """Attention that writes its whole matrix of scores: a layer that calls at least two batched products for each
    softmax (its own, or of a Softmax layer directly below), or torch's ``_scaled_dot_product_attention_math``.

    A fused kernel never stores the scores. What could be saved is at most 7/8 of the time of products and softmax
    (FlashAttention, Dao et al. 2022, figure 1: 7.6 times as fast as the same in separate ops), and, where backward
    needs them, the bytes of the softmax in an average call of each layer. On the CPU it is silent where shapes tell
    that no row of scores is as long as 256: at 128 the fused kernel gained nothing, at 512 two thirds.
    """
    short = _rows_are_short(evidence)
    math = evidence.took(_MATH)
    products = evidence.took(lambda frames: _PRODUCTS(frames) and not _MATH(frames) and not _HAS_ITS_OWN(frames))
    weights = evidence.took(lambda frames: _SOFTMAX(frames) and not _MATH(frames) and not _HAS_ITS_OWN(frames))
    forward_products = evidence.took(_PRODUCTS, phases=(FORWARD,))
    forward_weights = evidence.took(_SOFTMAX, phases=(FORWARD,))
    results = evidence.took(inside("aten::_softmax"), phases=(FORWARD,))
    calls = _forward_calls(evidence)
    keeps = BACKWARD in evidence.run.phases()
    nothing = Took()
    for number in sorted(products.keys() | math.keys()):
        if number in short or number < 0:
            continue
        own = [number, *(child for child in evidence.children[number] if evidence.run.layers[child].kind == "Softmax")]
        softmax_calls = sum(forward_weights.get(one, nothing).calls for one in own)
        parts = [*(took.get(number, nothing) for took in (math, products)), *(weights.get(one, nothing) for one in own)]
        ns = sum(map(evidence.time_of, parts))
        if number in math:
            what, remedy = _of_math(ns)
        elif softmax_calls and forward_products.get(number, nothing).calls >= 2 * softmax_calls:
            what, remedy = _of_hand(ns, evidence.run.layers[number])
        else:
            continue
        written = sum(results.get(one, nothing).allocated for one in own)
        yield Advice(
            evidence.name_of(number),
            what,
            remedy,
            int(ns * _FUSED_ATTENTION),
            written // max(calls.get(number, 1), 1) if keeps and written else None,
            "attention_not_fused",
        )


@rule
def bias_before_batch_norm(evidence: Evidence) -> Iterator[Advice]:
    """Convolutions with a bias whose output goes into a batch normalisation in train mode, in a run with backward: that
    subtracts the mean, and the bias with it. In eval mode the bias counts, so nothing is said.

    Evidence: settings without bias=False; the next layer beside it is a batch norm of as many channels, that was called
    as often, and on what the convolution returned by its shape. What the bias took is known where it has ops of its own
    (``add_`` in forward, ``sum`` in backward, on a GPU); where it is part of the convolution's kernel nobody knows, it
    is little, and is said once, where these convolutions take at least a tenth of the time.
    """
    layers, calls = evidence.run.layers, _forward_calls(evidence)
    biased = [
        (conv, norm)
        for below in evidence.children
        for conv, norm in pairwise(below)
        if _has_bias(layers[conv]) and _normalises(layers[norm], layers[conv]) and calls.get(conv) == calls.get(norm)
    ]
    if not biased or BACKWARD not in evidence.run.phases():
        return
    took = evidence.took(_is_bias)
    inside_of = evidence.took(inside("aten::convolution", "aten::convolution_backward"))
    unknown = 0
    for conv, norm in biased:
        ns = evidence.time_of(took[conv]) if conv in took else 0
        if ns:
            yield Advice(
                layers[conv].name,
                f"Spends {format_time(ns)} on a bias that {layers[norm].name} subtracts again with the mean.",
                f"Write torch.nn.{layers[conv].kind}(…, bias=False).",
                ns,
                None,
                "bias_before_batch_norm",
            )
        elif conv in inside_of:
            unknown += evidence.time_of(inside_of[conv])
    if unknown and unknown >= _SUBSTANTIAL * evidence.recorded_ns:
        conv, norm = biased[0]
        others = f", and so have {len(biased) - 1} more convolutions" if len(biased) > 1 else ""
        yield Advice(
            layers[conv].name,
            f"Has a bias that {layers[norm].name} subtracts again with the mean{others}; "
            f"they took {format_time(unknown)}, of which the bias is a small part.",
            f"Write torch.nn.{layers[conv].kind}(…, bias=False).",
            None,
            None,
            "bias_before_batch_norm",
        )


def _forward_calls(evidence: Evidence) -> dict[int, int]:
    """How often each layer was called, recomputed calls among them."""
    return {
        number: one.calls
        for number, one in evidence.took(lambda frames: not frames, phases=(FORWARD, RECOMPUTE)).items()
    }


def _outermost_op(frames: Sequence[Frame]) -> str | None:
    """The name of the op that a layer calls itself; labels of the user's may be around it."""
    outermost = next((frame for frame in frames if frame.kind != "label"), None)
    return outermost.name if outermost is not None and outermost.kind == "op" else None


def _is_elementwise(frames: Sequence[Frame]) -> bool:
    return _outermost_op(frames) in _ELEMENTWISE


def _is_other_op(frames: Sequence[Frame]) -> bool:
    name = _outermost_op(frames)
    return name is not None and name not in _ELEMENTWISE


def _rows_are_short(evidence: Evidence) -> set[int]:
    """The layers whose softmax has short rows only, on the CPU."""
    if evidence.device != "cpu" or not evidence.shapes_recorded:
        return set()
    columns, chains = evidence.run.rows.columns, evidence.run.rows.frames
    longest: defaultdict[int, int] = defaultdict(int)
    for at in evidence.rows(_SOFTMAX):
        number = columns["layer"][at]
        above = evidence.parents[number] if number >= 0 and evidence.run.layers[number].kind == "Softmax" else number
        for frame in chains[columns["frames"][at]]:
            if _SOFTMAX([frame]) and frame.signature is not None and frame.signature.shapes[0]:
                for one in (number, above):
                    longest[one] = max(longest[one], frame.signature.shapes[0][-1])
    return {number for number, size in longest.items() if size < _SHORT}


def _of_math(ns: int) -> tuple[str, str]:
    return (
        f"scaled_dot_product_attention took no fused kernel, but its separate ops, for {format_time(ns)}.",
        "See what forbids a fused one: float64, a mask that needs a gradient, dropout on the CPU, odd sizes of heads; "
        "under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) torch says what.",
    )


def _of_hand(ns: int, layer: Layer) -> tuple[str, str]:
    remedy = "Write torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)."
    if layer.kind == "MultiheadAttention":
        remedy = "Call it with need_weights=False, where nobody reads the weights."
    return f"Writes out its attention: products and softmax as separate ops, for {format_time(ns)}.", remedy


def _has_bias(layer: Layer) -> bool:
    return layer.kind in _FEATURES and bool(layer.settings) and "bias=False" not in layer.settings


def _normalises(norm: Layer, conv: Layer) -> bool:
    """Whether a batch norm in train mode may be what a convolution's output goes into."""
    return (
        norm.kind in _BATCH_NORMS
        and norm.training
        and bool(conv.output_shapes)
        and norm.input_shapes[:1] == conv.output_shapes[:1]
    )


def _is_bias(frames: Sequence[Frame]) -> bool:
    """The addition of a bias as an op of its own in a convolution, and the sum that is its gradient."""
    names = [frame.name for frame in frames]
    return ("aten::_convolution" in names and "aten::add_" in names) or (
        "aten::convolution_backward" in names and "aten::sum" in names
    )
