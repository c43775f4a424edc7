"""What is logged of the ranks of a job during training: who is slow, who is missing, in which steps."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.hand_made_ranks import run_of_ranks
from build.jobs import even, planted
from build.places import ROOT
from build.warm import warm_job
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof import Profile, Run, TorchprofError
from torchprof.profile import gather
from torchprof.profile.gather import Comparisons, RunsInStore
from torchprof.run.words import FORWARD

if not dist.is_available():
    pytest.skip("this torch was built without torch.distributed", allow_module_level=True)

MS = 1_000_000

Logged = Callable[..., list[tuple[int, str]]]


def even_job(steps: int = 20) -> Run:
    """Four ranks, each with 10 ms of work in each step."""
    return run_of_ranks({("Net.a", FORWARD): even(10 * MS, steps=steps)}, parts={"step_ns": even(12 * MS, steps=steps)})


def ranks_of(run: Run) -> dict[int, Run]:
    return {rank: run.of_rank(rank) for rank in range(4)}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of a job that is played by one process. Its rank 0 waits for 50 ms."""
    store = dist.HashStore()
    monkeypatch.setattr(gather, "store_of_job", lambda prefix: dist.PrefixStore(prefix, store))
    monkeypatch.setattr(gather, "_PATIENCE_S", 0.05)
    return store


@pytest.fixture
def logged(store: Any, caplog: pytest.LogCaptureFixture) -> Logged:
    """Compares four ranks in a cycle, rank 0 last, and returns the levels and texts of the lines of it."""
    caplog.set_level(logging.INFO, "torchprof")

    def lines(of_ranks: Mapping[int, Comparisons], runs: Mapping[int, Run], first: int = 100) -> list[tuple[int, str]]:
        caplog.clear()
        for rank in sorted(runs, reverse=True):
            last = first + runs[rank].meta.marked_steps - 1
            of_ranks[rank].add(runs[rank], first, (first, last), rank, 4)
        assert {record.name for record in caplog.records} <= {"torchprof"}
        return [(record.levelno, record.getMessage()) for record in caplog.records]

    return lines


@pytest.fixture
def four(monkeypatch: pytest.MonkeyPatch) -> dict[int, Comparisons]:
    """The same Profile on four ranks, which are played by one process: it has one number."""
    monkeypatch.setattr(gather, "_numbers", iter([7] * 4))
    return {rank: Comparisons() for rank in range(4)}


def test_a_straggler_is_a_warning(logged: Logged, four: dict[int, Comparisons]) -> None:
    """Rank 2 takes 25 ms in 18 of 20 steps, all others 16. In the other two rank 0 takes 42."""
    [(level, text)] = logged(four, ranks_of(planted()))
    assert level == logging.WARNING
    assert text.startswith(
        "Steps 100 to 119: Rank 2 is the straggler: its own work takes 25.000ms a step, that of the others 16.000ms "
        "(median)"
    )
    assert "sent nothing" not in text


def test_no_straggler_is_an_info(logged: Logged, four: dict[int, Comparisons]) -> None:
    assert logged(four, ranks_of(even_job())) == [
        (
            logging.INFO,
            "Steps 100 to 119: No straggler found: own work takes 10.000ms to 10.000ms a step (medians over the steps)."
            " A rank whose own work takes 3% longer would most likely have been found.",
        )
    ]


def test_what_may_be_chance_is_an_info(logged: Logged, four: dict[int, Comparisons]) -> None:
    """Two steps are too few to exclude it."""
    own = {rank: [(12 if rank == 2 else 10) * MS] * 2 for rank in range(4)}
    [(level, text)] = logged(four, ranks_of(run_of_ranks({("Net.a", FORWARD): own})))
    assert "Steps 100 to 101: Rank 2 is the straggler: " in text and "This may be chance" in text
    assert level == logging.INFO


def test_ranks_that_are_late_are_named_and_compared_the_next_time(logged: Logged, four: dict[int, Comparisons]) -> None:
    runs = ranks_of(planted())
    late = runs.pop(3)
    [(level, text)] = logged(four, runs)
    assert "Rank 2 is the straggler: " in text and " Rank 3 sent nothing in time: " in text
    four[3].add(late, 100, (100, 119), 3, 4)
    [(level, text)] = logged(four, ranks_of(even_job()), 200)
    assert (level, "Steps 200 to 219: No straggler found" in text, "sent nothing" in text) == (
        logging.INFO,
        True,
        False,
    )
    [(level, text)] = logged(four, {0: runs[0]}, 300)
    assert (level, text) == (
        logging.WARNING,
        "Steps 300 to 319: there is no other rank to compare. Ranks 1 to 3 sent nothing in time: each rank has to "
        "record the same steps with log_stragglers.",
    )


def test_rank_0_waits_once_for_a_rank_that_sends_nothing(
    logged: Logged, four: dict[int, Comparisons], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int | None] = []
    wait = RunsInStore.wait_for_comparisons
    monkeypatch.setattr(
        RunsInStore,
        "wait_for_comparisons",
        lambda table, ranks, enough: waited.append(enough) or wait(table, ranks, enough),
    )
    runs = ranks_of(even_job())
    del runs[3]
    for first in (0, 20, 40):
        assert "Rank 3 sent nothing in time" in logged(four, runs, first)[0][1]
    assert "sent nothing" not in logged(four, ranks_of(even_job()), 60)[0][1]
    logged(four, ranks_of(even_job()), 80)
    assert waited == [3, 2, 2, 2, 3]


def test_an_error_while_ranks_are_compared_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a process group of MPI, which has no store."""
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr("torchprof.profile.cycle.this_job", lambda *_: torchprof.record.this_process.Job(0, 2))

    def without_a_store(prefix: str) -> None:
        raise TorchprofError("There is no store.")

    monkeypatch.setattr(gather, "store_of_job", without_a_store)
    train()
    assert [record.getMessage() for record in caplog.records] == ["Ranks were not compared: There is no store."] * 2


def test_nodes_may_name_the_job_differently(logged: Logged, four: dict[int, Comparisons]) -> None:
    """As two allocations of Slurm do that are one process group."""
    runs = {
        rank: replace(run, metas=(replace(run.meta, job=f"allocation {rank % 2}"),))
        for rank, run in ranks_of(even_job()).items()
    }
    assert "No straggler found" in logged(four, runs)[0][1]


def test_ranks_send_about_a_kilobyte_and_the_store_does_not_grow(
    store: Any, logged: Logged, four: dict[int, Comparisons], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, sent, counts = ranks_of(planted()), [], []
    write = dist.PrefixStore.set
    monkeypatch.setattr(dist.PrefixStore, "set", lambda *given: sent.append(len(given[2])) or write(*given))
    for cycle in range(6):
        logged(four, runs, 20 * cycle)
        counts.append(store.num_keys())
    assert len(sent) == 6 * 3 and max(sent) < 1500
    assert max(counts) == counts[2] == counts[5], counts
    for cycle in range(6, 12):  # rank 0 has died
        logged(four, {rank: runs[rank] for rank in (1, 2, 3)}, 20 * cycle)
        counts.append(store.num_keys())
    assert counts[-1] == counts[-3] <= 2 * (3 + 1), counts


def test_if_the_store_is_gone_training_goes_on(
    monkeypatch: pytest.MonkeyPatch, four: dict[int, Comparisons], caplog: pytest.LogCaptureFixture
) -> None:
    server = dist.TCPStore("localhost", 0, 1, True)
    client = dist.TCPStore("localhost", server.port, 1, False)
    monkeypatch.setattr(gather, "store_of_job", lambda prefix: dist.PrefixStore(prefix, client))
    del server
    for rank, run in ranks_of(even_job()).items():
        for first in (0, 20, 40):
            four[rank].add(run, first, (first, first), rank, 4)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3 and all("Ranks 1 to 3 sent nothing in time" in text for text in texts)


def train(**options: Any) -> None:
    """Two cycles of two steps, and one step more."""
    model = nn.Linear(2, 2)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2)
    with Profile(model, schedule=schedule, on_trace_ready=torchprof.log_stragglers, **options) as prof:
        for _ in range(9):
            model(torch.rand(1, 2)).sum().backward()
            prof.step()


def test_each_profile_compares_its_own_cycles(
    store: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of a job of two ranks: the other one sends nothing."""
    caplog.set_level(logging.INFO, "torchprof")
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 2)):
        monkeypatch.setattr(dist, name, lambda value=value: value)
    monkeypatch.setattr("torchprof.profile.cycle.this_job", lambda *_: torchprof.record.this_process.Job(0, 2))
    prefixes: list[str] = []
    of_job = gather.store_of_job
    monkeypatch.setattr(gather, "store_of_job", lambda prefix: prefixes.append(prefix) or of_job(prefix))
    train()
    train(with_flops=True)
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["Steps 2 to 3", "Steps 6 to 7"] * 2
    first, *_, last = [int(prefix.split("/")[2]) for prefix in prefixes]
    assert last == first + 1 and len(set(prefixes)) == 4


def test_without_a_process_group_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torchprof")
    train()
    train(enabled=False)
    assert caplog.records == []
    with pytest.raises(TorchprofError, match="has not ended"), Profile(nn.Linear(2, 2)) as prof:
        torchprof.log_stragglers(prof)


@pytest.mark.jobs
def test_a_rank_with_a_delay_is_logged_in_each_cycle_of_a_job(tmp_path: Path) -> None:
    """Rank 1 takes 80 ms more in each step of the second training, and all take 10 in both."""
    job = warm_job(tmp_path, 3, str(ROOT / "test" / "build" / "delayed_training.py"), "log", "layer")
    assert job.code == 0, job
    assert job.out[1:] == ("", "")
    lines = job.out[0].splitlines()
    steps = [re.sub(r"^torchprof \w+ (Steps \d+ to \d+): .*", r"\1", line) for line in lines]
    assert steps == ["Steps 2 to 9", "Steps 12 to 19"] * 2, job
    certain = [line.startswith("torchprof WARNING") for line in lines]
    assert not any(level and "Rank 1 is" in line for level, line in zip(certain[:2], lines)), job
    for level, line in zip(certain[2:], lines[2:]):
        assert "Rank 1 is the straggler: " in line, job
        assert level != ("This may be chance" in line), job  # it may be on a busy machine
