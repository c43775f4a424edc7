"""Two sentences of one run never give two values for one thing, and parts of one time add up to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from pathlib import Path

import pytest
from build.all_kinds import KINDS

import torchprof
from torchprof.advise import advise
from torchprof.advise.evidence import Evidence
from torchprof.analyze.steps import percents, time_parts
from torchprof.run.run import Run

REPORTS = ("overview", "headline", "advice", "top", "device", "kernels", "steps", "summary", "python", "collectives")
NUMBER = r"([\d,.]+)(us|ms|s|min|%| samples/s| tokens/s)"
SAID = {
    "the share of idle time": rf"idle for (?:[\d.]+\w+ \()?(?:more than |less than )?(?=[\d.]+%){NUMBER}",
    "idle time": rf"idle for (?=[\d.]+[a-z]){NUMBER}",
    "from the first to the last work": rf"idle for \S+ \(\S+%\) of {NUMBER} from its first",
    "recorded time": rf"first to its last work, of {NUMBER} recorded",
    "waiting for other threads": rf"waits {NUMBER} for its own threads",
    "exposed communication": rf"[Ee]xposed communication takes {NUMBER}",
    "the median step": rf"steps: median {NUMBER}",
    "the rate": NUMBER.replace("us|ms|s|min|%|", ""),
}
"""What is said of a thing, with its number and its unit; white space is a blank."""
SCALE = {"us": 1e3, "ms": 1e6, "s": 1e9, "min": 60e9}
FOLDERS = (Path(__file__).parents[3] / "shared" / "traces", Path(__file__).parents[1] / "data" / "gpu")
read = cache(torchprof.from_trace)
TRACES = [path for folder in FOLDERS for path in sorted(folder.rglob("*.json.gz")) if path.name != "run.json.gz"]
RUNS: dict[str, Callable[[], Run]] = {
    **KINDS,
    **{f"{path.parent.name}/{path.name}": partial(read, path) for path in TRACES},
}


def said(run: Run, pattern: str) -> Iterator[tuple[float, float]]:
    """The values, each with what it may be wrong by, since it was rounded."""
    for report in REPORTS:
        text = ""
        with suppress(torchprof.TorchprofError):  # the run has nothing for this report
            text = " ".join(run.report(report).split())
        for number, unit in re.findall(pattern, text):
            digits = number.rstrip(".,").replace(",", "")
            scale = SCALE.get(unit, 1)
            yield float(digits) * scale, scale * 10 ** -len(digits.partition(".")[2])


@pytest.mark.parametrize("name", RUNS)
def test_all_sentences_agree(name: str) -> None:
    run = RUNS[name]()
    for what, pattern in SAID.items():
        values = [*said(run, pattern)]
        exact, _ = min(values, key=lambda value: value[1], default=(0.0, 0.0))
        assert all(abs(value - exact) <= rounding for value, rounding in values), (what, values)


def test_the_patterns_find_what_is_said() -> None:
    traces = [*map(read, TRACES)]
    if not traces:
        pytest.skip("needs recorded traces")
    found = {what for run in traces for what, pattern in SAID.items() if len([*said(run, pattern)]) > 1}
    of_shared = {"exposed communication"} if FOLDERS[0].is_dir() else set()
    assert {"the share of idle time", "recorded time", *of_shared} <= found


def test_a_second_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    run = KINDS["on_a_device"]()
    monkeypatch.setattr(Run, "report", lambda run, name: f"idle for {len(name)}.5% of the time")
    values = [*said(run, SAID["the share of idle time"])]
    assert len({value for value, _ in values}) > 1


@pytest.mark.parametrize("name", RUNS)
def test_all_parts_of_the_time_add_up_and_no_gain_is_larger(name: str) -> None:
    run = RUNS[name]()
    for field in ("cpu_ns", "device_ns"):
        parts = time_parts(run, field)
        assert sum(parts.values()) == run.rows.of_recording.total(field)
        assert sum(percents(parts).values()) == (100 if parts else 0)
    evidence = Evidence(run)
    of_place: Counter[str] = Counter()
    for finding in advise(run):
        of_place[finding.layer] += finding.gain_ns or 0
        per_step = evidence.per_step(finding.gain_ns or 0)
        assert per_step is None or per_step <= evidence.recorded_ns / max(evidence.steps, 1)
    assert all(ns <= evidence.recorded_ns for ns in of_place.values())
