"""The compiled report: overhead and kernels of each region of torch.compile, and its graph breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torchprof.analyze.compiled_regions import Compiled, PhaseOfRegion, RegionUse, compiled_in, python_name
from torchprof.analyze.report import Part, ReportTable, name_of_layer, report, spaced, stacked, time_cell
from torchprof.analyze.sentences import about_sums, warnings_below
from torchprof.analyze.steps import FIRST_CALL, LATER_CALLS, NO_GRAD, time_parts
from torchprof.errors import printable, some
from torchprof.run.formats import UNKNOWN, Cell, format_number, format_time, short_time
from torchprof.run.measures import Cost
from torchprof.run.meta import Compilation
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, RECOMPUTE


@report("compiled", "torch.compile: regions, overhead, graph breaks, compilation", answers="why")
def compiled(run: Run) -> Part:
    """Every region of torch.compile that ran, with its times; what torch.compile compiled, how long that took, and why;
    and below, each graph break, and how much of the kernel time belongs to one layer. docs/compile.md describes the
    columns.

    A region nested in another one, as after a graph break, is not included in the figures of the outer region.
    """
    usage = compiled_in(run)
    sentences: list[Part] = [*_about_breaks(run, usage)]
    if usage.compiled:
        sentences.append(f"torch.compile compiled {_times(usage.compiled)}: {format_time(usage.compiling.cpu_ns)}.")
    sentences += [*_about_owners(run, usage), *about_sums(run)]
    sentences.append(warnings_below(run, without=["graph_breaks"]))  # the sentences on them have their reasons
    compilations = _table_of_compilations(run)
    if not usage.uses:
        return stacked(["No code of torch.compile ran during the recording.", *compilations, *sentences])
    return spaced([stacked([_table_of_regions(run, usage.uses), *compilations]), stacked(sentences)])


def _table_of_regions(run: Run, uses: Sequence[RegionUse]) -> ReportTable:
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
            times = _times_by_part(run, use.phases[phase]) if phase in use.phases else {}
            cells += [times.get(part, "") for part in parts]
        table.append(cells)
    return ReportTable.of_cells(headings, table)


def _times_by_part(run: Run, region: PhaseOfRegion) -> dict[str, Cell]:
    times = {"overhead": region.overhead.cpu_ns, "graph": region.graph.cpu_ns, "beside": region.beside.cpu_ns}
    kernels_ns = region.graph.device_ns if "device_ns" in run.meta.measured else None
    return {part: time_cell(ns) for part, ns in (times | {"kernels": kernels_ns}).items()}


def _table_of_compilations(run: Run) -> Iterator[Part]:
    """An empty line and the table of what torch.compile compiled; nothing if that is unknown."""
    compilations = [(meta, compilation) for meta in run.metas for compilation in meta.compilations]
    if not compilations:
        return
    has_ranks = len(run.metas) > 1
    knows_kernels = any(compilation.kernels_ns is not None for _, compilation in compilations)
    headings = ["Compiled", *(["Rank"] if has_ranks else []), "Phase", "When", "Time", "Tracing", "Autograd"]
    headings += ["Lowering", *(["Kernels"] if knows_kernels else []), "Why"]
    table = []
    for meta, compilation in compilations:
        when = f"step {(compilation.step or 0) + 1}" if meta.marked_steps else "recorded"
        cells: list[Cell] = [printable(compilation.name), *([str(meta.rank)] if has_ranks else []), compilation.phase]
        cells.append("before" if compilation.step is None else when)
        times = compilation.ns, compilation.tracing_ns, compilation.autograd_ns, compilation.lowering_ns
        cells += [*map(format_time, times), *([time_cell(compilation.kernels_ns)] if knows_kernels else [])]
        table.append([*cells, printable(_why_compiled(compilation))])
    yield ""
    yield ReportTable.of_cells(headings, table)


def _why_compiled(compilation: Compilation) -> str:
    if compilation.failure:
        return f"failed: {compilation.failure}" + (f"; {compilation.reason}" if compilation.reason else "")
    why = compilation.reason or ("first version" if compilation.is_first_version else UNKNOWN)
    if compilation.phase == BACKWARD:  # its reason is that of its forward
        why = "first backward"
    return f"{why} (from cache)" if compilation.from_cache else why


def _about_breaks(run: Run, usage: Compiled) -> Iterator[str]:
    """A sentence for each graph break that occurred."""
    for region, uses in usage.breaks.items():
        why = f": {region.break_reason}" if region.break_reason else ""
        layers = some([*dict.fromkeys(run.layers.name_of(use.layer) for use in uses)])
        names = some([*dict.fromkeys(use.name for use in uses)])
        times = _times(sum(use.calls for use in uses))
        yield printable(f"Graph break in {layers} at {region.break_place}, after region {names}, {times}{why}")


def _about_owners(run: Run, usage: Compiled) -> Iterator[str]:
    """The shares of kernel time that belong to one layer, to several, and to unknown ones."""
    for phase, shares in usage.shares.items():
        of_one_layer, of_several_layers, unknown_times = shares.times(run)
        times = of_one_layer, of_several_layers, sum(unknown_times.values())
        if whole := sum(times):
            of_one, of_several, unknown = (f"{ns / whole:.1%}" for ns in times)
            yield (
                f"Of {format_time(whole)} in kernels of the {phase} phase {of_one} are of one layer each, {of_several} "
                f"of several at once or between layers, and {unknown} not attributable."
            )


def _times(count: int) -> str:
    return f"{count} time{'s' if count > 1 else ''}"


# In one line, on the first screen


def compiled_in_short(run: Run) -> str:
    """What torch.compile did, in one line: how much of the forward its code is, and its own work outside of its
    kernels; "" if no compiled code ran."""
    uses = [use for use in compiled_in(run).uses if use.layer >= 0]  # others are of an optimizer, or of the loop
    graphs = {use.name for use in uses if any(region.graph for region in use.phases.values())}
    if not graphs or "cpu_ns" not in run.meta.measured:
        return ""
    count = f"Compiled: {len(graphs)} graph{'s' * (len(graphs) > 1)}"
    in_phases = [region for use in uses for region in use.phases.values()]
    if "device_ns" in run.meta.measured:
        share = _share(sum(region.graph.device_ns for region in in_phases), sum(time_parts(run, "device_ns").values()))
        return f"{count}, {share} of the {run.meta.device_heading} time in kernels of their calls."
    in_forward = [use.phases[FORWARD] for use in uses if FORWARD in use.phases]
    compiled_ns = sum(region.overhead.cpu_ns + region.graph.cpu_ns for region in in_forward)
    parts = time_parts(run, "cpu_ns")
    forward_ns = sum(parts.get(name, 0) for name in (FORWARD, NO_GRAD, FIRST_CALL, LATER_CALLS))
    graphs_ns = sum(region.graph.cpu_ns for region in in_phases)
    overhead_ns = sum(region.overhead.cpu_ns for region in in_phases)
    verdict = ", more than that: it gains little" if overhead_ns > graphs_ns else ""
    return (
        f"{count}, {_share(compiled_ns, forward_ns)} of the forward. {short_time(graphs_ns)} of "
        f"{short_time(graphs_ns + overhead_ns)} are in graphs, {short_time(overhead_ns)} are torch.compile's own "
        f"work{verdict}."
    )


def _share(part: int, whole: int) -> str:
    return f"{min(part / whole, 1):.0%}" if whole else UNKNOWN
