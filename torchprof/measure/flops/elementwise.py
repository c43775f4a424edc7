"""Formulas without multiply-accumulates: elementwise, reductions, norms, pooling, losses, optimizers."""

from __future__ import annotations

from math import ceil, log2, prod

from torchprof.measure.flops import operation
from torchprof.measure.flops.operation import Flops, Operation, Shape, counts_flops, per_element

SOFTMAX = 5  # for each element: maximum, difference, exponential, sum, quotient
NORM = 5  # for each element: mean, difference, square, sum, product. One more for a weight, and one for a bias

# Elementwise: operations for each element of the result. A function of any kind counts as one operation.
# In this file, the inputs of an op have the numbers of its schema: of mul(self, other), ``self`` is input 0.

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
# If the second operand of these is None, it is a tensor without a shape: a nested tensor.
_TAKES_TWO = "add sub subtract rsub div mul pow atan2 maximum minimum eq ne ge gt le lt"


def _elementwise(tensors: int, times: int = 1) -> Flops:
    """The formula of ``times`` FLOPs for each element of the result.

    ``tensors``: how many inputs are broadcast to the shape of the result. The one after them may be ``out=``.
    """

    def flops(op: Operation) -> int:
        if op.is_missing(0) or (op.is_missing(1) and operation.bare(op.name) in _TAKES_TWO.split()):
            raise operation.Unknown
        return times * op.broadcast(tensors)

    return flops


def _foreach(times: int) -> Flops:
    """The formula of ``times`` FLOPs for each element of a list of tensors."""
    return lambda op: times * op.numel_of_list(0)


def _terms(op: Operation) -> int:
    """The operations for each element of a sum: one more if ``alpha`` scales the second operand."""
    return 2 if len(op) > 2 and op.scalar(2) not in (1, None) else 1


for _tensors, _names in ((1, _OF_ONE), (2, _OF_TWO)):
    counts_flops(*_names.split())(_elementwise(_tensors))
    counts_flops(*(f"_foreach_{_name}" for _name in _names.split()))(_foreach(1))
counts_flops("add", "sub", "subtract", "rsub", ones=True)(lambda op: _terms(op) * _elementwise(2)(op))
counts_flops("_foreach_add", "_foreach_sub", ones=True)(lambda op: _terms(op) * op.numel_of_list(0))
counts_flops("clamp")(_elementwise(3))
counts_flops("_foreach_clamp", "_foreach_max")(_foreach(1))
counts_flops("native_dropout_backward", "_prelu_kernel_backward")(_elementwise(2, times=2))
counts_flops("addcdiv", "addcmul", "lerp")(_elementwise(3, times=3))
counts_flops("_foreach_addcdiv", "_foreach_addcmul", "_foreach_lerp")(_foreach(3))
counts_flops("native_dropout", "_fused_dropout")(per_element(0, 2))
counts_flops("_foreach_norm", "_amp_foreach_non_finite_check_and_unscale")(_foreach(2))
counts_flops("glu")(per_element(0))
counts_flops("glu_backward")(per_element(1, 2))

# Reductions and sorting: operations for each element of the input.

for _times, _names in (
    (
        1,
        """amax amin aminmax argmax argmin cummax cummin cumprod cumsum logcumsumexp mean median mode nanmedian nansum
        prod sum trace kthvalue topk _cummax_helper _cummin_helper""",
    ),
    (2, "norm linalg_vector_norm"),
    (3, "histc"),
    (4, "logsumexp std std_mean var var_mean"),
    (SOFTMAX, "_softmax _log_softmax _masked_softmax"),
    (4, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
):
    counts_flops(*_names.split())(per_element(0, _times))
counts_flops("max", "min")(lambda op: op.broadcast(2) if op.has(1) else op.numel(0))  # of one tensor, or of two
counts_flops("dist")(lambda op: 3 * op.broadcast(2))


@counts_flops("sort", "argsort", "msort", scalars=True)
def _sort(op: Operation) -> int:
    shape = op.shape(0)
    dim = 0
    if operation.bare(op.name) != "msort":  # the overload with ``stable`` has it before ``dim``
        dim = op.scalar(1) if type(op.scalar(1)) is int else op.scalar(2)
    return prod(shape) * (ceil(log2(shape[dim])) if shape and shape[dim] > 1 else 0)


@counts_flops("searchsorted", "bucketize")
def _searchsorted(op: Operation) -> int:
    boundaries, values = (1, 0) if operation.bare(op.name) == "bucketize" else (0, 1)
    return op.numel(values) * ceil(log2(max(op.shape(boundaries)[-1], 2)))


# Sums at indices

counts_flops("embedding_dense_backward", "embedding_backward", "col2im", "unfold_backward")(per_element(0))
for _dims in (1, 2, 3):
    counts_flops(f"reflection_pad{_dims}d_backward", f"replication_pad{_dims}d_backward")(per_element(0))
counts_flops("index_add", "index_reduce")(per_element(3))
counts_flops("scatter_add", "scatter_reduce")(per_element(2))  # as many elements of the source as there are indices
counts_flops("_unsafe_masked_index_put_accumulate")(per_element(3))  # (self, mask, indices, values): of torch.compile
counts_flops("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward")(
    lambda op: op.numel(1) * op.shape(0)[-1]
)
counts_flops("index_put", "_index_put_impl", "_unsafe_index_put", ones=True)(
    lambda op: op.numel(2) if op.scalar(3) else 0  # the values of the indices are not recorded
)

# Steps of fused optimizers: operations for each element of the parameters


@counts_flops("_fused_sgd", ones=True)
def _sgd(op: Operation) -> int:
    each = 2 + 2 * bool(op.scalar(3))
    if op.scalar(4):  # momentum, with its dampening and Nesterov's step
        each += 2 + bool(op.scalar(6)) + 2 * bool(op.scalar(7))
    return each * op.numel_of_list(0)


@counts_flops("_fused_adam", "_fused_adamw", ones=True)
def _adam(op: Operation) -> int:
    # Both moments (3 + 4), the root with its correction and epsilon (3), the step (3); weight decay; AMSGrad's maximum.
    decay = (1 if "adamw" in op.name else 2) if op.scalar(9) else 0
    return (13 + decay + bool(op.scalar(11))) * op.numel_of_list(0)


counts_flops("_fused_adagrad")(lambda op: 7 * op.numel_of_list(0))

# Normalization

counts_flops("native_layer_norm")(per_element(0, NORM, optional=(2, 3)))
counts_flops("native_group_norm")(per_element(0, NORM, optional=(1, 2)))
counts_flops("_fused_rms_norm", "rms_norm")(per_element(0, 3, optional=(2,)))
counts_flops("_batch_norm_with_update", "_batch_norm_with_update_functional")(per_element(0, NORM, optional=(1, 2)))
counts_flops("_native_batch_norm_legit_no_training", "_batch_norm_no_update")(per_element(0, 2, optional=(1, 2)))
counts_flops("batch_norm_stats", "batch_norm_backward_reduce")(per_element(0, 3))
counts_flops("batch_norm_elemt")(per_element(0, 2, optional=(1, 2)))
counts_flops("batch_norm_backward_elemt")(per_element(0, 7))
counts_flops("_weight_norm_interface", "_weight_norm")(per_element(0, 3))
counts_flops("_weight_norm_interface_backward")(per_element(1, 6))


@counts_flops("native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm", scalars=True)
def _batch_norm(op: Operation) -> int:
    # The overload without running statistics has fewer inputs.
    training = op.scalar(5) if type(op.scalar(5)) is bool else op.scalar(3)
    return op.numel(0) * ((NORM if training else 2) + op.has(1) + op.has(2))


def _norm_backward(op: Operation, mask: tuple[bool, bool, bool], whole: bool = True) -> int:
    """For each element: 10 for the gradient of the input (2 if mean and variance are constants), 2 for that of the
    weight, 1 for that of the bias. ``mask``: which of these gradients are computed."""
    of_input, of_weight, of_bias = mask
    return op.numel(0) * ((10 if whole else 2) * of_input + 2 * of_weight + of_bias)


counts_flops("native_layer_norm_backward", scalars=True)(lambda op: _norm_backward(op, op.scalar(7)))
counts_flops("native_group_norm_backward", scalars=True)(lambda op: _norm_backward(op, op.scalar(9)))
counts_flops("native_batch_norm_backward", "batch_norm_backward", scalars=True)(
    lambda op: _norm_backward(op, op.scalar(9), whole=op.scalar(7))
)
counts_flops("cudnn_batch_norm_backward", "miopen_batch_norm_backward")(per_element(0, 13))


@counts_flops("_fused_rms_norm_backward", scalars=True)
def _rms_norm_backward(op: Operation) -> int:
    of_input, of_weight = map(bool, op.scalar(5))
    return op.numel(0) * (7 * of_input + 2 * of_weight)


# Pooling: one operation for each element of each window


@counts_flops("avg_pool1d", "avg_pool2d", "avg_pool3d", "max_pool1d", scalars=True)
@counts_flops(*(f"max_pool{dims}d_with_indices" for dims in (1, 2, 3)), scalars=True)
@counts_flops("mkldnn_max_pool2d", "mkldnn_max_pool3d", scalars=True)
def _pool(op: Operation) -> int:
    """The inputs are image, kernel, stride, padding, the dilation of a maximum, and whether to round up. Example: an
    image of 4 x 4, with a kernel of 2 x 2 and a stride of 2, has 4 windows of 4 elements: 16 FLOPs."""
    dims, average = _dims_of(op), "avg" in op.name
    image = op.shape(0)
    kernel = op.sizes(1, dims)
    stride = op.sizes(2, dims) if op.scalar(2) else kernel
    padding = op.sizes(3, dims) if op.scalar(3) is not None else (0,) * dims
    dilation = (1,) * dims if average else op.sizes(4, dims)
    round_up = bool(op.scalar(4 if average else 5))
    windows = 1
    for dim in range(dims):
        length = image[dim - dims]
        count = operation.windows_along(length + 2 * padding[dim], kernel[dim], stride[dim], dilation[dim], round_up)
        if round_up and (count - 1) * stride[dim] >= length + padding[dim]:
            count -= 1  # a window must begin inside the image or its padding on the left
        windows *= count
    return prod(image[:-dims]) * windows * prod(kernel)


def _adaptive(image: Shape, sizes: Shape) -> int:
    """The number of elements in all windows of adaptive pooling. Along a dimension of n elements, window i of m is from
    ⌊i·n/m⌋ to ⌈(i+1)·n/m⌉."""
    dims = len(sizes)
    elements = prod(image[:-dims])
    for length, size in zip(image[-dims:], sizes):
        elements *= sum(-(-(place + 1) * length // size) - place * length // size for place in range(size))
    return elements


def _dims_of(op: Operation) -> int:
    """The number of spatial dimensions, from the name of an op: ``avg_pool2d_backward``."""
    return next(int(letter) for letter in op.name if letter.isdigit())


for _dims in (2, 3):
    counts_flops(f"max_pool{_dims}d_with_indices_backward", f"adaptive_max_pool{_dims}d_backward")(per_element(0))
    counts_flops(f"mkldnn_max_pool{_dims}d_backward")(per_element(0))
counts_flops("avg_pool2d_backward", "avg_pool3d_backward", scalars=True)(
    lambda op: op.numel(0) * prod(op.sizes(2, _dims_of(op)))
)
counts_flops("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward")(
    lambda op: _adaptive(op.shape(1), op.shape(0)[-_dims_of(op) :])
)


@counts_flops("_adaptive_avg_pool2d", "_adaptive_avg_pool3d", "mkldnn_adaptive_avg_pool2d", scalars=True)
@counts_flops("adaptive_max_pool2d", "adaptive_max_pool3d", scalars=True)
def _adaptive_pool(op: Operation) -> int:
    return _adaptive(op.shape(0), op.sizes(1, _dims_of(op)))


# Interpolation between 2, 4, 8 or 16 neighbors: a product with each, and the sum of the products

_NEIGHBORS = {"upsample_linear1d": 2, "upsample_bilinear2d": 4, "upsample_trilinear3d": 8, "upsample_bicubic2d": 16}


@counts_flops(*_NEIGHBORS, scalars=True)
def _upsample(op: Operation) -> int:
    image, neighbors = op.shape(0), _NEIGHBORS[operation.bare(op.name)]
    dims = _dims_of(op)
    sizes: Shape | None = op.scalar(1)
    if sizes is None:  # the overload with scale factors
        sizes = tuple(int(length * factor) for length, factor in zip(image[-dims:], op.scalar(3)))
    return prod(image[:-dims]) * prod(sizes) * (2 * neighbors - 1)


for _name, _count in _NEIGHBORS.items():
    counts_flops(f"{_name}_backward")(per_element(0, 2 * _count))
for _dims in (1, 2, 3):
    counts_flops(f"upsample_nearest{_dims}d_backward", f"_upsample_nearest_exact{_dims}d_backward")(per_element(0))


@counts_flops("grid_sampler_2d", "grid_sampler_3d", scalars=True)
def _grid_sampler(op: Operation) -> int:
    image, grid = op.shape(0), op.shape(1)
    neighbors: int = {0: 2 ** _dims_of(op), 1: 0, 2: 16}[op.scalar(2)]
    return prod(grid[:-1]) * image[1] * max(2 * neighbors - 1, 0)


# Losses, counted by their definitions. A sum or mean at the end is one operation for each element.

counts_flops("mse_loss", scalars=True)(lambda op: op.broadcast(2) * (2 + bool(op.scalar(2))))
counts_flops("smooth_l1_loss", "huber_loss", scalars=True)(lambda op: op.broadcast(2) * (5 + bool(op.scalar(2))))
counts_flops("binary_cross_entropy", scalars=True)(lambda op: op.numel(0) * (6 + op.has(2) + bool(op.scalar(3))))
counts_flops("nll_loss_forward", "nll_loss2d_forward")(per_element(1, optional=(2,)))
counts_flops("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")(per_element(1, 3))
counts_flops("binary_cross_entropy_backward")(per_element(1, 5))
counts_flops("nll_loss_backward", "nll_loss2d_backward")(per_element(2))
