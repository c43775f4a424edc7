"""The largest places on the page: the rows of the report "top"."""

from __future__ import annotations

from typing import Any

from torchprof.analyze.operators.top import about_idle_devices, largest_of, measures_of
from torchprof.analyze.records import layer_name
from torchprof.run.run import Run

_PLACES = 5
"""As many as the report "overview" shows."""


def largest_places(run: Run) -> dict[str, Any]:
    """A table of the largest places for each measure, and sentences on idle devices.

    ``path`` of a row: the names from the top of the page's tree down to the layer, or the name of work of no layer.
    """
    tables = []
    for field, heading in measures_of(run):
        found, about_hidden = largest_of(run, field, _PLACES)
        rows = [
            {
                "share": one.share,
                "amount": one.amount,
                "path": run.layers[one.layer].path if one.layer >= 0 else [layer_name(run, one.layer)],
                "layer": str(one.name),
                "kind": one.kind,
                "phase": str(one.phase),
                "work": one.work,
            }
            for one in found
        ]
        if rows:
            unit = "count" if field == "flops" else "ns"
            tables.append({"heading": heading, "unit": unit, "rows": rows, "hidden": about_hidden})
    return {"sentences": list(about_idle_devices(run)), "tables": tables}
