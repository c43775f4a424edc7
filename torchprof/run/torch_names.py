"""torch's operators by family: products, convolutions, attention, elementwise, views, and those of each kind of layer.
Whatever needs a set of operators makes it of these."""

from __future__ import annotations

from collections.abc import Iterable


def aten(names: str) -> frozenset[str]:
    """The names in a profile of some of torch's operators, which spaces separate in ``names``."""
    return frozenset(f"aten::{name}" for name in names.split())


def without_aten(operators: Iterable[str]) -> frozenset[str]:
    """Names of torch's operators without ``aten::``."""
    return frozenset(name.removeprefix("aten::") for name in operators)


FACTORS = {
    "aten::mm": (0, 1),
    "aten::bmm": (0, 1),
    "aten::addmm": (1, 2),
    "aten::_addmm_activation": (1, 2),
    "aten::baddbmm": (1, 2),
}
"""The products of matrices that run as one kernel, with the positions of both matrices among their inputs."""
BATCHED_PRODUCTS = aten("bmm baddbmm")
PRODUCTS_AND_SUMS = aten("addmm baddbmm addmv")
"""Products that are added to their first input."""
PRODUCTS = aten("mm bmm mv") | PRODUCTS_AND_SUMS
"""The products in the graphs of torch.compile."""
CONVOLUTIONS = aten(
    "convolution _convolution convolution_overrideable cudnn_convolution cudnn_convolution_relu "
    "cudnn_convolution_add_relu cudnn_convolution_transpose convolution_backward"
)
SOFTMAX_OPS = aten("softmax _softmax")
FORWARD_ATTENTION = aten(
    "scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable"
)
SAVES_RESULTS = FORWARD_ATTENTION | aten("""
    exp expm1 sqrt rsqrt reciprocal sigmoid tanh tan relu relu_ log_sigmoid_forward _softmax _log_softmax logsumexp
    logcumsumexp native_dropout _fused_dropout std prod norm linalg_vector_norm amax amin max min sort topk median mode
    kthvalue native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _fused_rms_norm
    _embedding_bag mkldnn_rnn_layer _cudnn_rnn miopen_rnn nll_loss_forward max_pool2d_with_indices
    max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
""")
"""Ops that save a part of their result for backward. When it is saved, they have been executed (derivatives.yaml)."""
_ELEMENTWISE = aten("""
    abs add addcdiv addcmul bitwise_and bitwise_not ceil clamp clamp_max clamp_min cos div elu eq erf exp expm1 floor ge
    gelu gt hardswish hardtanh le leaky_relu lerp log log1p logical_and logical_not lt masked_fill maximum minimum mish
    mul ne neg pow reciprocal relu round rsqrt rsub sigmoid sign silu sin softplus sqrt square sub tanh threshold where
""")
ELEMENTWISE = _ELEMENTWISE | {f"{name}_" for name in _ELEMENTWISE}
"""Each element of the result of such an operator depends on one element of each input."""
VIEWS = aten("""
    _reshape_alias _unsafe_view alias as_strided chunk expand expand_as flatten movedim narrow permute reshape select
    slice split squeeze swapaxes t transpose unbind unflatten unsqueeze view view_as
""")
"""Operators that only return a view of a tensor."""
ON_PARAMETERS = aten("""
    _native_multi_head_attention _transformer_encoder_layer_fwd batch_norm bilinear convolution embedding group_norm gru
    layer_norm linear lstm prelu rms_norm
""")
"""Operators that take parameters. A layer that calls one of them itself takes the parameters of a child, or its own."""

OF_LAYERS = {
    "convolution": aten("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d"),
    "linear": aten("linear"),
    "embedding": aten("embedding embedding_bag"),
    "attention": aten("scaled_dot_product_attention"),
    "recurrent": aten("lstm gru rnn_tanh rnn_relu"),
    "batch norm": aten("batch_norm"),
    "layer norm": aten("layer_norm"),
    "group norm": aten("group_norm"),
    "RMS norm": aten("rms_norm"),
    "max pool": aten("max_pool1d max_pool2d max_pool3d"),
    "ReLU": aten("relu"),
    "GELU": aten("gelu"),
    "SiLU": aten("silu"),
}
"""By kind of layer: the operators that only layers call, and never each other."""
INSIDE_LAYERS = {
    "convolution": aten(
        "convolution _convolution _convolution_mode cudnn_convolution miopen_convolution mkldnn_convolution thnn_conv2d"
    ),
    "linear": aten("addmm mm matmul bmm baddbmm einsum bilinear"),
    "embedding": aten("_embedding_bag"),
    "attention": FORWARD_ATTENTION | aten("_native_multi_head_attention"),
    "encoder layer": aten("_transformer_encoder_layer_fwd"),
    "recurrent": aten("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell"),
    "batch norm": aten("_batch_norm_impl_index native_batch_norm cudnn_batch_norm sync_batch_norm"),
    "instance norm": aten("instance_norm"),
    "layer norm": aten("native_layer_norm"),
    "group norm": aten("native_group_norm"),
    "max pool": aten("max_pool2d_with_indices adaptive_max_pool2d"),
    "average pool": aten(
        "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d"
    ),
    "ReLU": aten("clamp_min"),
    "hardswish": aten("hardswish"),
    "softmax": SOFTMAX_OPS | aten("log_softmax"),
}
"""By kind of layer: the operators that these call or that may replace them, and those that other code calls, too."""

FUSED, FOREACH = "aten::_fused_", "aten::_foreach_"
"""Prefixes of the operators in which optimizers update many parameters at once."""
BATCH_NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm")
"""The classes of torch's layers of batch normalization."""

WRAPPERS = {
    "CheckpointWrapper": "_checkpoint_wrapped_module",
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "FullyShardedDataParallel": "_fsdp_wrapped_module",
    "OffloadWrapper": "_checkpoint_wrapped_module",
    "OptimizedModule": "_orig_mod",
}
"""Classes of modules that only wrap another module, and the attribute that holds it. Both are shown as one layer."""
