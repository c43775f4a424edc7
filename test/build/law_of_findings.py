"""The law of findings: a sentence speaks only of rows inside the place that it names, and what it counts is in a report
of the same run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache

from torchprof import Run, TorchprofError
from torchprof.advise import Advice

_UNITS = {"us": 1_000, "ms": 1_000_000, "s": 1_000_000_000}
_TIME = re.compile(r"(?<!of the )(?<![\w.])([\d,]*\.?\d+)(us|ms|s)\b")
_COUNT = re.compile(
    r"(?<![\w.:`])(\d[\d,]*) (?=(?:forward |elementwise |equal small )*"
    r"(?:calls?|times?|writes?|operators|copies|copy|kernels?|selections|batches|layers|samples)\b(?! as long))"
)
_ROUNDED = 1.001  # times are written with three decimals
_REPORTS = ("tree", "types", "operators", "lines", "steps", "device", "collectives", "compiled", "summary")
_OF_SEVERAL_ROWS = {
    "channels_last_missed",
    "copies_in_layers",
    "gradients_zeroed",
    "launches_slower_than_the_device",
    "layers_in_a_loop",
    "many_small_operators",
    "recomputed_layers",
    "waiting_for_data",
    "waits_for_values",
}
"""Rules that count rows of several operators or layers, or count for each call: no report adds these up. Their own
tests do."""


def breaches(run: Run, findings: Iterable[Advice]) -> Iterator[str]:
    """What in the findings of a run cannot be true of the places that they name."""

    @cache
    def numbers() -> set[str]:
        return _numbers_in_reports(run)

    for advice in findings:
        place_ns, calls = _of_place(run, advice)
        times = [float(number.replace(",", "")) * _UNITS[unit] for number, unit in _TIME.findall(advice.finding)]
        counts = [number.replace(",", "") for number in _COUNT.findall(advice.finding)]
        about = f"{advice.rule} in {advice.layer}: {advice.finding}"
        if max(times, default=0) > _ROUNDED * place_ns:
            yield f"It says a time longer than the {place_ns / 1e6:.3f}ms of its place. {about}"
        if max(map(int, counts), default=0) > calls:
            yield f"It says a count larger than the {calls:,} calls of its place. {about}"
        if counts and advice.rule not in _OF_SEVERAL_ROWS and not numbers().issuperset(counts):
            yield f"It says a count that is in no report. {about}"
        optimizer_ns = _of_optimizers(run)  # a layer's part of a step is gained with it
        if (advice.gain_ns or 0) > _ROUNDED * (place_ns + optimizer_ns):
            yield f"It gains more than the {place_ns / 1e6:.3f}ms of its place. {about}"


def _numbers_in_reports(run: Run) -> set[str]:
    text = ""
    for name in _REPORTS:
        try:
            text += str(run.report(name, **({"top": None} if name in ("operators", "lines") else {})))
        except TorchprofError:  # the run has nothing for it
            continue
    return set(re.findall(r"(?<![\d.])\d+(?![\d.])", text.replace(",", "")))


def _of_place(run: Run, advice: Advice) -> tuple[float, int]:
    """The time and the calls of all rows of the layers of a finding and below them, and of the layers that its
    sentence names; without any, of the work of no layer; of a finding on a model or on the loop, of all rows."""
    layers = run.layers
    named = {number for number, layer in enumerate(layers) if layer.name in advice.layers}
    inside = layers.at_or_below(named) if named else set()
    inside |= {number for number, layer in enumerate(layers) if _names(advice.finding, layer.name)} if named else set()
    is_of_all = "of the loop" in advice.finding or (not named and advice.layer not in ("(outside)", ""))
    with_outside = not named or advice.layer == "(outside)"
    ns, calls = 0, 0
    for number, row in zip(run.rows.columns["layer"], run.rows):
        if is_of_all or number in inside or (with_outside and number < 0):
            ns += max(row.cost.cpu_ns, row.cost.device_ns)
            calls += row.calls
    return max(ns, sum(meta.wall_ns for meta in run.metas) * is_of_all), calls


def _names(text: str, name: str) -> bool:
    return re.search(rf"(?<![\w.]){re.escape(name)}(?!\w|\.\w)", text) is not None


def _of_optimizers(run: Run) -> int:
    rows = (row for row in run.rows if any(frame.name.startswith("Optimizer.") for frame in row.frames))
    return sum(max(row.cost.cpu_ns, row.cost.device_ns) for row in rows)
