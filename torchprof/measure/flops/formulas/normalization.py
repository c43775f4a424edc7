"""Formulas: normalization."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts, per_element

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
