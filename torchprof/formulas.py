"""How much arithmetic an op is, from what it was called on. docs/flops.md lists op → formula → source. Knows no torch.

A formula returns multiply-accumulates, and the floating-point operations besides them: FLOPs = 2 · MACs + the others.
It raises ``Unknown`` where the recorded inputs do not tell. A complex multiply-accumulate is four real ones; an
operation on integers or truth values alone is no floating-point operation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import ceil, log2, prod
from typing import Any, NamedTuple

from torchprof.attribute import Detail, Signature

Shape = tuple[int, ...]


class Unknown(Exception):
    """The recorded inputs do not tell how much work it was."""


class Work(NamedTuple):
    """Multiply-accumulates and floating-point operations, the accumulates' two each included."""

    macs: int
    flops: int


class Operation:
    """One op with what it was called on, as a formula sees it."""

    def __init__(self, name: str, signature: Signature) -> None:
        self.name = name
        self._shapes, self._dtypes, self._scalars, _ = signature

    def __len__(self) -> int:
        return len(self._dtypes)

    def has(self, index: int) -> bool:
        """Whether an input is there, and a tensor."""
        return index < len(self) and _is_tensor(self._dtypes[index])

    def is_missing(self, index: int) -> bool:
        """Whether an input is None, or a tensor without a shape (a nested tensor)."""
        return index < len(self) and self._dtypes[index] == ""

    def shape(self, index: int) -> Shape:
        """The shape of an input. Raises Unknown where it is no tensor, or one without a shape (a nested tensor)."""
        if not self.has(index) or self._shapes[index] is None:
            raise Unknown
        shape: Shape = self._shapes[index]
        return shape

    def numel(self, index: int) -> int:
        return prod(self.shape(index))

    def shapes_of_list(self, index: int) -> tuple[Shape, ...]:
        """The shapes of a list of tensors."""
        if index >= len(self) or self._dtypes[index] != "TensorList" or self._shapes[index] is None:
            raise Unknown
        shapes: tuple[Shape, ...] = self._shapes[index]
        return shapes

    def scalar(self, index: int) -> Any:
        """The value of an input that is no tensor; None where it was left out."""
        if index >= len(self._scalars):
            raise Unknown
        return self._scalars[index]

    def sizes(self, index: int, dims: int) -> Shape:
        """A list of numbers, one for each of ``dims`` dimensions; a single number stands for all of them."""
        value = self.scalar(index)
        if isinstance(value, int):
            value = (value,)
        if not isinstance(value, tuple) or not all(isinstance(size, int) for size in value):
            raise Unknown
        return value * dims if len(value) == 1 else value

    def broadcast(self, count: int) -> int:
        """The number of elements that the tensors among the first ``count`` inputs make together by broadcasting."""
        return prod(_broadcast([self.shape(index) for index in range(count) if self.has(index)]))

    @property
    def is_complex(self) -> bool:
        return any("complex" in dtype for dtype in self._dtypes)

    @property
    def is_floating(self) -> bool:
        return any(dtype in _FLOATING or dtype.startswith("c10::") for dtype in self._dtypes)

    @property
    def is_quantised(self) -> bool:
        return any("qint" in dtype or "quint" in dtype for dtype in self._dtypes)


Formula = Callable[[Operation], "tuple[int, int]"]

_FLOATING = frozenset({"float", "double", "TensorList"})  # of the tensors in a list no type is recorded
_NO_TENSOR = frozenset({"", "Scalar", "ScalarList", "TensorList", "GenericList"})
_formulas: dict[str, Formula] = {}
_details: dict[str, Detail] = {}


def work_of(operation: Operation) -> Work | None:
    """The work of one call of an op; None where there is no formula or the recorded inputs do not tell."""
    formula = formula_of(operation.name)
    if formula is None or operation.is_quantised:
        return None
    try:
        macs, others = formula(operation)
    except (Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # inputs that the op itself refused, too: of the wrong rank, say, or with a stride of 0
    if operation.is_complex:
        macs, others = 4 * macs, others * (6 if _bare(operation.name) in _COMPLEX_PRODUCTS else 2)
    elif not operation.is_floating:
        others = 0
    return Work(macs, 2 * macs + others)


def formula_of(name: str) -> Formula | None:
    """The formula of an op by its name in a profile, ``aten::add_``; None where there is none."""
    return _formulas.get(_bare(name))


def detail_of(name: str) -> Detail:
    """How much the formula of an op asks of its inputs."""
    return _details.get(_bare(name), Detail.SHAPES)


def _bare(name: str) -> str:
    """The name that the formulas know an op by: of torch's own without namespace and the ``_`` of in-place forms."""
    namespace, _, op = name.rpartition("::")
    if namespace not in ("aten", "prims"):
        return name
    return op if op in _formulas else op.removesuffix("_")


def _is_tensor(dtype: str) -> bool:
    return dtype not in _NO_TENSOR


def _broadcast(shapes: Iterable[Shape]) -> Shape:
    """The shape that several make together, by torch's rules of broadcasting."""
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for at in range(1, len(shape) + 1):
            if shape[-at] != 1:
                result[-at] = shape[-at]
    return tuple(result)


def _counts(*names: str, scalars: bool = False, ones: bool = False) -> Callable[[Formula], Formula]:
    """Register a function as the formula of some ops.

    ``scalars``: it asks for the values of inputs that are no tensors; ``ones``: only for which of them are 0 or 1.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            _formulas[name] = formula
            if scalars or ones:
                _details[name] = Detail.SCALARS if scalars else Detail.ONES
        return formula

    return register


# Matrix products. A bias is one addition for each element of the result.


@_counts("mm", "_int_mm", "_scaled_mm", "_weight_int8pack_mm")
def _mm(op: Operation) -> tuple[int, int]:
    (rows, inner), other = op.shape(0), op.shape(1)
    if op.name == "aten::_weight_int8pack_mm":
        other = other[::-1]
    return rows * inner * other[1] if other[0] == inner else 0, 0  # what does not fit is refused


@_counts("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr")
def _addmm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(1), op.shape(2)
    name = _bare(op.name)
    batch = first[0] if name in ("baddbmm", "addbmm") else 1
    if name == "addr":
        rows, inner, columns = first[0], 1, second[0]
    else:
        rows, inner = first[-2:]
        columns = 1 if name == "addmv" else second[-1]
    if name != "addr" and second[-1 if name == "addmv" else -2] != inner:
        return 0, 0
    result = rows * columns * (batch if name == "baddbmm" else 1)
    return batch * rows * inner * columns, result * (2 if name == "_addmm_activation" else 1)


@_counts("bmm")
def _bmm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    return prod(first) * second[-1] if first[-1] == second[-2] else 0, 0


@_counts("mv", "dot", "vdot")
def _mv(op: Operation) -> tuple[int, int]:
    return op.numel(0) if op.shape(0)[-1] == op.shape(1)[-1] else 0, 0


@_counts("_grouped_mm", "_scaled_grouped_mm")
def _grouped_mm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    if len(first) == 3 and len(second) == 3:
        return prod(first) * second[-1], 0
    return first[-2] * first[-1] * second[-1], 0  # each row, or column, or slice of the sum is in one group


@_counts("mkldnn::_linear_pointwise", "mkl::_mkl_linear", "mkldnn_linear")
def _packed_linear(op: Operation) -> tuple[int, int]:
    weight = op.shape(1) if op.name != "mkl::_mkl_linear" else op.shape(2)
    macs = op.numel(0) * weight[0]
    bias = 3 if op.name == "mkl::_mkl_linear" else 2
    return macs, macs // weight[1] if op.has(bias) else 0


# Convolution. Each element of the result (transposed: of the input) meets the weights of one output (input) channel.


def _convolved(op: Operation, *, stride: int, padding: int, dilation: int) -> int:
    """The number of elements of the result, given where the inputs have the sizes that it depends on."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    steps, borders, gaps = (op.sizes(at, dims) for at in (stride, padding, dilation))
    windows = 1
    for length, kernel, step, border, gap in zip(image[-dims:], weight[2:], steps, borders, gaps):
        windows *= _windows(length + 2 * border, kernel, step, gap)
    return prod(image[: -dims - 1]) * weight[0] * windows


@_counts("convolution", "_convolution", "convolution_overrideable", scalars=True)
def _convolution(op: Operation) -> tuple[int, int]:
    transposed = op.scalar(6)
    if type(transposed) is not bool:
        raise Unknown
    if transposed:
        return op.numel(0) * prod(op.shape(1)[1:]), _transposed(op) if op.has(2) else 0
    result = _convolved(op, stride=3, padding=4, dilation=5)
    return result * prod(op.shape(1)[1:]), result if op.has(2) else 0


def _transposed(op: Operation) -> int:
    """The number of elements that a transposed convolution gives."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    result = prod(image[: -dims - 1]) * weight[1] * int(op.scalar(8))
    sizes = (op.sizes(at, dims) for at in (3, 4, 5, 7))
    for length, kernel, stride, padding, dilation, more in zip(image[-dims:], weight[2:], *sizes):
        result *= (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + more + 1
    return result


@_counts("mkldnn_convolution", "miopen_convolution", scalars=True)
def _library_convolution(op: Operation) -> tuple[int, int]:
    result = _convolved(op, padding=3, stride=4, dilation=5)
    return result * prod(op.shape(1)[1:]), result if op.has(2) else 0


@_counts("cudnn_convolution", scalars=True)
def _cudnn_convolution(op: Operation) -> tuple[int, int]:
    return _convolved(op, padding=2, stride=3, dilation=4) * prod(op.shape(1)[1:]), 0


@_counts("conv_tbc", scalars=True)
def _conv_tbc(op: Operation) -> tuple[int, int]:
    (length, batch, _), (kernel, inner, outer) = op.shape(0), op.shape(1)
    result = (length + 2 * op.scalar(3) - kernel + 1) * batch * outer
    return result * kernel * inner, result


@_counts("convolution_backward", scalars=True)
def _convolution_backward(op: Operation) -> tuple[int, int]:
    grad, image, weight = op.shape(0), op.shape(1), op.shape(2)
    forward = prod(image if op.scalar(7) else grad) * prod(weight[1:])
    of_input, of_weight, of_bias = op.scalar(10)
    return forward * (of_input + of_weight), prod(grad) if of_bias else 0


def _windows(length: int, kernel: int, stride: int, dilation: int = 1, round_up: bool = False) -> int:
    """How often a window fits along one dimension that was padded to ``length``."""
    free = length - dilation * (kernel - 1) - 1
    return (-(-free // stride) if round_up else free // stride) + 1


# Attention: scores = Q·Kᵀ, softmax over them, then scores·V. Masks and causality skip nothing.

_SOFTMAX = 5  # maximum, difference, exponential, sum, quotient


def _attention(query: Shape, key: Shape, value: Shape) -> tuple[int, int, int]:
    """(multiply-accumulates of Q·Kᵀ, of scores·V, number of scores) of [*, heads, length, width] inputs.

    Heads of key and value may be fewer (grouped queries), and so may be their batch (broadcasting).
    """
    heads = max(query[-3], key[-3], value[-3]) if len(query) > 2 else 1
    batch = prod(_broadcast([query[:-3], key[:-3], value[:-3]]))
    scores = batch * heads * query[-2] * key[-2]
    return scores * query[-1], scores * value[-1], scores


FORWARD_ATTENTION = (
    "scaled_dot_product_attention",
    "_scaled_dot_product_attention_math",
    "_scaled_dot_product_attention_math_for_mps",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_fused_attention_overrideable",
)


@_counts(*FORWARD_ATTENTION)
def _forward_attention(op: Operation) -> tuple[int, int]:
    of_scores, of_values, scores = _attention(op.shape(0), op.shape(1), op.shape(2))
    return of_scores + of_values, (_SOFTMAX + 1) * scores


@_counts(
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)
def _backward_attention(op: Operation) -> tuple[int, int]:
    # Scores again, then the gradients of query and key from them, of value and of the probabilities.
    of_scores, of_values, scores = _attention(op.shape(1), op.shape(2), op.shape(3))
    return 3 * of_scores + 2 * of_values, 7 * scores


def _heads_first(shape: Shape) -> Shape:
    """[batch, length, heads, width] → [batch, heads, length, width]."""
    if len(shape) != 4:
        raise Unknown
    return shape[0], shape[2], shape[1], shape[3]


@_counts("_flash_attention_forward", "_efficient_attention_forward", "flash_attn::_flash_attn_forward")
def _forward_attention_heads_last(op: Operation) -> tuple[int, int]:
    lengths = {"_flash_attention_forward": (3, 4), "_efficient_attention_forward": (4, 5)}.get(_bare(op.name), ())
    if any(op.has(at) for at in lengths):
        raise Unknown  # sequences of different lengths, packed: where each one ends is in the data
    of_scores, of_values, scores = _attention(*(_heads_first(op.shape(at)) for at in range(3)))
    return of_scores + of_values, (_SOFTMAX + 1) * scores


@_counts("_flash_attention_backward", "flash_attn::_flash_attn_backward")
def _backward_attention_heads_last(op: Operation) -> tuple[int, int]:
    if "flash_attn" not in op.name and (op.has(6) or op.has(7)):
        raise Unknown
    of_scores, of_values, scores = _attention(*(_heads_first(op.shape(at)) for at in (1, 2, 3)))
    return 3 * of_scores + 2 * of_values, 7 * scores


def _multi_head(query: Shape, key: Shape, value: Shape, heads: int) -> tuple[int, int]:
    """Projections of [batch, length, width] inputs to queries, keys and values, attention, projection of its result."""
    width = query[-1]
    tokens = prod(query[:-1]) + prod(key[:-1]) + prod(value[:-1])

    def split(shape: Shape) -> Shape:
        return shape[0], heads, shape[1], width // heads

    of_scores, of_values, scores = _attention(split(query), split(key), split(value))
    result = prod(query)
    macs = tokens * width * width + of_scores + of_values + result * width
    return macs, tokens * width + (_SOFTMAX + 1) * scores + result


@_counts("_native_multi_head_attention", scalars=True)
def _native_multi_head_attention(op: Operation) -> tuple[int, int]:
    return _multi_head(op.shape(0), op.shape(1), op.shape(2), op.scalar(4))


@_counts("_transformer_encoder_layer_fwd", scalars=True)
def _transformer_encoder_layer(op: Operation) -> tuple[int, int]:
    source, hidden = op.shape(0), op.shape(14)[0]
    tokens, width = prod(source[:-1]), source[-1]
    macs, others = _multi_head(source, source, source, op.scalar(2))
    macs += 2 * tokens * width * hidden
    others += tokens * (2 * hidden + width)  # two biases, the activation
    return macs, others + tokens * width * 2 * (1 + _NORM + 2)  # twice: the residual, and a norm with weight and bias


# Recurrent layers, counted for each token (a step of one sequence): weights · (input, state), then the gates.

_LSTM_GATES = 13  # for each hidden unit: 4 sums, 4 gates, 3 products, 1 sum, 1 tanh
_GRU_GATES = 10  # 2 sums, 2 gates; product, sum, tanh; and 3 to mix old state and new
_RNN_GATES = 2  # a sum and the activation
_GATES = {0: (_RNN_GATES, 1), 1: (_RNN_GATES, 1), 2: (_LSTM_GATES, 4), 3: (_GRU_GATES, 3)}  # by cuDNN's mode; gates


@_counts("mkldnn_rnn_layer", scalars=True)
def _mkldnn_rnn_layer(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    hidden = op.shape(2)[-1]
    biases = 8 if op.scalar(12) else 0
    return tokens * (op.numel(1) + op.numel(2)), tokens * hidden * (_LSTM_GATES + biases)


@_counts("mkldnn_rnn_layer_backward")
def _mkldnn_rnn_layer_backward(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    return 2 * tokens * (op.numel(1) + op.numel(2)), 2 * tokens * op.shape(2)[-1] * _LSTM_GATES


@_counts("_cudnn_rnn", scalars=True)
def _cudnn_rnn(op: Operation) -> tuple[int, int]:
    return _library_rnn(op, mode=op.scalar(6), hidden=op.scalar(7))


@_counts("miopen_rnn", scalars=True)
def _miopen_rnn(op: Operation) -> tuple[int, int]:
    return _library_rnn(op, mode=op.scalar(5), hidden=op.scalar(6))


@_counts("_cudnn_rnn_backward", scalars=True)
def _cudnn_rnn_backward(op: Operation) -> tuple[int, int]:
    macs, others = _library_rnn(op, mode=op.scalar(10), hidden=op.scalar(11))
    return macs * (1 + bool(op.scalar(21)[3])), 2 * others


def _library_rnn(op: Operation, mode: int, hidden: int) -> tuple[int, int]:
    """All layers and directions at once: input, then the list of all weights and biases."""
    tokens = op.numel(0) // op.shape(0)[-1]
    matrices = [shape for shape in op.shapes_of_list(1) if len(shape) == 2]
    biases = [shape for shape in op.shapes_of_list(1) if len(shape) == 1]
    gates, count = _GATES[mode]
    layers = sum(shape[0] == count * hidden for shape in matrices) // 2
    others = layers * gates * hidden + sum(map(prod, biases))
    return tokens * sum(map(prod, matrices)), tokens * others


@_counts("_thnn_fused_lstm_cell")
def _lstm_cell(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) // 4 * (_LSTM_GATES + (8 if op.has(3) else 0))


@_counts("_thnn_fused_lstm_cell_backward_impl")
def _lstm_cell_backward(op: Operation) -> tuple[int, int]:
    return 0, 2 * op.numel(2) * _LSTM_GATES


@_counts("_thnn_fused_gru_cell")
def _gru_cell(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) // 3 * (_GRU_GATES + (6 if op.has(3) else 0))


@_counts("_thnn_fused_gru_cell_backward")
def _gru_cell_backward(op: Operation) -> tuple[int, int]:
    return 0, 2 * op.numel(0) * _GRU_GATES


# Elementwise: so many operations for each element of the result, a function of any kind counting one.

_OF_ONE = """
    abs acos acosh angle arccos arccosh arcsin arcsinh arctan arctanh asin asinh atan atanh ceil celu cos cosh deg2rad
    digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite
    isinf isnan leaky_relu lgamma log log10 log1p log2 log_sigmoid_forward logit mish neg negative rad2deg reciprocal
    relu relu6 round rsqrt sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr special_erfcx
    special_i0e special_i1 special_i1e special_log_ndtr special_ndtri sqrt square tan tanh threshold trunc
"""
_OF_TWO = """
    arctan2 atan2 clamp_max clamp_min copysign div divide elu_backward eq float_power floor_divide fmax fmin fmod ge
    gelu_backward gt hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward heaviside hypot
    isclose ldexp le leaky_relu_backward log_sigmoid_backward logaddexp logaddexp2 logit_backward lt maximum minimum
    mish_backward mul multiply ne nextafter polygamma pow prelu _prelu_kernel remainder rrelu_with_noise
    rrelu_with_noise_backward sigmoid_backward silu_backward softplus_backward softshrink_backward special_xlog1py
    special_zeta tanh_backward threshold_backward true_divide xlogy
"""
_COMPLEX_PRODUCTS = frozenset({"mul", "multiply", "div", "divide", "true_divide", "_foreach_mul", "_foreach_div"})
# None in place of the second operand of these is a tensor that has no shape: a nested one.
_TAKES_TWO = frozenset(("div", "eq", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "pow", "atan2"))


def _elementwise(tensors: int, times: int = 1) -> Formula:
    """``tensors``: how many inputs from the first on make the shape of the result; one more may be where it is put."""

    def formula(op: Operation) -> tuple[int, int]:
        if op.is_missing(0) or (op.is_missing(1) and _bare(op.name) in _TAKES_TWO):
            raise Unknown
        return 0, times * op.broadcast(tensors)

    return formula


@_counts("add", "sub", "subtract", "rsub", ones=True)
def _add(op: Operation) -> tuple[int, int]:
    if op.is_missing(0) or op.is_missing(1):
        raise Unknown
    scaled = len(op) > 2 and op.scalar(2) not in (1, None)
    return 0, (1 + scaled) * op.broadcast(2)


@_counts("_foreach_add", "_foreach_sub", ones=True)
def _foreach_add(op: Operation) -> tuple[int, int]:
    scaled = len(op) > 2 and op.scalar(2) not in (1, None)
    return 0, (1 + scaled) * sum(map(prod, op.shapes_of_list(0)))


def _foreach(times: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, times * sum(map(prod, op.shapes_of_list(0)))

    return formula


for _tensors, _names in ((1, _OF_ONE), (2, _OF_TWO)):
    _counts(*_names.split())(_elementwise(_tensors))
    _counts(*(f"_foreach_{_name}" for _name in _names.split()))(_foreach(1))
_counts("clamp")(_elementwise(3))
_counts("_foreach_clamp")(_foreach(1))
_counts("native_dropout_backward", "_prelu_kernel_backward")(_elementwise(2, times=2))
_counts("addcdiv", "addcmul", "lerp")(_elementwise(3, times=3))
_counts("_foreach_addcdiv", "_foreach_addcmul", "_foreach_lerp")(_foreach(3))
_counts("_foreach_max")(_foreach(1))
_counts("_foreach_norm", "_amp_foreach_non_finite_check_and_unscale")(_foreach(2))


@_counts("native_dropout", "_fused_dropout")
def _dropout(op: Operation) -> tuple[int, int]:
    return 0, 2 * op.numel(0)


@_counts("glu", "glu_backward")
def _glu(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) if op.name.endswith("glu") else 2 * op.numel(1)


# Reductions: so many operations for each element of the input.

_REDUCTIONS = (
    (
        1,
        """amax amin aminmax argmax argmin cummax cummin cumprod cumsum logcumsumexp max mean median min mode nanmedian
        nansum prod sum trace kthvalue topk _cummax_helper _cummin_helper""",
    ),
    (2, "norm linalg_vector_norm"),
    (3, "histc"),
    (4, "logsumexp std std_mean var var_mean"),
    (_SOFTMAX, "_softmax _log_softmax _masked_softmax"),
    (4, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
)


def _reduction(times: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, times * (op.broadcast(2) if op.has(1) and _bare(op.name) in ("max", "min") else op.numel(0))

    return formula


for _times, _names in _REDUCTIONS:
    _counts(*_names.split())(_reduction(_times))


@_counts("dist")
def _dist(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.broadcast(2)


@_counts("sort", "argsort", "msort", scalars=True)
def _sort(op: Operation) -> tuple[int, int]:
    shape = op.shape(0)
    dim = 0
    if _bare(op.name) != "msort":  # where it says whether it is stable, that comes first
        dim = op.scalar(1) if type(op.scalar(1)) is int else op.scalar(2)
    return 0, prod(shape) * (ceil(log2(shape[dim])) if shape and shape[dim] > 1 else 0)


@_counts("searchsorted", "bucketize")
def _searchsorted(op: Operation) -> tuple[int, int]:
    boundaries, values = (1, 0) if _bare(op.name) == "bucketize" else (0, 1)
    return 0, op.numel(values) * ceil(log2(max(op.shape(boundaries)[-1], 2)))


# Normalisation: mean, difference, square, sum, product for each element; one more for a weight, one for a bias.

_NORM = 5


@_counts("native_layer_norm")
def _layer_norm(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (_NORM + op.has(2) + op.has(3))


@_counts("native_group_norm")
def _group_norm(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (_NORM + op.has(1) + op.has(2))


@_counts("_fused_rms_norm", "rms_norm")
def _rms_norm(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (3 + op.has(2))


@_counts("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", scalars=True)
def _batch_norm(op: Operation) -> tuple[int, int]:
    # Without running statistics the overload has no places for them.
    training = op.scalar(5) if type(op.scalar(5)) is bool else op.scalar(3)
    return 0, op.numel(0) * ((_NORM if training else 2) + op.has(1) + op.has(2))


@_counts("_batch_norm_with_update", "_batch_norm_with_update_functional")
def _batch_norm_with_update(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (_NORM + op.has(1) + op.has(2))


@_counts("_native_batch_norm_legit_no_training", "_batch_norm_no_update")
def _batch_norm_without_update(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (2 + op.has(1) + op.has(2))


def _norm_backward(elements: int, mask: tuple[bool, bool, bool], whole: bool = True) -> tuple[int, int]:
    """Gradient of the input (10 an element; 2 where mean and variance were constants), the weight (2), the bias (1)."""
    of_input, of_weight, of_bias = mask
    return 0, elements * ((10 if whole else 2) * of_input + 2 * of_weight + of_bias)


@_counts("native_layer_norm_backward", scalars=True)
def _layer_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(7))


@_counts("native_group_norm_backward", scalars=True)
def _group_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(9))


@_counts("native_batch_norm_backward", scalars=True)
def _batch_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(9), op.scalar(7))


@_counts("batch_norm_backward", scalars=True)
def _any_batch_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(9), op.scalar(7))


@_counts("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _library_batch_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), (True, True, True))


@_counts("batch_norm_stats", "batch_norm_backward_reduce")
def _batch_norm_stats(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.numel(0)


@_counts("batch_norm_elemt")
def _batch_norm_elements(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (2 + op.has(1) + op.has(2))


@_counts("batch_norm_backward_elemt")
def _batch_norm_backward_elements(op: Operation) -> tuple[int, int]:
    return 0, 7 * op.numel(0)


@_counts("_fused_rms_norm_backward", scalars=True)
def _rms_norm_backward(op: Operation) -> tuple[int, int]:
    of_input, of_weight = op.scalar(5)
    return 0, op.numel(0) * (7 * of_input + 2 * of_weight)


@_counts("_weight_norm_interface", "_weight_norm")
def _weight_norm(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.numel(0)


@_counts("_weight_norm_interface_backward")
def _weight_norm_backward(op: Operation) -> tuple[int, int]:
    return 0, 6 * op.numel(1)


# Pooling: one operation for each element of each window.


def _pool(dims: int, average: bool) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        image = op.shape(0)
        kernel = op.sizes(1, dims)
        stride = op.sizes(2, dims) if op.scalar(2) else kernel
        padding = op.sizes(3, dims) if op.scalar(3) is not None else (0,) * dims
        dilation = (1,) * dims if average else op.sizes(4, dims)
        round_up = bool(op.scalar(4 if average else 5))
        windows = 1
        for at in range(dims):
            length = image[at - dims]
            count = _windows(length + 2 * padding[at], kernel[at], stride[at], dilation[at], round_up)
            if round_up and (count - 1) * stride[at] >= length + padding[at]:
                count -= 1  # a window must begin inside the image or its padding on the left
            windows *= count
        return 0, prod(image[:-dims]) * windows * prod(kernel)

    return formula


for _dims in (1, 2, 3):
    _counts(f"avg_pool{_dims}d", scalars=True)(_pool(_dims, average=True))
    _counts(f"max_pool{_dims}d_with_indices", scalars=True)(_pool(_dims, average=False))
_counts("mkldnn_max_pool2d", scalars=True)(_pool(2, average=False))
_counts("mkldnn_max_pool3d", scalars=True)(_pool(3, average=False))
_counts("max_pool1d", scalars=True)(_pool(1, average=False))


def _adaptive_elements(image: Shape, sizes: Shape) -> int:
    """The elements of all windows of adaptive pooling, which may overlap: from ⌊i·n/m⌋ up to ⌈(i+1)·n/m⌉."""
    dims = len(sizes)
    elements = prod(image[:-dims])
    for length, size in zip(image[-dims:], sizes):
        elements *= sum(-(-(at + 1) * length // size) - at * length // size for at in range(size))
    return elements


def _adaptive(dims: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, _adaptive_elements(op.shape(0), op.sizes(1, dims))

    return formula


for _dims in (2, 3):
    _counts(f"_adaptive_avg_pool{_dims}d", f"adaptive_max_pool{_dims}d", scalars=True)(_adaptive(_dims))
_counts("mkldnn_adaptive_avg_pool2d", scalars=True)(_adaptive(2))


@_counts("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _adaptive_backward(op: Operation) -> tuple[int, int]:
    return 0, _adaptive_elements(op.shape(1), op.shape(0)[-_dims_of(op) :])


def _dims_of(op: Operation) -> int:
    """The number of spatial dimensions, which the name of an op tells: ``avg_pool2d_backward``."""
    return next(int(letter) for letter in op.name if letter.isdigit())


@_counts("avg_pool2d_backward", "avg_pool3d_backward", scalars=True)
def _average_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * prod(op.sizes(2, _dims_of(op)))


@_counts(
    "max_pool2d_with_indices_backward",
    "max_pool3d_with_indices_backward",
    "adaptive_max_pool2d_backward",
    "adaptive_max_pool3d_backward",
    "mkldnn_max_pool2d_backward",
    "mkldnn_max_pool3d_backward",
)
def _max_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)


# Interpolation between 2, 4, 8 or 16 neighbours: a product with each, and their sum.

_NEIGHBOURS = {"upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16}


@_counts(*_NEIGHBOURS, scalars=True)
def _upsample(op: Operation) -> tuple[int, int]:
    image, neighbours = op.shape(0), _NEIGHBOURS[_bare(op.name)]
    dims = _dims_of(op)
    sizes = op.scalar(1)
    if sizes is None:  # the overload with factors
        sizes = tuple(int(length * factor) for length, factor in zip(image[-dims:], op.scalar(3)))
    return 0, prod(image[:-dims]) * prod(sizes) * (2 * neighbours - 1)


@_counts(*(f"{name}_backward" for name in _NEIGHBOURS))
def _upsample_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * 2 * _NEIGHBOURS[_bare(op.name).removesuffix("_backward")]


@_counts(*(f"upsample_nearest{dims}d_backward" for dims in (1, 2, 3)))
@_counts(*(f"_upsample_nearest_exact{dims}d_backward" for dims in (1, 2, 3)))
def _nearest_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)


@_counts("grid_sampler_2d", "grid_sampler_3d", scalars=True)
def _grid_sampler(op: Operation) -> tuple[int, int]:
    image, grid = op.shape(0), op.shape(1)
    neighbours = {0: 2 ** _dims_of(op), 1: 0, 2: 16}[op.scalar(2)]
    return 0, prod(grid[:-1]) * image[1] * max(2 * neighbours - 1, 0)


# Losses, as their definitions read; a sum or mean at the end is one operation an element.


@_counts("mse_loss", scalars=True)
def _mse_loss(op: Operation) -> tuple[int, int]:
    return 0, op.broadcast(2) * (2 + bool(op.scalar(2)))


@_counts("smooth_l1_loss", "huber_loss", scalars=True)
def _huber_loss(op: Operation) -> tuple[int, int]:
    return 0, op.broadcast(2) * (5 + bool(op.scalar(2)))


@_counts("binary_cross_entropy", scalars=True)
def _binary_cross_entropy(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (6 + op.has(2) + bool(op.scalar(3)))


@_counts("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def _difference_backward(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.numel(1)


@_counts("binary_cross_entropy_backward")
def _binary_cross_entropy_backward(op: Operation) -> tuple[int, int]:
    return 0, 5 * op.numel(1)


@_counts("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * (1 + op.has(2))


@_counts("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2)


# Sums into places.


@_counts("embedding_dense_backward", "embedding_backward")
def _embedding_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)


@_counts("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@_counts("_embedding_bag_dense_backward")
def _embedding_bag_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@_counts("index_add", "index_reduce")
def _index_add(op: Operation) -> tuple[int, int]:
    return 0, op.numel(3)


@_counts("scatter_add", "scatter_reduce")
def _scatter_add(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2)  # of the source as much as there are places


@_counts("index_put", "_index_put_impl", "_unsafe_index_put", ones=True)
def _index_put(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2) if op.scalar(3) else 0  # what the indices are is not recorded


@_counts("col2im", "unfold_backward")
@_counts(*(f"{pad}_pad{dims}d_backward" for pad in ("reflection", "replication") for dims in (1, 2, 3)))
def _col2im(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)


# Distances, transforms and factorisations (counts of LAPACK Working Note 41; FFT 5·n·log₂n, FFTW's measure).


@_counts("_cdist_forward")
def _cdist(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    return 0, 3 * prod(_broadcast([first[:-2], second[:-2]])) * first[-2] * second[-2] * first[-1]


@_counts("_pdist_forward")
def _pdist(op: Operation) -> tuple[int, int]:
    rows, width = op.shape(0)
    return 0, 3 * rows * (rows - 1) // 2 * width


@_counts("_fft_c2c", "_fft_r2c", "_fft_c2r", scalars=True)
def _fft(op: Operation) -> tuple[int, int]:
    shape = list(op.shape(0))
    dims = op.sizes(1, 1)
    kind = _bare(op.name)
    if kind == "_fft_c2r":
        shape[dims[-1]] = op.scalar(3)
    points = prod(shape[dim] for dim in dims)
    flops = 5 * prod(shape) * log2(points) if points > 1 else 0
    if kind != "_fft_c2c":
        flops /= 2  # half of the result of a real signal mirrors the other half
    return 0, round(flops) // (2 if op.is_complex else 1)  # these count real operations already


def _factorisation(cubic: float, batch_at: int = 0) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        shape = op.shape(batch_at)
        return 0, round(prod(shape[:-2]) * cubic * shape[-1] ** 3)

    return formula


_counts("linalg_cholesky_ex", "cholesky")(_factorisation(1 / 3))
_counts("_linalg_det", "_linalg_slogdet")(_factorisation(2 / 3))
_counts("linalg_inv_ex")(_factorisation(2))


@_counts("linalg_lu_factor_ex")
def _lu(op: Operation) -> tuple[int, int]:
    *batch, rows, columns = op.shape(0)
    short = min(rows, columns)
    products = rows * columns * short - (rows + columns) * short**2 / 2 + short**3 / 3
    return 0, round(2 * prod(batch) * products)


@_counts("_linalg_solve_ex")
def _solve(op: Operation) -> tuple[int, int]:
    matrix, right = op.shape(0), op.shape(1)
    columns = right[-1] if len(right) == len(matrix) else 1
    return 0, round(prod(matrix[:-2]) * (2 / 3 * matrix[-1] ** 3 + 2 * matrix[-1] ** 2 * columns))


@_counts("linalg_solve_triangular", "triangular_solve")
def _solve_triangular(op: Operation) -> tuple[int, int]:
    matrix, right = (1, 0) if _bare(op.name) == "triangular_solve" else (0, 1)
    return 0, op.numel(right) * op.shape(matrix)[-1]


@_counts("linalg_cross", "cross")
def _cross(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.broadcast(2)


# Steps of fused optimizers, for each parameter.


@_counts("_fused_sgd", ones=True)
def _sgd(op: Operation) -> tuple[int, int]:
    each = 2 + 2 * bool(op.scalar(3))
    if op.scalar(4):  # momentum, with its dampening and Nesterov's step
        each += 2 + bool(op.scalar(6)) + 2 * bool(op.scalar(7))
    return 0, each * sum(map(prod, op.shapes_of_list(0)))


@_counts("_fused_adam", "_fused_adamw", ones=True)
def _adam(op: Operation) -> tuple[int, int]:
    # Both moments (3 + 4), the root with its correction and epsilon (3), the step (3); weight decay; AMSGrad's maximum.
    decay = (1 if "adamw" in op.name else 2) if op.scalar(9) else 0
    return 0, (13 + decay + bool(op.scalar(11))) * sum(map(prod, op.shapes_of_list(0)))


@_counts("_fused_adagrad")
def _adagrad(op: Operation) -> tuple[int, int]:
    return 0, 7 * sum(map(prod, op.shapes_of_list(0)))
