"""The ranks report: stragglers of a job, where and how often they are slow, waiting, and missing ranks."""

from __future__ import annotations

from torchprof.analyze.ranks.balance import balance_of
from torchprof.analyze.ranks.sentences import sentences
from torchprof.analyze.ranks.tables import table_of_collectives, table_of_layers, table_of_ranks
from torchprof.analyze.report import Section, printable, report, spaced, stacked
from torchprof.analyze.sentences import lacks_ranks, warnings_of
from torchprof.run.formats import ranks_in_words
from torchprof.run.run import Run

_LINES = 15


@report("ranks", "stragglers: which rank is slow, where, and how long others wait", answers="waits")
def ranks(run: Run, *, sort_by: str | None = None, top: int | None = None, depth: int | None = None) -> Section:
    """How work is balanced over the ranks of a job: sentences about stragglers and missing ranks, then three tables.

    Times are per step, the mean over the steps; without steps, per cycle. *Own work* is all work of a rank except
    communication; on its device, if that was measured. The first table has a row for each rank, most own work first; of
    more than 16 ranks it shows the 8 slowest and the 2 fastest. The second has a row for each layer and phase, with all
    layers below; rows are sorted by how much the slowest rank exceeds the mean. The third has a row for each collective
    of a layer, longest waiting first. docs/ranks.md describes the columns.

    ``sort_by`` orders layers by another column, as ``flops_max/mean``. ``top``: the number of rows of each table.
    Raises TorchprofError for an unknown column.
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
    meta = run.meta
    of = f", of the {meta.world_size} of the job" if meta.world_size > 1 else ""
    missing = f" {ranks_in_words(run.missing_ranks).capitalize()} gave no run, or was not merged." if of else ""
    return (
        f"This run has only rank {meta.rank}{of}: there is no other rank to compare.{missing} torchprof.merge, or "
        "`torchprof show` with the files of all ranks, makes one run of them; prof.gather() does so inside "
        "of the job."
    )
