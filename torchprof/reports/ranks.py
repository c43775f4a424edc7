"""The report of ranks: which of a job's ranks is slow, where and how often, who waits for it, and who is missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import NamedTuple

from torchprof.analyze.ranks.balance import Balance, balance_of
from torchprof.analyze.ranks.significance import SLOWER_BY
from torchprof.analyze.ranks.slow import Difference, Late, Slow
from torchprof.analyze.ranks.values import IN_NO_OP, OneCollective, OneLayer, OneRank, OverRanks, Times
from torchprof.reports import report
from torchprof.reports.columns import Column, column_called
from torchprof.reports.hangs import about_hang, name_of_layer
from torchprof.reports.notes import warnings_of
from torchprof.reports.text import check_number, draw, printable
from torchprof.run.cost import AT_LEAST, UNKNOWN, format_count, format_memory, format_time
from torchprof.run.lockstep import GroupOfRanks, Lockstep, ranks_in_words
from torchprof.run.run import Run
from torchprof.run.words import OUTSIDE

_MANY_RANKS = 16  # of more, only the slowest and the fastest are shown
_SLOWEST, _FASTEST = 8, 2
_LINES = 15
_ALIKE = 0.01  # FLOPs that differ by less are the same work
_OF_FLOPS = "FLOPs max/mean"


class _LayerColumn(NamedTuple):
    """A column of the table of layers: its cells, and what they are sorted by (no ``value``: they are not)."""

    column: Column
    text: Callable[[OneLayer], str]
    value: Callable[[OneLayer], float | None] | None = None


@report("ranks")
def ranks(
    run: Run,
    *,
    sort_by: str | None = None,
    top: int | None = None,
    depth: int | None = None,
    tablefmt: str | None = None,
) -> str:
    """How the ranks of a job share its work: in sentences who is slow, where, and who is missing; then three tables.

    Times are of one step, the mean over the steps; without steps, of one cycle. *Own work* is all that a rank did, on
    its device where one was measured, but communication. The first table has a row for each rank, the one with the most
    own work first; of more than 16 the 8 slowest and the 2 fastest. The second has one for each layer and phase, with
    all below the layer, those first whose slowest rank exceeds the mean by the most; the third one for each collective
    of a layer, those first in which ranks wait for the longest. docs/ranks.md says what each column means.

    ``sort_by`` orders layers by another column: its heading, or that in lower case with underscores
    (``flops_max/mean``). ``top``: so many rows of each table, ``depth`` hides layers below that depth (0: the model
    alone). ``tablefmt`` is any of tabulate's formats.

    Raises TorchprofError for an unknown column or format, and for a negative number.
    """
    check_number("top", top, "rows")
    check_number("depth", depth, "levels")
    if len(run.metas) == 1:
        return _of_one_rank(run)
    balance = balance_of(run)
    limit = _LINES if top is None else top
    sections = [
        " ".join(sentences(run, balance)),
        _table_of_ranks(run, balance, top, tablefmt),
        _table_of_layers(run, balance, sort_by, depth, limit, tablefmt),
    ]
    if balance.collectives:
        sections.append(_table_of_collectives(run, balance, limit, tablefmt))
    doubts = warnings_of(run)[1 if run.missing_ranks else 0 :]  # who is missing stands above
    return "\n\n".join([*sections, *(["\n".join(map(printable, doubts))] if doubts else [])])


def _of_one_rank(run: Run) -> str:
    meta = run.meta
    of = f", of the {meta.world_size} of the job" if meta.world_size > 1 else ""
    missing = f" {ranks_in_words(run.missing_ranks).capitalize()} gave no run, or was not merged." if of else ""
    return (
        f"This run is of rank {meta.rank} alone{of}: there is nothing to compare it with.{missing} torchprof.merge, or "
        "`python -m torchprof merge` with the files of all ranks, makes one run of them; prof.gather() does so inside "
        "of the job."
    )


# Sentences


def sentences(run: Run, balance: Balance) -> Iterator[str]:
    """How many ranks there are and which are missing, which one is slow, where, and who waits for it."""
    mesh = " × ".join(f"{printable(dim.name)} {dim.size}" for dim in run.meta.mesh)
    yield f"{len(run.metas)} ranks{f'; mesh: {mesh}' if mesh else ''}."
    if run.missing_ranks:
        yield warnings_of(run)[0]
    unit = unit_of(run)
    yield from about_hang(run)
    medians = [one.typical_ns for one in balance.ranks if one.typical_ns is not None]
    is_median = len(medians) == len(balance.ranks)
    work = medians if is_median else [one.work_ns for one in balance.ranks if one.work_ns is not None]
    late_first = balance.late is not None and balance.late.exceeds_slow
    if balance.late is not None and late_first:
        yield from _about_late(run, balance.late, False, unit)
    if balance.slow is not None:
        yield from _about_slow(run, balance.slow, late_first, unit)
    if balance.late is not None and not late_first:
        yield from _about_late(run, balance.late, balance.slow is not None, unit)
    if len(work) < len(balance.ranks):
        whose = "any rank" if not work else "some ranks"
        yield f"Which rank is slow nobody can tell: the own work of {whose} is not known."
    elif balance.slow is None and balance.late is None:
        least, most = format_time(min(work)), format_time(max(work))
        over_steps = " (medians over the steps)" if is_median and any(meta.steps > 1 for meta in run.metas) else ""
        yield f"No rank stands out: own work takes {least} to {most}{unit}{over_steps}."
    if balance.inferred:
        yield (
            f"The traces do not say between which ranks {balance.inferred} calls of collectives were: all "
            f"{len(run.metas)} ranks of the job are here and made the same calls, so the group is inferred to be all."
        )
    if any(layer.ranks for layer in run.layers):
        yield "Some layers are on some ranks only: work differs by plan there."


def unit_of(run: Run) -> str:
    """What times are of, as the end of a phrase."""
    if any(meta.steps for meta in run.metas):
        return " a step"
    return " a cycle" if any(meta.cycles > 1 for meta in run.metas) else ""


def _about_slow(run: Run, slow: Slow, are_more: bool, unit: str) -> Iterator[str]:
    """Of ranks whose own work takes longer; ``are_more``: others, that ranks wait for longer, were named before."""
    is_one = len(slow.ranks) == 1
    words = ranks_in_words(slow.ranks)
    takes = " to ".join(dict.fromkeys(format_time(ns) for ns in (min(slow.work_ns), max(slow.work_ns))))
    the_others = f"that of the others {format_time(slow.others_ns)} (median)"
    if are_more:
        yield f"The own work of {words} takes longer, too: {takes}{unit}, {the_others}."
    else:
        are = "is the slow one: its" if is_one else "are the slow ones: their"
        yield f"{words.capitalize()} {are} own work takes {takes}{unit}, {the_others}."
    who = "It" if is_one else "One of them"
    often = []
    if slow.slowest is not None and slow.slowest.of > 1:
        often.append(f"the slowest in {_often(slow.slowest)} {unit.removeprefix(' a ')}s")
    is_last = slow.last is not None and 2 * slow.last.times > slow.last.of
    if slow.last is not None and (is_last or are_more):
        often.append(f"the last to come in {_often(slow.last)} collectives")
    if often:
        yield f"{who} was {(' and ' if is_last else ', but ').join(often)}."
    if slow.may_be_chance:
        yield _MAY_BE_CHANCE
    if slow.others_wait_ns and not are_more:
        least = "at least " if slow.wait_longer else ""
        yield f"The others wait in collectives for {least}{format_time(slow.others_wait_ns)}{unit} (median)."
    if slow.difference is not None:
        yield _in_what(run, slow.difference, slow.ranks, unit)
    if slow.flops is not None:
        who = "It" if is_one else f"Rank {slow.ranks[0]}"
        if slow.flops >= 1 + SLOWER_BY:
            yield f"{who} has more work: {slow.flops:.2f} times the FLOPs of the others (median)."
        elif abs(slow.flops - 1) < _ALIKE:
            yield f"{who} has as many FLOPs as the others (median): the same work takes longer there."


def _about_late(run: Run, late: Late, are_more: bool, unit: str) -> Iterator[str]:
    """Of ranks that the others wait for, though their own work, as far as it is compared, is not more; ``are_more``:
    others were named before."""
    is_one = len(late.ranks) == 1
    are = "is the slow one" if is_one else "are the slow ones"
    if are_more:
        are = "is late, too" if is_one else "are late, too"
    waited = " to ".join(dict.fromkeys(format_time(ns) for ns in (min(late.late_ns), max(late.late_ns))))
    yield (
        f"{ranks_in_words(late.ranks).capitalize()} {are}: in collectives the others wait "
        f"{waited}{unit} longer than {'it' if is_one else 'they'} (median), {late.share:.0%} of a step."
    )
    if late.may_be_chance:
        yield _MAY_BE_CHANCE
    if late.difference is not None:
        yield _in_what(run, late.difference, late.ranks, unit)


def _in_what(run: Run, difference: Difference, ranks: Sequence[int], unit: str) -> str:
    whose = "" if len(ranks) == 1 else f" of rank {ranks[0]}"
    where = f"{_name(run, difference.layer)}{f' in {difference.phase}' if difference.phase else ''}"
    if difference.layer == IN_NO_OP:
        where = "in no operator (Python, or waiting for data)"
    elif difference.part is not None:
        where = _PARTS[difference.part]
    elif difference.layer == OUTSIDE:
        where = "outside of all layers"
    return f"Most of the difference{whose} is {where}: {format_time(difference.excess_ns)}{unit}."


_PARTS = {
    "step_data_ns": "loading data",
    "step_optimizer_ns": "the optimizer",
    "step_copy_ns": "copies between host and device",
    "step_wait_ns": "synchronization: the CPU waits for the device",
    "step_gc_ns": "Python's garbage collection",
}
_MAY_BE_CHANCE = "That may be chance: the steps are too few to tell, do not belong together, or were not kept."


# The tables


def _table_of_ranks(run: Run, balance: Balance, top: int | None, tablefmt: str | None) -> str:
    dims = list(dict.fromkeys(dim.name for meta in run.metas for dim in meta.mesh))
    positions = {meta.rank: {dim.name: str(dim.position) for dim in meta.mesh} for meta in run.metas}
    kinds = list(dict.fromkeys(kind for one in balance.ranks for kind, _ in one.peaks))
    has_flops = any("flops" in meta.requested for meta in run.metas)
    has_waiting = bool(balance.collectives)
    has_steps = any(meta.steps > 1 for meta in run.metas)

    headings = ["Rank", *map(printable, dims), "Steps", f"Own work{unit_of(run)}"]
    headings += ["Median", "Slowest"] if has_steps else ["Slowest"]
    headings += [f"Waiting{unit_of(run)}", "Last to come"] if has_waiting else []
    headings += [f"{printable(kind).upper()} peak" for kind in kinds]
    headings += ["FLOPs"] if has_flops else []

    def cells(one: OneRank) -> list[str]:
        peaks = dict(one.peaks)
        known = positions[one.rank]
        row = [str(one.rank), *(known.get(dim, UNKNOWN) for dim in dims), str(one.steps), _time(one.work_ns)]
        row += [_time(one.typical_ns)] if has_steps else []
        row.append(_often(one.slowest))
        row += [_at_least(_time(one.waiting_ns), one.waits_longer), _often(one.last)] if has_waiting else []
        row += [format_memory(peaks[kind]) if kind in peaks else UNKNOWN for kind in kinds]
        row += [_counted(one.flops, one.has_more_flops)] if has_flops else []
        return row

    def over_all(name: str, of: Callable[[Sequence[int]], float]) -> list[str]:
        """A row of one figure of each column over all ranks; of what one rank does not know, nobody does."""

        def figure(values: Sequence[int | None]) -> float | None:
            known = [value for value in values if value is not None]
            return of(known) if known and len(known) == len(values) else None

        ranks = balance.ranks
        row = [f"({name})", *[""] * len(dims), "", _time(figure([one.work_ns for one in ranks]))]
        row += [_time(figure([one.typical_ns for one in ranks]))] if has_steps else []
        row.append("")
        waits = figure([one.waiting_ns for one in ranks])
        # The least is sure where one is sure that waits no longer; of any other figure each rank may make it more.
        doubtful = [one.waits_longer for one in ranks if name != "min" or one.waiting_ns == waits]
        waits_longer = all(doubtful) if name == "min" else any(doubtful)
        row += [_at_least(_time(waits), waits_longer), ""] if has_waiting else []
        for kind in kinds:
            peak = figure([dict(one.peaks).get(kind) for one in ranks])
            row.append(UNKNOWN if peak is None else format_memory(round(peak)))
        has_more = any(one.has_more_flops for one in ranks)
        row += [_counted(figure([one.flops for one in ranks]), has_more)] if has_flops else []
        return row

    listed = sorted(balance.ranks, key=lambda one: (one.work_ns is None, -(one.work_ns or 0), one.rank))
    hidden = 0
    slowest = _SLOWEST if top is None else top
    if len(listed) > (_MANY_RANKS if top is None else top + _FASTEST):
        hidden = len(listed) - slowest - _FASTEST
        listed = [*listed[:slowest], *listed[-_FASTEST:]]
    table = [
        *map(cells, listed),
        *(over_all(name, of) for name, of in (("min", min), ("median", median), ("max", max))),
    ]
    notes = []
    if hidden:
        notes.append(f"{hidden} ranks are hidden: shown are the {slowest} slowest and the {_FASTEST} fastest.")
    if has_flops:
        has_more = any(one.has_more_flops for one in balance.ranks) or bool(run.missing_ranks)
        notes.append(f"FLOPs of all ranks together: {_counted(balance.flops, has_more)}.")
    if balance.time is not None:
        device = (run.meta.device or "device").upper()
        where = "CPU" if balance.time == "cpu" else device
        of = "" if unit_of(run) else " in all that was recorded"
        notes.append(f"Own work is time of the {where}{of}, communication left out.")
    if any(lockstep.times for lockstep in run.lockstep.values()):
        notes.append(
            f"Of more than {Lockstep.SIZE} steps or calls, so many are compared one by one, drawn by chance, the same "
            "on all ranks: Slowest, How often, Last to come, Waiting and medians are of these."
        )
    if any(one.waiting_ns is not None and one.waits_longer for one in balance.ranks):
        why = "where ranks wait in several collectives at once, in some that cannot be told"
        notes.append(f"{AT_LEAST}: {why}, or with ranks that are not here.")
    return "\n".join([draw(headings, table, tablefmt), *notes])


def _columns(run: Run, balance: Balance) -> list[_LayerColumn]:
    """Those of the table of layers; only what was asked for has one."""

    def text_column(heading: str, text: Callable[[OneLayer], str]) -> _LayerColumn:
        return _LayerColumn(Column(heading), text)

    def column(
        heading: str, value: Callable[[OneLayer], float | None], text: Callable[[float], str], measured: bool = True
    ) -> _LayerColumn:
        def cell(one: OneLayer) -> str:
            known = value(one)
            return UNKNOWN if known is None else text(known)

        return _LayerColumn(Column(heading, measured), cell, value)

    def of_work(heading: str, value: Callable[[OverRanks], float | None], text: Callable[[float], str]) -> _LayerColumn:
        return column(
            heading, lambda one: None if one.work is None else value(one.work), text, balance.time is not None
        )

    def imbalance(heading: str, of: Callable[[OneLayer], OverRanks | None], fields: set[str]) -> list[_LayerColumn]:
        def value(one: OneLayer) -> float | None:
            found = of(one)
            return None if found is None else found.imbalance

        is_asked_for = any(fields & set(meta.requested) for meta in run.metas)
        is_measured = all(fields & set(meta.measured) for meta in run.metas)
        return [column(heading, value, _ratio, is_measured)] if is_asked_for else []

    def of_slowest(one: OneLayer, text: Callable[[OverRanks], str]) -> str:
        if one.work is None or one.work.imbalance is None:
            return UNKNOWN
        return text(one.work) if one.work.max > one.work.min else ""  # nobody is slower than another

    found = [
        text_column("Module", lambda one: _name(run, one.layer)),
        text_column("Phase", lambda one: "" if one.layer == IN_NO_OP else one.phase),
        of_work("Min", lambda work: work.min, format_time),
        of_work("Median", lambda work: work.median, format_time),
        of_work("Max", lambda work: work.max, format_time),
        of_work("Max/mean", lambda work: work.imbalance, _ratio),
        text_column("Slowest rank", lambda one: of_slowest(one, lambda work: str(work.highest))),
        text_column("How often", lambda one: of_slowest(one, lambda _: _often(one.slowest))),
        *imbalance(_OF_FLOPS, lambda one: one.flops, {"flops"}),
        *imbalance("Peak max/mean", lambda one: one.peak, {"cpu_allocated", "device_allocated"}),
    ]
    if balance.collectives:
        waiting = column("Waiting", lambda one: None if one.waiting is None else one.waiting.sum, format_time)
        found.append(
            waiting._replace(text=lambda one: _waiting(one.waiting, one.wait_longer) if one.collectives else "")
        )
        found.append(text_column("Waits most", lambda one: _waits_most(one.waiting) if one.collectives else ""))
    if any(layer.ranks for layer in run.layers):
        found.append(
            text_column("Ranks", lambda one: _some_ranks(run.layers[one.layer].ranks if one.layer >= 0 else ()))
        )
    return found


def _table_of_layers(
    run: Run, balance: Balance, sort_by: str | None, depth: int | None, limit: int, tablefmt: str | None
) -> str:
    columns = _columns(run, balance)
    sortable = {one.column: one.value for one in columns if one.value is not None}
    order = None if sort_by is None else column_called(sort_by, [*sortable])

    def size(one: OneLayer) -> float:
        above_mean = None if one.work is None else one.work.above_mean
        value = above_mean if order is None else sortable[order](one)
        return -1 if value is None else value

    def is_shown(one: OneLayer) -> bool:
        return depth is None or one.layer < 0 or len(run.layers[one.layer].path) <= depth + 1

    listed = sorted(filter(is_shown, balance.layers), key=size, reverse=True)
    table = [[column.text(one) for column in columns] for one in listed[:limit]]
    notes = [
        f"Min, Median and Max are of own work{unit_of(run)} over the ranks that have the layer, all below it included."
    ]
    if len(listed) > limit:
        which = "by how far Max is above the mean" if order is None else f"by {order.heading}"
        notes.append(f"{len(listed) - limit} rows are hidden: shown are the {limit} largest {which}.")
    if any(column.column.heading == _OF_FLOPS for column in columns) and any(one.more_flops for one in balance.layers):
        notes.append("FLOPs are compared as far as they were counted: some operators have no formula.")
    return "\n".join([draw([column.column.heading for column in columns], table, tablefmt), *notes])


def _table_of_collectives(run: Run, balance: Balance, limit: int, tablefmt: str | None) -> str:
    def size(one: OneCollective) -> int:
        return -1 if one.waiting is None else one.waiting.sum

    def cells(one: OneCollective) -> list[str]:
        last = [UNKNOWN] * 2
        if one.last is not None and len(one.ranks) > 1:
            last = [str(one.last.highest) if one.last.max else "", _often(Times(one.last.max, one.of))]
        return [
            _name(run, one.layer),
            one.phase,
            printable(one.name),
            *_group(one.group),
            str(one.calls),
            _waiting(one.waiting, one.wait_longer),
            _waits_most(one.waiting),
            *last,
        ]

    listed = sorted(balance.collectives, key=size, reverse=True)
    headings = [
        "Module",
        "Phase",
        "Collective",
        "Group",
        "Ranks",
        "Calls of all",
        f"Waiting{unit_of(run)}",
        "Waits most",
    ]
    headings += ["Last to come", "How often"]
    notes = ["A collective waits for the last rank to come; the rank may compute meanwhile, or wait in another, too."]
    if len(listed) > limit:
        notes.append(
            f"{len(listed) - limit} rows are hidden: shown are the {limit} in which ranks wait for the longest."
        )
    if any(one.waiting is None for one in listed):
        notes.append(
            f"{UNKNOWN} under Waiting: nobody can tell which call of one rank belongs to which of another, as they did "
            "it differently often, one alone recorded it, or it is not known between which ranks it was."
        )
    if any(one.wait_longer for one in listed):
        notes.append(
            f"{AT_LEAST}: several are under way at once, or not all ranks of the group are here and another one may be "
            "the last to come."
        )
    return "\n".join([draw(headings, [cells(one) for one in listed[:limit]], tablefmt), *notes])


# Cells


def _name(run: Run, layer: int) -> str:
    return "(in no operator)" if layer == IN_NO_OP else name_of_layer(run, layer)


def _group(group: GroupOfRanks | None) -> list[str]:
    """What a group is for, or its name, and which ranks it has, or how many."""
    if group is None:
        return [UNKNOWN] * 2
    size = UNKNOWN if group.size is None else str(group.size)
    return [printable(group.description or group.name) or UNKNOWN, printable(group.ranks) or size]


def _some_ranks(ranks: Sequence[int]) -> str:
    return ranks_in_words(ranks).partition(" ")[2] if ranks else "all"


def _waiting(waiting: OverRanks | None, is_bound: bool) -> str:
    return _at_least(_time(None if waiting is None else waiting.sum), is_bound)


def _waits_most(waiting: OverRanks | None) -> str:
    if waiting is None:
        return UNKNOWN
    return str(waiting.highest) if waiting.max else ""


def _often(times: Times | None) -> str:
    return UNKNOWN if times is None else f"{times.times} of {times.of}"


def _time(ns: float | None) -> str:
    return UNKNOWN if ns is None else format_time(ns)


def _ratio(value: float) -> str:
    return f"{value:.2f}"


def _counted(count: float | None, has_more: bool) -> str:
    if count is None or (has_more and not count):
        return UNKNOWN
    return _at_least(format_count(count), has_more)


def _at_least(text: str, is_bound: bool) -> str:
    return f"{AT_LEAST} {text}" if is_bound and text != UNKNOWN else text
