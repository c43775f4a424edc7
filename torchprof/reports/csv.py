"""The records of a run as comma-separated values, for spreadsheets. The columns are described in docs/exports.md."""

from __future__ import annotations

import csv as _csv
from io import StringIO

from torchprof.analyze.records import RecordValue, records_of
from torchprof.analyze.report import report
from torchprof.run.run import Run

# Characters at which a spreadsheet reads a cell as a formula (OWASP, "CSV Injection"), with their full-width forms; and
# the apostrophe that prevents it.
_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")


@report("csv", "the layers, or other records, as CSV", suffix=".csv")
def csv(run: Run, *, of: str = "layers") -> str:
    """A line for each record (RFC 4180); the first line has the names of the columns. Unknown figures are empty.

    ``of``: "layers" (a record for each layer, phase and rank), "operators" (for each operator of these) or "rows" (the
    finest table). A text that a spreadsheet would read as a formula gets an apostrophe before it, and so does a text
    that starts with an apostrophe: removing one apostrophe restores the text. Raises TorchprofError for any other
    ``of``.
    """
    columns, records = records_of(run, of)
    text = StringIO()
    writer = _csv.writer(text)
    writer.writerow(columns)
    writer.writerows([*map(_cell, record)] for record in records)
    return text.getvalue()


def _cell(value: RecordValue) -> RecordValue:
    return f"'{value}" if isinstance(value, str) and value.startswith(_STARTS_A_FORMULA) else value
