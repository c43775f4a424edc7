"""The table of operators: what each took, over the whole run or in some layers of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchprof.analyze.operators import Operator, operators
from torchprof.reports import report
from torchprof.reports.notes import about_flops
from torchprof.reports.ranking import figure_columns, largest_by, line_of, operator_name, ranked, said, shares_of
from torchprof.reports.text import check_number
from torchprof.run.cost import Cost
from torchprof.run.run import Run
from torchprof.run.words import LAUNCHED_BEFORE

_SHAPES_SHOWN = 4
_LIST_SHOWN = 2


@report("ops")
def ops(
    run: Run,
    *,
    sort_by: str | None = None,
    row_limit: int | None = None,
    group_by_input_shape: bool = False,
    group_by_stack_n: int = 0,
    layer: Any = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> str:
    """A row for each operator, and for each label of the user's, as torch's ``key_averages().table()`` has them.

    *Self* is what no operator inside it took, *total* what its outermost occurrences took, with all that ran in them;
    a share is of the self time of all rows but what was launched before the recording. ``(between ops)`` is the time of
    layers in which no operator ran.

    ``layer`` is a path or a pattern as ``Profile(paths=…)`` takes them: only what ran in these layers and below them.
    ``phase`` is "forward", "backward" or "recompute"; None adds them up. ``group_by_input_shape`` gives calls on other
    shapes rows of their own, and ``group_by_stack_n`` calls from other source lines, by the innermost so many.
    ``sort_by`` is a column: its heading, that in lower case with underscores, or torch's name for it. The default is
    the self time of the device where that was measured, else of the CPU. ``row_limit`` shows only so many rows.
    ``tablefmt`` is any of tabulate's formats.

    Raises TorchprofError for an unknown layer, phase, column or format, for a negative number, and for shapes or source
    lines that were not recorded.
    """
    check_number("group_by_stack_n", group_by_stack_n, "source lines")
    found = operators(
        run,
        layer=layer,
        phase=phase,
        group_by_input_shape=group_by_input_shape,
        group_by_stack_n=group_by_stack_n,
    )

    def is_left_over(operator: Operator) -> bool:
        return operator.kind == "label" and operator.name == LAUNCHED_BEFORE

    lines = [
        line_of(
            {
                "Operator": [operator_name(operator)],
                "Input Shapes": [_shapes(operator.shapes)],
                "Source Lines": operator.stack,
            },
            sums,
            left_over=is_left_over(operator),
        )
        for operator, sums in found.items()
    ]
    columns = figure_columns(run)
    whole = sum((sums.self for operator, sums in found.items() if not is_left_over(operator)), Cost())
    wholes = shares_of(columns, whole, whole)
    more = ["Input Shapes"] * bool(group_by_input_shape) + ["Source Lines"] * bool(group_by_stack_n)
    return ranked(
        run,
        ["Operator"],
        lines,
        columns,
        largest_by(columns, of_self=True),
        wholes=wholes,
        more_texts=more,
        notes=[*said("what all rows took by themselves", wholes), *about_flops(run)],
        sort_by=sort_by,
        row_limit=row_limit,
        tablefmt=tablefmt,
    )


def _shapes(shapes: Sequence[Any]) -> str:
    shown = [_shape(shape) for shape in shapes[:_SHAPES_SHOWN]]
    return ", ".join([*shown, *_more(len(shapes) - _SHAPES_SHOWN)])


def _shape(shape: Any) -> str:
    """Of one tensor, or of a list of them."""
    if shape is None:
        return "[?]"
    if not any(isinstance(size, tuple) for size in shape):
        return str(list(shape)).replace("-1", "?")
    return f"[{', '.join([*map(_shape, shape[:_LIST_SHOWN]), *_more(len(shape) - _LIST_SHOWN)])}]"


def _more(number: int) -> list[str]:
    return [f"… {number} more"] if number > 0 else []
