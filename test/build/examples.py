"""How many random examples a property test tries: a third on every push, all with ``FULL_EXAMPLES=1``."""

from __future__ import annotations

import os

from hypothesis import settings

SHARE = 1 if os.environ.get("FULL_EXAMPLES") else 3
FEWEST = 15


def examples(count: int) -> settings:
    """The settings of a property test that tries ``count`` examples when all are asked for."""
    return settings(max_examples=max(count // SHARE, min(count, FEWEST)))
