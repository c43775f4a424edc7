"""Formulas: losses."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts

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


@counts("mse_loss_backward", "smooth_l1_loss_backward", "huber_loss_backward")
def _difference_backward(op: Operation) -> tuple[int, int]:
    return 0, 3 * op.numel(1)


@counts("binary_cross_entropy_backward")
def _binary_cross_entropy_backward(op: Operation) -> tuple[int, int]:
    return 0, 5 * op.numel(1)


@counts("nll_loss_forward", "nll_loss2d_forward")
def _nll_loss(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * (1 + op.has(2))


@counts("nll_loss_backward", "nll_loss2d_backward")
def _nll_loss_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2)
