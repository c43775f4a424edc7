"""One call of an operator, the registry of the formulas that count its work, and the operators that count 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import prod
from typing import Any, NamedTuple

from torchprof.attribute.events import Detail
from torchprof.run.torch_names import NO_TENSORS, VIEWS, without_aten
from torchprof.run.words import Signature

Shape = tuple[int, ...]

_NOT_ONE_TENSOR = frozenset({*NO_TENSORS, "TensorList", "GenericList"})
"""What is recorded as the type of an input that is not a single tensor."""
_FLOATING = frozenset({"float", "double", "TensorList"})
"""The recorded types of floating-point tensors, without those of ``c10::``. A list of tensors has no recorded type."""


class Unknown(Exception):
    """The recorded inputs do not determine the work."""


class Work(NamedTuple):
    """Multiply-accumulates, and all floating-point operations: two for each multiply-accumulate, and the others."""

    macs: int
    flops: int


class Count(NamedTuple):
    """The work of one place, and the number of its calls that are not counted."""

    macs: int
    flops: int
    uncounted: int


class Operation:
    """One call of an op with its recorded inputs: the argument of a formula."""

    def __init__(self, name: str, signature: Signature) -> None:
        self.name = name
        self._shapes, self._dtypes, self._scalars, _ = signature

    def __len__(self) -> int:
        return len(self._dtypes)

    def has(self, index: int) -> bool:
        """Whether an input exists and is a tensor."""
        return index < len(self) and self._dtypes[index] not in _NOT_ONE_TENSOR

    def is_missing(self, index: int) -> bool:
        """Whether an input is None, or a tensor without a shape (a nested tensor)."""
        return index < len(self) and self._dtypes[index] == ""

    def shape(self, index: int) -> Shape:
        """The shape of an input. Raises ``Unknown`` if it is not a tensor, or has no shape (a nested tensor)."""
        if not self.has(index) or self._shapes[index] is None:
            raise Unknown
        shape: Shape = self._shapes[index]
        return shape

    def numel(self, index: int) -> int:
        return prod(self.shape(index))

    def numel_of_list(self, index: int) -> int:
        return sum(map(prod, self.shapes_of_list(index)))

    def shapes_of_list(self, index: int) -> tuple[Shape, ...]:
        """The shapes of a list of tensors. Raises ``Unknown`` if the input is not such a list."""
        if index >= len(self) or self._dtypes[index] != "TensorList" or self._shapes[index] is None:
            raise Unknown
        shapes: tuple[Shape, ...] = self._shapes[index]
        return shapes

    def scalar(self, index: int) -> Any:
        """The value of an input that is not a tensor; None if it was omitted. Raises ``Unknown`` if not recorded."""
        if index >= len(self._scalars):
            raise Unknown
        return self._scalars[index]

    def sizes(self, index: int, dims: int) -> Shape:
        """A list of numbers, one for each of ``dims`` dimensions. A single number counts for all dimensions."""
        value = self.scalar(index)
        if isinstance(value, int):
            value = (value,)
        if not isinstance(value, tuple) or not all(isinstance(size, int) for size in value):
            raise Unknown
        return value * dims if len(value) == 1 else value

    def broadcast(self, count: int) -> int:
        """The number of elements of the broadcast result of the tensors among the first ``count`` inputs."""
        return prod(broadcast([self.shape(index) for index in range(count) if self.has(index)]))

    @property
    def is_complex(self) -> bool:
        return any("complex" in dtype for dtype in self._dtypes)

    @property
    def is_floating(self) -> bool:
        return any(dtype in _FLOATING or dtype.startswith("c10::") for dtype in self._dtypes)

    @property
    def is_quantized(self) -> bool:
        return any("qint" in dtype or "quint" in dtype for dtype in self._dtypes)


# The registry of formulas

Formula = Callable[[Operation], tuple[int, int]]  # returns multiply-accumulates and other floating-point operations
Flops = Callable[[Operation], int]  # a formula without multiply-accumulates: the other operations

FORMULAS: dict[str, Formula] = {}  # by the names of ops, as ``bare`` makes them
_DETAILS: dict[str, Detail] = {}  # how much of the inputs a formula reads, if that is more than shapes
_COMPLEX_PRODUCTS = frozenset({"mul", "multiply", "div", "divide", "true_divide", "_foreach_mul", "_foreach_div"})
"""Products and quotients of complex numbers count as six real operations, all other elementwise ops as two."""


def work_of(operation: Operation) -> Work | None:
    """The work of one call of an op; None if it has no formula or the recorded inputs do not determine the work."""
    formula = formula_of(operation.name)
    if formula is None or operation.is_quantized:
        return None
    try:
        macs, others = formula(operation)
    except (Unknown, ArithmeticError, LookupError, TypeError, ValueError):
        return None  # the op itself rejects such inputs: wrong rank, stride 0
    if operation.is_complex:
        macs, others = 4 * macs, others * (6 if bare(operation.name) in _COMPLEX_PRODUCTS else 2)
    elif not operation.is_floating:
        others = 0
    return Work(macs, 2 * macs + others)


def formula_of(name: str) -> Formula | None:
    """The formula of an op by its name in a profile (``aten::add_``); None if there is none."""
    return FORMULAS.get(bare(name))


def detail_of(name: str) -> Detail:
    """How much of an op's inputs its formula reads."""
    return _DETAILS.get(bare(name), Detail.SHAPES)


def bare(name: str) -> str:
    """The name under which formulas are registered: for torch's ops without namespace and the ``_`` of in-place ops."""
    namespace, _, op = name.rpartition("::")
    if namespace not in ("aten", "prims"):
        return name
    return op if op in FORMULAS else op.removesuffix("_")


def broadcast(shapes: Iterable[Shape]) -> Shape:
    result: list[int] = []
    for shape in shapes:
        result = [1] * (len(shape) - len(result)) + result
        for length in range(1, len(shape) + 1):
            if shape[-length] != 1:
                result[-length] = shape[-length]
    return tuple(result)


def counts(*names: str, scalars: bool = False, ones: bool = False) -> Callable[[Formula], Formula]:
    """Register a function as the formula of these ops.

    ``scalars``: it reads the values of inputs that are not tensors. ``ones``: it only reads which of them are 0 or 1.
    """

    def register(formula: Formula) -> Formula:
        for name in names:
            FORMULAS[name] = formula
            if scalars or ones:
                _DETAILS[name] = Detail.SCALARS if scalars else Detail.ONES
        return formula

    return register


def counts_flops(*names: str, scalars: bool = False, ones: bool = False) -> Callable[[Flops], Flops]:
    """The same for a formula without multiply-accumulates."""

    def register(flops: Flops) -> Flops:
        counts(*names, scalars=scalars, ones=ones)(lambda op: (0, flops(op)))
        return flops

    return register


def per_element(index: int, times: int = 1, optional: Sequence[int] = ()) -> Flops:
    """The formula of ``times`` FLOPs for each element of an input, and one more for each ``optional`` that exists."""
    return lambda op: op.numel(index) * (times + sum(map(op.has, optional)))


def windows_along(length: int, kernel: int, stride: int, dilation: int = 1, round_up: bool = False) -> int:
    """The number of windows along one dimension that is padded to ``length``."""
    free = length - dilation * (kernel - 1) - 1
    return (-(-free // stride) if round_up else free // stride) + 1


# The ops that do no floating-point arithmetic
# Views, moves, new tensors, random numbers, selection, logic, queries, communication. They count 0; others without a
# formula are uncounted. The other views are in ``VIEWS``.

_OPS = """
_amp_update_scale _assert_async _assert_scalar _assert_tensor_metadata _cast_Byte _cast_Float _cast_Half _chunk_cat
_coalesce _coalesced _conj _conj_physical _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _copy_from
_copy_from_and_resize _cudnn_init_dropout_state _cudnn_rnn_flatten_weight _dim_arange _efficientzerotensor
_fill_mem_eff_dropout_mask _foreach_clone _foreach_copy _foreach_zero _functional_assert_async _functional_assert_scalar
_fused_sdp_choice _fw_primal _has_compatible_shallow_copy_type _has_same_storage_numel _indices _is_all_true
_is_any_true _is_zerotensor _jagged_to_padded_dense_forward _lazy_clone _linalg_check_errors _local_scalar_dense
_make_dual _make_per_tensor_quantized_tensor _mkldnn_reshape _mkldnn_transpose _neg_view _nested_from_padded
_nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen _nested_get_offsets
_nested_get_ragged_idx _nested_get_values _nested_select_backward _nested_tensor_from_mask
_nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list _nested_tensor_size _nested_tensor_storage_offsets
_nested_tensor_strides _nested_view_from_buffer _nested_view_from_jagged _nnz _pack_padded_sequence
_pack_padded_sequence_backward _pad_circular _pad_enum _pad_packed_sequence _padded_dense_to_jagged_forward _pin_memory
_reshape_copy _reshape_from_tensor _resize_output _shape_as_tensor _sparse_broadcast_to _sparse_compressed_tensor_unsafe
_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors _stack _to_copy _to_cpu _to_dense _to_sparse
_to_sparse_csr _unique _unique2 _unpack_dual _unsafe_index _unsafe_masked_index _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _use_cudnn_ctc_loss _use_cudnn_rnn_flatten_weight
_validate_sparse_coo_tensor_args _values _version adjoint alias_copy all any arange argwhere as_strided_copy
as_strided_scatter atleast_1d atleast_2d atleast_3d bernoulli bincount binomial bitwise_and bitwise_left_shift
bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag broadcast_in_dim broadcast_tensors broadcast_to
can_cast cartesian_prod cat cauchy ccol_indices chalf channel_shuffle clone coalesce col_indices collapse_view
column_stack combinations complex concat concatenate conj conj_physical constant_pad_nd contiguous convert_element_type
copy copy_sparse_to_sparse copy_strided count_nonzero cpu crow_indices cuda data dense_dim detach detach_copy device
device_put diag diag_embed diagflat diagonal diagonal_backward diagonal_copy diagonal_scatter dsplit dstack embedding
empty empty_like empty_permuted empty_quantized empty_strided equal expand_copy exponential eye fill fill_diagonal
flatten_dense_tensors flip fliplr flipud from_file full full_like gather gcd geometric get_device hash_tensor hsplit
hstack im2col imag index index_copy index_fill index_select indices int_repr iota is_coalesced is_complex is_conj
is_contiguous is_distributed is_floating_point is_inference is_leaf is_neg is_nonzero is_pinned is_same_size is_set_to
is_signed is_vulkan_available isin isneginf isposinf isreal item lift lift_fresh lift_fresh_copy linalg_diagonal
linspace log_normal logical_and logical_not logical_or logical_xor logspace mH mT masked_fill masked_scatter
masked_scatter_backward masked_select masked_select_backward matrix_H max_unpool2d max_unpool3d meshgrid
mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight moveaxis multinomial nan_to_num narrow_copy
native_channel_shuffle new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_numpy nonzero_static
normal normal_functional numel numpy_T one_hot ones ones_like output_nr pad pad_sequence permute_copy pin_memory
pixel_shuffle pixel_unshuffle poisson positive promote_types put q_per_channel_axis q_per_channel_scales
q_per_channel_zero_points q_scale q_zero_point qscheme rand rand_like randint randint_like randn randn_like random
randperm range ravel real record_stream reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave
replication_pad1d replication_pad2d replication_pad3d requires_grad reshape_as resize resize_as resize_as_sparse
resolve_conj resolve_neg result_type retain_grad retains_grad roll rot90 row_indices row_stack scalar_tensor scatter
select_backward select_copy select_scatter set set_data size slice_backward slice_copy slice_inverse slice_scatter
sparse_compressed_tensor sparse_coo_tensor sparse_csr_tensor sparse_dim sparse_mask sparse_resize
sparse_resize_and_clear split_copy split_dim split_with_sizes split_with_sizes_copy squeeze_copy stack stride swapdims
sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride t_copy take take_along_dim tensor tensor_split to
to_dense to_dense_backward to_mkldnn_backward to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc
to_sparse_csr transpose_copy tril tril_indices triu triu_indices type_as unbind_copy unflatten_dense_tensors unfold
unfold_copy uniform unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split
unsafe_split_with_sizes unsqueeze_copy upsample_nearest1d upsample_nearest2d upsample_nearest3d
value_selecting_reduction_backward values view_as_complex view_as_real view_copy view_of vsplit vstack where zero zeros
zeros_like
"""

NO_ARITHMETIC = without_aten(VIEWS).union(_OPS.split())
"""Names of ops, without ``aten::`` or ``prims::``, and without the ``_`` of in-place variants."""
COMMUNICATION = frozenset(
    {"c10d", "_c10d_functional", "c10d_functional", "fsdp", "symm_mem", "nccl", "gloo", "torch.distributed.ddp.reducer"}
)
"""Namespaces of communication. The sums in a reduction are not counted."""


def does_no_arithmetic(name: str) -> bool:
    """Whether an op does no floating-point arithmetic, by its name in a profile (``aten::view``)."""
    namespace, _, op = name.rpartition("::")
    if namespace in ("aten", "prims", ""):
        return op in NO_ARITHMETIC or op.removesuffix("_") in NO_ARITHMETIC
    return namespace in COMMUNICATION
