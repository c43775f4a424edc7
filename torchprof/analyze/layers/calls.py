"""The calls report: the duration of a forward call of each layer, with the first call separate from later ones."""

from __future__ import annotations

from torchprof.analyze.columns import CALLS
from torchprof.analyze.report import Part, ReportTable, printable, report
from torchprof.run.cost import Cell, ReportCell, format_number, format_time
from torchprof.run.run import Run
from torchprof.run.words import FORWARD


@report("calls", "single calls of each layer: the first, the median, the spread", answers="time")
def calls(run: Run, *, depth: int | None = None, tablefmt: str | None = None) -> Part:
    """CPU time of a forward call of each layer that was called, its child layers included.

    The first call has a column of its own: it often includes allocations, kernel loading and caches that later calls
    reuse. The median and the 5th to 95th percentile are over all calls (over a uniform sample of 256, if there were
    more).

    ``depth`` hides the layers below that depth (0: the model alone). ``tablefmt``: any of tabulate's formats.

    Raises TorchprofError for an unknown format.
    """
    headings = ["Module", CALLS, "First call", "Median", "P5 to P95", "Min", "Max"]
    table: list[list[Cell]] = []
    for key, spread in sorted(run.samples.items()):
        if key.phase != FORWARD or key.measure != "cpu_ns":
            continue
        if depth is None or len(run.layers[key.layer].path) <= depth + 1:
            table.append(
                [
                    printable(run.layers[key.layer].name),
                    format_number(spread.count),
                    format_time(spread.first),
                    format_time(spread.median),
                    _range(spread.quantile(0.05), spread.quantile(0.95)),
                    format_time(spread.min),
                    format_time(spread.max),
                ]
            )
    return ReportTable.of_cells(headings, table, tablefmt) if table else "No call of a layer was recorded in this run."


def _range(low: float, high: float) -> ReportCell:
    return ReportCell(f"{format_time(low)} to {format_time(high)}", high, "ns", ids={"p5": low, "p95": high})
