"""The sum of several cycles: recordings of one process, one after the other."""

from __future__ import annotations

from torchprof.run.run import RUN_PARTS, Run


def add_cycle(before: Run | None, cycle: Run) -> Run:
    """Add the run of a new cycle to ``before``, the sum of the earlier cycles of the process (None: there are none).

    - Rows with equal keys are added up, and so are device times.
    - The samples of both are joined.
    - Of each device's memory, the higher peak stays, with what was live at it.
    - The timeline is that of the new cycle.
    - Layers are matched by path. They are those of the new cycle, with the shapes of their first call in any cycle.
    - The sum has no stored warnings: a warning of one cycle need not hold for the sum.
    """
    if before is None:
        return cycle
    layers = before.layers.added(cycle.layers)
    before, cycle = before.on_layers(layers), cycle.on_layers(layers)
    sums = {name: part.added(getattr(before, name), getattr(cycle, name)) for name, part in RUN_PARTS.items()}
    return Run((before.meta + cycle.meta,), layers, before.rows.added(cycle.rows), **sums)
