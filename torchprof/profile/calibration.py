"""The time that one label takes, measured right after a recording."""

from __future__ import annotations

import threading
import time
from weakref import ref

from torch import nn

from torchprof.record.labels import Labels, Target, label_of
from torchprof.record.session import Session, is_profiled

_BLOCKS, _CALLS = 10, 20
_calibration = threading.Lock()
_calibrated: list[float] = []


def label_ns() -> float | None:
    """The time that one label takes inside a session, in nanoseconds; None if another session is active.

    It is measured once in a process, in a session of its own: calls of a module that does nothing, with a label and
    without, in ten blocks of 20 calls each. Other processes and threads interrupt some blocks and make them longer, so
    the shortest block is the closest to the cost of a label. Call it right after a session of ours has ended.
    """
    with _calibration:
        if not _calibrated and not is_profiled():
            module = nn.Identity()
            shortest = []
            session = Session(None)
            session.start()
            session.begin()
            try:
                for targets in ([], [Target(ref(module), label_of(("calibration",)))]):
                    labels = Labels(targets)
                    labels.attach()
                    try:
                        module(None)
                        shortest.append(min(_block_ns(module) for _ in range(_BLOCKS)))
                    finally:
                        labels.detach()
            finally:
                session.stop()
            _calibrated.append(max(shortest[1] - shortest[0], 0) / _CALLS)
        return _calibrated[0] if _calibrated else None


def _block_ns(module: nn.Module) -> int:
    start = time.perf_counter_ns()
    for _ in range(_CALLS):
        module(None)
    return time.perf_counter_ns() - start
