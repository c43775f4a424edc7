"""Advice: findings on what could be made faster or smaller in a run. Each kind of finding is one rule: a function in
the file of its theme."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import NamedTuple

from torchprof.analyze.advice.evidence import Evidence
from torchprof.run.cost import format_memory, format_time
from torchprof.run.run import Run

WORTH = 0.01
"""The share of the recorded time, or of the peak of memory, that all findings of a rule together must be able to save.
Less is not worth a change of code, and is within noise."""

PER_RULE = 3
"""The most findings of one rule that are reported. The last of them says how many more there are."""


class Advice(NamedTuple):
    """One finding: where it is, the evidence, the largest possible gain, and what to change.

    ``layer``: a dotted path, "(outside)", or the name of the model. ``finding``: a sentence with the evidence and its
    figures. ``remedy``: a sentence on what to change, with the code if that is short. ``gain_ns``: the most time that
    this could save, of ``Evidence.recorded_ns``; ``gain_bytes``: the most memory, of ``Evidence.peak_bytes``; None:
    unknown. ``rule``: the name of the function that found it.
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
    """Register a rule: a function that yields its findings in the evidence of a run, one per layer.

    Its docstring says what it looks for, its threshold with the reason, and what must have been recorded. Without that
    it yields nothing. It must not count the same nanosecond twice. ``judge`` drops findings whose gains sum to less
    than ``WORTH``; findings without any gain are always reported, so the rule must decide whether they matter.
    """
    _rules[function.__name__] = function
    return function


def rules() -> dict[str, Rule]:
    """All rules, by name."""
    for file in iter_modules(__path__):
        import_module(f"{__name__}.{file.name}")
    return _rules


class Judgement(NamedTuple):
    """The findings of all rules (``advice``), and the rules that raised an error, by name (``failed``)."""

    advice: list[Advice]
    failed: dict[str, Exception]


def advise(run: Run) -> list[Advice]:
    """The findings of all rules, the largest gain first, those with unknown gain last; at most ``PER_RULE`` per rule.

    A rule that fails finds nothing: ``judge`` returns its error.
    """
    return judge(run).advice


def judge(run: Run) -> Judgement:
    """The findings of ``advise``, and the rules that failed. A rule that fails does not stop the others."""
    evidence = Evidence(run)
    found: list[Advice] = []
    failed: dict[str, Exception] = {}
    for name, find in rules().items():
        try:
            found += _reported(list(find(evidence)), evidence)
        except Exception as error:  # a run file may hold anything: an error in one rule must not lose the report
            failed[name] = error
    return Judgement(sorted(found, key=lambda one: _share(one, evidence), reverse=True), failed)


def _reported(advice: list[Advice], evidence: Evidence) -> list[Advice]:
    """The findings of one rule that are reported; those with a known gain only if they are worth it together."""
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
    """The finding with its gain limited to the recorded time: the times of parallel threads or streams can sum to
    more."""
    if advice.gain_ns is None:
        return advice
    return advice._replace(gain_ns=min(advice.gain_ns, evidence.recorded_ns))


def _the_same(rest: list[Advice]) -> str:
    ns, nbytes = sum(one.gain_ns or 0 for one in rest), sum(one.gain_bytes or 0 for one in rest)
    gains = [*([format_time(ns)] if ns else []), *([format_memory(nbytes)] if nbytes else [])]
    worth = f" ({' and '.join(gains)} more at most)" if gains else ""
    return f"The same was seen {len(rest)} more time{'s' * (len(rest) > 1)}{worth}."


def _share(advice: Advice, evidence: Evidence) -> float:
    """The gain of a finding as a share of the time or of the memory, the larger one; -1 if both are unknown."""
    if advice.gain_ns is None and advice.gain_bytes is None:
        return -1.0
    of_time = (advice.gain_ns or 0) / evidence.recorded_ns if evidence.recorded_ns else 0.0
    of_memory = (advice.gain_bytes or 0) / evidence.peak_bytes if evidence.peak_bytes else 0.0
    return max(of_time, of_memory)
