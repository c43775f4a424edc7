"""Limits on what layers cost, for continuous integration and test suites. Their syntax is in docs/compare.md."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from os import PathLike
from typing import NamedTuple

from torchprof.analyze.columns import Column
from torchprof.analyze.figures import incomplete_phases
from torchprof.analyze.warnings import about_uncounted, operators_without_shapes
from torchprof.comparison import as_run, compare
from torchprof.comparison.diff import BUSY, FEWEST, MOST_NAMED, SLOWER, UNDECIDED, Change, Diff, Pair, waited_at_most
from torchprof.comparison.layers import ADDED, REMOVED
from torchprof.errors import TorchprofError, suggest
from torchprof.run.formats import EXAMPLES, FORMATS, UNITS, Bound, Cell, Figure, Unit, parse_amount
from torchprof.run.layers import find
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED, OUTSIDE, OUTSIDE_NAME

_PEAK, _STEP = "peak", "step"

# Limits

_TARGET = re.compile(r"\s*(?:(?P<pattern>.*\S)\s*:\s*)?(?P<measure>\w+)\s*", re.DOTALL)
_SHARE = re.compile(r"\+(\d+(?:\.\d+)?)\s*%")
_SYNTAX = (
    'A limit is [LAYERS: ]MEASURE > AMOUNT, as in "cpu_total > +10%", "peak > 1.5GB", "features.*: cpu_total > 12ms"'
)


class BudgetExceeded(AssertionError):
    """A limit of ``assert_budget`` is exceeded: which, by how much, and which layers caused it."""


class Limit(NamedTuple):
    """A limit on one measure, as the user wrote it in ``text``.

    ``pattern``: a path of layers, None for the models. ``bound``: a number, or text with an amount and its unit, or a
    relative increase. ``share``: that increase over the figure before (0.1: a tenth); None for an absolute limit.
    """

    text: str
    pattern: str | None
    measure: str
    bound: str | int | float
    share: Fraction | None


class Outcome(NamedTuple):
    """The result of a limit: ``failures`` has a sentence for each layer that exceeds it, ``remarks`` for each that does
    so only within noise."""

    limit: Limit
    failures: tuple[str, ...]
    remarks: tuple[str, ...]


def assert_budget(
    run: Run | str | PathLike[str],
    limits: Mapping[str, str | int | float],
    baseline: Run | str | PathLike[str] | None = None,
) -> None:
    """Fail a test if a run costs more than its limits allow.

    ``limits``: from ``"[LAYERS: ]MEASURE"`` to the largest value allowed: ``{"cpu_total": "12ms", "features.*: peak":
    "1.5GB", "flops": 4_200_000_000}``. Without LAYERS the limit is on the models. Additive measures are per forward
    call of the model, however many calls were recorded. ``"+10%"`` is relative to ``baseline``, a run or the file of a
    saved one. A time that exceeds its limit only within noise warns, and does not fail. See docs/compare.md.

    Raises BudgetExceeded, an AssertionError, if a limit is exceeded; TorchprofError for a limit that cannot be parsed,
    that names unknown layers, or whose figure is unknown.
    """
    __tracebackhide__ = True  # pytest then shows the line of the test, not one of this file
    if not isinstance(limits, Mapping) or not limits:
        raise TorchprofError(f'limits={limits!r:.80} has no limits. Example: {{"cpu_total": "12ms"}}.')
    read = [_limit(f"{target}: at most {bound}", target, bound) for target, bound in limits.items()]
    relative = next((limit for limit in read if limit.share is not None), None)
    if relative is not None and baseline is None:
        raise TorchprofError(f"{relative.text!r} is relative: pass baseline=, a run or the file of one.")
    after = as_run(run, "run", "assert_budget")
    before = after if baseline is None else as_run(baseline, "baseline", "assert_budget")
    outcomes = check(compare(before, after), read)
    for outcome in outcomes:
        for remark in outcome.remarks:
            warnings.warn(remark, stacklevel=2)
    if failures := [failure for outcome in outcomes for failure in outcome.failures]:
        raise BudgetExceeded("\n".join(failures))


def limit_of(text: str) -> Limit:
    """Parse a limit of the command line: ``"features.*: cpu_total > +10%"``. Raises TorchprofError for invalid text."""
    target, sign, bound = text.rpartition(">")
    if not sign:
        raise TorchprofError(f"{text!r} is not a limit: it has no '>'. {_SYNTAX}.")
    return _limit(text.strip(), target, bound.strip())


def _limit(text: str, target: object, bound: object) -> Limit:
    """Parse a limit from its two parts: ``"features.*: cpu_total"`` and ``"12ms"``."""
    match = _TARGET.fullmatch(target) if isinstance(target, str) else None
    if match is None:
        raise TorchprofError(f"{text!r} is not a limit: {target!r} is not a measure. {_SYNTAX}.")
    share = _SHARE.fullmatch(bound.strip()) if isinstance(bound, str) else None
    if isinstance(bound, bool) or not isinstance(bound, (str, int, float)):
        raise TorchprofError(f"{text!r} is not a limit: {bound!r} is not an amount. {_SYNTAX}.")
    return Limit(text, match["pattern"], match["measure"], bound, share and Fraction(share[1]) / 100)


def check(diff: Diff, limits: Iterable[Limit]) -> list[Outcome]:
    """Check limits on a diff; absolute limits on its run after.

    Raises TorchprofError for a measure that does not exist or was not measured, for unknown layers, and for an unknown
    figure of one of them: an unknown figure never passes.
    """
    outcomes = []
    for limit in limits:
        results = [_checked(diff, limit, subject) for subject in _subjects(diff, limit)]
        failures = tuple(failure for failure, _ in results if failure)
        remarks = tuple(remark for _, remark in results if remark)
        outcomes.append(Outcome(limit, failures, remarks))
    return outcomes


# What a limit is checked on


class _Subject(NamedTuple):
    """One figure that a limit is checked on: a measure of the layer ``name``, or the peak or the step of the run.

    ``was_added``: the layer did not exist before. ``is_sum``: the figure adds up over calls. ``parts``: makes the
    sentence on the layers that contribute most. ``why_unknown``: says why the figure is unknown before (0) or after
    (1). ``is_elapsed``: it is elapsed time of a thread, which includes waiting for a processor.
    """

    name: str
    change: Change
    unit: Unit
    was_added: bool = False
    is_sum: bool = False
    parts: Callable[[], str] = lambda: ""
    why_unknown: Callable[[int], str] = lambda side: ""
    is_elapsed: bool = False


def _subjects(diff: Diff, limit: Limit) -> Iterator[_Subject]:
    """The figures that a limit is checked on: one for each layer that it names, or one of the run."""
    if limit.measure == _PEAK and limit.pattern is None:
        yield _peak_of_run(diff, limit)
        return
    if limit.measure == _STEP and _STEP in diff.whole:
        if limit.pattern is not None:
            raise TorchprofError(f"{limit.text!r}: a step belongs to the run, not to a layer. Write {_STEP!r} alone.")
        yield _Subject("the run", diff.whole[_STEP], Unit.TIME, is_elapsed=True)
        return
    quantities = [quantity for quantity in diff.quantities if quantity.key == limit.measure]
    if limit.measure == _PEAK:  # of the device, if there is one, in all phases
        peaks = [quantity for quantity in diff.quantities if quantity.what == "peak"]
        quantities = [quantity for quantity in peaks if quantity.on_device] or peaks
    if not quantities:
        raise _not_measured(diff, limit)
    if limit.pattern == OUTSIDE_NAME and quantities[0].what != "cost":
        raise TorchprofError(
            f"{limit.text!r}: work outside of all layers has no {limit.measure}. Limit its times, net memory or FLOPs."
        )
    for pair in _pairs(diff, limit):
        quantity, change = _largest_of_phases(pair, quantities)
        yield _Subject(
            ".".join(pair.path),
            change,
            quantity.unit,
            was_added=pair.how == ADDED,
            is_sum=quantity.what in ("cost", "calls"),
            parts=partial(_parts, diff, limit, pair, quantity),
            why_unknown=partial(_why_unknown, diff, pair, quantity),
            is_elapsed=quantity.is_elapsed,
        )


def _largest_of_phases(pair: Pair, quantities: Sequence[Column]) -> tuple[Column, Change]:
    """Of one measure in several phases the change of the largest value, and the quantity that has it after. Before, it
    may be that of another phase."""
    changes = [pair.changes[quantity.key] for quantity in quantities]
    if len(changes) == 1:
        return quantities[0], changes[0]
    before, after = _largest([change.before for change in changes]), _largest([change.after for change in changes])
    having = (quantity for quantity, change in zip(quantities, changes) if change.after == after)
    return next(having, quantities[0]), Change(before, after, None, UNDECIDED)


def _largest(values: Sequence[float | None]) -> float | None:
    """The largest of some values; None if one is unknown, because that may be the largest."""
    known = [value for value in values if value is not None]
    return max(known) if len(known) == len(values) else None


def _pairs(diff: Diff, limit: Limit) -> list[Pair]:
    """The layers after that a limit names, or the work outside all layers, if there was any."""
    if limit.pattern == OUTSIDE_NAME:
        return [pair for pair in diff.pairs if not pair.is_layer and pair.name == OUTSIDE_NAME]
    layers = [pair for pair in diff.walk() if pair.is_layer]
    if limit.pattern is None:
        models = [pair for pair in layers if pair.after is not None and len(pair.after.path) == 1]
        if not models:
            raise TorchprofError(
                f"{limit.text!r}: this run has no layers: all its work is outside of them. If it has steps, limit "
                f'that work: "{OUTSIDE_NAME}: cpu_total".'
            )
        return models
    names = [tuple(layer.path for layer in (pair.before, pair.after) if layer is not None) for pair in layers]
    try:
        named = [layers[number] for number in sorted(find(limit.pattern, names))]
    except TorchprofError as error:
        raise TorchprofError(f"{limit.text!r}: {error}") from error
    if not (there := [pair for pair in named if pair.how != REMOVED]):
        raise TorchprofError(f"{limit.text!r}: {'.'.join(named[0].path)} was removed: there is no figure to check.")
    return there


def _peak_of_run(diff: Diff, limit: Limit) -> _Subject:
    """The peak of the run: of the device if there is one, else of the CPU."""
    if not (peaks := [key for key in diff.whole if key.endswith("_peak")]):
        raise _not_measured(diff, limit)
    key = peaks[-1]  # the device's comes after the CPU's
    where = [
        (spread.max, diff.after.layers[sample.layer].name if sample.layer >= 0 else OUTSIDE_NAME, sample.phase)
        for sample, spread in diff.after.samples.items()
        if sample.measure == "device_peak_bytes" and (sample.device == "cpu") == (key == "cpu_peak")
    ]
    _, name, phase = max(where, default=(0, "", ""))
    parts = f" It was reached in {name}, {phase}." if name else ""
    return _Subject("the run", diff.whole[key], Unit.BYTES, parts=lambda: parts)


# The check


def _checked(diff: Diff, limit: Limit, subject: _Subject) -> tuple[str, str]:
    """Check a limit on one figure: the failure or the remark, each a sentence, or "" if there is none.

    A lower bound above an absolute limit exceeds it. A lower bound below the limit raises: the result is unknown.
    """
    # Absolute limits are per call of the model. A diff of runs with equally many calls holds totals.
    calls = diff.calls_in_figures if subject.is_sum and limit.share is None else 1
    figure = subject.change.figure(1)
    if not figure.is_known or (figure.bound is Bound.AT_LEAST and limit.share is not None):
        raise _unknown(limit, subject, 1, figure)
    after = Fraction(figure.value) / calls
    figure = figure._replace(value=float(after))
    if subject.is_sum and diff.counted is None:
        raise TorchprofError(
            f"{limit.text!r}: the run has no calls of a model and no steps, so {limit.measure} per call is unknown. "
            "Select the model, too (paths=), or mark steps with prof.step()."
        )
    if limit.share is None:
        most = _amount(limit, subject.unit)
        show = FORMATS[subject.unit]
        above = f"{figure.text(show)}, limit {show(float(most))}"
    else:
        most, above = _relative(limit, limit.share, subject, after)
    if after <= most:
        if figure.bound is Bound.AT_LEAST:
            raise _unknown(limit, subject, 1, figure)
        return "", ""
    sums = diff.counted if subject.is_sum and (limit.share is None or diff.unit) else None
    per = {"call": ", per forward call of the model", "step": ", per step"}.get(sums or "", "")
    sentence = f"{subject.name}: {limit.measure} {above}{per}."
    exceeded = f"Limit exceeded: {sentence}{subject.parts()}"
    if subject.unit is not Unit.TIME:
        return exceeded, ""
    if figure.bound is Bound.AT_LEAST:
        return f"{exceeded} It was not compared with noise: a part of the time is unknown.", ""
    return _compared_with_noise(diff, limit, subject, after=after, most=most, sentence=sentence, exceeded=exceeded)


def _relative(limit: Limit, share: Fraction, subject: _Subject, after: Fraction) -> tuple[Fraction, str]:
    """The largest value that a relative limit allows, and the two values in words."""
    change, show = subject.change, FORMATS[subject.unit]
    if change.before is None and not subject.was_added:
        raise _unknown(limit, subject, 0, change.figure(0))
    before = Fraction(change.before or 0)
    if before < 0:
        raise TorchprofError(
            f"{limit.text!r}: {subject.name} had {show(float(before))} before: a negative value has no increase "
            "in percent. Write an amount."
        )
    increase = f"{float(after / before - 1):+.1%}" if before else "from nothing"
    in_words = f"{show(float(after))} after, {show(float(before))} before: {increase}, limit {limit.bound}"
    return before * (1 + share), in_words


def _compared_with_noise(
    diff: Diff, limit: Limit, subject: _Subject, *, after: Fraction, most: Fraction, sentence: str, exceeded: str
) -> tuple[str, str]:
    """The failure or the remark on a time ``after`` that is above ``most``: it passes if noise or waiting for a
    processor may be the cause. ``sentence``: what the time is; ``exceeded``: the report if it does not pass."""
    change, noise = subject.change, subject.change.noise
    waited = waited_at_most(diff.after) if subject.is_elapsed else 0.0
    if waited and after * Fraction(1 - waited) <= most:
        return "", _unclear(sentence, waited)
    if noise is None or min(noise.counts) < FEWEST or (limit.share is not None and change.verdict == UNDECIDED):
        return f"{exceeded} It was not compared with noise: the runs have too few calls or steps.", ""
    median, show = noise.medians[1], FORMATS[subject.unit]
    if limit.share is None:
        beyond = median - noise.spreads[1] > most
        typical = f"the median is {show(median)}, the interquartile range {show(noise.spreads[1])}"
    else:
        beyond = change.verdict == SLOWER and Fraction(median) > Fraction(noise.medians[0]) * (1 + limit.share)
        typical = f"the median went from {show(noise.medians[0])} to {show(median)}: {change.verdict}"
    if beyond:
        return exceeded, ""
    if change.verdict == BUSY:
        return "", _unclear(sentence, max(waited, waited_at_most(diff.before)))
    return "", f"Exceeded within noise, so it passes: {sentence[:-1]}; {typical}."


def _unclear(sentence: str, waited: float) -> str:
    return (
        f"Exceeded, but unclear, so it passes: {sentence} The machine was busy: the main thread waited for a processor "
        f"for {waited:.0%} of the time. Measure again on an idle machine."
    )


def _parts(diff: Diff, limit: Limit, pair: Pair, quantity: Column) -> str:
    """A sentence on the layers at or below a pair that contribute most to exceeding a limit, the largest first."""
    if not pair.children or quantity.is_self:
        return ""
    texts: list[tuple[Pair, Cell]]
    if limit.share is not None:
        layers, hold_most, beyond_noise = diff.largest_parts(pair, quantity)
        texts = [(layer, f"+{quantity.write(change.difference or 0)}") for layer, change in layers]
        parts = "Most" if hold_most else "The largest part" + "s" * (len(layers) > 1)
        lead = f"{parts} of the difference{beyond_noise}"
    else:
        texts = [(layer, figure.text(quantity.write)) for layer, figure in _largest_after(diff, pair, quantity)]
        lead = "The largest parts"
    names = [f"{'.'.join(layer.path)} ({text})" for layer, text in texts[:MOST_NAMED]]
    return f" {lead}: {', '.join(names)}." if names else ""


def _largest_after(diff: Diff, pair: Pair, quantity: Column) -> list[tuple[Pair, Figure]]:
    """The layers at or below a pair with their figures after, per call of the model, the largest first: of self, or if
    the quantity has none, of the layers without children."""
    own = diff.self_of(quantity)
    calls = diff.calls_in_figures if own.is_self and quantity.what != "params" else 1
    layers = [layer for layer in pair.walk() if layer.after is not None and (own.is_self or not layer.children)]
    figures = [(layer, layer.changes[own.key].figure(1)) for layer in layers]
    known = [(layer, figure) for layer, figure in figures if figure.is_known and figure.value > 0]
    known.sort(key=lambda part: -part[1].value)
    return [(layer, figure._replace(value=figure.value / calls)) for layer, figure in known]


# Errors


def _unknown(limit: Limit, subject: _Subject, side: int, figure: Figure) -> TorchprofError:
    """The error for a limit on a figure that is unknown before (0) or after (1). ``figure`` may be a lower bound."""
    when = ("before", "in the run")[side]
    least = f", but {figure.text(FORMATS[subject.unit])}" if figure.is_known else ""
    return TorchprofError(
        f"{limit.text!r}: {limit.measure} of {subject.name} is unknown {when}{least}. {subject.why_unknown(side)} "
        "A limit on an unknown figure cannot pass. Limit another layer or measure."
    )


def _why_unknown(diff: Diff, pair: Pair, quantity: Column, side: int) -> str:
    """Why a quantity of a layer, or of the work outside all layers, is unknown before (0) or after (1)."""
    run, layer = (diff.before, diff.after)[side], (pair.before, pair.after)[side]
    if quantity.what == "params":
        return "It has parameters of unknown size: a lazy layer that was never called."
    reasons: list[str] = []
    if quantity.measure is not None:
        inside = {OUTSIDE if pair.name == OUTSIDE_NAME else NOT_SELECTED}
        if layer is not None:
            own = {run.layers.index_of[layer.path]}
            inside = own if quantity.is_self else run.layers.at_or_below(own)
        if quantity.measure.lower_bound_if is not None:
            without_shapes = operators_without_shapes(warning for meta in run.metas for warning in meta.warnings)
            rows = run.rows.only(layer=inside.__contains__, phase=quantity.phase)
            reasons += map(str, about_uncounted(rows, without_shapes))
        incomplete = incomplete_phases(run).get(() if layer is None else layer.path)
        if incomplete is not None and quantity.phase in incomplete[quantity.is_self]:
            reasons.append("Compiled kernels that may have worked for it count for a layer above it.")
    return " ".join(reasons) or "It was never called, or was not selected."


def _not_measured(diff: Diff, limit: Limit) -> TorchprofError:
    keys = [_PEAK] * any(key.endswith("_peak") for key in diff.whole) + [_STEP] * (_STEP in diff.whole)
    keys += [quantity.key for quantity in diff.quantities]
    which = "This run did not measure" if diff.before is diff.after else "These runs did not both measure"
    return TorchprofError(
        f"{limit.text!r}: {which} {limit.measure!r}. {suggest(limit.measure, keys)} "
        "Memory needs profile_memory=True (--memory), FLOPs with_flops=True (--flops), the step prof.step()."
    )


def _amount(limit: Limit, unit: Unit) -> Fraction:
    """The bound of a limit as a number: in ns, in bytes, or a count."""
    bound = limit.bound
    if isinstance(bound, str):
        if (amount := parse_amount(bound, unit)) is not None:
            return amount
    elif unit is not Unit.TIME and math.isfinite(bound) and bound >= 0:
        return Fraction(bound)
    raise TorchprofError(
        f"{limit.text!r}: {bound!r} is not a limit of {limit.measure}. Write an amount with its unit "
        f"({', '.join(filter(None, UNITS[unit]))}), as in {EXAMPLES[unit]}, or an increase, as in +10%."
    )
