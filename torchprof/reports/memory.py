"""The memory report: the peak of each device, what was allocated then, memory over time, and use by layer."""

from __future__ import annotations

from torchprof.analyze.columns import column_called
from torchprof.errors import TorchprofError, suggest
from torchprof.reports import report
from torchprof.reports.entries import keep_top, sort_entries, what_is_hidden
from torchprof.reports.memory_layers import Used, columns_of_phases, draw_entries, entries_of_device
from torchprof.reports.memory_over_time import picture
from torchprof.reports.memory_peak import about_peak, name_of_device
from torchprof.reports.notes import warnings_of
from torchprof.reports.text import check_number
from torchprof.run.run import Run
from torchprof.run.words import PHASES

_HOLDERS_SHOWN = 10


@report("memory")
def memory(
    run: Run,
    *,
    depth: int | None = None,
    sort_by: str | None = None,
    top: int | None = None,
    phase: str | None = None,
    tablefmt: str | None = None,
) -> str:
    """The peak of each device and what was alive then, memory over time, and what each layer used.

    First, for each device, by how much memory rose above what there was at the start, when and where; then what was
    alive at that moment, by kind and by layer, beside what the model had at the start (docs/memory.md says what the
    kinds are). With ``Profile(..., with_timeline=True)`` a picture of memory over time. Then a row for each layer:

    - *Allocated*, *Freed* and *Net*: what was, inside the layer and all below it;
    - *Peak*: by how much memory rose inside one call, the layers below included, at most; in backward, inside one
      unbroken stretch of its work;
    - *Activations*: the bytes of the outputs of one call; of the first, and marked so, where calls are not known to
      have been on the same shapes;
    - *Kept for backward*: what one forward call and those inside it left for backward, the mean over the calls.

    These are of forward; backward and recompute have their own, after them, where they occurred. ``phase`` ("forward",
    "backward" or "recompute") shows those of one phase alone. ``depth`` hides the layers below that depth (0: the model
    alone): what they held at the peak counts for the layer above. ``sort_by`` orders siblings by a column, largest
    first: its heading, or that in lower case with underscores. ``top`` shows only so many of what was alive (10 by
    default) and so many layers, the largest by their own figure in that column (of what they allocated where there
    is none; at the ``depth`` with all below), with those above them. ``tablefmt`` is any of tabulate's formats.

    Raises TorchprofError for a run without memory, an unknown phase, column or format, and a negative number.
    """
    check_number("depth", depth, "levels")
    check_number("top", top, "rows")
    if phase is not None and phase not in PHASES:
        raise TorchprofError(f"There is no phase {phase!r}. {suggest(str(phase), PHASES)}")
    if "cpu_allocated" not in run.meta.requested:
        raise TorchprofError(
            "This run was recorded without memory: record it with torchprof.Profile(model, profile_memory=True), "
            "or its trace with torch.profiler.profile(profile_memory=True)."
        )
    phases = list(run.phases()) if phase is None else [phase]
    columns = list(columns_of_phases(phases))
    sorting = column_called(sort_by, columns) if sort_by is not None else None
    used = [Used.of(run, one) for one in run.memory]
    parts: list[str] = []
    for at, one in enumerate(run.memory):
        parts += about_peak(run, one, depth, _HOLDERS_SHOWN if top is None else top, tablefmt)
        parts += picture(run, one)
        if not used[at].by_layers:
            continue
        lines = entries_of_device(run, at, phases, used)
        if sorting is not None:
            sort_entries(lines, sorting)
        hidden = []
        if top is not None:
            keep_top(lines, sorting or columns[0], top, depth)
            hidden = [what_is_hidden(lines, sorting or columns[0], top, depth)]
        heading = "Module" if len(run.memory) == 1 else f"Module, on {name_of_device(run, one)}"
        parts += [draw_entries(heading, lines, columns, depth, tablefmt), *hidden]
    if not run.memory:
        has_bytes = any(any(run.rows.columns[name]) for name in ("cpu_allocated", "device_allocated"))
        parts.append(
            'An older torchprof wrote this run: it knows no peaks. What each layer allocated is in the "tree" report.'
            if has_bytes
            else "No allocation was recorded."
        )
    notes = warnings_of(run)
    if any(memory.before is None for memory in run.memory):
        notes.insert(0, "What was there before the recording is unknown, and its frees: peaks may be lower than shown.")
    if run.timeline is not None and len(run.metas) > 1:
        notes.insert(0, f"Memory over time is that of rank {run.timeline.rank}: of several ranks one timeline is kept.")
    if run.memory and run.timeline is None:
        notes.insert(0, "Of a run with_timeline=True (Profile, from_trace), memory over time is drawn here.")
    return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])
