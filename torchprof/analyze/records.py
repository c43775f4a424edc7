"""A run as flat tables of plain values, for spreadsheets, data frames and databases. docs/exports.md has the columns.

An unknown value is None, never 0: what could not be measured, the costs of a layer that was never called,
and a sum with no known part.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence, Set
from typing import Any, NamedTuple

from torchprof.analyze.columns import measures_of_records
from torchprof.analyze.figures import Figures, figures_of_layers, figures_of_no_layer
from torchprof.errors import TorchprofError, suggest
from torchprof.run.formats import Bound
from torchprof.run.measures import Measure, SampleKey
from torchprof.run.operators import Op, operators_of_layers
from torchprof.run.rows import Around
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, BETWEEN_OPS, LAUNCHED_BEFORE, PHASES, Frame, FrameKind, is_left_over, phase_of

RecordValue = str | int | None

_INWARD = " > "  # separates names, from outer to inner


class Table(NamedTuple):
    """Records with a value, or None, in each column. ``columns``: the type of each column, int or str, by name."""

    columns: dict[str, type]
    records: list[tuple[RecordValue, ...]]


def records_of(run: Run, of: str = "layers") -> Table:
    """The records of a run: ``of`` is "layers", "operators" or "rows". Raises TorchprofError for anything else."""
    if of not in TABLES:
        raise TorchprofError(f"There are no records of {of!r}. {suggest(str(of), TABLES)}")
    return TABLES[of](run)


def layer_records(run: Run) -> Table:
    """One record per layer, phase and rank. Work of no layer, and work launched before the recording, have records too.

    Σ ``self_…`` over all records is Σ over the rows of the run. What is known of a layer, such as its parameters, is
    the same in all records of it.
    """
    figures = measures_of_records(run)
    requested = {name for meta in run.metas for name in meta.requested}
    durations = ("min_call_cpu_ns", "median_call_cpu_ns", "max_call_cpu_ns") if "cpu_ns" in requested else ()
    peaks = [name for name in ("cpu", "device") if f"{name}_allocated" in requested]
    columns = {
        **_typed(str, "layer", "kind", "settings"),
        **_typed(int, "depth"),
        **_typed(str, "phase"),
        **_typed(int, "rank", "calls", *_self_and_total(figures)),
        **_typed(str, "lower_bounds"),
        **_typed(int, *durations),
        **_typed(int, *(f"peak_{name}_bytes" for name in peaks)),
        **_typed(int, "self_params", "total_params", "self_trainable_params"),
        **_typed(str, "input_shapes", "output_shapes"),
    }
    records: list[tuple[RecordValue, ...]] = []
    phases = run.phases()
    for one_rank in run.of_ranks([meta.rank for meta in run.metas]):
        for row in _rows_of_layers(one_rank, phases):
            for phase in row.figures.total if row.figures.left_over else phases:
                records.append(
                    (
                        *row.names,
                        phase_of(row.layer, phase),
                        one_rank.meta.rank,
                        _calls(one_rank, row, phase),
                        *_values(figures, row.figures, phase, frozenset(one_rank.meta.measured)),
                        *(_durations(one_rank, row.layer, phase) if durations else ()),
                        *(_peak(one_rank, row.layer, phase, name == "cpu") for name in peaks),
                        *row.parameters,
                        *row.shapes,
                    )
                )
    return Table(columns, records)


def operator_records(run: Run) -> Table:
    """One record per operator, label and compiled region directly in a layer, per phase and rank. With ``(between
    ops)``, Σ ``self_…`` is the layer's self. ``total_…`` of a label includes all that ran in it, also layers with
    records of their own."""
    figures = measures_of_records(run)
    columns = {
        **_typed(str, "layer", "kind", "phase"),
        **_typed(int, "rank"),
        **_typed(str, "operator", "operator_kind", "labels"),
        **_typed(int, "calls", *_self_and_total(figures)),
        **_typed(str, "lower_bounds"),
    }
    records: list[tuple[RecordValue, ...]] = []
    for one_rank in run.of_ranks([meta.rank for meta in run.metas]):
        for phase in run.phases():
            ops_by_layer = operators_of_layers(one_rank.rows, phase)
            layers_first = sorted(ops_by_layer, key=lambda layer: layer % (len(run.layers) + 2))  # then -2 and -1
            for layer in layers_first:
                for op, labels in _with_labels(ops_by_layer[layer]):
                    costs = Figures({phase: op.self}, {phase: op.total})
                    records.append(
                        (
                            LAUNCHED_BEFORE if op.name == LAUNCHED_BEFORE else one_rank.layers.name_of(layer),
                            one_rank.layers[layer].kind or None if layer >= 0 else None,
                            phase_of(layer, phase),
                            one_rank.meta.rank,
                            op.name,
                            op.kind,
                            _INWARD.join(labels) or None,
                            None if op.name == BETWEEN_OPS else op.calls,
                            *_values(figures, costs, phase, frozenset(one_rank.meta.measured)),
                        )
                    )
    return Table(columns, records)


def row_records(run: Run) -> Table:
    """One record per row of the run, the most detailed table; all figures are self. A frame of kind python is a line at
    which Python was sampled, ``calls`` times; its time is part of the layer's own time."""
    figures = measures_of_records(run)
    columns = {
        **_typed(str, "layer", "kind", "phase"),
        **_typed(int, "rank"),
        **_typed(str, "device", "shared_by", "within", "inside", "operator", "operator_kind"),
        **_typed(str, "input_shapes", "dtypes", "source"),
        **_typed(int, "calls", *(f"self_{figure.heading}" for figure in figures)),
        **_typed(str, "lower_bounds"),
    }
    measured = {meta.rank: frozenset(meta.measured) for meta in run.metas}
    chains = [_cells_of_frames(frames) for frames in run.rows.frames]
    surroundings = [_surroundings(run, within) for within in run.rows.within]
    records: list[tuple[RecordValue, ...]] = []
    for number, row in enumerate(run.rows):
        index, chain, within = (run.rows.columns[name][number] for name in ("layer", "frames", "within"))
        is_own_time = not row.frames  # of a layer, between operators
        costs = Figures(
            own={row.phase: row.cost},
            total={row.phase: row.cost},
            unknown=not is_own_time and row.frames[-1].kind == FrameKind.PYTHON,
        )
        records.append(
            (
                LAUNCHED_BEFORE if is_left_over(row.frames) else run.layers.name_of(index),
                row.layer.kind or None if row.layer is not None else None,
                row.phase,
                row.rank,
                row.device,
                ", ".join(layer.name for layer in row.shared_by) or None,
                surroundings[within],
                *chains[chain],
                None if is_own_time and (index < 0 or row.phase == BACKWARD) else row.calls,
                *_values(figures, costs, row.phase, measured[row.rank], of_self_alone=True),
            )
        )
    return Table(columns, records)


TABLES = {"layers": layer_records, "operators": operator_records, "rows": row_records}


def _typed(kind: type, *names: str) -> dict[str, type]:
    return dict.fromkeys(names, kind)


def _self_and_total(figures: Sequence[Measure]) -> list[str]:
    return [f"{which}_{figure.heading}" for figure in figures for which in ("self", "total")]


def _values(
    figures: Sequence[Measure], of_row: Figures, phase: str, measured: Set[str], *, of_self_alone: bool = False
) -> Iterator[RecordValue]:
    """Self and total of each measure, then the names of those columns that hold a lower bound."""
    lower_bounds = []
    for figure in figures:
        is_measured = all(name in measured for name, _ in figure.fields)
        for which in ("self",) if of_self_alone else ("self", "total"):
            self_or_total = of_row.measure(figure, phase, which == "self", is_measured)
            if self_or_total.bound is Bound.AT_LEAST:
                lower_bounds.append(f"{which}_{figure.heading}")
            yield int(self_or_total.value) if self_or_total.is_known else None
    yield ", ".join(lower_bounds) or None


class _Row(NamedTuple):
    """A layer, or the work of no layer. ``names``: the cells before the phase. ``parameters``, ``shapes``: the last
    cells."""

    layer: int
    figures: Figures
    names: tuple[RecordValue, ...]
    parameters: tuple[RecordValue, ...] = (None,) * 3
    shapes: tuple[RecordValue, ...] = (None,) * 2


def _rows_of_layers(run: Run, phases: Sequence[str]) -> Iterator[_Row]:
    """The layers, depth first, then the work of no layer."""
    params = run.total_params()
    for path, figures in figures_of_layers(run, phases).items():
        index = run.layers.index_of[path]
        layer = run.layers[index]
        names = layer.name, layer.kind or None, layer.settings or None, len(path) - 1
        parameters = layer.params, params[path], layer.trainable_params
        shapes = _as_json(layer.input_shapes), _as_json(layer.output_shapes)
        yield _Row(index, figures, names, parameters, shapes)
    for index, name, figures in figures_of_no_layer(run, phases):
        yield _Row(index, figures, (name, None, None, None))


def _calls(run: Run, row: _Row, phase: str) -> int | None:
    """The calls of a layer in a phase; None if they are unknown, and for work of no layer."""
    if row.layer < 0 or phase == BACKWARD or not row.figures.number_of_calls().is_known:
        return None
    _, calls = run.rows.by_layer.get((row.layer, PHASES.index(phase)), (None, 0))
    return calls


def _as_json(value: Sequence[Any]) -> str | None:
    return json.dumps(value) if value else None


def _durations(run: Run, index: int, phase: str) -> tuple[int | None, ...]:
    spread = run.samples.get(SampleKey(index, phase, run.meta.rank, "cpu", "cpu_ns"))
    return (None, None, None) if spread is None else (spread.min, int(spread.median), spread.max)


def _peak(run: Run, index: int, phase: str, on_cpu: bool) -> int | None:
    """The highest peak of any call, on the CPU or on any one device."""
    devices = {device for device in run.rows.devices if (device == "cpu") == on_cpu}
    spreads = [run.samples.get(SampleKey(index, phase, run.meta.rank, device, "peak_bytes")) for device in devices]
    return max((spread.max for spread in spreads if spread is not None), default=None)


def _with_labels(ops: Sequence[Op]) -> Iterator[tuple[Op, tuple[str, ...]]]:
    """Each operator and label, with the labels around it."""
    waiting: list[tuple[Op, tuple[str, ...]]] = [(op, ()) for op in reversed(ops)]
    while waiting:
        op, labels = waiting.pop()
        yield op, labels
        waiting.extend((inner, (*labels, op.name)) for inner in reversed(op.inside))


def _surroundings(run: Run, within: Sequence[Around]) -> str | None:
    """The layers, operators and labels that a layer was called in, from outer to inner; None where there are none."""
    steps: list[str] = []
    for around in within:
        steps += [run.layers.name_of(around.layer), *(frame.name for frame in around.frames)]
    return _INWARD.join(steps) or None


def _cells_of_frames(frames: Sequence[Frame]) -> tuple[RecordValue, ...]:
    """The cells of a row that its frames give: ``inside``, operator, its kind, input shapes, dtypes, source lines."""
    if not frames:
        return (None, BETWEEN_OPS, FrameKind.OP, None, None, None)
    inside = _INWARD.join(frame.name for frame in frames)
    kind, name, signature = frames[-1]
    if signature is None:
        return (inside, name, kind, None, None, None)
    source = "\n".join(signature.stack) or None
    return (inside, name, kind, _as_json(signature.shapes), _as_json(signature.dtypes), source)
