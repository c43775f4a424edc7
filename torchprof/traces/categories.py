"""The meaning of Kineto's event categories, in all its versions: operators, ranges, runtime calls, device work."""

from __future__ import annotations

from torchprof.traces.columns import DEVICE_WORK, OVERHEAD_EVENTS, RUNTIME_CALLS

OP, RANGE, OP_OR_RANGE, MODULE = "op", "range", "op or range", "module"
SESSION, NO_WORK = "session", ""
MODULE_PREFIX = "nn.Module: "
"""The beginning of the names of modules among the Python functions that ``with_stack=True`` records."""
MTIA_WORK = "mtia_ccp_events"
"""The work of MTIA's command processors: kernels, copies ("dma…"), and waits for each other, with "Sync" in their
names (Holistic Trace Analysis, ``hta/utils/utils.py``)."""
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
    "overhead": OVERHEAD_EVENTS,
}
"""The group of each of Kineto's categories, in all its versions. The categories of runtimes have the names of their
devices: see ``RUNTIMES``. Other categories are not work: copies of ranges on a device's timeline, waits of one stream
for another."""
RUNTIMES = {"cuda": "cuda", "xpu": "xpu", "mtia": "mtia", "musa": "musa", "privateuse1": "privateuse1"}
"""The device kind by the first part of a runtime's category, which ends in ``_runtime`` or ``_driver``. HIP has the
name cuda, as everywhere in torch."""
