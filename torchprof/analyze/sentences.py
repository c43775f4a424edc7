"""Sentences that many reports have: the legend of signs, the warnings of a run, and what its figures are sums over."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Iterator
from typing import Any

from torchprof.analyze.report import Section
from torchprof.analyze.warnings import waited_share
from torchprof.errors import printable
from torchprof.run.formats import format_memory, ranks_in_words, short_time
from torchprof.run.measures import SampleKey
from torchprof.run.run import Run
from torchprof.run.words import BETWEEN_OPS, FORWARD, OUTSIDE, OUTSIDE_NAME


def filled(text: str, width: int, first_indent: str, indent: str, **options: Any) -> str:
    """A text in lines, with paths and code in it in one piece. ``options``: further ones of ``textwrap.fill``."""
    options |= {"break_long_words": False, "break_on_hyphens": False}
    return textwrap.fill(printable(text), width, initial_indent=first_indent, subsequent_indent=indent, **options)


def not_shown(count: int) -> str:
    """How many findings are not shown, as a sentence without its period."""
    return f"{count} more finding{'s are' if count > 1 else ' is'} not shown"


RECORDS = {
    "record_shapes": "record_shapes=True (shapes and types)",
    "profile_memory": "profile_memory=True (memory)",
    "use_cuda": "use_cuda=True where the model runs on a GPU",
}
"""By the option that records what some rules need, what it is called in an advice to record it."""


def unrecorded(run: Run) -> list[str]:
    """What some rules need and the run does not have, as names of arguments of ``Profile``. "use_cuda" is left out if
    torch was built without CUDA."""
    recorded = {name for meta in run.metas for name, on in meta.flags if on}
    machine = [name for name, _ in run.meta.environment]
    if run.meta.device is not None or (machine and "CUDA" not in machine):
        recorded.add("use_cuda")
    return [name for name in RECORDS if name not in recorded]


# The legend

LEGEND = {
    "–": "unknown: not measured, or not attributed to this place",
    "≥": "lower bound: a part of it could not be counted",
    OUTSIDE_NAME: "work outside of all layers",
    BETWEEN_OPS: "no operator ran: Python, other libraries, or waiting",
}
"""The signs in place of figures and of names, in every table. ``legend`` writes them, and so does the page."""


def legend(text: str) -> list[str]:
    """A line for each sign of ``LEGEND`` that is alone in a printed text, and that the text does not explain.

    A dash in a range, as in "0–9", is not a sign.
    """
    width = max(map(len, LEGEND))
    return [
        f"  {sign:<{width}}  {meaning}"
        for sign, meaning in LEGEND.items()
        if re.search(rf"(?<!\S){re.escape(sign)}(?!\S)", text) and not re.search(rf"(?m)^{re.escape(sign)}: ", text)
    ]


# Warnings in words

_WARNINGS_SHOWN = 10  # of several ranks: a job may have a thousand, each with other figures in its warnings
_BUSY = "machine_busy"
_ABOUT_TIMES = (
    "passes_sampled",
    "passes_chosen",
    "passes_unusual",
    "passes_slower",
    "no_compiled_code",
    "start_up",
    "slow_start",
    _BUSY,
)
"""The codes of the warnings about all times of a run, or about code that was to be compiled. Views that begin with a
headline show them directly below it."""


def warnings_below(run: Run, without: Collection[str] = ()) -> Section:
    """The last part of a report: the warnings of a run, as in ``warnings_of``."""
    return Section([*map(printable, warnings_of(run, without))], has_warnings=True)


def warnings_of(run: Run, without: Collection[str] = ()) -> list[str]:
    """The warnings of a run as sentences: which ranks are missing, then each warning once. A warning that does not come
    from all ranks names its ranks. ``without``: codes of warnings to leave out."""
    ranks_of: dict[str, set[int]] = {}
    for warning in run.warnings:
        has_common_sentence = len(run.metas) > 1 and warning.code == _BUSY
        if not has_common_sentence and warning.code not in without:
            ranks_of.setdefault(str(warning), set()).update(warning.ranks)
    warnings = [
        sentence if len(ranks) == len(run.metas) else f"{ranks_in_words(ranks).capitalize()}: {sentence}"
        for sentence, ranks in sorted(ranks_of.items(), key=lambda item: -len(item[1]))
    ]
    hidden = len(warnings) - _WARNINGS_SHOWN
    if len(run.metas) > 1 and hidden > 0:
        more = f"{hidden} more warnings of single ranks are hidden. run.of_rank(N) has those of rank N."
        warnings[_WARNINGS_SHOWN:] = [more]
    return [*about_missing_ranks(run), *warnings, *_about_busy_machines(run)]


def lacks_ranks(run: Run) -> bool:
    """Whether the warnings begin with a sentence on missing ranks. Not for a run of one rank, which was not merged yet
    or was taken out of a merged run, and not for chosen ranks, which another warning is about."""
    return bool(run.missing_ranks) and len(run.metas) > 1 and run.choice is None


def about_missing_ranks(run: Run) -> Iterator[str]:
    """A sentence that names the ranks of the job that are missing in a run, if any are."""
    if lacks_ranks(run):
        missing = run.missing_ranks
        are = "is" if len(missing) == 1 else "are"
        job_size = len(run.metas) + len(missing)
        yield f"{ranks_in_words(missing).capitalize()} of {job_size} {are} missing in this run."


def _about_busy_machines(run: Run) -> Iterator[str]:
    """One sentence for all ranks: a warning for each rank, with different figures, would hide other warnings."""
    shares = {meta.rank: share for meta in run.metas if (share := waited_share(meta))}
    if shares and len(run.metas) > 1:
        most = max(shares, key=shares.__getitem__)
        yield (
            f"The machine was busy on {len(shares)} of {len(run.metas)} ranks: the main thread waited for a processor "
            f"for up to {shares[most]:.0%} of the time (rank {most}). Times include this. Measure again on an idle "
            "machine."
        )


def about_times(run: Run) -> Iterator[str]:
    """What makes all times of a run less certain than they look: a sentence each."""
    calls = sum(map(run.rows.forward_calls, run.layers.roots))
    if "cpu_ns" in run.meta.measured and calls == 1:
        yield "One call was recorded: it has no spread, and if it was the first, start-up work is in its times."
    if len(run.metas) == 1:
        yield from (str(warning) for warning in run.warnings if warning.code in _ABOUT_TIMES)


def other_warnings_of(run: Run) -> list[str]:
    """The warnings that are not in ``about_times``: all of them in a run of several ranks, whose figures differ."""
    return warnings_of(run, without=_ABOUT_TIMES if len(run.metas) == 1 else ())


def peak_in_words(run: Run, nbytes: int) -> str:
    """A peak above the start: a lower bound if only some passes of a loop were recorded."""
    return f"{'≥ ' if run.passes else ''}+{format_memory(nbytes)}"


# What figures are sums over


def about_sums(run: Run) -> Iterator[str]:
    """What the figures mean in a run of several ranks: which are sums, means and maxima over ranks."""
    if len(run.metas) > 1:
        ranks = ranks_in_words(meta.rank for meta in run.metas)
        yield (
            f"Times, calls, memory and FLOPs are sums over {ranks}. Rates are means of the ranks, peaks the maximum. "
            'The report "ranks" compares ranks.'
        )


def count_of_ranks(run: Run) -> str:
    """How many ranks a run has, and of how many they were chosen: "8", "3 of 1,024"."""
    count = f"{len(run.metas):,}"
    return count if run.choice is None else f"{count} of {run.choice.facts['count']:,}"


def about_flops(run: Run) -> Iterator[str]:
    """A sentence if MACs and FLOPs in tables are sums over several calls or steps."""
    over = summed_over(run)
    if over and "flops" in run.rows.nonzero:
        yield f"MACs and FLOPs are summed over {over}."


def summed_over(run: Run) -> str:
    """What the sums of a run are over, in words: its steps, else the calls of its models; "" for a single call."""
    steps = max(meta.marked_steps for meta in run.metas)
    if steps > 1:
        return f"{steps} steps"
    roots = run.layers.roots
    calls = sum(map(run.rows.forward_calls, roots))
    models = run.layers[roots[0]].name if len(roots) == 1 else "the models"
    return f"{calls} calls of {models}" if calls > 1 else ""


# The rate

_TIME_FIRST = ("LSTM", "GRU", "RNN", "MultiheadAttention", "Transformer")
"""The classes whose input has its time, not the batch, in its first dimension unless ``batch_first=True``."""


_CALLS_A_STEP = 1.2


def called_models(run: Run) -> dict[int, int]:
    """The forward calls of the models that were called, by the index of the layer."""
    return {root: calls for root in run.layers.roots if (calls := run.rows.forward_calls(root))}


def throughput(run: Run, root: int) -> str:
    """The tokens or samples that the model ``root`` got in its calls, all of one shape, a second of recorded time, or
    of the time that a device was busy, if that is longer: "3,121 samples/s over 1.21s". "" if several models were
    called, if a step has several calls, or if the dimension of the batch, the time, or the calls are unknown."""
    layer, calls = run.layers[root], run.rows.forward_calls(root)
    steps = run.samples.get(SampleKey(OUTSIDE, FORWARD, run.meta.rank, "cpu", "step_ns"))
    if steps is not None and calls > _CALLS_A_STEP * (steps.count + 1) * len(run.metas):
        return ""  # a step, or an evaluation in between, has more than one batch
    if [*called_models(run)] != [root] or any(warning.code == "calls_not_recorded" for warning in run.meta.warnings):
        return ""
    wall_ns = max((ns for meta in run.metas for ns in (meta.wall_ns, *meta.busy_devices.values())), default=0)
    shape = layer.input_shapes[0] if layer.input_shapes else ()
    if not wall_ns or "cpu_ns" not in run.meta.measured or len(shape) not in (2, 4, 5) or min(shape) < 1:
        return ""  # three dimensions may be (time, batch, features)
    are_tokens = any(other.kind == "Embedding" and other.input_shapes == (shape,) for other in run.layers)
    may_have_time_first = any(
        other.kind.startswith(_TIME_FIRST) and "batch_first=True" not in other.settings for other in run.layers
    )
    if len(shape) == 2 and are_tokens:
        number, unit = calls * shape[0] * shape[1], "tokens"
    elif may_have_time_first:
        return ""
    else:
        number, unit = calls * shape[0], "samples"
    of_ranks = f" on {len(run.metas)} ranks" if len(run.metas) > 1 else ""
    per_s = number * 1e9 / wall_ns
    return f"{f'{per_s:,.0f}' if per_s >= 100 else f'{per_s:.3g}'} {unit}/s over {short_time(wall_ns)}{of_ranks}"
