"""``prof.gather`` merges the runs of all ranks, also if ranks are late, have died or recorded nothing."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from build.hand_made import op, row, run_of
from build.hand_made_ranks import run_of_ranks
from build.jobs import MS, even, experts, fed_slowly, planted
from build.places import ROOT
from build.torchrun import Job, torchrun
from build.warm import warm_job
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.profile import gather as gathering
from torchprof.profile.signals import DelayedSigterm
from torchprof.ranks import balance_of
from torchprof.record.this_process import Job as JobOfRank
from torchprof.record.this_process import this_job
from torchprof.run.file import json_of_run
from torchprof.run.file import run_of as run_of_file
from torchprof.run.words import FORWARD


def of_rank(rank: int, world_size: int = 4) -> Run:
    """A run of one rank; the runs of different ranks differ."""
    run = run_of([row(1, op("aten::mm"), calls=rank + 1, cpu_ns=100 + rank)], rank=rank, world_size=world_size)
    ranks = array("q", [rank] * len(run.rows))
    return replace(run, rows=replace(run.rows, columns={**run.rows.columns, "rank": ranks}))


def exchange(run: Run | None, store: Any, rank: int, dst: int, ranks: Any, seconds: float, wanted: Any = "all") -> Any:
    with DelayedSigterm() as sigterm:
        chosen = ranks if wanted == "all" else wanted
        table = gathering.RunsInStore(store, seconds, sigterm, len(ranks))
        return gathering.exchange(run, table, rank=rank, dst=dst, ranks=ranks, whole=chosen)


def rows_of(run: Run, rank: int) -> list[str]:
    """The rows of one rank as text, sorted."""
    return sorted(
        repr((one.layer and one.layer.path, one.phase, one.within, one.frames, one.device, one.calls, one.cost))
        for one in run.rows
        if one.rank == rank
    )


def together(
    store: Any, runs: dict[int, Run | None], dst: int = 0, seconds: float = 10, world_size: int = 4, wanted: Any = "all"
) -> Any:
    """The result of each rank; each rank runs in its own thread."""
    with ThreadPoolExecutor(len(runs)) as threads:
        futures = {
            rank: threads.submit(exchange, run, store, rank, dst, range(world_size), seconds, wanted)
            for rank, run in runs.items()
        }
        return {rank: future.result(30) for rank, future in futures.items()}


@pytest.fixture(params=["HashStore", "FileStore", "TCPStore"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    made = {
        "HashStore": lambda: dist.HashStore(),
        "FileStore": lambda: dist.FileStore(str(tmp_path / "store"), 1),
        "TCPStore": lambda: dist.TCPStore("localhost", 0, 1, True),
    }[request.param]()
    yield made


# Without a job: the exchange over a store


@pytest.mark.parametrize("dst", [0, 3])
def test_one_rank_gets_the_merged_run_and_the_others_get_none(store: Any, dst: int) -> None:
    runs = {rank: of_rank(rank) for rank in range(4)}
    got = together(store, dict(runs), dst)
    assert got.pop(dst) == torchprof.merge(runs.values())
    assert set(got.values()) == {None}


def test_a_run_of_many_pieces_is_gathered_completely(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._PIECE_BYTES", 7)
    assert together(store, {0: of_rank(0), 1: of_rank(1)}, world_size=2)[0] == torchprof.merge(map(of_rank, range(2)))


def test_after_a_gather_the_store_has_only_the_key_closed() -> None:
    store = dist.HashStore()
    together(store, {rank: of_rank(rank) for rank in range(4)})
    assert store.num_keys() == 1 and store.check(["closed"])


def test_a_rank_that_is_late_is_left_out_with_a_warning(store: Any) -> None:
    got = together(store, {0: of_rank(0), 2: of_rank(2)}, seconds=0.3)
    assert got[0] == torchprof.merge([of_rank(0), of_rank(2)]) and got[0].missing_ranks == (1, 3)
    with pytest.warns(
        UserWarning, match="The run of rank 1 arrived too late to be gathered. Save the run of each rank"
    ):
        assert exchange(of_rank(1), store, 1, 0, range(4), 0) is None


def test_after_a_long_wait_a_warning_names_the_missing_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._SILENT_S", 0.1)
    with pytest.warns(UserWarning, match=r"^Still waiting for the runs of ranks: 1, 3\. Each has to call") as warned:
        store = dist.HashStore()
        exchange(of_rank(2), store, 2, 0, range(4), 0)
        assert exchange(of_rank(0), store, 0, 0, range(4), 0.5) is not None
    assert [str(one.message) for one in warned[1:]] == ["Ranks 1 and 3 sent no run in time."]


def test_runs_that_have_arrived_are_merged_even_if_the_time_is_over() -> None:
    store = dist.HashStore()
    for rank in (1, 3):
        exchange(of_rank(rank), store, rank, 0, range(4), 10)
    assert exchange(of_rank(0), store, 0, 0, range(4), 0).missing_ranks == (2,)


def test_an_incomplete_run_is_not_gathered() -> None:
    class DiesWhileWriting:
        def __init__(self, store: Any) -> None:
            self.store = store

        def __getattr__(self, name: str) -> Any:
            return getattr(self.store, name)

        def set(self, key: str, value: Any) -> None:
            if key.endswith("/pieces"):
                raise SystemExit
            self.store.set(key, value)

    store = dist.HashStore()
    with pytest.raises(SystemExit):
        exchange(of_rank(1), DiesWhileWriting(store), 1, 0, range(2), 10)
    assert store.check(["1/0"])
    assert exchange(of_rank(0), store, 0, 0, range(2), 0.1) == of_rank(0)


def test_a_rank_that_recorded_nothing_does_not_prolong_the_wait() -> None:
    store = dist.HashStore()
    runs = {0: of_rank(0), 1: None, 2: of_rank(2), 3: None}
    assert together(store, runs, seconds=1000)[0].missing_ranks == (1, 3)
    assert together(dist.HashStore(), {0: None, 1: of_rank(1)}, world_size=2, seconds=1000)[0] == of_rank(1)
    assert together(dist.HashStore(), {0: None, 1: None}, world_size=2, seconds=1000) == {0: None, 1: None}


def test_a_writer_does_not_wait_except_rank_0_which_may_host_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 0.5)
    store = dist.HashStore()
    assert exchange(of_rank(1), store, 1, 2, range(4), 1000) is None  # or the test would never end
    began = time.monotonic()
    assert exchange(of_rank(0), store, 0, 2, range(4), 0.5) is None
    assert time.monotonic() - began >= 1  # the timeout plus the grace time
    with ThreadPoolExecutor() as threads:
        writer = threads.submit(exchange, of_rank(0), dist.PrefixStore("again", store), 0, 2, range(4), 1000)
        time.sleep(0.2)
        assert not writer.done()
        reader = threads.submit(exchange, of_rank(2), dist.PrefixStore("again", store), 2, 2, (0, 2), 1000)
        assert reader.result(30).missing_ranks == (1, 3) and writer.result(30) is None


def test_if_the_store_is_gone_each_rank_keeps_its_own_run() -> None:
    server = dist.TCPStore("localhost", 0, 1, True)
    stores = [dist.TCPStore("localhost", server.port, 1, False) for _ in range(2)]
    del server
    assert exchange(of_rank(0), stores[0], 0, 0, range(2), 1000) == of_rank(0)
    with pytest.warns(UserWarning, match=r"The run of rank 1 was not gathered: the job's store is gone \(.+\)\.$"):
        assert exchange(of_rank(1), stores[1], 1, 0, range(2), 1000) is None


def test_after_an_error_of_merging_no_rank_waits() -> None:
    store = dist.HashStore()
    exchange(of_rank(0), store, 1, 2, range(3), 10)  # rank 1 says that it is rank 0 …
    with ThreadPoolExecutor() as threads:
        host = threads.submit(exchange, of_rank(0), store, 0, 2, range(3), 1000)  # … as rank 0 does
        with pytest.raises(TorchprofError, match="rank 0"):
            exchange(of_rank(2), store, 2, 2, range(3), 10)
        assert host.result(30) is None


# The runs to gather are chosen from a comparison of all ranks


def one_is_slow(ranks: int = 8, slow: int = 5) -> dict[int, Run]:
    """The run of each rank: 10 ms of work in each of 5 steps, 12 ms on the slow one."""
    own = {rank: [(12 if rank == slow else 10) * MS + rank] * 5 for rank in range(ranks)}
    run = run_of_ranks({("Net.a", FORWARD): own}, parts={"step_ns": even(25 * MS, range(ranks))})
    return {rank: run.of_rank(rank) for rank in range(ranks)}


def test_of_many_ranks_the_slow_one_and_some_beside_it_are_gathered(store: Any) -> None:
    """Beside rank 5 the fastest of the others, rank 0, and the one in their middle, rank 3."""
    runs = one_is_slow()
    got = together(store, dict(runs), dst=2, world_size=8, wanted=None)
    run = got.pop(2)
    assert set(got.values()) == {None}
    assert [meta.rank for meta in run.metas] == [0, 3, 5] and run.missing_ranks == (1, 2, 4, 6, 7)
    assert [str(warning) for warning in run.warnings if warning.code == "ranks_chosen"] == [
        "8 ranks were compared: Rank 5 is the straggler: its own work takes 12.000ms a step, that of the others "
        "10.000ms (median); without that, a step would be up to 8% shorter. Only ranks 0, 3 and 5 are in this run, "
        "with all figures: stragglers, and some others."
    ]
    metas = tuple(replace(meta, warnings=()) for meta in run.metas)
    assert replace(run, metas=metas) == torchprof.merge(runs[rank] for rank in (0, 3, 5))
    assert "Rank 5 is the straggler: its own work" in run.report("ranks")


def test_of_equal_ranks_the_one_with_the_most_work_is_gathered_with_others(store: Any) -> None:
    got = together(store, dict(one_is_slow(slow=-1)), world_size=8, wanted=None)
    assert [meta.rank for meta in got[0].metas] == [0, 3, 7]
    assert "8 ranks were compared: No straggler found: own work takes 10.000ms to 10.000ms" in got[0].report("ranks")


def test_what_is_compared_is_enough_for_the_verdict_on_all_ranks() -> None:
    """By the same functions as for the merged runs; only the layer is not in it. It has about a kilobyte."""
    for whole in (planted(), fed_slowly(), experts()):
        ranks = [whole.of_rank(meta.rank) for meta in whole.metas]
        compared = balance_of(torchprof.merge(run.to_compare() for run in ranks))
        expected = balance_of(whole)
        assert compared.detectable == expected.detectable
        for ours, theirs in ((compared.slow, expected.slow), (compared.late, expected.late)):
            assert (ours is None) == (theirs is None)
            if ours is not None and theirs is not None:
                assert ours.ranks == theirs.ranks and ours.may_be_chance == theirs.may_be_chance
        if compared.slow is not None and expected.slow is not None:
            assert (compared.slow.work_ns, compared.slow.costs) == (expected.slow.work_ns, expected.slow.costs)
        assert all(rank.flops is None for rank in compared.ranks)  # not compared, and not 0
        assert all(len(gathering._zipped(run.to_compare())) < 2000 for run in ranks)
    assert [balance_of(run).slow is None for run in (planted(), fed_slowly())] == [False, True]


def test_what_is_compared_can_be_stored_and_has_no_figures_of_layers() -> None:
    compared = planted().of_rank(2).to_compare()
    assert run_of_file(json_of_run(compared).encode(), "compared") == compared
    assert len(compared.layers) == len(compared.rows) == 0


def test_ranks_that_send_nothing_in_time_are_not_compared(store: Any) -> None:
    runs: dict[int, Run | None] = {rank: run for rank, run in one_is_slow().items() if rank not in (1, 6)}
    runs[7] = None  # profiling was switched off there
    with pytest.warns(UserWarning, match=r"^Ranks 1 and 6 sent no run in time\.$"):
        got = together(store, runs, world_size=8, seconds=0.5, wanted=None)
    assert [meta.rank for meta in got[0].metas] == [0, 3, 5]
    report = got[0].report("ranks")
    assert "5 ranks were compared: Rank 5 is the straggler" in report and "missing" not in report
    assert " Ranks 1, 6 and 7 gave no run. Only ranks 0, 3 and 5 are in this run" in report


def test_if_no_rank_recorded_anything_nothing_is_chosen() -> None:
    runs: dict[int, Run | None] = dict.fromkeys(range(3))
    assert together(dist.HashStore(), runs, world_size=3, wanted=None) == {0: None, 1: None, 2: None}


def test_if_nothing_is_chosen_in_time_the_ranks_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 0.2)
    with pytest.warns(UserWarning, match=r"^No rank was asked for its run in time\. Save the run of each rank"):
        assert exchange(of_rank(1), dist.HashStore(), 1, 0, range(3), 0.2, None) is None  # rank 0 has died


def test_after_sigterm_the_chosen_ranks_still_send_their_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 7 has died, and torchrun has sent SIGTERM to the others before they gather."""
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 1.0)

    class Came:
        came, expected, later_s = True, False, 0.0

    store, runs = dist.HashStore(), one_is_slow()
    with ThreadPoolExecutor(7) as threads, pytest.warns(UserWarning, match=r"^Rank 7 sent no run in time\.$"):
        options: dict[str, Any] = {"dst": 0, "ranks": range(8), "whole": None}
        tables = [gathering.RunsInStore(store, 1000, cast(Any, Came()), 8) for _ in range(7)]
        got = [threads.submit(gathering.exchange, runs[rank], tables[rank], rank=rank, **options) for rank in range(7)]
        run = got[0].result(30)
    assert [meta.rank for meta in run.metas] == [0, 3, 5]


def test_if_no_chosen_rank_sends_its_run_that_of_the_destination_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 0.2)
    runs, store = one_is_slow(), dist.HashStore()
    for rank in (0, 1, 3, 4, 5, 6, 7):  # they send what is compared, and die
        with DelayedSigterm() as sigterm:
            gathering.RunsInStore(store, 10, sigterm, 8).put_comparison(rank, runs[rank])
    with pytest.warns(UserWarning, match=r"^Ranks 0, 3 and 5 sent no run in time\.$"):
        run = exchange(runs[2], store, 2, 2, range(8), 0.2, None)
    assert [meta.rank for meta in run.metas] == [2]


def test_after_an_error_of_comparing_no_rank_waits() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor() as threads:
        other = threads.submit(exchange, of_rank(0), store, 1, 0, range(2), 1000, None)  # rank 1 says that it is rank 0
        with pytest.raises(TorchprofError, match="rank 0"):
            exchange(of_rank(0), store, 0, 0, range(2), 1000, None)
        assert other.result(30) is None


def test_some_ranks_are_gathered_on_request(store: Any) -> None:
    runs = {rank: of_rank(rank) for rank in range(4)}
    got = together(store, dict(runs), wanted=(1, 3))  # gather makes each number one of these
    assert got == {0: torchprof.merge([runs[1], runs[3]]), 1: None, 2: None, 3: None}


# SIGTERM


@pytest.fixture
def handler() -> list[int]:
    came: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: came.append(number))
    return came


def comes(handler: list[int]) -> bool:
    """Whether SIGTERM comes exactly once within some time."""
    for _ in range(1000):
        if not handler:
            time.sleep(0.01)
    return handler == [signal.SIGTERM]


def test_sigterm_is_delayed_until_the_end_of_the_block(handler: list[int]) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    with DelayedSigterm(0) as held:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
        assert held.came and not handler
    assert handler == [signal.SIGTERM] and signal.getsignal(signal.SIGTERM) is ours


def test_sigterm_is_delayed_further_if_a_run_has_to_be_written(handler: list[int]) -> None:
    with DelayedSigterm(0.3):
        os.kill(os.getpid(), signal.SIGTERM)
    assert not handler and comes(handler)


def test_without_sigterm_none_is_sent_and_an_error_restores_the_handler(handler: list[int]) -> None:
    ours = signal.getsignal(signal.SIGTERM)
    with pytest.raises(ZeroDivisionError), DelayedSigterm(0):
        assert signal.getsignal(signal.SIGTERM) is not ours
        _ = 1 / 0
    assert signal.getsignal(signal.SIGTERM) is ours and not handler


def test_outside_the_main_thread_signals_are_not_delayed(handler: list[int]) -> None:
    ours = signal.getsignal(signal.SIGTERM)

    def elsewhere() -> bool:
        with DelayedSigterm(0):
            return signal.getsignal(signal.SIGTERM) is ours

    with ThreadPoolExecutor() as threads:
        assert threads.submit(elsewhere).result(30)


def test_sigterm_shortens_the_wait(handler: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 0.2)
    store = dist.HashStore()
    exchange(of_rank(1), store, 1, 0, range(3), 1000)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    run = exchange(of_rank(0), store, 0, 0, range(3), 1000)  # or the test would never end
    assert run is not None and run.missing_ranks == (2, 3)
    timer.join(60)
    assert comes(handler)


def killing(function: Any) -> Any:
    """The function, with a SIGTERM when it is called: torchrun sends it after another rank has died."""

    def killed(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return function(*args, **kwargs)

    return killed


def test_sigterm_at_the_end_of_the_block_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    prof = Profile(nn.Linear(2, 2))
    found = None
    with pytest.raises(SystemExit):
        try:
            with prof:
                monkeypatch.setattr("torchprof.profile.profile.label_ns", killing(torchprof.profile.profile.label_ns))
                raise ConnectionError
        finally:
            found = prof.gather()
    assert found is prof.run


def test_sigterm_while_the_run_is_made_is_delivered_after_that(
    handler: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchprof.profile.gather._GRACE_S", 0.2)
    prof = profiled()
    monkeypatch.setattr("torchprof.profile.cycle.assemble", killing(torchprof.profile.cycle.assemble))
    assert prof.gather() is prof.run and not handler
    assert comes(handler)


# Without a job: results and errors of ``gather``


def profiled(**options: Any) -> Profile:
    model = nn.Linear(2, 2)
    with Profile(model, **options) as prof:
        model(torch.rand(1, 2))
    return prof


def test_without_a_process_group_the_result_is_the_run_of_this_process() -> None:
    prof = profiled()
    assert prof.gather() is prof.run
    assert profiled(enabled=False).gather() is None
    with pytest.raises(TorchprofError, match=r"There is no process group: leave out group=None and dst=1\.$"):
        prof.gather(dst=1)


def test_a_rank_of_a_job_without_a_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    prof = profiled()
    assert (prof.run.meta.rank, prof.run.meta.world_size, {*prof.run.rows.columns["rank"]}) == (1, 2, {1})
    with pytest.raises(TorchprofError, match=r"one of 2 ranks, but .* between init_process_group and destroy_proc"):
        prof.gather()


def test_a_group_of_one_rank_returns_the_run_itself(world_of_one: None) -> None:
    prof = profiled()
    assert prof.gather() == prof.run == prof.gather()
    assert prof.gather(dist.new_group([0]), timeout=timedelta(seconds=1)) == prof.run
    assert profiled(enabled=False).gather() is None
    with pytest.raises(TorchprofError, match=r"dst=1 is not a rank of the group. Its ranks in the job are 0\."):
        prof.gather(dst=1)
    with pytest.raises(TorchprofError, match=r"group='world' is not a process group: .*get_group\(\"dp\"\)"):
        prof.gather("world")  # type: ignore[arg-type]
    assert prof.gather(dist.GroupMember.NON_GROUP_MEMBER) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True, timedelta(seconds=-1)])
def test_an_invalid_timeout_raises(timeout: Any) -> None:
    with pytest.raises(TorchprofError, match=r"is not a time: give seconds, 0 or more, or a timedelta\."):
        profiled().gather(timeout=timeout)


@pytest.mark.parametrize("ranks", ["one", 0, (), (0, 1), [True, "0"]])
def test_invalid_ranks_raise(ranks: Any, world_of_one: None) -> None:
    with pytest.raises(
        TorchprofError, match=r'does not say which runs to gather: give "all", or .* in the job are 0\.'
    ):
        profiled().gather(ranks=ranks)


def test_more_than_64_ranks_are_compared(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("torchprof.profile.gather.exchange", lambda *_, whole, **__: asked.append(whole))
    for count in (64, 65):
        monkeypatch.setattr(gathering, "_ranks_of", lambda group, count=count: [*range(count)])
        profiled().gather()
        profiled().gather(ranks="all")
        profiled().gather(ranks=iter([3, 3]))
    assert asked == [[*range(64)], [*range(64)], (3,), None, [*range(65)], (3,)]


def test_gather_before_the_end_of_the_block_raises() -> None:
    model = nn.Linear(2, 2)
    with Profile(model) as prof, pytest.raises(TorchprofError, match="has not ended"):
        prof.gather()


def test_gather_inside_on_trace_ready_returns_the_run_of_the_cycle(world_of_one: None) -> None:
    model = nn.Linear(2, 2)
    gathered = []
    schedule = torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=2)
    with Profile(model, schedule=schedule, on_trace_ready=lambda prof: gathered.append(prof.gather())) as prof:
        for _ in range(4):
            model(torch.rand(1, 2))
            prof.step()
    assert [run.tree("forward").calls for run in gathered] == [1, 1] and prof.run.tree("forward").calls == 2


def test_a_backend_without_a_store_raises(world_of_one: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist.distributed_c10d, "_get_default_store", lambda: None)
    with pytest.raises(TorchprofError, match=r"with the backend gloo has no key-value store .* Save the run of each"):
        profiled().gather()


def test_a_run_that_was_recorded_before_the_process_group_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    prof = profiled()
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        monkeypatch.setattr(dist, "get_rank", lambda: 1)
        monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1])
        with pytest.raises(TorchprofError, match="is of rank 0, but this process is rank 1: it was recorded bef"):
            prof.gather()
    finally:
        monkeypatch.undo()
        dist.destroy_process_group()


@pytest.mark.parametrize(("how", "seconds"), [("block", 10), ("stop", 10), ("later", 10), ("fine", 300)])
def test_after_an_error_gather_waits_ten_seconds(
    how: str, seconds: float, world_of_one: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("torchprof.profile.gather.RunsInStore", lambda _, seconds, *others: waits.append(seconds))
    monkeypatch.setattr("torchprof.profile.gather.exchange", lambda *_, **__: None)
    prof = Profile(nn.Linear(2, 2))
    try:
        if how == "stop":
            prof.start()
            try:
                raise ValueError
            finally:
                prof.stop()
        with prof:
            if how == "block":
                raise ValueError
        if how == "later":
            raise ValueError
    except ValueError:
        if how == "later":
            prof.gather()
    if how != "later":
        prof.gather()
    prof.gather(timeout=7)
    assert waits == [seconds, 7]


# In jobs of torchrun

MANY = """
import time
import torch
import torch.distributed as dist
from torch import nn
from torchprof import Profile
from torchprof.profile import gather

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
parallel = nn.parallel.DistributedDataParallel(model)

def profiled(calls, **options):
    with Profile(parallel, with_flops=True, profile_memory=True, **options) as prof:
        for _ in range(calls):
            parallel(torch.rand(2 + rank, 4)).sum().backward()
            prof.step()
    return prof

def keep(name, prof, **options):
    if prof.enabled:
        prof.run.save(f"{name}-{rank}.json")
    began = time.monotonic()
    run = prof.gather(**options)
    print(name, "gave", run if run is None else [meta.rank for meta in run.metas], time.monotonic() - began < 60)
    if run is not None:
        run.save(f"{name}.json")

first = profiled(3)
keep("all", first)
keep("again", profiled(2))
keep("last", first, dst=ranks - 1)
keep("some", profiled(1, enabled=rank != 1))
keep("none", profiled(1, enabled=False))
gather._ALL_UP_TO = 1
keep("chosen", first)
gather._ALL_UP_TO = ranks
group = dist.new_group([rank for rank in range(ranks) if rank % 2])
keep("group", profiled(1), group=group, dst=1)
if rank == 1:
    print("silent")
else:
    keep("silent", profiled(0), timeout=1)
keep("other", profiled(1), timeout=1)
dist.destroy_process_group()
"""


def loaded(folder: Path, name: str, ranks: list[int]) -> Run:
    """A gathered run, by its name; it is checked to equal the merged runs of these ranks."""
    run = torchprof.load(folder / f"{name}.json")
    assert run == torchprof.merge(torchprof.load(folder / f"{name}-{rank}.json") for rank in ranks)
    assert [meta.rank for meta in run.metas] == ranks
    return run


def gave(job: Job, rank: int) -> dict[str, str]:
    return dict(line.split(" gave ") for line in job.out[rank].splitlines() if " gave " in line)


@pytest.mark.jobs
def test_the_gathered_run_equals_the_merged_files_of_the_ranks(tmp_path: Path) -> None:
    ranks = 4
    (tmp_path / "job.py").write_text(MANY, encoding="utf-8")
    job = warm_job(tmp_path, ranks, "job.py")
    assert job.code == 0, job
    everyone = list(range(ranks))
    run = loaded(tmp_path, "all", everyone)
    for rank in everyone:
        assert rows_of(run, rank) == rows_of(torchprof.load(tmp_path / f"all-{rank}.json"), rank) != []
    assert run.missing_ranks == () and {meta.world_size for meta in run.metas} == {ranks}
    # By hand: 3 calls of 2 + rank rows through Linear(4, 4) and Linear(4, 1), on each rank.
    macs = 3 * sum(2 + rank for rank in everyone) * (16 + 4)
    assert run.tree("forward").calls == 3 * ranks and run.tree("forward").total.macs == macs
    assert loaded(tmp_path, "again", everyone).tree("forward").calls == 2 * ranks
    assert loaded(tmp_path, "last", everyone) == run
    others = [rank for rank in everyone if rank != 1]
    assert loaded(tmp_path, "some", others).missing_ranks == (1,)
    assert not (tmp_path / "none.json").exists()
    chosen = torchprof.load(tmp_path / "chosen.json")
    assert f"{ranks} ranks were compared: " in chosen.report("ranks")
    assert {meta.rank for meta in chosen.metas} <= {*everyone} and 2 <= len(chosen.metas) <= 3
    assert loaded(tmp_path, "group", everyone[1::2]).missing_ranks == tuple(everyone[::2])
    assert loaded(tmp_path, "silent", others).missing_ranks == (1,)
    # A rank that skipped one gather is one behind, as with collectives: its next run belongs to the earlier gather.
    assert loaded(tmp_path, "other", others).missing_ranks == (1,)
    on_0 = {"all": everyone, "again": everyone, "some": others, "silent": others, "other": others}
    for rank in everyone:
        got = {"last": everyone} if rank == ranks - 1 else {}
        got |= on_0 if rank == 0 else {"group": everyone[1::2]} if rank == 1 else {}
        names = ["all", "again", "last", "some", "none", "chosen", "group", "silent", "other"]
        if rank == 0:
            got["chosen"] = [meta.rank for meta in chosen.metas]
        assert gave(job, rank) == {
            name: f"{got.get(name)} True" for name in names if not (rank == 1 and name == "silent")
        }


# The documented script; one rank dies in the middle of the block


def documented(*, dies: str, dst: int = 0) -> str:
    page = ROOT.joinpath("docs", "ranks-in-a-job.md").read_text(encoding="utf-8")
    [script] = re.findall(r"^```python\n(# train.py\n.*?)^```$", page, re.MULTILINE | re.DOTALL)
    dying = f"            prof.step()\n            if step == 3:\n                {dies}\n"
    assert script.count("            prof.step()\n") == script.count("prof.gather()") == 1
    script = script.replace("            prof.step()\n", f"            rank = dist.get_rank()\n{dying}")
    return f"import os\n{script.replace('prof.gather()', f'prof.gather(dst={dst})')}"


@pytest.mark.jobs
def test_the_documented_script_gathers_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(documented(dies="pass"), encoding="utf-8")
    job = warm_job(tmp_path, 2, "job.py")
    assert job.code == 0, job
    run = torchprof.load(tmp_path / "job.json.gz")
    assert run.missing_ranks == () and [meta.steps for meta in run.metas] == [20, 20]
    assert job.out[0].rstrip() == run.report("ranks") and not job.out[1]


@pytest.mark.jobs
def test_if_a_rank_dies_the_others_are_gathered_and_the_report_names_it(tmp_path: Path) -> None:
    """Rank 0 is killed; rank 2 raises and still calls gather; torchrun sends SIGTERM to rank 1."""
    dies = "if rank == 0: os.kill(os.getpid(), 9)\n                if rank == 2: 1 / 0"
    job = torchrun(tmp_path, 3, documented(dies=dies, dst=1))
    assert job.code == 1, job
    run = torchprof.load(tmp_path / "job.json.gz")
    assert run.missing_ranks == (0,) and {meta.rank for meta in run.metas} == {1, 2}
    assert all(meta.steps >= 3 for meta in run.metas) and {*run.rows.columns["rank"]} == {1, 2}
    assert "Rank 0 of 3 is missing in this run." in job.out[1]


def test_an_expected_sigterm_after_the_end_is_delayed() -> None:
    """If torchrun notices late that a rank has died, there are ten more seconds to write the gathered run."""
    came: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: came.append(time.monotonic()))
    held = DelayedSigterm(later_s=0.3)
    with held:
        held.expected = True
    sent = time.monotonic()
    signal.raise_signal(signal.SIGTERM)
    assert came == []
    while not came and time.monotonic() < sent + 10:
        time.sleep(0.01)
    assert came[0] - sent >= 0.3
    signal.raise_signal(signal.SIGTERM)  # the handler from before the block
    assert len(came) == 2


def test_the_job_is_kept_after_its_process_group_is_gone() -> None:
    known = JobOfRank(3, 4, metadata="{}")
    assert this_job((), known) == known
    assert this_job((), JobOfRank(3, 4)) == this_job(()) == JobOfRank()
