"""The report "lines": shares by line against a stopwatch around these lines, and rows and samples made by hand."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from build.hand_made import label, op, python_line, row, run_of
from torch import nn

from torchprof import Profile
from torchprof.analyze.lines import largest_lines, lines_of_code, work_in_words
from torchprof.run.words import BACKWARD, OUTSIDE, WAITS_FOR_AUTOGRAD, Frame, FrameKind


def test_shares_of_lines_are_those_of_a_stopwatch() -> None:
    """Four lines of a loop, each timed: operators, a sleep, a forward with backward, and Python."""
    model, matrix, x = nn.Linear(256, 256), torch.rand(300, 300), torch.rand(512, 256)
    timed = [0.0] * 4
    model(x).sum().backward()

    def clock(number: int, since: float) -> float:
        now = time.perf_counter()
        timed[number] += now - since
        return now

    with Profile(model) as prof:
        for _ in range(60):
            now = time.perf_counter()
            torch.linalg.inv(matrix)
            now = clock(0, now)
            time.sleep(0.004)
            now = clock(1, now)
            model(x).sum().backward()
            now = clock(2, now)
            sum(number * number for number in range(20_000))
            now = clock(3, now)
    lines = lines_of_code(prof.run)
    began = next(line for line in lines if "sleep" in line.text).line.line - 2
    by_line = {line.line.line: line for line in lines}
    whole = sum(line.ns for line in lines)
    for number, of_line in enumerate(timed):
        share = by_line[began + 2 * number].ns / whole
        assert share == pytest.approx(of_line / sum(timed), abs=0.1), f"statement {number}"
    assert whole == pytest.approx(prof.run.meta.wall_ns, rel=0.1)
    assert "aten::linalg_inv" in work_in_words(prof.run, by_line[began])
    assert work_in_words(prof.run, by_line[began + 2]) == "no operator"
    assert "backward" in work_in_words(prof.run, by_line[began + 4])
    assert str(prof.run.report("lines")).count(by_line[began].line.file) >= 4


def test_without_samples_the_report_says_how_to_have_them() -> None:
    model = nn.Linear(4, 4)
    with Profile(model, lines=False) as prof:
        model(torch.rand(2, 4))
    assert lines_of_code(prof.run) == [] and [*largest_lines(prof.run)] == []
    assert "unless lines=False" in prof.run.report("lines")


MS = 1_000_000
WAIT = Frame(FrameKind.WAIT, WAITS_FOR_AUTOGRAD)
ADAM = label("Optimizer.step#Adam.step")


def looped(*more: Any) -> list[Any]:
    """100 ms: forward 20, backward 40 on another thread, for which the loop waits, Adam 10, an operator 10, no operator
    20."""
    return [
        row(2, op("aten::mm"), cpu_ns=20 * MS),
        row(2, op("AddmmBackward"), phase=BACKWARD, cpu_ns=40 * MS),
        row(OUTSIDE, WAIT, cpu_ns=40 * MS),
        row(OUTSIDE, ADAM, cpu_ns=10 * MS),
        row(OUTSIDE, op("aten::add"), cpu_ns=10 * MS),
        row(OUTSIDE, cpu_ns=20 * MS),
        *more,
    ]


SAMPLES = [
    row(2, op("aten::mm"), python_line("net.py:3 forward → self.fc"), calls=10),
    row(OUTSIDE, WAIT, python_line("train.py:8 <module> → loss.backward"), calls=30),
    row(OUTSIDE, ADAM, python_line("train.py:9 <module> → adam.step"), calls=5),
    row(OUTSIDE, op("aten::add"), python_line("train.py:7 <module>"), calls=5),
    row(OUTSIDE, python_line("train.py:7 <module> → log"), calls=10),
    row(OUTSIDE, python_line("train.py:10 main"), calls=30),
]


def test_a_line_has_the_part_of_the_time_that_its_samples_are_of_each_kind_of_work() -> None:
    """Of 20 ms in no operator, line 7 has 10 of 40 samples: 5 ms; and all 10 ms of operators."""
    run = run_of(looped(*SAMPLES), wall_ns=100 * MS)
    found = {line.text: (round(line.ns / MS), work_in_words(run, line)) for line in lines_of_code(run)}
    assert found == {
        "train.py:8 → loss.backward": (40, "backward"),
        "net.py:3 forward → self.fc": (20, f"forward ({run.layers[2].name})"),
        "train.py:7": (15, "no operator 67%, aten::add 33%"),
        "train.py:10 main": (15, "no operator"),
        "train.py:9 → adam.step": (10, "optimizer (Adam)"),
    }


def test_the_first_screen_has_the_largest_lines() -> None:
    [table] = largest_lines(run_of(looped(*SAMPLES), wall_ns=100 * MS), 60)
    title, *rows = (table.text or "").splitlines()
    assert title == "By line of code (90 samples: shares to within 11 points)"
    assert [line.split()[0] for line in rows] == ["29%", "14%", "11%", "11%", "7%"]  # of 140: both threads
    assert all(len(line) <= 60 for line in rows)


def test_lines_that_may_be_there_by_chance_are_not_on_the_first_screen() -> None:
    few = [row(OUTSIDE, python_line(f"train.py:{number} main"), calls=4) for number in range(1, 8)]
    assert [*largest_lines(run_of(looped(*few), wall_ns=100 * MS))] == []
    assert [*largest_lines(run_of(looped(SAMPLES[0]), wall_ns=100 * MS))] == []  # 10 samples in all
