"""What torchprof costs: one file for each question, all of them with ``python -m benchmarks``.

Every figure that has a limit is a ratio of two ways that took turns in one process, so that a slow or busy machine
slows both. Run from the top of the repository; needs torch and tabulate.
"""

import os

# torch 2.13 writes two lines to stderr for each profiler session, unless this is set before it is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
