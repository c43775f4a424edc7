"""What holds for the findings in all tests of this folder."""

from collections.abc import Iterator

import pytest
from build.law_of_findings import breaches

import torchprof.advise
from torchprof import Run
from torchprof.advise import Judgement, rules


@pytest.fixture(autouse=True)
def _findings_keep_the_law(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever a test reads of the findings of a run, their sentences are true of the places that they name."""
    judge = torchprof.advise.judge
    broken: list[str] = []

    def judged(run: Run) -> Judgement:
        judgement = judge(run)
        broken.extend(breaches(run, [one for one in judgement.advice if one.rule in rules()]))
        return judgement

    monkeypatch.setattr(torchprof.advise, "judge", judged)
    yield
    assert not broken, broken
