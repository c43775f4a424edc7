"""Fusion: many small operations that one kernel, or one layer, could do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

from torchprof.advise import Advice, Gain, merged, rule
from torchprof.advise.chains import (
    Among,
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
)
from torchprof.advise.evidence import Evidence, Took
from torchprof.advise.layers import constants
from torchprof.advise.python import own_time_of_slow_python
from torchprof.run.formats import format_time
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layers
from torchprof.run.torch_names import BATCHED_PRODUCTS, ELEMENTWISE, SOFTMAX_OPS, aten, without_aten
from torchprof.run.words import AUTOGRAD_ENGINE, BACKWARD, FORWARD, RECOMPUTE

# Many small operators

_PRODUCTS_AND_CONVOLUTIONS = calling(
    aten("linear matmul mm addmm bmm baddbmm conv1d conv2d conv3d scaled_dot_product_attention")
)
_ELEMENTWISE = calling(ELEMENTWISE)
_ELEMENTWISE_NODES = {name.replace("_", "") for name in without_aten(ELEMENTWISE)}  # as ``node_of`` writes them
_is_elementwise_node = Among(is_node, lambda frames: node_of(frames) in _ELEMENTWISE_NODES)
_ENGINE = calling([AUTOGRAD_ENGINE])
_MANY_ELEMENTWISE = 5  # operators in a forward call
_COMPILED_CALL_NS = 50_000
"""What the call of a compiled layer costs on the CPU, with its backward: for less work compiling loses (a vocoder's
blocks with small batches took 70 % longer)."""
_SAVED_BY_FUSING = 0.6
"""The part of the time that a fused operator saves on the CPU: measured, 50 to 70 % of a GELU, 0 to 75 % of an RMS
norm, 78 to 94 % of a rotary embedding, with backward."""
_MANY_SHORT = 100  # operators in a forward call: they are in a loop
_SHORT_NS = 10_000  # an operator of less time is bound by its dispatch


class _Ops(NamedTuple):
    """Operators that a layer calls directly: their ``calls`` and time, the layer's forward calls, the time of their
    backward, and the layer's own time between operators (``_between_ops``), 0 if another finding has it.
    ``in_loop``: the layer calls so many that they must be in a loop."""

    calls: int
    ns: int
    forward_calls: int
    backward_ns: int
    between_ns: int
    in_loop: bool

    @property
    def all_ns(self) -> int:
        return self.ns + self.backward_ns + self.between_ns


@rule
def many_small_operators(evidence: Evidence) -> Iterator[Advice]:
    """Layers that call many elementwise operators (add, mul, tanh, …) directly in each forward call: a GELU, a norm, a
    rotary embedding or a cell written in Python. And those that call very many short ones of any kind: a Python loop
    over the rows of a tensor.

    Each elementwise operator reads and writes all values, and is dispatched or launched separately; fused they are one
    kernel. With fewer than five there is little to fuse. The dispatch or launch of a short operator takes longer than
    its computation. Layers without a loop call a few dozen at most. Layers in which most of that time is that of
    ``constants_in_layers`` are left out.
    """
    loops, chains = _short_ops(evidence), _many_in_a_call(evidence, _ELEMENTWISE, _MANY_ELEMENTWISE)
    constant = constants(evidence) if chains else {}
    chains = {layer: took for layer, took in chains.items() if evidence.time_of(took) > 2 * constant.get(layer, 0)}
    if not loops and not chains:
        return
    nodes = _short(evidence, is_node, (BACKWARD,)) | _in_loops(evidence, loops) if loops else set()
    of_loops = Among(is_node, lambda frames: outermost_op(frames) in nodes or _is_elementwise_node(frames))
    backward = {True: evidence.took(of_loops, phases=(BACKWARD,)), False: evidence.took(_is_elementwise_node)}
    between, python = _between_ops(evidence), own_time_of_slow_python(evidence)
    ops_of, gains = {}, {}
    for layer, took in {**chains, **loops}.items():
        in_loop = layer in loops
        ops = ops_of[layer] = _Ops(
            took.calls,
            evidence.time_of(took),
            evidence.calls[layer],
            evidence.time_of(backward[in_loop].get(layer, Took())),
            0 if layer in python else between[layer],
            in_loop,
        )
        saved = _SAVED_BY_FUSING if evidence.device == "cpu" and not in_loop else 1
        if in_loop or evidence.device != "cpu" or ops.all_ns > _COMPILED_CALL_NS * ops.forward_calls:
            gains[layer] = round(ops.all_ns * saved)
    for group in merged(evidence, gains, {layer: ops_of[layer].in_loop for layer in gains}):
        cause, details = _text_of_ops(evidence, [ops_of[layer] for layer in group.numbers])
        yield group.advice(
            cause,
            "Compute all rows at once instead of in a loop, or compile the layer with `torch.compile`."
            if ops_of[group.numbers[0]].in_loop
            else "Fuse them: compile the layer (`layer.compile()` or `torch.compile(model)`), or use one function or "
            "layer of torch for them (`torch.nn.functional`).",
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


def _short_ops(evidence: Evidence) -> dict[int, Took]:
    """The layers with operators in a loop, by number, with their short operators."""
    direct = evidence.took(is_direct, phases=(FORWARD, RECOMPUTE))
    if not any(took.calls >= _MANY_SHORT * evidence.calls.get(layer, 1) for layer, took in direct.items()):
        return {}
    short = _short(evidence, is_in_op, (FORWARD, RECOMPUTE))
    return _many_in_a_call(evidence, Among(is_in_op, calling(short)), _MANY_SHORT)


def _in_loops(evidence: Evidence, layers: Container[int]) -> set[str]:
    """The names of nodes that run at least 25 times for each forward call of one of these layers: they are of its loop,
    however long they take."""
    nodes = evidence.rows(Among(is_node, is_outermost), phases=(BACKWARD,))
    runs = sums_by_key(((row.layer, row.frames[0].name), row.calls) for row in nodes if row.layer in layers)
    return {name for (layer, name), times in runs.items() if _MANY_SHORT // 4 * evidence.calls[layer] <= times}


def _short(evidence: Evidence, holds: Holds, phases: Sequence[str]) -> set[str]:
    """The names of the matching outermost operators and nodes that take less than 10 us on average, with all in
    them."""
    ns: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for frames, took in evidence.chains(holds, phases=phases):
        name = outermost_op(frames) or ""
        ns[name] += evidence.time_of(took)
        calls[name] += 0 if holds(frames[:-1]) else took.calls
    return {name for name in ns if ns[name] < _SHORT_NS * calls[name]}


def _text_of_ops(evidence: Evidence, all_ops: Sequence[_Ops]) -> tuple[str, str]:
    """The cause, and the details, for the operators of several layers."""
    overhead = "dispatch" if evidence.device == "cpu" else "kernel launch"
    calls, ns = sum(ops.calls for ops in all_ops), sum(ops.ns for ops in all_ops)
    a_call = calls / sum(ops.forward_calls for ops in all_ops)
    what = f"{'' if all_ops[0].in_loop else 'elementwise '}operators{' on average' if len(all_ops) > 1 else ''}"
    details = f"They take {format_time(ns)} in total, {format_time(ns / calls)} each."
    details += f" Operators this short are usually bound by {overhead} overhead." if ns < _SHORT_NS * calls else ""
    backward_ns = sum(ops.backward_ns for ops in all_ops)
    details += f" Their backward takes {format_time(backward_ns)}." if backward_ns else ""
    between_ns = sum(ops.between_ns for ops in all_ops)
    details += f" The time between operators is {format_time(between_ns)}." if between_ns else ""
    return f"A forward call runs {a_call:,.0f} {what}.", details


def _between_ops(evidence: Evidence) -> Counter[int]:
    """The CPU time of each layer outside operators and outside the layers below: Python, and the overhead of calls; and
    in backward that of the engine between its nodes. It is empty if device time counts."""
    if evidence.device != "cpu":
        return Counter()
    python = evidence.took(is_own_time, phases=(FORWARD, RECOMPUTE))
    engine = evidence.took(_ENGINE, phases=(BACKWARD,))
    return sums_by_key((layer, took.cpu_ns) for layer, took in (*python.items(), *engine.items()))


# Attention

_PRODUCTS = inside(*BATCHED_PRODUCTS)
_SOFTMAX = inside(*SOFTMAX_OPS, "aten::_safe_softmax", "aten::_softmax_backward_data")
_MATH = inside("aten::_scaled_dot_product_attention_math")
_WHOLE_ATTENTION = inside("aten::scaled_dot_product_attention", "aten::_native_multi_head_attention", *_MATH.wanted)
_SEPARATE_PRODUCTS = Among(_PRODUCTS, lambda frames: not _WHOLE_ATTENTION(frames))
_SEPARATE_SOFTMAX = Among(_SOFTMAX, lambda frames: not _WHOLE_ATTENTION(frames))
_DRAWS = inside("aten::bernoulli_", "aten::native_dropout")
_SHORT_ROW = 256  # of scores: on the CPU, the fused kernel gained nothing at 128, and two thirds at 512
_GAIN_OF_FUSED = 7 / 8  # FlashAttention, Dao et al. 2022, figure 1: 7.6 times as fast as separate ops


class _AttentionKind(NamedTuple):
    """A way in which attention stores its scores: the texts of the finding, with ``{}`` for the time."""

    cause: str
    action: str
    details: str = ""
    options: str = ""


_NOT_FUSED = _AttentionKind(
    "`scaled_dot_product_attention` uses no fused kernel.",
    "Let torch report why: `with torch.nn.attention.sdpa_kernel(SDPBackend.FLASH_ATTENTION):`.",
    "Its separate operators take {}.",
    "Common causes are float64, a mask that requires grad, dropout on the CPU, and unsupported head sizes.",
)
_RETURNS_WEIGHTS = _AttentionKind(
    "Attention runs as separate matrix products and softmax, for {}, and stores all scores.",
    "Call it with `need_weights=False` if the weights are not used.",
)
_MAYBE_ATTENTION = _AttentionKind(
    "Batched matrix products and softmax run as separate operators, for {}.",
    "If this is attention, use `torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=…)`.",
    "If this is attention, it stores all scores.",
)


@rule
def attention_not_fused(evidence: Evidence) -> Iterator[Advice]:
    """Attention that stores its whole matrix of scores: separate matrix products and softmax (of the layer, or of a
    Softmax layer directly below), or torch's ``_scaled_dot_product_attention_math``.

    A mixture of experts looks the same, so the finding is stated as a condition, except for torch's
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
    kinds: dict[int, _AttentionKind] = {}
    for number in sorted(products.keys() | math.keys()):
        if number < 0 or _has_short_rows(evidence, number):
            continue
        if number in math:
            kinds[number] = _NOT_FUSED
            continue
        softmax_calls = sum(softmax[layer].calls for layer in _with_softmax_layers(layers, number) if layer in softmax)
        product_calls = forward_products[number].calls if number in forward_products else 0
        if evidence.device == "cpu" and _drops_scores(evidence, number):
            continue
        if softmax_calls and product_calls >= 2 * softmax_calls:
            kinds[number] = _RETURNS_WEIGHTS if layers[number].kind == "MultiheadAttention" else _MAYBE_ATTENTION
    return kinds


def _has_short_rows(evidence: Evidence, number: int) -> bool:
    """Whether fusing the attention of a layer gains nothing on the CPU: its rows of scores are short, by the inputs of
    its first call, or its model gets one token a call. In torch's MultiheadAttention the batch may be the second
    dimension."""
    if evidence.device != "cpu":
        return False
    layer = evidence.run.layers[number]
    sequences = [
        shape[:2] if layer.kind == "MultiheadAttention" else shape[1:2]
        for shape in layer.input_shapes
        if len(shape) == 3
    ]
    return evidence.gets_one_token(number) or (bool(sequences) and max(map(max, sequences)) < _SHORT_ROW)


def _drops_scores(evidence: Evidence, number: int) -> bool:
    """Whether a layer with attention, or a dropout layer directly below it, draws random numbers: on the CPU the fused
    kernel has no dropout, and torch's own way takes as long as separate operators (measured: 6 % longer)."""
    drops = evidence.took(_DRAWS, phases=(FORWARD, RECOMPUTE))
    return any(layer in drops for layer in (number, *evidence.run.layers.children[number]))


def _with_softmax_layers(layers: Layers, number: int) -> list[int]:
    """A layer, and the Softmax layers directly below it."""
    return [number, *(child for child in layers.children[number] if layers[child].kind == "Softmax")]
