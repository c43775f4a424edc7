"""Formulas: embeddings and indexed sums."""

from __future__ import annotations

from torchprof.measure.flops.operation import Operation, counts, per_element

# Sums at indices.


counts("embedding_dense_backward", "embedding_backward", "col2im", "unfold_backward")(per_element(0))
for _dims in (1, 2, 3):
    counts(f"reflection_pad{_dims}d_backward", f"replication_pad{_dims}d_backward")(per_element(0))
counts("index_add", "index_reduce")(per_element(3))
counts("scatter_add", "scatter_reduce")(per_element(2))  # as many elements of the source as there are indices
counts("_unsafe_masked_index_put_accumulate")(per_element(3))  # (self, mask, indices, values): of torch.compile


@counts("_embedding_bag", "_embedding_bag_forward_only", "_embedding_bag_dense_backward")
def _embedding_bag(op: Operation) -> tuple[int, int]:
    return 0, op.numel(1) * op.shape(0)[-1]


@counts("index_put", "_index_put_impl", "_unsafe_index_put", ones=True)
def _index_put(op: Operation) -> tuple[int, int]:
    return 0, op.numel(2) if op.scalar(3) else 0  # the values of the indices are not recorded
