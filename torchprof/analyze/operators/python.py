"""The Python report: the time between operators, by layer, and the source lines where it is spent."""

from __future__ import annotations

from collections import Counter

from torchprof.analyze.operators.top import parts_of, source_lines
from torchprof.analyze.report import ReportTable, Section, phase_cell, report, stacked
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.run.formats import UNKNOWN, ReportCell, format_number, format_share, format_time
from torchprof.run.run import Run
from torchprof.run.words import BETWEEN_OPS


@report("python", "the time between operators: Python and what it calls", answers="time")
def python(run: Run, *, top: int | None = 10, lines: int | None = 3) -> Section:
    """The CPU time in which no operator ran: Python, and libraries that it calls, such as NumPy. By layer, label and
    phase, largest first.

    Below each row are the ``lines`` source lines with the most samples, and the part of the time that their samples
    stand for. Samples need a sampling thread, which ``torchprof run`` has; without it they are unknown. Short times may
    have no samples.
    """
    every = parts_of(run, "cpu_ns")
    whole = sum(every.values())
    parts = Counter({work.at(layer): ns for (layer, work), ns in every.items() if work.name == BETWEEN_OPS})
    seen = source_lines(run)
    table = []
    for where, ns in parts.most_common(top):
        here = seen.get(where, Counter())
        samples = sum(here.values())
        table.append(
            [
                where.name(run),
                phase_cell(where.phase_name),
                format_time(ns),
                format_share(ns / whole),
                format_number(samples) if seen else UNKNOWN,
            ]
        )
        for line, times in here.most_common(lines):
            part = ns * times / samples
            about = format_time(part).written(f"~{format_time(part)}")
            table.append([ReportCell(f"  {line}", line), "", about, format_share(part / whole), format_number(times)])
    text = ReportTable.of_cells(["Layer, and where in the source", "Phase", "Between ops", "Share", "Samples"], table)
    hidden = 0 if top is None else max(len(parts) - top, 0)
    more = [f"Layers with less are hidden: {hidden}."] if hidden else []
    return stacked([text, *more, *about_sums(run), warnings_below(run)])
