"""Fusion: many small operations that one kernel, or one layer, could do."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.chains import (
    Among,
    Frames,
    Holds,
    calling,
    inside,
    is_direct,
    is_in_op,
    is_node,
    is_outermost,
    is_own_time,
    node_of,
    outermost_op,
    shape_of_input,
)
from torchprof.advise.evidence import Evidence, Took
from torchprof.advise.layers import constants
from torchprof.advise.python import own_time_of_slow_python
from torchprof.run.formats import format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layers
from torchprof.run.torch_names import BATCHED_PRODUCTS, ELEMENTWISE, FACTORS, SOFTMAX_OPS, aten, without_aten
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, FORWARD, RECOMPUTE

# Many small operators

_PRODUCTS_AND_CONVOLUTIONS = calling(
    aten("linear matmul mm addmm bmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention")
)
_ELEMENTWISE = calling(ELEMENTWISE)
_is_other_op = Among(is_in_op, lambda frames: not _ELEMENTWISE(frames))
_ELEMENTWISE_NODES = {name.replace("_", "") for name in without_aten(ELEMENTWISE)}  # as ``node_of`` writes them
_is_elementwise_node = Among(is_node, lambda frames: node_of(frames) in _ELEMENTWISE_NODES)
_is_other_node = Among(is_node, lambda frames: node_of(frames) not in _ELEMENTWISE_NODES)
_ENGINE = calling([AUTOGRAD_ENGINE])
_MANY_ELEMENTWISE = 5  # operators in a forward call
_COMPILED_CALL_NS = 50_000
"""What the call of a compiled layer costs on the CPU, with its backward: for less work compiling loses (a vocoder's
blocks with small batches took 70 % longer)."""
_SAVED_BY_FUSING = 0.6
"""The part of the time that a fused operator saves on the CPU: measured, 50 to 70 % of a GELU, 0 to 75 % of an RMS
norm, 78 to 94 % of a rotary embedding, with backward."""
_MANY_TINY = 100  # operators in a forward call: they are in a loop
_TINY_NS = 10_000  # an operator of less time is bound by its dispatch


class _Ops(NamedTuple):
    """Ops that a layer calls directly: their ``calls`` and time, the layer's forward calls, the time of their backward,
    and the layer's own time between ops (``_between_ops``), None if another finding has it."""

    calls: int
    ns: int
    forward_calls: int
    backward_ns: int
    between_ns: int | None

    @property
    def gain_ns(self) -> int:
        return self.ns + self.backward_ns + (self.between_ns or 0)


@rule
def many_elementwise_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call many elementwise ops (add, mul, tanh, …) directly in each forward call: a GELU, a norm, a rotary
    embedding or a cell written in Python.

    Each op reads and writes all values, and is dispatched or launched separately; fused they are one kernel. The
    threshold is 5 because a residual with its activation has two, and with fewer than five there is little to fuse.
    Layers in which most of that time is that of ``constants_in_layers`` are left out.
    """
    took = _many_in_a_call(evidence, _ELEMENTWISE, _MANY_ELEMENTWISE)
    constant = constants(evidence) if took else {}
    took = {number: ops for number, ops in took.items() if evidence.time_of(ops) > 2 * constant.get(number, 0)}
    if not took:
        return
    ops_of = _with_related_time(
        evidence, took, _is_elementwise_node, {*own_time_of_slow_python(evidence), *_tiny_ops(evidence)}
    )
    if evidence.device == "cpu":
        ops_of = {number: ops for number, ops in ops_of.items() if ops.gain_ns > _COMPILED_CALL_NS * ops.forward_calls}
    saved = _SAVED_BY_FUSING if evidence.device == "cpu" else 1
    for group in merged(evidence, {number: round(ops.gain_ns * saved) for number, ops in ops_of.items()}):
        cause, details = _text_of_ops(evidence, [ops_of[number] for number in group.numbers], "elementwise operators")
        yield group.advice(
            cause,
            "Fuse them: compile the layer (`layer.compile()` or `torch.compile(model)`), or use one function or layer "
            "of torch for them (`torch.nn.functional`).",
            details=details,
        )


@rule
def many_tiny_ops(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call many short ops directly in each forward call: a Python loop over the rows of a tensor.

    The dispatch or launch of such an op takes longer than its computation. The threshold is 100 because layers without
    a loop call a few dozen ops at most. Elementwise ops are left out: ``many_elementwise_ops`` counts them.
    """
    if not (took := _tiny_ops(evidence)):
        return
    elementwise = evidence.took(_ELEMENTWISE, phases=(FORWARD, RECOMPUTE))
    nodes = _tiny(evidence, _is_other_node, (BACKWARD,)) | _in_loops(evidence, took)
    of_these = Among(_is_other_node, calling(nodes))
    ops_of = _with_related_time(evidence, took, of_these, own_time_of_slow_python(evidence))
    for group in merged(evidence, {number: ops.gain_ns for number, ops in ops_of.items()}):
        others = any(number in elementwise for number in group.numbers)
        what = f"operators{' (without elementwise ones)' if others else ''}"
        cause, details = _text_of_ops(evidence, [ops_of[number] for number in group.numbers], what)
        yield group.advice(
            cause,
            "Compute all rows at once instead of in a loop, or compile the layer with `torch.compile`.",
            details=details,
        )


def _many_in_a_call(evidence: Evidence, holds: Holds, number: int) -> dict[int, Took]:
    """The layers that call at least ``number`` of the matching ops in each forward call, on average, in addition to one
    for each layer, product and convolution that they call: its activation or residual. Compiled layers are left out,
    and layers of unknown class: a range of a trace may hold a whole model."""
    calls, layers = evidence.calls, evidence.run.layers
    many = {
        layer: took
        for layer, took in evidence.took(holds, phases=(FORWARD, RECOMPUTE)).items()
        if layer >= 0
        and 0 < number * calls.get(layer, 0) <= took.calls
        and layers[layer].kind
        and not layers[layer].compiled
    }
    products = evidence.took(_PRODUCTS_AND_CONVOLUTIONS, phases=(FORWARD, RECOMPUTE)) if many else {}
    return {
        layer: took
        for layer, took in many.items()
        if took.calls >= number * calls[layer] + evidence.calls_below[layer] + products.get(layer, Took()).calls
    }


def _tiny_ops(evidence: Evidence) -> dict[int, Took]:
    """The layers that ``many_tiny_ops`` reports, by number, with the time of their tiny ops."""
    direct = evidence.took(is_direct, phases=(FORWARD, RECOMPUTE))
    if not any(took.calls >= _MANY_TINY * evidence.calls.get(layer, 1) for layer, took in direct.items()):
        return {}
    tiny = _tiny(evidence, _is_other_op, (FORWARD, RECOMPUTE))
    return _many_in_a_call(evidence, Among(_is_other_op, calling(tiny)), _MANY_TINY)


def _in_loops(evidence: Evidence, layers: Container[int]) -> set[str]:
    """The names of nodes that run at least 25 times for each forward call of one of these layers: they are of its loop,
    however long they take."""
    nodes = evidence.rows(Among(_is_other_node, is_outermost), phases=(BACKWARD,))
    runs = sums_by_key(((row.layer, row.frames[0].name), row.calls) for row in nodes if row.layer in layers)
    return {name for (layer, name), times in runs.items() if _MANY_TINY // 4 * evidence.calls[layer] <= times}


def _tiny(evidence: Evidence, holds: Holds, phases: Sequence[str]) -> set[str]:
    """The names of the matching outermost ops and nodes that take less than 10 us on average, with all in them."""
    ns: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for frames, took in evidence.chains(holds, phases=phases):
        name = outermost_op(frames) or ""
        ns[name] += evidence.time_of(took)
        calls[name] += 0 if holds(frames[:-1]) else took.calls
    return {name for name in ns if ns[name] < _TINY_NS * calls[name]}


def _with_related_time(
    evidence: Evidence, took_by_layer: Mapping[int, Took], is_node_of_these: Holds, counted_elsewhere: Container[int]
) -> dict[int, _Ops]:
    """The ops of each layer with the time of their backward, and between them."""
    between = _between_ops(evidence)
    backward = evidence.took(is_node_of_these, phases=(BACKWARD,))
    return {
        layer: _Ops(
            took.calls,
            evidence.time_of(took),
            evidence.calls[layer],
            evidence.time_of(backward.get(layer, Took())),
            None if layer in counted_elsewhere and between.get(layer) else between.get(layer, 0),
        )
        for layer, took in took_by_layer.items()
    }


def _text_of_ops(evidence: Evidence, all_ops: Sequence[_Ops], what: str) -> tuple[str, str]:
    """The cause, and the details, for the ops of several layers."""
    overhead = "dispatch" if evidence.device == "cpu" else "kernel launch"
    calls, ns = sum(ops.calls for ops in all_ops), sum(ops.ns for ops in all_ops)
    a_call = calls / sum(ops.forward_calls for ops in all_ops)
    on_average = " on average" if len(all_ops) > 1 else ""
    details = f"They take {format_time(ns)} in total, {format_time(ns / calls)} each."
    details += f" Operators this short are usually bound by {overhead} overhead." if ns < _TINY_NS * calls else ""
    backward_ns = sum(ops.backward_ns for ops in all_ops)
    details += f" Their backward takes {format_time(backward_ns)}." if backward_ns else ""
    between_ns = sum(ops.between_ns or 0 for ops in all_ops)
    details += f" The time between operators is {format_time(between_ns)}." if between_ns else ""
    if elsewhere := sum(ops.between_ns is None for ops in all_ops):
        of_layers = "" if elsewhere == len(all_ops) else f" of {elsewhere} of these layers"
        details += f" The time between operators{of_layers} is part of another finding."
    return f"A forward call runs {a_call:,.0f} {what}{on_average}.", details


def _between_ops(evidence: Evidence) -> Counter[int]:
    """The CPU time of each layer outside ops and outside the layers below: Python, and the overhead of calls; and in
    backward that of the engine between its nodes.

    If several rules report a layer, only one counts this time: ``python_in_layers`` before ``many_tiny_ops`` before
    ``many_elementwise_ops``. It is empty if device time counts.
    """
    if evidence.device != "cpu":
        return Counter()
    python = evidence.took(is_own_time, phases=(FORWARD, RECOMPUTE))
    engine = evidence.took(_ENGINE, phases=(BACKWARD,))
    return sums_by_key((layer, took.cpu_ns) for layer, took in (*python.items(), *engine.items()))


# Attention

_PRODUCTS = inside(*BATCHED_PRODUCTS)
_SOFTMAX = inside(*SOFTMAX_OPS, "aten::_safe_softmax", "aten::_softmax_backward_data")
_MATH = inside("aten::_scaled_dot_product_attention_math")
_WHOLE_ATTENTION = inside("aten::scaled_dot_product_attention", "aten::_native_multi_head_attention")


def _is_separate(frames: Frames) -> bool:
    """Whether it is not in an operator for all of attention."""
    return not _MATH(frames) and not _WHOLE_ATTENTION(frames)


_SEPARATE_PRODUCTS, _SEPARATE_SOFTMAX = Among(_PRODUCTS, _is_separate), Among(_SOFTMAX, _is_separate)
_DRAWS = inside("aten::bernoulli_", "aten::native_dropout")
_SHORT_ROW = 256  # of scores: on the CPU, the fused kernel gained nothing at 128, and two thirds at 512
_GAIN_OF_FUSED = 7 / 8  # FlashAttention, Dao et al. 2022, figure 1: 7.6 times as fast as separate ops
_Shape = tuple[int, ...]


class _AttentionKind(NamedTuple):
    """A way in which attention stores its scores: the texts of the finding, with ``{}`` for the time."""

    cause: str
    action: str
    details: str = ""
    options: str = ""


_SEPARATE_OPS = "Attention runs as separate matrix products and softmax, for {}, and stores all scores."
_USE_FUSED = "`torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)`."
_NOT_FUSED = _AttentionKind(
    "`scaled_dot_product_attention` uses no fused kernel.",
    "Let torch report why: `with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):`.",
    "Its separate operators take {}.",
    "Common causes are float64, a mask that requires grad, dropout on the CPU, and unsupported head sizes.",
)
_RETURNS_WEIGHTS = _AttentionKind(_SEPARATE_OPS, "Call it with `need_weights=False` if the weights are not used.")
_SEPARATE_ATTENTION = _AttentionKind(_SEPARATE_OPS, f"Use {_USE_FUSED}")
_MAYBE_ATTENTION = _AttentionKind(
    "Batched matrix products and softmax run as separate operators, for {}.",
    f"If this is attention, use {_USE_FUSED}",
    "If this is attention, it stores all scores.",
)


@rule
def attention_not_fused(evidence: Evidence) -> Iterator[Advice]:
    """Attention that stores its whole matrix of scores: separate matrix products and softmax (of the layer, or of a
    Softmax layer directly below), or torch's ``_scaled_dot_product_attention_math``.

    Without shapes a mixture of experts looks the same, so the finding is stated as a condition, except for torch's
    MultiheadAttention. If backward needs the scores, the gain has the bytes of the softmax in an average call of each
    layer.
    """
    if not (kinds := _kinds_of_attention(evidence)):
        return
    layers, needs_scores = evidence.run.layers, BACKWARD in evidence.run.phases()
    of_attention = [evidence.took(_MATH), evidence.took(_SEPARATE_PRODUCTS)]
    of_softmax = evidence.took(_SEPARATE_SOFTMAX)
    results = evidence.took(inside("aten::_softmax"), phases=(FORWARD,))
    times: dict[int, int] = {}
    gains: dict[int, Gain] = {}
    for number in kinds:
        with_softmax = _with_softmax_layers(layers, number)
        parts = [took[number] for took in of_attention if number in took]
        parts += [of_softmax[layer] for layer in with_softmax if layer in of_softmax]
        times[number] = sum(map(evidence.time_of, parts))
        score_bytes = sum(results[layer].allocated for layer in with_softmax if layer in results)
        per_call = score_bytes * len(evidence.run.metas) // max(evidence.calls.get(number, 1), 1)
        saved = per_call if needs_scores and score_bytes else None
        gains[number] = Gain(int(times[number] * _GAIN_OF_FUSED), saved)
    for group in merged(evidence, gains, kinds):
        cause, action, details, options = kinds[group.numbers[0]]
        time = format_time(sum(times[number] for number in group.numbers))
        yield group.advice(cause.format(time), action, details=details.format(time), options=options)


def _kinds_of_attention(evidence: Evidence) -> dict[int, _AttentionKind]:
    """The layers with attention that stores its scores, by number, and the way in which they do."""
    math, products = evidence.took(_MATH), evidence.took(_SEPARATE_PRODUCTS)
    if not products and not math:
        return {}
    layers = evidence.run.layers
    forward_products = evidence.took(_PRODUCTS, phases=(FORWARD,))
    softmax = evidence.took(_SOFTMAX, phases=(FORWARD,))
    scores = _scores(evidence)
    is_attention = _fits_attention(evidence, scores)
    kinds: dict[int, _AttentionKind] = {}
    for number in sorted(products.keys() | math.keys()):
        if number < 0 or _has_short_rows(evidence, number, scores.get(number)):
            continue
        if number in math:
            kinds[number] = _NOT_FUSED
            continue
        softmax_calls = sum(softmax[layer].calls for layer in _with_softmax_layers(layers, number) if layer in softmax)
        product_calls = forward_products[number].calls if number in forward_products else 0
        if evidence.device == "cpu" and _drops_scores(evidence, number):
            continue
        if softmax_calls and product_calls >= 2 * softmax_calls and is_attention.get(number, True):
            separate = _SEPARATE_ATTENTION if number in is_attention else _MAYBE_ATTENTION
            kinds[number] = _RETURNS_WEIGHTS if layers[number].kind == "MultiheadAttention" else separate
    return kinds


def _has_short_rows(evidence: Evidence, number: int, shapes: set[_Shape] | None) -> bool:
    """Whether fusing the attention of a layer gains nothing on the CPU: its rows of scores are short, or the model gets
    one token a call, and so has one row. ``shapes``: of its scores, None if unknown."""
    if evidence.device != "cpu":
        return False
    is_short = shapes is not None and max(shape[-1] for shape in shapes) < _SHORT_ROW
    return is_short or evidence.gets_one_token(number)


def _drops_scores(evidence: Evidence, number: int) -> bool:
    """Whether a layer with attention, or a dropout layer directly below it, draws random numbers: on the CPU the fused
    kernel has no dropout, and torch's own way takes as long as separate operators (measured: 6 % longer)."""
    drops = evidence.took(_DRAWS, phases=(FORWARD, RECOMPUTE))
    return any(layer in drops for layer in (number, *evidence.run.layers.children[number]))


def _with_softmax_layers(layers: Layers, number: int) -> list[int]:
    """A layer, and the Softmax layers directly below it."""
    return [number, *(child for child in layers.children[number] if layers[child].kind == "Softmax")]


def _scores(evidence: Evidence) -> dict[int, set[_Shape]]:
    """The input shapes of the softmax of each layer, or of a Softmax layer directly below it."""
    layers = evidence.run.layers
    shapes: defaultdict[int, set[_Shape]] = defaultdict(set)
    if not evidence.shapes_recorded:
        return shapes
    for number, _, frames, *_ in evidence.rows(_SOFTMAX):
        above = layers.parent[number] if number >= 0 and layers[number].kind == "Softmax" else number
        for frame in frames:
            shape = shape_of_input(frame, 0)
            if _SOFTMAX([frame]) and shape:
                shapes[number].add(shape)
                shapes[above].add(shape)
    return shapes


def _fits_attention(evidence: Evidence, scores: Mapping[int, set[_Shape]]) -> dict[int, bool]:
    """Whether the shapes of a layer's matrix products are those of attention; only for layers with known shapes. The
    result of one product has as many elements as the input of a softmax; another product takes as many, and sums over
    the last dimension of the softmax."""
    if not scores:
        return {}
    products: defaultdict[int, set[tuple[_Shape, _Shape]]] = defaultdict(set)
    for row in evidence.rows(_PRODUCTS, phases=(FORWARD, RECOMPUTE)):
        for frame in filter(lambda frame: _PRODUCTS([frame]), row.frames):
            left, right = (shape_of_input(frame, index) for index in FACTORS[frame.name])
            if left and right:
                products[row.layer].add((left, right))
    return {
        number: any(
            any(prod(left[:-1]) * right[-1] == prod(shape) for left, right in pairs)
            and any(left[-1] == shape[-1] and prod(left) == prod(shape) for left, right in pairs)
            for shape in scores[number]
        )
        for number, pairs in products.items()
        if number in scores
    }
