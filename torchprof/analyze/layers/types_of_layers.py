"""The layers by class."""

from __future__ import annotations

from torchprof.analyze.groups import by_class
from torchprof.analyze.operators.operators import check_phase
from torchprof.analyze.operators.ranking import (
    SUM_OF_PHASES,
    about_wholes,
    figure_columns,
    largest_by,
    line_of_figures,
    ranked,
    shares_of,
)
from torchprof.analyze.report import Section, printable, report
from torchprof.run.cost import Cost, format_number
from torchprof.run.run import Run


@report("types", "all layers of a class together: Linear, BatchNorm2d, …", answers="time")
def types(
    run: Run,
    *,
    sort_by: str | None = None,
    top: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> Section:
    """A row for each class of layers: all ``BatchNorm2d`` together, the largest first.

    *Self* adds up over all layers of the class, so the rows add up to the whole model. *Total* has the layers below,
    too; a layer inside another one of its class counts once. Shares are of all layers. A layer that was never called
    adds nothing.

    ``phase`` is "forward", "backward" or "recompute"; None adds them up. ``sort_by``: any column, by its heading or as
    ``self_cpu_total``; the default is self time, of the device if it was measured. ``top``: the number of rows.
    ``tablefmt``: any of tabulate's formats.

    Raises TorchprofError for an unknown phase, column or format, and for a negative number.
    """
    check_phase(phase)
    phases = run.phases() if phase is None else [phase]
    columns = figure_columns(run)
    lines = [
        line_of_figures(
            {"Type": [printable(group.kind)], "Layers": [format_number(len(group.members))]}, group.figures, phases
        )
        for group in by_class(run)
    ]
    own = sum((line.cost(SUM_OF_PHASES, is_self=True) for line in lines), Cost())
    wholes = shares_of(columns, own, own)
    return ranked(
        run,
        ["Type", "Layers"] if lines else ["Type"],
        lines,
        columns,
        largest_by(columns, of_self=True),
        wholes=wholes,
        sentences=about_wholes("what all layers took", wholes),
        sort_by=sort_by,
        top=top,
        tablefmt=tablefmt,
    )
