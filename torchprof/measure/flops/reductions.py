"""Formulas: normalization."""

from __future__ import annotations

from math import prod

from torchprof.measure.flops.operation import Formula, Operation, Shape, bare, counts, per_element, windows_along

# Normalization, for each element: mean, difference, square, sum, product; one more for a weight, and one for a bias.

NORM = 5


counts("native_layer_norm")(per_element(0, NORM, optional=(2, 3)))
counts("native_group_norm")(per_element(0, NORM, optional=(1, 2)))
counts("_fused_rms_norm", "rms_norm")(per_element(0, 3, optional=(2,)))
counts("_batch_norm_with_update", "_batch_norm_with_update_functional")(per_element(0, NORM, optional=(1, 2)))
counts("_native_batch_norm_legit_no_training", "_batch_norm_no_update")(per_element(0, 2, optional=(1, 2)))
counts("batch_norm_stats", "batch_norm_backward_reduce")(per_element(0, 3))
counts("batch_norm_elemt")(per_element(0, 2, optional=(1, 2)))
counts("batch_norm_backward_elemt")(per_element(0, 7))
counts("_weight_norm_interface", "_weight_norm")(per_element(0, 3))
counts("_weight_norm_interface_backward")(per_element(1, 6))


@counts("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", scalars=True)
def _batch_norm(op: Operation) -> tuple[int, int]:
    # The overload without running statistics has fewer inputs.
    training = op.scalar(5) if type(op.scalar(5)) is bool else op.scalar(3)
    return 0, op.numel(0) * ((NORM if training else 2) + op.has(1) + op.has(2))


def _norm_backward(elements: int, mask: tuple[bool, bool, bool], whole: bool = True) -> tuple[int, int]:
    """For each element: 10 for the gradient of the input (2 if mean and variance are constants), 2 for that of the
    weight, 1 for that of the bias. ``mask``: which of these gradients are computed."""
    of_input, of_weight, of_bias = mask
    return 0, elements * ((10 if whole else 2) * of_input + 2 * of_weight + of_bias)


@counts("native_layer_norm_backward", scalars=True)
def _layer_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(7))


@counts("native_group_norm_backward", scalars=True)
def _group_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(9))


@counts("native_batch_norm_backward", "batch_norm_backward", scalars=True)
def _batch_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), op.scalar(9), op.scalar(7))


@counts("cudnn_batch_norm_backward", "miopen_batch_norm_backward")
def _library_batch_norm_backward(op: Operation) -> tuple[int, int]:
    return _norm_backward(op.numel(0), (True, True, True))


@counts("_fused_rms_norm_backward", scalars=True)
def _rms_norm_backward(op: Operation) -> tuple[int, int]:
    of_input, of_weight = op.scalar(5)
    return 0, op.numel(0) * (7 * of_input + 2 * of_weight)


# Formulas: pooling and resampling.

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
        for dim in range(dims):
            length = image[dim - dims]
            count = windows_along(length + 2 * padding[dim], kernel[dim], stride[dim], dilation[dim], round_up)
            if round_up and (count - 1) * stride[dim] >= length + padding[dim]:
                count -= 1  # a window must begin inside the image or its padding on the left
            windows *= count
        return 0, prod(image[:-dims]) * windows * prod(kernel)

    return formula


for _dims in (1, 2, 3):
    counts(f"avg_pool{_dims}d", scalars=True)(_pool(_dims, average=True))
    counts(f"max_pool{_dims}d_with_indices", scalars=True)(_pool(_dims, average=False))
counts("mkldnn_max_pool2d", scalars=True)(_pool(2, average=False))
counts("mkldnn_max_pool3d", scalars=True)(_pool(3, average=False))
counts("max_pool1d", scalars=True)(_pool(1, average=False))


def _adaptive_elements(image: Shape, sizes: Shape) -> int:
    """The number of elements in all windows of adaptive pooling. Window i is from ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉."""
    dims = len(sizes)
    elements = prod(image[:-dims])
    for length, size in zip(image[-dims:], sizes):
        elements *= sum(-(-(place + 1) * length // size) - place * length // size for place in range(size))
    return elements


def _adaptive(dims: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, _adaptive_elements(op.shape(0), op.sizes(1, dims))

    return formula


for _dims in (2, 3):
    counts(f"_adaptive_avg_pool{_dims}d", f"adaptive_max_pool{_dims}d", scalars=True)(_adaptive(_dims))
counts("mkldnn_adaptive_avg_pool2d", scalars=True)(_adaptive(2))


@counts("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")
def _adaptive_backward(op: Operation) -> tuple[int, int]:
    return 0, _adaptive_elements(op.shape(1), op.shape(0)[-_dims_of(op) :])


def _dims_of(op: Operation) -> int:
    """The number of spatial dimensions, from the name of an op: ``avg_pool2d_backward``."""
    return next(int(letter) for letter in op.name if letter.isdigit())


@counts("avg_pool2d_backward", "avg_pool3d_backward", scalars=True)
def _average_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * prod(op.sizes(2, _dims_of(op)))


for _dims in (2, 3):
    counts(f"max_pool{_dims}d_with_indices_backward", f"adaptive_max_pool{_dims}d_backward")(per_element(0))
    counts(f"mkldnn_max_pool{_dims}d_backward")(per_element(0))


# Interpolation between 2, 4, 8 or 16 neighbors: a product with each, and the sum of the products.

_NEIGHBORS = {"upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16}


@counts(*_NEIGHBORS, scalars=True)
def _upsample(op: Operation) -> tuple[int, int]:
    image, neighbors = op.shape(0), _NEIGHBORS[bare(op.name)]
    dims = _dims_of(op)
    sizes = op.scalar(1)
    if sizes is None:  # the overload with scale factors
        sizes = tuple(int(length * factor) for length, factor in zip(image[-dims:], op.scalar(3)))
    return 0, prod(image[:-dims]) * prod(sizes) * (2 * neighbors - 1)


@counts(*(f"{name}_backward" for name in _NEIGHBORS))
def _upsample_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * 2 * _NEIGHBORS[bare(op.name).removesuffix("_backward")]


for _dims in (1, 2, 3):
    counts(f"upsample_nearest{_dims}d_backward", f"_upsample_nearest_exact{_dims}d_backward")(per_element(0))


@counts("grid_sampler_2d", "grid_sampler_3d", scalars=True)
def _grid_sampler(op: Operation) -> tuple[int, int]:
    image, grid = op.shape(0), op.shape(1)
    neighbors = {0: 2 ** _dims_of(op), 1: 0, 2: 16}[op.scalar(2)]
    return 0, prod(grid[:-1]) * image[1] * max(2 * neighbors - 1, 0)


# Formulas: losses.

# Losses, counted by their definitions. A sum or mean at the end is one operation for each element.


@counts("mse_loss", scalars=True)
def _mse_loss(op: Operation) -> tuple[int, int]:
    return 0, op.broadcast(2) * (2 + bool(op.scalar(2)))


@counts("smooth_l1_loss", "huber_loss", scalars=True)
def _huber_loss(op: Operation) -> tuple[int, int]:
    return 0, op.broadcast(2) * (5 + bool(op.scalar(2)))


@counts("binary_cross_entropy", scalars=True)
def _binary_cross_entropy(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) * (6 + op.has(2) + bool(op.scalar(3)))


counts("nll_loss_forward", "nll_loss2d_forward")(per_element(1, optional=(2,)))
counts("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")(per_element(1, 3))
counts("binary_cross_entropy_backward")(per_element(1, 5))
counts("nll_loss_backward", "nll_loss2d_backward")(per_element(2))
