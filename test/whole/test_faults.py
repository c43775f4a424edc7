"""The scripts with a planted fault of ``benchmarks/faults``: the finding is there, and gone where the fault is."""

from __future__ import annotations

import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torchprof.advise import Advice, advise
from torchprof.advise.evidence import Evidence
from torchprof.first_screen.verdict import first_findings
from torchprof.profile.program import Program
from torchprof.run.run import Run

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "faults" / "scripts"
RULES = {
    "anomaly_detection": "anomaly_detection_on",
    "average_by_deepcopy": "python_in_the_loop",
    "casts_weights_in_each_call": "casts_in_layers",
    "cell_over_time": "cells_over_time",
    "costly_dropout": "costly_dropout",
    "dense_embedding_gradient": "dense_embedding_gradients",
    "evaluation_with_gradients": "graphs_never_used",
    "frozen_body": "frozen_layers_with_gradients",
    "gathers_all_data": "python_in_the_loop",
    "grows_by_cat": "tensors_that_grow",
    "half_precision_on_the_cpu": "half_precision_on_the_cpu",
    "items_one_by_one": "layers_in_a_loop",
    "loss_by_rows": "python_in_the_loop",
    "positions_in_each_call": "constants_in_layers",
    "prints_tensors": "python_in_the_loop",
    "starts_a_process": "python_in_the_loop",
    "unused_head": "layers_without_backward",
    "updates_without_gradients": "updates_without_gradients",
    "writes_a_log": "python_in_the_loop",
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    torch.autograd.set_detect_anomaly(False)


def recorded(name: str, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Run:
    file = str(SCRIPTS / f"{name}.py")
    monkeypatch.setattr(sys, "argv", [file, *arguments])
    with Program(warmup_calls=None) as program:
        runpy.run_path(file, run_name="__main__")
    return program.run


@pytest.mark.skipif(sys.version_info < (3, 11), reason="what a line calls is known from Python 3.11 on")
@pytest.mark.parametrize("name", RULES)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    accepted = dict(re.findall(r"^# (place|cause|remedy): (.+)$", text, re.MULTILINE))
    found: list[Advice] = []
    for _ in range(3):  # samples of a busy machine may be anywhere
        found += [one for one in first_findings(Evidence(recorded(name, monkeypatch))) if one.rule == RULES[name]]
        if any(
            re.search(accepted["cause"], one.finding) and re.search(accepted["remedy"], one.remedy) for one in found
        ):
            return
    raise AssertionError(found)


# On a busy machine, any script may wait for a while between operators.
OF_A_BUSY_MACHINE = {"python_in_the_loop", "python_in_layers", "waiting_for_data", "tiny_batches", "garbage_collection"}
STEADY = sorted(name for name, rule in RULES.items() if rule not in {"anomaly_detection_on", *OF_A_BUSY_MACHINE})


@pytest.mark.parametrize("name", STEADY)
def test_nothing_is_found_where_the_fault_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always: set[str] | None = None
    for _ in range(3):  # times of a busy machine may be anywhere
        run = recorded(name, monkeypatch, "fixed")
        assert [one for one in advise(run) if one.rule == RULES[name]] == []
        found = {one.rule for one in first_findings(Evidence(run))} - OF_A_BUSY_MACHINE
        always = found if always is None else always & found
        if not always:
            return
    raise AssertionError(always)
