"""How much arithmetic an op is, from what it was called on. docs/flops.md lists op → formula → source. Knows no torch.

A formula returns multiply-accumulates, and the floating-point operations besides them: FLOPs = 2 · MACs + the others.
It raises ``Unknown`` where the recorded inputs do not tell. A complex multiply-accumulate is four real ones; an
operation on integers or truth values alone is no floating-point operation.
"""

from __future__ import annotations

from torchprof.measure.flops.formulas import (  # each registers its formulas when it is imported
    attention,
    elementwise,
    indexing,
    linear_algebra,
    losses,
    normalization,
    optimizers,
    pooling,
    products,
    recurrent,
)
from torchprof.measure.flops.operation import detail_of, formula_of, operators_with_formula, work_of

__all__ = [
    "attention",
    "detail_of",
    "elementwise",
    "formula_of",
    "indexing",
    "linear_algebra",
    "losses",
    "normalization",
    "operators_with_formula",
    "optimizers",
    "pooling",
    "products",
    "recurrent",
    "work_of",
]
