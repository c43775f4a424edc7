"""Fusion: many small operations that one kernel, or one layer, could do."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from torchprof.analyze.advice import Advice, rule
from torchprof.analyze.advice.evidence import Evidence, Holds, Took, inside, shape_of_input
from torchprof.analyze.advice.python import is_own_time, layers_of_slow_python
from torchprof.run.cost import format_time
from torchprof.run.layers import Layer
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE, Frame

_NAMES = """
    abs add addcdiv addcmul bitwise_and bitwise_not ceil clamp clamp_max clamp_min cos div elu eq erf exp expm1 floor ge
    gelu gt hardswish hardtanh le leaky_relu lerp log log1p logical_and logical_not lt masked_fill maximum minimum mish
    mul ne neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tanh threshold where
"""
_ELEMENTWISE = frozenset(f"aten::{name}{in_place}" for name in _NAMES.split() for in_place in ("", "_"))
_NODE = re.compile(r"autograd::engine::evaluate_function: (\w+)Backward\d*")
_ELEMENTWISE_NODES = frozenset(name.replace("_", "") for name in _NAMES.split())
_MANY = 5
_FEW_NS = 10_000
_A_LOOP = 100

_FACTORS = {"aten::bmm": (0, 1), "aten::baddbmm": (1, 2)}  # the positions of the two matrices among the inputs
_PRODUCTS = inside(*_FACTORS)
_SOFTMAX = inside("aten::softmax", "aten::_softmax", "aten::_safe_softmax", "aten::_softmax_backward_data")
_MATH = inside("aten::_scaled_dot_product_attention_math")
_HAS_ITS_OWN = inside("aten::scaled_dot_product_attention", "aten::_native_multi_head_attention")
_SHORT = 256
_FUSED_ATTENTION = 7 / 8

_FEATURES = ("Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
_BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
_SUBSTANTIAL = 0.1

_Shape = tuple[int, ...]


class _OpsOf(NamedTuple):
    """The sums of some ops that a layer calls directly, and their number in a forward call."""

    took: Took
    a_call: float


@rule
def many_elementwise_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call at least 5 elementwise ops (add, mul, tanh, …) directly in each forward call, on average: a
    GELU, a norm, a rotary embedding or a cell written in Python.

    Each op reads and writes all values, and is dispatched or launched separately; fused they are one kernel. The
    threshold is 5 because a residual with its activation has two, and with fewer than five there is little to fuse. The
    gain is at most all of their time, that of their backward, and on the CPU the layer's own time between ops (see
    ``_between_ops``). Ops inside other ops do not count. Compiled layers are left out.
    """
    found = _many_in_a_call(evidence, _is_elementwise, _MANY)
    if not found:
        return
    backward = evidence.took(_is_elementwise_node, phases=(BACKWARD,))
    between, counted_elsewhere = _between_ops(evidence), {*layers_of_slow_python(evidence), *_tiny_ops(evidence)}
    for number, (one, a_call) in found.items():
        ns = evidence.time_of(one)
        mean = ns / one.calls
        kind = "small elementwise ops" if mean < _FEW_NS else "elementwise ops"
        own = 0 if number in counted_elsewhere else between.get(number, 0)
        back_ns = evidence.time_of(backward.get(number, Took()))
        yield Advice(
            evidence.name_of(number),
            f"Calls {a_call:.0f} {kind} in a forward call, {format_time(mean)} each, {format_time(ns)} in all."
            + _related_time(own, back_ns, evidence, number in counted_elsewhere),
            "Fuse them: compile the layer (layer.compile() or torch.compile(model)), or use torch's own layer or "
            "function for it (torch.nn.functional).",
            ns + back_ns + own,
            None,
            "many_elementwise_ops",
        )


@rule
def many_tiny_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call at least 100 ops of less than 10 us directly in each forward call, on average: a Python loop
    over the rows of a tensor.

    The dispatch or launch of such an op takes longer than its computation. The threshold is 100 because layers without
    a loop call a few dozen ops at most. Elementwise ops are left out: ``many_elementwise_ops`` counts them. The gain is
    at most all of their time, that of their backward, and on the CPU the layer's own time between ops (see
    ``_between_ops``). Ops inside other ops do not count. Compiled layers are left out.
    """
    found = _tiny_ops(evidence)
    if not found:
        return
    elementwise = evidence.took(_is_elementwise, phases=(FORWARD, RECOMPUTE))
    backward = evidence.took(_is_other_node, phases=(BACKWARD,))
    between, counted_elsewhere = _between_ops(evidence), layers_of_slow_python(evidence)
    for number, (one, a_call) in found.items():
        ns = evidence.time_of(one)
        kind = "ops that are not elementwise" if number in elementwise else "ops"
        own = 0 if number in counted_elsewhere else between.get(number, 0)
        back_ns = evidence.time_of(backward.get(number, Took()))
        yield Advice(
            evidence.name_of(number),
            f"Calls {a_call:,.0f} {kind} in a forward call, {format_time(ns / one.calls)} each, {format_time(ns)} in "
            f"all.{_related_time(own, back_ns, evidence, number in counted_elsewhere)}",
            "Say it for all rows at once in place of a loop, or compile the layer with torch.compile.",
            ns + back_ns + own,
            None,
            "many_tiny_ops",
        )


@rule
def attention_not_fused(evidence: Evidence) -> Iterator[Advice]:
    """Attention that stores its whole matrix of scores: a layer that calls at least two batched matrix products for
    each softmax (its own, or of a Softmax layer directly below), or torch's ``_scaled_dot_product_attention_math``.

    If shapes were recorded, the result of one product must have as many elements as the input of a softmax, and another
    product must take as many elements and sum over the last dimension of the softmax. Without shapes a mixture of
    experts looks the same, so the finding is stated as a condition, except for torch's MultiheadAttention.

    A fused kernel does not store the scores. The gain is at most 7/8 of the time of products and softmax
    (FlashAttention, Dao et al. 2022, figure 1: 7.6 times as fast as separate ops), and, if backward needs the scores,
    the bytes of the softmax in an average call of each layer. On the CPU there is no finding if shapes show that all
    rows of scores are shorter than 256: at 128 the fused kernel gained nothing, at 512 two thirds.
    """
    scores = _scores(evidence)
    short = _rows_are_short(evidence, scores)
    is_attention = _fits_attention(evidence, scores)
    math = evidence.took(_MATH)
    products = evidence.took(lambda frames: _PRODUCTS(frames) and not _MATH(frames) and not _HAS_ITS_OWN(frames))
    weights = evidence.took(lambda frames: _SOFTMAX(frames) and not _MATH(frames) and not _HAS_ITS_OWN(frames))
    forward_products = evidence.took(_PRODUCTS, phases=(FORWARD,))
    forward_weights = evidence.took(_SOFTMAX, phases=(FORWARD,))
    results = evidence.took(inside("aten::_softmax"), phases=(FORWARD,))
    calls = _forward_calls(evidence)
    keeps = BACKWARD in evidence.run.phases()
    nothing, layers = Took(), evidence.run.layers
    for number in sorted(products.keys() | math.keys()):
        if number in short or number < 0:
            continue
        own = [number, *(child for child in layers.children[number] if layers[child].kind == "Softmax")]
        softmax_calls = sum(forward_weights.get(one, nothing).calls for one in own)
        parts = [*(took.get(number, nothing) for took in (math, products)), *(weights.get(one, nothing) for one in own)]
        ns = sum(map(evidence.time_of, parts))
        if number in math:
            what, remedy = _texts_of_math(ns)
        elif softmax_calls and forward_products.get(number, nothing).calls >= 2 * softmax_calls:
            if not is_attention.get(number, True):
                continue
            what, remedy = _texts_of_separate_ops(ns, layers[number], number in is_attention)
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
    """Convolutions with a bias whose output goes into a batch normalization in train mode, in a run with backward. The
    normalization subtracts the mean, and the bias with it. In eval mode the bias has an effect, so there is no finding.

    Evidence: settings without bias=False; the next sibling is a batch norm that was called as often, with the output
    shape of the convolution as its input shape. In a ``Sequential`` that was itself called as often, the output of one
    is the input of the other. Elsewhere ``forward`` decides, which is not recorded: the finding is stated as a
    condition.

    The time of the bias is known if it has ops of its own (``add_`` in forward, ``sum`` in backward, on a GPU). If it
    is part of the convolution's kernel it is unknown and small: that is reported once, if these convolutions take at
    least a tenth of the time (separately for those in a ``Sequential`` and the others).
    """
    layers, calls = evidence.run.layers, _forward_calls(evidence)
    biased = [
        (conv, norm, _in_order(evidence, conv, calls))
        for below in layers.children
        for conv, norm in pairwise(below)
        if _has_bias(layers[conv]) and _normalises(layers[norm], layers[conv]) and calls.get(conv) == calls.get(norm)
    ]
    if not biased or BACKWARD not in evidence.run.phases():
        return
    took = evidence.took(_is_bias)
    inside_of = evidence.took(inside("aten::convolution", "aten::convolution_backward"))
    unknown: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for conv, norm, certain in biased:
        ns = evidence.time_of(took[conv]) if conv in took else 0
        if ns:
            which, remedy = _texts_of_bias(layers[conv], layers[norm], certain)
            yield Advice(
                layers[conv].name,
                f"Spends {format_time(ns)} on a bias{which}.",
                remedy,
                ns,
                None,
                "bias_before_batch_norm",
            )
        elif conv in inside_of:
            unknown[certain].append((conv, norm))
    for certain, pairs in unknown.items():
        ns = sum(evidence.time_of(inside_of[conv]) for conv, _ in pairs)
        if not ns or ns < _SUBSTANTIAL * evidence.recorded_ns:
            continue
        conv, norm = pairs[0]
        which, remedy = _texts_of_bias(layers[conv], layers[norm], certain)
        all_of_them = "The convolution took"
        if len(pairs) > 1:
            more = f"{len(pairs) - 1} more convolution{'s' * (len(pairs) > 2)}"
            all_of_them = f"The same was seen of {more}; together they took"
        yield Advice(
            layers[conv].name,
            f"Has a bias{which}. {all_of_them} {format_time(ns)}, of which the bias is a small part.",
            remedy,
            None,
            None,
            "bias_before_batch_norm",
        )


def _many_in_a_call(evidence: Evidence, holds: Holds, number: int) -> dict[int, _OpsOf]:
    """The layers that call at least ``number`` of the matching ops in each forward call, on average. Compiled layers
    are left out, and layers of unknown class: a range of a trace may hold a whole model."""
    calls = _forward_calls(evidence)
    return {
        layer: _OpsOf(took, took.calls / calls[layer])
        for layer, took in evidence.took(holds, phases=(FORWARD, RECOMPUTE)).items()
        if layer >= 0
        and calls.get(layer)
        and took.calls >= number * calls[layer]
        and not evidence.run.layers[layer].compiled
        and evidence.run.layers[layer].kind
    }


def _tiny_ops(evidence: Evidence) -> dict[int, _OpsOf]:
    """The layers that ``many_tiny_ops`` reports, by number."""
    return {
        layer: ops
        for layer, ops in _many_in_a_call(evidence, _is_other_op, _A_LOOP).items()
        if evidence.time_of(ops.took) < _FEW_NS * ops.took.calls
    }


def _between_ops(evidence: Evidence) -> dict[int, int]:
    """The CPU time of each layer outside ops and outside the layers below: Python, and the overhead of calls.

    If several rules report a layer, only one counts this time: ``python_in_layers`` before ``many_tiny_ops`` before
    ``many_elementwise_ops``. It is empty if device time counts.
    """
    if evidence.device != "cpu":
        return {}
    return {layer: took.cpu_ns for layer, took in evidence.took(is_own_time, phases=(FORWARD, RECOMPUTE)).items()}


def _related_time(own: int, back_ns: int, evidence: Evidence, counted_elsewhere: bool) -> str:
    """The sentences on the time in the backward of some ops of a layer, and between them."""
    said = f" Their backward takes {format_time(back_ns)}." if back_ns else ""
    if counted_elsewhere and evidence.device == "cpu":
        return f"{said} What the layer takes between them is counted in another finding."
    return f"{said} The layer itself takes {format_time(own)} between its ops." if own else said


def _forward_calls(evidence: Evidence) -> dict[int, int]:
    """The number of calls of each layer, recomputed calls included."""
    return {
        number: one.calls
        for number, one in evidence.took(lambda frames: not frames, phases=(FORWARD, RECOMPUTE)).items()
    }


def _outermost_op(frames: Sequence[Frame]) -> str | None:
    """The name of the op that a layer calls directly; user labels may be around it."""
    outermost = next((frame for frame in frames if frame.kind != "label"), None)
    return outermost.name if outermost is not None and outermost.kind == "op" else None


def is_elementwise(name: str) -> bool:
    """Whether an operator is elementwise: each element of its result depends on one element of each input."""
    return name in _ELEMENTWISE


def _is_elementwise(frames: Sequence[Frame]) -> bool:
    return _outermost_op(frames) in _ELEMENTWISE


def _is_other_op(frames: Sequence[Frame]) -> bool:
    name = _outermost_op(frames)
    return name is not None and name not in _ELEMENTWISE


def _node(frames: Sequence[Frame]) -> str | None:
    """The operator whose backward the outermost autograd node is, in lower case without underscores: "leakyrelu"."""
    found = _NODE.fullmatch(_outermost_op(frames) or "")
    return found[1].lower() if found else None


def _is_elementwise_node(frames: Sequence[Frame]) -> bool:
    return _node(frames) in _ELEMENTWISE_NODES


def _is_other_node(frames: Sequence[Frame]) -> bool:
    node = _node(frames)
    return node is not None and node not in _ELEMENTWISE_NODES


def _scores(evidence: Evidence) -> dict[int, set[_Shape]]:
    """The input shapes of the softmax of each layer, or of a Softmax layer directly below it."""
    layers, columns, chains = evidence.run.layers, evidence.run.rows.columns, evidence.run.rows.frames
    found: defaultdict[int, set[_Shape]] = defaultdict(set)
    if not evidence.shapes_recorded:
        return found
    for at in evidence.rows(_SOFTMAX):
        number = columns["layer"][at]
        above = layers.parent[number] if number >= 0 and layers[number].kind == "Softmax" else number
        for frame in chains[columns["frames"][at]]:
            shape = shape_of_input(frame, 0)
            if _SOFTMAX([frame]) and shape:
                found[number].add(shape)
                found[above].add(shape)
    return found


def _rows_are_short(evidence: Evidence, scores: Mapping[int, set[_Shape]]) -> set[int]:
    """The layers whose softmax has only short rows, on the CPU."""
    if evidence.device != "cpu":
        return set()
    return {number for number, shapes in scores.items() if max(shape[-1] for shape in shapes) < _SHORT}


def _fits_attention(evidence: Evidence, scores: Mapping[int, set[_Shape]]) -> dict[int, bool]:
    """Whether the shapes of a layer's matrix products are those of attention; only for layers with known shapes."""
    if not scores:
        return {}
    columns, chains = evidence.run.rows.columns, evidence.run.rows.frames
    products: defaultdict[int, set[tuple[_Shape, _Shape]]] = defaultdict(set)
    for at in evidence.rows(_PRODUCTS, phases=(FORWARD, RECOMPUTE)):
        for frame in chains[columns["frames"][at]]:
            if _PRODUCTS([frame]):
                left, right = (shape_of_input(frame, one) for one in _FACTORS[frame.name])
                if not left or not right:
                    continue
                products[columns["layer"][at]].add((left, right))
    return {
        number: any(
            any(prod(left[:-1]) * right[-1] == prod(shape) for left, right in pairs)
            and any(left[-1] == shape[-1] and prod(left) == prod(shape) for left, right in pairs)
            for shape in scores[number]
        )
        for number, pairs in products.items()
        if number in scores
    }


def _texts_of_math(ns: int) -> tuple[str, str]:
    return (
        f"scaled_dot_product_attention took no fused kernel, but its separate ops, for {format_time(ns)}.",
        "See what forbids a fused one: float64, a mask that needs a gradient, dropout on the CPU, odd sizes of heads; "
        "under torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION) torch says what.",
    )


def _texts_of_separate_ops(ns: int, layer: Layer, certain: bool) -> tuple[str, str]:
    what = f"Writes out its attention: products and softmax as separate ops, for {format_time(ns)}."
    if layer.kind == "MultiheadAttention":
        return what, "Call it with need_weights=False, where nobody reads the weights."
    function = "torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)."
    if certain:
        return what, f"Write {function}"
    return (
        f"Calls batched products and softmax as separate ops, for {format_time(ns)}. If this is attention, it writes "
        "out its scores.",
        f"If this is attention, write {function}",
    )


def _in_order(evidence: Evidence, conv: int, calls: Mapping[int, int]) -> bool:
    """Whether it is an item of a Sequential that calls its items in order, and nothing else calls it."""
    layers = evidence.run.layers
    above = layers.parent[conv]
    return layers[above].kind == "Sequential" and calls.get(above) == calls.get(conv) and not layers[conv].shared_with


def _texts_of_bias(conv: Layer, norm: Layer, certain: bool) -> tuple[str, str]:
    """The words on a bias, and the remedy."""
    remedy = f"rite torch.nn.{conv.kind}(…, bias=False)."
    if certain:
        return f" that {norm.name} subtracts again with the mean", f"W{remedy}"
    return (
        f", and beside it stands {norm.name} in train mode: if its output goes there directly, and nowhere else, that "
        "subtracts the bias again",
        f"If so, w{remedy}",
    )


def _has_bias(layer: Layer) -> bool:
    return layer.kind in _FEATURES and bool(layer.settings) and "bias=False" not in layer.settings


def _normalises(norm: Layer, conv: Layer) -> bool:
    """Whether a layer is a batch norm in train mode that may take a convolution's output."""
    return (
        norm.kind in _BATCH_NORMS
        and norm.training is True
        and bool(conv.output_shapes)
        and norm.input_shapes[:1] == conv.output_shapes[:1]
    )


def _is_bias(frames: Sequence[Frame]) -> bool:
    """Whether it is the addition of a bias as a separate op in a convolution, or the sum that is its gradient."""
    names = [frame.name for frame in frames]
    return ("aten::_convolution" in names and "aten::add_" in names) or (
        "aten::convolution_backward" in names and "aten::sum" in names
    )
