"""CPU time of this process, and how long a thread of it was ready to run and waited for a processor. Without torch."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CpuTime(NamedTuple):
    """``process_ns``: the CPU time of all threads of this process. ``run_delay_ns``: for how long the thread that asks
    was ready to run and had no processor; None where the system does not say. ``thread``: which thread that is."""

    process_ns: int
    run_delay_ns: int | None
    thread: int

    @classmethod
    def now(cls) -> CpuTime:
        """Since the process and the thread began."""
        return cls(time.process_time_ns(), _run_delay_ns(), threading.get_ident())

    def since(self, before: CpuTime) -> CpuTime:
        """What was added since then. The wait is unknown where another thread asks."""
        known = self.run_delay_ns is not None and before.run_delay_ns is not None and self.thread == before.thread
        delay = (self.run_delay_ns or 0) - (before.run_delay_ns or 0) if known else None
        return CpuTime(self.process_ns - before.process_ns, delay, self.thread)


def _run_delay_ns() -> int | None:
    """Linux counts, in ns, how long a thread ran, and how long it waited on a run queue
    (Documentation/scheduler/sched-stats.rst); both are 0 where it was built to count nothing."""
    try:
        ran, waited, _ = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return waited if ran else None
