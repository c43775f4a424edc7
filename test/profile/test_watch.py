"""``torchprof.watch``: reports on a training of any length, from time to time."""

from __future__ import annotations

import gc
import logging
import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from build.hand_made import run_of
from build.loops import X, is_recorded, trainer
from build.models import Mlp
from build.places import ROOT
from build.processes import in_thread
from build.warm import warm_job
from torch import distributed as dist
from torch import nn

import torchprof
from torchprof import Run, TorchprofError
from torchprof.comparison import drift
from torchprof.profile import passes, watch
from torchprof.profile.passes import PassKind, is_sampled
from torchprof.profile.program import Program
from torchprof.profile.watch import Pace
from torchprof.run.layers import Layer
from torchprof.run.measures import SampleKey, Spread
from torchprof.run.words import BACKWARD, FORWARD, OUTSIDE

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
    assert seen == [is_sampled(number) if number < 64 else number % 64 < 4 for number in range(301)]
    runs = [torchprof.load(file) for file in sorted(tmp_path.iterdir())]
    # A report comes after the first pass that is not recorded. No burst is in steps 262 to 301, so neither is a report.
    assert [calls(run) for run in runs] == [20, 16, 32, 64, 64, 64] == [run.meta.steps for run in runs]
    assert [run.passes[0].recorded for run in runs] == [19, 4, 4, 4, 4, 4]
    assert watched.run == runs[-1] and watched.steps == 261
    medians = [run.samples[SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_ns")].median for run in runs]
    assert [each["time/step/median_ms"] for each in numbers] == [ns / 1e6 for ns in medians]
    texts = [text for _, text in lines()]
    begins = [text.partition(":")[0] for text in texts]
    assert begins[:3] == ["Steps 2 to 21", "Steps 22 to 37", "Steps 38 to 69"] and begins[-1] == "Steps 262 to 301"
    assert ": 19 recorded, in which a step took " in texts[0]  # one step without the profiler has no median
    assert ": median " in texts[1] and ", 4 recorded." in texts[1] and "since" not in texts[1]
    assert len(texts) == 7 and "steps 22 to 37" in texts[2] and texts[-1].endswith(", none recorded.")


def test_under_torchprof_run_a_watch_does_nothing(lines: Callable[[], list[tuple[int, str]]]) -> None:
    step = trainer(model := Mlp())
    with Program(warmup_calls=None) as program, torchprof.watch(model) as watched:
        for _ in range(10):
            step()
    assert calls(program.run) == 9 and watched.run is None
    assert lines() == [(logging.WARNING, "This script is recorded by torchprof run: torchprof.watch does nothing.")]


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
    numbers = [file.name.split("-")[-2] for file in sorted(tmp_path.iterdir())]
    assert numbers == ["00001", "00004", "00005", "the"]


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


@pytest.mark.parametrize("where", ["_after_step", "_after_call"])
def test_an_error_of_ours_around_calls_and_steps_reaches_nobody(
    where: str, lines: Callable[[], list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, call = trainer(model := Mlp()), nn.Module.__call__
    monkeypatch.setattr(Program, where, lambda *_: 1 / 0)
    watched = torchprof.watch(model)
    for _ in range(30):
        step()
    watched.stop()
    assert lines() == [(logging.WARNING, "Watching has ended: ZeroDivisionError: division by zero")]
    assert nn.Module.__call__ is call and not is_recorded()


def test_an_error_at_the_end_reaches_nobody(
    lines: Callable[[], list[tuple[int, str]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step, call = trainer(model := Mlp()), nn.Module.__call__
    watched = torchprof.watch(model)
    for _ in range(10):
        step()
    monkeypatch.setattr(watched._recording, "_end_cycle", lambda: 1 / 0)
    watched.stop()
    assert lines()[0] == (logging.WARNING, "The last report of a watch failed: ZeroDivisionError: division by zero")
    assert nn.Module.__call__ is call and not is_recorded()


@pytest.mark.parametrize("steps", [3, 30])
def test_at_the_end_of_the_process_there_is_a_report(steps: int) -> None:
    code = f"""
import logging, torch, torchprof
logging.basicConfig(level=logging.INFO)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torchprof.watch(model)
for _ in range({steps}):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr.startswith(f"INFO:torchprof:Steps 2 to {steps}: median ") and done.stderr.count("\n") == 1
    assert f", {'all' if steps < 20 else 19} recorded." in done.stderr


def test_a_training_that_was_not_seen_is_told(lines: Callable[[], list[tuple[int, str]]]) -> None:
    step = trainer(model := Mlp())
    with torchprof.watch(model):
        in_thread(lambda: [step() for _ in range(5)])
    assert [text for _, text in lines()] == [
        "A watch saw no step: torchprof.watch has to be called on the thread that trains the model."
    ]


def test_evaluation_is_no_step(lines: Callable[[], list[tuple[int, str]]]) -> None:
    """Nor is what comes after the loop, before the end of the watch."""
    step = trainer(model := Mlp())
    with torchprof.watch(model):
        for number in range(90):
            step()
            with torch.no_grad():
                for _ in range(3 if number % 10 == 9 else 0):
                    model(X)
        time.sleep(0.3)
    [text] = [text for _, text in lines()]
    # Of steps, numbers 1 to 19, 32 to 35 and 64 to 67; the first is start-up.
    assert text.startswith("Steps 2 to 90: ") and ", 27 recorded." in text and "sleep" not in text


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_fork_reports_nothing(tmp_path: Path) -> None:
    """Neither where it calls the model, nor at its end."""
    code = f"""
import logging, os, sys, torch, torchprof
logging.basicConfig(level=logging.INFO)
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def train():
    for _ in range(30):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
watched = torchprof.watch(model, every=1e-9, folder={str(tmp_path)!r}, use_cuda=False)
train()
if not (child := os.fork()):
    with torch.no_grad():
        for _ in range(100):
            model(torch.ones(3, 4))
    watched.stop()
    os._exit(0)  # torch hangs in a child that ends otherwise, once its profiler was used
assert os.waitpid(child, 0)[1] == 0
"""
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    begins = [line.partition(": ")[0] for line in done.stderr.splitlines()]
    assert begins == ["INFO:torchprof:Steps 2 to 21", "INFO:torchprof:Steps 22 to 30"]
    assert len([*tmp_path.iterdir()]) == 1, "the second line is of the parent, in which no burst came"


def test_a_second_watch_is_refused() -> None:
    with torchprof.watch(Mlp()), pytest.raises(TorchprofError, match=r"watch\(\[first, second\]\)"):
        torchprof.watch(Mlp())
    torchprof.watch(Mlp()).stop()


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
    assert watched.run is not None and [text for _, text in lines()][1].startswith("Steps 22 to 69: ")
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


TRAINING, EVALUATION = PassKind(0, True, True), PassKind(0, False, False)


def test_the_gap_follows_from_what_recording_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recording costs 8 ms a burst, a pass takes 1 ms: 0.5 % of 1,600 passes, so one burst in 2,048. The first cost
    counts: a pause in a later burst does not."""
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    pace = Pace(3600, lambda: True)
    pace.note(TRAINING)
    pace.note_cost(8_000_000, 1_000_000)
    pace.note_cost(8_000_000_000, 1_000_000)
    recorded = [number for number in range(10_000) if pace.is_recorded(number)]
    assert recorded == [
        *(number for number in range(64) if is_sampled(number)),
        *(number for number in range(64, 10_000) if number % 2048 < 4),
    ]
    assert [number for number in range(5_000) if pace.is_after_burst(number)] == [21, 37, 2053, 4101]


def test_a_burst_comes_as_often_as_a_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 100 ms a pass, a report each minute is one in 600 passes: not fewer bursts than one in 512."""
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    pace = Pace(60, lambda: True)
    pace.note(TRAINING)
    pace.note_cost(60_000_000_000, 100_000_000)
    assert sum(map(pace.is_recorded, range(64, 2048))) == 3 * 4


def test_evaluation_decides_nothing_once_there_is_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    pace = Pace(3600, lambda: True)
    assert pace.note(EVALUATION)
    pace.note_cost(100_000_000, 100_000)
    assert not any(map(pace.is_recorded, range(64, 1000)))  # 0.1 ms a pass: a gap of 262,144
    assert pace.note(TRAINING) and not pace.note(EVALUATION)
    assert pace.is_recorded(1024 * 3)  # not decided yet
    pace.note(TRAINING)
    pace.note_cost(100_000_000, 100_000_000)
    assert [number for number in range(64, 600) if pace.is_recorded(number)] == [*range(256, 260), *range(512, 516)]


@pytest.fixture
def of_rank(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A job of two ranks, played by one process: which rank it is."""
    store, rank = dist.HashStore(), [0]
    monkeypatch.setattr(watch, "_MOST_COST", 0.005)
    monkeypatch.setattr(watch, "store_of_job", lambda prefix: dist.PrefixStore("same", store))
    monkeypatch.setattr(watch, "_rank_and_world_size", lambda: (rank[0], 2))
    return rank


def played(of_rank: list[int], costs: Mapping[int, float], is_evaluating: Callable[[int, int], bool]) -> list[Any]:
    """Of each rank, the training passes that it records, and those before which it reports. ``costs``: of a burst;
    ``is_evaluating``: whether a rank evaluates before a training pass. By its clock, rank 1 never reports."""
    paces = Pace(SOON, lambda: True), Pace(3600, lambda: True)
    seen: list[Any] = [([], []), ([], [])]
    paces[0]._every_s = 3600  # for the gap; and so the first report is due at once
    for number in range(9_000):
        for rank, pace in enumerate(paces):
            of_rank[0] = rank
            for evaluated in range(3) if is_evaluating(rank, number) else ():
                pace.note(EVALUATION)
                pace.is_recorded(evaluated)
            assert pace.note(TRAINING)
            if pace.is_after_burst(number):
                if rank in costs and number > 21:
                    pace.note_cost(costs[rank], 1_000_000)
                if pace.is_due(number):
                    seen[rank][1].append(number)
                    pace.note_report()
                    pace._due_s = 0.0 if rank == 0 else pace._due_s
            if pace.is_recorded(number):
                seen[rank][0].append(number)
    return seen


@pytest.mark.parametrize(
    ("costs", "gap"), [({0: 8_000_000, 1: 0}, 2048), ({1: 0}, 1024), ({0: 8_000_000}, 2048)], ids=["both", "1", "0"]
)
def test_all_ranks_record_the_same_passes_and_report_together(
    costs: dict[int, float], gap: int, of_rank: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 decides, and evaluates alone: at the beginning, and in the middle of bursts. Without a cost of rank 0, as
    where another profiler was on, the gap is 1,024."""
    monkeypatch.setattr(watch, "_USUAL_GAP", 1024)
    seen = played(of_rank, costs, lambda rank, number: rank == 0 and (number == 0 or number % 100 == 49))
    assert seen[0] == seen[1]
    assert seen[0][0] == [
        number for number in range(9_000) if (is_sampled(number) if number < 64 else number % gap < 4)
    ]
    after = [21, 37, *range(gap + 5, 9_000, gap)]
    assert seen[0][1] == after[1::2]  # one burst announces the report after the next


@pytest.mark.jobs
def test_ranks_of_a_job_stay_together(tmp_path: Path) -> None:
    """The steps that both record are those of the rule; a report comes after each second burst, and is compared."""
    job = warm_job(tmp_path, 2, str(ROOT / "test" / "build" / "watched_training.py"))
    assert job.code == 0, job
    *of_first, recorded = job.out[0].splitlines()
    *of_second, also_recorded = job.out[1].splitlines()
    expected = [number for number in range(200) if (is_sampled(number) if number < 64 else number % 64 < 4)]
    assert [*map(int, also_recorded.split())] == expected, job
    # Rank 0 begins with the step that is start-up on the other rank.
    assert [*map(int, recorded.split())] == expected, job
    compared = [line.split(": ")[0] for line in of_first if re.match(r"\w+ Steps", line)]
    assert [line.partition(" ")[2] for line in compared] == ["Steps 1 to 37", "Steps 38 to 133", "Steps 134 to 200"], (
        job
    )
    assert "sent nothing" not in job.out[0], job
    assert not any(line.startswith("INFO") for line in of_second), job


def test_reports_come_after_a_minute_and_then_every_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    pace, reports = Pace(3600, lambda: True), []
    for now[0] in range(0, 8000, 10):
        if pace.is_due(100):
            reports.append(now[0])
            pace.note_report()
    assert reports == [60, 3660, 7260]


def test_what_recording_costs_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a stopwatch, a burst takes no longer than the loop does while it is recorded."""
    costs: list[tuple[float, float]] = []
    monkeypatch.setattr(Pace, "note_cost", lambda self, *cost: costs.append(cost))
    step, times = trainer(model := Mlp()), []
    with torchprof.watch(model):
        for _ in range(60):
            began = time.perf_counter_ns()
            step()
            times.append(time.perf_counter_ns() - began)
    [(cost_ns, usual_ns)] = costs
    assert 0 < cost_ns < sum(times[32:38]) and 0.5 * min(times[37:]) < usual_ns < max(times[37:])


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
        "That is 39.6% longer than steps 1 to 20 (50.500us). Largest beyond noise: Net.slow, backward (+20.000us).",
    )
    has_changed, text = drift(slower, usual, "steps 1 to 20")
    assert not has_changed and text.startswith("That is 28.4% shorter than steps 1 to 20 (70.500us).")
    assert drift(usual, usual, "steps 1 to 20") == (False, "No change beyond noise since steps 1 to 20 (50.500us).")
    assert drift(run_of(()), usual, "steps 1 to 20") == (False, "")


def test_a_part_that_was_not_there_before_is_named() -> None:
    usual = steps_with([10_000, 11_000] * 10, [50_000, 51_000] * 10)
    slower = steps_with([10_000, 11_000] * 10, [70_000, 71_000] * 10)
    loading = SampleKey(OUTSIDE, FORWARD, 0, "cpu", "step_data_ns")
    slower = replace(slower, samples={**slower.samples, loading: Spread.of([*enumerate([19_000, 20_000] * 10)])})
    assert drift(usual, slower, "before")[1].endswith("Largest beyond noise: data loading (+19.500us).")
    assert drift(slower, usual, "before")[1].endswith("Largest beyond noise: data loading (-19.500us).")


def test_only_layers_that_changed_in_the_same_direction_beyond_their_spread_are_named() -> None:
    usual = steps_with([10_000, 11_000] * 10, [50_000, 51_000] * 10)
    faster_layer = steps_with([5_000, 6_000] * 10, [70_000, 71_000] * 10)
    assert "Net.slow" not in drift(usual, faster_layer, "before")[1]
    within_spread = steps_with([10_000, 30_000] * 10, [70_000, 71_000] * 10)
    assert "Net.slow" not in drift(usual, within_spread, "before")[1]


@pytest.mark.parametrize(
    ("rank", "is_slower", "level"),
    [(0, False, logging.INFO), (0, True, logging.WARNING), (1, False, logging.DEBUG), (1, True, logging.WARNING)],
)
def test_other_ranks_log_warnings_alone(
    rank: int, is_slower: bool, level: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "torchprof")
    usual = steps_with([10_000, 11_000] * 10, [50_000, 51_000] * 10)
    now = steps_with([10_000, 11_000] * 10, [70_000, 71_000] * 10) if is_slower else usual
    now = replace(now, metas=(replace(now.meta, rank=rank, world_size=2),))
    samples = {key._replace(rank=rank): spread for key, spread in now.samples.items()}
    before = {key._replace(rank=rank): spread for key, spread in usual.samples.items()}
    watch._log(replace(now, samples=samples), "Steps 2 to 21", (replace(usual, samples=before), "steps 1 to 20"))
    [record] = caplog.records
    assert record.levelno == level and record.getMessage().startswith(f"Rank {rank}, steps 2 to 21: median ")


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
