"""FLOPs: a formula for each operator, and the count of a recording. docs/flops.md lists op → formula → source.

A formula returns (multiply-accumulates, other floating-point operations): FLOPs = 2 · MACs + the others. It raises
``Unknown`` if the recorded inputs do not determine the work. A complex multiply-accumulate is four real ones. An
operation on only integers or booleans is not a floating-point operation. The formulas do not import torch.
"""

from torchprof.measure.flops import elementwise, products  # noqa: F401 - each registers its formulas
