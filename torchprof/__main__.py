"""``python -m torchprof``."""

from __future__ import annotations

import sys

from torchprof.cli import main

sys.exit(main())
