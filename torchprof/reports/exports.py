"""Data for other programs: a run as JSON that ``torchprof.load`` reads (docs/run-file.md), a comparison
(docs/compare.md), any report, and the records of a run for spreadsheets and data frames (docs/exports.md)."""

from __future__ import annotations

import csv as _csv
import re
from collections.abc import Sequence
from io import StringIO
from json import dumps
from typing import TYPE_CHECKING, Any

from torchprof.analyze.columns import as_key
from torchprof.analyze.records import RecordValue, records_of
from torchprof.analyze.report import Part, ReportTable, report, tables_and_sentences
from torchprof.comparison.diff import Change, Diff, Pair
from torchprof.comparison.table import diff_headline
from torchprof.errors import TorchprofError
from torchprof.run.file import json_of_run, stripped
from torchprof.run.formats import UNKNOWN, Cell, ReportCell
from torchprof.run.run import Run

if TYPE_CHECKING:
    import pandas


@report("json", "the run as data; torchprof.load reads it", suffix=".json")
def json(run: Run, *, strip: bool = False) -> str:
    """The file of the run, with all of its warnings, also those that ``load`` computes from the run.

    ``strip=True`` leaves the names of files and machines out.
    """
    run = stripped(run) if strip else run
    warnings = ({**warning.to_json(), "ranks": warning.ranks, "sentence": str(warning)} for warning in run.warnings)
    return json_of_run(run, strip=strip, computed={"warnings": warnings})


_SCHEMA = 1
"""It grows by one whenever a reader of the old format would misread the new one."""
_FORMAT = "torchprof-diff"


@report("json", "the comparison as data", suffix=".json", of="diff")
def diff_json(diff: Diff) -> str:
    """All data of a diff, layer by layer; unknown figures are null. docs/compare.md describes the keys."""
    layers: list[dict[str, Any]] = []
    waiting: list[tuple[Pair, int | None]] = [(pair, None) for pair in reversed(diff.pairs)]
    while waiting:
        pair, parent = waiting.pop()
        number = len(layers)
        layers.append(
            {
                "path": pair.path,
                "parent": parent,
                "how": pair.how if pair.is_layer else None,
                "before": None if pair.before is None else {"path": pair.before.path, "kind": pair.before.kind},
                "after": None if pair.after is None else {"path": pair.after.path, "kind": pair.after.kind},
                "differs": [{"what": what, "before": was, "after": now} for what, was, now in pair.differs],
                "changes": {key: _change(change) for key, change in pair.changes.items()},
            }
        )
        waiting.extend((child, number) for child in reversed(pair.children))
    document = {
        "format": _FORMAT,
        "schema": _SCHEMA,
        "headline": diff_headline(diff),
        "counted": diff.counted,
        "unit": diff.unit,
        "counts": {"before": diff.counts[0], "after": diff.counts[1]},
        "quantities": [
            {
                "key": quantity.key,
                "heading": quantity.heading,
                "unit": quantity.unit.value,
                "phase": quantity.phase,
                "is_self": quantity.is_self,
            }
            for quantity in diff.quantities
        ],
        "whole": {key: _change(change) for key, change in diff.whole.items()},
        "layers": layers,
        "notes": diff.notes,
        "warnings": diff.warnings,
    }
    return dumps(document, separators=(",", ":"))


def _change(change: Change) -> dict[str, Any]:
    noise = change.noise
    return {
        "before": change.before,
        "after": change.after,
        "before_at_least": change.at_least[0],
        "after_at_least": change.at_least[1],
        "difference": change.difference,
        "ratio": change.ratio,
        "verdict": change.verdict,
        "noise": None if noise is None else noise._asdict(),
    }


# Data: the rows of tables with their figures in base units, and sentences


def data_of(name: str, content: Part) -> dict[str, Any]:
    """What JSON stores of a report: its name, the tables with their columns and rows, and all other text, in the order
    of the report. docs/exports.md describes the keys."""
    parts = [*tables_and_sentences(content)]
    return {
        "report": name,
        "tables": [_data_of_table(part, name) for part in parts if isinstance(part, ReportTable)],
        "sentences": [part for part in parts if isinstance(part, str)],
    }


def _data_of_table(table: ReportTable, report: str) -> dict[str, Any]:
    keys = _keys(table.headings)
    columns = [
        {"key": key, "heading": heading, "unit": unit} for key, heading, unit in zip(keys, table.headings, table.units)
    ]
    return {
        "name": table.name or report,
        **table.ids,
        "columns": columns,
        "rows": [_data_of_row(keys, row.cells) for row in table.rows if not row.continues],
    }


def _keys(headings: Sequence[str]) -> list[str]:
    """A key for each heading: the name of the column in options such as ``sort_by``."""
    keys: list[str] = []
    for heading in headings:
        key = re.sub(r"[^\w/]+", "_", as_key(heading)).strip("_")
        keys.append(f"{key}_{keys.count(key) + 1}" if key in keys else key)
    return keys


def _data_of_row(keys: Sequence[str], row: Sequence[Cell]) -> dict[str, Any]:
    data: dict[str, Any] = {}
    bounds: list[str] = []
    for key, cell in zip(keys, row):
        if isinstance(cell, ReportCell):
            if cell.value is not None:
                data[key] = cell.value
            data.update((name, value) for name, value in cell.ids.items() if name not in keys)
            bounds += [key] if cell.at_least else []
        elif cell == UNKNOWN:
            data[key] = None
        elif cell:
            data[key] = cell
    return {**data, "at_least": bounds} if bounds else data


# CSV and data frames

_STARTS_A_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠", "'")
"""Characters at which a spreadsheet reads a cell as a formula (OWASP, "CSV Injection"), with their full-width forms;
and the apostrophe that prevents it."""


@report("csv", "the layers, or other records, as CSV", suffix=".csv")
def csv(run: Run, *, of: str = "layers") -> str:
    """A line for each record of ``records_of`` (RFC 4180); the first line has the names of the columns. Unknown figures
    are empty. A text that a spreadsheet would read as a formula, or that starts with an apostrophe, gets an apostrophe
    before it: removing one restores the text."""
    columns, records = records_of(run, of)
    text = StringIO()
    writer = _csv.writer(text)
    writer.writerow(columns)
    writer.writerows([*map(_cell, record)] for record in records)
    return text.getvalue()


def _cell(value: RecordValue) -> RecordValue:
    return f"'{value}" if isinstance(value, str) and value.startswith(_STARTS_A_FORMULA) else value


def dataframe(run: Run, of: str = "layers") -> pandas.DataFrame:
    """The records of ``torchprof.analyze.records``. Raises TorchprofError for unknown ones, and without pandas.

    Columns have pandas's nullable types ``Int64`` and ``string``, so unknown values are ``pandas.NA``. In a NumPy
    column they would be 0, or would make all values floats.
    """
    columns, records = records_of(run, of)
    try:
        import pandas
    except ImportError as error:
        raise TorchprofError("A data frame needs pandas, which is not installed here: pip install pandas") from error
    values = list(zip(*records)) or [()] * len(columns)
    # pandas would use pyarrow for text if it is installed, and pyarrow rejects lone surrogates.
    types = {str: pandas.StringDtype("python"), int: pandas.Int64Dtype()}
    return pandas.DataFrame(
        {name: pandas.array(list(column), dtype=types[columns[name]]) for name, column in zip(columns, values)}
    )
