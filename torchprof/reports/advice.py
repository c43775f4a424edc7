"""The findings of the advice as text: numbered, the largest gain first."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from torchprof.analyze.advice import Advice, judge
from torchprof.analyze.advice.evidence import Evidence
from torchprof.reports import report
from torchprof.reports.text import check_number, printable, spaced
from torchprof.run.cost import format_memory, format_time
from torchprof.run.run import Run

_WIDTH = 100
_RECORDS = {
    "record_shapes": "record_shapes=True (shapes and types)",
    "profile_memory": "profile_memory=True (memory)",
    "use_cuda": "use_cuda=True where the model runs on a GPU",
}


@report("advice", "findings: what costs for nothing, and what to change", answers="why")
def advice(run: Run, *, limit: int | None = 20) -> str:
    """What could be made faster or smaller: for each finding the layer's path, the evidence, the largest possible gain,
    and what to change. Findings are sorted by gain, largest first; those of unknown gain are last.

    If there are no findings, the report says so. At its end it names rules that failed, and what could be recorded to
    find more. ``limit``: the number of findings to show (None: all). docs/advice.md lists the rules.

    Raises TorchprofError for a negative limit.
    """
    check_number("limit", limit, "findings")
    found, failed = judge(run)
    parts = findings(run, found[:limit])
    if not found:
        parts.append("Nothing was found in this run that is worth a change.")
    elif limit is not None and limit < len(found):
        parts.append(f"{not_shown(len(found) - limit)}: limit=None shows all.")
    if failed:
        rules = ", ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failed.items())
        parts.append(textwrap.fill(printable(f"Failed, and found nothing: {rules}. Please report this."), _WIDTH))
    missing = unrecorded(run)
    if missing:
        more = ", ".join(_RECORDS[name] for name in missing)
        parts.append(textwrap.fill(f"More can be found in a run recorded with {more}.", _WIDTH))
    return spaced(parts)


def findings(run: Run, found: Sequence[Advice]) -> list[str]:
    """The text of each finding, numbered from 1."""
    evidence = Evidence(run)
    return [_paragraphs(number, one, evidence, len(str(len(found)))) for number, one in enumerate(found, 1)]


def not_shown(count: int) -> str:
    """How many findings are not shown, as a sentence without its period."""
    return f"{count} more finding{'s are' if count > 1 else ' is'} not shown"


def unrecorded(run: Run) -> list[str]:
    """What some rules need and the run does not have, as names of arguments of ``Profile``.

    "use_cuda" is left out if torch was built without CUDA. If the environment is unknown, a device may have existed.
    """
    recorded = {name for meta in run.metas for name, on in meta.flags if on}
    machine = [name for name, _ in run.meta.environment]
    if run.meta.device is not None or (machine and "CUDA" not in machine):
        recorded.add("use_cuda")
    return [name for name in _RECORDS if name not in recorded]


def _paragraphs(number: int, advice: Advice, evidence: Evidence, digits: int) -> str:
    lead = f"{number:>{digits}}. "
    sentences = (f"{advice.layer}: {advice.finding}", gain(advice, evidence), advice.remedy)
    return "\n".join(
        textwrap.fill(
            printable(sentence),
            _WIDTH,
            initial_indent=lead if sentence is sentences[0] else " " * len(lead),
            subsequent_indent=" " * len(lead),
            break_long_words=False,
            break_on_hyphens=False,
        )
        for sentence in sentences
    )


def gain(advice: Advice, evidence: Evidence) -> str:
    """The largest possible gain of a finding, as a sentence."""
    gains = []
    if advice.gain_ns is not None:
        share = f" ({advice.gain_ns / evidence.recorded_ns:.1%} of the recorded time)" if evidence.recorded_ns else ""
        gains.append(f"{format_time(advice.gain_ns)}{share}")
    if advice.gain_bytes is not None:
        above = "" if evidence.starts_known else " above the start"
        share = f" ({advice.gain_bytes / evidence.peak_bytes:.1%} of the peak{above})" if evidence.peak_bytes else ""
        gains.append(f"{format_memory(advice.gain_bytes)}{share}")
    return f"Could save at most {' and '.join(gains)}." if gains else "How much this could save is not known."
