"""Formulas: elementwise operators, reductions and sorting."""

from __future__ import annotations

from math import ceil, log2, prod

from torchprof.measure.flops.operation import Formula, Operation, Unknown, bare, counts, per_element

SOFTMAX = 5  # for each element: maximum, difference, exponential, sum, quotient


# Elementwise operators: operations for each element of the result. A function of any kind counts as one operation.

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
_TAKES_TWO = frozenset(("div", "eq", "ge", "gt", "le", "lt", "maximum", "minimum", "mul", "ne", "pow", "atan2"))


def _elementwise(tensors: int, times: int = 1) -> Formula:
    """The formula of an elementwise operator: ``times`` FLOPs for each element.

    ``tensors``: the number of first inputs that are broadcast to the shape of the result. The input after them may be
    the ``out=`` tensor.
    """

    def formula(op: Operation) -> tuple[int, int]:
        if op.is_missing(0) or (op.is_missing(1) and bare(op.name) in _TAKES_TWO):
            raise Unknown
        return 0, times * op.broadcast(tensors)

    return formula


@counts("add", "sub", "subtract", "rsub", ones=True)
def _add(op: Operation) -> tuple[int, int]:
    if op.is_missing(0) or op.is_missing(1):
        raise Unknown
    scaled = len(op) > 2 and op.scalar(2) not in (1, None)
    return 0, (1 + scaled) * op.broadcast(2)


@counts("_foreach_add", "_foreach_sub", ones=True)
def _foreach_add(op: Operation) -> tuple[int, int]:
    scaled = len(op) > 2 and op.scalar(2) not in (1, None)
    return 0, (1 + scaled) * op.numel_of_list(0)


def _foreach(times: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, times * op.numel_of_list(0)

    return formula


for _tensors, _names in ((1, _OF_ONE), (2, _OF_TWO)):
    counts(*_names.split())(_elementwise(_tensors))
    counts(*(f"_foreach_{_name}" for _name in _names.split()))(_foreach(1))
counts("clamp")(_elementwise(3))
counts("_foreach_clamp")(_foreach(1))
counts("native_dropout_backward", "_prelu_kernel_backward")(_elementwise(2, times=2))
counts("addcdiv", "addcmul", "lerp")(_elementwise(3, times=3))
counts("_foreach_addcdiv", "_foreach_addcmul", "_foreach_lerp")(_foreach(3))
counts("_foreach_max")(_foreach(1))
counts("native_dropout", "_fused_dropout")(per_element(0, 2))
counts("_foreach_norm", "_amp_foreach_non_finite_check_and_unscale")(_foreach(2))


@counts("glu", "glu_backward")
def _glu(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) if op.name.endswith("glu") else 2 * op.numel(1)


# Reductions: operations for each element of the input.

_REDUCTIONS = (
    (
        1,
        """amax amin aminmax argmax argmin cummax cummin cumprod cumsum logcumsumexp max mean median min mode nanmedian
        nansum prod sum trace kthvalue topk _cummax_helper _cummin_helper""",
    ),
    (2, "norm linalg_vector_norm"),
    (3, "histc"),
    (4, "logsumexp std std_mean var var_mean"),
    (SOFTMAX, "_softmax _log_softmax _masked_softmax"),
    (4, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
)


def _reduction(times: int) -> Formula:
    def formula(op: Operation) -> tuple[int, int]:
        return 0, times * (op.broadcast(2) if op.has(1) and bare(op.name) in ("max", "min") else op.numel(0))

    return formula


for _times, _names in _REDUCTIONS:
    counts(*_names.split())(_reduction(_times))


@counts("dist")
def _dist(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.broadcast(2)


@counts("sort", "argsort", "msort", scalars=True)
def _sort(op: Operation) -> tuple[int, int]:
    shape = op.shape(0)
    dim = 0
    if bare(op.name) != "msort":  # the overload with ``stable`` has it before ``dim``
        dim = op.scalar(1) if type(op.scalar(1)) is int else op.scalar(2)
    return 0, prod(shape) * (ceil(log2(shape[dim])) if shape and shape[dim] > 1 else 0)


@counts("searchsorted", "bucketize")
def _searchsorted(op: Operation) -> tuple[int, int]:
    boundaries, values = (1, 0) if bare(op.name) == "bucketize" else (0, 1)
    return 0, op.numel(values) * ceil(log2(max(op.shape(boundaries)[-1], 2)))


# Formulas: embeddings and indexed sums.

# Sums at indices.


counts("embedding_dense_backward", "embedding_backward", "col2im", "unfold_backward")(per_element(0))
for _dims in (1, 2, 3):
    counts(f"reflection_pad{_dims}d_backward", f"replication_pad{_dims}d_backward")(per_element(0))
counts("index_add", "index_reduce")(per_element(3))
counts("scatter_add", "scatter_reduce")(per_element(2))  # as many elements of the source as there are indices
counts("_unsafe_masked_index_put_accumulate")(per_element(3))  # (self, mask, indices, values): of torch.compile


@counts("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward")
def _embedding_bag(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@counts("index_put", "_index_put_impl", "_unsafe_index_put", ones=True)
def _index_put(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2) if op.scalar(3) else 0  # the values of the indices are not recorded


# Formulas: fused optimizers.

# Steps of fused optimizers: operations for each element of the parameters.


@counts("_fused_sgd", ones=True)
def _sgd(op: Operation) -> tuple[int, int]:
    each = 2 + 2 * bool(op.scalar(3))
    if op.scalar(4):  # momentum, with its dampening and Nesterov's step
        each += 2 + bool(op.scalar(6)) + 2 * bool(op.scalar(7))
    return 0, each * op.numel_of_list(0)


@counts("_fused_adam", "_fused_adamw", ones=True)
def _adam(op: Operation) -> tuple[int, int]:
    # Both moments (3 + 4), the root with its correction and epsilon (3), the step (3); weight decay; AMSGrad's maximum.
    decay = (1 if "adamw" in op.name else 2) if op.scalar(9) else 0
    return 0, (13 + decay + bool(op.scalar(11))) * op.numel_of_list(0)


@counts("_fused_adagrad")
def _adagrad(op: Operation) -> tuple[int, int]:
    return 0, 7 * op.numel_of_list(0)
