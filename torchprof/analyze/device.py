"""The report "device": busy and idle time of each device and of its streams, by kind of work. And the report "kernels":
each kernel by the operator that launched it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torchprof.analyze.operators import Kernel, kernels
from torchprof.analyze.ops import Whole, figure_columns, line_of, ranked
from torchprof.analyze.report import (
    Part,
    ReportTable,
    Section,
    TableRow,
    check_device,
    phase_cell,
    report,
    shortened,
    spaced,
    stacked,
)
from torchprof.analyze.sentences import warnings_below
from torchprof.errors import TorchprofError, printable
from torchprof.run.formats import Cell, format_number, format_share, format_time
from torchprof.run.measures import Cost
from torchprof.run.meta import Meta
from torchprof.run.run import Run
from torchprof.run.timeline import DeviceTime, StreamTime
from torchprof.run.words import LAUNCHED_BEFORE, OUTSIDE_NAME

# The device report

_HEADINGS = ("Stream", "Kernels", "Busy", "Of span", "Computing", "Communication", "Copying")


@report("device", "the time of each device: computing, overlapped and exposed communication, idle", answers="time")
def device(run: Run) -> Section:
    """The time of each device within its span: from the start of its first work to the end of its last.

    A row for each stream: the number of kernels, copies and memsets; the busy time, also as a share of the span; and
    the time of computing, of communication with other ranks, and of copies and memsets. The last row is the whole
    device; work of several streams at the same time counts once in it. Below the table: the idle time, and how much of
    the communication overlaps with computing; the rest is exposed communication. docs/device.md says which kernels are
    communication.

    Raises TorchprofError for a run without a device or without the times of its streams.
    """
    check_device(run, "has no device times")
    if not run.device_times and "device_ns" in run.rows.nonzero:
        raise TorchprofError(
            'This run has no times by stream. run.report("kernels") says how long its device was busy.'
        )
    metas = {meta.rank: meta for meta in run.metas}
    parts: list[Part] = []
    for time in run.device_times:
        name = printable(time.device) + (f" of rank {time.rank}" if len(metas) > 1 else "")
        parts += [name, *about_device(time, metas[time.rank])]
    if not parts:
        wall = run.meta.wall_ns
        parts.append(f"Nothing ran on the device{f' in {format_time(wall)}' if wall else ''}.")
    return spaced([*parts, warnings_below(run)])


def about_device(time: DeviceTime, meta: Meta) -> list[Part]:
    """The table of the streams of one device, and the sentences below it."""
    rows = [TableRow(_cells(stream, str(stream.stream), stream.kernels, time.span_ns)) for stream in time.streams]
    kernels = sum(stream.kernels for stream in time.streams)
    rows.append(TableRow(_cells(time, "(all)", kernels, time.span_ns), is_part=False))
    table = ReportTable(_HEADINGS, rows, "streams", {"device": time.device, "rank": time.rank})
    span, communication = time.span_ns, time.communication_ns
    sentences = [
        f"From its first work to its last: {format_time(span)}, busy for {_with_share(time.busy_ns, span)}, idle for "
        f"{_with_share(time.idle_ns, span)}."
    ]
    if communication:
        sentences.append(
            f"Communication: {format_time(communication)}, {_with_share(time.overlap_ns, communication)} of it at the "
            f"same time as computing, {_with_share(time.exposed_ns, communication)} exposed."
        )
    if meta.wall_ns:
        cycles = f" in {meta.cycles} cycles" if meta.cycles > 1 else ""
        sentences.append(f"Recorded for: {format_time(meta.wall_ns)}{cycles}.")
    return [table, stacked(sentences)]


def _cells(time: StreamTime | DeviceTime, name: str, kernels: int, span_ns: int) -> list[Cell]:
    share = format_share(time.busy_ns / span_ns) if span_ns else ""
    by_kind = time.compute_ns, time.communication_ns, time.copy_ns
    return [name, format_number(kernels), format_time(time.busy_ns), share, *map(format_time, by_kind)]


def _with_share(part: int, whole: int) -> str:
    return f"{format_time(part)} ({part / whole:.1%})" if whole else str(format_time(part))


# The kernels report


@report("kernels", "every kernel of a device, by the operator that launched it", answers="time")
def kernels_report(
    run: Run,
    *,
    sort_by: str | None = None,
    top: int | None = None,
    layer: Any = None,
    phase: str | None = None,
    full_names: bool = False,
) -> Section:
    """A row for each kernel, copy or memset, by the operator, the layer and the phase that launched it.

    Above the table: the busy and the idle time of each device during the recording. Shares are of the time of all rows
    except those launched before the recording. Kernel names are shown without arguments, and long names without their
    middle; ``full_names`` shows them unchanged. With several devices there is a column for the device.

    ``layer``: a path or a pattern as in ``Profile(paths=…)``; shows only work launched by these layers and the layers
    below them. Raises TorchprofError for a run without a device, and for an unknown layer or column.
    """
    sums_of = kernels(run, layer=layer, phase=phase)
    kind = run.meta.device or "device"
    columns = [column for column in figure_columns(run) if column.key in (f"{kind}_total", f"{kind}_avg", "calls")]

    def is_left_over(kernel: Kernel) -> bool:
        return kernel.op == LAUNCHED_BEFORE and kernel.layer == OUTSIDE_NAME

    recorded = sum((sums.total for kernel, sums in sums_of.items() if not is_left_over(kernel)), Cost())
    has_devices = len({kernel.device for kernel in sums_of}) > 1
    table = ranked(
        run,
        ["Kernel", "Operator", "Module", "Phase", *["Device"] * has_devices],
        [
            line_of(
                {
                    "Kernel": [kernel.name if full_names else short_kernel_name(kernel.name)],
                    "Operator": [shortened(kernel.op)],
                    "Module": [kernel.layer],
                    "Phase": [phase_cell(kernel.phase)],
                    "Device": [kernel.device],
                },
                sums,
                left_over=is_left_over(kernel),
            )
            for kernel, sums in sums_of.items()
        ],
        columns,
        columns[0],
        Whole("what all rows took", recorded, recorded),
        sort_by=sort_by,
        top=top,
    )
    return stacked([*_about_busy_devices(run), "", table])


def about_use(run: Run, what: str) -> Iterator[str]:
    """A sentence for each device: for how long it was "busy" or "idle" between its first and its last work; of the
    recorded time, if a file has no more. Work of several streams at the same time counts once."""
    walls = {meta.rank: meta.wall_ns for meta in run.metas}
    for time in run.device_use:
        which = f"{time.device} of rank {time.rank}" if len(walls) > 1 else time.device
        ns, span, wall = time.busy_ns if what == "busy" else time.idle_ns, time.span_ns, walls[time.rank]
        if time.streams:
            rest = f", of {format_time(wall)} recorded" if wall > span else ""
            share = f"{_with_share(ns, span)} of {format_time(span)} from its first to its last work{rest}"
            yield f"{which} was {what} for {share}."
        elif wall:
            yield f"{which} was {what} for {_with_share(ns, span)} of {format_time(span)} recorded."
        elif what == "busy":
            yield f"{which} was busy for {format_time(ns)}."


def _about_busy_devices(run: Run) -> Iterator[str]:
    yield from about_use(run, "busy")
    worked = {time.rank for time in run.device_use}
    for meta in run.metas:
        if meta.rank not in worked:
            of_rank = f" of rank {meta.rank}" if len(run.metas) > 1 else ""
            wall = f" in {format_time(meta.wall_ns)}" if meta.wall_ns else ""
            yield f"Nothing ran on the device{of_rank}{wall}."


_ARGUMENTS = re.compile(r"(?<=\S)\([^()]*\)|\([^()]*\)(?=\d)")
"""Also casts; not the suffix of a copy ("Memcpy DtoH (…)"), which follows a space."""
_LAMBDAS = re.compile(r"(?: const)?::(?:\{lambda#\d+\}|operator\b(?: const)?)")
_NAMESPACES = re.compile(r"\b(?:at|c10)::(?:\w+::)*")
_POINTERS = re.compile(r", Array<char\*, \d+>")
_KERNEL_WIDTH = 64


def short_kernel_name(name: str) -> str:
    """The name of a kernel without argument lists, torch's own namespaces, lambdas and pointers.

    ``void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, at::detail::Array<char*, 3>
    >(int, …)`` is ``vectorized_elementwise_kernel<4, CUDAFunctor_add<float>>``.
    """
    name = name.removeprefix("void ").removesuffix(" [clone .kd]").replace("(anonymous namespace)::", "")
    longer = ""
    while name != longer:  # from the innermost parentheses outward
        longer, name = name, _ARGUMENTS.sub("", name)
    for pattern in (_LAMBDAS, _NAMESPACES, _POINTERS):
        name = pattern.sub("", name)
    return shortened(name.replace(" >", ">"), _KERNEL_WIDTH)
