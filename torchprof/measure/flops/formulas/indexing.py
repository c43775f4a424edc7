"""Formulas: embeddings and indexed sums."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts

# Sums at indices.


@counts("embedding_dense_backward", "embedding_backward")
def _embedding_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)


@counts("_embedding_bag", "_embedding_bag_forward_only")
def _embedding_bag(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@counts("_embedding_bag_dense_backward")
def _embedding_bag_backward(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@counts("index_add", "index_reduce")
def _index_add(op: Operation) -> tuple[int, int]:
    return 0, op.numel(3)


@counts("scatter_add", "scatter_reduce")
def _scatter_add(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2)  # as many elements of the source as there are indices


@counts("index_put", "_index_put_impl", "_unsafe_index_put", ones=True)
def _index_put(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2) if op.scalar(3) else 0  # the values of the indices are not recorded


@counts("_unsafe_masked_index_put_accumulate")  # (self, mask, indices, values): of torch.compile
def _masked_index_put(op: Operation) -> tuple[int, int]:
    return 0, op.numel(3)


@counts("col2im", "unfold_backward")
@counts(*(f"{pad}_pad{dims}d_backward" for pad in ("reflection", "replication") for dims in (1, 2, 3)))
def _col2im(op: Operation) -> tuple[int, int]:
    return 0, op.numel(0)
