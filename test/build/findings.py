"""The reported findings of one rule."""

from torchprof import Run
from torchprof.advise import Advice, advise


def of(run: Run, rule: str) -> list[Advice]:
    return [one for one in advise(run) if one.rule == rule]
