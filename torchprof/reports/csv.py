"""The records of a run as comma-separated values, for spreadsheets. The columns are described in docs/exports.md."""

from __future__ import annotations

import csv as _csv
from io import StringIO

from torchprof.analyze.records import Cell, table
from torchprof.reports import report
from torchprof.run.run import Run

# What a spreadsheet takes for the start of a formula (OWASP, "CSV Injection"), wide forms included; and what marks it.
_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")


@report("csv", suffix=".csv")
def csv(run: Run, *, of: str = "layers") -> str:
    """A line for each record, as RFC 4180 has it, the names of the columns in the first. What is not known is empty.

    ``of``: "layers" (one record for each layer, phase and rank), "operators" (for each operator in each of those) or
    "rows" (the finest table there is). A text that a spreadsheet would take for a formula, and one that begins with an
    apostrophe, gets an apostrophe before it: take one off to have the name as it was. Raises TorchprofError for other
    records.
    """
    columns, records = table(run, of)
    text = StringIO()
    writer = _csv.writer(text)
    writer.writerow(columns)
    writer.writerows([*map(_cell, record)] for record in records)
    return text.getvalue()


def _cell(value: Cell) -> Cell:
    return f"'{value}" if isinstance(value, str) and value.startswith(_STARTS_A_FORMULA) else value
