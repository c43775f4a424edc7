"""What torchprof costs. Each question has a file; ``python -m benchmarks`` runs all of them.

Every figure with a limit is a ratio of two variants that run alternately in one process, so that a slow or busy machine
slows both. Run it in the root folder of the repository. It needs torch and tabulate.
"""

import os

# Without this, torch 2.13 writes two lines to stderr in each profiler session. It must be set before the import.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
