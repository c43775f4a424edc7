"""The sum of several cycles: recordings of one process, one after the other."""

from __future__ import annotations

from dataclasses import replace

from torchprof.run.run import RUN_PARTS, Run
from torchprof.run.words import StepEnd


def add_cycle(before: Run | None, cycle: Run) -> Run:
    """Add the run of a new cycle to ``before``, the sum of the earlier cycles of the process (None: there are none).

    - Rows with equal keys are added up, and so are device times.
    - The samples of both are joined.
    - Of each device's memory, the higher peak stays, with what was live at it.
    - The timeline is that of the new cycle.
    - Steps that end in different ways are not steps of one loop. Only those of the stronger way are kept.
    - Layers are matched by path. They are those of the new cycle, with the shapes of their first call in any cycle.
    - The sum has no stored warnings: a warning of one cycle need not hold for the sum.
    """
    if before is None:
        return cycle
    if _strength(before) < _strength(cycle):
        before = _without_steps(before)
    elif _strength(cycle) < _strength(before):
        cycle = _without_steps(cycle)
    layers = before.layers.added(cycle.layers)
    before, cycle = before.on_layers(layers), cycle.on_layers(layers)
    sums = {name: part.added(getattr(before, name), getattr(cycle, name)) for name, part in RUN_PARTS.items()}
    return Run((before.meta + cycle.meta,), layers, before.rows.added(cycle.rows), **sums)


def _strength(run: Run) -> int:
    """How certain the ends of the steps are, from 0 for a run without steps."""
    return 0 if not run.meta.steps else len(StepEnd) - [*StepEnd].index(run.meta.step_end)


def _without_steps(run: Run) -> Run:
    """The run without what is kept of single steps, and without its lockstep, which counts in steps or cycles."""
    samples = {key: spread for key, spread in run.samples.items() if not key.measure.startswith("step_")}
    return replace(run, metas=(replace(run.meta, steps=0),), samples=samples, lockstep={})
