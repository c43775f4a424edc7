"""How flops-profiler and the early DeepSpeed profiler count operators, and how they write figures.

One table has all rules, a line for operators that count alike. ``count`` applies them to the rows of a run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import prod
from numbers import Real
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from torchprof import Run
from torchprof.errors import TorchprofError, suggest
from torchprof.types import Cost, Signature

LayerPath = tuple[str, ...]

_NOT_A_TENSOR = ("", "Scalar", "ScalarList", "TensorList")
"""The dtypes of inputs that are not tensors. "" is also that of a tensor whose shape was not recorded."""


class PerCall(NamedTuple):
    """Work that follows from the inputs of one call of an operator, or of those inside it that ``inputs_of`` names.
    ``formula`` is called if the first input has a shape; it returns None if it needs what was not recorded."""

    formula: Callable[[Signature], int | None]
    inputs_of: tuple[str, ...] = ()

    def of_call(self, signature: Signature | None) -> int | None:
        """The work of one call; None if its inputs were not recorded."""
        return None if signature is None or input_shape(signature) is None else self.formula(signature)


_Work = PerCall | Callable[[Cost], int]
"""How much work an operator does: by its inputs, or by torchprof's count of it and of the operators that it calls."""


def input_shape(signature: Signature | None, index: int = 0) -> tuple[int, ...] | None:
    """The shape of the input number ``index`` of an operator; None if it is not a tensor or its shape is unknown."""
    if signature is None or index >= len(signature.dtypes) or signature.dtypes[index] in _NOT_A_TENSOR:
        return None
    shape: tuple[int, ...] | None = signature.shapes[index]
    return shape


# The formulas: how much work an operator does, in the words of a tool

_macs: Callable[[Cost], int] = attrgetter("macs")
_flops: Callable[[Cost], int] = attrgetter("flops")


def _nothing(cost: Cost) -> int:
    return 0


def _twice_macs(cost: Cost) -> int:
    return 2 * cost.macs


def _macs_and_bias(cost: Cost) -> int:
    """Of a convolution: one for each product, and one for each addition of a bias."""
    return cost.flops - cost.macs


def _for_each_element(number: int) -> PerCall:
    return PerCall(lambda signature: number * prod(signature.shapes[0]))


def _normalized(weight: int) -> PerCall:
    """4 for each element, 5 if there is a weight. ``weight``: the number of the input that is the weight."""
    return PerCall(lambda signature: prod(signature.shapes[0]) * (4 + (input_shape(signature, weight) is not None)))


def _batch_normalized(signature: Signature) -> int:
    """1 for each element, 4 in training (to compute mean and variance), and 1 more if there is a weight."""
    has_weight = input_shape(signature, 1) is not None
    in_training = len(signature.scalars) > 5 and signature.scalars[5] is True
    return int(prod(signature.shapes[0]) * ((4 if in_training else 1) + has_weight))


def _added_product(signature: Signature) -> int | None:
    """2 for each multiply-accumulate, and 1 for each element of the added tensor, before it is broadcast."""
    added, first, second = (input_shape(signature, index) for index in range(3))
    if added is None or first is None or second is None:
        return None
    return 2 * prod(first) * int(second[-1]) + prod(added)


def _interpolated(signature: Signature) -> int | None:
    """1 for each element of the result. The scalar inputs have the output size or the scale factors."""
    image, scalars = signature.shapes[0], signature.scalars
    if len(scalars) < 2:
        return None
    sizes, factors = scalars[1], scalars[-1]
    if isinstance(sizes, tuple):
        return int(prod(image[: -len(sizes)]) * prod(sizes))
    if isinstance(factors, tuple):
        return int(prod(image[:2]) * prod(int(length * factor) for length, factor in zip(image[2:], factors)))
    return None


def _recurrent(per_unit: int) -> PerCall:
    """For each token the elements of weights and biases, and ``per_unit`` for each hidden unit of each layer."""

    def multiply_adds(signature: Signature) -> int | None:
        if None in signature.shapes:  # versions of torch without the shapes in lists of tensors
            return None
        data, *others = signature.shapes
        is_packed = signature.dtypes[1] == "long int"  # then the batch sizes come second
        state, *weights = others[1:] if is_packed else others
        state = state[-1] if isinstance(state[0], tuple) else state  # of LSTM, the cell's
        listed = [shape for shape in weights if shape]
        shapes = [inner for shape in listed for inner in (shape if isinstance(shape[0], tuple) else [shape])]
        units = state[-1] * (state[0] if len(state) == 3 else 1)  # a cell has one layer, and no dimension for it
        return int(prod(data[:-1]) * (sum(map(prod, shapes)) + per_unit * units))

    return PerCall(multiply_adds)


def _fused_attention(signature: Signature) -> int:
    """Self-attention as one fused operator: two linear layers, and the softmax if the weights are returned."""
    (batch, length, _), in_weight, out_weight = (signature.shapes[index] for index in (0, 5, 7))
    heads, returns_weights = signature.scalars[4], signature.scalars[10]
    linear = batch * length * (prod(in_weight) + prod(out_weight))
    return int(linear + (batch * heads * length * length if returns_weights else 0))


def _fused_encoder_layer(signature: Signature) -> int:
    """nn.TransformerEncoderLayer as one fused operator: four linear layers, and the activation if it is a relu."""
    tokens, uses_gelu = prod(signature.shapes[0][:-1]), signature.scalars[7]
    weights = [signature.shapes[index] for index in (3, 5, 14, 16)]  # of attention: in, out; the two linear layers
    activated = tokens * weights[2][0]
    return int(tokens * sum(map(prod, weights)) + (0 if uses_gelu else activated))


# The table

_WITH_FLAG = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Of the operators inside a batch norm, those that have the training flag among their inputs."""
_ELEMENTS = _for_each_element(1)
_POOLINGS = (
    "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d max_pool1d max_pool2d max_pool3d "
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices"
)
_SMOOTH_RESIZING = (
    "upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d _upsample_bilinear2d_aa "
    "_upsample_bicubic2d_aa"
)


class _Line(NamedTuple):
    """How both tools count some operators. ``operators``: torch's names. ``shown_as``: the name that flops-profiler
    shows; None for the operator's own. ``flops``: of flops-profiler; None if it does not list the operator.
    ``multiply_adds``: of DeepSpeed."""

    operators: str
    shown_as: str | None
    flops: _Work | None
    multiply_adds: _Work


_TABLE = (
    _Line("linear", None, _twice_macs, _macs),
    _Line("matmul mm bmm mv einsum bilinear scaled_dot_product_attention", None, _twice_macs, _nothing),
    _Line("addmm baddbmm", None, PerCall(_added_product), _nothing),
    _Line("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d", None, _flops, _macs_and_bias),
    _Line("convolution _convolution", "convolution", _flops, _macs_and_bias),  # TorchScript runs these
    # LSTM, for each hidden unit: four sums of the gates; two products and a sum; three for the output.
    _Line("lstm lstm_cell", None, _flops, _recurrent(10)),
    # GRU: a product with the reset gate and three sums; two products and a sum. RNN: the sum of both products.
    _Line("gru gru_cell", None, _flops, _recurrent(7)),
    _Line("rnn_tanh rnn_relu rnn_tanh_cell rnn_relu_cell", None, _flops, _recurrent(1)),
    _Line("relu leaky_relu elu relu6 prelu softmax", None, _ELEMENTS, _ELEMENTS),
    _Line(_POOLINGS, None, _ELEMENTS, _ELEMENTS),
    _Line("hardtanh", None, None, _ELEMENTS),  # also runs nn.ReLU6
    _Line("silu gelu", None, _ELEMENTS, _nothing),
    _Line(
        "batch_norm _batch_norm_impl_index", "batch_norm", PerCall(_batch_normalized, _WITH_FLAG), _for_each_element(2)
    ),
    _Line("layer_norm group_norm", None, _normalized(weight=2), _nothing),
    _Line("instance_norm", None, _normalized(weight=1), _nothing),
    _Line(_SMOOTH_RESIZING, "interpolate", PerCall(_interpolated), _nothing),
    _Line("upsample_nearest1d upsample_nearest2d upsample_nearest3d", "interpolate", _nothing, _nothing),
    _Line("embedding", None, _nothing, _nothing),
    _Line("_native_multi_head_attention", "multi_head_attention_forward", _twice_macs, PerCall(_fused_attention)),
    _Line("_transformer_encoder_layer_fwd", "transformer_encoder_layer", _twice_macs, PerCall(_fused_encoder_layer)),
    _Line("selu celu rrelu", None, None, _nothing),  # these call operators that count
)


class CountingRule(NamedTuple):
    """What a tool calls an operator, and the work that it counts; None if it does not list the operator."""

    name: str
    work: _Work | None


class Convention(NamedTuple):
    """What a tool counts.

    ``rules``: by torch's names of operators. If operators call each other, the outermost one with a rule counts, with
    all time and work inside it. ``counts_all_products``: whether an operator with multiply-accumulates that has no rule
    counts, too, under torch's name. ``ignores_children``: whether ignoring a module ignores the modules in it.
    """

    rules: Mapping[str, CountingRule]
    counts_all_products: bool
    ignores_children: bool


def _rules(column: Literal["flops", "multiply_adds"]) -> dict[str, CountingRule]:
    """The rules of the tool whose work is in this column. They hold for the in-place forms of operators, too."""
    rules = {}
    for line in _TABLE:
        for operator in line.operators.split():
            rule = CountingRule(line.shown_as or operator.removesuffix("_with_indices"), getattr(line, column))
            rules[f"aten::{operator}"] = rules[f"aten::{operator}_"] = rule
    return rules


FLOPS_PROFILER = Convention(_rules("flops"), counts_all_products=True, ignores_children=True)
DEEPSPEED = Convention(_rules("multiply_adds"), counts_all_products=False, ignores_children=False)


# Counting the rows of a run


@dataclass
class Counted:
    """Sums of one operator, with the operators that it calls: ``work`` by the convention, torchprof's multiply-
    accumulates, and nanoseconds of the CPU, or of the device if it was recorded."""

    work: int = 0
    macs: int = 0
    ns: int = 0

    def add(self, other: Counted) -> None:
        self.work += other.work
        self.macs += other.macs
        self.ns += other.ns


@dataclass
class Counts:
    """What the operators of a run count in the forwards of the layers, each without its child layers.

    ``by_layer``: by the layer's path, and the tool's name of the operator. ``uncounted``: calls that may count but
    whose work is unknown, by the layer's path. ``without_shapes``: those of them whose inputs have no shape, by name.
    """

    by_layer: dict[LayerPath, dict[str, Counted]] = field(default_factory=dict)
    uncounted: Counter[LayerPath] = field(default_factory=Counter)
    without_shapes: Counter[str] = field(default_factory=Counter)


def count(run: Run, convention: Convention, time: str) -> Counts:
    """Count the operators of a run. ``time``: the field of a cost that has the nanoseconds."""
    rows = [(row, row.layer.path) for row in run.rows if row.layer and row.phase == "forward" and row.frames]
    rules = dict(convention.rules)
    if convention.counts_all_products:
        for frames in (row.frames for row, _ in rows if row.cost.macs):
            if not any(frame.name in rules for frame in frames):
                rules[frames[-1].name] = CountingRule(frames[-1].name.removeprefix("aten::"), _twice_macs)
    counts = Counts()
    for row, layer in rows:
        outermost = next((depth for depth, frame in enumerate(row.frames) if frame.name in rules), None)
        if outermost is None:  # it may multiply and add, if it has no formula
            counts.uncounted[layer] += row.cost.uncounted
            continue
        name, work = rules[row.frames[outermost].name]
        if work is None:
            continue
        counted = counts.by_layer.setdefault(layer, {}).setdefault(name, Counted())
        counted.add(Counted(macs=row.cost.macs, ns=getattr(row.cost, time)))
        if not isinstance(work, PerCall):
            counted.work += work(row.cost)
            counts.uncounted[layer] += row.cost.uncounted if work is not _nothing else 0
            continue
        # Rows of operators inside it count with it, and have other inputs.
        has_inputs = row.frames[-1].name in work.inputs_of if work.inputs_of else outermost == len(row.frames) - 1
        work_of_call = work.of_call(row.signature) if has_inputs else 0
        if work_of_call is None:
            counts.uncounted[layer] += row.calls
            counts.without_shapes[name] += row.calls
        else:
            counted.work += row.calls * work_of_call
    return counts


# Figures as text: the functions ``…_to_string`` are DeepSpeed's and work as ``text_in_units``

UNKNOWN_TEXT = "–"
_NUMBERS = {"G": 1e9, "M": 1e6, "K": 1e3, "": 1.0}
_PARAMS = {"M": 1e6, "k": 1e3, "": 1.0}
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
_MULTIPLY_ADDS = {f"{prefix}Mac": size for prefix, size in _NUMBERS.items()}  # DeepSpeed's
_MACS = {f"{prefix}MACs": size for prefix, size in _NUMBERS.items()}  # flops-profiler's
RATES = {"TFLOPS": 1e12, **{f"{prefix}FLOPS": size for prefix, size in _NUMBERS.items()}}


def macs_to_string(macs: float | None, units: str | None = None, precision: int = 2) -> str:
    """Multiply-adds as ``429.25 KMac``. ``units``: GMac, MMac, KMac or Mac."""
    return text_in_units(macs, _MULTIPLY_ADDS, units, precision)


def flops_to_string(flops: float | None, units: str | None = None, precision: int = 2) -> str:
    """The same as ``macs_to_string``: this tool's "flops" are multiply-adds. With ``units`` TFLOPS, GFLOPS, MFLOPS,
    KFLOPS or FLOPS, the number is in operations per second; it is not doubled."""
    return text_in_units(flops, _MULTIPLY_ADDS if units is None else _MULTIPLY_ADDS | RATES, units, precision)


def params_to_string(params_num: float | None, units: str | None = None, precision: int = 2) -> str:
    """A number of parameters as ``61.71 k`` or ``850``. ``units``: M, k (or K) or the empty string."""
    return text_in_units(params_num, _PARAMS if units is None else _PARAMS | {"K": 1e3}, units, precision)


def duration_to_string(duration: float | None, units: str | None = None, precision: int = 2) -> str:
    """Seconds as ``984.67 us``. ``units``: s, ms or us."""
    return text_in_units(duration, _SECONDS, units, precision)


def number_to_string(num: float | None, units: str | None = None, precision: int = 2) -> str:
    """Any number as ``61.71 K``. ``units``: G, M, K or the empty string."""
    return text_in_units(num, _NUMBERS, units, precision)


def text_in_units(value: float | None, sizes: Mapping[str, float], units: str | None = None, precision: int = 2) -> str:
    """A value in one of the units; if none is given, in the first one that is not larger than it, or else in the last.
    A whole number in a unit of 1 stays as it is; None, an unknown figure, is ``–``. ``sizes``: the size of each unit,
    largest first. ``precision``: the maximum number of decimals. Raises TorchprofError for other units."""
    if value is None:
        return UNKNOWN_TEXT
    if not is_number(value):
        raise TorchprofError(f"{value!r} is not a number: give one that get_model_profile(as_strings=False) returns.")
    if units is None:
        units = next((unit for unit, size in sizes.items() if abs(value) >= size), [*sizes][-1])
    elif units not in sizes:
        raise TorchprofError(f"units={units!r} are not known here. {suggest(str(units), sizes)}")
    number = value if sizes[units] == 1 and isinstance(value, int) else round(value / sizes[units], precision)
    return f"{number} {units}".rstrip()


def duration_text(seconds: float | None) -> str:
    """Seconds as flops-profiler prints them: 0 has no unit."""
    return "0.0" if seconds == 0 else duration_to_string(seconds)


def macs_text(macs: float | None) -> str:
    """Multiply-accumulates as flops-profiler prints them."""
    return text_in_units(macs, _MACS)


def rate_text(flops: float | None, seconds: float | None) -> str:
    """Floating-point operations per second."""
    return text_in_units(per_second(flops, seconds), RATES)


def is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def share_text(part: float | None, whole: float | None, decimals: int = 2) -> str:
    """``part / whole`` in percent; 0 if the whole is 0."""
    if part is None or whole is None:
        return UNKNOWN_TEXT
    return f"{part / whole if whole else 0:.{decimals}%}"


def at_least(text: str, is_lower_bound: bool) -> str:
    """Put ``≥`` before a figure that is a lower bound; an unknown figure stays ``–``."""
    return f"≥ {text}" if is_lower_bound and text != UNKNOWN_TEXT else text


def per_second(work: float | None, seconds: float | None) -> float | None:
    """``work / seconds``; None if it is unknown, or if no time was measured for some work."""
    if work is None or seconds is None or (work and not seconds):
        return None
    return work / seconds if seconds else 0.0
