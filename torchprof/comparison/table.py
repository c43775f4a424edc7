"""The table and the headline of a comparison. Other reports of a comparison share their texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from torchprof.analyze.columns import Column
from torchprof.analyze.report import ReportTable, Section, report, spaced, stacked
from torchprof.comparison.diff import BUSY, FASTER, SAME, SLOWER, UNDECIDED, WITHIN_NOISE, Change, Diff, Pair
from torchprof.comparison.layers import ADDED, MOVED, REMOVED, RENAMED
from torchprof.errors import TorchprofError, printable, suggest
from torchprof.run.formats import FORMATS, UNKNOWN, Cell, ReportCell, Unit
from torchprof.run.words import FORWARD

# The table

_NOISE_MARK = {WITHIN_NOISE: "~ ", UNDECIDED: "? ", BUSY: "? "}


@report("table", "the layers that changed most", answers="changed", suffix=".txt", of="diff")
def diff_table(diff: Diff, *, depth: int | None = None, sort_by: str | None = None, top: int = 20) -> Section:
    """The headline and changes of the whole run; a table of the models and of the layers that changed most; then layers
    that were added, removed, moved, renamed or changed, and the notes and warnings of the comparison.

    The table has one main quantity before and after, see ``main_of``, and the differences of others that changed; for
    the order of the layers see ``_ranking``. ``sort_by``: another main quantity: "flops", "self_cpu_total",
    "backward_cpu_total", "cpu_peak", … Raises TorchprofError for a quantity that is not compared.
    """
    table, notes = table_of(diff, depth, sort_by, top)
    changes = [f"{what}: {line}" if what else line for what, lines in changes_of_layers(diff) for line in lines]
    lead = [diff_headline(diff, sort_by=sort_by), *changes_of_run(diff)]
    below = [printable(note) for note in (*diff.notes, *diff.warnings)]
    return spaced([stacked(lead), table, *map(stacked, (notes, changes, below))])


def table_of(diff: Diff, depth: int | None, sort_by: str | None, top: int) -> tuple[ReportTable, list[str]]:
    """The table, and notes on it. The arguments are those of the report "table"."""
    main = main_of(diff, sort_by)
    models = [pair for pair in diff.pairs if len(pair.path) == 1 and pair.is_layer]
    layers = [
        pair
        for pair in diff.walk()
        if (depth is None or len(pair.path) <= depth + 1) and not (len(pair.path) == 1 and pair.is_layer)
    ]
    changed = sorted(filter(_has_changed, layers), key=_ranking(diff, depth, main, is_main_alone=sort_by is not None))
    shown = [*models, *changed[:top]]
    others = [
        quantity
        for quantity in _others(diff, main)
        if any(change.difference for pair in shown for change in _changes(pair, [quantity]))
    ]
    unknown = sum(
        not _has_changed(pair) and any(change.verdict == UNDECIDED for change in pair.changes.values())
        for pair in layers
    )
    headings = ["Layer", f"{main.heading} before", f"{main.heading} after", "Difference", "Ratio", "Verdict"]
    headings += [f"Δ {quantity.heading}" for quantity in others]
    rows = (
        [_name_cell(pair), *_main_cells(pair, main), *(_difference(pair, each) for each in others)] for pair in shown
    )
    hidden = _notes_on_hidden(len(layers) - len(changed) - unknown, unknown, len(changed) - top)
    return ReportTable.of_cells(headings, rows), [*hidden, *_notes_on_noise([main, *others], shown)]


def _ranking(
    diff: Diff, depth: int | None, main: Column, *, is_main_alone: bool
) -> Callable[[Pair], tuple[bool, float]]:
    """The key that sorts layers, the largest change of the main quantity first; of a time in all phases, unless
    ``is_main_alone``. It is the change of self, but of total for layers at ``depth``, which stand for those below."""
    totals = [main]
    if main.is_time and not is_main_alone:
        of_time = (quantity for quantity in diff.quantities if quantity.is_time and not quantity.is_self)
        totals = [quantity for quantity in of_time if quantity.measure == main.measure]
    own = totals if is_main_alone else [*map(diff.self_of, totals)]

    def key(pair: Pair) -> tuple[bool, float]:
        is_cut = depth is not None and len(pair.path) == depth + 1
        is_quiet = all(change.verdict in (SAME, WITHIN_NOISE) for change in _changes(pair, totals))
        return is_quiet, -sum(abs(diff.weight(change)) for change in _changes(pair, totals if is_cut else own))

    return key


def _others(diff: Diff, main: Column) -> Iterator[Column]:
    """The quantities whose differences are shown, if they changed."""
    have_peaks = {quantity.phase for quantity in diff.quantities if quantity.what == "peak"}
    for quantity in diff.quantities:
        is_count = quantity.unit is Unit.COUNT and (quantity.phase != FORWARD or quantity.key == "macs")
        is_net = quantity.unit is Unit.BYTES and quantity.what != "peak" and quantity.phase in have_peaks
        if quantity == diff.self_of(main) != main or not (quantity == main or quantity.is_self or is_count or is_net):
            yield quantity


def main_of(diff: Diff, sort_by: str | None = None) -> Column:
    """The main quantity: the requested one, else the first of device time, CPU time and FLOPs that both runs measured.

    Raises TorchprofError for a quantity that is not compared.
    """
    if sort_by is not None:
        for quantity in diff.quantities:
            if sort_by in (quantity.key, quantity.heading):
                return quantity
        keys = [quantity.key for quantity in diff.quantities]
        raise TorchprofError(f"Not measured in both runs: {sort_by!r}. {suggest(str(sort_by), keys)}")
    totals = [quantity for quantity in diff.quantities if quantity.phase == FORWARD and not quantity.is_self]
    times = [quantity for quantity in totals if quantity.is_time]
    counts = [quantity for quantity in totals if quantity.key == "flops"]
    return [*times[::-1], *counts, *totals][0]


def _changes(pair: Pair, quantities: Sequence[Column]) -> list[Change]:
    return [pair.changes[quantity.key] for quantity in quantities if quantity.key in pair.changes]


def _has_changed(pair: Pair) -> bool:
    return any(
        change.difference or (change.before is None) != (change.after is None) for change in pair.changes.values()
    )


def _notes_on_hidden(same: int, unknown: int, small: int) -> Iterator[str]:
    """How many rows are not shown: without a change, with unknown ones, with smaller ones than those shown."""
    if same:
        yield f"Not shown: {same} row{'s' if same > 1 else ''} without a change."
    if unknown:
        yield f"Not shown: {unknown} row{'s' if unknown > 1 else ''} with unknown changes."
    if small > 0:
        yield f"{small} more row{'s are' if small > 1 else ' is'} hidden: shown are the largest changes."


def _notes_on_noise(quantities: Sequence[Column], shown: Sequence[Pair]) -> Iterator[str]:
    """What the marks of times mean."""
    times = [quantity for quantity in quantities if quantity.is_time]
    in_both = [pair for pair in shown if pair.how not in (ADDED, REMOVED)]
    verdicts = {change.verdict for pair in in_both for change in _changes(pair, times) if change.difference is not None}
    if WITHIN_NOISE in verdicts:
        yield "~ and within noise: no more than the spread over calls or steps in each run."
    if BUSY in verdicts:
        yield "? and unclear: the difference may be the time for which the main thread waited for a processor."
    if UNDECIDED in verdicts:
        yield "? and noise unknown: too few calls or steps for a test. See docs/compare.md."


def _main_cells(pair: Pair, main: Column) -> list[Cell]:
    if (change := pair.changes.get(main.key)) is None:
        return [""] * 5
    return [
        "" if pair.how == ADDED else value_text(main, change, 0),
        "" if pair.how == REMOVED else value_text(main, change, 1),
        UNKNOWN if change.difference is None else signed(main, change.difference),
        "" if change.ratio is None else ReportCell(f"{change.ratio:.2f}×", change.ratio, "ratio"),
        "" if pair.how in (ADDED, REMOVED) else verdict_text(change),
    ]


def value_text(quantity: Column, change: Change, side: int) -> Cell:
    """The value of a quantity before (``side`` 0) or after (1)."""
    return change.figure(side).text(quantity.write)


def signed(quantity: Column, difference: float) -> ReportCell:
    """A difference with its sign."""
    text = quantity.write(difference)
    return text.written(f"+{text}") if difference > 0 else text


def verdict_text(change: Change) -> str:
    """The verdict; for times with the change of the median, which may differ from the change of the sum."""
    noise = change.noise
    if change.verdict in (SLOWER, FASTER, WITHIN_NOISE) and noise is not None and noise.medians[0] > 0:
        return f"{change.verdict}, median {percent(noise.medians[1] / noise.medians[0])}"
    return "noise unknown" if change.verdict == UNDECIDED and change.difference is not None else change.verdict


def percent(ratio: float) -> str:
    """A ratio as a change: "+25.0%"; from 10 on "×12"."""
    return f"{ratio - 1:+.1%}" if ratio < 10 else f"×{ratio:.0f}"


def _difference(pair: Pair, quantity: Column) -> Cell:
    """The cell of a difference, with its share."""
    if (change := pair.changes.get(quantity.key)) is None:
        return ""
    if change.difference is None:
        return UNKNOWN
    if change.difference == 0:
        return quantity.write(0).written("0")
    has_noise = quantity.is_time and pair.how not in (ADDED, REMOVED)
    mark = _NOISE_MARK.get(change.verdict, "") if has_noise else ""
    difference = signed(quantity, change.difference)
    return difference.written(f"{mark}{difference}{_share(change)}")


def _name_cell(pair: Pair) -> Cell:
    """The printable path of a layer, marked if it was moved, renamed, added or removed."""
    path = ".".join(pair.path)
    name = printable(path)
    if pair.how in (MOVED, RENAMED) and pair.before is not None:
        ids = {"change": pair.how, "was": pair.before.name}
        return ReportCell(f"{name} ({pair.how}, was {printable(pair.before.name)})", path, ids=ids)
    return ReportCell(f"{name} ({pair.how})", path, ids={"change": pair.how}) if pair.how in (ADDED, REMOVED) else name


# Changes of layers and of the run, as sentences

_TITLES = {ADDED: "Added", REMOVED: "Removed", MOVED: "Moved", RENAMED: "Renamed"}
_LISTED = 10  # the most layers that are listed for each kind of change
_NAME_OF_SETTING = re.compile(r"^(\w+=)")


def changes_of_layers(diff: Diff) -> Iterator[tuple[str, list[str]]]:
    """Layers that were added, removed, moved, renamed or changed, printable: ("Added", [a line for each layer]), …;
    after a kind with too many layers, ("", [a sentence: how many more]). Layers below an added or removed one are not
    listed."""
    listed: dict[str, list[str]] = {what: [] for what in (*_TITLES.values(), "Changed")}
    waiting = [(pair, "") for pair in reversed(diff.pairs)]
    while waiting:
        pair, around = waiting.pop()
        old, new = pair.before, pair.after
        if pair.how in (ADDED, REMOVED) and pair.how != around:
            layer = new or old
            below = sum(child.how == pair.how for child in pair.walk()) - 1
            about = [layer.kind] if layer and layer.kind else []
            about += [f"with {below} layer{'s' if below > 1 else ''} below"] if below else []
            listed[_TITLES[pair.how]].append(".".join(pair.path) + (f" ({', '.join(about)})" if about else ""))
        elif pair.how in (MOVED, RENAMED) and old and new:
            listed[_TITLES[pair.how]].append(f"{old.name} → {new.name}")
        differences = [
            f"{what} {_settings(was, now) if what == 'settings' else f'{was} → {now}'}"
            for what, was, now in pair.differs
            if what in ("kind", "settings")
        ]
        if differences:
            listed["Changed"].append(f"{'.'.join(pair.path)}: {'; '.join(differences)}")
        waiting.extend((child, pair.how) for child in reversed(pair.children))
    for name, lines in listed.items():
        hidden = len(lines) - _LISTED
        if lines:
            yield name, [*map(printable, lines[:_LISTED])]
        if hidden > 0:
            yield "", [f"{name}: {hidden} more layer{'s' if hidden > 1 else ''}, not shown."]


def _settings(before: str, after: str) -> str:
    """The values that differ between two settings, such as "3, 24, kernel_size=(3, 3)", if both have the same names in
    the same order; else both as a whole."""
    old, new = _one_by_one(before), _one_by_one(after)
    changed = [f"{name}{was} → {now}" for (name, was), (_, now) in zip(old, new) if was != now]
    have_same_names = [name for name, _ in old] == [name for name, _ in new]
    return ", ".join(changed) if have_same_names and changed else f"{before} → {after}"


def _one_by_one(settings: str) -> list[tuple[str, str]]:
    """Each setting as (its name with "=", or "", its value). Commas inside brackets do not separate settings.

    Example: "3, bias=(1, 2)" is [("", "3"), ("bias=", "(1, 2)")].
    """
    parts, depth = [""], 0
    for char in settings:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += char
    return [("".join(named), value) for *named, value in (_NAME_OF_SETTING.split(part.strip(), 1) for part in parts)]


def changes_of_run(diff: Diff) -> list[str]:
    """A sentence for each change of the whole run: the duration of a step, and memory peaks."""
    sentences = []
    for key, change in diff.whole.items():
        subject, show = "A step", FORMATS[Unit.TIME]
        if key != "step":
            kind = key.removesuffix("_peak")
            device = {"cpu": "the CPU", "device": "the device"}.get(kind, kind.upper())
            subject, show = f"Peak on {device}", FORMATS[Unit.BYTES]
        was, now = (UNKNOWN if value is None else show(value) for value in (change.before, change.after))
        if change.difference == 0:
            sentences.append(f"{subject}: the same, {now}.")
        else:
            verdict = "noise unknown" if change.verdict == UNDECIDED else change.verdict
            sentences.append(f"{subject}: {was} → {now}{_share(change)}{f', {verdict}' if key == 'step' else ''}.")
    return [printable(sentence) for sentence in sentences]


# The headline

_LARGEST = 3  # the most layers that the headline names beyond noise


@report("headline", "in one or two sentences, what changed", answers="changed", of="diff")
def diff_headline(diff: Diff, *, sort_by: str | None = None) -> str:
    """What changed, in one or two sentences: the models, and the layers with the largest change of self in the same
    direction. For runs without layers: the work outside of layers.

    ``sort_by`` as for the report "table". Raises TorchprofError for a quantity that is not compared.
    """
    main = main_of(diff, sort_by)
    is_named = main.what == "cost" and main.phase == FORWARD and len({one.phase for one in diff.quantities}) > 1
    name = f"{FORWARD} {main.heading}" if is_named else main.heading
    per = {"call": ", per forward call", "step": ", per step"}.get(diff.unit or "", "")
    sentences = []
    for pair in [pair for pair in diff.pairs if pair.is_layer] or diff.pairs:
        if main.key in pair.changes:
            sentences.append(f"{'.'.join(pair.path)}: {_in_words(pair, main, name)}{per}.")
            parts, hold_most, beyond_noise = diff.largest_parts(pair, main)
            beyond = diff.beyond_noise(pair, main) if pair.children else []
            if parts and pair.changes[main.key].verdict not in (SAME, WITHIN_NOISE):
                lead = "Most of it in" if hold_most else f"The largest part{'s' * (len(parts) > 1)}{beyond_noise}:"
                sentences.append(f"{lead} {_named(main, parts)}.")
                known = [layer for layer, _ in parts]
                beyond = [(layer, change) for layer, change in beyond if not any(layer is each for each in known)]
            if beyond:
                sentences.append(f"Beyond noise: {_named(main, beyond[:_LARGEST])}.")
    return printable(" ".join(sentences)) or "There is nothing to compare in these runs."


def _named(quantity: Column, layers: Sequence[tuple[Pair, Change]]) -> str:
    return ", ".join(f"{'.'.join(pair.path)} ({signed(quantity, change.difference or 0)})" for pair, change in layers)


def _in_words(pair: Pair, quantity: Column, name: str) -> str:
    change = pair.changes[quantity.key]
    if pair.how in (ADDED, REMOVED):
        return f"{pair.how}, {name} {value_text(quantity, change, int(pair.how == ADDED))}"
    was, now = (value_text(quantity, change, side) for side in (0, 1))
    if change.difference is None:
        known = f": {was} before, {now} after" if (was, now) != (UNKNOWN, UNKNOWN) else ""
        return f"the change of {name} is unknown{known}"
    if change.difference == 0:
        return f"{name} is the same, {now}"
    verdict = f", {verdict_text(change)}" if quantity.is_time else ""
    return f"{name} {was} → {now}{_share(change)}{verdict}"


def _share(change: Change) -> str:
    return f" ({percent(change.ratio)})" if change.ratio is not None else ""
