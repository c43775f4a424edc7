"""The compiled report: overhead and kernels of each region of torch.compile, and its graph breaks."""

from __future__ import annotations

from collections.abc import Iterator

from torchprof.analyze.compiled_regions import Compiled, PhaseOfRegion, compiled_in, python_name
from torchprof.analyze.report import Part, ReportTable, name_of_layer, printable, report, spaced, stacked, time_cell
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.analyze.steps import FIRST_CALL, LATER_CALLS, NO_GRAD, time_parts
from torchprof.errors import some
from torchprof.run.formats import UNKNOWN, Cell, format_number, format_time, short_time
from torchprof.run.measures import Cost
from torchprof.run.meta import Compilation
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE


@report("compiled", "torch.compile: regions, overhead, graph breaks, compilation", answers="why")
def compiled(run: Run) -> Part:
    """Every region of torch.compile that ran: where it is, its calls, and its times.

    *Overhead* is the time from entering the region to the compiled graph; *Guards* is the part of it that checks
    whether the compiled code is valid. *Graph* is the time in calls of the graph: kernels, and code that launches them.
    *Kernels* is the time of the kernels on a device, of any layer. *Beside* is work in the region that is not compiled,
    such as code between two graphs. A region nested in another one, as after a graph break, is not included in the
    figures of the outer region.

    A second table has each time that torch.compile compiled one of these regions, and all that it compiled during the
    recording: how long its parts took, and why. *Tracing* is Dynamo, *Autograd* is AOTAutograd, *Lowering* is Inductor,
    and *Kernels* are the compilers of Triton and C++. torch keeps the last 64.

    Below: each graph break, with the line and torch's reason; the time torch.compile took to compile; and, if layers
    were requested, the shares of kernel time that belong to one layer, to several layers, or to unknown ones.
    """
    usage = compiled_in(run)
    uses = usage.uses
    sentences: list[Part] = [*_breaks(run, usage), *_times(run, usage), *about_sums(run)]
    sentences.append(warnings_below(run, without=["graph_breaks"]))  # the table has their reasons
    history = _history(run)
    if not uses:
        return stacked(["No code of torch.compile ran during the recording.", *history, *sentences])
    phases = [phase for phase in (FORWARD, RECOMPUTE, BACKWARD) if any(phase in use.phases for use in uses)]
    parts = ["overhead", "graph", *(["kernels"] if "device_ns" in run.meta.requested else []), "beside"]
    headings = ["Region", "Module", "Code", "Calls", "Guards"]
    headings += [(part if phase == FORWARD else f"{phase} {part}").capitalize() for phase in phases for part in parts]
    table = []
    for use in uses:
        guards = sum((part.guards for part in use.phases.values()), Cost())
        code = UNKNOWN if use.known is None else printable(python_name(use.known))
        cells: list[Cell] = [printable(use.name), name_of_layer(run, use.layer), code, format_number(use.calls)]
        cells.append(format_time(guards.cpu_ns))
        for phase in phases:
            texts = _texts(run, use.phases[phase]) if phase in use.phases else {}
            cells += [texts.get(part, "") for part in parts]
        table.append(cells)
    return spaced([stacked([ReportTable.of_cells(headings, table), *history]), stacked(sentences)])


def compiled_in_short(run: Run) -> str:
    """What torch.compile did, in one line: how much of the forward its code is, and its own work outside of its
    kernels; "" if no compiled code ran."""
    usage = compiled_in(run)
    field = "device_ns" if "device_ns" in run.meta.measured else "cpu_ns"
    graphs = {use.name for use in usage.uses if any(part.graph for part in use.phases.values())}
    kernels = sum(getattr(part.graph, field) for use in usage.uses for part in use.phases.values())
    if not graphs or "cpu_ns" not in run.meta.measured:
        return ""
    parts = time_parts(run, field)
    said = f"Compiled: {len(graphs)} graph{'s' * (len(graphs) > 1)}"
    if field == "device_ns":
        whole = sum(parts.values())
        return f"{said}, {_share(kernels, whole)} of the {run.meta.device_heading} time in kernels of their calls."
    forward = [use.phases[FORWARD] for use in usage.uses if FORWARD in use.phases]
    inside = sum(part.overhead.cpu_ns + part.graph.cpu_ns for part in forward)
    whole = sum(parts.get(name, 0) for name in (FORWARD, NO_GRAD, FIRST_CALL, LATER_CALLS))
    own = sum(part.overhead.cpu_ns for use in usage.uses for part in use.phases.values())
    verdict = ", more than that: it gains little" if own > kernels else ""
    return (
        f"{said}, {_share(inside, whole)} of the forward. {short_time(kernels)} of {short_time(kernels + own)} are in "
        f"graphs, {short_time(own)} are torch.compile's own work{verdict}."
    )


def _share(part: int, whole: int) -> str:
    return f"{min(part / whole, 1):.0%}" if whole else UNKNOWN


def _history(run: Run) -> Iterator[Part]:
    every = [(meta, compilation) for meta in run.metas for compilation in meta.compilations]
    if not every:
        return
    has_ranks, knows_kernels = len(run.metas) > 1, any(compilation.kernels_ns is not None for _, compilation in every)
    headings = ["Compiled", *(["Rank"] if has_ranks else []), "Phase", "When", "Time", "Tracing", "Autograd"]
    headings += ["Lowering", *(["Kernels"] if knows_kernels else []), "Why"]
    table = []
    for meta, compilation in every:
        when = f"step {(compilation.step or 0) + 1}" if meta.marked_steps else "recorded"
        cells: list[Cell] = [printable(compilation.name), *([str(meta.rank)] if has_ranks else []), compilation.phase]
        cells.append("before" if compilation.step is None else when)
        times = compilation.ns, compilation.tracing_ns, compilation.autograd_ns, compilation.lowering_ns
        cells += [*map(format_time, times), *([time_cell(compilation.kernels_ns)] if knows_kernels else [])]
        table.append([*cells, printable(_why(compilation))])
    yield ""
    yield ReportTable.of_cells(headings, table)


def _why(compilation: Compilation) -> str:
    if compilation.failure:
        return f"failed: {compilation.failure}" + (f"; {compilation.reason}" if compilation.reason else "")
    is_first = compilation.name.rpartition("/")[2] == "0"
    why = compilation.reason or ("first version" if is_first else UNKNOWN)
    if compilation.phase == BACKWARD:  # the reason is that of its forward
        why = "first backward"
    return f"{why} (from cache)" if compilation.from_cache else why


def _texts(run: Run, part: PhaseOfRegion) -> dict[str, Cell]:
    times = {"overhead": part.overhead.cpu_ns, "graph": part.graph.cpu_ns, "beside": part.beside.cpu_ns}
    kernels_ns = part.graph.device_ns if "device_ns" in run.meta.measured else None
    return {name: time_cell(ns) for name, ns in (times | {"kernels": kernels_ns}).items()}


def _breaks(run: Run, usage: Compiled) -> Iterator[str]:
    """A sentence for each graph break that occurred."""
    for region, uses in usage.breaks.items():
        why = f": {region.break_reason}" if region.break_reason else ""
        calls = sum(use.calls for use in uses)
        modules = some([*dict.fromkeys(run.layers.name_of(use.layer) for use in uses)])
        names = some([*dict.fromkeys(use.name for use in uses)])
        times = f"{calls} time{'s' if calls > 1 else ''}"
        yield printable(f"Graph break in {modules} at {region.break_place}, after region {names}, {times}{why}")


def _times(run: Run, usage: Compiled) -> Iterator[str]:
    """The time of compiling, and the shares of kernel time by layers."""
    if usage.compiled:
        times = f"{usage.compiled} time{'s' if usage.compiled > 1 else ''}"
        yield f"torch.compile compiled {times}: {format_time(usage.compiling.cpu_ns)}."
    for phase, shares in usage.shares.items():
        of_one_layer, of_several, unknown_times = shares.times(run)
        times_of = of_one_layer, of_several, sum(unknown_times.values())
        if whole := sum(times_of):
            of_one, several, unknown = (f"{time / whole:.1%}" for time in times_of)
            yield (
                f"Of {format_time(whole)} in kernels of the {phase} phase {of_one} are of one layer each, {several} of "
                f"several at once or between layers, and {unknown} not attributable."
            )
