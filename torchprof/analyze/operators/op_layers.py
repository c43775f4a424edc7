"""The table of the layers that use one operator: the report "ops" with ``op``."""

from __future__ import annotations

from torchprof.analyze.operators.operators import layers_of_operator, operators
from torchprof.analyze.operators.ranking import (
    about_wholes,
    figure_columns,
    largest_by,
    line_of,
    operator_name,
    ranked,
    shares_of,
)
from torchprof.analyze.report import Section
from torchprof.run.cost import Cost
from torchprof.run.run import Run


def layers_using(
    run: Run,
    op: str,
    *,
    sort_by: str | None = None,
    top: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> Section:
    """A row for each layer that uses the operator ``op`` directly, not in a child layer; largest first.

    *Self* is the operator's cost without operators nested in it, *total* the cost of its outermost occurrences in the
    layer with everything nested in them. Shares are of the operator's cost in the whole run. ``op`` is a name as in the
    report "ops", also of a label, or ``(between ops)``.

    ``phase``: "forward", "backward" or "recompute"; None: their sum. ``sort_by``, ``top`` and ``tablefmt`` are as
    in "ops"; the default order is by total time, of the device if that was measured.

    Raises TorchprofError if ``op`` is not in the run, for an unknown phase, column or format, and for a negative
    number.
    """
    op = {operator_name(operator): operator.name for operator in operators(run)}.get(op, op)  # by the name in the table
    found = layers_of_operator(run, op, phase=phase)
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
        top=top,
        tablefmt=tablefmt,
    )
