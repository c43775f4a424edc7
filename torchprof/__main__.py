"""``python -m torchprof``."""

import sys

from torchprof.cli import main

sys.exit(main())
