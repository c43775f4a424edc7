"""How much arithmetic an op is, from what it was called on. docs/flops.md lists op → formula → source. Knows no torch.

A formula returns multiply-accumulates, and the floating-point operations besides them: FLOPs = 2 · MACs + the others.
It raises ``Unknown`` where the recorded inputs do not tell. A complex multiply-accumulate is four real ones; an
operation on integers or truth values alone is no floating-point operation.
"""

from __future__ import annotations
