"""Reports on the page: their tables and sentences, which the page's script draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import groupby
from typing import Any

from torchprof.analyze.report import Part, ReportTable, TableRow, printable, tables_and_sentences
from torchprof.run.formats import Cell, ReportCell, format_count, format_memory, format_share, format_time

_USUAL: Mapping[str, Callable[[float], ReportCell]] = {
    "ns": format_time,
    "bytes": format_memory,
    "count": format_count,
    "share": format_share,
}
"""The format of each unit that the page's script has, too."""


def report_data(content: Part, nodes: Mapping[int, int | None]) -> list[str | dict[str, Any]]:
    """The tables of a report and the paragraphs between them. ``nodes``: the node of each layer of its run.

    A table has its ``headings``, the ``units`` of its columns ("" for text) and its ``rows``: the cells, and the node
    of the layer that the row is about, or None. A cell is a text, or a figure: its value if its text is the usual one
    of the unit, else its text and its value. The last rows, as many as ``sums``, are of all others.
    """

    def row_data(row: TableRow) -> list[Any]:
        return [[*map(_cell, row.cells)], None if row.layer is None else nodes.get(row.layer)]

    parts: list[str | dict[str, Any]] = []
    for is_text, group in groupby(tables_and_sentences(content), lambda part: isinstance(part, str)):
        if is_text:
            parts.append(" ".join(map(str, group)))
            continue
        for table in group:
            assert isinstance(table, ReportTable)
            parts.append(
                {
                    "headings": [*map(printable, table.headings)],
                    "units": table.units,
                    "isText": table.are_texts,
                    "rows": [*map(row_data, table.rows)],
                    "sums": sum(not row.is_part for row in table.rows),
                }
            )
    return parts


def _cell(cell: Cell) -> Any:
    if not isinstance(cell, ReportCell) or not cell.unit:
        return str(cell)
    usual = _USUAL.get(cell.unit)
    if usual is not None and isinstance(cell.value, (int, float)) and str(usual(cell.value)) == cell.text:
        return cell.value
    return [cell.text, cell.value]
