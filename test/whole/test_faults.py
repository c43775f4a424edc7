"""The scripts with a planted fault of ``benchmarks/faults``: the finding is there, and gone where the fault is."""

from __future__ import annotations

import gc
import re
import runpy
import shutil
import sys
import textwrap
import timeit
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from build.law_of_findings import breaches

from benchmarks.faults.__main__ import by_torchprof
from benchmarks.memory_faults.__main__ import peak_bytes, whole_peak
from torchprof.advise import Advice, advise
from torchprof.advise.evidence import Evidence
from torchprof.first_screen.verdict import first_findings
from torchprof.profile.program import Program
from torchprof.run.run import Run

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "faults" / "scripts"
MEMORY_SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "memory_faults" / "scripts"
EXAMPLES = Path(__file__).parents[2] / "examples" / "scripts"
RULES = {
    "anomaly_detection": "anomaly_detection_on",
    "average_by_deepcopy": "python_in_the_loop",
    "casts_weights_in_each_call": "costly_operators",
    "cell_over_time": "layers_in_a_loop",
    "costly_dropout": "costly_dropout",
    "dense_embedding_gradient": "dense_embedding_gradients",
    "evaluation_with_gradients": "graphs_never_used",
    "frozen_body": "frozen_layers_with_gradients",
    "gathers_all_data": "costly_operators",
    "grows_by_cat": "tensors_that_grow",
    "half_precision_on_the_cpu": "half_precision_on_the_cpu",
    "items_one_by_one": "layers_in_a_loop",
    "loss_by_rows": "python_in_the_loop",
    "positions_in_each_call": "constants_in_layers",
    "prints_tensors": "python_in_the_loop",
    "slow_prefetch_thread": "waits_for_threads",
    "starts_a_process": "python_in_the_loop",
    "unused_head": "layers_without_backward",
    "updates_without_gradients": "gradients_zeroed",
    "writes_a_log": "python_in_the_loop",
}


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    torch.autograd.set_detect_anomaly(False)


def recorded(script: Path, monkeypatch: pytest.MonkeyPatch, *arguments: str, **options: Any) -> Run:
    monkeypatch.setattr(sys, "argv", [str(script), *arguments])
    gc.collect()  # optimizers of other scripts
    with Program(warmup_calls=None, **options) as program:
        runpy.run_path(str(script), run_name="__main__")
    assert [*breaches(program.run, advise(program.run))] == []
    return program.run


def is_slow_in_float16() -> bool:
    """Whether a convolution of that script takes at least four times as long as in float32."""
    times = {}
    for dtype in (torch.float16, torch.float32):
        layer, inputs = torch.nn.Conv2d(32, 32, 3, padding=1, dtype=dtype), torch.rand(2, 32, 64, 64, dtype=dtype)
        with torch.inference_mode():
            times[dtype] = min(timeit.repeat(lambda: layer(inputs), number=1, repeat=10))  # noqa: B023
    return times[torch.float16] >= 4 * times[torch.float32]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="what a line calls is known from Python 3.11 on")
@pytest.mark.parametrize("name", RULES)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "half_precision_on_the_cpu" and not is_slow_in_float16():
        pytest.skip("this CPU computes float16 nearly as fast as float32")
    text = (SCRIPTS / f"{name}.py").read_text(encoding="utf-8")
    accepted = dict(re.findall(r"^# (place|cause|remedy): (.+)$", text, re.MULTILINE))
    found: list[Advice] = []
    for _ in range(3):  # samples of a busy machine may be anywhere
        run = recorded(SCRIPTS / f"{name}.py", monkeypatch)
        found += [one for one in first_findings(Evidence(run)) if one.rule == RULES[name]]
        if any(
            re.search(accepted["cause"], one.finding) and re.search(accepted["remedy"], one.remedy) for one in found
        ):
            return
    raise AssertionError(found)


# On a busy machine, any script may wait for a while between operators.
OF_A_BUSY_MACHINE = {"python_in_the_loop", "python_in_layers", "waiting_for_data", "tiny_batches", "garbage_collection"}
OF_THIS_MACHINE = {"bfloat16_not_used"}  # true where it is said: steps of these scripts then take half of the time
STEADY = sorted(name for name, rule in RULES.items() if rule not in {"anomaly_detection_on", *OF_A_BUSY_MACHINE})


@pytest.mark.parametrize("name", STEADY)
def test_nothing_is_found_where_the_fault_is_not(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always: set[str] | None = None
    for _ in range(3):  # times of a busy machine may be anywhere
        run = recorded(SCRIPTS / f"{name}.py", monkeypatch, "fixed")
        assert [one for one in advise(run) if one.rule == RULES[name]] == []
        found = {one.rule for one in first_findings(Evidence(run))} - {*OF_A_BUSY_MACHINE, *OF_THIS_MACHINE}
        always = found if always is None else always & found
        if not always:
            return
    raise AssertionError(always)


def in_main(script: Path, folder: Path) -> Path:
    """The same script with all of its code in ``main``: when that returns, the model is freed."""
    body = script.read_text()
    indented = textwrap.indent(body, "    ", lambda line: bool(line.strip()))
    copy = folder / script.name
    copy.write_text(f"def main():\n{indented}\nmain()\n")
    return copy


def facts_of(run: Run) -> object:
    """What a run says of layers, calls and steps: no time. What optimizers did is unknown of a freed model."""
    unknown = dict.fromkeys(["updated_params", "optimizer_steps", "used_gradients"])
    layers = [replace(layer, **unknown) for layer in run.layers]
    calls = [run.rows.forward_calls(index) for index in range(len(layers))]
    counts = {key: spread.count for key, spread in run.samples.items() if key.measure in ("cpu_ns", "step_ns")}
    return layers, calls, counts


OF_CALLS = ("cell_over_time", "costly_dropout", "evaluation_with_gradients", "frozen_body", "unused_head")


@pytest.mark.jobs
@pytest.mark.parametrize(
    "script",
    [*(SCRIPTS / f"{name}.py" for name in OF_CALLS), *sorted(EXAMPLES.glob("*.py"))],
    ids=lambda path: path.stem,
)
def test_a_model_that_main_frees_has_the_same_layers_and_calls(
    script: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_top, freed = (recorded(path, monkeypatch, passes=None) for path in (script, in_main(script, here)))
    assert facts_of(freed) == facts_of(at_top)


# Memory


@pytest.mark.parametrize(
    ("name", "rule"), [("autocast_cache", "temporaries_at_the_peak"), ("copy_of_the_model", "others_at_the_peak")]
)
def test_the_peak_of_a_script_is_that_of_torchs_events(name: str, rule: str, tmp_path: Path) -> None:
    """With what was live at the start, also if only C++ code has it. ``torchprof run`` sets the first step aside."""
    shutil.copy(MEMORY_SCRIPTS / f"{name}.py", tmp_path / "train.py")
    seen = by_torchprof(tmp_path, options=["--memory"])
    assert rule in {each.rule for each in seen.findings}
    assert whole_peak(seen) == pytest.approx(peak_bytes(tmp_path), rel=0.01)
