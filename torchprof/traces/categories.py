"""What Kineto's categories of events are, in all its versions: operators, ranges, calls of a runtime, device work."""

from __future__ import annotations

from torchprof.traces.columns import DEVICE_WORK, RUNTIME_CALLS

OP, RANGE, OP_OR_RANGE, MODULE = "op", "range", "op or range", "module"
SESSION, NO_WORK = "session", ""
MTIA_WORK = "mtia_ccp_events"
"""What MTIA's command processors did: kernels, copies ("dma…"), and waits for one another, whose names have "Sync" in
them (Holistic Trace Analysis, ``hta/utils/utils.py``)."""
GROUPS = {
    "cpu_op": OP,
    "user_annotation": RANGE,
    "Operator": OP_OR_RANGE,  # until torch 1.12
    "Runtime": RUNTIME_CALLS,
    "kernel": DEVICE_WORK,
    "Kernel": DEVICE_WORK,
    "gpu_memcpy": DEVICE_WORK,
    "Memcpy": DEVICE_WORK,
    "gpu_memset": DEVICE_WORK,
    "Memset": DEVICE_WORK,
    MTIA_WORK: DEVICE_WORK,
    "python_function": MODULE,
    "Python function": MODULE,
    "Trace": SESSION,
}
"""What Kineto's categories hold, in all its versions. Those of runtimes are named after their device: ``RUNTIMES``. All
else is no work: the mirrors of ranges on a device's timeline, a stream's waits for another, the profiler's own."""
RUNTIMES = {"cuda": "cuda", "xpu": "xpu", "mtia": "mtia", "musa": "musa", "privateuse1": "privateuse1"}
"""What the category of a runtime begins with, before ``_runtime`` or ``_driver``, and the kind of its device. HIP calls
itself cuda, there as everywhere in torch."""
