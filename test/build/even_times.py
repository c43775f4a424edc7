"""Runs whose times do not depend on how busy the machine is."""

from __future__ import annotations

from array import array
from dataclasses import replace

from torchprof.run.run import Run


def evenly(run: Run) -> Run:
    """The same, as if each call in each row had taken 1 us by itself: on a busy machine any share may be small."""
    columns = dict(run.rows.columns)
    columns["cpu_ns"] = array("q", [1000 * calls for calls in columns["calls"]])
    meta = replace(run.meta, wall_ns=sum(columns["cpu_ns"]))
    return replace(run, metas=(meta,), rows=replace(run.rows, columns=columns))
