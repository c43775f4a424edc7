"""Formulas: matrix products, convolutions, distances, FFT, linear algebra, recurrent layers and attention."""

from __future__ import annotations

from math import log2, prod

from torchprof.measure.flops import operation
from torchprof.measure.flops.elementwise import NORM, SOFTMAX
from torchprof.measure.flops.operation import Flops, Operation, Shape, Unknown, counts, counts_flops
from torchprof.run.torch_names import FORWARD_ATTENTION, without_aten

# Matrix products
# A bias is one addition for each element of the result.


@counts("mm", "_int_mm", "_scaled_mm", "_weight_int8pack_mm")
def _mm(op: Operation) -> tuple[int, int]:
    (rows, inner), other = op.shape(0), op.shape(1)
    if op.name == "aten::_weight_int8pack_mm":
        other = other[::-1]
    return rows * inner * other[1] if other[0] == inner else 0, 0  # the op rejects shapes that do not fit


@counts("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr")
def _addmm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(1), op.shape(2)
    name = operation.bare(op.name)
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


@counts("bmm")
def _bmm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    return prod(first) * second[-1] if first[-1] == second[-2] else 0, 0


counts("mv", "dot", "vdot")(lambda op: (op.numel(0) if op.shape(0)[-1] == op.shape(1)[-1] else 0, 0))


@counts("_grouped_mm", "_scaled_grouped_mm")
def _grouped_mm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(0), op.shape(1)
    if len(first) == 3 and len(second) == 3:
        return prod(first) * second[-1], 0
    return first[-2] * first[-1] * second[-1], 0  # each row, column or slice of the sum is in exactly one group


@counts("mkldnn::_linear_pointwise", "mkl::_mkl_linear", "mkldnn_linear")
def _packed_linear(op: Operation) -> tuple[int, int]:
    weight = op.shape(1) if op.name != "mkl::_mkl_linear" else op.shape(2)
    macs = op.numel(0) * weight[0]
    bias = 3 if op.name == "mkl::_mkl_linear" else 2
    return macs, macs // weight[1] if op.has(bias) else 0


# Convolutions
# Each element of the result is a sum over the weights of one output channel. If it is transposed, each element of the
# input is multiplied with the weights of one input channel.


def _convolved(op: Operation, *, stride: int, padding: int, dilation: int) -> int:
    """The number of elements of the result. ``stride``, ``padding``, ``dilation``: the indices of these inputs."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    steps, borders, gaps = (op.sizes(index, dims) for index in (stride, padding, dilation))
    windows = 1
    for length, kernel, step, border, gap in zip(image[-dims:], weight[2:], steps, borders, gaps):
        windows *= operation.windows_along(length + 2 * border, kernel, step, gap)
    return prod(image[: -dims - 1]) * weight[0] * windows


@counts("convolution", "_convolution", "convolution_overrideable", scalars=True)
def _convolution(op: Operation) -> tuple[int, int]:
    transposed = op.scalar(6)
    if type(transposed) is not bool:
        raise Unknown
    if transposed:
        result = _transposed(op, op.shape(1)[1] * int(op.scalar(8)), (3, 4, 5, 7)) if op.has(2) else 0
        return op.numel(0) * prod(op.shape(1)[1:]), result
    result = _convolved(op, stride=3, padding=4, dilation=5)
    return result * prod(op.shape(1)[1:]), result if op.has(2) else 0


def _transposed(op: Operation, outputs: int, sizes: tuple[int, int, int, int]) -> int:
    """The number of elements of the result of a transposed convolution with so many output channels. ``sizes``: the
    indices of stride, padding, dilation, and the additional size of the result."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    along = zip(image[-dims:], weight[2:], *(op.sizes(index, dims) for index in sizes))
    result = prod(image[: -dims - 1]) * outputs
    for length, window, stride, padding, dilation, more in along:
        result *= (length - 1) * stride - 2 * padding + dilation * (window - 1) + more + 1
    return result


@counts("mkldnn_convolution", "miopen_convolution", scalars=True)
def _library_convolution(op: Operation) -> tuple[int, int]:
    result = _convolved(op, padding=3, stride=4, dilation=5)
    return result * prod(op.shape(1)[1:]), result if op.has(2) else 0


@counts("mkldnn::_convolution_pointwise", scalars=True)
def _frozen_convolution(op: Operation) -> tuple[int, int]:
    """A convolution with packed weights, and the activation after it."""
    macs, more = _library_convolution(op)
    return macs, more + (macs // prod(op.shape(1)[1:]) if op.scalar(7) != "none" else 0)


@counts("mkldnn::_convolution_transpose_pointwise", scalars=True)
def _frozen_transposed_convolution(op: Operation) -> tuple[int, int]:
    """The packed weights have the output channels first. Not counted: several groups, and an activation."""
    if op.scalar(7) != 1 or op.scalar(8) != "none":
        raise Unknown
    weight = op.shape(1)
    result = _transposed(op, weight[0], (5, 3, 6, 4))
    return op.numel(0) * weight[0] * prod(weight[2:]), result if op.has(2) else 0


@counts("cudnn_convolution", scalars=True)
def _cudnn_convolution(op: Operation) -> tuple[int, int]:
    return _convolved(op, padding=2, stride=3, dilation=4) * prod(op.shape(1)[1:]), 0


@counts("conv_tbc", scalars=True)
def _conv_tbc(op: Operation) -> tuple[int, int]:
    (length, batch, _), (kernel, inner, outer) = op.shape(0), op.shape(1)
    result = (length + 2 * op.scalar(3) - kernel + 1) * batch * outer
    return result * kernel * inner, result


@counts("convolution_backward", scalars=True)
def _convolution_backward(op: Operation) -> tuple[int, int]:
    grad, image, weight = op.shape(0), op.shape(1), op.shape(2)
    forward = prod(image if op.scalar(7) else grad) * prod(weight[1:])
    of_input, of_weight, of_bias = op.scalar(10)
    return forward * (of_input + of_weight), prod(grad) if of_bias else 0


# Distances, Fourier transforms and linear algebra
# Factorizations: counts of LAPACK Working Note 41. FFT: 5·n·log₂n, the count that FFTW uses.


@counts_flops("_cdist_forward")
def _cdist(op: Operation) -> int:
    first, second = op.shape(0), op.shape(1)
    return 3 * prod(operation.broadcast([first[:-2], second[:-2]])) * first[-2] * second[-2] * first[-1]


@counts_flops("_pdist_forward")
def _pdist(op: Operation) -> int:
    rows, width = op.shape(0)
    return 3 * rows * (rows - 1) // 2 * width


@counts_flops("_fft_c2c", "_fft_r2c", "_fft_c2r", scalars=True)
def _fft(op: Operation) -> int:
    shape = list(op.shape(0))
    dims = op.sizes(1, 1)
    kind = operation.bare(op.name)
    if kind == "_fft_c2r":
        shape[dims[-1]] = op.scalar(3)
    points = prod(shape[dim] for dim in dims)
    flops = 5 * prod(shape) * log2(points) if points > 1 else 0
    if kind != "_fft_c2c":
        flops /= 2  # half of the spectrum of a real signal mirrors the other half
    return round(flops) // (2 if op.is_complex else 1)  # the count is in real operations already


def _factorization(cubic: float) -> Flops:
    """The formula of ``cubic`` · n³ FLOPs for each n × n matrix."""

    def flops(op: Operation) -> int:
        shape = op.shape(0)
        return round(prod(shape[:-2]) * cubic * shape[-1] ** 3)

    return flops


counts_flops("linalg_cholesky_ex", "cholesky")(_factorization(1 / 3))
counts_flops("_linalg_det", "_linalg_slogdet")(_factorization(2 / 3))
counts_flops("linalg_inv_ex")(_factorization(2))
counts_flops("linalg_cross", "cross")(lambda op: 3 * op.broadcast(2))


@counts_flops("linalg_lu_factor_ex")
def _lu(op: Operation) -> int:
    *batch, rows, columns = op.shape(0)
    short = min(rows, columns)
    products = rows * columns * short - (rows + columns) * short**2 / 2 + short**3 / 3
    return round(2 * prod(batch) * products)


@counts_flops("_linalg_solve_ex")
def _solve(op: Operation) -> int:
    matrix, right = op.shape(0), op.shape(1)
    columns = right[-1] if len(right) == len(matrix) else 1
    return round(prod(matrix[:-2]) * (2 / 3 * matrix[-1] ** 3 + 2 * matrix[-1] ** 2 * columns))


@counts_flops("linalg_solve_triangular", "triangular_solve")
def _solve_triangular(op: Operation) -> int:
    matrix, right = (1, 0) if operation.bare(op.name) == "triangular_solve" else (0, 1)
    return op.numel(right) * op.shape(matrix)[-1]


# Recurrent layers
# For each token (a step of one sequence): weights · (input, state), then the gates.

_LSTM_GATES = 13  # for each hidden unit: 4 sums, 4 gates, 3 products, 1 sum, 1 tanh
_GRU_GATES = 10  # for each hidden unit: 2 sums, 2 gates; product, sum, tanh; and 3 to mix old state and new
_GATES = {0: (2, 1), 1: (2, 1), 2: (_LSTM_GATES, 4), 3: (_GRU_GATES, 3)}
"""By mode of cuDNN (RNN with ReLU, RNN with tanh, LSTM, GRU): operations for each hidden unit, number of gates."""


@counts("mkldnn_rnn_layer", scalars=True)
def _mkldnn_rnn_layer(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    hidden = op.shape(2)[-1]
    biases = 8 if op.scalar(12) else 0
    return tokens * (op.numel(1) + op.numel(2)), tokens * hidden * (_LSTM_GATES + biases)


@counts("mkldnn_rnn_layer_backward")
def _mkldnn_rnn_layer_backward(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    return 2 * tokens * (op.numel(1) + op.numel(2)), 2 * tokens * op.shape(2)[-1] * _LSTM_GATES


def _library_rnn(op: Operation, mode: int, hidden: int) -> tuple[int, int]:
    """All layers and directions at once. Input 0 is the data, input 1 the list of all weights and biases."""
    tokens = op.numel(0) // op.shape(0)[-1]
    matrices = [shape for shape in op.shapes_of_list(1) if len(shape) == 2]
    biases = [shape for shape in op.shapes_of_list(1) if len(shape) == 1]
    operations, gates = _GATES[mode]
    layers = sum(shape[0] == gates * hidden for shape in matrices) // 2
    others = layers * operations * hidden + sum(map(prod, biases))
    return tokens * sum(map(prod, matrices)), tokens * others


@counts("_cudnn_rnn_backward", scalars=True)
def _cudnn_rnn_backward(op: Operation) -> tuple[int, int]:
    macs, others = _library_rnn(op, mode=op.scalar(10), hidden=op.scalar(11))
    return macs * (1 + bool(op.scalar(21)[3])), 2 * others


counts("_cudnn_rnn", scalars=True)(lambda op: _library_rnn(op, mode=op.scalar(6), hidden=op.scalar(7)))
counts("miopen_rnn", scalars=True)(lambda op: _library_rnn(op, mode=op.scalar(5), hidden=op.scalar(6)))
counts_flops("_thnn_fused_lstm_cell")(lambda op: op.numel(0) // 4 * (_LSTM_GATES + (8 if op.has(3) else 0)))
counts_flops("_thnn_fused_gru_cell")(lambda op: op.numel(0) // 3 * (_GRU_GATES + (6 if op.has(3) else 0)))
counts_flops("_thnn_fused_lstm_cell_backward_impl")(operation.per_element(2, 2 * _LSTM_GATES))
counts_flops("_thnn_fused_gru_cell_backward")(operation.per_element(0, 2 * _GRU_GATES))

# Attention


def _attention(query: Shape, key: Shape, value: Shape) -> tuple[int, int, int]:
    """(multiply-accumulates of Q·Kᵀ, those of scores·V, number of scores) for [*, heads, length, width] inputs.

    Key and value may have fewer heads (grouped queries) and a smaller batch (broadcasting). Masks skip nothing.
    """
    heads = max(query[-3], key[-3], value[-3]) if len(query) > 2 else 1
    batch = prod(operation.broadcast([query[:-3], key[:-3], value[:-3]]))
    scores = batch * heads * query[-2] * key[-2]
    return scores * query[-1], scores * value[-1], scores


def _attend(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    # Each score is scaled, and then part of a softmax.
    of_scores, of_values, scores = _attention(query, key, value)
    return of_scores + of_values, (SOFTMAX + 1) * scores


def _attend_backward(query: Shape, key: Shape, value: Shape) -> tuple[int, int]:
    # The scores again; the gradients of query and key from the scores; the gradients of value and probabilities.
    of_scores, of_values, scores = _attention(query, key, value)
    return 3 * of_scores + 2 * of_values, 7 * scores


counts(*without_aten(FORWARD_ATTENTION))(lambda op: _attend(op.shape(0), op.shape(1), op.shape(2)))
counts(
    "_scaled_dot_product_cudnn_attention_backward",
    "_scaled_dot_product_efficient_attention_backward",
    "_scaled_dot_product_flash_attention_backward",
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    "_scaled_dot_product_fused_attention_overrideable_backward",
)(lambda op: _attend_backward(op.shape(1), op.shape(2), op.shape(3)))


def _heads_first(shape: Shape) -> Shape:
    """[batch, length, heads, width] → [batch, heads, length, width]."""
    if len(shape) != 4:
        raise Unknown
    return shape[0], shape[2], shape[1], shape[3]


@counts("_flash_attention_forward", "_efficient_attention_forward", "flash_attn::_flash_attn_forward")
def _forward_attention_heads_last(op: Operation) -> tuple[int, int]:
    lengths = {"_flash_attention_forward": (3, 4), "_efficient_attention_forward": (4, 5)}
    if any(op.has(index) for index in lengths.get(operation.bare(op.name), ())):
        raise Unknown  # packed sequences: their lengths are in the data, which is not recorded
    return _attend(*(_heads_first(op.shape(index)) for index in range(3)))


@counts("_flash_attention_backward", "flash_attn::_flash_attn_backward")
def _backward_attention_heads_last(op: Operation) -> tuple[int, int]:
    if "flash_attn" not in op.name and (op.has(6) or op.has(7)):
        raise Unknown
    return _attend_backward(*(_heads_first(op.shape(index)) for index in (1, 2, 3)))


def _multi_head(query: Shape, key: Shape, value: Shape, heads: int) -> tuple[int, int]:
    """(MACs, others) for [batch, length, width] inputs: three projections, attention, projection of the result."""
    width = query[-1]
    tokens = prod(query[:-1]) + prod(key[:-1]) + prod(value[:-1])

    def split(shape: Shape) -> Shape:
        return shape[0], heads, shape[1], width // heads

    macs, others = _attend(split(query), split(key), split(value))
    result = prod(query)
    return macs + (tokens + prod(query[:-1])) * width * width, others + tokens * width + result


counts("_native_multi_head_attention", scalars=True)(
    lambda op: _multi_head(op.shape(0), op.shape(1), op.shape(2), op.scalar(4))
)


@counts("_transformer_encoder_layer_fwd", scalars=True)
def _transformer_encoder_layer(op: Operation) -> tuple[int, int]:
    source, hidden = op.shape(0), op.shape(14)[0]
    tokens, width = prod(source[:-1]), source[-1]
    macs, others = _multi_head(source, source, source, op.scalar(2))
    macs += 2 * tokens * width * hidden
    others += tokens * (2 * hidden + width)  # two biases, the activation
    return macs, others + tokens * width * 2 * (1 + NORM + 2)  # twice: the residual, and a norm with weight and bias
