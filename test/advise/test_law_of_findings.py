"""The law of findings, on runs of every kind and on findings that break it. The tests of all rules keep it, too: see
``conftest``."""

from __future__ import annotations

import pytest
from build.all_kinds import KINDS
from build.hand_made import op, row, run_of
from build.law_of_findings import breaches
from build.places import TRACES

import torchprof
from torchprof.advise import Advice, advise

MS = 1_000_000


@pytest.mark.parametrize(
    ("finding", "gain_ms", "broken"),
    [
        ("It takes 40.000ms, and is called 7 times.", 40, []),
        ("It takes 40.100ms.", 1, ["a time longer"]),
        ("It is called 11 times.", 1, ["in no report"]),
        ("It is called 18 times.", 1, ["a count larger", "in no report"]),
        ("It is slow.", 41, ["gains more"]),
        ("It takes 90.000ms in Net.b, too.", 90, []),
    ],
)
def test_what_breaks_the_law(finding: str, gain_ms: int, broken: list[str]) -> None:
    """Net.a takes 40 ms in 7 calls of itself and 7 of an operator, and another layer 50 ms."""
    rows = [row(1, calls=7, cpu_ns=10 * MS), row(1, op("aten::mm"), calls=7, cpu_ns=30 * MS), row(2, cpu_ns=50 * MS)]
    found = [*breaches(run_of(rows), [Advice("Net.a", finding, "Do less.", gain_ms * MS, layers=("Net.a",))])]
    assert len(found) == len(broken) and all(part in text for part, text in zip(broken, found))


def test_a_finding_outside_of_layers_counts_nothing_in_them() -> None:
    """A loop that reads 2 values, beside an optimizer that reads 4,740."""
    run = run_of([row(-1, op("aten::item"), calls=2, cpu_ns=9), row(1, op("aten::item"), calls=4740, cpu_ns=9)])
    text, *_ = breaches(run, [Advice("(outside)", "It reads values 4,740 times.", "Read fewer.", 9)])
    assert "a count larger than the 2 calls" in text


@pytest.mark.parametrize("kind", KINDS)
def test_findings_on_runs_of_every_kind_keep_the_law(kind: str) -> None:
    run = KINDS[kind]()
    assert [*breaches(run, advise(run))] == []


@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not here")
def test_findings_on_real_traces_keep_the_law() -> None:
    runs = [torchprof.from_trace(trace) for trace in sorted(TRACES.glob("*.json.gz"))]
    assert any(map(advise, runs))
    assert [breach for run in runs for breach in breaches(run, advise(run))] == []
