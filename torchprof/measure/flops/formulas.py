"""Formulas: the work of an op from its recorded inputs. docs/flops.md lists op → formula → source.

A formula returns (multiply-accumulates, other floating-point operations): FLOPs = 2 · MACs + the others. It raises
``Unknown`` if the recorded inputs do not determine the work. A complex multiply-accumulate is four real ones. An
operation on only integers or booleans is not a floating-point operation. These files do not import torch.
"""

from __future__ import annotations

from torchprof.measure.flops import (  # noqa: F401 - each registers its formulas when it is imported
    elementwise,
    products,
    reductions,
)
from torchprof.measure.flops.operation import detail_of, formula_of, operators_with_formula, work_of

__all__ = ["detail_of", "formula_of", "operators_with_formula", "work_of"]
