"""The ranks of a job on the page: their comparison, and their sum if they are too many, and next to another run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import Any

from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.ranks.sentences import name_of, sentences, unit_of
from torchprof.analyze.ranks.tables import table_of_ranks
from torchprof.analyze.ranks.values import IN_NO_OP, OneLayer, OverRanks
from torchprof.analyze.report import QUESTIONS, ReportTable, TableRow, stacked
from torchprof.reports.page.tables import report_data
from torchprof.run.formats import Cell, format_number, format_time, ranks_in_words
from torchprof.run.rows import Rows, rows_of_lines
from torchprof.run.run import Run
from torchprof.run.samples import SampleKey, Spread, quantile
from torchprof.run.words import NO_LAYERS, PHASES

_DIFFERING = 24
"""The number of layers that are compared over ranks in each phase: those whose slowest rank exceeds the mean most."""
_QUANTILES = {"Min": 0.0, "10 %": 0.1, "Median": 0.5, "90 %": 0.9, "Max": 1.0}


def compared_ranks(compared: Run, run: Run, nodes: Mapping[int, int]) -> dict[str, Any]:
    """The comparison of ranks on the page. ``compared`` has all ranks, ``run`` those whose layers are on the page, with
    the ``nodes`` of its layers.

    ``work``: own work in layers, in ns per step for each rank, None for a rank that does not have the layer.
    ``quantiles``: a table, if not all ranks are on the page. A layer that is not on the page has the node None.
    """
    balance = balance_of(compared)
    node_of = {path: nodes[index] for path, index in run.layers.index_of.items()}
    node_of |= {(name,): nodes[index] for index, name in NO_LAYERS.items()}

    page_nodes = {
        row.layer: None if row.layer == IN_NO_OP else node_of.get(compared.layers.path_of(row.layer))
        for row in balance.layers
    }

    known = [(row, row.work) for row in balance.layers if row.work is not None]
    by_difference = sorted(known, key=lambda of_row: of_row[1].above_mean, reverse=True)
    differing: set[int] = set()
    for phase in PHASES:
        differing.update([row.layer for row, _ in by_difference if row.phase == phase][:_DIFFERING])
    work = []
    for row, over in known:
        if row.layer in differing:
            of_rank = dict(zip(over.ranks, over.values))
            where = name_of(compared, row.layer), page_nodes[row.layer], PHASES.index(row.phase)
            work.append([*where, [of_rank.get(rank.rank) for rank in balance.ranks]])
    whole_table = table_of_ranks(compared, balance, len(compared.metas))
    return {
        "about": _about(compared, run),
        "report": report_data(stacked([*sentences(compared, balance), whole_table]), {}),
        "unit": unit_of(compared),
        "ranks": [rank.rank for rank in balance.ranks],
        "work": work,
        "quantiles": [] if compared is run else report_data(_quantiles(compared, by_difference), page_nodes),
    }


def _quantiles(run: Run, layers: Iterable[tuple[OneLayer, OverRanks]]) -> ReportTable:
    """The own work in each layer and phase over the ranks that have the layer, with their number and the slowest. The
    layers whose slowest rank exceeds the mean most come first."""

    def cells(row: OneLayer, over: OverRanks) -> list[Cell]:
        values = sorted(over.values)
        times = (format_time(round(quantile(values, q))) for q in _QUANTILES.values())
        return [name_of(run, row.layer), row.phase, format_number(len(values)), *times, format_number(over.highest)]

    headings = ["Layer", "Phase", "Ranks", *_QUANTILES, "Slowest rank"]
    return ReportTable(headings, [TableRow(cells(row, over), layer=row.layer) for row, over in layers])


def _about(compared: Run, run: Run) -> str:
    """A sentence: which ranks the figures of the page are of."""
    if compared is run:
        return f"Figures are sums over {len(run.metas)} ranks, unless one is chosen. Parameters are those of one rank."
    words = ranks_in_words(meta.rank for meta in run.metas)
    figures = f"sums over {words}, unless one is chosen" if len(run.metas) > 1 else f"those of {words}"
    return (
        f"Figures are {figures}. Parameters are those of one rank. “{QUESTIONS['waits']}” below compares all "
        f"{len(compared.metas):,} ranks."
    )


def sum_of_ranks(run: Run) -> Run:
    """A run of several ranks as a run of one, the lowest: rows with equal keys are summed, samples are merged. Of each
    kind of device it has the memory of the one with the largest peak and the times of the busiest one, named with their
    ranks."""
    first, rows = run.meta.rank, run.rows
    by = tuple(name for name in Rows.KEYS if name != "rank")
    lines = {(*key, first): values for key, values in rows.summed(by, Rows.VALUES).items()}
    of_ranks: defaultdict[tuple[Any, ...], list[Spread]] = defaultdict(list)
    for (layer, phase, _, device, measure), spread in run.samples.items():
        of_ranks[layer, phase, first, device, measure].append(spread)
    samples = {SampleKey(*key): Spread.of_all(spreads) for key, spreads in of_ranks.items()}
    memory = {peak.device.partition(":")[0]: peak for peak in sorted(run.memory, key=attrgetter("peak_bytes"))}
    times = {time.device.partition(":")[0]: time for time in sorted(run.device_times, key=attrgetter("busy_ns"))}
    return replace(
        run,
        metas=(replace(run.meta, measured=tuple(common(meta.measured for meta in run.metas))),),
        rows=rows_of_lines(rows.layers, lines, rows.frames, rows.devices, rows.within, rows.shared),
        samples=samples,
        timeline=None,  # it would be that of one rank
        memory=tuple(
            replace(peak, device=f"{peak.device} of rank {peak.rank}", rank=first) for peak in memory.values()
        ),
        device_times=tuple(
            replace(time, device=f"{time.device} of rank {time.rank}", rank=first) for time in times.values()
        ),
        lockstep={},
        unfinished=(),
        pipelines=(),
    )


def common(sets: Iterable[Sequence[str]]) -> list[str]:
    """The names that are in all sets, in the order of the first."""
    first, *others = sets
    return [name for name in first if all(name in other for other in others)]
