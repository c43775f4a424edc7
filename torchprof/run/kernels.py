"""What kind of work a kernel does, by its name: computation, communication or a copy."""

from __future__ import annotations

import re
from enum import Enum
from functools import cache

_COMMUNICATION = re.compile(
    r"(void )?("
    r"nccl|rccl|oneccl|ccl|hccl|msccl|nvshmem|deep_ep::"  # libraries; on ROCm, names begin with nccl, too
    r"|dpsk::((\(anonymous namespace\)|\w+)::)*\w*(dispatch|combine)"  # DeepEP's kernels in DeepSeek's own namespace
    # collectives over memory that devices share: torch's (symmetric memory) and vLLM's
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
    """The three kinds of work of a device."""

    COMPUTING = 0
    COMMUNICATION = 1
    COPYING = 2


@cache
def kind_of_work(name: str) -> KernelWork:
    """The kind of work of a kernel, copy or set with this name.

    - Communication moves data between ranks: kernels of NCCL and similar libraries, including sends and receives, and
      kernels that reduce or gather over memory that devices share.
    - Copies and sets are known by the names that CUDA, ROCm, XPU and MTIA give them.
    - Everything else is computing. This includes kernels that also communicate, and kernels that copy, such as those of
      ``aten::cat``.
    """
    if _COMMUNICATION.fullmatch(name):
        return KernelWork.COMMUNICATION
    return KernelWork.COPYING if _COPY.fullmatch(name) else KernelWork.COMPUTING
