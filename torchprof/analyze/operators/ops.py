"""The ops report: the cost of each operator, in the whole run or in some layers; or the layers that use one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchprof.analyze.operators.operators import Operator, layers_of_operator, operators
from torchprof.analyze.operators.ranking import (
    TableLine,
    about_wholes,
    figure_columns,
    largest_by,
    line_of,
    operator_name,
    ranked,
    shares_of,
)
from torchprof.analyze.report import Section, report
from torchprof.analyze.sentences import about_flops
from torchprof.errors import TorchprofError
from torchprof.run.cost import Cost
from torchprof.run.formats import Cell, ReportCell
from torchprof.run.operators import Sums
from torchprof.run.run import Run
from torchprof.run.words import LAUNCHED_BEFORE, FrameKind

_SHAPES_SHOWN = 4
_LIST_SHOWN = 2


@report("ops", 'every operator, with self and total; op="aten::mm": the layers that use it', answers="time")
def ops(
    run: Run,
    *,
    op: str | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    group_by_input_shape: bool = False,
    group_by_stack_n: int = 0,
    layer: Any = None,
    phase: str | None = None,
) -> Section:
    """A row for each operator, and for each label of the user's, as in torch's ``key_averages().table()``.

    *Self* is the operator's cost without operators nested in it, *total* the cost of its outermost occurrences with
    everything nested in them. Shares are of the self time of all rows, without work launched before the recording.
    ``(between ops)`` is the time of layers in which no operator ran.

    ``op``: the name of an operator, as this table has it. The rows are then the layers that use it directly, not in a
    child layer, the largest total first; shares are of what it took in the whole run. ``phase``, ``sort_by``,
    ``top`` work as without ``op``, the other options do not.

    ``layer``: a path or a pattern as in ``Profile(paths=…)``; only work in these layers and below them. ``phase``: None
    is their sum. ``group_by_input_shape``: a row for each combination of input shapes; ``group_by_stack_n``: of the
    innermost n source lines. ``sort_by`` may be torch's name of a column, too; the default is the self time of the
    device if that was measured, else of the CPU.

    Raises TorchprofError for an unknown operator, layer or column, for shapes or source lines that were not recorded,
    and for options that do not work with ``op``.
    """
    if op is not None:
        others = {"layer": layer, "group_by_input_shape": group_by_input_shape, "group_by_stack_n": group_by_stack_n}
        refused = [name for name, value in others.items() if value]
        if refused:
            raise TorchprofError(f"With op=, the rows are the layers of one operator: leave out {', '.join(refused)}.")
        return _layers_using(run, op, sort_by=sort_by, top=top, phase=phase)
    sums_of = operators(
        run, layer=layer, phase=phase, group_by_input_shape=group_by_input_shape, group_by_stack_n=group_by_stack_n
    )
    columns = figure_columns(run)
    whole = sum((sums.self for operator, sums in sums_of.items() if not _is_left_over(operator)), Cost())
    wholes = shares_of(columns, whole, whole)
    more = ["Input Shapes"] * bool(group_by_input_shape) + ["Source Lines"] * bool(group_by_stack_n)
    return ranked(
        run,
        ["Operator"],
        [_line(operator, sums) for operator, sums in sums_of.items()],
        columns,
        largest_by(columns, of_self=True),
        wholes=wholes,
        more_texts=more,
        sentences=[*about_wholes("the self of all rows", wholes), *about_flops(run)],
        sort_by=sort_by,
        top=top,
    )


def _line(operator: Operator, sums: Sums) -> TableLine:
    texts: dict[str, Sequence[Cell]] = {
        "Operator": [ReportCell(operator_name(operator), operator.name, ids={"kind": operator.kind})],
        "Input Shapes": [_shapes(operator.shapes)],
        "Source Lines": operator.stack,
    }
    return line_of(texts, sums, left_over=_is_left_over(operator))


def _is_left_over(operator: Operator) -> bool:
    """Whether it is the work that was launched before the recording."""
    return operator.kind == FrameKind.LABEL and operator.name == LAUNCHED_BEFORE


def _shapes(shapes: Sequence[Any]) -> str:
    shown = [_shape(shape) for shape in shapes[:_SHAPES_SHOWN]]
    return ", ".join([*shown, *_more(len(shapes) - _SHAPES_SHOWN)])


def _shape(shape: Any) -> str:
    """The shape of a tensor, or of a list of tensors."""
    if shape is None:
        return "[?]"
    if not any(isinstance(size, tuple) for size in shape):
        return str(list(shape)).replace("-1", "?")
    return f"[{', '.join([*map(_shape, shape[:_LIST_SHOWN]), *_more(len(shape) - _LIST_SHOWN)])}]"


def _more(number: int) -> list[str]:
    return [f"… {number} more"] if number > 0 else []


def _layers_using(run: Run, op: str, *, phase: str | None, **order: Any) -> Section:
    """A row for each layer that uses the operator ``op`` directly."""
    op = {operator_name(operator): operator.name for operator in operators(run)}.get(op, op)  # by the name in the table
    sums_of = layers_of_operator(run, op, phase=phase)
    everywhere = [sums for operator, sums in operators(run, phase=phase).items() if operator.name == op]
    columns = figure_columns(run)
    wholes = shares_of(
        columns, sum((sums.self for sums in everywhere), Cost()), sum((sums.total for sums in everywhere), Cost())
    )
    return ranked(
        run,
        ["Module"],
        [line_of({"Module": [name]}, sums) for name, sums in sums_of.items()],
        columns,
        largest_by(columns, of_self=False),
        wholes=wholes,
        sentences=about_wholes(f"what {op} took everywhere", wholes),
        **order,
    )
