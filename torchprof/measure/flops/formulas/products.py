"""Formulas: matrix products and convolutions."""

from __future__ import annotations

from math import prod

from torchprof.measure.flops.operation import Operation, Unknown, bare, counts, windows_along

# Matrix products. A bias is one addition for each element of the result.


@counts("mm", "_int_mm", "_scaled_mm", "_weight_int8pack_mm")
def _mm(op: Operation) -> tuple[int, int]:
    (rows, inner), other = op.shape(0), op.shape(1)
    if op.name == "aten::_weight_int8pack_mm":
        other = other[::-1]
    return rows * inner * other[1] if other[0] == inner else 0, 0  # the op rejects shapes that do not fit


@counts("addmm", "_addmm_activation", "addbmm", "baddbmm", "addmv", "addr")
def _addmm(op: Operation) -> tuple[int, int]:
    first, second = op.shape(1), op.shape(2)
    name = bare(op.name)
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


@counts("mv", "dot", "vdot")
def _mv(op: Operation) -> tuple[int, int]:
    return op.numel(0) if op.shape(0)[-1] == op.shape(1)[-1] else 0, 0


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


# Convolution. Each element of the result is a sum over the weights of one output channel. If it is transposed, each
# element of the input is multiplied with the weights of one input channel.


def _convolved(op: Operation, *, stride: int, padding: int, dilation: int) -> int:
    """The number of elements of the result. ``stride``, ``padding``, ``dilation``: the indices of these inputs."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    steps, borders, gaps = (op.sizes(index, dims) for index in (stride, padding, dilation))
    windows = 1
    for length, kernel, step, border, gap in zip(image[-dims:], weight[2:], steps, borders, gaps):
        windows *= windows_along(length + 2 * border, kernel, step, gap)
    return prod(image[: -dims - 1]) * weight[0] * windows


@counts("convolution", "_convolution", "convolution_overrideable", scalars=True)
def _convolution(op: Operation) -> tuple[int, int]:
    transposed = op.scalar(6)
    if type(transposed) is not bool:
        raise Unknown
    if transposed:
        return op.numel(0) * prod(op.shape(1)[1:]), _transposed(op) if op.has(2) else 0
    result = _convolved(op, stride=3, padding=4, dilation=5)
    return result * prod(op.shape(1)[1:]), result if op.has(2) else 0


def _transposed(op: Operation) -> int:
    """The number of elements of the result of a transposed convolution."""
    image, weight = op.shape(0), op.shape(1)
    dims = len(weight) - 2
    result = prod(image[: -dims - 1]) * weight[1] * int(op.scalar(8))
    sizes = (op.sizes(index, dims) for index in (3, 4, 5, 7))
    for length, kernel, stride, padding, dilation, more in zip(image[-dims:], weight[2:], *sizes):
        result *= (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + more + 1
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
    image, weight = op.shape(0), op.shape(1)
    result = weight[0] * prod(image[: -len(weight) + 1])
    sizes = (op.sizes(index, len(weight) - 2) for index in (5, 3, 6, 4))
    for length, kernel, stride, padding, dilation, more in zip(image[2:], weight[2:], *sizes):
        result *= (length - 1) * stride - 2 * padding + dilation * (kernel - 1) + more + 1
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
