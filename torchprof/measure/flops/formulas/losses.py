"""Formulas: losses."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts, per_element

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
