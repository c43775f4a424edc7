"""What kind of work a kernel does, by its name: computation, communication or a copy."""

from __future__ import annotations

import re
from enum import Enum

_COMMUNICATION = re.compile(
    r"(void )?("
    r"nccl|rccl|oneccl|ccl|hccl|msccl|nvshmem|deep_ep::"  # libraries; on ROCm, names begin with nccl, too
    r"|dpsk::((\(anonymous namespace\)|\w+)::)*\w*(dispatch|combine)"  # DeepEP's kernels in DeepSeek's own namespace
    # All-reduce and its like over memory that devices share: torch's own (symmetric memory), and vLLM's.
    r"|(\(anonymous namespace\)::|\w+::)*(((multimem|one_shot|two_shot)_)+(all_)?(reduce|gather)|cross_device_reduce)"
    r").*",
    re.IGNORECASE | re.DOTALL,
)
_COPY = re.compile(
    r"(Mem(cpy|set)\b"  # CUDA, and ROCm and XPU in recent versions of torch
    r"|Copy(Host|Device)To(Host|Device)|FillBuffer|MEMORY_COPY_|__amd_rocclr_(copy|fill)"  # ROCm
    r"|zeCommandListAppendMemory(Copy|Fill)"  # XPU
    r"|dma"  # MTIA, as Holistic Trace Analysis has it (hta/utils/utils.py)
    r").*",
    re.DOTALL,
)


class KernelWork(Enum):
    """What the work of a device is for."""

    COMPUTING = 0
    COMMUNICATION = 1
    COPYING = 2


def kind_of_work(name: str) -> KernelWork:
    """What a kernel, copy or set of that name is for.

    Communication is what moves data between ranks: kernels of NCCL and its like, sends and receives among them, and
    those that reduce or gather over memory that devices share. Copies and sets go by the names that CUDA, ROCm, XPU and
    MTIA give them. All else is computing: also a kernel that does both, and one that copies by computing, as
    ``aten::cat``.
    """
    if _COMMUNICATION.fullmatch(name):
        return KernelWork.COMMUNICATION
    return KernelWork.COPYING if _COPY.fullmatch(name) else KernelWork.COMPUTING
