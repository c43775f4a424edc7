"""The table of a benchmark: a row for each batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torchprof.analyze.report import ReportTable, Section, stacked
from torchprof.run.formats import UNKNOWN, Cell, format_number, format_rate, format_time

if TYPE_CHECKING:
    from torchprof.profile.benchmark import BenchmarkResult, Latency


def benchmark_table(result: BenchmarkResult) -> Section:
    """The result of ``torchprof.benchmark`` as text."""
    headings = ["Batch size", "Mean ± std", "Median", "P95", "Min", "Max", "Samples/s"]
    sentences = [
        f"{result.model}, {result.step} on {result.device}: {result.repeat} calls at each batch size, "
        f"after {result.warmup} that were not timed.",
        *(f"Batch size {row.batch_size} did not fit in memory: {row.error}" for row in result.rows if row.error),
        *result.warnings,
    ]
    return stacked([ReportTable.of_cells(headings, [_cells(row) for row in result.rows]), "", *sentences])


def _cells(row: Latency) -> list[Cell]:
    mean, std, rate = row.mean, row.std, row.samples_per_s
    if mean is None:
        return [format_number(row.batch_size), "out of memory", *[UNKNOWN] * 5]
    spread = UNKNOWN if std is None else _time(std)
    return [
        format_number(row.batch_size),
        format_time(mean * 1e9).written(f"{_time(mean)} ± {spread}"),
        *(_time(value) for value in (row.median, row.p95, row.min, row.max)),
        UNKNOWN if rate is None else format_rate(rate),
    ]


def _time(seconds: float | None) -> Cell:
    return UNKNOWN if seconds is None else format_time(seconds * 1e9)
