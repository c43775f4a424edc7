"""The table of compiled regions: what of each is overhead and what are kernels, and where its graph breaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath

from torchprof.analyze.compiled import RESUMED, Compiled, PhaseOfRegion, RegionUse, compiled_in
from torchprof.errors import some
from torchprof.reports import report
from torchprof.reports.notes import about_sums, warnings_of
from torchprof.reports.text import draw, printable
from torchprof.run.cost import UNKNOWN, Cost, format_time
from torchprof.run.meta import CompiledRegion
from torchprof.run.run import Run
from torchprof.run.words import BACKWARD, FORWARD, NOT_SELECTED_NAME, OUTSIDE_NAME, RECOMPUTE


@report("compiled")
def compiled(run: Run, *, tablefmt: str | None = None) -> str:
    """Every region that torch.compile made and that ran: where, how often, and what it took.

    *Overhead* is the time that leads to the compiled graph, *Guards* the part of it in which it was found out whether
    the compiled code may run. *Graph* is the time in the calls of the graph: its kernels, and what launches them;
    *Kernels* on a device their time there, whatever layer they belong to. *Beside* is what ran in the region without
    being compiled, as between two graphs. A region inside of another, as after a graph break, is in none of that one's
    figures. Below: each graph break, with the line and torch's reason; what torch.compile took to compile; and how much
    of the kernels' time belongs to one layer, to several at once, or to unknown ones, where layers were asked for.

    ``tablefmt`` is any of tabulate's formats. Raises TorchprofError for an unknown one.
    """
    found = compiled_in(run)
    uses = found.uses
    notes = [*_breaks(run, found), *_times(run, found), *about_sums(run)]
    notes += [*map(printable, warnings_of(run, without=["graph_breaks"]))]  # why is said here
    if not uses:
        return "\n".join(["No code of torch.compile's ran while this was recorded.", *notes])
    phases = [phase for phase in (FORWARD, RECOMPUTE, BACKWARD) if any(phase in use.phases for use in uses)]
    parts = ["overhead", "graph", *(["kernels"] if "device_ns" in run.meta.requested else []), "beside"]
    headings = ["Region", "Module", "Code", "Calls", "Guards"]
    headings += [(part if phase == FORWARD else f"{phase} {part}").capitalize() for phase in phases for part in parts]
    table = []
    for use in uses:
        guards = sum((part.guards for part in use.phases.values()), Cost())
        cells = [use.name, _module(run, use), UNKNOWN if use.known is None else _place(use.known), str(use.calls)]
        cells.append(format_time(guards.cpu_ns))
        for phase in phases:
            texts = _texts(run, use.phases[phase]) if phase in use.phases else {}
            cells += [texts.get(part, "") for part in parts]
        table.append([*map(printable, cells)])
    text = draw(headings, table, tablefmt)
    return "\n".join([text, *([""] if notes else []), *notes])


def _texts(run: Run, part: PhaseOfRegion) -> dict[str, str]:
    is_measured = "device_ns" in run.meta.measured
    return {
        "overhead": format_time(part.overhead.cpu_ns),
        "graph": format_time(part.graph.cpu_ns),
        "kernels": format_time(part.graph.device_ns) if is_measured else UNKNOWN,
        "beside": format_time(part.beside.cpu_ns),
    }


def _module(run: Run, use: RegionUse) -> str:
    if use.layer >= 0:
        return run.layers[use.layer].name
    return OUTSIDE_NAME if use.layer == -1 else NOT_SELECTED_NAME


def _place(region: CompiledRegion) -> str:
    """The function, and where it is; the rest of one after a graph break as that."""
    owner, _, name = region.function.rpartition(".")
    if name.startswith(RESUMED):
        name = name.removeprefix(RESUMED).rpartition("_at_")[0]
    function = f"{owner}.{name}" if owner else name
    file = PurePath(region.file).name
    return f"{function} ({file}:{region.line})" if file else f"{function} (line {region.line})"


def _breaks(run: Run, found: Compiled) -> Iterator[str]:
    """A sentence for each graph break that was run into."""
    for region, uses in found.breaks.items():
        file = PurePath(region.file).name
        where = f"{file}:{region.break_line}" if file else f"line {region.break_line}"
        why = f": {region.break_reason}" if region.break_reason else ""
        calls = sum(use.calls for use in uses)
        modules = some([*dict.fromkeys(_module(run, use) for use in uses)])
        names = some([*dict.fromkeys(use.name for use in uses)])
        times = f"{calls} time{'s' if calls > 1 else ''}"
        yield printable(f"Graph break in {modules} at {where}, after region {names}, {times}{why}")


def _times(run: Run, found: Compiled) -> Iterator[str]:
    """What it took to compile, and how the time of kernels divides among layers."""
    if found.compiled:
        times = f"{found.compiled} time{'s' if found.compiled > 1 else ''}"
        yield f"torch.compile was at work {times}: {format_time(found.compiling.cpu_ns)}."
    for phase, shares in found.shares.items():
        times_of = shares.times(run)
        if whole := sum(times_of):
            one, several, unknown = (f"{time / whole:.1%}" for time in times_of)
            yield (
                f"Of {format_time(whole)} in kernels of the {phase} phase {one} are of one layer each, {several} of "
                f"several at once, and {unknown} not attributable."
            )
