"""CPU time of this process, and the run delay of a thread: how long it was ready to run and waited for a processor."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import NamedTuple

_SCHEDSTAT = Path("/proc/thread-self/schedstat")


class CpuTime(NamedTuple):
    """``process_ns``: the CPU time of all threads of this process. ``run_delay_ns``: how long the calling thread was
    ready to run without a processor; None if the system does not count it. ``thread``: the calling thread."""

    process_ns: int
    run_delay_ns: int | None
    thread: int

    @classmethod
    def now(cls) -> CpuTime:
        """The times since the start of the process and of the thread."""
        return cls(time.process_time_ns(), _run_delay_ns(), threading.get_ident())

    def since(self, before: CpuTime) -> CpuTime:
        """The difference to an earlier value. The run delay is unknown if that is of another thread."""
        known = self.run_delay_ns is not None and before.run_delay_ns is not None and self.thread == before.thread
        delay = (self.run_delay_ns or 0) - (before.run_delay_ns or 0) if known else None
        return CpuTime(self.process_ns - before.process_ns, delay, self.thread)

    def without_delay_of(self, ns: int) -> CpuTime:
        """The same with a run delay that is shorter by ``ns``, but not negative: a lower bound, if the thread may have
        waited for up to ``ns`` outside of the recording."""
        delay = None if self.run_delay_ns is None else max(0, self.run_delay_ns - ns)
        return self._replace(run_delay_ns=delay)


def _run_delay_ns() -> int | None:
    """The run delay of this thread. Linux writes, in ns, how long a thread ran and how long it waited on a run queue
    (Documentation/scheduler/sched-stats.rst). Both are 0 if the kernel was built without these statistics."""
    try:
        ran, waited, _ = map(int, _SCHEDSTAT.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        return None
    return waited if ran else None
