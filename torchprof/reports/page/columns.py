"""The columns of the page's tables, and the measures for the widths of the icicle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchprof.analyze.columns import Column, columns_of
from torchprof.reports.page.tree import Take
from torchprof.run.cost import MEASURES, Measure, Unit
from torchprof.run.words import PHASES


def columns_shown(takes: Sequence[Take]) -> list[tuple[Column, str]]:
    """Every column of the page with its place. "tree": the tree table; "panel": only the panel of a layer; "line": only
    the line below the icicle, which also has the self of counts."""
    found: dict[str, tuple[Column, str]] = {}
    for take in takes:
        in_tree = {column.heading for column in columns_of(take.run)}
        for column in columns_of(take.run, show_events=True):
            found.setdefault(column.heading, (column, "tree" if column.heading in in_tree else "panel"))
    for column, _ in list(found.values()):
        if column.what == "cost" and column.unit is Unit.COUNT:
            of_self = replace(column, heading=f"{column.heading} (self)", is_self=True)
            found.setdefault(of_self.heading, (of_self, "line"))
    return list(found.values())


def column_data(column: Column, where: str) -> dict[str, Any]:
    """A column for the page's script. ``kind`` says how its figures are computed from rows."""
    unit = "calls" if column.what == "calls" else column.unit.value
    data = {"heading": column.heading, "key": column.key, "where": where, "kind": column.what}
    phase = PHASES.index(column.phase)
    if column.measure is not None:
        return {**data, "phase": phase, "self": column.is_self, "unit": unit, "fields": column.measure.fields}
    if column.what == "rate":
        return {**data, "phase": phase, "onDevice": column.on_device, "unit": unit}
    return {**data, "unit": unit}


def measures_shown(takes: Sequence[Take]) -> list[Measure]:
    """The measures for widths. For memory these are the allocated bytes, because a width cannot be negative."""
    measured = {name for take in takes for meta in take.run.metas for name in meta.measured}
    return [measure for measure in MEASURES if measure.fields[0][0] in measured]


def measure_data(measure: Measure, takes: Sequence[Take]) -> dict[str, Any]:
    """A measure for the page's script: the field of ``Cost`` that it sums, and its heading."""
    device = next((meta.device for take in takes for meta in take.run.metas if meta.device), None) or "device"
    field = measure.fields[0][0]
    heading = {"cpu_ns": "CPU time", "device_ns": "{device} time"}.get(field, measure.heading)
    heading = heading.replace(" Mem", " memory allocated").format(device=device.upper())
    return {"heading": heading, "field": field, "unit": measure.unit.value, "lowerBoundIf": measure.lower_bound_if}
