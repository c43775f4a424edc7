"""Formulas: recurrent layers."""

from __future__ import annotations

from math import prod

from torchprof.measure.flops.operation import Operation, counts, per_element

# Recurrent layers. For each token (a step of one sequence): weights · (input, state), then the gates.

_LSTM_GATES = 13  # for each hidden unit: 4 sums, 4 gates, 3 products, 1 sum, 1 tanh
_GRU_GATES = 10  # 2 sums, 2 gates; product, sum, tanh; and 3 to mix old state and new
_RNN_GATES = 2  # a sum and the activation
_GATES = {0: (_RNN_GATES, 1), 1: (_RNN_GATES, 1), 2: (_LSTM_GATES, 4), 3: (_GRU_GATES, 3)}  # mode: operations, gates


@counts("mkldnn_rnn_layer", scalars=True)
def _mkldnn_rnn_layer(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    hidden = op.shape(2)[-1]
    biases = 8 if op.scalar(12) else 0
    return tokens * (op.numel(1) + op.numel(2)), tokens * hidden * (_LSTM_GATES + biases)


@counts("mkldnn_rnn_layer_backward")
def _mkldnn_rnn_layer_backward(op: Operation) -> tuple[int, int]:
    tokens = op.numel(0) // op.shape(0)[-1]
    return 2 * tokens * (op.numel(1) + op.numel(2)), 2 * tokens * op.shape(2)[-1] * _LSTM_GATES


@counts("_cudnn_rnn", scalars=True)
def _cudnn_rnn(op: Operation) -> tuple[int, int]:
    return _library_rnn(op, mode=op.scalar(6), hidden=op.scalar(7))


@counts("miopen_rnn", scalars=True)
def _miopen_rnn(op: Operation) -> tuple[int, int]:
    return _library_rnn(op, mode=op.scalar(5), hidden=op.scalar(6))


@counts("_cudnn_rnn_backward", scalars=True)
def _cudnn_rnn_backward(op: Operation) -> tuple[int, int]:
    macs, others = _library_rnn(op, mode=op.scalar(10), hidden=op.scalar(11))
    return macs * (1 + bool(op.scalar(21)[3])), 2 * others


def _library_rnn(op: Operation, mode: int, hidden: int) -> tuple[int, int]:
    """All layers and directions at once. Input 0 is the data, input 1 the list of all weights and biases."""
    tokens = op.numel(0) // op.shape(0)[-1]
    matrices = [shape for shape in op.shapes_of_list(1) if len(shape) == 2]
    biases = [shape for shape in op.shapes_of_list(1) if len(shape) == 1]
    gates, count = _GATES[mode]
    layers = sum(shape[0] == count * hidden for shape in matrices) // 2
    others = layers * gates * hidden + sum(map(prod, biases))
    return tokens * sum(map(prod, matrices)), tokens * others


@counts("_thnn_fused_lstm_cell")
def _lstm_cell(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) // 4 * (_LSTM_GATES + (8 if op.has(3) else 0))


@counts("_thnn_fused_gru_cell")
def _gru_cell(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0) // 3 * (_GRU_GATES + (6 if op.has(3) else 0))


counts("_thnn_fused_lstm_cell_backward_impl")(per_element(2, 2 * _LSTM_GATES))
counts("_thnn_fused_gru_cell_backward")(per_element(0, 2 * _GRU_GATES))
