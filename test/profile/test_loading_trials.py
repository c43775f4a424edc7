"""Remedies of a DataLoader that are carried out: what they gain, and that nothing of the user changes."""

from __future__ import annotations

import multiprocessing
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, TensorDataset

from torchprof import Profile
from torchprof.profile import remedies, trials
from torchprof.profile.trials import Trials, TryingProgram, of_all_time
from torchprof.run.measures import Trial

WORKERS = "Load batches in worker processes: `DataLoader(…, num_workers=1, persistent_workers=True)`."
BY_BATCH = "Index whole batches: `DataLoader(data, sampler=BatchSampler(sampler, size, False), batch_size=None)`."
KEEP = "Keep the workers: `DataLoader(…, persistent_workers=True)`; or let one pass over the data be longer."
MORE = "Use more workers (`DataLoader(…, num_workers=…)`), or do less work per batch."


class Clock:
    """Of this process: what a worker does, takes no time here."""

    now = 0.0


class Items(Dataset[Tensor]):
    """Each takes a second, and counts; or raises an error, or sleeps, in a worker."""

    def __init__(self, length: int = 64, in_worker: Callable[[], None] = int) -> None:
        self.length, self.in_worker, self.reads, self.process = length, in_worker, 0, os.getpid()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.reads += 1
        Clock.now += 1.0
        if os.getpid() != self.process:
            self.in_worker()
        return torch.rand(4) + np.random.rand() + random.random()


class Rows(TensorDataset):
    """A selection takes a second, of one row or of many."""

    def __getitem__(self, index: Any) -> Any:
        Clock.now += 1.0
        return super().__getitem__(index)


class Model(nn.Module):
    """A call takes 4 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        Clock.now += 4.0
        return self.layer(x)  # type: ignore[no-any-return]


@pytest.fixture(autouse=True)
def _clocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(trials, "_SECONDS", (0.02, 0.02))
    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: lambda: Clock.now)
    yield
    assert multiprocessing.active_children() == [], "a worker of a trial is left"


def tried(loader: Any, remedy: str, rule: str = "waiting_for_data") -> Trial:
    """The trial of the remedy of a loader, in the third step of a loop that reads from it."""
    model = Model()
    with Profile(model) as prof:
        batches = iter(loader)
        for _ in range(3):
            x = next(batches)
            model(x[0] if isinstance(x, (list, tuple)) else x)
    plan = prof._plan
    made = Trials(prof.run, model, plan.modules_by_name, (torch.rand(2, 4),), {}, 1e6)
    [trial] = made.of([(rule, (), remedy)])
    return trial


def test_workers_take_the_time_of_loading_off_the_loop() -> None:
    """Batches of four: a step takes 4 + 4 s. A worker loads meanwhile."""
    trial = tried(DataLoader(Items(), batch_size=4), WORKERS)
    assert (trial.why_not, trial.how) == ("", "DataLoader(…, num_workers=1, persistent_workers=True)")
    assert (trial.gain, trial.low, trial.high) == (0.5, 0.5, 0.5)
    assert (trial.before_ns, trial.after_ns) == (8e9, 4e9)  # of a step
    assert trial.pairs >= 6 and trial.has_gained


def test_as_many_batches_come_before_a_call_as_in_the_loop() -> None:
    model, loader = Model(), DataLoader(Items(), batch_size=4)
    with Profile(model) as prof:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
            model(next(batches))
    made = Trials(prof.run, model, prof._plan.modules_by_name, (torch.rand(2, 4),), {}, 1e6)
    [trial] = made.of([("waiting_for_data", (), WORKERS)])
    assert (trial.before_ns, trial.after_ns) == (12e9, 4e9)


def test_rows_that_are_indexed_by_batch() -> None:
    """Eight selections become one: 4 + 8 s become 4 + 1 s."""
    trial = tried(DataLoader(Rows(torch.rand(64, 4), torch.rand(64)), batch_size=8, shuffle=True), BY_BATCH)
    assert (trial.before_ns, trial.after_ns, trial.why_not) == (12e9, 5e9, "")
    assert trial.gain == pytest.approx(7 / 12)


@pytest.mark.parametrize(("remedy", "how"), [(KEEP, "persistent_workers=True"), (MORE, "num_workers=2")])
def test_loaders_with_workers(monkeypatch: pytest.MonkeyPatch, remedy: str, how: str) -> None:
    """By a stopwatch: to keep the workers saves their start, which takes longer than all else."""
    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: time.perf_counter)
    monkeypatch.setattr(remedies, "usable_cpus", lambda: 2)
    trial = tried(DataLoader(Items(16), batch_size=4, num_workers=1), remedy)
    assert trial.how == f"DataLoader(…, {how})" and trial.why_not == "" and trial.pairs >= 6
    assert trial.has_gained or remedy != KEEP


def test_nothing_of_the_user_changes() -> None:
    """Neither the data set, nor the order of its batches, nor the random states of torch, NumPy and Python."""

    def batches_of(is_tried: bool) -> tuple[list[Tensor], str]:
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        data, model, generator, batches = Items(), Model(), torch.Generator().manual_seed(3), []
        for batch in DataLoader(data, 4, sampler=RandomSampler(data, generator=generator)):
            batches.append(batch)
            if len(batches) == 3 and is_tried:
                with Profile(model) as prof:
                    model(batch)
                made = Trials(prof.run, model, prof._plan.modules_by_name, (batch,), {}, 1e6)
                [trial] = made.of([("waiting_for_data", (), WORKERS)])
                assert trial.why_not == ""
        assert data.reads == 64
        return batches, str((torch.rand(2), np.random.rand(), random.random(), torch.rand(2, generator=generator)))

    (plain, then), (tried_ones, then_tried) = batches_of(False), batches_of(True)
    assert all(map(torch.equal, plain, tried_ones)) and then == then_tried


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(4)


class Mapped(Items):
    def __init__(self, path: str) -> None:
        super().__init__()
        self.values = np.memmap(path, np.float32, "w+", shape=(4,))


def raises() -> None:
    raise OSError("no disk")


@pytest.mark.parametrize(
    ("make", "remedy", "why"),
    [
        (lambda _: DataLoader(Stream(), batch_size=4), WORKERS, "its data set is a stream, which cannot be read twice"),
        (lambda tmp_path: DataLoader(Mapped(f"{tmp_path}/m")), WORKERS, "its data set maps a file to memory"),
        (lambda _: DataLoader(Items(), 4), KEEP, "the loop reads from another loader now"),
        (lambda _: DataLoader(Items(), 4, num_workers=1), WORKERS, "the loop reads from another loader now"),
        (lambda _: [torch.rand(2, 4)] * 4, WORKERS, "no loader was found"),
        (lambda _: DataLoader(Items(), 4, collate_fn=torch.stack), BY_BATCH, "its batches are made by your code"),
        (lambda _: DataLoader([torch.rand(4)] * 20, 4), BY_BATCH, "TypeError: list indices must be integers or slices"),
        (lambda _: DataLoader(Items(), 4), BY_BATCH, "data[indices] are not the same batch"),
        (lambda _: DataLoader(Items(in_worker=raises), 4), WORKERS, "OSError: Caught OSError in DataLoader worker"),
        (lambda _: DataLoader(Items(in_worker=lambda: os._exit(3)), 4), WORKERS, "RuntimeError: DataLoader worker"),
        (lambda _: DataLoader(Items(in_worker=lambda: time.sleep(60)), 4), WORKERS, "RuntimeError: DataLoader timed"),
        (lambda _: DataLoader(Items(), 4), "Use larger batches (`batch_size=…`).", "it changes your code"),
    ],
)
def test_why_a_loader_is_not_tried(
    make: Callable[[object], Any], remedy: str, why: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remedies, "_MOST_SECONDS", 1)
    assert tried(make(tmp_path), remedy).why_not.startswith(why)


def test_a_remedy_of_other_rules_is_not_that_of_a_loader() -> None:
    assert tried(DataLoader(Items(), 4), WORKERS, "python_in_layers").why_not == "it changes your code"


def test_workers_that_are_kept_cannot_be_kept() -> None:
    loader = DataLoader(Items(), 4, num_workers=1, persistent_workers=True)
    assert tried(loader, KEEP).why_not == "the loop reads from another loader now"


def test_no_more_workers_than_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remedies, "usable_cpus", lambda: 1)
    trial = tried(DataLoader(Items(), 4, num_workers=1), MORE)
    assert trial.why_not == "there are no more processors than the 1 workers of the loader"


def test_what_would_take_hours_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass of 400 batches that take 20 ms each, with half a second for all trials."""
    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: time.perf_counter)
    model = Model()
    with Profile(model) as prof:
        batches = iter(DataLoader(Items(400, lambda: time.sleep(0.02)), 1, num_workers=1))
        model(next(batches))
        model(next(batches))
    made = Trials(prof.run, model, prof._plan.modules_by_name, (torch.rand(2, 4),), {}, 0.5)
    began = time.perf_counter()
    [trial] = made.of([("waiting_for_data", (), KEEP)])
    assert trial.why_not == "the time for trials is spent" and time.perf_counter() - began < 10
    del batches


def test_to_ask_does_not_fix_how_processes_start() -> None:
    """``multiprocessing.set_start_method`` works only until a method was used."""
    code = "import multiprocessing, torch\nfrom torchprof.profile import remedies\n"
    code += "from torch.utils.data import DataLoader\nloader = iter(DataLoader(range(9)))\nnext(loader)\n"
    code += f"remedies.remedy_to_try('waiting_for_data', {WORKERS!r})\nmultiprocessing.set_start_method('spawn')"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("most", ["_MOST_BYTES", "_MOST_OBJECTS"])
def test_a_large_data_set_is_not_copied(monkeypatch: pytest.MonkeyPatch, most: str) -> None:
    """It has a view of a tensor of 4 MiB, or 2,000 strings."""
    data = Items()
    held = torch.zeros(1024, 1024)[0]
    data.held = held, [str(number) for number in range(2000)]  # type: ignore[attr-defined]
    monkeypatch.setattr(remedies, most, {"_MOST_BYTES": 2**22, "_MOST_OBJECTS": 2000}[most])
    assert tried(DataLoader(data, 4), WORKERS).why_not.startswith("its data set has more than ")


def test_loaders_whose_workers_do_not_fork_are_not_tried() -> None:
    """The loader has a context of its own. Then nothing is started."""
    loader = DataLoader(Slow(), 4, num_workers=1, multiprocessing_context="forkserver")
    assert tried(loader, KEEP).why_not == "new workers would run the script again, since they do not start by fork"


def test_a_mapped_file_is_found_behind_a_view(tmp_path: Any) -> None:
    mapped = np.memmap(tmp_path / "data", np.float32, "w+", shape=(8, 4))
    data = Items()
    data.rows = np.asarray(mapped)[2:]  # type: ignore[attr-defined]
    assert tried(DataLoader(data, 4), WORKERS).why_not == "its data set maps a file to memory"


def test_workers_that_would_import_the_script_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none: "spawn")
    assert (
        tried(DataLoader(Items(), 4), WORKERS).why_not
        == "new workers would run the script again, since they do not start by fork"
    )


def test_the_loader_in_the_middle_of_its_pass_is_the_one_in_use() -> None:
    """An evaluation that ended keeps its iterator; of two that are read in turn, none is known to be the one."""
    ended = iter(DataLoader(Items(), 32))
    assert [len(batch) for batch in ended] == [32, 32]
    assert tried(DataLoader(Items(), batch_size=4), WORKERS).why_not == ""
    other = iter(DataLoader(Items(), 4))
    next(other)
    assert tried(DataLoader(Items(), batch_size=4), WORKERS).why_not == "the loop reads from 2 loaders"


def test_batches_of_a_batch_sampler_and_single_items() -> None:
    data = Items()
    by_sampler = DataLoader(data, batch_sampler=BatchSampler(RandomSampler(data), 2, False))
    assert tried(by_sampler, WORKERS).before_ns == 6e9
    assert tried(DataLoader(data, batch_size=None), WORKERS).before_ns == 5e9


def test_the_share_of_a_loader_is_that_of_the_step_and_of_loading() -> None:
    """A hand calculation: half of a step with its data is saved."""
    model, loader = Model(), DataLoader(Items(), batch_size=4)
    with Profile(model) as prof:
        for batch in loader:
            model(batch)
            time.sleep(0.001)
    run = prof.run
    rows = run.rows.summed(("layer",), "cpu_ns")
    names = run.rows.summed("frames", "cpu_ns").items()
    loading = sum(ns for at, ns in names if any("DataLoader" in frame.name for frame in run.rows.frames[at]))
    part = sum(ns for (layer,), ns in rows.items() if layer >= 0) + loading
    trial = Trial(0, "waiting_for_data", (), "DataLoader(…)", "", 6, part // 16, part // 32, 0.5, 0.4, 0.6)
    [done] = of_all_time(run, "Model", 0, [trial])
    share = part / run.meta.wall_ns
    assert (done.gain, done.low, done.high) == pytest.approx((0.5 * share, 0.4 * share, 0.6 * share), rel=1e-3)


def test_a_script_is_tried_with_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its finding says what is tried, and the result is in its place."""
    monkeypatch.setattr(trials, "clock_that_waits", lambda devices, clock: time.perf_counter)
    monkeypatch.setattr(trials, "_SECONDS", (0.5, 0.5))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)  # else workers are said to disturb the loop
    model, losses = Sleepy(4, 4), []
    with TryingProgram(seconds=20) as program:
        for batch in DataLoader(Slow(), batch_size=4):
            loss = model(batch).sum()
            loss.backward()
            losses.append(loss.item())
    [finding] = [each for each in program.run.findings if each.rule == "waiting_for_data"]
    assert finding.trial is not None and finding.trial.how.startswith("DataLoader(…, num_workers=")
    assert finding.trial.has_gained, "both sleep as long: half of the time is left"
    assert len(losses) == 50


class Sleepy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        time.sleep(0.012)
        return super().forward(x)


class Slow(Dataset[Tensor]):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        time.sleep(0.003)
        return torch.ones(4)
