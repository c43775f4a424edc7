"""Advice: what a run shows that can be made faster or smaller, each thing seen by one small rule. A new rule is one
function, in the file of its theme here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.cost import format_memory, format_time
from torchprof.run.run import Run

WORTH = 0.01
"""The share of the recorded time, or of the peak of memory, that all findings of a rule together must be able to save:
for less nobody should change code, and below it the figures are noise."""

PER_RULE = 3
"""So many findings of a rule are reported. The last of them says how many more there are."""


class Advice(NamedTuple):
    """One plain finding: where, what was seen, what could be gained at most, and what to change.

    ``layer``: its dotted path, "(outside)", or the name of the model. ``finding``: a sentence, the evidence with its
    figures. ``remedy``: a sentence, what to change, with the code to write where that is short. ``gain_ns`` is the time
    that this could save at most, of ``Evidence.recorded_ns``, ``gain_bytes`` the memory, of ``Evidence.peak_bytes``;
    None where that is not to be known. ``rule`` is the name of the function that found it.
    """

    layer: str
    finding: str
    remedy: str
    gain_ns: int | None
    gain_bytes: int | None
    rule: str


Rule = Callable[[Evidence], Iterator[Advice]]

_rules: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule: a function that yields what it finds in the evidence of a run, each layer by itself.

    Its docstring says what it looks for, its threshold and why, and what must have been recorded. It yields nothing
    where that is missing, and never the same nanosecond twice. What it could gain in sum is weighed here (``WORTH``);
    where a finding has neither gain, the rule itself knows that it matters.
    """
    _rules[function.__name__] = function
    return function


def rules() -> dict[str, Rule]:
    """All rules, by name."""
    for file in iter_modules(__path__):
        import_module(f"{__name__}.{file.name}")
    return _rules


class Judgement(NamedTuple):
    """What all rules say of one run: the ``advice``, and the rules that ``failed``, each by its name with its error."""

    advice: list[Advice]
    failed: dict[str, Exception]


def advise(run: Run) -> list[Advice]:
    """What all rules found worth saying, the largest gain first, the findings with unknown gain last.

    Of each rule the ``PER_RULE`` that gain most. A rule that fails finds nothing; ``judge`` says which those are.
    """
    return judge(run).advice


def judge(run: Run) -> Judgement:
    """What ``advise`` gives, and which rules failed. A rule that fails stops none of the others, and says nothing."""
    evidence = Evidence(run)
    found: list[Advice] = []
    failed: dict[str, Exception] = {}
    for name, find in rules().items():
        try:
            found += _reported(list(find(evidence)), evidence)
        except Exception as error:  # a file may hold anything: one rule more or less must not cost the report
            failed[name] = error
    return Judgement(sorted(found, key=lambda one: _share(one, evidence), reverse=True), failed)


def _reported(advice: list[Advice], evidence: Evidence) -> list[Advice]:
    """The findings of one rule that are reported: none if all of them together gain too little."""
    advice = [_within_recorded_time(one, evidence) for one in advice]
    unknown = [one for one in advice if one.gain_ns is None and one.gain_bytes is None]
    known = [one for one in advice if one.gain_ns is not None or one.gain_bytes is not None]
    if sum(_share(one, evidence) for one in known) < WORTH:
        known = []
    known.sort(key=lambda one: _share(one, evidence), reverse=True)
    known += unknown
    reported, rest = known[:PER_RULE], known[PER_RULE:]
    if rest:
        last = reported[-1]
        reported[-1] = last._replace(finding=f"{last.finding} {_the_same(rest)}")
    return reported


def _within_recorded_time(advice: Advice, evidence: Evidence) -> Advice:
    """The finding with a gain of no more than the recorded time: several threads, or streams, may have worked at once,
    and their times sum to more than that."""
    if advice.gain_ns is None:
        return advice
    return advice._replace(gain_ns=min(advice.gain_ns, evidence.recorded_ns))


def _the_same(rest: list[Advice]) -> str:
    ns, nbytes = sum(one.gain_ns or 0 for one in rest), sum(one.gain_bytes or 0 for one in rest)
    gains = [*([format_time(ns)] if ns else []), *([format_memory(nbytes)] if nbytes else [])]
    worth = f" ({' and '.join(gains)} more at most)" if gains else ""
    return f"The same was seen {len(rest)} more time{'s' * (len(rest) > 1)}{worth}."


def _share(advice: Advice, evidence: Evidence) -> float:
    """What it could gain, of the time or of the memory, whichever is more; -1 if both are unknown."""
    if advice.gain_ns is None and advice.gain_bytes is None:
        return -1.0
    of_time = (advice.gain_ns or 0) / evidence.recorded_ns if evidence.recorded_ns else 0.0
    of_memory = (advice.gain_bytes or 0) / evidence.peak_bytes if evidence.peak_bytes else 0.0
    return max(of_time, of_memory)
