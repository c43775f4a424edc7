"""The names that torch has for things: its operators by family, wrappers of modules, types of tensors, kernels, and the
ranges that tell what work is for. Whatever needs a set of these names makes it of those here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from enum import Enum
from functools import cache
from typing import NamedTuple

from torchprof.run.words import BACKWARD, LOADING, OPTIMIZER_RANGE, WAITS_FOR_AUTOGRAD, Frame, FrameKind


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
PRODUCT_KERNELS = frozenset({*FACTORS, *CONVOLUTIONS})
"""The operators that call the kernels of matrix products and convolutions."""
CASTS = aten("to _to_copy")
JOINS = aten("cat stack")
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

# Classes of modules

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


# Types of tensors


class Dtype(NamedTuple):
    """A type of tensors, with all names that torch has for it.

    ``name``: of ``torch.float32``, without "torch.". ``scalar_type``: in the arguments of collectives
    (``c10/core/ScalarType.h``). ``nbytes``: of an element. ``short``: in the text of a graph
    (``torch/utils/_dtype_abbrs.py``), "" if unknown. ``recorded``: in the recorded inputs of operators, the compiler's
    name of the C++ type. ``others``: what users may write.
    """

    name: str
    scalar_type: str
    nbytes: int
    short: str
    recorded: tuple[str, ...]
    others: tuple[str, ...] = ()


DTYPES = (
    Dtype("float32", "Float", 4, "f32", ("float",), ("fp32", "float")),
    Dtype("float16", "Half", 2, "f16", ("c10::Half",), ("fp16", "half")),
    Dtype("bfloat16", "BFloat16", 2, "bf16", ("c10::BFloat16",), ("bf16",)),
    Dtype("float64", "Double", 8, "f64", ("double",), ("fp64", "double")),
    Dtype("complex32", "ComplexHalf", 4, "c32", ("c10::complex<c10::Half>",)),
    Dtype("complex64", "ComplexFloat", 8, "c64", ("c10::complex<float>",)),
    Dtype("complex128", "ComplexDouble", 16, "c128", ("c10::complex<double>",)),
    Dtype("int64", "Long", 8, "i64", ("long int", "long")),
    Dtype("int32", "Int", 4, "i32", ("int",)),
    Dtype("int16", "Short", 2, "i16", ("short int", "short")),
    Dtype("int8", "Char", 1, "i8", ("signed char",)),
    Dtype("uint8", "Byte", 1, "u8", ("unsigned char",)),
    Dtype("bool", "Bool", 1, "b8", ("bool",)),
    Dtype("uint16", "UInt16", 2, "u16", ("short unsigned int", "unsigned short")),
    Dtype("uint32", "UInt32", 4, "u32", ("unsigned int",)),
    Dtype("uint64", "UInt64", 8, "u64", ("long unsigned int", "unsigned long")),
    Dtype("float8_e4m3fn", "Float8_e4m3fn", 1, "f8e4m3fn", ("c10::Float8_e4m3fn",)),
    Dtype("float8_e5m2", "Float8_e5m2", 1, "f8e5m2", ("c10::Float8_e5m2",)),
    Dtype("float8_e4m3fnuz", "Float8_e4m3fnuz", 1, "f8e4m3fnuz", ("c10::Float8_e4m3fnuz",)),
    Dtype("float8_e5m2fnuz", "Float8_e5m2fnuz", 1, "f8e5m2fnuz", ("c10::Float8_e5m2fnuz",)),
    Dtype("float8_e8m0fnu", "Float8_e8m0fnu", 1, "f8e8m0fnu", ("c10::Float8_e8m0fnu",)),
    Dtype("qint8", "QInt8", 1, "", ("c10::qint8",)),
    Dtype("quint8", "QUInt8", 1, "", ("c10::quint8",)),
    Dtype("qint32", "QInt32", 4, "", ("c10::qint32",)),
    Dtype("bits8", "Bits8", 1, "", ("c10::bits8",)),
    Dtype("bits16", "Bits16", 2, "", ("c10::bits16",)),
)
"""All types but those that pack several elements into a byte."""
NO_TENSORS = ("", "Scalar", "ScalarList")
"""The names in place of a type for inputs that are not tensors or lists of tensors."""


def recorded_as(*names: str) -> frozenset[str]:
    """The names that types have in recorded inputs; ``names``: as in torch."""
    return frozenset(recorded for dtype in DTYPES if dtype.name in names for recorded in dtype.recorded)


# The work of a kernel

_COMMUNICATION = re.compile(
    r"(void )?("
    r"nccl|rccl|oneccl|ccl|hccl|msccl|nvshmem|deep_ep::"  # libraries; on ROCm, names begin with nccl, too
    r"|dpsk::((\(anonymous namespace\)|\w+)::)*\w*(dispatch|combine)"  # DeepEP's kernels in DeepSeek's own namespace
    # collectives over memory that devices share: torch's (symmetric memory) and vLLM's
    r"|(\(anonymous namespace\)::|\w+::)*(((multimem|one_shot|two_shot)_)+(all_)?(reduce|gather)|cross_device_reduce)"
    r").*",
    re.IGNORECASE | re.DOTALL,
)
_COPY = re.compile(
    r"(Mem(cpy|set)\b"  # CUDA, and ROCm and XPU in recent versions of torch
    r"|Copy(Host|Device)To(Host|Device)|FillBuffer|MEMORY_COPY_|__amd_rocclr_(copy|fill)"  # ROCm
    r"|zeCommandListAppendMemory(Copy|Fill)"  # XPU
    r"|dma"  # MTIA, as Holistic Trace Analysis has it (hta/utils/utils.py)
    r").*",
    re.DOTALL,
)


class KernelWork(Enum):
    """What a kernel does, as far as its name says it."""

    COMPUTING = 0
    COMMUNICATION = 1
    COPYING = 2


@cache
def kind_of_work(name: str) -> KernelWork:
    """The kind of work of a kernel, copy or set with this name. Communication moves data between ranks, or reduces or
    gathers over memory that devices share. Everything that is neither that nor a copy or set is computing, also kernels
    that communicate as well, and kernels that copy, such as those of ``aten::cat``."""
    if _COMMUNICATION.fullmatch(name):
        return KernelWork.COMMUNICATION
    return KernelWork.COPYING if _COPY.fullmatch(name) else KernelWork.COMPUTING


# What work is for, as far as torch's own ranges and calls say it

PURPOSES = ("data", "optimizer", "copy", "wait", "gc", "backward", "other", "awaited", "start", "gap")
DATA, OPTIMIZER, COPY, WAIT, GARBAGE, OF_NO_LAYER, OTHER_WORK, AWAITED, START_UP, NO_OP = PURPOSES
"""``OF_NO_LAYER`` is backward. ``AWAITED``: waiting for other threads or ranks. ``NO_OP``: no operator ran there, and
no range of torch was open."""

LAUNCHING = re.compile(
    r"(?P<launch>(cuda|cu|hip)(Ext)?(Module)?Launch(Cooperative)?Kernel\w*)|(?P<captures>\w+StreamBeginCapture\w*)"
    r"|(?P<captured>\w+StreamEndCapture\w*)"
)
"""The runtime's calls that launch a kernel, and those that begin or end a graph's capture: a launch in it runs none."""
WAITING = re.compile(r"(cuda|hip|xpu|musa)\w*Synchronize")
"""The runtime's calls in which the CPU waits for a device."""
COPYING = re.compile(r"(cuda|hip|musa)Memcpy\w*")
"""The runtime's calls that copy."""
BETWEEN_HOST_AND_DEVICE = re.compile(r"Memcpy (HtoD|DtoH)\b.*")
WITHIN_DEVICES = re.compile(r"Memcpy (DtoD|PtoP)\b.*")
"""The copies on the timeline of a device."""


def purpose_of(phase: str, frames: Sequence[Frame]) -> str:
    """What work outside all layers is for: first a wait or a copy, then the phase, then torch's labels around it."""
    if frames and frames[0].kind in (FrameKind.GC, FrameKind.START_UP):
        return GARBAGE if frames[0].kind == FrameKind.GC else START_UP
    labels = [frame.name for frame in frames if frame.kind == FrameKind.LABEL]
    waits_for = frames[-1].name if frames and frames[-1].kind == FrameKind.WAIT else ""
    is_own_time = len(labels) == len(frames)
    if not is_own_time and not waits_for:
        kind, name, _ = frames[-1]
        if WAITING.fullmatch(name):
            return WAIT
        if (BETWEEN_HOST_AND_DEVICE if kind == FrameKind.KERNEL else COPYING).fullmatch(name):
            return COPY
    if phase == BACKWARD:
        return OF_NO_LAYER
    for label in labels:
        if label.startswith(LOADING):
            return DATA
        if label.startswith(OPTIMIZER_RANGE) and waits_for != WAITS_FOR_AUTOGRAD:  # as in a closure
            return OPTIMIZER
    if waits_for and waits_for != WAITS_FOR_AUTOGRAD:
        return AWAITED
    return NO_OP if is_own_time or waits_for else OTHER_WORK
