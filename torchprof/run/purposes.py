"""What work is for, as far as torch's own ranges and calls say it: data loading, the optimizer, copies, waiting."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torchprof.run.words import BACKWARD, LOADING, OPTIMIZER_RANGE, Frame, FrameKind

DATA, OPTIMIZER, COPY, WAIT, GARBAGE, OF_NO_LAYER, OTHER_WORK, NO_OP = PURPOSES = (
    "data",
    "optimizer",
    "copy",
    "wait",
    "gc",
    "backward",
    "other",
    "gap",
)
"""``OF_NO_LAYER`` is backward. ``NO_OP``: no operator ran there, and no range of torch was open."""

WAITING = re.compile(r"(cuda|hip|xpu|musa)\w*Synchronize")
"""The runtime's calls in which the CPU waits for a device."""
COPYING = re.compile(r"(cuda|hip|musa)Memcpy\w*")
"""The runtime's calls that copy."""
BETWEEN_HOST_AND_DEVICE = re.compile(r"Memcpy (HtoD|DtoH)\b.*")
WITHIN_DEVICES = re.compile(r"Memcpy (DtoD|PtoP)\b.*")
"""The copies on the timeline of a device."""


def purpose_of(phase: str, frames: Sequence[Frame]) -> str:
    """What work outside all layers is for: first a wait or a copy, then the phase, then torch's labels around it."""
    if frames and frames[0].kind == FrameKind.GC:
        return GARBAGE
    labels = [frame.name for frame in frames if frame.kind == FrameKind.LABEL]
    if len(labels) < len(frames):
        kind, name, _ = frames[-1]
        if WAITING.fullmatch(name):
            return WAIT
        if (BETWEEN_HOST_AND_DEVICE if kind == FrameKind.KERNEL else COPYING).fullmatch(name):
            return COPY
    if phase == BACKWARD:
        return OF_NO_LAYER
    for label in labels:
        if label.startswith(LOADING):
            return DATA
        if label.startswith(OPTIMIZER_RANGE):
            return OPTIMIZER
    return OTHER_WORK if len(labels) < len(frames) else NO_OP
