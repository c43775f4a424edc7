"""Operators that are costly where they are used, and what may do the same for less."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torchprof.advise import Advice, merged, rule
from torchprof.advise.chains import (
    Among,
    Frames,
    Having,
    calling,
    inside,
    is_loading,
    is_op,
    is_optimizer,
    node_of,
    ops_in,
    outermost_op,
)
from torchprof.advise.evidence import Evidence, Took
from torchprof.analyze.lines import lines_of_code
from torchprof.run.formats import format_time
from torchprof.run.torch_names import VIEWS, aten
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE


class _Cheaper(NamedTuple):
    """What is costly: operators with all in them, and the nodes of their backward. ``says``: what they do; ``remedy``:
    what may do the same for less, and when it does not. ``gain``: the largest part of the time that it saves.
    ``in_layers``: whether layers may avoid it, too."""

    ops: frozenset[str]
    says: str
    remedy: str
    gain: float = 1.0
    in_layers: bool = True


_ONE_HOT, _CASTS = aten("one_hot"), aten("to _to_copy")
_PRODUCTS = aten("mm addmm bmm matmul linear") | {"mm", "addmm", "bmm"}
_of_one_hot = _ONE_HOT | _PRODUCTS | _CASTS | VIEWS
_is_other_use = Among(is_op, lambda frames: outermost_op(frames) not in _of_one_hot)
_EXPONENTIALS = inside(*aten("linalg_matrix_exp matrix_exp"))
_CHEAPER = (
    _Cheaper(
        aten("linalg_inv linalg_inv_ex inverse linalg_pinv"),
        "Matrices are inverted",
        "If the inverse is only multiplied: `torch.linalg.solve(A, b)`, of a positive definite matrix "
        "`torch.cholesky_solve`; if the matrix has not changed, keep the inverse.",
        0.7,
    ),
    _Cheaper(
        aten(
            "linalg_svd _linalg_svd svd linalg_eigh _linalg_eigh linalg_eig linalg_eigvals linalg_eigvalsh "
            "linalg_svdvals"
        ),
        "Matrices are decomposed (singular values, eigenvalues)",
        "Do it less often, or approximate: power iteration (`torch.nn.utils.parametrizations.spectral_norm`), "
        "`torch.svd_lowrank`.",
        0.9,
    ),
    _Cheaper(
        _EXPONENTIALS.wanted,
        "Exponentials of matrices are computed",
        "If the matrix has not changed between two of them, keep the result, that of a parametrization by "
        "`torch.nn.utils.parametrize.cached()`.",
    ),
    _Cheaper(
        aten("linalg_cholesky linalg_cholesky_ex cholesky"),
        "Matrices are decomposed (Cholesky)",
        "If they are diagonal, as covariances often are: `Independent(Normal(mean, deviation), 1)` of "
        "`torch.distributions`, elementwise; if the matrix has not changed, keep the factor.",
        0.9,
    ),
    _Cheaper(
        aten("repeat repeat_interleave tile"),
        "Values are copied several times",
        "If they are then only read: `x.expand(…)`, or `x[:, None]` and broadcasting, copy nothing.",
    ),
    _Cheaper(
        _CASTS,
        "Tensors are cast to another type",
        "If they are weights, cast them once: store them in the type that is computed with (`model.float()`).",
    ),
    _Cheaper(
        aten("index index_select"),
        "Rows of data are gathered by index",
        "If a step needs only some of them: `data[indices[:16]]`, not `data[indices][:16]`; if all need the same, "
        "once, before the loop.",
        in_layers=False,
    ),
    _Cheaper(
        aten("sort argsort"),
        "Values are sorted",
        "If only the largest or the smallest are used: `torch.topk`; if they are only logged, of a sample.",
        0.7,
    ),
    _Cheaper(
        aten("quantile nanquantile histc histogram bincount median nanmedian unique_consecutive _unique2"),
        "Statistics of values are computed",
        "If they are only logged: for every hundredth step, or of a sample (`x.flatten()[::100]`).",
        in_layers=False,
    ),
    _Cheaper(
        aten("isnan isfinite isinf"),
        "Values are compared with NaN or infinity",
        "If it is a check: of the loss alone, or for every hundredth step.",
        in_layers=False,
    ),
)


def names_in(frames: Frames) -> set[str]:
    """The operators among the frames, and the one whose backward the node is."""
    node = node_of(frames)
    return {*ops_in(frames), *([] if node is None else [node])}


@rule
def costly_operators(evidence: Evidence) -> Iterator[Advice]:
    """Operators of a few families that take 5 % of the time or more in layers, or outside of them, with their backward.
    That the cheaper form fits is not recorded: each remedy is a condition."""
    layers = evidence.run.layers
    others = layers.roll_up([sum(dtype != "float32" for dtype, _ in layer.dtype_bytes) for layer in layers])
    for cheaper in _CHEAPER:
        nodes = {name.removeprefix("aten::").replace("_", "") for name in cheaper.ops}
        costly = Having(names_in, cheaper.ops | nodes)
        is_users = Among(costly, lambda frames: not is_optimizer(frames) and not is_loading(frames))
        took = evidence.took(costly if cheaper.in_layers else is_users)
        gains = {
            layer: round(evidence.time_of(work) * saved)
            for layer, work in took.items()
            if (saved := _saved(evidence, cheaper, layer, layer >= 0 and others[layer] > 0))
        }
        for group in merged(evidence, gains, least_ns=evidence.notable_ns):
            line = _line_of(evidence, group.numbers, cheaper.ops)
            time = format_time(sum(evidence.time_of(took[layer]) for layer in group.numbers))
            yield group.advice(f"{cheaper.says}{line}, for {time}.", cheaper.remedy)


def _saved(evidence: Evidence, cheaper: _Cheaper, layer: int, has_others: bool) -> float:
    """The largest part of the time of such operators that a layer, or work outside of layers, can save. Casts: where
    parameters in it or below it are not float32 (``has_others``), on a CPU (elsewhere copies to a device look the
    same), and without autocast, which casts weights in each step. Exponentials: those that are computed again before
    an optimizer's next step."""
    if layer != OUTSIDE and not cheaper.in_layers:
        return 0
    if cheaper.ops is _CASTS:
        return has_others and evidence.device == "cpu" and evidence.switches.get("cpu_autocast") == "False"
    if cheaper.ops is _EXPONENTIALS.wanted:
        calls = evidence.took(_EXPONENTIALS, phases=(FORWARD,)).get(layer, Took()).calls
        return max(1 - max(evidence.steps * (BACKWARD in evidence.run.phases()), 1) / calls, 0) if calls else 0
    return cheaper.gain


@rule
def one_hot_products(evidence: Evidence) -> Iterator[Advice]:
    """Layers that make rows with a single one, cast them and multiply, once each, and call no other operator that could
    use the rows: the product of such a row is a row of the other matrix. The gain is that of the rows, the casts and
    the products of the layer."""
    parts = [evidence.took(Having(names_in, names)) for names in (_ONE_HOT, _PRODUCTS, _CASTS)]
    calls = [evidence.took(calling(names), phases=(FORWARD,)) for names in (_ONE_HOT, _PRODUCTS, _CASTS)]
    others = evidence.took(_is_other_use, phases=(FORWARD,))
    times = {
        layer: sum(evidence.time_of(took[layer]) for took in parts if layer in took)
        for layer in parts[0]
        if layer >= 0
        and layer not in others
        and len({took[layer].calls if layer in took else 0 for took in calls}) == 1
    }
    for group in merged(evidence, times, least_ns=evidence.notable_ns):
        yield group.advice(
            f"One-hot rows are made and multiplied with a matrix, for {group.time}.",
            "Look the rows up: `torch.nn.functional.embedding(indices, weight)`, or `torch.nn.Embedding`.",
        )


def _line_of(evidence: Evidence, layers: tuple[int, ...], ops: frozenset[str]) -> str:
    """The line that was sampled most in these operators, for work of no layer: " at train.py:7 loss"."""
    if OUTSIDE not in layers:
        return ""
    samples = Counter(
        {line.text: sum(line.work[op].total() for op in ops if op in line.work) for line in lines_of_code(evidence.run)}
    )
    [(text, count)] = samples.most_common(1) or [("", 0)]
    return f" at {text}" if count else ""
