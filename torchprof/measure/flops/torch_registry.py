"""Formulas in torch's registry, with those that users add with ``@register_flop_formula``.

They are called as ``FlopCounterMode`` calls them: with the arguments of the op and its result. Here these are meta
tensors, made from the recorded signature; nothing is computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
from torch.utils import _python_dispatch
from torch.utils.flop_counter import flop_registry

from torchprof.attribute.events import Detail
from torchprof.measure.flops.operation import Work, detail_of, formula_of
from torchprof.run.torch_names import DTYPES
from torchprof.run.words import Signature

_TORCHS_OWN = "torch.utils.flop_counter"
_outside_of_modes: Callable[[], AbstractContextManager[Any]] = getattr(
    _python_dispatch, "_disable_current_modes", nullcontext
)
_DTYPES = {recorded: dtype.name for dtype in DTYPES for recorded in dtype.recorded}


def registered_formula(name: str) -> Callable[..., Any] | None:
    """The registered formula of an op by its name in a profile (``mine::scan``); None if there is none."""
    packet = _packet(name)
    if packet is None:
        return None
    formula: Callable[..., Any] | None = flop_registry.get(packet)
    if formula is None:  # torch 2.4 registers each overload
        formula = next(filter(None, (flop_registry.get(getattr(packet, each)) for each in packet.overloads())), None)
    return formula


def has_users_formula(name: str) -> bool:
    """Whether the registered formula of an op is a user's, and not torch's."""
    formula = registered_formula(name)
    return formula is not None and getattr(formula, "__module__", None) != _TORCHS_OWN


def has_formula(name: str) -> bool:
    """Whether an op is counted if its shapes are recorded."""
    return formula_of(name) is not None or registered_formula(name) is not None


def detail_for(name: str, least: Detail) -> Detail:
    """How much of an op's inputs to read; ``least`` if they do not count."""
    if has_users_formula(name):
        return Detail.SCALARS
    if does_no_arithmetic(name) or "::" not in name:
        return least
    if formula_of(name) is None and registered_formula(name) is not None:
        return Detail.SCALARS
    return detail_of(name)


def registered_work(name: str, signature: Signature) -> Work | None:
    """The work of one call by the registered formula; None if the formula fails.

    torch's registry counts two FLOPs for each multiply-accumulate and nothing else, so the MACs are half of the FLOPs.
    For an op that does not run on the meta device, the formula gets None as the result.
    """
    packet, formula = _packet(name), registered_formula(name)
    if packet is None or formula is None:
        return None
    for overload in packet.overloads():
        op = getattr(packet, overload)
        try:
            args, kwargs = _arguments(op._schema, signature)
        except (AttributeError, KeyError, TypeError, ValueError, RuntimeError):
            continue  # the inputs are those of another overload
        result = None
        with suppress(Exception), torch.no_grad(), _outside_of_modes():
            result = op(*args, **kwargs)
        try:
            flops = int(formula(*args, **kwargs, out_val=result))
        except Exception:  # the user's code
            continue
        return Work(flops // 2, flops)
    return None


_IMPLICIT, _EXPLICIT = "CompositeImplicitAutograd", "CompositeExplicitAutograd"


def calls_only_ops(name: str) -> bool:
    """Whether an op is defined by the ops that it calls, and has no kernel on any device."""
    return _all_overloads(name, (_IMPLICIT,)) is True


def is_made_of_ops(name: str) -> bool:
    """Whether the ops that an op calls are all its work. It is known for torch's ops, and assumed for all others."""
    return not name.startswith("aten::") or _all_overloads(name, (_IMPLICIT, _EXPLICIT)) is not False


def _all_overloads(name: str, keys: Sequence[str]) -> bool | None:
    """Whether all overloads of an op, except those with ``out=``, have a kernel under one of these dispatch keys.

    None for an op that this version of torch does not have.
    """
    packet = _packet(name)
    has_kernel: Any = getattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", None)
    has_formula = None
    for overload in packet.overloads() if packet is not None and has_kernel is not None else ():
        full = name if overload == "default" else f"{name}.{overload}"
        with suppress(RuntimeError):  # an overload that exists only in TorchScript
            if not overload.endswith("out"):
                has_formula = has_formula is not False and any(has_kernel(full, key) for key in keys)
    return has_formula


def operator_of(name: str, overload: str) -> Any:
    """An operator by its name in a profile; None if this torch does not have it."""
    return getattr(_packet(name), overload, None)


def _packet(name: str) -> Any:
    namespace, _, op = name.rpartition("::")
    if not namespace:
        return None
    try:
        return getattr(getattr(torch.ops, namespace), op)
    except (AttributeError, RuntimeError):
        return None


def _arguments(schema: Any, signature: Signature) -> tuple[list[Any], dict[str, Any]]:
    """Meta tensors and scalars for one call. Raises ``ValueError`` if the signature does not fit the schema."""
    given = itertools.zip_longest(signature.shapes, signature.dtypes, signature.scalars)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    if len(signature.dtypes) > len(schema.arguments):
        raise ValueError
    for argument, (shape, dtype, scalar) in zip(schema.arguments, given):
        value: Any = scalar
        is_tensor = "Tensor" in str(argument.type)
        if dtype == "TensorList":
            value = [torch.empty(each, device="meta") for each in shape]
        elif dtype not in ("", "Scalar", "ScalarList"):
            value = torch.empty(shape, dtype=getattr(torch, _DTYPES[dtype]), device="meta")
        if is_tensor != (isinstance(value, torch.Tensor) or dtype == "TensorList") and value is not None:
            raise ValueError
        if value is None:
            value = argument.default_value  # strings are not recorded
        if isinstance(value, tuple):
            value = list(value)
        if argument.kwarg_only:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


# The ops that do no floating-point arithmetic. They count 0; an op without a formula that is not here is uncounted.
#
# These are views, moves, new tensors, random numbers, selection, logic, queries, and communication between processes.
# This file does not import torch.

_OPS = """
_amp_update_scale _assert_async _assert_scalar _assert_tensor_metadata _cast_Byte _cast_Float _cast_Half _chunk_cat
_coalesce _coalesced _conj _conj_physical _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo
_copy_from _copy_from_and_resize _cudnn_init_dropout_state _cudnn_rnn_flatten_weight _dim_arange
_efficientzerotensor _fill_mem_eff_dropout_mask _foreach_clone _foreach_copy _foreach_zero _functional_assert_async
_functional_assert_scalar _fused_sdp_choice _fw_primal _has_compatible_shallow_copy_type _has_same_storage_numel
_indices _is_all_true _is_any_true _is_zerotensor _jagged_to_padded_dense_forward _lazy_clone _linalg_check_errors
_local_scalar_dense _make_dual _make_per_tensor_quantized_tensor _mkldnn_reshape _mkldnn_transpose _neg_view
_nested_from_padded _nested_get_jagged_dummy _nested_get_lengths _nested_get_max_seqlen _nested_get_min_seqlen
_nested_get_offsets _nested_get_ragged_idx _nested_get_values _nested_select_backward _nested_tensor_from_mask
_nested_tensor_from_mask_left_aligned _nested_tensor_from_tensor_list _nested_tensor_size
_nested_tensor_storage_offsets _nested_tensor_strides _nested_view_from_buffer _nested_view_from_jagged _nnz
_pack_padded_sequence _pack_padded_sequence_backward _pad_circular _pad_enum _pad_packed_sequence
_padded_dense_to_jagged_forward _pin_memory _reshape_alias _reshape_copy _reshape_from_tensor _resize_output
_shape_as_tensor _sparse_broadcast_to _sparse_compressed_tensor_unsafe _sparse_coo_tensor_with_dims
_sparse_coo_tensor_with_dims_and_tensors _stack _to_copy _to_cpu _to_dense _to_sparse _to_sparse_csr _unique
_unique2 _unpack_dual _unsafe_index _unsafe_masked_index _unsafe_view _upsample_nearest_exact1d
_upsample_nearest_exact2d _upsample_nearest_exact3d _use_cudnn_ctc_loss _use_cudnn_rnn_flatten_weight
_validate_sparse_coo_tensor_args _values _version adjoint alias alias_copy all any arange argwhere as_strided
as_strided_copy as_strided_scatter atleast_1d atleast_2d atleast_3d bernoulli bincount binomial bitwise_and
bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor block_diag broadcast_in_dim
broadcast_tensors broadcast_to can_cast cartesian_prod cat cauchy ccol_indices chalf channel_shuffle chunk clone
coalesce col_indices collapse_view column_stack combinations complex concat concatenate conj conj_physical
constant_pad_nd contiguous convert_element_type copy copy_sparse_to_sparse copy_strided count_nonzero cpu
crow_indices cuda data dense_dim detach detach_copy device device_put diag diag_embed diagflat diagonal
diagonal_backward diagonal_copy diagonal_scatter dsplit dstack embedding empty empty_like empty_permuted
empty_quantized empty_strided equal expand expand_as expand_copy exponential eye fill fill_diagonal flatten
flatten_dense_tensors flip fliplr flipud from_file full full_like gather gcd geometric get_device hash_tensor hsplit
hstack im2col imag index index_copy index_fill index_select indices int_repr iota is_coalesced is_complex is_conj
is_contiguous is_distributed is_floating_point is_inference is_leaf is_neg is_nonzero is_pinned is_same_size
is_set_to is_signed is_vulkan_available isin isneginf isposinf isreal item lift lift_fresh lift_fresh_copy
linalg_diagonal linspace log_normal logical_and logical_not logical_or logical_xor logspace mH mT masked_fill
masked_scatter masked_scatter_backward masked_select masked_select_backward matrix_H max_unpool2d max_unpool3d
meshgrid mkldnn_reorder_conv2d_weight mkldnn_reorder_conv3d_weight moveaxis movedim multinomial nan_to_num narrow
narrow_copy native_channel_shuffle new_empty new_empty_strided new_full new_ones new_zeros nonzero nonzero_numpy
nonzero_static normal normal_functional numel numpy_T one_hot ones ones_like output_nr pad pad_sequence permute
permute_copy pin_memory pixel_shuffle pixel_unshuffle poisson positive promote_types put q_per_channel_axis
q_per_channel_scales q_per_channel_zero_points q_scale q_zero_point qscheme rand rand_like randint randint_like
randn randn_like random randperm range ravel real record_stream reflection_pad1d reflection_pad2d reflection_pad3d
repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d requires_grad reshape reshape_as
resize resize_as resize_as_sparse resolve_conj resolve_neg result_type retain_grad retains_grad roll rot90
row_indices row_stack scalar_tensor scatter select select_backward select_copy select_scatter set set_data size
slice slice_backward slice_copy slice_inverse slice_scatter sparse_compressed_tensor sparse_coo_tensor
sparse_csr_tensor sparse_dim sparse_mask sparse_resize sparse_resize_and_clear split split_copy split_dim
split_with_sizes split_with_sizes_copy squeeze squeeze_copy stack stride swapaxes swapdims sym_is_contiguous
sym_numel sym_size sym_storage_offset sym_stride t t_copy take take_along_dim tensor tensor_split to to_dense
to_dense_backward to_mkldnn_backward to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc
to_sparse_csr transpose transpose_copy tril tril_indices triu triu_indices type_as unbind unbind_copy unflatten
unflatten_dense_tensors unfold unfold_copy uniform unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk
unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_nearest1d upsample_nearest2d
upsample_nearest3d value_selecting_reduction_backward values view view_as view_as_complex view_as_real view_copy
view_of vsplit vstack where zero zeros zeros_like
"""

NO_ARITHMETIC = frozenset(_OPS.split())
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
