"""Which ops have been executed when activation checkpointing stops a recompute early: when the last tensor is saved."""

from __future__ import annotations

from torchprof.run.torch_names import FORWARD_ATTENTION, aten

_OPS = """
exp expm1 sqrt rsqrt reciprocal sigmoid tanh tan relu relu_ log_sigmoid_forward _softmax _log_softmax logsumexp
logcumsumexp native_dropout _fused_dropout std prod norm linalg_vector_norm amax amin max min sort topk median mode
kthvalue native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm miopen_batch_norm _fused_rms_norm
_embedding_bag mkldnn_rnn_layer _cudnn_rnn miopen_rnn nll_loss_forward max_pool2d_with_indices
max_pool3d_with_indices adaptive_max_pool2d adaptive_max_pool3d
"""
_SAVES_RESULTS = FORWARD_ATTENTION | aten(_OPS)
"""Ops that save a part of their result for backward. When it is saved, they have been executed (derivatives.yaml)."""


def saves_before(name: str) -> bool:
    """Whether an op saves its tensors for backward before it is executed. A Function saves them afterwards."""
    return "::" in name and name not in _SAVES_RESULTS
