"""The layers that spend time in one operator: the table of operators the other way round."""

from __future__ import annotations

from torchprof.analyze.operators import layers_of, operators
from torchprof.errors import TorchprofError
from torchprof.reports import report
from torchprof.reports.ranking import (
    about_wholes,
    figure_columns,
    largest_by,
    line_of,
    operator_name,
    ranked,
    shares_of,
)
from torchprof.run.cost import Cost
from torchprof.run.run import Run


@report("layers")
def layers(
    run: Run,
    *,
    op: str | None = None,
    sort_by: str | None = None,
    row_limit: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> str:
    """A row for each layer that uses the operator ``op`` directly, not in its child layers; the largest first.

    *Self* is what no operator inside it took, *total* what its outermost occurrences in the layer took, with all that
    ran in them; shares are of what the operator took everywhere. ``op`` is a name as the table of operators shows it,
    that of a label included, and ``(between ops)`` for layers' own time.

    ``phase`` is "forward", "backward" or "recompute"; None adds them up. ``sort_by``, ``row_limit`` and ``tablefmt``
    are as for the table of operators; the default is the total time, of the device where that was measured.

    Raises TorchprofError for an operator that the run does not know, for none, for an unknown phase, column or format,
    and for a negative number.
    """
    if op is None:
        raise TorchprofError('Which operator? Write run.report("layers", op="aten::linear"); the report "ops" has all.')
    op = {operator_name(operator): operator.name for operator in operators(run)}.get(op, op)  # as the table shows it
    found = layers_of(run, op, phase=phase)
    everywhere = [sums for operator, sums in operators(run, phase=phase).items() if operator.name == op]
    columns = figure_columns(run)
    wholes = shares_of(
        columns,
        sum((sums.self for sums in everywhere), Cost()),
        sum((sums.total for sums in everywhere), Cost()),
    )
    return ranked(
        run,
        ["Module"],
        [line_of({"Module": [name]}, sums) for name, sums in found.items()],
        columns,
        largest_by(columns, of_self=False),
        wholes=wholes,
        notes=about_wholes(f"what {op} took everywhere", wholes),
        sort_by=sort_by,
        row_limit=row_limit,
        tablefmt=tablefmt,
    )
