"""``torchprof.watch``: reports on a training of any length, from time to time."""

from __future__ import annotations

import gc
import logging
import shutil
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from build.hand_made import run_of
from build.models import Mlp
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof import Run, TorchprofError
from torchprof.comparison import drift
from torchprof.profile import passes, watch
from torchprof.profile.passes import is_sampled
from torchprof.profile.watch import Pace
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

X = torch.ones(3, 4)
SOON = 1e-9
"""With this many seconds from report to report, each burst of recorded passes has one."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of each 64 passes are recorded, whatever that costs; other tests' optimizers are gone."""
    monkeypatch.setattr(watch, "_MOST_COST", 1e9)
    monkeypatch.setattr(watch, "_USUAL_GAP", 64)
    monkeypatch.setattr(passes, "UNUSUAL", float("inf"))
    gc.collect()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Callable[[], list[tuple[int, str]]]:
    caplog.set_level(logging.INFO, "torchprof")
    return lambda: [(record.levelno, record.getMessage()) for record in caplog.records if record.name == "torchprof"]


def trainer(model: nn.Module) -> Callable[[], None]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(X).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def is_recorded() -> bool:
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def calls(run: Run, name: str = "Mlp.fc1") -> int:
    return {layer.name: run.rows.forward_calls(index) for index, layer in enumerate(run.layers)}[name]


# Reports


def test_reports_have_all_steps_between_them(tmp_path: Path, lines: Callable[[], list[tuple[int, str]]]) -> None:
    model = Mlp()
    step, seen, numbers = trainer(model), list[bool](), list[Mapping[str, float]]()
    with torchprof.watch(model, every=SOON, folder=tmp_path, metrics=numbers.append) as watched:
        for _ in range(301):
            step()
            seen.append(is_recorded())
    # The first step is start-up; then four of each 64, after the first ones.
    of_number = [is_sampled(number) if number < 64 else number % 64 < 4 for number in range(300)]
    assert seen == [True, *of_number]
    runs = [torchprof.load(file) for file in sorted(tmp_path.iterdir())]
    # A report comes after the first pass that is not recorded. No burst is in steps 262 to 300, so neither is a report.
    assert [calls(run) for run in runs] == [21, 16, 32, 64, 64, 64] == [run.meta.steps for run in runs]
    assert [run.passes[0].recorded for run in runs] == [20, 4, 4, 4, 4, 4]
    assert watched.run == runs[-1] and watched.steps == 261
    medians = [run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")].median for run in runs]
    assert [each["time/step/median_ms"] for each in numbers] == [ns / 1e6 for ns in medians]
    texts = [text for _, text in lines()]
    assert [text.partition(":")[0] for text in texts[:3]] == ["Steps 1 to 21", "Steps 22 to 37", "Steps 38 to 69"]
    assert ", 20 recorded." in texts[0] and ", 4 recorded." in texts[1] and "since" not in texts[1]
    assert len(texts) == 6 and "steps 22 to 37" in texts[2]


def test_the_last_runs_stay_and_the_first_full_one(tmp_path: Path) -> None:
    (tmp_path / "of-the-user.json.gz").write_text("stays")
    with torchprof.watch(Mlp(), every=SOON, folder=tmp_path, keep=2):
        pass  # no step: no report
    assert [file.name for file in tmp_path.iterdir()] == ["of-the-user.json.gz"]
    model = Mlp()
    step = trainer(model)
    with torchprof.watch(model, every=SOON, folder=tmp_path, keep=2):
        for _ in range(301):
            step()
    numbers = [file.name.split("-")[2] for file in sorted(tmp_path.iterdir())]
    assert numbers == ["00001", "00004", "00005", "user.json.gz"]


def test_an_error_of_the_user_or_of_a_disk_ends_nothing(
    tmp_path: Path, lines: Callable[[], list[tuple[int, str]]]
) -> None:
    model, seen = Mlp(), list[int]()
    step, folder = trainer(model), tmp_path / "runs"

    def fails(numbers: Mapping[str, float]) -> None:
        seen.append(len(numbers))
        raise ValueError("no network")

    with torchprof.watch(model, every=SOON, folder=folder, metrics=fails) as watched:
        for number in range(100):
            step()
            if number == 30:
                shutil.rmtree(folder)
    failed = [text for level, text in lines() if "report failed" in text]
    assert len(seen) == 3 and failed[0] == "A part of a report failed: ValueError: no network" and len(failed) == 5
    assert sum(text.endswith("does not exist. Make it first.") for text in failed) == 2 and watched.steps == 69


def test_an_error_of_ours_ends_the_watch_and_not_the_training(
    lines: Callable[[], list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Mlp()
    step, call = trainer(model), nn.Module.__call__
    watched = torchprof.watch(model, every=SOON)
    for number in range(30):
        if number == 10:
            monkeypatch.setattr(watched._recording, "_begin_pass", lambda kind: 1 / 0)
        step()
    assert lines()[-1] == (logging.WARNING, "Watching has ended: ZeroDivisionError: division by zero")
    assert nn.Module.__call__ is call and not is_recorded()
    watched.stop()


def test_after_the_watch_all_is_as_before() -> None:
    model = Mlp()
    step, call, forward = trainer(model), nn.Module.__call__, vars(Mlp)["forward"]
    watched = torchprof.watch(model)
    for _ in range(10):
        step()
    assert nn.Module.__call__ is not call
    watched.stop()
    watched.stop()
    assert nn.Module.__call__ is call and vars(Mlp)["forward"] is forward and not is_recorded()
    assert watched.run is not None and calls(watched.run) == 9


def test_other_models_are_not_watched() -> None:
    """A module around the model is, as DistributedDataParallel; a critic of its own is not."""
    model, other = Mlp(), nn.Linear(4, 2)
    wrapper = nn.Sequential(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with torchprof.watch(model) as watched:
        for _ in range(10):
            (wrapper(X).sum() + other(X).sum()).backward()
            optimizer.step()
    assert watched.run is not None
    assert [layer.name for layer in watched.run.layers if len(layer.path) == 1] == ["Sequential"]


# Other profilers


@pytest.mark.parametrize("ours", [False, True])
def test_another_profiler_may_run_between_bursts(ours: bool, lines: Callable[[], list[tuple[int, str]]]) -> None:
    model = Mlp()
    step = trainer(model)
    with torchprof.watch(model, every=SOON) as watched:
        for _ in range(30):
            step()
        with torchprof.Profile(model) if ours else torch.profiler.profile() as theirs:  # around the passes 32 to 35
            for _ in range(20):
                step()
        for _ in range(30):
            step()
    if isinstance(theirs, torchprof.Profile):
        assert calls(theirs.run) == 20
    else:
        assert sum(event.name == "aten::addmm" for event in theirs.events()) == 40
    assert watched.run is not None and [text for _, text in lines()][-1].startswith("Steps 22 to 69: ")
    assert watched.run.passes[0].recorded == 4  # passes 64 to 67


def test_a_profiler_that_starts_inside_a_burst_ends_the_watch(lines: Callable[[], list[tuple[int, str]]]) -> None:
    model = Mlp()
    step = trainer(model)
    with torchprof.watch(model) as watched:
        for _ in range(10):
            step()
        with torch.profiler.profile() as theirs:
            step()
        step()
    assert sum(event.name == "aten::addmm" for event in theirs.events()) == 2
    assert watched.run is not None and calls(watched.run) == 9
    assert "Watching has ended: " in lines()[-1][1] and "profiler" in lines()[-1][1]


# Which passes, and when reports come


def test_the_gap_follows_from_what_recording_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording costs 8 ms a burst, a pass takes 1 ms: 0.5 % of 1,600 passes, so one burst in 2,048."""
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    pace = Pace(3600, lambda: True)
    assert not pace.note_burst(None, 1_000_000) and not pace.note_burst(8_000_000, 1_000_000)
    recorded = [number for number in range(10_000) if pace.is_recorded(number)]
    assert recorded == [
        *(number for number in range(64) if is_sampled(number)),
        *(number for number in range(64, 10_000) if number % 2048 < 4),
    ]


def test_all_ranks_record_the_same_passes_and_report_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """On rank 1 recording seems to cost nothing, and its clock says that no report is due: rank 0 decides."""
    store, rank = dist.HashStore(), 0
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    monkeypatch.setattr(watch, "store_of_job", lambda prefix: dist.PrefixStore("same", store))
    monkeypatch.setattr(watch, "_rank_and_world_size", lambda: (rank, 2))
    paces = Pace(SOON, lambda: True), Pace(3600, lambda: True)
    seen: list[list[tuple[bool, bool]]] = [[], []]
    for number in range(5_000):
        for rank, pace in enumerate(paces):
            is_recorded = pace.is_recorded(number)
            is_due = number % 64 == 4 and pace.note_burst(8_000_000 if rank == 0 else 0, 1_000_000)
            if is_due:
                pace.note_report()
            seen[rank].append((is_recorded, is_due))
    assert seen[0] == seen[1]
    assert sum(recorded for recorded, _ in seen[0]) == 20 + 4 + 2 * 4
    assert sum(due for _, due in seen[0]) == 39  # after every second burst: one announces the next


def test_memory_stays_the_same(caplog: pytest.LogCaptureFixture) -> None:
    """What is kept of a step grows in each series of steps, a cache only in some."""
    caplog.set_level(logging.CRITICAL, "torchprof")  # pytest keeps the lines
    model = Mlp()
    step, sizes = trainer(model), []
    with torchprof.watch(model, every=SOON):
        for _ in range(600):
            step()
        tracemalloc.start()
        try:
            for _ in range(5):
                for _ in range(256):  # with four bursts and reports
                    step()
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert min(after - before for before, after in pairwise(sizes)) < 20_000


# What is slower than before


def steps_with(layer_ns: Sequence[int], step_ns: Sequence[int]) -> Run:
    """A run of steps of a model with a layer, which takes ``layer_ns`` in backward of each step of ``step_ns``."""
    layers = Layer(("Net",), "Net"), Layer(("Net", "slow"), "Linear")
    samples = {
        SampleKey(layer, phase, 0, "cpu", measure): Spread.of([*enumerate(values)])
        for layer, phase, measure, values in (
            (OUTSIDE, FORWARD, "step_ns", step_ns),
            (0, BACKWARD, "step_cpu_ns", [ns + 1_000 for ns in layer_ns]),
            (1, BACKWARD, "step_cpu_ns", layer_ns),
            (OUTSIDE, FORWARD, "step_optimizer_ns", [5_000, 6_000] * (len(step_ns) // 2)),
        )
    }
    return replace(run_of((), layers=layers), samples=samples)


def test_drift_is_named_with_its_layer() -> None:
    usual = steps_with([10_000, 11_000] * 10, [50_000, 51_000] * 10)
    slower = steps_with([30_000, 31_000] * 10, [70_000, 71_000] * 10)
    assert drift(usual, slower, "steps 1 to 20") == (
        True,
        "That is 39.6% longer than steps 1 to 20 (50.500us). Most of that: Net.slow, backward (+20.000us).",
    )
    assert drift(slower, usual, "steps 1 to 20")[1].startswith("That is 28.4% shorter than steps 1 to 20 (70.500us).")
    assert drift(usual, usual, "steps 1 to 20") == (False, "No change beyond noise since steps 1 to 20 (50.500us).")
    assert drift(run_of(()), usual, "steps 1 to 20") == (False, "")


def test_where_it_is_slower_is_unknown_if_no_layer_differs() -> None:
    usual = steps_with([10_000, 11_000] * 10, [50_000, 51_000] * 10)
    slower = steps_with([10_000, 11_000] * 10, [70_000, 71_000] * 10)
    assert drift(usual, slower, "steps 1 to 20")[1].endswith("(50.500us). No layer is known to differ beyond noise.")


# Bad input


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"every": 0}, "every=0 is not a number of seconds above 0."),
        ({"every": "1h"}, "every='1h' is not a number of seconds above 0."),
        ({"keep": 0}, "keep must be a number of files, 1 or more"),
        ({"metrics": {}}, "metrics={} is not a function: give for example wandb.log."),
        ({"model": "resnet"}, "resnet"),
    ],
)
def test_wrong_arguments_are_refused(options: dict[str, Any], said: str) -> None:
    call = nn.Module.__call__
    with pytest.raises(TorchprofError) as error:
        torchprof.watch(**{"model": Mlp(), **options})
    assert said in str(error.value) and nn.Module.__call__ is call


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TorchprofError, match=r"No folder for runs can be made at .*file/runs"):
        torchprof.watch(Mlp(), folder=tmp_path / "file" / "runs")
