"""The data of a report: the rows of its tables with their figures in base units, and its sentences."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torchprof.analyze.report import Part, ReportTable, tables_and_sentences
from torchprof.run.formats import UNKNOWN, Cell, ReportCell, as_key


def data_of(name: str, content: Part) -> dict[str, Any]:
    """What JSON stores of a report.

    - ``report``: its name.
    - ``tables``: each has a ``name``, ``columns`` and ``rows``, and the ``rank`` and ``device`` that it is about, if it
      is about one. A column has ``key``, ``heading`` and ``unit`` ("ns", "bytes", "count", "share" as a fraction of 1,
      …; "" for text). A row has an entry for each column, by key: none if the cell is empty, null if the figure is
      unknown. ``at_least`` lists the columns in which the figure is a lower bound. Ids that are not a column, such as
      the ``layer`` of an operator, are entries, too.
    - ``sentences``: all other text, in the order of the report.
    """
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
