"""The reports on layers: "tree" with a row for each, "calls" with the times of its calls, "types" with a row for each
class, and "summary" with shapes, MACs and the figures of models. And the table of ``torchprof.benchmark``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import TYPE_CHECKING, NamedTuple

from torchprof.analyze.columns import (
    CALLS,
    MEASURE_OF,
    Column,
    column_called,
    columns_of,
    default_column,
    hot_path_column,
)
from torchprof.analyze.figures import Figures, figures_of_layers, summed_figures, varying_calls
from torchprof.analyze.layers import all_entries, down_to, entries_of, keep_top, mark_hot, sort_entries, table_rows
from torchprof.analyze.metrics import dtype_of_most_macs, peak_of
from torchprof.analyze.ops import SUM_OF_PHASES, Whole, figure_columns, largest_by, line_of_figures, ranked
from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    branches,
    kept_with_run,
    name_of_layer,
    report,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import about_flops, about_sums, throughput, warnings_below
from torchprof.errors import printable
from torchprof.run.formats import (
    UNKNOWN,
    Cell,
    Figure,
    ReportCell,
    format_count,
    format_memory,
    format_number,
    format_rate,
    format_share,
    format_time,
    ranks_in_words,
)
from torchprof.run.groups import sums_by_key
from torchprof.run.layers import Layer
from torchprof.run.measures import Cost, SampleKey
from torchprof.run.meta import Peak, sum_if_known
from torchprof.run.run import Node, Run
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE, FrameKind

if TYPE_CHECKING:
    from torchprof.profile.benchmark import BenchmarkResult, Latency


@report("tree", "every layer, with self and total of all that was measured", answers="time", suffix=".txt")
def tree(
    run: Run,
    *,
    show_events: bool = False,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    percent: bool = False,
    hot: bool = False,
    color: bool = False,
) -> Part:
    """The module tree with a row for each layer.

    The user's ranges (``record_function``) are rows marked as labels below the layer that opened them. ``show_events``
    adds below each layer the operators that ran directly in it; those of backward and recompute are marked. ``top``:
    the number of layers, those with the largest self in the column ``sort_by`` (default: CPU time, else FLOPs).
    ``percent`` adds to each time its share of all time of that phase.

    ``hot`` orders siblings by their total in one column, and marks the path of ``mark_hot``. The column is ``sort_by``,
    else device time if any was measured, else CPU time, else FLOPs. ``color`` colors each figure by its share of the
    column's sum, with colors of 256: not with ``tablefmt``, whose output is for other programs.

    Raises TorchprofError for an unknown column, and for a hottest path by a column without totals.
    """
    columns = columns_of(run, show_events)
    order = column_called(sort_by, columns) if sort_by is not None else None
    entries = entries_of(run, show_events)
    figures = [entry.figures for entry in all_entries(entries)]
    sentences: list[str] = []
    if hot:
        order = hot_path_column(columns, figures, order)
        sentences += mark_hot(entries, order)
    if order is not None:
        sort_entries(entries, order)
    down_to(entries, depth)
    if top is not None:
        sentences += keep_top(entries, order or default_column(columns), top)
    wholes = [column.whole(figures) for column in columns]
    shares = wholes if percent else [None] * len(columns)
    rows = table_rows(entries, lambda entry: map(Column.text, columns, repeat(entry.figures), shares))
    if any(frame.kind == FrameKind.LABEL for within in run.rows.within for around in within for frame in around.frames):
        sentences.append("The total of a label holds the layers called in it, which have rows of their own, too.")
    headings = ["Module", *(column.heading for column in columns)]
    table = ReportTable(headings, rows, wholes=[None, *wholes], in_color=color)
    return spaced([table, stacked([*sentences, *about_flops(run), *about_sums(run), warnings_below(run)])])


@report("calls", "single calls of each layer: the first, the median, the spread", answers="time")
def calls(run: Run, *, depth: int | None = None) -> Part:
    """CPU time of a forward call of each layer that was called, its child layers included.

    The first call has a column of its own: it often includes allocations, kernel loading and caches that later calls
    reuse. The median and the 5th to 95th percentile are over all calls (of more, a uniform sample of 256).
    """
    headings = ["Module", CALLS, "First call", "Median", "P5 to P95", "Min", "Max"]
    table: list[list[Cell]] = []
    for key, spread in sorted(run.samples.items()):
        is_of_calls = key.phase == FORWARD and key.measure == "cpu_ns"
        if is_of_calls and (depth is None or len(run.layers[key.layer].path) <= depth + 1):
            p5, p95 = spread.quantile(0.05), spread.quantile(0.95)
            middle = ReportCell(f"{format_time(p5)} to {format_time(p95)}", p95, "ns", ids={"p5": p5, "p95": p95})
            cells = [format_number(spread.count), format_time(spread.first), format_time(spread.median), middle]
            name = name_of_layer(run, key.layer)
            table.append([name, *cells, format_time(spread.min), format_time(spread.max)])
    return ReportTable.of_cells(headings, table) if table else "No call of a layer was recorded in this run."


@report("types", "all layers of a class together: Linear, BatchNorm2d, …", answers="time")
def types(run: Run, *, sort_by: str | None = None, top: int | None = None, phase: str | None = None) -> Part:
    """A row for each class of layers: all ``BatchNorm2d`` together, the largest first.

    *Self* adds up over all layers of the class, so the rows add up to the whole model. *Total* has the layers below,
    too; a layer inside another one of its class counts once. Shares are of all layers. A layer that was never called
    adds nothing.

    Without ``phase``, all phases are added up. The order is by self time, of the device if it was measured. Raises
    TorchprofError for an unknown column.
    """
    phases = run.phases() if phase is None else [phase]
    columns = figure_columns(run)
    lines = [
        line_of_figures({"Type": [printable(name)], "Layers": [format_number(layers)]}, figures, phases)
        for name, figures, layers in by_class(run)
    ]
    own = sum((line.cost(SUM_OF_PHASES, is_self=True) for line in lines), Cost())
    texts = ["Type", "Layers"] if lines else ["Type"]
    order = largest_by(columns, of_self=True)
    whole = Whole("what all layers took", own, own)
    return ranked(run, texts, lines, columns, order, whole, sort_by=sort_by, top=top)


UNKNOWN_CLASS = "(unknown)"


class Group(NamedTuple):
    """Layers of one class (``UNKNOWN_CLASS`` in a trace without a model), the sum of their figures, and how many they
    are. Self costs add up; a total counts a layer only if no other of the group is above it."""

    name: str
    figures: Figures
    layers: int


@kept_with_run
def by_class(run: Run) -> list[Group]:
    """A group for each class of layers, in the order of the model."""
    groups: dict[str, dict[tuple[str, ...], Figures]] = {}
    for path, figures in figures_of_layers(run, run.phases()).items():
        if figures.total:  # blank for layers that were not selected
            kind = run.layers[run.layers.index_of[path]].kind or UNKNOWN_CLASS
            groups.setdefault(kind, {})[path] = figures
    return [
        Group(kind, summed_figures([*members.values()], [*members]), len(members)) for kind, members in groups.items()
    ]


# The summary

_SHAPES_SHOWN = 3  # of one layer

_Path = tuple[str, ...]
_Varying = Mapping[_Path, bool | None]  # what ``varying_calls`` returns


@report("summary", "every layer with shapes and parameters; latency, FLOPs and % of peak of the model", answers="fit")
def summary(run: Run, *, depth: int | None = None) -> Section:
    """Every layer with its type, depth, shapes, parameters and MACs; below the table, the figures of each model.

    Shapes are those of the first forward call, marked "first" if later calls may have had other shapes. MACs and FLOPs
    are for one forward call of the model, marked "mean" if the calls may have had different shapes. Parameters and MACs
    of a layer include the layers below it.

    The figures: *Model size* is the bytes of the parameters. *Latency* is the median CPU time of a forward call under
    the profiler; with a device it is unknown, because the device runs asynchronously: ``torchprof.benchmark`` measures
    it. *Throughput* is the first dimension of the model's first input over the latency; it is known if that input had
    the same shape in all calls. *FLOP/s* are the FLOPs of all forward calls over the device time if that was recorded,
    else over the CPU time. *% of peak (forward)* is FLOP/s over the peak that ``torchprof.peak`` measured on this
    device with matrix products, for the type of most MACs. *Activations* are the bytes of the outputs of layers that
    call no other layer, in one forward call; they are known if each of these layers was called once, or always on the
    same shapes. *Peak memory* is the peak above the start of the block. A run of several ranks shows the lowest rank.
    """
    sentences: list[Part] = [*_about_processors(run), warnings_below(run)]
    if len(run.metas) > 1:
        ranks = ranks_in_words(meta.rank for meta in run.metas)
        sentences.insert(0, f"All this is rank {run.meta.rank}'s, of {ranks}: run.of_rank(N) has what is rank N's.")
        run = run.of_rank(run.meta.rank)
    if not (models := [run.tree(FORWARD, root) for root in range(len(run.roots))]):
        sections: list[Part] = ["This run has no layers: all its work is outside of them."]
    else:
        calls_vary, work_varies = varying_calls(run), varying_calls(run, of_model=True)
        figures = figures_of_layers(run, run.phases())
        sections = [_table(run, models, figures, calls_vary, work_varies, depth=depth)]
        sections += [_about_model(run, model, figures[model.layer.path], work_varies) for model in models]
        sentences = [*_about_shapes(run, calls_vary, work_varies), *_about_missing(run), *sentences]
    return spaced([*sections, stacked(sentences)])


def _table(
    run: Run,
    models: Sequence[Node],
    figures: Mapping[_Path, Figures],
    calls_vary: _Varying,
    work_varies: _Varying,
    *,
    depth: int | None,
) -> ReportTable:
    """The table of layers."""
    params = run.total_params()

    def below(node: Node) -> list[Node]:
        return node.children if depth is None or len(node.layer.path) <= depth else []

    def cells(node: Node, calls: int) -> list[Cell]:
        layer = node.layer
        return [
            layer.kind,
            format_number(len(layer.path) - 1),
            shapes_in_words(layer.input_shapes, calls_vary[layer.path]),
            shapes_in_words(layer.output_shapes, calls_vary[layer.path]),
            _if_known(params[layer.path], format_count),
            _count(run, figures[layer.path], "macs", calls, work_varies[layer.path]),
        ]

    table = [
        TableRow([ReportCell(printable(node.layer.path[-1]), node.layer.name), *cells(node, model.calls)], lead)
        for model in models
        for lead, node in branches([model], below)
    ]
    return ReportTable(["Module", "Type", "Depth", "Input shape", "Output shape", "Params", "MACs"], table)


def _about_model(run: Run, model: Node, figures: Figures, work_varies: _Varying) -> str:
    """The name of a model and below it its figures, a line each."""
    path = model.layer.path
    lines = dict(_figures(run, model, run.total_params()[path], figures, work_varies[path]))
    width = max(map(len, lines))
    return "\n".join([printable(model.layer.name), *(f"  {name:<{width}}  {value}" for name, value in lines.items())])


def _about_processors(run: Run) -> Iterator[str]:
    """The CPU time of the process: the times of layers are elapsed times."""
    meta = run.meta
    if meta.process_cpu_ns is not None and meta.wall_ns and len(run.metas) == 1:
        used, wall = meta.process_cpu_ns, meta.wall_ns
        yield f"CPU time of the process: {format_time(used)} in {format_time(wall)}, {used / wall:.0%} of one CPU."


def _about_shapes(run: Run, *varying: _Varying) -> Iterator[str]:
    """A sentence that explains "first" and "mean", if they are shown."""
    states = {state for of_layers in varying for state in of_layers.values()}
    shown = any(layer.input_shapes or layer.output_shapes for layer in run.layers) or "macs" in run.meta.measured
    if shown and states != {False} and states:
        known = "Shapes vary over calls" if True in states else "It is unknown whether shapes vary over calls"
        yield f'{known}: "first" are those of the first call, "mean" is of all forward calls of the model.'


def _about_missing(run: Run) -> Iterator[str]:
    """A sentence: which measures are unknown because they were not requested, and how to request them."""
    options = {"flops": "MACs and FLOPs (with_flops=True, --flops)"}
    options["cpu_allocated"] = "memory (profile_memory=True, --memory)"
    missing = [option for name, option in options.items() if name not in run.meta.requested]
    if missing and "cpu_ns" in run.meta.requested:
        yield f"Not recorded: {' and '.join(missing)}."


def _figures(
    run: Run, root: Node, params: int | None, figures: Figures, varies: bool | None
) -> Iterator[tuple[str, Cell]]:
    """The figures of a model by name. ``varies``: whether its work varies from call to call; None: unknown."""
    yield from _of_parameters([node.layer for node in root.walk()], params)
    yield "MACs", _count(run, figures, "macs", root.calls, varies) or UNKNOWN
    yield "FLOPs", _count(run, figures, "flops", root.calls, varies) or UNKNOWN
    for phase in (BACKWARD, RECOMPUTE):
        if phase in run.phases():
            yield f"{phase.capitalize()} FLOPs", _count(run, figures, "flops", root.calls, varies, phase) or UNKNOWN
    yield from _of_time(run, root, figures, varies)
    yield "Activations", _if_known(_activations(run, root), format_memory)
    devices = (memory for memory in run.memory if memory.peak_bytes)
    bound = "≥ " if run.passes else ""  # of the recorded passes
    peaks = ", ".join(f"{bound}{format_memory(memory.peak_bytes)} on {memory.device}" for memory in devices)
    yield "Peak memory above start", peaks or UNKNOWN


def _of_parameters(layers: Sequence[Layer], params: int | None) -> Iterator[tuple[str, Cell]]:
    yield "Params", _if_known(params, format_count)
    yield "Trainable params", _if_known(sum_if_known(*(layer.trainable_params for layer in layers)), format_count)
    dtypes = sums_by_key(of_dtype for layer in layers for of_dtype in layer.dtype_bytes)
    sizes = ", ".join(f"{dtype} {format_memory(size)}" for dtype, size in dtypes.most_common())
    size = format_memory(sum(dtypes.values()))
    yield "Model size", UNKNOWN if params is None else f"{size} ({sizes})" if sizes else size
    yield "Buffers", _if_known(sum_if_known(*(layer.buffer_bytes for layer in layers)), format_memory)


def _of_time(run: Run, root: Node, figures: Figures, varies: bool | None) -> Iterator[tuple[str, Cell]]:
    on_device = "device_ns" in run.meta.requested
    spread = run.samples.get(SampleKey(run.layers.index(root.layer), FORWARD, run.meta.rank, "cpu", "cpu_ns"))
    latency = spread.median if spread is not None and not on_device else None
    over = " (over calls of different shapes)" if varies else ""
    yield "Latency (median)", _if_known(latency, lambda ns: f"{format_time(ns)}{over}")
    in_all_calls = root.calls <= 1 or root.layer.same_shapes or (root.layer.same_shapes is None and varies is False)
    yield "Throughput", (in_all_calls and throughput(run, run.layers.index(root.layer))) or UNKNOWN
    measured = {"flops", "device_ns" if on_device else "cpu_ns"} <= set(run.meta.measured)
    achieved = figures.rate(FORWARD, on_device, measured)
    yield "FLOP/s (mean)", achieved.text(format_count) or UNKNOWN
    peak = peak_of(run.meta, dtype_of_most_macs(run, root.layer.path[0]))
    yield "% of peak (forward)", (peak and achieved.text(lambda per_s: _share_of_peak(per_s, peak))) or UNKNOWN


def _activations(run: Run, root: Node) -> int | None:
    """The mean bytes of the outputs of the innermost layers in a forward call of the model; None: unknown."""
    if run.meta.paths is not None or not root.calls:
        return None  # the outputs of layers that were not selected were not recorded
    called = [node for node in root.walk() if node.calls]
    paths = {node.layer.path for node in called}
    called_in = dict(zip(run.layers.index_of, run.layers.roll_up([layer.path in paths for layer in run.layers])))
    shapes = _input_shapes(run)
    are_same = {path: all(len(of_op) == 1 for of_op in by_op.values()) for path, by_op in shapes.items()}
    total = 0
    for node in called:
        if called_in[node.layer.path] > 1:
            continue
        is_same = are_same.get(node.layer.path)
        if is_same is None:  # its ops recorded no shapes (an embedding): as others, if called once in each model call
            is_same = bool(are_same) and all(are_same.values()) and node.calls == root.calls
        if node.layer.output_bytes is None or not (is_same or node.calls == 1):
            return None
        total += node.layer.output_bytes * node.calls
    return total // root.calls


def _input_shapes(run: Run) -> dict[tuple[str, ...], dict[str, set[tuple[object, ...]]]]:
    """The distinct input shapes of operators directly in the forward of layers: by path of the layer, then operator."""
    shapes: dict[tuple[str, ...], dict[str, set[tuple[object, ...]]]] = {}
    for layer, chain in run.rows.summed(("layer", "frames"), "calls", phase=FORWARD):
        frames = run.rows.frames[chain]
        if layer >= 0 and len(frames) == 1 and frames[0].signature is not None:
            of_layer = shapes.setdefault(run.layers[layer].path, {})
            of_layer.setdefault(frames[0].name, set()).add(frames[0].signature.shapes)
    return shapes


def _if_known(value: float | None, text: Callable[[float], Cell]) -> Cell:
    return UNKNOWN if value is None else text(value)


def _count(run: Run, figures: Figures, field: str, calls: int, varies: bool | None, phase: str = FORWARD) -> Cell:
    """The cell of MACs or FLOPs for one forward call of the model; blank for layers that were not selected."""
    column = Column(field, "cost", phase, MEASURE_OF[field], measured=field in run.meta.measured and calls > 0)
    count = column.figure(figures)
    mean = "mean" if varies is not False and count.value else ""
    return Figure(count.value / max(calls, 1), count.bound, mean).text(format_count)


def shapes_in_words(shapes: tuple[tuple[int, ...], ...], vary: bool | None) -> str:
    """Shapes as "[8, 3, 224, 224]"; "first [8, …]" unless it is known that they do not vary; "" if there are none."""
    if not shapes:
        return ""
    shown = [str(list(shape)).replace("-1", "?") for shape in shapes[:_SHAPES_SHOWN]]
    text = ", ".join([*shown, *["…"] * (len(shapes) > _SHAPES_SHOWN)])
    return text if vary is False else f"first {text}"


def _share_of_peak(achieved: float, peak: Peak) -> ReportCell:
    threads = f", {peak.threads} thread{'s' if peak.threads > 1 else ''}" if peak.threads else ""
    share = format_share(achieved / peak.flops_per_s)
    of = f"{format_count(peak.flops_per_s)} FLOP/s ({peak.dtype} product on {peak.device}{threads})"
    return share.written(f"{share} of {of}")


# The table of ``torchprof.benchmark``


def benchmark_table(result: BenchmarkResult) -> Section:
    """The result of ``torchprof.benchmark`` as text."""
    headings = ["Batch size", "Mean ± std", "Median", "P95", "Min", "Max", "Samples/s"]
    sentences = [
        f"{result.model}, {result.step} on {result.device}: {result.repeat} calls at each batch size, "
        f"after {result.warmup} that were not timed.",
        *(f"Batch size {row.batch_size} did not fit in memory: {row.error}" for row in result.rows if row.error),
        *result.warnings,
    ]
    return stacked([ReportTable.of_cells(headings, [_cells_of_batch_size(row) for row in result.rows]), "", *sentences])


def _cells_of_batch_size(row: Latency) -> list[Cell]:
    mean, std, rate = row.mean, row.std, row.samples_per_s
    if mean is None:
        return [format_number(row.batch_size), "out of memory", *[UNKNOWN] * 5]
    return [
        format_number(row.batch_size),
        format_time(mean * 1e9).written(f"{_time(mean)} ± {_time(std)}"),
        *(_time(value) for value in (row.median, row.p95, row.min, row.max)),
        _if_known(rate, format_rate),
    ]


def _time(seconds: float | None) -> Cell:
    return UNKNOWN if seconds is None else format_time(seconds * 1e9)
