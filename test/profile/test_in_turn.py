"""Two versions of a script whose steps run in turn: by clocks of their own, so that gains are known."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build.places import ROOT
from build.processes import killed_after

from torchprof import TorchprofError
from torchprof.profile.in_turn import InTurn, Version, run_both
from torchprof.profile.script import Script

CLOCKED = """
import sys, time
import torch
now, began_ns = 0.0, time.perf_counter_ns()
time.perf_counter_ns = lambda: began_ns + round(now * 1e9)
model, other = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
now += 3  # start-up
for step in range(int(sys.argv[2])):
    optimizer.zero_grad()
    loss = other(model(torch.rand(2, 4))).sum()
    now += float(sys.argv[1])
    loss.backward()
    optimizer.step()
    print("step", step, sys.argv[1] if step == 7 else "")
print("end")
now += 2
"""
# Who runs is seen in a file: a child of the first version writes to it all the time. The second version looks.
WRITES = """
import os, sys, time
import torch
if not os.fork():
    while True:
        with open("seen", "a") as file:
            file.write(".")
        time.sleep(0.001)
model = torch.nn.Linear(4, 4)
try:
    for step in range(100_000):
        model(torch.rand(2, 4))
        time.sleep(0.005)
finally:
    model(torch.rand(2, 4))  # waits for no turn
    open("ended", "w").close()
"""
LOOKS = """
import os, sys, time
import torch
model = torch.nn.Linear(4, 4)
time.sleep(0.05)
for step in range(100_000):
    model(torch.rand(2, 4))
    before = os.path.getsize("seen")
    time.sleep(0.02)
    assert os.path.getsize("seen") == before
"""


def version(folder: Path, name: str, text: str, *args: object) -> Script:
    (folder / name).write_text(text)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
    return Script(name, [*map(str, args)], folder=str(folder), environment=environment)


@pytest.mark.jobs
def test_the_gain_of_a_step_is_that_of_the_clock(tmp_path: Path) -> None:
    """Calls of two models and a step of an optimizer are one step, although each model is called."""
    before, after = (version(tmp_path, "a.py", CLOCKED, seconds, 40) for seconds in (0.5, 0.375))
    result = run_both(before, after, seconds=100)
    assert result.unit == "step" and result.before.name == "a.py 0.5 40"
    assert (result.gain, result.interval) == (0.25, (0.25, 0.25))
    assert {*result.before.steps} == {0.5} and {*result.after.steps} == {0.375} and len(result.pairs) == 6
    start_ups = [result.before.start_up_s, result.after.start_up_s]
    assert start_ups == pytest.approx([3.5, 3.375], abs=0.1)  # with what comes before the clock
    assert not result.before.whole_s and result.first_difference is None  # nobody came to the end, nor to line 8


@pytest.mark.jobs
def test_versions_of_a_few_steps_are_compared_as_a_whole(tmp_path: Path) -> None:
    before, after = (version(tmp_path, "a.py", CLOCKED, seconds, count) for seconds, count in ((1, 3), (0.5, 8)))
    result = run_both(before, after, seconds=0.1)
    assert result.unit == "run" and result.pairs == [pytest.approx((8.0, 9.0), abs=0.1)]
    assert result.gain == pytest.approx(-0.125, abs=0.05) and result.interval is None
    assert (result.before.counts, result.after.counts) == ([3], [8])
    assert result.first_difference == (4, "end", "step 3 ")


@pytest.mark.jobs
def test_while_one_version_runs_all_processes_of_the_other_are_stopped(tmp_path: Path) -> None:
    """At the end of the time it is ended by SIGTERM: its ``finally`` blocks run, and its child ends."""
    result = run_both(version(tmp_path, "a.py", WRITES), version(tmp_path, "b.py", LOOKS), seconds=3)
    assert len(result.pairs) >= 3 and result.gain is not None and result.gain < 0
    assert (tmp_path / "ended").exists() and not result.before.whole_s
    size = (tmp_path / "seen").stat().st_size
    time.sleep(0.1)
    assert size and (tmp_path / "seen").stat().st_size == size


@pytest.mark.jobs
def test_a_version_that_fails_is_said_with_its_error(tmp_path: Path) -> None:
    text = """
import torch
torch.set_grad_enabled(False)
for step in range(3):
    torch.nn.Linear(2, 2)(torch.rand(2))
raise ValueError("no data")
"""
    before, after = version(tmp_path, "a.py", CLOCKED, 1, 9), version(tmp_path, "b.py", text)
    with pytest.raises(TorchprofError, match=r"(?s)b.py left with exit code 1 after 3 steps. .*ValueError: no data$"):
        run_both(before, after, seconds=100)
    after = version(tmp_path, "b.py", "import os\nos._exit(7)")
    with pytest.raises(TorchprofError, match=r"b.py left with exit code 7 after 0 steps.$"):
        run_both(before, after, seconds=100)


@pytest.mark.jobs
def test_a_version_that_has_ended_closes_its_files_and_runs_its_last_functions(tmp_path: Path) -> None:
    text = """
import atexit
import torch
file = open(f"{__file__}.log", "w")
file.write("all")
atexit.register(lambda: open(f"{__file__}.exit", "w").close())
"""
    run_both(version(tmp_path, "a.py", text), version(tmp_path, "b.py", text), seconds=0.1)
    for name in ("a.py", "b.py"):
        assert (tmp_path / f"{name}.log").read_text() == "all" and (tmp_path / f"{name}.exit").exists()


@pytest.mark.jobs
def test_a_version_that_is_killed_while_it_is_stopped_is_said(tmp_path: Path) -> None:
    """As by the kernel where memory is short: here the other version does it."""
    steps = "torch.set_grad_enabled(False)\nfor step in range(20):\n    torch.nn.Linear(2, 2)(torch.rand(2))\n"
    before = version(tmp_path, "a.py", f"import os, torch\nopen('pid', 'w').write(str(os.getpid()))\n{steps}")
    kills = "    if step == 4: os.kill(int(open('pid').read()), 9)\n"
    after = version(tmp_path, "b.py", f"import os, torch\n{steps}{kills}")
    with pytest.raises(TorchprofError, match=r"^a.py left with exit code 137 after \d+ steps.$"):
        run_both(before, after, seconds=100)


@pytest.mark.jobs
def test_versions_that_wait_for_each_other_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
import fcntl
import torch
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
torch.set_grad_enabled(False)
for step in range(20):
    torch.nn.Linear(2, 2)(torch.rand(2))
"""
    monkeypatch.setattr("torchprof.profile.in_turn._LEAST_LIMIT_S", 0.5)
    monkeypatch.setattr("torchprof.profile.in_turn._TIMES", 0)
    with pytest.raises(TorchprofError, match=r"^b.py has made 0 steps, .* It may wait for what the other one holds"):
        run_both(version(tmp_path, "a.py", text), version(tmp_path, "b.py", text), seconds=100)


@pytest.mark.jobs
def test_ctrl_c_keeps_what_is_known(tmp_path: Path) -> None:
    shown: list[str] = []

    def show(line: str) -> None:
        shown.append(line)
        if line.startswith("3 turns"):
            raise KeyboardInterrupt

    before, after = (version(tmp_path, "a.py", CLOCKED, seconds, 40) for seconds in (0.5, 0.4))
    result = run_both(before, after, seconds=100, show=show)
    assert len(result.pairs) == 3 and result.interval is None and result.gain == pytest.approx(0.2)
    assert shown[0] == "a.py 0.5 40: start-up"


@pytest.mark.jobs
def test_sigterm_leaves_no_version_behind(tmp_path: Path) -> None:
    """Both have written their numbers when the command is ended, one of them while it is stopped."""
    text = """
import os, time
import torch
open(f"{os.getpid()}.pid", "w").close()
torch.set_grad_enabled(False)
model = torch.nn.Linear(2, 2)
for step in range(100_000):
    model(torch.rand(1, 2))
    time.sleep(0.01)
"""
    (tmp_path / "a.py").write_text(text)
    command = [sys.executable, "-m", "torchprof", "try", "a.py", "a.py"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process, killed_after(120, process):
        while len(numbers := [int(file.stem) for file in tmp_path.glob("*.pid")]) < 2:
            assert process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait() == -signal.SIGTERM
    for number in numbers:
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def of(befores: list[float], afters: list[float], **more: Any) -> InTurn:
    return InTurn(Version("a.py", befores, **more), Version("b.py", afters, **more))


def test_the_interval_holds_the_gain_of_the_sums_and_that_of_the_median() -> None:
    """One step in ten takes 11 times as long in the first version: medians do not have it, the sums do."""
    result = of([1.0] * 18 + [11.0] * 2, [1.0] * 20)
    assert result.gain == 1 - 20 / 40 and result.interval == (0.0, 0.5)
    assert of([2.0] * 6, [1.0] * 6).interval == (0.5, 0.5)
    assert of([2.0] * 5, [1.0] * 5).interval is None and of([], []).gain is None


def test_versions_run_in_turn_only_where_processes_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(signal, "SIGSTOP")
    with pytest.raises(TorchprofError, match="on Linux or macOS"):
        run_both(Script("a.py"), Script("b.py"), 1)


# The command


@pytest.mark.parametrize(
    ("result", "headline"),
    [
        (of([2.0] * 6, [1.0] * 6), "b.py takes 50% less time than a.py (50–50%), by 6 turns of both."),
        (of([1.0] * 6, [1.5] * 6), "b.py takes 50% more time than a.py (50–50%), by 6 turns of both."),
        (
            of([1.0] * 6, [0.9, 0.9, 1.1, 0.8, 1.0, 1.0]),
            "No difference beyond noise: b.py takes 5% less time than a.py (-10%–20%), by 6 turns of both.",
        ),
        (
            of([2.0] * 3, [1.0] * 3),
            "b.py takes 50% less time than a.py in 3 turns of both. They are too few to tell a gain from noise.",
        ),
        (
            of([], []),
            "Nothing is known: a.py and b.py have not both come to the end of a second step in time.",
        ),
    ],
)
def test_what_is_printed(
    result: InTurn, headline: str, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchprof.profile.in_turn.run_both", lambda *_: result)
    assert cli("try a.py b.py").out.splitlines()[0] == headline


def test_the_table_and_what_both_printed(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    result = of([0.1] * 6, [0.05] * 6, start_up_s=2.0, whole_s=[5.0], counts=[40])
    monkeypatch.setattr("torchprof.profile.in_turn.run_both", lambda *_: result)
    out = cli("try a.py b.py").out
    assert [line.split() for line in out.splitlines() if "|" in line] == [
        ["|", "Step", "|", "Start-up", "|", "Steps", "|", "Whole", "run"],
        ["-----|-------|----------|-------|----------"],
        ["a.py", "|", "100ms", "|", "2s", "|", "40", "|", "5s"],
        ["b.py", "|", "50ms", "|", "2s", "|", "40", "|", "5s"],
    ]
    assert out.endswith("The results of both were not compared: a version prints nothing.\n")
    result.before.output, result.after.output = ["loss 1", "loss 2"], ["loss 1", "loss 3", "x"]
    assert "Line 2 of what they print is the first that differs:\n  loss 2\n  loss 3" in cli("try a.py b.py").out
    result.after.output = ["loss 1", "loss 2", "x"]
    assert "Both print the same 2 lines." in cli("try a.py b.py").out


def test_the_data_of_the_command(cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Script] = []

    def both(before: Script, after: Script, seconds: float, show: object) -> InTurn:
        given.extend([before, after])
        return of([2.0] * 6, [1.0] * 6)

    monkeypatch.setattr("torchprof.profile.in_turn.run_both", both)
    data = json.loads(cli("try --json --seconds 5", "train.py --fast 'a b'", "-m package.train --x").out)
    assert (data["gain"], data["interval"], data["unit"], data["pairs"]) == (0.5, [0.5, 0.5], "step", 6)
    assert data["before"]["steps_s"] == [2.0] * 6 and data["first_different_line"] is None
    assert [(each.target, [*each.args], each.is_module) for each in given] == [
        ("train.py", ["--fast", "a b"], False),
        ("package.train", ["--x"], True),
    ]


def test_wrong_versions_say_what_to_give(
    here: Path, cli: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, says in (
        (("try a.py", ""), "'' names no script"),
        (("try a.py", "-m "), "'-m ' names no script"),
        (("try a.py b.py --seconds 0",), "'0' is not a number of seconds above 0"),
    ):
        with pytest.raises(SystemExit):
            cli(*words)
        assert says in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "start it without torchrun" in cli("try a.py b.py", code=2).err
