"""Findings as text: numbered, the largest gain first. Each begins with its gain."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence

from torchprof.analyze.advice import Advice, judge
from torchprof.analyze.advice.evidence import Evidence
from torchprof.analyze.report import Part, ReportTable, Section, TableRow, printable, report, spaced
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, format_memory, format_time
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED_NAME, OUTSIDE_NAME

_WIDTH = 100
_RECORDS = {
    "record_shapes": "record_shapes=True (shapes and types)",
    "profile_memory": "profile_memory=True (memory)",
    "use_cuda": "use_cuda=True where the model runs on a GPU",
}


@report("advice", "findings: avoidable time and memory, with a recommendation each", answers="why")
def advice(run: Run, *, top: int | None = 20) -> Section:
    """What could be made faster or smaller: for each finding the largest possible gain, the layer, the evidence, and
    what to change. Findings are sorted by gain, largest first; those of unknown gain are last.

    If there are no findings, the report says so. At its end it names rules that failed, and what could be recorded to
    find more. ``top``: the number of findings (None: all). docs/advice.md lists the rules.
    """
    all_findings, failed = judge(run)
    parts: list[Part] = []
    if all_findings[:top]:
        parts.append(findings_table("\n\n".join(findings(run, all_findings[:top])), all_findings[:top]))
    if not all_findings:
        parts.append("No findings: no rule found a change that is worth it in this run.")
    elif top is not None and top < len(all_findings):
        parts.append(f"{not_shown(len(all_findings) - top)}: top=None shows all.")
    if failed:
        rules = ", ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failed.items())
        parts.append(
            textwrap.fill(printable(f"These rules failed and found nothing: {rules}. Please report this."), _WIDTH)
        )
    missing = unrecorded(run)
    if missing:
        more = ", ".join(_RECORDS[name] for name in missing)
        parts.append(textwrap.fill(f"More can be found in a run recorded with {more}.", _WIDTH))
    return spaced(parts)


def findings(run: Run, shown: Sequence[Advice]) -> list[str]:
    """The text of each finding, numbered from 1."""
    evidence = Evidence(run)
    return [_paragraphs(number, finding, evidence, len(str(len(shown)))) for number, finding in enumerate(shown, 1)]


def findings_table(text: str, shown: Sequence[Advice]) -> ReportTable:
    """The text of some findings, with the findings as the rows of a table."""
    headings = ("Layer", "Gain time", "Gain memory", "Finding", "Remedy", "Rule")
    rows = [
        [
            ReportCell(printable(finding.layer), finding.layer, ids={"layers": [*finding.layers]}),
            UNKNOWN if finding.gain_ns is None else format_time(finding.gain_ns),
            UNKNOWN if finding.gain_bytes is None else format_memory(finding.gain_bytes),
            finding.finding,
            finding.remedy,
            finding.rule,
        ]
        for finding in shown
    ]
    return ReportTable(headings, [*map(TableRow, rows)], text=text, name="findings")


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
    sentences = (f"{gain(advice, evidence)}{place(advice)}: {advice.finding}", advice.remedy)
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
    """The largest possible gain of a finding: "Saves up to 1.594s of 2.560s (62.3%)"."""
    gains = []
    if advice.gain_ns or (advice.gain_ns is not None and advice.gain_bytes is None):
        gains.append(_part(format_time, advice.gain_ns, evidence.recorded_ns, ""))
    if advice.gain_bytes is not None:
        above = "" if evidence.starts_known else " above the start"
        gains.append(_part(format_memory, advice.gain_bytes, evidence.peak_bytes, f" at the peak{above}"))
    return f"Saves up to {' and '.join(gains)}" if gains else "Gain unknown"


def place(advice: Advice) -> str:
    """Where a finding is: " in Net.layers.*.mlp (12 layers)"; "" for work of no layer."""
    if advice.layer in ("", OUTSIDE_NAME, NOT_SELECTED_NAME):
        return ""
    return f" in {advice.layer}" + (f" ({len(advice.layers)} layers)" if len(advice.layers) > 1 else "")


def _part(write: Callable[[float], Cell], value: int, whole: int, when: str) -> str:
    return f"{write(value)} of {write(whole)}{when} ({value / whole:.1%})" if whole else str(write(value))
