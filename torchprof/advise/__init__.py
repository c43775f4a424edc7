"""Findings on what could be made faster or smaller in a run: the rules that make them, their order, and their text.

Each rule is a function in the file of its theme, under ``@rule``.
"""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, wraps
from importlib import import_module
from itertools import takewhile
from typing import NamedTuple

from torchprof.advise.chains import always
from torchprof.advise.evidence import Evidence
from torchprof.analyze.report import Part, ReportTable, Section, TableRow, pattern_of, report, spaced
from torchprof.analyze.sentences import RECORDS, filled, not_shown, unrecorded
from torchprof.errors import printable
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, format_memory, format_time
from torchprof.run.groups import lists_by_key
from torchprof.run.measures import Trial
from torchprof.run.run import Run
from torchprof.run.words import NOT_SELECTED, NOT_SELECTED_NAME, OUTSIDE, OUTSIDE_NAME


class Advice(NamedTuple):
    """One finding: where it is, the evidence, the largest possible gain, and what to change.

    ``layer``: the dotted path of one layer; for several the pattern of their paths ("Net.layers.*.mlp"), else their
    class, else the path of the layer that all of them are in; "(outside)"; or the names of the models. ``cause``: what
    was observed, with its figures, in one sentence; ``details``: further sentences on it. ``action``: what to change,
    with the code in backticks, in one sentence; ``options``: further sentences. ``gain_ns``: the most time that this
    could save, of ``Evidence.recorded_ns``; ``gain_bytes``: the most memory, of ``Evidence.peak_bytes``; None: unknown.
    ``rule``: the name of the function that found it. ``layers``: the dotted paths of all layers concerned, those with
    the largest gain first; empty for work of no layer. ``trial``: what the remedy gained when it was carried out, or
    why it was not; None without ``prof.verify`` or ``torchprof run --try``.
    """

    layer: str
    cause: str
    action: str
    gain_ns: int | None = None
    gain_bytes: int | None = None
    rule: str = ""
    layers: tuple[str, ...] = ()
    details: str = ""
    options: str = ""
    trial: Trial | None = None

    @property
    def finding(self) -> str:
        """What was observed: all sentences."""
        return f"{self.cause} {self.details}".rstrip()

    @property
    def remedy(self) -> str:
        """What to change: all sentences."""
        return f"{self.action} {self.options}".rstrip()

    @property
    def gain(self) -> Gain:
        return Gain(self.gain_ns, self.gain_bytes)

    @property
    def measured(self) -> Trial | None:
        """The trial, if the remedy was carried out."""
        return None if self.trial is None or self.trial.why_not else self.trial


class Gain(NamedTuple):
    """The most time and the most memory that a change of one layer could save; None: unknown."""

    ns: int | None = None
    nbytes: int | None = None


# Layers with the same finding

PER_RULE = 3
"""The most findings of one rule on layers, unless their remedies differ: then one for each remedy. ``merged`` merges
layers until there are no more."""
_NO_LAYER = {OUTSIDE: "outside all layers", NOT_SELECTED: "in layers that were not selected"}


class MergedLayers(NamedTuple):
    """The layers that share a finding. ``name`` and ``layers`` are those of ``Advice``. ``numbers``: the numbers of the
    layers, those with the largest gain first; negative numbers (work of no layer) are last. ``gain``: the sum of their
    gains; unknown gains add nothing. ``largest``: the gain of the first layer."""

    name: str
    layers: tuple[str, ...]
    numbers: tuple[int, ...]
    gain: Gain
    largest: Gain

    @property
    def time(self) -> Cell:
        """The time that all of them could save, as text."""
        return format_time(self.gain.ns or 0)

    def advice(self, cause: str, action: str, *, details: str = "", options: str = "") -> Advice:
        """The finding for all of these layers. Of several it names the one with the largest gain."""
        largest = [str(format_time(self.largest.ns))] if self.largest.ns else []
        largest += [str(format_memory(self.largest.nbytes))] if self.largest.nbytes else []
        sentences = [details] if details else []
        if len(self.layers) > 1 and largest:
            sentences.append(f"The largest gain is in {self.layers[0]}: up to {' and '.join(largest)}.")
        subject = "This" if len(self.numbers) == 1 else "A part of this"
        sentences += [f"{subject} is {_NO_LAYER[number]}." for number in sorted(self.numbers) if number < 0]
        return Advice(
            self.name, cause, action, *self.gain, layers=self.layers, details=" ".join(sentences), options=options
        )


Gains = Mapping[int, Gain | int]
"""By the number of a layer (negative: no layer), what a change could save at most: in ns, or as ``Gain``."""


def merged(
    evidence: Evidence, gains: Gains, remedies: Mapping[int, Hashable] | None = None, *, least_ns: float = 0
) -> list[MergedLayers]:
    """The layers in which a rule found the same, put together: in the order of their first one in ``gains``; none if
    together they gain less than ``least_ns``.

    Work of no layer stays alone. ``remedies``: by the same number a key of the remedy; layers with different remedies
    stay apart. Layers are merged if their paths have one pattern: Net.0.mlp and Net.1.mlp become "Net.*.mlp". If more
    than ``PER_RULE`` groups are left, they are merged by class instead, and then all together.
    """
    if sum(gain.ns or 0 if isinstance(gain, Gain) else gain for gain in gains.values()) < least_ns:
        return []
    layers, remedy_of = evidence.run.layers, remedies or {}
    ways_to_merge: tuple[Callable[[int], Hashable], ...] = (
        lambda number: layers.alike[number],
        lambda number: layers[number].kind or number,
        lambda number: "all together",
    )
    groups: dict[Hashable, list[int]] = {}
    for key_of in ways_to_merge:
        groups = {}
        for number in gains:
            key = remedy_of.get(number), key_of(number) if number >= 0 else number
            groups.setdefault(key, []).append(number)
        if len(groups) <= PER_RULE:
            break
    return [merged_into_one(evidence, {number: gains[number] for number in numbers}) for numbers in groups.values()]


def merged_into_one(evidence: Evidence, gains: Gains) -> MergedLayers:
    """All of these layers, and the work of no layer, as one. There is one at least."""
    gain_of = {number: gain if isinstance(gain, Gain) else Gain(gain) for number, gain in gains.items()}
    numbers = sorted(gain_of, key=lambda number: (number >= 0, share_of(gain_of[number], evidence)), reverse=True)
    ns = [gain.ns for gain in gain_of.values() if gain.ns is not None]
    nbytes = [gain.nbytes for gain in gain_of.values() if gain.nbytes is not None]
    return MergedLayers(
        _name_of(evidence, [number for number in gain_of if number >= 0] or numbers[:1]),
        tuple(evidence.name_of(number) for number in numbers if number >= 0),
        tuple(numbers),
        Gain(sum(ns) if ns else None, sum(nbytes) if nbytes else None),
        gain_of[numbers[0]],
    )


def _name_of(evidence: Evidence, numbers: Sequence[int]) -> str:
    """The name of these layers: the pattern of their paths, else their class, else the path that all of them are in."""
    if len(numbers) == 1:
        return evidence.name_of(numbers[0])
    layers = [evidence.run.layers[number] for number in numbers]
    if len({evidence.run.layers.alike[number] for number in numbers}) == 1:
        return pattern_of([layer.path for layer in layers])
    [kind, *others] = {layer.kind for layer in layers}
    if kind and not others:
        return kind
    common = takewhile(lambda names: len(set(names)) == 1, zip(*(layer.path for layer in layers)))
    return ".".join(name for name, *_ in common) or ", ".join(dict.fromkeys(layer.path[0] for layer in layers))


# Rules

Rule = Callable[[Evidence], Iterator[Advice]]

FILES = (
    *("communication", "python", "batches", "layers", "fusion", "gradients", "loop", "memory", "operators"),
    *("compiled", "settings"),
)
"""The files with rules. Rules run in this order, in each file from top to bottom. Findings whose gain is unknown, or
equal, are reported in it."""
_rules: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    """Register a rule: a function that yields its findings in the evidence of a run. Those on layers are ``merged``.

    Its docstring says what it looks for, and why; docs/advice.md has the evidence, the threshold, the gain and what
    must have been recorded. Without that it yields nothing. It must not count the same nanosecond twice. ``judge``
    drops findings whose gain is less than ``WORTH``; findings without any gain are always reported, so the rule must
    decide whether they matter.
    """

    @wraps(function)
    def find(evidence: Evidence) -> Iterator[Advice]:
        for advice in function(evidence):
            yield advice._replace(rule=function.__name__)

    _rules[function.__name__] = find
    return find


@cache
def rules() -> dict[str, Rule]:
    """All rules, by name, in the order of ``FILES``."""
    for file in FILES:
        import_module(f"{__name__}.{file}")
    return dict(sorted(_rules.items(), key=lambda item: FILES.index(item[1].__module__.rpartition(".")[2])))


# The findings of all rules

WORTH = 0.01
"""The share of the recorded time, or of the peak of memory, that a finding must be able to save. Less is not worth a
change of code, and is within noise."""


class Judgement(NamedTuple):
    """The findings of all rules (``advice``), and the rules that raised an error, by name (``failed``)."""

    advice: list[Advice]
    failed: dict[str, Exception]


def advise(run: Run) -> list[Advice]:
    """The findings of all rules, the largest gain first, those with unknown gain last, in the order of the rules. A
    rule that fails finds nothing."""
    return judge(run).advice


def judge(run: Run) -> Judgement:
    """The findings of ``advise``, and the rules that failed. None of a run that lacks kernels: what its device waits
    for is unknown."""
    if any(meta.lacks_kernels for meta in run.metas):
        return Judgement([], {})
    evidence = Evidence(run)
    findings: list[Advice] = []
    failed: dict[str, Exception] = {}
    for name, find in rules().items():
        try:
            findings += [*find(evidence)]
        except Exception as error:  # a run file may hold anything: an error in one rule must not lose the report
            failed[name] = error

    def share(advice: Advice) -> float:
        return share_of(advice.gain, evidence)

    # Parallel threads or streams can sum to more than the recorded time.
    most_ns = evidence.recorded_ns
    findings = [each._replace(gain_ns=min(each.gain_ns, most_ns)) if each.gain_ns else each for each in findings]
    findings = _without_overlap(sorted(findings, key=share, reverse=True), evidence)
    findings = _within_place(findings, evidence)
    worth_it = [advice for advice in findings if share(advice) < 0 or share(advice) >= WORTH]
    trials = lists_by_key(((trial.rule, *sorted(trial.layers)), trial) for trial in run.trials)
    for place, each in enumerate(worth_it):
        by_how = sorted(trials.get((each.rule, *sorted(each.layers)), ()), key=lambda trial: not trial.how)
        of_finding = (trial for trial in by_how if _is_of(trial, each))
        if (trial := next(of_finding, None)) is not None:
            each = each._replace(details=f"{each.details} {trial.how_it_went}".lstrip(), trial=trial)
            if each.measured is not None:
                each = each._replace(gain_ns=round(trial.gain * most_ns) if trial.has_gained else 0)
            worth_it[place] = each
    in_vain = [each for each in worth_it if each.measured and not each.measured.has_gained and not each.gain_bytes]
    return Judgement(sorted(worth_it, key=lambda each: (each in in_vain, -share(each))), failed)


_OF_ANY_CAUSE = ("launches_slower_than_the_device", "python_in_the_loop")
"""The rules whose gain is all time of a kind, whatever the cause: findings that name a cause have theirs first."""


def _within_place(findings: Iterable[Advice], evidence: Evidence) -> list[Advice]:
    """The findings, the largest gain first, with gains of at most the recorded time together on each place. The gain of
    one for which nothing is left is unknown."""
    left: defaultdict[str, int] = defaultdict(lambda: evidence.recorded_ns)
    least = WORTH * evidence.recorded_ns
    limited = []
    for advice in sorted(findings, key=lambda advice: advice.rule in _OF_ANY_CAUSE):
        if advice.gain_ns is not None and advice.gain_ns >= least:
            gain_ns = min(advice.gain_ns, left[advice.layer])
            left[advice.layer] -= gain_ns
            advice = advice._replace(gain_ns=gain_ns if gain_ns >= least else None)
        limited.append(advice)
    return limited


def _without_overlap(findings: Sequence[Advice], evidence: Evidence) -> list[Advice]:
    """The findings, the largest gain first, with the gain of a later one limited to the time of its layers that earlier
    ones have not gained. An earlier gain is spread over its layers by their time. Findings outside all layers, and
    those of a device's time, stay.

    Example: Net itself takes 60 ns, and Net.mlp below it 40. The first finding gains 50 ns in Net: half of the time of
    both layers. The second one would gain 30 ns in Net.mlp, but only 20 of its 40 ns are left: it gains 20.
    """
    if evidence.device != "cpu" or not findings:
        return [*findings]
    layers = evidence.run.layers
    number_of = {layer.name: number for number, layer in enumerate(layers)}
    times = Counter({number: took.cpu_ns for number, took in evidence.took(always).items() if number >= 0})
    earlier: list[tuple[set[int], float]] = []  # the layers of earlier findings, and the share of their time they gain
    limited = []
    for advice in findings:
        named = {number_of[name] for name in advice.layers if name in number_of}
        concerned = layers.at_or_below(named) if named else set()
        all_ns = sum(times[number] for number in concerned)
        if advice.gain_ns and all_ns:
            gained_ns = sum(gained * sum(times[number] for number in others & concerned) for others, gained in earlier)
            if gained_ns:
                advice = advice._replace(gain_ns=max(min(advice.gain_ns, round(all_ns - gained_ns)), 0))
            earlier.append((concerned, min((advice.gain_ns or 0) / all_ns, 1.0)))
        limited.append(advice)
    return limited


def share_of(gain: Gain, evidence: Evidence) -> float:
    """A gain as a share of the recorded time or of the peak of memory, the larger one; -1 if both are unknown."""
    if gain.ns is None and gain.nbytes is None:
        return -1.0
    of_time = (gain.ns or 0) / evidence.recorded_ns if evidence.recorded_ns else 0.0
    of_memory = (gain.nbytes or 0) / evidence.peak_bytes if evidence.peak_bytes else 0.0
    return max(of_time, of_memory)


# Findings as text

_LINE_WIDTH = 100


@report("findings", "findings: avoidable time and memory, with a recommendation each", answers="why")
def advice(run: Run, *, top: int | None = 20) -> Section:
    """What could be made faster or smaller: for each finding the largest possible gain, the layer, the evidence, and
    what to change. Findings are sorted by gain, largest first; those of unknown gain are last.

    At its end it names rules that failed, and what could be recorded to find more. ``top``: the number of findings
    (None: all). docs/advice.md lists the rules.
    """
    all_findings, failed = judge(run)
    shown = all_findings[:top]
    parts: list[Part] = []
    if shown:
        parts.append(findings_table("\n\n".join(texts_of_findings(run, shown)), shown))
    if not all_findings:
        parts.append("No findings: no rule found a change that is worth it in this run.")
    elif top is not None and top < len(all_findings):
        parts.append(f"{not_shown(len(all_findings) - top)}: top=None shows all.")
    if failed:
        rules = ", ".join(f"{name} ({type(error).__name__}: {error})" for name, error in failed.items())
        parts.append(
            textwrap.fill(printable(f"These rules failed and found nothing: {rules}. Please report this."), _LINE_WIDTH)
        )
    if missing := unrecorded(run):
        more = ", ".join(RECORDS[name] for name in missing)
        parts.append(textwrap.fill(f"More can be found in a run recorded with {more}.", _LINE_WIDTH))
    return spaced(parts)


def texts_of_findings(run: Run, shown: Sequence[Advice]) -> list[str]:
    """The text of each finding, numbered from 1."""
    evidence = Evidence(run)
    digits = len(str(len(shown)))
    return [_paragraphs(f"{number:>{digits}}. ", finding, evidence) for number, finding in enumerate(shown, 1)]


def findings_table(text: str, shown: Sequence[Advice]) -> ReportTable:
    """The text of some findings, with the findings as the rows of a table."""
    headings = ("Layer", "Gain time", "Gain memory", "Finding", "Remedy", "Rule", *_OF_TRIALS)
    rows = [
        [
            ReportCell(printable(finding.layer), finding.layer, ids={"layers": [*finding.layers]}),
            UNKNOWN if finding.gain_ns is None else format_time(finding.gain_ns),
            UNKNOWN if finding.gain_bytes is None else format_memory(finding.gain_bytes),
            finding.finding,
            finding.remedy,
            finding.rule,
            *_cells_of(finding.trial),
        ]
        for finding in shown
    ]
    return ReportTable(headings, [*map(TableRow, rows)], text=text, name="findings")


_OF_TRIALS = ("Tried", "Measured gain", "At least", "At most", "Difference", "How")


def _is_of(trial: Trial, advice: Advice) -> bool:
    """Whether a trial is that of the remedy of a finding: one rule may find several loaders, with remedies of their
    own, and the trial has the number of workers in it."""
    return "DataLoader(" not in trial.how or trial.how.rpartition("=")[0] in advice.remedy


def _cells_of(trial: Trial | None) -> list[Cell]:
    """Whether it was tried, the gain with its interval and the difference of outputs, as shares; what was run."""
    if trial is None or trial.why_not:
        return ["" if trial is None else f"no: {trial.why_not}", *["" for _ in _OF_TRIALS[1:]]]
    shares = (trial.gain, trial.low, trial.high, trial.difference)
    cells = [UNKNOWN if share is None else ReportCell(f"{share:.2%}", share, "share") for share in shares]
    return ["yes", *cells, trial.how]


def _paragraphs(lead: str, advice: Advice, evidence: Evidence) -> str:
    """The gain, place and observation in a paragraph after ``lead``, and the remedy in one below."""
    finding = f"{gain_in_words(advice, evidence)}{place_in_words(advice)}: {advice.finding}"
    indent = " " * len(lead)
    return f"{filled(finding, _LINE_WIDTH, lead, indent)}\n{filled(advice.remedy, _LINE_WIDTH, indent, indent)}"


def gain_in_words(advice: Advice, evidence: Evidence) -> str:
    """The largest possible gain of a finding: "Saves up to 1.594s of 2.560s (62.3%)"."""
    if advice.measured is not None:
        nbytes = f", up to {format_memory(advice.gain_bytes)} of memory" if advice.gain_bytes else ""
        return f"{advice.measured.result}{nbytes}"
    gains = []
    if advice.gain_ns or (advice.gain_ns is not None and advice.gain_bytes is None):
        gains.append(_part_of(evidence.recorded_ns, advice.gain_ns, format_time))
    if advice.gain_bytes is not None:
        above = "" if all(memory.before is not None for memory in evidence.run.memory) else " above the start"
        gains.append(_part_of(evidence.peak_bytes, advice.gain_bytes, format_memory, f" at the peak{above}"))
    return f"Saves up to {' and '.join(gains)}" if gains else "Gain unknown"


def _part_of(whole: int, value: int, write: Callable[[float], Cell], when: str = "") -> str:
    return f"{write(value)} of {write(whole)}{when} ({value / whole:.1%})" if whole else str(write(value))


def place_in_words(advice: Advice) -> str:
    """Where a finding is: " in Net.layers.*.mlp (12 layers)"; "" for work of no layer."""
    if advice.layer in ("", OUTSIDE_NAME, NOT_SELECTED_NAME):
        return ""
    return f" in {advice.layer}" + (f" ({len(advice.layers)} layers)" if len(advice.layers) > 1 else "")
