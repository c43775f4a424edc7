"""Formulas: fused optimizers."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts

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
