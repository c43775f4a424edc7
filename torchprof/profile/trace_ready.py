"""Functions for ``on_trace_ready``, which a ``Profile`` calls at the end of each cycle of recorded steps."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from torchprof.errors import TorchprofError
from torchprof.profile.gather import RunsInStore, store_of_job
from torchprof.profile.signals import DelayedSigterm
from torchprof.run.formats import ranks_in_words
from torchprof.run.merge import merge
from torchprof.run.run import Run, output

if TYPE_CHECKING:
    from torchprof.profile.profile import Profile

_LOG = logging.getLogger("torchprof")


def tensorboard_trace_handler(
    dir_name: str | PathLike[str], worker_name: str | None = None, use_gzip: bool = False
) -> Callable[[Profile], None]:
    """Make a function for ``on_trace_ready`` that writes the trace of each cycle into a folder.

    It corresponds to torch's function of the same name. The file is ``<worker_name>.<time in ns>.pt.trace.json``, with
    ``.gz`` appended for ``use_gzip``. The folder is created if it does not exist. ``worker_name`` must be different in
    each process of a job; the default is ``<host name>_<process id>``. The returned function raises TorchprofError if
    the folder cannot be created, and OSError if the file cannot be written.
    """

    def write_trace(profile: Profile) -> None:
        folder = Path(dir_name)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise TorchprofError(f"No folder for traces can be made at {folder}: {error.strerror}.") from error
        worker = worker_name or f"{socket.gethostname()}_{os.getpid()}"
        profile.export_chrome_trace(folder / f"{worker}.{time.time_ns()}.pt.trace.json{'.gz' if use_gzip else ''}")

    return write_trace


_PATIENCE_S = 5.0
"""How long rank 0 waits for the others at most. It rarely does: ranks that exchange gradients end a cycle together."""
_KEPT = 2  # the number of comparisons of a rank that stay in the store if rank 0 does not take them

_numbers = count()  # of the Profiles whose cycles are compared
_comparisons_of: WeakKeyDictionary[Profile, _Comparisons] = WeakKeyDictionary()


def log_stragglers(prof: Profile) -> None:
    """Compare the ranks of the job in the steps of the last cycle, and log on rank 0 which of them is slow.

    It is a function for ``on_trace_ready``; see docs/ranks-in-a-job.md. Every rank calls it, and sends a kilobyte or
    two to the job's store without waiting. Rank 0 waits for the others, 5 s at most, and compares what has come. It
    logs one line with the logger "torchprof": a warning if a rank is slow or sent nothing, else an info. It does not
    wait again for a rank that sent nothing in the cycle before.

    Without a process group, and for a cycle without a whole step, nothing is compared. Why ranks could not be compared,
    as in a process group without a key-value store (MPI), is logged as a warning: no error ends a training. Raises
    TorchprofError for a Profile that has no run yet.
    """
    distributed = torch.distributed
    run = prof.run
    steps = run.meta.marked_steps
    if not steps or not (distributed.is_available() and distributed.is_initialized()):
        return
    comparisons = _comparisons_of.get(prof) or _comparisons_of.setdefault(prof, _Comparisons())
    try:
        comparisons.add(run, prof.step_num - steps, distributed.get_rank(), distributed.get_world_size())
    except TorchprofError as error:
        _LOG.warning("Ranks were not compared: %s", error)


class _Comparisons:
    """The part of this rank in the comparisons of the cycles of one Profile. What a rank wrote too late for rank 0 to
    take is deleted two cycles later, so that the store does not grow."""

    def __init__(self) -> None:
        self._number = next(_numbers)  # the same on all ranks, which profile in the same order
        self._written: deque[RunsInStore] = deque()
        self._missing: set[int] = set()  # the ranks that sent nothing for the last cycle

    def add(self, run: Run, first_step: int, rank: int, world_size: int) -> None:
        """Send the steps of this cycle, of which ``first_step`` is the number of the first. Rank 0 compares them."""
        store = store_of_job(f"torchprof/steps/{self._number}/{first_step}")
        table = RunsInStore(store, _PATIENCE_S, DelayedSigterm(), world_size)
        self._written.append(table)
        if len(self._written) > _KEPT:
            self._written.popleft().delete_comparison(rank)
        if rank == 0:
            self._compare(table, run, first_step, [*range(1, world_size)])
        else:
            table.put_comparison(rank, run)

    def _compare(self, table: RunsInStore, run: Run, first_step: int, others: list[int]) -> None:
        """Compare the run with those of the other ranks that come in time, and log a line."""
        there = table.wait_for_comparisons(others, len(others) - len(self._missing))
        # Without the job's name: the ranks of a process group are one job, though each node may name it.
        comparison = merge(
            replace(of_rank, metas=tuple(replace(meta, job="") for meta in of_rank.metas))
            for of_rank in (run.to_compare(), *table.take_comparisons(there))
        )
        self._missing = {*others} - {meta.rank for meta in comparison.metas}
        has_stragglers, verdict = False, "there is no other rank to compare."
        if len(comparison.metas) > 1:
            has_stragglers, verdict = output("verdict_on_ranks")(comparison)
        if self._missing:
            which = ranks_in_words(self._missing).capitalize()
            verdict += f" {which} sent nothing in time: each rank has to record the same steps with log_stragglers."
        last = first_step + comparison.meta.marked_steps - 1
        level = logging.WARNING if has_stragglers or self._missing else logging.INFO
        _LOG.log(level, "Steps %d to %d: %s", first_step, last, verdict)
