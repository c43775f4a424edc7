"""The report "types", and the list of all reports."""

from __future__ import annotations

import pytest
import torch
from build.hand_made import cells, line, names
from torch import nn

import torchprof
from torchprof import Run, TorchprofError
from torchprof.analyze.report import QUESTIONS
from torchprof.reports import known


@pytest.fixture(scope="module")
def blocks() -> Run:
    """Three equal blocks, whose Linear counts 4 × 8 × 8 MACs in each of two calls, and a head of 4 × 8 × 2."""
    body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8, bias=False), nn.ReLU()) for _ in range(3)))
    model = nn.Sequential(body, nn.Linear(8, 2, bias=False))
    with torchprof.Profile(model, with_flops=True) as prof:
        for _ in range(2):
            model(torch.rand(4, 8)).sum().backward()
    return prof.run


def test_a_row_of_types_is_the_sum_of_a_class(blocks: Run) -> None:
    table = blocks.report("types", phase="forward")
    assert {name: line(table, name)["Layers"] for name in names(table)} == {
        "Sequential": "5",
        "Linear": "4",
        "ReLU": "3",
    }
    linear = line(table, "Linear")
    assert (linear["MACs"], linear["Calls"]) == (f"{2 * (3 * 4 * 8 * 8 + 4 * 8 * 2) / 1000:.2f} K", "8")
    assert "100 % is what all layers took" in table


def test_without_a_phase_all_phases_add_up(blocks: Run) -> None:
    macs = {
        phase: line(blocks.report("types", phase=phase), "Linear")["MACs"] for phase in (None, "forward", "backward")
    }
    # The first layer needs no gradient of its input: 3 products of the body's 6 backward, and 2 of the head's.
    forward, backward = 2 * (3 * 256 + 64), 2 * (5 * 256 + 2 * 64)
    assert macs == {
        phase: f"{number / 1000:.2f} K"
        for phase, number in ((None, forward + backward), ("forward", forward), ("backward", backward))
    }


def test_the_largest_come_first_and_the_others_are_counted(blocks: Run) -> None:
    table = blocks.report("types", sort_by="calls", top=2)
    assert len(cells(table)) == 2 and "1 row is hidden: shown are the 2 largest by Calls." in table
    calls = [int(cell[-1]) for cell in cells(table)]
    assert calls == sorted(calls, reverse=True)


def test_a_report_without_a_name_is_the_list_of_all(blocks: Run) -> None:
    text = blocks.report()
    sections = [section.splitlines() for section in text.split("\n\n")]
    assert [lines[0] for lines in sections] == [question for question in QUESTIONS.values() if question in text]
    assert sorted(line.split()[0] for lines in sections for line in lines[1:]) == sorted(known())
    assert all(len(line.split(None, 1)) == 2 for lines in sections for line in lines[1:])
    assert sections[0][1].startswith("  overview ")
    with pytest.raises(TorchprofError, match=r"^Options are of one report"):
        blocks.report(depth=1)
