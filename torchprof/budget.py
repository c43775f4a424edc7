"""Limits on what layers cost, for continuous integration and test suites. Their syntax is in docs/compare.md."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import partial
from os import PathLike
from typing import NamedTuple

from torchprof.cost import Measure, Unit
from torchprof.diff import FORMATS, SLOWER, UNKNOWN, Change, Diff, Pair, Quantity, as_run, compare
from torchprof.errors import TorchprofError, suggest
from torchprof.matching import ADDED, REMOVED
from torchprof.noise import FEWEST
from torchprof.paths import find
from torchprof.run import OUTSIDE_NAME, Run

_PEAK, _STEP = "peak", "step"
_NAMED = 3  # so many layers are named as those that made the difference

_TARGET = re.compile(r"\s*(?:(?P<pattern>.*\S)\s*:\s*)?(?P<measure>\w+)\s*", re.DOTALL)
_SHARE = re.compile(r"\+(\d+(?:\.\d+)?)\s*%")
_AMOUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-zµ]*)")
_UNITS = {
    Unit.TIME: {"ns": 1, "us": 1000, "µs": 1000, "ms": 10**6, "s": 10**9},
    Unit.BYTES: {"": 1, "B": 1, "KB": 2**10, "MB": 2**20, "GB": 2**30, "TB": 2**40},
    Unit.COUNT: {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15},
}
_EXAMPLES = {Unit.TIME: "12ms", Unit.BYTES: "1.5GB", Unit.COUNT: "4.2G"}
_SYNTAX = (
    'A limit is [LAYERS: ]MEASURE > AMOUNT, as in "cpu_total > +10%", "peak > 1.5GB", "features.*: cpu_total > 12ms"'
)


class BudgetExceeded(AssertionError):
    """A limit of ``assert_budget`` does not hold; the message says which, by how much, and which layers made it so."""


class Limit(NamedTuple):
    """At most so much, as it was written in ``text``. ``pattern``: a path of layers, None for the models. ``bound`` is
    a number, or an amount with its unit; ``share`` in its place what may come on top of what was before (0.1: a tenth).
    """

    text: str
    pattern: str | None
    measure: str
    bound: str | int | float
    share: Fraction | None


class Outcome(NamedTuple):
    """What became of a limit: a sentence for each layer that exceeds it, and ``remarks`` on those that do not fail."""

    limit: Limit
    failures: tuple[str, ...]
    remarks: tuple[str, ...]


def assert_budget(
    run: Run | str | PathLike[str],
    limits: Mapping[str, str | int | float],
    baseline: Run | str | PathLike[str] | None = None,
) -> None:
    """Fail a test where a run costs more than it may.

    ``limits``: from ``"[LAYERS: ]MEASURE"`` to the most that it may be: ``{"cpu_total": "12ms", "features.*: peak":
    "1.5GB", "flops": 4_200_000_000}``. Without layers the models are meant. What adds up is for one forward call of the
    model, however many were recorded. ``"+10%"`` is relative to ``baseline``, a run or the file of a saved one. A time
    that exceeds its limit only within noise does not fail, but warns. See docs/compare.md.

    Raises BudgetExceeded, an AssertionError, where a limit does not hold; TorchprofError for a limit that cannot be
    read, on layers that are not there, or on what is not known.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, and none of ours
    if not isinstance(limits, Mapping) or not limits:
        raise TorchprofError(f'limits={limits!r:.80} holds no limits: write {{"cpu_total": "12ms"}}, say.')
    read = [_limit(f"{target}: at most {bound}", target, bound) for target, bound in limits.items()]
    relative = next((limit for limit in read if limit.share is not None), None)
    if relative is not None and baseline is None:
        raise TorchprofError(f"{relative.text!r} is relative, and to what? Give a run, or the file of one: baseline=.")
    after = as_run(run, "run", "assert_budget")
    before = after if baseline is None else as_run(baseline, "baseline", "assert_budget")
    outcomes = check(compare(before, after), read)
    for outcome in outcomes:
        for remark in outcome.remarks:
            warnings.warn(remark, stacklevel=2)
    failures = [failure for outcome in outcomes for failure in outcome.failures]
    if failures:
        raise BudgetExceeded("\n".join(failures))


def limit_of(text: str) -> Limit:
    """Read a limit of the command line: ``"features.*: cpu_total > +10%"``. Raises TorchprofError where it is none."""
    target, sign, bound = text.rpartition(">")
    if not sign:
        raise TorchprofError(f"{text!r} is no limit: it has no '>'. {_SYNTAX}.")
    return _limit(text.strip(), target, bound.strip())


def _limit(text: str, target: object, bound: object) -> Limit:
    match = _TARGET.fullmatch(target) if isinstance(target, str) else None
    if match is None:
        raise TorchprofError(f"{text!r} is no limit: {target!r} names no measure. {_SYNTAX}.")
    share = _SHARE.fullmatch(bound.strip()) if isinstance(bound, str) else None
    if isinstance(bound, bool) or not isinstance(bound, (str, int, float)):
        raise TorchprofError(f"{text!r} is no limit: {bound!r} is no amount. {_SYNTAX}.")
    return Limit(text, match["pattern"], match["measure"], bound, share and Fraction(share[1]) / 100)


def check(diff: Diff, limits: Iterable[Limit]) -> list[Outcome]:
    """Hold limits against a diff, absolute ones against its run after.

    Raises TorchprofError for a measure that is unknown or was not measured, for layers that are not there, and for what
    is not known of one of them: that is never a pass.
    """
    outcomes = []
    for limit in limits:
        found = [_held(diff, limit, subject) for subject in _subjects(diff, limit)]
        failures = tuple(sentence for exceeded, sentence in found if exceeded)
        remarks = tuple(sentence for exceeded, sentence in found if sentence and not exceeded)
        outcomes.append(Outcome(limit, failures, remarks))
    return outcomes


class _Subject(NamedTuple):
    """One thing that a limit is held against: a measure of a layer, the peak or the step of the run, by its ``name``.

    ``was_added``: there was nothing before. ``is_sum``: it adds up over calls. ``parts`` are what the limit is exceeded
    by, or what its largest parts are, in words.
    """

    name: str
    change: Change
    unit: Unit
    was_added: bool
    is_sum: bool
    parts: Callable[[], str]


def _subjects(diff: Diff, limit: Limit) -> Iterator[_Subject]:
    if limit.measure == _PEAK and limit.pattern is None:
        yield _peak_of_run(diff, limit)
        return
    if limit.measure == _STEP and _STEP in diff.whole:
        if limit.pattern is not None:
            raise TorchprofError(f"{limit.text!r}: a step is one of the run and of no layer: write {_STEP!r} alone.")
        yield _Subject("the run", diff.whole[_STEP], Unit.TIME, False, False, lambda: "")
        return
    quantities = [one for one in diff.quantities if one.key == limit.measure]
    if limit.measure == _PEAK:  # of the device, if there is one, in all phases
        peaks = [one for one in diff.quantities if one.what == "peak"]
        quantities = [one for one in peaks if one.device == "device"] or peaks
    if not quantities:
        raise _not_measured(diff, limit)
    if limit.pattern == OUTSIDE_NAME and not isinstance(quantities[0].what, Measure):
        raise TorchprofError(
            f"{limit.text!r}: what runs outside of all layers has no {limit.measure}: limit its times, its net memory "
            "or its FLOPs."
        )
    for pair in _pairs(diff, limit):
        name = ".".join(pair.path)
        quantity = max(quantities, key=lambda one: _known(limit, name, pair.changes[one.key].after))
        change = pair.changes[quantity.key]
        if len(quantities) > 1:  # the largest of all phases, which before may have been another one
            olds = [pair.changes[one.key].before for one in quantities]
            most = None if None in olds else max(old for old in olds if old is not None)
            change = change._replace(before=most)
        yield _Subject(
            name,
            change,
            quantity.unit,
            pair.how == ADDED,
            isinstance(quantity.what, Measure) or quantity.what == "calls",
            partial(_parts, diff, limit, pair, quantity),
        )


def _pairs(diff: Diff, limit: Limit) -> list[Pair]:
    """The layers that a limit is for, those that are there after; or the work outside of all, if there was any."""
    if limit.pattern == OUTSIDE_NAME:
        return [pair for pair in diff.pairs if not pair.is_layer and pair.name == OUTSIDE_NAME]
    layers = [pair for pair in diff.walk() if pair.is_layer]
    if limit.pattern is None:
        models = [pair for pair in layers if pair.after is not None and len(pair.after.path) == 1]
        if not models:
            raise TorchprofError(
                f"{limit.text!r}: this run knows no layers, all its work is outside of them. Where it has steps, a "
                f'limit can be on that: "{OUTSIDE_NAME}: cpu_total".'
            )
        return models
    names = [tuple(one.path for one in (pair.before, pair.after) if one is not None) for pair in layers]
    try:
        found = [layers[number] for number in sorted(find(limit.pattern, names))]
    except TorchprofError as error:
        raise TorchprofError(f"{limit.text!r}: {error}") from error
    there = [pair for pair in found if pair.how != REMOVED]
    if not there:
        raise TorchprofError(
            f"{limit.text!r}: {'.'.join(found[0].path)} was removed: there is nothing to hold the limit against."
        )
    return there


def _peak_of_run(diff: Diff, limit: Limit) -> _Subject:
    """How far memory rose at most, on the device if there is one: what must fit."""
    peaks = [key for key in diff.whole if key.endswith("_peak")]
    if not peaks:
        raise _not_measured(diff, limit)
    key = peaks[-1]  # the device's comes after the CPU's
    where = [
        (spread.max, diff.after.layers[at.layer].name if at.layer >= 0 else OUTSIDE_NAME, at.phase)
        for at, spread in diff.after.samples.items()
        if at.measure == "device_peak_bytes" and (at.device == "cpu") == (key == "cpu_peak")
    ]
    _, name, phase = max(where, default=(0, "", ""))
    parts = f" It was reached in {name}, {phase}." if name else ""
    return _Subject("the run", diff.whole[key], Unit.BYTES, False, False, lambda: parts)


def _held(diff: Diff, limit: Limit, subject: _Subject) -> tuple[bool, str]:
    """Whether a limit is exceeded, and a sentence where that has to be explained, else an empty one."""
    change, show = subject.change, FORMATS[subject.unit]
    after = Fraction(_known(limit, subject.name, change.after))
    # Absolute limits are for one call of the model; a diff of runs with equally many holds totals.
    calls = diff.counts[1] if diff.unit is None and subject.is_sum and limit.share is None else 1
    if subject.is_sum and diff.counted is None:
        raise TorchprofError(
            f"{limit.text!r}: nobody knows how many calls of a model the run holds, so {limit.measure} of one is not "
            "known: select the model itself, too (paths=), or mark steps with prof.step()."
        )
    if limit.share is None:
        after /= calls
        most = _amount(limit, subject.unit)
        above = f"{show(float(after))}, limit {show(float(most))}"
    else:
        before = Fraction(0 if subject.was_added else _known(limit, subject.name, change.before, "before"))
        if before < 0:
            raise TorchprofError(
                f"{limit.text!r}: {subject.name} had {show(float(before))} before, and no share of that is a limit: "
                "write an amount."
            )
        most = before * (1 + limit.share)
        increase = f"{float(after / before - 1):+.1%}" if before else "from nothing"
        above = f"{show(float(after))} after, {show(float(before))} before: {increase}, limit {limit.bound}"
    if after <= most:
        return False, ""
    sums = diff.counted if subject.is_sum and (limit.share is None or diff.unit) else None
    per = {"call": ", per forward call of the model", "step": ", per step"}.get(sums or "", "")
    sentence = f"{subject.name}: {limit.measure} {above}{per}."
    if subject.unit is not Unit.TIME:
        return True, f"Limit exceeded: {sentence}{subject.parts()}"
    noise = change.noise
    if noise is None or min(noise.counts) < FEWEST or (limit.share is not None and change.verdict == UNKNOWN):
        doubt = " It counts, though the runs hold too few calls or steps to tell it from noise."
        return True, f"Limit exceeded: {sentence}{subject.parts()}{doubt}"
    median = noise.medians[1]
    if limit.share is None:
        beyond = median - noise.spreads[1] > most
        typical = f"the median is {show(median)}, the interquartile range {show(noise.spreads[1])}"
    else:
        beyond = change.verdict == SLOWER and Fraction(median) > Fraction(noise.medians[0]) * (1 + limit.share)
        typical = f"the median went from {show(noise.medians[0])} to {show(median)}: {change.verdict}"
    if beyond:
        return True, f"Limit exceeded: {sentence}{subject.parts()}"
    return False, f"Exceeded only within noise, which does not count: {sentence[:-1]}; {typical}."


def _parts(diff: Diff, limit: Limit, pair: Pair, quantity: Quantity) -> str:
    """The layers at or below one that made it exceed a limit, the largest first."""
    if not pair.children or quantity.is_self:
        return ""
    if limit.share is not None:
        parts = diff.largest_parts(pair, quantity)
        found = [(one, change.difference or 0) for one, change in parts.layers]
        lead = "Most of the difference" if parts.hold_most else f"The largest part{parts.ending} of the difference"
        lead, sign = lead + parts.beyond_noise, "+"
    else:
        own = diff.self_of(quantity)
        calls = diff.counts[1] if diff.unit is None and own.is_self and quantity.what != "params" else 1
        layers = [one for one in pair.walk() if one.after is not None and (own.is_self or not one.children)]
        found = [(one, (one.changes[own.key].after or 0) / calls) for one in layers]
        found = sorted((each for each in found if each[1] > 0), key=lambda each: -each[1])
        lead, sign = "The largest parts", ""
    names = [f"{'.'.join(one.path)} ({sign}{quantity.text(value)})" for one, value in found[:_NAMED]]
    return f" {lead}: {', '.join(names)}." if names else ""


def _known(limit: Limit, name: str, value: float | None, when: str = "in the run") -> float:
    if value is None:
        raise _unknown(limit, name, when)
    return value


def _unknown(limit: Limit, name: str, when: str) -> TorchprofError:
    return TorchprofError(
        f"{limit.text!r}: {limit.measure} of {name} is not known {when}. It was never called or not selected, or holds "
        "operators without a formula, or parameters that nobody has counted. What nobody knows is no pass: limit "
        "another layer, or another measure."
    )


def _not_measured(diff: Diff, limit: Limit) -> TorchprofError:
    keys = [_PEAK] * any(key.endswith("_peak") for key in diff.whole) + [_STEP] * (_STEP in diff.whole)
    keys += [one.key for one in diff.quantities]
    which = "This run did not measure" if diff.before is diff.after else "These runs did not both measure"
    return TorchprofError(
        f"{limit.text!r}: {which} {limit.measure!r}, if there is such a thing. {suggest(limit.measure, keys)} "
        "Memory needs profile_memory=True (--memory), FLOPs with_flops=True (--flops), the step prof.step()."
    )


def _amount(limit: Limit, unit: Unit) -> Fraction:
    """A bound in ns, bytes or pieces."""
    bound, units = limit.bound, _UNITS[unit]
    if isinstance(bound, str):
        match = _AMOUNT.fullmatch(bound.strip())
        if match is not None and match[2] in units:
            return Fraction(match[1]) * units[match[2]]
    elif unit is not Unit.TIME and math.isfinite(bound) and bound >= 0:
        return Fraction(bound)
    raise TorchprofError(
        f"{limit.text!r}: {bound!r} is no limit of {limit.measure}. Write an amount with its unit "
        f"({', '.join(name for name in units if name)}), as in {_EXAMPLES[unit]}, or an increase, as in +10%."
    )
