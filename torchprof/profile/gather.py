"""Collect the runs of the ranks on one rank, while the job is still running; and say in its log which rank is slow.

Of more than 64 ranks, each sends ``Run.to_compare``; the rank that gathers then asks for the runs of a few.

The runs go through the key-value store of the job, and not through a collective. So it works with every backend, needs
no memory of a device, and works after a rank has died, where a collective would hang or fail. All waits have a limit:
that of the reader, which then continues without the missing ranks, and that of ranks for its choice.
"""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import chain, count
from typing import Any

import torch

from torchprof.errors import TorchprofError, some
from torchprof.profile.signals import DelayedSigterm
from torchprof.record.torch_internals import needed
from torchprof.run.file import run_of, zipped_json
from torchprof.run.formats import ranks_in_words
from torchprof.run.merge import merge
from torchprof.run.run import Run, output

_PIECE_BYTES = 2**20  # a TCPStore takes no value of more than 8 MiB, and serves one request at a time
_GRACE_S = 10.0
"""How long to wait for missing ranks after something went wrong. torchrun kills all ranks 30 s after one has failed:
the run must be gathered and written before that."""
_PAUSES_S = 0.002, 0.1  # the first and the longest pause between two looks into the store
_LOOKS = 10_000  # the most looks a second of all ranks together: a store serves several times as many
_ALL_UP_TO = 64  # the most ranks of which all are gathered by default
_TOGETHER = 256  # the number of comparisons that are taken at once
_SILENT_S = 30.0  # after this time, a warning names the ranks that are still missing
_INSTEAD = "Save the run of each rank (`prof.run.save(f'rank{rank}.json')`) and merge the files (`torchprof.merge`)."

_gathers: Counter[tuple[str, int]] = Counter()  # the number of gathers in this process, by group and destination


def gather(
    run: Run | None,
    group: Any,
    dst: int,
    timeout: float | timedelta | None,
    wanted: str | Iterable[int] | None,
    *,
    failed: bool,
    sigterm: DelayedSigterm,
) -> Run | None:
    """See ``Profile.gather``; ``wanted`` are its ``ranks``. ``run`` is None if profiling was switched off. ``failed``:
    an error has ended the recording, or is being handled. This function sets how long ``sigterm`` delays the signal."""
    seconds = None if timeout is None else _seconds(timeout)
    distributed = torch.distributed
    if not (distributed.is_available() and distributed.is_initialized()):
        if run is not None and run.meta.world_size > 1:
            raise TorchprofError(
                f"This is one of {run.meta.world_size} ranks, but there is no process group to gather their runs in: "
                f"call gather between init_process_group and destroy_process_group. Or: {_INSTEAD}"
            )
        if group is not None or dst != 0:
            raise TorchprofError(f"There is no process group: leave out group={group!r:.60} and dst={dst!r}.")
        sigterm.later_s = _GRACE_S
        return run
    rank = distributed.get_rank()
    ranks = _ranks_of(group)
    if rank not in ranks:
        return None
    if isinstance(dst, bool) or dst not in ranks:
        raise TorchprofError(f"dst={dst!r} is not a rank of the group. Its ranks in the job are {_rank_list(ranks)}.")
    whole = _wanted_ranks(wanted, ranks)
    name = (needed("torch.distributed.distributed_c10d._get_default_group")() if group is None else group).group_name
    store = store_of_job(f"torchprof/gather/{name}/{dst}/{_gathers[name, dst]}")
    _gathers[name, dst] += 1
    if seconds is None:
        seconds = store.timeout.total_seconds()
        if failed:
            seconds = min(seconds, _GRACE_S)
    sigterm.expected = failed
    own = run if run is not None and run.meta.rank == rank else None
    table = RunsInStore(store, seconds, sigterm, len(ranks))
    gathered = exchange(own, table, rank=rank, dst=dst, ranks=ranks, whole=whole)
    if run is not None and own is None:  # told only now: the other ranks do not wait for this one
        raise TorchprofError(
            f"This run is of rank {run.meta.rank}, but this process is rank {rank}: it was recorded before "
            "init_process_group. Call that first."
        )
    return gathered


def exchange(
    run: Run | None, table: RunsInStore, *, rank: int, dst: int, ranks: Collection[int], whole: Collection[int] | None
) -> Run | None:
    """The part of one rank in a gather: write its run into the table, or as ``dst`` return the merged run; None without
    any. ``whole``: the ranks whose runs are gathered; None if ``dst`` chooses them from a comparison of all."""
    if rank != dst:
        if whole is None:
            table.put_comparison(rank, run)
            whole = table.wait_for_choice()
        if rank in whole:
            table.put(rank, run)
        if rank == 0:  # this process may host the store, so it must not end before all runs were taken
            table.wait_until_closed()
        return None
    table.sigterm.later_s = _GRACE_S
    try:
        comparison = None
        if whole is None:
            comparison = _compared(run, table, [other for other in ranks if other != rank])
            whole = () if comparison is None else output("chosen_ranks")(comparison)
            table.choose(whole)
        own = () if run is None or rank not in whole else (run,)
        gathered = _merged(chain(own, table.take(other for other in whole if other != rank)))
    finally:
        table.close()
    if comparison is None:
        return gathered
    if gathered is None:  # the chosen ranks have died: better this run than none
        gathered = run
    return None if gathered is None else output("with_comparison")(gathered, comparison)


def _compared(run: Run | None, table: RunsInStore, others: list[int]) -> Run | None:
    """The comparison of all ranks that have something to compare in time; None if there is none."""
    arrived = table.wait_for_comparisons(others, len(others))
    if len(arrived) < len(others):
        table.note_missing({*others} - {*arrived})
    own = () if run is None else (run.to_compare(),)
    return _merged(chain(own, table.take_comparisons(arrived)))


def _merged(runs: Iterator[Run]) -> Run | None:
    first = next(runs, None)
    return None if first is None else merge(chain((first,), runs))


def _wanted_ranks(wanted: str | Iterable[int] | None, ranks: list[int]) -> Collection[int] | None:
    """The ranks of a group whose runs are gathered; None if they are to be chosen."""
    if wanted == "all" or (wanted is None and len(ranks) <= _ALL_UP_TO):
        return ranks
    if wanted is None:
        return None
    numbers = () if isinstance(wanted, (str, int)) else tuple(dict.fromkeys(wanted))
    if not numbers or not {*numbers} <= {*ranks}:
        raise TorchprofError(
            f'ranks={wanted!r:.60} does not say which runs to gather: give "all", or some ranks of the group. '
            f"Its ranks in the job are {_rank_list(ranks)}."
        )
    return numbers


def _seconds(timeout: float | timedelta) -> float:
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise TorchprofError(f"timeout={timeout!r} is not a time: give seconds, 0 or more, or a timedelta.")
    return seconds


def _ranks_of(group: Any) -> list[int]:
    """The ranks of a group, by their numbers in the job; an empty list if this rank is not in the group."""
    distributed = torch.distributed
    if group is distributed.GroupMember.NON_GROUP_MEMBER:
        return []
    if group is not None and not isinstance(group, distributed.ProcessGroup):
        raise TorchprofError(
            f"group={group!r:.60} is not a process group: torch.distributed.new_group(ranks) makes one, and "
            'mesh.get_group("dp") gives that of a dimension of a DeviceMesh.'
        )
    # torch 2.4 has no ranks for None, which is the group of all ranks.
    return sorted(distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group))


def _rank_list(ranks: list[int]) -> str:
    """The first eight ranks, and how many more there are."""
    return some([*map(str, ranks)], 8)


def store_of_job(prefix: str) -> Any:
    """The keys with this prefix in the job's store. Raises TorchprofError if it has none (MPI)."""
    store = needed("torch.distributed.distributed_c10d._get_default_store")()
    if store is None:  # MPI needs no store to start its ranks
        backend = torch.distributed.get_backend()
        raise TorchprofError(f"A job with the backend {backend} has no key-value store to gather over. {_INSTEAD}")
    return torch.distributed.distributed_c10d.PrefixStore(prefix, store)


class RunsInStore:
    """The part of the job's store that one gather uses: ranks write their runs there, and one rank takes them.

    Keys: ``<rank>/<number>`` is one piece of a rank's run, which is a gzipped run file. ``<rank>/pieces`` is the number
    of pieces, written last; it is 0 if the rank recorded nothing. ``closed`` exists as soon as no more runs are taken.

    If the runs to gather are chosen: ``<rank>/compared`` is what is compared, a gzipped run file, or empty;
    ``compared`` counts these. ``choice`` is a list of the chosen ranks, as JSON.
    """

    def __init__(self, store: Any, seconds: float, sigterm: DelayedSigterm, ranks: int) -> None:
        self._store = store
        self._until = time.monotonic() + seconds
        self.sigterm = sigterm
        self._longest_pause = max(_PAUSES_S[1], ranks / _LOOKS)

    def put(self, rank: int, run: Run | None) -> None:
        """Write the run of a rank into the store. Warns if it is too late."""
        data = _zipped(run)
        pieces = range(0, len(data), _PIECE_BYTES)
        try:
            if self._store.check(["closed"]):
                warnings.warn(f"The run of rank {rank} arrived too late to be gathered. {_INSTEAD}", stacklevel=5)
                return
            for number, start in enumerate(pieces):
                self._store.set(f"{rank}/{number}", data[start : start + _PIECE_BYTES])
            self._store.set(f"{rank}/pieces", str(len(pieces)))
        except RuntimeError as error:
            why = str(error).partition("\n")[0]
            warnings.warn(f"The run of rank {rank} was not gathered: the job's store is gone ({why}).", stacklevel=5)

    def put_comparison(self, rank: int, run: Run | None) -> None:
        """Write what is compared of the run of a rank into the store."""
        with suppress(RuntimeError):  # the store is gone: nothing will be chosen
            self._store.set(f"{rank}/compared", _zipped(None if run is None else run.to_compare()))
            self._store.add("compared", 1)

    def wait_for_comparisons(self, ranks: list[int], enough: int) -> list[int]:
        """Those of these ranks that have written what is compared, when ``enough`` have, or the time is over.
        After SIGTERM that is soon: then the chosen ranks have to send their runs before torchrun kills them."""
        for is_last_look in self._looks(_GRACE_S / 2):
            if is_last_look or self._asked(self._store.add, "compared", 0) >= enough:
                break
        if self._asked(self._store.add, "compared", 0) >= len(ranks):
            return ranks
        return [rank for rank in ranks if self._has(f"{rank}/compared")]

    def take_comparisons(self, ranks: list[int]) -> Iterator[Run]:
        """Yield what is compared of these ranks, which have written it."""
        for first in range(0, len(ranks), _TOGETHER):
            together = ranks[first : first + _TOGETHER]
            for rank, data in zip(together, self._values([f"{rank}/compared" for rank in together])):
                if data:
                    yield run_of(data, f"the comparison of rank {rank}")

    def delete_comparison(self, rank: int) -> None:
        """Delete what this rank has written to be compared, if it was not taken."""
        with suppress(RuntimeError):
            for key in (f"{rank}/compared", "compared"):
                self._store.delete_key(key)

    def choose(self, ranks: Collection[int]) -> None:
        """Ask these ranks for their runs, which may come later than the comparisons."""
        self._until = max(self._until, time.monotonic() + _GRACE_S)
        with suppress(RuntimeError):
            self._store.set("choice", json.dumps([*ranks]))

    def wait_for_choice(self) -> tuple[int, ...]:
        """The ranks that are asked for their runs; empty, with a warning, if none are until the time is over."""
        self._until += _GRACE_S  # the reader may have started later
        for is_last_look in self._looks(2 * _GRACE_S):
            if self._has("choice"):
                return tuple(json.loads(self._store.get("choice")))
            if self._has("closed"):
                break
            if is_last_look:
                warnings.warn(f"No rank was asked for its run in time. {_INSTEAD}", stacklevel=4)
                break
        return ()

    def take(self, ranks: Iterable[int]) -> Iterator[Run]:
        """Yield the runs of these ranks as they arrive, until all have arrived or the time is over. A run that has
        arrived by then is yielded, however long it took to read the runs before it."""
        missing = list(ranks)
        silent_until = time.monotonic() + _SILENT_S
        for is_last_look in self._looks():
            arrived = [rank for rank in missing if self._has(f"{rank}/pieces")]
            for rank in arrived:
                if data := self._data(rank):
                    yield run_of(data, f"the run of rank {rank}")
            missing = [rank for rank in missing if rank not in arrived]
            if is_last_look and missing:
                self.note_missing(missing)
            if is_last_look or not missing:
                return
            if time.monotonic() > silent_until:
                silent_until = math.inf
                message = f"Still waiting for the runs of ranks: {_rank_list(missing)}."
                warnings.warn(f"{message} Each has to call gather, and gather(timeout=…) waits less.", stacklevel=2)

    def note_missing(self, ranks: Collection[int]) -> None:
        warnings.warn(f"{ranks_in_words(ranks).capitalize()} sent no run in time.", stacklevel=3)
        self.sigterm.expected = True  # probably a rank has died, and torchrun will soon notice

    def close(self) -> None:
        """Mark that no more runs are taken."""
        with suppress(RuntimeError):
            self._store.set("closed", "1")

    def wait_until_closed(self) -> None:
        """Wait until the reader calls ``close``. The reader may have started later, so wait a little longer than it."""
        self._until += _GRACE_S
        for is_last_look in self._looks():
            if is_last_look or self._has("closed"):
                return

    def _looks(self, grace_s: float | None = None) -> Iterator[bool]:
        """Yield again and again, after short pauses, whether the time is over. After SIGTERM, ``grace_s`` are left. A
        wait in the store instead would keep signals from this process, and the store from the backend."""
        pause, longest = _PAUSES_S[0], self._longest_pause
        while True:
            if self.sigterm.came:
                self._until = min(self._until, time.monotonic() + (_GRACE_S if grace_s is None else grace_s))
            left = self._until - time.monotonic()
            yield left <= 0
            time.sleep(max(0.0, min(pause, left)))
            pause = min(2 * pause, longest)

    def _has(self, key: str) -> bool:
        return bool(self._asked(self._store.check, [key]))

    def _asked(self, question: Callable[..., Any], *about: Any) -> int:
        """The store's answer; 0 if the process that hosted the store has ended, so that no more runs will come."""
        try:
            return int(question(*about))
        except RuntimeError:
            self._until = -math.inf
            return 0

    def _values(self, keys: list[str]) -> list[bytes]:
        """The values of keys that exist, which are deleted; empty ones if the store is gone."""
        try:
            has_several = hasattr(self._store, "has_extended_api") and self._store.has_extended_api()
            values = self._store.multi_get(keys) if has_several else [*map(self._store.get, keys)]
            for key in keys:
                self._store.delete_key(key)
        except RuntimeError:
            return [b""] * len(keys)
        return values

    def _data(self, rank: int) -> bytes:
        """Take the run that a rank wrote out of the store; empty if the store is gone."""
        [count] = self._values([f"{rank}/pieces"])
        pieces = [self._values([f"{rank}/{number}"])[0] for number in range(int(count or 0))]
        return b"" if b"" in pieces else b"".join(pieces)


def _zipped(run: Run | None) -> bytes:
    """A run as it is written into the store; nothing if there is none."""
    return b"" if run is None else zipped_json(run, level=1)


# During training

_LOG = logging.getLogger("torchprof")
_PATIENCE_S = 5.0
"""How long rank 0 waits for the others at most. It rarely does: ranks that exchange gradients end a cycle together."""
_KEPT = 2  # the number of comparisons of a rank that stay in the store if rank 0 does not take them

_numbers = count()  # of the Profiles whose cycles are compared, and of watches


class Comparisons:
    """The part of this rank in the comparisons of the cycles of one Profile, or of the reports of a ``Watch``. What a
    rank wrote too late for rank 0 to take is deleted two cycles later, so that the store does not grow."""

    def __init__(self, what: str = "each rank has to record the same steps with log_stragglers") -> None:
        """``what``: what every rank has to do."""
        self._what = what
        self._number = next(_numbers)  # the same on all ranks, which profile in the same order
        self._written: deque[RunsInStore] = deque()
        self._missing: set[int] = set()  # the ranks that sent nothing for the last cycle

    def add(self, run: Run, number: int, steps: tuple[int, int], rank: int, world_size: int) -> None:
        """Send a run, and on rank 0 compare those with this ``number``. ``steps``: the first and the last one in it."""
        if world_size < 2:
            return
        try:
            store = store_of_job(f"torchprof/steps/{self._number}/{number}")
            table = RunsInStore(store, _PATIENCE_S, DelayedSigterm(), world_size)
            self._written.append(table)
            if len(self._written) > _KEPT:
                self._written.popleft().delete_comparison(rank)
            if rank == 0:
                self._compare(table, run, steps, [*range(1, world_size)])
            else:
                table.put_comparison(rank, run)
        except TorchprofError as error:
            _LOG.warning("Ranks were not compared: %s", error)

    def _compare(self, table: RunsInStore, run: Run, steps: tuple[int, int], others: list[int]) -> None:
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
            verdict += f" {which} sent nothing in time: {self._what}."
        level = logging.WARNING if has_stragglers or self._missing else logging.INFO
        _LOG.log(level, "Steps %d to %d: %s", *steps, verdict)
