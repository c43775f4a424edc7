"""The ranks report: sentences about stragglers, and tables by rank, by layer and by collective."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import NamedTuple

from torchprof.analyze import report as reporting
from torchprof.analyze.columns import Column, column_called
from torchprof.analyze.report import ReportTable, Section, TableRow, phase_cell, report, spaced, stacked
from torchprof.analyze.sentences import lacks_ranks, warnings_of
from torchprof.errors import printable
from torchprof.ranks import Balance, balance_of
from torchprof.ranks.compared import IN_NO_OP, OneCollective, OneLayer, OneRank, OverRanks, Times
from torchprof.ranks.pipeline import stages_of
from torchprof.ranks.sentences import name_of, often, sentences, unit_of
from torchprof.run import formats
from torchprof.run.formats import AT_LEAST, UNKNOWN, Cell, Figure, ReportCell, format_number, format_time
from torchprof.run.lockstep import GroupOfRanks, Lockstep
from torchprof.run.run import Run
from torchprof.run.words import phase_of

_LINES = 15  # of each table


@report("ranks", "stragglers: which rank is slow, where, and how long others wait", answers="waits")
def ranks(run: Run, *, sort_by: str | None = None, top: int | None = None, depth: int | None = None) -> Section:
    """How work is balanced over the ranks of a job: sentences about stragglers and missing ranks, then three tables: by
    rank, by layer and phase (with all layers below), and by collective of a layer.

    docs/ranks.md describes the columns. Times are per step, the mean over the steps; without steps, per cycle.

    ``sort_by`` orders layers by another column, as ``flops_max/mean``, instead of by how much the slowest rank exceeds
    the mean. ``top``: the number of rows of each table. Raises TorchprofError for an unknown column.
    """
    if len(run.metas) == 1:
        return stacked([_of_one_rank(run)])
    balance = balance_of(run)
    limit = _LINES if top is None else top
    sections = [Section([*sentences(run, balance)], " "), table_of_ranks(run, balance, top)]
    if balance.layers or run.layers:  # not in a comparison, which has no layers
        sections.append(table_of_layers(run, balance, sort_by, depth, limit))
    if balance.collectives:
        sections.append(table_of_collectives(run, balance, limit))
    warnings = warnings_of(run)[1 if lacks_ranks(run) else 0 :]  # the sentences name missing ranks already
    return spaced([*sections, Section([*map(printable, warnings)], has_warnings=True)])


def _of_one_rank(run: Run) -> str:
    """The sentence in place of the report of a run of one rank."""
    meta = run.meta
    of = f", of the {meta.world_size} of the job" if meta.world_size > 1 else ""
    missing = f" {formats.ranks_in_words(run.missing_ranks).capitalize()} gave no run, or was not merged." if of else ""
    return (
        f"This run has only rank {meta.rank}{of}: there is no other rank to compare.{missing} torchprof.merge, or "
        "`torchprof show` with the files of all ranks, makes one run of them; prof.gather() does so inside of the job."
    )


# The table of ranks

_MANY_RANKS = 16  # with more ranks, only the slowest and the fastest are shown
_SLOWEST, _FASTEST = 8, 2
_STATISTICS: dict[str, Callable[[Sequence[int]], float]] = {"min": min, "median": median, "max": max}


def _over_all(statistic: str, values: Sequence[int | None]) -> float | None:
    """A statistic of the values of all ranks; None if any of them is unknown."""
    known = [value for value in values if value is not None]
    return _STATISTICS[statistic](known) if known and len(known) == len(values) else None


class _RankColumn(NamedTuple):
    """A column of the table of ranks: its cell in the row of a rank, and in that of a statistic, by default empty."""

    heading: str
    text: Callable[[OneRank], Cell]
    over_all: Callable[[str], Cell] = lambda statistic: ""


def table_of_ranks(run: Run, balance: Balance, top: int | None) -> Section:
    """A row for each rank, the one with the most own work first, then the minimum, median and maximum over all."""
    columns = [*_rank_columns(run, balance)]
    listed = sorted(balance.ranks, key=lambda rank: (rank.work_ns is None, -(rank.work_ns or 0), rank.rank))
    sentences = []
    slowest = _SLOWEST if top is None else top
    if len(listed) > (_MANY_RANKS if top is None else top + _FASTEST):
        shown = f"shown are the {slowest} slowest and the {_FASTEST} fastest"
        sentences.append(f"{len(listed) - slowest - _FASTEST} ranks are hidden: {shown}.")
        listed = [*listed[:slowest], *listed[-_FASTEST:]]
    rows = [TableRow([column.text(rank) for column in columns]) for rank in listed]
    rows += [TableRow([column.over_all(statistic) for column in columns], is_part=False) for statistic in _STATISTICS]
    table = ReportTable([column.heading for column in columns], rows, "ranks")
    return stacked([table, *sentences, *_sentences_of_ranks(run, balance)])


def _rank_columns(run: Run, balance: Balance) -> Iterator[_RankColumn]:
    ranks = balance.ranks
    positions = {meta.rank: {dim.name: str(dim.position) for dim in meta.mesh} for meta in run.metas}
    has_steps = any(meta.steps > 1 for meta in run.metas)
    stages = {pipeline.rank: stages_of(pipeline) for pipeline in run.pipelines}

    def figures(
        heading: str,
        value: Callable[[OneRank], int | None],
        text: Callable[[float | None], Cell],
        is_bound: Callable[[OneRank], bool] = lambda rank: False,
    ) -> _RankColumn:
        def over_all(statistic: str) -> Cell:
            figure = _over_all(statistic, [*map(value, ranks)])
            if statistic == "min":  # exact if a rank with that value is exact; other statistics, if all ranks are
                return _bounded(text(figure), all(is_bound(rank) for rank in ranks if value(rank) == figure))
            return _bounded(text(figure), any(map(is_bound, ranks)))

        return _RankColumn(heading, lambda rank: _bounded(text(value(rank)), is_bound(rank)), over_all)

    def peaks(kind: str) -> _RankColumn:
        return figures(
            f"{printable(kind).upper()} peak",
            lambda rank: dict(rank.peaks).get(kind),
            lambda nbytes: UNKNOWN if nbytes is None else formats.format_memory(round(nbytes)),
        )

    def positions_in(dim: str) -> _RankColumn:
        return _RankColumn(printable(dim), lambda rank: positions[rank.rank].get(dim, UNKNOWN))

    yield _RankColumn(
        "Rank",
        lambda rank: format_number(rank.rank),
        lambda statistic: ReportCell(f"({statistic})", ids={"statistic": statistic}),
    )
    yield from map(positions_in, dict.fromkeys(dim.name for meta in run.metas for dim in meta.mesh))
    if stages:
        yield _RankColumn("Stage", lambda rank: ", ".join(map(str, stages.get(rank.rank, ()))) or UNKNOWN)
    yield _RankColumn("Steps", lambda rank: format_number(rank.steps))
    yield figures(f"Own work{unit_of(run)}", lambda rank: rank.work_ns, reporting.time_cell)
    if has_steps:
        yield figures("Median", lambda rank: rank.typical_ns, reporting.time_cell)
    yield _RankColumn("Slowest", lambda rank: often(rank.slowest_in))
    if balance.collectives:
        is_waiting_bound = attrgetter("waiting_is_lower_bound")
        yield figures(f"Waiting{unit_of(run)}", lambda rank: rank.waiting_ns, reporting.time_cell, is_waiting_bound)
        yield _RankColumn("Last to arrive", lambda rank: often(rank.last_in))
    yield from map(peaks, dict.fromkeys(kind for rank in ranks for kind, _ in rank.peaks))
    if any("flops" in meta.requested for meta in run.metas):
        flops, is_bound = [rank.flops for rank in ranks], any(rank.flops_is_lower_bound for rank in ranks)
        yield _RankColumn(
            "FLOPs",
            lambda rank: _count_cell(rank.flops, rank.flops_is_lower_bound),
            lambda statistic: _count_cell(_over_all(statistic, flops), is_bound),
        )


def _sentences_of_ranks(run: Run, balance: Balance) -> Iterator[str]:
    """Notes on the table of ranks: what its figures are, and which are lower bounds."""
    if any("flops" in meta.requested for meta in run.metas):
        is_bound = any(rank.flops_is_lower_bound for rank in balance.ranks) or bool(run.missing_ranks)
        yield f"FLOPs of all ranks together: {_count_cell(balance.flops, is_bound)}."
    if balance.measured_on is not None:
        where = "CPU" if balance.measured_on == "cpu" else run.meta.device_heading
        of = "" if unit_of(run) else " in all that was recorded"
        yield f"Own work is time of the {where}{of}, without communication."
    if any(lockstep.times for lockstep in run.lockstep.values()):
        yield (
            f"Slowest, How often, Last to arrive, Waiting and medians are of {Lockstep.SIZE} steps or calls: a random "
            "sample, the same on all ranks."
        )
    if any(rank.waiting_ns is not None and rank.waiting_is_lower_bound for rank in balance.ranks):
        yield (
            f"{AT_LEAST}: a rank waited in several collectives at once, in unmatched calls, or for ranks that are not "
            "in this run."
        )


# The table of layers

_FLOPS_HEADING = "FLOPs max/mean"


class _LayerColumn(NamedTuple):
    """A column of the table of layers: its cells, and the sort key ``value`` (None: no order by this column)."""

    column: Column
    text: Callable[[OneLayer], Cell]
    value: Callable[[OneLayer], float | None] | None = None

    @classmethod
    def of_figure(
        cls, heading: str, of: str, statistic: str, text: Callable[[float], Cell], is_measured: bool
    ) -> _LayerColumn:
        """The column of a ``statistic`` over the ranks: a property of ``OverRanks``, ``of`` a field of ``OneLayer``."""

        def value(row: OneLayer) -> float | None:
            return getattr(getattr(row, of), statistic, None)  # None without that figure

        def cell(row: OneLayer) -> Cell:
            figure = value(row)
            return UNKNOWN if figure is None else text(figure)

        return cls(Column(heading, measured=is_measured), cell, value)


def table_of_layers(run: Run, balance: Balance, sort_by: str | None, depth: int | None, limit: int) -> Section:
    """A row for each layer and phase with the own work of ranks in it; the largest excess over the mean first."""
    columns = _layer_columns(run, balance)
    sortable = {column.column: column.value for column in columns if column.value is not None}
    order = None if sort_by is None else column_called(sort_by, [*sortable])

    def size(row: OneLayer) -> float:
        above_mean = None if row.work is None else row.work.above_mean
        value = above_mean if order is None else sortable[order](row)
        return -1 if value is None else value

    def is_shown(row: OneLayer) -> bool:
        return depth is None or row.layer < 0 or len(run.layers[row.layer].path) <= depth + 1

    listed = sorted(filter(is_shown, balance.layers), key=size, reverse=True)
    table = [[column.text(row) for column in columns] for row in listed[:limit]]
    sentences = [
        f"Min, Median and Max are of own work{unit_of(run)} over the ranks that have the layer, all below it included."
    ]
    if len(listed) > limit:
        which = "by how far Max is above the mean" if order is None else f"by {order.heading}"
        sentences.append(f"{reporting.rows_hidden(len(listed) - limit, limit, 'largest')} {which}.")
    headings = [column.column.heading for column in columns]
    if _FLOPS_HEADING in headings and any(row.flops_is_lower_bound for row in balance.layers):
        sentences.append("FLOPs are lower bounds: some operators have no formula.")
    return stacked([ReportTable.of_cells(headings, table).of("layers"), *sentences])


def _layer_columns(run: Run, balance: Balance) -> list[_LayerColumn]:
    """The columns of the table of layers. A measure that was not requested has no column."""
    figure = _LayerColumn.of_figure

    def text_column(heading: str, text: Callable[[OneLayer], Cell]) -> _LayerColumn:
        return _LayerColumn(Column(heading), text)

    def of_slowest(row: OneLayer, text: Callable[[OverRanks], Cell]) -> Cell:
        if row.work is None or row.work.imbalance is None:
            return UNKNOWN
        return text(row.work) if row.work.max > row.work.min else ""  # blank if all ranks are equal

    has_work = balance.measured_on is not None
    columns = [
        text_column("Module", lambda row: name_of(run, row.layer)),
        text_column("Phase", lambda row: "" if row.layer == IN_NO_OP else phase_cell(phase_of(row.layer, row.phase))),
        figure("Min", "work", "min", format_time, has_work),
        figure("Median", "work", "median", format_time, has_work),
        figure("Max", "work", "max", format_time, has_work),
        figure("Max/mean", "work", "imbalance", _ratio_cell, has_work),
        text_column("Slowest rank", lambda row: of_slowest(row, lambda work: format_number(work.highest))),
        text_column("How often", lambda row: of_slowest(row, lambda _: often(row.slowest_in))),
    ]
    for heading, of, fields in (
        (_FLOPS_HEADING, "flops", {"flops"}),
        ("Peak max/mean", "peak", {"cpu_allocated", "device_allocated"}),
    ):
        if any(fields & set(meta.requested) for meta in run.metas):
            is_measured = all(fields & set(meta.measured) for meta in run.metas)
            columns.append(figure(heading, of, "imbalance", _ratio_cell, is_measured))
    if balance.collectives:
        waiting = figure("Waiting", "waiting", "sum", format_time, True)
        columns.append(waiting._replace(text=lambda row: _waiting_cell(row) if row.has_collectives else ""))
        columns.append(text_column("Waits most", lambda row: _highest_cell(row.waiting) if row.has_collectives else ""))
    if any(layer.ranks for layer in run.layers):
        ranks_of = [layer.ranks and formats.numbers_in_words(layer.ranks) for layer in run.layers]
        columns.append(text_column("Ranks", lambda row: (row.layer >= 0 and ranks_of[row.layer]) or "all"))
    return columns


# The table of collectives


def table_of_collectives(run: Run, balance: Balance, limit: int) -> Section:
    """A row for each collective of a layer; those with the longest waiting first."""

    def size(collective: OneCollective) -> int:
        return -1 if collective.waiting is None else collective.waiting.sum

    def cells(collective: OneCollective) -> list[Cell]:
        last: list[Cell] = [UNKNOWN] * 2
        came_last = collective.came_last
        if came_last is not None and len(collective.ranks) > 1:
            last = [_highest_cell(came_last), often(Times(came_last.max, collective.paired_calls))]
        return [
            name_of(run, collective.layer),
            phase_cell(phase_of(collective.layer, collective.phase)),
            printable(collective.name),
            *_group_cells(collective.group),
            format_number(collective.calls),
            _waiting_cell(collective),
            _highest_cell(collective.waiting),
            *last,
        ]

    listed = sorted(balance.collectives, key=size, reverse=True)
    headings = ["Module", "Phase", "Collective", "Group", "Ranks", "Calls of all"]
    headings += [f"Waiting{unit_of(run)}", "Waits most", "Last to arrive", "How often"]
    table = [cells(collective) for collective in listed[:limit]]
    return stacked([ReportTable.of_cells(headings, table).of("collectives"), *_sentences_of_collectives(listed, limit)])


def _sentences_of_collectives(listed: Sequence[OneCollective], limit: int) -> Iterator[str]:
    """Notes on the table of collectives: what waiting is, what is hidden, and what is unknown or a lower bound."""
    yield "A collective waits for the last rank to arrive. A rank may compute, or wait in another one, meanwhile."
    if len(listed) > limit:
        yield f"{reporting.rows_hidden(len(listed) - limit, limit, 'largest by waiting')}."
    if any(collective.waiting is None for collective in listed):
        yield (
            f"{UNKNOWN} under Waiting: calls of different ranks could not be matched: their numbers differ, only one "
            "rank recorded them, or their group is unknown."
        )
    if any(collective.group is None for collective in listed):
        yield f"{UNKNOWN} under Group: the ranks are in several groups, and which it was is not recorded, as with gloo."
    if any(collective.waiting_is_lower_bound for collective in listed):
        missing = "a rank of the group is not in this run and may be the last to arrive"
        yield f"{AT_LEAST}: several ran at once, or {missing}."


# Cells


def _count_cell(count: float | None, is_bound: bool) -> Cell:
    return UNKNOWN if count is None else Figure.of_sum(count, not is_bound).text(formats.format_count)


def _bounded(text: Cell, is_bound: bool) -> Cell:
    """A figure, shown as a lower bound if it is one."""
    return formats.as_lower_bound(text) if is_bound and isinstance(text, ReportCell) else text


def _ratio_cell(value: float) -> ReportCell:
    return ReportCell(f"{value:.2f}", value, "ratio")


def _group_cells(group: GroupOfRanks | None) -> list[Cell]:
    """Two cells of a group: its description or name; its ranks or their number."""
    if group is None:
        return [UNKNOWN] * 2
    size = UNKNOWN if group.size is None else format_number(group.size)
    return [printable(group.description or group.name) or UNKNOWN, printable(group.ranks) or size]


def _waiting_cell(row: OneLayer | OneCollective) -> Cell:
    return _bounded(reporting.time_cell(None if row.waiting is None else row.waiting.sum), row.waiting_is_lower_bound)


def _highest_cell(over: OverRanks | None) -> Cell:
    """The rank with the largest value, if any is not 0."""
    if over is None:
        return UNKNOWN
    return format_number(over.highest) if over.max else ""
