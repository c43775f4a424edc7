"""Where the time goes, largest first: which layer, and what in it. The first thing to read."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from torchprof.reports import report
from torchprof.reports.kernels import short_name
from torchprof.reports.notes import about_sums, warnings_of
from torchprof.reports.text import check_number, draw, printable
from torchprof.run.cost import format_count, format_time
from torchprof.run.lockstep import range_in_words
from torchprof.run.run import Run
from torchprof.run.words import (
    ANY_STEP,
    BETWEEN_OPS,
    FORWARD,
    LAUNCH_NOT_RECORDED,
    NOT_SELECTED_NAME,
    OUTSIDE,
    OUTSIDE_NAME,
    PHASES,
    Frame,
    is_left_over,
    is_runtime_call,
)

_USUAL_TYPE = "float32"
_UNKNOWN_LAUNCH = Frame("label", LAUNCH_NOT_RECORDED)
_NO_OPERATOR = {
    "cpu_ns": "(between ops): no operator ran; that is Python, what it calls besides torch, or waiting for a thread.",
    "device_ns": "(between ops): no operator launched it.",
}


class Where(NamedTuple):
    """A layer (by its index, negative for none), a phase by its number, and the innermost of the user's labels there,
    "" where there is none."""

    layer: int
    phase: int
    label: str

    def name(self, run: Run) -> str:
        """What users call it: the layer's path, or the name that work of no layer has, and the label."""
        if self.layer >= 0:
            name = run.layers[self.layer].name
        else:
            name = OUTSIDE_NAME if self.layer == OUTSIDE else NOT_SELECTED_NAME
        return printable(f"{name}, {self.label} (label)" if self.label else name)


class Part(NamedTuple):
    """One kind of work at one place: an operator by itself, a kernel that nobody knows the launch of, or ``(between
    ops)``: what no operator explains."""

    where: Where
    work: str


@report("top")
def top(run: Run, *, limit: int = 8, tablefmt: str | None = None) -> str:
    """The largest parts of all recorded time: an operator by itself in one layer and phase, or the time there between
    operators, which is Python and what it calls.

    On the CPU 100 % is all time of operators and ranges, and the time in which nothing at all of that ran. Where a
    device was measured, a table of its time stands first, and above it for how long it was idle. A run that only
    counted has a table of its FLOPs. The type of a layer's parameters is shown where it is not float32. A source line
    is the one at which a sampling thread saw Python most often between the operators of that part (``torchprof run``
    has such a thread), with how often that was.

    ``limit``: so many parts, ``tablefmt``: any of tabulate's formats. Raises TorchprofError for a negative number and
    an unknown format.
    """
    check_number("limit", limit, "parts")
    meta = run.meta
    sections = []
    if "device_ns" in meta.measured:
        device = (meta.device or "device").upper()
        busy = [(one, name, ns) for one in run.metas for name, ns in one.busy_ns if name != "cpu"]
        if not busy:
            sections.append(f"Nothing ran on {device}.")
        for one, name, ns in busy:
            if one.wall_ns:
                idle = max(0, one.wall_ns - ns)
                whose = f"{name} of rank {one.rank}" if len(run.metas) > 1 else name
                share = f"{idle / one.wall_ns:.1%}"
                sections.append(f"{whose} was idle for {format_time(idle)} of {format_time(one.wall_ns)} ({share}).")
        if busy:
            sections.append(_table(run, "device_ns", f"{device} time", limit, tablefmt))
    if "cpu_ns" in meta.measured:
        sections.append(_table(run, "cpu_ns", "CPU time", limit, tablefmt))
    elif "flops" in meta.measured:
        heading = "Counted FLOPs" if any(run.rows.columns["uncounted"]) else "FLOPs"
        sections.append(_table(run, "flops", heading, limit, tablefmt))
    else:
        sections.append("Neither times nor FLOPs were measured.")
    doubts = [*about_sums(run), *warnings_of(run)]
    return "\n\n".join([*sections, *(["\n".join(doubts)] if doubts else [])])


def _table(run: Run, field: str, heading: str, limit: int, tablefmt: str | None) -> str:
    show = format_count if field == "flops" else format_time
    parts = parts_of(run, field)
    whole = sum(parts.values())
    lines = source_lines(run)
    largest = parts.most_common(limit)
    table = []
    for (where, work), ns in largest:
        kind, seen = "", lines.get(where)
        if where.layer >= 0:
            layer = run.layers[where.layer]
            types = [dtype for dtype, _ in layer.dtype_bytes if dtype != _USUAL_TYPE]
            kind = ", ".join([layer.kind, *types] if layer.kind else types)
        if work == BETWEEN_OPS and seen:
            [(line, times)] = seen.most_common(1)
            work = f"{work}, at {line} ({times} of {sum(seen.values())} samples)"
        table.append(
            [
                f"{ns / whole:.1%}",
                show(ns),
                where.name(run),
                kind,
                PHASES[where.phase],
                work,
            ]
        )
    notes = []
    if any(part.work == BETWEEN_OPS for part, _ in largest):
        notes.append(_NO_OPERATOR[field])
    rest = whole - sum(ns for _, ns in largest)
    if len(parts) > len(largest):
        notes.append(f"Smaller parts are hidden: {len(parts) - len(largest)}, together {rest / whole:.1%}.")
    return "\n".join([draw(["Share", heading, "Layer", "Type", "Phase", "In"], table, tablefmt), *notes])


def parts_of(run: Run, field: str) -> Counter[Part]:
    """What each part took of ``cpu_ns``, ``device_ns`` or ``flops``. Parts of nothing are left out, and what was
    launched before the recording: it is no part of the work that was recorded."""
    columns = run.rows.columns
    chains = [(_label(frames), _work(frames)) for frames in run.rows.frames]
    left_over = [*map(is_left_over, run.rows.frames)]
    parts: Counter[Part] = Counter()
    for layer, phase, chain, ns in zip(columns["layer"], columns["phase"], columns["frames"], columns[field]):
        if left_over[chain]:
            continue
        label, work = chains[chain]
        parts[Part(Where(layer, phase, label), work)] += ns
    if field == "cpu_ns":
        nowhere = Where(OUTSIDE, PHASES.index(FORWARD), "")
        for meta in run.metas:
            covered = dict(meta.busy_ns).get("cpu")
            if covered is not None:
                parts[Part(nowhere, BETWEEN_OPS)] += max(0, meta.wall_ns - covered)
    return Counter({part: ns for part, ns in parts.items() if ns > 0})


def _label(frames: Sequence[Frame]) -> str:
    labels = [frame.name for frame in frames if frame.kind == "label" and frame.name != ANY_STEP]  # which is no place
    return labels[-1] if labels else ""


def _work(frames: Sequence[Frame]) -> str:
    """What the time of a row is spent in: its innermost operator, or none; where no operator is known to have launched
    a kernel, that. Kernels of a compiled graph that are one row of the table, as those of several layers, are one work
    here, too."""
    launcher = frames[-2] if len(frames) > 1 and frames[-1].kind == "kernel" else None
    if launcher is not None and (
        launcher == _UNKNOWN_LAUNCH or (launcher.kind == "op" and is_runtime_call(launcher.name))
    ):
        return short_name(frames[-1].name)
    inner = [frame for frame in frames if frame.kind != "kernel"]
    for frame in inner:
        if frame.kind == "kernels" or (frame is inner[-1] and frame.kind in ("region", "gc")):
            return range_in_words(frame.kind, frame.name)
    return inner[-1].name if inner and inner[-1].kind == "op" else BETWEEN_OPS


def source_lines(run: Run) -> dict[Where, Counter[str]]:
    """How often Python was seen at which source line between operators."""
    found: defaultdict[Where, Counter[str]] = defaultdict(Counter)
    columns = run.rows.columns
    for layer, phase, chain, samples in zip(columns["layer"], columns["phase"], columns["frames"], columns["calls"]):
        frames = run.rows.frames[chain]
        if frames and frames[-1].kind == "python":
            found[Where(layer, phase, _label(frames))][frames[-1].name] += samples
    return dict(found)
