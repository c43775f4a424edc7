"""Kernels of NCCL, as frames of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchprof.run.collectives import signature_of
from torchprof.run.words import Frame, FrameKind

ALL_REDUCE: dict[str, Any] = {
    "Collective name": "allreduce",
    "In msg nelems": 2048,
    "Out msg nelems": 2048,
    "Group size": 2,
    "dtype": "Float",
    "In split size": "[]",
    "Out split size": "[]",
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
    "Process Group Ranks": "[0, 1]",
}

NCCL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevComm*, unsigned long, ncclWork*)"


def kernel(args: Mapping[str, Any] | None = None, name: str = NCCL) -> Frame:
    return Frame(FrameKind.KERNEL, name, signature_of(args or {}))
